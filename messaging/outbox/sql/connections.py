"""The caller's connection or session: one body of code for the sync and the async ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from sqlalchemy import Connection, Dialect, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from messaging.errors import ArgumentError
from messaging.execution import clock

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")

#: a connection or session with blocking calls
SyncConnection: TypeAlias = "Connection | Session | scoped_session[Any]"
#: a connection or session with awaitable calls
AwaitedConnection: TypeAlias = "AsyncConnection | AsyncSession | async_scoped_session[Any]"
AnyConnection: TypeAlias = "SyncConnection | AwaitedConnection"


def in_transaction(
    connection: AnyConnection, function: Callable[[Connection], T], table: Table | None = None
) -> T | Awaitable[T]:
    """Call ``function`` with the sync connection behind ``connection``, in the transaction that it has.

    Args:
        connection: of the caller.
        function: gets the sync connection.
        table: chooses the database of a session with several.

    Returns:
        The result; an awaitable of it if ``connection`` is an async one.

    Raises:
        ArgumentError: ``connection`` is none of SQLAlchemy's, or commits each statement by itself.
    """
    if isinstance(connection, Connection):
        return function(_transactional(connection))
    if isinstance(connection, (Session, scoped_session)):
        return function(_transactional(connection.connection(bind_arguments=_choosing(table))))
    if isinstance(connection, AsyncConnection):
        return connection.run_sync(lambda each: function(_transactional(each)))
    if isinstance(connection, (AsyncSession, async_scoped_session)):
        return _in_session(connection, function, table)
    raise ArgumentError(
        "connection must be a Connection, Session, AsyncConnection or AsyncSession of SQLAlchemy, "
        f"not {type(connection).__name__}"
    )


class Transactional(Protocol[P, T_co]):
    """A function of a connection or session of any kind; of an async one it returns an awaitable of its result."""

    @overload
    def __call__(self, connection: SyncConnection, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(self, connection: AwaitedConnection, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T_co]: ...


def transactional(function: Callable[Concatenate[Connection, P], T]) -> Transactional[P, T]:
    """Have a function of a sync connection take every kind of them, as :func:`in_transaction`."""

    @wraps(function)
    def call(connection: AnyConnection, *args: P.args, **kwargs: P.kwargs) -> Any:
        return in_transaction(connection, lambda each: function(each, *args, **kwargs))

    return call


async def _in_session(
    session: AsyncSession | async_scoped_session[Any], function: Callable[[Connection], T], table: Table | None
) -> T:
    connection: AsyncConnection = await session.connection(bind_arguments=_choosing(table))
    return await connection.run_sync(lambda each: function(_transactional(each)))


def _choosing(table: Table | None) -> dict[str, Any]:
    return {} if table is None else {"clause": table}


def _transactional(connection: Connection) -> Connection:
    refuse_autocommit(connection)
    return connection


def refuse_autocommit(connection: Connection) -> None:
    """Refuse a connection that commits each statement by itself: it has no transaction to take part in.

    Raises:
        ArgumentError: it does.
    """
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT" or _commits_by_itself(connection):
        raise ArgumentError("the connection is in AUTOCOMMIT mode: the outbox needs a transaction")


def _commits_by_itself(connection: Connection) -> bool:
    """Return whether the driver's connection is in autocommit mode, as an engine can set it for all of them."""
    if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
        return True
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name != "sqlite" or getattr(driver, "isolation_level", "") is not None:
        return False
    connection.execute(select(1))  # an application may send BEGIN by itself, when SQLAlchemy begins
    return not driver.in_transaction


def database_now(connection: Connection) -> datetime:
    """Return the time by the clock of the database, which all its clients share."""
    if connection.dialect.name == "postgresql":
        moment: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
        return moment
    return clock.now()  # the database is a file of this machine


def insert_or_ignore(dialect: Dialect, table: Table) -> Any:
    """Return the statement that inserts a row unless the table has one with the same primary key.

    With PostgreSQL it waits for a concurrent transaction that has inserted the same key.
    """
    insert = postgresql.insert if dialect.name == "postgresql" else sqlite.insert
    return insert(table).on_conflict_do_nothing()

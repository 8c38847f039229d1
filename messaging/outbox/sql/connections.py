"""The caller's connection or session: one body of code for the sync and the async ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from messaging.errors import ArgumentError

if TYPE_CHECKING:
    from sqlalchemy import Dialect, Table

T = TypeVar("T")

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


async def _in_session(
    session: AsyncSession | async_scoped_session[Any], function: Callable[[Connection], T], table: Table | None
) -> T:
    connection: AsyncConnection = await session.connection(bind_arguments=_choosing(table))
    return await connection.run_sync(lambda each: function(_transactional(each)))


def _choosing(table: Table | None) -> dict[str, Any]:
    return {} if table is None else {"clause": table}


def _transactional(connection: Connection) -> Connection:
    """Refuse a connection that commits each statement by itself: it has no transaction to take part in."""
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        raise ArgumentError("the connection is in AUTOCOMMIT mode: the outbox needs a transaction")
    return connection


def insert_or_ignore(dialect: Dialect, table: Table) -> Any:
    """Return the statement that inserts a row unless the table has one with the same primary key.

    With PostgreSQL it waits for a concurrent transaction that has inserted the same key.
    """
    insert = postgresql.insert if dialect.name == "postgresql" else sqlite.insert
    return insert(table).on_conflict_do_nothing()

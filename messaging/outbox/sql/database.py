"""The relay's database: a URL or an engine, sync or async, behind one awaitable call."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError as SqlArgumentError
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from messaging.errors import ArgumentError, ConfigurationError, DatabaseError, MissingExtraError
from messaging.errors.checks import check_path
from messaging.execution import on_worker
from messaging.outbox.sql.tables import check_dialect

T = TypeVar("T")

#: environment variables with the URL of the database, and with the name of a file that holds it
URL_VARIABLE: Final = "MESSAGING_DATABASE"
FILE_VARIABLE: Final = "MESSAGING_DATABASE_FILE"

#: seconds until a connection attempt to PostgreSQL fails
_CONNECT_TIMEOUT: Final = 10
#: psycopg: detect a server that is unreachable; seconds, and milliseconds for the last one
_KEEPALIVE: Final[Mapping[str, Any]] = {
    "connect_timeout": _CONNECT_TIMEOUT,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
#: milliseconds that a statement of a relay may run with PostgreSQL, and wait for a lock: it can be stopped by then
_STATEMENT_TIMEOUT: Final = 30_000
_LOCK_TIMEOUT: Final = 3_000
#: both for one transaction, which also works behind a connection pooler
_BOUNDS: Final = text(
    f"SELECT set_config('statement_timeout', '{_STATEMENT_TIMEOUT}', true), "
    f"set_config('lock_timeout', '{_LOCK_TIMEOUT}', true)"
)
#: seconds that a statement of SQLite waits for another writer
_BUSY_TIMEOUT: Final = 10


def database_url(given: str | None = None, file: str | os.PathLike[str] | None = None) -> str:
    """Return the URL of the database: ``given``, the text of ``file``, or that of the environment.

    The environment is ``MESSAGING_DATABASE``, or ``MESSAGING_DATABASE_FILE`` with the name of a file.

    Raises:
        ArgumentError: ``file`` is not the path of a file.
        ConfigurationError: no URL is given, or more than one; or the file cannot be read, or is empty.
    """
    if given is not None and file is not None:
        raise ConfigurationError("two database URLs: give one, or a file with one, not both")
    if given is None and file is None:
        given, file = os.environ.get(URL_VARIABLE) or None, os.environ.get(FILE_VARIABLE) or None
        if given is not None and file is not None:
            raise ConfigurationError(f"two database URLs: set {URL_VARIABLE} or {FILE_VARIABLE}, not both")
    if given is not None:
        return given
    if file is None:
        raise ConfigurationError(
            f"no database URL: give one, such as postgresql://host/name, or set {URL_VARIABLE} or {FILE_VARIABLE}"
        )
    try:
        found = check_path("file", file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"the file {os.fspath(file)} with the database URL: {reason}") from None
    if not found:
        raise ConfigurationError(f"the file {os.fspath(file)} with the database URL is empty")
    return found


def parse_database_url(given: str | URL) -> URL:
    """Return a URL of SQLAlchemy with a driver.

    ``postgres://`` and ``postgresql://`` without a driver mean psycopg 3.

    Raises:
        ConfigurationError: the URL does not parse, or names no supported database. The error does not repeat it, since
            it may hold a password.
        MissingExtraError: psycopg is not installed.
    """
    try:
        url = make_url(given)
    except (SqlArgumentError, ValueError):
        raise ConfigurationError(
            "the database URL does not parse; it is like postgresql://user@host/name or sqlite:///file.db"
        ) from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("postgresql", "sqlite"):
        raise ConfigurationError(f"the outbox works with postgresql and sqlite, not with {url.get_backend_name()}")
    if url.drivername == "postgresql+psycopg" and importlib.util.find_spec("psycopg") is None:
        raise MissingExtraError("postgresql", "the database driver psycopg")
    return url


def label(url: URL) -> str:
    """Return what identifies a database in logs: no user, no password, no options."""
    host = f"{url.host}:{url.port}" if url.port is not None else (url.host or "")
    return f"{url.get_backend_name()}://{host}/{url.database or ''}"


def describe(error: BaseException) -> str:
    """Return the first line of a database error, without statement and parameters, which hold payloads."""
    cause: BaseException = error
    if isinstance(error, DBAPIError) and error.orig is not None:
        cause = error.orig
    described = str(cause) if isinstance(error, (DBAPIError, OSError)) else type(error).__name__
    return (described.strip().splitlines() or [type(cause).__name__])[0]


class SqlDatabase:
    """Runs functions of a sync connection, each in a transaction of its own. On one event loop.

    A sync engine runs on worker threads. An async one runs on the loop that :meth:`run` is awaited on.

    Args:
        database: a URL, or an engine, which stays the caller's.
        is_bounded: whether a statement fails that takes long, or waits long for a lock (PostgreSQL).

    Raises:
        ConfigurationError: the URL is malformed, its driver is missing, or the database is not supported.
    """

    def __init__(self, database: str | URL | Engine | AsyncEngine, *, is_bounded: bool = False) -> None:
        self._is_own = not isinstance(database, (Engine, AsyncEngine))
        if isinstance(database, (Engine, AsyncEngine)):
            self.engine: Engine | AsyncEngine = database
        elif isinstance(database, (str, URL)):
            self.engine = _engine(parse_database_url(database))
        else:
            raise ArgumentError(f"database must be a URL, an Engine or an AsyncEngine, not {type(database).__name__}")
        check_dialect(self.engine.dialect)
        self.label: Final = label(self.engine.url)
        self._is_bounded = is_bounded and self.engine.dialect.name == "postgresql"

    @property
    def is_borrowed_async(self) -> bool:
        """Return whether the engine is an async one of the caller, which is bound to the caller's event loop."""
        return not self._is_own and isinstance(self.engine, AsyncEngine)

    async def run(self, function: Callable[[Connection], T]) -> T:
        """Call ``function`` in a transaction, commit, and return the result.

        A function of a sync engine that is cancelled here runs to its end.

        Raises:
            DatabaseError: the database failed; nothing was committed, unless the commit itself failed.
        """
        engine = self.engine
        try:
            if isinstance(engine, AsyncEngine):
                async with engine.begin() as connection:
                    return await connection.run_sync(lambda each: self._call(each, function))
            return await on_worker(lambda: self._run_sync(engine, function))
        except (SQLAlchemyError, OSError) as error:
            raise DatabaseError(f"database {self.label}: {describe(error)}") from error

    def _run_sync(self, engine: Engine, function: Callable[[Connection], T]) -> T:
        with engine.begin() as connection:
            return self._call(connection, function)

    def _call(self, connection: Connection, function: Callable[[Connection], T]) -> T:
        if self._is_bounded:
            connection.execute(_BOUNDS)
        return function(connection)

    async def close(self) -> None:
        """Close the connections of an engine that was made here."""
        if not self._is_own:
            return
        if isinstance(self.engine, AsyncEngine):
            await self.engine.dispose()
        else:
            await on_worker(self.engine.dispose)


def _engine(url: URL) -> Engine | AsyncEngine:
    options: dict[str, Any] = {"hide_parameters": True}
    try:
        dialect = url.get_dialect()
        if url.get_backend_name() == "sqlite":
            options["connect_args"] = {"timeout": _BUSY_TIMEOUT}
        else:
            # a connection that was idle is checked before use: the server may have restarted
            options |= {"pool_pre_ping": True, "pool_size": 2, "max_overflow": 2}
            if dialect.driver == "psycopg":
                options["connect_args"] = {name: value for name, value in _KEEPALIVE.items() if name not in url.query}
        return create_async_engine(url, **options) if dialect.is_async else create_engine(url, **options)
    except (NoSuchModuleError, ImportError) as error:
        name = getattr(error, "name", None)
        hint = f": pip install {name}" if name else ""
        raise ConfigurationError(f"the database driver of {url.drivername} is not installed{hint}") from None
    except SqlArgumentError as error:
        raise ConfigurationError(f"database {label(url)}: {describe(error)}") from None

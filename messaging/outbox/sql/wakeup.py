"""Wake-ups of the relay: ``LISTEN`` with PostgreSQL and psycopg 3.

A notification only shortens the wait of a relay: it looks for rows at its poll interval all the same. So a lost
notification, another driver or a connection pooler that swallows notifications delay messages and lose none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from messaging.errors.text import SafeLog
from messaging.execution import Backoff, clock
from messaging.outbox.sql.database import describe

if TYPE_CHECKING:
    from messaging.outbox.sql.database import Database

logger = SafeLog(__name__)

#: seconds between attempts to connect
_SHORTEST: Final = 0.5
_LONGEST: Final = 30.0


def can_listen(database: Database) -> bool:
    """Return whether the database and its driver can wake a relay."""
    return database.dialect.name == "postgresql" and database.dialect.driver == "psycopg"


async def listen(database: Database, channel: str, wake: Callable[[], None], name: str) -> None:
    """Call ``wake`` after each notification of ``channel``, and after each new connection, until cancelled.

    It has a connection of its own, beyond those of the engine's pool.

    Args:
        database: for which :func:`can_listen` is true.
        channel: an SQL identifier.
        wake: is called on the loop.
        name: of the relay, for logs.
    """
    pauses = Backoff(_SHORTEST, _LONGEST)
    while True:
        try:
            driver = await _connect(database, channel)
        except Exception as error:  # noqa: BLE001  # of the driver or of SQLAlchemy
            logger.debug("outbox relay '%s': cannot listen: %s; polling meanwhile", name, describe(error))
        else:
            try:
                wake()  # for notifications that were missed
                reason = await _read(driver, wake)
            finally:
                await _close(driver)
            logger.debug("outbox relay '%s': stopped listening: %s; polling meanwhile", name, reason)
        await clock.sleep(next(pauses))


async def _connect(database: Database, channel: str) -> Any:
    """Return a connection of the driver that listens. It is not the pool's, and must be closed."""
    statement = f'LISTEN "{channel}"'
    engine = database.engine
    if isinstance(engine, AsyncEngine):
        connection: Any = await engine.raw_connection()
        driver: Any = connection.driver_connection
        connection.detach()  # which forgets it
        try:
            await driver.set_autocommit(True)
            await driver.execute(statement)
        except BaseException:  # a cancellation, too
            await _close(driver)
            raise
        return driver

    def connect() -> Any:
        connection: Any = engine.raw_connection()
        driver = connection.driver_connection
        connection.detach()  # which forgets it
        try:
            driver.autocommit = True
            driver.execute(statement)
        except BaseException:
            driver.close()
            raise
        return driver

    return await database.in_thread(connect, lambda driver: driver.close())


async def _read(driver: Any, wake: Callable[[], None]) -> str:
    """Wait until the connection fails; return the reason."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()

    def readable() -> None:
        try:
            driver.pgconn.consume_input()
            notified = False
            while driver.pgconn.notifies() is not None:
                notified = True
        except Exception as error:  # noqa: BLE001  # of the driver
            loop.remove_reader(file)
            if not ended.done():
                ended.set_result(describe(error))
            return
        if notified:
            wake()

    file = driver.fileno()
    try:
        loop.add_reader(file, readable)
    except NotImplementedError:  # the loop of Windows
        return "this event loop cannot watch sockets"
    try:
        return await ended
    finally:
        loop.remove_reader(file)


async def _close(driver: Any) -> None:
    with contextlib.suppress(Exception):
        closing = driver.close()
        if closing is not None:
            await closing

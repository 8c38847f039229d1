"""A run of a relay: claims rows, has them handled, and waits for more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from messaging.environment.signals import on_failure
from messaging.errors import ClosedError, DatabaseError, DeadlineError
from messaging.errors.text import SafeLog
from messaging.execution import Backoff, clock, on_worker
from messaging.instance import Messaging, connect
from messaging.outbox.sql.administration import delete_sent
from messaging.outbox.sql.database import SqlDatabase, describe
from messaging.outbox.sql.delivery import ClaimHandling, RowDelivery, wait_until
from messaging.outbox.sql.tables import OutboxTables

logger = SafeLog(__name__)

#: claims without rows, one after the other, until the relay waits: by then it has seen every bucket
_EMPTY_CLAIMS: Final = 4
#: how often sent rows are looked through that are old enough to be deleted, seconds
_DELETE_INTERVAL: Final = 60.0
#: sent rows that are deleted at a time
_DELETE_LIMIT: Final = 10_000
#: seconds that the instance has to end: its messages are settled, or the run was cancelled
_CLOSE_TIMEOUT: Final = 1.0
#: seconds that the connection that listens has to end
_GRACE: Final = 5.0
#: pauses between attempts to connect it, seconds
_SHORTEST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0


class RelayRun:
    """One run of a relay. On one event loop, except :meth:`call`.

    Args:
        handling: of the claims of the run. Its database is closed at the end, if it was opened from a URL.
        messaging: URL of the broker, or an instance.
        tables: of the outbox.
    """

    def __init__(self, handling: ClaimHandling, messaging: str | Messaging, tables: OutboxTables) -> None:
        self._handling = handling
        self._database, self._claims = handling.database, handling.claims
        self._policy = self._claims.policy
        self._messaging = messaging
        self._tables = tables
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.woken = asyncio.Event()
        self._delete_at = 0.0
        #: whether the database was checked and the broker connected
        self.is_started = False

    def call(self, function: Callable[[], None]) -> None:
        """Call ``function`` on the loop. From any thread; nothing happens if the run has ended."""
        if function == self.stop:  # main() may begin just now: it sets the loop, and looks for this afterwards
            self._handling.is_stopping = True
        if (loop := self._loop) is not None:
            try:
                loop.call_soon_threadsafe(function)
            except RuntimeError:  # it is closed
                return

    def stop(self) -> None:
        """Claim nothing more, publish nothing more, settle the rows in flight, and end."""
        self._handling.is_stopping = True
        self._handling.stopped.set()
        self.woken.set()

    def cancel(self) -> None:
        """End without waiting for the rows in flight."""
        if self._task is not None:
            self._task.cancel()

    async def main(self, started: Callable[[], None]) -> None:
        """Run until stopped.

        Args:
            started: is called when the database was checked and the broker connected.

        Raises:
            MessagingError: the run could not start, or cannot go on.
        """
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        if self._handling.is_stopping:
            self.stop()
        instance: Messaging | None = None
        try:
            await self._database.run(self._claims.check)
            if isinstance(self._messaging, Messaging):
                instance = self._messaging
            else:
                instance = connect(self._messaging)
                if not await self._is_ready(instance):
                    return
            states = instance.connection_state.subscribe(lambda _: self.call(self.woken.set))
            listening = self._start_listening()
            self.is_started = True
            started()
            try:
                await self._relay(instance)
            finally:
                states.dispose()
                if listening is not None:
                    listening.cancel()
                    await clock.wait((listening,), timeout=_GRACE)
        finally:
            if instance is not None and instance is not self._messaging:
                await instance.aclose(_CLOSE_TIMEOUT)
            await self._database.close()

    async def _is_ready(self, instance: Messaging) -> bool:
        """Wait until the instance is connected; return ``False`` if the run is to stop before.

        An instance that starts offline is waited for by a run until idle only, for as long as for a confirmation.

        Raises:
            MessagingError: it cannot connect.
        """
        if instance.starts_offline and not self._handling.until_idle:
            return True

        async def connected() -> None:
            await instance.ready

        waits = asyncio.create_task(connected()), asyncio.create_task(self._handling.stopped.wait())
        try:
            patience = self._policy.confirm_timeout if self._handling.until_idle else None
            await clock.wait(waits, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                waits[0].result()
                return True
            if not self._handling.is_stopping:
                raise DeadlineError(f"outbox relay '{self._handling.name}': no connection to the broker")
            return False
        finally:
            for each in waits:
                each.cancel()

    def _start_listening(self) -> asyncio.Task[None] | None:
        dialect = self._database.engine.dialect
        can_listen = dialect.name == "postgresql" and dialect.driver == "psycopg"
        if self._handling.until_idle or not self._tables.notify or not can_listen:
            return None
        listening: Coroutine[Any, Any, None] = _listen(
            self._database, self._tables.outbox.name, self.woken.set, self._handling.name
        )
        return asyncio.create_task(listening)

    async def _relay(self, instance: Messaging) -> None:
        handling, empty = self._handling, 0
        handling.delivery = RowDelivery(instance, self._policy)
        try:
            while not self._handling.is_stopping:
                self.woken.clear()
                if not await self._is_connected(instance):
                    continue
                wait = self._policy.poll_interval
                try:
                    claim = await self._database.run(self._claims.claim)
                    if not claim.rows and not self._handling.until_idle:
                        retry_in = await self._database.run(self._claims.next_retry)
                        wait = min(wait, wait if retry_in is None else retry_in)
                    await self._delete_sent()
                except DatabaseError as error:
                    await self._handling.after_failure(error)
                    continue
                if claim.rows:
                    empty = 0
                    await handling.handle(claim)
                    continue
                empty += 1
                if claim.is_full and empty < _EMPTY_CLAIMS:
                    continue
                self._handling.note_recovery()
                if self._handling.until_idle:
                    return
                await wait_until(self.woken, wait)
            await handling.finish()
        finally:
            handling.cancel()

    async def _is_connected(self, instance: Messaging) -> bool:
        """Return whether the instance is connected; wait for a while if it is not.

        Raises:
            ClosedError: the instance is closed.
            DeadlineError: it is not connected, and the run is one until idle.
        """
        state = instance.connection_state.value
        if state.name == "closed":
            raise ClosedError(f"outbox relay '{self._handling.name}': the instance {instance.name!r} is closed")
        if state.is_up:
            return True
        self._handling.note_trouble(f"no connection to the broker: {state.cause or state.name}")
        if self._handling.until_idle:
            raise DeadlineError(f"outbox relay '{self._handling.name}': no connection to the broker")
        await wait_until(self.woken, self._policy.poll_interval)
        return False

    async def _delete_sent(self) -> None:
        """Delete sent rows that are older than the retention."""
        now = clock.monotonic()
        if not self._policy.retention or now < self._delete_at:
            return
        deleted = await self._database.run(
            lambda each: delete_sent(each, self._policy.retention, self._tables, _DELETE_LIMIT)
        )
        if deleted < _DELETE_LIMIT:
            self._delete_at = now + _DELETE_INTERVAL


async def _listen(database: SqlDatabase, channel: str, wake: Callable[[], None], name: str) -> None:
    """Call ``wake`` after each notification of ``channel``, and after each new connection, until cancelled.

    A notification only shortens the wait of a relay, which looks for rows at its poll interval all the same. So a lost
    notification, another driver or a connection pooler that swallows notifications delay messages and lose none. The
    connection is its own, beyond those of the engine's pool.

    Args:
        database: PostgreSQL with psycopg 3.
        channel: an SQL identifier.
        wake: is called on the loop.
        name: of the relay, for logs.
    """
    pauses = Backoff(_SHORTEST_PAUSE, _LONGEST_PAUSE)
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


async def _connect(database: SqlDatabase, channel: str) -> Any:
    """Return a connection of the driver that listens. It is not the pool's, and must be closed."""
    statement = f'LISTEN "{channel}"'
    engine = database.engine
    if isinstance(engine, AsyncEngine):
        connection: Any = await engine.raw_connection()
        driver: Any = connection.driver_connection
        connection.detach()  # which forgets it
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(_close, driver)
            await driver.set_autocommit(True)
            await driver.execute(statement)
            undo.pop_all()
        return driver

    def connect() -> Any:
        connection: Any = engine.raw_connection()
        driver = connection.driver_connection
        connection.detach()  # which forgets it
        with on_failure(driver.close):
            driver.autocommit = True
            driver.execute(statement)
        return driver

    connecting = on_worker(connect)
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        await asyncio.wait((connecting,))
        if connecting.exception() is None:
            connecting.result().close()
        raise


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

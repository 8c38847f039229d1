"""The relay: publishes the committed rows of an outbox."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ClosedError, MessagingError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Flag, clock, refuse_in_loop, seconds, start_thread
from messaging.instance import Messaging
from messaging.model import check_text
from messaging.outbox.sql.claims import Claims, RelayPolicy
from messaging.outbox.sql.database import SqlDatabase
from messaging.outbox.sql.delivery import ClaimHandling
from messaging.outbox.sql.running import RelayRun
from messaging.outbox.sql.tables import DEFAULT_TABLES, OutboxTables

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.engine import URL
    from sqlalchemy.ext.asyncio import AsyncEngine

logger = SafeLog(__name__)

_LONGEST_NAME: Final = 55
_MOST_SECONDS: Final = 1e9
_MOST_ROWS: Final = 10_000
#: seconds that a relay has to end after it was cancelled
_GRACE: Final = 5.0


@dataclass(frozen=True, slots=True)
class RelayCounters:
    """What a relay has done since it was started.

    Attributes:
        published: rows that the broker has confirmed, and that were then removed or marked.
        refused: refusals after which a row is tried again.
        dead: rows that were given up.
        open: rows that were claimed, and not published or not confirmed in time; they are tried again.
        claims: claims with at least one row.
        database_failures: failures of the database.
    """

    published: int = 0
    refused: int = 0
    dead: int = 0
    open: int = 0
    claims: int = 0
    database_failures: int = 0


class Relay:
    """Publishes the rows of an outbox whose transactions have committed. Thread safe.

    A context manager. ``with`` runs the relay in a thread of its own, ``async with`` in the running event loop::

        with Relay("postgresql://localhost/shop", "amqp://localhost"):
            ...

    Several relays may work on one outbox, in one process or on several machines. The rows of a key are published in the
    order of the commits, by one relay at a time. A row is deleted after the broker has confirmed the message. If the
    relay dies in between, or loses the database, the message is published again with the same id.

    Args:
        database: a URL such as ``postgresql://user@host/name`` or ``sqlite:///file.db``, or an ``Engine``, or an
            ``AsyncEngine``. An engine stays the caller's. An ``AsyncEngine`` needs ``async with``.
        messaging: the URL of the broker, or a :class:`~messaging.Messaging` instance, which stays the caller's.
        tables: the tables of the outbox.
        name: of the relay in logs and, with a random part, in the table of leases; by default host and process.
        batch: most rows of a claim.
        batch_bytes: most bytes of their payloads; a larger row is claimed alone.
        in_flight_per_key: unconfirmed messages of one key at a time. With 1 the order of a key is kept even if the
            broker refuses a message and accepts it later. More is faster where few keys have many messages; then up to
            so many messages may overtake one that was refused.
        confirm_timeout: seconds until the broker must have confirmed a message.
        lease: seconds after which the rows of a relay that died are claimed by another one.
        poll_interval: seconds between two looks at the outbox, where no notification comes first.
        max_attempts: refusals of the broker after which a row is dead. Dead rows stay in the table; see
            :func:`~messaging.outbox.sql.dead_rows`.
        backoff: shortest and longest pause of a key after a refusal, seconds.
        retention: seconds that sent rows stay in the table, marked as sent; 0 deletes them at once.

    Raises:
        ArgumentError: an argument is not as described.
        ConfigurationError: the URL of the database is malformed, its driver is missing, or it is not supported.
    """

    def __init__(
        self,
        database: str | URL | Engine | AsyncEngine,
        messaging: str | Messaging,
        *,
        tables: OutboxTables = DEFAULT_TABLES,
        name: str | None = None,
        batch: int = 500,
        batch_bytes: int = 16 * 2**20,
        in_flight_per_key: int = 1,
        confirm_timeout: float = 30.0,
        lease: float = 15.0,
        poll_interval: float = 1.0,
        max_attempts: int = 10,
        backoff: tuple[float, float] = (1.0, 60.0),
        retention: float = 0.0,
    ) -> None:
        check_instance("tables", tables, OutboxTables)
        if not isinstance(messaging, (str, Messaging)):
            raise ArgumentError(f"messaging must be a URL or a Messaging instance, not {type(messaging).__name__}")
        for argument, value, least in (
            ("batch", batch, 1), ("batch_bytes", batch_bytes, 1), ("in_flight_per_key", in_flight_per_key, 1),
            ("max_attempts", max_attempts, 1),
        ):  # fmt: skip
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 2**31:
                raise ArgumentError(f"{argument} must be an int from {least} to {2**31}")
        if batch > _MOST_ROWS:
            raise ArgumentError(f"batch must be at most {_MOST_ROWS} rows")
        shortest, longest = _backoff(backoff)
        self.name: Final = f"{socket.gethostname()[:32]}-{os.getpid()}" if name is None else name
        if not isinstance(self.name, str) or not 1 <= len(self.name) <= _LONGEST_NAME:
            raise ArgumentError(f"name must be a str of 1 to {_LONGEST_NAME} characters")
        check_text("name", self.name)
        owner = f"{self.name}/{uuid4().hex[:8]}"  # two relays may have the same name
        self._tables = tables
        self._given = messaging
        if not 0 <= seconds(retention, "retention") < _MOST_SECONDS:
            raise ArgumentError("retention must be a number of seconds, 0 or more")
        policy = RelayPolicy(
            _duration("confirm_timeout", confirm_timeout), in_flight_per_key, max_attempts, shortest, longest,
            _duration("lease", lease), _duration("poll_interval", poll_interval), seconds(retention), batch,
            batch_bytes,
        )  # fmt: skip
        self._claims = Claims(tables, owner, policy)
        self._database = SqlDatabase(database, is_bounded=True)
        self._run: RelayRun | None = None
        self._thread_ended: Flag | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: MessagingError | None = None
        self._counters = RelayCounters()
        self._is_used = False

    @tolerant
    def __repr__(self) -> str:
        return f"<Relay {self.name!r} of {self._database.label}>"

    @property
    def counters(self) -> RelayCounters:
        """Return what the relay has done so far."""
        return self._counters

    @property
    def is_running(self) -> bool:
        """Return whether the relay was started and has not ended, by itself or by :meth:`stop`."""
        if self._task is not None:
            return not self._task.done()
        return self._thread_ended is not None and not self._thread_ended.is_set()

    def wake(self) -> None:
        """Look for rows now. From any thread.

        For a program that commits to SQLite and relays in the same process; PostgreSQL wakes the relays itself.
        """
        if (run := self._run) is not None:
            run.call(run.woken.set)

    # --- in a thread of its own

    def start(self) -> None:
        """Check the database, connect to the broker, and start the thread of the relay. A relay starts once.

        Raises:
            ConfigurationError: the tables are missing, or have another version.
            DatabaseError: the database cannot be reached. A relay that runs waits for it instead.
            ConnectFailedError: the broker cannot be reached, as with :func:`~messaging.connect`. With the setting
                ``retry_connect`` this waits until it can be; with ``start_offline`` the relay starts without it, and
                publishes when it is there. A given instance may be without a connection, too.
            ArgumentError: the database is an ``AsyncEngine``, which needs ``async with``.
            WouldBlockError: the thread runs an event loop, which needs ``async with``, too.
        """
        self._begin(until_idle=False)

    def drain(self) -> RelayCounters:
        """Publish the rows that are ready, in the calling thread's stead, and return when none is left.

        Rows wait for a later call that another relay holds, or whose key waits after a refusal.

        Raises:
            MessagingError: as :meth:`start`; besides, the database or the broker failed, so that rows are left. A
                broker that may be away at the start is waited for during ``confirm_timeout``.
        """
        self._begin(until_idle=True)
        with on_failure(self.stop):  # by an interrupt: the thread must not go on
            self.wait()
        return self._counters

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the relay has ended, for at most ``timeout`` seconds; return whether it has.

        Raises:
            MessagingError: it ended by itself, because of this error: its instance was closed, say.
        """
        if self._thread_ended is None:
            return True
        refuse_in_loop("the end of a relay", "`await` astop()")
        ended = self._thread_ended.wait(timeout)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    def stop(self, timeout: float | None = None) -> None:
        """Stop publishing, settle the rows in flight, and wait for the end of the thread. Idempotent.

        Args:
            timeout: seconds; by default ``confirm_timeout`` and some more. Rows whose confirmation does not come by
                then stay in the outbox and are published again later.

        Raises:
            WouldBlockError: the thread runs an event loop, which needs :meth:`astop`. The relay goes on.
        """
        if self._thread_ended is not None and not self._thread_ended.is_set():
            refuse_in_loop("the end of a relay", "`await` astop()")
        self._stop_thread(timeout)

    def _stop_thread(self, timeout: float | None) -> None:
        if (run := self._run) is None or self._thread_ended is None:
            return
        patience = self._claims.policy.confirm_timeout + _GRACE if timeout is None else seconds(timeout)
        run.call(run.stop)
        if not self._thread_ended.wait(patience):
            run.call(run.cancel)
            if not self._thread_ended.wait(_GRACE):
                logger.error(
                    "outbox relay '%s': does not end: the database does not answer; its thread is abandoned",
                    self.name,
                )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _begin(self, *, until_idle: bool) -> None:
        refuse_in_loop("the start of a relay", "use `async with`")
        if self._database.is_borrowed_async:
            raise ArgumentError("an AsyncEngine belongs to the event loop that uses it: use `async with Relay(...)`")
        run = self._new_run(until_idle)  # first: a relay that is running can be stopped
        started, self._thread_ended = Flag(), Flag()

        def host() -> None:
            try:
                asyncio.run(run.main(started.set))
            except BaseException as error:  # noqa: BLE001  # start() or wait() raises it
                self._fail(error)
            finally:
                assert self._thread_ended is not None  # noqa: S101  # for mypy
                self._thread_ended.set()
                started.set()

        start_thread(host, "messaging-relay")
        with on_failure(self.stop):  # by an interrupt
            started.wait()  # each step of main() has a deadline
        if self._failure is not None and not run.is_started:
            self._thread_ended.wait(_GRACE)
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            return
        if not isinstance(error, MessagingError):
            logger.error("outbox relay '%s': ended by an unexpected error", self.name, exc_info=error)
            failure: MessagingError = MessagingError(f"the outbox relay failed: {type(error).__name__}")
            failure.__cause__ = error
            error = failure
        self._failure = error

    def _new_run(self, until_idle: bool) -> RelayRun:
        if self._is_used:
            raise ClosedError(f"outbox relay '{self.name}': a relay starts once; make a new one")
        self._is_used = True
        handling = ClaimHandling(
            self.name, self._count, until_idle=until_idle, database=self._database, claims=self._claims
        )
        self._run = run = RelayRun(handling, self._given, self._tables)
        return run

    def _count(self, **more: int) -> None:
        counters = self._counters  # changed on the relay's loop only
        self._counters = replace(counters, **{name: getattr(counters, name) + each for name, each in more.items()})

    # --- in the running event loop

    async def astart(self) -> None:
        """Start the relay in the running event loop; otherwise as :meth:`start`."""
        run = self._new_run(until_idle=False)
        started = asyncio.Event()
        self._task = asyncio.create_task(run.main(started.set), name=f"outbox relay {self.name}")
        waiting = asyncio.create_task(started.wait())
        try:
            await asyncio.wait((self._task, waiting), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            waiting.cancel()
        if self._task.done():
            self._task.result()

    async def astop(self, timeout: float | None = None) -> None:
        """Stop the relay, as :meth:`stop`, without blocking the running event loop.

        Raises:
            MessagingError: a relay of the running event loop had ended by itself, because of this error.
        """
        if (run := self._run) is None:
            return
        if (task := self._task) is None:
            await asyncio.to_thread(self._stop_thread, timeout)
            return
        patience = self._claims.policy.confirm_timeout + _GRACE if timeout is None else seconds(timeout)
        run.stop()
        done, _ = await clock.wait((task,), timeout=patience)
        if not done:
            task.cancel()
            await clock.wait((task,), timeout=_GRACE)
        if task.done() and not task.cancelled():
            task.result()

    async def __aenter__(self) -> Self:
        await self.astart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.astop()
        except MessagingError:
            if error is None:
                raise


def _duration(name: str, value: float) -> float:
    duration = seconds(value, name)
    if not 0 < duration < _MOST_SECONDS:
        raise ArgumentError(f"{name} must be a number of seconds above 0")
    return duration


def _backoff(given: Any) -> tuple[float, float]:
    try:
        shortest, longest = given
    except (TypeError, ValueError):
        raise ArgumentError("backoff must be a pair: shortest and longest pause, seconds") from None
    pair = _duration("backoff", shortest), _duration("backoff", longest)
    if pair[0] > pair[1]:
        raise ArgumentError("backoff must be a pair: shortest and longest pause, the shortest first")
    return pair

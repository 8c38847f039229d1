"""What a relay does with a claim: publish its rows, renew its lease meanwhile, settle it.

Keys are published side by side, the rows of a key one after the other. A claim does not wait for its slowest key. After
a second the rows that are done are settled, and their buckets given back; only the buckets of the other keys stay
claimed. The relay goes on with other claims meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.environment.signals import on_failure
from messaging.errors import (
    ArgumentError,
    CodecError,
    DatabaseError,
    MessagingError,
    OutboxFullError,
    PublishRefusedError,
    UnsupportedFeatureError,
)
from messaging.errors.text import SafeLog, printable
from messaging.execution import Backoff, Promise, clock
from messaging.instance import Messaging
from messaging.model import Features, Message, MessageContext, restored_context
from messaging.outbox.sql.claims import Claim, Claims, Refusal, RelayPolicy, Row
from messaging.outbox.sql.database import SqlDatabase
from messaging.outbox.sql.tables import bucket_of

logger = SafeLog(__name__)

#: a claim publishes no more rows after so many seconds, so that its buckets can be claimed by another relay
_LONGEST_CLAIM: Final = 5.0
#: seconds after which finished keys wait no longer for unfinished ones
_SLOW: Final = 1.0
#: claims that wait for slow keys at a time; then the relay waits for one of them
_MOST_SLOW: Final = 8
#: rows that are logged one by one, of each claim
_LOGGED: Final = 20
#: pauses after a failure of the database or the broker, seconds
_SHORTEST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 15.0
#: errors that come back however often the message is published
_PERMANENT: Final = (ArgumentError, UnsupportedFeatureError, CodecError)


@dataclass(slots=True)
class Delivered:
    """The outcome of the rows of a claim, as far as it is known. Rows in none of the lists stay as they are.

    Attributes:
        sent: ids of the rows that the broker has confirmed, since the last :meth:`take`.
        refused: rows that were refused, and what follows, likewise.
        keys: the keys that are not done.
        open: number of rows that have no outcome; when the delivery has ended, of rows that were not published, or
            whose outcome is unknown.
        cause: the failure of broker or connection that ended a key, the last one.
        has_stuck: whether no row was sent or refused, and rows are left.
    """

    sent: list[int] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    open: int = 0
    cause: MessagingError | None = None
    has_stuck: bool = False

    def take(self) -> tuple[list[int], list[Refusal]]:
        """Return the rows that were sent and refused since the last call."""
        taken = self.sent, self.refused
        self.sent, self.refused = [], []
        return taken


class RowDelivery:
    """Publishes rows through one instance. On one event loop."""

    def __init__(self, instance: Messaging, policy: RelayPolicy) -> None:
        self._instance = instance
        self._policy = policy
        #: whether the instance announces message ids
        self._has_ids = False
        self._contexts: BoundedCache[tuple[str, str], MessageContext] = BoundedCache(1024)

    async def deliver(self, rows: Sequence[Row], may_send: Callable[[], bool], outcome: Delivered) -> None:
        """Publish ``rows`` in their order within each key, and await the confirmations.

        Args:
            rows: the rows.
            may_send: whether to publish another row; rows that are in flight are awaited all the same.
            outcome: is filled in.
        """
        self._has_ids = Features.EXTENSION_MESSAGE_ID in self._instance.features  # a new connection may change it
        keys: dict[str, list[Row]] = {}
        for row in rows:
            keys.setdefault(row.key, []).append(row)
        outcome.keys.update(keys)
        outcome.open = len(rows)
        await asyncio.gather(*(self._deliver_key(each, may_send, outcome) for each in keys.values()))
        outcome.has_stuck = outcome.open == len(rows)

    async def _deliver_key(self, rows: Sequence[Row], may_send: Callable[[], bool], outcome: Delivered) -> None:
        in_flight: deque[tuple[Row, Promise[None]]] = deque()
        for row in rows:
            goes_on = True
            while goes_on and len(in_flight) >= self._policy.in_flight_per_key:
                goes_on = await self._settled(*in_flight.popleft(), outcome)
            if not goes_on or not may_send():
                break
            try:
                promise = self._instance.publisher.publish(self._message(row))
            except MessagingError as error:
                if not self._goes_on(row, error, outcome):
                    break
            except Exception as error:  # a defect that one row meets must not end the relay
                logger.exception("outbox: row %d cannot be published", row.id)
                if not self._refused(row, error, self._policy.retry_in(row.attempts + 1), outcome):
                    break
            else:
                promise.was_retrieved = True  # the relay may be cancelled before the outcome
                in_flight.append((row, promise))
        while in_flight:  # after a refusal of an earlier row, too: these are with the broker
            await self._settled(*in_flight.popleft(), outcome)
        outcome.keys.discard(rows[0].key)

    async def _settled(self, row: Row, promise: Promise[None], outcome: Delivered) -> bool:
        """Await the outcome of a row; return whether the next row of its key may be published."""
        try:
            await promise
        except MessagingError as error:
            return self._goes_on(row, error, outcome)
        outcome.sent.append(row.id)
        outcome.open -= 1
        return True

    def _goes_on(self, row: Row, error: MessagingError, outcome: Delivered) -> bool:
        """Note the failure of a row; return whether the next row of its key may be published."""
        if isinstance(error, _PERMANENT):
            retry_in = None
        elif isinstance(error, PublishRefusedError):
            retry_in = self._policy.retry_in(row.attempts + 1)
        else:  # the broker is away, or has not answered: no fault of the row
            if not isinstance(error, OutboxFullError):  # that one says to wait for those in flight
                outcome.cause = error
            return False
        return self._refused(row, error, retry_in, outcome)

    @staticmethod
    def _refused(row: Row, error: Exception, retry_in: float | None, outcome: Delivered) -> bool:
        outcome.open -= 1
        # a database refuses some characters, and one row must not keep the others from being settled
        outcome.refused.append(Refusal(row, f"{type(error).__name__}: {printable(str(error))}", retry_in))
        return retry_in is None  # a dead row is out of the sequence

    def _message(self, row: Row) -> Message:
        context = self._contexts.get((row.channel, row.properties))
        if context is None:
            context = self._confirmed(restored_context(row.channel, row.properties))
            self._contexts[row.channel, row.properties] = context
        if self._has_ids:
            context = context.replace(extensions={**context.extensions, Features.EXTENSION_MESSAGE_ID: row.message_id})
        return Message(row.payload, context)

    def _confirmed(self, context: MessageContext) -> MessageContext:
        """Return ``context`` with the extensions that ask the broker for a confirmation within the deadline."""
        features = self._instance.features
        extensions: dict[str, Any] = dict(context.extensions)
        if Features.EXTENSION_QOS in extensions and str(extensions[Features.EXTENSION_QOS]) == "0":
            del extensions[Features.EXTENSION_QOS]
        if Features.EXTENSION_GUARANTEED_DELIVERY in features:
            extensions[Features.EXTENSION_GUARANTEED_DELIVERY] = True
        elif Features.EXTENSION_QOS in features:
            extensions.setdefault(Features.EXTENSION_QOS, "1")
        extensions[Features.EXTENSION_TIMEOUT] = self._policy.confirm_timeout
        return context.replace(extensions=extensions)


async def wait_until(event: asyncio.Event, timeout: float) -> None:
    """Wait until ``event`` is set, for at most ``timeout`` seconds."""
    with suppress(TimeoutError):
        await clock.wait_for(event.wait(), timeout)


class ClaimHandling:
    """Publishes and settles the claims of one run. On one event loop, but for :attr:`is_stopping`.

    Args:
        name: of the relay, for logs.
        count: adds to the counters of the relay.
        until_idle: whether the run ends when no row is ready, and fails where another one waits.
        database: of the outbox.
        claims: the statements.

    Attributes:
        is_stopping: whether nothing more is to be claimed and published. Another thread may set it before the run
            has begun.
        stopped: is set when the run is to stop.
        delivery: publishes rows. Set before the first claim.
    """

    delivery: RowDelivery

    def __init__(
        self, name: str, count: Callable[..., None], *, until_idle: bool, database: SqlDatabase, claims: Claims
    ) -> None:
        self.name: Final = name
        self.count: Final = count
        self.until_idle: Final = until_idle
        self.database: Final = database
        self.claims: Final = claims
        self.is_stopping = False
        self.stopped: Final = asyncio.Event()
        self._pauses = Backoff(_SHORTEST_PAUSE, _LONGEST_PAUSE)
        #: the present failure of database or broker, for logs
        self._trouble: str | None = None
        #: claims that wait for slow keys
        self._slow: set[asyncio.Task[None]] = set()

    async def handle(self, claim: Claim) -> None:
        """Publish the rows of a claim and settle them; slow keys may be settled after the return.

        Raises:
            MessagingError: the run is one until idle, and the database or the broker failed.
        """
        self.count(claims=1)
        end = clock.monotonic() + _LONGEST_CLAIM

        def may_send() -> bool:
            now = clock.monotonic()
            return not self.is_stopping and now < claim.until and now < end

        delivered = Delivered()
        delivering = asyncio.create_task(self.delivery.deliver(claim.rows, may_send, delivered))
        renewing = asyncio.create_task(self._renew(claim))
        with on_failure(delivering.cancel), on_failure(renewing.cancel):  # by a cancellation, too
            await clock.wait((delivering,), timeout=None if self.until_idle else _SLOW)
            if not delivering.done():
                await self._settle_part(claim, delivered)
                while len(self._slow) >= _MOST_SLOW:
                    await asyncio.wait(self._slow, return_when=asyncio.FIRST_COMPLETED)
        if not delivering.done():
            task = asyncio.create_task(self._finish(claim, delivered, delivering, renewing))
            self._slow.add(task)
            task.add_done_callback(self._ended)
            return
        await self._finish(claim, delivered, delivering, renewing)
        if delivered.has_stuck:
            await self.pause()

    async def finish(self) -> None:
        """Wait for the claims with slow keys."""
        if self._slow:
            await asyncio.wait({*self._slow})

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._slow.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("outbox relay '%s': a claim failed; it ends with its lease", self.name, exc_info=error)

    def cancel(self) -> None:
        """Cancel the claims with slow keys."""
        for each in self._slow:
            each.cancel()

    async def pause(self) -> None:
        """Wait for a time that grows from call to call, or until the run is to stop."""
        await wait_until(self.stopped, next(self._pauses))

    async def after_failure(self, error: DatabaseError) -> None:
        """Count and log a failure of the database, and pause.

        Raises:
            DatabaseError: the run is one until idle.
        """
        self.count(database_failures=1)
        self.note_trouble(str(error))
        if self.until_idle:
            raise error
        await self.pause()

    def note_trouble(self, trouble: str) -> None:
        """Log ``trouble``, unless one is logged already and not over."""
        if self._trouble is None:
            logger.warning("outbox relay '%s': %s; trying again until it works", self.name, trouble)
        self._trouble = trouble

    def note_recovery(self) -> None:
        """Log that the trouble is over, if there was one; the next pause is a short one."""
        if self._trouble is not None:
            logger.warning("outbox relay '%s': works again, after: %s", self.name, self._trouble)
            self._trouble = None
        self._pauses.reset()

    async def _settle_part(self, claim: Claim, delivered: Delivered) -> None:
        """Settle the rows that are done, and give back the buckets of the keys that are."""
        busy = {bucket_of(key) for key in delivered.keys}
        free = [bucket for bucket in claim.buckets if bucket not in busy]
        claim.buckets = [bucket for bucket in claim.buckets if bucket in busy]
        await self._settle(free, *delivered.take())

    async def _finish(
        self, claim: Claim, delivered: Delivered, delivering: asyncio.Task[None], renewing: asyncio.Task[None]
    ) -> None:
        """Await the rows of a claim that are not done, and settle them."""
        try:
            await delivering
        finally:
            delivering.cancel()
            renewing.cancel()
        is_settled = await self._settle(claim.buckets, *delivered.take())
        self.count(open=delivered.open)
        if delivered.cause is None:
            if is_settled:
                self.note_recovery()
            return
        if self.until_idle:
            raise delivered.cause
        logger.warning(
            "outbox relay '%s': %d rows were not published or not confirmed: %s; they are published again",
            self.name, delivered.open, delivered.cause,
        )  # fmt: skip

    async def _settle(self, buckets: Sequence[int], sent: Sequence[int], refused: Sequence[Refusal]) -> bool:
        """Settle rows, as soon as the database is there; return ``False`` if the run is to stop before."""
        while True:
            try:
                await self.database.run(lambda each: self.claims.settle(each, buckets, sent, refused))
            except DatabaseError as error:
                if self.is_stopping or self.until_idle:
                    logger.warning(
                        "outbox relay '%s': %d published messages could not be removed from the outbox: %s; they will "
                        "be published again, with the same ids", self.name, len(sent), error,
                    )  # fmt: skip
                    if self.until_idle:
                        raise
                    return False
                await self.after_failure(error)
            else:
                break
        dead = [each for each in refused if each.retry_in is None]
        self.count(published=len(sent), dead=len(dead), refused=len(refused) - len(dead))
        self._log(refused, dead)
        return True

    async def _renew(self, claim: Claim) -> None:
        """Renew the lease of a claim in time; end the claim if another relay has taken a bucket over."""
        while True:
            await clock.sleep(self.claims.policy.lease / 3)
            began, buckets = clock.monotonic(), claim.buckets
            try:
                kept = await self.database.run(partial(self.claims.renew, buckets=buckets))
            except DatabaseError:  # the lease runs out meanwhile
                continue
            if kept >= len(buckets):
                claim.until = began + self.claims.policy.lease
            elif claim.buckets is buckets:  # not given back meanwhile
                claim.until = 0.0
                logger.warning("outbox relay '%s': lost its lease; publishing no more of this claim", self.name)
                return

    def _log(self, refused: Sequence[Refusal], dead: Sequence[Refusal]) -> None:
        for each in dead[:_LOGGED]:
            logger.error(
                "outbox relay '%s': row %d to %r is dead after %d attempts: %s; see `messaging outbox status --dead`",
                self.name, each.row.id, each.row.channel, each.row.attempts + 1, each.reason,
            )  # fmt: skip
        if len(dead) > _LOGGED:
            logger.error("outbox relay '%s': %d more rows are dead", self.name, len(dead) - _LOGGED)
        first = [each for each in refused if each.retry_in is not None and each.row.attempts == 0]
        for each in first[:_LOGGED]:
            logger.warning(
                "outbox relay '%s': row %d to %r was refused: %s; its key waits, next attempt in %.1f s",
                self.name, each.row.id, each.row.channel, each.reason, each.retry_in,
            )  # fmt: skip

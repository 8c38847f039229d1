"""The outbox: messages on their way from any number of threads to the adapter, each with a deadline.

``Publication`` is one of them, ``Outbox`` holds them all. Publishers append from any thread and wake the loop once per
burst; one task on the loop hands batches to the adapter.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging import forking
from messaging.errors import (
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    MessagingError,
    OutboxFullError,
    OutcomeUnknownError,
)
from messaging.execution import PENDING, Deadlines, Promise, Waiters, may_block, of_library
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.execution import Engine
    from messaging.model import PublishPlan

logger = SafeLog(__name__)

#: when the loop tries again to get a lock that a publisher holds, seconds
_LOCK_RETRY: Final = 0.001
#: pause of the sender after the adapter raised, seconds
_AFTER_FAILURE: Final = 0.02


class Publication(Promise[None]):
    """A message on its way out: the core's ``adapter.Outgoing``, and the promise of its own outcome.

    One object for both, because one is made for every message published. Settled on the engine's loop only; from then
    on the promise, which may be kept for long, has no payload any more.
    """

    __slots__ = (
        "correlation_id",
        "deadline",
        "is_waiting",
        "outbox",
        "payload",
        "plan",
        "sequence",
        "settled",
        "was_sent",
    )

    def __init__(self, outbox: Outbox, payload: bytes, plan: PublishPlan, deadline: float) -> None:
        # the state of the promise: spelled out, because a call of its __init__ would cost as much as all of this
        self._value = PENDING
        self._error = None
        self._listeners = None
        self.looked_at = False
        self.outbox = outbox
        self.payload = payload
        self.plan = plan
        self.correlation_id = plan.correlation_id
        #: monotonic seconds
        self.deadline = deadline
        #: position in the outbox, set by it; orders what has to be sent again
        self.sequence = 0
        #: confirmed or failed; what the adapter goes by
        self.settled = False
        #: whether a confirm is awaited, so that a loss leaves the outcome open
        self.was_sent = False
        #: in the outbox, rather than with the adapter
        self.is_waiting = True

    @property
    def what(self) -> str:
        """See ``Promise``."""
        return f"publish to {self.plan.channel!r}"

    @property
    def message_id(self) -> str:
        """Stable across retries; the application's own, or unique across instances and processes."""
        return self.plan.options.message_id or f"{self.outbox.id}-{self.sequence:x}"

    @property
    def is_inherited(self) -> bool:
        """See ``Promise``."""
        return self.outbox.generation != forking.generation

    @property
    def may_have_arrived(self) -> bool:
        """Whether it left for the broker: its confirm is awaited, or has come."""
        return self.was_sent or (self.done() and self._error is None)

    def unfinished(self, why: str) -> MessagingError:
        """Return the error of a message that fails before it is settled: whether it may arrive depends on its state."""
        if self.was_sent:
            return OutcomeUnknownError(f"{self.what}: {why} before the broker confirmed; it may arrive")
        return ClosedError(f"{self.what}: {why} before it was sent")

    def sent(self) -> None:
        """See ``adapter.Outgoing``."""
        self.was_sent = True

    def confirm(self) -> None:
        """See ``adapter.Outgoing``."""
        if not self.settled:
            self.settled = True
            self.outbox.count_settled(self)
            self._value = None
            if self._listeners is not None:
                self._notify()

    def fail(self, error: MessagingError) -> None:
        """See ``adapter.Outgoing``."""
        if self.settled:
            return
        if isinstance(error, ConnectionLostError):
            if self.outbox.retry(self):
                return
            error = self.unfinished("the instance was closed")
        self.settled = True
        self.outbox.failed += 1
        self.outbox.count_settled(self)
        self.reject(error)


class IdentifiedPublication(Publication):
    """A message with an id of the application's own that is not in its options, so that many can have the same ones.

    It travels where the id of every confirmed message does; ``plan.options.message_id`` travels everywhere.
    """

    __slots__ = ("own_id",)

    own_id: str

    @property
    def message_id(self) -> str:
        """Stable across retries, and whatever the application makes of it."""
        return self.own_id


class Outbox:
    """What waits to be published: bounded in messages and bytes, from any number of threads to one loop.

    ``_lock`` guards the counters of accepted messages and the order of ``_waiting``; publishers hold it for an
    append. The loop takes entries without it (a deque's ends are safe) and publishes what it settled in counters of
    its own. It never waits for the lock: its holder may be a thread interrupted by a signal, whose handler closes the
    instance and waits for the loop.
    """

    def __init__(self, engine: Engine, adapter: Adapter, timeout: float, max_messages: int, max_bytes: int) -> None:
        #: begins the ids of the messages; unique across instances and processes
        self.id = secrets.token_hex(8)
        #: of the process that made it, see ``forking.generation``
        self.generation = forking.generation
        self._engine = engine
        self._adapter = adapter
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        #: publishers that wait for room
        self._blocked = Waiters()
        self._room_step = max(1, max_messages // 8)
        self._room_step_bytes = max(1, max_bytes // 8)
        #: no more messages are accepted; the accepted ones are still sent
        self._refusing = False
        #: nothing more is sent
        self._closed = False
        self._accepted = self._accepted_bytes = 0
        self._waiting: deque[Publication] = deque()
        #: the sender is awake, or will be: it need not be told of another entry
        self._signalled = False
        # --- the rest belongs to the loop
        self._settled_messages = self._settled_bytes = self._offered_bytes = 0
        self._connected = False
        self._batch: list[Publication] = []
        self._in_flight: dict[int, Publication] = {}
        self._again: list[Publication] = []
        #: from the loop, on their way into ``_waiting``
        self._posted: list[Publication] = []
        self._wakeup = asyncio.Event()
        #: of all messages that are not settled
        self.deadlines = Deadlines(engine, timeout, self._expire)
        self._sender: asyncio.Task[Any] | None = None
        self.failed = 0

    # --- any thread

    @property
    def published(self) -> int:
        """Messages that were confirmed."""
        return self._settled_messages - self.failed

    @property
    def pending(self) -> int:
        """Messages accepted and not settled yet."""
        return self._accepted - self._settled_messages

    @property
    def is_accepting(self) -> bool:
        """Whether posted messages are not accepted yet, so that another one could overtake them."""
        return bool(self._posted)

    def put(self, entry: Publication, *, queue: bool = True) -> None:
        """Accept ``entry`` (and queue it for sending), waiting for room if the calling thread may block.

        An interrupt withdraws ``entry``, unless it is on its way already.

        Raises:
            ClosedError: the outbox is closed.
            OutboxFullError: no room, and the caller runs an event loop, or its deadline passed.
        """
        size = len(entry.payload)
        try:
            while True:
                with self._lock:
                    if (
                        self._accepted - self._settled_messages < self._max_messages
                        and self._accepted_bytes - self._settled_bytes + size <= self._max_bytes
                    ) or self._may_go_on(size):
                        if self._refusing:
                            raise ClosedError(f"{entry.what}: the instance {self._adapter.name!r} is closed")
                        # in one step, as far as interrupts go: assignments do not look for signals
                        sequence = self._accepted + 1
                        self._accepted, self._accepted_bytes, entry.sequence = (
                            sequence, self._accepted_bytes + size, sequence
                        )  # fmt: skip
                        if queue:
                            self._waiting.append(entry)
                        break
                self._await_room(entry, size)
            if not self._signalled:
                self._signalled = True
                self._engine.call(self._wake)
        except BaseException:
            if entry.sequence:  # an interrupt, after it was accepted
                self._signalled = False
                entry.looked_at = True
                self._engine.call(self.withdraw, entry)
            raise

    def withdraw(self, entry: Publication) -> None:
        """Fail a message whose publisher was interrupted, unless it is with the adapter. On the loop."""
        if entry.is_waiting:
            self.fail(entry, ClosedError(f"{entry.what}: publishing was interrupted"))
        self._wake()

    def _has_room(self, size: int) -> bool:
        return self._accepted - self._settled_messages < self._max_messages and (
            self._accepted_bytes - self._settled_bytes + size <= self._max_bytes
            # a message larger than the whole bound goes through alone
            or self._accepted == self._settled_messages
        )

    def _may_go_on(self, size: int) -> bool:
        return self._refusing or self._has_room(size)

    def _await_room(self, entry: Publication, size: int) -> None:
        wait = entry.deadline - time.monotonic() if may_block() else 0.0
        if wait <= 0 or not self._blocked.wait_for(lambda: self._may_go_on(size), wait):
            raise self._full(entry)

    def _full(self, entry: Publication) -> OutboxFullError:
        waiting = self._accepted_bytes - self._settled_bytes
        return OutboxFullError(
            f"{entry.what}: {self.pending} messages ({waiting} bytes) wait to be published already; "
            f"await earlier promises first, or raise outbox_size or outbox_bytes"
        )

    # --- the loop

    def start(self) -> None:
        """Start the sender. Nothing is sent before :meth:`connected`."""
        self._sender = self._engine.spawn(self._send())

    def connected(self) -> None:
        """The adapter can publish: what a lost connection left behind goes first, in its order."""
        self._connected = True
        self._requeue()
        self._wakeup.set()

    def disconnected(self) -> None:
        """Hold everything back until :meth:`connected`."""
        self._connected = False

    async def drain(self, deadline: float) -> None:
        """Wait until everything accepted is settled or ``deadline`` (loop time) passes."""
        while self.pending and (left := deadline - self._engine.loop.time()) > 0:
            self._drained = self._engine.loop.create_future()
            await asyncio.wait([self._drained], timeout=left)
        self._drained = None

    _drained: asyncio.Future[None] | None = None

    def refuse(self) -> None:
        """Accept nothing from now on."""
        self._refusing = True
        self._offer_room()

    def close(self) -> None:
        """Fail everything that is left with ``ClosedError``, or ``OutcomeUnknownError`` if it was sent."""
        self.refuse()
        self._closed = True
        if self._sender is not None:
            self._sender.cancel()
        # ``put`` may be in the middle of accepting one more: it is to signal, and have it settled
        self._signalled = False
        self.deadlines.stop()
        for entry in [*self._batch, *self._in_flight.values(), *self._again]:
            self._settle(entry, entry.unfinished("the instance was closed"))
        while self._waiting:  # one by one: ``put`` may append another
            entry = self._waiting.popleft()
            self._settle(entry, entry.unfinished("the instance was closed"))
            self._count_late(entry)
        self._in_flight.clear()
        self._again.clear()

    def abandon(self) -> None:
        """Refuse everything in a forked child, where the holder of the lock may not exist."""
        self._refusing = self._closed = True
        self._lock = threading.Lock()
        self._blocked = Waiters()

    def _wake(self) -> None:
        if self._closed:  # meanwhile, by a signal handler that interrupted ``put``
            self.close()
            return
        self._wakeup.set()
        if not self.deadlines.is_watching:
            self.deadlines.start()

    async def _send(self) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            await self._send_waiting()
            # cleared before the last look: a thread that appends after this line signals again
            self._signalled = False
            if self._waiting and self._connected:
                self._signalled = True
                self._wakeup.set()

    async def _send_waiting(self) -> None:
        while self._waiting and self._connected:
            self._batch = self._take()
            # nothing of a batch may stay in this frame: it would keep its payloads until the next one
            await self._send_batch()
            self._batch = []
            if self._blocked.flags:
                self._offer_room()
            # an adapter that never has to wait must not keep the loop from everybody else
            await asyncio.sleep(0)

    async def _send_batch(self) -> None:
        batch = self._batch
        if not batch:
            return
        if not self.deadlines.is_watching:
            self.deadlines.start()
        try:
            await of_library(self._adapter.publish(batch))
        except MessagingError as error:
            self._fail_unsettled(batch, error)
            # the loss this speaks of is reported in a moment; until then, do not spin
            await asyncio.sleep(_AFTER_FAILURE)
        except Exception as error:
            logger.exception("adapter of %r failed to publish", self._adapter.name)
            failure = MessagingError(f"the adapter failed to publish: {type(error).__name__}")
            failure.__cause__ = error
            self._fail_unsettled(batch, failure)
        for entry in batch:
            if not entry.settled and not entry.is_waiting:
                self._in_flight[entry.sequence] = entry

    def _take(self) -> list[Publication]:
        waiting = self._waiting
        batch = []
        for _ in range(min(len(waiting), self._adapter.capabilities.publish_window)):
            entry = waiting.popleft()
            if not entry.settled:
                entry.is_waiting = False
                batch.append(entry)
            else:
                self._count_late(entry)
        return batch

    @staticmethod
    def _fail_unsettled(batch: Iterable[Publication], error: MessagingError) -> None:
        for entry in batch:
            if not entry.settled and not entry.is_waiting:
                entry.fail(error)

    def count_settled(self, entry: Publication) -> None:
        """Make room for others; called by ``entry``, once."""
        self._settled_messages += 1
        self._settled_bytes += len(entry.payload)
        if not entry.plan.options.last_will:  # which the adapter hands to the broker with every connection
            del entry.payload
        if self._in_flight:
            self._in_flight.pop(entry.sequence, None)
        # publishers that wait are woken for a good many messages at once, not for each
        if self._blocked.flags and (
            self._settled_messages % self._room_step == 0
            or self._settled_bytes - self._offered_bytes >= self._room_step_bytes
        ):
            self._offer_room()
        if self._drained is not None and not self.pending and not self._drained.done():
            self._drained.set_result(None)

    def _offer_room(self) -> None:
        self._offered_bytes = self._settled_bytes
        self._blocked.wake()

    def _settle(self, entry: Publication, error: MessagingError) -> None:
        if not entry.settled:
            entry.settled = True
            self.failed += 1
            self.count_settled(entry)
            entry.reject(error)

    def fail(self, entry: Publication, error: MessagingError) -> None:
        """Fail ``entry``, unless it is settled; it is not sent any more, nor if it is put only now. On the loop."""
        if entry.sequence:
            self._settle(entry, error)
        elif not entry.settled:
            entry.settled = True
            entry.reject(error)

    @staticmethod
    def _is_uncounted(entry: Publication) -> bool:
        """Return whether a message failed before it was accepted: a settled message has no payload any more."""
        return entry.settled and hasattr(entry, "payload") and not entry.plan.options.last_will

    def _count_late(self, entry: Publication) -> None:
        if self._is_uncounted(entry):
            self.failed += 1
            self.count_settled(entry)

    def post(self, entry: Publication) -> None:
        """As :meth:`put`, but from the loop, which waits for nothing: ``entry`` fails with what ``put`` raises."""
        self._posted.append(entry)
        if len(self._posted) == 1:
            self._accept_posted()

    def _accept_posted(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._engine.loop.call_later(_LOCK_RETRY, self._accept_posted)
            return
        posted, self._posted = self._posted, []
        refused: list[Publication] = []
        try:
            for entry in posted:
                if self._refusing or not self._has_room(len(entry.payload)):
                    refused.append(entry)
                else:
                    self._accepted = entry.sequence = self._accepted + 1
                    self._accepted_bytes += len(entry.payload)
                    self._waiting.append(entry)
        finally:
            self._lock.release()
        for entry in refused:
            closed = ClosedError(f"{entry.what}: the instance {self._adapter.name!r} is closed")
            self.fail(entry, closed if self._refusing else self._full(entry))
        if not self._signalled:
            self._signalled = True
            self._wake()

    def adopt(self, will: Publication) -> None:
        """Watch over a will like over a message in flight. On the loop."""
        if self._closed:
            self._settle(will, will.unfinished("the instance was closed"))
        elif not will.settled:
            will.is_waiting = False
            self._in_flight[will.sequence] = will

    def retry(self, entry: Publication) -> bool:
        """Keep ``entry`` to be sent again after reconnecting; ``False`` if that is not to be."""
        if self._closed:
            return False
        if entry.is_waiting:
            return True  # given back before
        if entry.plan.options.last_will:
            return True  # the connection hands it over again: it must never be sent as a message
        self._in_flight.pop(entry.sequence, None)
        entry.is_waiting = True
        self._again.append(entry)
        if self._connected:
            # the adapter lost a message but not, or not yet, the connection
            self._engine.loop.call_soon(self._requeue)
        return True

    def _requeue(self) -> None:
        if not self._again:
            return
        again, waiting = self._again, self._waiting
        latest = max(entry.sequence for entry in again)
        # some may have come back before
        while waiting and waiting[0].sequence < latest:
            again.append(waiting.popleft())
        again.sort(key=lambda entry: entry.sequence)
        waiting.extendleft(reversed(again))
        again.clear()
        self._wakeup.set()

    def _purge(self) -> None:
        """Drop settled messages."""
        if self._lock.acquire(blocking=False):
            waiting = [*self._waiting]
            self._waiting.clear()
            self._waiting.extend(entry for entry in waiting if not entry.settled)
            self._lock.release()
            for entry in waiting:
                self._count_late(entry)
        else:
            self._engine.loop.call_later(_LOCK_RETRY, self._purge)

    # --- deadlines

    def _outstanding(self) -> Iterable[Publication]:
        return (*self._waiting, *self._batch, *self._in_flight.values(), *self._again)

    def _expire(self, now: float) -> float | None:
        """Fail the messages whose deadline has passed; see ``Deadlines``."""
        earliest = inf
        expired = False
        for entry in self._outstanding():
            if entry.settled:
                expired = expired or self._is_uncounted(entry)
                continue
            left = entry.deadline - now
            if left > 0:
                earliest = min(earliest, left)
                continue
            expired = True
            if entry.was_sent:
                self._settle(
                    entry,
                    OutcomeUnknownError(f"{entry.what}: sent, but not confirmed before its deadline; it may arrive"),
                )
            else:
                state = "no connection" if not self._connected else "the broker takes no more messages"
                self._settle(entry, DeadlineError(f"{entry.what}: not sent before its deadline: {state}"))
        if expired:
            # settled messages leave the queue now, also behind messages that still have time: they count no more
            self._purge()
        self._again = [entry for entry in self._again if not entry.settled]
        if self._blocked.flags:
            self._offer_room()
        return earliest if self.pending else None

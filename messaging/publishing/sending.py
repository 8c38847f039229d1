"""The way of accepted messages to the adapter: one bounded queue, and one task that sends it in batches.

:class:`Admission` accepts messages from any thread. :class:`Sender` hands them to the adapter in the order in which
they were accepted, and again after a connection loss.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ClosedError, MessagingError, OutboxFullError
from messaging.errors.text import SafeLog
from messaging.execution import Deadlines, Engine, Waiters, clock, may_block, of_library
from messaging.publishing.publication import Publication

if TYPE_CHECKING:
    from messaging.adapter import Adapter

logger = SafeLog(__name__)

#: delay until the loop tries again to acquire a lock that a publisher holds, seconds
_LOCK_RETRY: Final = 0.001
#: publishers that wait for room are woken when this part of the bounds has become free
_ROOM_STEPS: Final = 8


class Admission:
    """Accepts the messages of one instance, and counts them until they are settled.

    ``_lock`` guards the counters of accepted messages and the order of ``waiting``; publishers hold it for an
    append. The loop takes entries without it (a deque's ends are safe) and counts settled messages in counters of
    its own. It never waits for the lock: its holder may be a thread interrupted by a signal, whose handler closes the
    instance and waits for the loop.

    Args:
        engine: its loop sends the messages.
        name: of the instance, for errors.
        max_messages, max_bytes: bounds of the accepted messages that are not settled.
        wake: wakes the sender. Called on the loop.
    """

    def __init__(
        self, engine: Engine, name: str, max_messages: int, max_bytes: int, wake: Callable[[], object]
    ) -> None:
        self._engine = engine
        self._name = name
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._wake = wake
        self._lock = threading.Lock()
        #: publishers that wait for room
        self.blocked = Waiters()
        #: whether no more messages are accepted; the accepted ones are still sent
        self._is_refusing = False
        self._accepted = self._accepted_bytes = 0
        #: accepted messages that are not with the adapter, in the order of their sequence
        self.waiting: deque[Publication] = deque()
        #: whether the sender is awake, or will be: another entry needs no wake-up
        self.is_signalled = False
        # --- the rest belongs to the loop
        self.settled = self.settled_bytes = 0
        #: ``settled`` and ``settled_bytes`` from which on waiting publishers are woken again
        self._next_offer = self._next_offer_bytes = 0
        #: messages from the loop, on their way into ``waiting``
        self.posted: list[Publication] = []

    # --- any thread

    @property
    def pending(self) -> int:
        """Return the number of messages that are accepted and not settled."""
        return self._accepted - self.settled

    def put(self, entry: Publication, *, queue: bool = True) -> None:
        """Accept ``entry`` (and queue it for sending), waiting for room if the calling thread may block.

        An interrupt withdraws ``entry``, unless it is with the adapter already.

        Raises:
            ClosedError: the outbox is closed.
            OutboxFullError: no room, and the caller runs an event loop, or its deadline passed.
        """
        size = len(entry.payload)
        try:
            while True:
                with self._lock:
                    if (
                        self._accepted - self.settled < self._max_messages
                        and self._accepted_bytes - self.settled_bytes + size <= self._max_bytes
                    ) or self._may_continue(size):
                        if self._is_refusing:
                            raise self._closed(entry)
                        # in one step, as far as interrupts go: assignments do not look for signals
                        sequence = self._accepted + 1
                        self._accepted, self._accepted_bytes, entry.sequence = (
                            sequence, self._accepted_bytes + size, sequence
                        )  # fmt: skip
                        if queue:
                            self.waiting.append(entry)
                        break
                wait = entry.deadline - clock.monotonic() if may_block() else 0.0
                if wait <= 0 or not self.blocked.wait_for(lambda: self._may_continue(size), wait):
                    raise self._full(entry)
            if not self.is_signalled:
                self.is_signalled = True
                self._engine.call(self._wake)
        except BaseException:
            if entry.sequence:  # an interrupt, after it was accepted
                self.is_signalled = False
                entry.was_retrieved = True
                self._engine.call(self.withdraw, entry)
            raise

    def _has_room(self, size: int) -> bool:
        return self._accepted - self.settled < self._max_messages and (
            self._accepted_bytes - self.settled_bytes + size <= self._max_bytes
            # a message larger than the whole bound goes through alone
            or self._accepted == self.settled
        )

    def _may_continue(self, size: int) -> bool:
        return self._is_refusing or self._has_room(size)

    def _full(self, entry: Publication) -> OutboxFullError:
        return OutboxFullError(
            f"{entry.what}: {self.pending} messages ({self._accepted_bytes - self.settled_bytes} bytes) wait to be "
            f"published already; await earlier promises first, or raise outbox_size or outbox_bytes"
        )

    def _closed(self, entry: Publication) -> ClosedError:
        return ClosedError(f"{entry.what}: the instance {self._name!r} is closed")

    # --- the loop

    def withdraw(self, entry: Publication) -> None:
        """Fail a message whose publisher was interrupted, unless it is with the adapter."""
        if entry.is_waiting:
            entry.outbox.fail(entry, ClosedError(f"{entry.what}: publishing was interrupted"))
        self._wake()

    def post(self, entry: Publication) -> None:
        """Accept as :meth:`put`, but without waiting: ``entry`` fails with the error that ``put`` raises."""
        self.post_all((entry,))

    def post_all(self, entries: Sequence[Publication]) -> None:
        """Accept as :meth:`post`; stored messages, which have bounds of their own, in any case."""
        is_posting = bool(self.posted)
        self.posted.extend(entries)
        if not is_posting:
            self._accept_posted()

    def _accept_posted(self) -> None:
        if not self._lock.acquire(blocking=False):
            clock.call_later(self._engine.loop, _LOCK_RETRY, self._accept_posted)
            return
        posted, self.posted = self.posted, []
        refused: list[Publication] = []
        try:
            for entry in posted:
                if not entry.is_stored and (self._is_refusing or not self._has_room(len(entry.payload))):
                    refused.append(entry)
                else:
                    if entry.is_stored:
                        self.widen(1, len(entry.payload))
                    self._accepted = entry.sequence = self._accepted + 1
                    self._accepted_bytes += len(entry.payload)
                    self.waiting.append(entry)
        finally:
            self._lock.release()
        for entry in refused:
            entry.outbox.fail(entry, self._closed(entry) if self._is_refusing else self._full(entry))
        if not self.is_signalled:
            self.is_signalled = True
            self._wake()

    def widen(self, messages: int, size: int) -> None:
        """Widen the bounds by stored messages, which leave the room of the others as it is."""
        self._max_messages += messages
        self._max_bytes += size

    def offer_room_in_steps(self) -> None:
        """Wake the publishers that wait for room after a good many messages at once, not after each."""
        if self.settled >= self._next_offer or self.settled_bytes >= self._next_offer_bytes:
            self.offer_room()

    def offer_room(self) -> None:
        """Wake the publishers that wait for room."""
        self._next_offer = self.settled + max(1, self._max_messages // _ROOM_STEPS)
        self._next_offer_bytes = self.settled_bytes + max(1, self._max_bytes // _ROOM_STEPS)
        self.blocked.wake()

    def refuse(self) -> None:
        """Accept no more messages."""
        self._is_refusing = True
        self.offer_room()

    def purge(self) -> None:
        """Remove settled messages from the queue."""
        if not self._lock.acquire(blocking=False):
            clock.call_later(self._engine.loop, _LOCK_RETRY, self.purge)
            return
        waiting = [*self.waiting]
        self.waiting.clear()
        self.waiting.extend(entry for entry in waiting if not entry.settled)
        self._lock.release()
        for entry in waiting:
            entry.outbox.count_late(entry)

    def abandon(self) -> None:
        """Accept no more messages in a forked child, where the holder of the lock may not exist."""
        self._is_refusing = True
        self._lock = threading.Lock()
        self.blocked = Waiters()


#: pause of the sender after the adapter raised, seconds
_AFTER_FAILURE: Final = 0.02


class Sender:
    """Sends the messages of one instance in the order of their sequence. On the loop.

    The base of the outbox, which also counts the messages, and fails them at their deadlines.

    Args:
        engine: runs the task.
        adapter: publishes the messages.
        admission: accepts the messages.
        deadlines: of all messages that are not settled.

    Attributes:
        admission, deadlines: see the arguments.
        in_flight: unsettled messages that the adapter has, by sequence.
        is_connected: whether the adapter can publish.
        is_stopped: whether nothing more is sent.
    """

    def __init__(self, engine: Engine, adapter: Adapter, admission: Admission, deadlines: Deadlines) -> None:
        self._engine = engine
        self._adapter = adapter
        self.admission = admission
        self.deadlines = deadlines
        self.in_flight: dict[int, Publication] = {}
        self.is_connected = False
        self.is_stopped = False
        self._batch: list[Publication] = []
        #: messages that a lost connection left behind
        self._returned: list[Publication] = []
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Start the task. Nothing is sent before :meth:`connected`."""
        self._task = self._engine.spawn(self._run())

    def stop(self) -> None:
        """Send nothing more."""
        self.is_stopped = True
        if self._task is not None:
            self._task.cancel()

    def connected(self) -> None:
        """Send from now on: first the messages that a lost connection left behind, in their order."""
        self.is_connected = True
        self._requeue()
        self._wakeup.set()

    def disconnected(self) -> None:
        """Hold everything back until :meth:`connected`."""
        self.is_connected = False

    def outstanding(self) -> Iterable[Publication]:
        """Return the accepted messages; some may be settled."""
        return (*self.admission.waiting, *self._batch, *self.in_flight.values(), *self._returned)

    def drop_settled(self) -> None:
        """Remove the settled messages from the messages to send again."""
        self._returned = [entry for entry in self._returned if not entry.settled]

    def retry(self, entry: Publication) -> bool:
        """Send ``entry`` again after reconnecting; return ``False`` if nothing more is sent."""
        if self.is_stopped:
            return False
        if entry.is_waiting:
            return True  # returned before
        if entry.plan.options.last_will:
            return True  # the connection hands it over again: it must never be sent as a message
        self.in_flight.pop(entry.sequence, None)
        entry.is_waiting = True
        self._returned.append(entry)
        if self.is_connected:
            # the adapter lost a message but not, or not yet, the connection
            self._engine.loop.call_soon(self._requeue)
        return True

    def _requeue(self) -> None:
        if not self._returned:
            return
        returned, waiting = self._returned, self.admission.waiting
        latest = max(entry.sequence for entry in returned)
        # some may have been returned before
        while waiting and waiting[0].sequence < latest:
            returned.append(waiting.popleft())
        returned.sort(key=lambda entry: entry.sequence)
        waiting.extendleft(reversed(returned))
        returned.clear()
        self._wakeup.set()

    async def _run(self) -> None:
        admission = self.admission
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            await self._send_waiting()
            # cleared before the last look: a thread that appends after this line signals again
            admission.is_signalled = False
            if admission.waiting and self.is_connected:
                admission.is_signalled = True
                self._wakeup.set()

    async def _send_waiting(self) -> None:
        while self.admission.waiting and self.is_connected:
            self._batch = self._take()
            # nothing of a batch may stay in this frame: it would keep its payloads until the next one
            await self._send_batch()
            self._batch = []
            if self.admission.blocked.flags:
                self.admission.offer_room()
            # an adapter that never has to wait must not keep the loop from other tasks
            await asyncio.sleep(0)

    def _take(self) -> list[Publication]:
        waiting = self.admission.waiting
        batch = []
        for _ in range(min(len(waiting), self._adapter.capabilities.publish_window)):
            entry = waiting.popleft()
            if entry.settled:
                entry.outbox.count_late(entry)
            elif not entry.may_expire or entry.prepare():
                entry.is_waiting = False
                batch.append(entry)
        return batch

    async def _send_batch(self) -> None:
        batch = self._batch
        if not batch:
            return
        if not self.deadlines.is_watching:
            self.deadlines.start()
        try:
            await of_library(self._adapter.publish(batch))
        except MessagingError as error:
            self._fail_unsettled(error)
            # the connection loss that caused this is reported in a moment; until then, do not spin
            await clock.sleep(_AFTER_FAILURE)
        except Exception as error:
            logger.exception("adapter of %r failed to publish", self._adapter.name)
            failure = MessagingError(f"the adapter failed to publish: {type(error).__name__}")
            failure.__cause__ = error
            self._fail_unsettled(failure)
        for entry in batch:
            if not entry.settled and not entry.is_waiting:
                self.in_flight[entry.sequence] = entry

    def _fail_unsettled(self, error: MessagingError) -> None:
        for entry in self._batch:
            if not entry.is_waiting:
                entry.fail(error)

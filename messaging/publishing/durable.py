"""The durable outbox: messages are on disk before they are sent, and survive the process.

A message goes ``Intake.accept`` (any thread) → the journal, which stores many at once → ``_keep`` (loop) → ``_ready`` →
the sender → the broker. Its confirm settles its offset. The cursor of the journal follows the oldest offset that is
not settled, so after a crash an instance with the same path continues there.

**Memory.** ``_ready`` is bounded as the outbox in memory is. Messages beyond are only on disk. A worker thread reads
them when there is room. Their promises are known by offset, weakly: a promise that the application dropped takes no
memory.

**Duplicates.** At most ``WINDOW`` messages are sent whose confirms the cursor does not know yet. That many may be sent
again after a crash, with their message ids.

**Threads.** ``Intake.accept`` runs on any thread. The journal tells on its own thread that a publication is stored. The
cursor is stored, and records are read, on worker threads. Everything else runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakValueDictionary

from messaging.errors import (
    ClosedError,
    DeadlineError,
    MessagingError,
    OutboxFullError,
    OutcomeUnknownError,
)
from messaging.execution import may_block, workers
from messaging.journal import Journal, Record
from messaging.publishing.backlog import LOAD, Backlog, Loaded
from messaging.publishing.dead_letters import DeadLetters
from messaging.publishing.intake import Intake
from messaging.publishing.position import Position
from messaging.publishing.stored import StoredPublication

if TYPE_CHECKING:
    from messaging.execution import Deadlines, Engine
    from messaging.model import PublishPlan
    from messaging.model.settings import Settings
    from messaging.publishing.publication import Publication

logger = logging.getLogger(__name__)

#: the name of the cursor
CURSOR: Final = "outbox"
#: messages that may be sent and not recorded as confirmed: the most duplicates after a crash
WINDOW: Final = 1024
#: longest pause between two looks at the connection while closing, seconds
_LOOK: Final = 1.0
#: how long opening waits for another instance that is closing, seconds; not on an event loop
_LOCK_TIMEOUT: Final = 5.0


class Sending(Protocol):
    """The outbox in memory, which sends what the durable one hands over. On the loop."""

    id: str
    generation: int
    deadlines: Deadlines

    def send_stored(self, entries: Sequence[Publication]) -> None:
        """Send stored messages, in order."""

    def count_settled(self, entry: Publication) -> None:
        """See ``Publications``."""

    def count_late(self, entry: Publication) -> None:
        """See ``Publications``."""

    def fail(self, entry: Publication, error: MessagingError) -> None:
        """See ``Publications``."""

    @property
    def retry(self) -> Callable[[Publication], bool]:
        """See ``Publications``."""


class DurableOutbox:
    """The messages of one instance on disk. It is the outbox that its publications report to.

    Args:
        engine: its loop.
        name: of the instance.
        journal: holds the messages. It is closed with the outbox.
        sending: the outbox in memory, which sends what this one hands over.
        max_messages, max_bytes: bounds of the messages on their way to the disk, and of those in memory behind it.
    """

    def __init__(
        self, engine: Engine, name: str, journal: Journal, sending: Sending, max_messages: int, max_bytes: int
    ) -> None:
        self._engine = engine
        self._name = name
        self._journal = journal
        self._put = journal.put
        self._sending = sending
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self.id, self.generation = sending.id, sending.generation
        self.retry = sending.retry
        self.intake = Intake(engine, name, journal, self, self._keep, self._advance, max_messages, max_bytes)
        self.refuse, self.abandon = self.intake.refuse, self.intake.abandon
        self._dead_letters = DeadLetters(engine, name, journal, self.settle)
        # --- the loop
        self._position = Position(engine, name, journal.cursor(CURSOR), self._advance)
        self.backlog = Backlog(engine, name, journal, self._take_loaded)
        #: in memory and not handed over, with offsets up to ``_tail``
        self._ready: deque[StoredPublication] = deque()
        self._ready_bytes = 0
        self._tail = self._position.first
        #: the offset after the last stored message
        self._end = journal.end
        #: publications of messages that are only on disk
        self._spilled: WeakValueDictionary[int, StoredPublication] = WeakValueDictionary()
        self._is_started = False
        self._is_closed = False
        #: messages that expired, were dropped or refused without being sent
        self.failed = 0
        #: set when something is settled or stored, for :meth:`drain`
        self._progress = asyncio.Event()

    # --- any thread

    @property
    def pending(self) -> int:
        """Return the number of messages that are accepted and not settled."""
        return self.intake.pending + self._position.unsettled(self._end)

    @property
    def behind(self) -> int:
        """Return the number of accepted messages that are not handed over for sending."""
        return self.intake.pending + len(self._ready) + max(0, self._end - self._tail)

    # --- the loop: storing

    def _keep(self, publication: StoredPublication) -> None:
        """Keep a stored message in memory if it follows the ones there, and there is room."""
        self._end = publication.offset + 1
        if self._is_closed:
            self._end_promise(publication)
        elif publication.offset == self._tail and self._has_room(len(publication.payload)):
            self._tail += 1
            self._ready.append(publication)
            self._ready_bytes += len(publication.payload)
        else:
            del publication.payload
            if not publication.done():
                self._spilled[publication.offset] = publication
                self._sending.deadlines.watch(max(0.01, publication.deadline - time.monotonic()))

    def _has_room(self, size: int) -> bool:
        return not self._ready or (
            len(self._ready) < self._max_messages and self._ready_bytes + size <= self._max_bytes
        )

    # --- the loop: sending

    def start(self) -> None:
        """Send what an earlier instance has left."""
        self._is_started = True
        if self._end > self._position.first:
            logger.info(
                "%s: the outbox %s holds %d messages of an earlier instance",
                self._name,
                self._journal.path,
                self.pending,
            )
        self._advance()

    def _advance(self) -> None:
        """Hand messages over within the window, and read more from the disk."""
        if self._is_closed or not self._is_started:
            return
        self._progress.set()
        limit = self._position.stored + WINDOW
        batch: list[Publication] = []
        while self._ready and self._ready[0].offset < limit:
            publication = self._ready.popleft()
            self._ready_bytes -= len(publication.payload)
            batch.append(publication)
        if batch:
            self._sending.send_stored(batch)
        if self._tail < self._end and not self.backlog.is_loading and len(self._ready) < LOAD:
            self.backlog.load(self._tail, self._end)

    def settle(self, offset: int) -> None:
        """Note that a message needs not be sent any more."""
        self._position.settle(offset)
        self._progress.set()

    # --- the loop: from the disk

    def _take_loaded(self, loaded: Sequence[Loaded], following: int) -> None:
        if self._is_closed:
            return
        for record, plan in loaded:
            self._skip_to(record.offset)
            self._tail = record.offset + 1
            spilled = self._spilled.pop(record.offset, None)
            if isinstance(plan, MessagingError):
                if spilled is not None:
                    spilled.settled = True
                    spilled.reject(plan)
                self.failed += 1
                self._dead_letters.add(record, plan)
                continue
            publication = self._restored(record, plan, spilled)
            if publication is not None:
                self._ready.append(publication)
                self._ready_bytes += len(record.payload)
        self._skip_to(following)
        self._advance()

    def _skip_to(self, offset: int) -> None:
        """Pass over messages that the journal does not have any more: they were dropped to make room, or damaged."""
        first, self._tail = self._tail, max(self._tail, offset)
        if first >= offset:
            return
        self.failed += offset - first
        for publication in [each for each in self._spilled.values() if first <= each.offset < offset]:
            del self._spilled[publication.offset]
            publication.settled = True
            publication.reject(OutboxFullError(f"{publication.what}: dropped from the full outbox, or damaged"))
        self._position.skip(first, offset)
        self._progress.set()

    def _restored(
        self, record: Record, plan: PublishPlan, publication: StoredPublication | None
    ) -> StoredPublication | None:
        """Return the publication of a record, or ``None`` if its time to live is over."""
        time_to_live = plan.options.time_to_live
        if time_to_live is not None:
            left = time_to_live - (time.time() - record.timestamp)
            if left <= 0:
                logger.warning("%s: a message to %r expired in the outbox", self._name, record.channel)
                self.failed += 1
                if publication is not None:
                    publication.settled = True
                    publication.reject(DeadlineError(f"{publication.what}: its time to live ended in the outbox"))
                self.settle(record.offset)
                return None
            plan = plan.replace(options=replace(plan.options, time_to_live=left))
        if publication is None:
            publication = StoredPublication(self, self.intake, record.payload, plan, inf)
            publication.own_id = record.message_id or self.intake.new_id()
            publication.offset = record.offset
            publication.is_stored = True
            publication.looked_at = True
        else:
            publication.payload = record.payload
        return publication

    # --- the outbox of its publications: see ``Publications``

    def count_settled(self, entry: Publication) -> None:
        """A message is confirmed."""
        self._sending.count_settled(entry)
        self.settle(_offset(entry))

    def count_late(self, entry: Publication) -> None:
        """See ``Publications``."""
        self._sending.count_late(entry)

    def fail(self, entry: Publication, error: MessagingError) -> None:
        """Keep a message that the broker refused as a dead letter; one of a closed instance stays in the journal."""
        if entry.settled:
            return
        if not entry.is_stored:  # its publisher was interrupted
            self.intake.forget(entry)  # type: ignore[arg-type]
            entry.settled = True
            entry.reject(error)
            return
        if isinstance(error, (ClosedError, OutcomeUnknownError)):
            self._sending.fail(entry, error)
            return
        record = Record(
            _offset(entry),
            time.time(),
            entry.plan.channel,
            entry.payload,
            entry.plan.record.properties,
            entry.message_id,
        )
        self._sending.fail(entry, error)
        self._dead_letters.add(record, error)

    # --- deadlines and closing

    def expire(self, now: float) -> float | None:
        """Fail the promises of messages whose deadline has passed; return the seconds until the next one, about."""
        for publication in self._ready:
            if publication.deadline <= now:
                publication.pass_deadline()
        while (first := next(iter(self._spilled.values()), None)) is not None:
            if first.deadline > now:
                return first.deadline - now
            self._spilled.pop(first.offset, None)
            first.pass_deadline()
        return None

    async def drain(self, deadline: float, is_connected: Callable[[], bool]) -> None:
        """Wait until every message is settled; without a connection until every message is stored."""
        loop = self._engine.loop
        while (left := deadline - loop.time()) > 0:
            if not self.intake.pending and (not is_connected() or self._position.first >= self._end):
                return
            self._progress.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), min(left, _LOOK))

    def close(self) -> None:
        """End the promises of the messages that are left: they stay in the journal."""
        self._is_closed = True
        self._position.close()
        for publication in (*self._ready, *self._spilled.values()):
            self._end_promise(publication)
        self._ready.clear()

    def _end_promise(self, publication: StoredPublication) -> None:
        publication.settled = True
        publication.reject(publication.unfinished("the instance was closed"))

    async def finish(self) -> None:
        """Store the position and close the journal."""
        done: asyncio.Future[None] = self._engine.loop.create_future()

        def close() -> None:
            try:
                self._position.store_last()
            except MessagingError as error:
                logger.warning("%s: %s; messages may be sent again", self._name, error)
            try:
                self._journal.close()
            except MessagingError as error:
                logger.error("%s: the outbox was not closed in good order: %s", self._name, error)
            self._engine.call(done.set_result, None)

        workers().submit(close)
        await done
        self.intake.take_arrived()


def _offset(entry: Publication) -> int:
    offset: int = entry.offset  # type: ignore[attr-defined]
    return offset


def open_durable(engine: Engine, name: str, sending: Sending, settings: Settings) -> DurableOutbox:
    """Open the durable outbox of an instance, whose settings have an ``outbox_path``.

    Raises:
        JournalError: the folder cannot be used, or another instance uses it.
    """
    journal = Journal.open(
        settings.outbox_path or "",
        fsync=settings.outbox_fsync,
        max_bytes=settings.outbox_disk_bytes,
        full=settings.outbox_full,
        timeout=settings.timeout,
        lock_timeout=_LOCK_TIMEOUT if may_block() else 0.0,
        option="outbox_path",
    )
    try:
        return DurableOutbox(engine, name, journal, sending, settings.outbox_size, settings.outbox_bytes)
    except BaseException:
        journal.close()
        raise

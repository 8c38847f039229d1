"""The durable outbox: messages are on disk before they are sent, and survive the process.

A message goes ``accept`` (any thread) → the journal, which stores many at once → ``_take_arrived`` (loop) → ``_ready``
→ the sender → the broker. Its confirm settles its offset. The cursor of the journal follows the oldest offset that is
not settled, so after a crash an instance with the same path continues there.

**Memory.** ``_ready`` is bounded as the outbox in memory is. Messages beyond are only on disk. A worker thread reads
them when there is room. Their promises are known by offset, weakly: a promise that the application dropped takes no
memory.

**Duplicates.** At most ``WINDOW`` messages are sent whose confirms the cursor does not know yet. That many may be sent
again after a crash, with their message ids.

**Threads.** ``accept`` runs on any thread. A publication is told that it is stored on the thread of the journal. The
cursor is stored, and records are read, on worker threads. Everything else runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakValueDictionary

from messaging.bounded import BoundedCache
from messaging.errors import (
    ClosedError,
    DeadlineError,
    MessagingError,
    OutboxFullError,
    OutcomeUnknownError,
    UnsupportedFeatureError,
)
from messaging.execution import may_block, workers
from messaging.journal import Journal, Record
from messaging.publishing.admission import Admission
from messaging.publishing.stored import RecordPlan, StoredPublication

if TYPE_CHECKING:
    from messaging.execution import Deadlines, Engine
    from messaging.journal import Cursor
    from messaging.model import MessageContext, PublishPlan
    from messaging.model.settings import Settings
    from messaging.publishing.publication import Publication

logger = logging.getLogger(__name__)

#: the name of the cursor
CURSOR: Final = "outbox"
#: messages that may be sent and not recorded as confirmed: the most duplicates after a crash
WINDOW: Final = 1024
#: records that are read at a time
_LOAD: Final = 512
#: pause before the cursor is stored: confirms gather, seconds
_SAVE_PAUSE: Final = 0.003
#: pause before the cursor is stored again after a failure, seconds
_SAVE_RETRY: Final = 1.0
#: how long opening waits for another instance that is closing, seconds; not on an event loop
_LOCK_TIMEOUT: Final = 5.0
#: refused messages that are kept
_DEAD_LETTERS: Final = 10_000


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
        self._cursor: Cursor = journal.cursor(CURSOR)
        self._storing = Admission(engine, name, max_messages, max_bytes, lambda: None)
        self._storing.is_signalled = True  # nobody has to be woken: the journal does that
        self._numbers = itertools.count(1)
        #: compiles the plan of a restored context; set by the publisher
        self.compile: Callable[[MessageContext], PublishPlan] = _uncompiled
        self._plans: BoundedCache[tuple[str, str], PublishPlan] = BoundedCache(1024)
        #: stored or refused, and not seen by the loop yet; and whether the loop is about to look
        self._arrived: deque[StoredPublication] = deque()
        self._is_signalled = False
        # --- the loop
        self._position = self._saved = self._tail = self._cursor.position
        #: the offset after the last stored message
        self._end = journal.end
        #: settled offsets beyond ``_position``
        self._settled: set[int] = set()
        #: in memory and not handed over, with offsets up to ``_tail``
        self._ready: deque[StoredPublication] = deque()
        self._ready_bytes = 0
        #: publications of messages that are only on disk
        self._spilled: WeakValueDictionary[int, StoredPublication] = WeakValueDictionary()
        #: reads from the disk: the offset that comes next, and the one at which it ends
        self._records: Iterator[Record] | None = None
        self._records_next = self._records_end = -1
        self._is_loading = False
        self._is_saving = False
        self._is_started = False
        self._is_closed = False
        #: messages that expired or were refused without being sent
        self.failed = 0
        #: set when something is settled or stored, for :meth:`drain`
        self._progress = asyncio.Event()

    # --- any thread

    @property
    def pending(self) -> int:
        """Return the number of messages that are accepted and not settled."""
        return self._storing.pending + max(0, self._end - self._position - len(self._settled))

    @property
    def behind(self) -> int:
        """Return the number of accepted messages that are not handed over for sending."""
        return self._storing.pending + len(self._ready) + max(0, self._end - self._tail)

    def accept(self, payload: bytes, plan: PublishPlan, deadline: float) -> StoredPublication:
        """Accept a message; it is sent when it is stored. The plan has a :class:`RecordPlan`.

        Raises:
            ClosedError: the outbox is closed.
            OutboxFullError: too many messages wait for the disk, and the caller runs an event loop, or its deadline
                passed.
        """
        publication = StoredPublication(self, self, payload, plan, deadline)
        publication.own_id = identity = plan.options.message_id or f"{self.id}-{next(self._numbers):x}"
        publication.record = plan.record.template.encode(payload, identity)
        self._storing.put(publication, queue=False)
        try:
            self._put(publication)
        except BaseException:  # an interrupt, too
            self._engine.call(self._forget, len(payload))
            raise
        return publication

    def refuse(self) -> None:
        """Accept no more messages."""
        self._storing.refuse()

    def note_arrived(self, publication: StoredPublication) -> None:
        """Have the loop take a message that is stored, or was refused. On the thread of the journal."""
        self._arrived.append(publication)
        if not self._is_signalled:
            self._is_signalled = True
            self._engine.call(self._take_arrived)

    # --- the loop: storing

    def _forget(self, size: int) -> None:
        """Count a message of ``size`` bytes that does not wait for the disk any more."""
        storing = self._storing
        storing.settled += 1
        storing.settled_bytes += size
        if storing.blocked.flags:
            storing.offer_room_in_steps()

    def _take_arrived(self) -> None:
        self._is_signalled = False
        arrived = self._arrived
        while arrived:
            publication = arrived.popleft()
            self._forget(len(publication.payload))
            publication.record = b""
            if publication.store_error is not None:
                publication.refuse(self._refusal(publication, publication.store_error))
                continue
            publication.is_stored = True
            self._end = publication.offset + 1
            publication.tell_stored()
            if publication.plan.record.resolves:
                publication.resolve(None)
            self._keep(publication)
        self._advance()

    @staticmethod
    def _refusal(publication: StoredPublication, error: MessagingError) -> MessagingError:
        if isinstance(error, ClosedError):
            return ClosedError(f"{publication.what}: the instance was closed before the message was stored")
        refusal = OutboxFullError(f"{publication.what}: not accepted: {error}")
        refusal.__cause__ = error
        return refusal

    def _keep(self, publication: StoredPublication) -> None:
        """Keep a stored message in memory if it follows those there, and there is room."""
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
        if self._end > self._position:
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
        limit = self._saved + WINDOW
        batch: list[Publication] = []
        while self._ready and self._ready[0].offset < limit:
            publication = self._ready.popleft()
            self._ready_bytes -= len(publication.payload)
            batch.append(publication)
        if batch:
            self._sending.send_stored(batch)
        if self._tail < self._end and not self._is_loading and len(self._ready) < _LOAD:
            self._load_soon()

    def _load_soon(self) -> None:
        self._is_loading = True
        start, end = self._tail, self._end
        workers().submit(lambda: self._load(start, end))

    def settle(self, offset: int) -> None:
        """Note that a message needs not be sent any more."""
        if offset != self._position:
            self._settled.add(offset)
            return
        position = offset + 1
        while self._settled and position in self._settled:
            self._settled.remove(position)
            position += 1
        self._position = position
        self._progress.set()
        if not self._is_saving:
            self._is_saving = True
            self._engine.loop.call_later(_SAVE_PAUSE, self._save)

    def _save(self) -> None:
        position = self._position
        workers().submit(lambda: self._store_position(position))

    def _store_position(self, position: int) -> None:
        """Store the position of the cursor. On a worker thread."""
        failure: MessagingError | None = None
        try:
            self._cursor.commit(position)
        except MessagingError as error:
            failure = error
        self._engine.call(self._saved_position, position, failure)

    def _saved_position(self, position: int, failure: MessagingError | None) -> None:
        # a full disk must not stop sending: that frees it
        self._saved = max(self._saved, position)
        self._is_saving = False
        if failure is not None:
            logger.warning(
                "%s: %s; trying again in %g s; a crash until then sends messages again",
                self._name,
                failure,
                _SAVE_RETRY,
            )
        if (failure is not None or self._position > position) and not self._is_closed:
            self._is_saving = True
            self._engine.loop.call_later(_SAVE_PAUSE if failure is None else _SAVE_RETRY, self._save)
        self._advance()

    # --- reading from the disk

    def _load(self, start: int, end: int) -> None:
        """Read the next messages, from offset ``start`` on. On a worker thread, one at a time."""
        loaded: list[tuple[Record, PublishPlan | MessagingError]] = []
        failure: MessagingError | None = None
        following = start
        try:
            if self._records is None or self._records_next != start or self._records_end <= start:
                self._records = self._journal.read(max(start, self._journal.begin), end)
                self._records_end = end
            loaded.extend((record, self._plan_of(record)) for record in itertools.islice(self._records, _LOAD))
            # without a record up to the end of the iterator, the journal does not have them any more
            following = loaded[-1][0].offset + 1 if loaded else self._records_end
        except MessagingError as error:
            self._records = None
            failure = error
        self._records_next = following
        self._engine.call(self._loaded, loaded, following, failure)

    def _plan_of(self, record: Record) -> PublishPlan | MessagingError:
        key = record.channel, record.properties
        plan = self._plans.get(key)
        if plan is None:
            try:
                context = record.context
                plan = self.compile(context)
            except MessagingError as error:
                return error
            if plan.record is None:
                plan.record = RecordPlan(record.channel, context, context.extensions)
            self._plans[key] = plan
        return plan

    def _loaded(
        self,
        loaded: list[tuple[Record, PublishPlan | MessagingError]],
        following: int,
        failure: MessagingError | None,
    ) -> None:
        self._is_loading = False
        if self._is_closed:
            return
        if failure is not None:
            logger.error("%s: cannot read the outbox: %s; trying again in %g s", self._name, failure, _SAVE_RETRY)
            self._is_loading = True
            self._engine.loop.call_later(_SAVE_RETRY, self._load_soon)
            return
        for record, plan in loaded:
            self._skip_to(record.offset)
            self._tail = record.offset + 1
            publication = self._spilled.pop(record.offset, None)
            if isinstance(plan, MessagingError):
                self._dead_letter(record, plan, publication)
                continue
            publication = self._restored(record, plan, publication)
            if publication is not None:
                self._ready.append(publication)
                self._ready_bytes += len(record.payload)
        self._skip_to(following)
        self._advance()

    def _skip_to(self, offset: int) -> None:
        """Pass over messages that the journal does not have any more: they were dropped to make room, or damaged."""
        for missing in range(self._tail, offset):
            publication = self._spilled.pop(missing, None)
            if publication is not None:
                publication.settled = True
                publication.reject(OutboxFullError(f"{publication.what}: dropped from the full outbox, or damaged"))
            self.settle(missing)
        self._tail = max(self._tail, offset)

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
            publication = StoredPublication(self, self, record.payload, plan, inf)
            publication.own_id = record.message_id or f"{self.id}-{next(self._numbers):x}"
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
        self._dead_letter(record, error, None)

    def _dead_letter(self, record: Record, error: MessagingError, publication: StoredPublication | None) -> None:
        if publication is not None:
            publication.settled = True
            publication.reject(error)
            self.failed += 1
        logger.error(
            "%s: message %s to %r cannot be published: %s; it is a dead letter of %s",
            self._name, record.message_id, record.channel, error, self._journal.path,
        )  # fmt: skip
        workers().submit(lambda: self._store_dead_letter(record, f"{type(error).__name__}: {error}"))

    def _store_dead_letter(self, record: Record, reason: str) -> None:
        """Keep a message that cannot be published, then settle it. On a worker thread."""
        try:
            dropped = self._journal.add_dead_letter(record, reason, most=_DEAD_LETTERS)
            if dropped:
                logger.warning("%s: dropped the oldest dead letter: there are %d", self._name, _DEAD_LETTERS)
        except MessagingError as failure:
            logger.error("%s: %s; the message is sent again after a restart", self._name, failure)
            return
        self._engine.call(self.settle, record.offset)

    # --- deadlines and closing

    def expire(self, now: float) -> float | None:
        """Fail the promises of messages on disk whose deadline has passed; return the seconds until the next one."""
        while self._spilled:
            publication = next(iter(self._spilled.values()), None)
            if publication is None:
                return None
            if publication.deadline > now:
                return publication.deadline - now
            self._spilled.pop(publication.offset, None)
            publication.pass_deadline()
        return None

    async def drain(self, deadline: float, is_connected: Callable[[], bool]) -> None:
        """Wait until every message is settled; without a connection until every message is stored."""
        loop = self._engine.loop
        while (left := deadline - loop.time()) > 0:
            if not self._storing.pending and (not is_connected() or self._position >= self._end):
                return
            self._progress.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), min(left, _SAVE_RETRY))

    def close(self) -> None:
        """End the promises of the messages that are left: they stay in the journal."""
        self._is_closed = True
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
                self._cursor.commit(self._position)
                self._journal.close()
            except MessagingError as error:
                logger.error("%s: the outbox was not closed in good order: %s", self._name, error)
            finally:
                self._engine.call(done.set_result, None)

        workers().submit(close)
        await done
        self._take_arrived()


def _offset(entry: Publication) -> int:
    offset: int = entry.offset  # type: ignore[attr-defined]
    return offset


def _uncompiled(context: MessageContext) -> PublishPlan:
    raise UnsupportedFeatureError("outbox_path", str(context.channel))


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

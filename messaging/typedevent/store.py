"""The events of a durable history on the disk: a journal, and the thread that writes to it.

**Threads.** Publishers append an event to a bounded queue, with the lock of the bus, and do not wait. The thread
``messaging-history`` encodes the queued events and writes them in batches, one sync for each. It alone uses the journal
for writing, and closes it. Any thread reads the journal: a subscription replays it until it receives live events.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from typing import Any, Final

from messaging.dispatch import Dispatcher, TopicFilter, is_topic, parse_filter
from messaging.environment.forks import LiveObjects
from messaging.environment.signals import on_failure
from messaging.errors import JournalError, JournalRangeError, JournalUnreadableError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Flag, clock, start_thread, workers
from messaging.journal import Journal, Record, encode_record
from messaging.typedevent.durable import DurableHistory, DurableHistoryDTO, Guarantees, Sequences
from messaging.typedevent.event import PublishedEvent, StoredEvent, dump
from messaging.typedevent.history import EventHistory, RangePolicy

logger = SafeLog(__name__)

#: bytes of the newest segments that are read to fill the history in memory when a bus is opened
_REFILL_BYTES: Final = 32 * 2**20
#: events that are encoded and written at a time
_BATCH: Final = 1000
#: deadline of one write, seconds
_WRITE_TIMEOUT: Final = 30.0
#: how long closing waits for the disk, seconds
_CLOSE_TIMEOUT: Final = 10.0
#: publication times further in the future than this do not count as times of records, seconds
_SKEW: Final = 3600.0
#: policy of a topic that is kept
_ANY: Final = RangePolicy.unlimited()
#: digits of the greatest sequence
_DIGITS: Final = 20


class StoreBatch:
    """The outcomes of some records, which the thread of the journal tells, or the writing thread itself.

    Args:
        count: number of the records.
    """

    __slots__ = ("_count", "_errors", "_outcomes", "done", "first")

    def __init__(self, count: int) -> None:
        #: whether each record is stored
        self._outcomes: list[bool] = []
        self._errors: list[MessagingError] = []
        self._count = count
        #: offset of the first record that is stored
        self.first = -1
        self.done = Flag()

    def add(self, error: MessagingError | None) -> None:
        """Add an outcome."""
        if error is not None:
            self._errors.append(error)
        self._outcomes.append(error is None)
        if len(self._outcomes) == self._count:
            self.done.set()

    @property
    def stored(self) -> int:
        """The number of stored records."""
        return sum(self._outcomes)

    @property
    def error(self) -> MessagingError | None:
        """Why a record is not stored."""
        return self._errors[0] if self._errors else None


@dataclass(slots=True, eq=False)
class BatchEntry:
    """One record of a batch; see ``messaging.journal.Append``.

    Attributes:
        record, deadline, count: see there.
        batch: is told the outcome.
    """

    record: bytes
    deadline: float
    batch: StoreBatch
    count: int = field(default=1, init=False)

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        if self.batch.first < 0:
            self.batch.first = offset
        self.batch.add(None)

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        self.batch.add(error)


class EventStore:
    """The durable history of one bus, from opening to closing. Thread safe, except :meth:`put`.

    Args:
        options: where and how.
        dispatcher: of the bus; its lock guards the history.
        history: the history in memory, with its policies. It is filled with the newest events of earlier runs.

    Raises:
        JournalLockedError: another bus uses the folder.
        JournalUnreadableError: the folder holds something else, or cannot be used.
        JournalCorruptError: a file of it is damaged, and is not replaced.
        JournalFullError: the disk is full.
        JournalError: its thread cannot be started.
    """

    def __init__(self, options: DurableHistory, dispatcher: Dispatcher[Any, Any], history: EventHistory) -> None:
        self.max_pending = options.max_pending
        #: pending events that are written without gathering more
        self._enough = min(_BATCH, options.max_pending // 2)
        self._max_age = options.max_age
        self._dispatcher = dispatcher
        self._history = history
        self._title = dispatcher.name
        self._gather = options.window / 2
        self._filters: tuple[TopicFilter, ...] | None = (
            None if options.topics is None else tuple(map(parse_filter, options.topics))
        )
        #: the oldest first: put with the lock of the bus, removed by the writing thread when they have an outcome
        self._pending: deque[PublishedEvent] = deque()
        self._wake = Flag()
        #: ends the gathering of events
        self._hurry = Flag()
        self._ended = Flag()
        self._is_closing = False
        self._is_parents = False
        # --- of the writing thread
        self._stored = self._failed = 0
        self._is_failing = False
        #: timestamp of the last record: they never decrease, so that records are found by time
        self._stamp = 0.0
        #: sequence of the last record
        self._position = 0
        # --- guarded by the lock of the bus
        self._dropped = 0
        self._is_overflowing = False
        #: for readers; also after closing
        self.journal = Journal.open(
            options.path,
            max_bytes=options.max_bytes,
            max_age=options.max_age,
            full="drop_oldest",
            timeout=_WRITE_TIMEOUT,
            option="durable_history",
        )
        with on_failure(self.journal.close):
            self._guarantees = Guarantees(self.journal, options.max_bytes)
            self._sequences = Sequences(self.journal.folder, self._refill(), self._title)
            history.sequence = self._sequences.first - 1
            try:
                start_thread(self._run, "messaging-history")
            except RuntimeError as error:
                raise self.journal.folder.error(JournalError, f"cannot store events: {error}") from error
        _stores.add(self)

    def _refill(self) -> int:
        """Fill the history in memory; return the greatest sequence of the newest events."""
        history, last = self._history, 0
        policies: dict[str, RangePolicy] = {}
        journal = self.journal
        newest = (each for each in journal.read(journal.tail(_REFILL_BYTES)) if not is_copy(each))
        for record in heapq.merge(self._guarantees.read(), newest, key=sequence_of):
            sequence = sequence_of(record)
            if sequence <= last:
                continue
            last = self._position = sequence
            self._stamp = max(self._stamp, record.timestamp)
            topic = record.channel
            policy = policies.get(topic)
            if policy is None:
                policy = policies[topic] = history.effective(topic)
            if policy.maximum and is_topic(topic):
                event = PublishedEvent(topic, StoredEvent(record.payload))
                event.sequence = sequence
                history.append(event, policy)
        if not last and journal.end > journal.begin:
            raise journal.folder.error(JournalUnreadableError, "it holds messages, and no events of a typed event bus")
        return last

    # --- publishers

    def stores(self, topic: str, policy: RangePolicy) -> bool:
        """Return whether the events of a topic with this policy are stored."""
        if self._filters is None:
            return policy.maximum > 0
        return any(each.matches(topic) for each in self._filters)

    def put(self, event: PublishedEvent) -> None:
        """Store a numbered event soon, or drop it. Never waits. Called with the lock of the bus."""
        pending = self._pending
        waiting = len(pending)
        if waiting >= self.max_pending or self._is_closing:
            self._dropped += 1
            if not self._is_overflowing and not self._is_parents:
                self._is_overflowing = True
                workers().submit(self._log_overflow)  # not here: log handlers may take any lock
            return
        pending.append(event)
        if not self._wake.is_set():
            self._wake.set()
        if waiting >= self._enough and not self._hurry.is_set():
            self._hurry.set()
        if self._is_overflowing and waiting * 2 < self.max_pending:
            self._is_overflowing = False

    def _log_overflow(self) -> None:
        logger.error(
            "%s: %d events wait for the disk: dropping new events from the durable history until half are stored",
            self._title,
            self.max_pending,
        )

    def pending(self) -> list[PublishedEvent]:
        """Return the events without an outcome, the oldest first. Called with the lock of the bus."""
        return _in_order(self._pending.copy())

    # --- readers

    def read(self, offset: int) -> Iterator[Record]:
        """Yield the records from an offset on, or from the oldest one on if that is gone. Also after closing.

        Raises:
            JournalError: a file cannot be read.
        """
        while True:
            try:
                yield from self.journal.stored(max(offset, self.journal.begin))
            except JournalRangeError:  # the oldest records were dropped just now; nothing was read yet
                continue
            return

    # --- the writing thread

    def _run(self) -> None:
        try:
            while not self._is_parents:
                self._wake.wait()
                if not self._is_closing and self._gather:
                    self._hurry.wait(self._gather)
                self._wake.clear()
                self._hurry.clear()
                is_last = self._is_closing  # read before the queue: nothing is put any more
                while self._pending:
                    count = min(_BATCH, len(self._pending))
                    self._write(_in_order(self._pending[each] for each in range(count)))
                if is_last:
                    self._sequences.release(self._history.sequence)
                    return
                self._sequences.note_used(self._history.sequence)
        except Exception:  # a defect: the bus goes on without it
            logger.exception("%s: the thread of the durable history failed; no further events are stored", self._title)
            self._is_closing = True
        finally:
            self._finish()

    def _write(self, events: list[PublishedEvent]) -> None:
        """Store the oldest pending events, or count them as failed."""
        stored = written = 0
        try:
            records = [each for each in map(self._record_of, events) if each is not None]
            batch = self._store(records)
            stored, written = batch.stored, sum(map(len, records))
        finally:
            self._stored += stored
            self._failed += len(events) - stored
            for _ in events:
                self._pending.popleft()
        self._position = events[-1].sequence
        self._note_failure(batch)
        if self._guarantees.is_due(written):
            self._copy_guaranteed()

    def _store(self, records: list[bytes]) -> StoreBatch:
        """Write records, and wait for their outcomes."""
        batch = StoreBatch(len(records))
        for record in records:
            entry = BatchEntry(record, clock.monotonic() + _WRITE_TIMEOUT, batch)
            try:
                self.journal.put(entry)
            except MessagingError as error:
                entry.note_refused(error)
        while records and not batch.done.wait(_WRITE_TIMEOUT):
            logger.error(
                "%s: the disk has not stored %d events in %g s; still waiting",
                self._title,
                len(records),
                _WRITE_TIMEOUT,
            )
        return batch

    def _copy_guaranteed(self) -> None:
        """Store the events that minima guarantee again, so that they are not among the oldest records."""
        oldest = -math.inf if self._max_age is None else clock.wall() - self._max_age
        records: list[bytes] = []
        size = 0
        with self._dispatcher.lock:
            guaranteed = self._history.guaranteed()
        for event in guaranteed:
            if not self.stores(event.topic, _ANY):
                continue
            record = self._record_of(event, self._position) if event.time >= oldest else None
            if record is not None:
                records.append(record)
                size += len(record)
            if size > self._guarantees.limit:
                logger.warning(
                    "%s: the events that minima guarantee have more than %d bytes: after a restart, the oldest of them "
                    "may be missing",
                    self._title, self._guarantees.limit,
                )  # fmt: skip
                break
        batch = self._store(records[::-1])
        if batch.stored == len(records) and records:
            try:
                self._guarantees.note(batch.first, len(records))
            except JournalError as error:
                logger.error("%s: %s; tried again later", self._title, error)

    def _record_of(self, event: PublishedEvent, position: int | None = None) -> bytes | None:
        """Return the record of an event, ``None`` if it has none; with ``position`` that of a copy."""
        now = clock.wall()
        self._stamp = max(self._stamp, now, min(event.time, now + _SKEW))
        try:
            payload = dump(event, self.journal.id)
            number = str(event.sequence) if position is None else f"{event.sequence}@{position}"
            return encode_record(event.topic, payload, message_id=number, timestamp=self._stamp)
        except MessagingError as error:
            logger.error("%s: an event on %r is not stored: %s", self._title, event.topic, error)
            return None

    def _note_failure(self, batch: StoreBatch) -> None:
        if batch.error is not None and not self._is_failing:
            logger.error("%s: cannot store events: %s; the next ones are tried", self._title, batch.error)
            self._is_failing = True
        elif batch.error is None and batch.stored and self._is_failing:
            logger.warning("%s: events are stored again; %d are lost so far", self._title, self._failed)
            self._is_failing = False

    def _finish(self) -> None:
        """Close the journal."""
        if self._is_parents:
            return
        try:
            self.journal.close()
        except MessagingError as error:
            logger.error("%s: cannot close its durable history: %s", self._title, error)
        finally:
            self._ended.set()

    # --- state

    def get_dto(self) -> DurableHistoryDTO:
        """Return a snapshot."""
        journal = self.journal
        return DurableHistoryDTO(
            path=journal.path,
            stored=self._stored,
            pending=len(self._pending),
            dropped=self._dropped,
            failed=self._failed,
            bytes=journal.size,
        )

    def close(self) -> None:
        """Store the pending events and release the folder; idempotent. Waits up to ten seconds.

        No event is put any more. If the disk takes longer, the rest is stored in the background.
        """
        self._is_closing = True
        self._wake.set()
        self._hurry.set()
        if not self._ended.wait(_CLOSE_TIMEOUT):
            logger.error(
                "%s: the disk has not stored %d events of its history in %g s; they may be lost",
                self._title,
                len(self._pending),
                _CLOSE_TIMEOUT,
            )

    def after_fork(self) -> None:
        """See ``Forkable``: the folder belongs to the parent; the child stores nothing."""
        self._is_parents = self._is_closing = True
        self._pending = deque()
        self._wake, self._hurry, self._ended = Flag(), Flag(), Flag()
        self._ended.set()


#: the stores of open buses
_stores: Final = LiveObjects[EventStore]()


def _in_order(events: Iterable[PublishedEvent]) -> list[PublishedEvent]:
    """Sort events: a signal handler may have published between the numbering and the queueing of another event."""
    return sorted(events, key=attrgetter("sequence"))


def sequence_of(record: Record) -> int:
    """Return the sequence of a recorded event; 0 for any other record."""
    return _number((record.message_id or "").partition("@")[0])


def position_of(record: Record) -> int:
    """Return the greatest sequence up to a record, which does not decrease from record to record."""
    sequence, _, position = (record.message_id or "").partition("@")
    return _number(position or sequence)


def is_copy(record: Record) -> bool:
    """Return whether a record is a copy of an earlier one."""
    return "@" in (record.message_id or "")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else 0


#: records that are left when the subscription joins the live events: they are read while live events are queued
NEAR: Final = 1000


#: by which a time as a float may differ from the time that it stands for, seconds
_PRECISION: Final = 1e-5


def is_since(event: PublishedEvent, since: int | datetime) -> bool:
    """Return whether an event has the sequence or the publication time ``since``, or a later one."""
    return event.sequence >= since if isinstance(since, int) else event.publication_time >= since


def replayed(
    store: EventStore,
    since: int | datetime,
    accepts: Callable[[str], bool],
    join: Callable[[], tuple[int, list[PublishedEvent]]],
    missed: Callable[[int], object],
    live_from: int = sys.maxsize,
) -> Iterator[PublishedEvent | None]:
    """Yield the events of a durable history in the order of their sequences, without loading all of them.

    Where it is near the end it calls ``join``, and goes on with the rest. Used by one thread at a time.

    Args:
        store: the durable history.
        since: sequence or publication time of the first event, inclusive. A time has a zone.
        accepts: whether a topic is wanted.
        join: has the subscription receive all events that are published from now on. Returns the greatest sequence of
            the events before, and the events that wait for the disk.
        missed: called with the number of events that the bounds of the history dropped before they were read.
        live_from: least sequence of events published after the subscription, which are wanted whatever ``since`` is.

    Yields:
        Events; ``None`` between records that are left out, so that the caller can stop.

    Raises:
        JournalError: a file cannot be read.
    """
    offset = store.journal.seek(lambda record: position_of(record) < live_from and _is_before(record, since))
    last = 0
    if isinstance(since, int):
        since = min(since, live_from)

    def is_asked_for(event: PublishedEvent) -> bool:
        return event.sequence >= live_from or is_since(event, since)

    def wanted(record: Record) -> PublishedEvent | None:
        nonlocal offset, last
        if record.offset > offset and offset < store.journal.begin:
            missed(min(record.offset, store.journal.begin) - offset)
        offset = record.offset + 1
        sequence = sequence_of(record)
        if sequence <= last or (isinstance(since, int) and sequence < since):
            return None
        last = sequence
        if not accepts(record.channel):
            return None
        event = StoredEvent(record.payload).load()
        return event if event is not None and is_asked_for(event) else None

    while (end := store.journal.end) - offset > NEAR:
        yield from map(wanted, store.read(offset))
        offset = max(offset, end)  # records before it that were not read are damaged
    greatest, pending = join()
    for record in store.read(offset):
        if sequence_of(record) > greatest:
            break
        yield wanted(record)
    yield from (each for each in pending if each.sequence > last and accepts(each.topic) and is_asked_for(each))


def _is_before(record: Record, since: int | datetime) -> bool:
    """Return whether a record, and so all before it, are before ``since``: timestamps of records do not decrease."""
    if isinstance(since, int):
        return position_of(record) < since
    return record.timestamp < since.timestamp() - _PRECISION

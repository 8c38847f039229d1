"""Events on the disk, for several listeners: one journal, which each listener reads at its own pace.

A record holds one event as a line (:mod:`messaging.remoteevent.layout`). Its channel names the kind of the event, so
that readers pass over kinds that they do not want without decoding them.

**Threads.** Any thread stores events. The outcomes of a batch are noted on the thread that wrote its last record, which
must not be kept: callbacks there are quick. A queue is read by one thread at a time, its delivery's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import BoundReachedError, DecodeError, JournalError, JournalFullError, MessagingError
from messaging.eventdata import write_json
from messaging.execution import Promise, workers
from messaging.journal import Journal, RecordTemplate
from messaging.remoteevent.layout import decode_event
from messaging.text import SafeLog

if TYPE_CHECKING:
    from pathlib import Path

    from messaging.journal import Append, Cursor, JournalTable, Record
    from messaging.journal.commit import Fsync
    from messaging.journal.retention import Full
    from messaging.remoteevent.event import EventKind, RemoteEvent
    from messaging.remoteevent.listener import Outcome

logger = SafeLog(__name__)

#: deadline of a write that waits for room, seconds
WRITE_TIMEOUT: Final = 30.0
#: bytes of records that may wait to be written
_WAITING_BYTES: Final = 32 * 2**20
#: records that are read at a time
_READ: Final = 1000
#: records after which the state of the owner is stored again
CHECKPOINT: Final = 10_000
_CHECKPOINT: Final = "checkpoint"
#: kinds of events whose channels are remembered
_KINDS: Final = 4096


@lru_cache(maxsize=_KINDS)
def channel_of(kind: EventKind) -> str:
    """Return the channel of the records with events of a kind."""
    return write_json(list(kind)).decode()


@lru_cache(maxsize=_KINDS)
def _template(channel: str) -> RecordTemplate:
    return RecordTemplate(channel, "")


class StoredBatch:
    """Events on their way to the disk. Thread safe.

    Args:
        count: number of the events.
        finished: called with the outcomes when all events have one, before the promise is resolved; on the thread that
            wrote the last one. It must be quick, and must not raise.
    """

    __slots__ = ("_finished", "_left", "_lock", "_outcomes", "offsets", "promise")

    def __init__(self, count: int, finished: Callable[[list[Outcome]], object]) -> None:
        self.promise: Promise[list[Outcome]] = Promise("store remote events")
        self._finished = finished
        #: offset of the record of each event; -1 if it has none
        self.offsets = [-1] * count
        self._lock = threading.Lock()  # guards the following two
        self._left = count + 1  # one for `seal`
        self._outcomes: list[Outcome] = [None] * count

    def note(self, index: int, outcome: Outcome) -> None:
        """Note the outcome of one event."""
        with self._lock:
            self._outcomes[index] = outcome
        self._count_down()

    def seal(self) -> None:
        """Tell that all events were passed on: the batch may finish. Without the locks that ``finished`` takes."""
        self._count_down()

    def _count_down(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        outcomes = self._outcomes
        self._finished(outcomes)
        for at, each in enumerate(outcomes):
            if isinstance(each, (JournalError, BoundReachedError)):
                outcomes = outcomes[: at + 1]  # later events were stored perhaps: they arrive again, as duplicates
                break
        self.promise.resolve(outcomes)


class _Entry:
    """One record of a batch; an ``Append`` of the journal."""

    __slots__ = ("_batch", "_index", "deadline", "record")

    def __init__(self, record: bytes, deadline: float, batch: StoredBatch, index: int) -> None:
        self.record = record
        self.deadline = deadline
        self._batch = batch
        self._index = index

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        self._batch.offsets[self._index] = offset
        self._batch.note(self._index, None)

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        self._batch.note(self._index, error)


class EventJournal:
    """Events on the disk. Thread safe.

    Args:
        path: folder of the journal.
        fsync, max_bytes, full, lock_timeout: see :meth:`Journal.open <messaging.journal.Journal.open>`.

    Raises:
        JournalError: the journal cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fsync: Fsync = "always",
        max_bytes: int | None = None,
        full: Full = "block",
        lock_timeout: float = 0.0,
    ) -> None:
        self.journal = Journal.open(
            path, fsync=fsync, max_bytes=max_bytes, full=full, lock_timeout=lock_timeout, timeout=WRITE_TIMEOUT
        )

    def put(self, entry: Append) -> None:
        """Append a record, which is told its outcome.

        Raises:
            JournalFullError: too many records wait to be written.
            ClosedError: the journal is closed.
        """
        if self.journal.waiting_bytes > _WAITING_BYTES:
            raise JournalFullError(self.journal.path, "too many events wait to be written")
        self.journal.put(entry)

    def store(self, batch: StoredBatch, index: int, channel: str, line: bytes, message_id: str | None = None) -> None:
        """Store one event of a batch, which is told the outcome. In the order of the calls of one thread."""
        try:
            record = _template(channel).encode(line, message_id or "")
            self.put(_Entry(record, time.monotonic() + WRITE_TIMEOUT, batch, index))
        except MessagingError as error:
            batch.note(index, error)

    def queue(
        self,
        name: str,
        wants: Callable[[str], bool],
        prepare: Callable[[RemoteEvent], RemoteEvent | None],
        *,
        start: int | None = None,
    ) -> JournalQueue:
        """Return the queue of one listener, and create its position if it is missing.

        Args:
            name: of the position.
            wants: returns whether the listener gets events with a channel.
            prepare: returns the event as the listener gets it; ``None`` to pass over it.
            start: offset at which a new position begins; ``None``: behind the last record.
        """
        return JournalQueue(self.journal.cursor(name, "latest" if start is None else start), wants, prepare)

    def remove(self, name: str) -> None:
        """Forget a position, so that it keeps no events."""
        self.journal.remove_cursor(name)

    def close(self) -> None:
        """Close the journal. Idempotent. Raises ``JournalError``."""
        self.journal.close()


class JournalQueue:
    """The events of a journal for one listener; an ``EventQueue``."""

    def __init__(
        self, cursor: Cursor, wants: Callable[[str], bool], prepare: Callable[[RemoteEvent], RemoteEvent | None]
    ) -> None:
        self._cursor = cursor
        self._wants = wants
        self._prepare = prepare
        #: events that were read, with their offsets
        self._ready: deque[tuple[int, RemoteEvent]] = deque()
        #: number of records that hold no event
        self.damaged = 0

    @property
    def behind(self) -> int:
        """Number of records that this listener has not passed."""
        return self._cursor.behind

    def peek(self, most: int) -> list[RemoteEvent]:
        """See ``EventQueue``."""
        ready = self._ready
        while len(ready) < most:
            records = self._cursor.read(_READ)
            if not records:
                break
            for record in records:
                if self._wants(record.channel):
                    event = self._decode(record)
                    if event is not None:
                        ready.append((record.offset, event))
            if not ready:
                self._cursor.commit(records[-1].offset + 1, wait=False)
        return [event for _, event in (ready if len(ready) <= most else list(ready)[:most])]

    def _decode(self, record: Record) -> RemoteEvent | None:
        try:
            return self._prepare(decode_event(record.payload))
        except DecodeError as error:
            self.damaged += 1
            logger.warning("journal of remote events: record %d is skipped: %s", record.offset, error)
            return None

    def settle(self, count: int) -> None:
        """See ``EventQueue``."""
        offset = -1
        for _ in range(count):
            offset, _event = self._ready.popleft()
        self._cursor.commit(offset + 1, wait=False)


class Checkpoint:
    """Keeps the state of an owner that follows from the records, so that opening reads only the last ones. Thread safe.

    A position of the journal marks where the stored state ends. Records behind it stay until the state is stored anew.

    Args:
        journal: the records.
        table: holds the state.
        snapshot: returns the state in portable form, and the offset before which all records are part of it. It runs on
            a worker thread.
        key: of the state in the table.
    """

    def __init__(
        self,
        journal: Journal,
        table: JournalTable,
        snapshot: Callable[[], tuple[Any, int]],
        key: str = _CHECKPOINT,
    ) -> None:
        self._key = key
        self._cursor = journal.cursor(_CHECKPOINT)
        self._table = table
        self._snapshot = snapshot
        self._lock = threading.Lock()  # guards the following
        self._count = 0
        self._is_storing = False

    def recover(self, restore: Callable[[Any], object], apply: Callable[[Record], object]) -> None:
        """Call ``restore`` with the stored state if there is one, then ``apply`` with each later record."""
        state = self._table.get(self._key)
        if state is not None:
            restore(state)
        while records := self._cursor.read(_READ, most_bytes=2**22):
            for record in records:
                apply(record)
            self._count += len(records)

    def note(self, count: int) -> None:
        """Count records that were stored; after 10,000 the state is stored."""
        with self._lock:
            self._count += count
            if self._count < CHECKPOINT or self._is_storing:
                return
            self._is_storing = True
        workers().submit(self._store_soon)

    def _store_soon(self) -> None:
        try:
            self.store()
        except MessagingError as error:
            logger.warning("checkpoint of remote events failed: %s; it is tried again", error)
        finally:
            with self._lock:
                self._is_storing = False

    def store(self) -> None:
        """Store the state now. Raises ``JournalError``."""
        with self._lock:
            count = self._count
        state, until = self._snapshot()
        self._table.put(self._key, state)
        if until > self._cursor.position:
            self._cursor.commit(until, wait=False)
        with self._lock:
            self._count -= count

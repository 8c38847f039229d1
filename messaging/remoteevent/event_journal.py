"""Events on the disk, for several listeners: one journal, which each listener reads at its own pace.

A record holds one event as a line (:mod:`messaging.remoteevent.event`). Its channel names the kind of the event, so
that readers pass over kinds that they do not want without decoding them.

**Bound.** The journal keeps the records from the slowest position on, and ``max_bytes`` bounds them. So no position may
stay behind without need: each queue passes the records that its listener does not want, and the :class:`Checkpoint`
moves on after a number of records or bytes, and when the journal is full.

**Threads.** Any thread stores events. Outcomes are noted on the thread that wrote the records, which must not be kept:
callbacks there are quick. A queue is read by one thread at a time, its delivery's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

from messaging.dispatch.eventdata import write_json
from messaging.errors import ClosedError, DecodeError, JournalError, JournalFullError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import clock, may_block, workers
from messaging.journal import Append, Cursor, Journal, JournalTable, Record, RecordTemplate
from messaging.journal.options import Fsync, Full
from messaging.remoteevent.event import EventKind, RemoteEvent, decode_event

logger = SafeLog(__name__)

#: deadline of a write that waits for room, seconds
WRITE_TIMEOUT: Final = 30.0
#: bytes of records that may wait to be written
_WAITING_BYTES: Final = 32 * 2**20
#: bytes of the records of one append, unless one alone has more
_APPEND_BYTES: Final = 2**20
#: of so many bytes of the bound of the journal one is spared: a larger append would wait for room that never comes
_SPARED: Final = 10
#: time for one attempt to store a part of records whose deadline has passed, seconds
_ATTEMPT: Final = 1.0
#: records that are read at a time
_READ: Final = 1000
#: records after which the state of the owner is stored again
CHECKPOINT: Final = 10_000
#: bytes after which it is stored again: at most this part of the bound of the journal
_CHECKPOINT_PART: Final = 8
_CHECKPOINT_BYTES: Final = 16 * 2**20
_CHECKPOINT: Final = "checkpoint"
#: kinds of events whose channels are remembered
_KINDS: Final = 4096

#: is told how many of the events are stored, from the first on; the offset of the first one; and why the next one is
#: not. On the thread that wrote them: quick, and without raising
Stored = Callable[[int, int, MessagingError | None], object]


@lru_cache(maxsize=_KINDS)
def channel_of(kind: EventKind) -> str:
    """Return the channel of the records with events of a kind."""
    return write_json(list(kind)).decode()


@lru_cache(maxsize=_KINDS)
def _template(channel: str) -> RecordTemplate:
    return RecordTemplate(channel, "")


def record_of(channel: str, line: bytes, message_id: str = "") -> bytes:
    """Return the record of an event. Raises ``ArgumentError``: it is too large."""
    return _template(channel).encode(line, message_id)


class _Records:
    """Records that are stored together, or not at all; an ``Append`` of the journal.

    So no later event of a sender is stored without an earlier one. If they have no room together, the first half of
    them is tried.
    """

    __slots__ = ("_channels", "_done", "_events", "_parts", "count", "deadline", "record")

    def __init__(
        self, events: EventJournal, channels: Sequence[str], parts: Sequence[bytes], deadline: float, done: Stored
    ) -> None:
        self._events = events
        self._channels = channels
        self._parts = parts
        self._done = done
        self.record = b"".join(parts)
        self.count = len(parts)
        self.deadline = deadline

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        self._events.note(self._channels, offset)
        self._done(self.count, offset, None)

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        half = self.count // 2
        if half and isinstance(error, JournalFullError):
            deadline = max(self.deadline, clock.monotonic() + _ATTEMPT)
            try:
                self._events.put(
                    _Records(self._events, self._channels[:half], self._parts[:half], deadline, self._done)
                )
            except MessagingError as failure:
                error = failure
            else:
                return
        self._done(0, -1, error)


class EventJournal:
    """Events on the disk. Thread safe.

    Args:
        path: folder of the journal.
        fsync, max_bytes, full: see :meth:`Journal.open <messaging.journal.Journal.open>`.

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
    ) -> None:
        self.max_bytes = max_bytes
        self.journal = Journal.open(path, fsync=fsync, max_bytes=max_bytes, full=full, timeout=WRITE_TIMEOUT)
        self._append_bytes = _APPEND_BYTES
        if max_bytes is not None:
            self._append_bytes = min(_APPEND_BYTES, max_bytes - max_bytes // _SPARED)
        #: by the name of its position
        self._queues: dict[str, JournalQueue] = {}
        self._lock = threading.Lock()  # guards the following two
        #: offset of the last record of each channel that has a queue, or a higher one
        self._last: dict[str, int] = {}
        #: offset behind the last record that was noted
        self._end = self.journal.end

    # --- storing

    def put(self, entry: Append) -> None:
        """Append a record, which is told its outcome.

        Raises:
            JournalFullError: too many records wait to be written.
            ClosedError: the journal is closed.
        """
        if self.journal.waiting_bytes > _WAITING_BYTES:
            raise JournalFullError(self.journal.path, "too many events wait to be written")
        self.journal.put(entry)

    def store(self, channels: Sequence[str], records: Sequence[bytes], done: Stored) -> None:
        """Store the first events of a batch: up to 1 MiB, or nine tenths of the bound, as far as there is room.

        They are stored in their order.

        Batches are stored in the order of the calls.

        Args:
            channels: of the records.
            records: of :func:`record_of`, at least one.
            done: is told the outcome.

        Raises:
            JournalFullError, ClosedError: as :meth:`put`; ``done`` is not called.
        """
        size = 0
        for count, each in enumerate(records):
            size += len(each)
            if count and size > self._append_bytes:
                channels, records = channels[:count], records[:count]
                break
        self.put(_Records(self, channels, records, clock.monotonic() + WRITE_TIMEOUT, done))

    def note(self, channels: Sequence[str], first: int) -> None:
        """Note the channels of stored records, the first of which has the offset ``first``. On the writing thread."""
        with self._lock:
            last = self._last
            for offset, channel in enumerate(channels, first):
                if channel in last:
                    last[channel] = offset
            self._end = first + len(channels)

    # --- reading

    def queue(
        self,
        name: str,
        channel: str | None,
        prepare: Callable[[RemoteEvent], RemoteEvent | None],
        *,
        start: int | None = None,
    ) -> JournalQueue:
        """Return the queue of one listener, and create its position if it is missing.

        Args:
            name: of the position.
            channel: of the events for the listener; ``None``: it gets all.
            prepare: returns the event as the listener gets it; ``None`` to pass over it.
            start: offset at which a new position begins; ``None``: behind the last record.
        """
        if channel is not None:
            with self._lock:
                # any record so far may be of this channel: the queue has to read it
                self._last.setdefault(channel, self.journal.end - 1)
        queue = JournalQueue(self.journal.cursor(name, "latest" if start is None else start), channel, prepare)
        self._queues[name] = queue
        return queue

    def forget(self, name: str) -> None:
        """Forget the position of a registration that has ended, so that it keeps no events. A failure is logged.

        Raises:
            ClosedError: the journal is closed.
        """
        try:
            self._queues.pop(name, None)
            self.journal.remove_cursor(name)
        except JournalError as error:
            logger.warning("%s: the position %r is kept until the next run: %s", self.journal.path, name, error)

    def remove_others(self, prefix: str, known: Iterable[str]) -> None:
        """Forget the positions whose names begin with ``prefix``, but those that are ``known``; see :meth:`forget`."""
        kept = set(known)
        for name in self.journal.cursors():
            if name.startswith(prefix) and name not in kept:
                self.forget(name)

    def advance(self) -> None:
        """Move the queues whose kinds have not occurred of late behind the records of other kinds.

        Raises:
            JournalError, ClosedError: a position cannot be moved.
        """
        with self._lock:
            end, last = self._end, self._last.copy()
        for queue in [*self._queues.values()]:
            if queue.channel is not None:
                queue.pass_over(end, last.get(queue.channel, end))


class JournalQueue:
    """The events of a journal for one listener; an ``EventQueue``. Thread safe.

    Classes of the application are made of records without the lock.
    """

    def __init__(
        self, cursor: Cursor, channel: str | None, prepare: Callable[[RemoteEvent], RemoteEvent | None]
    ) -> None:
        self.channel = channel
        self._cursor = cursor
        self._prepare = prepare
        self._lock = threading.Lock()  # guards the following
        self._is_reading = False
        #: events that were read, with their offsets
        self._ready: deque[tuple[int, RemoteEvent]] = deque()
        #: offset behind the last record that was read
        self._read_until = cursor.position

    def peek(self, most: int) -> list[RemoteEvent]:
        """See ``EventQueue``."""
        ready = self._ready
        with self._lock:
            self._is_reading = True
            position = self._cursor.position  # records before it were dropped to make room
            while ready and ready[0][0] < position:
                ready.popleft()
        try:
            while len(ready) < most and (records := self._cursor.read(_READ)):
                found = [(each.offset, self._decode(each)) for each in records if self._wants(each)]
                with self._lock:
                    ready.extend((offset, event) for offset, event in found if event is not None)
                    self._read_until = records[-1].offset + 1
                    self._pass_unwanted()
        finally:
            with self._lock:
                self._is_reading = False
        return [event for _, event in islice(ready, most)]

    def _wants(self, record: Record) -> bool:
        return self.channel is None or record.channel == self.channel

    def _decode(self, record: Record) -> RemoteEvent | None:
        try:
            return self._prepare(decode_event(record.payload))
        except DecodeError as error:
            logger.warning("journal of remote events: record %d is skipped: %s", record.offset, error)
            return None

    def settle(self, count: int) -> None:
        """See ``EventQueue``."""
        with self._lock:
            offset = -1
            for _ in range(min(count, len(self._ready))):
                offset, _event = self._ready.popleft()
            if self._ready:
                self._cursor.commit(offset + 1, wait=False)
            else:
                self._pass_unwanted()

    def _pass_unwanted(self) -> None:
        """Move the position behind the records that were read, if no event of them waits. With the lock."""
        if not self._ready and self._read_until > self._cursor.position:
            self._cursor.commit(self._read_until, wait=False)

    def pass_over(self, end: int, last: int) -> None:
        """Move the position to ``end`` without reading, if no event waits.

        Args:
            end: an offset.
            last: offset of the last record of the channel before ``end``, or a higher one.
        """
        with self._lock:
            if not self._is_reading and not self._ready and last < self._cursor.position < end:
                self._cursor.commit(end, wait=False)
                self._cursor.rewind()  # to the position
                self._read_until = end


class Checkpoint:
    """Keeps the state of an owner that follows from the records, so that opening reads only the last ones. Thread safe.

    A position of the journal marks where the stored state ends. Records behind it stay until the state is stored anew:
    after 10,000 records, after an eighth of the bytes that the journal may hold, and when it is full.

    Args:
        events: the records.
        table: holds the state.
        snapshot: returns the state in portable form, and the offset before which all records are part of it. It runs on
            a worker thread.
        key: of the state in the table.
    """

    def __init__(
        self,
        events: EventJournal,
        table: JournalTable,
        snapshot: Callable[[], tuple[Any, int]],
        key: str = _CHECKPOINT,
    ) -> None:
        self._key = key
        self._events = events
        self._cursor = events.journal.cursor(_CHECKPOINT)
        self._table = table
        self._snapshot = snapshot
        self._most_bytes = _CHECKPOINT_BYTES
        if events.max_bytes is not None:
            self._most_bytes = min(_CHECKPOINT_BYTES, max(1, events.max_bytes // _CHECKPOINT_PART))
        #: held while the state is stored: an older one must not take the place of a newer one
        self._storing = threading.Lock()
        #: guarded by the lock above
        self._is_closed = False
        self._lock = threading.Lock()  # guards the following
        self._count = self._bytes = 0
        self._is_requested = False

    def recover(self, restore: Callable[[Any], object], apply: Callable[[Record], object]) -> None:
        """Call ``restore`` with the stored state if there is one, then ``apply`` with each later record."""
        state = self._table.get(self._key)
        if state is not None:
            restore(state)
        while records := self._cursor.read(_READ, most_bytes=2**22):
            for record in records:
                apply(record)
                self._bytes += len(record.payload)
            self._count += len(records)

    def note(self, count: int, size: int, *, is_full: bool = False) -> None:
        """Count records that were stored, and their bytes; store the state if they are many. On any thread; quick.

        With ``is_full`` it is stored soon in any case: the journal refused a record for want of room.
        """
        with self._lock:
            self._count += count
            self._bytes += size
            is_due = is_full or self._count >= CHECKPOINT or self._bytes >= self._most_bytes
            if self._is_requested or not is_due:
                return
            self._is_requested = True
        workers().submit(self._store_soon)

    def _store_soon(self) -> None:
        with self._lock:
            self._is_requested = False  # first: what is noted from here on may not be part of the state
        try:
            self._events.advance()
            self.store()
        except ClosedError:
            pass  # closing has stored the state
        except MessagingError as error:
            logger.warning("checkpoint of remote events failed: %s; it is tried again", error)

    def store(self) -> None:
        """Store the state now, if there are records since. On an event loop it does not wait for the disk.

        Raises:
            JournalError: it is not stored.
        """
        with self._storing:
            with self._lock:
                count, size = self._count, self._bytes
            if self._is_closed or not count:
                return
            state, until = self._snapshot()
            stored = self._table.put_soon(self._key, state)
            if may_block():
                stored.result()
                if until > self._cursor.position:
                    self._cursor.commit(until, wait=False)
            # on an event loop the position stays: the next run reads some records once more
            with self._lock:
                self._count -= count
                self._bytes -= size

    def close(self) -> None:
        """Store nothing more: another object may go on with the table and the journal. Idempotent."""
        with self._storing:
            self._is_closed = True

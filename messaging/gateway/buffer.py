"""The buffer of a route: its messages on disk, from their acceptance until the target has confirmed them.

A message is accepted when the journal has stored it. Messages leave in the order of their offsets; with
``newest_first`` those that are stored after an outage leave first, see :mod:`messaging.gateway.ranges`. The next ones
are also in memory; the others are read from the disk when their turn comes.

**Threads.** :meth:`Buffer.store` runs on any thread; the journal tells the outcome on its own thread. The reading side
(:meth:`Buffer.take`, :meth:`Buffer.put_back`, :meth:`Buffer.settle`, :meth:`Buffer.begin_range`) is for one thread at a
time, the drain's. One lock guards what both sides use; it is held for assignments only.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from messaging.bounded import BoundedCache
from messaging.errors import ArgumentError, ClosedError, JournalFullError, MessagingError
from messaging.execution import Waiters, clock, engine, workers
from messaging.gateway.destinations import Destination
from messaging.gateway.ranges import CURSOR, MAX_RANGES, Range, cursor_name, later_starts
from messaging.gateway.recognition import Recognition
from messaging.gateway.stored import Stored, without_members
from messaging.journal import Journal
from messaging.text import SafeLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from messaging.gateway.settings import BufferSettings
    from messaging.gateway.stored import Source
    from messaging.journal import Record

logger = SafeLog(__name__)

#: folder of the buffers in the data folder of a gateway: one folder for each route
ROUTES_FOLDER: Final = "routes"
#: messages that are read from the disk at a time, and bytes
_LOAD: Final = 1000
_LOAD_BYTES: Final = 2**20
#: pause before a record is given to the journal again after a failure of the disk, seconds
_RETRY: Final = 0.5
#: pause before the position is recorded: confirmations gather, seconds
_RECORD_PAUSE: Final = 0.003
#: messages that are recognised if their source delivers them again: the last so many
RECENT: Final = 20_000
#: pause between two looks at what is being stored, seconds
_LOOK: Final = 0.05
#: restored contexts that are kept
_CONTEXTS: Final = 1024


class Buffer:
    """The messages of one route on disk. See the module for threads.

    Args:
        name: of the route, for the log.
        path: folder of the journal.
        settings: bounds and policies.
        wake: called when there is something to take; on the thread of the journal.

    Raises:
        JournalError: the folder cannot be used, or another gateway uses it.

    Attributes:
        journal: the records.
    """

    def __init__(self, name: str, path: Path, settings: BufferSettings, wake: Callable[[], object]) -> None:
        self._name = name
        self._wake = wake
        self.is_dropping_newest = settings.full == "drop_newest"
        self.max_dead_letters = settings.max_dead_letters
        self.journal = Journal.open(
            path,
            fsync=settings.fsync,
            max_bytes=settings.max_bytes,
            max_age=settings.max_age,
            full="reject" if self.is_dropping_newest else settings.full,  # type: ignore[arg-type]
            full_disk="block",
            lock_timeout=5.0,
            option="data",
        )
        self._is_newest_first = settings.order == "newest_first"
        self._max_age = settings.max_age
        self._lock = threading.Lock()  # guards the following three, and what is said in ``Range``
        #: in the order of their offsets, replaced when it changes; messages are stored in the last one
        self._ranges = self._open_ranges()
        #: the offset behind the last stored message
        self._end = self.journal.end
        #: messages that wait for the disk, and threads that wait until there are fewer
        self.storing = 0
        #: those of them that can be recognised, by their keys and those of the messages of a batch. Guarded by the
        #: lock, as are their sources
        self._on_the_way: dict[str, Stored] = {}
        self.room = Waiters()
        #: messages that were accepted, since the start
        self.accepted = 0
        #: that were dropped: new ones because the buffer was full, for their age, and those that the journal dropped
        #: before they were taken
        self._dropped_newest = self.expired = self._missed = 0
        #: recognises messages that their source delivers again
        self.recognition = Recognition(name, self.journal, RECENT)
        #: why the disk does not take messages; ``None``: it does
        self.problem: str | None = None
        self.journal.listen_held(self._log_held)
        self._is_closed = False
        #: held while positions are written to the disk
        self._recording = threading.Lock()
        #: whether the position is being recorded, or will be; whether the last attempt failed
        self._is_recording = self._is_unrecorded = False
        self._contexts: BoundedCache[tuple[str, str], Destination] = BoundedCache(_CONTEXTS)

    def _open_ranges(self) -> tuple[Range, ...]:
        """Return the ranges that the cursors tell of."""
        journal = self.journal
        oldest = journal.cursor(CURSOR)
        ranges = [Range(oldest, oldest.position)]
        for start in later_starts([*journal.cursors()]):
            before, cursor = ranges[-1], journal.cursor(cursor_name(start))
            if start > before.first:
                before.end = start
                ranges.append(Range(cursor, max(start, cursor.position)))
                continue
            # the range before is done, and goes on with the position of this one
            position = max(before.first, cursor.position)
            before.cursor.commit(position)
            journal.remove_cursor(cursor.name)
            ranges[-1] = Range(before.cursor, position)
        return tuple(ranges)

    # --- storing

    def store(self, stored: Stored) -> None:
        """Store a message. From any thread. Raises ``ClosedError``, ``JournalError``."""
        with self._lock:
            self.storing += 1
            for key in stored.all_keys:
                self._on_the_way[key] = stored
        try:
            self.journal.put(stored)
        except MessagingError:
            with self._lock:
                self.storing -= 1
                self._forget(stored)
            raise

    def _forget(self, stored: Stored) -> None:
        """Have no message join one that is not on its way to the disk any more. Under the lock."""
        for key in stored.all_keys:
            if self._on_the_way.get(key) is stored:
                del self._on_the_way[key]

    def _release(self, stored: Stored) -> Sequence[Source]:
        """Return the sources of a message that is not on its way to the disk any more."""
        with self._lock:
            self._forget(stored)
            sources, stored.sources, stored.record = stored.sources, (), b""
        return sources

    def note_stored(self, stored: Stored) -> None:
        """Accept a message that is on the disk. On the thread of the journal."""
        stored.timestamp = clock.wall()
        if stored.all_keys:
            self.recognition.note(stored)  # first: it is known at each moment
        self._acknowledge(self._release(stored))
        with self._lock:
            self.storing -= 1  # after it is acknowledged: see ``wait_stored``
            self.accepted += 1
            self._end = stored.offset + 1
            self._ranges[-1].add(stored)
        self.problem = None
        self._wake_waiting()
        self._wake()

    def key(self, message_id: str, channel: str, payload: bytes) -> str:
        """See ``Recognition.key``."""
        return self.recognition.key(message_id, channel, payload)

    def joins(self, key: str, sources: Sequence[Source]) -> bool:
        """Return whether a message is on its way to the disk, in a batch or not; then these sources are its, too.

        Ask before :meth:`is_stored`: a message is stored before it is not on its way any more.
        """
        with self._lock:
            first = self._on_the_way.get(key)
            if first is None:
                return False
            first.sources = [*first.sources, *sources]
        return True

    def is_stored(self, key: str) -> bool:
        """Return whether a message is among the last ``RECENT`` stored ones, in a batch or not."""
        return self.recognition.is_stored(key)

    def note_refused(self, stored: Stored, error: MessagingError) -> None:
        """Drop a message, leave it to its source, or try again. On the thread of the journal."""
        if isinstance(error, ClosedError) or self._is_closed:
            self._abandon(stored)
        elif self.is_dropping_newest and isinstance(error, JournalFullError):
            self._acknowledge(self._release(stored))
            with self._lock:
                self.storing -= 1
                self._dropped_newest += 1
            self._wake_waiting()
        else:
            if self.problem is None:
                logger.error("route '%s': cannot store messages: %s; trying again each %g s", self._name, error, _RETRY)
            self.problem = str(error)
            running = engine()
            running.call(clock.call_later, running.loop, _RETRY, self._put_again, stored)

    def _put_again(self, stored: Stored) -> None:
        try:
            self.journal.put(stored)
        except MessagingError as error:
            self.note_refused(stored, error)

    def wait_stored(self, timeout: float) -> None:
        """Wait for at most ``timeout`` seconds until the messages that are on their way to the disk are acknowledged.

        Messages that wait for room, or for a disk that fails, are not waited for.
        """
        deadline = clock.monotonic() + timeout
        with self._lock:  # later ones may follow without end: the route may have another subscription already
            goal = self.accepted + self._dropped_newest + self.storing

        def is_over() -> bool:
            return not self.storing or self.accepted + self._dropped_newest >= goal

        while not is_over() and not self.is_held_back and self.problem is None:
            left = deadline - clock.monotonic()
            if left <= 0:
                return
            self.room.wait_for(is_over, min(left, _LOOK))

    def _log_held(self, error: JournalFullError | None) -> None:
        """Log that the source is held back by a full disk, and the end of it. On the thread of the journal."""
        if error is not None:
            logger.error("route '%s': the source is held back: %s", self._name, error)
        else:
            logger.warning("route '%s': the source is not held back any more: there is room on the disk", self._name)

    def _abandon(self, stored: Stored) -> None:
        """Leave the messages of the source to their broker, which delivers them again: the gateway is stopping."""
        self._release(stored)
        with self._lock:
            self.storing -= 1
        self._wake_waiting()

    @staticmethod
    def _acknowledge(sources: Sequence[Source]) -> None:
        for source in sources:
            source.settle(True)

    def _wake_waiting(self) -> None:
        if self.room.flags:
            self.room.wake()

    # --- taking

    @property
    def depth(self) -> int:
        """Return the number of stored messages that are not settled. From any thread."""
        ranges, end, begin = self._ranges, self._end, self.journal.begin
        return sum(max(0, (end if each.end is None else each.end) - max(each.first, begin)) for each in ranges)

    @property
    def dropped(self) -> int:
        """Return the number of messages that were dropped and not published, since the start. From any thread.

        Includes records that the disk has lost, unless the position says that the target has them.
        """
        begin = self.journal.begin
        with self._lock:
            left = sum(each.left_before(begin, self._end) for each in self._ranges)
            return self._dropped_newest + self.expired + self._missed + left

    @property
    def has_next(self) -> bool:
        """Return whether :meth:`take` has a message. From any thread."""
        return any(each.ready or each.tail < (self._end if each.end is None else each.end) for each in self._ranges)

    @property
    def unrecorded(self) -> int:
        """Return how many messages were taken, and would be published again after a crash. On the thread of the drain.

        Counts messages that the journal has dropped in between, until those before them are settled.
        """
        ranges = self._ranges
        if len(ranges) == 1:  # asked for each message
            return ranges[0].next_offset - ranges[0].recorded
        return sum(each.next_offset - each.recorded for each in ranges)

    def take(self) -> Stored | None:
        """Return the next message, which stays in the buffer until :meth:`settle`; ``None``: there is none now.

        Raises:
            JournalError: the disk cannot be read.
        """
        while True:
            with self._lock:
                source, end = self._next_range()
                if source is None:
                    return None
                stored = source.pop() if source.ready else None
            if stored is None:
                self._load(source, end)
            elif stored.offset < self.journal.begin:  # dropped to make room, or for its age
                with self._lock:
                    self._missed += 1
                self.settle(stored)
            elif self._max_age is not None and self.journal.age_of(stored.offset, stored.timestamp) > self._max_age:
                self.expired += 1
                self.settle(stored)
            else:
                return stored

    def _next_range(self) -> tuple[Range | None, int]:
        """Return the range of the next message, and the offset behind its last one. Under the lock."""
        for each in reversed(self._ranges) if self._is_newest_first else self._ranges:
            end = self._end if each.end is None else each.end
            if each.ready or each.tail < end:
                return each, end
        return None, 0

    def _load(self, source: Range, end: int) -> None:
        """Read the next messages from the disk. Nothing is added in memory meanwhile: it would not follow the tail."""
        missed = source.missed
        records, tail = source.read(self.journal, end, _LOAD, _LOAD_BYTES)
        loaded = [self._restored(record) for record in records]
        if source.pass_over():
            self._record_soon(_RECORD_PAUSE)
        with self._lock:
            self._missed += source.missed - missed
            source.extend(loaded, tail)

    def _restored(self, record: Record) -> Stored:
        properties = without_members(record.properties)
        key = (record.channel, properties)
        destination = self._contexts.get(key)
        if destination is None:
            try:
                context = record.context
            except ArgumentError:  # of a program with properties of its own
                logger.error("route '%s': the properties of record %d do not parse", self._name, record.offset)
                context = type(record)(*record[:4], "", record.message_id).context
            destination = self._contexts[key] = Destination(context, properties)
        stored = Stored(None, record.payload, destination, record.message_id or "")
        stored.offset = record.offset
        stored.timestamp = record.timestamp
        return stored

    def put_back(self, messages: Sequence[Stored]) -> None:
        """Return messages that were taken, in order, to the front: they were not published, or it is not known.

        No other message that was taken may be unsettled.
        """
        with self._lock:
            for each in self._ranges:
                each.put_back([stored for stored in messages if self._range_of(stored.offset) is each])

    def settle(self, stored: Stored) -> None:
        """Remove a message that was taken: the target has it, or it is a dead letter. Recorded on the disk soon."""
        if self._range_of(stored.offset).settle(stored.offset):
            self._record_soon(_RECORD_PAUSE)

    def _range_of(self, offset: int) -> Range:
        for each in self._ranges:
            if each.end is None or offset < each.end:
                return each
        raise AssertionError(offset)  # the last one has no end

    def begin_range(self) -> None:
        """With ``newest_first``: publish the messages that are stored from now on before those that are stored already.

        Without effect if nothing waits to be published, or if there are ``MAX_RANGES`` already.
        """
        last = self._ranges[-1]
        with self._lock:
            end = self._end
        if not self._is_newest_first or len(self._ranges) >= MAX_RANGES or last.next_offset >= end:
            return
        try:
            cursor = self.journal.cursor(cursor_name(end), end)
        except MessagingError as error:
            logger.warning("route '%s': new messages do not overtake the stored ones: %s", self._name, error)
            return
        following = Range(cursor, end)
        with self._lock:
            later = last.end_before(end)
            following.extend(later, end + len(later))
            self._ranges = (*self._ranges, following)
        logger.info("route '%s': new messages overtake %d stored ones", self._name, end - last.first)

    # --- the position on the disk

    def _record_soon(self, pause: float) -> None:
        if not self._is_recording:
            self._is_recording = True
            running = engine()
            running.call(clock.call_later, running.loop, pause, workers().submit, self._record)

    def _record(self) -> None:
        """Record the position on the disk. On a worker thread, one at a time."""
        pause = _RECORD_PAUSE
        ranges = self._ranges
        positions = [each.first for each in ranges]
        try:
            with self._recording:
                if self._is_closed:
                    return
                for each, position in zip(ranges, positions, strict=True):
                    each.cursor.commit(position, wait=each is ranges[-1])
                self._join_ranges()
            self._is_unrecorded = False
        except ClosedError:
            return
        except MessagingError as error:  # of a full disk: publishing must go on, because it frees the disk
            if not self._is_unrecorded:
                logger.warning("route '%s': %s; a crash now makes more duplicates", self._name, error)
            self._is_unrecorded = True
            pause = _RETRY
        for each, position in zip(ranges, positions, strict=True):
            each.recorded = position
        self._wake()
        # cleared before the positions are read again: a change after this line sees it
        self._is_recording = False
        if any(each.first != each.recorded for each in self._ranges):
            self._record_soon(pause)

    def _join_ranges(self) -> None:
        """Have the oldest range end where the next one does, if all its messages are settled. One thread at a time.

        Raises:
            MessagingError: the cursor of the next one is not removed; the range is joined by the next start.
        """
        while (oldest := self._ranges[0]).end is not None and oldest.first >= oldest.end:
            following = self._ranges[1]
            oldest.cursor.commit(following.first)  # before the other one is gone
            self.journal.remove_cursor(following.cursor.name)
            following.cursor = oldest.cursor
            with self._lock:
                self._ranges = self._ranges[1:]

    # --- state, from any thread

    @property
    def is_held_back(self) -> bool:
        """Return whether new messages wait for room: on the disk, or within the bounds of the buffer."""
        return self.journal.is_blocked

    @property
    def age(self) -> float:
        """Return the seconds since the oldest message was stored that is not settled; 0 without one."""
        return self.journal.age_of(self._ranges[0].first)

    # --- the end

    def close(self) -> None:
        """Store what waits for the disk, and close the journal. Raises ``JournalError``."""
        self._is_closed = True
        with self._recording:  # a range that is being joined changes its cursor
            for each in self._ranges:
                each.cursor.commit(each.first, wait=False)
        self.journal.close()

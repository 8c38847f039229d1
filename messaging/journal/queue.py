"""A queue on the disk: the records of a journal that wait to be passed on, each until it is settled.

A producer appends records to the journal, and tells the queue of each one that is stored (:meth:`DurableQueue.add`). A
consumer takes messages in order and settles them in any order, or puts them back. Messages are kept in memory as far as
they have room there; the others are only on the disk, and are loaded when their turn comes. After a crash
the queue has the messages that were not settled, and perhaps messages whose settlement was not recorded.

**Ranges.** With ``newest_first`` the queue has several ranges: parts of the journal that are taken one beside the
other, each in order. A new range begins with :meth:`DurableQueue.begin_range`; it is taken first. Each range keeps its
position in a cursor of its own: that of the oldest has the name of the queue, the others ``NAME-OFFSET``, with the
offset that they begin with.

**Threads.** The producer calls :meth:`DurableQueue.add` on one thread at a time. The consumer calls the other methods
on one thread at a time, or one event loop; it may call :meth:`DurableQueue.load`, which waits for the disk, on another
thread, once at a time. Positions are recorded on worker threads. Properties are for any thread. The ends of a range
that is in memory are changed by the producer or :meth:`DurableQueue.load`, never by both: as long as messages are only
on the disk, new ones stay there.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from messaging.errors import ClosedError, MessagingError
from messaging.errors.text import SafeLog, counted
from messaging.execution import clock, engine, workers
from messaging.journal.cursors import Cursor
from messaging.journal.journal import Journal
from messaging.journal.records import Record

logger = SafeLog(__name__)

#: ranges of a queue, at most
MAX_RANGES: Final = 16
#: pause before the position is recorded: settled messages gather, seconds
_RECORD_PAUSE: Final = 0.003
#: pause before it is recorded again after a failure of the disk, seconds
_RETRY: Final = 0.5


class Queued(Protocol):
    """A message of a queue in memory."""

    @property
    def offset(self) -> int:
        """The offset of its record."""

    @property
    def payload(self) -> bytes:
        """The payload of its record."""


Item = TypeVar("Item", bound=Queued)


class DurableQueue(Generic[Item]):
    """The messages of a journal that are not settled. See the module for threads.

    Args:
        what: the owner, for logs: "route 'plant'".
        journal: holds the records. It is closed with the queue.
        name: of the cursor.
        restore: makes a message of a record. On the thread that loads it.
        max_messages, max_bytes: bounds of the messages in memory, taken ones included, and of the bytes of their
            payloads.
        newest_first: whether :meth:`begin_range` begins one.
        on_recorded: called when a position was recorded. On a worker thread.

    Attributes:
        lost: messages that were not loaded: the journal dropped them to make room or for their age, or they are
            damaged.
    """

    def __init__(
        self,
        what: str,
        journal: Journal,
        name: str,
        restore: Callable[[Record], Item],
        *,
        max_messages: int,
        max_bytes: int,
        on_recorded: Callable[[], object],
        newest_first: bool = False,
    ) -> None:
        self._journal = journal
        self._restore = restore
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._is_newest_first = newest_first
        self.lost = 0
        #: guards the memory of the ranges but for taking from its front, which ranges there are, and the end
        self._lock = threading.Lock()
        self._positions: _Positions[Item] = _Positions(what, journal, name, self._lock, on_recorded)
        #: the offset behind the last stored message
        self.end = journal.end
        #: messages that entered the memory, and their bytes
        self._entered = self._entered_bytes = 0
        #: messages that left it: changed by the consumer, without the lock
        self._left = self._left_bytes = 0

    # --- the producer

    def add(self, items: Sequence[Item]) -> int:
        """Note messages that were stored just now, in order; return how many of them are kept in memory: the first.

        A message is kept if it follows the last one in memory, and has room.
        """
        with self._lock:
            last = self._positions.ranges[-1]
            ready, tail, kept = last.ready, last.tail, 0
            held = self._entered - self._left
            room_bytes = before = self._max_bytes - self._entered_bytes + self._left_bytes
            for item in items:
                size = len(item.payload)
                if item.offset != tail or (held and (held >= self._max_messages or size > room_bytes)):
                    break
                ready.append(item)
                tail += 1
                held += 1
                kept += 1
                room_bytes -= size
            self.end = items[-1].offset + 1
            last.tail = tail
            self._entered += kept
            self._entered_bytes += before - room_bytes
        return kept

    # --- the consumer: taking

    def take(self) -> Item | None:
        """Return the next message, which stays in the queue until :meth:`settle`.

        Returns:
            ``None``: it is not in memory: :meth:`load` it, if :attr:`has_next`.
        """
        source = self._next_range()
        return source.ready.popleft() if source is not None and source.ready else None

    def take_before(self, offset: int) -> list[Item]:
        """Return the next messages that are in memory and before ``offset``; as :meth:`take`, of the oldest range."""
        ready = self._positions.ranges[0].ready
        taken: list[Item] = []
        while ready and ready[0].offset < offset:
            taken.append(ready.popleft())
        return taken

    def load(self, most: int = 1000, most_bytes: int = 2**20) -> Sequence[Item]:
        """Read the next messages that are only on the disk; return them.

        Args:
            most: number of messages, at most.
            most_bytes: bytes of payloads, at most, unless the first one alone has more.

        Raises:
            JournalError: the disk cannot be read.
            ClosedError: the queue is closed.
        """
        with self._lock:
            source = self._next_range()
            if source is None or source.tail >= source.end_in(self.end):
                return ()
            cursor, end = source.cursor, source.end_in(self.end)
        # nothing is added in memory meanwhile: it would not follow the tail
        cursor.seek(source.tail)
        lost = cursor.lost
        items = [self._restore(record) for record in cursor.read(most, most_bytes=most_bytes, until=end)]
        size = sum(len(each.payload) for each in items)  # before the consumer sees them, who may settle them at once
        with self._lock:
            self.lost += cursor.lost - lost
            self._entered += len(items)
            self._entered_bytes += size
            source.ready.extend(items)
            source.tail = min(cursor.reader.offset, end)
        return items

    def pass_over(self) -> None:
        """Move the position behind messages that :meth:`load` has not found. To be called after it."""
        with self._lock:
            moved = [each.pass_over() for each in self._positions.ranges]
        if any(moved):
            self._positions.record_in(_RECORD_PAUSE)

    def _next_range(self) -> _Range[Item] | None:
        ranges = self._positions.ranges
        for each in reversed(ranges) if self._is_newest_first else ranges:
            if each.ready or each.tail < each.end_in(self.end):
                return each
        return None

    def put_back(self, items: Sequence[Item]) -> None:
        """Return messages that were taken, in order, to the front: they were not passed on, or it is not known.

        No other message that was taken may be unsettled.
        """
        positions = self._positions
        for each in positions.ranges:
            each.ready.extendleft(reversed([item for item in items if positions.range_of(item.offset) is each]))

    def settle(self, offset: int, size: int) -> None:
        """Remove a message that was taken, and has a payload of ``size`` bytes. Recorded on the disk soon."""
        self._left += 1
        self._left_bytes += size
        positions = self._positions
        source = positions.ranges[0]
        if source.end is not None:  # it is not the only one
            source = positions.range_of(offset)
        if offset == source.first:
            source.first = offset + 1
            if source.is_ahead:
                with self._lock:
                    source.pass_over()
        elif offset > source.first:
            with self._lock:  # the range may be joined with the one before it
                source.settle_later(offset)
            return
        if not positions.is_recording:
            positions.record_in(_RECORD_PAUSE)

    def begin_range(self) -> None:
        """With ``newest_first``: take the messages that are stored from now on before the stored ones.

        Without effect if no message waits, or if there are ``MAX_RANGES`` already.
        """
        last, end = self._positions.ranges[-1], self.end
        if self._is_newest_first and last.next_offset < end:
            self._positions.begin(end)

    # --- state, from any thread

    @property
    def has_next(self) -> bool:
        """Return whether there is a message to take, in memory or on the disk."""
        return self._next_range() is not None

    @property
    def ready(self) -> list[Item]:
        """Return the messages in memory that were not taken. For the consumer."""
        return [item for each in self._positions.ranges for item in (*each.ready,)]

    @property
    def waiting(self) -> int:
        """Return the number of messages that were not taken."""
        return sum(len(each.ready) + max(0, each.end_in(self.end) - each.tail) for each in self._positions.ranges)

    @property
    def tail(self) -> int:
        """Return the offset behind the last message in memory."""
        return self._positions.ranges[-1].tail

    @property
    def first(self) -> int:
        """Return the offset of the first message that is not settled."""
        return self._positions.ranges[0].first

    @property
    def recorded(self) -> int:
        """Return the offset of the first message that is not settled, as the disk has it.

        On a full disk it is the position that could not be recorded: messages must go on, because that frees the disk.
        """
        return self._positions.ranges[0].recorded

    @property
    def unrecorded(self) -> int:
        """Return how many messages were taken, and would be taken again after a crash. For the consumer.

        Counts messages that the journal has dropped in between, until those before them are settled.
        """
        ranges = self._positions.ranges
        if len(ranges) == 1:  # asked for each message
            return ranges[0].next_offset - ranges[0].recorded
        return sum(each.next_offset - each.recorded for each in ranges)

    @property
    def depth(self) -> int:
        """Return the number of stored messages that are not settled."""
        begin = self._journal.begin
        return sum(max(0, each.end_in(self.end) - max(each.first, begin)) for each in self._positions.ranges)

    @property
    def dropped_unseen(self) -> int:
        """Return how many messages that were neither taken nor loaded the journal has dropped."""
        begin = self._journal.begin
        with self._lock:
            return sum(each.left_before(begin, self.end) for each in self._positions.ranges)

    def room_to_load(self, most: int) -> tuple[int, int]:
        """Return how many messages, at most ``most``, and bytes to load now; 0 until there is much room in memory."""
        held = self._entered - self._left
        room, room_bytes = self._max_messages - held, self._max_bytes - self._entered_bytes + self._left_bytes
        has_much = room >= min(most, self._max_messages // 2 + 1) and room_bytes >= self._max_bytes // 2
        if sum(len(each.ready) for each in self._positions.ranges) >= most or (held and not has_much):
            return 0, 0
        return min(room, most), max(room_bytes, 1)

    def close(self) -> None:
        """Record the position, write what waits for the disk, and close the journal. Idempotent.

        Raises:
            JournalError: as :meth:`Journal.close <messaging.journal.Journal.close>`.
        """
        self._positions.close()
        self._journal.close()


class _Positions(Generic[Item]):
    """The ranges of a queue, and their positions on the disk, recorded on worker threads.

    Args:
        what, journal, name, on_recorded: see :class:`DurableQueue`.
        lock: guards which ranges there are.

    Attributes:
        ranges: in the order of their offsets, replaced when it changes; messages are stored in the last one.
        is_recording: whether the position is being recorded, or will be.
    """

    def __init__(
        self, what: str, journal: Journal, name: str, lock: threading.Lock, on_recorded: Callable[[], object]
    ) -> None:
        self._what = what
        self._journal = journal
        self._name = name
        self._lock = lock
        self._on_recorded = on_recorded
        self.ranges = self._open()
        #: held while positions are written to the disk, which ends with ``close``
        self._recording = threading.Lock()
        self._is_closed = False
        self.is_recording = False
        #: whether the last attempt failed
        self._has_failed = False
        #: names of cursors of ranges that were joined
        self._obsolete: list[str] = []

    def _open(self) -> tuple[_Range[Item], ...]:
        """Return the ranges that the cursors tell of."""
        journal = self._journal
        oldest = journal.cursor(self._name)
        ranges: list[_Range[Item]] = [_Range(oldest, oldest.position)]
        for start in later_starts(self._name, [*journal.cursors()]):
            before, cursor = ranges[-1], journal.cursor(f"{self._name}-{start}")
            if start > before.first:
                before.end = start
                ranges.append(_Range(cursor, max(start, cursor.position)))
                continue
            # the range before is done, and goes on with the position of this one
            before.cursor.take_over(cursor)
            journal.remove_cursor(cursor.name)
            ranges[-1] = _Range(before.cursor, before.cursor.position)
        return tuple(ranges)

    def range_of(self, offset: int) -> _Range[Item]:
        """Return the range that an offset is in."""
        for each in self.ranges:
            if each.end is None or offset < each.end:
                return each
        raise AssertionError(offset)  # the last one has no end

    def begin(self, end: int) -> None:
        """Begin a range at an offset, unless there are ``MAX_RANGES`` already."""
        if len(self.ranges) >= MAX_RANGES:
            return
        try:
            cursor = self._journal.cursor(f"{self._name}-{end}", end)
        except MessagingError as error:
            logger.warning("%s: new messages do not overtake the stored ones: %s", self._what, error)
            return
        last = self.ranges[-1]
        following: _Range[Item] = _Range(cursor, end)
        with self._lock:
            later = last.end_before(end)
            following.ready.extend(later)
            following.tail = end + len(later)
            self.ranges = (*self.ranges, following)
        logger.info("%s: new messages overtake %s", self._what, counted(end - last.first, "stored message"))

    def record_in(self, pause: float) -> None:
        """Record the position after ``pause`` seconds, unless it is being recorded. From any thread."""
        if not self.is_recording:
            self.is_recording = True
            running = engine()
            running.call(clock.call_later, running.loop, pause, workers().submit, self._record)

    def _record(self) -> None:
        """Record the position. On a worker thread, one at a time."""
        pause = _RECORD_PAUSE
        ranges = self.ranges
        positions = [each.first for each in ranges]
        try:
            with self._recording:
                if self._is_closed:
                    return
                for each, position in zip(ranges, positions, strict=True):
                    each.cursor.commit(position, wait=each is ranges[-1])
                self._join()
            self._has_failed = False
        except ClosedError:
            return
        except MessagingError as error:  # of a full disk: messages must go on, because that frees the disk
            if not self._has_failed:
                logger.warning("%s: %s; trying again; a crash until then makes duplicates", self._what, error)
            self._has_failed = True
            pause = _RETRY
        for each, position in zip(ranges, positions, strict=True):
            each.recorded = position
        # cleared before the positions are read again: a change after this line sees it
        self.is_recording = False
        if self._obsolete or any(each.first != each.recorded for each in self.ranges):
            self.record_in(pause)
        self._on_recorded()

    def _join(self) -> None:
        """Have the oldest range end where the next one does, if all its messages are settled. One thread at a time.

        Raises:
            MessagingError: the cursor of the next one is not removed, which keeps its records; to be tried again.
        """
        while (oldest := self.ranges[0]).end is not None and oldest.first >= oldest.end:
            with self._lock:
                following = self.ranges[1]
                oldest.cursor.take_over(following.cursor)
                self._obsolete.append(following.cursor.name)
                following.cursor = oldest.cursor
                self.ranges = self.ranges[1:]
        while self._obsolete:
            self._journal.remove_cursor(self._obsolete[0])
            del self._obsolete[0]

    def close(self) -> None:
        """Have the journal store the positions when it closes, and record nothing more. Idempotent."""
        with self._recording:  # a range that is being joined changes its cursor
            if not self._is_closed:
                self._is_closed = True
                for each in self.ranges:
                    each.cursor.commit(each.first, wait=False)


class _Range(Generic[Item]):
    """A part of the journal whose messages are taken in order.

    Attributes:
        cursor: keeps its position.
        end: the offset behind its last message; ``None``: the end of the journal.
        ready: its next messages, as far as they are in memory.
        tail: the offset behind the last message of ``ready``.
        first: the offset of the first message that is not settled.
        is_ahead: whether messages behind ``first`` are settled, or lost: the cursor knows which. Set by the consumer.
        recorded: ``first``, as the disk has it.
    """

    __slots__ = ("cursor", "end", "first", "is_ahead", "ready", "recorded", "tail")

    def __init__(self, cursor: Cursor, start: int) -> None:
        self.cursor = cursor
        self.end: int | None = None
        self.ready: deque[Item] = deque()
        self.tail = self.first = self.recorded = start
        self.is_ahead = cursor.is_ahead

    @property
    def next_offset(self) -> int:
        """Return the offset of the next message, or one before it."""
        try:
            return self.ready[0].offset
        except IndexError:
            return self.tail

    def end_in(self, end: int) -> int:
        """Return the offset behind the last message of the range; ``end`` is that of the queue."""
        return end if self.end is None else self.end

    def settle_later(self, offset: int) -> None:
        """Note that a message is settled that is not the first one."""
        self.is_ahead = True
        with suppress(ClosedError):
            self.cursor.acknowledge(offset)

    def pass_over(self) -> bool:
        """Move ``first`` to the first message that is neither settled nor lost; return whether it has moved."""
        before = self.first
        with suppress(ClosedError):
            self.cursor.commit(before, wait=False)
        self.first = max(before, self.cursor.position)
        self.is_ahead = self.cursor.is_ahead
        return self.first != before

    def left_before(self, begin: int, end: int) -> int:
        """Return how many of its messages that were not taken are before ``begin``; ``end`` is that of the queue."""
        ready = sum(1 for _ in itertools.takewhile(lambda each: each.offset < begin, self.ready))
        return ready + max(0, min(self.end_in(end), begin) - self.tail)

    def end_before(self, end: int) -> list[Item]:
        """End the range before an offset; return the messages in memory from there on, which belong to the next."""
        self.end = end
        later: list[Item] = []
        while self.ready and self.ready[-1].offset >= end:
            later.append(self.ready.pop())
        self.tail = min(self.tail, end)
        later.reverse()
        return later


def later_starts(name: str, cursors: Sequence[str]) -> list[int]:
    """Return the offsets with which the later ranges of a queue begin, in order, from the names of cursors."""
    prefix = f"{name}-"
    numbers = [each.removeprefix(prefix) for each in cursors if each.startswith(prefix)]
    return sorted(int(each) for each in numbers if each.isascii() and each.isdigit())

"""Ranges of a buffer: parts of its journal that are published one beside the other, each in order.

A buffer has one range, from the first message that the target has not confirmed to the end of the journal. With
``order = "newest_first"`` a new range begins when the target can be reached again: it is published first, and the older
ranges are the backlog. Each range keeps its position on the disk in a cursor of its own. That of the oldest is called
``target``, those of the others ``target-OFFSET``, with the offset that they begin with.

**Threads.** The messages in memory (``ready``, ``tail``) are guarded by the lock of the buffer. The rest is for the
thread of the drain, but for ``recorded``, which the thread that records positions sets.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Final

from messaging.errors import JournalRangeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from messaging.gateway.stored import Stored
    from messaging.journal import Cursor, Journal, Record

#: the name of the cursor of the oldest range
CURSOR: Final = "target"
#: ranges of a buffer, at most
MAX_RANGES: Final = 16
#: messages of a range in memory behind the disk, and bytes of their payloads
MEMORY_MESSAGES: Final = 4096
MEMORY_BYTES: Final = 8 * 2**20


def _records(journal: Journal, start: int, end: int) -> Iterator[Record]:
    """Return the records of a range of offsets, without those that the journal has dropped."""
    while True:
        begin = max(start, journal.begin)
        if begin >= end:
            return iter(())
        try:
            return journal.read(begin, end)
        except JournalRangeError:
            if journal.begin == begin:  # else more were dropped just now
                raise


def cursor_name(start: int) -> str:
    """Return the name of the cursor of a range that begins with an offset, and is not the oldest one."""
    return f"{CURSOR}-{start}"


def later_starts(names: Sequence[str]) -> list[int]:
    """Return the offsets with which ranges begin, in order, from the names of cursors; without the oldest range."""
    prefix = f"{CURSOR}-"
    numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return sorted(int(each) for each in numbers if each.isascii() and each.isdigit())


class Range:
    """A part of the journal.

    Args:
        cursor: keeps its position.
        start: the offset of its first message.

    Attributes:
        end: the offset behind its last message; ``None``: the end of the journal.
        ready: its next messages, as far as they are in memory.
        tail: the offset behind the last message of ``ready``.
        first: the offset of the first message that is not settled.
        recorded: ``first``, as the disk has it.
        missed: messages that were not read because the journal had dropped them, or they are damaged.
    """

    __slots__ = (
        "_gaps", "_next_record", "_ready_bytes", "_records", "_settled", "_until", "cursor", "end", "first",
        "missed", "ready", "recorded", "tail",
    )  # fmt: skip

    def __init__(self, cursor: Cursor, start: int) -> None:
        self.cursor = cursor
        self.end: int | None = None
        self.ready: deque[Stored] = deque()
        self._ready_bytes = 0
        self.tail = self.first = self.recorded = start
        self.missed = 0
        #: settled offsets behind ``first``
        self._settled: set[int] = set()
        #: offsets that the journal does not have any more: the first -> the one behind the last
        self._gaps: dict[int, int] = {}
        # --- reading from the disk
        self._records: Iterator[Record] = iter(())
        self._next_record = self._until = -1

    @property
    def next_offset(self) -> int:
        """Return the offset of the next message, or one before it."""
        try:
            return self.ready[0].offset
        except IndexError:
            return self.tail

    # --- under the lock of the buffer

    def add(self, stored: Stored) -> None:
        """Keep a message in memory that was stored just now, if it follows and there is room."""
        size = len(stored.payload)
        if stored.offset == self.tail and (
            not self.ready or (len(self.ready) < MEMORY_MESSAGES and self._ready_bytes + size <= MEMORY_BYTES)
        ):
            self.tail = stored.offset + 1
            self.ready.append(stored)
            self._ready_bytes += size

    def pop(self) -> Stored:
        """Take the next message of those in memory."""
        stored = self.ready.popleft()
        self._ready_bytes -= len(stored.payload)
        return stored

    def put_back(self, messages: Sequence[Stored]) -> None:
        """Return messages that were taken, in order, to the front."""
        self.ready.extendleft(reversed(messages))
        self._ready_bytes += sum(len(each.payload) for each in messages)

    def extend(self, messages: Sequence[Stored], tail: int) -> None:
        """Add messages that were read from the disk; ``tail`` is the offset behind them."""
        self.ready.extend(messages)
        self._ready_bytes += sum(len(each.payload) for each in messages)
        self.tail = tail

    def left_before(self, begin: int, end: int) -> int:
        """Return how many of its messages that were not taken are before ``begin``; ``end`` is that of the journal."""
        ready = sum(1 for _ in itertools.takewhile(lambda each: each.offset < begin, self.ready))
        return ready + max(0, min(end if self.end is None else self.end, begin) - self.tail)

    def end_before(self, end: int) -> list[Stored]:
        """End the range before an offset; return the messages in memory from there on, which belong to the next."""
        self.end = end
        later: list[Stored] = []
        while self.ready and self.ready[-1].offset >= end:
            stored = self.ready.pop()
            self._ready_bytes -= len(stored.payload)
            later.append(stored)
        self.tail = min(self.tail, end)
        self._next_record = -1  # what is being read may go further
        later.reverse()
        return later

    # --- on the thread of the drain

    def read(self, journal: Journal, end: int, most: int, most_bytes: int) -> tuple[list[Record], int]:
        """Read the next records from the disk.

        Args:
            journal: the records.
            end: the offset behind the last one that may be read.
            most: number of records, at most.
            most_bytes: bytes of payloads, at most, unless the first one alone has more.

        Returns:
            The records, and the offset that the next call begins with.

        Raises:
            JournalError: the disk cannot be read.
        """
        start = self.tail
        if self._next_record != start or self._until <= start:
            self._records = _records(journal, start, end)
            self._until = end
        found: list[Record] = []
        size = 0
        following = self._until
        for record in self._records:
            found.append(record)
            size += len(record.payload)
            if len(found) >= most or size >= most_bytes:
                following = record.offset + 1
                break
        self._next_record = following
        # offsets in between that are missing were dropped to make room, or for their age, or are damaged
        expected = start
        for record in found:
            if record.offset > expected:
                self._miss(expected, record.offset)
            expected = record.offset + 1
        if following > expected:
            self._miss(expected, following)
        return found, following

    def _miss(self, start: int, end: int) -> None:
        self._gaps[start] = end
        self.missed += end - start

    def settle(self, offset: int) -> bool:
        """Note that a message is settled; return whether ``first`` has moved."""
        if offset != self.first:
            self._settled.add(offset)
            return False
        self.first = offset + 1
        self.pass_over()
        return True

    def pass_over(self) -> bool:
        """Move ``first`` to the first message that is neither settled nor lost; return whether it has moved."""
        position = self.first
        while True:
            if position in self._settled:
                self._settled.remove(position)
                position += 1
            elif position in self._gaps:
                position = self._gaps.pop(position)
            else:
                break
        moved = position != self.first
        self.first = position
        return moved

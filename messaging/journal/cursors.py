"""Cursors: named positions in a journal, each of which acknowledges for itself.

Positions, and what is acknowledged beyond them, are kept in memory and stored in the database of the journal, together,
by the thread of the journal or by the caller that waits. A crash loses no record: it may deliver those again whose
acknowledgement was not stored.
"""

from __future__ import annotations

import logging
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Final

from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ClosedError, JournalError, JournalRangeError
from messaging.errors.checks import check_instance
from messaging.execution import clock, doubled
from messaging.journal.folders import journal_errors
from messaging.journal.reader import RecordReader
from messaging.journal.records import Record, check_offset
from messaging.journal.segments import RecordLog
from messaging.journal.state import DROPPED, State

logger = logging.getLogger(__name__)

#: pause between two times that positions are stored without a caller that waits, seconds
_SAVE_PAUSE: Final = 0.05
#: longest time that acknowledgements beyond a position wait to be stored with it, seconds
_RANGES_PAUSE: Final = 0.5
#: longest pause after a failure, seconds
_RETRY_MOST: Final = 2.0
#: a range of acknowledged offsets in the database, and the number of them that is stored for a cursor
_PAIR: Final = struct.Struct("<QQ")
_MOST_STORED: Final = 4096


class Cursors:
    """The positions of all cursors of one journal. Thread safe.

    Args:
        log: the records.
        state: stores the positions.
        changed: called after a position has changed, on the thread that changed it.
    """

    def __init__(self, log: RecordLog, state: State, changed: Callable[[], object]) -> None:
        self._log = log
        self._state = state
        self._changed = changed
        #: when positions are stored the next time without a caller that waits, monotonic; and failures in a row
        self._next_save = 0.0
        self._failures = 0
        self._is_closed = False
        #: held while positions are stored, so that an older position never replaces a newer one in the database, and
        #: that a caller who finds nothing to store knows that it is stored. Acquired before ``_lock``
        self._storing = threading.Lock()
        #: guards everything below
        self._lock = threading.Lock()
        stored, positions = state.passed(), state.cursors()
        #: offsets beyond the positions that are acknowledged, or whose records are lost
        self._passed = {name: _Ranges.parse(stored.get(name, b"")) for name in positions}
        #: what earlier runs have acknowledged, which readers skip
        self._earlier = {name: _Ranges.parse(data) for name, data in stored.items() if data}
        self._positions = {
            name: self._passed[name].leave(max(log.begin, position)) for name, position in positions.items()
        }
        self._unsaved: set[str] = set()
        self._unsaved_drops = 0
        #: cursors whose positions are the same, and that have acknowledged more beyond them: since when, monotonic
        self._unsaved_ranges: dict[str, float] = {}
        #: records that were dropped before their slowest cursor acknowledged them, since the journal was created
        self.dropped = state.counter(DROPPED)

    def open(self, name: str, start: int) -> int:
        """Return the position of a cursor, which is created at ``start`` and stored if it is missing."""
        self.refuse_closed()
        with self._storing:
            with self._lock:
                if name in self._positions:
                    return self._positions[name]
                self._passed[name] = _Ranges()
                # until it is stored, which may fail, it keeps its records, and frees none
                self._positions[name] = min(start, min(self._positions.values(), default=self._log.begin))
            with on_failure(self._forget, name):  # it must not keep records that no reader will acknowledge
                start = max(start, self._log.begin)
                self._state.save_cursors({name: start})
                with self._lock:
                    start = self._positions[name] = max(start, self._positions[name])
        return start

    def remove(self, name: str) -> bool:
        """Forget a cursor; return whether there was one."""
        self.refuse_closed()
        with self._storing:
            with self._lock:
                known = name in self._positions
            if known:
                if self._unsaved:  # another cursor may have taken over what this one has acknowledged
                    self._save()
                self._state.delete_cursor(name)
                self._forget(name)
        if known:
            self._changed()
        return known

    def _forget(self, name: str) -> None:
        with self._lock:
            del self._positions[name], self._passed[name]
            self._earlier.pop(name, None)
            self._unsaved.discard(name)
            self._unsaved_ranges.pop(name, None)

    def refuse_closed(self) -> None:
        """Raise :class:`ClosedError` if the journal is closed, or belongs to the parent of a forked process."""
        if self._is_closed:
            raise ClosedError(f"journal {self._log.folder.shown}: closed")

    def close(self) -> None:
        """Refuse further changes. What has changed can still be saved."""
        self._is_closed = True

    def after_fork(self) -> None:
        """Refuse changes. In a forked child, whose parent goes on."""
        self._is_closed = True
        self._storing = threading.Lock()
        self._lock = threading.Lock()

    def positions(self) -> dict[str, int]:
        """Return the position of each cursor: the offset of the first record that it has not acknowledged."""
        with self._lock:
            return dict(self._positions)

    def position(self, name: str) -> int:
        """Return the position of a cursor.

        Raises:
            JournalError: the cursor was removed.
        """
        with self._lock:
            return self._position(name)

    def _position(self, name: str) -> int:
        position = self._positions.get(name)
        if position is None:
            raise JournalError(self._log.folder.shown, f"cursor {name!r} was removed")
        return position

    def slowest(self) -> int:
        """Return the offset of the first record that a cursor has not acknowledged; without cursors the oldest."""
        with self._lock:
            return max(self._log.begin, min(self._positions.values())) if self._positions else self._log.begin

    def acknowledge(self, name: str, begin: int, end: int) -> None:
        """Acknowledge the records from ``begin`` to before ``end``, in any order; stored soon.

        The position moves when all before it are acknowledged, by any holder of the cursor.

        Raises:
            JournalError: the cursor was removed.
            ClosedError: the journal is closed.
        """
        self.refuse_closed()
        with self._lock:
            before = self._position(name)
            if end <= before:
                return
            passed = self._passed[name]
            passed.add(begin, end)
            position = passed.leave(before)
            if position > before:
                self._move(name, position)
            else:
                is_first = not self._unsaved_ranges
                self._unsaved_ranges.setdefault(name, clock.monotonic())
                if not is_first:
                    return
        self._changed()

    def is_ahead(self, name: str) -> bool:
        """Return whether a cursor has acknowledged records beyond its position."""
        with self._lock:
            return self._position(name) < self._passed[name].end

    def take_over(self, name: str, other: str) -> None:
        """Acknowledge all records that another cursor has acknowledged, before its position and beyond.

        Raises:
            JournalError: a cursor was removed.
        """
        with self._lock:
            passed, position = self._passed[name], self._position(other)
            passed.add_all(self._passed[other])
            if other in self._earlier:
                self._earlier.setdefault(name, _Ranges()).add_all(self._earlier[other])
            self._move(name, passed.leave(max(position, self._position(name))))
        self._changed()

    def without_earlier(self, name: str, records: list[Record]) -> list[Record]:
        """Return those of ``records``, which are in order, that no earlier run has acknowledged."""
        passed = self._earlier.get(name)
        if passed is None or not records or passed.end <= records[0].offset:
            return records
        return [record for record in records if record.offset not in passed]

    def _move(self, name: str, position: int) -> None:
        self._unsaved.add(name)  # first: an interrupt must not leave a position that is never stored
        self._positions[name] = position

    def skip_to(self, begin: int, dropped: int) -> None:
        """Move the cursors that are before ``begin`` there: ``dropped`` records were dropped."""
        with self._lock:
            self.dropped += dropped
            self._unsaved_drops += dropped
            for name, position in self._positions.items():
                if position < begin:
                    self._move(name, self._passed[name].leave(begin))

    @property
    def is_saved(self) -> bool:
        """Return whether everything is stored, where readers in other processes find it."""
        return not (self._unsaved_ranges or self._unsaved or self._unsaved_drops or self._state.is_alone)

    def save(self) -> None:
        """Store the positions that have changed. On any thread.

        Raises:
            JournalError: they are not stored, and still count as changed.
        """
        with self._storing:
            self._save()

    def save_in_time(self) -> float | None:
        """Store the positions that have changed if it is time, unless that has to wait for another thread or program.

        On the thread of the journal, which must not keep records waiting.

        Returns:
            The seconds until the next call; ``None``: not before something changes.
        """
        if self.is_saved:
            return None
        now, due = clock.monotonic(), self._next_save
        if not (self._unsaved or self._unsaved_drops or self._state.is_alone):
            with self._lock:
                due = max(due, next(iter(self._unsaved_ranges.values()), 0.0) + _RANGES_PAUSE)
        if now < due:
            return due - now
        try:
            if self._storing.acquire(blocking=False):
                try:
                    self._save(patience=0.0)
                finally:
                    self._storing.release()
        except JournalError as error:
            self._failures += 1
            pause = doubled(_SAVE_PAUSE, _RETRY_MOST, self._failures)
            if self._failures == 1:
                logger.warning("%s; positions of cursors are kept in memory, and stored with the next try", error)
        else:
            pause, self._failures = _SAVE_PAUSE, 0
        self._next_save = clock.monotonic() + pause
        return None if self.is_saved else pause

    def _save(self, patience: float | None = None) -> None:
        with self._lock:
            names = [*(self._unsaved | self._unsaved_ranges.keys())]
            positions = {name: self._positions[name] for name in names}
            passed = {name: self._passed[name].dump(self._positions[name]) for name in names}
            drops, self._unsaved_drops = self._unsaved_drops, 0
            self._unsaved.clear()
            self._unsaved_ranges.clear()
        with on_failure(self._note_unsaved, names, drops):
            self._state.save_cursors(positions, passed=passed, drops=drops, patience=patience)

    def _note_unsaved(self, names: Iterable[str], drops: int) -> None:
        with self._lock:
            self._unsaved.update(names)
            self._unsaved_drops += drops


class Cursor:
    """A named position in a journal. Thread safe; get it with :meth:`Journal.cursor`.

    Reading and acknowledging are separate: :meth:`read` returns records in order, each once. A cursor that is opened
    again reads from the first record that was not acknowledged. After the journal was opened again, it also skips the
    records behind that one that were acknowledged before.

    Attributes:
        lost: records that :meth:`read` did not find: they are damaged, or were dropped to make room or for their age.
        reader: where :meth:`read` continues.
    """

    def __init__(self, name: str, cursors: Cursors, log: RecordLog, wait: Callable[[int, float], bool]) -> None:
        self.name = name
        self._cursors = cursors
        self._log = log
        self._wait = wait
        #: guards the reader
        self._lock = threading.Lock()
        self.reader = RecordReader(log, cursors.position(name))
        self.lost = 0

    @property
    def position(self) -> int:
        """Return the offset of the first record that is not acknowledged."""
        return self._cursors.position(self.name)

    @property
    def is_ahead(self) -> bool:
        """Return whether records beyond the position are acknowledged."""
        return self._cursors.is_ahead(self.name)

    @property
    def behind(self) -> int:
        """Return the number of records that are not acknowledged."""
        return max(0, self._log.end - self.position)

    def read(
        self, most: int = 1000, *, most_bytes: int = 2**20, timeout: float = 0.0, until: float = inf
    ) -> list[Record]:
        """Return the next records, which may be none. Damaged ones are skipped, and count as acknowledged.

        Args:
            most: number of records, at most.
            most_bytes: bytes of payloads, at most, unless the first one alone has more.
            timeout: how long to wait for a record, seconds.
            until: the offset before which reading stops; without ``timeout``.

        Raises:
            ArgumentError: ``most`` or ``most_bytes`` is no integer above 0.
            JournalError: the disk failed.
            ClosedError: the journal is closed.
        """
        self._cursors.refuse_closed()
        for what, value in (("most", most), ("most_bytes", most_bytes)):
            if check_offset(value, what) < 1:
                raise ArgumentError(f"{what} must be an integer above 0, not {value}")
        found, after = self._take(most, most_bytes, until)
        if found or timeout <= 0 or not self._wait(after, timeout):
            return found
        return self._take(most, most_bytes, until)[0]

    def _take(self, most: int, most_bytes: int, until: float) -> tuple[list[Record], int]:
        """Return the next records that no earlier run has acknowledged, and the offset after the last one read."""
        while True:
            found, after = self._take_next(most, most_bytes, until)
            wanted = self._cursors.without_earlier(self.name, found)
            if wanted or not found:
                return wanted, after

    def _take_next(self, most: int, most_bytes: int, until: float) -> tuple[list[Record], int]:
        with self._lock:
            before = expected = self.reader.offset
            with journal_errors(self._log.folder, "cannot read"):
                found = self.reader.take(most, most_bytes, until)
            after = self.reader.offset
            if after - before == len(found):
                return found, after
            self.lost += after - before - len(found)
            for offset in [*(record.offset for record in found), after]:
                if offset > expected:
                    self._cursors.acknowledge(self.name, expected, offset)
                expected = offset + 1
        return found, after

    def rewind(self) -> None:
        """Read again from the first record that is not acknowledged. Raises ``ClosedError``."""
        self.seek(self.position)

    def seek(self, offset: int) -> None:
        """Continue reading at an offset. Raises ``ClosedError``."""
        self._cursors.refuse_closed()
        with self._lock:
            if offset != self.reader.offset:
                self.reader.seek(offset)

    def commit(self, until: int | None = None, *, wait: bool = True) -> None:
        """Acknowledge all records before an offset.

        Args:
            until: the offset; ``None``: that after the last record that was read.
            wait: whether to return when the position is on the disk; otherwise it is stored soon.

        Raises:
            ArgumentError: ``until`` is no integer, or negative.
            JournalRangeError: the journal does not have the records before ``until``.
            JournalError: the position is not stored; it is tried again. The records are acknowledged until the process
                ends.
            ClosedError: the journal is closed.
        """
        self._cursors.refuse_closed()
        if until is None:
            with self._lock:
                until = self.reader.offset
        check_offset(until, "until")
        self._acknowledge(0, until, until)
        if wait:
            self._cursors.save()

    def take_over(self, other: Cursor) -> None:
        """Acknowledge all records that another cursor has acknowledged, before its position and beyond; in memory.

        Raises:
            ArgumentError: ``other`` is no cursor.
            JournalError: a cursor was removed.
        """
        check_instance("other", other, Cursor)
        self._cursors.take_over(self.name, other.name)

    def acknowledge(self, offset: int) -> None:
        """Acknowledge one record, in any order; stored soon. The position moves when all before it are acknowledged.

        Raises:
            ArgumentError: ``offset`` is no integer, or negative.
            JournalRangeError: the journal does not have the offset yet.
            ClosedError: the journal is closed.
        """
        check_offset(offset, "offset")
        self._acknowledge(offset, offset + 1, offset)

    def _acknowledge(self, begin: int, end: int, told: int) -> None:
        if end > self._log.end:
            raise JournalRangeError(
                self._log.folder.shown,
                f"cursor {self.name!r}: offset {told} is acknowledged, and the journal ends at {self._log.end}",
            )
        self._cursors.acknowledge(self.name, begin, end)


class _Ranges:
    """A set of offsets as ranges: of a million offsets in a row it keeps two numbers."""

    def __init__(self) -> None:
        #: in order; no range touches another
        self._begins: list[int] = []
        self._ends: list[int] = []

    @classmethod
    def parse(cls, data: bytes) -> _Ranges:
        """Return the ranges that :meth:`dump` has written; none if the data is malformed."""
        found = cls()
        if len(data) % _PAIR.size == 0:
            last = 0
            for begin, end in _PAIR.iter_unpack(data):
                if not last <= begin < end:
                    return cls()
                found.add(begin, end)
                last = end
        return found

    def dump(self, offset: int) -> bytes:
        """Return the ranges from ``offset`` on as bytes; a bounded number, the first ones."""
        at = bisect_right(self._ends, offset)
        ranges = zip(self._begins[at : at + _MOST_STORED], self._ends[at : at + _MOST_STORED], strict=True)
        return b"".join(_PAIR.pack(*each) for each in ranges)

    @property
    def end(self) -> int:
        """Return the offset after the last one in the set; 0 if it is empty."""
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._begins, self._ends, strict=True)

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._begins, offset)
        return at > 0 and offset < self._ends[at - 1]

    def add(self, begin: int, end: int) -> None:
        """Add the offsets from ``begin`` to before ``end``."""
        at, until = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if at < until:  # the ranges between touch the new one
            begin, end = min(begin, self._begins[at]), max(end, self._ends[until - 1])
        self._begins[at:until], self._ends[at:until] = [begin], [end]

    def add_all(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Add the offsets of other ranges."""
        for begin, end in ranges:
            self.add(begin, end)

    def leave(self, offset: int) -> int:
        """Return the first offset from ``offset`` on that is not in the set, and forget the ranges before it.

        The one that ends there stays: the caller may be interrupted, and ask again.
        """
        at = bisect_right(self._begins, offset)
        if not at:
            return offset
        del self._begins[: at - 1], self._ends[: at - 1]
        return max(offset, self._ends[0])


def acknowledged_end(state: State) -> int:
    """Return the offset after the last one that a stored cursor has acknowledged, or stands at."""
    ends = [_Ranges.parse(data).end for data in state.passed().values()]
    return max([*state.cursors().values(), *ends], default=0)


def check_cursor_name(name: object) -> str:
    """Return ``name`` if a cursor can have it; raise ``ArgumentError``."""
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise ArgumentError(f"a cursor name must have 1 to 200 printable characters, not {name!r:.100}")
    return name

"""Where the frames of a log are: found by offset, and weighed, without a look at the disk."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right


class Index:
    """The frames of a log, in order. Guarded by the lock of the log."""

    def __init__(self, begin: int) -> None:
        #: offset of the first row that is there, and the one after the last
        self.begin = self.end = begin
        # arrays: a backlog of small frames has millions
        self._firsts = array("q")
        self._segments = array("q")  # by the offset in their names
        self._positions = array("q")
        self._lengths = array("q")
        #: bytes of all frames ever added, up to the end of each
        self._totals = array("q")
        self._total = 0

    def add(self, first: int, rows: int, segment: int, position: int, length: int) -> None:
        """A frame follows: ``rows`` from offset ``first`` on, in ``length`` bytes of ``segment``."""
        if not self._firsts:
            self.begin = first
        self._firsts.append(first)
        self._segments.append(segment)
        self._positions.append(position)
        self._lengths.append(length)
        self._total += length
        self._totals.append(self._total)
        self.end = first + rows

    def segment_of(self, offset: int) -> int | None:
        """The segment that holds ``offset``."""
        at = bisect_right(self._firsts, offset) - 1
        return self._segments[at] if at >= 0 else None

    def forget(self, segment: int) -> None:
        """Drop the frames of all segments before ``segment``."""
        count = bisect_left(self._segments, segment)
        for column in (self._firsts, self._segments, self._positions, self._lengths, self._totals):
            del column[:count]
        self.begin = self._firsts[0] if self._firsts else self.end

    def bytes_from(self, offset: int) -> int:
        """Bytes of the frames that hold ``offset`` and what follows."""
        at = max(0, bisect_right(self._firsts, offset) - 1)
        if offset >= self.end or at >= len(self._totals):
            return 0
        return self._total - (self._totals[at] - self._lengths[at])

    def end_within(self, start: int, limit: int) -> int:
        """The largest offset so that the rows from ``start`` to it hold some ``limit`` bytes at most; one row at least.

        All rows of a frame count the same.
        """
        at = max(0, bisect_right(self._firsts, start) - 1)
        if start >= self.end or at >= len(self._totals):
            return self.end
        until = self._totals[at] - self._lengths[at] + self._share(at, start - self._firsts[at]) + limit
        last = bisect_right(self._totals, until)
        if last >= len(self._firsts):
            return self.end
        rows = self._rows(last)
        within = (until - (self._totals[last] - self._lengths[last])) * rows // self._lengths[last]
        return max(start + 1, self._firsts[last] + within)

    def _rows(self, at: int) -> int:
        """Rows of a frame."""
        return (self._firsts[at + 1] if at + 1 < len(self._firsts) else self.end) - self._firsts[at]

    def _share(self, at: int, rows: int) -> int:
        """Bytes of the first ``rows`` rows of a frame."""
        return self._lengths[at] * rows // self._rows(at)

    def spans(self, start: int, end: int) -> list[tuple[int, int, int, int, int]]:
        """Segment, position, length and the offsets, for the rows from ``start`` to ``end``."""
        found: list[tuple[int, int, int, int, int]] = []
        if start >= end:
            return found
        at = max(0, bisect_right(self._firsts, start) - 1)
        while at < len(self._firsts) and self._firsts[at] < end:
            segment = self._segments[at]
            after = bisect_right(self._segments, segment, at)
            stop = min(after, bisect_left(self._firsts, end, at))
            position = self._positions[at]
            length = self._positions[stop - 1] + self._lengths[stop - 1] - position
            until = self._firsts[stop] if stop < len(self._firsts) else self.end
            found.append((segment, position, length, max(start, self._firsts[at]), min(end, until)))
            at = stop
        return found

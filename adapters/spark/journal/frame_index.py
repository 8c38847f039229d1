"""The positions and sizes of the frames of a log, found by offset without disk access."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right


class Index:
    """The frames of a log, in order. Guarded by the lock of the log."""

    def __init__(self, begin: int) -> None:
        #: offset of the first row, and the offset after the last row
        self.begin = self.end = begin
        # arrays: a backlog of small frames has millions
        self._firsts = array("q")
        self._segments = array("q")  # the offsets in their names
        self._positions = array("q")
        self._lengths = array("q")
        #: bytes of all frames that were ever added, up to the end of each
        self._totals = array("q")
        self._total = 0

    def add(self, first: int, rows: int, segment: int, position: int, length: int) -> None:
        """Add a frame: ``rows`` from offset ``first`` on, in ``length`` bytes of ``segment``."""
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
        """Return the segment that holds ``offset``."""
        at = bisect_right(self._firsts, offset) - 1
        return self._segments[at] if at >= 0 else None

    def forget(self, segment: int) -> None:
        """Drop the frames of all segments before ``segment``."""
        count = bisect_left(self._segments, segment)
        for column in (self._firsts, self._segments, self._positions, self._lengths, self._totals):
            del column[:count]
        self.begin = self._firsts[0] if self._firsts else self.end

    def bytes_from(self, offset: int) -> int:
        """Return the bytes of the frame that holds ``offset``, and of all later frames."""
        at = max(0, bisect_right(self._firsts, offset) - 1)
        if offset >= self.end or at >= len(self._totals):
            return 0
        return self._total - (self._totals[at] - self._lengths[at])

    def end_within(self, start: int, limit: int) -> int:
        """Return the largest offset at which the rows from ``start`` on have about ``limit`` bytes; at least one row.

        All rows of a frame count the same.
        """
        at = max(0, bisect_right(self._firsts, start) - 1)
        if start >= self.end or at >= len(self._totals):
            return self.end
        skipped = self._lengths[at] * (start - self._firsts[at]) // self._rows(at)
        until = self._totals[at] - self._lengths[at] + skipped + limit
        last = bisect_right(self._totals, until)
        if last >= len(self._firsts):
            return self.end
        rows = self._rows(last)
        within = (until - (self._totals[last] - self._lengths[last])) * rows // self._lengths[last]
        return max(start + 1, self._firsts[last] + within)

    def _rows(self, at: int) -> int:
        """Return the number of rows of a frame."""
        return (self._firsts[at + 1] if at + 1 < len(self._firsts) else self.end) - self._firsts[at]

    def spans(self, start: int, end: int) -> list[tuple[int, int, int, int, int]]:
        """Return segment, position, length and offsets of the rows from ``start`` to ``end``, for each segment."""
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

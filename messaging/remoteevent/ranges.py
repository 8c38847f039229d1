"""A set of sequence numbers, kept as ranges: a million numbers in a row cost as much as one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, Final, Self

#: ranges that are kept
MAX_RANGES: Final = 1000


class SequenceRanges:
    """Numbers that were seen. Not thread safe.

    When there are more than ``limit`` ranges, the lowest one is forgotten: its numbers count as not seen.
    """

    __slots__ = ("_begins", "_ends", "_limit")

    def __init__(self, limit: int = MAX_RANGES) -> None:
        self._limit = limit
        #: in order; no range touches another
        self._begins: list[int] = []
        #: behind the last number of each
        self._ends: list[int] = []

    def add(self, number: int) -> bool:
        """Add a number; return whether it was not there."""
        begins, ends = self._begins, self._ends
        if ends and ends[-1] == number:  # the next one: by far the most frequent case
            ends[-1] = number + 1
            return True
        at = bisect_right(begins, number) - 1
        if at >= 0 and number < ends[at]:
            return False
        joins_left = at >= 0 and ends[at] == number
        joins_right = at + 1 < len(begins) and begins[at + 1] == number + 1
        if joins_left and joins_right:
            ends[at] = ends.pop(at + 1)
            begins.pop(at + 1)
        elif joins_left:
            ends[at] = number + 1
        elif joins_right:
            begins[at + 1] = number
        else:
            begins.insert(at + 1, number)
            ends.insert(at + 1, number + 1)
            if len(begins) > self._limit:
                del begins[0], ends[0]
        return True

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._begins, number) - 1
        return at >= 0 and number < self._ends[at]

    def count_missing(self, first: int, last: int) -> int:
        """Return how many of the numbers from ``first`` to ``last`` are not in the set."""
        if last < first:
            return 0
        missing = last - first + 1
        at = bisect_left(self._ends, first + 1)
        while at < len(self._begins) and self._begins[at] <= last:
            missing -= min(self._ends[at], last + 1) - max(self._begins[at], first)
            at += 1
        return missing

    @property
    def last(self) -> int | None:
        """The highest number; ``None`` if there is none."""
        return self._ends[-1] - 1 if self._ends else None

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._begins)

    def to_value(self) -> list[int]:
        """Return the set in portable form."""
        return [each for pair in zip(self._begins, self._ends, strict=True) for each in pair]

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Return the set of a portable form. Raises ``ValueError``, ``TypeError``."""
        found = cls()
        numbers = [int(each) for each in value]
        if len(numbers) % 2 or numbers != sorted(set(numbers)):
            raise ValueError("ranges must rise")
        found._begins, found._ends = numbers[::2], numbers[1::2]
        return found

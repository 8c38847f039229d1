"""Sets of sequence numbers in bounded memory (EV.2.3.2).

Sequence numbers of one kind of event rise, and arrive mostly in order. A set keeps them as ranges, so numbers without
gaps cost one range, however many there are. The lowest range begins at 0 and ends at the *floor*: every number up to
the floor counts as contained.

**Bound.** A set keeps at most ``max_ranges`` ranges above the floor. What happens with one more is up to the owner:

- The lowest range is forgotten. Its events are taken for new if they arrive again: no event is ever lost by the bound.
- With ``closes_gaps`` the floor moves up to the end of the lowest range. Events of the gap are taken for duplicates if
  they still arrive: no event is ever taken for new twice.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ArgumentError, DecodeError
from messaging.errors.text import tolerant
from messaging.remoteevent.event import check_sequence_number

if TYPE_CHECKING:
    from collections.abc import Iterator

#: ranges above the floor, unless the caller sets another bound
MAX_RANGES: Final = 1000


class SequenceRanges:
    """A set of sequence numbers, kept as ranges. The owner serialises the calls; reading is not safe meanwhile.

    Args:
        floor: every number up to this one is contained from the start; -1 for an empty set.
        max_ranges: ranges above the floor, at least 1.
        closes_gaps: whether one range more closes the lowest gap, instead of being forgotten.

    Attributes:
        floor: the highest number below which no number is missing; -1 if 0 is missing.

    Raises:
        ArgumentError: ``floor`` is below -1, or ``max_ranges`` below 1.
    """

    __slots__ = ("_first", "_last", "closes_gaps", "floor", "max_ranges")

    def __init__(self, floor: int = -1, *, max_ranges: int = MAX_RANGES, closes_gaps: bool = False) -> None:
        if not isinstance(max_ranges, int) or max_ranges < 1:
            raise ArgumentError(f"max_ranges must be an int of at least 1, not {max_ranges!r:.80}")
        self.floor = floor if floor == -1 else check_sequence_number(floor)
        self.max_ranges = max_ranges
        self.closes_gaps = closes_gaps
        #: first and last number of each range above the floor, in rising order; at least one number is between two
        self._first: list[int] = []
        self._last: list[int] = []

    def __contains__(self, number: int) -> bool:
        if number <= self.floor:
            return True
        at = bisect_left(self._last, number)
        return at < len(self._last) and self._first[at] <= number

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the ranges above the floor as (first, last), in rising order."""
        return iter(list(zip(self._first, self._last, strict=True)))

    def __len__(self) -> int:
        """Return the number of ranges above the floor."""
        return len(self._first)

    def __bool__(self) -> bool:
        """Return whether the set holds a number."""
        return self.highest >= 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SequenceRanges):
            return NotImplemented
        return self.floor == other.floor and self._first == other._first and self._last == other._last

    __hash__ = None  # type: ignore[assignment]  # the set is mutable

    @property
    def highest(self) -> int:
        """The highest number in the set; -1 if it is empty."""
        return self._last[-1] if self._last else self.floor

    @property
    def missing(self) -> int:
        """How many numbers between the floor and the highest number are not in the set."""
        return self.highest - self.floor - sum(self._last) + sum(self._first) - len(self._first)

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new: ``False`` if the set contained it.

        Args:
            number: from 0 to 2**63-1, as :class:`~messaging.remoteevent.RemoteEvent` checks it.
        """
        last = self._last
        if not last:
            if number == self.floor + 1:  # the usual case: in order, without gaps
                self.floor = number
                return True
        elif number == last[-1] + 1:  # in order, behind a gap
            last[-1] = number
            return True
        if number in self:
            return False
        self._put(number, number)
        return True

    def add_range(self, first: int, last: int) -> None:
        """Add the numbers from ``first`` to ``last``; none if ``last`` is lower."""
        first = max(first, self.floor + 1)
        if first <= last:
            self._put(first, last)

    def raise_floor(self, floor: int) -> None:
        """Make every number up to ``floor`` contained. A lower one changes nothing."""
        self.add_range(0, floor)

    def _put(self, first: int, last: int) -> None:
        """Add a range above the floor; join it with the ranges that it touches."""
        begin = bisect_left(self._last, first - 1)  # the first range that ends at first - 1 or later
        end = begin
        while end < len(self._first) and self._first[end] <= last + 1:
            end += 1
        if begin < end:
            first = min(first, self._first[begin])
            last = max(last, self._last[end - 1])
        self._first[begin:end] = [first]
        self._last[begin:end] = [last]
        if self._first[0] == self.floor + 1:
            self._lift()
        elif len(self._first) > self.max_ranges:
            if self.closes_gaps:
                self._lift()
            else:
                del self._first[0], self._last[0]

    def _lift(self) -> None:
        """Move the floor to the end of the lowest range."""
        del self._first[0]
        self.floor = self._last.pop(0)

    def to_value(self) -> list[Any]:
        """Return the set in portable form, for :meth:`from_value`: the floor, then first and last of each range."""
        value = [self.floor]
        for each in self:
            value += each
        return value

    @classmethod
    def from_value(cls, value: object, *, max_ranges: int = MAX_RANGES, closes_gaps: bool = False) -> SequenceRanges:
        """Return the set that :meth:`to_value` returned.

        Args:
            value: the portable form.
            max_ranges, closes_gaps: of the new set, see :class:`SequenceRanges`.

        Raises:
            DecodeError: the value is no such form.
        """
        if not isinstance(value, list | tuple) or len(value) % 2 == 0:
            raise DecodeError("not a set of sequence numbers: it must be a list with an odd number of integers")
        before = -2
        for number in value:
            if not isinstance(number, int) or isinstance(number, bool) or not -1 <= number < 2**63 or number < before:
                raise DecodeError(f"not a set of sequence numbers: {number!r:.80} follows {before}")
            before = number
        found = cls(value[0], max_ranges=max_ranges, closes_gaps=closes_gaps)
        for first, last in zip(value[1::2], value[2::2], strict=True):
            found.add_range(first, last)
        return found

    @tolerant
    def __repr__(self) -> str:
        ranges = ", ".join(f"{first}..{last}" for first, last in list(self)[:10])
        more = f", and {len(self) - 10} ranges" if len(self) > 10 else ""
        return f"<SequenceRanges up to {self.floor}{', ' if ranges else ''}{ranges}{more}>"

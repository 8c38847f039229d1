"""When the leases of a renewal manager are to be looked at: due times of many leases, of which few are due."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from messaging.leases.clock import Clock
    from messaging.leases.lease import Grantor, Lease

#: times beyond twice those that are valid from which on the others are removed
_SLACK: Final = 64

_numbers = itertools.count(1)


class Scheduled(Protocol):
    """A lease with its due time. All times are of the clock of the lease."""

    lease: Lease
    #: when it is due
    due: float
    #: from when on it may be renewed with a lease of the same grantor that is due; infinite: not before it is due
    early: float
    #: identifies it in the schedule; 0: it is in none
    number: int


S = TypeVar("S", bound=Scheduled)

_Times = list[tuple[float, int]]


class _Group:
    """The leases of one grantor."""

    __slots__ = ("early", "size")

    def __init__(self) -> None:
        #: heap of the times from which on they may be renewed, with their numbers
        self.early: _Times = []
        #: leases
        self.size = 0


class Schedule(Generic[S]):
    """Due times of leases with one clock. Not thread safe.

    Changing a due time adds it to a heap; the earlier one is ignored when its turn comes.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._entries: dict[int, S] = {}
        #: heap of due times, with the numbers of the leases
        self._due: _Times = []
        self._groups: dict[Grantor, _Group] = {}

    def __len__(self) -> int:
        """Return the number of leases."""
        return len(self._entries)

    def add(self, entry: S) -> None:
        """Add a lease."""
        entry.number = next(_numbers)
        self._entries[entry.number] = entry
        self._groups.setdefault(entry.lease.grantor, _Group()).size += 1
        self._push(entry)

    def move(self, entry: S) -> None:
        """Note that the times of a lease have changed."""
        self._push(entry)
        self._compact()

    def remove(self, entry: S) -> None:
        """Remove a lease. Times of it stay for a while, and are ignored; the lease is not kept alive."""
        del self._entries[entry.number]
        entry.number = 0
        group = self._groups[entry.lease.grantor]
        group.size -= 1
        if not group.size:
            del self._groups[entry.lease.grantor]
        self._compact()

    def take(self) -> list[S]:
        """Return the leases that are due, and those that may be renewed with them. Their times have to be moved."""
        now = self.clock()
        due = self._taken(self._due, now, is_early=False)
        groups = {id(group): group for group in (self._groups[each.lease.grantor] for each in due)}
        early = [each for group in groups.values() for each in self._taken(group.early, now, is_early=True)]
        return [*{each.number: each for each in (*due, *early)}.values()]

    def left(self) -> float | None:
        """Return the seconds until a lease is due; ``None`` if there is none with a time."""
        while self._due and not self._is_valid(*self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] - self.clock() if self._due else None

    def is_first(self, entry: S) -> bool:
        """Return whether no other lease is due before this one."""
        return bool(self._due) and entry.due <= self._due[0][0]

    def _push(self, entry: S) -> None:
        if entry.due < math.inf:
            heapq.heappush(self._due, (entry.due, entry.number))
        if entry.early < entry.due:
            heapq.heappush(self._groups[entry.lease.grantor].early, (entry.early, entry.number))

    def _is_valid(self, due: float, number: int) -> bool:
        entry = self._entries.get(number)
        return entry is not None and entry.due == due

    def _taken(self, times: _Times, now: float, *, is_early: bool) -> Iterable[S]:
        found = []
        while times and times[0][0] <= now:
            at, number = heapq.heappop(times)
            entry = self._entries.get(number)
            if entry is not None and at == (entry.early if is_early else entry.due):
                found.append(entry)
        return found

    def _compact(self) -> None:
        """Make the heaps anew if most of their times are out of date."""
        if len(self._due) <= 2 * len(self._entries) + _SLACK:
            return
        self._due = []
        for group in self._groups.values():
            group.early = []
        for entry in self._entries.values():
            self._push(entry)

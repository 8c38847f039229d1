"""The leases of a renewal manager: when each is due and given up, and what listeners are told."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from messaging.errors import ArgumentError, DeadlineError, MessagingError, UnknownLeaseError
from messaging.leases.lease import ANY, Grantor, Lease, is_definite, lease_time

#: least time for one request and its repetition, seconds
MARGIN: Final = 2.0
#: first delay after an indefinite failure, seconds
_FIRST_DELAY: Final = 0.2
#: longest delay after indefinite failures, seconds
MAX_DELAY: Final = 30.0
#: part of the duration that is left when a lease is renewed
_PART: Final = 0.1
#: least time for the answer to one request, seconds
_LEAST_ANSWER: Final = 0.5
#: a lease that ends so little before its desired expiration has lasted, seconds: sums of times are rounded
_ROUNDING: Final = 1e-3


class RenewedLease:
    """A lease of a renewal manager, and when it is due. Guarded by the lock of the manager."""

    __slots__ = (
        "answer_until", "attempt", "attempts", "delay", "desired", "due", "early", "error", "lease", "listener",
        "number", "owner", "renew_duration", "succeeded",
    )  # fmt: skip

    def __init__(self, lease: Lease, desired: float, renew_duration: float, listener: Any, owner: object) -> None:
        self.lease = lease
        #: time of the lease clock
        self.desired = desired
        self.renew_duration = renew_duration
        self.listener = listener
        self.owner = owner
        #: identifies it in the schedule; 0: it is in none
        self.number = 0
        #: when it is due, and from when on it may be renewed with a lease of the same grantor that is due
        self.due = self.early = math.inf
        #: requests so far
        self.attempts = 0
        #: number of the request whose answer is awaited; 0 for none
        self.attempt = 0
        #: number of the last request that has succeeded
        self.succeeded = 0
        #: until when the answer is awaited, time of the lease clock
        self.answer_until = 0.0
        #: of the next attempt after a failure; 0 after a success
        self.delay = 0.0
        self.error: MessagingError | None = None

    @property
    def is_lasting(self) -> bool:
        """Whether the lease lasts until its desired expiration."""
        return not self.lease.is_cancelled and self.lease.expires >= self.desired - _ROUNDING

    def plan(self) -> None:
        """Set when the lease is to be renewed, or looked at again."""
        lease = self.lease
        now = lease_time()
        end = min(lease.expires, self.desired)
        self.early = math.inf
        if lease.is_cancelled:
            self.due = now
        elif self.attempt:
            self.due = min(self.answer_until, end)
        elif self.delay:
            self.due = min(now + self.delay, end)
            self.early = self.due - self.delay * _PART
        elif self.is_lasting:
            self.due = self.desired
        else:
            self.due = lease.expires - margin_of(lease.duration)
            # the time at which a tenth of what is left of the lease is left until it is due
            self.early = (self.due - lease.expires * _PART) / (1 - _PART)

    def begin(self, asked: float) -> int:
        """Begin a request for so many seconds, which may shorten the lease; return its number."""
        left = min(self.lease.remaining, math.inf if asked == ANY else asked)
        self.attempts += 1
        self.attempt = self.attempts
        self.answer_until = lease_time() + max(_LEAST_ANSWER, MAX_DELAY if left == math.inf else left / 2)
        return self.attempt

    def wanted(self) -> float:
        """Return the seconds to ask for."""
        asked = min(self.desired - lease_time(), math.inf if self.renew_duration == ANY else self.renew_duration)
        return ANY if asked == math.inf and self.renew_duration == ANY else asked


#: requests of one grantor: lease, seconds to ask for, number of the request
RenewalRequests: TypeAlias = list[tuple[RenewedLease, float, int]]


class RenewedLeases:
    """The leases of a renewal manager, and when each of them is due. Guarded by the lock of the manager.

    Attributes:
        ended: leases that are not renewed any more: the listener, the name of its method, and what it is told.
        schedule: the entries by the times at which they are due.
    """

    def __init__(self) -> None:
        self.ended: deque[tuple[Any, str, LeaseRenewalEvent]] = deque()
        #: of each lease an entry for each owner, the latest one first
        self._entries: dict[Lease, tuple[RenewedLease, ...]] = {}
        self.schedule = Schedule()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, lease: object) -> bool:
        return lease in self._entries

    def add(self, lease: Lease, wanted: float, renew_duration: float, listener: Any, owner: object) -> RenewedLease:
        """Return a new entry, which replaces that of the same lease and owner."""
        before = self._find(lease, owner)
        if before is not None:
            self._unlink(before)
        entry = RenewedLease(lease, lease_time() + wanted, renew_duration, listener, owner)
        self._entries[lease] = (entry, *self._entries.get(lease, ()))
        entry.plan()
        self.schedule.add(entry)
        return entry

    def remove(self, lease: Lease, owner: object) -> bool:
        """Remove the entry of a lease and an owner, of all owners for ``None``; return whether there was one."""
        found = [each for each in self._entries.get(lease, ()) if owner is None or each.owner is owner]
        for each in found:
            self._unlink(each)
        return bool(found)

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.schedule = Schedule()

    def _find(self, lease: Lease, owner: object) -> RenewedLease | None:
        return next((each for each in self._entries.get(lease, ()) if each.owner is owner), None)

    def entry(self, lease: Lease) -> RenewedLease:
        """Return the entry that the program made, or else the latest one."""
        if lease not in self._entries:
            raise UnknownLeaseError(f"the lease renewal manager does not renew {lease!r}")
        return self._find(lease, None) or self._entries[lease][0]

    def plan(self, entry: RenewedLease) -> None:
        """Set when a lease is to be renewed, or looked at again."""
        entry.plan()
        self.schedule.move(entry)

    def hasten(self, entry: RenewedLease) -> None:
        """Have a lease renewed at once."""
        entry.due, entry.early = lease_time(), math.inf
        self.schedule.move(entry)

    def _unlink(self, entry: RenewedLease) -> None:
        """Remove an entry."""
        self.schedule.remove(entry)
        left = tuple(each for each in self._entries[entry.lease] if each is not entry)
        if left:
            self._entries[entry.lease] = left
        else:
            del self._entries[entry.lease]

    def left_for(self, entry: RenewedLease) -> float | None:
        """Return the seconds until an entry is due; ``None`` if another one is due before."""
        return entry.due - lease_time() if self.schedule.is_first(entry) else None

    def take_due(self) -> dict[Grantor, RenewalRequests]:
        """Return the requests that are to be made now, and give the leases up that have ended."""
        groups: dict[Grantor, RenewalRequests] = {}
        for entry in self.schedule.take():
            self._decide(entry, groups)
        return groups

    def note(self, part: RenewalRequests, outcomes: list[Any], is_whole: bool) -> None:
        """Note the outcomes of the requests to one grantor, and whether the request as a whole failed."""
        for (entry, _, attempt), outcome in zip(part, outcomes, strict=True):
            if entry in self.schedule:
                self._note_one(entry, attempt, outcome, is_whole)

    def _decide(self, entry: RenewedLease, groups: dict[Grantor, RenewalRequests]) -> None:
        """Renew a lease that is due, or give it up."""
        lease = entry.lease
        now = lease_time()
        is_reached = now >= entry.desired
        is_waiting = bool(entry.attempt) and now < entry.answer_until
        if entry.attempt and not is_waiting:
            entry.error = DeadlineError(f"{lease!r}: the grantor did not answer in time")
            self._plan_others(entry)
        if lease.is_ended or is_reached:
            if is_reached and entry.is_lasting:
                self._drop(entry, None)
            elif is_waiting and entry.error is None:
                self._drop(entry, DeadlineError(f"{lease!r} ended before the grantor answered"))
            else:
                self._drop(entry, entry.error or UnknownLeaseError(f"{lease!r} ended before it was renewed"))
            return
        if not is_waiting:
            asked = entry.wanted()
            groups.setdefault(lease.grantor, []).append((entry, asked, entry.begin(asked)))
        self.plan(entry)

    def _drop(self, entry: RenewedLease, error: MessagingError | None) -> None:
        """Give a lease up, and have its listener told."""
        self._unlink(entry)
        event = LeaseRenewalEvent(entry.lease, entry.desired - lease_time(), error)
        self.ended.append((entry.listener, "expiration_reached" if error is None else "notify", event))

    def _note_one(self, entry: RenewedLease, attempt: int, outcome: Any, is_whole: bool) -> None:
        """Note the outcome of one request for one lease."""
        if not isinstance(outcome, MessagingError):
            entry.succeeded = max(entry.succeeded, attempt)
            entry.attempt = 0
            entry.delay = 0.0
            entry.error = None
            self._plan_others(entry)
        elif is_definite(outcome) and not (is_whole and isinstance(outcome, ArgumentError)):
            if attempt > entry.succeeded:
                if isinstance(outcome, UnknownLeaseError):
                    for each in self._others(entry):  # they ask at once, and are told as well
                        self.hasten(each)
                self._drop(entry, outcome)
            return
        elif attempt != entry.attempt:
            return  # it was made again
        else:
            entry.attempt = 0
            entry.error = outcome
            entry.delay = min(max(entry.delay * 2, _FIRST_DELAY), MAX_DELAY, max(entry.lease.remaining / 2, 0.05))
            self._plan_others(entry)
        self.plan(entry)

    def _plan_others(self, entry: RenewedLease) -> None:
        """Plan for the other owners of a lease, which may end sooner after a request of one of them."""
        for each in self._others(entry):
            if not each.delay or each.due > entry.lease.expires:  # others try again before it ends
                self.plan(each)

    def _others(self, entry: RenewedLease) -> list[RenewedLease]:
        """Return the entries of other owners for the lease of an entry that wait for no answer."""
        return [each for each in self._entries[entry.lease] if each is not entry and not each.attempt]


def margin_of(duration: float) -> float:
    """Return how many seconds before its end a lease is renewed."""
    if duration == math.inf:
        return MARGIN
    return min(max(duration * _PART, MARGIN), duration / 2)


@dataclass(frozen=True, slots=True)
class LeaseRenewalEvent:
    """A lease that is not renewed any more. Immutable.

    Attributes:
        lease: the lease.
        desired: seconds that were left until the desired expiration; 0 or less: it is reached.
        error: why it was not renewed; ``None`` if the desired expiration is reached.
    """

    lease: Lease
    desired: float
    error: MessagingError | None = None


class LeaseListener(Protocol):
    """Is told of leases that are not renewed any more."""

    def notify(self, event: LeaseRenewalEvent, /) -> Any:
        """Note that a lease was given up before its desired expiration: it expires soon, or has ended."""


class DesiredExpirationListener(LeaseListener, Protocol):
    """Is also told of leases whose desired expiration is reached."""

    def expiration_reached(self, event: LeaseRenewalEvent, /) -> Any:
        """Note that the desired expiration of a lease is reached: it expires, as the program wanted."""


#: times beyond twice those that are valid from which on the others are removed
_SLACK: Final = 64

_numbers = itertools.count(1)


_Times = list[tuple[float, int]]


class _Group:
    """The leases of one grantor."""

    __slots__ = ("early", "size")

    def __init__(self) -> None:
        #: heap of the times from which on they may be renewed, with their numbers
        self.early: _Times = []
        #: leases
        self.size = 0


class Schedule:
    """Due times of leases. Not thread safe.

    Changing a due time adds it to a heap; the earlier one is ignored when its turn comes.
    """

    def __init__(self) -> None:
        self._entries: dict[int, RenewedLease] = {}
        #: heap of due times, with the numbers of the leases
        self._due: _Times = []
        self._groups: dict[Grantor, _Group] = {}

    def __len__(self) -> int:
        """Return the number of leases."""
        return len(self._entries)

    def __contains__(self, entry: RenewedLease) -> bool:
        return self._entries.get(entry.number) is entry

    def add(self, entry: RenewedLease) -> None:
        """Add a lease."""
        entry.number = next(_numbers)
        self._entries[entry.number] = entry
        self._groups.setdefault(entry.lease.grantor, _Group()).size += 1
        self._push(entry)

    def move(self, entry: RenewedLease) -> None:
        """Note that the times of a lease have changed."""
        self._push(entry)
        self._compact()

    def remove(self, entry: RenewedLease) -> None:
        """Remove a lease. Times of it stay for a while, and are ignored; the lease is not kept alive."""
        del self._entries[entry.number]
        entry.number = 0
        group = self._groups[entry.lease.grantor]
        group.size -= 1
        if not group.size:
            del self._groups[entry.lease.grantor]
        self._compact()

    def take(self) -> list[RenewedLease]:
        """Return the leases that are due, and those that may be renewed with them. Their times have to be moved."""
        now = lease_time()
        due = self._taken(self._due, now, is_early=False)
        groups = {id(group): group for group in (self._groups[each.lease.grantor] for each in due)}
        early = [each for group in groups.values() for each in self._taken(group.early, now, is_early=True)]
        return [*{each.number: each for each in (*due, *early)}.values()]

    def left(self) -> float | None:
        """Return the seconds until a lease is due; ``None`` if there is none with a time."""
        while self._due and not self._is_valid(*self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] - lease_time() if self._due else None

    def is_first(self, entry: RenewedLease) -> bool:
        """Return whether no other lease is due before this one."""
        return bool(self._due) and entry.due <= self._due[0][0]

    def _push(self, entry: RenewedLease) -> None:
        if entry.due < math.inf:
            heapq.heappush(self._due, (entry.due, entry.number))
        if entry.early < entry.due:
            heapq.heappush(self._groups[entry.lease.grantor].early, (entry.early, entry.number))

    def _is_valid(self, due: float, number: int) -> bool:
        entry = self._entries.get(number)
        return entry is not None and entry.due == due

    def _taken(self, times: _Times, now: float, *, is_early: bool) -> list[RenewedLease]:
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

"""When a lease is renewed: the times of one lease of a renewal manager."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from messaging.leases.lease import ANY
from messaging.leases.schedule import Schedule

if TYPE_CHECKING:
    from messaging.errors import MessagingError
    from messaging.leases.lease import Lease

#: least time for one request and its repetition, seconds
MARGIN: Final = 2.0
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
        "answer_until", "attempt", "attempts", "delay", "desired", "due", "early", "error", "lease", "listener", "next",
        "number", "owner", "renew_duration", "schedule", "succeeded",
    )  # fmt: skip

    def __init__(
        self, lease: Lease, desired: float, renew_duration: float, listener: Any, owner: object, schedule: RenewedLeases
    ) -> None:
        self.lease = lease
        #: time of the clock of the lease
        self.desired = desired
        self.renew_duration = renew_duration
        self.listener = listener
        self.owner = owner
        #: another entry of the same lease, of another owner
        self.next: RenewedLease | None = None
        self.schedule = schedule
        #: see ``Scheduled``
        self.number = 0
        self.due = self.early = math.inf
        #: requests so far
        self.attempts = 0
        #: number of the request whose answer is awaited; 0 for none
        self.attempt = 0
        #: number of the last request that has succeeded
        self.succeeded = 0
        #: until when the answer is awaited, time of the clock of the lease
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
        now = lease.now
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

    def begin(self) -> int:
        """Begin a request; return its number."""
        left = self.lease.remaining
        self.attempts += 1
        self.attempt = self.attempts
        self.answer_until = self.lease.now + max(_LEAST_ANSWER, MAX_DELAY if left == math.inf else left / 2)
        return self.attempt

    def wanted(self) -> float:
        """Return the seconds to ask for."""
        asked = min(self.desired - self.lease.now, math.inf if self.renew_duration == ANY else self.renew_duration)
        return ANY if asked == math.inf and self.renew_duration == ANY else asked


RenewedLeases = Schedule[RenewedLease]


def margin_of(duration: float) -> float:
    """Return how many seconds before its end a lease is renewed."""
    if duration == math.inf:
        return MARGIN
    return min(max(duration * _PART, MARGIN), duration / 2)

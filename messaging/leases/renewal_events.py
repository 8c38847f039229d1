"""What a lease renewal manager tells its listeners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from messaging.errors import MessagingError
    from messaging.leases.lease import Lease


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

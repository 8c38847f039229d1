"""Leases as their landlord keeps them."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from messaging.leases.lease import Grantor, Lease

if TYPE_CHECKING:
    import datetime

    from messaging.leases.clock import Clock


class LeaseEnd(enum.Enum):
    """Why a lease has ended."""

    EXPIRED = "expired"
    CANCELLED = "cancelled"
    #: its landlord was closed, or suspended the lease, perhaps to go on in another process
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease, for people. Immutable.

    Attributes:
        id: of the lease.
        about: the leased resource.
        duration: seconds that were granted last.
        remaining: seconds until it expires.
        expiration: by the wall clock; ``None`` for never.
    """

    id: str
    about: str
    duration: float
    remaining: float
    expiration: datetime.datetime | None


class Granting(Grantor, Protocol):
    """The landlord, as its leases see it."""

    clock: Clock

    def add_callback(self, lease: GrantedLease, callback: Callable[[LeaseEnd], object]) -> None:
        """See :meth:`GrantedLease.when_ended`."""


class GrantedLease(Lease):
    """A lease with its landlord in this process."""

    __slots__ = ("_callbacks", "about", "end", "watched_at")

    def __init__(self, lease_id: str, landlord: Granting, requested: float, duration: float, about: str) -> None:
        super().__init__(lease_id, landlord, requested, duration, clock=landlord.clock)
        self.about = about
        #: why it has ended; ``None`` before. Guarded by the lock of the landlord
        self.end: LeaseEnd | None = None
        self._callbacks: tuple[Callable[[LeaseEnd], object], ...] = ()
        #: time of its valid entry in the heap of the landlord; infinite without one. Guarded by the same lock
        self.watched_at = math.inf

    @property
    def is_over(self) -> bool:
        """Whether it has expired or was cancelled, as far as its landlord has noticed: no later run continues it."""
        return self.end in (LeaseEnd.CANCELLED, LeaseEnd.EXPIRED)

    def when_ended(self, callback: Callable[[LeaseEnd], object]) -> None:
        """Call ``callback`` with the reason when the lease has ended, at once if it has; on a worker thread."""
        landlord: Any = self.grantor
        landlord.add_callback(self, callback)

    def add(self, callback: Callable[[LeaseEnd], object]) -> None:
        """Add a callback. For the landlord, with its lock."""
        self._callbacks = (*self._callbacks, callback)

    def take_callbacks(self) -> tuple[Callable[[LeaseEnd], object], ...]:
        """Return the callbacks, and forget them. For the landlord."""
        callbacks, self._callbacks = self._callbacks, ()
        return callbacks

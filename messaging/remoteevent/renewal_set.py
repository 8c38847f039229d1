"""Sets of leases that a service renews for a client that is away (Jini ``LeaseRenewalService``).

The client holds one lease, that of the set. As long as it lives, the leases in the set are renewed. Shortly before it
ends a listener may be warned, typically a mailbox; another one is told of leases that could not be renewed.

**Events.** Both kinds have a constant id, and numbers that rise by one over the life of the set, whichever listener is
set.

**Threads.** Any thread may use a set. The timer of the warning runs on the loop of the engine and only wakes a worker
thread. Listeners are notified by the generator of the set, see :mod:`messaging.remoteevent.generator`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from messaging.errors import ArgumentError, ClosedError, MessagingError, UnknownLeaseError
from messaging.errors.checks import check_optional
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Closeable, clock, engine, seconds, workers
from messaging.leases import GrantedLease, Landlord, Lease, LeaseEnd, LeaseRenewalManager, release
from messaging.remoteevent.delivery import RetryPolicy
from messaging.remoteevent.event import EventRegistration, RemoteEvent
from messaging.remoteevent.generator import EventGenerator
from messaging.remoteevent.renewals import OwnedRenewals, RenewalFailure

logger = SafeLog(__name__)

#: id of the events that warn of the end of a set
EXPIRATION_WARNING: Final = 1
#: id of the events that tell that a lease was not renewed
RENEWAL_FAILURE: Final = 2
#: longest sleep of the timer, seconds: the lease clock and that of the event loop differ while a machine is suspended
_LONGEST: Final = 5.0
#: the only owner of the leases of a set
_OWNER: Final = ""
#: longest warning, seconds
_MOST: Final = 1e9


@dataclass(frozen=True, kw_only=True)
class ExpirationWarningEvent(RemoteEvent):
    """The lease of a set expires soon. Immutable.

    Attributes:
        lease_id: of the lease of the set.
        remaining: seconds until it expires, when the event was generated.
    """

    lease_id: str
    remaining: float


@dataclass(frozen=True, kw_only=True)
class RenewalFailureEvent(RemoteEvent):
    """A lease of the set was not renewed, and is no longer in the set. Immutable.

    Attributes:
        lease_id: of the lease that was not renewed.
        error: class of the failure.
        reason: its text.
    """

    lease_id: str
    error: str
    reason: str


class LeaseRenewalSet(Closeable):
    """Renews leases as long as its own lease lives. Thread safe; a context manager, which closes it.

    Example::

        renewals = LeaseRenewalSet(3600)
        renewals.renew_for(registration.lease)
        renewals.set_expiration_warning_listener(mailbox_listener, 300)
        renewals.lease.renew(3600)

    Args:
        duration: seconds that are asked for the lease of the set.
        landlord: grants the lease of the set; ``None``: one of its own, which grants up to an hour.
        manager: renews the leases; ``None``: one of its own. Several sets may share one, also with the same leases.
        source: of the events; ``None``: a generated one.
        retry: for the notifications; ``None``: 10 attempts within a minute.

    Attributes:
        lease: of the set. When it has ended, the leases in the set are not renewed any more, and are not cancelled.
        source: of the events.

    Raises:
        ArgumentError: an argument is not as described.
        LeaseDeniedError, ClosedError: the landlord grants no lease.
    """

    def __init__(
        self,
        duration: float = Lease.ANY,
        *,
        landlord: Landlord | None = None,
        manager: LeaseRenewalManager | None = None,
        source: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._lock = threading.Lock()  # guards the following
        self._registered: dict[int, Lease] = {}
        #: how the set has ended: ``CLOSED`` by the program, or with the landlord of its lease
        self._end: LeaseEnd | None = None
        self._owns_manager = manager is None
        check_optional("landlord", landlord, Landlord)
        check_optional("manager", manager, LeaseRenewalManager)
        self._owns_landlord = landlord is None
        with contextlib.ExitStack() as resources:
            self._interests = resources.enter_context(Landlord("lease renewal set", max_duration=math.inf))
            self._generator = resources.enter_context(
                EventGenerator(
                    source or f"renewal-set-{secrets.token_hex(8)}",
                    events=[EXPIRATION_WARNING, RENEWAL_FAILURE],
                    landlord=self._interests,
                    retry=retry,
                    begin=None if source else 0,
                )
            )
            self.source = self._generator.source
            self._manager = resources.enter_context(LeaseRenewalManager()) if manager is None else manager
            name = f"lease renewal set '{self.source}'"
            self._renewals = OwnedRenewals(None, None, self._manager, name, self._note_failure)
            made = resources.enter_context(Landlord("lease renewal sets")) if landlord is None else landlord
            self._landlord = made
            granted = made.grant(duration, about=f"lease renewal set {self.source}")
            resources.callback(release, granted)
            self.lease: GrantedLease = granted
            self._warning = _Warning(self.lease, self._warn)
            granted.on_renewed = lambda _lease: self._warning.plan()
            granted.when_ended(self._ended)  # last: a short lease may have ended
            resources.pop_all()

    # --- leases

    def renew_for(
        self, lease: Lease, membership_duration: float = Lease.FOREVER, renew_duration: float = Lease.ANY
    ) -> None:
        """Renew a lease; replaces an earlier call for it.

        Args:
            lease: of a resource anywhere.
            membership_duration: seconds after which it leaves the set, and expires.
            renew_duration: seconds to ask for each time; ``Lease.ANY``: the grantor chooses.

        Raises:
            ArgumentError: an argument is not as described, or it is the lease of the set.
            LeaseDeniedError: the manager has as many leases as it takes.
            UnknownLeaseError: the lease of the set has ended.
            ClosedError: the set, or its landlord, is closed.
        """
        if lease is self.lease:
            raise ArgumentError("a lease renewal set cannot renew its own lease")
        self._refuse_ended()
        self._renewals.keep(_OWNER, lease, membership_duration, renew_duration)
        if self._end is not None:  # perhaps before the manager was asked
            self._renewals.forget(_OWNER)
            self._refuse_ended()

    def remove(self, lease: Lease) -> bool:
        """Renew a lease no more, without cancelling it; return whether it was in the set. Raises as :meth:`leases`."""
        self._refuse_ended()
        return isinstance(lease, Lease) and self._renewals.remove(_OWNER, lease)

    def leases(self) -> list[Lease]:
        """Return the leases in the set.

        Raises:
            UnknownLeaseError: the lease of the set has ended.
            ClosedError: the set, or its landlord, is closed.
        """
        self._refuse_ended()
        return self._renewals.leases(_OWNER)

    def _refuse_ended(self) -> None:
        if LeaseEnd.CLOSED in (self._end, self.lease.end):
            raise ClosedError(f"lease renewal set {self.source!r}: closed")
        if self._end is not None or self.lease.is_ended:
            raise UnknownLeaseError(f"lease renewal set {self.source!r}: its lease has ended")

    def _note_failure(self, failure: RenewalFailure) -> None:
        """Report a failed renewal to the listener. On a worker thread."""
        self._tell(
            RENEWAL_FAILURE, RenewalFailureEvent, lease_id=failure.lease_id, error=type(failure.error).__name__,
            reason=str(failure.error)[:500],
        )  # fmt: skip
        failure.told()

    # --- listeners

    def set_expiration_warning_listener(
        self, listener: Any, min_warning: float, handback: Any = None
    ) -> EventRegistration:
        """Have a listener warned before the lease of the set ends, instead of an earlier listener.

        A set is warned of once, and once again after its lease was renewed.

        Args:
            listener: see :meth:`EventGenerator.register <messaging.remoteevent.EventGenerator.register>`.
            min_warning: seconds before the end at which the event is generated; at once if fewer are left.
            handback: comes back with each event.

        Returns:
            The registration, with the lease of the set.

        Raises:
            ArgumentError, InvalidEventError: an argument is not as described.
            UnknownLeaseError: the lease of the set has ended.
            ClosedError: the set, or its landlord, is closed.
        """
        warning = seconds(min_warning, "min_warning")
        if isinstance(min_warning, bool) or not 0 <= warning <= _MOST:
            raise ArgumentError(f"min_warning must be a number of seconds from 0 to {_MOST:g}, not {min_warning!r:.80}")
        registration = self._register(EXPIRATION_WARNING, listener, handback)
        self._warning.plan(warning)
        return registration

    def clear_expiration_warning_listener(self) -> bool:
        """Warn no listener any more; return whether there was one. Raises as :meth:`leases`."""
        self._warning.stop()
        return self._unregister(EXPIRATION_WARNING)

    def set_renewal_failure_listener(self, listener: Any, handback: Any = None) -> EventRegistration:
        """Have a listener told of leases that were not renewed, instead of an earlier listener.

        Args:
            listener, handback: see :meth:`set_expiration_warning_listener`, as what it returns and raises.
        """
        return self._register(RENEWAL_FAILURE, listener, handback)

    def clear_renewal_failure_listener(self) -> bool:
        """Tell no listener of failures any more; return whether there was one. Raises as :meth:`leases`."""
        return self._unregister(RENEWAL_FAILURE)

    def _register(self, event_id: int, listener: Any, handback: Any) -> EventRegistration:
        self._refuse_ended()
        found = self._generator.register(event_id, handback, listener, Lease.FOREVER)
        with self._lock:
            before = self._registered.get(event_id)
            self._registered[event_id] = found.lease
        if before is not None:
            release(before)
        return EventRegistration(
            event_id, self.source, self.lease, found.sequence_number, is_fully_ordered=found.is_fully_ordered
        )

    def _unregister(self, event_id: int) -> bool:
        self._refuse_ended()
        with self._lock:
            before = self._registered.pop(event_id, None)
        if before is not None:
            release(before)
        return before is not None

    def _tell(self, event_id: int, event_type: type[RemoteEvent], **fields: Any) -> None:
        try:
            self._generator.generate(event_id, event_type, **fields)
        except MessagingError as error:
            logger.warning("lease renewal set '%s': an event is lost: %s", self.source, error)

    def _warn(self) -> None:
        self._tell(EXPIRATION_WARNING, ExpirationWarningEvent, lease_id=self.lease.id, remaining=self.lease.remaining)

    # --- the end

    def _ended(self, end: LeaseEnd) -> None:
        """Renew nothing any more: the lease of the set has ended, or the program closes the set."""
        with self._lock:
            before = self._end
            self._end = before if before is LeaseEnd.CLOSED else end
            if before is not None:
                return
        self._renewals.forget(_OWNER)
        if self._owns_manager:
            self._manager.close()
        self._generator.close()
        self._interests.close()
        self._warning.stop()

    def close(self) -> None:
        """Cancel the lease of the set, whose leases are not renewed any more. Idempotent."""
        self._ended(LeaseEnd.CLOSED)
        release(self.lease)
        if self._owns_landlord:
            self._landlord.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<LeaseRenewalSet {self.source!r} of {len(self._renewals)} leases>"


class _Warning:
    """The timer of the warning of one set. Thread safe.

    Args:
        lease: of the set.
        warn: called on a worker thread when the time has come.
    """

    __slots__ = ("_is_due", "_lease", "_lock", "_min_warning", "_timer", "_warn")

    def __init__(self, lease: Lease, warn: Callable[[], object]) -> None:
        self._lease = lease
        self._warn = warn
        self._lock = threading.Lock()  # guards the following two
        #: seconds before the end at which to warn; ``None``: no listener
        self._min_warning: float | None = None
        #: whether the warning is still to come
        self._is_due = False
        # --- of the loop of the engine
        self._timer: asyncio.TimerHandle | None = None

    def plan(self, min_warning: float | None = None) -> None:
        """Plan the warning anew. ``None``: as early as before; the lease of the set was renewed."""
        with self._lock:
            if min_warning is not None:
                self._min_warning = min_warning
            self._is_due = self._min_warning is not None
        engine().call(self._watch)

    def stop(self) -> None:
        """Warn no more."""
        with self._lock:
            self._min_warning = None
            self._is_due = False
        engine().call(self._watch)

    def _watch(self) -> None:
        """Warn, or set the timer to the time of the warning. On the loop of the engine."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            if not self._is_due or self._min_warning is None:
                return
            left = self._lease.remaining - self._min_warning
            warns = left <= 0
            if warns:
                self._is_due = False
        if warns:
            if not self._lease.is_ended:
                workers().submit(self._warn)
        elif left != math.inf:
            self._timer = clock.call_later(engine().loop, min(left, _LONGEST), self._watch)

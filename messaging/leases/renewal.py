"""Keeps leases alive: renews each before it expires, until a time that the program names.

**When.** A lease is renewed when a tenth of its duration is left, but at least :data:`MARGIN` and at most half of the
duration: time for one request, and for another one after a failure. Leases of one grantor that are due within a tenth
of their time are renewed with one request.

**Failures.** ``UnknownLeaseError``, ``LeaseDeniedError`` and refused arguments are definite: the lease is given up and
its listener is told. Any other failure is tried again, at ever longer intervals, until the lease expires.

**Threads.** The timer runs on the loop of the engine; requests are made on a worker thread. Listeners are called on
another worker thread, one after the other, without a lock, so that they may use the manager. One lock guards the
leases.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from messaging.errors import (
    ArgumentError,
    ClosedError,
    LeaseDeniedError,
    ListenerGoneError,
    MessagingError,
    UnknownLeaseError,
)
from messaging.execution import Serial, engine, seconds
from messaging.forking import LiveObjects
from messaging.leases.lease import ANY, Lease, check_duration
from messaging.text import SafeLog

if TYPE_CHECKING:
    import asyncio

    from messaging.execution import Promise
    from messaging.leases.lease import Grantor

logger = SafeLog(__name__)

#: least time for one request and its repetition, seconds
MARGIN: Final = 2.0
#: part of the duration that is left when a lease is renewed
_PART: Final = 0.1
#: delays after indefinite failures, seconds
_FIRST_DELAY: Final = 0.2
_MAX_DELAY: Final = 30.0
#: longest sleep of the timer, seconds: the lease clock and that of the event loop differ while a machine is suspended
_LONGEST: Final = 60.0
#: leases of one manager
MAX_LEASES: Final = 1_000_000


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


class _Entry:
    """A lease of a manager. Guarded by its lock."""

    __slots__ = ("delay", "desired", "due", "error", "is_asked", "lease", "listener", "renew_duration")

    def __init__(self, lease: Lease, desired: float, renew_duration: float, listener: Any) -> None:
        self.lease = lease
        #: time of the clock of the lease
        self.desired = desired
        self.renew_duration = renew_duration
        self.listener = listener
        #: time of the clock of the lease at which something is to be done
        self.due = 0.0
        #: a request is under way
        self.is_asked = False
        #: of the next attempt after a failure; 0 after a success
        self.delay = 0.0
        self.error: MessagingError | None = None

    def plan(self) -> None:
        """Set when the lease is to be renewed, or looked at for the last time."""
        now = self.lease.now
        if self.delay:
            self.due = now + self.delay
            return
        left = self.lease.remaining
        if left == math.inf or now + left >= self.desired:
            self.due = self.desired
            return
        self.due = now + left - margin_of(self.lease.duration)


def margin_of(duration: float) -> float:
    """Return how many seconds before its end a lease is renewed."""
    if duration == math.inf:
        return MARGIN
    return min(max(duration * _PART, MARGIN), duration / 2)


class LeaseRenewalManager:
    """Renews leases until their desired expiration. Thread safe; a context manager, which closes it.

    Example::

        manager = LeaseRenewalManager()
        manager.renew_until(registration.lease, Lease.FOREVER, listener=watcher)
    """

    def __init__(self) -> None:
        self._is_closed = False
        self.after_fork()
        _managers.add(self)

    def after_fork(self) -> None:
        """See ``Forkable``: the parent goes on renewing; the child has no leases."""
        self._lock = threading.Lock()  # guards the entries and the timer
        self._entries: dict[Lease, _Entry] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: when the timer fires, in seconds of the loop of the engine
        self._fires_at = math.inf
        self._is_woken = False
        self._events: deque[tuple[Any, str, LeaseRenewalEvent]] = deque()
        self._worker = Serial(self._work, lambda: self._is_woken)
        self._teller = Serial(self._tell, lambda: self._events)

    # --- leases

    def renew_until(
        self,
        lease: Lease,
        desired_expiration: float = Lease.FOREVER,
        renew_duration: float = ANY,
        listener: LeaseListener | None = None,
    ) -> None:
        """Renew a lease until it has lasted ``desired_expiration`` seconds from now; replaces an earlier call for it.

        Args:
            lease: from now on the manager renews it.
            desired_expiration: seconds from now; ``Lease.FOREVER``: until it is removed.
            renew_duration: seconds to ask for each time, at most the time that is left; ``Lease.ANY``: the grantor
                chooses if the desired expiration is ``FOREVER``, otherwise the time that is left.
            listener: is told when the lease is not renewed any more; a :class:`DesiredExpirationListener` also when the
                desired expiration is reached.

        Raises:
            ArgumentError: an argument is not as described.
            ClosedError: the manager is closed.
        """
        if not isinstance(lease, Lease):
            raise ArgumentError(f"a lease is needed, not {type(lease).__name__}")
        if isinstance(desired_expiration, bool) or seconds(desired_expiration, "desired_expiration") <= 0:
            raise ArgumentError(f"desired_expiration must be above 0 seconds, not {desired_expiration!r:.80}")
        asked = check_duration(renew_duration)
        if listener is not None and not callable(getattr(listener, "notify", None)):
            raise ArgumentError(f"a listener must have a method `notify`, not {type(listener).__name__}")
        entry = _Entry(lease, lease.now + float(desired_expiration), asked, listener)
        entry.plan()
        with self._lock:
            if self._is_closed:
                raise ClosedError("the lease renewal manager is closed")
            if len(self._entries) >= MAX_LEASES and lease not in self._entries:
                raise LeaseDeniedError(f"the lease renewal manager has {MAX_LEASES} leases already")
            self._entries[lease] = entry
        self._look_at(entry)

    def renew_for(
        self, lease: Lease, duration: float, renew_duration: float = ANY, listener: LeaseListener | None = None
    ) -> None:
        """Renew a lease for ``duration`` seconds from now; as :meth:`renew_until`."""
        self.renew_until(lease, duration, renew_duration, listener)

    def set_expiration(self, lease: Lease, desired_expiration: float) -> None:
        """Change the desired expiration, in seconds from now. Raises ``UnknownLeaseError``: see :meth:`remaining`."""
        if isinstance(desired_expiration, bool) or seconds(desired_expiration, "desired_expiration") <= 0:
            raise ArgumentError(f"desired_expiration must be above 0 seconds, not {desired_expiration!r:.80}")
        with self._lock:
            entry = self._entry(lease)
            entry.desired = lease.now + float(desired_expiration)
            entry.plan()
        self._look_at(entry)

    def remaining(self, lease: Lease) -> float:
        """Return the seconds until the desired expiration of a lease.

        Raises:
            UnknownLeaseError: the manager does not renew this lease.
        """
        with self._lock:
            return max(0.0, self._entry(lease).desired - lease.now)

    def renew_now(self, lease: Lease) -> None:
        """Renew a lease at once, beside its regular renewals. Raises ``UnknownLeaseError`` as :meth:`remaining`."""
        with self._lock:
            self._entry(lease).due = lease.now
        self._set_timer(0.0)

    def remove(self, lease: Lease) -> bool:
        """Renew a lease no more, without cancelling it; return whether the manager renewed it."""
        with self._lock:
            return self._entries.pop(lease, None) is not None

    def cancel(self, lease: Lease) -> Promise[None]:
        """Renew a lease no more, and cancel it.

        Raises:
            UnknownLeaseError: the manager does not renew this lease; otherwise as :meth:`Lease.cancel`.
        """
        with self._lock:
            self._entry(lease)
            del self._entries[lease]
        return lease.cancel()

    def clear(self) -> None:
        """Renew no lease any more, without cancelling them."""
        with self._lock:
            self._entries.clear()

    def _entry(self, lease: Lease) -> _Entry:
        entry = self._entries.get(lease)
        if entry is None:
            raise UnknownLeaseError(f"the lease renewal manager does not renew {lease!r}")
        return entry

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        """Return ``True``, also when it is empty."""
        return True

    def __contains__(self, lease: object) -> bool:
        return lease in self._entries

    # --- renewing

    def _look_at(self, entry: _Entry) -> None:
        """Have the timer fire in time for an entry."""
        self._set_timer(entry.due - entry.lease.now)

    def _set_timer(self, delay: float) -> None:
        """Have the timer fire in ``delay`` seconds, unless it fires before."""
        running = engine()

        def start() -> None:
            at = running.loop.time() + min(max(delay, 0.0), _LONGEST)
            if self._timer is not None:
                if self._fires_at <= at:
                    return
                self._timer.cancel()
            self._fires_at = at
            self._timer = running.loop.call_at(at, self._wake)

        running.call(start)

    def _wake(self) -> None:
        """Look at the leases. On the loop of the engine."""
        self._timer = None
        self._is_woken = True
        self._worker.wake()

    def _work(self) -> None:
        """Renew the leases that are due. On a worker thread."""
        self._is_woken = False
        groups: dict[Grantor, list[tuple[_Entry, float]]] = {}
        with self._lock:
            due = [each for each in self._entries.values() if not each.is_asked and self._is_due(each)]
            for entry in due:
                self._decide(entry, groups)
        self._teller.wake()
        for grantor, part in groups.items():
            self._ask(grantor, part)
        with self._lock:
            waiting = [each for each in self._entries.values() if not each.is_asked]
            left = min((each.due - each.lease.now for each in waiting), default=None)
        if left is not None:
            self._set_timer(left)

    @staticmethod
    def _is_due(entry: _Entry) -> bool:
        """Return whether it is time, or so nearly that one request may do for several leases."""
        left = entry.due - entry.lease.now
        return left <= 0 or (not entry.delay and entry.due != entry.desired and left <= entry.lease.remaining * _PART)

    def _decide(self, entry: _Entry, groups: dict[Grantor, list[tuple[_Entry, float]]]) -> None:
        """Renew a lease that is due, or give it up. With the lock."""
        lease = entry.lease
        wanted = entry.desired - lease.now
        if wanted <= 0:
            self._drop(entry, None)
        elif lease.is_ended:
            self._drop(entry, entry.error or UnknownLeaseError(f"{lease!r} ended before it was renewed"))
        else:
            asked = min(wanted, math.inf if entry.renew_duration == ANY else entry.renew_duration)
            if asked == math.inf and entry.renew_duration == ANY:
                asked = ANY
            entry.is_asked = True
            groups.setdefault(lease.grantor, []).append((entry, asked))

    def _drop(self, entry: _Entry, error: MessagingError | None) -> None:
        """Give a lease up, and tell its listener. With the lock."""
        if self._entries.get(entry.lease) is entry:
            del self._entries[entry.lease]
            if entry.listener is not None:
                event = LeaseRenewalEvent(entry.lease, entry.desired - entry.lease.now, error)
                self._events.append((entry.listener, "expiration_reached" if error is None else "notify", event))
            elif error is not None:
                logger.warning("%r is not renewed any more: %s", entry.lease, error)

    def _ask(self, grantor: Grantor, part: list[tuple[_Entry, float]]) -> None:
        try:
            answer = grantor.renew_all([(entry.lease, asked) for entry, asked in part])
        except MessagingError as error:
            self._note(part, [error] * len(part))
            return
        answer.listen(lambda: self._answered(part, answer))

    def _answered(self, part: list[tuple[_Entry, float]], answer: Promise[list[Any]]) -> None:
        error = answer.exception(0)
        self._note(part, [error] * len(part) if error is not None else answer.result(0))

    def _note(self, part: list[tuple[_Entry, float]], outcomes: Iterable[Any]) -> None:
        """Note the outcomes of a request. On a worker thread, or on the loop of the engine."""
        with self._lock:
            for (entry, _), outcome in zip(part, outcomes, strict=True):
                entry.is_asked = False
                if not isinstance(outcome, MessagingError):
                    entry.delay = 0.0
                    entry.error = None
                    entry.plan()
                elif isinstance(outcome, (UnknownLeaseError, LeaseDeniedError, ListenerGoneError, ArgumentError)):
                    self._drop(entry, outcome)
                else:
                    entry.error = outcome
                    entry.delay = min(
                        max(entry.delay * 2, _FIRST_DELAY), _MAX_DELAY, max(entry.lease.remaining / 2, 0.05)
                    )
                    entry.plan()
            left = min((entry.due - entry.lease.now for entry, _ in part), default=_LONGEST)
        self._teller.wake()
        self._set_timer(left)

    def _tell(self) -> None:
        """Call the listeners. On a worker thread."""
        while self._events:
            listener, method, event = self._events.popleft()
            function = getattr(listener, method, None)
            if callable(function):
                try:
                    function(event)
                except Exception:
                    logger.exception("a listener of lease renewals failed")

    # --- life cycle

    def close(self) -> None:
        """Renew no lease any more, without cancelling them. Listeners are told nothing further. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._entries.clear()
            self._events.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_managers: Final = LiveObjects[LeaseRenewalManager]()

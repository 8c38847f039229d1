"""Keeps leases alive: renews each before it expires, until a time that the program names.

**When.** A lease is renewed when a tenth of its duration is left, but at least 2 s and at most half of the
duration: time for one request, and for another one after a failure. Leases of one grantor that are due within a tenth
of their time are renewed with one request.

**Failures.** ``UnknownLeaseError``, ``LeaseDeniedError`` and refused arguments are definite: the lease is given up and
its listener is told. Any other failure is tried again, at ever longer intervals, until the lease expires. A request
without an answer within half of the time that is left, at least 0.5 s, counts as such a failure and is made again. A
late success of it counts as well.

**Ends.** The end of a lease and its desired expiration are told in time, also while a request is under way.

**Threads.** The timer runs on the loop of the engine; requests are made on a worker thread. Listeners are called on
another worker thread, one after the other, without a lock, so that they may use the manager. One lock guards the
leases.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from functools import partial
from typing import Any, Final

from messaging.environment.forks import LiveObjects
from messaging.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    LeaseDeniedError,
    MessagingError,
)
from messaging.errors.checks import check_procedure, check_result
from messaging.errors.text import SafeLog, brief
from messaging.execution import Closeable, Flag, Promise, Serial, clock, engine, seconds, workers
from messaging.leases.lease import ANY, Grantor, Lease, ask_each, check_duration, lease_time
from messaging.leases.renewed import LeaseListener, LeaseRenewalEvent, RenewalRequests, RenewedLeases

logger = SafeLog(__name__)

#: how long the next grantor waits until one has returned, seconds
_PATIENCE: Final = 0.1
#: longest sleep of the timer, seconds: the lease clock and that of the event loop differ while a machine is suspended
_LONGEST: Final = 5.0
#: least time between two looks at the leases, seconds
_STEP: Final = 0.01
#: delay after which the leases are looked at if no thread could be started, seconds
_NO_THREAD_DELAY: Final = 1.0
#: leases of one manager
MAX_LEASES: Final = 1_000_000


class LeaseRenewalManager(Closeable):
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
        self._lock = threading.Lock()  # guards the following two
        self._leases = RenewedLeases()
        #: grantors that are being asked
        self._busy: set[Grantor] = set()
        self._is_woken = False
        self._worker = Serial(self._work, lambda: self._is_woken)
        self._teller = Serial(lambda: _tell(self._leases.ended), lambda: self._leases.ended)
        # --- of the loop of the engine
        self._timer: asyncio.TimerHandle | None = None
        #: when the timer fires, and when it last fired, in seconds of the loop
        self._fires_at = math.inf
        self._fired_at = -math.inf

    # --- leases

    def renew_until(
        self,
        lease: Lease,
        desired_expiration: float = Lease.FOREVER,
        renew_duration: float = ANY,
        listener: LeaseListener | None = None,
        *,
        owner: object = None,
    ) -> None:
        """Renew a lease until it has lasted ``desired_expiration`` seconds from now; replaces an earlier call for it.

        Args:
            lease: from now on the manager renews it.
            desired_expiration: seconds from now; ``Lease.FOREVER``: until it is removed.
            renew_duration: seconds to ask for each time, at most the time that is left; ``Lease.ANY``: the grantor
                chooses if the desired expiration is ``FOREVER``, otherwise the time that is left.
            listener: is told when the lease is not renewed any more; a :class:`DesiredExpirationListener` also when the
                desired expiration is reached.
            owner: one of several users of the manager that renew the same lease, each for itself: an earlier call is
                replaced only if it has the same owner.

        Raises:
            ArgumentError: an argument is not as described.
            ClosedError: the manager is closed.
        """
        if not isinstance(lease, Lease):
            raise ArgumentError(f"a lease is needed, not {type(lease).__name__}")
        wanted = _check_expiration(desired_expiration)
        asked = check_duration(renew_duration)
        if listener is not None and not callable(getattr(listener, "notify", None)):
            raise ArgumentError(f"a listener must have a method `notify`, not {type(listener).__name__}")
        if listener is not None:
            check_procedure(listener.notify, "the method `notify` of a lease listener")
        with self._lock:
            if self._is_closed:
                raise ClosedError("the lease renewal manager is closed")
            if len(self._leases) >= MAX_LEASES and lease not in self._leases:
                raise LeaseDeniedError(f"the lease renewal manager has {MAX_LEASES} leases already")
            entry = self._leases.add(lease, wanted, asked, listener, owner)
            left = self._leases.left_for(entry)
        self._set_timer(left)

    def renew_for(
        self, lease: Lease, duration: float, renew_duration: float = ANY, listener: LeaseListener | None = None
    ) -> None:
        """Renew a lease for ``duration`` seconds from now; as :meth:`renew_until`."""
        self.renew_until(lease, duration, renew_duration, listener)

    def set_expiration(self, lease: Lease, desired_expiration: float) -> None:
        """Change the desired expiration, in seconds from now. Raises ``UnknownLeaseError``: see :meth:`remaining`."""
        wanted = _check_expiration(desired_expiration)
        with self._lock:
            entry = self._leases.entry(lease)
            entry.desired = lease_time() + wanted
            self._leases.plan(entry)
            left = self._leases.left_for(entry)
        self._set_timer(left)

    def remaining(self, lease: Lease) -> float:
        """Return the seconds until the desired expiration of a lease.

        Raises:
            UnknownLeaseError: the manager does not renew this lease.
        """
        with self._lock:
            return max(0.0, self._leases.entry(lease).desired - lease_time())

    def renew_now(self, lease: Lease) -> None:
        """Renew a lease at once, beside its regular renewals. Raises ``UnknownLeaseError`` as :meth:`remaining`."""
        with self._lock:
            entry = self._leases.entry(lease)
            if entry.attempt:  # it is being renewed
                return
            self._leases.hasten(entry)
        self._set_timer(0.0)

    def remove(self, lease: Lease, *, owner: object = None) -> bool:
        """Renew a lease no more, without cancelling it; return whether the manager renewed it.

        Args:
            lease: the lease.
            owner: see :meth:`renew_until`; for other owners it is still renewed. ``None`` removes any.
        """
        with self._lock:
            return self._leases.remove(lease, owner)

    def cancel(self, lease: Lease) -> Promise[None]:
        """Renew a lease no more, and cancel it.

        Raises:
            UnknownLeaseError: the manager does not renew this lease; otherwise as :meth:`Lease.cancel`.
        """
        with self._lock:
            self._leases.entry(lease)
        self.remove(lease)
        return lease.cancel()

    def clear(self) -> None:
        """Renew no lease any more, without cancelling them."""
        with self._lock:
            self._leases.clear()

    def __len__(self) -> int:
        return len(self._leases)

    def __bool__(self) -> bool:
        """Return ``True``, also when it is empty."""
        return True

    def __contains__(self, lease: object) -> bool:
        return lease in self._leases

    # --- renewing

    def _set_timer(self, delay: float | None) -> None:
        """Have the timer fire in ``delay`` seconds, unless it fires before. ``None``: it fires in time."""
        if delay is None:
            return
        running = engine()

        def look() -> None:
            self._timer = None
            self._fired_at = clock.time_of(running.loop)
            self.look()

        def start() -> None:
            at = max(clock.time_of(running.loop) + min(max(delay, 0.0), _LONGEST), self._fired_at + _STEP)
            if self._timer is not None:
                if self._fires_at <= at:
                    return
                self._timer.cancel()
            self._fires_at = at
            self._timer = clock.call_at(running.loop, at, look)

        running.call(start)

    def look(self) -> None:
        """Have a worker thread renew the leases that are due. The timer calls it; more calls do no harm."""
        self._is_woken = True
        self._start(self._worker)

    def _start(self, serial: Serial) -> None:
        try:
            serial.wake()
        except RuntimeError as error:
            logger.error("lease renewal manager: cannot start a thread: %s; retrying in %g s", error, _NO_THREAD_DELAY)
            self._set_timer(_NO_THREAD_DELAY)

    def _work(self) -> None:
        """Renew the leases that are due. On a worker thread."""
        self._is_woken = False
        with self._lock:
            groups = self._leases.take_due()
        if self._leases.ended:
            self._start(self._teller)
        for grantor, part in groups.items():
            self._ask(grantor, part)
        with self._lock:
            left = self._leases.schedule.left()
        self._set_timer(left)

    def _ask(self, grantor: Grantor, part: RenewalRequests) -> None:
        """Ask a grantor on a thread of its own, one at a time; one that blocks delays others by 0.1 s."""
        returned = Flag()

        def ask() -> None:
            try:
                pairs = [(entry.lease, asked) for entry, asked, _ in part]
                ask_each(partial(grantor.renew_all, pairs), len(part), partial(self._note, part))
            finally:
                free()

        def free() -> None:
            with self._lock:
                self._busy.discard(grantor)
            returned.set()

        with self._lock:
            is_busy = grantor in self._busy
            self._busy.add(grantor)
        error: MessagingError = DeadlineError("the grantor has not returned from an earlier request")
        if not is_busy:
            try:
                workers().submit(ask)
                returned.wait(_PATIENCE)
                return
            except RuntimeError as problem:
                free()
                error = MessagingError(f"cannot start a thread: {problem}")
        self._note(part, [error] * len(part), True)

    def _note(self, part: RenewalRequests, outcomes: list[Any], is_whole: bool) -> None:
        """Note the outcomes of a request. On a worker thread, or on the loop of the engine."""
        with self._lock:
            self._leases.note(part, outcomes, is_whole)
            left = self._leases.schedule.left()
        if self._leases.ended:
            self._start(self._teller)
        self._set_timer(left)

    # --- life cycle

    def close(self) -> None:
        """Renew no lease any more, without cancelling them. Listeners are told nothing further. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._leases.clear()
            self._leases.ended.clear()


def _tell(ended: deque[tuple[Any, str, LeaseRenewalEvent]]) -> None:
    """Call the listeners of leases that are not renewed any more. On a worker thread."""
    while True:
        try:
            listener, method, event = ended.popleft()
        except IndexError:  # the manager was closed
            return
        if listener is None:
            if event.error is not None:
                logger.warning("%r is not renewed any more: %s", event.lease, event.error)
            continue
        function = getattr(listener, method, None)
        if callable(function):
            try:
                check_result(function(event), f"{method} of a lease listener")
            except Exception:
                logger.exception("a listener of lease renewals failed")


def _check_expiration(value: float) -> float:
    if isinstance(value, bool) or (found := seconds(value, "desired_expiration")) <= 0:
        raise ArgumentError(f"desired_expiration must be above 0 seconds, not {brief(value)}")
    return found


_managers: Final = LiveObjects[LeaseRenewalManager]()

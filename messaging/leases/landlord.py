"""The landlord: grants leases, and ends them when their time is over.

**Time.** Whether a lease has expired is decided by the lease clock whenever it is used. The timer only has the
callbacks called. So a process that was suspended refuses expired leases at once when it goes on.

**Threads.** Any thread may use a landlord. Its lock guards the table and is never held while a callback runs. Callbacks
run on worker threads, those of several leases on up to four at a time: a slow callback delays only callbacks of other
leases that found all four occupied.

**Cost.** A lease has one entry in the table and one in a heap. Renewing changes the lease only: its entry in the heap
is put right when its old time comes. Renewing it for a shorter time adds an entry; the heap is made anew when most of
its entries are out of date. A million renewals cost no timer."""

from __future__ import annotations

import asyncio
import datetime
import enum
import heapq
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from messaging.environment.forks import LiveObjects
from messaging.errors import ArgumentError, ClosedError, LeaseDeniedError, MessagingError, UnknownLeaseError
from messaging.errors.checks import check_instance, check_procedure, check_result
from messaging.errors.text import SafeLog, brief, tolerant
from messaging.execution import Closeable, Promise, Serial, clock, engine, seconds
from messaging.leases.lease import ANY, Lease, check_duration, check_leases, check_requests, lease_time

logger = SafeLog(__name__)


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


class GrantedLease(Lease):
    """A lease with its landlord in this process."""

    __slots__ = ("_callbacks", "about", "end", "on_renewed", "watched_at")

    def __init__(self, lease_id: str, landlord: Landlord, requested: float, duration: float, about: str) -> None:
        super().__init__(lease_id, landlord, requested, duration)
        self.about = about
        #: why it has ended; ``None`` before. Guarded by the lock of the landlord
        self.end: LeaseEnd | None = None
        self._callbacks: tuple[Callable[[LeaseEnd], object], ...] = ()
        #: called with the lease when it was renewed, on the renewing thread. It must be quick
        self.on_renewed: Callable[[GrantedLease], object] | None = None
        #: time of its valid entry in the heap of the landlord; infinite without one. Guarded by the same lock
        self.watched_at = math.inf

    @property
    def is_over(self) -> bool:
        """Whether it has expired or was cancelled, as far as its landlord has noticed: no later run continues it."""
        return self.end in (LeaseEnd.CANCELLED, LeaseEnd.EXPIRED)

    def when_ended(self, callback: Callable[[LeaseEnd], object]) -> None:
        """Call ``callback`` with the reason when the lease has ended, at once if it has; on a worker thread."""
        landlord: Any = self.grantor
        landlord.callbacks.add(self, callback)

    def add(self, callback: Callable[[LeaseEnd], object]) -> None:
        """Add a callback. For the landlord, with its lock."""
        self._callbacks = (*self._callbacks, callback)

    def take_callbacks(self) -> tuple[Callable[[LeaseEnd], object], ...]:
        """Return the callbacks, and forget them. For the landlord."""
        callbacks, self._callbacks = self._callbacks, ()
        return callbacks


#: longest sleep of the timer, seconds: the lease clock and that of the event loop differ while a machine is suspended
_LONGEST: Final = 5.0
#: entries of the heap from which on it is made anew, if most of them are out of date
_LEAST_HEAP: Final = 1000
#: callbacks of ended leases that run at a time
_CALLBACKS: Final = 4
#: delay after which callbacks are tried again if no thread could be started, seconds
_NO_THREAD_DELAY: Final = 1.0


class LeaseCallbacks:
    """The callbacks for the leases of one landlord that have ended. Thread safe.

    Args:
        name: of the landlord, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def after_fork(self, lock: threading.Lock) -> None:
        """Use the lock of the landlord; no lease has ended."""
        self._lock = lock
        self._ended: deque[tuple[GrantedLease, LeaseEnd]] = deque()
        self._callers = [Serial(self._call_back, lambda: self._ended) for _ in range(_CALLBACKS)]

    def add(self, lease: GrantedLease, callback: Callable[[LeaseEnd], object]) -> None:
        """See :meth:`GrantedLease.when_ended`."""
        check_procedure(callback, "callback")
        with self._lock:
            lease.add(callback)
            end = lease.end
            if end is not None:
                self.note(lease, end)
        if end is not None:
            self.wake()

    def note(self, lease: GrantedLease, end: LeaseEnd) -> None:
        """Note that a lease has ended; :meth:`wake` has its callbacks called."""
        self._ended.append((lease, end))

    def wake(self) -> None:
        """Have the callbacks of ended leases called, on one thread more than before."""
        if not self._ended:
            return
        try:
            any(each.wake() for each in self._callers)
        except RuntimeError as error:
            logger.error(
                "landlord '%s': cannot start a thread for callbacks: %s; retrying in %g s",
                self._name, error, _NO_THREAD_DELAY,
            )  # fmt: skip
            running = engine()
            running.call(lambda: clock.call_later(running.loop, _NO_THREAD_DELAY, self.wake))

    def _call_back(self) -> None:
        """Call the callbacks of ended leases. On a worker thread, several at a time."""
        while True:
            try:
                lease, end = self._ended.popleft()
            except IndexError:
                return
            self.wake()  # others do not wait for these callbacks
            with self._lock:
                callbacks = lease.take_callbacks()
            for each in callbacks:
                self.call(each, end)

    def call(self, callback: Callable[[Any], object], argument: Any) -> None:
        """Call a callback; log its exception."""
        try:
            check_result(callback(argument), "a callback of a lease")
        except Exception:
            logger.exception("landlord '%s': a callback failed", self._name)


class ExpiryTimer:
    """When to look at the leases of one landlord: its heap and its timer. Guarded by the lock of the landlord.

    Args:
        lock: of the landlord.
        expire: ends the leases whose time is over; called on the loop of the engine.
    """

    def __init__(self, lock: threading.Lock, expire: Callable[[], object]) -> None:
        self._lock = lock
        self._expire = expire
        #: when to look at a lease: not after it expires
        self._heap: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        #: when the timer fires, in seconds of the lease clock; infinite without a timer
        self._due = math.inf

    def watch(self, lease: GrantedLease, leases: Mapping[str, GrantedLease]) -> None:
        """Look at a lease when it expires, unless it is looked at before."""
        if lease.expires >= lease.watched_at:
            return
        lease.watched_at = lease.expires
        heapq.heappush(self._heap, (lease.expires, lease.id))
        self.compact(leases)
        if lease.expires < self._due:
            self._due = lease.expires
            engine().call(self.start)

    def compact(self, leases: Mapping[str, GrantedLease]) -> None:
        """Make the heap anew if most of its entries are out of date."""
        if len(self._heap) <= max(_LEAST_HEAP, 2 * len(leases)):
            return
        for each in leases.values():
            each.watched_at = each.expires
        self._heap[:] = [(each.expires, each.id) for each in leases.values() if each.expires != math.inf]
        heapq.heapify(self._heap)

    def take_due(self, leases: Mapping[str, GrantedLease]) -> list[GrantedLease]:
        """Return the leases whose time is over, and watch the others that were to be looked at."""
        now = lease_time()
        expired = []
        self._due = -math.inf  # until the heap is put right
        while self._heap and self._heap[0][0] <= now:
            at, lease_id = heapq.heappop(self._heap)
            lease = leases.get(lease_id)
            if lease is None or lease.watched_at != at:
                continue  # out of date
            lease.watched_at = math.inf
            if lease.expires <= now:
                expired.append(lease)
            else:
                self.watch(lease, leases)
        self._due = self._heap[0][0] if self._heap else math.inf
        return expired

    def clear(self) -> None:
        """Look at no lease any more."""
        self._heap.clear()
        self._due = math.inf

    def start(self) -> None:
        """Set the timer to the earliest time. On the loop of the engine, without the lock."""
        with self._lock:
            due = self._due
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if due != math.inf:
                delay = min(max(0.0, due - lease_time()), _LONGEST)
                self._timer = clock.call_later(engine().loop, delay, self._expire)


class Landlord(Closeable):
    """Grants leases, and keeps account of them. Thread safe; a context manager, which closes it.

    Args:
        name: for the log and in errors.
        max_duration: longest duration that is granted, seconds; ``math.inf``: leases may last for ever.
        default_duration: granted for ``Lease.ANY``, seconds.
        max_leases: leases at a time.

    Raises:
        ArgumentError: an argument is not as described.
    """

    def __init__(
        self,
        name: str = "landlord",
        *,
        max_duration: float = 3600.0,
        default_duration: float = 300.0,
        max_leases: int = 1_000_000,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"name must be a non-empty text, not {name!r:.80}")
        for option, value in (("max_duration", max_duration), ("default_duration", default_duration)):
            if isinstance(value, bool) or seconds(value, option) <= 0:
                raise ArgumentError(f"{option} must be a number of seconds above 0, not {brief(value)}")
        if isinstance(max_leases, bool) or not isinstance(max_leases, int) or max_leases < 1:
            raise ArgumentError(f"max_leases must be an int from 1, not {brief(max_leases)}")
        self.name = name
        self._longest = seconds(max_duration)
        self._default = min(seconds(default_duration), self._longest)
        self._most = max_leases
        #: whether it grants no more leases
        self.is_closed = False
        #: for the leases, and for the parties that keep them
        self.callbacks = LeaseCallbacks(name)
        self.after_fork()
        _landlords.add(self)

    def after_fork(self) -> None:
        """See ``Forkable``: the child has leases of its own; those of the parent stay in the parent."""
        self._lock = threading.Lock()  # guards everything but the callbacks
        self._leases: dict[str, GrantedLease] = {}
        #: when suspended leases would have expired, by id
        self._suspended: dict[str, float] = {}
        self.callbacks.after_fork(self._lock)
        self._timer = ExpiryTimer(self._lock, self.expire)

    # --- granting

    def grant(
        self,
        duration: float = ANY,
        on_end: Callable[[LeaseEnd], object] | None = None,
        *,
        about: str = "",
    ) -> GrantedLease:
        """Grant a lease.

        Args:
            duration: seconds that are asked for, ``Lease.ANY`` or ``Lease.FOREVER``. At most ``max_duration`` is
                granted.
            on_end: called with the reason when the lease has ended, once, on a worker thread. Those of up to four
                leases run at a time, so it must be quick, or pass its work on.
            about: the leased resource, for people.

        Raises:
            ArgumentError: an argument is not as described.
            LeaseDeniedError: there are ``max_leases`` leases.
            ClosedError: the landlord is closed.
        """
        asked = check_duration(duration)
        return self._add(secrets.token_hex(12), asked, self._granted(asked), on_end, about)

    def restore(
        self,
        lease_id: str,
        remaining: float,
        duration: float,
        on_end: Callable[[LeaseEnd], object] | None = None,
        *,
        about: str = "",
        on_renewed: Callable[[GrantedLease], object] | None = None,
    ) -> GrantedLease:
        """Continue a lease of an earlier run.

        Args:
            lease_id: its id.
            remaining: seconds that are left; 0 or less: it has expired meanwhile, and ends at once.
            duration: seconds that were granted last.
            on_end, about: see :meth:`grant`.
            on_renewed: see ``GrantedLease``.

        Raises:
            ArgumentError: there is a lease with this id, or an argument is not as described.
            LeaseDeniedError, ClosedError: as :meth:`grant`.
        """
        left, granted = seconds(remaining, "remaining"), seconds(duration, "duration")
        lease = self._add(lease_id, granted, max(0.0, left), on_end, about, on_renewed)
        lease.duration = granted
        return lease

    def suspend(self, lease_ids: Iterable[str]) -> None:
        """End leases with ``LeaseEnd.CLOSED``, because their party closes and may :meth:`restore` them later.

        Until they would have expired, renewing and cancelling them fails with ``ClosedError``, so that their holders
        try again. Unknown ids are ignored.
        """
        with self._lock:
            now = lease_time()
            self._suspended = {each: expires for each, expires in self._suspended.items() if expires > now}
            for lease_id in lease_ids:
                lease = self._leases.get(lease_id)
                if lease is not None:
                    self._suspended[lease_id] = lease.expires
                    self._remove(lease, LeaseEnd.CLOSED)
        self.callbacks.wake()

    def lease(self, lease_id: str) -> GrantedLease | None:
        """Return the lease with this id; ``None`` if there is none, or its time is over."""
        lease = self._leases.get(lease_id)
        return None if lease is None or lease.is_expired else lease

    def _granted(self, asked: float) -> float:
        return self._default if asked == ANY else min(asked, self._longest)

    def _add(
        self,
        lease_id: str,
        asked: float,
        granted: float,
        on_end: Callable[[LeaseEnd], object] | None,
        about: str,
        on_renewed: Callable[[GrantedLease], object] | None = None,
    ) -> GrantedLease:
        lease = GrantedLease(lease_id, self, asked, granted, about)
        lease.on_renewed = on_renewed
        if on_end is not None:
            check_procedure(on_end, "on_end")
            lease.add(on_end)
        with self._lock:
            if self.is_closed:
                raise ClosedError(f"landlord '{self.name}': closed")
            if len(self._leases) >= self._most:
                raise LeaseDeniedError(f"landlord '{self.name}': {self._most} leases are granted already")
            if lease_id in self._leases:
                raise ArgumentError(f"landlord '{self.name}': there is a lease {lease_id!r:.80}")
            self._leases[lease_id] = lease
            self._suspended.pop(lease_id, None)
            self._timer.watch(lease, self._leases)
        return lease

    # --- renewing and cancelling

    def renew(self, lease: Lease, duration: float = ANY) -> Promise[float]:
        """Renew a lease of this landlord; see :meth:`Lease.renew`."""
        check_instance("lease", lease, Lease)
        granted = self.renew_ids([(lease.id, duration)])[0]
        if isinstance(granted, MessagingError):
            raise granted
        return Promise.resolved(granted, "renew a lease")

    def cancel(self, lease: Lease) -> Promise[None]:
        """Cancel a lease of this landlord; see :meth:`Lease.cancel`."""
        check_instance("lease", lease, Lease)
        error = self.cancel_ids([lease.id])[0]
        if error is not None:
            raise error
        return Promise.resolved(None, "cancel a lease")

    def renew_all(self, requests: Sequence[tuple[Lease, float]]) -> Promise[list[float | MessagingError]]:
        """Renew leases of this landlord; see :class:`~messaging.leases.Grantor`."""
        asked = check_requests(requests)
        return Promise.resolved(self.renew_ids((lease.id, duration) for lease, duration in asked), "renew leases")

    def cancel_all(self, leases: Sequence[Lease]) -> Promise[list[MessagingError | None]]:
        """Cancel leases of this landlord; see :class:`~messaging.leases.Grantor`."""
        return Promise.resolved(self.cancel_ids(each.id for each in check_leases(leases)), "cancel leases")

    def renew_ids(self, requests: Iterable[tuple[str, float]]) -> list[float | MessagingError]:
        """Renew leases by id, for holders in other processes; return the granted seconds, or the error, of each."""
        outcomes: list[float | MessagingError] = []
        for lease_id, duration in requests:
            try:
                asked = check_duration(duration)
            except ArgumentError as error:
                outcomes.append(error)
                continue
            granted = self._granted(asked)
            with self._lock:
                lease = self._leases.get(lease_id)
                if lease is None or lease.is_expired:
                    outcomes.append(self._unknown(lease_id))
                    continue
                lease.note_granted(asked, granted)
                self._timer.watch(lease, self._leases)
            if lease.on_renewed is not None:
                self.callbacks.call(lease.on_renewed, lease)
            outcomes.append(granted)
        return outcomes

    def cancel_ids(self, ids: Iterable[str]) -> list[MessagingError | None]:
        """Cancel leases by id, for holders in other processes; return ``None``, or the error, of each."""
        outcomes: list[MessagingError | None] = []
        with self._lock:
            for lease_id in ids:
                lease = self._leases.get(lease_id)
                if lease is None or lease.is_expired:
                    outcomes.append(self._unknown(lease_id))
                else:
                    self._remove(lease, LeaseEnd.CANCELLED)
                    outcomes.append(None)
        self.callbacks.wake()
        return outcomes

    def _remove(self, lease: GrantedLease, end: LeaseEnd) -> None:
        """End a lease. With the lock."""
        del self._leases[lease.id]
        lease.end = end  # before it counts as ended: threads without the lock look at the reason then
        if end is not LeaseEnd.EXPIRED:
            lease.note_cancelled()
        self.callbacks.note(lease, end)
        self._timer.compact(self._leases)

    def _unknown(self, lease_id: str) -> MessagingError:
        """Return the error for a lease that does not exist. With the lock."""
        if self.is_closed or self._suspended.get(lease_id, -math.inf) > lease_time():
            # not definite: the lease may go on, in this process or in another one
            return ClosedError(f"landlord '{self.name}': closed; the lease {lease_id!r:.80} may continue later")
        return UnknownLeaseError(
            f"landlord '{self.name}': no lease {lease_id!r:.80}: it has expired, or was cancelled, or is of another one"
        )

    # --- the end of leases

    def expire(self) -> None:
        """End the leases whose time is over. The timer calls it; calling it more often does no harm."""
        with self._lock:
            for each in self._timer.take_due(self._leases):
                self._remove(each, LeaseEnd.EXPIRED)
        engine().call(self._timer.start)
        self.callbacks.wake()

    # --- state and life cycle

    def leases(self) -> list[LeaseInfo]:
        """Return the leases, those that expire first at the beginning."""
        with self._lock:
            found = [each for each in self._leases.values() if not each.is_expired]
        found.sort(key=lambda each: each.expires)
        return [LeaseInfo(each.id, each.about, each.duration, each.remaining, each.expiration) for each in found]

    def __len__(self) -> int:
        return len(self._leases)

    def __bool__(self) -> bool:
        """Return ``True``, also when it is empty."""
        return True

    def close(self) -> None:
        """End all leases, with ``LeaseEnd.CLOSED``, and grant no more. Idempotent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            for lease in [*self._leases.values()]:
                self._remove(lease, LeaseEnd.CLOSED)
            self._timer.clear()
            self._suspended = {}
        engine().call(self._timer.start)
        self.callbacks.wake()

    @tolerant
    def __repr__(self) -> str:
        return f"<Landlord {self.name!r} of {len(self._leases)} leases>"


_landlords: Final = LiveObjects[Landlord]()

"""The landlord: grants leases, and ends them when their time is over.

**Time.** Whether a lease has expired is decided by the lease clock whenever it is used. The timer only has the
callbacks called. So a process that was suspended refuses expired leases at once when it goes on.

**Threads.** Any thread may use a landlord. Its lock guards the table and is never held while a callback runs. Callbacks
run on a worker thread, one after the other.

**Cost.** A lease has one entry in the table and one in a heap. Renewing changes the lease only: its entry in the heap
is put right when its old time comes. A million renewals cost no timer.
"""

from __future__ import annotations

import enum
import heapq
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from messaging.errors import ArgumentError, ClosedError, LeaseDeniedError, MessagingError, UnknownLeaseError
from messaging.execution import Promise, Serial, engine, seconds
from messaging.forking import LiveObjects
from messaging.leases.clock import Clock, lease_time
from messaging.leases.lease import ANY, Lease, check_duration
from messaging.text import SafeLog, tolerant

if TYPE_CHECKING:
    import asyncio
    import datetime

logger = SafeLog(__name__)

#: longest sleep of the timer, seconds: the lease clock and that of the event loop differ while a machine is suspended
_LONGEST: Final = 60.0
#: entries of the heap from which on those of ended leases are removed, if they are most of it
_LEAST_HEAP: Final = 1000


class LeaseEnd(enum.Enum):
    """Why a lease has ended."""

    EXPIRED = "expired"
    CANCELLED = "cancelled"
    #: its landlord was closed, perhaps to go on in another process
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

    __slots__ = ("_callbacks", "about", "end")

    def __init__(self, lease_id: str, landlord: Landlord, requested: float, duration: float, about: str) -> None:
        super().__init__(lease_id, landlord, requested, duration, clock=landlord.clock)
        self.about = about
        #: why it has ended; ``None`` before. Guarded by the lock of the landlord
        self.end: LeaseEnd | None = None
        self._callbacks: tuple[Callable[[LeaseEnd], object], ...] = ()

    @property
    def expires(self) -> float:
        """When it expires, in seconds of the lease clock."""
        return self._expires

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


class Landlord:
    """Grants leases, and keeps account of them. Thread safe; a context manager, which closes it.

    Args:
        name: for the log and in errors.
        max_duration: longest duration that is granted, seconds; ``math.inf``: leases may last for ever.
        default_duration: granted for ``Lease.ANY``, seconds.
        max_leases: leases at a time.
        clock: the lease clock; for tests.

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
        clock: Clock = lease_time,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"name must be a non-empty text, not {name!r:.80}")
        for option, value in (("max_duration", max_duration), ("default_duration", default_duration)):
            if isinstance(value, bool) or seconds(value, option) <= 0:
                raise ArgumentError(f"{option} must be a number of seconds above 0, not {value!r:.80}")
        if isinstance(max_leases, bool) or not isinstance(max_leases, int) or max_leases < 1:
            raise ArgumentError(f"max_leases must be an int from 1, not {max_leases!r:.80}")
        self.name = name
        self.clock = clock
        self._longest = float(max_duration)
        self._default = min(float(default_duration), self._longest)
        self._most = max_leases
        self._leases: dict[str, GrantedLease] = {}
        #: when to look at a lease: not after it expires
        self._heap: list[tuple[float, str]] = []
        #: entries of the heap whose lease has ended
        self._stale = 0
        self._is_closed = False
        self._renewed: tuple[Callable[[Lease], object], ...] = ()
        self._ended: deque[tuple[GrantedLease, LeaseEnd]] = deque()
        self.after_fork()
        _landlords.add(self)

    def after_fork(self) -> None:
        """See ``Forkable``: the child has leases of its own; those of the parent stay in the parent."""
        self._lock = threading.Lock()  # guards everything but the callbacks
        self._leases = {}
        self._heap = []
        self._stale = 0
        self._ended = deque()
        self._callbacks = Serial(self._call_back, lambda: self._ended)
        self._timer: asyncio.TimerHandle | None = None
        #: when the timer fires, in seconds of the lease clock; infinite without a timer
        self._due = math.inf

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
            on_end: called with the reason when the lease has ended, once, on a worker thread.
            about: the leased resource, for people.

        Raises:
            ArgumentError: ``duration`` is not as described.
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
    ) -> GrantedLease:
        """Continue a lease of an earlier run.

        Args:
            lease_id: its id.
            remaining: seconds that are left; 0 or less: it has expired meanwhile, and ends at once.
            duration: seconds that were granted last.
            on_end, about: see :meth:`grant`.

        Raises:
            ArgumentError: there is a lease with this id.
            LeaseDeniedError, ClosedError: as :meth:`grant`.
        """
        lease = self._add(lease_id, duration, max(0.0, remaining), on_end, about)
        lease.duration = duration
        return lease

    def _granted(self, asked: float) -> float:
        return self._default if asked == ANY else min(asked, self._longest)

    def _add(
        self, lease_id: str, asked: float, granted: float, on_end: Callable[[LeaseEnd], object] | None, about: str
    ) -> GrantedLease:
        lease = GrantedLease(lease_id, self, asked, granted, about)
        if on_end is not None:
            lease.add(on_end)
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"landlord '{self.name}': closed")
            if len(self._leases) >= self._most:
                raise LeaseDeniedError(f"landlord '{self.name}': {self._most} leases are granted already")
            if lease_id in self._leases:
                raise ArgumentError(f"landlord '{self.name}': there is a lease {lease_id!r:.80}")
            self._leases[lease_id] = lease
            self._watch(lease)
        return lease

    def _watch(self, lease: GrantedLease) -> None:
        """Look at a lease when it expires. With the lock."""
        if lease.expires == math.inf:
            return
        heapq.heappush(self._heap, (lease.expires, lease.id))
        if lease.expires < self._due:
            self._due = lease.expires
            engine().call(self._start_timer)

    # --- renewing and cancelling

    def renew(self, lease: Lease, duration: float = ANY) -> Promise[float]:
        """Renew a lease of this landlord; see :meth:`Lease.renew`."""
        granted = self._renew(lease.id, check_duration(duration))
        if isinstance(granted, MessagingError):
            raise granted
        promise: Promise[float] = Promise("renew a lease")
        promise.resolve(granted)
        return promise

    def cancel(self, lease: Lease) -> Promise[None]:
        """Cancel a lease of this landlord; see :meth:`Lease.cancel`."""
        error = self._cancel(lease.id)
        if error is not None:
            raise error
        promise: Promise[None] = Promise("cancel a lease")
        promise.resolve(None)
        return promise

    def renew_all(self, requests: Sequence[tuple[Lease, float]]) -> Promise[list[float | MessagingError]]:
        """Renew leases of this landlord; see :class:`~messaging.leases.Grantor`."""
        promise: Promise[list[float | MessagingError]] = Promise("renew leases")
        promise.resolve(self.renew_ids((lease.id, duration) for lease, duration in requests))
        return promise

    def cancel_all(self, leases: Sequence[Lease]) -> Promise[list[MessagingError | None]]:
        """Cancel leases of this landlord; see :class:`~messaging.leases.Grantor`."""
        promise: Promise[list[MessagingError | None]] = Promise("cancel leases")
        promise.resolve(self.cancel_ids(each.id for each in leases))
        return promise

    def renew_ids(self, requests: Iterable[tuple[str, float]]) -> list[float | MessagingError]:
        """Renew leases by id, for holders in other processes; return the granted seconds, or the error, of each."""
        return [self._renew_checked(lease_id, duration) for lease_id, duration in requests]

    def cancel_ids(self, ids: Iterable[str]) -> list[MessagingError | None]:
        """Cancel leases by id, for holders in other processes; return ``None``, or the error, of each."""
        return [self._cancel(each) for each in ids]

    def _renew_checked(self, lease_id: str, duration: float) -> float | MessagingError:
        try:
            return self._renew(lease_id, check_duration(duration))
        except ArgumentError as error:
            return error

    def _renew(self, lease_id: str, asked: float) -> float | MessagingError:
        granted = self._granted(asked)
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or lease.is_expired:
                return self._unknown(lease_id)
            before = lease.expires
            lease.note_granted(asked, granted)
            if lease.expires < before:
                self._stale += before != math.inf
                self._watch(lease)
            elif before == math.inf:
                self._watch(lease)
        for each in self._renewed:
            self._contained(each, lease)
        return granted

    def _cancel(self, lease_id: str) -> MessagingError | None:
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or lease.is_expired:
                return self._unknown(lease_id)
            lease.note_cancelled()
            self._remove(lease, LeaseEnd.CANCELLED)
        self._callbacks.wake()
        return None

    def _remove(self, lease: GrantedLease, end: LeaseEnd) -> None:
        """End a lease. With the lock."""
        del self._leases[lease.id]
        lease.end = end
        self._ended.append((lease, end))
        self._stale += 1
        if len(self._heap) > _LEAST_HEAP and self._stale > len(self._heap) // 2:
            self._heap = [(each.expires, each.id) for each in self._leases.values() if each.expires != math.inf]
            heapq.heapify(self._heap)
            self._stale = 0

    def _unknown(self, lease_id: str) -> UnknownLeaseError:
        return UnknownLeaseError(
            f"landlord '{self.name}': no lease {lease_id!r:.80}: it has expired, or was cancelled, or is of another one"
        )

    # --- the end of leases

    def when_renewed(self, callback: Callable[[Lease], object]) -> None:
        """Call ``callback`` with each lease that is renewed, on the renewing thread. It must be quick."""
        with self._lock:
            self._renewed = (*self._renewed, callback)

    def add_callback(self, lease: GrantedLease, callback: Callable[[LeaseEnd], object]) -> None:
        """See :meth:`GrantedLease.when_ended`."""
        with self._lock:
            lease.add(callback)
            end = lease.end
            if end is not None:
                self._ended.append((lease, end))
        if end is not None:
            self._callbacks.wake()

    def _call_back(self) -> None:
        """Call the callbacks of ended leases. On a worker thread."""
        while self._ended:
            lease, end = self._ended.popleft()
            for each in lease.take_callbacks():
                self._contained(each, end)

    def _contained(self, callback: Callable[[Any], object], argument: Any) -> None:
        try:
            callback(argument)
        except Exception:
            logger.exception("landlord '%s': a callback failed", self.name)

    def _start_timer(self) -> None:
        """Set the timer to the earliest time. On the loop of the engine."""
        with self._lock:
            due = self._due
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if due != math.inf and not self._is_closed:
                delay = min(max(0.0, due - self.clock()), _LONGEST)
                self._timer = engine().loop.call_later(delay, self.expire)

    def expire(self) -> None:
        """End the leases whose time is over. The timer calls it; calling it more often does no harm."""
        with self._lock:
            now = self.clock()
            heap = self._heap
            while heap and heap[0][0] <= now:
                _, lease_id = heapq.heappop(heap)
                lease = self._leases.get(lease_id)
                if lease is None:
                    self._stale = max(0, self._stale - 1)
                elif lease.expires <= now:
                    self._remove(lease, LeaseEnd.EXPIRED)
                elif lease.expires != math.inf:
                    heapq.heappush(heap, (lease.expires, lease_id))
            self._due = heap[0][0] if heap else math.inf
        if self._ended:
            self._callbacks.wake()
        engine().call(self._start_timer)

    # --- state and life cycle

    def is_valid(self, lease_id: str) -> bool:
        """Return whether there is a lease with this id, and its time is not over."""
        lease = self._leases.get(lease_id)
        return lease is not None and not lease.is_expired

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
            if self._is_closed:
                return
            self._is_closed = True
            for lease in [*self._leases.values()]:
                lease.note_cancelled()
                self._remove(lease, LeaseEnd.CLOSED)
            self._heap = []
        self._callbacks.wake()
        engine().call(self._start_timer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<Landlord {self.name!r} of {len(self._leases)} leases>"


_landlords: Final = LiveObjects[Landlord]()

"""Leases as their holders see them: a resource for a time, that is renewed as long as it is needed (EV.2.1).

The seconds of the lease clock pass evenly, whatever happens to the wall clock. ``CLOCK_BOOTTIME`` also counts the time
during which the machine is suspended, so that a lease ends in time on a machine that slept. Where there is no such
clock, the monotonic one takes its place.

Batches of leases are renewed and cancelled together, with the failures of each.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self

from messaging.environment import forks
from messaging.errors import (
    ArgumentError,
    ClosedError,
    DecodeError,
    LeaseDeniedError,
    LeaseMapError,
    ListenerGoneError,
    MessagingError,
    UnknownLeaseError,
)
from messaging.errors.checks import check_instance, check_mapping
from messaging.errors.text import SafeLog, brief, tolerant
from messaging.execution import Promise, clock, workers

logger = SafeLog(__name__)


def lease_time() -> float:
    """Return the seconds since some moment; it never goes back. From any thread."""
    return clock.boot()


def boot_id() -> str:
    """Return a text that is the same until the machine starts anew; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


_BOOT: Final = boot_id()


@dataclass(frozen=True, slots=True)
class StoredTime:
    """A moment, as a durable party stores the end of a lease. Immutable.

    As long as the machine runs, the moment is one of the lease clock, and a changed wall clock does not matter. After
    the machine was started anew it is one of the wall clock.

    Attributes:
        boot: tells whether the machine was started anew since.
        at: seconds of the lease clock; infinite for never.
        wall: seconds since the epoch.
    """

    boot: str
    at: float
    wall: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Return the moment that is ``seconds`` from now."""
        return cls(_BOOT, clock.boot() + seconds, clock.wall() + seconds)

    def remaining(self) -> float:
        """Return the seconds until the moment; 0 or less if it has passed."""
        if self.at == math.inf:
            return math.inf
        if _BOOT and self.boot == _BOOT:
            return self.at - clock.boot()
        return self.wall - clock.wall()

    def to_value(self) -> list[Any]:
        """Return the moment in portable form."""
        return [self.boot, None, None] if self.at == math.inf else [self.boot, self.at, self.wall]

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Return the moment of a portable form. Raises ``DecodeError``."""
        try:
            boot, at, wall = value
            if at is None:
                return cls(str(boot), math.inf, math.inf)
            found = cls(str(boot), float(at), float(wall))
        except (OverflowError, TypeError, ValueError):
            raise DecodeError(f"not a stored time: {brief(value)}") from None
        if math.isnan(found.at) or math.isnan(found.wall):
            raise DecodeError(f"not a stored time: {brief(value)}")
        return found


#: the grantor chooses the duration
ANY: Final = -1.0
#: the lease does not expire
FOREVER: Final = math.inf

#: guards the pending renewals of all leases of other processes; held for moments only
_renewals_lock = threading.Lock()
forks.hold_over_fork(_renewals_lock)


class Grantor(Protocol):
    """Where leases are renewed and cancelled: a landlord of this process, or the way to another one. Thread safe.

    It updates the leases that it gets.
    """

    def renew(self, lease: Lease, duration: float, /) -> Promise[float]:
        """Renew one lease; see :meth:`Lease.renew`."""

    def cancel(self, lease: Lease, /) -> Promise[None]:
        """Cancel one lease; see :meth:`Lease.cancel`."""

    def renew_all(self, requests: Sequence[tuple[Lease, float]], /) -> Promise[list[float | MessagingError]]:
        """Renew leases of this grantor for so many seconds each; promise the granted seconds, or the error, of each."""

    def cancel_all(self, leases: Sequence[Lease], /) -> Promise[list[MessagingError | None]]:
        """Cancel leases of this grantor; promise ``None``, or the error, of each."""


class Renewal:
    """A renewal of a lease by a grantor of another process, from the request on.

    Args:
        asked_at: time of the lease clock.
        duration: seconds that were asked for.
        earlier: renewals that were answered before.
    """

    __slots__ = ("asked_at", "duration", "earlier", "granted", "is_counted", "is_pending")

    def __init__(self, asked_at: float, duration: float, earlier: tuple[Renewal, ...]) -> None:
        self.asked_at = asked_at
        self.duration = duration
        self.earlier = earlier
        #: seconds, if the grantor has said so
        self.granted: float | None = None
        self.is_pending = True
        #: whether an answer that came after the request has counted it in the time of the lease
        self.is_counted = False

    @property
    def expires(self) -> float:
        """When the lease expires if the grantor has the request; infinite if the grantor chooses the time."""
        return math.inf if self.duration == ANY else self.asked_at + self.duration

    @property
    def shortest(self) -> float:
        """Seconds that the lease has for this renewal, as far as it is known."""
        if self.granted is not None:
            return self.granted
        return math.inf if self.duration == ANY else self.duration


class Lease:
    """A lease, as its holder sees it. Thread safe.

    Attributes:
        id: of the lease at its grantor.
        grantor: renews and cancels it.
        requested: seconds that were asked for last.
        duration: seconds that were granted last, which may be fewer; infinite for ``FOREVER``.
    """

    ANY: ClassVar[float] = ANY
    FOREVER: ClassVar[float] = FOREVER

    __slots__ = (
        "__weakref__", "_expires", "_is_cancelled", "_known_expires", "_renewals", "duration", "grantor", "id",
        "requested",
    )  # fmt: skip

    def __init__(
        self,
        lease_id: str,
        grantor: Grantor,
        requested: float,
        duration: float,
        *,
        asked_at: float | None = None,
    ) -> None:
        """Make the handle of a granted lease. For grantors.

        Args:
            asked_at: time of the lease clock at which the lease was asked for: it ends ``duration`` after that at the
                latest, whenever the grantor had it. ``None``: now.
        """
        self.id = lease_id
        self.grantor = grantor
        self._is_cancelled = False
        #: those without an answer, and each that the grantor may have had after one of them; guarded by _renewals_lock
        self._renewals: tuple[Renewal, ...] = ()
        self.note_granted(requested, duration, asked_at)

    def note_granted(self, requested: float, duration: float, asked_at: float | None = None) -> None:
        """Note that the lease was granted, or renewed. For grantors and batches."""
        self.requested = requested
        self.duration = duration
        #: when it expires by the renewals that are answered; ``_expires`` is not after it
        self._known_expires = (lease_time() if asked_at is None else asked_at) + duration
        self._expires = self._known_expires

    def note_cancelled(self) -> None:
        """Note that the lease was cancelled. For grantors and batches."""
        self._is_cancelled = True

    def note_asked(self, duration: float, asked_at: float) -> Renewal:
        """Note that a grantor in another process is asked to renew the lease; see :meth:`note_answered`.

        A renewal that shortens the lease counts from now on, because its answer may come late.
        """
        with _renewals_lock:
            renewal = Renewal(asked_at, duration, tuple(each for each in self._renewals if not each.is_pending))
            self._renewals = (*self._renewals, renewal)
            self._expires = min(self._expires, renewal.expires)
        return renewal

    def note_answered(self, renewal: Renewal, outcome: float | MessagingError) -> None:
        """Note the granted seconds, or the error, of a renewal.

        The lease never lasts longer than at its grantor: after a failure that is not definite it may have been renewed
        for the seconds that were asked for, and of renewals that overlap any may have come last. After a definite one
        it lasts as if the renewal had not been asked for, unless another answer has counted that.
        """
        with _renewals_lock:
            renewal.is_pending = False
            if not isinstance(outcome, MessagingError):
                renewal.granted = outcome
                self.requested = renewal.duration
                self.duration = outcome
                self._renewals = found = tuple(each for each in self._renewals if each not in renewal.earlier)
                # the last one came after all of these were asked for
                begin = max(each.asked_at for each in found if each.granted is not None)
                self._known_expires = begin + min(each.shortest for each in found)
                for each in found:
                    each.is_counted = True
            elif is_definite(outcome) or renewal.duration == ANY:
                self._renewals = tuple(each for each in self._renewals if each is not renewal)
            elif not renewal.is_counted:
                self._known_expires = min(self._known_expires, renewal.expires)
            renewal.earlier = ()
            pending = [each.expires for each in self._renewals if each.is_pending and not each.is_counted]
            self._expires = min([self._known_expires, *pending])
            if not any(each.is_pending for each in self._renewals):
                self._renewals = ()

    @property
    def expires(self) -> float:
        """When it expires, in seconds of the lease clock; infinite for ``FOREVER``."""
        return self._expires

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled, as far as this process knows."""
        return self._is_cancelled

    @property
    def remaining(self) -> float:
        """Seconds until the lease expires; 0 if it has expired or was cancelled, infinite for ``FOREVER``."""
        return 0.0 if self._is_cancelled else max(0.0, self._expires - lease_time())

    @property
    def expiration(self) -> datetime.datetime | None:
        """When the lease expires, by the wall clock as it is set now; ``None`` for ``FOREVER``.

        It is for people. A wall clock that is set changes it, and does not change when the lease expires.
        """
        left = self._expires - lease_time()
        if left == math.inf:
            return None
        try:
            return clock.now() + datetime.timedelta(seconds=left)
        except OverflowError:
            return None

    @property
    def is_expired(self) -> bool:
        """Whether its time is over."""
        return lease_time() >= self._expires

    @property
    def is_ended(self) -> bool:
        """Whether it is expired or was cancelled, as far as this process knows."""
        return self._is_cancelled or self.is_expired

    def renew(self, duration: float = ANY) -> Promise[float]:
        """Ask the grantor to let the lease expire ``duration`` seconds from now.

        Args:
            duration: seconds; ``Lease.ANY``: the grantor chooses; ``Lease.FOREVER``: as long as possible.

        Returns:
            The promise of the granted seconds, which may be fewer. With a grantor in this process it has its outcome
            already. With another one it fails with ``UnknownLeaseError`` if the lease has expired or was cancelled,
            with ``LeaseDeniedError`` if the grantor refuses, and as requests do.

        Raises:
            ArgumentError: ``duration`` is not as described.
            UnknownLeaseError, LeaseDeniedError: see above; with a grantor in this process.
            ClosedError: the grantor is closed; with a grantor in this process.
        """
        check_duration(duration)
        return self.grantor.renew(self, duration)

    def cancel(self) -> Promise[None]:
        """End the lease.

        Returns:
            The promise that the grantor has ended it. With a grantor in this process it has its outcome already.

        Raises:
            UnknownLeaseError: the lease has expired or was cancelled before; with a grantor in this process.
            ClosedError: the grantor is closed; with a grantor in this process.
        """
        return self.grantor.cancel(self)

    @tolerant
    def __repr__(self) -> str:
        state = "cancelled" if self._is_cancelled else "expired" if self.is_expired else f"{self.remaining:.1f} s left"
        return f"<Lease {self.id}: {state}>"


def release(lease: Lease) -> None:
    """Cancel a lease of this process, unless it has ended."""
    check_instance("lease", lease, Lease)
    with contextlib.suppress(UnknownLeaseError, ClosedError):
        lease.cancel()


def is_definite(error: MessagingError) -> bool:
    """Return whether a grantor said with ``error`` that it will not renew the lease, also if it is asked again."""
    return isinstance(error, (UnknownLeaseError, LeaseDeniedError, ListenerGoneError)) or type(error) is ArgumentError


def check_leases(leases: Iterable[Lease]) -> list[Lease]:
    """Return the leases of a batch as a list.

    Raises:
        ArgumentError: one of them is no lease.
    """
    found = [*leases]
    for each in found:
        check_instance("a lease of a batch", each, Lease)
    return found


def check_requests(requests: Iterable[tuple[Lease, float]]) -> list[tuple[Lease, float]]:
    """Return the renewals that a batch asks for as a list.

    Raises:
        ArgumentError: one of them is no pair of a lease and a duration, or the duration is not one of leases.
    """
    found = []
    for each in requests:
        if not isinstance(each, tuple) or len(each) != 2:
            raise ArgumentError(f"a renewal must be a tuple of a lease and a duration, not {brief(each)}")
        check_instance("a lease of a batch", each[0], Lease)
        found.append((each[0], check_duration(each[1])))
    return found


def check_duration(value: object) -> float:
    """Return ``value`` if a lease can be asked for so many seconds.

    Raises:
        ArgumentError: it is neither a number above 0 nor ``Lease.ANY``.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value == ANY:
            return ANY
        if value > 0:
            return float(min(value, 1e300)) if value != math.inf else math.inf
    raise ArgumentError(
        f"the duration of a lease must be a number of seconds above 0, Lease.ANY or Lease.FOREVER, not {brief(value)}"
    )


class LeaseMap(dict[Lease, float]):
    """Leases of one grantor, and the seconds to ask for. Not thread safe.

    Args:
        leases: the first ones.

    Raises:
        ArgumentError: a lease has another grantor than the others, or a duration is not one of leases.
    """

    def __init__(self, leases: Mapping[Lease, float] | None = None) -> None:
        super().__init__()
        for lease, duration in check_mapping("leases", {} if leases is None else leases).items():
            self[lease] = duration

    def can_contain(self, lease: Lease) -> bool:
        """Return whether a lease has the grantor of the others."""
        return all(each.grantor == lease.grantor for each in [*self][:1])

    def __setitem__(self, lease: Lease, duration: float) -> None:
        if not isinstance(lease, Lease):
            raise ArgumentError(f"a lease is needed, not {type(lease).__name__}")
        if not self.can_contain(lease):
            raise ArgumentError("the leases of a map must have one grantor; renew_all() takes leases of several")
        super().__setitem__(lease, check_duration(duration))

    def renew_all(self) -> Promise[None]:
        """Renew each lease for its duration; see :func:`renew_all`. Leases that fail are removed from the map."""
        promise = renew_all(self)
        promise.listen(lambda: self._drop_failed(promise))
        return promise

    def cancel_all(self) -> Promise[None]:
        """Cancel each lease; see :func:`cancel_all`."""
        return cancel_all(self)

    def _drop_failed(self, promise: Promise[None]) -> None:
        error = promise.exception(0)
        promise.was_retrieved = False
        if isinstance(error, LeaseMapError):
            for lease in error.failures:
                self.pop(lease, None)


def renew_all(leases: Mapping[Lease, float] | Iterable[Lease]) -> Promise[None]:
    """Renew leases, also of several grantors, with one request for each grantor.

    Args:
        leases: the seconds to ask for, by lease; of plain leases the grantors choose.

    Returns:
        The promise that all are renewed. It fails with ``LeaseMapError`` if some were not: ``failures`` has the error
        of each; the others are renewed, also if a grantor is closed or cannot be reached.

    Raises:
        ArgumentError: a lease or a duration is not as described.
    """
    pairs = [*leases.items()] if isinstance(leases, Mapping) else [(each, ANY) for each in leases]
    asked = check_requests(pairs)
    return _all(asked, lambda grantor, part: grantor.renew_all(part), "renewed")


def cancel_all(leases: Iterable[Lease]) -> Promise[None]:
    """Cancel leases, also of several grantors; otherwise as :func:`renew_all`."""
    asked = [(lease, ANY) for lease in check_leases(leases)]
    return _all(asked, lambda grantor, part: grantor.cancel_all([lease for lease, _ in part]), "cancelled")


def ask_each(ask: Callable[[], Any], count: int, note: Callable[[list[Any], bool], object]) -> None:
    """Make one request to a grantor, and have one outcome noted for each of its leases.

    Args:
        ask: makes the request; returns the promise of the outcomes. Whatever the grantor raises becomes the outcome of
            each lease, and does not reach the caller.
        count: leases in the request.
        note: called once with the outcomes, on this thread or on that of the answer, and with whether the request as
            a whole failed. It must be quick and must not raise.
    """
    try:
        answer = ask()
        if not isinstance(answer, Promise):
            raise TypeError(f"the grantor returned no promise, but {type(answer).__name__}")
    except MessagingError as error:
        note([error] * count, True)
        return
    except Exception as error:
        logger.exception("leases: a grantor raised an unexpected error; its %d leases are not renewed or ended", count)
        note([MessagingError(f"the grantor raised {type(error).__name__}")] * count, True)
        return

    def settle() -> None:
        error = answer.exception(0)
        outcomes: Any = None if error is not None else answer.result(0)
        if error is None and not (isinstance(outcomes, (list, tuple)) and len(outcomes) == count):
            error = DecodeError(f"the grantor did not answer with one outcome for each of {count} leases")
        note([error] * count if error is not None else [*outcomes], error is not None)

    answer.listen(settle)


def _all(asked: list[tuple[Lease, float]], ask: Any, done: str) -> Promise[None]:
    groups: dict[Grantor, list[tuple[Lease, float]]] = {}
    for lease, duration in asked:
        groups.setdefault(lease.grantor, []).append((lease, duration))
    promise: Promise[None] = Promise(f"{len(asked)} leases {done}")
    pending = len(groups) + 1
    failures: dict[Lease, MessagingError] = {}
    lock = threading.Lock()  # guards the two: grantors answer on several threads

    def note(part: list[tuple[Lease, float]], outcomes: list[Any], _is_whole: bool = False) -> None:
        nonlocal pending
        with lock:
            for (lease, _), outcome in zip(part, outcomes, strict=True):
                if isinstance(outcome, MessagingError):
                    failures[lease] = outcome
            pending -= 1
            is_last = not pending
        if not is_last:
            return
        if failures:
            promise.reject(LeaseMapError(f"{len(failures)} of {len(asked)} leases were not {done}", failures))
        else:
            promise.resolve(None)

    for grantor, part in groups.items():
        asking = partial(ask_each, partial(ask, grantor, part), len(part), partial(note, part))
        if len(groups) == 1:
            asking()
        else:  # one that blocks delays no other one
            try:
                workers().submit(asking)
            except RuntimeError:  # no thread can be started
                asking()
    note([], [])
    return promise

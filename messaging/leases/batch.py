"""Batches of leases: renewed and cancelled together, with the failures of each (LeaseMap)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError, DecodeError, LeaseMapError, MessagingError
from messaging.errors.checks import check_mapping
from messaging.errors.text import SafeLog
from messaging.execution import Promise, workers
from messaging.leases.lease import ANY, Lease, check_duration, check_leases, check_requests

if TYPE_CHECKING:
    from messaging.leases.lease import Grantor

logger = SafeLog(__name__)


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

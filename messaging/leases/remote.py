"""Leases of landlords in other processes, over any messaging instance with requests.

An object that grants leases serves three operations on its channel (:mod:`messaging.calls`):

==========  ====================================================  ====================================================
operation   arguments                                             result
==========  ====================================================  ====================================================
``renew``   ``leases``: list of ``[id, seconds]``                 list of the granted seconds; ``[class, text]`` for an
                                                                  error
``cancel``  ``leases``: list of ids                               list of ``null``; ``[class, text]`` for an error
``leases``  none                                                  list of objects, for people
==========  ====================================================  ====================================================

Seconds are a number, or ``null`` for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from messaging.calls import Operation, call, error_named
from messaging.errors import ArgumentError, DecodeError, MessagingError
from messaging.execution import Promise
from messaging.leases.clock import lease_time
from messaging.leases.landlord import Landlord, LeaseInfo
from messaging.leases.lease import Lease, check_duration
from messaging.model import check_name

if TYPE_CHECKING:
    from messaging.instance import Messaging

#: leases in one request
_BATCH: Final = 1000


def lease_operations(landlord: Landlord) -> dict[str, Operation]:
    """Return the operations that make the leases of ``landlord`` available to other processes."""

    def renew(arguments: Mapping[str, Any], _body: bytes) -> list[Any]:
        requests = [(str(lease_id), seconds_of(asked)) for lease_id, asked in _list(arguments)]
        return [
            _described(each) if isinstance(each, MessagingError) else value_of(each)
            for each in landlord.renew_ids(requests)
        ]

    def cancel(arguments: Mapping[str, Any], _body: bytes) -> list[Any]:
        ids = [str(each) for each in _list(arguments)]
        return [None if each is None else _described(each) for each in landlord.cancel_ids(ids)]

    def leases(_arguments: Mapping[str, Any], _body: bytes) -> list[dict[str, Any]]:
        return [
            {
                "id": each.id,
                "about": each.about,
                "duration": value_of(each.duration),
                "remaining": value_of(each.remaining),
                "expiration": each.expiration,
            }
            for each in landlord.leases()
        ]

    return {"renew": renew, "cancel": cancel, "leases": leases}


def _list(arguments: Mapping[str, Any]) -> list[Any]:
    found = arguments.get("leases")
    if not isinstance(found, list):
        raise DecodeError("`leases` must be a list")
    return found


def value_of(duration: float) -> float | None:
    """Return seconds as they travel."""
    return None if duration == math.inf else duration


def seconds_of(value: Any) -> float:
    """Return seconds that have travelled. Raises ``DecodeError``."""
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DecodeError(f"seconds must be a number, or null for ever, not {value!r:.80}")
    return float(value)


def _described(error: MessagingError) -> list[str]:
    return [type(error).__name__, str(error)]


class RemoteGrantor:
    """The way to a landlord in another process; a :class:`~messaging.leases.Grantor`. Thread safe.

    Args:
        messaging: an instance that is connected to the broker of the landlord.
        channel: of the object that serves the leases.
        timeout: seconds until a request fails; ``None``: the setting ``timeout`` of the instance.
    """

    def __init__(self, messaging: Messaging, channel: str, *, timeout: float | None = None) -> None:
        self._messaging = messaging
        self.channel = check_name(channel)
        self._timeout = timeout

    def renew(self, lease: Lease, duration: float) -> Promise[float]:
        """See :class:`~messaging.leases.Grantor`."""
        return _single(self.renew_all([(lease, duration)]), "renew a lease")

    def cancel(self, lease: Lease) -> Promise[None]:
        """See :class:`~messaging.leases.Grantor`."""
        return _single(self.cancel_all([lease]), "cancel a lease")

    def renew_all(self, requests: Sequence[tuple[Lease, float]]) -> Promise[list[float | MessagingError]]:
        """See :class:`~messaging.leases.Grantor`."""
        asked_at = lease_time()  # the grantor counts from later on, so the holder never has a lease longer
        asked = [[lease.id, value_of(check_duration(duration))] for lease, duration in requests]

        def note(outcomes: list[Any]) -> None:
            for (lease, duration), granted in zip(requests, outcomes, strict=True):
                if not isinstance(granted, MessagingError):
                    lease.note_granted(duration, granted, asked_at)

        return self._call("renew", asked, lambda each: seconds_of(each), note)

    def cancel_all(self, leases: Sequence[Lease]) -> Promise[list[MessagingError | None]]:
        """See :class:`~messaging.leases.Grantor`."""

        def note(outcomes: list[Any]) -> None:
            for lease, error in zip(leases, outcomes, strict=True):
                if error is None:
                    lease.note_cancelled()

        return self._call("cancel", [each.id for each in leases], lambda _each: None, note)

    def _call(self, operation: str, asked: list[Any], read: Any, note: Any) -> Promise[Any]:
        promise: Promise[Any] = Promise(f"{operation} {len(asked)} leases at {self.channel!r}")
        parts = [asked[at : at + _BATCH] for at in range(0, len(asked), _BATCH)] or [[]]

        def convert(result: Any) -> list[Any]:
            return [_error(each) if isinstance(each, list) else read(each) for each in result]

        answers = [
            call(self._messaging, self.channel, operation, {"leases": part}, timeout=self._timeout, convert=convert)
            for part in parts
        ]
        left = len(answers)

        def settle() -> None:  # on the loop of the engine, one after the other
            nonlocal left
            left -= 1
            if left:
                return
            outcomes: list[Any] = []
            for part, answer in zip(parts, answers, strict=True):
                error = answer.exception(0)
                found = [error] * len(part) if error is not None else answer.result(0)
                if len(found) != len(part):
                    found = [DecodeError(f"{operation} at {self.channel!r}: malformed reply")] * len(part)
                outcomes += found
            note(outcomes)
            promise.resolve(outcomes)

        for answer in answers:
            answer.listen(settle)
        return promise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteGrantor) and (self.channel, self._messaging) == (other.channel, other._messaging)

    def __hash__(self) -> int:
        return hash(self.channel)


def _error(value: list[Any]) -> MessagingError:
    return error_named(str(value[0]), str(value[1]))


def _single(batch: Promise[list[Any]], what: str) -> Promise[Any]:
    promise: Promise[Any] = Promise(what)

    def settle() -> None:
        error = batch.exception(0)
        found = error if error is not None else batch.result(0)[0]
        if isinstance(found, MessagingError):
            promise.reject(found)
        else:
            promise.resolve(found)

    batch.listen(settle)
    return promise


def remote_leases(messaging: Messaging, channel: str, *, timeout: float | None = None) -> Promise[list[LeaseInfo]]:
    """Return the promise of the leases of an object, for people.

    Args:
        messaging: an instance that is connected to the broker of the object.
        channel: of the object.
        timeout: seconds until the request fails; ``None``: the setting ``timeout`` of the instance.
    """

    return call(messaging, channel, "leases", timeout=timeout, convert=infos_of)


def infos_of(result: Any) -> list[LeaseInfo]:
    """Return the leases of a result of the operation ``leases``. Raises ``TypeError``, ``KeyError``."""
    return [
        LeaseInfo(
            each["id"], each["about"], seconds_of(each["duration"]), seconds_of(each["remaining"]), each["expiration"]
        )
        for each in result
    ]


def lease_to_value(lease: Lease) -> list[Any]:
    """Return a lease that was just granted, as the result of a call."""
    return [lease.id, value_of(lease.duration)]


def lease_from_value(
    messaging: Messaging, channel: str, value: Any, requested: float, asked_at: float, *, timeout: float | None = None
) -> Lease:
    """Return the lease of a result of a call.

    Args:
        messaging, channel: the way to the landlord.
        value: of :func:`lease_to_value`.
        requested: seconds that were asked for.
        asked_at: time of the lease clock before the call.
        timeout: of the requests for renewing and cancelling.

    Raises:
        DecodeError: it is no lease.
    """
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise DecodeError(f"not a lease: {value!r:.80}")
    grantor = RemoteGrantor(messaging, channel, timeout=timeout)
    return Lease(value[0], grantor, requested, seconds_of(value[1]), asked_at=asked_at)


def reference_of(lease: Lease) -> list[Any]:
    """Return where a lease of another process is renewed, to be kept over a restart.

    Raises:
        ArgumentError: its landlord is in this process.
    """
    if not isinstance(lease.grantor, RemoteGrantor):
        raise ArgumentError("the landlord of the lease is in this process: the lease cannot be found after a restart")
    return [lease.grantor.channel, lease.id]

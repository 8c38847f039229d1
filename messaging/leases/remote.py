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

import datetime
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from messaging.calls import Operation, call, checked_instance, error_named
from messaging.errors import ArgumentError, DecodeError, MessagingError, PayloadTooLargeError, ReplyError
from messaging.execution import Promise, seconds
from messaging.leases.clock import lease_time
from messaging.leases.granted import LeaseInfo
from messaging.leases.lease import Lease, brief, check_leases, check_requests
from messaging.model import check_name

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.leases.landlord import Landlord

#: most leases in one request
_BATCH: Final = 1000


def lease_operations(landlord: Landlord) -> dict[str, Operation]:
    """Return the operations that make the leases of ``landlord`` available to other processes."""

    def renew(arguments: Mapping[str, Any], _body: bytes) -> list[Any]:
        requests = [_request(each) for each in _list(arguments)]
        return [
            _described(each) if isinstance(each, MessagingError) else value_of(each)
            for each in landlord.renew_ids(requests)
        ]

    def cancel(arguments: Mapping[str, Any], _body: bytes) -> list[Any]:
        ids = [_id(each) for each in _list(arguments)]
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


def _request(value: Any) -> tuple[str, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise DecodeError(f"`leases` must be a list of [id, seconds], not of {brief(value)}")
    return _id(value[0]), seconds_of(value[1])


def _id(value: Any) -> str:
    if not isinstance(value, str):
        raise DecodeError(f"the id of a lease must be a text, not {brief(value)}")
    return value


def value_of(duration: float) -> float | None:
    """Return seconds as they travel."""
    return None if duration == math.inf else duration


def seconds_of(value: Any) -> float:
    """Return seconds that have travelled. Raises ``DecodeError``."""
    if value is None:
        return math.inf
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
            return float(value)
    except OverflowError:
        pass
    raise DecodeError(f"seconds must be a number, or null for ever, not {brief(value)}")


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
        self._messaging = checked_instance(messaging)
        self.channel = check_name(channel)
        self._timeout = None if timeout is None else seconds(timeout)

    def renew(self, lease: Lease, duration: float) -> Promise[float]:
        """See :class:`~messaging.leases.Grantor`."""
        return _single(self.renew_all([(lease, duration)]), "renew a lease")

    def cancel(self, lease: Lease) -> Promise[None]:
        """See :class:`~messaging.leases.Grantor`."""
        return _single(self.cancel_all([lease]), "cancel a lease")

    def renew_all(self, requests: Sequence[tuple[Lease, float]]) -> Promise[list[float | MessagingError]]:
        """See :class:`~messaging.leases.Grantor`."""
        requests = check_requests(requests)
        asked = [[lease.id, value_of(duration)] for lease, duration in requests]
        asked_at = lease_time()  # the grantor counts from later on, so the holder never has a lease longer
        renewals = [lease.note_asked(duration, asked_at) for lease, duration in requests]

        def note(outcomes: list[Any]) -> None:
            for (lease, _), renewal, outcome in zip(requests, renewals, outcomes, strict=True):
                lease.note_answered(renewal, outcome)

        return _Batch(self, "renew", asked, seconds_of, note).send()

    def cancel_all(self, leases: Sequence[Lease]) -> Promise[list[MessagingError | None]]:
        """See :class:`~messaging.leases.Grantor`."""
        leases = check_leases(leases)

        def note(outcomes: list[Any]) -> None:
            for lease, error in zip(leases, outcomes, strict=True):
                if error is None:
                    lease.note_cancelled()

        return _Batch(self, "cancel", [each.id for each in leases], lambda _each: None, note).send()

    def call(self, operation: str, asked: list[Any], convert: Callable[[Any], list[Any]]) -> Promise[list[Any]]:
        """Make one request for several leases. Raises as ``messaging.calls.call``."""
        return call(self._messaging, self.channel, operation, {"leases": asked}, timeout=self._timeout, convert=convert)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteGrantor) and (self.channel, self._messaging) == (other.channel, other._messaging)

    def __hash__(self) -> int:
        return hash(self.channel)


class _Batch:
    """One operation on leases of one grantor, in as many requests as it takes. Thread safe.

    Args:
        grantor: the way to the landlord.
        operation: its name.
        asked: the arguments, one for each lease.
        read: makes the outcome of a part of the answer.
        note: called with the outcomes, before the promise has them.
    """

    def __init__(
        self,
        grantor: RemoteGrantor,
        operation: str,
        asked: list[Any],
        read: Callable[[Any], Any],
        note: Callable[[list[Any]], object],
    ) -> None:
        self._grantor = grantor
        self._operation = operation
        self._asked = asked
        self._read = read
        self._note = note
        self._promise: Promise[list[Any]] = Promise(f"{operation} {len(asked)} leases at {grantor.channel!r}")
        self._outcomes: list[Any] = [None] * len(asked)
        self._lock = threading.Lock()  # guards the number: requests fail on this thread, and are answered on another
        self._pending = 1

    def send(self) -> Promise[list[Any]]:
        """Make the requests; return the promise of the outcomes."""
        for at in range(0, len(self._asked), _BATCH):
            self._send(at, min(at + _BATCH, len(self._asked)))
        self._finish()
        return self._promise

    def _send(self, begin: int, end: int) -> None:
        """Make the request for a part of the leases."""
        with self._lock:
            self._pending += 1
        try:
            answer = self._grantor.call(self._operation, self._asked[begin:end], self._convert)
        except MessagingError as error:
            self._fail(begin, end, error)
        else:
            answer.listen(lambda: self._settle(begin, end, answer))

    def _convert(self, result: Any) -> list[Any]:
        return [_error(each) if isinstance(each, list) else self._read(each) for each in result]

    def _settle(self, begin: int, end: int, answer: Promise[list[Any]]) -> None:
        error = answer.exception(0)
        outcomes = [] if error is not None else answer.result(0)
        if error is None and len(outcomes) != end - begin:
            error = DecodeError(f"{self._operation} at {self._grantor.channel!r}: malformed reply")
        if error is not None:
            # an ArgumentError in the list is about one lease, and definite; this one is about the request
            whole = ReplyError(type(error).__name__, str(error)) if type(error) is ArgumentError else error
            self._fail(begin, end, whole)
            return
        self._outcomes[begin:end] = outcomes
        self._finish()

    def _fail(self, begin: int, end: int, error: MessagingError) -> None:
        """Note that a request failed as a whole; halve it if it is larger than the broker takes."""
        if isinstance(error, PayloadTooLargeError) and end - begin > 1:
            middle = (begin + end) // 2
            self._send(begin, middle)
            self._send(middle, end)
        else:
            self._outcomes[begin:end] = [error] * (end - begin)
        self._finish()

    def _finish(self) -> None:
        """Note that one request is done; after the last one, settle the promise."""
        with self._lock:
            self._pending -= 1
            is_last = not self._pending
        if is_last:
            self._note(self._outcomes)
            self._promise.resolve(self._outcomes)


def _error(value: list[Any]) -> MessagingError:
    match value:
        case [str(kind), str(reason)]:
            return error_named(kind, reason)
    raise DecodeError(f"not an error of a lease: {brief(value)}")


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
    """Return the leases of a result of the operation ``leases``. Raises ``DecodeError``."""
    if not isinstance(result, list):
        raise DecodeError(f"leases must be a list, not {brief(result)}")
    return [_info(each) for each in result]


def _info(value: Any) -> LeaseInfo:
    match value:
        case {
            "id": str(lease_id), "about": str(about), "duration": duration, "remaining": remaining,
            "expiration": None | datetime.datetime() as expiration,
        }:  # fmt: skip
            return LeaseInfo(lease_id, about, seconds_of(duration), seconds_of(remaining), expiration)
    raise DecodeError(f"not a lease: {brief(value)}")


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
        raise DecodeError(f"not a lease: {brief(value)}")
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

"""Leases of landlords in other processes, over any messaging instance with requests, and finding them at a broker.

An object that grants leases serves the operations of :data:`LEASES` on its channel (:mod:`messaging.dispatch.calls`).
Leases travel as ``[id, seconds]``, errors as ``[class, text]``. Seconds are a number, or ``null`` for ever.

A query is published to the channel ``leases/query`` as JSON, ``{"answer": CHANNEL}``. Each object that serves leases
answers on that channel, which begins with ``leases/answers/``: ``{"channel": its own, "leases": [...]}``, with the
result of its operation ``leases``.

**Threads.** Answers are made on a worker thread.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.calls import (
    NOTHING,
    TEXT,
    CallServer,
    Function,
    Interface,
    Operation,
    RemoteObject,
    WireForm,
    checked_instance,
    list_of,
    outcome_of,
)
from messaging.dispatch.eventdata import from_portable, read_json, to_portable, write_json
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ClosedError, DecodeError, MessagingError, PayloadTooLargeError, ReplyError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, brief, printable
from messaging.execution import Promise, clock, converted, refuse_in_loop, seconds
from messaging.leases.landlord import Landlord, LeaseInfo
from messaging.leases.lease import Lease, check_leases, check_requests, lease_time
from messaging.model import Message  # the annotation of `_answer` is evaluated

if TYPE_CHECKING:
    from messaging.instance import Messaging

logger = SafeLog(__name__)


#: most leases in one request
_BATCH: Final = 1000


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


def _write_request(request: tuple[str, float]) -> list[Any]:
    lease_id, duration = request
    return [lease_id, value_of(duration)]


def _read_request(value: Any) -> tuple[str, float]:
    lease_id, duration = value
    return TEXT.read(lease_id), seconds_of(duration)


def _write_info(info: LeaseInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "about": info.about,
        "duration": value_of(info.duration),
        "remaining": value_of(info.remaining),
        "expiration": info.expiration,
    }


def _read_info(value: Any) -> LeaseInfo:
    match value:
        case {
            "id": str(lease_id), "about": str(about), "duration": duration, "remaining": remaining,
            "expiration": None | datetime.datetime() as expiration,
        }:  # fmt: skip
            return LeaseInfo(lease_id, about, seconds_of(duration), seconds_of(remaining), expiration)
    raise DecodeError(f"not a lease: {brief(value)}")


SECONDS: Final = WireForm("seconds, or null for ever", value_of, seconds_of)
#: a lease that was just granted: its stub makes a handle of it with :func:`lease_from_value`
LEASE: Final = WireForm("a lease", lease_to_value)
_INFOS: Final = list_of(WireForm("a lease", _write_info, _read_info))
#: the operations of an object that grants leases
LEASES: Final = Interface(
    renew=Operation(
        list_of(outcome_of(SECONDS)), leases=list_of(WireForm("[id, seconds]", _write_request, _read_request))
    ),
    cancel=Operation(list_of(outcome_of(NOTHING)), leases=list_of(TEXT)),
    leases=Operation(_INFOS),
)


def lease_operations(landlord: Landlord) -> dict[str, Function]:
    """Return the operations that make the leases of ``landlord`` available to other processes."""
    return LEASES.served(renew=landlord.renew_ids, cancel=landlord.cancel_ids, leases=landlord.leases)


class RemoteGrantor(RemoteObject):
    """The way to a landlord in another process; a :class:`~messaging.leases.Grantor`. Thread safe.

    The channel is that of the object that serves the leases; see :class:`~messaging.dispatch.calls.RemoteObject`.
    """

    interface = LEASES

    def renew(self, lease: Lease, duration: float) -> Promise[float]:
        """See :class:`~messaging.leases.Grantor`."""
        return converted(self.renew_all([(lease, duration)]), _single, "renew a lease")

    def cancel(self, lease: Lease) -> Promise[None]:
        """See :class:`~messaging.leases.Grantor`."""
        return converted(self.cancel_all([lease]), _single, "cancel a lease")

    def renew_all(self, requests: Sequence[tuple[Lease, float]]) -> Promise[list[float | MessagingError]]:
        """See :class:`~messaging.leases.Grantor`."""
        requests = check_requests(requests)
        asked = [(lease.id, duration) for lease, duration in requests]
        asked_at = lease_time()  # the grantor counts from later on, so the holder never has a lease longer
        renewals = [lease.note_asked(duration, asked_at) for lease, duration in requests]

        def note(outcomes: list[Any]) -> None:
            for (lease, _), renewal, outcome in zip(requests, renewals, outcomes, strict=True):
                lease.note_answered(renewal, outcome)

        return _LeaseRequests(self, "renew", asked, note).send()

    def cancel_all(self, leases: Sequence[Lease]) -> Promise[list[MessagingError | None]]:
        """See :class:`~messaging.leases.Grantor`."""
        leases = check_leases(leases)

        def note(outcomes: list[Any]) -> None:
            for lease, error in zip(leases, outcomes, strict=True):
                if error is None:
                    lease.note_cancelled()

        return _LeaseRequests(self, "cancel", [each.id for each in leases], note).send()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteGrantor) and (self.channel, self.messaging) == (other.channel, other.messaging)

    def __hash__(self) -> int:
        return hash(self.channel)


class _LeaseRequests:
    """One operation on leases of one grantor, in as many requests as it takes. Thread safe.

    Args:
        grantor: the way to the landlord.
        operation: its name.
        asked: the arguments, one for each lease.
        note: called with the outcomes, before the promise has them.
    """

    def __init__(
        self,
        grantor: RemoteGrantor,
        operation: str,
        asked: list[Any],
        note: Callable[[list[Any]], object],
    ) -> None:
        self._grantor = grantor
        self._operation = operation
        self._asked = asked
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
            answer = self._grantor.call(self._operation, {"leases": self._asked[begin:end]})
        except MessagingError as error:
            self._fail(begin, end, error)
        else:
            answer.listen(lambda: self._settle(begin, end, answer))

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


def _single(outcomes: list[Any]) -> Any:
    """Return the outcome of a single lease; raise it if it is an error."""
    if isinstance(outcomes[0], MessagingError):
        raise outcomes[0]
    return outcomes[0]


def remote_leases(messaging: Messaging, channel: str, *, timeout: float | None = None) -> Promise[list[LeaseInfo]]:
    """Return the promise of the leases of an object, for people.

    Args:
        messaging: an instance that is connected to the broker of the object.
        channel: of the object.
        timeout: seconds until the request fails; ``None``: the setting ``timeout`` of the instance.
    """
    return RemoteGrantor(messaging, channel, timeout=timeout).call("leases", {})


def reference_of(lease: Lease) -> list[Any]:
    """Return where a lease of another process is renewed, to be kept over a restart.

    Raises:
        ArgumentError: its landlord is in this process.
    """
    if not isinstance(lease.grantor, RemoteGrantor):
        raise ArgumentError("the landlord of the lease is in this process: the lease cannot be found after a restart")
    return [lease.grantor.channel, lease.id]


class LeasingServer(CallServer):
    """Makes an object that may grant leases available to other processes. Thread safe; a context manager.

    Args:
        messaging, channel, operations: see ``CallServer``.
        landlord: grants the leases of the object, by its own way; ``None``: there are none.
    """

    def __init__(
        self, messaging: Messaging, channel: str, operations: Mapping[str, Function], landlord: Landlord | None
    ) -> None:
        served = operations if landlord is None else {**operations, **lease_operations(landlord)}
        super().__init__(messaging, channel, served)  # requests may arrive from here on
        with on_failure(super().close):  # the channel must be free again
            self._directory = None if landlord is None else LeaseDirectory(messaging, channel, landlord)

    def close(self) -> None:
        """Answer no further requests. Idempotent."""
        super().close()
        if self._directory is not None:
            self._directory.close()


class LeaseServer(LeasingServer):
    """Makes the leases of a landlord available to other processes. Thread safe; a context manager, which closes it.

    Args:
        messaging: an instance with requests.
        channel: of the requests.
        landlord: grants the leases, by its own way.

    Raises:
        ArgumentError: ``landlord`` is no Landlord.
        InvalidChannelError, UnsupportedFeatureError, SubscriptionRefusedError: as ``CallServer``.
    """

    def __init__(self, messaging: Messaging, channel: str, landlord: Landlord) -> None:
        check_instance("landlord", landlord, Landlord)
        super().__init__(messaging, channel, {}, landlord)


QUERY: Final = "leases/query"
ANSWERS: Final = "leases/answers/"
#: longest wait for answers, seconds
_MOST_WAIT: Final = 3600.0
#: bounds of what answers are kept
_MOST_OBJECTS: Final = 10_000
_MOST_LEASES: Final = 1_000_000


class LeaseDirectory:
    """Answers queries for the leases of one object. Thread safe.

    Args:
        messaging: the instance of the object.
        channel: where the leases are served.
        landlord: grants them.
    """

    def __init__(self, messaging: Messaging, channel: str, landlord: Landlord) -> None:
        self._messaging = messaging
        self._channel = channel
        self._leases = lease_operations(landlord)["leases"]
        self._registration = messaging.on(QUERY, self._answer)

    def _answer(self, query: Message) -> None:
        try:
            value = read_json(query.payload)
            answer = value.get("answer") if isinstance(value, dict) else None
            if not isinstance(answer, str) or not answer.startswith(ANSWERS):
                raise DecodeError("no channel for the answer")
            found = {"channel": self._channel, "leases": to_portable(self._leases({}, b""))}
            self._messaging.publish(answer, write_json(found)).result()
        except MessagingError as error:
            logger.warning("leases at '%s': a query is not answered: %s", self._channel, error)

    def close(self) -> None:
        """Answer no further queries. Idempotent."""
        with contextlib.suppress(ClosedError):
            self._registration.close()


def find_leases(messaging: Messaging, wait: float = 1.0) -> list[tuple[str, list[LeaseInfo]]]:
    """Ask all objects at a broker for their leases.

    Args:
        messaging: an instance that is connected to the broker.
        wait: seconds after which no further answers are expected, up to 3600.

    Returns:
        The channel of each object that answered, and its leases; at most 10,000 objects, and a million leases.
        Malformed answers are logged and left out.

    Raises:
        ArgumentError: ``wait`` is not as described.
        MessagingError: the query cannot be sent.
        WouldBlockError: the thread runs an event loop: use ``asyncio.to_thread``. Nothing was done.
    """
    checked_instance(messaging)
    refuse_in_loop("the answers", "`await asyncio.to_thread(find_leases, ...)`")
    patience = seconds(wait, "wait")
    if isinstance(wait, bool) or not 0 <= patience <= _MOST_WAIT:
        raise ArgumentError(f"wait must be a number of seconds from 0 to {_MOST_WAIT:g}, not {brief(wait)}")
    answers = ANSWERS + secrets.token_hex(8)
    found: dict[str, list[LeaseInfo]] = {}
    room = _MOST_LEASES
    with messaging.subscribe(answers) as stream:
        messaging.publish(QUERY, write_json({"answer": answers})).result()
        deadline = clock.monotonic() + patience
        while (left := deadline - clock.monotonic()) > 0:
            try:
                message = stream.receive(timeout=left)
            except TimeoutError:
                break
            try:
                channel, leases = _read_answer(message.payload)
            except MessagingError as error:
                logger.warning("leases: malformed answer, left out: %s", error)
                continue
            room += len(found.pop(channel, ()))
            if len(leases) > room or len(found) >= _MOST_OBJECTS:
                logger.warning("leases: too many answers: the leases of '%s' are left out", printable(channel))
                continue
            room -= len(leases)
            found[channel] = leases
    return sorted(found.items())


def _read_answer(payload: bytes) -> tuple[str, list[LeaseInfo]]:
    """Return the channel of an object and its leases. Raises ``DecodeError``."""
    value: Any = from_portable(read_json(payload))
    if not isinstance(value, dict) or not isinstance(value.get("channel"), str):
        raise DecodeError("the answer names no channel")
    return value["channel"], _INFOS.argument("leases", value)

"""Leases for other processes: the server of a landlord, and finding the leases at a broker.

A query is published to the channel ``leases/query`` as JSON, ``{"answer": CHANNEL}``. Each object that serves leases
answers on that channel, which begins with ``leases/answers/``: ``{"channel": its own, "leases": [...]}``, with the
result of its operation ``leases`` (:mod:`messaging.leases.remote`).

**Threads.** Answers are made on a worker thread."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.calls import CallServer, Function, checked_instance
from messaging.dispatch.eventdata import from_portable, read_json, to_portable, write_json
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ClosedError, DecodeError, MessagingError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, brief, printable
from messaging.execution import clock, refuse_in_loop, seconds
from messaging.leases.landlord import Landlord
from messaging.leases.remote import infos_of, lease_operations
from messaging.model import Message  # noqa: TC001  # the annotation of `_answer` is evaluated

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.leases.landlord import LeaseInfo

logger = SafeLog(__name__)


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
    return value["channel"], infos_of(value.get("leases"))

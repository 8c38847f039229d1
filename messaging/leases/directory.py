"""Finding the leases at a broker: objects that serve leases answer a query that is published to all of them.

A query is published to the channel ``leases/query`` as JSON, ``{"answer": CHANNEL}``. Each object answers on that
channel, which begins with ``leases/answers/``: ``{"channel": its own, "leases": [...]}``, with the result of its
operation ``leases`` (:mod:`messaging.leases.remote`).

**Threads.** Answers are made on a worker thread.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ClosedError, MessagingError
from messaging.eventdata import from_portable, read_json, to_portable, write_json
from messaging.leases.remote import infos_of, lease_operations
from messaging.model import Message  # noqa: TC001  # the annotation of `_answer` is evaluated

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.leases.landlord import Landlord, LeaseInfo

logger = logging.getLogger(__name__)

QUERY: Final = "leases/query"
ANSWERS: Final = "leases/answers/"


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
        value = read_json(query.payload)
        answer = value.get("answer") if isinstance(value, dict) else None
        if not isinstance(answer, str) or not answer.startswith(ANSWERS):
            logger.warning("leases at %r: malformed query, not answered", self._channel)
            return
        found = {"channel": self._channel, "leases": to_portable(self._leases({}, b""))}
        self._messaging.publish(answer, write_json(found)).result()

    def close(self) -> None:
        """Answer no further queries. Idempotent."""
        with contextlib.suppress(ClosedError):
            self._registration.close()


def find_leases(messaging: Messaging, wait: float = 1.0) -> list[tuple[str, list[LeaseInfo]]]:
    """Ask all objects at a broker for their leases.

    Args:
        messaging: an instance that is connected to the broker.
        wait: seconds after which no further answers are expected.

    Returns:
        The channel of each object that answered, and its leases.

    Raises:
        MessagingError: the query cannot be sent.
    """
    answers = ANSWERS + secrets.token_hex(8)
    found: dict[str, list[LeaseInfo]] = {}
    with messaging.subscribe(answers) as stream:
        messaging.publish(QUERY, write_json({"answer": answers})).result()
        deadline = time.monotonic() + wait
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = stream.receive(timeout=left)
            except TimeoutError:
                break
            try:
                value: Any = from_portable(read_json(message.payload))
                found[str(value["channel"])] = infos_of(value["leases"])
            except (MessagingError, KeyError, TypeError) as error:
                logger.warning("leases: malformed answer: %s", error)
    return sorted(found.items())

"""Publishing of the rows of a claim: keys side by side, the rows of a key one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.errors import (
    ArgumentError,
    CodecError,
    MessagingError,
    OutboxFullError,
    PublishRefusedError,
    UnsupportedFeatureError,
)
from messaging.errors.text import SafeLog, printable
from messaging.execution import jitter
from messaging.model import Features, Message, MessageContext, restored_context
from messaging.outbox.sql.claims import Refusal, Row

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.instance import Messaging

logger = SafeLog(__name__)

#: errors that come back however often the message is published
_PERMANENT: Final = (ArgumentError, UnsupportedFeatureError, CodecError)


@dataclass(slots=True)
class Delivered:
    """The outcome of the rows of a claim, as far as it is known. Rows in none of the lists stay as they are.

    Attributes:
        sent: ids of the rows that the broker has confirmed, since the last :meth:`take`.
        refused: rows that were refused, and what follows, likewise.
        keys: the keys that are not done.
        open: number of rows that have no outcome; when the delivery has ended, of rows that were not published, or
            whose outcome is unknown.
        cause: the failure of broker or connection that ended a key, the last one.
        has_stuck: whether no row was sent or refused, and rows are left.
    """

    sent: list[int] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    open: int = 0
    cause: MessagingError | None = None
    has_stuck: bool = False

    def take(self) -> tuple[list[int], list[Refusal]]:
        """Return the rows that were sent and refused since the last call."""
        taken = self.sent, self.refused
        self.sent, self.refused = [], []
        return taken


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """How rows are claimed, published, tried again and kept.

    Attributes:
        confirm_timeout: seconds until the broker must have confirmed a message.
        in_flight_per_key: unconfirmed messages of a key at a time.
        max_attempts: refusals after which a row is dead.
        shortest, longest: bounds of the pause of a key after a refusal, seconds.
        lease, poll_interval, retention: as of the relay, seconds.
    """

    confirm_timeout: float
    in_flight_per_key: int
    max_attempts: int
    shortest: float
    longest: float
    lease: float
    poll_interval: float
    retention: float

    def retry_in(self, attempts: int) -> float | None:
        """Return the seconds until the next attempt after so many refusals, or ``None`` if there is none."""
        if attempts >= self.max_attempts:
            return None
        longest = min(self.longest, self.shortest * 2.0 ** min(attempts - 1, 60))
        return jitter(longest / 2, longest)


class Delivery:
    """Publishes rows through one instance. On one event loop."""

    def __init__(self, instance: Messaging, policy: RelayPolicy) -> None:
        self._instance = instance
        self._policy = policy
        #: whether the instance announces message ids
        self._has_ids = False
        self._contexts: BoundedCache[tuple[str, str], MessageContext] = BoundedCache(1024)

    async def deliver(self, rows: Sequence[Row], may_send: Callable[[], bool], outcome: Delivered) -> None:
        """Publish ``rows`` in their order within each key, and await the confirmations.

        Args:
            rows: the rows.
            may_send: whether to publish another row; rows that are in flight are awaited all the same.
            outcome: is filled in.
        """
        self._has_ids = Features.EXTENSION_MESSAGE_ID in self._instance.features  # a new connection may change it
        keys: dict[str, list[Row]] = {}
        for row in rows:
            keys.setdefault(row.key, []).append(row)
        outcome.keys.update(keys)
        outcome.open = len(rows)
        await asyncio.gather(*(self._deliver_key(each, may_send, outcome) for each in keys.values()))
        outcome.has_stuck = outcome.open == len(rows)

    async def _deliver_key(self, rows: Sequence[Row], may_send: Callable[[], bool], outcome: Delivered) -> None:
        in_flight: deque[tuple[Row, Promise[None]]] = deque()
        for row in rows:
            goes_on = True
            while goes_on and len(in_flight) >= self._policy.in_flight_per_key:
                goes_on = await self._settled(*in_flight.popleft(), outcome)
            if not goes_on or not may_send():
                break
            try:
                promise = self._instance.publisher.publish(self._message(row))
            except MessagingError as error:
                if not self._goes_on(row, error, outcome):
                    break
            except Exception as error:  # a defect that one row meets must not end the relay
                logger.exception("outbox: row %d cannot be published", row.id)
                if not self._refused(row, error, self._policy.retry_in(row.attempts + 1), outcome):
                    break
            else:
                promise.was_retrieved = True  # the relay may be cancelled before the outcome
                in_flight.append((row, promise))
        while in_flight:  # after a refusal of an earlier row, too: these are with the broker
            await self._settled(*in_flight.popleft(), outcome)
        outcome.keys.discard(rows[0].key)

    async def _settled(self, row: Row, promise: Promise[None], outcome: Delivered) -> bool:
        """Await the outcome of a row; return whether the next row of its key may be published."""
        try:
            await promise
        except MessagingError as error:
            return self._goes_on(row, error, outcome)
        outcome.sent.append(row.id)
        outcome.open -= 1
        return True

    def _goes_on(self, row: Row, error: MessagingError, outcome: Delivered) -> bool:
        """Note the failure of a row; return whether the next row of its key may be published."""
        if isinstance(error, _PERMANENT):
            retry_in = None
        elif isinstance(error, PublishRefusedError):
            retry_in = self._policy.retry_in(row.attempts + 1)
        else:  # the broker is away, or has not answered: no fault of the row
            if not isinstance(error, OutboxFullError):  # that one says to wait for those in flight
                outcome.cause = error
            return False
        return self._refused(row, error, retry_in, outcome)

    @staticmethod
    def _refused(row: Row, error: Exception, retry_in: float | None, outcome: Delivered) -> bool:
        outcome.open -= 1
        # a database refuses some characters, and one row must not keep the others from being settled
        outcome.refused.append(Refusal(row, f"{type(error).__name__}: {printable(str(error))}", retry_in))
        return retry_in is None  # a dead row is out of the sequence

    def _message(self, row: Row) -> Message:
        context = self._contexts.get((row.channel, row.properties))
        if context is None:
            context = self._confirmed(restored_context(row.channel, row.properties))
            self._contexts[row.channel, row.properties] = context
        if self._has_ids:
            context = context.replace(extensions={**context.extensions, Features.EXTENSION_MESSAGE_ID: row.message_id})
        return Message(row.payload, context)

    def _confirmed(self, context: MessageContext) -> MessageContext:
        """Return ``context`` with the extensions that ask the broker for a confirmation within the deadline."""
        features = self._instance.features
        extensions: dict[str, Any] = dict(context.extensions)
        if Features.EXTENSION_QOS in extensions and str(extensions[Features.EXTENSION_QOS]) == "0":
            del extensions[Features.EXTENSION_QOS]
        if Features.EXTENSION_GUARANTEED_DELIVERY in features:
            extensions[Features.EXTENSION_GUARANTEED_DELIVERY] = True
        elif Features.EXTENSION_QOS in features:
            extensions.setdefault(Features.EXTENSION_QOS, "1")
        extensions[Features.EXTENSION_TIMEOUT] = self._policy.confirm_timeout
        return context.replace(extensions=extensions)

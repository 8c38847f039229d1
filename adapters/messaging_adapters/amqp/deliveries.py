"""Deliveries, assembled from their method, header and body frames (4.2.6), and the position of those of a stream."""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from messaging.adapter import Sink
from messaging.errors import MessagingError
from messaging.execution import clock
from messaging.model import Features, Incoming, SubscriptionSpec, envelope
from messaging.model.envelope import Unwrapped
from messaging_adapters.amqp import frames, names, properties
from messaging_adapters.amqp.declarations import QueueSource
from messaging_adapters.amqp.extensions import ENVELOPE, seconds_of
from messaging_adapters.amqp.properties import AmqpProperties

#: beginning of a payload with an envelope
_ENVELOPE: Final = envelope.START
#: header that RabbitMQ's MQTT plugin adds to the messages it publishes
_MQTT_QOS: Final = "x-mqtt-publish-qos"


class DeliveryLane(abc.ABC):
    """A ``protocol.FrameLane`` that assembles the deliveries of one channel.

    Attributes:
        known: the properties of the delivery.
        raw: the same, flags and values as on the wire, if ``keeps_raw`` is set.
    """

    def __init__(self, *, keeps_raw: bool = False) -> None:
        self.known = properties.AmqpProperties()
        self.raw = b""
        self._keeps_raw = keeps_raw
        #: delivery tag, "redelivered" and route of the delivery whose content is arriving
        self._delivery: tuple[int, bool, bytes] | None = None
        #: bytes of the payload that are missing
        self._missing = 0
        #: the contents of the body frames, if the payload comes in several (4.2.6.2)
        self._pieces: list[bytes] | None = None

    @abc.abstractmethod
    def delivered(self, tag: int, route: bytes, payload: bytes) -> None:
        """Handle a complete delivery; ``route`` is as ``frames.read_delivery`` returns it."""

    def take_method(self, method: bytes) -> bool:
        """Take a method other than ``basic.deliver``; see ``FrameLane.take``. By default none is taken."""
        del method
        return False

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take the frames of deliveries; see ``FrameLane.take``."""
        if kind == frames.METHOD:
            method = data[at : at + 4]
            if method == frames.BASIC_DELIVER:
                self._delivery, self._missing = frames.read_delivery(data, at, end), 0
                return True
            if method == frames.BASIC_GET_OK:
                self._delivery, self._missing = frames.read_got(data, at, end), 0
                return True
            return self.take_method(method)
        if self._delivery is None:
            return False
        if kind == frames.HEADER:
            self._missing, self._pieces = frames.read_body_size(data, at), None
            self.known = properties.read(data, at + 12, end, self._delivery[1])
            if self._keeps_raw:
                self.raw = data[at + 12 : end]
            if self._missing:
                return True
            payload = b""
        elif self._missing:
            payload = data[at:end]
            if end - at != self._missing or self._pieces is not None:
                self._missing -= end - at
                if not payload or self._missing < 0:
                    raise ValueError("an empty body frame" if not payload else "more content than announced")
                if self._pieces is None:
                    self._pieces = []
                self._pieces.append(payload)
                if self._missing:
                    return True
                payload, self._pieces = b"".join(self._pieces), None
            self._missing = 0
        else:
            return False
        tag, _, route = self._delivery
        self._delivery = None
        self.delivered(tag, route, payload)
        return True

    def message(
        self, payload: bytes, arrival: tuple[str, str | None], token: Any, delivery_count: int | None
    ) -> Incoming | None:
        """Return the delivery as a message on ``arrival``, channel and extension; ``None`` if its envelope has expired.

        A message has an envelope around it if RabbitMQ's MQTT plugin published it.
        """
        content: AmqpProperties | Unwrapped = self.known
        if payload.startswith(_ENVELOPE) and _MQTT_QOS in content.extensions.get(Features.EXTENSION_HEADERS, ()):
            inner = envelope.unwrap(payload, MappingProxyType({**content.extensions, ENVELOPE: True}))
            if inner is None:
                return None
            content, payload = inner, inner.payload
        return Incoming(
            payload,
            arrival[0],
            arrival[1],
            content.content_type,
            content.content_encoding,
            content.correlation_id,
            content.reply_to_channel,
            content.extensions,
            token,
            delivery_count,
        )


class DirectReplies(DeliveryLane):
    """Direct reply-to on one channel, a feature of RabbitMQ: replies without a queue; the handle of their subscription.

    A channel that consumes from ``amq.rabbitmq.reply-to`` and publishes requests with that name as ``reply-to``
    receives the replies: the broker replaces the name by an address of the channel. The replies arrive on the
    publisher's channel, between its confirms, and without acknowledgement.
    """

    def __init__(self, sink: Sink | None) -> None:
        super().__init__()
        #: one item, the receiver of the replies, ``None`` once it has unsubscribed; shared with :meth:`moved`
        self._receiver: list[Sink | None] = [sink]
        self._batch: list[Incoming] = []

    @property
    def sink(self) -> Sink | None:
        """The receiver of the replies; ``None`` once it has unsubscribed."""
        return self._receiver[0]

    @sink.setter
    def sink(self, sink: Sink | None) -> None:
        self._receiver[0] = sink

    def moved(self) -> DirectReplies:
        """Return the replies on another channel for the same receiver, which this handle goes on to unsubscribe."""
        moved = DirectReplies(None)
        moved._receiver = self._receiver
        return moved

    def delivered(self, tag: int, route: bytes, payload: bytes) -> None:
        """Add a reply to the batch, which is delivered at the end of the loop's turn."""
        del tag, route
        known = self.known
        if not self._batch:
            asyncio.get_running_loop().call_soon(self.flush)
        self._batch.append(
            Incoming(
                payload,
                names.DIRECT_CHANNEL,
                None,
                known.content_type,
                known.content_encoding,
                known.correlation_id,
                known.reply_to_channel,
                known.extensions,
            )
        )

    def flush(self) -> None:
        """Deliver the replies that have arrived."""
        batch, self._batch = self._batch, []
        if batch and self.sink is not None:
            self.sink.deliver(batch)

    async def close(self) -> None:
        """Unsubscribe. The channel is the publisher's and stays open."""
        self.sink = None

    def fail(self, error: MessagingError) -> None:
        """Report that the channel was closed, and with it its address."""
        self.flush()
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.fail(error)


class QueueSubscription(NamedTuple):
    """A subscription as the consumer of its queue knows it."""

    spec: SubscriptionSpec
    sink: Sink
    #: ``spec``, compiled
    source: QueueSource
    #: of a subscription that reads a stream
    position: StreamPosition | None = None


class StreamPosition:
    """The position at which reading a stream begins, and continues after a loss.

    It outlives the connections of its subscription: it follows the last message that was settled without a gap.

    Args:
        start: the first position; a checked ``streamOffset``.
    """

    def __init__(self, start: str | int | float) -> None:
        self._start = start
        #: the first offset that is not known to be settled; ``None`` before the first delivery
        self.next: int | None = None
        self._since: float | None = None
        #: delivery tag and offset of the deliveries on this connection, from the first unsettled one
        self._delivered: deque[tuple[int, int]] = deque()

    def attach(self) -> str | int | datetime:
        """Start reading on a new connection, and return the value of the argument ``x-stream-offset``."""
        self._delivered.clear()
        if self.next is not None:
            return self.next
        start = self._start
        if self._since is None:
            self._since = clock.wall()
        elif isinstance(start, str) and start != "first":
            # Nothing was delivered yet, and messages published since must not be missed: the end of the stream, or
            # one hour before now, has moved since the first connection.
            start = self._since if start in ("next", "last") else self._since - seconds_of(start)
        return datetime.fromtimestamp(max(0.0, start), UTC) if isinstance(start, float) else start

    def arrived(self, tag: int, offset: int) -> None:
        """Record a delivery. Tags and offsets rise."""
        if self.next is None:
            self.next = offset
        self._delivered.append((tag, offset))

    def settled(self, floor: int) -> None:
        """Record that all deliveries up to the tag ``floor`` are settled."""
        delivered = self._delivered
        while delivered and delivered[0][0] <= floor:
            self.next = delivered.popleft()[1] + 1

"""The form of a publish: the parts that the messages of one publish plan share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from messaging.model import envelope
from messaging_adapters.amqp import frames, names
from messaging_adapters.amqp.declarations import destination
from messaging_adapters.amqp.extensions import ENVELOPE
from messaging_adapters.amqp.properties import PropertiesTemplate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from messaging.model import Outgoing, PublishPlan


class PublishForm:
    """The parts that the messages of one context share.

    Args:
        plan: of the messages.
        exchange: the exchange of channels without extension.

    Raises:
        ArgumentError: a value is longer than AMQP can carry, or extensions contradict each other.
    """

    __slots__ = (
        "_channel", "_method", "_template", "confirms", "destination", "exchange", "goal", "has_id",
        "is_enveloped", "mandatory", "options", "shared_id",
    )  # fmt: skip

    def __init__(self, plan: PublishPlan, exchange: str) -> None:
        self.options = options = plan.options
        self.is_enveloped = options.custom.get(ENVELOPE, False)
        # requests with direct reply-to have to be published on the channel that receives the replies
        self.confirms = options.qos != "0" or plan.reply_to_channel == names.DIRECT_CHANNEL
        self.destination = destination(plan, exchange)
        #: messages with the same goal keep their order
        self.goal = self.destination.exchange.name, self.destination.routing_key
        self.mandatory = self.destination.mandatory
        #: whether the message id travels
        self.has_id = self.confirms or self.options.message_id is not None
        #: the application's own message id, which other messages may share, if the message may be returned under it
        self.shared_id = self.options.message_id if self.mandatory and self.confirms else None
        #: the exchange to check for or declare first; "" for none
        self.exchange = self.destination.exchange.name if self.destination.exchange.declare != "none" else ""
        self._template = PropertiesTemplate(plan)
        #: the method frame, and the number of the channel that it is for
        self._method = b""
        self._channel = 0

    def encode(self, message: Outgoing, channel: int, now: int, frame_max: int) -> Iterable[bytes]:
        """Return the frames of a message, in pieces to be joined.

        Args:
            message: a message of the plan.
            channel: the channel's number.
            now: seconds since the epoch.
            frame_max: the largest frame that the broker takes, bytes.

        Raises:
            ValueError: an id or the properties are too long.
        """
        if self._channel != channel:
            exchange, key = self.goal
            self._method = frames.publish(channel, exchange, key, mandatory=self.mandatory)
            self._channel = channel
        properties = self._template.fill(message.correlation_id, message.message_id if self.has_id else None, now)
        if len(properties) > frame_max - frames.CONTENT_OVERHEAD:
            raise ValueError(f"{len(properties)} bytes of properties; the broker takes frames of {frame_max} bytes")
        payload = envelope.wrap(message, message.payload) if self.is_enveloped else message.payload
        return (self._method, *frames.content(channel, properties, payload, frame_max))

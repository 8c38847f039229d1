"""The parts of a publish that the messages of one context share, compiled once per context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from adapters.amqp import frames, names
from adapters.amqp.declarations import destination
from adapters.amqp.extensions import ENVELOPE
from adapters.amqp.properties import Template
from messaging.errors import ArgumentError
from messaging.model import envelope

if TYPE_CHECKING:
    from collections.abc import Iterable

    from messaging.model import Outgoing

#: contexts whose plans are kept
_MAX_PLANS: Final = 256


class PublishPlan:
    """The parts that the messages of one context share.

    Args:
        message: the first of the messages.
        exchange: the exchange of channels without extension.

    Raises:
        ArgumentError: a value is longer than AMQP can carry, or extensions contradict each other.
    """

    __slots__ = (
        "_channel", "_method", "_template", "confirms", "context", "destination", "exchange", "goal", "has_id",
        "is_enveloped", "mandatory", "options", "shared_id",
    )  # fmt: skip

    def __init__(self, message: Outgoing, exchange: str) -> None:
        #: referenced, so that its id stays unique
        self.context = context = message.context
        self.options = message.options
        self.is_enveloped = message.options.custom.get(ENVELOPE, False)
        # requests with direct reply-to have to be published on the channel that receives the replies
        self.confirms = message.options.qos != "0" or context.reply_to_channel == names.DIRECT_CHANNEL
        self.destination = destination(context, message.options, exchange)
        #: messages with the same goal keep their order
        self.goal = self.destination.exchange.name, self.destination.routing_key
        self.mandatory = self.destination.mandatory
        #: whether the message id travels
        self.has_id = self.confirms or self.options.message_id is not None
        #: the application's own message id, which other messages may share, if the message may be returned under it
        self.shared_id = self.options.message_id if self.mandatory and self.confirms else None
        #: the exchange to check for or declare first; "" for none
        self.exchange = self.destination.exchange.name if self.destination.exchange.declare != "none" else ""
        self._template = Template(context, message.options)
        #: the method frame, and the number of the channel that it is for
        self._method = b""
        self._channel = 0

    def encode(self, message: Outgoing, channel: int, now: int, frame_max: int) -> Iterable[bytes]:
        """Return the frames of a message, in pieces to be joined.

        Args:
            message: a message of the context.
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


class PublishPlans:
    """The plans of recent contexts.

    Args:
        exchange: the exchange of channels without extension.
    """

    def __init__(self, exchange: str) -> None:
        self._exchange = exchange
        self._plans: dict[int, PublishPlan] = {}

    def of(self, message: Outgoing) -> PublishPlan | None:
        """Return the plan of ``message``, or ``None`` if it cannot be encoded: it is failed then."""
        context = message.context
        plan = self._plans.get(id(context))
        if plan is None or plan.context is not context or plan.options is not message.options:
            try:
                plan = PublishPlan(message, self._exchange)
            except ArgumentError as error:
                message.fail(error)
                return None
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[id(context)] = plan
        return plan

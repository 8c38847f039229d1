"""The properties of an AMQP message: contexts written to the wire, with the frames of a publish, and read back.

==================  ==========================================================================================
property            context
==================  ==========================================================================================
content-type        ``content_type``
content-encoding    ``content_encoding``
correlation-id      ``correlation_id``
reply-to            ``reply_to_channel``, translated to the routing key it has on the instance's exchange, unless it is
                    the address of direct reply-to
headers             extension ``headers``, with the types of their values (:mod:`messaging.model.headers`); see
                    :mod:`.compression` for the header ``compression``
delivery-mode       2 with ``guaranteedDelivery``, else 1; not read
priority            extension ``priority``
expiration          extension ``timeToLive``; whole milliseconds, at least one
message-id          extension ``messageId``, else a generated id, unless it is published with qos 0; read as
                    extension ``messageId``
timestamp           time of the publish, whole seconds; read as extension ``timestamp``
type                extension ``type``
user-id             read as extension ``userId``: the broker's user that published it
app-id              extension ``appId``
==================  ==========================================================================================

Reading never fails: other programs may write any value, and an unreadable message would be redelivered for ever.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from messaging.errors import ArgumentError, InvalidHeaderError
from messaging.model import NO_EXTENSIONS, Features, Outgoing, PublishPlan, envelope, frozen
from messaging_adapters.amqp import compression, frames, names
from messaging_adapters.amqp.counting import DELAYED, earlier_deliveries, restore
from messaging_adapters.amqp.declarations import destination
from messaging_adapters.amqp.extensions import APP_ID, ENVELOPE, STREAM_OFFSET, TYPE, USER_ID
from messaging_adapters.amqp.frames import short_string
from messaging_adapters.amqp.tables import read_short, read_table, write_table

logger = logging.getLogger(__name__)

#: bytes of a short string
MAX_SHORT: Final = 255
#: longest name of a header field, bytes (4.2.5.5)
MAX_HEADER_NAME: Final = 128
#: RabbitMQ expects arrays of further routing keys here, and closes the channel over text
ROUTING_HEADERS: Final = frozenset({"CC", "BCC"})
#: longest time to live, seconds: an unsigned 32-bit number of milliseconds
MAX_TIME_TO_LIVE: Final = 0xFFFF_FFFF / 1000
#: position of a message in a stream
OFFSET: Final = "x-stream-offset"
#: routing key for the reply to a client of MQTT 5; set by the MQTT plugin of RabbitMQ 4, and of RabbitMQ 3.13
REPLY_TOPIC: Final = "x-reply-to-topic"
_REPLY_TOPIC_3_13: Final = "x-opt-reply-to-topic"

_CONTENT_TYPE: Final = 1 << 15
_CONTENT_ENCODING: Final = 1 << 14
_HEADERS: Final = 1 << 13
_DELIVERY_MODE: Final = 1 << 12
_PRIORITY: Final = 1 << 11
_CORRELATION_ID: Final = 1 << 10
_REPLY_TO: Final = 1 << 9
_EXPIRATION: Final = 1 << 8
_MESSAGE_ID: Final = 1 << 7
_TIMESTAMP: Final = 1 << 6
_TYPE: Final = 1 << 5
_USER_ID: Final = 1 << 4
_APP_ID: Final = 1 << 3
#: properties after the timestamp, as extensions
_LAST: Final = ((_TYPE, TYPE), (_USER_ID, USER_ID), (_APP_ID, APP_ID))
_ANY_LAST: Final = _TYPE | _USER_ID | _APP_ID

_TRANSIENT: Final = b"\x01"
_PERSISTENT: Final = b"\x02"

_FLAGS: Final = struct.Struct(">H")
_U64: Final = struct.Struct(">Q")


# --- writing


class PropertiesTemplate:
    """The properties that all messages of one context share, encoded once.

    Raises:
        ArgumentError: a value is longer than AMQP can carry.
    """

    __slots__ = ("_end", "_flags", "_head", "_tail")

    def __init__(self, plan: PublishPlan) -> None:
        options = plan.options
        flags = _DELIVERY_MODE | _TIMESTAMP
        parts: list[bytes] = []
        # in the order of the flags, which is the order on the wire
        if plan.content_type is not None:
            flags |= _CONTENT_TYPE
            written = compression.content_type(plan.content_type, plan.content_encoding)
            parts.append(_short(written, "content type"))
        encoding, headers = compression.written(plan.content_encoding, options.headers)
        if encoding is not None:
            flags |= _CONTENT_ENCODING
            parts.append(_short(encoding, "content encoding"))
        if headers:
            flags |= _HEADERS
            parts.append(_table(headers))
        parts.append(_PERSISTENT if options.guaranteed_delivery else _TRANSIENT)
        if options.priority is not None:
            flags |= _PRIORITY
            parts.append(bytes([options.priority]))
        self._head = b"".join(parts)
        parts.clear()
        if plan.correlation_id is not None:
            _short(plan.correlation_id, "correlation id")
        if plan.reply_to_channel is not None:
            flags |= _REPLY_TO
            parts.append(_short(names.reply_key(plan.reply_to_channel), "reply channel"))
        if options.time_to_live is not None:
            flags |= _EXPIRATION
            parts.append(_short(str(max(1, round(options.time_to_live * 1000))), "timeToLive"))
        self._tail = b"".join(parts)
        parts.clear()
        for flag, key in ((_TYPE, TYPE), (_APP_ID, APP_ID)):
            if key in options.custom:
                flags |= flag
                parts.append(_short(options.custom[key], key))
        self._end = b"".join(parts)
        self._flags = flags

    def fill(self, correlation_id: str | None, message_id: str | None, timestamp: int) -> bytes:
        """Return flags and values for one message; ``timestamp`` is in seconds since the epoch.

        Raises:
            ValueError: one of the ids has more than 255 bytes.
        """
        flags, correlation, identity = self._flags, b"", b""
        if correlation_id is not None:
            flags |= _CORRELATION_ID
            correlation = short_string(correlation_id)
        if message_id is not None:
            flags |= _MESSAGE_ID
            identity = short_string(message_id)
        return b"%b%b%b%b%b%b%b" % (
            _FLAGS.pack(flags), self._head, correlation, self._tail, identity, _U64.pack(timestamp), self._end,
        )  # fmt: skip


def _short(text: str, what: str) -> bytes:
    try:
        return short_string(text)
    except ValueError as error:  # UnicodeEncodeError is one, too
        raise ArgumentError(f"{what}: {error}") from None


def _table(fields: Mapping[str, Any]) -> bytes:
    try:
        return write_table(fields)
    except ValueError as error:
        raise InvalidHeaderError(Features.EXTENSION_HEADERS, f"a name in a mapping is too long: {error}") from None


class PublishForm(PropertiesTemplate):
    """The parts that the messages of one context share: destination, method frame and properties.

    Args:
        plan: of the messages.
        exchange: the exchange of channels without extension.

    Raises:
        ArgumentError: a value is longer than AMQP can carry, or extensions contradict each other.
    """

    __slots__ = (
        "_channel", "_method", "confirms", "destination", "exchange", "goal", "has_id", "is_enveloped", "mandatory",
        "shared_id",
    )  # fmt: skip

    def __init__(self, plan: PublishPlan, exchange: str) -> None:
        super().__init__(plan)
        options = plan.options
        self.is_enveloped = options.custom.get(ENVELOPE, False)
        # requests with direct reply-to have to be published on the channel that receives the replies
        self.confirms = options.qos != "0" or plan.reply_to_channel == names.DIRECT_CHANNEL
        self.destination = destination(plan, exchange)
        #: messages with the same goal keep their order
        self.goal = self.destination.exchange.name, self.destination.routing_key
        self.mandatory = self.destination.mandatory
        #: whether the message id travels
        self.has_id = self.confirms or options.message_id is not None
        #: the application's own message id, which other messages may share, if the message may be returned under it
        self.shared_id = options.message_id if self.mandatory and self.confirms else None
        #: the exchange to check for or declare first; "" for none
        self.exchange = self.destination.exchange.name if self.destination.exchange.declare != "none" else ""
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
        properties = self.fill(message.correlation_id, message.message_id if self.has_id else None, now)
        if len(properties) > frame_max - frames.CONTENT_OVERHEAD:
            raise ValueError(f"{len(properties)} bytes of properties; the broker takes frames of {frame_max} bytes")
        payload = envelope.wrap(message, message.payload) if self.is_enveloped else message.payload
        return (self._method, *frames.content(channel, properties, payload, frame_max))


# --- reading


class AmqpProperties(NamedTuple):
    """The properties of a received message."""

    content_type: str | None = None
    content_encoding: str | None = None
    correlation_id: str | None = None
    reply_to_channel: str | None = None
    #: headers, priority, timeToLive, messageId, timestamp, redelivered, as far as they were sent
    extensions: Mapping[str, Any] = NO_EXTENSIONS
    #: number of deliveries including this one, if the broker counts them
    delivery_count: int | None = None
    #: exchange and routing key of the publish, if the message was delayed since
    origin: tuple[str, str] | None = None


_NONE: Final = AmqpProperties()


def read(data: bytes, at: int, end: int, redelivered: bool) -> AmqpProperties:
    """Read flags and values from ``data[at:end]``. Malformed properties are logged and ignored."""
    try:
        return _read(data, at, end, redelivered)
    except (IndexError, ValueError, KeyError, struct.error) as error:
        logger.warning("amqp: a message has malformed properties: %r; they are ignored", error)
        return _NONE


def _read(data: bytes, at: int, end: int, redelivered: bool) -> AmqpProperties:
    (flags,) = _FLAGS.unpack_from(data, at)
    at += 2
    more = flags
    while more & 1:  # no property has a flag there
        (more,) = _FLAGS.unpack_from(data, at)
        at += 2
    content_type = content_encoding = correlation_id = reply_to_channel = None
    delivery_count = origin = None
    extensions: dict[str, Any] = {}
    if redelivered:
        extensions["redelivered"] = True
    if flags & _CONTENT_TYPE:
        content_type, at = read_short(data, at)
    if flags & _CONTENT_ENCODING:
        content_encoding, at = read_short(data, at)
    if flags & _HEADERS:
        fields, at = read_table(data, at, end, 0)
        if (count := earlier_deliveries(fields)) is not None:
            delivery_count = count + 1
        if DELAYED in fields and (delayed := restore(fields)) is not None:
            earlier, origin = delayed
            delivery_count = earlier + (delivery_count or 1)
        if compression.HEADER in fields:
            content_encoding = compression.read(content_encoding, fields)
        reply_topic = fields.get(REPLY_TOPIC) or fields.get(_REPLY_TOPIC_3_13)
        if type(reply_topic) is str:  # another value is a header of the sender
            reply_to_channel = names.channel_name(reply_topic)
            fields.pop(REPLY_TOPIC, None)
            fields.pop(_REPLY_TOPIC_3_13, None)
        offset = fields.get(OFFSET)
        if type(offset) is int:
            extensions[STREAM_OFFSET] = offset
            del fields[OFFSET]
        if fields or (type(offset) is not int and reply_topic is None):
            for name, value in fields.items():
                if type(value) is list or type(value) is dict:
                    fields[name] = frozen(value)
            extensions[Features.EXTENSION_HEADERS] = MappingProxyType(fields)
    if flags & _DELIVERY_MODE:
        at += 1
    if flags & _PRIORITY:
        extensions[Features.EXTENSION_PRIORITY] = data[at]
        at += 1
    if flags & _CORRELATION_ID:
        correlation_id, at = read_short(data, at)
    if flags & _REPLY_TO:
        reply_to, at = read_short(data, at)
        reply_to_channel = names.reply_channel(reply_to)
    if flags & _EXPIRATION:
        expiration, at = read_short(data, at)
        if expiration.isascii() and expiration.isdigit() and len(expiration) < 16:
            extensions[Features.EXTENSION_TIME_TO_LIVE] = int(expiration) / 1000
    if flags & _MESSAGE_ID:
        extensions["messageId"], at = read_short(data, at)
    if flags & _TIMESTAMP:
        (timestamp,) = _U64.unpack_from(data, at)
        at += 8
        # seconds by the specification; some programs write milliseconds, which would be after the year 2106
        extensions["timestamp"] = float(timestamp) if timestamp <= 0xFFFF_FFFF else timestamp / 1000
    if flags & _ANY_LAST:
        for flag, key in _LAST:
            if flags & flag:
                value, at = read_short(data, at)
                if len(value.encode()) <= MAX_SHORT:  # with escapes of invalid UTF-8 it may be too long to publish
                    extensions[key] = value
    if at > end:
        raise ValueError("a value ends outside the frame")
    return AmqpProperties(
        content_type,
        content_encoding,
        correlation_id,
        reply_to_channel,
        MappingProxyType(extensions) if extensions else NO_EXTENSIONS,
        delivery_count,
        origin,
    )

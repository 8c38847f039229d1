"""Translates message contexts to MQTT and back.

=====================  ============================================  =======================
context                MQTT 5                                        envelope (MQTT 3.1.1)
=====================  ============================================  =======================
content type           Content Type                                  ``contentType``
content encoding       user property ``content-encoding``            ``contentEncoding``
correlation id         Correlation Data, UTF-8                       ``correlationId``
reply-to channel       Response Topic                                ``replyTo``
``headers``            other user properties                         ``headers``, ``repeated``
``timeToLive``         Message Expiry Interval, whole seconds up     ``expires``
message id             user property ``message-id``, with QoS > 0    ``messageId``
``messageId``          the same, with any QoS                        the same
=====================  ============================================  =======================

A header whose value is a sequence of texts travels as several user properties of one name, and several of one name are
received as a tuple. A sequence of one is received as its text, an empty one not at all.

The message id lets receivers recognise a message that was sent again, which happens with QoS 1 and 2. In an envelope
it travels along, but alone it makes no envelope. The application's own id, extension ``messageId``, takes its place and
does make one.

Correlation data of other clients may be any bytes. Data that is not UTF-8, or holds NUL, becomes a correlation id of
``hex:`` and its hexadecimal digits. A correlation id of that form that stands for such bytes is sent as these bytes: a
reply reaches its requester either way.

**Topic aliases** (MQTT 5, 3.3.2.3.4). If the broker accepts aliases, a topic that is published to a second time gets
one, as long as the connection has any left: from then on it travels as a number.

``expires`` is the sender's wall clock. Brokers do not know it: the receiving adapter drops expired messages, as exactly
as the two clocks agree.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from messaging.errors import InvalidChannelError, InvalidHeaderError, PayloadTooLargeError
from messaging.model import Features, Outgoing, PublishPlan, envelope, gathered
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.packets import PacketProperties, Publish

CONTENT_ENCODING: Final = "content-encoding"
MESSAGE_ID: Final = "message-id"
#: bool, subscribing: a received message of QoS 1 or 2 tells, under the same name, the packet identifier it came with
PACKET_ID: Final = "packetId"

_RESERVED: Final = ("$SYS", "$share")
_HEX: Final = "hex:"
_HEX_FORM: Final = re.compile("hex:((?:[0-9a-f]{2})+)")
_MESSAGE_ID_START: Final = b"\x26" + packets.text(MESSAGE_ID)
_MAX_EXPIRY: Final = 2**32 - 1
_COMPILED: Final = 1024
_NO_TOPIC: Final = b"\0\0"
#: bytes of the longest topic, with its length, that an alias would not make shorter
_NOT_WORTH: Final = 5

#: (payload, content type, content encoding, correlation id, reply-to channel, extensions)
Decoded = tuple[bytes, str | None, str | None, str | None, str | None, MappingProxyType[str, Any]]


def check_channel(name: str) -> None:
    """Refuse channels that only the broker may publish to.

    mosquitto checks these prefixes, with a slash or not: it ends the connection, with MQTT 3.1.1 after PUBACK.

    Raises:
        InvalidChannelError: the channel is one of them.
    """
    if name.startswith(_RESERVED):
        raise InvalidChannelError(f"channel {name[:80]!a}: MQTT brokers keep names that start with $SYS or $share")


def check_headers(headers: Mapping[str, Any]) -> None:
    """Refuse headers that receivers would misread.

    Raises:
        InvalidHeaderError: a header has the name of a user property that this module uses.
    """
    for name in (CONTENT_ENCODING, MESSAGE_ID):
        if name in headers:
            raise InvalidHeaderError(
                Features.EXTENSION_HEADERS, f"{name!r} is the name of a user property with a meaning of its own here"
            )


def correlation_bytes(correlation_id: str) -> bytes:
    """Return a correlation id as Correlation Data."""
    data = correlation_id.encode()
    form = _HEX_FORM.fullmatch(correlation_id)
    if form is not None:
        raw = bytes.fromhex(form[1])
        if correlation_text(raw) == correlation_id:
            return raw
    return data


def correlation_text(data: bytes) -> str:
    """Return Correlation Data as a correlation id."""
    if b"\x00" in data:  # a binary counter, for instance; correlation ids never hold NUL
        return _HEX + data.hex()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _HEX + data.hex()


class _CompiledPublish:
    """The common part of all messages of one publish plan, in its slot."""

    __slots__ = (
        "__weakref__", "aliases", "bare_properties", "bare_topic", "has_id", "head", "properties", "rest", "topic",
    )  # fmt: skip

    def __init__(self, plan: PublishPlan) -> None:
        self.head = packets.PUBLISH | (1 if plan.options.retain else 0)
        #: the message id is among the properties already
        self.has_id = plan.options.message_id is not None
        self.bare_topic = packets.text(plan.channel)
        self.bare_properties = packets.properties_bytes(_properties(plan, None))
        #: the aliases that the parts below were made for
        self.aliases: _Aliases | None = None
        self.travel_as(self.bare_topic, self.bare_properties)

    def travel_as(self, topic: bytes, properties: bytes) -> None:
        """Send ``topic`` and ``properties`` from now on."""
        self.topic = topic
        self.properties = properties
        #: the bytes between fixed header and payload with QoS 0
        self.rest = topic + packets.varint(len(properties)) + properties


class _Aliases:
    """The topic aliases of one connection."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._numbers: dict[bytes, int] = {}
        #: topics that were published to once, and have no alias yet
        self._seen: set[bytes] = set()

    def apply(self, compiled: _CompiledPublish) -> bool:
        """Choose topic or alias for the next message of a context. Return whether the choice is final here."""
        topic, properties = compiled.bare_topic, compiled.bare_properties
        number = self._numbers.get(topic)
        if number is not None:
            compiled.travel_as(_NO_TOPIC, properties + packets.topic_alias(number))
            return True
        if len(topic) <= _NOT_WORTH or len(self._numbers) == self.maximum:
            compiled.travel_as(topic, properties)
            return True
        if topic in self._seen:
            self._seen.remove(topic)
            number = self._numbers[topic] = len(self._numbers) + 1
            compiled.travel_as(topic, properties + packets.topic_alias(number))  # with both: this one introduces it
            return False
        if len(self._seen) >= _COMPILED:
            self._seen.clear()
        self._seen.add(topic)
        compiled.travel_as(topic, properties)
        return False


class PublishCodec:
    """Encodes messages as PUBLISH packets, and decodes PUBLISH packets for the core: MQTT 3.1.1.

    Contexts travel in an envelope; without it, only the fields of the fixed header do.
    """

    def __init__(self, *, enveloped: bool = False) -> None:
        self._enveloped = enveloped

    def connected(self, topic_alias_maximum: int) -> None:
        """Start on a new connection, on which the broker accepts so many aliases."""

    def unsent(self) -> None:
        """Note that the last frame was not sent."""

    def frame(self, outgoing: Outgoing, payload: bytes, qos: int, packet_id: int) -> bytes:
        """Return the PUBLISH packet, to be sent on this connection in the order of the calls.

        Args:
            outgoing: the message.
            payload: its payload, which the message itself drops once it is settled.
            qos: 0 to 2.
            packet_id: counts with QoS > 0 only.
        """
        rest = _topic(outgoing.plan.channel)
        if qos:
            rest += packet_id.to_bytes(2, "big")
        head = packets.PUBLISH | qos << 1 | (1 if outgoing.plan.options.retain else 0)
        return _publish(head, rest, envelope.wrap(outgoing, payload) if self._enveloped else payload)

    def will(self, outgoing: Outgoing) -> tuple[bytes, PacketProperties]:
        """Return payload and properties of a will. An envelope that expires would do so from now on: it does not."""
        payload = outgoing.payload
        return envelope.wrap(outgoing, payload, expires=False) if self._enveloped else payload, packets.NO_PROPERTIES

    def decode(self, publish: Publish) -> Decoded | None:
        """Return the content of a message; ``None`` if it has expired."""
        if not self._enveloped:
            return publish.payload, None, None, None, None, _received(publish)
        return envelope.unwrap(publish.payload, _received(publish))


class Mqtt5Codec(PublishCodec):
    """Contexts as properties of MQTT 5."""

    def __init__(self) -> None:
        super().__init__()
        self._aliases = _Aliases(0)

    def connected(self, topic_alias_maximum: int) -> None:
        """See :class:`PublishCodec`."""
        self._aliases = _Aliases(topic_alias_maximum)

    def unsent(self) -> None:
        """See :class:`PublishCodec`. The frame may have introduced an alias: all are introduced again, as allowed."""
        self._aliases = _Aliases(self._aliases.maximum)

    def frame(self, outgoing: Outgoing, payload: bytes, qos: int, packet_id: int) -> bytes:
        """See :class:`PublishCodec`."""
        plan = outgoing.plan
        compiled: _CompiledPublish | None = plan.slot
        if compiled is None:
            compiled = plan.slot = _CompiledPublish(plan)
        aliases = self._aliases
        if compiled.aliases is not aliases and aliases.apply(compiled):
            compiled.aliases = aliases
        correlation_id = outgoing.correlation_id
        if not (qos or correlation_id is not None):
            return _publish(compiled.head, compiled.rest, payload)
        properties = compiled.properties
        if correlation_id is not None:
            correlation = correlation_bytes(correlation_id)
            properties = b"%b\x09%b%b" % (properties, len(correlation).to_bytes(2, "big"), correlation)
        if qos:
            if not compiled.has_id:
                message_id = outgoing.message_id.encode()
                properties = b"%b%b%b%b" % (
                    properties, _MESSAGE_ID_START, len(message_id).to_bytes(2, "big"), message_id,
                )  # fmt: skip
            rest = b"%b%b%b%b" % (
                compiled.topic, packet_id.to_bytes(2, "big"), packets.varint(len(properties)), properties,
            )  # fmt: skip
        else:
            rest = b"%b%b%b" % (compiled.topic, packets.varint(len(properties)), properties)
        return _publish(compiled.head | qos << 1, rest, payload)

    def will(self, outgoing: Outgoing) -> tuple[bytes, PacketProperties]:
        """See :class:`PublishCodec`."""
        properties = _properties(outgoing.plan, outgoing.correlation_id)
        if outgoing.plan.options.qos != "0" and outgoing.plan.options.message_id is None:
            properties.user.append((MESSAGE_ID, outgoing.message_id))
        return outgoing.payload, properties

    def decode(self, publish: Publish) -> Decoded | None:
        """See :class:`PublishCodec`."""
        told = _received(publish)
        properties = publish.properties
        correlation_id = content_encoding = None
        if properties.correlation is not None:
            correlation_id = correlation_text(properties.correlation)
        if properties.user or properties.expiry is not None:
            extensions = told.copy()
            if properties.expiry is not None:
                extensions[Features.EXTENSION_TIME_TO_LIVE] = float(properties.expiry)
            if properties.user:
                headers: dict[str, Any] = dict(properties.user)
                content_encoding = headers.pop(CONTENT_ENCODING, None)
                if MESSAGE_ID in headers:
                    extensions["messageId"] = headers.pop(MESSAGE_ID)
                if headers:
                    ours = (content_encoding is not None) + ("messageId" in extensions)
                    if len(headers) + ours < len(properties.user):  # several of one name
                        headers = gathered(each for each in properties.user if each[0] in headers)
                    extensions[Features.EXTENSION_HEADERS] = MappingProxyType(headers)
            told = MappingProxyType(extensions)
        return (
            publish.payload,
            properties.content_type,
            content_encoding,
            correlation_id,
            properties.response_topic,
            told,
        )


_topic = functools.lru_cache(maxsize=_COMPILED)(packets.text)


def _publish(head: int, rest: bytes, payload: bytes) -> bytes:
    remaining = len(rest) + len(payload)
    if remaining < 128:  # most messages
        return b"%c%c%b%b" % (head, remaining, rest, payload)
    if remaining > packets.MAX_REMAINING:
        limit = packets.MAX_REMAINING - len(rest)
        raise PayloadTooLargeError(len(payload), limit, "an MQTT packet with this topic and these properties")
    return b"%c%b%b%b" % (head, packets.varint(remaining), rest, payload)


def _properties(plan: PublishPlan, correlation_id: str | None) -> PacketProperties:
    options = plan.options
    properties = PacketProperties()
    properties.content_type = plan.content_type
    properties.response_topic = plan.reply_to_channel
    if correlation_id is not None:
        properties.correlation = correlation_bytes(correlation_id)
    if options.time_to_live is not None:
        properties.expiry = min(math.ceil(options.time_to_live), _MAX_EXPIRY)
    if plan.content_encoding is not None:
        properties.user.append((CONTENT_ENCODING, plan.content_encoding))
    for name, value in options.headers.items():
        properties.user += [(name, each) for each in value] if type(value) is tuple else [(name, value)]
    if options.message_id is not None:
        properties.user.append((MESSAGE_ID, options.message_id))
    return properties


#: by QoS, of messages that are neither retained nor delivered again
_PLAIN: Final[tuple[MappingProxyType[str, Any], ...]] = tuple(
    MappingProxyType({Features.EXTENSION_QOS: qos}) for qos in "012"
)


def _received(publish: Publish) -> MappingProxyType[str, Any]:
    """Return the extensions that every version has."""
    plain = _PLAIN[publish.qos]
    if not publish.retain and not publish.dup:
        return plain
    extensions = dict(plain)
    if publish.retain:
        extensions[Features.EXTENSION_RETAIN] = True
    if publish.dup:
        extensions["redelivered"] = True
    return MappingProxyType(extensions)

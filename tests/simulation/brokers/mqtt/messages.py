"""Messages at rest in the broker, and the bytes in which they are forwarded."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.mqtt.packets import Publish, Will
from tests.simulation.brokers.mqtt.properties import (
    FORWARDED,
    Property,
    encode_fields,
    encode_text,
    encode_varint,
)

if TYPE_CHECKING:
    from tests.simulation.brokers.mqtt.topics import Subscription

#: States of an :class:`Outgoing`.
QUEUED: Final = 0
SENT: Final = 1  # PUBLISH sent; PUBACK or PUBREC is awaited
RELEASED: Final = 2  # PUBREL sent; PUBCOMP is awaited


class Message:
    """A published message. Never changed, and shared by all queues that hold it.

    Attributes:
        source: client id of the publisher.
        expires_at: virtual time, or ``None``.
        forwarded: encoded properties that are forwarded unchanged, in the order of the publisher.
        head: the encoded topic.
    """

    __slots__ = ("expires_at", "forwarded", "head", "payload", "qos", "retain", "source", "topic")

    def __init__(self, source: str, packet: Publish | Will, now: float) -> None:
        properties = packet.properties
        self.source = source
        self.topic = packet.topic
        self.payload = packet.payload
        self.qos = packet.qos
        self.retain = packet.retain
        self.head = encode_text(packet.topic)
        self.expires_at: float | None = None
        self.forwarded = b""
        if properties:
            if Property.MESSAGE_EXPIRY in properties:
                self.expires_at = now + properties[Property.MESSAGE_EXPIRY]
            self.forwarded = encode_fields({each: properties[each] for each in properties if each in FORWARDED})

    def is_expired(self, now: float) -> bool:
        """Return whether the message expiry interval has passed [MQTT-3.3.2-5]."""
        return self.expires_at is not None and now >= self.expires_at


class Outgoing:
    """A message for one session: queued, or in flight.

    Attributes:
        qos: of this delivery.
        retain: the flag to send.
        identifiers: of the subscriptions it matched.
        shared: the shared subscription that it was delivered for.
        packet_id: 0 until it is sent for the first time.
        state: ``QUEUED``, ``SENT`` or ``RELEASED``.
    """

    __slots__ = ("identifiers", "message", "packet_id", "qos", "retain", "shared", "state")

    def __init__(
        self,
        message: Message,
        qos: int,
        retain: bool = False,
        identifiers: tuple[int, ...] = (),
        shared: Subscription | None = None,
    ) -> None:
        self.message = message
        self.qos = qos
        self.retain = retain
        self.identifiers = identifiers
        self.shared = shared
        self.packet_id = 0
        self.state = QUEUED

    def copy(self) -> Outgoing:
        """Return a copy for the disk."""
        copy = Outgoing(self.message, self.qos, self.retain, self.identifiers, self.shared)
        copy.packet_id = self.packet_id
        copy.state = self.state
        return copy


def publish_bytes(
    message: Message,
    qos: int,
    retain: bool,
    identifiers: tuple[int, ...],
    packet_id: int,
    duplicate: bool,
    is_5: bool,
    now: float,
) -> bytes:
    """Return the PUBLISH that forwards ``message``.

    Args:
        is_5: for a client of MQTT 5: subscription identifiers, the rest of the expiry interval [MQTT-3.3.2-6], and the
            publisher's properties are included.
        now: virtual time.
    """
    first = 0x30 | duplicate << 3 | qos << 1 | retain
    body = message.head
    if qos:
        body += struct.pack("!H", packet_id)
    if is_5:
        fields = message.forwarded
        if identifiers:
            fields += b"".join([b"\x0b" + encode_varint(each) for each in identifiers])
        if message.expires_at is not None:
            fields += struct.pack("!BI", 2, math.ceil(message.expires_at - now))
        body += encode_varint(len(fields)) + fields
    body += message.payload
    length = len(body)
    if length < 128:
        return bytes((first, length)) + body
    return bytes((first,)) + encode_varint(length) + body

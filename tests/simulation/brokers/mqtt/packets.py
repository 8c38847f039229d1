"""Packets of MQTT 3.1.1 and 5, written from the specifications: both directions, for the broker and its tests.

Fields that only MQTT 5 has are left out when ``version`` is 4, the protocol level of MQTT 3.1.1, and hold their default
after decoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.simulation.brokers.mqtt.properties import (
    MALFORMED,
    NONE,
    PACKET_TOO_LARGE,
    PROTOCOL,
    UNSUPPORTED_VERSION,
    WILL,
    Properties,
    ProtocolError,
    Reader,
    decode_text,
    encode_binary,
    encode_properties,
    encode_text,
    encode_varint,
)

CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15

#: protocol levels
V311: Final = 4
V5: Final = 5

PINGREQ_BYTES: Final = b"\xc0\0"
PINGRESP_BYTES: Final = b"\xd0\0"

#: The flags in the first byte of packets other than PUBLISH [MQTT-2.1.3-1].
_FLAGS: Final = (0, 0, 0, 0, 0, 0, 2, 0, 2, 0, 2, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class Will:
    """The will of a CONNECT."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Properties = field(default_factory=dict)


@dataclass(slots=True)
class Connect:
    """CONNECT (3.1). ``keep_alive`` is in seconds; ``is_clean`` is Clean Session or Clean Start."""

    client_id: str
    version: int = V5
    is_clean: bool = True
    keep_alive: int = 0
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    properties: Properties = field(default_factory=dict)


@dataclass(slots=True)
class Connack:
    """CONNACK (3.2)."""

    session_present: bool
    reason: int
    properties: Properties = field(default_factory=dict)


@dataclass(slots=True)
class Publish:
    """PUBLISH (3.3)."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    duplicate: bool = False
    packet_id: int = 0
    properties: Properties = field(default_factory=dict)


@dataclass(slots=True)
class Ack:
    """PUBACK, PUBREC, PUBREL or PUBCOMP (3.4 to 3.7)."""

    kind: int
    packet_id: int
    reason: int = 0
    properties: Properties = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """A topic filter of a SUBSCRIBE, with its options (3.8.3.1)."""

    filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0


@dataclass(slots=True)
class Subscribe:
    """SUBSCRIBE (3.8)."""

    packet_id: int
    requests: list[Request]
    properties: Properties = field(default_factory=dict)


@dataclass(slots=True)
class Unsubscribe:
    """UNSUBSCRIBE (3.10)."""

    packet_id: int
    filters: list[str]
    properties: Properties = field(default_factory=dict)


@dataclass(slots=True)
class Reasons:
    """SUBACK or UNSUBACK (3.9, 3.11)."""

    kind: int
    packet_id: int
    reasons: list[int]
    properties: Properties = field(default_factory=dict)


@dataclass(slots=True)
class Ping:
    """PINGREQ or PINGRESP (3.12, 3.13)."""

    kind: int


@dataclass(slots=True)
class Disconnect:
    """DISCONNECT or AUTH (3.14, 3.15)."""

    reason: int = 0
    properties: Properties = field(default_factory=dict)
    kind: int = DISCONNECT


Packet = Connect | Connack | Publish | Ack | Subscribe | Unsubscribe | Reasons | Ping | Disconnect


class Framer:
    """Cuts a stream of bytes into packets.

    Args:
        maximum: size of the largest packet that is accepted, in bytes; 0 means unlimited.
    """

    __slots__ = ("_buffer", "maximum")

    def __init__(self, maximum: int = 0) -> None:
        self.maximum = maximum
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the first byte and the body of each packet that is complete.

        Raises:
            ProtocolError: a length of more than four bytes, or a packet that is too large.
        """
        buffer = self._buffer + data if self._buffer else data
        start, end = 0, len(buffer)
        self._buffer = b""
        while end - start >= 2:
            length = buffer[start + 1]
            body = start + 2
            if length & 0x80:
                length &= 0x7F
                shift = 7
                while body < end:
                    byte = buffer[body]
                    body += 1
                    length |= (byte & 0x7F) << shift
                    if not byte & 0x80:
                        break
                    shift += 7
                    if shift > 21:
                        raise ProtocolError(MALFORMED, "remaining length of more than four bytes")
                else:
                    break  # the length is incomplete
            following = body + length
            if self.maximum and following - start > self.maximum:
                raise ProtocolError(PACKET_TOO_LARGE, f"packet of {following - start} bytes")
            if following > end:
                break
            yield buffer[start], buffer[body:following]
            start = following
        self._buffer = buffer[start:]


def frame(first: int, body: bytes) -> bytes:
    """Return a packet: its first byte, its remaining length, its body."""
    return bytes((first,)) + encode_varint(len(body)) + body


def encode_ack(kind: int, packet_id: int, version: int, reason: int = 0, properties: Properties = NONE) -> bytes:
    """Return PUBACK, PUBREC, PUBREL or PUBCOMP, as short as possible."""
    first = kind << 4 | _FLAGS[kind]
    if version == V311 or not (reason or properties):
        return struct.pack("!BBH", first, 2, packet_id)
    if not properties:
        return struct.pack("!BBHB", first, 3, packet_id, reason)
    return frame(first, struct.pack("!HB", packet_id, reason) + encode_properties(properties))


def encode(packet: Packet, version: int) -> bytes:
    """Return ``packet`` as bytes for the protocol level ``version``."""
    is_5 = version == V5
    match packet:
        case Publish():
            body = encode_text(packet.topic)
            if packet.qos:
                body += struct.pack("!H", packet.packet_id)
            if is_5:
                body += encode_properties(packet.properties)
            flags = packet.duplicate << 3 | packet.qos << 1 | packet.retain
            return frame(PUBLISH << 4 | flags, body + packet.payload)
        case Ack():
            return encode_ack(packet.kind, packet.packet_id, version, packet.reason, packet.properties)
        case Connect():
            return _encode_connect(packet)
        case Connack():
            body = bytes((packet.session_present, packet.reason))
            return frame(CONNACK << 4, body + encode_properties(packet.properties) if is_5 else body)
        case Subscribe():
            body = struct.pack("!H", packet.packet_id) + (encode_properties(packet.properties) if is_5 else b"")
            for each in packet.requests:
                options = each.qos
                if is_5:
                    options |= each.no_local << 2 | each.retain_as_published << 3 | each.retain_handling << 4
                body += encode_text(each.filter) + bytes((options,))
            return frame(SUBSCRIBE << 4 | 2, body)
        case Unsubscribe():
            body = struct.pack("!H", packet.packet_id) + (encode_properties(packet.properties) if is_5 else b"")
            return frame(UNSUBSCRIBE << 4 | 2, body + b"".join(map(encode_text, packet.filters)))
        case Reasons():
            body = struct.pack("!H", packet.packet_id) + (encode_properties(packet.properties) if is_5 else b"")
            has_reasons = is_5 or packet.kind == SUBACK
            return frame(packet.kind << 4, body + bytes(packet.reasons) if has_reasons else body)
        case Ping():
            return bytes((packet.kind << 4, 0))
        case Disconnect():
            if not is_5 or not (packet.reason or packet.properties):
                return bytes((packet.kind << 4, 0))
            body = bytes((packet.reason,))
            if packet.properties:
                body += encode_properties(packet.properties)
            return frame(packet.kind << 4, body)


def _encode_connect(packet: Connect) -> bytes:
    is_5 = packet.version == V5
    will = packet.will
    flags = packet.is_clean << 1
    body = encode_properties(packet.properties) if is_5 else b""
    body += encode_text(packet.client_id)
    if will is not None:
        flags |= 4 | will.qos << 3 | will.retain << 5
        body += encode_properties(will.properties) if is_5 else b""
        body += encode_text(will.topic) + encode_binary(will.payload)
    if packet.username is not None:
        flags |= 0x80
        body += encode_text(packet.username)
    if packet.password is not None:
        flags |= 0x40
        body += encode_binary(packet.password)
    head = encode_text("MQTT") + struct.pack("!BBH", packet.version, flags, packet.keep_alive)
    return frame(CONNECT << 4, head + body)


def decode_publish(first: int, body: bytes, version: int) -> Publish:
    """Return the PUBLISH.

    Raises:
        ProtocolError: malformed.
    """
    qos = first >> 1 & 3
    if qos == 3:
        raise ProtocolError(MALFORMED, "QoS 3")  # [MQTT-3.3.1-4]
    if not qos and first & 8:
        raise ProtocolError(MALFORMED, "DUP with QoS 0")  # [MQTT-3.3.1-2]
    size = len(body)
    if size < 2:
        raise ProtocolError(MALFORMED, "PUBLISH without topic")
    position = 2 + (body[0] << 8 | body[1])
    if position > size:
        raise ProtocolError(MALFORMED, "the packet ends too early")
    topic = decode_text(body[2:position])
    packet_id = 0
    if qos:
        if position + 2 > size:
            raise ProtocolError(MALFORMED, "PUBLISH without packet identifier")
        packet_id = body[position] << 8 | body[position + 1]
        position += 2
        if not packet_id:
            raise ProtocolError(PROTOCOL, "packet identifier 0")  # [MQTT-2.2.1-3]
    properties = NONE
    if version == V5:
        if position < size and not body[position]:
            position += 1
        else:
            reader = Reader(body, position)
            properties = reader.properties(PUBLISH)
            position = reader.position
    return Publish(topic, body[position:], qos, bool(first & 1), bool(first & 8), packet_id, properties)


def decode_ack(first: int, body: bytes, version: int) -> Ack:
    """Return PUBACK, PUBREC, PUBREL or PUBCOMP.

    Raises:
        ProtocolError: malformed.
    """
    kind = first >> 4
    if first & 15 != _FLAGS[kind]:
        raise ProtocolError(MALFORMED, f"flags {first & 15} of packet type {kind}")
    if len(body) == 2:
        packet_id, reason, properties = body[0] << 8 | body[1], 0, NONE
    elif version == V5:
        reader = Reader(body)
        packet_id, reason = reader.u16(), reader.byte()
        properties = reader.properties(kind) if reader.left else NONE
        _end(reader)
    else:
        raise ProtocolError(MALFORMED, f"packet type {kind} has {len(body)} bytes")
    if not packet_id:
        raise ProtocolError(PROTOCOL, "packet identifier 0")
    return Ack(kind, packet_id, reason, properties)


def decode(first: int, body: bytes, version: int) -> Packet:
    """Return the packet with the first byte ``first`` and the given body.

    Args:
        first, body: from :meth:`Framer.feed`.
        version: protocol level; CONNECT has its own.

    Raises:
        ProtocolError: malformed, or against the protocol whatever the state of the connection.
    """
    kind = first >> 4
    if kind == PUBLISH:
        return decode_publish(first, body, version)
    if PUBACK <= kind <= PUBCOMP:
        return decode_ack(first, body, version)
    if not kind or first & 15 != _FLAGS[kind]:
        raise ProtocolError(MALFORMED, f"flags {first & 15} of packet type {kind}")
    reader = Reader(body)
    is_5 = version == V5
    packet: Packet
    match kind:
        case 1:
            packet = _decode_connect(reader)
        case 2:
            packet = Connack(bool(reader.byte() & 1), reader.byte(), reader.properties(kind) if is_5 else NONE)
        case 8:
            packet = _decode_subscribe(reader, is_5)
        case 10:
            packet = _decode_unsubscribe(reader, is_5)
        case 9 | 11:
            packet_id = reader.u16()
            properties = reader.properties(kind) if is_5 else NONE
            packet = Reasons(kind, packet_id, list(reader.take(reader.left)), properties)
        case 12 | 13:
            packet = Ping(kind)
        case _:
            if kind == AUTH and not is_5:
                raise ProtocolError(PROTOCOL, "AUTH before MQTT 5")
            packet = Disconnect(kind=kind)
            if is_5 and reader.left:
                packet.reason = reader.byte()
                packet.properties = reader.properties(kind) if reader.left else NONE
    _end(reader)
    return packet


def _end(reader: Reader) -> None:
    if reader.left:
        raise ProtocolError(MALFORMED, f"{reader.left} bytes too many")


def _decode_connect(reader: Reader) -> Connect:
    name, version = reader.binary(), reader.byte()
    if name != b"MQTT":
        raise ProtocolError(UNSUPPORTED_VERSION if name == b"MQIsdp" else MALFORMED, f"protocol {name!r}")
    if version not in (V311, V5):
        raise ProtocolError(UNSUPPORTED_VERSION, f"protocol level {version}")
    flags = reader.byte()
    has_will = bool(flags & 4)
    if flags & 1 or flags >> 3 & 3 == 3 or (not has_will and flags & 0x38):  # [MQTT-3.1.2-3] and following
        raise ProtocolError(MALFORMED, f"flags {flags:#x} of CONNECT")
    if version == V311 and flags & 0x40 and not flags & 0x80:  # [MQTT-3.1.2-22] of 3.1.1
        raise ProtocolError(MALFORMED, "password without user name")
    packet = Connect("", version, bool(flags & 2), reader.u16())
    if version == V5:
        packet.properties = reader.properties(CONNECT)
    packet.client_id = reader.text()
    if has_will:
        properties = reader.properties(WILL) if version == V5 else NONE
        topic, payload = reader.text(), reader.binary()
        packet.will = Will(topic, payload, flags >> 3 & 3, bool(flags & 0x20), properties)
    if flags & 0x80:
        packet.username = reader.text()
    if flags & 0x40:
        packet.password = reader.binary()
    return packet


def _decode_subscribe(reader: Reader, is_5: bool) -> Subscribe:
    packet = Subscribe(reader.u16(), [], reader.properties(SUBSCRIBE) if is_5 else NONE)
    if not packet.packet_id:
        raise ProtocolError(PROTOCOL, "packet identifier 0")
    while reader.left:
        name, options = reader.text(), reader.byte()
        if options & 3 == 3 or options & (0xC0 if is_5 else 0xFC) or options >> 4 & 3 == 3:  # [MQTT-3.8.3-5]
            raise ProtocolError(MALFORMED, f"subscription options {options:#x}")
        packet.requests.append(Request(name, options & 3, bool(options & 4), bool(options & 8), options >> 4))
    if not packet.requests:
        raise ProtocolError(PROTOCOL, "SUBSCRIBE without a topic filter")  # [MQTT-3.8.3-2]
    return packet


def _decode_unsubscribe(reader: Reader, is_5: bool) -> Unsubscribe:
    packet = Unsubscribe(reader.u16(), [], reader.properties(UNSUBSCRIBE) if is_5 else NONE)
    if not packet.packet_id:
        raise ProtocolError(PROTOCOL, "packet identifier 0")
    while reader.left:
        packet.filters.append(reader.text())
    if not packet.filters:
        raise ProtocolError(PROTOCOL, "UNSUBSCRIBE without a topic filter")  # [MQTT-3.10.3-2]
    return packet

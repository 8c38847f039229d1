"""Packets as bytes: all but CONNECT, CONNACK and the broker's DISCONNECT, see :mod:`.handshake`. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

#: packet types: the upper half of the first byte
CONNECT: Final = 0x10
CONNACK: Final = 0x20
PUBLISH: Final = 0x30
PUBACK: Final = 0x40
PUBREC: Final = 0x50
PUBREL: Final = 0x60
PUBCOMP: Final = 0x70
SUBSCRIBE: Final = 0x80
SUBACK: Final = 0x90
UNSUBSCRIBE: Final = 0xA0
UNSUBACK: Final = 0xB0
PINGREQ: Final = 0xC0
PINGRESP: Final = 0xD0
DISCONNECT: Final = 0xE0
AUTH: Final = 0xF0

#: bits of the first byte of PUBLISH
DUP: Final = 0x08
QOS: Final = 0x06
#: largest remaining length, and largest packet: that and a fixed header of five bytes
MAX_REMAINING: Final = 268_435_455
MAX_PACKET: Final = MAX_REMAINING + 5
#: bytes of a string
MAX_TEXT: Final = 65_535
#: reason codes from here on are failures (MQTT 5, 2.4)
FAILURE: Final = 0x80
#: of a message that was accepted and has no subscribers
NO_MATCHING_SUBSCRIBERS: Final = 0x10
#: of AUTH: the peer wants another step; this client begins anew
CONTINUE_AUTHENTICATION: Final = 0x18
REAUTHENTICATE: Final = 0x19
PROTOCOL_ERROR: Final = 0x82
SESSION_TAKEN_OVER: Final = 0x8E
TOPIC_ALIAS_INVALID: Final = 0x94
PACKET_TOO_LARGE: Final = 0x95
QUOTA_EXCEEDED: Final = 0x97
USE_ANOTHER_SERVER: Final = 0x9C
#: bad user name or password, not authorized, bad authentication method
CREDENTIALS_REFUSED: Final = frozenset((0x86, 0x87, 0x8C))
SERVER_MOVED: Final = 0x9D
#: Largest properties of a packet, bytes: several times those of a message with the largest headers of this project.
#: Each property of two bytes becomes an object, on the loop.
MAX_PROPERTIES: Final = 2**20
#: largest packet other than PUBLISH, bytes: brokers send some dozens
MAX_CONTROL: Final = 2**15

# property identifiers (MQTT 5, 2.2.2.2)
_FORMAT: Final = 0x01
_EXPIRY: Final = 0x02
_CONTENT_TYPE: Final = 0x03
_RESPONSE_TOPIC: Final = 0x08
_CORRELATION: Final = 0x09
_SUBSCRIPTION: Final = 0x0B
_REASON: Final = 0x1F
_TOPIC_ALIAS: Final = 0x23
_USER: Final = 0x26
#: properties that a packet may have once
_ONCE: Final = (_FORMAT, _EXPIRY, _CONTENT_TYPE, _RESPONSE_TOPIC, _CORRELATION, _REASON, _TOPIC_ALIAS)


#: a whole PINGREQ
PING: Final = bytes((PINGREQ, 0))


class ProtocolError(Exception):
    """The peer violated the protocol. ``code`` is the reason code that it is told (MQTT 5)."""

    def __init__(self, message: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


class LimitExceededError(ProtocolError):
    """The peer exceeded a limit of this client that the protocol does not have."""

    def __init__(self, message: str) -> None:
        super().__init__(message, QUOTA_EXCEEDED)


class PacketProperties:
    """MQTT 5 properties of a PUBLISH packet, a will, or (``reason`` and ``user``) an acknowledgement."""

    __slots__ = ("alias", "content_type", "correlation", "expiry", "reason", "response_topic", "subscriptions", "user")

    def __init__(self) -> None:
        #: topic alias, or 0
        self.alias = 0
        self.content_type: str | None = None
        self.response_topic: str | None = None
        self.correlation: bytes | None = None
        #: seconds
        self.expiry: int | None = None
        #: subscription identifiers, each one once, in the broker's order
        self.subscriptions: tuple[int, ...] = ()
        self.user: list[tuple[str, str]] = []
        self.reason: str | None = None


@dataclass(slots=True, eq=False)
class Publish:
    """A received PUBLISH packet. ``id`` is 0 with QoS 0."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    id: int
    properties: PacketProperties


#: shared by all packets without properties; never written to
NO_PROPERTIES: Final = PacketProperties()


def varint(value: int) -> bytes:
    """Encode a variable byte integer (1.5.5)."""
    if value < 128:
        return bytes((value,))
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def text(value: str) -> bytes:
    """Encode a UTF-8 string with its length (1.5.4). The caller ensures that it has at most :data:`MAX_TEXT` bytes."""
    return binary(value.encode())


def binary(value: bytes) -> bytes:
    """Encode binary data with its length (1.5.6)."""
    return len(value).to_bytes(2, "big") + value


def framed(head: int, body: bytes) -> bytes:
    """Return a packet: its first byte, the length of ``body``, and ``body``."""
    return bytes((head,)) + varint(len(body)) + body


def user_property(name: str, value: str) -> bytes:
    """Encode a user property, with its identifier."""
    return b"\x26" + text(name) + text(value)


def topic_alias(number: int) -> bytes:
    """Encode the property Topic Alias, with its identifier."""
    return b"\x23" + number.to_bytes(2, "big")


def properties_bytes(properties: PacketProperties, will_delay: int = 0) -> bytes:
    """Encode properties, without their length; ``will_delay`` is the Will Delay Interval, seconds."""
    parts = []
    if properties.expiry is not None:
        parts.append(b"\x02" + properties.expiry.to_bytes(4, "big"))
    if properties.content_type is not None:
        parts.append(b"\x03" + text(properties.content_type))
    if properties.response_topic is not None:
        parts.append(b"\x08" + text(properties.response_topic))
    if properties.correlation is not None:
        parts.append(b"\x09" + binary(properties.correlation))
    if will_delay:
        parts.append(b"\x18" + will_delay.to_bytes(4, "big"))
    parts += [user_property(name, value) for name, value in properties.user]
    return b"".join(parts)


def plain_publish(topic: str) -> bytes:
    """Encode an empty PUBLISH of MQTT 3.1.1 with QoS 0."""
    return framed(PUBLISH, text(topic))


def acknowledgement(kind: int, packet_id: int) -> bytes:
    """Encode a PUBACK, PUBREC, PUBREL or PUBCOMP with the reason code for success."""
    flags = 2 if kind == PUBREL else 0
    return bytes((kind | flags, 2, packet_id >> 8, packet_id & 255))


def parse_acknowledgement(body: bytes) -> tuple[int, int]:
    """Return packet id and reason code of a PUBACK, PUBREC, PUBREL or PUBCOMP.

    Raises:
        ProtocolError: there is no packet id.
    """
    size = len(body)
    if size < 2:
        raise ProtocolError("acknowledgement without packet id")
    return body[0] << 8 | body[1], body[2] if size > 2 else 0


def parse_answer(body: bytes, v5: bool) -> tuple[int, bytes, str | None]:
    """Return packet id, reason codes and reason string of a SUBACK or UNSUBACK.

    Raises:
        ProtocolError: malformed.
    """
    if len(body) < 2:
        raise ProtocolError("an answer without packet id")
    packet_id, at, reason = body[0] << 8 | body[1], 2, None
    if v5:
        properties, at = _parse_properties(body, at)
        reason = properties.reason
    return packet_id, body[at:], reason


def subscribe_options(qos: int, *, no_local: bool, as_published: bool, retain_handling: int) -> int:
    """Return the options of a SUBSCRIBE (MQTT 5, 3.8.3.1)."""
    return qos | no_local << 2 | as_published << 3 | retain_handling << 4


def subscribe(packet_id: int, topic_filter: str, options: int, v5: bool, identifier: int | None) -> bytes:
    """Encode a SUBSCRIBE to one filter. MQTT 3.1.1 has no identifier, and no options but the QoS."""
    properties = b""
    if v5:
        properties = b"" if identifier is None else b"\x0b" + varint(identifier)
        properties = varint(len(properties)) + properties
    subscription = text(topic_filter) + bytes((options if v5 else options & 3,))
    return _request(SUBSCRIBE, packet_id, properties + subscription)


def unsubscribe(packet_id: int, topic_filter: str, v5: bool) -> bytes:
    """Encode an UNSUBSCRIBE of one filter."""
    return _request(UNSUBSCRIBE, packet_id, (b"\0" if v5 else b"") + text(topic_filter))


def _request(kind: int, packet_id: int, rest: bytes) -> bytes:
    return framed(kind | 2, packet_id.to_bytes(2, "big") + rest)


def disconnect(code: int = 0, session_expiry: int | None = None) -> bytes:
    """Encode a DISCONNECT. MQTT 5: with a reason code, and how long the broker keeps the session, seconds."""
    if session_expiry is not None:
        return bytes((DISCONNECT, 7, code, 5, 0x11)) + session_expiry.to_bytes(4, "big")
    return bytes((DISCONNECT, 2, code, 0)) if code else bytes((DISCONNECT, 0))


def auth(reason: int, method: str, data: bytes) -> bytes:
    """Encode an AUTH (MQTT 5, 3.15) with authentication method and data."""
    properties = b"\x15" + text(method) + b"\x16" + binary(data)
    return framed(AUTH, bytes((reason,)) + varint(len(properties)) + properties)


def reason_string(body: bytes) -> str | None:
    """Return the reason string of a PUBACK, PUBREC or PUBCOMP.

    Raises:
        ProtocolError: malformed properties.
    """
    return _parse_properties(body, 3)[0].reason if len(body) > 3 else None


def parse_publish(head: int, body: bytes, v5: bool) -> Publish:
    """Parse a PUBLISH packet. Its topic is empty if an alias stands for it.

    Args:
        head: its first byte.
        body: the bytes after the remaining length.
        v5: whether it has properties.

    Raises:
        ProtocolError: malformed.
    """
    try:
        at = 2 + (body[0] << 8 | body[1])
        topic = str(body[2:at], "utf-8")
        qos = head >> 1 & 3
        packet_id = 0
        if qos:
            packet_id = body[at] << 8 | body[at + 1]
            at += 2
            if qos == 3 or not packet_id:
                raise ProtocolError("PUBLISH with QoS 3 or packet id 0")
        properties = NO_PROPERTIES
        if v5:
            if body[at]:
                properties, at = _parse_properties(body, at)
            else:
                at += 1
    except (IndexError, UnicodeDecodeError) as error:
        raise ProtocolError("malformed PUBLISH") from error
    if at > len(body):
        raise ProtocolError("PUBLISH shorter than it says")
    if not topic and not properties.alias:
        raise ProtocolError("PUBLISH with neither topic nor alias")
    return Publish(topic, body[at:], qos, bool(head & 1), bool(head & DUP), packet_id, properties)


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        digit = data[at]
        at += 1
        value |= (digit & 127) << shift
        if digit < 128:
            return value, at
        shift += 7
        if shift > 21:
            raise ProtocolError("variable byte integer of more than four bytes")


def _parse_properties(data: bytes, at: int) -> tuple[PacketProperties, int]:
    """Return the properties whose length is at index ``at``, and the index after them."""
    try:
        length, at = _parse_varint(data, at)
        end = at + length
        if end > len(data):
            raise ProtocolError("properties longer than their packet")
        if length > MAX_PROPERTIES:
            raise LimitExceededError(f"{length} bytes of properties in one packet; at most {MAX_PROPERTIES} are read")
        found = PacketProperties()
        identifiers: dict[int, None] | None = None
        has_format = False
        while at < end:
            kind = data[at]
            at += 1
            if kind == _SUBSCRIPTION:
                identifier, at = _parse_varint(data, at)
                if not found.subscriptions:  # the common case
                    found.subscriptions = (identifier,)
                else:
                    if identifiers is None:
                        identifiers = dict.fromkeys(found.subscriptions)
                    identifiers[identifier] = None
            elif kind == _USER:
                name, at = _parse_text(data, at)
                value, at = _parse_text(data, at)
                found.user.append((name, value))
            elif kind == _CONTENT_TYPE and found.content_type is None:
                found.content_type, at = _parse_text(data, at)
            elif kind == _RESPONSE_TOPIC and found.response_topic is None:
                found.response_topic, at = _parse_text(data, at)
            elif kind == _CORRELATION and found.correlation is None:
                size = data[at] << 8 | data[at + 1]
                found.correlation = data[at + 2 : at + 2 + size]
                at += 2 + size
            elif kind == _EXPIRY and found.expiry is None:
                found.expiry = int.from_bytes(data[at : at + 4], "big")
                at += 4
            elif kind == _FORMAT and not has_format:
                has_format = True
                at += 1
            elif kind == _TOPIC_ALIAS and not found.alias:
                found.alias = data[at] << 8 | data[at + 1]
                at += 2
                if not found.alias:
                    raise ProtocolError("topic alias 0", TOPIC_ALIAS_INVALID)
            elif kind == _REASON and found.reason is None:
                found.reason, at = _parse_text(data, at)
            else:
                raise ProtocolError(f"{'repeated' if kind in _ONCE else 'unexpected'} property 0x{kind:02X}")
        if identifiers is not None:
            found.subscriptions = (*identifiers,)
    except (IndexError, UnicodeDecodeError) as error:
        raise ProtocolError("malformed properties") from error
    if at != end:
        raise ProtocolError("properties shorter than they say")
    return found, end


def _parse_text(data: bytes, at: int) -> tuple[str, int]:
    start = at + 2
    end = start + (data[at] << 8 | data[at + 1])
    return str(data[start:end], "utf-8"), end


class PacketSplitter:
    """Cuts the bytes of a connection into packets.

    Args:
        largest: bytes of the largest packet that may arrive.
    """

    def __init__(self, largest: int = MAX_PACKET) -> None:
        self._largest = largest
        #: incomplete packet, and its total length once that is known
        self._partial = bytearray()
        self._wanted = 0

    def split(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Cut ``data``, the next bytes of the stream, into packets: first byte, and the bytes after the length.

        Raises:
            ProtocolError: a length of more than four bytes, or over a limit.
        """
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, size = 0, len(data)
        while size - at >= 2:
            start = at + 2
            length = data[at + 1]
            if length > 127:
                length &= 127
                shift = 7
                while True:
                    if start >= size:
                        self._keep(data, at, size + 1)
                        return
                    digit = data[start]
                    start += 1
                    length |= (digit & 127) << shift
                    if digit < 128:
                        break
                    shift += 7
                    if shift > 21:
                        raise ProtocolError("packet length of more than four bytes")
                if length > MAX_CONTROL and data[at] & 0xF0 != PUBLISH:
                    # paho's time to read properties grows with the square of their size
                    raise LimitExceededError(
                        f"a packet of type {data[at] >> 4} with {length} bytes; at most {MAX_CONTROL} are read"
                    )
            end = start + length
            if end - at > self._largest:
                raise ProtocolError(
                    f"a packet of {end - at} bytes; at most {self._largest} were agreed", PACKET_TOO_LARGE
                )
            if end > size:
                self._keep(data, at, end)
                return
            yield data[at], data[start:end]
            at = end
        self._keep(data, at, at + 2)

    def _keep(self, data: bytes, at: int, end: int) -> None:
        self._partial += data[at:]
        self._wanted = end - at

"""Properties of MQTT 5 packets (MQTT 5, 2.2.2), and the readers of the primitive types (1.5)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

#: Reason codes (MQTT 5, 2.4) that the broker or its tests use by name.
SUCCESS: Final = 0x00
DISCONNECT_WITH_WILL: Final = 0x04
NO_MATCHING_SUBSCRIBERS: Final = 0x10
NO_SUBSCRIPTION_EXISTED: Final = 0x11
UNSPECIFIED: Final = 0x80
MALFORMED: Final = 0x81
PROTOCOL: Final = 0x82
UNSUPPORTED_VERSION: Final = 0x84
CLIENT_ID_NOT_VALID: Final = 0x85
REAUTHENTICATE: Final = 0x19
NOT_AUTHORIZED: Final = 0x87
SERVER_BUSY: Final = 0x89
SHUTTING_DOWN: Final = 0x8B
BAD_AUTHENTICATION_METHOD: Final = 0x8C
KEEP_ALIVE_TIMEOUT: Final = 0x8D
TAKEN_OVER: Final = 0x8E
FILTER_NOT_VALID: Final = 0x8F
TOPIC_NOT_VALID: Final = 0x90
PACKET_ID_NOT_FOUND: Final = 0x92
RECEIVE_MAXIMUM_EXCEEDED: Final = 0x93
TOPIC_ALIAS_NOT_VALID: Final = 0x94
PACKET_TOO_LARGE: Final = 0x95
QUOTA_EXCEEDED: Final = 0x97
ADMINISTRATIVE: Final = 0x98
RETAIN_NOT_SUPPORTED: Final = 0x9A
QOS_NOT_SUPPORTED: Final = 0x9B
SHARED_NOT_SUPPORTED: Final = 0x9E

Properties = Mapping[int, Any]
#: Properties of packets that have none. Never changed.
NONE: Final[Properties] = {}


class ProtocolError(Exception):
    """The client broke the protocol; the connection ends.

    Args:
        reason: for the DISCONNECT or CONNACK of MQTT 5.
        text: for the history.
    """

    def __init__(self, reason: int, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Property(IntEnum):
    """Identifiers of properties (MQTT 5, 2.2.2.2)."""

    PAYLOAD_FORMAT = 0x01
    MESSAGE_EXPIRY = 0x02
    CONTENT_TYPE = 0x03
    RESPONSE_TOPIC = 0x08
    CORRELATION_DATA = 0x09
    SUBSCRIPTION_IDENTIFIER = 0x0B
    SESSION_EXPIRY = 0x11
    ASSIGNED_CLIENT_ID = 0x12
    SERVER_KEEP_ALIVE = 0x13
    AUTHENTICATION_METHOD = 0x15
    AUTHENTICATION_DATA = 0x16
    REQUEST_PROBLEM = 0x17
    WILL_DELAY = 0x18
    REQUEST_RESPONSE = 0x19
    RESPONSE_INFORMATION = 0x1A
    SERVER_REFERENCE = 0x1C
    REASON_STRING = 0x1F
    RECEIVE_MAXIMUM = 0x21
    TOPIC_ALIAS_MAXIMUM = 0x22
    TOPIC_ALIAS = 0x23
    MAXIMUM_QOS = 0x24
    RETAIN_AVAILABLE = 0x25
    USER_PROPERTY = 0x26
    MAXIMUM_PACKET_SIZE = 0x27
    WILDCARDS_AVAILABLE = 0x28
    IDENTIFIERS_AVAILABLE = 0x29
    SHARED_AVAILABLE = 0x2A


#: The type of each property: byte, flag (0 or 1), u16, u32, varint, text, binary or pair.
_TYPES: Final = {
    **dict.fromkeys((0x01, 0x17, 0x19, 0x24, 0x25, 0x28, 0x29, 0x2A), "flag"),
    **dict.fromkeys((0x13, 0x21, 0x22, 0x23), "u16"),
    **dict.fromkeys((0x02, 0x11, 0x18, 0x27), "u32"),
    **dict.fromkeys((0x03, 0x08, 0x12, 0x15, 0x1A, 0x1C, 0x1F), "text"),
    **dict.fromkeys((0x09, 0x16), "binary"),
    0x0B: "varint",
    0x26: "pair",
}
#: They must not be 0: a receive maximum, a maximum packet size, a subscription identifier, a topic alias.
_NOT_ZERO: Final = (0x0B, 0x21, 0x27)

#: The type number that stands for the properties of a will in the table below.
WILL: Final = 0
#: Which properties a packet may have, by its type number.
ALLOWED: Final[Mapping[int, tuple[int, ...]]] = {
    WILL: (0x01, 0x02, 0x03, 0x08, 0x09, 0x18, 0x26),
    1: (0x11, 0x15, 0x16, 0x17, 0x19, 0x21, 0x22, 0x26, 0x27),
    2: (0x11, 0x12, 0x13, 0x15, 0x16, 0x1A, 0x1C, 0x1F, 0x21, 0x22, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2A),
    3: (0x01, 0x02, 0x03, 0x08, 0x09, 0x0B, 0x23, 0x26),
    **dict.fromkeys((4, 5, 6, 7, 9, 11), (0x1F, 0x26)),
    8: (0x0B, 0x26),
    10: (0x26,),
    14: (0x11, 0x1C, 0x1F, 0x26),
    15: (0x15, 0x16, 0x1F, 0x26),
}
#: Properties of PUBLISH that the broker forwards unchanged (MQTT 5, 3.3.2.3).
FORWARDED: Final = (0x01, 0x03, 0x08, 0x09, 0x26)


class Reader:
    """Reads primitive types from the body of a packet.

    Every method raises :class:`ProtocolError` (malformed packet) where the body ends too early.
    """

    __slots__ = ("data", "position")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data = data
        self.position = position

    @property
    def left(self) -> int:
        """Return the number of unread bytes."""
        return len(self.data) - self.position

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        end = self.position + count
        if end > len(self.data):
            raise ProtocolError(MALFORMED, "the packet ends too early")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def byte(self) -> int:
        """Return a byte."""
        return self.take(1)[0]

    def u16(self) -> int:
        """Return a two-byte integer."""
        return int.from_bytes(self.take(2), "big")

    def u32(self) -> int:
        """Return a four-byte integer."""
        return int.from_bytes(self.take(4), "big")

    def varint(self) -> int:
        """Return a variable byte integer (MQTT 5, 1.5.5)."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return value
            shift += 7
            if shift > 21:
                raise ProtocolError(MALFORMED, "variable byte integer of more than four bytes")

    def binary(self) -> bytes:
        """Return binary data with its length in front."""
        return self.take(self.u16())

    def text(self) -> str:
        """Return a UTF-8 string [MQTT-1.5.4-1], [MQTT-1.5.4-2]."""
        return decode_text(self.binary())

    def properties(self, kind: int) -> Properties:
        """Return the properties of a packet of type ``kind``: user properties and identifiers as lists.

        Raises:
            ProtocolError: unknown, not for this packet, twice, or of a forbidden value.
        """
        length = self.varint()
        if not length:
            return NONE
        inner = Reader(self.take(length))
        found: dict[int, Any] = {}
        while inner.left:
            number = inner.varint()
            value = inner._value(number)
            if number not in ALLOWED[kind]:
                raise ProtocolError(PROTOCOL, f"property {number:#x} is not for packets of type {kind}")
            if number == Property.USER_PROPERTY or (number == Property.SUBSCRIPTION_IDENTIFIER and kind == 3):
                found.setdefault(number, []).append(value)
            elif number in found:
                raise ProtocolError(PROTOCOL, f"property {number:#x} stands twice")
            else:
                found[number] = value
            if value == 0 and number in _NOT_ZERO:
                raise ProtocolError(PROTOCOL, f"property {number:#x} is 0")
        return found

    def _value(self, number: int) -> Any:
        match _TYPES.get(number):
            case "flag":
                value = self.byte()
                if value > 1:
                    raise ProtocolError(PROTOCOL, f"property {number:#x} is neither 0 nor 1")
                return value
            case "u16":
                return self.u16()
            case "u32":
                return self.u32()
            case "varint":
                return self.varint()
            case "text":
                return self.text()
            case "binary":
                return self.binary()
            case "pair":
                return self.text(), self.text()
        raise ProtocolError(MALFORMED, f"unknown property {number:#x}")


def decode_text(data: bytes) -> str:
    """Return ``data`` as text.

    Raises:
        ProtocolError: it is not UTF-8, or has a NUL [MQTT-1.5.4-2].
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ProtocolError(MALFORMED, "text is not UTF-8") from None
    if "\0" in text:
        raise ProtocolError(MALFORMED, "text has a NUL")
    return text


def encode_varint(value: int) -> bytes:
    """Return a variable byte integer."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_binary(data: bytes) -> bytes:
    """Return ``data`` with its length of two bytes in front."""
    return struct.pack("!H", len(data)) + data


def encode_text(text: str) -> bytes:
    """Return ``text`` in UTF-8 with its length of two bytes in front."""
    return encode_binary(text.encode())


def encode_fields(properties: Properties) -> bytes:
    """Return the encoded properties without their length. Values that are lists become several properties."""
    encoded = bytearray()
    for number, value in properties.items():
        for each in value if isinstance(value, list) else (value,):
            encoded += bytes((number,)) + _encode_value(number, each)
    return bytes(encoded)


def encode_properties(properties: Properties) -> bytes:
    """Return the encoded properties with their length in front."""
    if not properties:
        return b"\0"
    fields = encode_fields(properties)
    return encode_varint(len(fields)) + fields


def _encode_value(number: int, value: Any) -> bytes:
    match _TYPES[number]:
        case "flag":
            return bytes((value,))
        case "u16":
            return struct.pack("!H", value)
        case "u32":
            return struct.pack("!I", value)
        case "varint":
            return encode_varint(value)
        case "text":
            return encode_text(value)
        case "binary":
            return encode_binary(value)
    return encode_text(value[0]) + encode_text(value[1])

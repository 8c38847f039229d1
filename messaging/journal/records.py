"""Records: the format of the frame bodies of a journal of messages.

A body is a sequence of records. A record is, in little-endian, texts in UTF-8::

    length of all this u32  timestamp i64  length of the channel u16, of the message id u16, of the properties u32
    channel  message id  properties  payload

The timestamp counts microseconds since the epoch. The properties are the text of
:func:`~messaging.model.stored_properties`.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from messaging.errors import ArgumentError
from messaging.execution import clock
from messaging.model import Message, MessageContext, restored_context, stored_properties

#: body of the first frame of each segment
FORMAT: Final = b"messaging.journal.records 1\n"
_HEAD: Final = struct.Struct("<IqHHI")
#: bytes of the smallest record
LEAST_RECORD: Final = _HEAD.size
#: the timestamps that a record can have: of the years 1 to 9999
_FIRST_SECOND: Final = -62_135_596_800
_LAST_SECOND: Final = 253_402_300_800
#: bytes of a channel or a message id
_MAX_SHORT: Final = 0xFFFF
#: bytes of a record: a frame holds at least one
MAX_RECORD: Final = 2**31


class Record(NamedTuple):
    """A message in a journal."""

    #: its place in the journal; the next record has the next offset
    offset: int
    #: when it was appended, unless the writer gave another time; seconds since the epoch
    timestamp: float
    channel: str
    payload: bytes
    #: all of its context but the channel, as :func:`~messaging.model.stored_properties` writes it; often empty
    properties: str
    #: ``None`` also for an empty one
    message_id: str | None

    @property
    def context(self) -> MessageContext:
        """The context of the message.

        Raises:
            ArgumentError: the properties are not a text of ``stored_properties``.
        """
        return restored_context(self.channel, self.properties)

    @property
    def message(self) -> Message:
        """The message. Raises as :attr:`context`."""
        return Message(self.payload, self.context)


def encode_record(
    channel: str, payload: bytes, properties: str = "", message_id: str | None = None, timestamp: float | None = None
) -> bytes:
    """Return a record as bytes.

    Args:
        channel: of the message; at most 65,535 bytes in UTF-8.
        payload: of the message.
        properties: see :attr:`Record.properties`.
        message_id: at most 65,535 bytes in UTF-8.
        timestamp: seconds since the epoch; ``None``: now.

    Raises:
        ArgumentError: a text is no str, or too long, or has lone surrogates, or the record is larger than 2 GiB; the
            payload is not bytes; the timestamp is no number of the years 1 to 9999.
    """
    micros = clock.wall_ns() // 1000 if timestamp is None else _micros(timestamp)
    if type(payload) is not bytes:
        payload = _as_bytes(payload)
    try:
        identity = b"" if message_id is None else message_id.encode()
        name, rest = channel.encode(), properties.encode()
    except AttributeError:
        kinds = ", ".join(type(each).__name__ for each in (channel, message_id, properties))
        raise ArgumentError(f"a record: channel, message id and properties must be texts, not {kinds}") from None
    except UnicodeEncodeError:
        raise ArgumentError("a record: channel, message id or properties have a lone surrogate") from None
    length = _HEAD.size + len(name) + len(identity) + len(rest) + len(payload)
    if len(name) > _MAX_SHORT or len(identity) > _MAX_SHORT or length > MAX_RECORD:
        raise _too_large(length, len(name), len(identity))
    return b"".join((_HEAD.pack(length, micros, len(name), len(identity), len(rest)), name, identity, rest, payload))


class RecordTemplate:
    """Encodes records that have the channel and the properties in common, faster than :func:`encode_record`.

    Raises:
        ArgumentError: as :func:`encode_record`.
    """

    __slots__ = ("_channel", "_properties", "_size")

    def __init__(self, channel: str, properties: str) -> None:
        encode_record(channel, b"", properties)  # checks both
        self._channel = channel.encode()
        self._properties = properties.encode()
        self._size = _HEAD.size + len(self._channel) + len(self._properties)

    def encode(self, payload: bytes, message_id: str) -> bytes:
        """Return a record of now. ``message_id`` has at most 65,535 bytes in UTF-8."""
        try:
            identity = message_id.encode()
        except UnicodeEncodeError:
            raise ArgumentError("a record: the message id has a lone surrogate") from None
        channel, properties = self._channel, self._properties
        length = self._size + len(identity) + len(payload)
        if length > MAX_RECORD or len(identity) > _MAX_SHORT:
            raise _too_large(length, len(channel), len(identity))
        micros = clock.wall_ns() // 1000
        head = _HEAD.pack(length, micros, len(channel), len(identity), len(properties))
        return b"".join((head, channel, identity, properties, payload))


def _too_large(length: int, channel: int, identity: int) -> ArgumentError:
    return ArgumentError(
        f"a record of {length} bytes with a channel of {channel} and a message id of {identity} bytes is too large; at "
        f"most {MAX_RECORD}, {_MAX_SHORT} and {_MAX_SHORT} fit"
    )


def _micros(timestamp: object) -> int:
    if isinstance(timestamp, (int, float)) and _FIRST_SECOND <= timestamp <= _LAST_SECOND:
        return round(timestamp * 1_000_000)
    raise ArgumentError(f"a record: the timestamp must be seconds since the epoch, not {timestamp!r:.100}")


def _as_bytes(payload: object) -> bytes:
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return bytes(payload)
    raise ArgumentError(f"a record: the payload must be bytes, not {type(payload).__name__}")


def encode_message(message: Message, message_id: str | None = None, timestamp: float | None = None) -> bytes:
    """Return a message as the bytes of a record, as :func:`encode_record`.

    Raises:
        ArgumentError: the message has no channel; otherwise as :func:`encode_record`.
        InvalidExtensionError: an extension cannot be stored.
    """
    if not isinstance(message, Message):
        raise ArgumentError(f"a record: the message must be a Message, not {type(message).__name__}")
    channel = message.context.channel
    if channel is None:
        raise ArgumentError("a record: the message has no channel")
    return encode_record(channel, message.payload, stored_properties(message.context), message_id, timestamp)


def check_offset(value: object, what: str) -> int:
    """Return ``value`` if it is an offset or another number of records; raise ``ArgumentError``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ArgumentError(f"{what} must be an integer from 0 on, not {value!r:.100}")
    return value


def decode_records(body: memoryview, first: int) -> list[Record]:
    """Return the records of the body of a frame whose first record has offset ``first``.

    Raises:
        ValueError: the body, whose checksum fits, does not hold records.
    """
    records: list[Record] = []
    at, size = 0, len(body)
    while at < size:
        try:
            length, micros, channel, identity, rest = _HEAD.unpack_from(body, at)
        except struct.error as error:
            raise ValueError(str(error)) from None
        end = at + length
        begin = at + _HEAD.size
        after_channel = begin + channel
        after_identity = after_channel + identity
        after_properties = after_identity + rest
        if after_properties > end or end > size:
            raise ValueError(f"a record at byte {at} is longer than its frame")
        records.append(
            Record(
                first + len(records),
                micros / 1_000_000,
                str(body[begin:after_channel], "utf-8"),
                bytes(body[after_properties:end]),
                str(body[after_identity:after_properties], "utf-8") if rest else "",
                str(body[after_channel:after_identity], "utf-8") if identity else None,
            )
        )
        at = end
    return records

"""Frames (2.3.5) that pass once per message, written by hand."""

from __future__ import annotations

import struct
from typing import Final

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = 8
END: Final = b"\xce"
END_MARK: Final = 0xCE
#: bytes of a frame beside its payload
OVERHEAD: Final = 8

#: type, channel and size of the payload
PREFIX: Final = struct.Struct(">BHI")
#: a content header up to its properties, with the prefix of its frame: class, weight, body size
_CONTENT: Final = struct.Struct(">BHIHHQ")
_TAG: Final = struct.Struct(">QB")
_SETTLEMENT: Final = struct.Struct(">BHIIQBB")

PUBLISH: Final = 60 << 16 | 40
RETURN: Final = 60 << 16 | 50
DELIVER: Final = 60 << 16 | 60
GET_OK: Final = 60 << 16 | 71
ACK: Final = 60 << 16 | 80
REJECT: Final = 60 << 16 | 90
NACK: Final = 60 << 16 | 120
_U32: Final = struct.Struct(">I")
_DELIVER_ID: Final = _U32.pack(DELIVER)
_GET_OK_ID: Final = _U32.pack(GET_OK)
_RETURN_ID: Final = _U32.pack(RETURN)

HEARTBEAT_FRAME: Final = PREFIX.pack(HEARTBEAT, 0, 0) + END


def short(value: str) -> bytes:
    """Return a short string as bytes."""
    data = value.encode("utf-8", "surrogateescape")
    return bytes((len(data),)) + data


def content(channel: int, method: bytes, properties: bytes, body: bytes, frame_max: int) -> bytes:
    """Return a method that carries content, with its header and body frames."""
    size = len(body)
    head = (
        PREFIX.pack(METHOD, channel, len(method)),
        method,
        END,
        _CONTENT.pack(HEADER, channel, 12 + len(properties), 60, 0, size),
        properties,
        END,
    )
    if not size:
        return b"".join(head)
    step = frame_max - OVERHEAD
    if size <= step or step <= 0:
        return b"".join((*head, PREFIX.pack(BODY, channel, size), body, END))
    parts = [*head]
    for start in range(0, size, step):
        part = body[start : start + step]
        parts += PREFIX.pack(BODY, channel, len(part)), part, END
    return b"".join(parts)


def deliver(consumer: bytes, tag: int, redelivered: bool, route: bytes) -> bytes:
    """Return the payload of ``basic.deliver``; ``consumer`` and ``route`` are short strings on the wire."""
    return b"".join((_DELIVER_ID, consumer, _TAG.pack(tag, redelivered), route))


def got(tag: int, redelivered: bool, route: bytes, count: int) -> bytes:
    """Return the payload of ``basic.get-ok``."""
    return b"".join((_GET_OK_ID, _TAG.pack(tag, redelivered), route, _U32.pack(count)))


def returned(code: int, text: str, route: bytes) -> bytes:
    """Return the payload of ``basic.return``."""
    return b"".join((_RETURN_ID, struct.pack(">H", code), short(text), route))


def ack(channel: int, tag: int, multiple: bool) -> bytes:
    """Return the frame of ``basic.ack``."""
    return _SETTLEMENT.pack(METHOD, channel, 13, ACK, tag, multiple, END_MARK)


def nack(channel: int, tag: int) -> bytes:
    """Return the frame of ``basic.nack`` for one message, as RabbitMQ sends it."""
    return _SETTLEMENT.pack(METHOD, channel, 13, NACK, tag, 0, END_MARK)

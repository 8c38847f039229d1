"""AMQP 0-9-1 frames of publishing and consuming, encoded and decoded by hand.

This module covers the frames that pass once per message: publish, deliver, content, acknowledgement. The AMQP library
encodes all others. The functions hold no state and do no I/O. Section numbers are those of the AMQP 0-9-1
specification.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = 8

#: type, channel, size: the start of every frame (4.2.3)
PREFIX: Final = struct.Struct(">BHI")
#: bytes of a frame around its payload: the prefix and the end mark
OVERHEAD: Final = PREFIX.size + 1
END: Final = 0xCE
_END: Final = bytes([END])
#: the largest message RabbitMQ can be configured to take, bytes
MAX_BODY: Final = 536_870_912
#: the smallest limit that a peer may set (1.4.2.5) and the largest that this client agrees to, bytes
FRAME_MIN_SIZE: Final = 4096
LARGEST_FRAME_MAX: Final = 1 << 20

_METHOD_ID: Final = struct.Struct(">HH")
CONNECTION_TUNE: Final = _METHOD_ID.pack(10, 30)
CONNECTION_CLOSE: Final = _METHOD_ID.pack(10, 50)
CONNECTION_BLOCKED: Final = _METHOD_ID.pack(10, 60)
CONNECTION_UNBLOCKED: Final = _METHOD_ID.pack(10, 61)
CONNECTION_UPDATE_SECRET: Final = _METHOD_ID.pack(10, 70)
CONNECTION_UPDATE_SECRET_OK: Final = _METHOD_ID.pack(10, 71)
CONNECTION_CLOSE_OK: Final = _METHOD_ID.pack(10, 51)
CHANNEL_CLOSE: Final = _METHOD_ID.pack(20, 40)
CHANNEL_CLOSE_OK: Final = _METHOD_ID.pack(20, 41)
BASIC_CANCEL: Final = _METHOD_ID.pack(60, 30)
BASIC_PUBLISH: Final = _METHOD_ID.pack(60, 40)
BASIC_RETURN: Final = _METHOD_ID.pack(60, 50)
BASIC_DELIVER: Final = _METHOD_ID.pack(60, 60)
BASIC_GET: Final = _METHOD_ID.pack(60, 70)
BASIC_GET_OK: Final = _METHOD_ID.pack(60, 71)
BASIC_GET_EMPTY: Final = _METHOD_ID.pack(60, 72)
BASIC_ACK: Final = _METHOD_ID.pack(60, 80)
BASIC_NACK: Final = _METHOD_ID.pack(60, 120)
BASIC_REJECT: Final = _METHOD_ID.pack(60, 90)

#: whole frames without arguments
CLOSE_OK: Final = PREFIX.pack(METHOD, 0, len(CONNECTION_CLOSE_OK)) + CONNECTION_CLOSE_OK + _END
HEARTBEAT_FRAME: Final = PREFIX.pack(HEARTBEAT, 0, 0) + _END

_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
#: an acknowledgement from prefix to end mark; the flag is "multiple" or, for reject, "requeue"
_SETTLEMENT: Final = struct.Struct(">BHI4sQBB")
#: a content header up to its properties: frame prefix, class, weight, body size (4.2.6.1)
_CONTENT: Final = struct.Struct(">BHIHHQ")
#: bytes of a header frame beside its properties
CONTENT_OVERHEAD: Final = _CONTENT.size + 1
_BASIC: Final = 60
_MULTIPLE: Final = 1
_REQUEUE: Final = 1


def short_string(text: str) -> bytes:
    """Return a short string (4.2.5.3) as bytes.

    Raises:
        ValueError: more than 255 bytes in UTF-8.
    """
    data = text.encode()
    if len(data) > 255:
        raise ValueError(f"{len(data)} bytes in UTF-8; AMQP carries at most 255")
    return bytes([len(data)]) + data


def update_secret(secret: str, reason: str) -> bytes:
    """Return the frame of ``connection.update-secret``, RabbitMQ's extension."""
    data = secret.encode()
    payload = CONNECTION_UPDATE_SECRET + _U32.pack(len(data)) + data + short_string(reason)
    return PREFIX.pack(METHOD, 0, len(payload)) + payload + _END


def publish(channel: int, exchange: str, routing_key: str, *, mandatory: bool = False) -> bytes:
    """Return the method frame of ``basic.publish``, not immediate."""
    arguments = short_string(exchange) + short_string(routing_key) + (b"\x01" if mandatory else b"\x00")
    payload = BASIC_PUBLISH + b"\x00\x00" + arguments
    return PREFIX.pack(METHOD, channel, len(payload)) + payload + _END


def content(channel: int, properties: bytes, body: bytes, frame_max: int) -> Sequence[bytes]:
    """Return the header and body frames of a message, in pieces to be joined.

    ``properties`` are flags and values as on the wire, ``frame_max`` is the size of the largest frame in bytes.
    """
    size, step = len(body), frame_max - OVERHEAD
    header = _CONTENT.pack(HEADER, channel, 12 + len(properties), _BASIC, 0, size)
    if not size:
        return header, properties, _END
    if size <= step:
        return header, properties, _END, PREFIX.pack(BODY, channel, size), body, _END
    pieces = [header, properties, _END]
    for start in range(0, size, step):
        part = body[start : start + step]
        pieces += PREFIX.pack(BODY, channel, len(part)), part, _END
    return pieces


def ack(channel: int, tag: int, *, multiple: bool) -> bytes:
    """Return the frame of ``basic.ack``."""
    return _SETTLEMENT.pack(METHOD, channel, 13, BASIC_ACK, tag, _MULTIPLE if multiple else 0, END)


def requeue(channel: int, tag: int) -> bytes:
    """Return the frame of a ``basic.reject`` that requeues one message.

    From RabbitMQ 4.3 on, ``basic.nack`` does not count for the delivery limit of a quorum queue.
    """
    return _SETTLEMENT.pack(METHOD, channel, 13, BASIC_REJECT, tag, _REQUEUE, END)


def get(channel: int, queue: str) -> bytes:
    """Return the frame of ``basic.get`` for one message, to be settled."""
    payload = BASIC_GET + b"\x00\x00" + short_string(queue) + b"\x00"
    return PREFIX.pack(METHOD, channel, len(payload)) + payload + _END


def read_settlement(data: bytes, at: int) -> tuple[int, bool]:
    """Return delivery tag and "multiple" of the ``basic.ack`` or ``basic.nack`` whose payload starts at ``at``."""
    (tag,) = _U64.unpack_from(data, at + 4)
    return tag, bool(data[at + 12] & _MULTIPLE)


def read_delivery(data: bytes, at: int, end: int) -> tuple[int, bool, bytes]:
    """Return delivery tag, "redelivered" and route of the ``basic.deliver`` in ``data[at:end]``.

    The route, exchange and routing key, stays as it is on the wire, so that a consumer decodes each route only once,
    with :func:`read_route`.
    """
    at += 5 + data[at + 4]  # the consumer tag: there is one consumer on a channel
    (tag,) = _U64.unpack_from(data, at)
    return tag, bool(data[at + 8]), data[at + 9 : end]


def read_got(data: bytes, at: int, end: int) -> tuple[int, bool, bytes]:
    """Return the same of the ``basic.get-ok`` in ``data[at:end]``, which has a message count at its end."""
    (tag,) = _U64.unpack_from(data, at + 4)
    return tag, bool(data[at + 12]), data[at + 13 : end - 4]


def read_return(data: bytes, at: int, end: int) -> tuple[int, str, str]:
    """Return reply code, reply text and routing key of the ``basic.return`` in ``data[at:end]``."""
    (code,) = _U16.unpack_from(data, at + 4)
    at += 6
    text = data[at + 1 : at + 1 + data[at]].decode("utf-8", "replace")
    return code, text, read_route(data[at + 1 + data[at] : end])[1]


def read_route(route: bytes) -> tuple[str, str]:
    """Return exchange and routing key. Bytes that are not UTF-8 are returned as escapes."""
    size = route[0]
    exchange = route[1 : 1 + size].decode("utf-8", "backslashreplace")
    return exchange, route[2 + size :].decode("utf-8", "backslashreplace")


def read_body_size(data: bytes, at: int) -> int:
    """Return the body size in the content header whose payload starts at ``at``.

    Raises:
        ValueError: the size is larger than any broker delivers.
    """
    size: int = _U64.unpack_from(data, at + 4)[0]
    if size > MAX_BODY:
        raise ValueError(f"a message of {size} bytes")
    return size


def limited(tune: bytes) -> bytes:
    """Return the frame ``tune``, a ``connection.tune``, with a frame size of at most ``LARGEST_FRAME_MAX``.

    Raises:
        struct.error: it is malformed.
    """
    at = PREFIX.size + 6  # the method and channel-max
    (largest,) = _U32.unpack_from(tune, at)
    if 0 < largest <= LARGEST_FRAME_MAX:
        return tune
    return tune[:at] + _U32.pack(LARGEST_FRAME_MAX) + tune[at + 4 :]  # 0 stands for no limit


def read_blocked(data: bytes, at: int, end: int) -> str:
    """Return the reason in the ``connection.blocked`` in ``data[at:end]``."""
    return data[at + 5 : min(end, at + 5 + data[at + 4])].decode("utf-8", "replace")


def read_close(data: bytes, at: int, end: int) -> tuple[int, str]:
    """Return reply code and text of the ``connection.close`` or ``channel.close`` in ``data[at:end]``.

    RabbitMQ cuts a long text off, even within a character, which is left out then.
    """
    (code,) = _U16.unpack_from(data, at + 4)
    return code, data[at + 7 : min(end, at + 7 + data[at + 6])].decode("utf-8", "ignore")

"""Message properties (4.2.6.1) as they are on the wire: scanned for what a broker acts upon, and written again."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from tests.simulation.brokers.amqp import tables
from tests.simulation.brokers.amqp.frames import short
from tests.simulation.brokers.amqp.tables import Table

_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")

CONTENT_TYPE: Final = 1 << 15
CONTENT_ENCODING: Final = 1 << 14
HEADERS: Final = 1 << 13
DELIVERY_MODE: Final = 1 << 12
PRIORITY: Final = 1 << 11
CORRELATION_ID: Final = 1 << 10
REPLY_TO: Final = 1 << 9
EXPIRATION: Final = 1 << 8
MESSAGE_ID: Final = 1 << 7
TIMESTAMP: Final = 1 << 6
TYPE: Final = 1 << 5
USER_ID: Final = 1 << 4
APP_ID: Final = 1 << 3
CLUSTER_ID: Final = 1 << 2

#: the properties in the order of their flags: short string, table, octet or timestamp
_KINDS: Final = "ssFbbsssstssss"


class Scanned(NamedTuple):
    """What a broker acts upon. Texts are ``None`` if the property is missing."""

    delivery_mode: int
    priority: int
    reply_to: bytes | None
    expiration: bytes | None
    user_id: bytes | None
    #: position of the table of headers; 0 if there is none
    headers: int


#: of a message without properties
NOTHING: Final = Scanned(0, 0, None, None, None, 0)


def scan(raw: bytes) -> Scanned:
    """Return what a broker acts upon in the properties ``raw``, flags and values.

    Raises:
        ValueError, IndexError, struct.error: they are malformed.
    """
    (flags,) = _U16.unpack_from(raw)
    if not flags:
        return NOTHING
    at = 2
    mode = priority = headers = 0
    reply_to = expiration = user_id = None
    if flags & CONTENT_TYPE:
        at += 1 + raw[at]
    if flags & CONTENT_ENCODING:
        at += 1 + raw[at]
    if flags & HEADERS:
        headers = at
        at += 4 + _U32.unpack_from(raw, at)[0]
    if flags & DELIVERY_MODE:
        mode = raw[at]
        at += 1
    if flags & PRIORITY:
        priority = raw[at]
        at += 1
    if flags & CORRELATION_ID:
        at += 1 + raw[at]
    if flags & REPLY_TO:
        end = at + 1 + raw[at]
        reply_to = raw[at + 1 : end]
        at = end
    if flags & EXPIRATION:
        end = at + 1 + raw[at]
        expiration = raw[at + 1 : end]
        at = end
    if flags & USER_ID:
        if flags & MESSAGE_ID:
            at += 1 + raw[at]
        if flags & TIMESTAMP:
            at += 8
        if flags & TYPE:
            at += 1 + raw[at]
        end = at + 1 + raw[at]
        user_id = raw[at + 1 : end]
        at = end
    if at > len(raw) or flags & 1:
        raise ValueError("malformed properties")
    return Scanned(mode, priority, reply_to, expiration, user_id, headers)


def split(raw: bytes) -> dict[int, bytes]:
    """Return the values as on the wire, by flag."""
    (flags,) = _U16.unpack_from(raw)
    at, found = 2, {}
    for index, kind in enumerate(_KINDS):
        flag = 1 << (15 - index)
        if flags & flag:
            start = at
            at += {"b": 1, "t": 8}.get(kind, 0) or (4 + _U32.unpack_from(raw, at)[0] if kind == "F" else 1 + raw[at])
            found[flag] = raw[start:at]
    return found


def join(values: dict[int, bytes]) -> bytes:
    """Return properties with these values as on the wire, by flag."""
    return _U16.pack(sum(values)) + b"".join(value for _, value in sorted(values.items(), reverse=True))


def with_headers(raw: bytes, headers: Table, *, keep_expiration: bool = True) -> bytes:
    """Return properties with other headers, and without the expiration unless it is kept."""
    values = split(raw)
    values[HEADERS] = tables.write_table(headers)
    if not keep_expiration:
        values.pop(EXPIRATION, None)
    return join(values)


def with_reply_to(raw: bytes, reply_to: str) -> bytes:
    """Return properties with another reply-to."""
    return join({**split(raw), REPLY_TO: short(reply_to)})


def headers(raw: bytes) -> Table:
    """Return the headers; empty if there are none."""
    found = split(raw).get(HEADERS)
    return {} if found is None else tables.read_table(found, 0)[0]

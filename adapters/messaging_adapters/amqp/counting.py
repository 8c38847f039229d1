"""The header that delayed redelivery adds to a message: the delivery count, and values that would be lost.

``x-delayed-redelivery`` is a table: ``count`` of the deliveries, ``exchange`` and ``routing-key`` of the publish, and
``aside``, the headers that the broker would act upon (see :mod:`.delays`). :func:`recount` adds it to the properties on
the wire, and leaves all other bytes as they are. :func:`restore` undoes this in headers that were read.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from messaging_adapters.amqp import tables

#: the header
DELAYED: Final = "x-delayed-redelivery"
#: the earlier deliveries of a message of a quorum queue; 0 or missing on the first. From RabbitMQ 4.3 on there is the
#: first header as well, and the second one counts failures only
_COUNTS: Final = ("x-acquired-count", "x-delivery-count")

#: the properties in the order of their flags, the highest bit first: short string, table, octet or timestamp (4.2.6.1)
_KINDS: Final = "ssFbbsssstssss"
_HEADERS: Final = 2
_USER_ID: Final = 11
_SIZES: Final = {"b": 1, "t": 8}
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")


def _is_the_brokers(name: str) -> bool:
    """Return whether the broker acts upon a header, or writes it when it dead-letters a message."""
    return name in ("CC", "BCC", "x-death") or name.startswith(("x-first-death-", "x-last-death-"))


def earlier_deliveries(fields: dict[str, Any]) -> int | None:
    """Return how often a quorum queue delivered a message before; ``None`` if the headers do not tell."""
    for name in _COUNTS:
        count = fields.get(name)
        if type(count) is int:
            return count
    return None


def restore(fields: dict[str, Any]) -> tuple[int, tuple[str, str]] | None:
    """Undo :func:`recount` in ``fields``, which has the header.

    Returns:
        The number of earlier deliveries, and exchange and routing key; ``None`` if another program wrote the header.
    """
    delayed = fields[DELAYED]
    if type(delayed) is not dict:
        return None
    count, exchange, key, aside = (delayed.get(name) for name in ("count", "exchange", "routing-key", "aside"))
    if type(count) is not int or type(exchange) is not str or type(key) is not str or type(aside) is not dict:
        return None
    for name in [name for name in fields if name == DELAYED or _is_the_brokers(name)]:
        del fields[name]
    fields |= aside
    return count, (exchange, key)


def recount(raw: bytes, route: bytes, username: str | None) -> tuple[bytes, int]:
    """Return the properties of a message after one more delivery, and the number of its deliveries.

    Args:
        raw: flags and values of the delivery, as on the wire.
        route: exchange and routing key of the delivery, as on the wire: those of the publish unless it was delayed.
        username: the user of the connection; ``user-id`` is left out if it names another user.

    Raises:
        ValueError, IndexError, struct.error: the properties are malformed.
    """
    (flags,) = _U16.unpack_from(raw)
    if flags & 1:
        raise ValueError("unknown properties")
    at, parts = 2, [b"", b"", b""]
    headers, deliveries = _recount_headers(b"\0\0\0\0", 0, 4, route)
    for index, kind in enumerate(_KINDS):
        if not flags & 1 << (15 - index):
            continue
        start = at
        if kind == "F":
            at += 4 + _U32.unpack_from(raw, at)[0]
            headers, deliveries = _recount_headers(raw, start, len(raw), route)
            continue
        at += _SIZES[kind] if kind in _SIZES else 1 + raw[at]
        if at > len(raw):
            raise ValueError("a value ends outside the frame")
        if index == _USER_ID and (username is None or raw[start + 1 : at] != username.encode()):
            flags &= ~(1 << (15 - index))
        else:
            parts[0 if index < _HEADERS else 2] += raw[start:at]
    return b"".join((_U16.pack(flags | 1 << (15 - _HEADERS)), parts[0], headers, parts[2])), deliveries


def _recount_headers(raw: bytes, at: int, end: int, route: bytes) -> tuple[bytes, int]:
    """Return the table at ``at`` with the header written again, and the number of deliveries that it counts."""
    found = [(name, raw[start:after], raw[value:after]) for name, start, value, after in tables.fields(raw, at, end)]
    earlier, counts = 0, {}
    size = route[0]
    exchange, key = route[1 : 1 + size], route[2 + size :]
    aside = b"".join(field for name, field, _ in found if _is_the_brokers(name))
    for name, _, value in found:
        if name in _COUNTS:
            counts[name] = tables.read_field(value, 0, len(value))
        elif name == DELAYED and value[:1] == b"F":
            before = {
                name: part for name, _, at, after in tables.fields(value, 1, len(value)) for part in [value[at:after]]
            }
            if restore({DELAYED: tables.read_table(value, 1, len(value))[0]}) is not None:
                earlier = int(tables.read_field(before["count"], 0, len(before["count"])))
                # each has a type and a size of four bytes; the broker's own headers come from the queue of the delay
                exchange, key, aside = (before[part][5:] for part in ("exchange", "routing-key", "aside"))
    deliveries = earlier + (earlier_deliveries(counts) or 0) + 1
    ours = (
        struct.pack(">B5scq", 5, b"count", b"l", deliveries)
        + tables.field("exchange", b"S", exchange)
        + tables.field("routing-key", b"S", key)
        + tables.field("aside", b"F", aside)
    )
    kept = [part for name, part, _ in found if name not in (DELAYED, *_COUNTS) and not _is_the_brokers(name)]
    table = b"".join((*kept, tables.field(DELAYED, b"F", ours)))
    return _U32.pack(len(table)) + table, deliveries

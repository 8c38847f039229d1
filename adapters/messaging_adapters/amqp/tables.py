"""Field tables (4.2.5.5, with RabbitMQ's errata on the types): read, written, and split into raw fields.

Reading is lenient about values and strict about sizes: a field that ends outside of its table is an error. Tables
nested too deeply are not read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from messaging_adapters.amqp.frames import short_string

_U32: Final = struct.Struct(">I")


def read_short(data: bytes, at: int) -> tuple[str, int]:
    """Return a short string and the position after it."""
    end = at + 1 + data[at]
    # escapes rather than replacement characters: two different ids stay different
    return data[at + 1 : end].decode("utf-8", "backslashreplace"), end


#: deepest nesting of tables that is read, far below Python's recursion limit
_MAX_DEPTH: Final = 16
_TOO_DEEP: Final = "<nested too deeply>"

_FIXED: Final[Mapping[int, struct.Struct]] = {
    ord(kind): struct.Struct(">" + code)
    for kind, code in {
        "t": "?", "b": "b", "B": "B", "s": "h", "u": "H", "I": "i", "i": "I", "l": "q", "L": "q", "f": "f", "d": "d",
    }.items()
}  # fmt: skip
_DECIMAL: Final = struct.Struct(">BI")
_U64: Final = struct.Struct(">Q")
#: the last second that a datetime holds, since the epoch; some programs write milliseconds
_MAX_TIME: Final = 253_402_300_799


def read_table(data: bytes, at: int, end: int, depth: int = 0) -> tuple[dict[str, Any], int]:
    """Return a table and the position after it."""
    at, stop = _extent(data, at, end)
    table: dict[str, Any] = {}
    while at < stop:
        name, at = read_short(data, at)
        table[name], at = _read_field(data, at, stop, depth)
    return table, _ended(at, stop)


def _read_array(data: bytes, at: int, end: int, depth: int) -> tuple[list[Any], int]:
    at, stop = _extent(data, at, end)
    array = []
    while at < stop:
        value, at = _read_field(data, at, stop, depth)
        array.append(value)
    return array, _ended(at, stop)


def _ended(at: int, stop: int) -> int:
    if at != stop:
        raise ValueError("a field ends outside its table")
    return stop


def _read_text(data: bytes, at: int, end: int, _depth: int) -> tuple[str, int]:
    at, stop = _extent(data, at, end)
    value = data[at:stop]
    try:
        return value.decode(), stop
    except UnicodeDecodeError:
        return value.hex(), stop


def _read_bytes(data: bytes, at: int, end: int, _depth: int) -> tuple[bytes, int]:
    at, stop = _extent(data, at, end)
    return data[at:stop], stop


def _extent(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return begin and end of a value that starts with its size."""
    (size,) = _U32.unpack_from(data, at)
    at += 4
    if at + size > end:
        raise ValueError("a field ends outside its table")
    return at, at + size


_SIZED: Final[Mapping[int, Callable[[bytes, int, int, int], tuple[Any, int]]]] = {
    ord("S"): _read_text,
    ord("x"): _read_bytes,
    ord("F"): read_table,
    ord("A"): _read_array,
}


def _read_field(data: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:
    kind = data[at]
    at += 1
    sized = _SIZED.get(kind)
    if sized is not None:
        if depth == _MAX_DEPTH and kind in b"FA":
            return _TOO_DEEP, _extent(data, at, end)[1]
        return sized(data, at, end, depth + 1)
    fixed = _FIXED.get(kind)
    if fixed is not None:
        return fixed.unpack_from(data, at)[0], at + fixed.size
    if kind == ord("D"):
        places, digits = _DECIMAL.unpack_from(data, at)
        return Decimal(digits).scaleb(-places), at + _DECIMAL.size
    if kind == ord("T"):
        (seconds,) = _U64.unpack_from(data, at)
        return (datetime.fromtimestamp(seconds, UTC) if seconds <= _MAX_TIME else seconds), at + _U64.size
    if kind in b"V\x00":
        return None, at
    raise ValueError(f"unknown field type {kind:#04x}")


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield the fields of the table at ``at``: name, and positions of the field, its value and the next field."""
    at, stop = _extent(data, at, end)
    while at < stop:
        name, value = read_short(data, at)
        after = _skip(data, value, stop)
        yield name, at, value, after
        at = after
    _ended(at, stop)


def read_field(data: bytes, at: int, end: int) -> Any:
    """Return the value of a field."""
    return _read_field(data, at, end, 0)[0]


def _skip(data: bytes, at: int, end: int) -> int:
    kind = data[at]
    if kind in _SIZED:
        return _extent(data, at + 1, end)[1]
    return _read_field(data, at, end, 0)[1]


def field(name: str, kind: bytes, content: bytes) -> bytes:
    """Return a field of text (``S``), which need not be UTF-8, or of a table (``F``)."""
    return short_string(name) + kind + _U32.pack(len(content)) + content


# --- writing


def write_table(fields: Mapping[str, Any]) -> bytes:
    """Return a table of checked header values, see :mod:`messaging.model.headers`. Times are cut to whole seconds.

    Raises:
        ValueError: a name has more than 255 bytes in UTF-8.
    """
    parts: list[bytes] = []
    for name, value in fields.items():
        parts += short_string(name), _field(value)
    content = b"".join(parts)
    return _U32.pack(len(content)) + content


def _field(value: Any) -> bytes:
    """Return type and value of a field."""
    if isinstance(value, str):
        text = value.encode()
        return b"S" + _U32.pack(len(text)) + text
    writer = _WRITERS.get(type(value))
    if writer is not None:
        return writer(value)
    # received messages and bindings may have any kinds of mappings and sequences
    if isinstance(value, Mapping):
        return b"F" + write_table(value)
    content = b"".join(map(_field, value))
    return b"A" + _U32.pack(len(content)) + content


def _integer(value: int) -> bytes:
    return struct.pack(">ci", b"I", value) if -(2**31) <= value < 2**31 else struct.pack(">cq", b"l", value)


def _decimal(value: Decimal) -> bytes:
    places = -int(value.as_tuple().exponent)
    return b"D" + _DECIMAL.pack(places, int(value.scaleb(places)))


_WRITERS: Final[Mapping[type, Callable[[Any], bytes]]] = {
    bool: lambda value: b"t\x01" if value else b"t\x00",
    int: _integer,
    float: lambda value: struct.pack(">cd", b"d", value),
    bytes: lambda value: b"x" + _U32.pack(len(value)) + value,
    Decimal: _decimal,
    datetime: lambda value: struct.pack(">cQ", b"T", int(value.timestamp())),
    type(None): lambda _: b"V",
}

"""Field tables (4.2.5.5, with RabbitMQ's errata on the types): read, shown as text, and taken apart as they are.

Reading is lenient about values and strict about sizes: what claims to reach beyond its table is an error, what nests
deeper than anybody needs is not followed.
"""

from __future__ import annotations

import json
import math
import struct
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_U32: Final = struct.Struct(">I")


def read_short(data: bytes, at: int) -> tuple[str, int]:
    """A short string, and where it ends."""
    end = at + 1 + data[at]
    # escapes rather than replacement characters: two different ids stay different
    return data[at + 1 : end].decode("utf-8", "backslashreplace"), end


#: tables in tables in tables...: as deep as anybody needs, and far from Python's own limit
_MAX_DEPTH: Final = 16
_TOO_DEEP: Final = "<nested too deeply>"

_FIXED: Final[Mapping[int, struct.Struct]] = {
    ord(kind): struct.Struct(">" + code)
    for kind, code in {
        "t": "?", "b": "b", "B": "B", "s": "h", "u": "H", "I": "i", "i": "I", "l": "q", "L": "q", "f": "f", "d": "d",
        "T": "Q",
    }.items()
}  # fmt: skip
_DECIMAL: Final = struct.Struct(">BI")


def read_table(data: bytes, at: int, end: int, depth: int = 0) -> tuple[dict[str, Any], int]:
    """A table, and where it ends."""
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


def _read_bytes(data: bytes, at: int, end: int, _depth: int) -> tuple[str, int]:
    at, stop = _extent(data, at, end)
    value = data[at:stop]
    try:
        return value.decode(), stop
    except UnicodeDecodeError:
        return value.hex(), stop


def _extent(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Where what starts with its size begins and ends."""
    (size,) = _U32.unpack_from(data, at)
    at += 4
    if at + size > end:
        raise ValueError("a field ends outside its table")
    return at, at + size


_SIZED: Final[Mapping[int, Callable[[bytes, int, int, int], tuple[Any, int]]]] = {
    ord("S"): _read_bytes,
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
    if kind in b"V\x00":
        return None, at
    raise ValueError(f"unknown field type {kind:#04x}")


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[str, int, int, int]]:
    """The fields of the table at ``at``: name, and where the field, its value and the next field begin."""
    at, stop = _extent(data, at, end)
    while at < stop:
        name, value = read_short(data, at)
        after = _skip(data, value, stop)
        yield name, at, value, after
        at = after
    _ended(at, stop)


def read_field(data: bytes, at: int, end: int) -> Any:
    """The value of a field."""
    return _read_field(data, at, end, 0)[0]


def _skip(data: bytes, at: int, end: int) -> int:
    kind = data[at]
    if kind in _SIZED:
        return _extent(data, at + 1, end)[1]
    return _read_field(data, at, end, 0)[1]


def text_field(name: str, value: bytes) -> bytes:
    """A field of text, from bytes that may be none in UTF-8."""
    return _name(name) + b"S" + _U32.pack(len(value)) + value


def number_field(name: str, value: int) -> bytes:
    """A field with a 64-bit number."""
    return _name(name) + b"l" + struct.pack(">q", value)


def table_field(name: str, content: bytes) -> bytes:
    """A field with a table."""
    return _name(name) + b"F" + _U32.pack(len(content)) + content


def _name(name: str) -> bytes:
    data = name.encode()
    return bytes([len(data)]) + data


def as_text(value: Any) -> str:
    """A header field as text: numbers in decimal, truth values and structures as JSON, nothing as empty text."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, (bool, dict, list)):
        return json.dumps(_jsonable(value), ensure_ascii=False, separators=(",", ":"))
    return str(value)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _jsonable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_jsonable(each) for each in value]
    if isinstance(value, Decimal) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value

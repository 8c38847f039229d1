"""Field tables (4.2.5.5, with RabbitMQ's errata) whose values keep their types.

A field is a pair of its type, one character, and its value: arguments are compared, and headers matched, by both.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_U32: Final = struct.Struct(">I")


class Field(NamedTuple):
    """A value of a table. The value of ``S`` and ``x`` is ``bytes``, of ``F`` a table, of ``A`` a list of fields."""

    kind: str
    value: Any


Table = dict[str, Field]

_FIXED: Final[Mapping[str, struct.Struct]] = {
    kind: struct.Struct(">" + code)
    for kind, code in {
        "t": "?", "b": "b", "B": "B", "s": "h", "u": "H", "I": "i", "i": "I", "l": "q", "L": "q", "f": "f", "d": "d",
        "T": "Q",
    }.items()
}  # fmt: skip
_DECIMAL: Final = struct.Struct(">BI")

#: how RabbitMQ names the types in texts
TYPE_NAMES: Final = {
    "S": "longstr", "I": "signedint", "i": "unsignedint", "D": "decimal", "T": "timestamp", "F": "table", "A": "array",
    "b": "byte", "B": "unsignedbyte", "d": "double", "f": "float", "l": "long", "L": "long", "s": "short",
    "u": "unsignedshort", "t": "bool", "x": "binary", "V": "void",
}  # fmt: skip
#: types that hold integers
INTEGERS: Final = "bBsuIilL"


def text(value: str) -> Field:
    """Return a field of text."""
    return Field("S", value.encode())


def long(value: int) -> Field:
    """Return a field of a signed integer of 64 bits."""
    return Field("l", value)


def read_table(data: bytes, at: int) -> tuple[Table, int]:
    """Return the table at ``at``, and the position after it.

    Raises:
        ValueError, IndexError, struct.error: it is malformed.
    """
    (size,) = _U32.unpack_from(data, at)
    at += 4
    stop = at + size
    if stop > len(data):
        raise ValueError("a table ends outside its frame")
    table: Table = {}
    while at < stop:
        after = at + 1 + data[at]
        name = data[at + 1 : after].decode("utf-8", "surrogateescape")
        table[name], at = _read_field(data, after)
    if at != stop:
        raise ValueError("a field ends outside its table")
    return table, stop


def _read_field(data: bytes, at: int) -> tuple[Field, int]:
    kind = chr(data[at])
    at += 1
    fixed = _FIXED.get(kind)
    if fixed is not None:
        return Field(kind, fixed.unpack_from(data, at)[0]), at + fixed.size
    if kind in "Sx":
        (size,) = _U32.unpack_from(data, at)
        return Field(kind, data[at + 4 : at + 4 + size]), at + 4 + size
    if kind == "F":
        table, at = read_table(data, at)
        return Field(kind, table), at
    if kind == "A":
        stop = at + 4 + _U32.unpack_from(data, at)[0]
        at += 4
        array: list[Field] = []
        while at < stop:
            field, at = _read_field(data, at)
            array.append(field)
        return Field(kind, array), at
    if kind == "D":
        return Field(kind, _DECIMAL.unpack_from(data, at)), at + _DECIMAL.size
    if kind == "V":
        return Field(kind, None), at
    raise ValueError(f"unknown field type {kind!r}")


def write_table(table: Mapping[str, Field]) -> bytes:
    """Return a table as bytes."""
    content = b"".join(_short(name) + _write_field(field) for name, field in table.items())
    return _U32.pack(len(content)) + content


def _short(name: str) -> bytes:
    data = name.encode("utf-8", "surrogateescape")
    return bytes([len(data)]) + data


def _write_field(field: Field) -> bytes:
    kind, value = field
    code = kind.encode()
    if kind in _FIXED:
        return code + _FIXED[kind].pack(value)
    if kind in "Sx":
        data: bytes = value
        return code + _U32.pack(len(data)) + data
    if kind == "F":
        return code + write_table(value)
    if kind == "A":
        content = b"".join(map(_write_field, value))
        return code + _U32.pack(len(content)) + content
    return code + (_DECIMAL.pack(*value) if kind == "D" else b"")


def sort(table: Table) -> Table:
    """Return a table with its fields ordered by name, as RabbitMQ writes the tables that it has changed."""
    return dict(sorted(table.items()))

"""Data types of Sparkplug B, and their values on the wire (Sparkplug 3.0, 6.4.16)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final

from messaging.errors import DecodeError, EncodeError


class DataType(IntEnum):
    """The type of a value, with the names and numbers of the specification."""

    Int8 = 1
    Int16 = 2
    Int32 = 3
    Int64 = 4
    UInt8 = 5
    UInt16 = 6
    UInt32 = 7
    UInt64 = 8
    Float = 9
    Double = 10
    Boolean = 11
    String = 12
    DateTime = 13
    Text = 14
    UUID = 15
    DataSet = 16
    Bytes = 17
    File = 18
    Template = 19
    PropertySet = 20
    PropertySetList = 21
    Int8Array = 22
    Int16Array = 23
    Int32Array = 24
    Int64Array = 25
    UInt8Array = 26
    UInt16Array = 27
    UInt32Array = 28
    UInt64Array = 29
    FloatArray = 30
    DoubleArray = 31
    BooleanArray = 32
    StringArray = 33
    DateTimeArray = 34


#: types of data set columns, template parameters and simple properties
BASIC: Final = frozenset(DataType(number) for number in range(DataType.Int8, DataType.Text + 1))
ARRAYS: Final = frozenset(DataType(number) for number in range(DataType.Int8Array, DataType.DateTimeArray + 1))
#: types of metrics
METRIC: Final = frozenset(DataType) - {DataType.PropertySet, DataType.PropertySetList}

#: bits and sign of the integer types
_INTEGERS: Final[Mapping[DataType, tuple[int, bool]]] = {
    DataType.Int8: (8, True),
    DataType.Int16: (16, True),
    DataType.Int32: (32, True),
    DataType.Int64: (64, True),
    DataType.UInt8: (8, False),
    DataType.UInt16: (16, False),
    DataType.UInt32: (32, False),
    DataType.UInt64: (64, False),
    DataType.DateTime: (64, True),
}
_TEXTS: Final = frozenset({DataType.String, DataType.Text, DataType.UUID})
_BINARY: Final = frozenset({DataType.Bytes, DataType.File})
#: ``struct`` codes of array items
_ITEMS: Final[Mapping[DataType, str]] = {
    DataType.Int8Array: "b",
    DataType.Int16Array: "h",
    DataType.Int32Array: "i",
    DataType.Int64Array: "q",
    DataType.UInt8Array: "B",
    DataType.UInt16Array: "H",
    DataType.UInt32Array: "I",
    DataType.UInt64Array: "Q",
    DataType.FloatArray: "f",
    DataType.DoubleArray: "d",
    DataType.DateTimeArray: "q",
}
#: the field of a message that holds a value
_FIELDS: Final[Mapping[DataType, str]] = {
    **{kind: "long_value" if bits == 64 else "int_value" for kind, (bits, _) in _INTEGERS.items()},
    **dict.fromkeys(_TEXTS, "string_value"),
    **dict.fromkeys(_BINARY | ARRAYS, "bytes_value"),
    DataType.Float: "float_value",
    DataType.Double: "double_value",
    DataType.Boolean: "boolean_value",
    DataType.DataSet: "dataset_value",
    DataType.Template: "template_value",
    DataType.PropertySet: "propertyset_value",
    DataType.PropertySetList: "propertysets_value",
}
_FIELD_BITS: Final = {"int_value": 32, "long_value": 64}
_COUNT: Final = struct.Struct("<I")
_FLOAT: Final = struct.Struct("<f")


def data_type(number: int, allowed: frozenset[DataType]) -> DataType | None:
    """Return the type with a number; ``None`` for 0, which is no type.

    Raises:
        DecodeError: it is no type, or none of those that are allowed there.
    """
    if number == 0:
        return None
    try:
        found = DataType(number)
    except ValueError:
        raise DecodeError(f"there is no data type {number}; there are 1 (Int8) to 34 (DateTimeArray)") from None
    if found not in allowed:
        raise DecodeError(f"the data type {found.name} is not allowed here")
    return found


# --- values that one field of a message holds


def read_scalar(kind: DataType, field: str, value: Any) -> Any:
    """Return the value of a field of a message, such as ``int_value``.

    Negative integers are two's complement, of the width of their type or of the field: publishers do either.

    Raises:
        DecodeError: the type is transmitted in another field, or the value is out of its range.
    """
    if kind in _INTEGERS:
        bits, is_signed = _INTEGERS[kind]
        field_bits = _FIELD_BITS.get(field, 0)
        if field_bits < bits:
            raise _wrong_field(kind, field)
        return _integer(kind, value, bits, field_bits, is_signed=is_signed)
    # publishers may send a Double as a 32-bit number
    if field != _FIELDS[kind] and (kind, field) != (DataType.Double, "float_value"):
        raise _wrong_field(kind, field)
    if field == "float_value":
        return shortest(value)
    return read_text(value) if kind in _TEXTS else value


def _integer(kind: DataType, value: int, bits: int, field_bits: int, *, is_signed: bool) -> int:
    if value < 1 << bits:
        return value - (1 << bits) if is_signed and value >= 1 << (bits - 1) else value
    if is_signed and value >= (1 << field_bits) - (1 << (bits - 1)):
        return value - (1 << field_bits)
    raise DecodeError(f"{value} is out of the range of {kind.name}")


def _wrong_field(kind: DataType, field: str) -> DecodeError:
    return DecodeError(f"a value of type {kind.name} is transmitted as {_FIELDS[kind]}, not as {field}")


def read_text(value: Any) -> str:
    """Return the text of a field. Raises ``DecodeError``: it is not UTF-8."""
    if not isinstance(value, str):  # protobuf returns the bytes
        raise DecodeError("a text is not UTF-8")
    return value


def shortest(value: float) -> float:
    """Return a short decimal number that is the same 32-bit number: 12.1 rather than 12.100000381469727."""
    if not math.isfinite(value):
        return value
    for digits in range(6, 9):
        found = float(f"{value:.{digits}g}")
        try:
            if _FLOAT.unpack(_FLOAT.pack(found))[0] == value:
                return found
        except OverflowError:
            pass
    return float(f"{value:.9g}")


def write_scalar(kind: DataType, value: Any) -> tuple[str, Any]:
    """Return the field of a message, and what it holds.

    Raises:
        EncodeError: the value is not of the type, or out of its range.
    """
    if kind in _INTEGERS:
        bits, is_signed = _INTEGERS[kind]
        least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise EncodeError(f"{kind.name} must be an int from {least} to {most}, not {_shown(value)}")
        return _FIELDS[kind], value if value >= 0 else value + (1 << bits)
    if kind in (DataType.Float, DataType.Double):
        return _FIELDS[kind], _number(kind, value)
    expected: type = str if kind in _TEXTS else bytes if kind in _BINARY else bool
    if kind is not DataType.Boolean and expected is bool:
        raise EncodeError(f"a value of type {kind.name} is not allowed here")
    if not isinstance(value, expected):
        raise EncodeError(f"{kind.name} must be a {expected.__name__}, not {_shown(value)}")
    return _FIELDS[kind], check_text(value) if isinstance(value, str) else value


def _number(kind: DataType, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise EncodeError(f"{kind.name} must be a float, not {_shown(value)}")
    try:
        found = float(value)
        if kind is DataType.Float:
            _FLOAT.pack(found)
    except OverflowError:
        raise EncodeError(f"{kind.name}: {_shown(value)} is too large") from None
    return found


def check_text(value: Any) -> str:
    """Return a text that UTF-8 can express. Raises ``EncodeError`` for any other text."""
    if not isinstance(value, str):
        raise EncodeError(f"must be a str, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EncodeError("a text has surrogates, which UTF-8 cannot express") from None
    return str.__str__(value)


def _shown(value: Any) -> str:
    return f"{value}" if isinstance(value, float) else type(value).__name__ if not isinstance(value, int) else "this"


# --- arrays, packed in little endian order


def read_array(kind: DataType, packed: bytes, take: Callable[[int], None]) -> tuple[Any, ...]:
    """Return the items of an array.

    Args:
        take: is called with the number of items before they are made; raises if they are too many.

    Raises:
        DecodeError: the bytes are no array of this type.
    """
    if kind is DataType.BooleanArray:
        return _read_booleans(packed, take)
    if kind is DataType.StringArray:
        take(packed.count(b"\0"))
        if packed and not packed.endswith(b"\0"):
            raise DecodeError("the last text of a StringArray does not end with a zero byte")
        try:
            return tuple(packed[:-1].decode().split("\0")) if packed else ()
        except UnicodeDecodeError:
            raise DecodeError("a text of a StringArray is not UTF-8") from None
    code = _ITEMS[kind]
    size = struct.calcsize(f"<{code}")
    if len(packed) % size:
        raise DecodeError(f"{len(packed)} bytes are no {kind.name}: an item has {size} bytes")
    take(len(packed) // size)
    found = struct.unpack(f"<{len(packed) // size}{code}", packed)
    return tuple(map(shortest, found)) if kind is DataType.FloatArray else found


def _read_booleans(packed: bytes, take: Callable[[int], None]) -> tuple[bool, ...]:
    if len(packed) < _COUNT.size:
        raise DecodeError("a BooleanArray begins with the number of its items, in 4 bytes")
    (count,) = _COUNT.unpack_from(packed)
    if (count + 7) // 8 != len(packed) - _COUNT.size:
        raise DecodeError(f"a BooleanArray of {count} items has {(count + 7) // 8} bytes with items")
    take(count)
    # the first item is the highest bit
    return tuple(bool(packed[4 + index // 8] & 0x80 >> index % 8) for index in range(count))


def write_array(kind: DataType, items: Any) -> bytes:
    """Return the packed items of an array.

    Raises:
        EncodeError: they are no sequence, or an item is not of the type.
    """
    if not isinstance(items, (list, tuple)):
        raise EncodeError(f"{kind.name} must be a list or a tuple, not {type(items).__name__}")
    item = DataType[kind.name.removesuffix("Array")]
    for each in items:
        write_scalar(item, each)
    if kind is DataType.StringArray:
        if any("\0" in each for each in items):
            raise EncodeError("a text of a StringArray must not hold the character U+0000, which ends it")
        return b"".join(each.encode() + b"\0" for each in items)
    if kind is DataType.BooleanArray:
        bits = bytearray((len(items) + 7) // 8)
        for index, each in enumerate(items):
            bits[index // 8] |= (0x80 >> index % 8) if each else 0
        return _COUNT.pack(len(items)) + bytes(bits)
    return struct.pack(f"<{len(items)}{_ITEMS[kind]}", *items)

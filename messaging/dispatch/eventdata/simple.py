"""Conversion to simple values, which have no parts: see the table of :mod:`messaging.dispatch.eventdata.conversion`.

pydantic converts to UUIDs and regular expressions, and texts to time spans. Its rules for the other types contradict
OSGi's: it refuses numbers with a fraction for ``int``, other types for ``str`` and ``None`` for numbers, counts dates
in seconds, and accepts bytes for ``bool`` and ``int``.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import numbers
import operator
import pathlib
import re
import uuid
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter, ValidationError

from messaging.codecs.bounds import is_vast, is_vast_text
from messaging.dispatch.eventdata.maps import as_data
from messaging.dispatch.eventdata.problems import fail
from messaging.dispatch.eventdata.schema import COMMON, is_collection, is_simple, schema_of
from messaging.errors import ConversionError, InvalidEventError

Converter: TypeAlias = Callable[[Any], Any]

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_TIMEDELTA: Final = TypeAdapter(datetime.timedelta)
_UUID: Final = TypeAdapter(uuid.UUID)
_PATTERN: Final[TypeAdapter[re.Pattern[Any]]] = TypeAdapter(re.Pattern)
_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0", ""})


def instance_check(type_: type[Any]) -> Callable[[Any], bool]:
    """Return a function that tests for instances of a class. It returns ``False`` if the class has no such test."""
    with contextlib.suppress(Exception):  # raised by a protocol that is not runtime_checkable, for example
        isinstance(None, type_)
        return lambda value: isinstance(value, type_)
    return lambda _: False


def to_data(value: Any) -> Any:
    """Convert to ``Any``: data without schemas."""
    try:
        return as_data(value)
    except InvalidEventError as error:
        raise ConversionError("", str(error)) from None


def to_none(value: Any) -> None:
    """Refuse a value where ``None`` is wanted; ``None`` itself is passed on before."""
    raise fail(value, "None")


def _single(convert_one: Converter) -> Converter:
    """Return a converter that converts the first element of a collection, and other values themselves."""

    def converter(value: Any) -> Any:
        if type(value) not in COMMON:
            value = unwrapped(value)
            if is_collection(value):
                value = next(iter(value), None)
        return convert_one(value)

    return converter


def unwrapped(value: Any) -> Any:
    """Return the content of a ``RootModel``; any other value itself."""
    if not is_simple(value):
        schema = schema_of(type(value))
        if schema is not None and schema.is_root:
            return unwrapped(value.root)
    return value


def _to_bool(value: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, numbers.Number):
        return bool(value)
    text = value.strip().lower() if isinstance(value, str) else None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise fail(value, "a bool")


def _milliseconds(value: datetime.date) -> float:
    if not isinstance(value, datetime.datetime):
        value = datetime.datetime.combine(value, datetime.time())
    if value.tzinfo is None:
        value = value.replace(tzinfo=datetime.UTC)
    return (value - _EPOCH) / datetime.timedelta(milliseconds=1)


def _to_number(type_: Callable[[Any], Any], wanted: str) -> Converter:
    def converter(value: Any) -> Any:
        if isinstance(value, enum.Enum) and not isinstance(value, numbers.Number):
            value = value.value
        try:
            if value is None:
                return type_(0)
            if isinstance(value, str):
                return type_(value.strip())
            if isinstance(value, datetime.date):
                return type_(_milliseconds(value))
            if isinstance(value, datetime.timedelta):
                return type_(value.total_seconds())
            if isinstance(value, numbers.Number) and not is_vast(value):
                return type_(value)
        except (ValueError, TypeError, ArithmeticError):
            pass
        raise fail(value, wanted)

    return converter


def _decimal(value: Any) -> decimal.Decimal:
    return decimal.Decimal(repr(float(value)) if isinstance(value, float) else value)


def _fraction(value: Any) -> fractions.Fraction:
    if isinstance(value, str) and is_vast_text(value):
        raise ValueError("exponent out of bounds")
    return fractions.Fraction(value)


def _to_str(value: Any) -> str:
    if isinstance(value, str):
        return str.__str__(value.value if isinstance(value, enum.Enum) else value)
    if isinstance(value, enum.Enum):
        # Flags without any bit, or with unknown bits, have no name.
        return str(value.value) if value.name is None else value.name
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return str(_TIMEDELTA.dump_python(value, mode="json"))
    if isinstance(value, re.Pattern):
        value = value.pattern
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            value = b""
    elif is_simple(value) and value is not None and not isinstance(value, type):
        return str(value)
    raise fail(value, "a str")


def _to_bytes(value: Any) -> bytes:
    value = unwrapped(value)
    try:
        if is_collection(value):
            parts = [*value]
            return bytes(parts) if all(isinstance(each, int) for each in parts) else _to_bytes(parts[0])
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value)
    except ValueError:
        value = ""
    raise fail(value, "bytes")


def _to_datetime(value: Any) -> datetime.datetime:
    if isinstance(value, datetime.datetime):
        return value
    if isinstance(value, datetime.date):
        return datetime.datetime.combine(value, datetime.time())
    try:
        if isinstance(value, str):
            return datetime.datetime.fromisoformat(value.strip())
        if isinstance(value, (int, float, decimal.Decimal)) and not isinstance(value, bool):
            return _EPOCH + datetime.timedelta(milliseconds=float(value))
    except (ValueError, OverflowError):
        pass
    raise fail(value, "a datetime")


def _to_date(value: Any) -> datetime.date:
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value
    return _to_datetime(value).date()


def _to_time(value: Any) -> datetime.time:
    if isinstance(value, datetime.time):
        return value
    if isinstance(value, str):
        try:
            return datetime.time.fromisoformat(value.strip())
        except ValueError:
            pass
    return _to_datetime(value).timetz()


def _to_timedelta(value: Any) -> datetime.timedelta:
    if isinstance(value, datetime.timedelta):
        return value
    try:
        if isinstance(value, str):
            return _TIMEDELTA.validate_python(value.strip())
        if isinstance(value, (int, float, decimal.Decimal)) and not isinstance(value, bool):
            return datetime.timedelta(seconds=float(value))
    except (ValueError, OverflowError):
        pass
    raise fail(value, "a timedelta")


def _to_uuid(value: Any) -> uuid.UUID:
    try:
        return _UUID.validate_python(value.strip() if isinstance(value, str) else value)
    except ValidationError:
        raise fail(value, "a UUID") from None


def _to_pattern(value: Any) -> re.Pattern[Any]:
    with contextlib.suppress(Exception):  # beside ValidationError a warning of re.compile() that is an error
        return _PATTERN.validate_python(value)
    raise fail(value, "a regular expression")


def _to_path(type_: type[pathlib.PurePath]) -> Converter:
    def converter(value: Any) -> pathlib.PurePath:
        if isinstance(value, type_):
            return value
        if isinstance(value, (str, pathlib.PurePath)):
            return type_(value)
        raise fail(value, "a path")

    return converter


#: converter and family of each type
SIMPLE: Final[dict[type[Any], tuple[Converter, str]]] = {
    bool: (_single(_to_bool), "bool"),
    int: (_single(_to_number(int, "an int")), "number"),
    float: (_single(_to_number(float, "a float")), "number"),
    complex: (_single(_to_number(complex, "a complex")), "number"),
    decimal.Decimal: (_single(_to_number(_decimal, "a Decimal")), "number"),
    fractions.Fraction: (_single(_to_number(_fraction, "a Fraction")), "number"),
    str: (_single(_to_str), "text"),
    bytes: (_to_bytes, "bytes"),
    bytearray: (lambda value: bytearray(_to_bytes(value)), "bytes"),
    memoryview: (lambda value: memoryview(_to_bytes(value)), "bytes"),
    datetime.datetime: (_single(_to_datetime), "time"),
    datetime.date: (_single(_to_date), "time"),
    datetime.time: (_single(_to_time), "time"),
    datetime.timedelta: (_single(_to_timedelta), "time"),
    uuid.UUID: (_single(_to_uuid), "other"),
    re.Pattern: (_single(_to_pattern), "other"),
    pathlib.Path: (_single(_to_path(pathlib.Path)), "other"),
    pathlib.PurePath: (_single(_to_path(pathlib.PurePath)), "other"),
    pathlib.PurePosixPath: (_single(_to_path(pathlib.PurePosixPath)), "other"),
    pathlib.PureWindowsPath: (_single(_to_path(pathlib.PureWindowsPath)), "other"),
}


def to_subclass(type_: type[Any], convert_to_base: Converter) -> Converter:
    """Return a converter to a subclass of a simple type."""
    is_instance = instance_check(type_)
    return lambda value: value if is_instance(value) else type_(convert_to_base(value))


def to_enum(type_: type[enum.Enum]) -> Converter:
    """Return a converter to members: from the member itself, its value, its name or its position."""
    by_name = type_.__members__
    by_text = {str(each.value): each for each in reversed([*type_]) if isinstance(each.value, (str, int, float))}
    by_text |= {name.casefold(): each for name, each in by_name.items() if name.casefold() not in by_text}
    by_position = [] if any(isinstance(each.value, numbers.Number) for each in type_) else [*type_]
    make = _strict_flag(type_) if _FLAGS_DROP_BITS and issubclass(type_, enum.Flag) else type_

    def converter(value: Any) -> Any:
        if isinstance(value, type_):
            return value
        if isinstance(value, enum.Enum):
            if value.name in by_name:
                return by_name[value.name]
            value = value.value
        with contextlib.suppress(Exception):  # its _missing_ may raise anything
            return make(value)
        if isinstance(value, str):
            if value in by_name:
                return by_name[value]
            for text in (value.strip(), value.strip().casefold()):
                if text in by_text:
                    return by_text[text]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if str(value) in by_text:
                return by_text[str(value)]
            if value in range(len(by_position)):
                return by_position[int(value)]
        raise fail(value, f"a member of {type_.__name__}")

    def of_first(value: Any) -> Any:
        try:
            return converter(value)  # the value of a member may be a collection
        except ConversionError:
            if not is_collection(value) or not value:
                raise
        return converter(next(iter(value)))

    return of_first


def _boundary(type_: type[enum.Flag]) -> Any:
    """Return how a class of flags treats unknown bits, as a member of ``enum.FlagBoundary``."""
    return getattr(type_, "_boundary_", None)


#: Whether flags drop unknown bits by default, as in Python 3.11.0 to 3.11.3; later versions refuse them. In the earlier
#: versions a class with an explicit ``boundary=CONFORM`` cannot be distinguished from the others.
_FLAGS_DROP_BITS: Final = _boundary(enum.Flag) is enum.CONFORM


def _strict_flag(type_: type[enum.Flag]) -> Callable[[Any], enum.Flag]:
    """Return the constructor of ``type_``, with ``boundary=STRICT`` in place of ``CONFORM``."""
    if _boundary(type_) is not enum.CONFORM:
        return type_
    known = functools.reduce(operator.or_, (each.value for each in type_.__members__.values()), 0)
    highest = 2 ** known.bit_length() - 1

    def make(value: Any) -> enum.Flag:
        if isinstance(value, int) and (not ~highest <= value <= highest or value & (highest ^ known)):
            raise ValueError("unknown bits")
        return type_(value)

    return make

"""What conversion is made of: compiled types, the converters to simple values, and the errors.

The rules are in :mod:`messaging.dispatch.eventdata.conversion`. Simple values have no parts. The errors say where the
data is wrong and why, and never contain the value.

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
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core.core_schema import ErrorType

from messaging.codecs.bounds import holds_vast, is_vast, is_vast_text
from messaging.dispatch.eventdata.maps import as_data
from messaging.dispatch.eventdata.schema import COMMON, Schema, has_fields, is_collection, is_simple, schema_of
from messaging.errors import ConversionError, InvalidEventError

#: characters that an error shows of a path, of a key in it, and of a type
_SHOWN_PATH: Final = 300
SHOWN_KEY: Final = 80
SHOWN_TYPE: Final = 80
#: of a pydantic error with more problems than this, only their number is shown: describing each costs memory
_MANY_PROBLEMS: Final = 1000

#: kinds of pydantic's own errors
_OWN_KINDS: Final = frozenset(typing.get_args(ErrorType))
#: entries of their context that may quote the value
_QUOTING: Final = frozenset({"error", "encoding_error", "tag", "tz_actual", "attribute"})


def fail(value: Any, wanted: str) -> ConversionError:
    """Return the error of a value that does not become ``wanted``, a noun with its article."""
    return ConversionError("", f"{with_article(type(value))} that does not become {wanted}")


def with_article(type_: type[Any]) -> str:
    """Return the name of a class with its article."""
    return f"{'an' if type_.__name__[:1] in 'AEIOUaeiou' else 'a'} {type_.__name__}"


def located(place: str, error: Exception) -> ConversionError:
    """Return the error of a part as an error of its container, in which the part is at ``place``."""
    inner = problem_of(error)
    joint = "" if not inner.path or inner.path.startswith("[") else "."
    return ConversionError(f"{place}{joint}{inner.path}"[:_SHOWN_PATH], inner.reason)


def problem_of(error: Exception) -> ConversionError:
    """Return ``error`` as a conversion error without its text, which may contain the value."""
    if isinstance(error, ConversionError):
        return error
    if isinstance(error, ValidationError):
        return _validation_problem(error)
    if isinstance(error, RecursionError):
        return ConversionError("", "is nested too deeply, or a part of itself")
    return ConversionError("", f"converting it raised {type(error).__name__}")


def _validation_problem(error: ValidationError) -> ConversionError:
    count = error.error_count()
    if count > _MANY_PROBLEMS:
        return ConversionError("", f"{count} problems with {error.title}")
    try:
        problem = error.errors(include_url=False, include_input=False)[0]
    except Exception:  # noqa: BLE001  # pydantic cannot describe text that is no Unicode, for example
        return ConversionError("", f"is refused by {error.title}")
    reason = problem["msg"]
    if problem["type"] not in _OWN_KINDS or _QUOTING & problem.get("ctx", {}).keys():
        reason = f"is refused by a validator ({problem['type']})"
    path = ""
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN_KEY]}"
    more = f" (and {count - 1} more)" if count > 1 else ""
    return ConversionError(path.removeprefix(".")[:_SHOWN_PATH], reason + more)


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


class CompiledType:
    """A compiled type that values are converted to.

    Args:
        convert: converts values that are not passed on. Raises ``ConversionError``, or any error of code in data and
            types.
        family: kind of its values, which orders the members of a union; empty if unknown.
        passes: classes whose direct instances are passed on unchanged.
        schema: the schema of the type, if it has one.
    """

    __slots__ = ("convert", "family", "guarded", "passes", "schema")

    def __init__(
        self, convert: Converter, family: str, passes: frozenset[type[Any]] = frozenset(), schema: Schema | None = None
    ) -> None:
        self.convert = convert
        self.family = family
        self.passes = passes
        self.schema = schema

        def guarded(value: Any) -> Any:
            if type(value) in passes:
                return value
            try:
                return convert(value)
            except ConversionError:
                raise
            except Exception as error:  # noqa: BLE001  # code in data and types may raise anything
                raise problem_of(error) from None

        self.guarded = guarded


def has_fraction(value: Any) -> bool:
    """Return whether a number would lose a part if it became an ``int``."""
    try:
        return is_vast(value) or bool(int(value) != value)
    except (ValueError, TypeError, ArithmeticError):
        return True


def family_of(value: Any) -> str:
    """Return the kind of a value; see ``CompiledType``."""
    value = unwrapped(value)
    for types_, family in _FAMILIES:
        if isinstance(value, types_):
            return family
    if has_fields(value):
        return "record"
    return "collection" if is_collection(value) else ""


_FAMILIES: Final[tuple[tuple[Any, str], ...]] = (
    (bool, "bool"),
    (enum.Enum, "enum"),
    (numbers.Number, "number"),
    (str, "text"),
    ((bytes, bytearray, memoryview), "bytes"),
    ((datetime.date, datetime.time, datetime.timedelta), "time"),
    (Mapping, "record"),
)


def union_problem(errors: list[tuple[str, Exception]], value: Any, wanted: str) -> ConversionError:
    """Return the error of a failed union: that of the only member of the value's family, if there is one."""
    family = family_of(value)
    alike = [error for each, error in errors if each == family]
    if len(alike) != 1:
        return fail(value, wanted)
    return problem_of(alike[0])


def elements_of(value: Any) -> Iterable[Any]:
    """Return the elements that a collection is made of."""
    if value is None:
        return ()
    found: Iterable[Any] = value if is_collection(value) else unwrapped(value)
    if is_collection(found):
        return found
    if isinstance(found, (Sequence, Set)) and not is_simple(found) and not has_fields(found):
        return found
    return (found,)


def record_of(value: Any, wanted: str) -> dict[Any, Any]:
    """Return the keys and values of a mapping, or the names and values of fields."""
    if isinstance(value, Mapping):
        return dict(value)
    schema = None if is_simple(value) else schema_of(type(value))
    if schema is not None:
        return record_of(value.root, wanted) if schema.is_root else schema.read(value)
    if is_collection(value):
        first = next(iter(value), None)
        if isinstance(first, Mapping) or has_fields(first):
            return record_of(first, wanted)
    raise fail(value, wanted)


# --- pydantic


def validator_of(type_: Any) -> Converter | None:
    """Return pydantic's validation of a type, or ``None`` if it has none."""
    for config in (None, ConfigDict(arbitrary_types_allowed=True)):
        with contextlib.suppress(Exception):  # pydantic raises many kinds
            adapter: TypeAdapter[Any] = TypeAdapter(type_, config=config)
            if not adapter.pydantic_complete:
                adapter.rebuild(raise_errors=True)
            return adapter.validate_python
    return None


def by_pydantic(type_: Any, class_: type[Any] | None) -> Converter:
    """Return a converter for types that the table does not name."""
    is_instance = None if class_ is None else instance_check(class_)
    validate = validator_of(type_)
    wanted = with_article(class_) if class_ is not None else str(type_)[:SHOWN_TYPE]

    def converter(value: Any) -> Any:
        if is_instance is not None and is_instance(value):
            return value
        if validate is None:
            raise fail(value, wanted)
        return validate(bounded(value))

    return converter


def bounded(value: Any) -> Any:
    """Return ``value`` unless it contains a number that takes pydantic very long to convert."""
    if holds_vast(value):
        raise ConversionError("", "has a number in it whose exponent or number of digits is out of bounds")
    return value

"""Conversion of event data to the type that a handler asks for (157.4.1), after the rules of OSGi's converter.

==================  ================================================================================================
to                  from
==================  ================================================================================================
a schema            a mapping, or an instance of any schema: field by field, by name. Missing fields take their
                    defaults, unknown ones are ignored
a mapping           a mapping, or an instance of a schema; keys and values are converted
a collection        any collection, element by element; a single value becomes the only element, ``None`` none at all
a single value      a collection: its first element
``bool``            a number: whether it is not 0; text: ``true false yes no on off 1 0``
a number            any number (``int`` drops the fraction), text, a date (milliseconds since 1970), a timedelta
                    (seconds); ``None`` is 0
``str``             any simple value; of an enum its name, of a date ISO 8601
an enum             its member, its value, its name in any case, its position; a member of another enum by its name
a date or a time    ISO 8601; a number (milliseconds since 1970)
``X | Y``           what fits without conversion, else the first that it can be converted to
==================  ================================================================================================

What is an instance of the type already is passed on as it is. Types are compiled once. All of it is thread safe.
"""

from __future__ import annotations

import collections.abc
import datetime
import decimal
import enum
import math
import pathlib
import re
import types
import typing
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias, Union

from pydantic import TypeAdapter, ValidationError

from messaging.codecs.models import describe
from messaging.errors import ConversionError
from messaging.typedevent.schema import Field, Schema, fields_of, has_fields, is_simple, schema_of, to_map

Converter: TypeAlias = Callable[[Any], Any]

#: types whose converters are kept
_REMEMBERED: Final = 1024
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0", ""})

_converters: dict[Any, Converter] = {}


def convert(value: Any, target: Any) -> Any:
    """``value`` as a ``target``.

    Args:
        value: event data: a mapping, an instance of a schema, or a part of one.
        target: a class, or anything else that can be an annotation.

    Raises:
        ConversionError: it does not become one; says where, and why, but not what the value is.
    """
    return converter_to(target)(value)


def converter_to(target: Any) -> Converter:
    """The function that converts to ``target``. It raises ``ConversionError``."""
    try:
        known = _converters.get(target)
    except TypeError:  # an annotation that has no hash
        return _compile(target)
    if known is None:
        known = _compile(target)
        if len(_converters) >= _REMEMBERED:
            _converters.clear()
        _converters[target] = known
    return known


# --- compiling


def _compile(target: Any) -> Converter:
    if target is Any or target is object or isinstance(target, typing.TypeVar):
        return _as_data
    if target is None or target is type(None):
        return _to_none
    if isinstance(target, str):  # an annotation that nobody could resolve
        return _as_data
    if isinstance(target, typing.NewType):
        return converter_to(target.__supertype__)
    if hasattr(target, "__value__") and not isinstance(target, type):  # type X = ...
        return converter_to(target.__value__)
    origin, arguments = typing.get_origin(target), typing.get_args(target)
    if origin is typing.Annotated:
        return _annotated(target, arguments[0])
    if origin in (typing.Required, typing.NotRequired, typing.Final, typing.ClassVar):
        return converter_to(arguments[0])
    if origin is Literal:
        return _literal(arguments)
    if origin is Union or origin is types.UnionType:
        return _union(arguments)
    if typing.is_typeddict(target):
        return _typed_dict(target)
    schema = schema_of(origin if origin is not None and schema_of(target) is None else target)
    if schema is not None:
        return _to_schema(schema)
    concrete = origin or target
    if isinstance(concrete, type):
        found = _simple(concrete)
        if found is not None:
            return _first_of_collection(found)
        if issubclass(concrete, (str, bytes)):
            return _by_pydantic(target, concrete)
        if issubclass(concrete, Mapping):
            return _mapping(concrete, arguments)
        if issubclass(concrete, tuple):
            return _tuple(concrete, arguments)
        if issubclass(concrete, collections.abc.Iterable) and concrete.__module__ in _OF_COLLECTIONS:
            return _collection(concrete, arguments)
        return _by_pydantic(target, concrete)
    return _by_pydantic(target, None)


#: modules whose iterables are collections
_OF_COLLECTIONS: Final = ("builtins", "collections", "collections.abc", "typing")


def _simple(type_: type[Any]) -> Converter | None:
    """For types without parts."""
    if issubclass(type_, enum.Enum):
        return _enum(type_)
    return _SIMPLE.get(type_)


def _fail(value: Any, wanted: str) -> ConversionError:
    return ConversionError("", f"a {type(value).__name__} that does not become {wanted}")


def _at(place: str, error: ConversionError) -> ConversionError:
    """The same error, seen from the container."""
    joint = "" if not error.path or error.path.startswith("[") else "."
    return ConversionError(f"{place}{joint}{error.path}", error.reason)


# --- simple values


def _as_data(value: Any) -> Any:
    """No type is asked for: data without schemas."""
    if is_simple(value):
        return value
    return to_map({"": value})[""]


def _to_none(value: Any) -> None:
    if value is not None:
        raise _fail(value, "None")


def _first_of_collection(convert_one: Converter) -> Converter:
    def converter(value: Any) -> Any:
        if isinstance(value, (list, tuple, set, frozenset, deque)) and not hasattr(value, "_fields"):
            value = next(iter(value), None)
        return convert_one(value)

    return converter


def _to_bool(value: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, (bool, int, float, decimal.Decimal)):
        return bool(value)
    text = value.strip().lower() if isinstance(value, str) else None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise _fail(value, "a bool")


def _milliseconds(value: datetime.date) -> float:
    if not isinstance(value, datetime.datetime):
        value = datetime.datetime.combine(value, datetime.time(), datetime.UTC)
    elif value.tzinfo is None:
        value = value.replace(tzinfo=datetime.UTC)
    return (value - _EPOCH) / datetime.timedelta(milliseconds=1)


def _to_number(type_: type[Any], parse: Callable[[str], Any]) -> Converter:
    wanted = f"a{'n' if type_ is int else ''} {type_.__name__}"

    def converter(value: Any) -> Any:
        try:
            if value is None:
                return type_(0)
            if isinstance(value, str):
                return parse(value.strip())
            if isinstance(value, enum.Enum) and not isinstance(value, (int, float)):
                return converter(value.value)
            if isinstance(value, datetime.date):
                return type_(_milliseconds(value))
            if isinstance(value, datetime.timedelta):
                return type_(value.total_seconds())
            if isinstance(value, float) and type_ is decimal.Decimal:
                return decimal.Decimal(repr(value))
            if not isinstance(value, (bytes, bytearray)) and not has_fields(value):
                return type_(value)
        except (ValueError, TypeError, ArithmeticError):
            pass
        raise _fail(value, wanted)

    return converter


def _to_str(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value, str) else value.name
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _fail(value, "text") from None
    if isinstance(value, re.Pattern):
        return str(value.pattern)
    if isinstance(value, datetime.timedelta):
        return str(TypeAdapter(datetime.timedelta).dump_python(value, mode="json"))
    if value is None or not is_simple(value) or isinstance(value, type):
        raise _fail(value, "a str")
    return str(value)


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (list, tuple)):
        try:
            return bytes(value)
        except (TypeError, ValueError):
            pass
    raise _fail(value, "bytes")


def _to_datetime(value: Any) -> datetime.datetime:
    if isinstance(value, datetime.datetime):
        return value
    if isinstance(value, datetime.date):
        return datetime.datetime.combine(value, datetime.time())
    try:
        if isinstance(value, str):
            return datetime.datetime.fromisoformat(value.strip())
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _EPOCH + datetime.timedelta(milliseconds=value)
    except (ValueError, OverflowError):
        pass
    raise _fail(value, "a datetime")


def _to_date(value: Any) -> datetime.date:
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value
    return _to_datetime(value).date()


def _to_time(value: Any) -> datetime.time:
    if isinstance(value, datetime.time):
        return value
    if isinstance(value, datetime.datetime):
        return value.timetz()
    if isinstance(value, str):
        try:
            return datetime.time.fromisoformat(value.strip())
        except ValueError:
            pass
    raise _fail(value, "a time")


def _to_timedelta(value: Any) -> datetime.timedelta:
    if isinstance(value, datetime.timedelta):
        return value
    try:
        if isinstance(value, str):
            return TypeAdapter(datetime.timedelta).validate_python(value.strip())
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return datetime.timedelta(seconds=value)
    except (ValueError, OverflowError):
        pass
    raise _fail(value, "a timedelta")


def _to_uuid(value: Any) -> uuid.UUID:
    if isinstance(value, uuid.UUID):
        return value
    try:
        if isinstance(value, str):
            return uuid.UUID(value.strip())
        if isinstance(value, bytes):
            return uuid.UUID(bytes=value)
    except ValueError:
        pass
    raise _fail(value, "a UUID")


def _to_pattern(value: Any) -> re.Pattern[Any]:
    if isinstance(value, re.Pattern):
        return value
    try:
        if isinstance(value, (str, bytes)):
            return re.compile(value)
    except re.error:
        pass
    raise _fail(value, "a regular expression")


def _to_path(type_: type[pathlib.PurePath]) -> Converter:
    def converter(value: Any) -> pathlib.PurePath:
        if isinstance(value, (str, pathlib.PurePath)):
            return type_(value)
        raise _fail(value, "a path")

    return converter


_SIMPLE: Final[dict[type[Any], Converter]] = {
    bool: _to_bool,
    int: _to_number(int, int),
    float: _to_number(float, float),
    complex: _to_number(complex, complex),
    decimal.Decimal: _to_number(decimal.Decimal, decimal.Decimal),
    str: _to_str,
    bytes: _to_bytes,
    bytearray: lambda value: bytearray(_to_bytes(value)),
    datetime.datetime: _to_datetime,
    datetime.date: _to_date,
    datetime.time: _to_time,
    datetime.timedelta: _to_timedelta,
    uuid.UUID: _to_uuid,
    re.Pattern: _to_pattern,
    pathlib.Path: _to_path(pathlib.Path),
    pathlib.PurePath: _to_path(pathlib.PurePath),
    pathlib.PurePosixPath: _to_path(pathlib.PurePosixPath),
    pathlib.PureWindowsPath: _to_path(pathlib.PureWindowsPath),
}


def _enum(type_: type[enum.Enum]) -> Converter:
    names = {name.lower(): member for name, member in type_.__members__.items()}
    members = [*type_]

    def converter(value: Any) -> Any:
        if isinstance(value, type_):
            return value
        by_name = value.name if isinstance(value, enum.Enum) else value
        try:
            return type_(value.value if isinstance(value, enum.Enum) and by_name not in type_.__members__ else value)
        except (ValueError, TypeError):
            pass
        if isinstance(by_name, str):
            if by_name in type_.__members__:
                return type_[by_name]
            if by_name.strip().lower() in names:
                return names[by_name.strip().lower()]
        for member in members:  # "3" for 3, and 3 for "3"
            if by_name is not None and str(member.value) == str(by_name):
                return member
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(members):
            return members[value]
        raise _fail(value, f"a member of {type_.__name__}")

    return converter


def _literal(values: tuple[Any, ...]) -> Converter:
    def converter(value: Any) -> Any:
        for each in values:
            if each == value and type(each) is type(value):
                return each
        for each in values:
            try:
                if converter_to(type(each))(value) == each:
                    return each
            except ConversionError:
                continue
        raise _fail(value, f"one of {', '.join(map(repr, values))}")

    return converter


# --- combinations


def _union(members: tuple[Any, ...]) -> Converter:
    exact = {each for each in members if isinstance(each, type)}
    may_be_none = type(None) in exact
    converters: list[tuple[Any, Converter]] | None = None

    def converter(value: Any) -> Any:
        nonlocal converters
        if value is None and may_be_none:
            return None
        if value.__class__ in exact:
            return value
        for each in exact:
            if isinstance(value, each) and not (isinstance(value, bool) and each is not bool):
                return value
        if converters is None:  # not before: one of them may be the schema that this is a part of
            converters = [(each, converter_to(each)) for each in members if each is not type(None)]
        for _, convert_to_it in sorted(converters, key=lambda pair: not _is_like(value, pair[0])):
            try:
                return convert_to_it(value)
            except ConversionError as error:
                last = error
        raise last if len(converters) == 1 else _fail(value, " or ".join(_named(each) for each, _ in converters))

    return converter


def _is_like(value: Any, target: Any) -> bool:
    """Whether value and target are alike: both mappings or schemas, both collections, both neither."""
    concrete = typing.get_origin(target) or target
    if not isinstance(concrete, type):
        return False
    if isinstance(value, Mapping) or has_fields(value):
        return schema_of(concrete) is not None or issubclass(concrete, Mapping) or typing.is_typeddict(concrete)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return concrete not in _SIMPLE and schema_of(concrete) is None and not issubclass(concrete, Mapping)
    if isinstance(value, (int, float, decimal.Decimal)):
        return concrete in (int, float, decimal.Decimal) and (concrete is not int or value == int(value))
    return concrete in _SIMPLE


def _named(target: Any) -> str:
    return target.__name__ if isinstance(target, type) else str(target)


def _elements(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple, set, frozenset, deque)) and not hasattr(value, "_fields"):
        return value
    if isinstance(value, collections.abc.Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping)):
        return value if not is_simple(value) and not has_fields(value) else (value,)
    return (value,)


def _converted(values: Iterable[Any], convert_one: Converter) -> list[Any]:
    found = []
    for index, value in enumerate(values):
        try:
            found.append(convert_one(value))
        except ConversionError as error:
            raise _at(f"[{index}]", error) from None
    return found


#: what makes a collection of an abstract type
_MADE_BY: Final[dict[type[Any], Callable[[Any], Any]]] = {
    collections.abc.Set: frozenset,
    collections.abc.MutableSet: set,
    set: set,
    frozenset: frozenset,
    deque: deque,
}


def _collection(type_: type[Any], arguments: tuple[Any, ...]) -> Converter:
    make = _MADE_BY.get(type_, list)
    element = arguments[0] if arguments else Any

    def converter(value: Any) -> Any:
        found = _converted(_elements(value), converter_to(element))
        if make is list:
            return found
        try:
            return make(found)
        except TypeError:
            raise _fail(value, f"a {type_.__name__}: its elements have no hash") from None

    return converter


def _tuple(type_: type[Any], arguments: tuple[Any, ...]) -> Converter:
    if not arguments or arguments[-1] is Ellipsis:
        element = arguments[0] if arguments else Any
        return lambda value: tuple(_converted(_elements(value), converter_to(element)))

    def converter(value: Any) -> Any:
        values = [*_elements(value)]
        if len(values) != len(arguments):
            raise ConversionError("", f"{len(values)} elements where {len(arguments)} are wanted")
        found = []
        for index, (each, target) in enumerate(zip(values, arguments, strict=True)):
            try:
                found.append(converter_to(target)(each))
            except ConversionError as error:
                raise _at(f"[{index}]", error) from None
        return tuple(found)

    return converter


def _items(value: Any, wanted: str) -> Iterable[tuple[Any, Any]]:
    """Keys and values, or names and values of fields."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple, set, frozenset, deque)) and not hasattr(value, "_fields") and value:
        value = next(iter(value))
        return _items(value, wanted)
    if value is None or is_simple(value) or not has_fields(value):
        raise _fail(value, wanted)
    return fields_of(value)


def _mapping(type_: type[Any], arguments: tuple[Any, ...]) -> Converter:
    key_type, value_type = arguments if len(arguments) == 2 else (Any, Any)
    make = type_ if type_.__module__ == "collections" and type_ is not collections.defaultdict else dict

    def converter(value: Any) -> Any:
        convert_key, convert_value = converter_to(key_type), converter_to(value_type)
        found = {}
        for key, each in _items(value, "a mapping"):
            try:
                found[convert_key(key)] = convert_value(each)
            except ConversionError as error:
                raise _at(f"[{str(key)[:80]!r}]" if isinstance(key, str) else "[...]", error) from None
        return found if make is dict else make(found)

    return converter


def _typed_dict(type_: Any) -> Converter:
    hints = typing.get_type_hints(type_)
    required: frozenset[str] = type_.__required_keys__

    def converter(value: Any) -> Any:
        given = dict(_items(value, f"a {type_.__name__}"))
        found = {}
        for name, target in hints.items():
            if name in given:
                try:
                    found[name] = converter_to(target)(given[name])
                except ConversionError as error:
                    raise _at(name, error) from None
            elif name in required:
                raise ConversionError(name, "is missing")
        return found

    return converter


def _to_schema(schema: Schema) -> Converter:
    type_ = schema.type
    wanted = f"a {type_.__name__}"
    names = frozenset(each.name for each in schema.fields)
    arguments = [each for each in schema.fields if each.keyword is not None]
    others = [each for each in schema.fields if each.keyword is None]

    def converter(value: Any) -> Any:
        if isinstance(value, type_):
            return value
        given = dict(_items(value, wanted))
        keywords: dict[str, Any] = {}
        for field in arguments:
            if field.name in given:
                keywords[field.keyword] = _field(given, field)  # type: ignore[index]  # it is not None
            elif field.is_required:
                raise ConversionError(field.name, "is missing, and has no default")
        if schema.takes_more:
            keywords |= {key: each for key, each in given.items() if key not in names and isinstance(key, str)}
        try:
            made = schema.make(**keywords)
        except ValidationError as error:
            raise ConversionError("", describe(error)) from None
        except Exception as error:  # noqa: BLE001  # a constructor may raise anything
            raise ConversionError("", f"{type_.__name__}() raised {type(error).__name__}") from None
        for field in others:
            if field.name in given:
                _set(made, field.name, _field(given, field))
            elif not hasattr(made, field.name):  # a DTO's fields are null unless it says otherwise
                _set(made, field.name, None)
        return made

    return converter


def _field(given: Mapping[Any, Any], field: Field) -> Any:
    try:
        return converter_to(field.annotation)(given[field.name])
    except ConversionError as error:
        raise _at(field.name, error) from None


def _set(made: Any, name: str, value: Any) -> None:
    try:
        setattr(made, name, value)
    except AttributeError:
        pass  # what cannot be set is no field: a property, say


def _annotated(target: Any, plain: Any) -> Converter:
    """Converted to the plain type, and then held against what else is said about it."""
    check = _by_pydantic(target, None)

    def converter(value: Any) -> Any:
        return check(converter_to(plain)(value))

    return converter


def _by_pydantic(target: Any, type_: type[Any] | None) -> Converter:
    """For types that this module knows nothing of."""
    validate: Callable[[Any], Any] | None
    try:
        validate = TypeAdapter(target).validate_python
    except Exception:  # noqa: BLE001  # pydantic raises this and that
        validate = None

    def converter(value: Any) -> Any:
        if type_ is not None and isinstance(value, type_):
            return value
        if validate is None:
            raise _fail(value, _named(target))
        try:
            return validate(value)
        except ValidationError as error:
            raise ConversionError("", describe(error)) from None
        except Exception as error:  # noqa: BLE001
            raise ConversionError("", f"{type(error).__name__} while validating") from None

    return converter

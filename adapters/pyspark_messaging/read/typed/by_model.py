"""Plans by a pydantic model, dataclass or typed dict. pydantic validates; annotations decide the Spark types."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial, reduce
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from operator import attrgetter, methodcaller, or_
from types import SimpleNamespace
from typing import Annotated, Any, Final, Literal, NamedTuple, NewType
from uuid import UUID

import pydantic
import typing_extensions
from pyspark.sql import types as spark

from messaging.errors import InvalidOptionError
from pyspark_messaging.read.typed.decimals import Decimals, has_decimals, quoted_if_rounded
from pyspark_messaging.read.typed.rows import Row, RowPlan

_REFERENCE: Final = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")
_SUPPORTED: Final = (
    "str, bytes, bool, int, float, Decimal, date, datetime, timedelta, UUID, IP addresses, URLs, enums and literals of "
    "str and int, list, set, tuple[T, ...], dict[str, T], models, dataclasses and typed dicts of these, and any of "
    "them or None"
)

_SETS: Final = (set, frozenset, Set)
_SEQUENCES: Final = (list, Sequence, *_SETS)
_QUALIFIERS: Final = (typing.Required, typing.NotRequired, typing.Final) + (
    typing_extensions.Required,
    typing_extensions.NotRequired,
    typing_extensions.ReadOnly,
)
_ALIASES: Final = (typing_extensions.TypeAliasType, getattr(typing, "TypeAliasType", typing_extensions.TypeAliasType))


class _UnsupportedError(Exception):
    """A field has no type in Spark."""


def bad_model(reference: object, problem: str) -> InvalidOptionError:
    """Return an error of the option ``model``."""
    return InvalidOptionError("model", f"option 'model' ({reference!r:.200}): {problem}")


def plan_of_model(reference: str) -> RowPlan:
    """Import a model and compile it, see :meth:`TypedColumns.of_model`."""
    model = _imported(reference)
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(model)
        if not adapter.pydantic_complete:
            adapter.rebuild(raise_errors=True)
        fields = _fields(model, "", ())
    except _UnsupportedError as error:
        raise bad_model(reference, str(error)) from None
    except RecursionError:
        raise bad_model(reference, "a type refers to itself; Spark has no recursive types") from None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise bad_model(reference, f"pydantic cannot validate it: {problem:.300}") from error
    if fields is None:
        raise bad_model(reference, f"{model!r:.100} is no pydantic model, dataclass or typed dict with fields")
    validator = adapter.validator
    schema = spark.StructType([spark.StructField(field.name, field.kind.spark) for field in fields])

    def read_exactly(payload: bytes) -> Row:
        # pydantic first turns a JSON number into a double, but not a number in a string
        return validator.validate_json(json.dumps(json.loads(payload.decode(), parse_float=quoted_if_rounded)))

    nothing = dict.fromkeys(schema.names)
    return RowPlan(
        schema,
        model,
        validator.validate_json,
        validator.validate_python,
        read_exactly if has_decimals(schema) else None,
        [field.column for field in fields],
        nothing if typing_extensions.is_typeddict(model) else SimpleNamespace(**nothing),
    )


def _imported(reference: str) -> Any:
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise bad_model(reference, "expected 'package.module:Model'")
    if match["module"] == "__main__":
        raise bad_model(reference, "executors cannot import from '__main__'; put the model in a module of its own")
    try:
        found: Any = importlib.import_module(match["module"])
    except Exception as error:
        raise bad_model(
            reference,
            f"expected 'package.module:Model', but importing {match['module']!r} failed with {type(error).__name__}: "
            f"{error!s:.200}; it must be importable on the driver and on all executors",
        ) from error
    for name in match["name"].split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise bad_model(
                reference, f"expected 'package.module:Model', but there is no {name!r} in {match['module']!r}"
            ) from None
    return found


def _fields(model: Any, where: str, outer: tuple[Any, ...]) -> list[Field] | None:
    """Return the fields of a model, dataclass or typed dict; ``None`` for another type."""
    getter: Callable[[str], Callable[[Any], Any]] = attrgetter
    annotations: dict[str, Any]
    if not isinstance(model, type) or issubclass(model, pydantic.RootModel):
        return None
    if issubclass(model, pydantic.BaseModel):
        annotations = {name: field.annotation for name, field in model.model_fields.items()}
    elif dataclasses.is_dataclass(model):
        hints = typing_extensions.get_type_hints(model, include_extras=True)
        annotations = {field.name: hints[field.name] for field in dataclasses.fields(model) if field.init}
    elif typing_extensions.is_typeddict(model):
        hints = typing_extensions.get_type_hints(model, include_extras=True)
        required: frozenset[str] = vars(model)["__required_keys__"]
        annotations = {name: hint if name in required else hint | None for name, hint in hints.items()}
        getter = partial(methodcaller, "get")
    else:
        return None
    if model in outer:
        raise _UnsupportedError(f"field {where!r} refers to {model.__qualname__} again; Spark has no recursive types")
    made = []
    for name, annotation in annotations.items():
        kind, nullable = _kind(annotation, f"{where}.{name}" if where else name, (*outer, model))
        made.append(Field(name, kind, nullable, getter(name)))
    return made


def _kind(annotation: Any, where: str, outer: tuple[Any, ...]) -> tuple[SparkKind, bool]:
    """Return the kind of a field's type, and whether it may be ``None``."""
    annotation, nullable = _bare(annotation)
    origin, arguments = typing_extensions.get_origin(annotation), typing_extensions.get_args(annotation)
    kind: SparkKind | None = None
    if origin in (Literal, typing_extensions.Literal):
        nullable = nullable or None in arguments
        if all(type(plain(value)) in (str, int, types.NoneType) for value in arguments):
            kind = STRING_OF_VALUE
    elif (origin in _SEQUENCES and len(arguments) == 1) or (origin is tuple and arguments[1:] == (...,)):
        item, item_nullable = _kind(arguments[0], f"{where}[]", outer)
        kind = array_kind(item, item_nullable, ordered=origin not in _SETS)
    elif origin in (dict, Mapping) and _bare(arguments[0]) == (str, False):
        item, item_nullable = _kind(arguments[1], f"{where}[]", outer)
        kind = map_kind(item, item_nullable)
    elif isinstance(annotation, type) and origin is None:
        kind = scalar_kind(annotation)
        if kind is None:
            fields = _fields(annotation, where, outer)
            kind = None if fields is None else struct_kind(fields)
    if kind is None:
        shown = annotation.__qualname__ if isinstance(annotation, type) and origin is None else repr(annotation)
        raise _UnsupportedError(
            f"field {where!r} is of type {shown:.100}, which is not supported here; {_SUPPORTED} are"
        )
    return kind, nullable


def _bare(annotation: Any) -> tuple[Any, bool]:
    """Return a type without qualifiers, aliases and ``None``, and whether it had ``None``."""
    nullable = False
    while True:
        origin, arguments = typing_extensions.get_origin(annotation), typing_extensions.get_args(annotation)
        if origin in (Annotated, *_QUALIFIERS):
            annotation = arguments[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, _ALIASES):
            annotation = annotation.__value__
        elif origin in (typing.Union, types.UnionType) and types.NoneType in arguments:
            rest = [argument for argument in arguments if argument is not types.NoneType]
            annotation = reduce(or_, rest)
            nullable = True
        else:
            return annotation, nullable


# --- the conversion of values


class SparkKind(NamedTuple):
    """The conversion of the values of a Python type to a Spark type.

    Attributes:
        spark: the Spark type.
        one: converts one value for Arrow; raises if it is not of the type.
        as_is: types of values that Arrow accepts unchanged.
    """

    spark: spark.DataType
    one: Callable[[Any], Any]
    as_is: frozenset[type]

    def several(self, values: Sequence[Any]) -> Sequence[Any]:
        """Convert each of ``values``; ``None`` stays ``None``."""
        as_is = self.as_is
        # unvalidated values may have any type; Arrow would turn 1.5 into 1, or a datetime into a date
        if as_is.issuperset(map(type, values)):
            return values
        one = self.one
        return [value if type(value) in as_is else one(value) for value in values]


class Field(NamedTuple):
    """A field of a model; ``get`` returns its value from an instance of the model."""

    name: str
    kind: SparkKind
    nullable: bool
    get: Callable[[Any], Any]

    def column(self, rows: Sequence[Row]) -> Sequence[Any]:
        """Return the values of this field in ``rows``, for Arrow."""
        return self.kind.several(list(map(self.get, rows)))


def scalar_kind(annotation: type) -> SparkKind | None:
    """Return the kind of a type without parts, or ``None``."""
    known = _SCALARS.get(annotation)
    if known is not None:
        return known
    if issubclass(annotation, Enum):
        values = [member.value for member in annotation]
        return STRING_OF_VALUE if all(type(value) in (str, int) for value in values) else None
    return _string_of(annotation) if issubclass(annotation, _URLS) else None


def _a(kind: type, *others: type, made: Callable[[Any], Any] | None = None, but: type | None = None) -> Any:
    """Return a conversion that accepts values of the given types alone; ``made`` converts them, if given."""

    def one(value: Any) -> Any:
        if not isinstance(value, (kind, *others)) or (but is not None and isinstance(value, but)):
            raise TypeError(f"no {kind.__name__}")
        return value if made is None else made(value)

    return one


def plain(value: Any) -> Any:
    """Return the value of a member of an enum, and any other value unchanged."""
    return value.value if isinstance(value, Enum) else value


def _string_of_value(value: Any) -> str:
    value = plain(value)
    if isinstance(value, (str, int)):
        return str(value)
    raise TypeError("neither str nor int")


def array_kind(item: SparkKind, nullable: bool, *, ordered: bool) -> SparkKind:
    """Return the kind of a list or, if not ``ordered``, of a set of ``item``, ``nullable`` or not."""

    def one(values: Iterable[Any]) -> Sequence[Any]:
        several = item.several(list(values))
        if not ordered:
            with suppress(TypeError):  # so that every read gives the same rows
                return sorted(several)
        return several

    return SparkKind(spark.ArrayType(item.spark, nullable), one, _NONE)


def map_kind(item: SparkKind, nullable: bool) -> SparkKind:
    """Return the kind of a mapping of strings to ``item``, ``nullable`` or not."""

    def one(values: Mapping[str, Any]) -> Any:
        return list(zip(values, item.several(list(values.values())), strict=True))

    return SparkKind(spark.MapType(spark.StringType(), item.spark, nullable), one, _NONE)


def struct_kind(fields: Sequence[Field]) -> SparkKind:
    """Return the kind of a model within another, with these fields."""
    parts = [(field.name, field.get, field.kind.one, field.kind.as_is) for field in fields]

    def one(value: Any) -> dict[str, Any]:
        made = {}
        for name, get, convert, as_is in parts:
            part = get(value)
            made[name] = part if type(part) in as_is else convert(part)
        return made

    kind = spark.StructType([spark.StructField(field.name, field.kind.spark, field.nullable) for field in fields])
    return SparkKind(kind, one, _NONE)


_NONE: Final = frozenset({types.NoneType})
_URLS: Final = (pydantic.AnyUrl, pydantic.PostgresDsn, pydantic.CockroachDsn, pydantic.MongoDsn)

#: the kind of enums and literals: the value, as text
STRING_OF_VALUE: Final = SparkKind(spark.StringType(), _string_of_value, _NONE)
_DATETIME: Final = SparkKind(spark.TimestampType(), _a(datetime), _NONE | {datetime})
_DATE: Final = SparkKind(spark.DateType(), _a(date, but=datetime), _NONE | {date})

_ADDRESSES: Final = (IPv4Address, IPv6Address)
_INTERFACES: Final = (IPv4Interface, IPv6Interface)
_NETWORKS: Final = (IPv4Network, IPv6Network)


def _string_of(*kinds: type) -> SparkKind:
    return SparkKind(spark.StringType(), _a(*kinds, made=str), _NONE)


_SCALARS: Final[Mapping[Any, SparkKind]] = {
    str: SparkKind(spark.StringType(), _a(str, made=str.__str__), _NONE | {str}),
    pydantic.EmailStr: SparkKind(spark.StringType(), _a(str, made=str.__str__), _NONE | {str}),
    bytes: SparkKind(spark.BinaryType(), _a(bytes), _NONE | {bytes}),
    bool: SparkKind(spark.BooleanType(), _a(bool), _NONE | {bool}),
    int: SparkKind(spark.LongType(), _a(int, made=int, but=bool), _NONE | {int}),
    float: SparkKind(spark.DoubleType(), _a(float, int, made=float, but=bool), _NONE | {float}),
    Decimal: SparkKind(spark.DecimalType(38, 18), Decimals(38, 18).exact, _NONE),
    date: _DATE,
    pydantic.PastDate: _DATE,
    pydantic.FutureDate: _DATE,
    datetime: _DATETIME,
    pydantic.AwareDatetime: _DATETIME,
    pydantic.NaiveDatetime: _DATETIME,
    pydantic.PastDatetime: _DATETIME,
    pydantic.FutureDatetime: _DATETIME,
    timedelta: SparkKind(spark.DayTimeIntervalType(), _a(timedelta), _NONE | {timedelta}),
    UUID: _string_of(UUID),
    **{kind: _string_of(kind) for kind in (*_ADDRESSES, *_INTERFACES, *_NETWORKS)},
    pydantic.IPvAnyAddress: _string_of(*_ADDRESSES),
    pydantic.IPvAnyInterface: _string_of(*_INTERFACES),
    pydantic.IPvAnyNetwork: _string_of(*_NETWORKS),
}

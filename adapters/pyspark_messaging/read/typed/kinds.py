"""Kinds: the conversion of the values of a Python type to a Spark type."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

import pydantic
from pyspark.sql import types as spark

from pyspark_messaging.read.typed.decimals import Decimals

if TYPE_CHECKING:
    from pyspark_messaging.read.typed.rows import Row


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

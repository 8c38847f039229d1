"""Kinds: how the values of a Python type become those of a Spark type."""

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

from adapters.spark.typed.decimals import Decimals

if TYPE_CHECKING:
    from adapters.spark.typed.plan import Row


class Kind(NamedTuple):
    """How the values of a Python type become those of a Spark type.

    Attributes:
        spark: the Spark type.
        one: makes what Arrow takes of one value; raises if that is not of the type.
        as_is: types of values that Arrow takes as they are.
    """

    spark: spark.DataType
    one: Callable[[Any], Any]
    as_is: frozenset[type]

    def several(self, values: Sequence[Any]) -> Sequence[Any]:
        """The same for each of ``values``, and ``None`` for ``None``."""
        as_is = self.as_is
        # what no validator looked at may be of any type; Arrow would make 1 of 1.5, or a date of a datetime
        if as_is.issuperset(map(type, values)):
            return values
        one = self.one
        return [value if type(value) in as_is else one(value) for value in values]


class Field(NamedTuple):
    """A field of a model.

    Attributes:
        name: what it is called.
        kind: that of its type.
        nullable: whether it may be ``None``.
        get: takes it from an instance of the model.
    """

    name: str
    kind: Kind
    nullable: bool
    get: Callable[[Any], Any]

    def column(self, rows: Sequence[Row]) -> Sequence[Any]:
        """What Arrow takes for this field of some rows."""
        return self.kind.several(list(map(self.get, rows)))


def scalar_kind(annotation: type) -> Kind | None:
    """The kind of a type without parts; ``None`` if there is none."""
    known = _SCALARS.get(annotation)
    if known is not None:
        return known
    if issubclass(annotation, Enum):
        values = [member.value for member in annotation]
        return STRING_OF_VALUE if all(type(value) in (str, int) for value in values) else None
    return _string_of(annotation) if issubclass(annotation, _URLS) else None


def _a(kind: type, *others: type, made: Callable[[Any], Any] | None = None, but: type | None = None) -> Any:
    """What makes values of a type, and of no other: with ``made``, or as they are."""

    def one(value: Any) -> Any:
        if not isinstance(value, (kind, *others)) or (but is not None and isinstance(value, but)):
            raise TypeError(f"no {kind.__name__}")
        return value if made is None else made(value)

    return one


def plain(value: Any) -> Any:
    """The value of a member of an enum; anything else as it is."""
    return value.value if isinstance(value, Enum) else value


def _string_of_value(value: Any) -> str:
    value = plain(value)
    if isinstance(value, (str, int)):
        return str(value)
    raise TypeError("neither str nor int")


def array_kind(item: Kind, nullable: bool, *, ordered: bool) -> Kind:
    """The kind of a list or, if not ``ordered``, of a set of ``item``, ``nullable`` or not."""

    def one(values: Iterable[Any]) -> Sequence[Any]:
        several = item.several(list(values))
        if not ordered:
            with suppress(TypeError):  # for the same rows every time
                return sorted(several)
        return several

    return Kind(spark.ArrayType(item.spark, nullable), one, _NONE)


def map_kind(item: Kind, nullable: bool) -> Kind:
    """The kind of a mapping of strings to ``item``, ``nullable`` or not."""

    def one(values: Mapping[str, Any]) -> Any:
        return list(zip(values, item.several(list(values.values())), strict=True))

    return Kind(spark.MapType(spark.StringType(), item.spark, nullable), one, _NONE)


def struct_kind(fields: Sequence[Field]) -> Kind:
    """The kind of a model within another, with these fields."""
    parts = [(field.name, field.get, field.kind.one, field.kind.as_is) for field in fields]

    def one(value: Any) -> dict[str, Any]:
        made = {}
        for name, get, convert, as_is in parts:
            part = get(value)
            made[name] = part if type(part) in as_is else convert(part)
        return made

    kind = spark.StructType([spark.StructField(field.name, field.kind.spark, field.nullable) for field in fields])
    return Kind(kind, one, _NONE)


_NONE: Final = frozenset({types.NoneType})
_URLS: Final = (pydantic.AnyUrl, pydantic.PostgresDsn, pydantic.CockroachDsn, pydantic.MongoDsn)

#: of enums and literals: the value, as text
STRING_OF_VALUE: Final = Kind(spark.StringType(), _string_of_value, _NONE)
_DATETIME: Final = Kind(spark.TimestampType(), _a(datetime), _NONE | {datetime})
_DATE: Final = Kind(spark.DateType(), _a(date, but=datetime), _NONE | {date})

_ADDRESSES: Final = (IPv4Address, IPv6Address)
_INTERFACES: Final = (IPv4Interface, IPv6Interface)
_NETWORKS: Final = (IPv4Network, IPv6Network)


def _string_of(*kinds: type) -> Kind:
    return Kind(spark.StringType(), _a(*kinds, made=str), _NONE)


_SCALARS: Final[Mapping[Any, Kind]] = {
    str: Kind(spark.StringType(), _a(str, made=str.__str__), _NONE | {str}),
    pydantic.EmailStr: Kind(spark.StringType(), _a(str, made=str.__str__), _NONE | {str}),
    bytes: Kind(spark.BinaryType(), _a(bytes), _NONE | {bytes}),
    bool: Kind(spark.BooleanType(), _a(bool), _NONE | {bool}),
    int: Kind(spark.LongType(), _a(int, made=int, but=bool), _NONE | {int}),
    float: Kind(spark.DoubleType(), _a(float, int, made=float, but=bool), _NONE | {float}),
    Decimal: Kind(spark.DecimalType(38, 18), Decimals(38, 18).exact, _NONE),
    date: _DATE,
    pydantic.PastDate: _DATE,
    pydantic.FutureDate: _DATE,
    datetime: _DATETIME,
    pydantic.AwareDatetime: _DATETIME,
    pydantic.NaiveDatetime: _DATETIME,
    pydantic.PastDatetime: _DATETIME,
    pydantic.FutureDatetime: _DATETIME,
    timedelta: Kind(spark.DayTimeIntervalType(), _a(timedelta), _NONE | {timedelta}),
    UUID: _string_of(UUID),
    **{kind: _string_of(kind) for kind in (*_ADDRESSES, *_INTERFACES, *_NETWORKS)},
    pydantic.IPvAnyAddress: _string_of(*_ADDRESSES),
    pydantic.IPvAnyInterface: _string_of(*_INTERFACES),
    pydantic.IPvAnyNetwork: _string_of(*_NETWORKS),
}

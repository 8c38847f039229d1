"""Typed columns: payloads become columns; payloads that do not fit affect no other row. Without Spark."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from ipaddress import IPv4Address, IPv6Network
from typing import Annotated, Any, Literal, NewType, NotRequired, Optional
from uuid import UUID

import cbor2
import msgpack
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    HttpUrl,
    IPvAnyAddress,
    PositiveInt,
    PostgresDsn,
    RootModel,
    StrictFloat,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema
from typing_extensions import TypeAliasType, TypedDict

from messaging.errors import BoundReachedError, InvalidOptionError
from messaging.testing.tables import table
from pyspark_messaging.read.typed import CORRUPT, MESSAGE_COLUMNS, TypedColumns
from pyspark_messaging.read.typed.by_model import plan_of_model
from pyspark_messaging.read.typed.rows import parse

HERE = __name__
NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
DIGITS = "12345678901234567890.123456789012345678"
IDENTITY = "12345678-1234-5678-1234-567812345678"

BESIDE = [name for name in MESSAGE_COLUMNS if name != "_value"] + [CORRUPT]
MESSAGES = to_arrow_schema(
    spark.StructType([spark.StructField(name[1:], kind) for name, kind in MESSAGE_COLUMNS.items()]), timezone="UTC"
)


# --- models ----------------------------------------------------------------------------------------------


class Site(BaseModel):
    name: str
    floor: int | None = None


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Plain:
    a: int
    b: str = "b"
    hidden: int = dataclasses.field(default=1, init=False)


@dataclasses.dataclass(slots=True)
class Slotted:
    a: int
    when: datetime | None = None


@pydantic_dataclass
class Checked:
    a: PositiveInt


class Loose(TypedDict, total=False):
    a: int
    b: str


class Dict(TypedDict):
    a: int
    b: NotRequired[str]
    site: Site


Device = NewType("Device", str)
Alias = TypeAliasType("Alias", int | None)


SITE = "struct<name:string,floor:bigint>"
#: a type in a model, the JSON of a value, the type of its column, and the value in it
FIELDS: dict[str, tuple[Any, Any, str, Any]] = {
    "text": (str, "Grüße\n", "string", "Grüße\n"),
    "raw": (bytes, "hä", "binary", "hä".encode()),
    "flag": (bool, True, "boolean", True),
    "number": (int, -(2**63), "bigint", -(2**63)),
    "real": (float, 3, "double", 3.0),
    "exact": (Decimal, DIGITS, "decimal(38,18)", Decimal(DIGITS)),
    "day": (date, "9999-12-31", "date", date(9999, 12, 31)),
    "time": (datetime, "2024-05-01T12:00:00", "timestamp", NOON),
    "aware": (AwareDatetime, "2024-05-01T14:00:00.123456+02:00", "timestamp", NOON.replace(microsecond=123456)),
    "duration": (timedelta, "P1DT2.5S", "interval day to second", timedelta(days=1, seconds=2.5)),
    "uuid": (UUID, IDENTITY, "string", IDENTITY),
    "color": (Color, "blue", "string", "blue"),
    "level": (Level, 2, "string", "2"),
    "choice": (Literal["a", 2, None], 2, "string", "2"),
    "address": (IPv4Address, "10.0.0.1", "string", "10.0.0.1"),
    "any_address": (IPvAnyAddress, "::1", "string", "::1"),
    "network": (IPv6Network, "2001:db8::/32", "string", "2001:db8::/32"),
    "url": (HttpUrl, "http://example.org", "string", "http://example.org/"),
    "any_url": (AnyUrl, "ftp://example.org/x", "string", "ftp://example.org/x"),
    "dsn": (PostgresDsn, "postgres://user@example.org/db", "string", "postgres://user@example.org/db"),
    "maybe": (int | None, None, "bigint", None),
    "device": (Device, "d1", "string", "d1"),
    "alias": (Alias, 5, "bigint", 5),
    "positive": (PositiveInt, 1, "bigint", 1),
    "finite": (FiniteFloat, 1.5, "double", 1.5),
    "numbers": (list[int], [1, 2], "array<bigint>", [1, 2]),
    "gaps": (Sequence[float | None], [1, None, 2.5], "array<double>", [1, None, 2.5]),
    "unique": (set[str], ["b", "a", "b"], "array<string>", ["a", "b"]),
    "frozen": (frozenset[UUID], [IDENTITY], "array<string>", [IDENTITY]),
    "pairs": (tuple[int, ...], [1, 2, 3], "array<bigint>", [1, 2, 3]),
    "map": (dict[str, float], {"x": 1, "y": 2.5}, "map<string,double>", [("x", 1.0), ("y", 2.5)]),
    "maps": (
        Mapping[str, list[Site]], {"x": [{"name": "n"}], "y": []},
        f"map<string,array<{SITE}>>", [("x", [{"name": "n", "floor": None}]), ("y", [])],
    ),
    "site": (Site, {"name": "hall", "floor": 7, "extra": True}, SITE, {"name": "hall", "floor": 7}),
    "sites": (list[Site] | None, None, f"array<{SITE}>", None),
    "plain": (Plain, {"a": 1}, "struct<a:bigint,b:string>", {"a": 1, "b": "b"}),
    "slotted": (
        Slotted, {"a": 1, "when": "2024-05-01T12:00:00Z"},
        "struct<a:bigint,when:timestamp>", {"a": 1, "when": NOON},
    ),
    "loose": (Loose, {"b": "x"}, "struct<a:bigint,b:string>", {"a": None, "b": "x"}),
}  # fmt: skip
EVERYTHING = {name: sent for name, (_, sent, _, _) in FIELDS.items()}
Everything = create_model(  # type: ignore[call-overload]
    "Everything",
    __module__=__name__,
    **{name: (kind, ...) for name, (kind, *_) in FIELDS.items()},
    absent=(Optional[Annotated[str, Field(max_length=3)]], None),  # noqa: UP045
)


class Reading(BaseModel):
    device: str
    temperature: float
    count: int = 0


class Aliased(BaseModel):
    value_: int = Field(alias="_value")
    camel: str = Field(validation_alias="camelCase")


class Validated(BaseModel):
    low: int
    high: int

    @field_validator("low")
    @classmethod
    def small(cls, low: int) -> int:
        if low == 13:
            raise KeyError("superstition")  # no ValueError: pydantic lets it pass
        return low * 10

    @model_validator(mode="after")
    def ordered(self) -> Validated:
        if self.low > self.high:
            raise ValueError("low > high")
        return self


class Money(BaseModel):
    amount: Decimal
    rate: float = 0.0
    label: str = ""


class StrictMoney(BaseModel):
    amount: Decimal
    rate: StrictFloat = 0.0


class Times(BaseModel):
    time: datetime | None = None
    day: date | None = None


class Changing(BaseModel):
    """Its validators and defaults return values of other types than its annotations."""

    number: Annotated[int, AfterValidator(lambda value: value / 2 if value > 10 else value)] = 0
    day: Annotated[date, AfterValidator(lambda value: datetime(value.year, 1, 1, 5))] | None = None
    site: Site = None  # type: ignore[assignment]
    sites: list[Site] = []
    text: str = 5  # type: ignore[assignment]


class Holder(BaseModel):
    site: Site
    sites: list[Site] = []


class Nothing(BaseModel):
    pass


class Nested:
    class Inner(BaseModel):
        a: int


class Wide(BaseModel):
    model_config = ConfigDict(extra="allow")
    numbers: dict[str, list[float]]


class Base64(BaseModel):
    model_config = ConfigDict(val_json_bytes="base64")
    raw: bytes


class Recursive(BaseModel):
    children: list[Recursive]


class Rooted(RootModel[int]):
    pass


class Odd(Enum):
    A = 1.5


class Clash(TypedDict):
    _channel: str


class Undefined(TypedDict):
    a: Missing  # type: ignore[name-defined]  # noqa: F821


NO_MODEL = 5


# --- helpers ---------------------------------------------------------------------------------------------


def messages(
    payloads: Sequence[bytes | None],
    content_types: Sequence[str | None] | str | None = None,
    headers: Sequence[dict[str, str] | None] | None = None,
) -> pa.RecordBatch:
    count = len(payloads)
    if content_types is None or isinstance(content_types, str):
        content_types = [content_types] * count
    rows = [list(row.items()) if row is not None else None for row in headers or [None] * count]
    columns = [payloads, [f"c/{i}" for i in range(count)], [None] * count, [1] * count, range(count)]
    columns += [[datetime(2024, 1, 1, tzinfo=UTC)] * count, content_types, ["id"] * count, [None] * count, rows]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, MESSAGES.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGES)


def struct(**fields: spark.DataType) -> spark.StructType:
    return spark.StructType([spark.StructField(name, kind) for name, kind in fields.items()])


#: names of types that have another name in a schema as JSON
NAMES = {"int": "integer", "bigint": "long", "months": "interval year to month"}


def type_of(ddl: str) -> spark.DataType:
    """As Spark parses it, which needs a session."""
    outer, _, inner = ddl.removesuffix(">").partition("<")
    if outer == "array":
        return spark.ArrayType(type_of(inner))
    if outer == "map":
        key, _, mapped = inner.partition(",")
        return spark.MapType(type_of(key), type_of(mapped))
    if outer == "struct":
        return schema_of(inner, ":")
    return spark.StructType().add("", NAMES.get(ddl, ddl))[0].dataType


def schema_of(ddl: str, colon: str = " ") -> spark.StructType:
    parts: list[str] = []
    for part in ddl.split(","):
        inside = parts and parts[-1].count("<") + parts[-1].count("(") > parts[-1].count(">") + parts[-1].count(")")
        parts[-1:] = [f"{parts[-1]},{part}"] if inside else [*parts[-1:], part]
    made = spark.StructType()
    for part in parts:
        name, _, kind = part.strip().partition(colon)
        made.add(name, type_of(kind.removesuffix(" not null")), not kind.endswith(" not null"))
    return made


def rows_of(columns: TypedColumns, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    made = columns.convert(batch)
    assert made.schema.equals(to_arrow_schema(columns.schema, timezone="UTC"), check_metadata=True)
    assert made.num_rows == batch.num_rows
    made.validate(full=True)
    return made.to_pylist()


def read(columns: TypedColumns | spark.StructType | type, *payloads: Any, **keywords: Any) -> list[dict[str, Any]]:
    """The payload's columns; ``{}`` for a corrupt row."""
    if isinstance(columns, spark.StructType):
        columns = TypedColumns.of_schema(spark.StructType([*columns.fields, *struct(**{CORRUPT: spark.StringType()})]))
    elif isinstance(columns, type):
        columns = TypedColumns.of_model(f"{HERE}:{columns.__qualname__}")
    sent = [payload if isinstance(payload, bytes) else json.dumps(payload).encode() for payload in payloads]
    found = []
    for row, payload in zip(rows_of(columns, messages(sent, **keywords)), sent, strict=True):
        corrupt = row.pop(CORRUPT)
        fields = {name: value for name, value in row.items() if name not in MESSAGE_COLUMNS}
        if corrupt is not None:
            assert corrupt == payload.decode(errors="replace")
            assert not any(value is not None for value in fields.values())
        found.append(fields if corrupt is None else {})
    return found


def value(kind: spark.DataType, *values: Any, **keywords: Any) -> list[Any]:
    """What JSON values become in a column of that type; ``...`` if corrupt."""
    payloads = [item if isinstance(item, bytes) else json.dumps({"v": item}).encode() for item in values]
    return [row.get("v", ...) for row in read(struct(v=kind), *payloads, **keywords)]


def error_of(reference: Any) -> str:
    with pytest.raises(InvalidOptionError) as caught:
        TypedColumns.of_model(reference)
    assert caught.value.option == "model"
    assert str(caught.value).startswith("option 'model'")
    return str(caught.value)


def schema_error_of(schema: Any) -> str:
    with pytest.raises(InvalidOptionError) as caught:
        TypedColumns.of_schema(schema)
    assert caught.value.option == "schema"
    return str(caught.value)


# --- the message's own columns ---------------------------------------------------------------------------


def test_a_model_gives_its_fields_and_then_the_columns_of_the_message() -> None:
    columns = TypedColumns.of_model(f"{HERE}:Reading")
    assert columns.schema.names == ["device", "temperature", "count", *BESIDE]
    assert all(field.nullable for field in columns.schema)
    (row,) = rows_of(columns, messages([b'{"device":"d","temperature":1.5}'], "application/json", [{"h": "x"}]))
    assert row == {
        "device": "d",
        "temperature": 1.5,
        "count": 0,
        "_channel": "c/0",
        "_key": None,
        "_partition": 1,
        "_offset": 0,
        "_timestamp": datetime(2024, 1, 1, tzinfo=UTC),
        "_content_type": "application/json",
        "_correlation_id": "id",
        "_reply_to": None,
        "_headers": [("h", "x")],
        CORRUPT: None,
    }


def test_a_schema_gives_its_columns_in_its_order() -> None:
    schema = schema_of("_offset long, a int, _value binary, _corrupt_record string, b string, _mine string")
    columns = TypedColumns.of_schema(schema)
    assert columns.schema == schema
    rows = rows_of(columns, messages([b'{"a":1,"b":"x","_mine":"y"}', b"\xff"]))
    assert [tuple(row.values()) for row in rows] == [
        (0, 1, b'{"a":1,"b":"x","_mine":"y"}', None, "x", "y"),
        (1, None, b"\xff", "\ufffd", None, None),
    ]


def test_only_columns_of_the_message_need_no_payload_that_fits() -> None:
    columns = TypedColumns.of_schema(struct(_channel=spark.StringType(), _value=spark.BinaryType()))
    assert rows_of(columns, messages([b"\xff"])) == [{"_channel": "c/0", "_value": b"\xff"}]


def test_a_corrupt_record_alone_tells_objects_from_the_rest() -> None:
    columns = TypedColumns.of_schema(struct(**{CORRUPT: spark.StringType()}))
    rows = rows_of(columns, messages([b"{}", b"[]", b"", None]))
    assert [row[CORRUPT] for row in rows] == [None, "[]", "", ""]


def test_no_columns_at_all() -> None:
    columns = TypedColumns.of_schema(spark.StructType())
    assert rows_of(columns, messages([b"{}"] * 3)) == [{}] * 3


def test_a_model_without_fields() -> None:
    assert TypedColumns.of_model(f"{HERE}:Nothing").schema.names == BESIDE
    assert read(Nothing, {"a": 1}) == [{}]


@table("count", [0, 1, 255, 256, 257, 100_000])
def test_one_row_for_each_message_in_order(count: int) -> None:
    batch = messages([b"no" if i % 7 == 3 else b'{"device":"d","temperature":%d}' % i for i in range(count)])
    rows = TypedColumns.of_model(f"{HERE}:Reading").convert(batch)
    assert rows.column("temperature").to_pylist() == [None if i % 7 == 3 else float(i) for i in range(count)]
    assert rows.column("_offset").to_pylist() == list(range(count))
    assert rows.column(CORRUPT).to_pylist() == ["no" if i % 7 == 3 else None for i in range(count)]


def test_slices_of_a_batch() -> None:
    payloads = [b'{"device":"d","temperature":%d}' % i for i in range(600)]
    encoded = [gzip.compress(payload) if i % 2 else payload for i, payload in enumerate(payloads)]
    headers = [{"x": "y", "content-encoding": "gzip"} if i % 2 else None for i in range(600)]
    batch = messages(encoded, headers=headers).slice(100, 400)
    rows = TypedColumns.of_model(f"{HERE}:Reading").convert(batch)
    assert rows.column("temperature").to_pylist() == [float(i) for i in range(100, 500)]


# --- by model --------------------------------------------------------------------------------------------


def test_every_type_of_a_model() -> None:
    columns = TypedColumns.of_model(f"{HERE}:Everything")
    kinds = {field.name: field.dataType.simpleString() for field in columns.schema.fields[: -len(BESIDE)]}
    assert kinds == {name: kind for name, (_, _, kind, _) in FIELDS.items()} | {"absent": "string"}
    assert read(columns, EVERYTHING) == [{name: found for name, (*_, found) in FIELDS.items()} | {"absent": None}]


def test_nested_fields_are_nullable_if_they_may_be_none() -> None:
    schema = TypedColumns.of_model(f"{HERE}:Everything").schema
    assert [field.nullable for field in schema["site"].dataType] == [False, True]
    assert [field.nullable for field in schema["loose"].dataType] == [True, True]
    assert schema["numbers"].dataType.containsNull is False
    assert schema["gaps"].dataType.containsNull is True
    assert schema["map"].dataType.valueContainsNull is False


@table(
    "model, payload, row",
    [
        ("Plain", {"a": 1, "hidden": 7}, {"a": 1, "b": "b"}),
        ("Slotted", {"a": 1}, {"a": 1, "when": None}),
        ("Checked", {"a": 1}, {"a": 1}),
        ("Checked", {"a": -1}, {}),
        ("Loose", {}, {"a": None, "b": None}),
        ("Dict", {"a": 1, "site": {"name": "n"}}, {"a": 1, "b": None, "site": {"name": "n", "floor": None}}),
        ("Dict", {"a": 1}, {}),
        ("Nested.Inner", {"a": 1}, {"a": 1}),
        ("Aliased", {"_value": 1, "camelCase": "x"}, {"value_": 1, "camel": "x"}),
        ("Aliased", {"value_": 1, "camel": "x"}, {}),
        ("Validated", {"low": 1, "high": 20}, {"low": 10, "high": 20}),
        ("Validated", {"low": 3, "high": 20}, {}),
        ("Validated", {"low": 13, "high": 20}, {}),
        ("Reading", {"device": "d", "temperature": "1.5"}, {"device": "d", "temperature": 1.5, "count": 0}),
        ("Reading", {"device": 5, "temperature": 1}, {}),
        ("Reading", {"device": "d", "temperature": 1, "count": 2**63}, {}),
        ("Reading", {"device": "d", "temperature": "NaN"}, {}),
        ("Reading", {"device": "d", "temperature": "inf"}, {}),
        ("Reading", b'{"device":"d","temperature":1e999}', {}),
        ("Reading", b'{"device":"d","temperature":NaN}', {}),
        ("Reading", b'{"device":"d","temperature":1,"x":-Infinity}', {}),
        ("Reading", {"device": "NaN", "temperature": 1}, {"device": "NaN", "temperature": 1.0, "count": 0}),
        ("Wide", {"numbers": {"a": [1, 2]}, "_x": 1}, {"numbers": [("a", [1.0, 2.0])]}),
        ("Wide", b'{"numbers":{"a":[1,1e999]}}', {}),
        ("Base64", {"raw": "aGk="}, {"raw": b"hi"}),
        ("Times", {"time": "0001-01-01T00:00:00+14:00"}, {}),
        ("Times", {"time": "9999-12-31T23:00:00-14:00"}, {}),
        ("Times", {"time": "9999-12-31T23:59:59.999999"}, {"time": datetime.max.replace(tzinfo=UTC), "day": None}),
        ("Times", {"day": "0001-01-01"}, {"time": None, "day": date.min}),
        ("Times", {"day": "10000-01-01"}, {}),
        ("Money", {"amount": "1.5"}, {"amount": Decimal("1.5"), "rate": 0.0, "label": ""}),
        ("Money", {"amount": "1.1234567890123456789"}, {}),
        ("Money", {"amount": "1e20"}, {}),
        ("Money", {"amount": "1E-999999999"}, {}),
        ("Money", {"amount": "0E-999999999"}, {"amount": Decimal(0), "rate": 0.0, "label": ""}),
        ("Money", {"amount": "1E+999999999"}, {}),
        ("Money", {"amount": "NaN"}, {}),
        ("Money", b'{"amount":1e-400}', {}),
        (
            "Money",
            b'{"amount":1.00000000000000000001e2,"rate":0.10000000000000001}',
            {"amount": Decimal("100.000000000000000001"), "rate": 0.1, "label": ""},
        ),
        ("Money", b'{"amount":1.5,"label":1.00000000000000000001}', {}),
        ("StrictMoney", b'{"amount":1.5,"rate":0.1}', {"amount": Decimal("1.5"), "rate": 0.1}),
        ("Changing", {}, {}),
        ("Changing", {"text": "x"}, {"number": 0, "day": None, "site": None, "sites": [], "text": "x"}),
        ("Changing", {"text": "x", "number": 11}, {}),
        ("Changing", {"text": "x", "day": "2024-05-01"}, {}),
    ],
)
def test_payloads_of_models(model: str, payload: Any, row: dict[str, Any]) -> None:
    columns = TypedColumns.of_model(f"{HERE}:{model}")
    good = read(columns, payload)
    assert good == [row]
    assert read(columns, b"no", payload, b"no") == [{}, row, {}]


def test_a_value_that_arrow_refuses_affects_no_other_row() -> None:
    payloads = [{"device": "d", "temperature": 1, "count": 2**70 if i % 100 == 5 else i} for i in range(600)]
    found = read(Reading, *payloads)
    assert [row.get("count") for row in found] == [None if i % 100 == 5 else i for i in range(600)]


def test_a_required_field_without_a_value_is_corrupt() -> None:
    hollow = Holder.model_construct(site=Site.model_construct(name=None))
    plan = plan_of_model(f"{HERE}:Holder")._replace(read=lambda _: hollow)
    kind = to_arrow_schema(plan.schema, timezone="UTC").types
    assert parse(plan, kind, messages([b"{}"]))[1] == [0]


@table(
    "annotation, field, kind",
    [
        (int | str, "a", "int | str"),
        (dict[str, list[Any]], "a[][]", "Any"),
        (dict[int, str], "a", "dict[int, str]"),
        (tuple[int, str], "a", "tuple[int, str]"),
        (Rooted, "a", "Rooted"),
        (Odd, "a", "Odd"),
        (Literal[True], "a", "Literal[True]"),
        (list, "a", "list"),
    ],
)
def test_a_type_without_a_column_is_named(
    monkeypatch: pytest.MonkeyPatch, annotation: Any, field: str, kind: str
) -> None:
    monkeypatch.setattr(sys.modules[HERE], "Model", create_model("Model", a=(annotation, ...)), raising=False)
    text = error_of(f"{HERE}:Model")
    assert f"field {field!r}" in text
    assert kind in text
    assert "supported" in text


def test_a_recursive_model_is_named() -> None:
    text = error_of(f"{HERE}:Recursive")
    assert "field 'children[]'" in text
    assert "recursive" in text


@table(
    "reference, problem",
    [
        ("", "expected 'package.module:Model'"),
        ("Model", "expected 'package.module:Model'"),
        ("a.b", "expected 'package.module:Model'"),
        ("a:b()", "expected 'package.module:Model'"),
        ("a..b:C", "expected 'package.module:Model'"),
        ("a:b:c", "expected 'package.module:Model'"),
        ("__import__('os'):x", "expected 'package.module:Model'"),
        ("no.such.module:Model", "ModuleNotFoundError"),
        (f"{HERE}:Absent", "there is no 'Absent'"),
        (f"{HERE}:Reading.Absent", "there is no 'Absent'"),
        (f"{HERE}:NO_MODEL", "pydantic cannot validate it"),
        (f"{HERE}:Color", "is no pydantic model, dataclass or typed dict"),
        (f"{HERE}:Rooted", "is no pydantic model, dataclass or typed dict"),
        (f"{HERE}:Device", "is no pydantic model, dataclass or typed dict"),
        (f"{HERE}:Undefined", "Missing"),
        (f"{HERE}:Clash", "'_channel' has the name of a column of the message"),
        ("__main__:Model", "put the model in a module of its own"),
    ],
)
def test_a_wrong_reference_to_a_model_is_explained(reference: Any, problem: str) -> None:
    text = error_of(reference)
    assert repr(reference) in text
    assert problem in text


# --- by schema -------------------------------------------------------------------------------------------

LONG = "1.00000000000000000001"


@table(
    "kind, good, bad",
    [
        ("string", {"": "", "\x00é\U0001f600": "\x00é\U0001f600"}, [5, 1.5, True, [], {}, b'{"v":"\\ud800"}']),
        ("boolean", {True: True, False: False}, ["true", 1, 0, "yes"]),
        ("byte", {-128: -128, 127: 127}, [128, -129, "5", 5.0, True, b'{"v":1e1}']),
        ("short", {-32768: -32768, 32767: 32767}, [32768, -32769]),
        ("int", {-(2**31): -(2**31), 2**31 - 1: 2**31 - 1}, [2**31, -(2**31) - 1]),
        ("long", {-(2**63): -(2**63), 2**63 - 1: 2**63 - 1}, [2**63, -(2**63) - 1, b'{"v":%s}' % (b"1" * 5000)]),
        ("float", {1.5: 1.5, 5: 5.0}, ["1.5", 1e39, -1e300, True, b'{"v":NaN}', b'{"v":1e999}']),
        ("double", {1.5: 1.5, 5: 5.0, 2**70: 2.0**70}, ["1.5", True, b'{"v":Infinity}', 10**400, "NaN"]),
        (
            "decimal(5,2)",
            {
                "1.5": Decimal("1.50"),
                "-999.99": Decimal("-999.99"),
                5: 5,
                1.25: Decimal("1.25"),
                "1.500": Decimal("1.5"),
            },
            ["1.255", 1.255, 1000, "1e9", "", "x", " 1", "1_0", "NaN", "Infinity", "\u0661", True, [], 1e300]
            + ["1E-999999999", "1E+999999999", b'{"v":1e-400}', b'{"v":%s}' % LONG.encode(), 10**4000],
        ),
        ("date", {"2024-02-29": date(2024, 2, 29), "0001-01-01": date.min}, ["86400", 86400, "2023-02-29", "20240101"]),
        ("date", {}, ["10000-01-01", "2024-01-01T00:00:00", "2024-01-01T00:00:00Z", "", "0000-01-01", True]),
        (
            "timestamp",
            {
                "2024-05-01T12:00:00Z": datetime(2024, 5, 1, 12, tzinfo=UTC),
                "2024-05-01 12:00:00.123456789+02:00": datetime(2024, 5, 1, 10, 0, 0, 123456, tzinfo=UTC),
                "2024-05-01T12:00:00": datetime(2024, 5, 1, 12, tzinfo=UTC),
                "2024-05-01": datetime(2024, 5, 1, tzinfo=UTC),
                0: datetime(1970, 1, 1, tzinfo=UTC),
                -1.5: datetime(1969, 12, 31, 23, 59, 58, 500000, tzinfo=UTC),
                1714567890.123457: datetime(2024, 5, 1, 12, 51, 30, 123457, tzinfo=UTC),
            },
            ["5", "20240101", "1714567890", 1714567890123, 1e300, True, "12:00", "0001-01-01T00:00:00+14:00", "now"]
            + ["9999-12-31T23:00:00-14:00", "10000-01-01T00:00:00Z", b'{"v":NaN}'],
        ),
        (
            "timestamp_ntz",
            {"2024-05-01T12:00:00": datetime(2024, 5, 1, 12), "2024-05-01": datetime(2024, 5, 1)},
            ["2024-05-01T12:00:00Z", "5", 5, "2024-05-01T12:00:00+02:00", 5.5],
        ),
        ("binary", {"aGk=": b"hi", "aGk": b"hi", "-_-_": b"\xfb\xff\xbf", "": b""}, ["a b", "é", 5, "a", [1]]),
    ],
)
def test_values_by_schema(kind: str, good: dict[Any, Any], bad: list[Any]) -> None:
    data_type = type_of(kind)
    for json_value, expected in good.items():
        assert value(data_type, json_value) == [expected]
    assert value(data_type, *good) == list(good.values())
    for json_value in bad:
        assert value(data_type, json_value) == [...], json_value
    assert value(data_type, None, b"{}") == [None, None]


@table(
    "ddl, good, bad",
    [
        ("array<int>", [([], []), ([1, None], [1, None])], [{}, "x", [1, "2"], [[1]], [2**31]]),
        (
            "map<string,double>",
            [({}, []), ({"a": 1, "": None}, [("a", 1.0), ("", None)])],
            [[], {"a": "1"}, [["a", 1]]],
        ),
        (
            "struct<a:int,b:struct<c:array<string>>>",
            [({}, {"a": None, "b": None}), ({"b": {"c": ["x"]}, "d": 1}, {"a": None, "b": {"c": ["x"]}})],
            [{"b": {"c": [1]}}, [], {"a": "1"}],
        ),
        ("struct<a:int not null>", [({"a": 1}, {"a": 1})], [{}, {"a": None}]),
        (
            "array<map<string,struct<d:date>>>",
            [([{"k": {"d": "2024-05-01"}}], [[("k", {"d": date(2024, 5, 1)})]])],
            [[1]],
        ),
    ],
)
def test_nested_values_by_schema(ddl: str, good: list[tuple[Any, Any]], bad: list[Any]) -> None:
    data_type = type_of(ddl)
    assert value(data_type, *[sent for sent, _ in good]) == [expected for _, expected in good]
    for json_value in bad:
        assert value(data_type, json_value) == [...], json_value


def test_elements_that_may_not_be_null() -> None:
    assert value(spark.ArrayType(spark.LongType(), False), [1], [None]) == [[1], ...]
    assert value(spark.MapType(spark.StringType(), spark.LongType(), False), {"a": 1}, {"a": None}) == [[("a", 1)], ...]


@table(
    "payload",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"x"',
        b"5",
        b"{",
        b"{} x",
        b"{}{}",
        b"{'v':1}",
        b'{"v":1,}',
        b'{"v":01}',
        b'{"v":1} // comment',
        b'{"x":"\xff"}',
        b'{"\xff":1}',
        b'{"x":"\\ud800"}',
        b'{"x":"\n"}',
        b'{"x":NaN}',
        b'{"x":-Infinity}',
        b'{"x":' + b"[" * 500 + b"]" * 500 + b"}",
        b"[" * 100_000,
        b'{"x":' * 100_000,
        b'{"x":' + b"1" * 10_000 + b"}",
        "{}".encode("utf-16"),
    ],
    ids=lambda payload: repr(payload[:20]),
)
def test_payloads_that_are_no_json_object_are_corrupt(payload: bytes) -> None:
    assert value(spark.LongType(), payload, b'{"v":1}') == [..., 1]
    assert read(Loose, payload, {"a": 1}) == [{}, {"a": 1, "b": None}]


def test_a_byte_order_mark_is_no_content() -> None:
    assert value(spark.LongType(), b'\xef\xbb\xbf{"v":1}', b'{"v":2}') == [1, 2]


def test_an_integer_with_a_huge_exponent_beside_a_decimal_is_corrupt_at_once() -> None:
    columns = struct(n=spark.LongType(), amount=spark.DecimalType(5, 2))
    start = time.process_time()
    assert read(columns, b'{"n":1e3000000,"amount":1}') == [{}]
    assert time.process_time() - start < 1


def test_the_last_of_duplicate_fields_counts() -> None:
    assert value(spark.LongType(), b'{"v":1,"v":2}', b'{"v":1,"v":null}') == [2, None]


def test_names_are_compared_exactly() -> None:
    schema = struct(**{"a b": spark.LongType(), "Ä.x": spark.LongType(), "a": spark.LongType()})
    assert read(schema, {"A": 1, "a b": 2, "Ä.x": 3}) == [{"a b": 2, "Ä.x": 3, "a": None}]


@table(
    "ddl, problem",
    [
        ("_offset int", "'_offset' is of the message and has the type bigint, not int"),
        ("_headers map<string,int>", "has the type map<string,string>"),
        ("_corrupt_record binary", "'_corrupt_record' is of the message and has the type string"),
        ("a int not null", "'a' cannot be NOT NULL"),
        ("_key string not null", "'_key' cannot be NOT NULL"),
        ("a int, a string", "the same name"),
        ("a struct<b:int,b:int>", "two fields 'a.b'"),
        ("a map<int,string>", "field 'a': the keys of a map are strings, not int"),
        ("a struct<b:array<months>>", "field 'a.b[]' cannot be of type interval year to month"),
        ("a variant", "field 'a' cannot be of type variant; supported are string, binary"),
    ],
)
def test_a_schema_that_cannot_be_read_is_explained(ddl: str, problem: str) -> None:
    assert problem in schema_error_of(schema_of(ddl))


def test_reserved_names_are_those_of_the_message_and_at_the_top_only() -> None:
    schema = schema_of("_Offset string, s struct<_offset:string>")
    assert read(schema, {"_Offset": "x", "s": {"_offset": "y"}}) == [{"_Offset": "x", "s": {"_offset": "y"}}]


# --- content ---------------------------------------------------------------------------------------------

CONTENT = {"v": 5, "t": "x", "b": "aGk="}
CONTENT_SCHEMA = struct(v=spark.LongType(), t=spark.StringType(), b=spark.BinaryType())
CONTENT_ROW = {"v": 5, "t": "x", "b": b"hi"}


class Content(BaseModel):
    v: int
    t: str


@table(
    "content_type, payload",
    [
        (None, json.dumps(CONTENT).encode()),
        ("", json.dumps(CONTENT).encode()),
        ("application/json", json.dumps(CONTENT).encode()),
        ("Application/JSON; charset=utf-8", json.dumps(CONTENT).encode()),
        ("application/vnd.device+json", json.dumps(CONTENT).encode()),
        ("text/plain", json.dumps(CONTENT).encode()),
        ("text/plain; charset=UTF-8", json.dumps(CONTENT).encode()),
        ("text/plain; charset=utf-16", json.dumps(CONTENT).encode("utf-16")),
        ("application/octet-stream", json.dumps(CONTENT).encode()),
        ("application/cbor", cbor2.dumps({**CONTENT, "b": b"hi"})),
        ("application/cbor", cbor2.dumps(CONTENT)),
        ("application/msgpack", msgpack.packb({**CONTENT, "b": b"hi"})),
        ("application/x+msgpack", msgpack.packb(CONTENT)),
    ],
)
def test_content_types(content_type: str | None, payload: bytes) -> None:
    plain = json.dumps(CONTENT).encode()
    packed = gzip.compress(payload)
    keywords = {
        "content_types": [content_type, content_type, None, content_type],
        "headers": [None, {"a": "b", "content-encoding": "gzip"}, {"a": "b"}, {"content-encoding": ""}],
    }
    assert read(CONTENT_SCHEMA, payload, packed, plain, payload, **keywords) == [CONTENT_ROW] * 4
    assert read(Content, payload, packed, plain, payload, **keywords) == [{"v": 5, "t": "x"}] * 4


@table(
    "content_type, encoding",
    [
        ("application/xml", None),
        ("text/csv", None),
        ("no content type", None),
        ("x" * 5000, None),
        ("text/plain; charset=no", None),
        ("application/cbor", None),
        ("application/msgpack", None),
        (None, "gzip"),
        (None, "br"),
        ("application/json", "gzip, gzip"),
        ("application/json", "x" * 5000),
    ],
)
def test_content_that_cannot_be_decoded_is_corrupt(content_type: str | None, encoding: str | None) -> None:
    keywords: Any = {
        "content_types": [content_type, None],
        "headers": [{"content-encoding": encoding} if encoding else None, None],
    }
    payload = json.dumps(CONTENT).encode()
    assert read(CONTENT_SCHEMA, payload, payload, **keywords) == [{}, CONTENT_ROW]
    assert read(Content, payload, payload, **keywords) == [{}, {"v": 5, "t": "x"}]


def test_a_compressed_payload_has_a_limit() -> None:
    bomb = gzip.compress(b'{"v":5,"t":"' + b" " * (65 * 2**20) + b'"}')
    assert read(Content, bomb, headers=[{"content-encoding": "gzip"}]) == [{}]


def test_times_and_numbers_that_a_format_has_itself() -> None:
    time = datetime(2024, 5, 1, 12, tzinfo=UTC)
    schema = struct(t=spark.TimestampType(), n=spark.DecimalType(5, 2), d=spark.DateType(), f=spark.DoubleType())
    sent = {"t": time, "n": Decimal("1.5"), "d": date(2024, 5, 1), "f": 1.5}
    assert read(schema, cbor2.dumps(sent, date_as_datetime=False), content_types="application/cbor") == [sent]
    assert value(
        spark.TimestampType(), msgpack.packb({"v": time}, datetime=True), content_types="application/msgpack"
    ) == [time]
    for wrong in (float("nan"), float("inf"), "1.5", b"x"):
        assert value(spark.DoubleType(), cbor2.dumps({"v": wrong}), content_types="application/cbor") == [...]
    assert value(spark.TimestampType(), cbor2.dumps({"v": "5"}), content_types="application/cbor") == [...]
    assert value(spark.TimestampNTZType(), cbor2.dumps({"v": time}), content_types="application/cbor") == [...]
    assert value(spark.DateType(), cbor2.dumps({"v": time}), content_types="application/cbor") == [...]
    assert value(spark.BinaryType(), cbor2.dumps({"v": "no base64"}), content_types="application/cbor") == [...]
    assert read(Reading, cbor2.dumps({"device": "d", "temperature": math.nan}), content_types="application/cbor") == [
        {}
    ]


# --- properties ------------------------------------------------------------------------------------------

Case = tuple[spark.DataType, st.SearchStrategy[tuple[Any, Any]]]


def _same(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    return strategy.map(lambda item: (item, item))


def _decimals(precision: int, scale: int) -> st.SearchStrategy[tuple[Any, Any]]:
    units = st.integers(-(10**precision) + 1, 10**precision - 1)
    exact = units.map(lambda number: Decimal(f"{number}E-{scale}"))
    return exact.map(lambda number: (str(number), number))


_ZONES = st.timedeltas(timedelta(hours=-14), timedelta(hours=14)).map(
    lambda delta: timezone(timedelta(minutes=delta // timedelta(minutes=1)))
)
_INSTANTS = st.datetimes(datetime(2, 1, 1), datetime(9998, 12, 31), timezones=_ZONES)
_LEAVES: list[Case] = [
    (spark.StringType(), _same(st.text())),
    (spark.BinaryType(), st.binary().map(lambda raw: (base64.b64encode(raw).decode(), raw))),
    (spark.BooleanType(), _same(st.booleans())),
    (spark.ByteType(), _same(st.integers(-128, 127))),
    (spark.ShortType(), _same(st.integers(-(2**15), 2**15 - 1))),
    (spark.IntegerType(), _same(st.integers(-(2**31), 2**31 - 1))),
    (spark.LongType(), _same(st.integers(-(2**63), 2**63 - 1))),
    (spark.FloatType(), _same(st.floats(width=32, allow_nan=False, allow_infinity=False))),
    (spark.DoubleType(), _same(st.floats(allow_nan=False, allow_infinity=False))),
    (spark.DecimalType(38, 18), _decimals(38, 18)),
    (spark.DecimalType(38, 38), _decimals(38, 38)),
    (spark.DecimalType(1, 0), _decimals(1, 0)),
    (spark.DateType(), st.dates().map(lambda day: (day.isoformat(), day))),
    (spark.TimestampType(), _INSTANTS.map(lambda time: (time.isoformat(), time.astimezone(UTC)))),
    (spark.TimestampNTZType(), st.datetimes().map(lambda time: (time.isoformat(), time))),
]


def _nullable(values: st.SearchStrategy[tuple[Any, Any]], nullable: bool) -> st.SearchStrategy[tuple[Any, Any]]:
    return st.one_of(st.just((None, None)), values) if nullable else values


def _array(case: Case, nullable: bool) -> Case:
    values = st.lists(_nullable(case[1], nullable), max_size=3)
    return spark.ArrayType(case[0], nullable), values.map(lambda both: ([a for a, _ in both], [b for _, b in both]))


def _map(case: Case, nullable: bool) -> Case:
    values = st.dictionaries(st.text(), _nullable(case[1], nullable), max_size=3)
    return (
        spark.MapType(spark.StringType(), case[0], nullable),
        values.map(lambda both: ({k: a for k, (a, _) in both.items()}, [(k, b) for k, (_, b) in both.items()])),
    )


def _struct(cases: list[tuple[Case, bool]]) -> Case:
    fields = {f"f{i}": case for i, case in enumerate(cases)}
    kind = spark.StructType([spark.StructField(name, case[0], null) for name, (case, null) in fields.items()])
    values = st.fixed_dictionaries({name: _nullable(case[1], null) for name, (case, null) in fields.items()})
    return kind, values.map(lambda both: ({k: a for k, (a, _) in both.items()}, {k: b for k, (_, b) in both.items()}))


CASES = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.one_of(
        st.builds(_array, inner, st.booleans()),
        st.builds(_map, inner, st.booleans()),
        st.builds(_struct, st.lists(st.tuples(inner, st.booleans()), max_size=3)),
    ),
    max_leaves=5,
)


@given(st.data())
def test_every_value_that_fits_comes_back(data: st.DataObject) -> None:
    kind, values = data.draw(CASES)
    both = data.draw(st.lists(_nullable(values, True), min_size=1, max_size=5))
    columns = TypedColumns.of_schema(struct(v=kind, _corrupt_record=spark.StringType()))
    columns = pickle.loads(pickle.dumps(columns)) if data.draw(st.booleans()) else columns
    found = read(columns, *[{"v": sent} for sent, _ in both])
    assert [row["v"] for row in found] == [expected for _, expected in both]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("2024-05-01T00:00:00Z"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(CASES, st.lists(JSON_VALUES, max_size=5))
def test_any_json_for_any_schema_is_a_row(case: Case, values: list[Any]) -> None:
    read(struct(v=case[0]), *[{"v": item} for item in values])


@given(st.dictionaries(st.sampled_from(list(EVERYTHING)), JSON_VALUES))
def test_any_json_for_a_model_is_a_row(changes: dict[str, Any]) -> None:
    read(Everything, {**EVERYTHING, **changes}, EVERYTHING)


TYPES = [
    None,
    "application/json",
    "text/plain",
    "text/plain; charset=utf-16",
    "application/cbor",
    "application/msgpack",
]


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.binary(max_size=60), st.binary(max_size=20).map(lambda tail: b'{"device":"d",' + tail)),
            st.sampled_from(TYPES) | st.text(max_size=20),
            st.sampled_from([None, "gzip", "zstd", "utf-16", "gzip, zstd"]) | st.text(max_size=20),
        ),
        max_size=4,
    )
)
def test_any_bytes_are_a_row(content: list[tuple[bytes, str | None, str | None]]) -> None:
    keywords: Any = {
        "content_types": [kind for _, kind, _ in content],
        "headers": [{"content-encoding": encoding} if encoding is not None else None for *_, encoding in content],
    }
    payloads = [payload for payload, *_ in content]
    read(Reading, *payloads, **keywords)
    read(CONTENT_SCHEMA, *payloads, **keywords)
    read(struct(device=spark.StringType(), v=spark.DecimalType(38, 18)), *payloads)


@given(st.from_regex(r"-?(0|[1-9][0-9]{0,24})(\.[0-9]{1,24})?([eE][+-]?[0-9]{1,3})?", fullmatch=True))
def test_a_number_for_a_decimal_is_exact_or_corrupt(number: str) -> None:
    exact = Fraction(number)
    fits = abs(exact) < 10**20 and (exact * 10**18).denominator == 1
    payload = b'{"amount":%s,"rate":0.5}' % number.encode()
    schema = struct(amount=spark.DecimalType(38, 18), rate=spark.DoubleType())
    for (found,) in (read(schema, payload), read(Money, payload)):
        assert bool(found) == fits
        assert not found or Fraction(found["amount"]) == exact


# --- between processes -----------------------------------------------------------------------------------


@table("name", ["Everything", "Reading", "Dict", "Slotted"])
def test_a_model_survives_pickling(name: str) -> None:
    columns = TypedColumns.of_model(f"{HERE}:{name}")
    pickled = pickle.dumps(columns)
    again = pickle.loads(pickled)
    assert again.schema == columns.schema
    batch = messages([json.dumps(EVERYTHING).encode(), b'{"device":"d","temperature":1}', b'{"a":1}', b"no"])
    assert again.convert(batch).equals(columns.convert(batch))
    assert pickle.loads(pickle.dumps(again)).schema == columns.schema


def test_a_model_that_an_executor_lacks_is_named() -> None:
    columns = TypedColumns.of_model(f"{HERE}:Reading")
    columns.__setstate__((columns.schema, "no.such:Model"))
    with pytest.raises(InvalidOptionError, match=r"no\.such:Model"):
        columns.convert(messages([b"{}"]))


def test_a_column_that_arrow_cannot_hold_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunked(values: Any, kind: pa.DataType) -> Any:
        if len(values) > 1:
            raise ValueError("two chunks")
        return pa.array(values, kind)

    monkeypatch.setattr("pyspark_messaging.read.typed.rows._array", chunked)
    with pytest.raises(BoundReachedError, match="2 GiB"):
        TypedColumns.of_model(f"{HERE}:Reading").convert(messages([b'{"device":"d","temperature":1}'] * 2))

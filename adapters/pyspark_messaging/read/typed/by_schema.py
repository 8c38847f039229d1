"""Plans by a Spark schema: a strict validator for its types."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, Final

from pydantic_core import CoreConfig, SchemaValidator, core_schema
from pyspark.sql import types as spark

from pyspark_messaging.errors import invalid_option
from pyspark_messaging.read.typed.decimals import Decimals, bounded, has_decimals
from pyspark_messaging.read.typed.rows import RESERVED, Row, RowPlan

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def plan_of_schema(schema: spark.StructType) -> RowPlan:
    """Compile the columns of a schema that are fields of the payload, see :meth:`TypedColumns.of_schema`."""
    fields = spark.StructType([field for field in schema if field.name not in RESERVED])
    if len(set(schema.names)) < len(schema.names):
        raise invalid_option("schema", "two columns have the same name")
    validator = SchemaValidator(_struct(fields, ""))

    def read_exactly(payload: bytes) -> Row:
        return validator.validate_python(json.loads(payload.decode(), parse_float=bounded))

    return RowPlan(
        fields,
        None,
        validator.validate_json,
        validator.validate_python,
        read_exactly if has_decimals(fields) else None,
        [partial(_pick, itemgetter(name)) for name in fields.names],
        dict.fromkeys(fields.names),
    )


def _pick(get: Callable[[Row], Any], rows: Sequence[Row]) -> list[Any]:
    return list(map(get, rows))


def _struct(kind: spark.StructType, where: str) -> core_schema.CoreSchema:
    fields: dict[str, core_schema.TypedDictField] = {}
    for field in kind:
        name = f"{where}.{field.name}" if where else field.name
        if field.name in fields:
            raise invalid_option("schema", f"there are two fields {name!r}")
        inner = _schema(field.dataType, name)
        if field.nullable:
            inner = core_schema.with_default_schema(core_schema.nullable_schema(inner), default=None)
        fields[field.name] = core_schema.typed_dict_field(inner, required=not field.nullable)
    config = CoreConfig(val_json_bytes="base64")  # not inherited
    return core_schema.typed_dict_schema(fields, strict=True, extra_behavior="ignore", config=config)


_INTEGERS: Final[Mapping[type[spark.DataType], int]] = {
    spark.ByteType: 8,
    spark.ShortType: 16,
    spark.IntegerType: 32,
    spark.LongType: 64,
}


def _schema(kind: spark.DataType, where: str) -> core_schema.CoreSchema:
    bits = _INTEGERS.get(type(kind))
    if bits is not None:
        return core_schema.int_schema(strict=True, ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)
    if isinstance(kind, spark.DecimalType):
        return core_schema.no_info_plain_validator_function(Decimals(kind.precision, kind.scale).read)
    if isinstance(kind, spark.StructType):
        return _struct(kind, where)
    if isinstance(kind, spark.ArrayType):
        item = _nullable(_schema(kind.elementType, f"{where}[]"), kind.containsNull)
        return core_schema.list_schema(item, strict=True, fail_fast=True)
    if isinstance(kind, spark.MapType):
        if not isinstance(kind.keyType, spark.StringType):
            raise invalid_option(
                "schema", f"field {where!r}: the keys of a map are strings, not {kind.keyType.simpleString()}"
            )
        value = _nullable(_schema(kind.valueType, f"{where}[]"), kind.valueContainsNull)
        entries = core_schema.dict_schema(core_schema.str_schema(strict=True), value, strict=True, fail_fast=True)
        return core_schema.no_info_after_validator_function(lambda value: list(value.items()), entries)
    for known, schema in _scalars().items():
        if isinstance(kind, known):
            return schema
    raise invalid_option(
        "schema",
        f"field {where!r} cannot be of type {kind.simpleString()}; supported are string, binary, boolean, byte, short, "
        f"int, long, float, double, decimal, date, timestamp, timestamp_ntz, array, map with string keys, and struct",
    )


def _nullable(schema: core_schema.CoreSchema, nullable: bool) -> core_schema.CoreSchema:
    return core_schema.nullable_schema(schema) if nullable else schema


@lru_cache(maxsize=1)
def _scalars() -> Mapping[type[spark.DataType], core_schema.CoreSchema]:
    floating = core_schema.float_schema(strict=True, allow_inf_nan=False)
    seconds = core_schema.no_info_after_validator_function(lambda value: _EPOCH + timedelta(seconds=value), floating)
    binary = core_schema.bytes_schema(strict=True)
    return {
        spark.StringType: core_schema.str_schema(strict=True),
        spark.BooleanType: core_schema.bool_schema(strict=True),
        spark.FloatType: floating,
        spark.DoubleType: floating,
        spark.BinaryType: core_schema.json_or_python_schema(
            binary, _either(binary, core_schema.no_info_plain_validator_function(_base64))
        ),
        spark.DateType: _iso(
            r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$", core_schema.date_schema(), strict=core_schema.date_schema(strict=True)
        ),
        spark.TimestampType: _iso(
            r"^[0-9]{4}-", core_schema.datetime_schema(), seconds, strict=core_schema.datetime_schema(strict=True)
        ),
        spark.TimestampNTZType: _iso(
            r"^[0-9]{4}-",
            core_schema.datetime_schema(tz_constraint="naive"),
            strict=core_schema.datetime_schema(strict=True, tz_constraint="naive"),
        ),
    }


def _either(*schemas: core_schema.CoreSchema) -> core_schema.CoreSchema:
    return core_schema.union_schema(list(schemas), mode="left_to_right") if len(schemas) > 1 else schemas[0]


def _iso(
    pattern: str, lax: core_schema.CoreSchema, *others: core_schema.CoreSchema, strict: core_schema.CoreSchema
) -> core_schema.CoreSchema:
    """Return the schema of a time in a string. It refuses seconds since 1970 in a string, which pydantic accepts."""
    text = core_schema.chain_schema([core_schema.str_schema(strict=True, pattern=pattern), lax])
    # strict accepts strings in JSON, but only times among Python objects
    return core_schema.json_or_python_schema(_either(text, *others), _either(text, *others, strict))


def _base64(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("neither bytes nor text")
    standard = text.rstrip("=").translate({ord("-"): "+", ord("_"): "/"})
    return b64decode(standard + "=" * (-len(standard) % 4), validate=True)

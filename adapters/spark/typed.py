"""Typed columns: the payload of messages as columns, by a pydantic model or by a Spark schema.

The columns of a typed read are the fields of the payload; what belongs to the message itself is there under its name
with an underscore in front (:data:`MESSAGE_COLUMNS`), and ``_corrupt_record`` beside it. A payload that does not fit
fails no job: all its payload columns are null, and ``_corrupt_record`` holds it as text, as it was sent.

Payloads are JSON unless the content type says otherwise: none, ``application/json``, ``+json``, ``text/plain``, and
also ``application/octet-stream``, which is what bytes are sent as when nobody said what they are. The header
``content-encoding`` tells of compression. Everything else goes through :mod:`messaging.codecs`.

**By model**, pydantic decides what fits, lax or strict, by alias, with all validators; ``str bool int float bytes
Decimal date datetime timedelta`` become ``string boolean bigint double binary decimal(38,18) date timestamp interval``;
``UUID``, enums, literals, IP addresses and URLs become ``string``; lists, sets and ``tuple[T, ...]`` arrays;
``dict[str, T]`` maps; models, dataclasses and typed dicts structs. A datetime without zone is taken as UTC.

**By schema**, values must be what they are: no number in a string, no string in a number.

==========================  =======================================================================================
string, boolean             a JSON string; ``true`` or ``false``
byte, short, int, long      a whole number in range; ``5.0`` is none
float, double               any number in range
decimal(p,s)                a number, or a string that is one; with more digits than fit it is corrupt, not rounded
binary                      base64 in a string, either alphabet, padded or not
date                        ``"2024-05-01"``
timestamp                   ISO 8601 in a string, UTC without a zone, cut to microseconds; or seconds since 1970
timestamp_ntz               ISO 8601 in a string, without a zone
array, map, struct          a list; an object; an object with the same rules
==========================  =======================================================================================

CBOR and msgpack have bytes and times of their own, which fit as well. What a field is called is compared exactly.
A missing field is null if the field of a struct may be, and corrupt otherwise; fields that nobody asked for are
ignored; of a field that is there twice the last counts. In no row is a number NaN, infinite, cut off or rounded to
fit; floating point numbers are the nearest there are.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import re
import types
import typing
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from enum import Enum
from functools import lru_cache, partial
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from operator import attrgetter, itemgetter, methodcaller
from types import SimpleNamespace
from typing import Annotated, Any, Final, Literal, NamedTuple, NewType
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pydantic
import typing_extensions
from pydantic_core import CoreConfig, SchemaValidator, core_schema, from_json
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from adapters.spark.columns import CONTENT_ENCODING
from messaging.codecs import decode
from messaging.codecs.encodings import charset_name
from messaging.codecs.mediatype import parse_media_type
from messaging.errors import BoundReachedError, InvalidOptionError, MissingExtraError, UnknownContentTypeError

logger = logging.getLogger(__name__)

#: what a typed read has of the message itself, in the order in which :meth:`TypedColumns.convert` gets it
MESSAGE_COLUMNS: Final[Mapping[str, spark.DataType]] = {
    "_value": spark.BinaryType(),
    "_channel": spark.StringType(),
    "_key": spark.StringType(),
    "_partition": spark.IntegerType(),
    "_offset": spark.LongType(),
    "_timestamp": spark.TimestampType(),
    "_content_type": spark.StringType(),
    "_correlation_id": spark.StringType(),
    "_reply_to": spark.StringType(),
    "_headers": spark.MapType(spark.StringType(), spark.StringType()),
}
CORRUPT: Final = "_corrupt_record"

_POSITION: Final = {name: position for position, name in enumerate(MESSAGE_COLUMNS)}
_RESERVED: Final[Mapping[str, spark.DataType]] = {**MESSAGE_COLUMNS, CORRUPT: spark.StringType()}

_JSON: Final = "application/json"
_OCTET_STREAM: Final = "application/octet-stream"

#: Rows that are objects at the same time: their memory is used again, and the garbage collector has little to visit.
#: With all of a batch at once a model takes more than twice as long.
_CHUNK: Final = 256

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_INSTANT: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_LAST_INSTANT: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)

Row = Any


class TypedColumns:
    """How messages become rows of a typed read.

    Made on the driver and pickled to the executors, where a model is imported again by its name.

    Attributes:
        schema: the Spark schema of the read.
    """

    schema: spark.StructType

    def __init__(self, schema: spark.StructType, plan: _Plan, reference: str | None = None) -> None:
        self.schema = schema
        self._reference = reference
        self._plan: _Plan | None = plan

    @classmethod
    def of_model(cls, reference: str) -> TypedColumns:
        """By a model: its fields, then all columns of :data:`MESSAGE_COLUMNS` but ``_value``, then ``_corrupt_record``.

        Args:
            reference: ``package.module:Model``, a pydantic model, dataclass or typed dict.

        Raises:
            InvalidOptionError: there is no such model, or one of its fields has no type in Spark.
        """
        plan = _plan_of_model(reference)
        taken = [name for name in plan.schema.names if name in _RESERVED]
        if taken:
            raise _bad_model(reference, f"field {taken[0]!r} has the name of a column of the message; give it another")
        beside = [spark.StructField(name, kind) for name, kind in _RESERVED.items() if name != "_value"]
        return cls(spark.StructType([*plan.schema.fields, *beside]), plan, reference)

    @classmethod
    def of_schema(cls, schema: spark.StructType) -> TypedColumns:
        """By a schema: exactly its columns.

        Raises:
            InvalidOptionError: a column's type cannot be read from a payload, one of :data:`MESSAGE_COLUMNS` has
                another type than it should, or a column is ``NOT NULL``, which no payload can promise.
        """
        if not isinstance(schema, spark.StructType):
            raise _bad_schema(f"it must be a StructType, not {type(schema).__name__}")
        for field in schema:
            right = _RESERVED.get(field.name)
            if right is not None and field.dataType != right:
                raise _bad_schema(
                    f"column {field.name!r} is of the message and has the type {right.simpleString()}, "
                    f"not {field.dataType.simpleString()}"
                )
            if not field.nullable:
                raise _bad_schema(
                    f"column {field.name!r} cannot be NOT NULL: it is null in rows whose payload does not fit; "
                    f"leave it nullable and filter on it, or on {CORRUPT}"
                )
        return cls(schema, _plan_of_schema(schema))

    def __getstate__(self) -> tuple[spark.StructType, str | None]:
        return self.schema, self._reference

    def __setstate__(self, state: tuple[spark.StructType, str | None]) -> None:
        self.schema, self._reference = state
        self._plan = None

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch of messages, in order, one for each.

        Args:
            batch: the columns of :data:`MESSAGE_COLUMNS`, in that order.

        Returns:
            A batch with the Arrow schema that ``to_arrow_schema(self.schema, timezone="UTC")`` makes.

        Raises:
            BoundReachedError: a column would hold more than 2 GiB.
            InvalidOptionError: the model cannot be imported here, though it could where this was made.
        """
        plan = self._plan
        if plan is None:
            plan = _plan_of_schema(self.schema) if self._reference is None else _plan_of_model(self._reference)
            self._plan = plan
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        if not len(arrow):  # a batch has its length from its columns
            return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
        kinds = [field.type for field in arrow if field.name not in _RESERVED]
        columns: Iterable[pa.Array] = ()
        corrupt: list[int] = []
        if kinds or CORRUPT in arrow.names:
            parsed, corrupt = _parse(plan, kinds, batch)
            columns = iter(parsed)
        made = []
        for field in arrow:
            if field.name == CORRUPT:
                made.append(_texts(batch.column(_POSITION["_value"]), corrupt))
            elif field.name in _RESERVED:
                column = batch.column(_POSITION[field.name])
                made.append(column if column.type == field.type else column.cast(field.type))
            else:
                made.append(next(iter(columns)))
        return pa.RecordBatch.from_arrays(made, schema=arrow)


def _bad_model(reference: object, problem: str) -> InvalidOptionError:
    return InvalidOptionError("model", f"option 'model' ({reference!r:.200}): {problem}")


def _bad_schema(problem: str) -> InvalidOptionError:
    return InvalidOptionError("schema", f"option 'schema': {problem}")


# --- rows ------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """A model or a schema, compiled.

    Attributes:
        schema: the fields of the payload.
        model: what a codec is asked for; ``None`` for whatever the content yields.
        read: JSON -> row.
        validate: what a codec made -> row.
        read_exactly: JSON whose numbers have more digits than a double -> row; ``None`` if that makes no difference.
        columns: what the column of each field holds -> what Arrow takes, from some rows.
        empty: stands for a row whose payload does not fit.
    """

    schema: spark.StructType
    model: Any
    read: Callable[[bytes], Row]
    validate: Callable[[Any], Row]
    read_exactly: Callable[[bytes], Row] | None
    columns: Sequence[Callable[[Sequence[Row]], Sequence[Any]]]
    empty: Row


def _parse(plan: _Plan, kinds: Sequence[pa.DataType], batch: pa.RecordBatch) -> tuple[list[pa.Array], list[int]]:
    """The columns of the payload, and which rows are corrupt."""
    values = batch.column(_POSITION["_value"])
    if values.null_count:
        values = pc.fill_null(values, b"")
    contents = _contents(batch)
    corrupt: list[int] = []
    chunks: list[list[pa.Array]] = [[pa.array([], kind)] for kind in kinds]
    for start in range(0, len(values), _CHUNK):
        payloads = values.slice(start, _CHUNK).to_pylist()
        rows: list[Row] = []
        bad: list[int] = []
        if contents is not None:
            read: Callable[[Any], Row] = partial(_read_content, plan)
            payloads = zip(payloads, contents[start : start + _CHUNK], strict=True)
        elif _needs_care(b"".join(payloads), numbers=plan.read_exactly is not None):
            read = partial(_read_carefully, plan)
        else:
            read = plan.read
        for payload in payloads:
            try:
                rows.append(read(payload))
            except Exception:  # noqa: BLE001 - validators of a model may raise anything
                bad.append(len(rows))
                rows.append(plan.empty)
        while True:
            try:
                made = [_array(column(rows), kind) for column, kind in zip(plan.columns, kinds, strict=True)]
                break
            except Exception as error:  # a value that no validator refused, but Arrow does
                unfit = {row for pair in zip(plan.columns, kinds, strict=True) for row in _unfit(*pair, rows)}
                if not unfit:  # each fits, but not all of them
                    raise _too_large() from error
            for row in unfit:
                rows[row] = plan.empty
            bad.extend(unfit)
        corrupt.extend(start + row for row in sorted(bad))
        for chunk, array in zip(chunks, made, strict=True):
            chunk.append(array)
    try:
        return [pa.concat_arrays(chunk) for chunk in chunks], corrupt
    except pa.ArrowInvalid as error:
        raise _too_large() from error


def _texts(values: pa.Array, corrupt: Sequence[int]) -> pa.Array:
    if not corrupt:
        return pa.nulls(len(values), pa.string())
    texts: list[str | None] = [None] * len(values)
    for row in corrupt:
        texts[row] = (values[row].as_py() or b"").decode(errors="replace")
    array = pa.array(texts, pa.string())
    if isinstance(array, pa.ChunkedArray):
        raise _too_large()
    return array


def _too_large() -> BoundReachedError:
    return BoundReachedError("a column of typed rows would hold more than 2 GiB: read fewer messages at a time")


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    array = pa.array(values, kind)
    if not isinstance(array, pa.Array) or not _sound(array):
        raise ValueError("out of range")
    return array


def _sound(array: pa.Array) -> bool:
    """Whether nothing is in it that Arrow takes, but a row must not hold."""
    kind = array.type
    if pa.types.is_floating(kind):
        return pc.all(pc.is_finite(array)).as_py() is not False
    if pa.types.is_timestamp(kind):
        ends = pc.min_max(array.view(pa.int64()))
        first, last = ends["min"].as_py(), ends["max"].as_py()
        return first is None or (first >= _FIRST_INSTANT and last <= _LAST_INSTANT)
    if not pa.types.is_nested(kind):
        return True
    if array.null_count:
        array = array.drop_null()
    if pa.types.is_map(kind):
        parts = [(array.items, kind.item_field)]
    elif pa.types.is_list(kind):
        parts = [(array.flatten(), kind.value_field)]
    else:
        parts = list(zip(array.flatten(), kind, strict=True))
    return all((field.nullable or not part.null_count) and _sound(part) for part, field in parts)


def _unfit(column: Callable[[Sequence[Row]], Sequence[Any]], kind: pa.DataType, rows: Sequence[Row]) -> list[int]:
    """Which rows do not fit, found by halving."""
    try:
        _array(column(rows), kind)
    except Exception:  # noqa: BLE001
        if len(rows) == 1:
            return [0]
        half = len(rows) // 2
        return _unfit(column, kind, rows[:half]) + [half + row for row in _unfit(column, kind, rows[half:])]
    return []


# --- content ---------------------------------------------------------------------------------------------


class _Content(NamedTuple):
    """Describes a payload to the codecs."""

    content_type: str | None
    content_encoding: str | None


def _contents(batch: pa.RecordBatch) -> list[_Content] | None:
    """What each payload is; ``None`` if all of them are plain JSON."""
    kinds = batch.column(_POSITION["_content_type"])
    headers = batch.column(_POSITION["_headers"])
    encoded = pc.any(pc.equal(headers.keys, CONTENT_ENCODING)).as_py()
    if not encoded and all(_is_json(kind) for kind in kinds.unique().to_pylist()):
        return None
    encodings: Iterable[str | None] = [None] * len(kinds)
    if encoded:
        encodings = [dict(row or ()).get(CONTENT_ENCODING) for row in headers.to_pylist()]
    return [_Content(kind, encoding) for kind, encoding in zip(kinds.to_pylist(), encodings, strict=True)]


@lru_cache(maxsize=256)
def _is_json(content_type: str | None) -> bool:
    if not content_type:
        return True
    try:
        essence, parameters = parse_media_type(content_type)
    except UnknownContentTypeError:
        return False
    if essence == "text/plain":
        return charset_name(parameters.get("charset", "utf-8")) in ("utf-8", "utf8", "us-ascii", "ascii")
    return essence in (_JSON, _OCTET_STREAM) or essence.endswith("+json")


def _read_content(plan: _Plan, payload_and_content: tuple[bytes, _Content]) -> Row:
    payload, (content_type, content_encoding) = payload_and_content
    try:
        if _is_json(content_type):
            if content_encoding:
                kind = content_type if content_type and content_type.lstrip().startswith("text/") else _OCTET_STREAM
                payload = _bytes(decode(payload, _Content(kind, content_encoding)))
            return _read_carefully(plan, payload)
        if content_type and content_type.lstrip().lower().startswith("text/plain"):
            return _read_carefully(plan, _bytes(decode(payload, _Content(content_type, content_encoding))))
        return plan.validate(decode(payload, _Content(content_type, content_encoding), plan.model))
    except MissingExtraError as error:
        _warn_once(str(error))
        raise


def _bytes(content: Any) -> bytes:
    return content.encode() if isinstance(content, str) else bytes(content)


@lru_cache(maxsize=16)
def _warn_once(problem: str) -> None:
    logger.warning("payloads are taken as corrupt here: %s", problem)


_BOM: Final = b"\xef\xbb\xbf"
_DIGITS: Final = bytes.maketrans(b"123456789.E+", b"0000000000e-")
#: after that translation: more digits than a double can tell apart, or an exponent that it may not have
_LONG_NUMBERS: Final = (b"0" * 17, b"0e000", b"0e-000")


def _needs_care(data: bytes, *, numbers: bool) -> bool:
    """Whether there may be something in it that the parser reads otherwise than it should."""
    return b"NaN" in data or b"Infinity" in data or _BOM in data or (numbers and _has_long_numbers(data))


def _has_long_numbers(data: bytes) -> bool:
    data = data.translate(_DIGITS)
    return any(number in data for number in _LONG_NUMBERS)


def _read_carefully(plan: _Plan, payload: bytes) -> Row:
    payload = payload.removeprefix(_BOM)
    if b"NaN" in payload or b"Infinity" in payload:
        from_json(payload, allow_inf_nan=False)
    row = plan.read(payload)
    if plan.read_exactly is not None and _has_long_numbers(payload):
        return plan.read_exactly(payload)
    return row


def _rounded(number: str) -> bool:
    return Decimal(repr(float(number))) != Decimal(number)


def _quoted_if_rounded(number: str) -> str | float:
    return number if _rounded(number) else float(number)


# --- decimals --------------------------------------------------------------------------------------------

_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", re.ASCII)


class _Decimals:
    """Values of ``decimal(precision, scale)``, exact or an error.

    All decimals for Arrow pass here, also because it ends the process when it gets one with an exponent such as
    -999999999 (seen with pyarrow 26).
    """

    def __init__(self, precision: int, scale: int) -> None:
        self._unit = Decimal(1).scaleb(-scale)
        self._context = Context(prec=precision, traps=[Inexact, InvalidOperation])

    def exact(self, value: Decimal) -> Decimal:
        """The same number with all digits after the point; raises if there is none."""
        if not isinstance(value, Decimal):
            raise TypeError("no decimal")
        return value.quantize(self._unit, context=self._context)

    def read(self, value: Any) -> Decimal:
        """The number that a payload means."""
        if isinstance(value, float):
            value = repr(value)
        elif isinstance(value, bool) or not isinstance(value, (str, int, Decimal)):
            raise ValueError("no number")
        if isinstance(value, str) and not _NUMBER.fullmatch(value):
            raise ValueError("no number")
        return self.exact(Decimal(value))


# --- by schema -------------------------------------------------------------------------------------------


def _plan_of_schema(schema: spark.StructType) -> _Plan:
    fields = spark.StructType([field for field in schema if field.name not in _RESERVED])
    if len(set(schema.names)) < len(schema.names):
        raise _bad_schema("two columns have the same name")
    validator = SchemaValidator(_struct(fields, ""))

    def read_exactly(payload: bytes) -> Row:
        return validator.validate_python(json.loads(payload.decode(), parse_float=Decimal))

    return _Plan(
        fields,
        None,
        validator.validate_json,
        validator.validate_python,
        read_exactly if _has_decimals(fields) else None,
        [partial(_pick, itemgetter(name)) for name in fields.names],
        dict.fromkeys(fields.names),
    )


def _pick(get: Callable[[Row], Any], rows: Sequence[Row]) -> list[Any]:
    return list(map(get, rows))


def _has_decimals(kind: spark.DataType) -> bool:
    if isinstance(kind, spark.StructType):
        return any(_has_decimals(field.dataType) for field in kind)
    if isinstance(kind, spark.ArrayType):
        return _has_decimals(kind.elementType)
    return isinstance(kind, spark.DecimalType) or (isinstance(kind, spark.MapType) and _has_decimals(kind.valueType))


def _struct(kind: spark.StructType, where: str) -> core_schema.CoreSchema:
    fields: dict[str, core_schema.TypedDictField] = {}
    for field in kind:
        name = f"{where}.{field.name}" if where else field.name
        if field.name in fields:
            raise _bad_schema(f"there are two fields {name!r}")
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
        return core_schema.no_info_plain_validator_function(_Decimals(kind.precision, kind.scale).read)
    if isinstance(kind, spark.StructType):
        return _struct(kind, where)
    if isinstance(kind, spark.ArrayType):
        item = _nullable(_schema(kind.elementType, f"{where}[]"), kind.containsNull)
        return core_schema.list_schema(item, strict=True, fail_fast=True)
    if isinstance(kind, spark.MapType):
        if not isinstance(kind.keyType, spark.StringType):
            raise _bad_schema(f"field {where!r}: the keys of a map are strings, not {kind.keyType.simpleString()}")
        value = _nullable(_schema(kind.valueType, f"{where}[]"), kind.valueContainsNull)
        entries = core_schema.dict_schema(core_schema.str_schema(strict=True), value, strict=True, fail_fast=True)
        return core_schema.no_info_after_validator_function(_items, entries)
    for known, schema in _scalars().items():
        if isinstance(kind, known):
            return schema
    raise _bad_schema(
        f"field {where!r} cannot be of type {kind.simpleString()}; supported are string, binary, boolean, byte, short, "
        f"int, long, float, double, decimal, date, timestamp, timestamp_ntz, array, map with string keys, and struct"
    )


def _nullable(schema: core_schema.CoreSchema, nullable: bool) -> core_schema.CoreSchema:
    return core_schema.nullable_schema(schema) if nullable else schema


def _items(value: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(value.items())


@lru_cache(maxsize=1)
def _scalars() -> Mapping[type[spark.DataType], core_schema.CoreSchema]:
    floating = core_schema.float_schema(strict=True, allow_inf_nan=False)
    seconds = core_schema.no_info_after_validator_function(_instant, floating)
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
    """A time in a string, but not the seconds since 1970 in one, as pydantic would take too."""
    text = core_schema.chain_schema([core_schema.str_schema(strict=True, pattern=pattern), lax])
    # of JSON, strict would take strings; of Python objects, it takes times alone
    return core_schema.json_or_python_schema(_either(text, *others), _either(text, *others, strict))


def _instant(seconds: float) -> datetime:
    return _EPOCH + timedelta(seconds=seconds)


def _base64(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("neither bytes nor text")
    standard = text.rstrip("=").translate({ord("-"): "+", ord("_"): "/"})
    return b64decode(standard + "=" * (-len(standard) % 4), validate=True)


# --- by model --------------------------------------------------------------------------------------------

_REFERENCE: Final = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")
_SUPPORTED: Final = (
    "str, bytes, bool, int, float, Decimal, date, datetime, timedelta, UUID, IP addresses, URLs, enums and literals of "
    "str and int, list, set, tuple[T, ...], dict[str, T], models, dataclasses and typed dicts of these, and any of "
    "them or None"
)


class _Kind(NamedTuple):
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


class _Field(NamedTuple):
    name: str
    kind: _Kind
    nullable: bool
    get: Callable[[Any], Any]

    def column(self, rows: Sequence[Row]) -> Sequence[Any]:
        return self.kind.several(list(map(self.get, rows)))


class _UnsupportedError(Exception):
    """A field has no type in Spark."""


def _plan_of_model(reference: str) -> _Plan:
    model = _imported(reference)
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(model)
        if not adapter.pydantic_complete:
            adapter.rebuild(raise_errors=True)
        fields = _fields(model, "", ())
    except _UnsupportedError as error:
        raise _bad_model(reference, str(error)) from None
    except RecursionError:
        raise _bad_model(reference, "a type refers to itself; Spark has no recursive types") from None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _bad_model(reference, f"pydantic cannot validate it: {problem:.300}") from error
    if fields is None:
        raise _bad_model(reference, f"{model!r:.100} is no pydantic model, dataclass or typed dict with fields")
    validator = adapter.validator
    schema = spark.StructType([spark.StructField(field.name, field.kind.spark) for field in fields])

    def read_exactly(payload: bytes) -> Row:
        # pydantic makes a double of a JSON number first, but not of one in a string
        return validator.validate_json(json.dumps(json.loads(payload.decode(), parse_float=_quoted_if_rounded)))

    nothing = dict.fromkeys(schema.names)
    return _Plan(
        schema,
        model,
        validator.validate_json,
        validator.validate_python,
        read_exactly if _has_decimals(schema) else None,
        [field.column for field in fields],
        nothing if typing_extensions.is_typeddict(model) else SimpleNamespace(**nothing),
    )


def _imported(reference: str) -> Any:
    match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    if match is None:
        raise _bad_model(reference, "expected 'package.module:Model'")
    if match["module"] == "__main__":
        raise _bad_model(reference, "executors cannot import from '__main__'; put the model in a module of its own")
    try:
        found: Any = importlib.import_module(match["module"])
    except Exception as error:
        raise _bad_model(
            reference,
            f"expected 'package.module:Model', but importing {match['module']!r} failed with {type(error).__name__}: "
            f"{error!s:.200}; it must be importable on the driver and on all executors",
        ) from error
    for name in match["name"].split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise _bad_model(
                reference, f"expected 'package.module:Model', but there is no {name!r} in {match['module']!r}"
            ) from None
    return found


def _fields(model: Any, where: str, outer: tuple[Any, ...]) -> list[_Field] | None:
    """The fields of a model, dataclass or typed dict; ``None`` if it is none."""
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
        annotations = {name: _maybe_missing(hint, model, name) for name, hint in hints.items()}
        getter = partial(methodcaller, "get")
    else:
        return None
    if model in outer:
        raise _UnsupportedError(f"field {where!r} refers to {model.__qualname__} again; Spark has no recursive types")
    made = []
    for name, annotation in annotations.items():
        kind, nullable = _kind(annotation, f"{where}.{name}" if where else name, (*outer, model))
        made.append(_Field(name, kind, nullable, getter(name)))
    return made


def _maybe_missing(hint: Any, model: Any, name: str) -> Any:
    return hint if name in model.__required_keys__ else hint | None


def _kind(annotation: Any, where: str, outer: tuple[Any, ...]) -> tuple[_Kind, bool]:
    """The kind of a field's type, and whether it may be ``None``."""
    annotation, nullable = _bare(annotation)
    origin, arguments = typing_extensions.get_origin(annotation), typing_extensions.get_args(annotation)
    kind: _Kind | None = None
    if origin in (Literal, typing_extensions.Literal):
        nullable = nullable or None in arguments
        if all(type(_plain(value)) in (str, int, types.NoneType) for value in arguments):
            kind = _STRING_OF_VALUE
    elif (origin in _SEQUENCES and len(arguments) == 1) or (origin is tuple and arguments[1:] == (...,)):
        item, item_nullable = _kind(arguments[0], f"{where}[]", outer)
        kind = _array_kind(item, item_nullable, ordered=origin not in _SETS)
    elif origin in (dict, Mapping) and _bare(arguments[0]) == (str, False):
        item, item_nullable = _kind(arguments[1], f"{where}[]", outer)
        kind = _map_kind(item, item_nullable)
    elif isinstance(annotation, type) and origin is None:
        kind = _scalar_kind(annotation)
        if kind is None:
            fields = _fields(annotation, where, outer)
            kind = None if fields is None else _struct_kind(fields)
    if kind is None:
        shown = annotation.__qualname__ if isinstance(annotation, type) and origin is None else repr(annotation)
        raise _UnsupportedError(
            f"field {where!r} is of type {shown:.100}, which is not supported here; {_SUPPORTED} are"
        )
    return kind, nullable


_QUALIFIERS: Final = (typing.Required, typing.NotRequired, typing.Final) + (
    typing_extensions.Required,
    typing_extensions.NotRequired,
    typing_extensions.ReadOnly,
)
_ALIASES: Final = (typing_extensions.TypeAliasType, getattr(typing, "TypeAliasType", typing_extensions.TypeAliasType))


def _bare(annotation: Any) -> tuple[Any, bool]:
    """A type without what does not change it, and without ``None``; and whether that was there."""
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
            annotation = typing.Union[tuple(rest)]  # noqa: UP007 - of one, it is that one
            nullable = True
        else:
            return annotation, nullable


def _scalar_kind(annotation: type) -> _Kind | None:
    known = _SCALARS.get(annotation)
    if known is not None:
        return known
    if issubclass(annotation, Enum):
        values = [member.value for member in annotation]
        return _STRING_OF_VALUE if all(type(value) in (str, int) for value in values) else None
    return _string_of(annotation) if issubclass(annotation, _URLS) else None


def _a(kind: type, *others: type, made: Callable[[Any], Any] | None = None, but: type | None = None) -> Any:
    """What makes values of a type, and of no other: with ``made``, or as they are."""

    def one(value: Any) -> Any:
        if not isinstance(value, (kind, *others)) or (but is not None and isinstance(value, but)):
            raise TypeError(f"no {kind.__name__}")
        return value if made is None else made(value)

    return one


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _string_of_value(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, (str, int)):
        return str(value)
    raise TypeError("neither str nor int")


def _array_kind(item: _Kind, nullable: bool, *, ordered: bool) -> _Kind:
    def one(values: Iterable[Any]) -> Sequence[Any]:
        several = item.several(list(values))
        if not ordered:
            with suppress(TypeError):  # for the same rows every time
                return sorted(several)
        return several

    return _Kind(spark.ArrayType(item.spark, nullable), one, _NONE)


def _map_kind(item: _Kind, nullable: bool) -> _Kind:
    def one(values: Mapping[str, Any]) -> Any:
        return list(zip(values, item.several(list(values.values())), strict=True))

    return _Kind(spark.MapType(spark.StringType(), item.spark, nullable), one, _NONE)


def _struct_kind(fields: Sequence[_Field]) -> _Kind:
    parts = [(field.name, field.get, field.kind.one, field.kind.as_is) for field in fields]

    def one(value: Any) -> dict[str, Any]:
        made = {}
        for name, get, convert, as_is in parts:
            part = get(value)
            made[name] = part if type(part) in as_is else convert(part)
        return made

    kind = spark.StructType([spark.StructField(field.name, field.kind.spark, field.nullable) for field in fields])
    return _Kind(kind, one, _NONE)


_NONE: Final = frozenset({types.NoneType})
_SETS: Final = (set, frozenset, Set)
_SEQUENCES: Final = (list, Sequence, *_SETS)
_URLS: Final = (pydantic.AnyUrl, pydantic.PostgresDsn, pydantic.CockroachDsn, pydantic.MongoDsn)

_STRING_OF_VALUE: Final = _Kind(spark.StringType(), _string_of_value, _NONE)
_DATETIME: Final = _Kind(spark.TimestampType(), _a(datetime), _NONE | {datetime})
_DATE: Final = _Kind(spark.DateType(), _a(date, but=datetime), _NONE | {date})

_ADDRESSES: Final = (IPv4Address, IPv6Address)
_INTERFACES: Final = (IPv4Interface, IPv6Interface)
_NETWORKS: Final = (IPv4Network, IPv6Network)


def _string_of(*kinds: type) -> _Kind:
    return _Kind(spark.StringType(), _a(*kinds, made=str), _NONE)


_SCALARS: Final[Mapping[Any, _Kind]] = {
    str: _Kind(spark.StringType(), _a(str, made=str.__str__), _NONE | {str}),
    pydantic.EmailStr: _Kind(spark.StringType(), _a(str, made=str.__str__), _NONE | {str}),
    bytes: _Kind(spark.BinaryType(), _a(bytes), _NONE | {bytes}),
    bool: _Kind(spark.BooleanType(), _a(bool), _NONE | {bool}),
    int: _Kind(spark.LongType(), _a(int, made=int, but=bool), _NONE | {int}),
    float: _Kind(spark.DoubleType(), _a(float, int, made=float, but=bool), _NONE | {float}),
    Decimal: _Kind(spark.DecimalType(38, 18), _Decimals(38, 18).exact, _NONE),
    date: _DATE,
    pydantic.PastDate: _DATE,
    pydantic.FutureDate: _DATE,
    datetime: _DATETIME,
    pydantic.AwareDatetime: _DATETIME,
    pydantic.NaiveDatetime: _DATETIME,
    pydantic.PastDatetime: _DATETIME,
    pydantic.FutureDatetime: _DATETIME,
    timedelta: _Kind(spark.DayTimeIntervalType(), _a(timedelta), _NONE | {timedelta}),
    UUID: _string_of(UUID),
    **{kind: _string_of(kind) for kind in (*_ADDRESSES, *_INTERFACES, *_NETWORKS)},
    pydantic.IPvAnyAddress: _string_of(*_ADDRESSES),
    pydantic.IPvAnyInterface: _string_of(*_INTERFACES),
    pydantic.IPvAnyNetwork: _string_of(*_NETWORKS),
}

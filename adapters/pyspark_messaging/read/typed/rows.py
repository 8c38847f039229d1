"""Rows of a typed read: the compiled plan of its columns, the content of payloads, and their conversion to Arrow.

A payload is read as JSON, or by a codec, as its content type and encoding tell. The JSON parser is fast, accepts more
than JSON, and turns every number with a point into a double. A search of the bytes finds payloads that this could
change; they are read with care. Payloads that do not fit are reported as corrupt. Arrow may refuse values that the
validators accept: the rows of such values are found by bisection.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import from_arrow_schema

from messaging.codecs import decode
from messaging.codecs.encodings import charset_name
from messaging.codecs.mediatype import parse_media_type
from messaging.errors import BoundReachedError, MissingExtraError, UnknownContentTypeError
from pyspark_messaging.columns import CONTENT_ENCODING, MESSAGE

logger = logging.getLogger(__name__)

#: the columns of the message, in the order of the batches for :meth:`TypedColumns.convert`
MESSAGE_COLUMNS: Final[Mapping[str, spark.DataType]] = {
    f"_{field.name}": field.dataType for field in from_arrow_schema(MESSAGE).fields
}
#: the column with the text of a payload that does not fit
CORRUPT: Final = "_corrupt_record"

#: the positions of the columns of the message in a batch
POSITION: Final = {name: position for position, name in enumerate(MESSAGE_COLUMNS)}
#: names that fields of a payload must not have
RESERVED: Final[Mapping[str, spark.DataType]] = {**MESSAGE_COLUMNS, CORRUPT: spark.StringType()}

#: one message, validated: a mapping, or an instance of a model
Row = Any


class RowPlan(NamedTuple):
    """A model or a schema, compiled.

    Attributes:
        schema: the fields of the payload.
        model: the type that a codec decodes to; ``None`` for the type that the content has.
        read: JSON -> row.
        validate: result of a codec -> row.
        read_exactly: JSON with numbers of more digits than a double -> row; ``None`` without decimals.
        columns: for each field, rows -> values for Arrow.
        empty: the row of a payload that does not fit.
    """

    schema: spark.StructType
    model: Any
    read: Callable[[bytes], Row]
    validate: Callable[[Any], Row]
    read_exactly: Callable[[bytes], Row] | None
    columns: Sequence[Callable[[Sequence[Row]], Sequence[Any]]]
    empty: Row


# --- content of payloads

_JSON: Final = "application/json"
_OCTET_STREAM: Final = "application/octet-stream"


class _Content(NamedTuple):
    """The content of a payload, for the codecs."""

    content_type: str | None
    content_encoding: str | None


def _contents_of(batch: pa.RecordBatch) -> list[_Content] | None:
    """Return the content of each payload; ``None`` if all of them are plain JSON."""
    kinds = batch.column(POSITION["_content_type"])
    headers = batch.column(POSITION["_headers"])
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


def _read_content(plan: RowPlan, payload_and_content: tuple[bytes, _Content]) -> Row:
    """Return the row of a payload of any content type; raise if it does not fit."""
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
    logger.warning("payloads of a content type are corrupt on this executor: %s", problem)


_BOM: Final = b"\xef\xbb\xbf"
_DIGITS: Final = bytes.maketrans(b"123456789.E+", b"0000000000e-")
#: after that translation: more digits than a double has, or a longer exponent
_LONG_NUMBERS: Final = (b"0" * 17, b"0e000", b"0e-000")


def _needs_care(data: bytes, *, numbers: bool) -> bool:
    """Return whether the parser might read ``data`` wrongly."""
    return b"NaN" in data or b"Infinity" in data or _BOM in data or (numbers and _has_long_numbers(data))


def _has_long_numbers(data: bytes) -> bool:
    data = data.translate(_DIGITS)
    return any(number in data for number in _LONG_NUMBERS)


def _read_carefully(plan: RowPlan, payload: bytes) -> Row:
    """Return the row of JSON that :func:`_needs_care`; raise if it does not fit."""
    payload = payload.removeprefix(_BOM)
    if b"NaN" in payload or b"Infinity" in payload:
        from_json(payload, allow_inf_nan=False)
    row = plan.read(payload)
    if plan.read_exactly is not None and _has_long_numbers(payload):
        return plan.read_exactly(payload)
    return row


# --- conversion to Arrow

#: rows that are objects at the same time: their memory is reused, and the garbage collector has few objects to visit.
#: With a whole batch at once a model takes more than twice as long.
_CHUNK_ROWS: Final = 256

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_INSTANT: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_LAST_INSTANT: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


def parse(plan: RowPlan, kinds: Sequence[pa.DataType], batch: pa.RecordBatch) -> tuple[list[pa.Array], list[int]]:
    """Return the columns of the payload, and the numbers of the corrupt rows."""
    values = batch.column(POSITION["_value"])
    if values.null_count:
        values = pc.fill_null(values, b"")
    contents = _contents_of(batch)
    corrupt: list[int] = []
    chunks: list[list[pa.Array]] = [[pa.array([], kind)] for kind in kinds]
    for start in range(0, len(values), _CHUNK_ROWS):
        payloads = values.slice(start, _CHUNK_ROWS).to_pylist()
        rows: list[Row] = []
        bad: list[int] = []
        if contents is not None:
            read: Callable[[Any], Row] = partial(_read_content, plan)
            payloads = zip(payloads, contents[start : start + _CHUNK_ROWS], strict=True)
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
            except Exception as error:  # Arrow refuses a value that the validators accept
                unfit = {row for pair in zip(plan.columns, kinds, strict=True) for row in _unfit(*pair, rows)}
                if not unfit:  # each value fits, but not all in one array
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


def texts_of(values: pa.Array, corrupt: Sequence[int]) -> pa.Array:
    """Return the payloads of the corrupt rows as text, and null for all other rows."""
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
    """Return whether ``array`` has no value that Arrow accepts but a row must not hold."""
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
    """Return the numbers of the rows that do not fit, found by bisection."""
    with contextlib.suppress(Exception):
        _array(column(rows), kind)
        return []
    if len(rows) == 1:
        return [0]
    half = len(rows) // 2
    return _unfit(column, kind, rows[:half]) + [half + row for row in _unfit(column, kind, rows[half:])]

"""Conversion of payloads to Arrow columns, some rows at a time. Payloads that do not fit are reported as corrupt.

Arrow may refuse values that the validators accept: the rows of such values are found by bisection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from messaging.errors import BoundReachedError
from pyspark_messaging.read.typed.content import contents_of, needs_care, read_carefully, read_content
from pyspark_messaging.read.typed.plan import POSITION, Row, RowPlan

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
    contents = contents_of(batch)
    corrupt: list[int] = []
    chunks: list[list[pa.Array]] = [[pa.array([], kind)] for kind in kinds]
    for start in range(0, len(values), _CHUNK_ROWS):
        payloads = values.slice(start, _CHUNK_ROWS).to_pylist()
        rows: list[Row] = []
        bad: list[int] = []
        if contents is not None:
            read: Callable[[Any], Row] = partial(read_content, plan)
            payloads = zip(payloads, contents[start : start + _CHUNK_ROWS], strict=True)
        elif needs_care(b"".join(payloads), numbers=plan.read_exactly is not None):
            read = partial(read_carefully, plan)
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

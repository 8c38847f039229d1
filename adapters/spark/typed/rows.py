"""Payloads become Arrow columns, some rows at a time, and what does not fit is set aside.

What no validator refused, Arrow may: the rows it refuses are found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from adapters.spark.typed.content import contents_of, needs_care, read_carefully, read_content
from adapters.spark.typed.plan import POSITION, Plan, Row
from messaging.errors import BoundReachedError

#: Rows that are objects at the same time: their memory is used again, and the garbage collector has little to visit.
#: With all of a batch at once a model takes more than twice as long.
_CHUNK: Final = 256

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_INSTANT: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_LAST_INSTANT: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


def parse(plan: Plan, kinds: Sequence[pa.DataType], batch: pa.RecordBatch) -> tuple[list[pa.Array], list[int]]:
    """The columns of the payload, and which rows are corrupt."""
    values = batch.column(POSITION["_value"])
    if values.null_count:
        values = pc.fill_null(values, b"")
    contents = contents_of(batch)
    corrupt: list[int] = []
    chunks: list[list[pa.Array]] = [[pa.array([], kind)] for kind in kinds]
    for start in range(0, len(values), _CHUNK):
        payloads = values.slice(start, _CHUNK).to_pylist()
        rows: list[Row] = []
        bad: list[int] = []
        if contents is not None:
            read: Callable[[Any], Row] = partial(read_content, plan)
            payloads = zip(payloads, contents[start : start + _CHUNK], strict=True)
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


def texts_of(values: pa.Array, corrupt: Sequence[int]) -> pa.Array:
    """The payloads of the rows that are corrupt as text, and null for all others."""
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

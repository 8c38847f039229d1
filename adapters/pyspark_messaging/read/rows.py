"""The rows that Spark gets: their columns, batches of a useful size, and the part of a reader that tasks need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from pyspark_messaging.columns import MESSAGE
from pyspark_messaging.errors import invalid_option
from pyspark_messaging.read.typed import TypedColumns

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from pyspark_messaging.options import ReadOptions

#: rows, and bytes, of the batches that are handed to Spark: a small batch costs Spark more than its rows do
_BATCH_ROWS: Final = 16_384
_BATCH_BYTES: Final = 16 * 2**20


class Columns:
    """The columns of a read: those of the message, some of them, or typed ones parsed from the payload. Picklable."""

    def __init__(self, schema: StructType, model: str | None) -> None:
        self._typed: TypedColumns | None = None
        self._names: tuple[str, ...] = ()
        if model is not None:
            self._typed = TypedColumns.of_model(model)
            if _named_types(schema) != _named_types(self._typed.schema):
                raise invalid_option("model", "the model is the schema; leave out .schema(...)")
        elif set(_named_types(schema)) <= set(_named_types(from_arrow_schema(MESSAGE))):
            self._names = tuple(schema.fieldNames())
        else:
            self._typed = TypedColumns.of_schema(schema)
        self._arrow = to_arrow_schema(schema, timezone="UTC")

    def convert(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield these columns of ``batches``, which begin with :data:`~pyspark_messaging.columns.MESSAGE`."""
        for batch in _gathered(batches):
            if self._typed is None:
                yield pa.RecordBatch.from_arrays([batch.column(name) for name in self._names], schema=self._arrow)
            else:
                message = pa.RecordBatch.from_arrays(batch.columns[: len(MESSAGE)], schema=MESSAGE)
                yield self._typed.convert(message)


def schema_of(options: ReadOptions) -> StructType:
    """Return the schema of a read without ``.schema(...)``."""
    if options.model is not None:
        return TypedColumns.of_model(options.model).schema
    return from_arrow_schema(MESSAGE)


def _named_types(schema: StructType) -> list[tuple[str, Any]]:
    return [(field.name, field.dataType) for field in schema.fields]


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches that are neither tiny nor huge."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > _BATCH_ROWS or size + batch.nbytes > _BATCH_BYTES):
            yield pa.concat_batches(waiting) if len(waiting) > 1 else waiting[0]
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if waiting:
        yield pa.concat_batches(waiting) if len(waiting) > 1 else waiting[0]


class TaskReader:
    """The part of a reader that runs in tasks, on executors. A pickled reader holds this part alone, and no options."""

    def __init__(self, read_task: Callable[[Any], Iterator[pa.RecordBatch]]) -> None:
        self._read_task = read_task

    def __getstate__(self) -> dict[str, Any]:
        return {"_read_task": self._read_task}

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task."""
        return self._read_task(partition)

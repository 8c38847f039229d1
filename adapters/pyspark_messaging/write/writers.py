"""The writers: ``df.write`` and ``df.writeStream`` publish the rows of a DataFrame.

**Processes.** Spark creates the writer on the driver, where columns and options are checked, and pickles it to the
tasks. Each task with rows has a connection of its own and publishes its rows in their order, at most ``maxInFlight``
of them unconfirmed. It ends when the broker has confirmed all rows, or fails with the error of the first row that the
broker did not confirm. ``commit`` and ``abort`` do nothing: published messages stay published.

**Retries.** Spark runs a failed task again, and a micro-batch after a crash: delivery is at least once. Messages have
the same ids each time, ``PREFIX-EPOCH-PARTITION-ROW-CHECKSUM``. The checksum covers channel and payload: rows that come
in another order the next time, as they may after a shuffle, must not be taken for each other.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from pyspark import TaskContext
from pyspark.sql import types
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from messaging.errors import InvalidOptionError
from messaging.errors.text import did_you_mean
from pyspark_messaging.errors import InvalidColumnError
from pyspark_messaging.write.row_publisher import TEXT_COLUMNS, RowPublisher

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_messaging.options import WriteOptions

logger = logging.getLogger(__name__)

#: columns of rows that were read, without a meaning for writing
_IGNORED: Final = frozenset({"partition", "offset", "timestamp"})
_KNOWN: Final = ("value", *TEXT_COLUMNS, "headers", *sorted(_IGNORED))
#: local properties of tasks with the id of a streaming query and the number of its micro-batch
_QUERY: Final = "sql.streaming.queryId"
_EPOCH: Final = "streaming.sql.batchId"


@dataclass
class Written(WriterCommitMessage):
    """The result of a task: the number of rows that it published, all of them confirmed."""

    rows: int


class _Writer:
    """The common part of the writers of batches and of streams. Picklable."""

    #: setting of Spark, its value that asks to overwrite, and the remedy
    _overwriting: ClassVar[tuple[str, str, str]]

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            setting, value, remedy = self._overwriting
            problem = f"{setting} {value!r}: published messages cannot be taken back; use {remedy}"
            raise InvalidOptionError(setting, problem)
        check_columns(schema, options.channel)
        self._options = options
        self._columns = tuple(name for name in schema.fieldNames() if name not in _IGNORED)
        #: chosen before any task runs, so that all attempts have the same
        self._generated_prefix = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish the rows of one task. Runs on an executor.

        Raises:
            InvalidRowError: a row does not become a message. The rows before it were published.
            UnsupportedFeatureError: a row has properties that the broker's protocol does not carry.
            ConnectFailedError, DeadlineError, PublishRefusedError: the broker failed; a note names the row.
        """
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        prefix, epoch = self._origin(context)
        publisher = RowPublisher(self._options, self._columns, partition, f"{prefix}-{epoch}-{partition}-")
        return Written(publisher.run(iterator))

    def _origin(self, _: TaskContext | None) -> tuple[str, str]:
        """Return prefix and epoch of the message ids of this write."""
        return self._options.id_prefix or self._generated_prefix, "0"

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:
        """Log the failure. Published messages stay published."""
        rows = sum(message.rows for message in messages if isinstance(message, Written))
        logger.warning("the write failed (batch %s); at least %d rows of it were published", batchId, rows)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Publishes a DataFrame."""

    _overwriting = ("mode", "overwrite", "mode('append')")


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Publishes the micro-batches of a query."""

    _overwriting = ("outputMode", "complete", "outputMode('append') or 'update'")

    def _origin(self, context: TaskContext | None) -> tuple[str, str]:
        query = None if context is None else context.getLocalProperty(_QUERY)
        epoch = None if context is None else context.getLocalProperty(_EPOCH)
        return self._options.id_prefix or query or self._generated_prefix, epoch or "0"


def check_columns(schema: StructType, channel: str | None) -> None:
    """Check that rows of ``schema`` can be messages; ``channel`` is that of rows that name none.

    Raises:
        InvalidColumnError: a column is unknown, duplicate, missing, or of the wrong type.
        InvalidOptionError: there is neither a column nor an option ``channel``.
    """
    seen = set()
    for field in schema.fields:
        name = field.name
        if name not in _KNOWN:
            hint = did_you_mean(name, _KNOWN) or f"known: {', '.join(_KNOWN)}"
            raise InvalidColumnError(
                name, f"unknown column {name!r}; {hint} (more than these can go into the value, such as "
                "to_json(struct(*)))"
            )  # fmt: skip
        if name in seen:
            raise InvalidColumnError(name, f"column {name!r} is there twice")
        seen.add(name)
        if name in _IGNORED:
            continue
        wanted = "map<string,string>" if name == "headers" else "binary or string" if name == "value" else "string"
        if not _fits(name, field.dataType):
            raise InvalidColumnError(name, f"column {name!r} must be {wanted}, not {field.dataType.simpleString()}")
    if "value" not in seen:
        raise InvalidColumnError("value", "column 'value' is missing: the payload, binary or string")
    if "channel" not in seen and channel is None:
        raise InvalidOptionError(
            "channel", "option 'channel' is missing, and there is no column 'channel': where do messages go?"
        )


def _fits(name: str, kind: types.DataType) -> bool:
    text = (types.StringType, types.CharType, types.VarcharType)
    if name == "headers":
        return isinstance(kind, types.MapType) and all(isinstance(k, text) for k in (kind.keyType, kind.valueType))
    return isinstance(kind, (types.BinaryType, *text) if name == "value" else text)

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
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, NoReturn
from zlib import crc32

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from messaging.codecs.cache import BoundedCache
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    InvalidHeaderError,
    InvalidOptionError,
    PayloadTooLargeError,
    UnsupportedFeatureError,
)
from messaging.errors.text import did_you_mean
from messaging.model import Features, MessageContext, PublishPlan, check_name, check_printable, check_text, identified
from pyspark_messaging.columns import CONTENT_ENCODING, MESSAGE_ID
from pyspark_messaging.errors import InvalidColumnError, InvalidRowError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from messaging import Messaging, MessagingError, Promise
    from messaging.publishing import MessagePublisher
    from pyspark_messaging.options import WriteOptions

logger = logging.getLogger(__name__)

#: text columns of a message, in the order in which they identify a shape
TEXT_COLUMNS: Final = ("channel", "key", "content_type", "correlation_id", "reply_to")
#: rows between two checks of the outcomes
_STRIDE: Final = 256
#: columns of rows that were read, without a meaning for writing
_IGNORED: Final = frozenset({"partition", "offset", "timestamp"})
_KNOWN: Final = ("value", *TEXT_COLUMNS, "headers", *sorted(_IGNORED))
#: local properties of tasks with the id of a streaming query and the number of its micro-batch
_QUERY: Final = "sql.streaming.queryId"
_EPOCH: Final = "streaming.sql.batchId"


# --- on the driver


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


# --- in tasks


class _RowShape(NamedTuple):
    """The values that messages share which differ in their payloads alone."""

    plan: PublishPlan
    #: checksum of the channel, with which the checksum of a message begins
    checksum: int


class RowPublisher:
    """Publishes the rows of one task, over a connection of its own that the first row opens.

    ``partition`` is the number of the task. Its message ids are ``id_stem``, row and checksum.
    """

    def __init__(self, options: WriteOptions, columns: Sequence[str], partition: int, id_stem: str) -> None:
        self._options = options
        self._columns = columns
        self._partition = partition
        self._id_stem = id_stem
        self._shapes: BoundedCache[tuple[Any, ...], _RowShape] = BoundedCache(4096)
        #: rows published, and rows whose outcome is known
        self._rows = self._settled = 0
        self._waiting: deque[Promise[None]] = deque()
        self._instance: Messaging | None = None
        #: whether messages get ids, and whether a confirmed message carries its id without being asked to
        self._has_ids = False
        self._travels = options.qos != "0" and not options.has_envelope

    def run(self, batches: Iterator[pa.RecordBatch]) -> int:
        """Publish all rows, wait for their confirms, and return the number of rows."""
        try:
            for batch in batches:
                if batch.num_rows:
                    self._publish(batch)
            if self._waiting:
                self._waiting[-1].exception()  # usually the last confirm, so that the others need no wait
            while self._waiting:
                self._settle()
            return self._rows
        finally:
            self._close()

    def _close(self) -> None:
        instance, self._instance = self._instance, None
        if instance is None:
            return
        instance.close()
        for promise in self._waiting:  # all have an outcome now; retrieve it, since one error is reported
            if promise.done():
                promise.exception()

    def _connect(self) -> MessagePublisher:
        if self._instance is None:
            options = self._options
            self._instance = instance = options.broker.connect_task(
                options.timeout, timeout=options.timeout, outbox_size=options.max_in_flight
            )
            self._has_ids = Features.EXTENSION_MESSAGE_ID in instance.features
        return self._instance.publisher

    def _publish(self, batch: pa.RecordBatch) -> None:
        publisher = self._connect()
        publish, waiting, shapes = publisher.publish_checked, self._waiting, self._shapes
        has_ids, travels, stem = self._has_ids, self._travels, self._id_stem
        row = self._rows
        for payload, fields in zip(_bytes(batch.column("value")), self._shapes_of(batch), strict=True):
            shape = shapes.get(fields)
            if shape is None:
                shape = self._checked(publisher, fields)
            if payload is None:
                self._refuse(
                    "value", "is null; coalesce(value, '') sends an empty payload, a filter leaves the row out"
                )
            plan, message_id = shape.plan, None
            if has_ids:
                message_id = f"{stem}{row}-{crc32(payload, shape.checksum):08x}"
                if not travels:  # the id has to be requested, in a plan of the message
                    plan = plan.replace(options=identified(plan.options, message_id))
                    message_id = None
            try:
                waiting.append(publish(payload, plan, plan.correlation_id, message_id=message_id))
            except PayloadTooLargeError as error:
                self._refuse("value", str(error))
            except BoundReachedError as error:  # no confirm came in time: the first message knows why
                self._settle_done()
                self._fail(row, error)
            row += 1
            self._rows = row
            if not row % _STRIDE:
                self._settle_done()

    def _shapes_of(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
        """Yield for each row its :data:`TEXT_COLUMNS` and its headers."""
        rows = batch.num_rows
        given = {name: batch.column(name) for name in self._columns}
        columns = [_texts(given.get(name), rows) for name in TEXT_COLUMNS]
        return zip(*columns, _headers(given.get("headers"), rows), strict=True)

    # --- outcomes

    def _settle_done(self) -> None:
        """Take the outcomes that are known; raise the error of the first message that failed."""
        while self._waiting and self._waiting[0].done():
            self._settle()

    def _settle(self) -> None:
        error = self._waiting[0].exception()
        if error is not None:
            self._fail(self._settled, error)
        self._waiting.popleft()
        self._settled += 1

    def _fail(self, row: int, error: MessagingError) -> NoReturn:
        error.add_note(
            f"That was row {row} of partition {self._partition}, counted from 0; the {self._settled} rows before the "
            f"first without confirm are with the broker, {self._rows - self._settled} others may be."
        )
        raise error.with_traceback(None)

    def _refuse(self, column: str, problem: str) -> NoReturn:
        """Fail since the next row is no message. Accepted rows before it are still sent."""
        raise InvalidRowError(self._rows, column, problem, partition=self._partition) from None

    # --- checks

    def _checked(self, publisher: MessagePublisher, fields: tuple[Any, ...]) -> _RowShape:
        """Check all columns of a row but its payload."""
        *texts, headers = fields
        for name, text in zip(TEXT_COLUMNS, texts, strict=True):
            self._check_text(name, text)
        channel, key, content_type, correlation_id, reply_to = texts
        if channel is None:
            channel = self._options.channel
            if channel is None:
                self._refuse("channel", "is null, and there is no option 'channel' to go by")
        content_encoding, extensions = None, dict(self._options.extensions)
        if headers is not None:
            content_encoding, sent = self._headers_of(headers)
            if sent:
                extensions[Features.EXTENSION_HEADERS] = sent
        if content_type is None:
            content_type = self._options.content_type
        context = MessageContext(
            channel, key, content_type, content_encoding, correlation_id, reply_to, MappingProxyType(extensions)
        )
        try:
            plan = publisher.compile(context)
        except InvalidHeaderError as error:
            self._refuse("headers", str(error))
        except ArgumentError as error:
            self._refuse("channel", str(error))
        except UnsupportedFeatureError as error:
            error.add_note(f"That was row {self._rows} of partition {self._partition}, counted from 0.")
            raise
        found = self._shapes[fields] = _RowShape(plan, crc32(channel.encode()))
        return found

    def _check_text(self, name: str, text: str | bytes | None) -> None:
        if text is None:
            return
        if isinstance(text, bytes):
            self._refuse(name, "is no valid UTF-8")
        try:
            if name in ("channel", "reply_to"):
                check_name(text)
            elif name == "content_type":
                check_printable(name, text)
            else:
                check_text(name, text)
        except ArgumentError as error:
            self._refuse(name, str(error))

    def _headers_of(self, headers: tuple[tuple[Any, Any], ...]) -> tuple[str | None, dict[str, str]]:
        """Return the content encoding and the headers to send. A read adds two headers that are none."""
        sent = {}
        encoding = None
        for name, text in headers:
            if isinstance(name, bytes) or isinstance(text, bytes):
                self._refuse("headers", "holds bytes that are no valid UTF-8")
            if text is None:
                self._refuse("headers", f"header {name[:80]!r} is null")
            if name == CONTENT_ENCODING:
                encoding = text
            elif name != MESSAGE_ID:
                sent[name] = text
        return encoding, sent


# --- Arrow


def _bytes(column: pa.Array) -> list[bytes | None]:
    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.view(pa.large_binary())
    found: list[bytes | None] = column.to_numpy(zero_copy_only=False).tolist()
    return found


def _texts(column: pa.Array | None, rows: int) -> Sequence[str | bytes | None]:
    """Return the texts of a column; bytes that are no UTF-8 as they are."""
    if column is None or column.null_count == rows:
        return (None,) * rows
    try:
        found: list[str | bytes | None] = column.to_numpy(zero_copy_only=False).tolist()
    except (pa.ArrowException, UnicodeDecodeError):  # Spark accepts any bytes as a string
        return [None if raw is None else _text(raw) for raw in _bytes(column)]
    return found


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _headers(column: pa.Array | None, rows: int) -> Sequence[tuple[tuple[Any, Any], ...] | None]:
    if column is None or column.null_count == rows:
        return (None,) * rows
    offsets = column.offsets.to_pylist()
    first, last = offsets[0], offsets[-1]
    names = _texts(column.keys[first:last], last - first)
    values = _texts(column.items[first:last], last - first)
    entries = list(zip(names, values, strict=True))
    return [
        tuple(entries[begin - first : end - first]) if valid else None
        for begin, end, valid in zip(offsets, offsets[1:], column.is_valid().to_pylist(), strict=False)
    ]

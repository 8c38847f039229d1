"""The sink: rows of a DataFrame become messages, by ``df.write`` and ``df.writeStream``.

**Who runs what.** Spark makes the writer on the driver, where columns and options are checked, and pickles it to the
tasks. Each task with rows has a connection of its own and publishes its rows in their order, at most ``maxInFlight``
of them unconfirmed. It ends when the broker has confirmed all of them, or fails with the error of the first that it
did not. ``commit`` and ``abort`` have nothing to do: what was published stays published.

**Again.** A task that failed is run again by Spark, and a micro-batch after a crash too: at least once. Messages have
the ids that they had the first time, ``PREFIX-EPOCH-PARTITION-ROW-CHECKSUM``. The checksum is that of channel and
payload: rows that come in another order the next time, as they may behind a shuffle, must not pass for each other.
"""

from __future__ import annotations

import difflib
import logging
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from zlib import crc32

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from adapters.spark.columns import CONTENT_ENCODING, MESSAGE_ID
from adapters.spark.connecting import connect
from adapters.spark.errors import InvalidColumnError, InvalidRowError
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    InvalidHeaderError,
    InvalidOptionError,
    PayloadTooLargeError,
    UnsupportedFeatureError,
)
from messaging.model import Features, MessageContext, check_name, check_printable, check_text, identified

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from adapters.spark.options import WriteOptions
    from messaging import Messaging, MessagingError, Promise
    from messaging.model import PublishOptions
    from messaging.publishing import MessagePublisher

logger = logging.getLogger(__name__)

#: columns that say how a message is to be sent; their order is that of the fields of a shape
_TEXTS: Final = ("channel", "key", "content_type", "correlation_id", "reply_to")
#: columns of rows that were read, without a meaning for writing
_IGNORED: Final = frozenset({"partition", "offset", "timestamp"})
_KNOWN: Final = ("value", *_TEXTS, "headers", *sorted(_IGNORED))
#: what Spark calls the id of a streaming query and the number of its micro-batch in tasks
_QUERY: Final = "sql.streaming.queryId"
_EPOCH: Final = "streaming.sql.batchId"
#: rows after which outcomes are looked at
_STRIDE: Final = 256
#: shapes of messages that are kept; more distinct ones are checked again
_SHAPES: Final = 4096


class Written(WriterCommitMessage):
    """What a task tells the driver: how many rows it published, all of them confirmed."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class _Writer:
    """What writers of batches and of streams have in common. Picklable."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(schema, options.channel)
        self._options = options
        self._columns = tuple(name for name in schema.fieldNames() if name not in _IGNORED)
        #: known before any task runs, so that all attempts have the same
        self._prefix = options.id_prefix
        self._made = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish the rows of one task; on an executor.

        Raises:
            InvalidRowError: a row does not become a message. Those before it were published.
            UnsupportedFeatureError: it asks for what the broker's protocol does not carry.
            ConnectFailedError, DeadlineError, PublishRefusedError: the broker, with a note that names the row.
        """
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        prefix, epoch = self._origin(context)
        task = _Task(self._options, self._columns, partition, f"{prefix}-{epoch}-{partition}-")
        return Written(task.run(iterator))

    def _origin(self, _: TaskContext | None) -> tuple[str, str]:
        """What the ids of this write begin with: prefix and epoch."""
        return self._prefix or self._made, "0"

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803
        """Nothing to do: everything is with the broker."""
        rows = sum(message.rows for message in messages if isinstance(message, Written))
        logger.debug("%d rows were published (batch %s)", rows, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803
        """Nothing that could be undone: what was published stays published."""
        rows = sum(message.rows for message in messages if isinstance(message, Written))
        logger.warning("the write failed (batch %s); at least %d rows of it were published", batchId, rows)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Publishes a DataFrame."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidOptionError(
                "mode", "mode 'overwrite': what was published cannot be taken back; use mode('append')"
            )
        super().__init__(options, schema)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Publishes the micro-batches of a query."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidOptionError(
                "outputMode",
                "outputMode 'complete': what was published cannot be taken back; use outputMode('append') or 'update'",
            )
        super().__init__(options, schema)

    def _origin(self, context: TaskContext | None) -> tuple[str, str]:
        query = None if context is None else context.getLocalProperty(_QUERY)
        epoch = None if context is None else context.getLocalProperty(_EPOCH)
        return self._prefix or query or self._made, epoch or "0"


def check_columns(schema: StructType, channel: str | None) -> None:
    """Refuse rows that can be no messages.

    Args:
        schema: of the rows.
        channel: where rows go that name no channel.

    Raises:
        InvalidColumnError: a column is unknown, twice there, missing, or of the wrong type.
        InvalidOptionError: nothing says where messages go.
    """
    seen = set()
    for field in schema.fields:
        name = field.name
        if name not in _KNOWN:
            near = difflib.get_close_matches(name.lower(), _KNOWN, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_KNOWN)}"
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


# --- on executors ---------------------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """What messages have in common that were checked together."""

    context: MessageContext
    options: PublishOptions
    #: of the channel; the checksum of a message goes on from it
    checksum: int

    def with_id(self, message_id: str) -> MessageContext:
        """The same context for one message."""
        it = self.context
        return MessageContext(
            it.channel, it.channel_extension, it.content_type, it.content_encoding, it.correlation_id,
            it.reply_to_channel, {**it.extensions, Features.EXTENSION_MESSAGE_ID: message_id},
        )  # fmt: skip


class _Unreadable:
    """Stands for a text that is none."""


_UNREADABLE: Final = _Unreadable()


class _Task:
    """The rows of one task on their way to the broker.

    Args:
        stem: what the ids of its messages begin with; the rest is row and checksum.
    """

    def __init__(self, options: WriteOptions, columns: Sequence[str], partition: int, stem: str) -> None:
        self._options = options
        self._columns = columns
        self._partition = partition
        self._stem = stem
        self._shapes: dict[tuple[Any, ...], _Shape] = {}
        #: rows published, and those of them whose outcome is known
        self._rows = self._settled = 0
        self._waiting: deque[Promise[None]] = deque()
        self._instance: Messaging | None = None
        #: whether messages are to have ids of ours, and those are what travels with a confirmed message anyway
        self._has_ids = False
        self._travels = options.qos != "0" and not options.has_envelope

    def run(self, batches: Iterator[pa.RecordBatch]) -> int:
        """Publish all rows and wait for their confirms; how many there were."""
        try:
            for batch in batches:
                if batch.num_rows:
                    self._publish(batch)
            if self._waiting:
                self._waiting[-1].exception()  # mostly the last one to be confirmed: the others are not waited for
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
        for promise in self._waiting:  # all have an outcome now; one error is enough
            if promise.done():
                promise.exception()

    def _connect(self) -> MessagePublisher:
        if self._instance is None:
            options = self._options
            self._instance = instance = connect(
                options.broker, options.timeout, timeout=options.timeout, outbox_size=options.max_in_flight
            )
            self._has_ids = Features.EXTENSION_MESSAGE_ID in instance.features
        return self._instance.publisher

    def _publish(self, batch: pa.RecordBatch) -> None:
        publisher = self._connect()
        publish, waiting, shapes = publisher.publish_checked, self._waiting, self._shapes
        has_ids, travels, stem = self._has_ids, self._travels, self._stem
        row = self._rows
        for payload, fields in zip(_payloads(batch), self._shapes_of(batch), strict=True):
            shape = shapes.get(fields)
            if shape is None:
                shape = self._checked(publisher, fields)
            if payload is None:
                self._refuse(
                    "value", "is null; coalesce(value, '') sends an empty payload, a filter leaves the row out"
                )
            context, options, message_id = shape.context, shape.options, None
            if has_ids:
                message_id = f"{stem}{row}-{crc32(payload, shape.checksum):08x}"
                if not travels:  # it has to be asked for, and each message needs a context for itself
                    context = shape.with_id(message_id)
                    options, message_id = identified(options, message_id), None
            try:
                waiting.append(publish(payload, context, options, context.correlation_id, message_id=message_id))
            except PayloadTooLargeError as error:
                self._refuse("value", str(error))
            except BoundReachedError as error:  # nothing was settled in time: the first in line knows why
                self._look()
                self._fail(row, error)
            row += 1
            self._rows = row
            if not row % _STRIDE:
                self._look()

    def _shapes_of(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
        """For each row the texts of :data:`_TEXTS`, and its headers."""
        rows = batch.num_rows
        columns = [_texts(_column(batch, self._columns, name), rows) for name in _TEXTS]
        return zip(*columns, _headers(_column(batch, self._columns, "headers"), rows), strict=True)

    # --- outcomes

    def _look(self) -> None:
        """Take note of the outcomes that are there; raises that of the first that failed."""
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
        """The next row is no message. What was accepted before it is still sent."""
        raise InvalidRowError(self._rows, column, problem, partition=self._partition) from None

    # --- checks

    def _checked(self, publisher: MessagePublisher, fields: tuple[Any, ...]) -> _Shape:
        """Check what a row says beside its payload."""
        *texts, headers = fields
        for name, text in zip(_TEXTS, texts, strict=True):
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
            options = publisher.check(context)
        except InvalidHeaderError as error:
            self._refuse("headers", str(error))
        except ArgumentError as error:
            self._refuse("channel", str(error))
        except UnsupportedFeatureError as error:
            error.add_note(f"That was row {self._rows} of partition {self._partition}, counted from 0.")
            raise
        if len(self._shapes) >= _SHAPES:
            self._shapes.clear()
        found = self._shapes[fields] = _Shape(context, options, crc32(channel.encode()))
        return found

    def _check_text(self, name: str, text: str | _Unreadable | None) -> None:
        if text is None:
            return
        if isinstance(text, _Unreadable):
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
        """Content encoding and headers to send: the source tells two things as headers that are none."""
        sent = {}
        encoding = None
        for name, text in headers:
            if isinstance(name, _Unreadable) or isinstance(text, _Unreadable):
                self._refuse("headers", "holds what is no valid UTF-8")
            if text is None:
                self._refuse("headers", f"header {name[:80]!r} is null")
            if name == CONTENT_ENCODING:
                encoding = text
            elif name != MESSAGE_ID:
                sent[name] = text
        return encoding, sent


# --- Arrow ----------------------------------------------------------------------------------------------------------


def _column(batch: pa.RecordBatch, names: Sequence[str], name: str) -> pa.Array | None:
    return batch.column(name) if name in names else None


def _payloads(batch: pa.RecordBatch) -> list[bytes | None]:
    return _bytes(batch.column("value"))


def _bytes(column: pa.Array) -> list[bytes | None]:
    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.view(pa.large_binary())
    found: list[bytes | None] = column.to_numpy(zero_copy_only=False).tolist()
    return found


def _texts(column: pa.Array | None, rows: int) -> Sequence[str | _Unreadable | None]:
    if column is None or column.null_count == rows:
        return (None,) * rows
    try:
        found: list[str | _Unreadable | None] = column.to_numpy(zero_copy_only=False).tolist()
    except (pa.ArrowException, UnicodeDecodeError):  # Spark takes any bytes for a text
        return [None if raw is None else _text(raw) for raw in _bytes(column)]
    return found


def _text(raw: bytes) -> str | _Unreadable:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _UNREADABLE


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

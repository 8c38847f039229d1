"""What a task does: publish its rows in their order, and wait until the broker has confirmed all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from zlib import crc32

import pyarrow as pa

from messaging.codecs.cache import BoundedCache
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    InvalidHeaderError,
    PayloadTooLargeError,
    UnsupportedFeatureError,
)
from messaging.model import Features, MessageContext, check_name, check_printable, check_text, identified
from pyspark_messaging.columns import CONTENT_ENCODING, MESSAGE_ID
from pyspark_messaging.errors import InvalidRowError

if TYPE_CHECKING:
    from messaging import Messaging, MessagingError, Promise
    from messaging.model import PublishPlan
    from messaging.publishing import MessagePublisher
    from pyspark_messaging.options import WriteOptions

#: text columns of a message, in the order in which they identify a shape
TEXT_COLUMNS: Final = ("channel", "key", "content_type", "correlation_id", "reply_to")
#: rows between two checks of the outcomes
_STRIDE: Final = 256


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


# --- Arrow ----------------------------------------------------------------------------------------------------------


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

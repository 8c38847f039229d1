"""The readers of RabbitMQ streams. The broker keeps the messages, so there is no journal; offsets are the broker's.

The driver asks where a stream ends; tasks read their ranges themselves. Nothing is stored or deleted at the broker: the
stream's retention (``maxAge``, ``maxLengthBytes``) decides how long messages stay. Each stream is a partition; a range
may be split into several tasks, each with a consumer of its own.

Offsets of a stream may have gaps, where the broker stores records of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

import messaging
from messaging.errors import ClosedError, ConnectionLostError, DeadlineError, MessagingError
from pyspark_messaging.columns import JOURNAL, batch_of
from pyspark_messaging.errors import DataLossError, invalid_option
from pyspark_messaging.option_values import EARLIEST, LATEST
from pyspark_messaging.read.rows import Columns, TaskReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from messaging import Message, MessageStream, Messaging
    from pyspark_messaging.options import Broker, ReadOptions

logger = logging.getLogger(__name__)

#: how long to wait for the first message of a stream that may be empty, in seconds
_FIRST_SECONDS: Final = 0.5
#: silence after which the last chunk of a stream has arrived, and how long that may take, in seconds
_QUIET_SECONDS, _CHUNK_SECONDS = 0.05, 1.0
#: how long to wait for a message that should exist, in seconds
CERTAIN_SECONDS: Final = 5.0
#: rows of a batch of a task
_BATCH_ROWS: Final = 8192
#: silence within a range of offsets after which the task fails, in seconds
_SILENCE_SECONDS: Final = 30.0


def _connect(broker: Broker) -> Messaging:
    return messaging.connect(broker.url, **broker.keywords())


def _subscribe(instance: Messaging, stream: str, offset: str | int, prefetch: int) -> MessageStream:
    return instance.subscribe(
        stream,
        queue=stream,
        queue_type="stream",
        stream_offset=offset,
        autocreate=False,
        prefetch=prefetch,
        buffer_size=prefetch,
    )


def _offset_of(message: Message) -> int:
    return int(message.context.extensions["streamOffset"])


def _begin(instance: Messaging, stream: str) -> int:
    """Return the first offset of a stream; 0 for an empty stream."""
    with _subscribe(instance, stream, "first", 1) as messages:
        try:
            return _offset_of(messages.receive(_FIRST_SECONDS))
        except DeadlineError:
            return 0


def _end(instance: Messaging, stream: str) -> int:
    """Return the offset after the last; 0 for an empty stream. Messages that arrive meanwhile may be left out."""
    until = time.monotonic() + _CHUNK_SECONDS
    wait, last = _FIRST_SECONDS, -1
    # the broker begins with the last chunk, which may hold thousands of messages
    with _subscribe(instance, stream, "last", 1000) as messages:
        while time.monotonic() < until:
            try:
                last = _offset_of(messages.receive(wait))
            except DeadlineError:
                break
            wait = _QUIET_SECONDS
    return last + 1


def _has(instance: Messaging, stream: str, offset: int) -> bool:
    """Return whether the stream has a message with ``offset``."""
    with _subscribe(instance, stream, offset, 1) as messages:
        try:
            return _offset_of(messages.receive(CERTAIN_SECONDS)) == offset
        except DeadlineError:
            return False


@dataclass
class StreamPartition(InputPartition):
    """The range of one task: the messages of a stream from offset ``start`` on and before ``end``."""

    number: int
    stream: str
    start: int
    end: int


class _StreamTasks:
    """The part of a reader that runs in tasks. Picklable; holds the credentials of the broker."""

    def __init__(self, options: ReadOptions, columns: Columns) -> None:
        self._broker = options.required_broker
        self._prefetch = options.prefetch
        self._fail_on_data_loss = options.fail_on_data_loss
        self._columns = columns

    def read(self, partition: StreamPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ``partition``.

        Raises:
            DataLossError: the stream has lost some of them.
            MessagingError: the broker cannot be read.
        """
        return self._columns.convert(self._rows(partition))

    def _rows(self, partition: StreamPartition) -> Iterator[pa.RecordBatch]:
        at = partition.start
        if at >= partition.end:
            return
        with (
            self._broker.connect_task(_SILENCE_SECONDS) as instance,
            _subscribe(instance, partition.stream, at, self._prefetch) as messages,
        ):
            waiting: list[Message] = []
            offsets: list[int] = []
            while at < partition.end:
                message = self._next(instance, messages, partition, at)
                offset = _offset_of(message)
                if offset < at:  # redelivered after a connection loss
                    continue
                if not offsets and at == partition.start and offset > at:
                    self._check_gap(instance, partition, offset)
                at = offset + 1
                if offset >= partition.end:
                    break
                waiting.append(message)
                offsets.append(offset)
                if len(waiting) == _BATCH_ROWS:
                    yield _batch(waiting, offsets, partition.number)
                    waiting, offsets = [], []
            if waiting:
                yield _batch(waiting, offsets, partition.number)

    def _next(self, instance: Messaging, messages: MessageStream, partition: StreamPartition, at: int) -> Message:
        try:
            return messages.receive(_SILENCE_SECONDS)
        except DeadlineError as error:
            if not instance.connection_state.value.is_up:
                raise ConnectionLostError(
                    f"stream {partition.stream!r} at offset {at}: no connection for {_SILENCE_SECONDS:g} s"
                ) from error
            raise DataLossError(
                f"option 'queue': stream {partition.stream!r} sends nothing from offset {at} on, and {partition.end} "
                "was its end; was it deleted, or made anew?"
            ) from None
        except ClosedError:
            raise MessagingError(f"option 'queue': stream {partition.stream!r} ended while it was read") from None

    def _check_gap(self, instance: Messaging, partition: StreamPartition, found: int) -> None:
        """Raise or warn if the broker has deleted the first messages of a range. Its own gaps are no loss."""
        with _subscribe(instance, partition.stream, "first", 1) as messages:
            begin = _offset_of(messages.receive(_SILENCE_SECONDS))
        if begin <= partition.start:
            return
        text = (
            f"option 'queue': stream {partition.stream!r} begins at offset {begin} now, and {partition.start} to "
            f"{min(begin, partition.end)} are asked for: the broker has deleted them"
        )
        if self._fail_on_data_loss:
            raise DataLossError(f"{text}; failOnDataLoss=false goes on at {found}")
        logger.warning("%s", text)


def _batch(messages: Sequence[Message], offsets: list[int], number: int) -> pa.RecordBatch:
    # no arrival time: a range that is read again must give the same rows
    rows = batch_of(messages, number, 0, None)
    at = JOURNAL.get_field_index("offset")
    return rows.set_column(at, JOURNAL.field(at), pa.array(offsets, pa.int64()))


def _plan(
    streams: Sequence[str], begins: Mapping[str, int], ends: Mapping[str, int], min_partitions: int | None
) -> list[StreamPartition]:
    """Return one task for each stream with messages; more if asked for."""
    ranges = [(number, stream, begins[stream], ends[stream]) for number, stream in enumerate(streams)]
    total = sum(max(0, end - begin) for _, _, begin, end in ranges)
    share = -(-total // min_partitions) if min_partitions else total
    return [
        StreamPartition(number, stream, at, min(at + share, end))
        for number, stream, begin, end in ranges
        for at in range(begin, end, max(1, share))
    ]


def _resolve(
    wanted: str | Mapping[str, int], option: str, streams: Sequence[str], instance: Messaging
) -> dict[str, int]:
    """Return the offset of each stream that ``startingOffsets`` or ``endingOffsets`` stands for."""
    if isinstance(wanted, str):
        ask = _end if wanted == LATEST else _begin
        return {stream: ask(instance, stream) for stream in streams}
    if unknown := sorted(set(wanted) - set(streams)):
        raise invalid_option(option, f"{', '.join(unknown)} is not among the streams {', '.join(streams)}")
    otherwise = EARLIEST if option == "startingOffsets" else LATEST
    return {**_resolve(otherwise, option, [each for each in streams if each not in wanted], instance), **wanted}


class StreamsReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads RabbitMQ streams in micro-batches."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(_StreamTasks(options, Columns(schema, options.model)).read)
        self._options = options
        self._instance: Messaging | None = None
        self._final_offsets: dict[str, int] | None = None

    @property
    def _connected(self) -> Messaging:
        if self._instance is None:
            self._instance = _connect(self._options.required_broker)
        return self._instance

    def _latest(self) -> dict[str, int]:
        return {stream: _end(self._connected, stream) for stream in self._options.queues}

    def _latest_if_reachable(self) -> dict[str, int]:
        """Return the ends of the streams, or nothing while the broker is unreachable."""
        try:
            return self._latest()
        except (DeadlineError, ConnectionLostError) as error:
            logger.warning("cannot ask for the ends of streams: %s; asking again with the next micro-batch", error)
            return {}

    def initialOffset(self) -> dict[str, Any]:
        """Return the first offsets of a query without checkpoint."""
        options = self._options
        return {"streams": _resolve(options.starting, "startingOffsets", options.queues, self._connected)}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of ``maxRowsPerBatch``."""
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """End the run where the streams end now."""
        self._final_offsets = self._latest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch."""
        begins = self._begins(start)
        known = self._final_offsets if self._final_offsets is not None else self._latest_if_reachable()
        ends = {}
        for stream, begin in begins.items():
            end = known.get(stream, begin)
            if end < begin:
                self._check_not_recreated(stream, begin)
            ends[stream] = max(begin, end)
        if isinstance(limit, ReadMaxRows):
            total = sum(ends.values()) - sum(begins.values())
            if total > limit.max_rows:
                ends = {
                    stream: begin + -(-(ends[stream] - begin) * limit.max_rows // total)
                    for stream, begin in begins.items()
                }
        return {"streams": ends}

    def _check_not_recreated(self, stream: str, begin: int) -> None:
        """Raise if a stream that seems to end before ``begin`` was recreated. Its answer may just have been slow."""
        if not self._options.fail_on_data_loss or _has(self._connected, stream, begin - 1):
            return
        raise DataLossError(
            f"option 'queue': stream {stream!r} does not reach offset {begin}, where the checkpoint is: it was made "
            "anew; failOnDataLoss=false waits until it does"
        )

    def _begins(self, offsets: dict[str, Any]) -> dict[str, int]:
        try:
            known = {str(stream): int(offset) for stream, offset in offsets["streams"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise MessagingError("option 'checkpointLocation': the checkpoint is not one of RabbitMQ streams") from None
        missing = [stream for stream in self._options.queues if stream not in known]
        if missing:  # added since the checkpoint was written
            known |= {stream: _begin(self._connected, stream) for stream in missing}
        return {stream: known[stream] for stream in self._options.queues}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch."""
        return _plan(self._options.queues, self._begins(start), self._begins(end), self._options.min_partitions)

    def stop(self) -> None:
        """Disconnect."""
        if self._instance is not None:
            self._instance.close()
            self._instance = None


class StreamsBatchReader(TaskReader, DataSourceReader):
    """Reads the messages that RabbitMQ streams have when the query is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(_StreamTasks(options, Columns(schema, options.model)).read)
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks of the read."""
        options = self._options
        with _connect(options.required_broker) as instance:
            begins = _resolve(options.starting, "startingOffsets", options.queues, instance)
            untils = _resolve(options.ending, "endingOffsets", options.queues, instance)
        planned = _plan(options.queues, begins, untils, options.min_partitions)
        return planned or [StreamPartition(0, options.queues[0], 0, 0)]

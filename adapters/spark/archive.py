"""The archive of events: what happens on a typed event bus as Parquet, and a range of it back onto a bus (157.6).

The history of a bus is bounded and goes with the process. This one is neither::

    bus ──EventRecorder──> channel of a broker ──archive──> Parquet ──replay──> bus

>>> query = archive(spark, url="mqtt://localhost", path="/data/events",        # doctest: +SKIP
...     checkpoint="/data/events.checkpoint", journal_path="/data/events.journal")
>>> recorder = EventRecorder(bus.monitor, messaging.connect("mqtt://localhost"))  # doctest: +SKIP
>>> replay("/data/events", another, start=noon, end=evening, topics="orders/*", speed=10.0)  # doctest: +SKIP

**Columns.** One row is one recorded event:

===================  ==================  =============================================================================
``topic``            string              it was published to
``timestamp``        timestamp           when it was published; microseconds, UTC
``data``             string              JSON: see :mod:`adapters.spark.recorded`
``recorder``         string              with ``sequence`` what tells it from every other event. A number that is
``sequence``         long                missing is an event that was lost, or that has not come yet
``channel``          string              it came by
``partition``        int                 of the journal
``offset``           long                in the journal
``_corrupt_record``  binary              the payload of a message that is no recorded event
``_error``           string              and why it is none
``date``             date                of ``timestamp`` in UTC: what the files are partitioned by
===================  ==================  =============================================================================

What comes by the channels and is no recorded event fails nothing: it is a row with ``_corrupt_record``, its
``timestamp`` that of the message, and neither topic nor data. A replay leaves such rows out.

**Guarantees.** From the recorder to Parquet every event comes at least once. A broker that delivers a message again is
noticed by the journal if it can be; for the rest, rows that are there twice stay in the archive, since whether the
first one is there still can only be known by reading all of it. Whoever reads drops them, as :func:`replay` does:
``frame.dropDuplicates(["recorder", "sequence"])``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from adapters.spark import register
from adapters.spark.archived import (
    ArchiveError,
    ArchiveMissingError,
    ArchiveUnreadableError,
    InvalidRangeError,
    Reading,
    read_events,
)
from adapters.spark.recorded import RecordedEvent, dump_data, load_event
from adapters.spark.recorder import CHANNEL, EventRecorder, RecorderDTO, filters_of, patterns_of
from adapters.spark.replay import Clock, Replayed, replay
from messaging.dispatch.topics import parse_filter
from messaging.errors import ArgumentError, DecodeError
from messaging.model import check_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = [
    "ArchiveError",
    "ArchiveMissingError",
    "ArchiveUnreadableError",
    "Clock",
    "EventRecorder",
    "InvalidRangeError",
    "Reading",
    "RecordedEvent",
    "RecorderDTO",
    "Replayed",
    "archive",
    "read_events",
    "replay",
]

#: a file for each date is written that often, unless it is told otherwise
TRIGGER: Final = "30 seconds"

#: of an archive
SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("data", pa.string()),
        ("recorder", pa.string()),
        ("sequence", pa.int64()),
        ("channel", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("_corrupt_record", pa.binary()),
        ("_error", pa.string()),
        ("date", pa.date32()),
    ]
)
_MESSAGE: Final = ("value", "channel", "partition", "offset", "timestamp")


def archive(
    spark: SparkSession,
    *,
    url: str,
    path: str | PathLike[str],
    checkpoint: str | PathLike[str],
    journal_path: str | PathLike[str],
    channel: str = CHANNEL,
    topics: str | Iterable[str] = "*",
    trigger: Mapping[str, Any] | None = None,
    name: str | None = None,
    options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Write what recorders publish to Parquet, until the query is stopped.

    Started again with the same ``checkpoint`` and ``journal_path`` it goes on where it was, with what the broker has
    kept for it meanwhile; a journal is that of its channel and topics, and does not go with others. One archive is
    written by one query at a time. For SQL, ``from_json(data, 'id INT, total DOUBLE')`` has the fields of an event.

    Args:
        spark: the session; it gets to know the format ``messaging``.
        url: of the broker: ``mqtt://`` or ``amqp://``.
        path: folder of the archive, or its URI; made if it is missing.
        checkpoint: folder in which Spark notes how far the query has come.
        journal_path: folder in which messages are kept that were received and not written yet.
        channel: as the recorders have it.
        topics: filter of the topics that are archived, or several. They become channel patterns, so that the broker
            sends little else.
        trigger: how often files are written, as for ``DataStreamWriter.trigger``: ``{"availableNow": True}`` writes
            what is there, and ends. By default ``{"processingTime": "30 seconds"}``.
        name: of the query, in Spark's interface.
        options: more options of the source, such as ``group``, ``maxRowsPerBatch`` or ``passwordFile``.

    Raises:
        InvalidChannelError, InvalidTopicError, ArgumentError: one of these is not as described.
        MissingExtraError: PySpark is not installed.
        pyspark.errors.PySparkException: what Spark has to say, wrong options of the source included.
    """
    check_name(channel)
    filters = filters_of(topics)
    if trigger is not None and not isinstance(trigger, Mapping):
        raise ArgumentError(f"trigger must be a mapping such as {{'availableNow': True}}, not {trigger!r:.80}")
    register(spark)
    patterns = patterns_of(channel, filters)
    source = {
        **(options or {}),
        "url": url,
        "channel": json.dumps(patterns),
        "journalPath": fspath(journal_path),
    }
    messages = spark.readStream.format("messaging").options(**source).load().select(*_MESSAGE)
    rows = messages.mapInArrow(_rows_of([each.text for each in filters]), _spark_schema())
    writer = rows.writeStream.format("parquet").partitionBy("date").outputMode("append")
    writer = writer.option("checkpointLocation", fspath(checkpoint))
    if name is not None:
        writer = writer.queryName(name)
    return writer.trigger(**(trigger or {"processingTime": TRIGGER})).start(fspath(path))


def _spark_schema() -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(SCHEMA)


def _rows_of(topics: list[str]) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What executors do; takes with it nothing but the filters."""

    def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filters = [parse_filter(each) for each in topics]
        for batch in batches:
            yield to_rows(batch, lambda topic: any(each.matches(topic) for each in filters))

    return rows_of


def to_rows(messages: pa.RecordBatch, is_wanted: Callable[[str], bool]) -> pa.RecordBatch:
    """The rows of an archive for messages of the source. Events on topics that nobody wants are left out."""
    rows: list[tuple[Any, ...]] = []
    columns = (messages.column(name).to_pylist() for name in _MESSAGE)
    for value, channel, partition, offset, received in zip(*columns, strict=True):
        try:
            event = load_event(value)
        except DecodeError as error:
            time = datetime.now(UTC) if received is None else received  # not every broker says when
            rows.append(_row(None, time, None, None, None, channel, partition, offset, value, str(error)))
            continue
        if is_wanted(event.topic):
            rows.append(
                _row(
                    event.topic, event.time, dump_data(event.data), event.recorder, event.sequence,
                    channel, partition, offset, None, None,
                )
            )  # fmt: skip
    found = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(found, SCHEMA, strict=True)], schema=SCHEMA
    )


def _row(topic: str | None, time: datetime, *others: Any) -> tuple[Any, ...]:
    return topic, time, *others, time.astimezone(UTC).date()

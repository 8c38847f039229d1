"""``archive``: the streaming query that writes recorded events to Parquet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from messaging.dispatch.eventdata import filters_of, patterns_of
from messaging.dispatch.topics import parse_filter
from messaging.errors import ArgumentError, DecodeError
from messaging.model import check_name
from pyspark_messaging import register
from pyspark_messaging.recorder.event_recorder import CHANNEL
from pyspark_messaging.recorder.recorded_event import dump_data, load_event

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: default interval at which files are written, one for each date
TRIGGER: Final = "30 seconds"

#: the columns of an archive
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
    """Write the events that recorders publish to Parquet, until the query is stopped.

    Restarted with the same ``checkpoint`` and ``journal_path``, the query continues with the messages that the broker
    has kept. A journal belongs to one channel and its topics. One query at a time writes an archive. For SQL,
    ``from_json(data, 'id INT, total DOUBLE')`` has the fields of an event.

    Args:
        spark: the session; the format ``messaging`` is registered with it.
        url: the broker: ``mqtt://`` or ``amqp://``.
        path: folder of the archive, or its URI; created if it is missing.
        checkpoint: folder in which Spark stores the progress of the query.
        journal_path: folder for messages that are received and not written yet.
        channel: the channel of the recorders.
        topics: filter of the topics that are archived, or several. They become channel patterns, so that the broker
            sends few other messages.
        trigger: how often files are written, as for ``DataStreamWriter.trigger``: ``{"availableNow": True}`` writes
            the messages that the broker holds, and ends. By default ``{"processingTime": "30 seconds"}``.
        name: name of the query in Spark.
        options: more options of the source, such as ``group``, ``maxRowsPerBatch`` or ``passwordFile``.

    Raises:
        InvalidChannelError, InvalidTopicError, ArgumentError: an argument is wrong.
        MissingExtraError: PySpark is not installed.
        pyspark.errors.PySparkException: Spark refuses the query, or an option of the source is wrong.
    """
    check_name(channel)
    filters = filters_of(topics)
    if trigger is not None and not isinstance(trigger, Mapping):
        raise ArgumentError(f"trigger must be a mapping such as {{'availableNow': True}}, not {trigger!r:.80}")
    register(spark)
    from pyspark.sql.pandas.types import from_arrow_schema

    source = {
        **(options or {}),
        "url": url,
        "channel": json.dumps(patterns_of(channel, filters)),
        "journalPath": fspath(journal_path),
    }
    messages = spark.readStream.format("messaging").options(**source).load().select(*_MESSAGE)
    rows = messages.mapInArrow(_rows_of([each.text for each in filters]), from_arrow_schema(SCHEMA))
    writer = rows.writeStream.format("parquet").partitionBy("date").outputMode("append")
    writer = writer.option("checkpointLocation", fspath(checkpoint))
    if name is not None:
        writer = writer.queryName(name)
    return writer.trigger(**(trigger or {"processingTime": TRIGGER})).start(fspath(path))


def _rows_of(topics: list[str]) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that tasks run. Its pickle holds the filters alone."""

    def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filters = [parse_filter(each) for each in topics]
        for batch in batches:
            yield to_rows(batch, lambda topic: any(each.matches(topic) for each in filters))

    return rows_of


def to_rows(messages: pa.RecordBatch, is_wanted: Callable[[str], bool]) -> pa.RecordBatch:
    """Return the rows of an archive for messages of the source. Events on unwanted topics are left out."""
    rows: list[dict[str, Any]] = []
    columns = (messages.column(name).to_pylist() for name in _MESSAGE)
    for value, channel, partition, offset, received in zip(*columns, strict=True):
        row = {"channel": channel, "partition": partition, "offset": offset}
        try:
            event = load_event(value)
        except DecodeError as error:
            time = datetime.now(UTC) if received is None else received  # RabbitMQ streams may have no time
            row |= {"_corrupt_record": value, "_error": str(error)}
        else:
            if not is_wanted(event.topic):
                continue
            time = event.time
            row |= {"topic": event.topic, "data": dump_data(event.data)}
            row |= {"recorder": event.recorder, "sequence": event.sequence}
        rows.append({**row, "timestamp": time, "date": time.astimezone(UTC).date()})
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)

"""The streaming job: four queries, each a few lines.

::

    broker ──> store ──> tables/messages ──┬─> aggregate ──> tables/aggregates
    telemetry/#          kind=reading      └─> detect ─────> tables/anomalies ──> alert ──> broker
                         kind=rejected                                                      alerts/SITE/DEVICE

One query reads the broker. It stores each message, valid or not, in one table with two kinds, so that no message can be
in both or neither; the dead letters are ``kind=rejected``. The other queries read that table, not the broker: they
process stored messages, they can be rerun at any time, and the broker has one subscriber. This costs a micro-batch of
latency.

File sinks write each row exactly once, also after failures: a reader of a table sees the rows that the sink has
committed. Alerts are delivered at least once, with stable ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as sql
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from pyspark_messaging.errors import first_line
from pyspark_messaging.telemetry.anomaly import History, Measurement
from pyspark_messaging.telemetry.model import ALERT_CHANNEL, METRICS, TELEMETRY, TELEMETRY_CHANNEL
from pyspark_messaging.telemetry.session import SparkFailedError

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: a reading that is older than the newest one by less than this, by event time, is counted in its window
WATERMARK: Final = "30 minutes"
WINDOW: Final = "1 hour"
#: interval of micro-batches
TRIGGER: Final = "2 seconds"

MESSAGES: Final = (
    "device string, site string, sequence bigint, measured_at timestamp, sent_at timestamp, temperature double, "
    "vibration double, battery double, received_at timestamp, offset bigint, channel string, payload string, "
    "kind string, date date"
)
ANOMALIES: Final = (
    "id string, device string, site string, sequence bigint, metric string, value double, usual double, score double, "
    "reason string, measured_at timestamp, received_at timestamp"
)
AGGREGATES: Final = ", ".join(
    [
        "site string, device string, readings bigint",
        *(f"{metric.name}_{name} double" for metric in METRICS for name in ("mean", "min", "max", "stddev")),
        "start timestamp, end timestamp, date date",
    ]
)
#: the columns of an anomaly
_NAMES: Final = [column.split()[0] for column in ANOMALIES.split(", ")]


class Folders:
    """The folders of a run."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()
        self.tables = self.root / "tables"
        self.work = self.root / "work"  # journal and checkpoints, with which a job can be resumed

    def table(self, name: str) -> str:
        """Return the folder of a table: ``messages``, ``aggregates``, ``anomalies``, or one of the batch job."""
        return str(self.tables / name)


class TelemetryJob:
    """The queries, started. A restarted job continues with the tables, the journal and the checkpoints in ``folders``.

    Attributes:
        queries: the queries by name, in the order of the data flow.
    """

    def __init__(self, spark: SparkSession, url: str, folders: Folders) -> None:
        self._folders = folders
        for name in ("messages", "anomalies"):  # Spark reads them before the first row is written
            Path(folders.table(name)).mkdir(parents=True, exist_ok=True)
        readings = spark.readStream.schema(MESSAGES).parquet(folders.table("messages")).where("kind = 'reading'")
        anomalies = spark.readStream.schema(f"{ANOMALIES}, date date").parquet(folders.table("anomalies"))
        self.queries: dict[str, StreamingQuery] = {}
        self._table("messages", messages(spark, url, str(folders.work / "journal")), "kind", "date")
        self._table("aggregates", aggregates(readings), "date")
        self._table("anomalies", detect(readings), "date")
        self._start("alerts", alerts(anomalies).writeStream.format("messaging").option("url", url))

    def _table(self, name: str, rows: DataFrame, *partitions: str) -> None:
        writer = rows.writeStream.format("parquet").partitionBy(*partitions)
        self._start(name, writer.option("path", self._folders.table(name)))

    def _start(self, name: str, writer: Any) -> None:
        checkpoint = str(self._folders.work / "checkpoints" / name)
        writer = writer.option("checkpointLocation", checkpoint).trigger(processingTime=TRIGGER)
        self.queries[name] = writer.start()

    def wait_subscribed(self) -> None:
        """Wait until the broker keeps messages for the job: until its first query has started, or one has failed."""
        while self.queries["messages"].lastProgress is None:
            self.check()
            time.sleep(0.1)

    def drain(self) -> None:
        """Wait until all queries have processed all messages that were received."""
        for query in self.queries.values():
            query.processAllAvailable()

    def stop(self) -> None:
        """Stop the queries, in reverse order."""
        for query in reversed(self.queries.values()):
            query.stop()

    def check(self) -> None:
        """Raise ``SparkFailedError`` if a query has ended with an error."""
        for name, query in self.queries.items():
            error = None if query.isActive else query.exception()
            if error is not None:
                raise SparkFailedError(f"the query {name!r} failed: {first_line(error)}")

    def watermark(self) -> datetime:
        """Return the watermark: windows that end before it are closed."""
        progress = self.queries["aggregates"].lastProgress
        text = progress["eventTime"].get("watermark") if progress else None
        return datetime.fromisoformat(text) if text else datetime.fromtimestamp(0, UTC)

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield the micro-batches with rows, of all queries: start, number of rows, and duration in seconds."""
        for name, query in self.queries.items():
            for progress in query.recentProgress:
                if progress["numInputRows"]:
                    yield {
                        "query": name,
                        "batch": progress["batchId"],
                        "at": datetime.fromisoformat(progress["timestamp"]),
                        "rows": progress["numInputRows"],
                        "seconds": progress["durationMs"]["triggerExecution"] / 1000,
                    }


def messages(spark: SparkSession, url: str, journal: str) -> DataFrame:
    """Return all messages of the channel ``telemetry/#``: readings, and rejected messages with their payload."""
    rows = (
        spark.readStream.format("messaging")
        .option("url", url)
        .option("channel", f"{TELEMETRY_CHANNEL}/#")
        .option("qos", "1")
        .option("journalPath", journal)
        .option("model", TELEMETRY)
        .load()
    )
    is_reading = sql.col("_corrupt_record").isNull()
    return rows.select(
        *("device", "site", "sequence", "measured_at", "sent_at", "temperature", "vibration", "battery"),
        sql.col("_timestamp").alias("received_at"),
        sql.col("_offset").alias("offset"),
        sql.col("_channel").alias("channel"),
        sql.col("_corrupt_record").alias("payload"),
        sql.when(is_reading, "reading").otherwise("rejected").alias("kind"),
        # a reading belongs to the day of its measurement, a rejected message to the day of its arrival
        sql.to_date(sql.coalesce("measured_at", "_timestamp")).alias("date"),
    )


def aggregates(readings: DataFrame, watermark: str | None = WATERMARK) -> DataFrame:
    """Return count, mean, extremes and standard deviation of each metric, for each device and hour.

    A stream writes a window once, when the watermark has passed its end. Later readings are not in it, but they are in
    ``messages``. Without a ``watermark``, for batch jobs, windows have all readings.
    """
    if watermark is not None:
        readings = readings.withWatermark("measured_at", watermark)
    columns: list[Column] = [sql.count("*").alias("readings")]
    for metric in METRICS:
        for name, function in (("mean", sql.mean), ("min", sql.min), ("max", sql.max), ("stddev", sql.stddev)):
            columns.append(function(metric.name).alias(f"{metric.name}_{name}"))
    rows = readings.groupBy(sql.window("measured_at", WINDOW), "site", "device").agg(*columns)
    start = sql.col("window.start")
    return rows.select(
        "*", start.alias("start"), sql.col("window.end").alias("end"), sql.to_date(start).alias("date")
    ).drop("window")


def detect(readings: DataFrame) -> DataFrame:
    """Return the anomalies, by the rule of :mod:`~pyspark_messaging.telemetry.anomaly`.

    The last readings of each device are the state of the query.
    """
    found = readings.groupBy("device").applyInPandasWithState(
        _judge, ANOMALIES, "history string", "append", GroupStateTimeout.NoTimeout
    )
    return found.withColumn("date", sql.to_date("measured_at"))


def _judge(_: tuple[str], batches: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Yield the anomalies among the new readings of one device."""
    import pandas as pd

    history = History.load(*state.get) if state.exists else History()
    names = [metric.name for metric in METRICS]
    found = []
    for row in pd.concat(list(batches)).sort_values("measured_at").itertuples():
        reading = Measurement(_aware(row.measured_at), tuple(getattr(row, name) for name in names))
        for anomaly in history.judge(reading):
            key = f"{row.device}/{row.sequence}/{anomaly.metric}"
            fields = (key, row.device, row.site, row.sequence, *anomaly, row.measured_at, row.received_at)
            found.append(fields)
    state.update((history.dump(),))
    if found:
        yield pd.DataFrame(found, columns=_NAMES)


def _aware(moment: Any) -> datetime:
    """Return a timestamp of pandas, which is in the time zone of the session, with its zone UTC."""
    python: datetime = moment.to_pydatetime()
    return python.replace(tzinfo=UTC) if python.tzinfo is None else python.astimezone(UTC)


def alerts(anomalies: DataFrame) -> DataFrame:
    """Return a message for each anomaly, for ``alerts/SITE/DEVICE``: JSON of the model ``Alert``."""
    fields = sql.struct(*_NAMES)
    zoned = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"}
    return anomalies.select(
        sql.to_json(fields, zoned).cast("binary").alias("value"),
        sql.concat_ws("/", sql.lit(ALERT_CHANNEL), "site", "device").alias("channel"),
    )

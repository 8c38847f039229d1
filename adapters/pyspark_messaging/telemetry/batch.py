"""The batch job over the tables of the streaming job, at the end of a day or at any other time.

It includes the readings that were too late for the aggregates of the streaming job.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql import functions as sql

from pyspark_messaging.telemetry.job import AGGREGATES, ANOMALIES, MESSAGES, Folders

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


#: number of devices in the list
TOP: Final = 10


class Tables(NamedTuple):
    """The tables of the streaming job."""

    readings: DataFrame
    rejected: DataFrame
    aggregates: DataFrame
    anomalies: DataFrame

    @classmethod
    def of(cls, spark: SparkSession, folders: Folders) -> Tables:
        """Return the tables in the folder of a run."""
        messages = spark.read.schema(MESSAGES).parquet(folders.table("messages"))
        return cls(
            messages.where("kind = 'reading'").drop("payload", "kind"),
            messages.where("kind = 'rejected'").select("channel", "payload", "received_at", "offset", "date"),
            spark.read.schema(AGGREGATES).parquet(folders.table("aggregates")),
            spark.read.schema(f"{ANOMALIES}, date date").parquet(folders.table("anomalies")),
        )


def by_site(tables: Tables, unit: str) -> DataFrame:
    """Return the figures of each site in each ``hour`` or ``day``."""
    period = sql.date_trunc(unit, "measured_at").alias(unit)
    measured = tables.readings.groupBy("site", period).agg(
        sql.count("*").alias("readings"),
        sql.count_distinct("device").alias("devices"),
        sql.mean("temperature").alias("temperature_mean"),
        sql.min("temperature").alias("temperature_min"),
        sql.max("temperature").alias("temperature_max"),
        sql.mean("vibration").alias("vibration_mean"),
        sql.percentile_approx("vibration", 0.95).alias("vibration_p95"),
        sql.min("battery").alias("battery_min"),
    )
    flagged = tables.anomalies.groupBy("site", period).agg(sql.count("*").alias("anomalies"))
    rows = measured.join(flagged, ["site", unit], "left").fillna(0, ["anomalies"])
    return rows.withColumn("date", sql.to_date(unit))


def most_anomalies(tables: Tables) -> DataFrame:
    """Return the devices with the most anomalies, and the metrics of these."""
    return (
        tables.anomalies.groupBy("device", "site")
        .agg(
            sql.count("*").alias("anomalies"),
            sql.concat_ws(", ", sql.sort_array(sql.collect_set("metric"))).alias("metrics"),
            sql.max("score").alias("highest_score"),
        )
        .orderBy(sql.desc("anomalies"), sql.desc("highest_score"))
        .limit(TOP)
    )


def completeness(spark: SparkSession, tables: Tables, ledger: Path) -> DataFrame:
    """Return for each device how many messages the broker has accepted, by the ledger, and how many are stored."""
    sent = spark.read.schema("device string, sequence bigint, kind string, digest string").json(str(ledger))
    # a rejected message has neither device nor number: it is identified by its digest
    name = sql.concat_ws("/", "device", "sequence")
    accepted = sent.select(
        "device", "kind", sql.when(sql.expr("kind = 'reading'"), name).otherwise(sql.col("digest")).alias("key")
    )
    device = sql.substring_index("channel", "/", -1).alias("device")
    stored = tables.readings.select("device", sql.lit("reading").alias("kind"), name.alias("key")).unionAll(
        tables.rejected.select(device, sql.lit("rejected").alias("kind"), sql.sha2("payload", 256).alias("key"))
    )
    keys = ["device", "kind", "key"]
    both = (
        accepted.groupBy(keys)
        .agg(sql.count("*").alias("sent"))
        .join(stored.groupBy(keys).agg(sql.count("*").alias("stored")), keys, "full")
        .fillna(0, ["sent", "stored"])
    )

    def excess(more: str, less: str) -> Column:
        return sql.sum(sql.greatest(sql.col(more) - sql.col(less), sql.lit(0)))

    return both.groupBy("device").agg(
        sql.sum("sent").alias("sent"),
        sql.sum("stored").alias("stored"),
        sql.sum(sql.when(sql.expr("kind = 'rejected'"), sql.col("stored")).otherwise(0)).alias("rejected"),
        excess("sent", "stored").alias("missing"),
        excess("stored", "sent").alias("too_many"),
    )


def run(spark: SparkSession, folders: Folders, ledger: Path | None = None) -> Tables:
    """Write ``site_hourly``, ``site_daily``, ``top_devices`` and, with a ledger, ``completeness``; return its input."""
    tables = Tables.of(spark, folders)
    tables.readings.cache()
    for unit, name in (("hour", "site_hourly"), ("day", "site_daily")):
        rows = by_site(tables, unit).coalesce(1)
        rows.write.mode("overwrite").partitionBy("date").parquet(folders.table(name))
    most_anomalies(tables).coalesce(1).write.mode("overwrite").parquet(folders.table("top_devices"))
    if ledger is not None:
        rows = completeness(spark, tables, ledger).coalesce(1)
        rows.write.mode("overwrite").parquet(folders.table("completeness"))
    return tables

"""The batch job: over the same tables, when a day is done, or whenever somebody asks.

What the streaming job had to leave out since it came too late is in here: the raw readings have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession

    from adapters.spark.telemetry.job import Folders

#: how many devices are listed
TOP: Final = 10


class Tables(NamedTuple):
    """What the streaming job wrote."""

    readings: DataFrame
    rejected: DataFrame
    aggregates: DataFrame
    anomalies: DataFrame

    @classmethod
    def of(cls, spark: SparkSession, folders: Folders) -> Tables:
        """The tables in the folder of a run."""
        from adapters.spark.telemetry.job import AGGREGATES, ANOMALIES, MESSAGES

        messages = spark.read.schema(MESSAGES).parquet(folders.table("messages"))
        return cls(
            messages.where("kind = 'reading'").drop("payload", "kind"),
            messages.where("kind = 'rejected'").select("channel", "payload", "received_at", "offset", "date"),
            spark.read.schema(AGGREGATES).parquet(folders.table("aggregates")),
            spark.read.schema(f"{ANOMALIES}, date date").parquet(folders.table("anomalies")),
        )


def by_site(tables: Tables, unit: str) -> DataFrame:
    """What each site measured in each ``hour`` or ``day``."""
    period = F.date_trunc(unit, "measured_at").alias(unit)
    measured = tables.readings.groupBy("site", period).agg(
        F.count("*").alias("readings"),
        F.count_distinct("device").alias("devices"),
        F.mean("temperature").alias("temperature_mean"),
        F.min("temperature").alias("temperature_min"),
        F.max("temperature").alias("temperature_max"),
        F.mean("vibration").alias("vibration_mean"),
        F.percentile_approx("vibration", 0.95).alias("vibration_p95"),
        F.min("battery").alias("battery_min"),
    )
    flagged = tables.anomalies.groupBy("site", period).agg(F.count("*").alias("anomalies"))
    rows = measured.join(flagged, ["site", unit], "left").fillna(0, ["anomalies"])
    return rows.withColumn("date", F.to_date(unit))


def most_anomalies(tables: Tables) -> DataFrame:
    """The devices with the most anomalies, and in what."""
    return (
        tables.anomalies.groupBy("device", "site")
        .agg(
            F.count("*").alias("anomalies"),
            F.concat_ws(", ", F.sort_array(F.collect_set("metric"))).alias("metrics"),
            F.max("score").alias("highest_score"),
        )
        .orderBy(F.desc("anomalies"), F.desc("highest_score"))
        .limit(TOP)
    )


def completeness(spark: SparkSession, tables: Tables, ledger: Path) -> DataFrame:
    """For each device: how many messages the broker has accepted, and what became of them.

    Args:
        ledger: a line for each accepted message, as the fleet writes it.
    """
    sent = spark.read.schema("device string, sequence bigint, kind string, digest string").json(str(ledger))
    # what could not be read has neither device nor number any more: it is known by what it was
    name = F.concat_ws("/", "device", "sequence")
    accepted = sent.select(
        "device", "kind", F.when(F.expr("kind = 'reading'"), name).otherwise(F.col("digest")).alias("key")
    )
    device = F.substring_index("channel", "/", -1).alias("device")
    stored = tables.readings.select("device", F.lit("reading").alias("kind"), name.alias("key")).unionAll(
        tables.rejected.select(device, F.lit("rejected").alias("kind"), F.sha2("payload", 256).alias("key"))
    )
    keys = ["device", "kind", "key"]
    both = (
        accepted.groupBy(keys)
        .agg(F.count("*").alias("sent"))
        .join(stored.groupBy(keys).agg(F.count("*").alias("stored")), keys, "full")
        .fillna(0, ["sent", "stored"])
    )

    def excess(more: str, less: str) -> Column:
        return F.sum(F.greatest(F.col(more) - F.col(less), F.lit(0)))

    return both.groupBy("device").agg(
        F.sum("sent").alias("sent"),
        F.sum("stored").alias("stored"),
        F.sum(F.when(F.expr("kind = 'rejected'"), F.col("stored")).otherwise(0)).alias("rejected"),
        excess("sent", "stored").alias("missing"),
        excess("stored", "sent").alias("too_many"),
    )


def run(spark: SparkSession, folders: Folders, ledger: Path | None = None) -> Tables:
    """Write ``site_hourly``, ``site_daily``, ``top_devices`` and, with a ledger, ``completeness``; the tables read."""
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

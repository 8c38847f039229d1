"""The results of a run: checks that must hold, and the figures of the summary.

Spark reads the tables; the result of a run is small enough for pandas.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from pyspark_messaging.telemetry.job import WATERMARK, WINDOW, Folders

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyspark_messaging.telemetry.batch import Tables


class Check(NamedTuple):
    """A check: the expected and the found value."""

    what: str
    expected: Any
    found: Any

    @property
    def is_right(self) -> bool:
        """Return whether the values are equal."""
        return bool(self.expected == self.found)


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """The results of a run.

    Attributes:
        ledger: the messages of the fleet that the broker accepted.
        readings, aggregates, anomalies: the tables. Readings are in the order of arrival, with ``lateness`` (s), the
            ``start`` of their window, and ``late``: whether that window was closed already.
        rejected: number of rejected messages.
        completeness: the table of the batch job.
        batches: the micro-batches of all queries.
        alerts: ids of the alerts on the event bus -> seconds since the arrival of their reading.
        severe: number of alerts that the handler for severe ones got.
        watermark: windows that end before it are closed.
    """

    ledger: pd.DataFrame
    readings: pd.DataFrame
    aggregates: pd.DataFrame
    anomalies: pd.DataFrame
    rejected: int
    completeness: pd.DataFrame
    batches: pd.DataFrame
    alerts: dict[str, float]
    severe: int
    watermark: datetime

    @classmethod
    def load(
        cls,
        spark: SparkSession,
        folders: Folders,
        tables: Tables,
        ledger: Path,
        batches: list[dict[str, Any]],
        **live: Any,
    ) -> PipelineRun:
        """Read the tables; ``live`` are the other fields: ``alerts``, ``severe`` and ``watermark``."""
        return cls(
            ledger=pd.DataFrame([json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]),
            readings=with_lateness(tables.readings.toPandas()),
            aggregates=tables.aggregates.toPandas(),
            anomalies=tables.anomalies.toPandas(),
            rejected=tables.rejected.count(),
            completeness=spark.read.parquet(folders.table("completeness")).toPandas(),
            batches=pd.DataFrame(batches, columns=["query", "batch", "at", "rows", "seconds"]),
            **live,
        )

    def counted(self) -> pd.DataFrame:
        """Return for each device and window the number of stored, late and counted readings.

        ``counted`` is missing for windows that are not closed.
        """
        keys = ["device", "start"]
        stored = self.readings.groupby(keys).agg(stored=("sequence", "size"), late=("late", "sum"))
        return stored.join(self.aggregates.set_index(keys)["readings"].rename("counted"), how="outer")

    def dropped(self) -> int:
        """Return the number of readings that arrived after their window was closed: stored, but not aggregated."""
        closed = self._closed()
        return int((closed["stored"] - closed["counted"].fillna(0)).sum())

    def _closed(self) -> pd.DataFrame:
        counted = self.counted()
        ends = counted.index.get_level_values("start") + duration(WINDOW)
        return counted[ends <= pd.Timestamp(self.watermark).tz_localize(None)]

    def checks(self) -> list[Check]:
        """Return the checks of a run."""
        sums = self.completeness[["sent", "stored", "missing", "too_many"]].sum()
        garbled = int((self.ledger["kind"] == "rejected").sum())
        closed = self._closed()
        lost = closed["stored"].fillna(0) - closed["counted"].fillna(0)
        unexplained = int(((lost < 0) | (lost > closed["late"])).sum())
        return [
            Check("messages stored, of those the broker accepted", int(sums["sent"]), int(sums["stored"])),
            Check("accepted messages that are in no table", 0, int(sums["missing"])),
            Check("messages that are in a table twice, or were never sent", 0, int(sums["too_many"])),
            Check("dead letters, of the messages that were garbled", garbled, self.rejected),
            Check("closed windows whose count is not that of their readings without late ones", 0, unexplained),
            Check("anomalies that are in their table once", len(self.anomalies), int(self.anomalies["id"].nunique())),
            Check("alerts on the event bus, of the anomalies", len(self.anomalies), len(self.alerts)),
            Check("alerts without an anomaly", 0, len(set(self.alerts) - set(self.anomalies["id"]))),
        ]

    def injected(self) -> tuple[int, int, int]:
        """Return the number of injected anomalies, of found ones among them, and of other anomalies."""
        rows = self.ledger[self.ledger["injected"].str.len() > 0]
        made = {f"{row.device}/{row.sequence}/{metric}" for row in rows.itertuples() for metric in row.injected}
        found = set(self.anomalies["id"])
        return len(made), len(made & found), len(found - made)


def duration(text: str) -> timedelta:
    """Return the length of Spark's ``30 minutes``. The parser of pandas warns with NumPy from 2.5 on."""
    count, unit = text.split()
    return timedelta(**{unit.removesuffix("s") + "s": int(count)})


def with_lateness(readings: pd.DataFrame) -> pd.DataFrame:
    """Return readings in the order of arrival, with their lateness."""
    rows = readings.sort_values("offset").reset_index(drop=True)
    rows["lateness"] = (rows["sent_at"] - rows["measured_at"]).dt.total_seconds()
    rows["start"] = rows["measured_at"].dt.floor(duration(WINDOW))
    # the earliest moment at which the watermark can have passed the end of a window
    newest = rows["measured_at"].cummax().shift(1)
    rows["late"] = (rows["start"] + duration(WINDOW)) <= (newest - duration(WATERMARK))
    return rows

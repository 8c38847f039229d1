"""The jobs of the pipeline in a session: the one they were submitted with, or a local one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from messaging.testing.tables import table
from pyspark_messaging.telemetry import batch
from pyspark_messaging.telemetry.fleet import digest
from pyspark_messaging.telemetry.job import Folders
from pyspark_messaging.telemetry.session import is_submitted, spark_session
from tests.spark.conftest import require_java
from tests.spark.harness import JAVA_OPTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]

JOB = """\
import sys
from pathlib import Path
from pyspark_messaging.telemetry.session import check_installed, spark_session
check_installed()
with spark_session("telemetry", Path(sys.argv[1])) as spark:
    context = spark.sparkContext
    print("found", context.master, context.appName, spark.conf.get("spark.sql.session.timeZone"), sep="|")
    spark.readStream.format("messaging")
"""


@pytest.mark.slow
@pytest.mark.alone  # a Spark of its own, beside that of the other tests
def test_a_submitted_job_runs_on_the_master_it_was_submitted_with(tmp_path: Path) -> None:
    require_java()
    job = tmp_path / "job.py"
    job.write_text(JOB)
    submit = Path(sys.executable).with_name("spark-submit")
    variables = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    settings = ["--driver-java-options", JAVA_OPTIONS]
    settings += ["--conf", "spark.ui.enabled=false", "--conf", "spark.driver.bindAddress=127.0.0.1"]
    done = subprocess.run(
        [submit, "--master", "local[1, 7]", *settings, str(job), str(tmp_path / "own")],
        env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert "found|local[1, 7]|telemetry|UTC" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    assert not (tmp_path / "own").exists()


def test_a_session_that_is_there_is_used_and_left_running(spark: SparkSession, tmp_path: Path) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        with spark_session("telemetry", tmp_path) as found:
            assert found.sparkContext is spark.sparkContext
        assert spark.range(3).count() == 3
    finally:
        assert zone is not None
        spark.conf.set("spark.sql.session.timeZone", zone)


@table("variable", ["PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS", "SPARK_REMOTE"])
def test_a_process_with_a_master_from_outside_is_submitted(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "12345")
    assert is_submitted()


def test_the_batch_job_finds_missing_and_duplicate_messages(spark: SparkSession, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    at = datetime(2025, 6, 2, 12, tzinfo=UTC)

    def message(device: str, sequence: int, temperature: float, hours: int = 0) -> dict[str, Any]:
        moment = at + timedelta(hours=hours)
        reading = {"device": device, "site": "oslo", "sequence": sequence, "temperature": temperature}
        reading |= {"vibration": 1.0, "battery": 90.0, "measured_at": moment, "sent_at": moment, "received_at": moment}
        reading |= {"channel": f"telemetry/oslo/{device}", "kind": "reading", "payload": None, "date": moment.date()}
        return reading | {"offset": 0}

    rejected = dict.fromkeys(message("", 0, 0.0)) | {
        "kind": "rejected",
        "payload": "\ufffd{",
        "channel": "telemetry/oslo/oslo-1",
        "date": at.date(),
    }
    rows = [message("oslo-1", 0, 10.0), message("oslo-1", 1, 20.0, 1), *[message("oslo-2", 0, 30.0)] * 2]
    pq.write_to_dataset(pa.Table.from_pylist([*rows, rejected]), folders.table("messages"), ["kind", "date"])
    anomaly = {"id": "oslo-1/1/temperature", "device": "oslo-1", "site": "oslo", "metric": "temperature", "score": 9.0}
    anomaly |= {"measured_at": at + timedelta(hours=1), "date": at.date()}
    pq.write_to_dataset(pa.Table.from_pylist([anomaly]), folders.table("anomalies"), ["date"])
    Path(folders.table("aggregates")).mkdir()
    ledger = tmp_path / "sent.jsonl"
    sent = [("oslo-1", 0, "reading"), ("oslo-1", 1, "reading"), ("oslo-1", 2, "rejected")]
    sent += [("oslo-2", 0, "reading"), ("oslo-2", 1, "reading")]
    lines = [
        json.dumps({"device": device, "sequence": sequence, "kind": kind, "digest": digest(b"\xff{")})
        for device, sequence, kind in sent
    ]
    ledger.write_text("\n".join(lines) + "\n")

    batch.run(spark, folders, ledger)

    def table(name: str, *columns: str) -> list[tuple[Any, ...]]:
        rows = ds.dataset(folders.table(name), partitioning="hive").to_table().to_pylist()
        return sorted(tuple(row[column] for column in columns) for row in rows)

    assert [row[1:] for row in table("site_hourly", "hour", "readings", "anomalies")] == [(3, 0), (1, 1)]
    columns = ("readings", "devices", "temperature_min", "temperature_max", "anomalies")
    assert table("site_daily", *columns) == [(4, 2, 10, 30, 1)]
    assert table("top_devices", "device", "anomalies", "metrics") == [("oslo-1", 1, "temperature")]
    found = table("completeness", "device", "sent", "stored", "rejected", "missing", "too_many")
    assert found == [("oslo-1", 3, 3, 1, 0, 0), ("oslo-2", 2, 2, 0, 1, 1)]

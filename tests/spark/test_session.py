"""A job takes the session it was submitted with, and only without one a local session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from adapters.spark.telemetry.session import is_submitted, spark_session
from tests.spark.conftest import require_java
from tests.spark.harness import JAVA_OPTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]

JOB = """\
import sys
from pathlib import Path
from adapters.spark.telemetry.session import check_installed, spark_session
check_installed()
with spark_session("telemetry", Path(sys.argv[1])) as spark:
    context = spark.sparkContext
    print("found", context.master, context.appName, spark.conf.get("spark.sql.session.timeZone"), sep="|")
    spark.readStream.format("messaging")
"""


@pytest.mark.slow
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
        env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert "found|local[1, 7]|telemetry|UTC" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    assert not (tmp_path / "own").exists()


@pytest.mark.slow
def test_a_session_that_is_there_is_used_and_left_running(spark: SparkSession, tmp_path: Path) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        with spark_session("telemetry", tmp_path) as found:
            assert found.sparkContext is spark.sparkContext
        assert spark.range(3).count() == 3
    finally:
        assert zone is not None
        spark.conf.set("spark.sql.session.timeZone", zone)


@pytest.mark.parametrize("variable", ["PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS", "SPARK_REMOTE"])
def test_a_process_with_a_master_from_outside_is_submitted(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "12345")
    assert is_submitted()

"""The telemetry pipeline: its parts, and all of it at once."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.dataset as ds
import pydantic
import pytest

import messaging
from messaging.cli import main
from messaging.errors import ArgumentError, ConfigurationError, ConnectFailedError
from messaging.testing.brokers import Mosquitto, require
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from pyspark_messaging.telemetry import INTERVAL, FleetPlan, processes, run
from pyspark_messaging.telemetry.anomaly import ENOUGH, REACH, THRESHOLD, History, Measurement, score
from pyspark_messaging.telemetry.fleet import START, Sent, digest, simulate
from pyspark_messaging.telemetry.model import METRICS, Telemetry
from pyspark_messaging.telemetry.plots import draw
from pyspark_messaging.telemetry.processes import BrokerFailedError, check_mosquitto
from pyspark_messaging.telemetry.processes import mosquitto as private_mosquitto
from pyspark_messaging.telemetry.report import PipelineRun, with_lateness
from pyspark_messaging.telemetry.run import MARKER, Display, prepare
from pyspark_messaging.telemetry.session import SparkFailedError
from tests.cli.program import COMMAND, ROOT, environment
from tests.forking import ForkedProcess
from tests.interrupts import breakable_waits
from tests.spark.conftest import require_java

if TYPE_CHECKING:
    from collections.abc import Iterator


SMALL = FleetPlan(seed=3, devices=8, seconds=10, rate=80)


# --- the fleet


def test_a_fleet_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert simulate(SMALL) == simulate(SMALL)
    assert simulate(SMALL) != simulate(FleetPlan(seed=4, devices=8, seconds=10, rate=80))


def test_a_fleet_sends_as_many_messages_as_it_was_asked_for_in_the_order_of_their_time() -> None:
    sent = simulate(FleetPlan())
    assert len(sent) == FleetPlan().readings * FleetPlan().devices
    assert abs(len(sent) - FleetPlan().rate * FleetPlan().seconds) < FleetPlan().devices
    assert [each.at for each in sent] == sorted(each.at for each in sent)
    assert len({(each.device, each.sequence) for each in sent}) == len(sent)


def test_readings_of_the_fleet_fit_the_model_and_garbled_ones_do_not() -> None:
    sent = simulate(FleetPlan())
    for each in sent:
        if each.kind == "reading":
            reading = Telemetry.model_validate_json(each.payload)
            assert (reading.device, reading.sequence) == (each.device, each.sequence)
            assert each.channel == f"telemetry/{reading.site}/{reading.device}"
        else:
            with pytest.raises(pydantic.ValidationError):
                Telemetry.model_validate_json(each.payload)
    assert len({digest(each.payload) for each in sent}) == len(sent)


def test_the_fleet_has_all_kinds_of_failures() -> None:
    sent = simulate(FleetPlan())
    readings = [Telemetry.model_validate_json(each.payload) for each in sent if each.kind == "reading"]
    lateness = [reading.sent_at - reading.measured_at for reading in readings]
    assert sum(late < timedelta() for late in lateness) > 100  # clocks that are ahead
    assert sum(timedelta(seconds=30) < late < timedelta(minutes=25) for late in lateness) > 100
    assert sum(late > timedelta(hours=4) for late in lateness) == sum(each.too_late for each in sent) > 10
    assert 20 < sum(each.kind == "rejected" for each in sent) < 80
    assert sum(bool(each.injected) for each in sent) > 20
    warmth = {hour: [r.temperature for r in readings if r.measured_at.hour == hour] for hour in (3, 15)}
    assert sum(warmth[15]) / len(warmth[15]) > sum(warmth[3]) / len(warmth[3]) + 5  # by day it is warmer


def fleet(url: str, ledger: Path, *arguments: str, before: str = "") -> tuple[int, str, str]:
    """Run the fleet as a process whose stdin ends: 16 messages within a fraction of a second."""
    code = f"import os, sys; {before}\nfrom pyspark_messaging.telemetry.fleet import main\nmain()\nsys.exit()"
    arguments = (url, str(ledger), "--seconds=0.4", "--devices=4", "--rate=40", *arguments)
    return ForkedProcess(code, arguments, environment()).communicate(3 * PATIENCE)


@table("before", {"at its end": "", "closed": "os.close(0); sys.stdin = None"})
def test_the_fleet_publishes_everything_as_a_service_whose_stdin_has_ended(
    mosquitto: Mosquitto, tmp_path: Path, before: str
) -> None:
    code, out, err = fleet(mosquitto.url, tmp_path / "ledger", before=before)
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[-1]) == {"accepted": 16, "failed": 0, "ended": True}
    assert len((tmp_path / "ledger").read_text().splitlines()) == 16


def test_the_fleet_ends_with_its_stdin_when_told_to(mosquitto: Mosquitto, tmp_path: Path) -> None:
    code, out, _ = fleet(mosquitto.url, tmp_path / "ledger", "--end-with-stdin", "--seconds=60")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["accepted"] < 2400


def test_times_without_a_zone_are_no_readings() -> None:
    payload = next(json.loads(each.payload) for each in simulate(SMALL) if each.kind == "reading")
    payload["measured_at"] = "2025-06-02T12:00:00"
    with pytest.raises(pydantic.ValidationError, match="timezone"):
        Telemetry.model_validate(payload)


# --- the rule


def series(*temperatures: float, every: timedelta = INTERVAL) -> Iterator[Measurement]:
    for number, temperature in enumerate(temperatures):
        yield Measurement(START + number * every, (temperature, 2.0, 90.0))


STEADY = [20.0, 20.2, 19.9, 20.1, 19.8, 20.0, 20.1, 19.9, 20.2, 20.0] * 2


def test_a_score_counts_robust_deviations_from_the_median() -> None:
    assert score(10.0, [1, 2, 3, 4, 5], floor=0.1) == (3, pytest.approx(7 / 1.4826))
    assert score(10.0, [3, 3, 3, 3, 3], floor=0.5) == (3, 14.0)  # a quiet sensor: the floor


def flagged(readings: Iterator[Measurement]) -> list[float]:
    history = History()
    return [anomaly.value for reading in readings for anomaly in history.judge(reading)]


@table(
    "temperatures, every, found",
    [
        pytest.param([*STEADY, 35.0, 20.0, 20.1], INTERVAL, [35.0], id="a spike, and not the next reading"),
        pytest.param([*STEADY, 35.0, 36.0, 35.5, 20.0], INTERVAL, [35.0, 36.0, 35.5], id="a burst"),
        pytest.param([*STEADY[: ENOUGH - 1], 90.0], INTERVAL, [], id="a short history"),
        pytest.param([*STEADY, 90.0], REACH + timedelta(seconds=1), [], id="an old history"),
    ],
)
def test_anomalies_of_a_series(temperatures: list[float], every: timedelta, found: list[float]) -> None:
    assert flagged(series(*temperatures, every=every)) == found


def test_a_lasting_change_becomes_the_normal_state() -> None:
    found = flagged(series(*STEADY, *[30.0 + each / 10 for each in range(10)] * 4))
    assert 8 < len(found) < 16


def test_day_and_night_are_no_anomaly() -> None:
    clean = [each for each in simulate(FleetPlan()) if each.kind == "reading" and not each.injected]
    devices: dict[str, History] = {}
    found = 0
    for each in clean:
        reading = Telemetry.model_validate_json(each.payload)
        values = (reading.temperature, reading.vibration, reading.battery)
        found += len(devices.setdefault(each.device, History()).judge(Measurement(reading.measured_at, values)))
    assert found <= len(clean) / 2_000


def test_a_late_reading_is_compared_with_earlier_measurements() -> None:
    readings = list(series(*STEADY, *[60.0] * 20))
    late = readings.pop(15)
    history = History()
    for reading in readings:
        history.judge(reading)
    assert history.judge(late) == []
    assert history.judge(late._replace(values=(60.0, 2.0, 90.0)))[0].score > THRESHOLD


def test_a_history_is_the_same_after_it_was_state() -> None:
    history = History(series(*STEADY))
    assert History.load(history.dump()).readings == history.readings


# --- checks and plots


def a_run(sent: list[Sent], **changes: Any) -> PipelineRun:
    """A run of which everything was stored, and no window closed."""
    rows = [Telemetry.model_validate_json(each.payload).model_dump() for each in sent if each.kind == "reading"]
    readings = pd.DataFrame(rows)
    for column in ("measured_at", "sent_at"):
        readings[column] = pd.to_datetime(readings[column]).dt.tz_localize(None).astype("datetime64[ns]")
    readings["received_at"] = readings["sent_at"]
    readings["offset"] = range(len(readings))
    counts = {"sent": len(sent), "stored": len(sent), "rejected": 0, "missing": 0, "too_many": 0}
    names = ["readings", *(f"{metric.name}_{name}" for metric in METRICS for name in ("mean", "stddev"))]
    found: dict[str, Any] = {
        "ledger": pd.DataFrame([each._asdict() for each in sent]),
        "readings": with_lateness(readings),
        "aggregates": pd.DataFrame(columns=["device", "start", *names]),
        "anomalies": pd.DataFrame(columns=["id", "device", "metric", "value", "score", "measured_at"]),
        "rejected": sum(each.kind == "rejected" for each in sent),
        "completeness": pd.DataFrame([{**counts, **changes.pop("counts", {})}]),
        "batches": pd.DataFrame([{"query": "messages", "batch": 0, "at": START, "rows": 10, "seconds": 1.0}]),
        "alerts": {},
        "severe": 0,
        "watermark": START - timedelta(days=1),
    }
    return PipelineRun(**found | changes)


def wrong(run: PipelineRun) -> list[str]:
    return [check.what for check in run.checks() if not check.is_right]


def test_checks_fail_for_lost_and_duplicate_messages() -> None:
    sent = simulate(SMALL)
    assert wrong(a_run(sent)) == []
    lost = wrong(a_run(sent, counts={"stored": len(sent) - 1, "missing": 1}))
    assert lost == ["messages stored, of those the broker accepted", "accepted messages that are in no table"]
    twice = wrong(a_run(sent, counts={"stored": len(sent) + 1, "too_many": 1}))
    assert "messages that are in a table twice, or were never sent" in twice
    assert wrong(a_run(sent, rejected=99)) == ["dead letters, of the messages that were garbled"]
    assert wrong(a_run(sent, alerts={"oslo-01/7/battery": 1.0})) == [
        "alerts on the event bus, of the anomalies",
        "alerts without an anomaly",
    ]


def test_an_aggregate_without_a_timely_reading_fails_a_check() -> None:
    run = a_run(simulate(SMALL))
    counted = run.counted().reset_index()
    closed = counted[counted["start"] < START.replace(tzinfo=None) + timedelta(hours=2)].copy()
    watermark = START + timedelta(hours=2)
    closed["readings"] = closed["stored"] - closed["late"]
    right = dataclasses.replace(run, aggregates=closed[["device", "start", "readings"]], watermark=watermark)
    assert wrong(right) == []
    assert right.dropped() == closed["late"].sum()
    closed.loc[closed.index[0], "readings"] -= 1
    less = dataclasses.replace(right, aggregates=closed[["device", "start", "readings"]])
    assert wrong(less) == ["closed windows whose count is not that of their readings without late ones"]


def test_plots_are_drawn_of_a_run_in_which_next_to_nothing_happened(tmp_path: Path) -> None:
    files = draw(a_run(simulate(FleetPlan(devices=1, seconds=2, rate=1))), tmp_path)
    assert [file.stat().st_size > 10_000 for file in files] == [True] * 4


# --- processes and folders


def test_a_missing_mosquitto_is_reported_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="apt install mosquitto"):
        check_mosquitto()


def test_the_private_broker_ends_with_its_context() -> None:
    require("mosquitto")
    with private_mosquitto() as url:
        assert url.startswith("mqtt://127.0.0.1:")
        messaging.connect(url).close()
    with pytest.raises(ConnectFailedError):
        messaging.connect(url, retry_connect=False)


def test_a_private_broker_that_does_not_start_is_an_error_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    require("mosquitto")
    monkeypatch.setattr(processes, "_CONFIGURATION", ("no_such_option true",))
    with pytest.raises(BrokerFailedError, match="no_such_option"), private_mosquitto():
        pass


def test_the_display_of_the_pipeline_waits_without_a_breakable_wait() -> None:
    def fail() -> None:
        raise ZeroDivisionError("modulo by zero")

    ticks: list[None] = []
    with Display() as display, breakable_waits() as found:
        assert display.wait(lambda: eventually(lambda: ticks) and 3, lambda: ticks.append(None)) == 3
        with pytest.raises(SparkFailedError, match="modulo by zero"):
            display.wait(fail, lambda: None)
    assert ticks
    assert not found


def test_only_an_earlier_output_is_overwritten_and_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ArgumentError, match="is not empty"):
        prepare(tmp_path, overwrite=False)
    with pytest.raises(ArgumentError, match="is no output of a pipeline"):
        prepare(tmp_path, overwrite=True)
    (tmp_path / MARKER).touch()
    prepare(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArgumentError, match="is a file"):
        prepare(Path(__file__), overwrite=True)


# --- the command


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "pipeline", *arguments],
        cwd=ROOT, env=environment(PYTHONWARNINGS="", **variables), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=280, check=False,
    )  # fmt: skip


def of_folder(folder: Path) -> list[str]:
    """The processes that were started for a run in ``folder``: all have it in their command line or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = process.joinpath("cmdline").read_bytes()
            if str(folder).encode() in line and process.name != str(os.getpid()):
                found.append(line.replace(b"\0", b" ").decode(errors="replace")[:200])
        except OSError:
            pass
    return found


@table("script", ["streaming_job", "batch_job"])
def test_the_jobs_are_scripts_too(script: str) -> None:
    path = ROOT / "examples" / "telemetry_pipeline" / f"{script}.py"
    program = f"import runpy, sys; runpy.run_path({str(path)!r}, run_name='__main__')"
    code, out, err = ForkedProcess(program, ["--help"], environment()).communicate(PATIENCE)
    assert (code, err) == (0, "")
    assert "OUTPUT" in out.upper()


def test_without_pyspark_the_help_is_there_and_the_error_names_the_extra(tmp_path: Path) -> None:
    program = "import sys; sys.modules['pyspark'] = None; from messaging.cli import main; sys.exit(main(sys.argv[1:]))"
    for arguments, returncode, expected in (
        (["--help"], 0, "Device telemetry through Spark"),
        (["pipeline", "demo", "--help"], 0, "--overwrite"),
        (["pipeline", "demo", "--output", str(tmp_path / "run")], 2, "pip install 'rx-messaging[pipeline]'"),
    ):
        code, out, err = ForkedProcess(program, arguments, environment()).communicate(PATIENCE)
        assert code == returncode
        assert expected in (err if returncode else out)
        assert (out if returncode else err) == ""
    assert not (tmp_path / "run").exists()


@table(
    "arguments, expected",
    [
        (["demo", "--seconds", "1"], "--seconds must be from 2 to 3600, not 1"),
        (["demo", "--seconds", "nan"], "--seconds must be"),
        (["demo", "--rate", "0"], "--rate must be from 1 to 5000"),
        (["demo", "--devices", "0"], "--devices must be from 1 to 1000"),
        (["demo", "--devices", "100", "--rate", "1"], "not each of them sends one"),
        (["demo", "--seed", "x"], "--seed"),
        (["demo", "--output", str(ROOT)], "is not empty: name another directory, or add --overwrite"),
        (["demo", "--output", str(ROOT), "--overwrite"], "is no output of a pipeline"),
        (["nonesuch"], "No such command 'nonesuch'"),
        ([], "Missing command"),
    ],
)
def test_a_wrong_command_line_is_an_error_of_one_line(
    arguments: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    require("mosquitto")
    require_java()
    assert main(["pipeline", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("messaging: error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_without_java_or_mosquitto_the_error_names_their_packages(tmp_path: Path) -> None:
    program = "import sys; from messaging.cli import main; sys.exit(main())"
    arguments = ["pipeline", "demo", "--output", str(tmp_path / "run")]
    variables = environment(PYTHONWARNINGS="", PATH=str(tmp_path), JAVA_HOME=str(tmp_path))
    for missing in ("Spark needs Java 17 or newer", "apt install mosquitto"):
        code, out, err = ForkedProcess(program, arguments, variables).communicate(PATIENCE)
        assert (code, out) == (2, "")
        assert missing in err
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "java").touch(mode=0o755)
    assert not (tmp_path / "run").exists()


def test_a_run_in_which_something_is_wrong_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_right, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(run, "run", lambda *_, is_right=is_right, **__: is_right)
        assert main(["pipeline", "demo"]) == code


@pytest.mark.slow
@pytest.mark.alone  # Spark, a broker and devices that publish in real time: half a minute without other tests
def test_the_whole_pipeline_stores_every_message_exactly_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    require("mosquitto")
    require_java()
    output = tmp_path / "run"
    small = ("--seconds", "8", "--devices", "12", "--rate", "150", "--seed", "5")
    done = command("demo", *small, "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    sent = simulate(FleetPlan(seed=5, devices=12, seconds=8, rate=150))
    assert f"8 checks, all right: each of the {len(sent):,} accepted messages is stored exactly once" in done.stdout
    assert "WRONG" not in done.stdout

    def table(name: str) -> Any:
        return ds.dataset(output / "tables" / name, partitioning="hive").to_table()

    messages = table("messages").to_pylist()
    readings = sorted((row["device"], row["sequence"]) for row in messages if row["kind"] == "reading")
    assert readings == sorted((each.device, each.sequence) for each in sent if each.kind == "reading")
    rejected = sorted(digest(row["payload"].encode()) for row in messages if row["kind"] == "rejected")
    assert rejected == sorted(digest(each.payload) for each in sent if each.kind == "rejected")
    assert table("aggregates").num_rows > 50
    injected = {f"{each.device}/{each.sequence}/{metric}" for each in sent for metric in each.injected}
    found = set(table("anomalies")["id"].to_pylist())
    assert len(found & injected) >= len(injected) / 2
    assert len(found - injected) <= 3
    assert {"site_hourly", "site_daily", "top_devices", "completeness"} < {
        folder.name for folder in (output / "tables").iterdir()
    }
    plots = sorted((output / "plots").iterdir())
    assert [plot.name for plot in plots] == ["aggregates.png", "batches.png", "lateness.png", "readings.png"]
    for plot in plots:
        image = plot.read_bytes()
        assert image.startswith(b"\x89PNG")
        assert len(image) > 20_000
    assert not (output / "work").exists()
    assert of_folder(output) == []


@pytest.mark.slow
@pytest.mark.alone  # the signal comes a second after a line: within the step that follows, if nothing delays it
@pytest.mark.parametrize(("number", "after"), [(signal.SIGINT, "Spark"), (signal.SIGTERM, "mosquitto")])
def test_a_signal_ends_everything_that_was_started(tmp_path: Path, number: signal.Signals, after: str) -> None:
    require("mosquitto")
    require_java()
    output = tmp_path / "run"
    process = subprocess.Popen(
        [*COMMAND, "pipeline", "demo", "--output", str(output)],
        cwd=ROOT, env=environment(PYTHONWARNINGS=""), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "mosquitto listens" in line:
                url = line.split()[-1]
            if after in line:
                break
        time.sleep(1)  # sleeps: the signal comes within the step that follows
        process.send_signal(number)
        out, err = process.communicate(timeout=3 * PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert f"ended early; logs and stored messages are in {output}" in out
    assert "Traceback" not in err
    eventually(lambda: of_folder(output) == [], lambda: f"the end of {of_folder(output)}")
    with pytest.raises(ConnectFailedError):
        messaging.connect(url, retry_connect=False)

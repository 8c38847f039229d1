"""Each benchmark in a tiny form: that it runs, that every contender delivers, that faults are found and told."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import messaging
from benchmarks import amqp, contenders, harness, instructions, report, requests, targets
from benchmarks.contenders import Contender
from benchmarks.harness import Case, Plan, Run, RunError, measure, run_once
from benchmarks.peers.job import percentiles
from messaging.testing.brokers import Mosquitto, RabbitMQ, require
from messaging.testing.servers import Servers
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.spark.conftest import require_java

#: several runs, of several processes each: half a minute on a quiet machine
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parent.parent
COUNT = 300
#: a case whose processes may take their time
patient = partial(Case, setup=5 * PATIENCE)


@pytest.fixture
def rabbitmq(servers: Servers) -> Iterator[RabbitMQ]:
    """One of the test alone: contenders know neither virtual hosts nor other names of queues."""
    require("rabbitmq")
    with servers.borrow(RabbitMQ, limit=1) as broker:
        yield broker


def benchmark(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    sys.stderr.write(done.stderr)  # why a row is missing
    return done.stdout


def saved(folder: Path, name: str) -> Any:
    (path,) = folder.glob(f"*{name}*.json")
    return json.loads(path.read_text())


def mqtt_case(broker: Mosquitto, **options: Any) -> Case:
    return patient({}, {"version": "5", "qos": 1, "window": 18} | options, broker.port)


# --- contenders


def each_of(several: Iterable[Contender]) -> pytest.MarkDecorator:
    """Parametrize a test with contenders; those that are not installed are skipped."""
    found = [
        pytest.param(each, id=each.name, marks=pytest.mark.skipif(bool(each.missing), reason=each.missing or "there"))
        for each in several
    ]
    return pytest.mark.parametrize("contender", found)


@pytest.mark.slow
@each_of(contenders.MQTT)
def test_every_contender_delivers_over_mqtt(mosquitto: Mosquitto, contender: Contender) -> None:
    run = run_once(contender, mqtt_case(mosquitto), COUNT)
    assert run.said["subscribe"]["received"] == COUNT
    assert run.rate > 0
    assert run.said["publish"]["rss_peak"] >= run.said["publish"]["rss_ready"] > 0


@pytest.mark.slow
@each_of(contenders.EVENTS)
def test_every_event_bus_delivers(contender: Contender) -> None:
    for role, options in {"dispatch": {"handlers": 2, "topics": 3}, "latency": {}}.items():
        run = run_once(contender, patient({}, options, port=0, roles=(role,)), 30)
        assert run.said[role]["received"] == 30
        assert run.lost == 0


@pytest.mark.slow
@each_of(contenders.JOURNAL)
def test_every_contender_appends(tmp_path: Path, contender: Contender) -> None:
    case = patient({}, {"window": 3, "folder": str(tmp_path)}, port=0, roles=("append",))
    run = run_once(contender, case, 30)
    assert run.rate > 0
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_appends_make_a_table_and_a_large_journal_opens(tmp_path: Path) -> None:
    printed = benchmark(
        *("journal", "journal_flat", "--quick", "--runs", "1", "--messages", "300", "--results", str(tmp_path))
    )
    assert "5x sqlite" in printed
    assert "300 records behind" in printed
    assert "target met     opening 2 GB" in printed
    (case, _) = saved(tmp_path, "journal")["cases"]
    assert {row["name"] for row in case["rows"]} >= {"ours", "sqlite"}


@pytest.mark.slow
@each_of(contenders.AMQP)
def test_every_contender_confirms_and_acknowledges_over_amqp(rabbitmq: RabbitMQ, contender: Contender) -> None:
    pytest.importorskip("pika")  # makes the queues
    queue = amqp.Queue(rabbitmq.port, 100)
    steps: dict[str, tuple[Callable[[int], None], Callable[[int], None]]] = {
        "publish": (queue.empty, queue.expect),
        "consume": (queue.fill, queue.expect_empty),
        "both": (queue.empty, queue.expect_empty),
    }
    for operation, (before, after) in steps.items():
        roles = amqp.OPERATIONS[operation]
        run = run_once(
            contender,
            patient({}, {"qos": 1, "window": 50}, rabbitmq.port, roles=roles, before=before, after=after),
            COUNT,
        )
        assert run.rate > 0
        assert set(run.said) == set(roles)


def answered(contender: Contender, port: int, **options: Any) -> None:
    case = patient({}, {"qos": 1, "window": 10} | options, port, roles=requests.ROLES, metrics=requests.METRICS)
    run = run_once(contender, case, 30)
    said = run.said["request"]
    assert (said["lost"], said["wrong"]) == (0, 0)
    assert 0 < said["p50"] <= said["p99"]
    assert run.rate > 0


@pytest.mark.slow
@each_of(contenders.choose(contenders.REQUESTS_MQTT, None))
def test_every_contender_asks_and_answers_over_mqtt(mosquitto: Mosquitto, contender: Contender) -> None:
    answered(contender, mosquitto.port, version="5")


@pytest.mark.slow
@each_of(contenders.choose(contenders.REQUESTS_AMQP, None))
def test_every_contender_asks_and_answers_over_amqp(rabbitmq: RabbitMQ, contender: Contender) -> None:
    answered(contender, rabbitmq.port)


def test_a_contender_that_is_not_installed_is_told_in_the_table() -> None:
    absent = Contender("absent", "absent", "no_such_package", "")
    case = Case({"qos": "1"}, {}, 0)
    (outcome,) = measure(case, [absent], Plan())
    assert outcome.failure == "no_such_package is not installed"
    row = {"name": "absent", "failure": outcome.failure}
    lines = [*report.table({"labels": case.labels, "metrics": [], "rows": [row]})]
    assert "no_such_package is not installed" in lines[-1]


# --- faults


SCRIPTED = """
import json, sys
print("READY", flush=True)
sys.stdin.readline()
print(json.dumps({"start": 1.0, "end": 2.0, "received": 10, "libraries": {}} | %r), flush=True)
"""


class Scripted(Contender):
    """Says what it is told to."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", SCRIPTED % json.loads(self.style)]


@table("fault", ["lost", "duplicates", "wrong"])
def test_a_run_with_a_fault_is_void(fault: str) -> None:
    contender = Scripted("scripted", "", "json", "", json.dumps({fault: 3}))
    with pytest.raises(RunError, match=f"3 of 10 messages {fault}"):
        run_once(contender, Case({}, {}, 0), 10)


def test_losses_are_told_where_they_are_allowed() -> None:
    contender = Scripted("scripted", "", "json", "", json.dumps({"lost": 3, "received": 7}))
    run = run_once(contender, Case({}, {}, 0, roles=("subscribe",), lossy=True), 10)
    assert run.lost == 3
    assert run.rate == 7.0


def test_a_process_that_ends_fails_its_contender_and_tells_why() -> None:
    contender = Contender("ours", "ours", "messaging", "", "mqtt")
    (outcome,) = measure(Case({}, {}, 1), [contender], Plan(runs=1))
    assert "ours subscribe: ended" in (outcome.failure or "")
    assert "ConnectFailedError" in (outcome.failure or "")


def test_missing_and_damaged_messages_are_counted(mosquitto: Mosquitto) -> None:
    """The publisher sends fewer, and shorter, messages than the subscriber waits for."""
    line = ["--port", str(mosquitto.port), "--qos", "1"]
    command = next(each for each in contenders.MQTT if each.name == "paho").command

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *arguments, *line], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)

    with (
        start("subscribe", "--count", "10") as subscriber,
        start("publish", "--count", "7", "--size", "50") as publisher,
    ):
        for process in (subscriber, publisher):
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n"
        publisher.communicate("GO\n", timeout=30)
        said = json.loads(subscriber.communicate("PUBLISHED\n", timeout=30)[0])
    assert (said["received"], said["lost"], said["wrong"]) == (7, 3, 7)


# --- the benchmarks


@pytest.mark.slow
def test_mqtt_and_amqp_make_tables_and_files(tmp_path: Path) -> None:
    pytest.importorskip("pika")
    tiny = ["--quick", "--runs", "1", "--messages", str(COUNT), "--payload", "100", "--results", str(tmp_path)]
    out = benchmark(
        "mqtt", "amqp", *tiny, "--peers", "ours,paho,aio-pika", "--versions", "5", "--qos", "1", "--operations", "both"
    )
    for name, peer in (("mqtt", "paho"), ("amqp", "aio-pika")):
        found = saved(tmp_path, name)
        (case,) = found["cases"]
        assert [row["name"] for row in case["rows"]] == ["ours", peer]
        for row in case["rows"]:
            assert row["figures"]["rate"]["median"] > 0
            assert row["lost"] == [0]
            assert f"\n{row['name']:19}" in out
        assert found["libraries"]
        assert any(f"x {peer}, is " in line for line in out.splitlines() if line.startswith("target"))


@pytest.mark.slow
def test_latency_and_footprint_make_tables_and_files(tmp_path: Path) -> None:
    tiny = ["--quick", "--runs", "1", "--messages", "30", "--qos", "1", "--protocols", "mqtt", "--peers", "ours,paho"]
    benchmark("latency", "footprint", *tiny, "--results", str(tmp_path))
    latency = saved(tmp_path, "latency")["cases"]
    assert [case["labels"]["load"] for case in latency] == ["idle", "1000/s"]
    for case in latency:
        for row in case["rows"]:
            p50, p99 = (row["figures"][name]["median"] for name in ("p50", "p99"))
            assert 0 < p50 <= p99
    (footprint,) = saved(tmp_path, "footprint")["cases"]
    for row in footprint["rows"]:
        assert row["figures"]["pub CPU"]["median"] > 0
        assert row["figures"]["sub peak"]["median"] > 1
        assert row["figures"]["broker CPU"]["median"] >= 0


@pytest.mark.slow
def test_requests_make_tables_and_files(tmp_path: Path) -> None:
    tiny = ["--quick", "--runs", "1", "--messages", "30", "--qos", "1", "--protocols", "mqtt", "--peers", "ours,paho"]
    out = benchmark("requests", *tiny, "--concurrency", "100", "--results", str(tmp_path))
    cases = saved(tmp_path, "requests")["cases"]
    assert [case["labels"]["concurrency"] for case in cases] == ["100"] * 2
    assert [[row["name"] for row in case["rows"]] for case in cases] == [["ours"], ["ours", "paho"]]
    assert "0.8x ours MQTT 5, is" in out
    assert "1.5x paho, is" in out


@pytest.mark.slow
def test_remote_events_make_tables_and_files(tmp_path: Path) -> None:
    tiny = ["--quick", "--runs", "1", "--messages", "100", "--protocols", "mqtt", "--results", str(tmp_path)]
    out = benchmark("remote", "remote_flat", *tiny, "--peers", "ours,journal")
    cases = saved(tmp_path, "remote")["cases"]
    assert {case["labels"]["where"] for case in cases} == {"one process", "MQTT 5"}
    assert {case["labels"]["between"] for case in cases} == {"nothing", "agent", "mailbox", "agent, mailbox"}
    for case in cases:
        for row in case["rows"]:
            assert row["figures"]["rate"]["median"] > 0
            assert row["lost"] == [0]
    assert "0.5x journal one process, is" in out
    assert "target met     mailbox of 100 events" in out
    assert "leases, renewed over MQTT" in out


@pytest.mark.slow
def test_spark_reads_a_journal_and_makes_a_table(tmp_path: Path) -> None:
    require_java()
    tiny = ["--quick", "--runs", "1", "--messages", "20000", "--peers", "ours", "--parts", "journal"]
    out = benchmark("spark", *tiny, "--sinks", "noop", "--results", str(tmp_path))
    (case,) = saved(tmp_path, "spark")["cases"]
    assert case["labels"] == {"from": "journal", "into": "noop"}
    assert case["rows"][0]["figures"]["rate"]["median"] > 0
    assert "\nours " in out


def test_the_simple_reader_for_spark_gets_every_message_once(mosquitto: Mosquitto) -> None:
    """Without Spark, which takes its time: that calls it so is tried with our own reader."""
    sources = pytest.importorskip("benchmarks.peers.spark_sources", exc_type=ImportError)
    options = {"host": "127.0.0.1", "port": str(mosquitto.port), "topic": "simple"}
    reader = sources.SimpleMqttSource(options).simpleStreamReader(None)
    first = offset = reader.initialOffset()
    found, offset = reader.read(offset)
    assert [*found] == []
    with messaging.connect(mosquitto.url) as m:
        for number in range(COUNT):
            m.publish("simple", b"%d" % number, qos=1).result(PATIENCE)
    rows: list[Any] = []
    eventually(lambda: len(rows) == COUNT or rows.extend(reader.read({"offset": len(rows)})[0]))
    assert [row[2] for row in rows] == [b"%d" % number for number in range(COUNT)]
    end = {"offset": COUNT}
    assert [*reader.readBetweenOffsets(first, end)] == rows
    reader.commit(end)
    assert not reader._batches
    reader._client.disconnect()
    reader._client.loop_stop()


@pytest.mark.slow
@each_of(each for each in contenders.SPARK_MQTT if each.style != "simple")
def test_spark_gets_every_message_from_mqtt(mosquitto: Mosquitto, tmp_path: Path, contender: Contender) -> None:
    require_java()
    options = {"source": "mqtt", "folder": tmp_path}
    # Spark takes half a minute of processor time to start, and longer beside the other tests
    case = dataclasses.replace(mqtt_case(mosquitto, **options), setup=200.0)
    run = run_once(contender, case, COUNT)
    assert run.said["subscribe"]["received"] == COUNT
    assert run.rate > 0


@table("source", ["arrow", "tuples"])
def test_peers_of_spark_make_as_many_rows_as_they_are_asked_for(source: str) -> None:
    sources = pytest.importorskip("benchmarks.peers.spark_sources", exc_type=ImportError)
    options = {"rows": "40001", "size": "100"}
    reader = sources.ArrowReader(options) if source == "arrow" else sources.TupleReader(options)
    parts = reader.partitions()
    assert len(parts) == sources.TASKS
    found = [each for part in parts for each in reader.read(part)]
    assert sum(each.num_rows if source == "arrow" else 1 for each in found) == 40_001


def test_the_journal_of_the_spark_benchmark_holds_all_rows(tmp_path: Path) -> None:
    sources = pytest.importorskip("benchmarks.peers.spark_sources", exc_type=ImportError)
    from pyspark_messaging.journal import RowJournal
    from pyspark_messaging.journal.log import read

    sources.fill_journal(str(tmp_path / "journal"), 3_000, 100)
    opened = RowJournal.view(str(tmp_path / "journal"))
    (log,) = opened.logs
    rows = [row for batch in read(opened.folder, log.spans(0, log.end)) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == [*range(3_000)]
    assert {len(row["value"]) for row in rows} == {100}


def row(name: str, **medians: float) -> dict[str, Any]:
    """Return the row of a contender in a report."""
    return {"name": name, "figures": {figure: {"median": median} for figure, median in medians.items()}}


def test_a_target_may_be_met_by_a_fixed_rate_whatever_the_peer_does() -> None:
    def line(ours: float) -> str:
        rows = [row("ours", rate=ours), row("arrow", rate=1e6)]
        case = {"labels": {"from": "journal", "into": "noop"}, "rows": rows}
        return next(targets.lines({"benchmark": "spark", "cases": [case]}))

    assert line(600_000) == "target met     from journal, into noop: 0.7x (or 500,000/s) arrow, is 0.60x"
    assert line(400_000).startswith("target MISSED")


@pytest.mark.slow
def test_outbox_relays_every_row() -> None:
    require("postgresql")
    out = benchmark("outbox", "--runs", "1", "--messages", "200", "--backends", "memory")
    assert "relay, 1000 keys" in out


@pytest.mark.slow
def test_memory_runs() -> None:
    assert "queue.SimpleQueue" in benchmark("memory", "--runs", "1", "--messages", "1000")


def test_unknown_peers_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "mqtt", "--peers", "ours,pahoo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "nobody is called pahoo" in done.stderr


# --- parts


def test_the_figures_of_the_page_are_those_of_the_reference() -> None:
    assert report.page() == report.PAGE.read_text(), "run: python -m benchmarks report"


def test_ratios_say_how_many_times_better_ours_is() -> None:
    rows = [row("ours", x=30.0), row("peer", x=10.0), {"name": "gone", "failure": "why"}]
    more, less = ({"name": "x", "more_is_better": more} for more in (True, False))
    assert [report.better({"rows": rows}, each, more) for each in rows] == [None, 3.0, None]
    assert report.better({"rows": rows}, rows[1], less) == pytest.approx(1 / 3)


def test_targets_are_judged_by_the_medians() -> None:
    labels = {"version": "5", "qos": "1", "payload": "100"}
    case = {"labels": labels, "rows": [row("ours", rate=20), row("paho", rate=10), row("aiomqtt", rate=10)]}
    other = {"labels": labels | {"payload": "1024"}, "rows": [row("ours", rate=1), row("paho", rate=10)]}
    lines = [*targets.lines({"benchmark": "mqtt", "cases": [case, other]})]
    assert lines == [
        "target met     version 5, qos 1, payload 100: 2x paho, is 2.00x",
        "target MISSED  version 5, qos 1, payload 100: 3x aiomqtt, is 2.00x",
    ]
    assert len([*targets.markdown({"benchmark": "mqtt", "cases": [case]})]) == 4


def test_targets_may_be_other_figures_and_other_cases() -> None:
    five = {
        "labels": {"protocol": "MQTT 5", "qos": "1", "concurrency": "1"},
        "rows": [row("ours", rate=1, p50=10), row("paho", rate=1, p50=20)],
    }
    labels = {"qos": "1", "concurrency": "100"}
    fast = {"labels": labels | {"protocol": "MQTT 5"}, "rows": [row("ours", rate=100, p50=1)]}
    three = {"labels": labels | {"protocol": "MQTT 3.1.1"}, "rows": [row("ours", rate=79, p50=1)]}
    assert [*targets.lines({"benchmark": "requests", "cases": [five, fast, three]})] == [
        "target met     protocol MQTT 5, qos 1, concurrency 1: 1x paho, p50, is 2.00x",
        "target MISSED  qos 1, concurrency 100, protocol MQTT 3.1.1: 0.8x ours MQTT 5, is 0.79x",
    ]


def test_the_number_of_messages_follows_the_warm_up() -> None:
    warm_up = Run(1_000, {"publish": {"start": 0.0, "end": 1.0}, "subscribe": {"end": 0.1, "received": 1_000}})
    assert warm_up.rate == pytest.approx(10_000)
    assert Plan(seconds=2.0).count(warm_up) == 20_000
    assert Plan(messages=7).count(warm_up) == 7
    assert Plan(seconds=2.0).paced(100.0).count(warm_up) == 200
    fast = dataclasses.replace(warm_up, said={"publish": {"start": 0.0, "end": 1e-6}})
    assert Plan().count(fast) == harness._MOST


def test_rounds_begin_with_another_contender_each(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def note(contender: Contender, _: Case, count: int) -> Run:
        order.append(contender.name)
        return Run(count, {"publish": {"start": 0.0, "end": 1.0}})

    monkeypatch.setattr(harness, "run_once", note)
    peers = [Contender(name, "", "json", "") for name in "abc"]
    outcomes = measure(Case({}, {}, 0), peers, Plan(runs=4))
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert [len(outcome.runs) for outcome in outcomes] == [4, 4, 4]


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentiles([each * 1000 for each in range(1, 101)]) == {"p50": 50.0, "p99": 99.0}
    assert percentiles([5_000]) == {"p50": 5.0, "p99": 5.0}
    assert percentiles([]) == {}


def test_counts_of_instructions_are_read(tmp_path: Path) -> None:
    perf, grind = tmp_path / "perf", tmp_path / "grind"
    perf.write_text("# started on ...\n\n123456,,instructions:u,1000,100.00,,\n")
    grind.write_text("==7== Events    : Ir\n==7== Collected : 654321\n")
    assert instructions.PERF.read(perf) == 123_456
    assert instructions.CALLGRIND.read(grind) == 654_321
    perf.write_text("<not supported>,,instructions:u,0,100.00,,\n")
    with pytest.raises(RunError, match="perf counted nothing"):
        instructions.PERF.read(perf)

"""``messaging bench``: correct figures, bounded load, and a report at every end."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Message, MessageContext, Promise
from messaging.cli.bench_load import LEAST_SIZE, Gate, Latencies, Load, Tally, stamp_of, stamped
from messaging.errors import PublishRefusedError
from messaging.testing.brokers import Mosquitto, RabbitMQ, require
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.cli.conftest import Run, refused
from tests.cli.program import Program

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(run: Run) -> Measure:
    """Run a bench; return its report."""

    def measure(*arguments: str, code: int = 0) -> dict[str, Any]:
        found, out, err = run("bench", *arguments, "--json")
        assert found == code, err
        assert out.count("\n") == 1
        report: dict[str, Any] = json.loads(out)
        return report

    return measure


@pytest.fixture(params=["mqtt", "mqtt3", "amqp"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "amqp":
        return str(request.getfixturevalue("rabbitmq").url)
    broker: Mosquitto = request.getfixturevalue("mosquitto")
    return broker.url + ("?version=3.1.1" if request.param == "mqtt3" else "")


# --- every broker


@table("qos", [[], ["-q", "1"]])
def test_every_published_message_is_received(measure: Measure, url: str, qos: list[str]) -> None:
    found = measure(url, "both", "--messages", "1001", "--publishers", "2", "--size", "64", *qos)
    assert (found["mode"], found["size"], found["publishers"], found["interrupted"]) == ("both", 64, 2, False)
    published, received = found["published"], found["received"]
    assert (published["messages"], published["failed"], published["unsettled"]) == (1001, 0, 0)
    counts = [received[key] for key in ("messages", "lost", "duplicates", "out_of_order", "unknown")]
    assert counts == [1001, 0, 0, 0, 0]
    for part in (published, received):
        assert part["per_second"] > 0
        assert part["bytes_per_second"] == pytest.approx(64 * part["per_second"], rel=0.01)
        latency = part["latency"]
        assert [*latency] == ["min", "mean", "p50", "p90", "p99", "p99.9", "max"]
        assert 0 <= latency["min"] <= latency["p50"] <= latency["p99"] <= latency["max"] < PATIENCE
    assert "guest:guest" not in json.dumps(found)


def test_requests_are_measured_with_a_responder_of_its_own(measure: Measure, rabbitmq: RabbitMQ) -> None:
    found = measure(rabbitmq.url, "request", "--messages", "100", "--window", "10")
    assert (found["requests"]["messages"], found["requests"]["failed"]) == (100, 0)
    assert found["requests"]["latency"]["max"] < PATIENCE
    assert "received" not in found


def test_requests_are_measured_with_another_responder(measure: Measure, mosquitto: Mosquitto, topic: str) -> None:
    seen: list[int] = []
    with messaging.connect(mosquitto.url) as m, m.reply(topic, lambda payload: seen.append(len(payload))):
        found = measure(mosquitto.url, "request", "--messages", "20", "-t", topic, "--no-responder", "--size", "50")
    assert found["requests"]["messages"] == 20
    assert seen == [50] * 20


def test_a_bench_receives_the_messages_of_another_bench(measure: Measure, mosquitto: Mosquitto, topic: str) -> None:
    arguments = ("-t", topic, "-q", "1", "--messages", "300")
    with Program("bench", mosquitto.url, "sub", *arguments, "--json") as receiver:
        receiver.says("subscribed to")
        assert measure(mosquitto.url, "pub", *arguments)["published"]["messages"] == 300
        found = json.loads(receiver.out.rest())
        assert receiver.ended() == 0
    received = found["received"]
    assert [received[key] for key in ("messages", "lost", "duplicates", "unknown")] == [300, 0, 0, 0]
    assert 0 < received["latency"]["p50"] < PATIENCE
    assert "published" not in found


def test_messages_of_other_programs_are_counted_as_unknown(measure: Measure, mosquitto: Mosquitto, topic: str) -> None:
    with Program("bench", mosquitto.url, "sub", "-t", topic, "--messages", "3", "--json") as receiver:
        receiver.says("subscribed to")
        with messaging.connect(mosquitto.url) as m:
            for _ in range(3):
                m.publish(topic, "no bench", qos=1).result(PATIENCE)
        received = json.loads(receiver.out.rest())["received"]
    assert (received["messages"], received["unknown"], received["latency"]) == (3, 3, None)


def test_the_report_as_text_has_the_same_figures(run: Run, mosquitto: Mosquitto) -> None:
    code, out, err = run("bench", mosquitto.url, "--messages", "100", "-q", "1")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith(f"both at {mosquitto.url}, channel bench/")
    assert [line[1] for line in lines if line[0] in ("published", "received")] == ["100,", "100,"]
    assert "0 lost, 0 duplicates, 0 out of order, 0 unknown" in out
    assert out.count("p99.9") == 2


def test_the_mode_may_come_alone_when_the_environment_has_the_broker(
    measure: Measure, mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESSAGING_URL", mosquitto.url)
    assert measure("pub", "--messages", "10")["mode"] == "pub"


# --- bounds


def test_a_rate_is_kept(measure: Measure, mosquitto: Mosquitto) -> None:
    found = measure(mosquitto.url, "pub", "--messages", "51", "--publishers", "3", "--rate", "100", "-q", "1")
    assert 0.4 < found["seconds"] < PATIENCE
    assert found["published"]["per_second"] < 120


class Silent(Recorder[Promise[None]]):
    """Accepts messages; a test settles their promises."""

    def __call__(self, message: Message) -> Promise[None]:  # type: ignore[override]
        promise = Promise[None]("test")
        self.append(promise)
        return promise


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    stop = threading.Event()
    yield stop
    stop.set()


def loaded(send: Any, count: int, window: int) -> Load:
    return Load(send, MessageContext("a"), count, number=0, run=b"12345678", size=0, window=window)


def test_no_more_than_the_window_is_ever_unconfirmed(stop: threading.Event) -> None:
    broker = Silent()
    load = loaded(broker, 20, window=5)
    load.start(None, None, stop)
    for settled in range(15):
        broker.wait_for(settled + 5)
        assert (len(broker), load.unsettled) == (settled + 5, 5)
        broker[settled].resolve(None)
    broker.wait_for(20)
    for promise in broker[15:]:
        promise.resolve(None)
    eventually(lambda: not load.is_running)
    assert (load.sent, load.done, load.failed, load.accepted) == (20, 20, 0, bytearray(b"\1" * 20))


def test_failed_messages_are_counted_and_not_expected(stop: threading.Event) -> None:
    broker = Silent()
    load = loaded(broker, 2, window=2)
    load.start(None, None, stop)
    broker.wait_for(2)
    broker[0].reject(PublishRefusedError("not this one"))
    broker[1].resolve(None)
    eventually(lambda: not load.is_running)
    assert (load.done, load.failed, str(load.error)) == (1, 1, "not this one")
    assert Tally(b"12345678").missing([load.accepted]) == 1


def test_publishers_wait_for_the_receiver_but_not_for_lost_messages() -> None:
    received = 0
    gate = Gate(2, 0.05, lambda: received)
    assert [gate.passed() for _ in range(3)] == [True, True, False]
    received = 1
    assert [gate.passed() for _ in range(2)] == [True, False]
    eventually(gate.passed)  # both count as lost
    assert [gate.passed(), gate.passed()] == [True, False]


# --- figures

RUN = b"12345678"


def test_duplicates_gaps_and_disorder_are_counted_separately() -> None:
    tally = Tally(RUN)
    for sequence in (3, 4, 4, 7, 6, 3):
        tally.take(stamped(RUN, 1, sequence, 1_000, b""), 3_000)
    tally.take(stamped(b"another.", 1, 0, 1_000, b""), 3_000)
    tally.take(b"no bench", 3_000)
    tally.take(stamped(RUN, 1, 2**63, 1_000, b""), 3_000)
    assert (tally.received, tally.distinct, tally.duplicates) == (9, 4, 2)
    assert (tally.out_of_order, tally.unknown, tally.gaps()) == (1, 3, 1)
    assert tally.missing([bytearray(), bytearray(b"\0\0\0\1\1\1\1\1\1"), bytearray(b"\1\1")]) == 4
    assert tally.latencies.count == 4


def test_a_payload_has_the_requested_size_and_names_its_origin() -> None:
    payload = stamped(RUN, 7, 8, 9, bytes(68))
    assert len(payload) == LEAST_SIZE + 68
    assert stamp_of(payload) == (RUN, 7, 8, 9)
    assert stamp_of(payload[: LEAST_SIZE - 1]) is None


def test_foreign_stamps_use_bounded_memory() -> None:
    tally = Tally()
    for publisher in range(2_000):
        tally.take(stamped(RUN, publisher, 9_000_000, 0, b""), 1)
    assert tally.distinct < 100
    assert tally.distinct + tally.unknown == 2_000


def test_percentiles_are_accurate_to_1_percent() -> None:
    parts = Latencies(), Latencies()
    for value in range(1, 100_001):
        parts[value % 3 == 0].add(value * 1_000)
    found = Latencies.merged(parts).summary()
    assert found is not None
    names = ("min", "mean", "p50", "p90", "p99", "p99.9", "max")
    values = (1, 50_000.5, 50_000, 90_000, 99_000, 99_900, 100_000)
    assert found == pytest.approx({name: value / 1e6 for name, value in zip(names, values, strict=True)}, rel=0.01)
    assert Latencies().summary() is None


# --- the end of a run


def test_lost_messages_are_a_failure(run: Run, tmp_path: Path) -> None:
    """With QoS 0 a broker drops messages that it does not permit."""
    require("mosquitto")
    rules = tmp_path / "acl"
    rules.write_text("topic read #\n")
    with Mosquitto([f"acl_file {rules}"]) as broker:
        code, out, err = run("bench", f"{broker.url}?version=3.1.1", "--messages", "20", "-q", "0", "--json")
    assert code == 1
    assert json.loads(out)["received"]["lost"] == 20
    assert "messaging: error: 20 messages were lost\n" in err


def test_an_interrupted_bench_reports_its_figures(mosquitto: Mosquitto, topic: str) -> None:
    with messaging.connect(mosquitto.url) as m, m.subscribe(topic) as stream:
        stream.ready.result(PATIENCE)
        arguments = ("--rate", "50", "-q", "1", "-t", topic, "--json")
        with Program("bench", mosquitto.url, "both", *arguments) as bench:
            for _ in range(3):
                stream.receive(PATIENCE)
            bench.signal(signal.SIGINT)
            assert bench.ended() == 130
            found = json.loads(bench.out.rest())
    assert found["interrupted"] is True
    assert found["published"]["messages"] == found["received"]["messages"] >= 3
    assert (found["published"]["unsettled"], found["received"]["lost"]) == (0, 0)


def test_a_timeout_ends_a_bench_with_a_report(run: Run, mosquitto: Mosquitto) -> None:
    arguments = ("--rate", "20", "-W", "0.3", "-q", "1", "--json")
    code, out, err = run("bench", mosquitto.url, "both", *arguments)
    assert code == 3
    assert "timeout: not done within 0.3 s" in err
    assert 0 < json.loads(out)["received"]["messages"] < 100


def test_failed_requests_are_a_failure(run: Run, rabbitmq: RabbitMQ, topic: str) -> None:
    arguments = ("-t", topic, "--no-responder", "--messages", "3", "--json")
    code, out, err = run("bench", rabbitmq.url, "request", *arguments)
    assert code == 1
    assert json.loads(out)["requests"]["failed"] == 3
    assert "messaging: error: 3 messages failed: " in err


@table(
    "arguments, expected",
    [
        (("all",), "no mode 'all'; there are both, pub, sub, request"),
        (("--size", "31"), "--size must be from 32 to"),
        (("--messages", "0"), "--messages must be from 1 to"),
        (("--messages", "100000000"), "--messages must be from 1 to 10000000"),
        (("--messages", "2", "--publishers", "3"), "fewer than there are publishers"),
        (("--publishers", "101"), "--publishers must be"),
        (("--window", "0"), "--window must be"),
        (("--rate", "0"), "--rate must be"),
        (("--rate", "nan"), "--rate must be"),
        (("-W", "0"), "--timeout must be"),
        (("-t", "a/#"), "wildcards are for subscriptions only"),
        (("sub",), "--topic is missing"),
        (("request", "--no-responder"), "--topic is missing"),
        (("--id", "me"), "each needs a client id of its own"),
        (("-q", "3"), "extension 'qos'"),
    ],
)
def test_wrong_options_of_a_bench_are_refused(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(run, "bench", "memory://b", *arguments)


def test_a_mode_alone_needs_a_broker_in_the_environment(run: Run) -> None:
    assert "no broker URL" in refused(run, "bench", "pub")

"""Metrics for Prometheus: every number of the DTOs, latencies, and what a collection must stand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

import messaging
from messaging import Message
from messaging.errors import ArgumentError
from messaging.gateway import Gateway
from messaging.journal import Journal
from messaging.observability.metrics import LatencyInterceptor, MetricsCollector, default_metrics, rendered
from messaging.services import ServiceRegistry
from messaging.services.reporting import Histogram, PartReporter, counter, gauge, info, label, register_reporter
from messaging.services.reporting import histogram as histogram_of
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, results
from tests.gateway.kit import route, settings, started, unique


def samples(services: ServiceRegistry | None = None) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Collect, render, parse: the samples by name and labels."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(services))
    body, _ = rendered(registry, "", "")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(body.decode())
        for sample in family.samples
    }


def value(found: dict[Any, float], metric: str, /, **labels: str) -> float:
    return found[(metric, frozenset(labels.items()))]


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_metrics_equal_the_dtos_after_many_messages(count: int) -> None:
    services = ServiceRegistry()
    with messaging.connect("memory://metrics-many", services=services, name="plant", outbox_size=count) as m:
        m.on("a/+", lambda _: None).ready.result(PATIENCE)
        for number in range(count):
            m.publish(f"a/{number % 7}", b"x")
        m.publish("b", b"last").result(3 * PATIENCE)
        eventually(
            lambda: m.runtime.get_runtime_dto().subscriptions[0].counters.acknowledged == count, patience=3 * PATIENCE
        )
        eventually(lambda: m.runtime.get_runtime_dto().publisher.pending == 0)
        found, dto = samples(services), m.runtime.get_runtime_dto()
    assert value(found, "messaging_instance_publisher_published_messages_total", name="plant") == count + 1
    assert dto.publisher.published == count + 1
    counters = dataclasses.asdict(dto.subscriptions[0].counters)
    assert counters["received"] == count
    for name, number in counters.items():
        matching = [
            number_found for (metric, labels), number_found in found.items()
            if metric.startswith("messaging_instance_subscription") and f"_{name}_" in f"{metric}_"
            and ("channel", "a/+") in labels
        ]  # fmt: skip
        if matching:
            assert matching == [number], name


def test_metrics_equal_the_report_of_a_gateway(tmp_path: Path) -> None:
    services = ServiceRegistry()
    instances = {each: {"url": unique("memory://metered")} for each in "ab"}
    routes = {"r": route("in/+", "out", where="(!(channel=in/out))")}
    chosen = settings(tmp_path, name="metered", instances=instances, routes=routes)
    with Gateway(chosen, services=services) as gateway, messaging.connect(instances["a"]["url"]) as m:
        started(gateway)
        results(m.publish("in/x" if number % 4 else "in/out", b"x") for number in range(1000))

        def is_at_rest() -> bool:
            report = gateway.route("r").report()
            return report.filtered == 250 and report.published == 750 and report.buffer.depth == 0

        eventually(is_at_rest)
        found, report = samples(services), gateway.route("r").report()
    labels = {"name": "metered", "route": "r"}
    for name, number in (
        ("received_messages_total", report.received),
        ("filtered_messages_total", report.filtered),
        ("published_messages_total", report.published),
        ("buffer_accepted_messages_total", report.buffer.accepted),
        ("buffer_depth_messages", report.buffer.depth),
        ("buffer_bytes", report.buffer.bytes),
        ("latency_seconds_count", report.latency.count),
    ):
        assert value(found, f"messaging_gateway_routes_{name}", **labels) == number, name
    assert report.latency.count > 0


def test_depth_and_age_of_a_journal_are_metrics(tmp_path: Path) -> None:
    services = ServiceRegistry()
    with Journal.open(tmp_path / "j") as journal:
        cursor = journal.cursor("reader")
        for number in range(5):
            journal.append_message(Message(b"%d" % number, messaging.MessageContext("a")))
        register_reporter(services, PartReporter("journal", "j", journal.get_dto))
        found = samples(services)
        assert cursor.behind == 5
    assert any(name.startswith("messaging_journal") and number == 5.0 for (name, _), number in found.items())


@dataclasses.dataclass(frozen=True)
class OddDTO:
    odd: str = dataclasses.field(metadata=label("name"))
    count: float = dataclasses.field(metadata=counter("things", "things"))
    level: float | None = dataclasses.field(metadata=gauge("level"))
    text: str = dataclasses.field(metadata=info())


@table("name", ['a"b', "a\nb", "a\\b", "ü", "\ud800", "", "x" * 1000])
@table("number", [0.0, -1.0, float("inf"), float("nan"), 1e300])
def test_odd_names_and_numbers_are_valid_exposition(name: str, number: float) -> None:
    services = ServiceRegistry()
    register_reporter(services, PartReporter("odd", name, lambda: OddDTO(name, number, None, name)))
    registry = CollectorRegistry()
    registry.register(MetricsCollector(services))
    list(parse(rendered(registry, "", "")[0].decode()))
    if number >= 0:
        list(parse_openmetrics(rendered(registry, "application/openmetrics-text", "")[0].decode()))  # type: ignore[no-untyped-call]


def test_a_reporter_that_fails_is_left_out_and_counted() -> None:
    services = ServiceRegistry()

    def fail() -> object:
        raise RuntimeError("no")

    register_reporter(services, PartReporter("broken", "x", fail))
    register_reporter(services, PartReporter("right", "y", lambda: OddDTO("y", 1, 2, "t")))
    found = samples(services)
    assert value(found, "messaging_reporter_failures_total") == 1
    assert any(name.startswith("messaging_right") for name, _ in found)


def test_a_histogram_has_the_buckets_that_prometheus_expects() -> None:
    services = ServiceRegistry()
    histogram = Histogram((0.1, 1.0))
    for number in (0.05, 0.1, 0.5, 7.0):
        histogram.record(number)

    @dataclasses.dataclass(frozen=True)
    class MeasuredDTO:
        time: Any = dataclasses.field(metadata=histogram_of("time", "seconds"))

    register_reporter(services, PartReporter("measured", "m", lambda: MeasuredDTO(histogram.get_dto())))
    found = samples(services)
    name = "messaging_measured_time_seconds"
    assert [value(found, f"{name}_bucket", name="m", le=le) for le in ("0.1", "1.0", "+Inf")] == [2, 3, 4]
    assert value(found, f"{name}_count", name="m") == 4
    assert value(found, f"{name}_sum", name="m") == pytest.approx(7.65)


@table("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_of_a_histogram_rise(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match="rising order"):
        Histogram(bounds)


def test_latencies_of_an_instance_are_measured() -> None:
    services = ServiceRegistry()
    registry = default_metrics(services)
    interceptor = LatencyInterceptor(registry)
    with messaging.connect("memory://latencies", services=services, name="m", interceptors=[interceptor]) as m:
        m.on("a", lambda _: None).ready.result(PATIENCE)
        m.reply("ask", lambda payload: payload).ready.result(PATIENCE)
        for _ in range(5):
            m.publish("a", b"").result(PATIENCE)
        m.request("ask", b"x").result(PATIENCE)
        with pytest.raises(messaging.MessagingError):
            m.request("nobody", b"x", timeout=0.01).result(PATIENCE)

        def count(name: str, operation: str, outcome: str) -> float:
            labels = {"name": "m", "operation": operation, "outcome": outcome}
            return registry.get_sample_value(f"{name}_count", labels) or 0.0

        eventually(lambda: count("messaging_publish_duration_seconds", "publish", "ok") == 5)
        eventually(lambda: count("messaging_publish_duration_seconds", "request", "ok") == 1)
        eventually(lambda: count("messaging_publish_duration_seconds", "request", "error") == 1)
        eventually(lambda: count("messaging_process_duration_seconds", "message", "ok") == 5)
        eventually(lambda: count("messaging_process_duration_seconds", "request", "ok") == 1)


def test_only_some_latencies_are_measured_if_asked_for() -> None:
    registry = CollectorRegistry()
    interceptor = LatencyInterceptor(registry, every=10)
    with messaging.connect("memory://some-latencies", name="m", interceptors=[interceptor]) as m:
        for _ in range(30):
            m.publish("a", b"").result(PATIENCE)
        labels = {"name": "m", "operation": "publish", "outcome": "ok"}
        eventually(lambda: registry.get_sample_value("messaging_publish_duration_seconds_count", labels) == 3)


@table("every", [0, -1, 1.5, True, "2"])
def test_a_wrong_interval_is_refused(every: Any) -> None:
    with pytest.raises(ArgumentError, match="every"):
        LatencyInterceptor(CollectorRegistry(), every=every)


def test_default_metrics_have_those_of_the_process() -> None:
    body, headers = rendered(default_metrics(ServiceRegistry()), "", "gzip, deflate")
    assert headers["Content-Encoding"] == "gzip"
    import gzip

    assert b"process_cpu_seconds_total" in gzip.decompress(body)

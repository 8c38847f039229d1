"""Traces and metrics of OpenTelemetry, with the SDK's in-memory exporter and reader."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import messaging
from messaging.errors import ArgumentError
from messaging.gateway import Gateway, GatewaySettings
from messaging.observability.opentelemetry import OPT_IN, OpenTelemetryInterceptor
from messaging.testing.brokers import Mosquitto, RabbitMQ

PATIENCE = 15.0


class Traces:
    """Spans of one test."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.reader = InMemoryMetricReader()
        self.interceptor = OpenTelemetryInterceptor(
            tracer_provider=provider, meter_provider=MeterProvider([self.reader]), **options
        )

    def spans(self, count: int) -> dict[str, ReadableSpan]:
        """Wait for so many spans; return them by name."""
        wait(lambda: len(self.exporter.get_finished_spans()) >= count)
        found = self.exporter.get_finished_spans()
        assert len(found) == count, [each.name for each in found]
        return {each.name: each for each in found}

    def metrics(self) -> dict[str, list[Any]]:
        """Return the data points by the name of the metric."""
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: [*metric.data.data_points]
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _present_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPT_IN, "messaging")


@pytest.fixture(params=["memory", "mqtt5", "mqtt311-envelope", "amqp"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://traces-{id(request)}"
    elif request.param == "amqp":
        yield request.getfixturevalue("rabbitmq").url
    else:
        broker: Mosquitto = request.getfixturevalue("mosquitto")
        yield broker.url + ("?version=5" if request.param == "mqtt5" else "?version=3.1.1&envelope=true")


# --- publish and subscribe


def test_a_received_message_links_to_the_span_of_its_publisher(url: str) -> None:
    traces = Traces()
    inside: list[trace.Span] = []
    with messaging.connect(url, interceptors=[traces.interceptor]) as m:
        m.on("traces/links", lambda _: inside.append(trace.get_current_span()))
        m.publish("traces/links", b"hello").result(PATIENCE)
        spans = traces.spans(2)
    published, processed = spans["publish traces/links"], spans["process traces/links"]
    assert (published.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert processed.parent is None
    assert [link.context.span_id for link in processed.links] == [published.context.span_id]
    assert processed.context.trace_id != published.context.trace_id
    assert inside[0].get_span_context().span_id == processed.context.span_id
    assert published.attributes is not None
    assert published.attributes["messaging.operation.type"] == "send"
    assert published.attributes["messaging.destination.name"] == "traces/links"
    assert published.attributes["messaging.message.body.size"] == 5
    assert "messaging.operation" not in published.attributes


def test_a_received_message_continues_the_trace_of_its_publisher_if_asked_for() -> None:
    traces = Traces(parent=True)
    with messaging.connect("memory://traces-parent", interceptors=[traces.interceptor]) as m:
        m.on("a", lambda _: None)
        m.publish("a", b"").result(PATIENCE)
        spans = traces.spans(2)
    assert spans["process a"].parent is not None
    assert spans["process a"].parent.span_id == spans["publish a"].context.span_id


def test_a_message_is_published_in_the_current_span() -> None:
    traces = Traces()
    with messaging.connect("memory://traces-current", interceptors=[traces.interceptor]) as m:
        with traces.tracer.start_as_current_span("work") as work:
            m.publish("a", b"").result(PATIENCE)
        published = traces.spans(2)["publish a"]
    assert published.parent is not None
    assert published.parent.span_id == work.get_span_context().span_id


def test_the_body_of_a_loop_runs_in_the_span_of_its_message() -> None:
    traces = Traces()
    current: list[int] = []
    with messaging.connect("memory://traces-loop", interceptors=[traces.interceptor]) as m:
        stream = m.subscribe("a")
        stream.ready.result(PATIENCE)
        for number in range(3):
            m.publish("a", b"%d" % number).result(PATIENCE)
        for _ in stream:
            current.append(trace.get_current_span().get_span_context().span_id)
            if len(current) == 3:
                break
        stream.close()
        assert not trace.get_current_span().get_span_context().is_valid
        wait(lambda: len(traces.exporter.get_finished_spans()) == 6)
    ids = [each.context.span_id for each in traces.exporter.get_finished_spans() if each.name == "process a"]
    assert current == ids


def test_the_body_of_an_asynchronous_loop_runs_in_the_span_of_its_message() -> None:
    asyncio.run(_asynchronous_loop())


async def _asynchronous_loop() -> None:
    traces = Traces()
    current: list[int] = []
    async with messaging.connect("memory://traces-async-loop", interceptors=[traces.interceptor]) as m:
        stream = m.subscribe("a")
        await stream.ready
        await m.publish("a", b"1")
        await m.publish("a", b"2")
        async for _ in stream:
            current.append(trace.get_current_span().get_span_context().span_id)
            if len(current) == 2:
                break
        stream.close()
        wait(lambda: len(traces.exporter.get_finished_spans()) == 4)
    ids = [each.context.span_id for each in traces.exporter.get_finished_spans() if each.name == "process a"]
    assert current == ids


def test_a_handler_that_raises_is_an_error_of_its_span() -> None:
    traces = Traces()

    def fail(_: messaging.Message) -> None:
        raise ValueError("no")

    with messaging.connect("memory://traces-error", interceptors=[traces.interceptor]) as m:
        m.on("a", fail, max_deliveries=1, dead_letter_channel="dead")
        m.publish("a", b"").result(PATIENCE)
        processed = traces.spans(2)["process a"]
    assert processed.status.status_code is StatusCode.ERROR
    assert processed.attributes is not None
    assert processed.attributes["error.type"] == "ValueError"
    assert [event.name for event in processed.events] == ["exception"]


def test_a_message_that_is_refused_is_an_error_of_its_span() -> None:
    traces = Traces()
    m = messaging.connect("memory://traces-refused", interceptors=[traces.interceptor])
    m.close()
    with pytest.raises(messaging.MessagingError):
        m.publish("a", b"").result(PATIENCE)
    published = traces.spans(1)["publish a"]
    assert published.status.status_code is StatusCode.ERROR
    assert published.attributes is not None
    assert published.attributes["error.type"] == "ClosedError"


def test_baggage_travels_with_the_message() -> None:
    traces = Traces()
    found: list[object] = []
    with messaging.connect("memory://traces-baggage", interceptors=[traces.interceptor]) as m:
        m.on("a", lambda _: found.append(baggage.get_baggage("plant")))
        token = context.attach(baggage.set_baggage("plant", "7"))
        try:
            m.publish("a", b"").result(PATIENCE)
        finally:
            context.detach(token)
        wait(lambda: bool(found))
    assert found == ["7"]


@pytest.mark.parametrize(
    "value", ["", "00-xyz", "00-00000000000000000000000000000000-0000000000000000-01", "x" * 10_000, ("a", "b")]
)
def test_a_wrong_trace_context_is_ignored(value: Any) -> None:
    traces = Traces()
    with (
        messaging.connect("memory://traces-wrong") as other,
        messaging.connect("memory://traces-wrong", interceptors=[traces.interceptor]) as m,
    ):
        done = threading.Event()
        m.on("a", lambda _: done.set())
        other.publish("a", b"", headers={"traceparent": value}).result(PATIENCE)
        assert done.wait(PATIENCE)
        processed = traces.spans(1)["process a"]
    assert processed.parent is None
    assert not processed.links


# --- requests


def test_a_request_and_its_reply_are_one_trace(url: str) -> None:
    traces = Traces()
    with messaging.connect(url, interceptors=[traces.interceptor]) as m:
        m.reply("traces/ask", lambda payload: payload)
        assert m.request("traces/ask", b"x", timeout=PATIENCE).result(PATIENCE).payload == b"x"
        wait(lambda: len(traces.exporter.get_finished_spans()) == 3)
    found = {each.kind: each for each in traces.exporter.get_finished_spans()}
    assert len({each.context.trace_id for each in traces.exporter.get_finished_spans()}) == 1
    client, server, reply = found[SpanKind.CLIENT], found[SpanKind.CONSUMER], found[SpanKind.PRODUCER]
    assert client.name == "request traces/ask"
    assert server.parent is not None
    assert server.parent.span_id == client.context.span_id
    assert reply.parent is not None
    assert reply.parent.span_id == server.context.span_id


def test_a_request_over_a_gateway_from_mqtt_to_amqp_is_one_trace(
    mosquitto: Mosquitto, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    traces = Traces()
    settings = GatewaySettings.model_validate({
        "name": "traced",
        "data": str(tmp_path / "data"),
        "instances": {"plant": {"url": mosquitto.url}, "cloud": {"url": rabbitmq.url}},
        "requests": {
            "ask": {
                "from": {"instance": "plant", "channel": "traced/{device}"},
                "to": {"instance": "cloud", "channel": "traced/asked/{device}"},
            }
        },
    })  # fmt: skip
    with (
        messaging.connect(rabbitmq.url, interceptors=[traces.interceptor]) as cloud,
        messaging.connect(mosquitto.url, interceptors=[traces.interceptor]) as plant,
        Gateway(settings, interceptors=[traces.interceptor]),
    ):
        cloud.reply("traced/asked/+", lambda _: b"21 degC")
        reply = None
        deadline = time.monotonic() + PATIENCE
        while reply is None:  # until the gateway has subscribed
            try:
                reply = plant.request("traced/d7", b"temperature", timeout=1.0).result(PATIENCE)
            except messaging.MessagingError:
                assert time.monotonic() < deadline
                traces.exporter.clear()
        assert reply.payload == b"21 degC"
        wait(lambda: len(traces.exporter.get_finished_spans()) >= 6)
    spans = [each for each in traces.exporter.get_finished_spans() if each.attributes is not None]
    request = next(each for each in spans if each.name == "request traced/d7")
    one_trace = [each for each in spans if each.context.trace_id == request.context.trace_id]
    assert sorted(each.kind.name for each in one_trace) == ["CLIENT"] * 2 + ["CONSUMER"] * 2 + ["PRODUCER"] * 2
    chain = {each.context.span_id: each for each in one_trace}
    responder = next(each for each in one_trace if each.name == "process traced/asked/d7")
    ancestors = []
    at: ReadableSpan | None = responder
    while at is not None:
        ancestors.append(at.name)
        at = chain.get(at.parent.span_id) if at.parent is not None else None
    assert ancestors == [
        "process traced/asked/d7", "request traced/asked/d7", "process traced/d7", "request traced/d7"
    ]  # fmt: skip
    systems = {each.name: each.attributes["messaging.system"] for each in one_trace if each.attributes is not None}
    assert systems["request traced/d7"] == "mqtt"
    assert systems["request traced/asked/d7"] == "rabbitmq"


def test_a_message_that_passes_a_gateway_stays_in_the_trace_of_its_publisher(tmp_path: Path) -> None:
    traces = Traces()
    settings = GatewaySettings.model_validate({
        "name": "traced-route",
        "data": str(tmp_path / "data"),
        "instances": {"a": {"url": "memory://traced-a"}, "b": {"url": "memory://traced-b"}},
        "routes": {
            "r": {
                "from": {"instance": "a", "channel": "x", "queue": "q"},
                "to": {"instance": "b", "channel": "y"},
                "buffer": {"full": "block"},
            }
        },
    })  # fmt: skip
    with (
        messaging.connect("memory://traced-a", interceptors=[traces.interceptor]) as a,
        messaging.connect("memory://traced-b", interceptors=[traces.interceptor]) as b,
        Gateway(settings, interceptors=[traces.interceptor]) as gateway,
    ):
        b.on("y", lambda _: None)
        wait(lambda: gateway.route("r").report().is_source_up)
        wait(lambda: a.publish("x", b"", mandatory=True).exception(PATIENCE) is None)
        traces.exporter.clear()
        a.publish("x", b"1").result(PATIENCE)
        wait(lambda: {"publish x", "publish y", "process y"} <= {e.name for e in traces.exporter.get_finished_spans()})
    spans = {each.name: each for each in traces.exporter.get_finished_spans()}
    assert spans["publish y"].context.trace_id == spans["publish x"].context.trace_id


# --- names, metrics, arguments


@pytest.mark.parametrize(
    ("opt_in", "name", "present", "absent"),
    [
        ("", "a publish", {"messaging.operation", "messaging.message.payload_size_bytes"},
         {"messaging.operation.name"}),
        ("http", "a publish", {"messaging.operation"}, {"messaging.operation.type"}),
        ("http,messaging", "publish a", {"messaging.operation.name", "messaging.message.body.size"},
         {"messaging.operation"}),
        ("messaging/dup", "publish a", {"messaging.operation.name", "messaging.operation"}, set()),
    ],
)  # fmt: skip
def test_the_environment_chooses_the_names_of_attributes(
    monkeypatch: pytest.MonkeyPatch, opt_in: str, name: str, present: set[str], absent: set[str]
) -> None:
    monkeypatch.setenv(OPT_IN, opt_in)
    traces = Traces()
    with messaging.connect("memory://traces-names", interceptors=[traces.interceptor]) as m:
        m.publish("a", b"").result(PATIENCE)
        span = traces.spans(1)[name]
    assert span.attributes is not None
    assert present <= span.attributes.keys()
    assert not absent & span.attributes.keys()


def test_metrics_count_messages_and_measure_durations() -> None:
    traces = Traces(destination=lambda channel: channel.partition("/")[0])
    with messaging.connect("memory://traces-metrics", interceptors=[traces.interceptor]) as m:
        m.on("a/+", lambda _: None)
        for number in range(10):
            m.publish(f"a/{number}", b"").result(PATIENCE)
        traces.spans(20)
        found = traces.metrics()
    sent, consumed = found["messaging.client.sent.messages"], found["messaging.client.consumed.messages"]
    assert [(each.value, each.attributes["messaging.destination.name"]) for each in sent] == [(10, "a")]
    assert [(each.value, each.attributes["messaging.destination.template"]) for each in consumed] == [(10, "a/+")]
    assert found["messaging.client.operation.duration"][0].count == 10
    assert found["messaging.process.duration"][0].count == 10
    assert found["messaging.process.duration"][0].explicit_bounds[0] == 0.005


def test_without_an_sdk_messages_are_handled_as_ever() -> None:
    got = threading.Event()
    with messaging.connect("memory://traces-api", interceptors=[OpenTelemetryInterceptor()]) as m:
        m.on("a", lambda _: got.set())
        m.publish("a", b"").result(PATIENCE)
        assert got.wait(PATIENCE)


@pytest.mark.parametrize("arguments", [{"destination": "a/b"}, {"parent": 1}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        OpenTelemetryInterceptor(**arguments)

"""Traces and metrics of OpenTelemetry, with the SDK's in-memory exporter and reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
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
from messaging import Message, Messaging
from messaging.errors import ArgumentError
from messaging.gateway import Gateway
from messaging.observability.opentelemetry import OPT_IN, OpenTelemetryInterceptor
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.gateway.kit import route, settings, started, unique


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
        eventually(lambda: len(self.exporter.get_finished_spans()) >= count)
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


@pytest.fixture(autouse=True)
def _present_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPT_IN, "messaging")


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
def m(traces: Traces, request: pytest.FixtureRequest) -> Iterator[Messaging]:
    """A traced instance at a broker of its own."""
    with messaging.connect(f"memory://traces-{id(request)}", interceptors=[traces.interceptor]) as m:
        yield m


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


def test_a_received_message_links_to_the_span_of_its_publisher(url: str, traces: Traces) -> None:
    inside: list[trace.Span] = []
    with messaging.connect(url, interceptors=[traces.interceptor]) as m:
        m.on("traces/links", lambda _: inside.append(trace.get_current_span())).ready.result(PATIENCE)
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
        m.on("a", lambda _: None).ready.result(PATIENCE)
        m.publish("a", b"").result(PATIENCE)
        spans = traces.spans(2)
    assert spans["process a"].parent is not None
    assert spans["process a"].parent.span_id == spans["publish a"].context.span_id


def test_a_message_is_published_in_the_current_span(traces: Traces, m: Messaging) -> None:
    with traces.tracer.start_as_current_span("work") as work:
        m.publish("a", b"").result(PATIENCE)
    published = traces.spans(2)["publish a"]
    assert published.parent is not None
    assert published.parent.span_id == work.get_span_context().span_id


def test_the_body_of_a_loop_runs_in_the_span_of_its_message(traces: Traces) -> None:
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
        eventually(lambda: len(traces.exporter.get_finished_spans()) == 6)
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
        eventually(lambda: len(traces.exporter.get_finished_spans()) == 4)
    ids = [each.context.span_id for each in traces.exporter.get_finished_spans() if each.name == "process a"]
    assert current == ids


def test_a_handler_that_raises_is_an_error_of_its_span(traces: Traces, m: Messaging) -> None:

    def fail(_: Message) -> None:
        raise ValueError("no")

    m.on("a", fail, max_deliveries=1, dead_letter_channel="dead").ready.result(PATIENCE)
    m.publish("a", b"").result(PATIENCE)
    processed = traces.spans(2)["process a"]
    assert processed.status.status_code is StatusCode.ERROR
    assert processed.attributes is not None
    assert processed.attributes["error.type"] == "ValueError"
    assert [event.name for event in processed.events] == ["exception"]


def test_a_message_that_is_refused_is_an_error_of_its_span(traces: Traces) -> None:
    m = messaging.connect("memory://traces-refused", interceptors=[traces.interceptor])
    m.close()
    with pytest.raises(messaging.MessagingError):
        m.publish("a", b"").result(PATIENCE)
    published = traces.spans(1)["publish a"]
    assert published.status.status_code is StatusCode.ERROR
    assert published.attributes is not None
    assert published.attributes["error.type"] == "ClosedError"


def test_baggage_travels_with_the_message(traces: Traces, m: Messaging) -> None:
    found: list[object] = []
    m.on("a", lambda _: found.append(baggage.get_baggage("plant"))).ready.result(PATIENCE)
    token = context.attach(baggage.set_baggage("plant", "7"))
    try:
        m.publish("a", b"").result(PATIENCE)
    finally:
        context.detach(token)
    eventually(lambda: bool(found))
    assert found == ["7"]


@table("value", ["", "00-xyz", "00-00000000000000000000000000000000-0000000000000000-01", "x" * 10_000, ("a", "b")])
def test_a_wrong_trace_context_is_ignored(value: Any) -> None:
    traces = Traces()
    with (
        messaging.connect("memory://traces-wrong") as other,
        messaging.connect("memory://traces-wrong", interceptors=[traces.interceptor]) as m,
    ):
        found: Recorder[Message] = Recorder()
        m.on("a", found).ready.result(PATIENCE)
        other.publish("a", b"", headers={"traceparent": value}).result(PATIENCE)
        found.wait_for(1)
        processed = traces.spans(1)["process a"]
    assert processed.parent is None
    assert not processed.links


# --- requests


def test_a_request_and_its_reply_are_one_trace(url: str, traces: Traces) -> None:
    with messaging.connect(url, interceptors=[traces.interceptor]) as m:
        m.reply("traces/ask", lambda payload: payload).ready.result(PATIENCE)
        assert m.request("traces/ask", b"x", timeout=PATIENCE).result(PATIENCE).payload == b"x"
        eventually(lambda: len(traces.exporter.get_finished_spans()) == 3)
    found = {each.kind: each for each in traces.exporter.get_finished_spans()}
    assert len({each.context.trace_id for each in traces.exporter.get_finished_spans()}) == 1
    client, server, reply = found[SpanKind.CLIENT], found[SpanKind.CONSUMER], found[SpanKind.PRODUCER]
    assert client.name == "request traces/ask"
    assert server.parent is not None
    assert server.parent.span_id == client.context.span_id
    assert reply.parent is not None
    assert reply.parent.span_id == server.context.span_id


def test_a_request_over_a_gateway_is_one_trace(
    mosquitto: Mosquitto, rabbitmq: RabbitMQ, tmp_path: Path, traces: Traces
) -> None:
    chosen = settings(
        tmp_path,
        instances={"a": {"url": mosquitto.url}, "b": {"url": rabbitmq.url}},
        routes={},
        requests={
            "ask": {
                "from": {"instance": "a", "channel": "traced/{device}"},
                "to": {"instance": "b", "channel": "traced/asked/{device}"},
            }
        },
    )
    with (
        messaging.connect(rabbitmq.url, interceptors=[traces.interceptor]) as cloud,
        messaging.connect(mosquitto.url, interceptors=[traces.interceptor]) as plant,
        Gateway(chosen, interceptors=[traces.interceptor]),
    ):
        cloud.reply("traced/asked/+", lambda _: b"21 degC").ready.result(PATIENCE)

        def ask() -> Message | None:  # until the gateway has subscribed
            try:
                return plant.request("traced/d7", b"temperature", timeout=1.0).result(PATIENCE)
            except messaging.MessagingError:
                traces.exporter.clear()
                return None

        reply = eventually(ask)
        assert reply.payload == b"21 degC"
        eventually(lambda: len(traces.exporter.get_finished_spans()) >= 6)
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


def test_a_message_that_passes_a_gateway_stays_in_the_trace_of_its_publisher(tmp_path: Path, traces: Traces) -> None:
    instances = {each: {"url": unique("memory://traced")} for each in "ab"}
    chosen = settings(tmp_path, instances=instances, routes={"r": route("x", "y")})
    with (
        messaging.connect(instances["a"]["url"], interceptors=[traces.interceptor]) as a,
        messaging.connect(instances["b"]["url"], interceptors=[traces.interceptor]) as b,
        Gateway(chosen, interceptors=[traces.interceptor]) as gateway,
    ):
        b.on("y", lambda _: None).ready.result(PATIENCE)
        started(gateway)
        a.publish("x", b"1").result(PATIENCE)
        wanted = {"publish x", "publish y", "process y"}
        eventually(lambda: wanted <= {each.name for each in traces.exporter.get_finished_spans()})
    spans = {each.name: each for each in traces.exporter.get_finished_spans()}
    assert spans["publish y"].context.trace_id == spans["publish x"].context.trace_id


# --- names, metrics, arguments


@table(
    "opt_in, name, present, absent",
    [
        ("", "a publish", {"messaging.operation", "messaging.message.payload_size_bytes"},
         {"messaging.operation.name"}),
        ("http", "a publish", {"messaging.operation"}, {"messaging.operation.type"}),
        ("http,messaging", "publish a", {"messaging.operation.name", "messaging.message.body.size"},
         {"messaging.operation"}),
        ("messaging/dup", "publish a", {"messaging.operation.name", "messaging.operation"}, set()),
    ],
)  # fmt: skip
def test_the_environment_chooses_names(
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
        m.on("a/+", lambda _: None).ready.result(PATIENCE)
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
    got: Recorder[Message] = Recorder()
    with messaging.connect("memory://traces-api", interceptors=[OpenTelemetryInterceptor()]) as m:
        m.on("a", got).ready.result(PATIENCE)
        m.publish("a", b"").result(PATIENCE)
        got.wait_for(1)


@table("arguments", [{"destination": "a/b"}, {"parent": 1}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        OpenTelemetryInterceptor(**arguments)

"""Functions that the library calls without awaiting them: a coroutine function is refused, a coroutine is an error."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import messaging
from messaging import ArgumentError, ConfigurationError, Message, Messaging, Promise
from messaging.dispatch import TopicPolicy
from messaging.interception import Interceptor
from messaging.leases import Landlord, LeaseRenewalManager
from messaging.observability.endpoint import check_readiness
from messaging.observability.opentelemetry import OpenTelemetryInterceptor
from messaging.remoteevent import IdempotentListener, NotificationFilter
from messaging.remoteevent.transactions.transaction import check_join
from messaging.services import ServiceRegistry
from messaging.services.reporting import PartReporter, register_reporter
from messaging.sparkplug import SparkplugDecoder
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from messaging.typedevent import TypedEventBus
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import *  # noqa: F403
from tests.doubles.fixtures import Connect
from tests.gateway.pipeline.kit import pipeline


async def work(*_: object) -> None:
    """A coroutine function where none is awaited."""


async def steps(*_: object) -> Any:
    """An asynchronous generator function."""
    yield None


def generator(*_: object) -> Any:
    yield None


class Awaited:
    """An object whose call is a coroutine function."""

    async def __call__(self, *_: object) -> None:
        pass


class AsyncObserver:
    async def on_next(self, _: object) -> None:
        pass

    def on_error(self, _: Exception) -> None:
        pass

    def on_completed(self) -> None:
        pass


class AsyncPublish(Interceptor):
    async def intercept_publish(self, outbound: Any) -> None:  # type: ignore[override]
        pass


class AsyncProcess(Interceptor):
    async def intercept_process(self, inbound: Any) -> Any:  # type: ignore[override]
        pass


def observed(m: Messaging, *callbacks: Any) -> None:
    with m.subscribe("a") as stream:
        stream.subscribe(*callbacks)


def acknowledge_builder(m: Messaging) -> Any:
    return m.acknowledge_context_builder()


def reporter(**functions: Any) -> PartReporter:
    return PartReporter("part", "x", **{"report": dict, **functions})


class AsyncReporter:
    kind = name = "x"

    def report(self) -> Any:
        return None

    async def problems(self) -> Any:
        return ()


PLACES: dict[str, Callable[[Messaging, Any], object]] = {
    "observer": lambda m, f: observed(m, f),
    "on_error": lambda m, f: observed(m, print, f),
    "on_completed": lambda m, f: observed(m, print, None, f),
    "connection state": lambda m, f: m.connection_state.subscribe(f),
    "acknowledge filter": lambda m, f: acknowledge_builder(m).filter_acknowledge(f),
    "acknowledge handler": lambda m, f: acknowledge_builder(m).handle_acknowledge(f),
    "post-acknowledge": lambda m, f: acknowledge_builder(m).post_acknowledge(f),
    "content mapper": lambda m, f: m.context_builder().content(1, f),
    "done callback": lambda m, f: m.publish("a", b"").add_done_callback(f),
    "report": lambda _, f: reporter(report=f),
    "problems": lambda _, f: reporter(problems=f),
}


EVENTS: dict[str, Callable[[Any], object]] = {
    "service listener": lambda f: ServiceRegistry().add_listener(f),
    "service factory": lambda f: ServiceRegistry().register("x", f, scope="prototype"),
    "permission listener": lambda f: TopicPolicy().on_change(f),
    "event predicate": lambda f: NotificationFilter(f, print),
    "on_missed": lambda f: IdempotentListener(print, on_missed=f),
    "rebirth request": lambda f: SparkplugDecoder(f),
    "trace destination": lambda f: OpenTelemetryInterceptor(destination=f),
    "participant": lambda f: check_join(SimpleNamespace(prepare=print, commit=f, abort=print), "name", 0),
    "lease listener": lambda f: renewed(f),
    "event monitor": lambda f: monitored(f),
}


def renewed(function: Any) -> None:
    landlord = Landlord("x")
    lease = landlord.grant(10.0)
    LeaseRenewalManager().renew_for(lease, 10.0, listener=SimpleNamespace(notify=function))


def monitored(function: Any) -> None:
    with TypedEventBus(ServiceRegistry()) as bus:
        bus.monitor.monitor_events().subscribe(function)


@table("place", EVENTS)
def test_event_services_refuse_coroutine_functions_that_they_would_not_await(place: Any) -> None:
    for function in (work, steps, Awaited(), generator):
        with pytest.raises(ArgumentError, match=r"coroutine function|generator function"):
            place(function)


@table("path", ["tests.errors.test_checks:work", "tests.errors.test_checks:steps"])
def test_a_gateway_refuses_a_call_of_a_coroutine_function(path: str) -> None:
    with pytest.raises(ConfigurationError, match="coroutine function"):
        pipeline(transform=[{"call": path}])


def test_a_service_listener_that_returns_a_coroutine_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    services = ServiceRegistry()
    services.add_listener(lambda _: work())
    services.register("x", object())
    assert "a service listener returned a coroutine" in caplog.text


@table("place", PLACES)
def test_a_coroutine_function_is_refused_when_it_is_registered(connect: Connect, place: Any) -> None:
    with connect() as m:
        for function in (work, steps, Awaited(), generator):
            with pytest.raises(ArgumentError, match=r"coroutine function|generator function"):
                place(m, function)
        m.close()


def test_objects_with_coroutine_methods_are_refused(connect: Connect, registry: ServiceRegistry) -> None:
    with connect() as m, m.subscribe("a") as stream, pytest.raises(ArgumentError, match=r"AsyncObserver\.on_next"):
        stream.subscribe(AsyncObserver())  # type: ignore[arg-type]
    for interceptor in (AsyncPublish(), AsyncProcess()):
        with pytest.raises(ArgumentError, match="coroutine function"):
            messaging.connect("memory://functions", interceptors=[interceptor], services=registry)
    with pytest.raises(ArgumentError, match="coroutine function"):
        register_reporter(registry, AsyncReporter())  # type: ignore[arg-type]


def test_a_registered_interceptor_with_coroutine_methods_is_reported_and_skipped(
    connect: Connect, registry: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.register(Interceptor, AsyncPublish())
    connect().publish("a", b"1").result(PATIENCE)
    assert "is skipped as Interceptor: intercept_publish of AsyncPublish must be a plain function" in caplog.text


def test_a_message_whose_observer_returns_a_coroutine_is_not_acknowledged(broker: FakeBroker, connect: Connect) -> None:
    ended: Recorder[Message] = Recorder()
    stream = connect(broker).subscribe("a", qos=1)
    stream.subscribe(lambda _: work(), ended.on_error)
    stream.ready.result(PATIENCE)
    tokens = broker.deliver(b"1")
    ended.wait_error()
    assert "an observer returned a coroutine, which is not awaited here" in str(ended.error)
    eventually(lambda: broker.rejected == tokens)
    assert broker.acknowledged == []


def test_an_observer_may_return_a_promise_or_a_value(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker)
    stream = m.subscribe("a", qos=1)
    stream.subscribe(lambda message: m.publish("b", message.payload))
    other = m.subscribe("c", qos=1)
    other.subscribe(lambda _: 1)
    other.ready.result(PATIENCE)
    tokens = broker.deliver(b"1", handle=0) + broker.deliver(b"2", handle=1)
    eventually(lambda: {*broker.acknowledged} == {*tokens})


@table("place", ["filter", "handler", "post"])
def test_a_direct_acknowledgement_that_returns_a_coroutine_accepts_nothing(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    m = connect(broker)
    builder = m.acknowledge_context_builder()
    call = {
        "filter": builder.filter_acknowledge,
        "handler": builder.handle_acknowledge,
        "post": builder.post_acknowledge,
    }
    call[place](lambda _: work())
    if place == "post":
        builder.filter_acknowledge(lambda _: True)
    stream = m.subscription.subscribe(builder.message_context_builder().channel("a").build_context())
    stream.ready.result(PATIENCE)
    seen: Recorder[Message] = Recorder()
    stream.subscribe(seen)
    tokens = broker.deliver(b"1")
    eventually(lambda: "returned a coroutine" in caplog.text)
    if place != "post":
        eventually(lambda: broker.rejected == tokens)
        assert broker.acknowledged == []


def test_a_done_callback_that_returns_a_coroutine_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    promise: Promise[None] = Promise("work")
    promise.add_done_callback(lambda _: work())
    promise.resolve(None)
    eventually(lambda: "a done callback returned a coroutine" in caplog.text)


def test_a_health_check_that_returns_a_coroutine_is_a_problem(registry: ServiceRegistry) -> None:
    register_reporter(registry, reporter(problems=lambda: work()))
    health = check_readiness(registry)
    assert not health.is_right
    assert "cannot be read" in health.problems[0]


def test_a_task_is_work_that_goes_on_by_itself(connect: Connect) -> None:
    """An observer on a worker thread may hand work to a loop."""

    async def program() -> list[bytes]:
        loop, done = asyncio.get_running_loop(), asyncio.Queue[bytes]()
        async with connect() as m, m.subscribe("a") as stream:
            stream.subscribe(lambda message: asyncio.run_coroutine_threadsafe(done.put(message.payload), loop))
            await stream.ready
            await m.publish("a", b"1")
            return [await done.get()]

    assert asyncio.run(program()) == [b"1"]


@table("function", [work, steps, print, lambda value: value, functools.partial(work), Recorder[Any]().on_next])
def test_a_function_where_a_model_is_expected_is_refused(connect: Connect, function: Any) -> None:
    """Pydantic would call it with the payload as its arguments: it is an observer or a handler at the wrong place."""
    m = connect()
    for call in (
        lambda: m.subscribe("a", function),
        lambda: m.on("a", print, model=function),
        lambda: m.request("a", b"", function),
        lambda: m.request_many("a", b"", function),
    ):
        with pytest.raises(ArgumentError, match=r"is no type pydantic can validate.*it is a function"):
            call()

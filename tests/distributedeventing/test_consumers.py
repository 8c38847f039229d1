"""Consumers: interfaces, types, back-pressure, bounds (RFC 214 5.2.1). Numbers are those of the scenarios."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from messaging.dispatch import Tolerance
from messaging.distributedeventing import (
    DistributableEventConsumer,
    DistributedEventAdmin,
    PushEvent,
    PushEventConsumer,
)
from messaging.errors import EventQueueOverflowError
from messaging.services import ServiceReference, ServiceRegistry
from messaging.services.registry import Scope
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.distributedeventing.conftest import (
    Admins,
    Consumer,
    Failing,
    Gate,
    Pair,
    Prototype,
    consume,
    flush,
    logged,
    named,
    record,
)
from tests.threads import Loop


@dataclass
class Order:
    id: int


class Checked(BaseModel):
    id: int


def test_09_the_interface_decides_between_payload_and_whole_event(admin: DistributedEventAdmin) -> None:
    plain, whole, both = record(admin), record(admin, is_whole=True), Consumer()
    admin.services.register((PushEventConsumer, DistributableEventConsumer), both, named("**"))
    admin.publish_event("a", 1)
    flush(admin)
    assert plain.values == [1]
    assert [each.data for each in whole.values] == [each.data for each in both.values] == [1]


def test_10_payloads_are_converted_and_a_failure_is_logged(
    admin: DistributedEventAdmin, checked: pytest.LogCaptureFixture
) -> None:
    typed, plain = {each: record(admin, type=each) for each in (Order, Checked)}, record(admin)
    for payload in ({"id": 1}, {"id": "no number"}, Order(3)):
        admin.publish_event("a", payload)
    flush(admin)
    for type_, recorder in typed.items():
        assert recorder.values == [type_(id=1), type_(id=3)]
    assert len(plain.values) == 3
    assert len(logged(checked, "skipped")) == len(typed)


def test_10_payloads_of_another_process_are_converted(pair: Pair) -> None:
    typed, plain = {each: record(pair.other, "a", type=each) for each in (Order, Checked)}, record(pair.other, "a")
    pair.announce()
    for payload in (Order(1), Checked(id=2), {"id": 3}):
        pair.one.publish_event("a", payload)
    for type_, recorder in typed.items():
        eventually(lambda: recorder.values == [type_(id=1), type_(id=2), type_(id=3)])  # noqa: B023
    eventually(lambda: plain.values == [{"id": 1}, {"id": 2}, {"id": 3}])


def test_11_a_lazy_consumer_is_made_for_its_first_event(admin: DistributedEventAdmin) -> None:
    prototype = Prototype()
    consume(admin, prototype, "a", scope="prototype", lifecycle="UNIFIED")
    admin.publish_event("b", 0)
    flush(admin)
    assert prototype.made == []
    admin.publish_event("a", 1)
    admin.publish_event("a", 2)
    flush(admin)
    assert [each.values for each in prototype.made] == [[1, 2]]


@table("answer", [-1, PushEventConsumer.ABORT, -0.5])
def test_12_a_negative_answer_ends_delivery_for_good(admin: DistributedEventAdmin, answer: float) -> None:
    other = record(admin)
    recorder = Consumer(answer)
    consume(admin, recorder, "a")
    for number in range(3):
        admin.publish_event_with_notification("a", number).result(PATIENCE)
    assert recorder.values == [0]
    assert other.values == [0, 1, 2]


def test_13_a_positive_answer_delays_the_next_event_and_keeps_the_order(admin: DistributedEventAdmin) -> None:
    recorder = Consumer(200)
    consume(admin, recorder)
    for number in range(4):
        admin.publish_event("a", number)
    eventually(lambda: len(recorder.values) == 4)
    assert recorder.values == [0, 1, 2, 3]
    gaps = [later - earlier for earlier, later in zip(recorder.times, recorder.times[1:], strict=False)]
    assert min(gaps) >= 0.199


@table("answer", [0, None, PushEventConsumer.CONTINUE, "junk", True])
def test_14_no_delay_is_asked_for_with_zero(admin: DistributedEventAdmin, answer: Any) -> None:
    recorder = Consumer(answer)
    consume(admin, recorder)
    for number in range(100):
        admin.publish_event("a", number)
    flush(admin)
    assert recorder.values == list(range(100))


def test_15_a_full_queue_ends_with_one_error_event(admins: Admins) -> None:
    admin = admins(queue_limit=5)
    gate, other = Gate(), record(admin)
    registration = consume(admin, gate)
    admin.publish_event("a", 0)
    gate.events.wait_for(1)
    for number in range(1, 8):
        admin.publish_event_with_notification("b", number)
        other.events.wait_for(number + 1)
    gate.opened.set()
    gate.events.wait_for(2)
    registration.update(named("**"))
    admin.publish_event_with_notification("a", 9).result(PATIENCE)
    assert gate.values == [0]
    assert isinstance(gate.failures[0], EventQueueOverflowError)
    assert gate.kinds == ["data", "error"]
    assert len(other.values) == 9


@table("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt()])
def test_16_an_exception_discards_its_consumer_and_is_logged(
    admin: DistributedEventAdmin, checked: pytest.LogCaptureFixture, error: BaseException
) -> None:
    failing = Failing(error)
    consume(admin, failing, ranking=1)
    other = record(admin)
    for number in range(3):
        admin.publish_event_with_notification("a", number).result(PATIENCE)
    assert failing.values == [0]
    assert other.values == [0, 1, 2]
    assert logged(checked, "failed on an event", type(error).__name__)


def test_17_a_discarded_consumer_stays_so_until_it_is_registered_anew(admin: DistributedEventAdmin) -> None:
    recorder = Consumer(-1)
    registration = consume(admin, recorder)
    admin.publish_event_with_notification("a", 1).result(PATIENCE)
    registration.update(named(["a", "b"]))
    admin.publish_event_with_notification("a", 2).result(PATIENCE)
    assert recorder.values == [1]
    registration.unregister()
    consume(admin, recorder)
    admin.publish_event_with_notification("a", 3).result(PATIENCE)
    assert recorder.values == [1, 3]


def test_18_overlapping_filters_deliver_an_event_once(admin: DistributedEventAdmin) -> None:
    recorder = record(admin, ["a/b", "a/*", "a**", "**"])
    admin.publish_event("a/b", 1)
    flush(admin)
    assert recorder.values == [1]


# --- beyond the scenarios


def test_consumers_may_be_registered_before_the_admin(services: ServiceRegistry, admins: Admins) -> None:
    recorder = record(services, "a")
    admin = admins()
    admin.publish_event("a", 1)
    flush(admin)
    assert recorder.values == [1]


def test_an_update_changes_the_topics(admin: DistributedEventAdmin) -> None:
    recorder = Consumer()
    registration = consume(admin, recorder, "a")
    registration.update(named("b"))
    admin.publish_event("a", 1)
    admin.publish_event("b", 2)
    flush(admin)
    assert recorder.values == [2]


def test_a_consumer_selects_its_admin(admins: Admins) -> None:
    one, other = admins(name="one"), admins(name="other")
    recorder = record(one.services, "a", target="(event.admin.name=other)")
    one.publish_event("a", 1)
    other.publish_event("a", 2)
    flush(one)
    flush(other)
    assert recorder.values == [2]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with contextlib.closing(Loop()) as loop:
        yield loop.loop


def test_coroutines_run_on_the_loop_of_their_registration(
    admin: DistributedEventAdmin, loop: asyncio.AbstractEventLoop
) -> None:
    seen: list[Any] = []

    async def consume_one(event: PushEvent[int]) -> int:
        await asyncio.sleep(0)
        seen.append((event.value, asyncio.get_running_loop()))
        return -1 if event.value == 2 else 0

    async def register() -> None:
        admin.on("a", handler=consume_one)

    asyncio.run_coroutine_threadsafe(register(), loop).result(PATIENCE)
    for number in range(1, 4):
        admin.publish_event_with_notification("a", number).result(PATIENCE)
    assert seen == [(1, loop), (2, loop)]


def test_a_consumer_that_does_not_return_is_discarded(admins: Admins) -> None:
    admin = admins(tolerance=Tolerance(timeout=0.2, failures=0))
    gate, other = Gate(), record(admin)
    consume(admin, gate)
    promise = admin.publish_event_with_notification("a", 1, timeout=PATIENCE)
    admin.publish_event("a", 2)
    eventually(lambda: admin.get_dto().consumers and any(each.blocked for each in admin.get_dto().consumers))
    eventually(lambda: other.values == [1, 2])
    gate.opened.set()
    promise.result(PATIENCE)
    assert gate.values == [1]


@table(
    "properties",
    [
        {},
        {"event.topics": "a//b"},
        {"event.topics": "a", "event.type": "no.such.Type"},
        {"event.topics": "a", "event.lifecycle": "FOREVER"},
        {"event.topics": "a", "event.filter": "("},
        {"event.topics": "a", "event.advertised": "no"},
        {"event.topics": "a", "event.timeout": -1},
        {"event.topics": "a", "event.target": "("},
    ],
)
def test_a_consumer_with_an_invalid_property_is_ignored_and_logged(
    admin: DistributedEventAdmin, checked: pytest.LogCaptureFixture, properties: dict[str, Any]
) -> None:
    before = len(logged(checked, "is ignored"))
    admin.services.register(PushEventConsumer, Consumer(), properties)
    assert admin.get_dto().consumers == ()
    assert len(logged(checked, "is ignored")) == before + 1


def test_sessions_of_a_unified_consumer_are_not_remembered(admin: DistributedEventAdmin) -> None:
    record(admin, "a")
    for _ in range(50):
        with admin.create_session("a") as session:
            session.publish_event(1)
    flush(admin)
    ((_, consumer),) = admin.dispatcher.handlers()
    assert [len(each.active) for each in consumer.objects.all()] == [0]


def test_lifecycle_events_are_bounded(admins: Admins) -> None:
    admin = admins(queue_limit=5)
    gate = Gate()
    consume(admin, gate, "a", lifecycle="SESSION")
    admin.publish_event("a", 0)
    gate.events.wait_for(1)
    for _ in range(100):
        admin.create_session("a").close()
    gate.opened.set()
    eventually(lambda: gate.failures)
    assert gate.kinds == ["data", "error"]


def test_hidden_topics_are_not_listed(admins: Admins) -> None:
    admin = admins(unadvertised=["secret/**"])
    record(admin, "open/*")
    record(admin, "hidden/*", advertised=False)
    for topic in ("plain", "secret/a", admin.create_private_topic()):
        admin.publish_event(topic, 1)
    assert [each.topic for each in admin.topics()] == ["open/*", "plain"]


def test_a_subscription_ends_when_it_is_too_far_behind(admin: DistributedEventAdmin) -> None:
    subscription = admin.create_subscription("a", limit=2)
    for number in range(3):
        admin.publish_event_with_notification("a", number).result(PATIENCE)
    seen: Recorder[Any] = Recorder()
    subscription.subscribe(seen)
    assert isinstance(seen.wait_error(), EventQueueOverflowError)
    assert seen == [0, 1]


class Leaving(ServiceRegistry):
    """A registry whose service is unregistered at the moment when it is fetched."""

    leave: Callable[[], object]

    def get(self, reference: ServiceReference) -> Any:
        self.leave()
        return super().get(reference)


@table("scope", ["singleton", "prototype"])
def test_a_consumer_that_leaves_before_its_first_event_is_no_failure(
    admins: Admins, caplog: pytest.LogCaptureFixture, scope: Scope
) -> None:
    services, consumer = Leaving(), Consumer()
    admin = admins(services)
    service: Any = (lambda: consumer) if scope == "prototype" else consumer
    registration = services.register(PushEventConsumer, service, {"event.topics": ["a"]}, scope=scope)
    services.leave = registration.unregister
    admin.publish_event_with_notification("a", 1).result(PATIENCE)
    assert consumer.values == []
    assert caplog.records == []

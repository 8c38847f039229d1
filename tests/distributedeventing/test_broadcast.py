"""Simple broadcast: events of the default session (RFC 214 5.1.1). Numbers are those of the scenarios."""

from __future__ import annotations

import threading
from typing import Any
from uuid import uuid4

import pytest

from messaging.dispatch import DISTRIBUTED_EVENTS, TopicPermission, TopicPolicy
from messaging.dispatch.eventnetwork import framework_uuid
from messaging.distributedeventing import DistributableEvent, DistributedEventAdmin, PushEvent
from messaging.errors import (
    ArgumentError,
    ClosedError,
    InvalidTopicError,
    NullEventError,
    PermissionDeniedError,
)
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.distributedeventing.conftest import (
    Admins,
    Consumer,
    Gate,
    Pair,
    consume,
    flush,
    logged,
    record,
)
from tests.threads import in_background, in_threads

#: texts that are no topics, and topic filters
NO_TOPICS = [
    "", "/", "/a", "a/", "a//b", "a b", "a.b", "ä", "a\n", "a-b", ".", ".a+b", ".#", ".a*", ".a\n", "*", "**", "a/*",
    "a*",
]  # fmt: skip


def test_01_every_matching_consumer_gets_a_data_event_and_the_call_does_not_wait(admin: DistributedEventAdmin) -> None:
    gate = Gate()
    consume(admin, gate, "orders/placed")
    recorder, other = record(admin, "orders/*"), record(admin, "refunds/*")
    admin.publish_event("orders/placed", {"id": 1})
    gate.events.wait_for(1)
    admin.publish_event("orders/placed", {"id": 2})  # the consumer of the first one has not returned
    assert gate.values == [{"id": 1}]
    eventually(lambda: len(recorder.values) == 2)
    gate.opened.set()
    flush(admin)
    assert gate.values == recorder.values == [{"id": 1}, {"id": 2}]
    assert set(recorder.kinds) == {"data"}
    assert other.events == []
    assert threading.get_ident() not in recorder.threads


@table("event", [PushEvent.close(), PushEvent.error(ValueError("x"))])
def test_02_close_and_error_events_are_refused_and_consumers_see_nothing(
    admin: DistributedEventAdmin, event: PushEvent[Any]
) -> None:
    recorder = record(admin, lifecycle="SESSION")
    for publish in (admin.publish_event, admin.publish_event_with_notification):
        with pytest.raises(ArgumentError, match="session"):
            publish("a", event)
    flush(admin)
    assert recorder.events == []


def test_a_data_event_stands_for_its_value(admin: DistributedEventAdmin) -> None:
    recorder = record(admin)
    admin.publish_event("a", PushEvent.data(7))
    flush(admin)
    assert recorder.values == [7]


@table("topic", NO_TOPICS)
def test_03_a_text_that_is_no_topic_is_refused_by_every_way_to_publish(
    admin: DistributedEventAdmin, topic: str
) -> None:
    recorder = record(admin)
    calls = [
        lambda: admin.publish_event(topic, 1),
        lambda: admin.publish_event_with_notification(topic, 1),
        lambda: admin.create_session(topic),
        lambda: admin.publish(DistributableEvent(topic, data=1)),
    ]
    for call in calls:
        with pytest.raises(InvalidTopicError) as raised:
            call()
        assert isinstance(raised.value, ArgumentError)
    flush(admin)
    assert recorder.events == []


@table("topic", [None, 7, b"a", ["a"], object()])
def test_03_a_topic_that_is_no_text_is_refused(admin: DistributedEventAdmin, topic: Any) -> None:
    with pytest.raises(ArgumentError):
        admin.publish_event(topic, 1)


def test_04_the_correlation_id_is_on_the_event_or_none(admin: DistributedEventAdmin) -> None:
    recorder = record(admin, is_whole=True)
    admin.publish_event("a", 1, correlation_id="c1")
    admin.publish_event("a", "c2", 2)  # the order of the RFC
    admin.publish_event("a", 3)
    flush(admin)
    assert [(each.correlation_id, each.data) for each in recorder.values] == [("c1", 1), ("c2", 2), (None, 3)]


def test_05_without_reply_handler_there_is_no_reply_topic(admin: DistributedEventAdmin) -> None:
    recorder = record(admin, is_whole=True)
    admin.publish_event("a", 1)
    with admin.create_session("a") as session:
        session.publish_event(2)
        assert session.reply_to is None
    flush(admin)
    assert [each.reply_to for each in recorder.values] == [None, None]


def test_06_an_event_names_the_framework_and_the_bundle_of_its_sender(admins: Admins) -> None:
    admin = admins(bundle=12)
    recorder = record(admin, is_whole=True)
    admin.publish_event("a", 1)
    with admin.create_session("a") as session:
        session.publish_event(2)
    flush(admin)
    assert {(each.originating_framework, each.originating_bundle) for each in recorder.values} == {
        (framework_uuid(), 12)
    }


def test_06_07_the_sender_of_an_event_crosses_the_network(pair: Pair) -> None:
    recorder = record(pair.other, is_whole=True)
    pair.announce()
    framework = uuid4()
    given = DistributableEvent("a/b", 3, framework, ".reply", "c", {"id": 1})
    pair.one.publish(given)
    pair.one.publish_event("a/b", {"id": 2})
    pair.one.publish(DistributableEvent("a/b", data={"id": 3}))
    eventually(lambda: len(recorder.values) == 3)
    found = [
        (each.topic, each.originating_bundle, each.originating_framework, each.reply_to, each.correlation_id, each.data)
        for each in recorder.values
    ]
    assert found == [
        ("a/b", 3, framework, ".reply", "c", {"id": 1}),
        ("a/b", 0, framework_uuid(), None, None, {"id": 2}),
        ("a/b", None, None, None, None, {"id": 3}),
    ]


def test_07_an_event_that_the_caller_prepared_is_sent_as_given(admin: DistributedEventAdmin) -> None:
    whole, plain = record(admin, is_whole=True), record(admin)
    given = DistributableEvent("a/b", 3, uuid4(), ".reply", "c", [1])
    admin.publish(given)
    admin.publish_with_notification(given).result(PATIENCE)
    for found in whole.values:
        assert (found.topic, found.originating_bundle, found.originating_framework) == (
            given.topic,
            given.originating_bundle,
            given.originating_framework,
        )
        assert (found.reply_to, found.correlation_id, found.data) == (".reply", "c", [1])
    assert plain.values == [[1], [1]]


@table(
    "arguments",
    [
        {"topic": "a*"},
        {"topic": None},
        {"topic": "a", "originating_bundle": -1},
        {"topic": "a", "originating_bundle": True},
        {"topic": "a", "originating_framework": "1c0e"},
        {"topic": "a", "reply_to": "a/*"},
        {"topic": "a", "correlation_id": 7},
    ],
)
def test_an_event_with_an_invalid_field_cannot_be_made(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        DistributableEvent(**arguments)


def test_08_consumers_see_one_stream_of_several_sources(admin: DistributedEventAdmin) -> None:
    recorder = record(admin, "a")
    with admin.create_session("a") as one, admin.create_session("a") as other:
        admin.publish_event("a", 0)
        one.publish_event(1)
        other.publish_event(2)
        one.publish_event(3)
    admin.publish_event("a", 4)
    flush(admin)
    assert recorder.values == [0, 1, 2, 3, 4]
    assert set(recorder.kinds) == {"data"}


# --- beyond the scenarios


@table("payload", [None, PushEvent.data(None)])
def test_no_payload_is_refused(admin: DistributedEventAdmin, payload: Any) -> None:
    with pytest.raises(NullEventError):
        admin.publish_event("a", payload)
    with admin.create_session("a") as session, pytest.raises(NullEventError):
        session.publish_event(payload)
    with pytest.raises(NullEventError):
        admin.publish(DistributableEvent("a"))


@table(
    "call",
    [
        lambda admin: admin.publish_event("a", 1, correlation_id=7),
        lambda admin: admin.publish_event("a", "c", 1, "more"),
        lambda admin: admin.publish_event("a", "c", 1, correlation_id="d"),
        lambda admin: admin.publish_event("a", 1, qos=7),
        lambda admin: admin.publish_event("a", 1, qos=[7]),
        lambda admin: admin.publish_event("a", 1, principal=7),
        lambda admin: admin.publish("a"),
        lambda admin: admin.publish_with_notification(None),
        lambda admin: admin.publish_event_with_notification("a", 1, timeout="soon"),
        lambda admin: admin.create_session("a", "int"),
        lambda admin: admin.create_session("a", None, 7),
        lambda admin: admin.create_session("a", None, None, int),
        lambda admin: admin.create_subscription("a", limit=0),
        lambda admin: admin.create_subscription(None),
        lambda admin: admin.on(handler=print),
        lambda admin: admin.on("a", handler=7),
        lambda admin: admin.on("a", handler=print, filter="("),
        lambda admin: admin.on("a", handler=print, is_advertised=1),
        lambda admin: admin.on("a", handler=print, timeout=-1),
        lambda admin: admin.on("a", handler=print, type=7),
    ],
)
def test_junk_is_refused_with_an_error_of_this_project(admin: DistributedEventAdmin, call: Any) -> None:
    with pytest.raises(ArgumentError):
        call(admin)
    assert admin.get_dto().consumers == ()
    assert admin.get_dto().sessions == 0


@table(
    "options",
    [
        {"name": ""},
        {"queue_limit": 0},
        {"threads": 0},
        {"bundle": -1},
        {"notification_timeout": "x"},
        {"unadvertised": 7},
        {"unadvertised": ["a//b"]},
        {"qos": 7},
        {"proprietary_qos": [""]},
        {"instance": object()},
        {"network": object()},
        {"inbound": object()},
        {"permissions": object()},
        {"tolerance": 1},
    ],
)
def test_an_admin_with_junk_cannot_be_made_and_registers_nothing(
    services: ServiceRegistry, options: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError):
        DistributedEventAdmin(services, **options)
    assert services.find(DistributedEventAdmin) == []


def test_a_consumer_may_publish(admin: DistributedEventAdmin) -> None:
    recorder = record(admin, "b")

    @admin.on("a")
    def again(event: PushEvent[int]) -> None:
        if event.value < 5:
            admin.publish_event("a", event.value + 1)
        admin.publish_event("b", event.value)

    admin.publish_event("a", 0)
    eventually(lambda: recorder.values == [0, 1, 2, 3, 4, 5])


def test_events_of_many_threads_arrive_once_and_in_the_order_of_each(admins: Admins) -> None:
    admin = admins(queue_limit=10_000)
    recorders = [record(admin, "**") for _ in range(3)]
    in_threads(6, lambda thread: [admin.publish_event(f"t{thread}/n{n % 3}", (thread, n)) for n in range(300)])
    flush(admin)
    for recorder in recorders:
        assert len(recorder.values) == 1800
        for thread in range(6):
            assert [n for one, n in recorder.values if one == thread] == list(range(300))


def test_consumers_come_and_go_while_events_are_published(admin: DistributedEventAdmin) -> None:
    stays = record(admin, "a")
    stop = threading.Event()
    count = 0

    def publish() -> None:
        nonlocal count
        while not stop.is_set():
            admin.publish_event_with_notification("a", count).result(PATIENCE)
            count += 1

    join = in_background(publish)
    try:
        for _ in range(100):
            with consume(admin, Consumer(), "a"):
                pass
    finally:
        stop.set()
        join()
    flush(admin)
    assert stays.values == list(range(count))


def test_publishing_after_close_is_refused(admins: Admins) -> None:
    admin = admins()
    admin.close()
    calls = [
        lambda: admin.publish_event("a", 1),
        lambda: admin.publish_event_with_notification("a", 1),
        lambda: admin.publish(DistributableEvent("a", data=1)),
        lambda: admin.create_session("a"),
        lambda: admin.create_subscription("a"),
        lambda: admin.on("a", handler=print),
        lambda: admin.__enter__(),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_closing_delivers_what_was_published_and_may_be_repeated(services: ServiceRegistry) -> None:
    recorder = record(services)
    with DistributedEventAdmin(services) as admin:
        for number in range(100):
            admin.publish_event("a", number)
    assert recorder.values == list(range(100))
    admin.close()
    assert services.find(DistributedEventAdmin) == []
    assert "closed" in repr(admin)


def test_a_consumer_may_close_the_admin(admins: Admins) -> None:
    admin = admins()
    recorder = record(admin)

    @admin.on("a")
    def close(_: PushEvent[int]) -> None:
        admin.close()

    admin.publish_event("a", 1)
    eventually(lambda: not admin.services.find(DistributedEventAdmin))
    eventually(lambda: recorder.values == [1])


def test_closing_in_the_middle_of_publishing_loses_nothing_that_was_accepted(services: ServiceRegistry) -> None:
    recorder = record(services)
    admin = DistributedEventAdmin(services, queue_limit=1_000_000)
    accepted: list[list[int]] = [[] for _ in range(4)]

    def publish(thread: int) -> None:
        for number in range(1_000_000):
            try:
                admin.publish_event("a", (thread, number))
            except ClosedError:
                return
            accepted[thread].append(number)

    joins = [in_background(lambda thread=thread: publish(thread)) for thread in range(4)]  # type: ignore[misc]
    eventually(lambda: len(recorder.values) > 100)
    admin.close()
    for join in joins:
        join()
    for thread in range(4):
        assert [number for one, number in recorder.values if one == thread] == accepted[thread]


def test_functions_of_a_closed_admin_are_registered_no_longer(admins: Admins) -> None:
    admin = admins()
    admin.on("a", handler=print)
    admin.create_session("a", None, print)
    admin.create_subscription("a")
    assert len(admin.services.find()) > 1
    admin.close()
    assert admin.services.find() == []


def test_permissions_decide_on_publishing_and_consuming(services: ServiceRegistry, admins: Admins) -> None:
    policy = TopicPolicy({"shop": [TopicPermission("orders/**", "publish,subscribe", DISTRIBUTED_EVENTS)]},
                         grammar=DISTRIBUTED_EVENTS)  # fmt: skip
    admin = admins(permissions=policy)
    allowed, refused = record(admin, "orders/*", principal="shop"), record(admin, "orders/*")
    admin.publish_event("orders/placed", 1, principal="shop")
    with pytest.raises(PermissionDeniedError):
        admin.publish_event("orders/placed", 1)
    with pytest.raises(PermissionDeniedError):
        admin.create_session("refunds/made", principal="shop")
    with pytest.raises(PermissionDeniedError):
        admin.create_subscription("orders/placed")
    flush(admin)
    assert allowed.values == [1]
    assert refused.values == []


class Evil:
    """An event whose field cannot be read."""

    n: int

    def __init__(self) -> None:
        self.m = 1

    @property
    def n(self) -> int:  # type: ignore[no-redef]
        raise RuntimeError("boom")


def test_a_payload_that_raises_reaches_consumers_that_do_not_look_into_it(
    admin: DistributedEventAdmin, checked: pytest.LogCaptureFixture
) -> None:
    typed = record(admin, "a", type=dict)
    filtered = record(admin, "a", filter="(n=1)")
    plain = record(admin, "a")
    admin.publish_event("a", Evil())
    admin.publish_event("a", {"n": 1})
    flush(admin)
    assert len(plain.values) == 2
    assert filtered.values == [{"n": 1}]
    assert {"n": 1} in typed.values
    assert logged(checked, "defect") == []

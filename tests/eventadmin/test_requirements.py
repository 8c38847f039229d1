"""Requirements of the RFC that no other module tests (RFC 97 4, 5, 6)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from messaging.errors import PermissionDeniedError
from messaging.eventadmin import (
    ConfigurationEvents,
    Event,
    EventAdmin,
    EventConstants,
    EventHandler,
    LogEvents,
    ServiceEvents,
    TopicPermission,
    TopicPolicy,
)
from messaging.services import LdapFilter, ServiceRegistry, interface_name
from messaging.testing.waiting import PATIENCE, eventually
from tests.eventadmin.conftest import Hub, Hubs, Recorder

# --- general requirements (4.1.1)


def test_programming_an_event_source_must_be_simple(hub: Hub) -> None:
    """RFC 97 4.1.1 [1], 5.1.4: get the service, make an event, fire it. Nothing to be tracked, or cleaned up."""
    recorder = hub.record()
    found = hub.services.service(EventAdmin)
    found.post_event(Event("com/acme/Door/OPENED", {"door": 7}))
    found.send_event(Event("com/acme/Door/CLOSED", {"door": 7}))
    hub.flush()
    assert sorted(recorder.topics) == ["com/acme/Door/CLOSED", "com/acme/Door/OPENED"]


def test_programming_an_event_handler_should_be_simple(hub: Hub) -> None:
    """RFC 97 4.1.1 [2]: a function and the topics that it is for."""
    seen: list[Event] = []
    hub.services.register(EventHandler, seen.append, {EventConstants.EVENT_TOPIC: "com/acme/*"})
    hub.admin.send_event(Event("com/acme/x"))
    assert [event.topic for event in seen] == ["com/acme/x"]


def test_an_event_handler_may_be_an_instance_of_the_interface(hub: Hub) -> None:
    """RFC 97 6.6."""

    class Door(EventHandler):
        def __init__(self) -> None:
            self.topics: list[str] = []

        def handle_event(self, event: Event) -> None:
            self.topics.append(event.topic)

    with pytest.raises(TypeError):
        EventHandler()  # type: ignore[abstract]
    door = Door()
    hub.handle(door)
    hub.admin.send_event(Event("a"))
    assert door.topics == ["a"]


def test_dependencies_must_be_cleaned_up_when_one_side_stops(hub: Hub) -> None:
    """RFC 97 4.1.1 [3]: neither a removed handler nor a closed admin has to inform the other."""
    recorder = Recorder()
    with hub.handle(recorder), ServiceEvents(hub.admin), LogEvents(hub.admin), ConfigurationEvents(hub.admin):
        hub.admin.send_event(Event("a"))
    hub.admin.send_event(Event("b"))
    assert [topic for topic in recorder.topics if "/" not in topic] == ["a"]
    assert hub.admin.get_dto().handlers == ()
    assert len(hub.admin.dispatcher._trie) == 0
    assert len(hub.services._listeners) == 1
    hub.admin.close()
    assert hub.services.find() == []
    assert not hub.services._listeners


# --- event delivery (4.1.2)


def test_the_number_of_threads_may_be_configured(hubs: Hubs) -> None:
    """RFC 97 4.1.2 [9], [10], 5.2.2: with one thread, not even handlers without order have another one."""
    gates, others = [], []
    several = [hubs(ServiceRegistry(), threads=threads) for threads in (1, 2)]
    for hub in several:
        others.append(hub.record("b", delivery="async.unordered"))
        gates.append(hub.gate(topics="a", delivery="async.unordered"))
        hub.post(1)
        gates[-1].wait()
        hub.post(2, topic="b")
    others[1].events.wait_for(1)  # on another thread, though it was posted later
    assert (others[0].events, several[0].admin.get_dto().threads) == ([], 1)
    for hub, gate, other in zip(several, gates, others, strict=True):
        gate.opened.set()
        hub.flush()
        assert other.numbers == [2]


def test_resources_should_be_minimal(hub: Hub) -> None:
    """RFC 97 4.1.5 [24], 3.2: hundreds of handlers are no reason for a thread."""
    recorders = [hub.record(delivery="async.unordered" if number % 2 else None) for number in range(300)]
    assert hub.admin.get_dto().threads == 0
    hub.admin.post_event(Event("a"))
    hub.flush()
    assert [each.topics for each in recorders] == [["a"]] * 300
    assert len({thread for each in recorders for thread in each.threads}) <= 16
    eventually(lambda: hub.admin.get_dto().threads == 0, "they are gone")


# --- notification infrastructure (4.2.1)


def test_any_object_may_be_the_value_of_a_property(hub: Hub) -> None:
    """RFC 97 4.2.1.3, 5.1.1.2: it is handed on as it is."""
    recorder = hub.record()
    values: dict[str, Any] = {"text": "x", "object": object(), "list": [1], "function": print, "none": None}
    hub.admin.send_event(Event("a", values))
    hub.admin.post_event(Event("a", values))
    hub.flush()
    for event in recorder.events:
        assert all(event.get_property(name) is value for name, value in values.items())


# --- entities (5.1)


def test_handlers_must_be_registered_as_services_under_the_interface(hub: Hub) -> None:
    """RFC 97 5.1.2: the class, or its name; handlers of other interfaces are not called."""
    by_class, by_name, other = Recorder(), Recorder(), Recorder()
    for interface, recorder in (
        (EventHandler, by_class),
        (interface_name(EventHandler), by_name),
        ("org.osgi.service.event.EventHandler", other),
        (Recorder, other),
    ):
        hub.services.register(interface, recorder, {"event.topics": "*"})
    hub.admin.send_event(Event("a"))
    assert (by_class.topics, by_name.topics, other.topics) == (["a"], ["a"], [])


# --- delivery and locks (4.1.3, 5.2)


def test_no_lock_should_be_held_while_handlers_are_called(hub: Hub) -> None:
    """Scenario 41; RFC 97 4.1.3 [18]: other threads may use dispatcher, registry, delivery threads and queue."""
    calls: list[Callable[[], object]] = [
        hub.admin.get_dto,
        lambda: hub.services.register("other", object()).unregister(),
        lambda: hub.admin.post_event(Event("other")),
        hub.admin.flush,
    ]
    free: list[bool] = []

    def handler(_: Event) -> None:
        for call in calls:
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(PATIENCE)
            free.append(not thread.is_alive())

    for delivery in ("async.ordered", "async.unordered"):
        hub.handle(handler, "a", delivery=delivery)
    hub.handle(lambda: handler, "a", scope="prototype")
    hub.admin.post_event(Event("a"))
    hub.admin.send_event(Event("a"))
    hub.flush()
    assert free == [True] * 24


def test_a_filter_is_applied_without_a_lock(hub: Hub) -> None:
    """RFC 97 4.1.3 [18]: comparing the values of properties may run code of the application."""
    free: list[bool] = []

    class Value:
        def __eq__(self, other: object) -> bool:
            thread = threading.Thread(target=hub.admin.get_dto, daemon=True)
            thread.start()
            thread.join(PATIENCE)
            free.append(not thread.is_alive())
            return True

        __hash__ = None  # type: ignore[assignment]

    class Looking(LdapFilter):
        def match_case(self, properties: Any) -> bool:
            return bool(properties["x"] == 1)

    recorder = hub.record(filter=Looking("(x=1)", case_sensitive=True))
    hub.admin.send_event(Event("a", {"x": Value()}))
    hub.admin.post_event(Event("a", {"x": Value()}))
    hub.flush()
    assert (len(recorder.events), free) == (2, [True, True])


# --- security (5.4.3)


def test_delivery_must_not_lend_handlers_any_permission(hubs: Hubs) -> None:
    """RFC 97 5.4.3: neither the permissions of the publisher, nor any of the admin's own."""
    policy = TopicPolicy(
        {
            "publisher": [TopicPermission("*", "publish")],
            "handler": [TopicPermission("*", "subscribe"), TopicPermission("own/*", "publish")],
        }
    )
    hub = hubs(permissions=policy)
    refused: list[str] = []
    recorder = hub.record(["own/*", "other/*"], principal="handler")

    def handler(event: Event) -> None:
        for principal in (None, "handler"):
            for publish in (hub.admin.post_event, hub.admin.send_event):
                for topic in ("own/x", "other/x"):
                    try:
                        publish(Event(topic), principal=principal)
                    except PermissionDeniedError:
                        refused.append(f"{principal} {topic}")

    hub.handle(handler, "start", principal="handler")
    hub.admin.send_event(Event("start"), principal="publisher")
    hub.admin.post_event(Event("start"), principal="publisher")
    hub.flush()
    hub.flush()
    assert (
        refused
        == ["None own/x", "None other/x", "None own/x", "None other/x", "handler other/x", "handler other/x"] * 2
    )
    assert recorder.topics == ["own/x"] * 4


# --- names (6.5)


def test_the_constants_are_those_of_the_specifications() -> None:
    """RFC 97 6.5, 5.1.2; the first of several is the one of later versions."""
    assert EventConstants.EVENT_TOPIC == EventConstants.EVENT_TOPIC_NAMES[0] == "event.topics"
    assert {*EventConstants.EVENT_TOPIC_NAMES} == {"event.topics", "event.topic", "topic"}
    assert EventConstants.EVENT_FILTER == EventConstants.EVENT_FILTER_NAMES[0] == "event.filter"
    assert {*EventConstants.EVENT_FILTER_NAMES} == {"event.filter", "filter"}
    assert EventConstants.EVENT_DELIVERY == "event.delivery"
    assert EventConstants.DELIVERY_ASYNC_ORDERED == "async.ordered"
    assert EventConstants.DELIVERY_ASYNC_UNORDERED == "async.unordered"

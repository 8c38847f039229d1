"""Events cross to a typed event bus, and back; nothing goes round (RFC 97 5.5)."""

from __future__ import annotations

import array
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest

from messaging.errors import ArgumentError, InvalidTopicError, NullEventError
from messaging.eventadmin import (
    Event,
    EventBridge,
    EventHandler,
    LogEvents,
    TopicPermission,
    TopicPolicy,
)
from messaging.services import ServiceRegistry
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import (
    TypedEventBus,
    UntypedEventHandler,
)
from tests.eventadmin.conftest import Evil, Hub, Hubs
from tests.threads import in_background
from tests.typedevent.conftest import Gate as BusGate
from tests.typedevent.conftest import Recorder as BusRecorder

Buses = Callable[..., TypedEventBus]


@dataclass
class Item:
    name: str
    price: float = 1.0


@dataclass
class Order:
    id: int
    items: list[Item] = field(default_factory=list)


def listen(services: ServiceRegistry, topics: Any = "*") -> BusRecorder:
    return BusRecorder().untyped(services, topics)


@pytest.fixture
def bus(services: ServiceRegistry) -> Iterator[TypedEventBus]:
    with TypedEventBus(services) as bus:
        yield bus


@pytest.fixture
def buses(services: ServiceRegistry) -> Iterator[Buses]:
    made: list[TypedEventBus] = []

    def make(services: ServiceRegistry = services, **options: Any) -> TypedEventBus:
        made.append(TypedEventBus(services, **options))
        return made[-1]

    yield make
    for each in made:
        each.close(0)


@pytest.fixture
def bridge(hub: Hub, bus: TypedEventBus) -> Iterator[EventBridge]:
    with EventBridge(hub.admin, bus) as bridge:
        yield bridge


def settle(*several: Any, rounds: int = 4) -> None:
    """Wait until no event is on its way."""
    for _ in range(rounds):
        for each in several:
            each.flush().result(PATIENCE)


# --- there


def test_events_cross_to_the_bus(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    """RFC 97 5.5: topic and properties, of posted and of sent events."""
    recorder = listen(hub.services)
    hub.admin.post_event(Event("a/b", {"x": 1}))
    hub.flush()
    hub.admin.send_event(Event("c", {"y": "z"}))
    settle(hub.admin, bus)
    assert recorder.events == [("a/b", {"x": 1}), ("c", {"y": "z"})]


@table(
    "value",
    [
        "text", "", "ü 日本 \U0001f600 \x00", 5, -(2**63), 2**80, 127, 1.5, float("inf"), True, False, "c",
        ["a", "ü"], [1, 2], [1.5], [True], ("a", "b"), [], [1, "a", None], None, b"bytes", array.array("i", [1, 2]),
        array.array("d", [1.5]), {"nested": {"deeply": [{"a": 1}]}}, [[1], [2, [3]]], {1, 2},
        MappingProxyType({"a": (1, 2)}),
    ],
    ids=repr,
)  # fmt: skip
def test_values_of_these_types_must_be_supported(hub: Hub, bus: TypedEventBus, bridge: EventBridge, value: Any) -> None:
    """Scenario 44; RFC 97 5.5: text, the eight scalar kinds, flat lists of them; and more, nested ones among it."""
    recorder = listen(hub.services)
    hub.admin.send_event(Event("a", {"value": value, "other": 1}))
    settle(bus)
    ((_, event),) = recorder.events
    expected = [*value] if isinstance(value, (tuple, array.array)) else value
    expected = {"a": [1, 2]} if isinstance(value, MappingProxyType) else expected
    assert event == {"value": expected, "other": 1}
    assert type(event["value"]) is type(expected)


class EvilMapping(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("boom")

    keys = __iter__ = items


circle: list[Any] = []
circle.append(circle)


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "object": object,
    "exception": lambda: ValueError("x"),
    "function": lambda: settle,
    "instance of a schema": lambda: Item("a"),
    "keys that are no text": lambda: {1: "a"},
    "in a list": lambda: [1, object()],
    "nested": lambda: {"a": {"b": object()}},
    "class": lambda: int,
    "raises": Evil,
    "part of itself": lambda: circle,
    "lock": threading.Lock,
    "iterator": lambda: iter([]),
}


@table("make", UNSUPPORTED)
def test_values_of_other_types_must_be_silently_discarded(
    hub: Hub, bus: TypedEventBus, bridge: EventBridge, make: Callable[[], Any]
) -> None:
    """Scenario 44; RFC 97 5.5: and the event still passes."""
    recorder = listen(hub.services)
    hub.admin.send_event(Event("a", {"before": 1, "value": make(), "after": 2}))
    settle(bus)
    assert recorder.events == [("a", {"before": 1, "after": 2})]
    assert not hub.logged()


def test_an_exception_of_a_mapping_does_not_reach_the_sender(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    recorder = listen(hub.services)
    hub.admin.send_event(Event("a", {"value": EvilMapping(), "after": 2}))
    settle(bus)
    ((_, event),) = recorder.events
    assert event["after"] == 2


def test_events_are_copied_when_they_cross(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    """RFC 97 5.1.1.2: a list that handlers on one side change stays the same on the other."""
    recorder = listen(hub.services)
    values = [1]
    hub.admin.send_event(Event("a", {"values": values, "nested": {"values": values}}))
    values.append(2)
    settle(bus)
    assert recorder.of("values") == [[1]]
    assert recorder.of("nested") == [{"values": [1]}]


def test_typed_handlers_receive_their_type_across_the_bridge(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    orders: list[Order] = []

    @bus.on("orders/*")
    def handle_order(event: Order) -> None:
        orders.append(event)

    hub.admin.send_event(Event("orders/new", {"id": "7", "items": [{"name": "a", "price": 2}], "more": 1}))
    settle(bus)
    assert orders == [Order(7, [Item("a", 2.0)])]


# --- and back


def test_typed_events_cross_as_maps(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    recorder = hub.record()
    bus.deliver(Order(7, [Item("a")]), "orders/new")
    bus.deliver_untyped("plain", {"x": {"y": [1]}})
    settle(bus, hub.admin)
    assert recorder.topics == ["orders/new", "plain"]
    assert recorder.of("id") == [7, None]
    assert recorder.of("items") == [[{"name": "a", "price": 1.0}], None]
    assert recorder.of("x") == [None, {"y": [1]}]
    for event in recorder.events:
        assert event.get_property("event.topics") == event.topic
        assert isinstance(event, Event)
    assert threading.get_ident() not in recorder.threads


def test_filters_of_the_admin_apply_to_events_that_crossed(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    recorder = hub.record("orders/*", filter="(&(id>=5)(topic=orders/new))")
    for number in (4, 5):
        bus.deliver(Order(number), "orders/new")
    settle(bus, hub.admin)
    assert recorder.of("id") == [5]


def test_the_real_topic_wins_over_fields_of_its_name(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    """Scenario 4."""
    recorder = hub.record()
    bus.deliver_untyped("a", {"topic": "b", "event.topics": "c", "x": 1})
    settle(bus, hub.admin)
    assert dict(recorder.events[0].properties) == {"event.topics": "a", "x": 1}


@dataclass
class Looping:
    x: list[Any]


def test_events_that_are_no_trees_do_not_cross(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    recorder = hub.record()
    bus.deliver(Looping(circle), "a")
    bus.deliver(Order(1), "b")
    settle(bus, hub.admin)
    assert recorder.topics == ["b"]
    assert len(hub.logged("an event on 'a' does not cross the bridge", level=logging.ERROR)) == 1


# --- order


def test_order_is_kept_both_ways(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    """RFC 97 5.2.2."""
    there, back = listen(hub.services), hub.record()
    for number in range(200):
        hub.admin.post_event(Event("to/bus", {"n": number}))
        bus.deliver_untyped("to/admin", {"n": number})
    settle(hub.admin, bus)
    for topic in ("to/bus", "to/admin"):
        assert [event["n"] for each, event in there.events if each == topic] == [*range(200)]
        assert [event.get_property("n") for event in back.events if event.topic == topic] == [*range(200)]


# --- round and round


def test_an_event_does_not_come_back(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    there, back = listen(hub.services), hub.record()
    hub.admin.post_event(Event("from/admin"))
    bus.deliver_untyped("from/bus", {})
    settle(hub.admin, bus)
    assert sorted(there.topics) == sorted(back.topics) == ["from/admin", "from/bus"]


def test_several_bridges_between_the_same_two_are_no_loop(hub: Hub, bus: TypedEventBus) -> None:
    """Each takes it there, since each is a way; wildcards that overlap within one are not two."""
    there, back = listen(hub.services), hub.record()
    with EventBridge(hub.admin, bus, ["a/*", "*", "a/b"]), EventBridge(hub.admin, bus, "a/b"):
        hub.admin.send_event(Event("a/b"))
        bus.deliver_untyped("a/b", {"x": 1})
        settle(hub.admin, bus)
    assert sorted(map(str, there.of("x"))) == ["1", "None", "None"]
    assert sorted(map(str, back.of("x"))) == ["1", "1", "None"]


@table("start", [0, 1, 2, 3])
def test_a_ring_of_two_admins_and_two_buses_is_no_loop(hubs: Hubs, buses: Buses, start: int) -> None:
    """Once at each for each way round, and it ends where it began."""
    registries = [ServiceRegistry() for _ in range(4)]
    several = [hubs(registry) for registry in registries[::2]]
    ring: list[Any] = [several[0].admin, buses(registries[1]), several[1].admin, buses(registries[3])]
    recorders: list[Any] = [several[0].record(), listen(registries[1]), several[1].record(), listen(registries[3])]
    bridges = [EventBridge(ring[a], ring[b]) for a, b in ((0, 1), (2, 1), (2, 3), (0, 3))]
    if start % 2:
        ring[start].deliver_untyped("a", {"x": 1})
    else:
        ring[start].post_event(Event("a", {"x": 1}))
    settle(*ring, rounds=8)
    counts = [len(each.events) for each in recorders]
    # both ways, they meet on the other side
    expected = [2, 2, 2, 2]
    expected[start] = 1
    assert counts == expected
    for each in bridges:
        each.close()


def test_a_chain_is_passed_from_end_to_end(hubs: Hubs, buses: Buses) -> None:
    first, bus, last = hubs(ServiceRegistry()), buses(ServiceRegistry()), hubs(ServiceRegistry())
    recorder = last.record()
    with EventBridge(first.admin, bus), EventBridge(last.admin, bus):
        first.send("a", x=[1])
        settle(first.admin, bus, last.admin)
    assert recorder.of("x") == [[1]]


def test_log_events_cross_and_do_not_come_back(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    """Scenario 51."""
    log = logging.Logger("test")  # noqa: LOG001  # its records go nowhere else
    there, back = listen(hub.services, "org/osgi/service/log/*"), hub.record("org/osgi/service/log/*")
    hub.handle(lambda event: log.error("again"), "*")
    with LogEvents(hub.admin, log):
        log.error("once", exc_info=ValueError("boom"))
        settle(hub.admin, bus)
    assert there.of("message") == back.of("message") == ["once"]
    assert there.of("exception.class") == ["builtins.ValueError"]
    assert there.of("exception") == [None]  # of no type that can cross


# --- what crosses


def test_only_the_topics_and_directions_asked_for_cross(hub: Hub, bus: TypedEventBus) -> None:
    there, back = listen(hub.services), hub.record()
    with (
        EventBridge(hub.admin, bus, ["in/*", "both"], to_bus=False),
        EventBridge(hub.admin, bus, ["out/*"], to_admin=False),
    ):
        for topic in ("in/x", "out/x", "both", "neither"):
            hub.admin.send_event(Event(topic, {"from": "admin"}))
            bus.deliver_untyped(topic, {"from": "bus"})
        settle(hub.admin, bus)
    assert [topic for topic, event in there.events if event["from"] == "admin"] == ["out/x"]
    assert [event.topic for event in back.events if event.get_property("from") == "bus"] == ["in/x", "both"]


@table(
    ("topics", "expected"),
    [
        ("a/+/c", ["a/b/c", "a/x/c"]),
        ("+", ["a", "b"]),
        ("+/b/*", ["a/b/c", "a/b/c/d"]),
        (["a/+", "a/*"], ["a/b", "a/b/c", "a/x/c", "a/b/c/d"]),
        (["a/+/c", "a/b/+"], ["a/b/c", "a/x/c"]),
    ],
)
def test_filters_may_have_single_level_wildcards(
    hub: Hub, bus: TypedEventBus, topics: Any, expected: list[str]
) -> None:
    """Which only the bus knows; both ways."""
    there, back = listen(hub.services), hub.record()
    with EventBridge(hub.admin, bus, topics):
        for topic in ("a", "a/b", "a/b/c", "a/x/c", "a/b/c/d", "b"):
            hub.admin.send_event(Event(topic, {"from": "admin"}))
            bus.deliver_untyped(topic, {"from": "bus"})
        settle(hub.admin, bus)
    assert [topic for topic, event in there.events if event["from"] == "admin"] == expected
    assert [event.topic for event in back.events if event.get_property("from") == "bus"] == expected


@table(
    ("arguments", "error"),
    [
        ({"topics": "a//b"}, InvalidTopicError),
        ({"topics": ["a", "*/b"]}, InvalidTopicError),
        ({"topics": [None]}, NullEventError),
        ({"topics": []}, ArgumentError),
        ({"to_bus": False, "to_admin": False}, ArgumentError),
        ({"principal": 5}, ArgumentError),
    ],
)
def test_a_bridge_that_cannot_be_is_refused(
    hub: Hub, bus: TypedEventBus, arguments: Any, error: type[Exception]
) -> None:
    before = hub.services.find()
    with pytest.raises(error):
        EventBridge(hub.admin, bus, **arguments)
    assert hub.services.find() == before


# --- it is no handler


def test_an_event_without_other_handlers_is_unhandled_on_the_bus(
    hub: Hub, bus: TypedEventBus, bridge: EventBridge
) -> None:
    unhandled, back = BusRecorder().unhandled(hub.services, "*"), hub.record()
    handled = listen(hub.services, "handled/*")
    bus.deliver_untyped("handled/x", {})
    bus.deliver_untyped("other", {})
    hub.admin.send_event(Event("from/admin"))
    settle(hub.admin, bus)
    assert sorted(unhandled.topics) == ["from/admin", "other"]
    assert handled.topics == ["handled/x"]
    assert sorted(back.topics) == ["from/admin", "handled/x", "other"]


def test_typed_handlers_of_the_bus_may_be_services_of_both(hub: Hub, bus: TypedEventBus, bridge: EventBridge) -> None:
    """One service with the interfaces of both gets what crosses from both."""

    class Both(BusRecorder):
        def __init__(self) -> None:
            super().__init__()
            self.of_admin: list[str] = []

        def handle_event(self, event: Event) -> None:
            self.of_admin.append(event.topic)

    both = Both()
    hub.services.register([EventHandler, UntypedEventHandler], both, {"event.topics": "*"})
    hub.admin.send_event(Event("a"))
    bus.deliver_untyped("b", {})
    settle(hub.admin, bus)
    assert sorted(both.of_admin) == sorted(both.topics) == ["a", "b"]


# --- ends


def test_a_closed_bridge_lets_nothing_cross(hub: Hub, bus: TypedEventBus) -> None:
    there, back = listen(hub.services), hub.record()
    bridge = EventBridge(hub.admin, bus)
    bridge.close()
    bridge.close()
    hub.admin.send_event(Event("a"))
    bus.deliver_untyped("b", {})
    settle(hub.admin, bus)
    assert (there.topics, back.topics) == (["b"], ["a"])
    assert len(hub.services.find(EventHandler)) == 1


@table("first", ["admin", "bus"])
def test_when_one_side_is_closed_the_bridge_closes_itself(hubs: Hubs, buses: Buses, first: str) -> None:
    hub, bus = hubs(), buses()
    EventBridge(hub.admin, bus)
    if first == "admin":
        hub.admin.close()
        bus.deliver_untyped("a", {})
        bus.flush().result(PATIENCE)
    else:
        bus.close()
        hub.admin.post_event(Event("a"))
        hub.flush()
    assert hub.services.find(EventHandler) == hub.services.find(UntypedEventHandler) == []
    assert not hub.logged()


# --- permissions


def test_permissions_count_on_both_sides(hubs: Hubs, buses: Buses) -> None:
    """RFC 97 5.4: the bridge needs those of a handler where events leave, and those of a publisher where they enter."""
    everything = [TopicPermission("*", "publish,subscribe")]
    of_admin, of_bus = TopicPolicy({None: everything}), TopicPolicy({None: everything})
    hub, bus = hubs(permissions=of_admin), buses(permissions=of_bus)
    there, back = listen(hub.services), hub.record()
    with EventBridge(hub.admin, bus, principal="bridge"):

        def publish() -> tuple[int, int]:
            hub.admin.send_event(Event("a", {"from": "admin"}))
            bus.deliver_untyped("a", {"from": "bus"})
            settle(hub.admin, bus)
            found = there.of("from").count("admin"), back.of("from").count("bus")
            there.events.clear()
            back.events.clear()
            return found

        assert publish() == (0, 0)
        of_admin.grant("bridge", TopicPermission("*", "subscribe"))
        assert publish() == (0, 0)
        assert len(hub.logged("does not cross the bridge", "'bridge' may not publish 'a'")) == 1
        of_bus.grant("bridge", TopicPermission("a", "publish"))
        assert publish() == (1, 0)
        of_bus.grant("bridge", TopicPermission("*", "subscribe"))
        of_admin.grant("bridge", TopicPermission("*", "publish"))
        assert publish() == (1, 1)


# --- flooding


def test_a_bus_that_is_behind_slows_down_senders(hub: Hub, bus: TypedEventBus) -> None:
    """Scenario 42: across the bridge, too."""
    gate = BusGate().untyped(hub.services, "*")
    (lane,) = bus.lifecycle.lanes()
    lane._room.limit = 5
    sent: waiting.Recorder[int] = waiting.Recorder()

    def send() -> None:
        for number in range(20):
            hub.send_number(number)
            sent.append(number)

    with EventBridge(hub.admin, bus):
        join = in_background(send)
        gate.wait()
        sent.wait_for(5)
        eventually(lambda: lane._room.is_awaited, "it waits for room")
        assert len(sent) <= 7
        gate.opened.set()
        join()
        settle(hub.admin, bus)

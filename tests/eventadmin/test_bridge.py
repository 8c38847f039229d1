"""Events cross to a typed event bus, and back; nothing goes round (RFC 97 5.5)."""

from __future__ import annotations

import array
import contextlib
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


def settle(*several: Any, rounds: int = 4) -> None:
    """Wait until no event is on its way."""
    for _ in range(rounds):
        for each in several:
            each.flush().result(PATIENCE)


@dataclass
class Sides:
    """An Event Admin and a typed event bus, with a handler of all events on each side."""

    hub: Hub
    bus: TypedEventBus

    def __post_init__(self) -> None:
        self.there, self.back = listen(self.hub.services), self.hub.record()

    def send(self, topic: str, **properties: Any) -> None:
        """Send an event by the admin, and wait until it has crossed."""
        self.hub.send(topic, **properties)
        self.settle()

    def deliver(self, topic: str, event: Any) -> None:
        """Publish an event on the bus, and wait until it has crossed."""
        self.bus.deliver(event, topic)
        self.settle()

    def publish(self, *topics: str) -> None:
        """Publish an event to each topic on both sides, and wait until they have crossed."""
        for topic in topics:
            self.hub.send(topic, **{"from": "admin"})
            self.bus.deliver_untyped(topic, {"from": "bus"})
        self.settle()

    def settle(self) -> None:
        settle(self.hub.admin, self.bus)

    def crossed(self) -> tuple[list[str], list[str]]:
        """Return the topics of the events that ``publish`` published and that crossed: to the bus, and to the admin."""
        return (
            [topic for topic, event in self.there.events if event["from"] == "admin"],
            [event.topic for event in self.back.events if event.get_property("from") == "bus"],
        )


@pytest.fixture
def buses(services: ServiceRegistry) -> Iterator[Buses]:
    with contextlib.ExitStack() as stack:

        def make(services: ServiceRegistry = services, **options: Any) -> TypedEventBus:
            return stack.enter_context(TypedEventBus(services, **options))

        yield make


@pytest.fixture
def sides(hub: Hub, buses: Buses) -> Sides:
    """Two sides without a bridge."""
    return Sides(hub, buses())


@pytest.fixture
def bridged(sides: Sides) -> Iterator[Sides]:
    """Two sides with a bridge."""
    with EventBridge(sides.hub.admin, sides.bus):
        yield sides


# --- there


def test_events_cross_to_the_bus(bridged: Sides) -> None:
    """RFC 97 5.5: topic and properties, of posted and of sent events."""
    bridged.hub.deliver(1, topic="a/b")
    bridged.send("c", y="z")
    assert bridged.there.events == [("a/b", {"n": 1}), ("c", {"y": "z"})]


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
def test_values_of_these_types_must_be_supported(bridged: Sides, value: Any) -> None:
    """Scenario 44; RFC 97 5.5: text, the eight scalar kinds, flat lists of them; and more, nested ones among it."""
    bridged.send("a", value=value, other=1)
    event = bridged.there.data[-1]
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
def test_values_of_other_types_must_be_silently_discarded(bridged: Sides, make: Callable[[], Any]) -> None:
    """Scenario 44; RFC 97 5.5: and the event still passes."""
    bridged.send("a", before=1, value=make(), after=2)
    assert bridged.there.events[-1] == ("a", {"before": 1, "after": 2})
    assert not bridged.hub.logged()


def test_an_exception_of_a_mapping_does_not_reach_the_sender(bridged: Sides) -> None:
    bridged.send("a", value=EvilMapping(), after=2)
    assert bridged.there.of("after") == [2]


def test_events_are_copied_when_they_cross(bridged: Sides) -> None:
    """RFC 97 5.1.1.2: a list that handlers on one side change stays the same on the other."""
    values = [1]
    bridged.hub.send("a", values=values, nested={"values": values})
    values.append(2)
    bridged.settle()
    assert bridged.there.data == [{"values": [1], "nested": {"values": [1]}}]


def test_typed_handlers_receive_their_type_across_the_bridge(bridged: Sides) -> None:
    orders: list[Order] = []
    bridged.bus.on("orders/*", handler=orders.append, type=Order)
    bridged.send("orders/new", id="7", items=[{"name": "a", "price": 2}], more=1)
    assert orders == [Order(7, [Item("a", 2.0)])]


# --- and back


def test_typed_events_cross_as_maps(bridged: Sides) -> None:
    bridged.bus.deliver(Order(7, [Item("a")]), "orders/new")
    bridged.deliver("plain", {"x": {"y": [1]}})
    recorder = bridged.back
    assert recorder.topics == recorder.of("event.topics") == ["orders/new", "plain"]
    assert recorder.of("id") == [7, None]
    assert recorder.of("items") == [[{"name": "a", "price": 1.0}], None]
    assert recorder.of("x") == [None, {"y": [1]}]
    assert all(isinstance(event, Event) for event in recorder.events)
    assert threading.get_ident() not in recorder.threads


def test_filters_of_the_admin_apply_to_events_that_crossed(bridged: Sides) -> None:
    recorder = bridged.hub.record("orders/*", filter="(&(id>=5)(topic=orders/new))")
    for number in (4, 5):
        bridged.deliver("orders/new", Order(number))
    assert recorder.of("id") == [5]


def test_the_real_topic_wins_over_fields_of_its_name(bridged: Sides) -> None:
    """Scenario 4."""
    bridged.deliver("a", {"topic": "b", "event.topics": "c", "x": 1})
    assert dict(bridged.back.events[0].properties) == {"event.topics": "a", "x": 1}


@dataclass
class Looping:
    x: list[Any]


def test_events_that_are_no_trees_do_not_cross(bridged: Sides) -> None:
    bridged.bus.deliver(Looping(circle), "a")
    bridged.deliver("b", Order(1))
    assert bridged.back.topics == ["b"]
    assert len(bridged.hub.logged("an event on 'a' does not cross the bridge", level=logging.ERROR)) == 1


# --- order


def test_order_is_kept_both_ways(bridged: Sides) -> None:
    """RFC 97 5.2.2."""
    for number in range(200):
        bridged.hub.post(number, topic="to/bus")
        bridged.bus.deliver_untyped("to/admin", {"n": number})
    bridged.settle()
    for topic in ("to/bus", "to/admin"):
        assert [event["n"] for each, event in bridged.there.events if each == topic] == [*range(200)]
        assert [event.get_property("n") for event in bridged.back.events if event.topic == topic] == [*range(200)]


# --- round and round


def test_an_event_does_not_come_back(bridged: Sides) -> None:
    bridged.hub.admin.post_event(Event("from/admin"))
    bridged.deliver("from/bus", {})
    assert sorted(bridged.there.topics) == sorted(bridged.back.topics) == ["from/admin", "from/bus"]


def test_several_bridges_between_the_same_two_are_no_loop(sides: Sides) -> None:
    """Each takes it there, since each is a way; wildcards that overlap within one are not two."""
    admin, bus = sides.hub.admin, sides.bus
    with EventBridge(admin, bus, ["a/*", "*", "a/b"]), EventBridge(admin, bus, "a/b"):
        sides.hub.send("a/b")
        sides.deliver("a/b", {"x": 1})
    assert sorted(map(str, sides.there.of("x"))) == ["1", "None", "None"]
    assert sorted(map(str, sides.back.of("x"))) == ["1", "1", "None"]


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


def test_log_events_cross_and_do_not_come_back(bridged: Sides) -> None:
    """Scenario 51."""
    log = logging.Logger("test")  # noqa: LOG001  # its records go nowhere else
    there, back = listen(bridged.hub.services, "org/osgi/service/log/*"), bridged.hub.record("org/osgi/service/log/*")
    bridged.hub.handle(lambda event: log.error("again"), "*")
    with LogEvents(bridged.hub.admin, log):
        log.error("once", exc_info=ValueError("boom"))
        bridged.settle()
    assert there.of("message") == back.of("message") == ["once"]
    assert there.of("exception.class") == ["builtins.ValueError"]
    assert there.of("exception") == [None]  # of no type that can cross


# --- what crosses


def test_only_the_topics_and_directions_asked_for_cross(sides: Sides) -> None:
    with (
        EventBridge(sides.hub.admin, sides.bus, ["in/*", "both"], to_bus=False),
        EventBridge(sides.hub.admin, sides.bus, ["out/*"], to_admin=False),
    ):
        sides.publish("in/x", "out/x", "both", "neither")
    assert sides.crossed() == (["out/x"], ["in/x", "both"])


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
def test_filters_may_have_single_level_wildcards(sides: Sides, topics: Any, expected: list[str]) -> None:
    """Which only the bus knows; both ways."""
    for recorder in (sides.there, sides.back):
        recorder.events.clear()
    with EventBridge(sides.hub.admin, sides.bus, topics):
        sides.publish("a", "a/b", "a/b/c", "a/x/c", "a/b/c/d", "b")
    assert sides.crossed() == (expected, expected)


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
def test_a_bridge_that_cannot_be_is_refused(sides: Sides, arguments: Any, error: type[Exception]) -> None:
    before = sides.hub.services.find()
    with pytest.raises(error):
        EventBridge(sides.hub.admin, sides.bus, **arguments)
    assert sides.hub.services.find() == before


# --- it is no handler


def test_an_event_without_other_handlers_is_unhandled_on_the_bus(bridged: Sides) -> None:
    bridged.there.registration.unregister()
    unhandled, handled = BusRecorder().unhandled(bridged.hub.services, "*"), listen(bridged.hub.services, "handled/*")
    for topic in ("handled/x", "other"):
        bridged.deliver(topic, {})
    bridged.send("from/admin")
    assert sorted(unhandled.topics) == ["from/admin", "other"]
    assert handled.topics == ["handled/x"]
    assert sorted(bridged.back.topics) == ["from/admin", "handled/x", "other"]


def test_typed_handlers_of_the_bus_may_be_services_of_both(bridged: Sides) -> None:
    """One service with the interfaces of both gets what crosses from both."""

    class Both(BusRecorder):
        def handle_event(self, event: Event) -> None:
            of_admin.append(event.topic)

    of_admin, both = list[str](), Both()
    bridged.hub.services.register([EventHandler, UntypedEventHandler], both, {"event.topics": "*"})
    bridged.send("a")
    bridged.deliver("b", {})
    assert sorted(of_admin) == sorted(both.topics) == ["a", "b"]


# --- ends


def test_a_closed_bridge_lets_nothing_cross(sides: Sides) -> None:
    bridge = EventBridge(sides.hub.admin, sides.bus)
    for _ in range(2):
        bridge.close()
    sides.publish("a")
    assert sides.crossed() == ([], [])
    assert len(sides.there.events) == len(sides.back.events) == 1
    assert len(sides.hub.services.find(EventHandler)) == 1


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
    sides = Sides(hubs(permissions=of_admin), buses(permissions=of_bus))
    with EventBridge(sides.hub.admin, sides.bus, principal="bridge"):

        def publish() -> tuple[int, int]:
            sides.publish("a")
            found = sides.crossed()
            for recorder in (sides.there, sides.back):
                recorder.events.clear()
            return len(found[0]), len(found[1])

        assert publish() == (0, 0)
        of_admin.grant("bridge", TopicPermission("*", "subscribe"))
        assert publish() == (0, 0)
        assert len(sides.hub.logged("does not cross the bridge", "'bridge' may not publish 'a'")) == 1
        of_bus.grant("bridge", TopicPermission("a", "publish"))
        assert publish() == (1, 0)
        of_bus.grant("bridge", TopicPermission("*", "subscribe"))
        of_admin.grant("bridge", TopicPermission("*", "publish"))
        assert publish() == (1, 1)


# --- flooding


def test_a_bus_that_is_behind_slows_down_senders(sides: Sides) -> None:
    """Scenario 42: across the bridge, too."""
    sides.there.registration.unregister()
    gate = BusGate().untyped(sides.hub.services, "*")
    (lane,) = sides.bus.lanes()
    lane.room.limit = 5
    sent: waiting.Recorder[int] = waiting.Recorder()

    def send() -> None:
        for number in range(20):
            sides.hub.send_number(number)
            sent.append(number)

    with EventBridge(sides.hub.admin, sides.bus):
        join = in_background(send)
        gate.wait()
        sent.wait_for(5)
        eventually(lambda: lane.room.is_awaited, "it waits for room")
        assert len(sent) <= 7
        gate.opened.set()
        join()
        sides.settle()

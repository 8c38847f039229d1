"""The connection of a typed event bus to an event network, over ``memory://``."""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

import messaging
from messaging.dispatch import TopicPermission, TopicPolicy, parse_filter
from messaging.dispatch.eventdata import WireEvent
from messaging.dispatch.eventnetwork import ArrivedEvent
from messaging.errors import ArgumentError, ClosedError, InvalidTopicError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from messaging.typedevent import (
    BusConnection,
    EventNetwork,
    MonitorEvent,
    RangePolicy,
    Tolerance,
    TypedEventBus,
    UntypedEventHandler,
)
from messaging.typedevent.past import LateJoin

NETWORK = EventNetwork(heartbeat=0.5)


@dataclass
class Order:
    id: int
    total: float = 0.0


class Process:
    """What a process has: an instance, a registry, a bus, and its connection."""

    def __init__(self, stack: ExitStack, name: str, broker: str, topics: Any = "*", **options: Any) -> None:
        bus_options = {each: options.pop(each) for each in ("history", "permissions") if each in options}
        self.instance = stack.enter_context(messaging.connect(f"memory://{broker}"))
        self.services = ServiceRegistry()
        self.bus = stack.enter_context(TypedEventBus(self.services, name=name, **bus_options))
        options.setdefault("network", NETWORK)
        self.connection = self.bus.connect(self.instance, topics, **options)
        self.connection.ready.result(PATIENCE)

    def announced(self) -> None:
        self.connection.announced(PATIENCE).result()

    def settled(self) -> None:
        eventually(lambda: self.connection.get_dto().node.is_settled, "the members are settled")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack: ExitStack, request: pytest.FixtureRequest) -> Callable[..., Process]:
    def begin(name: str, *arguments: Any, **options: Any) -> Process:
        return Process(stack, name, request.node.name[:60], *arguments, **options)

    return begin


def test_typed_handlers_see_remote_events_as_local_ones(start: Callable[..., Process]) -> None:
    """Scenario 84."""
    one, two = start("one"), start("two")
    received: Recorder[tuple[str, Order]] = Recorder()

    @two.bus.on("orders/*")
    def handle(topic: str, order: Order) -> None:
        received.append((topic, order))

    two.announced()
    one.bus.deliver(Order(1, 2.5), "orders/placed")
    one.bus.deliver_untyped("orders/placed", {"id": 2, "total": 3})
    received.wait_for(2)
    assert received == [("orders/placed", Order(1, 2.5)), ("orders/placed", Order(2, 3.0))]


class Colour(enum.Enum):
    RED = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Painted:
    colour: Colour
    rights: list[Rights]


def test_members_of_enums_cross_as_themselves(start: Callable[..., Process]) -> None:
    """Also in untyped events, whose handlers name no class."""
    one, two = start("one"), start("two")
    typed: Recorder[Painted] = Recorder()
    untyped: Recorder[Any] = Recorder()

    @two.bus.on("a")
    def handle(_topic: str, event: Painted) -> None:
        typed.append(event)

    @two.bus.on("*")
    def handle_untyped(_topic: str, event: dict[str, Any]) -> None:
        untyped.append(event)

    two.announced()
    painted = Painted(Colour.RED, [Rights.READ, Rights.READ | Rights.WRITE])
    one.bus.deliver(painted, "a")
    one.bus.deliver_untyped("b", {"colours": [Colour.RED], "in": {"rights": Rights.WRITE}})
    untyped.wait_for(2)
    assert untyped[0] == {"colour": Colour.RED, "rights": [Rights.READ, Rights.READ | Rights.WRITE]}
    assert untyped[1] == {"colours": [Colour.RED], "in": {"rights": Rights.WRITE}}
    typed.wait_for(1)
    assert typed == [painted]


def test_the_monitor_says_which_events_are_remote_and_keeps_their_publication_time(
    start: Callable[..., Process],
) -> None:
    """Scenario 84; 157.11."""
    one, two = start("one", history={"orders/*": RangePolicy.unlimited()}), start("two")
    seen: dict[str, list[MonitorEvent]] = {"one": [], "two": []}
    one.bus.monitor.monitor_events().subscribe(seen["one"].append)
    two.bus.monitor.monitor_events().subscribe(seen["two"].append)
    two.announced()
    one.bus.deliver(Order(1), "orders/placed")
    eventually(lambda: seen["one"] and seen["two"], "the event")  # each monitor is told on a thread of its own
    local, remote = seen["one"][0], seen["two"][0]
    assert local.origin is None
    assert remote.origin is not None
    assert abs(remote.publication_time - local.publication_time) < timedelta(milliseconds=1)


def test_nothing_crosses_that_no_process_wants(start: Callable[..., Process]) -> None:
    one, two = start("one"), start("two")
    received: Recorder[Any] = Recorder()
    two.bus.on("wanted/a", handler=received.append, filter="(id>=5)")
    two.announced()
    one.settled()
    for number in range(10):
        one.bus.deliver_untyped("wanted/a", {"id": number})
        one.bus.deliver_untyped("wanted/b", {"id": number})
    received.wait_for(5)
    dto = one.connection.get_dto()
    assert (dto.node.sent, dto.node.unwanted) == (5, 5)  # topics that no filter matches never reach the queue


def test_handlers_that_come_and_go_change_what_crosses(start: Callable[..., Process]) -> None:
    one, two = start("one"), start("two")
    one.settled()
    received: Recorder[Any] = Recorder()
    registration = two.bus.on("a/b", handler=received.append, type=dict)
    two.announced()
    one.bus.deliver_untyped("a/b", {"n": 1})
    received.wait_for(1)
    registration.unregister()
    two.announced()
    one.bus.deliver_untyped("a/b", {"n": 2})
    two.bus.on("a/b", handler=received.append, type=dict)
    two.announced()
    one.bus.deliver_untyped("a/b", {"n": 3})
    received.wait_for(2)
    assert received == [{"n": 1}, {"n": 3}]


def test_unhandled_events_and_history_are_as_for_local_events(start: Callable[..., Process]) -> None:
    one, two = start("one"), start("two", history={"kept/*": RangePolicy.at_most(2)})
    unhandled: Recorder[str] = Recorder()
    two.bus.on_unhandled("odd/*", handler=lambda topic, _: unhandled.append(topic))
    two.announced()
    for number in range(3):
        one.bus.deliver_untyped("kept/a", {"n": number})
    one.bus.deliver_untyped("odd/b", {"n": 0})
    eventually(lambda: unhandled == ["odd/b"], "the unhandled event")
    eventually(lambda: two.bus.get_dto().recorded == 2, "the kept events")
    late: Recorder[Any] = Recorder()
    two.bus.on("kept/a", handler=late.append, type=dict, history=5)
    late.wait_for(2)
    assert late == [{"n": 1}, {"n": 2}]


def test_only_the_topics_that_are_opted_in_cross(start: Callable[..., Process]) -> None:
    one = start("one", ["orders/*", "audit/login"], outbound="orders/placed", inbound=False)
    two = start("two")
    received: Recorder[str] = Recorder()
    two.bus.on("*", handler=lambda topic, _: received.append(topic))
    two.announced()
    for topic in ("audit/login", "orders/shipped", "other", "orders/placed"):
        one.bus.deliver_untyped(topic, {})
    received.wait_for(1)
    one.connection.close()
    assert received == ["orders/placed"]
    two.bus.deliver_untyped("orders/placed", {})
    assert one.connection.get_dto().node.received == 0


def test_an_event_comes_once_over_two_connections(stack: ExitStack) -> None:
    one, two = Process(stack, "one", "net-a"), Process(stack, "two", "net-a")
    connections = {each: [each.connection] for each in (one, two)}
    received: dict[Process, Recorder[Any]] = {each: Recorder() for each in (one, two)}
    for each in (one, two):  # a second network, over another broker
        other = stack.enter_context(messaging.connect("memory://net-b"))
        connections[each].append(each.bus.connect(other, "*", network=NETWORK))
        each.bus.on("a", handler=received[each].append, type=dict)
    for connection in (*connections[one], *connections[two]):
        connection.announced(PATIENCE).result()
    for number in range(50):
        one.bus.deliver_untyped("a", {"n": number})
    two.bus.deliver_untyped("a", {"n": 50})
    for each, count in ((one, 1), (two, 50)):
        eventually(
            lambda each=each, count=count: all(c.get_dto().node.received >= count for c in connections[each]),
            "all copies have arrived",
        )
        received[each].wait_for(51)
        each.bus.flush().result(PATIENCE)
        assert sorted(event["n"] for event in received[each]) == [*range(51)]


def test_a_connection_never_delays_a_publisher_and_counts_what_it_drops(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = start("one", network=EventNetwork(heartbeat=0.5, send_always="*"), limit=10, overflow="drop_latest")
    is_free = threading.Event()
    publish = one.instance.publisher.publish

    def blocked(message: Any, *arguments: Any) -> Any:
        assert is_free.wait(PATIENCE)
        return publish(message, *arguments)

    monkeypatch.setattr(one.connection._node.sender, "_publish", blocked)
    for number in range(100):
        one.bus.deliver_untyped("a", {"n": number})
    assert not is_free.is_set()  # no publisher waited for it
    eventually(lambda: "dropping the new ones" in caplog.text, "the log line")
    assert one.connection.get_dto().dropped in (89, 90)  # one may be with the worker
    is_free.set()
    eventually(lambda: not one.connection.get_dto().waiting, "the queue is empty")


def test_the_oldest_events_are_dropped_by_default(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start("one", network=EventNetwork(heartbeat=0.5, send_always="*"), limit=5)
    is_free = threading.Event()
    sent: list[bytes] = []

    def blocked(message: Any) -> None:
        assert is_free.wait(PATIENCE)
        sent.append(message.payload)

    monkeypatch.setattr(one.connection._node.sender, "_publish", blocked)
    for number in range(20):
        one.bus.deliver_untyped("a", {"n": number})
    is_free.set()
    eventually(lambda: not one.connection.get_dto().waiting, "the queue is empty")
    assert b'"n":19' in sent[-1]
    assert len(sent) <= 6


def test_a_connection_is_exempt_from_the_tolerance_of_the_bus(stack: ExitStack) -> None:
    m = stack.enter_context(messaging.connect("memory://tolerance"))
    bus = stack.enter_context(TypedEventBus(ServiceRegistry(), tolerance=Tolerance(failures=1, timeout=0.1)))
    connection = bus.connect(m, "*", network=EventNetwork(heartbeat=0.5, send_always="*"))
    connection.ready.result(PATIENCE)
    for _ in range(5):
        bus.deliver_untyped("a", {"vast": 10**400})
        bus.deliver(Unreadable(), "a")
    eventually(lambda: connection.get_dto().unfit >= 5, "the events that cannot be sent")
    bus.deliver_untyped("a", {"n": 1})
    eventually(lambda: connection.get_dto().node.sent >= 1, "an event is sent all the same")


class Unreadable:
    """An event whose field cannot be read."""

    value: int

    @property
    def other(self) -> int:
        return 1

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            raise RuntimeError("not readable")
        return super().__getattribute__(name)


def test_policies_decide_who_may_send_and_what_may_come_in(
    start: Callable[..., Process], caplog: pytest.LogCaptureFixture
) -> None:
    may = TopicPolicy({"meter": [TopicPermission("meters/*", "publish")]})
    one = start("one", principal="meter", outbound_policy=may)
    two = start("two", inbound_policy=may)
    stranger = start("stranger", principal="stranger")
    received: Recorder[str] = Recorder()
    two.bus.on("*", handler=lambda topic, _: received.append(topic))
    two.announced()
    one.bus.deliver_untyped("meters/a", {})
    one.bus.deliver_untyped("secrets/a", {})
    stranger.bus.deliver_untyped("meters/b", {})
    eventually(lambda: received and "stranger" in caplog.text and "secrets/a" in caplog.text, "the refusals")
    assert received == ["meters/a"]


def test_the_connection_ends_with_the_bus_and_tells_the_others(stack: ExitStack) -> None:
    two = Process(stack, "two", "ends")
    with ExitStack() as inner:
        one = Process(inner, "one", "ends")
        eventually(lambda: len(two.connection.get_dto().node.members) == 1, "the member")
        one.connection.close()
        one.connection.close()
        eventually(lambda: not two.connection.get_dto().node.members, "it left")
        again = one.bus.connect(one.instance, "*", network=NETWORK)
        eventually(lambda: len(two.connection.get_dto().node.members) == 1, "it is back")
    eventually(lambda: not two.connection.get_dto().node.members, "it left with its bus")
    assert repr(again).endswith("closed>")
    with pytest.raises(ClosedError):
        one.bus.connect(two.instance, "*")


@table(
    ("arguments", "error"),
    [
        ({"topics": ()}, ArgumentError),
        ({"topics": 7}, ArgumentError),
        ({"topics": "a//b"}, InvalidTopicError),
        ({"topics": "a/*", "outbound": "b"}, ArgumentError),
        ({"topics": "*", "outbound": False, "inbound": False}, ArgumentError),
        ({"topics": "*", "limit": 0}, ArgumentError),
        ({"topics": "*", "overflow": "block"}, ArgumentError),
        ({"topics": "*", "network": "topics"}, ArgumentError),
        ({"topics": "*", "inbound_policy": "all"}, ArgumentError),
    ],
)
def test_a_wrong_argument_is_refused(stack: ExitStack, arguments: dict[str, Any], error: type[Exception]) -> None:
    m = stack.enter_context(messaging.connect("memory://wrong"))
    bus = stack.enter_context(TypedEventBus(ServiceRegistry()))
    with pytest.raises(error):
        bus.connect(m, **arguments)


def test_a_connection_that_nothing_matches_costs_a_publisher_nothing(start: Callable[..., Process]) -> None:
    one = start("one", "other/*")
    one.services.register(UntypedEventHandler, lambda _: None, {"event.topics": "a"})
    offered: list[Any] = []
    one.connection.offer = offered.append  # type: ignore[method-assign]
    one.bus.deliver_untyped("a", {})
    assert not offered


_TOKENS = st.sampled_from(["a", "b", "+"])
_FILTERS = st.lists(_TOKENS, min_size=1, max_size=3).flatmap(
    lambda tokens: st.sampled_from(["/".join(tokens), "/".join((*tokens, "*"))])
) | st.just("*")
_TOPICS = ["/".join(each) for size in (1, 2, 3, 4) for each in product("ab", repeat=size)]


@given(_FILTERS, _FILTERS)
def test_the_intersection_of_two_filters_matches_what_both_match(one: str, other: str) -> None:
    left, right = parse_filter(one), parse_filter(other)
    common = left.intersection(right)
    both = {topic for topic in _TOPICS if left.matches(topic) and right.matches(topic)}
    assert both == (set() if common is None else {topic for topic in _TOPICS if parse_filter(common).matches(topic)})


def test_a_connection_is_a_context_manager(stack: ExitStack) -> None:
    m = stack.enter_context(messaging.connect("memory://with"))
    bus = stack.enter_context(TypedEventBus(ServiceRegistry()))
    with bus.connect(m, "*", network=NETWORK) as connection:
        assert isinstance(connection, BusConnection)
        connection.ready.result(PATIENCE)
    assert not bus._network.connections


#: events of a plain program that a connection does not publish: topic, and fields
NOT_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "a policy": ("secrets/a", {"data": {}}),
    "data that is no map": ("meters/a", {"data": 7}),
    "data that is not portable": ("meters/a", {"data": {"at": {"$datetime": "yesterday"}}}),
    "the end of a session": ("meters/a", {"kind": "close"}),
}


@table("topic, fields", NOT_PUBLISHED)
def test_a_sender_is_answered_for_an_event_that_a_connection_does_not_publish(
    start: Callable[..., Process], topic: str, fields: dict[str, Any]
) -> None:
    may = TopicPolicy({None: [TopicPermission("meters/*", "publish")]})
    network = EventNetwork(heartbeat=0.5, prefix=f"n{uuid4().hex}")
    process = start("one", topics=["meters/a", "secrets/a"], inbound_policy=may, network=network)
    process.bus.on("*", handler=lambda *_: None)
    process.announced()
    answered: Recorder[str] = Recorder()
    sender = str(uuid4())
    stream = process.instance.subscribe(f"{network.prefix}-members/{sender}")
    stream.subscribe(lambda message: answered.append(json.loads(message.payload)["member"]))
    stream.ready.result(PATIENCE)
    event = {"event": 1, "topic": topic, "sender": sender, "id": sender, "notify": True, **fields}
    process.instance.publish(f"{network.prefix}/{topic}", json.dumps(event).encode()).result(PATIENCE)
    eventually(lambda: answered)


def test_a_held_event_that_fails_keeps_no_other_one_from_handlers() -> None:
    published: list[int] = []

    def publish(arrival: ArrivedEvent) -> None:
        if arrival.event.data == 1:
            raise ValueError("a defect")
        published.append(arrival.event.data)

    late = LateJoin("t", past_event=lambda _: None, publish_past=lambda _: None, publish=publish)
    for number in (1, 2):
        assert late.hold(ArrivedEvent(WireEvent("a", number), None, None, None))
    late.done([], None)
    assert published == [2]
    assert not late.hold(ArrivedEvent(WireEvent("a", 3), None, None, None))

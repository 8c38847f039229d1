"""What the specification says must be, and what no other file here has a test of.

The sections and what tests them: 157.2 and 157.3 ``test_publishing``, ``test_publishers``; 157.4.1
``test_typed_handlers``; 157.4.2 ``test_untyped_handlers``; 157.4.3 ``test_topic_patterns``; 157.4.4 ``test_unhandled``;
157.4.5 ``test_filters``; 157.4.6 ``test_misbehaving``; 157.4.7 ``test_replay``; 157.4.8 and 157.4.9 each of them, and
this one; 157.5 and 157.7 ``test_bus_lifecycle``; 157.6 ``test_history`` and ``test_monitor``; 157.12
``test_decorators``.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import logging
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytest

from messaging.errors import PermissionDeniedError
from messaging.services import ServiceRegistry
from messaging.typedevent import (
    TopicPermission,
    TopicPolicy,
    TypedEventBus,
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
)
from tests.typedevent.conftest import (
    ORDERS,
    Failing,
    Item,
    Order,
    Recorder,
    blocked,
    eventually,
    flush,
    handler_of,
    logged,
    typed,
    unhandled,
    untyped,
)

# --- events (157.2)


class Record(NamedTuple):
    x: int
    items: list[Item]

    constant = 5

    @property
    def double(self) -> int:
        return 2 * self.x

    def method(self) -> int:
        return 3

    @staticmethod
    def static() -> int:
        return 4


@dataclass(frozen=True, slots=True)
class FrozenRecord:
    x: int
    items: list[Item]
    shared: ClassVar[int] = 5

    @property
    def double(self) -> int:
        return 2 * self.x


@pytest.mark.parametrize("record", [Record, FrozenRecord])
def test_of_a_record_nothing_but_its_components_is_event_data(
    bus: TypedEventBus, services: ServiceRegistry, record: Any
) -> None:
    """157.2.1: all other parts must be ignored; in filters and on the way back, too."""
    as_map, filtered, back = Recorder(), Recorder(), Recorder()
    untyped(services, as_map, "a")
    untyped(services, filtered, "a", filter="(|(double=*)(constant=*)(method=*)(shared=*)(count=*)(index=*))")
    typed(services, back, "b", type=record)
    bus.deliver(record(1, [Item("x")]), "a")
    bus.deliver_untyped("b", {"x": "1", "items": [{"name": "x"}], "double": 7, "method": 8, "shared": 9})
    flush(bus)
    assert as_map.data == [{"x": 1, "items": [{"name": "x", "price": 1.0}]}]
    assert filtered.data == []
    assert back.data == [record(1, [Item("x")])]


class Dto:
    """As OSGi has them: public fields, no constructor."""

    x: int
    nested: Dto | None
    shared: ClassVar[int] = 5
    _private: int = 6

    def method(self) -> int:
        return 7


def test_of_a_dto_nothing_but_its_public_fields_is_event_data(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """157.2.1: methods, static fields and what is not public must be ignored."""
    as_map, back = Recorder(), Recorder()
    untyped(services, as_map, "a")
    typed(services, back, "b", type=Dto)
    inner, dto = Dto(), Dto()
    inner.x, inner.nested, inner._private = 2, None, 9
    dto.x, dto.nested = 1, inner
    bus.deliver(dto, "a")
    bus.deliver_untyped("b", {"x": 1, "nested": {"x": "2"}, "_private": 5, "method": 6})
    flush(bus)
    assert as_map.data == [{"x": 1, "nested": {"x": 2, "nested": None}}]
    (made,) = back.data
    assert (made.x, made.nested.x, made.nested.nested, made._private, made.method()) == (1, 2, None, 6, 7)


@dataclass
class Link:
    next: Any = None


def test_typed_events_may_be_nested_to_any_depth(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """157.2.1.1: there must be no limit."""
    received = Recorder()
    untyped(services, received, "a")
    link = Link()
    for _ in range(20_000):
        link = Link(link)
    bus.deliver(link, "a")
    flush(bus)
    (found,) = received.data
    depth = 0
    while found is not None:
        found, depth = found["next"], depth + 1
    assert depth == 20_001
    # Python takes such things apart by recursion
    while link is not None:
        below, link.next = link.next, None
        link = below
    (left,) = received.data
    while left is not None:
        left = left.popitem()[1]


class Colour(enum.Enum):
    RED = 1


@dataclass
class Everything:
    """All that a field may be."""

    text: str = "é"
    number: int = 2**70
    real: float = 0.1
    exact: decimal.Decimal = decimal.Decimal("0.10")
    flag: bool = True
    raw: bytes = b"\0\xff"
    nothing: None = None
    when: datetime.datetime = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)
    day: datetime.date = datetime.date(2024, 5, 1)
    key: uuid.UUID = field(default_factory=lambda: uuid.UUID(int=1))
    colour: Colour = Colour.RED
    several: list[int] = field(default_factory=lambda: [1, 2])
    pairs: dict[str, list[Item]] = field(default_factory=lambda: {"a": [Item("x")]})
    item: Item = field(default_factory=lambda: Item("y"))


def test_an_untyped_event_can_have_all_that_a_typed_one_has(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """157.2.2: there and back again, nothing of it is lost."""
    maps, back, again = Recorder(), Recorder(), Recorder()
    untyped(services, maps, "a")
    typed(services, back, "b", type=Everything)
    untyped(services, again, "b")
    bus.deliver(Everything(), "a")
    flush(bus)
    bus.deliver_untyped("b", maps.data[0])
    flush(bus)
    assert back.data == [Everything()]
    assert again.data == maps.data
    assert maps.data[0]["pairs"] == {"a": [{"name": "x", "price": 1.0}]}


# --- publishing (157.3)


def test_whether_a_publisher_may_publish_is_checked_when_it_is_made_and_not_with_each_event(
    services: ServiceRegistry,
) -> None:
    """157.3.4: the permission must be checked in ``create_publisher``."""
    policy = TopicPolicy({"me": [TopicPermission("a/*", "publish")], None: [TopicPermission("*", "subscribe")]})
    with TypedEventBus(services, permissions=policy) as bus:
        received = Recorder()
        untyped(services, received, "*")
        for call in (
            lambda: bus.create_publisher("b", principal="me"),
            lambda: bus.create_publisher("a/b"),
            lambda: bus.create_publisher(Order, principal="me"),
        ):
            with pytest.raises(PermissionDeniedError):
                call()
        publisher = bus.create_publisher("a/b", principal="me")
        policy.revoke("me")
        publisher.deliver_untyped({"n": 1})
        with pytest.raises(PermissionDeniedError):
            bus.deliver_untyped("a/b", {"n": 2}, principal="me")
        flush(bus)
        assert received.data == [{"n": 1}]


def test_whatever_is_wrong_with_handlers_nothing_is_raised_to_the_publisher(
    bus: TypedEventBus, services: ServiceRegistry
) -> None:
    """157.5.1: it must not be, since nothing is known of it when an event is published."""

    async def handle(event: Any) -> None:
        raise LookupError

    async def register() -> None:
        untyped(services, handle, "a")

    asyncio.run(register())  # its loop is closed
    typed(services, Recorder(), "a", type=uuid.UUID)  # no event becomes one
    untyped(services, Recorder(), "a", filter="(n>=nonsense)")
    untyped(services, Recorder(), "a*")  # ignored
    untyped(services, handle, "a")
    unhandled(services, Failing(LookupError()))
    failing = Failing(SystemExit(1))
    registration = untyped(services, failing, "a")
    publisher = bus.create_publisher("a")
    for number in range(30):
        bus.deliver(Order(number), "a")
        bus.deliver_untyped("a", {"n": number})
        publisher.deliver_untyped({"n": number})
        bus.deliver_untyped("b", {"n": number})
    flush(bus)
    eventually(lambda: blocked(bus, registration), "it is blocked")


# --- handlers (157.4)


class All(TypedEventHandler[Order], UntypedEventHandler, UnhandledEventHandler):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def notify(self, topic: str, event: Order) -> None:
        self.calls.append(("notify", topic))

    def notify_untyped(self, topic: str, event: dict[str, Any]) -> None:
        self.calls.append(("notify_untyped", topic))

    def notify_unhandled(self, topic: str, event: dict[str, Any]) -> None:
        self.calls.append(("notify_unhandled", topic))


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        (TypedEventHandler, [("notify", "a")]),
        (UntypedEventHandler, [("notify_untyped", "a")]),
        (UnhandledEventHandler, [("notify_unhandled", "b")]),
        ([TypedEventHandler, UnhandledEventHandler], [("notify", "a")]),
        ("messaging.typedevent.handlers.UntypedEventHandler", [("notify_untyped", "a")]),
        (All, []),
        ("UntypedEventHandler", []),
    ],
    ids=str,
)
def test_a_handler_is_called_by_the_interface_it_is_registered_with_and_no_other(
    bus: TypedEventBus, services: ServiceRegistry, interface: Any, expected: list[tuple[str, str]]
) -> None:
    """157.4.1, 157.4.2, 157.4.4: it must be registered with it, whatever else its class can."""
    handler, other = All(), Recorder()
    services.register(interface, handler, {"event.topics": ["a"] if expected != [("notify_unhandled", "b")] else ["b"]})
    if expected == [("notify_unhandled", "b")]:
        untyped(services, other, "a")
    bus.deliver_untyped("a", {"id": 1})
    bus.deliver_untyped("b", {"id": 1})
    flush(bus)
    assert handler.calls == expected


def test_each_handler_gets_an_event_as_the_type_it_asks_for(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """157.4.1: the event must be adapted to the type of each of them."""

    @dataclass
    class Text:
        id: str

    @dataclass
    class Real:
        id: float
        missing: int = 5

    handlers = {Text: Recorder(), Real: Recorder(), Order: Recorder()}
    for type_, handler in handlers.items():
        typed(services, handler, "a", type=type_)
    bus.deliver_untyped("a", {"id": 7})
    flush(bus)
    assert [each.data for each in handlers.values()] == [[Text("7")], [Real(7.0)], [Order(7)]]


def test_all_properties_but_the_topics_of_untyped_handlers_are_optional(
    bus: TypedEventBus, services: ServiceRegistry
) -> None:
    """157.4.8."""
    handlers = [All(), All(), All()]
    registrations = [
        services.register(TypedEventHandler, handlers[0]),
        services.register(UntypedEventHandler, handlers[1], {"event.topics": "b"}),
        services.register(UnhandledEventHandler, handlers[2]),
    ]
    for topic in (ORDERS, "b", "c"):
        bus.deliver_untyped(topic, {"id": 1})
    flush(bus)
    assert [each.calls for each in handlers] == [
        [("notify", ORDERS)],
        [("notify_untyped", "b")],
        [("notify_unhandled", "c")],
    ]
    found = [handler_of(bus, each) for each in registrations]
    assert [each and each.filter for each in found] == [None, None, None]


@pytest.mark.parametrize("interface", [TypedEventHandler, UntypedEventHandler, UnhandledEventHandler])
@pytest.mark.parametrize(
    "wrong",
    [
        {"event.topics": "a//b"},
        {"event.topics": ["a", "b", "c*"]},
        {"event.topics": 5},
        {"event.filter": "(a=1"},
        {"event.filter": 5},
        {"event.history": -1},
        {"event.history": "1"},
        {"event.history": 1.0},
        {"event.history": True},
        {"event.history": [1]},
        {"event.history": 2, "event.topics": "+a"},
    ],
    ids=str,
)
def test_a_handler_with_an_invalid_property_is_ignored_and_the_log_says_which_one(
    bus: TypedEventBus,
    services: ServiceRegistry,
    caplog: pytest.LogCaptureFixture,
    interface: type[Any],
    wrong: dict[str, Any],
) -> None:
    """157.4.9: of all kinds of handlers, for each of the properties; and others are not affected."""
    handler, other = All(), Recorder()
    registration = services.register(interface, handler, {"event.topics": "a", **wrong})
    untyped(services, other, "a")
    for topic in ("a", "b", ORDERS):
        bus.deliver_untyped(topic, {"id": 1, "a": 1})
    flush(bus)
    assert handler.calls == []
    assert handler_of(bus, registration) is None
    (text,) = logged(caplog, "is ignored", level=logging.ERROR)
    assert repr(registration.reference) in text
    assert interface.__name__ in text
    assert other.topics == ["a"]


def test_an_event_that_cannot_be_adapted_is_missed_and_the_log_says_by_which_handler(
    bus: TypedEventBus, services: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """157.4.9: of all kinds of handlers."""
    node = Link()
    node.next = node  # no tree
    received = Recorder()
    registrations = [
        typed(services, received, "a", type=Order),
        untyped(services, received, "a"),
        untyped(services, received, "a", filter="(next=*)"),
    ]
    bus.deliver(node, "a")
    flush(bus)
    for registration in registrations:
        registration.unregister()
    registrations.append(unhandled(services, received))
    bus.deliver(node, "a")
    flush(bus)
    assert received.events == []
    for registration in registrations:
        assert logged(caplog, repr(registration.reference), "does not get", "'a'", level=logging.ERROR)
    node.next = None


def test_a_handler_is_called_with_topic_and_event_and_nothing_else(
    bus: TypedEventBus, services: ServiceRegistry
) -> None:
    """157.9.5.1, 157.9.7.1, 157.9.8.1."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def handle(*arguments: Any, **keywords: Any) -> None:
        calls.append((arguments, keywords))

    untyped(services, handle, "a")
    typed(services, handle, "b", type=Order)
    unhandled(services, handle, "c")
    for topic in ("a", "b", "c"):
        bus.deliver_untyped(topic, {"id": 1})
        flush(bus)
    assert calls == [(("a", {"id": 1}), {}), (("b", Order(1)), {}), (("c", {"id": 1}), {})]

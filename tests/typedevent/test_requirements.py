"""Requirements of the specification that no other file here tests.

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

from messaging.typedevent import (
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
    send_to,
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
def test_of_a_record_nothing_but_its_components_is_event_data(bus: TypedEventBus, record: Any) -> None:
    """157.2.1: all other parts must be ignored; in filters and on the way back, too."""
    as_map, filtered, back = Recorder(), Recorder(), Recorder()
    untyped(bus, as_map, "a")
    untyped(bus, filtered, "a", filter="(|(double=*)(constant=*)(method=*)(shared=*)(count=*)(index=*))")
    typed(bus, back, "b", type=record)
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


def test_of_a_dto_nothing_but_its_public_fields_is_event_data(bus: TypedEventBus) -> None:
    """157.2.1: methods, static fields and fields that are not public must be ignored."""
    as_map, back = Recorder(), Recorder()
    untyped(bus, as_map, "a")
    typed(bus, back, "b", type=Dto)
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


def test_an_untyped_event_can_have_all_that_a_typed_one_has(bus: TypedEventBus) -> None:
    """157.2.2: there and back again, nothing of it is lost."""
    maps, back, again = Recorder(), Recorder(), Recorder()
    untyped(bus, maps, "a")
    typed(bus, back, "b", type=Everything)
    untyped(bus, again, "b")
    bus.deliver(Everything(), "a")
    flush(bus)
    bus.deliver_untyped("b", maps.data[0])
    flush(bus)
    assert back.data == [Everything()]
    assert again.data == maps.data
    assert maps.data[0]["pairs"] == {"a": [{"name": "x", "price": 1.0}]}


# --- publishing (157.3)


def test_problems_of_handlers_raise_nothing_in_the_publisher(bus: TypedEventBus) -> None:
    """157.5.1: it must not be, since nothing is known of it when an event is published."""

    async def handle(event: Any) -> None:
        raise LookupError

    async def register() -> None:
        untyped(bus, handle, "a")

    asyncio.run(register())  # its loop is closed
    typed(bus, Recorder(), "a", type=uuid.UUID)  # no event becomes one
    untyped(bus, Recorder(), "a", filter="(n>=nonsense)")
    untyped(bus, Recorder(), "a*")  # ignored
    untyped(bus, handle, "a")
    unhandled(bus, Failing(LookupError()))
    failing = Failing(SystemExit(1))
    registration = untyped(bus, failing, "a")
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
    bus: TypedEventBus, interface: Any, expected: list[tuple[str, str]]
) -> None:
    """157.4.1, 157.4.2, 157.4.4: it must be registered with it, whatever else its class can."""
    handler, other = All(), Recorder()
    bus.services.register(
        interface, handler, {"event.topics": ["a"] if expected != [("notify_unhandled", "b")] else ["b"]}
    )
    if expected == [("notify_unhandled", "b")]:
        untyped(bus, other, "a")
    bus.deliver_untyped("a", {"id": 1})
    bus.deliver_untyped("b", {"id": 1})
    flush(bus)
    assert handler.calls == expected


@pytest.mark.parametrize("interface", [TypedEventHandler, UntypedEventHandler, UnhandledEventHandler])
@pytest.mark.parametrize(
    "wrong",
    [
        {"event.topics": "a//b"},
        {"event.topics": ["a", "b", "c*"]},
        {"event.topics": 5},
        {"event.filter": "(a=1"},
        {"event.filter": 5},
        *({"event.history": each} for each in (-1, "1", 1.0, True, [1])),
        {"event.history": 2, "event.topics": "+a"},
    ],
    ids=str,
)
def test_a_handler_with_an_invalid_property_is_ignored_and_the_log_says_which_one(
    bus: TypedEventBus,
    caplog: pytest.LogCaptureFixture,
    interface: type[Any],
    wrong: dict[str, Any],
) -> None:
    """157.4.9: of all kinds of handlers, for each of the properties; and others are not affected."""
    handler, other = All(), Recorder()
    registration = bus.services.register(interface, handler, {"event.topics": "a", **wrong})
    untyped(bus, other, "a")
    send_to(bus, ("a", "b", ORDERS), {"id": 1, "a": 1})
    assert handler.calls == []
    assert handler_of(bus, registration) is None
    (text,) = logged(caplog, "is ignored", level=logging.ERROR)
    assert repr(registration.reference) in text
    assert interface.__name__ in text
    assert other.topics == ["a"]


def test_an_event_that_cannot_be_adapted_is_missed_and_the_log_says_by_which_handler(
    bus: TypedEventBus, caplog: pytest.LogCaptureFixture
) -> None:
    """157.4.9, 157.2.1.1: by handlers of all kinds, except of its own class."""
    node = Link()
    node.next = node  # no tree
    received, as_it_is = Recorder(), Recorder()
    same = typed(bus, as_it_is, "a", type=Link)
    registrations = [
        typed(bus, received, "a", type=Order),
        untyped(bus, received, "a"),
        untyped(bus, received, "a", filter="(next=*)"),
    ]
    bus.deliver(node, "a")
    flush(bus)
    for registration in (same, *registrations):
        registration.unregister()
    registrations.append(unhandled(bus, received))
    bus.deliver(node, "a")
    flush(bus)
    assert received.events == []
    assert as_it_is.data[0] is node
    for registration in registrations:
        assert logged(caplog, repr(registration.reference), "does not get", "'a'", level=logging.ERROR)
    node.next = None


def test_a_handler_is_called_with_topic_and_event_and_nothing_else(bus: TypedEventBus) -> None:
    """157.9.5.1, 157.9.7.1, 157.9.8.1."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def handle(*arguments: Any, **keywords: Any) -> None:
        calls.append((arguments, keywords))

    untyped(bus, handle, "a")
    typed(bus, handle, "b", type=Order)
    unhandled(bus, handle, "c")
    for topic in ("a", "b", "c"):
        bus.deliver_untyped(topic, {"id": 1})
        flush(bus)
    assert calls == [(("a", {"id": 1}), {}), (("b", Order(1)), {}), (("c", {"id": 1}), {})]

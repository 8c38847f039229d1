"""Requirements of the specification that no other file here tests.

The sections and what tests them: 157.2 and 157.3 ``test_publishing``, ``test_publishers``; 157.4.1
``test_typed_handlers``; 157.4.2 ``test_untyped_handlers``; 157.4.3 ``test_topic_patterns``; 157.4.4 ``test_unhandled``;
157.4.5 ``test_filters``; 157.4.6 ``test_misbehaving``; 157.4.7 ``test_replay``; 157.4.8 and 157.4.9 each of them, and
this one; 157.5 and 157.7 ``test_bus_lifecycle``; 157.6 ``test_history`` and ``test_monitor``; 157.12
``test_decorators``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from dataclasses import dataclass
from typing import Any

import pytest

from messaging.errors import ArgumentError, InvalidFilterError, InvalidTopicError
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from messaging.typedevent import TypedEventHandler, UnhandledEventHandler, UntypedEventHandler
from tests.dispatch.helpers import NEITHER
from tests.typedevent.conftest import Bus, Failing, Order, Recorder, own_bus, register

# --- events (157.2)


@dataclass
class Link:
    next: Any = None


# --- publishing (157.3)


def test_problems_of_handlers_raise_nothing_in_the_publisher(bus: Bus) -> None:
    """157.5.1: it must not be, since nothing is known of it when an event is published."""

    async def handle(event: Any) -> None:
        raise LookupError

    async def register() -> None:
        bus.untyped(handle, "a")

    asyncio.run(register())  # its loop is closed
    bus.typed(Recorder(), "a", type=uuid.UUID)  # no event becomes one
    bus.untyped(Recorder(), "a", filter="(n>=nonsense)")
    bus.untyped(Recorder(), "a*")  # ignored
    bus.untyped(handle, "a")
    bus.unhandled(Failing(LookupError()))
    failing = Failing(SystemExit(1)).untyped(bus, "a")
    publisher = bus.create_publisher("a")
    for number in range(30):
        bus.deliver(Order(number), "a")
        bus.deliver_untyped("a", {"n": number})
        publisher.deliver_untyped({"n": number})
        bus.deliver_untyped("b", {"n": number})
    bus.drain()
    eventually(lambda: bus.blocked(failing.registration), "it is blocked")


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


@table(
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
@own_bus
def test_a_handler_is_called_by_the_interface_it_is_registered_with_and_no_other(
    bus: Bus, interface: Any, expected: list[tuple[str, str]]
) -> None:
    """157.4.1, 157.4.2, 157.4.4: it must be registered with it, whatever else its class can."""
    handler, other = All(), Recorder()
    bus.services.register(
        interface, handler, {"event.topics": ["a"] if expected != [("notify_unhandled", "b")] else ["b"]}
    )
    if expected == [("notify_unhandled", "b")]:
        bus.untyped(other, "a")
    bus.deliver_untyped("a", {"id": 1})
    bus.send("b", {"id": 1})
    assert handler.calls == expected


def invalid(error: type[ArgumentError], name: str, *values: Any) -> list[tuple[str, Any, type[ArgumentError]]]:
    """Return parameters of a table: a property, a value that makes it invalid, and the error that ``on`` raises."""
    return [(name, value, error) for value in values]


@table(
    ("name", "value", "error"),
    [
        *invalid(InvalidTopicError, "topics", *NEITHER, [None], [["a"]], ["a", None], 5, object()),
        *invalid(ArgumentError, "topics", [], b"a", {"a": 1}),
        *invalid(InvalidFilterError, "filter", "nonsense", "(", "(a=1", "a=1", "()", "(a)", "(&)", " ", "(a=1)(b=2)"),
        *invalid(InvalidFilterError, "filter", "(n=1", "(!)", 5, b"(a=1)", ["(a=1)"]),
        *invalid(ArgumentError, "history", -1, 2.5, 3.0, "3", "abc", True, [1], -(2**40)),
        *invalid(ArgumentError, "timeout", -1, "1", math.nan, math.inf, True, [1]),
        *invalid(ArgumentError, "principal", 5, b"clerk", ["clerk"], ("clerk",), True, object()),
    ],
)
@own_bus
def test_a_handler_with_an_invalid_property_is_ignored_and_the_log_says_which_one(
    bus: Bus, name: str, value: Any, error: type[ArgumentError]
) -> None:
    """Scenarios 41, 50 and 69; 157.4.3.1, 157.4.3.2, 157.4.7, 157.4.9.

    Of all kinds of handlers, also if other topics are valid; others are not affected. Only ``on`` raises an error.
    """
    handler, other = All(), Recorder().untyped(bus, "a")
    values = [[value, "a"], ["a", value], value] if isinstance(value, str) and name == "topics" else [value]
    for interface in (TypedEventHandler, UntypedEventHandler, UnhandledEventHandler):
        for each in values:
            registration = register(interface, bus.services, handler, **{"topics": "a", name: each})
            said = bus.ignored(registration)
            assert interface.__name__ in said
            assert name.rstrip("s") in said
    before = bus.services.find()
    for on in (bus.on, bus.on_unhandled) if name != "history" else (bus.on,):
        topics, options = (("a", value), {}) if name == "topics" else (("a",), {name: value})
        with pytest.raises(error):
            on(*topics, handler=handler, **options)
    assert bus.services.find() == before
    bus.send("a", Order(1))
    assert handler.calls == []
    assert other.topics == ["a"]


def test_an_event_that_cannot_be_adapted_is_missed_and_the_log_says_by_which_handler(bus: Bus) -> None:
    """157.4.9, 157.2.1.1: by handlers of all kinds, except of its own class."""
    node = Link()
    node.next = node  # no tree
    received = Recorder()
    as_it_is = Recorder().typed(bus, "a", type=Link)
    registrations = [
        bus.typed(received, "a", type=Order),
        bus.untyped(received, "a"),
        bus.untyped(received, "a", filter="(next=*)"),
    ]
    bus.deliver(node, "a")
    bus.drain()
    for registration in (as_it_is.registration, *registrations):
        registration.unregister()
    registrations.append(bus.unhandled(received))
    bus.deliver(node, "a")
    bus.drain()
    assert received.events == []
    assert as_it_is.data[0] is node
    for registration in registrations:
        assert bus.logged(repr(registration.reference), "event on 'a' skipped", level=logging.ERROR)
    node.next = None


def test_a_handler_is_called_with_topic_and_event_and_nothing_else(bus: Bus) -> None:
    """157.9.5.1, 157.9.7.1, 157.9.8.1."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def handle(*arguments: Any, **keywords: Any) -> None:
        calls.append((arguments, keywords))

    bus.untyped(handle, "a")
    bus.typed(handle, "b", type=Order)
    bus.unhandled(handle, "c")
    for topic in ("a", "b", "c"):
        bus.deliver_untyped(topic, {"id": 1})
        bus.drain()
    assert calls == [(("a", {"id": 1}), {}), (("b", Order(1)), {}), (("c", {"id": 1}), {})]

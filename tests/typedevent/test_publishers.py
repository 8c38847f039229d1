"""TypedEventPublisher (157.3.4, 157.9.6): one topic, checked once, until it is closed."""

from __future__ import annotations

from typing import Any

import pytest

from messaging.errors import (
    ArgumentError,
    ClosedError,
    InvalidEventError,
    InvalidTopicError,
    NullEventError,
)
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from messaging.typedevent import RangePolicy, TypedEventPublisher
from tests.dispatch.helpers import FILTERS, NEITHER
from tests.threads import in_background
from tests.typedevent.conftest import ORDERS, SOON, Bus, Gate, Order, Recorder


@pytest.fixture
def received(services: ServiceRegistry) -> Recorder:
    return Recorder().untyped(services, "*")


def test_the_topic_of_a_publisher_is_that_it_was_made_for_even_when_it_is_closed(bus: Bus) -> None:
    """Scenarios 15 and 18; 157.9.6.1, 157.9.6.4, 157.9.6.5: it cannot be changed; closing once more does nothing."""
    publisher = bus.create_publisher("a/b")
    assert isinstance(publisher, TypedEventPublisher)
    assert (publisher.topic, publisher.is_open) == ("a/b", True)
    assert repr(publisher) == "<TypedEventPublisher for 'a/b', open>"
    with pytest.raises(AttributeError):
        publisher.topic = "c"  # type: ignore[misc]
    for _ in range(2):
        publisher.close()
        assert (publisher.topic, publisher.is_open) == ("a/b", False)
        assert repr(publisher) == "<TypedEventPublisher for 'a/b', closed>"


class Outer:
    class Local:
        x: int


Outer.Local.__qualname__ = "Outer.<locals>.Local"


@table(
    "arguments, error, says",
    [
        *(((topic, *more), InvalidTopicError, "") for topic in (*NEITHER, *FILTERS) for more in ((), (Order,))),
        *(((None, *more), NullEventError, "") for more in ((), (Order,))),
        ((5,), InvalidTopicError, "must be a str"),
        (("a", "Order"), ArgumentError, "event_type must be a class"),
        ((Outer.Local,), InvalidTopicError, "no topic can be made of the name"),
    ],
)
def test_an_invalid_topic_is_refused_when_the_publisher_is_made(
    bus: Bus, arguments: Any, error: type[Exception], says: str
) -> None:
    """Scenario 16; 157.3.4."""
    with pytest.raises(error, match=says or None):
        bus.create_publisher(*arguments)


def test_a_publisher_of_a_class_has_the_topic_of_its_name_unless_one_is_given(bus: Bus, received: Recorder) -> None:
    """Scenario 17; 157.9.3.1 to 157.9.3.3."""
    by_class, by_both = bus.create_publisher(Order), bus.create_publisher("a", Order)
    assert (by_class.topic, by_both.topic) == (ORDERS, "a")
    by_class.deliver(Order(1))
    by_both.deliver(Order(2))
    by_class.deliver_untyped({"id": 3})
    bus.drain()
    assert [*zip(received.topics, received.of("id"), strict=True)] == [(ORDERS, 1), ("a", 2), (ORDERS, 3)]


def test_a_closed_publisher_delivers_nothing_and_says_so(bus: Bus, received: Recorder) -> None:
    """Scenarios 19 and 20; 157.3.4, 157.9.6.1. Which error it is without an event is not said: this one."""
    publisher = bus.create_publisher("a", Order)
    publisher.deliver(Order(1))
    publisher.close()
    for call in (
        lambda: publisher.deliver(Order(2)),
        lambda: publisher.deliver(None),
        lambda: publisher.deliver_untyped({"id": 3}),
        lambda: publisher.deliver_untyped(None),  # type: ignore[arg-type]
        lambda: publisher.__enter__(),
    ):
        with pytest.raises(ClosedError, match="the publisher for 'a' is closed"):
            call()
    bus.drain()
    assert received.of("id") == [1]  # events published before are delivered


def test_an_open_publisher_refuses_none_and_objects_that_are_no_events(bus: Bus, received: Recorder) -> None:
    """Scenario 21; 157.9.6.2, 157.9.6.3."""
    publisher = bus.create_publisher("a")
    for call in (lambda: publisher.deliver(None), lambda: publisher.deliver_untyped(None)):  # type: ignore[arg-type]
        with pytest.raises(NullEventError):
            call()
    for bad in (5, "text", object()):
        for deliver in (publisher.deliver, publisher.deliver_untyped):
            with pytest.raises(InvalidEventError):
                deliver(bad)  # type: ignore[operator]
    with pytest.raises(InvalidEventError, match="keys"):
        publisher.deliver({5: 1})
    assert publisher.is_open
    publisher.deliver({"id": 1})
    bus.drain()
    assert received.data == [{"id": 1}]


def test_publishers_of_one_topic_are_closed_one_by_one(bus: Bus, received: Recorder) -> None:
    """Scenario 22."""
    first, second = bus.create_publisher("a"), bus.create_publisher("a")
    assert first is not second
    first.close()
    assert second.is_open
    second.deliver_untyped({"id": 1})
    bus.drain()
    assert received.topics == ["a"]


def test_a_publisher_is_closed_at_the_end_of_its_block_even_after_an_exception(bus: Bus, received: Recorder) -> None:
    """Scenario 23; 157.9.6: AutoCloseable."""
    publisher = bus.create_publisher("a")

    def fail() -> None:
        with publisher as entered:
            assert entered is publisher
            publisher.deliver_untyped({"id": 1})
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert not publisher.is_open
    with bus.create_publisher("a") as publisher:
        assert publisher.is_open
    assert not publisher.is_open
    bus.drain()
    assert received.of("id") == [1]


def test_a_publisher_of_a_closed_bus_says_so_and_does_not_hang(bus: Bus, received: Recorder) -> None:
    """Scenario 25."""
    publisher = bus.create_publisher("a")
    bus.close()
    for call in (lambda: publisher.deliver(Order(1)), lambda: publisher.deliver_untyped({"id": 1})):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        bus.create_publisher("a")
    assert publisher.is_open  # it was not closed itself (157.9.6.5)
    publisher.close()
    assert received.events == []


def test_a_publisher_that_waits_for_room_when_the_bus_is_closed_does_not_hang(bus: Bus) -> None:
    """Scenario 25: its handler is ten thousand events behind, and never returns in time."""
    gate = Gate().untyped(bus, "a")
    publisher = bus.create_publisher("a")
    publisher.deliver_untyped({})
    gate.wait()
    for _ in range(10_000):
        publisher.deliver_untyped({})
    join = in_background(lambda: publisher.deliver_untyped({}))
    (lane,) = bus.lanes()
    eventually(lambda: lane.room.is_awaited, "it waits for room")
    bus.close(SOON)
    join()
    gate.opened.set()


def test_publishers_reach_handlers_and_recording_that_came_later(bus: Bus) -> None:
    """157.3.4: the topic is checked once; who gets it, each time."""
    publisher = bus.create_publisher("a", Order)
    publisher.deliver(Order(1))
    received = Recorder().typed(bus, "a", type=Order)
    publisher.deliver(Order(2))
    bus.monitor.configure_history_storage("a", RangePolicy.at_most(5))
    publisher.deliver(Order(3))
    bus.drain()
    assert [each.id for each in received.data] == [2, 3]
    assert bus.get_dto().recorded == 1
    received.registration.unregister()
    publisher.deliver(Order(4))
    bus.drain()
    assert [each.id for each in received.data] == [2, 3]

"""UnhandledEventHandler (157.4.4, 157.9.7): events that no other handler got."""

from __future__ import annotations

import asyncio
from typing import Any

from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from messaging.typedevent import UnhandledEventHandler
from tests.typedevent.conftest import ORDERS, Bus, Failing, Order, Recorder, named, own_bus


class Left(Recorder, UnhandledEventHandler):
    pass


def test_an_event_without_a_handler_goes_to_all_unhandled_handlers(bus: Bus) -> None:
    """Scenario 56; 157.4.4: topic and data in map form."""
    handlers = [Left() for _ in range(3)]
    received: list[Any] = []

    async def later(topic: str, event: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        received.append((topic, event))

    for each in handlers:
        bus.unhandled(each)
    bus.unhandled(later)
    bus.unhandled(lambda event: received.append((ORDERS, event)), ORDERS)
    bus.send(None, Order(1))
    expected = (ORDERS, {"id": 1, "customer": "nobody", "items": []})
    assert [each.events for each in handlers] == [[expected]] * 3
    assert received == [expected] * 2


def test_without_topics_all_unhandled_events_arrive(bus: Bus) -> None:
    """Scenario 59; 157.4.8."""
    left = Left().unhandled(bus)
    topics = ["a", "a/b", "x/y/z", "-"]
    bus.send_to(topics, {})
    assert left.topics == topics
    found = bus.state_of(left.registration)
    assert (found.kind, found.topics) == ("UnhandledEventHandler", ("*",))


@table("history", [3, 0, -1, "many"])
@own_bus
def test_a_handler_of_unhandled_events_that_asks_for_history_is_ignored(bus: Bus, history: Any) -> None:
    """Scenario 60; 157.4.8, 157.4.9: it is not for those. Aries drops its topics instead."""
    left = Left().unhandled(bus, "a", history=history)
    other = Left().unhandled(bus)
    bus.send_to(("a", "b"), {})
    assert left.events == []
    assert other.topics == ["a", "b"]
    assert "event.history is not for an UnhandledEventHandler" in bus.ignored(left.registration)
    left.registration.update(named("a"))
    bus.send("a", {})
    assert left.topics == ["a"]


def test_an_event_for_none_but_a_blocked_handler_is_unhandled(bus: Bus) -> None:
    """Scenario 62."""
    failing = Failing(ValueError("no")).untyped(bus, "a")
    left = Left().unhandled(bus)
    bus.send("a", *({"n": 0} for _ in range(10)))
    eventually(lambda: bus.blocked(failing.registration), "it is blocked")
    assert left.events == []
    bus.send("a", {"n": 1})
    assert left.of("n") == [1]
    failing.error = None
    failing.registration.update(named("a"))
    bus.send("a", {"n": 2})
    assert left.of("n") == [1]
    assert failing.of("n")[-1] == 2


def test_an_unhandled_event_may_be_published_elsewhere(bus: Bus) -> None:
    """To a topic without a handler: it comes back once, not for ever."""
    left: list[str] = []

    def handle(topic: str, event: dict[str, Any]) -> None:
        left.append(topic)
        if not topic.startswith("dead"):
            bus.deliver_untyped(f"dead/{topic}", event)

    bus.unhandled(handle)
    bus.deliver_untyped("a", {})
    eventually(lambda: left == ["a", "dead/a"], "it came back once")
    bus.drain()
    assert left == ["a", "dead/a"]


def test_without_any_handler_events_are_dropped(bus: Bus) -> None:
    """157.4.4."""
    for number in range(20_000):  # more than would wait anywhere
        bus.deliver_untyped("a", {"n": number})
    bus.drain()
    assert bus.get_dto().handlers == ()

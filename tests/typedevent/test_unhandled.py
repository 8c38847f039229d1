"""UnhandledEventHandler (157.4.4, 157.9.7): events that no other handler got."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messaging.typedevent import TypedEventBus, UnhandledEventHandler
from tests.typedevent.conftest import (
    ORDERS,
    Failing,
    Order,
    Recorder,
    blocked,
    eventually,
    flush,
    handler_of,
    ignored,
    named,
    send,
    send_to,
    state_of,
    typed,
    unhandled,
    untyped,
)


class Left(Recorder, UnhandledEventHandler):
    pass


def test_an_event_without_a_handler_goes_to_all_unhandled_handlers(bus: TypedEventBus) -> None:
    """Scenario 56; 157.4.4: topic and data in map form."""
    handlers = [Left() for _ in range(3)]
    received: list[Any] = []

    async def later(topic: str, event: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        received.append((topic, event))

    for each in handlers:
        unhandled(bus, each)
    unhandled(bus, later)
    unhandled(bus, lambda event: received.append((ORDERS, event)), ORDERS)
    send(bus, None, Order(1))
    expected = (ORDERS, {"id": 1, "customer": "nobody", "items": []})
    assert [each.events for each in handlers] == [[expected]] * 3
    assert received == [expected] * 2


def test_an_event_that_a_handler_received_is_not_unhandled(bus: TypedEventBus) -> None:
    """Scenario 57; 157.4.4: whether typed, untyped, by a pattern or with a filter."""
    left = Left()
    unhandled(bus, left)
    untyped(bus, Recorder(), "untyped")
    untyped(bus, Recorder(), "pattern/+")
    untyped(bus, Recorder(), "filter", filter="(n=1)")
    typed(bus, Recorder(), "typed", type=Order)
    for topic in ("untyped", "pattern/a", "filter", "typed"):
        bus.deliver_untyped(topic, {"id": 1, "n": 1})
    send(bus, "none", {})
    assert left.topics == ["none"]


def test_topics_and_filter_say_which_unhandled_events_arrive(bus: TypedEventBus) -> None:
    """Scenario 58; 157.4.8, 157.14: it must pass both."""
    by_topic, by_filter, by_both = Left(), Left(), Left()
    unhandled(bus, by_topic, ["a", "b/*"])
    unhandled(bus, by_filter, filter="(n=1)")
    unhandled(bus, by_both, "b/+", filter="(n=1)")
    for topic in ("a", "b/c", "c"):
        for number in (1, 2):
            bus.deliver_untyped(topic, {"n": number})
    flush(bus)
    assert by_topic.topics == ["a", "a", "b/c", "b/c"]
    assert by_filter.topics == ["a", "b/c", "c"]
    assert by_both.events == [("b/c", {"n": 1})]


def test_without_topics_all_unhandled_events_arrive(bus: TypedEventBus) -> None:
    """Scenario 59; 157.4.8."""
    left = Left()
    registration = unhandled(bus, left)
    topics = ["a", "a/b", "x/y/z", "-"]
    send_to(bus, topics, {})
    assert left.topics == topics
    found = state_of(bus, registration)
    assert (found.kind, found.topics) == ("UnhandledEventHandler", ("*",))


@pytest.mark.parametrize("history", [3, 0, -1, "many"])
def test_a_handler_of_unhandled_events_that_asks_for_history_is_ignored(
    bus: TypedEventBus, caplog: pytest.LogCaptureFixture, history: Any
) -> None:
    """Scenario 60; 157.4.8, 157.4.9: it is not for those. Aries drops its topics instead."""
    left, other = Left(), Left()
    registration = unhandled(bus, left, "a", history=history)
    unhandled(bus, other)
    send_to(bus, ("a", "b"), {})
    assert left.events == []
    assert other.topics == ["a", "b"]
    assert handler_of(bus, registration) is None
    assert "event.history is not for an UnhandledEventHandler" in ignored(caplog, registration)
    registration.update(named("a"))
    send(bus, "a", {})
    assert left.topics == ["a"]


def test_an_event_for_none_but_a_blocked_handler_is_unhandled(bus: TypedEventBus) -> None:
    """Scenario 62."""
    failing, left = Failing(ValueError("no")), Left()
    registration = untyped(bus, failing, "a")
    unhandled(bus, left)
    for _ in range(10):
        bus.deliver_untyped("a", {"n": 0})
    flush(bus)
    eventually(lambda: blocked(bus, registration), "it is blocked")
    assert left.events == []
    send(bus, "a", {"n": 1})
    assert left.of("n") == [1]
    failing.error = None
    registration.update(named("a"))
    send(bus, "a", {"n": 2})
    assert left.of("n") == [1]
    assert failing.of("n")[-1] == 2


def test_handlers_of_unhandled_events_are_blocked_like_others(bus: TypedEventBus) -> None:
    """157.4.6."""
    failing, left = Failing(ValueError("no")), Left()
    registration = unhandled(bus, failing)
    unhandled(bus, left)
    for number in range(12):
        send(bus, "a", {"n": number})
    assert blocked(bus, registration)
    assert failing.of("n") == [*range(10)]
    assert left.of("n") == [*range(12)]


def test_whether_an_event_is_unhandled_is_decided_for_each_event(bus: TypedEventBus) -> None:
    """157.4.4: it is looked up with each event."""
    handler, left = Recorder(), Left()
    unhandled(bus, left)
    for number in range(4):
        if number % 2:
            registration = untyped(bus, handler, "a")
        send(bus, "a", {"n": number})
        if number % 2:
            registration.unregister()
    assert left.of("n") == [0, 2]
    assert handler.of("n") == [1, 3]


def test_an_unhandled_event_may_be_published_elsewhere(bus: TypedEventBus) -> None:
    """To a topic without a handler: it comes back once, not for ever."""
    left: list[str] = []

    def handle(topic: str, event: dict[str, Any]) -> None:
        left.append(topic)
        if not topic.startswith("dead"):
            bus.deliver_untyped(f"dead/{topic}", event)

    unhandled(bus, handle)
    bus.deliver_untyped("a", {})
    eventually(lambda: left == ["a", "dead/a"], "it came back once")
    flush(bus)
    assert left == ["a", "dead/a"]


def test_without_any_handler_events_are_dropped(bus: TypedEventBus) -> None:
    """157.4.4."""
    for number in range(20_000):  # more than would wait anywhere
        bus.deliver_untyped("a", {"n": number})
    flush(bus)
    assert bus.get_dto().handlers == ()

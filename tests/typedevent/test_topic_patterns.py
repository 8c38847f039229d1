"""Topic patterns of handlers (157.4.3), and what changes when they are updated."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from messaging.services import ServiceRegistry
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from messaging.typedevent import RangePolicy, TypedEventHandler, UntypedEventHandler
from messaging.typedevent.event import PublishedEvent
from tests.dispatch.helpers import meanwhile
from tests.threads import in_background
from tests.typedevent.conftest import Bus, Gate, Recorder, in_threads, named, own_bus


@table(
    ("pattern", "matching", "others"),
    [
        # the examples of 157.4.3.1 and 157.4.3.2
        ("foo/+/foobar", ["foo/bar/foobar", "foo/baz/foobar"], ["foo/foobar", "foo/bar/foobar/baz"]),
        ("foo/*", ["foo/bar", "foo/baz", "foo/bar/baz"], ["foo", "foo-bar/fizzbuzz", "foo-bar/x"]),
        ("+", ["a", "foo", "-"], ["a/b", "foo/bar"]),
        ("*", ["a", "a/b", "a/b/c"], []),
        ("+/*", ["a/b", "a/b/c"], ["a"]),
        ("+/+", ["a/b"], ["a", "a/b/c"]),
        ("a/+/*", ["a/b/c", "a/b/c/d"], ["a", "a/b", "b/b/c"]),
        ("+/b/+", ["a/b/c"], ["a/c/c", "a/b", "a/b/c/d"]),
        ("a/b", ["a/b"], ["a", "a/b/c", "A/b", "a/bb", "a-b"]),
        ("a/+", ["a/b", "a/$", "a/é"], ["a", "a/b/c", "ab"]),
    ],
)
@own_bus
def test_a_pattern_matches_as_the_specification_says(
    bus: Bus, pattern: str, matching: list[str], others: list[str]
) -> None:
    """Scenario 44; 157.4.3.1, 157.4.3.2: for handlers of all kinds."""
    handlers = [Recorder(), Recorder(), Recorder()]
    bus.untyped(handlers[0], pattern)
    bus.typed(handlers[1], [pattern], type=dict[str, int])
    bus.untyped(handlers[2], pattern, filter="(n=1)")
    left = Recorder().unhandled(bus, pattern)
    bus.send_to((*others, *matching), {"n": 1})
    assert [each.topics for each in handlers] == [matching] * 3
    assert left.topics == []
    for each in bus.get_dto().handlers:
        if each.kind != "UnhandledEventHandler":
            assert each.topics == (pattern,)


# --- updates


@pytest.mark.parametrize("is_recorded", [False, True], ids=["unrecorded", "recorded"])
def test_updates_lose_and_double_nothing_of_the_topics_that_stay(services: ServiceRegistry, is_recorded: bool) -> None:
    """Scenario 45: while four threads publish."""
    history = {"kept/*": RangePolicy.at_most(1)} if is_recorded else {}
    with Bus(services, history=history) as bus:
        handlers: list[tuple[Recorder, list[dict[str, Any]]]] = [
            (Recorder(), [named(["kept/*", "a"]), named(["b", "kept/*"]), named(["kept/*", "kept/+"], ranking=3)]),
            (Recorder(), [named(["*", "kept/x"]), named("kept/+"), named(["kept/*"], filter="(n>=0)"), named("+/+")]),
            (Recorder(), [named("kept/*", filter=each) for each in ("(n>=0)", "(n=*)", "", "(!(n<=-1))")]),
            (Recorder(), [named("kept/*", type=each) for each in (dict[str, int], dict[str, Any])]),
        ]
        left = Recorder().unhandled(bus, "kept/*")
        registrations = [
            services.register(
                TypedEventHandler if "event.type" in properties[0] else UntypedEventHandler, handler, properties[0]
            )
            for handler, properties in handlers
        ]
        rounds = 0
        published = [0] * 4

        def update(_: int) -> None:
            nonlocal rounds
            rounds += 1
            for registration, (_, properties) in zip(registrations, handlers, strict=True):
                registration.update(properties[rounds % len(properties)])

        def publish(thread: int) -> None:
            while rounds < 100 or published[thread] < 1_000:
                bus.deliver_untyped(f"kept/{thread}", {"n": published[thread]})
                bus.deliver_untyped("a", {"n": 0})
                published[thread] += 1
                os.sched_yield()  # the one that updates has to come in between

        with meanwhile(update, [0]):
            in_threads(4, publish)
        bus.drain()
        for handler, _ in handlers:
            for thread in range(4):
                received = [event["n"] for topic, event in handler.events if topic == f"kept/{thread}"]
                assert received == [*range(published[thread])]
        assert left.events == []


def test_routing_sees_an_update_completely_or_not_at_all(bus: Bus) -> None:
    """Scenario 45: a handler may have a topic by one pattern before it, and by another one after it."""
    handler = Recorder().untyped(bus, "nothing")
    begun: waiting.Recorder[str] = waiting.Recorder()
    with bus.dispatcher.lock:  # within an update
        join = in_background(lambda: (begun.append("a/b"), bus.deliver_untyped("a/b", {})))
        begun.wait_for(1)
        handler.registration.update(named("a/*"))
    join()
    bus.drain()
    assert handler.topics == ["a/b"]


@table("kind", ["untyped", "unhandled"])
def test_a_filter_counts_for_the_topics_that_it_was_registered_with(bus: Bus, kind: str) -> None:
    """As above: an event never meets the topics of one registration with the filter of the other."""
    handler = getattr(Recorder(), kind)(bus, "a", filter="(n=2)")
    route = bus.dispatcher.route("a")
    handler.registration.update(named("b"))  # by another thread, while this one publishes
    assert [len(route.lanes_for(PublishedEvent("a", {"n": n}))) for n in (0, 2)] == [0, 1]


def test_an_update_that_is_wrong_ends_the_handler_and_one_that_is_right_begins_it_again(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """157.4.9."""
    handler = Recorder().untyped(bus, "a")
    wrong: list[dict[str, Any]] = [
        named("a*"),
        named("a", filter="(n=1"),
        named("a", history=-1),
        named("a", timeout="long"),
        named("a", principal=5),
    ]
    for number, properties in enumerate(wrong):
        handler.registration.update(properties)
        assert bus.handler_of(handler.registration) is None
        bus.deliver_untyped("a", {"n": 2 * number})
        assert len([each for each in caplog.messages if "is ignored" in each]) == number + 1
        handler.registration.update(named("a"))
        bus.deliver_untyped("a", {"n": 2 * number + 1})
        bus.drain()  # what waits for a handler that is ignored from now on is not delivered
    assert handler.of("n") == [1, 3, 5, 7, 9]


def test_pending_events_are_delivered_after_an_update(bus: Bus) -> None:
    """Scenario 45: also of topics that it has no more; it was published before."""
    gate = Gate().untyped(bus, ["a", "b"])
    bus.numbered(*(f"{'ab'[number % 2]} {number}" for number in range(10)))
    gate.registration.update(named("b"))
    bus.numbered("a 10", "b 11")
    gate.opened.set()
    bus.drain()
    assert gate.of("n") == [*range(10), 11]


# --- nothing is left


def nodes(bus: Bus) -> int:
    return len(bus.dispatcher._trie)


def test_ten_thousand_handlers_that_came_and_went_leave_nothing(bus: Bus) -> None:
    """Scenario 46: neither patterns nor routes, handlers or threads."""
    other = Recorder().untyped(bus, "stays/+/*")
    size, threads = nodes(bus), threading.active_count()
    patterns: list[Callable[[int], Any]] = [
        lambda number: f"a/{number % 500}/*",
        lambda number: [f"a/+/{number % 100}", "a/*", "+", "*"],
        lambda number: f"{number % 500}/+/b/+/*",
        lambda number: f"a/b/c/{number % 7}",
        lambda number: ["stays/+/*", f"stays/{number % 500}/b"],
    ]
    handler = Recorder()
    for number in range(10_000):
        registration = bus.untyped(handler, patterns[number % 5](number))
        if number % 10 == 0:
            bus.deliver_untyped(f"a/{number}/x", {})
        if number % 10 == 1:
            registration.update(named(patterns[number % 4](number)))
        registration.unregister()
    bus.drain()
    assert nodes(bus) == size
    assert len(bus.get_dto().handlers) == 1
    assert bus.dispatcher.routes == {}
    assert threading.active_count() <= threads + 3
    bus.send("stays/a/b", {})
    assert other.topics == ["stays/a/b"]


def test_handlers_that_went_are_forgotten(bus: Bus) -> None:
    handlers = [Recorder() for _ in range(5)]
    registrations = [bus.untyped(each, "a/*") for each in handlers]
    bus.send("a/b", {})
    gone = [weakref.ref(each) for each in handlers]
    for registration in registrations:
        registration.unregister()
    del handlers, registrations, registration

    # a delivery thread may have the last one in its hands for a moment
    eventually(lambda: gc.collect() >= 0 and not any(each() for each in gone), "all are gone")
    assert nodes(bus) == 0

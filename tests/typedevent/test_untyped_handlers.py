"""UntypedEventHandler (157.4.2, 157.9.8): nested maps, on the topics it asks for."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import OrderedDict, deque
from typing import Any

import pytest

from messaging.errors import ArgumentError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from messaging.typedevent import RangePolicy, UntypedEventHandler
from tests.dispatch.helpers import Stubborn
from tests.typedevent.conftest import ORDERS, Bus, Gate, Order, Recorder, coroutine_of, named, own_bus, untyped


class Handler(Recorder, UntypedEventHandler):
    pass


# --- topics


def test_without_topics_a_handler_gets_nothing_not_even_of_the_history(services: ServiceRegistry) -> None:
    """Scenario 37; 157.4.2."""
    with Bus(services, history={"*": RangePolicy.unlimited()}) as bus:
        before = Handler().untyped(bus)
        left = Recorder().unhandled(bus)
        bus.deliver_untyped("a", {"n": 1})
        bus.deliver(Order(1))
        after = Handler().untyped(bus, history=10)
        bus.send("a", {"n": 2})
        assert before.events == after.events == []
        assert left.topics == ["a", ORDERS, "a"]  # nor does it count as a handler of them


def test_topics_may_be_given_and_taken_away_by_updates(bus: Bus) -> None:
    """157.4.2: as long as there are none, nothing arrives."""
    handler = Handler().untyped(bus)
    for number, properties in enumerate(({}, named("a"), {}, named(["a", "b"]), named([]), named("a"))):
        handler.registration.update(properties)
        bus.send("a", {"n": number})
    assert handler.of("n") == [1, 3, 5]


@table(
    "topics",
    [
        *(kind(("foo", "bar")) for kind in (list, tuple, set, frozenset, deque)),
        dict.fromkeys(("foo", "bar")).keys(),
        ["foo", "bar", "foo"],
        "foo",  # not a list of its letters
    ],
)
@own_bus
def test_topics_may_be_in_any_collection(bus: Bus, topics: Any) -> None:
    """Scenario 40; 157.4.8: String+. A single text is a list of one topic."""
    handler = Handler().untyped(bus, topics)
    bus.send_to(("foo", "f", "o", "bar", "baz"), {})
    assert handler.topics == (["foo"] if topics == "foo" else ["foo", "bar"])


# --- the type


def test_event_type_is_not_for_untyped_handlers(bus: Bus) -> None:
    """Scenario 38; 157.4.8: forbidden, and what follows is not said. It is ignored, which is logged."""
    handler = Handler().untyped(bus, "a", type=Order)
    left = Recorder().unhandled(bus, "b", type="no.such.Class")
    bus.send_to(("a", "b"), {"id": "1"})
    assert handler.data == left.data == [{"id": "1"}]
    assert bus.logged("event.type is not for an UntypedEventHandler", "Handler")
    assert bus.logged("event.type is not for an UnhandledEventHandler", "Recorder")


class Text(str):
    __slots__ = ()


def test_a_typed_event_arrives_as_a_map_and_an_untyped_one_as_a_plain_dict(bus: Bus) -> None:
    """157.4.2, 157.2.4.2, 157.9.8.1."""
    handler = Handler().untyped(bus, "a/*")
    bus.send(Text("a/b"), Order(1), OrderedDict(x=1, y=OrderedDict(z=2)))
    expected = [{"id": 1, "customer": "nobody", "items": []}, {"x": 1, "y": {"z": 2}}]
    assert handler.events == [("a/b", each) for each in expected]
    assert [type(each) for each in (*handler.data, handler.data[1]["y"])] == [dict] * 3


# --- kinds of handlers


class Duck:
    def __init__(self, to: Recorder) -> None:
        self._to = to

    def notify_untyped(self, topic: str, event: dict[str, Any]) -> None:
        self._to.notify(topic, event)

    def with_prefix(self, prefix: str, topic: str, event: Any) -> None:
        self._to.notify(topic, event)


class AsyncDuck(Duck):
    async def notify_untyped(self, topic: str, event: dict[str, Any]) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._to.notify(topic, event)


class Callable(Duck):
    notify_untyped = None  # type: ignore[assignment]

    def __call__(self, event: Any) -> None:
        self._to.notify("a", event)


class AsyncCallable(Callable):
    async def __call__(self, *arguments: Any) -> None:
        await asyncio.sleep(0)
        self._to.notify(*arguments)


class Anything(Duck):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


KINDS: dict[str, Any] = {
    **{each.__name__: each for each in (Duck, AsyncDuck, Callable, AsyncCallable, Anything)},
    "event": lambda to: lambda event: to.notify("a", event),
    "topic and event": lambda to: lambda topic, event: to.notify(topic, event),
    "arguments": lambda to: lambda *arguments: to.notify(*arguments),
    "partial": lambda to: functools.partial(Duck(to).with_prefix, "e"),
    "partial coroutine": lambda to: functools.partial(AsyncDuck(to).notify_untyped, "a"),
    # not a coroutine function, but does what one does
    "returns an awaitable": lambda to: lambda event: AsyncDuck(to).notify_untyped("a", event),
}


@table("make", KINDS)
@own_bus
def test_objects_and_functions_of_all_kinds_are_handlers(bus: Bus, make: Any) -> None:
    """157.4.2."""
    received = Recorder()
    handler = make(received)
    registration = bus.untyped(handler, "a")
    bus.send_each(range(20))
    assert received.events == [("a", {"n": number}) for number in range(20)]
    assert not isinstance(handler, Duck) or type(handler).__name__ in bus.state_of(registration).name


def test_functions_of_c_and_those_with_more_arguments_are_handlers(bus: Bus) -> None:
    received: dict[str, list[Any]] = {"of C": [], "the event alone": []}
    bus.untyped(received["of C"].append, "a")
    bus.untyped(lambda topic, *events: received["the event alone"].append(topic), "a")  # as without the rest
    bus.send("a", {"n": 1})
    assert received == {"of C": [{"n": 1}], "the event alone": [{"n": 1}]}


def test_an_awaitable_result_of_a_handler_is_awaited_before_the_next_event(bus: Bus) -> None:
    """From whatever function."""
    log: list[str] = []

    async def work(number: int) -> None:
        log.append(f"begin {number}")
        for _ in range(10):
            await asyncio.sleep(0)
        log.append(f"end {number}")

    bus.untyped(lambda event: work(event["n"]), "a")
    bus.send_each(range(3))
    assert log == [f"{what} {number}" for number in range(3) for what in ("begin", "end")]


def test_other_results_of_a_handler_are_ignored(bus: Bus) -> None:
    received: list[Any] = []
    for value in (5, [1], "text", object(), iter(())):

        def handle(event: Any, value: Any = value) -> Any:
            received.append(event)
            return value

        bus.untyped(handle, "a")
    bus.send("a", {})
    assert len(received) == 5
    assert not bus.logged()


async def agen(event: Any) -> Any:
    yield event


@table(
    "handler",
    [
        lambda: None,
        agen,
        lambda a, b, c: None,
        lambda a, *, b: None,
        5,
        "text",
        object(),
        type("NoArguments", (), {"__init__": lambda self: None}),
        lambda event: (yield event),
        type("NoMethod", (), {"handle_event": lambda self, event: None})(),
        type("Attribute", (), {"notify": 5, "notify_untyped": 5})(),
        type("Generator", (), dict.fromkeys(("notify", "notify_untyped"), lambda self, topic, event: (yield)))(),
        # without a signature, as some functions of C are: its parameters are unknown
        type("NoSignature", (), {"__signature__": 5, "__call__": lambda *_: None})(),
    ],
)
@own_bus
def test_an_object_that_cannot_be_called_with_topic_and_event_is_refused_and_in_the_registry_ignored_and_logged(
    bus: Bus, handler: Any
) -> None:
    """Calling a generator does nothing; without the error the mistake would stay hidden."""
    for registration in (bus.untyped(handler, "a"), bus.typed(handler, "a", type=Order)):
        bus.ignored(registration)
    for call in (bus.on, bus.on_unhandled):
        with pytest.raises(ArgumentError):
            call("a", handler=handler)  # type: ignore[operator]
    bus.send("a", Order(1))
    assert bus.get_dto().handlers == ()


# --- on event loops


def test_a_coroutine_that_was_there_before_the_bus_runs_on_the_loop_that_the_bus_was_opened_on(
    services: ServiceRegistry,
) -> None:
    """The registry does not keep on which one it was registered."""
    threads: set[int] = set()

    async def handle(event: Any) -> None:
        threads.add(threading.get_ident())

    untyped(services, handle, "a")

    async def main() -> None:
        async with Bus(services) as bus:
            bus.deliver_untyped("a", {})

    asyncio.run(main())
    assert threads == {threading.get_ident()}


def test_a_coroutine_gets_one_event_at_a_time_in_order(bus: Bus) -> None:
    """157.3.3."""
    log: list[tuple[str, int]] = []

    async def handle(event: dict[str, Any]) -> None:
        log.append(("begin", event["n"]))
        for _ in range(event["n"] % 4):
            await asyncio.sleep(0)
        log.append(("end", event["n"]))

    bus.untyped(handle, "a")
    bus.send_each(range(50))
    assert log == [(what, number) for number in range(50) for what in ("begin", "end")]


def test_coroutines_do_not_wait_for_each_other(bus: Bus) -> None:
    """Scenario 12, on one loop."""
    slow, fast = Stubborn(), Recorder()
    bus.untyped(slow, "a")
    bus.untyped(coroutine_of(fast), "a")
    bus.count(range(100))
    fast.events.wait_for(100)
    assert len(slow.events) == 1
    slow.open()
    bus.drain()


# --- coming and going


def test_pending_events_of_an_unregistered_handler_are_not_delivered(bus: Bus) -> None:
    """OSGi core 5.4: who has unregistered a service need not expect calls of it, but for the one in progress."""
    gate = Gate().untyped(bus, "a")
    other = Recorder().untyped(bus, "a")
    bus.count(range(100))
    gate.wait()
    lane = bus.dispatcher.handlers()[0][1].lane
    gate.registration.unregister()
    bus.deliver_untyped("a", {"n": 100})
    gate.opened.set()
    bus.drain()
    eventually(lambda: not lane.is_scheduled, "no thread will come any more")
    assert gate.of("n") == [0]
    assert other.of("n") == [*range(101)]


def test_a_handler_may_unregister_itself_and_others_and_register_others(bus: Bus) -> None:
    added = Recorder()

    def handle(topic: str, event: dict[str, Any]) -> None:
        victim.registration.unregister()
        bus.untyped(added, "b")
        registration.unregister()

    victim = Recorder().untyped(bus, "b")
    registration = bus.untyped(handle, "a")
    bus.send("b", {"n": 0})
    bus.count(range(5))
    bus.drain()
    bus.send("b", {"n": 1})
    assert victim.of("n") == [0]
    assert added.of("n") == [1]


def test_a_handler_may_be_registered_again_while_it_has_an_event(bus: Bus) -> None:
    """One service registered twice is two handlers."""
    gate = Gate().untyped(bus, "a")
    bus.deliver_untyped("a", {"n": 0})
    gate.wait()
    gate.registration.unregister()
    for _ in range(2):
        bus.untyped(gate, "a")
    bus.deliver_untyped("a", {"n": 1})
    gate.events.wait_for(3)  # other registrations: they do not wait for the first
    gate.opened.set()
    bus.drain()
    assert gate.of("n") == [0, 1, 1]

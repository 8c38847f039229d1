"""Publishing (157.3): which events are accepted, which handlers they reach, and in which order."""

from __future__ import annotations

import functools
import re
import threading
import types
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import pytest
from pydantic import BaseModel, SecretStr

from messaging.dispatch import dispatcher
from messaging.errors import ArgumentError, InvalidEventError, InvalidTopicError, NullEventError
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from messaging.typedevent import MonitorEvent, topic_of
from tests.dispatch.helpers import FILTERS, NEITHER, TOPICS
from tests.typedevent.conftest import ORDERS, Bus, Gate, Item, Order, Recorder, own_bus


class Outer:
    @dataclass
    class Inner:
        x: int = 0


class Watcher:
    """All observers of an event: a handler, a handler of unhandled events, and a monitor."""

    def __init__(self, bus: Bus) -> None:
        self.handler, self.unhandled = Recorder(), Recorder()
        self.monitored: list[MonitorEvent] = []
        self._bus = bus
        bus.untyped(self.handler, ["seen/*"])
        bus.unhandled(self.unhandled)
        bus.monitor.monitor_events().subscribe(self.monitored.append)

    def saw_nothing(self) -> bool:
        """Return whether an event published now is the first that each of them sees."""
        self._bus.deliver_untyped("seen/last", {"x": 1})
        self._bus.deliver_untyped("last", {"x": 1})
        self._bus.drain()
        eventually(lambda: self.monitored and self.monitored[-1].topic == "last", "the monitor has seen the last event")
        return (
            self.handler.topics == ["seen/last"]
            and self.unhandled.topics == ["last"]
            and [each.topic for each in self.monitored] == ["seen/last", "last"]
        )


# --- refused events


class Broken(Mapping[str, Any]):
    """Raises while it is copied."""

    def __getitem__(self, key: str) -> Any:
        raise LookupError(key)

    def __iter__(self) -> Any:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


ODD = [object(), threading.Lock(), len, lambda: 1, iter([]), (each for each in ()), ValueError(), re, SecretStr("a")]


def _endless() -> dict[str, Any]:
    event: dict[str, Any] = {"a": {}}
    event["a"]["b"] = event
    return event


def _endless_list() -> list[Any]:
    part: list[Any] = [{}]
    part[0]["b"] = part
    return part


TYPES: Final = [
    *(5, "a", b"a", 1.5, True, [1], ("a", 1), {"a"}, datetime.now(UTC), Order, object(), ValueError("no"), re.ASCII),
]
UNTYPED: Final = [
    ({5: 1}, "the keys of an event are str: in the event there is a int$"),
    ({None: 1}, "the keys of an event are str: in the event there is a NoneType$"),
    ({"a": {"b": [{b"c": 1}]}}, r"the keys of an event are str: in a.b\[0\] there is a bytes$"),
    ({"a": UserDict({("b",): 1})}, "the keys of an event are str: in a there is a tuple$"),
    ({"a": Order(1)}, "no instances of schemas in it: a is a Order$"),
    ({"a": [{"b": Order(1)}]}, r"no instances of schemas in it: a\[0\]\.b is a Order$"),
    *(({"a": [(odd,)]}, rf"nothing like this in it: a\[0\]\[0\] is a {type(odd).__name__}$") for odd in ODD),
    (_endless(), "must be a tree: a.b is a part of itself$"),
    ({"a": _endless_list()}, r"must be a tree: a\[0\].b is a part of itself$"),
]
OTHER_TOPICS: Final = [5, b"a", ["a"], {"a": 1}, Order(1), object()]


@table(
    "event, topics, error, says",
    [
        (None, ["seen/a", None], NullEventError, ""),
        # wildcards are for handlers
        *((Order(1), [topic], InvalidTopicError, "") for topic in (*NEITHER, *FILTERS)),
        *((Order(1), [topic], InvalidTopicError, "must be a str") for topic in OTHER_TOPICS),
        *((event, ["seen/a", None], InvalidEventError, type(event).__name__) for event in TYPES),
        # whether the topic is observed or not
        *((event, ["seen/a", "other"], InvalidEventError, says) for event, says in UNTYPED),
        *((event, ["seen/a"], InvalidEventError, "LookupError") for event in (Broken(), {"nested": Broken()})),
    ],
)
@own_bus
def test_an_event_or_topic_that_cannot_be_is_refused_in_the_caller_and_no_handler_is_notified(
    bus: Bus, event: Any, topics: list[Any], error: type[Exception], says: str
) -> None:
    """Scenarios 1, 2 and 4; 157.2.1, 157.2.2, 157.3.1, 157.5.1: publishing raises only argument errors."""

    def refuse(topic: Any) -> None:
        untyped = {"x": 1} if isinstance(event, Order) else event
        calls: list[Callable[[], None]] = [functools.partial(bus.deliver, event, topic)]
        if topic is not None or event is None:  # of an untyped event no topic can be made, which is another error
            calls.append(functools.partial(bus.deliver_untyped, topic, untyped))
        for call in calls:
            with pytest.raises(error, match=says or None) as raised:
                call()
            assert isinstance(raised.value, ArgumentError)
            assert isinstance(raised.value, TypeError) is (error is NullEventError)
            if isinstance(raised.value, InvalidTopicError):
                assert raised.value.topic == topic

    for topic in topics:
        refuse(topic)
    watcher = Watcher(bus)
    for topic in topics:
        refuse(topic)
    assert watcher.saw_nothing()


def test_no_topic_is_refused_where_none_can_be_made(bus: Bus) -> None:
    """Scenario 3. Of a typed event one can be made: ``deliver(event, None)`` is ``deliver(event)`` (157.3.2)."""
    received = Recorder().untyped(bus, "*")
    with pytest.raises(NullEventError, match="topic"):
        bus.deliver_untyped(None, {"x": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidEventError, match="no class that a topic can be made of"):
        bus.deliver({"x": 1})
    bus.deliver(Order(1), None)
    bus.drain()
    assert received.topics == [ORDERS]


def test_letters_and_digits_of_java_may_be_in_a_topic(bus: Bus) -> None:
    """157.3.1."""
    for topic in TOPICS:
        received = Recorder().untyped(bus, topic)
        bus.deliver_untyped(topic, {"x": 1})
        bus.send(topic, Order(1))
        assert received.topics == [topic, topic]


# --- where it goes


def test_without_topic_an_event_goes_to_the_one_of_its_class_name(bus: Bus) -> None:
    """Scenario 5; 157.3.2: full stops become solidi; of nested classes, too."""
    received = Recorder().untyped(bus, "*")
    bus.deliver(Order(1))
    bus.send(None, Outer.Inner())
    assert received.topics == [ORDERS, f"{__name__.replace('.', '/')}/Outer/Inner"]
    assert topic_of(Outer.Inner) == received.topics[1]


def test_a_class_name_that_is_no_topic_is_refused_and_no_handler_is_notified(bus: Bus) -> None:
    """Scenario 5: not dropped without a word."""

    @dataclass
    class Local:
        x: int = 0

    watcher = Watcher(bus)
    with pytest.raises(InvalidTopicError, match="no topic can be made of the name"):
        bus.deliver(Local())
    assert watcher.saw_nothing()
    bus.send("seen/a", Local())
    assert watcher.handler.data[-1] == {"x": 0}


def test_without_topic_an_instance_of_a_subclass_goes_to_the_topic_of_the_subclass(bus: Bus) -> None:
    """157.3.2: of the class of the event object."""

    class Special(Outer.Inner):
        pass

    Special.__qualname__ = "Special"
    received = Recorder().typed(bus, type=Special)
    others = Recorder().typed(bus, type=Outer.Inner)
    event = Special()
    bus.deliver(event)
    bus.drain()
    assert received.data == [event]
    assert others.data == []


class Model(BaseModel):
    x: int
    items: list[Item] = []


class Tuple(NamedTuple):
    x: int
    items: tuple[Item, ...] = ()


class Plain:
    x: int
    items: list[Item]

    def __init__(self, x: int) -> None:
        self.x = x
        self.items = []


@table("event", [Model(x=1), Tuple(1), Plain(1)], ids=lambda each: type(each).__name__)
@own_bus
def test_any_class_with_fields_makes_typed_events(bus: Bus, event: Any) -> None:
    """157.2.1, 157.3.2."""
    as_map = Recorder().untyped(bus, topic_of(type(event)))
    as_it_is = Recorder().typed(bus, type=type(event))
    bus.deliver(event)
    bus.drain()
    assert as_map.data == [{"x": 1, "items": []}]
    assert as_it_is.data == [event]


def test_a_mapping_is_published_untyped_by_deliver_too(bus: Bus) -> None:
    received = Recorder().untyped(bus, "a")
    source = {"x": {"y": [1, 2]}}
    bus.deliver(source, "a")
    bus.deliver(types.MappingProxyType(source), "a")
    source["x"]["y"].append(3)
    bus.drain()
    assert received.data == [{"x": {"y": [1, 2]}}] * 2


def test_an_untyped_event_arrives_as_an_equal_copy(bus: Bus) -> None:
    """Scenario 14; 157.2.4.2: later changes of the source are not visible."""
    received = Recorder().untyped(bus, "a")
    source: dict[str, Any] = {"text": "é", "n": None, "nested": {"list": [1, {"deep": 2.5}], "bytes": b"\0"}, "": True}
    expected = {"text": "é", "n": None, "nested": {"list": [1, {"deep": 2.5}], "bytes": b"\0"}, "": True}
    gate = Gate().untyped(bus, "a", ranking=1)
    bus.deliver_untyped("a", source)
    source["nested"]["list"][1]["deep"] = "changed"
    source["more"] = 1
    gate.opened.set()
    bus.drain()
    assert received.data == gate.data == [expected]
    assert type(received.data[0]) is dict


def test_handlers_share_one_event_object(bus: Bus) -> None:
    """Scenario 14; 157.2.4.2: it is shared, and copies are not promised. Handlers are not to change it."""
    order, first, second = Order(1), Recorder(), Recorder()
    for each in (first, second):
        bus.untyped(each, "a")
        bus.typed(each, "b", type=Order)
    bus.deliver_untyped("a", {"x": 1})
    bus.deliver(order, "b")
    bus.drain()
    assert first.data[0] is second.data[0]
    assert first.data[1] is second.data[1] is order  # as it was published, too (scenario 36)


def test_topics_are_remembered_up_to_a_bound(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_ROUTES", 1_000)
    received = Recorder().untyped(bus, "*")
    for number in range(3_500):
        bus.deliver_untyped(f"a/{number}", {})
        assert len(bus.dispatcher.routes) <= 1_000
    bus.drain()
    assert len(received.topics) == 3_500


# --- asynchronously


def test_delivering_returns_before_the_handler_does(bus: Bus) -> None:
    """Scenario 7; 157.3, 157.9.3.5: asynchronous."""
    gate = Gate().untyped(bus, "a")
    bus.deliver_untyped("a", {"n": 1})
    gate.wait()  # it has begun
    bus.deliver_untyped("a", {"n": 2})
    assert gate.of("n") == [1]
    gate.opened.set()
    bus.drain()
    assert gate.of("n") == [1, 2]


def test_handlers_are_not_called_on_the_thread_that_publishes(bus: Bus) -> None:
    """157.3."""
    threads: list[int] = []
    bus.untyped(lambda topic, event: threads.append(threading.get_ident()), "a")
    bus.send("a", {})
    assert threads != [threading.get_ident()]


def test_a_handler_may_publish_and_gets_that_after_the_event_it_is_at(bus: Bus) -> None:
    """Scenario 11."""
    log: list[str] = []

    def handle(topic: str, event: dict[str, Any]) -> None:
        log.append(f"begin {event['n']}")
        if event["n"] < 5:
            bus.deliver_untyped(topic, {"n": event["n"] + 1})
        log.append(f"end {event['n']}")

    async def handle_async(topic: str, event: dict[str, Any]) -> None:
        handle(topic, event)

    for each in (handle, handle_async):
        registration = bus.untyped(each, "a")
        log.clear()
        bus.deliver_untyped("a", {"n": 0})
        eventually(lambda: "end 5" in log, "all were handled")
        assert log == [f"{what} {number}" for number in range(6) for what in ("begin", "end")]
        registration.unregister()


def test_a_slow_handler_holds_up_no_other(bus: Bus) -> None:
    """Scenario 12: Aries has one thread for all."""
    slow = [Gate() for _ in range(3)]
    for each in slow:
        bus.untyped(each, "a")
    fast = Recorder().untyped(bus, "a")
    bus.count(range(200))
    eventually(lambda: len(fast.events) == 200, "the fast one has all")
    assert [each.of("n") for each in slow] == [[0]] * 3
    late = Recorder().untyped(bus, "a")
    bus.deliver_untyped("a", {"n": 200})
    eventually(lambda: len(late.events) == 1, "one that came later has the next one")
    for each in slow:
        each.opened.set()
    bus.drain()
    assert [each.of("n") for each in slow] == [[*range(201)]] * 3
    assert fast.registration.unregister()

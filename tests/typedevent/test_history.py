"""The history of events (157.6.2, 157.11.3, 157.11.4): policies, room, precedence, eviction."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from reactivex import operators as ops

from messaging.errors import ArgumentError, ClosedError, HistoryFullError, InvalidTopicError, NullEventError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from messaging.typedevent import MonitorEvent, RangePolicy, TypedEventBus
from messaging.typedevent.history import UNLIMITED
from tests.dispatch.helpers import FILTERS, NEITHER
from tests.typedevent.conftest import Bus

Make = Callable[..., Bus]


@pytest.fixture
def make_bus() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(capacity: int = 10_000, **policies: Any) -> Bus:
            return stack.enter_context(Bus(ServiceRegistry(), history_capacity=capacity, **policies))

        yield make


def recorded(bus: Bus) -> list[str]:
    """What the history has, the oldest first, as ``Bus.numbered`` takes it."""
    found: Future[list[MonitorEvent]] = Future()
    bus.monitor.monitor_events(UNLIMITED, True).pipe(ops.to_list()).subscribe(found.set_result, found.set_exception)
    return [f"{event.topic} {event.event_data['n']}" for event in found.result(PATIENCE)]


# --- range policies (157.11.3)


@table(
    ("policy", "minimum", "maximum"),
    [
        (RangePolicy.range(2, 5), 2, 5),
        (RangePolicy.exact(3), 3, 3),
        (RangePolicy.at_least(2), 2, UNLIMITED),
        (RangePolicy.at_most(5), 0, 5),
        (RangePolicy.none(), 0, 0),
        (RangePolicy.unlimited(), 0, UNLIMITED),
    ],
)
def test_each_policy_is_equivalent_to_the_range_that_its_name_says(
    policy: RangePolicy, minimum: int, maximum: int
) -> None:
    """157.11.3.1 to 157.11.3.8."""
    assert (policy.minimum, policy.maximum) == (minimum, maximum)
    assert policy == RangePolicy.range(minimum, maximum) == RangePolicy(minimum, maximum)
    assert hash(policy) == hash(RangePolicy(minimum, maximum))


@table("number", [-1, 1.0, "1", None, True])
def test_a_range_with_anything_but_an_int_of_at_least_zero_is_invalid(number: Any) -> None:
    """157.6.2.2."""
    for factory in (RangePolicy.exact, RangePolicy.at_least, RangePolicy.at_most):
        with pytest.raises(ArgumentError, match="must be an int of at least 0"):
            factory(number)
    with pytest.raises(ArgumentError):
        RangePolicy.range(number, 5)
    with pytest.raises(ArgumentError):
        RangePolicy.range(0, number)


def test_a_minimum_greater_than_the_maximum_is_invalid() -> None:
    """157.6.2.2."""
    with pytest.raises(ArgumentError, match=r"the minimum of a RangePolicy, 2, is more than its maximum, 1"):
        RangePolicy.range(2, 1)
    assert RangePolicy.range(2, 2) == RangePolicy.exact(2)


def test_a_policy_never_changes() -> None:
    """157.11.3: thread safe."""
    policy = RangePolicy.exact(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.minimum = 0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(policy)) == policy


# --- how much there is room for (157.6.2.1, 157.11.4.5)


@table("capacity", [-1, 0, 1, 500])
def test_the_maximum_storage_is_the_capacity_of_the_bus(make_bus: Make, capacity: int) -> None:
    """157.6.2.1, 157.11.4.5: -1 if there is no limit, 0 if there is no history."""
    bus = make_bus(capacity)
    assert bus.monitor.get_maximum_event_storage() == bus.get_dto().capacity == capacity


def test_a_bus_can_be_made_with_policies(make_bus: Make) -> None:
    bus = make_bus(history={"a/*": RangePolicy.at_most(2), "a/b": RangePolicy.exact(1)})
    assert bus.monitor.get_configured_history_storage() == {"a/b": RangePolicy.exact(1), "a/*": RangePolicy.at_most(2)}
    bus.numbered("a/b 1", "a/b 2", "a/c 3", "a/c 4", "a/c 5")
    assert recorded(bus) == ["a/b 2", "a/c 4", "a/c 5"]


@table(
    ("policies", "error"),
    [
        ({"a": RangePolicy.exact(2), "b": RangePolicy.exact(2)}, HistoryFullError),
        ({"a/*": RangePolicy.exact(1)}, ArgumentError),
        ({"a//b": RangePolicy.none()}, InvalidTopicError),
        ({"a": (0, 1)}, ArgumentError),
    ],
)
def test_a_bus_that_cannot_have_its_policies_is_not_there(policies: Any, error: type[Exception]) -> None:
    registry = ServiceRegistry()
    with pytest.raises(error):
        TypedEventBus(registry, history=policies, history_capacity=3)
    assert registry.find() == []


# --- configuring (157.6.2.2, 157.11.4.1)


@table("call", ["configure", "get", "remove", "effective"])
def test_no_topic_and_an_invalid_one_are_refused_by_every_method(make_bus: Make, call: str) -> None:
    """157.11.4.1, 157.11.4.3, 157.11.4.4, 157.11.4.11: ``NullPointerException`` and ``IllegalArgumentException``."""
    monitor = make_bus().monitor
    methods: dict[str, Callable[[Any], object]] = {
        "configure": lambda topic: monitor.configure_history_storage(topic, RangePolicy.at_most(1)),
        "get": lambda topic: monitor.get_configured_history_storage(topic),
        "remove": monitor.remove_history_storage,
        "effective": monitor.get_effective_history_storage,
    }
    method = methods[call]
    with pytest.raises(NullEventError):
        method(None)
    for bad in (*NEITHER, 5, b"a", ["a"]):
        with pytest.raises(InvalidTopicError):
            method(bad)
    assert monitor.get_configured_history_storage() == {}


@table("bad", FILTERS)
def test_the_effective_policy_is_that_of_a_topic_not_of_a_filter(make_bus: Make, bad: str) -> None:
    """157.6.2.1, 157.11.4.4: wildcards are an ``IllegalArgumentException``."""
    with pytest.raises(InvalidTopicError, match="wildcards are for handlers"):
        make_bus().monitor.get_effective_history_storage(bad)


def test_objects_that_are_no_policies_are_refused(make_bus: Make) -> None:
    """Also an object that only looks like one: its numbers were not checked."""

    @dataclasses.dataclass
    class Like:
        minimum: int = 5
        maximum: int = -1

    monitor = make_bus().monitor
    with pytest.raises(NullEventError):
        monitor.configure_history_storage("a", None)  # type: ignore[arg-type]
    for bad in (5, (0, 5), Like(), RangePolicy):
        with pytest.raises(ArgumentError, match="policy must be a RangePolicy"):
            monitor.configure_history_storage("a", bad)  # type: ignore[arg-type]
    assert monitor.get_configured_history_storage() == {}


def test_a_full_history_drops_the_oldest_event_that_no_minimum_guarantees(make_bus: Make) -> None:
    """157.6.2, 157.11.3.5: of a topic at its minimum nothing is dropped, however old it is."""
    bus = make_bus(4, history={"a": RangePolicy.range(2, 5), "b": RangePolicy.unlimited()})
    bus.numbered("a 1", "a 2", "a 3", "b 4", "b 5")
    assert recorded(bus) == ["a 2", "a 3", "b 4", "b 5"]
    bus.numbered("b 6", "b 7")
    assert recorded(bus) == ["a 2", "a 3", "b 6", "b 7"]
    bus.numbered("a 8")
    assert recorded(bus) == ["a 3", "b 6", "b 7", "a 8"]


# --- asking for policies (157.6.2.1, 157.11.4.2 to 157.11.4.4)


def test_the_configured_policies_are_a_copy(make_bus: Make) -> None:
    monitor = make_bus().monitor
    monitor.configure_history_storage("a", RangePolicy.at_most(1))
    monitor.get_configured_history_storage().clear()
    assert monitor.get_configured_history_storage() == {"a": RangePolicy.at_most(1)}


# --- the record of an event


@dataclasses.dataclass
class Reading:
    n: int


class Converted:
    n: int


def test_the_history_keeps_no_converted_events(make_bus: Make) -> None:
    """The history may hold thousands of events; what they were converted to is the handlers' alone."""
    bus = make_bus(history={"a": RangePolicy.unlimited()})
    made: list[weakref.ref[Converted]] = []

    def handle(event: Converted) -> None:
        made.append(weakref.ref(event))

    bus.on("a", handler=handle)
    bus.deliver(Reading(1), "a")
    bus.on("a", history=1, filter="(n=1)", handler=handle)
    bus.send("a", Reading(2))
    bus.deliver(Reading(3), "b")  # the delivery threads have something else in hand
    bus.drain()
    assert len(made) == 3
    gc.collect()
    assert [each() for each in made] == [None] * 3
    assert recorded(bus) == ["a 1", "a 2"]


class Loud:
    """An event that publishes in its finalizer, in the middle of any operation that drops it."""

    n: int

    def __init__(self, bus: Bus, n: int) -> None:
        self._bus = bus
        self.n = n

    def __del__(self) -> None:
        with contextlib.suppress(ClosedError):
            self._bus.deliver_untyped("last/words", {"n": self.n})


@table("how", ["maximum", "capacity", "configure", "remove"])
def test_an_event_that_publishes_when_it_is_dropped_causes_no_deadlock(make_bus: Make, how: str) -> None:
    policy = RangePolicy.at_most(2 if how == "maximum" else 4)
    bus = make_bus(4 if how == "capacity" else 100, history={"loud": policy, "last/words": RangePolicy.unlimited()})

    def work() -> None:
        for n in range(5):
            bus.deliver(Loud(bus, n), "loud")
        if how == "configure":
            bus.monitor.configure_history_storage("loud", RangePolicy.at_most(1))
        elif how == "remove":
            bus.monitor.remove_history_storage("loud")

    # on a thread of its own, which would wait for itself for ever
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    kept = recorded(bus)
    assert len(kept) == bus.get_dto().recorded <= bus.get_dto().capacity
    assert any(event.startswith("last/words") for event in kept)

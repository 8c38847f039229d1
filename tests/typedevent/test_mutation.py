"""A handler that changes the untyped event it gets changes it for other handlers at most (157.2.4.2)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from messaging.typedevent import MonitorEvent, RangePolicy, TypedEventBus

PATIENCE = 20.0


def event() -> dict[str, Any]:
    return {"id": 1, "room": {"name": "attic"}, "readings": [{"celsius": 21}, [1, 2]]}


def spoil(data: dict[str, Any]) -> None:
    data["room"].clear()
    data["readings"][0].clear()
    data["readings"].clear()
    data.clear()


def past(bus: TypedEventBus, look: Callable[[MonitorEvent], object]) -> None:
    """Have ``look`` see the history."""
    done = threading.Event()
    bus.monitor.monitor_events(5, history_only=True).subscribe(look, on_completed=done.set)
    assert done.wait(PATIENCE)


@dataclass
class Measured:
    room: dict[str, Any] = field(default_factory=lambda: {"name": "attic"})
    readings: list[Any] = field(default_factory=lambda: [{"celsius": 21}])


@pytest.mark.parametrize("publish", ["deliver_untyped", "publisher"])
def test_history_and_monitors_keep_an_event_that_a_handler_clears(publish: str) -> None:
    seen: list[MonitorEvent] = []
    later: list[MonitorEvent] = []
    replayed: list[dict[str, Any]] = []
    with TypedEventBus(history={"a": RangePolicy.exact(5)}) as bus:
        bus.on("a", handler=lambda topic, data: spoil(data))
        bus.monitor.monitor_events().subscribe(seen.append)
        if publish == "publisher":
            bus.create_publisher("a").deliver_untyped(event())
        else:
            bus.deliver_untyped("a", event())
        bus.flush().result(PATIENCE)
        bus.monitor.flush().result(PATIENCE)
        assert [each.event_data for each in seen] == [event()]
        past(bus, later.append)
        assert [each.event_data for each in later] == [event()]
        bus.on("a", handler=lambda topic, data: replayed.append(data), history=5)
        bus.flush().result(PATIENCE)
    assert replayed == [event()]


def test_a_replayed_event_that_is_cleared_is_replayed_to_the_next_handler() -> None:
    replayed: list[dict[str, Any]] = []
    with TypedEventBus(history={"a": RangePolicy.exact(5)}) as bus:
        bus.deliver_untyped("a", event())
        for _ in range(2):
            bus.on("a", handler=lambda topic, data: (replayed.append({**data}), spoil(data)), history=5)
            bus.flush().result(PATIENCE)
    assert [each["id"] for each in replayed] == [1, 1]


@pytest.mark.parametrize("data", [event(), Measured()], ids=["untyped", "typed"])
def test_an_observer_that_clears_its_event_changes_nothing_for_others(data: Any) -> None:
    seen: list[list[int]] = [[], []]
    handled: list[int] = []

    def look(into: list[int]) -> Any:
        def on_next(each: MonitorEvent) -> None:
            into.append(len(each.event_data["readings"]))
            spoil(each.event_data)

        return on_next

    with TypedEventBus(history={"*": RangePolicy.at_most(5)}) as bus:
        for into in seen:
            bus.monitor.monitor_events().subscribe(look(into))
        bus.on("a", handler=lambda topic, each: handled.append(len(each["readings"])))
        bus.deliver(data, "a")
        bus.monitor.flush().result(PATIENCE)
        bus.flush().result(PATIENCE)
        later: list[int] = []
        past(bus, look(later))
    count = len(event()["readings"]) if isinstance(data, dict) else 1
    assert seen == [[count], [count]]
    assert handled == later == [count]


def test_changes_of_the_map_of_a_typed_event_reach_neither_monitors_nor_history() -> None:
    seen: list[Any] = []
    with TypedEventBus(history={"*": RangePolicy.at_most(5)}) as bus:
        bus.on("a", handler=lambda topic, data: spoil(data))
        bus.deliver(Measured(), "a")
        bus.flush().result(PATIENCE)
        past(bus, lambda each: seen.append(each.event_data))
    assert seen == [{"room": {"name": "attic"}, "readings": [{"celsius": 21}]}]

"""A handler that changes the untyped event it gets changes it for other handlers at most (157.2.4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from reactivex import operators as ops

from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from messaging.typedevent import MonitorEvent, RangePolicy
from tests.typedevent.conftest import Bus, Recorder, own_bus


def event() -> dict[str, Any]:
    return {"id": 1, "room": {"name": "attic"}, "readings": [{"celsius": 21}, [1, 2]]}


def spoil(data: dict[str, Any]) -> None:
    data["room"].clear()
    data["readings"][0].clear()
    data["readings"].clear()
    data.clear()


@pytest.fixture
def policies() -> dict[str, RangePolicy]:
    return {"*": RangePolicy.at_most(5)}


def drain(bus: Bus) -> None:
    bus.drain()
    bus.monitor.flush().result(PATIENCE)


def past(bus: Bus, look: Callable[[MonitorEvent], object]) -> None:
    """Have ``look`` see the history."""
    bus.monitor.monitor_events(5, history_only=True).pipe(ops.do_action(look)).run()


@dataclass
class Measured:
    room: dict[str, Any] = field(default_factory=lambda: {"name": "attic"})
    readings: list[Any] = field(default_factory=lambda: [{"celsius": 21}])


@table("publish", ["deliver_untyped", "publisher"])
@own_bus
def test_history_and_monitors_keep_an_event_that_a_handler_clears(bus: Bus, publish: str) -> None:
    seen: list[MonitorEvent] = []
    bus.on("a", handler=lambda topic, data: spoil(data))
    bus.monitor.monitor_events().subscribe(seen.append)
    if publish == "publisher":
        bus.create_publisher("a").deliver_untyped(event())
    else:
        bus.deliver_untyped("a", event())
    drain(bus)
    past(bus, seen.append)
    assert [each.event_data for each in seen] == [event(), event()]
    replayed = Recorder().untyped(bus, "a", history=5)
    bus.drain()
    assert replayed.data == [event()]


def test_a_replayed_event_that_is_cleared_is_replayed_to_the_next_handler(bus: Bus) -> None:
    replayed: list[dict[str, Any]] = []
    bus.deliver_untyped("a", event())
    for _ in range(2):
        bus.on("a", handler=lambda topic, data: (replayed.append({**data}), spoil(data)), history=5)
        bus.drain()
    assert [each["id"] for each in replayed] == [1, 1]


@table("data", [event(), Measured()], ids=["untyped", "typed"])
@own_bus
def test_an_observer_that_clears_its_event_changes_nothing_for_others(bus: Bus, data: Any) -> None:
    seen: list[int] = []

    def look(each: MonitorEvent) -> None:
        seen.append(len(each.event_data["readings"]))
        spoil(each.event_data)

    for _ in range(2):
        bus.monitor.monitor_events().subscribe(look)
    handler = Recorder().untyped(bus, "a")
    bus.deliver(data, "a")
    drain(bus)
    past(bus, look)
    count = len(event()["readings"]) if isinstance(data, dict) else 1
    assert seen == [count] * 3
    assert [len(each["readings"]) for each in handler.data] == [count]


def test_changes_of_the_map_of_a_typed_event_reach_neither_monitors_nor_history(bus: Bus) -> None:
    seen: list[Any] = []
    bus.on("a", handler=lambda topic, data: spoil(data))
    bus.send("a", Measured())
    past(bus, lambda each: seen.append(each.event_data))
    assert seen == [{"room": {"name": "attic"}, "readings": [{"celsius": 21}]}]

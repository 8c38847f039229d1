"""Past events for new handlers (157.4.7): which, in what order, and without a gap to the events that follow."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import (
    EventTopics,
    MonitorEvent,
    RangePolicy,
    Tolerance,
    TypedEventHandler,
    UntypedEventHandler,
)
from tests.typedevent.conftest import Bus, Failing, Recorder, named, own_bus

EVERYTHING = {"*": RangePolicy.unlimited()}


@pytest.fixture
def policies() -> dict[str, RangePolicy]:
    return EVERYTHING


def registered(bus: Bus, topics: Any, history: Any, **properties: Any) -> Recorder:
    """Register a handler, and wait for what it gets at once."""
    handler = Recorder().untyped(bus, topics, history=history, **properties)
    bus.drain()
    return handler


# --- which events, and how many


@table(
    ("topics", "history", "replayed"),
    [
        ("a", 3, ["a 1", "a 5"]),
        ("a", 1, ["a 5"]),
        ("a", 0, []),
        ("a", None, []),
        ("a/b", 2**70, ["a/b 2", "a/b 6"]),
        ("a/+", 10, ["a/b 2", "a/c 3", "a/b 6"]),
        ("a/*", 2, ["a/b/c 4", "a/b 6"]),
        (["a", "a/c"], 2, ["a/c 3", "a 5"]),
        (["a/b", "a/+", "a/*"], 10, ["a/b 2", "a/c 3", "a/b/c 4", "a/b 6"]),
        ("ab", 10, []),
        ([], 10, []),
        (None, 10, []),
    ],
)
@own_bus
def test_the_newest_events_of_the_topics_are_replayed_in_time_order_before_newer_ones(
    bus: Bus, topics: Any, history: int | None, replayed: list[str]
) -> None:
    """Scenarios 66 to 68, 71 and 72; 157.4.7: no more than asked for; too little is no error."""
    bus.numbered("a 1", "a/b 2", "a/c 3", "a/b/c 4", "a 5", "a/b 6")
    handler = registered(bus, topics, history)
    assert handler.numbered == replayed
    bus.numbered("a 7")
    bus.drain()
    assert handler.numbered == (replayed + ["a 7"] if topics in ("a", ["a", "a/c"]) else replayed)


def test_filtered_events_do_not_count(bus: Bus) -> None:
    """Scenario 70; 157.4.7: filtered first, and of the rest the last N."""
    for number in range(10):
        bus.numbered(f"a {number}", even=number % 2 == 0)
    assert registered(bus, "a", 3, filter="(even=true)").numbered == ["a 4", "a 6", "a 8"]


def test_more_can_be_replayed_than_a_handler_may_lag_behind() -> None:
    with Bus(ServiceRegistry(), history=EVERYTHING, history_capacity=-1) as bus:
        bus.numbered(*(f"a {n}" for n in range(12_000)))
        handler = registered(bus, "a", 12_000)
        bus.numbered("a 12000")
        bus.drain()
        assert handler.numbered == [f"a {n}" for n in range(12_001)]
        assert not any(each.dropped for each in bus.get_dto().handlers)


# --- to whom


@dataclasses.dataclass
class Reading:
    n: int


def test_every_kind_of_handler_gets_past_events(bus: Bus) -> None:
    got: dict[str, list[Any]] = defaultdict(list)

    class Typed(TypedEventHandler[Reading]):
        def notify(self, topic: str, event: Reading) -> None:
            got["typed"].append(event)

    @EventTopics("a")
    class Declared(Typed):
        def notify(self, topic: str, event: Reading) -> None:
            got["declared"].append(event)

    async def later(topic: str, event: dict[str, Any]) -> None:
        got["coroutine"].append(event)

    bus.deliver(Reading(1), "a")
    bus.numbered("a 2")
    bus.typed(Typed(), "a", history=2)
    bus.typed(Declared(), history=1)
    bus.untyped(later, "a", history=2)

    @bus.on("a", history=2)
    def handle(event: Reading) -> None:
        got["function"].append(event)

    bus.numbered("a 3")
    bus.drain()
    assert got == {
        "typed": [Reading(1), Reading(2), Reading(3)],
        "declared": [Reading(2), Reading(3)],
        "coroutine": [{"n": 1}, {"n": 2}, {"n": 3}],
        "function": [Reading(1), Reading(2), Reading(3)],
    }


# --- updates


def test_an_unblocked_handler_goes_on_with_new_events() -> None:
    """157.4.6: its update lifts the block, and replays nothing."""
    with Bus(ServiceRegistry(), history=EVERYTHING, tolerance=Tolerance(failures=1)) as bus:
        bus.numbered("a 1")
        handler = Failing(LookupError("no paper")).untyped(bus, "a", history=3)
        eventually(lambda: bus.blocked(handler.registration), "it is blocked")
        bus.numbered("a 2")
        handler.error = None
        handler.registration.update(named("a", history=3))
        bus.numbered("a 3")
        bus.drain()
        assert handler.numbered == ["a 1", "a 3"]


# --- the seam (scenario 73)


class Telltale(str):
    """A value that does something when a filter looks at it; that is, in the middle of a replay."""

    __slots__ = ("act",)
    act: Callable[[], object]

    def __eq__(self, other: object) -> bool:
        self.act()
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def telltale(act: Callable[[], object]) -> Telltale:
    value = Telltale("yes")
    value.act = act
    return value


def test_events_published_during_a_replay_come_after_it(bus: Bus) -> None:
    """Scenario 73; 157.4.7: delivery is delayed until all of the history is."""
    live = iter(["a 10", "b 11", "c 12"])
    value = telltale(lambda: bus.numbered(*itertools.islice(live, 1), seen="yes"))
    bus.numbered("a 1", "b 2", "a 3", seen=value)
    handler = registered(bus, ["a", "b", "c"], 5, filter="(seen=yes)")
    assert next(live, None) is None
    assert handler.numbered == ["a 1", "b 2", "a 3", "a 10", "b 11", "c 12"]


def test_a_handler_that_goes_during_its_replay_gets_nothing_new(bus: Bus) -> None:
    bus.numbered("a 1", "a 2", seen=telltale(lambda: handler.registration.unregister()))
    # for another bus at first, so that there is a registration when the replay begins
    handler = Recorder().untyped(bus, target="(x=y)")
    handler.registration.update(named("a", history=2, filter="(seen=yes)"))
    bus.numbered("a 3", seen="yes")
    bus.drain()
    assert bus.get_dto().handlers == ()
    assert handler.numbered in ([], ["a 1"], ["a 1", "a 2"])  # it was going while they were on their way


def test_an_interrupted_replay_does_not_delay_later_events(bus: Bus) -> None:
    """By Ctrl-C, in whatever a filter looks at: the handler is not registered, and can be at once."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    bus.numbered("a 1", seen=telltale(interrupt))
    handler = Recorder()
    with pytest.raises(KeyboardInterrupt):
        handler.untyped(bus, "a", history=5, filter="(seen=yes)")
    assert bus.get_dto().handlers == ()
    bus.numbered("a 2", seen="yes")
    handler.untyped(bus, "a", history=1, filter="(seen=yes)")
    bus.numbered("a 3", seen="yes")
    bus.drain()
    assert handler.numbered == ["a 2", "a 3"]


class Publishing:
    """Threads that publish all the time. Each event says where it is among those of its thread: in all, and by kind."""

    TOPICS = ("seam/x", "seam/y", "seam/x", "seam/y/z", "noise/x", "noise/y")

    def __init__(self, bus: Bus, count: int) -> None:
        self._bus = bus
        self._stop = threading.Event()
        self.errors: list[BaseException] = []
        # as many events are on their way as this lets through: monitors that lag too much would miss some
        self._room = threading.Semaphore(2_000)
        bus.on("*", handler=lambda _: self._room.release())
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in range(count)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        if self.errors:
            raise self.errors[0]
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, thread: int) -> None:
        places: dict[str, int] = defaultdict(int)
        try:
            for turn in itertools.count():
                if self._stop.is_set():
                    return
                assert self._room.acquire(timeout=PATIENCE)
                topic = self.TOPICS[turn % len(self.TOPICS)]
                kinds = {
                    "all",
                    topic.partition("/")[0],
                    topic,
                    *(["fifth"] if topic[0] == "s" and turn % 5 == 0 else []),
                }
                for kind in kinds:
                    places[kind] += 1
                self._bus.deliver_untyped(topic, {"thread": thread, **{kind: places[kind] for kind in kinds}})
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self.errors.append(error)


class Witness:
    """Remembers, by thread, the places of the events of one kind; and how many there were."""

    def __init__(self, kind: str, *, has_gaps: bool = False) -> None:
        self._kind = kind
        self._has_gaps = has_gaps
        self.places: dict[int, list[int]] = defaultdict(list)
        self.count = 0

    def __call__(self, topic: str, event: dict[str, Any]) -> None:
        if self._kind in event:
            self.places[event["thread"]].append(event[self._kind])
        self.count += 1

    def on_next(self, event: MonitorEvent) -> None:
        self(event.topic, event.event_data)

    def check(self) -> None:
        for places in self.places.values():
            steps = {after - before for before, after in itertools.pairwise(places)}
            assert min(steps, default=1) > 0, f"doubled, or out of order: {self._kind} {places}"
            assert self._has_gaps or steps <= {1}, f"missed: {self._kind} {places}"


def test_nothing_is_lost_or_doubled_where_the_past_meets_the_present() -> None:
    """Scenario 73; 157.4.7, 157.6.1: from some point on, everybody sees all of each thread once and in order.

    Handlers and observers come and go by the hundreds, and policies change, while four threads publish.
    """
    history = {"seam/*": RangePolicy.unlimited()}
    rounds = 40
    choice = random.Random(157)
    witnesses: list[Witness] = []
    errors: list[BaseException] = []
    is_over = threading.Event()

    def handlers(bus: Bus) -> None:
        for _ in range(rounds):
            wanted = choice.choice([0, 1, 10, 100])
            kinds: dict[str, dict[str, Any]] = {
                "seam/x": {"event.topics": "seam/x"},
                "seam": {"event.topics": choice.choice(["seam/*", ["seam/+", "seam/y/z"], ["seam/x", "seam/*"]])},
                "fifth": {"event.topics": "*", "event.filter": "(fifth=*)"},
                "noise": {"event.topics": "noise/+"},
            }
            now = [Witness(kind, has_gaps=kind == "noise") for kind in kinds]
            registrations = [
                bus.services.register(UntypedEventHandler, each, {**properties, "event.history": wanted})
                for each, properties in zip(now, kinds.values(), strict=True)
            ]
            eventually(lambda: all(each.count > wanted + 10 for each in now), "events of now")  # noqa: B023
            for registration in registrations:
                registration.unregister()
            witnesses.extend(now)

    def observers(bus: Bus) -> None:
        for turn in range(rounds):
            now = [Witness("seam"), Witness("noise", has_gaps=True), Witness("all", has_gaps=turn % 4 > 0)]
            subscriptions = [bus.monitor.monitor_events((turn % 4) * 30).subscribe(each.on_next) for each in now]
            eventually(lambda: all(each.count > 200 for each in now), "events of now")  # noqa: B023
            for subscription in subscriptions:
                subscription.dispose()
            witnesses.extend(now)

    def policies(bus: Bus) -> None:
        while not is_over.is_set():
            for topics, policy in (
                ("noise/x", RangePolicy.exact(5)),
                ("noise/+", RangePolicy.at_most(10)),
                ("noise/*", RangePolicy.none()),
                ("noise/y", RangePolicy.unlimited()),
            ):
                bus.monitor.configure_history_storage(topics, policy)
                is_over.wait(0.001)
            for topics in ("noise/+", "noise/x", "noise/y", "noise/*"):
                bus.monitor.remove_history_storage(topics)
                is_over.wait(0.001)

    def run(work: Callable[[Bus], None], bus: Bus) -> None:
        try:
            work(bus)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    with Bus(ServiceRegistry(), history=history, history_capacity=2_000) as bus:
        with Publishing(bus, 4):
            threads = [threading.Thread(target=run, args=(each, bus), daemon=True) for each in (handlers, observers)]
            changing = threading.Thread(target=run, args=(policies, bus), daemon=True)
            for thread in (*threads, changing):
                thread.start()
            for thread in threads:
                thread.join(60)
            is_over.set()
            changing.join(PATIENCE)
            assert not any(thread.is_alive() for thread in (*threads, changing))
        bus.drain()
        assert errors == []
        assert len(witnesses) == rounds * 7
        assert bus.get_dto().missed == 0
    for each in witnesses:
        each.check()

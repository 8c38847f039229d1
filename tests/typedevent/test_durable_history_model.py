"""The durable history against a model, and replays beside publishers: no loss, no duplicate, no disorder."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import DurableHistory, MonitorEvent, RangePolicy
from tests.typedevent.conftest import Bus, Recorder, in_threads, matches

TOPICS = ["a/x", "a/y", "b", "c"]
#: of the bus; "c" is not recorded
POLICIES = {"a/*": RangePolicy.at_most(3), "b": RangePolicy.exact(2)}


class Checked:
    """An observer of a replay that checks what it gets against all recorded events, at the end."""

    def __init__(self, bus: Bus, since: int, topics: str) -> None:
        self.since = since
        self.topics = topics
        self.events: list[MonitorEvent] = []
        self.errors: list[Exception] = []
        self.subscription = bus.monitor.replay(since, topics).subscribe(self.events.append, self.errors.append)

    def check(self, recorded: dict[int, tuple[str, int]]) -> None:
        """``recorded`` has topic and number of each event by sequence."""
        assert not self.errors
        found = [(each.sequence, (each.topic, each.event_data["n"])) for each in self.events if each.sequence]
        assert found == [
            (sequence, event)
            for sequence, event in sorted(recorded.items())
            if sequence >= self.since and matches(self.topics, event[0])
        ]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(4))
def test_replays_beside_publishers_get_each_event_once_and_in_order(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.typedevent.store.NEAR", [0, 3, 50, 1000][seed])
    monkeypatch.setattr("messaging.typedevent.monitor._STEP", [1, 7, 256, 30][seed])
    durable = DurableHistory(tmp_path / "history", window=[0.0, 0.01, 0.05, 3600.0][seed], max_pending=1_000_000)
    policies = {"*": RangePolicy.at_most(5), "c": RangePolicy.none()}
    with Bus(ServiceRegistry(), history=policies, durable_history=durable) as bus:
        bus.count(range(-300, 0), "a/x")
        everything: list[MonitorEvent] = []
        bus.monitor.replay(0).subscribe(everything.append)
        observers: list[Checked] = []
        lock = threading.Lock()

        def publish(thread: int) -> None:
            choose = random.Random(f"{seed}/{thread}")
            for n in range(600):
                bus.deliver_untyped(choose.choice(TOPICS), {"n": thread * 10_000 + n})

        def observe(thread: int) -> None:
            choose = random.Random(f"{seed}/{thread}")
            for _ in range(15):
                last = max((each.sequence for each in [*everything]), default=0)
                observer = Checked(bus, choose.randint(1, last + 1), choose.choice(["*", "a/*", "b"]))
                with lock:
                    observers.append(observer)

        in_threads(5, lambda each: publish(each) if each < 3 else observe(each))
        bus.monitor.flush().result(6 * PATIENCE)
        recorded = {each.sequence: (each.topic, each.event_data["n"]) for each in everything if each.sequence}
        live = [each for each in everything if each.topic != "c"]
        assert [each.sequence for each in live] == [*range(1, len(live) + 1)]
        assert bus.monitor.missed == 0
        for observer in observers:
            observer.check(recorded)
        for thread in range(3):
            mine = [n for _, n in recorded.values() if n // 10_000 == thread and n >= 0]
            assert mine == sorted(mine)
    again: list[MonitorEvent] = []
    with Bus(ServiceRegistry(), durable_history=durable) as bus:
        bus.monitor.replay(0).subscribe(again.append)
        bus.monitor.flush().result(6 * PATIENCE)
    assert again == live


@pytest.mark.usefixtures("no_sync")
class TestModel:
    """See :class:`Machine`."""

    @pytest.fixture
    def no_sync(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", lambda _: None)
        monkeypatch.setattr(os, "fdatasync", lambda _: None)
        monkeypatch.setattr("messaging.typedevent.store.NEAR", 2)
        monkeypatch.setattr("messaging.typedevent.monitor._STEP", 2)

    def test_a_bus_over_several_runs_is_as_the_model(self) -> None:
        from hypothesis.stateful import run_state_machine_as_test

        run_state_machine_as_test(
            Machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None, database=None)
        )


class Machine(RuleBasedStateMachine):
    """Publishes, restarts the bus, and compares replays and late handlers with a list of all events."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.recorded: list[tuple[str, int]] = []
        self.number = 0
        self.live: list[Checked] = []

    @initialize(window=st.sampled_from([0.0, 0.005, 3600.0]))
    def open(self, window: float) -> None:
        durable = DurableHistory(self.folder / "history", window=window)
        self.bus = Bus(ServiceRegistry(), history=POLICIES, durable_history=durable)

    @rule(window=st.sampled_from([0.0, 0.005, 3600.0]))
    def restart(self, window: float) -> None:
        self.bus.close()
        self.check_live()
        self.live.clear()
        self.open(window)

    @rule(topics=st.lists(st.sampled_from(TOPICS), min_size=1, max_size=8))
    def publish(self, topics: list[str]) -> None:
        for topic in topics:
            self.number += 1
            self.bus.count([self.number], topic)
            if topic != "c":
                self.recorded.append((topic, self.number))

    @rule(since=st.integers(0, 60), topics=st.sampled_from(["*", "a/+", "b"]))
    def replay(self, since: int, topics: str) -> None:
        self.live.append(Checked(self.bus, min(since, len(self.recorded) + 1), topics))

    @rule(count=st.integers(1, 9), topics=st.sampled_from(["*", "a/*", "a/y", "b"]))
    def add_late_handler(self, count: int, topics: str) -> None:
        late = Recorder().untyped(self.bus, topics, history=count)
        self.bus.drain()
        kept: dict[str, list[int]] = {}
        for topic, number in self.recorded:
            kept.setdefault(topic, []).append(number)
        limits = {"a/x": 3, "a/y": 3, "b": 2}
        expected = sorted(
            (number, topic)
            for topic, found in kept.items()
            for number in found[-limits[topic] :]
            if matches(topics, topic)
        )
        assert late.numbered == [f"{topic} {number}" for number, topic in expected[-count:]]
        late.registration.unregister()

    @invariant()
    def check_live(self) -> None:
        recorded = dict(enumerate(self.recorded, 1))
        for each in self.live:
            wanted = sum(1 for n, (topic, _) in recorded.items() if n >= each.since and matches(each.topics, topic))
            eventually(lambda each=each, wanted=wanted: sum(1 for e in each.events if e.sequence) >= wanted)
            each.check(recorded)

    def teardown(self) -> None:
        bus: Any = getattr(self, "bus", None)
        if bus is not None:
            bus.close()
        shutil.rmtree(self.folder)

"""Deadlines: every entry expires at most one interval late, with one timer and a bounded number of scans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.execution import Deadlines, deadlines

#: usual timeout of an entry, seconds
TIMEOUT = 30.0


class Loop:
    """An event loop whose time is set by the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self.most = 0

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, call: Callable[[], object]) -> Any:
        timer = (due, call)
        self.timers.append(timer)
        self.most = max(self.most, len(self.timers))
        return SimpleNamespace(cancel=lambda: timer in self.timers and self.timers.remove(timer))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers and self.timers[0][0] <= end:
            self.now, call = self.timers.pop(0)
            call()
        self.now = end


class Owner:
    """An owner of entries: each is a deadline, in seconds of its loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.entries: list[float] = []
        self.expired: list[tuple[float, float]] = []
        self.scans = 0
        self.engine: Any = SimpleNamespace(loop=self.loop, call=lambda function: function())
        self.deadlines = Deadlines(self.engine, TIMEOUT, self.scan)
        #: called at the end of the next scan
        self.after_scan: Callable[[], object] = int

    def scan(self, _: float) -> float | None:
        self.scans += 1
        now = self.loop.now
        self.expired += [(entry, now) for entry in self.entries if entry <= now]
        self.entries = [entry for entry in self.entries if entry > now]
        left = min(self.entries) - now if self.entries else None
        after, self.after_scan = self.after_scan, int
        after()
        return left

    def add(self, timeout: float) -> None:
        self.entries.append(self.loop.now + timeout)
        self.deadlines.watch(timeout)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "pass"]), st.floats(0.001, 2 * TIMEOUT)), min_size=1, max_size=30
)


@given(STEPS)
def test_entries_expire_at_most_one_interval_late_with_one_timer(steps: list[tuple[str, float]]) -> None:
    owner = Owner()
    for step, seconds in steps:
        if step == "add":
            owner.add(seconds)
        elif step == "remove" and owner.entries:
            owner.entries.pop()
        elif step == "pass":
            owner.loop.pass_time(seconds)
        assert bool(owner.loop.timers) == owner.deadlines.is_watching
        assert owner.deadlines.is_watching or not owner.entries
    scans, began = owner.scans, owner.loop.now
    owner.loop.pass_time(3 * TIMEOUT)
    assert owner.entries == []
    assert not owner.deadlines.is_watching
    assert owner.loop.most <= 1
    assert all(0 <= when - entry <= 0.2501 for entry, when in owner.expired)
    assert (owner.scans - scans) <= (owner.loop.now - began) / 0.01


@pytest.mark.parametrize(("left", "step"), [(0.0, 0.01), (0.1, 0.01), (1.0, 0.05), (5.0, 0.25), (3600.0, 0.25)])
def test_the_interval_is_a_twentieth_of_the_time_left_within_bounds(left: float, step: float) -> None:
    assert deadlines.step_of(left) == pytest.approx(step)


def test_a_shorter_timeout_brings_the_next_scan_forward() -> None:
    owner = Owner()
    owner.add(TIMEOUT)
    owner.add(0.1)
    owner.loop.pass_time(0.12)
    assert [entry for entry, _ in owner.expired] == pytest.approx([1000.1])
    assert len(owner.entries) == 1


def test_a_stopped_timer_scans_no_more_until_the_next_entry() -> None:
    owner = Owner()
    owner.add(0.1)
    owner.deadlines.stop()
    owner.loop.pass_time(TIMEOUT)
    assert owner.scans == 0
    owner.add(0.1)
    owner.loop.pass_time(0.2)
    assert len(owner.expired) == 2


def test_an_entry_that_is_added_during_a_scan_is_watched() -> None:
    """As by another thread, right after the scan has looked at its collection."""
    owner = Owner()
    owner.after_scan = lambda: owner.add(0.05)
    owner.add(0.01)
    owner.loop.pass_time(1.0)
    assert len(owner.expired) == 2


def test_an_interrupted_watch_is_made_up_for_by_the_next_entry() -> None:
    owner = Owner()

    def interrupt(_: Callable[[], object]) -> None:
        raise KeyboardInterrupt

    working, owner.engine.call = owner.engine.call, interrupt
    with pytest.raises(KeyboardInterrupt):
        owner.add(TIMEOUT)
    owner.engine.call = working
    owner.add(TIMEOUT)
    owner.loop.pass_time(TIMEOUT + 0.25)
    assert owner.entries == []


def test_deadlines_run_on_the_loop_of_an_engine() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        left = [loop.time() + 0.1]
        count = 0

        def scan(_: float) -> float | None:
            nonlocal count
            count += 1
            if left[0] > loop.time():
                return left[0] - loop.time()
            over.set()
            return None

        engine: Any = SimpleNamespace(loop=loop, call=loop.call_soon_threadsafe)
        Deadlines(engine, TIMEOUT, scan).watch(0.1)
        await asyncio.wait_for(over.wait(), 10)
        return count

    assert asyncio.run(main()) >= 2

"""The clock in real time: the functions of the standard library, under one name."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from messaging.execution import clock, engine
from messaging.execution.clock import Clock
from tests.doubles.fake import on_loop
from tests.threads import in_background


def test_reading_it_takes_no_call_more_than_reading_the_standard_library() -> None:
    assert clock.monotonic is time.monotonic
    assert clock.wall is time.time
    assert clock.wall_ns is time.time_ns
    assert clock.pause is time.sleep
    assert clock.lock is threading.Lock
    assert clock.timer is threading.Timer
    functions = (clock.sleep, clock.timeout, clock.wait_for, clock.wait)
    assert functions == (asyncio.sleep, asyncio.timeout, asyncio.wait_for, asyncio.wait)

    def target() -> None: ...

    assert clock.thread(target) is target


def test_its_times_are_those_of_the_system() -> None:
    assert abs(clock.now() - datetime.now(UTC)) < timedelta(seconds=10)
    assert clock.now().tzinfo is UTC
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= clock.boot() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_the_lease_clock_is_the_monotonic_one_where_the_system_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert Clock().boot is time.monotonic


@pytest.mark.parametrize("make", [asyncio.new_event_loop, clock.new_loop], ids=["asyncio", "engine"])
def test_its_timers_are_those_of_a_loop(make: type[asyncio.AbstractEventLoop]) -> None:
    loop = make()
    called: list[object] = []

    async def main() -> None:
        while True:
            begun = clock.time_of(loop)
            timers = [
                clock.call_at(loop, begun + 0.03, called.append, "at"),
                clock.call_later(loop, 0.02, called.append, "later"),
                clock.timers_of(loop)(0.01, called.append, "of"),
            ]
            if clock.time_of(loop) - begun < 0.01:
                break
            for each in timers:  # the thread was away: the order of their times is not known
                each.cancel()
        assert abs(clock.clock_of(loop)() - clock.time_of(loop)) < 10
        while len(called) < 3:
            await clock.sleep(0.001)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert called == ["of", "later", "at"]


def test_the_engine_runs_on_a_loop_of_the_clock() -> None:
    assert type(engine().loop) is type(on_loop(asyncio.get_running_loop))
    loop = clock.new_loop()
    assert type(loop) is type(engine().loop)
    loop.close()


def test_a_lock_of_the_clock_is_waited_for_on_a_thread() -> None:
    lock = clock.lock()
    lock.acquire()
    acquired: list[bool] = []
    wait = in_background(lambda: acquired.append(lock.acquire(timeout=10)))
    lock.release()
    wait()
    assert acquired == [True]
    assert not lock.acquire(timeout=0.001)

"""The virtual clock: time that passes when nothing is left to do, in order, and on every thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import Queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import messaging
from messaging.errors import DeadlineError
from messaging.execution import Flag, Promise, Waiters, clock, engine, handlers_loop, start_thread, workers
from messaging.execution.threads import IDLE_SECONDS
from messaging.leases import Landlord, LeaseRenewalManager
from messaging.testing.clock import VirtualClock, VirtualClockError, VirtualLoop

#: longest that a test of hours may take, real seconds; a failure takes its patience
QUICK = 60.0


@pytest.fixture(autouse=True)
def _real_time() -> Iterator[None]:
    """No test takes the time that passes in it, and each leaves the real clock behind."""
    begun = time.monotonic()
    threads = threading.active_count()
    yield
    assert time.monotonic() - begun < QUICK
    assert clock.monotonic is time.monotonic
    assert asyncio.new_event_loop is asyncio.events.new_event_loop
    assert not isinstance(engine().loop, VirtualLoop)
    assert threading.active_count() <= threads + 2  # the real engine, and a worker of an earlier test


def on_engine(function: Callable[..., object], *args: Any) -> None:
    engine().call(function, *args)


def call_later(delay: float, function: Callable[..., object], *args: Any) -> None:
    """Set a timer of the engine, from any thread."""
    on_engine(clock.call_later, engine().loop, delay, function, *args)


# --- timers


def test_timers_run_when_they_are_due_and_not_before(virtual_clock: VirtualClock) -> None:
    called: list[float] = []
    begun = virtual_clock.time
    call_later(5.0, lambda: called.append(clock.monotonic() - begun))
    virtual_clock.advance(4.999)
    assert called == []
    virtual_clock.advance(0.001)
    assert called == [pytest.approx(5.0)]
    virtual_clock.advance(100.0)
    assert len(called) == 1


def test_timers_that_are_set_by_timers_run_within_the_same_advance(virtual_clock: VirtualClock) -> None:
    called: list[float] = []
    begun = virtual_clock.time

    def again() -> None:
        called.append(clock.monotonic() - begun)
        if len(called) < 1000:
            clock.call_later(engine().loop, 1.0, again)

    call_later(1.0, again)
    virtual_clock.advance(500.0)
    assert called == pytest.approx(range(1, 501))
    virtual_clock.advance(1000.0)
    assert len(called) == 1000


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), max_size=20))
def test_whatever_waits_is_woken_in_the_order_of_its_time(waits: list[tuple[int, int]]) -> None:
    """Timers of two loops, and waits of threads."""
    with VirtualClock() as it:
        begun, woken, started = it.time, list[tuple[float, int]](), Waiters()
        left = len(waits)

        def wake(number: int) -> None:
            woken.append((clock.monotonic() - begun, number))

        def wait(number: int, delay: int) -> None:
            clock.pause(delay)
            wake(number)

        for number, (kind, delay) in enumerate(waits):
            if kind == 0:
                call_later(delay, wake, number)
            elif kind == 1:
                handlers_loop().call_soon_threadsafe(handlers_loop().call_later, delay, wake, number)
            else:
                workers().submit(lambda number=number, delay=delay: wait(number, delay))  # type: ignore[misc]
        it.advance(25.0)
        assert started.wait_for(lambda: len(woken) == left, 0.0)
        assert [round(at) for at, _ in woken] == sorted(delay for _, delay in waits)
        assert {number: round(at) for at, number in woken} == {n: delay for n, (_, delay) in enumerate(waits)}


def test_the_order_of_the_same_moment_is_the_same_each_time() -> None:
    def run() -> list[int]:
        with VirtualClock() as it:
            woken: list[int] = []
            for number in range(8):

                def wait(number: int = number) -> None:
                    clock.pause(1.0)
                    woken.append(number)

                workers().submit(wait)
                it.advance(0.0)
            it.advance(1.0)
            return woken

    assert [run() for _ in range(5)] == [[*range(8)]] * 5


# --- coroutines


def test_coroutines_sleep_for_hours_in_no_time(virtual_clock: VirtualClock) -> None:
    async def main() -> float:
        begun = clock.monotonic()
        await asyncio.gather(*(clock.sleep(seconds) for seconds in (10, 3600, 7)))
        return clock.monotonic() - begun

    assert asyncio.run(main()) == pytest.approx(3600)


def test_timeouts_cancel_what_takes_too_long(virtual_clock: VirtualClock) -> None:
    async def main() -> None:
        begun = clock.monotonic()
        with pytest.raises(TimeoutError):
            async with clock.timeout(30):
                await clock.sleep(31)
        assert clock.monotonic() - begun == pytest.approx(30)
        async with clock.timeout(30):
            await clock.sleep(29)
        with pytest.raises(TimeoutError):
            await clock.wait_for(asyncio.Event().wait(), 5)
        done, pending = await clock.wait([asyncio.ensure_future(clock.sleep(n)) for n in (1, 9)], timeout=4)
        assert (len(done), len(pending)) == (1, 1)
        assert clock.monotonic() - begun == pytest.approx(68)

    asyncio.run(main())


def test_time_that_elapses_on_a_loop_ends_when_all_of_that_moment_is_done(virtual_clock: VirtualClock) -> None:
    called: list[str] = []

    async def main() -> None:
        call_later(5.0, lambda: workers().submit(lambda: call_later(0.0, called.append, "last")))
        await virtual_clock.elapse(5.0)
        assert called == ["last"]

    asyncio.run(main())


def test_calls_in_executors_hold_time_back(virtual_clock: VirtualClock) -> None:
    async def main() -> None:
        begun = clock.monotonic()
        async with clock.timeout(1.0):
            await asyncio.to_thread(sum, range(2_000_000))
        assert clock.monotonic() == begun
        await asyncio.to_thread(clock.pause, 100.0)
        assert clock.monotonic() - begun == pytest.approx(100.0)

    for _ in range(10):
        asyncio.run(main())


# --- threads


def test_threads_wait_for_flags_until_their_deadline(virtual_clock: VirtualClock) -> None:
    begun, results = virtual_clock.time, dict[str, tuple[bool, float]]()
    early, never = Flag(), Flag()

    def wait(name: str, flag: Flag, timeout: float) -> None:
        results[name] = flag.wait(timeout), clock.monotonic() - begun

    for name, flag, timeout in (("early", early, 60.0), ("never", never, 30.0), ("longer", never, 45.0)):
        start_thread(lambda a=(name, flag, timeout): wait(*a), f"messaging-{name}")  # type: ignore[misc]
    call_later(12.0, early.set)
    virtual_clock.advance(29.0)
    assert results == {"early": (True, pytest.approx(12.0))}
    virtual_clock.advance(16.0)
    assert results["never"] == (False, pytest.approx(30.0))
    assert results["longer"] == (False, pytest.approx(45.0))


def test_many_threads_that_wait_for_one_flag_are_all_woken(virtual_clock: VirtualClock) -> None:
    flag, woken = Flag(), list[bool]()
    for number in range(20):
        start_thread(lambda: woken.append(flag.wait(1000.0)), f"messaging-{number}")
    virtual_clock.advance(100.0)
    assert woken == []
    flag.set()
    virtual_clock.advance(0.0)
    assert woken == [True] * 20


def test_the_driver_waits_until_something_comes_or_its_time_is_over(virtual_clock: VirtualClock) -> None:
    begun = virtual_clock.time
    promise: Promise[int] = Promise("answer")
    call_later(100.0, promise.resolve, 7)
    with pytest.raises(DeadlineError):
        promise.result(40.0)
    assert virtual_clock.time - begun == pytest.approx(40.0)
    assert promise.result(100.0) == 7
    assert virtual_clock.time - begun == pytest.approx(100.0)


def test_time_passes_while_the_driver_waits_for_an_event_of_threading(virtual_clock: VirtualClock) -> None:
    begun = virtual_clock.time
    event, queue = threading.Event(), Queue[int]()
    call_later(100.0, event.set)
    call_later(200.0, queue.put, 7)
    assert not event.wait(99.0)
    assert virtual_clock.time - begun == pytest.approx(99.0)
    assert event.wait(99.0)
    assert virtual_clock.time - begun == pytest.approx(100.0)
    assert queue.get(timeout=150.0) == 7
    assert virtual_clock.time - begun == pytest.approx(200.0)


def test_time_stands_still_while_a_job_runs(virtual_clock: VirtualClock) -> None:
    def job() -> None:
        before = clock.monotonic()
        for _ in range(200):
            time.sleep(0)  # gives the other threads their turn
        passed.append(clock.monotonic() - before)

    passed: list[float] = []
    for _ in range(20):
        workers().submit(job)
        call_later(0.001, lambda: None)
    virtual_clock.advance(10.0)
    assert passed == [0.0] * 20


def test_jobs_that_start_jobs_are_all_done_when_an_advance_returns(virtual_clock: VirtualClock) -> None:
    done: list[int] = []

    def job(left: int) -> None:
        done.append(left)
        if left:
            on_engine(lambda: workers().submit(lambda: job(left - 1)))

    job(50)
    virtual_clock.advance(0.0)
    assert done == [*range(50, -1, -1)]


def test_idle_workers_end_in_virtual_time(virtual_clock: VirtualClock) -> None:
    names: set[str] = set()
    barrier = threading.Barrier(4)

    def job() -> None:
        barrier.wait(30)
        names.add(threading.current_thread().name + str(threading.get_ident()))

    for _ in range(4):
        workers().submit(job)
    virtual_clock.advance(0.5 * IDLE_SECONDS)
    assert len(names) == 4

    def count() -> int:
        return sum(each.name == "messaging-worker" for each in threading.enumerate())

    assert count() >= 4
    before = count()
    virtual_clock.advance(3 * IDLE_SECONDS)
    assert before - count() >= 4


def test_threads_of_a_test_that_wait_for_the_project_are_waited_for(virtual_clock: VirtualClock) -> None:
    promise: Promise[int] = Promise("answer")
    results: list[int] = []

    def wait() -> None:
        value = promise.result(100.0)
        for _ in range(100):
            time.sleep(0)
        results.append(value)

    thread = threading.Thread(target=wait)
    thread.start()
    call_later(50.0, promise.resolve, 1)
    virtual_clock.advance(50.0)
    assert results == [1]
    thread.join()


def test_a_job_that_a_test_holds_with_an_event_is_at_rest(virtual_clock: VirtualClock) -> None:
    gate, done = threading.Event(), list[int]()

    def job() -> None:
        gate.wait()
        done.append(1)

    workers().submit(job)
    virtual_clock.advance(10.0)
    assert done == []
    gate.set()
    virtual_clock.advance(0.0)
    assert done == [1]


def test_a_pool_of_a_test_is_watched(virtual_clock: VirtualClock) -> None:
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(clock.pause, seconds) for seconds in (10.0, 20.0, 30.0)]
        virtual_clock.until(lambda: all(each.done() for each in calls))
    assert [each.result() for each in calls] == [None] * 3


# --- errors


def test_a_process_that_does_not_come_to_rest_is_reported_with_the_place() -> None:
    over, begun = False, threading.Event()

    def spin() -> None:
        begun.set()
        while not over:
            time.sleep(0)

    with VirtualClock(patience=0.2) as it:
        start_thread(spin, "messaging-spinning")
        assert begun.wait(QUICK)
        with pytest.raises(
            VirtualClockError, match=r"not at rest after 0.2 s: messaging-spinning at .*test_clock.py:\d+ in .*spin"
        ):
            it.advance(1.0)
        over, it.patience = True, QUICK
        it.advance(1.0)


def test_a_wait_for_what_cannot_come_is_an_error(virtual_clock: VirtualClock) -> None:
    lock = clock.lock()
    lock.acquire()
    with pytest.raises(VirtualClockError, match="without a time limit"):
        lock.acquire()
    assert lock.locked()
    lock.release()
    assert not lock.locked()
    with pytest.raises(RuntimeError, match="release unlocked lock"):
        lock.release()


def test_only_the_driver_advances_and_not_on_a_running_loop(virtual_clock: VirtualClock) -> None:
    async def main() -> None:
        virtual_clock.advance(1.0)

    with pytest.raises(VirtualClockError, match="elapse"):
        asyncio.run(main())
    errors: list[Exception] = []

    def other() -> None:
        try:
            virtual_clock.advance(1.0)
        except VirtualClockError as error:
            errors.append(error)

    start_thread(other, "messaging-other")
    virtual_clock.advance(0.0)
    assert "only the thread" in str(errors[0])


def test_a_condition_that_never_holds_is_an_error_after_its_time(virtual_clock: VirtualClock) -> None:
    begun = virtual_clock.time
    with pytest.raises(VirtualClockError, match="not true after 5 virtual seconds"):
        virtual_clock.until(lambda: False, within=5.0)
    assert virtual_clock.time - begun <= 5.0
    virtual_clock.until(lambda: virtual_clock.time >= begun + 5.0, within=5.1)


def test_one_clock_is_used_at_a_time(virtual_clock: VirtualClock) -> None:
    with pytest.raises(VirtualClockError, match="another"), VirtualClock():
        pass


def test_a_test_that_fails_leaves_the_real_clock_behind() -> None:
    def run() -> None:
        with VirtualClock() as it:
            start_thread(Flag().wait, "messaging-left")
            it.advance(1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    flag = Flag()
    assert not flag.wait(0.001)


def test_locks_that_outlive_the_clock_wait_in_real_time() -> None:
    with VirtualClock():
        flag, other = Flag(), Flag()
    assert not flag.wait(0.01)
    threading.Timer(0.01, other.set).start()
    assert other.wait(30.0)


def test_a_thread_that_cannot_start_is_not_waited_for(
    virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        start_thread(lambda: None, "messaging-never")
    gc.collect()
    virtual_clock.advance(1.0)


# --- the other clocks


def test_all_clocks_advance_and_can_be_set_apart() -> None:
    with VirtualClock(wall=1_000_000.0) as it:
        before = clock.monotonic(), clock.boot()
        assert clock.wall() == pytest.approx(1_000_000.0)
        it.advance(10.0)
        assert clock.wall() == pytest.approx(1_000_010.0)
        assert clock.wall_ns() == pytest.approx(1_000_010 * 10**9)
        assert clock.now().timestamp() == pytest.approx(1_000_010.0)
        it.shift_wall(-500.0)
        assert clock.wall() == pytest.approx(999_510.0)
        it.suspend(3600.0)
        assert clock.wall() == pytest.approx(1_003_110.0)
        assert clock.monotonic() - before[0] == pytest.approx(10.0)
        assert clock.boot() - before[1] == pytest.approx(3610.0)


# --- parts of the project


def test_a_message_expires_when_its_time_to_live_has_passed(virtual_clock: VirtualClock) -> None:
    with messaging.connect("memory://virtual") as m:
        for seconds, is_there in ((59.9, True), (60.1, False)):
            m.publish("a", b"kept", retain=True, time_to_live=60.0).result()
            virtual_clock.advance(seconds)
            with m.subscribe("a") as stream:
                if is_there:
                    assert stream.receive(1.0).payload == b"kept"
                else:
                    with pytest.raises(DeadlineError):
                        stream.receive(1.0)


def test_a_message_that_is_always_rejected_comes_again_ever_later(virtual_clock: VirtualClock) -> None:
    arrived: list[float] = []

    def fail(_: messaging.Message) -> None:
        arrived.append(clock.monotonic())
        raise ValueError

    with messaging.connect("memory://virtual") as m, m.on("a", fail):
        m.publish("a", b"1", qos="1").result()
        virtual_clock.advance(60.0)
    gaps = [after - before for before, after in pairwise(arrived)]
    assert gaps == sorted(gaps)
    assert max(gaps[:3]) < 0.01
    assert gaps[-1] == pytest.approx(1.0, abs=0.01)
    assert 60 < len(arrived) < 80


def test_leases_are_renewed_for_days(virtual_clock: VirtualClock) -> None:
    with Landlord() as landlord, LeaseRenewalManager() as manager:
        lease, other = landlord.grant(60.0), landlord.grant(60.0)
        manager.renew_for(lease, 86_400.0, 60.0)
        virtual_clock.advance(3600.0)
        assert not lease.is_expired
        assert other.is_expired
        virtual_clock.suspend(61.0)
        assert lease.is_expired


def test_handlers_on_a_loop_and_on_threads_are_done_when_an_advance_returns(virtual_clock: VirtualClock) -> None:
    got: list[tuple[str, bytes]] = []

    async def on_loop(message: messaging.Message) -> None:
        await clock.sleep(0.5)
        got.append(("loop", message.payload))

    def on_thread(message: messaging.Message) -> None:
        clock.pause(0.5)
        got.append(("thread", message.payload))

    with messaging.connect("memory://virtual") as m, m.on("a", on_loop), m.on("a", on_thread):
        for number in range(10):
            m.publish("a", b"%d" % number)
        virtual_clock.advance(10.0)
        assert sorted(got) == sorted((where, b"%d" % n) for where in ("loop", "thread") for n in range(10))

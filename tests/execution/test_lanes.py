"""Lanes: in order, each item once, one at a time; nobody is held up by others, nothing is lost, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import gc
import inspect
import itertools
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from messaging.execution import Lane, LoopLane, Pool, ThreadLane, mailboxes, workers
from messaging.execution import lanes as module
from messaging.execution import pool as pool_module
from messaging.testing.waiting import PATIENCE, eventually
from tests.execution.lane_stress import Stress
from tests.scripts import FORK, run_script
from tests.threads import Loop, in_background, no_more_threads, together


@pytest.fixture(autouse=True)
def _no_defects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing may die behind the scenes. A test in which something is meant to clears ``caplog`` after it looked."""
    yield
    died = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert not died, died


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor looks often, and does not stay."""
    monkeypatch.setattr(pool_module, "_LOOK", 0.005)
    monkeypatch.setattr(pool_module, "_STAY", 0.02)
    monkeypatch.setattr(mailboxes, "_PAUSE", 0.0)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    eventually(lambda: not pool.has_work, "nothing left to do")


@pytest.fixture
def loop() -> Iterator[Loop]:
    with contextlib.closing(Loop()) as loop:
        yield loop


def nothing(*_: Any) -> None:
    pass


def on_threads(
    pool: Pool,
    receive: Callable[[Any], object] = nothing,
    name: str = "a receiver",
    *,
    timeout: float = 0.0,
    stalled: Callable[[Any], object] = nothing,
    **options: Any,
) -> ThreadLane:
    return ThreadLane(receive, pool, name, timeout=timeout, stalled=stalled, **options)


def on_loop(
    pool: Pool,
    loop: asyncio.AbstractEventLoop,
    receive: Callable[[Any], Any] = nothing,
    *,
    timeout: float = 0.0,
    stalled: Callable[[Any], object] = nothing,
    **options: Any,
) -> LoopLane:
    """Return a lane whose receiver is a coroutine function, or a function that is called by one."""

    async def call(item: Any) -> None:
        receive(item)

    coroutine = receive if inspect.iscoroutinefunction(receive) else call
    return LoopLane(coroutine, loop, pool, "a receiver", timeout=timeout, stalled=stalled, **options)


@pytest.fixture(params=["threads", "loop"])
def make(request: pytest.FixtureRequest, pool: Pool, loop: Loop) -> Callable[..., Lane]:
    """Make lanes of functions: on threads, and in another run of the test on an event loop."""
    return partial(on_threads, pool) if request.param == "threads" else partial(on_loop, pool, loop.loop)


def flushed(lane: Lane) -> None:
    """Return when all that was put is done with."""
    done = threading.Event()
    lane.when_done(done.set)
    assert done.wait(PATIENCE)


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "messaging-worker"]


class Gate:
    """A receiver that keeps each item until it is let through; those given to it are open at once."""

    def __init__(self, *open_: Any) -> None:
        self.seen: list[Any] = []
        self.threads: list[int] = []
        self.returned: list[Any] = []
        self._open = {*open_}
        self._steps = threading.Semaphore(0)
        self._changed = threading.Condition()

    def __call__(self, item: Any) -> None:
        with self._changed:
            self.seen.append(item)
            self.threads.append(threading.get_ident())
            self._changed.notify_all()
        if item not in self._open:
            assert self._steps.acquire(timeout=PATIENCE)
        self.returned.append(item)

    def let(self, count: int = 1) -> None:
        self._steps.release(count)

    def entered(self, count: int) -> None:
        """Wait until so many items were received."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, PATIENCE), self.seen


class Alone:
    """A receiver that notices when it is called while it is being called."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.was_twice = False
        self._lock = threading.Lock()

    def __call__(self, item: Any) -> None:
        if not self._lock.acquire(blocking=False):
            self.was_twice = True
            return
        self.seen.append(item)
        self._lock.release()


# --- order, each item once, one at a time


def test_nothing_stays_behind_that_is_put_when_a_thread_or_task_is_about_to_leave(make: Callable[..., Lane]) -> None:
    seen = threading.Semaphore(0)
    lane = make(lambda _: seen.release())
    for number in range(2000):
        lane.put(number)
        if number % 3 == 0:
            lane.put(number)
            assert seen.acquire(timeout=PATIENCE)
        assert seen.acquire(timeout=PATIENCE)


def test_what_is_put_together_stays_together(pool: Pool) -> None:
    seen: list[tuple[int, int]] = []
    lane = on_threads(pool, seen.append)

    def publish(who: int) -> None:
        for number in range(300):
            lane.put_all([(who, 10 * number + each) for each in range(10)])

    def singly() -> None:
        for number in range(2000):
            lane.put((4, number))

    together(*[lambda who=who: publish(who) for who in range(4)], singly)  # type: ignore[misc]
    flushed(lane)
    assert len(seen) == 4 * 3000 + 2000
    for who in range(5):
        assert [number for each, number in seen if each == who] == [*range(2000 if who == 4 else 3000)]
    places = iter(range(len(seen)))
    for place in places:
        if seen[place][0] != 4:
            who, first = seen[place]
            assert seen[place : place + 10] == [(who, first + each) for each in range(10)]
            for _ in range(9):
                next(places)


def test_a_receiver_that_raises_is_logged_and_gets_the_rest(
    pool: Pool, loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not: but if it does, neither a lane nor a thread is lost."""
    seen: list[int] = []

    def receive(number: int) -> None:
        seen.append(number)
        if number % 100 == 0:
            raise SystemExit if number else ValueError

    async def receive_async(number: int) -> None:
        seen.append(number)
        if number % 100 == 0:
            raise ValueError

    lanes: list[Lane] = [on_threads(pool, receive), on_loop(pool, loop.loop, receive_async)]
    for lane in lanes:
        seen.clear()
        lane.put_all([*range(300)])
        flushed(lane)
        assert seen == [*range(300)]
    assert [record.getMessage() for record in caplog.records] == ["the receiver of a receiver raised"] * 6
    caplog.clear()


# --- threads


def test_a_receiver_that_blocks_holds_up_no_other(pool: Pool) -> None:
    took: list[float] = []
    for _ in range(5):
        gate, arrived = Gate(), threading.Event()
        blocked, other = on_threads(pool, gate), on_threads(pool, lambda _, arrived=arrived: arrived.set())
        blocked.put(1)
        gate.entered(1)
        began = time.monotonic()
        other.put(1)
        assert arrived.wait(PATIENCE)
        took.append(time.monotonic() - began)
        gate.let()
        eventually(lambda: not pool.threads, "the threads gone")
    assert min(took) < 0.1, took


def test_there_are_as_many_threads_as_receivers_that_block(pool: Pool) -> None:
    gates = [Gate() for _ in range(40)]
    for gate in gates:
        on_threads(pool, gate).put(1)
    for gate in gates:
        gate.entered(1)
    assert pool.threads >= 40
    for gate in gates:
        gate.let()
    eventually(lambda: not pool.threads, "the threads gone")


def test_there_are_no_more_threads_than_allowed() -> None:
    pool = Pool(2)
    gates = [Gate() for _ in range(5)]
    for gate in gates:
        on_threads(pool, gate).put(1)
    for _ in range(5):
        eventually(lambda: len([gate for gate in gates if len(gate.seen) > len(gate.returned)]) == 2, "two at work")
        # more would come within some milliseconds
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline and sum(len(gate.seen) for gate in gates) < 5:
            assert pool.threads <= 2
            time.sleep(0.005)  # sleeps: nothing tells that no thread starts
        gate = next(gate for gate in gates if len(gate.seen) > len(gate.returned))
        gate.let()
        eventually(lambda gate=gate: gate.returned, "it returns")  # type: ignore[misc]
        if sum(len(gate.seen) for gate in gates) == 5:
            break
    for gate in gates:
        gate.let()
    eventually(lambda: not pool.has_work, "all done")
    assert all(gate.seen == [1] for gate in gates)


def test_a_thousand_lanes_of_quick_receivers_need_few_threads(pool: Pool) -> None:
    idents: set[int] = set()
    seen = [0] * 1000

    def receive(number: int) -> None:
        idents.add(threading.get_ident())
        seen[number] += 1

    lanes = [on_threads(pool, receive) for _ in range(1000)]
    for _ in range(20):
        for number, lane in enumerate(lanes):
            lane.put(number)
    for lane in lanes:
        flushed(lane)
    assert seen == [20] * 1000
    assert len(idents) <= 8


def test_a_lane_with_much_in_it_leaves_the_thread_to_others_now_and_then() -> None:
    pool = Pool(1)
    seen: list[str] = []
    gate = Gate()
    first, second = on_threads(pool, seen.append), on_threads(pool, seen.append)
    stopper = on_threads(pool, gate)
    stopper.put(1)
    gate.entered(1)
    first.put_all(["a"] * 1000)
    second.put_all(["b"] * 1000)
    gate.let()
    flushed(first)
    flushed(second)
    assert sorted(seen) == ["a"] * 1000 + ["b"] * 1000
    assert max(len([*group]) for _, group in itertools.groupby(seen[:1800])) <= module._BATCH


@pytest.mark.usefixtures("quick")
def test_threads_leave_when_nothing_is_left(pool: Pool) -> None:
    for _ in range(3):
        lane = on_threads(pool)
        lane.put(1)
        flushed(lane)
        eventually(lambda: pool.is_idle, "the threads gone")


def test_a_receiver_knows_that_it_is_one(pool: Pool) -> None:
    other = Pool()
    seen: list[bool] = []
    lane = on_threads(pool, lambda _: seen.extend((pool.is_inside(), other.is_inside())))
    lane.put(1)
    flushed(lane)
    assert seen == [True, False]
    assert not pool.is_inside()


# --- receivers that do not return


class Stalls:
    """Counts calls, and where they came from."""

    def __init__(self, do: Callable[[Any], object] = nothing) -> None:
        self.threads: list[str] = []
        self._do = do

    def __call__(self, lane: Any) -> None:
        self.threads.append(threading.current_thread().name)
        self._do(lane)

    def __len__(self) -> int:
        return len(self.threads)


@pytest.mark.usefixtures("quick")
def test_a_receiver_that_does_not_return_is_given_up_and_the_others_go_on() -> None:
    pool = Pool(1)  # its thread does not count any more
    gate, stalls, seen = Gate(), Stalls(), list[int]()
    lane, other = on_threads(pool, gate, timeout=0.05, stalled=stalls), on_threads(pool, seen.append)
    lane.put_all([0, 1, 2])
    gate.entered(1)
    other.put_all([0, 1, 2])
    eventually(lambda: stalls, "it is given up")
    flushed(other)
    assert seen == [0, 1, 2]
    assert stalls.threads == ["messaging-worker"]
    assert lane.is_stalled
    # without restart nothing goes on, not even when it returns; and nobody complains again
    lane.put(3)
    gate.let()
    eventually(lambda: gate.returned == [0], "it returns after all")
    eventually(lambda: pool.is_idle, "nothing to do")
    assert gate.seen == [0]
    assert len(stalls) == 1
    assert lane.close() == 3


@pytest.mark.usefixtures("quick")
def test_a_lane_that_is_restarted_goes_on_with_the_rest_on_another_thread(pool: Pool) -> None:
    gate = Gate(1, 2, 4, 5, 6)
    stalls = Stalls(ThreadLane.restart)
    lane = on_threads(pool, gate, timeout=0.05, stalled=stalls)
    lane.put_all([0, 1, 2, 3, 4, 5])
    eventually(lambda: len(stalls) == 2, "two are given up")
    lane.put(6)
    flushed(lane)
    assert gate.seen == [*range(7)]
    assert gate.returned == [1, 2, 4, 5, 6]
    gate.let(2)  # now the two return, and find that others have gone on
    eventually(lambda: len(gate.returned) == 7, "they return")
    eventually(lambda: not pool.has_work, "nothing to do")
    assert gate.seen == [*range(7)]
    assert len(stalls) == 2
    first, second, third = gate.threads[0], gate.threads[1], gate.threads[4]
    assert len({first, second, third}) == 3
    assert gate.threads[:6] == [first, second, second, second, third, third]


@pytest.mark.usefixtures("quick")
def test_restarting_a_lane_that_is_not_stalled_does_nothing(pool: Pool) -> None:
    gate = Gate()
    lane = on_threads(pool, gate, timeout=0.05)
    lane.put_all([0, 1])
    for _ in range(3):
        gate.entered(1)
    eventually(lambda: lane.is_stalled, "it is given up")
    together(*[lane.restart] * 4)
    gate.entered(2)
    lane.restart()
    eventually(lambda: lane.is_stalled, "it is given up once more")
    lane.timeout = 0
    lane.put(2)
    lane.restart()
    gate.entered(3)
    lane.put(3)
    together(*[lane.restart] * 4)
    flushed(on_threads(pool))
    assert gate.seen == [0, 1, 2]
    gate.let(4)
    flushed(lane)
    assert gate.seen == [0, 1, 2, 3]
    idle = on_threads(pool)
    idle.restart()
    assert not idle.is_scheduled


@pytest.mark.usefixtures("quick")
def test_a_receiver_may_take_for_ever_if_there_is_no_timeout(pool: Pool) -> None:
    gate, other = Gate(), Gate()
    stalls = Stalls()
    lane = on_threads(pool, gate, stalled=stalls)
    lane.put(0)
    # a second one is given up several times over meanwhile
    witness = on_threads(pool, other, timeout=0.05, stalled=ThreadLane.restart)
    witness.put_all([*range(5)])
    other.entered(5)
    eventually(lambda: witness.is_stalled or not witness.is_scheduled, "the last is given up")
    assert not stalls
    # but there may be one later
    lane.timeout = 0.05
    eventually(lambda: stalls, "it is given up")
    gate.let()
    other.let(5)


@pytest.mark.usefixtures("quick")
def test_a_process_that_was_kept_from_running_blames_nobody(pool: Pool) -> None:
    """Somebody holds the interpreter's lock for much longer than the timeout."""
    gate, stalls = Gate(), Stalls()
    lane = on_threads(pool, gate, timeout=0.3, stalled=stalls)
    lane.put(0)
    gate.entered(1)
    (server,) = pool._threads
    eventually(lambda: server.seen == server.begun, "somebody looks")
    ctypes.PyDLL(None).usleep(800_000)  # sleeps: a C call that holds the interpreter lock
    for _ in range(2):
        spent = server.spent
        eventually(lambda spent=spent: server.spent > spent, "somebody looks")  # type: ignore[misc]
    gate.let()
    flushed(lane)
    assert not stalls


@pytest.mark.usefixtures("quick")
def test_many_items_one_after_the_other_are_no_long_one(pool: Pool) -> None:
    stalls = Stalls()

    def receive(_: int) -> None:
        time.sleep(0.01)  # sleeps: all items together take longer than the limit

    lane = on_threads(pool, receive, timeout=0.2, stalled=stalls)
    lane.put_all([*range(60)])
    flushed(lane)
    assert not stalls


@pytest.mark.usefixtures("quick")
def test_a_callback_for_stalls_that_raises_is_logged(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()

    def stalled(_: Any) -> None:
        raise ValueError("a defect")

    lane = on_threads(pool, gate, timeout=0.02, stalled=stalled)
    lane.put_all([0, 1])
    gate.entered(1)
    eventually(lambda: "worker job failed" in caplog.text)
    lane.restart()
    gate.let(2)
    flushed(lane)
    assert gate.seen == [0, 1]
    caplog.clear()


DeliveryThread: Any = pool_module.DeliveryThread


class Raced(DeliveryThread):  # type: ignore[misc]
    """A delivery thread that can be caught between any two steps."""

    __slots__ = ()

    marking: Callable[[Raced], object] = nothing  #: the supervisor is about to give it up
    marked: Callable[[Raced], object] = nothing  #: it has, and is about to look whether it has moved
    judged: Callable[[Raced], object] = nothing  #: it has looked
    leaving: Callable[[Raced], object] = nothing  #: the thread has run the lane, and is about to say so

    @property
    def is_abandoned(self) -> bool:
        return DeliveryThread.is_abandoned.__get__(self)

    @is_abandoned.setter
    def is_abandoned(self, value: bool) -> None:
        if value:
            type(self).marking(self)
        DeliveryThread.is_abandoned.__set__(self, value)
        if value:
            type(self).marked(self)

    @property
    def lane(self) -> ThreadLane | None:
        return DeliveryThread.lane.__get__(self)

    @lane.setter
    def lane(self, value: ThreadLane | None) -> None:
        if value is None and hasattr(self, "begun") and self.begun:
            type(self).leaving(self)
        DeliveryThread.lane.__set__(self, value)

    def is_still_at(self, lane: ThreadLane) -> bool:
        found = super().is_still_at(lane)
        type(self).judged(self)
        return found


class Once:
    """A step at which something is done, the first time somebody comes there."""

    def __init__(self, do: Callable[[Raced], object]) -> None:
        self._do: list[Callable[[Raced], object]] = [do]

    def __call__(self, server: Raced) -> None:
        if self._do:
            self._do.pop()(server)


def moved(server: Raced) -> None:
    """Wait until the thread has returned from the receiver; then it can go no further than to the lock."""
    eventually(lambda: server.begun != server.seen or server.lane is None, "it returns")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("items", [1, 3, module._BATCH, module._BATCH + 1])
@pytest.mark.parametrize("step", ["marking", "marked", "judged"])
def test_a_receiver_that_returns_while_it_is_given_up_has_either_returned_or_not(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, step: str, items: int
) -> None:
    """It is the last item, one of several, the last of a batch, and one before that."""
    gate, stalls = Gate(*range(items - 1), *range(items, 2 * items)), Stalls()

    def catch(server: Raced) -> None:
        gate.let()
        moved(server)

    monkeypatch.setattr(Raced, step, staticmethod(Once(catch)))
    monkeypatch.setattr(pool_module, "DeliveryThread", Raced)
    lane = on_threads(pool, gate, timeout=0.02, stalled=stalls)
    other = on_threads(pool)
    lane.put_all([*range(2 * items)])
    gate.entered(items)
    eventually(lambda: gate.returned[-1:] >= [items - 1], "it is caught")
    flushed(other)
    if step == "judged":
        eventually(lambda: stalls, "it is given up")
        eventually(lambda: not pool.has_work, "its thread is gone")
        assert gate.seen == [*range(items)]
        lane.restart()
    flushed(lane)
    assert gate.seen == [*range(2 * items)]
    assert len(stalls) == (step == "judged")
    assert not lane.is_stalled


@pytest.mark.usefixtures("quick")
def test_a_thread_that_is_given_up_after_the_receiver_has_returned_takes_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gets no processor between the two: neither its own lane nor the next one is lost or run twice."""
    pool = Pool(1)
    proceed = threading.Event()
    seen, others, stalls = list[int](), list[int](), Stalls()
    monkeypatch.setattr(Raced, "leaving", staticmethod(Once(lambda _: proceed.wait(PATIENCE))))
    monkeypatch.setattr(pool_module, "DeliveryThread", Raced)
    lane = on_threads(pool, seen.append, timeout=0.02, stalled=stalls)
    other = on_threads(pool, others.append)
    lane.put(0)
    eventually(lambda: stalls, "it is given up")
    lane.put(1)
    other.put_all([0, 1])
    flushed(other)
    proceed.set()
    other.put(2)
    flushed(other)
    eventually(lambda: len(workers()._idle) == len(worker_threads()), "all threads done")
    assert seen == [0]
    lane.restart()
    flushed(lane)
    assert seen == [0, 1]
    assert others == [0, 1, 2]
    assert len(stalls) == 1


# --- event loops


def test_a_burst_is_one_task(pool: Pool, loop: Loop) -> None:
    names: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        names.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.call(lambda: loop.loop.set_task_factory(factory))
    names.clear()
    seen: list[tuple[int, int]] = []

    async def receive(item: tuple[int, int]) -> None:
        seen.append(item)
        await asyncio.sleep(0)

    lane = on_loop(pool, loop.loop, receive)
    with loop.blocked():
        for number in range(500):
            lane.put((0, number))
    flushed(lane)
    eventually(lambda: not lane.is_scheduled, "the task has ended")
    assert seen == [(0, number) for number in range(500)]
    assert names == ["LaneTask._run"]


def test_receivers_that_never_wait_leave_their_loop_to_others(pool: Pool, loop: Loop) -> None:
    seen: list[int] = []
    turns: list[int] = []

    def turn() -> None:
        turns.append(len(seen))
        if len(seen) < 2000:
            loop.loop.call_soon(turn)

    lane = on_loop(pool, loop.loop, seen.append)
    with loop.blocked():
        lane.put_all([*range(2000)])
        loop.loop.call_soon_threadsafe(turn)
    flushed(lane)
    eventually(lambda: turns and turns[-1] == 2000)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= module._BATCH


@pytest.mark.usefixtures("quick")
def test_a_task_that_is_cancelled_loses_nothing_that_waits(pool: Pool, loop: Loop) -> None:
    seen: list[int] = []
    cancelled: list[int] = []

    async def receive(number: int) -> None:
        seen.append(number)
        try:
            if number % 3 == 0:
                await asyncio.sleep(PATIENCE)  # sleeps: until it is cancelled
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    lane = on_loop(pool, loop.loop, receive)
    lane.task.cancel()  # of nothing
    lane.put_all([*range(5)])
    eventually(lambda: seen == [0])
    lane.task.cancel()
    eventually(lambda: seen == [0, 1, 2, 3])
    (task,) = [task for task in loop.call(asyncio.all_tasks) if task.get_name() == "events for a receiver"]
    loop.call(task.cancel)  # as somebody else would
    lane.put(5)
    flushed(lane)
    assert seen == [*range(6)]
    assert cancelled == [0, 3]


@pytest.mark.usefixtures("quick")
def test_what_is_cancelled_is_the_item_that_was_in_progress_then(pool: Pool, loop: Loop) -> None:
    seen: list[int] = []
    proceed, ended, asked = asyncio.Event(), threading.Event(), threading.Event()

    async def receive(number: int) -> None:
        if number == 0:
            await proceed.wait()
        else:
            await asyncio.sleep(0.02)  # sleeps: the next item is handled while the lane ends
        seen.append(number)

    def end() -> None:
        """The first item goes on in the next turn, before what is posted from now on."""
        proceed.set()
        ended.set()
        assert asked.wait(PATIENCE)

    lane = on_loop(pool, loop.loop, receive)
    lane.put_all([0, 1])
    eventually(lambda: loop.call(lambda: bool(proceed._waiters)), "it waits")  # type: ignore[attr-defined]
    loop.loop.call_soon_threadsafe(end)
    assert ended.wait(PATIENCE)
    lane.task.cancel()
    asked.set()
    flushed(lane)
    assert seen == [0, 1]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_loop_that_ends_with_items_in_a_lane_is_told(pool: Pool, loop_factory: Any, seconds: float) -> None:
    """No item is begun on it, however long it takes to end: it waits for the threads of its executor."""
    stalls, seen = Stalls(), list[int]()
    entered = asyncio.Event()

    async def receive(number: int) -> None:
        seen.append(number)
        entered.set()
        await asyncio.sleep(PATIENCE)  # sleeps: until it is cancelled

    async def main() -> LoopLane:
        lane = on_loop(pool, asyncio.get_running_loop(), receive, stalled=stalls)
        lane.put_all([0, 1, 2])
        await entered.wait()
        asyncio.get_running_loop().run_in_executor(None, time.sleep, seconds)
        return lane

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        lane = runner.run(main())
    eventually(lambda: stalls, "it is told")
    done = threading.Event()
    lane.when_done(done.set)
    assert not done.is_set()
    assert lane.close() == 2
    assert done.is_set()
    assert seen == [0]
    assert stalls.threads == ["messaging-worker"]


def test_what_is_put_for_a_closed_loop_is_told_within_a_second(pool: Pool) -> None:
    loop = asyncio.new_event_loop()
    never, closed, idle = Stalls(), Stalls(), Stalls()

    async def receive(_: Any) -> None:
        raise AssertionError

    waiting = on_loop(pool, loop, receive, stalled=never)
    waiting.put(1)  # it never runs
    late = on_loop(pool, loop, receive, stalled=closed)
    on_loop(pool, loop, receive, stalled=idle)
    loop.close()
    began = time.monotonic()
    late.put(1)
    eventually(lambda: never and closed, "it is told")
    assert time.monotonic() - began < 1
    late.put(2)
    assert (waiting.close(), late.close()) == (1, 2)
    assert (len(never), len(closed), len(idle)) == (1, 1, 0)


@pytest.mark.usefixtures("quick")
def test_a_loop_that_is_closed_when_all_is_done_is_no_stall(pool: Pool) -> None:
    stalls = Stalls()
    for _ in range(30):

        async def main() -> None:
            lane = on_loop(pool, asyncio.get_running_loop(), stalled=stalls)
            done = asyncio.Event()
            lane.put(1)
            lane.when_done(done.set)
            await done.wait()

        asyncio.run(main())
    eventually(lambda: not pool.has_work, "nothing to do")
    assert not stalls


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_closed_lane_whose_loop_is_closed_is_no_stall_and_tells_who_waits(pool: Pool, is_cut_off: bool) -> None:
    """The receiver has returned, or never will, and there is no turn left in which it could say so."""
    loop = asyncio.new_event_loop()
    stalls, reached = Stalls(), threading.Event()
    never = loop.create_future()

    async def receive(_: Any) -> None:
        lane.close()
        if is_cut_off:
            await never

    lane = on_loop(pool, loop, receive, stalled=stalls)
    lane.put(1)
    lane.when_done(reached.set)
    for _ in range(2):  # the task is made, and has its turn
        loop.call_soon(loop.stop)
        loop.run_forever()
    left = asyncio.all_tasks(loop)
    assert lane.task.is_busy
    assert bool(left) == is_cut_off
    loop.close()
    assert reached.wait(PATIENCE)
    assert not stalls
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


@pytest.mark.usefixtures("quick")
def test_a_coroutine_that_does_not_return_is_told_once_and_goes_on_when_cancelled(pool: Pool, loop: Loop) -> None:
    seen: list[int] = []
    waits = asyncio.Event()

    async def receive(number: int) -> None:
        seen.append(number)
        if number in (0, 2):
            await waits.wait()

    stalls = Stalls()
    lane = on_loop(pool, loop.loop, receive, timeout=0.05, stalled=stalls)
    lane.put_all([0, 1, 2, 3])
    eventually(lambda: stalls, "the first is told")
    lane.task.cancel()
    eventually(lambda: len(stalls) == 2, "the second is told")
    assert seen == [0, 1, 2]
    loop.call(waits.set)  # it may return, too
    flushed(lane)
    assert seen == [0, 1, 2, 3]
    assert len(stalls) == 2


@pytest.mark.usefixtures("quick")
def test_who_blocks_the_loop_is_to_blame_and_nobody_else_on_it(pool: Pool, loop: Loop) -> None:
    innocent, guilty = Stalls(), Stalls()
    proceed, entered = asyncio.Event(), threading.Event()

    async def wait(_: Any) -> None:
        entered.set()
        await proceed.wait()

    async def block(_: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not guilty and time.monotonic() < deadline:
            time.sleep(0.001)  # noqa: ASYNC251  # sleeps: the loop must be blocked
        time.sleep(0.1)  # noqa: ASYNC251  # sleeps: as long as the time limit of the other one
        proceed.set()

    waiting = on_loop(pool, loop.loop, wait, timeout=0.1, stalled=innocent)
    blocking = on_loop(pool, loop.loop, block, timeout=0.2, stalled=guilty)
    waiting.put(1)
    assert entered.wait(PATIENCE)
    blocking.put(1)
    flushed(waiting)
    flushed(blocking)
    assert (len(innocent), len(guilty)) == (0, 1)


@pytest.mark.usefixtures("quick")
def test_a_loop_that_somebody_else_blocks_is_nobodys_fault(pool: Pool, loop: Loop) -> None:
    stalls = Stalls()
    proceed, entered = asyncio.Event(), threading.Event()

    async def wait(_: Any) -> None:
        entered.set()
        await proceed.wait()

    lane = on_loop(pool, loop.loop, wait, timeout=0.2, stalled=stalls)
    lane.put(1)
    assert entered.wait(PATIENCE)
    with loop.blocked():
        time.sleep(0.5)  # sleeps: longer than the time limit
        loop.loop.call_soon_threadsafe(proceed.set)
    flushed(lane)
    assert not stalls


def test_coroutines_have_the_context_of_whoever_made_the_lane(pool: Pool, loop: Loop) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nobody's")
    seen: list[str] = []

    async def receive(_: Any) -> None:
        seen.append(variable.get())
        variable.set("a receiver's")

    variable.set("the maker's")
    lane = on_loop(pool, loop.loop, receive)
    variable.set("a publisher's")
    for _ in range(2):
        lane.put(1)
        flushed(lane)
        eventually(lambda: not lane.is_scheduled, "the task has ended")
    assert seen == ["the maker's"] * 2


# --- bounds


def full(pool: Pool, limit: int, *open_: Any, name: str = "a receiver") -> tuple[Gate, ThreadLane]:
    """Return a bounded lane whose receiver keeps the first item, and is open for others."""
    gate = Gate(*open_)
    lane = on_threads(pool, gate, name, limit=limit)
    lane.put("first")
    gate.entered(1)
    return gate, lane


def publish(lane: Lane, count: int) -> int:
    """Put as many items as there is room for; return their number."""
    return sum(lane.has_room() and not lane.put(number) for number in range(count))


def test_a_publisher_waits_until_half_of_a_full_lane_is_gone(pool: Pool) -> None:
    gate, lane = full(pool, 10)
    for number in range(10):
        assert lane.has_room()
        lane.put(number)
    through = threading.Event()
    join = in_background(lambda: lane.has_room() and through.set())
    eventually(lambda: lane.room.is_awaited, "it waits")
    for count in range(2, 6):
        gate.let()
        gate.entered(count)
    assert not through.wait(0.05)
    gate.let()  # the fifth one is taken: now there are five left
    gate.entered(6)
    assert through.wait(PATIENCE)
    assert len(lane) == 5
    join()
    gate.let(10)
    flushed(lane)
    assert lane.room.dropped == 0


def test_no_publisher_is_forgotten_where_there_is_little_room(pool: Pool, loop: Loop) -> None:
    seen: list[int] = []
    lanes: list[Lane] = [on_threads(pool, seen.append, limit=limit) for limit in (1, 2, 5)]
    lanes.append(on_loop(pool, loop.loop, seen.append, limit=3))
    for lane in lanes:
        seen.clear()

        def publish(lane: Lane = lane) -> None:
            for number in range(150):
                assert lane.has_room()
                lane.put(number)

        together(*[publish] * 8)
        flushed(lane)
        assert sorted(seen) == sorted([*range(150)] * 8)
        assert lane.room.dropped == 0


def test_who_must_not_wait_goes_on_up_to_ten_times_the_limit(
    pool: Pool, loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    gate, lane = full(pool, 4, *range(1000), name="Miss Marple")
    assert loop.call(publish, lane, 100) == 40
    assert lane.room.dropped == 60
    results: list[int] = []
    for each in (pool, Pool()):
        inside = on_threads(each, lambda _: results.append(publish(lane, 10)))
        inside.put(1)
        flushed(inside)
    assert results == [0, 0]
    assert lane.room.dropped == 80
    (record,) = caplog.records
    assert record.getMessage() == "Miss Marple is 40 events behind: dropping new events until it has caught up"
    gate.let()
    flushed(lane)
    caplog.clear()


def test_an_overflow_is_logged_once_until_it_is_over(pool: Pool, loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    """Not again when there is room for one and then for none: only after half of the lane was empty."""
    gate, lane = full(pool, 4)
    assert loop.call(publish, lane, 100) == 40
    for count in range(2, 20):
        gate.let()
        gate.entered(count)
        assert loop.call(publish, lane, 100) == 1
    assert lane.room.dropped == 60 + 18 * 99
    assert len(caplog.records) == 1
    gate.let(40 - 2)
    gate.entered(19 + 38)
    assert len(lane) == 2
    assert loop.call(publish, lane, 100) == 38
    assert len(caplog.records) == 2
    caplog.clear()
    gate.let(100)
    flushed(lane)


def test_who_waits_in_vain_drops_and_all_that_is_dropped_is_counted(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.02)
    lane = on_threads(pool, limit=4, is_held=True)
    lane.put_all([*range(4)])
    found: list[bool] = []
    together(*[lambda: found.extend(lane.has_room() for _ in range(5))] * 8)
    assert found == [False] * 40
    assert lane.room.dropped == 40
    assert len(caplog.records) == 1
    caplog.clear()
    lane.release([])
    flushed(lane)


def test_nobody_waits_for_room_in_a_lane_that_is_closed(pool: Pool) -> None:
    lane = on_threads(pool, limit=4, is_held=True)
    lane.put_all([*range(4)])

    def close() -> None:
        eventually(lambda: lane.room.is_awaited, "somebody waits")
        assert lane.close() == 4

    began = time.monotonic()
    together(close, *[lambda: lane.has_room()] * 4)
    assert time.monotonic() - began < PATIENCE
    assert lane.room.dropped == 0


def test_what_is_newest_takes_the_place_of_what_is_oldest(pool: Pool) -> None:
    gate, lane = full(pool, 5, *range(1000))
    for number in range(20):
        lane.put_newest(number)
        assert len(lane) <= 5
    assert lane.room.dropped == 15
    gate.let()
    flushed(lane)
    assert gate.seen == ["first", *range(15, 20)]


def test_the_newest_item_takes_no_place_of_somebody_who_waits_for_the_others(pool: Pool) -> None:
    """Whoever waits is told after what was put before, and that is in progress still."""
    gate, lane = full(pool, 3, *range(100))
    reached: list[list[Any]] = []
    lane.when_done(lambda: reached.append([*gate.returned]))
    lane.when_done(lambda: reached.append([*gate.returned]))
    for number in range(10):
        lane.put_newest(number)
    lane.when_done(lambda: reached.append([*gate.returned]))
    for number in range(10, 20):
        lane.put_newest(number)
    assert not reached
    gate.let()
    flushed(lane)
    assert reached[:2] == [["first"]] * 2
    assert len(reached) == 3
    assert gate.seen[0] == "first"
    assert gate.seen[-1] == 19
    assert len(gate.seen) - 1 + lane.room.dropped == 20


# --- done, closed


def test_who_waits_is_told_when_all_before_is_done_and_not_before(make: Callable[..., Lane]) -> None:
    gate, reached = Gate(), list[list[str]]()
    lane = make(gate)
    lane.when_done(lambda: reached.append([*gate.returned]))
    eventually(lambda: reached == [[]])
    lane.put_all(["a", "b"])
    lane.when_done(lambda: reached.append([*gate.returned]))
    lane.put("c")
    gate.let(3)
    flushed(lane)
    assert reached == [[], ["a", "b"]]
    assert gate.returned == ["a", "b", "c"]


@pytest.mark.parametrize("is_on_loop", [False, True])
def test_a_lane_that_is_closed_delivers_no_more_and_tells_who_waits_when_its_receiver_has_returned(
    pool: Pool, loop: Loop, is_on_loop: bool
) -> None:
    entered, proceed, reached = threading.Event(), threading.Event(), threading.Event()
    seen: list[int] = []

    def receive(number: int) -> None:
        seen.append(number)
        entered.set()
        assert proceed.wait(PATIENCE)

    async def receive_async(number: int) -> None:
        seen.append(number)
        entered.set()
        assert await asyncio.to_thread(proceed.wait, PATIENCE)

    lane = on_loop(pool, loop.loop, receive_async) if is_on_loop else on_threads(pool, receive)
    lane.put_all([*range(100)])
    assert entered.wait(PATIENCE)
    lane.when_done(reached.set)
    assert lane.close() == 99
    assert lane.close() == 0
    lane.put(100)
    lane.put_all([101, 102])
    lane.put_newest(103)
    assert lane.has_room()
    assert len(lane) == 0
    after = threading.Event()
    lane.when_done(after.set)
    assert not reached.wait(0.02)
    assert not after.is_set()
    proceed.set()
    assert reached.wait(PATIENCE)
    assert after.wait(PATIENCE)
    eventually(lambda: not pool.has_work, "nothing to do")
    flushed(lane)
    assert seen == [0]


@pytest.mark.parametrize("is_held", [False, True])
def test_who_waits_is_told_at_once_where_nobody_is_at_work(make: Callable[..., Lane], is_held: bool) -> None:
    lane, reached = make(is_held=is_held), list[int]()
    if is_held:
        lane.put(1)
        lane.when_done(lambda: reached.append(1))
    assert lane.close() == is_held
    lane.when_done(lambda: reached.append(2))
    assert reached == ([1, 2] if is_held else [2])


@pytest.mark.usefixtures("quick")
def test_who_waits_is_told_when_a_lane_is_closed_whose_receiver_was_given_up(pool: Pool) -> None:
    gate = Gate()
    reached = threading.Event()
    # closed before it is given up; and while nobody has said what is to become of it
    lane = on_threads(pool, gate, timeout=0.05)
    lane.put_all([0, 1])
    gate.entered(1)
    lane.when_done(reached.set)
    assert lane.close() == 1
    assert not reached.is_set()
    assert reached.wait(PATIENCE)
    lane.restart()  # too late
    assert not lane.is_stalled

    other = Gate()
    lane = on_threads(pool, other, timeout=0.05)
    lane.put_all([0, 1])
    eventually(lambda: lane.is_stalled, "it is given up")
    reached.clear()
    lane.when_done(reached.set)
    assert lane.close() == 1
    assert reached.is_set()
    gate.let()
    other.let()


def test_what_is_delivered_and_what_is_given_up_is_all_there_was(make: Callable[..., Lane]) -> None:
    """While receivers are at work: by one thread that closes what it has put."""
    chance = random.Random(1)
    for round_ in range(300):
        seen, reached = list[int](), list[int]()
        lane = make(seen.append)
        count = chance.randrange(200)
        for number in range(count):
            lane.put(number)
            if number % 50 == 0:
                lane.when_done(lambda number=number, reached=reached: reached.append(number))  # type: ignore[misc]
            if round_ % 3 == 0 and number % 30 == 0:
                time.sleep(0)
        lost = lane.close()
        lane.put(-1)
        flushed(lane)
        assert seen == [*range(count - lost)]
        assert sorted(reached) == [*range(0, count, 50)]


def test_a_lane_may_be_closed_just_when_its_last_item_is_taken(make: Callable[..., Lane]) -> None:
    class Items(deque[Any]):
        """As if another thread came between."""

        def popleft(self) -> Any:
            if len(self) == 1 and not lane.is_closed:
                assert lane.close() == 1
            return super().popleft()

    seen: list[int] = []
    lane = make(seen.append, is_held=True)
    lane._items = Items([0, 1, 2])
    lane.release([])
    eventually(lambda: not lane.is_scheduled)
    flushed(lane)
    assert seen == [0, 1]


def test_closing_while_others_put_loses_nobody_who_waits(pool: Pool, loop: Loop) -> None:
    """Nor does anything stay in the lane, or come in another order."""
    for round_ in range(60):
        receiver = Alone()
        lane = on_loop(pool, loop.loop) if round_ % 2 else on_threads(pool, receiver)
        reached: list[int] = []

        def publish(who: int, lane: Lane = lane, reached: list[int] = reached) -> None:
            for number in range(60):
                lane.put((who, number))
                if number % 5 == 0:
                    lane.when_done(lambda: reached.append(1))

        def close(lane: Lane = lane, round_: int = round_) -> None:
            if round_ % 3:
                time.sleep(0.0005)  # sleeps: random interleavings of threads
            lane.close()

        together(lambda: publish(0), lambda: publish(1), lambda: publish(2), close, close)
        flushed(lane)
        eventually(lambda reached=reached: len(reached) == 36)  # type: ignore[misc]
        assert len(lane) == 0
        assert not receiver.was_twice
        for who in range(3):
            mine = [number for each, number in receiver.seen if each == who]
            assert mine == [*range(len(mine))]


def test_a_callback_that_raises_is_logged(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def reached() -> None:
        raise SystemExit

    lane = on_threads(pool)
    lane.when_done(reached)
    flushed(lane)
    assert caplog.messages == ["the callback after an event raised"]
    caplog.clear()
    lane.close()
    lane.when_done(reached)
    assert caplog.messages == ["the callback after an event raised"]
    caplog.clear()


# --- held


def test_what_is_put_into_a_held_lane_wakes_nobody(make: Callable[..., Lane], pool: Pool) -> None:
    seen: list[int] = []
    lane = make(seen.append, is_held=True)
    lane.put(2)
    lane.put_all([3, 4])
    assert lane.is_scheduled
    assert not pool.has_work
    lane.release([0, 1])
    flushed(lane)
    assert seen == [*range(5)]
    with pytest.raises(RuntimeError, match="a receiver is not held"):
        lane.release([0])


def test_an_empty_lane_that_was_held_is_like_any_other(pool: Pool) -> None:
    seen: list[int] = []
    lane = on_threads(pool, seen.append, is_held=True)
    lane.release([])
    assert not lane.is_scheduled
    lane.put(1)
    flushed(lane)
    assert seen == [1]


# --- scarcity


def test_where_no_thread_can_be_started_the_one_in_reserve_delivers(pool: Pool, loop: Loop) -> None:
    workers().hold(pool)
    eventually(lambda: len(workers()._idle) == len(worker_threads()) == 1, "only the one in reserve")
    seen: list[list[int]] = [[] for _ in range(6)]
    lanes: list[Lane] = [on_threads(pool, each.append) for each in seen[:5]]
    lanes.append(on_loop(pool, loop.loop, seen[5].append))
    try:
        with no_more_threads():
            for _ in range(3):
                for lane in lanes:
                    lane.put_all([*range(100)])
                for lane in lanes:
                    flushed(lane)
                eventually(lambda: not pool.has_work, "nothing to do")
    finally:
        workers().release(pool)
    assert seen == [[*range(100)] * 3] * 6


def test_what_waits_for_want_of_a_thread_goes_on_with_what_is_put_next(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    eventually(lambda: not worker_threads(), "no thread")
    gate, seen = Gate(1, 2), list[int]()
    lane, other = on_threads(pool, gate), on_threads(pool, seen.append)
    with no_more_threads():
        for number in range(3):
            lane.put(number)
        other.put(3)
    assert caplog.messages == [
        "event delivery: cannot start a delivery thread: can't start new thread; retrying with the next event"
    ]
    caplog.clear()
    assert gate.seen == []
    other.put(4)
    gate.entered(1)
    lane.put(5)  # somebody comes for it
    flushed(other)
    assert seen == [3, 4]
    assert gate.seen == [0]
    gate.let(2)
    flushed(lane)
    assert gate.seen == [0, 1, 2, 5]


def test_signal_handlers_may_put_whatever_they_interrupt() -> None:
    """They run on the main thread between any two steps of what it is at, with the locks it has."""
    script = """
import itertools, signal, threading, time
from messaging.execution.lanes import ThreadLane
from messaging.execution.pool import Pool
from messaging.testing.waiting import eventually

pool = Pool()
seen = []
options = dict(timeout=0, stalled=lambda _: None)
lanes = [ThreadLane(seen.append, pool, "x", limit=5, **options) for _ in range(3)]
counter = itertools.count()
depth = 0

def handle(*_):
    global depth
    depth += 1
    if depth < 4:  # it may be interrupted, too
        for lane in lanes:
            lane.put(next(counter))
        ThreadLane(seen.append, pool, "x", **options).put(next(counter))
    depth -= 1
    signal.setitimer(signal.ITIMER_REAL, 0.0002)

signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.0002)
deadline = time.monotonic() + 0.7
while time.monotonic() < deadline:
    for lane in lanes:
        if lane.has_room():
            lane.put(next(counter))
        lane.has_room()
    ThreadLane(seen.append, pool, "x", **options).close()
signal.signal(signal.SIGALRM, signal.SIG_IGN)
for lane in lanes:
    done = threading.Event()
    lane.when_done(done.set)
    assert done.wait(10)
eventually(lambda: not pool.has_work)
count = next(counter)
assert sorted(seen) == [*range(count)], (len(seen), count)
assert count > 100
"""
    run_script(script, seconds=60)


def test_finalizers_may_put_and_close_whatever_they_interrupt(pool: Pool) -> None:
    """The collector runs them where something is allocated: with locks held, too."""
    seen: list[int] = []
    lanes = [on_threads(pool, seen.append) for _ in range(3)]
    counter = itertools.count()

    class Finalized:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            for lane in lanes:
                lane.put(next(counter))
            closed = on_threads(pool, is_held=True)
            closed.put(1)
            assert closed.close() == 1

    before = gc.get_threshold()
    gc.set_threshold(30, 1, 1)
    try:
        for _ in range(400):
            Finalized()
            lanes[0].put(next(counter))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    for lane in lanes:
        flushed(lane)
    assert sorted(seen) == [*range(next(counter))]


# --- forks


LANES = (
    FORK
    + """
import asyncio, time
from messaging.execution import lanes as module
from messaging.execution.lanes import LoopLane, ThreadLane
from messaging.execution.pool import Pool
from messaging.testing.waiting import eventually

def lane(receive, **options):
    return ThreadLane(receive, pool, "x", **{"timeout": 0, "stalled": lambda _: None, **options})

def flushed(lane):
    done = threading.Event()
    lane.when_done(done.set)
    assert done.wait(10)

pool = Pool()
"""
)


def test_a_forked_child_delivers_what_is_put_there_and_nothing_of_its_parent() -> None:
    script = """
stop = threading.Event()
seen = [[] for _ in range(4)]
held = lane(seen[3].append, is_held=True, limit=4)
held.put_all([("parent", 0)] * 4)
lanes = [lane(each.append, limit=20) for each in seen[:3]]
put = [0] * 8

def publish(who):
    while not stop.is_set():
        for each in lanes:
            eventually(each.has_room)
            each.put((who, put[who]))
        put[who] += 1
        if who % 3 == 0:
            time.sleep(0.0005)  # sleeps: random interleavings of threads

module._PATIENCE = 0.001
module.logger.logger.disabled = True
threads = [threading.Thread(target=publish, args=(who,), daemon=True) for who in range(8)]

def wait():
    while not stop.is_set():
        held.has_room()  # with its lock

threads.append(threading.Thread(target=wait, daemon=True))
for thread in threads:
    thread.start()
eventually(lambda: all(put[:8]))

def work():
    before = [[*each] for each in seen]
    module._PATIENCE = 10
    for number, each in enumerate(lanes):
        assert len(each) == 0
        assert each.has_room()
        for item in range(100):
            assert each.has_room()
            each.put(("child", item))
    mine = []
    other = lane(mine.append)
    other.put(1)
    flushed(other)
    assert mine == [1]
    for each in lanes:
        flushed(each)
    for old, new in zip(before, seen[:3]):
        assert new[len(old):] == [("child", item) for item in range(100)], new[len(old):]
    assert held.is_scheduled
    held.put("child")
    held.release(["first"])
    flushed(held)
    assert seen[3] == ["first", "child"], seen[3]

for _ in range(10):
    child(work)
child(lambda: child(work))
stop.set()
for thread in threads:
    thread.join(10)
for each in lanes:
    flushed(each)
for each in seen[:3]:
    for who in range(8):
        assert [number for other, number in each if other == who] == [*range(put[who])]
    assert len(each) == sum(put)
assert len(held) == 4
"""
    run_script(LANES + script, seconds=60)


def test_locks_that_others_had_when_a_process_forked_are_free_in_the_child() -> None:
    script = """
seen = []
each = lane(seen.append, limit=2)
over, held = threading.Event(), threading.Semaphore(0)

def hold(lock):
    with lock:
        held.release()
        over.wait(20)

for lock in (each.room._lock, pool._lock):
    threading.Thread(target=hold, args=(lock,), daemon=True).start()
    assert held.acquire(timeout=10)

def work():
    for number in range(100):
        assert each.has_room()
        each.put(number)
    flushed(each)
    assert seen == [*range(100)]

child(work)
over.set()
"""
    run_script(LANES + script)


def test_a_receiver_that_forks_goes_on_in_the_parent_only() -> None:
    """In the child it returns to a thread that was given up; others deliver there."""
    script = """
seen, idents, status = [], set(), []
entered, returned = threading.Event(), threading.Event()

class Pid(int):
    def __del__(self):
        returned.set()

def receive(number):
    seen.append(number)
    idents.add(threading.get_ident())
    if number == 10:
        entered.set()
        assert returned.wait(10)
        time.sleep(0.05)  # sleeps: the thread that forked could go on now
    if number == 1:
        pid = Pid(os.fork())
        if pid:
            status.append(os.waitpid(pid, 0)[1])
            return
        seen.clear()
        idents.clear()
        each.put_all([10, 11, 12])
        assert entered.wait(10)
        threading.Thread(target=check, args=(threading.get_ident(),)).start()

def check(forked):
    try:
        flushed(each)
        assert seen == [10, 11, 12], seen
        assert len(idents) == 1 and forked not in idents
        os._exit(7)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

each = lane(receive)
each.put_all([0, 1, 2, 3])
flushed(each)
assert seen == [0, 1, 2, 3], seen
assert [os.waitstatus_to_exitcode(each) for each in status] == [7], status
"""
    run_script(LANES + script)


def test_the_loops_of_the_parent_are_as_good_as_closed_in_the_child() -> None:
    script = """
seen = []
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()

async def receive(item):
    seen.append(item)
    await asyncio.sleep(0.001)  # sleeps: items are handled while the process forks

stalled = threading.Event()
each = LoopLane(receive, loop, pool, "x", timeout=0, stalled=lambda _: stalled.set())

def work():
    assert len(each) == 0
    before = len(seen)
    assert not stalled.is_set()
    each.put("child")
    assert stalled.wait(10)
    assert each.close() == 1
    async def main():
        mine = LoopLane(receive, asyncio.get_running_loop(), pool, "x", timeout=0, stalled=lambda _: stalled.set())
        mine.put("mine")
        while len(seen) == before:
            await asyncio.sleep(0)
    asyncio.run(main())
    assert seen[before:] == ["mine"], seen[before:]

for _ in range(5):
    each.put_all([*range(50)])
    child(work)
flushed(each)
assert seen == [*range(50)] * 5
loop.call_soon_threadsafe(loop.stop)
"""
    run_script(LANES + script)


# --- memory


@pytest.mark.usefixtures("quick")
def test_nothing_holds_what_is_closed(loop: Loop) -> None:
    def use(pool: Pool) -> list[Lane]:
        gate = Gate()
        blocked = on_threads(pool, gate)
        blocked.put(1)
        gate.entered(1)
        waiting, idle, held = on_threads(pool), on_threads(pool), on_threads(pool, is_held=True)
        waiting.put(1)  # for the only thread there may be
        waiting.close()
        assert waiting not in pool._ready
        gate.let()
        done = on_loop(pool, loop.loop)
        done.put(1)
        flushed(done)
        with loop.blocked():
            begun = on_loop(pool, loop.loop)
            begun.put(1)
            begun.close()
            assert begun not in pool._adopted
        made: list[Lane] = [blocked, waiting, idle, held, done, begun]
        flushed(blocked)
        for each in made:
            each.put(2)
            each.close()
            each.put(3)
        return made

    def references() -> list[weakref.ref[Any]]:
        pool = Pool(1)
        found: list[weakref.ref[Any]] = [weakref.ref(pool)]
        for _ in range(3):
            found += map(weakref.ref, use(pool))
        return found

    left = references()

    def gone() -> bool:
        gc.collect()
        return not any(each() for each in left)

    eventually(gone, "lanes and pool gone")


@pytest.mark.usefixtures("quick")
def test_a_loop_that_is_closed_is_not_held_by_what_was_on_its_way_to_it(pool: Pool) -> None:
    def forsake() -> list[weakref.ref[Any]]:
        loop = asyncio.new_event_loop()
        stalls = Stalls()
        lane = on_loop(pool, loop, timeout=1, stalled=stalls)
        lane.put(1)
        lane.task.cancel()
        loop.close()
        eventually(lambda: stalls, "it is told")
        lane.close()
        return [weakref.ref(loop), weakref.ref(lane)]

    references = forsake()

    def gone() -> bool:
        gc.collect()
        return not any(each() for each in references)

    eventually(gone, "the loop gone")


def test_items_are_not_held_when_they_are_delivered_or_given_up(pool: Pool) -> None:
    class Item:
        pass

    lane = on_threads(pool)
    references: list[weakref.ref[Any]] = []
    for each in (1, 2, 3):
        item = Item()
        references.append(weakref.ref(item))
        if each == 2:
            flushed(lane)
            lane.close()
        lane.put(item)
        del item
    eventually(lambda: not any(each() for each in references), "the items gone")


# --- all of it at once


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(2))
def test_all_of_it_at_once(seed: int) -> None:
    with contextlib.closing(Stress(seed)) as stress:
        stress.run(1.5)
        stress.check()


def test_what_a_child_gives_up_may_put_something_whatever_its_parent_was_doing() -> None:
    """A finalizer that puts something, while another thread of the parent had the lock of the pool.

    The parent's own comes at the very end of its interpreter, where no thread can be started any more.
    """
    script = """
class Item:
    def __del__(self):
        other.put(1)

other, held = lane(lambda _: None), lane(lambda _: None, is_held=True)
held.put(Item())
has_it, may_go = threading.Event(), threading.Event()

def hold():
    with pool._lock:
        has_it.set()
        may_go.wait(30)

holder = threading.Thread(target=hold)
holder.start()
assert has_it.wait(10)
child(lambda: None)  # it has come out of the fork
may_go.set()
holder.join()
"""
    run_script(LANES + script)

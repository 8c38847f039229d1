"""Promise: every thread, loop and callback that waits gets the one outcome."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messaging.errors import ConnectionLostError, DeadlineError, MessagingError
from messaging.execution import Promise, engine
from messaging.testing.waiting import PATIENCE, eventually
from tests.doubles.fake import on_loop
from tests.threads import together


def settled(value: Any = 42, error: MessagingError | None = None) -> Promise[Any]:
    promise: Promise[Any] = Promise("a test")
    on_loop(lambda: promise.resolve(value) if error is None else promise.reject(error))
    return promise


@pytest.mark.parametrize("value", [42, None])
def test_a_result_is_there_for_every_way_of_asking(value: int | None) -> None:
    promise = settled(value)
    assert promise.done()
    assert promise.result() == promise.result(0) == value
    assert promise.exception() is None

    async def ask() -> Any:
        return await promise

    assert asyncio.run(ask()) == value


def test_a_failure_is_the_same_error_for_every_way_of_asking() -> None:
    error = MessagingError("no")
    promise = settled(error=error)
    assert promise.exception() is error
    with pytest.raises(MessagingError) as caught:
        promise.result()
    assert caught.value is error

    async def ask() -> Any:
        return await promise

    with pytest.raises(MessagingError) as caught:
        asyncio.run(ask())
    assert caught.value is error


def test_a_wait_that_is_too_short_fails_and_leaves_the_promise_alone() -> None:
    promise: Promise[int] = Promise("the thing")
    with pytest.raises(DeadlineError, match=r"the thing within 0\.01 s"):
        promise.result(0.01)
    with pytest.raises(DeadlineError):
        promise.exception(0)
    assert not promise.done()
    on_loop(promise.resolve, 7)
    assert promise.result(0) == 7


def test_a_cause_given_to_reject_is_the_errors_cause() -> None:
    promise: Promise[int] = Promise()
    cause = OSError("below")
    on_loop(promise.reject, MessagingError("above"), cause)
    error = promise.exception()
    assert error is not None
    assert error.__cause__ is cause


def test_threads_and_loops_that_wait_are_all_told_once() -> None:
    promise: Promise[int] = Promise("a test")
    waiting = threading.Barrier(25)

    def block() -> int:
        waiting.wait(PATIENCE)
        return promise.result(PATIENCE)

    def loop() -> list[int]:
        async def one(entered: asyncio.Event) -> int:
            entered.set()
            return await promise

        async def many() -> list[int]:
            events = [asyncio.Event() for _ in range(20)]
            tasks = [asyncio.create_task(one(event)) for event in events]
            for event in events:
                await event.wait()
            await asyncio.to_thread(waiting.wait, PATIENCE)
            return await asyncio.gather(*tasks)

        return asyncio.run(many())

    with ThreadPoolExecutor(24) as pool:
        blocked = [pool.submit(block) for _ in range(20)]
        loops = [pool.submit(loop) for _ in range(4)]
        waiting.wait(PATIENCE)
        on_loop(promise.resolve, 5)
        assert [each.result(PATIENCE) for each in blocked] == [5] * 20
        assert [each.result(PATIENCE) for each in loops] == [[5] * 20] * 4


@pytest.mark.parametrize("ask", ["result", "await", "callback"])
def test_no_wake_up_is_lost_when_asking_races_with_the_outcome(ask: str) -> None:
    rounds, askers = 300, 4
    promises: list[Promise[int]] = [Promise("a race") for _ in range(rounds)]
    barrier = threading.Barrier(askers + 1)
    called: list[int] = []

    def asker() -> int:
        total = 0
        with asyncio.Runner() as runner:
            for promise in promises:
                barrier.wait(PATIENCE)
                if ask == "result":
                    total += promise.result(PATIENCE)
                elif ask == "await":

                    async def wait(promise: Promise[int] = promise) -> int:
                        async with asyncio.timeout(PATIENCE):
                            return await promise

                    total += runner.run(wait())
                else:
                    promise.add_done_callback(lambda p: called.append(p.result()))
        return total

    def resolver() -> None:
        for promise in promises:
            barrier.wait(PATIENCE)
            engine().call(promise.resolve, 1)

    with ThreadPoolExecutor(askers + 1) as pool:
        answers = [pool.submit(asker) for _ in range(askers)]
        pool.submit(resolver).result(60)
        totals = [answer.result(60) for answer in answers]
    if ask == "callback":
        eventually(lambda: len(called) == rounds * askers, "every callback")
        assert sum(called) == rounds * askers
    else:
        assert totals == [rounds] * askers


def test_listeners_that_race_with_the_outcome_run_exactly_once() -> None:
    rounds, threads, each = 200, 4, 5
    for _ in range(rounds):
        promise: Promise[None] = Promise("a race")
        calls: list[int] = []

        def listen(promise: Promise[None] = promise, calls: list[int] = calls) -> None:
            for number in range(each):
                promise.listen(lambda number=number: calls.append(number))  # type: ignore[misc]

        together(partial(promise.resolve, None), *[listen] * threads)
        assert sorted(calls) == sorted([*range(each)] * threads)


def test_callbacks_run_on_workers_and_not_on_the_loop() -> None:
    promise: Promise[int] = Promise("a test")
    seen: list[tuple[str, int]] = []
    done = threading.Event()

    def callback(p: Promise[int]) -> None:
        seen.append((threading.current_thread().name, p.result(0)))
        done.set()

    promise.add_done_callback(callback)
    on_loop(promise.resolve, 3)
    assert done.wait(PATIENCE)
    done.clear()
    promise.add_done_callback(callback)  # and afterwards just the same
    assert done.wait(PATIENCE)
    assert [value for _, value in seen] == [3, 3]
    assert all(name.startswith("messaging-worker") for name, _ in seen)


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_callbacks_that_raise_are_logged_and_do_not_use_up_the_threads(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def callback(_: Promise[int]) -> None:
        raise kind

    promise: Promise[int] = Promise("the operation")
    done = threading.Event()
    for _ in range(100):
        promise.add_done_callback(callback)
    promise.add_done_callback(lambda _: done.set())
    on_loop(promise.resolve, 3)
    assert done.wait(PATIENCE)
    eventually(lambda: "callback of the operation raised" in caplog.text, "the log entry")
    caplog.clear()


def test_callbacks_that_block_do_not_breed_threads() -> None:
    """The workers promise a bound: as many threads as there are busy streams; promises come by the thousand."""
    release = threading.Event()
    before = threading.active_count()
    finished: list[int] = []

    def callback(_: Promise[int]) -> None:
        release.wait(PATIENCE)
        finished.append(1)

    promises = [Promise[int]("a test") for _ in range(400)]
    for promise in promises:
        promise.add_done_callback(callback)
    try:
        on_loop(lambda: [promise.resolve(1) for promise in promises])
        assert threading.active_count() - before < 100
    finally:
        release.set()
    eventually(lambda: len(finished) == 400, "every callback")


def test_a_failure_whose_result_is_never_retrieved_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    promise = settled(error=MessagingError("reason"))
    assert "was never retrieved" not in caplog.text
    del promise
    gc.collect()
    assert "a test failed and its result was never retrieved: MessagingError: reason" in caplog.text
    caplog.clear()


def look_result(promise: Promise[Any]) -> None:
    with pytest.raises(MessagingError):
        promise.result()


def look_exception(promise: Promise[Any]) -> None:
    assert promise.exception() is not None


def look_await(promise: Promise[Any]) -> None:
    async def ask() -> None:
        with pytest.raises(MessagingError):
            await promise

    asyncio.run(ask())


def look_callback(promise: Promise[Any]) -> None:
    done = threading.Event()
    promise.add_done_callback(lambda _: done.set())
    assert done.wait(PATIENCE)


@pytest.mark.parametrize("look", [look_result, look_exception, look_await, look_callback])
def test_a_failure_whose_result_was_retrieved_is_not_logged(
    look: Callable[[Promise[Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    promise = settled(error=MessagingError("reason"))
    look(promise)
    del promise
    gc.collect()
    assert "was never retrieved" not in caplog.text


def test_a_success_whose_result_is_never_retrieved_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    settled()
    gc.collect()
    assert caplog.text == ""


def test_a_cancelled_await_leaves_the_promise_usable() -> None:
    promise: Promise[int] = Promise("a test")

    async def main() -> int:
        entered = asyncio.Event()

        async def wait() -> int:
            entered.set()
            return await promise

        task = asyncio.create_task(wait())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine().call(promise.resolve, 9)
        async with asyncio.timeout(PATIENCE):
            return await promise

    assert asyncio.run(main()) == 9


def test_an_outcome_after_the_waiting_loop_closed_is_kept() -> None:
    promise: Promise[int] = Promise("a test")

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(promise), 0.01)

    asyncio.run(give_up())
    on_loop(promise.resolve, 1)
    assert promise.result(0) == 1


def test_waits_that_time_out_leave_nothing_behind() -> None:
    """A program that polls ``m.ready.result(0.1)`` for a day must not grow."""
    promise: Promise[int] = Promise("a test")
    for _ in range(50):
        with pytest.raises(DeadlineError):
            promise.result(0)

    async def poll() -> None:
        for _ in range(50):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await promise

    asyncio.run(poll())
    assert len(promise._listeners or ()) < 10
    on_loop(promise.resolve, 1)


def test_loops_that_waited_are_not_kept_alive() -> None:
    """``asyncio.run`` per call is common; each has a loop of its own."""
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def wait(promise: Promise[int]) -> int:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        return await promise

    def one_round() -> None:
        promise: Promise[int] = Promise("a test")
        engine().call(engine().loop.call_later, 0.002, promise.resolve, 1)
        assert asyncio.run(wait(promise)) == 1

    for _ in range(5):
        one_round()

    def alive() -> list[asyncio.AbstractEventLoop]:
        gc.collect()
        return [found for loop in loops if (found := loop()) is not None]

    eventually(lambda: not alive(), "all loops are gone")


def test_asking_a_failed_promise_again_and_again_does_not_grow_its_traceback() -> None:
    """The same error every time, but not with the tracebacks, and so the locals, of every earlier caller."""
    promise = settled(error=ConnectionLostError("gone"))
    lengths = []
    for _ in range(20):
        with pytest.raises(ConnectionLostError) as caught:
            promise.result()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert lengths[-1] <= lengths[0] + 1


def test_repr_tells_the_state() -> None:
    promise: Promise[int] = Promise("the operation")
    assert repr(promise) == "<Promise of the operation: pending>"
    on_loop(promise.resolve, 1)
    assert repr(promise) == "<Promise of the operation: resolved>"
    failed = settled(error=MessagingError("no"))
    failed.exception()
    assert repr(failed) == "<Promise of a test: failed: MessagingError>"


def test_the_name_may_be_made_when_it_is_needed() -> None:
    calls: list[int] = []

    def name() -> str:
        calls.append(1)
        return "lazy"

    promise: Promise[int] = Promise(name)
    assert not calls
    assert promise.what == "lazy"


@given(steps=st.lists(st.sampled_from(["resolve", "reject", "listen", "callback", "result", "exception"]), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_order_of_steps_agrees_with_a_model(steps: list[str]) -> None:
    promise: Promise[int] = Promise("a test")
    outcome: str | None = None
    heard: list[str] = []
    listeners = 0
    for step in steps:
        if step == "resolve":
            assert promise.resolve(1 if outcome is None else 2) == (outcome is None)
            outcome = outcome or "resolved"
        elif step == "reject":
            assert promise.reject(MessagingError("no")) == (outcome is None)
            outcome = outcome or "failed"
        elif step == "listen":
            promise.listen(lambda: heard.append("x"))
            listeners += 1
        elif step == "callback":
            promise.add_done_callback(lambda _: None)
        elif outcome is None:
            with pytest.raises(DeadlineError):
                getattr(promise, step)(0)
        elif step == "exception":
            assert (promise.exception(0) is None) == (outcome == "resolved")
        elif outcome == "failed":
            with pytest.raises(MessagingError, match="no"):
                promise.result(0)
        else:
            assert promise.result(0) == 1
        assert promise.done() == (outcome is not None)
        assert len(heard) == (listeners if outcome else 0)
    if outcome is not None:
        promise.exception(0)


def test_a_wait_that_is_interrupted_leaves_nothing_at_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    promise: Promise[Any] = Promise("never")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("messaging.execution.waiting.Flag.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            promise.result(PATIENCE)
    assert not promise._listeners


def test_a_coroutine_that_is_closed_while_it_awaits_leaves_nothing_at_its_promise() -> None:
    promise: Promise[Any] = Promise("never")

    async def wait() -> None:
        await promise

    async def close() -> None:
        waiting = wait()
        waiting.send(None)
        assert promise._listeners
        waiting.close()

    asyncio.run(close())
    assert not promise._listeners

"""Synchronous delivery: on threads and on event loops (RFC 97 5.2.1, 5.2.3, 6.4.2)."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import functools
import signal
import threading
from typing import Any

import pytest

from messaging.errors import ArgumentError, DeadlineError
from messaging.eventadmin import Event
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, eventually_async
from tests.eventadmin.conftest import (
    MOMENT,
    SOON,
    AsyncGate,
    AsyncRecorder,
    Gate,
    Hub,
    Hubs,
    Recorder,
    on,
    own_hub,
)
from tests.raising import raising_log
from tests.threads import in_background, in_threads

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def number(value: Any, topic: str = "a") -> Event:
    return Event(topic, {"n": value})


# --- on threads


def test_all_handlers_must_have_returned_before_send_returns(hub: Hub) -> None:
    """Scenario 21; RFC 97 4.1.2 [7], 5.2.1, 6.4.2."""
    gate, last = hub.gate(), hub.record(ranking=-1)
    join = in_background(lambda: hub.send_number(1))
    gate.wait()
    assert last.events == []
    gate.opened.set()
    join()
    assert gate.numbers == last.numbers == [1]


@table("timeout", [0, PATIENCE])
@own_hub
def test_send_waits_for_handlers_on_all_threads(hub: Hub, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
    """Scenario 21; RFC 97 5.2.1: the caller's thread, or another one with a timeout, or an event loop."""
    plain, coroutine = hub.record(), AsyncRecorder()
    on(loop, lambda: hub.handle(coroutine))
    hub.send_number(1, timeout=timeout)
    assert plain.numbers == coroutine.numbers == [1]
    assert (plain.threads == [threading.get_ident()]) is (timeout == 0)
    assert coroutine.loops == [loop]


@table("timeout", [0, PATIENCE])
@own_hub
def test_events_sent_by_one_thread_must_be_processed_serially_and_in_order(hub: Hub, timeout: float) -> None:
    """Scenario 22; RFC 97 5.2.3."""
    steps: list[Any] = []
    for _ in range(2):
        hub.handle(lambda event: steps.append(event.get_property("n")))
    for each in range(50):
        hub.send_number(each, timeout=timeout)
    assert steps == sorted([*range(50)] * 2)


def test_an_event_sent_by_a_handler_comes_before_the_rest_of_the_first_one(hub: Hub) -> None:
    """Scenario 23; RFC 97 5.2.3: some handlers see the second one first. Whether the first was posted or sent."""
    steps: list[str] = []

    def first(event: Event) -> None:
        steps.append(f"first begins {event.topic}")
        if event.topic == "a":
            hub.admin.send_event(Event("b"))
        steps.append(f"first ends {event.topic}")

    def last(event: Event) -> None:
        steps.append(f"last {event.topic}")

    hub.handle(first, ranking=1)
    hub.handle(last)
    expected = ["first begins a", "first begins b", "first ends b", "last b", "first ends a", "last a"]
    hub.admin.send_event(Event("a"))
    assert steps == expected
    hub.admin.post_event(Event("a"))
    hub.flush()
    assert steps == expected * 2


@table("timeout", [0, PATIENCE])
@table("publish", ["post_event", "send_event"])
@own_hub
def test_a_handler_may_send_to_itself(hub: Hub, publish: str, timeout: float) -> None:
    """Scenario 24: no deadlock, and no wrong depth."""
    steps: list[int] = []

    def handler(event: Event) -> None:
        depth = event.get_property("n")
        steps.append(depth)
        if depth < 20:
            hub.send_number(depth + 1, timeout=timeout)
        steps.append(depth)

    hub.handle(handler)
    getattr(hub.admin, publish)(number(0))
    hub.flush()
    assert steps == [*range(21), *range(20, -1, -1)]


@table("timeout", [0, PATIENCE])
@own_hub
def test_exceptions_must_be_caught_logged_and_delivery_continued(hub: Hub, timeout: float) -> None:
    """Scenario 25; RFC 97 4.1.3 [16], [17], 5.3.1."""
    failing, other = hub.failing(ValueError("boom")), hub.record(ranking=-1)
    hub.send_number(1, timeout=timeout)
    failing.error = None
    hub.send_number(2, timeout=timeout)
    assert failing.numbers == other.numbers == [1, 2]
    (text,) = hub.logged("failed on the event 'a'")
    for part in (repr(failing.registration.reference), "Failing.handle_event", "ValueError: boom"):
        assert part in text
    assert (hub.dto(failing).failures, hub.blocked(failing)) == (1, None)
    failing.error = ValueError("boom")
    with raising_log("messaging"):
        hub.send_number(3, timeout=timeout)
    assert failing.numbers == other.numbers == [1, 2, 3]


def test_a_deadlock_of_the_sender_s_own_making_ends_with_its_timeout(hubs: Hubs) -> None:
    """Scenario 26; RFC 97 5.2.1: clients MUST NOT hold locks. If one does all the same, it is freed."""
    hub = hubs(send_timeout=SOON)
    lock = threading.Lock()
    entered: list[Any] = []

    def handler(event: Event) -> None:
        with lock:
            entered.append(event.get_property("n"))

    registration = hub.handle(handler)
    other = hub.record(ranking=-1)
    with lock:
        hub.send_number(1)
    assert other.numbers == [1]
    assert hub.blocked(registration) == f"it took more than {SOON:g} s for one event"
    assert hub.logged("for * is blocked", repr(registration.reference))
    hub.send_number(2)
    eventually(lambda: entered == [1], "the handler returns")
    registration.update({"event.topics": "*"})
    hub.send_number(3)
    assert entered == [1, 3]
    assert other.numbers == [1, 2, 3]


def test_the_timeout_of_a_call_goes_before_that_of_the_admin(hubs: Hubs) -> None:
    hub = hubs(send_timeout=SOON)
    recorder = hub.record()
    hub.send_number(1, timeout=0)
    assert recorder.threads == [threading.get_ident()]
    for wrong in (-1, "1", float("nan"), float("inf"), True):
        with pytest.raises(ArgumentError):
            hub.send_number(2, timeout=wrong)
    assert recorder.numbers == [1]


def test_events_sent_by_different_threads_may_be_processed_at_the_same_time(hub: Hub) -> None:
    """RFC 97 5.2.3."""
    barrier = threading.Barrier(3)
    hub.handle(lambda event: barrier.wait(PATIENCE))
    in_threads(3, hub.send_number)


def test_sent_events_do_not_wait_for_posted_ones(hub: Hub) -> None:
    """RFC 97 5.2.3: they are delivered as soon as they are sent."""
    gate, recorder = hub.gate(topics="slow"), hub.record()
    hub.admin.post_event(Event("slow"))
    hub.post("posted")
    gate.wait()
    hub.send_number("sent")
    assert recorder.numbers == ["sent"]
    gate.opened.set()
    hub.flush()
    assert recorder.numbers == ["sent", None, "posted"]


def test_the_receivers_of_a_sent_event_are_determined_at_sending(hub: Hub) -> None:
    """RFC 97 5.2.1; a handler that was unregistered by one before it is not called (4.1.2 [12])."""
    late, gone = Recorder(), Recorder()

    def handler(event: Event) -> None:
        gone.registration.unregister()
        hub.handle(late)

    hub.handle(handler, ranking=1)
    hub.handle(gone)
    hub.send_number(1)
    assert (late.numbers, gone.numbers) == ([], [])
    hub.send_number(2)
    assert late.numbers == [2]


def test_handlers_run_in_the_context_of_the_sender(hub: Hub) -> None:
    """The context variables of the sender, with a timeout or without."""
    seen: list[str] = []
    hub.handle(lambda event: seen.append(variable.get()))
    token = variable.set("mine")
    try:
        hub.send_number(1)
        hub.send_number(2, timeout=PATIENCE)
    finally:
        variable.reset(token)
    assert seen == ["mine", "mine"]


def test_sent_events_have_ten_threads_for_each_other(hub: Hub) -> None:
    """Scenario 34 for sent events."""
    recorder = hub.record()

    def run(thread: int) -> None:
        for each in range(300):
            hub.send_number((thread, each))

    in_threads(10, run)
    for thread in range(10):
        assert [each for each in recorder.numbers if each[0] == thread] == [(thread, each) for each in range(300)]


# --- interrupts


def test_an_interrupt_is_raised_in_the_sender_after_the_other_handlers(hub: Hub) -> None:
    """Ctrl-C on the main thread is meant for the program, not for the handler that happens to run."""
    gate = Gate()

    def handler(event: Event) -> None:
        _thread.interrupt_main()
        gate.handle_event(event)

    registration = hub.handle(handler)
    other = hub.record(ranking=-1)
    with pytest.raises(KeyboardInterrupt):
        hub.send_number(1)
    assert gate.returned == []
    assert other.numbers == [1]
    assert not hub.logged()
    assert (hub.dto(registration).failures, hub.blocked(registration)) == (0, None)


def test_an_interrupt_ends_the_waiting_for_a_handler_elsewhere(hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
    gate, coroutine, other = hub.gate(topics="thread"), AsyncGate(), hub.record(ranking=-1)
    on(loop, lambda: hub.handle(coroutine, "loop"))
    raised: list[str] = []

    def interrupted(*_: Any) -> None:
        if topic not in raised:
            raised.append(topic)
            raise KeyboardInterrupt

    def interrupt(topic: str, stuck: Any) -> None:
        def is_interrupted() -> bool:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            return topic in raised

        stuck.wait()
        eventually(is_interrupted, "a signal that is not right before a wait for a lock: it would not end the wait")

    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        for topic, timeout, stuck in (("thread", PATIENCE, gate), ("loop", 0, coroutine)):
            join = in_background(functools.partial(interrupt, topic, stuck))
            with pytest.raises(KeyboardInterrupt):
                hub.send_number(1, topic, timeout=timeout)
            join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    gate.opened.set()
    coroutine.open()
    assert other.topics == ["thread", "loop"]


def test_an_exit_in_a_signal_handler_ends_the_program(hub: Hub) -> None:
    """``sys.exit()`` on SIGTERM, say, whatever runs then."""

    def leave(*_: Any) -> None:
        raise SystemExit(3)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        hub.handle(lambda event: signal.raise_signal(signal.SIGUSR1))
        outer = hub.record("inner", ranking=-1)
        with pytest.raises(SystemExit):
            hub.admin.send_event(Event("inner"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert outer.topics == ["inner"]


def test_a_handler_cannot_end_the_thread_of_the_sender(hub: Hub) -> None:
    """RFC 97 5.3.1: there are no signals on other threads than the main one."""
    for error in (KeyboardInterrupt(), SystemExit(), GeneratorExit()):
        hub.failing(error)
    in_background(lambda: hub.send_number(1))()
    in_background(lambda: hub.send_number(2, timeout=PATIENCE))()
    assert len(hub.logged("failed on the event 'a'")) == 6


def test_exceptions_that_end_generators_and_tasks_are_failures(hub: Hub) -> None:
    for error in (GeneratorExit(), asyncio.CancelledError()):
        hub.failing(error)
    hub.send_number(1)
    assert len(hub.logged("failed on the event 'a'")) == 2


# --- on event loops, synchronously


def test_sending_on_an_event_loop_to_a_coroutine_on_it_is_refused(hub: Hub) -> None:
    """It would wait for itself. No handler gets the event."""

    async def main() -> None:
        recorder, coroutine = hub.record(ranking=1), AsyncRecorder()
        for timeout in (0, PATIENCE):
            with hub.handle(coroutine), pytest.raises(ArgumentError, match="asend_event"):
                hub.send_number(1, timeout=timeout)
        assert recorder.events == coroutine.events == []
        hub.send_number(2)
        assert recorder.numbers == [2]

    asyncio.run(main())


def test_nor_does_the_shared_loop_wait_for_itself(hub: Hub) -> None:
    """Coroutine functions that were registered without a loop share one."""
    errors: list[BaseException] = []
    recorder = AsyncRecorder()

    async def handler(event: Event) -> None:
        try:
            hub.admin.send_event(Event("b"))
        except ArgumentError as error:
            errors.append(error)
        await hub.admin.asend_event(Event("b"))

    hub.handle(handler, "a")
    hub.handle(recorder, "b")
    hub.admin.send_event(Event("a"))
    assert len(errors) == 1
    assert recorder.topics == ["b"]


@table("timeout", [0, SOON])
@own_hub
def test_a_function_that_returns_an_awaitable_is_not_waited_for_on_its_own_loop(hub: Hub, timeout: float) -> None:
    """Which shows only when it is called: it fails, and the others get the event."""
    method, other = AsyncRecorder(), Recorder()

    async def main() -> None:
        registration = hub.handle(lambda event: method.handle_event(event))
        hub.handle(lambda event: asyncio.ensure_future(method.handle_event(event)), "task")
        hub.handle(other)
        hub.admin.send_event(Event("a"), timeout=timeout)
        if not timeout:
            hub.admin.send_event(Event("task"))
        assert hub.blocked(registration) is None
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert other.topics == (["a"] if timeout else ["a", "task"])
    assert method.topics == ([] if timeout else ["task"])
    assert hub.logged("failed on the event 'a'", "use asend_event()")


# --- asend_event


def test_asend_waits_without_stopping_the_loop(hub: Hub) -> None:
    """Scenario 21; RFC 97 5.2.1: functions on other threads, coroutine functions here."""

    async def main() -> None:
        gate, last = hub.gate(), AsyncRecorder()
        hub.handle(last, ranking=-1)
        task = asyncio.ensure_future(hub.admin.asend_event(number(1)))
        await asyncio.to_thread(gate.wait)
        assert not task.done()
        assert last.events == []
        gate.opened.set()
        await task
        assert last.numbers == [1]
        assert last.loops == [asyncio.get_running_loop()]
        assert gate.threads != [threading.get_ident()]

    asyncio.run(main())


def test_asend_reaches_coroutines_of_other_loops(hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
    there, shared = AsyncRecorder(), AsyncRecorder()
    on(loop, lambda: hub.handle(there))
    hub.handle(shared)
    method = AsyncRecorder()

    async def main() -> None:
        hub.handle(lambda event: method.handle_event(event))
        await hub.admin.asend_event(number(1))

    asyncio.run(main())
    assert there.numbers == shared.numbers == method.numbers == [1]
    assert there.loops == [loop]


def test_coroutines_may_send_while_they_handle(hub: Hub) -> None:
    """Scenarios 23 and 24, on one loop."""
    steps: list[str] = []

    async def main() -> None:
        async def handler(event: Event) -> None:
            depth = event.get_property("n")
            steps.append(f"begin {depth}")
            if depth < 3:
                await hub.admin.asend_event(number(depth + 1))
            steps.append(f"end {depth}")

        hub.handle(handler)
        await hub.admin.asend_event(number(1))

    asyncio.run(main())
    assert steps == ["begin 1", "begin 2", "begin 3", "end 3", "end 2", "end 1"]


def test_the_tasks_of_one_loop_may_send_at_the_same_time(hub: Hub) -> None:
    recorder, plain = AsyncRecorder(), hub.record()

    async def main() -> None:
        hub.handle(recorder)
        await asyncio.gather(*(hub.admin.asend_event(number(each)) for each in range(50)))

    asyncio.run(main())
    assert sorted(recorder.numbers) == sorted(plain.numbers) == [*range(50)]


def test_cancelling_asend_cancels_the_coroutine_that_has_the_event(hub: Hub) -> None:
    """Those after it do not get the event; with a timeout or without."""
    last = hub.record(ranking=-1)

    async def main(timeout: float) -> None:
        gate = AsyncGate()
        with hub.handle(gate):
            task = asyncio.ensure_future(hub.admin.asend_event(number(1), timeout=timeout))
            await asyncio.to_thread(gate.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually_async(lambda: gate.cancelled)

    for timeout in (0, PATIENCE):
        asyncio.run(main(timeout))
    assert last.events == []
    assert not hub.logged()


def test_cancelling_asend_leaves_a_function_on_its_thread_alone(hub: Hub) -> None:
    gate, last = hub.gate(), hub.record(ranking=-1)

    async def main() -> None:
        task = asyncio.ensure_future(hub.admin.asend_event(number(1)))
        await asyncio.to_thread(gate.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gate.leave()
    assert last.events == []
    assert hub.blocked(gate) is None


def test_a_deadline_of_the_caller_s_is_the_caller_s(hub: Hub) -> None:
    gate = AsyncGate()

    async def main() -> None:
        hub.handle(gate)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(MOMENT):
                await hub.admin.asend_event(number(1))
        assert hub.blocked(gate) is None

    asyncio.run(main())
    assert len(gate.cancelled) == len(gate.events)  # none, if the machine was too busy to begin


@table("error", [ValueError("boom"), TimeoutError(), DeadlineError("boom"), asyncio.CancelledError()])
@own_hub
def test_an_exception_of_a_coroutine_is_its_own_failure(hub: Hub, error: BaseException) -> None:
    """Scenario 25; RFC 97 5.3.1: an error about time is not taken for the one of the admin."""
    last = hub.record(ranking=-1)

    async def handler(event: Event) -> None:
        await asyncio.sleep(0)
        raise error

    async def main(timeout: float) -> None:
        with hub.handle(handler) as registration:
            await hub.admin.asend_event(number(1), timeout=timeout)
            assert hub.blocked(registration) is None

    for timeout in (0, PATIENCE):
        asyncio.run(main(timeout))
    hub.handle(handler)
    hub.send_number(1)
    hub.send_number(1, timeout=PATIENCE)
    assert last.numbers == [1] * 4
    assert len(hub.logged("failed on the event 'a'")) == 4
    assert not hub.logged("is blocked")


def test_asend_needs_an_event_loop_and_an_event(hub: Hub) -> None:
    async def main() -> None:
        with pytest.raises(ArgumentError):
            await hub.admin.asend_event("a/b")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            await hub.admin.asend_event(Event("a"), timeout=-1)

    asyncio.run(main())

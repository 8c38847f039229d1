"""The engine: one loop in one thread per process; ways in and out of it; forks."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref

import pytest

from messaging.errors import ConnectionLostError, DeadlineError, MessagingError
from messaging.execution import Mailbox, Promise, engine, mailbox, may_block, shielded, wait_for
from messaging.execution.loop import THREAD_NAME
from messaging.testing.waiting import PATIENCE, eventually
from tests.doubles.fake import on_loop, settle_loop
from tests.interrupts import InterruptError
from tests.scripts import FORK, run_script
from tests.threads import in_background


def test_there_is_one_engine_in_a_process_however_many_threads_ask_at_once() -> None:
    script = """
import threading
from messaging.execution import engine

barrier = threading.Barrier(8)
found = []

def ask():
    barrier.wait(10)
    found.append(engine())

threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(10)
assert len(found) == 8 and len({*found}) == 1, found
assert [each.name for each in threading.enumerate()].count("messaging-engine") == 1
"""
    run_script(script)


def test_its_thread_is_a_daemon_and_has_a_name() -> None:
    thread = on_loop(threading.current_thread)
    assert thread.daemon
    assert thread.name == THREAD_NAME
    assert on_loop(engine().is_current_thread)
    assert not engine().is_current_thread()


def test_may_block_tells_who_runs_an_event_loop() -> None:
    assert may_block()
    assert not on_loop(may_block)

    async def ask() -> tuple[bool, bool]:
        return may_block(), await asyncio.to_thread(may_block)

    assert asyncio.run(ask()) == (False, True)


def test_run_promises_a_result() -> None:
    async def work() -> int:
        assert threading.current_thread().name == THREAD_NAME
        return 42

    assert engine().run(work(), "working").result(PATIENCE) == 42


def test_run_rejects_with_the_error_or_a_messaging_error_of_it(caplog: pytest.LogCaptureFixture) -> None:
    lost = ConnectionLostError("gone")

    async def fail(error: BaseException) -> None:
        raise error

    assert engine().run(fail(lost), "working").exception(PATIENCE) is lost
    assert caplog.text == ""
    error = engine().run(fail(ZeroDivisionError("oops")), "working").exception(PATIENCE)
    assert type(error) is MessagingError
    assert str(error) == "working failed: ZeroDivisionError"
    assert isinstance(error.__cause__, ZeroDivisionError)
    settle_loop()
    assert "failed" in caplog.text  # a defect is logged
    cancelled = engine().run(fail(asyncio.CancelledError()), "working").exception(PATIENCE)
    assert str(cancelled) == "working was cancelled"
    interrupted = engine().run(fail(InterruptError()), "working").exception(PATIENCE)
    assert str(interrupted) == "working failed: InterruptError"
    settle_loop()
    caplog.clear()


def test_a_task_is_held_until_it_ends_and_its_failure_logged(caplog: pytest.LogCaptureFixture) -> None:
    entered, proceed = threading.Event(), asyncio.Event()

    async def work() -> None:
        entered.set()
        await proceed.wait()
        raise ValueError("a defect")

    task = on_loop(engine().spawn, work())
    name, held = task.get_name(), weakref.ref(task)
    del task
    assert entered.wait(PATIENCE)
    gc.collect()
    assert held() is not None
    on_loop(proceed.set)
    settle_loop()
    (record,) = [record for record in caplog.records if name in record.getMessage()]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    caplog.clear()
    del record
    eventually(lambda: gc.collect() is not None and held() is None, "the task released")


def test_wait_for_names_the_operation_that_took_too_long() -> None:
    promise: Promise[int] = Promise("inner")
    with pytest.raises(DeadlineError, match=r"opening the door took longer than 0\.01 s"):
        wait_for(promise, 0.01, "opening the door")
    failed: Promise[int] = Promise("inner")
    own = DeadlineError("of the operation itself")
    failed.reject(own)
    with pytest.raises(DeadlineError) as caught:
        wait_for(failed, 1, "opening the door")
    assert caught.value is own


# --- mailboxes


def test_a_shielded_call_goes_on_without_its_caller_and_may_fail_in_silence() -> None:
    reported: list[dict[str, object]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        assert await shielded(asyncio.sleep(0, "the result")) == "the result"
        with pytest.raises(ConnectionLostError, match="lost"):
            await shielded(fail(0))
        for call in (fail(2), asyncio.sleep(0.001)):  # sleeps: a turn of the loop that is none of its callbacks
            inner = loop.create_task(call)
            outer = loop.create_task(shielded(inner))
            await asyncio.sleep(0)
            outer.cancel()
            await asyncio.wait((outer, inner))
            assert outer.cancelled()
            assert not inner.cancelled()
            del inner
            gc.collect()

    async def fail(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0.001)  # sleeps: a turn of the loop that is none of its callbacks
        raise ConnectionLostError("lost")

    asyncio.run(main())
    assert reported == []


def test_a_mailbox_wakes_its_loop_once_per_burst() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakes: list[int] = []
        original = loop.call_soon_threadsafe

        def counted(*arguments: object, **keywords: object) -> object:
            wakes.append(1)
            return original(*arguments, **keywords)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        box = Mailbox(loop)
        seen: list[int] = []
        for number in range(100):
            box.post(lambda number=number: seen.append(number))  # type: ignore[misc]
        assert seen == []
        await asyncio.sleep(0)
        assert seen == [*range(100)]
        assert len(wakes) == 1

    asyncio.run(main())


def test_a_mailbox_loses_nothing_under_a_storm() -> None:
    async def main() -> int:
        box = mailbox(asyncio.get_running_loop())
        assert box is mailbox(asyncio.get_running_loop())
        count = 0
        done = asyncio.Event()

        def arrived() -> None:
            nonlocal count
            count += 1
            if count == 4000:
                done.set()

        def storm() -> None:
            for _ in range(1000):
                box.post(arrived)

        for _ in range(4):
            in_background(storm)
        async with asyncio.timeout(PATIENCE):
            await done.wait()
        return count

    assert asyncio.run(main()) == 4000


def test_a_mailbox_of_a_closed_loop_drops_its_calls() -> None:
    loop = asyncio.new_event_loop()
    box = mailbox(loop)
    loop.close()

    class Call:
        def __call__(self) -> None:
            raise AssertionError("called")

    calls = [Call() for _ in range(100)]
    kept = [weakref.ref(call) for call in calls]
    while calls:
        box.post(calls.pop())
    gc.collect()
    assert sum(each() is not None for each in kept) == 0


def test_every_loop_has_its_own_mailbox() -> None:
    async def ask() -> Mailbox:
        return mailbox(asyncio.get_running_loop())

    first, second = asyncio.run(ask()), asyncio.run(ask())
    assert first is not second


def test_it_runs_on_the_standard_loop_where_uvloop_is_not_installed() -> None:
    script = """
import sys
sys.modules["uvloop"] = None
import asyncio, threading, messaging
from messaging.execution.loop import engine

assert type(engine().loop).__module__.startswith("asyncio"), engine().loop
seen = threading.Semaphore(0)
with messaging.connect("memory://x") as m, m.subscribe("a") as stream:
    m.subscribe("a").subscribe(lambda _: seen.release())
    for number in range(100):
        m.publish("a", b"%d" % number)
    assert [stream.receive(5).payload for _ in range(100)] == [b"%d" % number for number in range(100)]
    for _ in range(100):
        assert seen.acquire(timeout=5)

async def main():
    async with messaging.connect("memory://x") as m, m.subscribe("a") as stream:
        await m.publish("a", b"1")
        assert (await anext(stream)).payload == b"1"

asyncio.run(main())
"""
    run_script(script)


# --- forks


def test_a_forked_child_has_an_engine_and_names_of_its_own() -> None:
    script = """
def exchange(name):
    with messaging.connect(f"memory://{name}") as m, m.subscribe("a") as stream:
        m.publish("a", b"1").result(5)
        assert stream.receive(5).payload == b"1"
        seen = threading.Event()
        m.subscribe("b").subscribe(lambda _: seen.set())
        m.publish("b", b"1").result(5)
        assert seen.wait(5)

named = messaging.connect("memory://x", name="fixed")
exchange("x")
child(lambda: messaging.connect("memory://x", name="fixed").close())
child(lambda: exchange("x"))
exchange("x")
child(lambda: child(lambda: exchange("x")))
named.close()
"""
    run_script(FORK + script)


def test_an_instance_of_the_parent_is_closed_in_the_child_and_goes_on_in_the_parent() -> None:
    """Nothing hangs: neither publishing, nor subscribing, nor iterating, nor closing, nor leaving the with block."""
    script = """
m = messaging.connect("memory://x")
stream = m.subscribe("a")
registration = m.on("c", lambda message: None)
stream.ready.result(5)
seen = []
m.subscribe("b").subscribe(lambda message: seen.append((os.getpid(), message.payload)))
parent = os.getpid()

def work():
    def refused(what, call):
        outcome = []
        def run():
            try:
                promise = call()
                if promise is not None and hasattr(promise, "result"):
                    promise.result(3)
                outcome.append(None)
            except (MessagingError, StopIteration) as error:
                outcome.append(error)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(8)
        assert outcome, f"{what} hangs"
        return outcome[0]

    assert isinstance(refused("publish", lambda: m.publish("a", b"1")), messaging.ClosedError)
    assert isinstance(refused("subscribe", lambda: m.subscribe("a")), messaging.ClosedError)
    refused("receive", lambda: stream.receive(1))
    assert refused("closing the stream", lambda: stream.close()) is None
    assert isinstance(refused("the end of the handler", lambda: registration.closed), messaging.ClosedError)
    with registration, stream:
        pass
    assert not m.handlers
    refused("close", lambda: m.close())
    assert m.runtime.get_runtime_dto().connection.state == "closed"
    with messaging.connect("memory://x") as own, own.subscribe("b") as mine:
        own.publish("b", b"child").result(5)
        assert mine.receive(5).payload == b"child"
    assert seen == [], "an observer of the parent ran in the child"

child(work)
m.publish("a", b"2").result(5)
assert stream.receive(5).payload == b"2"
m.publish("b", b"3").result(5)
for _ in range(500):
    if seen: break
    threading.Event().wait(0.01)
assert seen == [(parent, b"3")]
stream.close().result(5)
m.close()
"""
    run_script(FORK + script, seconds=60)


def test_a_pending_promise_of_the_parent_fails_in_the_child_however_it_is_awaited() -> None:
    script = """
import asyncio
from messaging.execution import engine

from messaging.instance import Messaging
from messaging.model.url import parse_url
from messaging.services import ServiceRegistry
from tests.doubles.fake import FakeAdapter, FakeBroker

m = messaging.connect("memory://x")
silent = m.subscribe("unanswered")
silent.ready.result(5)
broker = FakeBroker()
broker.hold = True
unconfirmed = Messaging(FakeAdapter, parse_url(broker.url), ServiceRegistry(), {})
unconfirmed.ready.result(5)
pending = {
    "publication": unconfirmed.publish("a", b"1"),
    "request": m.reply_to.publish_with_reply(
        m.context_builder().content(b"?").channel("unanswered").build_message()
    ),
    "task of the engine": engine().run(asyncio.sleep(60), "sleeping"),  # sleeps: until the process ends
}

def work():
    for what, promise in pending.items():
        called = threading.Event()
        promise.add_done_callback(lambda _: called.set())
        assert called.wait(5), what
        assert promise.done()
        for get in (promise.result, promise.exception):
            try:
                error = get(5)
            except messaging.ClosedError as raised:
                error = raised
            assert isinstance(error, messaging.ClosedError), error
            assert "parent of this process" in str(error)
        async def main():
            await promise
        try:
            asyncio.run(asyncio.wait_for(main(), 5))
        except messaging.ClosedError:
            continue
        raise AssertionError(what)

child(work)
assert not any(promise.done() for promise in pending.values())
unconfirmed.close(0)
m.close(0)
"""
    run_script(FORK + script, seconds=60)


def test_forking_while_others_publish_does_not_deadlock_the_child() -> None:
    """A lock that another thread held when the process was forked has no owner in the child."""
    script = """
stop = threading.Event()
m = messaging.connect("memory://x", outbox_size=50)

def storm():
    while not stop.is_set():
        m.publish("a", b"x").result(10)

def subscribe():
    while not stop.is_set():
        with m.subscribe("a") as stream:
            try:
                message = stream.receive(0.001)
                message.context.acknowledge_handler.acknowledge()
            except TimeoutError:
                pass

def reconnect():
    while not stop.is_set():
        with messaging.connect("memory://z") as other:
            other.publish("a", {"x": 1}).add_done_callback(lambda _: None)

threads = [threading.Thread(target=each) for each in (storm, subscribe, subscribe, reconnect, reconnect)]
for thread in threads:
    thread.start()

def work():
    with messaging.connect("memory://y") as own, own.subscribe("a") as mine:
        own.publish("a", b"child").result(5)
        assert mine.receive(5).payload == b"child"

for _ in range(15):
    child(work)
stop.set()
for thread in threads:
    thread.join(10)
m.close()
"""
    run_script(FORK + script, seconds=60)


def test_a_registry_that_was_in_use_when_forking_does_not_hang_the_child() -> None:
    script = """
import time
from messaging.services import default_registry

m = messaging.connect("memory://x")
held = threading.Event()

def use():
    with default_registry()._lock:
        held.set()
        time.sleep(0.2)  # sleeps: whether the fork waits for it or not

user = threading.Thread(target=use)
user.start()
held.wait(5)

def work():
    with messaging.connect("memory://y") as own:
        own.publish("a", b"child").result(5)

child(work)
user.join(5)
m.close()
"""
    run_script(FORK + script, seconds=15)


def test_a_program_that_ends_without_closing_sends_accepted_messages() -> None:
    script = """
import atexit

atexit.register(lambda: print(len(broker.sent), broker.closed))  # registered first, so called last

from messaging.instance import Messaging
from messaging.services import ServiceRegistry
from messaging.model.url import parse_url
from tests.doubles.fake import FakeAdapter, FakeBroker

broker = FakeBroker()
broker.window = 1
m = Messaging(FakeAdapter, parse_url(broker.url), ServiceRegistry(), {})
m.ready.result(5)
promises = [m.publish("a", b"x") for _ in range(500)]
"""
    done = run_script(script)
    assert done.stdout.split() == ["500", "1"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on_exit is a function of glibc")
def test_a_timer_that_fires_after_the_end_of_the_interpreter_does_not_crash_the_process() -> None:
    script = """
import ctypes, sys
from messaging.execution import engine

async def set_timer():
    engine().loop.call_later(1.0, print, "the timer fired")

engine().run(set_timer(), "set a timer").result(5)
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.sleep, ctypes.c_void_p), None)  # called with the status: seconds after the interpreter
sys.exit(2)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")

"""MessageStream in its three faces: emits in order, one at a time; ends once; disposing unsubscribes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import pytest

from messaging import Message, MessageStream, Messaging
from messaging.errors import (
    ClosedError,
    DeadlineError,
    MessagingError,
    StreamConsumedError,
    SubscriptionRefusedError,
)
from messaging.execution import clock
from messaging.execution.waiting import Flag
from messaging.interception import InboundMessage, Interceptor
from messaging.receiving import Subscription, consumers, in_observer
from messaging.receiving.buffer import MessageBuffer
from messaging.receiving.handout import HandOut
from messaging.testing.conformance.helpers import retried
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread
from tests.doubles.calling import Calling
from tests.doubles.consumers import Slow, numbered
from tests.doubles.fake import FakeBroker, on_loop, settle_loop
from tests.doubles.fixtures import Connect


class Observer(Recorder[bytes]):
    """Records the payloads that it is told, and fails if it is told after the end or by two threads at once."""

    def __init__(self, on_next: Callable[[Message], object] = lambda _: None) -> None:
        super().__init__()
        self.end: list[Exception | None] = []
        self.broken: list[str] = []
        self._on_next = on_next
        self._inside = threading.Lock()

    def on_next(self, message: Message) -> None:  # type: ignore[override]  # it keeps the payloads only
        if not self._inside.acquire(blocking=False):
            self.broken.append("two at once")
        try:
            if self.end:
                self.broken.append("after the end")
            self.append(message.payload)
            self._on_next(message)
        finally:
            self._inside.release()

    def on_error(self, error: Exception) -> None:
        self.end.append(error)
        super().on_error(error)

    def on_completed(self) -> None:
        self.end.append(None)
        super().on_completed()

    def wait_end(self) -> Exception | None:
        """Wait for the end, and return its error; fail if it was told what it must not be."""
        error = self.wait_ended()
        assert self.broken == []
        assert len(self.end) == 1
        return error


# --- observers


def test_an_observer_sees_messages_on_a_worker_thread(broker: FakeBroker, m: Messaging) -> None:
    seen: Recorder[tuple[str, bool]] = Recorder()

    def look(_: Message) -> None:
        seen.append((threading.current_thread().name, in_observer()))

    m.subscribe("a").subscribe(look)
    broker.deliver(*numbered(3))
    seen.wait_for(3)
    assert all(name.startswith("messaging-worker") and inside for name, inside in seen)
    assert not in_observer()


def test_observers_and_callbacks_are_taken_alike(broker: FakeBroker, m: Messaging) -> None:
    first, second, third = Observer(), Observer(), Observer()
    streams = [m.subscribe("a") for _ in range(3)]
    streams[0].subscribe(first)
    streams[1].subscribe(second.on_next, second.on_error, second.on_completed)
    streams[2].subscribe(on_next=third.on_next, on_completed=third.on_completed)
    for number in range(3):
        broker.deliver(b"1", handle=number)
    for observer in (first, second, third):
        assert observer.wait_for(1) == [b"1"]
    m.close()
    assert [observer.wait_end() for observer in (first, second, third)] == [None, None, None]


def test_a_stream_subscribed_without_observer_acknowledges_everything(broker: FakeBroker, connect: Connect) -> None:
    connect(broker).subscribe("a").subscribe()
    tokens = broker.deliver(*numbered(3))
    eventually(lambda: broker.acknowledged == tokens)


@table("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
@table("takes_errors", [True, False])
def test_an_observer_that_raises_ends_its_stream_and_rejects_its_message(
    broker: FakeBroker,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    kind: type[BaseException],
    takes_errors: bool,
) -> None:
    """Scenario 34 [S]: and other subscribers go on. Without ``on_error`` the log has the traceback."""
    m = connect(broker)
    failure = kind("cannot")

    def fail(_: Message) -> None:
        raise failure

    failing, healthy = Observer(fail), Observer()
    m.subscribe("a").subscribe(failing if takes_errors else failing.on_next)
    m.subscribe("a").subscribe(healthy)
    tokens = broker.deliver(*numbered(3), handle=0)
    eventually(lambda: broker.rejected == tokens[:1])
    broker.unsubscribed.wait_for(1)
    assert failing == [b"0"]
    assert broker.acknowledged == []
    if takes_errors:
        error = failing.wait_end()
        assert error is failure or (isinstance(error, MessagingError) and error.__cause__ is failure)
    else:
        assert "the observer of 'a' raised; its stream ends" in caplog.text
        assert f"{kind.__name__}: cannot" in caplog.text
    broker.deliver(*numbered(3))
    assert healthy.wait_for(3) == numbered(3)
    assert healthy.end == []


@table("kind", [ValueError, SystemExit])
@table("where", ["on_error", "on_completed"])
def test_an_error_raised_by_on_error_or_on_completed_is_logged(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture, where: str, kind: type[BaseException]
) -> None:
    m = connect(broker, close_timeout=10 * PATIENCE)

    def explode(*_: object) -> None:
        raise kind("explosion")

    stream = m.subscribe("a")
    stream.subscribe(on_next=print, on_error=explode, on_completed=explode)
    if where == "on_error":
        broker.end_subscription(SubscriptionRefusedError("gone"))
    else:
        stream.close().result(PATIENCE)
    eventually(lambda: "raised from on_error or on_completed" in caplog.text, "the log entry")
    in_thread(m.close).result(PATIENCE)  # an observer that has ended is not waited for
    assert m.runtime.get_runtime_dto().subscriptions == ()


@pytest.mark.usefixtures("virtual_clock")
def test_an_observer_and_the_iterator_of_one_stream_are_independent(broker: FakeBroker, connect: Connect) -> None:
    observer = Observer()
    stream = connect(broker).subscribe("a")
    stream.subscribe(observer)
    with pytest.raises(DeadlineError):
        stream.receive(0.01)
    broker.wait_subscribed(2)
    broker.deliver(b"1", handle=0)
    broker.deliver(b"2", handle=1)
    assert stream.receive(PATIENCE).payload == b"2"
    assert observer.wait_for(1) == [b"1"]
    stream.close().result(PATIENCE)
    assert observer.wait_end() is None
    assert len(broker.unsubscribed) == 2


@pytest.mark.usefixtures("virtual_clock")
def test_subscribe_waits_no_longer_than_the_timeout(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, timeout=0.1)
    broker.gates["subscribe"].close()
    stream = m.subscribe("a")
    stream.subscribe(print)
    assert not stream.ready.done()
    broker.gates["subscribe"].open()
    assert stream.ready.result(PATIENCE) is None


async def test_subscribe_on_a_thread_with_an_event_loop_returns_at_once(broker: FakeBroker, m: Messaging) -> None:
    broker.gates["subscribe"].close()
    stream = m.subscribe("a")
    stream.subscribe(print)
    assert not stream.ready.done()
    broker.gates["subscribe"].open()
    await stream.ready


def test_subscribing_in_an_observer_waits_for_the_broker_and_not_for_itself(broker: FakeBroker, m: Messaging) -> None:
    inner = Observer()
    started: Recorder[bool] = Recorder()

    def outer(_: Message) -> None:
        stream = m.subscribe("b")
        stream.subscribe(inner)
        started.append(stream.ready.done())

    m.subscribe("a").subscribe(outer)
    broker.deliver(b"1")
    assert started.wait_for(1) == [True]
    broker.deliver(b"2")
    assert inner.wait_for(1) == [b"2"]


# --- ending


def test_disposing_lets_the_message_in_progress_finish(broker: FakeBroker, connect: Connect, slow: Slow) -> None:
    disposable = connect(broker).subscribe("a").subscribe(slow)
    tokens = broker.deliver(*numbered(5))
    slow.wait()
    disposable.dispose()
    settle_loop()
    assert broker.unsubscribed == []
    slow.go(10)
    broker.unsubscribed.wait_for(1)
    assert slow == [b"0"]
    assert broker.acknowledged == tokens[:1]
    disposable.dispose()  # again is no error


def test_closing_completes_and_waits_for_the_observer(broker: FakeBroker, connect: Connect, slow: Slow) -> None:
    observer = Observer(slow)
    stream = connect(broker).subscribe("a")
    stream.subscribe(observer)
    broker.deliver(*numbered(5))
    slow.wait()
    closing = stream.close()
    settle_loop()
    assert not closing.done()
    assert observer.end == []
    slow.go(10)
    assert closing.result(PATIENCE) is None
    assert observer.wait_end() is None
    assert observer == [b"0"]
    assert len(broker.unsubscribed) == 1
    with pytest.raises(ClosedError):
        stream.subscribe(print)
    assert stream.close().result(PATIENCE) is None  # idempotent
    assert len(broker.unsubscribed) == 1


def test_unregistering_the_subscription_service_ends_its_streams(broker: FakeBroker, m: Messaging) -> None:
    """Scenario 31 [S], by the owner of the registration."""
    observer = Observer()
    m.subscribe("a").subscribe(observer)
    from messaging import MessageSubscription

    for registration in m._registered.own:
        if MessageSubscription.__name__ in str(registration.reference.interfaces):
            assert registration.unregister()
    assert observer.wait_end() is None
    broker.unsubscribed.wait_for(1)
    m.publish("a", b"1").result(PATIENCE)


@table("how", ["stream", "result", "with", "dispose", "instance"])
def test_an_observer_that_ends_its_own_stream_does_not_deadlock(broker: FakeBroker, connect: Connect, how: str) -> None:
    m = connect(broker, close_timeout=0.5)
    done: Recorder[str] = Recorder()
    stream = m.subscribe("a")
    disposables: list[Any] = []

    def end(_: Message) -> None:
        if how == "stream":
            stream.close()
        elif how == "result":  # not wise, but bounded
            stream.close().exception(PATIENCE)
        elif how == "with":
            with stream:
                pass
        elif how == "dispose":
            disposables[0].dispose()
        else:
            m.close()
        done(how)

    observer = Observer(end)
    disposables.append(stream.subscribe(observer))
    token = broker.deliver(*numbered(3))
    done.wait_for(1)
    broker.unsubscribed.wait_for(1)
    if how != "instance":  # that one tells its streams in a moment
        assert observer == [b"0"]
    if how != "result":  # there the deadline of closing passed first, and the message was released
        assert broker.acknowledged == token[:1]
    if how != "dispose":
        assert observer.wait_end() is None
    m.close()


@pytest.mark.parametrize("what", ["stream", "instance"])
@pytest.mark.usefixtures("virtual_clock")
def test_a_hanging_observer_does_not_hang_closing(broker: FakeBroker, connect: Connect, slow: Slow, what: str) -> None:
    m = connect(broker, close_timeout=0.2)
    stream, quick = m.subscribe("a"), Observer()
    stream.subscribe(slow)
    m.subscribe("b").subscribe(quick)
    broker.deliver(b"0", handle=0)
    slow.wait()
    promise = m.publish("c", b"still sent")
    if what == "stream":
        stream.close().result(PATIENCE)
        assert len(broker.unsubscribed) == 1
    in_thread(m.close).result(PATIENCE)
    assert promise.result(0) is None
    assert quick.wait_end() is None
    slow.go()


def test_an_observer_may_publish_while_its_instance_closes(broker: FakeBroker, m: Messaging, slow: Slow) -> None:
    outcomes: list[object] = []

    def forward(message: Message) -> None:
        slow(message)
        outcomes.append(m.publish("b", message.payload).exception(PATIENCE))

    m.subscribe("a").subscribe(forward)
    broker.deliver(b"0")
    slow.wait()
    closing = Calling(m.close)
    closing.until_waiting()
    slow.go()
    closing.result()
    assert outcomes == [None]
    assert broker.payloads == [b"0"]


def race(*actions: Callable[[], object]) -> list[BaseException | None]:
    """Call each action on a thread of its own, all at once; return the exceptions."""
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], object]) -> None:
        barrier.wait(PATIENCE)
        action()

    return [each.exception(PATIENCE) for each in [in_thread(run, action) for action in actions]]


def test_disposing_races_with_delivering(broker: FakeBroker, m: Messaging) -> None:
    def deliver() -> None:
        with contextlib.suppress(IndexError):  # it was gone between the look and the delivery
            for _ in range(5):
                if broker.live:
                    broker.deliver(*numbered(3))

    for _ in range(60):
        observer = Observer()
        disposable = m.subscribe("a").subscribe(observer)
        assert race(deliver, disposable.dispose, disposable.dispose) == [None] * 3
        eventually(lambda: broker.live == [], "the unsubscription")
        assert observer.broken == []
        assert observer.end == []
        seen = len(observer)
        settle_loop()
        assert len(observer) == seen
        assert observer == (numbered(3) * 5)[:seen]
    assert m.runtime.get_runtime_dto().subscriptions == ()


def test_closing_races_with_errors_and_disposal_and_ends_once(broker: FakeBroker, m: Messaging) -> None:
    for _ in range(60):
        observer = Observer()
        stream = m.subscribe("a")
        disposable = stream.subscribe(observer)
        errors = race(
            stream.close,
            disposable.dispose,
            partial(on_loop, broker.live[0].sink.fail, SubscriptionRefusedError("gone")),
            lambda: broker.deliver(b"x") if broker.live else None,
        )
        assert all(error is None or isinstance(error, IndexError) for error in errors)
        stream.close().result(PATIENCE)
        eventually(lambda: broker.live == [])
        assert len(observer.end) <= 1
        assert observer.broken == []


def test_subscribing_races_with_closing_and_leaves_nothing_behind(broker: FakeBroker, m: Messaging) -> None:
    """Between having a subscription and being known to the stream an observer must not be forgotten."""
    for _ in range(60):
        stream = m.subscribe("a")
        observers = [Observer(), Observer()]
        *outcomes, closing = race(
            *[partial(stream.subscribe, observer) for observer in observers],
            partial(lambda stream: stream.close().result(PATIENCE), stream),
        )
        assert closing is None
        for observer, error in zip(observers, outcomes, strict=True):
            assert isinstance(error, ClosedError) or observer.wait_end() is None
        eventually(lambda: broker.live == [], "everything unsubscribed")
        assert m.runtime.get_runtime_dto().subscriptions == ()


def test_two_threads_that_begin_to_iterate_at_once_leave_nothing_behind(broker: FakeBroker, m: Messaging) -> None:
    for _ in range(40):
        stream = m.subscribe("a")
        stream.ready.result(PATIENCE)
        for error in race(*[partial(stream.receive, 0.01)] * 2):
            assert isinstance(error, (DeadlineError, StreamConsumedError))
        assert len(broker.live) == 1
        stream.close().result(PATIENCE)
        assert broker.live == []


# --- the iterator


def test_leaving_async_with_by_an_exception_rejects_and_cancelling_does_not(broker: FakeBroker, m: Messaging) -> None:
    async def consume(then: Callable[[], Awaitable[object]]) -> None:
        async with m.subscribe("a") as stream:
            await asyncio.to_thread(broker.deliver, b"0")
            await anext(stream)
            await then()

    async def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(consume(fail))
    eventually(lambda: len(broker.rejected) == 1)

    async def main() -> None:
        received = asyncio.Event()

        async def wait() -> None:
            received.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(consume(wait))
        await received.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(broker.rejected) == 1
    assert len(broker.acknowledged) == 1


@pytest.mark.usefixtures("virtual_clock")
def test_receive_has_a_deadline(broker: FakeBroker, connect: Connect) -> None:
    with connect(broker).subscribe("a") as stream:
        assert repr(stream) == "<MessageStream of 'a'>"
        started = clock.monotonic()
        with pytest.raises(DeadlineError, match=r"no message on 'a' within 5 s"):
            stream.receive(5.0)
        assert clock.monotonic() - started >= 5.0
        broker.deliver(b"1")
        assert stream.receive(0).payload == b"1"
        with pytest.raises(DeadlineError):
            stream.receive(0)


def test_a_message_that_arrives_while_the_first_caller_begins_to_wait_is_told(
    broker: FakeBroker, m: Messaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller finds no message and waits; the loop, which has begun to deliver before, puts one into the buffer."""
    is_waiting = threading.Event()

    class Waited(Flag):
        def wait(self, timeout: float | None) -> bool:
            is_waiting.set()
            return super().wait(timeout)

    add = MessageBuffer.add

    def late(buffer: MessageBuffer, batch: Any) -> None:
        received.append(in_thread(stream.receive, PATIENCE))
        assert is_waiting.wait(PATIENCE)
        add(buffer, batch)

    received: list[Future[Message]] = []
    with m.subscribe("a") as stream:
        monkeypatch.setattr(consumers, "Flag", Waited)
        monkeypatch.setattr(MessageBuffer, "add", late)
        broker.deliver(b"1")
        assert received[0].result(PATIENCE).payload == b"1"


def test_an_iterator_ends_with_the_error_of_its_stream_every_time(broker: FakeBroker, connect: Connect) -> None:
    stream = connect(broker).subscribe("a")
    stream.ready.result(PATIENCE)
    broker.end_subscription(SubscriptionRefusedError("queue deleted"))
    for _ in range(3):
        with pytest.raises(SubscriptionRefusedError, match="queue deleted"):
            next(stream)
    with pytest.raises(SubscriptionRefusedError, match="queue deleted"):
        stream.receive(1)


async def test_a_second_iterator_at_the_same_time_is_refused(broker: FakeBroker, m: Messaging) -> None:
    async with m.subscribe("a") as stream:
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(StreamConsumedError, match="iterated already"):
            await anext(stream)
        with pytest.raises(StreamConsumedError, match="iterated already"):
            await asyncio.to_thread(stream.receive, 1)
        await asyncio.to_thread(broker.deliver, b"1", b"2")
        assert (await first).payload == b"1"
        assert (await asyncio.to_thread(stream.receive, PATIENCE)).payload == b"2"  # one after the other is fine


# --- the async iterator


async def test_an_async_iterator_acknowledges_when_the_next_is_asked_for(broker: FakeBroker, m: Messaging) -> None:
    seen: list[bytes] = []
    async with m.subscribe("a") as stream:
        tokens = await asyncio.to_thread(broker.deliver, *numbered(3))
        async for message in stream:
            await asyncio.to_thread(broker.wait_acknowledged, len(seen))
            await asyncio.to_thread(settle_loop)
            assert broker.acknowledged == tokens[: len(seen)]
            seen.append(message.payload)
            if len(seen) == 3:
                break
    assert seen == numbered(3)
    assert broker.acknowledged == tokens


def test_cancelling_anext_loses_nothing(broker: FakeBroker, m: Messaging) -> None:
    total = 300

    async def main() -> list[bytes]:
        seen: list[bytes] = []
        async with m.subscribe("a") as stream:
            loop = asyncio.get_running_loop()
            delivering = loop.run_in_executor(None, lambda: [broker.deliver(b"%d" % number) for number in range(total)])
            turn = 0
            async with asyncio.timeout(60):
                while len(seen) < total:
                    turn += 1
                    task = asyncio.ensure_future(anext(stream))
                    for _ in range(turn % 4):
                        await asyncio.sleep(0)
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        seen.append((await task).payload)
            await delivering
        return seen

    assert asyncio.run(main()) == numbered(total)
    assert len(broker.acknowledged) == total


def test_a_generator_over_a_stream_can_be_abandoned(broker: FakeBroker, m: Messaging) -> None:
    async def main() -> bytes:
        async def generate() -> AsyncIterator[bytes]:
            async with m.subscribe("a") as stream:
                await asyncio.to_thread(broker.deliver, *numbered(3))
                async for message in stream:
                    yield message.payload

        generator = generate()
        try:
            return await anext(generator)
        finally:
            await generator.aclose()  # type: ignore[attr-defined]

    assert asyncio.run(main()) == b"0"
    eventually(lambda: broker.live == [])
    assert broker.rejected == []
    assert len(broker.acknowledged) == 1


# --- flow


def test_pausing_from_inside_an_observer_holds_at_once(broker: FakeBroker, connect: Connect) -> None:
    """At the latest when the loop had a turn; here the observer gives it one."""
    stream = connect(broker).subscribe("a")

    def pause(_: Message) -> None:
        stream.pause()
        settle_loop()

    observer = Observer(pause)
    stream.subscribe(observer)
    broker.deliver(*numbered(5))
    for count in range(1, 6):
        observer.wait_for(count)
        settle_loop()
        assert observer == numbered(count)
        stream.resume()


def test_pausing_and_resuming_under_load_loses_nothing(broker: FakeBroker, connect: Connect) -> None:
    observer = Observer()
    stream = connect(broker).subscribe("a", buffer_size=4096)
    stream.subscribe(observer)
    for start in range(0, 1000, 10):
        stream.pause()
        broker.deliver(*numbered(10, start))
        stream.resume()
    assert observer.wait_for(1000) == numbered(1000)


# --- abandoned streams


def collect() -> None:
    for _ in range(3):
        gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@table("action", ["always", "error"])
def test_an_abandoned_stream_warns(broker: FakeBroker, connect: Connect, action: Literal["always", "error"]) -> None:
    """Also where warnings are errors."""
    m = connect(broker)
    stream = m.subscribe("a")
    stream.ready.result(PATIENCE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action, ResourceWarning)
        del stream
        collect()
    if action == "always":
        assert "a stream of 'a' was neither consumed nor closed" in [str(each.message) for each in caught]
    broker.unsubscribed.wait_for(1)
    assert m.runtime.get_runtime_dto().subscriptions == ()


def test_a_stream_that_was_iterated_and_then_abandoned_unsubscribes(broker: FakeBroker, m: Messaging) -> None:
    """``for message in m.subscribe("a"): ... break``: no reference is left to close it by."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        stream = m.subscribe("a")
        stream.ready.result(PATIENCE)
        broker.deliver(b"1")
        for _ in stream:
            break
        del stream, _
        collect()
    broker.unsubscribed.wait_for(1)


def test_a_stream_that_is_observed_closed_or_refused_is_not_abandoned(broker: FakeBroker, m: Messaging) -> None:
    observer = Observer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m.subscribe("a").subscribe(observer)
        m.subscribe("a").close().result(PATIENCE)
        broker.errors["subscribe"].append(SubscriptionRefusedError("no"))
        stream = m.subscribe("a")
        stream.ready.exception(PATIENCE)
        del stream
        collect()
    broker.deliver(b"1")
    assert observer.wait_for(1) == [b"1"]
    assert len(broker.live) == 1


class Processing(Interceptor):
    """Lists the payloads of the messages that are being processed, and were processed."""

    def __init__(self) -> None:
        self.entered: list[bytes] = []
        self.exited: list[bytes] = []

    @contextlib.contextmanager
    def intercept_process(self, inbound: InboundMessage) -> Iterator[None]:
        self.entered.append(inbound.message.payload)
        yield
        self.exited.append(inbound.message.payload)


def close_elsewhere(stream: MessageStream[Any]) -> None:
    """Close a stream on another thread, and wait until its messages are released."""
    in_thread(lambda: stream.close().result(PATIENCE)).result(PATIENCE)


def close_when_taken(patch: pytest.MonkeyPatch, stream: MessageStream[Any]) -> None:
    """Have a stream closed when an iterator has taken a message, before it is handed out."""
    fetch = HandOut.fetch

    def fetch_and_close(self: HandOut) -> Any:
        found = fetch(self)
        if found is not None:
            close_elsewhere(stream)
        return found

    patch.setattr(HandOut, "fetch", fetch_and_close)


def payloads_of(stream: MessageStream[Any], *, is_async: bool) -> list[bytes]:
    """Return the payloads that an iterator gets until the stream ends."""

    async def consume() -> list[bytes]:
        return [message.payload async for message in stream]

    return asyncio.run(consume()) if is_async else [message.payload for message in stream]


@table("is_async", [False, True])
def test_an_interceptor_is_exited_for_a_message_that_is_released_because_its_stream_is_closed(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """The stream is referenced longer than the loop: garbage collection exits nothing."""
    processing = Processing()
    stream = connect(broker, interceptors=[processing]).subscribe("a")
    stream.ready.result(PATIENCE)
    broker.deliver(b"1", b"2")
    with monkeypatch.context() as patch:
        close_when_taken(patch, stream)
        assert payloads_of(stream, is_async=is_async) == []
    assert processing.entered == processing.exited == [b"1"]
    assert broker.acknowledged == []


@table("where, is_async", list(itertools.product(["validation", "hand-out"], [False, True])))
def test_a_message_that_is_taken_while_its_stream_is_closed_is_handed_out_by_the_next_stream_alone(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, where: str, is_async: bool
) -> None:
    m = connect()
    stream = m.subscribe("a", str, queue="q", keep_subscription=True)
    stream.ready.result(PATIENCE)
    validate = Message.value

    def validate_and_close(self: Message) -> Any:
        close_elsewhere(stream)
        return validate(self)

    m.publish("a", "1").result(PATIENCE)
    m.publish("a", "2").result(PATIENCE)
    with monkeypatch.context() as patch:
        if where == "validation":
            patch.setattr(Message, "value", validate_and_close)
        else:
            close_when_taken(patch, stream)
        assert payloads_of(stream, is_async=is_async) == []
    with m.subscribe("a", str, queue="q") as following:
        assert [following.receive(PATIENCE).payload for _ in range(2)] == [b"1", b"2"]


def test_a_message_without_acknowledgement_that_is_taken_while_its_stream_is_closed_counts_as_dropped(
    broker: FakeBroker, m: Messaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = m.subscribe("a")
    stream.ready.result(PATIENCE)
    broker.deliver(b"1", b"2", qos0=True)
    close_when_taken(monkeypatch, stream)
    assert [*stream] == []
    assert stream.counters.dropped == 2


# --- manual acknowledgement in the three faces


def test_a_manual_observer_that_raises_leaves_its_message_unsettled(broker: FakeBroker, m: Messaging) -> None:
    """Scenario 89 [I]: the broker is not told of a message that was not settled when its stream ended."""

    def fail(_: Message) -> None:
        raise ValueError

    observer = Observer(fail)
    context = m.acknowledge_context_builder().message_context_builder().channel("a").build_context()
    m.subscription.subscribe(context).subscribe(observer)
    broker.deliver(b"0")
    assert isinstance(observer.wait_end(), ValueError)
    broker.unsubscribed.wait_for(1)
    assert broker.acknowledged == broker.rejected == []


def test_subscriptions_replaced_by_retry_are_released(connect: Connect) -> None:
    m = connect()
    payloads = [b"%d" % number for number in range(20)]
    stream = m.subscribe("retried", queue="retried")
    seen = retried(stream, [*payloads])
    for payload in payloads:
        m.publish("retried", payload).result(PATIENCE)
    seen.wait_for(2 * len(payloads))

    def count() -> int:
        gc.collect()
        return sum(type(each) is Subscription and each.spec.channel == "retried" for each in gc.get_objects())

    eventually(lambda: count() < 6, "replaced subscriptions forgotten")  # a worker may hold on to its last one

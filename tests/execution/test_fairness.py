"""The loop stays free, nobody is woken for nothing, nothing spins, and nothing hangs when things are scarce."""

from __future__ import annotations

import _thread
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakSet

import pytest

from adapters.memory import broker as memory
from messaging import instance
from messaging.connection import connection as connection_module
from messaging.errors import DeadlineError, PublishRefusedError
from messaging.execution import Engine, Promise, engine
from messaging.execution import threads as workers_module
from messaging.execution.threads import Workers
from messaging.model import Incoming, MessageContext, Outgoing, PublishOptions, SubscribeOptions
from messaging.publishing import MessagePublisher, Outbox
from messaging.receiving import StreamCounters, redelivery
from messaging.receiving.consumers import Push
from tests.doubles.consumers import Slow, manual, numbered
from tests.doubles.fake import PATIENCE, FakeAdapter, FakeBroker, settle_loop, until
from tests.doubles.fixtures import Connect


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the loop from other threads."""
    found: list[Any] = []
    original = engine().call

    def call(function: Callable[..., object], *args: Any) -> None:
        found.append(function)
        original(function, *args)

    monkeypatch.setattr(engine(), "call", call)
    return found


class Standstill:
    """``with`` it, the loop does nothing."""

    def __enter__(self) -> None:
        self._over, stands = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            self._over.wait(PATIENCE)

        engine().loop.call_soon_threadsafe(stand)
        assert stands.wait(PATIENCE)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        settle_loop()


# --- the loop belongs to everybody


def test_the_sender_gives_the_loop_back_although_publishers_keep_up(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that has no reason to wait, and a publisher that always has another message."""
    m = connect(broker)
    original = FakeAdapter.publish
    others_had_a_turn = threading.Event()
    done = threading.Event()
    rounds = 0

    async def publish(self: FakeAdapter, batch: Sequence[Outgoing]) -> None:
        nonlocal rounds
        if rounds == 0:
            engine().loop.call_soon(others_had_a_turn.set)
        rounds += 1
        await original(self, batch)
        if rounds < 500 and not others_had_a_turn.is_set():
            m.publish("a", b"another")
        else:
            done.set()

    monkeypatch.setattr(FakeAdapter, "publish", publish)
    m.publish("a", b"first")
    assert done.wait(PATIENCE)
    assert rounds < 5


def test_memory_looks_for_expired_messages_only_if_something_can_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[memory.Entry] = []
    original = memory._is_expired

    def look(entry: memory.Entry) -> bool:
        looked.append(entry)
        return original(entry)

    monkeypatch.setattr(memory, "_is_expired", look)
    queue = memory.Queue("q", 10)
    for _ in range(10):
        queue.push(entry())
    queue._drop_expired()
    assert looked == []
    queue.push(entry(0.0))
    queue._drop_expired()
    assert len(queue) == 10
    looked.clear()
    queue._drop_expired()
    assert looked == []


def entry(expires: float | None = None) -> memory.Entry:
    """An entry of a memory queue, as far as the queue looks at it."""
    return (b"", MessageContext("a"), None, PublishOptions(), False, 0, expires)


# --- wake-ups


def test_publishing_with_a_deadline_of_its_own_wakes_the_loop_once(
    broker: FakeBroker, connect: Connect, calls: list[Any]
) -> None:
    m = connect(broker, timeout=10.0)
    settle_loop()
    calls.clear()
    with Standstill():
        promises = [m.publish("a", b"x", timeout=5.0) for _ in range(100)]
        assert len(calls) <= 2, calls
    promises[-1].result(PATIENCE)


def test_one_rejected_message_does_not_make_every_acknowledgement_a_wake_up(
    broker: FakeBroker, connect: Connect, calls: list[Any]
) -> None:
    """The broker does not count, so rejections are counted here until their message is accepted."""
    m = connect(broker)
    stream = manual(m, maxDeliveries=3, prefetch=500)
    (bad,) = broker.deliver(b"bad")
    stream.receive(PATIENCE).reject()
    until(lambda: broker.rejected == [bad])
    broker.deliver(*numbered(100))
    messages = [stream.receive(PATIENCE) for _ in range(100)]
    (subscription,) = stream._subscriptions()
    until(lambda: not subscription._gathering, "the loop no longer looks for verdicts by itself")
    calls.clear()
    with Standstill():
        for message in messages:
            assert message.acknowledge()
        assert len(calls) == 1, calls
    broker.wait_acknowledged(100)


@pytest.mark.parametrize("bound", [{"outbox_bytes": 1000}, {"outbox_size": 3}], ids=["bytes", "messages"])
def test_room_is_offered_when_there_is_some_rather_than_by_the_clock(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch, bound: dict[str, int]
) -> None:
    monkeypatch.setattr(Outbox, "_arm", lambda _: None)  # no clock
    broker.hold = True
    m = connect(broker, **bound)
    for _ in range(3):
        m.publish("a", bytes(300))
    broker.wait_sent(3)
    fourth = threading.Thread(target=m.publish, args=("a", bytes(300)), daemon=True)
    fourth.start()
    until(lambda: m._connection.outbox._blocked, "a publisher that waits for room")
    broker.confirm(1)
    fourth.join(PATIENCE)
    assert not fourth.is_alive()
    broker.wait_sent(4)
    broker.confirm()


# --- bounds


def test_what_passed_its_deadline_is_not_kept_behind_what_did_not(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker)
    broker.gates["open"].close()
    broker.lose()
    outbox = m._connection.outbox
    patient = m.publish("a", b"patient", timeout=3600.0)
    hasty = [m.publish("a", b"hasty", timeout=0.01) for _ in range(50)]
    for each in hasty:
        assert isinstance(each.exception(PATIENCE), DeadlineError)
    settle_loop()
    assert [entry.payload for entry in outbox._waiting] == [b"patient"]
    broker.gates["open"].open()
    patient.result(PATIENCE)
    assert broker.payloads == [b"patient"]


@pytest.mark.parametrize("closed_first", [False, True], ids=["open streams", "closed streams"])
def test_subscribing_that_never_ends_does_not_outlive_its_instance(
    broker: FakeBroker, connect: Connect, closed_first: bool
) -> None:
    m = connect(broker, close_timeout=0.05)
    gate = broker.gates["subscribe"]
    gate.close()
    streams = [m.subscribe("a") for _ in range(3)]
    until(lambda: gate.waiting == 3, "all of them subscribing")
    if closed_first:
        for stream in streams:
            stream.close().result(PATIENCE)
    m.close()
    settle_loop()
    assert gate.waiting == 0


# --- what fails again and again waits longer and longer


class Later:
    """An engine's loop whose ``call_later`` only takes down the delay, and calls when told."""

    def __init__(self) -> None:
        self.loop = self
        self.delays: list[float] = []
        self._due: list[Callable[[], object]] = []

    def call_later(self, delay: float, function: Callable[..., object], *args: object) -> None:
        self.delays.append(delay)
        self._due.append(lambda: function(*args))

    def go(self) -> None:
        due, self._due = self._due, []
        for each in due:
            each()


def redelivering(later: Later, adapter: Any, publisher: Any = None, **options: Any) -> redelivery.Redelivery:
    return redelivery.Redelivery(
        cast("Engine", later),
        adapter,
        cast("MessagePublisher", publisher),
        SubscribeOptions(**options),
        StreamCounters(),
        lambda _: None,
        lambda: False,
        lambda: True,
        lambda _: None,
    )


def test_a_message_rejected_again_and_again_waits_longer_each_time() -> None:
    later = Later()
    rejected: list[object] = []
    adapter = SimpleNamespace(can_reject=True, reject=rejected.extend)
    subject = redelivering(later, adapter)
    given_back: list[int] = []
    for count in range(1, 31):
        subject.reject(Incoming(b"", "a", token=count, delivery_count=count), partial(given_back.append, count))
        if count <= 3:
            assert rejected[-1] == given_back[-1] == count, "the first ones go back at once"
        elif later.delays:
            assert count not in rejected, "not before its time"
            assert count not in given_back, "nor its credit"
            later.go()
            assert rejected[-1] == given_back[-1] == count
    assert later.delays == sorted(later.delays)
    assert 0 < later.delays[0] <= 0.01
    assert len(later.delays) >= 25
    assert later.delays[-1] == later.delays[-2] <= 1.0


def test_it_waits_as_well_where_only_we_count() -> None:
    later = Later()
    adapter = SimpleNamespace(can_reject=True, reject=lambda _: None)
    subject = redelivering(later, adapter)
    for _ in range(10):
        subject.reject(Incoming(b"", "a", extensions={"messageId": "same"}, token=0), lambda: None)
    assert later.delays == sorted(set(later.delays))
    assert len(later.delays) >= 5


def test_a_dead_letter_that_is_refused_again_and_again_waits_longer_each_time() -> None:
    later = Later()
    acknowledged: list[object] = []
    refusals = 12

    class Refusing:
        def publish(self, _: object) -> Promise[None]:
            nonlocal refusals
            promise: Promise[None] = Promise("a dead letter")
            refusals -= 1
            if refusals >= 0:
                raise PublishRefusedError("no")
            promise.resolve(None)
            return promise

    adapter = SimpleNamespace(can_reject=True, features=frozenset(), acknowledge=acknowledged.extend)
    subject = redelivering(later, adapter, Refusing().publish, dead_letter_channel="dead")
    subject.bury(Incoming(b"", "a", token="token"), redelivery.REJECTED)
    while refusals > 0:
        later.go()
    assert acknowledged == []
    assert later.delays[:3] == [1.0, 2.0, 4.0]
    assert later.delays[-1] == 60.0
    later.go()
    assert acknowledged == ["token"]


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each wait before connecting, the how manieth of its series it was. They take no time."""
    taken: list[int] = []

    def series(_: object) -> Iterator[float]:
        for number in itertools.count():
            taken.append(number)
            yield 0.0

    monkeypatch.setattr(connection_module.Connection, "_delays", series)
    return taken


def lose_three_times(broker: FakeBroker) -> None:
    for count in (2, 3, 4):
        broker.lose()
        broker.wait_open(count)
        settle_loop()


def test_connections_that_do_not_last_are_made_more_and_more_slowly(
    broker: FakeBroker, connect: Connect, delays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_STABLE_SECONDS", 3600.0)
    connect(broker)
    delays.clear()
    lose_three_times(broker)
    assert delays == [0, 1, 2]


def test_a_connection_that_lasted_is_made_again_quickly(
    broker: FakeBroker, connect: Connect, delays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_STABLE_SECONDS", -1.0)
    connect(broker)
    delays.clear()
    lose_three_times(broker)
    assert delays == [0, 0, 0]


def test_attempts_that_fail_count_as_well(
    broker: FakeBroker, connect: Connect, delays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_STABLE_SECONDS", -1.0)
    connect(broker)
    delays.clear()
    broker.errors["open"].extend([PublishRefusedError("not now")] * 4)
    broker.lose()
    broker.wait_open(2)
    assert delays == [0, 1, 2, 3, 4]


# --- when no thread can be started: at the end of the interpreter, or of the system's patience


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A pool of workers of our own; called, no thread can be started any more."""
    pool = Workers()
    monkeypatch.setattr(workers_module, "_workers", pool)
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "messaging-worker":
            raise RuntimeError("can't start new thread")
        original(self)

    start_new_thread = _thread.start_new_thread

    def start_raw(function: Callable[..., object], arguments: tuple[Any, ...]) -> int:
        if getattr(arguments[0], "name", None) == "messaging-worker":
            raise RuntimeError("can't start new thread")
        return start_new_thread(function, arguments)

    def refuse() -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        monkeypatch.setattr(_thread, "start_new_thread", start_raw)

    yield refuse
    monkeypatch.setattr(workers_module, "IDLE_SECONDS", 0.0)


def occupy(pool: Workers, go: threading.Event) -> None:
    """Have one of the threads do nothing else until ``go``."""
    occupied = threading.Event()

    def job() -> None:
        occupied.set()
        go.wait(PATIENCE)

    pool.submit(job)
    assert occupied.wait(PATIENCE)


def test_nothing_waits_for_a_worker_that_nobody_holds(no_more_threads: Callable[[], None]) -> None:
    pool = workers_module.workers()
    no_more_threads()
    with pytest.raises(RuntimeError):
        pool.submit(lambda: None)
    assert not pool._jobs


def test_the_last_worker_runs_what_others_would_have(no_more_threads: Callable[[], None]) -> None:
    pool = workers_module.workers()
    pool.hold(pool)
    no_more_threads()
    go = threading.Event()
    occupy(pool, go)
    ran: list[int] = []
    for number in range(10):
        pool.submit(partial(ran.append, number))
    assert ran == []
    go.set()
    until(lambda: len(ran) == 10, "what waited for the thread")
    assert ran == [*range(10)]
    pool.release(pool)


def test_the_last_worker_stays_while_it_is_held(
    no_more_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "IDLE_SECONDS", 0.0)
    pool = workers_module.workers()
    pool.hold(pool)
    until(lambda: pool._idle, "an idle thread")
    no_more_threads()
    for _ in range(20):  # it would have left between any two of them
        ran = threading.Event()
        pool.submit(ran.set)
        assert ran.wait(PATIENCE)
    pool.release(pool)


def test_without_another_thread_streams_go_on_one_after_the_other(
    broker: FakeBroker, connect: Connect, slow: Slow, no_more_threads: Callable[[], None]
) -> None:
    m = connect(broker)
    seen: list[bytes] = []
    m.subscribe("a").subscribe(slow)
    m.subscribe("b").subscribe(lambda message: seen.append(message.payload))
    pool = workers_module.workers()
    until(lambda: pool._idle, "an idle thread")
    no_more_threads()
    go = threading.Event()
    while len(pool._idle) > 1:  # all but one
        occupy(pool, go)
    broker.deliver(b"1", handle=0)
    slow.wait()
    broker.deliver(b"2", handle=1)  # raises nothing into the adapter
    slow.go()
    until(lambda: seen == [b"2"], "the other stream")
    broker.deliver(b"3", handle=1)
    until(lambda: seen == [b"2", b"3"], "the other stream again")
    go.set()
    m.close()


def test_at_exit_instances_close_together_and_one_that_cannot_holds_up_nobody(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = [FakeBroker() for _ in range(3)]
    instances = [connect(broker) for broker in brokers]
    broken = connect()
    monkeypatch.setattr(instance, "_open", WeakSet([*instances, broken]))

    def cannot(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(broken, "_close", cannot)
    for broker in brokers:
        broker.gates["close"].close()
    closing = threading.Thread(target=instance._close_all, daemon=True)
    closing.start()
    until(lambda: all(broker.gates["close"].waiting for broker in brokers), "all of them closing")
    for broker in brokers:
        broker.gates["close"].open()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    monkeypatch.undo()


# --- a signal handler or finalizer that closes what is being closed


@pytest.mark.parametrize("where", ["stop", "run"])
def test_closing_while_closing_in_the_same_thread_does_not_deadlock(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    m = connect(broker)
    m.subscribe("a").subscribe()
    owner = Push if where == "stop" else Engine
    original = getattr(owner, where)
    interrupted = threading.Event()

    def interrupt(*args: Any) -> Any:
        if threading.current_thread() is closer and not interrupted.is_set():
            interrupted.set()
            m.close()
        return original(*args)

    monkeypatch.setattr(owner, where, interrupt)
    closer = threading.Thread(target=m.close, daemon=True)
    closer.start()
    closer.join(PATIENCE)
    hangs = closer.is_alive()
    if hangs:
        m._close_lock = threading.RLock()  # for the fixture that closes behind this test
    assert interrupted.is_set()
    assert not hangs
    assert broker.closed == 1

"""The loop stays free, threads are not woken in vain, retries slow down, and closing does not hang."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakSet

import pytest

from messaging import Messaging
from messaging.errors import DeadlineError, PublishRefusedError
from messaging.execution import Deadlines, Engine, Promise, engine
from messaging.instance import messaging as instance
from messaging.model import Incoming, Outgoing, PublishOptions, PublishPlan, SubscribeOptions
from messaging.receiving import StreamCounters, redelivery
from messaging.receiving.consumers import Push
from messaging.testing.waiting import PATIENCE, eventually
from messaging_adapters.memory import queues as memory
from tests.doubles.calling import Calling
from tests.doubles.consumers import manual, numbered
from tests.doubles.fake import FakeAdapter, FakeBroker, settle_loop
from tests.doubles.fixtures import Connect
from tests.threads import in_background


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the loop from other threads. The first fixture of a test: parts of an instance keep the method."""
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


# --- the loop is shared


def test_the_sender_gives_the_loop_back_although_publishers_keep_up(
    m: Messaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that has no reason to wait, and a publisher that always has another message."""
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
    original = memory.is_expired

    def look(entry: memory.Entry) -> bool:
        looked.append(entry)
        return original(entry)

    monkeypatch.setattr(memory, "is_expired", look)
    queue = memory.Queue("q", memory.QueueLimits(10))
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
    return (b"", cast("PublishPlan", SimpleNamespace(options=PublishOptions())), None, False, 0, expires)


# --- wake-ups


@pytest.mark.parametrize("options", [{}, {"timeout": 5.0}])
def test_a_burst_of_publishes_wakes_the_loop_once(
    calls: list[Any], broker: FakeBroker, connect: Connect, options: dict[str, float]
) -> None:
    """Also if they have deadlines of their own."""
    m = connect(broker, timeout=10.0)
    settle_loop()
    calls.clear()
    with Standstill():
        promises = [m.publish("a", b"x", **options) for _ in range(1000)]
        assert len(calls) <= 2, calls
    for promise in promises:
        assert promise.result(PATIENCE) is None


def test_one_rejected_message_does_not_make_every_acknowledgement_a_wake_up(
    calls: list[Any], broker: FakeBroker, m: Messaging
) -> None:
    """The broker does not count, so rejections are counted here until their message is accepted."""
    stream = manual(m, maxDeliveries=3, prefetch=500)
    (bad,) = broker.deliver(b"bad")
    stream.receive(PATIENCE).reject()
    eventually(lambda: broker.rejected == [bad])
    broker.deliver(*numbered(100))
    messages = [stream.receive(PATIENCE) for _ in range(100)]
    (subscription,) = stream._subscriptions()
    eventually(lambda: not subscription.settlement.is_gathering, "the loop no longer looks for verdicts by itself")
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
    monkeypatch.setattr(Deadlines, "start", lambda _: None)  # no clock
    broker.hold = True
    m = connect(broker, **bound)
    for _ in range(3):
        m.publish("a", bytes(300))
    broker.wait_sent(3)
    fourth = Calling(m.publish, "a", bytes(300))
    fourth.until_waiting()
    broker.confirm(1)
    fourth.result()
    broker.wait_sent(4)
    broker.confirm()


# --- bounds


def test_messages_past_their_deadline_are_not_kept_behind_others(broker: FakeBroker, m: Messaging) -> None:
    broker.go_down()
    patient = m.publish("a", b"patient", timeout=3600.0)
    payload = bytes(1000)
    before = sys.getrefcount(payload)
    hasty = [m.publish("a", payload, timeout=0.01) for _ in range(50)]
    while hasty:
        assert isinstance(hasty.pop().exception(PATIENCE), DeadlineError)
    settle_loop()
    gc.collect()
    assert sys.getrefcount(payload) <= before + 1
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
    eventually(lambda: gate.waiting == 3, "all of them subscribing")
    if closed_first:
        for stream in streams:
            stream.close().result(PATIENCE)
    m.close()
    settle_loop()
    assert gate.waiting == 0


# --- growing delays


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


BROKER_REJECTS = SimpleNamespace(can_reject=True, features=frozenset())


def redelivering(later: Later, adapter: Any, publisher: Any = None, **options: Any) -> redelivery.Redelivery:
    owner: Any = SimpleNamespace(
        connection=SimpleNamespace(engine=later),
        adapter=adapter,
        counters=StreamCounters(),
        spec=SimpleNamespace(options=SubscribeOptions(**options)),
        ended=False,
    )
    return redelivery.Redelivery(
        owner,
        SimpleNamespace(is_redelivered=True),  # type: ignore[arg-type]
        publisher,
        None,
    )


def test_a_message_counted_by_its_id_waits_longer_each_time() -> None:
    later = Later()
    adapter = SimpleNamespace(capabilities=BROKER_REJECTS, reject=lambda _: None)
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

    adapter = SimpleNamespace(capabilities=BROKER_REJECTS, acknowledge=acknowledged.extend)
    subject = redelivering(later, adapter, Refusing().publish, dead_letter_channel="dead")
    subject.dead_letter(Incoming(b"", "a", token="token"), redelivery.REJECTED)
    while refusals > 0:
        later.go()
    assert acknowledged == []
    assert later.delays[:3] == [1.0, 2.0, 4.0]
    assert later.delays[-1] == 60.0
    later.go()
    assert acknowledged == ["token"]


# --- at exit


def test_at_exit_instances_close_together_even_if_one_of_them_cannot(
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
    join = in_background(instance._close_all)
    eventually(lambda: all(broker.gates["close"].waiting for broker in brokers), "all of them closing")
    for broker in brokers:
        broker.gates["close"].open()
    join()
    monkeypatch.undo()


# --- a signal handler or finalizer that closes an instance that is closing


@pytest.mark.parametrize("where", ["stop", "run"])
def test_closing_while_closing_in_the_same_thread_does_not_deadlock(
    broker: FakeBroker, m: Messaging, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
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
    assert interrupted.is_set()
    assert not closer.is_alive()
    assert broker.closed == 1

"""A busy consumer is left alone: verdicts are gathered, and reading waits until it has caught up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from messaging import Message, Messaging
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.doubles.consumers import manual, numbered
from tests.doubles.fake import FakeAdapter, FakeBroker, on_loop, settle_loop
from tests.doubles.fixtures import Connect


class Gate(Recorder[bytes]):
    """An observer that takes messages as long as it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def __call__(self, message: Message) -> None:  # type: ignore[override]  # it keeps the payloads only
        assert self.open.wait(PATIENCE)
        self.append(message.payload)

    on_next = __call__


@pytest.fixture
def acknowledgements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call brought."""
    calls: list[int] = []
    acknowledge = FakeAdapter.acknowledge

    def counted(self: FakeAdapter, tokens: Sequence[Any]) -> None:
        calls.append(len(tokens))
        acknowledge(self, tokens)

    monkeypatch.setattr(FakeAdapter, "acknowledge", counted)
    return calls


def test_verdicts_of_a_busy_consumer_are_batched(
    broker: FakeBroker, connect: Connect, acknowledgements: list[int]
) -> None:
    stream = connect(broker).subscribe("a")
    stream.subscribe(lambda _: None)
    tokens = broker.deliver(*numbered(1000))
    broker.wait_acknowledged(1000)
    assert broker.acknowledged == tokens
    assert len(acknowledgements) < 100


def test_a_verdict_does_not_wait_for_the_next_message(broker: FakeBroker, connect: Connect) -> None:
    """Whenever the observer comes to a halt, what it did before is acknowledged."""
    gates = [threading.Event() for _ in range(20)]
    stream = connect(broker).subscribe("a")
    stream.subscribe(lambda message: gates[int(message.payload)].wait(PATIENCE))
    tokens = broker.deliver(*numbered(20))
    for number, gate in enumerate(gates):
        assert broker.acknowledged == tokens[:number]
        gate.set()
        broker.wait_acknowledged(number + 1)


def test_a_verdict_by_hand_does_not_wait_either(broker: FakeBroker, connect: Connect) -> None:
    with manual(connect(broker)) as stream:
        tokens = broker.deliver(*numbered(3))
        messages = [stream.receive(PATIENCE) for _ in tokens]
        settle_loop(30)  # the loop no longer looks for verdicts by itself
        for count, message in enumerate(reversed(messages), 1):
            assert message.acknowledge()
            broker.wait_acknowledged(count)
        assert broker.acknowledged == tokens[::-1]


def test_a_burst_of_verdicts_is_one_call_of_the_adapter(
    broker: FakeBroker, connect: Connect, acknowledgements: list[int]
) -> None:
    with manual(connect(broker)) as stream:
        broker.deliver(*numbered(100))
        messages = [stream.receive(PATIENCE) for _ in range(100)]
        # on the loop, so that no flush can come in between
        on_loop(lambda: [message.acknowledge() for message in messages])
        broker.wait_acknowledged(100)
        assert acknowledgements == [100]


def test_verdicts_gathered_when_the_stream_is_closed_are_not_lost(broker: FakeBroker, m: Messaging) -> None:
    for _ in range(50):
        stream = m.subscribe("a")
        stream.ready.result(PATIENCE)
        before = len(broker.acknowledged)
        broker.deliver(*numbered(3))
        for _ in range(3):
            stream.receive(PATIENCE)
        stream.close().result(PATIENCE)
        assert len(broker.acknowledged) == before + 3


def test_a_burst_without_acknowledgement_loses_nothing_as_reading_waits(broker: FakeBroker, connect: Connect) -> None:
    """A socket with much to read keeps the loop busy; ``docs/guarantees.md``, a full buffer."""
    gate = Gate()
    stream = connect(broker).subscribe("a", qos=0, buffer_size=1000)
    stream.subscribe(gate)
    payloads = numbered(10_000)
    while payloads:
        while payloads and not broker.suspended:
            broker.deliver(*payloads[:100], qos0=True)
            del payloads[:100]
        gate.open.set()
        eventually(lambda: not broker.suspended)
        gate.open.clear()
    gate.open.set()
    eventually(lambda: stream.counters.delivered == 10_000 - stream.counters.dropped)
    assert stream.counters.dropped == 0


def test_reading_waits_until_a_consumer_that_is_behind_has_caught_up(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.receiving.buffer.CATCH_UP_SECONDS", PATIENCE)
    gate = Gate()
    stream = connect(broker).subscribe("a")
    stream.subscribe(gate)
    broker.deliver(*numbered(300))
    assert not broker.suspended
    broker.deliver(*numbered(300))
    assert broker.suspended
    broker.deliver(*numbered(300))  # what still arrives is delivered
    gate.open.set()
    eventually(lambda: not broker.suspended)
    assert broker.suspensions == 1
    broker.wait_acknowledged(900)
    assert gate == numbered(300) * 3


def test_a_consumer_that_does_not_catch_up_holds_up_the_others_once(broker: FakeBroker, m: Messaging) -> None:
    gate = Gate()
    stream, other = m.subscribe("a"), m.subscribe("b")
    stream.subscribe(gate)
    stream.ready.result(PATIENCE)
    other.ready.result(PATIENCE)
    slow, quick = broker.live if broker.live[0].spec.channel == "a" else broker.live[::-1]
    broker.deliver(*numbered(600), handle=slow)
    eventually(lambda: not broker.suspended, "resumed for the sake of the others")
    for _ in range(3):
        broker.deliver(*numbered(100), handle=slow)
        assert not broker.suspended
    assert broker.suspensions == 1
    gate.open.set()
    broker.wait_acknowledged(900)
    broker.deliver(*numbered(600), handle=slow)  # it has caught up, and gets another chance
    assert broker.suspensions == 2
    eventually(lambda: not broker.suspended)
    broker.deliver(b"x", handle=quick)
    assert other.receive(PATIENCE).payload == b"x"


def test_reading_goes_on_when_a_late_stream_ends(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.receiving.buffer.CATCH_UP_SECONDS", PATIENCE)
    gate = Gate()
    stream = connect(broker).subscribe("a")
    stream.subscribe(gate)
    broker.deliver(*numbered(600))
    assert broker.suspended
    closing = stream.close()
    gate.open.set()
    closing.result(PATIENCE)
    assert not broker.suspended


def test_reading_goes_on_where_a_stream_has_no_consumer(broker: FakeBroker, connect: Connect) -> None:
    with connect(broker).subscribe("a") as stream:
        stream.ready.result(PATIENCE)
        broker.deliver(*numbered(600))
        assert not broker.suspended

"""No message is lost, doubled or out of order because of events around it.

Each test is the shortest way to something that once went wrong: a second arrival in the middle of the first, a call
the library below cancelled, an interrupt, an order of two steps that is rare.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from messaging import Message
from messaging.errors import ConnectFailedError, ConnectionLostError, DeadlineError
from messaging.execution import engine
from messaging.model import Incoming
from messaging.receiving import consumers
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.doubles.calling import until_left
from tests.doubles.consumers import Slow, numbered, receive
from tests.doubles.fake import FakeAdapter, FakeBroker, Token, on_loop, settle_loop
from tests.doubles.fixtures import Connect

# --- overflow: messages without a guarantee never displace messages with one


@table(
    ("auto", "lossy"),
    # without auto, a loss ends the guarantee with the session: the messages left may make room
    [(False, False), (True, False), (True, True)],
    ids=["settled", "auto", "auto after a loss"],
)
def test_messages_without_acknowledgement_never_displace_messages_with_it(
    broker: FakeBroker, connect: Connect, auto: bool, lossy: bool
) -> None:
    stream = connect(broker).subscribe("a", qos=1, buffer_size=3, auto_acknowledge=auto)
    stream.ready.result(PATIENCE)
    broker.deliver(*numbered(3))
    if lossy:
        broker.lose_and_reconnect(subscriptions=1)
    broker.deliver(*[b"unacknowledged"] * 5, qos0=True)
    assert len(broker.acknowledged) == (3 if auto else 0)
    assert receive(stream, 3) == numbered(3)
    assert stream.counters.dropped == 5


# --- a verdict that leads to the next delivery, there and then


def acknowledged_leads_to(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[FakeAdapter, Sequence[Token]], object]
) -> list[int]:
    """Have ``then`` called within ``acknowledge``; returns the sizes of the calls."""
    calls: list[int] = []
    original = FakeAdapter.acknowledge

    def acknowledge(self: FakeAdapter, tokens: Sequence[Token]) -> None:
        calls.append(len(tokens))
        original(self, tokens)
        then(self, tokens)

    monkeypatch.setattr(FakeAdapter, "acknowledge", acknowledge)
    return calls


@table("extensions", [{"overflow": "drop_oldest"}, {"overflow": "drop_latest"}, {"auto_acknowledge": True}])
def test_acknowledgements_of_a_batch_are_sent_at_its_end(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch, extensions: dict[str, Any]
) -> None:
    stream = connect(broker).subscribe("a", qos=1, buffer_size=5, **extensions)
    stream.ready.result(PATIENCE)
    calls = acknowledged_leads_to(monkeypatch, lambda *_: None)
    broker.deliver(*numbered(10))
    assert calls == [5]
    stream.close()


def test_a_delivery_within_an_acknowledgement_keeps_order_and_bounds(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = connect(broker).subscribe("a", qos=1, buffer_size=5, prefetch=10, overflow="drop_oldest")
    stream.ready.result(PATIENCE)
    more = [numbered(10, start) for start in (30, 20, 10)]

    def deliver_more(adapter: FakeAdapter, _: Sequence[Token]) -> None:
        if more:
            batch = [Incoming(payload, "a", token=Token(1, 100 + int(payload))) for payload in more.pop()]
            adapter.broker.live[-1].sink.deliver(batch)

    acknowledged_leads_to(monkeypatch, deliver_more)
    broker.deliver(*numbered(10))
    assert stream.counters.received == 40
    assert receive(stream, 5) == numbered(5, 35)
    assert stream.counters.dropped == 35


def test_memory_hands_out_a_burst_in_order_however_small_the_credit(connect: Connect) -> None:
    """Acknowledging on arrival makes room for the next one within the delivery of the first."""
    m = connect()
    seen: Recorder[int] = Recorder()
    stream = m.subscribe("a", auto_acknowledge=True, prefetch=1)
    stream.ready.result(PATIENCE)
    stream.subscribe(lambda message: seen.append(int(message.payload)))
    promises = [m.publish("a", payload) for payload in numbered(2000)]
    promises[-1].result(PATIENCE)
    assert seen.wait_for(2000) == [*range(2000)]


@pytest.mark.usefixtures("virtual_clock")
def test_memory_keeps_order_and_bounds_while_a_stream_drops(connect: Connect) -> None:
    m = connect()
    stream = m.subscribe("a", overflow="drop_oldest", prefetch=20, buffer_size=5)
    stream.ready.result(PATIENCE)
    promises = [m.publish("a", payload) for payload in numbered(1000)]
    promises[-1].result(PATIENCE)
    eventually(lambda: stream.counters.received == 1000, "all of the burst")
    assert receive(stream, 5) == numbered(5, 995)
    assert stream.counters.dropped == 995
    with pytest.raises(DeadlineError):
        stream.receive(0.01)


# --- a library that cancels what the adapter awaits


@table("call", ["publish", "open", "subscribe", "set_will", "unsubscribe", "close"])
def test_a_call_that_the_library_cancelled_is_a_lost_connection(
    broker: FakeBroker, connect: Connect, call: str
) -> None:
    m = connect(broker)
    stream = m.subscribe("before")
    stream.ready.result(PATIENCE)
    broker.errors[call].append(asyncio.CancelledError())
    if call == "open":
        broker.lose_and_reconnect()
    elif call == "subscribe":
        late = m.subscribe("late")
        eventually(lambda: not broker.errors[call], "the call")
        broker.lose()
        late.ready.result(PATIENCE)
        late.close()
    elif call == "set_will":
        will = m.publish("gone", b"will", last_will=True)
        eventually(lambda: not broker.errors[call], "the call")
        broker.lose()
        will.result(PATIENCE)
    elif call == "unsubscribe":
        stream.close().result(PATIENCE)
    if call == "close":
        m.close()
        connect(name=m.name)  # its name is free again
    else:
        m.publish("a", b"goes on").result(PATIENCE)
        assert broker.payloads == [b"goes on"]
    assert not broker.errors[call]
    stream.close()


def test_a_first_connection_the_library_cancelled_is_a_failure_to_connect(broker: FakeBroker, connect: Connect) -> None:
    broker.errors["open"].append(asyncio.CancelledError())
    with pytest.raises(ConnectFailedError):
        connect(broker)


# --- publishing


def test_a_message_that_fails_twice_is_sent_once_more(broker: FakeBroker, connect: Connect) -> None:
    broker.hold = True
    m = connect(broker)
    promise = m.publish("a", b"1")
    broker.wait_sent(1)

    def give_back() -> None:
        outgoing = broker.held.pop()
        outgoing.fail(ConnectionLostError("the channel went away"))
        outgoing.fail(ConnectionLostError("the connection went away"))

    on_loop(give_back)
    broker.wait_sent(2)
    m.publish("a", b"2")
    broker.wait_sent(3)
    assert broker.payloads == [b"1", b"1", b"2"]
    broker.confirm()
    promise.result(PATIENCE)


# --- consuming


def test_a_pause_holds_messages_before_the_loop_knows_of_it(broker: FakeBroker, connect: Connect, slow: Slow) -> None:
    stream = connect(broker).subscribe("a")
    stream.subscribe(slow)
    broker.deliver(*numbered(5))
    slow.wait()
    let_go = threading.Event()
    engine().call(let_go.wait, PATIENCE)
    try:
        stream.pause()
        slow.go(10)
        until_left(slow.thread, consumers)
        assert slow == numbered(1)
    finally:
        let_go.set()
    settle_loop()
    assert slow == numbered(1)
    stream.resume()
    eventually(lambda: slow == numbered(5), "the others, in order")


#: whether the next check of a message is interrupted
interrupts: list[None] = []


def interrupt() -> None:
    if interrupts:
        interrupts.pop()
        raise KeyboardInterrupt


class Impatient(BaseModel):
    """A model whose first validation is interrupted."""

    number: int

    @field_validator("number")
    @classmethod
    def _interrupted(cls, value: int) -> int:
        interrupt()
        return value


@table("where", ["filter", "model"])
def test_a_message_whose_check_was_interrupted_comes_next(broker: FakeBroker, connect: Connect, where: str) -> None:
    m = connect(broker)

    def interrupted(message: Message) -> bool:
        interrupt()
        return True

    if where == "filter":
        builder = m.acknowledge_context_builder().filter_acknowledge(interrupted).message_context_builder()
        stream = m.subscription.subscribe(
            builder.channel("a").extension_entry("guaranteedOrdering", True).build_context()
        )
    else:
        stream = m.subscribe("a", Impatient, guaranteed_ordering=True)
    stream.ready.result(PATIENCE)
    payloads = [b'{"number": 0}', b'{"number": 1}']
    interrupts.append(None)
    broker.deliver(*payloads, content_type="application/json")
    with pytest.raises(KeyboardInterrupt):
        stream.receive(PATIENCE)
    assert [stream.receive(PATIENCE).payload for _ in payloads] == payloads
    assert broker.rejected == []


@pytest.mark.usefixtures("virtual_clock")
def test_a_verdict_after_the_end_does_not_reach_a_closed_adapter(
    broker: FakeBroker, connect: Connect, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = connect(broker, close_timeout=0.05)
    push = m.subscribe("a").subscribe(slow)
    broker.deliver(b"1")
    slow.wait()
    m.close()
    calls = acknowledged_leads_to(monkeypatch, lambda *_: None)
    slow.go()
    push.quiet.result(PATIENCE)  # type: ignore[attr-defined]
    settle_loop()
    assert calls == []

"""Between broker and consumer: the bounded buffer, credit, overflow, and both over a lost connection."""

from __future__ import annotations

from typing import Any

import pytest

from messaging import AcknowledgeType, Message, Messaging
from messaging.errors import StreamOverflowError, UnsupportedFeatureError
from messaging.model import Incoming
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread
from tests.doubles.calling import Calling
from tests.doubles.consumers import Slow, acknowledge, manual, numbered, receive, reject, state
from tests.doubles.fake import FakeBroker, on_loop, settle_loop
from tests.doubles.fixtures import Connect

# --- credit


def test_the_adapter_is_told_how_much_may_be_sent_ahead(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, buffer_size=77)
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 77),
        ({"bufferSize": 5}, 5),
        ({"prefetch": 9}, 9),
        ({"guaranteedOrdering": True}, 1),
        ({"overflow": "drop_oldest"}, 65_535),
        ({"overflow": "drop_oldest", "prefetch": 3}, 3),
    ]
    for extensions, expected in cases:
        stream = manual(m, **extensions)
        assert broker.live[-1].spec.options.prefetch == expected
        stream.close().result(PATIENCE)
    m.close()
    prefetching = connect(broker, prefetch=12)
    stream = manual(prefetching)
    assert broker.live[-1].spec.options.prefetch == 12
    stream.close().result(PATIENCE)


def test_without_acknowledgement_there_is_no_credit(broker: FakeBroker, connect: Connect) -> None:
    stream = manual(connect(broker), prefetch=1)
    broker.deliver(*numbered(5), qos0=True)
    assert receive(stream, 5) == numbered(5)


def test_verdicts_from_many_threads_do_not_drift_the_credit(broker: FakeBroker, m: Messaging) -> None:
    """With a credit of three nothing may be left over, or it is stuck in the end."""

    def settle_elsewhere(message: Message) -> None:
        in_thread(acknowledge if int(message.payload) % 3 else reject, message)

    builder = m.acknowledge_context_builder().message_context_builder().channel("a").extension_entry("prefetch", 3)
    stream = m.subscription.subscribe(builder.build_context())
    stream.subscribe(settle_elsewhere)
    for start in range(0, 300, 10):
        broker.deliver(*numbered(10, start))
    eventually(lambda: len(broker.acknowledged) + len(broker.rejected) == 300)
    assert len(broker.rejected) == 100


# --- overflow


def test_block_without_acknowledgement_drops_the_oldest_and_counts(
    broker: FakeBroker, m: Messaging, slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages without acknowledgement cannot be held back. ``block`` is the default here, and was not asked for."""
    context = m.context_builder().channel("a").extension_entry("bufferSize", 3).build_context()
    stream = m.subscription.subscribe(context)
    stream.subscribe(slow)
    broker.deliver(b"first", qos0=True)
    slow.wait()
    broker.deliver(*numbered(10), qos0=True)
    slow.go(4)
    slow.wait(3)
    assert slow == [b"first", b"7", b"8", b"9"]
    assert stream.counters.dropped == 7
    assert caplog.text.count("overflows: dropping messages") == 1  # once, not for each


@pytest.mark.parametrize("what", ["stream", "instance"])
def test_closing_right_after_a_failure_waits_for_the_observer_which_is_told_the_error(
    broker: FakeBroker, m: Messaging, slow: Slow, what: str
) -> None:
    """The broker is told at once, whatever the observer does."""
    stream = m.subscribe("a", overflow="fail", buffer_size=1)
    stream.subscribe(slow)
    broker.deliver(b"first")
    slow.wait()
    broker.gates["unsubscribe"].close()
    broker.deliver(b"second", b"too many")
    eventually(lambda: broker.gates["unsubscribe"].waiting)
    closing = Calling(lambda: stream.close().result(PATIENCE) if what == "stream" else m.close(PATIENCE))
    closing.until_waiting()
    settle_loop()
    broker.gates["unsubscribe"].open()
    broker.unsubscribed.wait_for(1)
    settle_loop()
    assert not closing.done()
    slow.go()
    closing.result()
    assert isinstance(slow.error, StreamOverflowError)
    assert not slow.is_completed
    assert len(broker.unsubscribed) == 1


@table("auto", [False, True])
def test_a_stream_that_fails_on_overflow_buffers_no_more(broker: FakeBroker, connect: Connect, auto: bool) -> None:
    m = connect(broker)
    stream = m.subscribe("a", overflow="fail", buffer_size=2, auto_acknowledge=auto)
    stream.ready.result(PATIENCE)
    broker.deliver(*numbered(10))
    with pytest.raises(StreamOverflowError, match="its buffer holds 2 messages"):
        stream.receive(PATIENCE)
    eventually(lambda: m.runtime.get_runtime_dto().subscriptions == ())
    assert len(broker.acknowledged) == (3 if auto else 0)


# --- automatic acknowledgement


def test_auto_acknowledge_takes_no_more_than_the_buffer_holds(broker: FakeBroker, m: Messaging) -> None:
    stream = m.subscribe("a", auto_acknowledge=True, buffer_size=3, prefetch=10)
    stream.ready.result(PATIENCE)
    tokens = broker.deliver(*numbered(10))
    assert broker.acknowledged == tokens[:3]  # the others hold the broker back
    assert m.runtime.get_runtime_dto().subscriptions[0].buffered == 10
    assert receive(stream, 10) == numbered(10)
    broker.wait_acknowledged(10)
    assert broker.acknowledged == tokens


@table(("policy", "kept"), [("drop_oldest", [b"8", b"9"]), ("drop_latest", [b"0", b"1"])])
def test_auto_acknowledge_settles_drops(broker: FakeBroker, connect: Connect, policy: str, kept: list[bytes]) -> None:
    """Or the broker's credit runs out, and the stream is dead."""
    stream = connect(broker).subscribe("a", auto_acknowledge=True, buffer_size=2, overflow=policy)
    stream.ready.result(PATIENCE)
    tokens = broker.deliver(*numbered(10))
    assert receive(stream, 2) == kept
    assert stream.counters.dropped == 8
    assert sorted(token.number for token in broker.acknowledged) == sorted(token.number for token in tokens)


# --- over a loss


@table("settles", [True, False])
@pytest.mark.usefixtures("virtual_clock")
def test_a_lost_connection_returns_the_credit_it_took(broker: FakeBroker, connect: Connect, settles: bool) -> None:
    """Once, whether the application settles them or not: the broker delivers them again, and they must get in."""
    stream = manual(connect(broker), prefetch=2)
    broker.deliver(*numbered(2))
    messages = [stream.receive(PATIENCE) for _ in range(2)]
    broker.lose_and_reconnect(subscriptions=1)
    broker.deliver(*numbered(3))
    for message in messages if settles else ():
        assert not acknowledge(message)
    assert receive(stream, 2) == numbered(2)
    with pytest.raises(TimeoutError):
        stream.receive(5.0)


@table("queue", [None, "jobs"])
def test_buffered_messages_are_kept_over_a_loss_only_where_the_broker_does_not_redeliver_them(
    broker: FakeBroker, connect: Connect, queue: str | None
) -> None:
    stream = manual(connect(broker), **({"queue": queue} if queue else {}))
    broker.deliver(*numbered(5))
    broker.lose_and_reconnect(subscriptions=1)
    if queue is None:  # a private queue died with its connection
        messages = [stream.receive(PATIENCE) for _ in range(5)]
        assert [message.payload for message in messages] == numbered(5)
        assert {state(message) for message in messages} == {AcknowledgeType.UNSUPPORTED}
    else:
        broker.deliver(b"again")
        assert receive(stream, 1) == [b"again"]
    assert broker.acknowledged == []


def test_messages_redelivered_by_a_resumed_session_are_not_kept_twice(broker: FakeBroker, connect: Connect) -> None:
    broker.resumes = True
    m = connect(broker)
    stream = manual(m)
    broker.deliver(*numbered(3))
    broker.lose_and_reconnect()
    m.publish("b", b"").result(PATIENCE)
    broker.deliver(*numbered(3))
    broker.deliver(b"end")
    assert receive(stream, 4) == [*numbered(3), b"end"]


def test_a_resumed_session_whose_tokens_live_on_loses_nothing(broker: FakeBroker, connect: Connect) -> None:
    """With a prefetch above the buffer size the buffer may hold more than ``bufferSize``: all of it counts."""
    broker.resumes = broker.tokens_survive = True
    m = connect(broker)
    stream = manual(m, bufferSize=3, prefetch=10)
    tokens = broker.deliver(*numbered(10))
    broker.lose_and_reconnect()
    m.publish("b", b"").result(PATIENCE)
    messages = [stream.receive(PATIENCE) for _ in range(10 - stream.counters.dropped)]
    for message in messages:
        assert acknowledge(message)
    broker.wait_acknowledged(len(messages))
    assert [message.payload for message in messages] == numbered(10)
    assert broker.acknowledged == tokens


@table(("unacknowledged", "bound"), [(0, 8), (1, 10)])
def test_stale_messages_are_bounded_and_counted(
    broker: FakeBroker, connect: Connect, unacknowledged: int, bound: int
) -> None:
    m = connect(broker)
    stream = manual(m, bufferSize=4)
    each, rounds = 4 + unacknowledged, 10
    for round_ in range(rounds):
        broker.deliver(*numbered(4, round_ * each))
        broker.deliver(*numbered(unacknowledged, round_ * each + 4), qos0=True)
        broker.lose_and_reconnect(subscriptions=1)
        m.publish("b", b"").result(PATIENCE)
        assert m.runtime.get_runtime_dto().subscriptions[0].buffered <= bound
    left = m.runtime.get_runtime_dto().subscriptions[0].buffered
    assert receive(stream, left) == numbered(rounds * each)[-left:]  # the newest
    assert stream.counters.dropped == rounds * each - left


def test_auto_acknowledged_messages_survive_a_loss(broker: FakeBroker, connect: Connect) -> None:
    """They are acknowledged: the broker has forgotten them, so they are here or nowhere."""
    cases: list[dict[str, Any]] = [{}, {"queue": "jobs"}]
    for queue in cases:
        m = connect(broker)
        stream = m.subscribe("a", auto_acknowledge=True, **queue)
        stream.ready.result(PATIENCE)
        broker.deliver(*numbered(3))
        broker.lose_and_reconnect(subscriptions=1)
        assert receive(stream, 3) == numbered(3), queue
        stream.close().result(PATIENCE)
        m.close()


def test_an_observer_gets_messages_in_order_through_losses_under_load(broker: FakeBroker, m: Messaging) -> None:
    seen: Recorder[int] = Recorder()
    m.subscribe("a").subscribe(lambda message: seen.append(int(message.payload)))
    for round_ in range(40):
        broker.deliver(*numbered(25, round_ * 25))
        broker.lose_and_reconnect(subscriptions=1)
    broker.deliver(b"100000")
    seen.wait_until(lambda numbers: numbers[-1:] == [100_000], "life after the losses")
    assert seen == sorted(set(seen)), "out of order or twice"
    assert m.publish("b", b"").result(PATIENCE) is None


# --- deliver never raises


def test_deliveries_to_an_ended_stream_are_ignored(broker: FakeBroker, connect: Connect) -> None:
    stream = manual(connect(broker))
    handle = broker.live[0]
    stream.close().result(PATIENCE)
    on_loop(lambda: handle.sink.deliver([Incoming(b"late", "a", token=object())]))
    on_loop(lambda: handle.sink.fail(UnsupportedFeatureError("x", "y")))
    assert [*stream] == []
    assert stream.counters.received == 0


def test_messages_that_arrive_while_closing_are_counted_as_dropped(
    broker: FakeBroker, connect: Connect, slow: Slow
) -> None:
    broker.requeues = False
    stream = connect(broker).subscribe("a")
    stream.subscribe(slow)
    broker.deliver(b"first")
    slow.wait()
    closing = stream.close()
    settle_loop()
    broker.deliver(b"second", b"third")
    slow.go()
    closing.result(PATIENCE)
    assert stream.counters.dropped == 2
    assert stream.counters.acknowledged == 1

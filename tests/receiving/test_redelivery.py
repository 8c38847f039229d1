"""Rejected messages: delivered again by the broker or from here, or dead-lettered, and never lost between."""

from __future__ import annotations

from typing import Any

import pytest

from messaging import Message, MessageStream
from messaging.errors import (
    DeadlineError,
    DecodeError,
    PublishRefusedError,
    SubscriptionRefusedError,
    UnroutableError,
)
from messaging.instance import Messaging
from messaging.receiving.redelivery import CHANNEL_HEADER, DELIVERIES_HEADER, REASON_HEADER
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.doubles.calling import Calling
from tests.doubles.consumers import Slow, acknowledge, manual, numbered, reject
from tests.doubles.fake import FakeBroker, on_loop, settle_loop
from tests.doubles.fixtures import Connect


def close(stream: MessageStream) -> None:
    stream.close().result(PATIENCE)


# --- again


def test_a_rejection_goes_to_the_broker_where_it_has_a_form_on_the_wire(broker: FakeBroker, connect: Connect) -> None:
    stream = manual(connect(broker))
    tokens = broker.deliver(b"0")
    assert reject(stream.receive(PATIENCE))
    eventually(lambda: broker.rejected == tokens)
    assert broker.acknowledged == []
    assert stream.counters.rejected == 1
    assert stream.counters.redelivered == 0


def test_a_rejection_is_delivered_again_from_here_where_the_protocol_cannot(bare: FakeBroker, connect: Connect) -> None:
    stream = manual(connect(bare))
    context: dict[str, Any] = {
        "channel_extension": "key",
        "content_type": "text/plain",
        "content_encoding": "gzip",
        "correlation_id": "c",
        "reply_to_channel": "r",
    }
    tokens = bare.deliver(b"0", b"1", channel="a/b", extensions={"qos": "1", "messageId": "m1"}, **context)
    first = stream.receive(PATIENCE)
    assert reject(first)
    assert stream.receive(PATIENCE).payload == b"1"
    again = stream.receive(PATIENCE)
    assert again is not first
    assert again.payload == b"0"
    assert again.context.channel == "a/b"
    assert {name: getattr(again.context, name) for name in context} == context
    assert again.context.extensions == {"qos": "1", "messageId": "m1", "redelivered": True}
    assert not reject(first)  # its state is its own, and final
    assert acknowledge(again)
    bare.wait_acknowledged(1)
    assert bare.acknowledged == tokens[:1]  # once, and not before
    assert stream.counters.redelivered == 1


def test_with_guaranteed_ordering_a_redelivery_from_here_comes_before_the_messages_that_wait(
    bare: FakeBroker, connect: Connect
) -> None:
    """Scenario 26 [S], at the subscriber, where the protocol cannot reject."""
    stream = manual(connect(bare), guaranteedOrdering=True)
    bare.deliver(*numbered(3))
    seen: list[bytes] = []
    for settle in (reject, reject, acknowledge) * 3:
        message = stream.receive(PATIENCE)
        seen.append(message.payload)
        assert settle(message)
    assert seen == [payload for payload in numbered(3) for _ in range(3)]


@pytest.mark.usefixtures("virtual_clock")
def test_rejecting_again_and_again_keeps_the_credit_and_the_order(bare: FakeBroker, connect: Connect) -> None:
    stream = manual(connect(bare), guaranteedOrdering=True)
    bare.deliver(*numbered(2))
    for _ in range(20):
        message = stream.receive(PATIENCE)
        assert message.payload == b"0"
        reject(message)
    for _ in range(2):
        assert acknowledge(stream.receive(PATIENCE))
    bare.wait_acknowledged(2)
    with pytest.raises(TimeoutError):
        stream.receive(5.0)


@table("count", [5, 2**31])
def test_a_message_delivered_very_often_is_still_requeued(broker: FakeBroker, connect: Connect, count: int) -> None:
    stream = manual(connect(broker), prefetch=1)
    tokens = broker.deliver(b"0", delivery_count=count)
    reject(stream.receive(PATIENCE))
    eventually(lambda: broker.rejected == tokens)
    broker.deliver(b"1")
    assert stream.receive(PATIENCE).payload == b"1"


# --- maxDeliveries


def test_discarding_after_max_deliveries_is_logged(
    bare: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    stream = manual(connect(bare), maxDeliveries=2)
    token = bare.deliver(b"0")
    for _ in range(2):
        reject(stream.receive(PATIENCE))
    bare.wait_acknowledged(1)
    assert bare.acknowledged == token
    assert bare.sent == []
    assert "message on 'a' is discarded (maxDeliveries, 2 deliveries)" in caplog.text


@table("other", [("a", "2"), ("b", "1")], ids=["another id", "another channel"])
def test_deliveries_are_counted_by_channel_and_id(bare: FakeBroker, connect: Connect, other: tuple[str, str]) -> None:
    """Applications that do not know of each other may give the same id."""
    stream = manual(connect(bare), maxDeliveries=2)
    for channel, message_id in (("a", "1"), other):
        bare.deliver(b"same", channel=channel, extensions={"messageId": message_id})
    reject(stream.receive(PATIENCE))
    reject(stream.receive(PATIENCE))
    eventually(lambda: stream.counters.redelivered == 2)
    assert bare.acknowledged == []


def test_an_accepted_message_does_not_count_against_the_next_of_its_content(bare: FakeBroker, connect: Connect) -> None:
    """Sensors send ``ON`` all day: one rejection now and then must not dead-letter one that was delivered once."""
    stream = manual(connect(bare), maxDeliveries=2, deadLetterChannel="dead")
    for _ in range(3):
        bare.deliver(b"ON")
        reject(stream.receive(PATIENCE))
        again = stream.receive(PATIENCE)
        assert again.payload == b"ON"
        assert acknowledge(again)
    bare.wait_acknowledged(3)
    bare.deliver(b"ON", b"ON")  # two with the same content are counted apart
    reject(stream.receive(PATIENCE))
    reject(stream.receive(PATIENCE))
    assert [stream.receive(PATIENCE).payload for _ in range(2)] == [b"ON", b"ON"]  # each had one delivery so far
    assert bare.sent == []


# --- dead letters


def letter_in_flight(m: Messaging, broker: FakeBroker) -> MessageStream:
    """Reject a message, whose dead letter the broker does not confirm yet; return its stream."""
    stream = manual(m, deadLetterChannel="dead")
    broker.hold = True
    broker.deliver(b"0")
    reject(stream.receive(PATIENCE))
    broker.wait_sent(1)
    return stream


def test_a_dead_letter_names_its_origin_and_keeps_its_message(broker: FakeBroker, connect: Connect) -> None:
    """Headers may have control characters from other programs: escaped, since publishing them here is refused."""
    stream = manual(connect(broker), channel="orders/+", deadLetterChannel="dead")
    broker.hold = True
    broker.deliver(
        b"payload",
        channel="orders/1",
        extensions={"headers": {"x": "y", "note": "two\nlines"}, "qos": "1", "redelivered": True},
        content_type="text/plain",
        correlation_id="c",
        reply_to_channel="r",
    )
    reject(stream.receive(PATIENCE))
    broker.wait_sent(1)
    letter = broker.held[0]
    assert letter.payload == b"payload"
    assert letter.plan.channel == "dead"
    assert letter.plan.content_type == "text/plain"
    assert letter.plan.correlation_id == "c"
    assert letter.plan.reply_to_channel == "r"
    assert dict(letter.plan.options.headers) == {
        "x": "y",
        "note": r"two\u000alines",
        REASON_HEADER: "rejected",
        CHANNEL_HEADER: "orders/1",
        DELIVERIES_HEADER: "1",
    }
    assert letter.plan.options.guaranteed_delivery
    assert letter.plan.options.qos == "1"
    broker.confirm()


def test_a_dead_letter_is_published_before_its_message_is_acknowledged(broker: FakeBroker, connect: Connect) -> None:
    stream = letter_in_flight(connect(broker), broker)
    settle_loop()
    assert broker.acknowledged == []
    assert stream.counters.dead_lettered == 0
    broker.confirm()
    broker.wait_acknowledged(1)
    assert broker.rejected == []
    assert stream.counters.dead_lettered == 1


def test_messages_of_a_loss_that_is_not_told_yet_are_no_dead_letters_of_a_stream_that_ends(
    broker: FakeBroker, connect: Connect
) -> None:
    """The broker redelivers them: its queue outlives the connection."""
    m = connect(broker)
    stream = manual(m, queue="q", deadLetterChannel="dead", prefetch=2)
    broker.deliver(b"0")
    broker.deliver(b"1")
    eventually(lambda: stream.counters.received == 2)
    epoch = broker.epoch
    on_loop(lambda: setattr(broker, "epoch", epoch + 1))
    stream.close().result(PATIENCE)
    settle_loop()
    assert broker.sent == []
    assert stream.counters.dead_lettered == stream.counters.dropped == 0


def test_a_refused_dead_letter_is_retried(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """After a second; ``tests/execution/test_fairness.py`` has the delays of further attempts."""
    letter_in_flight(connect(broker), broker)
    broker.fail(PublishRefusedError("full"))
    assert broker.acknowledged == []
    broker.wait_sent(2)
    broker.confirm()
    broker.wait_acknowledged(1)
    assert caplog.text.count("dead letter of 'a' did not reach 'dead': full") == 1


def test_a_dead_letter_the_outbox_has_no_room_for_is_tried_again(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_size=1)
    stream = manual(m, deadLetterChannel="dead")
    broker.hold = True
    blocker = m.publish("b", b"blocker")
    broker.deliver(b"0")
    reject(stream.receive(PATIENCE))
    broker.wait_sent(1)
    settle_loop()
    assert broker.payloads == [b"blocker"]
    broker.confirm()
    blocker.result(PATIENCE)
    broker.wait_sent(2)
    broker.confirm()
    broker.wait_acknowledged(1)


def test_a_dead_letter_in_flight_over_a_loss_is_published_once_more(broker: FakeBroker, connect: Connect) -> None:
    stream = letter_in_flight(connect(broker), broker)
    broker.lose_and_reconnect()
    broker.wait_sent(2)
    broker.confirm()
    eventually(lambda: stream.counters.dead_lettered == 1)
    assert broker.acknowledged == []


def test_a_message_that_was_rejected_right_before_a_loss_is_not_lost_with_its_stream(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker has it, and delivers it again; without a queue nobody gets it."""
    m = connect(broker)
    dropped = []
    for queue in ("q", None):
        stream = manual(m, **({} if queue is None else {"queue": queue}))
        broker.deliver(b"1")
        message = stream.receive(PATIENCE)
        sink: Any = broker.live[-1].sink

        def refuse(sink: Any = sink, message: Message = message) -> None:
            """As a consumer that fails does; its verdict is gathered with later ones."""
            sink.settlement.stop_gathering()
            sink.settlement.is_gathering = True
            sink.settlement.stop_accepting()
            assert reject(message)

        broker.gates["subscribe"].close()
        broker.lose(first=refuse)
        eventually(lambda sink=sink: sink.handle is None, "connected again, and not subscribed")  # type: ignore[misc]
        on_loop(sink.flush)
        dropped.append(stream.counters.dropped)
        broker.gates["subscribe"].open()
        close(stream)
    assert dropped == [0, 1]
    assert broker.rejected == []
    assert caplog.text.count("is lost: it was rejected by a stream that ended") == 1


@pytest.mark.usefixtures("virtual_clock")
def test_a_dead_letter_that_fails_for_good_is_not_acknowledged(broker: FakeBroker, connect: Connect) -> None:
    """The stream ends: the broker still has the message, and there are no further attempts."""
    close(letter_in_flight(connect(broker, close_timeout=0.2), broker))
    broker.fail(PublishRefusedError("full"))
    settle_loop()
    assert broker.acknowledged == []
    assert len(broker.sent) == 1


@table("what", ["stream", "instance"])
def test_closing_waits_for_the_end_of_an_observer_that_failed(broker: FakeBroker, connect: Connect, what: str) -> None:
    """Its dead letter is confirmed, and the broker told, before closing returns."""
    broker.hold = True
    m = connect(broker)
    ended: Recorder[Message] = Recorder()

    def observer(message: Message) -> None:
        raise ValueError("bad")

    context = m.context_builder().channel("a").extension_entry("deadLetterChannel", "dead").build_context()
    stream = m.subscription.subscribe(context)
    stream.subscribe(observer, ended.on_error)
    broker.deliver(b"0")
    broker.wait_sent(1)
    assert broker.payloads == [b"0"]
    ended.wait_error()
    broker.gates["unsubscribe"].close()
    closing = Calling(lambda: stream.close().result(PATIENCE) if what == "stream" else m.close(PATIENCE))
    closing.until_waiting()
    settle_loop()
    assert not closing.done()
    broker.confirm()
    eventually(lambda: broker.gates["unsubscribe"].waiting)
    assert len(broker.acknowledged) == 1
    assert not closing.done()
    broker.gates["unsubscribe"].open()
    closing.result()
    assert len(broker.unsubscribed) == 1


# --- dead letters without a route


def unrouted(broker: FakeBroker) -> None:
    broker.held.wait_for(1)
    broker.fail(UnroutableError("no queue"))


@pytest.mark.usefixtures("virtual_clock")
@table("limit", [None, 2])
def test_an_unrouted_dead_letter_is_handed_back_with_growing_delays(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture, limit: int | None
) -> None:
    """The broker redelivers it; the count of its deliveries goes on."""
    broker.hold = True
    counted = {} if limit is None else {"maxDeliveries": limit}
    stream = manual(connect(broker), deadLetterChannel="dead", **counted)
    rejections = 0 if limit is None else limit - 1
    for _ in range(rejections):
        broker.deliver(b"0")
        reject(stream.receive(PATIENCE))
    for number in range(1, 4):
        (token,) = broker.deliver(b"0")
        reject(stream.receive(PATIENCE))
        unrouted(broker)
        eventually(lambda token=token: token in broker.rejected)  # type: ignore[misc]
        assert stream.counters.unrouted == number
    assert broker.acknowledged == []
    assert caplog.text.count("nothing receives the dead-letter channel 'dead' of 'a'") == 1
    assert "bind a queue to it" in caplog.text
    tokens = broker.deliver(b"0")
    reject(stream.receive(PATIENCE))
    broker.held.wait_for(1)
    assert broker.held[0].plan.options.mandatory
    broker.confirm()
    eventually(lambda: broker.acknowledged == tokens)
    assert stream.counters.dead_lettered == 1


@pytest.mark.usefixtures("virtual_clock")
def test_an_unrouted_dead_letter_is_redelivered_from_here_where_the_protocol_cannot(
    bare: FakeBroker, connect: Connect
) -> None:
    bare.features |= {"mandatory"}
    bare.hold = True
    stream = manual(connect(bare), deadLetterChannel="dead")
    tokens = bare.deliver(b"0")
    for _ in range(3):
        reject(stream.receive(PATIENCE))
        unrouted(bare)
    assert bare.acknowledged == []
    acknowledge(stream.receive(PATIENCE))
    eventually(lambda: bare.acknowledged == tokens)


@pytest.mark.usefixtures("virtual_clock")
def test_a_message_without_acknowledgement_is_kept_here_until_its_dead_letter_has_a_route(
    broker: FakeBroker, connect: Connect
) -> None:
    broker.hold = True
    stream = manual(connect(broker), deadLetterChannel="dead")
    broker.deliver(b"0", qos0=True)
    message = stream.receive(PATIENCE)
    on_loop(broker.live[0].sink.settlement.refuse_unsupported, message.context)  # type: ignore[attr-defined]
    for _ in range(3):
        unrouted(broker)
    broker.held.wait_for(1)
    broker.confirm()
    eventually(lambda: stream.counters.dead_lettered == 1)


def test_an_unrouted_dead_letter_of_a_stream_that_ends_is_counted_as_lost_only_without_another_consumer(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    dropped = []
    m = connect(broker)
    for requeues in (True, False):
        broker.requeues = requeues
        broker.hold = True
        stream = manual(m, deadLetterChannel="dead")
        broker.deliver(b"0")
        reject(stream.receive(PATIENCE))
        broker.held.wait_for(1)
        closing = Calling(close, stream)

        def is_closed(closing: Calling[None] = closing) -> bool:
            if broker.held:  # once, or again if the first refusal came before the stream began to end
                unrouted(broker)
            return closing.done()

        eventually(is_closed)
        closing.result()
        dropped.append(stream.counters.dropped)
    assert dropped == [0, 1]
    assert broker.acknowledged == []
    assert caplog.text.count("is lost: its dead letter failed") == 1


# --- every message is delivered, dead-lettered, left to the broker or counted


@table("taken", ["default", "auto", "QoS 0"])
@table("requeues", [True, False])
@table("end", ["stream", "instance", "m.on", "error", "overflow"])
def test_messages_that_no_consumer_gets_are_counted_unless_the_broker_keeps_them(
    broker: FakeBroker, connect: Connect, taken: str, requeues: bool, end: str
) -> None:
    broker.requeues = requeues
    slow = Slow()
    options: dict[str, Any] = {"auto_acknowledge": True} if taken == "auto" else {}
    if end == "overflow":
        options |= {"overflow": "fail", "buffer_size": 2}
    m = connect(broker)
    consumed: Any = m.on("a", slow, **options) if end == "m.on" else m.subscribe("a", **options)
    consumed.ready.result(PATIENCE)
    counters = consumed.counters
    broker.deliver(*numbered(4), qos0=taken == "QoS 0")
    if end == "m.on":
        slow.wait()
        closing = consumed.close()
        slow.go(4)
        closing.result(PATIENCE)
    elif end == "instance":
        m.close(PATIENCE)
    elif end == "stream":
        close(consumed)
    elif end == "error":
        broker.end_subscription(SubscriptionRefusedError("deleted"))
    broker.unsubscribed.wait_for(1)
    left = 4 - (end == "m.on")
    if requeues and taken != "QoS 0":  # of an overflow, the broker has what was not acknowledged on arrival
        left = 0 if taken == "default" else 3 if end == "overflow" else left
    eventually(lambda: counters.dropped == left, "counted")
    settle_loop()
    assert counters.received == 4


@pytest.mark.usefixtures("virtual_clock")
@table("taken", ["default", "auto", "QoS 0"])
@table("requeues", [True, False])
@table("end", ["stream", "instance"])
@table("last", ["fails", "succeeds", "is not confirmed"])
def test_a_dead_letter_that_waits_for_its_next_attempt_is_tried_once_more_at_the_end_of_its_stream(
    broker: FakeBroker, connect: Connect, taken: str, requeues: bool, end: str, last: str
) -> None:
    broker.requeues, broker.hold = requeues, True
    m = connect(broker, close_timeout=2.0)
    options = {"auto_acknowledge": True} if taken == "auto" else {}
    stream = m.subscribe("a", dict[str, int], dead_letter_channel="dead", **options)
    stream.ready.result(PATIENCE)
    broker.deliver(b"no json", qos0=taken == "QoS 0", content_type="application/json")
    with pytest.raises(DeadlineError):
        stream.receive(0.01)
    broker.held.wait_for(1)
    broker.fail(PublishRefusedError("full"))
    settle_loop()
    closing = Calling(lambda: m.close() if end == "instance" else close(stream))
    broker.wait_sent(2)
    if last == "fails":
        broker.fail(PublishRefusedError("still full"))
    elif last == "succeeds":
        broker.confirm()
    closing.result()
    counters = stream.counters
    if last == "is not confirmed" and end == "stream":
        broker.fail(PublishRefusedError("still full"))
    is_lost = last != "succeeds" and not (taken == "default" and requeues)
    eventually(lambda: counters.dropped == is_lost, "counted")
    settle_loop()
    assert (counters.dead_lettered, counters.dropped) == (last == "succeeds", is_lost)
    assert len(broker.sent) == 2


# --- invalid messages


def model_stream(m: Messaging, **settings: Any) -> MessageStream:
    stream = m.subscribe("a", dict[str, int], **settings)
    stream.ready.result(PATIENCE)
    return stream


def test_a_dead_letter_of_an_invalid_message_keeps_the_original_bytes(broker: FakeBroker, connect: Connect) -> None:
    stream = model_stream(connect(broker), on_invalid="dead_letter", dead_letter_channel="dead")
    broker.hold = True
    tokens = broker.deliver(b"\xff no json", b'{"x": 1}', content_type="application/json")
    assert stream.receive(PATIENCE).value() == {"x": 1}
    broker.wait_sent(1)
    assert broker.held[0].payload == b"\xff no json"
    assert broker.held[0].plan.options.headers[REASON_HEADER] == "invalid"
    assert broker.acknowledged == []
    broker.confirm()
    eventually(lambda: broker.acknowledged == tokens[:1])


@table("on_invalid", [None, "raise", "reject", "skip", "dead_letter", "observer", "loop", "by hand", "m.on"])
@table("taken", ["default", "manual", "auto", "QoS 0"])
@table("dead", [None, "dead"])
def test_an_invalid_message_is_counted_once_and_its_dead_letter_says_so(
    broker: FakeBroker, connect: Connect, on_invalid: str | None, taken: str, dead: str | None
) -> None:
    """Found by the model of the stream, or by its consumer. With ``reject`` it counts as any rejected message."""
    broker.hold = True
    m = connect(broker)
    options: dict[str, Any] = {} if dead is None else {"dead_letter_channel": dead}
    options |= {"manual": {"acknowledge": "manual"}, "auto": {"auto_acknowledge": True}}.get(taken, {})
    if (on_invalid == "dead_letter" and dead is None) or (
        on_invalid in ("observer", "loop", "m.on") and taken == "manual"
    ):
        return  # needs a channel; the consumer gives the verdict
    consumed: Any
    if on_invalid == "m.on":
        consumed = m.on("a", print, model=dict[str, int], **options)
    else:
        of_model = on_invalid not in ("observer", "loop", "by hand")
        options |= {"model": dict[str, int]} if of_model else {}
        options |= {"on_invalid": on_invalid} if of_model and on_invalid is not None else {}
        consumed = m.subscribe("a", **options)
    consumed.ready.result(PATIENCE)
    tokens = broker.deliver(b"no json", content_type="application/json", qos0=taken == "QoS 0")
    if on_invalid == "observer":
        consumed.subscribe(lambda message: message.value(dict[str, int]), print)
    elif on_invalid == "loop":
        with pytest.raises(DecodeError), consumed:
            consumed.receive(PATIENCE).value(dict[str, int])
    elif on_invalid == "by hand":
        message = consumed.receive(PATIENCE)
        for _ in range(2):  # the second one comes too late
            message.reject_invalid()
    elif on_invalid != "m.on":
        with pytest.raises(DecodeError if on_invalid == "raise" else DeadlineError):
            consumed.receive(PATIENCE if on_invalid == "raise" else 0.01)
    skips = on_invalid == "skip" or (on_invalid == "m.on" and dead is None)
    is_rejected = not skips and (on_invalid == "reject" or dead is None)
    counters = consumed.counters
    eventually(lambda: counters.invalid == 1, "counted")
    eventually(lambda: counters.rejected == is_rejected, "rejected")
    if skips or dead is None:
        settle_loop()
        assert broker.sent == []
    else:
        broker.held.wait_for(1)
        headers = broker.held[0].plan.options.headers
        assert headers[REASON_HEADER] == ("rejected" if on_invalid == "reject" else "invalid")
        broker.confirm()
        eventually(lambda: counters.dead_lettered == 1, "dead-lettered")
    if taken == "auto" or (taken != "QoS 0" and (skips or dead is not None)):
        broker.wait_acknowledged(1)
    settle_loop()
    assert (counters.invalid, counters.rejected, counters.dropped) == (1, is_rejected, 0)
    assert broker.acknowledged in ([], tokens)


@table("on_invalid", ["skip", "dead_letter"])
def test_invalid_messages_do_not_use_up_the_credit_of_one(bare: FakeBroker, connect: Connect, on_invalid: str) -> None:
    """An adapter without credit of its own hands over more than one; after each verdict the next must come."""
    stream = model_stream(connect(bare), on_invalid=on_invalid, dead_letter_channel="dead", guaranteed_ordering=True)
    bare.deliver(b"bad", b"worse", b'{"x": 1}', content_type="application/json")
    assert stream.receive(PATIENCE).value() == {"x": 1}
    assert stream.counters.invalid == 2


@pytest.mark.usefixtures("virtual_clock")
def test_a_model_that_raises_something_else_is_a_decode_error_too(broker: FakeBroker, connect: Connect) -> None:
    from typing import Annotated

    from pydantic import AfterValidator

    def explode(value: int) -> int:
        raise KeyError("in a validator")

    m = connect(broker)
    stream = m.subscribe("a", Annotated[int, AfterValidator(explode)], on_invalid="skip")
    stream.ready.result(PATIENCE)
    broker.deliver(b"1", b"2", content_type="application/json")
    eventually(lambda: m.runtime.get_runtime_dto().subscriptions[0].buffered == 2)
    with pytest.raises(TimeoutError):
        stream.receive(5.0)
    assert stream.counters.invalid == 2


def test_auto_acknowledged_invalid_messages_are_acknowledged_once(broker: FakeBroker, connect: Connect) -> None:
    stream = model_stream(connect(broker), on_invalid="dead_letter", dead_letter_channel="dead", auto_acknowledge=True)
    tokens = broker.deliver(b"bad", b'{"x": 1}', content_type="application/json")
    assert stream.receive(PATIENCE).value() == {"x": 1}
    broker.wait_sent(1)
    eventually(lambda: stream.counters.dead_lettered == 1)
    on_loop(lambda: None)
    assert broker.acknowledged == tokens

"""What becomes of messages that were rejected, or never settled."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from messaging import AcknowledgeType, ArgumentError, DeadlineError, Features, InvalidExtensionError, Message, Messaging
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import (
    Failing,
    ack_state,
    acknowledgement,
    feature,
    manual,
    nothing_more,
    publish,
    receive,
    retried,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, observed


def reject(message: Message) -> None:
    assert acknowledgement(message).acknowledge_handler.reject()


def accept(message: Message) -> None:
    assert acknowledgement(message).acknowledge_handler.acknowledge()


@feature(Features.ACKNOWLEDGE)
def test_a_rejected_message_is_delivered_again(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 86 [G]: rejection forces redelivery; the second delivery says that it is one."""
    stream = m.subscription.subscribe(manual(m, channel))
    with stream:
        publish(m, channel, [b"1"], **backend.reliable)
        for number in range(3):
            message = stream.receive(PATIENCE)
            assert message.payload == b"1"
            assert bool(message.context.extensions.get("redelivered")) == bool(number)
            reject(message)
        accept(stream.receive(PATIENCE))
        nothing_more(m, channel, stream, **backend.reliable)
        eventually(lambda: stream.counters.rejected == 3, "counted")


@pytest.mark.envelope
@feature(Features.ACKNOWLEDGE)
@table("shared", [False, True])
def test_a_redelivered_message_is_the_same_message(backend: Backend, m: Messaging, shared: bool) -> None:
    if shared and Features.EXTENSION_QUEUE not in m.features:
        return
    channel = backend.channel()
    queue = {"queue": backend.queue()} if shared else {}
    with m.subscription.subscribe(manual(m, channel, **queue)) as stream:
        given = {"message_id": "own"} if Features.EXTENSION_MESSAGE_ID in m.features else {}
        publish(m, channel, [b"1"], **given, **backend.full_context(m))
        first = stream.receive(PATIENCE)
        reject(first)
        second = stream.receive(PATIENCE)
        assert second.payload == first.payload
        for name in ("channel", "content_type", "correlation_id", "reply_to_channel"):
            assert getattr(second.context, name) == getattr(first.context, name)
        for name in ("headers", "priority", "messageId"):
            assert second.context.extensions.get(name) == first.context.extensions.get(name)
        assert ("timeToLive" in second.context.extensions) == ("timeToLive" in first.context.extensions)
        accept(second)


@feature(Features.EXTENSION_GUARANTEED_ORDERING, Features.ACKNOWLEDGE)
def test_with_guaranteed_ordering_nothing_overtakes_a_redelivery(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 26 [S], at the subscriber: nothing overtakes a redelivery."""
    payloads = [b"1", b"2", b"3", b"4", b"5"]
    context = manual(m, channel, guaranteedOrdering=True)
    with m.subscription.subscribe(context) as stream:
        publish(m, channel, payloads, **backend.reliable)
        eventually(lambda: stream.counters.received, "something arrived")
        seen: list[bytes] = []
        while len(seen) < 2 * len(payloads):
            message = stream.receive(PATIENCE)
            seen.append(message.payload)
            (accept if message.context.extensions.get("redelivered") else reject)(message)
    assert seen == [payload for payload in payloads for _ in range(2)]


# --- maxDeliveries and dead letters


@feature(Features.EXTENSION_MAX_DELIVERIES, Features.ACKNOWLEDGE)
def test_without_a_dead_letter_channel_a_message_is_discarded_after_max_deliveries(
    backend: Backend, m: Messaging, channel: str
) -> None:
    with m.subscription.subscribe(manual(m, channel, maxDeliveries=3)) as stream:
        publish(m, channel, [b"1"], **backend.reliable)
        for _ in range(3):
            reject(stream.receive(PATIENCE))
        nothing_more(m, channel, stream, **backend.reliable)


@pytest.mark.envelope
@feature(Features.EXTENSION_DEAD_LETTER_CHANNEL, Features.EXTENSION_MAX_DELIVERIES, Features.ACKNOWLEDGE)
@table("most, reason", [(None, "rejected"), (2, "maxDeliveries")])
def test_a_rejected_message_goes_to_the_dead_letter_channel(
    backend: Backend, m: Messaging, most: int | None, reason: str
) -> None:
    """With no number of deliveries given, the first reject is enough. What the message carried, the letter carries."""
    with pytest.raises(InvalidExtensionError):
        m.subscribe(backend.channel(), dead_letter_channel="a/+")
    channel, dead = backend.channel(), backend.channel("dead")
    more: dict[str, Any] = {}
    if Features.MESSAGE_PROPERTIES in m.features:
        more |= {"content_type": "x/y", "correlation_id": "4711"}
    if Features.EXTENSION_HEADERS in m.features:
        more |= {"headers": {"own": "kept"}}
    context = manual(m, channel, deadLetterChannel=dead, **({"maxDeliveries": most} if most else {}))
    with m.subscribe(dead, **backend.reliable) as letters, m.subscription.subscribe(context) as stream:
        publish(m, channel, [b"\xff1"], **more, **backend.reliable)
        for _ in range(most or 1):
            reject(stream.receive(PATIENCE))
        letter = letters.receive(PATIENCE)
        assert (letter.payload, letter.context.channel) == (b"\xff1", dead)
        if Features.MESSAGE_PROPERTIES in m.features:
            assert (letter.context.content_type, letter.context.correlation_id) == ("x/y", "4711")
        if Features.EXTENSION_HEADERS in m.features:
            headers = letter.context.extensions["headers"]
            assert headers["own"] == "kept"
            assert headers["x-dead-letter-reason"] == reason
            assert headers["x-dead-letter-channel"] == channel
            assert headers["x-dead-letter-deliveries"] == str(most or 1)
        nothing_more(m, channel, stream, **backend.reliable)
        eventually(lambda: stream.counters.dead_lettered == 1, "counted")


# --- never settled


@feature(Features.BROKER_REDELIVERY, Features.QUEUE_RETENTION, Features.EXTENSION_QUEUE, Features.ACKNOWLEDGE)
def test_what_was_never_settled_is_delivered_again_when_the_stream_closes(backend: Backend, m: Messaging) -> None:
    """Scenario 89 [I]: messages that were handed out, and messages in the buffer; in order."""
    channel, queue = backend.channel(), backend.queue()
    with m.subscription.subscribe(manual(m, channel, queue=queue)) as stream:
        publish(m, channel, [b"1", b"2", b"3", b"4"], **backend.reliable)
        first, second = stream.receive(PATIENCE), stream.receive(PATIENCE)
        accept(first)
    assert acknowledgement(second).acknowledge_handler.acknowledge() is False
    assert ack_state(second) is AcknowledgeType.UNKNOWN
    with m.subscribe(channel, queue=queue, **backend.reliable) as stream:
        again = stream.receive(PATIENCE)
        assert again.payload == b"2"
        assert again.context.extensions.get("redelivered")
        assert receive(stream, 2) == [b"3", b"4"]
        nothing_more(m, channel, stream, **backend.reliable)


@feature(Features.BROKER_REDELIVERY, Features.EXTENSION_QUEUE, Features.EXTENSION_PREFETCH, Features.ACKNOWLEDGE)
def test_a_rejected_message_can_go_to_another_process(backend: Backend) -> None:
    """The broker redelivers, not only this process: a competing consumer that waits gets it in the end."""
    m, other = backend.connect(), backend.connect()
    channel, queue = backend.channel(), backend.queue()
    with (
        m.subscription.subscribe(manual(m, channel, queue=queue, prefetch=1)) as stubborn,
        other.subscription.subscribe(manual(other, channel, queue=queue, prefetch=1)) as willing,
    ):
        taken = observed(willing, accept)
        publish(m, channel, [b"1"], **backend.reliable)

        def reject_whatever_comes() -> bool:
            with contextlib.suppress(DeadlineError):
                reject(stubborn.receive(0.05))
            return bool(taken)

        eventually(reject_whatever_comes, "the other consumer gets it")
        assert taken.wait_payloads(1) == [b"1"]


# --- credit


@feature(Features.EXTENSION_PREFETCH, Features.ACKNOWLEDGE)
def test_prefetch_bounds_what_is_unsettled(backend: Backend, m: Messaging, channel: str) -> None:
    context = manual(m, channel, prefetch=2)
    with backend.connect().subscribe(channel) as witness, m.subscription.subscribe(context) as stream:
        publish(m, channel, [b"1", b"2", b"3", b"4"], **backend.reliable)
        assert receive(witness, 4) == [b"1", b"2", b"3", b"4"]
        first, second = stream.receive(PATIENCE), stream.receive(PATIENCE)
        with pytest.raises(DeadlineError):
            stream.receive(0.1)
        assert stream.counters.delivered == 2
        accept(second)
        third = stream.receive(PATIENCE)
        assert third.payload == b"3"
        accept(first)
        accept(third)
        fourth = stream.receive(PATIENCE)
        assert fourth.payload == b"4"
        accept(fourth)


@feature(Features.EXTENSION_PREFETCH, Features.EXTENSION_QUEUE, Features.BROKER_REDELIVERY)
def test_what_one_consumer_may_not_prefetch_another_gets(backend: Backend) -> None:
    """At the broker, too: a consumer with credit for one message holds no more than that."""
    m, other = backend.connect(), backend.connect()
    channel, queue = backend.channel(), backend.queue()
    with (
        m.subscription.subscribe(manual(m, channel, queue=queue, prefetch=1)) as slow,
        other.subscription.subscribe(manual(other, channel, queue=queue)) as quick,
    ):
        taken = observed(quick, accept)
        publish(m, channel, [b"%d" % number for number in range(10)], **backend.reliable)
        held = slow.receive(PATIENCE)
        assert len(taken.wait_payloads(9)) == 9
        assert slow.counters.received == 1
        assert sorted([held.payload, *taken.payloads]) == [b"%d" % number for number in range(10)]
        accept(held)


# --- what becomes of unsettled messages when their stream ends: requeued, dead-lettered, or counted as dropped


def reason(letter: Message, m: Messaging) -> str | None:
    if Features.EXTENSION_HEADERS not in m.features:
        return None
    headers: dict[str, str] = letter.context.extensions["headers"]
    return headers["x-dead-letter-reason"]


# --- no other consumer receives them


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_MAX_DELIVERIES, Features.EXTENSION_DEAD_LETTER_CHANNEL)
def test_the_message_of_an_observer_that_raises_is_dead_lettered_without_a_queue(
    backend: Backend, m: Messaging
) -> None:
    channel, dead = backend.channel(), backend.channel("dead")
    with m.subscribe(dead, **backend.reliable) as letters:
        failing = Failing(b"1")
        stream = m.subscribe(channel, max_deliveries=3, dead_letter_channel=dead)
        stream.subscribe(failing)
        publish(m, channel, [b"1"], **backend.reliable)
        letter = letters.receive(PATIENCE)
        assert letter.payload == b"1"
        assert reason(letter, m) in ("rejected", None)
        failing.wait_ended()
        eventually(lambda: stream.counters.dead_lettered == 1, "counted")
        assert stream.counters.dropped == 0


@feature(Features.ACKNOWLEDGE)
def test_a_message_that_is_lost_with_its_stream_is_counted_and_logged(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = m.subscribe(channel, **backend.reliable)
    stream.subscribe(Failing(b"1"))
    publish(m, channel, [b"1"], **backend.reliable)
    eventually(lambda: stream.counters.dropped == 1, "counted")
    assert stream.counters.rejected == 1
    eventually(lambda: any("is lost" in record.getMessage() for record in caplog.records), "logged")


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_DEAD_LETTER_CHANNEL)
def test_messages_in_the_buffer_of_a_stream_that_closes_are_dead_lettered_or_dropped(backend: Backend) -> None:
    """Without a dead-letter channel they are counted as dropped."""
    m, other = backend.connect(), backend.connect()
    channel, dead = backend.channel(), backend.channel("dead")
    with other.subscribe(dead, **backend.reliable) as letters:
        for options in (backend.reliable, {"dead_letter_channel": dead}):
            with m.subscribe(channel, **options) as stream:
                publish(other, channel, [b"1", b"2", b"3"], **backend.reliable)
                assert receive(stream, 1) == [b"1"]
                eventually(lambda stream=stream: stream.counters.received == 3, "all there")  # type: ignore[misc]
            assert stream.counters.acknowledged == 1
            assert stream.counters.dropped == (0 if "dead_letter_channel" in options else 2)
        found = [letters.receive(PATIENCE) for _ in range(2)]
        assert [letter.payload for letter in found] == [b"2", b"3"]
        assert {reason(letter, m) for letter in found} <= {"closed", None}


# --- another consumer does


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_QUEUE, Features.BROKER_REDELIVERY)
def test_the_message_of_an_observer_that_raises_is_requeued(backend: Backend) -> None:
    """Scenario 34 [S]: the failed stream ends, its message takes the reject path: here, back to the queue."""
    m, other = backend.connect(), backend.connect()
    channel, queue = backend.channel(), backend.queue()
    failing = Failing(b"1")
    stream = m.subscribe(channel, queue=queue, dead_letter_channel=backend.channel("dead"), max_deliveries=3)
    stream.subscribe(failing)
    publish(m, channel, [b"1", b"2"], **backend.reliable)
    failing.wait_ended()
    with other.subscribe(channel, queue=queue, **backend.reliable) as rest:
        assert sorted(receive(rest, 2)) == [b"1", b"2"]
        nothing_more(other, channel, rest, **backend.reliable)
    assert stream.counters.dropped == 0
    assert stream.counters.dead_lettered == 0


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_MAX_DELIVERIES, Features.EXTENSION_DEAD_LETTER_CHANNEL)
@pytest.mark.feature(Features.EXTENSION_QUEUE)
def test_deliveries_are_counted_on_when_an_observer_is_retried(backend: Backend, m: Messaging) -> None:
    channel, dead = backend.channel(), backend.channel("dead")
    with m.subscribe(dead, **backend.reliable) as letters:
        stream = m.subscribe(channel, queue=backend.queue(), max_deliveries=3, dead_letter_channel=dead)
        seen = retried(stream, [b"1"] * 5)
        publish(m, channel, [b"1"], **backend.reliable)
        letter = letters.receive(PATIENCE)
        assert seen == [b"1"] * 3
        assert reason(letter, m) in ("maxDeliveries", None)


# --- kept subscriptions


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_QUEUE, Features.QUEUE_RETENTION)
def test_a_kept_subscription_stays_when_its_stream_is_closed(backend: Backend, channel: str) -> None:
    queue = backend.queue()
    other = backend.connect()
    with backend.connect() as m, m.subscribe(channel, keep_subscription=True, queue=queue) as stream:
        publish(other, channel, [b"1"], **backend.reliable)
        assert stream.receive(PATIENCE).payload == b"1"
    publish(other, channel, [b"2", b"3"], **backend.reliable)
    with backend.connect() as m, m.subscribe(channel, keep_subscription=True, queue=queue) as stream:
        assert receive(stream, 2) == [b"2", b"3"]


def test_keep_subscription_is_refused_where_the_broker_keeps_nothing(backend: Backend, m: Messaging) -> None:
    with pytest.raises(ArgumentError, match="keep_subscription"):
        m.subscribe(backend.channel(), keep_subscription=True)
    with pytest.raises(ArgumentError, match="keep_subscription"):
        m.on(backend.channel(), print, keep_subscription=True)
    with pytest.raises(ArgumentError, match="keep_subscription"):
        m.subscribe(backend.channel(), keep_subscription="yes")


@feature(Features.EXTENSION_DEAD_LETTER_CHANNEL, Features.EXTENSION_MANDATORY, Features.ACKNOWLEDGE)
@table("how", ["rejected", "invalid", "handler"])
def test_a_message_whose_dead_letter_channel_nothing_receives_is_kept(
    backend: Backend, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """It is redelivered, counted and reported once; its dead letter arrives once something receives it."""
    caplog.clear()
    m, channel, dead = backend.connect(), backend.channel(), backend.channel()
    options = {**backend.reliable, "dead_letter_channel": dead}
    seen: list[bytes] = []

    def refuse(message: Message) -> None:
        seen.append(message.payload)
        raise ValueError("refused")

    consumers: dict[str, Any] = {
        "rejected": lambda: m.subscribe(channel, acknowledge="manual", **options),
        "invalid": lambda: m.on(channel, seen.append, model=int, **options),
        "handler": lambda: m.on(channel, refuse, **options),
    }
    with consumers[how]() as consumer:
        consumer.ready.result(PATIENCE)
        publish(m, channel, [b"no number"], **backend.reliable)
        if how == "rejected":
            consumer.receive(PATIENCE).reject()
            consumer.receive(PATIENCE).reject()
        eventually(lambda: consumer.counters.unrouted >= 2, "handed back, and refused again")
        assert consumer.counters.dead_lettered == consumer.counters.acknowledged == 0
        assert caplog.text.count("nothing receives the dead-letter channel") == 1
        with m.subscribe(dead, **backend.reliable) as letters:
            letters.ready.result(PATIENCE)
            if how == "rejected":
                consumer.receive(PATIENCE).reject()
            assert letters.receive(PATIENCE).payload == b"no number"
        eventually(lambda: consumer.counters.dead_lettered == 1, "published, then acknowledged")
    if how == "handler":
        assert len(seen) >= 3
    caplog.clear()

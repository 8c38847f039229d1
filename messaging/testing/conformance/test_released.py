"""What becomes of unsettled messages when their stream ends: requeued, dead-lettered, or counted as dropped."""

from __future__ import annotations

import pytest

from messaging import ArgumentError, Features, Message, Messaging
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import Failing, feature, publish, receive, retried
from messaging.testing.waiting import PATIENCE, eventually


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
    m, other = backend.connect(), backend.connect()
    channel, queue = backend.channel(), backend.queue()
    failing = Failing(b"1")
    stream = m.subscribe(channel, queue=queue, dead_letter_channel=backend.channel("dead"), max_deliveries=3)
    stream.subscribe(failing)
    publish(m, channel, [b"1", b"2"], **backend.reliable)
    failing.wait_ended()
    with other.subscribe(channel, queue=queue, **backend.reliable) as rest:
        assert sorted(receive(rest, 2)) == [b"1", b"2"]
    assert stream.counters.dropped == 0
    assert stream.counters.dead_lettered == 0


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_QUEUE)
def test_retry_gets_the_message_of_a_queue_again(backend: Backend, m: Messaging, channel: str) -> None:
    seen = retried(m.subscribe(channel, queue=backend.queue(), **backend.reliable), [b"2"])
    publish(m, channel, [b"1", b"2", b"3"], **backend.reliable)
    assert sorted(seen.wait_for(4)) == [b"1", b"2", b"2", b"3"]


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

"""The bounded buffer between broker and observer, and what happens when it is full."""

from __future__ import annotations

import pytest

from messaging import Features, Messaging, StreamOverflowError, UnsupportedFeatureError
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature, publish, receive, subscription_to
from messaging.testing.waiting import PATIENCE, eventually, observed

PAYLOADS = [b"%d" % number for number in range(10)]

overflow = feature(Features.EXTENSION_OVERFLOW, Features.EXTENSION_BUFFER_SIZE)


@overflow
def test_a_stream_that_may_not_overflow_fails(backend: Backend, m: Messaging, channel: str) -> None:
    sibling = observed(m.subscribe(channel, **backend.reliable))
    with m.subscribe(channel, overflow="fail", buffer_size=4, **backend.reliable) as stream:
        publish(m, channel, PAYLOADS[:4], **backend.reliable)
        eventually(lambda: stream.counters.received == 4, "the buffer is full")
        publish(m, channel, PAYLOADS[4:], **backend.reliable)
        eventually(lambda: len(m.runtime.get_runtime_dto().subscriptions) == 1, "unsubscribed")
        with pytest.raises(StreamOverflowError, match="4"):
            stream.receive(PATIENCE)
    assert sibling.wait_payloads(len(PAYLOADS)) == PAYLOADS


@overflow
def test_a_stream_that_blocks_loses_nothing_and_holds_the_broker_back(backend: Backend, channel: str) -> None:
    """Demand is wired to the protocol: what the consumer does not take stays, above some credit, at the broker."""
    m, other = backend.connect(), backend.connect()
    payloads = [b"%d" % number for number in range(1_500)]
    with (
        m.subscribe(channel, overflow="block", buffer_size=5, **backend.reliable) as stream,
        other.subscribe(channel, buffer_size=2_000, **backend.reliable) as witness,
    ):
        inbox = observed(witness)
        publish(other, channel, payloads, **backend.reliable)
        assert inbox.wait_payloads(len(payloads)) == payloads
        dto = subscription_to(m, channel)
        assert dto is not None
        # the credit of a connection, where a protocol has none for each subscription
        assert dto.buffered <= 1_024
        assert receive(stream, len(payloads)) == payloads
        assert stream.counters.dropped == 0


@feature(Features.EXTENSION_OVERFLOW, Features.EXTENSION_BUFFER_SIZE, Features.EXTENSION_QOS)
def test_without_acknowledgement_drops_are_counted_and_blocking_is_refused(
    backend: Backend, m: Messaging, channel: str
) -> None:
    """QoS 0, no policy chosen: the newest count, and nothing is dropped silently. Nothing can hold messages back."""
    with pytest.raises(UnsupportedFeatureError, match="overflow=block"):
        m.subscribe(channel, qos="0", overflow="block")
    with pytest.raises(UnsupportedFeatureError, match="overflow=block"):
        backend.connect(overflow="block").subscribe(channel, qos="0")
    with m.subscribe(channel, qos="0", buffer_size=4) as stream:
        publish(m, channel, PAYLOADS, qos="0")
        eventually(lambda: stream.counters.dropped >= len(PAYLOADS) - 4, "everything else is dropped")
        assert receive(stream, 4) == PAYLOADS[-4:]
        assert stream.counters.dropped == len(PAYLOADS) - 4

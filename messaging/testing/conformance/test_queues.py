"""Point-to-point (MSG120): subscribers that name the same queue compete."""

from __future__ import annotations

from collections import Counter

import pytest

from messaging import Features, InvalidExtensionError, Messaging
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature, nothing_more, publish, receive
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, observed


@feature(Features.POINT_TO_POINT, Features.EXTENSION_QUEUE)
def test_of_competing_consumers_one_gets_a_message(backend: Backend) -> None:
    """Two on one instance and one on another; who subscribes without the queue gets everything."""
    m, other, third = backend.connect(), backend.connect(), backend.connect()
    channel, queue = backend.channel(), backend.queue()
    payloads = [b"%d" % number for number in range(60)]
    competing = [
        m.subscribe(channel, queue=queue, **backend.reliable),
        m.subscribe(channel, queue=queue, **backend.reliable),
        other.subscribe(channel, queue=queue, **backend.reliable),
    ]
    inboxes = [observed(stream) for stream in competing]
    with third.subscribe(channel, **backend.reliable) as everything:
        publish(m, channel, payloads, **backend.reliable)
        assert receive(everything, 60) == payloads

        def taken() -> Counter[bytes]:
            return Counter(payload for inbox in inboxes for payload in inbox.payloads)

        eventually(lambda: sum(taken().values()) >= 60, "everything was taken")
        # whatever else were on its way would come before the sentinels
        publish(m, channel, [b"sentinel"] * 6, **backend.reliable)
        eventually(lambda: taken()[b"sentinel"] == 6, "the sentinels were taken")
    assert taken() == Counter([*payloads, *[b"sentinel"] * 6])
    assert all(inbox.payloads for inbox in inboxes), "one consumer got nothing"


@feature(Features.POINT_TO_POINT, Features.EXTENSION_QUEUE)
def test_two_queues_of_a_channel_get_a_copy_each(backend: Backend, m: Messaging, channel: str) -> None:
    with (
        m.subscribe(channel, queue=backend.queue(), **backend.reliable) as first,
        m.subscribe(channel, queue=backend.queue(), **backend.reliable) as second,
    ):
        publish(m, channel, [b"1", b"2"], **backend.reliable)
        assert receive(first, 2) == [b"1", b"2"]
        assert receive(second, 2) == [b"1", b"2"]


@feature(Features.POINT_TO_POINT, Features.EXTENSION_QUEUE)
@table("what", ["stream", "instance"])
def test_a_consumer_that_closes_is_given_nothing_more(backend: Backend, what: str) -> None:
    """Scenarios 30 [S], 31 [S]: the broker saw it, or half of the messages would go nowhere."""
    m, other = backend.connect(), backend.connect()
    channel, queue = backend.channel(), backend.queue()
    with m.subscribe(channel, queue=queue, **backend.reliable) as stays:
        leaves = other.subscribe(channel, queue=queue, **backend.reliable)
        leaves.ready.result(PATIENCE)
        if what == "stream":
            leaves.close().result(PATIENCE)
        else:
            other.close()
        payloads = [b"%d" % number for number in range(20)]
        publish(m, channel, payloads, **backend.reliable)
        assert receive(stays, 20) == payloads


@feature(Features.POINT_TO_POINT, Features.EXTENSION_QUEUE, Features.WILDCARDS)
def test_a_queue_can_have_a_pattern(backend: Backend, m: Messaging) -> None:
    base, queue = backend.channel("q"), backend.queue()
    with m.subscribe(f"{base}/+", queue=queue, **backend.reliable) as stream:
        publish(m, f"{base}/a", [b"1"], **backend.reliable)
        publish(m, f"{base}/a/b", [b"2"], **backend.reliable)
        message = stream.receive(PATIENCE)
        assert (message.payload, message.context.channel) == (b"1", f"{base}/a")
        nothing_more(m, f"{base}/b", stream, **backend.reliable)


@feature(Features.QUEUE_RETENTION, Features.EXTENSION_QUEUE)
def test_a_queue_keeps_what_arrives_while_nobody_consumes(backend: Backend, m: Messaging) -> None:
    channel, queue = backend.channel(), backend.queue()
    with m.subscribe(channel, queue=queue):
        pass
    payloads = [b"%d" % number for number in range(50)]
    publish(m, channel, payloads, **backend.reliable)
    with m.subscribe(channel, queue=queue) as stream:
        assert receive(stream, 50) == payloads
        nothing_more(m, channel, stream)


@feature(Features.EXTENSION_QUEUE)
@table("name", ["ünïcode 日本", "a.b*c", "-", "$x"])
def test_a_queue_may_be_named_as_one_likes(backend: Backend, m: Messaging, name: str) -> None:
    """But for malformed names, which are refused."""
    channel, queue = backend.channel(), f"{backend.queue()}{name}"
    with m.subscribe(channel, queue=queue) as stream:
        publish(m, channel, [b"1"])
        assert receive(stream, 1) == [b"1"]
    for malformed in ("", "a/b", "a+", "#", "nul\0", 7, "x" * 201):
        with pytest.raises(InvalidExtensionError, match="queue"):
            m.subscribe(channel, queue=malformed)

"""Subscribing: copies, patterns, overlaps, unsubscribing, content, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from messaging import (
    AcknowledgeType,
    Features,
    Messaging,
    PublishRefusedError,
    SubscriptionRefusedError,
)
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import ack_state, feature, nothing_more, publish, receive, subscription_to
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, results


@feature(Features.PUBLISH_SUBSCRIBE)
def test_every_subscriber_gets_a_copy(backend: Backend, channel: str) -> None:
    """MSG130: of one instance and of another, each message once. Scenario 28 [S]: by channel, and by its context."""
    m, other = backend.connect(), backend.connect()
    context = m.context_builder().channel(channel).build_context()
    with m.subscription.subscribe(channel) as a, m.subscription.subscribe(context) as b, other.subscribe(channel) as c:
        publish(m, channel, [b"1", b"2"])
        for stream in (a, b, c):
            assert receive(stream, 2) == [b"1", b"2"]
        publish(other, channel, [b"sentinel"])
        for stream in (a, b, c):
            assert receive(stream, 1) == [b"sentinel"]


# --- patterns


@feature(Features.WILDCARDS)
@table(
    ("pattern", "inside", "outside"),
    [
        ("a/+", ["a/b", "a/c", "a/"], ["a", "a/b/c", "b/a"]),
        ("+/b", ["a/b", "/b"], ["b", "a/b/c", "a/c"]),
        ("a/+/c", ["a/b/c", "a//c"], ["a/c", "a/b/b/c", "a/b/c/d"]),
        ("a/#", ["a", "a/b", "a/b/c", "a/"], ["b", "ab", "aa/b"]),
        ("#", ["a", "a/b", "a/b/c"], []),
        ("a/+/#", ["a/b", "a/b/c/d"], ["a", "b/b"]),
        ("+", ["a"], ["a/b"]),
        # one level of this grammar, whatever characters are in it
        ("+", ["x.y", "*", "50%", "x y"], []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wildcards(backend: Backend, m: Messaging, pattern: str, inside: list[str], outside: list[str]) -> None:
    """Scenarios 29 [S], 37 [S]: ``+`` is one level, ``#`` any number; the context names the actual channel."""
    base = backend.channel("w")
    with m.subscribe(f"{base}/{pattern}") as stream:
        for name in (*outside, *inside):
            publish(m, f"{base}/{name}", [name.encode()])
        for name in inside:
            message = stream.receive(PATIENCE)
            assert (message.payload, message.context.channel) == (name.encode(), f"{base}/{name}")
        nothing_more(m, f"{base}/{inside[0]}", stream)


@feature(Features.WILDCARDS)
def test_a_wildcard_in_the_first_level_does_not_match_dollar_channels(backend: Backend, m: Messaging) -> None:
    """MQTT 4.7.2, on every adapter; a pattern that starts with the ``$`` level does."""
    level = backend.queue()
    dollar = f"${level}/x"
    with (
        m.subscribe("+/x") as plus,
        m.subscribe("#") as everything,
        m.subscribe(f"${level}/+") as own,
        m.subscribe(dollar) as exact,
    ):
        publish(m, dollar, [b"1"])
        assert receive(own, 1) == [b"1"]
        assert receive(exact, 1) == [b"1"]
        publish(m, f"{level}/x", [b"2"])
        assert plus.receive(PATIENCE).payload == b"2"
        while (message := everything.receive(PATIENCE)).context.channel != f"{level}/x":
            # other tests' retained messages may be there
            assert not (message.context.channel or "$").startswith("$")


@feature(Features.WILDCARDS)
def test_overlapping_patterns_get_one_copy_each(backend: Backend, m: Messaging) -> None:
    """Scenario 33 [G]: ``a/#`` and ``a/b``, on one instance."""
    base = backend.channel("a")
    patterns = [f"{base}/#", f"{base}/b", f"{base}/+", f"{base}/b"]
    streams = [m.subscribe(pattern, **backend.reliable) for pattern in patterns]
    results(stream.ready for stream in streams)
    publish(m, f"{base}/b", [b"1", b"2"], **backend.reliable)
    publish(m, f"{base}/b", [b"sentinel"], **backend.reliable)
    for stream in streams:
        with stream:
            assert receive(stream, 3) == [b"1", b"2", b"sentinel"]


@feature(Features.ROUTING_KEY)
def test_a_routing_key_selects_within_a_channel(backend: Backend, m: Messaging) -> None:
    """Scenarios 16 [S], 37 [S]: ``channel(name, extension)``; words by ``.``, ``*`` is one and ``#`` any number."""
    channel = backend.queue()
    keys = ["red", "red.big", "red.big.old", "blue.big"]
    expected = {"red": ["red"], "*.big": ["red.big", "blue.big"], "red.#": ["red", "red.big", "red.big.old"], "#": keys}
    streams = {pattern: m.subscribe(channel, channel_extension=pattern) for pattern in expected}
    results(stream.ready for stream in streams.values())
    for key in keys:
        publish(m, channel, [key.encode()], channel_extension=key)
    publish(m, channel, [b"none"])
    for pattern, stream in streams.items():
        dto = [each for each in m.runtime.get_runtime_dto().subscriptions if each.channel.extension == pattern]
        assert [each.channel.name for each in dto] == [channel]
        with stream:
            for key in expected[pattern]:
                context = stream.receive(PATIENCE).context
                assert (context.channel, context.channel_extension) == (channel, key)
            sentinel = expected[pattern][0]
            nothing_more(m, channel, stream, channel_extension=sentinel)


# --- more than one


@feature(Features.EXTENSION_QOS, Features.ACKNOWLEDGE)
def test_two_subscribers_of_different_qos(m: Messaging, channel: str) -> None:
    """Scenario 32 [G]: each message once for both; the higher level is in force; closing one leaves the other."""
    low, high = m.subscribe(channel, qos="0"), m.subscribe(channel, qos="1")
    with high:
        with low:
            publish(m, channel, [b"1", b"2"], qos="1")
            assert receive(low, 2) == [b"1", b"2"]
            first = high.receive(PATIENCE)
            assert ack_state(first) is AcknowledgeType.RECEIVED
            assert receive(high, 1) == [b"2"]
        publish(m, channel, [b"3"], qos="1")
        assert receive(high, 1) == [b"3"]
        nothing_more(m, channel, high, qos="1")


def test_closing_one_of_two_subscribers_leaves_the_other(m: Messaging, channel: str) -> None:
    """Scenario 30 [S]: the broker hears of it when the last stream of the channel goes."""
    with m.subscribe(channel) as stays:
        with m.subscribe(channel) as goes:
            publish(m, channel, [b"1"])
            assert receive(goes, 1) == [b"1"]
        publish(m, channel, [b"2"])
        assert receive(stays, 2) == [b"1", b"2"]
        nothing_more(m, channel, stays)
    eventually(lambda: subscription_to(m, channel) is None, "unsubscribed")


def test_what_is_published_between_two_subscriptions_is_missed(backend: Backend, channel: str) -> None:
    """Scenario 30 [S]: the broker forgot the first one, or it would deliver to the second."""
    m, publisher = backend.connect(), backend.connect()
    with m.subscribe(channel, **backend.reliable) as stream:
        publish(publisher, channel, [b"1"], **backend.reliable)
        assert receive(stream, 1) == [b"1"]
    publish(publisher, channel, [b"2"], **backend.reliable)
    with m.subscribe(channel, **backend.reliable) as stream:
        nothing_more(publisher, channel, stream, **backend.reliable)


def test_many_subscriptions_come_and_go(backend: Backend, m: Messaging, channel: str) -> None:
    """From ``ready`` on, which is when the context is entered, nothing that another instance publishes gets lost."""
    publisher = backend.connect()
    for number in range(50):
        with m.subscribe(f"{channel}/{number % 5}") as stream:
            publish(publisher, f"{channel}/{number % 5}", [str(number).encode()])
            assert receive(stream, 1) == [str(number).encode()]
    eventually(lambda: not m.runtime.get_runtime_dto().subscriptions, "all gone")


def test_threads_subscribe_and_close_on_one_channel(backend: Backend, m: Messaging, channel: str) -> None:
    """One's unsubscribing never takes away what another one has just been confirmed."""

    def work(number: int) -> None:
        for turn in range(10):
            own = b"%d %d" % (number, turn)
            with m.subscribe(channel, **backend.reliable) as stream:
                publish(m, channel, [own], **backend.reliable)
                while stream.receive(PATIENCE).payload != own:
                    pass

    results((in_thread(work, number) for number in range(6)), 3 * PATIENCE)
    eventually(lambda: not m.runtime.get_runtime_dto().subscriptions, "all gone")


# --- refused


@feature(Features.EXTENSION_AUTOCREATE, Features.EXTENSION_QUEUE)
def test_a_refused_subscription_ends_with_an_error(backend: Backend, m: Messaging) -> None:
    """Scenario 35 [I]; MSG180: with ``autocreate`` off, what does not exist is not made."""
    channel, queue = backend.channel(), backend.queue()
    inbox: Recorder[Any] = Recorder()
    m.subscribe(channel, queue=queue, autocreate=False).subscribe(inbox)
    assert isinstance(inbox.wait_error(), SubscriptionRefusedError)
    stream = m.subscribe(channel, queue=queue, autocreate=False)
    assert isinstance(stream.ready.exception(PATIENCE), SubscriptionRefusedError)
    with pytest.raises(SubscriptionRefusedError):
        stream.receive(PATIENCE)
    assert not m.runtime.get_runtime_dto().subscriptions
    # the same once it exists
    with (
        m.subscribe(channel, queue=queue),
        m.subscribe(channel, queue=queue, autocreate=False) as second,
    ):
        assert second.ready.done()


@feature(Features.EXTENSION_AUTOCREATE, Features.EXTENSION_QUEUE, Features.EXTENSION_BUFFER_SIZE)
def test_with_autocreate_off_a_queue_gets_nothing_new(backend: Backend, m: Messaging) -> None:
    """MSG180: who joins a queue takes what it gets; that it gets more is something to be created."""
    bound, other, queue = backend.channel("bound"), backend.channel("other"), backend.queue()
    with m.subscribe(bound, queue=queue) as first, m.subscribe(other, queue=queue, autocreate=False) as second:
        second.ready.result(PATIENCE)
        publish(m, other, [b"not bound"])
        publish(m, bound, [b"1", b"2"])
        assert {first.receive(PATIENCE).payload, second.receive(PATIENCE).payload} == {b"1", b"2"}


@feature(Features.EXTENSION_AUTOCREATE, Features.ROUTING_KEY)
def test_publishing_with_autocreate_off_needs_what_it_publishes_to(backend: Backend, m: Messaging) -> None:
    """MSG180, publishing."""
    channel = backend.queue()
    context = {"channel_extension": "key", "autocreate": False}
    assert isinstance(m.publish(channel, b"1", **context).exception(PATIENCE), PublishRefusedError)
    with m.subscribe(channel, channel_extension="key") as stream:
        publish(m, channel, [b"2"], **context)
        assert receive(stream, 1) == [b"2"]

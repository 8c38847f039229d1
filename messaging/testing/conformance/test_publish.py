"""Publishing: overloads, payloads, channels, context values, deadlines, confirms, refusals."""

from __future__ import annotations

import threading
import time
from typing import Final

import pytest

from messaging import (
    ArgumentError,
    Features,
    InvalidChannelError,
    InvalidExtensionError,
    InvalidHeaderError,
    MessageContext,
    Messaging,
    OutcomeUnknownError,
    PayloadTooLargeError,
    UnroutableError,
    UnsupportedFeatureError,
)
from messaging.errors import DeadlineError
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import ack_state, feature, nothing_more, publish, receive, wire
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, in_thread, observed, results

# --- overloads


@feature(Features.MESSAGE_PROPERTIES)
def test_a_channel_given_to_publish_replaces_the_channel_and_a_context_all(backend: Backend, m: Messaging) -> None:
    """Scenarios 19 [S], 20 [S], 21 [I]: ``publish(msg, "b")`` keeps the rest, ``publish(msg, ctx)`` does not merge."""
    a, b = backend.channel("a"), backend.channel("b")
    message = m.context_builder().channel(a).content_type("x/y").correlation_id("4711").content(b"x").build_message()
    with m.subscribe(a) as at_a, m.subscribe(b) as at_b:
        m.publisher.publish(message, b)
        m.publisher.publish(message, m.context_builder().channel(b).content_type("x/z").build_context())
        m.publisher.publish(message, m.context_builder().channel(b).build_context()).result(PATIENCE)
        contexts = [at_b.receive(PATIENCE).context for _ in range(3)]
        nothing_more(m, a, at_a)
    told = [(context.channel, context.content_type, context.correlation_id) for context in contexts]
    assert told == [(b, "x/y", "4711"), (b, "x/z", None), (b, None, None)]
    assert message.context.channel == a


def test_a_message_without_channel_is_refused(m: Messaging, channel: str) -> None:
    """Scenarios 17 [S], 22 [S]: no channel anywhere is an error to the caller, and nothing goes out.

    Scenario 18 [S]: ``publish(msg)`` uses the message's own context.
    """
    message = m.context_builder().content(b"x").build_message()
    with m.subscribe(channel) as stream:
        m.publisher.publish(m.context_builder().channel(channel).content(b"own").build_message()).result(PATIENCE)
        own = stream.receive(PATIENCE)
        assert (own.payload, own.context.channel) == (b"own", channel)
        with pytest.raises(InvalidChannelError, match="no channel"):
            m.publisher.publish(message)
        with pytest.raises(InvalidChannelError, match="no channel"):
            m.publisher.publish(message, MessageContext())
        with pytest.raises(ArgumentError):
            m.publisher.publish(b"x")
        nothing_more(m, channel, stream)


@pytest.mark.envelope
def test_a_received_message_can_be_passed_on_as_it_is(backend: Backend, m: Messaging) -> None:
    """What the adapter tells of a received message is no obstacle to publishing it elsewhere."""
    a, b = backend.channel("a"), backend.channel("b")
    context = backend.full_context(m)
    with m.subscribe(a, **backend.reliable) as at_a, m.subscribe(b, **backend.reliable) as at_b:
        publish(m, a, [b"x"], **context)
        first = at_a.receive(PATIENCE)
        m.publisher.publish(first, b).result(PATIENCE)
        second = at_b.receive(PATIENCE)
    assert second.payload == b"x"
    for name in ("content_type", "correlation_id", "reply_to_channel"):
        assert getattr(second.context, name) == getattr(first.context, name)
    assert second.context.extensions.get("headers") == first.context.extensions.get("headers")
    assert second.context.extensions.get("priority") == first.context.extensions.get("priority")


# --- payloads and channels


#: binary, not UTF-8, and what this project's own envelope starts with
LOOKS: Final = (
    b"\0",
    b"\xff\xfe\xfd",
    b"\x89RXM\r\n\x1a\n\x01",
    b"\x89RXM\r\n\x1a\n\x01\0\0\0\x02{}x",
    '{"a": "ü"}'.encode(),
)


@pytest.mark.envelope
def test_payloads_of_any_size_and_look_arrive_unchanged(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenarios 6 [S], 7 [S]: of a memoryview only the slice, not the backing array; what a mapper makes."""
    sized = [(bytes(range(256)) * (size // 256 + 1))[:size] for size in (0, 1, 2**16, 2**20)]
    with m.subscribe(channel, **backend.reliable) as stream:
        for payload in (*sized, *LOOKS):
            publish(m, channel, [payload], **backend.reliable)
            assert stream.receive(PATIENCE).payload == payload
        message = m.context_builder().channel(channel).content(memoryview(b"abcdef")[2:4]).build_message()
        m.publisher.publish(message).result(PATIENCE)
        m.publish(channel, bytearray(b"gh")).result(PATIENCE)
        mapped = m.context_builder().channel(channel).content([7], lambda content: b"%d" % content[0])
        m.publisher.publish(mapped.build_message()).result(PATIENCE)
        assert receive(stream, 3) == [b"cd", b"gh", b"7"]
        nothing_more(m, channel, stream)


@table("name", ["ü/日本語/🚀", "with space", "a.b/c.d", "50%/%41", "a*b/*", "'\"\\", "UPPER/lower", "x" * 150])
def test_channels_arrive_as_they_were_named(backend: Backend, m: Messaging, name: str) -> None:
    """MSG260, for names that mean something else below: the translation is injective."""
    channel = backend.channel(name)
    with m.subscribe(channel) as stream:
        publish(m, channel, [b"x"])
        assert stream.receive(PATIENCE).context.channel == channel
        for near in (channel.replace(".", "/"), channel.lower(), channel.replace("*", "x")):
            if near != channel:
                publish(m, near, [b"near"])
        nothing_more(m, channel, stream)


def test_leading_trailing_and_empty_levels_are_levels(backend: Backend, m: Messaging) -> None:
    base = backend.channel("x")
    names = [f"/{base}", f"{base}/", f"{base}//y", base]
    streams = [m.subscribe(name) for name in names]
    results(stream.ready for stream in streams)
    for name in names:
        publish(m, name, [name.encode()])
    for name, stream in zip(names, streams, strict=True):
        with stream:
            assert stream.receive(PATIENCE).payload == name.encode()
            nothing_more(m, name, stream)


# --- context values


@pytest.mark.envelope
@feature(Features.MESSAGE_PROPERTIES)
@table(
    "given",
    {
        "all": {
            "content_type": "a/b; c=d",
            "content_encoding": "x-own",
            "correlation_id": "ü-1",
            "reply_to": "conformance/réply",
        },
        "none": {},
    },
)
def test_context_values_arrive(backend: Backend, m: Messaging, given: dict[str, str]) -> None:
    """Scenarios 24 [S], 1 [S]: what was given is the same at the subscriber, what was left out stays unset."""
    channel = backend.channel()
    with m.subscribe(channel) as stream:
        publish(m, channel, [b"x"], **given)
        context = stream.receive(PATIENCE).context
    for name in ("content_type", "content_encoding", "correlation_id"):
        assert getattr(context, name) == given.get(name)
    assert context.reply_to_channel == given.get("reply_to")


@pytest.mark.envelope
def test_context_values_that_cannot_travel_are_refused(m: Messaging, channel: str) -> None:
    """Scenario 25 [I]: never dropped silently."""
    with m.subscribe(channel) as stream:
        for value in ("content_type", "content_encoding", "correlation_id", "reply_to"):
            if Features.MESSAGE_PROPERTIES in m.features:
                m.publish(channel, b"x", **{value: "text"}).result(PATIENCE)
                assert stream.receive(PATIENCE).payload == b"x"
                continue
            with pytest.raises(UnsupportedFeatureError) as refusal:
                m.publish(channel, b"x", **{value: "text"})
            assert refusal.value.feature == Features.MESSAGE_PROPERTIES
            assert refusal.value.instance == m.name
        nothing_more(m, channel, stream)


@pytest.mark.envelope
@feature(Features.EXTENSION_HEADERS)
def test_headers_arrive(m: Messaging, channel: str) -> None:
    """MSG210: user headers, any text."""
    headers = {"trace-id": "abc", "ünïcode": "日本語 🚀", "empty": "", "long": "x" * 2_000}
    with m.subscribe(channel) as stream:
        publish(m, channel, [b"x"], headers=headers)
        extensions = stream.receive(PATIENCE).context.extensions
        assert dict(extensions["headers"]) == headers
        with pytest.raises(TypeError):
            extensions["headers"]["k"] = "v"
        publish(m, channel, [b"y"])
        assert not stream.receive(PATIENCE).context.extensions.get("headers")


#: what a broker of MQTT may end the connection over (MQTT 1.5.4), two lines among it; refused on every adapter
UNPRINTABLE = ["a\nb", "a\rb", "a\0b", "\x01", "\t", "\x7f", "\x85", "\ufffe", "\ufdd0", "\ud800"]


@pytest.mark.envelope
@feature(Features.EXTENSION_HEADERS, Features.MESSAGE_PROPERTIES)
def test_values_with_control_characters_are_refused(m: Messaging, channel: str) -> None:
    """MSG210, and bad input: one rule for headers, content types and encodings on all adapters, nothing sent."""
    with m.subscribe(channel) as stream:
        for bad in UNPRINTABLE:
            for headers in ({bad: "value"}, {"name": bad}, {"fine": "fine", "name": bad}):
                with pytest.raises(InvalidHeaderError, match=r"header .*U\+"):
                    m.publish(channel, b"x", headers=headers)
            for name in ("content_type", "content_encoding"):
                message = getattr(m.context_builder().channel(channel), name)(bad).content(b"x").build_message()
                with pytest.raises(ArgumentError, match=name):
                    m.publisher.publish(message)
        nothing_more(m, channel, stream)


# --- limits


@pytest.mark.envelope
@feature(Features.MESSAGE_SIZE_LIMIT)
def test_a_payload_over_the_limit_is_refused(backend: Backend, channel: str) -> None:
    """MSG205: the limit is announced, with a setting and without; a larger payload is refused before it is sent."""
    assert (backend.connect().runtime.get_runtime_dto().max_message_size or 0) >= 2**20
    m = backend.connect(max_message_size=1_000)
    assert m.runtime.get_runtime_dto().max_message_size == 1_000
    with m.subscribe(channel) as stream:
        said = f"1001 bytes exceeds the limit of 1000 bytes of '{m.name}'"
        with pytest.raises(PayloadTooLargeError, match=said) as refusal:
            m.publish(channel, b"x" * 1_001)
        assert (refusal.value.size, refusal.value.limit) == (1_001, 1_000)
        publish(m, channel, [b"x" * 1_000])
        assert receive(stream, 1) == [b"x" * 1_000]
        nothing_more(m, channel, stream)


# --- order and concurrency


@feature(Features.EXTENSION_GUARANTEED_ORDERING)
def test_a_thousand_messages_arrive_in_order(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 26 [S]: ``guaranteedOrdering``; none of the promises is waited for in between."""
    payloads = [str(number).encode() for number in range(1_000)]
    with m.subscribe(channel, **backend.reliable) as stream:
        publish(m, channel, payloads, guaranteed_ordering=True, **backend.reliable)
        assert receive(stream, len(payloads)) == payloads


def test_many_threads_publish_at_once(backend: Backend, m: Messaging, channel: str) -> None:
    """Nothing is lost or duplicated, and the messages of each thread keep their order."""
    threads, each = 8, 100
    go = threading.Barrier(threads)

    def work(number: int) -> None:
        go.wait(PATIENCE)
        publish(m, channel, [f"{number} {n}".encode() for n in range(each)], **backend.reliable)

    inbox = observed(m.subscribe(channel, **backend.reliable))
    results(in_thread(work, number) for number in range(threads))
    payloads = inbox.wait_payloads(threads * each)
    assert len(payloads) == threads * each
    for number in range(threads):
        own = [payload for payload in payloads if payload.startswith(f"{number} ".encode())]
        assert own == [f"{number} {n}".encode() for n in range(each)]


# --- guarantees


@feature(Features.EXTENSION_GUARANTEED_DELIVERY)
def test_guaranteed_delivery_is_not_send_and_forget(m: Messaging, channel: str) -> None:
    """Scenario 27 [S]: at least QoS 1, both ways: the subscriber can acknowledge what it gets."""
    with m.subscribe(channel, guaranteed_delivery=True) as stream:
        m.publish(channel, b"x", guaranteed_delivery=True).result(PATIENCE)
        message = stream.receive(PATIENCE)
        assert ack_state(message).value == "RECEIVED"
        assert message.context.extensions.get("qos", "1") >= "1"


@wire
@feature(Features.EXTENSION_TIMEOUT, Features.EXTENSION_GUARANTEED_DELIVERY)
def test_guaranteed_delivery_is_confirmed_by_the_broker(backend: Backend, channel: str) -> None:
    """Scenario 27 [S]: the result is known only after the broker's answer; if none comes in time, it is unknown."""
    link = backend.wire()
    m = link.connect()
    m.publish(channel, b"first", guaranteed_delivery=True).result(PATIENCE)
    with backend.connect().subscribe(channel) as stream:
        link.proxy.hold()
        promise = m.publish(channel, b"x", guaranteed_delivery=True)
        assert stream.receive(PATIENCE).payload == b"x"
        late = m.publish(channel, b"late", guaranteed_delivery=True, timeout=1.0)
        assert receive(stream, 1) == [b"late"]
        assert isinstance(late.exception(PATIENCE), OutcomeUnknownError)
        # the broker has it, has passed it on, and has not been heard
        assert not promise.done()
        link.proxy.release()
        promise.result(PATIENCE)


@feature(Features.EXTENSION_MANDATORY)
def test_a_mandatory_message_that_nobody_gets_fails(m: Messaging, channel: str) -> None:
    """It fails at once, rather than at the deadline; with a subscriber it succeeds."""
    with pytest.raises(UnroutableError):
        m.publish(channel, b"1", mandatory=True).result(PATIENCE)
    m.publish(channel, b"2", mandatory=False, qos="1").result(PATIENCE)
    with m.subscribe(channel) as stream:
        m.publish(channel, b"3", mandatory=True).result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"3"
    with pytest.raises(InvalidExtensionError, match="mandatory"):
        m.publish(channel, b"4", mandatory=True, qos="0")


@wire
@feature(Features.EXTENSION_QOS)
def test_qos_0_is_send_and_forget(backend: Backend, channel: str) -> None:
    """MSG150: the promise resolves when the bytes are on their way, whatever the broker says."""
    link = backend.wire()
    m = link.connect()
    m.publish(channel, b"first", qos="0").result(PATIENCE)
    link.proxy.hold()
    m.publish(channel, b"x", qos="0").result(PATIENCE)
    link.proxy.release()


@feature(Features.EXTENSION_TIMEOUT)
def test_the_timeout_of_a_publish_bounds_its_wait_for_a_connection(backend: Backend, channel: str) -> None:
    """Scenario 23 [S]: bounded, and known not to have been sent."""
    m, link = backend.connect_severable(timeout=300.0)
    with backend.connect().subscribe(channel) as stream:
        link.down()
        start = time.monotonic()
        error = m.publish(channel, b"late", timeout=0.2).exception(PATIENCE)
        assert time.monotonic() - start >= 0.2
        assert isinstance(error, DeadlineError)
        assert not isinstance(error, OutcomeUnknownError)
        link.up()
        nothing_more(m, channel, stream)


# --- asking for nothing


def test_asking_for_the_default_needs_no_support(m: Messaging, channel: str) -> None:
    """Scenario 93 [S]: it is no request."""
    defaults = dict.fromkeys(
        ("guaranteedOrdering", "guaranteedDelivery", "autoAcknowledge", "lastWill", "retain"), False
    ) | {"autocreate": True}
    with m.subscribe(channel) as stream:
        for key, default in defaults.items():
            message = m.context_builder().channel(channel).extension_entry(key, default).content(b"x").build_message()
            m.publisher.publish(message).result(PATIENCE)
            assert receive(stream, 1) == [b"x"], key


@feature(Features.EXTENSION_QOS)
def test_what_nobody_confirms_is_sent_before_the_instance_is_closed(backend: Backend, channel: str) -> None:
    """A promise without confirmation resolves when the bytes are out: closing right then must not call them back."""
    count = 8_000  # more than any buffer on the way takes, and no more than a busy broker takes in time
    with backend.connect().subscribe(channel, qos=0, buffer_size=2 * count) as stream:
        stream.ready.result(PATIENCE)
        m = backend.connect(close_timeout=3 * PATIENCE)
        for number in range(count):
            m.publish(channel, b"%d" % number, qos=0, timeout=3 * PATIENCE)
        m.close()
        assert [int(payload) for payload in receive(stream, count)] == list(range(count))

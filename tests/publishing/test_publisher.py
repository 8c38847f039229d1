"""MessagePublisher: which context counts, and refusals on the caller's thread (RFC 5.5).

Scenarios 18-23, as far as a wire is needed to see them; the conformance suite (``test_publish``) has the others.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from messaging import Features, Message, MessageContext, MessageContextBuilder, Messaging, Promise
from messaging.errors import (
    ArgumentError,
    InvalidChannelError,
    InvalidContentError,
    InvalidExtensionError,
    UnsupportedFeatureError,
)
from messaging.model import Outgoing, PublishPlan
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.doubles.fake import FakeBroker, settle_loop
from tests.doubles.fixtures import Connect
from tests.doubles.plans import sent_values
from tests.threads import in_threads

FULL = MessageContext(
    "a",
    "key",
    "text/plain",
    "identity",
    "id",
    "r",
    MappingProxyType({"headers": MappingProxyType({"h": "1"}), "priority": 3}),
)


def went_out(broker: FakeBroker, publish: Callable[[], Promise[None]]) -> Outgoing:
    """What the broker got when ``publish`` was called."""
    broker.hold = True
    promise = publish()
    broker.wait_sent(len(broker.sent) + 1 if not broker.held else 1)
    outgoing = broker.held[-1]
    broker.confirm()
    assert promise.result(PATIENCE) is None
    return outgoing


# --- which context counts


def test_a_channel_replaces_the_channel_and_keeps_the_rest(broker: FakeBroker, m: Messaging) -> None:
    """Scenario 19 [S]. A routing key belongs to its channel, and goes with it."""
    outgoing = went_out(broker, lambda: m.publisher.publish(Message(b"1", FULL), "b"))
    expected = ("b", None, "text/plain", "identity", "id", "r")
    assert sent_values(outgoing) == expected
    assert outgoing.plan.options.priority == 3
    assert FULL.channel == "a"


def test_a_context_without_channel_uses_the_messages(broker: FakeBroker, m: Messaging) -> None:
    """Scenario 21 [I]: the one exception."""
    override = MessageContext(correlation_id="new")
    outgoing = went_out(broker, lambda: m.publisher.publish(Message(b"1", FULL), override))
    assert sent_values(outgoing) == ("a", "key", None, None, "new", None)
    assert override.channel is None


# --- the application's own message id


def sent_id(broker: FakeBroker, publish: Callable[[], Promise[None]]) -> str:
    return went_out(broker, publish).message_id


def test_a_message_id_of_the_application_is_that_of_its_message_alone(broker: FakeBroker, m: Messaging) -> None:
    assert sent_id(broker, lambda: m.publish("a", b"1", message_id="own")) == "own"
    assert sent_id(broker, lambda: m.publish("a", b"1")) != "own"
    assert sent_id(broker, lambda: m.publish("a", b"1", message_id="other", priority=3)) == "other"
    outgoing = went_out(broker, lambda: m.publish("a", b"1", message_id="third", priority=4))
    assert (outgoing.message_id, outgoing.plan.options.priority) == ("third", 4)
    assert went_out(broker, lambda: m.publish("a", b"1", priority=4)).plan.options.message_id is None


def test_each_message_id_is_checked_however_many_were_alike(m: Messaging) -> None:
    for key in ("good", "better"):
        m.publish("a", b"1", message_id=key).result(PATIENCE)
    for bad in ("", "x" * 256, "a\nb", 7, []):
        with pytest.raises(InvalidExtensionError, match="messageId"):
            m.publish("a", b"1", message_id=bad)
    # other extensions of the same call are checked, too
    for name, value in (("priority", "3"), ("priority", True), ("retain", 1), ("headers", {"k": 1})):
        m.publish("a", b"1", message_id="m", priority=1, retain=True, headers={}).result(PATIENCE)
        with pytest.raises(InvalidExtensionError, match=name):
            m.publish("a", b"1", message_id="m", **{name: value})
    with pytest.raises(ArgumentError, match="content_type"):
        m.publisher.publish(
            Message(b"", MessageContext("a", content_type=[], extensions={"messageId": "m"}))  # type: ignore[arg-type]
        )


def test_a_message_that_is_passed_on_keeps_its_id(broker: FakeBroker, m: Messaging) -> None:
    message = arrived(m, broker, "own")
    for publish in passing_on(m, message):
        assert sent_id(broker, publish) == "own"


@table("foreign", ["", "x" * 256, "a\nb", "\ufffe"])
def test_a_message_with_a_malformed_id_is_passed_on_with_another(
    broker: FakeBroker, connect: Connect, foreign: str
) -> None:
    m = connect(broker)
    message = arrived(m, broker, foreign)
    for publish in passing_on(m, message):
        assert sent_id(broker, publish) not in ("", foreign)
    copied = MessageContextBuilder().channel("a").extensions(message.context.extensions)
    with pytest.raises(InvalidExtensionError, match="messageId"):
        m.publisher.publish(copied.build_message())


def arrived(m: Messaging, broker: FakeBroker, message_id: str) -> Message:
    with m.subscribe("a") as stream:
        broker.deliver(b"1", extensions={"qos": "1", "messageId": message_id})
        return stream.receive(PATIENCE)


def passing_on(m: Messaging, message: Message) -> list[Callable[[], Promise[None]]]:
    """The ways of passing a message on that know it was received."""
    made = MessageContextBuilder().with_context(message.context).extension_entry("priority", 3)
    again = MessageContextBuilder().with_context(made.build_context())
    return [
        lambda: m.publisher.publish(message),
        lambda: m.publisher.publish(message, "b"),
        lambda: m.publisher.publish(Message(b"1", MessageContext("b")), message.context),
        lambda: m.publisher.publish(made.content(b"1").build_message()),
        lambda: m.publisher.publish(again.content(b"1").build_message(), "b"),
    ]


# --- refusals


def test_only_messages_with_bytes_and_fit_contexts_are_published(broker: FakeBroker, m: Messaging) -> None:
    """Nothing is sent of what is refused, and the instance goes on."""
    message = Message(b"1", MessageContext("a"))
    for wrong in (None, b"bytes", "text", MessageContext("a"), object()):
        kind = type(wrong).__name__
        with pytest.raises(ArgumentError, match=f"takes a Message or a MessageContextProvider, not {kind}"):
            m.publisher.publish(wrong)  # type: ignore[arg-type]
    payload: Any
    for payload in ("text", None, 7, ["x"], {"a": 1}):
        with pytest.raises(InvalidContentError):
            m.publisher.publish(Message(payload, MessageContext("a")))
    for channel in ("a/+", "#", "a\x00", "a" * 65_536, "\ud800"):
        calls: list[Callable[[], object]] = [
            lambda channel=channel: m.publish(channel, b"1"),  # type: ignore[misc]
            lambda channel=channel: m.publisher.publish(message, channel),  # type: ignore[misc]
            lambda channel=channel: m.publisher.publish(message, MessageContext(channel)),  # type: ignore[misc]
            lambda channel=channel: m.publisher.publish(Message(b"1", MessageContext(channel))),  # type: ignore[misc]
        ]
        for publish in calls:
            with pytest.raises(InvalidChannelError):
                publish()
        with pytest.raises(ArgumentError):
            m.publish("a", b"1", reply_to=channel)
    other: Any
    for other in (7, b"a", ["a"], {"a": 1}):
        with pytest.raises(ArgumentError):
            m.publisher.publish(Message(b"1", MessageContext(other)))
        with pytest.raises(ArgumentError):
            m.subscription.subscribe(MessageContext(other))
        with pytest.raises(ArgumentError):
            m.publisher.publish(message, other)
    assert "publish" not in broker.calls
    assert m.publish("a", b"1").result(PATIENCE) is None


@table("name", ["content_type", "content_encoding", "correlation_id", "channel_extension"])
@table(
    ("value", "text"), [("\x00", "NUL"), ("\ud800", "lone surrogate"), ("x" * 65_536, "65536 bytes"), (7, "not int")]
)
def test_bad_values_of_a_context_are_refused(m: Messaging, name: str, value: Any, text: str) -> None:
    context = MessageContext("a", **{name: value})
    with pytest.raises(ArgumentError, match=f"{name}.*{text}"):
        m.publisher.publish(Message(b"1", context))
    if name == "channel_extension":
        with pytest.raises(ArgumentError, match=f"{name}.*{text}"):
            m.subscription.subscribe(context)


def test_values_that_the_protocol_cannot_carry_are_refused(bare: FakeBroker, connect: Connect) -> None:
    m = connect(bare, name="bare-one")
    for name in ("content_type", "content_encoding", "correlation_id", "reply_to"):
        with pytest.raises(UnsupportedFeatureError, match=Features.MESSAGE_PROPERTIES) as caught:
            m.publish("a", b"1", **{name: "x"})
        assert caught.value.instance == "bare-one"
    with pytest.raises(UnsupportedFeatureError, match=Features.ROUTING_KEY):
        m.publish("a", b"1", channel_extension="key")
    with pytest.raises(UnsupportedFeatureError, match=Features.ROUTING_KEY):
        m.subscribe("a", channel_extension="key")
    with pytest.raises(UnsupportedFeatureError, match=Features.WILDCARDS):
        m.subscribe("a/+")
    assert m.publish("a", {"x": 1}).result(PATIENCE) is None  # a content type that was not asked for is no error
    assert bare.payloads == [b'{"x":1}']


def test_the_adapter_may_refuse_before_anything_is_sent(broker: FakeBroker, m: Messaging) -> None:
    calls: list[str] = []

    def check(plan: PublishPlan) -> None:
        calls.append(plan.channel)
        if plan.channel == "too/long":
            raise ArgumentError("too long once translated")

    broker.adapter.check_publish = check  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ArgumentError, match="too long"):
            m.publish("too/long", b"1")
    for _ in range(3):
        m.publish("fine", b"1").result(PATIENCE)
    assert calls == ["too/long", "too/long", "fine"]  # once per distinct context that passed


# --- caches


async def test_contexts_are_checked_again_if_the_broker_does_less_than_announced(
    broker: FakeBroker, connect: Connect
) -> None:
    broker.gates["open"].close()
    m = connect(broker)
    context = m.context_builder().channel("a").extension_entry("priority", 3).build_context()
    early = m.publisher.publish(Message(b"1", context))
    broker.features = broker.features - {Features.EXTENSION_PRIORITY}
    broker.gates["open"].open()
    await m
    await early
    with pytest.raises(UnsupportedFeatureError, match="priority"):
        m.publisher.publish(Message(b"2", context))
    with pytest.raises(UnsupportedFeatureError, match="priority"):
        m.publish("a", b"2", priority=3)


def test_one_context_published_by_many_threads_at_once(broker: FakeBroker, m: Messaging) -> None:
    message = Message(b"1", FULL)

    def publish(_: int) -> None:
        for promise in [m.publisher.publish(message) for _ in range(50)]:
            assert promise.result(PATIENCE) is None

    in_threads(8, publish)
    assert len(broker.sent) == 400


def test_the_promise_of_a_publish_names_its_channel_not_its_payload(broker: FakeBroker, m: Messaging) -> None:
    payload = bytes(1000)
    before = sys.getrefcount(payload)
    promise = m.publisher.publish(Message(payload, MessageContext("a/b")))
    promise.result(PATIENCE)
    assert repr(promise) == "<Promise of publish to 'a/b': resolved>"
    broker.sent.clear()
    settle_loop()
    gc.collect()
    assert sys.getrefcount(payload) == before


def test_messages_of_one_checked_context_may_have_ids_of_their_own(broker: FakeBroker, connect: Connect) -> None:
    publisher = connect(broker).publisher
    context = MessageContext("a", extensions=MappingProxyType({"qos": "1"}))
    plan = publisher.compile(context)
    found = []
    for given in ("one", "two", None):
        outgoing = went_out(broker, lambda given=given: publisher.publish_checked(b"x", plan, None, message_id=given))
        assert outgoing.plan is plan
        found.append(outgoing.message_id)
    assert found[:2] == ["one", "two"]
    assert found[2] not in found[:2]


def test_objects_that_are_published_alike_share_one_plan_but_not_an_id(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker)
    first, second, text = (
        went_out(broker, lambda each=each: m.publish("a", each)) for each in ({"n": 1}, {"n": 2}, "x")
    )
    assert first.plan is second.plan
    assert (first.plan.content_type, text.plan.content_type) == ("application/json", "text/plain; charset=utf-8")
    ids = [went_out(broker, lambda each=each: m.publish("a", [1], message_id=each)).message_id for each in ("1", "2")]
    assert ids == ["1", "2"]

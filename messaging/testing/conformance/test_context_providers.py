"""Context builders of an application's own (RFC 5.6.3, 5.6.4)."""

from __future__ import annotations

from typing import Any

import pytest

from messaging import (
    ArgumentError,
    ClosedError,
    Features,
    Message,
    MessageContext,
    MessageContextBuilder,
    MessageContextProvider,
    Messaging,
)
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature, receive
from messaging.testing.waiting import PATIENCE


class Reading:
    """Knows the channel and the payload of a measurement; no ``MessageContextBuilder``."""

    def __init__(self, channel: str = "") -> None:
        self._channel = channel
        self._celsius = 0.0

    def celsius(self, value: float) -> Reading:
        self._celsius = value
        return self

    def build_context(self) -> MessageContext:
        return MessageContextBuilder().channel(self._channel).build_context()

    def build_message(self) -> Message:
        return Message(b"%.1f" % self._celsius, self.build_context())


def found(backend: Backend, name: str) -> Any:
    """What the feature leads to."""
    target = f"(&(osgi.messaging.name={name})(osgi.messaging.feature=messageContextBuilder))"
    return backend.services.service(MessageContextProvider, target)


def test_a_builder_of_the_application_is_found_by_its_feature(backend: Backend, m: Messaging, channel: str) -> None:
    """RFC 5.6.4: with the properties of the instance; each look-up makes one; gone with the instance."""
    assert found(backend, m.name) is None
    registration = m.register_context_builder(lambda: Reading(channel), {"unit": "celsius"})
    properties = registration.reference.properties
    assert set(properties["osgi.messaging.feature"]) == m.features | {Features.MESSAGE_CONTEXT_BUILDER}
    assert properties["osgi.messaging.protocol"]
    assert properties["unit"] == "celsius"
    one, other = found(backend, m.name), found(backend, m.name)
    assert one is not other
    with m.subscribe(channel) as stream:
        stream.ready.result(PATIENCE)
        m.publisher.publish(one.celsius(21.5)).result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"21.5"
    registration.unregister()
    assert found(backend, m.name) is None
    with m.register_context_builder(Reading):
        assert isinstance(found(backend, m.name), Reading)
    assert found(backend, m.name) is None
    with pytest.raises(ArgumentError):
        m.register_context_builder(7)
    m.register_context_builder(Reading)
    m.close()
    assert found(backend, m.name) is None
    with pytest.raises(ClosedError):
        m.register_context_builder(Reading)


def test_a_provider_stands_for_its_message_and_its_context(backend: Backend, m: Messaging) -> None:
    """What it builds at the time of the call, also if the same one is used again."""
    first, second = backend.channel("first"), backend.channel("second")
    builder = m.context_builder().channel(first)
    with m.subscription.subscribe(builder) as one, m.subscription.subscribe(Reading(second)) as other:
        one.ready.result(PATIENCE)
        other.ready.result(PATIENCE)
        m.publisher.publish(builder.content(b"1")).result(PATIENCE)
        m.publisher.publish(Message(b"2", MessageContext(second)), builder).result(PATIENCE)
        m.publisher.publish(Message(b"3", MessageContext(first)), builder.channel(second)).result(PATIENCE)
        context = m.context_builder().with_context(Reading(second))
        m.publisher.publish(context.content(b"4")).result(PATIENCE)
        assert receive(one, 2) == [b"1", b"2"]
        assert receive(other, 2) == [b"3", b"4"]


@feature(Features.REPLY_TO)
def test_a_provider_stands_for_a_request(backend: Backend, m: Messaging, responder: Messaging) -> None:
    first, second = backend.channel("first"), backend.channel("second")

    def say_where(request: Message) -> bytes:
        return str(request.context.channel).encode() + request.payload

    responder.reply([first, second], say_where)
    builder = m.context_builder().channel(first).content(b"!").extension_entry("qos", "1")
    for channel in (first, second):
        builder.channel(channel)
        assert m.reply_to.publish_with_reply(builder).result(PATIENCE).payload == channel.encode() + b"!"
        message = Message(b"?", MessageContext("unused"))
        assert m.reply_to.publish_with_reply(message, builder).result(PATIENCE).payload == channel.encode() + b"?"
        (reply,) = m.reply_to_many.publish_with_reply_many(builder)
        assert reply.payload == channel.encode() + b"!"


def test_what_builds_no_message_is_refused(m: Messaging) -> None:
    """RFC 5.6.3: what is a provider; the standard builder is one."""
    assert isinstance(m.context_builder(), MessageContextProvider)
    assert isinstance(Reading(), MessageContextProvider)
    assert not isinstance(MessageContext("a"), MessageContextProvider)

    class Wrong:
        def build_context(self) -> Any:
            return 7

        build_message = build_context

    for call in (m.publisher.publish, m.subscription.subscribe):
        with pytest.raises(ArgumentError, match="int"):
            call(Wrong())
    with pytest.raises(ArgumentError, match="MessageContextProvider"):
        m.publisher.publish(7)

"""The application's own message id: it arrives as it was given, again and again, and is passed on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

import messaging
from messaging import (
    Features,
    InvalidExtensionError,
    Message,
    MessageContextBuilder,
    Messaging,
    UnsupportedFeatureError,
)
from messaging.errors import UnroutableError
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature
from messaging.testing.waiting import PATIENCE

if TYPE_CHECKING:
    from messaging import MessageStream

pytestmark = [pytest.mark.envelope]

#: all that an id may hold, as long as it may be
AWKWARD: Final = "größe/+#.$ " + "x" * 242


def told(stream: MessageStream) -> Any:
    return stream.receive(PATIENCE).context.extensions.get("messageId")


def received(id_: str, payload: bytes = b"x") -> Message:
    """A message with this id, out of another instance."""
    with messaging.connect("memory://elsewhere") as m, m.subscribe("from/here") as stream:
        m.publish("from/here", payload, message_id=id_).result(PATIENCE)
        return stream.receive(PATIENCE)


@feature(Features.EXTENSION_MESSAGE_ID)
def test_it_arrives_as_it_was_given_with_every_qos(m: Messaging, channel: str) -> None:
    """And it is nothing to subscribe with; but one context may serve both sides."""
    with pytest.raises(InvalidExtensionError, match="messageId"):
        m.subscribe(channel, message_id="own")
    both = m.context_builder().channel(channel).extension_entry("messageId", "own")
    with m.subscription.subscribe(both.build_context()) as stream:
        m.publisher.publish(both.content(b"x").build_message())
        assert told(stream) == "own"
    for qos in ("0", "1", "2"):
        try:
            stream = m.subscribe(channel, qos=qos)
        except UnsupportedFeatureError:
            assert qos == "2"
            continue
        with stream:
            for given in ("1", AWKWARD, f"level-{qos}"):
                context = m.context_builder().channel(channel).extension_entry("messageId", given)
                m.publisher.publish(context.extension_entry("qos", qos).content(b"x").build_message())
                assert told(stream) == given
                m.publish(channel, b"x", qos=qos, message_id=given)
                assert told(stream) == given


@feature(Features.EXTENSION_MESSAGE_ID)
def test_each_message_has_its_own_and_two_may_have_the_same_one(backend: Backend, m: Messaging, channel: str) -> None:
    mandatory = {"mandatory": True} if Features.EXTENSION_MANDATORY in m.features else {}
    with m.subscribe(channel, **backend.reliable) as stream:
        wanted = [*(f"id-{number}" for number in range(300)), *["same"] * 50]
        for number, given in enumerate(wanted):
            m.publish(channel, b"%d" % number, message_id=given, **backend.reliable, **mandatory)
        m.publish(channel, b"last", **backend.reliable).result(PATIENCE)
        arrived = [stream.receive(PATIENCE) for _ in wanted]
        assert [message.context.extensions["messageId"] for message in arrived] == wanted
        assert [message.payload for message in arrived] == [b"%d" % number for number in range(350)]
        assert told(stream) not in wanted  # that of another message sticks to none


@feature(Features.EXTENSION_MESSAGE_ID)
def test_beside_everything_else_a_message_can_carry(backend: Backend, m: Messaging, channel: str) -> None:
    with m.subscribe(channel, **backend.reliable) as stream:
        m.publish(channel, b"x", message_id="own", **(given := backend.full_context(m)))
        context = stream.receive(PATIENCE).context
        assert context.extensions["messageId"] == "own"
        assert context.extensions.get("headers") == given.get("headers")
        assert (context.content_type, context.correlation_id) == ("x/y", "4711")


@feature(Features.EXTENSION_MESSAGE_ID, Features.EXTENSION_MANDATORY)
def test_of_two_with_the_same_one_the_one_that_nobody_gets_fails(backend: Backend, m: Messaging) -> None:
    somewhere, nowhere = backend.channel(), backend.channel("unheard")
    with m.subscribe(somewhere, **backend.reliable) as stream:
        channels = [somewhere, nowhere, nowhere, somewhere] * 5
        promises = [m.publish(each, b"x", message_id="same", mandatory=True) for each in channels]
        errors = [promise.exception(PATIENCE) for promise in promises]
        assert [type(error) for error in errors] == [type(None), UnroutableError, UnroutableError, type(None)] * 5
        assert [told(stream) for _ in range(10)] == ["same"] * 10


@feature(Features.EXTENSION_MESSAGE_ID, Features.REPLY_TO)
def test_a_request_has_one_and_its_reply_another(m: Messaging, channel: str) -> None:
    seen: list[Any] = []

    @m.reply(channel)
    def answer(request: Message) -> Message:
        seen.append(request.context.extensions.get("messageId"))
        return request if request.payload == b"echo" else Message(b"answer", messaging.MessageContext())

    for payload in (b"plain", b"echo"):
        reply = m.request(channel, payload, message_id="own", timeout=PATIENCE).result(PATIENCE)
        assert reply.context.extensions.get("messageId") != "own"
    assert seen == ["own"] * 2


# --- passing on


@feature(Features.EXTENSION_MESSAGE_ID)
def test_a_message_that_is_passed_on_keeps_it(backend: Backend, m: Messaging) -> None:
    first, second = backend.channel(), backend.channel("second")
    with m.subscribe(first, **backend.reliable) as stream, m.subscribe(second, **backend.reliable) as passed_on:
        m.publish(first, b"x", message_id="own", **backend.reliable)
        message = stream.receive(PATIENCE)
        m.publisher.publish(message, second)
        m.publisher.publish(message, MessageContextBuilder().with_context(message.context).channel("x").build_context())
        assert told(passed_on) == "own"
        assert told(stream) == "own"  # the context has a channel, which counts
        copied = MessageContextBuilder().channel(second).extensions(message.context.extensions)
        m.publisher.publish(copied.content(b"x").build_message())
        assert told(passed_on) == "own"


def test_from_elsewhere_it_is_kept_where_it_can_travel_or_dropped(backend: Backend, m: Messaging, channel: str) -> None:
    message = received("own")
    elsewhere = MessageContextBuilder().with_context(message.context)
    with m.subscribe(channel, **backend.reliable) as stream:
        m.publisher.publish(message, channel).result(PATIENCE)
        expected = "own" if Features.EXTENSION_MESSAGE_ID in m.features else None
        assert told(stream) == expected
        # a context without a channel takes the message's; a new one takes over the values it was given
        context = messaging.MessageContext(channel)
        m.publisher.publish(Message(b"x", context), elsewhere.build_context())
        m.publisher.publish(Message(b"x", elsewhere.build_context()), channel).result(PATIENCE)
        assert told(stream) == expected

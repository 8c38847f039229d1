"""Message and MessageContext: immutable, shareable, discreet."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import BaseModel

import messaging
from messaging import AcknowledgeMessageContext, AcknowledgeType, Message, MessageContext
from messaging.errors import DecodeError, UnknownContentEncodingError, UnknownContentTypeError
from messaging.model import Incoming
from messaging.testing.tables import table
from tests.threads import in_threads


class Reading(BaseModel):
    celsius: float


def json(payload: bytes, model: Any = None) -> Message:
    return Message(payload, MessageContext("a", content_type="application/json"), model)


def test_a_message_cannot_be_changed() -> None:
    message = json(b"1")
    for name in ("payload", "context", "value", "anything"):
        with pytest.raises(AttributeError):
            setattr(message, name, b"2")
    with pytest.raises(AttributeError):
        message.context.channel = "b"  # type: ignore[misc]
    assert not hasattr(message, "__dict__")
    assert not hasattr(message.context, "__dict__")


def test_equality_is_by_value() -> None:
    extensions = MappingProxyType({"headers": {"a": "b"}})
    assert MessageContext("a", extensions=extensions) == MessageContext("a", extensions={"headers": {"a": "b"}})
    assert MessageContext("a") != MessageContext("b")
    assert MessageContext("a") != "a"
    assert MessageContext("a", "key") != MessageContext("a")
    assert json(b"1") == json(b"1")
    assert json(b"1") != json(b"2")
    assert json(b"1") != b"1"
    assert Incoming(b"1", "a") == MessageContext("a")
    for each in (MessageContext(), json(b"1")):
        with pytest.raises(TypeError):
            hash(each)


def test_repr_shows_neither_payload_nor_values_of_extensions() -> None:
    context = MessageContext(
        "a",
        "key",
        "text/plain",
        "gzip",
        "id",
        "r",
        MappingProxyType({"headers": {"authorization": "hunter2"}, "qos": "1"}),
    )
    shown = repr(Message(b"hunter2", context))
    assert "hunter2" not in shown
    for expected in ("7 bytes", "'a'", "'key'", "'text/plain'", "'gzip'", "'id'", "'r'", "extensions=<headers, qos>"):
        assert expected in shown
    assert repr(MessageContext()) == "MessageContext()"


def test_value_is_decoded_by_the_content_type() -> None:
    assert json(b'{"x": [1]}').value() == {"x": [1]}
    assert Message("é".encode(), MessageContext(content_type="text/plain")).value() == "é"
    assert Message(b"\x00", MessageContext(content_type="application/octet-stream")).value() == b"\x00"


def test_value_is_validated_by_the_model_asked_for_or_that_of_the_stream() -> None:
    plain = json(b'{"celsius": 20}')
    assert plain.value(Reading) == Reading(celsius=20)
    assert plain.value() == {"celsius": 20}
    with_model = json(b'{"celsius": 20}', Reading)
    assert with_model.value() == Reading(celsius=20)
    assert with_model.value(dict[str, int]) == {"celsius": 20}


def test_value_is_made_once_per_model() -> None:
    message = json(b'{"celsius": 20}', Reading)
    assert message.value() is message.value()
    assert message.value(Reading) is message.value()


@table(
    "message, error",
    [
        (json(b"{"), DecodeError),
        (json(b'{"celsius": "warm"}', Reading), DecodeError),
        (Message(b"1", MessageContext(content_type="application/x-unknown")), UnknownContentTypeError),
        (Message(b"1", MessageContext(content_type="///")), UnknownContentTypeError),
        (
            Message(b"1", MessageContext(content_type="text/plain", content_encoding="shrink")),
            UnknownContentEncodingError,
        ),
        (Message(b"1", MessageContext(content_type="text/plain", content_encoding="gzip")), DecodeError),
    ],
)
def test_a_payload_that_does_not_decode_raises_a_typed_error_and_is_kept(
    message: Message, error: type[Exception]
) -> None:
    payload = message.payload
    for _ in range(2):
        with pytest.raises(error):
            message.value()
    assert message.payload is payload


def test_many_threads_may_ask_for_the_value_at_once() -> None:
    message = json(b'{"celsius": 20}', Reading)
    answers: list[object] = []
    in_threads(8, lambda _: answers.append(message.value()))
    assert answers == [Reading(celsius=20)] * 8


def test_an_incoming_message_is_its_own_context() -> None:
    incoming = Incoming(b"1", "a", "key", "text/plain", "gzip", "id", "r", MappingProxyType({"qos": "1"}), "token", 2)
    assert isinstance(incoming, AcknowledgeMessageContext)
    assert incoming.channel == "a"
    assert incoming.extensions == {"qos": "1"}
    assert (incoming.payload, incoming.token, incoming.delivery_count) == (b"1", "token", 2)
    assert "token" not in repr(incoming)
    assert Incoming(b"", "a").extensions == {}


# --- copies for other processes


COPIES: list[Callable[[Message], Message]] = [
    lambda message: pickle.loads(pickle.dumps(message)),  # its own
    copy.deepcopy,
]


@table("made", COPIES)
def test_a_received_message_is_pickled_and_copied_without_its_handler(made: Callable[[Message], Message]) -> None:
    with messaging.connect("memory://copies") as m:
        stream = m.subscribe("a", Reading, acknowledge="manual", qos=1)
        with stream:
            m.publish("a", {"celsius": 1}, headers={"k": "v"}, correlation_id="c").result(10)
            message = stream.receive(10)
            copied = made(message)
            assert copied == message
            assert copied.value() == Reading(celsius=1)
            context = copied.context
            assert isinstance(context, AcknowledgeMessageContext)
            assert context.acknowledge_state is AcknowledgeType.UNSUPPORTED
            assert context.acknowledge_handler.acknowledge() is False
            assert copied.acknowledge() is copied.reject() is False
            with pytest.raises(TypeError):
                context.extensions["headers"]["k"] = "w"
            assert message.acknowledge()
            settled = made(message).context
            assert isinstance(settled, AcknowledgeMessageContext)
            assert settled.acknowledge_state is AcknowledgeType.ACKNOWLEDGED


@table("made", COPIES)
def test_a_message_that_was_built_is_pickled_and_copied(made: Callable[[Message], Message]) -> None:
    builder = messaging.MessageContextBuilder().channel("a", "b").content({"x": [1]}).reply_to("r")
    message = builder.extension_entry("headers", {"k": ("v", "w")}).build_message()
    copied = made(message)
    assert copied == message
    assert type(copied.context) is type(message.context)
    with messaging.connect("memory://copies") as m, m.subscribe("a") as stream:
        m.publish("a", b"x", content_type="text/plain").result(10)
        passed_on = made(stream.receive(10))
        m.publisher.publish(passed_on).result(10)
        assert stream.receive(10).payload == b"x"


def test_a_message_id_of_none_is_unset() -> None:
    with messaging.connect("memory://ids") as m, m.subscribe("a") as stream:
        m.publish("a", b"1", message_id=None, correlation_id=None, time_to_live=None, headers=None).result(10)
        made = stream.receive(10).context.extensions.get("messageId")
        assert made is None or isinstance(made, str)


def test_messages_are_acknowledged_later_with_acknowledge_manual() -> None:
    with messaging.connect("memory://manual") as m, m.subscribe("a", acknowledge="manual", qos=1) as stream:
        for payload in (b"1", b"2"):
            m.publish("a", payload, qos=1).result(10)
        first, second = stream.receive(10), stream.receive(10)
        assert stream.counters.acknowledged == 0
        assert second.acknowledge()
        assert first.reject()
        assert stream.receive(10).payload == b"1"
        with pytest.raises(messaging.ArgumentError, match="acknowledge"):
            m.subscribe("b", acknowledge="later")  # type: ignore[arg-type]
        context = m.acknowledge_context_builder().post_acknowledge(print).message_context_builder()
        with pytest.raises(messaging.ArgumentError, match="manual"):
            m.subscription.subscribe(context.channel("c").build_context(), acknowledge="manual")


def test_a_message_has_the_values_of_its_context_that_handlers_read_most() -> None:
    context = MessageContext(
        "a/b", reply_to_channel="r", extensions=MappingProxyType({"headers": {"k": "v"}, "messageId": "1"})
    )
    message = Message(b"", context)
    assert (message.channel, message.headers, message.message_id, message.reply_to) == ("a/b", {"k": "v"}, "1", "r")
    bare = Message(b"", MessageContext())
    assert (bare.channel, dict(bare.headers), bare.message_id, bare.reply_to) == (None, {}, None, None)

"""The setting ``default_content_type``: what received messages without a content type hold."""

from __future__ import annotations

import copy
import pickle
import queue
from typing import Any

import pytest
from pydantic import BaseModel

import messaging
from messaging import Message, MessageContext
from messaging.codecs import encode
from messaging.errors import DecodeError, InvalidOptionError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE

PAYLOAD = b'{"celsius": 21.5}'


class Reading(BaseModel):
    celsius: float


def received(payload: bytes, url: str = "memory://default-type", **settings: Any) -> Message[Any]:
    """A message whose sender named a content type only if it is in ``settings``."""
    content_type = settings.pop("content_type", None)
    with messaging.connect(url, **settings) as m, m.subscribe("a") as stream:
        stream.ready.result(PATIENCE)
        m.publish("a", payload, **({} if content_type is None else {"content_type": content_type})).result(PATIENCE)
        return stream.receive(PATIENCE)


def test_without_the_setting_the_wanted_type_decides() -> None:
    message = received(PAYLOAD)
    assert message.context.content_type is None
    assert message.value() == message.value(bytes) == message.payload == PAYLOAD
    assert message.value(str) == PAYLOAD.decode()
    assert message.value(dict) == {"celsius": 21.5}
    assert message.value(Reading) == Reading(celsius=21.5)


@table("way", ["keyword", "url", "environment"])
def test_value_is_parsed_as_the_default_content_type(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, settings = "memory://default-type", {}
    if way == "environment":
        monkeypatch.setenv("MESSAGING_DEFAULT_CONTENT_TYPE", "application/json")
    elif way == "url":
        url += "?default_content_type=application/json"
    else:
        settings = {"default_content_type": "application/json"}
    message = received(PAYLOAD, url, **settings)
    assert message.value() == {"celsius": 21.5}
    assert message.value(Reading) == Reading(celsius=21.5)
    assert message.payload == message.value(bytes) == PAYLOAD
    assert message.context.content_type is None


def test_a_content_type_that_a_message_has_wins() -> None:
    message = received(b"21.5", default_content_type="application/json", content_type="text/plain")
    assert message.value() == "21.5"
    assert received(b"21.5", default_content_type="application/json").value() == 21.5


def test_a_default_content_type_counts_with_a_model_too() -> None:
    payload, _ = encode({"celsius": 21.5}, "application/cbor")
    message = received(payload, default_content_type="application/cbor")
    assert message.value() == {"celsius": 21.5}
    assert message.value(Reading) == Reading(celsius=21.5)
    with pytest.raises(DecodeError):
        received(PAYLOAD, default_content_type="application/cbor").value()


def test_a_copy_of_a_message_keeps_its_default_content_type() -> None:
    message = received(PAYLOAD, default_content_type="application/json")
    for again in (pickle.loads(pickle.dumps(message)), copy.deepcopy(message)):
        assert again.value() == {"celsius": 21.5}


def test_handlers_and_replies_have_the_default_content_type() -> None:
    seen: queue.Queue[Any] = queue.Queue()
    with messaging.connect("memory://default-type", default_content_type="application/json") as m:
        with m.on("a", lambda message: seen.put(message.value())) as handling:
            handling.ready.result(PATIENCE)
            m.publish("a", PAYLOAD).result(PATIENCE)
            assert seen.get(timeout=PATIENCE) == {"celsius": 21.5}

        @m.reply("question")
        def answer(request: Message[Any]) -> Message[Any]:
            seen.put(request.value())
            return Message(b"[1, 2]", MessageContext())

        m.whiteboard.ready().result(PATIENCE)
        assert m.request("question", PAYLOAD, timeout=PATIENCE).result(PATIENCE).value() == [1, 2]
        assert seen.get(timeout=PATIENCE) == {"celsius": 21.5}


@table("content_type", ["json", "application/unheard-of", "", "a/b; c"])
def test_a_default_content_type_that_nothing_reads_is_refused_when_connecting(content_type: str) -> None:
    with pytest.raises(InvalidOptionError, match="default_content_type"):
        messaging.connect("memory://default-type", default_content_type=content_type)


def test_messages_of_a_handlers_model_have_the_default_content_type() -> None:
    payload, _ = encode({"celsius": 21.5}, "application/cbor")
    seen: queue.Queue[Message[Reading]] = queue.Queue()
    with messaging.connect("memory://default-type", default_content_type="application/cbor") as m:

        def read(message: Message[Reading]) -> None:
            seen.put(message)

        with m.on("a", read) as handling:
            handling.ready.result(PATIENCE)
            m.publish("a", payload).result(PATIENCE)
            message = seen.get(timeout=PATIENCE)
    assert message.value() == Reading(celsius=21.5)
    assert message.value(dict) == {"celsius": 21.5}

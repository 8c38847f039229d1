"""Objects instead of bytes: codecs, models, and payloads that do not fit."""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import BaseModel

from messaging import AcknowledgeType, ArgumentError, Features, Message, MessageContext, Messaging, cloudevents
from messaging.errors import DeadlineError, DecodeError, InvalidHeaderError, UnknownContentTypeError
from messaging.model import as_text
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import ack_state, feature, publish, receive
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, observed


class Reading(BaseModel):
    sensor: str
    celsius: float


@dataclasses.dataclass
class Point:
    x: int
    y: int


GOOD = b'{"sensor": "a", "celsius": 21.5}'
BAD = b'{"sensor": "a", "celsius": "warm"}'


@pytest.mark.envelope
@table(
    ("content", "model"),
    [
        (Reading(sensor="ü", celsius=-3.5), Reading),
        (Point(1, 2), Point),
        ({"a": [1, 2.5, None, True, "ü"]}, dict[str, Any]),
        ([1, 2, 3], list[int]),
        ("text ü", str),
        (17, int),
        (b"\xff\0", bytes),
    ],
    ids=["model", "dataclass", "dict", "list", "str", "int", "bytes"],
)
def test_objects_go_round(backend: Backend, m: Messaging, content: Any, model: Any) -> None:
    """By the type that is wanted, with or without a content type on the way."""
    channel = backend.channel()
    with m.subscribe(channel, model) as stream:
        m.publish(channel, content).result(PATIENCE)
        message = stream.receive(PATIENCE)
        value = message.value()
        assert value == content
        assert type(value) is type(content)
        assert message.value(model) == content


@pytest.mark.envelope
@table(
    "value",
    ["text", 5, -(2**40), 0.5, True, None, b"\xff", Decimal("1.25"), datetime(2026, 11, 22, tzinfo=UTC), ("a", "b"),
     (1, ("a", None)), MappingProxyType({"a": MappingProxyType({"b": 1})})],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@feature(Features.EXTENSION_HEADERS)
def test_a_header_value_arrives_with_its_type_or_is_refused(backend: Backend, m: Messaging, value: Any) -> None:
    channel = backend.channel()
    with m.subscribe(channel, **backend.reliable) as stream:
        try:
            publish(m, channel, [b"1"], headers={"h": value, "text": "t"}, **backend.reliable)
        except InvalidHeaderError:
            assert not isinstance(value, str)
            with pytest.raises(InvalidHeaderError, match="make it a str"):
                m.publish(channel, b"1", headers={"h": value})
            publish(m, channel, [b"1"], headers={"h": as_text(value)}, **backend.reliable)
            assert stream.receive(PATIENCE).context.extensions["headers"] == {"h": as_text(value)}
        else:
            told = stream.receive(PATIENCE).context.extensions["headers"]
            assert told == {"h": value, "text": "t"}
            assert type(told["h"]) is type(value)


@pytest.mark.envelope
@feature(Features.MESSAGE_PROPERTIES)
@table(
    "given, content, payload, told",
    [
        ("application/json", {"a": 1}, b'{"a":1}', "application/json"),
        ("application/vnd.own+json", {"a": 1}, b'{"a":1}', "application/vnd.own+json"),
        ("text/plain", "ü", "ü".encode(), "text/plain"),
        ("text/plain; charset=iso-8859-1", "ü", b"\xfc", "text/plain; charset=iso-8859-1"),
        ("application/octet-stream", b"\xff", b"\xff", "application/octet-stream"),
        ("x-own/format", b"\xff", b"\xff", "x-own/format"),
        (None, {"a": 1}, b'{"a":1}', "application/json"),
        (None, "a", b"a", "text/plain"),
        (None, b"a", b"a", ""),
    ],
)
def test_a_content_type_names_its_codec(
    backend: Backend, m: Messaging, given: str | None, content: Any, payload: bytes, told: str
) -> None:
    """MSG220: it travels, and the consumer needs no other information to decode. By default the content sets it."""
    channel = backend.channel()
    with m.subscribe(channel) as stream:
        m.publish(channel, content, content_type=given).result(PATIENCE)
        message = stream.receive(PATIENCE)
    assert message.payload == payload
    found = message.context.content_type or ""
    assert (found if given else found.partition(";")[0]) == told
    if given == "x-own/format":
        with pytest.raises(UnknownContentTypeError):
            message.value()
    else:
        assert message.value() == content


@pytest.mark.envelope
@feature(Features.MESSAGE_PROPERTIES)
def test_the_content_encoding_travels(m: Messaging, channel: str) -> None:
    """MSG220: compressed on the way, whole at both ends."""
    content = {"text": "x" * 10_000}
    with m.subscribe(channel) as stream:
        m.publish(channel, content, content_type="application/json", content_encoding="gzip").result(PATIENCE)
        message = stream.receive(PATIENCE)
    assert len(message.payload) < 1_000
    assert message.context.content_encoding == "gzip"
    assert message.value() == content


# --- what does not fit the model


def is_idle(stream: Any) -> bool:
    """Have a stream look at what has arrived."""
    with pytest.raises(DeadlineError):
        stream.receive(0.01)
    return True


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_MAX_DELIVERIES)
@table("consumed", ["observer", "iterator", "manual"])
def test_invalid_content_ends_no_stream_by_default(backend: Backend, m: Messaging, consumed: str) -> None:
    """Without a dead-letter channel it is rejected: counted, and discarded in the end."""
    channel = backend.channel()
    acknowledge = {"acknowledge": "manual"} if consumed == "manual" else {}
    with m.subscribe(channel, Reading, max_deliveries=2, **acknowledge, **backend.reliable) as stream:
        seen = observed(stream) if consumed == "observer" else None
        publish(m, channel, [GOOD, BAD, GOOD], **backend.reliable)
        if seen is not None:
            assert seen.wait_payloads(2) == [GOOD, GOOD]
            assert seen.error is None
        else:
            assert [stream.receive(PATIENCE).payload for _ in range(2)] == [GOOD, GOOD]
            eventually(lambda: is_idle(stream) and stream.counters.invalid >= 2, "looked at again")
        eventually(lambda: stream.counters.invalid == stream.counters.rejected == 2, "delivered twice, and rejected")


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_DEAD_LETTER_CHANNEL)
@table("consumed", ["default", "raise", "observer", "loop", "events"])
def test_a_message_that_cannot_be_read_is_dead_lettered_before_it_ends_another_consumer(
    backend: Backend, m: Messaging, consumed: str
) -> None:
    """At once, even with ``maxDeliveries``: the next delivery would fit no better."""
    channel, dead = backend.channel(), backend.channel()
    options = {**backend.reliable, "max_deliveries": 5, "dead_letter_channel": dead}

    def look(message: Message) -> None:
        message.value(Reading)

    with m.subscribe(dead, **backend.reliable) as letters:
        typed = {"default": {"model": Reading}, "raise": {"model": Reading, "on_invalid": "raise"}}.get(consumed, {})
        stream = m.subscribe(channel, **typed, **options)
        ended = observed(stream, look) if consumed == "observer" else None
        with contextlib.suppress(DecodeError), stream:
            publish(m, channel, [BAD, GOOD], **backend.reliable)
            if ended is not None:
                assert isinstance(ended.wait_error(), DecodeError)
            elif consumed == "loop":
                look(stream.receive(PATIENCE))
            elif consumed == "events":
                events = cloudevents.events(stream)
                eventually(lambda: is_idle(events) and events.skipped == 2, "both are no events")
            else:
                assert stream.receive(PATIENCE).payload == GOOD
        letter = letters.receive(PATIENCE)
        assert letter.payload == BAD
        if Features.EXTENSION_HEADERS in m.features:
            assert letter.headers["x-dead-letter-reason"] == "invalid"
        assert stream.counters.invalid >= 1


def test_invalid_content_ends_the_stream_if_asked_for(m: Messaging, channel: str) -> None:
    """``on_invalid="raise"``: the stream fails, others do not notice."""
    typed, plain = observed(m.subscribe(channel, Reading, on_invalid="raise")), observed(m.subscribe(channel))
    publish(m, channel, [GOOD, BAD, GOOD])
    assert isinstance(typed.wait_error(), DecodeError)
    assert typed.payloads == [GOOD]
    assert plain.wait_payloads(3) == [GOOD, BAD, GOOD]
    eventually(lambda: len(m.runtime.get_runtime_dto().subscriptions) == 1, "unsubscribed")
    with m.subscribe(channel, Reading, on_invalid="raise") as stream:
        publish(m, channel, [BAD])
        with pytest.raises(DecodeError):
            stream.receive(PATIENCE)


@feature(Features.ACKNOWLEDGE)
def test_invalid_content_can_be_skipped(backend: Backend, m: Messaging, channel: str) -> None:
    """``on_invalid="skip"``: acknowledged, counted, not emitted."""
    with m.subscribe(channel, Reading, on_invalid="skip", **backend.reliable) as stream:
        publish(m, channel, [BAD, GOOD, BAD, GOOD], **backend.reliable)
        for _ in range(2):
            assert stream.receive(PATIENCE).value() == Reading(sensor="a", celsius=21.5)
        publish(m, channel, [BAD, GOOD], **backend.reliable)
        assert receive(stream, 1) == [GOOD]
        assert stream.counters.invalid == 3
        # nothing is left unsettled
        publish(m, channel, [GOOD], **backend.reliable)
        assert ack_state(stream.receive(PATIENCE)) is AcknowledgeType.RECEIVED
        eventually(lambda: stream.counters.acknowledged == 6, "the others are acknowledged")


@pytest.mark.envelope
@feature(Features.EXTENSION_DEAD_LETTER_CHANNEL)
def test_invalid_content_can_become_a_dead_letter(backend: Backend, m: Messaging) -> None:
    """``on_invalid="dead_letter"``: the original bytes, with the reason."""
    channel, dead = backend.channel(), backend.channel("dead")
    with (
        m.subscribe(dead, **backend.reliable) as letters,
        m.subscribe(channel, Reading, on_invalid="dead_letter", dead_letter_channel=dead, **backend.reliable) as stream,
    ):
        publish(m, channel, [BAD, GOOD], **backend.reliable)
        assert receive(stream, 1) == [GOOD]
        letter = letters.receive(PATIENCE)
        assert letter.payload == BAD
        if Features.EXTENSION_HEADERS in m.features:
            headers = letter.context.extensions["headers"]
            assert headers["x-dead-letter-reason"] == "invalid"
            assert headers["x-dead-letter-channel"] == channel
        eventually(lambda: stream.counters.dead_lettered == 1, "counted")
    with pytest.raises(ArgumentError, match="on_invalid"):
        m.subscribe(backend.channel(), Reading, on_invalid="ignore")
    with pytest.raises(ArgumentError, match="deadLetterChannel"):
        m.subscribe(backend.channel(), Reading, on_invalid="dead_letter")


# --- empty is not absent


@pytest.mark.envelope
@table("outbox", ["memory", "disk"])
def test_empty_values_arrive_as_they_were_sent(backend: Backend, m: Messaging, tmp_path: Path, outbox: str) -> None:
    sender = m if outbox == "memory" else backend.connect(outbox_path=tmp_path / "outbox")
    channel = backend.channel()
    values: dict[str, Any] = {}
    for feature_, some in (
        (Features.MESSAGE_PROPERTIES, {"content_type": "", "content_encoding": "", "correlation_id": ""}),
        (Features.EXTENSION_HEADERS, {"headers": {"k": ""}}),
        (Features.ROUTING_KEY, {"channel_extension": ""}),
        (Features.EXTENSION_PRIORITY, {"priority": 0}),
        ("type", {"type": ""}),
        ("appId", {"app_id": ""}),
    ):
        values |= some if feature_ in m.features else {}
    extension = {"channel_extension": ""} if "channel_extension" in values else {}
    with m.subscribe(channel, **backend.reliable, **extension) as stream:
        sender.publish(channel, b"", **backend.reliable, **values).result(PATIENCE)
        message = stream.receive(PATIENCE)
    context = message.context
    found = {
        "content_type": context.content_type, "content_encoding": context.content_encoding,
        "correlation_id": context.correlation_id, "channel_extension": context.channel_extension,
        "headers": dict(message.headers), "priority": context.extensions.get("priority"),
        "type": context.extensions.get("type"), "app_id": context.extensions.get("appId"),
    }  # fmt: skip
    assert message.payload == b""
    assert {key: found[key] for key in values} == values


@feature(Features.REPLY_TO, Features.MESSAGE_PROPERTIES)
@table("form", ["one", "many"])
def test_an_empty_correlation_id_is_sent_and_resolves_the_request(backend: Backend, m: Messaging, form: str) -> None:
    responder = backend.connect()
    channel, replies = backend.channel(), backend.channel()
    seen: list[Any] = []

    def answer(request: Message) -> Message:
        seen.append(request.context.correlation_id)
        return Message(b"", MessageContext(correlation_id=""))

    with responder.reply(channel, answer):
        if form == "one":
            reply = m.request(channel, b"", reply_to=replies, correlation_id="").result(PATIENCE)
        else:
            with m.request_many(channel, b"", reply_to=replies, correlation_id="") as stream:
                reply = stream.receive(PATIENCE)
    assert seen == [""]
    assert (reply.payload, reply.context.correlation_id) == (b"", "")


@feature(Features.REPLY_TO, Features.MESSAGE_PROPERTIES)
def test_a_reply_keeps_an_empty_correlation_id_of_its_own(backend: Backend, m: Messaging) -> None:
    responder = backend.connect()
    channel, replies = backend.channel(), backend.channel()
    with (
        responder.reply(channel, lambda: Message(b"", MessageContext(correlation_id=""))),
        m.subscribe(replies, **backend.reliable) as stream,
    ):
        m.publish(channel, b"", reply_to=replies, correlation_id="1", **backend.reliable).result(PATIENCE)
        assert stream.receive(PATIENCE).context.correlation_id == ""

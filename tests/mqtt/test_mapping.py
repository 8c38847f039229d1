"""Contexts as MQTT carries them, there and back."""

from __future__ import annotations

import weakref
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import InvalidHeaderError, PayloadTooLargeError
from messaging.execution import clock
from messaging.model import MessageContext, PublishOptions
from messaging.testing.tables import table
from messaging_adapters.mqtt import mapping, packets
from messaging_adapters.mqtt.mapping import Decoded, Mqtt5Codec, PublishCodec
from tests.doubles.plans import plan_of
from tests.mqtt.test_packets import body

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
NAME = TEXT.filter(lambda text: text and text not in (mapping.CONTENT_ENCODING, mapping.MESSAGE_ID))


class Out:
    """As much of an ``Outgoing`` as a codec reads."""

    def __init__(self, payload: bytes, context: MessageContext, options: PublishOptions) -> None:
        self.message_id = options.message_id or "id-1"
        self.payload = payload
        self.plan = plan_of(context, options)
        self.correlation_id = context.correlation_id


def there_and_back(codec: PublishCodec, v5: bool, out: Any) -> Decoded | None:
    qos = int(out.plan.options.qos)
    frame = codec.frame(out, out.payload, qos, 7)
    publish = packets.parse_publish(frame[0], body(frame), v5)
    assert (publish.topic, publish.qos, publish.id) == (out.plan.channel, qos, 7 if qos else 0)
    return codec.decode(publish)


@st.composite
def outgoing(draw: st.DrawFn) -> Any:
    context = MessageContext(
        draw(TEXT.filter(lambda text: text and not set(text) & set("+#"))),
        content_type=draw(st.none() | TEXT),
        content_encoding=draw(st.none() | TEXT),
        correlation_id=draw(st.none() | TEXT),
        reply_to_channel=draw(st.none() | TEXT),
    )
    several = st.lists(TEXT, min_size=2, max_size=3).map(tuple)
    headers = MappingProxyType(draw(st.dictionaries(NAME, TEXT | several, max_size=3)))
    ttl = draw(st.none() | st.floats(1, 10**12))
    own = draw(st.none() | st.just("own"))
    options = PublishOptions(qos=draw(st.sampled_from("012")), headers=headers, time_to_live=ttl, message_id=own)
    return Out(draw(st.binary(max_size=200)), context, options)


@given(outgoing(), st.booleans())
def test_everything_arrives_as_it_was_sent(out: Any, v5: bool) -> None:
    codec: PublishCodec = Mqtt5Codec() if v5 else PublishCodec(enveloped=True)
    decoded = there_and_back(codec, v5, out)
    assert decoded is not None
    payload, content_type, content_encoding, correlation_id, reply_to, extensions = decoded
    assert payload == out.payload
    assert (content_type, content_encoding) == (out.plan.content_type, out.plan.content_encoding)
    assert (correlation_id, reply_to) == (out.plan.correlation_id, out.plan.reply_to_channel)
    assert extensions.get("headers", {}) == out.plan.options.headers
    assert ("timeToLive" in extensions) is (out.plan.options.time_to_live is not None)
    assert extensions["qos"] == out.plan.options.qos
    assert set(extensions) <= {"qos", "headers", "timeToLive", "messageId"}
    if out.plan.options.message_id is not None:
        assert extensions["messageId"] == out.plan.options.message_id
    if v5:
        made = "id-1" if out.plan.options.qos != "0" else None
        assert extensions.get("messageId") == (out.plan.options.message_id or made)
        assert extensions.get("timeToLive", 1) >= min(out.plan.options.time_to_live or 1, 2**32 - 1)


@given(st.binary(max_size=20))
def test_foreign_correlation_data_survives_the_way_back(data: bytes) -> None:
    text = mapping.correlation_text(data)
    text.encode()  # no surrogates
    if not text.startswith("hex:"):
        assert text.encode() == data
    assert mapping.correlation_bytes(text) == data or data.decode().startswith("hex:")


def test_correlation_data_that_is_not_text_is_shown_in_hex() -> None:
    assert mapping.correlation_text(b"\xff\x00") == "hex:ff00"
    assert mapping.correlation_bytes("hex:ff00") == b"\xff\x00"
    assert mapping.correlation_bytes("hex:6162") == b"hex:6162"  # stands for text, so it is one itself
    assert mapping.correlation_bytes("hex:FF00") == b"hex:FF00"
    assert mapping.correlation_bytes("hex:") == b"hex:"


@table("v5", [True, False], ids=["5", "envelope"])
@table("value, received", [(("x", "y", "x"), ("x", "y", "x")), (("x",), "x")], ids=["several", "one"])
def test_a_sequence_of_texts_travels_as_several_values_of_one_name(v5: bool, value: Any, received: Any) -> None:
    codec: PublishCodec = Mqtt5Codec() if v5 else PublishCodec(enveloped=True)
    out: Any = Out(b"", MessageContext("t"), PublishOptions(qos="1", headers={"a": value, "b": "2"}))
    decoded = there_and_back(codec, v5, out)
    assert decoded is not None
    assert decoded[5]["headers"] == {"a": received, "b": "2"}


def test_a_reader_that_knows_no_repeated_headers_finds_the_last_value_in_an_envelope() -> None:
    out: Any = Out(b"", MessageContext("t"), PublishOptions(headers={"a": ("x", "y")}))
    frame = PublishCodec(enveloped=True).frame(out, b"", 0, 0)
    assert b'"headers":{"a":"y"}' in frame


def test_several_user_properties_of_one_name_keep_all_values() -> None:
    properties = packets.PacketProperties()
    properties.user = [("a", "1"), ("b", "2"), ("a", "3"), ("content-encoding", "gzip"), ("message-id", "m")]
    decoded = Mqtt5Codec().decode(packets.Publish("t", b"", 1, True, True, 1, properties))
    assert decoded is not None
    assert decoded[2] == "gzip"
    assert decoded[5] == {
        "qos": "1", "retain": True, "redelivered": True, "headers": {"a": ("1", "3"), "b": "2"}, "messageId": "m",
    }  # fmt: skip


def test_reserved_headers_are_refused() -> None:
    mapping.check_headers({"a": "b"})
    for name in ("content-encoding", "message-id"):
        with pytest.raises(InvalidHeaderError, match=name):
            mapping.check_headers({name: "b"})


def test_a_message_id_alone_makes_no_envelope() -> None:
    codec = PublishCodec(enveloped=True)
    out: Any = Out(b"plain", MessageContext("t"), PublishOptions(qos="1"))
    assert codec.frame(out, out.payload, 1, 1).endswith(b"\x00\x01tplain"[:3] + b"\x00\x01plain")


def test_a_message_id_of_the_application_makes_one() -> None:
    codec = PublishCodec(enveloped=True)
    out: Any = Out(b"plain", MessageContext("t"), PublishOptions(qos="0", message_id="own"))
    decoded = there_and_back(codec, False, out)
    assert decoded is not None
    assert (decoded[0], decoded[5]) == (b"plain", {"qos": "0", "messageId": "own"})


def test_an_expired_envelope_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = PublishCodec(enveloped=True)
    out: Any = Out(b"x", MessageContext("t"), PublishOptions(time_to_live=1.0))
    frame = codec.frame(out, out.payload, 0, 0)
    now = clock.wall()
    monkeypatch.setattr(clock, "wall", lambda: now + 2)
    assert codec.decode(packets.parse_publish(frame[0], body(frame), False)) is None


def test_a_plan_is_compiled_once_and_the_codec_keeps_nothing_of_it() -> None:
    codec = Mqtt5Codec()
    out: Any = Out(b"", MessageContext("t/1"), PublishOptions())
    forms = []
    for _ in range(2):
        frame = codec.frame(out, out.payload, 0, 0)
        assert packets.parse_publish(frame[0], body(frame), True).topic == "t/1"
        forms.append(out.plan.slot)
    assert forms[0] is forms[1] is not None
    gone = weakref.ref(forms.pop())
    del out, forms
    assert gone() is None


def test_a_packet_longer_than_the_protocol_allows_is_refused() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return packets.MAX_REMAINING

    out: Any = Out(Long(), MessageContext("t"), PublishOptions())
    with pytest.raises(PayloadTooLargeError):
        Mqtt5Codec().frame(out, out.payload, 0, 0)


def test_a_will_does_not_expire_in_an_envelope() -> None:
    """Its time would begin when it is registered."""
    out: Any = Out(b"w", MessageContext("t"), PublishOptions(headers={"h": "v"}, time_to_live=1.2))
    payload = PublishCodec(enveloped=True).will(out)[0]
    assert b'"h"' in payload
    assert b"expires" not in payload
    assert PublishCodec(enveloped=False).will(out)[0] == b"w"
    assert Mqtt5Codec().will(out)[1].expiry == 2

"""Recognising and reading events: modes, bindings, data, and input of strangers."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.cloudevents import CloudEvent, JsonFormat, from_message, is_cloud_event, to_message
from messaging.errors import ArgumentError, DecodeError, EncodeError, InvalidEventError, MessagingError
from messaging.model import Message, MessageContext
from messaging.model.message import maker
from messaging.testing.tables import table

NEEDED = {"specversion": "1.0", "id": "1", "source": "/plant", "type": "reading"}
JSON = "application/cloudevents+json"


def message(payload: bytes = b"", content_type: str | None = None, **headers: Any) -> Message:
    return Message(payload, MessageContext("a/b", content_type=content_type, extensions={"headers": headers}))


def structured(**members: Any) -> Message:
    return message(json.dumps({**NEEDED, **members}).encode(), JSON)


# --- recognising


@table(
    "received, is_event",
    [
        (structured(), True),
        (message(b"no json", "Application/CloudEvents+json; charset=utf-8"), True),
        (message(b"x", "application/cloudevents+avro"), True),
        (message(b"", **NEEDED), True),
        (message(b"", **{f"cloudEvents_{name}": each for name, each in NEEDED.items()}), True),
        (message(b"", **{f"cloudEvents:{name}": each for name, each in NEEDED.items()}), True),
        (message(b"", **{f"ce-{name}": each for name, each in NEEDED.items()}), True),
        (message(b"", id="1", source="/plant", type="reading"), False),
        (message(json.dumps(NEEDED).encode()), False),
        (message(json.dumps(NEEDED).encode(), "application/json"), False),
        (Message(b"", MessageContext("a")), False),
    ],
)
def test_an_event_is_recognised_by_content_type_or_headers(received: Message, is_event: bool) -> None:
    assert is_cloud_event(received) is is_event


@table(
    "payload, is_event",
    [(json.dumps(NEEDED).encode(), True), (b" \n" + json.dumps(NEEDED).encode(), True), (b"{}", False), (b"{", False),
     (b"[1]", False), (b"\xff", False), (b"", False)],
)  # fmt: skip
def test_an_event_of_mqtt_3_is_recognised_when_asked_for(payload: bytes, is_event: bool) -> None:
    assert is_cloud_event(message(payload), implied=True) is is_event
    assert not is_cloud_event(message(payload, "application/json"), implied=True)


def test_a_message_without_content_type_is_read_as_structured() -> None:
    assert from_message(message(json.dumps(NEEDED).encode())).get_attributes() == NEEDED


def test_the_default_content_type_of_an_instance_counts() -> None:
    received = maker(JSON)(json.dumps(NEEDED).encode(), MessageContext("a"), None)  # type: ignore[arg-type]
    assert is_cloud_event(received)
    assert from_message(received).get_attributes() == NEEDED


# --- data


@table(
    "content_type, payload, data",
    [
        ("application/json", b'{"a": 1}', {"a": 1}),
        ("application/vnd.a+json", b'"text"', "text"),
        ("text/json", b"[1]", [1]),
        ("application/json", b"null", None),
        ("application/json", b"", None),
        ("text/plain; charset=latin-1", b"\xe9", "é"),
        ("application/xml", b"<a/>", "<a/>"),
        ("image/svg+xml", b"<a/>", "<a/>"),
        ("image/png", b"\x89PNG", b"\x89PNG"),
        ("application/octet-stream", b"text", b"text"),
        (None, b'{"a": 1}', {"a": 1}),
        (None, b"text", "text"),
        (None, b"\xff", b"\xff"),
    ],
)
def test_data_is_read_by_its_content_type(content_type: str | None, payload: bytes, data: Any) -> None:
    assert from_message(message(payload, content_type, **NEEDED)).get_data() == data


@table(
    "content_type, data, payload, sent_as",
    [
        ("application/json", {"a": 1}, b'{"a":1}', "application/json"),
        (None, {"a": 1}, b'{"a":1}', "application/json"),
        (None, "text", b'"text"', "application/json"),
        (None, b"\xff", b"\xff", None),
        (None, None, b"", None),
        ("application/json", b'{"a": 1}', b'{"a": 1}', "application/json"),
        ("text/plain; charset=latin-1", "é", b"\xe9", "text/plain; charset=latin-1"),
        ("image/png", bytearray(b"\x89"), b"\x89", "image/png"),
    ],
)
def test_data_is_written_by_its_type(content_type: str | None, data: Any, payload: bytes, sent_as: str | None) -> None:
    sent = to_message(CloudEvent({**NEEDED, "datacontenttype": content_type}, data), "a")
    assert (sent.payload, sent.context.content_type) == (payload, sent_as)


@table("mode", ["binary", "structured"])
@table("content_type", ["text/plain", "image/png"])
def test_data_that_does_not_suit_its_content_type_is_refused(mode: Any, content_type: str) -> None:
    with pytest.raises(EncodeError, match=f"must be bytes or a str for datacontenttype '{content_type}', not dict"):
        to_message(CloudEvent({**NEEDED, "datacontenttype": content_type}, {"a": 1}), "a", mode)


@table("mode", ["binary", "structured"])
@table("data", [float("nan"), object()])
def test_data_that_is_no_json_is_refused(mode: Any, data: Any) -> None:
    with pytest.raises(EncodeError):
        to_message(CloudEvent(NEEDED, data), "a", mode)


def test_a_compressed_payload_is_read() -> None:
    context = MessageContext("a", content_type=JSON, content_encoding="gzip")
    assert from_message(Message(gzip.compress(json.dumps(NEEDED).encode()), context)).get_id() == "1"
    context = MessageContext("a", content_type="text/plain", content_encoding="gzip", extensions={"headers": NEEDED})
    assert from_message(Message(gzip.compress(b"text"), context)).get_data() == "text"


# --- headers of others


def test_headers_that_cannot_be_attributes_are_left_out_of_the_event() -> None:
    event = from_message(message(b"", **NEEDED, **{"X-Trace": "a", "retry_count": "1", "data": "b"}))
    assert event.get_attributes() == NEEDED


def test_headers_without_the_prefix_are_left_out_of_an_event_with_prefix() -> None:
    prefixed = {f"cloudEvents_{name}": each for name, each in NEEDED.items()}
    event = from_message(message(b"", **prefixed, other="a", traceparent="b", cloudEvents_sequence=5))
    assert event.get_attributes() == {**NEEDED, "sequence": 5}


def test_headers_of_the_application_are_sent_beside_those_of_the_event() -> None:
    event = CloudEvent(NEEDED)
    sent = to_message(event, "a", extensions={"qos": 1, "headers": {"shop": "north", "id": "1"}})
    assert sent.context.extensions["headers"]["shop"] == "north"
    assert sent.context.extensions["qos"] == 1
    with pytest.raises(ArgumentError, match="header 'id' is an attribute of the event already"):
        to_message(event, "a", extensions={"headers": {"id": "2"}})


@table("binding", ["mqtt", "amqp"])
def test_the_tracing_extension_lives_beside_the_header_of_trace_context(binding: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    event = CloudEvent({**NEEDED, "traceparent": trace, "tracestate": "a=1"})
    sent = to_message(event, "a", binding=binding)
    own = {**sent.context.extensions["headers"]}
    hop = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
    if binding == "mqtt":  # a tracer that adds a user property of the same name, after that of the event
        forwarded = {**own, "traceparent": (own["traceparent"], hop), "tracestate": ("a=1", "b=2")}
    else:
        forwarded = {**own, "traceparent": hop, "tracestate": "b=2"}
    found = from_message(message(b"", **forwarded))
    assert found.get_extension("traceparent") == trace
    assert found.get_extension("tracestate") == ("a=1,b=2" if binding == "mqtt" else "a=1")


# --- input of strangers


@table(
    "received, text",
    [
        (message(b"", "text/plain"), "neither content type 'application/cloudevents.json' nor the headers"),
        (message(b"x", "text/plain", id="1", type="a"), "nor the headers 'specversion', 'source'"),
        (message(b"x", "text/plain", **{"ce-id": "1"}), "nor the headers 'ce-specversion', 'ce-source', 'ce-type'"),
        (message(b"[]", "application/cloudevents-batch+json"), "a batch of events"),
        (message(b"", "application/cloudevents+avro"), "event format 'application/cloudevents.avro' is not supported"),
        (message(b"", JSON), "not JSON at index 0"),
        (message(b"\xff", JSON), "not UTF-8 at byte 0"),
        (message(b"[]", JSON), "must be an object, not an array"),
        (message(b"5"), "must be an object, not a number"),
        (message(b"[" * 100_000, JSON), "nested too deeply|not JSON"),
        (message(b'{"id":"1","id":"2"}', JSON), "member 'id' is there more than once"),
        (message(b'{"data":{"a":1,"b":2,"a":3}}', JSON), "member 'a' is there more than once"),
        (message(b'{"a": NaN}', JSON), "not JSON"),
        (message(b'{"a": 1e999}', JSON), "too large"),
        (message(b'{"a": ' + b"9" * 5000 + b"}", JSON), "too large"),
        (structured(id=None), "attribute 'id' is missing: a CloudEvent needs 'specversion', 'id', 'source', 'type'"),
        (structured(id=7), "attribute 'id': must be a str, not int"),
        (structured(specversion="0.3"), "attribute 'specversion': must be '1.0'"),
        (structured(ratio=0.5), "attribute 'ratio': must be a string, an integer or a boolean, not a fraction"),
        (structured(nested={"a": 1}), "attribute 'nested': must be a string, .* not an object"),
        (structured(sequence=2**40), "attribute 'sequence': must be an integer of 32 bits"),
        (structured(Upper="a"), "attribute name 'Upper'"),
        (structured(time=5), "attribute 'time': must be a time as in RFC 3339"),
        (structured(data=1, data_base64="AA=="), "'data' or 'data_base64', not both"),
        (structured(data_base64="!!"), "'data_base64' is not in base64"),
        (structured(data_base64=5), "'data_base64' must be a string in base64, not a number"),
        (structured(datacontenttype="text/plain", data={}), "'data' must be a string, as 'datacontenttype' is not"),
        (structured(**{f"x{n}": n for n in range(300)}), "at most 256 attributes"),
        (message(b"{", "application/json", **NEEDED), "application/json"),
        (message(b"\xff", "text/plain", **NEEDED), "not utf-8"),
        (message(b"", "nonsense", **NEEDED), "attribute 'datacontenttype': must be a media type"),
        (message(b"", **{**NEEDED, "id": ("1", "2")}), "attribute 'id': is there 2 times, with different values"),
        (message(b"", **NEEDED, nested={"a": 1}), "attribute 'nested': must be a str"),
        (message(b"", **{**NEEDED, "id": 5}), "attribute 'id': must be a str, not int"),
    ],
)  # fmt: skip
def test_what_is_no_event_is_named_in_a_typed_error(received: Message, text: str) -> None:
    with pytest.raises(DecodeError, match=text):
        from_message(received)


def test_an_attribute_that_is_there_twice_with_one_value_is_read() -> None:
    assert from_message(message(b"", **{**NEEDED, "id": ("1", "1")})).get_id() == "1"


def test_an_error_does_not_quote_values() -> None:
    for received in (structured(time="secret"), message(b"secret", JSON), structured(note="secret\n")):
        with pytest.raises(DecodeError) as caught:
            from_message(received)
        assert "secret" not in str(caught.value)


@given(st.binary(max_size=200), st.sampled_from([None, JSON, "application/json", "text/plain", "x"]),
       st.dictionaries(st.sampled_from([*NEEDED, "time", "extra", "cloudEvents_id"]),
                       st.one_of(st.text(max_size=20), st.integers(), st.none(), st.binary(max_size=5),
                                 st.tuples(st.text(max_size=3), st.text(max_size=3))), max_size=7))  # fmt: skip
def test_whatever_arrives_is_an_event_or_a_typed_error(
    payload: bytes, content_type: str | None, headers: dict[str, Any]
) -> None:
    received = message(payload, content_type, **headers)
    is_cloud_event(received, implied=True)
    try:
        event = from_message(received)
    except MessagingError:
        return
    assert from_message(to_message(event, "a")).get_id() == event.get_id()


@table("junk", [None, 5, b"", {}, object()])
def test_what_is_no_message_or_event_is_refused(junk: Any) -> None:
    for call in (from_message, is_cloud_event):
        with pytest.raises(ArgumentError, match="message must be a Message"):
            call(junk)
    with pytest.raises(InvalidEventError, match="event must be a CloudEvent"):
        to_message(junk, "a")


def test_an_unknown_mode_or_binding_is_refused() -> None:
    with pytest.raises(ArgumentError, match="mode must be one of 'binary', 'structured', not 'batch'"):
        to_message(CloudEvent(NEEDED), "a", "batch")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"binding must be one of .*, not 'kafka'"):
        to_message(CloudEvent(NEEDED), "a", binding="kafka")  # type: ignore[arg-type]


def test_the_format_serves_other_bindings_of_the_sdk() -> None:
    from cloudevents.core.bindings import http

    event = CloudEvent(NEEDED, {"a": 1})
    found = http.from_http(http.to_structured(event, JsonFormat()), JsonFormat())
    assert event == found

"""Events as other projects write them are read, and written back equal, in both modes and over every transport."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cloudevents.core.bindings import rabbitmq as sdk_rabbitmq
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent as SdkEvent

import messaging
from messaging import Messaging
from messaging.cloudevents import CloudEvent, events, from_message, publish, to_message
from messaging.model import Message, MessageContext
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.cloudevents.samples import BINARY, STRUCTURED

JSON = "application/cloudevents+json"


def message(payload: bytes, content_type: str | None = None, headers: dict[str, Any] | None = None) -> Message:
    return Message(payload, MessageContext("a/b", content_type=content_type, extensions={"headers": headers or {}}))


def structured(name: str) -> CloudEvent:
    return from_message(message(json.dumps(STRUCTURED[name]).encode(), f"{JSON}; charset=utf-8"))


def comparable(event: CloudEvent) -> tuple[dict[str, Any], Any]:
    """Attributes and data of an event that was sent in binary mode: values are text, and JSON is explicit."""
    attributes = {name: str(each) if type(each) is int else each for name, each in event.get_attributes().items()}
    data = event.get_data()
    if data is not None and not isinstance(data, bytes):
        attributes.setdefault("datacontenttype", "application/json")
    return attributes, data


@table("name", [*STRUCTURED])
def test_a_sample_in_structured_mode_is_read_and_written_back(name: str) -> None:
    event = structured(name)
    written = json.loads(to_message(event, "a/b", "structured").payload)
    expected = {key: each for key, each in STRUCTURED[name].items() if each is not None}
    if name == "sdk-csharp":
        expected["time"] = "2021-08-24T14:19:23.423456+02:00"  # a datetime has no tenths of microseconds
    assert written == expected


@table("binding", ["mqtt", "amqp", "amqp-colon", "rabbitmq"])
@table("name", [*STRUCTURED])
def test_a_sample_is_equal_after_binary_mode(name: str, binding: Any) -> None:
    event = structured(name)
    assert comparable(from_message(to_message(event, "a/b", binding=binding))) == comparable(event)


@table("name", [*BINARY])
def test_a_sample_in_binary_mode_is_read_and_written_back(name: str) -> None:
    headers, content_type, payload, same = BINARY[name]
    event = from_message(message(payload, content_type, headers))
    assert comparable(event) == comparable(structured(same))
    binding: Any = {"mqtt": "mqtt", "amqp-underscore": "amqp"}.get(name, "amqp-colon")
    written = to_message(event, "a/b", binding=binding)
    headers = {key: each for key, each in headers.items() if key != "datacontenttype"}
    assert written.context.extensions["headers"] == headers
    assert written.context.content_type == content_type
    assert json.loads(written.payload) == json.loads(payload)


@table("name", [*STRUCTURED])
def test_what_the_python_sdk_writes_for_rabbitmq_is_read(name: str) -> None:
    event = structured(name)
    if event.get_time() is None:
        event = CloudEvent({**event.get_attributes(), "source": "/plant"}, event.get_data())  # it makes a time up
    theirs = SdkEvent(dict(event.get_attributes()), event.get_data())
    for convert in (sdk_rabbitmq.to_binary, sdk_rabbitmq.to_structured):
        sent = convert(theirs, JSONFormat())
        if name == "json-string" and convert is sdk_rabbitmq.to_binary:
            continue  # it sends the string without quotes, which is no JSON
        found = from_message(message(sent.body, sent.content_type, sent.headers))
        assert {**comparable(found)[0], "datacontenttype": ""} == {**comparable(event)[0], "datacontenttype": ""}
        assert found.get_data() == event.get_data()


@table("name", ["json-object", "json-xml", "sdk-python"])
def test_the_python_sdk_reads_what_is_written_for_rabbitmq(name: str) -> None:
    event = structured(name)
    sent = to_message(event, "a/b", binding="rabbitmq")
    theirs = sdk_rabbitmq.from_rabbitmq_event(
        sdk_rabbitmq.RabbitMQMessage(dict(sent.context.extensions["headers"]), sent.context.content_type, sent.payload)
    )
    assert theirs.get_data() == event.get_data()
    assert theirs.get_time() == event.get_time()
    assert theirs.get_id() == event.get_id()


# --- over a broker


@pytest.fixture(params=["memory", "mqtt-5", "mqtt-3.1.1", "mqtt-3.1.1-envelope", "amqp"])
def m(request: pytest.FixtureRequest) -> Iterator[Messaging]:
    settings: dict[str, Any] = {}
    if request.param == "memory":
        url = "memory://cloudevents"
    elif request.param == "amqp":
        url = request.getfixturevalue("rabbitmq").url
    else:
        _, version, *envelope = request.param.split("-")
        url = request.getfixturevalue("mosquitto").url
        settings = {"version": version, "envelope": True} if envelope else {"version": version}
    with messaging.connect(url, **settings) as instance:
        yield instance


def test_samples_arrive_in_the_mode_that_the_transport_has(m: Messaging) -> None:
    with events(m.subscribe("cloudevents/samples", qos=1)) as stream:
        for name in STRUCTURED:
            event = structured(name)
            publish(m, "cloudevents/samples", event, qos=1).result(PATIENCE)
            assert comparable(stream.receive(PATIENCE)) == comparable(event)


def test_samples_arrive_equal_in_structured_mode(m: Messaging) -> None:
    with m.subscribe("cloudevents/structured", CloudEvent, qos=1) as stream:
        for name in STRUCTURED:
            event = structured(name)
            publish(m, "cloudevents/structured", event, "structured", qos=1).result(PATIENCE)
            received = stream.receive(PATIENCE)
            assert received.value() == event
            assert from_message(received) == event


@table("binding", ["amqp", "amqp-colon", "rabbitmq"])
def test_headers_of_amqp_keep_their_types(rabbitmq: Any, binding: Any) -> None:
    event = CloudEvent(
        {"source": "/plant", "type": "reading", "sequence": 5, "critical": True, "raw": b"\x00\xff"}, {"celsius": 21.5}
    )
    with messaging.connect(rabbitmq.url) as m, m.subscribe("cloudevents/typed", qos=1) as stream:
        publish(m, "cloudevents/typed", event, binding=binding, qos=1).result(PATIENCE)
        found = from_message(stream.receive(PATIENCE))
    kept = {"sequence": "5", "critical": "true", "raw": "AP8="} if binding == "rabbitmq" else {}
    assert {**found.get_attributes()} == {**event.get_attributes(), "datacontenttype": "application/json", **kept}
    assert found.get_time() == event.get_time()  # to the microsecond, which a timestamp of AMQP has not

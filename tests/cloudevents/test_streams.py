"""Publishing events with an instance, the codec, and the events of a stream."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from reactivex import operators

import messaging
from messaging import Messaging
from messaging.cloudevents import CloudEvent, events, from_message, is_cloud_event, publish
from messaging.codecs import decode, encode
from messaging.errors import ArgumentError, DecodeError, EncodeError, InvalidEventError, UnsupportedFeatureError
from messaging.model import MessageContext
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder

TIME = datetime(2026, 1, 1, tzinfo=UTC)
NEEDED = {"specversion": "1.0", "id": "1", "source": "/plant", "type": "reading"}
JSON = "application/cloudevents+json"


def event(number: int = 1) -> CloudEvent:
    return CloudEvent({**NEEDED, "id": str(number), "time": TIME}, {"celsius": 21.5})


@pytest.fixture
def m() -> Iterator[Messaging]:
    with messaging.connect("memory://cloudevent-streams") as instance:
        yield instance


def test_a_stream_with_the_model_reads_structured_mode(m: Messaging) -> None:
    with m.subscribe("a/+", CloudEvent) as stream:
        m.publish("a/b", event(), content_type=JSON)
        publish(m, "a/b", event(2), "structured")
        assert [stream.receive(PATIENCE).value() for _ in range(2)] == [event(1), event(2)]


def test_a_handler_with_the_model_gets_events(m: Messaging) -> None:
    found: Recorder[CloudEvent] = Recorder()
    m.on("a/+", found, model=CloudEvent).ready.result(PATIENCE)
    publish(m, "a/b", event(), "structured")
    assert found.wait_for(1) == [event()]


def test_a_message_in_binary_mode_does_not_fit_the_model_and_the_error_says_why(m: Messaging) -> None:
    with m.subscribe("a/+") as stream:
        publish(m, "a/b", event())
        with pytest.raises(DecodeError, match=r"in binary mode they are headers, which from_message\(\) reads"):
            stream.receive(PATIENCE).value(CloudEvent)


def test_the_codec_leaves_other_objects_to_json() -> None:
    assert encode({"a": 1}, JSON) == (b'{"a":1}', JSON)
    assert decode(b'{"a": 1}', MessageContext(content_type=JSON)) == {"a": 1}
    assert decode(b'{"a": 1}', MessageContext(content_type=JSON), dict[str, int]) == {"a": 1}
    payload, _ = encode(event(), JSON)
    assert decode(payload, MessageContext(content_type=JSON), CloudEvent) == event()
    assert decode(payload, MessageContext(content_type=JSON))["id"] == "1"
    with pytest.raises(EncodeError):
        encode(event(), "application/json")  # a content type that would hide that it is an event


def test_events_are_iterated_in_both_modes(m: Messaging) -> None:
    with events(m.subscribe("a/+")) as stream:
        publish(m, "a/b", event(1))
        publish(m, "a/b", event(2), "structured")
        publish(m, "a/b", event(3), content_encoding="gzip", headers={"shop": "north"})
        found = [next(stream) for _ in range(3)]
    assert [each.get_id() for each in found] == ["1", "2", "3"]
    assert all(each.get_data() == {"celsius": 21.5} for each in found)
    assert [each.get_extension("shop") for each in found] == [None, None, "north"]


def test_events_are_iterated_with_asyncio() -> None:
    async def run() -> list[str]:
        async with messaging.connect("memory://cloudevents-async") as m, events(m.subscribe("a/+")) as stream:
            for number in range(3):
                await publish(m, "a/b", event(number))
            found = []
            async for each in stream:
                found.append(each.get_id())
                if len(found) == 3:
                    break
            return found

    assert asyncio.run(run()) == ["0", "1", "2"]


def test_events_pass_operators(m: Messaging) -> None:
    found: Recorder[CloudEvent] = Recorder()
    stream = m.subscribe("a/+")
    stream.pipe(operators.filter(is_cloud_event), operators.map(from_message)).subscribe(found)
    stream.ready.result(PATIENCE)
    m.publish("a/b", "no event")
    publish(m, "a/b", event())
    assert [each.get_id() for each in found.wait_for(1)] == ["1"]


@table("policy", ["skip", "reject"])
def test_a_message_that_is_no_event_is_skipped(m: Messaging, policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    with (
        m.subscribe("dead") as dead,
        events(m.subscribe("a/+", qos=1, dead_letter_channel="dead"), on_invalid=policy) as stream,
    ):
        m.publish("a/b", "no event", qos=1)
        publish(m, "a/b", event(), qos=1)
        with caplog.at_level(logging.WARNING, "messaging.cloudevents"):
            assert stream.receive(PATIENCE).get_id() == "1"
        assert stream.skipped == 1
        assert "events of 'a/b': message " in caplog.text
        assert "nor the headers 'specversion'" in caplog.text
        if policy == "reject":
            assert dead.receive(PATIENCE).value() == "no event"


@table("policy", [None, "raise"])
def test_a_message_that_is_no_event_is_a_dead_letter_and_the_events_go_on(m: Messaging, policy: Any) -> None:
    """At once, although more deliveries are allowed; ``raise`` raises its error besides."""
    rules: Any = {"qos": 1, "dead_letter_channel": "dead", "max_deliveries": 5}
    with m.subscribe("dead") as dead, events(m.subscribe("a/+", **rules), on_invalid=policy) as stream:
        m.publish("a/b", "no event", qos=1)
        publish(m, "a/b", event(), qos=1)
        if policy == "raise":
            with pytest.raises(DecodeError, match="no CloudEvent"):
                stream.receive(PATIENCE)
        assert stream.receive(PATIENCE).get_id() == "1"
        assert dead.receive(PATIENCE).value() == "no event"


def test_mqtt_3_refuses_binary_mode_before_anything_is_sent(mosquitto: Mosquitto) -> None:
    with messaging.connect(mosquitto.url, version="3.1.1") as m:
        with pytest.raises(UnsupportedFeatureError, match=r"headers|messageProperties"):
            publish(m, "a/b", event(), "binary")
        with m.subscribe("cloudevents/3") as stream:
            publish(m, "cloudevents/3", event())
            received = stream.receive(PATIENCE)
        assert received.context.content_type is None
        assert received.payload.startswith(b"{")
        assert not is_cloud_event(received)
        assert is_cloud_event(received, implied=True)
        assert from_message(received) == event()


def test_mqtt_5_has_the_attributes_as_user_properties_and_the_content_type(mosquitto: Mosquitto) -> None:
    with messaging.connect(mosquitto.url, version="5") as m, m.subscribe("cloudevents/5") as stream:
        publish(m, "cloudevents/5", event())
        received = stream.receive(PATIENCE)
    assert received.context.content_type == "application/json"
    assert {**received.context.extensions["headers"]} == {
        **NEEDED,
        "time": received.context.extensions["headers"]["time"],
    }
    assert received.payload == b'{"celsius":21.5}'


def test_wrong_arguments_are_refused(m: Messaging) -> None:
    with pytest.raises(ArgumentError, match="content_type is the event's"):
        publish(m, "a/b", event(), content_type="text/plain")
    with pytest.raises(ArgumentError, match="m must be a Messaging instance"):
        publish(None, "a/b", event())  # type: ignore[arg-type]
    with pytest.raises(InvalidEventError):
        publish(m, "a/b", {"id": 1})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="stream must be what subscribe"):
        events([])
    with m.subscribe("a") as stream, pytest.raises(ArgumentError, match="on_invalid must be one of 'raise', 'reject'"):
        events(stream, on_invalid="drop")  # type: ignore[arg-type]


def test_without_the_package_the_extra_is_named() -> None:
    code = "import sys; sys.modules['cloudevents'] = None; import messaging.cloudevents"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "messaging.cloudevents needs an optional package: pip install 'rx-messaging[cloudevents]'" in done.stderr

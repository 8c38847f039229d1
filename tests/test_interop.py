"""Interoperation: mosquitto's own clients and plain pika talk to programs on this API, both ways."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator

import pika
import pytest

import messaging
from messaging import Messaging
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.waiting import PATIENCE


def tool(name: str, *arguments: str) -> str:
    """Run a client of another project to its end; return its output."""
    result = subprocess.run([name, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(params=["5", "3.1.1"])
def mqtt(request: pytest.FixtureRequest, mosquitto: Mosquitto) -> Iterator[tuple[Messaging, list[str], str]]:
    if shutil.which("mosquitto_pub") is None:
        pytest.fail("mosquitto_pub is missing: install mosquitto-clients")
    where = ["-h", mosquitto.host, "-p", str(mosquitto.port), "-V", "5" if request.param == "5" else "311"]
    with messaging.connect(mosquitto.url, version=request.param) as m:
        yield m, where, request.param


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_json_of_mosquitto_pub_is_read_as_the_documentation_shows(mosquitto: Mosquitto, version: str) -> None:
    where = ["-h", mosquitto.host, "-p", str(mosquitto.port), "-t", "sensors/attic", "-m", '{"celsius": 21.5}']
    url = f"{mosquitto.url}?default_content_type=application/json"
    with messaging.connect(mosquitto.url, version=version) as plain, plain.subscribe("sensors/+", qos=1) as bytes_of:
        with messaging.connect(url, version=version) as m, m.subscribe("sensors/+", qos=1) as stream:
            tool("mosquitto_pub", *where, "-q", "1")
            message = stream.receive(PATIENCE)
            assert message.value()["celsius"] == 21.5
            assert message.payload == message.value(bytes) == b'{"celsius": 21.5}'
        message = bytes_of.receive(PATIENCE)
        assert message.value(dict) == {"celsius": 21.5}
        assert message.value() == b'{"celsius": 21.5}'


@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_mosquitto_pub_reaches_a_stream(mqtt: tuple[Messaging, list[str], str], qos: str) -> None:
    m, where, version = mqtt
    properties = []
    if version == "5":
        for name, value in {
            "content-type": "application/json",
            "response-topic": "interop/answer",
            "correlation-data": "c-7",
            "message-expiry-interval": "60",
        }.items():
            properties += ["-D", "publish", name, value]
        properties += ["-D", "publish", "user-property", "colour", "blue"]
    with m.subscribe("interop/in/#", qos=qos) as stream:
        tool("mosquitto_pub", *where, "-t", "interop/in/ä", "-m", '{"x": 1}', "-q", qos, *properties)
        message = stream.receive(PATIENCE)
    assert message.payload == b'{"x": 1}'
    assert message.context.channel == "interop/in/ä"
    assert message.context.extensions["qos"] == qos
    if version == "5":
        assert message.value() == {"x": 1}
        assert message.context.content_type == "application/json"
        assert message.context.reply_to_channel == "interop/answer"
        assert message.context.correlation_id == "c-7"
        assert message.context.extensions["headers"] == {"colour": "blue"}
        assert 0 < message.context.extensions["timeToLive"] <= 60


def test_mosquitto_sub_gets_published_messages(mqtt: tuple[Messaging, list[str], str]) -> None:
    m, where, version = mqtt
    properties = {}
    if version == "5":
        properties = {
            "content_type": "text/plain",
            "correlation_id": "c-8",
            "reply_to": "interop/answer",
            "headers": {"colour": "red"},
            "time_to_live": 60.0,
        }
    # retained, so that it does not matter who comes first
    m.publish("interop/out", b"hello", qos=1, retain=True, **properties).result(PATIENCE)
    printed = json.loads(tool("mosquitto_sub", *where, "-t", "interop/out", "-C", "1", "-q", "1", "-F", "%j"))
    m.publish("interop/out", b"", qos=1, retain=True).result(PATIENCE)
    assert printed["payload"] == "hello"
    assert printed["retain"] == 1
    assert printed["qos"] == 1
    if version == "5":
        known = printed["properties"]
        assert known["content-type"] == "text/plain"
        assert known["correlation-data"] == "c-8"
        assert known["response-topic"] == "interop/answer"
        told = known["user-properties"]  # one mapping; newer programs print a list with one for each property
        headers = told if isinstance(told, dict) else dict(item for each in told for item in each.items())
        assert headers["colour"] == "red"


@pytest.fixture
def amqp(rabbitmq: RabbitMQ) -> Iterator[tuple[Messaging, pika.adapters.blocking_connection.BlockingChannel]]:
    parameters = pika.URLParameters(rabbitmq.url)
    parameters.blocked_connection_timeout = PATIENCE
    connection = pika.BlockingConnection(parameters)
    with messaging.connect(rabbitmq.url) as m:
        yield m, connection.channel()
    connection.close()


def test_pika_reaches_a_stream(amqp: tuple[Messaging, pika.adapters.blocking_connection.BlockingChannel]) -> None:
    m, channel = amqp
    with m.subscribe("interop/in/+") as stream:
        channel.basic_publish(
            "amq.topic",
            "interop.in.pika",
            b'{"x": 1}',
            pika.BasicProperties(
                content_type="application/json",
                content_encoding="utf-8",
                correlation_id="c-7",
                reply_to="interop.answer",
                message_id="m-1",
                priority=3,
                expiration="60000",
                timestamp=1_700_000_000,
                headers={"colour": "blue", "count": 3},
            ),
        )
        message = stream.receive(PATIENCE)
    context = message.context
    assert message.value() == {"x": 1}
    assert context.channel == "interop/in/pika"
    assert (context.content_type, context.content_encoding) == ("application/json", "utf-8")
    assert (context.correlation_id, context.reply_to_channel) == ("c-7", "interop/answer")
    assert context.extensions["messageId"] == "m-1"
    assert context.extensions["priority"] == 3
    assert context.extensions["timeToLive"] == 60.0
    assert context.extensions["timestamp"] == 1_700_000_000
    assert context.extensions["headers"] == {"colour": "blue", "count": 3}


def test_pika_gets_published_messages(
    amqp: tuple[Messaging, pika.adapters.blocking_connection.BlockingChannel],
) -> None:
    m, channel = amqp
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(queue, "amq.topic", "interop.out.#")
    m.publish(
        "interop/out/v1.2",
        {"x": 2},
        correlation_id="c-8",
        reply_to="interop/answer",
        headers={"colour": "red"},
        priority=4,
        time_to_live=60.0,
        guaranteed_delivery=True,
    ).result(PATIENCE)
    method, properties, body = next(channel.consume(queue, inactivity_timeout=PATIENCE, auto_ack=True))
    assert method is not None, "nothing arrived"
    assert method.routing_key == "interop.out.v1%2E2"
    assert json.loads(body) == {"x": 2}
    assert properties.content_type == "application/json"
    assert (properties.correlation_id, properties.reply_to) == ("c-8", "interop.answer")
    assert properties.headers == {"colour": "red"}
    assert properties.priority == 4
    assert properties.expiration == "60000"
    assert properties.delivery_mode == 2
    assert properties.message_id

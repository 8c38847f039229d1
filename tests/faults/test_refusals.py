"""What a broker refuses is said once, and asked for again slowly or not at all.

Counted is what arrives: connections at a proxy, requests in the broker's log or at a scripted one.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import messaging
from messaging import (
    AuthenticationError,
    PublishRefusedError,
    SubscriptionRefusedError,
)
from messaging.testing.brokers import Mosquitto, RabbitMQ, require
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.certificates import TlsRabbitMQ
from tests.faults.scenario import attempts_to_connect, attempts_within, state, through
from tests.mqtt.peer import Connection, Peer

#: attempts in one second that the delays allow, from a tenth of a second upwards
STORM = 10
versions = pytest.mark.parametrize("version", ["5", "3.1.1"])


# --- credentials


def set_password(path: Path, password: str) -> None:
    subprocess.run(["mosquitto_passwd", "-b", path, "user", password], check=True, capture_output=True, timeout=30)


@versions
def test_a_wrong_password_is_an_error_and_no_storm_mqtt(version: str, tmp_path: Path) -> None:
    require("mosquitto")
    passwords = tmp_path / "passwords"
    passwords.touch()
    set_password(passwords, "right")
    with Mosquitto(["allow_anonymous false", f"password_file {passwords}"]) as broker:
        wrong_url = f"mqtt://user:wrong@{broker.host}:{broker.port}?version={version}"

        def change(password: str) -> None:
            set_password(passwords, password)
            broker.reload()

        check_password(broker, wrong_url, wrong_url.replace("wrong", "right"), change)


def test_a_wrong_password_is_an_error_and_no_storm_amqp(own_rabbitmq: TlsRabbitMQ) -> None:
    own_rabbitmq.ctl("add_user", "user", "right")
    try:
        own_rabbitmq.ctl("set_permissions", "user", ".*", ".*", ".*")
        wrong_url = f"amqp://user:wrong@{own_rabbitmq.host}:{own_rabbitmq.port}/"
        check_password(
            own_rabbitmq,
            wrong_url,
            wrong_url.replace("wrong", "right"),
            lambda password: own_rabbitmq.ctl("change_password", "user", password),
        )
    finally:
        own_rabbitmq.ctl("delete_user", "user")


def check_password(
    broker: Mosquitto | RabbitMQ, wrong_url: str, right_url: str, change: Callable[[str], object]
) -> None:
    """From the start, and once it is changed while an instance is connected; with the old one it works again."""
    with Proxy(broker.host, broker.port) as proxy:
        with pytest.raises(AuthenticationError) as caught:
            messaging.connect(through(proxy, wrong_url))
        assert "wrong" not in str(caught.value)
        assert proxy.attempts == 1
        assert attempts_to_connect(proxy, wrong_url, 1.0) <= STORM
        with messaging.connect(through(proxy, right_url), reconnect_max=2.0) as m:
            change("changed")
            proxy.sever()
            waiting = m.publish("x", qos=1)
            eventually(lambda: "credentials" in (m.runtime.get_runtime_dto().connection.cause or ""), "the refusal")
            assert attempts_within(proxy, 1.0) <= STORM
            assert state(m) == "refused"
            change("right")
            waiting.result(PATIENCE)


# --- topics


@versions
def test_a_subscription_that_is_denied_is_not_asked_for_again_mqtt(strict_mosquitto: Mosquitto, version: str) -> None:
    broker = strict_mosquitto
    with Proxy(broker.host, broker.port) as proxy, messaging.connect(through(proxy, broker.url), version=version) as m:
        streams = [m.subscribe("denied") for _ in range(3)]
        for stream in streams:
            with pytest.raises(SubscriptionRefusedError):
                stream.ready.result(PATIENCE)
        asked = broker.log().count("Received SUBSCRIBE")
        assert asked == len(streams)
        attempts = proxy.attempts
        proxy.sever()
        m.publish("x", qos=1).result(PATIENCE)  # connected again, and what is subscribed to came first
        assert proxy.attempts == attempts + 1
        assert attempts_within(proxy, 0.5) == 0
        assert broker.log().count("Received SUBSCRIBE") == asked


def test_a_message_that_is_denied_fails_once_mqtt(tmp_path: Path) -> None:
    """MQTT 5. To a client of 3.1.1 a broker cannot say it: see docs/faults.md."""
    require("mosquitto")
    rules = tmp_path / "rules"
    rules.write_text("topic readwrite allowed\n")
    with Mosquitto([f"acl_file {rules}", "log_type all"]) as broker, messaging.connect(broker.url) as m:
        for qos in (1, 2):
            with pytest.raises(PublishRefusedError, match="Not authorized"):
                m.publish("denied", b"x", qos=qos).result(PATIENCE)
        m.publish("allowed", b"x", qos=1).result(PATIENCE)
        assert len(re.findall(r"Denied PUBLISH", broker.log())) == 2


def test_an_operation_without_permission_fails_once_amqp(own_rabbitmq: TlsRabbitMQ) -> None:
    broker = own_rabbitmq
    broker.ctl("add_user", "guarded", "secret")
    try:
        broker.ctl("set_permissions", "guarded", "^$", "^allowed", "^amq.topic$")
        with messaging.connect(broker.url) as operator, Proxy(broker.host, broker.port) as proxy:
            operator.publish("allowed-exchange", b"", channel_extension="key").result(PATIENCE)
            url = through(proxy, broker.url).replace("guest:guest", "guarded:secret")
            with messaging.connect(url) as m:
                m.publish("allowed-exchange", b"x", channel_extension="key").result(PATIENCE)
                stream = m.subscribe("denied", queue="denied")
                with pytest.raises(SubscriptionRefusedError, match="403"):
                    stream.ready.result(PATIENCE)
                attempts, refused = proxy.attempts, broker.log().count("ACCESS_REFUSED")
                with pytest.raises(PublishRefusedError, match="403"):
                    m.publish("denied", b"x").result(PATIENCE)
                m.publish("allowed-exchange", b"x", channel_extension="key").result(PATIENCE)
                assert attempts_within(proxy, 0.5) == 0
                assert proxy.attempts == attempts
                # once in the batch, and once when it is found out which message it was
                assert broker.log().count("ACCESS_REFUSED") - refused <= 4
    finally:
        broker.ctl("delete_user", "guarded")


# --- a scripted MQTT broker


@pytest.fixture
def peer() -> Peer:
    return Peer()


async def welcomed(peer: Peer) -> Connection:
    """The next connection, accepted."""
    connection, _ = await peer.accept()
    connection.connack()
    return connection


@table(
    "data",
    [
        b"\x30\x02\x00\x05",  # PUBLISH that ends within its topic
        b"\x30\xff\xff\xff\xff\x01",  # a length of five bytes
        b"\x40\x01\x00",  # PUBACK without an id
        b"\x36\x05\x00\x01x\x00\x01",  # PUBLISH with QoS 3
        b"\xf0\x00",  # an unsolicited AUTH
        b"\x00\x00",  # no such packet
        b"\x20\x03\x00\x00\x00",  # a second CONNACK
        b"\x82\x06\x00\x01\x00\x00\x00\x00",  # SUBSCRIBE, which is for clients to send
    ],
    ids=lambda data: data.hex(),
)
async def test_malformed_packets_end_the_connection_and_not_the_instance(peer: Peer, data: bytes) -> None:
    """What was published and not answered is sent again; a broker that goes on like that is not stormed."""

    async def broker() -> None:
        for _ in range(3):
            connection = await welcomed(peer)
            await connection.publish()
            connection.write(data)
            await connection.end()
        connection = await welcomed(peer)
        publish = await connection.publish()
        connection.answer(0x40, publish.id)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(broker())
        async with messaging.connect(peer.url, reconnect_min=0.02, reconnect_max=0.1) as m:
            await m.publish("x", b"1", qos=1)
            assert state(m) == "connected"

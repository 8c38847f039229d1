"""``connect(url, will=…, birth=…)``: what others see of a device that comes and goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

import messaging
from messaging import MessageContextBuilder
from messaging.errors import ArgumentError, MessagingError, UnsupportedFeatureError
from messaging.execution import engine
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, require
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually_async
from messaging_adapters.memory.adapter import MemoryAdapter
from messaging_adapters.mqtt import packets
from tests.mqtt.peer import Peer

STATUS = "plant/7/status"
WILL = {"channel": STATUS, "content": "offline", "retain": True, "qos": 1}
BIRTH = {"channel": STATUS, "content": "online", "retain": True, "qos": 1}
QUICK = {"reconnect_min": 0.02, "reconnect_max": 0.1}


def connect(url: str, **given: Any) -> messaging.Messaging:
    return messaging.connect(url, services=ServiceRegistry(), **QUICK, **given)


@pytest.fixture(scope="module")
def broker() -> Iterator[Mosquitto]:
    require("mosquitto")
    with Mosquitto() as broker:
        yield broker


def test_others_see_a_device_come_go_and_come_again(broker: Mosquitto) -> None:
    seen = Recorder()
    with connect(broker.url) as other, Proxy(broker.host, broker.port) as line:
        other.on(STATUS, lambda message: seen(message.payload), qos=1)
        with connect(f"mqtt://{line.host}:{line.port}", will=WILL, birth=BIRTH) as m:
            seen.wait_for(1)
            line.refuse()
            line.sever()
            seen.wait_for(2)
            line.accept()
            seen.wait_for(3)
            m.publish(STATUS, b"closing", qos=1).result(PATIENCE)
        seen.wait_for(4)
        other.publish(STATUS, b"", qos=1, retain=True).result(PATIENCE)
        seen.wait_for(5)
        assert [*seen] == [b"online", b"offline", b"online", b"closing", b""]  # no will after closing


@table(
    "given", [WILL, MessageContextBuilder().channel(STATUS).content("offline").extensions({"retain": True, "qos": 1})]
)
async def test_the_will_goes_with_the_first_connect(given: Any) -> None:
    async with Peer() as peer:
        m = connect(peer.url, will=given, birth={"channel": STATUS, "content": b"on"}, start_offline=True)
        waiting = m.publish("later", b"x")
        connection, body = await peer.accept()
        assert body[7] & 0b1110_0100 == 0b0010_0100  # a will, retained
        assert b"offline" in body
        connection.connack()
        births = [await connection.publish(), await connection.publish()]
        assert [each.topic for each in births] == [STATUS, "later"]  # before what waits in the outbox
        await waiting
        connection.abort()
        connection, body = await peer.accept()
        assert b"offline" in body
        connection.connack()
        assert (await connection.publish()).topic == STATUS
        assert peer.connections[-1] is connection  # and there is no third one
        closing = asyncio.ensure_future(m.aclose())
        await connection.expect(packets.DISCONNECT)
        connection.close()
        await closing


async def test_a_will_outlasts_refused_log_ins() -> None:
    """Unlike one that is set later, which a connection is tried without."""
    async with Peer() as peer:
        m = connect(peer.url, will=WILL, start_offline=True)
        for refused in (True, True, False):
            connection, body = await peer.accept()
            assert b"offline" in body
            connection.connack(reason=0x87 if refused else 0)
        connection.close()
        await m.aclose()


def test_memory_has_both() -> None:
    seen = Recorder()
    with connect("memory://presence") as other:
        other.on(STATUS, lambda message: seen(message.payload))
        with connect("memory://presence", will=WILL, birth=BIRTH, name="device") as m:
            seen.wait_for(1)
            adapter = m._adapter
            assert isinstance(adapter, MemoryAdapter)
            engine().call(lambda: adapter.client.broker.disconnect("device"))
            seen.wait_for(3)
    assert [*seen] == [b"online", b"offline", b"online"]


@table(
    "url, given, kind",
    [
        ("memory://x", {"will": "offline"}, ArgumentError),
        ("memory://x", {"will": {"content": "offline"}}, ArgumentError),
        ("memory://x", {"birth": {"channel": "a/+"}}, ArgumentError),
        ("memory://x", {"birth": {"channel": "a", "last_will": True}}, ArgumentError),
        ("memory://x", {"birth": {"channel": "a", "priority": 77}}, ArgumentError),
        ("memory://x", {"will": MessageContextBuilder().content("x").build_message()}, ArgumentError),
        ("mqtt://x", {"will": {"channel": "a", "priority": 1}}, UnsupportedFeatureError),
        ("amqp://x", {"will": WILL}, UnsupportedFeatureError),
    ],
)
def test_what_cannot_be_published_is_refused_before_connecting(
    url: str, given: Any, kind: type[MessagingError]
) -> None:
    with pytest.raises(kind):
        connect(url, **given)


def test_a_will_that_the_protocol_does_not_carry_is_an_error(broker: Mosquitto) -> None:
    with pytest.raises(MessagingError, match="last will in MQTT"):
        connect(broker.url, will={"channel": STATUS, "content": bytes(70_000)})


def test_a_second_will_is_refused(broker: Mosquitto) -> None:
    with connect(broker.url, will=WILL) as m, pytest.raises(UnsupportedFeatureError, match="a last will already"):
        m.publish(STATUS, b"x", last_will=True)


async def test_a_birth_that_the_broker_refuses_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with Peer() as peer:
        m = connect(peer.url, birth={"channel": STATUS, "content": b"on", "qos": 1}, start_offline=True)
        connection, _ = await peer.accept()
        connection.connack()
        connection.answer(packets.PUBACK, (await connection.publish()).id, 0x87)
        await m
        await eventually_async(lambda: "Not authorized" in caplog.text, "a warning")
        connection.close()
        await m.aclose()
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert any("the birth on 'plant/7/status' failed" in each and "Not authorized" in each for each in warnings)

"""Queues with MQTT 3.1.1: a broker without shared subscriptions is found out rather than trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from messaging import MessageStream, Messaging
from messaging.errors import SubscriptionRefusedError, UnsupportedFeatureError
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.mqtt.conftest import Connect
from tests.mqtt.harness import Core, Sink
from tests.mqtt.peer import Connection, Peer, accept, farewell, session, unsubscribed

WAY_OUT = "no shared subscriptions with MQTT 3.1.1, which queues need; set version=5"


@contextmanager
def subscribed(m: Messaging, channel: str, **how: Any) -> Iterator[MessageStream[Any]]:
    with m.subscribe(channel, **how) as stream:
        stream.ready.result(PATIENCE)
        yield stream


def refusal(m: Messaging, channel: str = "jobs") -> str:
    """Why a queue is refused."""
    with pytest.raises(SubscriptionRefusedError) as caught, subscribed(m, channel, queue="workers"):
        pass
    return str(caught.value)


@table("others", [[], ["#", "messaging/#"]], ids=["alone", "overlapping"])
def test_a_broker_without_shared_subscriptions_refuses_queues(
    rabbitmq_mqtt: RabbitMQ, connect: Connect, others: list[str]
) -> None:
    """Whatever else the instance is subscribed to: RabbitMQ takes $share for the level of a channel."""
    m = connect(rabbitmq_mqtt.mqtt_url, version="3.1.1")
    with ExitStack() as stack:
        for pattern in others:
            stack.enter_context(subscribed(m, pattern))
        assert WAY_OUT in refusal(m)
    assert "queue" not in m.features
    assert "pointToPoint" not in m.features
    with pytest.raises(UnsupportedFeatureError, match=WAY_OUT):
        m.subscribe("jobs", queue="workers")
    # the rest of the instance goes on
    with subscribed(m, "plain") as stream:
        m.publish("plain", b"x", qos=1).result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"x"


def test_a_broker_with_shared_subscriptions_is_probed_once_and_keeps_no_subscription(
    mosquitto: Mosquitto, connect: Connect
) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy, ExitStack() as stack:
        m = connect(f"mqtt://{proxy.host}:{proxy.port}", version="3.1.1")
        stack.enter_context(subscribed(m, "sharing/plain"))
        assert proxy.attempts == 1
        streams = [stack.enter_context(subscribed(m, "sharing/jobs", queue=name)) for name in ("one", "two", "three")]
        assert proxy.attempts == 2
        m.publish("sharing/jobs", b"x", qos=1).result(PATIENCE)
        assert [stream.receive(PATIENCE).payload for stream in streams] == [b"x"] * 3
    m = connect(version="3.1.1")
    with subscribed(m, "messaging/probe/#") as after:
        m.publish("messaging/probe/last", b"").result(PATIENCE)
        assert after.receive(PATIENCE).context.channel == "messaging/probe/last"  # nothing was retained


def test_mqtt_5_announces_shared_subscriptions_and_is_not_probed(mosquitto: Mosquitto, connect: Connect) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        m = connect(f"mqtt://{proxy.host}:{proxy.port}")
        with subscribed(m, "sharing/jobs", queue="one"):
            assert proxy.attempts == 1


def test_a_broker_that_refuses_the_probe_is_warned_of(
    strict_mosquitto: Mosquitto, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """That tells nothing about the queue that is asked for: what becomes of it is the broker's to say."""
    assert "refused the subscription to 'open/jobs'" in refusal(
        connect(strict_mosquitto.url, version="3.1.1"), "open/jobs"
    )
    assert "cannot find out whether the broker has shared subscriptions: it refuses the subscriptions" in caplog.text
    assert "messaging/probe/#" in caplog.text


class Silent:
    """Takes subscriptions, and delivers nothing, as a broker does whose rules let a client publish nowhere."""

    def __init__(self, peer: Peer, *, code: int = 0) -> None:
        self._peer = peer
        self._code = code

    async def serve(self) -> None:
        """The probe's connection."""
        connection, _ = await self._peer.accept()
        self.connection: Connection = connection
        connection.connack_v3(self._code)
        while not self._code:
            head, body = await connection.packet()
            if head & 0xF0 == 0x80:
                connection.send(0x90, body[:2] + b"\0")
            if head & 0xF0 == 0xE0:
                return


async def queue_at(core: Core, peer: Peer, **how: Any) -> Sink:
    """Subscribe to a queue at a broker whose probe ends as told."""
    connection, _ = await accept(core, peer)
    serving = asyncio.create_task(Silent(peer, **how).serve())
    subscribing = asyncio.create_task(core.subscribe("jobs", queue="one"))
    assert b"$share/one/jobs" in await connection.suback(v5=False)
    sink, _ = await subscribing
    await serving
    await farewell(core, connection)
    return sink


async def test_a_broker_that_could_not_be_reached_is_probed_again(caplog: pytest.LogCaptureFixture) -> None:
    """A probe whose connection ends has no result."""
    async with session(version="3.1.1") as (core, peer, connection):
        for _ in range(2):
            subscribing = asyncio.create_task(core.subscribe("jobs", queue="one"))
            probe, _ = await peer.accept()
            probe.abort()
            await connection.suback(v5=False)
            _, handle = await subscribing
            await unsubscribed(core, connection, handle)
    assert caplog.text.count("cannot find out whether the broker has shared subscriptions") == 2


@table(
    "code, reason", [(0, "no message arrives"), (5, "refused a client without user name")], ids=["silent", "refused"]
)
async def test_a_probe_without_result_is_warned_of(caplog: pytest.LogCaptureFixture, code: int, reason: str) -> None:
    async with Peer() as peer:
        await queue_at(Core(peer.url, version="3.1.1"), peer, code=code)
    assert "cannot find out whether the broker has shared subscriptions" in caplog.text
    assert reason in caplog.text

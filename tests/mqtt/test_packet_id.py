"""Extension ``packetId``: with ``redelivered`` it tells a consumer with a journal what it has stored already."""

from __future__ import annotations

from typing import Any

import pytest

from messaging import Message, Messaging
from messaging.errors import InvalidExtensionError
from messaging.testing.conformance.helpers import manual, publish
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.mqtt.conftest import Connect, both_versions
from tests.mqtt.harness import Core, Sink, lasting
from tests.mqtt.peer import Peer, accept, reconnect, session, subscribed

PERSISTENT: dict[str, Any] = {"client_id": "me", "clean_start": False, "session_expiry": 1000}


def told(message: Message) -> Any:
    return message.context.extensions.get("packetId")


def ids(sink: Sink) -> list[Any]:
    return [message.extensions.get("packetId") for message in sink.arrived]


# --- byte by byte


async def test_packet_id_is_the_packet_identifier_of_the_publish_packet() -> None:
    async with session() as (core, _, connection):
        telling, _ = await subscribed(core, connection, "a", qos="2", packetId=True)
        silent, _ = await subscribed(core, connection, "a", qos="2")
        for packet_id, qos in ((7, 1), (65_535, 2), (0, 0), (8, 1)):
            connection.deliver("a", b"%d" % packet_id, packet_id, qos)
        await telling.count(4)
        await silent.count(4)
        assert ids(telling) == [7, 65_535, None, 8]
        assert ids(silent) == [None] * 4
        assert [message.extensions["qos"] for message in telling.arrived] == ["1", "2", "0", "1"]


async def test_a_stream_without_acknowledgement_gets_the_packet_id_as_well() -> None:
    """It may share its subscription with one that does."""
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection, "a", qos="0", packetId=True)
        connection.deliver("a", b"x", 3, 1)
        (message,) = await sink.count(1)
        assert (message.extensions["packetId"], message.token) == (3, None)


async def test_a_message_whose_answer_was_lost_comes_again_with_the_same_packet_id(peer: Peer) -> None:
    core = Core(peer.url, **PERSISTENT)
    connection, _ = await accept(core, peer)
    sink, _ = await subscribed(core, connection, "a", qos="1", packetId=True)
    connection.deliver("a", b"x", 5, 1)
    (message,) = await sink.count(1)
    core.adapter.acknowledge([message.token])
    connection, _ = await reconnect(core, peer, connection, present=True)
    connection.deliver("a", b"x", 5, 1, 8)
    connection.deliver("a", b"y", 6, 1)
    messages = await sink.count(3)
    assert ids(sink) == [5, 5, 6]
    assert [message.extensions.get("redelivered", False) for message in messages] == [False, True, False]
    connection.abort()
    await core.lost(2)
    await core.adapter.close()


# --- against mosquitto


@pytest.mark.usefixtures("needs_mosquitto")
@table("qos", ["1", "2"])
@both_versions
def test_a_message_delivered_again_after_a_reconnect_has_the_same_packet_id(
    connect: Connect, version: str, qos: str
) -> None:
    channel = f"packet-id/{version}/{qos}"
    settings = lasting(version)
    payloads = [b"%d" % number for number in range(5)]
    first = connect(**settings)
    stream = first.subscription.subscribe(manual(first, channel, qos=qos, packetId=True))
    stream.ready.result(PATIENCE)
    publish(connect(), channel, payloads, qos=qos)
    known = {}
    for _ in payloads:
        message = stream.receive(PATIENCE)
        assert "redelivered" not in message.context.extensions
        known[told(message)] = message.payload
    assert len(known) == len(payloads)
    first.close()  # nothing was acknowledged
    second = connect(**settings)
    with second.subscription.subscribe(manual(second, channel, qos=qos, packetId=True)) as stream:
        again = [stream.receive(PATIENCE) for _ in payloads]
        assert {told(message): message.payload for message in again} == known
        assert all(message.context.extensions["redelivered"] for message in again)


@pytest.mark.usefixtures("needs_mosquitto")
def test_a_message_with_a_packet_id_can_be_passed_on(connect: Connect) -> None:
    m = connect()
    with (
        m.subscribe("packet-id/from", qos=1, packet_id=True) as stream,
        m.subscribe("packet-id/to", qos=1, packet_id=True) as passed_on,
    ):
        publish(m, "packet-id/from", [b"x"], qos=1)
        message = stream.receive(PATIENCE)
        m.publisher.publish(message, "packet-id/to").result(PATIENCE)
        builder = m.context_builder().channel("packet-id/to").extensions(message.context.extensions)
        m.publisher.publish(builder.content(b"y").build_message()).result(PATIENCE)
        connect("memory://packet-id").publisher.publish(message).result(PATIENCE)
        assert [passed_on.receive(PATIENCE).payload for _ in range(2)] == [b"x", b"y"]


def refused(m: Messaging, value: Any) -> None:
    with pytest.raises(InvalidExtensionError, match="packetId"):
        m.subscribe("packet-id/refused", packet_id=value)


@pytest.mark.usefixtures("needs_mosquitto")
def test_packet_id_is_a_bool_and_for_subscribing(connect: Connect) -> None:
    m = connect()
    for value in (1, 17, "yes"):
        refused(m, value)
    with pytest.raises(InvalidExtensionError, match="subscribing"):
        m.publish("packet-id/refused", b"x", packet_id=True)
    assert "packetId" in m.features

"""Topic aliases, used by both sides (MQTT 5, 3.3.2.3.4)."""

from __future__ import annotations

import pytest

from messaging.errors import PayloadTooLargeError
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging_adapters.mqtt import packets
from tests.mqtt.harness import Core, connected
from tests.mqtt.peer import Connection, reconnect, sent, session, subscribed

pytestmark = pytest.mark.usefixtures("needs_mosquitto")

#: CONNACK properties: Topic Alias Maximum 2
TWO = b"\x22\x00\x02"


async def travelled(core: Core, connection: Connection, channel: str, qos: str = "0") -> tuple[str, int]:
    """Topic and alias of the next message, as it is on the wire."""
    out, publish = await sent(core, connection, channel, b"x", qos=qos)
    if publish.qos:
        await connection.confirm(out, publish)
    return publish.topic, publish.properties.alias


@table(
    "maximum, qos, topics, seen",
    {
        "a topic that is used again travels as a number":
            (TWO, "0", ["some/topic"] * 4, [("some/topic", 0), ("some/topic", 1), ("", 1), ("", 1)]),
        "with QoS 1": (TWO, "1", ["some/topic"] * 4, [("some/topic", 0), ("some/topic", 1), ("", 1), ("", 1)]),
        "there are no aliases without Topic Alias Maximum": (b"", "0", ["some/topic"] * 3, [("some/topic", 0)] * 3),
        "aliases stay within the broker's maximum, and short topics get none":
            (TWO, "0", ["topic/1", "topic/1", "topic/2", "topic/2", "topic/3", "topic/3", "abc", "abc",
                        "topic/1", "topic/2", "topic/3"],
             [("topic/1", 0), ("topic/1", 1), ("topic/2", 0), ("topic/2", 2), ("topic/3", 0), ("topic/3", 0),
              ("abc", 0), ("abc", 0), ("", 1), ("", 2), ("topic/3", 0)]),
    },
)  # fmt: skip
async def test_topics_get_aliases(maximum: bytes, qos: str, topics: list[str], seen: list[tuple[str, int]]) -> None:
    async with session(maximum) as (core, _, connection):
        assert [await travelled(core, connection, topic, qos) for topic in topics] == seen


async def test_aliases_end_with_their_connection_and_resent_messages_have_their_topic() -> None:
    async with session(TWO, session_expiry=60, client_id="a") as (core, peer, connection):
        for _ in range(2):
            await travelled(core, connection, "some/topic", "1")
        out = core.out("some/topic", b"unanswered", qos="1")
        await core.send(out)
        assert (await connection.publish()).topic == ""
        connection, _ = await reconnect(core, peer, connection, present=True, properties=TWO)
        again = await connection.publish()
        assert (again.topic, again.properties.alias, again.dup, again.payload) == (
            "some/topic", 0, True, b"unanswered",
        )  # fmt: skip
        await connection.confirm(out, again)
        assert await travelled(core, connection, "some/topic") == ("some/topic", 1)
        assert await travelled(core, connection, "some/topic") == ("", 1)


async def test_an_alias_that_a_refused_message_would_have_introduced_is_introduced_by_the_next() -> None:
    async with session(TWO + b"\x27\x00\x00\x00\x50") as (core, _, connection):  # packets up to 80 bytes
        assert await travelled(core, connection, "some/topic") == ("some/topic", 0)
        with pytest.raises(PayloadTooLargeError):
            await core.publish("some/topic", bytes(100))
        seen = [await travelled(core, connection, "some/topic") for _ in range(3)]
        assert seen == [("some/topic", 0), ("some/topic", 1), ("", 1)]


async def test_aliases_of_the_broker_are_understood() -> None:
    async with session(topic_alias_maximum=3) as (core, _, connection):
        sink, _ = await subscribed(core, connection, "#")
        for topic, alias in (("a", 3), ("", 3), ("b", 3), ("", 3), ("c", 0)):
            properties = b"\x23" + alias.to_bytes(2, "big") if alias else b""
            connection.send(0x30, packets.text(topic) + bytes((len(properties),)) + properties + b"x")
        assert [message.channel for message in await sink.count(5)] == ["a", "a", "b", "b", "c"]


@table(
    "maximum, properties, topic, reason",
    [
        (3, b"\x23\x00\x04", "a", "topic alias 4; at most 3"),
        (0, b"\x23\x00\x01", "a", "topic alias 1; at most 0"),
        (3, b"\x23\x00\x01", "", "topic alias 1 stands for nothing"),
        (3, b"\x23\x00\x00", "a", "topic alias 0"),
        (3, b"", "", "neither topic nor alias"),
    ],
)
async def test_an_invalid_alias_ends_the_connection_with_its_reason_code(
    maximum: int, properties: bytes, topic: str, reason: str
) -> None:
    async with session(topic_alias_maximum=maximum) as (core, _, connection):
        connection.send(0x30, packets.text(topic) + bytes((len(properties),)) + properties)
        assert reason in str(await core.lost())
        head, body = await connection.packet()
        assert (head, body[0]) == (packets.DISCONNECT, 0x94 if properties else packets.PROTOCOL_ERROR)


async def test_mosquitto_accepts_aliases_for_every_qos(mosquitto: Mosquitto) -> None:
    """It takes ten aliases."""
    async with connected(mosquitto.url) as receiver, connected(mosquitto.url) as core:
        sink, _ = await receiver.subscribe("alias/#", qos="1")
        for qos in "012":
            for _ in range(5):
                for number in range(12):
                    await core.publish(f"alias/{number}", qos.encode(), qos=qos)
        messages = await sink.count(180)
        assert [message.channel for message in messages] == [f"alias/{number}" for number in range(12)] * 15

"""A hostile broker costs this side no more than linear time and bounded memory, and is told why it is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from messaging.errors import ConnectionLostError
from messaging.testing.tables import table
from messaging_adapters.mqtt import packets, transport
from tests.mqtt.harness import Core
from tests.mqtt.peer import Connection, Peer, refused, session, subscribed

#: seconds of CPU for what a quadratic algorithm takes more than ten seconds for
BUDGET = 3.0
DUPLICATE = b"\x0b\x01"


@contextmanager
def within_budget() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < BUDGET


def publish(connection: Connection, properties: bytes, packet_id: int = 0, payload: bytes = b"x") -> None:
    """Send a PUBLISH to ``t``, with QoS 1 if it has a packet id."""
    head, identity = (0x32, packet_id.to_bytes(2, "big")) if packet_id else (0x30, b"")
    connection.send(head, packets.text("t") + identity + packets.varint(len(properties)) + properties + payload)


def identifier_of(subscribe: bytes) -> bytes:
    """The property with the subscription identifier of a SUBSCRIBE."""
    assert subscribe[3:4] == b"\x0b", subscribe
    return subscribe[3 : 3 + subscribe[2]]


async def end_of(core: Core, connection: Connection) -> tuple[ConnectionLostError, int]:
    """How the connection ended: the error, and the reason code of DISCONNECT."""
    body = await connection.expect(packets.DISCONNECT)
    await connection.end()
    error = await core.lost()
    assert type(error) is ConnectionLostError
    return error, body[0]


async def test_one_message_is_delivered_however_often_its_identifier_is_repeated() -> None:
    async with session() as (core, _, connection):
        subscribing = asyncio.create_task(core.subscribe("t", qos="1"))
        identifier = identifier_of(await connection.suback())
        sink, _ = await subscribing
        with within_budget():
            publish(connection, identifier * 200_000, packet_id=7)
            publish(connection, b"", packet_id=8, payload=b"last")
            messages = await sink.count(2)
        assert sink.payloads == [b"x", b"last"]
        core.acknowledge(*messages)
        assert await connection.expect(packets.PUBACK) == b"\0\x07"


async def test_one_message_is_delivered_for_an_earlier_and_a_later_identifier_of_a_subscription() -> None:
    async with session() as (core, _, connection):
        identifiers, sinks = b"", []
        for _ in range(2):
            subscribing = asyncio.create_task(core.subscribe("t", qos="1"))
            identifiers += identifier_of(await connection.suback())
            sinks.append((await subscribing)[0])
        publish(connection, identifiers)
        publish(connection, b"", payload=b"last")
        for sink in sinks:
            await sink.count(2)
            assert sink.payloads == [b"x", b"last"]


async def test_distinct_identifiers_cost_linear_time() -> None:
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection)
        with within_budget():
            publish(connection, b"".join(b"\x0b" + packets.varint(1 + each) for each in range(200_000)))
            await sink.count(1)
        assert sink.payloads == [b"x"]


@table("entry", [DUPLICATE, b"\x26\0\0\0\0"], ids=["identifiers", "user properties"])
async def test_more_properties_than_are_read_end_the_connection(entry: bytes) -> None:
    async with session() as (core, _, connection):
        await subscribed(core, connection)
        with within_budget():
            publish(connection, entry * (packets.MAX_PROPERTIES // len(entry) + 1))
            error, reason = await end_of(core, connection)
        assert reason == packets.QUOTA_EXCEEDED
        assert f"at most {packets.MAX_PROPERTIES} are read" in str(error)


@table(
    "entry",
    [
        pytest.param(b"\x01\x00", id="payload format"),
        pytest.param(b"\x02\0\0\0\x01", id="expiry"),
        pytest.param(b"\x03\0\0", id="content type"),
        pytest.param(b"\x08\0\x01r", id="response topic"),
        pytest.param(b"\x09\0\0", id="correlation data"),
        pytest.param(b"\x23\0\x01", id="topic alias"),
    ],
)
async def test_a_repeated_property_that_may_come_once_ends_the_connection(entry: bytes) -> None:
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection)
        publish(connection, entry)
        await sink.count(1)
        publish(connection, entry * 2)
        error, reason = await end_of(core, connection)
        assert reason == packets.PROTOCOL_ERROR
        assert f"repeated property 0x{entry[0]:02X}" in str(error)


@table("kind", [packets.SUBACK, packets.PUBACK, packets.DISCONNECT, 0xF0])
async def test_a_large_packet_other_than_publish_ends_the_connection_before_its_body_arrives(kind: int) -> None:
    async with session() as (core, _, connection):
        connection.write(bytes((kind,)) + packets.varint(packets.MAX_REMAINING))
        error, reason = await end_of(core, connection)
        assert reason == packets.QUOTA_EXCEEDED
        assert f"at most {packets.MAX_CONTROL} are read" in str(error)


async def test_a_large_connack_fails_to_connect_in_linear_time(peer: Peer) -> None:
    properties = b"\x26\0\0\0\0" * 200_000
    body = b"\0\0" + packets.varint(len(properties)) + properties
    with within_budget():
        error = await refused(Core(peer.url), peer, b"\x20" + packets.varint(len(body)) + body)
    assert f"at most {packets.MAX_CONTROL} are read" in str(error)


async def test_packet_ids_given_to_other_messages_cost_linear_time() -> None:
    """Beyond Receive Maximum, and without the acknowledgements that would free the ids."""
    count = 20_000

    async with session(receive_maximum=1) as (core, _, connection):
        sink, _ = await subscribed(core, connection, qos="1")
        with within_budget():
            for turn in range(2):
                ids = range(1, count + 1) if turn == 0 else range(count, 0, -1)
                for packet_id in ids:
                    connection.deliver("t", b"%d" % turn, packet_id, qos=1)
            await sink.count(2 * count)


@table("kind", [packets.PUBREC, packets.PUBREL | 2], ids=hex)
async def test_a_broker_that_reads_no_answers_is_disconnected(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it stays within a limit, however much it sends."""
    monkeypatch.setattr(transport, "UNREAD", 64 * 1024)

    async with session() as (core, _, connection):
        connection.pause()

        async def flood() -> None:
            while True:
                connection.write((bytes((kind, 2)) + b"\0\x07") * 10_000)
                await connection.drain()

        flooding = asyncio.create_task(flood())
        try:
            error = await core.lost()
        finally:
            flooding.cancel()
        assert "bytes of answers to its packets wait for it to read them" in str(error)


async def test_a_broker_that_reads_answers_may_send_as_many_packets_as_it_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "UNREAD", 200 * 1024)

    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection)
        for _ in range(20):
            connection.write(b"\x62\x02\0\x07" * 10_000)
            await connection.skip(4 * 10_000)
        publish(connection, b"")
        await sink.count(1)

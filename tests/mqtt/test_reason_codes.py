"""What the broker gives as its reason reaches the user: as ``code``, ``detail`` and text, and never with a password."""

from __future__ import annotations

import asyncio
import logging
import traceback

import pytest

from messaging.errors import (
    AuthenticationError,
    BrokerError,
    ConnectFailedError,
    ConnectionLostError,
    PublishRefusedError,
    SubscriptionRefusedError,
    TakenOverError,
)
from messaging.testing.tables import table
from messaging_adapters.mqtt import packets
from tests.mqtt.harness import Core, settled
from tests.mqtt.peer import Peer, accept, refused, sent, session, subscribed

PASSWORD = "secret-1"


def reason(text: str) -> bytes:
    """Properties, with their length: a reason string."""
    properties = b"\x1f" + packets.text(text)
    return packets.varint(len(properties)) + properties


@table(
    "code, name, kind",
    [
        (0x80, "Unspecified error", ConnectFailedError),
        (0x85, "Client identifier not valid", ConnectFailedError),
        (0x86, "Bad user name or password", AuthenticationError),
        (0x87, "Not authorized", AuthenticationError),
        (0x89, "Server busy", ConnectFailedError),
        (0x8A, "Banned", ConnectFailedError),
        (0x97, "Quota exceeded", ConnectFailedError),
        (0x9F, "Connection rate exceeded", ConnectFailedError),
    ],
)
@table("detail", [None, "come back later"])
async def test_a_refused_connection_has_code_and_detail(
    peer: Peer, code: int, name: str, kind: type[BrokerError], detail: str | None
) -> None:
    body = bytes((0, code)) + (reason(detail) if detail else b"\0")
    error = await refused(Core(peer.url), peer, bytes((packets.CONNACK, len(body))) + body)
    assert type(error) is kind
    assert (error.code, error.detail) == (code, detail)
    assert name in str(error)
    assert detail is None or f"({detail})" in str(error)


@table("code, name", [(0x91, "Packet identifier in use"), (0xEE, "reason code 0xEE")])
async def test_reason_codes_that_the_specification_does_not_list_are_reported(peer: Peer, code: int, name: str) -> None:
    core = Core(peer.url)
    refusal = await refused(core, peer, bytes((packets.CONNACK, 3, 0, code, 0)))
    assert refusal.code == code
    assert f"refused the connection: {name}" in str(refusal)
    connection, _ = await accept(core, peer)
    connection.send(packets.DISCONNECT, bytes((code, 0)))
    error = await core.lost()
    assert isinstance(error, ConnectionLostError)
    assert f"disconnected this client: {name}" in str(error)
    assert error.code == code


# --- SUBACK, UNSUBACK


@table(
    "code, name",
    [
        (0x80, "Unspecified error"),
        (0x83, "Implementation specific error"),
        (0x87, "Not authorized"),
        (0x8F, "Topic filter invalid"),
        (0x91, "Packet identifier in use"),
        (0x97, "Quota exceeded"),
        (0x9E, "Shared subscription not supported"),
        (0xA1, "Subscription identifiers not supported"),
        (0xA2, "Wildcard subscription not supported"),
        (0x95, "Packet too large"),  # listed for other packets only
        (0xEE, "reason code 0xEE"),  # listed nowhere
        (0xFF, "reason code 0xFF"),
    ],
)
@table("detail", [None, "ask Bob"])
async def test_a_refused_subscription_has_code_and_detail(code: int, name: str, detail: str | None) -> None:
    async with session() as (core, _, connection):
        subscribing = asyncio.create_task(core.subscribe("a/#"))
        body = await connection.expect(0x80)
        connection.send(packets.SUBACK, body[:2] + (reason(detail) if detail else b"\0") + bytes((code,)))
        with pytest.raises(SubscriptionRefusedError) as caught:
            await subscribing
        assert (caught.value.code, caught.value.detail) == (code, detail)
        assert f"'a/#': {name}" in str(caught.value)
        assert detail is None or f"({detail})" in str(caught.value)
        assert not core.losses


@table("granted", [1, 2])
async def test_a_subscription_may_be_granted_less_than_it_asked_for(granted: int) -> None:
    async with session() as (core, _, connection):
        subscribing = asyncio.create_task(core.subscribe("t", qos="2"))
        await connection.suback(granted)
        sink, _ = await subscribing
        connection.deliver("t", b"x", 1, granted)
        (message,) = await sink.count(1)
        assert message.extensions["qos"] == str(granted)


@table(
    "code, told",
    [(0x00, None), (0x11, None), (0x87, "Not authorized (ask Bob)"), (0xEE, r"reason code 0xEE (ask Bob)")],
)
async def test_a_refused_unsubscription_is_logged_and_ends_the_stream(
    code: int, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with session() as (core, _, connection):
        sink, handle = await subscribed(core, connection)
        unsubscribing = asyncio.create_task(core.adapter.unsubscribe(handle))
        body = await connection.expect(0xA0)
        connection.send(packets.UNSUBACK, body[:2] + reason("ask Bob") + bytes((code,)))
        await unsubscribing
        connection.deliver("t", b"late")
        again, _ = await subscribed(core, connection, "u")
        connection.deliver("u", b"")
        await again.count(1)
        assert not sink.arrived
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if told is None:
        assert not warnings
    else:
        (warning,) = warnings
        assert f"'t': {told}" in warning


# --- PUBACK, PUBREC, PUBCOMP


@table(
    "code, name",
    [
        (0x80, "Unspecified error"),
        (0x83, "Implementation specific error"),
        (0x87, "Not authorized"),
        (0x90, "Topic name invalid"),
        (0x97, "Quota exceeded"),
        (0x99, "Payload format invalid"),
        (0x95, "Packet too large"),  # listed for other packets only
        (0xEE, "reason code 0xEE"),
        (0xFF, "reason code 0xFF"),
    ],
)
@table("qos", ["1", "2"])
@table("detail", [None, "ask Bob"])
async def test_a_refused_message_has_code_and_detail_and_frees_its_slot(
    code: int, name: str, qos: str, detail: str | None
) -> None:
    async with session(b"\x21\x00\x01") as (core, _, connection):
        out, publish = await sent(core, connection, "some/where", qos=qos)
        answer = publish.id.to_bytes(2, "big") + bytes((code,)) + (reason(detail) if detail else b"")
        connection.send(packets.PUBACK if qos == "1" else packets.PUBREC, answer)
        with pytest.raises(PublishRefusedError) as caught:
            await out.done
        assert (caught.value.code, caught.value.detail) == (code, detail)
        assert f"'some/where': {name}" in str(caught.value)
        assert detail is None or f"({detail})" in str(caught.value)
        out, publish = await sent(core, connection, "t", qos="1")  # and no PUBREL before it
        await connection.confirm(out, publish)
        assert not core.losses


@table("code", [0x00, 0x10])
async def test_a_message_without_subscribers_is_no_failure(code: int) -> None:
    async with session() as (core, _, connection):
        for qos, kind in (("1", packets.PUBACK), ("2", packets.PUBREC)):
            out, publish = await sent(core, connection, "t", b"", qos=qos)
            packet_id = publish.id
            connection.send(kind, packet_id.to_bytes(2, "big") + bytes((code,)) + reason("no subscribers"))
            if kind == packets.PUBREC:
                await connection.expect(packets.PUBREL)
                connection.answer(packets.PUBCOMP, packet_id)
            await out.done


async def test_a_broker_that_has_forgotten_a_released_message_has_taken_it() -> None:
    """PUBCOMP with 0x92, packet identifier not found: after PUBREC the message is the broker's (MQTT 5, 4.3.3)."""
    async with session() as (core, _, connection):
        out, publish = await sent(core, connection, "t", b"", qos="2")
        packet_id = publish.id
        connection.answer(packets.PUBREC, packet_id)
        await connection.expect(packets.PUBREL)
        connection.answer(packets.PUBCOMP, packet_id, 0x92)
        await out.done
        assert not core.losses


@table(
    "code, name, kind",
    [
        (0x80, "Unspecified error", ConnectionLostError),
        (0x8B, "Server shutting down", ConnectionLostError),
        (0x8D, "Keep alive timeout", ConnectionLostError),
        (0x8E, "Session taken over", TakenOverError),
        (0x93, "Receive maximum exceeded", ConnectionLostError),
        (0x98, "Administrative action", ConnectionLostError),
        (0x9C, "Use another server", ConnectionLostError),
    ],
)
@table("detail", [None, "ask Bob"])
async def test_a_disconnect_has_code_and_detail(
    code: int, name: str, kind: type[BrokerError], detail: str | None
) -> None:
    async with session() as (core, _, connection):
        connection.send(packets.DISCONNECT, bytes((code,)) + (reason(detail) if detail else b"\0"))
        error = await core.lost()
        assert type(error) is kind
        assert isinstance(error, BrokerError)
        assert (error.code, error.detail) == (code, detail)
        assert f"disconnected this client: {name}" in str(error)
        assert detail is None or f"({detail})" in str(error)


async def test_a_connection_that_breaks_has_no_code() -> None:
    async with session() as (core, _, connection):
        connection.abort()
        error = await core.lost()
        assert isinstance(error, BrokerError)
        assert (error.code, error.detail) == (None, None)


@table("size", [65, 5000])
async def test_a_packet_over_our_limit_ends_the_connection_with_0x95(peer: Peer, size: int) -> None:
    core = Core(peer.url, max_packet_size=64)
    connection, _ = await accept(core, peer)
    assert b"\x27\x00\x00\x00\x40" in connection.connect
    sink, _ = await subscribed(core, connection)
    connection.deliver("t", bytes(64 - 6))
    await sink.count(1)
    connection.deliver("t", bytes(size - 6))
    assert "at most 64 were agreed" in str(await core.lost())
    assert await connection.packet() == (packets.DISCONNECT, bytes((packets.PACKET_TOO_LARGE, 0)))
    assert len(sink.arrived) == 1
    await core.adapter.close()


async def test_a_password_that_the_broker_repeats_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    """In any of the packets that have a reason string."""
    caplog.set_level(logging.DEBUG)
    told = reason(f"not with {PASSWORD}")
    async with session(username="alice", password=PASSWORD) as (core, peer, connection):
        out, publish = await sent(core, connection, "t", b"", qos="1")
        connection.send(packets.PUBACK, publish.id.to_bytes(2, "big") + b"\x87" + told)
        _, handle = await subscribed(core, connection)
        unsubscribing = asyncio.create_task(core.adapter.unsubscribe(handle))
        body = await connection.expect(0xA0)
        connection.send(packets.UNSUBACK, body[:2] + told + b"\x87")
        await unsubscribing
        subscribing = asyncio.create_task(core.subscribe("t"))
        body = await connection.expect(0x80)
        connection.send(packets.SUBACK, body[:2] + told + b"\x87")
        await settled(out.done, subscribing)
        connection.send(packets.DISCONNECT, b"\x87" + told)
        lost = await core.lost()
        body = b"\0\x88" + told
        refusal = await refused(core, peer, bytes((packets.CONNACK, len(body))) + body)
    for error in (out.error, subscribing.exception(), lost, refusal):
        assert isinstance(error, BrokerError)
        assert error.code
        assert error.detail is None
        assert PASSWORD not in "".join(traceback.format_exception(error)) + repr(vars(error))
    assert PASSWORD not in caplog.text


async def test_a_reason_string_without_the_password_is_shown() -> None:
    async with session(username="alice", password=PASSWORD) as (core, _, connection):
        connection.send(packets.DISCONNECT, b"\x8b" + reason("back in 5 minutes"))
        assert "back in 5 minutes" in str(await core.lost())

"""CONNECT is what paho makes, and answers of the broker are read or reported."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from pydantic import SecretStr

from messaging.errors import AuthenticationError, ConnectFailedError, ConnectionLostError
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import eventually_async
from messaging_adapters.mqtt import MqttSettings, handshake, packets
from messaging_adapters.mqtt.handshake import ConnectTarget, Will
from tests.certificates import LOOPBACK, Authority
from tests.mqtt.conftest import both_versions
from tests.mqtt.foreign import MemorySocket
from tests.mqtt.harness import Core, connected, lasting
from tests.mqtt.peer import Peer, farewell, session, subscribed

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=20)


@st.composite
def wills(draw: st.DrawFn) -> Will:
    properties = packets.PacketProperties()
    properties.content_type = draw(st.none() | TEXT)
    properties.expiry = draw(st.none() | st.integers(0, 2**32 - 1))
    properties.user = draw(st.lists(st.tuples(TEXT, TEXT), max_size=3))
    delay = draw(st.integers(0, 2**32 - 1))
    return Will(
        draw(TEXT), draw(st.binary(max_size=200)), draw(st.integers(0, 2)), draw(st.booleans()), properties, delay
    )


@given(
    st.sampled_from(["5", "3.1.1"]), st.booleans(), TEXT, st.none() | TEXT, st.none() | TEXT, st.integers(0, 65_535),
    st.none() | wills(),
)  # fmt: skip
def test_connect_is_what_paho_makes(
    version: str,
    clean: bool,
    client_id: str,
    username: str | None,
    password: str | None,
    keepalive: int,
    will: Will | None,
) -> None:
    settings = MqttSettings(version=version, keepalive=keepalive, session_expiry=7 if version == "5" else 0)
    secret = None if password is None else SecretStr(password)
    target = ConnectTarget("host", 1883, "name", settings, client_id, username, secret)
    v5 = version == "5"
    memory = MemorySocket(
        CallbackAPIVersion.VERSION2,
        client_id,
        clean_session=None if v5 else clean,
        protocol=mqtt.MQTTv5 if v5 else mqtt.MQTTv311,
    )
    memory.client.username_pw_set(username, password if username is not None else None)
    if will is not None:
        given = None
        if v5:
            given = Properties(PacketTypes.WILLMESSAGE)  # type: ignore[no-untyped-call]
            given.UserProperty = will.properties.user
            if will.delay:
                given.WillDelayInterval = will.delay
            if will.properties.content_type is not None:
                given.ContentType = will.properties.content_type
            if will.properties.expiry is not None:
                given.MessageExpiryInterval = will.properties.expiry
        memory.client.will_set(will.topic, will.payload, will.qos, will.retain, given)
    options: dict[str, Any] = {}
    if v5:
        wanted = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        wanted.ReceiveMaximum, wanted.SessionExpiryInterval, wanted.TopicAliasMaximum = 1024, 7, 32
        options = {"clean_start": clean, "properties": wanted}
    memory.connect(lambda host, port: memory.client.connect(host, port, keepalive, **options))
    assert handshake.connect_packet(target, clean_start=clean, will=will) == memory.take()


@table("what", ["username", "password"])
def test_credentials_that_no_packet_carries_are_refused(what: str) -> None:
    values = {"username": "u", "password": "secret"}
    values[what] = "\N{SNOWMAN}" * 21_846  # 65,538 bytes
    settings = MqttSettings()
    target = ConnectTarget("host", 1883, "name", settings, "c", values["username"], SecretStr(values["password"]))
    with pytest.raises(ValueError, match=r"has more than 65,535 bytes in UTF-8") as caught:
        handshake.connect_packet(target, clean_start=True, will=None)
    assert values["password"] not in repr(caught.traceback[-1].locals)


@pytest.mark.usefixtures("needs_mosquitto")
@both_versions
async def test_every_packet_passes(mosquitto: Mosquitto, version: str) -> None:
    async with connected(mosquitto.url, **lasting(version)) as core:
        sink, handle = await core.subscribe("all/#", qos="2")
        for qos in "012":
            await core.publish("all/x", qos.encode(), qos=qos)
        core.acknowledge(*await sink.count(3))
        assert sink.payloads == [b"0", b"1", b"2"]
        core.vanish()
        await core.lost()
        assert await core.reopen() is True
        await core.adapter.unsubscribe(handle)


@pytest.mark.usefixtures("needs_mosquitto")
async def test_tls_and_a_will(authority: Authority) -> None:
    certificate, key = authority.issue("ways", LOOPBACK)

    with Mosquitto([f"certfile {certificate}", f"keyfile {key}"]) as broker:
        url = f"mqtts://127.0.0.1:{broker.port}"
        async with connected(url, cafile=authority.cafile) as watcher:
            sink, _ = await watcher.subscribe("will")
            core = Core(url, cafile=authority.cafile)
            await core.open()
            will = core.out("will", b"gone", last_will=True)
            await core.adapter.set_will(will)
            await core.lost()
            await core.open()
            await will.done
            core.vanish()
            assert (await sink.count(1))[0].payload == b"gone"
            await core.adapter.close()


@table(
    "version, answer, error, text",
    [
        ("5", b"\x20\x03\x00\x86\x00", AuthenticationError, "refused a client without user name"),
        ("5", b"\x20\x0a\x00\x97\x07\x1f\x00\x04full", ConnectFailedError, r"Quota exceeded \(full\)"),
        ("3.1.1", b"\x20\x02\x00\x05", AuthenticationError, "Not authorized"),
        ("3.1.1", b"\x20\x02\x00\x02", ConnectFailedError, "refused the connection"),
        ("3.1.1", b"\x20\x02\x00\x09", ConnectFailedError, "Unspecified error"),
        ("5", b"\x20\x02\x00\x01", ConnectFailedError, "Unsupported protocol version; try version=3.1.1"),
        ("5", b"\x20\x03\x00\xf0\x00", ConnectFailedError, "reason code 0xF0"),
        ("5", b"\x20\x01\x00", ConnectFailedError, "Protocol error"),
        ("5", b"\x20\x03\x00\x10\x00", ConnectFailedError, "Protocol error"),
        ("5", b"\x20\x06\x00\x00\x03\x21\x00\x00", ConnectFailedError, "Protocol error"),
        ("3.1.1", b"\x20\x03\x00\x00\x00", ConnectFailedError, "Protocol error"),
        ("3.1.1", b"\xe0\x00", ConnectFailedError, "its first packet is not CONNACK"),
    ],
)
async def test_a_refusing_or_malformed_connack_is_reported(
    peer: Peer, version: str, answer: bytes, error: type[Exception], text: str
) -> None:
    opening = asyncio.create_task(Core(peer.url, version=version).open())
    connection, _ = await peer.accept()
    connection.write(answer)
    with pytest.raises(error, match=text):
        await opening


async def test_connack_is_read_and_the_reason_of_a_disconnect_told() -> None:
    async with session(b"\x12\x00\x02me\x13\x00\x05\x21\x00\x03\x22\x00\x07") as (core, _, connection):
        assert core.adapter.capabilities.client_id == "me"
        connection.send(packets.DISCONNECT, b"\x8b\x00")
        assert "disconnected this client: Server shutting down" in str(await core.lost())


async def test_connect_and_all_packets_of_this_side_are_the_same(peer: Peer) -> None:
    core = Core(f"mqtt://u:p@127.0.0.1:{peer.port}", client_id="me", keepalive=7, session_expiry=9)
    opening = asyncio.create_task(core.open())
    connection, connect = await peer.accept()
    assert connect == (
        b"\x00\x04MQTT\x05\xc2\x00\x07\x0b\x11\x00\x00\x00\x09\x21\x04\x00\x22\x00\x20\x00\x02me\x00\x01u\x00\x01p"
    )
    connection.connack()
    await opening
    _, handle = await subscribed(core, connection, "a")
    unsubscribing = asyncio.create_task(core.adapter.unsubscribe(handle))
    assert await connection.packet() == (0xA2, b"\x00\x02\x00\x00\x01a")
    connection.send(packets.UNSUBACK, b"\x00\x02\x00\x00")
    await unsubscribing
    await farewell(core, connection)


async def test_a_connection_that_ends_or_is_cancelled_leaves_no_socket() -> None:
    def sockets() -> int:
        gc.collect()
        return sum(
            str(each.readlink()).startswith("socket:") for each in Path("/proc/self/fd").iterdir() if each.exists()
        )

    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = sockets()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await Core(f"mqtt://127.0.0.1:{silent.getsockname()[1]}").open()
        await eventually_async(lambda: sockets() == before, "sockets are closed")
    async with session() as (core, _, connection):
        connection.abort()
        assert isinstance(await core.lost(), ConnectionLostError)


async def test_packet_ids_in_use_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with session() as (core, _, connection):
        options = packets.subscribe_options(0, no_local=False, as_published=False, retain_handling=0)
        established = core.adapter.session.connection
        assert established is not None
        monkeypatch.setattr(core.adapter.session.window, "handshakes", dict.fromkeys(range(200)))
        request = asyncio.create_task(established.requests.subscribe("a", options, None))
        body = await connection.suback()
        assert body[:2] == (200).to_bytes(2, "big")
        await request

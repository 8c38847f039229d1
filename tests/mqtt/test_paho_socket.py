"""Both ways to give paho a socket carry the same handshake; the one on its public API alone is for unknown releases."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from pathlib import Path

import pytest

from messaging.errors import AuthenticationError, ConnectFailedError, ConnectionLostError
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import eventually_async
from messaging_adapters.mqtt import control, packets
from tests.certificates import LOOPBACK, Authority
from tests.mqtt.conftest import both_versions
from tests.mqtt.harness import Core, connected, lasting
from tests.mqtt.peer import Peer, farewell, session, subscribed

pytestmark = pytest.mark.usefixtures("needs_mosquitto", "way")


@pytest.fixture(params=["memory", "loopback"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How paho gets its socket in this test."""
    if request.param == "loopback":
        monkeypatch.setattr(control, "TESTED_RELEASES", frozenset())
    assert control.is_tested() is (request.param == "memory")
    return str(request.param)


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
        ("5", b"\x20\x01\x00", ConnectFailedError, "Protocol error"),
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


async def test_connect_and_all_packets_of_this_side_are_the_same(peer: Peer, way: str) -> None:
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


async def test_a_connection_that_ends_or_is_cancelled_leaves_no_socket(way: str) -> None:
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


def test_closing_while_it_connects_leaves_no_socket(way: str) -> None:
    """One that is left open is a warning when it is collected, and so an error here."""
    carrier = control.new_socket(control.mqtt.CallbackAPIVersion.VERSION2)

    def connect(host: str, port: int) -> None:
        carrier.client.connect(host, port)
        carrier.close()

    with contextlib.suppress(OSError):
        carrier.connect(connect)
    gc.collect()


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


def test_an_unknown_release_is_logged(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, control.__name__):
        control.new_socket(control.mqtt.CallbackAPIVersion.VERSION2).close()
    assert ("loopback interface" in caplog.text) is (way == "loopback")


@table("release, known", [("2.2.0", True), ("2.2.7", True), ("2.20.0", False), ("3.0", False)])
def test_only_tested_releases_are_reached_below(way: str, release: str, known: bool) -> None:
    assert control.is_tested(release) is (known and way == "memory")

"""MQTT over WebSocket: ``ws://`` and ``wss://``."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import socket
from collections.abc import Iterator

import pytest
from websockets.frames import Frame, Opcode

import messaging
from messaging.errors import ConnectFailedError, InvalidOptionError
from messaging.testing.brokers import Mosquitto, free_port
from messaging.testing.tables import table
from tests.certificates import LOOPBACK, Authority
from tests.mqtt.harness import Core, connected

pytestmark = pytest.mark.usefixtures("needs_mosquitto")

CONNACK = b"\x20\x03\x00\x00\x00"


class WebBroker(Mosquitto):
    """Mosquitto with a second listener, for WebSocket: it does not start with that kind alone."""

    def __init__(self, *lines: str) -> None:
        self.web_port = free_port()
        # its address is ignored, but not its interface
        super().__init__([f"listener {self.web_port} lo", "protocol websockets", *lines])


@pytest.fixture(scope="module")
def broker(needs_mosquitto: None) -> Iterator[WebBroker]:
    with WebBroker() as broker:
        yield broker


def url(broker: WebBroker) -> str:
    return f"ws://127.0.0.1:{broker.web_port}/mqtt"


@table("version", ["5", "3.1.1"])
async def test_messages_of_every_size_pass(broker: WebBroker, version: str) -> None:
    async with connected(url(broker), version=version) as core, connected(broker.url) as plain:
        sink, _ = await core.subscribe("ws/small/#", qos="2")
        plain_sink, _ = await plain.subscribe("ws/#", qos="2")
        given = [(size, qos) for size in (0, 1, 125, 126, 127) for qos in "012"] + [(65_535, "1"), (65_536, "1")]
        await core.send(*[core.out(f"ws/small/{size}", bytes(size), qos=qos) for size, qos in given])
        # only this way: mosquitto 2.0 takes a second to send 50 kB, and longer if nothing else happens
        await core.send(core.out("ws/large", bytes(1_000_000), qos="1"))
        messages = await sink.count(len(given))
        assert sorted(len(message.payload) for message in messages) == sorted(size for size, _ in given)
        assert all(message.channel == f"ws/small/{len(message.payload)}" for message in messages)
        core.acknowledge(*messages)
        await plain_sink.count(len(given) + 1)
        assert max(len(payload) for payload in plain_sink.payloads) == 1_000_000
        plain.acknowledge(*plain_sink.arrived)


async def test_wss_verifies_as_mqtts_does(authority: Authority) -> None:
    certificate, key = authority.issue("broker", LOOPBACK)
    with WebBroker(f"certfile {certificate}", f"keyfile {key}") as broker:
        where = f"wss://127.0.0.1:{broker.web_port}/mqtt"
        async with connected(where, cafile=authority.cafile) as core:
            sink, _ = await core.subscribe("wss", qos="1")
            await core.publish("wss", bytes(20_000), qos="1")
            assert len((await sink.count(1))[0].payload) == 20_000
        with pytest.raises(ConnectFailedError, match="certificate"):
            await Core(where).open()


def test_through_the_public_api_over_a_lost_connection(broker: WebBroker) -> None:
    with messaging.connect(url(broker)) as m, m.subscribe("ws/api", qos=1) as stream:
        m.publish("ws/api", b"1", qos=1).result(10)
        assert stream.receive(10).payload == b"1"
        transport = m._adapter.session.connection.transport  # type: ignore[attr-defined]
        socket.socket.shutdown(transport._sock, socket.SHUT_RDWR)
        m.publish("ws/api", b"2", qos=1).result(10)
        assert stream.receive(10).payload == b"2"


def test_tls_options_need_wss() -> None:
    with pytest.raises(InvalidOptionError, match="mqtts:// or wss://"):
        Core("ws://localhost?cafile=x")


async def test_a_peer_that_speaks_no_websocket_is_refused(mosquitto: Mosquitto) -> None:
    """A plain MQTT broker does not answer a GET."""
    with pytest.raises(ConnectFailedError):
        await Core(f"ws://127.0.0.1:{mosquitto.port}").open()


class Server:
    """A WebSocket server that does what a test tells it."""

    def __init__(self, response: bytes | None = None) -> None:
        self._response = response
        self.request = b""
        self.ready = asyncio.Event()

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/some%20path"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.writer.transport.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.request = await reader.readuntil(b"\r\n\r\n")
        if self._response is not None:
            writer.write(self._response)
            writer.close()
            return
        key = next(line for line in self.request.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key")).split()[1]
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Protocol: mqtt\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )
        await self.frame()  # CONNECT
        self.ready.set()

    async def frame(self) -> tuple[int, bytes]:
        """Opcode and payload of a short frame."""
        head, length = await self.reader.readexactly(2)
        assert length & 0x80, "not masked"
        mask = await self.reader.readexactly(4)
        data = await self.reader.readexactly(length & 0x7F)
        return head & 15, bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))

    def send(self, opcode: Opcode, data: bytes, *, fin: bool = True) -> None:
        self.writer.write(Frame(opcode, data, fin).serialize(mask=False))


@table(
    "response, text",
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "404"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "401"),
        (b"\x20\x02\x00\x00", "some%20path"),
        (b"", "some%20path"),
    ],
)
async def test_a_refused_handshake_says_why(response: bytes, text: str) -> None:
    async with Server(response) as server:
        with pytest.raises(ConnectFailedError, match=text):
            await Core(server.url).open()
        assert server.request.startswith(b"GET /some%20path HTTP/1.1")
        assert b"Sec-WebSocket-Protocol: mqtt" in server.request


async def test_pings_are_answered_and_packets_may_be_cut_anywhere() -> None:
    async with Server() as server:
        core = Core(server.url)
        opening = asyncio.create_task(core.open())
        await server.ready.wait()
        server.send(Opcode.BINARY, CONNACK[:2], fin=False)
        server.send(Opcode.PING, b"there?")
        server.send(Opcode.CONT, CONNACK[2:])
        await opening
        assert await server.frame() == (Opcode.PONG, b"there?")
        await core.adapter.close()


@table(
    "data, text",
    [
        (Frame(Opcode.TEXT, b"hello").serialize(mask=False), "of text"),
        (b"\x82\x81\0\0\0\0x", "malformed WebSocket"),  # masked
        (b"\xf7\x00", "malformed WebSocket"),
        (Frame(Opcode.CLOSE, b"\x03\xe9").serialize(mask=False), "closed by the broker"),
    ],
)
async def test_an_invalid_websocket_frame_ends_the_connection(data: bytes, text: str) -> None:
    async with Server() as server:
        core = Core(server.url)
        opening = asyncio.create_task(core.open())
        await server.ready.wait()
        server.send(Opcode.BINARY, CONNACK)
        await opening
        server.writer.write(data)
        assert text in str(await core.lost())
        await core.adapter.close()


async def test_the_password_is_not_logged_on_debug(broker: WebBroker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with connected(url(broker), username="me", password="hunter2-hunter2"):
        pass
    assert "hunter2" not in caplog.text
    assert b"hunter2".hex() not in caplog.text.replace(" ", "")

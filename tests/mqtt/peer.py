"""A broker that does what a test tells it, byte by byte: for what mosquitto cannot be made to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from messaging.errors import ConnectFailedError
from messaging.testing.waiting import PATIENCE
from messaging_adapters.mqtt import packets
from tests.doubles.core import BrokerEnd, Listener
from tests.mqtt.harness import Core, Out, Sink


class Connection(BrokerEnd):
    """One client's connection."""

    #: body of CONNECT
    connect = b""

    async def packet(self) -> tuple[int, bytes]:
        """The next packet: its first byte, and what follows the length."""
        async with asyncio.timeout(PATIENCE):
            head = (await self._reader.readexactly(1))[0]
            length = shift = 0
            while True:
                digit = (await self._reader.readexactly(1))[0]
                length |= (digit & 127) << shift
                shift += 7
                if digit < 128:
                    return head, await self._reader.readexactly(length)

    async def skip(self, size: int) -> None:
        """Read some bytes, whatever they are."""
        async with asyncio.timeout(PATIENCE):
            await self._reader.readexactly(size)

    async def expect(self, kind: int) -> bytes:
        """The body of the next packet, which is of this type."""
        head, body = await self.packet()
        assert head & 0xF0 == kind, f"{head:#04x} {body!r}"
        return body

    async def publish(self, v5: bool = True) -> packets.Publish:
        """The next packet, a PUBLISH."""
        head, body = await self.packet()
        assert head & 0xF0 == packets.PUBLISH, f"{head:#04x} {body!r}"
        return packets.parse_publish(head, body, v5)

    def send(self, head: int, body: bytes) -> None:
        self.write(bytes((head,)) + packets.varint(len(body)) + body)

    async def drain(self) -> None:
        """Wait until the client has taken most of the written bytes."""
        await self._writer.drain()

    def pause(self) -> None:
        """Read nothing any more, as if the line was cut: only the buffers still take something."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a socket's

    def connack(self, properties: bytes = b"", *, session: bool = False, reason: int = 0) -> None:
        self.send(0x20, bytes((session, reason)) + packets.varint(len(properties)) + properties)

    def connack_v3(self, code: int = 0) -> None:
        """Accept, or refuse, a client of version 3.1.1."""
        self.send(0x20, bytes((0, code)))

    def answer(self, kind: int, packet_id: int, reason: int = 0) -> None:
        self.send(kind, packet_id.to_bytes(2, "big") + (bytes((reason,)) if reason else b""))

    async def confirm(self, out: Out, publish: packets.Publish) -> None:
        """Confirm a message of QoS 1, and wait for its outcome."""
        self.answer(packets.PUBACK, publish.id)
        await out.result()

    async def complete(self, packet_id: int) -> None:
        """Take a message of QoS 2."""
        self.answer(packets.PUBREC, packet_id)
        await self.expect(packets.PUBREL)
        self.answer(packets.PUBCOMP, packet_id)

    def deliver(self, topic: str, payload: bytes, packet_id: int = 0, qos: int = 0, flags: int = 0) -> None:
        """Send a PUBLISH without properties (version 5)."""
        body = packets.text(topic) + (packet_id.to_bytes(2, "big") if qos else b"") + b"\0" + payload
        self.send(packets.PUBLISH | qos << 1 | flags, body)

    async def suback(self, reason: int | None = None, *, v5: bool = True) -> bytes:
        """Take a SUBSCRIBE and answer it, by default with the QoS that it asks for."""
        body = await self.expect(0x80)
        self.send(0x90, body[:2] + b"\0" * v5 + bytes((body[-1] & 3 if reason is None else reason,)))
        return body

    async def unsuback(self, *, v5: bool = True) -> bytes:
        """Take an UNSUBSCRIBE and confirm it."""
        body = await self.expect(0xA0)
        self.send(0xB0, body[:2] + b"\0\0" * v5)
        return body


class Peer(Listener[Connection]):
    """A listener for MQTT."""

    def __init__(self, scheme: str = "mqtt") -> None:
        super().__init__(scheme, Connection)

    async def accept(self) -> tuple[Connection, bytes]:
        """The next connection, and the body of its CONNECT."""
        connection = await self.session()
        connection.connect = await connection.expect(0x10)
        return connection, connection.connect


@asynccontextmanager
async def session(
    properties: bytes = b"", *, provider: Any = None, **settings: Any
) -> AsyncIterator[tuple[Core, Peer, Connection]]:
    """A connected core and the other end of its connection; a provider of credentials is for its adapter."""
    async with Peer() as peer:
        core = Core(peer.url, **settings)
        if provider is not None:
            core.adapter.credentials = provider
        connection = (await accept(core, peer, properties))[0]
        try:
            yield core, peer, connection
        finally:
            closing = asyncio.create_task(core.adapter.close())
            await asyncio.sleep(0)
            for each in peer.connections:
                each.close()
            await closing


async def accept(core: Core, peer: Peer, properties: bytes = b"", *, present: bool = False) -> tuple[Connection, bool]:
    """Have ``core`` connect; its end of the connection, and what ``open`` returned."""
    opening = asyncio.create_task(core.open())
    connection, _ = await peer.accept()
    if core.adapter.settings.v5:
        connection.connack(properties, session=present)
    else:
        connection.send(packets.CONNACK, bytes((present, 0)))
    return connection, await opening


async def refused(core: Core, peer: Peer, answer: bytes) -> ConnectFailedError:
    """Have ``core`` connect and answer its CONNECT; why ``open`` failed."""
    opening = asyncio.create_task(core.open())
    connection, _ = await peer.accept()
    connection.write(answer)
    with pytest.raises(ConnectFailedError) as caught:
        await opening
    return caught.value


async def farewell(core: Core, connection: Connection) -> bytes:
    """Have ``core`` close, which says DISCONNECT and waits for the other end to close: the body of DISCONNECT."""
    closing = asyncio.create_task(core.adapter.close())
    body = await connection.expect(packets.DISCONNECT)
    connection.close()
    await closing
    return body


async def reconnect(
    core: Core, peer: Peer, connection: Connection, *, present: bool, properties: bytes = b""
) -> tuple[Connection, bool]:
    losses = len(core.losses)
    connection.abort()
    await core.lost(losses + 1)
    return await accept(core, peer, properties, present=present)


async def subscribed(
    core: Core, connection: Connection, channel: str = "t", sink: Sink | None = None, **options: Any
) -> tuple[Sink, Any]:
    """Subscribe, and have the other end confirm it."""
    subscribing = asyncio.create_task(core.subscribe(channel, sink, **options))
    await connection.suback(v5=core.adapter.settings.v5)
    return await subscribing


async def unsubscribed(core: Core, connection: Connection, handle: Any) -> bytes:
    """Unsubscribe, and have the other end confirm it: the body of UNSUBSCRIBE."""
    unsubscribing = asyncio.create_task(core.adapter.unsubscribe(handle))
    body = await connection.unsuback(v5=core.adapter.settings.v5)
    await unsubscribing
    return body


async def sent(
    core: Core, connection: Connection, channel: str, payload: bytes = b"", /, **context: Any
) -> tuple[Out, packets.Publish]:
    """Publish a message (version 5); the message, and the packet that arrives."""
    out = core.out(channel, payload, **context)
    await core.send(out)
    return out, await connection.publish()

"""A broker that does what a test tells it, frame by frame: for what RabbitMQ cannot be made to do."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pamqp.frame
from pamqp import commands, header, heartbeat
from pamqp.commands import Basic, Channel, Confirm, Exchange, Queue

from messaging.testing.waiting import PATIENCE, within
from messaging_adapters.amqp import frames
from tests.amqp.harness import Client, Sink, make_adapter
from tests.doubles.core import BrokerEnd, Listener

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pamqp.base import Frame

#: the largest frame it agrees to, bytes
FRAME_MAX = 131_072


class Session(BrokerEnd):
    """One client's connection."""

    #: channels with confirms that the client has opened
    selected = 0
    #: what it can do beyond AMQP 0-9-1, as RabbitMQ tells it
    capabilities: ClassVar[dict[str, Any]] = {"publisher_confirms": True}

    async def frame(self) -> tuple[int, object]:
        """Channel and frame: the next that is no heartbeat."""
        async with asyncio.timeout(PATIENCE):
            while True:
                head = await self._reader.readexactly(7)
                size = frames.PREFIX.unpack(head)[2]
                data = head + await self._reader.readexactly(size + 1)
                _, channel, frame = pamqp.frame.unmarshal(data)
                if not isinstance(frame, heartbeat.Heartbeat):
                    return channel, frame

    async def expect(self, kind: type[Frame]) -> tuple[int, Frame]:
        """The next frame, which is of this kind."""
        channel, frame = await self.frame()
        assert isinstance(frame, kind), frame
        return channel, frame

    def send(self, frame: Frame, channel: int = 0) -> None:
        self.write(pamqp.frame.marshal(frame, channel))

    def content(self, channel: int, properties: bytes, body: bytes) -> None:
        """A header, its properties given as they are on the wire, and a body."""
        self.write(b"".join(frames.content(channel, properties, body, FRAME_MAX)))

    async def greet(self, frame_max: int = FRAME_MAX, channel_max: int = 2047) -> int:
        """The handshake, up to ``connection.open``; returns the size of frames that the client agreed to."""
        async with asyncio.timeout(PATIENCE):
            assert await self._reader.readexactly(8) == b"AMQP\x00\x00\x09\x01"
        self.send(commands.Connection.Start(0, 9, {"capabilities": self.capabilities}, "PLAIN", "en_US"))
        _, start = await self.expect(commands.Connection.StartOk)
        assert isinstance(start, commands.Connection.StartOk)
        self.login = start.response
        self.client_name = (start.client_properties or {}).get("connection_name")
        self.send(commands.Connection.Tune(channel_max, frame_max, 60))
        _, agreed = await self.expect(commands.Connection.TuneOk)
        _, opening = await self.expect(commands.Connection.Open)
        assert isinstance(opening, commands.Connection.Open)
        self.vhost = opening.virtual_host
        assert isinstance(agreed, commands.Connection.TuneOk)
        return agreed.frame_max

    async def open(self, frame_max: int = FRAME_MAX, channel_max: int = 2047) -> Self:
        """The whole handshake."""
        await self.greet(frame_max, channel_max)
        self.send(commands.Connection.OpenOk())
        return self

    async def answer(self) -> tuple[int, object]:
        """Answer declarations as they come; return the first frame that is none."""
        answers: dict[type[object], Frame] = {
            Channel.Open: Channel.OpenOk(),
            Channel.Close: Channel.CloseOk(),
            Confirm.Select: Confirm.SelectOk(),
            Exchange.Declare: Exchange.DeclareOk(),
            Queue.Declare: Queue.DeclareOk("q", 0, 0),
            Queue.Bind: Queue.BindOk(),
            Basic.Qos: Basic.QosOk(),
        }
        while True:
            channel, frame = await self.frame()
            if type(frame) not in answers:
                return channel, frame
            self.selected += isinstance(frame, Confirm.Select)
            self.send(answers[type(frame)], channel)

    async def consumer(self) -> int:
        """Let the client subscribe; returns the channel."""
        channel, frame = await self.answer()
        assert isinstance(frame, Basic.Consume), frame
        self.send(Basic.ConsumeOk(frame.consumer_tag), channel)
        return channel

    async def published(self, count: int) -> int:
        """Let the client publish small messages; returns the channel."""
        channel, frame = await self.answer()
        for number in range(count):
            assert isinstance(frame, Basic.Publish), frame
            await self.expect(header.ContentHeader)  # type: ignore[type-var]
            _, _ = await self.frame()
            if number < count - 1:
                _, frame = await self.frame()
        return channel

    def close_reason(self, code: int, text: str) -> None:
        self.send(commands.Connection.Close(code, text, 0, 0))


class Peer(Listener[Session]):
    """A listener for AMQP."""

    def __init__(self) -> None:
        super().__init__("amqp", Session)


@contextlib.asynccontextmanager
async def client_of(peer: Peer, **settings: Any) -> AsyncIterator[Client]:
    """A client of ``peer`` that is not connected yet, and is closed afterwards."""
    client = Client(make_adapter(peer.url, **{"connect_timeout": 5} | settings))
    try:
        async with asyncio.timeout(2 * PATIENCE):
            yield client
    finally:
        for connection in peer.connections:  # they would not answer its good-bye
            connection.abort()
        await within(client.adapter.close())


async def opened(client: Client, peer: Peer) -> Session:
    """Have the client connect; its connection, on which it publishes."""
    opening = asyncio.create_task(client.open())
    session = await (await peer.session()).open()
    await opening
    return session


async def consuming(client: Client, peer: Peer, channel: str = "c", **options: Any) -> tuple[Sink, Session, int]:
    """Have the client subscribe: what arrived, its connection for consuming, and the channel."""
    subscribing = asyncio.create_task(client.subscribe(channel, **options))
    session = await (await peer.session()).open()
    number = await session.consumer()
    return (await subscribing)[0], session, number

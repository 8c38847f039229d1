"""A TLS transport that has let go of its connection, as asyncio's of Python 3.11.2 does, is closed all the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from adapters.amqp.transport import cut
from messaging.errors import ConnectFailedError, ConnectionLostError
from tests.amqp.harness import Client, make_adapter, within
from tests.amqp.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable


class LetsGo(asyncio.Transport):
    """A transport that raises from ``abort`` once it is closing, as ``_SSLProtocolTransport`` of Python 3.11.2 does."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1
        if self._transport.is_closing():
            raise AttributeError("'NoneType' object has no attribute '_abort'")
        self._transport.abort()

    def __getattribute__(self, name: str) -> Any:
        if name in ("abort", "aborted", "_transport", "__class__"):
            return object.__getattribute__(self, name)
        return getattr(self._transport, name)


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> list[LetsGo]:
    """The transports of the connections that a test makes."""
    made: list[LetsGo] = []
    plain = asyncio.BaseEventLoop.create_connection

    async def create_connection(
        loop: asyncio.BaseEventLoop, factory: Callable[[], asyncio.Protocol], *arguments: Any, **options: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        transport, protocol = await plain(loop, factory, *arguments, **options)
        made.append(LetsGo(transport))
        return made[-1], protocol

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", create_connection)
    return made


async def test_a_handshake_that_the_broker_ends_over_such_a_transport_is_a_failure_to_connect(
    transports: list[LetsGo],
) -> None:
    async with Peer() as peer:
        client = Client(make_adapter(peer.url))
        opening = asyncio.create_task(client.open())
        (await peer.session()).close()
        with pytest.raises(ConnectFailedError, match="the peer closed it"):
            await within(opening)
    assert [transport.aborted for transport in transports] == [1]


@pytest.mark.parametrize("is_subscribed", [False, True])
async def test_a_connection_without_broker_is_lost_once_and_closed_over_such_a_transport(
    transports: list[LetsGo], is_subscribed: bool
) -> None:
    async with Peer() as peer:
        client = Client(make_adapter(peer.url))
        opening = asyncio.create_task(client.open())
        session = await (await peer.session()).open()
        await within(opening)
        if is_subscribed:
            subscribing = asyncio.create_task(client.subscribe("c"))
            session = await (await peer.session()).open()
            await session.consumer()
            await within(subscribing)
        session.close()
        assert isinstance(await client.lost(), ConnectionLostError)
        await within(client.adapter.close())
        assert len(client.losses) == 1
    assert [transport.aborted > 0 for transport in transports] == [True] * (1 + is_subscribed)


def test_an_error_of_an_open_transport_is_not_hidden() -> None:
    class Broken(asyncio.Transport):
        def is_closing(self) -> bool:
            return False

        def abort(self) -> None:
            raise AttributeError("a defect")

    with pytest.raises(AttributeError, match="a defect"):
        cut(Broken())

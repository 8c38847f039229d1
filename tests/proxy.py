"""A TCP proxy between a client and its broker, for tests of what networks do.

::

    with Proxy("127.0.0.1", broker.port) as proxy, messaging.connect(f"mqtt://{proxy.host}:{proxy.port}") as m:
        proxy.sever()  # every connection ends with a reset, as if a cable was cut
        proxy.refuse()  # new ones are reset at once
        proxy.accept()
        proxy.hold()  # nothing from the broker reaches a client until release()
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")

HOST: Final = "127.0.0.1"
#: seconds any command to the proxy may take
PATIENCE: Final = 10.0
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER on, no time to linger


class _Side(asyncio.Protocol):
    """One end of a proxied connection; what it receives goes to its peer."""

    def __init__(self, proxy: Proxy, *, is_broker: bool) -> None:
        self.is_broker = is_broker
        self.peer: _Side | None = None
        self.transport: asyncio.Transport | None = None
        self._proxy = proxy
        #: resolves when the connection has ended
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: why nothing is read from here for now
        self._pauses: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # soon, not now: Python 3.11.2 starts to read all the same what is paused in here
        asyncio.get_running_loop().call_soon(self.pause, "no peer yet")
        self._proxy.opened(self)

    def data_received(self, data: bytes) -> None:
        assert self.peer is not None
        if self.transport is not None and _QUICKACK is not None:
            # or a broker with Nagle's algorithm waits 40 ms for each acknowledgement
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        if self.peer.transport is not None:
            self.peer.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.gone.set_result(None)
        self._proxy.forget(self)
        if self.peer is not None and self.peer.transport is not None:
            if exc is None:
                self.peer.transport.close()  # what is under way still gets there
            else:
                self.peer.abort()

    def pause_writing(self) -> None:
        if self.peer is not None:
            self.peer.pause("peer is slow")

    def resume_writing(self) -> None:
        if self.peer is not None:
            self.peer.resume("peer is slow")

    def pause(self, reason: str) -> None:
        if not self._pauses and self.transport is not None:
            self.transport.pause_reading()
        self._pauses.add(reason)

    def resume(self, reason: str) -> None:
        self._pauses.discard(reason)
        if not self._pauses and self.transport is not None:
            self.transport.resume_reading()

    def abort(self) -> None:
        if self.transport is not None:
            # a reset, not an end in good order
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()


class Proxy:
    """Forwards connections to ``target_host:target_port``. Its methods may be called from any thread.

    Entering the context starts it on a free port of the loopback interface; leaving ends all connections.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.host = HOST
        self.port = 0
        self._target = (target_host, target_port)
        # everything below belongs to the loop
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tests-proxy", daemon=True)
        self._sides: set[_Side] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._refusing = False
        self._holding = False

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def sever(self) -> None:
        """Reset every connection, on both sides; returns when that is done."""
        self._run(self._sever())

    def refuse(self) -> None:
        """Reset every connection, and each new one as soon as it is made."""
        self._run(self._sever(refuse=True))

    def accept(self) -> None:
        """Undo :meth:`refuse`."""
        self._run(self._sever(refuse=False, connections=False))

    def hold(self) -> None:
        """Keep back whatever brokers send, on connections to come too."""
        self._run(self._hold(True))

    def release(self) -> None:
        """Undo :meth:`hold`: what was kept back arrives."""
        self._run(self._hold(False))

    # --- the loop

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    async def _start(self) -> None:
        self._server = await self._loop.create_server(lambda: _Side(self, is_broker=False), HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._sever(refuse=True)

    async def _sever(self, *, refuse: bool | None = None, connections: bool = True) -> None:
        if refuse is not None:
            self._refusing = refuse
        if connections:
            for task in self._opening:
                task.cancel()
            for side in self._sides:
                side.abort()
            ending = [*(side.gone for side in self._sides), *self._opening]
            if ending:
                await asyncio.wait(ending)

    async def _hold(self, holding: bool) -> None:
        self._holding = holding
        for side in self._sides:
            if side.is_broker:
                (side.pause if holding else side.resume)("hold")

    def opened(self, side: _Side) -> None:
        """A connection was made, by a client or to the broker."""
        self._sides.add(side)
        if self._refusing:
            side.abort()
        elif not side.is_broker:
            task = self._loop.create_task(self._join(side))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def forget(self, side: _Side) -> None:
        """A connection ended."""
        self._sides.discard(side)

    async def _join(self, client: _Side) -> None:
        try:
            _, broker = await self._loop.create_connection(lambda: _Side(self, is_broker=True), *self._target)
        except OSError:
            client.abort()
            return
        if client.transport is None or broker.transport is None:
            client.abort()
            broker.abort()
            return
        broker.peer, client.peer = client, broker
        if self._holding:
            broker.pause("hold")
        for side in (broker, client):
            side.resume("no peer yet")

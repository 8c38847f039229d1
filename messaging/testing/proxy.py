"""A TCP proxy between a client and its broker, for tests of what networks do.

::

    with Proxy("127.0.0.1", broker.port) as proxy, messaging.connect(f"mqtt://{proxy.host}:{proxy.port}") as m:
        proxy.sever()  # every connection ends with a reset, as if a cable was cut
        proxy.refuse()  # new ones are reset at once
        proxy.accept()
        proxy.hold()  # nothing from the broker reaches a client until release()

There are two directions, ``proxy.up`` (from clients to the broker) and ``proxy.down``, each a :class:`Flow`::

        proxy.up.shape(latency=0.05, rate=10_000)
        proxy.down.shape(piece=1)  # one byte per packet
        proxy.down.cut_after(1000)  # within a frame, if the frames are large enough
        for flow in (proxy.up, proxy.down):
            flow.swallow()  # a pulled cable: nothing arrives, nothing is closed
        proxy.reset("client", quietly=True)  # and the broker hears nothing of it

A command returns before its effect; the counters tell what has happened.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal, Self, TypeVar, cast

from messaging.testing.waiting import PATIENCE

T = TypeVar("T")
End = Literal["client", "broker"]

HOST: Final = "127.0.0.1"
#: bytes of one connection that are on their way at most; a sender that is faster has to wait
UNDER_WAY: Final = 256 * 1024
#: how often a limited rate lets something through, seconds
_STEP: Final = 0.01
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER on, no time to linger


class Flow:
    """The treatment of the bytes of one direction, on present and on later connections.

    Its methods may be called from any thread.

    Attributes:
        bytes: passed on so far.
        pieces: packets they were passed on in.
        swallowed: bytes that were dropped.
        cuts: connections that :meth:`cut_after` ended.
    """

    def __init__(self, proxy: Proxy, source: End) -> None:
        self.bytes = self.pieces = self.swallowed = self.cuts = 0
        #: the end that sends the bytes
        self.source: Final[End] = source
        self._proxy = proxy
        # what follows belongs to the loop
        self.latency = self.pause = 0.0
        self.rate = self.piece = 0
        self.holding = self.swallowing = False
        #: bytes left until the next cut
        self.cut: int | None = None
        self.cut_resets = True

    def shape(self, *, latency: float = 0.0, rate: int = 0, piece: int = 0, pause: float = 0.0) -> None:
        """Set all of these; a value that is not given is reset.

        Args:
            latency: how long each byte is under way, seconds.
            rate: bytes per second for each connection; 0 for as fast as can be.
            piece: bytes in each packet at most; 0 for as they come.
            pause: between two packets, seconds: gives a receiver the time to see them apart.
        """
        self._set(latency=latency, rate=rate, piece=piece, pause=pause)

    def hold(self) -> None:
        """Stop reading: bytes stay in the buffers of the sender, until it has no room left for more."""
        self._proxy.call(lambda: self._hold(True))

    def release(self) -> None:
        """Undo :meth:`hold`: the bytes that were held arrive."""
        self._proxy.call(lambda: self._hold(False))

    def _hold(self, holding: bool) -> None:
        self.holding = holding
        for side in self._proxy.sides:
            if side.flow is self:
                (side.pause if holding else side.resume)("hold")

    def swallow(self) -> None:
        """Drop the bytes and the end of a connection. With both directions, it is half open at both ends."""
        self._set(swallowing=True)

    def restore(self) -> None:
        """Undo :meth:`swallow` for connections that lost no byte; the others stay as they are."""
        self._set(swallowing=False)

    def cut_after(self, count: int, *, reset: bool = True) -> None:
        """End the connection that passes on the ``count``-th byte from now, after that byte, at both ends.

        Args:
            count: bytes, of all connections together.
            reset: whether it ends with a reset, rather than in good order.
        """
        self._set(cut=count, cut_resets=reset)

    def _set(self, **values: Any) -> None:
        self._proxy.call(lambda: self.__dict__.update(values))

    @property
    def is_plain(self) -> bool:
        """Return whether bytes pass unchanged and at once."""
        return not (self.latency or self.rate or self.piece or self.pause)

    @property
    def piece_size(self) -> int:
        """Return how many bytes are passed on at a time; 0 for all there are."""
        step = max(1, int(self.rate * _STEP)) if self.rate else 0
        return min(self.piece or step, step or self.piece)


class _Side(asyncio.Protocol):
    """One end of a proxied connection; bytes that it receives go to its peer."""

    def __init__(self, proxy: Proxy, flow: Flow) -> None:
        self.flow = flow
        self.peer: _Side | None = None
        self.transport: asyncio.Transport | None = None
        #: the peer is told nothing more: bytes are missing, or this end was reset quietly
        self.is_mute = False
        self._proxy = proxy
        #: resolves when the connection has ended
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: the reasons for which reading is paused
        self._pauses: set[str] = set()
        #: bytes on their way to the peer, and when each piece is due
        self._queue: deque[tuple[float, memoryview]] = deque()
        self._queued = 0
        self._timer: asyncio.TimerHandle | None = None
        #: ends the peer once it has all bytes
        self._then: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # soon, not now: Python 3.11.2 starts to read a transport that is paused in here
        asyncio.get_running_loop().call_soon(self.pause, "no peer yet")
        self._proxy.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.gone.set_result(None)
        self._proxy.forget(self)
        if self.peer is None or self.is_mute:
            return
        if self.flow.swallowing:
            self.is_mute = True
        elif exc is not None:
            self.peer.abort()
        elif self._queue:
            self._then = self.peer.end
        else:
            self.peer.end()

    # --- from here to the peer

    def data_received(self, data: bytes) -> None:
        if self.transport is not None and _QUICKACK is not None:
            # or a broker with Nagle's algorithm waits 40 ms for each acknowledgement
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        if self.flow.swallowing or self.is_mute:
            self.is_mute = True  # for good: what follows would make no sense
            self.flow.swallowed += len(data)
        elif not self._queue and self.flow.is_plain:
            self._pass_on(data)
        else:
            self._queue.append((self._proxy.time() + self.flow.latency, memoryview(data)))
            self._queued += len(data)
            if self._queued > UNDER_WAY:
                self.pause("much is under way")
            if self._timer is None:
                self._pump()

    def _pump(self) -> None:
        """Pass on the bytes that are due, a piece at a time."""
        self._timer = None
        flow = self.flow
        while self._queue and not self.is_mute:
            due, data = self._queue[0]
            wait = due - self._proxy.time()
            if wait <= 0:
                size = min(len(data), flow.piece_size or len(data))
                if size < len(data):
                    self._queue[0] = (due, data[size:])
                else:
                    self._queue.popleft()
                self._queued -= size
                self._pass_on(data[:size])
                wait = max(flow.pause, size / flow.rate if flow.rate else 0.0)
                if not wait and not flow.piece:
                    continue  # else the loop has its turn after each piece
            self._timer = self._proxy.call_later(wait, self._pump)
            break
        if self._queued <= UNDER_WAY:
            self.resume("much is under way")
        if not self._queue and self._then is not None:
            self._then()

    def _pass_on(self, data: bytes | memoryview) -> None:
        flow, peer = self.flow, self.peer
        is_cut = flow.cut is not None and len(data) >= flow.cut
        if flow.cut is not None:
            data = data[: flow.cut]
            flow.cut -= len(data)
        if is_cut:
            flow.cut = None
            flow.cuts += 1
        if peer is not None and peer.transport is not None:
            flow.bytes += len(data)  # counted first: a test that sees it arrive may look
            flow.pieces += 1
            peer.transport.write(data)
        if is_cut:
            self._cut()

    def _cut(self) -> None:
        """End at both ends, once the bytes that were passed on have left."""
        self._queue.clear()
        self.pause("cut")
        if self.peer is not None and self.peer.transport is not None and self.peer.transport.get_write_buffer_size():
            self._proxy.call_later(0.001, self._cut)
            return
        for side in (self.peer, self):
            if side is not None:
                (side.abort if self.flow.cut_resets else side.end)()

    # --- from the peer to here

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
        if reason not in self._pauses:
            return
        self._pauses.discard(reason)
        if not self._pauses and self.transport is not None:
            self.transport.resume_reading()

    def end(self) -> None:
        """End in good order: bytes on their way still arrive."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End with a reset."""
        if self.transport is not None:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()


class Proxy:
    """Forwards connections to ``target_host:target_port``. Its methods may be called from any thread.

    Entering the context starts it on a free port of the loopback interface; leaving ends all connections.

    Attributes:
        up, down: the directions, from clients to the broker and back.
        attempts: connections that clients made, refused ones too.
        resets: connections that :meth:`sever`, :meth:`refuse` and :meth:`reset` ended.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.host = HOST
        self.port = 0
        self.attempts = self.resets = 0
        self.up, self.down = Flow(self, "client"), Flow(self, "broker")
        self._target = (target_host, target_port)
        # everything below belongs to the loop
        self._loop = asyncio.new_event_loop()
        self.time, self.call_later = self._loop.time, self._loop.call_later
        self._thread = threading.Thread(target=self._loop.run_forever, name="messaging-proxy", daemon=True)
        self.sides: set[_Side] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._refusing = False

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

    def reset(self, end: End, *, quietly: bool = False) -> None:
        """Reset every connection at one end; returns when that is done.

        Args:
            end: who sees the reset.
            quietly: whether the other end hears nothing of it, and has a half-open connection from now on; otherwise
                it sees an end in good order.
        """
        self._run(self._reset(end, quietly))

    def hold(self) -> None:
        """Hold the bytes that brokers send, on later connections too."""
        self.down.hold()

    def release(self) -> None:
        """Undo :meth:`hold`: the bytes that were held arrive."""
        self.down.release()

    @property
    def connections(self) -> int:
        """Return how many clients are connected, as far as they know."""
        return len([side for side in self.sides.copy() if side.flow is self.up])

    # --- the loop

    def call(self, function: Callable[[], object]) -> None:
        """Call ``function`` on the loop, and return when that is done."""

        async def run() -> None:
            function()

        self._run(run())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    async def _start(self) -> None:
        self._server = await self._loop.create_server(lambda: _Side(self, self.up), HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        await self._sever(refuse=True)
        # Python 3.11 leaves the socket open of a connection that it is accepting while the server closes
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        if self._server is not None:
            self._server.close()
        await self._sever()

    async def _sever(self, *, refuse: bool | None = None, connections: bool = True) -> None:
        if refuse is not None:
            self._refusing = refuse
        if connections:
            for task in self._opening:
                task.cancel()
            self.resets += len([side for side in self.sides if side.flow is self.up])
            for side in self.sides:
                side.abort()
            ending = [*(side.gone for side in self.sides), *self._opening]
            if ending:
                await asyncio.wait(ending)

    async def _reset(self, end: End, quietly: bool) -> None:
        ending = [side for side in self.sides if side.flow.source == end]
        self.resets += len(ending)
        for side in ending:
            side.is_mute = quietly
            side.abort()
        if ending:
            await asyncio.wait([side.gone for side in ending])

    def opened(self, side: _Side) -> None:
        """Note a connection that was made, by a client or to the broker."""
        self.sides.add(side)
        if side.flow is self.up:
            self.attempts += 1
        if self._refusing:
            side.abort()
        elif side.flow is self.up:
            task = self._loop.create_task(self._join(side))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def forget(self, side: _Side) -> None:
        """Note a connection that ended."""
        self.sides.discard(side)

    async def _join(self, client: _Side) -> None:
        try:
            _, broker = await self._loop.create_connection(lambda: _Side(self, self.down), *self._target)
        except OSError:
            client.abort()
            return
        if client.transport is None or broker.transport is None:
            client.abort()
            broker.abort()
            return
        broker.peer, client.peer = client, broker
        for side in (broker, client):
            if side.flow.holding:
                side.pause("hold")
            side.resume("no peer yet")

"""The transport of a connection: TCP, proxy, TLS and WebSocket below, bytes of packets above.

**Writing.** Packets are gathered and handed to the socket once per turn of the loop. :attr:`Transport.sent` counts the
bytes that it took. The session keeps the count at which each of its messages is written, and is told when it grows.
While :attr:`Transport.unsent` is large, the session publishes nothing more.

**Reading.** :meth:`Transport.receive` returns all bytes that are available; :mod:`.connection` says when to call it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from messaging.connection.names import reach
from messaging.connection.proxies import open_through
from messaging.execution import clock, on_worker
from messaging_adapters.mqtt.packets import LimitExceededError

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    from messaging_adapters.mqtt.handshake import ConnectTarget
    from messaging_adapters.mqtt.websocket import WebSocket

T = TypeVar("T")

#: bytes to read at a time; more only costs allocations
READ_SIZE: Final = 65_536
#: bytes of answers to the broker's packets that it may leave unread: more than the answers to all packet ids
UNREAD: Final = 2 * 1024 * 1024
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux


class Transport:
    """A connected socket with buffers for the bytes that are written. On the loop.

    Args:
        written: called after bytes were handed to the socket, with :attr:`sent`.
        failed: ends the connection: the socket failed while writing, or the broker reads no answers.

    Attributes:
        sent: bytes of packets handed to the socket so far.
        received_at: when bytes last arrived, monotonic seconds.
        sent_at: when the socket last took bytes, monotonic seconds.
    """

    def __init__(self, written: Callable[[int], None], failed: Callable[[OSError | LimitExceededError], None]) -> None:
        self._written = written
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        #: ``None`` before it is open, and after it is closed
        self._sock: socket.socket | None = None
        #: the framing of WebSocket; ``None`` for none
        self._web: WebSocket | None = None
        #: packets that were not handed to the socket, or to the WebSocket
        self._out = bytearray()
        #: WebSocket: frames not yet sent, and how many bytes of packets they hold
        self._framed = bytearray()
        self._in_frames = 0
        #: the buffer that goes to the socket next
        self._to_socket = self._out
        self.sent = 0
        self.received_at = self.sent_at = clock.monotonic()
        self._flush_due = False
        #: the loop reports when the socket takes more
        self._watching = False
        #: DISCONNECT was queued: nothing may follow it
        self._finishing = False
        #: bytes of answers queued so far
        self._answered = 0
        #: of those, bytes that the socket is known to have: ``_marked`` of them once it has all up to ``_mark``
        self._taken = self._marked = self._mark = 0

    def open(self, sock: socket.socket, web: WebSocket | None) -> None:
        """Use a connected socket from now on, with the framing of ``web``."""
        self._sock, self._web = sock, web
        self._to_socket = self._out if web is None else self._framed
        self.received_at = self.sent_at = clock.monotonic()

    def close(self) -> None:
        """Close the socket, and drop gathered bytes. Idempotent."""
        if self._sock is not None:
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None
            self._out.clear()
            self._framed.clear()
            self._in_frames = 0

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 while there is none."""
        return -1 if self._sock is None else self._sock.fileno()

    # --- writing

    @property
    def unsent(self) -> int:
        """Bytes of packets gathered and not yet handed to the socket."""
        return len(self._out) + self._in_frames

    @property
    def delivered(self) -> int:
        """Bytes of packets that the peer's system has acknowledged (Linux), or else bytes sent.

        Bytes that TLS and WebSocket add count as missing until they are acknowledged too.
        """
        waiting = array.array("i", [0])
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.fileno(), termios.TIOCOUTQ, waiting)
        return self.sent - waiting[0]

    def send(self, packet: bytes) -> int:
        """Gather a packet for the next flush.

        Returns:
            The value of :attr:`sent` from which on the socket has it.
        """
        if self._sock is None or self._finishing:
            return 0
        self._out += packet
        if not self._flush_due:
            self.flush_soon()
        return self.sent + len(self._out) + self._in_frames

    def answer(self, packet: bytes) -> None:
        """Gather an answer to a packet. If the broker reads none of them, the connection ends."""
        self._answered += len(packet)
        self.send(packet)

    def finish(self, packet: bytes) -> None:
        """Write a last packet, then end this side of the stream."""
        self.send(packet)
        self._finishing = True
        self.flush()

    def tell(self, packet: bytes) -> None:
        """Write the packet that says why the connection ends, as far as the socket takes it."""
        self._out += packet
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._write(self._sock)

    def flush_soon(self) -> None:
        """Flush in the next turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand gathered bytes to the socket until it takes no more; see :attr:`unsent` for the rest."""
        self._flush_due = False
        sock = self._sock
        if sock is None:
            return
        try:
            self._write(sock)
        except OSError as error:
            self._failed(error)
            return
        self._written(self.sent)
        if self._answered:
            self._check_answers()
        if self._sock is not sock:  # the connection was ended
            return
        is_flushed = not (self._out or self._framed)
        if is_flushed is self._watching:
            self._watching = not is_flushed
            if self._watching:
                self._loop.add_writer(sock.fileno(), self.flush)
            else:
                self._loop.remove_writer(sock.fileno())
        if self._finishing and is_flushed:
            self._end_stream(sock)

    def _check_answers(self) -> None:
        if self.sent >= self._mark:
            self._taken, self._marked, self._mark = self._marked, self._answered, self.sent + self.unsent
        unread = self._answered - self._taken
        if unread > UNREAD:
            self._failed(LimitExceededError(f"{unread} bytes of answers to its packets wait for it to read them"))

    def _write(self, sock: socket.socket) -> None:
        """Hand bytes to the socket and count those of packets.

        No local variable holds the bytes, CONNECT and its password among them: an error report may show variables.

        Raises:
            OSError: the connection broke.
        """
        if self._web is not None:
            self._in_frames += len(self._out)
            self._framed += self._web.encode(self._out)
            self._out.clear()
        before = len(self._to_socket)
        try:
            while self._to_socket:
                del self._to_socket[: sock.send(self._to_socket)]
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            raise error.with_traceback(None) from None  # the frames of a TLS socket hold the bytes
        written = before - len(self._to_socket)
        if written:
            self.sent_at = clock.monotonic()
        if self._web is None:
            self.sent += written
        elif not self._framed:
            self.sent += self._in_frames
            self._in_frames = 0

    def _end_stream(self, sock: socket.socket) -> None:
        """Tell the peer that nothing more will be written."""
        with contextlib.suppress(OSError):
            if self._web is not None:
                self._framed += self._web.close()
                self._write(sock)
            sock.shutdown(socket.SHUT_WR)

    # --- reading

    def receive(self) -> bytes | None:
        """Return the bytes that have arrived: ``None`` if there are none yet, empty at the end of the stream.

        Raises:
            OSError: the connection broke.
            ProtocolError: the bytes are not WebSocket, where that was agreed.
        """
        sock = self._sock
        if sock is None:
            return None
        try:
            data = sock.recv(READ_SIZE)
            # a TLS socket returns one record at a time, and the loop does not see the decrypted ones that it holds
            while isinstance(sock, ssl.SSLSocket) and data and sock.pending():
                data += sock.recv(sock.pending())
            if _QUICKACK is not None:
                # A broker with Nagle's algorithm, which is mosquitto's default, sends a small packet only once the one
                # before is acknowledged, and a delayed acknowledgement takes 40 ms. The option lasts until about the
                # next read.
                with contextlib.suppress(OSError):  # reset meanwhile: the next read reports it
                    sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except ssl.SSLEOFError:
            data = b""
        if data:
            self.received_at = clock.monotonic()
        if self._web is None:
            return data
        decoded = self._web.decode(data)
        self._framed += self._web.encode(b"")  # answers to pings
        if self._framed:
            self.flush_soon()
        if decoded or self._web.ended:
            return decoded
        return None  # a ping, or the beginning of a frame


async def dial(target: ConnectTarget) -> tuple[socket.socket, WebSocket | None]:
    """Connect over TCP, proxy, TLS and WebSocket. Leaves nothing behind if it fails or is cancelled.

    Raises:
        OSError, ValueError: the connection cannot be made.
        ConnectFailedError: a file that TLS needs cannot be used, the peer accepts no WebSocket, or a proxy refused.
    """
    tls = target.tls
    context = None if tls is None else await on_worker(tls.context)
    web = None
    if target.web_path is not None:
        from messaging_adapters.mqtt.websocket import WebSocket  # an extra

        web = WebSocket(target)
    with contextlib.ExitStack() as undo:
        if target.proxy is None:
            sock = await reach(target.address or target.host, target.port)
        else:
            sock = await open_through(target.proxy, target.host, target.port)
        undo.callback(sock.close)
        # without it, a small packet waits up to 40 ms for the acknowledgement of the one before
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None and context is not None:
            # takes over the descriptor of the plain socket
            name = tls.name_of(target.host)
            sock = secured = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            undo.callback(secured.close)
            await _when_ready(secured, secured.do_handshake)
            tls.made(secured)
        if web is not None:
            request = await web.request(target.settings.connect_timeout)
            while request:
                request = request[await _when_ready(sock, partial(sock.send, request), sends=True) :]
            while not web.accepts(await _when_ready(sock, partial(sock.recv, READ_SIZE))):
                pass
        undo.pop_all()
    return sock, web


async def _when_ready(sock: socket.socket, operation: Callable[[], T], *, sends: bool = False) -> T:
    """Return the result of an operation of a socket, which is tried again whenever the socket is ready for it."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return operation()
        except ssl.SSLWantReadError:
            waits_for_room = False
        except ssl.SSLWantWriteError:
            waits_for_room = True
        except BlockingIOError:
            waits_for_room = sends
        ready = asyncio.Event()
        if waits_for_room:
            loop.add_writer(sock.fileno(), ready.set)
        else:
            loop.add_reader(sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(sock.fileno())
            loop.remove_reader(sock.fileno())

"""The socket paho is given.

To paho it is a TLS connection: it gets it from what it takes for a TLS context (:class:`Dialer`). Behind it is the real
socket, TLS or not, WebSocket or not. It reads as much as there is, cuts that into packets, and gathers what is written
until flushed.

The dialer's methods run on the thread that connects; everything else runs on the loop.
"""

from __future__ import annotations

import array
import contextlib
import socket
import ssl
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from adapters.mqtt import packets
from adapters.mqtt.packets import LimitExceededError, ProtocolError

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    from collections.abc import Iterator

    from adapters.mqtt.websocket import WebSocket

#: bytes to read at a time; more only costs allocations
READ_SIZE: Final = 65_536
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux


class Wire:
    """A connected socket with buffers on both sides.

    Args:
        sock: connected.
        web: frames what passes, if the broker wants WebSocket.
        largest: bytes of the largest packet that may arrive.
    """

    def __init__(
        self,
        sock: socket.socket | ssl.SSLSocket,
        web: WebSocket | None = None,
        largest: int = packets.MAX_PACKET,
    ) -> None:
        self._sock = sock
        self._web = web
        self._largest = largest
        #: packets for paho that it has not read yet
        self._control = b""
        #: the beginning of a packet whose end has not arrived
        self._partial = bytearray()
        self._wanted = 0
        self._out = bytearray()
        #: WebSocket: frames on their way, and how many bytes of packets are in them
        self._framed = bytearray()
        self._in_frames = 0
        #: what goes to the socket next
        self._outgoing = self._out if web is None else self._framed
        #: bytes of packets handed to the real socket so far
        self.sent = 0
        #: when something last arrived, and when the socket last took something; monotonic seconds
        self.received_at = self.sent_at = time.monotonic()

    # --- paho's side: as much of a non-blocking TLS socket as paho uses

    def settimeout(self, seconds: float | None) -> None:
        """For the time of the handshake."""
        self._sock.settimeout(seconds)

    def do_handshake(self) -> None:
        """TLS handshake, then that of WebSocket; on the connecting thread."""
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.do_handshake()
            if self._web is not None:
                self._web.handshake(self._sock)
        except BaseException:
            self._sock.close()  # paho would leave that to the garbage collector
            raise

    def setblocking(self, blocking: bool) -> None:
        """See ``socket``."""
        self._sock.setblocking(blocking)

    def fileno(self) -> int:
        """See ``socket``."""
        return self._sock.fileno()

    def recv(self, size: int) -> bytes:
        """What :meth:`feed` was given; ``BlockingIOError`` if there is nothing."""
        if not self._control:
            raise BlockingIOError
        data = self._control[:size]
        self._control = self._control[size:]
        return data

    def send(self, data: bytes | bytearray) -> int:
        """Gather ``data`` until :meth:`flush`."""
        self._out += data
        return len(data)

    def pending(self) -> int:
        """Bytes :meth:`recv` has."""
        return len(self._control)

    def close(self) -> None:
        """Nothing: paho closes before the last bytes are flushed. :meth:`dispose` is what closes."""

    # --- our side

    @property
    def unsent(self) -> int:
        """Bytes gathered and not handed to the socket."""
        return len(self._out) + self._in_frames

    @property
    def delivered(self) -> int:
        """Bytes of packets that the other end's system has taken, as far as this one tells; else those sent.

        TLS and WebSocket add some that are counted as missing until they are taken too.
        """
        waiting = array.array("i", [0])
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, waiting)
        return self.sent - waiting[0]

    @property
    def is_flushed(self) -> bool:
        """Whether the socket has everything, what WebSocket adds included."""
        return not (self._out or self._framed)

    def feed(self, head: int, body: bytes) -> None:
        """Let paho read a packet."""
        self._control += bytes((head,)) + packets.varint(len(body)) + body

    def receive(self) -> bytes | None:
        """What has arrived; ``None`` if nothing has, empty at the end of the stream.

        Raises:
            OSError: the connection broke.
            ProtocolError: it is not WebSocket, where that was agreed.
        """
        try:
            data = self._sock.recv(READ_SIZE)
            # a TLS socket gives one record at a time, and the loop does not see those it holds decrypted
            while isinstance(self._sock, ssl.SSLSocket) and data and self._sock.pending():
                data += self._sock.recv(self._sock.pending())
            if _QUICKACK is not None:
                # A broker with Nagle's algorithm, which is mosquitto's default, sends a small packet only once the one
                # before is acknowledged, and delayed that takes 40 ms. The option holds until the next read or so.
                with contextlib.suppress(OSError):  # reset meanwhile: the next read tells
                    self._sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except ssl.SSLEOFError:
            data = b""
        if data:
            self.received_at = time.monotonic()
        if self._web is None:
            return data
        decoded = self._web.decode(data)
        self._framed += self._web.encode(b"")  # answers to pings
        if decoded or self._web.ended:
            return decoded
        return None  # a ping, or the beginning of a frame

    def split(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Cut ``data``, which follows what came before, into packets: first byte, and what follows the length.

        Raises:
            ProtocolError: a length of more than four bytes, or more than is read.
        """
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, size = 0, len(data)
        while size - at >= 2:
            start = at + 2
            length = data[at + 1]
            if length > 127:
                length &= 127
                shift = 7
                while True:
                    if start >= size:
                        self._keep(data, at, size + 1)
                        return
                    digit = data[start]
                    start += 1
                    length |= (digit & 127) << shift
                    if digit < 128:
                        break
                    shift += 7
                    if shift > 21:
                        raise ProtocolError("packet length of more than four bytes")
                if length > packets.MAX_CONTROL and data[at] & 0xF0 != packets.PUBLISH:
                    # paho's time to read one grows with the square of its size
                    raise LimitExceededError(
                        f"a packet of type {data[at] >> 4} with {length} bytes; at most {packets.MAX_CONTROL} are read"
                    )
            end = start + length
            if end - at > self._largest:
                raise ProtocolError(
                    f"a packet of {end - at} bytes; at most {self._largest} were agreed", packets.PACKET_TOO_LARGE
                )
            if end > size:
                self._keep(data, at, end)
                return
            yield data[at], data[start:end]
            at = end
        self._keep(data, at, at + 2)

    def _keep(self, data: bytes, at: int, end: int) -> None:
        self._partial += data[at:]
        self._wanted = end - at

    def flush(self) -> None:
        """Hand to the socket what it takes; see :attr:`unsent` for what is left.

        Raises:
            OSError: the connection broke.
        """
        if self._web is not None:
            self._flush_frames(self._web)
        else:
            self.sent += self._write()

    def _flush_frames(self, web: WebSocket) -> None:
        self._in_frames += len(self._out)
        self._framed += web.encode(self._out)
        self._out.clear()
        self._write()
        if not self._framed:
            self.sent += self._in_frames
            self._in_frames = 0

    def _write(self) -> int:
        """Hand over what the socket takes, and how much that was.

        No variable of a frame holds the bytes, CONNECT and its password among them: a report of an error may show it.
        """
        before = len(self._outgoing)
        try:
            while self._outgoing:
                del self._outgoing[: self._sock.send(self._outgoing)]
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            raise error.with_traceback(None) from None  # of a TLS socket, the frames hold the bytes
        written = before - len(self._outgoing)
        if written:
            self.sent_at = time.monotonic()
        return written

    def finish(self) -> None:
        """Say that nothing more will be written."""
        with contextlib.suppress(OSError):
            if self._web is not None:
                self._framed += self._web.close()
                self._write()
            self._sock.shutdown(socket.SHUT_WR)

    def interrupt(self) -> None:
        """End what another thread waits for in this socket, without taking the descriptor away from under it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Close the socket."""
        self._sock.close()


class Dialer:
    """What paho takes for a TLS context: gives it a :class:`Wire`. One for each attempt to connect.

    Attributes:
        tls: the real context; ``None`` for no TLS.
        web: WebSocket, or ``None`` for none.
        largest: bytes of the largest packet that may arrive.
        wire: the connection, once there is one.
    """

    #: to paho: the host name was verified by the context. Whether it is, the real context decides.
    check_hostname = True

    def __init__(self) -> None:
        self.tls: ssl.SSLContext | None = None
        self.web: WebSocket | None = None
        self.largest = packets.MAX_PACKET
        self._lock = threading.Lock()  # guards the three below
        self._dialing = True
        self._cancelled = False
        self.wire: Wire | None = None

    def wrap_socket(
        self, sock: socket.socket, server_hostname: str | None = None, do_handshake_on_connect: bool = False
    ) -> Wire:
        """Called by paho once TCP is connected."""
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                sock = self.tls.wrap_socket(
                    sock, server_hostname=server_hostname, do_handshake_on_connect=do_handshake_on_connect
                )
            wire = Wire(sock, self.web, self.largest)
            with self._lock:
                if self._cancelled:
                    raise ConnectionAbortedError("cancelled")
                self.wire = wire
        except BaseException:
            sock.close()
            raise
        return wire

    def dialed(self) -> None:
        """The connecting thread is done: from now on the loop owns the wire, unless it gave up meanwhile."""
        with self._lock:
            self._dialing = False
            if self._cancelled and self.wire is not None:
                self.wire.dispose()

    def cancel(self) -> None:
        """Close the connection, or have the connecting thread do so as soon as it can. Idempotent."""
        with self._lock:
            self._cancelled = True
            if self.wire is not None:
                if self._dialing:
                    self.wire.interrupt()
                else:
                    self.wire.dispose()

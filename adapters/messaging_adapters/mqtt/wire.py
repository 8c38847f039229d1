"""The socket of a connection, with TLS and WebSocket or without: cuts bytes into packets, and gathers written bytes.

It reads all bytes that are available, and gathers written packets until they are flushed. Runs on the loop.
"""

from __future__ import annotations

import array
import contextlib
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Final

from messaging.execution import clock
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.packets import LimitExceededError, ProtocolError

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    from collections.abc import Iterator

    from messaging_adapters.mqtt.websocket import WebSocket

#: bytes to read at a time; more only costs allocations
READ_SIZE: Final = 65_536
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux


class Wire:
    """A connected socket with buffers on both sides.

    Args:
        sock: connected.
        web: the framing of WebSocket; ``None`` for none.
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
        #: the beginning of a packet, and how many bytes it has in all, as far as known
        self._partial = bytearray()
        self._wanted = 0
        self._out = bytearray()
        #: WebSocket: frames not yet sent, and how many bytes of packets they hold
        self._framed = bytearray()
        self._in_frames = 0
        #: the buffer that goes to the socket next
        self._outgoing = self._out if web is None else self._framed
        #: bytes of packets handed to the socket so far
        self.sent = 0
        #: when bytes last arrived, and when the socket last took bytes; monotonic seconds
        self.received_at = self.sent_at = clock.monotonic()

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._sock.fileno()

    def send(self, data: bytes | bytearray) -> None:
        """Gather ``data`` until :meth:`flush`."""
        self._out += data

    @property
    def unsent(self) -> int:
        """Bytes gathered and not yet handed to the socket."""
        return len(self._out) + self._in_frames

    @property
    def delivered(self) -> int:
        """Bytes of packets that the peer's system has acknowledged (Linux), or else bytes sent.

        Bytes that TLS and WebSocket add count as missing until they are acknowledged too.
        """
        waiting = array.array("i", [0])
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, waiting)
        return self.sent - waiting[0]

    @property
    def is_flushed(self) -> bool:
        """Whether the socket has all bytes, including the ones that WebSocket adds."""
        return not (self._out or self._framed)

    def receive(self) -> bytes | None:
        """Return the bytes that have arrived: ``None`` if there are none yet, empty at the end of the stream.

        Raises:
            OSError: the connection broke.
            ProtocolError: the bytes are not WebSocket, where that was agreed.
        """
        try:
            data = self._sock.recv(READ_SIZE)
            # a TLS socket returns one record at a time, and the loop does not see the decrypted ones that it holds
            while isinstance(self._sock, ssl.SSLSocket) and data and self._sock.pending():
                data += self._sock.recv(self._sock.pending())
            if _QUICKACK is not None:
                # A broker with Nagle's algorithm, which is mosquitto's default, sends a small packet only once the one
                # before is acknowledged, and a delayed acknowledgement takes 40 ms. The option lasts until about the
                # next read.
                with contextlib.suppress(OSError):  # reset meanwhile: the next read reports it
                    self._sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
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
        if decoded or self._web.ended:
            return decoded
        return None  # a ping, or the beginning of a frame

    def split(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Cut ``data``, the next bytes of the stream, into packets: first byte, and the bytes after the length.

        Raises:
            ProtocolError: a length of more than four bytes, or over a limit.
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
        """Hand bytes to the socket until it takes no more; see :attr:`unsent` for the rest.

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
        """Hand bytes to the socket, and return how many it took.

        No local variable holds the bytes, CONNECT and its password among them: an error report may show variables.
        """
        before = len(self._outgoing)
        try:
            while self._outgoing:
                del self._outgoing[: self._sock.send(self._outgoing)]
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            raise error.with_traceback(None) from None  # the frames of a TLS socket hold the bytes
        written = before - len(self._outgoing)
        if written:
            self.sent_at = clock.monotonic()
        return written

    def finish(self) -> None:
        """Tell the peer that nothing more will be written."""
        with contextlib.suppress(OSError):
            if self._web is not None:
                self._framed += self._web.close()
                self._write()
            self._sock.shutdown(socket.SHUT_WR)

    def dispose(self) -> None:
        """Close the socket."""
        self._sock.close()

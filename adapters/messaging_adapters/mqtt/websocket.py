"""MQTT over WebSocket (MQTT 5, 6.0; the same for 3.1.1), for ``ws://`` and ``wss://``.

The protocol is that of the library ``websockets``, without its I/O: bytes go in and come out. It sits between the
socket and the buffers of :class:`~messaging_adapters.mqtt.transport.Transport`, which sees a stream of MQTT packets:
the limits between WebSocket messages mean nothing to MQTT.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.protocol import CONNECTING, OPEN
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from messaging.connection import tls
from messaging.errors import ConnectFailedError
from messaging_adapters.mqtt.packets import MAX_PACKET, ProtocolError
from messaging_adapters.mqtt.settings import WebHeaders

if TYPE_CHECKING:
    from messaging_adapters.mqtt.handshake import ConnectTarget

#: name of MQTT in the handshake (6.0.0-3)
_SUBPROTOCOL: Final = Subprotocol("mqtt")
#: Bytes of one WebSocket message, all its fragments together. The reader has the limit for packets; this one bounds the
#: bytes that the library gathers for it. An int, because the library takes a limit per fragment only since 16.0.
_LARGEST_MESSAGE: Final = MAX_PACKET
#: The library logs every frame on DEBUG, with CONNECT and its password: this logger has no handler.
_NO_LOGGER: Final = logging.Logger("messaging_adapters.mqtt.websocket.frames", logging.CRITICAL)  # noqa: LOG001


class WebSocket:
    """The framing of one connection."""

    def __init__(self, target: ConnectTarget) -> None:
        settings, self._path = target.settings, target.web_path or "/"
        query = "" if settings.ws_query is None else settings.ws_query.get_secret_value()
        self._protocol = ClientProtocol(
            WebSocketURI(target.tls is not None, target.host, target.port, self._path, query, None, None),
            subprotocols=[_SUBPROTOCOL],
            max_size=_LARGEST_MESSAGE,
            logger=_NO_LOGGER,
        )
        #: of the program, for the request; they replace those of the library
        self._headers: WebHeaders | None = settings.ws_headers
        #: the first bytes of the answer
        self._answer = b""
        #: the peer has ended the connection
        self.ended = False

    async def request(self, timeout: float) -> bytes:
        """Return the request of the handshake. ``timeout`` is that of the attempt to connect, seconds.

        Raises:
            ConnectFailedError: the program's callable gives no headers.
        """
        request = self._protocol.connect()
        headers = {} if self._headers is None else await self._headers.now(timeout)
        for name, value in headers.items():
            request.headers.pop(name, None)
            request.headers[name] = value
        self._protocol.send_request(request)
        return b"".join(self._protocol.data_to_send())

    def accepts(self, data: bytes) -> bool:
        """Take in bytes of the answer; none at the end of the stream. Return whether the handshake is complete.

        Raises:
            ConnectFailedError: the peer accepts no WebSocket at the path, or no MQTT over it.
        """
        protocol = self._protocol
        self._answer = self._answer or data
        # the answer is all that arrives: a broker sends nothing before CONNECT
        if data:
            protocol.receive_data(data)
        else:
            protocol.receive_eof()
        if protocol.state is CONNECTING and protocol.handshake_exc is None:
            return False
        protocol.events_received()  # the response itself
        hint = tls.wants_tls(self._answer, "wss", "ws")
        if hint is not None:
            raise ConnectFailedError(hint)
        error = protocol.handshake_exc
        if error is not None:
            raise ConnectFailedError(f"it does not take a WebSocket at {self._path!r}: {error}") from error
        if protocol.subprotocol != _SUBPROTOCOL:
            raise ConnectFailedError(f"the WebSocket at {self._path!r} speaks no MQTT")
        return True

    def encode(self, data: bytes | bytearray) -> bytes:
        """Return ``data`` as a binary message, after the answers to the peer's pings."""
        if data and self._protocol.state is OPEN:  # else the connection is about to end
            self._protocol.send_binary(bytes(data))
        return b"".join(self._protocol.data_to_send())

    def decode(self, data: bytes) -> bytes:
        """Return the payload in ``data``; see :attr:`ended` for whether more can follow. Call :meth:`encode` after it.

        Raises:
            ProtocolError: a server may not send this, or it is text.
        """
        protocol = self._protocol
        try:
            if data:
                protocol.receive_data(data)
            else:
                protocol.receive_eof()
        except (WebSocketException, EOFError) as error:
            raise ProtocolError(f"malformed WebSocket: {error}") from error
        parts = []
        for event in protocol.events_received():
            if isinstance(event, Frame):
                if event.opcode is Opcode.TEXT:
                    raise ProtocolError("a WebSocket message of text")
                if event.opcode in (Opcode.BINARY, Opcode.CONT):
                    parts.append(event.data)
                elif event.opcode is Opcode.CLOSE:
                    self.ended = True
        if protocol.parser_exc is not None and not isinstance(protocol.parser_exc, EOFError):
            raise ProtocolError(f"malformed WebSocket: {protocol.parser_exc}")
        if not data:
            self.ended = True
        return b"".join(map(bytes, parts))

    def close(self) -> bytes:
        """Return the bytes that end this side of the connection."""
        if self._protocol.state is OPEN:
            self._protocol.send_close(1000)
        return self.encode(b"")

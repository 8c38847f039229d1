"""Dialing: TCP, TLS and WebSocket, on a thread of the executor."""

from __future__ import annotations

import socket
import ssl
import threading
from typing import TYPE_CHECKING

from adapters.mqtt import packets
from adapters.mqtt.wire import Wire

if TYPE_CHECKING:
    from adapters.mqtt.handshake import Target


class Dialer:
    """One attempt to connect.

    :meth:`dial` runs on a thread of its own and owns the connection until it returns it. :meth:`cancel` may be called
    from another thread at any time, also after that.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()  # guards the three below
        self._dialing = True
        self._cancelled = False
        self._wire: Wire | None = None

    def dial(self) -> Wire:
        """Connect. Blocks.

        Raises:
            OSError, ValueError: the connection cannot be made, or was cancelled.
            ConnectFailedError: a file that TLS needs cannot be used, or the peer accepts no WebSocket.
        """
        target = self._target
        try:
            context = target.tls() if target.tls is not None else None
            web = target.web(target.host, target.port) if target.web is not None else None
            sock = socket.create_connection((target.address or target.host, target.port), target.connect_timeout)
            try:
                # without it, a small packet waits up to 40 ms for the acknowledgement of the one before
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if context is not None:
                    sock = context.wrap_socket(sock, server_hostname=target.host, do_handshake_on_connect=False)
                wire = Wire(sock, web, target.maximum_packet_size or packets.MAX_PACKET)
                with self._lock:
                    if self._cancelled:
                        raise ConnectionAbortedError("cancelled")
                    self._wire = wire
                sock.settimeout(target.connect_timeout)
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                if web is not None:
                    web.handshake(sock)
                sock.setblocking(False)
            except BaseException:
                sock.close()
                raise
            return wire
        finally:
            with self._lock:
                self._dialing = False
                if self._cancelled and self._wire is not None:
                    self._wire.dispose()

    def cancel(self) -> None:
        """Close the connection, or make the dialing thread close it as soon as it can. Idempotent."""
        with self._lock:
            self._cancelled = True
            if self._wire is not None:
                if self._dialing:
                    self._wire.interrupt()
                else:
                    self._wire.dispose()

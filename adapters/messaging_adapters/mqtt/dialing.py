"""Dialing: TCP, proxy, TLS and WebSocket, on a worker thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from messaging.connection.proxies import pass_through, reason_of
from messaging.errors import ConnectFailedError
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.wire import Wire

if TYPE_CHECKING:
    from messaging_adapters.mqtt.handshake import Target


class Dialer:
    """One attempt to connect.

    :meth:`dial` runs on a thread of its own and owns the connection until it returns it. :meth:`cancel` may be called
    from another thread at any time, also after that.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()  # guards the three below
        #: the socket that is being connected
        self._sock: socket.socket | None = None
        self._cancelled = False
        self._wire: Wire | None = None

    def dial(self) -> Wire:
        """Connect. Blocks.

        Raises:
            OSError, ValueError: the connection cannot be made, or was cancelled.
            ConnectFailedError: a file that TLS needs cannot be used, the peer accepts no WebSocket, or a proxy refused.
        """
        target = self._target
        try:
            tls = target.tls
            context = None if tls is None else tls.context()
            web = target.web(target.host, target.port) if target.web is not None else None
            sock = self._reached()
            # without it, a small packet waits up to 40 ms for the acknowledgement of the one before
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None and context is not None:
                # takes over the descriptor of the plain socket
                name = tls.name_of(target.host)
                secured = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
                sock = secured
                self._own(sock)
                secured.do_handshake()
                tls.made(secured)
            if web is not None:
                web.handshake(sock)
            sock.setblocking(False)
            wire = Wire(sock, web, target.maximum_packet_size or packets.MAX_PACKET)
            with self._lock:
                if self._cancelled:
                    raise ConnectionAbortedError("cancelled")
                self._sock, self._wire = None, wire
            return wire
        finally:
            self._release()  # unless the wire has it

    def _reached(self) -> socket.socket:
        """Return a socket that is connected to the broker, or to it through the proxy."""
        target, proxy = self._target, self._target.proxy
        if proxy is None:
            return self._connected(target.address or target.host, target.port)
        try:
            sock = self._connected(proxy.host, proxy.port)
            pass_through(proxy.dialogue(target.host, target.port), sock)
        except (OSError, UnicodeError) as error:
            raise ConnectFailedError(f"cannot connect to {proxy}: {reason_of(error)}") from error
        return sock

    def _connected(self, host: str, port: int) -> socket.socket:
        """Return a socket that is connected to the first address that answers."""
        failure: OSError | None = None
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            try:
                sock = socket.socket(family, kind, protocol)
                self._own(sock)
                sock.settimeout(self._target.connect_timeout)
                sock.connect(address)
            except OSError as error:
                failure = error
                self._release()
            else:
                return sock
        raise failure or OSError("the name of the host has no address")

    def _own(self, sock: socket.socket) -> None:
        """Have ``sock`` interrupted when the attempt is cancelled."""
        with self._lock:
            self._sock = sock
            if self._cancelled:
                raise ConnectionAbortedError("cancelled")

    def _release(self) -> None:
        """Close the socket that is being connected; under the lock, since its descriptor may be used again at once."""
        with self._lock:
            sock, self._sock = self._sock, None
            if sock is not None:
                sock.close()

    def cancel(self) -> None:
        """Close the connection, or make the dialing thread close it at once. Idempotent."""
        with self._lock:
            self._cancelled = True
            if self._sock is not None:
                with contextlib.suppress(OSError):  # ends a wait of the other thread; the descriptor stays open
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            elif self._wire is not None:
                self._wire.dispose()

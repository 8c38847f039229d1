"""A proxy on loopback: HTTP CONNECT, SOCKS 4 and SOCKS 5 on one port, with or without a log-in."""

from __future__ import annotations

import base64
import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

from messaging.testing.waiting import PATIENCE

#: of a proxy that asks for a log-in
USER, PASSWORD = "joe", "s3cret/pass"


class ProxyServer(socketserver.ThreadingTCPServer):
    """Passes bytes on to where it is asked to, as ``localhost`` if the name is ``broker.invalid``.

    Attributes:
        asked: kind of proxy, host and port of each request.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *, log_in: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Dialogue)
        self.log_in = log_in
        self.asked: list[tuple[str, str, int]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients leave."""


class _Dialogue(socketserver.BaseRequestHandler):
    server: ProxyServer

    def handle(self) -> None:
        sock: socket.socket = self.request
        sock.settimeout(PATIENCE)
        first = sock.recv(1, socket.MSG_PEEK)
        with contextlib.suppress(OSError):
            {b"\4": self.socks4, b"\5": self.socks5}.get(first, self.http)()

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.request.recv(size - len(data))
            if not more:
                raise OSError("the client left")
            data += more
        return data

    def until(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            data += self.read(1)
        return data.removesuffix(end)

    def http(self) -> None:
        request, *lines = self.until(b"\r\n\r\n").decode().split("\r\n")
        authority = request.split(" ")[1]
        wanted = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.server.log_in and f"Proxy-Authorization: Basic {wanted}" not in lines:
            self.request.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = authority.rpartition(":")
        with self.reach("http", host.strip("[]"), int(port)) as broker:
            self.request.sendall(b"HTTP/1.1 200 OK\r\nVia: test\r\n\r\n" if broker else b"HTTP/1.1 502 Nobody\r\n\r\n")
            self.relay(broker)

    def socks5(self) -> None:
        methods = self.read(self.read(2)[1])
        if self.server.log_in:
            if 2 not in methods:
                self.request.sendall(b"\5\xff")
                return
            self.request.sendall(b"\5\2")
            self.read(1)
            told = self.read(self.read(1)[0]), self.read(self.read(1)[0])
            is_right = told == (USER.encode(), PASSWORD.encode())
            self.request.sendall(b"\1\0" if is_right else b"\1\1")
            if not is_right:
                return
        else:
            self.request.sendall(b"\5\0")
        kind = self.read(4)[3]
        if kind == 3:
            host = self.read(self.read(1)[0]).decode()
        else:
            family = socket.AF_INET if kind == 1 else socket.AF_INET6
            host = socket.inet_ntop(family, self.read(4 if kind == 1 else 16))
        with self.reach("socks5", host, int.from_bytes(self.read(2), "big")) as broker:
            # an answer with a name, which few servers send
            self.request.sendall(b"\5\0\0\3\4test\0\0" if broker else b"\5\5\0\1\0\0\0\0\0\0")
            self.relay(broker)

    def socks4(self) -> None:
        head = self.read(8)
        self.until(b"\0")
        host = self.until(b"\0").decode() if head[4:7] == b"\0\0\0" else socket.inet_ntoa(head[4:8])
        with self.reach("socks4", host, int.from_bytes(head[2:4], "big")) as broker:
            self.request.sendall((b"\0\x5a" if broker else b"\0\x5b") + bytes(6))
            self.relay(broker)

    @contextlib.contextmanager
    def reach(self, kind: str, host: str, port: int) -> Iterator[socket.socket | None]:
        self.server.asked.append((kind, host, port))
        try:
            broker = socket.create_connection(("127.0.0.1" if host == "broker.invalid" else host, port), PATIENCE)
        except OSError:
            yield None
            return
        with broker:
            yield broker

    def relay(self, broker: socket.socket | None) -> None:
        if broker is None:
            return

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                source.settimeout(None)
                while data := source.recv(65_536):
                    target.sendall(data)
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        back = threading.Thread(target=pass_on, args=(broker, self.request), daemon=True)
        back.start()
        pass_on(self.request, broker)
        back.join(PATIENCE)


@contextlib.contextmanager
def proxy_server(*, log_in: bool = False) -> Iterator[ProxyServer]:
    with ProxyServer(log_in=log_in) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.01), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(PATIENCE)

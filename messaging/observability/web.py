"""The HTTP server of the monitoring endpoint and of the monitor: bounded, and limited in time.

An application is a function from a :class:`HttpRequest` to an :class:`HttpAnswer`. Its body may be a stream of events.

**Threads.** One thread accepts connections. Each connection is answered on a thread of its own, one request.
"""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import select
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from email.message import Message
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from messaging.errors import ArgumentError, ConfigurationError
from messaging.errors.text import SafeLog
from messaging.execution import clock, start_thread

logger = SafeLog(__name__)

#: how long a client may take to send its request, and to take an answer or an event of a stream, seconds
PATIENCE: Final = 10.0
_THREAD_NAME: Final = "messaging-http"


class HttpRequest(NamedTuple):
    """A request of a client.

    Attributes:
        path: without the query.
        headers: their names in any case.
        read: returns the body; of a larger one than the argument says, more bytes than that.
    """

    method: str
    path: str
    query: str
    headers: Message[str, str]
    read: Callable[[int], bytes]


class HttpAnswer(NamedTuple):
    """The answer to a request.

    Attributes:
        body: a stream is asked for its next bytes when the client has taken those before. It yields no bytes to have
            the connection checked. A client that has gone ends it; one that takes nothing for ``PATIENCE`` raises
            ``TimeoutError`` in it. A stream is always begun, and closed.
    """

    status: int
    body: bytes | Generator[bytes, None, None]
    headers: Mapping[str, str] = MappingProxyType({})


def text_answer(status: int, text: str, headers: Mapping[str, str] = MappingProxyType({})) -> HttpAnswer:
    """Return an answer for people."""
    return HttpAnswer(status, f"{text}\n".encode(), {"Content-Type": "text/plain; charset=utf-8", **headers})


def check_port(port: object) -> None:
    """Raise ``ArgumentError`` for an invalid port; 0 stands for a free one."""
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65_535:
        raise ArgumentError(f"port must be a whole number from 0 to 65535, not {port!r:.40}")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``. Names are not looked up: only ``localhost`` is known."""
    found = address(host)
    return host.lower() == "localhost" or (found is not None and found.is_loopback)


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that ``host`` is; ``None`` for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class WebServer(http.server.HTTPServer):
    """Listens, and answers once it is started.

    Args:
        title: of the application, for logs and errors.
        host, port: to listen at; port 0: a free one.
        answer: the application. Called on the thread of a connection.
        headers: of every response.
        most: connections at a time; further ones are closed.

    Raises:
        ConfigurationError: the address cannot be used: another process has the port, say.
    """

    request_queue_size = 32

    def __init__(
        self,
        title: str,
        host: str,
        port: int,
        answer: Callable[[HttpRequest], HttpAnswer],
        headers: Mapping[str, str],
        most: int,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.title = title
        self.answer = answer
        self.headers = headers
        self._most = most
        self._lock = threading.Lock()  # guards the following
        #: connections that have a place, the oldest first -> whether they have sent their request
        self._open: dict[Any, bool] = {}
        try:
            super().__init__((host, port), _HttpConnection)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigurationError(f"{title} {host}:{port}: cannot listen: {error}") from None
        self.port = int(self.server_address[1])

    def start(self) -> None:
        """Answer requests, until :meth:`stop`."""
        # :meth:`stop` alone closes the socket: of two threads that do, the second returns before it is closed
        start_thread(lambda: self.serve_forever(0.2), _THREAD_NAME)

    def stop(self) -> None:
        """Stop listening. Streams go on until they end by themselves."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on another thread. If all places are taken, the oldest connection without a request gives up its."""
        silent = None
        with self._lock:
            is_full = len(self._open) >= self._most
            if is_full:
                silent = next((each for each, is_heard in self._open.items() if not is_heard), None)
                self._open.pop(silent, None)
            if silent is not None or not is_full:
                self._open[request] = False
        if silent is not None:
            _cut(silent)
        elif is_full:
            self.shutdown_request(request)
            return
        try:
            start_thread(lambda: self._serve(request, client_address), _THREAD_NAME)
        except RuntimeError:  # no thread can be started
            self._leave(request)
            self.shutdown_request(request)

    def _leave(self, request: Any) -> None:
        """Release the place of a connection, unless another one has it already."""
        with self._lock:
            self._open.pop(request, None)

    def heard(self, request: Any) -> None:
        """Note that a connection has sent its request. From any thread."""
        with self._lock:
            if request in self._open:
                self._open[request] = True

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            logger.debug("%s: a client is gone", self.title)
        except Exception:
            logger.exception("%s: a request failed", self.title)
        finally:
            self.shutdown_request(request)
            self._leave(request)


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _HttpConnection(http.server.BaseHTTPRequestHandler):
    """One request of one connection."""

    server: WebServer
    server_version = "rx-messaging"
    sys_version = ""

    def handle(self) -> None:
        """Answer one request."""
        # a client that sends a byte now and then would keep its thread for long
        self._watch = clock.timer(PATIENCE, _cut, (self.request,))
        self._watch.daemon = True
        self._watch.start()
        try:
            super().handle()
        finally:
            self._watch.cancel()

    def __getattr__(self, name: str) -> Any:
        """Return the method that the base class calls for an HTTP method: the application knows which there are."""
        if name.startswith("do_"):
            return self._respond
        raise AttributeError(name)

    def _respond(self) -> None:
        self.server.heard(self.request)
        path, _, query = self.path.partition("?")
        answer = self.server.answer(HttpRequest(self.command, path, query, self.headers, self._read))
        if isinstance(answer.body, bytes):
            self._send_head(answer, {"Content-Length": str(len(answer.body))})
            if self.command != "HEAD":
                self.wfile.write(answer.body)
            return
        self._watch.cancel()  # a stream may last; each of its events has a limit
        self.request.settimeout(PATIENCE)
        with contextlib.closing(answer.body) as events:
            data = next(events, b"")
            self._send_head(answer, {})
            if self.command != "HEAD":
                self._send_events(data, events)

    def _read(self, most: int) -> bytes:
        length = self.headers.get("Content-Length", "0")
        # some more: an answer is lost where the connection is closed before its request was read
        return self.rfile.read(min(int(length), 16 * most)) if length.isascii() and length.isdigit() else b""

    def _send_head(self, answer: HttpAnswer, more: Mapping[str, str]) -> None:
        self.send_response(answer.status)
        for name, value in {**answer.headers, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def end_headers(self) -> None:
        """Add the headers of every response, also of responses that the base class sends."""
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        super().end_headers()

    def _send_events(self, data: bytes, events: Generator[bytes, None, None]) -> None:
        try:
            while not self._is_gone():
                self.wfile.write(data)
                data = next(events)
        except StopIteration:
            return
        except TimeoutError as error:
            logger.debug("%s: a client was too slow, and was dropped", self.server.title)
            with contextlib.suppress(StopIteration, TimeoutError):
                events.throw(error)
            _cut(self.request)

    def _is_gone(self) -> bool:
        """Return whether the client has closed the connection."""
        poll = select.poll()
        poll.register(self.request, select.POLLIN)
        return bool(poll.poll(0)) and not self.request.recv(1, socket.MSG_PEEK)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Log at the level for details only: probes come every few seconds."""
        logger.debug("%s: %s", self.server.title, format % args)

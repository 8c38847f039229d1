"""The monitoring endpoint: an HTTP server for orchestrators and Prometheus.

| path | answer |
|---|---|
| ``/healthz`` | 200, or 503 if the process does not work: restart it |
| ``/readyz`` | 200, or 503 with the problems of the parts: an instance has no connection, say |
| ``/metrics`` | every number of the DTOs for Prometheus (extra ``metrics``) |

It has no access control and shows no secrets. It listens on loopback unless another address is named.

**Threads.** One thread accepts connections, and at most ``MAX_CONNECTIONS`` threads answer, each one request.
"""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import json
import socket
import threading
from typing import TYPE_CHECKING, Any, Final, Self

from messaging.errors import ArgumentError, ClosedError, ConfigurationError, MissingExtraError, check_instance
from messaging.execution import clock, start_thread
from messaging.observability.health import check_health, check_readiness
from messaging.services import ServiceRegistry, default_registry
from messaging.text import SafeLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

logger = SafeLog(__name__)

#: connections that are answered at a time; further ones are closed
MAX_CONNECTIONS: Final = 16
#: how long a client may take to send its request, and to take the answer, seconds
_TIMEOUT: Final = 5.0
#: how long one connection may last, seconds
_DEADLINE: Final = 10.0
_THREAD_NAME: Final = "messaging-monitoring"
_JSON: Final = "application/json"


class MonitoringEndpoint:
    """Serves ``/healthz``, ``/readyz`` and ``/metrics``. Thread safe.

    ::

        with MonitoringEndpoint("127.0.0.1", 9464):
            ...

    Args:
        host: address to listen on, such as ``127.0.0.1``, ``::1`` or ``0.0.0.0``.
        port: 1 to 65535; 0: a free one.
        services: the registry of the parts; ``None``: that of the process.

    Raises:
        ArgumentError: an argument is not as described.

    Attributes:
        host, port: where it listens, once it is started.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 9464, services: ServiceRegistry | None = None) -> None:
        check_instance("host", host, str)
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65_535:
            raise ArgumentError(f"port must be a whole number from 0 to 65535, not {port!r:.40}")
        if services is not None:
            check_instance("services", services, ServiceRegistry)
        self.host = host
        self.port = port
        self._services = default_registry() if services is None else services
        self._metrics: Callable[[str, str], tuple[bytes, dict[str, str]]] | None = None
        self._server: _Server | None = None
        self._lock = threading.Lock()  # guards ``_server`` and ``_is_closed``
        self._is_closed = False

    def start(self) -> Self:
        """Listen.

        Raises:
            ConfigurationError: the address cannot be used: another process has the port, say.
            ClosedError: it was closed.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the monitoring endpoint is closed; make another one")
            if self._server is not None:
                return self
            try:
                self._metrics = _renderer(self._services)
            except MissingExtraError as error:
                logger.warning("monitoring endpoint: no /metrics: %s", error)
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            try:
                self._server = _Server(family, (self.host, self.port), self._answer)
            except (OSError, OverflowError, UnicodeError) as error:
                raise ConfigurationError(
                    f"monitoring endpoint {self.host}:{self.port}: cannot listen: {error}"
                ) from None
            self.port = int(self._server.server_address[1])
            start_thread(self._server.run, _THREAD_NAME)
        if not _is_loopback(self.host):
            logger.warning("monitoring endpoint: %s:%d is reachable from other machines", self.host, self.port)
        logger.info("monitoring endpoint: listening on %s:%d", self.host, self.port)
        return self

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with self._lock:
            self._is_closed = True
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, path: str, accept: str, encodings: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers for a path."""
        if path == "/healthz":
            health = check_health()
        elif path == "/readyz":
            health = check_readiness(self._services)
        elif path == "/metrics":
            if self._metrics is None:
                return _text(501, "metrics need an optional package: pip install 'rx-messaging[metrics]'")
            body, headers = self._metrics(accept, encodings)
            return 200, body, headers
        else:
            return _text(404, "there are /healthz, /readyz and /metrics")
        body = json.dumps(health.as_dict()).encode() + b"\n"
        return (200 if health.is_right else 503), body, {"Content-Type": _JSON}


def _text(status: int, text: str) -> tuple[int, bytes, dict[str, str]]:
    return status, text.encode() + b"\n", {"Content-Type": "text/plain; charset=utf-8"}


def _renderer(services: ServiceRegistry) -> Callable[[str, str], tuple[bytes, dict[str, str]]]:
    """Return what renders metrics for the headers ``Accept`` and ``Accept-Encoding``. Raises ``MissingExtraError``."""
    from messaging.observability.metrics import default_metrics, rendered

    registry = default_metrics(services)
    return lambda accept, encodings: rendered(registry, accept, encodings)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(http.server.HTTPServer):
    """Answers each connection on a thread of its own, a bounded number of them."""

    request_queue_size = 32

    def __init__(
        self, family: socket.AddressFamily, address: tuple[str, int],
        answer: Callable[[str, str, str], tuple[int, bytes, dict[str, str]]],
    ) -> None:  # fmt: skip
        self.address_family = family
        self.answer = answer
        self._lock = threading.Lock()  # guards the following
        #: connections that have a place, the oldest first -> whether they have sent their request
        self._open: dict[Any, bool] = {}
        super().__init__(address, _Handler)

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        # :meth:`stop` alone closes the socket: of two threads that do, the second returns before it is closed
        self.serve_forever(0.2)

    def stop(self) -> None:
        """End :meth:`run`, and stop listening."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on another thread. If all places are taken, the oldest connection without a request gives up its."""
        silent = None
        with self._lock:
            is_full = len(self._open) >= MAX_CONNECTIONS
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
        # a client that sends a byte now and then would keep its thread for long
        watch = clock.timer(_DEADLINE, _cut, (request,))
        watch.daemon = True
        watch.start()
        try:
            self.finish_request(request, client_address)
        except OSError:
            logger.debug("monitoring endpoint: a client is gone")
        except Exception:
            logger.exception("monitoring endpoint: a request failed")
        finally:
            watch.cancel()
            self.shutdown_request(request)
            self._leave(request)


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request of one connection."""

    timeout = _TIMEOUT
    server: _Server
    server_version = "rx-messaging"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the body."""
        self._respond(with_body=True)

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self._respond(with_body=False)

    def _respond(self, *, with_body: bool) -> None:
        self.server.heard(self.request)
        path = self.path.partition("?")[0]
        status, body, headers = self.server.answer(
            path, self.headers.get("Accept", ""), self.headers.get("Accept-Encoding", "")
        )
        self.send_response(status)
        for name, value in {**headers, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Log at the level for details only: probes come every few seconds."""
        logger.debug("monitoring endpoint: " + format, *args)  # noqa: G003

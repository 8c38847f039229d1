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

import functools
import json
import threading
from typing import TYPE_CHECKING, Final, Self

from messaging.errors import ClosedError, MissingExtraError
from messaging.errors.checks import check_instance, check_optional
from messaging.errors.text import SafeLog
from messaging.execution import Startable
from messaging.observability.health import check_health, check_readiness
from messaging.observability.web import HttpAnswer, HttpRequest, WebServer, check_port, is_loopback, text_answer
from messaging.services import ServiceRegistry, default_registry

if TYPE_CHECKING:
    from collections.abc import Callable

logger = SafeLog(__name__)

#: connections that are answered at a time; further ones are closed
MAX_CONNECTIONS: Final = 16
_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class MonitoringEndpoint(Startable):
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
        check_port(port)
        check_optional("services", services, ServiceRegistry)
        self.host = host
        self.port = port
        self._services = default_registry() if services is None else services
        #: renders metrics for the headers ``Accept`` and ``Accept-Encoding``
        self._metrics: Callable[[str, str], tuple[bytes, dict[str, str]]] | None = None
        self._server: WebServer | None = None
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
                from messaging.observability import metrics  # needs an extra

                self._metrics = functools.partial(metrics.rendered, metrics.default_metrics(self._services))
            except MissingExtraError as error:
                logger.warning("monitoring endpoint: no /metrics: %s", error)
            self._server = WebServer(
                "monitoring endpoint", self.host, self.port, self._answer, _HEADERS, MAX_CONNECTIONS
            )
            self.port = self._server.port
            self._server.start()
        if not is_loopback(self.host):
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

    def _answer(self, request: HttpRequest) -> HttpAnswer:
        if request.method not in ("GET", "HEAD"):
            return text_answer(501, "there are GET and HEAD")
        if request.path == "/healthz":
            health = check_health()
        elif request.path == "/readyz":
            health = check_readiness(self._services)
        elif request.path == "/metrics":
            if self._metrics is None:
                return text_answer(501, "metrics need an optional package: pip install 'rx-messaging[metrics]'")
            headers = request.headers
            return HttpAnswer(200, *self._metrics(headers.get("Accept", ""), headers.get("Accept-Encoding", "")))
        else:
            return text_answer(404, "there are /healthz, /readyz and /metrics")
        body = json.dumps(health.as_dict()).encode() + b"\n"
        return HttpAnswer(200 if health.is_right else 503, body, {"Content-Type": "application/json"})

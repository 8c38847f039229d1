"""The monitoring endpoint: an HTTP server for orchestrators and Prometheus.

| path | answer |
|---|---|
| ``/healthz`` | 200, or 503 if the process does not work: restart it |
| ``/readyz`` | 200, or 503 with the problems of the parts: an instance has no connection, say |
| ``/metrics`` | every number of the DTOs for Prometheus (extra ``metrics``) |

It has no access control and shows no secrets. It listens on loopback unless another address is named.

*Healthy* means that the process works: its engine's loop and a worker thread respond. *Ready* means that no part
reports a problem: instances are connected, journals can be written, routes of a gateway run.

**Threads.** One thread accepts connections, and at most ``MAX_CONNECTIONS`` threads answer, each one request. The
functions may be called from any thread but the engine's; they wait at most as long as they say.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Self

from messaging.errors import ArgumentError, ClosedError, MissingExtraError
from messaging.errors.checks import check_instance, check_optional, check_result
from messaging.errors.text import SafeLog
from messaging.execution import Flag, Startable, engine, seconds, workers
from messaging.observability.web import HttpAnswer, HttpRequest, WebServer, check_port, is_loopback, text_answer
from messaging.services import ServiceRegistry, default_registry
from messaging.services.reporting import reporters

logger = SafeLog(__name__)

#: connections that are answered at a time; further ones are closed
MAX_CONNECTIONS: Final = 16
#: how long the engine and a worker may take to respond, seconds
RESPONSE_TIMEOUT: Final = 2.0
#: problems that are told, at most
_MOST: Final = 100
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


# --- health and readiness


class Health(NamedTuple):
    """The outcome of a check.

    Attributes:
        is_right: whether there is no problem.
        problems: what is wrong, each with the part that says so: ``instance 'plant': …``.
        parts: number of parts that were asked.
    """

    is_right: bool
    problems: tuple[str, ...]
    parts: int

    def as_dict(self) -> Mapping[str, Any]:
        """Return the outcome for JSON."""
        return {"status": "ok" if self.is_right else "failing", "problems": list(self.problems), "parts": self.parts}


def check_health(timeout: float = RESPONSE_TIMEOUT) -> Health:
    """Return whether the engine's loop and a worker thread respond within ``timeout`` seconds.

    Raises:
        ArgumentError: ``timeout`` is no number of seconds.
    """
    limit = seconds(timeout)
    if not limit > 0:
        raise ArgumentError(f"timeout must be above 0, not {timeout!r:.40}")
    flag = Flag()
    try:
        engine().call(workers().submit, flag.set)
    except RuntimeError as error:  # the loop has ended
        return Health(False, (f"engine: {error}",), 1)
    if flag.wait(limit):
        return Health(True, (), 1)
    return Health(False, (f"engine: the event loop or the worker threads did not respond within {limit:g} s",), 1)


def check_readiness(services: ServiceRegistry | None = None, timeout: float = RESPONSE_TIMEOUT) -> Health:
    """Return whether the program is healthy, and none of its parts reports a problem.

    Args:
        services: the registry of the parts; ``None``: that of the process.
        timeout: see :func:`check_health`.

    Raises:
        ArgumentError: an argument is not as described.
    """
    check_optional("services", services, ServiceRegistry)
    health = check_health(timeout)
    if not health.is_right:
        return health
    problems: list[str] = []
    found = reporters(default_registry() if services is None else services)
    for each in found:
        try:
            problems += [
                f"{each.kind} '{each.name}': {problem}" for problem in check_result(each.problems(), "problems")
            ]
        except Exception as error:  # noqa: BLE001  # of a reporter of any program
            problems.append(f"{each.kind} '{each.name}': its problems cannot be read: {type(error).__name__}")
    return Health(not problems, tuple(problems[:_MOST]), len(found))

"""The monitoring endpoint and its checks: answers, access, hostile clients."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.errors import ArgumentError, ClosedError, ConfigurationError
from messaging.execution import engine
from messaging.gateway import Gateway
from messaging.observability import web
from messaging.observability.endpoint import MAX_CONNECTIONS, MonitoringEndpoint, check_health, check_readiness
from messaging.services import ServiceRegistry
from messaging.services.reporting import PartReporter, register_reporter
from messaging.testing.brokers import free_port
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.gateway.kit import settings


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def raw(port: int, request: bytes) -> bytes:
    """Send a request; return what comes back, which is nothing where the connection is refused."""
    found = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
        client.sendall(request)
        while data := client.recv(65_536):
            found += data
    return found


@pytest.fixture
def endpoint() -> Iterator[MonitoringEndpoint]:
    with MonitoringEndpoint(port=0, services=ServiceRegistry()) as endpoint:
        yield endpoint


def test_a_program_is_healthy_and_ready() -> None:
    services = ServiceRegistry()
    with (
        MonitoringEndpoint(port=0, services=services) as endpoint,
        messaging.connect("memory://ready", services=services),
    ):
        for path in ("/healthz", "/readyz"):
            status, headers, body = get(endpoint.port, path)
            assert status == 200, body
            assert json.loads(body)["status"] == "ok"
            assert headers["Content-Type"] == "application/json"
            assert headers["Cache-Control"] == "no-store"


def test_a_program_with_a_problem_is_healthy_and_not_ready() -> None:
    services = ServiceRegistry()
    register_reporter(services, PartReporter("pump", "p1", lambda: None, lambda: ["it is dry"]))

    def fail() -> list[str]:
        raise RuntimeError("secret")

    register_reporter(services, PartReporter("pump", "p2", lambda: None, fail))
    with MonitoringEndpoint(port=0, services=services) as endpoint:
        assert get(endpoint.port, "/healthz")[0] == 200
        status, _, body = get(endpoint.port, "/readyz")
    assert status == 503
    assert json.loads(body)["problems"] == [
        "pump 'p1': it is dry", "pump 'p2': its problems cannot be read: RuntimeError"
    ]  # fmt: skip


def test_an_instance_without_a_connection_is_not_ready() -> None:
    services = ServiceRegistry()
    with messaging.connect("mqtt://127.0.0.1:9", services=services, start_offline=True, name="plant"):
        found = check_readiness(services)
    assert not found.is_right
    assert "instance 'plant'" in found.problems[0]


def test_health_is_that_of_the_engine_and_the_workers() -> None:
    assert check_health() == (True, (), 1)
    for wrong in (-1, "2", None, float("nan")):
        with pytest.raises(ArgumentError):
            check_health(wrong)  # type: ignore[arg-type]


def test_a_program_whose_engine_hangs_is_neither_healthy_nor_ready() -> None:
    go_on = threading.Event()
    engine().call(go_on.wait, PATIENCE)
    try:
        found = check_health(0.05)
        assert not found.is_right
        assert found.problems == ("engine: the event loop or the worker threads did not respond within 0.05 s",)
        assert check_readiness(ServiceRegistry(), 0.05) == found
    finally:
        go_on.set()
    assert check_health(PATIENCE).is_right


def test_metrics_are_served_in_the_format_that_is_asked_for() -> None:
    services = ServiceRegistry()
    with (
        MonitoringEndpoint(port=0, services=services) as endpoint,
        messaging.connect("memory://served", services=services),
    ):
        status, headers, body = get(endpoint.port, "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain")
        assert b"messaging_instance_publisher_published_messages_total" in body
        status, headers, body = get(endpoint.port, "/metrics?x=1", Accept="application/openmetrics-text; version=1.0.0")
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")


@table("path", ["/", "/metric", "/../etc/passwd", "/healthz/"])
def test_other_paths_are_not_found(path: str, endpoint: MonitoringEndpoint) -> None:
    status, _, body = get(endpoint.port, path)
    assert status == 404
    assert b"/healthz, /readyz and /metrics" in body


def test_other_methods_are_refused(endpoint: MonitoringEndpoint) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}/healthz", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=PATIENCE)
    with refusal.value:
        assert refusal.value.code == 501
    request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}/healthz", method="HEAD")
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert answer.status == 200
        assert answer.read() == b""


@table("sent", [b"", b"\r\n", b"GET", b"\x00\xff" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"x" * 200_000])
def test_junk_ends_its_connection_only(sent: bytes, endpoint: MonitoringEndpoint) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port), PATIENCE) as client:
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65_536):
                pass
        except OSError as error:  # the endpoint has closed it, which shutdown() reports as ENOTCONN
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise
    assert get(endpoint.port, "/healthz")[0] == 200


def test_clients_that_send_nothing_do_not_lock_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PATIENCE", 0.3)
    with MonitoringEndpoint(port=0, services=ServiceRegistry()) as endpoint:
        clients = [socket.create_connection(("127.0.0.1", endpoint.port), PATIENCE) for _ in range(MAX_CONNECTIONS)]
        try:
            eventually(lambda: b"200 OK" in raw(endpoint.port, b"GET /healthz HTTP/1.0\r\n\r\n"))
        finally:
            for client in clients:
                client.close()


@table("sent", [b"", b"GET /heal", b"GET /healthz HTTP/1.1\r\nHost: x\r\n"])
def test_probes_are_answered_at_once_whatever_silent_clients_are_connected(
    sent: bytes, endpoint: MonitoringEndpoint
) -> None:
    """Connections that have sent no request give up their places, the oldest first."""
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), PATIENCE))
            silent.sendall(sent)
        for _ in range(20):
            status, _, body = get(endpoint.port, "/healthz")
            assert (status, json.loads(body)["status"]) == (200, "ok")


def test_a_port_that_is_taken_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}: cannot listen"):
            MonitoringEndpoint(port=port).start()


@table("arguments", [{"host": None}, {"port": -1}, {"port": 65_536}, {"port": True}, {"services": 3}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        MonitoringEndpoint(**arguments)


def test_a_closed_endpoint_does_not_listen() -> None:
    # an address of its own: another test may get the port of 127.0.0.1 as soon as it is free
    host = "127.0.0.9" if sys.platform == "linux" else "127.0.0.1"
    endpoint = MonitoringEndpoint(host, port=0, services=ServiceRegistry()).start()
    assert endpoint.start() is endpoint
    socket.create_connection((host, endpoint.port), 1).close()
    endpoint.close()
    endpoint.close()
    with pytest.raises(OSError):
        socket.create_connection((host, endpoint.port), 1)
    with pytest.raises(ClosedError):
        endpoint.start()


def test_a_gateway_serves_the_endpoint_of_its_configuration(tmp_path: Path) -> None:
    port, other = free_port(), free_port()
    before, after = (settings(tmp_path, name="served", monitoring=f"127.0.0.1:{each}") for each in (port, other))
    with Gateway(before, services=ServiceRegistry()) as gateway:
        eventually(lambda: get(port, "/readyz")[0] == 200)
        assert b'messaging_gateway_routes_received_messages_total{name="served",route="r"}' in get(port, "/metrics")[2]
        gateway.reload(after)
        assert get(other, "/readyz")[0] == 200
        with pytest.raises(urllib.error.URLError):
            get(port, "/readyz")
    with pytest.raises(urllib.error.URLError):
        get(other, "/readyz")
    assert not [each for each in threading.enumerate() if each.name == "messaging-http" and each.is_alive()]

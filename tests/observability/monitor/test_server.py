"""The monitor over HTTP: snapshots, events, access, the inspector, and processes at a broker."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Message
from messaging.errors import ArgumentError, ClosedError, ConfigurationError
from messaging.gateway import Gateway
from messaging.observability import web
from messaging.observability.monitor import SnapshotPublisher
from messaging.observability.monitor.access import TOKEN_VARIABLE
from messaging.observability.monitor.inspector import MAX_INSPECTIONS
from messaging.observability.monitor.server import MAX_VIEWERS, Monitor
from messaging.services import ServiceRegistry
from messaging.services.reporting import PartReporter, register_reporter
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.gateway.kit import settings

TOKEN = "0123456789abcdef-token"


def ask(
    monitor: Monitor, path: str, *, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=PATIENCE)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, None if body is None else json.dumps(body), given)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@contextlib.contextmanager
def events(monitor: Monitor, path: str = "/api/events", body: Any = None, **headers: str) -> Iterator[Any]:
    """Follow server-sent events: an iterator of names and data."""
    connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=PATIENCE)
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()

    def follow() -> Iterator[tuple[str, Any]]:
        name = ""
        while line := answer.readline():
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield name, json.loads(line[6:])

    try:
        yield follow()
    finally:
        answer.close()
        connection.close()


@pytest.fixture
def services() -> ServiceRegistry:
    return ServiceRegistry()


@pytest.fixture
def monitor(services: ServiceRegistry) -> Iterator[Monitor]:
    with Monitor(services=services, port=0) as monitor:
        yield monitor


def test_the_reports_of_a_process_are_shown_with_their_rates(services: ServiceRegistry) -> None:
    with (
        messaging.connect("memory://monitored", services=services, name="plant") as m,
        Monitor(services=services, port=0, interval=0.1) as monitor,
        events(monitor) as followed,
    ):
        m.on("a/+", lambda _: None).ready.result(PATIENCE)
        assert next(followed)[0] == "histories"
        rate = 0.0
        for name, data in followed:
            m.publish("a/1", b"x").result(PATIENCE)
            if name != "process":
                continue
            (report,) = [each for each in data["reports"] if each["kind"] == "instance"]
            assert report["name"] == "plant"
            assert report["state"] == ["connected", "good"]
            rate = report["chart"]["in /s"] or 0.0
            if rate > 0:
                break
        assert rate > 0
        status, _, body = ask(monitor, "/api/snapshot")
        assert status == 200
        (process,) = json.loads(body)["processes"].values()
        assert process["reports"][0]["data"]["publisher"]["published"] >= 1


@pytest.mark.parametrize("broker", ["mosquitto", "rabbitmq"])
def test_processes_are_shown_until_they_end(
    request: pytest.FixtureRequest, broker: str, services: ServiceRegistry
) -> None:
    watched, url = ServiceRegistry(), request.getfixturevalue(broker).url
    with (
        messaging.connect(url, services=services, name="watching") as m,
        messaging.connect(url, services=watched, name="watched") as other,
        Monitor(m, port=0, interval=0.1, channel="monitored/by") as monitor,
        events(monitor) as followed,
    ):
        with SnapshotPublisher(other, interval=0.2, process="press-1", channel="monitored/by"):
            process = next(data for name, data in followed if name == "process")
            assert process["process"] == "press-1"
            assert [report["name"] for report in process["reports"]] == ["watched"]
            wanted = {"instance": "watching", "channel": "monitored/#", "count": 5, "seconds": 60}
            with events(monitor, "/api/inspect", wanted) as inspected:
                messages = next(data for name, data in inspected if name == "messages")["messages"]
                assert {each["channel"] for each in messages} == {"monitored/by/press-1"}
        gone = next(data for name, data in followed if name == "gone")
        assert gone["key"] == process["key"]


def test_a_gateway_publishes_its_snapshots_where_its_configuration_says(mosquitto: Mosquitto, tmp_path: Path) -> None:
    instances = {"a": {"url": mosquitto.url}}
    shown = {"instance": "a", "interval": "200 ms", "channel": "shown/by"}
    chosen = settings(tmp_path, name="shown-gateway", instances=instances, routes={}, monitor=shown)
    with (
        messaging.connect(mosquitto.url, services=ServiceRegistry()) as m,
        Monitor(m, port=0, interval=0.1, channel="shown/by") as monitor,
        events(monitor) as followed,
        Gateway(chosen, services=ServiceRegistry()) as gateway,
    ):
        for name, data in followed:
            kinds = {report["kind"]: report["name"] for report in data["reports"]} if name == "process" else {}
            if kinds.get("gateway") == "shown-gateway":
                break
        gateway.reload(chosen.model_copy(update={"monitor": None}))
        assert any(name == "gone" for name, _ in followed)


def test_the_page_is_confined(monitor: Monitor) -> None:
    for path, content_type in (
        ("/", "text/html"),
        ("/monitor.js", "text/javascript"),
        ("/monitor.css", "text/css"),
    ):
        status, headers, body = ask(monitor, path)
        assert status == 200
        assert headers["content-type"].startswith(content_type)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert b"innerHTML" not in body
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b""), "nothing of other hosts"
    assert ask(monitor, "/../access.py")[0] == 404
    assert ask(monitor, "/static/index.html")[0] == 404


def test_other_addresses_need_a_token(
    services: ServiceRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match="needs a token"):
        Monitor(services=services, host="0.0.0.0", port=0)
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    with Monitor(services=services, host="0.0.0.0", port=0, token_file=file) as monitor:
        assert ask(monitor, "/")[0] == 200, "the page has the field for the token"
        status, headers, _ = ask(monitor, "/api/snapshot")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert ask(monitor, "/api/snapshot", Authorization="Bearer wrong-wrong-wrong-wrong")[0] == 401
        assert ask(monitor, "/api/snapshot", Authorization=f"Basic {TOKEN}")[0] == 401
        assert ask(monitor, f"/api/snapshot?token={TOKEN}")[0] == 400, "it would be in logs"
        assert ask(monitor, "/api/snapshot", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert TOKEN not in repr(vars(monitor))


@table(
    "headers, status",
    [
        ({"Host": "evil.example.com"}, 421),
        ({"Host": "127.0.0.1.evil.example.com"}, 421),
        ({"Host": "localhost:99"}, 200),
        ({"Origin": "http://evil.example.com"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_sites_get_nothing(headers: dict[str, str], status: int, monitor: Monitor) -> None:
    assert ask(monitor, "/api/snapshot", **headers)[0] == status


def test_the_inspector_shows_messages_and_hides_secrets(services: ServiceRegistry) -> None:
    with (
        messaging.connect("memory://inspected", services=services, name="plant") as m,
        Monitor(services=services, port=0, mask=["pincode"]) as monitor,
    ):
        assert json.loads(ask(monitor, "/api/snapshot")[2])["instances"] == ["plant"]
        wanted = {"instance": "plant", "channel": "in/#", "count": 5, "seconds": 5}
        with events(monitor, "/api/inspect", wanted) as followed:
            payloads = [b'{"user": "u", "password": "hunter2", "pincode": 1234}', b"token=hunter3", b"\x00\xff", b""]
            eventually(lambda: m.publish("in/x", b"", mandatory=True).exception(PATIENCE) is None)
            for payload in payloads:
                m.publish("in/x", payload, headers={"authorization": "Bearer hunter4"}).result(PATIENCE)
            found: list[Any] = []
            for _, data in followed:
                found += data.get("messages", [])
                if len(found) >= 5 or (found and found[-1]["form"] == "empty" and len(found) > 1):
                    break
        text = json.dumps(found)
        assert "hunter" not in text
        assert "1234" not in text
        assert {each["form"] for each in found} >= {"json", "text", "hex"}
        assert found[-1]["channel"] == "in/x"


@table(
    "body, status, text",
    [
        ([], 400, "JSON object"),
        ({"instance": "x", "channel": "a"}, 400, "no instance 'x'"),
        ({"instance": "plant", "channel": "a/#/b"}, 400, "#"),
        ({"instance": "plant", "channel": "a", "count": 0}, 400, "count"),
        ({"instance": "plant", "channel": "a", "seconds": "1"}, 400, "seconds"),
        ({"instance": "plant", "channel": "a" * 5000}, 413, "4096"),
    ],
)
def test_a_wrong_inspection_says_what_is_wrong(services: ServiceRegistry, body: Any, status: int, text: str) -> None:
    with (
        messaging.connect("memory://wrongly-inspected", services=services, name="plant"),
        Monitor(services=services, port=0) as monitor,
    ):
        found, _, answer = ask(monitor, "/api/inspect", method="POST", body=body)
        assert found == status
        assert text in json.loads(answer)["problem"]


def test_the_number_of_viewers_is_bounded(services: ServiceRegistry) -> None:
    with Monitor(services=services, port=0) as monitor, contextlib.ExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            next(stack.enter_context(events(monitor)))
        assert ask(monitor, "/api/events")[0] == 503


def test_closing_ends_the_streams(services: ServiceRegistry) -> None:
    monitor = Monitor(services=services, port=0).start()
    with events(monitor) as followed:
        next(followed)
        began = time.monotonic()
        monitor.close()
        assert time.monotonic() - began < PATIENCE / 2
        list(followed)
    monitor.close()
    with pytest.raises(ClosedError):
        monitor.start()


def test_a_reporter_that_fails_or_lies_is_shown_as_such(services: ServiceRegistry) -> None:
    def fail() -> object:
        raise RuntimeError("password=hunter2")

    register_reporter(services, PartReporter("broken", "x", fail))
    register_reporter(services, PartReporter("instance", "odd", lambda: {"connection": 7}))
    with Monitor(services=services, port=0, interval=0.1) as monitor, events(monitor) as followed:
        process = next(data for name, data in followed if name == "process")
    states = {report["name"]: report["state"] for report in process["reports"]}
    assert states["x"] == ["no report", "bad"]
    assert "hunter2" not in json.dumps(process)
    assert "odd" in states


def test_a_port_that_is_taken_is_a_configuration_error(services: ServiceRegistry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="cannot listen"):
        Monitor(services=services, port=taken.getsockname()[1]).start()


@table(
    "arguments",
    [{"m": 3}, {"services": 3}, {"port": -1}, {"port": True}, {"interval": 0}, {"host": ""},
     {"token": "short"}, {"channel": 3}, {"mask": [""]},
     {"allowed_hosts": "a"}],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Monitor(**arguments)


# --- clients that leave, or take nothing


def leave_at_once(monitor: Monitor, path: str, body: Any = None) -> None:
    """Send a request, and reset the connection without reading the answer."""
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    with socket.create_connection(("127.0.0.1", monitor.port), PATIENCE) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)


def test_inspections_whose_viewers_left_make_room(services: ServiceRegistry) -> None:
    wanted = {"instance": "plant", "channel": "in/#", "count": 5, "seconds": 600}
    with (
        messaging.connect("memory://left", services=services, name="plant") as m,
        Monitor(services=services, port=0, interval=0.1) as monitor,
    ):
        for _ in range(2 * MAX_INSPECTIONS):
            leave_at_once(monitor, "/api/inspect", wanted)
            with (
                contextlib.suppress(AssertionError),
                events(monitor, "/api/inspect", wanted),
            ):  # or there is no room yet
                pass
        eventually(lambda: not m.runtime.get_runtime_dto().subscriptions)
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_INSPECTIONS):
                stack.enter_context(events(monitor, "/api/inspect", wanted))
            status, _, answer = ask(monitor, "/api/inspect", method="POST", body=wanted)
            assert status == 503
            assert "4 inspections are open" in json.loads(answer)["problem"]
        eventually(lambda: not m.runtime.get_runtime_dto().subscriptions)


def test_viewers_that_left_make_room(services: ServiceRegistry) -> None:
    def all_fit() -> bool:
        with contextlib.suppress(AssertionError), contextlib.ExitStack() as stack:
            for _ in range(MAX_VIEWERS):
                next(stack.enter_context(events(monitor)))
            return True
        return False

    with Monitor(services=services, port=0, interval=0.1) as monitor:
        for _ in range(2 * MAX_VIEWERS):
            leave_at_once(monitor, "/api/events")
        eventually(all_fit)
        eventually(all_fit)


def test_a_viewer_that_takes_nothing_is_dropped(services: ServiceRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PATIENCE", 0.2)
    for number in range(20):
        many = [f"{number:0300}"] * 50
        register_reporter(services, PartReporter("large", f"x{number}", lambda many=many: {"many": many}))  # type: ignore[misc]
    with Monitor(services=services, port=0, interval=0.1) as monitor, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(PATIENCE)
        slow.connect(("127.0.0.1", monitor.port))
        slow.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with events(monitor) as followed:
            eventually(lambda: next(data for name, data in followed if name == "counts")["dropped"] == 1)
            assert next(data for name, data in followed if name == "counts")["viewers"] == 1, "the other one stays"
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(65536):
                pass


def test_a_client_without_a_request_is_disconnected(services: ServiceRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    with Monitor(services=services, port=0, interval=0.1) as monitor, events(monitor) as followed:
        monkeypatch.setattr(web, "PATIENCE", 0.2)
        for request in (b"", b"GET /api/snapshot HTTP/1.1\r\nHost: loc"):
            with socket.create_connection(("127.0.0.1", monitor.port), PATIENCE) as idle:
                idle.sendall(request)
                with contextlib.suppress(ConnectionResetError):
                    assert idle.recv(1) == b""
        began = time.monotonic()
        for name, _ in followed:
            if name == "counts" and time.monotonic() > began + 1:
                break  # the viewer is not disconnected


def test_inspecting_leaves_the_guarantee_to_the_streams_of_the_application(
    mosquitto: Mosquitto, services: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = {"instance": "plant", "channel": "guaranteed/#", "count": 5, "seconds": 60}
    found: Recorder[Message] = Recorder()
    with (
        messaging.connect(mosquitto.url, version="3.1.1", services=services, name="plant") as m,
        Monitor(services=services, port=0) as monitor,
    ):
        m.on("guaranteed/+", found, qos=1).ready.result(PATIENCE)
        with events(monitor, "/api/inspect", wanted) as followed:
            eventually(lambda: len(m.runtime.get_runtime_dto().subscriptions) == 2)
            m.publish("guaranteed/x", b"1", qos=1).result(PATIENCE)
            assert found.wait_for(1)[0].context.extensions["qos"] == "1"
            assert next(data for name, data in followed if name == "messages")["messages"][0]["payload"] == "1"
        eventually(lambda: len(m.runtime.get_runtime_dto().subscriptions) == 1)
        m.publish("guaranteed/x", b"2", qos=1).result(PATIENCE)
        assert found.wait_for(2)[1].payload == b"2", "the stream of the application stays"
    assert "overlap" not in caplog.text


@table(
    "method, path, status",
    [("PUT", "/", 405), ("DELETE", "/api/snapshot", 405), ("POST", "/api/snapshot", 405), ("GET", "/api/inspect", 405),
     ("GET", "/none", 404), ("HEAD", "/", 200), ("OPTIONS", "/", 405)],
)  # fmt: skip
def test_other_requests_are_refused(method: str, path: str, status: int, monitor: Monitor) -> None:
    found, headers, _ = ask(monitor, path, method=method)
    assert found == status
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers


def test_messages_that_are_no_snapshots_are_counted(mosquitto: Mosquitto, services: ServiceRegistry) -> None:
    with (
        messaging.connect(mosquitto.url, services=services) as m,
        Monitor(m, port=0, interval=0.1, channel="junk/snapshots") as monitor,
        events(monitor) as followed,
    ):
        for number, payload in enumerate((b"x", b"{}", b"\xff" * 300_000)):
            m.publish(f"junk/snapshots/{number}", payload).result(PATIENCE)
        eventually(lambda: next(data for name, data in followed if name == "counts")["invalid"] == 3)
        assert json.loads(ask(monitor, "/api/snapshot")[2])["processes"] == {}

"""``messaging gateway``: run, check, plan, schema, status, reload and dead letters."""

from __future__ import annotations

import json
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import messaging
from messaging.gateway import Gateway, GatewaySettings, load, plan, schema
from messaging.gateway.control import call
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.cli.conftest import Run, refused
from tests.cli.program import Program, ready
from tests.gateway.kit import settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration whose brokers are in the process that runs it."""
    file = tmp_path / "gateway.toml"
    file.write_text(f"""
name = "cli"
data = "data"

[instances.a]
url = "memory://{tmp_path.name}-a"

[instances.b]
url = "memory://{tmp_path.name}-b"

[routes.telemetry]
from = {{ instance = "a", channel = "in/{{x}}", queue = "q" }}
to = {{ instance = "b", channel = "out/{{x}}" }}
buffer = {{ full = "drop_oldest", max_bytes = "64 MiB", max_age = "7 d", order = "newest_first" }}
where = "(channel=*)"
transform = [{{ select = ["celsius"] }}, {{ unit = {{ field = "celsius", from = "degC", to = "K" }} }}]
deadband = {{ field = "celsius", percent = 5 }}
batch = {{ count = 10, delay = "500 ms" }}
compress = "gzip"
rate = {{ messages = 100 }}
priority = 7

[requests.ask]
from = {{ instance = "b", channel = "ask/{{x}}" }}
to = {{ instance = "a", channel = "{{x}}/ask" }}

[status]
instance = "b"
""")
    return file


@pytest.fixture
def running(file: Path) -> Iterator[Gateway]:
    """A gateway with this configuration, in this process, whose steps fail for what is no JSON."""
    gateway = Gateway(load(file))
    gateway.read_settings = lambda: load(file)
    with gateway:
        yield gateway


# --- the file


def test_check_of_a_right_file(run: Run, file: Path) -> None:
    code, out, err = run("gateway", "check", str(file))
    assert (code, err) == (0, "")
    assert out == f"{file}: right\n"
    assert json.loads(run("gateway", "check", str(file), "--json")[1]) == {"problems": []}


def test_check_writes_problems_as_json(run: Run, file: Path) -> None:
    file.write_text(file.read_text().replace('full = "drop_oldest"', 'full = "drop"'))
    code, out, err = run("gateway", "check", str(file), "--json")
    assert code == 1
    assert err.endswith(": 1 error\n")
    (problem,) = json.loads(out)["problems"]
    assert (problem["key"], problem["severity"]) == ("routes.telemetry.buffer.full", "error")
    assert problem["line"] == 14


@table("command", ["check", "plan", "run", "status", "reload"])
def test_a_file_that_is_not_there_is_named(run: Run, command: str, tmp_path: Path) -> None:
    assert "No such file" in refused(run, "gateway", command, str(tmp_path / "missing.toml"))


def test_plan_shows_what_goes_where(run: Run, file: Path) -> None:
    code, out, _ = run("gateway", "plan", str(file))
    assert code == 0
    words = " ".join(out.split())
    for word in ("a:in/{x}", "b:out/{x}", "64 MiB", "select celsius", "gzip", "priority 7", "b:gateways/cli/state"):
        assert word in words
    found = json.loads(run("gateway", "plan", str(file), "--json")[1])
    assert [(each["kind"], each["name"]) for each in found["flows"]] == [
        ("route", "telemetry"), ("request", "ask"), ("status", "status")
    ]  # fmt: skip
    assert found["flows"][0]["subscribes"] == "in/+"


def test_a_plan_hides_passwords(file: Path) -> None:
    text = file.read_text().replace("memory://", "mqtt://user:hunter2@", 1)
    file.write_text(text)
    assert "hunter2" not in str(plan(load(file)))


def test_the_schema_admits_what_may_stand_for_a_duration_of_deduplicate() -> None:
    def kinds(node: dict[str, Any]) -> Iterator[str]:
        if "type" in node:
            yield node["type"]
        for each in node.get("anyOf", ()):
            yield from kinds(each)

    assert {*kinds(schema()["$defs"]["SourceSettings"]["properties"]["deduplicate"])} == {
        "boolean", "number", "string", "null",
    }  # fmt: skip


def test_the_published_schema_is_that_of_the_settings(run: Run) -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "gateway.schema.json"
    assert json.loads(page.read_text()) == schema(), "run: python docs/generated.py --write"
    assert json.loads(run("gateway", "schema")[1]) == schema()
    found = schema()
    assert found["required"] == ["name", "data", "instances"]
    assert {"from", "to", "buffer"} <= found["$defs"]["RouteSettings"]["properties"].keys()
    assert found["$defs"]["BufferSettings"]["properties"]["full"]["enum"] == ["block", "drop_oldest", "drop_newest"]


# --- a running gateway


def test_status_and_reload_of_a_running_gateway(run: Run, file: Path, running: Gateway) -> None:
    eventually(lambda: not running.problems())
    eventually(lambda: all(each.is_source_up and each.is_target_up for each in running.report().routes))
    code, out, _ = run("gateway", "status", str(file))
    assert code == 0
    assert "gateway cli: running" in out
    assert "telemetry" in out
    found = json.loads(run("gateway", "status", str(running.settings.data), "--json")[1])
    assert found["routes"][0]["name"] == "telemetry"
    file.write_text(file.read_text().replace("priority = 7", "priority = 2"))
    assert run("gateway", "reload", str(file))[0] == 0
    assert running.settings.routes["telemetry"].priority == 2
    file.write_text(file.read_text().replace("priority = 2", "priority = 22"))
    code, _, err = run("gateway", "reload", str(file))
    assert code == 2
    assert "routes.telemetry.priority" in err
    assert running.settings.routes["telemetry"].priority == 2


def test_status_names_the_cause_of_a_target_that_is_down(run: Run, tmp_path: Path, refusing_port: int) -> None:
    instances = {"a": {"url": "memory://status-a"}, "b": {"url": f"mqtt://127.0.0.1:{refusing_port}"}}
    with Gateway(settings(tmp_path / "data", instances=instances)) as gateway:
        eventually(lambda: gateway.report().routes[0].is_source_up)
        eventually(lambda: "refused" in run("gateway", "status", str(tmp_path / "data"))[1])
        code, out, _ = run("gateway", "status", str(tmp_path / "data"))
        assert code == 1
        assert "problem: instance 'b': connecting: cannot connect to " in out
        assert gateway.problems() == []


def test_status_without_a_running_gateway(run: Run, file: Path) -> None:
    assert "no gateway runs" in refused(run, "gateway", "status", str(file), code=1)


def test_dead_letters_are_listed_shown_replayed_and_dropped(run: Run, file: Path, running: Gateway) -> None:
    route = running.route("telemetry")
    eventually(lambda: route.report().is_subscribed)
    with messaging.connect(running.settings.instances["a"].url) as m:
        for payload in (b"one", b"two", b"three"):
            m.publish("in/7", payload).result(PATIENCE)
    eventually(lambda: route.buffer.journal.dead_letter_count == 3)
    command = ("gateway", "dead-letters")
    code, out, _ = run(*command, "list", str(file))
    assert code == 0
    assert out.count("in/7") == 3
    code, out, _ = run(*command, "list", str(file), "--where", "(id=2)", "--json")
    (letter,) = [json.loads(line) for line in out.splitlines()]
    assert (letter["id"], letter["route"], letter["stage"], letter["channel"]) == (2, "telemetry", "source", "in/7")
    shown = json.loads(run(*command, "show", str(file), "--route", "telemetry", "--id", "2")[1])
    assert shown["payload"] == "two"
    assert "no dead letter 9" in refused(run, *command, "show", str(file), "--route", "telemetry", "--id", "9")
    code, out, _ = run(*command, "replay", str(file), "--id", "1", "--rate", "100")
    assert code == 1
    assert "0 replayed, 1 failed again" in out
    assert "1 dropped" in run(*command, "drop", str(file), "--id", "1")[1]
    running.close()
    assert "2 dropped" in run(*command, "drop", str(file), "--all")[1], "a gateway that does not run"
    assert run(*command, "list", str(file))[1] == ""


@table(
    "arguments, text",
    [
        (("drop",), "--all"),
        (("replay", "--all", "--id", "1"), "--all"),
        (("replay", "--all", "--rate", "0"), "--rate"),
        (("list", "--where", "(id=1"), "LDAP filter"),
        (("list", "--route", "telemetri"), "no route 'telemetri'"),
    ],
)
def test_wrong_arguments_are_refused(run: Run, file: Path, arguments: tuple[str, ...], text: str) -> None:
    command, *options = arguments
    assert text in refused(run, "gateway", "dead-letters", command, str(file), *options)


# --- the service


class Manager:
    """The notification socket of systemd."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(PATIENCE)
        self.heard: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def wait_for(self, text: str) -> None:
        """Wait for a notification that holds a text."""
        while not self.heard or text not in self.heard[-1]:
            self.heard.append(self._socket.recv(65_536).decode())


def test_systemd_hears_of_start_reload_watchdog_and_stop(file: Path, tmp_path: Path) -> None:
    variables = {"WATCHDOG_USEC": "1500000"}
    with (
        Manager(tmp_path) as manager,
        Program("gateway", "run", str(file), variables=variables | {"NOTIFY_SOCKET": manager.address}) as gateway,
    ):
        manager.wait_for("READY=1")
        assert "STATUS=1 routes" in manager.heard[-1]
        manager.wait_for("WATCHDOG=1")
        gateway.signal(signal.SIGHUP)
        manager.wait_for("RELOADING=1")
        assert "MONOTONIC_USEC=" in manager.heard[-1]
        manager.wait_for("READY=1")
        gateway.signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert gateway.ended() == 0
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


def test_a_reload_of_a_broken_file_keeps_the_gateway_running(file: Path) -> None:
    right = file.read_text()
    with ready("running with 1 routes", "gateway", "run", str(file), "--log-format", "json") as gateway:
        file.write_text(right.replace("priority = 7", 'priority = "high"'))
        gateway.signal(signal.SIGHUP)
        error = json.loads(gateway.says("must be a whole number"))
        assert f"{file}:" in error["message"]
        assert error["level"] == "error"
        assert b"not reloaded" in gateway.err.until(lambda _: True)
        file.write_text(right)
        gateway.signal(signal.SIGHUP)
        gateway.says("changed configuration")
        gateway.signal(signal.SIGINT)
        gateway.says("stopped")
        assert gateway.ended() == 0


def test_a_second_signal_ends_the_gateway_at_once(mosquitto: Mosquitto, tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(f"""
name = "slow"
data = "data"
drain_timeout = "60 s"
[instances.a]
url = "{mosquitto.url}"
[routes.r]
from = {{ instance = "a", channel = "slow/in" }}
to = {{ instance = "a", channel = "slow/out" }}
buffer = {{ full = "block" }}
rate = {{ messages = 1, burst = 1 }}
""")
    with (
        Manager(tmp_path) as manager,
        Program("gateway", "run", str(file), variables={"NOTIFY_SOCKET": manager.address}) as gateway,
        messaging.connect(mosquitto.url) as m,
    ):

        def depth() -> int:
            try:
                return int(call(tmp_path / "data", "status")["routes"][0]["buffer"]["depth"])
            except messaging.MessagingError:
                return 0

        def stored() -> bool:
            m.publish("slow/in", b"x", qos=1).result(PATIENCE)
            return depth() > 10

        eventually(stored)
        gateway.signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert gateway.process.poll() is None, "it drains for up to a minute"
        gateway.signal(signal.SIGTERM)
        assert gateway.ended() == 0


def test_a_port_of_monitoring_that_is_taken_is_told(run: Run, file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(f'monitoring = "127.0.0.1:{port}"\n{file.read_text()}')
        assert f"127.0.0.1:{port}: cannot listen" in refused(run, "gateway", "run", str(file))


@table("option, value", [("--log-format", "xml"), ("--log-level", "loud")])
def test_other_formats_and_levels_of_logs_are_refused(run: Run, file: Path, option: str, value: str) -> None:
    assert f"not '{value}'" in refused(run, "gateway", "run", str(file), option, value)


def test_settings_of_python_run_as_those_of_a_file(tmp_path: Path, file: Path) -> None:
    settings = load(file)
    with Gateway(GatewaySettings.model_validate(settings.model_dump(by_alias=True, exclude_unset=True))) as gateway:
        assert gateway.report().name == "cli"


@table("command", ["run", "plan", "status"])
def test_each_problem_of_a_broken_file_is_a_line(run: Run, file: Path, command: str) -> None:
    file.write_text(file.read_text().replace("priority = 7", "priority = 70").replace('"in/{x}"', '"in/{x"'))
    code, out, err = run("gateway", command, str(file))
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert any(": error: routes.telemetry.priority: " in line for line in lines), err
    assert lines[-1] == f"messaging: error: {file}: the configuration has errors"

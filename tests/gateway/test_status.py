"""The state of a gateway at a broker: heartbeats, the retained state, and what remains when the gateway dies."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Message, Messaging
from messaging.gateway import Gateway, GatewaySettings
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.cli.program import Lines
from tests.forking import ForkedProcess
from tests.gateway.kit import unique

#: longer than a test: a state that arrives was not due by the interval
NEVER = 3600.0


def given(folder: Path, url: str, *, interval: float = NEVER, name: str = "", **more: Any) -> dict[str, Any]:
    """Settings of a gateway whose state is at ``url``."""
    name = name or unique("status")
    return {
        "name": name,
        "data": str(folder / name),
        "instances": {"cloud": {"url": url, "reconnect_max": 0.2}, **more.pop("instances", {})},
        "status": {"instance": "cloud", "channel": "gateways/{gateway}/state", "interval": interval},
        **more,
    }


class Watcher:
    """Keeps the states of one gateway that a subscriber sees."""

    def __init__(self, m: Messaging, gateway: str) -> None:
        self.messages: Recorder[Message] = Recorder()
        m.on(f"gateways/{gateway}/state", self.messages).ready.result(PATIENCE)

    @property
    def states(self) -> list[dict[str, Any]]:
        return [json.loads(each.payload) for each in self.messages]

    @property
    def names(self) -> list[str]:
        return [each["state"] for each in self.states]


@contextmanager
def watching(url: str, gateway: str) -> Iterator[Watcher]:
    with messaging.connect(url) as m:
        yield Watcher(m, gateway)


def retained(url: str, gateway: str) -> str:
    """Return the state that the broker keeps."""
    with watching(url, gateway) as watcher:
        (message, *_) = watcher.messages.wait_for(1)
        assert message.context.extensions.get("retain")
        assert len(watcher.messages) == 1
        return watcher.names[0]


@contextmanager
def running(settings: dict[str, Any], folder: Path) -> Iterator[tuple[ForkedProcess, Lines]]:
    """Run a gateway in a process of its own, and kill it at the end; its log is read."""
    file = folder / "gateway.json"
    file.write_text(json.dumps(settings))
    process = ForkedProcess("import sys; from tests.faults.gateway_process import main; sys.exit(main())", [str(file)])
    try:
        assert process.stdout is not None
        yield process, Lines(process.stdout)
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdin.close()
        process.stderr.close()


def test_heartbeats_come_in_the_interval_and_the_last_state_is_offline(tmp_path: Path) -> None:
    url = unique("memory://status")
    settings = given(tmp_path, url, interval=0.05)
    with watching(url, settings["name"]) as watcher:
        with Gateway(GatewaySettings.model_validate(settings)) as gateway:
            eventually(lambda: len(watcher.states) >= 3)
            started = gateway.report().started
        eventually(lambda: watcher.names[-1] == "offline")
        count = len(watcher.states)
    beats = watcher.states[:-1]
    assert watcher.names == ["online"] * (count - 1) + ["offline"]
    assert [each["time"] for each in beats] == sorted(each["time"] for each in beats)
    assert all(each["started"] == round(started, 3) and each["routes"] == {} for each in beats)
    assert all(each["gateway"] == settings["name"] for each in watcher.states)


def test_a_heartbeat_tells_depth_age_and_bytes_of_buffers(
    mosquitto: Mosquitto, tmp_path: Path, refusing_port: int
) -> None:
    settings = given(
        tmp_path, mosquitto.url, interval=0.1,
        instances={
            "plant": {"url": "memory://status-plant"},
            "away": {"url": f"mqtt://127.0.0.1:{refusing_port}", "reconnect_max": 0.2},
        },
        routes={
            "data": {
                "from": {"instance": "plant", "channel": "data", "queue": "q"}, "to": {"instance": "away"},
                "buffer": {"full": "block"},
            }
        },
        drain_timeout=0.1,
    )  # fmt: skip
    with (
        watching(mosquitto.url, settings["name"]) as watcher,
        Gateway(GatewaySettings.model_validate(settings)) as gateway,
        messaging.connect("memory://status-plant") as m,
    ):
        eventually(lambda: gateway.report().routes[0].is_subscribed, "subscribed")
        for number in range(7):
            m.publish("data", f"{number}".encode()).result(PATIENCE)
        eventually(lambda: gateway.report().routes[0].buffer.depth == 7, "stored")
        eventually(lambda: watcher.states[-1].get("routes", {}).get("data", {}).get("depth") == 7, "told")
        first = watcher.states[-1]["routes"]["data"]
        assert first["bytes"] > 0
        assert first["dead_letters"] == 0
        eventually(lambda: watcher.states[-1]["routes"]["data"]["age"] > first["age"] + 0.3, "older")


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_the_state_is_retained_from_the_connection_on(mosquitto: Mosquitto, tmp_path: Path, version: str) -> None:
    url = f"{mosquitto.url}?version={version}"
    settings = given(tmp_path, url)
    with Gateway(GatewaySettings.model_validate(settings)), watching(url, settings["name"]) as watcher:
        eventually(lambda: "online" in watcher.names)
    assert retained(url, settings["name"]) == "offline"


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_a_gateway_that_is_killed_is_offline(mosquitto: Mosquitto, tmp_path: Path, version: str) -> None:
    url = f"{mosquitto.url}?version={version}"
    settings = given(tmp_path, url)
    with watching(url, settings["name"]) as watcher:
        for _ in range(2):  # a second life is online again, and has its will, too
            count = len(watcher.states)
            with running(settings, tmp_path) as (process, _):
                eventually(lambda count=count: "online" in watcher.names[count:], "online")  # type: ignore[misc]
                process.kill()
                eventually(lambda: watcher.names[-1] == "offline", "offline")
    assert retained(url, settings["name"]) == "offline"


@table("version", ["3.1.1", "5"])
def test_the_last_will_goes_with_the_first_connection(mosquitto: Mosquitto, tmp_path: Path, version: str) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        settings = given(tmp_path, f"mqtt://127.0.0.1:{proxy.port}?version={version}")
        with watching(mosquitto.url, settings["name"]) as watcher, Gateway(GatewaySettings.model_validate(settings)):
            eventually(lambda: "online" in watcher.names)
            assert proxy.attempts == 1
            proxy.refuse()
            eventually(lambda: watcher.names[-1] == "offline", "the last will")


@table(
    "option, keywords",
    [("version=5", {"version": "3.1.1"}), ("version=3.1.1", {"version": "5"}), ("name=plant", {})],
    ids=["without properties", "with properties", "with a name"],
)
def test_the_last_will_fits_the_settings_that_the_instance_gets(
    mosquitto: Mosquitto, tmp_path: Path, option: str, keywords: dict[str, Any]
) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        settings = given(tmp_path, f"mqtt://127.0.0.1:{proxy.port}?{option}")
        chosen = GatewaySettings.model_validate(settings)
        with watching(f"{mosquitto.url}?version=5", settings["name"]) as watcher, Gateway(chosen, **keywords):
            eventually(lambda: "online" in watcher.names)
            proxy.refuse()
            eventually(lambda: watcher.names[-1] == "offline", "the last will")
        has_type = watcher.messages[-1].context.content_type is not None
        assert has_type == (keywords.get("version", "5") == "5")


def test_a_reload_that_brings_a_status_brings_its_last_will(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        settings = given(tmp_path, f"mqtt://127.0.0.1:{proxy.port}")
        without = GatewaySettings.model_validate({**settings, "status": None})
        with watching(mosquitto.url, settings["name"]) as watcher, Gateway(without) as gateway:
            gateway.reload(GatewaySettings.model_validate(settings))
            eventually(lambda: "online" in watcher.names)
            proxy.refuse()
            eventually(lambda: watcher.names[-1] == "offline", "the last will")


def test_a_gateway_that_was_there_before_its_broker_has_its_will(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        proxy.refuse()
        settings = given(tmp_path, f"mqtt://127.0.0.1:{proxy.port}?timeout=0.2")
        with running(settings, tmp_path) as (process, log), watching(mosquitto.url, settings["name"]) as watcher:
            log.until(lambda line: line == b"up\n")
            time.sleep(0.5)  # sleeps: a process of its own, and longer than the timeout of its instance
            proxy.accept()
            eventually(lambda: "online" in watcher.names, "online")
            process.kill()
            eventually(lambda: watcher.names[-1] == "offline", "offline")


def test_after_a_lost_connection_the_state_is_online_again_at_once(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        settings = given(tmp_path, f"mqtt://127.0.0.1:{proxy.port}?version=5")
        with watching(mosquitto.url, settings["name"]) as watcher, Gateway(GatewaySettings.model_validate(settings)):
            eventually(lambda: watcher.names[-1:] == ["online"])
            proxy.refuse()
            eventually(lambda: watcher.names[-1] == "offline", "the last will")
            proxy.accept()
            eventually(lambda: watcher.names[-1] == "online", "online again")


def test_without_retained_messages_the_heartbeats_come_all_the_same(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    settings = given(tmp_path, rabbitmq.url, interval=0.1)
    with watching(rabbitmq.url, settings["name"]) as watcher:
        with Gateway(GatewaySettings.model_validate(settings)):
            eventually(lambda: watcher.names.count("online") >= 2)
        eventually(lambda: watcher.names[-1] == "offline")


def test_a_reload_leaves_an_unchanged_state_alone_and_moves_a_changed_one(mosquitto: Mosquitto, tmp_path: Path) -> None:
    settings = given(tmp_path, mosquitto.url)
    before = GatewaySettings.model_validate(settings)
    status = {"instance": "cloud", "channel": "gateways/{gateway}/moved/state"}
    moved = GatewaySettings.model_validate({**settings, "status": status})
    with watching(mosquitto.url, settings["name"]) as old, Gateway(before) as gateway:
        eventually(lambda: old.names[-1:] == ["online"])
        gateway.reload(before.model_copy(update={"drain_timeout": 3.0}))
        gateway.reload(before)
        with watching(mosquitto.url, settings["name"] + "/moved") as new:
            count = len(old.states)
            gateway.reload(moved)
            eventually(lambda: new.names[-1:] == ["online"])
            eventually(lambda: old.names[-1] == "offline")
            assert old.names[count:] == ["offline"]  # and nothing while the reload changed something else
    assert retained(mosquitto.url, settings["name"] + "/moved") == "offline"


def test_a_report_that_fails_does_not_end_the_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = unique("memory://status")
    settings = given(tmp_path, url, interval=0.05)
    with watching(url, settings["name"]) as watcher:
        gateway = Gateway(GatewaySettings.model_validate(settings))
        report, calls = gateway.report, itertools.count()

        def sometimes() -> Any:
            if next(calls) % 2:
                raise RuntimeError("a defect")
            return report()

        monkeypatch.setattr(gateway, "report", sometimes)
        with gateway:
            eventually(lambda: watcher.names.count("online") >= 3)
        eventually(lambda: watcher.names[-1] == "offline")


def test_closing_does_not_wait_for_a_broker_that_is_away(tmp_path: Path, refusing_port: int) -> None:
    settings = given(tmp_path, f"mqtt://127.0.0.1:{refusing_port}")
    gateway = Gateway(GatewaySettings.model_validate(settings)).start()
    begun = time.monotonic()
    gateway.close()
    assert time.monotonic() - begun < PATIENCE

"""The configurations under ``examples/gateway``, run with real brokers: messages go in, and come out as promised."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Message, MessagingError
from messaging.gateway import Gateway, load, read
from messaging.testing.brokers import Mosquitto, RabbitMQ, free_port, require
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.gateway.kit import started

EXAMPLES = Path(__file__).parents[2] / "examples" / "gateway"
FILES = sorted([*EXAMPLES.glob("*.toml"), *EXAMPLES.glob("*.yaml")])


@pytest.fixture(scope="session")
def other_mosquitto() -> Iterator[Mosquitto]:
    """A second broker: what is published at one must reach the other by the gateway only."""
    require("mosquitto")
    with Mosquitto() as broker:
        yield broker


class Inbox(Recorder[Message]):
    """What arrives at a channel."""

    def __init__(self, m: Any, channel: str, **options: Any) -> None:
        super().__init__()
        m.on(channel, self, **options).ready.result(PATIENCE)

    @property
    def channels(self) -> list[str | None]:
        return [each.context.channel for each in self]


@contextlib.contextmanager
def running(file: str, monkeypatch: pytest.MonkeyPatch, folder: Path, **environment: str) -> Iterator[Gateway]:
    """Run a configuration, once its routes are connected and have subscribed."""
    for name, value in {**environment, "GATEWAY_DATA": str(folder / "data")}.items():
        monkeypatch.setenv(name, value)
    with Gateway(load(EXAMPLES / file)) as gateway:
        yield started(gateway)


def publish_and_see(m: Any, channel: str, seen: Callable[[], object], payload: bytes = b"probe") -> None:
    """Publish a message, and wait until it has passed the gateway."""
    m.publish(channel, payload, qos=1).result(PATIENCE)
    eventually(seen, f"the message on {channel}")


def ask_until_answered(ask: Callable[[], Any]) -> Any:
    def answer() -> Any:
        try:
            return ask()
        except MessagingError:
            return None

    return eventually(answer)


def of(gateway: Gateway, route: str) -> Any:
    return next(each for each in gateway.report().routes if each.name == route)


def is_settled(route: Any) -> bool:
    """Return whether no sample is held: every message is stored, or was filtered out."""
    return bool(route.received == route.filtered + route.buffer.accepted)


@table("file", FILES, ids=lambda file: file.name)
def test_every_configuration_is_right_without_any_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLANT_URL", "CLOUD_URL", "ANALYTICS_URL", "MACHINES_URL", "CONTROL_URL", "OFFICE_URL", "BUS_URL"):
        monkeypatch.delenv(name, raising=False)
    found = read(file)
    assert [*found.problems] == []
    assert found.settings is not None


def test_the_readme_tells_of_every_configuration_and_variable() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for file in FILES:
        assert f"({file.name})" in text
        for part in file.read_text().split("${")[1:]:
            assert f"`{part.partition(':-')[0]}`" in text


def test_yaml_and_toml_describe_the_same_vehicle(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    monkeypatch.setenv("VEHICLE", "truck-7")
    first, second = (load(EXAMPLES / f"offline_vehicle.{kind}") for kind in ("toml", "yaml"))
    assert first == second
    assert first.name == "truck-7"


def test_plant_to_cloud(
    mosquitto: Mosquitto, other_mosquitto: Mosquitto, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    cloud_url = f"{other_mosquitto.url}?version=5"
    port = free_port()
    with (
        messaging.connect(mosquitto.url) as plant,
        messaging.connect(cloud_url) as cloud,
        messaging.connect(rabbitmq.url) as analytics,
    ):
        uplink, states, status = (
            Inbox(cloud, "uplink/+"),
            Inbox(cloud, "state/#"),
            Inbox(cloud, "gateways/plant-7/state"),
        )
        alarms = Inbox(analytics, "alarms/#", queue="alarms-of-examples")
        with running(
            "plant_to_cloud.toml", monkeypatch, tmp_path, PLANT_URL=mosquitto.url, CLOUD_URL=cloud_url,
            ANALYTICS_URL=rabbitmq.url, GATEWAY_MONITORING=f"127.0.0.1:{port}",
        ) as gateway:  # fmt: skip
            publish_and_see(plant, "site/x/x/telemetry", lambda: of(gateway, "telemetry").received, b"{}")
            publish_and_see(plant, "site/bonn/probe/alarm", lambda: alarms)
            publish_and_see(plant, "site/bonn/probe/state", lambda: states)

            # 71.6 °F is 22 °C; 71.9 °F is less than half a degree away; 80.6 °F is 27 °C
            for number, (fahrenheit, quality) in enumerate(
                [(71.6, "good"), (71.9, "good"), (500.0, "bad"), (80.6, "good")]
            ):
                reading = {"t": fahrenheit, "quality": quality, "debug": number}
                plant.publish("site/bonn/d1/telemetry", json.dumps(reading).encode(), qos=1).result(PATIENCE)
            plant.publish("site/oslo/d2/telemetry", b'{"t": 32, "quality": "good"}', qos=1).result(PATIENCE)
            plant.publish("site/oslo/d2/telemetry", b"no JSON", qos=1).result(PATIENCE)
            lines: dict[str, list[Any]] = {}
            eventually(lambda: len(uplink) >= 2, "both sites")
            for message in uplink:
                context = message.context
                assert (context.content_type, context.content_encoding) == ("application/x-ndjson", "gzip")
                site = str(context.channel).rpartition("/")[2]
                assert dict(context.extensions["headers"]) == {
                    "gateway": "plant-7", "site": site, "messaging-gateways": "plant-7",
                }  # fmt: skip
                found = gzip.decompress(message.payload).decode().splitlines()
                lines.setdefault(site, []).extend(json.loads(line) for line in found)
            rounded = {
                site: [(each["device"], round(each["celsius"], 6)) for each in found] for site, found in lines.items()
            }
            assert rounded == {"bonn": [("d1", 22.0), ("d1", 27.0)], "oslo": [("d2", 0.0)]}
            assert all(set(each) == {"device", "celsius"} for found in lines.values() for each in found)

            plant.publish("site/bonn/d1/alarm", b"too hot", qos=1).result(PATIENCE)
            eventually(lambda: alarms.payloads[-1] == b"too hot", "the alarm")
            assert alarms.channels[-1] == "alarms/bonn/d1"
            assert alarms[-1].context.extensions["headers"]["device"] == "d1"

            plant.publish("site/bonn/d1/state", b'{"state":"on"}', qos=1, retain=True).result(PATIENCE)
            eventually(lambda: states.channels[-1] == "state/bonn/d1", "the state of the device")
            assert json.loads(status.wait_for(1)[0].payload)["state"] == "online"

            eventually(lambda: of(gateway, "telemetry").filtered >= 3, "what is not good, and no JSON, is filtered out")
            base = f"http://127.0.0.1:{port}"
            assert _status(f"{base}/healthz") == _status(f"{base}/readyz") == 200
            with urllib.request.urlopen(f"{base}/metrics", timeout=PATIENCE) as answer:
                assert 'route="telemetry"' in answer.read().decode()
        eventually(lambda: json.loads(status.payloads[-1])["state"] == "offline", "the gateway is offline")
        eventually(lambda: b'{"state":"offline"}' in states.payloads, "its devices are offline")


def _status(url: str) -> int:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return int(answer.status)


def test_protocol_translation(
    mosquitto: Mosquitto, other_mosquitto: Mosquitto, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    control_url = f"{other_mosquitto.url}?version=5"
    with (
        messaging.connect(f"{mosquitto.url}?version=3.1.1&envelope=true") as machines,
        messaging.connect(control_url) as control,
        messaging.connect(rabbitmq.url) as office,
        running(
            "protocol_translation.toml", monkeypatch, tmp_path, MACHINES_URL=mosquitto.url,
            CONTROL_URL=other_mosquitto.url, OFFICE_URL=rabbitmq.url,
        ) as gateway,
    ):  # fmt: skip
        # retained states, seen by a control room that connects later
        publish_and_see(machines, "line/0/m0/state", lambda: of(gateway, "machine-states").received)
        for state in (b"starting", b"running"):
            machines.publish("line/1/press/state", state, qos=1, retain=True).result(PATIENCE)
        machines.publish("line/1/press/log", b"private", qos=1).result(PATIENCE)
        eventually(
            lambda: of(gateway, "machine-states").published == of(gateway, "machine-states").received >= 3, "states"
        )
        mirrored = Inbox(control, "line/1/#", qos=1)
        mirrored.wait_for(1)

        # set points: retained where the control room retains them
        publish_and_see(control, "line/0/m0/setpoint", lambda: of(gateway, "set-points").received)
        control.publish("line/1/press/setpoint", b"70", qos=1, retain=True).result(PATIENCE)
        control.publish("line/1/drill/setpoint", b"80", qos=1).result(PATIENCE)
        eventually(lambda: of(gateway, "set-points").published == of(gateway, "set-points").received >= 3, "set points")
        set_points = Inbox(machines, "line/+/+/setpoint", qos=1)
        assert (set_points.wait_for(1)[0].context.channel, set_points.payloads) == ("line/1/press/setpoint", [b"70"])

        # AMQP: a routing key, and a header
        produced = Inbox(office, "produced/+", queue="produced-of-examples")
        publish_and_see(machines, "line/1/press/produced", lambda: produced, b'{"parts": 1}')
        (first, *_) = produced
        assert (first.context.channel, first.payload) == ("produced/1", b'{"parts": 1}')
        assert dict(first.context.extensions["headers"]) == {"machine": "press", "messaging-gateways": "translator"}

        # orders of a queue are retained at the machines
        office.publish("orders/1", b"42 parts", guaranteed_delivery=True).result(PATIENCE)
        eventually(lambda: of(gateway, "orders").published == 1, "the order")
        orders = Inbox(machines, "line/1/order", qos=1)
        assert orders.wait_for(1)[0].payload == b"42 parts"
        assert orders[0].context.extensions["retain"] is True

        # a request by AMQP, answered by MQTT 3.1.1
        machines.reply("line/1/press/ask", lambda want: {"want": want, "celsius": 21.5}).ready.result(PATIENCE)
        reply = ask_until_answered(lambda: office.request("ask/1/press", {"want": 1}, timeout=1.0).result())
        assert reply.value() == {"want": {"want": 1}, "celsius": 21.5}

        # a request by MQTT 5, with many replies by AMQP
        def search(text: str) -> Iterator[str]:
            yield from (f"{text} {number}" for number in range(3))

        office.reply("recipes/search", search).ready.result(PATIENCE)
        found = ask_until_answered(lambda: [*control.request_many("recipes/search", "soup", timeout=1.0)])
        assert [each.value() for each in found] == ["soup 0", "soup 1", "soup 2"]

        late = [each for each in mirrored if each.context.channel == "line/1/press/state"]
        assert [(each.payload, each.context.extensions["retain"]) for each in late] == [(b"running", True)]
        assert gateway.problems() == []


@pytest.mark.parametrize("kind", ["toml", pytest.param("yaml", marks=pytest.mark.slow)])
def test_offline_vehicle(
    kind: str, mosquitto: Mosquitto, other_mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kind == "yaml":
        pytest.importorskip("yaml")
    name = f"truck-{kind}"
    with (
        Proxy(other_mosquitto.host, other_mosquitto.port) as link,
        messaging.connect(mosquitto.url) as bus,
        messaging.connect(f"{other_mosquitto.url}?version=5", client_id=f"fleet-{kind}") as fleet,
    ):
        positions, faults = Inbox(fleet, f"fleet/{name}/position"), Inbox(fleet, f"fleet/{name}/faults/+", qos=1)
        status, commands = Inbox(fleet, f"fleet/{name}/gateway"), Inbox(bus, "command/+", qos=1)
        with running(
            f"offline_vehicle.{kind}", monkeypatch, tmp_path, VEHICLE=name, BUS_URL=mosquitto.url,
            FLEET_URL=f"mqtt://127.0.0.1:{link.port}?reconnect_max=0.3",
        ) as gateway:  # fmt: skip
            publish_and_see(bus, "faults/probe", lambda: faults)
            publish_and_see(bus, "gps/position", lambda: positions)
            publish_and_see(fleet, f"fleet/{name}/command/probe", lambda: commands)
            assert json.loads(status.wait_for(1)[0].payload)["routes"].keys() == {"positions", "faults", "commands"}
            eventually(lambda: all(each.buffer.depth == 0 for each in gateway.report().routes), "nothing waits")

            link.refuse()
            eventually(lambda: not of(gateway, "faults").is_target_up, "the link is away")
            eventually(lambda: json.loads(status.payloads[-1])["state"] == "offline", "the last will")
            before = (len(positions), len(faults), len(commands))
            began, numbers = time.monotonic(), itertools.count()

            def is_sampled() -> bool:  # of each second, the last position is kept
                bus.publish("gps/position", f"p{next(numbers)}".encode(), qos=1).result(PATIENCE)
                return bool(of(gateway, "positions").buffer.depth >= 3)

            eventually(is_sampled, "the positions are stored")
            last = next(numbers) - 1
            for number in range(300):
                bus.publish("faults/engine", f"f{number}".encode(), qos=1).result(PATIENCE)
            fleet.publish(f"fleet/{name}/command/park", b"now", qos=1).result(PATIENCE)
            eventually(lambda: of(gateway, "faults").buffer.depth == 300, "the faults are stored")
            eventually(lambda: is_settled(of(gateway, "positions")), "the last one is stored, too")
            kept = of(gateway, "positions").buffer.depth
            assert 3 <= kept <= time.monotonic() - began + 2

            link.accept()
            eventually(lambda: len(faults) >= before[1] + 300, "the faults arrive")
            assert faults.payloads[before[1] :] == [f"f{number}".encode() for number in range(300)]
            eventually(lambda: len(positions) >= before[0] + kept, "the positions arrive")
            found = [int(payload[1:]) for payload in positions.payloads[before[0] :]]
            assert found == sorted(found)
            assert found[-1] == last, "the last position of a second is kept"
            eventually(lambda: len(commands) > before[2], "the command arrives")
            assert (commands.channels[-1], commands.payloads[-1]) == ("command/park", b"now")
            eventually(lambda: json.loads(status.payloads[-1])["state"] == "online", "online again")
            assert gateway.problems() == []

"""The states of bridged devices: mirrored, offline while their source is unreachable, and correct afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pika
import pytest

import messaging
from messaging import Message
from messaging.gateway import Gateway, GatewaySettings
from messaging.gateway import devices as module
from messaging.gateway.patterns import ChannelTemplate
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.gateway.kit import Broker, settings, unique

AFTER = 0.3


class Plant:
    """A gateway that mirrors ``{name}/plant/{device}`` to ``{name}/cloud/{device}``, devices, and a watcher."""

    def __init__(self, name: str, gateway: Gateway, devices: Any, cloud: Any) -> None:
        self.name = name
        self.gateway = gateway
        self.devices = devices
        self.messages: Recorder[Message] = Recorder()
        cloud.on(f"{name}/cloud/#", self.messages).ready.result(PATIENCE)

    @property
    def arrived(self) -> list[tuple[str, bytes]]:
        """The devices and states at the target."""
        return [(str(each.context.channel).rpartition("/")[2], each.payload) for each in self.messages]

    def report(self, device: str, state: str, **options: Any) -> None:
        """Publish the state of a device, retained as devices do."""
        options = {"qos": 1, "retain": True} | options if "qos" in self.devices.features else options
        self.devices.publish(f"{self.name}/plant/{device}", state.encode(), **options).result(PATIENCE)

    def last(self) -> dict[str, bytes]:
        """The last state of each device at the target."""
        return dict(self.arrived)

    def wait(self, **states: str) -> None:
        """Wait until these are the last states."""
        expected = {device: state.encode() for device, state in states.items()}
        eventually(lambda: self.last() == expected, lambda: f"{expected} instead of {self.last()}")

    @property
    def known(self) -> int:
        (found,) = self.gateway.report().devices
        return found.known


@contextmanager
def plant(
    source: str, target: str, folder: Path, *, source_side: str = "", target_side: str = "", **options: Any
) -> Iterator[Plant]:
    """Run a gateway between two brokers; ``..._side`` is the URL of those who use the broker by another way."""
    name = unique("d")
    given = GatewaySettings.model_validate({
        "name": f"gw-{name}",
        "data": str(folder / name),
        "instances": {
            "plant": {"url": source, **({"reconnect_max": 0.2} if "://127" in source or "@127" in source else {})},
            "cloud": {"url": target, **({"reconnect_max": 0.2} if "://127" in target or "@127" in target else {})},
        },
        "devices": {
            "all": {
                "from": {"instance": "plant", "channel": f"{name}/plant/{{device}}"},
                "to": {"instance": "cloud", "channel": f"{name}/cloud/{{device}}", **options.pop("to", {})},
                "offline": "{device} is offline",
                "after": AFTER,
                **options,
            }
        },
    })  # fmt: skip
    with ExitStack() as stack:
        devices = stack.enter_context(messaging.connect(source_side or source, name=f"devices-{name}"))
        cloud = stack.enter_context(messaging.connect(target_side or target, name=f"cloud-{name}"))
        found = Plant(name, Gateway(given), devices, cloud)
        stack.enter_context(found.gateway)
        probe = 0

        def is_subscribed() -> bool:
            nonlocal probe
            probe += 1
            found.report("probe", str(probe))
            return bool(found.arrived)

        eventually(is_subscribed, "the gateway subscribes")
        found.report("probe", "")  # forgotten
        eventually(lambda: found.known == 0 and found.arrived[-1] == ("probe", b""))
        found.messages.clear()
        yield found


def test_states_are_mirrored_in_order_and_offline_at_the_end(tmp_path: Path) -> None:
    with plant("memory://devices-a", "memory://devices-b", tmp_path) as found:
        for number in range(100):
            found.report("d1", str(number))
        found.report("d2", "on")
        found.wait(d1="99", d2="on")
        assert [state for device, state in found.arrived if device == "d1"] == [str(n).encode() for n in range(100)]
        assert found.known == 2
        found.gateway.close()
        found.wait(d1="d1 is offline", d2="d2 is offline")


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_a_mirrored_state_is_retained(mosquitto: Mosquitto, tmp_path: Path, version: str) -> None:
    url = f"{mosquitto.url}?version={version}"
    with plant("memory://devices-c", url, tmp_path) as found:
        found.report("d1", "on")
        found.wait(d1="on")
        with Broker(url, f"{found.name}/cloud/d1") as late:
            (message,) = late.messages.wait_for(1)
            assert (message.payload, message.context.extensions.get("retain")) == (b"on", True)


def test_the_will_of_a_device_is_mirrored(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with (
        plant(f"{mosquitto.url}?version=5", "memory://devices-d", tmp_path) as found,
        Proxy(mosquitto.host, mosquitto.port) as proxy,
        messaging.connect(f"mqtt://127.0.0.1:{proxy.port}?version=3.1.1") as device,
    ):
        channel = f"{found.name}/plant/d1"
        device.publish(channel, b"lost", qos=1, retain=True, last_will=True).result(PATIENCE)
        device.publish(channel, b"on", qos=1, retain=True).result(PATIENCE)
        found.wait(d1="on")
        proxy.refuse()
        found.wait(d1="lost")


def test_devices_are_offline_while_their_broker_is_unreachable(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        url = f"mqtt://127.0.0.1:{proxy.port}?version=5"
        with plant(url, "memory://devices-e", tmp_path, source_side=mosquitto.url) as found:
            for number in range(50):
                found.report(f"d{number}", "on")
            eventually(lambda: len(found.last()) == 50)
            proxy.refuse()
            eventually(lambda: all(state.endswith(b" is offline") for state in found.last().values()))
            assert found.last()["d7"] == b"d7 is offline"
            assert found.gateway.report().devices[0].is_offline
            found.report("d7", "off")  # the broker keeps it for the session of the gateway
            proxy.accept()
            expected = {f"d{number}": b"off" if number == 7 else b"on" for number in range(50)}
            eventually(lambda: found.last() == expected, "the last states are back")
            assert not found.gateway.report().devices[0].is_offline


def test_a_short_interruption_changes_nothing(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        url = f"mqtt://127.0.0.1:{proxy.port}?version=5"
        with plant(url, "memory://devices-f", tmp_path, source_side=mosquitto.url, after=PATIENCE) as found:
            found.report("d1", "on")
            found.wait(d1="on")
            proxy.sever()
            found.report("d2", "on")
            found.wait(d1="on", d2="on")
            assert b"d1 is offline" not in [state for _, state in found.arrived]


def test_states_reach_a_target_that_was_away_as_they_are_then(
    mosquitto: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # as if the outage had lasted longer than messages wait for a connection
    monkeypatch.setattr("messaging.gateway.destinations.CONFIRM_TIMEOUT", 0.2)
    monkeypatch.setattr(module, "_RETRY", 0.1)
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        url = f"mqtt://127.0.0.1:{proxy.port}?version=5"
        with plant("memory://devices-g", url, tmp_path, target_side=mosquitto.url) as found:
            found.report("d1", "on")
            found.report("d2", "on")
            found.wait(d1="on", d2="on")
            proxy.refuse()
            for state in ("starting", "running", "off"):
                found.report("d1", state)
            eventually(lambda: "is not published" in caplog.text, "the publications have failed")
            assert found.last()["d1"] == b"on"
            proxy.accept()
            found.wait(d1="off", d2="on")


def test_a_device_that_is_deleted_is_forgotten(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with plant(f"{mosquitto.url}?version=5", f"{mosquitto.url}?version=5", tmp_path) as found:
        found.report("d1", "on")
        found.report("d2", "on")
        found.wait(d1="on", d2="on")
        found.report("d1", "")
        found.wait(d1="", d2="on")
        assert found.known == 1
        found.gateway.close()
        found.wait(d1="", d2="d2 is offline")


def test_the_number_of_devices_is_bounded(tmp_path: Path) -> None:
    with plant("memory://devices-h", "memory://devices-i", tmp_path, max_devices=3) as found:
        for number in range(5):
            found.report(f"d{number}", "on")
        found.report("d2", "on again")
        eventually(lambda: len(found.arrived) == 6)
        assert found.known == 3
        found.gateway.close()
        eventually(lambda: len(found.arrived) == 9)
        assert sorted(found.arrived[6:]) == [(f"d{number}", f"d{number} is offline".encode()) for number in (2, 3, 4)]


def test_states_that_come_back_are_dropped_and_others_name_the_gateways(tmp_path: Path) -> None:
    to = {"headers": {"device": "{device}"}, "content_type": "text/plain"}
    with plant("memory://devices-j", "memory://devices-k", tmp_path, to=to) as found:
        found.report("d1", "on", headers={"messaging-gateways": "other", "mine": "1"})
        found.report("d2", "on", headers={"messaging-gateways": f"other,{found.gateway.name}"})
        found.report("d3", "on", headers={"messaging-gateways": ",".join(map(str, range(16)))})
        found.report("d4", "on")
        found.wait(d1="on", d4="on")
        first, second = (each.context for each in found.messages)
        assert dict(first.extensions["headers"]) == {
            "messaging-gateways": f"other,{found.gateway.name}", "mine": "1", "device": "d1",
        }  # fmt: skip
        assert dict(second.extensions["headers"]) == {"messaging-gateways": found.gateway.name, "device": "d4"}
        assert (first.content_type, second.content_type) == ("text/plain", "text/plain")


def test_amqp_gets_the_states_without_retaining_them(mosquitto: Mosquitto, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    with plant(f"{mosquitto.url}?version=5", rabbitmq.url, tmp_path) as found:
        found.report("d1", "on")
        found.wait(d1="on")
        found.gateway.close()
        found.wait(d1="d1 is offline")


def test_a_reload_interrupts_no_unchanged_group_and_forgets_a_removed_one(tmp_path: Path) -> None:
    with plant("memory://devices-l", "memory://devices-m", tmp_path) as found:
        found.report("d1", "on")
        found.wait(d1="on")
        before = found.gateway.settings
        found.gateway.reload(before.model_copy(update={"drain_timeout": 3.0}))
        assert found.known == 1
        found.report("d1", "off")
        found.wait(d1="off")
        assert found.arrived == [("d1", b"on"), ("d1", b"off")]
        found.gateway.reload(before.model_copy(update={"devices": {}}))
        found.wait(d1="d1 is offline")
        assert found.gateway.report().devices == ()


def test_a_name_that_makes_no_channel_is_logged_and_the_next_state_passes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plant("memory://devices-n", "memory://devices-o", tmp_path) as found:
        render = ChannelTemplate.render

        def refuse(template: Any, values: Any) -> str:
            if values["device"] == "bad":
                raise messaging.errors.InvalidChannelError("no channel")
            return render(template, values)

        monkeypatch.setattr(ChannelTemplate, "render", refuse)
        found.report("bad", "on")
        found.report("d1", "on")
        found.wait(d1="on")
        assert [each for each in caplog.messages if "a state of" in each and "is dropped: no channel" in each]


def test_a_source_that_is_away_when_the_gateway_starts_is_no_problem(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        proxy.refuse()
        name = unique("late")
        plant = {"url": f"mqtt://127.0.0.1:{proxy.port}", "reconnect_max": 0.2, "timeout": 0.2}
        devices = {
            "from": {"instance": "a", "channel": f"{name}/{{device}}"}, "to": {"instance": "b"},
            "offline": "offline", "after": 0.1,
        }  # fmt: skip
        instances = {"a": plant, "b": {"url": "memory://devices-late"}}
        given = settings(tmp_path, instances=instances, routes={}, devices={"all": devices})
        with Broker(mosquitto.url) as m, Broker("memory://devices-late", "#") as cloud:
            m.send(f"{name}/d1", b"on", qos=1, retain=True)
            with Gateway(given) as gateway:
                eventually(lambda: gateway.report().devices[0].is_offline)
                proxy.accept()
                eventually(lambda: cloud.payloads == [b"on"])
                assert gateway.problems() == []
            eventually(lambda: cloud.payloads == [b"on", b"offline"])


def test_a_refused_subscription_is_a_problem_and_is_made_again(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("refused")
    source = {"instance": "a", "channel": f"{name}/{{device}}", "queue": name}
    instances = {"a": {"url": rabbitmq.url}, "b": {"url": f"memory://{name}"}}
    devices = {"all": {"from": source, "to": {"instance": "b"}, "offline": "offline"}}
    given = settings(tmp_path, instances=instances, routes={}, devices=devices)
    owner = pika.BlockingConnection(pika.URLParameters(rabbitmq.url))
    owner.channel().queue_declare(name, exclusive=True)  # no other connection may use the queue
    with Gateway(given) as gateway, messaging.connect(rabbitmq.url) as m:
        eventually(gateway.problems)
        assert gateway.problems()[0].startswith("devices 'all': ")
        owner.close()
        eventually(lambda: not gateway.problems())

        def is_known() -> bool:
            m.publish(f"{name}/d1", b"on").result(PATIENCE)
            return gateway.report().devices[0].known == 1

        eventually(is_known)

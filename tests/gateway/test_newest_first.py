"""A route with ``newest_first`` over an outage of its target, with real brokers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import messaging
from messaging.gateway.gateway import Gateway
from messaging.gateway.settings import GatewaySettings
from messaging.testing.brokers import Mosquitto
from messaging.testing.proxy import Proxy

OLD = 1500


def wait(condition: Callable[[], bool], what: str, patience: float = 30.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_live_messages_overtake_the_backlog_of_an_outage(mosquitto: Mosquitto, tmp_path: Path) -> None:
    arrived: list[str] = []
    is_live = threading.Event()

    def note(message: messaging.Message) -> None:
        arrived.append(message.payload.decode())
        if message.payload.startswith(b"new"):
            is_live.set()

    with Proxy(mosquitto.host, mosquitto.port) as proxy, messaging.connect(mosquitto.url) as m:
        m.on("newest-first/target", note, qos=1)
        settings = GatewaySettings.model_validate({
            "name": "newest-first",
            "data": str(tmp_path / "data"),
            "instances": {
                "plant": {"url": mosquitto.url},
                "cloud": {"url": f"mqtt://127.0.0.1:{proxy.port}", "reconnect_max": 0.2},
            },
            "routes": {
                "live": {
                    "from": {"instance": "plant", "channel": "newest-first/source"},
                    "to": {"instance": "cloud", "channel": "newest-first/target"},
                    "buffer": {"full": "block", "order": "newest_first", "in_flight": 10},
                    "rate": {"messages": 500, "burst": 10},
                }
            },
        })  # fmt: skip
        with Gateway(settings) as gateway:
            route = gateway.route("live")
            wait(lambda: route.report().is_source_up and route.report().is_target_up, "connected")
            proxy.refuse()
            for number in range(OLD):
                m.publish("newest-first/source", f"old{number:04}".encode(), qos=1)
            wait(lambda: route.buffer.accepted == OLD, "the backlog is stored")
            proxy.accept()
            wait(lambda: route.report().is_target_up, "reconnected")
            wait(lambda: len(route.buffer.journal.cursors()) == 2, "a new range begins")
            for number in range(20):
                m.publish("newest-first/source", f"new{number:04}".encode(), qos=1)
            assert is_live.wait(10)
            wait(lambda: len(arrived) == OLD + 20, "all arrive")
            wait(lambda: route.buffer.depth == 0 and len(route.buffer.journal.cursors()) == 1, "all are recorded")
    old = [each for each in arrived if each.startswith("old")]
    new = [each for each in arrived if each.startswith("new")]
    assert old == sorted(set(old))
    assert new == sorted(set(new))
    assert arrived.index(new[-1]) < arrived.index(old[-1]) - OLD // 4, "the backlog was published first"

"""A route with ``newest_first`` over an outage of its target, with real brokers."""

from __future__ import annotations

from pathlib import Path

from messaging.gateway import Gateway
from messaging.testing.brokers import Mosquitto
from messaging.testing.waiting import eventually
from tests.gateway.kit import Away, Broker, route, settings, started, unique

OLD = 1500


def test_live_messages_overtake_the_backlog_of_an_outage(mosquitto: Mosquitto, tmp_path: Path) -> None:
    name = unique("newest-first")
    with Away(mosquitto) as away, Broker(mosquitto.url, f"{name}/target", qos=1) as m:
        routes = {
            "live": route(
                {"channel": f"{name}/source"}, f"{name}/target", {"order": "newest_first", "in_flight": 10},
                rate={"messages": 500, "burst": 10},
            )
        }  # fmt: skip
        instances = {"a": {"url": mosquitto.url}, "b": away.instance}
        with Gateway(settings(tmp_path, instances=instances, routes=routes, name=name)) as gateway:
            live = started(gateway).route("live")
            away.leave()
            m.send(f"{name}/source", *(f"old{number:04}".encode() for number in range(OLD)), qos=1)
            eventually(lambda: live.buffer.accepted == OLD, "the backlog is stored")
            away.come_back()
            eventually(lambda: live.report().is_target_up, "reconnected")
            eventually(lambda: len(live.buffer.journal.cursors()) == 2, "a new range begins")
            m.send(f"{name}/source", *(f"new{number:04}".encode() for number in range(20)), qos=1)
            m.messages.wait_for(OLD + 20)
            eventually(
                lambda: live.buffer.queue.depth == 0 and len(live.buffer.journal.cursors()) == 1, "all are recorded"
            )
    arrived = [each.decode() for each in m.payloads]
    old = [each for each in arrived if each.startswith("old")]
    new = [each for each in arrived if each.startswith("new")]
    assert old == sorted(set(old))
    assert new == sorted(set(new))
    assert arrived.index(new[-1]) < arrived.index(old[-1]) - OLD // 4, "the backlog was published first"

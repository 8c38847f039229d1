"""Routes of a running gateway: acceptance, order, outages, loops, dead letters, bounds, life cycle."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Promise
from messaging.errors import ArgumentError, ClosedError, ConfigurationError, JournalError, JournalFullError
from messaging.gateway import Gateway, GatewaySettings, check
from messaging.gateway.control import call
from messaging.gateway.dead_letters import Selection, letters
from messaging.gateway.destinations import PASSED_HEADER
from messaging.gateway.drain import ATTEMPTS
from messaging.journal import Journal
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.disks import ballast
from tests.gateway.kit import Away, Broker, route, settings, started, unique

Names = dict[str, Any]


@pytest.fixture
def names() -> Names:
    """Two brokers of this process, of this test only."""
    name = unique("routes")
    return {"a": {"url": f"memory://{name}-a"}, "b": {"url": f"memory://{name}-b"}}


Bridged = Callable[..., AbstractContextManager[tuple[Broker, Broker, Gateway]]]


@pytest.fixture
def bridged(names: Names, tmp_path: Path) -> Bridged:
    """Run a gateway between two brokers: the source, the target with what arrives at a channel, and the gateway."""

    @contextmanager
    def bridged(
        routes: dict[str, Any] | None = None, target: str = "out/+", **other: Any
    ) -> Iterator[tuple[Broker, Broker, Gateway]]:
        with (
            Broker(names["a"]["url"]) as a,
            Broker(names["b"]["url"], target) as b,
            Gateway(settings(tmp_path, instances=names, routes=routes), **other) as gateway,
        ):
            yield a, b, started(gateway)

    return bridged


def test_messages_go_from_the_source_to_the_target(bridged: Bridged) -> None:
    with bridged() as (a, b, gateway):
        a.send("in/1", b"x", b"y", content_type="text/plain", headers={"h": "v"})
        eventually(lambda: len(b.received) == 2)
        eventually(lambda: gateway.route("r").buffer.queue.depth == 0)
        report = gateway.report().routes[0]
    assert b.received == [("out/1", b"x"), ("out/1", b"y")]
    context = b.messages[0].context
    assert context.content_type == "text/plain"
    assert context.extensions["headers"] == {"h": "v", PASSED_HEADER: "gw"}
    assert (report.received, report.published, report.buffer.accepted, report.buffer.depth) == (2, 2, 2, 0)
    assert repr(gateway) == "<Gateway 'gw' closed>"


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_messages_reach_amqp_in_order(version: str, mosquitto: Mosquitto, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("routes-amqp")
    instances = {"a": {"url": f"{mosquitto.url}?version={version}"}, "b": {"url": rabbitmq.url}}
    routes = {"r": route({"channel": f"{name}/{{d}}/+"}, f"{name}/out/{{d}}")}
    with (
        Broker(mosquitto.url) as a,
        Broker(rabbitmq.url, f"{name}/out/+") as b,
        Gateway(settings(tmp_path, instances=instances, routes=routes, name=name)) as gateway,
    ):
        started(gateway)
        eventually(lambda: _arrives(a, b, f"{name}/0/x"))
        b.messages.clear()
        sent = [b"%d" % number for number in range(500)]
        a.send(f"{name}/7/x", *sent, qos=1)
        eventually(lambda: len(b.received) >= 500 and b.payloads[-1] == sent[-1])
        assert b.messages[-1].context.extensions["messageId"]
    assert [each for each in b.received if each[1]] == [(f"{name}/out/7", payload) for payload in sent]


def _arrives(a: Broker, b: Broker, channel: str) -> bool:
    a.send(channel, b"", qos=1)
    return bool(b.received)


def test_messages_of_qos_0_are_stored_and_published(mosquitto: Mosquitto, names: Names, tmp_path: Path) -> None:
    source = {"channel": "qos0/+", "qos": 0}
    instances = {"a": {"url": mosquitto.url}, "b": names["b"]}
    given = settings(tmp_path, instances=instances, routes={"r": route(source, "out/x")})
    assert [each.key for each in check(given)] == ["routes.r.buffer.full"]  # such messages cannot be held back
    with Broker(mosquitto.url) as a, Broker(names["b"]["url"], "out/+") as b, Gateway(given) as gateway:
        started(gateway)
        a.send("qos0/1", b"1", qos=1)
        eventually(lambda: b.payloads == [b"1"])


def test_messages_wait_for_a_target_that_is_away_also_over_a_restart(mosquitto: Mosquitto, tmp_path: Path) -> None:
    name = unique("routes-away")
    with Away(mosquitto) as away, Broker(mosquitto.url, f"{name}/out", qos=1) as m:
        instances = {"a": {"url": mosquitto.url}, "b": away.instance}
        chosen = settings(
            tmp_path, instances=instances, routes={"r": route({"channel": f"{name}/in"}, f"{name}/out")}, name=name
        )
        away.leave()
        with Gateway(chosen) as gateway:
            eventually(lambda: gateway.report().routes[0].is_subscribed)
            eventually(lambda: _is_taken(m, f"{name}/in", gateway))
            m.send(f"{name}/in", *(b"%d" % number for number in range(100)), qos=1)
            eventually(lambda: gateway.route("r").buffer.queue.depth >= 101)
            assert gateway.report().routes[0].buffer.age > 0
        assert m.received == []
        away.come_back()
        with Gateway(chosen) as gateway:
            eventually(lambda: m.payloads[-1:] == [b"99"])
            eventually(lambda: gateway.route("r").buffer.queue.depth == 0)
    tail = [payload for payload in m.payloads if payload != b"first"]
    assert tail == [b"%d" % number for number in range(100)]


def _is_taken(m: Broker, channel: str, gateway: Gateway) -> bool:
    m.send(channel, b"first", qos=1)
    return gateway.route("r").buffer.accepted > 0


def _is_queued(m: Broker, channel: str) -> bool:
    """Publish; return whether a queue has taken the message: the gateway has subscribed."""
    return m.m.publish(channel, b"", mandatory=True).exception(PATIENCE) is None


@table("content_type, found", [(None, "text/plain"), ("", "")])
def test_empty_values_pass_a_route_as_they_are(
    names: Names, tmp_path: Path, content_type: str | None, found: str
) -> None:
    target = {"channel": "out/{x}"} if content_type is None else {"channel": "out/{x}", "content_type": content_type}
    name = found.replace("/", "-") or "empty"
    chosen = settings(tmp_path / name, instances=names, routes={"r": route(target=target)}, name=unique(name))
    with Broker(names["a"]["url"]) as a, Broker(names["b"]["url"], "out/+") as b, Gateway(chosen) as gateway:
        started(gateway)
        a.send("in/1", b"", content_type="text/plain", correlation_id="", headers={"k": ""})
        b.messages.wait_for(1)
        message = b.messages[0]
    assert (message.payload, message.context.content_type, message.context.correlation_id) == (b"", found, "")
    assert message.headers["k"] == ""


def test_a_message_that_returns_is_dropped(names: Names, tmp_path: Path) -> None:
    routes = {
        "there": route("#", "{channel}"),
        "back": {
            **route("#", "{channel}"),
            "from": {"instance": "b", "channel": "#", "queue": "gw"},
            "to": {"instance": "a", "channel": "{channel}"},
        },
    }
    with (
        Broker(names["a"]["url"], "x") as a, Broker(names["b"]["url"], "x") as b,
        Gateway(settings(tmp_path, instances=names, routes=routes)) as gateway,
    ):  # fmt: skip
        started(gateway)
        a.send("x", b"1")
        eventually(lambda: gateway.route("back").report().looped == 1)
        eventually(lambda: len(b.received) == 1)
        assert (a.payloads, b.payloads) == ([b"1"], [b"1"])
        a.send("x", b"2", headers={PASSED_HEADER: ",".join(f"g{number}" for number in range(16))})
        eventually(lambda: gateway.route("there").report().looped == 1)
    assert b.payloads == [b"1"]


def test_what_the_pipeline_cannot_handle_is_a_dead_letter_and_the_rest_goes_on(
    bridged: Bridged, names: Names, tmp_path: Path
) -> None:
    routes = {"r": route(transform=[{"select": ["a"]}])}
    with bridged(routes) as (a, b, gateway):
        a.send("in/1", b"no json", b'{"a": 1, "b": 2}')
        eventually(lambda: len(b.received) == 1)
        journal = gateway.route("r").buffer.journal
        eventually(lambda: journal.dead_letter_count == 1)
        (letter,) = letters(journal, Selection())
        assert (letter.stage, letter.channel, letter.payload) == ("source", "in/1", b"no json")
        assert "not JSON" in letter.reason
        # with another configuration it goes through
        gateway.reload(settings(tmp_path, instances=names, routes={"r": route()}))
        outcome = gateway.route("r").replay(Selection(where="(reason=*JSON*)"))
        assert (outcome.replayed, outcome.failed) == (1, 0)
        eventually(lambda: b.payloads == [b'{"a":1}', b"no json"])
        assert journal.dead_letter_count == 0


def test_a_replay_that_fails_again_keeps_the_dead_letter(bridged: Bridged) -> None:
    routes = {"r": route(transform=[{"select": ["a"]}])}
    with bridged(routes) as (a, _, gateway):
        a.send("in/1", b"x", b"y")
        found = gateway.route("r")
        eventually(lambda: found.buffer.journal.dead_letter_count == 2)
        began = time.monotonic()
        outcome = found.replay(Selection(), rate=10)
        assert time.monotonic() - began >= 0.1
        assert (outcome.replayed, outcome.failed) == (0, 2)
        assert "not JSON" in (outcome.reason or "")
        with pytest.raises(ArgumentError, match="rate"):
            found.replay(Selection(), rate=0)
        assert found.drop(Selection(ids=[1])) == 1
        assert found.drop(Selection()) == 1


def test_the_number_of_dead_letters_is_bounded(bridged: Bridged) -> None:
    routes = {"r": route(transform=[{"select": ["a"]}], buffer={"max_dead_letters": 3})}
    with bridged(routes) as (a, _, gateway):
        a.send("in/1", *(b"x%d" % number for number in range(5)))
        eventually(lambda: gateway.route("r").report().failed == 5)
        found = letters(gateway.route("r").buffer.journal, Selection())
        assert [each.payload for each in found] == [b"x2", b"x3", b"x4"]


def test_a_message_that_the_target_always_refuses_is_a_dead_letter(names: Names, tmp_path: Path) -> None:
    rules = tmp_path / "acl"
    rules.write_text("topic readwrite open/#\n")
    with (
        Mosquitto([f"acl_file {rules}"]) as broker,
        Broker(names["a"]["url"]) as a,
        Broker(broker.url, "open/+", qos=1) as b,
    ):
        instances = {"a": names["a"], "b": {"url": broker.url}}
        routes = {"r": route("in/{x}", "{x}/1")}
        with Gateway(settings(tmp_path / "data", instances=instances, routes=routes)) as gateway:
            started(gateway)
            found = gateway.route("r")
            a.send("in/open", b"1")
            a.send("in/shut", b"2")
            a.send("in/open", b"3")
            eventually(lambda: found.buffer.journal.dead_letter_count == 1, patience=2 * PATIENCE)
            eventually(lambda: b.payloads[-1:] == [b"3"])
            (letter,) = letters(found.buffer.journal, Selection())
            assert (letter.stage, letter.channel, letter.payload) == ("target", "shut/1", b"2")
            assert "PublishRefusedError" in letter.reason
            assert found.report().retried >= ATTEMPTS - 1
            eventually(lambda: found.buffer.queue.depth == 0)
            rules.write_text("topic readwrite #\n")
            broker.reload()
            assert found.replay(Selection()).replayed == 1
            eventually(lambda: found.buffer.queue.depth == 0)
            assert found.buffer.journal.dead_letter_count == 0


def test_a_full_buffer_holds_the_source_back(names: Names, mosquitto: Mosquitto, tmp_path: Path) -> None:
    with Away(mosquitto) as away, Broker(names["a"]["url"]) as a:
        away.leave()
        routes = {"r": route({"channel": "in", "queue": "gw", "prefetch": 10}, "out", buffer={"max_bytes": 2**20})}
        chosen = settings(tmp_path, instances={"a": names["a"], "b": away.instance}, routes=routes)
        with Gateway(chosen) as gateway:
            eventually(lambda: gateway.report().routes[0].is_subscribed)
            eventually(lambda: a.m.publish("in", b"", mandatory=True).exception(PATIENCE) is None)
            for _ in range(300):
                a.m.publish("in", bytes(10_000))
            found = gateway.route("r")
            eventually(lambda: found.buffer.storing >= 5)
            accepted = found.buffer.accepted
            assert accepted < 200
            assert found.buffer.journal.size <= 1.3 * 2**20
            assert found.report().received <= accepted + 11


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_a_full_buffer_drops(policy: str, names: Names, mosquitto: Mosquitto, tmp_path: Path) -> None:
    name = unique(policy)
    with Away(mosquitto) as away, Broker(names["a"]["url"]) as a, Broker(mosquitto.url, name, qos=1) as b:
        away.leave()
        routes = {"r": route("in", name, buffer={"full": policy, "max_bytes": 2**20})}
        chosen = settings(tmp_path, instances={"a": names["a"], "b": away.instance}, routes=routes)
        with Gateway(chosen) as gateway:
            eventually(lambda: gateway.report().routes[0].is_subscribed)
            eventually(lambda: a.m.publish("in", b"-1", mandatory=True).exception(PATIENCE) is None)
            a.send("in", *(b"%4d" % number + bytes(10_000) for number in range(300)))
            found = gateway.route("r")
            eventually(lambda: found.report().received == 301)
            eventually(lambda: found.buffer.storing == 0)
            dropped = found.report().buffer.dropped
            assert dropped > 50
            away.come_back()
            eventually(lambda: found.buffer.queue.depth == 0)
            eventually(lambda: found.report().published + found.report().buffer.dropped == 301)
            # the broker has confirmed them; the subscriber gets the last ones after that
            eventually(lambda: len(b.received) == found.report().published)
            arrived = [int(payload[:4]) for payload in b.payloads]
    assert arrived == sorted(arrived)
    if policy == "drop_newest":
        assert arrived[:50] == list(range(-1, 49))
    else:
        assert arrived[-50:] == list(range(250, 300))


def test_a_route_that_a_full_disk_holds_back_says_so_once_and_when_it_ends(
    names: Names, tmp_path: Path, disk_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    disk = disk_of("2m")
    lost = {"url": "mqtt://127.0.0.1:1", "reconnect_max": 60.0}
    given = settings(disk / "data", instances={"a": names["a"], "b": lost}, routes={"r": route("in/+", "out/x")})
    with Broker(names["a"]["url"]) as a, Gateway(given) as gateway:
        eventually(lambda: gateway.report().routes[0].is_subscribed)
        assert not gateway.report().routes[0].buffer.is_held_back
        file = ballast(disk, 60_000)
        a.send("in/1", *(b"%d" % number + bytes(1000) for number in range(200)))
        eventually(lambda: gateway.report().routes[0].buffer.is_held_back)
        (problem,) = call(disk / "data", "status")["problems"][:1]
        assert problem.startswith("route 'r': the source is held back: ")
        assert "disk" in problem
        assert any("held back" in each for each in gateway.problems())
        file.unlink()
        eventually(lambda: gateway.report().routes[0].buffer.accepted == 200)
        eventually(lambda: not gateway.report().routes[0].buffer.is_held_back)
        assert gateway.problems() == []
    lines = [each.getMessage() for each in caplog.records if "held back" in each.getMessage()]
    assert [each.partition(" held back")[0] for each in lines] == [
        "route 'r': the source is",
        "route 'r': the source is not",
    ]


def test_a_route_whose_buffer_is_full_is_shown_as_held_back(names: Names, tmp_path: Path) -> None:
    lost = {"url": "mqtt://127.0.0.1:1", "reconnect_max": 60.0}
    routes = {"r": route("in/+", "out/x", {"max_bytes": 20_000})}
    given = settings(tmp_path, instances={"a": names["a"], "b": lost}, routes=routes)
    with Broker(names["a"]["url"]) as a, Gateway(given) as gateway:
        eventually(lambda: gateway.report().routes[0].is_subscribed)
        a.send("in/1", *(bytes(1000) for _ in range(30)))
        eventually(lambda: gateway.report().routes[0].buffer.is_held_back)
        assert gateway.problems() == []  # it is what ``block`` is for


def test_a_source_is_acknowledged_only_when_the_message_is_on_the_disk(
    bridged: Bridged, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bridged() as (a, _, gateway):
        found = gateway.route("r")
        held: list[Any] = []
        put = found.buffer.journal.put
        monkeypatch.setattr(found.buffer.journal, "put", held.append)
        a.send("in/1", b"x")
        eventually(lambda: len(held) == 1)
        with messaging.connect(names["a"]["url"]) as m:
            assert m.runtime is not None
        assert found.buffer.accepted == 0
        (source,) = held[0].sources
        assert source.acknowledge_state is messaging.AcknowledgeType.RECEIVED
        put(held[0])
        eventually(lambda: source.acknowledge_state is messaging.AcknowledgeType.ACKNOWLEDGED)


def test_batches_are_acknowledged_when_they_are_stored(names: Names, tmp_path: Path) -> None:
    routes = {"r": route(batch={"count": 3, "delay": "30 s"}, compress="gzip")}
    with Broker(names["a"]["url"]) as a:
        _batches(a, names, routes, tmp_path)
        # the fourth one was not stored: its broker has it still
        with (
            Broker(names["b"]["url"], "out/+") as b,
            Gateway(settings(tmp_path, instances=names, routes={"r": route()})),
        ):
            eventually(lambda: b.payloads == [b'{"n":4}'])


def _batches(a: Broker, names: Names, routes: dict[str, Any], folder: Path) -> None:
    with Broker(names["b"]["url"], "out/+") as b, Gateway(settings(folder, instances=names, routes=routes)) as gateway:
        started(gateway)
        a.send("in/1", b'{"n":1}', b'{"n":2}', b'{"n":3}', b'{"n":4}')
        eventually(lambda: len(b.received) == 1)
        lines = gzip.decompress(b.payloads[0]).splitlines()
        assert [json.loads(line)["n"] for line in lines] == [1, 2, 3]
        assert b.messages[0].context.content_encoding == "gzip"


def test_the_last_sample_of_an_interval_is_published_when_it_ends(bridged: Bridged) -> None:
    routes = {"r": route(sample={"every": "200 ms", "keep": "last"})}
    with bridged(routes) as (a, b, gateway):
        a.send("in/1", b"1", b"2", b"3")
        a.send("in/2", b"4")
        eventually(lambda: sorted(b.received) == [("out/1", b"3"), ("out/2", b"4")])
        assert gateway.route("r").report().filtered == 2


def test_a_higher_priority_publishes_first(mosquitto: Mosquitto, names: Names, tmp_path: Path) -> None:
    name = unique("priority")
    with Away(mosquitto) as away, Broker(names["a"]["url"]) as a, Broker(mosquitto.url, f"{name}/+", qos=1) as b:
        away.leave()
        routes = {
            "low": route({"channel": "low", "queue": "l"}, f"{name}/low", buffer={"in_flight": 5}, priority=1),
            "high": route({"channel": "high", "queue": "h"}, f"{name}/high", buffer={"in_flight": 5}, priority=8),
        }
        chosen = settings(tmp_path, instances={"a": names["a"], "b": away.instance}, routes=routes)
        with Gateway(chosen) as gateway:
            eventually(lambda: all(each.is_subscribed for each in gateway.report().routes))
            for channel in ("low", "high"):
                eventually(partial(_is_queued, a, channel))
                a.send(channel, *(b"%d" % number for number in range(200)))
            eventually(lambda: all(each.buffer.depth == 201 for each in gateway.report().routes))
            away.come_back()
            eventually(lambda: len(b.received) == 402)
    channels = [channel.rpartition("/")[2] for channel, _ in b.received]
    last_high = len(channels) - 1 - channels[::-1].index("high")
    assert channels[: last_high + 1].count("low") < 60


def test_retained_state_is_mirrored(mosquitto: Mosquitto, tmp_path: Path) -> None:
    name = unique("retained")
    instances = {"a": {"url": mosquitto.url}, "b": {"url": mosquitto.url, "client_id": f"{name}-b"}}
    routes = {"r": route({"channel": f"{name}/in/{{d}}"}, {"channel": f"{name}/out/{{d}}", "retain": "keep"})}
    with Broker(mosquitto.url) as m:
        m.send(f"{name}/in/kept", b"old", qos=1, retain=True)
        with Gateway(settings(tmp_path, instances=instances, routes=routes, name=name)) as gateway:
            started(gateway)
            eventually(lambda: gateway.route("r").report().published >= 1)
            m.send(f"{name}/in/passing", b"1", qos=1)
            eventually(lambda: gateway.route("r").report().published >= 2)
        with Broker(mosquitto.url, f"{name}/out/+", qos=1) as late:
            eventually(lambda: late.received)
            m.send(f"{name}/out/end", b"", qos=1)
            eventually(lambda: (f"{name}/out/end", b"") in late.received)
        for channel in (f"{name}/in/kept", f"{name}/out/kept"):
            m.send(channel, b"", qos=1, retain=True)
    assert late.received == [(f"{name}/out/kept", b"old"), (f"{name}/out/end", b"")]


# --- life cycle


def test_a_gateway_starts_while_its_brokers_are_away(tmp_path: Path) -> None:
    instances = {"a": {"url": "mqtt://127.0.0.1:9"}, "b": {"url": "amqp://127.0.0.1:9"}}
    began = time.monotonic()
    with Gateway(settings(tmp_path, instances=instances, routes={"r": route({"channel": "in"}, "out")})) as gateway:
        report = gateway.report()
        assert report.state == "running"
        assert not report.routes[0].is_source_up
    assert time.monotonic() - began < 10


def test_a_gateway_is_started_once(names: Names, tmp_path: Path) -> None:
    gateway = Gateway(settings(tmp_path, instances=names))
    with gateway, pytest.raises(ClosedError, match="started before"):
        gateway.start()
    gateway.close()
    with pytest.raises(ClosedError):
        gateway.start()


def test_two_gateways_share_no_folder(names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Journal.open
    monkeypatch.setattr(Journal, "open", lambda *given, **options: original(*given, **{**options, "lock_timeout": 0.1}))
    with Gateway(settings(tmp_path, instances=names)):
        other = Gateway(settings(tmp_path, instances=names, name="other"))
        with pytest.raises(JournalError, match="another writer has this journal open"):
            other.start()


def test_a_data_folder_that_is_a_file_is_a_configuration_error(names: Names, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="data folder"):
        Gateway(settings(tmp_path / "file", instances=names)).start()


def test_run_ends_when_another_thread_stops_it(names: Names, tmp_path: Path) -> None:
    gateway = Gateway(settings(tmp_path, instances=names))
    thread = threading.Thread(target=gateway.run)
    thread.start()
    eventually(lambda: gateway.report().state == "running")
    gateway.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert gateway.report().state == "closed"


def test_a_stop_publishes_what_it_can_in_time(names: Names, mosquitto: Mosquitto, tmp_path: Path) -> None:
    routes = {"r": route("in", "out", rate={"messages": 20, "burst": 1})}
    with Broker(names["a"]["url"]) as a, Broker(names["b"]["url"], "out") as b:
        gateway = Gateway(settings(tmp_path, instances=names, routes=routes)).start()
        started(gateway)
        a.send("in", *(b"%d" % number for number in range(40)))
        eventually(lambda: gateway.route("r").buffer.accepted == 40)
        began = time.monotonic()
        gateway.close(0.5)
        assert time.monotonic() - began < 3
        eventually(lambda: len(b.received) >= 5)
        assert len(b.received) < 40
        before = len(b.received)
        with Gateway(settings(tmp_path, instances=names, routes={"r": route("in", "out")})):
            eventually(lambda: len(set(b.payloads)) == 40)
    assert sorted(set(b.payloads), key=int) == [b"%d" % number for number in range(40)]
    assert before < 40


@table("timeout", ["1", object(), float("nan")])
def test_a_wrong_time_to_close_is_refused(timeout: Any, names: Names, tmp_path: Path) -> None:
    with Gateway(settings(tmp_path, instances=names)) as gateway, pytest.raises(ArgumentError):
        gateway.close(timeout)


def test_a_route_that_is_not_there_is_named(names: Names, tmp_path: Path) -> None:
    with (
        Gateway(settings(tmp_path, instances=names, routes={"telemetry": route()})) as gateway,
        pytest.raises(ConfigurationError, match="did you mean 'telemetry'"),
    ):
        gateway.route("telemetri")


# --- reload


def test_a_reload_leaves_what_is_the_same_alone(bridged: Bridged, names: Names, tmp_path: Path) -> None:
    routes = {"r": route(), "s": route({"channel": "other", "queue": "s"}, "there")}
    with bridged(routes, target="#") as (a, b, gateway):
        same = gateway.route("s")
        journal = gateway.route("r").buffer.journal
        gateway.reload(settings(tmp_path, instances=names, routes={**routes, "r": route("in/{x}", "new/{x}")}))
        assert gateway.route("s") is same
        assert gateway.route("r").buffer.journal is journal, "a reload never rebuilds a buffer"
        a.send("in/1", b"x")
        a.send("other", b"y")
        eventually(lambda: sorted(b.received) == [("new/1", b"x"), ("there", b"y")])
        assert gateway.report().reloads == 1


def test_a_reload_adds_and_removes_routes_and_instances(names: Names, tmp_path: Path) -> None:
    third = {"url": f"memory://{unique('third')}"}
    with (
        Broker(names["a"]["url"]) as a, Broker(names["b"]["url"], "#") as b, Broker(third["url"], "#") as c,
        Gateway(settings(tmp_path, instances=names)) as gateway,
    ):  # fmt: skip
        started(gateway)
        target = {"instance": "c", "channel": "out/{x}"}
        gateway.reload(settings(tmp_path, instances={**names, "c": third}, routes={"t": {**route(), "to": target}}))
        started(gateway)
        a.send("in/1", b"x")
        eventually(lambda: c.received == [("out/1", b"x")])
        assert b.received == []
        with pytest.raises(ConfigurationError):
            gateway.route("r")
        gateway.reload(settings(tmp_path, instances=names))
        started(gateway)
        a.send("in/2", b"y")
        eventually(lambda: b.received == [("out/2", b"y")])


def test_a_reload_to_another_target_loses_nothing(names: Names, mosquitto: Mosquitto, tmp_path: Path) -> None:
    with Away(mosquitto) as away, Broker(names["a"]["url"]) as a, Broker(names["b"]["url"], "out") as b:
        away.leave()
        lost = settings(tmp_path, instances={"a": names["a"], "b": away.instance}, routes={"r": route("in", "out")})
        with Gateway(lost) as gateway:
            eventually(lambda: gateway.report().routes[0].is_subscribed)
            eventually(lambda: a.m.publish("in", b"0", mandatory=True).exception(PATIENCE) is None)
            a.send("in", b"1", b"2")
            eventually(lambda: gateway.route("r").buffer.queue.depth == 3)
            gateway.reload(settings(tmp_path, instances=names, routes={"r": route("in", "out")}))
            eventually(lambda: b.payloads == [b"0", b"1", b"2"])


def _send_and_hold(gateway: Gateway, a: Broker, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Send three messages of which route ``r`` keeps the records from its disk; return what stores them."""
    journal = gateway.route("r").buffer.journal
    held: list[Any] = []
    put = journal.put
    monkeypatch.setattr(journal, "put", held.append)

    def store() -> None:
        monkeypatch.setattr(journal, "put", put)
        for each in held:
            put(each)

    a.send("in/1", b"1", b"2", b"3")
    eventually(lambda: len(held) == 3)
    return store


def test_a_reload_that_ends_a_route_gives_back_no_message_that_it_stores(
    bridged: Bridged, names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on its way to the disk is acknowledged before the subscription ends, else the next one gets it again."""
    with bridged(target="#") as (a, b, gateway):
        store = _send_and_hold(gateway, a, monkeypatch)
        journal = gateway.route("r").buffer.journal
        close = journal.close
        monkeypatch.setattr(journal, "close", lambda: (store(), close()))
        gateway.reload(settings(tmp_path, instances=names, routes={"s": route(target="new/{x}")}))
        started(gateway)
        a.send("in/1", b"end")
        eventually(lambda: b.received == [("new/1", b"end")])
        gateway.reload(settings(tmp_path, instances=names))
        eventually(lambda: len(b.received) == 4)
    assert b.received[1:] == [("out/1", b"1"), ("out/1", b"2"), ("out/1", b"3")]


def test_a_reload_of_a_source_gives_back_no_message_that_it_stores(
    bridged: Bridged, names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bridged(target="#") as (a, b, gateway):
        store = _send_and_hold(gateway, a, monkeypatch)
        changed = route({"channel": "in/{x}", "queue": "gw", "prefetch": 7}, "new/{x}")
        reload = threading.Thread(
            target=gateway.reload, args=[settings(tmp_path, instances=names, routes={"r": changed})]
        )
        reload.start()
        eventually(lambda: gateway.route("r").settings.source.prefetch == 7)
        eventually(lambda: gateway.report().routes[0].is_subscribed)
        store()
        reload.join(PATIENCE)
        a.send("in/1", b"end")
        eventually(lambda: b.payloads[-1:] == [b"end"])
    assert b.received == [("out/1", b"1"), ("out/1", b"2"), ("out/1", b"3"), ("new/1", b"end")]


@table("replaced", [["a"], ["b"], ["a", "b"]])
def test_a_reload_that_replaces_an_instance_keeps_buffer_and_messages_in_flight(
    replaced: list[str], names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message whose confirmation comes while the instance is replaced is not published again."""
    with (
        Broker(names["a"]["url"]) as a, Broker(names["b"]["url"], "#") as b,
        Gateway(settings(tmp_path, instances=names)) as gateway,
    ):  # fmt: skip
        started(gateway)
        same, before = gateway.route("r"), {**gateway._instances.by_name}
        confirmed: Promise[None] = Promise()
        target = gateway._instances.targets["b"]
        publish = target.publish
        monkeypatch.setattr(target, "publish", lambda stored: (publish(stored), confirmed)[1])
        a.send("in/1", b"1")
        eventually(lambda: b.payloads == [b"1"])
        others = {name: {**each, "timeout": 17.0} if name in replaced else each for name, each in names.items()}
        gateway.reload(settings(tmp_path, instances=others))
        started(gateway)
        assert gateway.route("r") is same
        instances = gateway._instances.by_name
        assert [name for name in before if instances[name] is not before[name]] == replaced
        monkeypatch.undo()
        confirmed.resolve(None)
        a.send("in/1", b"2", b"end")
        eventually(lambda: b.payloads[-1:] == [b"end"])
        eventually(lambda: same.is_drained)
    assert b.payloads == [b"1", b"2", b"end"]


def test_a_message_that_a_left_source_still_hands_out_stays_with_its_broker(
    bridged: Bridged, names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker delivers it again, to the next instance: it must not be stored twice."""
    with bridged(target="#") as (a, b, gateway):
        buffer = gateway.route("r").buffer
        store, going_on, arrived = buffer.store, threading.Event(), threading.Event()

        def hold(*given: Any) -> None:
            arrived.set()
            assert going_on.wait(PATIENCE)
            store(*given)

        monkeypatch.setattr(buffer, "store", hold)
        a.send("in/1", b"1")
        assert arrived.wait(PATIENCE)
        others = {**names, "a": {**names["a"], "timeout": 17.0}}
        reload = threading.Thread(target=gateway.reload, args=[settings(tmp_path, instances=others)])
        reload.start()
        eventually(lambda: not gateway.report().routes[0].is_enabled)
        going_on.set()
        reload.join(PATIENCE)
        started(gateway)
        a.send("in/1", b"end")
        eventually(lambda: b.payloads[-1:] == [b"end"])
    assert b.payloads == [b"1", b"end"]


def test_a_reload_whose_instance_cannot_be_made_changes_nothing(bridged: Bridged, names: Names, tmp_path: Path) -> None:
    with bridged(target="#") as (a, b, gateway):
        for wrong in ({"password_file": tmp_path / "missing"}, {"timeout": "long"}, {"keepalives": 3}):
            with pytest.raises(ConfigurationError):
                gateway.reload(settings(tmp_path, instances={**names, "a": {**names["a"], **wrong}}))
        a.send("in/1", b"x")
        eventually(lambda: b.received == [("out/1", b"x")])
        assert gateway.report().reloads == 0


def test_a_reload_whose_instance_is_refused_by_the_disk_can_be_repeated(
    bridged: Bridged, names: Names, tmp_path: Path
) -> None:
    """Routes of the instance end, and begin again with the next reload."""
    outbox = tmp_path / "outbox"
    others = {**names, "b": {**names["b"], "outbox_path": outbox}}
    with bridged(target="#") as (a, b, gateway):
        outbox.write_text("no folder")
        with pytest.raises(JournalError):
            gateway.reload(settings(tmp_path, instances=others))
        outbox.unlink()
        gateway.reload(settings(tmp_path, instances=others))
        started(gateway)
        a.send("in/1", b"y")
        eventually(lambda: b.payloads[-1:] == [b"y"])


def test_a_close_without_time_gives_back_no_message_that_it_stores(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Broker(names["a"]["url"]) as a, Broker(names["b"]["url"], "#") as b:
        gateway = started(Gateway(settings(tmp_path, instances=names)).start())
        store = _send_and_hold(gateway, a, monkeypatch)
        close = threading.Thread(target=gateway.close, args=[0.0])
        close.start()
        eventually(lambda: gateway.report().state == "stopping")
        store()
        close.join(PATIENCE)
        with Gateway(settings(tmp_path, instances=names)) as gateway:
            started(gateway)
            a.send("in/1", b"end")
            eventually(lambda: b.payloads[-1:] == [b"end"])
    assert b.payloads == [b"1", b"2", b"3", b"end"]


@table("before, after", [("never", "keep"), ("keep", "never")])
def test_a_reload_changes_whether_messages_stay_retained(
    before: str, after: str, mosquitto: Mosquitto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MQTT has one subscription for each filter of a session: that of the old options is kept, and in the way."""
    name = unique("retain")
    url = mosquitto.url
    names = {"a": {"url": url, "client_id": name, "clean_start": False, "session_expiry": 60}, "b": {"url": url}}

    def configured(retain: str) -> GatewaySettings:
        source, target = {"channel": f"{name}/in/{{d}}"}, {"channel": f"{name}/out/{{d}}", "retain": retain}
        return settings(tmp_path, instances=names, routes={"r": route(source, target)})

    with (
        Broker(url) as a, Broker(url, f"{name}/out/+", retain_as_published=True) as b,
        Gateway(configured(before)) as gateway,
    ):  # fmt: skip
        started(gateway)
        for number, retain in enumerate((after, before, after)):
            gateway.reload(configured(retain))
            started(gateway)
            a.send(f"{name}/in/{number}", b"x", qos=1, retain=True)
            channel = f"{name}/out/{number}"
            eventually(lambda: (channel, b"x") in b.received)  # noqa: B023  # called at once
            flags = [each.context.extensions.get("retain") for each in b.messages if each.context.channel == channel]
            assert flags[0] is (True if retain == "keep" else None)
        for number in range(3):
            a.send(f"{name}/in/{number}", b"", qos=1, retain=True)
    assert "subscribing again" not in caplog.text


def test_a_reload_that_cannot_be_run_keeps_the_present_configuration(
    bridged: Bridged, names: Names, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bridged(target="#") as (a, b, gateway):
        with pytest.raises(ConfigurationError, match="name cannot change"):
            gateway.reload(settings(tmp_path, instances=names, name="other"))
        with pytest.raises(ConfigurationError, match="data cannot change"):
            gateway.reload(settings(tmp_path / "other", instances=names))
        a.send("in/1", b"x")
        eventually(lambda: b.received == [("out/1", b"x")])
        with caplog.at_level(logging.WARNING):
            gateway.reload(settings(tmp_path, instances=names, routes={"r": route(buffer={"max_bytes": 2**21})}))
        assert "max_bytes take effect with the next start" in caplog.text
    with pytest.raises(ClosedError, match="it is closed"):
        gateway.reload(settings(tmp_path, instances=names))


def test_a_route_whose_position_the_disk_does_not_take_leaves_its_folder(
    bridged: Bridged, names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = {"r": route(), "s": route({"channel": "other", "queue": "s"}, "there")}
    with bridged(target="#") as (a, b, gateway):

        def full(journal: Journal, *_: Any) -> Any:
            raise journal.folder.error(JournalFullError, "cannot write state.db: database or disk is full")

        monkeypatch.setattr(Journal, "cursor", full)
        with pytest.raises(JournalFullError):
            gateway.reload(settings(tmp_path, instances=names, routes=routes))
        monkeypatch.undo()
        gateway.reload(settings(tmp_path, instances=names, routes=routes))
        started(gateway)
        a.send("other", b"x")
        eventually(lambda: b.received == [("there", b"x")])


def test_a_disabled_route_takes_nothing_and_keeps_its_buffer(names: Names, tmp_path: Path) -> None:
    with (
        Broker(names["a"]["url"]) as a, Broker(names["b"]["url"], "#") as b,
        Gateway(settings(tmp_path, instances=names, routes={"r": route(enabled=False)})) as gateway,
    ):  # fmt: skip
        a.send("in/1", b"lost: nothing has subscribed")
        gateway.reload(settings(tmp_path, instances=names))
        started(gateway)
        eventually(lambda: a.m.publish("in/2", b"x", mandatory=True).exception(PATIENCE) is None)
        eventually(lambda: b.received == [("out/2", b"x")])


def test_a_route_that_is_enabled_publishes_what_is_stored(names: Names, tmp_path: Path) -> None:
    """Nothing else wakes it: its target is connected already, and no message comes."""
    with Broker(names["a"]["url"]) as a, Broker(names["b"]["url"], "out/+") as b:
        lost = {"a": names["a"], "b": {"url": "mqtt://127.0.0.1:1", "reconnect_max": 60.0}}
        with Gateway(settings(tmp_path, instances=lost)) as gateway:
            eventually(lambda: gateway.report().routes[0].is_subscribed)
            a.send("in/1", b"1", b"2")
            eventually(lambda: gateway.route("r").buffer.queue.depth == 2)
        other = route({"channel": "other", "queue": "s"}, "there")
        with Gateway(settings(tmp_path, instances=names, routes={"s": other})) as gateway:
            started(gateway)
            gateway.reload(settings(tmp_path, instances=names, routes={"s": other, "r": route(enabled=False)}))
            assert gateway.route("r").buffer.queue.depth == 2
            gateway.reload(settings(tmp_path, instances=names, routes={"s": other, "r": route()}))
            eventually(lambda: b.received == [("out/1", b"1"), ("out/1", b"2")])


def test_interceptors_see_what_a_gateway_publishes(bridged: Bridged) -> None:
    from messaging.interception import Interceptor, OutboundMessage

    class Stamp(Interceptor):
        def intercept_publish(self, outbound: OutboundMessage) -> None:
            outbound.add_headers({"stamped": "yes"})

    with bridged(target="#", interceptors=[Stamp()]) as (a, b, _):
        a.send("in/1", b"x")
        eventually(lambda: b.received)
    assert b.messages[0].context.extensions["headers"]["stamped"] == "yes"


def test_a_password_that_changes_in_its_file_is_used_without_a_restart(names: Names, tmp_path: Path) -> None:
    users, secret = tmp_path / "users", tmp_path / "secret"
    users.write_text("")
    secret.write_text("old")
    with Mosquitto(["allow_anonymous false", f"password_file {users}"]) as broker, Broker(names["a"]["url"]) as a:
        away = {
            "url": broker.url.replace("mqtt://", "mqtt://gw@"), "password_file": str(secret), "reconnect_max": 0.1,
        }  # fmt: skip
        chosen = settings(tmp_path / "data", instances={"a": names["a"], "b": away}, routes={"r": route("in", "out")})
        with Gateway(chosen) as gateway:
            eventually(lambda: gateway.report().routes[0].is_subscribed)
            a.send("in", b"1")
            eventually(lambda: gateway.route("r").buffer.queue.depth == 1)
            subprocess.run(["mosquitto_passwd", "-b", str(users), "gw", "new"], check=True, capture_output=True)
            broker.restart()
            secret.write_text("new")
            eventually(lambda: gateway.report().routes[0].published == 1, "the rotated password is read")


def test_a_route_does_not_compress_for_a_protocol_that_cannot_say_so(names: Names, tmp_path: Path) -> None:
    instances = {"a": names["a"], "b": {"url": "mqtt://localhost?version=3.1.1"}}
    chosen = settings(tmp_path, instances=instances, routes={"r": route(compress="gzip")})
    assert [(each.key, "version=5" in each.text) for each in check(chosen)] == [("routes.r.compress", True)]
    with pytest.raises(ConfigurationError, match=r"routes\.r\.compress"):
        Gateway(chosen).start()


def test_refused_credentials_are_not_tried_in_a_loop(names: Names, tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords.write_text("")
    with (
        Mosquitto(["allow_anonymous false", f"password_file {passwords}"]) as broker,
        Proxy(broker.host, broker.port) as proxy,
        Broker(names["a"]["url"]) as a,
        Broker(names["b"]["url"], "out") as b,
    ):
        refused = {"url": f"mqtt://127.0.0.1:{proxy.port}"}
        routes = {"r": route("in", "out")}
        chosen = settings(tmp_path / "data", instances={"a": names["a"], "b": refused}, routes=routes)
        with Gateway(chosen) as gateway:
            eventually(lambda: gateway.report().routes[0].is_subscribed)
            a.send("in", b"1", b"2")
            eventually(lambda: gateway.route("r").buffer.queue.depth == 2)
            # with a port of its own: a loop would have tried again many times before the other instance is served
            before = proxy.attempts
            time.sleep(1)  # sleeps: the adapter's back-off is in real time
            assert proxy.attempts - before <= 5
            gateway.reload(settings(tmp_path / "data", instances=names, routes=routes))
            eventually(lambda: b.payloads == [b"1", b"2"])


def test_the_disk_has_the_data_folder_before_a_message_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder whose name was not synced is gone after a loss of power, with all that was synced below it."""
    synced: dict[str, None] = {}
    real = os.fsync

    def sync(file: int) -> None:
        synced[str(Path(f"/proc/self/fd/{file}").readlink())] = None
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    data = tmp_path / "new" / "data"
    instances = {name: {"url": f"memory://{unique(name)}"} for name in "ab"}
    with Gateway(settings(data, instances=instances)):
        assert {str(each) for each in (tmp_path, data.parent, data, data / "routes")} <= {*synced}

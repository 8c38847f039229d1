"""Connections that break, stall or are slow: nothing that was confirmed is lost, as far as the protocol promises.

What it does not promise is in ``docs/faults.md``, with the figures; the tests here hold on to them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Message, Promise
from messaging.testing.brokers import Broker, RabbitMQ
from messaging.testing.proxy import Flow, Proxy
from messaging.testing.waiting import PATIENCE, eventually
from messaging_adapters.amqp import AmqpSettings
from tests.faults.scenario import (
    AMQP,
    AMQP_TRANSIENT,
    MQTT5,
    MQTT5_QOS2,
    MQTT311,
    MQTT311_QOS2,
    OUTAGE,
    QUICK,
    Profile,
    Scene,
    state,
    through,
)

once_each = pytest.mark.parametrize("profile", [MQTT5, MQTT311, AMQP], ids=str)


def flows(*proxies: Proxy) -> list[Flow]:
    """Both directions of each."""
    return [flow for proxy in proxies for flow in (proxy.up, proxy.down)]


def attempts(scene: Scene) -> tuple[int, int]:
    return scene.sending.attempts, scene.receiving.attempts


def large(sequence: int) -> bytes:
    """A body of some thousand bytes, so that most of what is under way is the middle of a frame."""
    return b"." * (2000 + sequence % 1000)


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], float]]:
    """Return a function that tells for how long this process had no turn on a busy machine, seconds."""
    late = 0.0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal late
        step, began = 0.02, time.monotonic()
        while not is_over.wait(step):
            now = time.monotonic()
            late += now - began - step
            began = now

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield lambda: late
    is_over.set()
    watcher.join()


# --- broken


@pytest.mark.slow  # simulated worlds hold the same promise
@pytest.mark.parametrize("profile", [MQTT5, MQTT311, MQTT5_QOS2, MQTT311_QOS2, AMQP, AMQP_TRANSIENT], ids=str)
def test_nothing_is_lost_when_connections_are_reset(any_broker: Broker, profile: Profile, tmp_path: Path) -> None:
    """At both ends, at one of them, and on MQTT at the client's without the broker hearing of it."""
    with Scene(profile, any_broker, tmp_path) as scene:
        for proxy in (scene.sending, scene.receiving):
            faults: list[Callable[[], None]] = [
                proxy.sever,
                partial(proxy.reset, "client"),
                partial(proxy.reset, "broker"),
            ]
            if not isinstance(any_broker, RabbitMQ):
                faults.append(partial(proxy.reset, "client", quietly=True))
            for fault in faults:
                scene.outlived(fault, proxy)
            assert proxy.resets >= len(faults)
        verdict = scene.finish()
    assert not profile.once or not verdict.duplicates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "reset"),
    [
        (MQTT5, True),
        (MQTT5, False),
        (MQTT311, True),
        (MQTT5_QOS2, True),
        (MQTT311_QOS2, False),
        (AMQP, True),
        (AMQP, False),
    ],
    ids=str,
)
def test_nothing_is_lost_when_a_connection_ends_within_a_frame(
    any_broker: Broker, profile: Profile, reset: bool, tmp_path: Path
) -> None:
    """In each direction, with a reset or in good order. Of two places in a row one at least is within a frame."""
    with Scene(profile, any_broker, tmp_path, body=large) as scene:
        for proxy in (scene.sending, scene.receiving):
            for flow in flows(proxy):
                for count in (101, 102):
                    cuts = flow.cuts
                    scene.outlived(partial(flow.cut_after, count, reset=reset), proxy)
                    assert flow.cuts == cuts + 1
        verdict = scene.finish()
    assert not profile.once or not verdict.duplicates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "places"),
    [
        (MQTT5, [1, 3]),  # of CONNECT and of CONNACK
        (MQTT311, [1, 3]),
        (AMQP, [3, 30, 300]),  # of the protocol header, of start and start-ok, and of what follows
    ],
    ids=str,
)
def test_a_connection_that_ends_within_the_handshake_is_made_again(
    any_broker: Broker, profile: Profile, places: list[int], tmp_path: Path
) -> None:
    """In each direction, after so many bytes."""
    with Scene(profile, any_broker, tmp_path) as scene:
        for flow in flows(scene.receiving):
            for count in places:
                scene.receiving.refuse()
                flow.cut_after(count)
                cuts = flow.cuts
                scene.receiving.accept()
                eventually(lambda flow=flow, cuts=cuts: flow.cuts > cuts, "the cut")  # type: ignore[misc]
                scene.progress()
        scene.finish()


# --- half open


@pytest.mark.parametrize(
    ("profile", "settings", "limit"),
    [
        (MQTT5, {"keepalive": 3}, 6.0),
        (MQTT311, {"keepalive": 3, "version": "3.1.1"}, 6.0),
        (AMQP, {"heartbeat": 3, "timeout": OUTAGE}, 12.0),
    ],
    ids=str,
)
def test_a_half_open_connection_is_noticed_in_time(
    any_broker: Broker, profile: Profile, settings: dict[str, Any], limit: float
) -> None:
    """With one direction gone, or both; idle, and with messages that go nowhere.

    MQTT: within twice the keepalive. AMQP: within three heartbeats and 3 s, which is 33 s with the default. On a busy
    machine so much later as the process had no turn.
    """
    assert AmqpSettings().heartbeat == 10
    took: dict[str, float] = {}

    def cut(ways: tuple[str, ...], busy: bool) -> None:
        channel = f"half/{profile}/{'-'.join(ways)}/{'busy' if busy else 'idle'}"
        promises: list[Promise[None]] = []
        with (
            Proxy(any_broker.host, any_broker.port) as proxy,
            messaging.connect(through(proxy, any_broker.url), **{**QUICK, **settings}) as m,
            m.subscribe(channel, qos=1) as stream,
        ):
            m.publish(channel, qos=1).result(PATIENCE)
            stream.receive(PATIENCE)
            swallowing = [getattr(proxy, way) for way in ways]
            for flow in swallowing:
                flow.swallow()
            passed = [flow.bytes for flow in swallowing]
            start = time.monotonic()

            def noticed() -> bool:
                if busy and len(promises) < 1000:
                    promises.append(m.publish(channel, qos=1))
                return state(m) != "connected"

            eventually(noticed, f"{channel}: the loss is noticed", patience=3 * PATIENCE)
            took[channel] = time.monotonic() - start
            # a broker that had no turn for seconds, on a busy machine, has sent nothing that could be swallowed
            assert proxy.up.swallowed > 0 or "up" not in ways
            assert [flow.bytes for flow in swallowing] == passed
            for flow in swallowing:
                flow.restore()
            for promise in promises:
                promise.result(OUTAGE)

    cuts = [(ways, busy) for ways in (("up", "down"), ("up",), ("down",)) for busy in (False, True)]
    with watched() as late, ThreadPoolExecutor(len(cuts)) as threads:
        for done in [threads.submit(cut, *each) for each in cuts]:
            done.result(2 * OUTAGE)
        assert max(took.values()) <= limit + late(), took


@pytest.mark.slow  # simulated worlds hold the same promise
@pytest.mark.parametrize("profile", [MQTT5, MQTT311_QOS2, AMQP], ids=str)
def test_nothing_is_lost_over_a_half_open_connection(any_broker: Broker, profile: Profile, tmp_path: Path) -> None:
    def noticed() -> int:
        return any_broker.log().count("missed heartbeats from client")

    interval = {"heartbeat" if profile is AMQP else "keepalive": 1}
    with Scene(profile, any_broker, tmp_path, connect_timeout=2.0, **interval) as scene:
        for proxy, instances, connections in (
            (scene.sending, [publisher.instance for publisher in scene.publishers], len(scene.publishers)),
            (scene.receiving, [scene.receiver], 2),
        ):
            scene.progress()
            before = noticed()
            for flow in flows(proxy):
                flow.swallow()
            for m in instances:
                eventually(lambda m=m: state(m) != "connected", "the loss is noticed")  # type: ignore[misc]
            if profile is AMQP:  # by the broker, too: until then it holds back what the old consumer had
                eventually(lambda b=before, c=connections: noticed() >= b + c, "the broker notices")  # type: ignore[misc]
            assert proxy.up.swallowed + proxy.down.swallowed > 0
            for flow in flows(proxy):
                flow.restore()
        scene.progress()
        verdict = scene.finish()
    assert not profile.once or not verdict.duplicates


# --- slow


@pytest.mark.slow  # simulated worlds hold the same promise
@once_each
def test_frames_may_arrive_byte_by_byte(any_broker: Broker, profile: Profile, tmp_path: Path) -> None:
    with Scene(profile, any_broker, tmp_path, publishers=1, window=4, batch=2) as scene:
        known = attempts(scene)
        for flow in flows(scene.sending, scene.receiving):
            flow.shape(piece=1, pause=0.001)
        scene.progress()  # what was under way already may have come as it was
        before = [flow.bytes - flow.pieces for flow in flows(scene.sending, scene.receiving)]
        scene.progress()
        assert [flow.bytes - flow.pieces for flow in flows(scene.sending, scene.receiving)] == before
        for flow in flows(scene.sending, scene.receiving):
            flow.shape()
        verdict = scene.finish()
    assert verdict.duplicates == 0
    assert attempts(scene) == known


@once_each
def test_a_slow_consumer_delays_no_other_and_receives_everything(
    any_broker: Broker, profile: Profile, tmp_path: Path
) -> None:
    """What it does not take waits at the broker: in this process there is no more than a window.

    On AMQP other subscriptions of the same instance go on.
    """
    slow = threading.Event()
    window: dict[str, Any] = {"mqtt5": {"receive_maximum": 50}, "amqp": {"prefetch": 50}}.get(profile.name, {})

    def before(_: Message) -> None:
        assert slow.wait(OUTAGE)

    with Scene(profile, any_broker, tmp_path, before=before, **window) as scene:
        enough = 1000 if profile is AMQP else 300
        eventually(lambda: all(publisher.confirmed > enough for publisher in scene.publishers), "many are confirmed")
        subscription = scene.receiver.runtime.get_runtime_dto().subscriptions[0]
        assert subscription.buffered + 1 <= 50  # one is in the consumer's hands
        if profile is AMQP:
            with scene.receiver.subscribe(scene.channel("quick/one")) as quick:
                scene.publishers[0].instance.publish(scene.channel("quick/one"), b"x").result(PATIENCE)
                assert quick.receive(PATIENCE).payload == b"x"
        assert scene.arrivals.stamps == []
        slow.set()
        scene.progress()
        assert scene.finish().duplicates == 0


@pytest.mark.slow  # simulated worlds hold the same promise
@once_each
def test_a_slow_network_delays_and_loses_nothing(any_broker: Broker, profile: Profile, tmp_path: Path) -> None:
    with Scene(profile, any_broker, tmp_path) as scene:
        scene.progress()
        known = attempts(scene)
        for flow in flows(scene.sending, scene.receiving):
            flow.shape(latency=0.05)
        scene.receiving.down.shape(latency=0.05, rate=20_000)
        start, received = time.monotonic(), scene.receiving.down.bytes
        eventually(lambda: all(publisher.confirmed > 500 for publisher in scene.publishers), "1,000 confirmed")
        elapsed = time.monotonic() - start
        assert scene.receiving.down.bytes - received < 20_000 * (elapsed + 0.5)
        for flow in flows(scene.sending, scene.receiving):
            flow.shape()
        scene.progress()
        assert scene.finish().duplicates == 0
        assert attempts(scene) == known

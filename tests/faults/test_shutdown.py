"""Ending with messages in flight: each has an outcome, what was confirmed arrives, and what failed does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import messaging
from messaging import ClosedError, OutcomeUnknownError
from messaging.testing.brokers import Broker
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, eventually
from tests.faults.ledger import Arrivals, compare, read_log
from tests.faults.scenario import AMQP, MQTT5, MQTT311, OUTAGE, Profile, Scene, through

ROOT = Path(__file__).parents[2]

profiles = pytest.mark.parametrize("profile", [MQTT5, MQTT311, AMQP], ids=str)


@profiles
def test_closing_publishers_at_work_settles_every_promise_and_loses_nothing(
    any_broker: Broker, profile: Profile, tmp_path: Path
) -> None:
    """Over a slow network, so that much is under way, with threads that go on publishing until they are refused."""
    with Scene(profile, any_broker, tmp_path) as scene:
        scene.progress()
        for flow in (scene.sending.up, scene.sending.down):
            flow.shape(latency=0.05)
        for publisher in scene.publishers:
            eventually(lambda p=publisher: p.open > 50, "messages are in flight")  # type: ignore[misc]
            publisher.instance.close()
            eventually(lambda p=publisher: p.refused, "the thread is refused")  # type: ignore[misc]
        scene.stop()
        eventually(lambda: not scene.verdict().lost, "all that was confirmed is received")
        verdict = scene.verdict().check()
        assert verdict.open == 0
        assert verdict.failed.keys() == {"ClosedError"}


@profiles
def test_closing_over_a_half_open_connection_takes_no_longer_than_it_may(any_broker: Broker, profile: Profile) -> None:
    settings = {**profile.sender, "close_timeout": 0.5, "timeout": OUTAGE}
    with Proxy(any_broker.host, any_broker.port) as proxy:
        m = messaging.connect(through(proxy, any_broker.url), **settings)
        m.publish("x", b"1", **profile.publish).result(PATIENCE)
        for flow in (proxy.up, proxy.down):
            flow.swallow()
        promises = [m.publish("x", b"2", **profile.publish) for _ in range(2000)]
        start = time.monotonic()
        m.close()
        assert time.monotonic() - start < PATIENCE
        assert proxy.up.swallowed > 0
        kinds = {type(promise.exception(0)) for promise in promises}
        assert kinds == {OutcomeUnknownError} or kinds == {OutcomeUnknownError, ClosedError}


@profiles
def test_a_receiver_that_is_closed_leaves_the_rest_to_its_successor(
    any_broker: Broker, profile: Profile, tmp_path: Path
) -> None:
    with Scene(profile, any_broker, tmp_path) as scene:
        for _ in range(3):
            scene.progress()
            scene.receiver.close()
            scene.receive_anew()
        scene.progress()
        scene.finish()


@profiles
@pytest.mark.parametrize("how", ["forgets to close", "is terminated", "is killed"])
def test_a_program_that_ends_within_its_work(any_broker: Broker, profile: Profile, how: str, tmp_path: Path) -> None:
    """What it was told is confirmed arrives; one that just ends sends all that was accepted, too."""
    run, path = "program", tmp_path / "log"
    arrivals = Arrivals(run)
    channel = f"program/{profile}/{how.replace(' ', '-')}"
    with messaging.connect(any_broker.url) as m, m.subscribe(channel, guaranteed_delivery=True) as stream:
        count = 2000 if how == "forgets to close" else 0
        arguments = [any_broker.url, channel, run, str(path), str(count)]
        version = "?version=3.1.1" if profile is MQTT311 else ""
        arguments[0] += version
        command = [sys.executable, "-m", "tests.faults.program", *arguments]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "half\n"
            if how == "is terminated":
                program.send_signal(signal.SIGTERM)
            elif how == "is killed":
                program.kill()
            _, errors = program.communicate(timeout=PATIENCE)
        assert program.returncode == {"is terminated": -signal.SIGTERM, "is killed": -signal.SIGKILL}.get(how, 0)
        history = read_log(path)
        assert history.attempted
        assert how == "is killed" or "Traceback" not in errors, errors
        m.publish(channel, b"end", guaranteed_delivery=True).result(PATIENCE)
        while (payload := stream.receive(PATIENCE).payload) != b"end":
            arrivals.add(payload)
    verdict = compare({"program": history}, arrivals).check()
    if count:
        assert verdict.received == count
        assert not verdict.failed

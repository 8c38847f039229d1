"""MQTT while something breaks: nothing that was confirmed is lost, and work goes on, as far as the protocol promises.

What it does not promise is in ``docs/faults.md``, with the figures; the tests here hold on to them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import (
    AcknowledgeMessageContext,
    AcknowledgeType,
    Message,
    OutcomeUnknownError,
    PayloadTooLargeError,
    PublishRefusedError,
)
from messaging.testing.brokers import Mosquitto
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, eventually
from tests.faults.ledger import Stamp, Verdict
from tests.faults.scenario import (
    BATCH,
    MQTT,
    MQTT5,
    MQTT5_QOS2,
    MQTT311,
    MQTT311_QOS2,
    QUICK,
    WINDOW,
    Profile,
    Scene,
    acknowledge,
    attempts_within,
    by_hand,
    state,
    through,
)

every = pytest.mark.parametrize("profile", [MQTT5, MQTT311, MQTT5_QOS2, MQTT311_QOS2], ids=str)
once_each = pytest.mark.parametrize("profile", MQTT, ids=str)
versions = pytest.mark.parametrize("version", ["5", "3.1.1"])

#: for a mosquitto that is stopped in good order: saving every change is slow
SAVES_AT_THE_END = ("autosave_on_changes false",)


# --- brokers


def killed(broker: Mosquitto) -> None:
    """Kill it and start it again."""
    pid = broker.pid
    broker.kill()
    broker.start()
    assert broker.pid != pid


def lost_between(scene: Scene, verdict: Verdict, before: Mapping[str, int], resumed: float) -> bool:
    """Whether all that is lost had not been received at the fault, and was confirmed before all was well again.

    Args:
        scene: after it has finished.
        verdict: with which it did.
        before: publisher -> the highest sequence that was received before the fault.
        resumed: when messages were known to arrive again, monotonic seconds.
    """
    histories = scene.histories()
    return all(
        stamp.sequence > before[stamp.publisher] and histories[stamp.publisher].confirmed[stamp.sequence] < resumed
        for stamp in verdict.lost
    )


@every
def test_a_killed_broker_without_persistence_loses_only_its_undelivered_messages(
    broker: Mosquitto, profile: Profile, tmp_path: Path
) -> None:
    """What was confirmed and not delivered yet, and what came before the receiver had subscribed again."""
    with Scene(profile, broker, tmp_path) as scene:
        scene.progress()
        before = scene.arrivals.latest.copy()
        killed(broker)
        scene.progress()
        resumed = time.monotonic()
        verdict = scene.finish(may_lose=True)
        assert lost_between(scene, verdict, before, resumed), f"{before}, {resumed}: {verdict}"


@once_each
def test_a_killed_broker_that_saves_every_change_loses_one_message_of_each_publisher(
    profile: Profile, tmp_path: Path
) -> None:
    """At most: it takes one packet of each connection, answers, and saves. QoS 1 only, see docs/faults.md."""
    with Mosquitto(persistence=True) as broker, Scene(profile, broker, tmp_path) as scene:
        for _ in range(2):
            scene.progress()
            killed(broker)
        scene.progress()
        verdict = scene.finish(may_lose=True)
    assert len(verdict.lost) <= 2 * len(scene.publishers), str(verdict)


@once_each
def test_messages_for_a_disconnected_receiver_outlive_a_killed_broker_that_saves_every_change(
    profile: Profile, tmp_path: Path
) -> None:
    with Mosquitto(persistence=True) as broker, Scene(profile, broker, tmp_path) as scene:
        scene.progress()
        scene.receiving.refuse()
        mark = {publisher: publisher.next + 5 * BATCH for publisher in scene.publishers}
        eventually(lambda: all(each.confirmed > mark[each] for each in mark), "messages wait at the broker")
        killed(broker)
        scene.receiving.accept()
        scene.progress()
        verdict = scene.finish(may_lose=True)
    assert len(verdict.lost) <= len(scene.publishers), str(verdict)


@once_each
def test_publishing_while_the_broker_is_down_waits_and_goes_on(profile: Profile, tmp_path: Path) -> None:
    with Mosquitto(SAVES_AT_THE_END, persistence=True) as broker, Scene(profile, broker, tmp_path) as scene:
        scene.progress()
        broker.stop()
        for publisher in scene.publishers:
            eventually(lambda p=publisher: state(p.instance) == "reconnecting", "the loss is noticed")  # type: ignore[misc]
            eventually(lambda p=publisher: p.open > WINDOW - BATCH, "as much as may wait does")  # type: ignore[misc]
        broker.start()
        scene.progress()
        verdict = scene.finish()
        assert not verdict.failed


@once_each
def test_a_message_not_sent_before_its_deadline_fails_and_never_arrives(profile: Profile, tmp_path: Path) -> None:
    with (
        Mosquitto(SAVES_AT_THE_END, persistence=True) as broker,
        Scene(profile, broker, tmp_path, timeout=1.0) as scene,
    ):
        scene.progress()
        broker.stop()
        publisher = scene.publishers[0]
        mark = publisher.next
        eventually(lambda: publisher.next > mark + 2 * WINDOW, "those that waited have failed, and others wait")
        broker.start()
        scene.progress()
        verdict = scene.finish()
    assert verdict.failed["DeadlineError"] > WINDOW
    assert verdict.failed.keys() <= {"DeadlineError", "OutcomeUnknownError"}


# --- sessions


@once_each
def test_a_session_that_is_lost_is_subscribed_again(broker: Mosquitto, profile: Profile, tmp_path: Path) -> None:
    """Another client began it anew: what it held is gone, and verdicts on it are too late."""
    with Scene(profile, broker, tmp_path) as scene:
        with by_hand(scene.receiver, scene.channel("held/deep"), qos="1") as manual:
            scene.publishers[0].instance.publish(scene.channel("held/deep"), b"x", qos=1).result(PATIENCE)
            held = manual.receive(PATIENCE)
            scene.progress()
            before = scene.arrivals.latest.copy()
            scene.receiving.refuse()
            settings = {**profile.receiver, "clean_start": True, "session_expiry": 0}
            settings = {key: settings[key] for key in settings if key != "session_expiry" or profile is MQTT5}
            messaging.connect(broker.url, client_id=scene.client_id("receiver"), **settings).close()
            marks = {each: each.confirmed for each in scene.publishers}
            eventually(
                lambda: all(each.confirmed > mark for each, mark in marks.items()), "published without a session"
            )
            scene.receiving.accept()
            scene.progress()
            resumed = time.monotonic()
            assert acknowledge(held) is False
            assert isinstance(held.context, AcknowledgeMessageContext)
            assert held.context.acknowledge_state is AcknowledgeType.UNKNOWN
        verdict = scene.finish(may_lose=True)
        assert verdict.lost, "the session was not lost"
        assert lost_between(scene, verdict, before, resumed), f"{before}, {resumed}: {verdict}"


@once_each
def test_two_clients_with_one_id_take_turns_and_do_not_storm_the_broker(
    broker: Mosquitto, profile: Profile, tmp_path: Path
) -> None:
    with Scene(profile, broker, tmp_path, reconnect_min=0.1, reconnect_max=5.0) as scene:
        scene.progress()
        before = scene.receiving.attempts
        waits = {"reconnect_min": 0.1, "reconnect_max": 5.0}  # a broker that names the reason makes them long
        twin = messaging.connect(broker.url, client_id=scene.client_id("receiver"), **waits, **profile.receiver)
        eventually(lambda: scene.receiving.attempts >= before + 2, "each has ousted the other")
        assert attempts_within(scene.receiving, 3.0) <= 15
        twin.close()
        scene.progress()
        scene.finish()


@pytest.mark.parametrize("manually", [True, False])
@once_each
def test_a_verdict_after_reconnecting_reaches_a_session_that_was_resumed(
    broker: Mosquitto, profile: Profile, manually: bool, tmp_path: Path
) -> None:
    """What was in hand when the connection broke is settled once, and does not come again."""
    waiting, go = threading.Event(), threading.Event()
    seen: list[Stamp | None] = []

    def hold(message: Message) -> None:
        if not waiting.is_set():
            waiting.set()
            assert go.wait(PATIENCE)

    with Scene(profile, broker, tmp_path, publishers=1, before=None if manually else hold) as scene:
        if manually:
            with by_hand(scene.receiver, scene.channel("held/deep"), qos="1") as stream:
                scene.publishers[0].instance.publish(scene.channel("held/deep"), b"x", qos=1).result(PATIENCE)
                message = stream.receive(PATIENCE)
                scene.outlived(scene.receiving.sever, scene.receiving)
                assert acknowledge(message) is True
                eventually(lambda: stream.counters.acknowledged == 1, "the verdict was passed on")
                # the broker has had the answer when it confirms what was sent after it
                scene.receiver.publish(scene.channel("held/mark"), b"", qos=1).result(PATIENCE)
                scene.outlived(scene.receiving.sever, scene.receiving)
                scene.publishers[0].instance.publish(scene.channel("held/deep"), b"y", qos=1).result(PATIENCE)
                assert stream.receive(PATIENCE).payload == b"y"
            return
        assert waiting.wait(PATIENCE)
        before = scene.receiving.attempts
        scene.receiving.sever()
        eventually(lambda: scene.receiving.attempts > before and state(scene.receiver) == "connected", "reconnected")
        go.set()
        scene.progress()
        verdict = scene.finish()
        seen += scene.arrivals.stamps
    assert seen.count(seen[0]) == 1, str(verdict)


# --- packets


@pytest.mark.slow
def test_packet_ids_start_over(broker: Mosquitto, tmp_path: Path) -> None:
    """Past 65,535 in both directions, with connections that break where they do. Both versions count alike."""
    with Scene(MQTT311, broker, tmp_path, publishers=1, window=800, batch=200, pace=0.0) as scene:
        publisher = scene.publishers[0]
        # ours begin in the middle of the range, those of mosquitto at 1
        for mark, proxy in ((32_700, scene.sending), (65_300, scene.receiving)):
            eventually(lambda mark=mark: publisher.next > mark, f"message {mark}")  # type: ignore[misc]
            proxy.sever()
        eventually(lambda: publisher.next > 66_500, "message 66,500")
        verdict = scene.finish()
    assert verdict.confirmed > 66_000
    assert scene.sending.resets == scene.receiving.resets == 1


@pytest.mark.slow
@once_each
def test_a_resumed_session_keeps_the_order_whatever_waits_in_it(
    broker: Mosquitto, profile: Profile, tmp_path: Path
) -> None:
    """Answers given before a loss are given again, and not behind others."""
    with Scene(profile, broker, tmp_path, publishers=1, window=3000, batch=500, pace=0.0) as scene:
        publisher = scene.publishers[0]
        for mark in range(2000, 20_000, 2000):
            eventually(lambda mark=mark: publisher.next > mark, f"message {mark}")  # type: ignore[misc]
            scene.receiving.sever()
        scene.finish()


@versions
def test_a_message_too_large_for_the_broker_fails_alone(version: str) -> None:
    """Where the protocol can say so: MQTT 3.1.1 cannot, see docs/faults.md."""
    for line in ("message_size_limit 10000", "max_packet_size 10000"):
        with Mosquitto([line]) as broker, messaging.connect(broker.url) as receiver:
            stream = receiver.subscribe("size", qos=1)
            stream.ready.result(PATIENCE)
            limit: dict[str, Any] = {} if version == "5" else {"max_message_size": 9_000}
            with messaging.connect(broker.url, version=version, **QUICK, **limit) as m:
                others = [m.publish("size", b"1", qos=qos) for qos in (1, 2)]
                for qos in (1, 2):
                    with pytest.raises((PublishRefusedError, PayloadTooLargeError)):
                        m.publish("size", bytes(20_000), qos=qos).result(PATIENCE)
                others += [m.publish("size", b"2", qos=qos) for qos in (1, 2)]
                for promise in others:
                    promise.result(PATIENCE)
                m.publish("size", b"end", qos=1).result(PATIENCE)
            payloads = [stream.receive(PATIENCE).payload]
            while payloads[-1] != b"end":
                payloads.append(stream.receive(PATIENCE).payload)
            assert set(payloads) == {b"1", b"2", b"end"}
            stream.close().result(PATIENCE)


def test_a_message_that_costs_the_connection_holds_others_up_until_its_deadline() -> None:
    """mosquitto hangs up on a client of 3.1.1 for it, each time it is sent again. No storm, and then they go on."""
    with (
        Mosquitto(["max_packet_size 10000"]) as broker,
        Proxy(broker.host, broker.port) as proxy,
        messaging.connect(through(proxy, broker.url), version="3.1.1") as m,
    ):
        large = m.publish("size", bytes(20_000), qos=1, timeout=2.0)
        other = m.publish("size", b"x", qos=1)
        with pytest.raises(OutcomeUnknownError):
            large.result(PATIENCE)
        assert 2 <= proxy.attempts <= 15
        other.result(PATIENCE)

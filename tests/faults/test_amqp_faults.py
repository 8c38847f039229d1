"""AMQP while something breaks: nothing that was confirmed is lost, and work goes on, as far as the protocol promises.

What it does not promise is in ``docs/faults.md``, with the figures; the tests here hold on to them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pika  # type: ignore[import-untyped]
import pytest
from pika.adapters.blocking_connection import BlockingChannel  # type: ignore[import-untyped]

import messaging
from messaging import Message, PublishRefusedError, SubscriptionRefusedError
from messaging.testing.brokers import RabbitMQ
from messaging.testing.waiting import PATIENCE, eventually
from tests.amqp.conftest import foreign_channel
from tests.faults.scenario import AMQP, AMQP_TRANSIENT, BATCH, OUTAGE, WINDOW, Scene, state

# --- connections


def test_a_connection_that_only_the_client_lost_keeps_its_messages_until_the_broker_notices(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    """Two heartbeats; then they come again, and before those that came meanwhile were sent to the new consumer."""
    with Scene(AMQP, rabbitmq, tmp_path, publishers=1, heartbeat=1) as scene:
        scene.progress()
        scene.outlived(partial(scene.sending.reset, "client", quietly=True), scene.sending)
        before = scene.receiving.attempts
        scene.receiving.reset("client", quietly=True)
        eventually(lambda: scene.receiving.attempts > before, "a new connection")
        scene.progress()
        scene.finish(ordered=False)


# --- brokers


@pytest.mark.slow
@pytest.mark.alone  # a confirm that is read late counts as one of the next broker
def test_a_killed_broker_loses_nothing_that_is_persistent(own_rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """And of what is transient all that it had: a confirm is a place in the queue, then, not on the disk."""
    broker = own_rabbitmq
    with Scene(AMQP, broker, tmp_path) as persistent, Scene(AMQP_TRANSIENT, broker, tmp_path) as transient:
        scenes = (persistent, transient)
        for scene in scenes:
            scene.progress()
            # messages wait in the queue, and others are under way
            scene.receiving.refuse()
        waiting = {publisher: publisher.next + 5 * BATCH for scene in scenes for publisher in scene.publishers}
        eventually(lambda: all(each.confirmed > waiting[each] for each in waiting), "messages wait at the broker")
        pid = broker.pid
        broker.kill()
        for scene in scenes:
            for publisher in scene.publishers:
                eventually(lambda p=publisher: p.open > WINDOW - BATCH, "as much as may wait does")  # type: ignore[misc]
        # confirms of the killed broker may be read some time after its end
        restarted = time.monotonic()
        broker.start()
        assert broker.pid != pid
        for scene in scenes:
            scene.receiving.accept()
            scene.progress()
        persistent.finish()
        verdict = transient.finish(may_lose=True)
        histories = transient.histories()
    assert len(verdict.lost) > 2 * 4 * BATCH, str(verdict)
    assert all(histories[stamp.publisher].confirmed[stamp.sequence] <= restarted for stamp in verdict.lost)


def test_a_broker_short_of_memory_makes_publishers_wait_and_consumers_go_on(
    own_rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    go = threading.Event()

    def before(_: Message) -> None:
        assert go.wait(OUTAGE)

    with Scene(AMQP, own_rabbitmq, tmp_path, before=before) as scene:

        def nothing_is_confirmed() -> bool:
            """Else, for as long as the broker takes messages, some are in any second."""
            confirmed = [publisher.confirmed for publisher in scene.publishers]
            time.sleep(1.0)  # sleeps: that nothing is confirmed takes its time
            return [publisher.confirmed for publisher in scene.publishers] == confirmed

        attempts = scene.sending.attempts, scene.receiving.attempts
        eventually(lambda: all(publisher.confirmed > 200 for publisher in scene.publishers), "messages wait")
        own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.00001")
        try:
            for publisher in scene.publishers:
                eventually(lambda p=publisher: state(p.instance) == "degraded", "publishers are told")  # type: ignore[misc]
            eventually(nothing_is_confirmed, "publishers wait")
            go.set()
            waited = {publisher.name: publisher.confirmed for publisher in scene.publishers}
            eventually(
                lambda: all(scene.arrivals.latest.get(name, -1) >= last for name, last in waited.items()),
                "what waited is consumed",
            )
            assert {state(publisher.instance) for publisher in scene.publishers} == {"degraded"}
            eventually(nothing_is_confirmed, "publishers still wait")
        finally:
            own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.8")
        scene.progress()
        assert scene.finish().duplicates == 0
        assert (scene.sending.attempts, scene.receiving.attempts) == attempts


# --- channels


def test_a_queue_that_is_deleted_ends_its_consumer_and_no_other(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    with Scene(AMQP, rabbitmq, tmp_path) as scene, foreign_channel(rabbitmq) as foreign:
        scene.progress()
        queue = f"doomed-{scene.queue}"
        stream = scene.receiver.subscribe(scene.channel("doomed"), queue=queue)
        stream.ready.result(PATIENCE)
        attempts = scene.receiving.attempts
        foreign.queue_delete(queue)
        with pytest.raises(SubscriptionRefusedError, match=queue):
            stream.receive(PATIENCE)
        scene.progress()
        assert scene.receiving.attempts == attempts
        # it is not declared again without the operator
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="404"):
            foreign.queue_declare(queue, passive=True)
        scene.finish()


Wrong = Callable[[messaging.Messaging, BlockingChannel, str], object]


def publish_to_internal(m: messaging.Messaging, foreign: BlockingChannel, name: str) -> object:
    foreign.exchange_declare(name, "topic", internal=True, auto_delete=True)
    return m.publish(name, b"x", channel_extension="key").result(PATIENCE)


def publish_to_missing(m: messaging.Messaging, _: BlockingChannel, name: str) -> object:
    return m.publish(name, b"x", channel_extension="key", autocreate=False).result(PATIENCE)


def publish_too_much(m: messaging.Messaging, _: BlockingChannel, name: str) -> object:
    return m.publish(name, bytes(500_001)).result(PATIENCE)


def consume_beside_exclusive(m: messaging.Messaging, foreign: BlockingChannel, name: str) -> object:
    foreign.queue_declare(name)
    foreign.basic_consume(name, lambda *_: None, exclusive=True)
    stream = m.subscribe("x", queue=name)
    return stream.ready.result(PATIENCE)


def consume_missing(m: messaging.Messaging, _: BlockingChannel, name: str) -> object:
    stream = m.subscribe("x", queue=name, autocreate=False)
    return stream.ready.result(PATIENCE)


def consume_locked(m: messaging.Messaging, foreign: BlockingChannel, name: str) -> object:
    foreign.queue_declare(name, exclusive=True)
    stream = m.subscribe("x", queue=name)
    return stream.ready.result(PATIENCE)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (publish_to_internal, 403),
        (publish_to_missing, 404),
        (publish_too_much, 406),
        (consume_beside_exclusive, 403),
        (consume_missing, 404),
        (consume_locked, 405),
    ],
)
def test_an_error_of_a_channel_fails_that_channel_alone(
    own_rabbitmq: RabbitMQ, wrong: Wrong, code: int, tmp_path: Path
) -> None:
    """The caller gets the code; the connections stay, and other traffic loses nothing."""
    with Scene(AMQP, own_rabbitmq, tmp_path) as scene, foreign_channel(own_rabbitmq) as foreign:
        scene.progress()
        m = scene.publishers[0].instance
        with m.subscribe(scene.channel("other")) as stream:
            stream.ready.result(PATIENCE)  # the connection to consume on is there
        attempts = scene.sending.attempts
        for number in range(3):
            with pytest.raises((PublishRefusedError, SubscriptionRefusedError), match=str(code)):
                wrong(m, foreign, f"wrong-{scene.queue}-{number}")
            scene.progress()
        assert scene.sending.attempts == attempts
        assert scene.finish().failed == {}

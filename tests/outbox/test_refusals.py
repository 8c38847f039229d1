"""Rows that the broker refuses: they wait with their key, and are dead after so many attempts, never lost."""

from __future__ import annotations

import logging
import time

import pytest
from sqlalchemy import Engine, text

import messaging
from messaging import Message, MessageContext, Messaging
from messaging.errors import ArgumentError
from messaging.outbox.sql import Relay, dead_rows, discard_dead, enqueue, retry_dead
from messaging.outbox.sql.tables import DEFAULT_TABLES
from messaging.testing.brokers import RabbitMQ
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.outbox.conftest import Received, dead_of, message, put, status, store


def refusing(engine: Engine, *payloads: object, key: str | None = None, channel: str = "none/here") -> None:
    """Enqueue messages whose channel must have a subscriber."""
    with engine.begin() as connection:
        for each in payloads:
            enqueue(connection, message(str(each), channel, mandatory=True), key=key)


def test_a_refused_row_waits_with_its_key_and_other_keys_go_on(engine: Engine, m: Messaging) -> None:
    with engine.begin() as connection:
        for number in range(3):
            enqueue(connection, message(number, "late", mandatory=True), key="refused")
            enqueue(connection, message(number, "early"), key="other")
    early = Received(m, "early")
    with Relay(engine, m, backoff=(0.05, 0.2), poll_interval=0.05, max_attempts=1000) as relay:
        early.wait(3)
        eventually(lambda: relay.counters.refused >= 3)
        assert status(engine).pending == 3
        assert status(engine).retrying == 1  # the first one: the others wait for it
        late = Received(m, "late")
        assert late.wait(3) == [b"0", b"1", b"2"]
    assert status(engine).pending == status(engine).dead == 0


def test_a_row_is_dead_after_some_attempts_and_its_key_goes_on(
    engine: Engine, m: Messaging, caplog: pytest.LogCaptureFixture
) -> None:
    received = Received(m, "a/b")
    refusing(engine, "refused", key="k")
    put(engine, "after", key="k")
    with Relay(engine, m, backoff=(0.01, 0.02), poll_interval=0.05, max_attempts=3) as relay:
        assert received.wait(1) == [b"after"]
    assert (relay.counters.refused, relay.counters.dead, relay.counters.published) == (2, 1, 1)
    (dead,) = dead_of(engine)
    assert (dead.key, dead.channel, dead.size, dead.attempts) == ("k", "none/here", 7, 3)
    assert dead.reason.startswith("UnroutableError: ")
    assert dead.dead_since is not None
    assert (status(engine).pending, status(engine).dead) == (0, 1)
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"row {dead.id} to 'none/here' is dead after 3 attempts: UnroutableError" in errors[0]


@table(
    "content, properties, reason",
    {
        "no such extension": (message("x", flavour="sweet"), None, "UnsupportedFeatureError"),
        "a payload that is too large": (message("x" * 11), None, "PayloadTooLargeError"),
        "stored properties that do not parse": (message("x"), "{", ""),
    },
)
def test_what_the_instance_can_never_publish_is_dead_at_once(
    engine: Engine, content: Message, properties: str | None, reason: str
) -> None:
    with messaging.connect("memory://small?max_message_size=10") as m:
        received = Received(m, "a/b")
        store(engine, content)
        if properties is not None:
            with engine.begin() as connection:
                outbox = DEFAULT_TABLES.outbox
                connection.execute(outbox.update().where(outbox.c.state == "pending").values(properties=properties))
        put(engine, "after")
        Relay(engine, m).drain()
        assert received.wait(1) == [b"after"]
    dead = dead_of(engine)[0]  # the latest one
    assert dead.reason.startswith(reason)
    assert dead.attempts == 1
    with engine.begin() as connection:
        assert discard_dead(connection, [dead.id]) == 1
    assert status(engine).dead == 0


def test_a_reason_that_no_database_stores_stops_no_relay(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ArgumentError("no\0text \ud800")

    with messaging.connect("memory://reasons") as m:
        monkeypatch.setattr(messaging.MessagePublisher, "publish", refuse)
        put(engine, 1)
        counters = Relay(engine, m).drain()
    assert counters.dead == 1
    (dead,) = dead_of(engine)
    assert "ArgumentError: 'no\\x00text \\ud800'" in dead.reason


def test_a_payload_that_another_program_wrote_is_published(engine: Engine, m: Messaging, received: Received) -> None:
    put(engine, "x", "y")
    with engine.begin() as connection:
        first = "(SELECT min(id) FROM messaging_outbox)"
        connection.execute(text(f"UPDATE messaging_outbox SET payload = 'text' WHERE id = {first}"))
    Relay(engine, m).drain()
    assert received.wait(2) == [b"text", b"y"]


def test_dead_rows_are_published_again_with_their_ids(engine: Engine, m: Messaging) -> None:
    refusing(engine, 1, 2, 3)
    Relay(engine, m, max_attempts=1).drain()
    assert status(engine).dead == 3
    with engine.begin() as connection:
        dead = {each.id: each.message_id for each in dead_rows(connection)}
        first, second, third = sorted(dead)
        assert discard_dead(connection, [second, 999]) == 1
        assert retry_dead(connection, [first]) == 1
        assert len(dead_rows(connection, limit=1)) == 1
    received = Received(m, "none/here")
    Relay(engine, m).drain()
    received.wait(1)
    with engine.begin() as connection:
        assert retry_dead(connection) == 1
    Relay(engine, m).drain()
    assert received.wait(2) == [b"1", b"3"]
    assert received.ids == [dead[first], dead[third]]
    assert status(engine).dead == 0


def test_the_pauses_of_a_key_grow_to_their_bound(engine: Engine, m: Messaging) -> None:
    refusing(engine, 1)
    began = time.monotonic()
    with Relay(engine, m, backoff=(0.1, 0.2), poll_interval=0.01, max_attempts=4) as relay:
        eventually(lambda: relay.counters.dead)
    # at least half of 0.1, 0.2 and 0.2 s
    assert 0.25 <= time.monotonic() - began < PATIENCE


def test_a_queue_that_refuses_for_lack_of_room_keeps_the_order(engine: Engine, rabbitmq: RabbitMQ) -> None:
    """The queue has room for one message at a time, and refuses the others until it is taken out."""
    channel = f"full-{time.time_ns()}"
    extensions = {"queue": channel, "maxLength": 1, "queueOverflow": "reject-publish", "prefetch": 1}
    with messaging.connect(rabbitmq.url) as m:
        context = MessageContext(channel, extensions=extensions)
        with m.subscription.subscribe(context) as stream:
            with engine.begin() as connection:
                for number in range(5):
                    enqueue(connection, message(number, channel, queueOverflow="reject-publish"))
            with Relay(engine, rabbitmq.url, backoff=(0.05, 0.1), poll_interval=0.02, max_attempts=1000) as relay:
                eventually(lambda: relay.counters.refused >= 2)
                found = [stream.receive(timeout=PATIENCE).payload for _ in range(5)]
    assert found == [b"%d" % number for number in range(5)]


def test_a_defect_of_one_row_ends_no_relay(engine: Engine, m: Messaging, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = m.publisher.publish

    def failing(found: Message) -> object:
        if found.payload == b"bad":
            raise RuntimeError("a defect")
        return publish(found)

    monkeypatch.setattr(m.publisher, "publish", failing)
    received = Received(m, "a/b")
    put(engine, "bad", key="bad")
    put(engine, "good")
    with Relay(engine, m, backoff=(0.01, 0.02), poll_interval=0.05, max_attempts=2) as relay:
        assert received.wait(1) == [b"good"]
        eventually(lambda: relay.counters.dead == 1)
    assert [each.reason for each in dead_of(engine)] == ["RuntimeError: a defect"]

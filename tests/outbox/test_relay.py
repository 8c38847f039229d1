"""The relay: publishing, confirmation, its life cycle, its limits and its errors."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine, select

import messaging
from messaging import Messaging
from messaging.errors import (
    ArgumentError,
    ClosedError,
    ConfigurationError,
    DatabaseError,
    DeadlineError,
    WouldBlockError,
)
from messaging.outbox.sql import OutboxTables, Relay, create_tables, delete_sent, enqueue
from messaging.outbox.sql.tables import DEFAULT_TABLES
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.outbox.conftest import Held, Received, message, prepared, put, status, store


def test_a_message_arrives_as_it_was_enqueued_and_is_removed(engine: Engine, m: Messaging, received: Received) -> None:
    sent = message(b"\x00\xff", "a/b", headers={"n": 7}, priority=3, messageId="order-7", timeout=0.001)
    store(engine, sent)
    relay = Relay(engine, m)
    relay.drain()
    received.wait(1)
    found = received[0]
    extensions = found.context.extensions
    assert (found.payload, found.context.channel) == (b"\x00\xff", "a/b")
    assert (extensions["messageId"], extensions["priority"], dict(extensions["headers"])) == ("order-7", 3, {"n": 7})
    assert status(engine).pending == 0
    assert (relay.counters.published, relay.counters.claims) == (1, 1)


@table("qos", [None, "0", "1"])
def test_messages_are_confirmed_whatever_they_ask_for(mosquitto: Mosquitto, engine: Engine, qos: str | None) -> None:
    with messaging.connect(mosquitto.url) as m:
        received = Received(m, "confirmed", qos="2")
        store(engine, message(1, "confirmed", **({} if qos is None else {"qos": qos})))
        Relay(engine, mosquitto.url).drain()
        received.wait(1)
        assert received[0].context.extensions["qos"] == "1"


def test_it_publishes_in_a_thread_until_it_is_stopped(engine: Engine, m: Messaging, received: Received) -> None:
    with Relay(engine, m, poll_interval=0.05) as relay:
        assert relay.is_running
        assert [each.name for each in threading.enumerate()].count("messaging-relay") == 1
        put(engine, 1, 2)
        put(engine, 3)
        assert received.wait(3) == [b"1", b"2", b"3"]
    eventually(lambda: "messaging-relay" not in [each.name for each in threading.enumerate()])
    assert not relay.is_running
    relay.stop()
    assert relay.wait(0)
    put(engine, 4)
    assert status(engine).pending == 1
    with pytest.raises(ClosedError, match="starts once"):
        relay.start()


def test_a_commit_wakes_the_relay_with_postgresql(postgres: Engine, m: Messaging, received: Received) -> None:
    with Relay(postgres, m, poll_interval=PATIENCE * 2):
        for number in range(1, 4):
            put(postgres, number)
            received.wait(number)


def test_without_notifications_the_relay_polls(postgresql: Any, m: Messaging, received: Received) -> None:
    tables = OutboxTables(notify=False)
    with prepared(postgresql.create_database(), tables) as engine, Relay(engine, m, tables=tables, poll_interval=0.05):
        store(engine, message(1), tables=tables)
        received.wait(1)


def test_the_connection_that_listens_is_made_anew(postgres: Engine, m: Messaging, received: Received) -> None:
    with Relay(postgres, m, poll_interval=PATIENCE * 2):
        put(postgres, 1)
        received.wait(1)

        def is_ended() -> bool:
            with postgres.begin() as connection:
                ended = connection.execute(
                    sqlalchemy.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
                )
                return ended.scalars().all() == [True]

        eventually(is_ended, "the connection that listens, which may come after the first message")
        put(postgres, 2)  # unnoticed, perhaps: the new connection looks for it
        received.wait(2)


def test_a_program_may_wake_the_relay(engine: Engine, m: Messaging, received: Received) -> None:
    with Relay(engine, m, poll_interval=PATIENCE * 2) as relay:
        eventually(lambda: relay.counters.claims == 0)
        put(engine, 1)
        relay.wake()
        received.wait(1)


def test_a_backlog_is_published_in_order_whatever_the_batch(engine: Engine, m: Messaging, received: Received) -> None:
    with engine.begin() as connection:
        for number in range(400):
            enqueue(connection, message(number, f"keys/{number % 7}"))
    Relay(engine, m, batch=13, batch_bytes=40).drain()
    received.wait(400)
    for key in range(7):
        found = [int(each.payload) for each in received if each.context.channel == f"keys/{key}"]
        assert found == list(range(key, 400, 7))


def test_a_row_larger_than_the_batch_is_published_alone(engine: Engine, m: Messaging, received: Received) -> None:
    large = b"x" * 5_000
    put(engine, large, b"1", large, b"2")
    relay = Relay(engine, m, batch_bytes=100)
    relay.drain()
    assert received.wait(4) == [large, b"1", large, b"2"]
    assert relay.counters.claims == 4


def test_messages_in_flight_of_one_key_may_be_more_than_one(engine: Engine, m: Messaging, received: Received) -> None:
    put(engine, *range(200))
    Relay(engine, m, in_flight_per_key=50).drain()
    assert received.wait(200) == [b"%d" % number for number in range(200)]


def test_sent_rows_are_kept_for_their_retention(engine: Engine, m: Messaging, received: Received) -> None:
    put(engine, 1, 2)
    Relay(engine, m, retention=3600).drain()
    received.wait(2)
    assert (status(engine).pending, status(engine).sent) == (0, 2)
    Relay(engine, m, retention=3600).drain()
    assert len(received) == 2  # not published again
    with engine.begin() as connection:
        assert delete_sent(connection, 3600) == 0
        assert delete_sent(connection) == 2
    assert status(engine).sent == 0


def test_a_relay_deletes_sent_rows_after_their_retention(engine: Engine, m: Messaging) -> None:
    put(engine, 1)
    Relay(engine, m, retention=3600).drain()

    def is_deleted() -> bool:
        Relay(engine, m, retention=0.01).drain()
        return status(engine).sent == 0

    eventually(is_deleted)


def test_old_sent_rows_are_deleted_a_part_at_a_time(engine: Engine, m: Messaging) -> None:
    put(engine, *range(7))
    Relay(engine, m, retention=3600).drain()
    deleted = []
    for _ in range(3):
        with engine.begin() as connection:
            deleted.append(delete_sent(connection, limit=3))
    assert deleted == [3, 3, 1]


# --- errors


def test_a_database_without_tables_is_refused(url: str, m: Messaging) -> None:
    with pytest.raises(ConfigurationError, match="no table messaging_outbox: create the tables with `messaging outbox"):
        Relay(url, m).start()


def test_tables_of_another_version_are_refused(engine: Engine, m: Messaging) -> None:
    with engine.begin() as connection:
        connection.execute(DEFAULT_TABLES.version.update().values(version=99))
    with pytest.raises(ConfigurationError, match="version 99; this version of messaging needs 1"):
        Relay(engine, m).start()
    with engine.begin() as connection, pytest.raises(ConfigurationError, match="version 99"):
        create_tables(connection)


def test_a_database_that_cannot_be_reached_fails_the_start(m: Messaging, refusing_port: int) -> None:
    url = f"postgresql://joe:hunter2@127.0.0.1:{refusing_port}/shop"
    with pytest.raises(DatabaseError, match=r"database postgresql://127\.0\.0\.1:\d+/shop: .*refused") as caught:
        Relay(url, m).start()
    assert "hunter2" not in str(caught.value)


def test_a_wrong_password_is_not_repeated(postgresql: Any, m: Messaging) -> None:
    url = postgresql.url.replace(postgresql.password, "hunter2")
    relay = Relay(url, m)
    with pytest.raises(DatabaseError, match="authentication failed") as caught:
        relay.start()
    assert "hunter2" not in str(caught.value) + repr(relay)


@table(
    "database, error, text",
    [
        ("nonsense hunter2", ConfigurationError, "does not parse"),
        ("mysql://joe:hunter2@host/shop", ConfigurationError, "postgresql and sqlite, not with mysql"),
        ("postgresql+nosuch://joe:hunter2@host/shop", ConfigurationError, "driver of postgresql\\+nosuch is not"),
        (7, ArgumentError, "a URL, an Engine or an AsyncEngine, not int"),
    ],
)
def test_wrong_databases_are_refused_secretly(m: Messaging, database: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        Relay(database, m)
    assert "hunter2" not in str(caught.value)


@table(
    "wrong",
    [
        {"batch": 0}, {"batch": 10_001}, {"batch": True}, {"lease": 0}, {"lease": "1"}, {"poll_interval": -1},
        {"confirm_timeout": float("inf")}, {"max_attempts": 0}, {"in_flight_per_key": 0}, {"retention": -1},
        {"backoff": 3}, {"backoff": (5, 1)}, {"name": "x" * 56}, {"name": ""}, {"tables": "outbox"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(m: Messaging, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ArgumentError, match=name):
        Relay("sqlite:///unused.db", m, **wrong)


def test_the_broker_must_be_reachable_at_the_start(engine: Engine, refusing_port: int) -> None:
    with pytest.raises(messaging.ConnectFailedError):
        Relay(engine, f"mqtt://127.0.0.1:{refusing_port}?connect_timeout=2").start()


def test_a_relay_that_may_start_offline_publishes_when_the_broker_is_there(engine: Engine) -> None:
    put(engine, 1)
    with Mosquitto() as broker:
        broker.kill()
        with Relay(engine, f"{broker.url}?start_offline=true&reconnect_max=0.1", poll_interval=0.05) as relay:
            assert relay.is_running
            assert status(engine).pending == 1
            broker.start()
            eventually(lambda: relay.counters.published == 1)  # counted once the database has it
            assert status(engine).pending == 0


@table("setting", ["start_offline", "retry_connect"])
def test_a_drain_does_not_wait_for_a_broker_without_end(engine: Engine, refusing_port: int, setting: str) -> None:
    relay = Relay(engine, f"mqtt://127.0.0.1:{refusing_port}?{setting}=true", confirm_timeout=0.2)
    with pytest.raises(DeadlineError, match="no connection to the broker"):
        relay.drain()
    assert not relay.is_running


def test_a_relay_whose_instance_was_closed_ends_with_an_error(engine: Engine) -> None:
    m = messaging.connect("memory://closed")
    with Relay(engine, m) as relay:
        m.close()
        with pytest.raises(ClosedError, match="is closed"):
            relay.wait(PATIENCE)


def test_a_blocking_start_in_an_event_loop_is_refused(engine: Engine, m: Messaging) -> None:
    async def main() -> None:
        with pytest.raises(WouldBlockError, match="async with"):
            Relay(engine, m).start()

    asyncio.run(main())


def test_a_blocking_stop_in_an_event_loop_is_refused_before_anything_is_done(
    engine: Engine, m: Messaging, received: Received
) -> None:
    relay = Relay(engine, m, poll_interval=0.05)
    relay.start()

    async def main() -> None:
        with pytest.raises(WouldBlockError, match="astop"):
            relay.stop()
        with pytest.raises(WouldBlockError, match="astop"):
            relay.wait(0)
        with pytest.raises(ArgumentError):
            await relay.astop("soon")  # type: ignore[arg-type]
        await asyncio.to_thread(put, engine, 1)
        await asyncio.to_thread(received.wait, 1)  # it goes on
        await relay.astop()
        relay.stop()  # nothing to wait for

    asyncio.run(main())
    assert not relay.is_running
    assert relay.wait(0)


def test_lease_rows_of_relays_are_given_back(engine: Engine, m: Messaging, received: Received) -> None:
    put(engine, 1)
    with Relay(engine, m, poll_interval=0.05):
        received.wait(1)
    with engine.begin() as connection:
        owners = connection.execute(select(DEFAULT_TABLES.lease.c.owner)).scalars().all()
    assert owners == [None] * 64


def connected(held: Held) -> Messaging:
    """An instance whose confirmations are held back from now on."""
    m = messaging.connect(held.url)
    held.hold()
    return m


def test_a_stop_settles_the_rows_in_flight(engine: Engine, held: Held) -> None:
    """The broker has three messages of three keys, and confirms them while the relay stops."""
    with engine.begin() as connection:
        for number in range(3):
            enqueue(connection, message(number, f"held/{number}"))
            enqueue(connection, message("next", f"held/{number}"))
    with connected(held) as m:
        relay = Relay(engine, m)
        relay.start()
        held.until_published(3)
        stopping = threading.Thread(target=relay.stop)
        stopping.start()
        stopping.join(0.2)
        assert stopping.is_alive()  # it waits for the confirmations
        held.release()
        stopping.join(PATIENCE)
    assert relay.counters.published == 3
    assert status(engine).pending == 3  # the next of each key was not begun


def test_a_stop_that_takes_too_long_leaves_the_rows(engine: Engine, held: Held) -> None:
    put(engine, 1, channel="held/1")
    with connected(held) as m:
        relay = Relay(engine, m, lease=0.5)
        relay.start()
        held.until_published(1)
        relay.stop(timeout=0.1)
        assert relay.wait(0)
        assert status(engine).pending == 1
        held.release()
    eventually(lambda: not status(engine).relays)  # its lease has run out
    Relay(engine, held.direct_url).drain()
    held.until_published(2)
    assert status(engine).pending == 0


def test_a_drain_that_is_interrupted_stops(engine: Engine, held: Held) -> None:
    put(engine, 1, channel="held/1")
    with connected(held) as m:
        relay = Relay(engine, m, confirm_timeout=PATIENCE)

        def interrupt() -> None:
            held.until_published(1)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            held.release()

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            relay.drain()
        thread.join(PATIENCE)
        assert relay.wait(0)
    assert relay.counters.published == 1


def test_relays_of_one_name_are_told_apart(engine: Engine, held: Held, m: Messaging) -> None:
    put(engine, 1, channel="held/1")
    received = Received(m)
    with connected(held) as slow, Relay(engine, slow, name="relay"):
        held.until_published(1)
        Relay(engine, m, name="relay").drain()
        assert received == []
        held.release()
        eventually(lambda: status(engine).pending == 0)


def test_a_stop_with_its_own_instance_takes_no_longer(
    engine: Engine, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    put(engine, 1, channel="held/1")
    relay = Relay(engine, held.url)
    held.proxy.down.shape(latency=1.0)  # the connection is made, the confirmation is slow
    relay.start()
    held.until_published(1)
    held.hold()
    relay.stop(timeout=0.1)
    assert relay.wait(0)
    assert "does not end" not in caplog.text
    assert status(engine).pending == 1


def test_a_relay_that_is_started_a_second_time_does_not_count_as_running(engine: Engine, m: Messaging) -> None:
    relay = Relay(engine, m)
    relay.start()
    relay.stop()
    with pytest.raises(ClosedError):
        relay.start()
    assert not relay.is_running

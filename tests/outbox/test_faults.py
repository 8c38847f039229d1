"""The database or the broker goes away and comes back: nothing is lost, and the order of each key is kept."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy import Engine, text, update
from sqlalchemy.exc import OperationalError

import messaging
from messaging import Messaging
from messaging.errors import DatabaseError
from messaging.outbox.sql import Relay
from messaging.outbox.sql.tables import DEFAULT_TABLES
from messaging.testing.brokers import Mosquitto, require
from messaging.testing.postgresql import PostgreSQL
from messaging.testing.proxy import Proxy
from messaging.testing.servers import Servers
from messaging.testing.waiting import PATIENCE, eventually
from tests.outbox.conftest import Held, Received, prepared, put, status


@pytest.fixture
def server(servers: Servers) -> Iterator[PostgreSQL]:
    """A server that the test may kill."""
    require("postgresql")
    with servers.borrow(PostgreSQL) as server:
        yield server


def numbers(received: Received) -> list[int]:
    """What arrived, each number once, in the order of its first arrival."""
    return list(dict.fromkeys(map(int, received.payloads)))


def test_the_relay_waits_for_a_killed_database(
    server: PostgreSQL, m: Messaging, caplog: pytest.LogCaptureFixture
) -> None:
    received = Received(m)
    url = server.create_database()
    with prepared(url) as engine, Relay(url, m, poll_interval=0.05) as relay:
        put(engine, *range(50))
        received.wait(50)
        server.kill()
        eventually(lambda: relay.counters.database_failures >= 2)
        server.start()
        eventually(lambda: commits(engine, *range(50, 100)))
        eventually(lambda: numbers(received) == [*range(100)])
        eventually(lambda: status(engine).pending == 0)
    texts = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert any("database postgresql://127.0.0.1" in text and "trying again" in text for text in texts)
    assert any("works again" in text for text in texts)
    assert server.password not in caplog.text


def commits(engine: Engine, *payloads: int) -> bool:
    try:
        put(engine, *payloads)
    except OperationalError:
        return False
    return True


def test_what_was_published_is_removed_when_the_database_is_back(postgres: Engine, held: Held) -> None:
    """The database is cut off while the messages are in flight: they are not published again."""
    url = postgres.url
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(Proxy(str(url.host), int(url.port or 0)))
        put(postgres, 1, channel="held/1")
        slow = stack.enter_context(messaging.connect(held.url))
        held.hold()
        relay = stack.enter_context(Relay(url.set(port=proxy.port), slow, lease=60, poll_interval=0.05))
        held.until_published(1)
        proxy.refuse()
        held.release()
        eventually(lambda: relay.counters.database_failures >= 2)
        proxy.accept()
        eventually(lambda: relay.counters.published == 1)  # counted once the database has it
        assert status(postgres).pending == 0
        assert relay.counters.claims == 1


def test_a_connection_that_the_server_ends_is_made_anew(postgres: Engine, m: Messaging, received: Received) -> None:
    url = postgres.url.render_as_string(hide_password=False)
    with Relay(url, m, poll_interval=0.05):
        for number in range(5):
            put(postgres, number)
            received.wait(number + 1)
            with postgres.begin() as connection:
                connection.execute(
                    sqlalchemy.text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                        "AND datname = current_database()"
                    )
                )
            postgres.dispose()
    assert numbers(received) == [*range(5)]


def test_a_database_that_is_locked_is_tried_again(tmp_path: Path, m: Messaging) -> None:
    received = Received(m)
    url = f"sqlite:///{tmp_path}/locked.db"
    with prepared(url) as engine:
        quick = sqlalchemy.create_engine(url, connect_args={"timeout": 0.01})
        with Relay(quick, m, poll_interval=0.02) as relay:
            put(engine, 1)
            received.wait(1)
            with engine.connect() as writer:
                put(engine, 2)
                writer.exec_driver_sql("BEGIN EXCLUSIVE")
                eventually(lambda: relay.counters.database_failures >= 1)
                writer.rollback()
            received.wait(2)
        quick.dispose()
    assert numbers(received) == [1, 2]


def test_a_locked_table_does_not_delay_the_end_of_a_relay(postgres: Engine, m: Messaging) -> None:
    relay = Relay(postgres, m, poll_interval=0.02)
    with relay, postgres.connect() as writer:
        writer.execute(text("LOCK TABLE messaging_outbox IN ACCESS EXCLUSIVE MODE"))
        eventually(lambda: relay.counters.database_failures >= 1)
        began = time.monotonic()
        relay.stop()
        assert time.monotonic() - began < 15
        assert not relay.is_running


def test_a_locked_table_fails_the_start_of_a_relay(postgres: Engine, m: Messaging) -> None:
    with postgres.connect() as writer:
        writer.execute(text("LOCK TABLE messaging_outbox_schema IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(DatabaseError, match="lock timeout"):
            Relay(postgres, m).start()


def test_a_relay_that_waits_for_its_first_connection_can_be_stopped(engine: Engine, refusing_port: int) -> None:
    relay = Relay(engine, f"mqtt://127.0.0.1:{refusing_port}?retry_connect=true")
    starting = threading.Thread(target=relay.start)
    starting.start()
    eventually(lambda: relay.is_running)
    began = time.monotonic()
    relay.stop()
    starting.join(PATIENCE)
    assert time.monotonic() - began < 15
    assert not starting.is_alive()
    assert not relay.is_running


def test_rows_go_on_after_the_database_clock_was_set_back(engine: Engine, m: Messaging, received: Received) -> None:
    """Buckets were given back, and a retry was planned, by the clock as it was before."""
    late = datetime(2999, 1, 1, tzinfo=UTC)
    put(engine, 1, 2)
    with engine.begin() as connection:
        connection.execute(update(DEFAULT_TABLES.lease).values(owner=None, until=late))
        connection.execute(update(DEFAULT_TABLES.outbox).values(attempts=1, retry_at=late))
    with Relay(engine, m):
        assert received.wait(2) == [b"1", b"2"]
    with Relay(engine, m):  # and the buckets that were given back just now
        put(engine, 3)
        assert received.wait(3) == [b"1", b"2", b"3"]


def test_the_relay_waits_for_a_broker_that_was_killed(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    require("mosquitto")
    with Mosquitto() as broker, contextlib.ExitStack() as stack:
        m = stack.enter_context(messaging.connect(broker.url))
        stack.enter_context(Relay(engine, m, poll_interval=0.05, confirm_timeout=5))
        put(engine, *range(20))
        eventually(lambda: status(engine).pending == 0)
        broker.kill()
        eventually(lambda: not m.connection_state.value.is_up)
        put(engine, *range(20, 40))
        broker.start()
        other = stack.enter_context(messaging.connect(broker.url))
        received = Received(other, qos="1")
        put(engine, *range(40, 60))
        eventually(lambda: status(engine).pending == 0)
        eventually(lambda: 59 in numbers(received))
        found = numbers(received)
        assert found == [*range(found[0], 60)]  # what came before the subscription is not seen
    assert status(engine).dead == 0  # the broker was away: no fault of the rows


def test_a_drain_fails_where_the_broker_does_not_confirm(engine: Engine, held: Held) -> None:
    put(engine, 1, channel="held/1")
    with messaging.connect(held.url) as slow:
        held.hold()
        with pytest.raises(messaging.DeadlineError):
            Relay(engine, slow, confirm_timeout=0.3).drain()
        held.release()
    assert (status(engine).pending, status(engine).dead, status(engine).retrying) == (1, 0, 0)
    assert status(engine).relays == ()


def test_a_drain_fails_where_the_database_does(postgres: Engine, m: Messaging) -> None:
    url = postgres.url
    with Proxy(str(url.host), int(url.port or 0)) as proxy:
        proxy.refuse()
        with pytest.raises(DatabaseError, match="database postgresql://"):
            Relay(url.set(port=proxy.port), m).drain()

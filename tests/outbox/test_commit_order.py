"""Rows are published in the order in which their transactions commit, and none is passed over."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from messaging import Messaging
from messaging.errors import ConfigurationError
from messaging.outbox.sql import OutboxTables, Relay, create_tables, enqueue
from messaging.testing.waiting import PATIENCE
from tests.outbox.conftest import Received, message, put, status, store


def test_a_row_written_first_and_committed_last_comes_last(postgres: Engine, m: Messaging, received: Received) -> None:
    with postgres.connect() as first, postgres.connect() as second:
        enqueue(first, message("written first"))
        enqueue(second, message("written second"))  # waits for nothing
        second.commit()
        first.commit()
    Relay(postgres, m).drain()
    assert received.wait(2) == [b"written second", b"written first"]


def test_a_row_that_commits_after_later_rows_is_published(postgres: Engine, m: Messaging, received: Received) -> None:
    with postgres.connect() as slow, Relay(postgres, m):
        enqueue(slow, message("slow"))
        for number in range(5):
            put(postgres, number)
        assert received.wait(5) == [b"0", b"1", b"2", b"3", b"4"]
        slow.commit()
        assert received.wait(6)[-1] == b"slow"
    assert status(postgres).pending == 0


def test_rows_of_a_transaction_keep_the_order_of_the_calls(engine: Engine, m: Messaging, received: Received) -> None:
    put(engine, *range(300))
    Relay(engine, m, batch=64).drain()
    assert received.wait(300) == [b"%d" % number for number in range(300)]


def test_rows_of_savepoints_keep_their_place(postgres: Engine, m: Messaging, received: Received) -> None:
    with postgres.begin() as connection:
        enqueue(connection, message(1))
        with connection.begin_nested():
            enqueue(connection, message(2))
        lost = connection.begin_nested()
        enqueue(connection, message("lost"))
        lost.rollback()
        enqueue(connection, message(3))
    Relay(postgres, m).drain()
    assert received.wait(3) == [b"1", b"2", b"3"]


def test_the_order_holds_with_repeatable_read(postgres: Engine, m: Messaging, received: Received) -> None:
    engine = postgres.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as first, engine.connect() as second:
        enqueue(first, message(1))
        enqueue(second, message(2))
        second.commit()
        first.commit()
    Relay(engine, m).drain()
    assert received.wait(2) == [b"2", b"1"]


def test_serializable_transactions_that_fail_are_retried(postgres: Engine, m: Messaging, received: Received) -> None:
    engine = postgres.execution_options(isolation_level="SERIALIZABLE")

    def write(number: int) -> None:
        while True:
            with contextlib.suppress(OperationalError):  # "could not serialize access"
                put(engine, number)
                return

    with Relay(engine, m):
        writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for each in writers:
            each.start()
        for each in writers:
            each.join(PATIENCE)
        assert sorted(received.wait(8)) == [b"%d" % number for number in range(8)]


def test_interleaved_writers_keep_the_order_of_commits(postgres: Engine, m: Messaging, received: Received) -> None:
    """Writers commit in turns that a lock makes known; meanwhile a relay publishes."""
    committed: dict[str, list[bytes]] = {key: [] for key in ("a", "b", "c")}
    turns = threading.Lock()

    def write(number: int) -> None:
        choose = random.Random(number)
        with postgres.connect() as connection:
            for turn in range(25):
                keys = choose.sample(sorted(committed), choose.randint(1, 3))  # in any order: no deadlock
                payload = b"%d.%d" % (number, turn)
                for key in keys:
                    enqueue(connection, message(payload, f"keys/{key}"), key=key)
                time.sleep(choose.random() * 0.004)  # sleeps: commits in an order of their own
                with turns:
                    connection.commit()
                    for key in keys:
                        committed[key].append(payload)

    with Relay(postgres, m):
        writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for each in writers:
            each.start()
        for each in writers:
            each.join(PATIENCE)
        received.wait(sum(map(len, committed.values())))
    for key, expected in committed.items():
        found = [each.payload for each in received if each.context.channel == f"keys/{key}"]
        assert found == expected


def test_commits_with_keys_in_common_do_not_deadlock(postgres: Engine) -> None:
    keys = [f"key {number}" for number in range(40)]
    errors: list[Exception] = []

    def write(order: list[str]) -> None:
        try:
            for _ in range(6):
                with postgres.begin() as connection:
                    for key in order:
                        enqueue(connection, message(1), key=key)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    writers = [threading.Thread(target=write, args=(order,)) for order in (keys, keys[::-1], keys[20:] + keys[:20])]
    for each in writers:
        each.start()
    for each in writers:
        each.join(PATIENCE)
    assert errors == []
    assert status(postgres).pending == 3 * 6 * 40


def drop_trigger(connection: Connection) -> None:
    connection.execute(text("DROP TRIGGER messaging_outbox_commit_order ON messaging_outbox"))


def test_create_tables_adds_the_trigger_that_start_misses(
    own_postgres: Engine, m: Messaging, received: Received
) -> None:
    with own_postgres.begin() as connection:
        drop_trigger(connection)
    with pytest.raises(ConfigurationError, match=r"no trigger messaging_outbox_commit_order.*postgresql_statements"):
        Relay(own_postgres, m).start()
    with own_postgres.begin() as connection:
        create_tables(connection)
    put(own_postgres, 1)
    Relay(own_postgres, m).drain()
    assert received.wait(1) == [b"1"]


def test_a_migration_installs_the_trigger_by_statements(own_postgres: Engine, m: Messaging, received: Received) -> None:
    with own_postgres.begin() as connection:
        drop_trigger(connection)
        for statement in OutboxTables().postgresql_statements():
            connection.execute(text(statement))
    put(own_postgres, 1)
    Relay(own_postgres, m).drain()
    assert received.wait(1) == [b"1"]


def test_tables_in_a_schema_of_their_own(own_postgres: Engine, m: Messaging, received: Received) -> None:
    tables = OutboxTables(schema="shop")
    with own_postgres.begin() as connection:
        connection.execute(text("CREATE SCHEMA shop"))
        create_tables(connection, tables)
    with Relay(own_postgres, m, tables=tables, poll_interval=PATIENCE):
        store(own_postgres, message(1), tables=tables)
        assert received.wait(1) == [b"1"]


def test_a_role_of_the_writers_needs_the_documented_rights(own_postgres: Engine, m: Messaging) -> None:
    received = Received(m)
    with own_postgres.begin() as connection:
        connection.execute(text("CREATE ROLE writer"))
        connection.execute(text("GRANT INSERT, SELECT, UPDATE ON messaging_outbox TO writer"))
        connection.execute(
            text("GRANT USAGE ON SEQUENCE messaging_outbox_id_seq, messaging_outbox_position_seq TO writer")
        )
    try:
        with own_postgres.begin() as connection:
            connection.execute(text("SET LOCAL ROLE writer"))
            enqueue(connection, message(1))
        Relay(own_postgres, m).drain()
        assert received.wait(1) == [b"1"]
    finally:
        with own_postgres.begin() as connection:
            connection.execute(text("DROP OWNED BY writer"))
            connection.execute(text("DROP ROLE writer"))


def test_rows_whose_ids_do_not_ascend_are_placed_too(postgres: Engine, m: Messaging, received: Received) -> None:
    with postgres.begin() as connection:
        connection.execute(text("SELECT setval('messaging_outbox_id_seq', 2000000)"))
        enqueue(connection, message("high id"))
        connection.execute(text("SELECT setval('messaging_outbox_id_seq', 1000000)"))
        enqueue(connection, message("lower id"))
    with postgres.begin() as connection:
        left = connection.execute(text("SELECT count(*) FROM messaging_outbox WHERE position IS NULL")).scalar_one()
    assert left == 0
    Relay(postgres, m).drain()
    assert len(received.wait(2)) == 2

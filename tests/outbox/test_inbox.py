"""The inbox: a message has its effect once, whatever comes again."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from messaging import Message, MessageContext, Messaging
from messaging.errors import ArgumentError
from messaging.execution import clock
from messaging.outbox.sql import Inbox, OutboxTables, Relay, enqueue, process_once
from messaging.outbox.sql import inbox as inbox_module
from messaging.outbox.sql.tables import DEFAULT_TABLES
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.outbox.conftest import Received, message, put


def remembered(engine: Engine) -> int:
    with engine.begin() as connection:
        return connection.execute(select(func.count()).select_from(DEFAULT_TABLES.inbox)).scalar_one()


def grow_old(engine: Engine) -> None:
    """Make all ids a minute older."""
    with engine.begin() as connection:
        past = datetime.now(UTC) - timedelta(minutes=1)
        connection.execute(DEFAULT_TABLES.inbox.update().values(handled=past))


def test_a_message_is_new_once(engine: Engine) -> None:
    for expected in (True, False, False):
        with engine.begin() as connection:
            assert process_once(connection, message(1, messageId="m-1")) is expected
    with Session(engine) as session, session.begin():
        assert process_once(session, "m-1") is False
        assert process_once(session, "m-2") is True
    assert remembered(engine) == 2


def test_consumers_remember_for_themselves(engine: Engine) -> None:
    for expected in (True, False):
        with engine.begin() as connection:
            assert Inbox("billing").process_once(connection, "m-1") is expected
            assert Inbox("shipping").process_once(connection, "m-1") is expected


def test_a_message_whose_transaction_rolls_back_is_new_again(engine: Engine) -> None:
    with engine.connect() as connection:
        assert process_once(connection, "m-1")
        connection.rollback()
        assert process_once(connection, "m-1")
        connection.commit()


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_of_two_transactions_with_one_message_the_second_waits_for_the_first(postgres: Engine, ends: str) -> None:
    found: list[bool] = []

    def second() -> None:
        with postgres.begin() as connection:
            found.append(process_once(connection, "m-1"))

    with postgres.connect() as first, postgres.connect() as watching:
        assert process_once(first, "m-1")
        thread = threading.Thread(target=second)
        thread.start()
        waits = text(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        eventually(lambda: watching.execute(waits).scalar_one() or watching.rollback())
        assert found == []
        getattr(first, ends)()
        thread.join(PATIENCE)
    assert found == [ends == "rollback"]


def test_a_relayed_message_can_be_recognized(engine: Engine, m: Messaging, received: Received) -> None:
    put(engine, 1)
    Relay(engine, m).drain()
    received.wait(1)
    for expected in (True, False):
        with engine.begin() as connection:
            assert process_once(connection, received[0]) is expected


def test_what_is_consumed_and_enqueued_is_one_transaction(engine: Engine, m: Messaging) -> None:
    """A consumer that answers through the outbox answers once."""
    answers = Received(m, "answers")
    for _ in range(2):
        with engine.begin() as connection:
            if process_once(connection, "request-1"):
                enqueue(connection, message("answer", "answers"))
        Relay(engine, m).drain()
    put(engine, "last", channel="answers")
    Relay(engine, m).drain()
    assert answers.wait(2) == [b"answer", b"last"]


def test_old_ids_are_forgotten_by_cleanup(engine: Engine) -> None:
    short, long = Inbox("short", retention=30), Inbox("long")
    with engine.begin() as connection:
        for number in range(5):
            short.process_once(connection, f"m-{number}")
            long.process_once(connection, f"m-{number}")
    grow_old(engine)
    with engine.begin() as connection:
        assert short.cleanup(connection, limit=3) == 3
        assert short.cleanup(connection) == 2
        assert long.cleanup(connection) == 0
        assert short.process_once(connection, "m-1")
    assert remembered(engine) == 6


def test_the_age_of_an_id_is_by_the_clock_of_the_database(postgres: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox(retention=86400)
    with postgres.begin() as connection:
        assert inbox.process_once(connection, "a")
    monkeypatch.setattr(clock, "now", lambda: datetime.now(UTC) + timedelta(days=365))
    with postgres.begin() as connection:
        assert inbox.process_once(connection, "b")
        assert inbox.cleanup(connection) == 0
    monkeypatch.undo()
    with postgres.begin() as connection:
        assert inbox.cleanup(connection) == 0
        connection.execute(text("UPDATE messaging_inbox SET handled = handled - interval '2 days'"))
        assert inbox.cleanup(connection) == 2


@table("back", [timedelta(minutes=5), timedelta(days=1), timedelta(days=20_000)])
def test_a_clock_that_was_back_for_one_run_makes_no_later_run_handle_a_message_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, back: timedelta
) -> None:
    new = []
    before = timedelta()
    for by, ids in ((before, "a"), (-back, "b"), (timedelta(seconds=10), "ab"), (timedelta(seconds=200), "ab")):
        monkeypatch.setattr(clock, "now", lambda by=by: datetime.now(UTC) + by)
        inbox = Inbox(f"back {back}", retention=100)
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":  # the clock of its server cannot be set: the rows move instead
                moved = {"seconds": (before - by).total_seconds()}
                connection.execute(
                    text("UPDATE messaging_inbox SET handled = handled + make_interval(secs => :seconds)"), moved
                )
            inbox.cleanup(connection)
            new.append("".join(each for each in ids if inbox.process_once(connection, each)))
        before = by
    assert new == ["a", "b", "", "ab"]


def test_old_ids_are_forgotten_from_time_to_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "_CLEANUP_INTERVAL", 0.0)
    inbox = Inbox(retention=30)
    with engine.begin() as connection:
        inbox.process_once(connection, "old")
    grow_old(engine)
    with engine.begin() as connection:
        inbox.process_once(connection, "new")
    assert remembered(engine) == 1


def test_a_message_without_an_id_is_refused(engine: Engine) -> None:
    with engine.begin() as connection, pytest.raises(ArgumentError, match=r"no id \(extension messageId\)"):
        process_once(connection, Message(b"", MessageContext("a")))


@table("wrong", ["", "x" * 256, 7, None, "a\x00b"])
def test_wrong_ids_are_refused(engine: Engine, wrong: Any) -> None:
    with engine.begin() as connection, pytest.raises(ArgumentError):
        process_once(connection, wrong)
    assert remembered(engine) == 0


@table("wrong", [{"consumer": ""}, {"consumer": "x" * 256}, {"retention": 0}, {"tables": 7}], ids=str)
def test_wrong_arguments_are_refused(wrong: Any) -> None:
    (name,) = wrong
    with pytest.raises(ArgumentError, match=name):
        Inbox(**wrong)


def test_the_inbox_may_stand_alone(url: str) -> None:
    """A consumer has no outbox: it creates the one table."""
    tables = OutboxTables()
    engine = sqlalchemy.create_engine(url)
    tables.inbox.create(engine)
    with engine.begin() as connection:
        assert Inbox(tables=tables).process_once(connection, "m-1")
    engine.dispose()

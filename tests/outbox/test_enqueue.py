"""What ``enqueue`` writes, what it refuses, and that it belongs to the transaction of the caller."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from messaging import Message, MessageContext, MessageContextBuilder, Messaging
from messaging.errors import ArgumentError, InvalidChannelError, InvalidContentError, InvalidExtensionError
from messaging.model import restored_context
from messaging.outbox.sql import OutboxTables, Relay, create_tables, enqueue
from messaging.outbox.sql.tables import DEFAULT_TABLES
from messaging.testing.tables import table
from tests.outbox.conftest import Received, message, prepared, put, status, store


def rows(engine: Engine) -> list[Any]:
    with engine.begin() as connection:
        return list(connection.execute(select(DEFAULT_TABLES.outbox).order_by(DEFAULT_TABLES.outbox.c.id)))


def test_a_message_is_stored_whole(engine: Engine) -> None:
    context = MessageContext(
        "a/b", "red", "text/plain", "gzip", "c-1", "replies",
        extensions={"headers": {"n": Decimal("1.5"), "t": b"\x00\xff"}, "qos": "1", "messageId": "order-7"},
    )  # fmt: skip
    before = datetime.now(UTC)
    with engine.begin() as connection:
        assert enqueue(connection, Message(b"\x00\xff", context), key="7") == "order-7"
    (row,) = rows(engine)
    assert (row.channel, row.key, row.payload, row.message_id) == ("a/b", "7", b"\x00\xff", "order-7")
    assert (row.state, row.attempts, row.retry_at, row.error) == ("pending", 0, None, None)
    assert before - timedelta(seconds=1) <= row.created <= datetime.now(UTC)
    restored = restored_context(row.channel, row.properties)
    extensions = {name: value for name, value in context.extensions.items() if name != "messageId"}
    assert restored == context.replace(extensions=extensions)


def test_empty_values_are_stored_and_published_as_they_are(engine: Engine, m: Messaging) -> None:
    context = MessageContext("a/b", "", "", "", "", extensions={"headers": {"k": ""}, "priority": 0})
    received = Received(m, channel_extension="")
    with engine.begin() as connection:
        enqueue(connection, Message(b"", context))
    Relay(engine, m).drain()
    received.wait(1)
    found = received[0].context
    assert received[0].payload == b""
    assert (found.content_type, found.content_encoding, found.correlation_id, found.channel_extension) == ("",) * 4
    assert (found.extensions["headers"], found.extensions["priority"]) == ({"k": ""}, 0)


def test_the_key_is_the_channel_unless_one_is_given_and_ids_are_made(engine: Engine) -> None:
    put(engine, 1, 2)
    first, second = rows(engine)
    assert first.key == second.key == "a/b"
    assert len({first.message_id, second.message_id}) == 2


def test_a_context_or_channel_beside_the_message_wins(engine: Engine) -> None:
    with engine.begin() as connection:
        enqueue(connection, message(1, "a/b"), "c/d")
        enqueue(connection, message(2, "a/b", qos="1"), MessageContext(None, content_type="text/plain"))
        enqueue(connection, MessageContextBuilder().channel("e").content(b"3"), MessageContextBuilder().channel("f"))
    first, second, third = rows(engine)
    assert (first.channel, second.channel, third.channel) == ("c/d", "a/b", "f")
    assert restored_context("a/b", second.properties) == MessageContext("a/b", content_type="text/plain")


def fail_after(_: str) -> None:
    raise ZeroDivisionError


@table("ends", ["rollback", "exception", "savepoint"])
def test_a_message_that_was_rolled_back_is_not_published(
    engine: Engine, m: Messaging, received: Received, ends: str
) -> None:
    with engine.connect() as connection:
        transaction = connection.begin_nested() if ends == "savepoint" else connection.begin()
        if ends == "exception":
            with pytest.raises(ZeroDivisionError), transaction:
                fail_after(enqueue(connection, message("lost")))
        else:
            enqueue(connection, message("lost"))
            transaction.rollback()
        connection.commit()
    put(engine, f"kept after {ends}")
    Relay(engine, m).drain()
    received.wait_until(lambda found: found[-1:] and found[-1].payload == f"kept after {ends}".encode())
    assert b"lost" not in received.payloads
    assert status(engine).pending == 0


def test_it_works_in_a_session(engine: Engine, m: Messaging, received: Received) -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, message(1))
    scoped = scoped_session(sessionmaker(engine))
    enqueue(scoped, message(2))
    scoped.commit()
    scoped.remove()
    Relay(engine, m).drain()
    assert received.wait(2) == [b"1", b"2"]


def test_a_session_with_several_databases_finds_the_one_of_the_outbox(engine: Engine, tmp_path: Path) -> None:
    other = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/other.db")
    tables = DEFAULT_TABLES
    with Session(binds={tables.outbox: engine, sqlalchemy.table("other"): other}) as session, session.begin():
        enqueue(session, message(1))
    assert len(rows(engine)) == 1
    other.dispose()


@table(
    "wrong, error, text",
    [
        (lambda: (Message(b"", MessageContext()), None), InvalidChannelError, "no channel"),
        (lambda: (message(1, "a/+"), None), InvalidChannelError, "pattern|wildcard|\\+"),
        (lambda: (Message("text", MessageContext("a")), None), InvalidContentError, "bytes, not str"),  # type: ignore[arg-type]
        (lambda: (message(1, qos="7"), None), InvalidExtensionError, "'qos'"),
        (lambda: (message(1, priority=12), None), InvalidExtensionError, "'priority'"),
        (lambda: (message(1, messageId="x" * 256), None), InvalidExtensionError, "255 bytes"),
        (lambda: (message(1, messageId=""), None), InvalidExtensionError, "1 to 255"),
        (lambda: (message(1, lastWill=True), None), InvalidExtensionError, "last will"),
        (lambda: (message(1, custom=object()), None), InvalidExtensionError, "'custom'.*stored"),
        (lambda: (message(1), ""), ArgumentError, "key must not be empty"),
        (lambda: (message(1), 7), ArgumentError, "key must be a str"),
        (lambda: (message(1), "a\x00"), ArgumentError, "NUL"),
        (lambda: (b"1", None), ArgumentError, "enqueue takes a Message"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused_at_once(
    engine: Engine, wrong: Any, error: type[Exception], text: str
) -> None:
    content, key = wrong()
    before = len(rows(engine))
    with engine.begin() as connection:
        with pytest.raises(error, match=text):
            enqueue(connection, content, key=key)
        enqueue(connection, message("the transaction is usable"))
    assert len(rows(engine)) == before + 1


def test_a_connection_must_have_a_transaction(engine: Engine) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(ArgumentError, match="AUTOCOMMIT"),
    ):
        enqueue(connection, message(1))
    with pytest.raises(ArgumentError, match="not Engine"):
        enqueue(engine, message(1))  # type: ignore[call-overload]
    assert rows(engine) == []


def test_an_engine_that_commits_each_statement_is_refused(engine: Engine, m: Messaging) -> None:
    automatic = sqlalchemy.create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with automatic.connect() as connection, pytest.raises(ArgumentError, match="AUTOCOMMIT"):
        enqueue(connection, message(1))
    with pytest.raises(ArgumentError, match="AUTOCOMMIT"):
        Relay(automatic, m).start()
    automatic.dispose()
    assert rows(engine) == []


def test_transactions_that_the_application_begins_by_itself_are_transactions(tmp_path: Path) -> None:
    """As SQLAlchemy advises for savepoints with SQLite: the driver begins none."""
    with prepared(f"sqlite:///{tmp_path}/own.db") as engine:

        def no_transactions(driver: Any, _: object) -> None:
            driver.isolation_level = None

        own = sqlalchemy.create_engine(engine.url)
        sqlalchemy.event.listen(own, "connect", no_transactions)
        sqlalchemy.event.listen(own, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        with own.connect() as connection:
            enqueue(connection, message(1))
            connection.rollback()
            enqueue(connection, message(2))
            connection.commit()
        own.dispose()
        assert len(rows(engine)) == 1


def test_secrets_of_a_message_are_not_in_the_error_of_a_missing_table(url: str) -> None:
    engine = sqlalchemy.create_engine(url, hide_parameters=True)
    with engine.connect() as connection, pytest.raises(sqlalchemy.exc.DBAPIError) as caught:
        enqueue(connection, message("hunter2"))
    engine.dispose()
    assert "hunter2" not in str(caught.value)


def test_tables_have_the_names_that_the_application_chooses(url: str, m: Messaging, received: Received) -> None:
    metadata = sqlalchemy.MetaData()
    tables = OutboxTables(metadata, outbox="shop_events", inbox="shop_handled")
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        create_tables(connection, tables)
        create_tables(connection, tables)
    store(engine, message(1), tables=tables)
    Relay(engine, m, tables=tables).drain()
    assert received.wait(1) == [b"1"]
    found = {*sqlalchemy.inspect(engine).get_table_names()}
    assert found == {"shop_events", "shop_events_lease", "shop_events_schema", "shop_handled"}
    metadata.drop_all(engine)
    assert sqlalchemy.inspect(engine).get_table_names() == []
    engine.dispose()


@table("name", ["", "a b", 'a"b', "x" * 48, "1a", 7])
def test_names_of_tables_are_checked(name: Any) -> None:
    with pytest.raises(ArgumentError, match="outbox must be a name"):
        OutboxTables(outbox=name)

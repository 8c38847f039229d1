"""``messaging outbox``."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy import Engine

import messaging
from messaging import Message, MessageContext, Messaging
from messaging.outbox.sql import Relay, enqueue, process_once
from messaging.testing.brokers import Mosquitto
from messaging.testing.postgresql import PostgreSQL
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.cli.conftest import Run, refused
from tests.cli.program import ready


@pytest.fixture
def database(tmp_path: Path, run: Run) -> str:
    """The URL of a database with the tables."""
    url = f"sqlite:///{tmp_path}/shop.db"
    assert run("outbox", "create-tables", "--database", url)[0] == 0
    return url


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = sqlalchemy.create_engine(database)
    yield engine
    engine.dispose()


def put(engine: Engine, *payloads: str, channel: str = "shop/orders", **extensions: object) -> None:
    with engine.begin() as connection:
        for each in payloads:
            enqueue(connection, Message(each.encode(), MessageContext(channel, extensions=extensions)))


def state(run: Run, database: str) -> dict[str, object]:
    code, out, err = run("outbox", "status", "--database", database, "--json")
    assert (code, err) == (0, "")
    found: dict[str, object] = json.loads(out)
    return found


def kill_rows(engine: Engine, *payloads: str) -> None:
    put(engine, *payloads, mandatory=True)
    with messaging.connect("memory://nobody") as m:
        Relay(engine, m, max_attempts=1).drain()


def test_relay_publishes_until_interrupted(engine: Engine, database: str, url: str, m: Messaging, run: Run) -> None:
    put(engine, "1")
    with (
        m.subscribe("shop/#", str, qos=1) as stream,
        ready("relaying messaging_outbox to", "outbox", "relay", url, "--database", database) as program,
    ):
        assert stream.receive(timeout=PATIENCE).value() == "1"
        put(engine, "2")
        assert stream.receive(timeout=PATIENCE).value() == "2"
        program.signal(signal.SIGTERM)
        assert program.ended() == 130
        assert b"published 2 messages, 0 rows are dead" in program.err.rest()
    assert state(run, database)["pending"] == 0


def test_relay_once_publishes_what_is_there(engine: Engine, database: str, url: str, m: Messaging, run: Run) -> None:
    put(engine, "1", "2")
    with m.subscribe("shop/#", str, qos=1) as stream:
        code, out, err = run("outbox", "relay", url, "--once", "--database", database)
        assert (code, out) == (0, "")
        assert err == "messaging: published 2 messages, 0 rows are dead\n"
        assert [stream.receive(timeout=PATIENCE).value() for _ in range(2)] == ["1", "2"]


def test_relay_takes_the_database_from_the_environment_or_a_file(
    engine: Engine, database: str, url: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    file.write_text(f"{database}\n")
    for name, value in (("MESSAGING_DATABASE", database), ("MESSAGING_DATABASE_FILE", str(file))):
        put(engine, "1")
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert run("outbox", "relay", url, "--once")[0] == 0
    put(engine, "1")
    assert run("outbox", "relay", "--url", url, "--once", "--database-file", str(file))[0] == 0
    assert state(run, database)["pending"] == 0


def test_relay_waits_while_the_broker_is_away(engine: Engine, database: str, own: Mosquitto, run: Run) -> None:
    with ready("relaying", "outbox", "relay", own.url, "--database", database) as program:
        own.stop()
        program.says("connection lost")
        put(engine, "1")
        own.start()
        program.says("connected again after")
        eventually(lambda: state(run, database)["pending"] == 0)
        program.signal(signal.SIGINT)
        assert program.ended() == 130


def test_relay_fails_where_nothing_is_confirmed(engine: Engine, database: str, run: Run, refusing_port: int) -> None:
    put(engine, "1")
    error = refused(
        run, "outbox", "relay", f"mqtt://127.0.0.1:{refusing_port}", "--once", "--database", database, code=1
    )
    assert "refused" in error


def test_passwords_are_in_no_output(run: Run, url: str, postgresql: PostgreSQL) -> None:
    wrong = postgresql.url.replace(postgresql.password, "hunter2")
    for arguments in (("status",), ("relay", url, "--once"), ("create-tables",), ("retry", "--all")):
        code, out, err = run("outbox", *arguments, "--database", wrong, "--debug")
        assert (code, out) == (1, "")
        assert "hunter2" not in err
        assert "password authentication failed" in err


def test_status_counts_rows_and_lists_the_dead(engine: Engine, database: str, run: Run) -> None:
    assert state(run, database) == {
        "pending": 0, "retrying": 0, "oldest": None, "sent": 0, "dead": 0, "relays": []
    }  # fmt: skip
    kill_rows(engine, "1", "22")
    put(engine, "3")
    found = state(run, database)
    assert (found["pending"], found["dead"]) == (1, 2)
    assert float(str(found["oldest_seconds"])) < PATIENCE
    code, out, _ = run("outbox", "status", "--database", database)
    assert code == 0
    assert [line.split() for line in out.splitlines() if "dead" in line] == [["dead", "2"]]
    code, out, err = run("outbox", "status", "--dead", "--json", "--database", database)
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["channel"], row["size"], row["attempts"]) for row in rows] == [
        ("shop/orders", 2, 1),
        ("shop/orders", 1, 1),
    ]
    code, out, _ = run("outbox", "status", "--dead", "--limit", "1", "--database", database)
    (line,) = out.splitlines()
    assert "shop/orders" in line
    assert "UnroutableError" in line


def test_dead_rows_are_retried_or_discarded(engine: Engine, database: str, run: Run) -> None:
    kill_rows(engine, "1", "2", "3")
    assert run("outbox", "retry", "1", "--database", database) == (
        0, "", "messaging: 1 dead rows are to be published again\n"
    )  # fmt: skip
    assert run("outbox", "discard", "2", "--database", database)[0] == 0
    code, _, err = run("outbox", "discard", "1", "3", "--database", database)
    assert code == 1
    assert "1 of the ids name no dead row" in err
    assert (state(run, database)["pending"], state(run, database)["dead"]) == (1, 0)
    kill_rows(engine, "4")
    assert run("outbox", "retry", "--all", "--database", database)[0] == 0
    assert state(run, database)["dead"] == 0


@table("command", ["retry", "discard"])
def test_dead_rows_must_be_named(run: Run, database: str, command: str) -> None:
    for arguments in ((), ("1", "--all")):
        assert "--all" in refused(run, "outbox", command, *arguments, "--database", database)


def test_cleanup_deletes_sent_rows_and_handled_ids(engine: Engine, database: str, url: str, run: Run) -> None:
    put(engine, "1")
    assert run("outbox", "relay", url, "--once", "--retention", "3600", "--database", database)[0] == 0
    with engine.begin() as connection:
        process_once(connection, "m-1")
    assert state(run, database)["sent"] == 1
    code, _, err = run("outbox", "cleanup", "--sent", "0", "--inbox", "0.001", "--database", database)
    assert code == 0
    assert err == "messaging: deleted 1 sent rows\nmessaging: deleted 1 ids of consumer 'default'\n"
    assert state(run, database)["sent"] == 0
    assert "say what to delete" in refused(run, "outbox", "cleanup", "--database", database)


def test_create_tables_writes_the_statements_for_a_migration(run: Run, postgresql: PostgreSQL) -> None:
    arguments = ("--table", "shop_events", "--inbox-table", "shop_handled")
    code, out, err = run("outbox", "create-tables", "--sql", *arguments)
    assert (code, err) == (0, "")
    engine = sqlalchemy.create_engine(postgresql.create_database())
    with engine.begin() as connection:
        connection.exec_driver_sql(out)
    url = engine.url.render_as_string(hide_password=False)
    code, out, err = run("outbox", "relay", "memory://unused", "--once", "--database", url, *arguments)
    assert code == 0, err
    engine.dispose()


@table(
    "arguments, text",
    [
        (("status",), "no database URL: give one, such as postgresql://host/name, or set MESSAGING_DATABASE"),
        (("status", "--database", "nonsense"), "the database URL does not parse"),
        (("status", "--database", "mysql://joe:hunter2@host/shop"), "postgresql and sqlite, not with mysql"),
        (("status", "--database", "sqlite:///x.db", "--database-file", "y"), "two database URLs"),
        (("status", "--database-file", "/nonexistent/url"), "No such file"),
        (("status", "--database", "sqlite:///x.db", "--table", "a b"), "outbox must be a name"),
        (("relay", "memory://x", "--database", "sqlite:///x.db", "--lease", "0"), "lease must be"),
        (("relay", "nosuch://x", "--database", "sqlite:///x.db"), "no adapter for nosuch://"),
        (("relay", "--database", "sqlite:///x.db"), "no broker URL"),
    ],
)
def test_wrong_command_lines_are_refused(
    run: Run, arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused(run, "outbox", *arguments)
    assert text in error
    assert "hunter2" not in error


def test_a_database_without_tables_is_refused(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    error = run("outbox", "relay", "memory://x", "--once", "--database", url)[2]
    assert (
        "the database has no table messaging_outbox: create the tables with `messaging outbox create-tables`" in error
    )


def test_the_program_ends_at_once_when_interrupted_while_idle(database: str, url: str) -> None:
    with ready("relaying", "outbox", "relay", url, "--database", database) as program:
        program.signal(signal.SIGINT)
        assert program.ended() == 130

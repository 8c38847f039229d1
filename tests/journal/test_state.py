"""The database beside the log: one version, damage, other programs."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from messaging.errors import ClosedError, JournalError, JournalUnreadableError
from messaging.execution import clock
from messaging.journal import DeadLetter, Journal, State, database, verify
from messaging.journal.database import StateDatabase
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.journal.conftest import Open
from tests.journal.logs import append, filled, stored_cursors
from tests.threads import in_background


def test_positions_counters_dead_letters_and_ids_survive(tmp_path: Path) -> None:
    first = State(tmp_path)
    first.save_cursors({"a": 1, "b": 2}, drops=3)
    first.save_cursors({"a": 5}, drops=4)
    first.delete_cursor("b")
    for n in range(5):
        assert first.add_dead_letter("why", n, b"%d" % n, most=3) == (1 if n > 2 else 0)
    first.add_seen([("c", "1"), ("c", "2")])
    first.add_seen([("c", "1"), ("d", "1")])
    first.forget_seen(oldest=0, most=2)
    first.close()
    again = State(tmp_path)
    assert again.cursors() == {"a": 5}
    assert again.counter("dropped") == 7
    assert [(each.id, each.offset, each.record) for each in again.dead_letters()] == [
        (3, 2, b"2"), (4, 3, b"3"), (5, 4, b"4"),
    ]  # fmt: skip
    assert isinstance(again.dead_letters()[0], DeadLetter)
    assert {each[:2] for each in again.seen(oldest=0)} == {("c", "1"), ("d", "1")}
    assert again.seen(oldest=time.time() + 60) == []
    again.close()
    again.close()
    with pytest.raises(ClosedError):
        again.cursors()
    with pytest.raises(ClosedError):
        again.save_cursors({"a": 1})


def test_every_change_waits_for_the_disk(tmp_path: Path) -> None:
    opened = StateDatabase(tmp_path)
    assert opened.query("PRAGMA journal_mode") == [("wal",)]
    assert opened.query("PRAGMA synchronous") == [(2,)]
    opened.close()


def test_an_older_schema_is_migrated_and_keeps_its_contents(tmp_path: Path) -> None:
    for version in range(1, len(database.MIGRATIONS) + 1):
        folder = tmp_path / str(version)
        folder.mkdir()
        connection = sqlite3.connect(folder / database.FILE)
        for script in database.MIGRATIONS[:version]:
            connection.executescript(script)
        connection.executescript(f"PRAGMA user_version={version}; INSERT INTO cursors VALUES ('a', 7, 0)")
        connection.close()
        opened = State(folder)
        assert opened.cursors() == {"a": 7}
        opened.add_seen([("c", "1")])
        opened.close()
        with contextlib.closing(sqlite3.connect(folder / database.FILE)) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (len(database.MIGRATIONS),)


def test_a_newer_schema_is_refused_and_left_alone(path: str, opened: Open) -> None:
    opened().close()
    with contextlib.closing(sqlite3.connect(f"{path}/state.db")) as connection:
        connection.execute("PRAGMA user_version=99")
    for attempt in (opened, lambda: Journal.view(path)):
        with pytest.raises(JournalUnreadableError, match=r"schema version 99, .* use a newer one"):
            attempt()


@table("data", [b"no database" * 1000, b"SQLite format 3\0" + b"\xff" * 5000], ids=["text", "torn"])
def test_a_damaged_database_is_set_aside_and_no_record_is_lost(
    tmp_path: Path, opened: Open, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    journal = filled(opened, 1, where=tmp_path)
    journal.cursor("c", "latest")
    journal.close()
    Path(tmp_path, "state.db").write_bytes(data)
    with Journal.view(tmp_path) as view:
        assert len(list(view.read())) == 1
        assert view.cursors() == {}
    assert "cursors and dead letters are not known" in caplog.text
    assert "cannot open state.db" in str(verify(tmp_path).state)
    journal = opened(tmp_path)
    assert "state.db is damaged: moved to state.db.damaged-" in caplog.text
    assert len(journal.cursor("c").read()) == 1
    (kept,) = tmp_path.glob("state.db.damaged-*")
    assert kept.read_bytes() == data


def test_a_database_is_set_aside_with_what_sqlite_left_and_the_disk_has_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power the next writer must not find the old database, nor a new one the old changes."""
    synced: list[set[str]] = []
    monkeypatch.setattr(database, "sync_folder", lambda folder: synced.append({each.name for each in folder.iterdir()}))
    for suffix in ("", "-wal"):
        Path(tmp_path, f"state.db{suffix}").write_bytes(b"no database")
    moved = database.move_aside(tmp_path, "damaged")
    assert moved.startswith("state.db.damaged-")
    assert synced == [{moved, f"{moved}-wal"}]


def test_a_database_that_another_program_holds_is_an_error_and_works_again(
    path: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY", 0.05)
    journal = filled(opened, 1)
    cursor = journal.cursor("c")
    with contextlib.closing(sqlite3.connect(f"{path}/state.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match=r"cannot write state.db: database is locked"):
            cursor.commit(1)
        assert journal.append("a", b"y") == 1  # appending does not need it
        other.execute("ROLLBACK")
    cursor.commit(1)
    journal.close()
    assert opened().cursors() == {"c": 1}


def test_a_database_that_another_program_holds_keeps_no_record_waiting(path: str, opened: Open) -> None:
    journal = opened()
    cursor = journal.cursor("c")
    append(journal, 20)
    with contextlib.closing(sqlite3.connect(f"{path}/state.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        ended: Recorder[Exception | None] = Recorder()
        join = in_background(lambda: ended.append(error_of(lambda: cursor.commit(1))))
        eventually(lambda: cursor.position == 1)
        for n in range(2, 20):  # while that call waits for the database
            cursor.commit(n, wait=False)
            journal.submit("a", b"y").result(PATIENCE)
        assert ended == []
        other.execute("ROLLBACK")
    join()
    eventually(lambda: stored_cursors(path) == {"c": 19})


def error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except JournalError as error:
        return error
    return None


def test_a_journal_on_a_folder_that_cannot_be_written_is_read(path: str, opened: Open) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    journal = filled(opened, 1)
    journal.cursor("c")
    journal.close()
    folders = [Path(path), Path(path, "0")]
    for folder in [*folders, *Path(path).parents]:
        if folder.stat().st_uid == 0 and folder not in (Path("/"), Path("/tmp")):
            folder.chmod(folder.stat().st_mode | stat.S_IRUSR | 0o555)
    for file in Path(path).rglob("*"):  # its owner lets others read
        file.chmod(0o555 if file.is_dir() else 0o444)
    os.seteuid(65_534)
    try:
        with Journal.view(path) as view:
            assert [each.payload for each in view.read()] == [b"x"]
            assert view.cursors() == {"c": 0}
        with pytest.raises(JournalError, match="Permission denied"):
            Journal.open(path)
    finally:
        os.seteuid(0)


@table("text", ["", "PRAGMA user_version=0; DROP TABLE cursors"], ids=["held", "unfinished"])
def test_a_database_that_cannot_be_read_now_keeps_no_reader_from_the_records(
    tmp_path: Path, opened: Open, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "_BUSY", 0.05)
    filled(opened, 1, where=tmp_path).close()
    with contextlib.closing(sqlite3.connect(f"{tmp_path}/state.db", isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.executescript(text or "BEGIN EXCLUSIVE; PRAGMA user_version")
        if text:
            other.execute("PRAGMA locking_mode=NORMAL")
            other.execute("PRAGMA user_version")
        with Journal.view(tmp_path) as view:
            assert [each.payload for each in view.read()] == [b"x"]
    assert "cursors and dead letters are not known" in caplog.text


def test_dead_letters_are_counted_and_read_without_being_loaded_together(path: str, opened: Open) -> None:
    journal = opened()
    journal.append("a", b"x" * 5_000_000)
    (record,) = journal.read()
    for _ in range(10):
        journal.add_dead_letter(record, "why")
    tracemalloc.start()
    try:
        with Journal.view(path) as view:
            assert view.info().dead_letters == 10
            assert [each.id for each in view.read_dead_letters()] == [*range(1, 11)]
            assert tracemalloc.get_traced_memory()[1] < 25_000_000, "the last segment, and two of them"
    finally:
        tracemalloc.stop()


@table(
    "text, what",
    [
        ("{", "does not parse"),
        ("[]", "does not parse"),
        ('{"format": 1, "id": 5, "kind": "records"}', "does not parse"),
        ('{"format": 9, "id": "a", "kind": "records"}', "has format 9, this version reads 1"),
        ('{"format": 1, "id": "a"}', "is the journal of a Spark query"),
    ],
    ids=["torn", "list", "no id", "newer", "spark"],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, text: str, what: str) -> None:
    Path(tmp_path, "journal.json").write_text(text)
    for attempt in (Journal.open, Journal.view):
        with pytest.raises(JournalUnreadableError, match=what):
            attempt(tmp_path)


def test_a_path_that_is_no_folder_and_segments_without_identity_are_refused(path: str, opened: Open) -> None:
    Path(path).write_text("x")
    with pytest.raises(JournalUnreadableError, match="Not a directory"):
        Journal.open(path)
    Path(path).unlink()
    with pytest.raises(JournalUnreadableError, match="there is no journal"):
        Journal.view(path)
    filled(opened, 1).close()
    Path(path, "journal.json").unlink()
    with pytest.raises(JournalUnreadableError, match=r"there are segments, but no journal\.json"):
        Journal.open(path)


def test_the_oldest_ids_are_forgotten_first_if_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    opened = State(tmp_path)
    for name, at in (("d", now), ("c", now + 1), ("b", now - 3600), ("a", now - 3599)):
        monkeypatch.setattr(clock, "wall", lambda at=at: at)
        opened.add_seen([("c", name)])
        opened.forget_seen(oldest=0, most=2)
    seen = opened.seen(oldest=0)
    assert [each[1] for each in seen] == ["b", "a"]
    assert all(now + 1 < each[2] < now + 1.001 for each in seen)
    opened.close()


def test_ids_that_are_stored_together_keep_their_order(tmp_path: Path) -> None:
    opened = State(tmp_path)
    opened.add_seen([("c", each) for each in ("z", "10", "9")])
    opened.add_seen([("c", each) for each in ("b", "y", "a")])
    assert [each[1] for each in opened.seen(oldest=0)] == ["z", "10", "9", "b", "y", "a"]
    opened.forget_seen(oldest=0, most=4)
    assert [each[1] for each in opened.seen(oldest=0)] == ["9", "b", "y", "a"]
    opened.close()

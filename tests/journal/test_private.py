"""Files that hold payloads are created for their owner alone, whatever the mode of the folder and the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from messaging.journal import Journal, JournalTable, State, repair
from messaging.journal.folders import LocalFolder
from messaging.receiving.deduplication import SettledIds
from tests.journal.logs import append, flip, segment_files


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that everybody may read and write."""
    tmp_path.chmod(0o777)
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o777)
    return folder


def check(folder: Path, *expected: str) -> None:
    """Raise unless all files are private, and those that are expected are there."""
    files = {each.name: each.stat().st_mode & 0o777 for each in folder.rglob("*") if each.is_file()}
    assert set(expected) <= set(files)
    assert {name: oct(mode) for name, mode in files.items() if mode & 0o077} == {}


def test_the_files_of_a_journal_are_private(shared: Path) -> None:
    with Journal.open(shared, segment_bytes=1) as journal:
        append(journal, 5, b"secret")
        cursor = journal.cursor("c")
        (record, *_) = cursor.read()
        journal.add_dead_letter(record, "secret")
        cursor.commit()
        segment = segment_files(shared)[-1].name
        check(shared, "journal.json", "lock", "state.db", "state.db-wal", "state.db-shm", segment)
    flip(segment_files(shared)[-1], -2)
    flip(shared / "journal.json", 30)
    repair(shared)
    (shared / "state.db").write_bytes(b"nothing that SQLite knows" * 100)
    with Journal.open(shared) as journal:
        assert len([*journal.read()]) < 5
        check(shared, "state.db", "state.db-wal", "state.db-shm")
    assert [*(shared / "quarantine").iterdir()]
    check(shared)


def test_a_table_a_state_and_an_inbox_are_private(shared: Path) -> None:
    for name in ("table", "state", "inbox"):
        (shared / name).mkdir(mode=0o777)
    with JournalTable(shared / "table") as table:
        table.put("key", "secret")
        check(shared / "table", "state.db", "state.db-wal")
    state = State(shared / "state")
    state.add_seen([("secret", "1")])
    check(shared / "state", "state.db", "state.db-wal", "state.db-shm")
    state.close()
    inbox = SettledIds(60.0, 10, shared / "inbox", "a")
    inbox.store([("secret", "1")])
    check(shared / "inbox", "state.db", "state.db-wal")
    inbox.close()


def test_an_existing_file_keeps_its_mode(shared: Path) -> None:
    LocalFolder(str(shared)).append_to("x").close()
    (shared / "x").chmod(0o640)
    LocalFolder(str(shared)).append_to("x").close()
    assert (shared / "x").stat().st_mode & 0o777 == 0o640

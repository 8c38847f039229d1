"""The durable map: what it holds after a disk has failed."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import JournalError, JournalFullError
from messaging.execution import Promise
from messaging.journal import Journal, JournalTable
from messaging.testing.waiting import PATIENCE, eventually


def fail(*_: object) -> Any:
    raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def table(tmp_path: Path) -> JournalTable:
    return JournalTable(tmp_path / "table")


def reopened(tmp_path: Path) -> dict[str, Any]:
    with JournalTable(tmp_path / "table") as table:
        return dict(table.items())


def test_a_removal_that_failed_is_stored_by_the_next_attempt(
    tmp_path: Path, table: JournalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.put("a", 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        with pytest.raises(JournalError):
            table.remove("a")
    assert "a" not in table
    assert table.remove("a")
    copied = tmp_path / "copied"  # as a kill leaves it: closing stores nothing there
    copied.mkdir()
    for path in sorted((tmp_path / "table").rglob("*")):
        place = copied / path.relative_to(tmp_path / "table")
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            place.write_bytes(path.read_bytes())
    with JournalTable(copied) as found:
        assert found.items() == []
    assert not table.remove("a")
    table.close()


def test_a_removal_is_not_done_before_an_earlier_one_that_still_waits(
    table: JournalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.put("a", 1)
    writes, go_on, real = threading.Event(), threading.Event(), os.pwritev

    def wait(*arguments: Any) -> int:
        writes.set()
        assert go_on.wait(PATIENCE)
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", wait)
    first = table.remove_soon("a")
    assert writes.wait(PATIENCE)
    second = table.remove_soon("a")
    assert first is not None
    assert second is first
    assert not second.done()
    go_on.set()
    second.result(PATIENCE)
    eventually(lambda: table.remove_soon("a") is None)
    table.close()


@pytest.mark.parametrize("change", ["put", "remove"])
@pytest.mark.parametrize(
    ("patched_name", "patch", "error"),
    [("os.pwritev", fail, JournalError), ("messaging.journal.journal._WAITING_BYTES", 0, JournalFullError)],
    ids=["the disk fails", "too many records wait"],
)
def test_changes_that_failed_are_stored_with_the_next_change(
    tmp_path: Path,
    table: JournalTable,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    patched_name: str,
    patch: object,
    error: type[JournalError],
) -> None:
    table.put("a", 1)
    with monkeypatch.context() as patched:
        patched.setattr(patched_name, patch)
        with pytest.raises(error):
            table.put("a", 2) if change == "put" else table.remove("a")
    assert table.get("a") == (2 if change == "put" else None)
    table.put("b", 3)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)  # closing stores nothing further
        table.close()
    assert reopened(tmp_path) == ({"a": 2, "b": 3} if change == "put" else {"b": 3})


@pytest.mark.parametrize("change", ["put", "remove"])
def test_changes_that_failed_are_stored_when_the_table_is_closed(
    tmp_path: Path, table: JournalTable, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    table.put("a", 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        with pytest.raises(JournalError):
            table.put("a", 2) if change == "put" else table.remove("a")
    table.close()
    assert reopened(tmp_path) == ({"a": 2} if change == "put" else {})


@pytest.mark.parametrize("has_failed", [False, True], ids=["under way", "failed before"])
@pytest.mark.parametrize("change", ["put", "remove"])
@pytest.mark.parametrize(("code", "error"), [(errno.EIO, JournalError), (errno.ENOSPC, JournalFullError)])
def test_closing_fails_if_a_change_is_not_stored_that_was_not_waited_for(
    tmp_path: Path,
    table: JournalTable,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[JournalError],
    change: str,
    has_failed: bool,
) -> None:
    """Otherwise the party that made the change, of a lease that was renewed, takes it for stored."""
    table.put("a", 1)
    go_on, real = threading.Event(), Journal.close

    def wait_and_fail(*_: object) -> int:
        assert go_on.wait(PATIENCE)
        raise OSError(code, os.strerror(code))

    def close(journal: Journal) -> None:
        go_on.set()
        real(journal)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", wait_and_fail)
        patched.setattr(Journal, "close", close)
        changed = table.put_soon("a", 2) if change == "put" else table.remove_soon("a")
        assert changed is not None
        changed.was_retrieved = True
        if has_failed and error is JournalError:  # a full disk holds the record back until the table is closed
            go_on.set()
            assert changed.exception(PATIENCE) is not None
        with pytest.raises(error, match=os.strerror(code)):
            table.close()
        table.close()  # idempotent
    assert reopened(tmp_path) == {"a": 1}


def test_a_change_that_failed_beside_a_compaction_is_stored_with_the_next_change(
    tmp_path: Path, table: JournalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compaction fails, too: the records of the entries do not fit among those that wait."""
    table.put("a", 1)
    table.put("a", 2)
    real = Journal.submit

    def submit_one(journal: Journal, key: str, data: bytes) -> Promise[int]:
        promise = real(journal, key, data)
        patched.setattr("messaging.journal.journal._WAITING_BYTES", 0)
        return promise

    with monkeypatch.context() as patched:
        patched.setattr("messaging.journal.table._SLACK", 0)
        patched.setattr(os, "pwritev", fail)
        patched.setattr(Journal, "submit", submit_one)
        with pytest.raises(JournalError, match="Input/output"):
            table.put("a", 3)
    table.put("b", 4)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        table.close()
    assert reopened(tmp_path) == {"a": 3, "b": 4}


def test_a_change_takes_the_place_of_one_that_failed(
    tmp_path: Path, table: JournalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.put("a", 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        with pytest.raises(JournalError):
            table.remove("a")
    table.put("a", 4)
    table.close()
    assert reopened(tmp_path) == {"a": 4}


def test_a_change_that_begins_a_compaction_holds(tmp_path: Path, table: JournalTable) -> None:
    for number in range(1200):
        table.put_soon("a", number)
    table.put("a", "last")
    table.close()
    assert reopened(tmp_path) == {"a": "last"}

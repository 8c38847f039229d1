"""Arguments that mean nothing are refused and change nothing; deleting records, and reading after close."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import ArgumentError, ClosedError, JournalFullError
from messaging.journal import Journal, outline, repair, verify
from messaging.testing.tables import table
from tests.journal.conftest import Open
from tests.journal.logs import append, filled, offsets, stored_cursors


@table(
    "arguments",
    [(None, b"x"), ("a", None), ("a", "x"), (b"a", b"x"), ("a", b"x", None), ("a", b"x", 5), (5, b"x")],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, arguments: Any) -> None:
    with Journal.open(tmp_path / "journal") as journal:
        for call in (journal.append, journal.submit):
            with pytest.raises(ArgumentError):
                call(*arguments)
        with pytest.raises(ArgumentError):
            journal.append("a", b"x", message_id=0)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            journal.append_message(None)  # type: ignore[arg-type]
        assert journal.end == 0


@table("path", ["", b"x", None, 5, [], Path])
def test_a_path_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (Journal.open, Journal.view, verify, outline, repair):
        with pytest.raises(ArgumentError):
            call(path)
    assert not [*tmp_path.iterdir()]


@table("value", [0.5, "x", None, True, -1, b"1", 2**0.5])
def test_an_offset_that_is_none_is_refused_and_changes_nothing(tmp_path: Path, value: Any) -> None:
    folder = tmp_path / "journal"
    with Journal.open(folder) as journal:
        append(journal, 5)
        cursor = journal.cursor("c")
        calls = [
            cursor.acknowledge,
            journal.trim,
            lambda each: cursor.read(each),
            lambda each: cursor.read(most_bytes=each),
        ]
        if value is not None:
            calls += [cursor.commit]
        if value not in (None, -1):
            calls += [journal.read, lambda each: journal.read(0, each), lambda each: journal.cursor("new", each)]
        for call in calls:
            with pytest.raises(ArgumentError):
                call(value)
        assert journal.cursors() == {"c": 0}
    with Journal.open(folder) as journal:
        assert offsets(journal.cursor("c").read()) == [0, 1, 2, 3, 4]


@table("is_acknowledged", [True, False])
def test_trimming_deletes_the_last_segment_too_if_it_is_acknowledged(tmp_path: Path, is_acknowledged: bool) -> None:
    with Journal.open(tmp_path / "journal") as journal:
        append(journal, 5)
        cursor = journal.cursor("c")
        if is_acknowledged:
            cursor.commit(5)
        journal.trim(4)
        assert journal.begin == 0
        assert journal.trim(journal.end) == (5 if is_acknowledged else 0)
        assert offsets(journal.read()) == ([] if is_acknowledged else [0, 1, 2, 3, 4])
        assert journal.append("a", b"x") == 5


def test_a_listener_of_deletions_can_still_read_the_records(tmp_path: Path) -> None:
    told: list[tuple[int, list[int]]] = []
    with Journal.open(tmp_path / "journal") as journal:
        journal.retention.listen(lambda before: told.append((before, offsets(journal.read()))))
        append(journal, 5)
        journal.trim(4)
        assert told == [], "nothing is deleted"
        journal.trim(5)
        append(journal, 2)
        journal.purge()
        assert offsets(journal.read()) == []
    assert told == [(5, [0, 1, 2, 3, 4]), (7, [5, 6])]


def test_purging_deletes_all_records_and_moves_the_cursors_to_the_end(path: str, opened: Open) -> None:
    journal = filled(opened, 10, segment_bytes=1)
    fast, slow = journal.cursor("fast"), journal.cursor("slow")
    fast.commit(8)
    slow.acknowledge(5)
    assert journal.purge() == 10
    assert (journal.begin, journal.end, journal.cursors()) == (10, 10, {"fast": 10, "slow": 10})
    assert journal.purge() == 0
    assert journal.append("a", b"x") == 10
    assert offsets(slow.read()) == [10]
    journal.close()
    assert stored_cursors(path) == {"fast": 10, "slow": 10}
    with pytest.raises(ClosedError):
        journal.purge()


def test_purge_deletes_all_records_after_a_write_that_failed_in_a_new_segment(
    path: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(segment_bytes=1, full="reject")
    journal.append("a", b"1")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", _full)
        with pytest.raises(JournalFullError):
            journal.append("a", b"2")
    assert journal.purge() == 1
    assert journal.begin == journal.end == journal.append("a", b"3")


def _full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_reading_after_close_says_so(path: str, opened: Open) -> None:
    journal = filled(opened, 3)
    view = Journal.view(path)
    for each in (journal, view):
        reading = each.read()
        next(reading)
        each.close()
        for call in (each.read, each.refresh):
            with pytest.raises(ClosedError, match="closed"):
                call()
        assert offsets(reading) == [1, 2]  # it began before


def test_the_samples_of_the_page_run_one_after_the_other_and_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "journal.md"
    samples = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert len(samples) >= 3
    for sample in samples * 2:
        exec(compile(sample, str(page), "exec"), {"__name__": "__main__"})

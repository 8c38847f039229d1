"""Cursors: each acknowledges for itself, and what was stored stays stored."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import shutil
import sqlite3
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError, ClosedError, JournalError, JournalFullError, JournalRangeError
from messaging.journal import Cursor, Journal
from messaging.journal.folders import LocalFolder
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, results
from tests.journal.conftest import Open
from tests.journal.logs import append, filled, offsets, segment_files
from tests.threads import in_background, in_threads


def test_each_cursor_acknowledges_for_itself_and_survives(opened: Open) -> None:
    journal = filled(opened, 10)
    one, two = journal.cursor("one"), journal.cursor("two", 4)
    latest = journal.cursor("latest", "latest")
    assert (offsets(one.read(most=3)), offsets(two.read()), offsets(latest.read())) == (
        [0, 1, 2],
        [4, 5, 6, 7, 8, 9],
        [],
    )
    one.commit()
    two.commit(6)
    assert journal.cursors() == {"one": 3, "two": 6, "latest": 10}
    assert (one.behind, two.behind, latest.behind) == (7, 4, 0)
    journal.close()
    journal = opened()
    assert journal.cursors() == {"one": 3, "two": 6, "latest": 10}
    assert offsets(journal.cursor("one", "latest").read(most=2)) == [3, 4]  # it exists, and keeps its position


def test_rewinding_reads_again_what_is_not_acknowledged(opened: Open) -> None:
    cursor = filled(opened, 10).cursor("c")
    assert offsets(cursor.read(most=4)) == [0, 1, 2, 3]
    cursor.acknowledge(0)
    cursor.acknowledge(2)
    cursor.rewind()
    assert offsets(cursor.read()) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert cursor.position == 1


def test_what_one_holder_of_a_cursor_acknowledged_counts_for_every_other(opened: Open) -> None:
    journal = filled(opened, 6)
    first = journal.cursor("c")
    for offset in (1, 3, 4):
        first.acknowledge(offset)
    second = journal.cursor("c")
    assert offsets(second.read()) == [0, 1, 2, 3, 4, 5]
    second.acknowledge(0)
    assert (first.position, second.position) == (2, 2)
    journal.cursor("c").commit(3, wait=False)
    assert (first.position, journal.cursors()) == (5, {"c": 5})


def test_a_cursor_that_is_created_again_has_acknowledged_nothing(opened: Open) -> None:
    journal = filled(opened, 3)
    removed = journal.cursor("c")
    removed.acknowledge(1)
    assert journal.remove_cursor("c")
    for call in (removed.commit, lambda: removed.acknowledge(0), removed.rewind):
        with pytest.raises(JournalError, match="'c' was removed"):
            call()
    again = journal.cursor("c")
    again.acknowledge(0)
    assert again.position == 1


@given(st.permutations(range(10)), st.integers(0, 10), st.integers(0, 9))
def test_the_position_is_the_first_offset_that_is_not_acknowledged(order: list[int], commit: int, when: int) -> None:
    journal = _shared()
    cursor = journal.cursor(f"c{random.getrandbits(60)}", 0)
    done: set[int] = set()
    for number, offset in enumerate(order):
        if number == when:
            cursor.commit(commit, wait=False)
            done.update(range(commit))
        cursor.acknowledge(offset)
        cursor.acknowledge(offset)
        done.add(offset)
        assert cursor.position == next(n for n in range(11) if n not in done)
    journal.remove_cursor(cursor.name)


_journals: list[Journal] = []


def _shared() -> Journal:
    """A journal of ten records for all examples."""
    return _journals[-1]


@pytest.fixture(autouse=True)
def _ten_records(tmp_path: Path) -> Any:
    with Journal.open(tmp_path / "shared", fsync="never") as journal:
        append(journal, 10)
        _journals.append(journal)
        yield
        _journals.pop()


def test_reading_waits_for_a_record(opened: Open) -> None:
    journal = filled(opened, 0)
    cursor = journal.cursor("c")
    assert offsets(cursor.read(timeout=0.01)) == []
    for act, expected in ((lambda: journal.append("a", b"x"), [0]), (journal.close, [])):
        found: Recorder[list[int]] = Recorder()
        join = in_background(lambda found=found: found.append(offsets(cursor.read(timeout=PATIENCE))))  # type: ignore[misc]
        eventually(lambda: journal._commit._readers)
        act()
        join()
        assert found == [expected]


def test_threads_that_share_a_cursor_get_each_record_once(opened: Open) -> None:
    journal = filled(opened, 2000, fsync="never")
    cursor = journal.cursor("c")
    seen: list[int] = []
    in_threads(4, lambda _: [seen.extend(offsets(cursor.read(most=7))) for _ in range(300)])
    assert sorted(seen) == list(range(2000))


def test_segments_are_deleted_behind_the_slowest_cursor(path: str, opened: Open) -> None:
    journal = filled(opened, 10, segment_bytes=1)
    one, two = journal.cursor("one"), journal.cursor("two")
    one.commit(8)
    two.commit(3)
    eventually(lambda: journal.begin == 3)
    assert journal.trim(99) == 3
    two.acknowledge(3)
    eventually(lambda: journal.begin == 4)
    assert journal.remove_cursor("two")
    eventually(lambda: journal.begin == 8)
    assert not journal.remove_cursor("two")
    eventually(lambda: len(segment_files(path)) == 2)
    with pytest.raises(JournalError, match="cursor 'two' was removed"):
        _ = two.position


def test_a_small_journal_that_is_acknowledged_whole_frees_its_segment(path: str, opened: Open) -> None:
    journal = opened(fsync="never")
    cursor = journal.cursor("c")
    append(journal, 12, b"x" * 100_000)
    cursor.commit(12)
    eventually(lambda: journal.begin == 12)
    eventually(lambda: [file.stat().st_size for file in segment_files(path)] == [0])
    assert journal.append("a", b"y") == 12
    journal.close()
    assert opened().append("a", b"z") == 13


@table("name", ["", "a" * 201, "a\nb", None, 5])
def test_names_that_no_cursor_can_have_are_refused(tmp_path: Path, opened: Open, name: Any) -> None:
    with pytest.raises(ArgumentError, match="1 to 200 printable characters"):
        opened(tmp_path).cursor(name)


def test_places_that_are_not_there_are_refused(opened: Open) -> None:
    journal = filled(opened, 10)
    for start in (-1, 11):
        with pytest.raises(JournalRangeError, match=f"cannot begin at {start}: 0 to 10 are there"):
            journal.cursor("c", start)
    for strange in ("begin", None, 1.5, True):
        with pytest.raises(ArgumentError, match="start must be"):
            journal.cursor("c", strange)  # type: ignore[arg-type]
    assert journal.cursors() == {}
    cursor = journal.cursor("c")
    for attempt in (lambda: cursor.commit(11), lambda: cursor.acknowledge(10)):
        with pytest.raises(JournalRangeError, match="the journal ends at 10"):
            attempt()
    assert cursor.position == 0


def test_a_position_that_commit_returned_for_is_stored_whatever_others_do(path: str, opened: Open) -> None:
    """Two threads store positions of one cursor: the older one must not come after the newer one."""
    journal = filled(opened, 400, fsync="never")
    cursors = [journal.cursor("c") for _ in range(4)]
    database = f"{path}/state.db"

    def work(number: int) -> None:
        connection = sqlite3.connect(database)
        for position in range(number, 400, 4):
            cursors[number].commit(position)
            ((stored,),) = connection.execute("SELECT position FROM cursors")
            if stored < position:
                behind.append((stored, position))
        connection.close()

    behind: list[tuple[int, int]] = []
    in_threads(4, work)
    assert behind == []


def test_an_older_position_never_replaces_a_newer_one(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(opened, 10)
    cursor = journal.cursor("c")
    real = journal._state.save_cursors
    inside, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **more: Any) -> None:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(PATIENCE)
        real(*arguments, **more)

    monkeypatch.setattr(journal._state, "save_cursors", slow)
    stored: Recorder[int] = Recorder()
    joins = []
    for position in (3, 7):
        joins.append(in_background(lambda position=position: (cursor.commit(position), stored.append(position))))  # type: ignore[misc]
        assert inside.wait(PATIENCE)
    eventually(lambda: cursor.position == 7)
    assert stored == [], "no position is stored"
    go_on.set()
    for join in joins:
        join()
    assert journal._state.cursors() == {"c": 7}


def test_a_removed_cursor_does_not_come_back(opened: Open) -> None:
    journal = filled(opened, 200, fsync="never")
    for _ in range(20):
        cursor = journal.cursor("c")

        def work(cursor: Cursor = cursor) -> None:
            with contextlib.suppress(JournalError):  # it was removed
                for position in range(200):
                    cursor.commit(position, wait=False)

        join = in_background(work)
        journal.remove_cursor("c")
        join()
    journal.sync()
    journal.close()
    assert opened().cursors() == {}


def test_a_cursor_that_cannot_be_stored_does_not_keep_records(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(opened, 10)

    def broken(*_: Any, **__: Any) -> None:
        raise JournalFullError(journal.path, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(journal._state, "save_cursors", broken)
        with pytest.raises(JournalFullError):
            journal.cursor("c")
    assert journal.cursors() == {}


def test_a_cursor_that_cannot_be_stored_frees_no_records(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(opened, 10, segment_bytes=1)

    def broken(*_: Any, **__: Any) -> None:
        journal.trim(10)
        raise JournalFullError(journal.path, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(journal._state, "save_cursors", broken)
        with pytest.raises(JournalFullError):
            journal.cursor("c", "latest")
        assert offsets(journal.read()) == [*range(10)]
    assert journal.cursor("c", "latest").position == 10
    assert journal.trim(10) == 10


@table(("start", "other", "begin"), [("latest", 4, 4), ("earliest", 4, 0), (2, 4, 2), (6, 4, 4), (6, None, 6)])
def test_a_cursor_keeps_its_records_while_it_is_stored(
    start: Any, other: int | None, begin: int, tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(str(tmp_path / "journal"), segment_bytes=1)
    append(journal, 10)
    if other is not None:
        journal.cursor("other")
    save = journal._state.save_cursors

    def slow(*arguments: Any, **named: Any) -> None:
        if other is not None:
            journal._cursors.acknowledge("other", 0, other)
        journal.trim(10)
        kept.append(journal.begin)
        save(*arguments, **named)

    kept: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(journal._state, "save_cursors", slow)
        cursor = journal.cursor("c", start)
    assert kept == [0]
    assert journal.trim(10) == begin
    assert cursor.position == {"latest": 10, "earliest": 0}.get(start, start)


def test_a_database_that_cannot_be_written_is_told_once_and_tried_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = filled(opened, 10, segment_bytes=1)
    cursor = journal.cursor("c")
    attempts = 0

    def broken(*_: Any, **__: Any) -> None:
        nonlocal attempts
        attempts += 1
        raise JournalFullError(journal.path, "cannot write state.db: no room")

    with monkeypatch.context() as patched:
        patched.setattr(journal._state, "save_cursors", broken)
        cursor.commit(5, wait=False)
        eventually(lambda: attempts >= 3)
        with pytest.raises(JournalFullError):
            cursor.commit(6)
        eventually(lambda: journal.begin == 6)  # space is freed all the same
    eventually(lambda: journal._cursors.is_saved)
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    journal.close()
    assert opened().cursors() == {"c": 6}


def test_cursors_of_a_closed_journal_say_so(opened: Open) -> None:
    journal = filled(opened, 10)
    cursor = journal.cursor("c")
    journal.close()
    for attempt in (cursor.read, cursor.commit, lambda: cursor.acknowledge(0)):
        with pytest.raises(ClosedError, match="closed"):
            attempt()


@table("failing", [1, 7])
@table("error", [OSError(errno.EIO, "failed"), KeyboardInterrupt()], ids=["disk", "signal"])
def test_a_read_that_fails_loses_no_record(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch, error: BaseException, failing: int
) -> None:
    journal = filled(opened, 100, where=tmp_path, segment_bytes=1)
    cursor = journal.cursor("c")
    calls = itertools.count(1)
    read = LocalFolder.read

    def failing_read(self: LocalFolder, *arguments: Any, **more: Any) -> memoryview:
        if next(calls) == failing:
            raise error
        return read(self, *arguments, **more)

    found: list[int] = []
    monkeypatch.setattr(LocalFolder, "read", failing_read)
    with contextlib.suppress(JournalError, KeyboardInterrupt):
        found += offsets(cursor.read())
    assert found + offsets(cursor.read()) == list(range(100))


def test_acknowledging_beyond_a_missing_record_takes_no_memory_for_each(opened: Open) -> None:
    journal = opened(fsync="never")
    count = 20_000
    promises = [journal.submit("a", b"") for _ in range(count)]
    assert results(promises)[-1] == count - 1
    cursor = journal.cursor("c")
    tracemalloc.start()
    try:
        for offset in range(1, count):
            cursor.acknowledge(offset)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < count
    assert cursor.position == 0
    cursor.acknowledge(0)
    assert cursor.position == count


@table(
    "acknowledged",
    {
        "all but the first": range(1, 1000),
        "every second": range(1, 1000, 2),
        "all but the last": range(999),
        "some ranges, backwards": [*range(900, 400, -1), *range(300, 20, -3)],
    },
)
@table("how", ["closed", "killed"])
def test_acknowledgements_out_of_order_survive(tmp_path: Path, acknowledged: Sequence[int], how: str) -> None:
    folder = tmp_path / "journal"
    with Journal.open(folder, fsync="never") as journal:
        append(journal, 1000)
        cursor = journal.cursor("c")
        for offset in acknowledged:
            cursor.acknowledge(offset)
        if how == "killed":  # what the disk has, once all is stored
            eventually(lambda: journal._cursors.is_saved, "the acknowledgements to be stored")
            journal._cursors.save()  # returns when the thread that is storing them has done so
            shutil.copytree(folder, tmp_path / "image")
            folder = tmp_path / "image"
    rest = sorted(set(range(1000)) - set(acknowledged))
    with Journal.open(folder) as journal:
        cursor = journal.cursor("c")
        found: list[int] = []
        while records := cursor.read(most=100):
            found += offsets(records)
        assert found == rest
        for offset in reversed(rest):
            cursor.acknowledge(offset)
        assert cursor.position == 1000
        append(journal, 1)
        assert offsets(cursor.read()) == [1000]


def test_offsets_that_were_acknowledged_and_lost_are_not_used_again(path: str, opened: Open) -> None:
    """A journal whose end is gone must not take new records for those that it acknowledged out of order."""
    journal = opened()
    append(journal, 5)
    size = segment_files(path)[0].stat().st_size
    append(journal, 5)
    cursor = journal.cursor("c")
    for offset in (0, 1, 2, 3, 8, 9):
        cursor.acknowledge(offset)
    journal.close()
    os.truncate(segment_files(path)[0], size)
    journal = opened()
    assert journal.append("a", b"new") == 10
    assert offsets(journal.cursor("c").read()) == [4, 10]


@table("data", [b"x", b"\0" * 16, b"\xff" * 16, b"\1" + b"\0" * 15])
def test_acknowledgements_that_are_malformed_are_forgotten(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "journal"
    with Journal.open(folder) as journal:
        append(journal, 3)
        journal.cursor("c")
    connection = sqlite3.connect(folder / "state.db")
    connection.execute("INSERT INTO passed VALUES ('c', ?)", (data,))
    connection.commit()
    connection.close()
    with Journal.open(folder) as journal:
        assert offsets(journal.cursor("c").read()) == [0, 1, 2]
        append(journal, 1)

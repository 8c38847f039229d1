"""Bounds of bytes, records and age, each with each policy; a disk that is full."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import ArgumentError, JournalFullError
from messaging.journal import Journal, database
from messaging.journal.folders import LocalFolder
from messaging.journal.options import Full
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, results
from tests.disks import ballast
from tests.journal.conftest import Open
from tests.journal.logs import append, offsets, segment_files, stored_cursors
from tests.threads import in_background

BOUNDS = [{"max_records": 100}, {"max_bytes": 100 * 1042}]
IDS = ["records", "bytes"]
PAYLOAD = b"x" * 1000
#: bytes that are left on a disk that is nearly full
LEFT = 60_000


def fill(journal: Journal) -> int:
    """Append until there is no room; return the number of records."""
    for _ in range(10_000):
        try:
            journal.append("a", PAYLOAD, timeout=0.01)
        except JournalFullError:
            return journal.end
    pytest.fail("there is room for any number of records")


@table("bound", BOUNDS, ids=IDS)
def test_reject_refuses_at_once_and_accepts_when_a_cursor_has_made_room(
    tmp_path: Path, opened: Open, bound: dict[str, int]
) -> None:
    journal = opened(tmp_path, full="reject", timeout=60, **bound)
    cursor = journal.cursor("c")
    full = fill(journal)  # at once: the timeout is 60 s
    assert 90 <= full <= 100
    with pytest.raises(JournalFullError, match=r"it is full: \d+ records \(\d+ bytes\) are not acknowledged, and max"):
        journal.submit("a", PAYLOAD, timeout=60).result(PATIENCE)
    cursor.commit(1)
    assert journal.append("a", b"x" * 900) == full
    assert journal.dropped == 0
    assert offsets(journal.read())[-1] == full


@table("bound", BOUNDS, ids=IDS)
def test_block_waits_until_a_cursor_has_made_room(tmp_path: Path, opened: Open, bound: dict[str, int]) -> None:
    journal = opened(tmp_path, timeout=60, **bound)
    cursor = journal.cursor("c")
    full = fill(journal)
    stored: Recorder[int] = Recorder()
    join = in_background(lambda: stored.append(journal.append("a", PAYLOAD)))
    eventually(lambda: len(journal._commit.waiting) == 1)
    assert stored == []
    cursor.commit(50)
    join()
    assert stored == [full]


@table("bound", BOUNDS, ids=IDS)
def test_drop_oldest_drops_whole_segments_and_counts_and_logs_each_record(
    tmp_path: Path, opened: Open, bound: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened(tmp_path, full="drop_oldest", **bound)
    cursor = journal.cursor("c")
    for n in range(1000):
        assert journal.append("a", PAYLOAD) == n
        assert journal.end - journal.begin <= 101
    kept = offsets(journal.read())
    assert 80 <= len(kept) <= 100, "an eighth is dropped at a time"
    assert kept == list(range(journal.begin, 1000))
    assert journal.dropped == journal.begin == cursor.position
    logged = [each for each in caplog.records if "dropped" in each.message]
    assert sum(int(each.message.split("dropped ")[1].split()[0]) for each in logged) == journal.dropped
    assert all(each.levelno == logging.WARNING for each in logged)
    dropped = journal.dropped
    journal.close()
    journal = opened(tmp_path, full="drop_oldest", **bound)
    assert journal.dropped == journal.info().dropped == dropped
    assert offsets(journal.cursor("c").read()) == kept
    with Journal.view(tmp_path) as view:
        assert view.info().dropped == dropped


def test_acknowledged_records_do_not_count_as_dropped(opened: Open) -> None:
    journal = opened(full="drop_oldest", max_records=16)
    cursor = journal.cursor("c")
    for n in range(100):
        journal.append("a", b"x")
        cursor.commit(n + 1, wait=False)
    assert journal.dropped == 0


def test_a_bound_of_one_record_works(opened: Open) -> None:
    journal = opened(full="drop_oldest", max_records=1)
    for n in range(5):
        assert journal.append("a", b"x") == n
        assert offsets(journal.read()) == [n]
    assert journal.dropped == 4


@table("full", ["block", "reject", "drop_oldest"])
@pytest.mark.usefixtures("virtual_clock")
def test_a_record_larger_than_the_bound_goes_in_alone(tmp_path: Path, opened: Open, full: str) -> None:
    journal = opened(tmp_path, full=full, max_bytes=10_000, timeout=0.1)
    cursor = journal.cursor("c")
    assert journal.append("a", b"x" * 50_000) == 0
    if full == "drop_oldest":
        assert journal.append("a", b"y") == 1
        assert (offsets(journal.read()), journal.dropped) == ([1], 1)
        return
    with pytest.raises(JournalFullError):
        journal.append("a", b"y")
    cursor.commit(1)
    assert journal.append("a", b"y") == 1


def test_a_smaller_record_is_accepted_beside_one_that_is_refused(opened: Open) -> None:
    journal = opened(full="reject", max_bytes=10_000)
    journal.append("a", b"x" * 5000)
    with journal._commit._committing:  # both wait, and go into one batch
        large, small = journal.submit("a", b"x" * 9000), journal.submit("a", b"y" * 100)
    assert small.result(PATIENCE) == 1
    assert isinstance(large.exception(PATIENCE), JournalFullError)


def test_records_beyond_their_age_are_dropped_acknowledged_or_not(
    virtual_clock: VirtualClock, path: str, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened(max_age=600.0)
    journal.cursor("c")
    journal.append("a", b"old")
    virtual_clock.advance(599.0)
    assert journal.dropped == 0
    virtual_clock.advance(451.0)  # three looks later at most: until it is in a segment of its own, and for rounding
    assert journal.dropped == 1
    assert (journal.begin, offsets(journal.read())) == (1, [])
    assert "dropped 1 records older than 600 s" in caplog.text
    eventually(lambda: len(segment_files(path)) == 1)
    assert journal.append("a", b"new") == 1
    assert offsets(journal.read()) == [1]


@table("how", ["alone", "reopened", "reopened and followed", "reopened twice", "clock set back"])
def test_a_record_is_dropped_within_a_tenth_of_its_age(virtual_clock: VirtualClock, tmp_path: Path, how: str) -> None:
    max_age = 600.0
    folder = str(tmp_path / "journal")
    journal = Journal.open(folder, max_age=max_age)

    def advance(share: float) -> None:
        virtual_clock.advance(share * max_age)

    try:
        journal.append("a", b"x")
        for number in range(2 if "twice" in how else 1):
            advance(0.4)
            if "reopened" in how:
                journal.close()
                journal = Journal.open(folder, max_age=max_age)
            if "followed" in how or "twice" in how:
                journal.append("a", b"%d" % number)
        if how == "clock set back":
            virtual_clock.shift_wall(-10 * max_age)
        advance(0.95 - (0.8 if "twice" in how else 0.4))
        assert (journal.begin, journal.dropped) == (0, 0)
        advance(0.15)
        eventually(lambda: journal.begin == 1, "the record to be dropped")
    finally:
        journal.close()


def test_a_clock_that_is_set_forward_drops_no_record_early(virtual_clock: VirtualClock, tmp_path: Path) -> None:
    """As on a machine whose clock begins at 1970, and gets the right time from the network."""
    with Journal.open(str(tmp_path / "journal"), max_age=600.0) as journal:
        journal.append("a", b"x")
        virtual_clock.shift_wall(50 * 365 * 86_400.0)
        journal.append("a", b"y")
        virtual_clock.advance(500.0)
        assert (journal.begin, journal.dropped) == (0, 0)
        virtual_clock.advance(250.0)
        eventually(lambda: journal.begin == 2, "the records to be dropped")


def test_a_clock_that_was_wrong_keeps_no_records_and_drops_none_early(opened: Open) -> None:
    now = time.time()
    journal = opened(max_age=3600, segment_bytes=1)
    for timestamp in (now - 8000, now + 10**8, now - 7000, now - 10, now - 9000, now):
        journal.append("a", b"x", timestamp=timestamp)
    journal.retention._next_look = 0
    journal._commit.wake()
    eventually(lambda: journal.begin == 2)
    assert journal.append("a", b"x") == 6
    assert offsets(journal.read()) == [2, 3, 4, 5, 6]


def test_records_of_a_clock_that_was_set_back_do_not_expire_the_ones_before(opened: Open) -> None:
    now = time.time()
    journal = opened(max_age=3600, segment_bytes=1)
    for timestamp in (now, now - 7200, now - 7100, now):
        journal.append("a", b"x", timestamp=timestamp)
    journal.close()
    journal = opened(max_age=3600, segment_bytes=1)
    journal.append("a", b"x")
    journal.submit("a", b"x").result(PATIENCE)  # the thread of the journal looks at the age before it writes
    assert offsets(journal.read()) == [0, 1, 2, 3, 4, 5]


# --- a full disk


def test_a_full_disk_blocks_until_there_is_room(small_disk: Path) -> None:
    with Journal.open(small_disk / "j", timeout=60) as journal:
        file = ballast(small_disk, LEFT)
        full = fill(journal)
        assert full > 10
        assert offsets(journal.read()) == list(range(full))
        waiting = journal.submit("a", PAYLOAD)
        later = journal.submit("a", PAYLOAD)
        eventually(lambda: len(journal._commit.waiting) == 2)
        file.unlink()
        assert results([waiting, later]) == [full, full + 1]
    with Journal.open(small_disk / "j") as journal:
        assert offsets(journal.read()) == list(range(full + 2))
        assert journal.info().damage == []


def test_a_full_disk_is_logged_once_with_its_end(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Journal.open(small_disk / "j", timeout=60) as journal:
        file = ballast(small_disk, LEFT)
        fill(journal)
        eventually(lambda: not journal.is_blocked)  # the last record was refused in time
        for _ in range(3):
            with pytest.raises(JournalFullError):
                journal.append("a", PAYLOAD, timeout=0.01)
        assert len(journal.problems()) == 1
        later = [journal.submit("a", PAYLOAD) for _ in range(50)]
        eventually(lambda: journal.is_blocked)
        assert len(journal.problems()) == 1
        file.unlink()
        results(later)
        eventually(lambda: not journal.is_blocked)
        assert journal.problems() == ()
    lines = [each for each in caplog.records if "room" in each.getMessage()]
    assert [each.levelname for each in lines] == ["ERROR", "WARNING"], caplog.text


def test_a_full_disk_ends_with_the_first_write_of_a_backlog(small_disk: Path) -> None:
    told: Recorder[tuple[bool, bool, int]] = Recorder()
    with Journal.open(small_disk / "j", timeout=60) as journal:
        journal.disk.listen(lambda error: told((error is not None, journal.is_blocked, journal.waiting_bytes)))
        file = ballast(small_disk, LEFT)
        fill(journal)
        later = [journal.submit("a", b"x") for _ in range(10_000)]  # more than one batch
        file.unlink()
        results(later)
        eventually(lambda: journal.disk.error is None and not journal.is_blocked)
    assert [each[0] for each in told] == [True, False]
    assert told[-1][2] > 0, "records waited when the disk took records again"


def test_a_full_disk_ends_when_it_has_room_while_no_record_waits(small_disk: Path) -> None:
    with Journal.open(small_disk / "j", timeout=60) as journal:
        file = ballast(small_disk, LEFT)
        fill(journal)
        eventually(lambda: not journal.is_blocked)
        assert journal.disk.error is not None
        file.unlink()
        eventually(lambda: journal.problems() == ())


@table("listener", [None, "x", 5])
def test_a_listener_that_cannot_be_called_is_refused(tmp_path: Path, listener: Any) -> None:
    with Journal.open(tmp_path / str(listener)) as journal:
        for listen in (journal.disk.listen, journal.retention.listen):
            with pytest.raises(ArgumentError, match="must be callable"):
                listen(listener)


def test_a_full_disk_rejects_until_there_is_room(small_disk: Path) -> None:
    with Journal.open(small_disk / "j", full="reject") as journal:
        file = ballast(small_disk, LEFT)
        full = fill(journal)
        for _ in range(3):
            with pytest.raises(JournalFullError, match="No space left on device"):
                journal.append("a", PAYLOAD * 5)
        file.unlink()
        assert journal.append("a", PAYLOAD) == full
        assert offsets(journal.read()) == list(range(full + 1))


def test_a_full_disk_drops_the_oldest_segments(small_disk: Path) -> None:
    with Journal.open(small_disk / "j", full="drop_oldest", segment_bytes=10_000) as journal:
        ballast(small_disk, LEFT)
        for n in range(500):
            assert journal.append("a", PAYLOAD) == n
        assert journal.dropped == journal.begin > 300
        assert offsets(journal.read()) == list(range(journal.begin, 500))
        assert len(offsets(journal.read())) > 10


@table("full", ["drop_oldest", "reject"])
def test_a_full_disk_may_hold_writers_back_where_a_full_journal_drops(small_disk: Path, full: Full) -> None:
    with Journal.open(small_disk / full, full=full, full_disk="block", segment_bytes=10_000) as journal:
        file = ballast(small_disk, LEFT)
        stored = fill(journal)
        assert journal.dropped == 0
        later = journal.submit("a", PAYLOAD)
        file.unlink()
        assert later.result(PATIENCE) == stored
        assert offsets(journal.read()) == list(range(stored + 1))


def test_a_full_disk_drops_a_part_at_a_time_whatever_the_size_of_segments(small_disk: Path) -> None:
    with Journal.open(small_disk / "j", full="drop_oldest") as journal:
        kept = []
        for n in range(600):
            assert journal.append("a", b"x" * 10_000) == n
            kept.append(journal.end - journal.begin)
        assert min(kept[300:]) > 40, "of 90 or so that fit"
        assert journal.dropped == journal.begin


def test_acknowledging_on_a_full_disk_frees_it_without_a_restart(small_disk: Path) -> None:
    """Nothing else makes room: the database itself cannot be written at first."""
    with Journal.open(small_disk / "j", segment_bytes=10_000, timeout=30) as journal:
        cursor = journal.cursor("c")
        ballast(small_disk, 100_000)
        full = fill(journal)
        with (small_disk / "rest").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
            while True:
                rest.write(b"x")
        waiting = [journal.submit("a", PAYLOAD) for _ in range(5)]
        records = cursor.read(most=full)
        assert len(records) == full
        for record in records:
            cursor.acknowledge(record.offset)
        assert results(waiting) == list(range(full, full + 5))
        eventually(lambda: journal._cursors.is_saved)
        cursor.commit(full + 5)
    with Journal.open(small_disk / "j") as journal:
        assert journal.cursors() == {"c": full + 5}
        assert journal.append("a", b"x") == full + 5


@table("full", ["block", "reject"])
def test_a_small_full_disk_is_freed_when_its_only_segment_is_acknowledged(
    disk_of: Callable[[str], Path], full: str
) -> None:
    """The segment is far from its size: nothing but the want of room closes it."""
    with Journal.open(disk_of("1m") / "j", full=full, timeout=20) as journal:
        cursor = journal.cursor("c")
        promises = [journal.submit("a", b"x" * 50_000) for _ in range(60)]
        eventually(lambda: promises[0].done() and (full == "block" or promises[-1].done()))
        stored = 0
        while stored < (60 if full == "block" else 15):
            eventually(lambda stored=stored: journal.end > stored)  # type: ignore[misc]
            stored = journal.end
            with contextlib.suppress(JournalFullError):
                cursor.commit(stored)
        if full == "block":
            assert results(promises) == list(range(60))
        else:
            assert journal.append("a", b"x" * 50_000) == stored
            assert [promise.exception(0) is None for promise in promises] == [n < stored for n in range(60)]


def test_a_batch_that_does_not_fit_is_stored_as_far_as_it_does(small_disk: Path) -> None:
    with Journal.open(small_disk / "j", full="reject") as journal:
        journal.append("a", PAYLOAD)
        ballast(small_disk, LEFT)
        with journal._commit._committing:
            promises = [journal.submit("a", PAYLOAD) for _ in range(200)]
        outcomes = [promise.exception(PATIENCE) is None for promise in promises]
        assert 10 < outcomes.count(True) < 100
        assert outcomes == sorted(outcomes, reverse=True)


def test_a_journal_is_opened_and_read_on_a_full_disk_and_drains_it(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY", 0.05)
    path = small_disk / "j"
    with Journal.open(path, segment_bytes=10_000) as journal:
        cursor = journal.cursor("c")
        append(journal, 100, PAYLOAD)
        cursor.commit(20)
    ballast(small_disk)
    with Journal.open(path, segment_bytes=10_000, full="reject") as journal:
        assert journal.cursors() == {"c": 20}
        with Journal.view(path) as view:
            assert offsets(view.read())[-1] == 99
        cursor = journal.cursor("c")
        full = fill(journal)
        cursor.commit(full, wait=False)
        eventually(lambda: journal.begin > 50)
        assert journal.append("a", PAYLOAD) == full
        eventually(lambda: stored_cursors(path) == {"c": full})
    with Journal.open(path) as journal:
        assert journal.cursors() == {"c": full}


def test_a_record_larger_than_the_disk_drops_no_other(small_disk: Path) -> None:
    with Journal.open(small_disk / "j", full="drop_oldest", segment_bytes=50_000) as journal:
        append(journal, 500, PAYLOAD)
        with pytest.raises(JournalFullError):
            journal.append("a", b"x" * 2_000_000)
        assert offsets(journal.read()) == list(range(500))
        assert journal.append("a", b"x" * 700_000) == 500
        assert 100 < journal.dropped == journal.begin


def test_records_are_counted_as_dropped_when_their_files_cannot_be_deleted(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LocalFolder, name: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    journal = opened(full="drop_oldest", max_records=16)
    cursor = journal.cursor("c")
    append(journal, 16)
    monkeypatch.setattr(LocalFolder, "delete", fail)
    append(journal, 16)
    assert journal.dropped == journal.begin == cursor.position >= 16

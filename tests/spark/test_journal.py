"""The promises of the journal: appended rows survive any failure, in order and intact, or reading them fails."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from messaging import Message, MessageContext
from messaging.journal import repair
from messaging.journal.folders import LocalFolder
from messaging.journal.frames import scan
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from pyspark_messaging.columns import batch_of
from pyspark_messaging.errors import (
    DataLossError,
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalLockedError,
    JournalMismatchError,
    JournalUnreadableError,
)
from pyspark_messaging.journal import RowJournal, folders, leave_mark
from pyspark_messaging.journal.log import RowLog, RowLogWriter, read
from tests.disks import ballast
from tests.journal.conftest import in_memory as in_memory
from tests.spark import journals
from tests.spark.journals import NOW, SOURCE, add, check, rows, segments

SEED = 4711


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open a journal thousands of times."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


_OPENED: list[RowJournal] = []


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    """Close the journals of a test at its end."""
    yield
    while _OPENED:
        _OPENED.pop().close()


def opened(path: str, **more: Any) -> RowJournal:
    _OPENED.append(RowJournal.open(path, more.pop("source", SOURCE), **more))
    return _OPENED[-1]


def opened_log(path: str, **more: Any) -> tuple[RowJournal, RowLogWriter]:
    """Open a journal; return it and the log of its only partition."""
    journal = opened(path, **more)
    (log,) = journal.logs
    return journal, log


def stored(folder: Path, *counts: int) -> tuple[Path, list[int]]:
    """A log of frames with so many rows; its one segment, and where each frame ends, that of the schema first."""
    log = RowLogWriter(LocalFolder(str(folder)), 0, seed=SEED)
    for count in counts:
        add(log, count)
    ends = [log._positions[0], *(begin + log._bytes(at) for at, begin in enumerate(log._positions))]
    log.close()
    return folder / "0" / f"{0:020d}.segment", ends


def reloaded(folder: Path) -> RowLogWriter:
    log = RowLogWriter(LocalFolder(str(folder)), 0, seed=SEED)
    log.close()
    return log


class Held(LocalFolder):
    """A folder whose one segment is held in memory, to be damaged thousands of times."""

    def __init__(self, name: str, data: bytes) -> None:
        super().__init__("/held", option="journalPath")
        self.name = name
        self.data = bytearray(data)

    def list(self, name: str = "") -> dict[str, int]:
        return {self.name: len(self.data)}

    def read(self, name: str, start: int = 0, length: int | None = None, *, copy: bool = False) -> memoryview:
        return memoryview(bytes(self.data))[start : None if length is None else start + length]


def values(folder: Path, log: RowLog) -> list[bytes]:
    batches = read(LocalFolder(str(folder)), log.spans(log.begin, log.end))
    return [each for batch in batches for each in batch.column("value").to_pylist()]


def expected(count: int) -> list[bytes]:
    return [journals.value(n) for n in range(count)]


# --- on the disk ----------------------------------------------------------------------------------------------------


def watch(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, str]]:
    """Record the calls of these functions of ``os``, each with the name of its file."""
    calls: list[tuple[str, str]] = []

    def spy(name: str, real: Callable[..., Any], file: int, *rest: Any) -> Any:
        calls.append((name, Path(f"/proc/self/fd/{file}").readlink().name))
        return real(file, *rest)

    for name in names:
        monkeypatch.setattr(os, name, partial(spy, name, getattr(os, name)))
    return calls


def test_append_returns_when_the_disk_has_the_rows_and_the_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch(monkeypatch, "pwritev", "fsync", "fdatasync", "ftruncate")
    _, log = opened_log(path, segment_bytes=5000)
    assert calls.index(("fsync", ".journal.json.new")) < calls.index(("fsync", "journal"), 2)
    assert {("fsync", "journal"), ("fsync", Path(path).parent.name), ("fsync", "0")} <= set(calls)
    while len(segments(log)) < 3:
        calls.clear()
        new = len(segments(log))
        add(log)
        segment = segments(log)[-1]
        assert calls[-2:] == [("pwritev", segment), ("fdatasync", segment)]
        assert (("fsync", "0") in calls) == (len(segments(log)) > new)


def test_a_reopened_journal_is_synced_before_its_rows_count(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer may have been killed between writing and waiting for the disk."""
    first = opened(path)
    add(first.logs[0])
    first.close()
    calls = watch(monkeypatch, "fsync")
    opened(path)
    assert {"journal", "0", f"{0:020d}.segment"} <= {name for _, name in calls}


def test_an_empty_append_writes_nothing(path: str) -> None:
    journal = opened(path)
    journal.logs[0].append(rows(0, 0))
    assert segments(journal.logs[0]) == []


def test_nothing_is_written_after_close(path: str) -> None:
    journal, log = opened_log(path)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        add(log)


def test_close_waits_for_a_write_in_progress(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, log = opened_log(path)
    add(log)
    inside, go_on = threading.Event(), threading.Event()
    real = os.pwritev

    def slow(*arguments: Any) -> int:
        inside.set()
        assert go_on.wait(PATIENCE)
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", slow)
    writer, closer = threading.Thread(target=add, args=(log,)), threading.Thread(target=journal.close)
    writer.start()
    assert inside.wait(PATIENCE)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    writer.join()
    closer.join()
    view = RowJournal.view(path)
    assert view.logs[0].end == 6
    check(view)


# --- damage ---------------------------------------------------------------------------------------------------------


def test_a_tail_cut_anywhere_in_the_last_two_frames_costs_only_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment, ends = stored(tmp_path, 2, 3, 1)
    data = segment.read_bytes()
    for cut in range(ends[1], len(data)):
        count, whole = (5, ends[2]) if cut >= ends[2] else (2, ends[1])
        log = RowLog(Held(segment.name, data[:cut]), 0, seed=SEED)
        assert log.load() == (0, whole, cut)
        assert log.end == count
        if cut % 37 and cut not in ends:
            continue
        segment.write_bytes(data[:cut])
        caplog.clear()
        log = reloaded(tmp_path)
        assert segment.stat().st_size == whole
        assert [record.levelno for record in caplog.records] == ([logging.WARNING] if cut > whole else [])
        assert values(tmp_path, log) == expected(count)


@table("tail", [b"\0" * 5000, b"RXJ1" * 300, random.Random(1).randbytes(5000), b"R"])
def test_a_tail_of_garbage_is_cut_off_and_the_log_continues(
    tmp_path: Path, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    segment, _ = stored(tmp_path, 2, 3)
    with segment.open("ab") as file:
        file.write(tail)
    log = RowLogWriter(LocalFolder(str(tmp_path)), 0, seed=SEED)
    assert f"cut off {len(tail)} bytes" in caplog.text
    add(log)
    log.close()
    assert values(tmp_path, reloaded(tmp_path)) == expected(8)


def test_a_flip_in_the_last_frame_costs_only_it_and_one_before_is_an_error(tmp_path: Path) -> None:
    segment, ends = stored(tmp_path, 2, 3, 1)
    held = Held(segment.name, segment.read_bytes())
    for at in range(len(held.data)):
        flip = 1 << random.randrange(8)
        held.data[at] ^= flip
        log = RowLog(held, 0, seed=SEED)
        if at >= ends[2]:
            assert log.load() == (0, ends[2], len(held.data))
            assert log.end == 5
        else:
            with pytest.raises(JournalCorruptError, match=rf"journalPath.*{segment.name}"):
                log.load()
        held.data[at] ^= flip
    held.data[-1] ^= 1
    segment.write_bytes(held.data)
    assert values(tmp_path, reloaded(tmp_path)) == expected(5)
    assert segment.stat().st_size == ends[2]
    held.data[-1] ^= 1
    held.data[ends[1]] ^= 1
    segment.write_bytes(held.data)
    with pytest.raises(JournalCorruptError):
        reloaded(tmp_path)
    assert segment.stat().st_size == len(held.data)  # nothing is cut off


def test_readers_detect_every_flipped_bit_and_a_truncated_segment(tmp_path: Path) -> None:
    segment, ends = stored(tmp_path, 2, 3)
    [span] = reloaded(tmp_path).spans(0, 5)
    data = segment.read_bytes()
    held = Held(segment.name, data)
    for bit in range(ends[0] * 8, len(data) * 8):
        held.data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(JournalCorruptError):
            list(read(held, [span]))
        held.data[bit // 8] ^= 1 << bit % 8
    assert sum(batch.num_rows for batch in read(held, [span])) == 5
    for cut in range(span.position, len(data), 7):
        segment.write_bytes(data[:cut])
        with pytest.raises(JournalCorruptError):
            list(read(LocalFolder(str(tmp_path)), [span]))


def segmented(path: str, count: int = 4, **more: Any) -> list[Path]:
    """A journal of segments of three rows each."""
    journal = opened(path, segment_bytes=1, **more)
    for log in journal.logs:
        for _ in range(count):
            add(log)
    journal.close()
    return sorted(Path(path).glob("0/*.segment"))


def refused(path: str, name: str) -> None:
    """Neither opening nor viewing takes it, and both say where it is broken."""
    for attempt in (lambda: opened(path), lambda: check(RowJournal.view(path))):
        with pytest.raises(JournalCorruptError, match=rf"option 'journalPath' .*{name}") as caught:
            attempt()
        assert caught.value.option == "journalPath"


def exchange(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


@table(
    "damage, named",
    [
        pytest.param(lambda files: files[1].unlink(), 2, id="missing"),
        pytest.param(lambda files: exchange(files[1], files[2]), 1, id="exchanged"),
        pytest.param(lambda files: cut_short(files[0]), 1, id="the first is cut short"),
        pytest.param(lambda files: cut_short(files[1]), 2, id="the second is cut short"),
        pytest.param(lambda files: cut_short(files[2]), 3, id="the third is cut short"),
    ],
)
def test_a_damaged_segment_is_an_error(tmp_path: Path, damage: Callable[[list[Path]], None], named: int) -> None:
    path = str(tmp_path / "journal")
    files = segmented(path)
    damage(files)
    refused(path, files[named].name)


def test_segments_of_two_partitions_exchanged_are_an_error(path: str) -> None:
    """Names, offsets and sizes are the same."""
    files = segmented(path, source=replace(SOURCE, partitions=2))
    other = Path(path) / "1" / files[1].name
    assert other.stat().st_size == files[1].stat().st_size
    spans = RowJournal.view(path).logs[0].spans(0, 12)
    exchange(files[1], other)
    with pytest.raises(JournalCorruptError):
        opened(path, source=replace(SOURCE, partitions=2))
    with pytest.raises(JournalCorruptError, match=files[1].name):
        list(read(LocalFolder(path), spans))


def test_a_flip_in_an_earlier_segment_is_an_error_of_reading(path: str) -> None:
    """Opening looks at the headers only: a backlog may be large."""
    files = segmented(path)
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    view = RowJournal.view(path)
    with pytest.raises(JournalCorruptError, match=files[1].name):
        check(view)
    check(view, 0, 3)
    check(view, 6, 12)


def test_a_first_segment_without_a_whole_frame_still_tells_the_offset(path: str) -> None:
    files = segmented(path)
    for file in files[:-1]:
        file.unlink()
    os.truncate(files[-1], 10)
    again = opened(path)
    assert (again.logs[0].begin, again.logs[0].end) == (9, 9)
    add(again.logs[0])
    check(again)


def test_readers_name_missing_segments_and_journals(path: str, tmp_path: Path) -> None:
    files = segmented(path)
    view = RowJournal.view(path)
    files[0].unlink()
    with pytest.raises(DataLossError, match=rf"journalPath.*{files[0].name} is gone"):
        check(view)
    shutil.rmtree(path)
    with pytest.raises(JournalUnreadableError, match="no journal on this machine"):
        check(view)


def test_missing_ranges_are_data_loss(path: str) -> None:
    segmented(path)
    _, log = opened_log(path)
    log.commit(6)
    assert log.begin == 6
    for start, end in ((0, 7), (5, 7), (7, 13), (13, 14)):
        with pytest.raises(DataLossError, match=f"offsets {start} to {end} .* and 6 to 12 are there"):
            log.spans(start, end)
    assert log.spans(3, 3) == []
    assert log.spans(7, 7) == []


# --- a disk that fails ----------------------------------------------------------------------------------------------


class Faults:
    """Lets the calls of the operating system fail that writing makes: the ``nth``, or that one and all after it."""

    def __init__(self, number: int, nth: int, *, partial: bool = False, stay: bool = False) -> None:
        self.number, self.nth, self.partial, self.stay = number, nth, partial, stay
        self.calls = 0
        self.failed: list[str] = []
        self._pwritev, self._patches = os.pwritev, []

    def _fails(self) -> bool:
        self.calls += 1
        return self.calls == self.nth or (self.stay and self.calls > self.nth)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            if not self._fails():
                return real(*arguments)
            self.failed.append(name)
            if name == "pwritev" and self.partial:
                file, views, at = arguments
                data = b"".join(views)
                self._pwritev(file, [data[: len(data) * 2 // 3]], at)
            if name in ("fdatasync", "fsync"):
                real(*arguments)
            raise OSError(self.number, os.strerror(self.number))

        return call

    def __enter__(self) -> Faults:
        names = ("pwritev", "fdatasync", "fsync", "ftruncate")
        self._patches = [mock.patch.object(os, name, self._wrapped(name)) for name in names]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


@table("stay", [False, True], ids=["once", "for a while"])
@table("partial", [False, True], ids=["at once", "halfway"])
@table("segment_bytes", [2**20, 1], ids=["growing", "new segment"])
@table("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_failed_write_adds_nothing_and_the_log_continues(
    in_memory: str, number: int, segment_bytes: int, partial: bool, stay: bool
) -> None:
    kind = JournalError if number == errno.EIO else JournalFullError
    folder = Path(tempfile.mkdtemp(dir=in_memory))
    failed = set()
    for nth in range(1, 8):
        path = str(folder / str(nth))
        journal, log = opened_log(path, segment_bytes=segment_bytes)
        add(log, 4)
        with Faults(number, nth, partial=partial, stay=stay) as faults, contextlib.suppress(kind):
            add(log, 5)
        assert log.end == (9 if set(faults.failed) <= {"ftruncate"} else 4)
        failed.update(faults.failed)
        count = log.end
        check(journal)
        for more in (1, 6):  # other rows than those that failed, in other frames
            add(log, more)
            check(journal)
        check(RowJournal.view(path))
        journal.close()
        again = opened(path)
        assert again.logs[0].end == count + 7
        check(again)
        again.close()
    assert {"pwritev", "fdatasync"} <= failed
    assert segment_bytes > 1 or "fsync" in failed
    assert not stay or "ftruncate" in failed


def test_the_head_of_a_segment_is_on_the_disk_before_rows_are_written(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one write a loss of power may keep the rows, and not the head: such a segment would be damaged for good."""
    _, log = opened_log(path)
    contents: list[bytes] = []
    sync = os.fdatasync

    def look(file: int) -> None:
        contents.append(os.pread(file, 10**6, 0))
        sync(file)

    monkeypatch.setattr(os, "fdatasync", look)
    add(log)
    heads = [[frame.header.rows for frame in scan(memoryview(data), log.seed)] for data in contents]
    assert heads == [[0], [0, 3]]


def test_a_disk_that_did_not_sync_is_not_asked_again_for_the_same_file(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux says of the second attempt that it went well, whatever became of the pages."""
    journal, log = opened_log(path)
    add(log)
    calls = watch(monkeypatch, "fdatasync")
    with Faults(errno.EIO, 2), pytest.raises(JournalError):
        add(log)
    add(log)
    assert [name for _, name in calls] == [f"{0:020d}.segment", *[f"{3:020d}.segment"] * 2]  # of it the head first
    check(journal)
    journal.close()
    check(RowJournal.view(path))


def test_rows_that_failed_and_could_not_be_cut_off_do_not_count(path: str) -> None:
    """They are whole in the file, but the next segment begins with others."""
    journal, log = opened_log(path)
    add(log)
    with Faults(errno.EIO, 2, stay=True) as faults, pytest.raises(JournalError):
        log.append(rows(100, 9))
    assert faults.failed == ["fdatasync", "ftruncate"]
    add(log, 2)
    assert segments(log) == [f"{0:020d}.segment", f"{3:020d}.segment"]
    journal.close()
    view = RowJournal.view(path)
    assert view.logs[0].end == 5
    check(view)


def test_a_removed_segment_fails_the_append(path: str) -> None:
    _, log = opened_log(path)
    add(log)
    shutil.rmtree(path)
    for _ in range(2):
        with pytest.raises(JournalError, match="cannot write"):
            add(log)
    assert log.end == 3


def test_a_full_disk_is_reported_when_a_journal_is_opened_and_outlived_by_a_commit(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(path)
    with Faults(errno.ENOSPC, 1), pytest.raises(JournalFullError, match=r"journal\.json"):
        journal.begin_query(adopt=False)
    assert journal.meta.query is None
    journal.begin_query(adopt=False)
    with Faults(errno.ENOSPC, 1):
        journal.note_commit({})  # a query goes on, which makes room
    assert not json.loads((Path(path) / "journal.json").read_text())["committed"]
    journal.note_commit({})
    assert json.loads((Path(path) / "journal.json").read_text())["committed"]
    journal.close()
    with Faults(errno.ENOSPC, 1), pytest.raises(JournalFullError):
        opened(path)


def test_a_failed_delete_is_repeated_by_the_next_commit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = opened_log(path, segment_bytes=1)
    for _ in range(4):
        add(log)
    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "delete", mock.Mock(side_effect=OSError(errno.EIO, "no")))
        with pytest.raises(JournalError, match="cannot delete"):
            log.commit(9)
    assert (log.begin, len(segments(log))) == (9, 4)
    log.commit(9)
    assert len(segments(log)) == 1


# --- processes ------------------------------------------------------------------------------------------------------


def test_appended_rows_survive_a_killed_writer(in_memory: str) -> None:
    path = in_memory
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.spark.journals", "pandas"])  # which pyarrow would import in each process
    choose = random.Random(3)
    committed = end = 0
    for run in range(25):
        reports, theirs = processes.Pipe()
        child = processes.Process(target=journals.write_on, args=(path, run, theirs), daemon=True)
        child.start()
        theirs.close()
        assert reports.recv() >= (0, end)  # the rows of the previous run are still there
        for _ in range(choose.randrange(20)):
            committed, end = reports.recv()
        reports.poll(choose.random() / 500)
        child.kill()
        child.join()
        with contextlib.suppress(EOFError), reports:
            while True:
                committed, end = reports.recv()
        view = RowJournal.view(path)
        (log,) = view.logs
        assert log.begin <= committed
        assert log.end >= end
        check(view)
    assert end > 500
    check(opened(path))


def test_one_writer_at_a_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a kill frees the journal: the test above."""
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.2)
    journal = opened(path)
    with pytest.raises(JournalLockedError, match="another query is using this journal"):
        opened(path)
    RowJournal.view(path)
    journal.close()
    assert opened(path).meta.id == journal.meta.id


def test_opening_waits_for_a_query_that_stops(path: str) -> None:
    first = opened(path)
    timer = threading.Timer(0.2, first.close)
    timer.start()
    opened(path).close()
    timer.join()


def test_a_removed_lock_file_still_admits_one_writer(path: str) -> None:
    opened(path)
    (Path(path) / "lock").unlink()
    with LocalFolder(path).lock(), pytest.raises(JournalLockedError), mock.patch.object(folders, "LOCK_SECONDS", 0):
        opened(path)


def add_forever(log: RowLogWriter) -> None:
    while True:
        add(log, 300)


def test_a_full_file_system_loses_no_row(small_disk: Path) -> None:
    path = str(small_disk / "journal")
    journal, log = opened_log(path, segment_bytes=100_000)
    for _ in range(4):  # it stays full, and nothing is half there
        full = log.end
        with pytest.raises(JournalFullError, match="No space left"):
            add_forever(log)
    assert log.end == full > 0
    check(journal)
    check(RowJournal.view(path))
    log.commit(full)
    journal.note_commit({})
    add(log, 300)
    journal.close()
    again = opened(path)
    assert again.logs[0].end == full + 300
    check(again)


# --- whose it is ----------------------------------------------------------------------------------------------------


@table(
    "change, named",
    [
        ({"url": "mqtt://other:1883"}, "url was 'mqtt://host:1883' and is 'mqtt://other:1883'"),
        ({"channels": ["b"]}, r"channels was \['a/#'\] and is \['b'\]"),
        ({"queue": "q"}, "queue was None and is 'q'"),
        ({"qos": "2"}, "qos was '1' and is '2'"),
        ({"url": "mqtt://x", "qos": "0"}, "url was .*; qos was '1' and is '0'"),
    ],
)
def test_another_source_is_refused_unless_it_adopts(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = str(tmp_path / "journal")
    segmented(path)
    other = replace(SOURCE, **change)
    with pytest.raises(JournalMismatchError, match=f"journalPath.*another source: {named}"):
        opened(path, source=other)
    identity = RowJournal.view(path).meta.id
    adopted = opened(path, source=other, adopt=True)
    assert adopted.meta.id == identity
    assert adopted.logs[0].end == 12
    adopted.close()
    opened(path, source=other).close()
    with pytest.raises(JournalMismatchError):
        opened(path)


def test_partitions_may_be_added_and_not_taken_away(path: str) -> None:
    segmented(path)
    more = opened(path, source=replace(SOURCE, partitions=3))
    assert [log.end for log in more.logs] == [12, 0, 0]
    add(more.logs[2])
    more.close()
    assert [log.end for log in RowJournal.view(path).logs] == [12, 0, 3]
    for adopt in (False, True):
        with pytest.raises(JournalMismatchError, match="partitions was 3 and is 2"):
            opened(path, source=replace(SOURCE, partitions=2), adopt=adopt)
    opened(path, source=replace(SOURCE, partitions=3)).close()  # the lock is free


def test_a_query_takes_a_journal_without_commits(path: str) -> None:
    journal = opened(path)
    first = journal.begin_query(adopt=False)
    second = journal.begin_query(adopt=False)
    assert first != second
    journal.note_commit({})
    journal.note_commit({})
    journal.close()
    again = opened(path)
    assert again.meta.query == second
    with pytest.raises(JournalMismatchError, match="adoptJournal"):
        again.begin_query(adopt=False)
    assert again.meta.query == second
    third = again.begin_query(adopt=True)
    again.close()
    last = opened(path)
    assert (last.meta.query, last.meta.committed) == (third, False)


@table(
    "text, what",
    [
        ("", "does not parse"),
        ("{", "does not parse"),
        ("[]", "does not parse"),
        ("{}", "does not parse"),
        ('{"format": 1}', "does not parse"),
        ('{"format": 1, "source": []}', "does not parse"),
        ('{"format": 2, "source": {}}', "has format 2, this version reads 1"),
        ("\udcff", "does not parse"),
        ("partitions", "does not parse"),
        ("more", "does not parse"),
    ],
)
def test_an_invalid_journal_file_is_unreadable(tmp_path: Path, text: str, what: str) -> None:
    path = str(tmp_path / "journal")
    segmented(path)
    meta = Path(path) / "journal.json"
    known = json.loads(meta.read_text())
    if text == "partitions":
        known["source"]["partitions"] = "three"
        text = json.dumps(known)
    elif text == "more":
        text = json.dumps({**known, "colour": "red"})
    meta.write_bytes(text.encode(errors="surrogateescape"))
    for attempt in (opened, RowJournal.view):
        with pytest.raises(JournalUnreadableError, match=what):
            attempt(path)


def test_segments_without_their_journal_are_unreadable(path: str) -> None:
    source = replace(SOURCE, partitions=2)
    journal = opened(path, source=source)
    add(journal.logs[1])  # the first partition has got nothing yet
    journal.close()
    (Path(path) / "journal.json").unlink()
    with pytest.raises(JournalUnreadableError, match=r"there are segments, but no journal\.json"):
        opened(path, source=source)
    with pytest.raises(JournalUnreadableError, match="there is no journal"):
        RowJournal.view(path)


@table("name", ["", "0", "journal.json", "lock"])
def test_a_file_in_place_of_a_folder_is_unreadable(tmp_path: Path, name: str) -> None:
    """A file where a folder is to be, or a folder where a file is to be."""
    path = str(tmp_path / "journal")
    at = Path(path) / name
    at.parent.mkdir(parents=True, exist_ok=True)
    if name in ("", "0"):
        at.write_text("a file")
    else:
        at.mkdir()
    with pytest.raises(JournalUnreadableError, match=r"cannot open: (Not|Is) a directory"):
        opened(path)


def test_a_folder_without_permission_is_unreadable(path: str) -> None:
    segmented(path)
    Path(path).chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65_534)
    try:
        for attempt in (opened, RowJournal.view):
            with pytest.raises(JournalUnreadableError, match="Permission denied"):
                attempt(path)
    finally:
        if is_root:
            os.seteuid(0)
        Path(path).chmod(0o755)


def test_a_reader_without_permission_fails(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segmented(path)
    view = RowJournal.view(path)
    monkeypatch.setattr(LocalFolder, "read", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(JournalUnreadableError, match=r"journalPath.*Permission denied"):
        check(view)


# --- beside a writer ------------------------------------------------------------------------------------------------


def test_a_view_beside_a_writer_never_fails_and_cuts_nothing_off(path: str, no_sync: None) -> None:
    journal, log = opened_log(path, segment_bytes=8000)
    stop = threading.Event()

    def write() -> None:
        choose = random.Random(5)
        while not stop.is_set():
            add(log, choose.choice((1, 2, 50)))
            if choose.random() < 0.05:
                log.commit(choose.randint(log.begin, log.end))

    writer = threading.Thread(target=write)
    writer.start()
    seen = gone = 0
    try:
        while seen < 150 or log.end < 2000:
            view = RowJournal.view(path)
            (part,) = view.logs
            try:
                check(view)
            except DataLossError:
                assert log.begin > part.begin  # it was committed meanwhile
                gone += 1
            seen += 1
    finally:
        stop.set()
        writer.join()
    assert gone < seen
    check(journal)
    end = log.end
    journal.close()
    again = opened(path)
    assert again.logs[0].end == end


@table("when", range(1, 10))
@table("committed", [3, 6, 9, 15])
def test_rows_committed_while_a_view_opens_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int, committed: int
) -> None:
    path = str(tmp_path / "journal")
    _, log = opened_log(path, segment_bytes=1)
    for _ in range(5):
        add(log)
    calls = 0

    def interrupted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: LocalFolder, *arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == when:
                log.commit(committed)
                add(log)
            return real(self, *arguments, **more)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "list", interrupted(LocalFolder.list))
        patched.setattr(LocalFolder, "read", interrupted(LocalFolder.read))
        view = RowJournal.view(path)
    (part,) = view.logs
    assert part.end >= 15
    check(view, max(part.begin, log.begin), part.end)


def test_a_listing_that_saw_half_of_a_commit_is_no_damage(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system tells of the first segment, which is deleted then, and not of the second."""
    files = segmented(path)
    real, listings = LocalFolder.list, 0

    def halfway(self: LocalFolder, name: str = "") -> dict[str, int]:
        nonlocal listings
        found = real(self, name)
        listings += 1
        if listings == 1:
            files[0].unlink()
            files[1].unlink()
            del found[files[1].name]
        return found

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "list", halfway)
        view = RowJournal.view(path)
    assert (view.logs[0].begin, view.logs[0].end) == (6, 12)
    check(view)


def test_a_truncated_segment_does_not_crash_readers(path: str) -> None:
    """A mapped page that is cut off is a bus error."""
    journal = opened(path)
    add(journal.logs[0])
    segment = Path(path) / "0" / f"{0:020d}.segment"
    whole = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"\0" * 2**20)
    data = LocalFolder(path).read(f"0/{segment.name}", copy=True)
    os.truncate(segment, whole)
    assert len(data) == whole + 2**20
    assert bytes(data)[-1:] == b"\0"


def test_the_tail_is_read_despite_a_concurrent_commit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = opened_log(path, segment_bytes=1)
    for _ in range(4):
        add(log)
    real = LocalFolder.read
    done = False

    def committed(self: LocalFolder, *arguments: Any, **more: Any) -> pa.Buffer:
        nonlocal done
        if not done:
            done = True
            log.commit(8)
        return real(self, *arguments, **more)

    monkeypatch.setattr(LocalFolder, "read", committed)
    assert log.tail(100).column("offset").to_pylist() == [6, 7, 8, 9, 10, 11]
    assert log.tail(2).column("offset").to_pylist() == [10, 11]
    assert log.tail(0).num_rows == 0


# --- room -----------------------------------------------------------------------------------------------------------


def disk_bytes(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).glob("*/*.segment"))


def test_segments_are_deleted_when_all_of_their_rows_are_committed(path: str) -> None:
    segmented(path)
    _, log = opened_log(path, segment_bytes=1)
    assert log.backlog == log.bytes_from(0) > 0
    for committed, left in ((0, 4), (2, 4), (3, 3), (5, 3), (6, 2), (11, 1), (12, 1), (99, 1), (4, 1)):
        log.commit(committed)
        assert len(segments(log)) == left
    assert log.backlog == 0
    assert log.begin == 9
    add(log)
    assert log.backlog == log.bytes_from(12) < disk_bytes(path)


def test_disk_space_is_freed_when_all_rows_are_committed(path: str) -> None:
    _, log = opened_log(path)
    payload = Message(b"x" * 100_000, MessageContext("a/b"))
    for _ in range(3):
        for _ in range(15):
            log.append(batch_of([payload], 0, log.end, NOW))
        assert log.backlog > 1_400_000
        log.commit(log.end)
        assert log.backlog == 0
        add(log)
        log.commit(log.end)
        assert disk_bytes(path) < 10_000


def test_a_large_journal_is_not_loaded(path: str) -> None:
    journal, log = opened_log(path, segment_bytes=2**23)
    payload = Message(b"x" * 2**20, MessageContext("a/b"))
    for _ in range(80):
        log.append(batch_of([payload], 0, log.end, NOW))
    journal.close()
    program = (
        "import resource, sys; from pyspark_messaging.journal import RowJournal;"
        "from pyspark_messaging.journal.log import read;"
        "import pyarrow as pa; resident = lambda: next(int(l.split()[1]) for l in open('/proc/self/status') "
        "if l.startswith('RssAnon'));"
        "before = resident(); view = RowJournal.view(sys.argv[1]);"
        "rows = list(read(view.folder, view.logs[0].spans(0, 80)));"
        "assert len(rows) == 80; print(resident() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 40_000, "kB"  # of 80 MiB


# --- any sequence of calls ------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """The log beside a list of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [mock.patch.object(os, name) for name in ("fsync", "fdatasync")]
        for patch in self.patches:
            patch.start()
        self.path = tempfile.mkdtemp()
        #: rows and bytes of each frame ever written
        self.frames: list[tuple[int, int]] = []
        self.committed = 0

    @initialize(segment_bytes=st.sampled_from([1, 3000, 10_000, 2**20]))
    def begin(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.journal = opened(self.path, segment_bytes=segment_bytes)
        self.log = self.journal.logs[0]

    @property
    def end(self) -> int:
        return sum(count for count, _ in self.frames)

    @rule(count=st.sampled_from([1, 1, 1, 2, 5, 60]), times=st.sampled_from([1, 1, 20]))
    def append(self, count: int, times: int) -> None:
        for _ in range(times):
            before = self.log.bytes_from(self.log.begin)
            add(self.log, count)
            self.frames.append((count, self.log.bytes_from(self.log.begin) - before))

    @rule(part=st.floats(0, 1.1))
    def commit(self, part: float) -> None:
        self.log.commit(int(self.end * part))
        self.committed = max(self.committed, min(self.end, int(self.end * part)))

    @rule()
    def reopen(self) -> None:
        self.journal.close()
        self.journal = opened(self.path, segment_bytes=self.segment_bytes)
        self.log = self.journal.logs[0]
        self.committed = self.log.begin

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(self.log.begin, self.end))
        end = data.draw(st.integers(start, self.end))
        check(self.journal, start, end)
        spans = self.log.spans(start, end)
        assert len(spans) == len({span.segment for span in spans})

    @rule(rows=st.integers(0, 300))
    def tail(self, rows: int) -> None:
        found = self.log.tail(rows).column("offset").to_pylist()
        assert found == list(range(max(self.log.begin, self.end - rows), self.end))

    @precondition(lambda self: self.log.begin < self.end)
    @rule(data=st.data(), limit=st.integers(0, 20_000))
    def limited(self, data: st.DataObject, limit: int) -> None:
        start = data.draw(st.integers(self.log.begin, self.end - 1))
        costs = [Fraction(length, count) for count, length in self.frames for _ in range(count)]
        end = self.log.end_within(start, limit)
        assert start < end <= self.end
        assert end == start + 1 or sum(costs[start:end]) <= limit + 1
        assert end == self.end or sum(costs[start : end + 1]) > limit - 2
        assert self.log.end_within(self.end, limit) == self.end

    @rule()
    def view(self) -> None:
        view = RowJournal.view(self.path)
        assert (view.logs[0].begin, view.logs[0].end) == (self.log.begin, self.log.end)
        check(view)

    @invariant()
    def agrees(self) -> None:
        assert self.log.end == self.end
        assert self.log.begin <= self.committed
        offset = size = 0
        for count, length in self.frames:
            offset += count
            size += length if offset > self.committed else 0
        assert self.log.backlog == size

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.path)
        for patch in self.patches:
            patch.stop()


TestAnySequence = Machine.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- object stores --------------------------------------------------------------------------------------------------


@pytest.fixture
def remote() -> Iterator[str]:
    fsspec = pytest.importorskip("fsspec")
    yield "memory://bucket/journal"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_an_object_for_each_append(remote: str) -> None:
    journal, log = opened_log(remote)
    for count in (1, 5, 2):
        add(log, count)
    assert segments(log) == [f"{n:020d}.segment" for n in (0, 1, 6)]
    check(journal)
    check(RowJournal.view(remote))
    log.commit(6)
    assert segments(log) == [f"{6:020d}.segment"]
    journal.close()
    again = opened(remote)
    assert (again.logs[0].begin, again.logs[0].end) == (6, 8)
    add(again.logs[0])
    check(again)


def test_half_an_object_is_overwritten(remote: str, caplog: pytest.LogCaptureFixture) -> None:
    journal, log = opened_log(remote)
    add(log)
    add(log)
    journal.close()
    name = f"0/{3:020d}.segment"
    data = bytes(journal.folder.read(name))
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        journal.folder.write(name, [data[:cut]])
        caplog.clear()
        again = opened(remote)
        assert again.logs[0].end == 3
        assert ("unfinished" in caplog.text) == (cut > 0)
        add(again.logs[0], 2)
        assert again.logs[0].end == 5
        check(again)
        again.close()


def test_a_damaged_object_is_an_error(remote: str) -> None:
    journal = opened(remote)
    for _ in range(3):
        add(journal.logs[0])
    journal.close()
    name = f"0/{3:020d}.segment"
    data = bytes(journal.folder.read(name))
    journal.folder.write(name, [data[:-1]])
    with pytest.raises(JournalCorruptError, match="rows 3 to 6 are missing"):
        opened(remote)


@pytest.mark.parametrize("where", ["path", "remote"])
def test_marks_of_one_query_are_found_and_deleted(where: str, request: pytest.FixtureRequest) -> None:
    journal = opened(request.getfixturevalue(where))
    assert journal.mark is None
    journal.begin_query(adopt=False, starts={0: 0})
    stale = journal.mark
    journal.begin_query(adopt=False, starts={0: 0})
    mark = journal.mark
    assert stale is not None
    assert mark is not None
    leave_mark(journal.folder, stale)  # a task of the query before
    assert not journal.is_marked()
    for _ in range(2):
        leave_mark(journal.folder, mark)
    assert journal.is_marked()
    journal.note_read()
    assert journal.mark is None
    assert not any(name.startswith("read-") for name in journal.folder.list())


def test_the_older_of_two_writers_fails(remote: str) -> None:
    older = opened(remote)
    add(older.logs[0])
    newer = opened(remote)
    add(newer.logs[0])
    for attempt in (lambda: add(older.logs[0]), lambda: older.begin_query(adopt=True), lambda: older.note_commit({})):
        with pytest.raises(JournalLockedError, match="taken this journal over"):
            attempt()
    assert older.logs[0].end == 3
    add(newer.logs[0])
    check(newer)


def test_a_writer_that_is_overtaken_while_it_writes_has_written_nothing(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, log = opened_log(remote)
    add(log)
    real = folders.RemoteFolder.write

    def overtaken(self: folders.RemoteFolder, name: str, parts: Any) -> int:
        if name.startswith("0/"):
            real(self, "owner", [b"somebody else"])
        return real(self, name, parts)

    monkeypatch.setattr(folders.RemoteFolder, "write", overtaken)
    with pytest.raises(JournalLockedError):
        add(log)
    assert log.end == 3


def test_a_store_that_fails_is_an_error_of_the_journal(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of object stores have errors of their own."""
    journal, log = opened_log(remote)
    add(log)
    real = folders.RemoteFolder.write
    monkeypatch.setattr(folders.RemoteFolder, "write", mock.Mock(side_effect=OSError("no")))
    with pytest.raises(JournalError, match="cannot write: no"):
        add(log)
    monkeypatch.setattr(folders.RemoteFolder, "write", real)
    add(log)
    assert log.end == 6
    check(journal)


@table("is_sealed", [True, False])
@table("field", ["id", "check"])
def test_a_changed_character_of_the_identity_is_refused_and_restored(
    tmp_path: Path, is_sealed: bool, field: str
) -> None:
    path = str(tmp_path / "journal")
    journal, log = opened_log(path)
    journal.begin_query(adopt=False)
    add(log)
    add(log)
    journal.close()
    meta = Path(path, "journal.json")
    values = json.loads(meta.read_text())
    if not is_sealed:
        if field != "id":
            return  # earlier versions: the segments tell only whether the id is right
        del values["check"]
        meta.write_text(json.dumps(values, indent=1))
    intact = meta.read_text()
    wanted = str(values[field])
    meta.write_text(intact.replace(wanted, ("1" if wanted[0] != "1" else "2") + wanted[1:]))
    before = {each: each.read_bytes() for each in Path(path).rglob("*") if each.is_file()}
    for attempt in (opened, RowJournal.view):
        with pytest.raises(JournalUnreadableError, match="messaging journal repair"):
            attempt(path)
    assert {each: each.read_bytes() for each in Path(path).rglob("*") if each.is_file()} == before
    repair(path)
    assert meta.read_text() == intact
    check(opened(path), 0, 6)


@table("gap", [1, 1000, 2**32 + 5, 2**34])
def test_offsets_that_are_skipped_have_no_rows_and_are_not_used(tmp_path: Path, gap: int) -> None:
    path = str(tmp_path / "journal")
    journal, log = opened_log(path)
    add(log)
    log.skip_to(3 + gap)
    log.skip_to(2)
    end = 3 + gap
    batch = rows(0, 3)
    log.append(batch)
    assert log.end == end + 3
    journal.close()
    for each in (opened(path), RowJournal.view(path)):
        (found,) = each.logs
        assert (found.begin, found.end) == (0, end + 3)
        batches = [*read(each.folder, found.spans(1, end + 2))]
        assert [found.num_rows for found in batches] == [2, 2]
    assert log.tail(2).num_rows == 2


def test_the_files_of_a_journal_are_private_in_a_folder_that_everybody_may_read(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        (tmp_path / "journal").mkdir(mode=0o777)
        journal, log = opened_log(str(tmp_path / "journal"))
        journal.begin_query(adopt=False, starts={0: 0})
        add(log)
        leave_mark(journal.folder, str(journal.mark))
    finally:
        os.umask(umask)
    files = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.rglob("*") if each.is_file()}
    assert len(files) >= 5
    assert set(files.values()) == {0o600}


# --- cursors --------------------------------------------------------------------------------------------------------

BEFORE_CURSORS = Path(__file__).parent / "data" / "written_before_cursors"


def restarted(path: str, **more: Any) -> RowJournal:
    _OPENED.pop().close()
    return opened(path, **more)


@pytest.mark.parametrize("where", ["path", "remote"])
def test_the_position_of_a_commit_outlives_the_journal(where: str, request: pytest.FixtureRequest) -> None:
    journal, log = opened_log(request.getfixturevalue(where))
    journal.begin_query(adopt=False)
    add(log, 7)
    assert journal.cursor == {0: 0}
    journal.note_commit({0: 5})
    for _ in range(2):
        journal = restarted(journal.folder.path)
        assert (journal.cursor, journal.used(0)) == ({0: 5}, 7)
    journal.note_commit({0: 3})  # an older checkpoint was put back
    assert restarted(journal.folder.path).cursor == {0: 3}


@pytest.mark.parametrize("where", ["path", "remote"])
def test_the_cursor_of_another_query_counts_for_nothing(where: str, request: pytest.FixtureRequest) -> None:
    """A query that has lost the journal may store its cursor last; what it kept would fill the journal."""
    journal, _ = opened_log(request.getfixturevalue(where), segment_bytes=1)
    journal.begin_query(adopt=False)
    other = json.dumps({"journal": journal.meta.id, "offsets": {"0": 4}})
    journal.folder.write("cursor-other", [other.encode()])
    journal = restarted(journal.folder.path, segment_bytes=1)
    assert journal.cursor == {0: 0}
    journal.begin_query(adopt=True)
    assert [name for name in journal.folder.list() if name.startswith("cursor-")] == [f"cursor-{journal.meta.query}"]


def test_a_second_query_leaves_the_cursor_of_a_running_one_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.1)
    journal, log = opened_log(path)
    journal.begin_query(adopt=False)
    add(log)
    journal.note_commit({0: 2})
    for _ in range(2):
        with pytest.raises(JournalLockedError, match="another query is using this journal"):
            opened(path)
        add(log)
        journal.note_commit({0: log.end - 1})
    assert restarted(path).cursor == {0: 8}


def test_a_query_that_takes_a_journal_over_has_a_cursor_that_the_first_one_does_not_move(remote: str) -> None:
    older, log = opened_log(remote, segment_bytes=1)
    older.begin_query(adopt=False)
    for _ in range(3):
        add(log)
    older.note_commit({0: 4})
    newer = opened(remote, segment_bytes=1)
    newer.begin_query(adopt=True)
    for attempt in (lambda: log.commit(9), lambda: older.note_commit({0: 9})):
        with pytest.raises(JournalLockedError, match="taken this journal over"):
            attempt()
    check(newer, 0, 9)
    newer.note_commit({0: 2})
    assert restarted(remote).cursor == {0: 2}


@table("text", ["", "[]", "{", '{"journal": "another", "offsets": {"0": 9}}'])
def test_a_cursor_that_is_damaged_or_foreign_deletes_no_row(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "journal")
    journal, log = opened_log(path)
    journal.begin_query(adopt=False)
    add(log)
    (Path(path) / f"cursor-{journal.meta.query}").write_text(text)
    journal = restarted(path)
    assert (journal.cursor, journal.used(0)) == ({}, 3)
    assert ("does not parse" in caplog.text) == ("another" not in text)


def test_a_cursor_that_has_no_room_is_stored_later(path: str) -> None:
    journal, log = opened_log(path)
    journal.begin_query(adopt=False)
    journal.note_commit({})
    add(log)
    with Faults(errno.ENOSPC, 1):
        journal.note_commit({0: 3})
    stored = Path(path) / f"cursor-{journal.meta.query}"
    assert json.loads(stored.read_text())["offsets"] == {"0": 0}
    journal.note_commit({})
    assert json.loads(stored.read_text())["offsets"] == {"0": 3}


def test_queries_begin_on_a_full_disk_one_after_the_other(small_disk: Path) -> None:
    """The cursor must not take the room that is kept for ``journal.json``."""
    journal = opened(str(small_disk / "journal"))
    for _ in range(3):
        ballast(small_disk)
        assert journal.begin_query(adopt=False) == journal.meta.query


def test_a_journal_of_the_version_before_cursors_is_drained(path: str) -> None:
    shutil.copytree(BEFORE_CURSORS / "journal", path)
    offsets = json.loads((BEFORE_CURSORS / "checkpoint.json").read_text())["offsets"]
    source = replace(SOURCE, partitions=2)
    journal = opened(path, source=source, segment_bytes=3000)
    assert [(log.begin, log.end) for log in journal.logs] == [(0, 20), (10, 20)]
    check(journal)
    with pytest.raises(JournalMismatchError, match="adoptJournal"):
        journal.begin_query(adopt=False)
    assert journal.cursor == {}
    journal.note_commit({int(partition): offset for partition, offset in offsets.items()})
    assert journal.cursor == {0: 7, 1: 12}
    for log in journal.logs:
        add(log)
        assert [
            value
            for batch in read(journal.folder, log.spans(offsets[str(log.partition)], 23))
            for value in batch.column("value").to_pylist()
        ] == [journals.value(n) for n in range(offsets[str(log.partition)], 23)]
    for log in journal.logs:
        log.commit(23)
    journal.note_commit({0: 23, 1: 23})
    assert [log.backlog for log in journal.logs] == [0, 0]
    again = restarted(path, source=source)
    assert [(log.end, again.cursor[log.partition]) for log in again.logs] == [(23, 23)] * 2

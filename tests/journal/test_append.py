"""Appending: from many threads, with deadlines, interrupted, and while the journal is closed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import (
    ArgumentError,
    ClosedError,
    JournalError,
    JournalFullError,
    JournalRangeError,
    MessagingError,
    WouldBlockError,
)
from messaging.execution import Promise, clock
from messaging.journal import Journal, Record, commit, encode_record
from messaging.journal.commit import Blocking, Turns
from messaging.journal.reader import RecordReader
from messaging.model import Message, MessageContext
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.interrupts import again, interrupt_everywhere
from tests.journal.conftest import Open
from tests.journal.logs import Lost, add, append, filled, offsets, writer
from tests.threads import in_background, in_threads


def payloads(journal: Journal) -> list[bytes]:
    return [each.payload for each in journal.read()]


def calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, str]]:
    """Record the calls of these functions of ``os``, each with the name of its file."""
    found: list[tuple[str, str]] = []

    def spy(name: str, real: Callable[..., Any], file: int, *rest: Any) -> Any:
        found.append((name, Path(f"/proc/self/fd/{file}").readlink().name))
        return real(file, *rest)

    for name in names:
        monkeypatch.setattr(os, name, partial(spy, name, getattr(os, name)))
    return found


# --- what an append promises


def test_an_append_returns_when_the_disk_has_the_record(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened()
    journal.append("a", b"0")
    seen = calls(monkeypatch, "pwritev", "fsync", "fdatasync")
    assert journal.append("a", b"1") == 1
    segment = f"{0:020d}.segment"
    assert seen == [("pwritev", segment), ("fdatasync", segment)]
    assert journal.submit("a", b"2").result(PATIENCE) == 2
    assert seen == [("pwritev", segment), ("fdatasync", segment)] * 2


def test_the_interval_policy_syncs_in_time_and_never_does_not(
    virtual_clock: VirtualClock, path: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(fsync="interval", fsync_interval=10.0)
    journal.append("a", b"0")  # its segment exists
    virtual_clock.advance(20.0)
    seen = calls(monkeypatch, "fdatasync")
    for count in (1, 2):
        for _ in range(3):
            journal.append("a", b"x")
        virtual_clock.advance(9.0)
        assert len(seen) == count - 1
        virtual_clock.advance(1.1)
        assert len(seen) == count
        virtual_clock.advance(60.0)  # nothing to sync
        assert len(seen) == count
    journal.close()
    never = opened(f"{path}-never", fsync="never")
    never.append("a", b"0")
    del seen[:]
    never.append("a", b"x")
    never.close()
    assert seen == []


def test_sync_reaches_closed_segments_too(path: str, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(opened, 3, fsync="never", segment_bytes=1)
    seen = calls(monkeypatch, "fdatasync")
    journal.sync()
    assert {name for _, name in seen if name.endswith(".segment")} == {f"{n:020d}.segment" for n in range(3)}


@table("closing", [False, True])
@pytest.mark.usefixtures("virtual_clock")
def test_a_sync_that_failed_in_the_background_is_told_to_the_next_caller(
    opened: Open, closing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = filled(opened, 1, fsync="interval", fsync_interval=5.0, segment_bytes=1 if closing else 10**6)

    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with contextlib.suppress(JournalError):
            journal.append("a", b"x")
        eventually(lambda: "Input/output error" in caplog.text or closing)
    with pytest.raises(JournalError, match="cannot sync: Input/output error"):
        journal.sync()
    journal.append("a", b"x")
    journal.sync()
    journal.close()


def test_no_trimmed_segment_is_remembered_for_a_sync(
    in_memory: str, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    journal = filled(opened, 100, where=in_memory, fsync="never", max_records=1, full="drop_oldest")
    tracemalloc.start()
    try:
        append(journal, 400)
        gc.collect()
        # other threads of the process allocate, too
        of_journal = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/messaging/journal/*")])
        assert sum(each.size for each in of_journal.statistics("filename")) < 20_000
    finally:
        tracemalloc.stop()


def test_appends_of_many_threads_share_syncs_and_keep_their_order(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened()
    seen: list[int] = []

    def sync(file: int) -> None:
        seen.append(file)
        time.sleep(0.001)  # sleeps: appends share the time that a disk takes

    monkeypatch.setattr(os, "fdatasync", sync)
    stored: dict[int, list[int]] = {}

    def work(number: int) -> None:
        stored[number] = [journal.append("a", b"%d %d" % (number, n)) for n in range(50)]

    in_threads(32, work)
    assert sorted(offset for each in stored.values() for offset in each) == list(range(1600))
    found = payloads(journal)
    for number, each in stored.items():
        assert each == sorted(each)
        assert [found[offset] for offset in each] == [b"%d %d" % (number, n) for n in range(50)]
    assert len(seen) < 1000


def test_promises_resolve_in_order_from_any_event_loop(opened: Open) -> None:
    journal = opened()

    async def main() -> list[int]:
        with pytest.raises(WouldBlockError, match=r"await.*submit"):
            journal.append("a", b"x")
        return list(await asyncio.gather(*(journal.submit("a", b"%d" % n) for n in range(500))))

    assert asyncio.run(main()) == list(range(500))
    assert payloads(journal) == [b"%d" % n for n in range(500)]


def test_a_submit_and_an_append_of_one_thread_keep_their_order(opened: Open) -> None:
    journal = opened()
    for n in range(200):
        journal.submit("a", b"%d" % (2 * n))
        journal.append("a", b"%d" % (2 * n + 1))
    assert payloads(journal) == [b"%d" % n for n in range(400)]


def test_an_empty_payload_a_large_one_and_a_whole_message(path: str, opened: Open) -> None:
    journal = opened()
    large = os.urandom(1000) * 20_000
    message = Message(b"m", MessageContext("a/b", extensions={"headers": {"k": "v"}}))
    journal.append("a", b"")
    journal.append("a", large)
    journal.append_message(message, message_id="id")
    for _ in range(2):
        empty, big, last = journal.read()
        assert (empty.payload, big.payload == large, last.message, last.message_id) == (b"", True, message, "id")
        journal.close()
        journal = opened()


@table(
    "arguments",
    [
        {"fsync": "sometimes"}, {"full": "explode"}, {"fsync": []}, {"max_bytes": 0}, {"max_bytes": 1.5},
        {"max_records": True}, {"max_age": float("nan")}, {"timeout": -1}, {"segment_bytes": "8"},
        {"lock_timeout": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_mean_nothing_are_refused(path: str, arguments: Any) -> None:
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        Journal.open(path, **arguments)
    assert not Path(path).exists()


def test_a_timeout_that_is_no_number_is_refused(opened: Open) -> None:
    journal = opened()
    for timeout in ("x", float("nan")):
        with pytest.raises(ArgumentError, match="timeout"):
            journal.append("a", b"", timeout=timeout)  # type: ignore[arg-type]
    assert journal.end == 0


# --- reading beside appending


def test_a_reader_misses_no_record_that_is_appended_while_it_reads(opened: Open) -> None:
    journal = opened(fsync="never", segment_bytes=20_000)
    cursors = [journal.cursor(f"c{n}") for n in range(3)]
    count = 6_000

    def read(number: int) -> None:
        seen = 0
        while seen < count:
            for record in cursors[number].read(timeout=PATIENCE):
                assert record.offset == seen
                assert record.payload == b"%d" % seen
                seen += 1
            cursors[number].commit(wait=False)

    def work(number: int) -> None:
        if number:
            read(number - 1)
            return
        for n in range(count):
            journal.append("a", b"%d" % n)

    in_threads(4, work)
    assert journal.info().damage == []


def test_a_frame_that_is_appended_while_a_chunk_is_read_is_not_passed_over(
    in_memory: str, no_sync: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader knows the end from before, and finds the frame behind it in the file."""
    lost = Lost([])
    log = writer(in_memory, lost=lost)
    add(log, 2)
    real, appended = log.segment_name, False

    def segment_name(segment: int) -> str:
        nonlocal appended
        if not appended:
            appended = True
            add(log, 3)
        return real(segment)

    monkeypatch.setattr(log, "segment_name", segment_name)
    reader = RecordReader(log, 0)
    assert [each.offset for _ in range(2) for each in reader.take()] == [0, 1, 2, 3, 4]
    assert lost.found == []
    log.close()


def test_segments_rolled_beside_appends_stay_in_order(opened: Open) -> None:
    journal = opened(fsync="never")
    done = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            while not done.is_set():
                journal._log.start_segment()
        else:
            for n in range(1000):
                journal.append("a", b"%d" % n)
            done.set()

    in_threads(2, work)
    firsts = [segment.first for segment in journal._log.segments]
    assert firsts == sorted(set(firsts))
    assert payloads(journal) == [b"%d" % n for n in range(1000)]
    assert journal.info().damage == []


def test_ranges_that_are_not_there_are_refused(opened: Open) -> None:
    journal = filled(opened, 4, segment_bytes=1)
    journal.trim(2)
    assert offsets(journal.read()) == [2, 3]
    assert offsets(journal.read(3, 99)) == [3]
    assert list(journal.read(4)) == []
    for start in (0, 1, 5, -1):
        with pytest.raises(JournalRangeError, match=f"offset {start} is asked for, and 2 to 4 are there"):
            journal.read(start)


# --- closing


def test_close_stores_what_was_submitted_and_refuses_the_rest(path: str) -> None:
    journal = Journal.open(path)
    promises = [journal.submit("a", b"%d" % n) for n in range(300)]
    journal.close()
    journal.close()
    assert [promise.result(0) for promise in promises] == list(range(300))
    for attempt in (
        lambda: journal.append("a", b"x"),
        lambda: journal.submit("a", b"x"),
        lambda: journal.cursor("c"),
        lambda: journal.trim(0),
        lambda: journal.remove_cursor("c"),
        journal.sync,
        journal.dead_letters,
    ):
        with pytest.raises(ClosedError):
            attempt()
    with Journal.open(path) as again:
        assert len(payloads(again)) == 300


def test_every_append_that_meets_close_has_an_outcome(path: str) -> None:
    for _ in range(15):
        journal = Journal.open(path, fsync="never")
        outcomes: Counter[str] = Counter()
        begun = threading.Barrier(9)

        def work(journal: Journal = journal, outcomes: Counter[str] = outcomes, begun: Any = begun) -> None:
            begun.wait()
            while True:
                try:
                    journal.append("a", b"x")
                    outcomes["stored"] += 1
                except MessagingError as error:
                    outcomes[type(error).__name__] += 1
                    return

        before = journal.end
        joins = [in_background(work) for _ in range(8)]
        begun.wait()
        journal.close()
        for join in joins:
            join()
        with Journal.open(path) as again:
            assert again.end - before == outcomes["stored"]
        assert outcomes["ClosedError"] + outcomes["JournalError"] == 8


@table("has_thread", [False, True], ids=["no thread yet", "a thread"])
def test_an_append_that_finds_the_journal_open_a_moment_before_close_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch, has_thread: bool
) -> None:
    journal = Journal.open(path)
    if has_thread:
        journal.submit("a", b"x").result(PATIENCE)
    errors: list[BaseException | None] = []

    def close_late() -> None:
        monkeypatch.undo()
        journal.close()

    monkeypatch.setattr(journal._cursors, "refuse_closed", close_late)

    def work() -> None:
        try:
            journal.append("a", b"y")
        except MessagingError as error:
            errors.append(error)

    in_background(work)()
    assert [type(error) for error in errors] == [ClosedError]


def test_a_blocked_append_is_refused_when_the_journal_is_closed(path: str) -> None:
    journal = Journal.open(path, max_records=1)
    journal.append("a", b"x")
    waiting = [journal.submit("a", b"y") for _ in range(3)]
    eventually(lambda: journal._commit._full is not None)
    journal.close()
    for promise in waiting:
        with pytest.raises((ClosedError, JournalFullError)):
            promise.result(0)


def test_an_entry_whose_callback_fails_keeps_no_other_from_its_outcome(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        record = encode_record("a", b"x")
        count = 1
        deadline = float("inf")

        def note_stored(self, offset: int) -> None:
            raise RuntimeError(f"broken at {offset}")

        def note_refused(self, error: MessagingError) -> None:
            raise RuntimeError("broken")

    journal = opened()
    journal.put(Broken())
    assert journal.append("a", b"y") == 1
    assert "failed to report a stored record" in caplog.text


# --- deadlines


@pytest.mark.usefixtures("virtual_clock")
def test_each_blocked_append_is_refused_at_its_own_deadline(opened: Open) -> None:
    journal = filled(opened, 1, max_records=1, timeout=60)
    began = clock.monotonic()
    slow = [journal.submit("a", b"x" * 1000) for _ in range(3_000)]  # more than one batch of them
    fast = journal.submit("a", b"y", timeout=5.0)
    with pytest.raises(JournalFullError, match="it is full: 1 records"):
        fast.result(PATIENCE)
    assert 5.0 <= clock.monotonic() - began < 5.5
    with pytest.raises(JournalFullError):
        journal.append("a", b"z", timeout=0)
    assert not any(promise.done() for promise in slow)
    cursor = journal.cursor("c")
    cursor.commit(1)
    assert slow[0].result(PATIENCE) == 1
    journal.close()
    assert all(isinstance(promise.exception(0), JournalFullError) for promise in slow[1:])


@table("size, least, most", [(2**20, 60, 64), (0, 100_000, 200_000)])
def test_submitting_more_than_the_bound_is_refused(
    tmp_path: Path, opened: Open, size: int, least: int, most: int
) -> None:
    journal = filled(opened, 1, where=tmp_path, max_records=1)
    waiting: list[Promise[int]] = []

    def submit_on() -> None:
        while True:
            waiting.append(journal.submit("a", b"x" * size))

    with pytest.raises(JournalFullError, match="wait to be written"):
        submit_on()
    assert least <= len(waiting) <= most
    journal.close()
    assert all(promise.exception(0) is not None for promise in waiting)


# --- interrupts


def test_an_interrupted_append_leaves_a_working_journal(in_memory: str, no_sync: None) -> None:
    count = 0
    journal = Journal.open(f"{in_memory}/j", fsync="interval", fsync_interval=3600)
    acknowledged: list[int] = []

    def run() -> None:
        nonlocal count
        again(lambda: acknowledged.append(journal.append("a", b"x")))

    def check() -> None:
        nonlocal count
        # a later append is stored: no lock stayed acquired, no offset is lost
        offset = journal.append("a", b"check", timeout=5)
        assert offset == journal.end - 1
        found = [each.offset for each in journal.read(max(0, offset - 3))]
        assert found == list(range(max(0, offset - 3), offset + 1))
        assert acknowledged[-1] < offset

    places = interrupt_everywhere(run, check, "journal/commit.py", "journal/log.py", "journal/segments.py")
    assert places > 40
    journal.close()
    with Journal.open(f"{in_memory}/j") as reopened:
        found = offsets(reopened.read())
        assert found == list(range(len(found)))
        assert set(acknowledged) <= set(found)
        assert reopened.info().damage == []


def test_a_signal_ends_a_blocked_append(opened: Open) -> None:
    journal = filled(opened, 1, max_records=1, timeout=60)

    def interrupt() -> None:
        eventually(lambda: len(journal._commit.waiting) == 1)
        os.kill(os.getpid(), signal.SIGINT)

    join = in_background(interrupt)
    with pytest.raises(KeyboardInterrupt):
        journal.append("a", b"y")
    join()
    journal.cursor("c").commit(1)
    eventually(lambda: journal.end == 2)  # it was waiting, and its outcome is unknown to its caller


# --- a disk that fails


def test_a_failed_write_refuses_its_records_and_the_next_one_is_stored(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened()
    journal.append("a", b"0")
    real = os.pwritev
    failing = True

    def broken(*arguments: Any) -> int:
        if failing:
            raise OSError(errno.EIO, "broken")
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(JournalError, match="cannot write: broken"):
        journal.append("a", b"1")
    with pytest.raises(JournalError, match="cannot write: broken"):
        journal.submit("a", b"1").result(PATIENCE)
    failing = False
    assert journal.append("a", b"2") == 1
    assert payloads(journal) == [b"0", b"2"]


def test_a_defect_of_the_journal_leaves_no_caller_waiting(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened()
    with monkeypatch.context() as patched:
        patched.setattr(journal._log, "append_frame", lambda *_, **__: 1 / 0)
        with pytest.raises(JournalError, match="cannot write: ZeroDivisionError"):
            journal.submit("a", b"x").result(PATIENCE)
    assert "failed to write 1 records" in caplog.text
    assert journal.append("a", b"x") == 0


@table("fsync", ["always", "interval"])
def test_a_journal_whose_thread_cannot_be_started_stores_and_acknowledges(
    tmp_path: Path, opened: Open, fsync: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(target: object, name: str) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(commit, "start_thread", refuse)
        journal = opened(tmp_path, fsync=fsync, max_age=3600)
        cursor = journal.cursor("c")
        assert [journal.append("a", b"x") for _ in range(3)] == [0, 1, 2]
        cursor.acknowledge(0)
        cursor.commit(2)
        with pytest.raises(JournalError, match="cannot write: can't start new thread"):
            journal.submit("a", b"refused")
        assert caplog.text.count("can't start new thread") == 1
    assert journal.submit("a", b"x").result(PATIENCE) == 3
    journal.close()
    with Journal.view(tmp_path) as view:
        assert (offsets(view.read()), view.cursors()) == ([0, 1, 2, 3], {"c": 2})


def test_a_caller_gets_its_outcome_though_those_that_were_to_wake_it_are_gone() -> None:
    turns = Turns()
    entries = [Blocking(b"", 0.0, turns) for _ in range(5)]
    for offset, entry in enumerate(entries):
        entry.note_stored(offset)
    turns.begin()  # the callers of the first ones were interrupted
    assert [each.result() for each in reversed(entries[2:])] == [4, 3, 2]


# --- finding a place


def numbered(journal: Journal) -> None:
    """Append 2,000 records with their numbers as ids."""
    for number in range(2000):  # each in a frame of its own
        journal.append("a", b"x" * 20, message_id=str(number), timestamp=number // 10)


def test_seek_finds_the_segment_of_a_place(opened: Open) -> None:
    journal = opened(segment_bytes=4096)
    assert journal.seek(lambda _: True) == journal.seek(lambda _: False) == journal.tail(0) == 0
    numbered(journal)
    segments = journal.info().segments
    assert segments > 10
    read: list[int] = []
    for wanted in (0, 1, 999, 1000, 1999, 2000):
        read.clear()

        def is_before(record: Record, wanted: int = wanted) -> bool:
            read.append(record.offset)
            return int(record.message_id or "") < wanted

        at = journal.seek(is_before)
        assert at <= wanted
        assert wanted - at < 200, "the segment before is left out"
        assert len(read) < 8, "few records are read"
    assert 1990 - journal.seek(lambda record: record.timestamp < 199) < 200
    with Journal.view(journal.path) as view:
        assert view.seek(lambda record: record.offset < 1000) == journal.seek(lambda record: record.offset < 1000)
        assert view.size == journal.size == journal.info().bytes


def test_the_tail_is_the_last_segments(opened: Open) -> None:
    journal = opened(segment_bytes=4096)
    numbered(journal)
    assert journal.tail(2**40) == journal.begin == 0
    last, some = journal.tail(0), journal.tail(20_000)
    assert 1800 < last < 2000
    assert 0 < some < last
    journal.trim(some + 1)
    assert journal.tail(2**40) == journal.begin == some


def test_seek_passes_damage(opened: Open, path: str) -> None:
    journal = opened(segment_bytes=4096)
    numbered(journal)
    journal.close()
    files = sorted(Path(path).rglob("*.segment"))
    for file in files[5:8]:
        file.write_bytes(b"?" * file.stat().st_size)
    journal = opened(segment_bytes=4096)
    for wanted in range(0, 2000, 200):
        at = journal.seek(lambda record, wanted=wanted: int(record.message_id or "") < wanted)  # type: ignore[misc]
        assert at <= wanted

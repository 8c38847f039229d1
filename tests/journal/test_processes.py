"""Several processes: killed writers, one writer at a time, readers beside a writer, forks."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from messaging.errors import ClosedError, JournalLockedError, JournalRangeError
from messaging.journal import Journal, folders
from messaging.journal.folders import LocalFolder
from messaging.testing.waiting import PATIENCE
from tests.forking import ForkedProcess
from tests.journal.conftest import Open
from tests.journal.logs import append, filled, is_right, offsets, payload, segment_files

WRITER = """
import os, random, sys, threading
from messaging.journal import Journal
from tests.journal.logs import payload

path, seed = sys.argv[1], int(sys.argv[2])
choose = random.Random(seed)
journal = Journal.open(path, segment_bytes=20_000, fsync="never" if seed % 2 else "always")
cursor = journal.cursor("c")
end = journal.end
os.write(1, b"%d %d\\n" % (cursor.position, end))
while True:
    batch = [journal.submit(f"a/{n % 3}", payload(n), message_id=f"id{n}", timestamp=n)
             for n in range(end, end + choose.choice((1, 3, 60)))]
    for promise in batch:
        end = promise.result(20) + 1
    os.write(1, b"%d %d\\n" % (cursor.position, end))
    if choose.random() < 0.2:
        cursor.commit(choose.randint(cursor.position, end))
        os.write(1, b"%d %d\\n" % (cursor.position, end))
"""


@contextlib.contextmanager
def running(code: str, *arguments: str) -> Iterator[tuple[ForkedProcess, IO[bytes]]]:
    """Run a program until the block ends; yield it and its stdout."""
    process = ForkedProcess(code, arguments)
    assert process.stdout is not None
    with process.stdin, process.stdout, process.stderr:
        try:
            yield process, process.stdout
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(PATIENCE)


def test_stored_records_and_positions_survive_killed_writers(in_memory: str) -> None:
    path = f"{in_memory}/j"
    choose = random.Random(3)
    position = end = 0
    for run in range(6):
        with running(WRITER, path, str(run)) as (process, out):
            lines = [out.readline() for _ in range(1 + choose.randrange(15))]
            time.sleep(choose.random() / 500)  # sleeps: the kill meets another process at any moment
            process.kill()
            process.wait(PATIENCE)
            lines += out.readlines()
        said = [tuple(map(int, line.split())) for line in lines if line.endswith(b"\n")]
        assert said[0][0] >= position, "a stored position is gone"
        assert said[0][1] >= end, "stored records are gone"
        position, end = said[-1]
        with Journal.view(path) as view:
            assert view.cursors()["c"] >= position
            assert view.begin <= view.cursors()["c"]
            assert view.end >= end
            offsets = [each.offset for each in view.read() if is_right(each)]
            assert offsets == list(range(view.begin, view.end))
    assert end > 100
    with Journal.open(path) as journal:
        assert journal.info().damage == []


def outcome(code: str, *arguments: str) -> str:
    """Run a program to its end; return what it wrote."""
    with running(code, *arguments) as (process, out):
        text = out.read() + process.stderr.read()
        process.wait(PATIENCE)
    return text.decode()


OPENING = """
import sys
from messaging.journal import Journal, folders

def try_lock(*arguments, real=folders._try_lock):
    lock = real(*arguments)
    if lock is None:
        print("refused", flush=True)
    return lock

folders._try_lock = try_lock
try:
    Journal.open(sys.argv[1], lock_timeout=float(sys.argv[2])).append("a", b"second")
    print("opened")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_second_writer_is_refused_in_this_process_and_in_another(path: str, opened: Open) -> None:
    journal = filled(opened, 1)
    with pytest.raises(JournalLockedError, match="another writer has this journal open"):
        Journal.open(path)
    assert "JournalLockedError" in outcome(OPENING, path, "0")
    with Journal.view(path) as view:
        assert len(list(view.read())) == 1
    journal.append("a", b"still the writer")
    with running(OPENING, path, "20") as (_, out):
        assert out.readline() == b"refused\n"
        journal.close()
        assert out.read().splitlines()[-1] == b"opened"
    assert [each.payload for each in opened().read()] == [b"x", b"still the writer", b"second"]


READING_BESIDE = """
import sys
from messaging.journal import Journal
from tests.journal.logs import payload

journal = Journal.open(sys.argv[1], fsync="never", segment_bytes=4000)
cursor = journal.cursor("c")
print("begun", flush=True)
for n in range(int(sys.argv[2])):
    journal.append(f"a/{n % 3}", payload(n), message_id=f"id{n}", timestamp=n)
    if n % 50 == 49:
        cursor.commit(n - 120 if n > 120 else 0, wait=False)
journal.close()
sys.exit()
"""


def test_a_reader_beside_a_writer_that_rolls_and_trims_sees_whole_records_in_order(in_memory: str) -> None:
    count = 12_000
    path = f"{in_memory}/j"
    with running(READING_BESIDE, path, str(count)) as (process, out):
        assert out.readline() == b"begun\n"
        following = seen = skipped = 0
        with Journal.view(path) as view:
            while following < count:
                view.refresh()
                try:
                    records = view.read(max(following, view.begin))
                except JournalRangeError:
                    continue
                for record in records:
                    assert is_right(record)
                    assert record.offset >= following
                    skipped += record.offset - following
                    following = record.offset + 1
                    seen += 1
                with Journal.view(path) as fresh:
                    assert fresh.begin <= fresh.end
                assert process.poll() in (None, 0), process.stderr.read()
            assert view.info().damage == []
            assert view.cursors()["c"] > 0
        assert process.wait(PATIENCE) == 0
    assert seen > count // 10
    assert seen + skipped == count


def test_a_view_of_trimmed_segments_continues_with_the_oldest(path: str, opened: Open) -> None:
    journal = filled(opened, 10, segment_bytes=1)
    with Journal.view(path) as view:
        records = view.read()
        journal.trim(6)
        assert offsets(records) == [6, 7, 8, 9]
        assert view.info().damage == []
    with Journal.view(path) as view:
        append(journal, 5)
        assert offsets(view.read()) == [6, 7, 8, 9]
        view.refresh()
        assert offsets(view.read()) == list(range(6, 15))


def test_a_view_that_is_opened_while_a_segment_is_closed_reads_all_of_it(
    path: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = filled(opened, 1, segment_bytes=200)
    scandir = os.scandir

    class Listing:
        """The entries of a folder; a large folder is listed in parts, and may change between them."""

        def __init__(self, where: Path) -> None:
            self.where = where

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            with scandir(self.where) as entries:
                known = {entry.name: entry for entry in entries}

            def listed() -> Iterator[os.DirEntry[str]]:
                yield from known.values()
                append(journal, 10 if self.where.name == "0" else 0)
                with scandir(self.where) as entries:
                    yield from (entry for entry in entries if entry.name not in known)

            return listed()

        def __exit__(self, *_: object) -> None:
            pass

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", Listing)
        view = Journal.view(path)
    with view:
        assert offsets(view.read()) == list(range(view.end))
        assert view.info().damage == []


def test_a_forked_child_leaves_the_journal_to_its_parent(path: str, opened: Open) -> None:
    journal = opened(fsync="interval")
    cursor = journal.cursor("c")
    journal.append("a", b"parent")
    journal.submit("a", b"parent").result(PATIENCE)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            refused = 0
            for attempt in (
                lambda: journal.append("a", b"child"), lambda: journal.submit("a", b"child"), cursor.commit,
                lambda: journal.trim(2), journal.sync, journal.dead_letters, lambda: journal.cursor("d"),
            ):  # fmt: skip
                try:
                    attempt()
                except ClosedError:
                    refused += 1
            journal.close()
            os.close(writing)
            os.read(reading, 1)  # live until the parent has reopened the journal
            code = 0 if refused == 7 else 2
        finally:
            os._exit(code)
    os.close(reading)
    try:
        assert journal.append("a", b"parent") == 2
        cursor.commit(1)
        journal.close()
        again = opened()  # the lock is not the child's
        assert [each.payload for each in again.read()] == [b"parent"] * 3
        assert again.cursors() == {"c": 1}
    finally:
        os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def open_descriptors(path: Path) -> list[int]:
    """The descriptors of this process for a file."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if each.readlink() == path:
                found.append(int(each.name))
    return found


def test_a_closed_journal_can_be_opened_while_a_starting_child_still_has_its_lock_file(path: str, opened: Open) -> None:
    journal = opened()
    of_child = [os.dup(each) for name in ("lock", "") for each in open_descriptors(Path(path, name))]
    try:
        journal.close()
        opened().append("a", b"x")
    finally:
        for each in of_child:
            os.close(each)


def test_a_journal_is_opened_while_a_child_that_its_dead_writer_was_starting_still_has_the_lock(
    path: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().close()
    of_child = [os.open(f"{path}/lock", os.O_RDWR)]
    fcntl.flock(of_child[0], fcntl.LOCK_EX)
    real = folders._try_lock

    def try_lock(*arguments: Any) -> Any:
        lock = real(*arguments)
        if of_child:
            assert lock is None
            os.close(of_child.pop())
        return lock

    monkeypatch.setattr(folders, "_try_lock", try_lock)
    opened().append("a", b"x")
    assert of_child == []


def test_a_child_that_is_forked_while_a_journal_is_opened_does_not_keep_its_lock(
    path: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []
    make = LocalFolder.make

    def make_and_fork(self: LocalFolder, name: str = "") -> None:
        make(self, name)
        if name == "0":  # locked already
            pid = os.fork()
            if pid == 0:
                os._exit(sum(len(open_descriptors(Path(path, name))) for name in ("lock", "")))
            children.append(pid)

    monkeypatch.setattr(LocalFolder, "make", make_and_fork)
    opened().append("a", b"x")
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0]


def test_a_second_writer_is_refused_after_the_lock_file_was_deleted(path: str, opened: Open) -> None:
    journal = opened()
    Path(path, "lock").unlink()
    with pytest.raises(JournalLockedError, match="another writer has this journal open"):
        Journal.open(path)
    assert "JournalLockedError" in outcome(OPENING, path, "0")
    assert journal.append("a", b"x") == 0
    journal.close()
    assert [each.payload for each in opened().read()] == [b"x"]


def test_an_abandoned_journal_releases_its_lock(path: str, opened: Open) -> None:
    Journal.open(path).append("a", b"x")
    gc.collect()
    assert opened().end == 1


def test_memory_is_flat_with_many_records_behind(in_memory: str) -> None:
    """The benchmark ``journal_flat`` does it with a million."""
    program = (
        "import sys; from messaging.journal import Journal\n"
        "def resident():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
        "journal = Journal.open(sys.argv[1], fsync='never'); cursor = journal.cursor('c')\n"
        "def append(count):\n"
        "    promises = [journal.submit('a/b', b'x' * 100) for _ in range(count)]\n"
        "    [promise.result(60) for promise in promises]\n"
        "append(2000); cursor.read(); before = resident()\n"
        "for _ in range(30): append(2000)\n"
        "behind = resident(); seen = 0\n"
        "cursor.rewind()\n"
        "while found := cursor.read(): seen += len(found)\n"
        "assert seen == 62000, seen\n"
        "print(behind - before, resident() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"{in_memory}/j"], check=True, capture_output=True, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    grown = [int(each) for each in done.stdout.split()]
    assert max(grown) < 4_000, "kB, of 8 MB"
    assert len(payload(49)) == 49
    assert segment_files(f"{in_memory}/j")

"""Damaged bytes anywhere: a record comes back as it was written, or is reported as lost with its range."""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import JournalError, JournalUnreadableError
from messaging.journal import Journal, verify
from messaging.journal.folders import LocalFolder
from messaging.journal.frames import encode, scan
from messaging.journal.identity import key_of, seed_with
from messaging.testing.tables import table
from tests.journal.conftest import Open
from tests.journal.logs import SEED, Lost, add, check, filled, flip, offsets, read, segment_files, view, writer

#: records of each frame, and of each segment
FRAMES = ((2, 3, 1), (1, 4), (3, 1, 2))
COUNT = sum(sum(each) for each in FRAMES)


@pytest.fixture
def log(in_memory: str, no_sync: None) -> Path:
    """A log of three segments."""
    made = writer(in_memory)
    for frames in FRAMES:
        made.start_segment()
        add(made, *frames)
    made.close()
    assert len(segment_files(in_memory)) == 3
    return Path(in_memory)


class Damaging:
    """Damages one file of a log at a time, and restores the whole folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = {file: file.read_bytes() for file in segment_files(folder)}

    def restore(self) -> None:
        for file in segment_files(self.folder):
            if file not in self.good:
                file.unlink()
        for file, data in self.good.items():
            file.write_bytes(data)

    def flips(self) -> Iterator[tuple[Path, int]]:
        """Flip one bit of every byte, and all bits of some."""
        for file, data in self.good.items():
            for at in range(len(data)):
                self.restore()
                damaged = bytearray(data)
                damaged[at] ^= 0xFF if at % 7 == 0 else 1 << at % 8
                file.write_bytes(damaged)
                yield file, at

    def cuts(self) -> Iterator[tuple[Path, int]]:
        """Cut every file at every length."""
        for file, data in self.good.items():
            for at in range(len(data)):
                self.restore()
                file.write_bytes(data[:at])
                yield file, at


def survives(folder: Path, expected: range = range(COUNT)) -> set[int]:
    """Open the damaged log as its writer, read, append, and open it again; return the offsets that are lost."""
    lost = Lost([])
    opened = writer(folder, lost=lost)
    end = opened.end
    assert end >= expected.stop, "an offset is used again"
    read(opened)  # readers find damage of earlier segments
    check(read(opened), lost.offsets, expected)
    add(opened, 2, 1)
    check(read(opened), lost.offsets, [*expected, *range(end, end + 3)])
    opened.close()
    again = Lost([])
    opened = writer(folder, lost=again)
    assert opened.end == end + 3
    read(opened)
    check(read(opened), again.offsets, [*expected, *range(end, end + 3)])
    opened.close()
    found = Lost([])
    seen = view(folder, found)
    read(seen)
    check(read(seen), found.offsets, [*expected, *range(end, end + 3)])
    return lost.offsets


def test_a_flip_of_any_byte_loses_only_what_is_reported(log: Path) -> None:
    for file, at in Damaging(log).flips():
        try:
            lost = survives(log)
        except AssertionError as error:
            error.add_note(f"{file.name}, byte {at}")
            raise
        # a frame has at most four records; how many the end may have held is not known without its header
        assert len(lost & set(range(COUNT))) <= 4


def test_a_file_cut_anywhere_loses_only_what_is_reported_or_was_the_end(log: Path) -> None:
    last = segment_files(log)[-1]
    for file, at in Damaging(log).cuts():
        count = COUNT
        if file == last:  # the end is cut off: no file tells what was behind it
            count = view(log).end
        try:
            survives(log, range(count))
        except AssertionError as error:
            error.add_note(f"{file.name}, cut at {at}")
            raise
        assert file != last or count < COUNT


def test_a_reader_of_another_process_returns_no_altered_record(log: Path) -> None:
    """The end of the last segment is the writer's matter: a reader cannot tell damage from a write in progress."""
    for _ in Damaging(log).flips():
        lost = Lost([])
        seen = view(log, lost)
        read(seen)
        check(read(seen), lost.offsets, range(seen.end))


def test_verify_finds_every_flip_and_every_missing_file(in_memory: str, opened: Open, no_sync: None) -> None:
    path = f"{in_memory}/j"
    journal = opened(path, max_records=40)  # segments of 5 records
    for n in range(15):
        journal.append("a", b"x" * n)
    journal.close()
    assert verify(path)[2:] == (3, sum(file.stat().st_size for file in segment_files(path)), 15, 0, [], [], None)
    damaging = Damaging(Path(path))
    for file, at in damaging.flips():
        found = verify(path)
        assert len(found.damage) == 1, (file, at)
        (damage,) = found.damage
        assert damage.position <= at < damage.end
        assert damage.segment == f"0/{file.name}"
        assert found.records + damage.until - damage.first >= 15
    for file in list(damaging.good)[:-1]:
        damaging.restore()
        file.unlink()
        found = verify(path)
        assert found.records < 15
        assert (not found.damage) == (file == next(iter(damaging.good)))  # the first ones may have been trimmed
    damaging.restore()
    assert not verify(path).damage


def test_damage_is_quarantined_logged_and_told_after_the_next_open(
    path: str, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    filled(opened, 4, segment_bytes=1).close()
    file = segment_files(path)[1]
    data = flip(file, -3)
    journal = opened()
    assert offsets(journal.read()) == [0, 2, 3]
    (found,) = journal.info().damage
    assert (found.first, found.until) == (1, 2)
    assert f"segment {file.stem} is damaged at bytes {found.position} to {found.end}" in caplog.text
    (copy,) = (Path(path) / "quarantine").iterdir()
    assert copy.read_bytes() == data[found.position : found.end]
    caplog.clear()
    assert offsets(journal.read()) == [0, 2, 3]
    assert caplog.text == ""  # told once
    journal.close()
    assert opened().info().damage == [found]
    with Journal.view(path) as seen:
        assert seen.info().damage == [found]


@table("part", ["header", "body", "both"])
def test_damage_is_logged_once_wherever_a_reader_begins(
    tmp_path: Path, opened: Open, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    caplog.clear()
    journal = filled(opened, 12, where=str(tmp_path / "j"))
    journal.close()
    (file,) = segment_files(tmp_path / "j")
    frames = [*scan(memoryview(file.read_bytes()), seed_with(key_of(journal.id), 0))][5:9]  # behind the head
    flip(file, *(frame.position for frame in frames if part != "body"))
    flip(file, *(frame.end - 1 for frame in frames if part != "header"))
    journal = opened(str(tmp_path / "j"))
    for offset in (*range(12), *reversed(range(12))):
        assert offsets(journal.read(offset)) == [each for each in range(offset, 12) if not 4 <= each < 8]
    assert caplog.text.count("is damaged at bytes") == 1
    (found,) = journal.info().damage
    assert (found.first, found.until) == (4, 8)
    assert len([*(tmp_path / "j" / "quarantine").iterdir()]) == 1


@table("part", ["header", "body"])
def test_damage_in_many_places_is_passed_fast_and_copied_up_to_a_bound(
    in_memory: str, no_sync: None, opened: Open, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A pass that searched the rest of the segment at each damaged place would read some gigabytes."""
    folder = f"{in_memory}/{part}"
    caplog.set_level(logging.CRITICAL)
    journal = filled(opened, 2400, where=folder, fsync="never")
    journal.close()
    (file,) = segment_files(folder)
    frames = [*scan(memoryview(file.read_bytes()), seed_with(key_of(journal.id), 0))]
    flip(file, *(frame.position if part == "header" else frame.end - 1 for frame in frames[1::2]))
    Path(folder, "0", f"{2400:020d}.segment").touch()  # the first one is closed
    journal = opened(folder)
    began = time.process_time()
    assert len(found := offsets(journal.read())) == 1200
    assert time.process_time() - began < 10
    assert len(found) + sum(each.until - each.first for each in journal.info().damage) == 2400
    assert len([*Path(folder, "quarantine").iterdir()]) == 1000


def test_a_quarantine_that_cannot_be_listed_is_an_error_of_the_journal(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(where: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    journal = opened()
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(JournalError, match="cannot read: Too many open files"):
        journal.info()


def test_a_cursor_passes_lost_records_and_frees_their_segments(path: str, opened: Open) -> None:
    journal = filled(opened, 6, segment_bytes=1)
    journal.close()
    for file in segment_files(path)[1:3]:
        flip(file, -1)
    journal = opened(segment_bytes=1)
    cursor = journal.cursor("c")
    records = cursor.read()
    assert offsets(records) == [0, 3, 4, 5]
    for each in records:
        cursor.acknowledge(each.offset)
    assert cursor.position == 6
    assert cursor.behind == 0


def test_the_offsets_of_a_lost_end_are_not_used_again(path: str, opened: Open) -> None:
    """A cursor has acknowledged them: it must see the records that come now."""
    journal = opened()
    cursor = journal.cursor("c")
    ends = []
    for _ in range(6):
        journal.append("a", b"old")
        ends.append(segment_files(path)[0].stat().st_size)
    cursor.read()
    cursor.commit()
    journal.close()
    os.truncate(segment_files(path)[0], ends[2])
    journal = opened()
    assert journal.end == 6
    assert journal.append("a", b"new") == 6
    cursor = journal.cursor("c")
    assert [each.payload for each in cursor.read()] == [b"new"]
    assert [(each.first, each.until) for each in journal.info().damage] == [(3, 6)]


@table("headers", [(1,), (2,), (1, 2)])
def test_a_damaged_end_holds_no_more_records_than_a_header_in_it_tells(
    in_memory: str, no_sync: None, headers: tuple[int, ...]
) -> None:
    """After a loss of power any part of what was not synced may be missing, and what follows it may be there."""
    folder = f"{in_memory}/{headers}"
    made = writer(folder)
    add(made, 2, 3, 1, 4)
    made.close()
    (file,) = segment_files(folder)
    _, *frames = scan(memoryview(file.read_bytes()), SEED)
    flip(file, *(each.position if n in headers else each.end - 1 for n, each in enumerate(frames) if n))
    lost = Lost([])
    opened = writer(folder, lost=lost)
    assert opened.end == 10
    assert lost.offsets == {*range(2, 10)}
    opened.close()


@table("tail", [b"\0" * 5000, b"R", b"RXJ1" * 7], ids=["zeros", "a byte", "half a header"])
def test_an_unfinished_write_is_cut_off_without_a_report_of_damage(
    tmp_path: Path, opened: Open, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    filled(opened, 1, where=tmp_path).close()
    (file,) = segment_files(tmp_path)
    size = file.stat().st_size
    with file.open("ab") as end:
        end.write(tail)
    assert (verify(tmp_path).unfinished, verify(tmp_path).damage) == (len(tail), [])
    with Journal.view(tmp_path) as seen:
        assert len(list(seen.read())) == 1
    journal = opened(tmp_path)
    assert f"cut off {len(tail)} bytes of an unfinished write" in caplog.text
    assert file.stat().st_size == size
    assert journal.append("a", b"y") == 1
    assert journal.info().damage == []


def test_a_segment_of_another_version_is_refused(log: Path) -> None:
    file = segment_files(log)[-1]
    first = int(file.stem)
    file.write_bytes(b"".join(map(bytes, encode(first, 0, [b"messaging.journal.records 2\n"], SEED))))
    for attempt in (writer, view):
        with pytest.raises(JournalUnreadableError, match=r"format 'messaging.journal.records 2', this version reads"):
            attempt(log)


def test_a_missing_file_is_reported_and_the_rest_is_read(log: Path) -> None:
    segment_files(log)[1].unlink()
    assert survives(log) == set(range(6, 11))


def test_a_file_with_an_impossible_number_is_no_segment(path: str, opened: Open) -> None:
    filled(opened, 5).close()
    (Path(path) / "0" / f"{10**20 - 1}.segment").write_bytes(b"x")
    journal = opened()
    assert offsets(journal.read()) == [0, 1, 2, 3, 4]
    assert journal.append("a", b"x") == 5
    journal.close()
    with Journal.view(path) as view:
        assert view.end == 6


def test_random_damage_of_many_places(log: Path) -> None:
    choose = random.Random(7)
    damaging = Damaging(log)
    for _ in range(150):
        damaging.restore()
        for file, data in damaging.good.items():
            damaged = bytearray(data)
            for _ in range(choose.randrange(4)):
                at = choose.randrange(len(damaged))
                kind = choose.randrange(3)
                if kind == 0:
                    damaged[at : at + 40] = choose.randbytes(len(damaged[at : at + 40]))
                elif kind == 1:
                    damaged[at : at + 100] = bytes(len(damaged[at : at + 100]))
                else:
                    del damaged[at : at + 30]
            file.write_bytes(damaged)
        survives(log, range(min(COUNT, view(log).end)))


def test_verify_reports_a_segment_that_the_disk_cannot_read(
    path: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(opened, 3, segment_bytes=1)
    read = LocalFolder.read

    def failing_read(self: LocalFolder, name: str, *arguments: Any, **more: Any) -> memoryview:
        if name.endswith("1.segment"):
            raise OSError(errno.EIO, "Input/output error")
        return read(self, name, *arguments, **more)

    monkeypatch.setattr(LocalFolder, "read", failing_read)
    found = verify(path)
    assert found.records == 2
    assert [(each.first, each.until, each.reason) for each in found.damage] == [
        (1, 2, "it cannot be read: Input/output error")
    ]


def test_damage_before_the_first_record_of_a_segment_is_reported_once(path: str, opened: Open) -> None:
    journal = opened(segment_bytes=1)
    journal.append("a", b"first")
    journal.append("a", b"second")
    first = segment_files(path)[0]
    flip(first, 40)  # in the frame that names the format
    assert [record.payload for record in journal.read()] == [b"first", b"second"]
    (damage,) = journal.info().damage
    assert (damage.position, damage.first, damage.until) == (0, 0, 0)
    assert verify(path).damage
    assert not verify(path).unknown

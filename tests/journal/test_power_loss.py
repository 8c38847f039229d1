"""The loss of power: what was not synced is there in part, in any order, or not at all."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from messaging.journal import Journal, State, encode_record
from messaging.journal.options import Fsync
from messaging.testing.waiting import PATIENCE, eventually
from tests.journal.logs import check, payload

BLOCK = 512
Op = tuple[Any, ...]


class Disk:
    """Records what is done to the segments of a journal. Nothing is synced."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.ops: list[Op] = []
        self._folder = folder / "0"
        for name in ("pwritev", "ftruncate", "fsync", "fdatasync"):
            patch.setattr(os, name, self._on_file(name, getattr(os, name)))
        patch.setattr(os, "open", self._opening(os.open))
        patch.setattr(Path, "unlink", self._unlinking(Path.unlink))

    def note(self, *op: Any) -> None:
        self.ops.append(op)

    def _on_file(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: int, *rest: Any) -> Any:
            path = Path(f"/proc/self/fd/{file}").readlink()
            is_segment = path.parent == self._folder
            if name in ("fsync", "fdatasync"):
                if is_segment or path == self._folder:
                    self.note("sync" if is_segment else "sync names", path.name)
                return None
            done = real(file, *rest)
            if is_segment:
                if name == "ftruncate":
                    self.note("truncate", path.name, *rest)
                else:
                    views, at = rest
                    self.note("write", path.name, at, b"".join(views)[:done])
            return done

        return call

    def _opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            where = Path(os.fsdecode(path)) if not isinstance(path, int) else Path()
            is_new = where.parent == self._folder and flags & os.O_CREAT and not where.exists()
            file = real(path, flags, *rest, **more)
            if is_new:
                self.note("create", where.name)
            return file

        return call

    def _unlinking(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Path, **more: Any) -> None:
            real(path, **more)
            if path.parent == self._folder:
                self.note("unlink", path.name)

        return call


def after(ops: list[Op], choose: random.Random) -> dict[str, bytes]:
    """Return the files that the disk may have if the power is lost after ``ops``."""
    synced_names = max((n for n, op in enumerate(ops) if op[0] == "sync names"), default=-1)
    names: dict[str, int] = {}
    for number, op in enumerate(ops):
        if op[0] in ("create", "unlink") and (number < synced_names or choose.random() < 0.5):
            if op[0] == "create":
                names[op[1]] = number
            else:
                names.pop(op[1], None)
    return {name: content([op for op in ops[began:] if op[1] == name], choose) for name, began in names.items()}


def content(ops: list[Op], choose: random.Random) -> bytes:
    """Return what may be in a file to which this was done."""
    synced = max((n for n, op in enumerate(ops) if op[0] == "sync"), default=-1)
    data = bytearray()
    kept = choose.choice((0.0, 0.5, 0.9, 1.0))
    for number, op in enumerate(ops):
        is_synced = number < synced
        if op[0] == "truncate" and (is_synced or choose.random() < kept):
            data[:] = data[: op[2]].ljust(op[2], b"\0")
        elif op[0] == "write":
            _, _, at, written = op
            for begin in range(0, len(written), BLOCK):
                if is_synced or choose.random() < kept:
                    block = written[begin : begin + BLOCK]
                    if not is_synced and choose.random() < 0.1:
                        block = block[: choose.randrange(len(block))]
                    data[len(data) :] = bytes(max(0, at + begin - len(data)))
                    data[at + begin : at + begin + len(block)] = block
    return bytes(data)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of damaged journals tell about themselves."""
    caplog.set_level("CRITICAL", "messaging")


def history(folder: Path, patch: pytest.MonkeyPatch, fsync: Fsync, seed: int) -> list[Op]:
    """Append, acknowledge, trim, fail and reopen; return all that was done to the disk."""
    choose = random.Random(seed)
    with patch.context() as patched:
        disk = Disk(folder, patched)
        end = 0
        for _ in range(3):
            with Journal.open(folder, fsync=fsync, fsync_interval=3600, segment_bytes=3000) as journal:
                cursor = journal.cursor("c")
                for _ in range(25):
                    count = choose.choice((1, 1, 5, 40))
                    promises = [
                        journal.submit(f"a/{n % 3}", payload(n), "", message_id=f"id{n}", timestamp=n)
                        for n in range(end, end + count)
                    ]
                    assert [promise.result(PATIENCE) for promise in promises] == list(range(end, end + count))
                    end += count
                    disk.note("stored", end)
                    if choose.random() < 0.1:
                        position = choose.randint(journal.begin, end)
                        disk.note("acknowledging", position)
                        cursor.commit(position)
                        if choose.random() < 0.5:
                            begin = cursor.position
                            eventually(lambda begin=begin: journal._log.segment_of(begin) == 0)  # type: ignore[misc]
                    if fsync != "always" and choose.random() < 0.1:
                        journal.sync()
                        disk.note("synced", end)
            if fsync == "interval":
                disk.note("synced", end)
    return disk.ops


def last(ops: list[Op], kind: str) -> int:
    return max((op[1] for op in ops if op[0] == kind), default=0)


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_what_append_returned_for_survives_as_its_policy_says(
    in_memory: str, monkeypatch: pytest.MonkeyPatch, fsync: Fsync
) -> None:
    folder, image = Path(in_memory, "j"), Path(in_memory, "image")
    ops = history(folder, monkeypatch, fsync, 1)
    choose = random.Random(2)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)
    lost_some = 0
    for number in range(150):
        moment = choose.randrange(len(ops) + 1)
        before = ops[:moment]
        shutil.rmtree(image, ignore_errors=True)
        Path(image, "0").mkdir(parents=True)
        shutil.copy(folder / "journal.json", image)
        for name, data in after(before, choose).items():
            Path(image, "0", name).write_bytes(data)
        state = State(image)
        position = last(before, "acknowledging")
        state.save_cursors({"c": position})
        state.close()
        safe = last(before, "stored" if fsync == "always" else "synced")
        stored = last(before, "stored")
        try:
            _check(image, position, safe, fsync)
        except AssertionError as error:
            error.add_note(f"number {number}, moment {moment}")
            raise
        with Journal.open(image) as journal:
            lost_some += journal.end < stored
    assert (lost_some > 0) == (fsync != "always")


def _check(image: Path, position: int, safe: int, fsync: Fsync) -> None:
    """Raise unless the records from ``position`` to ``safe`` are there, and nothing is altered or used again."""
    with Journal.open(image, fsync="never") as journal:
        end = journal.end
        records = list(journal.read())
        lost = {offset for each in journal.info().damage for offset in range(each.first, each.until)}
        assert end >= position
        assert not lost & set(range(position, safe)), "a stored record is lost"
        found = check(records, lost, range(max(position, journal.begin), safe))
        assert set(range(position, safe)) <= set(found)
        assert fsync != "always" or journal.begin <= position
        assert journal.append("a", b"new") == end
    with Journal.open(image) as journal:
        assert journal.end == end + 1
        assert [each.payload for each in journal.read(end)] == [b"new"]


def test_a_segment_whose_creation_was_lost_costs_nothing_that_was_stored(
    in_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a segment is on the disk before the first record in it counts."""
    ops = history(Path(in_memory, "j"), monkeypatch, "always", 5)
    created: dict[str, int] = {}
    stored = 0
    for number, op in enumerate(ops):
        if op[0] == "create":
            created[op[1]] = number
        elif op[0] == "stored":
            stored += 1
            for name, began in created.items():
                assert ("sync names", "0") in ops[began:number], name
    assert stored > 50
    assert len(created) > 5
    assert len(encode_record("a", b"")) == 21


def test_sync_syncs_what_an_earlier_writer_has_left_unsynced(in_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(in_memory, "j")
    with Journal.open(folder, fsync="never", segment_bytes=1) as journal:
        for n in range(3):
            journal.append("a", payload(n))
    segments = {path.name for path in Path(folder, "0").iterdir()}
    assert len(segments) == 3
    with monkeypatch.context() as patched:
        disk = Disk(folder, patched)
        with Journal.open(folder, fsync="never", segment_bytes=1) as journal:
            journal.sync()
            assert {name for kind, name in disk.ops if kind == "sync"} == segments

"""What a crash leaves of files and names, as the model of a disk has it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation.world.durable import SECTOR, Unsynced, torn

MACHINE = "machine"


def _outcomes(tmp_path: Path, act: Callable[[Unsynced, Path], None], look: Callable[[Path], object]) -> set[object]:
    """Return what ``look`` finds after crashes of many seeds."""
    found = set()
    for seed in range(200):
        folder = tmp_path / str(seed)
        folder.mkdir()
        unsynced = Unsynced()
        act(unsynced, folder)
        unsynced.lose(MACHINE, random.Random(seed))
        found.add(look(folder))
    return found


def _write(unsynced: Unsynced, path: Path, content: bytes) -> None:
    unsynced.writing(MACHINE, str(path))
    path.write_bytes(content)


def _make(unsynced: Unsynced, path: Path, content: bytes) -> None:
    path.write_bytes(b"")
    unsynced.made(MACHINE, str(path))
    _write(unsynced, path, content)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def test_synced_bytes_stay_and_any_part_of_the_others_may_be_lost(tmp_path: Path) -> None:
    def act(unsynced: Unsynced, folder: Path) -> None:
        _write(unsynced, folder / "file", b"synced")
        unsynced.synced(str(folder / "file"), b"synced")
        _write(unsynced, folder / "file", b"synced, new")

    found = _outcomes(tmp_path, act, lambda folder: _content(folder / "file"))
    assert all(isinstance(each, bytes) and each.startswith(b"synced") for each in found)
    assert {b"synced", b"synced,", b"synced, new", b"synced\0\0\0\0\0"} <= found


def test_sectors_are_whole_and_come_in_any_order() -> None:
    old, new = b"o" * 4 * SECTOR, b"n" * 4 * SECTOR
    found = {torn(old, new, random.Random(seed)) for seed in range(500)}
    assert {each[at : at + SECTOR] for each in found for at in range(0, len(old), SECTOR)} == {
        b"o" * SECTOR,
        b"n" * SECTOR,
    }
    assert b"o" * SECTOR + b"n" * SECTOR + b"o" * SECTOR + b"n" * SECTOR in found


def test_a_new_file_whose_folder_is_not_synced_may_be_gone(tmp_path: Path) -> None:
    def act(unsynced: Unsynced, folder: Path) -> None:
        _make(unsynced, folder / "file", b"synced")
        unsynced.synced(str(folder / "file"), b"synced")

    assert _outcomes(tmp_path, act, lambda folder: _content(folder / "file")) == {None, b"synced"}


def test_a_file_in_a_synced_folder_stays(tmp_path: Path) -> None:
    def act(unsynced: Unsynced, folder: Path) -> None:
        _make(unsynced, folder / "file", b"synced")
        unsynced.synced(str(folder / "file"), b"synced")
        unsynced.folder_synced(str(folder))

    assert _outcomes(tmp_path, act, lambda folder: _content(folder / "file")) == {b"synced"}


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_rename_is_taken_back_as_a_whole(tmp_path: Path, is_synced: bool) -> None:
    def act(unsynced: Unsynced, folder: Path) -> None:
        (folder / "file").write_bytes(b"old")
        _make(unsynced, folder / "new", b"new")
        unsynced.synced(str(folder / "new"), b"new")
        unsynced.renaming(MACHINE, str(folder / "new"), str(folder / "file"))
        (folder / "new").replace(folder / "file")
        if is_synced:
            unsynced.folder_synced(str(folder))

    found = _outcomes(tmp_path, act, lambda folder: (_content(folder / "file"), _content(folder / "new")))
    assert found == ({(b"new", None)} if is_synced else {(b"new", None), (b"old", b"new"), (b"old", None)})


def test_removed_files_of_one_folder_come_back_the_latest_first(tmp_path: Path) -> None:
    def act(unsynced: Unsynced, folder: Path) -> None:
        for name in ("a", "b"):
            (folder / name).write_bytes(name.encode())
        for name in ("a", "b"):
            unsynced.removing(MACHINE, str(folder / name))
            (folder / name).unlink()

    found = _outcomes(tmp_path, act, lambda folder: (_content(folder / "a"), _content(folder / "b")))
    assert found == {(None, None), (None, b"b"), (b"a", b"b")}


def test_a_new_folder_may_be_gone_with_all_that_is_in_it(tmp_path: Path) -> None:
    def act(unsynced: Unsynced, folder: Path) -> None:
        (folder / "inner").mkdir()
        unsynced.made(MACHINE, str(folder / "inner"), is_folder=True)
        _make(unsynced, folder / "inner" / "file", b"synced")
        unsynced.synced(str(folder / "inner" / "file"), b"synced")
        unsynced.folder_synced(str(folder / "inner"))

    assert _outcomes(tmp_path, act, lambda folder: _content(folder / "inner" / "file")) == {None, b"synced"}


def test_bytes_whose_sync_failed_are_lost_although_a_later_sync_succeeds(tmp_path: Path) -> None:
    def act(unsynced: Unsynced, folder: Path) -> None:
        _write(unsynced, folder / "file", b"ab")
        unsynced.failed(str(folder / "file"), b"ab")
        _write(unsynced, folder / "file", b"abcd")
        unsynced.synced(str(folder / "file"), b"abcd")

    assert _outcomes(tmp_path, act, lambda folder: _content(folder / "file")) == {b"\0\0cd"}


def test_the_files_of_another_machine_stay(tmp_path: Path) -> None:
    file = tmp_path / "file"
    unsynced = Unsynced()
    _make(unsynced, file, b"written")
    for seed in range(20):
        assert not unsynced.lose("another", random.Random(seed))
    assert file.read_bytes() == b"written"

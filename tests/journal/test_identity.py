"""``journal.json``: a damaged or foreign one is refused before anything is changed, and can be repaired."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from messaging.errors import JournalError, JournalLockedError, JournalUnreadableError
from messaging.journal import Journal, outline, repair, verify
from messaging.journal.frames import rewound
from messaging.testing.tables import table
from tests.journal.conftest import Open
from tests.journal.logs import filled, flip, offsets, segment_files


def contents(folder: str) -> dict[str, bytes]:
    """The files of a folder that hold something to lose."""
    files = [*Path(folder).glob("*/*"), *Path(folder).glob("journal.json")]
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


def change(meta: Path, what: str) -> None:
    """Change a file as its name says."""
    text = meta.read_text()
    values = json.loads(text)
    if what == "id":
        text = text.replace(values["id"], ("1" if values["id"][0] == "0" else "0") + values["id"][1:])
    elif what == "whole id":
        text = text.replace(values["id"], "f" * 32)
    elif what == "checksum":
        text = text.replace(str(values["check"]), str(values["check"] ^ 1))
    elif what == "torn":
        text = text[: len(text) // 2]
    elif what == "empty":
        text = ""
    elif what == "other":
        text = json.dumps({"format": 1, "kind": "records", "id": "0" * 32, "created": 0.0})
    meta.write_text(text)


def without_check(meta: Path) -> None:
    """Make a file as earlier versions wrote it."""
    values = json.loads(meta.read_text())
    del values["check"]
    meta.write_text(json.dumps(values, indent=1))


ATTEMPTS: list[Callable[[str], object]] = [Journal.open, Journal.view, verify, outline]


@table("what", ["id", "whole id", "checksum", "torn", "empty", "other"])
@table("is_sealed", [True, False])
@table("count", [1, 12])
def test_a_wrong_identity_is_refused_and_repaired_without_losing_a_record(
    tmp_path: Path, what: str, is_sealed: bool, count: int
) -> None:
    path = str(tmp_path / "journal")
    with Journal.open(path, segment_bytes=4096) as journal:
        for _ in range(count):
            journal.append("a", b"x" * 1000)
        cursor = journal.cursor("c")
        cursor.commit(1)
    meta = Path(path, "journal.json")
    if not is_sealed:
        if what == "checksum":
            return
        without_check(meta)
    intact = meta.read_bytes()
    change(meta, what)
    before = contents(path)
    for attempt in ATTEMPTS:
        with pytest.raises(JournalUnreadableError, match="messaging journal repair"):
            attempt(path)
    assert contents(path) == before
    repair(path)
    if what in ("id", "checksum"):
        assert meta.read_bytes() == intact
    assert not verify(path).damage
    with Journal.open(path) as journal:
        assert offsets(journal.read()) == [*range(journal.begin, count)]
        assert journal.cursors() == {"c": 1}
        journal.append("a", b"more")
    assert verify(path).records == count + 1 - journal.begin
    assert "nothing was changed" in repair(path)


def test_each_changed_character_of_an_identity_is_refused_or_harmless_and_restored(path: str, opened: Open) -> None:
    filled(opened, 3).close()
    meta = Path(path, "journal.json")
    intact = meta.read_bytes()
    for at in [*range(0, len(intact), 9), intact.index(b'"check"') + 1, len(intact) - 3]:
        flip(meta, at)
        try:
            Journal.view(path).close()
        except JournalUnreadableError:
            repair(path)
            assert json.loads(meta.read_bytes()) == json.loads(intact), at
        else:
            # white space, or the name of the checksum: the records are there
            with Journal.view(path) as view:
                assert offsets(view.read()) == [0, 1, 2]
        meta.write_bytes(intact)


def test_an_identity_of_an_earlier_version_opens_and_stays_as_it_is(path: str, opened: Open) -> None:
    filled(opened, 3).close()
    meta = Path(path, "journal.json")
    without_check(meta)
    before = meta.read_bytes()
    assert offsets(opened().read()) == [0, 1, 2]
    assert meta.read_bytes() == before


def test_segments_of_another_journal_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Journal.open(tmp_path / name) as journal:
            journal.append(name, b"x")
    shutil.rmtree(tmp_path / "one" / "0")
    shutil.copytree(tmp_path / "two" / "0", tmp_path / "one" / "0")
    before = contents(str(tmp_path / "one"))
    for attempt in ATTEMPTS:
        with pytest.raises(JournalUnreadableError, match="does not belong to the segments"):
            attempt(str(tmp_path / "one"))
    assert contents(str(tmp_path / "one")) == before


def acknowledged(path: Path, records: int, position: int) -> str:
    """Make a journal with a cursor; return its folder."""
    with Journal.open(path) as journal:
        for number in range(records):
            journal.append("a", b"%d" % number)
        journal.cursor("c").commit(position)
    return str(path)


def test_a_database_of_another_journal_is_refused_and_moved_aside(tmp_path: Path) -> None:
    mine, other = acknowledged(tmp_path / "mine", 5, 1), acknowledged(tmp_path / "other", 50, 40)
    shutil.copy(f"{other}/state.db", f"{mine}/state.db")
    before = contents(mine)
    for attempt in (Journal.open, Journal.view):
        with pytest.raises(JournalUnreadableError, match=r"state.db is that of another journal.*repair"):
            attempt(mine)
    assert "another journal" in (verify(mine).state or "")
    assert contents(mine) == before
    assert "is now state.db.foreign-" in repair(mine)
    with Journal.open(mine) as journal:
        assert offsets(journal.read()) == [0, 1, 2, 3, 4]
        assert journal.cursor("c").position == 0
        assert journal.append("a", b"5") == 5
    assert [*Path(mine).glob("state.db.foreign-*")]
    assert repair(mine) == "journal.json is intact; nothing was changed"


@table("is_damaged", [False, True])
def test_a_repair_that_cannot_read_the_database_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """As on a full disk: whose database it is, is not known."""
    mine, other = acknowledged(tmp_path / "mine", 5, 1), acknowledged(tmp_path / "other", 50, 40)
    shutil.copy(f"{other}/state.db", f"{mine}/state.db")
    if is_damaged:
        change(Path(mine, "journal.json"), "id")
    before = contents(mine)

    def connect(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as failing:
        failing.setattr(sqlite3, "connect", connect)
        with pytest.raises(JournalError, match=r"cannot open state\.db: disk I/O error"):
            repair(mine)
    assert contents(mine) == before
    assert "is now state.db.foreign-" in repair(mine)
    with Journal.open(mine) as journal:
        assert offsets(journal.read()) == [0, 1, 2, 3, 4]


@table("harm", ["damage", "unfinished write"])
def test_damage_is_left_alone_in_a_journal_whose_database_is_that_of_another(tmp_path: Path, harm: str) -> None:
    mine, other = acknowledged(tmp_path / "mine", 5, 1), acknowledged(tmp_path / "other", 50, 40)
    shutil.copy(f"{mine}/state.db", tmp_path / "right")
    shutil.copy(f"{other}/state.db", f"{mine}/state.db")
    segment = segment_files(mine)[0]
    if harm == "damage":
        flip(segment, segment.stat().st_size // 2)
    else:
        segment.write_bytes(segment.read_bytes()[:-3])
    before = contents(mine)
    with pytest.raises(JournalUnreadableError, match=r"state.db is that of another journal"):
        Journal.open(mine)
    assert contents(mine) == before
    shutil.copy(tmp_path / "right", f"{mine}/state.db")
    with Journal.open(mine) as journal:
        assert len(offsets(journal.read())) == 4
        assert contents(mine) != before


def test_a_database_of_an_earlier_version_is_adopted_and_an_older_one_of_the_same_journal_opens(tmp_path: Path) -> None:
    mine = acknowledged(tmp_path / "mine", 5, 1)
    shutil.copy(f"{mine}/state.db", tmp_path / "older")
    with Journal.open(mine) as journal:
        journal.cursor("c").commit(4)
    shutil.copy(tmp_path / "older", f"{mine}/state.db")
    with contextlib.closing(sqlite3.connect(f"{mine}/state.db")) as connection:
        assert connection.execute("PRAGMA application_id").fetchone()[0] != 0
        connection.execute("PRAGMA application_id=0")
    with Journal.open(mine) as journal:
        assert journal.cursor("c").position == 1
    with contextlib.closing(sqlite3.connect(f"{mine}/state.db")) as connection:
        assert connection.execute("PRAGMA application_id").fetchone()[0] != 0


@table("place", [0, 5, 20, 29, 40])
def test_a_damaged_first_frame_is_damage_and_no_wrong_identity(tmp_path: Path, place: int) -> None:
    path = str(tmp_path / "journal")
    with Journal.open(path) as journal:
        for _ in range(3):
            journal.append("a", b"x")
    flip(segment_files(path)[0], place)
    with Journal.open(path) as journal:
        assert offsets(journal.read()) == [0, 1, 2]


def test_a_repair_refuses_an_open_journal_and_a_folder_without_one(path: str, opened: Open, tmp_path: Path) -> None:
    journal = filled(opened, 1)
    with pytest.raises(JournalLockedError):
        repair(path)
    journal.close()
    with pytest.raises(JournalUnreadableError, match="there is no journal"):
        repair(tmp_path / "none")
    Path(tmp_path, "x").write_text("x")
    with pytest.raises(JournalError):
        repair(tmp_path / "x")


def test_a_seed_is_found_from_its_checksum() -> None:
    for _ in range(1000):
        data, seed = random.randbytes(random.randint(0, 40)), random.getrandbits(32)
        assert rewound(data, zlib.crc32(data, seed)) == seed

"""Logs of records for tests, and what a reader makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from messaging.journal import Journal, Record, encode_record
from messaging.journal.folders import LocalFolder
from messaging.journal.frames import Damage
from messaging.journal.reader import RecordReader
from messaging.journal.segments import RecordLog, RecordWriter

SEED = 4711


@lru_cache(maxsize=100_000)
def payload(offset: int) -> bytes:
    """The payload at ``offset``."""
    return random.Random(offset).randbytes(offset % 50)


@lru_cache(maxsize=100_000)
def record(offset: int) -> bytes:
    """The record at ``offset``: all that it holds follows from the offset."""
    return encode_record(f"a/{offset % 3}", payload(offset), "", f"id{offset}", offset)


def is_right(found: Record) -> bool:
    """Return whether a record is as :func:`record` made it."""
    n = found.offset
    return found == Record(n, n, f"a/{n % 3}", payload(n), "", f"id{n}")


class Lost(NamedTuple):
    """What a log has reported."""

    found: list[tuple[int, Damage]]

    def note(self, segment: int, damage: Damage, data: memoryview) -> None:
        assert damage.position <= damage.end
        assert damage.first <= damage.until
        assert len(data) == damage.end - damage.position
        self.found.append((segment, damage))

    @property
    def offsets(self) -> set[int]:
        return {offset for _, damage in self.found for offset in range(damage.first, damage.until)}


def writer(folder: Path | str, segment_bytes: int = 2**20, lost: Lost | None = None) -> RecordWriter:
    note = (Lost([]) if lost is None else lost).note
    return RecordWriter(LocalFolder(str(folder)), seed=SEED, segment_bytes=segment_bytes, on_damage=note)


def view(folder: Path | str, lost: Lost | None = None) -> RecordLog:
    log = RecordLog(LocalFolder(str(folder)), seed=SEED)
    log.on_damage = (Lost([]) if lost is None else lost).note
    log.refresh()
    return log


def add(log: RecordWriter, *counts: int) -> None:
    """Append frames with so many records."""
    for count in counts:
        log.append_frame(count, [b"".join(record(log.end + n) for n in range(count))])


def read(log: RecordLog, start: int | None = None) -> list[Record]:
    """Return all records."""
    reader = RecordReader(log, log.begin if start is None else start)
    found: list[Record] = []
    while taken := reader.take():
        found += taken
    assert reader.offset == log.end
    return found


def check(records: Iterable[Record], lost: set[int], written: Sequence[int] | range) -> list[int]:
    """Raise unless each record came back as written or is reported as lost; return the offsets that came back."""
    offsets = []
    for each in records:
        assert is_right(each), each
        offsets.append(each.offset)
    assert offsets == sorted(set(offsets))
    assert set(written) - set(offsets) <= lost, "records are missing and not reported"
    assert not set(offsets) & lost, "records are there and reported as lost"
    return offsets


def append(journal: Journal, count: int, payload: bytes = b"x") -> None:
    """Append so many equal records."""
    for _ in range(count):
        journal.append("a", payload)


def filled(opened: Callable[..., Journal], count: int, **more: Any) -> Journal:
    """Open a journal with ``more``, and append so many records to it."""
    journal = opened(**more)
    append(journal, count)
    return journal


def offsets(records: Iterable[Record]) -> list[int]:
    return [each.offset for each in records]


def flip(file: Path, *places: int) -> bytes:
    """Change one bit of each of these bytes of a file; return what is in it now."""
    data = bytearray(file.read_bytes())
    for place in places:
        data[place] ^= 1
    file.write_bytes(data)
    return bytes(data)


def stored_cursors(path: Path | str) -> dict[str, int]:
    """Return what another process reads of the cursors."""
    with Journal.view(path) as view:
        return view.cursors()


def segment_files(folder: Path | str) -> list[Path]:
    return sorted(Path(folder).glob("0/*.segment"))

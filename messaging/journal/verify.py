"""Verifying a journal: every byte is read, and damage is reported. Its outline. Journals of Spark queries, too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from messaging.errors import JournalError, JournalUnreadableError
from messaging.errors.checks import check_path
from messaging.journal.database import FILE as STATE_FILE
from messaging.journal.folders import LocalFolder, journal_errors
from messaging.journal.frames import Damage, Frame, walk
from messaging.journal.identity import KIND, Identity, read_kind
from messaging.journal.journal import Journal
from messaging.journal.log import META, Log, segment_path
from messaging.journal.quarantine import DamagedRange, Quarantine
from messaging.journal.records import FORMAT, LEAST_RECORD, decode_records
from messaging.journal.segments import lost_rows
from messaging.journal.state import State


class Damaged(NamedTuple):
    """A damaged place that is in the journal now."""

    partition: int
    #: name of the file, relative to the folder
    segment: str
    #: the bytes that cannot be used
    position: int
    end: int
    #: offset of the first record that is lost, and the offset after the last one; equal if none is
    first: int
    until: int
    reason: str


class Verification(NamedTuple):
    """The outcome of :func:`verify`.

    Attributes:
        unfinished: bytes of an unfinished write at the end. That is no damage: the writer cuts them off, or is writing.
        quarantined: damage that the writer has found before, and of which it has kept copies.
    """

    path: str
    #: ``"records"``, or another kind
    kind: str
    segments: int
    #: of all segments
    bytes: int
    #: intact records
    records: int
    unfinished: int
    damage: list[Damaged]
    quarantined: list[DamagedRange]
    #: why the database of the cursors cannot be read; ``None`` if it can, or there is none
    state: str | None

    @property
    def unknown(self) -> list[Damaged]:
        """The damage that no writer has found and copied yet."""
        known = [(copy, segment_path(0, copy.segment)) for copy in self.quarantined]
        return [
            each
            for each in self.damage
            if not any(
                each.segment == path
                and DamagedRange(copy.segment, each.position, each.end, each.first, each.until).is_part_of(copy)
                for copy, path in known
            )
        ]


def verify(path: str | Path) -> Verification:
    """Read a whole journal and report damage, also while another process writes to it. Changes nothing.

    Args:
        path: its folder; a journal of messages, or of a Spark query.

    Raises:
        JournalUnreadableError: the folder holds no journal, or cannot be read.
    """
    folder = LocalFolder(str(check_path("path", path)))
    with journal_errors(folder, "cannot read", JournalUnreadableError):
        found = _identity_in(folder)
        segments = size = records = unfinished = 0
        damage: list[Damaged] = []
        for partition in folder.partitions():
            log = _Verified(folder, partition, is_records=found.kind == KIND, seed=found.seed(partition))
            log.read()
            segments += log.segments
            size += log.bytes
            records += log.records
            unfinished += log.unfinished
            damage += log.damage
        quarantined = Quarantine(folder, writable=False).ranges()
        state = _state_error(folder, found.key)
        return Verification(folder.path, found.kind, segments, size, records, unfinished, damage, quarantined, state)


def _identity_in(folder: LocalFolder) -> Identity:
    found = read_kind(folder)
    if found is None:
        raise folder.error(JournalUnreadableError, f"there is no journal: no file {META}")
    return found


def _state_error(folder: LocalFolder, key: int) -> str | None:
    if STATE_FILE not in folder.list():
        return None
    try:
        with closing(State(Path(folder.path), writable=False, key=key)) as state:
            state.check()
    except JournalError as error:
        return str(error)
    return None


class _Verified(Log):
    """A partition that is verified."""

    def __init__(self, folder: LocalFolder, partition: int, *, is_records: bool, seed: int) -> None:
        super().__init__(folder, partition, seed=seed)
        self._is_records = is_records
        self.segments = self.bytes = self.records = self.unfinished = 0
        self.damage: list[Damaged] = []

    def read(self) -> None:
        """Read all segments."""
        listed = self.list_segments()
        following_ones = [*(segment for segment, _ in listed[1:]), None]
        for (segment, size), following in zip(listed, following_ones, strict=False):
            try:
                # mapped bytes would not survive a place that the disk cannot read
                data = self.folder.read(self.segment_name(segment), copy=True)
            except FileNotFoundError:
                continue  # trimmed meanwhile
            except OSError as error:
                # of the last one it is not known how many records it has: at most so many
                until = segment + size // LEAST_RECORD if following is None else following
                self._add(segment, Damage(0, size, segment, until, f"it cannot be read: {error.strerror or error}"))
                continue
            self.segments += 1
            self.bytes += len(data)
            self._read_segment(segment, data, following)

    def _read_segment(self, segment: int, data: memoryview, following: int | None) -> None:
        offset, position = segment, 0
        for found in walk(data, segment, until=following, seed=self.seed):
            position = found.end
            if isinstance(found, Damage):
                self._add(segment, found)
                offset = found.until
                continue
            reason, first, offset = self._fault(found), found.header.first, found.header.first + found.header.rows
            if reason is None:
                self.records += found.header.rows
            else:
                self._add(segment, Damage(found.position, position, first, offset, reason))
        rest = data[position:]
        if following is not None:
            if offset < following:
                self._add(segment, Damage(position, len(data), offset, following, "the end of the segment is missing"))
            return
        lost = lost_rows(rest, offset, self.seed)
        if lost:
            reason = "the end is damaged; the number of records is the most that it can have held"
            self._add(segment, Damage(position, len(data), offset, offset + lost, reason))
        else:
            self.unfinished += len(rest)

    def _fault(self, frame: Frame) -> str | None:
        """Return what is wrong with a frame, also of a closed segment."""
        if not frame.is_intact():
            return "the body of a frame is damaged"
        if not self._is_records:
            return None
        if not frame.header.rows:
            return None if bytes(frame.body) == FORMAT else "the segment has a format of another version"
        try:
            if len(decode_records(frame.body, frame.header.first)) == frame.header.rows:
                return None
        except ValueError as error:
            return str(error)
        return "a frame holds another number of records than its header says"

    def _add(self, segment: int, damage: Damage) -> None:
        self.damage.append(Damaged(self.partition, self.segment_name(segment), *damage))


def outline(path: str | Path) -> dict[str, Any]:
    """Return kind, id, sizes and offsets of a journal; of a journal of messages also cursors, drops and damage.

    Args:
        path: its folder; a journal of messages, or of a Spark query.

    Raises:
        JournalUnreadableError: the folder holds no journal, or cannot be read.
        JournalCorruptError: the journal of a Spark query is damaged.
    """
    folder = LocalFolder(str(check_path("path", path)))
    with journal_errors(folder, "cannot read", JournalUnreadableError):
        found = _identity_in(folder)
        if found.kind != KIND:
            return _of_other(folder, found)
    with Journal.view(path) as view:
        info = view.info()
    return {
        "path": info.path,
        "kind": KIND,
        "id": info.id,
        "segments": info.segments,
        "bytes": info.bytes,
        "partitions": [{"partition": 0, "begin": info.begin, "end": info.end}],
        "cursors": info.cursors,
        "dropped": info.dropped,
        "dead_letters": info.dead_letters,
        "damage": [each._asdict() for each in info.damage],
    }


def _of_other(folder: LocalFolder, identity: Identity) -> dict[str, Any]:
    partitions: list[dict[str, int]] = []
    segments = size = 0
    for number in folder.partitions():
        log = Log(folder, number, seed=identity.seed(number))
        log.load()
        partitions.append({"partition": number, "begin": log.begin, "end": log.end})
        files = log.list_segments()
        segments += len(files)
        size += sum(each for _, each in files)
    return {
        "path": folder.path, "kind": identity.kind, "id": identity.id, "segments": segments, "bytes": size,
        "partitions": partitions, "damage": [],
    }  # fmt: skip

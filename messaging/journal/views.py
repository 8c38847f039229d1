"""Reading a journal of messages, also beside the writer of another process; and snapshots of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from messaging.errors import ArgumentError, ClosedError, JournalRangeError, JournalUnreadableError
from messaging.execution import Closeable
from messaging.journal.folders import LocalFolder, journal_errors
from messaging.journal.quarantine import DamagedRange, Quarantine
from messaging.journal.reader import RecordReader
from messaging.journal.records import Record
from messaging.journal.segments import RecordLog
from messaging.journal.state import DROPPED, DeadLetter, State
from messaging.services.reporting import counter, gauge, info, label, part


class Info(NamedTuple):
    """The state of a journal."""

    path: str
    id: str
    #: offset of the oldest record, and the offset after the newest one
    begin: int
    end: int
    segments: int
    #: of all segments
    bytes: int
    #: position of each cursor: the first offset that it has not acknowledged
    cursors: dict[str, int]
    #: records that were dropped to make room, or for their age, since the journal was created
    dropped: int
    dead_letters: int
    damage: list[DamagedRange]


@dataclass(frozen=True, slots=True)
class CursorDTO:
    """A snapshot of a cursor."""

    name: str = field(metadata=label("cursor"))
    position: int = field(metadata=gauge("offset of the first record that the cursor has not acknowledged"))
    behind: int = field(metadata=gauge("records that the cursor has not acknowledged", "records"))


@dataclass(frozen=True, slots=True)
class JournalDTO:
    """A snapshot of an open journal."""

    path: str = field(metadata=info())
    begin: int = field(metadata=gauge("offset of the oldest record"))
    end: int = field(metadata=gauge("offset after the newest record: records since the journal was created"))
    segments: int = field(metadata=gauge("files with records"))
    bytes: int = field(metadata=gauge("bytes of the files with records", "bytes"))
    unstored: int = field(metadata=gauge("records that wait to be written", "records"))
    backlog: int = field(metadata=gauge("records that the slowest cursor has not acknowledged", "records"))
    backlog_bytes: int = field(
        metadata=gauge("bytes of the records that the slowest cursor has not acknowledged", "bytes")
    )
    oldest: float = field(
        metadata=gauge("age of the oldest record that is not acknowledged; 0: there is none", "seconds")
    )
    max_bytes: int | None = field(metadata=gauge("bound of the backlog; absent: unlimited", "bytes"))
    max_records: int | None = field(metadata=gauge("bound of the backlog; absent: unlimited", "records"))
    dropped: int = field(
        metadata=counter("records that were dropped to make room, or for their age, since its creation", "records")
    )
    dead_letters: int = field(metadata=gauge("records that are kept as dead letters", "records"))
    cursors: tuple[CursorDTO, ...] = field(metadata=part("cursor"))


class JournalView(Closeable):
    """A journal that is read, also while another process writes to it. Thread safe; each iterator is for one thread.

    Get it with :meth:`Journal.view`.

    Attributes:
        path: the folder.
        folder: its files.
        id: identifies the journal, wherever its folder is moved.
    """

    def __init__(
        self, folder: LocalFolder, identity: str, log: RecordLog, state: State | None, quarantine: Quarantine
    ) -> None:
        self.path = folder.path
        self.id = identity
        self.folder = folder
        self._log = log
        self._state = state
        self._quarantine = quarantine
        self._is_closed = False
        log.on_damage = quarantine.add

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ClosedError(f"journal {self.folder.shown}: closed")

    @property
    def begin(self) -> int:
        """The offset of the oldest record."""
        return self._log.begin

    @property
    def end(self) -> int:
        """The offset after the newest record."""
        return self._log.end

    @property
    def size(self) -> int:
        """The bytes of all segments."""
        return sum(segment.size for segment in self._log.segments)

    def bytes_from(self, offset: int) -> int:
        """Return about how many bytes the records from ``offset`` on have. Reads no file."""
        return self._log.bytes_from(offset)

    def refresh(self) -> None:
        """Notice what another process has written since. Raises ``JournalError``, ``ClosedError``."""
        self._refuse_closed()
        with journal_errors(self.folder, "cannot read", JournalUnreadableError):
            self._log.refresh()

    def read(self, start: int | None = None, end: int | None = None) -> Iterator[Record]:
        """Yield the records from offset ``start`` to before ``end``; by default all that are there now.

        Damaged records are skipped and logged, see :attr:`Info.damage`. Records that are trimmed meanwhile are skipped.

        Raises:
            ArgumentError: ``start`` or ``end`` is no integer.
            JournalRangeError: ``start`` is before the oldest record or behind the end.
            JournalError: a file cannot be read.
            ClosedError: the journal is closed. Reading that began before goes on.
        """
        self._refuse_closed()
        for what, value in (("start", start), ("end", end)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ArgumentError(f"{what} must be an integer, not {value!r:.100}")
        return self.stored(start, end)

    def stored(self, start: int | None = None, end: int | None = None) -> Iterator[Record]:
        """Read as :meth:`read`, also after :meth:`close`. For readers that end later than their journal."""
        until = self.end if end is None else min(end, self.end)
        at = self.begin if start is None else start
        if not self.begin <= at <= self.end:
            raise self.folder.error(
                JournalRangeError, f"offset {at} is asked for, and {self.begin} to {self.end} are there"
            )
        return self._read(RecordReader(self._log, at), until)

    def seek(self, is_before: Callable[[Record], bool]) -> int:
        """Return an offset from which on :meth:`read` yields the first record that ``is_before`` is false for.

        It is the start of a segment: some records before that one may follow it, which the caller skips. Reads one
        record of some of the segments.

        Args:
            is_before: false for one record and all after it; true for all before it.

        Raises:
            JournalError: a file cannot be read.
        """
        segments = self._log.segments
        low, high = 0, len(segments)  # the segments before `low` begin before the place, those from `high` on do not
        while low < high:
            middle = (low + high) // 2
            with journal_errors(self.folder, "cannot read", JournalUnreadableError):
                first = RecordReader(self._log, segments[middle].first).take(1)
            if first and is_before(first[0]):
                low = middle + 1
            else:
                high = middle
        return max(self.begin, segments[low - 1].first) if low else self.begin

    def tail(self, most_bytes: int) -> int:
        """Return the offset of the first of the last whole segments that have at most ``most_bytes`` together.

        The last segment counts whatever its size.
        """
        segments = self._log.segments
        left, at = most_bytes, self.end
        for segment in reversed(segments):
            left -= segment.size
            if left < 0 and at != self.end:
                break
            at = segment.first
        return max(at, self.begin)

    def _read(self, reader: RecordReader, until: int) -> Iterator[Record]:
        while reader.offset < until:
            with journal_errors(self.folder, "cannot read", JournalUnreadableError):
                records = reader.take(min(1000, until - reader.offset))
            if not records:
                return
            yield from (record for record in records if record.offset < until)

    def cursors(self) -> dict[str, int]:
        """Return the position of each cursor: the first offset that it has not acknowledged.

        In another process than the writer's: the positions that are stored, which is soon after they have moved.
        """
        stored = {} if self._state is None else self._state.cursors()
        return {name: max(self.begin, position) for name, position in stored.items()}

    def dead_letters(self) -> list[DeadLetter]:
        """Return the records that could not be processed, the oldest first."""
        return [*self.read_dead_letters()]

    def read_dead_letters(self) -> Iterator[DeadLetter]:
        """Yield the records that could not be processed, the oldest first; one at a time in memory."""
        after = 0
        while self._state is not None and (found := self._state.dead_letters(after=after, most=1)):
            yield found[0]
            after = found[0].id

    def info(self) -> Info:
        """Return the state of the journal. Raises ``JournalError``."""
        segments = self._log.segments
        with journal_errors(self.folder, "cannot read", JournalUnreadableError):
            damage = self._quarantine.ranges()
        return Info(
            self.path,
            self.id,
            self.begin,
            self.end,
            len(segments),
            self.size,
            self.cursors(),
            self.dropped,
            0 if self._state is None else self._state.count_dead_letters(),
            damage,
        )

    @property
    def dropped(self) -> int:
        """Records that were dropped to make room, or for their age, since the journal was created."""
        return 0 if self._state is None else self._state.counter(DROPPED)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._is_closed = True
        if self._state is not None:
            self._state.close()

"""The log of one partition: appended to by one thread, read by offsets, committed from the front.

When :meth:`LogWriter.append` returns, its rows are on the disk: they survive any crash, with the same offsets and in
the same order. Offsets rise by one from row to row and are never used again. Committed rows are deleted segment by
segment. The last segment always stays: it tells the next offset.

A crash may leave half a frame at the end of the last segment. Its messages were not acknowledged, so the broker still
has them, and the half frame is cut off when the log is opened. Any other damage is an error. A failed write may leave
whole frames at the end of a segment; the name of the next segment tells where they end.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from adapters.spark.columns import JOURNAL
from adapters.spark.errors import (
    DataLossError,
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalUnreadableError,
    redacted,
)
from adapters.spark.journal import frames

if TYPE_CHECKING:
    from adapters.spark.journal.folders import Appender, Folder
    from messaging.errors import MessagingError

logger = logging.getLogger(__name__)

#: the file that identifies a journal; a folder without it is no journal
META: Final = "journal.json"
_SUFFIX: Final = ".segment"
#: bytes from which on a local segment is closed
SEGMENT_BYTES: Final = 64 * 2**20
#: bytes from which on a segment is closed when all its rows are committed, so that it can be deleted
_WORTH_CLOSING: Final = 2**20
#: errors of the operating system for a full disk
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Span(NamedTuple):
    """Rows of one segment, and the bytes of their frames. Tasks read spans."""

    segment: str
    position: int
    length: int
    #: offset of the first row, and the offset after the last row
    start: int
    end: int
    #: the seed of the frames, see :mod:`adapters.spark.journal.frames`
    seed: int


class _Frames:
    """The positions and sizes of the frames of a log, found by offset without disk access. Thread safe.

    Attributes:
        begin: the offset of the first row.
        end: the offset after the last row on the disk, or in the object store.
    """

    def __init__(self) -> None:
        #: guards the columns; reentrant, for changes that need several calls
        self._lock = threading.RLock()
        # arrays: a backlog of small frames has millions
        self._firsts = array("q")
        self._segment_firsts = array("q")  # the offsets in their names
        self._positions = array("q")
        #: bytes of all frames that were ever added: up to the begin of each, and up to the end of the last one
        self._totals = array("q", [0])
        self.begin = self.end = 0

    def _clear(self, begin: int) -> None:
        """Drop all frames; the next one begins at ``begin``."""
        for column in (self._firsts, self._segment_firsts, self._positions, self._totals):
            del column[:]
        self._totals.append(0)
        self.begin = self.end = begin

    def _add(self, first: int, rows: int, segment: int, position: int, length: int) -> None:
        """Add a frame: ``rows`` from offset ``first`` on, in ``length`` bytes of ``segment``."""
        with self._lock:
            if not self._firsts:
                self.begin = first
            self._firsts.append(first)
            self._segment_firsts.append(segment)
            self._positions.append(position)
            self._totals.append(self._totals[-1] + length)
            self.end = first + rows

    def _segment_of(self, offset: int) -> int | None:
        """Return the segment that holds ``offset``."""
        at = bisect_right(self._firsts, offset) - 1
        return self._segment_firsts[at] if at >= 0 else None

    def _forget(self, segment: int) -> None:
        """Drop the frames of all segments before ``segment``."""
        count = bisect_left(self._segment_firsts, segment)
        for column in (self._firsts, self._segment_firsts, self._positions, self._totals):
            del column[:count]
        self.begin = self._firsts[0] if self._firsts else self.end

    def bytes_from(self, offset: int) -> int:
        """Return the bytes of the frame that holds ``offset``, and of all later frames."""
        with self._lock:
            at = max(0, bisect_right(self._firsts, offset) - 1)
            return 0 if offset >= self.end else self._totals[-1] - self._totals[at]

    def end_within(self, start: int, limit: int) -> int:
        """Return the largest offset at which the rows from ``start`` on have about ``limit`` bytes; at least one row.

        All rows of a frame count the same.
        """
        with self._lock:
            at = max(0, bisect_right(self._firsts, start) - 1)
            if start >= self.end or not self._firsts:
                return self.end
            skipped = self._bytes(at) * (start - self._firsts[at]) // self._rows(at)
            until = self._totals[at] + skipped + limit
            last = bisect_right(self._totals, until) - 1
            if last >= len(self._firsts):
                return self.end
            within = (until - self._totals[last]) * self._rows(last) // self._bytes(last)
            return max(start + 1, self._firsts[last] + within)

    def _bytes(self, at: int) -> int:
        """Return the length of a frame."""
        return self._totals[at + 1] - self._totals[at]

    def _rows(self, at: int) -> int:
        """Return the number of rows of a frame."""
        return (self._firsts[at + 1] if at + 1 < len(self._firsts) else self.end) - self._firsts[at]

    def _pieces(self, start: int, end: int) -> list[tuple[int, int, int, int, int]]:
        """Return segment, position, length and offsets of the rows from ``start`` to ``end``, for each segment."""
        found: list[tuple[int, int, int, int, int]] = []
        at = max(0, bisect_right(self._firsts, start) - 1)
        while at < len(self._firsts) and self._firsts[at] < end:
            segment = self._segment_firsts[at]
            after = bisect_right(self._segment_firsts, segment, at)
            stop = min(after, bisect_left(self._firsts, end, at))
            position = self._positions[at]
            length = self._positions[stop - 1] + self._bytes(stop - 1) - position
            until = self._firsts[stop] if stop < len(self._firsts) else self.end
            found.append((segment, position, length, max(start, self._firsts[at]), min(end, until)))
            at = stop
        return found


class Log(_Frames):
    """One partition of a journal, for reading. Thread safe. For ``seed`` see :mod:`adapters.spark.journal.frames`."""

    def __init__(self, folder: Folder, partition: int, *, seed: int = 0) -> None:
        super().__init__()
        self.partition = partition
        self.folder = folder
        self._seed = seed

    def spans(self, start: int, end: int) -> list[Span]:
        """Return the spans of the rows from ``start`` to ``end``.

        Raises:
            DataLossError: some of these rows are missing.
        """
        if start >= end:
            return []
        with self._lock:
            begin, known = self.begin, self.end
            found = self._pieces(start, end)
        if start < begin or end > known:
            raise DataLossError(
                f"option 'journalPath' ({self.folder.path}): offsets {start} to {end} of partition {self.partition} "
                f"are asked for, and {begin} to {known} are there; failOnDataLoss=false goes on with those"
            )
        return [
            Span(_name(self.partition, segment), position, length, first, last, self._seed)
            for segment, position, length, first, last in found
        ]

    def _segments(self) -> list[tuple[int, int]]:
        """Return the offset and the size of each segment, in order."""
        found = []
        for name, size in self.folder.list(str(self.partition)).items():
            stem = name.removesuffix(_SUFFIX)
            if stem != name and len(stem) == 20 and stem.isdecimal():
                found.append((int(stem), size))
        return sorted(found)

    def load(self) -> tuple[int, int, int] | None:
        """Build the index from the segments; return offset, end of the last frame and size of the last segment.

        A writer may be at work: segments that it deletes meanwhile are committed, and not missing.

        Raises:
            JournalCorruptError: a segment is not as it was written.
        """
        segments = [segment for segment, _ in self._segments()]
        self._clear(segments[0] if segments else 0)
        last: tuple[int, int, int] | None = None
        for number, segment in enumerate(segments):
            if segment != self.end:
                if segments[number - 1] in (known for known, _ in self._segments()):
                    self._corrupt(segment, f"rows {self.end} to {segment} are missing before it")
                self._clear(segment)
            until = segments[number + 1] if number + 1 < len(segments) else None
            try:
                data = self.folder.read(_name(self.partition, segment), copy=until is None)
            except FileNotFoundError:
                self._clear(segment if until is None else until)
                continue
            last = (segment, self._load(segment, data, until), data.size)
        return last

    def _load(self, segment: int, data: pa.Buffer, until: int | None) -> int:
        """Add the frames of ``segment``, up to row ``until``; return the end of the last one."""
        position = 0
        for frame in frames.scan(data, self._seed):
            header = frame.header
            if until is None and not frame.is_intact():
                break
            if not position and header.first != segment:
                self._corrupt(segment, f"it is segment {_name(self.partition, header.first)}")
            if until is not None and header.first >= until:
                return position
            if header.first != self.end:
                self._corrupt(segment, f"row {header.first} follows row {self.end - 1}")
            if header.rows:
                self._add(header.first, header.rows, segment, position, frame.end - position)
            position = frame.end
        if position < data.size and frames.any_after(data, position, self._seed):
            self._corrupt(segment, f"the frame at byte {position} is damaged, and whole ones follow")
        return position

    def _corrupt(self, segment: int, what: str) -> None:
        raise JournalCorruptError(self.folder.path, f"segment {_name(self.partition, segment)}: {what}")


class LogWriter(Log):
    """One partition of a journal, for its one writer.

    :meth:`append` is called by one thread, everything else by any. Where segments grow, a segment is closed from
    ``segment_bytes`` on.
    """

    def __init__(self, folder: Folder, partition: int, *, seed: int = 0, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__(folder, partition, seed=seed)
        self._segment_bytes = segment_bytes
        #: guards the appender, and is held while it writes
        self._writing = threading.Lock()
        self._appender: Appender | None = None
        self._segment = 0
        self._is_closed = False
        #: rows before this offset are committed
        self._committed = 0
        self._close_segment = False
        #: segments before this one are deleted
        self._kept = 0
        folder.make(str(partition))
        last = self.load()
        if last is None:
            return
        self._segment, whole, size = last
        self._committed = self.begin
        if whole < size:
            logger.warning(
                "journal %s: cut off %d bytes of an unfinished write at the end of %s",
                redacted(folder.path), size - whole, _name(partition, self._segment),
            )  # fmt: skip
        if folder.appends and whole:
            self._appender = folder.append_to(_name(partition, self._segment), whole)

    @property
    def backlog(self) -> int:
        """Bytes of rows that are not committed."""
        return self.bytes_from(self._committed)

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows whose offsets begin with :attr:`end`. They are on the disk when this returns.

        Raises:
            JournalFullError: there is no room. Nothing was added; the caller may try again.
            JournalError: the write failed. Nothing was added.
        """
        if not batch.num_rows:
            return
        with self._writing, journal_errors(self.folder.path, "cannot write"):
            if self._is_closed:
                raise JournalError(self.folder.path, "it is closed")
            try:
                self._append(self.end, batch)
            except BaseException:
                self._close_appender()  # a failed file is not used again
                raise

    def _append(self, first: int, batch: pa.RecordBatch) -> None:
        parts = frames.encode(first, batch.num_rows, batch.serialize(), self._seed)
        length = sum(len(memoryview(part)) for part in parts)
        if self.folder.appends:
            appender = self._open_segment(first)
            appender.append(parts if appender.size else [*self._head(first), *parts])
            end = appender.size
        else:
            self.folder.check_lock()
            end = self.folder.write(_name(self.partition, first), [*self._head(first), *parts])
            self.folder.check_lock()  # another writer may have taken over and written the same object
            self._segment = first
        self._add(first, batch.num_rows, self._segment, end - length, length)

    def _head(self, first: int) -> list[Any]:
        """Return the first frame of a segment."""
        return frames.encode(first, 0, JOURNAL.serialize(), self._seed)

    def _open_segment(self, first: int) -> Appender:
        """Return the segment to append to."""
        appender = self._appender
        if appender is not None and (self._close_segment or appender.size >= self._segment_bytes):
            self._close_appender()
            appender = None
        self._close_segment = False
        if appender is None:
            appender = self._appender = self.folder.append_to(_name(self.partition, first))
            self._segment = first
        return appender

    def _close_appender(self) -> None:
        appender, self._appender = self._appender, None
        if appender is not None:
            appender.close()

    def commit(self, offset: int) -> None:
        """Mark the rows before ``offset`` as processed, and delete the segments that are not needed any more.

        Raises:
            JournalError: something cannot be deleted. The next commit tries again.
        """
        with self._lock:
            self._committed = max(self._committed, min(offset, self.end))
            if self._committed == self.end and self.bytes_from(self.begin) >= _WORTH_CLOSING:
                self._close_segment = True
            keep = self._segment_of(self._committed)
            if self._committed == self.end == self._segment:
                keep = self._segment  # new and empty: the disk may be full of committed segments
            if keep is None or keep == self._kept:
                return
            self._forget(keep)
        with journal_errors(self.folder.path, "cannot delete committed segments"):
            self.folder.check_lock()
            for segment, _ in self._segments():
                if segment < keep:
                    self.folder.delete(_name(self.partition, segment))
        self._kept = keep

    def tail(self, rows: int) -> pa.Table:
        """Return the last ``rows`` rows, or all if there are fewer."""
        while True:
            end, begin = self.end, self.begin
            try:
                spans = self.spans(max(begin, end - rows), end)
                return pa.Table.from_batches(read(self.folder, spans), JOURNAL)
            except DataLossError:
                if self.begin == begin:
                    raise  # not because of a commit meanwhile

    def close(self) -> None:
        """Close the segment, after a write in progress. Idempotent."""
        with self._writing:
            self._is_closed = True
            self._close_appender()


def _name(partition: int, segment: int) -> str:
    return f"{partition}/{segment:020d}{_SUFFIX}"


@contextlib.contextmanager
def journal_errors(path: str, what: str, kind: type[JournalError] = JournalError) -> Iterator[None]:
    """Raise an :class:`OSError` as a :class:`JournalFullError` if the disk is full, else as ``kind``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            kind = JournalFullError
        raise kind(path, f"{what}: {error.strerror or error}") from error


def read(folder: Folder, spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``spans``, as they were written.

    Raises:
        JournalCorruptError: a row is not as it was written.
        JournalUnreadableError: there is no journal, or it cannot be reached.
        DataLossError: a segment is missing.
    """
    for span in spans:
        with journal_errors(folder.path, f"cannot read {span.segment}", JournalUnreadableError):
            try:
                data = folder.read(span.segment, span.position, span.length)
            except FileNotFoundError:
                raise _gone(folder, span) from None
        at = span.start
        for frame in frames.scan(data, span.seed):
            first, rows = frame.header.first, frame.header.rows
            if not first <= at < first + rows or not frame.is_intact():
                break
            until = min(span.end, first + rows)
            yield pa.ipc.read_record_batch(frame.body, JOURNAL).slice(at - first, until - at)
            at = until
            if at == span.end:
                break
        if at < span.end:
            raise JournalCorruptError(folder.path, f"segment {span.segment}: row {at} is not as it was written")


def _gone(folder: Folder, span: Span) -> MessagingError:
    """Return the error of a missing segment."""
    if META not in folder.list():
        return JournalUnreadableError(
            folder.path, "there is no journal on this machine: it has to be where the driver and all executors see it"
        )
    return DataLossError(
        f"option 'journalPath' ({folder.path}): segment {span.segment} is gone; was the journal committed, or "
        "removed, by another program?"
    )

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
from adapters.spark.journal.frame_index import Index

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


class Log:
    """One partition of a journal, for reading. Thread safe.

    Args:
        folder: the folder of the journal.
        partition: the number of the partition.
        seed: the seed of its frames, see :mod:`adapters.spark.journal.frames`.
    """

    def __init__(self, folder: Folder, partition: int, *, seed: int = 0) -> None:
        self.partition = partition
        self._folder = folder
        self._seed = seed
        #: guards the index
        self._lock = threading.Lock()
        self._index = Index(0)

    @property
    def begin(self) -> int:
        """The offset of the first row."""
        with self._lock:
            return self._index.begin

    @property
    def end(self) -> int:
        """The offset after the last row on the disk, or in the object store."""
        with self._lock:
            return self._index.end

    def bytes_from(self, offset: int) -> int:
        """Return the bytes in the journal from ``offset`` on."""
        with self._lock:
            return self._index.bytes_from(offset)

    def end_within(self, start: int, limit: int) -> int:
        """Return the offset up to which the rows from ``start`` on have about ``limit`` bytes; at least one row."""
        with self._lock:
            return self._index.end_within(start, limit)

    def spans(self, start: int, end: int) -> list[Span]:
        """Return the spans of the rows from ``start`` to ``end``.

        Raises:
            DataLossError: some of these rows are missing.
        """
        with self._lock:
            begin, known = self._index.begin, self._index.end
            found = self._index.spans(start, end)
        if start < end and (start < begin or end > known):
            raise DataLossError(
                f"option 'journalPath' ({self._folder.path}): offsets {start} to {end} of partition {self.partition} "
                f"are asked for, and {begin} to {known} are there; failOnDataLoss=false goes on with those"
            )
        return [
            Span(_name(self.partition, segment), position, length, first, last, self._seed)
            for segment, position, length, first, last in found
        ]

    def _segments(self) -> list[tuple[int, int]]:
        """Return the offset and the size of each segment, in order."""
        found = []
        for name, size in self._folder.list(str(self.partition)).items():
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
        index = Index(segments[0] if segments else 0)
        last: tuple[int, int, int] | None = None
        for number, segment in enumerate(segments):
            if segment != index.end:
                if segments[number - 1] in (known for known, _ in self._segments()):
                    self._corrupt(segment, f"rows {index.end} to {segment} are missing before it")
                index = Index(segment)
            until = segments[number + 1] if number + 1 < len(segments) else None
            try:
                data = self._folder.read(_name(self.partition, segment), copy=until is None)
            except FileNotFoundError:
                index = Index(segment if until is None else until)
                continue
            last = (segment, self._load(index, segment, data, until), data.size)
        with self._lock:
            self._index = index
        return last

    def _load(self, index: Index, segment: int, data: pa.Buffer, until: int | None) -> int:
        """Add the frames of ``segment``, up to row ``until``, to ``index``; return the end of the last one."""
        position = 0
        for frame in frames.scan(data, self._seed):
            header = frame.header
            if until is None and not frame.is_intact():
                break
            if not position and header.first != segment:
                self._corrupt(segment, f"it is segment {_name(self.partition, header.first)}")
            if until is not None and header.first >= until:
                return position
            if header.first != index.end:
                self._corrupt(segment, f"row {header.first} follows row {index.end - 1}")
            if header.rows:
                index.add(header.first, header.rows, segment, position, frame.end - position)
            position = frame.end
        if position < data.size and frames.any_after(data, position, self._seed):
            self._corrupt(segment, f"the frame at byte {position} is damaged, and whole ones follow")
        return position

    def _corrupt(self, segment: int, what: str) -> None:
        raise JournalCorruptError(self._folder.path, f"segment {_name(self.partition, segment)}: {what}")


class LogWriter(Log):
    """One partition of a journal, for its one writer.

    :meth:`append` is called by one thread, everything else by any.

    Args:
        folder, partition, seed: see :class:`Log`.
        segment_bytes: bytes from which on a segment is closed, where segments grow.
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
        self._committed = self._index.begin
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
        with self._lock:
            return self._index.bytes_from(self._committed)

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows whose offsets begin with :attr:`end`. They are on the disk when this returns.

        Raises:
            JournalFullError: there is no room. Nothing was added; the caller may try again.
            JournalError: the write failed. Nothing was added.
        """
        if not batch.num_rows:
            return
        with self._writing, journal_errors(self._folder.path, "cannot write"):
            if self._is_closed:
                raise JournalError(self._folder.path, "it is closed")
            try:
                self._append(self._index.end, batch)
            except BaseException:
                self._close_appender()  # a failed file is not used again
                raise

    def _append(self, first: int, batch: pa.RecordBatch) -> None:
        parts = frames.encode(first, batch.num_rows, batch.serialize(), self._seed)
        length = sum(len(memoryview(part)) for part in parts)
        if self._folder.appends:
            appender = self._open_segment(first)
            appender.append(parts if appender.size else [*self._head(first), *parts])
            end = appender.size
        else:
            self._folder.check_lock()
            end = self._folder.write(_name(self.partition, first), [*self._head(first), *parts])
            self._folder.check_lock()  # another writer may have taken over and written the same object
            self._segment = first
        with self._lock:
            self._index.add(first, batch.num_rows, self._segment, end - length, length)

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
            appender = self._appender = self._folder.append_to(_name(self.partition, first))
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
            self._committed = max(self._committed, min(offset, self._index.end))
            if self._committed == self._index.end and self._index.bytes_from(self._index.begin) >= _WORTH_CLOSING:
                self._close_segment = True
            keep = self._index.segment_of(self._committed)
            if self._committed == self._index.end == self._segment:
                keep = self._segment  # new and empty: the disk may be full of committed segments
            if keep is None or keep == self._kept:
                return
            self._index.forget(keep)
        with journal_errors(self._folder.path, "cannot delete committed segments"):
            self._folder.check_lock()
            for segment, _ in self._segments():
                if segment < keep:
                    self._folder.delete(_name(self.partition, segment))
        self._kept = keep

    def tail(self, rows: int) -> pa.Table:
        """Return the last ``rows`` rows, or all if there are fewer."""
        while True:
            end, begin = self.end, self.begin
            try:
                spans = self.spans(max(begin, end - rows), end)
                return pa.Table.from_batches(read(self._folder, spans), JOURNAL)
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

"""The log of one partition: appended to by one thread, read by offsets, committed from the front.

What :meth:`LogWriter.append` returned from is on the disk: it is there after any crash, with the same offsets and in
the same order. Offsets rise by one from row to row and never come back. What is committed is deleted segment by
segment. The last segment always stays: it tells where offsets go on.

A crash may leave half a frame at the end of the last segment. Nobody was told of it, the broker still has its
messages, and it is cut off when the log is opened. Anything else that is not as it was written is an error. A write
that failed may leave whole frames at the end of a segment; the name of the next one says where they end.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from adapters.spark import frames
from adapters.spark.columns import JOURNAL
from adapters.spark.errors import (
    DataLossError,
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalUnreadableError,
    redacted,
)
from adapters.spark.index import Index

if TYPE_CHECKING:
    from adapters.spark.folders import Appender, Folder
    from messaging.errors import MessagingError

logger = logging.getLogger(__name__)

#: the file beside the logs that tells whose they are; where it is not, there is no journal
META: Final = "journal.json"
_SUFFIX: Final = ".segment"
#: a local segment is closed when it has grown beyond this, bytes
SEGMENT_BYTES: Final = 64 * 2**20
#: a segment whose rows are all committed is closed from this size on, so that it can go
_WORTH_CLOSING: Final = 2**20
#: what an operating system says when there is no room
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Span(NamedTuple):
    """Rows of one segment, and the bytes they are in: frames as a whole. Names what an executor reads."""

    segment: str
    position: int
    length: int
    #: offset of the first row wanted, and the one after the last
    start: int
    end: int
    #: what the checks of its frames begin with
    seed: int


class Log:
    """One partition of a journal, for reading. Thread safe.

    Args:
        folder: that of the journal.
        partition: which one.
        seed: what the checks of its frames begin with.
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
        """The first offset that is there."""
        with self._lock:
            return self._index.begin

    @property
    def end(self) -> int:
        """The offset after the last that is there: on the disk, or what stands for it."""
        with self._lock:
            return self._index.end

    def bytes_from(self, offset: int) -> int:
        """Bytes in the journal from ``offset`` on."""
        with self._lock:
            return self._index.bytes_from(offset)

    def end_within(self, start: int, limit: int) -> int:
        """How far the rows from ``start`` on go in ``limit`` bytes; at least one row, if there is one."""
        with self._lock:
            return self._index.end_within(start, limit)

    def spans(self, start: int, end: int) -> list[Span]:
        """Where the rows from ``start`` to ``end`` are.

        Raises:
            DataLossError: not all of them are there.
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
        """Offset and size of each segment, in order."""
        found = []
        for name, size in self._folder.list(str(self.partition)).items():
            stem = name.removesuffix(_SUFFIX)
            if stem != name and len(stem) == 20 and stem.isdecimal():
                found.append((int(stem), size))
        return sorted(found)

    def load(self) -> tuple[int, int, int] | None:
        """Find out what is there: of the last segment, its offset, where its last frame ends, and its size.

        A writer may be at work: what it deletes meanwhile is committed, and not missing.

        Raises:
            JournalCorruptError: it is not as it was written.
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
        """Add the frames of ``segment``, up to row ``until``, to ``index``; returns where the last one ends."""
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
        segment_bytes: a segment that has grown beyond this is closed, where segments grow.
    """

    def __init__(self, folder: Folder, partition: int, *, seed: int = 0, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__(folder, partition, seed=seed)
        self._segment_bytes = segment_bytes
        #: guards the appender, and is held while it writes
        self._writing = threading.Lock()
        self._appender: Appender | None = None
        self._segment = 0
        self._is_closed = False
        #: everything before is committed
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
        """Bytes that are not committed."""
        with self._lock:
            return self._index.bytes_from(self._committed)

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows; ``offset`` of the first is :attr:`end`. They are on the disk when this returns.

        Raises:
            JournalFullError: there is no room for them. Nothing was added, and it may be tried again.
            JournalError: anything else is wrong. Nothing was added.
        """
        if not batch.num_rows:
            return
        with self._writing, journal_errors(self._folder.path, "cannot write"):
            if self._is_closed:
                raise JournalError(self._folder.path, "it is closed")
            try:
                self._append(self._index.end, batch)
            except BaseException:
                self._let_go()  # a disk that failed once is not asked for the same file again
                raise

    def _append(self, first: int, batch: pa.RecordBatch) -> None:
        parts = frames.encode(first, batch.num_rows, batch.serialize(), self._seed)
        length = _size(parts)
        if self._folder.appends:
            appender = self._room(first)
            appender.append(parts if appender.size else [*self._head(first), *parts])
            end = appender.size
        else:
            self._folder.check_lock()
            end = self._folder.write(_name(self.partition, first), [*self._head(first), *parts])
            self._folder.check_lock()  # it may be the next writer's that we have written over: then it was nothing
            self._segment = first
        with self._lock:
            self._index.add(first, batch.num_rows, self._segment, end - length, length)

    def _head(self, first: int) -> list[Any]:
        """What a segment begins with."""
        return frames.encode(first, 0, JOURNAL.serialize(), self._seed)

    def _room(self, first: int) -> Appender:
        """A segment to append to."""
        appender = self._appender
        if appender is not None and (self._close_segment or appender.size >= self._segment_bytes):
            self._let_go()
            appender = None
        self._close_segment = False
        if appender is None:
            appender = self._appender = self._folder.append_to(_name(self.partition, first))
            self._segment = first
        return appender

    def _let_go(self) -> None:
        appender, self._appender = self._appender, None
        if appender is not None:
            appender.close()

    def commit(self, offset: int) -> None:
        """Everything before ``offset`` is processed: delete what is not needed any more.

        Raises:
            JournalError: something cannot be deleted. The next commit tries again.
        """
        with self._lock:
            self._committed = max(self._committed, min(offset, self._index.end))
            if self._committed == self._index.end and self._index.bytes_from(self._index.begin) >= _WORTH_CLOSING:
                self._close_segment = True
            keep = self._index.segment_of(self._committed)
            if self._committed == self._index.end == self._segment:
                keep = self._segment  # a new one, and still empty: the disk may be full of those before
            if keep is None or keep == self._kept:
                return
            self._index.forget(keep)
        with journal_errors(self._folder.path, "cannot delete what is committed"):
            self._folder.check_lock()
            for segment, _ in self._segments():
                if segment < keep:
                    self._folder.delete(_name(self.partition, segment))
        self._kept = keep

    def tail(self, rows: int) -> pa.Table:
        """The last ``rows`` rows, or as many as are there."""
        while True:
            end, begin = self.end, self.begin
            try:
                spans = self.spans(max(begin, end - rows), end)
                return pa.Table.from_batches(read(self._folder, spans), JOURNAL)
            except DataLossError:
                if self.begin == begin:
                    raise  # it was not a commit meanwhile

    def close(self) -> None:
        """Let go of the file; waits for what is being written. Idempotent."""
        with self._writing:
            self._is_closed = True
            self._let_go()


def _name(partition: int, segment: int) -> str:
    return f"{partition}/{segment:020d}{_SUFFIX}"


def _size(parts: Sequence[Any]) -> int:
    return sum(len(memoryview(part)) for part in parts)


@contextlib.contextmanager
def journal_errors(path: str, what: str, kind: type[JournalError] = JournalError) -> Iterator[None]:
    """An :class:`OSError` becomes one of ``kind``, or a :class:`JournalFullError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            kind = JournalFullError
        raise kind(path, f"{what}: {error.strerror or error}") from error


def read(folder: Folder, spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
    """The rows of ``spans``, as they were written.

    Raises:
        JournalCorruptError: they are not there as they were written.
        JournalUnreadableError: there is no journal, or it cannot be reached.
        DataLossError: a segment is gone.
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
    """Why there is no such segment."""
    if META not in folder.list():
        return JournalUnreadableError(
            folder.path, "there is no journal on this machine: it has to be where the driver and all executors see it"
        )
    return DataLossError(
        f"option 'journalPath' ({folder.path}): segment {span.segment} is gone; was the journal committed, or "
        "removed, by somebody else?"
    )

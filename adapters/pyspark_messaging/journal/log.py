"""The log of one partition: record batches, found by offset and cut into the spans of tasks.

Segments, offsets and crashes are the matter of :mod:`messaging.journal.log`. The body of a frame is an encapsulated
Arrow IPC message: the schema in the first frame of a segment, then record batches. Bodies are multiples of eight bytes
long, so that a mapped file is read without copying.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from messaging.errors import MessagingError
from messaging.journal.folders import Folder, journal_errors
from messaging.journal.frames import scan
from messaging.journal.log import META, Log, LogWriter
from pyspark_messaging.columns import JOURNAL
from pyspark_messaging.errors import OPTION, DataLossError, JournalCorruptError, JournalError, JournalUnreadableError

#: bytes from which on a local segment is closed
SEGMENT_BYTES: Final = 64 * 2**20
#: bytes from which on a segment is closed when all its rows are committed, so that it can be deleted
_WORTH_CLOSING: Final = 2**20
#: offsets that a frame can skip
_MOST_SKIPPED: Final = 2**32 - 1
_NOTHING: Final = pa.RecordBatch.from_pylist([], schema=JOURNAL)


class Span(NamedTuple):
    """Rows of one segment, and the bytes of their frames. Tasks read spans."""

    segment: str
    position: int
    length: int
    #: offset of the first row, and the offset after the last row
    start: int
    end: int
    #: the seed of the frames, see :mod:`messaging.journal.frames`
    seed: int


class RowLog(Log):
    """One partition of a journal, for reading. Thread safe.

    The positions and sizes of its frames are found by offset without disk access.
    """

    def __init__(self, folder: Folder, partition: int, *, seed: int = 0) -> None:
        super().__init__(folder, partition, seed=seed)
        # arrays: a backlog of small frames has millions
        self._firsts = array("q")
        self._segment_firsts = array("q")  # the offsets in their names
        self._positions = array("q")
        #: bytes of all frames that were ever added: up to the begin of each, and up to the end of the last one
        self._totals = array("q", [0])

    def _restart(self, begin: int) -> None:
        super()._restart(begin)
        for column in (self._firsts, self._segment_firsts, self._positions, self._totals):
            del column[:]
        self._totals.append(0)

    def _note(self, segment: int, first: int, rows: int, position: int, length: int) -> None:
        with self.lock:
            if not self._firsts:
                self.begin = first
            self._firsts.append(first)
            self._segment_firsts.append(segment)
            self._positions.append(position)
            self._totals.append(self._totals[-1] + length)
            self.end = first + rows

    def bytes_from(self, offset: int) -> int:
        """Return the bytes of the frame that holds ``offset``, and of all later frames."""
        with self.lock:
            at = max(0, bisect_right(self._firsts, offset) - 1)
            return 0 if offset >= self.end else self._totals[-1] - self._totals[at]

    def end_within(self, start: int, limit: int) -> int:
        """Return the largest offset at which the rows from ``start`` on have about ``limit`` bytes; at least one row.

        All rows of a frame count the same.
        """
        with self.lock:
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

    def spans(self, start: int, end: int) -> list[Span]:
        """Return the spans of the rows from ``start`` to ``end``.

        Raises:
            DataLossError: some of these rows are missing.
        """
        if start >= end:
            return []
        with self.lock:
            begin, known = self.begin, self.end
            found = self._pieces(start, end)
        if start < begin or end > known:
            raise DataLossError(
                f"option {OPTION!r} ({self.folder.path}): offsets {start} to {end} of partition {self.partition} "
                f"are asked for, and {begin} to {known} are there; failOnDataLoss=false goes on with those"
            )
        return [
            Span(self.segment_name(segment), position, length, first, last, self.seed)
            for segment, position, length, first, last in found
        ]


class RowLogWriter(LogWriter, RowLog):
    """One partition of a journal, for its one writer.

    :meth:`append` is called by one thread, everything else by any. Where segments grow, a segment is closed from
    ``segment_bytes`` on.
    """

    def __init__(self, folder: Folder, partition: int, *, seed: int = 0, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__(folder, partition, seed=seed, head=JOURNAL.serialize(), segment_bytes=segment_bytes)
        #: rows before this offset are committed
        self._committed = self.begin
        #: whether the last append failed: then a small segment is worth deleting, too
        self._needs_room = False

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
        if batch.num_rows:
            try:
                self.append_frame(batch.num_rows, [batch.serialize()])
            except JournalError:
                self._needs_room = True
                raise
            self._needs_room = False

    def skip_to(self, offset: int) -> None:
        """Give no offset before ``offset`` to new rows. A frame without rows stands for those that are gone.

        Raises:
            JournalError: it cannot be written.
        """
        while self.end < offset:
            self.append_frame(min(offset - self.end, _MOST_SKIPPED), [_NOTHING.serialize()])

    def commit(self, offset: int) -> None:
        """Mark the rows before ``offset`` as processed, and delete the segments that are not needed any more.

        Raises:
            JournalError: something cannot be deleted. The next commit tries again.
        """
        with self.lock:
            self._committed = max(self._committed, min(offset, self.end))
            size = self.bytes_from(self.begin)
            is_over = self._committed == self.end and size >= (1 if self._needs_room else _WORTH_CLOSING)
        if is_over and self.folder.appends:
            self.start_segment()  # outside of the lock, which an append takes while it writes
        with self.lock:
            at = bisect_right(self._firsts, self._committed) - 1
            if self._committed == self.end == self.last_segment:
                keep = self.last_segment  # new and empty: the disk may be full of committed segments
            elif at >= 0:
                keep = self._segment_firsts[at]
            else:
                return
            count = bisect_left(self._segment_firsts, keep)
            for column in (self._firsts, self._segment_firsts, self._positions, self._totals):
                del column[:count]
            self.begin = self._firsts[0] if self._firsts else self.end
        self.delete_before(keep)

    def tail(self, rows: int) -> pa.Table:
        """Return the last ``rows`` rows, or all if there are fewer."""
        return self.rows(self.end - rows, self.end)

    def rows(self, first: int, until: int) -> pa.Table:
        """Return the rows from ``first`` to ``until``, as far as they are not deleted.

        Raises:
            MessagingError: they cannot be read.
        """
        while True:
            begin = self.begin
            try:
                spans = self.spans(max(begin, first), until)
                return pa.Table.from_batches(read(self.folder, spans), JOURNAL)
            except DataLossError:
                if self.begin == begin:
                    raise  # not because of a commit meanwhile


def read(folder: Folder, spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``spans``, as they were written.

    Raises:
        JournalCorruptError: a row is not as it was written.
        JournalUnreadableError: there is no journal, or it cannot be reached.
        DataLossError: a segment is missing.
    """
    for span in spans:
        with journal_errors(folder, f"cannot read {span.segment}", JournalUnreadableError):
            try:
                data = folder.read(span.segment, span.position, span.length)
            except FileNotFoundError:
                raise _gone(folder, span) from None
        at = span.start
        for frame in scan(data, span.seed):
            first, rows = frame.header.first, frame.header.rows
            if not first <= at < first + rows or not frame.is_intact():
                break
            until = min(span.end, first + rows)
            batch = pa.ipc.read_record_batch(pa.py_buffer(frame.body), JOURNAL)
            if batch.num_rows:  # offsets that were skipped have none, see RowLogWriter.skip_to
                yield batch.slice(at - first, until - at)
            at = until
            if at == span.end:
                break
        if at < span.end:
            raise folder.error(JournalCorruptError, f"segment {span.segment}: row {at} is not as it was written")


def _gone(folder: Folder, span: Span) -> MessagingError:
    """Return the error of a missing segment."""
    if META not in folder.list():
        return folder.error(
            JournalUnreadableError,
            "there is no journal on this machine: it has to be where the driver and all executors see it",
        )
    return DataLossError(
        f"option {OPTION!r} ({folder.path}): segment {span.segment} is gone; was the journal committed, or "
        "removed, by another program?"
    )

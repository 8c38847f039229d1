"""The segments of a journal of records: which offsets and bytes they have, and reading them in order.

Only the last segment is scanned when a journal is opened, so that a large one opens fast. Damage in an earlier segment
is found by its readers, which continue behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from messaging.errors import JournalUnreadableError
from messaging.journal.folders import Appender, Folder
from messaging.journal.frames import HEADER_BYTES, Damage, Frame, headers, walk
from messaging.journal.log import Log, LogWriter, Tail
from messaging.journal.records import FORMAT, LEAST_RECORD

#: a journal that fills its disk has at least so many segments, which are not smaller than this, bytes
_SHARE: Final = 8
_LEAST_FULL: Final = 2**16
#: attempts to find the last segment while a writer deletes segments
_ATTEMPTS: Final = 50
_first = attrgetter("first")


class Segment:
    """One file of a journal.

    Attributes:
        first: the offset of its first record, from its name.
        size: its bytes; of the last segment, the bytes of its whole frames.
        began: when it began, once that is known; see :func:`~messaging.journal.reader.time_of`.
        empty_since: when it was first seen to be empty, or the time of the record before it, once that is known;
            records before it are no younger.
        seen: when :class:`~messaging.journal.retention.Retention` saw it first, monotonic; see there.
    """

    __slots__ = ("began", "empty_since", "first", "seen", "size")

    def __init__(self, first: int, size: int) -> None:
        self.first = first
        self.size = size
        self.began: float | None = None
        self.empty_since: float | None = None
        self.seen: float | None = None


class RecordLog(Log):
    """The partition of a journal of records, for reading. Thread safe.

    Attributes:
        segments: its segments in order. The tuple is replaced when segments come or go.
        on_damage: called with the first offset of a segment, the damage, and the damaged bytes, on the thread that
            finds it. It may be called again for the same damage. Set by its owner before anything is read.
    """

    segments: tuple[Segment, ...] = ()
    on_damage: Callable[[int, Damage, memoryview], object]

    # --- loading

    def load(self) -> Tail | None:
        """Load the names and sizes of the segments, and the headers of the last one.

        A writer may be at work. Readers of this log on other threads see the state before or after.

        Raises:
            JournalUnreadableError: the last segment has a format of another version.
        """
        for _ in range(_ATTEMPTS):
            found = self.list_segments()
            if not found:
                self._restart(0)
                return None
            last, listed = found[-1]
            try:
                data = self.folder.read(self.segment_name(last), copy=True)
                break
            except FileNotFoundError:  # a newer one has replaced it
                data = memoryview(b"")
        end, whole = self._scan(last, data, last)
        with self.lock:
            segments = (*(Segment(*each) for each in found[:-1]), Segment(last, whole))
            self.begin, self.segments, self.end = found[0][0], segments, end
        return Tail(last, whole, max(listed, len(data)))

    def _scan(self, segment: int, data: memoryview, first: int, position: int = 0) -> tuple[int, int]:
        """Return the offset after the last record of the last segment, and the end of its last whole frame in bytes.

        Args:
            segment: the offset in its name.
            data: its bytes from ``position`` on.
            first: the offset of the first record of ``data``.
            position: of a frame.
        """
        end, whole = first, 0
        for found in walk(data, first, seed=self.seed):
            if isinstance(found, Damage):
                if found.end < len(data):
                    end, whole = found.until, found.end
                place = found._replace(position=position + found.position, end=position + found.end)
                self.on_damage(segment, place, data[found.position : found.end])
            else:
                self.check_format(segment, found)
                end, whole = max(end, found.header.first + found.header.rows), found.end
        return end, position + whole

    def check_format(self, segment: int, frame: Frame) -> None:
        """Refuse a segment whose records have a format of another version; ``frame`` is intact."""
        if not frame.header.rows and bytes(frame.body) != FORMAT:
            found = bytes(frame.body[:100]).decode(errors="replace").strip()
            text = f"segment {self.segment_name(segment)} has format {found!r}, this version reads "
            raise self.folder.error(JournalUnreadableError, text + repr(FORMAT.decode().strip()))

    def _restart(self, begin: int) -> None:
        with self.lock:
            super()._restart(begin)
            self.segments = ()

    def _note(self, segment: int, first: int, rows: int, position: int, length: int) -> None:
        with self.lock:
            if not self.segments or self.segments[-1].first != segment:
                self.segments = (*self.segments, Segment(segment, 0))
            self.segments[-1].size = position + length
            self.end = first + rows  # last: a reader looks at the end first

    # --- places

    def segment_of(self, offset: int) -> int:
        """Return the index of the segment that holds ``offset``; the nearest one if none does."""
        return max(0, bisect_right(self.segments, offset, key=_first) - 1)

    def bytes_from(self, offset: int) -> int:
        """Return about how many bytes the records from ``offset`` on have."""
        segments, end = self.segments, self.end
        if offset >= end or not segments:
            return 0
        at = max(0, bisect_right(segments, offset, key=_first) - 1)  # of these segments: others may come meanwhile
        segment = segments[at]
        until = segments[at + 1].first if at + 1 < len(segments) else end
        part = segment.size * (until - max(offset, segment.first)) // max(1, until - segment.first)
        return part + sum(each.size for each in segments[at + 1 :])

    def refresh(self) -> None:
        """Load what another process has written and deleted since the last call."""
        found = self.list_segments()
        with self.lock:
            segments, end = self.segments, self.end
        if not found or not segments or found[-1][0] != segments[-1].first:
            self.load()
            return
        last, size = segments[-1], segments[-1].size
        try:
            data = self.folder.read(self.segment_name(last.first), size, copy=True)
        except FileNotFoundError:
            self.load()
            return
        end, whole = self._scan(last.first, data, end, size)
        with self.lock:
            if self.segments[-1:] != (last,):
                return  # another thread has loaded later segments
            known = {segment.first: segment for segment in self.segments}
            self.segments = (*(known.get(first) or Segment(first, size) for first, size in found[:-1]), last)
            self.begin = found[0][0]
            last.size = max(last.size, whole)
            self.end = max(self.end, end)

    def note_missing(self, segment: Segment) -> bool:
        """Return whether the file of a segment is missing though it was not trimmed."""
        self.refresh()
        return segment.first in (each.first for each in self.segments)


class RecordWriter(LogWriter, RecordLog):
    """The partition of a journal of records, for its writer; see :class:`~messaging.journal.log.LogWriter`.

    Args:
        segment_records: records from which on a segment is closed; ``None``: as many as there are.
        on_damage: see :class:`RecordLog`.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        seed: int = 0,
        segment_bytes: int,
        segment_records: int | None = None,
        on_damage: Callable[[int, Damage, memoryview], object],
        sync_closed: bool = True,
    ) -> None:
        self.on_damage = on_damage
        #: called before segments are deleted, with the offset of the first record that stays
        self.on_trim: Callable[[int], object] | None = None
        self._segment_records = segment_records
        super().__init__(folder, 0, seed=seed, head=FORMAT, segment_bytes=segment_bytes, sync_closed=sync_closed)

    def note_missing(self, segment: Segment) -> bool:
        """See :class:`RecordLog`. This process alone deletes segments."""
        return segment in self.segments

    def _cut_off(self, tail: Tail) -> bool:
        """Cut off an unfinished write. Keep a tail that may hold stored records, and count their offsets as used."""
        data = self.folder.read(self.segment_name(tail.segment), tail.whole, copy=True)
        lost = lost_rows(data, self.end, self.seed)
        if not lost:
            return super()._cut_off(tail)
        reason = f"the end is damaged; it held at most {lost} records, and some of them may never have been stored"
        self.on_damage(tail.segment, Damage(tail.whole, tail.size, self.end, self.end + lost, reason), data)
        self.end += lost
        return False

    def skip_to(self, offset: int) -> None:
        """Give no offset before ``offset`` to new records: the disk has lost the end of the log."""
        with self.writing:
            if offset <= self.end:
                return
            reason = f"its end is missing: a cursor has acknowledged records up to offset {offset}"
            size = self.segments[-1].size if self.segments else 0
            damage = Damage(size, size, self.end, offset, reason)
            self.on_damage(self.last_segment, damage, memoryview(b""))
            if not self.segments:
                self.begin = offset
            self.end = offset
            self._close_segment = True

    def _note_segment(self, segment: int) -> None:
        with self.lock:
            if self.segments and self.segments[-1].first < segment:
                self.segments = (*self.segments, Segment(segment, 0))

    def _open_segment(self, first: int) -> Appender:
        if self._segment_records is not None and first - self.last_segment >= self._segment_records:
            self._close_segment = True
        return super()._open_segment(first)

    def shrink_segments(self) -> None:
        """Close segments earlier from now on: the disk is full, and space is freed by whole segments."""
        total = sum(segment.size for segment in self.segments)
        self._segment_bytes = min(self._segment_bytes, max(_LEAST_FULL, total // _SHARE))

    def trim(self, offset: int) -> int:
        """Delete the segments with nothing but records before ``offset``; return the new begin.

        Raises:
            JournalError: a segment cannot be deleted. The next call tries again.
        """
        with self.lock:
            kept = self.segment_of(offset)
            before = self.segments[kept].first if kept else 0
        if kept and self.on_trim is not None:
            self.on_trim(before)
        with self.lock:
            self.segments = self.segments[self.segment_of(offset) :]
            if self.segments:
                self.begin = self.segments[0].first
            begin = self.begin
        self.delete_before(begin)
        return begin


def lost_rows(data: memoryview, end: int, seed: int) -> int:
    """Return how many records the bytes behind the last whole frame of a log may have held, at most.

    An unfinished write holds none: it ends before its frame does, or the system has kept nothing of it but zeros. Where
    headers are lost, the next one that is left tells how many records were before it.

    Args:
        data: the bytes. No intact frame is in them.
        end: the offset after the last whole frame.
        seed: of the log.
    """
    rows = position = 0
    for place, found in headers(data, 0, seed):
        if place < position or found.first < end + rows:
            continue  # in the body of a frame
        rows = found.first - end
        position = place + HEADER_BYTES + found.length
        if position > len(data):
            return rows  # not finished
        rows += found.rows
    rest = bytes(data[position:])
    return rows if len(rest) < HEADER_BYTES or not rest.strip(b"\0") else rows + len(rest) // LEAST_RECORD + 1

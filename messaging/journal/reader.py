"""Reading the records of a log in order. Damage is skipped, and reported."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Final

from messaging.execution import clock
from messaging.journal.frames import HEADER_BYTES, Damage, Frame, header, next_intact, scan
from messaging.journal.records import Record, decode_records
from messaging.journal.segments import RecordLog, Segment

#: bytes that are read at a time
_CHUNK: Final = 2**18
#: bytes that a record counts beside its payload
_RECORD_BYTES: Final = 100
_first = attrgetter("first")


def time_of(log: RecordLog, segment: Segment) -> float | None:
    """Return the time at which ``segment`` began: the timestamp of its first record; ``None`` if it cannot be read.

    An empty segment has the time at which this is called first. All records before it are older.
    """
    if not segment.size:
        if segment.empty_since is None:
            segment.empty_since = clock.wall()
        return segment.empty_since
    if segment.began is None:
        segment.began = time_at(log, segment.first)
    return segment.began


def time_at(log: RecordLog, offset: int) -> float | None:
    """Return the timestamp of the record at ``offset``; ``None`` if it cannot be read. Reads up to a segment."""
    try:
        records = RecordReader(log, offset).take(1)
    except OSError:
        return None
    return records[0].timestamp if records and records[0].offset == offset else None


class RecordReader:
    """Reads records in order of their offsets. For one thread.

    Args:
        log: the records; of this process, or with ``refresh`` of another one.
        offset: of the first record to read. If it was trimmed, the reader begins with the oldest record.
    """

    def __init__(self, log: RecordLog, offset: int) -> None:
        self._log = log
        #: offset of the next record to return
        self.offset = offset
        #: offset of the next record to read from the disk, behind the records that are ready
        self._next = offset
        self._ready: deque[Record] = deque()
        #: the segment that is read, and the bytes of it that are done with
        self._segment = -1
        self._position = 0

    def take(self, most: int = 1000, most_bytes: int = 2**20, until: float = inf) -> list[Record]:
        """Return the next records: none if the end is reached. If it raises, the next call returns the same records.

        Args:
            most: number of records, at most.
            most_bytes: bytes of payloads, at most, unless the first one alone has more.
            until: the offset before which reading stops.

        Raises:
            OSError: a file cannot be read, and no record before the place was left.
        """
        begin = self.offset
        try:
            return self._take(most, most_bytes, until)
        except BaseException:  # also an interrupt: its caller has none of the records
            self.seek(begin)
            raise

    def _take(self, most: int, most_bytes: int, until: float) -> list[Record]:
        taken: list[Record] = []
        size, is_done = 0, False
        while len(taken) < most and not is_done:
            try:
                is_filled = bool(self._ready) or self._fill()
            except OSError:
                if not taken:
                    raise
                break  # the next call raises it
            if not is_filled:
                self.offset = self._next  # damage at the end is passed
                break
            before = len(taken)
            for record in islice(self._ready, most - before):
                size += len(record.payload) + _RECORD_BYTES
                if record.offset >= until or (size > most_bytes and taken):
                    is_done = True
                    break
                taken.append(record)
            if len(taken) > before:
                for _ in range(len(taken) - before):
                    self._ready.popleft()
                self.offset = taken[-1].offset + 1
            if record.offset >= until:
                self.offset = max(self.offset, int(until))  # damage before it is passed
        return taken

    def seek(self, offset: int) -> None:
        """Continue with the record at ``offset``."""
        self.offset = self._next = offset
        self._ready.clear()
        self._segment = -1

    def _fill(self) -> bool:
        """Read frames until there is a record; return ``False`` at the end."""
        log = self._log
        while not self._ready:
            end = log.end  # read before the segments, which are then as new or newer
            segments = log.segments
            if self._next >= end or not segments:
                return False
            self._next = max(self._next, segments[0].first)
            at = bisect_right(segments, self._next, key=_first) - 1
            segment = segments[at]
            if segment.first != self._segment:
                self._segment, self._position = segment.first, 0
            is_last = at + 1 == len(segments)
            until = end if is_last else segments[at + 1].first
            try:
                self._read_chunk(segment, until, is_last=is_last)
            except FileNotFoundError:
                if log.note_missing(segment):  # deleted by another program
                    self._lose(segment, 0, 0, until, "its file is missing", memoryview(b""))
        return True

    def _read_chunk(self, segment: Segment, until: int, *, is_last: bool) -> None:
        """Read some frames of ``segment``, whose records end before offset ``until``."""
        data = self._read(segment, _CHUNK)
        found = header(data[:HEADER_BYTES], self._log.seed)
        if found is not None and len(data) < HEADER_BYTES + found.length:
            data = self._read(segment, HEADER_BYTES + found.length)
        position = 0
        is_beyond = False
        for frame in scan(data, self._log.seed):
            first, rows = frame.header.first, frame.header.rows
            if rows and first >= until:
                is_beyond = True
                break
            if not rows and frame.is_intact():
                self._log.check_format(segment.first, frame)
            elif not rows:
                self._lose(segment, position, frame.end, self._next, "the body of a frame is damaged", data)
            if first > self._next:
                self._lose(segment, position, position, first, f"records {self._next} to {first} are missing", data)
            if first + rows > self._next:
                self._decode(segment, frame, data)
            position = frame.end
        if is_beyond:
            # in the last segment they have been appended since `until` was read, before it they are left of a failed
            # write
            if self._next < until:
                self._lose(segment, position, position, until, f"records {self._next} to {until} are missing", data)
            self._position = self._position + position if is_last else segment.size
        elif position:
            self._position += position
        else:
            self._skip_damage(segment, until)

    def _read(self, segment: Segment, length: int) -> memoryview:
        name = self._log.segment_name(segment.first)
        return self._log.folder.read(name, self._position, min(length, segment.size - self._position), copy=True)

    def _decode(self, segment: Segment, frame: Frame, data: memoryview) -> None:
        """Make the records of ``frame`` ready, from the next offset on."""
        until = frame.header.first + frame.header.rows
        if not frame.is_intact():
            self._lose(segment, frame.position, frame.end, until, "the body of a frame is damaged", data)
            return
        try:
            records = decode_records(frame.body, frame.header.first)
            if len(records) != frame.header.rows:
                raise ValueError(f"a frame of {frame.header.rows} records holds {len(records)}")
        except ValueError as error:
            self._lose(segment, frame.position, frame.end, until, str(error), data)
            return
        self._ready.extend(records[self._next - frame.header.first :])
        self._next = until

    def _skip_damage(self, segment: Segment, until: int) -> None:
        """Continue behind damage at the position, or behind the segment."""
        for length in (_CHUNK, segment.size):  # most damage is short, and a segment may have much of it
            data = self._read(segment, length)
            following = next_intact(data, 0, self._log.seed) if len(data) else None
            if following is not None:
                break
        if following is not None and following.header.first < until:
            end, offset = following.position, max(self._next, following.header.first)
        else:
            end, offset = len(data), until
        if end or offset > self._next:
            reason = "the header of a frame is damaged" if end else f"records {self._next} to {offset} are missing"
            self._lose(segment, 0, end, offset, reason, data)
        self._position += end

    def _lose(self, segment: Segment, position: int, end: int, until: int, reason: str, data: memoryview) -> None:
        """Continue with offset ``until``: the records before it are damaged, at ``position`` of ``data``."""
        damage = Damage(self._position + position, self._position + end, self._next, until, reason)
        self._next = max(self._next, until)
        if not self._ready:
            self.offset = self._next
        self._log.on_damage(segment.first, damage, data[position:end])

"""The ages of the records of a journal, without reading them.

The time is noted with a batch of records at most once a second, so it costs nothing per record. The notes are bounded:
when there are many, the older ones are thinned out, so the error of an age grows with the age.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from typing import Final

from messaging.execution import clock
from messaging.journal.reader import time_of
from messaging.journal.segments import RecordWriter

#: notes of times that are kept, and shortest time between two of them, seconds
_MOST: Final = 1024
_RESOLUTION: Final = 1.0
_first = itemgetter(0)


class RecordAges:
    """When the records of a journal were stored. :meth:`age_of` is for any thread.

    Args:
        log: the records.
    """

    def __init__(self, log: RecordWriter) -> None:
        self._log = log
        #: the offset after the newest record that was there before
        self._begin = log.end
        #: offset after the last batch
        self._end = log.end
        self._opened = clock.wall()
        #: first offset of a batch, and its time by ``clock.boot``. Appended to by one thread, replaced as a whole
        #: otherwise
        self._notes: list[tuple[int, float]] = []
        #: time of the last batch
        self._latest = 0.0
        self._resolution = _RESOLUTION
        self._next = -1.0

    def note_batch(self, slowest: Callable[[], int]) -> None:
        """Note that the records up to the end of the log were stored now. On the committing thread.

        Args:
            slowest: returns the offset before which no age is asked for.
        """
        first, end = self._end, self._log.end
        if first >= end:
            return
        self._latest = now = clock.boot()
        if now >= self._next:
            self._notes.append((first, now))
            self._next = now + self._resolution
            if len(self._notes) > _MOST:
                self._thin_out(slowest())
        self._end = end  # last: until then :meth:`age_of` takes the records for new

    def _thin_out(self, slowest: int) -> None:
        """Forget notes of records before ``slowest``, then those that are close to others."""
        notes = self._notes[max(0, bisect_right(self._notes, slowest, key=_first) - 1) :]
        while len(notes) > _MOST // 2:
            self._resolution *= 2
            kept = notes[:1]
            for each in notes[1:]:
                if each[1] >= kept[-1][1] + self._resolution:
                    kept.append(each)
            notes = kept
        if len(notes) <= _MOST // 8:
            self._resolution = _RESOLUTION
        self._notes = notes

    def age_of(self, offset: int, timestamp: float | None = None) -> float:
        """Return the seconds since the record at ``offset`` was stored; 0 without such a record. Reads no record.

        Without its timestamp the age is exact to a second, and that of a record of an earlier run is estimated from the
        times of the segments. With it the age is exact, also after the wall clock was set in this run: the timestamp
        counts within what the notes allow. Of a record of an earlier run the timestamp is all that is known.

        Args:
            offset: of the record.
            timestamp: of the record, if it was read.
        """
        if offset >= self._end:
            return 0.0
        notes = self._notes
        at = bisect_right(notes, offset, key=_first) - 1
        if at < 0:
            return self._earlier(offset) if timestamp is None else max(0.0, clock.wall() - timestamp)
        now = clock.boot()
        most = max(0.0, now - notes[at][1])
        if timestamp is None:
            return most
        until = notes[at + 1][1] if at + 1 < len(notes) else self._latest
        return min(most, max(0.0, now - until, clock.wall() - timestamp))

    def _earlier(self, offset: int) -> float:
        """Return the age of a record of an earlier run, by the times at which segments began."""
        segments = self._log.segments
        at = bisect_right([each.first for each in segments], offset) - 1
        if at < 0:
            return 0.0
        now = clock.wall()
        begin = time_of(self._log, segments[at])
        if begin is None:
            return 0.0
        if at + 1 < len(segments):
            until, following = segments[at + 1].first, time_of(self._log, segments[at + 1])
        else:
            until, following = self._begin, None
        end = self._opened if following is None else following
        part = (offset - segments[at].first) / max(1, until - segments[at].first)
        return max(0.0, now - (begin + (end - begin) * min(1.0, part)))

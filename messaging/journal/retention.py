"""Retention: how much a journal keeps, and what happens when it is full.

The *backlog* is what the slowest cursor has not acknowledged; without cursors it is everything. Bounds apply to the
backlog. Space is freed by whole segments, so the files may be larger by up to a segment.

=================  =====================================================================================
policy             a record that has no room
=================  =====================================================================================
``block``          waits until there is room, at most until the deadline of its append
``drop_oldest``    takes the place of the oldest segments, whose records are dropped, counted and logged
``reject``         is refused at once
=================  =====================================================================================

A full disk is handled by the same policy, unless it has one of its own. Records beyond ``max_age`` are dropped under
each policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from messaging.errors import JournalError, JournalFullError
from messaging.errors.checks import check_procedure
from messaging.execution import clock
from messaging.journal.cursors import Cursors
from messaging.journal.folders import Folder
from messaging.journal.options import JournalOptions
from messaging.journal.reader import time_at, time_of
from messaging.journal.segments import RecordWriter

logger = logging.getLogger(__name__)

#: bytes of a frame beside its records, about
_FRAME_BYTES: Final = 32
#: a segment expires as a whole, so it holds at most this part of ``max_age``
_AGE_STEPS: Final = 20
#: looks at the age in ``max_age``, and the shortest time between two of them, seconds
_AGE_LOOKS: Final = 40
_AGE_PAUSE: Final = 0.01
#: bytes from which on a segment is closed when all its records are acknowledged, so that it can be deleted
_WORTH_CLOSING: Final = 2**20


class Retention:
    """Bounds of a journal. On the committing thread, except the bounds and :attr:`is_full`.

    Args:
        log: the records.
        cursors: their positions.
        options: the bounds, and the policy.
    """

    def __init__(self, log: RecordWriter, cursors: Cursors, options: JournalOptions) -> None:
        self._log = log
        self._cursors = cursors
        self.max_bytes = options.max_bytes
        self.max_records = options.max_records
        self._max_age = options.max_age
        self.full = options.full
        self.full_disk = options.full_disk or options.full
        self._next_look = 0.0
        self._first_of_run = log.end
        #: seconds that the wall clock was ahead of ``clock.boot`` when the journal was opened
        self._ahead = clock.wall() - clock.boot()

    def listen(self, listener: Callable[[int], object]) -> None:
        """Have ``listener`` called each time before segments are deleted, on the thread that deletes them.

        It gets the offset before which all records are deleted; they can still be read. It must not raise, and must not
        append: the deletion may be what makes room.

        Raises:
            ArgumentError: ``listener`` cannot be called, or its body would not run.
        """
        check_procedure(listener, "a listener of deleted segments")
        self._log.on_trim = listener

    # --- room

    def fitting(self, sizes: Sequence[int], counts: Sequence[int]) -> int:
        """Return how many appends have room, from the first on.

        Args:
            sizes: bytes of each.
            counts: records of each.
        """
        if self.max_bytes is None and self.max_records is None:
            return len(sizes)
        begin = self._cursors.slowest()
        room = len(sizes)
        if self.max_records is not None:
            left = self.max_records - (self._log.end - begin)
            for number, count in enumerate(counts):
                left -= count
                if left < 0:
                    room = number
                    break
        if self.max_bytes is not None:
            left = self.max_bytes - self._log.bytes_from(begin)
            # a record larger than the bound goes in alone; of several that are stored together it is not known
            is_empty = begin >= self._log.end and counts[0] == 1
            for number, size in enumerate(sizes[:room]):
                left -= size + (_FRAME_BYTES if number == 0 else 0)
                if left < 0 and not (is_empty and number == 0):
                    return number
        return room

    @property
    def is_full(self) -> bool:
        """Return whether a record would have no room, and would wait or be refused. From any thread."""
        return self.full != "drop_oldest" and not self.fitting([1], [1])

    def full_error(self) -> JournalFullError:
        """Return the error of a record that has no room."""
        begin = self._cursors.slowest()
        return self._log.folder.error(
            JournalFullError,
            f"it is full: {self._log.end - begin} records ({self._log.bytes_from(begin)} bytes) are not acknowledged, "
            f"and max_records is {self.max_records}, max_bytes is {self.max_bytes}",
        )

    def drop_oldest(self, size: int) -> bool:
        """Drop segments until a record of ``size`` bytes has room; return whether anything was dropped."""
        log = self._log
        room = log.folder.room()
        if room is not None and size > room + log.bytes_from(log.begin):
            return False  # it would not fit on the disk if all were dropped
        before = log.begin
        target = log.begin
        while True:
            following = next((each.first for each in log.segments if each.first > target), None)
            if following is None:
                if log.end == target or not self._roll():
                    break
                following = log.end
            target = following
            if not self._drop_before(target, "to make room") or self.fitting([size], [1]):
                break
        return log.begin > before

    def _roll(self) -> bool:
        """Close the last segment, so that it can be dropped; return whether that worked."""
        try:
            self._log.start_segment()
        except JournalError as error:
            logger.error("%s; tried again with the next record", error)  # the text says it all
            return False
        return True

    def _drop_before(self, offset: int, why: str) -> bool:
        first = max(self._cursors.slowest(), self._log.begin)
        is_deleted = True
        try:
            self._log.trim(offset)
        except JournalError as error:
            logger.error("%s; the next append tries again", error)  # the text says it all
            is_deleted = False
        lost = self._log.begin - first  # also where files are left: the records are not read any more
        if lost > 0:
            self._cursors.skip_to(offset, lost)
            logger.warning(
                "journal %s: dropped %d records %s, with offsets from %d; %d dropped in all",
                self._log.folder.shown, lost, why, first, self._cursors.dropped,
            )  # fmt: skip
        return is_deleted

    def trim_acknowledged(self, *, is_needed: bool) -> bool:
        """Delete the segments whose records are all acknowledged; return whether there were any.

        Args:
            is_needed: whether to delete the last one, too, however small it is: records wait for room.
        """
        log, begin, slowest = self._log, self._log.begin, self._cursors.slowest()
        last = log.segments[-1] if log.segments else None
        try:
            if last is not None and last.first < slowest == log.end and (is_needed or last.size >= _WORTH_CLOSING):
                log.start_segment()
            if log.segment_of(slowest):
                log.trim(slowest)
        except JournalError as error:
            logger.warning("%s; trimmed with the next acknowledgement", error)
        return log.begin > begin

    # --- age

    def pause(self) -> float | None:
        """Return the seconds until :meth:`expire` has to be called, ``None`` for never."""
        return None if self._max_age is None else max(_AGE_PAUSE, self._max_age / _AGE_LOOKS)

    def expire(self) -> None:
        """Drop the segments whose records are all older than ``max_age``, by timestamp or since they were stored.

        A segment holds a twentieth of ``max_age``, so that its last record is dropped in time, too.
        """
        if self._max_age is None or (now := clock.monotonic()) < self._next_look:
            return
        self._next_look = now + max(_AGE_PAUSE, self._max_age / _AGE_LOOKS)
        log, wall = self._log, self._time_for(self._log.end)
        for segment in log.segments:
            if segment.seen is None:
                segment.seen = now
        keep = max(self._expired_by(self._max_age), self._expired_since(now - self._max_age))
        if keep > log.begin:
            self._drop_before(keep, f"older than {self._max_age:g} s")
        last = log.segments[-1] if log.segments else None
        if last is not None and last.first < log.end:
            began, least = time_of(log, last), self._max_age / _AGE_STEPS
            is_young = began is not None and wall - least <= began <= wall
            if not is_young or last.seen is None or last.seen <= now - least:
                before = self._time_before(log.end)  # of an earlier run, if nothing was appended since
                if self._roll() and (last := log.segments[-1]).first == log.end:
                    last.seen = now
                    last.empty_since = wall if before is None else min(wall, before)

    def _time_for(self, offset: int) -> float:
        """Return the time against which the timestamp of the record at ``offset`` is compared.

        A wall clock that is set forward makes no record older that this run has stored.
        """
        wall = clock.wall()
        return wall if offset < self._first_of_run else min(wall, clock.boot() + self._ahead)

    def _expired_by(self, max_age: float) -> int:
        """Return the offset before which all records are older than ``max_age`` by their timestamps."""
        log = self._log
        keep = log.begin
        for segment in log.segments:  # with the first: a segment after it may begin earlier, if the clock was set back
            if segment.empty_since is None and not segment.size:
                segment.empty_since = self._time_before(segment.first)
            began, now = time_of(log, segment), self._time_for(segment.first)
            if began is None or began > now:
                continue  # damaged, or the clock was wrong: the segments after it tell
            if began > now - max_age:
                if segment.empty_since is None:
                    segment.empty_since = self._time_before(segment.first)
                before, oldest = segment.empty_since, self._time_for(segment.first - 1) - max_age
                if segment.first > log.begin and before is not None and before <= oldest:
                    keep = segment.first
                break
            keep = segment.first
        return keep

    def _expired_since(self, oldest: float) -> int:
        """Return the offset before which all records were stored before ``oldest``, monotonic."""
        seen = (each.first for each in self._log.segments if each.seen is not None and each.seen <= oldest)
        return max(seen, default=self._log.begin)

    def _time_before(self, offset: int) -> float | None:
        """Return the timestamp of the record before ``offset``, if an earlier run stored it."""
        return time_at(self._log, offset - 1) if self._log.begin < offset <= self._first_of_run else None


class FullDisk:
    """Whether the disk takes the records of a journal, and who is told of that. On the committing thread.

    Attributes:
        error: why the disk takes no records, so that they wait; ``None``: it does, as far as is known. For any thread.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.error: JournalFullError | None = None
        #: free bytes from which on a write would succeed that failed
        self._wanted = 0
        self._listener: Callable[[JournalFullError | None], object] = self._log

    def listen(self, listener: Callable[[JournalFullError | None], object]) -> None:
        """Have ``listener`` called in place of the log when a full disk takes no records any more, and when it does.

        It runs on the thread that writes: with the cause when the first record waits for room, with ``None`` when
        records are written again, or when the disk has room for them.

        Raises:
            ArgumentError: ``listener`` cannot be called, or its body would not run.
        """
        check_procedure(listener, "a listener of a full disk")
        self._listener = listener

    def _log(self, error: JournalFullError | None) -> None:
        if error is not None:
            logger.error("%s; records wait until there is room", error)  # the text says it all
        else:
            logger.warning("journal %s: there is room on the disk again", self._folder.shown)

    def note_full(self, error: JournalFullError, size: int) -> None:
        """Note that the disk has no room for a record of ``size`` bytes, which waits."""
        self._wanted = (self._folder.room() or 0) + size
        if self.error is None:
            self._tell(error)

    def note_room(self) -> None:
        """Note that the disk takes records again."""
        if self.error is not None:
            self._tell(None)

    def look_for_room(self) -> None:
        """Note whether the disk has more room, while no record waits that would be tried again."""
        if self.error is not None:
            room = self._folder.room()
            if room is None or room >= self._wanted:
                self._tell(None)

    def _tell(self, error: JournalFullError | None) -> None:
        self.error = error
        try:
            self._listener(error)
        except Exception:
            logger.exception("journal %s: failed to report a full disk", self._folder.shown)

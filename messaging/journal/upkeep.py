"""What the thread of a journal does between batches: store positions of cursors, and delete acknowledged segments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from messaging.errors import JournalError
from messaging.execution import clock

if TYPE_CHECKING:
    from messaging.journal.cursors import Cursors
    from messaging.journal.retention import Retention
    from messaging.journal.segments import RecordWriter

logger = logging.getLogger(__name__)

#: pause between two times that positions are stored without a caller that waits, seconds
_SAVE_PAUSE: Final = 0.05
#: longest time that acknowledgements beyond a position wait to be stored with it, seconds
_RANGES_PAUSE: Final = 0.5
#: longest pause after a failure, seconds
_RETRY_MOST: Final = 2.0
#: bytes from which on a segment is closed when all its records are acknowledged, so that it can be deleted
_WORTH_CLOSING: Final = 2**20


class Upkeep:
    """The upkeep of one journal. On its thread, except :meth:`save_last`.

    Args:
        log: the records.
        cursors: their positions.
        retention: says when it has to look at the age of records.
        waiting: returns the number of records that wait for room.
    """

    def __init__(self, log: RecordWriter, cursors: Cursors, retention: Retention, waiting: Callable[[], int]) -> None:
        self._log = log
        self._cursors = cursors
        self._retention = retention
        self._waiting = waiting
        self._next_save = 0.0
        self._failures = 0

    def work(self) -> float | None:
        """Store positions and delete segments.

        Returns:
            The seconds until the next call; ``None``: not before something changes.
        """
        pauses = [self._retention.pause(), self._save_in_time()]
        if self._cursors.positions():
            self._trim_acknowledged()
        return min((pause for pause in pauses if pause is not None), default=None)

    def _save_in_time(self) -> float | None:
        """Store the positions that have changed if it is time; return the seconds until the next call."""
        if self._cursors.is_saved:
            return None
        now, due, since = clock.monotonic(), self._next_save, self._cursors.ranges_since
        if since is not None and self._cursors.are_positions_saved:
            due = max(due, since + _RANGES_PAUSE)
        if now < due:
            return due - now
        try:
            self._cursors.save_at_once()
        except JournalError as error:
            self._failures += 1
            pause = min(_RETRY_MOST, _SAVE_PAUSE * float(2**self._failures))
            if self._failures == 1:
                logger.warning("%s; positions of cursors are kept in memory, and stored with the next try", error)
        else:
            pause, self._failures = _SAVE_PAUSE, 0
        self._next_save = clock.monotonic() + pause
        return None if self._cursors.is_saved else pause

    def free(self) -> bool:
        """Delete the last segment, too, if all its records are acknowledged; return whether anything was deleted."""
        begin = self._log.begin
        if self._cursors.positions():
            self._trim_acknowledged(is_needed=True)
        return self._log.begin > begin

    def _trim_acknowledged(self, *, is_needed: bool = False) -> None:
        log, slowest = self._log, self._cursors.slowest()
        last = log.segments[-1] if log.segments else None
        try:
            if (
                last is not None
                and last.first < slowest == log.end
                and (is_needed or last.size >= _WORTH_CLOSING or self._waiting())
            ):
                log.roll()
            if log.segment_of(slowest):
                log.trim(slowest)
        except JournalError as error:
            logger.warning("%s; trimmed with the next acknowledgement", error)

    def save_last(self) -> None:
        """Store the positions when the journal is closed."""
        try:
            self._cursors.save()
        except JournalError as error:
            logger.warning("%s; records that were acknowledged last are delivered again", error)

"""Copies of the events that minima guarantee, for when a durable history drops its oldest records (157.6.2).

The disk drops the oldest events, whatever their topics. A busy topic would so push out the last event of a quiet one,
though the policy of the quiet topic has a minimum. So the guaranteed events are stored again from time to time, in one
block of records. The next run reads the last block, and the newest records.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from messaging.journal.folders import journal_errors
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.journal import JournalView, Record

logger = SafeLog(__name__)

#: file with the place of the last block
FILE: Final = "guaranteed.json"
#: bytes of records between two blocks, at most
_INTERVAL: Final = 8 * 2**20
#: a bounded folder has room for so many intervals
_INTERVALS: Final = 8


class Guarantees:
    """The place of the last block, and when the next one is due. For one thread at a time.

    Args:
        journal: the records.
        max_bytes: bound of the journal; ``None``: unlimited.
    """

    def __init__(self, journal: JournalView, max_bytes: int | None) -> None:
        self._journal = journal
        self._interval = _INTERVAL if max_bytes is None else min(_INTERVAL, max_bytes // _INTERVALS)
        #: greatest size of a block, bytes
        self.limit = 2 * self._interval
        self._offset, self._count = self._read_place()
        is_recent = self._offset >= journal.tail(self._interval) or journal.size < self._interval
        self._written = 0 if is_recent else self._interval

    def _read_place(self) -> tuple[int, int]:
        folder = self._journal.folder
        try:
            with journal_errors(folder, f"cannot read {FILE}"):
                if FILE not in folder.list():
                    return 0, 0
                content = json.loads(bytes(folder.read(FILE, copy=True)))
            offset, count = content["offset"], content["count"]
            if type(offset) is not int or type(count) is not int or not 0 <= offset <= offset + count:
                raise ValueError("it holds no place")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            logger.error("journal %s: %s cannot be used: %s; going on without", folder.shown, FILE, error)
            return 0, 0
        return offset, count

    def read(self) -> list[Record]:
        """Return the records of the last block; none if it was dropped."""
        journal, offset = self._journal, self._offset
        if not journal.begin <= offset <= journal.end:
            return []
        return [*journal.read(offset, offset + self._count)]

    def is_due(self, written: int) -> bool:
        """Return whether to store a block, ``written`` more bytes after the last call."""
        self._written += written
        return self._written >= self._interval

    def begin(self) -> None:
        """Begin an interval."""
        self._written = 0

    def note(self, offset: int, count: int) -> None:
        """Note that a block is stored. Raises ``JournalError``."""
        folder = self._journal.folder
        with journal_errors(folder, f"cannot write {FILE}"):
            folder.write(FILE, [json.dumps({"format": 1, "offset": offset, "count": count}).encode()])
        self._offset, self._count = offset, count

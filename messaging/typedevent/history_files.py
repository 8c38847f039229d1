"""The files of a durable history beside its records: the place of guaranteed events, and the sequences of its runs.

**Guarantees.** The disk drops the oldest events, whatever their topics. A busy topic would so push out the last event
of a quiet one, though the policy of the quiet topic has a minimum (157.6.2). So the guaranteed events are stored again
from time to time, in one block of records. The next run reads the last block, and the newest records.

**Sequences** are unique over all runs of the buses with one folder. A run reserves numbers on the disk before it uses
them, so that no number is used twice, also after a crash. A bus that was closed leaves the first free number. After a
crash the next run skips the reserved numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import JournalError, JournalUnreadableError
from messaging.errors.text import SafeLog
from messaging.journal.folders import journal_errors

if TYPE_CHECKING:
    from messaging.journal import JournalView, Record
    from messaging.journal.folders import LocalFolder

logger = SafeLog(__name__)

#: file with the place of the last block
GUARANTEED_FILE: Final = "guaranteed.json"
#: bytes of records between two blocks, at most
_INTERVAL: Final = 8 * 2**20
#: a bounded folder has room for so many intervals
_INTERVALS: Final = 8
#: file with the first number that no run has used or reserved
SEQUENCES_FILE: Final = "sequences.json"
#: numbers that are reserved at a time: more than a run can use while the disk does not answer
RESERVED: Final = 2**32


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
            content = _read(folder, GUARANTEED_FILE, JournalError)
            if content is None:
                return 0, 0
            offset, count = content["offset"], content["count"]
            if type(offset) is not int or type(count) is not int or not 0 <= offset <= offset + count:
                raise ValueError("it holds no place")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            logger.error("journal %s: %s cannot be used: %s; going on without", folder.shown, GUARANTEED_FILE, error)
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
        _write(self._journal.folder, GUARANTEED_FILE, offset=offset, count=count)
        self._offset, self._count = offset, count


class Sequences:
    """The numbers of one run. For one thread at a time.

    Args:
        folder: of the journal.
        last: the greatest number in the journal; 0 if there is none.
        title: the bus, for the log.

    Raises:
        JournalError: the file cannot be read or written.
    """

    def __init__(self, folder: LocalFolder, last: int, title: str) -> None:
        self._folder = folder
        self._title = title
        #: the first number of this run
        self.first = self._read(last)
        self._free = self.first + RESERVED
        _write(self._folder, SEQUENCES_FILE, next=self._free)

    def _read(self, last: int) -> int:
        """Return a number that no run has used, greater than ``last``."""
        try:
            content = _read(self._folder, SEQUENCES_FILE, JournalUnreadableError)
            if content is None:
                if not last:
                    return 1
                raise ValueError("it is missing")
            free = content["next"]
            if type(free) is not int or free < 1:
                raise ValueError("it holds no number")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            free = last + RESERVED
            logger.error(
                "%s: %s of its durable history cannot be used: %s: %s; sequences go on with %d",
                self._title, SEQUENCES_FILE, type(error).__name__, error, free,
            )  # fmt: skip
        return max(free, last + 1)

    def note_used(self, last: int) -> None:
        """Reserve more numbers if ``last`` is near the end of the reserved ones. Logs a failure; call it again soon."""
        if self._free - last >= RESERVED // 2:
            return
        try:
            _write(self._folder, SEQUENCES_FILE, next=self._free + RESERVED)
            self._free += RESERVED
        except JournalError as error:
            logger.error("%s: %s; tried again with the next events", self._title, error)

    def release(self, last: int) -> None:
        """Leave the numbers after ``last`` to the next run. Logs a failure, after which the next run skips some."""
        try:
            _write(self._folder, SEQUENCES_FILE, next=last + 1)
        except JournalError as error:
            logger.error("%s: %s; the next run skips some sequences", self._title, error)


def _read(folder: LocalFolder, file: str, error: type[JournalError]) -> Any:
    """Return the content of a file; ``None`` if it is missing. Raises ``error``, or ``ValueError`` if it is no JSON."""
    with journal_errors(folder, f"cannot read {file}", error):
        if file not in folder.list():
            return None
        content = bytes(folder.read(file, copy=True))
    return json.loads(content)


def _write(folder: LocalFolder, file: str, **content: int) -> None:
    """Replace a file. Raises ``JournalError``."""
    with journal_errors(folder, f"cannot write {file}"):
        folder.write(file, [json.dumps({"format": 1, **content}).encode()])

"""Sequences of recorded events that are unique over all runs of the buses with one folder.

A run reserves numbers on the disk before it uses them, so that no number is used twice, also after a crash. A bus that
was closed leaves the first free number. After a crash the next run skips the reserved numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from messaging.errors import JournalError, JournalUnreadableError
from messaging.journal.folders import journal_errors
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.journal.folders import LocalFolder

logger = SafeLog(__name__)

#: file with the first number that no run has used or reserved
FILE: Final = "sequences.json"
#: numbers that are reserved at a time: more than a run can use while the disk does not answer
RESERVED: Final = 2**32


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
        self._write(self._free)

    def _read(self, last: int) -> int:
        """Return a number that no run has used, greater than ``last``."""
        try:
            with journal_errors(self._folder, f"cannot read {FILE}", JournalUnreadableError):
                if FILE not in self._folder.list():
                    if not last:
                        return 1
                    raise ValueError("it is missing")
                content = bytes(self._folder.read(FILE, copy=True))
            free = json.loads(content)["next"]
            if type(free) is not int or free < 1:
                raise ValueError("it holds no number")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            free = last + RESERVED
            logger.error(
                "%s: %s of its durable history cannot be used: %s: %s; sequences go on with %d",
                self._title, FILE, type(error).__name__, error, free,
            )  # fmt: skip
        return max(free, last + 1)

    def _write(self, free: int) -> None:
        with journal_errors(self._folder, f"cannot write {FILE}"):
            self._folder.write(FILE, [json.dumps({"format": 1, "next": free}).encode()])

    def note_used(self, last: int) -> None:
        """Reserve more numbers if ``last`` is near the end of the reserved ones. Logs a failure; call it again soon."""
        if self._free - last >= RESERVED // 2:
            return
        try:
            self._write(self._free + RESERVED)
            self._free += RESERVED
        except JournalError as error:
            logger.error("%s: %s; tried again with the next events", self._title, error)

    def release(self, last: int) -> None:
        """Leave the numbers after ``last`` to the next run. Logs a failure, after which the next run skips some."""
        try:
            self._write(last + 1)
        except JournalError as error:
            logger.error("%s: %s; the next run skips some sequences", self._title, error)

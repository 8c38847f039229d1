"""Options and state of a durable history of a typed event bus: recorded events on the local disk (157.6.1).

Publishers do not wait for the disk. An event that does not fit in the queue is dropped, counted and logged. A crash
loses at most the events of the queue: those of the last ``window`` seconds, if the disk takes less than half of that
for a write, and at most ``max_pending`` events in any case. Two files are kept beside the records:

**Guarantees.** The disk drops the oldest events, whatever their topics. A busy topic would so push out the last event
of a quiet one, though the policy of the quiet topic has a minimum (157.6.2). So the guaranteed events are stored again
from time to time, in one block of records. The next run reads the last block, and the newest records.

**Sequences** are unique over all runs of the buses with one folder. A run reserves numbers on the disk before it uses
them, so that no number is used twice, also after a crash. A bus that was closed leaves the first free number. After a
crash the next run skips the reserved numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from messaging.dispatch import check_count, parse_filter
from messaging.errors import ArgumentError, JournalError, JournalUnreadableError
from messaging.errors.text import SafeLog
from messaging.journal import JournalView, Record
from messaging.journal.folders import LocalFolder, journal_errors
from messaging.services.reporting import counter, gauge

logger = SafeLog(__name__)

#: defaults of ``DurableHistory``: seconds, events, bytes
WINDOW: Final = 1.0
MAX_PENDING: Final = 50_000
MAX_BYTES: Final = 256 * 2**20
#: least values: bytes, seconds
_LEAST_BYTES: Final = 2**15
_LEAST_AGE: Final = 0.001
#: greatest number of seconds
_MOST: Final = 1e10


@dataclass(frozen=True, slots=True)
class DurableHistory:
    """Where and how a bus keeps its history over a restart. Immutable.

    Attributes:
        path: the folder, on a local disk; ``~`` is the home of the user. It is used by one bus at a time.
        topics: filter of the topics that are stored, or several; by default the topics whose events a history policy
            keeps (157.6.2).
        window: seconds after which a published event is on the disk at the latest, if the disk takes less than half of
            it for a write. A longer window needs fewer writes. 0: each event is written as soon as the disk is free.
        max_pending: number of events that may wait for the disk. Further events are not stored.
        max_bytes: bound of the stored events, bytes; the oldest are dropped. At least 32 KiB; ``None``: unlimited.
        max_age: seconds after which a stored event is dropped; ``None``: never.

    Raises:
        ArgumentError, InvalidTopicError: a value is not as described.
    """

    path: str | Path
    topics: str | Iterable[str] | None = None
    window: float = WINDOW
    max_pending: int = MAX_PENDING
    max_bytes: int | None = MAX_BYTES
    max_age: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not str(self.path) or not str(self.path).isprintable():
            raise ArgumentError(f"path must be the path of a folder, not {self.path!r:.80}")
        topics = self.topics
        if topics is not None:
            if not isinstance(topics, str) and not isinstance(topics, Iterable):
                raise ArgumentError(f"topics must be a topic filter, or several, not {type(topics).__name__}")
            texts = (topics,) if isinstance(topics, str) else tuple(topics)
            for each in texts:
                parse_filter(each)
            if not texts:
                raise ArgumentError("topics must have at least one topic filter; None stands for the kept topics")
            object.__setattr__(self, "topics", texts)
        _check_number("window", self.window, least=0)
        check_count("max_pending", self.max_pending, 1)
        if self.max_bytes is not None:
            check_count("max_bytes", self.max_bytes, _LEAST_BYTES)
        if self.max_age is not None:
            _check_number("max_age", self.max_age, least=_LEAST_AGE)


@dataclass(frozen=True, slots=True)
class DurableHistoryDTO:
    """A snapshot of a durable history: what this run of the bus has done."""

    path: str
    stored: int = field(metadata=counter("events that were stored on the disk", "events"))
    pending: int = field(metadata=gauge("events that wait for the disk: a crash would lose at most these", "events"))
    dropped: int = field(metadata=counter("events that were not stored, because too many waited", "events"))
    failed: int = field(
        metadata=counter(
            "events that were not stored, because the disk failed or they have a value without a form on the disk",
            "events",
        )
    )
    bytes: int = field(metadata=gauge("bytes of the files with events, also of earlier runs", "bytes"))


def _check_number(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= _MOST:
        raise ArgumentError(f"{name} must be a number of seconds from {least:g} to {_MOST:g}, not {value!r:.80}")


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
        """Return whether to store a block, ``written`` more bytes after the last call; if so, begin an interval."""
        self._written += written
        is_due = self._written >= self._interval
        if is_due:
            self._written = 0
        return is_due

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

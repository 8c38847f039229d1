"""The log of one partition: appended to by one writer, read by offsets, trimmed from the front.

A log is a folder of segments, files that are named by the offset of their first row. Offsets rise by one from row to
row and are never used again. Trimming deletes whole segments. The last segment always stays: it tells the next offset.

When :meth:`LogWriter.append_frame` returns after a sync, its rows are on the disk: they survive any crash, with the
same offsets and in the same order. A crash may leave half a frame at the end of the last segment. It was not
acknowledged, and is cut off when the log is opened. A failed write may leave whole frames at the end of a segment; the
name of the next segment tells where they end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from messaging.environment.signals import on_failure
from messaging.errors import JournalCorruptError, JournalError
from messaging.journal.folders import Appender, Folder, journal_errors, sync_file
from messaging.journal.frames import Damage, encode, walk

logger = logging.getLogger(__name__)

#: the file that identifies a journal; a folder without it is no journal
META: Final = "journal.json"
_SUFFIX: Final = ".segment"
#: files with a higher number are not of a journal: the offset of a record has 63 bits
_LAST_SEGMENT: Final = 2**63 - 1


def segment_path(partition: int, segment: int) -> str:
    """Return the path of a segment in the folder of its journal."""
    return f"{partition}/{segment:020d}{_SUFFIX}"


class Tail(NamedTuple):
    """The end of a log as it was loaded."""

    #: the offset in the name of the last segment
    segment: int
    #: the end of its last whole frame, and its size; bytes
    whole: int
    size: int


class Log:
    """One partition of a journal, for reading. Thread safe.

    Subclasses keep what they need of the frames, see :meth:`_note`.

    Args:
        folder: of the journal.
        partition: number of the partition, which names its folder.
        seed: of the frames, see :mod:`messaging.journal.frames`.

    Attributes:
        begin: the offset of the first row.
        end: the offset after the last row on the disk, or in the object store.
    """

    def __init__(self, folder: Folder, partition: int = 0, *, seed: int = 0) -> None:
        self.folder = folder
        self.partition = partition
        self.seed = seed
        #: guards the state of subclasses; reentrant, for changes that need several calls
        self.lock = threading.RLock()
        self.begin = self.end = 0

    def segment_name(self, segment: int) -> str:
        """Return the name of the file of a segment, relative to the folder."""
        return segment_path(self.partition, segment)

    def list_segments(self) -> list[tuple[int, int]]:
        """Return the first offset and the size in bytes of each segment on the disk, in order."""
        found = []
        for name, size in self.folder.list(str(self.partition)).items():
            stem = name.removesuffix(_SUFFIX)
            if stem != name and len(stem) == 20 and stem.isascii() and stem.isdecimal() and int(stem) <= _LAST_SEGMENT:
                found.append((int(stem), size))
        return sorted(found)

    # --- loading

    def load(self) -> Tail | None:
        """Load the headers of all frames; return the end of the log, or ``None`` if it has no segment.

        A writer may be at work: segments that it deletes meanwhile are trimmed, and not missing.

        Raises:
            JournalCorruptError: a segment is not as it was written.
        """
        segments = [segment for segment, _ in self.list_segments()]
        self._restart(segments[0] if segments else 0)
        last: Tail | None = None
        for number, segment in enumerate(segments):
            if segment != self.end:
                if segments[number - 1] in (known for known, _ in self.list_segments()):
                    self._corrupt(segment, f"rows {self.end} to {segment} are missing before it")
                self._restart(segment)
            until = segments[number + 1] if number + 1 < len(segments) else None
            try:
                data = self.folder.read(self.segment_name(segment), copy=until is None)
            except FileNotFoundError:
                self._restart(segment if until is None else until)
                continue
            position = 0
            for found in walk(data, segment, until=until, seed=self.seed):
                if isinstance(found, Damage):
                    self._corrupt(segment, found.reason)
                elif found.header.rows:
                    head = found.header
                    self._note(segment, head.first, head.rows, found.position, found.end - found.position)
                position = found.end
            last = Tail(segment, position, len(data))
        return last

    def _restart(self, begin: int) -> None:
        """Forget all rows; the next one has offset ``begin``."""
        self.begin = self.end = begin

    def _note(self, segment: int, first: int, rows: int, position: int, length: int) -> None:
        """Add a frame: ``rows`` from offset ``first`` on, in ``length`` bytes of ``segment``."""
        del segment, position, length
        with self.lock:
            self.end = first + rows

    def _corrupt(self, segment: int, what: str) -> None:
        raise self.folder.error(JournalCorruptError, f"segment {self.segment_name(segment)}: {what}")


class LogWriter(Log):
    """One partition of a journal, for its one writer.

    :meth:`append_frame` is called by one thread at a time, everything else by any.

    Args:
        folder, partition, seed: see :class:`Log`.
        head: body of the first frame of each segment, which names the format of the others.
        segment_bytes: bytes from which on a segment is closed, where segments grow.
        sync_closed: whether a segment with rows that were appended without a sync is synced when it is closed.
    """

    def __init__(
        self,
        folder: Folder,
        partition: int,
        *,
        head: Any,
        segment_bytes: int,
        seed: int = 0,
        sync_closed: bool = True,
    ) -> None:
        super().__init__(folder, partition, seed=seed)
        self._head = head
        self._segment_bytes = segment_bytes
        #: guards the appender, and is held while it writes
        self.writing = threading.Lock()
        self._appender: Appender | None = None
        #: the offset in the name of the last segment
        self.last_segment = 0
        self._is_closed = False
        self._sync_closed = sync_closed
        #: whether the appender has rows that may not be on the disk
        self._is_dirty = False
        #: closed segments with such rows
        self._unsynced: dict[int, Path] = {}
        #: closed segments of earlier writers, which may not have synced them
        self._earlier: list[int] = []
        #: a failed sync that no caller has been told of
        self._failed_sync: OSError | None = None
        #: whether the next append begins a segment
        self._close_segment = False
        #: segments before this one are deleted
        self._kept = 0
        folder.make(str(partition))
        last = self.load()
        if last is None:
            return
        self.last_segment = last.segment
        is_kept = last.whole < last.size and not self._cut_off(last)
        if folder.appends and last.whole and not is_kept:
            self._appender = folder.append_to(self.segment_name(self.last_segment), last.whole)
        if folder.appends:
            opened = None if self._appender is None else self.last_segment  # which has synced it
            self._earlier = [segment for segment, _ in self.list_segments() if segment != opened]

    def _cut_off(self, tail: Tail) -> bool:
        """Note that the end of the last segment is cut off; return ``False`` to keep it and begin another segment."""
        logger.warning(
            "journal %s: cut off %d bytes of an unfinished write at the end of %s",
            self.folder.shown, tail.size - tail.whole, self.segment_name(tail.segment),
        )  # fmt: skip
        return True

    def append_frame(self, rows: int, body: Sequence[Any], *, sync: bool = True) -> int:
        """Add ``rows`` rows whose offsets begin with :attr:`end`; return the first of these offsets.

        Args:
            rows: number of rows, at least one.
            body: bytes-like parts of the body of the frame.
            sync: whether the rows are on the disk when this returns, and not only with the operating system.

        Raises:
            JournalFullError: the disk is full. Nothing was added; the caller may try again.
            JournalError: the write failed, or the log is closed. Nothing was added.
        """
        with self.writing, journal_errors(self.folder, "cannot write"):
            if self._is_closed:
                raise self.folder.error(JournalError, "it is closed")
            first = self.end
            try:
                self._append(first, rows, body, sync)
            except BaseException:
                self._close_appender()  # a failed file is not used again
                raise
            return first

    def _append(self, first: int, rows: int, body: Sequence[Any], sync: bool) -> None:
        parts = encode(first, rows, body, self.seed)
        length = sum(memoryview(part).nbytes for part in parts)
        appender = self._open_segment(first) if self.folder.appends else None
        if appender is None or not appender.size:
            head = encode(first, 0, [self._head], self.seed)
            if appender is not None and sync:  # first: of one write the disk may keep the rows, and not the head
                appender.append(head, sync=True)
            else:
                parts = [*head, *parts]
        if appender is not None:
            appender.append(parts, sync=sync)
            self._is_dirty = not sync
            end = appender.size
        else:
            self.folder.check_lock()
            end = self.folder.write(self.segment_name(first), parts)
            self.folder.check_lock()  # another writer may have taken over and written the same object
            self.last_segment = first
        self._note(self.last_segment, first, rows, end - length, length)

    def _open_segment(self, first: int) -> Appender:
        """Return the segment to append to."""
        appender = self._appender
        if appender is not None and (self._close_segment or appender.size >= self._segment_bytes):
            if self._sync_closed:
                self._sync()
            self._close_appender()
            appender = None
        self._close_segment = False
        if appender is None:
            appender = self._appender = self.folder.append_to(self.segment_name(first))
            self.last_segment = first
        return appender

    def sync(self, *, is_background: bool = False) -> None:
        """Wait until the disk has all rows that were appended without a sync.

        Args:
            is_background: whether the next call that is not has to raise the error, too: no caller waits for this one.

        Raises:
            JournalError: the disk failed. Rows since the last sync may be lost if the machine fails.
        """
        with self.writing, journal_errors(self.folder, "cannot sync"):
            try:
                self._sync_all()
                while self._earlier and not is_background:
                    sync_file(Path(self.folder.path) / self.segment_name(self._earlier.pop()))
            except OSError as error:
                self._failed_sync = error
                if is_background:
                    raise
            if not is_background:
                self._raise_failed_sync()

    def _sync_all(self) -> None:
        with on_failure(self._close_appender):  # a failed file is not used again
            self._sync()
        for segment in [*self._unsynced]:
            path = self._unsynced.pop(segment, None)
            if path is not None:
                sync_file(path)

    def _sync(self) -> None:
        if self._appender is not None and self._is_dirty:
            try:
                self._appender.sync()
            except OSError as error:
                self._is_dirty = False  # the system reports a lost write once: a second sync would tell nothing
                self._failed_sync = error
                raise
            self._is_dirty = False

    def _raise_failed_sync(self) -> None:
        error, self._failed_sync = self._failed_sync, None
        if error is not None:
            raise error

    def _close_appender(self) -> None:
        appender, self._appender = self._appender, None
        if appender is not None:
            if self._is_dirty:
                self._unsynced[self.last_segment] = appender.path
            appender.close()
        self._is_dirty = False

    def start_segment(self) -> None:
        """Create the segment of the next append now, so that the one before it can be deleted, also on a full disk.

        Only where segments grow.

        Raises:
            JournalError: it cannot be created. The log is as before.
        """
        with self.writing, journal_errors(self.folder, "cannot create a segment"):
            if self.last_segment != self.end:
                self._close_segment = True
                self._open_segment(self.end)
            self._note_segment(self.last_segment)

    def _note_segment(self, segment: int) -> None:
        """Note that a segment exists that may be empty. No row is appended meanwhile."""

    def delete_before(self, segment: int) -> None:
        """Delete all segments before the one that begins with offset ``segment``.

        Raises:
            JournalError: one of them cannot be deleted. The next call tries again.
        """
        if segment == self._kept:
            return
        with journal_errors(self.folder, "cannot delete segments"):
            self.folder.check_lock()
            for known, _ in self.list_segments():
                if known < segment:
                    self.folder.delete(self.segment_name(known))
                    self._unsynced.pop(known, None)
        self._kept = segment

    def close(self) -> None:
        """Close the segment, after a write in progress. Idempotent.

        Raises:
            JournalError: as :meth:`sync`. The log is closed.
        """
        with self.writing, journal_errors(self.folder, "cannot sync"):
            self._is_closed = True
            try:
                if self._sync_closed:
                    self._sync_all()
                self._raise_failed_sync()
            finally:
                self._close_appender()

    def after_fork(self) -> None:
        """Close the file of the parent process here. In a forked child, which does not write."""
        self._is_closed = True
        self.writing = threading.Lock()
        self.lock = threading.RLock()
        self._close_appender()

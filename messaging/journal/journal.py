"""A journal of messages: appended to by many threads, read from any offset, acknowledged by cursors.

::

    DIRECTORY/
      journal.json     identity: format, id
      lock             locked by the writer, as the folder is
      state.db         cursors, dead letters and counters, in SQLite
      0/               the records, in segments
        00000000000000000000.segment
      quarantine/      copies of damaged bytes, and of writes that a crash left unfinished
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from messaging.environment.forks import LiveObjects
from messaging.environment.signals import on_failure
from messaging.errors import (
    ArgumentError,
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalRangeError,
    JournalUnreadableError,
)
from messaging.errors.checks import check_instance, check_path
from messaging.execution import Promise, seconds
from messaging.journal.ages import RecordAges
from messaging.journal.commit import Append, GroupCommit, Promised
from messaging.journal.cursors import Cursor, Cursors, acknowledged_end, check_cursor_name
from messaging.journal.database import FILE as STATE_FILE
from messaging.journal.folders import LocalFolder, journal_errors
from messaging.journal.identity import Identity, read_identity, write_identity
from messaging.journal.log import META
from messaging.journal.options import SEGMENT_BYTES, Fsync, Full, JournalOptions, check_positive
from messaging.journal.quarantine import Quarantine
from messaging.journal.records import Record, check_offset, encode_message, encode_record
from messaging.journal.retention import FullDisk, Retention
from messaging.journal.segments import RecordLog, RecordWriter
from messaging.journal.state import State
from messaging.journal.views import CursorDTO, JournalDTO, JournalView
from messaging.model import Message
from messaging.services.reporting import PartReporter

logger = logging.getLogger(__name__)

Start = Literal["earliest", "latest"]

#: bytes of records that may wait to be written, for callers that do not wait, and bytes that each counts in addition
_WAITING_BYTES: Final = 64 * 2**20
_ENTRY_BYTES: Final = 400


class Journal(JournalView):
    """A journal of messages on the local disk, with one writer: this object. Thread safe.

    Get it with :meth:`open`. Records get offsets that rise by one and are never used again. Appends of many threads
    share writes and syncs. Each named cursor acknowledges for itself. Records that the slowest cursor has acknowledged
    are deleted, in whole segments.

    A context manager. A forked child must open a journal of its own.

    Attributes:
        ages: when the records were stored.
        retention: which records are kept.
        disk: whether a full disk holds records back.
        dead_letter_count: dead letters that are kept.
    """

    _log: RecordWriter
    _state: State

    def __init__(
        self,
        folder: LocalFolder,
        identity: Identity,
        resources: contextlib.ExitStack,
        options: JournalOptions,
        option: str | None,
    ) -> None:
        self._resources = resources
        self._is_closed = False
        #: held while the journal is being closed: a second caller waits until it is
        self._closing = threading.Lock()
        # before the log, which moves damage aside: files of a journal that is refused do not change
        state = State(Path(folder.path), option=option, key=identity.key)
        resources.callback(state.close)
        quarantine = Quarantine(folder)
        log = RecordWriter(
            folder,
            seed=identity.seed(),
            segment_bytes=options.segment_bytes,
            segment_records=options.segment_records,
            on_damage=quarantine.add,
            sync_closed=options.fsync != "never",
        )
        resources.callback(log.close)
        super().__init__(folder, identity.id, log, state, quarantine)
        log.skip_to(acknowledged_end(state))
        self._cursors = Cursors(log, state, lambda: self._commit.note_room())
        self.retention = Retention(log, self._cursors, options)
        self.disk = FullDisk(folder)
        self.ages = RecordAges(log)
        self._dead_letters_lock = threading.Lock()  # guards the following
        self.dead_letter_count = state.count_dead_letters()
        self._commit = GroupCommit(log, self._cursors, self.ages, self.retention, self.disk, options)
        _open.add(self)
        if options.max_age is not None:
            self.retention.expire()  # before the first append: records of earlier runs stay in segments of their own
            self._commit.wake()

    # --- opening

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        fsync: Fsync = "always",
        fsync_interval: float = 1.0,
        max_bytes: int | None = None,
        max_records: int | None = None,
        max_age: float | None = None,
        full: Full = "block",
        full_disk: Full | None = None,
        timeout: float = 30.0,
        segment_bytes: int = SEGMENT_BYTES,
        lock_timeout: float = 0.0,
        option: str | None = None,
    ) -> Journal:
        """Open a journal to write, and create it if it is missing.

        Args:
            path: its folder; ``~`` is the home of the user.
            fsync: when a record counts as stored. ``"always"``: when the disk has it, so that it survives the loss of
                power. ``"interval"``: when the operating system has it. It survives a killed process; the loss of power
                costs the records since the last sync. ``"never"``: as ``"interval"``, but the operating system alone
                decides when to write.
            fsync_interval: seconds between two syncs with ``"interval"``.
            max_bytes, max_records: bounds of the records that the slowest cursor has not acknowledged, or of all
                records without cursors; ``None``: unlimited.
            max_age: seconds after which a record is dropped, acknowledged or not, by its timestamp; ``None``: never.
            full: what happens to a record that has no room, in the journal or on the disk: ``"block"``: it waits until
                its timeout; ``"drop_oldest"``: the oldest segments are dropped; ``"reject"``: it is refused at once.
            full_disk: what happens where the disk has no room; ``None``: the same.
            timeout: default deadline of appends, seconds.
            segment_bytes: size from which on a file is closed. A bounded journal has smaller files.
            lock_timeout: how long to wait for another writer that is ending, seconds; at least 0.1.
            option: the setting with the path, for errors.

        Raises:
            ArgumentError: an argument has a value that it cannot have.
            JournalLockedError: another process, or another object of this one, has the journal open.
            JournalUnreadableError: the folder holds something else, or cannot be used.
            JournalFullError: the disk is full.
        """
        options = JournalOptions(
            fsync=fsync, fsync_interval=fsync_interval, max_bytes=max_bytes, max_records=max_records, max_age=max_age,
            full=full, full_disk=full_disk, timeout=timeout, segment_bytes=segment_bytes,
        )  # fmt: skip
        lock_timeout = seconds(lock_timeout, "lock_timeout")
        folder = LocalFolder(str(check_path("path", path)), option=option, lock_timeout=lock_timeout, private=True)
        resources = contextlib.ExitStack()
        with on_failure(resources.close), journal_errors(folder, "cannot open", JournalUnreadableError):
            folder.make()
            resources.enter_context(folder.lock(with_folder=True))
            identity = read_identity(folder)
            if identity is None:
                if folder.list("0"):
                    text = f"there are segments, but no {META}; `messaging journal repair` makes one"
                    raise folder.error(JournalUnreadableError, text)
                identity = write_identity(folder)
            return cls(folder, identity, resources, options, option)

    @staticmethod
    def view(path: str | Path) -> JournalView:
        """Open a journal to read what it has now, also while another process writes to it.

        Raises:
            ArgumentError: the path is no path, or empty.
            JournalUnreadableError: the folder holds no journal of messages, or cannot be read.
        """
        folder = LocalFolder(str(check_path("path", path)))
        with journal_errors(folder, "cannot open", JournalUnreadableError):
            identity = read_identity(folder)
            if identity is None:
                raise folder.error(JournalUnreadableError, f"there is no journal: no file {META}")
            state = None
            if STATE_FILE in folder.list():
                try:
                    state = State(Path(folder.path), writable=False, key=identity.key)
                except JournalUnreadableError:  # of a newer version, or of another journal
                    raise
                except JournalError as error:  # the records do not need it
                    rest = "; the next writer replaces it" if isinstance(error, JournalCorruptError) else ""
                    logger.warning("%s; cursors and dead letters are not known%s", error, rest)
            log = RecordLog(folder, seed=identity.seed())
            view = JournalView(folder, identity.id, log, state, Quarantine(folder, writable=False))
            with on_failure(view.close):
                view.refresh()
            return view

    # --- appending

    def append(
        self,
        channel: str,
        payload: bytes,
        properties: str = "",
        *,
        message_id: str | None = None,
        timestamp: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """Append a record and wait until it is stored, as the fsync policy says; return its offset.

        Args:
            channel: of the message; at most 65,535 bytes in UTF-8.
            payload: of the message.
            properties: all of its context but the channel, as :func:`~messaging.model.stored_properties` writes it.
            message_id: at most 65,535 bytes in UTF-8.
            timestamp: seconds since the epoch; ``None``: now.
            timeout: how long to wait for room, seconds; ``None``: that of the journal.

        Raises:
            ArgumentError: the record is too large, or a text has lone surrogates.
            JournalFullError: there is no room, or the disk is full. Nothing was written.
            JournalError: the write failed. Nothing was written.
            ClosedError: the journal is closed.
            WouldBlockError: the thread runs an event loop, which must not wait: use :meth:`submit`.
        """
        record = encode_record(channel, payload, properties, message_id, timestamp)
        return self._commit.append(record, timeout)

    def append_message(self, message: Message, *, message_id: str | None = None, timeout: float | None = None) -> int:
        """Append a message with its whole context; otherwise as :meth:`append`.

        Raises:
            InvalidExtensionError: an extension has a value that cannot be stored.
        """
        return self._commit.append(encode_message(message, message_id), timeout)

    def submit(
        self,
        channel: str,
        payload: bytes,
        properties: str = "",
        *,
        message_id: str | None = None,
        timestamp: float | None = None,
        timeout: float | None = None,
    ) -> Promise[int]:
        """Append a record as :meth:`append`, and return a promise of its offset. From any thread and event loop.

        Records of one thread are stored in the order of the calls.

        Raises:
            ArgumentError: as :meth:`append`.
            JournalFullError: 64 MiB of records wait to be written already; each counts 400 bytes more than it has.
            ClosedError: the journal is closed.
        """
        record = encode_record(channel, payload, properties, message_id, timestamp)
        if self.waiting_bytes + len(record) > _WAITING_BYTES:
            raise self.folder.error(
                JournalFullError,
                f"{len(self._commit.waiting)} records wait to be written; await earlier promises first",
            )
        promise: Promise[int] = Promise(f"append to the journal {self.folder.shown}")
        self._commit.put(Promised(record, self._commit.deadline(timeout), promise))
        return promise

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the records that wait to be written, with 400 more for each: the memory that they occupy."""
        waiting = self._commit.waiting
        return waiting.bytes + len(waiting) * _ENTRY_BYTES

    def put(self, entry: Append) -> None:
        """Append the record of ``entry``, which is told its outcome. From any thread.

        Raises:
            ClosedError: the journal is closed.
        """
        self._cursors.refuse_closed()
        self._commit.put(entry)

    # --- cursors and trimming

    def cursor(self, name: str, start: int | Start = "earliest") -> Cursor:
        """Return the cursor ``name``, and create it if it is missing.

        Args:
            name: 1 to 200 printable characters.
            start: where a new cursor begins: ``"earliest"``, ``"latest"`` or an offset. A cursor that exists keeps its
                position.

        Raises:
            ArgumentError: malformed name or start.
            JournalRangeError: ``start`` is an offset that the journal does not have.
            JournalError: the cursor cannot be stored.
        """
        check_cursor_name(name)
        self._cursors.refuse_closed()
        if start not in ("earliest", "latest") and (not isinstance(start, int) or isinstance(start, bool)):
            raise ArgumentError(f"start must be 'earliest', 'latest' or an offset, not {start!r:.100}")
        at = start if isinstance(start, int) else self.begin if start == "earliest" else self.end
        if not self.begin <= at <= self.end:
            raise self.folder.error(
                JournalRangeError, f"cursor {name!r}: it cannot begin at {at}: {self.begin} to {self.end} are there"
            )
        self._cursors.open(name, at)
        return Cursor(name, self._cursors, self._log, self._commit.wait_for)

    def cursors(self) -> dict[str, int]:
        """Return the position of each cursor: the first offset that it has not acknowledged."""
        return self._cursors.positions()

    def remove_cursor(self, name: str) -> bool:
        """Delete a cursor, so that it keeps no records; return whether there was one.

        Raises:
            JournalError: the database cannot be written. The cursor stays.
            ClosedError: the journal is closed.
        """
        return self._cursors.remove(name)

    def trim(self, before: int) -> int:
        """Delete the segments whose records are all before an offset; return the new :attr:`begin`.

        Cursors keep what they have not acknowledged. With :attr:`end`, all segments are deleted that they do not keep,
        also the last one.

        Raises:
            ArgumentError: ``before`` is no integer, or negative.
            JournalError: a segment cannot be deleted.
            ClosedError: the journal is closed.
        """
        self._cursors.refuse_closed()
        check_offset(before, "before")
        end = self.end
        until = min([before, end, *self._cursors.positions().values()])
        segments = self._log.segments
        # a failed write may have left a file behind the last of them that is not one of them yet
        if segments and until == end > segments[-1].first:
            self._log.start_segment()
        begin = self._log.trim(until)
        self._commit.note_room()
        return begin

    def purge(self) -> int:
        """Delete all records, acknowledged or not; return how many there were. Cursors move to the end.

        Offsets go on: the next record has the offset :attr:`end`.

        Raises:
            JournalError: the positions cannot be stored, or a segment cannot be deleted.
            ClosedError: the journal is closed.
        """
        self._cursors.refuse_closed()
        begin, end = self.begin, self.end
        for name in self._cursors.positions():
            self._cursors.acknowledge(name, 0, end)
        self._cursors.save()
        return self.trim(end) - begin

    def sync(self) -> None:
        """Wait until the disk has all records, and the positions of all cursors.

        Raises:
            JournalError: the disk failed, now or at a sync of the journal itself that no caller was told of. Records
                since the last successful sync may be lost if the machine fails.
            ClosedError: the journal is closed.
        """
        self._cursors.refuse_closed()
        self._log.sync()
        self._cursors.save()

    @property
    def dropped(self) -> int:
        """Records that were dropped to make room, or for their age, since the journal was created."""
        return self._cursors.dropped

    def add_dead_letter(self, record: Record, reason: str, *, most: int = 10_000) -> int:
        """Keep a record that cannot be processed, beside the log; return how many older ones were dropped.

        Args:
            record: the record.
            reason: for people.
            most: dead letters that are kept.

        Raises:
            ArgumentError: an argument is not as described.
            JournalError: it is not kept.
        """
        check_instance("record", record, Record)
        check_instance("reason", reason, str)
        check_positive((int,), "most", most)
        data = encode_record(record.channel, record.payload, record.properties, record.message_id, record.timestamp)
        deleted = self._state.add_dead_letter(reason, record.offset, data, most=most)
        with self._dead_letters_lock:
            self.dead_letter_count += 1 - deleted
        return deleted

    def remove_dead_letters(self, ids: Sequence[int]) -> int:
        """Delete dead letters by their ids; return how many there were.

        Raises:
            ArgumentError: an id is no int.
            JournalError: none was deleted.
            ClosedError: the journal is closed.
        """
        for each in ids:
            check_instance("the id of a dead letter", each, int)
        self._cursors.refuse_closed()
        deleted = self._state.delete_dead_letters(ids)
        with self._dead_letters_lock:
            self.dead_letter_count -= deleted
        return deleted

    # --- state

    def get_dto(self) -> JournalDTO:
        """Return a snapshot: bounds, sizes, cursors, and the records that are not acknowledged."""
        positions = self._cursors.positions()
        slowest, end = self._cursors.slowest(), self.end
        return JournalDTO(
            path=self.path,
            begin=self.begin,
            end=end,
            segments=len(self._log.segments),
            bytes=self.size,
            unstored=len(self._commit.waiting),
            backlog=max(0, end - slowest),
            backlog_bytes=self.bytes_from(slowest),
            oldest=self.ages.age_of(slowest),
            max_bytes=self.retention.max_bytes,
            max_records=self.retention.max_records,
            dropped=self.dropped,
            dead_letters=self.dead_letter_count,
            cursors=tuple(
                CursorDTO(name, position, max(0, end - position)) for name, position in sorted(positions.items())
            ),
        )

    def problems(self) -> tuple[str, ...]:
        """Return why no record can be appended now, as texts for people; empty: records can be appended."""
        if self._is_closed:
            return (f"journal {self.folder.shown}: closed",)
        if self.disk.error is not None:
            return (str(self.disk.error),)
        return (str(self.retention.full_error()),) if self.retention.is_full else ()

    @property
    def is_blocked(self) -> bool:
        """Return whether records wait for room, within the bounds or on the disk. From any thread."""
        return self._commit.is_blocked

    # --- closing

    def close(self) -> None:
        """Write what waits, sync, store the positions of cursors, and release the journal. Idempotent.

        Records that cannot be written fail with ``ClosedError``, or with ``JournalFullError`` if they waited for room.

        Raises:
            JournalError: as :meth:`sync`. The journal is closed.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            _open.discard(self)
            try:
                self._cursors.close()
                self._commit.close()
                try:
                    self._cursors.save()
                except JournalError as error:
                    logger.warning("%s; records that were acknowledged last are delivered again", error)
            finally:
                self._resources.close()

    def after_fork(self) -> None:
        """See ``Forkable``: the journal belongs to the parent, which alone may write to it."""
        self._is_closed = True
        self._closing = threading.Lock()
        self._dead_letters_lock = threading.Lock()
        self._cursors.after_fork()
        self._commit.after_fork()
        self._state.after_fork()
        self._log.after_fork()
        self._resources.pop_all()


class JournalReporter(PartReporter):
    """Reports the state of an open journal; register it by :func:`messaging.services.reporting.register_reporter`.

    Args:
        journal: an open :class:`Journal`.
        name: distinguishes the journals of a program; by default the path of its folder.

    Raises:
        ArgumentError: an argument is not as described.
    """

    __slots__ = ()

    def __init__(self, journal: Journal, name: str | None = None) -> None:
        check_instance("journal", journal, Journal)
        super().__init__("journal", journal.path if name is None else name, journal.get_dto, journal.problems)


#: the open journals
_open: Final = LiveObjects[Journal]()

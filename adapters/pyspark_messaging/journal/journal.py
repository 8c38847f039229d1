"""An open journal: the source and the query it belongs to, and the logs of its partitions.

::

    journalPath/
      journal.json       identity: format, id, source, query; and a checksum of these
      lock               (local) locked by the query that writes;  ``owner`` elsewhere: token of the last writer
      read-QUERY-...     marks of the tasks that read the first rows of a new query, until it commits
      cursor-QUERY       cursor of the query: the offset of the first row of each partition that it has not processed
      0/ 1/ ...          a log for each partition
        00000000000000000000.segment     frames, named by the offset of the first row
        spare                            (local, in 0/) room for journal.json on a full disk

This module decides which query may use a journal, and which rows it has processed. The promises of the logs are in
:mod:`pyspark_messaging.journal.log`.

A journal has one query at a time. On a local disk a second query waits for the lock, and gives up. In an object store
it takes the journal over, and the first query fails with its next write or commit. So the cursor of an open journal is
changed by its query alone, and read at opening. A cursor of another query keeps no row: that query can come back only
by taking the journal over, with a new id. Journals of earlier versions have no cursor: their queries begin where their
checkpoint is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

from messaging.journal.folders import Folder, journal_errors
from messaging.journal.identity import Identity, check_key, malformed, sealed, unsealed
from messaging.journal.log import META
from pyspark_messaging.errors import JournalError, JournalFullError, JournalMismatchError, JournalUnreadableError
from pyspark_messaging.journal.folders import open_folder
from pyspark_messaging.journal.log import SEGMENT_BYTES, RowLog, RowLogWriter

logger = logging.getLogger(__name__)

FORMAT: Final = 1
#: prefix of the names of marks
_MARK: Final = "read-"
#: prefix of the names of cursors
_CURSOR: Final = "cursor-"
#: a file that is deleted to make room for ``journal.json`` on a full disk, and its bytes
_SPARE: Final = "0/spare"
_SPARE_BYTES: Final = 2**14


@dataclass(frozen=True, slots=True)
class JournalSource:
    """The source of a journal. Holds no secret."""

    url: str
    channels: list[str]
    queue: str | None
    qos: str
    partitions: int


@dataclass(slots=True)
class Meta:
    """The contents of ``journal.json``."""

    source: JournalSource
    #: id of the journal; the offsets of checkpoints contain it
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    #: id of the query that reads it; a query without a checkpoint gets a new one
    query: str | None = None
    #: whether that query has committed rows
    committed: bool = False
    #: id of the previous query, if an earlier version resumed it after a loss of rows, and its new offsets by partition
    before: str | None = None
    resumed: dict[str, int] = field(default_factory=dict)
    #: group, and the MQTT sessions or AMQP queues in which the broker keeps messages for the journal
    group: str | None = None
    sessions: list[str] = field(default_factory=list)
    #: first offsets of the query by partition, until a task is known to have read them
    unread: dict[str, int] = field(default_factory=dict)
    #: the ends of the partitions when the journal was closed last
    ends: dict[str, int] = field(default_factory=dict)
    #: of the frames, if a repair did not find the id that they were written with
    key: int | None = None
    format: int = FORMAT

    def seed(self, partition: int) -> int:
        """Return the seed of the frames of ``partition``, see :mod:`messaging.journal.frames`."""
        return Identity.of(asdict(self)).seed(partition)


class RowJournalView(NamedTuple):
    """A journal that is only read: its identity, and the rows that it had when it was opened."""

    folder: Folder
    meta: Meta
    logs: Sequence[RowLog]


class RowJournal:
    """An open journal: its identity, the logs of its partitions, and the cursor of its query.

    Use :meth:`open` to write, :meth:`view` to read beside a writer.
    """

    def __init__(
        self, folder: Folder, meta: Meta, logs: Sequence[RowLogWriter], cursor: dict[int, int], lock: ExitStack
    ) -> None:
        self.folder = folder
        self.meta = meta
        self.logs = logs
        #: partition -> offset of the first row that the query has not processed
        self.cursor = cursor
        self._lock = lock
        self._is_open = True

    @staticmethod
    def open(
        path: str,
        source: JournalSource,
        *,
        adopt: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        check: Callable[[Meta], None] | None = None,
    ) -> RowJournal:
        """Open a journal to write, and create it if it is missing.

        Args:
            adopt: whether a journal of another source is accepted.
            segment_bytes: bytes from which on a segment is closed.
            check: raises if the journal must not be used; called before anything is written to it.

        Raises:
            JournalLockedError: another query uses it.
            JournalMismatchError: it belongs to another source.
            JournalCorruptError, JournalUnreadableError: the folder, or a file in it, cannot be used.
        """
        folder = open_folder(path)
        with ExitStack() as stack, journal_errors(folder, "cannot open", JournalUnreadableError):
            folder.make()
            stack.enter_context(folder.lock())
            meta = _read_meta(folder)
            if meta is None:
                if any(folder.list(str(number)) for number in range(source.partitions)):
                    raise folder.error(JournalUnreadableError, f"there are segments, but no {META}")
                meta = Meta(source)
                _write_meta(folder, meta)
            elif check is not None:
                check(meta)
            if meta.source != source:
                _refuse(folder, meta.source, source, adopt=adopt)
                meta.source = source
                _write_meta(folder, meta)
            logs = []
            for number in range(source.partitions):
                log = RowLogWriter(folder, number, seed=meta.seed(number), segment_bytes=segment_bytes)
                stack.callback(log.close)
                logs.append(log)
            cursor = {} if meta.query is None else _read_cursor(folder, meta)
            found = RowJournal(folder, meta, logs, cursor, stack.pop_all())
            found._reserve_room()
            return found

    @staticmethod
    def view(path: str) -> RowJournalView:
        """Open a journal to read its current rows, also while a query writes to it. Raises as :meth:`open`."""
        folder = open_folder(path)
        with journal_errors(folder, "cannot open", JournalUnreadableError):
            meta = _read_meta(folder)
            if meta is None:
                raise folder.error(JournalUnreadableError, f"there is no journal: no file {META}")
            logs = [RowLog(folder, number, seed=meta.seed(number)) for number in range(meta.source.partitions)]
            for log in logs:
                log.load()
            return RowJournalView(folder, meta, logs)

    def refuse_other_query(self, *, adopt: bool) -> None:
        """Raise if a query without a checkpoint must not have the journal.

        Args:
            adopt: whether a journal is accepted that another query has committed to.

        Raises:
            JournalMismatchError: another query has committed to it.
        """
        if self.meta.committed and not adopt:
            raise self.folder.error(
                JournalMismatchError,
                "it is the journal of another query, which has processed part of it: set checkpointLocation to the "
                "checkpoint of that query, or journalPath to an empty folder; adoptJournal=true with a new output path "
                "processes the rows that are left in it",
            )

    def begin_query(self, *, adopt: bool, starts: Mapping[int, int] | None = None) -> str:
        """Give the journal to a query without a checkpoint; return the id of the query.

        A full disk has room for this: it is reserved.

        Args:
            adopt: see :meth:`refuse_other_query`, which may raise.
            starts: first offset of the query, by partition, if tasks are to leave marks: see :meth:`mark`.
        """
        self.refuse_other_query(adopt=adopt)
        query = uuid.uuid4().hex
        unread = {str(partition): offset for partition, offset in (starts or {}).items()}
        with ExitStack() as stack:
            for log in self.logs:
                stack.enter_context(log.writing)  # a receiver must not take the room
            try:
                if self.folder.appends:
                    with journal_errors(self.folder, f"cannot make room for {META}"):
                        self.folder.delete(_SPARE)
                self._change(query=query, committed=False, before=None, resumed={}, unread=unread)
            finally:
                self._reserve_room()
            self.cursor = {log.partition: log.begin for log in self.logs}
            with journal_errors(self.folder, "cannot replace cursors"):
                for name in self.folder.list():
                    if name.startswith(_CURSOR):
                        self.folder.delete(name)
            self._store_cursor()  # may have no room: nothing is reserved for it
        return query

    def _reserve_room(self) -> None:
        """Keep room for a later change on a disk that rows may fill. Object stores have no bound."""
        if self.folder.appends:
            folder, name = _SPARE.split("/")
            with contextlib.suppress(OSError):
                if name not in self.folder.list(folder):
                    self.folder.write(_SPARE, [os.urandom(_SPARE_BYTES)])

    @property
    def mark(self) -> str | None:
        """Prefix of the files that tasks leave when they read; ``None`` if they need not leave any."""
        return f"{_MARK}{self.meta.query}-" if self.meta.unread else None

    def is_marked(self) -> bool:
        """Return whether a task has read rows for the query."""
        mark = self.mark
        with journal_errors(self.folder, "cannot read"):
            return mark is not None and any(name.startswith(mark) for name in self.folder.list())

    def note_read(self) -> None:
        """Record that tasks read the rows of the query, and delete their marks.

        On a full disk nothing changes, and the marks stay: they say the same until the next call.
        """
        with contextlib.suppress(JournalFullError):  # a query whose disk is full must go on: that makes room
            self._change(unread={})
            with journal_errors(self.folder, "cannot delete"):
                for name in self.folder.list():
                    if name.startswith(_MARK):
                        self.folder.delete(name)

    def note_group(self, group: str, sessions: Sequence[str]) -> None:
        """Record the group of the query, and the names of its sessions or queues at the broker."""
        if (group, list(sessions)) != (self.meta.group, self.meta.sessions):
            self._change(group=group, sessions=list(sessions))

    def continue_query(self, ends: Mapping[int, int]) -> None:
        """Continue a query whose rows are gone in part, or whose journal is: new rows get offsets behind ``ends``.

        Args:
            ends: by partition.

        Raises:
            JournalError: this cannot be written.
        """
        for log in self.logs:
            log.skip_to(ends.get(log.partition, 0))
        self._change(query=self.meta.query or uuid.uuid4().hex, unread={})

    # --- the cursor

    def _store_cursor(self) -> None:
        """Store the cursor; on a full disk its file stays as it is until the next call."""
        text = json.dumps({"journal": self.meta.id, "offsets": self.cursor}).encode()
        with contextlib.suppress(JournalFullError), journal_errors(self.folder, "cannot write a cursor"):
            self.folder.check_lock()
            self.folder.write(f"{_CURSOR}{self.meta.query}", [text])

    def used(self, partition: int) -> int:
        """Return the offset before which offsets of a partition are used: at the last close, or by the cursor."""
        return max(self.meta.ends.get(str(partition), 0), self.cursor.get(partition, 0))

    def note_commit(self, offsets: Mapping[int, int]) -> None:
        """Record that the query has committed: another query needs ``adoptJournal`` from now on.

        On a full disk nothing is stored: the next call tries again.

        Args:
            offsets: new position of the cursor, by partition.
        """
        self.cursor |= offsets
        if not self.meta.committed:
            with contextlib.suppress(JournalFullError):
                self._change(committed=True)
        if self.meta.query is not None and self.cursor:
            self._store_cursor()

    def _change(self, **values: Any) -> None:
        meta = replace(self.meta, **values)
        with journal_errors(self.folder, f"cannot write {META}"):
            self.folder.check_lock()
            _write_meta(self.folder, meta)
        self.meta = meta

    def close(self) -> None:
        """Note the ends of the partitions, close the logs and release the lock. Idempotent."""
        noted = self.meta.ends  # a journal that lost rows is refused, and must be the next time, too
        ends = {key: max(log.end, noted.get(key, 0)) for log in self.logs for key in [str(log.partition)]}
        with self._lock:
            if self._is_open and ends != noted:
                with contextlib.suppress(JournalError):  # a lower end is as right, and detects less
                    self._change(ends=ends)
            self._is_open = False


def leave_mark(folder: Folder, mark: str) -> None:
    """Leave a mark that a task has read rows, see :attr:`RowJournal.mark`. Runs on executors.

    An empty file: it needs no room on a full disk.
    """
    with journal_errors(folder, "an executor cannot write the mark that it has read the first rows"):
        folder.write(mark + secrets.token_hex(8), [])  # each attempt of each task has its own


def _read_meta(folder: Folder) -> Meta | None:
    try:
        text = bytes(folder.read(META))
    except FileNotFoundError:
        return None
    values = unsealed(folder, text)
    try:
        if values["format"] != FORMAT:
            raise folder.error(
                JournalUnreadableError, f"it has format {values['format']!r}, this version reads {FORMAT}"
            )
        meta = Meta(**{**values, "source": JournalSource(**values["source"])})
        identity = Identity.of(values)
        if not isinstance(meta.source.partitions, int):
            raise TypeError
    except (ValueError, TypeError, KeyError) as error:
        raise malformed(folder, error) from None
    check_key(folder, identity.key, range(meta.source.partitions))
    return meta


def _read_cursor(folder: Folder, meta: Meta) -> dict[int, int]:
    """Return the cursor of a journal. Without one, and with a damaged one, no row counts as processed."""
    name = f"{_CURSOR}{meta.query}"
    try:
        values = json.loads(bytes(folder.read(name)))
        if values["journal"] == meta.id:
            return {int(partition): int(offset) for partition, offset in values["offsets"].items()}
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("journal %s: %s does not parse: %s; begins again", folder.shown, name, error)
    return {}


def _write_meta(folder: Folder, meta: Meta) -> None:
    folder.write(META, [sealed(asdict(meta))])


def _refuse(folder: Folder, known: JournalSource, wanted: JournalSource, *, adopt: bool) -> None:
    """Raise if a journal of ``known`` cannot be used for ``wanted``. Partitions may always be added."""
    differences = [
        f"{name} was {was!r} and is {is_!r}"
        for name, was in asdict(known).items()
        if (is_ := getattr(wanted, name)) != was and not (is_ > was if name == "partitions" else adopt)
    ]
    if differences:
        raise folder.error(
            JournalMismatchError,
            f"it is the journal of another source: {'; '.join(differences)}; give each source one of its own",
        )

"""The journal: what was received and is not processed yet, in a folder that outlives the query.

::

    journalPath/
      journal.json       whose it is: format, id, source, query
      lock               (local) held by the query that writes;  ``owner`` elsewhere: who came last
      read-QUERY-...     left by the tasks that read the first rows of a new query, until it commits
      0/ 1/ ...          a log for each partition
        00000000000000000000.segment     frames, named by the offset of the first row

Here is whose journal it is, and who may go on with it. What the logs promise is in :mod:`adapters.spark.log`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from adapters.spark.errors import JournalMismatchError, JournalUnreadableError
from adapters.spark.folders import Folder, open_folder
from adapters.spark.log import META, SEGMENT_BYTES, Log, LogWriter, journal_errors

FORMAT: Final = 1
#: what the names of marks begin with
_MARK: Final = "read-"


@dataclass(frozen=True, slots=True)
class Source:
    """What a journal is the journal of. Holds no secret."""

    url: str
    channels: list[str]
    queue: str | None
    qos: str
    partitions: int


@dataclass(slots=True)
class Meta:
    """The contents of ``journal.json``."""

    source: Source
    #: of the journal: offsets of a checkpoint carry it
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    #: of the query that reads it: made anew by each query that begins without a checkpoint
    query: str | None = None
    #: whether that query has committed anything
    committed: bool = False
    #: the query before, if it went on here though part of what it had seen was gone, and where: by partition
    before: str | None = None
    resumed: dict[str, int] = field(default_factory=dict)
    #: under which name, and in which MQTT sessions or AMQP queues, the broker keeps messages for the journal
    group: str | None = None
    sessions: list[str] = field(default_factory=list)
    #: where the query began, by partition, as long as no task is known to have read from there
    unread: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def seed(self, partition: int) -> int:
        """What the checks of the frames of ``partition`` begin with."""
        return zlib.crc32(f"{self.id}/{partition}".encode())


L = TypeVar("L", bound=Log)


class Journal(Generic[L]):
    """A journal that is open: the logs of its partitions, and whose it is.

    Use :meth:`open` to write, :meth:`view` to read beside a writer.
    """

    def __init__(self, folder: Folder, meta: Meta, logs: Sequence[L], lock: contextlib.ExitStack) -> None:
        self.folder = folder
        self.meta = meta
        self.logs = logs
        self._lock = lock

    @staticmethod
    def open(
        path: str,
        source: Source,
        *,
        adopt: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        check: Callable[[Meta], None] | None = None,
    ) -> Journal[LogWriter]:
        """Open a journal to write, and make it if there is none.

        Args:
            path: see option ``journalPath``.
            source: what it is to be the journal of.
            adopt: whether it may be that of another source.
            segment_bytes: when a segment is closed.
            check: raises if the journal must not be used; is called before anything is written to it.

        Raises:
            JournalLockedError: another query has it.
            JournalMismatchError: it is the journal of something else.
            JournalCorruptError, JournalUnreadableError: what is there cannot be used.
        """
        with contextlib.ExitStack() as stack, journal_errors(path, "cannot open", JournalUnreadableError):
            folder = open_folder(path)
            folder.make()
            stack.enter_context(folder.lock())
            meta = _read_meta(folder)
            if meta is None:
                if any(folder.list(str(number)) for number in range(source.partitions)):
                    raise JournalUnreadableError(path, f"there are segments, but no {META}")
                meta = Meta(source)
                _write_meta(folder, meta)
            elif check is not None:
                check(meta)
            if meta.source != source:
                _refuse(path, meta.source, source, adopt=adopt)
                meta.source = source
                _write_meta(folder, meta)
            logs = []
            for number in range(source.partitions):
                log = LogWriter(folder, number, seed=meta.seed(number), segment_bytes=segment_bytes)
                stack.callback(log.close)
                logs.append(log)
            return Journal(folder, meta, logs, stack.pop_all())

    @staticmethod
    def view(path: str) -> Journal[Log]:
        """Open a journal to read what is in it now, whoever writes to it.

        Raises:
            JournalUnreadableError: there is none, or it cannot be reached.
            JournalCorruptError: it is damaged.
        """
        with journal_errors(path, "cannot open", JournalUnreadableError):
            folder = open_folder(path)
            meta = _read_meta(folder)
            if meta is None:
                raise JournalUnreadableError(path, f"there is no journal: no file {META}")
            logs = [Log(folder, number, seed=meta.seed(number)) for number in range(meta.source.partitions)]
            for log in logs:
                log.load()
            return Journal(folder, meta, logs, contextlib.ExitStack())

    def begin_query(self, *, adopt: bool, starts: Mapping[int, int] | None = None) -> str:
        """A query begins without a checkpoint: the journal is its own from here on.

        Args:
            adopt: whether it may be one that another query has committed to.
            starts: offset at which the query begins, by partition, if tasks are to leave marks: see :meth:`mark`.

        Raises:
            JournalMismatchError: another query has committed to it.
        """
        if self.meta.committed and not adopt:
            raise JournalMismatchError(
                self.folder.path,
                "it is the journal of another query, which has processed part of it: set checkpointLocation to the "
                "checkpoint of that query, or journalPath to an empty folder; adoptJournal=true with a new output path "
                "goes on with what is left in it",
            )
        query = uuid.uuid4().hex
        unread = {str(partition): offset for partition, offset in (starts or {}).items()}
        self._change(query=query, committed=False, before=None, resumed={}, unread=unread)
        return query

    @property
    def mark(self) -> str | None:
        """What the names of the files begin with that tasks leave when they read; ``None`` if they need not."""
        return f"{_MARK}{self.meta.query}-" if self.meta.unread else None

    def is_marked(self) -> bool:
        """Return whether a task has read rows for the query."""
        mark = self.mark
        with journal_errors(self.folder.path, "cannot read"):
            return mark is not None and any(name.startswith(mark) for name in self.folder.list())

    def note_read(self) -> None:
        """Record that tasks read the rows of the query, and delete their marks."""
        self._change(unread={})
        with journal_errors(self.folder.path, "cannot delete"):
            for name in self.folder.list():
                if name.startswith(_MARK):
                    self.folder.delete(name)

    def note_group(self, group: str, sessions: Sequence[str]) -> None:
        """Record what the broker keeps for the query: its group, and the names of its sessions or queues."""
        if (group, list(sessions)) != (self.meta.group, self.meta.sessions):
            self._change(group=group, sessions=list(sessions))

    def resume(self, offsets: Mapping[int, int]) -> None:
        """The query goes on from ``offsets``, though its checkpoint is beyond the end: with another id from now on."""
        resumed = {str(partition): offset for partition, offset in offsets.items()}
        self._change(query=uuid.uuid4().hex, before=self.meta.query, resumed=resumed, unread={})

    def note_commit(self) -> None:
        """The query has committed: from now on nobody else takes the journal unless it says so."""
        if not self.meta.committed:
            self._change(committed=True)

    def _change(self, **values: Any) -> None:
        meta = replace(self.meta, **values)
        with journal_errors(self.folder.path, f"cannot write {META}"):
            self.folder.check_lock()
            _write_meta(self.folder, meta)
        self.meta = meta

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._lock.close()


def leave_mark(folder: Folder, mark: str) -> None:
    """Leave a mark that a task has read rows. Runs on executors.

    Args:
        folder: the folder of the journal.
        mark: see :attr:`Journal.mark`.

    Raises:
        JournalError: the executor cannot write to the folder.
    """
    with journal_errors(folder.path, "an executor cannot write the mark that it has read the first rows"):
        folder.write(mark + secrets.token_hex(8), [b"read"])  # each attempt of each task has its own


def _read_meta(folder: Folder) -> Meta | None:
    try:
        text = folder.read(META).to_pybytes()
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise JournalUnreadableError(
                folder.path, f"it has format {values['format']!r}, this version reads {FORMAT}"
            )
        meta = Meta(**{**values, "source": Source(**values["source"])})
        if not isinstance(meta.id, str) or not isinstance(meta.source.partitions, int):
            raise TypeError
        return meta
    except (ValueError, TypeError, KeyError) as error:
        raise JournalUnreadableError(folder.path, f"{META} does not parse: {type(error).__name__}") from None


def _write_meta(folder: Folder, meta: Meta) -> None:
    folder.write(META, [json.dumps(asdict(meta), indent=1).encode()])


def _refuse(path: str, known: Source, wanted: Source, *, adopt: bool) -> None:
    """Raise if a journal of ``known`` is not one of ``wanted``. Partitions may be added; the rest may be adopted."""
    differences = [
        f"{name} was {was!r} and is {is_!r}"
        for name, was in asdict(known).items()
        if (is_ := getattr(wanted, name)) != was and not (is_ > was if name == "partitions" else adopt)
    ]
    if differences:
        raise JournalMismatchError(
            path, f"it is the journal of another source: {'; '.join(differences)}; give each source one of its own"
        )

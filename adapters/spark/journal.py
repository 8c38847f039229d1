"""The journal: what was received and is not processed yet, in a folder that outlives the query.

::

    journalPath/
      journal.json       whose it is: format, id, source, query
      lock               (local) held by the query that writes;  ``owner`` elsewhere: who came last
      0/ 1/ ...          a log for each partition
        00000000000000000000.segment     frames, named by the offset of the first row

A log is appended to by one thread, and read by offsets. What :meth:`LogWriter.append` returned from is on the disk:
it is there after any crash, with the same offsets and in the same order. Offsets rise by one from row to row and
never come back. What is committed is deleted segment by segment. The last segment always stays: it tells where
offsets go on.

A crash may leave half a frame at the end of the last segment. Nobody was told of it, the broker still has its
messages, and it is cut off when the journal is opened. Anything else that is not as it was written is an error. A
write that failed may leave whole frames at the end of a segment; the name of the next one says where they end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
import uuid
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import pyarrow as pa

from adapters.spark import frames
from adapters.spark.columns import JOURNAL
from adapters.spark.errors import (
    DataLossError,
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalMismatchError,
    JournalUnreadableError,
    redacted,
)
from adapters.spark.folders import Appender, Folder, open_folder

if TYPE_CHECKING:
    from messaging.errors import MessagingError

logger = logging.getLogger(__name__)

FORMAT: Final = 1
_META: Final = "journal.json"
_SUFFIX: Final = ".segment"
#: a local segment is closed when it has grown beyond this, bytes
SEGMENT_BYTES: Final = 64 * 2**20
#: a segment whose rows are all committed is closed from this size on, so that it can go
_WORTH_CLOSING: Final = 2**20
#: what an operating system says when there is no room
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Span(NamedTuple):
    """Rows of one segment, and the bytes they are in: frames as a whole. Names what an executor reads."""

    segment: str
    position: int
    length: int
    #: offset of the first row wanted, and the one after the last
    start: int
    end: int
    #: what the checks of its frames begin with
    seed: int


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
    format: int = FORMAT

    def seed(self, partition: int) -> int:
        """What the checks of the frames of ``partition`` begin with."""
        return zlib.crc32(f"{self.id}/{partition}".encode())


class _Index:
    """Where the frames of a log are. Guarded by the lock of the log."""

    def __init__(self, begin: int) -> None:
        #: offset of the first row that is there, and the one after the last
        self.begin = self.end = begin
        # arrays: a backlog of small frames has millions
        self._firsts = array("q")
        self._segments = array("q")  # by the offset in their names
        self._positions = array("q")
        self._lengths = array("q")
        #: bytes of all frames ever added, up to the end of each
        self._totals = array("q")
        self._total = 0

    def add(self, first: int, rows: int, segment: int, position: int, length: int) -> None:
        if not self._firsts:
            self.begin = first
        self._firsts.append(first)
        self._segments.append(segment)
        self._positions.append(position)
        self._lengths.append(length)
        self._total += length
        self._totals.append(self._total)
        self.end = first + rows

    def segment_of(self, offset: int) -> int | None:
        """The segment that holds ``offset``."""
        at = bisect_right(self._firsts, offset) - 1
        return self._segments[at] if at >= 0 else None

    def forget(self, segment: int) -> None:
        """Drop the frames of all segments before ``segment``."""
        count = bisect_left(self._segments, segment)
        for column in (self._firsts, self._segments, self._positions, self._lengths, self._totals):
            del column[:count]
        self.begin = self._firsts[0] if self._firsts else self.end

    def bytes_from(self, offset: int) -> int:
        """Bytes of the frames that hold ``offset`` and what follows."""
        at = max(0, bisect_right(self._firsts, offset) - 1)
        if offset >= self.end or at >= len(self._totals):
            return 0
        return self._total - (self._totals[at] - self._lengths[at])

    def end_within(self, start: int, limit: int) -> int:
        """The largest offset so that the rows from ``start`` to it hold some ``limit`` bytes at most; one row at least.

        All rows of a frame count the same.
        """
        at = max(0, bisect_right(self._firsts, start) - 1)
        if start >= self.end or at >= len(self._totals):
            return self.end
        until = self._totals[at] - self._lengths[at] + self._share(at, start - self._firsts[at]) + limit
        last = bisect_right(self._totals, until)
        if last >= len(self._firsts):
            return self.end
        rows = self._rows(last)
        within = (until - (self._totals[last] - self._lengths[last])) * rows // self._lengths[last]
        return max(start + 1, self._firsts[last] + within)

    def _rows(self, at: int) -> int:
        """Rows of a frame."""
        return (self._firsts[at + 1] if at + 1 < len(self._firsts) else self.end) - self._firsts[at]

    def _share(self, at: int, rows: int) -> int:
        """Bytes of the first ``rows`` rows of a frame."""
        return self._lengths[at] * rows // self._rows(at)

    def spans(self, start: int, end: int) -> list[tuple[int, int, int, int, int]]:
        """Segment, position, length and the offsets, for the rows from ``start`` to ``end``."""
        found: list[tuple[int, int, int, int, int]] = []
        if start >= end:
            return found
        at = max(0, bisect_right(self._firsts, start) - 1)
        while at < len(self._firsts) and self._firsts[at] < end:
            segment = self._segments[at]
            after = bisect_right(self._segments, segment, at)
            stop = min(after, bisect_left(self._firsts, end, at))
            position = self._positions[at]
            length = self._positions[stop - 1] + self._lengths[stop - 1] - position
            until = self._firsts[stop] if stop < len(self._firsts) else self.end
            found.append((segment, position, length, max(start, self._firsts[at]), min(end, until)))
            at = stop
        return found


class Log:
    """One partition of a journal, for reading. Thread safe.

    Args:
        folder: that of the journal.
        partition: which one.
        seed: what the checks of its frames begin with.
    """

    def __init__(self, folder: Folder, partition: int, *, seed: int = 0) -> None:
        self.partition = partition
        self._folder = folder
        self._seed = seed
        #: guards the index
        self._lock = threading.Lock()
        self._index = _Index(0)

    @property
    def begin(self) -> int:
        """The first offset that is there."""
        with self._lock:
            return self._index.begin

    @property
    def end(self) -> int:
        """The offset after the last that is there: on the disk, or what stands for it."""
        with self._lock:
            return self._index.end

    def bytes_from(self, offset: int) -> int:
        """Bytes in the journal from ``offset`` on."""
        with self._lock:
            return self._index.bytes_from(offset)

    def end_within(self, start: int, limit: int) -> int:
        """How far the rows from ``start`` on go in ``limit`` bytes; at least one row, if there is one."""
        with self._lock:
            return self._index.end_within(start, limit)

    def spans(self, start: int, end: int) -> list[Span]:
        """Where the rows from ``start`` to ``end`` are.

        Raises:
            DataLossError: not all of them are there.
        """
        with self._lock:
            begin, known = self._index.begin, self._index.end
            found = self._index.spans(start, end)
        if start < end and (start < begin or end > known):
            raise DataLossError(
                f"option 'journalPath' ({self._folder.path}): offsets {start} to {end} of partition {self.partition} "
                f"are asked for, and {begin} to {known} are there; failOnDataLoss=false goes on with those"
            )
        return [
            Span(_name(self.partition, segment), position, length, first, last, self._seed)
            for segment, position, length, first, last in found
        ]

    def _segments(self) -> list[tuple[int, int]]:
        """Offset and size of each segment, in order."""
        found = []
        for name, size in self._folder.list(str(self.partition)).items():
            stem = name.removesuffix(_SUFFIX)
            if stem != name and len(stem) == 20 and stem.isdecimal():
                found.append((int(stem), size))
        return sorted(found)

    def load(self) -> tuple[int, int, int] | None:
        """Find out what is there: of the last segment, its offset, where its last frame ends, and its size.

        A writer may be at work: what it deletes meanwhile is committed, and not missing.

        Raises:
            JournalCorruptError: it is not as it was written.
        """
        segments = [segment for segment, _ in self._segments()]
        index = _Index(segments[0] if segments else 0)
        last: tuple[int, int, int] | None = None
        for number, segment in enumerate(segments):
            if segment != index.end:
                if segments[number - 1] in (known for known, _ in self._segments()):
                    self._corrupt(segment, f"rows {index.end} to {segment} are missing before it")
                index = _Index(segment)
            until = segments[number + 1] if number + 1 < len(segments) else None
            try:
                data = self._folder.read(_name(self.partition, segment), copy=until is None)
            except FileNotFoundError:
                index = _Index(segment if until is None else until)
                continue
            last = (segment, self._load(index, segment, data, until), data.size)
        with self._lock:
            self._index = index
        return last

    def _load(self, index: _Index, segment: int, data: pa.Buffer, until: int | None) -> int:
        """Add the frames of ``segment``, up to row ``until``, to ``index``; returns where the last one ends."""
        position = 0
        for frame in frames.scan(data, self._seed):
            header = frame.header
            if until is None and not frame.is_intact():
                break
            if not position and header.first != segment:
                self._corrupt(segment, f"it is segment {_name(self.partition, header.first)}")
            if until is not None and header.first >= until:
                return position
            if header.first != index.end:
                self._corrupt(segment, f"row {header.first} follows row {index.end - 1}")
            if header.rows:
                index.add(header.first, header.rows, segment, position, frame.end - position)
            position = frame.end
        if position < data.size and frames.any_after(data, position, self._seed):
            self._corrupt(segment, f"the frame at byte {position} is damaged, and whole ones follow")
        return position

    def _corrupt(self, segment: int, what: str) -> None:
        raise JournalCorruptError(self._folder.path, f"segment {_name(self.partition, segment)}: {what}")


class LogWriter(Log):
    """One partition of a journal, for its one writer.

    :meth:`append` is called by one thread, everything else by any.

    Args:
        folder, partition, seed: see :class:`Log`.
        segment_bytes: a segment that has grown beyond this is closed, where segments grow.
    """

    def __init__(self, folder: Folder, partition: int, *, seed: int = 0, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__(folder, partition, seed=seed)
        self._segment_bytes = segment_bytes
        #: guards the appender, and is held while it writes
        self._writing = threading.Lock()
        self._appender: Appender | None = None
        self._segment = 0
        self._is_closed = False
        #: everything before is committed
        self._committed = 0
        self._close_segment = False
        #: segments before this one are deleted
        self._kept = 0
        folder.make(str(partition))
        last = self.load()
        if last is None:
            return
        self._segment, whole, size = last
        self._committed = self._index.begin
        if whole < size:
            logger.warning(
                "journal %s: cut off %d bytes of an unfinished write at the end of %s",
                redacted(folder.path), size - whole, _name(partition, self._segment),
            )  # fmt: skip
        if folder.appends and whole:
            self._appender = folder.append_to(_name(partition, self._segment), whole)

    @property
    def backlog(self) -> int:
        """Bytes that are not committed."""
        with self._lock:
            return self._index.bytes_from(self._committed)

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows; ``offset`` of the first is :attr:`end`. They are on the disk when this returns.

        Raises:
            JournalFullError: there is no room for them. Nothing was added, and it may be tried again.
            JournalError: anything else is wrong. Nothing was added.
        """
        if not batch.num_rows:
            return
        with self._writing, _journal_errors(self._folder.path, "cannot write"):
            if self._is_closed:
                raise JournalError(self._folder.path, "it is closed")
            try:
                self._append(self._index.end, batch)
            except BaseException:
                self._let_go()  # a disk that failed once is not asked for the same file again
                raise

    def _append(self, first: int, batch: pa.RecordBatch) -> None:
        parts = frames.encode(first, batch.num_rows, batch.serialize(), self._seed)
        length = _size(parts)
        if self._folder.appends:
            appender = self._room(first)
            appender.append(parts if appender.size else [*self._head(first), *parts])
            end = appender.size
        else:
            self._folder.check_lock()
            end = self._folder.write(_name(self.partition, first), [*self._head(first), *parts])
            self._folder.check_lock()  # it may be the next writer's that we have written over: then it was nothing
            self._segment = first
        with self._lock:
            self._index.add(first, batch.num_rows, self._segment, end - length, length)

    def _head(self, first: int) -> list[Any]:
        """What a segment begins with."""
        return frames.encode(first, 0, JOURNAL.serialize(), self._seed)

    def _room(self, first: int) -> Appender:
        """A segment to append to."""
        appender = self._appender
        if appender is not None and (self._close_segment or appender.size >= self._segment_bytes):
            self._let_go()
            appender = None
        self._close_segment = False
        if appender is None:
            appender = self._appender = self._folder.append_to(_name(self.partition, first))
            self._segment = first
        return appender

    def _let_go(self) -> None:
        appender, self._appender = self._appender, None
        if appender is not None:
            appender.close()

    def commit(self, offset: int) -> None:
        """Everything before ``offset`` is processed: delete what is not needed any more.

        Raises:
            JournalError: something cannot be deleted. The next commit tries again.
        """
        with self._lock:
            self._committed = max(self._committed, min(offset, self._index.end))
            if self._committed == self._index.end and self._index.bytes_from(self._index.begin) >= _WORTH_CLOSING:
                self._close_segment = True
            keep = self._index.segment_of(self._committed)
            if self._committed == self._index.end == self._segment:
                keep = self._segment  # a new one, and still empty: the disk may be full of those before
            if keep is None or keep == self._kept:
                return
            self._index.forget(keep)
        with _journal_errors(self._folder.path, "cannot delete what is committed"):
            self._folder.check_lock()
            for segment, _ in self._segments():
                if segment < keep:
                    self._folder.delete(_name(self.partition, segment))
        self._kept = keep

    def tail(self, rows: int) -> pa.Table:
        """The last ``rows`` rows, or as many as are there."""
        while True:
            end, begin = self.end, self.begin
            try:
                spans = self.spans(max(begin, end - rows), end)
                return pa.Table.from_batches(read(self._folder, spans), JOURNAL)
            except DataLossError:
                if self.begin == begin:
                    raise  # it was not a commit meanwhile

    def close(self) -> None:
        """Let go of the file; waits for what is being written. Idempotent."""
        with self._writing:
            self._is_closed = True
            self._let_go()


def _name(partition: int, segment: int) -> str:
    return f"{partition}/{segment:020d}{_SUFFIX}"


def _size(parts: Sequence[Any]) -> int:
    return sum(len(memoryview(part)) for part in parts)


@contextlib.contextmanager
def _journal_errors(path: str, what: str, kind: type[JournalError] = JournalError) -> Iterator[None]:
    """An :class:`OSError` becomes one of ``kind``, or a :class:`JournalFullError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            kind = JournalFullError
        raise kind(path, f"{what}: {error.strerror or error}") from error


def read(folder: Folder, spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
    """The rows of ``spans``, as they were written.

    Raises:
        JournalCorruptError: they are not there as they were written.
        JournalUnreadableError: there is no journal, or it cannot be reached.
        DataLossError: a segment is gone.
    """
    for span in spans:
        with _journal_errors(folder.path, f"cannot read {span.segment}", JournalUnreadableError):
            try:
                data = folder.read(span.segment, span.position, span.length)
            except FileNotFoundError:
                raise _gone(folder, span) from None
        at = span.start
        for frame in frames.scan(data, span.seed):
            first, rows = frame.header.first, frame.header.rows
            if not first <= at < first + rows or not frame.is_intact():
                break
            until = min(span.end, first + rows)
            yield pa.ipc.read_record_batch(frame.body, JOURNAL).slice(at - first, until - at)
            at = until
            if at == span.end:
                break
        if at < span.end:
            raise JournalCorruptError(folder.path, f"segment {span.segment}: row {at} is not as it was written")


def _gone(folder: Folder, span: Span) -> MessagingError:
    """Why there is no such segment."""
    if _META not in folder.list():
        return JournalUnreadableError(
            folder.path, "there is no journal on this machine: it has to be where the driver and all executors see it"
        )
    return DataLossError(
        f"option 'journalPath' ({folder.path}): segment {span.segment} is gone; was the journal committed, or "
        "removed, by somebody else?"
    )


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
        path: str, source: Source, *, adopt: bool = False, segment_bytes: int = SEGMENT_BYTES
    ) -> Journal[LogWriter]:
        """Open a journal to write, and make it if there is none.

        Args:
            path: see option ``journalPath``.
            source: what it is to be the journal of.
            adopt: whether it may be that of another source.
            segment_bytes: when a segment is closed.

        Raises:
            JournalLockedError: another query has it.
            JournalMismatchError: it is the journal of something else.
            JournalCorruptError, JournalUnreadableError: what is there cannot be used.
        """
        with contextlib.ExitStack() as stack, _journal_errors(path, "cannot open", JournalUnreadableError):
            folder = open_folder(path)
            folder.make()
            stack.enter_context(folder.lock())
            meta = _read_meta(folder)
            if meta is None:
                if any(folder.list(str(number)) for number in range(source.partitions)):
                    raise JournalUnreadableError(path, f"there are segments, but no {_META}")
                meta = Meta(source)
                _write_meta(folder, meta)
            elif meta.source != source:
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
        with _journal_errors(path, "cannot open", JournalUnreadableError):
            folder = open_folder(path)
            meta = _read_meta(folder)
            if meta is None:
                raise JournalUnreadableError(path, f"there is no journal: no file {_META}")
            logs = [Log(folder, number, seed=meta.seed(number)) for number in range(meta.source.partitions)]
            for log in logs:
                log.load()
            return Journal(folder, meta, logs, contextlib.ExitStack())

    def begin_query(self, *, adopt: bool) -> str:
        """A query begins without a checkpoint: the journal is its own from here on.

        Args:
            adopt: whether it may be one that another query has committed to.

        Raises:
            JournalMismatchError: another query has committed to it.
        """
        if self.meta.committed and not adopt:
            raise JournalMismatchError(
                self.folder.path,
                "it is the journal of another query, which has processed part of it: give this query one of its own, "
                "or the checkpoint of that query; adoptJournal=true goes on with what is left in it",
            )
        query = uuid.uuid4().hex
        self._change(query=query, committed=False, before=None, resumed={})
        return query

    def resume(self, offsets: Mapping[int, int]) -> None:
        """The query goes on from ``offsets``, though its checkpoint is beyond the end: with another id from now on."""
        resumed = {str(partition): offset for partition, offset in offsets.items()}
        self._change(query=uuid.uuid4().hex, before=self.meta.query, resumed=resumed)

    def note_commit(self) -> None:
        """The query has committed: from now on nobody else takes the journal unless it says so."""
        if not self.meta.committed:
            self._change(committed=True)

    def _change(self, **values: Any) -> None:
        meta = replace(self.meta, **values)
        with _journal_errors(self.folder.path, f"cannot write {_META}"):
            self.folder.check_lock()
            _write_meta(self.folder, meta)
        self.meta = meta

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._lock.close()


def _read_meta(folder: Folder) -> Meta | None:
    try:
        text = folder.read(_META).to_pybytes()
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
        raise JournalUnreadableError(folder.path, f"{_META} does not parse: {type(error).__name__}") from None


def _write_meta(folder: Folder, meta: Meta) -> None:
    folder.write(_META, [json.dumps(asdict(meta), indent=1).encode()])


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

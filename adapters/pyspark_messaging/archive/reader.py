"""``read_events``: the events of a time range of an archive, sorted, each once.

**Order.** Events are sorted by publication time; within a microsecond by recorder and sequence.

**Memory.** An archive at a path is read day by day, with pyarrow and without Spark. Rows beyond ``BUFFER_BYTES`` are
sorted in pieces in a temporary folder, which takes about as much room as a day of the archive uncompressed. A DataFrame
is sorted by Spark, and read partition by partition.

**Complete files.** Spark lists the complete files in ``_spark_metadata``. Other files are ignored, so the archive may
be read while it is written. Listed files may be missing: old days may be deleted, folder by folder.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import tempfile
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs, ipc

from messaging.dispatch.eventdata import filters_of, microseconds, time_of
from messaging.dispatch.topics import TopicFilter
from messaging.errors import ArgumentError, DecodeError, MessagingError
from pyspark_messaging.errors import first_line, redacted
from pyspark_messaging.recorder.recorded_event import RecordedEvent, load_data

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


logger = logging.getLogger(__name__)

#: bytes that are sorted in memory
BUFFER_BYTES: Final = 64 * 2**20
#: rows of a batch
_ROWS: Final = 8192

_TIME: Final = pa.timestamp("us", tz="UTC")
_SCHEMA: Final = pa.schema(
    [
        ("timestamp", _TIME),
        ("recorder", pa.string()),
        ("sequence", pa.int64()),
        ("topic", pa.string()),
        ("data", pa.string()),
    ]
)
_KEYS: Final = [("timestamp", "ascending"), ("recorder", "ascending"), ("sequence", "ascending")]
_LOG: Final = "_spark_metadata"
_DAY: Final = "date="

#: microseconds, recorder, sequence, topic, data
_Row: TypeAlias = tuple[int, str, int, str, str]
_Rows: TypeAlias = Generator[_Row, None, None]


# --- errors


class ArchiveError(MessagingError):
    """Base of the errors of an archive.

    Attributes:
        path: the path as it was given, or ``"a DataFrame"``.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"archive {path}: {message}")
        self.path = path


class ArchiveMissingError(ArchiveError):
    """The path does not exist, or is an empty folder."""


class ArchiveUnreadableError(ArchiveError):
    """The path holds no archive, or one that is damaged or cannot be reached."""


class InvalidRangeError(ArgumentError):
    """An end of the time range is no time with a zone, or the start is after the end."""


def _time_range(start: datetime, end: datetime) -> tuple[int, int]:
    for name, value in (("start", start), ("end", end)):
        if not isinstance(value, datetime):
            raise InvalidRangeError(f"{name} must be a datetime, not {type(value).__name__}")
        if value.utcoffset() is None:
            raise InvalidRangeError(f"{name} {value.isoformat()} has no time zone; say which one, such as UTC")
    if start > end:
        raise InvalidRangeError(f"start {start.isoformat()} is after end {end.isoformat()}")
    return microseconds(start), microseconds(end)


@dataclass(slots=True)
class ReadRows:
    """The number of rows of a range, as far as it was read."""

    #: events that were returned
    events: int = 0
    #: rows with an event that was returned before
    duplicates: int = 0
    #: rows whose data cannot be decoded
    unreadable: int = 0


def read_events(
    source: str | PathLike[str] | DataFrame,
    *,
    start: datetime,
    end: datetime,
    topics: str | Iterable[str] = "*",
    reading: ReadRows | None = None,
) -> Generator[RecordedEvent, None, None]:
    """Yield the events of an archive that were published from ``start`` on and before ``end``, in order, each once.

    Args:
        source: a path or URI of an archive, read by pyarrow; or a DataFrame with its columns.
        start, end: times with a zone; ``end`` is not included.
        topics: filter of the topics, or several.
        reading: counts the rows, if it is given.

    Raises:
        InvalidRangeError, InvalidTopicError, ArgumentError: an argument is wrong. Raised by the call.
        ArchiveMissingError, ArchiveUnreadableError: raised by the call, or by the iteration.
    """
    first, last = _time_range(start, end)
    filters = filters_of(topics)
    if isinstance(source, (str, PathLike)):
        rows = _Files(fspath(source)).rows(first, last)
    elif hasattr(source, "toLocalIterator"):
        rows = _spark_rows(source, first, last, filters)
    else:
        raise ArgumentError(f"an archive is a path or a DataFrame, not a {type(source).__name__}")
    return _events(rows, filters, ReadRows() if reading is None else reading)


def _events(rows: _Rows, filters: tuple[TopicFilter, ...], reading: ReadRows) -> Generator[RecordedEvent, None, None]:
    before = None
    with contextlib.closing(rows):
        for micros, recorder, sequence, topic, text in rows:
            if not any(each.matches(topic) for each in filters):
                continue
            if before == (recorder, sequence):
                reading.duplicates += 1
                continue
            before = recorder, sequence
            try:
                data = load_data(text)
            except DecodeError as error:
                reading.unreadable += 1
                logger.warning("event %d of %s is left out: %s", sequence, recorder, error)
                continue
            reading.events += 1
            yield RecordedEvent(topic, time_of(micros), recorder, sequence, data)


# --- Spark


def _spark_rows(frame: DataFrame, first: int, last: int, filters: tuple[TopicFilter, ...]) -> _Rows:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    missing = {field.name for field in _SCHEMA} - set(frame.columns)
    if missing:
        raise ArchiveUnreadableError("a DataFrame", f"it has no column {', '.join(sorted(missing))}")
    try:
        found = _selected(frame, first, last, filters)
    except PySparkException as error:
        raise ArchiveUnreadableError("a DataFrame", f"Spark: {first_line(error)}") from error

    def rows() -> _Rows:
        try:
            for row in found.toLocalIterator():
                yield tuple(row)
        except (PySparkException, Py4JJavaError) as error:  # the iterator passes errors of Java unchanged
            raise ArchiveUnreadableError("a DataFrame", f"Spark: {first_line(error)}") from error

    return rows()


def _selected(frame: DataFrame, first: int, last: int, filters: tuple[TopicFilter, ...]) -> DataFrame:
    from pyspark.sql import functions as sql

    begin, end = (sql.timestamp_micros(sql.lit(each)) for each in (first, last))
    found = frame.where((sql.col("timestamp") >= begin) & (sql.col("timestamp") < end) & sql.col("topic").isNotNull())
    if "date" in frame.columns:  # so that Spark skips the files of other days
        days = (sql.lit(str(time_of(each).date())).cast("date") for each in (first, last))
        found = found.where(sql.col("date").between(*days))
    if not any(each.has_wildcard for each in filters):
        found = found.where(sql.col("topic").isin([each.text for each in filters]))
    found = found.select(sql.unix_micros("timestamp").alias("micros"), "recorder", "sequence", "topic", "data")
    return found.orderBy("micros", "recorder", "sequence")


# --- files


class _Files:
    """The files of an archive at a path."""

    def __init__(self, path: str) -> None:
        self._path = redacted(path)
        self._has_secrets = self._path != path
        with self._archive_errors():
            if "://" in path:
                self._filesystem, self._root = fs.FileSystem.from_uri(path)
            else:
                self._filesystem, self._root = fs.LocalFileSystem(), str(Path(path).absolute())
            kind = self._filesystem.get_file_info(self._root).type
            if kind == fs.FileType.NotFound:
                raise ArchiveMissingError(self._path, "there is none")
            if kind != fs.FileType.Directory:
                raise ArchiveUnreadableError(self._path, "an archive is a folder")
            names = [info.base_name for info in self._list(self._root)]
            self._days = sorted(name for name in names if name.startswith(_DAY))
            if not self._days and _LOG not in names:
                if not names:
                    raise ArchiveMissingError(self._path, "the folder is empty")
                raise ArchiveUnreadableError(self._path, "the folder holds other files")
            self._complete = self._read_log() if _LOG in names else None

    @contextlib.contextmanager
    def _archive_errors(self) -> Iterator[None]:
        """Raise errors of files and of pyarrow as errors of this archive."""
        try:
            yield
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            if isinstance(error, MessagingError):
                raise
            text = redacted(f"{type(error).__name__}: {first_line(error)}")
            raise ArchiveUnreadableError(self._path, text) from (None if self._has_secrets else error)

    def _list(self, folder: str) -> list[fs.FileInfo]:
        found: list[fs.FileInfo] = self._filesystem.get_file_info(fs.FileSelector(folder))
        return found

    def _read_log(self) -> set[tuple[str, str]]:
        """Return folder and name of the complete files: of the latest summary, and of the batches since."""
        names = [info.base_name for info in self._list(f"{self._root}/{_LOG}")]
        summaries = [int(name[: -len(".compact")]) for name in names if name.endswith(".compact")]
        since = max(summaries, default=-1)
        batches = sorted(int(name) for name in names if name.isdecimal() and int(name) > since)
        found: set[tuple[str, str]] = set()
        for name in [*([f"{since}.compact"] if summaries else []), *map(str, batches)]:
            with self._filesystem.open_input_stream(f"{self._root}/{_LOG}/{name}", compression=None) as file:
                version, *lines = file.read().decode().splitlines()
            if version != "v1":
                raise ArchiveUnreadableError(self._path, f"{_LOG} is of version {version[:20]!r}")
            for line in lines:
                entry = json.loads(line)
                folder, file_name = entry["path"].split("/")[-2:]
                (found.discard if entry.get("action") == "delete" else found.add)((folder, file_name))
        return found

    def _files(self, day: str) -> list[str]:
        return [
            info.path
            for info in self._list(f"{self._root}/{day}")
            if info.base_name.endswith(".parquet")
            and not info.base_name.startswith(("_", "."))
            and (self._complete is None or (day, info.base_name) in self._complete)
        ]

    def rows(self, first: int, last: int) -> _Rows:
        """Yield the rows of recorded events of a range, sorted."""
        begin, end = (f"{_DAY}{time_of(each).date().isoformat()}" for each in (first, last))
        for day in self._days:
            if begin <= day <= end:
                yield from self._rows_of(day, first, last)

    def _rows_of(self, day: str, first: int, last: int) -> Iterator[_Row]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._archive_errors())
            files = self._files(day)
            if files:
                yield from _sorted(self._batches(files, first, last), stack)

    def _batches(self, files: list[str], first: int, last: int) -> Iterator[pa.RecordBatch]:
        # by default, Spark writes times in 96 bits
        options = ds.ParquetFileFormat(coerce_int96_timestamp_unit="us")
        dataset = ds.dataset(files, filesystem=self._filesystem, format=options)
        missing = {field.name for field in _SCHEMA} - set(dataset.schema.names)
        if missing:
            raise ArchiveUnreadableError(self._path, f"it has no column {', '.join(sorted(missing))}")
        timestamp = ds.field("timestamp").cast(_TIME)
        wanted = (
            (timestamp >= pa.scalar(first, _TIME)) & (timestamp < pa.scalar(last, _TIME)) & ds.field("topic").is_valid()
        )
        scanner = dataset.scanner(
            columns=_SCHEMA.names, filter=wanted, batch_size=_ROWS, batch_readahead=2, fragment_readahead=1
        )
        for batch in scanner.to_batches():
            yield batch.cast(_SCHEMA)


def _sorted(batches: Iterable[pa.RecordBatch], stack: contextlib.ExitStack) -> Iterator[_Row]:
    """Return the sorted rows of all batches; rows that do not fit in memory are sorted in files and merged."""
    waiting: list[pa.RecordBatch] = []
    pieces: list[Path] = []
    folder: Path | None = None
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= BUFFER_BYTES:
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="messaging-replay-")))
            pieces.append(_write(folder / f"{len(pieces)}.arrow", waiting))
            waiting, size = [], 0
    last = _rows(_table(waiting).to_batches(_ROWS))
    return heapq.merge(*map(_read, pieces), last) if pieces else last


def _table(batches: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches, _SCHEMA).sort_by(_KEYS)


def _write(path: Path, batches: list[pa.RecordBatch]) -> Path:
    with pa.OSFile(str(path), "wb") as file, ipc.new_file(file, _SCHEMA) as writer:
        writer.write_table(_table(batches), max_chunksize=_ROWS)
    return path


def _read(path: Path) -> Iterator[_Row]:
    with pa.memory_map(str(path)) as file, ipc.open_file(file) as reader:
        yield from _rows(reader.get_batch(number) for number in range(reader.num_record_batches))


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[_Row]:
    for batch in batches:
        times, *others = batch.columns
        yield from zip(times.cast(pa.int64()).to_pylist(), *(each.to_pylist() for each in others), strict=True)

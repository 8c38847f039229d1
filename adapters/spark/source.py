"""The data source: what Spark calls, for channels that cannot be replayed. Streams of RabbitMQ: ``streams.py``.

**Who runs what.** Spark keeps one Python process on the driver for each running query. All calls of a stream reader
but ``read`` come from its main thread; ingests and their messaging instances live there too. ``read`` runs in tasks,
in the Python workers of the executors, and sees the journal and nothing else: neither broker nor secrets.

**Offsets.** For each partition the offset after the last row, with the id of the journal and of the query it belongs
to, so that a checkpoint and a journal that do not belong together are noticed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from adapters.spark.columns import MESSAGE
from adapters.spark.errors import DataLossError, JournalMismatchError, MicroBatchSkippedError, redacted
from adapters.spark.feeds import feeds, sessions
from adapters.spark.folders import open_folder
from adapters.spark.group import check_sessions, join_group
from adapters.spark.ingest import Ingest, deadline_in
from adapters.spark.journal import Journal, Source, leave_mark
from adapters.spark.log import SEGMENT_BYTES, Log, Span, read
from adapters.spark.options import EARLIEST, LATEST, ReadOptions
from adapters.spark.owner import lock_group
from adapters.spark.typed import TypedColumns
from messaging.errors import InvalidOptionError, MessagingError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from adapters.spark.log import LogWriter

logger = logging.getLogger(__name__)

#: rows of the batches that are handed to Spark, and bytes: small ones cost it more than their rows do
_BATCH_ROWS: Final = 16_384
_BATCH_BYTES: Final = 16 * 2**20
#: a task reads about so much
_TASK_BYTES: Final = 64 * 2**20
#: objects that are made between two looks for garbage, in the process of a query
_GARBAGE: Final = 50_000
#: how long a full disk may keep the ingest waiting once the query has nothing left to do, seconds
PATIENCE: Final = 10.0


class Columns:
    """The columns of a read: those of the message, some of them, or typed ones parsed from the payload. Picklable."""

    def __init__(self, schema: StructType, model: str | None) -> None:
        self.typed: TypedColumns | None = None
        self.names: tuple[str, ...] = ()
        if model is not None:
            self.typed = TypedColumns.of_model(model)
            if [(f.name, f.dataType) for f in schema.fields] != [
                (f.name, f.dataType) for f in self.typed.schema.fields
            ]:
                raise InvalidOptionError("model", "option 'model': the model is the schema; leave out .schema(...)")
        elif _is_plain(schema):
            self.names = tuple(schema.fieldNames())
        else:
            self.typed = TypedColumns.of_schema(schema)
        self._arrow = to_arrow_schema(schema, timezone="UTC")

    def of(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The columns for rows of :data:`~adapters.spark.columns.MESSAGE`, and more on their right."""
        if self.typed is not None:
            return self.typed.convert(pa.RecordBatch.from_arrays(rows.columns[: len(MESSAGE)], schema=MESSAGE))
        return pa.RecordBatch.from_arrays([rows.column(name) for name in self.names], schema=self._arrow)

    def convert(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The columns for all of ``batches``, in batches of a size that Spark likes."""
        for batch in gathered(batches):
            yield self.of(batch)


def schema_of(options: ReadOptions) -> StructType:
    """The schema of a read that was given none."""
    if options.model is not None:
        return TypedColumns.of_model(options.model).schema
    return from_arrow_schema(MESSAGE)


def _is_plain(schema: StructType) -> bool:
    """Whether it names nothing but columns of the message, by their names and types."""
    known = {field.name: field.dataType for field in from_arrow_schema(MESSAGE).fields}
    return all(known.get(field.name) == field.dataType for field in schema.fields)


def gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that are neither tiny nor huge."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > _BATCH_ROWS or size + batch.nbytes > _BATCH_BYTES):
            yield pa.concat_batches(waiting) if len(waiting) > 1 else waiting[0]
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if waiting:
        yield pa.concat_batches(waiting) if len(waiting) > 1 else waiting[0]


class JournalPartition(InputPartition):
    """What one task reads: rows of one partition of the journal, and the mark to leave if any."""

    def __init__(self, path: str, spans: Sequence[Span], mark: str | None = None) -> None:
        self.path = path
        self.spans = list(spans)
        self.mark = mark


def read_journal(partition: JournalPartition, columns: Columns) -> Iterator[pa.RecordBatch]:
    """The rows of ``partition``, as Arrow batches."""
    folder = open_folder(partition.path)
    for batch in columns.convert(read(folder, partition.spans)):
        if partition.mark is not None:
            leave_mark(folder, partition.mark)
            partition.mark = None
        yield batch


def plan(
    path: str, ranges: Sequence[tuple[Log, int, int]], min_partitions: int | None, mark: str | None = None
) -> list[JournalPartition]:
    """Split offset ranges into tasks: one for each partition with rows; more if asked for, or if they are long."""
    total = sum(end - start for _, start, end in ranges)
    share = max(1, -(-total // min_partitions)) if min_partitions else total
    found = []
    for log, start, end in ranges:
        if start >= end:
            continue
        size = sum(span.length for span in log.spans(start, end))
        pieces = max(-(-(end - start) // max(share, 1)), -(-size // _TASK_BYTES))
        step = -(-(end - start) // pieces)
        found += [JournalPartition(path, log.spans(at, min(at + step, end)), mark) for at in range(start, end, step)]
    return found


@dataclass(frozen=True, slots=True)
class Offsets:
    """Where a query is, as it stands in the checkpoint."""

    journal: str
    query: str | None
    ends: Mapping[int, int]
    #: under which name the broker keeps messages for the query; ``None`` in checkpoints of earlier versions
    group: str | None = None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Offsets:
        """What :meth:`dump` made.

        Raises:
            JournalMismatchError: it is the checkpoint of another source.
        """
        try:
            ends = {int(partition): int(end) for partition, end in values["offsets"].items()}
            return cls(values["journal"], values["query"], ends, values.get("group"))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise MessagingError(
                "option 'checkpointLocation': the checkpoint is not one of a journaled source"
            ) from None

    def dump(self) -> dict[str, Any]:
        """For the checkpoint."""
        ends = {str(partition): end for partition, end in self.ends.items()}
        return {"journal": self.journal, "query": self.query, "group": self.group, "offsets": ends}


class JournalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads channels that cannot be replayed, through a journal."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = Columns(schema, options.model)
        self._journal: Journal[LogWriter] | None = None
        self._ingests: list[Ingest] = []
        self._initial: Offsets | None = None
        self._group_lock = contextlib.ExitStack()
        #: whether this run ends (AvailableNow), and where
        self._ends = False
        self._target: dict[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For executors: what :meth:`read` needs, and no secret."""
        return {"_columns": self._columns}

    # --- on the driver

    def _open(self, at: Offsets | None = None) -> Journal[LogWriter]:
        """Open the journal and start the ingests, once.

        Args:
            at: where the checkpoint is; ``None`` for a query without one.
        """
        if self._journal is not None:
            return self._journal
        options = self._options
        source = Source(
            url=options.required_broker.address,
            channels=sorted(options.channels),
            queue=",".join(options.queues) or None,
            qos=options.qos,
            partitions=options.receivers,
        )
        opened = Journal.open(
            options.required_journal, source, adopt=options.adopt_journal,
            check=lambda meta: check_sessions(options, options.required_journal, meta),
            segment_bytes=max(2**20, min(SEGMENT_BYTES, options.journal_bytes // 4 // options.receivers)),
        )  # fmt: skip
        try:
            # before anything is received: what it refuses has not touched the broker
            checkpoint = None if at is None else (at.journal, at.group)
            group = join_group(options, opened, checkpoint)
            if sessions(options, group):
                self._group_lock = lock_group(source.url, group)
            ingests = [
                Ingest(feed, log) for feed, log in zip(feeds(options, group, opened.folder), opened.logs, strict=True)
            ]
            for ingest in ingests:
                self._ingests.append(ingest)
                ingest.start()
        except BaseException:
            for ingest in self._ingests:
                ingest.stop()
            self._ingests = []
            self._group_lock.close()
            opened.close()
            raise
        self._journal = opened
        # this process is the query's own, and its thousands of messages form no cycles: looking for some takes a fifth
        gc.freeze()
        gc.set_threshold(_GARBAGE, *gc.get_threshold()[1:])
        return opened

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without checkpoint begins; called again it says the same."""
        opened = self._received(None)
        if self._initial is None:
            ends = resolve(self._options.starting, "startingOffsets", opened.logs)
            starts = ends if self._options.fail_on_skipped_batch else None
            opened.begin_query(adopt=self._options.adopt_journal, starts=starts)
            self._initial = _offsets(opened, ends)
        return self._initial.dump()

    def getDefaultReadLimit(self) -> ReadLimit:
        """What options ``maxRowsPerBatch`` and ``maxBytesPerBatch`` say; if both do, each holds."""
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """The run ends with what the broker holds for this query now; that is received with the first offsets."""
        self._ends = True

    def _received(self, at: Offsets | None) -> Journal[LogWriter]:
        """Open the journal; once, if the run ends, wait until what the broker holds for this query has come."""
        opened = self._open(at)
        if self._ends and self._target is None:
            until = deadline_in(self._options.patience)
            for ingest in self._ingests:
                ingest.wait_quiet(self._options.quiet, until)
            self._target = {log.partition: log.end for log in opened.logs}
        return opened

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """How far the next micro-batch goes: what is safely in the journal, within ``limit``.

        Raises:
            MessagingError: nothing is left to process, and the ingest has ended, or cannot go on.
        """
        offsets = Offsets.parse(start)
        opened = self._received(offsets)
        begins = self._known(self._begins(offsets, opened), opened)
        self._require_read(opened, begins)
        ends = {log.partition: self._end_of(log) for log in opened.logs}
        if all(ends[log.partition] <= begins[log.partition] for log in opened.logs):
            self._nothing_new(begins)
            if offsets.journal == opened.meta.id and offsets.query == opened.meta.query:
                return start
        limited = self._limited(opened.logs, begins, ends, limit)
        return _offsets(opened, limited).dump()

    def _end_of(self, log: Log) -> int:
        end = log.end
        return end if self._target is None else min(end, self._target.get(log.partition, end))

    def _nothing_new(self, begins: Mapping[int, int]) -> None:
        for ingest in self._ingests:
            # Spark commits with the next micro-batch. If that waits for room in the journal, this is the moment:
            # everything before the start of a micro-batch to come is processed.
            if ingest.is_full or ingest.failure is not None:
                self._commit(begins)
                break
        for ingest in self._ingests:
            ingest.raise_failure(PATIENCE)

    def _limited(
        self, logs: Sequence[Log], begins: Mapping[int, int], ends: dict[int, int], limit: ReadLimit
    ) -> dict[int, int]:
        """``ends`` within ``limit``, each partition with a share that fits what it has."""
        if isinstance(limit, ReadAllAvailable):
            return ends
        waiting = {log.partition: max(0, ends[log.partition] - begins[log.partition]) for log in logs}
        total = sum(waiting.values())
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_rows
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes
        found = dict(ends)
        for log in logs:
            partition = log.partition
            if not waiting[partition]:
                found[partition] = max(ends[partition], begins[partition])
                continue
            end = ends[partition]
            if rows is not None and total > rows:
                end = min(end, begins[partition] + max(1, rows * waiting[partition] // total))
            if size is not None:
                part = max(1, size * waiting[partition] // total)
                end = min(end, log.end_within(begins[partition], part))
            found[partition] = end
        return found

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """What the journal holds, for the progress of the query."""
        opened = self._journal
        if opened is None:
            return None
        return _offsets(opened, {log.partition: log.end for log in opened.logs}).dump()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch."""
        first, last = Offsets.parse(start), Offsets.parse(end)
        opened = self._open(first)
        begins, ends = self._begins(first, opened), self._begins(last, opened)
        ranges = []
        for log in opened.logs:
            begin, until = begins[log.partition], ends[log.partition]
            if not self._options.fail_on_data_loss:
                begin, until = max(begin, log.begin), min(until, log.end)
            ranges.append((log, begin, until))
        return plan(opened.folder.path, ranges, self._options.min_partitions, opened.mark)

    def _begins(self, offsets: Offsets, opened: Journal[LogWriter]) -> dict[int, int]:
        """Where each partition is, if the journal is that of the checkpoint."""
        if offsets.journal == opened.meta.id:
            if offsets.query == opened.meta.before is not None:
                return {log.partition: opened.meta.resumed.get(str(log.partition), log.begin) for log in opened.logs}
            if offsets.query != opened.meta.query:
                raise JournalMismatchError(
                    opened.folder.path,
                    "another query has made it its own since this one ran: give each query a journal of its own",
                )
            return {log.partition: offsets.ends.get(log.partition, log.begin) for log in opened.logs}
        return {log.partition: log.begin for log in opened.logs}  # failOnDataLoss=false: see join_group

    def _require_read(self, opened: Journal[LogWriter], ends: Mapping[int, int]) -> None:
        """Check that tasks have read the first rows of a new query before anything after them is planned or deleted.

        A file sink skips micro-batches whose numbers are in the log of its output path, and the numbers of a new
        checkpoint begin with 0. Spark then goes on as if the rows were written.

        Raises:
            MicroBatchSkippedError: no task has.
        """
        unread = opened.meta.unread
        passed = [
            f"{unread.get(str(partition), 0)} to {end} of partition {partition}"
            for partition, end in ends.items()
            if end > unread.get(str(partition), 0)
        ]
        if not unread or not passed:
            return
        if self._options.fail_on_skipped_batch and not opened.is_marked():
            raise MicroBatchSkippedError(
                opened.folder.path,
                f"the checkpoint is beyond offsets {', '.join(passed)}, and no task has read them: the sink skipped "
                "the micro-batch, as a file sink does if '_spark_metadata' in its output path has the number of the "
                "micro-batch from an earlier checkpoint. The journal keeps the rows; to process them, set a new output "
                "path, a new checkpointLocation and adoptJournal=true. If the query is meant to leave these rows "
                "unread, set failOnSkippedBatch=false",
            )
        opened.note_read()

    def _known(self, begins: dict[int, int], opened: Journal[LogWriter]) -> dict[int, int]:
        """``begins``, none of which is beyond the end of the journal."""
        for log in opened.logs:
            begin, end = begins[log.partition], log.end
            if begin > end:
                text = (
                    f"the checkpoint is at offset {begin} of partition {log.partition}, and the journal ends at {end}: "
                    "part of it is gone, or it is an older copy"
                )
                if self._options.fail_on_data_loss:
                    raise DataLossError(
                        f"option 'journalPath' ({opened.folder.path}): {text}; failOnDataLoss=false goes on at {end}"
                    )
                logger.warning("journal %s: %s", redacted(opened.folder.path), text)
                opened.resume({each.partition: min(begins[each.partition], each.end) for each in opened.logs})
                return {int(partition): offset for partition, offset in opened.meta.resumed.items()}
        return begins

    def commit(self, end: dict[str, Any]) -> None:
        """Everything before ``end`` is processed."""
        offsets = Offsets.parse(end)
        if offsets.journal == self._open(offsets).meta.id:
            self._commit(offsets.ends)

    def _commit(self, ends: Mapping[int, int]) -> None:
        self._require_read(self._open(), ends)
        for ingest in self._ingests:
            ingest.log.commit(ends.get(ingest.log.partition, 0))
            ingest.make_room()
        self._open().note_commit()  # after it, since this needs room on the disk

    def stop(self) -> None:
        """The query ends: stop receiving, let go of the journal."""
        for ingest in self._ingests:
            ingest.stop()
        self._ingests = []
        self._group_lock.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # --- on executors

    def read(self, partition: JournalPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """The rows of one task."""
        return read_journal(partition, self._columns)


class JournalBatchReader(DataSourceReader):
    """Reads what is in a journal now, whether a query is running on it or not. Touches neither broker nor offsets."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = Columns(schema, options.model)

    def __getstate__(self) -> dict[str, Any]:
        """For executors."""
        return {"_columns": self._columns}

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the read."""
        opened = Journal.view(self._options.required_journal)
        begins = resolve(self._options.starting, "startingOffsets", opened.logs)
        ends = resolve(self._options.ending, "endingOffsets", opened.logs)
        ranges = [
            (log, max(begins[log.partition], log.begin), min(ends[log.partition], log.end)) for log in opened.logs
        ]
        return plan(opened.folder.path, ranges, self._options.min_partitions) or [
            JournalPartition(opened.folder.path, [])
        ]

    def read(self, partition: JournalPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """The rows of one task."""
        return read_journal(partition, self._columns)


def _offsets(opened: Journal[LogWriter], ends: Mapping[int, int]) -> Offsets:
    """Return ``ends`` with the identity of the journal."""
    return Offsets(opened.meta.id, opened.meta.query, ends, opened.meta.group)


def resolve(wanted: Any, option: str, logs: Sequence[Log]) -> dict[int, int]:
    """The offsets that ``startingOffsets`` or ``endingOffsets`` mean, for each partition."""
    if isinstance(wanted, dict):
        known = {str(log.partition): log for log in logs}
        unknown = sorted(set(wanted) - set(known))
        if unknown:
            raise InvalidOptionError(
                option,
                f"option {option!r}: {', '.join(unknown)} is no partition of the journal; it has {', '.join(known)}",
            )
        for partition, offset in wanted.items():
            log = known[partition]
            if not log.begin <= offset <= log.end:
                raise InvalidOptionError(
                    option,
                    f"option {option!r}: partition {partition} has offsets {log.begin} to {log.end}, and not {offset}",
                )
        otherwise = resolve(EARLIEST if option == "startingOffsets" else LATEST, option, logs)
        return {**otherwise, **{int(partition): offset for partition, offset in wanted.items()}}
    return {log.partition: log.end if wanted == LATEST else log.begin for log in logs}

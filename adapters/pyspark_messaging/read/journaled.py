"""The readers of channels that cannot be replayed: MQTT channels and AMQP queues, through a journal.

**Processes.** Spark keeps one Python process on the driver for each running query. It calls every method of a stream
reader but ``read`` on the main thread of that process, where the receivers and their connections live, too. ``read``
runs in tasks, in the Python workers of the executors. It needs the journal alone: neither the broker nor secrets.

**Offsets.** The offset after the last row of each partition, with the ids of the journal and of the query that they
belong to, so that a checkpoint and a journal that do not belong together are detected.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from messaging.environment.signals import on_failure
from messaging.errors import MessagingError
from pyspark_messaging.errors import (
    DataLossError,
    JournalMismatchError,
    MicroBatchSkippedError,
    invalid_option,
    redacted,
)
from pyspark_messaging.journal import JournalSource, RowJournal, leave_mark
from pyspark_messaging.journal.folders import open_folder
from pyspark_messaging.journal.log import RowLog, Span, read
from pyspark_messaging.option_values import EARLIEST, LATEST
from pyspark_messaging.options import ReadOptions
from pyspark_messaging.read.group import broker_sessions, check_sessions, join_group
from pyspark_messaging.read.group_lock import lock_group
from pyspark_messaging.read.receiver import Receiver, segment_share, write_bytes
from pyspark_messaging.read.rows import Columns, TaskReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


logger = logging.getLogger(__name__)

#: bytes that one task reads, about
_TASK_BYTES: Final = 64 * 2**20
#: objects that are allocated between two garbage collections in the process of a query
_GARBAGE: Final = 50_000
#: how long a full disk may block a receiver of a query that has no rows left to process, in seconds
PATIENCE: Final = 10.0


# --- in tasks


@dataclass
class JournalPartition(InputPartition):
    """The rows of one task: spans of one partition of the journal, and the mark to leave, if any."""

    path: str
    spans: Sequence[Span]
    mark: str | None = None


def _read_task(columns: Columns, partition: JournalPartition) -> Iterator[pa.RecordBatch]:
    folder = open_folder(partition.path)
    for batch in columns.convert(read(folder, partition.spans)):
        if partition.mark is not None:
            leave_mark(folder, partition.mark)
            partition.mark = None
        yield batch


def _plan(
    path: str, ranges: Sequence[tuple[RowLog, int, int]], min_partitions: int | None, mark: str | None = None
) -> list[JournalPartition]:
    """Split offset ranges into tasks: one for each partition with rows, more if they are long or asked for."""
    total = sum(end - start for _, start, end in ranges)
    share = max(1, -(-total // min_partitions)) if min_partitions else total
    tasks = []
    for log, start, end in ranges:
        if start >= end:
            continue
        size = sum(span.length for span in log.spans(start, end))
        pieces = max(-(-(end - start) // max(share, 1)), -(-size // _TASK_BYTES))
        step = -(-(end - start) // pieces)
        tasks += [JournalPartition(path, log.spans(at, min(at + step, end)), mark) for at in range(start, end, step)]
    return tasks


# --- offsets


@dataclass(frozen=True, slots=True)
class Offsets:
    """The position of a query, as the checkpoint stores it."""

    journal: str
    query: str | None
    ends: Mapping[int, int]
    #: the name under which the broker keeps messages for the query; ``None`` in checkpoints of earlier versions
    group: str | None = None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Offsets:
        """Return the offsets that :meth:`dump` has written; raise for the checkpoint of another kind of source."""
        try:
            ends = {int(partition): int(end) for partition, end in values["offsets"].items()}
            return cls(values["journal"], values["query"], ends, values.get("group"))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise MessagingError(
                "option 'checkpointLocation': the checkpoint is not one of a journaled source"
            ) from None

    def dump(self) -> dict[str, Any]:
        """Return the offsets for the checkpoint."""
        ends = {str(partition): end for partition, end in self.ends.items()}
        return {"journal": self.journal, "query": self.query, "group": self.group, "offsets": ends}


def _offsets(opened: RowJournal, ends: Mapping[int, int]) -> Offsets:
    return Offsets(opened.meta.id, opened.meta.query, ends, opened.meta.group)


def _resolve(wanted: str | Mapping[str, int], option: str, logs: Sequence[RowLog]) -> dict[int, int]:
    """Return the offset of each partition that ``startingOffsets`` or ``endingOffsets`` stands for."""
    if isinstance(wanted, str):
        return {log.partition: log.end if wanted == LATEST else log.begin for log in logs}
    known = {str(log.partition): log for log in logs}
    if unknown := sorted(set(wanted) - set(known)):
        raise invalid_option(option, f"{', '.join(unknown)} is no partition of the journal; it has {', '.join(known)}")
    for partition, offset in wanted.items():
        log = known[partition]
        if not log.begin <= offset <= log.end:
            raise invalid_option(
                option, f"partition {partition} has offsets {log.begin} to {log.end}, and not {offset}"
            )
    otherwise = _resolve(EARLIEST if option == "startingOffsets" else LATEST, option, logs)
    return {**otherwise, **{int(partition): offset for partition, offset in wanted.items()}}


# --- readers


class JournalBatchReader(TaskReader, DataSourceReader):
    """Reads the rows that a journal holds now, also while a query uses it. Connects to no broker, commits nothing."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(partial(_read_task, Columns(schema, options.model)))
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks of the read."""
        opened = RowJournal.view(self._options.required_journal)
        begins = _resolve(self._options.starting, "startingOffsets", opened.logs)
        ends = _resolve(self._options.ending, "endingOffsets", opened.logs)
        ranges = [
            (log, max(begins[log.partition], log.begin), min(ends[log.partition], log.end)) for log in opened.logs
        ]
        path = opened.folder.path
        return _plan(path, ranges, self._options.min_partitions) or [JournalPartition(path, [])]


class JournalStreamReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads channels in micro-batches: receivers write to the journal, tasks read from it."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(partial(_read_task, Columns(schema, options.model)))
        self._options = options
        self._journal: RowJournal | None = None
        self._receivers: list[Receiver] = []
        self._initial: Offsets | None = None
        self._group_lock = contextlib.ExitStack()
        #: AvailableNow: the offsets at which this run ends, once they are known
        self._is_available_now = False
        self._final_offsets: dict[int, int] | None = None

    # --- opening and closing

    def _open(self, *positions: Offsets) -> RowJournal:
        """Open the journal and start the receivers, once.

        Args:
            positions: those of the checkpoint that are known; none for a query without one.
        """
        if self._journal is not None:
            return self._journal
        options = self._options
        source = JournalSource(
            url=options.required_broker.address,
            channels=sorted(options.channels),
            queue=",".join(options.queues) or None,
            qos=options.qos,
            partitions=options.receivers,
        )
        opened = RowJournal.open(
            options.required_journal, source, adopt=options.adopt_journal,
            check=lambda meta: check_sessions(options, options.required_journal, meta),
            segment_bytes=segment_share(options) - write_bytes(options),
        )  # fmt: skip
        with on_failure(opened.close), on_failure(self._stop_receivers):
            # Refusals come before the first receiver connects, so that they have no effect at the broker, and before a
            # new row gets an offset that the checkpoint has seen.
            if not positions:
                opened.refuse_other_query(adopt=options.adopt_journal)
            seen = self._seen(positions, opened)
            lost = self._lost(positions, seen, opened)
            group = join_group(options, opened, (positions[0].journal, positions[0].group) if positions else None)
            if broker_sessions(options, group):
                self._group_lock = lock_group(source.url, group)
            if lost or (positions and opened.meta.query is None):
                opened.continue_query(seen)
            self._receivers = [Receiver(options, group, log) for log in opened.logs]
            if positions:  # what is processed makes room before the first message arrives
                begins = self._begins(positions[0], opened)
                self._require_read(opened, begins)
                for receiver in self._receivers:
                    receiver.commit(begins[receiver.partition])
            for receiver in self._receivers:
                receiver.start()
        self._journal = opened
        # This process belongs to the query. Its thousands of messages form no cycles, and collecting takes a fifth.
        gc.freeze()
        gc.set_threshold(_GARBAGE, *gc.get_threshold()[1:])
        return opened

    def _stop_receivers(self) -> None:
        for receiver in self._receivers:
            receiver.stop()
        self._receivers = []
        self._group_lock.close()

    def stop(self) -> None:
        """Stop receiving and release the journal."""
        self._stop_receivers()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # --- planning of micro-batches

    def initialOffset(self) -> dict[str, Any]:
        """Return the first offsets of a query without checkpoint. Further calls return the same."""
        opened = self._received()
        if self._initial is None:
            ends = _resolve(self._options.starting, "startingOffsets", opened.logs)
            starts = ends if self._options.fail_on_skipped_batch else None
            opened.begin_query(adopt=self._options.adopt_journal, starts=starts)
            self._initial = _offsets(opened, ends)
        return self._initial.dump()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of ``maxRowsPerBatch`` and ``maxBytesPerBatch``. If both are set, both hold."""
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """End the run with the messages that the broker holds for this query now. The first offsets wait for them."""
        self._is_available_now = True

    def _received(self, *positions: Offsets) -> RowJournal:
        """Open the journal as :meth:`_open`. For AvailableNow, wait once until the broker has sent its messages."""
        opened = self._open(*positions)
        if self._is_available_now and self._final_offsets is None:
            deadline = time.monotonic() + self._options.patience
            for receiver in self._receivers:
                receiver.wait_quiet(self._options.quiet, deadline)
            self._final_offsets = {log.partition: log.end for log in opened.logs}
        return opened

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch: the rows that are safely in the journal, within ``limit``.

        Raises:
            MessagingError: no row is left to process, and a receiver has ended or cannot continue.
        """
        offsets = Offsets.parse(start)
        opened = self._received(offsets)
        begins = self._begins(offsets, opened)
        self._require_read(opened, begins)
        final = self._final_offsets or {}
        ends = {log.partition: min(end := log.end, final.get(log.partition, end)) for log in opened.logs}
        if all(ends[log.partition] <= begins[log.partition] for log in opened.logs):
            self._commit_and_raise_failure(begins)
            if offsets.journal == opened.meta.id and offsets.query == opened.meta.query:
                return start
        return _offsets(opened, self._limited(opened.logs, begins, ends, limit)).dump()

    def _commit_and_raise_failure(self, begins: Mapping[int, int]) -> None:
        # Spark commits with the next micro-batch. If that waits for room in the journal, commit now:
        # every row before the start of the next micro-batch is processed.
        if any(receiver.is_full or receiver.failure is not None for receiver in self._receivers):
            self._commit(begins)
        for receiver in self._receivers:
            receiver.raise_failure(PATIENCE)

    def _limited(
        self, logs: Sequence[RowLog], begins: Mapping[int, int], ends: dict[int, int], limit: ReadLimit
    ) -> dict[int, int]:
        """Return ``ends`` within ``limit``; the share of each partition is proportional to its pending rows."""
        if isinstance(limit, ReadAllAvailable):
            return ends
        pending = {log.partition: max(0, ends[log.partition] - begins[log.partition]) for log in logs}
        total = sum(pending.values())
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_rows
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes
        limited = {}
        for log in logs:
            begin, end = begins[log.partition], ends[log.partition]
            if share := pending[log.partition]:
                if rows is not None and total > rows:
                    end = min(end, begin + max(1, rows * share // total))
                if size is not None:
                    end = min(end, log.end_within(begin, max(1, size * share // total)))
            limited[log.partition] = max(begin, end)
        return limited

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end of the journal, for the progress of the query."""
        opened = self._journal
        if opened is None:
            return None
        return _offsets(opened, {log.partition: log.end for log in opened.logs}).dump()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch."""
        first, last = Offsets.parse(start), Offsets.parse(end)
        opened = self._open(first, last)
        begins, ends = self._begins(first, opened), self._begins(last, opened)
        ranges = []
        for log in opened.logs:
            begin, until = begins[log.partition], ends[log.partition]
            if not self._options.fail_on_data_loss:
                begin, until = max(begin, log.begin), min(until, log.end)
            ranges.append((log, begin, until))
        return _plan(opened.folder.path, ranges, self._options.min_partitions, opened.mark)

    # --- the checkpoint and the journal

    def _begins(self, offsets: Offsets, opened: RowJournal) -> dict[int, int]:
        """Return the offset of each partition in ``offsets``, after a check that they belong to the journal."""
        meta, ends = opened.meta, offsets.ends
        if offsets.journal != meta.id:
            ends = {}  # failOnDataLoss=false: see join_group
        elif meta.resumed and offsets.query == meta.before:
            ends = {int(partition): offset for partition, offset in meta.resumed.items()}
        elif offsets.query != meta.query:
            raise opened.folder.error(
                JournalMismatchError,
                "another query has made it its own since this one ran: give each query a journal of its own",
            )
        return {log.partition: ends.get(log.partition, log.begin) for log in opened.logs}

    def _seen(self, positions: Sequence[Offsets], opened: RowJournal) -> dict[int, int]:
        """Return, by partition, the offset before which offsets were used: by the checkpoint, or by the journal."""
        seen = {log.partition: opened.used(log.partition) for log in opened.logs}
        for position in positions:
            for partition, offset in self._begins(position, opened).items():
                seen[partition] = max(seen[partition], offset)
        return seen

    def _lost(self, positions: Sequence[Offsets], seen: Mapping[int, int], opened: RowJournal) -> Sequence[str]:
        """Return which rows are missing in the journal: at its end, or before its first one.

        Raises:
            DataLossError: some are, and ``failOnDataLoss`` is true.
        """
        lost = [
            f"offsets up to {seen[log.partition]} of partition {log.partition} were used, and the journal ends at "
            f"{log.end}: part of it is gone, or it is an older copy"
            for log in opened.logs
            if seen[log.partition] > log.end
        ]
        begins = self._begins(positions[0], opened) if positions else {}
        lost += [
            f"the checkpoint is at offset {begins[log.partition]} of partition {log.partition}, and the journal begins "
            f"at {log.begin}: the checkpoint is an older copy, or part of the journal is gone"
            for log in opened.logs
            if begins and begins[log.partition] < log.begin
        ]
        path = opened.folder.path
        if lost and self._options.fail_on_data_loss:
            text = "; ".join(lost)
            raise DataLossError(f"option 'journalPath' ({path}): {text}; failOnDataLoss=false goes on with the rest")
        for text in lost:
            logger.warning("journal %s: %s", redacted(path), text)
        return lost

    def _require_read(self, opened: RowJournal, ends: Mapping[int, int]) -> None:
        """Check that tasks have read the first rows of a new query before anything after them is planned or deleted.

        A file sink skips micro-batches whose numbers are in the log of its output path, and the numbers of a new
        checkpoint begin with 0. Spark then continues as if the rows were written.

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
            raise opened.folder.error(
                MicroBatchSkippedError,
                f"the checkpoint is beyond offsets {', '.join(passed)}, and no task has read them: the sink skipped "
                "the micro-batch, as a file sink does if '_spark_metadata' in its output path has the number of the "
                "micro-batch from an earlier checkpoint. The journal keeps the rows; to process them, set a new output "
                "path, a new checkpointLocation and adoptJournal=true. If the query is meant to leave these rows "
                "unread, or the journal is a copy from before its first micro-batch, set failOnSkippedBatch=false",
            )
        opened.note_read()

    def commit(self, end: dict[str, Any]) -> None:
        """Delete the rows before ``end``: they are processed."""
        offsets = Offsets.parse(end)
        if offsets.journal == self._open(offsets).meta.id:
            self._commit(offsets.ends)

    def _commit(self, ends: Mapping[int, int]) -> None:
        opened = self._open()
        self._require_read(opened, ends)
        for receiver in self._receivers:
            receiver.commit(ends.get(receiver.partition, 0))
        opened.note_commit(ends)  # last: what was deleted makes room for it

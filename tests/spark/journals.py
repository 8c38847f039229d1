"""Journals for tests: rows whose contents follow from their offset, and a process that writes them."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING

from messaging import Message, MessageContext
from pyspark_messaging.columns import batch_of
from pyspark_messaging.journal import JournalSource, RowJournal
from pyspark_messaging.journal.journal import RowJournalView
from pyspark_messaging.journal.log import RowLog, RowLogWriter, read

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import pyarrow as pa

SOURCE = JournalSource(url="mqtt://host:1883", channels=["a/#"], queue=None, qos="1", partitions=1)
NOW = 1_700_000_000_000_000


@lru_cache(maxsize=100_000)
def value(offset: int) -> bytes:
    """The payload at ``offset``."""
    return random.Random(offset).randbytes(offset % 50)


def rows(first: int, count: int) -> pa.RecordBatch:
    return batch_of([Message(value(n), MessageContext("a/b")) for n in range(first, first + count)], 0, first, NOW)


def add(log: RowLogWriter, count: int = 3) -> None:
    log.append(rows(log.end, count))


def check(opened: RowJournal | RowJournalView, start: int | None = None, end: int | None = None) -> None:
    """Raise unless the rows from ``start`` to ``end``, by default all, are there as they were written."""
    for log in opened.logs:
        first, last = log.begin if start is None else start, log.end if end is None else end
        offset = first
        for batch in read(opened.folder, log.spans(first, last)):
            assert batch.column("offset").to_pylist() == list(range(offset, offset + batch.num_rows))
            assert batch.column("value").to_pylist() == [value(n) for n in range(offset, offset + batch.num_rows)]
            offset += batch.num_rows
        assert offset == max(first, last)


def segments(log: RowLog) -> list[str]:
    return [f"{segment:020d}.segment" for segment, _ in log.list_segments()]


def write_on(path: str, seed: int, reports: Connection) -> None:
    """Append forever; report the committed offset and the end after each call."""
    random.seed(seed)
    opened = RowJournal.open(path, SOURCE, segment_bytes=20_000)
    (log,) = opened.logs
    reports.send((log.begin, log.end))
    committed = log.begin
    while True:
        add(log, random.choice((1, 3, 200)))
        reports.send((committed, log.end))
        if random.random() < 0.1:
            committed = random.randint(committed, log.end)
            reports.send((committed, log.end))
            log.commit(committed)

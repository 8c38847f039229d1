"""Journals for tests: rows whose contents follow from their offset, and processes that write them."""

from __future__ import annotations

import errno
import random
import resource
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from adapters.spark.columns import batch_of
from adapters.spark.errors import JournalFullError
from adapters.spark.journal import Journal, Source
from adapters.spark.journal.log import Log, LogWriter, read
from messaging import Message, MessageContext

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import pyarrow as pa

SOURCE = Source(url="mqtt://host:1883", channels=["a/#"], queue=None, qos="1", partitions=1)
NOW = 1_700_000_000_000_000


@lru_cache(maxsize=100_000)
def value(offset: int) -> bytes:
    """The payload at ``offset``."""
    return random.Random(offset).randbytes(offset % 50)


def rows(first: int, count: int) -> pa.RecordBatch:
    return batch_of([Message(value(n), MessageContext("a/b")) for n in range(first, first + count)], 0, first, NOW)


def add(log: LogWriter, count: int = 3) -> None:
    log.append(rows(log.end, count))


def check(opened: Journal[Any], start: int | None = None, end: int | None = None) -> None:
    """Raise unless the rows from ``start`` to ``end``, by default all, are there as they were written."""
    for log in opened.logs:
        first, last = log.begin if start is None else start, log.end if end is None else end
        offset = first
        for batch in read(opened.folder, log.spans(first, last)):
            assert batch.column("offset").to_pylist() == list(range(offset, offset + batch.num_rows))
            assert batch.column("value").to_pylist() == [value(n) for n in range(offset, offset + batch.num_rows)]
            offset += batch.num_rows
        assert offset == max(first, last)


def segments(log: Log) -> list[str]:
    return [f"{segment:020d}.segment" for segment, _ in log._segments()]


def fill(log: LogWriter, count: int) -> int | None:
    """Append until there is no room; returns why."""
    try:
        while True:
            add(log, count)
    except JournalFullError as error:
        return error.__cause__.errno if isinstance(error.__cause__, OSError) else None


# --- processes


def write_on(path: str, seed: int, reports: Connection) -> None:
    """Append forever; report the committed offset and the end after each call."""
    random.seed(seed)
    opened = Journal.open(path, SOURCE, segment_bytes=20_000)
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


def hold(path: str, reports: Connection) -> None:
    """Keep a journal open until the parent ends this process."""
    opened = Journal.open(path, SOURCE)
    reports.send(opened.meta.id)
    reports.recv()


def fill_limited(path: str, reports: Connection) -> None:
    """Append up to the limit of the size of files, then beyond it."""
    opened = Journal.open(path, SOURCE)
    (log,) = opened.logs
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    assert fill(log, 100) == errno.EFBIG
    full = log.end
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check(opened)
    add(log, 100)
    check(opened)
    reports.send((full, log.end))


def fill_disk(path: str) -> None:
    """Append until the disk is full, commit, go on."""
    opened = Journal.open(path, SOURCE, segment_bytes=100_000)
    (log,) = opened.logs
    assert fill(log, 300) == errno.ENOSPC
    full = log.end
    for _ in range(3):  # it stays full, and nothing is half there
        assert fill(log, 300) == errno.ENOSPC
    assert log.end == full > 0
    check(opened)
    check(Journal.view(path))
    opened.note_commit()
    log.commit(full)
    add(log, 300)
    opened.close()
    again = Journal.open(path, SOURCE)
    assert again.logs[0].end == full + 300
    check(again)
    again.close()
    print("went on", full)  # noqa: T201


if __name__ == "__main__":
    import sys

    fill_disk(sys.argv[1])

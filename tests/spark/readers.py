"""The stream reader of the data source, driven as Spark drives it, in this process and without Java."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any, Self

import pytest

from messaging.testing.waiting import eventually
from pyspark_messaging.formats import MessagingDataSource
from tests.spark.harness import publish

if TYPE_CHECKING:
    from pathlib import Path


class Driven:
    """A query: one reader, a checkpoint that outlives it, and a sink that is a list.

    Args:
        url: of the broker.
        journal: path; ``None`` for streams.
        checkpoint: the offsets of an earlier query, to go on from; by default a new checkpoint.
        skip: the number of micro-batches that the sink skips, since it knows their numbers.
    """

    def __init__(
        self, url: str, journal: Path | None, checkpoint: list[str] | None = None, *, skip: int = 0, **options: str
    ) -> None:
        source = MessagingDataSource(
            {"url": url, **({} if journal is None else {"journalPath": str(journal)}), **options}
        )
        self.reader: Any = source.streamReader(source.schema())
        self.checkpoint = [] if checkpoint is None else checkpoint
        #: the rows of each micro-batch
        self.batches: list[list[dict[str, Any]]] = []
        self.skip = skip

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch]

    @property
    def values(self) -> list[bytes]:
        return [row["value"] for row in self.rows]

    def start(self) -> Self:
        """Connect: ask for the first offsets, as a query does when it starts."""
        if not self.checkpoint:
            self.checkpoint.append(json.dumps(self.reader.initialOffset()))
        else:
            self.latest()
        return self

    def latest(self) -> str:
        """The end of the next micro-batch."""
        start = json.loads(self.checkpoint[-1])
        return json.dumps(self.reader.latestOffset(start, self.reader.getDefaultReadLimit()))

    def micro_batch(self) -> bool:
        """Process one micro-batch, and commit the one before; ``False`` if there is nothing new."""
        end = self.latest()
        start = self.checkpoint[-1]
        if end == start:
            return False
        if len(self.checkpoint) > 1:
            self.reader.commit(json.loads(start))
        partitions = self.reader.partitions(json.loads(start), json.loads(end))
        if len(self.checkpoint) > self.skip:
            on_executor = pickle.loads(pickle.dumps(self.reader))
            tasks = pickle.loads(pickle.dumps(partitions))
            self.batches.append(
                [row for task in tasks for batch in on_executor.read(task) for row in batch.to_pylist()]
            )
        self.checkpoint.append(end)
        return True

    def receive(self, count: int) -> list[bytes]:
        """Process micro-batches until there are ``count`` rows; return their payloads."""
        self.receive_rows(count)
        return self.values

    def receive_rows(self, count: int) -> list[dict[str, Any]]:
        """Process micro-batches until there are ``count`` rows."""

        def enough() -> bool:
            self.micro_batch()
            return sum(map(len, self.batches)) >= count

        eventually(enough, f"{count} rows")
        return self.rows

    def finish(self) -> list[bytes]:
        """Run with the trigger ``availableNow``; return the payloads."""
        with self:
            self.reader.prepareForTriggerAvailableNow()
            self.start()
            while self.micro_batch():
                pass
        return self.values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.reader.stop()


def batch_read(**options: str) -> list[dict[str, Any]]:
    """The rows of a batch read."""
    source = MessagingDataSource(options)
    reader: Any = source.reader(source.schema())
    tasks = pickle.loads(pickle.dumps(reader.partitions()))
    on_executor = pickle.loads(pickle.dumps(reader))
    return [row for task in tasks for batch in on_executor.read(task) for row in batch.to_pylist()]


def processed(payloads: list[bytes], url: str, journal: Path, **options: str) -> Driven:
    """Publish to the channel of a new query; return the query after it has processed the messages and stopped."""
    with Driven(url, journal, **options).start() as query:
        publish(url, options["channel"], payloads)
        assert query.receive(len(payloads)) == payloads
    return query


def refused(
    kind: type[Exception], match: str, url: str, journal: Path | None, *checkpoint: list[str], **how: str
) -> None:
    """A query, continued or not, fails when it starts."""
    with Driven(url, journal, *map(list, checkpoint), **how) as query, pytest.raises(kind, match=match):
        query.start()

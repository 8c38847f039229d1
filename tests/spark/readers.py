"""The stream reader of a journaled source, driven as Spark drives it, in this process and without Java."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any, Self

from pyspark.sql.streaming.datasource import ReadAllAvailable

from adapters.spark.options import ReadOptions
from adapters.spark.read.journaled import JournalStreamReader
from adapters.spark.read.rows import schema_of
from tests.spark.harness import publish, wait_for

if TYPE_CHECKING:
    from pathlib import Path


class Driven:
    """A query: one reader, a checkpoint that outlives it, and a sink that is a list.

    Args:
        url: of the broker.
        journal: path.
        checkpoint: the offsets of an earlier query, to go on from; by default a new checkpoint.
    """

    def __init__(
        self, url: str, journal: Path, checkpoint: list[str] | None = None, *, skip: int = 0, **options: str
    ) -> None:
        read = ReadOptions.of({"url": url, "journalPath": str(journal), **options})
        self.reader = JournalStreamReader(read, schema_of(read))
        self.checkpoint = [] if checkpoint is None else checkpoint
        self.values: list[bytes] = []
        #: micro-batches that the sink skips, since it knows their numbers
        self.skip = skip

    def start(self) -> Self:
        """Connect: ask for the first offsets, as a query does when it starts."""
        if not self.checkpoint:
            self.checkpoint.append(json.dumps(self.reader.initialOffset()))
        else:
            self.latest()
        return self

    def latest(self) -> str:
        """The end of the next micro-batch."""
        return json.dumps(self.reader.latestOffset(json.loads(self.checkpoint[-1]), ReadAllAvailable()))

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
            for partition in pickle.loads(pickle.dumps(partitions)):
                for batch in on_executor.read(partition):
                    self.values += batch.column("value").to_pylist()
        self.checkpoint.append(end)
        return True

    def receive(self, count: int) -> list[bytes]:
        """Process micro-batches until there are ``count`` rows."""

        def enough() -> bool:
            self.micro_batch()
            return len(self.values) >= count

        wait_for(enough, f"{count} rows", patience=30)
        return self.values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.reader.stop()


def processed(payloads: list[bytes], url: str, journal: Path, **options: str) -> Driven:
    """Publish to the channel of a new query; return the query after it has processed the messages and stopped."""
    with Driven(url, journal, **options).start() as query:
        publish(url, options["channel"], payloads)
        assert query.receive(len(payloads)) == payloads
    return query

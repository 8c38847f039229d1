"""Running queries, and waiting for what they find."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

import messaging
from messaging.testing.waiting import PATIENCE, Recorder, eventually, results
from pyspark_messaging import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from messaging import Messaging

#: for the Java of a test run: it is over before a better compiler, or a parallel collector, has paid for itself, and
#: verifying Spark's classes takes a tenth of its start
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
#: how long a query may take for anything, seconds: it starts processes
QUERY_PATIENCE: Final = 6 * PATIENCE


def session(folder: Path, master: str, **more: str) -> SparkSession:
    """A local session that knows the data source, with its files in ``folder``."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        **more,
    }
    made = SparkSession.builder.master(master).config(map=settings).getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    register(made)
    return made


class Collected:
    """A streaming query that gathers its rows here, batch by batch."""

    def __init__(self, frame: DataFrame, checkpoint: Path, **trigger: Any) -> None:
        self.batches: Recorder[list[Row]] = Recorder()
        writer = frame.writeStream.foreachBatch(self._take).option("checkpointLocation", str(checkpoint))
        self.query: StreamingQuery = (writer.trigger(**trigger) if trigger else writer).start()

    def _take(self, frame: DataFrame, _: int) -> None:
        self.batches.append(frame.collect())

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]

    def ready(self) -> Self:
        """Wait until it receives: the subscription is made when the first offset is known."""
        self.wait(lambda: self.query.lastProgress is not None, "the first trigger")
        return self

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until ``condition`` holds; raise what ended the query before."""
        eventually(lambda: condition() or not self.query.isActive, what, patience=QUERY_PATIENCE)
        self.check()

    def receive(self, count: int) -> list[Row]:
        """Wait for ``count`` rows, all in all, and until the checkpoint knows of them."""
        self.wait(lambda: len(self.rows) >= count, f"{count} rows")
        self.query.processAllAvailable()
        return self.rows

    def check(self) -> None:
        """Raise what ended the query."""
        error = self.query.exception()
        if error is not None:
            raise error

    def finish(self) -> list[Row]:
        """Wait for the end of a query that ends by itself."""
        assert self.query.awaitTermination(int(QUERY_PATIENCE))
        return self.rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.query.stop()


def publish(url: str, channel: str, payloads: Iterable[bytes | str], **context: Any) -> None:
    """Publish all of ``payloads``, and wait until the broker has them."""
    with messaging.connect(url) as m:
        results([m.publish(channel, payload, **{"qos": 1, **context}) for payload in payloads])


def numbers(count: int, start: int = 0) -> list[bytes]:
    """Payloads that are told apart."""
    return [b"%d" % number for number in range(start, start + count)]


def values(rows: Iterable[Row]) -> list[bytes]:
    """The payloads of ``rows``."""
    return [bytes(row.value) for row in rows]


def unique(name: str) -> str:
    """A name that no other test uses at a shared broker."""
    return f"{name}-{uuid4().hex[:8]}"


def make_queue(m: Messaging, name: str, **options: str) -> None:
    """Declare a queue that has no consumer."""
    with m.subscribe(name, queue=name, **options):
        pass


def make_stream(url: str, name: str, payloads: list[bytes]) -> None:
    """A stream that holds ``payloads``."""
    with messaging.connect(url) as m:
        make_queue(m, name, queue_type="stream", stream_offset="first")
        results([m.publish(name, payload) for payload in payloads])


class Publisher:
    """Publishes numbers, about 1000 per second, until it is stopped; :attr:`confirmed` of them the broker has."""

    def __init__(self, url: str, channel: str) -> None:
        self.confirmed = 0
        self._url, self._channel = url, channel
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            publish(self._url, self._channel, numbers(50, self.confirmed))
            self.confirmed += 50

    def stop(self) -> int:
        """End it; return how many messages were confirmed."""
        self._stop.set()
        self._thread.join(QUERY_PATIENCE)
        assert not self._thread.is_alive()
        return self.confirmed


def table(folder: Path) -> list[tuple[int, bytes]]:
    """Offset and value of the rows of a table, as Spark's log of it says."""
    log = folder / "_spark_metadata"
    names = [path.name for path in log.iterdir() if not path.name.startswith(".")] if log.is_dir() else []
    start = max((int(name.removesuffix(".compact")) for name in names if name.endswith(".compact")), default=-1)
    rows: list[tuple[int, bytes]] = []
    for name in names:
        if int(name.removesuffix(".compact")) > start or name == f"{start}.compact":
            with contextlib.suppress(FileNotFoundError):  # compacted just now
                for line in (log / name).read_text().splitlines()[1:]:
                    rows += _rows_of(json.loads(line)["path"].removeprefix("file://"))
    return rows


@lru_cache(maxsize=10_000)
def _rows_of(file: str) -> list[tuple[int, bytes]]:
    """Offset and value of the rows of one file, which is written once: a table is read many times while it grows."""
    import pyarrow.parquet as pq

    found = pq.read_table(file, columns=["offset", "value"])
    return list(zip(found.column("offset").to_pylist(), found.column("value").to_pylist(), strict=True))

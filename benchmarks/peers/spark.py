"""Spark, and what feeds it; or, by the style ``adapter``, the adapter that feeds it without Spark.

``publish`` is the same for everybody: this project's publisher. ``subscribe`` reads while that publishes, ``consume``
what is there already: a journal, a RabbitMQ stream, or what mosquitto has kept. ``READY`` is said when a query has been
over the same path and ended: Python workers run, and the JVM has compiled what matters. Rows count when the micro-batch
they are in is committed, which Spark tells its listeners.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import messaging
from benchmarks.peers import ours
from benchmarks.peers.job import PATIENCE, QUEUE, STAMP, TOPIC, Job, Tally, percentiles, run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import QueryProgressEvent, QueryStartedEvent, QueryTerminatedEvent
    from pyspark.sql.streaming.query import StreamingQuery

#: how many messages the broker may send ahead: what the data source has by default
PREFETCH: Final = 4096
#: the stream that is read first of all, see ``benchmarks.spark``
WARM_UP: Final = "benchmark-warm-up"
#: messages of a micro-batch of the first query
_WARM_UP_ROWS: Final = 4_000
#: how many of these there are before a run of at least so many messages: the JVM has compiled what matters after some
#: ten seconds of work; fewer messages are no measurement
_WARM_UP_BATCHES: Final = ((100_000, 30), (10_000, 6), (0, 1))
#: a micro-batch costs Spark a sixth of a second of processor time, however small: who wants rows rather than haste
#: has it make few
TRIGGER: Final = "2 seconds"
#: options of a JVM that lives for a minute, for everybody: the compiler that is done soon, and no threads for garbage
_YOUNG: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: seconds until Spark must have done what is expected of it
_PATIENCE: Final = 120.0


# --- Spark


@contextlib.contextmanager
def session(folder: Path, **configuration: str) -> Iterator[SparkSession]:
    """A session on two threads, with everything it writes in ``folder``. Afterwards the JVM is gone."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from pyspark_messaging import register

    builder = SparkSession.builder.master("local[2]").appName("benchmark")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        **configuration,
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _errors_into(folder / "spark.log"):  # the JVM keeps it
        spark = builder.getOrCreate()
    try:
        spark.sparkContext.setLogLevel("OFF")
        register(spark)
        yield spark
    finally:
        gateway: Any = SparkContext._gateway
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # it ends then
        try:
            gateway.proc.wait(30)
        except Exception:
            gateway.proc.kill()
            gateway.proc.wait()
            raise


@contextlib.contextmanager
def _errors_into(path: Path) -> Iterator[None]:
    """Have the standard error of processes started meanwhile go to a file."""
    own = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


class Watch:
    """What queries tell of their progress."""

    def __init__(self, spark: SparkSession) -> None:
        from pyspark.sql.streaming.listener import StreamingQueryListener

        self._changed = threading.Condition()
        self._rows: dict[str, int] = {}
        self._ended: dict[str, str | None] = {}
        #: when the last row was told of
        self.last = 0.0
        #: how long micro-batches with rows took, nanoseconds, by query
        self.durations: dict[str, list[int]] = {}
        watch = self

        class Listener(StreamingQueryListener):
            def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
                pass

            def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
                now = time.monotonic()
                progress = event.progress
                with watch._changed:
                    query = str(progress.runId)
                    rows = int(progress.numInputRows)
                    watch._rows[query] = watch._rows.get(query, 0) + rows
                    if rows:
                        watch.last = now
                        took = progress.durationMs["triggerExecution"] * 1_000_000
                        watch.durations.setdefault(query, []).append(took)
                    watch._changed.notify_all()

            def onQueryIdle(self, event: Any) -> None:  # noqa: N802
                pass

            def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
                with watch._changed:
                    watch._ended[str(event.runId)] = event.exception
                    watch._changed.notify_all()

        spark.streams.addListener(Listener())

    def rows(self, query: StreamingQuery) -> int:
        """How many rows of ``query`` are committed."""
        with self._changed:
            return self._rows.get(str(query.runId), 0)

    def wait_for_begin(self, query: StreamingQuery) -> None:
        """Wait for the first trigger: from then on it receives."""
        self._wait(query, lambda: str(query.runId) in self._rows, _PATIENCE, "its first trigger")

    def wait_for_rows(self, query: StreamingQuery, count: int, patience: float = _PATIENCE) -> None:
        """Wait for ``count`` rows of ``query``; ``patience`` begins anew with every micro-batch."""
        while (seen := self.rows(query)) < count:
            self._wait(query, lambda seen=seen: self._rows.get(str(query.runId), 0) > seen, patience, f"{count} rows")

    def wait_for_end(self, query: StreamingQuery) -> None:
        """Wait until a query has ended by itself."""
        self._wait(query, lambda: str(query.runId) in self._ended, _PATIENCE, "its end", ends=True)

    def _wait(self, query: StreamingQuery, condition: Any, patience: float, what: str, *, ends: bool = False) -> None:
        name = str(query.runId)
        with self._changed:
            if not self._changed.wait_for(lambda: condition() or name in self._ended, patience):
                raise TimeoutError(f"{patience:g} s without {what}; {self._rows.get(name, 0)} rows so far")
            error = self._ended.get(name)
            if error is not None or (name in self._ended and not ends):
                raise RuntimeError(f"the query ended: {error}"[:500])


def started(frame: DataFrame, folder: Path, *, seen: Any = None, **trigger: Any) -> StreamingQuery:
    """A query from ``frame`` into nothing, or into the function ``seen``."""
    writer = frame.writeStream.option("checkpointLocation", tempfile.mkdtemp(prefix="checkpoint-", dir=folder))
    writer = writer.format("noop") if seen is None else writer.foreachBatch(seen)
    return (writer.trigger(**trigger) if trigger else writer).start()


def messages(spark: SparkSession, folder: Path, **options: Any) -> DataFrame:
    """Rows of the data source, with a journal of its own."""
    journal = tempfile.mkdtemp(prefix="journal-", dir=folder)
    given = {"journalPath": journal, "prefetch": PREFETCH, **options}
    return spark.readStream.format("messaging").options(**given).load()


# --- roles


def publish(job: Job) -> None:
    """The publisher, for everybody."""
    job.style = "mqtt" if job.source == "mqtt" else "amqp"
    ours.publish(job)


def _url(job: Job) -> str:
    if job.source in ("mqtt", "backlog"):
        return f"mqtt://{job.host}:{job.port}?version={job.version}"
    return f"amqp://{job.host}:{job.port}"


def _frame(spark: SparkSession, job: Job, topic: str) -> DataFrame:
    """Rows of a channel."""
    folder = Path(job.folder)
    #: what the broker keeps messages in; not those of the warm-up
    kept = {"backlog": "group", "queue": "queue"}.get(job.source) if topic == TOPIC else None
    if job.style == "simple":
        from benchmarks.peers.spark_sources import SimpleMqttSource

        spark.dataSource.register(SimpleMqttSource)
        simple = spark.readStream.format("simple").options(host=job.host, port=job.port, topic=topic)
        return (simple.option("session", QUEUE) if kept == "group" else simple).load()
    return messages(spark, folder, url=_url(job), channel=topic, **({} if kept is None else {kept: QUEUE}))


def subscribe(job: Job) -> None:
    """Rows while another process publishes."""
    if job.style == "adapter":
        _subscribe_adapter(job)
        return
    with session(Path(job.folder), **{"spark.driver.extraJavaOptions": _YOUNG}) as spark:
        watch = Watch(spark)
        latencies: list[int] = []

        def seen(frame: DataFrame, _: int) -> None:
            found = frame.select("value").collect()
            now = time.monotonic_ns()
            latencies.extend(now - int.from_bytes(row[0][:STAMP], "big") for row in found)

        collect = seen if job.rate is not None else None
        _warm_up(spark, watch, job, collect)
        latencies.clear()
        trigger = {} if job.rate is not None else {"processingTime": TRIGGER}
        query = started(_frame(spark, job, TOPIC), Path(job.folder), seen=collect, **trigger)
        watch.wait_for_begin(query)
        job.ready()
        told = threading.Event()

        def listen() -> None:
            sys.stdin.readline()  # PUBLISHED
            told.set()

        threading.Thread(target=listen, daemon=True).start()
        with contextlib.suppress(TimeoutError):  # the rest is lost
            watch.wait_for_rows(query, job.count, _PATIENCE)
        told.wait(_PATIENCE)
        time.sleep(PATIENCE / 4)  # would anything come twice?
        _finish(job, watch, query, latencies)
        query.stop()


def _finish(job: Job, watch: Watch, query: StreamingQuery, latencies: list[int]) -> None:
    durations = watch.durations.get(str(query.runId), [])
    result = _counted(job, watch, query) | percentiles(latencies)
    result |= {f"batch_{name}": value for name, value in percentiles(durations).items()}
    job.finish(**result, batches=len(durations))


def _counted(job: Job, watch: Watch, query: StreamingQuery) -> dict[str, Any]:
    """What came of so many messages, and when the last of it was committed."""
    count = watch.rows(query)
    lost, duplicates = max(0, job.count - count), max(0, count - job.count)
    return {"received": count, "lost": lost, "duplicates": duplicates, "end": watch.last}


def _warm_up(spark: SparkSession, watch: Watch, job: Job, seen: Any) -> None:
    """A first query, with a channel of its own."""
    topic = "benchmark/warm-up"
    query = started(_frame(spark, job, topic), Path(job.folder), seen=seen)
    watch.wait_for_begin(query)
    stamp = time.monotonic_ns().to_bytes(STAMP, "big")
    with messaging.connect(_url(job)) as m:
        for number in range(1, 1 + next(batches for least, batches in _WARM_UP_BATCHES if job.count >= least)):
            promises = [m.publish(topic, stamp.ljust(job.size, b"x"), qos=1) for _ in range(_WARM_UP_ROWS)]
            for promise in promises:
                promise.result(_PATIENCE)
            watch.wait_for_rows(query, number * _WARM_UP_ROWS)
    query.stop()


def _subscribe_adapter(job: Job) -> None:
    """The adapter as the data source uses it, into an observer."""
    tally = Tally(job)
    received = tally.received
    settings: dict[str, Any] = {"receive_maximum": PREFETCH} if job.source == "mqtt" else {}
    options: dict[str, Any] = {"qos": 1, "prefetch": PREFETCH, "buffer_size": PREFETCH}
    if job.source == "queue":
        options["queue"] = QUEUE
    with messaging.connect(_url(job), **settings) as m, m.subscribe(TOPIC, **options) as stream:
        stream.subscribe(lambda message: received(message.payload))
        job.ready()
        tally.wait()
        tally.finish()


def consume(job: Job) -> None:
    """Rows of what is there already."""
    if job.source == "journal":
        _read_journal(job)
    elif job.style == "adapter":
        _consume_adapter(job)
    elif job.source == "backlog":
        _consume_backlog(job)
    else:
        _consume_stream(job)


def _read_journal(job: Job) -> None:
    with session(Path(job.folder)) as spark:
        _read_batch(spark, job, max(1, job.count // 5))
        job.ready()
        job.wait_for_go()
        start = time.monotonic()
        _read_batch(spark, job, job.count)
        job.finish(start=start, end=time.monotonic(), received=job.count)


def _read_batch(spark: SparkSession, job: Job, rows: int) -> None:
    """Read so many rows, from the planning to the last."""
    from benchmarks.peers import spark_sources as sources

    if job.style == "rate":
        _read_rate(spark, job, rows)
        return
    if job.style in ("arrow", "tuples"):
        source = sources.ArrowSource if job.style == "arrow" else sources.TupleSource
        spark.dataSource.register(source)
        frame = spark.read.format(job.style).options(rows=rows, size=job.size).load()
    else:
        ends = json.dumps({"0": rows})
        journal = spark.read.format("messaging").options(journalPath=job.journal, minPartitions=sources.TASKS)
        frame = journal.option("endingOffsets", ends).load()
    if job.sink == "parquet":
        frame.write.mode("overwrite").parquet(str(Path(job.folder) / "table"))
    else:
        frame.write.format("noop").mode("overwrite").save()


def _read_rate(spark: SparkSession, job: Job, rows: int) -> None:
    """The same from the source that Spark has for it: one micro-batch."""
    from benchmarks.peers import spark_sources as sources

    writer = sources.rate_rows(spark, rows, job.size).writeStream.trigger(availableNow=True)
    folder = tempfile.mkdtemp(dir=job.folder)
    writer = writer.option("checkpointLocation", folder + "/checkpoint")
    query = (writer.format("noop") if job.sink == "noop" else writer.format("parquet")).start(folder + "/table")
    if not query.awaitTermination(round(_PATIENCE)) or sum(each.numInputRows for each in query.recentProgress) != rows:
        raise RuntimeError(f"the rate source did not make {rows} rows: {query.recentProgress}"[:500])


def _consume_stream(job: Job) -> None:
    """A query that ends when it has read what the stream holds: from its start to its last row."""
    folder = Path(job.folder)
    with session(folder) as spark:
        watch = Watch(spark)

        def read(stream: str) -> StreamingQuery:
            frame = spark.readStream.format("messaging").options(
                url=_url(job), queue=stream, queueType="stream", startingOffsets="earliest", minPartitions=2
            )
            query = started(frame.load(), folder, availableNow=True)
            watch.wait_for_end(query)
            return query

        read(WARM_UP)
        job.ready()
        job.wait_for_go()
        start = time.monotonic()
        query = read(QUEUE)
        job.finish(start=start, **_counted(job, watch, query))


def _consume_backlog(job: Job) -> None:
    """What the broker has kept for the session: from the start of the query to when its last row is committed."""
    folder = Path(job.folder)
    with session(folder, **{"spark.driver.extraJavaOptions": _YOUNG}) as spark:
        watch = Watch(spark)
        _warm_up(spark, watch, job, None)
        frame = _frame(spark, job, TOPIC)
        job.ready()
        job.wait_for_go()
        start = time.monotonic()
        query = started(frame, folder, processingTime=TRIGGER)
        with contextlib.suppress(TimeoutError):  # the rest is lost
            watch.wait_for_rows(query, job.count)
        time.sleep(PATIENCE / 4)  # would anything come twice?
        job.finish(start=start, **_counted(job, watch, query))
        query.stop()


def _consume_adapter(job: Job) -> None:
    """The same stream, or session, read by one consumer in one process."""
    tally = Tally(job)
    received = tally.received
    settings: dict[str, Any] = {}
    options: dict[str, Any]
    if job.source == "backlog":
        settings = {"client_id": QUEUE, "clean_start": False, "session_expiry": 3600, "receive_maximum": PREFETCH}
        channel, options = TOPIC, {"qos": 1}
    else:
        options = {"queue": QUEUE, "queue_type": "stream", "stream_offset": "first", "autocreate": False}
        channel = QUEUE
    job.ready()
    job.wait_for_go()
    tally.start()
    with (
        messaging.connect(_url(job), **settings) as m,
        m.subscribe(channel, prefetch=PREFETCH, buffer_size=PREFETCH, **options) as stream,
    ):
        stream.subscribe(lambda message: received(message.payload))
        tally.wait()
        tally.finish()


if __name__ == "__main__":
    run(
        {"publish": publish, "subscribe": subscribe, "consume": consume},
        *("rx-messaging", "pyspark", "pyarrow", "paho-mqtt"),
    )

"""Spark: rows from a journal, from MQTT and from RabbitMQ, against other ways to read them; and their latency.

``journal`` is a batch read of what an ingest has stored, into nothing and into Parquet, from planning to the last
row. Beside it are a Python data source that has one Arrow batch ready, one that has tuples ready, and Spark itself,
which computes the same columns from its ``rate-micro-batch`` source, in a micro-batch of all rows (``rate`` itself
has as many rows as seconds went by: it would measure its clock). ``mosquitto`` and ``RabbitMQ queue``: from the first
publish to when the micro-batch with the last row is committed, against the same adapter without Spark; a micro-batch
every two seconds, and some twenty seconds of it. ``backlog`` is what mosquitto kept in the session while nobody was
there: from the start of the query, and no publisher takes its part of the processor. ``RabbitMQ stream``: the stream
is full already, and the query ends with it (``availableNow``); from its start to its last row.

Publishers are this project's, for everybody. Latency is taken in ``foreachBatch``, of every row.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import messaging
from benchmarks import amqp, contenders, mqtt, report
from benchmarks.harness import Case, Metric, Plan, Run, RunError, measure
from benchmarks.peers.job import QUEUE, STAMP, TOPIC
from benchmarks.peers.spark import WARM_UP

if TYPE_CHECKING:
    from benchmarks.contenders import Contender

#: only the window of the subscriber, see docs/spark.md: while one write waits for the disk, the next is collected
MOSQUITTO: Final = ("max_inflight_messages 0", *(line for line in mqtt.BROKER if "inflight" not in line))
PARTS: Final = ("journal", "mqtt", "backlog", "queue", "stream", "latency")
ROWS: Final = (Metric("rate", "rows/s", lambda run: run.rate, more_is_better=True),)
#: warm-up of Spark, in seconds
_SETUP: Final = 180.0
#: rows of a journal for each second of a run: no reader reads more
_BATCH_RATE: Final = 1_000_000
#: factor for the length of a streaming query: its last micro-batch must not weigh much
_LONGER: Final = 20
#: factor for the messages of its warm-up: with fewer, the run would measure the trigger
_LONGER_WARM_UP: Final = 50
#: most messages of a run
_STREAMING_MOST: Final = 1_500_000
#: messages that the broker keeps, for each second of a run
_BACKLOG_RATE: Final = 400_000
#: messages of a stream, for each second of a run
_STREAM_RATE: Final = 100_000
#: seconds of a latency run, for each second of a run: at least thirty micro-batches
_PACED: Final = 14


def _of(name: str) -> Callable[[Run], float]:
    return lambda run: float(run.said["subscribe"].get(name, 0.0)) / 1000


LATENCY: Final = (
    Metric("micro-batch p50", "ms", _of("batch_p50")),
    Metric("micro-batch p99", "ms", _of("batch_p99")),
    Metric("p50", "ms", _of("p50")),
    Metric("p99", "ms", _of("p99")),
)


def _once(fill: Callable[[], None]) -> Callable[[int], None]:
    """The inputs that several cases read. Each is created for the first case that reads it."""
    is_there = False

    def before(_: int) -> None:
        nonlocal is_there
        if not is_there:
            fill()
            is_there = True

    return before


class Spark:
    """The cases, one after the other."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, results: report.Results) -> None:
        self._arguments = arguments
        self._folder = folder
        self._results = results
        self._plan = Plan.of(arguments)
        self._size: int = (arguments.payload or [100])[0]

    def journal(self) -> None:
        """Batch reads."""
        rows = self._plan.messages or round(_BATCH_RATE * self._plan.seconds)
        path = self._folder / "journal"

        def fill() -> None:
            from benchmarks.peers.spark_sources import fill_journal

            fill_journal(str(path), rows, self._size)

        filled = _once(fill)
        plan = dataclasses.replace(self._plan, messages=rows, warm_up=0)
        for sink in self._arguments.sinks or ("noop", "parquet"):
            self._measure(
                {"from": "journal", "into": sink},
                contenders.SPARK_BATCH,
                plan,
                {"source": "journal", "sink": sink, "journal": path},
                port=0,
                roles=("consume",),
                before=filled,
            )

    def mqtt(self) -> None:
        """From mosquitto, with QoS 1."""
        from messaging.testing.brokers import Mosquitto

        self._results.broker("mosquitto", MOSQUITTO)
        with Mosquitto(MOSQUITTO) as broker:
            labels = {"from": "mosquitto", "into": "noop"}
            self._measure(labels, contenders.SPARK_MQTT, self._streaming(), self._mqtt_options(), port=broker.port)

    def backlog(self) -> None:
        """From mosquitto, messages that it has kept."""
        from messaging.testing.brokers import Mosquitto

        count = self._plan.messages or round(_BACKLOG_RATE * self._plan.seconds)
        self._results.broker("mosquitto", MOSQUITTO)
        with Mosquitto(MOSQUITTO) as broker:
            self._measure(
                {"from": "mosquitto, a backlog", "into": "noop"},
                contenders.SPARK_MQTT,
                dataclasses.replace(self._plan, messages=count, warm_up=0),
                self._mqtt_options() | {"source": "backlog"},
                port=broker.port,
                roles=("consume",),
                before=lambda messages: fill_session(broker.port, messages, self._size),
            )

    def latency(self) -> None:
        """From mosquitto at a fixed rate: micro-batches, and rows."""
        from messaging.testing.brokers import Mosquitto

        rate = self._arguments.rate
        plan = dataclasses.replace(self._plan, seconds=_PACED * self._plan.seconds).paced(rate)
        plan = dataclasses.replace(plan, warm_up=0)
        self._results.broker("mosquitto", MOSQUITTO)
        with Mosquitto(MOSQUITTO) as broker:
            self._measure(
                {"from": f"mosquitto, {rate:g}/s", "into": "foreachBatch"},
                contenders.SPARK_LATENCY,
                plan,
                self._mqtt_options() | {"rate": rate, "sink": "foreachBatch"},
                port=broker.port,
                metrics=LATENCY,
            )

    def queue(self) -> None:
        """From a queue."""
        from messaging.testing.brokers import RabbitMQ

        self._results.broker("rabbitmq", amqp.BROKER)
        with RabbitMQ(amqp.BROKER) as broker:
            queue = amqp.Queue(broker.port, self._size)
            self._measure(
                {"from": "RabbitMQ queue", "into": "noop"},
                contenders.SPARK_AMQP,
                self._streaming(),
                {"source": "queue", "qos": 1, "window": amqp.WINDOW},
                port=broker.port,
                before=queue.empty,
                after=queue.expect_empty,
            )

    def stream(self) -> None:
        """From a stream that is full already."""
        from messaging.testing.brokers import RabbitMQ

        count = self._plan.messages or round(_STREAM_RATE * self._plan.seconds)
        self._results.broker("rabbitmq", amqp.BROKER)
        with RabbitMQ(amqp.BROKER) as broker:

            def fill() -> None:
                fill_stream(broker.port, WARM_UP, max(1, count // 5), self._size)
                fill_stream(broker.port, QUEUE, count, self._size)

            self._measure(
                {"from": "RabbitMQ stream", "into": "noop"},
                contenders.SPARK_AMQP,
                dataclasses.replace(self._plan, messages=count, warm_up=0),
                {"source": "stream"},
                port=broker.port,
                roles=("consume",),
                before=_once(fill),
            )

    def _streaming(self) -> Plan:
        seconds = _LONGER * self._plan.seconds
        warm_up = _LONGER_WARM_UP * self._plan.warm_up
        return dataclasses.replace(self._plan, seconds=seconds, warm_up=warm_up, most=_STREAMING_MOST)

    def _mqtt_options(self) -> dict[str, Any]:
        return {"source": "mqtt", "version": "5", "qos": 1, "window": mqtt.WINDOW}

    def _measure(
        self,
        labels: dict[str, str],
        known: tuple[Contender, ...],
        plan: Plan,
        options: dict[str, Any],
        **case: Any,
    ) -> None:
        peers = contenders.choose(known, self._arguments.peers)
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder:
            given = options | {"size": self._size, "folder": folder}
            one = Case(labels, given, setup=_SETUP, **{"metrics": ROWS, **case})
            outcomes = measure(one, peers, plan)
        # the results do not include temporary paths
        kept = {key: value for key, value in one.options.items() if key not in ("folder", "journal")}
        self._results.add(dataclasses.replace(one, options=kept), outcomes)


def fill_session(port: int, count: int, size: int) -> None:
    """Let mosquitto keep ``count`` messages for the client id ``QUEUE``."""
    url = f"mqtt://127.0.0.1:{port}"
    with messaging.connect(url, client_id=QUEUE, clean_start=True):
        pass  # ends the session of the run before
    with messaging.connect(url, client_id=QUEUE, clean_start=False, session_expiry=3600) as m:
        stream = m.subscribe(TOPIC, qos=1)  # closed with its connection, it stays in the session
        stream.ready.result(30)
    with messaging.connect(url) as m:
        last = None
        for number in range(count):
            last = m.publish(TOPIC, number.to_bytes(STAMP, "big").ljust(size, b"x"), qos=1)
        if last is not None:
            last.result(60)


def fill_stream(port: int, name: str, count: int, size: int) -> None:
    """Make a stream of ``count`` messages, and wait until the last can be read."""
    import pika

    with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
        channel = connection.channel()
        channel.queue_delete(name)
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
        for number in range(count):
            channel.basic_publish("", name, number.to_bytes(8, "big").ljust(size, b"x"))
        # the last message must be readable before a case starts
        channel.basic_qos(prefetch_count=1000)
        last = (count - 1).to_bytes(8, "big")
        arguments = {"x-stream-offset": "last"}
        for method, _, body in channel.consume(name, arguments=arguments, inactivity_timeout=30):
            if method is None:
                raise RunError(f"stream {name}: the last of {count} messages is not there")
            channel.basic_ack(method.delivery_tag)
            if body[:8] == last:
                return


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    results = report.Results("spark", "Spark", "into", arguments)
    with tempfile.TemporaryDirectory(prefix="rx-messaging-spark-", ignore_cleanup_errors=True) as folder:
        spark = Spark(arguments, Path(folder), results)
        for part in arguments.parts or PARTS:
            getattr(spark, part)()
    results.finish()

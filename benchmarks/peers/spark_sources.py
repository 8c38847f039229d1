"""What stands beside the data source ``messaging``: rows made for it, and sources that others would write.

In a module of its own, because Python workers of Spark import it.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition, SimpleDataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema

from pyspark_messaging.columns import JOURNAL, MESSAGE
from pyspark_messaging.journal import JournalSource, RowJournal

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: different rows: whoever makes rows makes these, over and over. As many as a record batch that Spark likes
POOL: Final = 16_384
#: rows of a frame of the journal: what an ingest writes at a time under load
FRAME: Final = 1_024
#: tasks of a batch read, for everybody alike
TASKS: Final = 8
#: one row in so many came with a packet identifier, as deliveries of a persistent session do
_PACKETS: Final = 4
_START: Final = 1_700_000_000_000_000


def pool(size: int) -> dict[str, list[Any]]:
    """The columns that have values, of ``POOL`` rows with payloads of ``size`` bytes."""
    rng = random.Random(7)
    numbers = range(POOL)
    texts = [f'{{"sequence": {number}, "value": {rng.random()}, "unit": "C", "line": ' for number in numbers]
    return {
        "value": [text.encode().ljust(size, b"x")[:size] for text in texts],
        "channel": [f"plant/line-{number % 8}/sensor-{number % 97}/temperature" for number in numbers],
        "partition": [0] * POOL,
        "offset": list(numbers),
        "timestamp": [_START + 1000 * number for number in numbers],
        "packet": [None if number % _PACKETS else 1 + number for number in numbers],
    }


def pool_batch(schema: pa.Schema, size: int) -> pa.RecordBatch:
    """The same as a record batch; columns without values are null."""
    known = pool(size)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(known[field.name], field.type) if field.name in known else pa.nulls(POOL, field.type)
            for field in schema
        ],
        schema=schema,
    )


def fill_journal(path: str, rows: int, size: int) -> None:
    """Make a journal with ``rows`` rows, through the writer of the ingest."""
    frames = [pool_batch(JOURNAL, size).slice(at, FRAME) for at in range(0, POOL, FRAME)]
    offset = JOURNAL.get_field_index("offset")
    opened = RowJournal.open(path, JournalSource("mqtt://127.0.0.1", ["plant/#"], None, "1", 1))
    try:
        (log,) = opened.logs
        for number, first in enumerate(range(0, rows, FRAME)):
            frame = frames[number % len(frames)].slice(0, rows - first)
            numbers = pa.array(range(first, first + frame.num_rows), pa.int64())
            log.append(frame.set_column(offset, JOURNAL.field(offset), numbers))
    finally:
        opened.close()


# --- batch


class _Rows(InputPartition):
    def __init__(self, count: int) -> None:
        self.count = count


class _PoolReader(DataSourceReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._size = int(options["size"])
        self._rows = int(options["rows"])

    def partitions(self) -> Sequence[InputPartition]:
        share = -(-self._rows // TASKS)
        return [_Rows(min(share, self._rows - at)) for at in range(0, self._rows, share)]


class ArrowReader(_PoolReader):
    """Yields one record batch, ready-made, over and over: what Arrow allows a Python data source."""

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        batch = pool_batch(MESSAGE, self._size)
        for at in range(0, partition.count, POOL):
            yield batch.slice(0, partition.count - at)


class TupleReader(_PoolReader):
    """Yields tuples, ready-made, over and over: what a Python data source does that knows nothing of Arrow."""

    def read(self, partition: Any) -> Iterator[tuple[Any, ...]]:
        names = ["value", "channel", "key", "partition", "offset", "timestamp"]
        columns = pool_batch(MESSAGE, self._size).select(names).to_pydict()
        rows = [(*row, None, None, None, None) for row in zip(*(columns[name] for name in names), strict=True)]
        for at in range(0, partition.count, POOL):
            yield from rows[: partition.count - at]


class _PoolSource(DataSource):
    def schema(self) -> StructType:
        columns: StructType = from_arrow_schema(MESSAGE)
        return columns


class ArrowSource(_PoolSource):
    @classmethod
    def name(cls) -> str:
        return "arrow"

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return ArrowReader(self.options)


class TupleSource(_PoolSource):
    @classmethod
    def name(cls) -> str:
        return "tuples"

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return TupleReader(self.options)


def rate_rows(spark: SparkSession, rows: int, size: int) -> DataFrame:
    """The same columns, as a stream computed by Spark itself, without Python: the limit of the engine."""
    number = sql.col("value")
    values = {
        "value": sql.rpad(sql.concat(sql.lit('{"sequence": '), (number % POOL).cast("string")), size, "x").cast(
            "binary"
        ),
        "channel": sql.format_string("plant/line-%d/sensor-%d/temperature", number % 8, number % 97),
        "partition": sql.lit(0),
        "offset": number,
        "timestamp": sql.timestamp_micros(sql.lit(_START) + number * 1000),
    }
    columns = [
        values.get(field.name, sql.lit(None)).cast(field.dataType).alias(field.name)
        for field in from_arrow_schema(MESSAGE).fields
    ]
    source = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=rows, numPartitions=TASKS)
    return source.load().select(*columns)


# --- streaming


class SimpleMqttReader(SimpleDataSourceStreamReader):
    """As it is written by hand: paho's thread appends to a queue, ``read`` takes what is there.

    Its columns are those of the MQTT source that is published for PySpark: time, topic, payload, DUP, QoS, retained.
    That one connects anew for each micro-batch; this one stays. It acknowledges what is in memory, and loses it when
    it ends.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._client: Any = None
        self._queue: deque[tuple[Any, ...]] = deque()
        self._batches: dict[int, tuple[int, list[tuple[Any, ...]]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_client": None, "_queue": deque(), "_batches": {}}

    def _connect(self) -> None:
        import time

        import paho.mqtt.client as mqtt
        from paho.mqtt.enums import CallbackAPIVersion

        subscribed = threading.Event()
        name = self._options.get("session", "")
        client = mqtt.Client(CallbackAPIVersion.VERSION2, name, protocol=mqtt.MQTTv5)
        append, now = self._queue.append, time.time

        def on_connect(*_: Any) -> None:
            client.subscribe(self._options["topic"], 1)

        def on_message(_client: Any, _userdata: Any, message: mqtt.MQTTMessage) -> None:
            append((now(), message.topic, bytes(message.payload), message.dup, message.qos, message.retain))

        client.on_connect = on_connect
        client.on_subscribe = lambda *_: subscribed.set()
        client.on_message = on_message
        client.connect(self._options["host"], int(self._options["port"]), **self._session())
        client.loop_start()
        self._client = client
        if not subscribed.wait(60):  # behind all that was kept
            raise RuntimeError("no SUBACK")

    def _session(self) -> dict[str, Any]:
        """What to say for a session that is there already."""
        if "session" not in self._options:
            return {}
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = 3600
        return {"clean_start": False, "properties": properties}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"offset": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[Any, ...]], dict[str, int]]:
        if self._client is None:
            self._connect()
        rows = []
        while self._queue:
            rows.append(self._queue.popleft())
        begin = start["offset"]
        end = begin + len(rows)
        if rows:
            self._batches[begin] = end, rows
        return iter(rows), {"offset": end}

    def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[tuple[Any, ...]]:  # noqa: N802
        at = start["offset"]
        while at < end["offset"]:
            at, rows = self._batches[at]
            yield from rows

    def commit(self, end: dict[str, int]) -> None:
        for begin in [begin for begin, (until, _) in self._batches.items() if until <= end["offset"]]:
            del self._batches[begin]


class SimpleMqttSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "simple"

    def schema(self) -> str:
        return "timestamp double, channel string, value binary, duplicate boolean, qos int, retained boolean"

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:  # noqa: ARG002, N802
        return SimpleMqttReader(self.options)

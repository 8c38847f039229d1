"""The data source in a real session, with real brokers: streaming and batch, typed and plain."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from pydantic import BaseModel
from pyspark.sql.types import StructField, StructType

import messaging
from adapters.spark.read.typed import CORRUPT, MESSAGE_COLUMNS, TypedColumns
from tests.spark.harness import Collected, numbers, publish, values, wait_for
from tests.spark.test_typed import EVERYTHING

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.brokers import Mosquitto, RabbitMQ

pytestmark = pytest.mark.slow

COLUMNS = [
    ("value", "binary"),
    ("channel", "string"),
    ("key", "string"),
    ("partition", "int"),
    ("offset", "bigint"),
    ("timestamp", "timestamp"),
    ("content_type", "string"),
    ("correlation_id", "string"),
    ("reply_to", "string"),
    ("headers", "map<string,string>"),
]


class Reading(BaseModel):
    device: str
    celsius: float


def unique(name: str) -> str:
    """A name that no other test uses at a shared broker."""
    return f"{name}-{uuid4().hex[:8]}"


def stream(spark: SparkSession, url: str, tmp_path: Path, **options: Any) -> DataFrame:
    """A streaming read with a journal of the test's own."""
    given = {"url": url, "journalPath": str(tmp_path / "journal"), **options}
    return spark.readStream.format("messaging").options(**given).load()


def test_rows_have_the_properties_of_the_message(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel = unique("room")
    frame = stream(spark, mosquitto.url, tmp_path, channel=f"{channel}/+")
    assert frame.dtypes == COLUMNS
    before = datetime.now(UTC).replace(tzinfo=None)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(
            mosquitto.url, f"{channel}/a", [b"\x00\xff"], content_type="image/png", correlation_id="c-1",
            reply_to="answers", headers={"site": "north"},
        )  # fmt: skip
        publish(mosquitto.url, f"{channel}/b", [b""])
        first, second = query.receive(2)
    assert (bytes(first.value), first.channel, first.key) == (b"\x00\xff", f"{channel}/a", None)
    assert (first.partition, first.offset, second.offset) == (0, 0, 1)
    assert (first.content_type, first.correlation_id, first.reply_to) == ("image/png", "c-1", "answers")
    assert first.headers["site"] == "north"
    assert (bytes(second.value), second.channel, second.content_type) == (b"", f"{channel}/b", None)
    assert abs((first.timestamp.astimezone(UTC).replace(tzinfo=None) - before).total_seconds()) < 60


def test_a_queue_of_the_group_keeps_messages_while_the_query_is_stopped(
    spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    channel, checkpoint = unique("orders"), tmp_path / "checkpoint"
    frame = stream(spark, rabbitmq.url, tmp_path, channel=f"{channel}/#", group=channel)
    with Collected(frame, checkpoint).ready() as query:
        publish(rabbitmq.url, f"{channel}/eu", numbers(500))
        assert values(query.receive(500)) == numbers(500)
    publish(rabbitmq.url, f"{channel}/eu", numbers(500, 500))
    with Collected(frame, checkpoint) as query:
        rows = query.receive(500)
        publish(rabbitmq.url, f"{channel}/eu", numbers(10, 1000))
        rows = query.receive(510)
    assert values(rows) == numbers(510, 500)
    assert [row.offset for row in rows] == list(range(500, 1010))


def test_a_session_keeps_messages_while_the_query_is_stopped(
    spark: SparkSession, broker: Mosquitto, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    frame = stream(spark, broker.url, tmp_path, channel="orders/#")
    with Collected(frame, checkpoint).ready() as query:
        publish(broker.url, "orders/eu", numbers(500))
        assert values(query.receive(500)) == numbers(500)
    publish(broker.url, "orders/eu", numbers(500, 500))
    with Collected(frame, checkpoint) as query:
        assert values(query.receive(500)) == numbers(500, 500)
        assert [row.offset for row in query.rows] == list(range(500, 1000))


def test_available_now_reads_all_kept_messages_and_ends(spark: SparkSession, broker: Mosquitto, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    frame = stream(spark, broker.url, tmp_path, channel="orders", availableNowQuiet="0.3", maxRowsPerBatch="300")
    Collected(frame, checkpoint, availableNow=True).finish()  # makes the session
    publish(broker.url, "orders", numbers(1000))
    query = Collected(frame, checkpoint, availableNow=True)
    assert values(query.finish()) == numbers(1000)
    assert max(len(batch) for batch in query.batches) == 300
    assert Collected(frame, checkpoint, availableNow=True).finish() == []


def test_available_now_of_a_queue(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    queue, checkpoint = unique("work"), tmp_path / "checkpoint"
    with messaging.connect(rabbitmq.url) as m:  # a queue that is there already, and holds something
        made = m.subscribe(queue, queue=queue, queue_type="quorum")
        made.ready.result(10)
        made.close().result(10)
        for number in numbers(1000):
            promise = m.publish(queue, number)
        promise.result(10)
    frame = stream(spark, rabbitmq.url, tmp_path, queue=queue, queueType="quorum", availableNowQuiet="0.5")
    assert values(Collected(frame, checkpoint, availableNow=True).finish()) == numbers(1000)


def test_two_queries_at_once_get_all_of_it_each(spark: SparkSession, broker: Mosquitto, tmp_path: Path) -> None:
    one = stream(spark, broker.url, tmp_path / "one", channel="a/#")
    two = stream(spark, broker.url, tmp_path / "two", channel="a/+")
    with (
        Collected(one, tmp_path / "checkpoint1").ready() as first,
        Collected(two, tmp_path / "checkpoint2", processingTime="200 milliseconds").ready() as second,
    ):
        publish(broker.url, "a/b", numbers(300))
        assert values(first.receive(300)) == numbers(300)
        assert values(second.receive(300)) == numbers(300)


def test_several_channels(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("several")
    frame = stream(spark, rabbitmq.url, tmp_path, channel=f"{name}/a, {name}/b/+")
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(rabbitmq.url, f"{name}/a", [b"1"])
        publish(rabbitmq.url, f"{name}/b/c", [b"2"])
        publish(rabbitmq.url, f"{name}/d", [b"3"])
        assert {(row.channel, bytes(row.value)) for row in query.receive(2)} == {
            (f"{name}/a", b"1"),
            (f"{name}/b/c", b"2"),
        }


def test_typed_columns_of_a_schema(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel = unique("typed")
    schema = "device string, celsius double, _channel string, _offset long, _corrupt_record string"
    frame = (
        spark.readStream.format("mqtt")
        .schema(schema)
        .options(url=mosquitto.url, channel=channel, journalPath=str(tmp_path / "journal"))
        .load()
    )
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(mosquitto.url, channel, [json.dumps({"device": "a", "celsius": 20}), b"{no json", b'{"device": 5}'])
        rows = [tuple(row) for row in query.receive(3)]
    assert rows == [
        ("a", 20.0, channel, 0, None),
        (None, None, channel, 1, "{no json"),
        (None, None, channel, 2, '{"device": 5}'),
    ]


def test_typed_columns_of_a_model(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    channel = unique("typed")
    frame = (
        spark.readStream.format("amqp")
        .options(url=rabbitmq.url, channel=channel, journalPath=str(tmp_path / "journal"))
        .option("model", f"{Reading.__module__}:Reading")
        .load()
    )
    assert frame.dtypes[:2] == [("device", "string"), ("celsius", "double")]
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(rabbitmq.url, channel, [Reading(device="a", celsius=1.5).model_dump_json(), b"nothing"])
        good, bad = query.receive(2)
    assert (good.device, good.celsius, good._corrupt_record, good._channel) == ("a", 1.5, None, channel)
    assert (bad.device, bad.celsius, bad._corrupt_record) == (None, None, "nothing")


def test_every_type_of_a_typed_read_reaches_spark(spark: SparkSession) -> None:
    """By model and by schema, through Python workers."""
    fields = [StructField(name[1:], kind) for name, kind in MESSAGE_COLUMNS.items()]
    rows = [
        (payload, "c", None, 0, offset, datetime(2024, 1, 1), None, None, None, {"a": "b"})
        for offset, payload in enumerate([json.dumps(EVERYTHING).encode(), b"\xff{"])
    ]
    frame = spark.createDataFrame(rows, StructType(fields))
    schema = spark.createDataFrame(
        [],
        "text string, time timestamp, exact decimal(38,18), maps map<string,array<struct<name:string,floor:bigint>>>,"
        "_headers map<string,string>, _corrupt_record string",
    ).schema
    for columns in (TypedColumns.of_model("tests.spark.test_typed:Everything"), TypedColumns.of_schema(schema)):
        made = frame.mapInArrow(lambda batches, columns=columns: map(columns.convert, batches), columns.schema)
        good, corrupt = made.selectExpr("*", "unix_micros(time) as micros").orderBy("_corrupt_record").collect()
        assert (good.text, good["_headers"], good[CORRUPT]) == ("Grüße\n", {"a": "b"}, None)
        assert good.micros == datetime(2024, 5, 1, 12, tzinfo=UTC).timestamp() * 1e6
        assert good.exact == Decimal("12345678901234567890.123456789012345678")
        assert good.maps["x"][0].asDict() == {"name": "n", "floor": None}
        assert (corrupt[CORRUPT], corrupt.text, corrupt.maps) == ("\ufffd{", None, None)
        if "duration" in good:
            assert good.duration == timedelta(days=1, seconds=2.5)
            assert good.site.floor == 7


def test_a_batch_read_of_the_journal(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel, journal = unique("batch"), str(tmp_path / "journal")
    frame = stream(spark, mosquitto.url, tmp_path, channel=channel)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(mosquitto.url, channel, numbers(1000))
        query.receive(1000)
        # beside the running query
        read = spark.read.format("messaging").option("journalPath", journal)
        assert values(read.load().orderBy("offset").collect()) == numbers(1000)
    read = read.option("startingOffsets", '{"0": 100}').option("endingOffsets", '{"0": 200}').option("minPartitions", 4)
    part = read.load()
    assert part.rdd.getNumPartitions() == 4
    assert values(part.orderBy("offset").collect()) == numbers(100, 100)
    assert read.schema("value binary, offset long").load().columns == ["value", "offset"]


def test_limits_of_a_micro_batch(spark: SparkSession, broker: Mosquitto, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    frame = stream(spark, broker.url, tmp_path, channel="a")
    Collected(frame, checkpoint, availableNow=True).finish()
    publish(broker.url, "a", [b"x" * 1000 for _ in range(2000)])
    frame = stream(
        spark, broker.url, tmp_path, channel="a", maxRowsPerBatch=900, maxBytesPerBatch="200k", availableNowQuiet="0.3"
    )
    query = Collected(frame, checkpoint, availableNow=True)
    assert len(query.finish()) == 2000
    sizes = [len(batch) for batch in query.batches]
    assert max(sizes) <= 900
    assert len(sizes) >= 5


def test_processed_segments_are_deleted(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel = unique("trim")
    frame = stream(spark, mosquitto.url, tmp_path, channel=channel, journalBytes="4m", minPartitions=2)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        for batch in range(12):  # three times the limit of the journal
            publish(mosquitto.url, channel, [b"x" * 10_000 for _ in range(100)])
            query.receive(100 * (batch + 1))
    sizes = [file.stat().st_size for file in (tmp_path / "journal" / "0").iterdir()]
    assert sum(sizes) < 8 * 2**20


def test_several_receivers_share_the_work(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel = unique("shared")
    frame = stream(spark, mosquitto.url, tmp_path, channel=f"{channel}/#", receivers=3)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(mosquitto.url, f"{channel}/a", numbers(900))
        rows = query.receive(900)
    assert sorted(values(rows)) == sorted(numbers(900))
    assert {row.partition for row in rows} == {0, 1, 2}
    for partition in range(3):
        mine = [row for row in rows if row.partition == partition]
        assert [row.offset for row in mine] == list(range(len(mine)))


def test_several_receivers_of_a_queue(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    channel = unique("shared")
    frame = stream(spark, rabbitmq.url, tmp_path, channel=channel, receivers=2)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(rabbitmq.url, channel, numbers(900))
        rows = query.receive(900)
    assert sorted(values(rows)) == sorted(numbers(900))
    assert {row.partition for row in rows} == {0, 1}


# --- RabbitMQ streams


def make_stream(url: str, name: str, payloads: list[bytes]) -> None:
    """A stream that holds ``payloads``."""
    with messaging.connect(url) as m:
        made = m.subscribe(name, queue=name, queue_type="stream", stream_offset="first")
        made.ready.result(10)
        made.close().result(10)
        for payload in payloads:
            promise = m.publish(name, payload)
        if payloads:
            promise.result(10)


def test_a_stream_in_micro_batches_and_from_its_checkpoint(
    spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    name, checkpoint = unique("stream"), tmp_path / "checkpoint"
    make_stream(rabbitmq.url, name, numbers(1000))
    options = {"url": rabbitmq.url, "queue": name, "queueType": "stream", "minPartitions": "2"}
    frame = spark.readStream.format("messaging").options(**options).load()
    assert frame.dtypes == COLUMNS
    with Collected(frame, checkpoint) as query:
        rows = query.receive(1000)
        assert sorted(row.offset for row in rows) == list(range(1000))
        publish(rabbitmq.url, name, numbers(10, 1000))
        query.receive(1010)
    publish(rabbitmq.url, name, numbers(10, 1010))
    with Collected(frame, checkpoint, availableNow=True) as query:
        assert sorted(values(query.finish())) == sorted(numbers(10, 1010))


def test_several_streams_are_partitions(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    one, two, empty = unique("one"), unique("two"), unique("empty")
    make_stream(rabbitmq.url, one, numbers(30))
    make_stream(rabbitmq.url, two, numbers(40))
    make_stream(rabbitmq.url, empty, [])
    options = {"url": rabbitmq.url, "queue": f"{one},{two},{empty}", "queueType": "stream"}
    frame = spark.read.format("messaging").options(**options).load()
    rows = frame.collect()
    assert values(row for row in rows if row.partition == 0) == numbers(30)
    assert values(row for row in rows if row.partition == 1) == numbers(40)
    assert frame.collect() == rows  # the same rows again
    part = frame = (
        spark.read.format("messaging").options(**options, startingOffsets=json.dumps({one: 25, two: 35})).load()
    )
    assert part.count() == 10
    limited = spark.readStream.format("messaging").options(**options, maxRowsPerBatch=20).load()
    query = Collected(limited, tmp_path / "checkpoint", availableNow=True)
    assert len(query.finish()) == 70
    assert max(len(batch) for batch in query.batches) <= 23


def test_the_latest_of_a_stream(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("stream")
    make_stream(rabbitmq.url, name, numbers(100))
    options = {"url": rabbitmq.url, "queue": name, "queueType": "stream", "startingOffsets": "latest"}
    frame = spark.readStream.format("amqp").options(**options).load()
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(rabbitmq.url, name, numbers(5, 100))
        assert values(query.receive(5)) == numbers(5, 100)


def test_stop_leaves_nothing_behind(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    channel = unique("stop")
    frame = stream(spark, rabbitmq.url, tmp_path, channel=channel, group=channel)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(rabbitmq.url, channel, numbers(10))
        query.receive(10)
    wait_for(
        lambda: f"{channel}\t0" in rabbitmq.ctl("list_queues", "name", "consumers"), "the consumer to go", patience=20
    )
    with Collected(frame, tmp_path / "checkpoint") as query:  # the lock is free
        publish(rabbitmq.url, channel, numbers(10))
        query.receive(10)

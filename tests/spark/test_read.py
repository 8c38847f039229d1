"""The data source in a real session, with real brokers: streaming and batch, typed and plain."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql.types import StructField, StructType

from messaging.testing.brokers import Mosquitto
from messaging.testing.waiting import eventually
from pyspark_messaging.journal import RowJournal
from pyspark_messaging.read.typed import CORRUPT, MESSAGE_COLUMNS, TypedColumns
from tests.spark.harness import (
    QUERY_PATIENCE,
    Collected,
    Publisher,
    make_stream,
    numbers,
    publish,
    table,
    unique,
    values,
)
from tests.spark.journals import SOURCE, add, value
from tests.spark.readers import Driven
from tests.spark.test_typed import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from messaging.testing.brokers import RabbitMQ

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


SECRET = "a7c-hush-hush-91"


def stream(spark: SparkSession, url: str, tmp_path: Path, **options: Any) -> DataFrame:
    """A streaming read with a journal of the test's own."""
    given = {"url": url, "journalPath": str(tmp_path / "journal"), **options}
    return spark.readStream.format("messaging").options(**given).load()


def test_rows_have_the_properties_of_the_message(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel = unique("room")
    frame = stream(spark, mosquitto.url, tmp_path, channel=f"{channel}/+")
    assert frame.dtypes == COLUMNS
    before = datetime.now(UTC)
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
    assert before <= first.timestamp.astimezone(UTC) <= second.timestamp.astimezone(UTC) <= datetime.now(UTC)


@pytest.mark.slow
def test_a_killed_receiver_of_a_queue_loses_nothing_and_repeats_nothing(
    spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    def receiver() -> list[int]:
        found = []
        for children in Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread or process that has just ended
                for pid in children.read_text().split():
                    if b"streaming_source_runner" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(int(pid))
        return found

    channel, checkpoint = unique("killed"), tmp_path / "checkpoint"
    frame = stream(spark, rabbitmq.url, tmp_path, channel=channel, group=channel)
    with Collected(frame, checkpoint).ready() as first:
        publisher = Publisher(rabbitmq.url, channel)
        time.sleep(random.uniform(0, 2.5))  # sleeps: the kill comes at a random moment
        eventually(lambda: len(receiver()) == 1, "the receivers of other queries to end", patience=QUERY_PATIENCE)
        os.kill(*receiver(), signal.SIGKILL)
        eventually(lambda: not first.query.isActive, "the query to fail", patience=QUERY_PATIENCE)
    with Collected(frame, checkpoint) as second:
        second.wait(lambda: second.rows, "rows of the second query")
        confirmed = publisher.stop()
        # the sink may get a micro-batch again, with the same rows
        found = {row.offset: row.value for row in first.rows}
        second.receive(confirmed - len(found))
        second.wait(lambda: len(found | {row.offset: row.value for row in second.rows}) >= confirmed, "all rows")
    assert all(found.setdefault(row.offset, row.value) == row.value for row in second.rows)
    assert sorted(found.values()) == sorted(numbers(confirmed))
    eventually(lambda: f"{channel}\t0" in rabbitmq.ctl("list_queues", "name", "consumers"), "the consumer to go")


@pytest.mark.slow
def test_available_now_reads_all_kept_messages_and_ends(spark: SparkSession, broker: Mosquitto, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    frame = stream(spark, broker.url, tmp_path, channel="orders", availableNowQuiet="0.3", maxRowsPerBatch="300")
    Collected(frame, checkpoint, availableNow=True).finish()  # makes the session
    publish(broker.url, "orders", numbers(1000))
    query = Collected(frame, checkpoint, availableNow=True)
    assert values(query.finish()) == numbers(1000)
    assert max(len(batch) for batch in query.batches) == 300
    assert Collected(frame, checkpoint, availableNow=True).finish() == []


@pytest.mark.slow
def test_typed_columns_of_a_schema(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path, channel: str) -> None:
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


def test_a_batch_read_of_the_journal(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path, channel: str) -> None:
    with Driven(mosquitto.url, tmp_path, channel=channel).start() as query:
        publish(mosquitto.url, channel, numbers(1000))
        query.receive(1000)
        # beside the running query
        read = spark.read.format("messaging").option("journalPath", str(tmp_path))
        assert values(read.load().orderBy("offset").collect()) == numbers(1000)
    read = read.option("startingOffsets", '{"0": 100}').option("endingOffsets", '{"0": 200}').option("minPartitions", 4)
    part = read.load()
    assert part.rdd.getNumPartitions() == 4
    assert values(part.orderBy("offset").collect()) == numbers(100, 100)
    assert read.schema("value binary, offset long").load().columns == ["value", "offset"]


# --- RabbitMQ streams


@pytest.mark.slow
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


# --- refusals


@pytest.mark.slow
def test_a_batch_read_needs_a_journal(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(AnalysisException, match="InvalidOptionError: option 'journalPath' is missing"):
        spark.read.format("messaging").load().count()
    with pytest.raises(AnalysisException, match=r"JournalUnreadableError.*'journalPath'.*there is no journal"):
        spark.read.format("messaging").option("journalPath", str(tmp_path)).load().count()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """A broker that lets in ``user`` with a password."""
    passwords = tmp_path_factory.mktemp("guarded") / "passwords"
    passwords.touch()
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "user", SECRET], check=True)
    passwords.chmod(0o644)
    passwords.parent.chmod(0o755)
    with Mosquitto([f"password_file {passwords}", "allow_anonymous false"]) as broker:
        yield broker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"jurnalPath": "/x"}, r"(?s)InvalidOptionError.*jurnalpath.*did you mean 'journalPath'"),
        ({"channel": "a"}, r"(?s)InvalidOptionError.*'journalPath'.*missing"),
        ({"channel": "a", "journalPath": "{}/journal"}, "AuthenticationError"),
    ],
    ids=["load", "start", "connect"],
)
def test_a_wrong_option_or_password_fails_the_query(
    spark: SparkSession, guarded: Mosquitto, tmp_path: Path, options: dict[str, str], problem: str
) -> None:
    """One case for each way out of Spark; ``test_options`` has all wrong values."""
    given = {name: value.format(tmp_path) for name, value in options.items()}
    reader = spark.readStream.format("messaging").option("url", f"mqtt://user:wrong-{SECRET}@127.0.0.1:{guarded.port}")

    def run() -> None:
        with Collected(reader.options(**given).load(), tmp_path / "checkpoint") as query:
            query.wait(lambda: False, "the query to fail")

    with pytest.raises((AnalysisException, StreamingQueryException), match=problem) as caught:
        run()
    assert SECRET not in str(caught.value)


@pytest.mark.slow
def test_secrets_appear_nowhere(spark: SparkSession, guarded: Mosquitto, tmp_path: Path, event_log: Path) -> None:
    url = f"mqtt://user:{SECRET}@127.0.0.1:{guarded.port}"
    frame = stream(spark, url, tmp_path, channel="a")
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(url, "a", numbers(10))
        query.receive(10)
        assert SECRET not in str(query.query.explain(extended=True))
        assert SECRET not in json.dumps(query.query.lastProgress, default=str)
        assert SECRET not in frame._jdf.queryExecution().toString()
    (tmp_path / "password").write_text(SECRET + "\n")
    url = f"mqtt://user@127.0.0.1:{guarded.port}"
    frame = stream(spark, url, tmp_path, channel="a", passwordFile=str(tmp_path / "password"))
    with Collected(frame, tmp_path / "checkpoint") as query:
        publish(url.replace("user@", f"user:{SECRET}@"), "a", numbers(10, 10))
        assert values(query.receive(10)) == numbers(10, 10)
    (tmp_path / "password").unlink()
    for file in [*tmp_path.rglob("*"), *event_log.rglob("*")]:
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


@pytest.mark.slow
def test_a_damaged_journal_fails_the_task(spark: SparkSession, tmp_path: Path) -> None:
    with contextlib.closing(RowJournal.open(str(tmp_path), SOURCE)) as journal:
        add(journal.logs[0], 100)
        add(journal.logs[0])
    (segment,) = (each for each in (tmp_path / "0").iterdir() if each.name != "spare")
    data = bytearray(segment.read_bytes())
    data[data.index(value(49))] ^= 1  # not in the last frame, which could be a write that is going on
    segment.write_bytes(data)
    with pytest.raises(Exception, match=r"(?s)JournalCorruptError.*'journalPath'"):
        spark.read.format("messaging").option("journalPath", str(tmp_path)).load().collect()


@pytest.mark.slow
def test_a_parquet_table_gets_every_row_on_the_way_back_from_a_deleted_checkpoint(
    spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path, channel: str
) -> None:

    def start(name: str, **options: Any) -> StreamingQuery:
        frame = stream(spark, mosquitto.url, tmp_path, channel=channel, **options)
        writer = frame.writeStream.format("parquet").option("path", str(tmp_path / name))
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    def rows_of(name: str) -> set[bytes]:
        return {value for _, value in table(tmp_path / name)}

    def has(name: str, rows: list[bytes]) -> bool:
        query.processAllAvailable()  # of what has come from the broker
        return set(rows) <= rows_of(name)

    query = start("table")
    eventually(lambda: query.lastProgress is not None, "the query", patience=QUERY_PATIENCE)
    publish(mosquitto.url, channel, numbers(500))
    eventually(partial(has, "table", numbers(500)), "the rows", patience=QUERY_PATIENCE)
    query.stop()
    publish(mosquitto.url, channel, numbers(500, 500))
    shutil.rmtree(tmp_path / "checkpoint")
    options = {"adoptJournal": "true", "availableNowQuiet": "0.3"}
    query = start("table", **options)
    eventually(lambda: query.lastProgress is not None or not query.isActive, "the query", patience=QUERY_PATIENCE)
    publish(mosquitto.url, channel, numbers(100, 1000))  # only with the next one, Spark commits the first
    eventually(lambda: not query.isActive, "the query to fail", patience=QUERY_PATIENCE)
    assert "MicroBatchSkippedError: option 'journalPath'" in str(query.exception())
    shutil.rmtree(tmp_path / "checkpoint")
    query = start("table2", **options)
    eventually(partial(has, "table2", numbers(600, 500)), "the rows", patience=QUERY_PATIENCE)
    query.stop()
    assert rows_of("table") | rows_of("table2") == set(numbers(1100))

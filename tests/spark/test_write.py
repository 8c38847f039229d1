"""Writing: rows, their messages and failures; without Spark where that is enough, otherwise in a real session."""

from __future__ import annotations

import pickle
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema

import messaging
from messaging import Message, MessageStream
from messaging.errors import (
    AuthenticationError,
    ConnectFailedError,
    DeadlineError,
    InvalidOptionError,
    PublishRefusedError,
    UnroutableError,
    UnsupportedFeatureError,
)
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from pyspark_messaging.errors import InvalidColumnError, InvalidRowError
from pyspark_messaging.formats import AmqpDataSource, MessagingDataSource, MqttDataSource
from tests.spark.harness import QUERY_PATIENCE, publish, unique
from tests.spark.test_typed import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from messaging.testing.brokers import Mosquitto, RabbitMQ

SECRET = "s3cr3t-Wh1sper"


def rows_of(*values: Any, **columns: Sequence[Any]) -> pa.RecordBatch:
    """Rows with these values, and more columns."""
    headers = columns.pop("headers", None)
    arrays = {"value": pa.array(values, pa.binary())}
    arrays |= {name: pa.array(each, pa.string()) for name, each in columns.items()}
    if headers is not None:
        arrays["headers"] = pa.array(headers, pa.map_(pa.string(), pa.string()))
    return pa.RecordBatch.from_pydict(arrays)


def write(*batches: pa.RecordBatch, **options: Any) -> int:
    """Write ``batches`` as a task does; return the number of rows."""
    return write_all(iter(batches), batches[0].schema, **options)


def write_all(batches: Iterator[pa.RecordBatch], kind: pa.Schema | None = None, **options: Any) -> int:
    """As :func:`write`, of batches that are made when the task asks for them; by default of values alone."""
    source = MessagingDataSource({name: str(value) for name, value in options.items()})
    writer: Any = source.writer(from_arrow_schema(rows_of().schema if kind is None else kind), overwrite=False)
    return int(pickle.loads(pickle.dumps(writer)).write(batches).rows)


def received(stream: MessageStream, count: int) -> list[Message]:
    return [stream.receive(PATIENCE) for _ in range(count)]


def ids(messages: Sequence[Message]) -> list[str]:
    return [message.context.extensions["messageId"] for message in messages]


def append(frame: DataFrame, **options: Any) -> None:
    frame.write.format("messaging").options(**options).mode("append").save()


# --- rows, without Spark


def test_rows_become_messages_in_their_order(url: str, channel: str) -> None:
    with messaging.connect(url) as m, m.subscribe(channel, qos=1) as stream:
        assert write(rows_of(b"1", b"\x00\xff"), rows_of(), rows_of(b"", b"4"), url=url, channel=channel) == 4
        messages = received(stream, 4)
    assert [message.payload for message in messages] == [b"1", b"\x00\xff", b"", b"4"]
    made = [re.fullmatch(r"([0-9a-f]{32})-0-0-(\d)-[0-9a-f]{8}", each) for each in ids(messages)]
    assert [each and each[2] for each in made] == ["0", "1", "2", "3"]
    assert len({each[1] for each in made if each}) == 1


def test_columns_say_how_messages_are_sent(url: str, channel: str) -> None:
    rows = rows_of(
        b"1", b"2", b"3",
        channel=[f"{channel}/a", None, f"{channel}/a"],
        content_type=["image/png", None, None],
        correlation_id=["c-1", "c-2", None],
        reply_to=["answers/here", None, None],
        headers=[{"site": "north", "line": "é"}, None, {}],
    )  # fmt: skip
    with messaging.connect(url) as m, m.subscribe(f"{channel}/#", qos=1) as stream:
        write(rows.slice(0, 2), rows.slice(2), url=url, channel=f"{channel}/other", contentType="text/plain")
        first, second, third = (message.context for message in received(stream, 3))
    assert (first.channel, first.content_type, first.correlation_id) == (f"{channel}/a", "image/png", "c-1")
    assert first.reply_to_channel == "answers/here"
    assert first.extensions["headers"] == {"site": "north", "line": "é"}
    assert (second.channel, second.content_type, second.correlation_id) == (f"{channel}/other", "text/plain", "c-2")
    assert (second.reply_to_channel, second.extensions.get("headers") or {}) == (None, {})
    assert (third.channel, third.correlation_id, third.extensions.get("headers") or {}) == (f"{channel}/a", None, {})


def test_headers_that_a_read_adds_are_not_written(url: str, channel: str) -> None:
    told = {"message-id": "of-the-sender", "content-encoding": "gzip", "site": "north"}
    with messaging.connect(url) as m, m.subscribe(channel, qos=1) as stream:
        write(
            rows_of(b"1", b"2", headers=[told, {"message-id": "x"}]), url=url, channel=channel, messageIdPrefix="mine"
        )
        first, second = received(stream, 2)
    assert first.context.content_encoding == "gzip"
    assert dict(first.context.extensions["headers"]) == {"site": "north"}
    assert not second.context.extensions.get("headers")
    assert [each[:9] for each in ids([first, second])] == ["mine-0-0-", "mine-0-0-"]


def test_the_key_is_the_routing_key(rabbitmq: RabbitMQ) -> None:
    exchange = unique("sink")
    with messaging.connect(rabbitmq.url) as m:
        wanted = m.context_builder().channel(exchange, "b.#").build_context()
        with m.subscription.subscribe(wanted) as stream:
            write(rows_of(b"1", b"2", channel=[exchange] * 2, key=["a.1", "b.2"]), url=rabbitmq.url)
            assert stream.receive(PATIENCE).payload == b"2"


def test_the_same_rows_have_the_same_ids_and_others_have_not(url: str, channel: str) -> None:
    with messaging.connect(url) as m, m.subscribe(channel, qos=1) as stream:
        for batch in (rows_of(b"a", b"b"), rows_of(b"a", b"b"), rows_of(b"b", b"a")):
            write(batch, url=url, channel=channel, messageIdPrefix="p")
        found = ids(received(stream, 6))
    assert found[:2] == found[2:4]
    assert not set(found[:2]) & set(found[4:])  # an id that was seen must not hide a row that was not


def test_a_task_or_micro_batch_that_is_run_again_publishes_the_same_ids(
    mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real query: ``test_rows_of_a_read_can_be_written``."""
    context = object.__new__(TaskContext)
    context._partitionId = 3
    monkeypatch.setattr(TaskContext, "_taskContext", context)
    channel, rows = unique("sink"), rows_of(b"a", b"b", None)
    source = MessagingDataSource({"url": mosquitto.url, "channel": channel})
    kind = from_arrow_schema(rows.schema)
    batch: Any = source.writer(kind, overwrite=False)
    with messaging.connect(mosquitto.url) as m, m.subscribe(channel, qos=1) as stream:
        for epoch in ("0", "1"):
            context._localProperties = {"sql.streaming.queryId": "query", "streaming.sql.batchId": epoch}
            query: Any = source.streamWriter(kind, overwrite=False)  # Spark makes one for each micro-batch
            for writer in (batch, query):
                with pytest.raises(InvalidRowError, match="row 2 of partition 3"):
                    writer.write(iter([rows]))
                writer.write(iter([rows.slice(0, 2)]))
                first, second, *again = [each[:-9] for each in ids(received(stream, 4))]
                assert again == [first, second]
                prefix = f"query-{epoch}" if writer is query else f"{first[:32]}-0"
                assert [first, second] == [f"{prefix}-3-0", f"{prefix}-3-1"]


@pytest.mark.parametrize("qos", ["0", "2"])
def test_ids_travel_with_any_qos(mosquitto: Mosquitto, qos: str, channel: str) -> None:
    with messaging.connect(mosquitto.url) as m, m.subscribe(channel, qos=2) as stream:
        write(rows_of(b"a", b"b"), url=mosquitto.url, channel=channel, messageIdPrefix="p", qos=qos)
        messages = received(stream, 2)
    assert [each[:7] for each in ids(messages)] == ["p-0-0-0", "p-0-0-1"]
    assert messages[0].context.extensions["qos"] == qos


def test_without_properties_there_are_no_ids_but_in_an_envelope(mosquitto: Mosquitto, channel: str) -> None:
    old = f"{mosquitto.url}?version=3.1.1"
    with messaging.connect(mosquitto.url) as m, m.subscribe(channel, qos=1) as stream:
        write(rows_of(b"a"), url=old, channel=channel)
        assert "messageId" not in stream.receive(PATIENCE).context.extensions
    with messaging.connect(old, envelope=True) as m, m.subscribe(channel, qos=1) as stream:
        write(rows_of(b"a", b"b"), url=old, envelope="true", channel=channel, messageIdPrefix="p")
        assert [each[:7] for each in ids(received(stream, 2))] == ["p-0-0-0", "p-0-0-1"]


def test_properties_that_mqtt_3_lacks_are_refused_with_the_row(mosquitto: Mosquitto) -> None:
    batch = rows_of(b"a", b"b", headers=[None, {"site": "north"}])
    with pytest.raises(UnsupportedFeatureError, match="headers") as raised:
        write(batch, url=f"{mosquitto.url}?version=3.1.1", channel=unique("sink"))
    assert "row 1 of partition 0" in raised.value.__notes__[0]


def invalid_utf8(*raw: bytes) -> pa.Array:
    """Texts as Spark may make them, such as ``cast(X'EDA080' as string)``."""
    return pa.Array.from_buffers(pa.string(), len(raw), pa.array(raw, pa.binary()).buffers())


@table(
    "column, values, problem",
    [
        ("channel", ["good", None], "null"),
        ("channel", ["good", ""], "empty"),
        ("channel", ["good", "a/+"], "wildcard"),
        ("channel", ["good", "a\nb"], "U[+]000A"),
        ("channel", ["good", "$SYS/x"], "SYS"),
        ("channel", invalid_utf8(b"good", b"\xed\xa0\x80"), "UTF-8"),
        ("content_type", ["x/y", "x\x00"], "NUL"),
        ("correlation_id", invalid_utf8(b"good", b"\xff"), "UTF-8"),
        ("reply_to", ["a", "#"], "wildcard"),
        ("headers", [{}, {"a": None}], "null"),
        ("headers", [{}, {"": "a"}], "empty"),
        ("headers", [{}, {str(number): "x" for number in range(300)}], "too many"),
        ("value", [b"good", None], "coalesce"),
        ("value", [b"good", b"x" * 1001], "1001 bytes"),
    ],
)
def test_an_invalid_row_is_named_and_earlier_rows_are_published(
    mosquitto: Mosquitto, column: str, values: Any, problem: str
) -> None:
    columns = {"value": pa.array([b"good", b"bad"], pa.binary()), "channel": pa.array(["a", "a"])}
    kind = (
        pa.binary() if column == "value" else pa.map_(pa.string(), pa.string()) if column == "headers" else pa.string()
    )
    columns[column] = values if isinstance(values, pa.Array) else pa.array(values, kind)
    rows, ours = pa.RecordBatch.from_pydict(columns), unique("sink")
    with messaging.connect(mosquitto.url) as m, m.subscribe("#", qos=1) as stream:
        with pytest.raises(InvalidRowError, match=problem) as raised:
            write(rows.slice(0, 1), rows, url=mosquitto.url, max_message_size=1000, messageIdPrefix=ours)
        m.publish(ours, qos=1).result(PATIENCE)
        payloads = []
        while (message := stream.receive(PATIENCE)).context.channel != ours:
            if str(message.context.extensions.get("messageId")).startswith(ours):  # the broker has other channels, too
                payloads.append(message.payload)
    assert payloads == [b"good", b"good"]
    assert (raised.value.row, raised.value.column) == (2, column)


def test_a_payload_of_many_megabytes(rabbitmq: RabbitMQ) -> None:
    size = 15 if rabbitmq.version >= (4,) else 40  # RabbitMQ 4 takes up to 16 MiB
    channel, payload = unique("sink"), b"x" * (size * 2**20)
    with messaging.connect(rabbitmq.url) as m, m.subscribe(channel) as stream:
        assert write(rows_of(payload, b"y"), url=rabbitmq.url, channel=channel) == 2
        assert [len(message.payload) for message in received(stream, 2)] == [len(payload), 1]


def test_no_rows_need_no_broker() -> None:
    assert write(rows_of(), url="mqtt://127.0.0.1:1", channel="a") == 0


def test_at_most_so_many_rows_are_unconfirmed(mosquitto: Mosquitto, channel: str) -> None:
    with messaging.connect(mosquitto.url) as m, m.subscribe(channel, qos=1) as stream:
        assert (
            write(rows_of(*[b"%d" % n for n in range(1000)]), url=mosquitto.url, channel=channel, maxInFlight=1) == 1000
        )
        assert [message.payload for message in received(stream, 1000)] == [b"%d" % n for n in range(1000)]


def test_client_ids_never_clash(mosquitto: Mosquitto) -> None:
    # the second attempt of a task may begin before the broker knows that the first is gone
    with messaging.connect(mosquitto.url, client_id="writer") as m:
        assert write(rows_of(b"a"), url=mosquitto.url, channel="a", client_id="writer") == 1
        assert m.connection_state.value.name == "connected"
    assert "as writer-" in mosquitto.log()


# --- answers of the broker


def test_a_mandatory_message_without_a_queue_fails_the_task(rabbitmq: RabbitMQ) -> None:
    options = {"url": rabbitmq.url, "channel": unique("sink")}
    assert write(rows_of(b"a"), **options) == 1
    with pytest.raises(UnroutableError) as raised:
        write(rows_of(b"a"), **options, **{"extension.mandatory": "true"})
    assert "row 0 of partition 0" in raised.value.__notes__[0]


def test_a_message_that_the_broker_refuses_fails_the_task(rabbitmq: RabbitMQ) -> None:
    exchange = unique("sink")
    with pytest.raises(PublishRefusedError) as raised:
        write(rows_of(*[b"a"] * 600, channel=[exchange] * 600, key=["k"] * 600), url=rabbitmq.url,
              **{"extension.autocreate": "false"})  # fmt: skip
    assert "row 0 of partition 0" in raised.value.__notes__[0]


@table("scheme", ["mqtt", "amqp"])
def test_an_unreachable_broker_fails_the_task_in_time(scheme: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ConnectFailedError, match="refused"):
        write(rows_of(b"a"), url=f"{scheme}://127.0.0.1:1", channel="a", timeout=0.5)
    assert time.monotonic() - begun < PATIENCE


def test_a_refused_connection_is_not_retried(rabbitmq: RabbitMQ) -> None:
    begun = time.monotonic()
    with pytest.raises(AuthenticationError) as raised:
        write(rows_of(b"a"), url=f"amqp://guest@127.0.0.1:{rabbitmq.port}/", password=SECRET, channel="a")
    assert time.monotonic() - begun < PATIENCE
    assert SECRET not in repr(raised.value)


def test_unconfirmed_rows_fail_when_the_broker_stops(broker: Mosquitto) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield rows_of(*[b"x"] * 300)
        broker.kill()
        yield rows_of(*[b"x"] * 300)

    begun = time.monotonic()
    with pytest.raises(DeadlineError) as raised:
        write_all(batches(), url=broker.url, channel="a", timeout=1, close_timeout=0.1)
    assert time.monotonic() - begun < PATIENCE
    assert re.search(r"row \d+ of partition 0", raised.value.__notes__[0])


def test_a_lost_connection_loses_no_row(rabbitmq: RabbitMQ, channel: str) -> None:
    rows = [b"%d" % number for number in range(6000)]
    with (
        messaging.connect(rabbitmq.url) as m,
        m.subscribe(channel, queue=channel, qos=1) as stream,
        Proxy(rabbitmq.host, rabbitmq.port) as proxy,
    ):

        def batches() -> Iterator[pa.RecordBatch]:
            yield rows_of(*rows[:3000])
            proxy.sever()
            yield rows_of(*rows[3000:])

        assert write_all(batches(), url=rabbitmq.url_at("127.0.0.1", proxy.port), channel=channel) == len(rows)
        missing = set(rows)
        while missing:
            missing.discard(stream.receive(PATIENCE).payload)


def test_the_password_file_is_read_by_the_task(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    file = tmp_path / "password"
    options = {"url": f"amqp://guest@127.0.0.1:{rabbitmq.port}/", "passwordFile": file, "channel": unique("sink")}
    with pytest.raises(InvalidOptionError, match="passwordFile"):
        write(rows_of(b"a"), **options)
    file.write_text("guest\n")
    assert write(rows_of(b"a"), **options) == 1


# --- columns and options


@table(
    "columns, problem",
    [
        ("value string, chanel string", "did you mean 'channel'"),
        ("value string, Channel string", "did you mean 'channel'"),
        ("value string, temperature double", "unknown column 'temperature'; known: value, channel, key"),
        ("channel string", "'value' is missing"),
        ("value int", "'value' must be binary or string, not int"),
        ("value string, channel int", "'channel' must be string, not int"),
        ("value string, headers map<string,int>", "must be map<string,string>, not map<string,int>"),
        ("value string, headers array<string>", "must be map<string,string>"),
        ("value string, value string", "twice"),
    ],
)
def test_unknown_columns_are_refused_before_the_first_task(columns: str, problem: str) -> None:
    with pytest.raises(InvalidColumnError, match=re.escape(problem)):
        writer_of(columns, channel="a")


@table(
    "columns",
    [
        "value binary",
        "value string, channel string, key string, headers map<string,string>",
        "value binary, partition int, offset bigint, timestamp timestamp",
        "offset string, value varchar(10)",
    ],
)
def test_columns_that_messages_have(columns: str) -> None:
    writer_of(columns, channel="a")


def writer_of(columns: str, source: Any = MessagingDataSource, **options: str) -> Any:
    return source({"url": "amqp://localhost", **options}).writer(schema_of(columns), overwrite=False)


@table(
    "option, value, problem",
    [
        ("url", "memory://x", "within one process"),
        ("url", "amqp://", "'url'"),
        ("url", "nonsense", "'url'"),
        ("channel", "a/#", "wildcard"),
        ("qos", "2", "AMQP has 0 and 1"),
        ("maxInFlight", "0", "integer from 1"),
        ("timeout", "-1", "seconds above 0"),
        ("messageIdPrefix", "x" * 256, "at most"),
        ("messageIdPrefix", "a\nb", "U+000A"),
        ("chanell", "a", "did you mean 'channel'"),
        ("outbox_size", "5", "maxInFlight"),
        ("extension.priority", "99", "extension.priority"),
        ("extension.timetolive", "soon", "extension.timeToLive"),
        ("extension.headers", "{}", "column 'headers'"),
        ("extension.messageid", "x", "messageIdPrefix"),
        ("extension.queue", "x", "no extension for publishing"),
        ("extension.speed", "x", "known: "),
        ("passwordFile", "/x", "there is a password already"),
    ],
)
def test_contradictory_options_are_refused_before_the_first_task(option: str, value: str, problem: str) -> None:
    given = {"channel": "a", "url": f"amqp://u:{SECRET}@localhost", option: value}
    with pytest.raises(InvalidOptionError, match=re.escape(problem)) as raised:
        writer_of("value string", **given)
    assert SECRET not in str(raised.value)


@table("option", ["clean_start", "session_expiry"])
def test_tasks_have_no_sessions(option: str) -> None:
    value = {"clean_start": "false", "session_expiry": "60"}[option]
    given = {option: value, "client_id": "a"}
    with pytest.raises(InvalidOptionError, match=option):
        writer_of("value string", url="mqtt://localhost", channel="a", **given)


def test_a_write_without_a_channel_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="'channel' is missing"):
        writer_of("value string")


def test_each_format_takes_its_own_urls() -> None:
    writer_of("value string", AmqpDataSource, channel="a")
    with pytest.raises(InvalidOptionError, match="format 'mqtt'"):
        writer_of("value string", MqttDataSource, channel="a")


def test_modes_that_take_messages_back_are_refused() -> None:
    source = MessagingDataSource({"url": "amqp://localhost", "channel": "a"})
    fields = schema_of("value string")
    with pytest.raises(InvalidOptionError, match="mode 'overwrite'") as raised:
        source.writer(fields, overwrite=True)
    assert raised.value.option == "mode"
    with pytest.raises(InvalidOptionError, match="outputMode 'complete'"):
        source.streamWriter(fields, overwrite=True)


def test_a_writer_shows_no_secrets() -> None:
    writer = writer_of(
        "value string", channel="a", url=f"amqp://u:{SECRET}@localhost?cafile=/x".replace("?cafile=/x", "")
    )
    assert SECRET not in repr(writer)
    assert SECRET not in repr(vars(writer))


# --- with Spark


@pytest.mark.slow
def test_a_frame_is_published(spark: SparkSession, mosquitto: Mosquitto, channel: str) -> None:
    frame = spark.range(0, 25_000, 1, 3).selectExpr("cast(id as string) value", f"'{channel}' channel", "id as offset")
    with messaging.connect(mosquitto.url) as m, m.subscribe(channel, qos=1) as stream:
        append(frame.where("offset < 8000 or offset > 20000"), url=mosquitto.url)  # nothing of the second partition
        messages = received(stream, 8000 + 4999)
        assert append(frame.limit(0), url=mosquitto.url) is None
    assert Counter(int(message.payload) for message in messages) == Counter([*range(8000), *range(20_001, 25_000)])
    assert len(set(ids(messages))) == len(messages)
    parts = {each.split("-")[2] for each in ids(messages)}
    assert parts == {"0", "2"}
    first = [
        int(message.payload) for message in messages if message.context.extensions["messageId"].split("-")[2] == "0"
    ]
    assert first == list(range(8000))


@pytest.mark.slow
def test_errors_come_out_of_spark_as_they_are(spark: SparkSession, mosquitto: Mosquitto) -> None:
    frame = spark.range(3).selectExpr("cast(id as string) value", "if(id = 2, null, 'a') channel")
    with pytest.raises(PySparkException, match="InvalidOptionError: mode 'overwrite'"):
        frame.write.format("messaging").options(url=mosquitto.url).mode("overwrite").save()
    with pytest.raises(PySparkException, match="InvalidColumnError: unknown column 'speed'"):
        append(frame.selectExpr("value", "1 speed"), url=mosquitto.url)
    with pytest.raises(PySparkException, match="InvalidOptionError: unknown option 'kanal'"):
        append(frame, url=mosquitto.url, kanal="x")
    with pytest.raises(PySparkException, match=r"InvalidRowError: row 0 of partition 0 .*'channel': is null"):
        append(frame.where("id = 2").coalesce(1), url=mosquitto.url)


@pytest.mark.slow
def test_no_secret_shows_anywhere(spark: SparkSession, rabbitmq: RabbitMQ, event_log: Path) -> None:
    frame = spark.range(2).selectExpr("cast(id as string) value", "'a' channel")
    with pytest.raises(PySparkException, match="AuthenticationError") as raised:
        append(frame.coalesce(1), url=f"amqp://guest:{SECRET}@127.0.0.1:{rabbitmq.port}/")
    assert SECRET not in str(raised.value)
    plans = [path.read_bytes() for path in event_log.rglob("*") if path.is_file()]
    assert any(b"AppendData" in plan for plan in plans)
    assert not any(SECRET.encode() in plan for plan in plans)


def test_rows_of_a_read_can_be_written(
    spark: SparkSession, mosquitto: Mosquitto, rabbitmq: RabbitMQ, tmp_path: Path, channel: str
) -> None:
    frame = (
        spark.readStream.format("mqtt")
        .options(url=mosquitto.url, channel=f"{channel}/#", journalPath=str(tmp_path / "journal"))
        .load()
    )
    with messaging.connect(rabbitmq.url) as m, m.subscribe(f"{channel}/#", qos=1) as stream:
        writer = frame.writeStream.format("amqp").options(
            url=rabbitmq.url, checkpointLocation=str(tmp_path / "checkpoint")
        )
        query = writer.trigger(processingTime="200 milliseconds").start()
        try:
            eventually(lambda: query.lastProgress is not None or not query.isActive, patience=QUERY_PATIENCE)
            publish(
                mosquitto.url, f"{channel}/a", [b"%d" % number for number in range(500)],
                content_type="x/y", content_encoding="gzip", correlation_id="c", reply_to="r", headers={"h": "1"},
            )  # fmt: skip
            messages = received(stream, 500)
        finally:
            query.stop()
        assert query.exception() is None
    assert sorted(int(message.payload) for message in messages) == list(range(500))
    context = messages[0].context
    assert (context.channel, context.content_type, context.content_encoding) == (f"{channel}/a", "x/y", "gzip")
    assert (context.correlation_id, context.reply_to_channel) == ("c", "r")
    assert dict(context.extensions["headers"]) == {"h": "1"}
    assert all(each.startswith(f"{query.id}-") for each in ids(messages))

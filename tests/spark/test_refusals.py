"""Refusals through Spark: errors name the class, the option and the remedy; queries do not hang or show secrets."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

from adapters.spark.errors import JournalLockedError
from adapters.spark.journal import Journal, Source, folders
from tests.brokers import Mosquitto, RabbitMQ, free_port
from tests.spark.harness import Collected, numbers, publish, values, wait_for
from tests.spark.readers import Driven
from tests.spark.test_read import make_stream, stream, unique

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

SECRET = "a7c-hush-hush-91"


def failure(spark: SparkSession, tmp_path: Path, **options: Any) -> str:
    """The text of the error of a streaming read, wherever it comes up."""
    started = time.monotonic()

    def run() -> None:
        reader = spark.readStream.format(options.pop("format", "messaging")).options(**options)
        with Collected(reader.load(), tmp_path / "checkpoint") as query:
            wait_for(lambda: not query.query.isActive, "the query to fail")
            query.check()

    with pytest.raises((AnalysisException, StreamingQueryException)) as caught:
        run()
    assert time.monotonic() - started < 40
    return str(caught.value)


def failed(frame: DataFrame, tmp_path: Path) -> str:
    """Continue a query from its checkpoint until it fails; return the text of the error."""
    query = Collected(frame, tmp_path / "checkpoint")
    wait_for(lambda: not query.query.isActive, "the query to fail")
    return str(query.query.exception())


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ["InvalidOptionError", "'url'", "mqtt://host"]),
        ({"url": "mqtt://h", "format": "amqp"}, ["InvalidOptionError", "'url'", "amqp"]),
        ({"url": "mqtt://h", "jurnalPath": "/x"}, ["InvalidOptionError", "jurnalpath", "did you mean 'journalPath'"]),
        ({"url": "mqtt://h", "channel": "a"}, ["InvalidOptionError", "'journalPath'", "missing"]),
        ({"url": "mqtt://h", "model": "nothing:Here"}, ["InvalidOptionError", "model"]),
    ],
    ids=lambda value: next(reversed(value), "nothing") if isinstance(value, dict) else "",
)
def test_wrong_options(spark: SparkSession, tmp_path: Path, options: dict[str, str], texts: list[str]) -> None:
    """One case for each way out of Spark; ``test_options`` has all wrong values."""
    text = failure(spark, tmp_path, **options)
    for each in texts:
        assert each in text


def test_a_batch_read_needs_a_journal(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(AnalysisException, match="InvalidOptionError: option 'journalPath' is missing"):
        spark.read.format("messaging").load().count()
    with pytest.raises(AnalysisException, match=r"JournalUnreadableError.*'journalPath'.*there is no journal"):
        spark.read.format("messaging").option("journalPath", str(tmp_path)).load().count()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """A broker that lets in ``user`` with a password."""
    import subprocess

    passwords = tmp_path_factory.mktemp("guarded") / "passwords"
    passwords.touch()
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "user", SECRET], check=True)
    passwords.chmod(0o644)
    passwords.parent.chmod(0o755)
    with Mosquitto([f"password_file {passwords}", "allow_anonymous false"]) as broker:
        yield broker


def test_a_wrong_password(spark: SparkSession, guarded: Mosquitto, tmp_path: Path) -> None:
    url = f"mqtt://user:wrong-{SECRET}@127.0.0.1:{guarded.port}"
    text = failure(spark, tmp_path, url=url, channel="a", journalPath=str(tmp_path / "journal"))
    assert "AuthenticationError" in text
    assert SECRET not in text


def test_a_wrong_password_of_rabbitmq(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    options = {"url": f"amqp://127.0.0.1:{rabbitmq.port}", "username": "guest", "password": f"no-{SECRET}"}
    text = failure(spark, tmp_path, **options, channel="a", journalPath=str(tmp_path / "journal"))
    assert "AuthenticationError" in text
    text = failure(spark, tmp_path / "2", **options, queue="a", queueType="stream")
    assert "AuthenticationError" in text
    assert SECRET not in text


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


def test_an_unreachable_broker_fails_the_query(spark: SparkSession, tmp_path: Path) -> None:
    url = f"mqtt://127.0.0.1:{free_port()}"
    text = failure(spark, tmp_path, url=url, channel="a", journalPath=str(tmp_path / "journal"))
    assert "ConnectFailedError" in text


def test_a_missing_queue_or_stream_fails_the_query(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("missing")
    options = {"url": rabbitmq.url, "queue": name}
    text = failure(
        spark, tmp_path, **options, **{"extension.autocreate": "false"}, journalPath=str(tmp_path / "journal")
    )
    assert "SubscriptionRefusedError" in text
    assert name in text
    text = failure(spark, tmp_path / "2", **options, queueType="stream")
    assert "SubscriptionRefusedError" in text
    assert name in text


def test_a_queue_that_is_deleted_ends_the_query_when_all_is_processed(
    spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    name = unique("deleted")
    frame = stream(spark, rabbitmq.url, tmp_path, queue=name)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(rabbitmq.url, name, numbers(100))
        query.receive(100)
        rabbitmq.ctl("delete_queue", name)
        wait_for(lambda: not query.query.isActive, "the query to end")
        assert "SubscriptionRefusedError" in str(query.query.exception())


def test_a_journal_in_use(mosquitto: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Spark: a query waits 15 seconds for one that is stopping, and in its process that cannot be set."""
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.2)
    path = tmp_path / "journal"
    held = Journal.open(str(path), Source("mqtt://127.0.0.1:1", ["a"], None, "1", 1))
    with (
        contextlib.closing(held),
        Driven(mosquitto.url, path, channel="a") as query,
        pytest.raises(JournalLockedError, match=r"'journalPath'.*another query is using this journal"),
    ):
        query.start()


def test_a_journal_of_other_channels(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    Journal.open(path, Source("mqtt://127.0.0.1:1", ["b"], None, "1", 1)).close()
    text = failure(spark, tmp_path, url=mosquitto.url, channel="a", journalPath=path)
    assert "JournalMismatchError" in text
    assert "'journalPath'" in text
    assert "channels was ['b'] and is ['a']" in text


def test_a_journal_of_another_query(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel = unique("another")
    frame = stream(spark, mosquitto.url, tmp_path, channel=channel)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(mosquitto.url, channel, numbers(10))
        query.receive(10)
        publish(mosquitto.url, channel, numbers(10, 10))
        query.receive(20)
    # without its checkpoint
    options = {"url": mosquitto.url, "channel": channel, "journalPath": str(tmp_path / "journal")}
    text = failure(spark, tmp_path / "2", **options)
    assert "JournalMismatchError" in text
    assert "adoptJournal" in text
    # with another journal than that of the checkpoint
    other = stream(spark, mosquitto.url, tmp_path / "3", channel=channel)
    assert "DataLossError" in failed(other, tmp_path)
    # adopted
    adopted = stream(spark, mosquitto.url, tmp_path, channel=channel, adoptJournal="true", startingOffsets="latest")
    with Collected(adopted, tmp_path / "checkpoint4").ready() as query:
        publish(mosquitto.url, channel, numbers(5, 20))
        assert values(query.receive(5)) == numbers(5, 20)
    # and now it is that query's
    assert "JournalMismatchError" in failed(frame, tmp_path)


def test_lost_rows_fail_the_query(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("gone")
    make_stream(rabbitmq.url, name, numbers(10))
    options = {"url": rabbitmq.url, "queue": name, "queueType": "stream"}
    frame = spark.readStream.format("messaging").options(**options).load()
    with Collected(frame, tmp_path / "checkpoint") as query:
        query.receive(10)
    rabbitmq.ctl("delete_queue", name)
    make_stream(rabbitmq.url, name, numbers(5))  # its offsets begin again
    assert "DataLossError" in failed(frame, tmp_path)


def test_a_damaged_journal_fails_the_task(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel = unique("damaged")
    frame = stream(spark, mosquitto.url, tmp_path, channel=channel)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(mosquitto.url, channel, [b"the first of all"])
        query.receive(1)
        publish(mosquitto.url, channel, numbers(100))
        query.receive(101)
    (segment,) = (tmp_path / "journal" / "0").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.index(b"the first of all")] ^= 1  # not in the last frame, which could be a write that is going on
    segment.write_bytes(data)
    read = spark.read.format("messaging").option("journalPath", str(tmp_path / "journal"))
    with pytest.raises(Exception, match=r"JournalCorruptError") as caught:
        read.load().collect()
    assert "'journalPath'" in str(caught.value)


def test_a_checkpoint_beyond_the_journal(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    """An older copy of the journal: new messages would get offsets that Spark has processed."""
    channel = unique("older")
    frame = stream(spark, mosquitto.url, tmp_path, channel=channel)
    with Collected(frame, tmp_path / "checkpoint").ready() as query:
        publish(mosquitto.url, channel, numbers(10))
        query.receive(10)
        shutil.copytree(tmp_path / "journal", tmp_path / "copy")
        publish(mosquitto.url, channel, numbers(10, 10))
        query.receive(20)
    shutil.rmtree(tmp_path / "journal")
    (tmp_path / "copy").rename(tmp_path / "journal")
    assert "DataLossError: option 'journalPath'" in failed(frame, tmp_path)
    going_on = stream(spark, mosquitto.url, tmp_path, channel=channel, failOnDataLoss="false")
    with Collected(going_on, tmp_path / "checkpoint").ready() as query:
        publish(mosquitto.url, channel, numbers(5, 20))
        assert values(query.receive(5)) == numbers(5, 20)


def test_starting_offsets_out_of_range_are_refused(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    options = {"url": mosquitto.url, "channel": unique("start"), "journalPath": str(tmp_path / "journal")}
    text = failure(spark, tmp_path, **options, startingOffsets='{"0": 5}')
    assert "InvalidOptionError: option 'startingOffsets': partition 0 has offsets 0 to 0, and not 5" in text
    text = failure(spark, tmp_path / "2", **options, startingOffsets='{"7": 0}')
    assert "InvalidOptionError: option 'startingOffsets': 7 is no partition" in text

"""Refusals: errors name the class, the option and the remedy. Without Spark."""

from __future__ import annotations

import contextlib
import json
import shutil
from typing import TYPE_CHECKING

import pytest

from adapters.spark.errors import DataLossError, JournalLockedError, JournalMismatchError
from adapters.spark.journal import Journal, Source, folders
from adapters.spark.read import rabbitmq_streams
from messaging.errors import AuthenticationError, ConnectFailedError, InvalidOptionError, SubscriptionRefusedError
from messaging.testing.brokers import Mosquitto, RabbitMQ, free_port
from tests.spark.harness import make_stream, numbers, publish, unique, wait_for
from tests.spark.readers import Driven

if TYPE_CHECKING:
    from pathlib import Path


SECRET = "a7c-hush-hush-91"


def refused(
    kind: type[Exception], match: str, url: str, journal: Path | None, *checkpoint: list[str], **how: str
) -> None:
    """A query, continued or not, fails when it starts."""
    with Driven(url, journal, *map(list, checkpoint), **how) as query, pytest.raises(kind, match=match):
        query.start()


def test_a_wrong_password_of_rabbitmq(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    url = f"amqp://guest:no-{SECRET}@127.0.0.1:{rabbitmq.port}"
    for journal, options in ((tmp_path, {"channel": "a"}), (None, {"queue": "a", "queueType": "stream"})):
        with Driven(url, journal, **options) as query, pytest.raises(AuthenticationError) as caught:
            query.start()
        assert SECRET not in repr(caught.value) + str(caught.value)


def test_an_unreachable_broker_fails_the_query(tmp_path: Path) -> None:
    refused(ConnectFailedError, "refused", f"mqtt://127.0.0.1:{free_port()}", tmp_path, channel="a")


def test_a_missing_queue_stream_or_extension_fails_the_query(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("missing")
    refused(SubscriptionRefusedError, name, rabbitmq.url, tmp_path, queue=name, **{"extension.autocreate": "false"})
    refused(SubscriptionRefusedError, name, rabbitmq.url, None, queue=name, queueType="stream")
    refused(InvalidOptionError, "nonsense", rabbitmq.url, tmp_path / "2", queue="q", **{"extension.nonsense": "1"})


def test_a_queue_that_is_deleted_ends_the_query_when_all_is_processed(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("deleted")
    with Driven(rabbitmq.url, tmp_path, queue=name).start() as query:
        publish(rabbitmq.url, name, numbers(100))
        wait_for(lambda: json.loads(query.latest())["offsets"] == {"0": 100}, "all to be stored")
        rabbitmq.ctl("delete_queue", name)
        with pytest.raises(SubscriptionRefusedError):
            wait_for(lambda: query.micro_batch() and False, "the query to end")
        assert query.values == numbers(100)


def test_a_journal_in_use(mosquitto: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.2)
    with contextlib.closing(Journal.open(str(tmp_path), Source("mqtt://127.0.0.1:1", ["a"], None, "1", 1))):
        refused(JournalLockedError, r"'journalPath'.*is using this journal", mosquitto.url, tmp_path, channel="a")


def test_a_journal_of_other_channels(mosquitto: Mosquitto, tmp_path: Path) -> None:
    Journal.open(str(tmp_path), Source("mqtt://127.0.0.1:1", ["b"], None, "1", 1)).close()
    problem = r"'journalPath'.*channels was \['b'\] and is \['a'\]"
    refused(JournalMismatchError, problem, mosquitto.url, tmp_path, channel="a")


def test_a_journal_of_another_query(mosquitto: Mosquitto, tmp_path: Path) -> None:
    url, channel, journal = mosquitto.url, unique("another"), tmp_path / "journal"
    with Driven(url, journal, channel=channel).start() as query:
        for start in (0, 10):
            publish(url, channel, numbers(10, start))
            query.receive(start + 10)
    refused(JournalMismatchError, "adoptJournal", url, journal, channel=channel)  # without its checkpoint
    refused(
        DataLossError, "journalPath", url, tmp_path / "other", query.checkpoint, channel=channel
    )  # with another journal
    adopting = {"adoptJournal": "true", "startingOffsets": "latest"}
    with Driven(url, journal, channel=channel, **adopting).start() as adopted:
        publish(url, channel, numbers(5, 20))
        assert adopted.receive(5) == numbers(5, 20)
    refused(
        JournalMismatchError, "made it its own", url, journal, query.checkpoint, channel=channel
    )  # now it is that query's


def test_lost_rows_of_a_stream_fail_the_query(rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rabbitmq_streams, "CERTAIN_SECONDS", 0.5)
    name = unique("gone")
    make_stream(rabbitmq.url, name, numbers(10))
    options = {"queue": name, "queueType": "stream"}
    with Driven(rabbitmq.url, None, **options).start() as query:
        query.receive(10)
    rabbitmq.ctl("delete_queue", name)
    make_stream(rabbitmq.url, name, numbers(5))  # its offsets begin again
    refused(DataLossError, name, rabbitmq.url, None, query.checkpoint, **options)


def test_a_checkpoint_beyond_the_journal(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """An older copy of the journal: new messages would get offsets that Spark has processed."""
    url, channel, journal = mosquitto.url, unique("older"), tmp_path / "journal"
    with Driven(url, journal, channel=channel).start() as query:
        publish(url, channel, numbers(10))
        query.receive(10)
        shutil.copytree(journal, tmp_path / "copy")
        publish(url, channel, numbers(10, 10))
        query.receive(20)
    shutil.rmtree(journal)
    (tmp_path / "copy").rename(journal)
    refused(DataLossError, "option 'journalPath'", url, journal, query.checkpoint, channel=channel)
    with Driven(url, journal, query.checkpoint, channel=channel, failOnDataLoss="false").start() as going_on:
        publish(url, channel, numbers(5, 20))
        assert going_on.receive(5) == numbers(5, 20)


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [('{"0": 5}', "partition 0 has offsets 0 to 0, and not 5"), ('{"7": 0}', "7 is no partition")],
)
def test_starting_offsets_out_of_range_are_refused(
    mosquitto: Mosquitto, tmp_path: Path, offsets: str, problem: str
) -> None:
    given = {"channel": unique("start"), "startingOffsets": offsets}
    refused(InvalidOptionError, f"option 'startingOffsets': {problem}", mosquitto.url, tmp_path, **given)

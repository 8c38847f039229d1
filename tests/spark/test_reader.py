"""The readers with real brokers, driven as Spark drives them: micro-batches, refusals, faults and sinks that skip."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import messaging
from messaging.errors import AuthenticationError, ConnectFailedError, InvalidOptionError, SubscriptionRefusedError
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import eventually, results
from pyspark_messaging.errors import (
    DataLossError,
    JournalError,
    JournalFullError,
    JournalLockedError,
    JournalMismatchError,
    MicroBatchSkippedError,
)
from pyspark_messaging.journal import JournalSource, RowJournal, folders
from pyspark_messaging.journal.folders import LocalFolder
from pyspark_messaging.read import journaled, rabbitmq_streams
from pyspark_messaging.read.typed import CORRUPT
from tests.disks import ballast
from tests.spark.harness import make_queue, make_stream, numbers, publish, unique
from tests.spark.journals import value
from tests.spark.readers import Driven, batch_read, processed, refused


class Reading(BaseModel):
    device: str
    celsius: float


def test_available_now_of_a_queue(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    queue = unique("work")
    with messaging.connect(rabbitmq.url) as m:  # a queue that is there already, and holds something
        make_queue(m, queue, queue_type="quorum")
        results([m.publish(queue, number) for number in numbers(1000)])
    query = Driven(rabbitmq.url, tmp_path, queue=queue, queueType="quorum", availableNowQuiet="0.3")
    assert query.finish() == numbers(1000)


def test_two_queries_at_once_get_all_of_it_each(mosquitto: Mosquitto, tmp_path: Path, channel: str) -> None:
    with (
        Driven(mosquitto.url, tmp_path / "one", channel=f"{channel}/#").start() as first,
        Driven(mosquitto.url, tmp_path / "two", channel=f"{channel}/+").start() as second,
    ):
        publish(mosquitto.url, f"{channel}/b", numbers(300))
        assert first.receive(300) == second.receive(300) == numbers(300)


def test_several_channels(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("several")
    with Driven(rabbitmq.url, tmp_path, channel=f"{name}/a, {name}/b/+").start() as query:
        for level, payload in (("a", b"1"), ("d", b"3"), ("b/c", b"2")):
            publish(rabbitmq.url, f"{name}/{level}", [payload])
        found = {(row["channel"], row["value"]) for row in query.receive_rows(2)}
        assert found == {(f"{name}/a", b"1"), (f"{name}/b/c", b"2")}


def test_typed_columns_of_a_model(rabbitmq: RabbitMQ, tmp_path: Path, channel: str) -> None:
    with Driven(rabbitmq.url, tmp_path, channel=channel, model=f"{Reading.__module__}:Reading").start() as query:
        publish(rabbitmq.url, channel, [Reading(device="a", celsius=1.5).model_dump_json(), b"nothing"])
        good, bad = query.receive_rows(2)
    assert list(good)[:2] == ["device", "celsius"]
    assert (good["device"], good["celsius"], good[CORRUPT], good["_channel"]) == ("a", 1.5, None, channel)
    assert (bad["device"], bad["celsius"], bad[CORRUPT]) == (None, None, "nothing")


def test_limits_of_a_micro_batch(broker: Mosquitto, tmp_path: Path) -> None:
    first = processed(numbers(1), broker.url, tmp_path, channel="a")
    publish(broker.url, "a", [b"x" * 1000 for _ in range(2000)])
    limits = {"maxRowsPerBatch": "900", "maxBytesPerBatch": "200k", "availableNowQuiet": "0.3"}
    query = Driven(broker.url, tmp_path, first.checkpoint, channel="a", **limits)
    assert len(query.finish()) == 2000
    sizes = [len(batch) for batch in query.batches]
    assert max(sizes) <= 900
    assert len(sizes) >= 5


def test_processed_segments_are_deleted(mosquitto: Mosquitto, tmp_path: Path, channel: str) -> None:
    with Driven(mosquitto.url, tmp_path, channel=channel, journalBytes="4m", minPartitions="2").start() as query:
        for batch in range(12):  # three times the limit of the journal
            publish(mosquitto.url, channel, [b"x" * 10_000 for _ in range(100)])
            query.receive(100 * (batch + 1))
    assert sum(file.stat().st_size for file in (tmp_path / "0").iterdir()) < 8 * 2**20


@pytest.mark.parametrize(("broker_name", "receivers"), [("mosquitto", 3), ("rabbitmq", 2)])
def test_several_receivers_share_the_work(
    broker_name: str, receivers: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url, channel = request.getfixturevalue(broker_name).url, unique("shared")
    with Driven(url, tmp_path, channel=f"{channel}/#", receivers=str(receivers)).start() as query:
        publish(url, f"{channel}/a", numbers(900))
        assert sorted(query.receive(900)) == sorted(numbers(900))
    for partition in range(receivers):
        mine = [row["offset"] for row in query.rows if row["partition"] == partition]
        assert mine == list(range(len(mine))) != []


def test_the_latest_of_a_stream(rabbitmq: RabbitMQ) -> None:
    name = unique("stream")
    make_stream(rabbitmq.url, name, numbers(100))
    with Driven(rabbitmq.url, None, queue=name, queueType="stream", startingOffsets="latest").start() as query:
        publish(rabbitmq.url, name, numbers(5, 100))
        assert query.receive(5) == numbers(5, 100)


def test_several_streams_are_partitions(rabbitmq: RabbitMQ) -> None:
    one, two, empty = unique("one"), unique("two"), unique("empty")
    for name, count in ((one, 30), (two, 40), (empty, 0)):
        make_stream(rabbitmq.url, name, numbers(count))
    options = {"url": rabbitmq.url, "queue": f"{one},{two},{empty}", "queueType": "stream"}
    rows = batch_read(**options)
    assert [row["value"] for row in rows if row["partition"] == 0] == numbers(30)
    assert [row["value"] for row in rows if row["partition"] == 1] == numbers(40)
    assert batch_read(**options) == rows  # the same rows again
    assert len(batch_read(**options, startingOffsets=json.dumps({one: 25, two: 35}))) == 10
    query = Driven(journal=None, maxRowsPerBatch="20", **options)
    assert len(query.finish()) == 70
    assert max(len(batch) for batch in query.batches) <= 23


# --- refusals: errors name the class, the option and the remedy


SECRET = "a7c-hush-hush-91"


def test_a_wrong_password_of_rabbitmq(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    url = f"amqp://guest:no-{SECRET}@127.0.0.1:{rabbitmq.port}"
    for journal, options in ((tmp_path, {"channel": "a"}), (None, {"queue": "a", "queueType": "stream"})):
        with Driven(url, journal, **options) as query, pytest.raises(AuthenticationError) as caught:
            query.start()
        assert SECRET not in repr(caught.value) + str(caught.value)


def test_an_unreachable_broker_fails_the_query(tmp_path: Path) -> None:
    refused(ConnectFailedError, "refused", "mqtt://127.0.0.1:1", tmp_path, channel="a")


def test_a_missing_queue_stream_or_extension_fails_the_query(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("missing")
    refused(SubscriptionRefusedError, name, rabbitmq.url, tmp_path, queue=name, **{"extension.autocreate": "false"})
    refused(SubscriptionRefusedError, name, rabbitmq.url, None, queue=name, queueType="stream")
    refused(InvalidOptionError, "nonsense", rabbitmq.url, tmp_path / "2", queue="q", **{"extension.nonsense": "1"})


def test_a_queue_that_is_deleted_ends_the_query_when_all_is_processed(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("deleted")
    with Driven(rabbitmq.url, tmp_path, queue=name).start() as query:
        publish(rabbitmq.url, name, numbers(100))
        eventually(lambda: json.loads(query.latest())["offsets"] == {"0": 100}, "all to be stored")
        rabbitmq.ctl("delete_queue", name)
        with pytest.raises(SubscriptionRefusedError):
            eventually(lambda: query.micro_batch() and False, "the query to end")
        assert query.values == numbers(100)


def test_a_journal_in_use(mosquitto: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.2)
    with contextlib.closing(RowJournal.open(str(tmp_path), JournalSource("mqtt://127.0.0.1:1", ["a"], None, "1", 1))):
        refused(JournalLockedError, r"'journalPath'.*is using this journal", mosquitto.url, tmp_path, channel="a")


def test_a_journal_of_other_channels(mosquitto: Mosquitto, tmp_path: Path) -> None:
    RowJournal.open(str(tmp_path), JournalSource("mqtt://127.0.0.1:1", ["b"], None, "1", 1)).close()
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


@table(
    "offsets, problem", [('{"0": 5}', "partition 0 has offsets 0 to 0, and not 5"), ('{"7": 0}', "7 is no partition")]
)
def test_starting_offsets_out_of_range_are_refused(
    mosquitto: Mosquitto, tmp_path: Path, offsets: str, problem: str
) -> None:
    given = {"channel": unique("start"), "startingOffsets": offsets}
    refused(InvalidOptionError, f"option 'startingOffsets': {problem}", mosquitto.url, tmp_path, **given)


# --- faults of brokers and disks; killed processes: test_killed_drivers and test_read


def test_a_full_disk_delays_only_the_messages_that_do_not_fit(rabbitmq: RabbitMQ, small_disk: Path) -> None:
    """Ten times the size of the disk passes through it: processed rows make room."""
    options = {"channel": "full/disk", "group": "full-disk", "prefetch": "50", "journalBytes": "1g"}
    with Driven(rabbitmq.url, small_disk / "journal", **options).start() as query:
        payloads = [b"%04d" % number + b"x" * 20_000 for number in range(2000)]
        publish(rabbitmq.url, "full/disk", payloads)
        assert query.receive(2000) == payloads


def test_rows_of_a_new_query_are_processed_on_a_disk_without_any_room(rabbitmq: RabbitMQ, small_disk: Path) -> None:
    """What the journal has to note waits for room, and the query does not."""
    journal, channel = small_disk / "journal", unique("no-room-at-all")
    large = b"x" * 100_000
    with Driven(rabbitmq.url, journal, channel=channel, group=channel).start() as query:
        publish(rabbitmq.url, channel, numbers(40))
        eventually(lambda: query.reader.reportLatestOffset()["offsets"]["0"] == 40, "all rows are stored")
        file = ballast(small_disk)
        assert shutil.disk_usage(small_disk).free == 0
        assert query.receive(40) == numbers(40)
        publish(rabbitmq.url, channel, [large])
        assert not query.micro_batch()
        query.reader.commit(json.loads(query.checkpoint[-1]))
        file.unlink()
        assert query.receive(41) == [*numbers(40), large]
    known = json.loads((journal / "journal.json").read_text())
    assert (known["committed"], known["unread"]) == (True, {})
    assert not [*journal.glob("read-*")]


def test_a_query_whose_disk_is_full_before_its_first_row_is_planned_starts_and_processes_its_backlog(
    rabbitmq: RabbitMQ, small_disk: Path
) -> None:
    channel = unique("backlog")
    options = {"channel": channel, "group": channel, "availableNowQuiet": "0.3", "prefetch": "20"}
    with messaging.connect(rabbitmq.url) as m:  # the queue of the query is there already
        make_queue(m, channel)
    payloads = [b"%04d" % number + b"x" * 20_000 for number in range(500)]
    publish(rabbitmq.url, channel, payloads)
    for _ in range(3):  # each of them ends before Spark has noted its first offset
        with Driven(rabbitmq.url, small_disk / "journal", **options) as query:
            query.reader.prepareForTriggerAvailableNow()
            query.start()
            ballast(small_disk)
    (small_disk / "ballast").unlink()
    query = Driven(rabbitmq.url, small_disk / "journal", **options)
    found = query.finish()
    while len(found) < 500:
        query = Driven(rabbitmq.url, small_disk / "journal", query.checkpoint, **options)
        found += query.finish()
    assert found == payloads


def test_a_disk_that_stays_full_fails_the_query(
    rabbitmq: RabbitMQ, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaled, "PATIENCE", 0.5)
    journal, channel = small_disk / "journal", unique("no-room")
    with Driven(rabbitmq.url, journal, channel=channel, group=channel).start() as query:
        file = ballast(small_disk, 40_000)
        publish(rabbitmq.url, channel, [b"x" * 100_000])
        with pytest.raises(JournalFullError, match="option 'journalPath'"):
            eventually(lambda: query.micro_batch() and False, "the query to fail")
    file.unlink()
    with Driven(rabbitmq.url, journal, query.checkpoint, channel=channel, group=channel).start() as query:
        assert query.receive(1) == [b"x" * 100_000]


def test_a_broker_of_streams_that_is_away_for_a_while(rabbitmq: RabbitMQ) -> None:
    name = unique("away")
    make_stream(rabbitmq.url, name, numbers(100))
    options = {"queue": name, "queueType": "stream", "timeout": "1", "reconnect_max": "0.2"}
    with Proxy(rabbitmq.host, rabbitmq.port) as proxy:
        url = rabbitmq.url_at("127.0.0.1", proxy.port)
        with Driven(url, None, **options).start() as query:
            query.receive(100)
            proxy.refuse()
            publish(rabbitmq.url, name, numbers(100, 100))
            attempts = proxy.attempts
            eventually(lambda: query.micro_batch() or proxy.attempts > attempts + 2, "attempts to reconnect")
            assert len(query.values) == 100
            proxy.accept()
            assert query.receive(200) == numbers(200)


# --- a sink that skips a micro-batch: the rows stay in the journal, and the query fails


ADVICE = r"'journalPath'.*no task has read.*new checkpointLocation and adoptJournal=true.*failOnSkippedBatch=false"


def test_an_adopted_journal_keeps_the_rows_of_a_skipped_micro_batch_and_the_advice_recovers_them(
    mosquitto: Mosquitto, channel: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    with Driven(mosquitto.url, journal, channel=channel).start() as query:
        publish(mosquitto.url, channel, numbers(40))
        assert query.receive(40) == numbers(40)
        publish(mosquitto.url, channel, numbers(1, 40))
        query.receive(41)  # commits the rows before
    publish(mosquitto.url, channel, numbers(4, 41))
    options = {"channel": channel, "adoptJournal": "true", "availableNowQuiet": "0.2"}
    with Driven(mosquitto.url, journal, skip=1, **options) as skipped:
        skipped.reader.prepareForTriggerAvailableNow()
        skipped.start()
        assert skipped.micro_batch()
        with pytest.raises(MicroBatchSkippedError, match=ADVICE):
            skipped.micro_batch()
        with pytest.raises(MicroBatchSkippedError, match=ADVICE):  # whichever Spark asks for first
            skipped.reader.commit(json.loads(skipped.checkpoint[-1]))
    with (
        Driven(mosquitto.url, journal, skipped.checkpoint, **options) as again,
        pytest.raises(MicroBatchSkippedError, match=ADVICE),
    ):
        again.start()
    with Driven(mosquitto.url, journal, **options).start() as recovered:
        eventually(lambda: recovered.micro_batch() is None or set(numbers(5, 40)) <= set(recovered.values), "the rows")
        publish(mosquitto.url, channel, numbers(5, 45))
        eventually(lambda: recovered.micro_batch() is None or recovered.values[-5:] == numbers(5, 45), "the rows after")


def test_a_new_journal_keeps_the_rows_of_a_skipped_micro_batch_too_and_the_query_continues_if_it_is_told_to(
    mosquitto: Mosquitto, channel: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    with Driven(mosquitto.url, journal, skip=1, channel=channel).start() as query:
        publish(mosquitto.url, channel, numbers(20))
        eventually(query.micro_batch, "a micro-batch")
        with pytest.raises(MicroBatchSkippedError, match="offsets 0 to"):
            query.micro_batch()
    assert RowJournal.view(str(journal)).logs[0].begin == 0
    with Driven(mosquitto.url, journal, query.checkpoint, channel=channel, failOnSkippedBatch="false").start() as again:
        publish(mosquitto.url, channel, numbers(5, 20))
        eventually(lambda: again.micro_batch() is None or again.values[-5:] == numbers(5, 20), "the rows after")


def test_marks_are_left_by_the_first_rows_only_and_deleted(mosquitto: Mosquitto, channel: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Driven(mosquitto.url, journal, channel=channel).start() as query:
        for start in range(0, 30, 10):
            publish(mosquitto.url, channel, numbers(10, start))
            assert query.receive(start + 10) == numbers(start + 10)
        query.micro_batch()
        assert not [*journal.glob("read-*")]


def test_the_journal_has_the_position_of_the_last_commit(mosquitto: Mosquitto, channel: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    query = processed(numbers(30), mosquitto.url, journal, channel=channel)
    with Driven(mosquitto.url, journal, query.checkpoint, channel=channel) as later:
        later.start()  # commits what the checkpoint tells
        publish(mosquitto.url, channel, numbers(5, 30))
        later.receive(5)
        later.reader.commit(json.loads(later.checkpoint[-1]))
    (cursor,) = journal.glob("cursor-*")
    assert cursor.name == f"cursor-{json.loads(later.checkpoint[-1])['query']}"
    assert json.loads(cursor.read_text())["offsets"] == {"0": 35}


def test_a_query_of_the_version_before_cursors_continues(mosquitto: Mosquitto, tmp_path: Path) -> None:
    written = Path(__file__).parent / "data" / "written_before_cursors"
    journal, group = tmp_path / "journal", unique("before")
    shutil.copytree(written / "journal", journal)
    meta = json.loads((journal / "journal.json").read_text())
    meta |= {"group": group, "sessions": []}
    meta["source"] |= {"url": mosquitto.url, "channels": [group]}
    (journal / "journal.json").write_text(json.dumps(meta))
    checkpoint = json.dumps({**json.loads((written / "checkpoint.json").read_text()), "group": group})
    query = Driven(mosquitto.url, journal, [checkpoint], channel=group, receivers="2", availableNowQuiet="0.3")
    query.finish()
    rows = [(row["partition"], row["offset"], row["value"]) for row in query.rows]
    assert sorted(rows) == [(0, n, value(n)) for n in range(7, 20)] + [(1, n, value(n)) for n in range(12, 20)]


def test_an_executor_that_cannot_write_its_mark_fails(
    mosquitto: Mosquitto, channel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: LocalFolder, name: str, parts: Any) -> int:
        raise PermissionError(13, "Permission denied", name)

    with Driven(mosquitto.url, tmp_path / "journal", channel=channel).start() as query:
        publish(mosquitto.url, channel, numbers(1))
        monkeypatch.setattr(LocalFolder, "write", refused)
        with pytest.raises(JournalError, match=r"'journalPath'.*an executor cannot write the mark.*Permission denied"):
            query.receive(1)


def test_a_journal_of_an_earlier_version_is_read_without_marks(
    mosquitto: Mosquitto, channel: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    query = processed(numbers(5), mosquitto.url, journal, channel=channel)
    values = json.loads((journal / "journal.json").read_text())
    for name in ("group", "sessions", "unread"):
        del values[name]
    (journal / "journal.json").write_text(json.dumps(values))
    offsets = json.loads(query.checkpoint[-1])
    del offsets["group"]
    publish(mosquitto.url, channel, numbers(5, 5))
    with Driven(mosquitto.url, journal, [json.dumps(offsets)], channel=channel) as later:
        assert later.start().receive(5) == numbers(5, 5)

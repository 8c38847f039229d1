"""Restored, truncated and swapped journals and checkpoints: nothing is lost silently, and no offset is used twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Final

import pytest

from messaging.errors import JournalUnreadableError
from messaging.testing.brokers import Mosquitto
from messaging.testing.waiting import eventually
from pyspark_messaging.errors import DataLossError, JournalMismatchError
from pyspark_messaging.read import journaled
from tests.spark.harness import numbers, publish, unique
from tests.spark.readers import Driven

if TYPE_CHECKING:
    from pathlib import Path

QUICK: Final = {"availableNowQuiet": "0.3"}
STATES: Final = ("intact", "restored", "truncated", "swapped")


class Damaged:
    """A query that has processed 100 messages and then 100 more, and what became of its files since.

    Attributes:
        processed: the payloads that its sink has.
        checkpoint: its offsets.
    """

    def __init__(self, url: str, folder: Path, *, unprocessed: int = 0) -> None:
        self.url, self.folder = url, folder
        self.journal, self.channel = folder / "journal", unique("restored")
        options = {"channel": self.channel}
        with Driven(url, self.journal, **options).start() as query:
            publish(url, self.channel, numbers(100))
            query.receive(100)
        shutil.copytree(self.journal, folder / "copy")
        self.old_checkpoint = [*query.checkpoint]
        with Driven(url, self.journal, query.checkpoint, **options) as later:
            publish(url, self.channel, numbers(100, 100))
            later.receive(100)
        with Driven(url, folder / "other", channel=f"{self.channel}/other").start() as other:
            publish(url, f"{self.channel}/other", numbers(200))
            other.receive(200)
        self.processed = query.values + later.values
        self.rows = query.rows + later.rows
        self.checkpoint, self.other_checkpoint = later.checkpoint, other.checkpoint

    def damage_journal(self, how: str) -> None:
        if how == "restored":
            shutil.rmtree(self.journal)
            shutil.copytree(self.folder / "copy", self.journal)
        elif how == "truncated":
            last = sorted(self.journal.glob("0/*.segment"))[-1]
            data = last.read_bytes()
            last.write_bytes(data[: len(data) * 3 // 4])
        elif how == "swapped":  # the files of another query in the place of these
            shutil.rmtree(self.journal / "0")
            shutil.copytree(self.folder / "other" / "0", self.journal / "0")

    def damage_checkpoint(self, how: str) -> None:
        if how == "restored":
            self.checkpoint = self.old_checkpoint
        elif how == "truncated":
            self.checkpoint = self.checkpoint[:-1]
        elif how == "swapped":
            self.checkpoint = self.other_checkpoint

    def files(self) -> dict[str, bytes]:
        return {str(each): each.read_bytes() for each in self.journal.rglob("*.segment")}


@pytest.mark.parametrize("journal", STATES)
def test_a_query_whose_files_were_exchanged_is_complete_or_fails_before_anything_is_committed(
    mosquitto: Mosquitto, tmp_path: Path, journal: str
) -> None:
    failed = {}
    for checkpoint in STATES:
        folder = tmp_path / checkpoint
        damaged = Damaged(mosquitto.url, folder)
        damaged.damage_journal(journal)
        damaged.damage_checkpoint(checkpoint)
        publish(mosquitto.url, damaged.channel, numbers(150, 200))
        before = damaged.files()
        query = Driven(mosquitto.url, damaged.journal, damaged.checkpoint, channel=damaged.channel, **QUICK)
        try:
            values = query.finish()
        except (DataLossError, JournalMismatchError, JournalUnreadableError) as error:
            failed[checkpoint] = error
            after = damaged.files()
            assert query.batches == []
            assert after.keys() == before.keys(), "nothing was deleted"
            assert all(before[name].startswith(data) for name, data in after.items()), "nothing was received"
        else:
            assert set(damaged.processed + values) >= set(numbers(350)), (journal, checkpoint)
    if journal == "intact":
        assert "intact" not in failed
    else:
        assert "intact" in failed
    assert "swapped" in failed


@pytest.mark.parametrize("first", ["latestOffset", "partitions", "commit"])
@pytest.mark.parametrize("journal", ["restored", "truncated"])
def test_whatever_spark_asks_first_a_journal_before_its_checkpoint_starts_no_receiver(
    mosquitto: Mosquitto, tmp_path: Path, journal: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = Damaged(mosquitto.url, tmp_path)
    damaged.damage_journal(journal)
    publish(mosquitto.url, damaged.channel, numbers(150, 200))
    started: list[object] = []
    monkeypatch.setattr(journaled.Receiver, "start", started.append)
    start, end = map(json.loads, damaged.checkpoint[-2:])
    with Driven(mosquitto.url, damaged.journal, damaged.checkpoint, channel=damaged.channel) as query:
        ask = {
            "latestOffset": query.latest,
            "partitions": lambda: query.reader.partitions(start, end),
            "commit": lambda: query.reader.commit(end),
        }[first]
        with pytest.raises(DataLossError, match="failOnDataLoss=false goes on"):
            ask()
    assert started == []


@pytest.mark.parametrize("journal", ["restored", "truncated"])
def test_new_rows_of_a_restored_journal_get_offsets_that_no_checkpoint_has_seen(
    mosquitto: Mosquitto, tmp_path: Path, journal: str
) -> None:
    damaged = Damaged(mosquitto.url, tmp_path)
    damaged.damage_journal(journal)
    publish(mosquitto.url, damaged.channel, numbers(150, 200))
    options = {"channel": damaged.channel, "failOnDataLoss": "false", **QUICK}
    query = Driven(mosquitto.url, damaged.journal, damaged.checkpoint, **options)
    assert query.finish() == numbers(150, 200)
    used = Counter(row["offset"] for row in damaged.rows + query.rows)
    assert max(used.values()) == 1
    # the query goes on without the option, also when an older micro-batch is planned again
    again = Driven(mosquitto.url, damaged.journal, query.checkpoint[:-1], channel=damaged.channel, **QUICK)
    publish(mosquitto.url, damaged.channel, numbers(10, 350))
    assert again.finish() == numbers(160, 200)


def test_the_rows_that_a_restored_journal_has_are_processed_before_the_new_ones(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """The last micro-batch was planned and not processed, and part of its rows is in the copy."""
    damaged = Damaged(mosquitto.url, tmp_path)
    damaged.damage_journal("restored")
    publish(mosquitto.url, damaged.channel, numbers(5, 200))
    start = json.loads(damaged.checkpoint[-1])
    start["offsets"] = {"0": 60}
    options = {"channel": damaged.channel, "failOnDataLoss": "false"}
    with Driven(mosquitto.url, damaged.journal, damaged.checkpoint, **options) as query:
        tasks = query.reader.partitions(start, json.loads(damaged.checkpoint[-1]))
        rows = [row for task in tasks for batch in query.reader.read(task) for row in batch.to_pylist()]
        assert [row["value"] for row in rows] == numbers(40, 60)
        assert query.receive(5) == numbers(5, 200)
    assert {row["offset"] for row in query.rows} == {*range(200, 205)}


def test_following_the_advice_of_each_error_recovers_a_query_however_often_its_journal_is_lost(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """The journal is deleted, and then replaced by an older copy of the new one; twice."""
    channel, journal, copy = unique("advice"), tmp_path / "journal", tmp_path / "copy"
    options = {"channel": channel, **QUICK}
    with Driven(mosquitto.url, journal, channel=channel).start() as first:
        publish(mosquitto.url, channel, numbers(10))
        first.receive(10)
    checkpoint, count = first.checkpoint, 10

    def going_on() -> None:
        nonlocal count, checkpoint
        publish(mosquitto.url, channel, numbers(10, count))
        for _ in range(2):  # a refusal changes nothing
            with pytest.raises(DataLossError, match="failOnDataLoss=false"):
                Driven(mosquitto.url, journal, checkpoint, **options).finish()
        query = Driven(mosquitto.url, journal, checkpoint, failOnDataLoss="false", **options)
        assert query.finish() == numbers(10, count)
        checkpoint, count = query.checkpoint, count + 10

    for _ in range(2):
        shutil.rmtree(journal)
        going_on()
        shutil.copytree(journal, copy)
        with Driven(mosquitto.url, journal, checkpoint, channel=channel) as later:
            publish(mosquitto.url, channel, numbers(10, count))
            later.receive(10)
        checkpoint, count = later.checkpoint, count + 10
        shutil.rmtree(journal)
        copy.rename(journal)
        going_on()
    query = Driven(mosquitto.url, journal, checkpoint, **options)
    publish(mosquitto.url, channel, numbers(10, count))
    assert query.finish() == numbers(10, count)


def test_a_query_that_an_earlier_version_resumed_without_an_id_continues(mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel, journal = unique("resumed"), tmp_path / "journal"
    with Driven(mosquitto.url, journal, channel=channel).start() as query:
        publish(mosquitto.url, channel, numbers(10))
        query.receive(10)
    meta = json.loads((journal / "journal.json").read_text())
    meta |= {"before": None, "resumed": {"0": 10}}
    (journal / "journal.json").write_text(json.dumps(meta))
    offsets = {**json.loads(query.checkpoint[-1]), "query": None}
    publish(mosquitto.url, channel, numbers(5, 10))
    later = Driven(mosquitto.url, journal, [json.dumps(offsets)], channel=channel, **QUICK)
    assert later.finish() == numbers(5, 10)


def test_rows_that_were_stored_and_not_planned_are_missed_when_the_journal_was_closed_in_good_order(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """The checkpoint does not know them: the journal notes its end when it is closed."""
    channel, journal = unique("unplanned"), tmp_path / "journal"
    with Driven(mosquitto.url, journal, channel=channel).start() as query:
        publish(mosquitto.url, channel, numbers(10))
        query.receive(10)
    later = Driven(mosquitto.url, journal, query.checkpoint, channel=channel)
    with later:
        later.start()
        publish(mosquitto.url, channel, numbers(10, 10))
        eventually(lambda: later.reader.reportLatestOffset()["offsets"] == {"0": 20}, "all to be stored")
    last = sorted(journal.glob("0/*.segment"))[-1]
    with last.open("rb+") as file:
        file.truncate(last.stat().st_size - 1)
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(DataLossError, match="offsets up to 20 of partition 0 were used"):
            Driven(mosquitto.url, journal, query.checkpoint, channel=channel, **QUICK).finish()

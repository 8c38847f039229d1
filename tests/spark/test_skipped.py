"""Rows of a micro-batch that the sink skips stay in the journal, and the query fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from adapters.spark.errors import JournalError, MicroBatchSkippedError
from adapters.spark.journal import Journal
from adapters.spark.journal.folders import LocalFolder
from tests.spark.harness import numbers, publish, wait_for
from tests.spark.readers import Driven, processed

if TYPE_CHECKING:
    from pathlib import Path

    from messaging.testing.brokers import Mosquitto


def left_behind(mosquitto: Mosquitto, channel: str, journal: Path, count: int = 40) -> None:
    """Leave a journal behind of which a query has processed ``count`` rows, and five messages at the broker."""
    with Driven(mosquitto.url, journal, channel=channel).start() as query:
        publish(mosquitto.url, channel, numbers(count))
        assert query.receive(count) == numbers(count)
        publish(mosquitto.url, channel, numbers(1, count))
        query.receive(count + 1)  # commits the rows before
    publish(mosquitto.url, channel, numbers(4, count + 1))


ADVICE = r"'journalPath'.*no task has read.*new checkpointLocation and adoptJournal=true.*failOnSkippedBatch=false"


def test_an_adopted_journal_keeps_the_rows_of_a_skipped_micro_batch_and_the_advice_recovers_them(
    mosquitto: Mosquitto, channel: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    left_behind(mosquitto, channel, journal)
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
        wait_for(
            lambda: recovered.micro_batch() is None or set(numbers(5, 40)) <= set(recovered.values), "the rows", 30
        )
        publish(mosquitto.url, channel, numbers(5, 45))
        wait_for(
            lambda: recovered.micro_batch() is None or recovered.values[-5:] == numbers(5, 45), "the rows after", 30
        )


def test_a_new_journal_keeps_the_rows_of_a_skipped_micro_batch_too(
    mosquitto: Mosquitto, channel: str, tmp_path: Path
) -> None:
    with Driven(mosquitto.url, tmp_path / "journal", skip=1, channel=channel).start() as query:
        publish(mosquitto.url, channel, numbers(20))
        wait_for(query.micro_batch, "a micro-batch")
        with pytest.raises(MicroBatchSkippedError, match="offsets 0 to"):
            query.micro_batch()
    assert Journal.view(str(tmp_path / "journal")).logs[0].begin == 0


def test_a_query_that_reads_no_rows_on_purpose_continues(mosquitto: Mosquitto, channel: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Driven(mosquitto.url, journal, skip=1, channel=channel).start() as query:
        publish(mosquitto.url, channel, numbers(20))
        wait_for(query.micro_batch, "a micro-batch")
        with pytest.raises(MicroBatchSkippedError):
            query.micro_batch()
    with Driven(mosquitto.url, journal, query.checkpoint, channel=channel, failOnSkippedBatch="false").start() as again:
        publish(mosquitto.url, channel, numbers(5, 20))
        wait_for(lambda: again.micro_batch() is None or again.values[-5:] == numbers(5, 20), "the rows after", 30)


def test_marks_are_left_by_the_first_rows_only_and_deleted(mosquitto: Mosquitto, channel: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Driven(mosquitto.url, journal, channel=channel).start() as query:
        for start in range(0, 30, 10):
            publish(mosquitto.url, channel, numbers(10, start))
            assert query.receive(start + 10) == numbers(start + 10)
        query.micro_batch()
        assert {each.name for each in journal.iterdir()} == {"journal.json", "lock", "0"}


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

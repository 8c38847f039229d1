"""The readers with real brokers: checkpoints, limits, several channels, queries and receivers. Without Spark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel

import messaging
from adapters.spark.read.typed import CORRUPT
from tests.spark.harness import make_stream, numbers, publish, unique
from tests.spark.readers import Driven, batch_read, processed

if TYPE_CHECKING:
    from pathlib import Path

    from messaging.testing.brokers import Mosquitto, RabbitMQ


class Reading(BaseModel):
    device: str
    celsius: float


def test_available_now_of_a_queue(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    queue = unique("work")
    with messaging.connect(rabbitmq.url) as m:  # a queue that is there already, and holds something
        made = m.subscribe(queue, queue=queue, queue_type="quorum")
        made.ready.result(10)
        made.close().result(10)
        for number in numbers(1000):
            promise = m.publish(queue, number)
        promise.result(10)
    query = Driven(rabbitmq.url, tmp_path, queue=queue, queueType="quorum", availableNowQuiet="0.3")
    assert query.finish() == numbers(1000)


def test_two_queries_at_once_get_all_of_it_each(mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel = unique("two")
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


def test_typed_columns_of_a_model(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    channel = unique("typed")
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


def test_processed_segments_are_deleted(mosquitto: Mosquitto, tmp_path: Path) -> None:
    channel = unique("trim")
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

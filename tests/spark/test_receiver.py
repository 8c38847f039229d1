"""Receivers: messages of a broker are stored, then acknowledged, also with a full or slow disk. Without Spark."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from messaging import Message, MessageContext, MessagingError
from messaging.errors import SubscriptionRefusedError
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from pyspark_messaging.columns import batch_of
from pyspark_messaging.errors import JournalFullError
from pyspark_messaging.journal import JournalSource, RowJournal
from pyspark_messaging.journal.log import RowLogWriter, read
from pyspark_messaging.options import ReadOptions
from pyspark_messaging.read import receiver
from pyspark_messaging.read.receiver import Receiver
from tests.interrupts import breakable_waits
from tests.spark.harness import numbers, publish, unique
from tests.spark.readers import Driven

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa

FULL = JournalFullError("/journal", "cannot write: No space left on device", "journalPath")
VERSIONS = pytest.mark.parametrize("version", ["5", "3.1.1"])


class Gate:
    """Holds the writes of a log back, or has them fail."""

    def __init__(self, log: RowLogWriter) -> None:
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()
        self.error: Exception | None = None
        self._append = log.append
        log.append = self.append  # type: ignore[method-assign]

    def append(self, rows: pa.RecordBatch) -> None:
        self.waiting.set()
        assert self.open.wait(3 * PATIENCE)
        if self.error is not None:
            raise self.error
        self._append(rows)


class Running:
    """A receiver, the rows that it has stored, and a gate before its log."""

    def __init__(self, path: Path, url: str, **options: str) -> None:
        given = {"url": url, "journalPath": str(path), **options}
        self.options = ReadOptions.of(given)
        self.journal = RowJournal.open(str(path), JournalSource("mqtt://anywhere", [], None, "1", 1))
        (self.log,) = self.journal.logs
        self.gate = Gate(self.log)
        self.receiver = Receiver(self.options, self.options.group or "group", self.log)

    def start(self) -> Running:
        self.receiver.start()
        return self

    def values(self) -> list[bytes]:
        rows = read(self.journal.folder, self.log.spans(self.log.begin, self.log.end))
        return [value for batch in rows for value in batch.column("value").to_pylist()]

    def stored(self, count: int) -> list[bytes]:
        """Wait for ``count`` rows."""
        eventually(
            lambda: self.log.end >= count or self.receiver.failure is not None, f"{count} rows, not {self.log.end}"
        )
        self.receiver.raise_failure()
        return self.values()

    def close(self) -> None:
        self.receiver.stop()
        self.journal.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts receivers on one journal, one at a time, and ends them."""
    running: list[Running] = []

    def start(url: str, **options: str) -> Running:
        for each in running:
            each.close()
        made = Running(tmp_path / "journal", url, **options)
        running.append(made)
        return made.start()

    yield start
    for each in running:
        each.close()


def unacknowledged(rabbitmq: RabbitMQ, queue: str) -> tuple[int, int]:
    """Messages of ``queue`` that wait, and that are with the consumer."""
    lines = rabbitmq.ctl("list_queues", "name", "messages_ready", "messages_unacknowledged").splitlines()
    found = next(line.split("\t") for line in lines if line.startswith(queue + "\t"))
    return int(found[1]), int(found[2])


@VERSIONS
def test_stored_messages_are_not_received_again(broker: Mosquitto, run: Callable[..., Running], version: str) -> None:
    options = {"channel": "a/#", "version": version}
    running = run(broker.url, **options)
    publish(broker.url, "a/b", numbers(1000))
    assert running.stored(1000) == numbers(1000)
    running.close()
    publish(broker.url, "a/b", numbers(10, 1000))
    running = run(broker.url, **options)
    assert running.stored(1010) == numbers(1010)
    assert running.receiver.redeliveries.dropped == 0


def test_nothing_is_acknowledged_before_it_is_stored(rabbitmq: RabbitMQ, run: Callable[..., Running]) -> None:
    queue = unique("queue")
    running = run(rabbitmq.url, queue=queue)
    running.gate.open.clear()
    publish(rabbitmq.url, queue, numbers(100))
    assert running.gate.waiting.wait(PATIENCE)
    eventually(lambda: unacknowledged(rabbitmq, queue) == (0, 100), "all to be with the consumer")
    assert running.log.end == 0
    running.gate.open.set()
    assert running.stored(100) == numbers(100)
    eventually(lambda: unacknowledged(rabbitmq, queue) == (0, 0), "all to be acknowledged")


@pytest.mark.parametrize("deduplicate", ["true", "false"])
@pytest.mark.parametrize("version", ["5", "3.1.1", "AMQP"])
def test_an_acknowledgement_that_is_lost_stores_nothing_twice(
    request: pytest.FixtureRequest, run: Callable[..., Running], channel: str, version: str, deduplicate: str
) -> None:
    broker: Mosquitto | RabbitMQ = request.getfixturevalue("rabbitmq" if version == "AMQP" else "broker")
    options = {"queue": channel} if version == "AMQP" else {"channel": channel, "version": version}
    options |= {"deduplicate": deduplicate, "reconnect_max": "0.2"}
    with Proxy(broker.host, broker.port) as proxy:
        running = run(broker.url.replace(str(broker.port), str(proxy.port)), **options)
        proxy.up.swallow()  # acknowledgements do not arrive
        publish(broker.url, channel, numbers(15))  # within the window of mosquitto
        assert running.stored(15) == numbers(15)
        # an acknowledgement that was not sent yet would be sent over the next connection: four bytes each of MQTT
        sent = 1 if version == "AMQP" else 15 * 4
        eventually(lambda: proxy.up.swallowed >= sent, "the acknowledgements are lost")
        proxy.up.restore()
        proxy.sever()
        publish(broker.url, channel, numbers(15, 15))
        if deduplicate == "true":
            assert running.stored(30) == numbers(30)
            eventually(lambda: running.receiver.redeliveries.dropped == 15, "each redelivery dropped")
        else:
            assert running.stored(45) == numbers(15) + numbers(30)


def test_a_process_that_is_gone_is_no_reason_to_store_twice(
    broker: Mosquitto, run: Callable[..., Running], tmp_path: Path
) -> None:
    """The next receiver reads from the journal which messages are stored."""
    with Proxy(broker.host, broker.port) as proxy:
        running = run(f"mqtt://127.0.0.1:{proxy.port}", channel="a", close_timeout="0.2")
        proxy.up.swallow()
        # the same text twice is two messages
        publish(broker.url, "a", [*numbers(9), b"8"])
        assert running.stored(10) == [*numbers(9), b"8"]
        proxy.sever()
        running.close()
    publish(broker.url, "a", numbers(5, 10))
    running = run(broker.url, channel="a")
    assert running.stored(15) == [*numbers(9), b"8", *numbers(5, 10)]
    assert running.receiver.redeliveries.dropped == 10


def test_a_redelivery_is_recognized_after_its_row_was_deleted(tmp_path: Path) -> None:
    options = ReadOptions.of({"url": "mqtt://anywhere", "channel": "a", "journalPath": str(tmp_path)})
    journal = RowJournal.open(str(tmp_path), JournalSource("mqtt://anywhere", ["a"], None, "1", 1), segment_bytes=1)
    (log,) = journal.logs
    receiver = Receiver(options, "group", log)
    for number in range(3):
        log.append(batch_of([Message(b"text", MessageContext("a", extensions={"packetId": number + 1}))], 0, number, 0))
    receiver.commit(2)
    assert log.begin == 2
    again = [
        Message(b"text", MessageContext("a", extensions={"packetId": number, "redelivered": True}))
        for number in (1, 2, 3, 4)
    ]
    assert receiver.redeliveries.without_stored(again) == again[3:]
    journal.close()


def test_a_broker_that_is_restarted(durable_broker: Mosquitto, run: Callable[..., Running]) -> None:
    broker = durable_broker
    running = run(broker.url, channel="a", reconnect_max="0.2")
    for start in range(0, 600, 200):
        publish(broker.url, "a", numbers(200, start))
        broker.kill()
        broker.start()
    publish(broker.url, "a", numbers(1, 600))
    assert running.stored(601) == numbers(601)


def test_a_full_disk_waits_and_loses_nothing(rabbitmq: RabbitMQ, run: Callable[..., Running]) -> None:
    queue = unique("queue")
    running = run(rabbitmq.url, queue=queue)
    running.gate.error = FULL
    publish(rabbitmq.url, queue, numbers(100))
    eventually(lambda: running.receiver.failure is not None, "the disk to be full")
    running.receiver.raise_failure(patience=PATIENCE)  # within its patience
    with pytest.raises(JournalFullError, match="'journalPath'"):
        running.receiver.raise_failure()
    assert unacknowledged(rabbitmq, queue) == (0, 100)
    running.gate.error = None
    eventually(lambda: running.log.end == 100, "all to be stored")
    assert running.values() == numbers(100)
    eventually(lambda: running.receiver.failure is None, "the failure to be over")


def test_a_full_journal_leaves_the_rest_to_the_broker(rabbitmq: RabbitMQ, run: Callable[..., Running]) -> None:
    queue = unique("queue")
    running = run(rabbitmq.url, queue=queue, journalBytes="1m", prefetch="20")
    payloads = [b"%04d" % number + b"x" * 20_000 for number in range(300)]
    publish(rabbitmq.url, queue, payloads)
    eventually(lambda: running.receiver.is_full, "the journal to be full")
    # not stored yet: one write, the pending messages, and the prefetched messages of the broker
    eventually(lambda: sum(unacknowledged(rabbitmq, queue)) == 300 - running.log.end, "the broker to know")
    assert running.log.end < 200
    assert unacknowledged(rabbitmq, queue)[0] > 0
    while running.log.end < 300:
        end = running.log.end
        running.receiver.commit(end)
        eventually(lambda end=end: running.log.end > end, "more")
    eventually(lambda: sum(unacknowledged(rabbitmq, queue)) == 0, "all to be acknowledged")


def test_a_write_takes_the_room_that_a_disk_has_left(broker: Mosquitto, small_disk: Path) -> None:
    """Its messages have more bytes together than the disk, which is never freed of the first ones."""
    running = Running(small_disk / "journal", broker.url, channel="a")
    try:
        running.start()
        running.gate.open.clear()
        payloads = [b"%04d" % number + b"x" * 100_000 for number in range(60)]
        publish(broker.url, "a", payloads)
        eventually(lambda: running.receiver.pending_bytes > 5_000_000 or running.gate.waiting.is_set(), "all to wait")
        running.gate.open.set()
        eventually(lambda: running.receiver.failure is not None, "the disk to be full")
        stored = running.log.end
        assert stored >= 35, "3.5 of the 4 MiB"
        assert running.values() == payloads[:stored]
        running.receiver.commit(stored)
        eventually(lambda: running.log.end == 60 or running.receiver.commit(running.log.end), "the rest to be stored")
    finally:
        running.close()


@table(
    "size, count, journal_bytes",
    {"small": (10, 60_000, 2**21), "medium": (5_000, 1500, 2**21), "large": (300_000, 30, 2**22)},
)
def test_a_journal_takes_its_bytes_and_one_segment(
    broker: Mosquitto, tmp_path: Path, size: int, count: int, journal_bytes: int
) -> None:
    """A quarter of ``journalBytes``, and one message."""
    journal = tmp_path / "journal"
    with Driven(broker.url, journal, channel="a", journalBytes=str(journal_bytes)).start() as query:
        publish(broker.url, "a", [b"%08d" % number + b"x" * size for number in range(count)])
        most = received = 0
        while received < count:
            query.micro_batch()
            received = sum(map(len, query.batches))
            most = max(most, sum(each.stat().st_size for each in journal.glob("0/*")))
        assert [value[:8] for value in query.values] == [b"%08d" % number for number in range(count)]
    assert most <= journal_bytes * 5 // 4 + size + 2**15


def test_pending_bytes_are_bounded(
    broker: Mosquitto, run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "PENDING_BYTES", 100_000)
    running = run(broker.url, channel="a", prefetch="1000")
    running.gate.open.clear()
    publish(broker.url, "a", [b"%04d" % number + b"x" * 9_996 for number in range(200)])
    eventually(lambda: running.receiver.pending_bytes >= 100_000, "too much to be pending")
    assert running.receiver.pending_bytes < 120_000
    running.gate.open.set()
    assert [value[:4] for value in running.stored(200)] == [b"%04d" % number for number in range(200)]


def test_stopping_does_not_wait_for_observers_that_wait(
    broker: Mosquitto, run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "PENDING_BYTES", 1000)
    running = run(broker.url, channel="a")
    running.gate.error = FULL
    publish(broker.url, "a", [b"x" * 900 for _ in range(50)])
    eventually(lambda: running.receiver.failure is not None, "the disk to be full")
    started = time.monotonic()
    running.receiver.stop()
    assert time.monotonic() - started < PATIENCE
    # nothing of it was acknowledged
    again = run(broker.url, channel="a")
    assert len(again.stored(50)) == 50


def test_a_defect_is_told_and_not_swallowed(broker: Mosquitto, run: Callable[..., Running]) -> None:
    running = run(broker.url, channel="a")
    running.gate.error = ValueError("a defect")
    publish(broker.url, "a", numbers(5))
    eventually(lambda: running.receiver.failure is not None, "the failure")
    with pytest.raises(MessagingError, match="ValueError: a defect"):
        running.receiver.raise_failure(patience=PATIENCE)


def test_waiting_for_quiet_has_an_end(broker: Mosquitto, run: Callable[..., Running]) -> None:
    running = run(broker.url, channel="a")
    running.gate.open.clear()
    publish(broker.url, "a", numbers(3))
    assert running.gate.waiting.wait(PATIENCE)
    started = time.monotonic()
    running.receiver.wait_quiet(0.1, started + 0.5)
    assert 0.4 < time.monotonic() - started < PATIENCE
    running.gate.open.set()


def test_a_queue_that_is_deleted_while_the_disk_is_full_is_not_forgotten(
    rabbitmq: RabbitMQ, run: Callable[..., Running]
) -> None:
    queue = unique("queue")
    running = run(rabbitmq.url, queue=queue)
    running.gate.error = FULL
    publish(rabbitmq.url, queue, numbers(5))
    eventually(lambda: running.receiver.failure is not None, "the disk to be full")
    rabbitmq.ctl("delete_queue", queue)
    eventually(lambda: isinstance(running.receiver.failure, SubscriptionRefusedError), "the end of the subscription")
    running.gate.error = None
    eventually(lambda: running.log.end == 5, "what was there to be stored")
    with pytest.raises(SubscriptionRefusedError):
        running.receiver.raise_failure(patience=PATIENCE)


def test_a_receiver_starts_waits_and_stops_without_a_breakable_wait(broker: Mosquitto, tmp_path: Path) -> None:
    running = Running(tmp_path / "journal", broker.url, channel="a/#")
    with breakable_waits() as found:
        running.start()
    try:
        publish(broker.url, "a/b", numbers(100))
        assert running.stored(100) == numbers(100)
        with breakable_waits() as found_later:
            running.receiver.wait_quiet(0.05, time.monotonic() + 20)
            running.receiver.raise_failure()
            running.receiver.commit(0)
            running.receiver.stop()
    finally:
        running.close()
    assert not found | found_later

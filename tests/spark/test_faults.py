"""What breaks while a query runs: brokers and disks. Killed processes: ``test_killed_drivers.py`` and its neighbour."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from adapters.spark.errors import JournalFullError
from adapters.spark.read import journaled
from messaging.testing.brokers import RabbitMQ
from messaging.testing.proxy import Proxy
from tests.spark.harness import make_stream, numbers, publish, unique, wait_for
from tests.spark.readers import Driven

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if os.geteuid() != 0 or mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_delays_only_the_messages_that_do_not_fit(rabbitmq: RabbitMQ, small_disk: Path) -> None:
    """Ten times the size of the disk passes through it: processed rows make room."""
    options = {"channel": "full/disk", "group": "full-disk", "prefetch": "50", "journalBytes": "1g"}
    with Driven(rabbitmq.url, small_disk / "journal", **options).start() as query:
        payloads = [b"%04d" % number + b"x" * 20_000 for number in range(2000)]
        publish(rabbitmq.url, "full/disk", payloads)
        assert query.receive(2000) == payloads


def test_a_disk_that_stays_full_fails_the_query(
    rabbitmq: RabbitMQ, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaled, "PATIENCE", 0.5)
    journal, channel = small_disk / "journal", unique("no-room")
    with Driven(rabbitmq.url, journal, channel=channel, group=channel).start() as query:
        (small_disk / "ballast").write_bytes(b"x" * (4 * 2**20 - 40_000))
        publish(rabbitmq.url, channel, [b"x" * 100_000])
        with pytest.raises(JournalFullError, match="option 'journalPath'"):
            wait_for(lambda: query.micro_batch() and False, "the query to fail")
    (small_disk / "ballast").unlink()
    with Driven(rabbitmq.url, journal, query.checkpoint, channel=channel, group=channel).start() as query:
        assert query.receive(1) == [b"x" * 100_000]


def test_a_broker_of_streams_that_is_away_for_a_while(rabbitmq: RabbitMQ) -> None:
    name = unique("away")
    make_stream(rabbitmq.url, name, numbers(100))
    options = {"queue": name, "queueType": "stream", "timeout": "1", "reconnect_max": "0.2"}
    with Proxy(rabbitmq.host, rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}"
        with Driven(url, None, **options).start() as query:
            query.receive(100)
            proxy.refuse()
            publish(rabbitmq.url, name, numbers(100, 100))
            attempts = proxy.attempts
            wait_for(lambda: query.micro_batch() or proxy.attempts > attempts + 2, "attempts to reconnect")
            assert len(query.values) == 100
            proxy.accept()
            assert query.receive(200) == numbers(200)

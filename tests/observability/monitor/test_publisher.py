"""SnapshotPublisher: a process publishes its state until it ends, whatever happens to the broker."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

import messaging
from messaging.errors import ArgumentError, ClosedError
from messaging.observability.monitor import SnapshotPublisher
from messaging.observability.monitor.plain import Masking
from messaging.observability.monitor.publisher import PublishedSnapshots
from messaging.observability.monitor.snapshot import MAX_BYTES
from messaging.services import ServiceRegistry
from messaging.services.reporting import PartReporter, register_reporter
from messaging.testing.brokers import Mosquitto, require
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, subscribed


@pytest.fixture
def services() -> ServiceRegistry:
    return ServiceRegistry()


def test_a_process_publishes_snapshots_and_then_its_end(services: ServiceRegistry) -> None:
    with messaging.connect("memory://published", services=services, name="plant") as m:
        found = subscribed(m, "messaging/monitor/press-1")
        with SnapshotPublisher(m, interval=0.1, process="press-1") as publisher:
            assert publisher.channel == "messaging/monitor/press-1"
            for message in found.wait_for(3)[:3]:
                snapshot = json.loads(message.payload)
                assert (snapshot["process"], snapshot["interval"]) == ("press-1", 0.1)
                assert [each["name"] for each in snapshot["reports"]] == ["plant"]
        found.wait_until(lambda messages: messages[-1].payload == b"", "the last message is empty")
        assert publisher.published >= 3
        publisher.close()
        with pytest.raises(ClosedError):
            publisher.__enter__()
    assert found.payloads.index(b"") == len(found) - 1, "nothing follows"


def test_a_monitor_that_comes_later_gets_the_retained_snapshot(mosquitto: Mosquitto, services: ServiceRegistry) -> None:
    with (
        messaging.connect(mosquitto.url, services=services) as m,
        SnapshotPublisher(m, interval=3600, process="late", channel="by/retained") as publisher,
    ):
        eventually(lambda: publisher.published == 1)
        with messaging.connect(mosquitto.url, services=ServiceRegistry()) as other:
            snapshots = PublishedSnapshots(other, "by/retained", Masking())
            found: list[Any] = []

            def take() -> bool:
                found.extend(snapshots.take())
                return bool(found)

            eventually(take)
            assert (found[0].key, found[0].snapshot.process) == ("by/retained/late", "late")
            publisher.close()
            found.clear()
            eventually(take)
            assert found[0].snapshot is None
            snapshots.stream.close()


def test_a_report_that_fails_does_not_stop_the_others(services: ServiceRegistry) -> None:
    def fail() -> Any:
        raise ValueError("password=hunter2")

    register_reporter(services, PartReporter("press", "x", fail))
    with messaging.connect("memory://failing", services=services, name="plant") as m:
        found = subscribed(m, "messaging/monitor/+")
        with SnapshotPublisher(m, interval=0.1, process="p"):
            snapshot = json.loads(found.wait_for(1)[0].payload)
            reports = {each["name"]: each for each in snapshot["reports"]}
            assert reports["x"]["error"] == "ValueError: password=***"
            assert reports["plant"]["data"]["connection"]["state"] == "connected"


def test_snapshots_keep_to_the_limit_of_the_broker(services: ServiceRegistry) -> None:
    register_reporter(services, PartReporter("large", "x", lambda: {str(n): "x" * 200 for n in range(200)}))
    with messaging.connect("memory://narrow?max_message_size=4096", services=services) as m:
        found = subscribed(m, "messaging/monitor/+")
        with SnapshotPublisher(m, interval=0.1, process="p"):
            assert 0 < len(found.wait_for(1)[0].payload) <= 4096 < MAX_BYTES


def test_a_broker_that_is_away_costs_snapshots_but_nothing_else(services: ServiceRegistry) -> None:
    require("mosquitto")
    with Mosquitto() as broker, messaging.connect(broker.url, services=services) as m:
        with SnapshotPublisher(m, interval=0.1, process="p") as publisher:
            eventually(lambda: publisher.published)
            broker.stop()
            eventually(lambda: publisher.skipped >= 3)
            assert m.runtime.get_runtime_dto().publisher.pending <= 1, "at most one snapshot waits"
            began = time.monotonic()
        assert time.monotonic() - began < PATIENCE


def test_closing_the_instance_ends_the_thread(services: ServiceRegistry) -> None:
    with messaging.connect("memory://ended", services=services) as m:
        publisher = SnapshotPublisher(m, interval=0.1, process="p").__enter__()
        eventually(lambda: publisher.published)
    began = time.monotonic()
    publisher.close()
    assert time.monotonic() - began < PATIENCE / 2


@table(
    "arguments",
    [
        {"m": 3}, {"interval": 0}, {"interval": 0.05}, {"interval": 3601}, {"interval": "1"}, {"interval": math.nan},
        {"services": 3}, {"process": ""}, {"process": "a/b"}, {"process": "+"}, {"process": "x" * 121}, {"process": 3},
        {"channel": ""}, {"channel": 3}, {"channel": "a/#"}, {"channel": "+"}, {"mask": "iban"}, {"mask": [3]},
    ],
)  # fmt: skip
def test_arguments_that_are_wrong_are_refused(services: ServiceRegistry, arguments: dict[str, Any]) -> None:
    with messaging.connect("memory://refused", services=services) as m, pytest.raises(ArgumentError):
        SnapshotPublisher(**{"m": m, **arguments})

"""A thread of the application waits for Spark's receivers, recorders and replays without ``threading.Condition``, whose
wait a signal can leave with its lock taken. No Spark."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import messaging
from adapters.spark.archive import EventRecorder
from adapters.spark.journal import Journal, Source
from adapters.spark.options import ReadOptions
from adapters.spark.read.receiver import Receiver
from adapters.spark.recorder.recorded_event import load_event
from adapters.spark.telemetry.display import Display
from adapters.spark.telemetry.session import SparkFailedError
from messaging.services import ServiceRegistry
from messaging.typedevent import TypedEventBus
from tests.doubles.fake import PATIENCE
from tests.interrupts import breakable_waits
from tests.spark.harness import numbers, publish, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from messaging.testing.brokers import Mosquitto


def test_events_are_recorded_and_a_recorder_is_closed_without_a_breakable_wait() -> None:
    registry = ServiceRegistry()
    with (
        messaging.connect("memory://waiting", services=registry) as m,
        TypedEventBus(registry) as bus,
        m.subscribe("events/#", qos=1) as stream,
    ):
        recorder = EventRecorder(bus.monitor, m)
        for number in range(10):
            bus.deliver_untyped("a", {"n": number})
        with breakable_waits() as found:
            recorder.get_dto()
            recorder.close()
        assert recorder.get_dto().recorded == 10
        assert [load_event(stream.receive(PATIENCE).payload).data for _ in range(10)] == [{"n": n} for n in range(10)]
    assert not found


def test_a_receiver_starts_waits_and_stops_without_a_breakable_wait(broker: Mosquitto, tmp_path: Path) -> None:
    options = ReadOptions.of({"url": broker.url, "journalPath": str(tmp_path / "journal"), "channel": "a/#"})
    journal = Journal.open(str(tmp_path / "journal"), Source("mqtt://anywhere", [], None, "1", 1))
    (log,) = journal.logs
    receiver = Receiver(options, "group", log)
    try:
        with breakable_waits() as found:
            receiver.start()
        publish(broker.url, "a/b", numbers(100))
        wait_for(lambda: log.end == 100, "100 rows")
        with breakable_waits() as found_later:
            receiver.wait_quiet(0.05, time.monotonic() + PATIENCE)
            receiver.raise_failure()
            receiver.commit(0)
            receiver.stop()
    finally:
        receiver.stop()
        journal.close()
    assert not found | found_later


def test_the_display_of_the_pipeline_waits_without_a_breakable_wait() -> None:
    ticks: list[None] = []
    with Display() as display, breakable_waits() as found:
        assert display.wait(lambda: time.sleep(0.01) or 3, lambda: ticks.append(None)) == 3
        with pytest.raises(SparkFailedError, match="modulo by zero"):
            display.wait(lambda: 1 // 0, lambda: None)
    assert ticks
    assert not found

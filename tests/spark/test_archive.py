"""The archive of events: recorded from a bus, written by Spark, replayed onto a bus."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import messaging
from messaging import Message, Messaging
from messaging.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    DecodeError,
    InvalidChannelError,
    InvalidEventError,
    InvalidTopicError,
)
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, RabbitMQ, require
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, subscribed
from messaging.typedevent import DurableHistory, RangePolicy, TypedEventBus, convert
from pyspark_messaging.archive import (
    ArchiveMissingError,
    ArchiveUnreadableError,
    EventRecorder,
    InvalidRangeError,
    ReadRows,
    RecordedEvent,
    Replayed,
    archive,
    read_events,
    reader,
    replay,
)
from pyspark_messaging.archive.query import SCHEMA, to_rows
from pyspark_messaging.recorder.recorded_event import dump_data, dump_event, load_data, load_event
from tests.forking import ForkedProcess
from tests.interrupts import breakable_waits
from tests.spark.harness import QUERY_PATIENCE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)
ALWAYS = {"start": datetime.min.replace(tzinfo=UTC), "end": datetime.max.replace(tzinfo=UTC)}


class Colour(enum.Enum):
    RED = "r"
    GREEN = "RED"


@dataclass
class Item:
    name: str
    cents: int


@dataclass
class Order:
    id: int
    total: float
    placed: datetime
    items: list[Item] = field(default_factory=list)
    colour: Colour = Colour.RED
    notes: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def bus() -> Iterator[TypedEventBus]:
    with TypedEventBus(ServiceRegistry()) as bus:
        yield bus


@pytest.fixture
def other() -> Iterator[TypedEventBus]:
    """A bus that events are replayed onto."""
    with TypedEventBus(ServiceRegistry()) as bus:
        yield bus


@pytest.fixture
def memory() -> Iterator[Messaging]:
    with messaging.connect(f"memory://{uuid4().hex}", services=ServiceRegistry()) as m:
        yield m


@pytest.fixture
def found(memory: Messaging) -> Recorder[Message]:
    """The messages that recorders publish."""
    return subscribed(memory, "events/#", qos=1)


class Handled:
    """An untyped handler that collects its events."""

    def __init__(self, bus: TypedEventBus, *topics: str) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        bus.on(*(topics or ("*",)), handler=self._handle)

    def _handle(self, topic: str, event: dict[str, Any]) -> None:
        self.events.append((topic, event))

    @property
    def topics(self) -> list[str]:
        return [topic for topic, _ in self.events]

    @property
    def numbers(self) -> list[int]:
        return [data["n"] for _, data in self.events]


# --- the layout of a payload


def event(
    number: int = 0, time: datetime = NOON, topic: str = "a/b", recorder: str = "r", **data: Any
) -> RecordedEvent:
    return RecordedEvent(topic, time, recorder, number, {"n": number, **data})


def test_layout_of_a_payload() -> None:
    made = dump_event(event(7, NOON + timedelta(microseconds=123456), "orders/placed", total=99.5, by="Zoë"))
    assert json.loads(made) == {
        "event": 1,
        "recorder": "r",
        "sequence": 7,
        "topic": "orders/placed",
        "time": 1_773_489_600_123_456,
        "data": {"n": 7, "total": 99.5, "by": "Zoë"},
    }
    assert b"Zo\xc3\xab" in made


@settings(max_examples=50, deadline=None)
@given(st.binary() | st.recursive(st.none() | st.integers() | st.text(), lambda each: st.lists(each)).map(
    lambda each: json.dumps(each).encode()
))  # fmt: skip
def test_payloads_that_are_no_recorded_event_are_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError, match="not a recorded event"):
        load_event(payload)


def test_numbers_have_no_bound() -> None:
    """Those of other events have one; more values: ``tests/dispatch/eventdata``."""
    assert load_data(dump_data({"value": 2**20_000})) == {"value": 2**20_000}


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@table("value", [object(), {object(): 1}, {1: 0, "1": 0}, {None: 1}, nested(100_000)])
def test_values_that_cannot_be_recorded_are_refused(value: Any) -> None:
    with pytest.raises(InvalidEventError):
        dump_data({"value": value})


GOOD = json.loads(dump_event(event()))


@table(
    "change",
    [
        {"event": 2},
        {"event": True},
        {"topic": "a//b"},
        {"topic": None},
        {"recorder": ""},
        {"recorder": "\ud800"},
        {"sequence": -1},
        {"sequence": 2**63},
        {"sequence": "1"},
        {"time": 1.5},
        {"time": 2**62},
        {"data": None},
        {"data": []},
        {"data": {"$set": [1]}},
        {"data": {"x": {"$unknown": 1}}},
    ],
)
def test_a_payload_that_is_nearly_an_event_is_refused(change: dict[str, Any]) -> None:
    assert load_event(json.dumps({**GOOD, "more": "is ignored"}).encode()) == event()
    with pytest.raises(DecodeError):
        load_event(json.dumps({**GOOD, **change}).encode())


# --- the recorder


def test_a_recorder_publishes_each_event_to_the_channel_of_its_topic(
    bus: TypedEventBus, memory: Messaging, found: Recorder[Message]
) -> None:
    before = datetime.now(UTC)
    with EventRecorder(bus.monitor, memory, topics=["orders/*", "$log"]) as recorder:
        bus.deliver(Order(1, 2.5, NOON, [Item("lamp", 250)]), "orders/placed")
        bus.deliver_untyped("weather", {"n": 0})
        bus.deliver_untyped("$log", {"n": 1})
    found.wait_for(2)
    assert [each.context.channel for each in found] == ["events/orders/placed", "events/$log"]
    assert [each.context.content_type for each in found] == ["application/json"] * 2
    first, second = (load_event(each.payload) for each in found)
    assert (first.topic, first.recorder, first.sequence) == ("orders/placed", recorder.recorder, 0)
    assert convert(first.data, Order) == Order(1, 2.5, NOON, [Item("lamp", 250)])
    assert before <= first.time <= second.time <= datetime.now(UTC)
    assert (second.topic, second.sequence, second.data) == ("$log", 1, {"n": 1})
    assert [each.context.extensions["messageId"] for each in found] == [f"{recorder.recorder}-{n}" for n in (0, 1)]
    dto = recorder.get_dto()
    assert (dto.recorded, dto.pending, dto.lost) == (2, 0, 0)


def test_a_recorder_needs_no_spark() -> None:
    program = (
        "import sys; sys.modules |= {'pyspark': None, 'pyarrow': None}; import pyspark_messaging.recorder; sys.exit()"
    )
    assert ForkedProcess(program).communicate(PATIENCE) == (0, "", "")


def test_closing_records_the_events_that_were_published_before(
    bus: TypedEventBus, memory: Messaging, found: Recorder[Message]
) -> None:
    with EventRecorder(bus.monitor, memory) as recorder:
        for number in range(2000):
            bus.deliver_untyped("a", {"n": number})
    bus.deliver_untyped("a", {"n": -1})
    recorder.close()
    assert recorder.get_dto().recorded == 2000
    found.wait_for(2000)
    assert [load_event(each.payload).data["n"] for each in found] == list(range(2000))
    with pytest.raises(ClosedError), recorder:
        pass


def test_closing_the_bus_first_loses_nothing(bus: TypedEventBus, memory: Messaging) -> None:
    recorder = EventRecorder(bus.monitor, memory)
    for number in range(2000):
        bus.deliver_untyped("a", {"n": number})
    bus.close()
    recorder.close()
    assert recorder.get_dto().recorded == 2000
    with pytest.raises(ClosedError):
        EventRecorder(bus.monitor, memory)


def test_a_recorder_is_closed_on_an_event_loop(bus: TypedEventBus, memory: Messaging) -> None:
    async def main() -> EventRecorder:
        async with EventRecorder(bus.monitor, memory) as recorder:
            bus.deliver_untyped("a", {"n": 1})
        return recorder

    assert asyncio.run(main()).get_dto().recorded == 1


def test_a_recorder_may_begin_with_the_history(memory: Messaging) -> None:
    with TypedEventBus(ServiceRegistry(), history={"*": RangePolicy.unlimited()}) as bus:
        for number in range(5):
            bus.deliver_untyped("a", {"n": number})
        with EventRecorder(bus.monitor, memory, history=3) as recorder:
            pass
    assert recorder.get_dto().recorded == 3


def test_a_recorder_resumes_from_the_durable_history(
    tmp_path: Path, memory: Messaging, found: Recorder[Message]
) -> None:
    def run(begin: int, since: int, *, is_recorded: bool = True) -> int:
        with TypedEventBus(
            ServiceRegistry(),
            history={"*": RangePolicy.at_most(1)},
            durable_history=DurableHistory(tmp_path / "history", window=0.01),
        ) as bus:
            for number in range(begin, begin + 10):
                bus.deliver_untyped("other" if number % 5 == 4 else "a", {"n": number})
            if not is_recorded:
                return since
            with EventRecorder(bus.monitor, memory, topics="a", since=since, max_pending=3) as recorder:
                bus.deliver_untyped("a", {"n": begin + 10})
        dto = recorder.get_dto()
        assert (dto.pending, dto.lost) == (0, 0)
        return dto.resume

    since = run(0, 0)
    assert since == 12
    run(100, since, is_recorded=False)
    assert run(200, since) == 33
    numbers = [*range(11), *range(100, 110), *range(200, 211)]
    wanted = [each for each in numbers if each % 5 != 4]
    found.wait_for(len(wanted))
    recorded = [load_event(each.payload) for each in found]
    assert [each.data["n"] for each in recorded] == wanted
    assert len({each.recorder for each in recorded}) == 1
    assert [each.sequence for each in recorded] == sorted({each.sequence for each in recorded})


def test_a_resumed_recorder_numbers_events_that_the_history_does_not_keep_by_its_run(
    tmp_path: Path, memory: Messaging, found: Recorder[Message]
) -> None:
    durable = DurableHistory(tmp_path / "history", window=0.01)
    with TypedEventBus(ServiceRegistry(), history={"kept": RangePolicy.at_most(1)}, durable_history=durable) as bus:
        lasting = f"bus-{bus.monitor.history_id}"
        with EventRecorder(bus.monitor, memory, since=0) as recorder:
            assert recorder.recorder == lasting
            eventually(lambda: len(bus.monitor.taps) == 1)
            for topic in ("other", "kept", "other"):
                bus.deliver_untyped(topic, {"n": 1})
    found.wait_for(3)
    first, kept, last = [load_event(each.payload) for each in found]
    assert (kept.recorder, kept.sequence) == (lasting, 1)
    assert first.recorder == last.recorder != lasting
    assert (first.sequence, last.sequence) == (0, 1)


def test_a_recorder_resumes_with_the_first_event_that_the_broker_did_not_confirm(
    tmp_path: Path, memory: Messaging, found: Recorder[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = DurableHistory(tmp_path / "history", window=0.01)
    with TypedEventBus(ServiceRegistry(), history={"*": RangePolicy.at_most(1)}, durable_history=durable) as bus:
        publish = memory.publish

        def failing(channel: str, payload: bytes, **options: Any) -> Any:
            if b'"n":3' in payload:
                raise DeadlineError("the broker does not answer")
            return publish(channel, payload, **options)

        monkeypatch.setattr(memory, "publish", failing)
        with EventRecorder(bus.monitor, memory, since=0) as recorder:
            for number in range(6):
                bus.deliver_untyped("a", {"n": number})
        assert (recorder.get_dto().failed, recorder.get_dto().resume) == (1, 4)
        monkeypatch.undo()
        with EventRecorder(bus.monitor, memory, since=recorder.get_dto().resume) as recorder:
            pass
        assert recorder.get_dto().resume == 7
        found.wait_for(8)
        recorded = [load_event(each.payload) for each in found]
        assert [each.data["n"] for each in recorded] == [0, 1, 2, 4, 5, 3, 4, 5]
        assert {each.recorder for each in recorded} == {f"bus-{bus.monitor.history_id}"}
        assert [each.sequence for each in recorded] == [each.data["n"] + 1 for each in recorded]
        times = {(each.sequence, each.time) for each in recorded}
        assert len(times) == 6  # a repeated event has the same time, too: the archive finds it beside the first one
        with pytest.raises(ArgumentError, match="history and since"):
            EventRecorder(bus.monitor, memory, history=1, since=1)
        with pytest.raises(ArgumentError, match="since must be"):
            EventRecorder(bus.monitor, memory, since=-1)


def test_an_event_that_cannot_be_recorded_is_counted_and_leaves_a_gap(
    bus: TypedEventBus, memory: Messaging, found: Recorder[Message], caplog: pytest.LogCaptureFixture
) -> None:
    @dataclass
    class Odd:
        value: Any

    with EventRecorder(bus.monitor, memory) as recorder, caplog.at_level(logging.ERROR):
        for value in (1, threading.Lock(), 2):
            bus.deliver(Odd(value), "odd")
        bus.deliver_untyped("x" * 70_000, {})
    assert (recorder.get_dto().unfit, recorder.get_dto().recorded) == (2, 2)
    found.wait_for(2)
    assert [load_event(each.payload).sequence for each in found] == [0, 2]
    assert "a lock has no portable form" in caplog.text


def test_topics_of_any_script_survive_rabbitmq(bus: TypedEventBus, rabbitmq: RabbitMQ) -> None:
    topics = ["räume/küche", "$log", "a/$b/c-d_e", "話題"]
    channel = f"events-{uuid4().hex}"
    with messaging.connect(rabbitmq.url, services=ServiceRegistry()) as m:
        found = subscribed(m, f"{channel}/#", qos=1)
        with EventRecorder(bus.monitor, m, channel) as recorder:
            for topic in topics:
                bus.deliver_untyped(topic, {"n": 1})
            bus.deliver_untyped("x" * 300, {"n": 1})  # more than AMQP can carry
        found.wait_for(len(topics))
    assert [load_event(each.payload).topic for each in found] == topics
    assert [each.context.channel for each in found] == [f"{channel}/{topic}" for topic in topics]
    assert (recorder.get_dto().recorded, recorder.get_dto().lost) == (4, 1)


@table(
    "arguments, error",
    [
        ({"channel": "a/+"}, InvalidChannelError),
        ({"topics": "a/#"}, InvalidTopicError),
        ({"topics": []}, ArgumentError),
        ({"name": ""}, ArgumentError),
        ({"name": "a\n"}, ArgumentError),
        ({"max_pending": 0}, ArgumentError),
        ({"timeout": -1}, ArgumentError),
        ({"history": -1}, ArgumentError),
    ],
)
def test_wrong_arguments_of_a_recorder(
    bus: TypedEventBus, memory: Messaging, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        EventRecorder(bus.monitor, memory, **arguments)
    assert bus.get_dto().monitors == 0


def test_a_stuck_broker_blocks_neither_publishers_nor_handlers(
    bus: TypedEventBus, caplog: pytest.LogCaptureFixture
) -> None:
    require("mosquitto")
    handled = Handled(bus)
    with Mosquitto() as broker, messaging.connect(broker.url, services=ServiceRegistry()) as m:
        recorder = EventRecorder(bus.monitor, m, max_pending=50, timeout=1.0)
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            for number in range(500):
                bus.deliver_untyped("a", {"n": number})
            bus.flush().result(PATIENCE)
            assert len(handled.events) == 500
            bus.monitor.flush().result(PATIENCE)
            dto = recorder.get_dto()
            assert dto.pending + dto.failed + dto.unknown + dto.crowded == 500
            assert dto.pending <= 50
            assert dto.crowded >= 400  # on a slow machine, a few of the first fail before the last are published
            eventually(lambda: recorder.get_dto().pending == 0)
            assert recorder.get_dto().lost == 500
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        found = subscribed(m, "events/#", qos=1)
        bus.deliver_untyped("a", {"n": 500})
        found.wait_until(lambda messages: any(load_event(each.payload).data["n"] == 500 for each in messages))
        recorder.close()
    assert load_event(found[-1].payload).sequence == 500  # the gap is seen
    told = [each.message for each in caplog.records if "not recorded" in each.message]
    assert 1 <= len(told) <= 4  # and not one for each


def test_closing_does_not_wait_for_a_stuck_broker(bus: TypedEventBus, caplog: pytest.LogCaptureFixture) -> None:
    require("mosquitto")
    with Mosquitto() as broker:
        m = messaging.connect(broker.url, services=ServiceRegistry(), close_timeout=0.1)
        recorder = EventRecorder(bus.monitor, m)
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            bus.deliver_untyped("a", {"n": 0})
            begun = time.monotonic()
            recorder.close(timeout=0.3)
            assert 0.25 < time.monotonic() - begun < PATIENCE
            m.close()
        finally:
            os.kill(broker.pid, signal.SIGCONT)
    assert "was closed before the broker confirmed 1 events" in caplog.text
    eventually(lambda: recorder.get_dto().lost == 1)


def test_events_that_the_monitor_drops_are_a_gap(memory: Messaging, found: Recorder[Message]) -> None:
    with TypedEventBus(ServiceRegistry()) as bus:
        bus.monitor.limit = 10
        recorder = EventRecorder(bus.monitor, memory)
        with recorder._lock:  # its thread does not get to run
            for number in range(50):
                bus.deliver_untyped("a", {"n": number})
        recorder.close()
        missed = recorder.get_dto().missed
        assert 0 < missed <= 40
        found.wait_for(50 - missed)
    sequences = [load_event(each.payload).sequence for each in found]
    assert sequences == sorted({*sequences})
    assert sequences[-1] == 49  # so many numbers are missing as events are


def test_events_are_recorded_and_a_recorder_is_closed_without_a_breakable_wait(
    bus: TypedEventBus, memory: Messaging
) -> None:
    with memory.subscribe("events/#", qos=1) as stream:
        recorder = EventRecorder(bus.monitor, memory)
        for number in range(10):
            bus.deliver_untyped("a", {"n": number})
        with breakable_waits() as found:
            recorder.get_dto()
            recorder.close()
        assert recorder.get_dto().recorded == 10
        assert [load_event(stream.receive(PATIENCE).payload).data for _ in range(10)] == [{"n": n} for n in range(10)]
    assert not found


# --- reading an archive, without Spark


def messages(*payloads: bytes, first: int = 0) -> pa.RecordBatch:
    """As the source has them."""
    count = len(payloads)
    return pa.RecordBatch.from_pydict(
        {
            "value": list(payloads),
            "channel": ["events/a"] * count,
            "partition": pa.array([0] * count, pa.int32()),
            "offset": range(first, first + count),
            "timestamp": pa.array([datetime.now(UTC)] * count, pa.timestamp("us", tz="Asia/Tokyo")),
        }
    )


def write(path: Path, *events: RecordedEvent, payloads: tuple[bytes, ...] = ()) -> str:
    """Have a file more in an archive."""
    rows = to_rows(messages(*map(dump_event, events), *payloads), lambda _: True)
    pq.write_to_dataset(pa.Table.from_batches([rows]), path, partition_cols=["date"], basename_template=f"{uuid4()}-{{i}}.parquet")  # fmt: skip # noqa: E501
    return str(path)


def numbers(found: Iterator[RecordedEvent]) -> list[int]:
    return [each.sequence for each in found]


def test_rows_of_an_archive() -> None:
    rows = to_rows(messages(dump_event(event(3, NOON, "a/b")), b"hello", dump_event(event(4, NOON, "c"))), "a/b".__eq__)
    assert rows.schema == SCHEMA
    good, bad = rows.to_pylist()
    assert good == {
        "topic": "a/b", "timestamp": NOON, "data": '{"n":3}', "recorder": "r", "sequence": 3, "channel": "events/a",
        "partition": 0, "offset": 0, "_corrupt_record": None, "_error": None, "date": date(2026, 3, 14),
    }  # fmt: skip
    assert (bad["topic"], bad["data"], bad["_corrupt_record"], bad["offset"]) == (None, None, b"hello", 1)
    assert bad["date"] == bad["timestamp"].astimezone(UTC).date()
    assert "no JSON" in bad["_error"]
    assert to_rows(messages(), bool).num_rows == 0
    timeless = messages(b"hello").set_column(4, "timestamp", pa.nulls(1, pa.timestamp("us", tz="UTC")))
    (bad,) = to_rows(timeless, bool).to_pylist()
    assert datetime.now(UTC) - timedelta(minutes=1) < bad["timestamp"] <= datetime.now(UTC)


def test_a_range_has_its_start_and_not_its_end(tmp_path: Path) -> None:
    moment = timedelta(microseconds=1)
    path = write(tmp_path, *(event(number, NOON + number * moment) for number in range(5)))
    assert numbers(read_events(path, start=NOON + moment, end=NOON + 3 * moment)) == [1, 2]
    assert numbers(read_events(path, start=NOON, end=NOON)) == []
    east = timezone(timedelta(hours=9))
    assert numbers(read_events(path, start=(NOON + moment).astimezone(east), end=NOON + 2 * moment)) == [1]
    assert numbers(read_events(path, **ALWAYS)) == [0, 1, 2, 3, 4]


def test_events_come_in_order_over_files_and_days_and_each_once(tmp_path: Path) -> None:
    several = [
        event(number, NOON + timedelta(hours=number * 7), recorder=name) for number in range(20) for name in "ab"
    ]
    for part in (several[::-3], several[1::3], several[::2], several[::-2]):
        write(tmp_path, *part)
    write(tmp_path, *several)
    reading = ReadRows()
    assert list(read_events(tmp_path, **ALWAYS, reading=reading)) == several
    assert reading.events == 40
    assert reading.duplicates == 14 + 13 + 20 + 20


def test_an_archive_beyond_the_buffer_is_sorted_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = [event(number, NOON + timedelta(seconds=number // 3)) for number in range(3000)]
    for part in (several[::-2], several[::2], several[1::2][:500]):
        write(tmp_path / "archive", *part)
    (tmp_path / "sorting").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "sorting"))
    monkeypatch.setattr(reader, "BUFFER_BYTES", 2000)
    monkeypatch.setattr(reader, "_ROWS", 100)
    events = read_events(tmp_path / "archive", **ALWAYS)
    first = next(events)
    assert len(list((tmp_path / "sorting").rglob("*.arrow"))) > 5
    assert [first, *events] == several
    assert list((tmp_path / "sorting").iterdir()) == []
    events = read_events(tmp_path / "archive", **ALWAYS)
    next(events)
    events.close()
    assert list((tmp_path / "sorting").iterdir()) == []


@table(
    "topics, found",
    [("*", [0, 1, 2, 3, 4]), ("org/*", [1, 2, 3]), ("org/+/x", [2]), ("org/+", [1]), (["org", "other/*"], [0, 4])],
)
def test_topics_of_a_replay(tmp_path: Path, other: TypedEventBus, topics: Any, found: list[int]) -> None:
    names = ["org", "org/a", "org/a/x", "org/a/b/x", "other/x"]
    path = write(tmp_path, *(event(number, topic=topic) for number, topic in enumerate(names)))
    handled = Handled(other)
    assert replay(path, other, **ALWAYS, topics=topics).delivered == len(found)
    assert handled.numbers == found


def test_incomplete_and_deleted_files_are_ignored(tmp_path: Path) -> None:
    log = tmp_path / "_spark_metadata"
    log.mkdir()

    def commit(name: str, *entries: tuple[Path | str, str]) -> None:
        lines = [
            json.dumps(
                {"path": f"file:///moved%20since/date=2026-03-14/{getattr(each, 'name', each)}", "action": action}
            )
            for each, action in entries
        ]
        (log / name).write_text("\n".join(["v1", *lines]))

    files = []
    for number in range(5):
        before = {*tmp_path.rglob("*.parquet")}
        write(tmp_path, event(number))
        files += {*tmp_path.rglob("*.parquet")} - before
    commit("0", (files[4], "add"))  # no longer in the summary
    commit("1.compact", (files[0], "add"), (files[1], "add"), ("gone.parquet", "add"))
    commit("2", (files[2], "add"), (files[1], "delete"))
    (log / ".3.crc").write_bytes(b"\x00")
    files[3].write_bytes(b"PAR1 being written")
    assert numbers(read_events(tmp_path, **ALWAYS)) == [0, 2]
    commit("3", (files[3], "add"))
    with pytest.raises(ArchiveUnreadableError, match="parquet"):
        numbers(read_events(tmp_path, **ALWAYS))
    (log / "4").write_text("v2\n")
    with pytest.raises(ArchiveUnreadableError, match="version 'v2'"):
        read_events(tmp_path, **ALWAYS)


def test_paths_without_an_archive_are_refused(tmp_path: Path, other: TypedEventBus) -> None:
    with pytest.raises(ArchiveMissingError):
        replay(tmp_path / "missing", other, **ALWAYS)
    with pytest.raises(ArchiveMissingError):
        replay(tmp_path, other, **ALWAYS)
    with pytest.raises(ArchiveUnreadableError):
        replay("nothing://at/all", other, **ALWAYS)
    with pytest.raises(ArchiveUnreadableError) as told:
        replay("nothing://key:secret@host/all?token=secret", other, **ALWAYS)
    assert "secret" not in f"{told.value} {told.value.__cause__}"
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchiveUnreadableError) as caught:
        replay(tmp_path / "file", other, **ALWAYS)
    assert caught.value.path == str(tmp_path / "file")
    with pytest.raises(ArchiveUnreadableError):
        replay(tmp_path, other, **ALWAYS)
    (tmp_path / "date=2026-03-14").mkdir()
    assert replay(tmp_path, other, **ALWAYS).delivered == 0
    pq.write_table(pa.table({"timestamp": [1], "topic": ["a"]}), tmp_path / "date=2026-03-14" / "x.parquet")
    with pytest.raises(ArchiveUnreadableError, match="no column data, recorder, sequence"):
        replay(tmp_path, other, **ALWAYS)


@table(
    "arguments, error",
    [
        ({"start": datetime(2026, 1, 1)}, InvalidRangeError),
        ({"end": datetime(2026, 1, 1)}, InvalidRangeError),
        ({"start": "2026-01-01"}, InvalidRangeError),
        ({"start": NOON, "end": NOON - timedelta(microseconds=1)}, InvalidRangeError),
        ({"topics": "a/#"}, InvalidTopicError),
        ({"topics": ()}, ArgumentError),
        ({"speed": 0}, ArgumentError),
        ({"speed": math.nan}, ArgumentError),
        ({"speed": True}, ArgumentError),
        ({"prefix": "a/+"}, InvalidTopicError),
        ({"mark": 3}, ArgumentError),
        ({"source": 3}, ArgumentError),
    ],
)
def test_wrong_arguments_of_a_replay(
    tmp_path: Path, other: TypedEventBus, arguments: dict[str, Any], error: type[Exception]
) -> None:
    handled = Handled(other)
    write(tmp_path, event())
    with pytest.raises(error):
        replay(**{"source": tmp_path, "bus": other, **ALWAYS, **arguments})
    assert handled.events == []


# --- replay


class Clock:
    """Time that passes only during waits."""

    def __init__(self, on_wait: Callable[[threading.Event], object] = lambda _: None) -> None:
        self.time = 100.0
        self.waits: list[float] = []
        self._on_wait = on_wait

    def now(self) -> float:
        return self.time

    def wait(self, stop: threading.Event, seconds: float) -> None:
        self.waits.append(seconds)
        self.time += seconds
        self._on_wait(stop)


@table("speed, waits", [(1.0, [2, 1, 3600]), (10.0, [0.2, 0.1, 360]), (0.5, [4, 2, 7200])])
def test_pace_of_a_replay(tmp_path: Path, other: TypedEventBus, speed: float, waits: list[float]) -> None:
    path = write(
        tmp_path, *(event(number, NOON + timedelta(seconds=at)) for number, at in enumerate([0, 2, 3, 3, 3603]))
    )
    clock, handled = Clock(), Handled(other)
    found = replay(path, other, **ALWAYS, speed=speed, clock=clock)
    assert clock.waits == pytest.approx(waits)
    assert handled.numbers == [0, 1, 2, 3, 4]
    assert (found.first, found.last) == (NOON, NOON + timedelta(seconds=3603))


def test_a_replay_that_is_late_catches_up(tmp_path: Path, other: TypedEventBus) -> None:
    path = write(tmp_path, *(event(number, NOON + timedelta(seconds=number)) for number in range(4)))
    clock = Clock()

    @other.on("*")
    def slow(event: dict[str, Any]) -> None:
        if event["n"] == 1:
            clock.time += 1.5

    clock._on_wait = lambda _: other.flush().result(PATIENCE)
    replay(path, other, **ALWAYS, speed=1.0, clock=clock)
    assert sum(clock.waits) == pytest.approx(3.0, abs=1.6)
    assert len(clock.waits) < 4


def test_a_replay_without_speed_waits_for_slow_handlers_and_not_for_the_clock(
    tmp_path: Path, other: TypedEventBus
) -> None:
    path = write(tmp_path, *(event(number, NOON + timedelta(seconds=number)) for number in range(12_000)))
    handled, clock = Handled(other), Clock()
    assert replay(path, other, **ALWAYS, clock=clock).delivered == 12_000
    assert handled.numbers == list(range(12_000))  # when it returns, all are handled
    assert clock.waits == []


def test_a_replay_is_stopped_while_it_waits(tmp_path: Path, other: TypedEventBus) -> None:
    path = write(tmp_path, *(event(number, NOON + timedelta(hours=number)) for number in range(3)))
    handled = Handled(other)
    found = replay(path, other, **ALWAYS, speed=1.0, stop=threading.Event(), clock=Clock(threading.Event.set))
    assert (found.delivered, found.is_stopped) == (1, True)
    other.flush().result(PATIENCE)
    assert handled.numbers == [0]
    stop = threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    begun = time.monotonic()
    assert replay(path, other, **ALWAYS, speed=1.0, stop=stop).is_stopped
    assert time.monotonic() - begun < PATIENCE
    timer.join()


def test_a_replay_is_stopped_while_a_handler_does_not_return(tmp_path: Path, other: TypedEventBus) -> None:
    path, stop, entered = write(tmp_path, event()), threading.Event(), threading.Event()

    @other.on("*")
    def stuck(event: dict[str, Any]) -> None:
        entered.set()
        stop.wait(PATIENCE)

    threading.Thread(target=lambda: entered.wait(PATIENCE) and stop.set(), daemon=True).start()
    assert replay(path, other, **ALWAYS, stop=stop) == Replayed(1, 0, 0, 0, NOON, NOON, is_stopped=True)


def test_replayed_events_can_be_told_by_a_prefix_or_by_a_mark(tmp_path: Path, other: TypedEventBus) -> None:
    path = write(tmp_path, event(5, topic="orders/placed", id=1, total=2.0, placed=NOON))
    handled, orders = Handled(other), []

    @other.on("replay/orders/*")
    def order(event: Order) -> None:
        orders.append(event)

    replay(path, other, **ALWAYS, prefix="replay", mark="replayed")
    ((topic, data),) = handled.events
    assert topic == "replay/orders/placed"
    assert data["replayed"] == {"time": NOON, "recorder": "r", "sequence": 5}
    assert orders == [Order(1, 2.0, NOON)]
    replay(path, other, **ALWAYS)
    assert handled.events[1] == ("orders/placed", {"n": 5, "id": 1, "total": 2.0, "placed": NOON})


def test_unreadable_data_is_left_out(tmp_path: Path, other: TypedEventBus) -> None:
    write(tmp_path, event(0), event(2), payloads=(b"none", b""))
    table = pa.Table.from_batches([to_rows(messages(dump_event(event(1))), bool)])
    odd = table.set_column(2, "data", pa.array(['{"x":{"$future":1}}']))
    pq.write_to_dataset(odd, tmp_path, partition_cols=["date"], basename_template="odd-{i}.parquet")
    handled = Handled(other)
    found = replay(tmp_path, other, **ALWAYS)
    assert (found.delivered, found.unreadable) == (2, 1)
    assert handled.numbers == [0, 2]


def test_a_replay_is_not_for_event_loops(tmp_path: Path, other: TypedEventBus) -> None:
    path = write(tmp_path, event())

    async def main() -> int:
        with pytest.raises(ArgumentError, match="to_thread"):
            replay(path, other, **ALWAYS)
        return (await asyncio.to_thread(replay, path, other, **ALWAYS)).delivered

    assert asyncio.run(main()) == 1


def test_a_replay_onto_a_closed_bus(tmp_path: Path) -> None:
    path = write(tmp_path, event())
    with TypedEventBus(ServiceRegistry()) as bus:
        pass
    with pytest.raises(ClosedError):
        replay(path, bus, **ALWAYS)


@table(
    "arguments, error",
    [
        ({"topics": "a/#"}, InvalidTopicError),
        ({"channel": "events/#"}, InvalidChannelError),
        ({"trigger": "availableNow"}, ArgumentError),
        ({"spark": "no session"}, ArgumentError),
    ],
)
def test_wrong_arguments_of_an_archive(tmp_path: Path, arguments: dict[str, Any], error: type[Exception]) -> None:
    given = {"spark": None, "url": "mqtt://nowhere", "journal_path": tmp_path, "path": tmp_path}
    with pytest.raises(error):
        archive(**{**given, "checkpoint": tmp_path, **arguments})


# --- all of it, with Spark


class Archived:
    """An archive at a broker of its own."""

    def __init__(self, spark: SparkSession, broker: Mosquitto, folder: Path) -> None:
        self.spark = spark
        self.url = broker.url
        self.path = folder / "the archive"
        self.folder = folder

    def start(self, **options: Any) -> StreamingQuery:
        return archive(
            self.spark, url=self.url, path=self.path, checkpoint=self.folder / "checkpoint",
            journal_path=self.folder / "journal", options={"availableNowQuiet": "0.3"}, **options,
        )  # fmt: skip

    def catch_up(self, **options: Any) -> None:
        """A run that writes the kept messages, and ends."""
        query = self.start(trigger={"availableNow": True}, **options)
        assert query.awaitTermination(int(QUERY_PATIENCE))
        error = query.exception()
        if error is not None:
            raise error


@pytest.fixture
def archived(spark: SparkSession, broker: Mosquitto, tmp_path: Path) -> Archived:
    return Archived(spark, broker, tmp_path)


def test_events_of_a_bus_are_archived_and_replayed_onto_another_one(
    archived: Archived, bus: TypedEventBus, other: TypedEventBus
) -> None:
    archived.catch_up()  # from now on the broker keeps messages
    notes = {"nan": math.inf, "big": 2**70, "bytes": b"\x00", "decimal": Decimal("1.10"), "$set": {"a": {1, 2}}}
    given = [
        Order(number, number / 3, NOON + timedelta(days=number), [Item("lamp", number)] * 2, Colour.GREEN, notes)
        for number in range(200)
    ]
    begun = datetime.now(UTC)
    with messaging.connect(archived.url, services=ServiceRegistry()) as m:
        with EventRecorder(bus.monitor, m) as recorder:
            for number, each in enumerate(given):
                bus.deliver(each, f"orders/{'new' if number % 2 else 'old'}/räume")
            bus.deliver_untyped("$other", {"n": 1})
        assert recorder.get_dto().recorded == 201
        m.publish("events/nonsense", b"\xff no event", qos=1).result(PATIENCE)
    ended = datetime.now(UTC)
    archived.catch_up()

    orders: list[Order] = []
    other.on("orders/+/räume", handler=orders.append, type=Order)
    handled = Handled(other)
    found = replay(archived.path, other, start=begun, end=ended)
    assert (found.delivered, found.duplicates, found.unreadable, found.refused) == (201, 0, 0, 0)
    assert orders == given
    assert handled.events[-1] == ("$other", {"n": 1})

    frame = archived.spark.read.parquet(str(archived.path))
    assert frame.columns == SCHEMA.names
    assert frame.schema["sequence"].dataType.typeName() == "long"
    *rows, corrupt = sorted(frame.collect(), key=lambda row: math.inf if row["sequence"] is None else row["sequence"])
    assert (bytes(corrupt["_corrupt_record"]), corrupt["channel"]) == (b"\xff no event", "events/nonsense")
    assert [row["sequence"] for row in rows] == list(range(201))
    assert {row["recorder"] for row in rows} == {recorder.recorder}
    assert rows[0]["channel"] == "events/orders/old/räume"

    (last,) = read_events(archived.path, start=begun, end=ended, topics="$other")
    assert len(list(read_events(archived.path, start=last.time, end=ended))) == 1
    orders.clear()
    assert replay(frame, other, start=begun, end=last.time).delivered == 200  # the end is not among them, here either
    assert orders == given


@pytest.fixture
def tokyo(spark: SparkSession) -> Iterator[None]:
    """A session that shows times as they are in Tokyo."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    yield
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.slow
@pytest.mark.usefixtures("tokyo")
def test_an_archive_continues_after_a_restart_and_replays_drop_duplicates(
    archived: Archived, other: TypedEventBus
) -> None:
    def publish(*given: RecordedEvent) -> None:
        with messaging.connect(archived.url, services=ServiceRegistry()) as m:
            for each in given:
                m.publish(f"events/{each.topic}", dump_event(each), qos=1).result(PATIENCE)

    topics = ["a/*", "b", "a/+"]
    archived.catch_up(topics=topics)
    publish(*(event(number, NOON + timedelta(hours=number), "a/x") for number in range(10)))
    query = archived.start(topics=topics, trigger={"processingTime": "0 seconds"}, name="events")
    try:
        assert query.name == "events"
        eventually(lambda: sum(each.numInputRows for each in query.recentProgress) == 10, patience=QUERY_PATIENCE)
        query.processAllAvailable()
    finally:
        query.stop()
    publish(
        event(3, NOON + timedelta(hours=3), "a/x"), event(10, NOON, "b"), event(11, NOON, "c"), event(12, NOON, "a")
    )
    publish(event(10, NOON, "b"), event(13, NOON, "a/y"))
    archived.catch_up(topics=topics)

    frame = archived.spark.read.parquet(str(archived.path))
    assert frame.count() == 10 + 2 + 2  # at least once: the same row twice is there twice; neither 'c' nor 'a' is
    assert frame.dropDuplicates(["recorder", "sequence"]).count() == 12
    assert [each.name for each in archived.path.glob("date=*")] == ["date=2026-03-14"]  # in UTC
    for source in (archived.path, frame):
        handled = Handled(other)
        found = replay(source, other, **ALWAYS)
        assert (found.delivered, found.duplicates) == (12, 2)
        assert handled.numbers == [0, 10, 13, *range(1, 10)]


@pytest.mark.slow
def test_an_archive_that_spark_cannot_read(spark: SparkSession, tmp_path: Path, other: TypedEventBus) -> None:
    write(tmp_path, event())
    frame = spark.read.parquet(str(tmp_path))
    with pytest.raises(ArchiveUnreadableError, match="no column data"):
        replay(frame.drop("data"), other, **ALWAYS)
    with pytest.raises(ArchiveUnreadableError, match="Spark"):
        replay(frame.withColumn("timestamp", frame["_corrupt_record"]), other, **ALWAYS)
    (file,) = tmp_path.rglob("*.parquet")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ArchiveUnreadableError, match="Spark"):
        replay(frame, other, **ALWAYS)


def test_a_replay_waits_for_the_pace_without_a_breakable_wait(tmp_path: Path, other: TypedEventBus) -> None:
    path = write(tmp_path, *(event(number, NOON + timedelta(seconds=number)) for number in range(2)))
    handled = Handled(other)
    with breakable_waits() as found:
        replay(path, other, **ALWAYS, speed=100.0, stop=threading.Event())
    assert handled.numbers == [0, 1]
    assert not found

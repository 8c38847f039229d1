"""The durable history: what a later run of a bus knows of the earlier ones (157.6)."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reactivex import operators

from messaging.errors import (
    ArgumentError,
    ClosedError,
    InvalidTopicError,
    JournalError,
    JournalFullError,
    JournalLockedError,
    JournalUnreadableError,
)
from messaging.journal import Journal
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from messaging.typedevent import DurableHistory, MonitorEvent, RangePolicy, TypedEventBus, TypedEventMonitor, store
from messaging.typedevent.durable import DurableHistoryDTO
from tests.disks import ballast
from tests.typedevent import conftest as handlers
from tests.typedevent.conftest import Bus, Item, Order

ALL = {"*": RangePolicy.unlimited()}
#: seconds; short, so that nothing waits for it
WINDOW = 0.02

Open = Callable[..., Bus]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "history"


@pytest.fixture
def opened(folder: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Open]:
    """Open a bus with the durable history at ``folder``; it is closed at the end of the test."""
    found: list[Bus] = []

    def opened(
        history: dict[str, RangePolicy] | None = None, path: Path = folder, capacity: int = 10_000, **options: Any
    ) -> Bus:
        durable = DurableHistory(path, **{"window": WINDOW, **options})
        bus = Bus(
            ServiceRegistry(),
            history=ALL if history is None else history,
            history_capacity=capacity,
            durable_history=durable,
        )
        bus.caplog = caplog
        found.append(bus)
        return bus

    yield opened
    for each in found:
        each.close()


class Sequences(Recorder[int]):
    """An observer that records the sequences of its events."""

    def on_next(self, item: Any) -> None:
        self.append(item.sequence)


class Slow(Sequences):
    """It returns from its events once it is opened."""

    def __init__(self) -> None:
        super().__init__(self._stay)
        self.begun: Recorder[int] = Recorder()
        self.opened = threading.Event()

    def _stay(self, sequence: int) -> None:
        self.begun.append(sequence)
        assert self.opened.wait(PATIENCE)


def replayed(bus: TypedEventBus, since: Any = 0, topics: Any = "*", **options: Any) -> list[MonitorEvent]:
    """Return what ``replay`` emits before the live events."""
    found: Recorder[MonitorEvent] = Recorder()
    with bus.monitor.replay(since, topics, **options).subscribe(found):
        bus.monitor.flush().result(PATIENCE)
    if found.error is not None:
        raise found.error
    return found


def past(bus: TypedEventBus) -> list[MonitorEvent]:
    """Return the events of the history in memory."""
    return bus.monitor.monitor_events(100, True).pipe(operators.to_list()).run()


def numbers(events: list[MonitorEvent]) -> list[int]:
    return [event.event_data["n"] for event in events]


def state(bus: TypedEventBus) -> DurableHistoryDTO:
    found = bus.get_dto().durable
    assert found is not None
    return found


def stored(bus: TypedEventBus) -> None:
    """Wait until no event waits for the disk."""
    eventually(lambda: state(bus).pending == 0)


# --- after a restart


def test_a_monitor_gets_events_of_earlier_runs_with_their_times_origins_and_sequences(opened: Open) -> None:
    origin = uuid.uuid4()
    began = time.time()
    with opened() as bus:
        bus.publish("a", {"n": 1})
        bus.publish("a", {"n": 2}, origin=origin, time=1_000_000_000.25)
        bus.drain()
        live = past(bus)
    assert [each.sequence for each in live] == [1, 2]
    assert began - 1 < live[0].publication_time.timestamp() < time.time() + 1
    assert live[1].publication_time == datetime.datetime(2001, 9, 9, 1, 46, 40, 250_000, datetime.UTC)
    assert [each.origin for each in live] == [None, origin]
    with opened() as bus:
        assert past(bus) == live == replayed(bus)


def test_the_history_in_memory_is_filled_as_the_policies_say(opened: Open) -> None:
    policies = {"a": RangePolicy.exact(2), "b/*": RangePolicy.at_most(3)}
    with opened({**policies, "c": RangePolicy.at_most(9)}) as bus:
        for topic in ("a", "b/x", "b/y", "c"):
            bus.count(range(5), topic)
    with opened(policies, capacity=6) as bus:
        assert [(each.topic, each.event_data["n"]) for each in past(bus)] == [
            ("a", 3), ("a", 4), ("b/x", 4), ("b/y", 2), ("b/y", 3), ("b/y", 4),
        ]  # fmt: skip
        assert bus.get_dto().recorded == 6
        assert len(replayed(bus)) == 20, "the disk has more"


@table("capacity", [10_000, 0])
def test_sequences_go_on(opened: Open, tmp_path: Path, capacity: int) -> None:
    """A history without room in memory is on the disk."""
    for run in range(3):
        with opened(path=tmp_path, capacity=capacity) as bus:
            bus.count(range(4))
            assert [each.sequence for each in replayed(bus)] == [*range(1, run * 4 + 5)]
            assert bus.get_dto().recorded == min(capacity, run * 4 + 4)


def test_only_topics_that_a_policy_keeps_are_stored(opened: Open) -> None:
    with opened({"a/*": RangePolicy.at_most(1), "a/x": RangePolicy.none()}) as bus:
        bus.numbered("a/y 1", "a/x 2", "b 3", "a/z 4")
        bus.monitor.configure_history_storage("b", RangePolicy.at_most(1))
        bus.numbered("b 5", "a/y 6")
        bus.monitor.remove_history_storage("a/*")
        bus.numbered("a/y 7")
    with opened({}) as bus:
        assert numbers(replayed(bus)) == [1, 4, 5, 6]


def test_given_topics_are_stored_without_a_policy(opened: Open) -> None:
    with opened({"c": RangePolicy.at_most(1)}, topics=["a/*", "b"]) as bus:
        bus.numbered("a/y 1", "b 2", "c 3", "d 4", "b 5")
    with opened({"b": RangePolicy.at_most(1)}) as bus:
        assert [(each.sequence, each.event_data["n"]) for each in replayed(bus)] == [(1, 1), (2, 2), (4, 5)]
        assert bus.get_dto().recorded == 1


UUID7 = uuid.UUID(int=7)


def test_values_and_types_survive(opened: Open) -> None:
    """A typed event arrives as its type; more values: ``tests/dispatch/eventdata``."""
    order = Order(1, "a", [Item("x", 2.5), Item("y")])
    data = {"text": "\ud800", "big": math.inf, "raw": b"\x00\xff", "id": UUID7, "$only": {"$bytes": "no base64"}}
    with opened() as bus:
        bus.deliver(order, "a")
        bus.deliver_untyped("b", data)
    with opened() as bus:
        late = handlers.Recorder().typed(bus, "a", type=Order, history=1)
        maps = handlers.Recorder().untyped(bus, "b", history=9)
        bus.drain()
    assert late.data == [order]
    assert maps.data == [data]


@dataclasses.dataclass
class Holding:
    what: Any


def test_an_event_that_cannot_be_stored_is_logged_and_counted_and_kept_in_memory(opened: Open) -> None:
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"a": deep}
    with opened() as bus:
        bus.deliver(Holding(object()), "a")
        bus.deliver_untyped("a", deep)
        bus.numbered("a 3")
        stored(bus)
        assert state(bus).stored == 1
        assert state(bus).failed == 2
        assert bus.get_dto().recorded == 3
        assert bus.logged("an event on 'a' is not stored: an object has no portable form")
        assert bus.logged("an event on 'a' is not stored: an event is nested deeper than")
    with opened() as bus:
        assert [(each.sequence, each.event_data["n"]) for each in replayed(bus)] == [(3, 3)]


# --- replaying


def test_replay_begins_at_a_sequence_or_a_time_and_goes_on_live(opened: Open) -> None:
    with opened() as bus:
        bus.count(range(10))
    with opened() as bus:
        bus.count(range(10, 15))
        time_of = {each.event_data["n"]: each.publication_time for each in replayed(bus)}
        assert [*time_of] == [*range(15)]
        for since, first in ((0, 0), (1, 0), (8, 7), (12, 11), (time_of[5], 5), (time_of[12], 12), (16, 15)):
            found: list[MonitorEvent] = []
            with bus.monitor.replay(since).subscribe(found.append):
                bus.monitor.flush().result(PATIENCE)
                bus.numbered("a 99")
                bus.monitor.flush().result(PATIENCE)
            at = [event for event in found if event.event_data["n"] != 99]
            assert numbers(at) == [*range(first, 15)]
            assert numbers(found)[-1] == 99
        naive = datetime.datetime.fromtimestamp(time_of[14].timestamp())
        assert numbers(replayed(bus, naive))[0] == 14
        assert len(replayed(bus, datetime.datetime.min)) == 22
        assert replayed(bus, datetime.datetime.max) == []


@table("since", [5, datetime.datetime.max])
def test_replay_emits_live_events_whatever_it_began_with(
    since: int | datetime.datetime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bus(ServiceRegistry(), history=ALL, durable_history=DurableHistory(folder / str(type(since)))) as bus:
        bus.count(range(2))

        def begun(*arguments: Any) -> Any:
            bus.numbered("a 2")
            stored(bus)
            bus.numbered("a 3")
            yield from store.replayed(*arguments)

        monkeypatch.setattr("messaging.typedevent.monitor.replayed", begun)
        found: list[MonitorEvent] = []
        with bus.monitor.replay(since).subscribe(found.append):
            eventually(lambda: len(found) == 2)
            bus.numbered("a 4")
            eventually(lambda: len(found) == 3)
    assert numbers(found) == [2, 3, 4]


def test_replay_without_a_durable_history_reads_the_memory(bus: Bus) -> None:
    bus.monitor.configure_history_storage("a", RangePolicy.at_most(3))
    bus.count(range(5))
    bus.numbered("b 77")
    found: list[MonitorEvent] = []
    with bus.monitor.replay(4).subscribe(found.append):
        bus.numbered("b 78", "a 79")
        bus.monitor.flush().result(PATIENCE)
    assert [(each.sequence, each.event_data["n"]) for each in found] == [(4, 3), (5, 4), (0, 78), (6, 79)]
    assert numbers(replayed(bus, found[1].publication_time)) == [4, 79]


def test_replay_selects_topics_and_permitted_ones(folder: Path) -> None:
    from messaging.typedevent import TopicPermission, TopicPolicy

    policy = TopicPolicy({"reader": [TopicPermission("a/*", "subscribe")], None: [TopicPermission("*", "publish")]})
    durable = DurableHistory(folder, window=WINDOW)
    with Bus(ServiceRegistry(), history=ALL, durable_history=durable, permissions=policy) as bus:
        bus.numbered("a/x 1", "b/x 2", "a/y 3")
        assert numbers(replayed(bus, principal="reader")) == [1, 3]
        assert numbers(replayed(bus, 0, ["a/y", "b/*"], principal="reader")) == [3]
        assert replayed(bus) == []


def test_a_slow_observer_of_a_long_replay_holds_up_only_itself(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messaging.typedevent.store.NEAR", 10)
    bus = opened()
    bus.count(range(1000))
    stored(bus)
    slow, others = Slow(), Sequences()
    with bus.monitor.replay(0).subscribe(slow), bus.monitor.replay(0).subscribe(others):
        bus.count(range(1000, 1100))
        others.wait_for(1100)
        flushed = bus.monitor.flush()
        assert not flushed.done()
        slow.opened.set()
        flushed.result(PATIENCE)
    assert slow == others == [*range(1, 1101)]


def test_closing_the_bus_completes_a_replay_after_all_events(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messaging.typedevent.store.NEAR", 10)
    bus = opened()
    bus.count(range(500))
    stored(bus)
    slow, late = Slow(), Sequences()
    bus.monitor.replay(0).subscribe(slow)
    bus.count(range(500, 600))
    bus.close()
    slow.opened.set()
    slow.wait_completed()
    assert slow == [*range(1, 601)]
    bus.monitor.replay(0).subscribe(late)
    assert isinstance(late.error, ClosedError)


def test_an_observer_that_raises_ends_its_replay(opened: Open) -> None:
    bus = opened()
    bus.count(range(5))

    def fail(sequence: int) -> None:
        if sequence == 2:
            raise KeyError("x")

    failing = Sequences(fail)
    bus.monitor.replay(0).subscribe(failing)
    eventually(lambda: isinstance(failing.error, KeyError))
    assert failing == [1]
    eventually(lambda: bus.get_dto().monitors == 0)
    assert numbers(replayed(bus)) == [*range(5)]


def test_a_disposed_replay_reads_no_more(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messaging.typedevent.store.NEAR", 10)
    bus = opened()
    bus.count(range(1000))
    stored(bus)
    found: list[int] = []
    subscriptions: list[Any] = []
    subscribed = threading.Event()

    def some(event: MonitorEvent) -> None:
        assert subscribed.wait(PATIENCE)
        found.append(event.sequence)
        if event.sequence == 3:
            subscriptions[0].dispose()

    subscriptions.append(bus.monitor.replay(0).subscribe(some))
    subscribed.set()
    bus.monitor.flush().result(PATIENCE)
    eventually(lambda: bus.monitor.flush().done())
    assert found == [1, 2, 3]


@table("since", [-1, True, 1.5, "1", None])
def test_replay_refuses_other_beginnings(bus: Bus, since: Any) -> None:
    with pytest.raises(ArgumentError, match="since must be a sequence"):
        bus.monitor.replay(since)
    with pytest.raises(InvalidTopicError):
        bus.monitor.replay(0, "a//b")
    with pytest.raises(ArgumentError, match="at least one topic filter"):
        bus.monitor.replay(0, [])


# --- bounds


def test_what_does_not_fit_in_the_queue_is_dropped_counted_and_logged(opened: Open) -> None:
    bus = opened(window=3600.0, max_pending=1_000_000)
    bus.numbered("a 0")
    bus.close()
    bus = opened(window=60.0, max_pending=4)
    store: Any = bus.__dict__["_store"]
    began = time.monotonic()
    with store.journal._log.writing:  # the disk does not answer
        bus.count(range(1, 21))
        assert time.monotonic() - began < PATIENCE, "no publisher waits"
        assert state(bus).pending == 4
        assert state(bus).dropped == 16
        eventually(lambda: bus.logged("4 events wait for the disk: dropping new events"))
        assert bus.get_dto().recorded == 21, "the history in memory has all"
        assert numbers(replayed(bus, 2)) == [1, 2, 3, 4], "dropped events are not replayed"
    stored(bus)
    bus.numbered("a 21")
    bus.close()
    with opened() as bus:
        assert numbers(replayed(bus)) == [0, 1, 2, 3, 4, 21]
        assert replayed(bus)[-1].sequence == 22


def test_the_disk_keeps_the_newest_events(opened: Open, folder: Path) -> None:
    bus = opened(max_bytes=100_000, max_pending=100_000)
    for begin in range(0, 5000, 500):
        bus.count(range(begin, begin + 500))
        stored(bus)
        assert sum(file.stat().st_size for file in folder.rglob("*.segment")) < 130_000
        found = numbers(replayed(bus))
        assert found == [*range(found[0], begin + 500)]
    assert 300 < len(found) < 1500
    bus.close()
    with opened() as bus:
        assert numbers(replayed(bus)) == found


def test_a_busy_topic_does_not_push_out_what_a_minimum_guarantees(opened: Open) -> None:
    policies = {"quiet": RangePolicy.exact(2), "busy": RangePolicy.at_most(3), "other": RangePolicy.at_most(5)}
    options = {"max_bytes": 100_000, "max_pending": 100_000}
    bus = opened(policies, **options)
    bus.numbered("other 1", "quiet 1", "quiet 2", "quiet 3")
    for begin in range(0, 10_000, 500):
        bus.count(range(begin, begin + 500), "busy")
        stored(bus)
        if begin == 5000:
            bus.numbered("quiet 4")
        if begin % 2000 == 1500:
            bus.close()
            bus = opened(policies, **options)
        quiet = [each.event_data["n"] for each in past(bus) if each.topic == "quiet"]
        assert quiet == ([3, 4] if begin >= 5000 else [2, 3])
    assert bus.logged("to make room")
    found = replayed(bus)
    assert [each.sequence for each in found] == sorted({each.sequence for each in found})
    busy = [each.event_data["n"] for each in found if each.topic == "busy"]
    assert busy == [*range(busy[0], 10_000)]
    first = found[len(found) // 2].sequence
    assert [each.sequence for each in replayed(bus, first)] == [each.sequence for each in found][len(found) // 2 :]
    bus.close()
    (folder,) = {each.path for each in [state(bus)]}
    Path(folder, "guaranteed.json").write_bytes(b"x")
    bus = opened(policies, **options)
    assert bus.logged("guaranteed.json cannot be used", level=logging.ERROR)
    assert [each.event_data["n"] for each in past(bus)][-3:] == [9997, 9998, 9999]


def test_old_events_are_dropped_from_the_disk(opened: Open) -> None:
    bus = opened(max_age=0.4, window=0)
    bus.numbered("a 1")
    stored(bus)
    eventually(lambda: (bus.numbered("a 2"), numbers(replayed(bus)))[1][0] == 2)


def test_a_replay_that_the_bounds_overtake_counts_what_it_missed(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messaging.typedevent.store.NEAR", 10)
    bus = opened(max_bytes=100_000, max_pending=100_000)
    bus.count(range(2000))  # more than one read of the journal takes
    stored(bus)
    slow = Slow()
    with bus.monitor.replay(0).subscribe(slow):
        slow.begun.wait_for(1)
        for begin in range(2000, 8000, 500):
            bus.count(range(begin, begin + 500))
            stored(bus)
        slow.opened.set()
        bus.monitor.flush().result(PATIENCE)
        assert slow == sorted({*slow})
        assert slow[-1] == 8000
        assert bus.monitor.missed == 8001 - slow[0] - len(slow) > 0
    assert bus.monitor.missed > 0


# --- disks and folders that fail


def test_a_folder_that_cannot_be_used_is_refused_and_free_afterwards(opened: Open, folder: Path) -> None:
    bus = opened()
    with pytest.raises(JournalLockedError):
        opened()
    bus.close()
    options: Any
    for options in ({"threads": 0}, {"durable_history": folder}):
        with pytest.raises(ArgumentError):
            TypedEventBus(ServiceRegistry(), **{"durable_history": DurableHistory(folder), **options})
    opened().close()
    other, file = folder / "other", folder / "file"
    with Journal.open(other) as journal:
        journal.append("a", b"1")
    with pytest.raises(JournalUnreadableError, match="no events of a typed event bus"):
        opened(path=other)
    with Journal.open(other) as journal:
        assert journal.end == 1, "the folder is free again"
    file.write_text("x")
    with pytest.raises(JournalUnreadableError):
        opened(path=file)


def test_a_full_disk_is_an_error_at_construction(opened: Open, disk_of: Callable[[str], Path]) -> None:
    disk = disk_of("1m")
    ballast(disk)
    with pytest.raises((JournalFullError, JournalError)):
        opened(path=disk / "history")


def test_a_disk_that_fills_up_costs_old_events_and_not_the_bus(opened: Open, disk_of: Callable[[str], Path]) -> None:
    disk = disk_of("1m")
    bus = opened(path=disk / "history", max_pending=100_000)
    handler = handlers.Recorder().untyped(bus, "a")
    bus.count(range(100))
    stored(bus)
    file = ballast(disk)
    bus.send_each(range(100, 4000))
    eventually(lambda: state(bus).pending == 0)
    assert len(handler.events) == 4000
    file.unlink()
    bus.send_each(range(4000, 4010))
    stored(bus)
    found = numbers(replayed(bus))
    assert found[-10:] == [*range(4000, 4010)]
    assert found == sorted({*found})
    assert state(bus).stored + state(bus).failed == 4010


def test_a_disk_that_fails_is_logged_and_counted_and_the_bus_goes_on(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = opened()
    handler = handlers.Recorder().untyped(bus, "a")
    bus.numbered("a 1")
    stored(bus)
    real = os.fdatasync

    def failing(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    monkeypatch.setattr(os, "fsync", failing)
    bus.send_each([2, 3])
    eventually(lambda: state(bus).failed == 2)
    monkeypatch.undo()
    assert os.fdatasync is real
    bus.send_each([4])
    eventually(lambda: state(bus).stored == 2)
    assert handler.of("n") == [1, 2, 3, 4]
    assert bus.logged("cannot store events", "Input/output error", level=logging.ERROR)
    eventually(lambda: bus.logged("events are stored again; 2 are lost so far"), "the end of the failure")
    assert numbers(replayed(bus)) == [1, 4]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.segment"))


def test_damaged_events_are_left_out(opened: Open, folder: Path) -> None:
    with opened(window=0) as bus:
        for each in range(20):
            bus.count([each])
            stored(bus)
    (file,) = segments(folder)
    data = bytearray(file.read_bytes())
    at = data.index(b'"n":7}')
    data[at + 4] ^= 1
    file.write_bytes(data)
    with opened() as bus:
        assert numbers(replayed(bus)) == [each for each in range(20) if each != 7]
        bus.numbered("a 20")
        assert replayed(bus)[-1].sequence == 21


def test_a_damaged_end_costs_no_sequence_twice(opened: Open, folder: Path) -> None:
    with opened(window=0) as bus:
        bus.count(range(10))
    (file,) = segments(folder)
    file.write_bytes(file.read_bytes()[:-30])
    with opened() as bus:
        found = replayed(bus)
        bus.numbered("a 10")
        assert numbers(replayed(bus))[: len(found)] == numbers(found)
        assert replayed(bus)[-1].sequence == 11


@table("content", [None, b"", b"\xff", b"[]", b'{"next": true}', b'{"next": -5}', b"[" * 100_000])
def test_without_the_file_of_sequences_no_number_is_used_again(
    opened: Open, tmp_path: Path, content: bytes | None
) -> None:
    with opened(path=tmp_path) as bus:
        bus.count(range(10))
    file = tmp_path / "sequences.json"
    assert json.loads(file.read_bytes())["next"] == 11
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with opened(path=tmp_path) as bus:
        assert bus.logged("sequences.json of its durable history cannot be used", level=logging.ERROR)
        bus.numbered("a 10")
        assert replayed(bus)[-1].sequence > 1000
        assert numbers(replayed(bus)) == [*range(11)]


@table(
    "payload",
    [
        b"", b"\xff", b"[]", b"{}", b'{"event":2}', b'{"event":1,"topic":"a//b","sequence":1,"time":1,"data":{}}',
        b'{"event":1,"topic":"a","sequence":"1","time":1,"data":{}}',
        b'{"event":1,"topic":"a","sequence":1,"time":1e99,"data":{}}',
        b'{"event":1,"topic":"a","sequence":1,"time":99999999999999999999999,"data":{}}',
        b'{"event":1,"topic":"a","sequence":1,"time":1,"data":[]}',
        b'{"event":1,"topic":"a","sequence":1,"time":1,"origin":7,"data":{}}',
        b'{"event":1,"topic":"a","sequence":1,"time":1,"data":{"a":{"$unknown":1}}}',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_records_that_are_no_events_are_left_out_and_logged(opened: Open, tmp_path: Path, payload: bytes) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append("a", payload, message_id="1")
        journal.append("a", payload, message_id="2")
    with opened(path=tmp_path) as bus:
        late = handlers.Recorder().untyped(bus, "a", history=9)
        bus.send_each([3])
        assert late.of("n") == [3]
        assert numbers(replayed(bus)) == [3]
        assert bus.logged("durable history: an event cannot be read", level=logging.ERROR)


# --- closing and forking


def test_a_bus_is_closed_on_an_event_loop(opened: Open) -> None:
    async def run() -> None:
        bus = opened(window=3600.0)
        bus.count(range(10))
        await bus.aclose()
        async with opened():
            pass

    asyncio.run(run())
    assert len(replayed(opened())) == 10


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_stores_nothing(opened: Open) -> None:
    bus = opened()
    bus.numbered("a 1")
    child = os.fork()
    if not child:
        code = 1
        try:
            bus.numbered("a 2", "a 3")
            bus.close()
            code = 0
        finally:
            os._exit(code)
    ended: dict[int, int] = {}
    eventually(lambda: ended.update([os.waitpid(child, os.WNOHANG)]) or child in ended, "the child ends")
    assert ended[child] == 0
    bus.numbered("a 4")
    bus.close()
    with opened() as bus:
        assert [(each.sequence, each.event_data["n"]) for each in replayed(bus)] == [(1, 1), (2, 4)]


# --- options


@table(
    "wrong",
    [
        *({"path": each} for each in ("", "a\x00b", 7)),
        *({"topics": each} for each in ([], 7, ["a", "b//c"])),
        *({"window": each} for each in (-1, "1")),
        *({"max_pending": 0}, {"max_bytes": 100}, {"max_bytes": 1.5}),
        *({"max_age": each} for each in (0, math.nan, True, math.inf)),
    ],
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidTopicError if wrong.get("topics") not in (None, [], 7) else ArgumentError):
        DurableHistory(**{"path": "x", **wrong})


def test_live_events_have_their_sequence_and_origin(bus: Bus) -> None:
    event = MonitorEvent("a", {}, datetime.datetime.now(datetime.UTC))
    assert (event.sequence, event.origin) == (0, None)
    bus.monitor.configure_history_storage("a", RangePolicy.at_most(3))
    found: Recorder[MonitorEvent] = Recorder()
    bus.monitor.monitor_events().subscribe(found)
    origin = uuid.uuid4()
    bus.publish("a", {}, origin=origin, time=5.0)
    bus.publish("b", {}, origin=origin, time=6.0)
    bus.publish("a", {})
    bus.monitor.flush().result(PATIENCE)
    assert [(each.sequence, each.origin) for each in found] == [(1, origin), (0, origin), (2, None)]
    assert [each.publication_time.timestamp() for each in found[:2]] == [5.0, 6.0]
    (reference,) = bus.services.find(TypedEventMonitor)
    assert bus.services.get(reference).replay(0) is not None
    assert not bus.logged("replay")

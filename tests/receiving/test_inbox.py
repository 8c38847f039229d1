"""The inbox of ``deduplicate``: when ids are stored, and what holds where the disk or the clock misbehaves."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import MessageStream, Messaging
from messaging.errors import ArgumentError, DeadlineError, JournalFullError, SubscriptionRefusedError
from messaging.execution import clock
from messaging.journal import State
from messaging.model import ReceivedMessage
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.disks import ballast
from tests.doubles.consumers import acknowledge, manual
from tests.doubles.fake import FakeBroker, Token, settle_loop
from tests.doubles.fixtures import Connect


class Disk:
    """Stands in for the disk under ``State.add_seen``: it can be full, or hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.works = threading.Event()
        self.works.set()
        self.begun: Recorder[State] = Recorder()
        self.refused: Recorder[State] = Recorder()
        store = State.add_seen

        def add_seen(state: State, ids: Sequence[tuple[str, str]]) -> None:
            self.begun(state)
            assert self.works.wait(PATIENCE)
            if self.is_full:
                self.refused(state)
                raise JournalFullError("inbox", "the disk is full", "inbox_path")
            store(state, ids)

        monkeypatch.setattr(State, "add_seen", add_seen)
        close = State.close

        def close_late(state: State) -> None:
            assert self.works.wait(PATIENCE)
            close(state)

        monkeypatch.setattr(State, "close", close_late)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk(monkeypatch)
    yield found
    found.works.set()


def publish(m: Messaging, *ids: str) -> None:
    for each in ids:
        m.publish("c", each.encode(), message_id=each, qos="1").result(PATIENCE)


@contextlib.contextmanager
def inbox(path: Path, **settings: Any) -> Iterator[tuple[Messaging, MessageStream]]:
    window = settings.pop("deduplicate", True)
    with (
        messaging.connect("memory://inbox", inbox_path=path, **settings) as m,
        m.subscribe("c", qos="1", deduplicate=window) as stream,
    ):
        yield m, stream


def delivered_again(path: Path, *ids: str) -> list[str]:
    """Return which of these messages an inbox does not recognise."""
    with inbox(path) as (m, stream):
        last = f"last-{time.monotonic_ns()}"
        publish(m, *ids, last)
        found = []
        while (payload := stream.receive(PATIENCE).payload) != last.encode():
            found.append(payload.decode())
        return found


def deliver(broker: FakeBroker, *ids: str, qos0: bool = False, payload: bytes | None = None) -> list[Token]:
    return [
        token
        for each in ids
        for token in broker.deliver(payload or each.encode(), extensions={"messageId": each}, qos0=qos0)
    ]


def test_a_duplicate_is_settled_after_its_id(broker: FakeBroker, connect: Connect, tmp_path: Path, disk: Disk) -> None:
    stream = manual(connect(broker, inbox_path=tmp_path), deduplicate=True)
    tokens = deliver(broker, "a")
    first = stream.receive(PATIENCE)
    disk.works.clear()
    assert acknowledge(first)
    disk.begun.wait_for(1)
    tokens += deliver(broker, "a", "b")
    assert stream.receive(PATIENCE).payload == b"b"  # so the duplicate was recognised
    settle_loop()
    assert broker.acknowledged == []
    disk.works.set()
    broker.wait_acknowledged(2)
    assert broker.acknowledged == tokens[:2]


def test_at_most_prefetch_messages_are_handed_out_whose_ids_are_not_stored(
    broker: FakeBroker, connect: Connect, tmp_path: Path, disk: Disk
) -> None:
    stream = manual(connect(broker, inbox_path=tmp_path), deduplicate=True, prefetch=2)
    disk.works.clear()
    deliver(broker, "a", "b", "c")
    for _ in range(2):
        assert acknowledge(stream.receive(PATIENCE))
    disk.begun.wait_for(1)
    settle_loop()
    with pytest.raises(DeadlineError):
        stream.receive(0)
    disk.works.set()
    assert stream.receive(PATIENCE).payload == b"c"


def test_the_id_of_a_message_whose_connection_was_lost_is_stored_before_its_redelivery_is_acknowledged(
    broker: FakeBroker, connect: Connect, tmp_path: Path, disk: Disk
) -> None:
    stream = manual(connect(broker, inbox_path=tmp_path), deduplicate=True)
    deliver(broker, "a")
    first = stream.receive(PATIENCE)
    broker.lose_and_reconnect(1)
    disk.works.clear()
    assert not acknowledge(first)  # the broker redelivers it
    tokens = deliver(broker, "a", "b")
    assert stream.receive(PATIENCE).payload == b"b"
    disk.begun.wait_for(1)
    settle_loop()
    assert broker.acknowledged == []
    disk.works.set()
    broker.wait_acknowledged(1)
    assert broker.acknowledged == tokens[:1]


@table("is_invalid", [False, True])
def test_a_message_is_settled_after_its_dead_letter(broker: FakeBroker, connect: Connect, is_invalid: bool) -> None:
    def fail(value: Any) -> None:
        assert value != b"a"

    handler = connect(broker).on(
        "a", fail, model=int if is_invalid else bytes, deduplicate=True, dead_letter_channel="dead"
    )
    handler.ready.result(PATIENCE)
    broker.hold = True
    tokens = deliver(broker, "a")
    broker.wait_sent(1)
    broker.lose_and_reconnect(1)
    tokens += deliver(broker, "a")
    settle_loop()
    assert broker.acknowledged == []
    broker.wait_sent(2)
    broker.confirm()
    broker.wait_acknowledged(1)
    assert set(broker.acknowledged) <= set(tokens)
    assert handler.counters.dead_lettered == 1


@table("is_invalid", [False, True])
def test_a_dead_letter_does_not_count_as_settled_twice(
    broker: FakeBroker, connect: Connect, tmp_path: Path, disk: Disk, is_invalid: bool
) -> None:
    """At most ``prefetch`` messages are handled whose ids are not stored, also after dead letters."""
    handled: Recorder[int] = Recorder()

    def handle(value: int) -> None:
        assert value
        handled(value)

    m = connect(broker, inbox_path=tmp_path)
    options: dict[str, Any] = {"dead_letter_channel": "dead", "deduplicate": True, "prefetch": 1}
    with m.on("a", handle, model=int, **options) as handler:
        for number, each in enumerate("abc", 1):
            deliver(broker, each, payload=b"x" if is_invalid else b"0")
            broker.wait_acknowledged(number)
        assert handler.counters.dead_lettered == 3
        disk.works.clear()
        for number, each in enumerate("defg", 1):
            deliver(broker, each, payload=str(number).encode())
        disk.begun.wait_for(4)
        settle_loop()
        before = [*handled]
        disk.works.set()
        assert before == [1]
        handled.wait_for(4)
        broker.wait_acknowledged(7)  # so all ids are stored


def test_ids_that_a_full_disk_refused_are_stored_later(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with inbox(tmp_path) as (m, stream):
        disk.is_full = True
        names = [str(number) for number in range(50)]
        for each in names:
            publish(m, each)
            stream.receive(PATIENCE)
        eventually(lambda: stream.counters.acknowledged >= 49)  # handled and acknowledged all the same
        disk.refused.wait_for(1)
        disk.is_full = False
    assert delivered_again(tmp_path, *names) == []
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len([each for each in warnings if "the disk is full" in each]) == 1


def test_an_inbox_opens_on_a_full_disk_and_knows_its_ids(disk_of: Callable[[str], Path]) -> None:
    disk = disk_of("1m")
    with inbox(disk / "inbox") as (m, stream):
        publish(m, "a", "b", "next")
        for _ in range(3):  # the one after a message acknowledges it
            stream.receive(PATIENCE)
        eventually(lambda: stream.counters.acknowledged == 2)
    file = ballast(disk)
    assert delivered_again(disk / "inbox", "a", "b") == []
    file.unlink()
    assert delivered_again(disk / "inbox", "a", "b", "c") == ["c"]
    assert delivered_again(disk / "inbox", "c") == []


def test_a_hanging_disk_blocks_no_other_stream_when_an_inbox_is_closed(tmp_path: Path, disk: Disk) -> None:
    with messaging.connect("memory://inbox", inbox_path=tmp_path, close_timeout=0.1) as m:
        stream = m.subscribe("c", qos="1", deduplicate=True)
        stream.ready.result(PATIENCE)
        publish(m, "a", "b")
        disk.works.clear()
        stream.receive(PATIENCE)
        stream.receive(PATIENCE)
        disk.begun.wait_for(1)
        stream.close().result(PATIENCE)
        with m.subscribe("other") as other:
            m.publish("other", b"1").result(PATIENCE)
            assert other.receive(PATIENCE).payload == b"1"
        disk.works.set()


@table("step", [-3600.0, 10 * 365 * 86400.0])
def test_a_clock_that_is_set_does_not_change_the_window(virtual_clock: VirtualClock, step: float) -> None:
    with messaging.connect("memory://inbox") as m, m.subscribe("c", qos="1", deduplicate=600.0) as stream:
        publish(m, "a", "0")
        stream.receive(PATIENCE)
        stream.receive(PATIENCE)
        virtual_clock.advance(1.0)
        assert stream.counters.acknowledged
        virtual_clock.shift_wall(step)
        publish(m, "a", "b")
        assert stream.receive(PATIENCE).payload == b"b"
        virtual_clock.advance(601.0)
        publish(m, "a")
        assert stream.receive(PATIENCE).payload == b"a"


def test_the_oldest_ids_are_forgotten_when_there_are_too_many(broker: FakeBroker, connect: Connect) -> None:
    stream = manual(connect(broker, inbox_size=2), deduplicate=True, prefetch=1)
    for number, each in enumerate("abc", 1):
        deliver(broker, each)
        assert acknowledge(stream.receive(PATIENCE))
        broker.wait_acknowledged(number)
    deliver(broker, "b", "c", "a")
    assert stream.receive(PATIENCE).payload == b"a"


def test_ids_that_were_stored_together_are_forgotten_in_their_order_by_the_next_stream(
    broker: FakeBroker, connect: Connect, tmp_path: Path, disk: Disk
) -> None:
    m = connect(broker, inbox_path=tmp_path, inbox_size=4)
    disk.works.clear()
    with manual(m, deduplicate=True, prefetch=4) as stream:
        deliver(broker, "first")
        assert acknowledge(stream.receive(PATIENCE))
        disk.begun.wait_for(1)
        deliver(broker, "z", "y", "x")
        for _ in range(3):
            assert acknowledge(stream.receive(PATIENCE))
        settle_loop()
        disk.works.set()
        broker.wait_acknowledged(4)
    with manual(m, deduplicate=True, prefetch=4) as stream:
        deliver(broker, "a", "b")  # "first" and "z" are forgotten
        for _ in range(2):
            assert acknowledge(stream.receive(PATIENCE))
        broker.wait_acknowledged(6)
        deliver(broker, "x", "y", "z")
        assert stream.receive(PATIENCE).payload == b"z"


def test_the_oldest_ids_are_forgotten_first_if_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = clock.wall
    with inbox(tmp_path, inbox_size=4, prefetch=1, deduplicate=86400) as (m, stream):
        for each in "abcdefgh":
            if each == "e":
                monkeypatch.setattr(clock, "wall", lambda: wall() - 3600)
            publish(m, each)
            stream.receive(PATIENCE)
    assert delivered_again(tmp_path, *"gh") == []
    assert delivered_again(tmp_path, *"ab") == ["a", "b"]


def test_ids_that_were_stored_while_the_clock_was_ahead_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, ahead = clock.wall, 365 * 86400.0
    received = []
    for step, window in ((ahead, 1000.0), (0.0, 1000.0), (2000.0, 1000.0)):
        monkeypatch.setattr(clock, "wall", lambda step=step: wall() + step)
        with inbox(tmp_path, deduplicate=window) as (m, stream):
            publish(m, "a", f"last-{step}")
            received.append(stream.receive(PATIENCE).payload)
    assert received == [b"a", b"last-0.0", b"a"]


@table("back", [60.0, 86400.0, 50 * 365 * 86400.0])
@table("window", [1000.0, 7 * 86400.0])
def test_a_clock_that_was_back_for_one_run_makes_no_later_run_handle_a_message_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: float, window: float
) -> None:
    wall = clock.wall
    received = []
    for step, ids in ((0.0, "a"), (-back, "b"), (10.0, "ab"), (20.0, "ab"), (2 * window, "ab")):
        monkeypatch.setattr(clock, "wall", lambda step=step: wall() + step)
        with inbox(tmp_path, deduplicate=window) as (m, stream):
            publish(m, *ids, f"last-{step}")
            received.append("")
            while not (payload := stream.receive(PATIENCE).payload.decode()).startswith("last"):
                received[-1] += payload
    assert received == ["a", "b", "", "", "ab"]


def test_a_forked_child_does_not_hold_the_inbox(tmp_path: Path) -> None:
    with messaging.connect("memory://inbox", inbox_path=tmp_path) as m:
        with m.subscribe("c", qos="1", deduplicate=True):
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
        try:
            with m.subscribe("c", qos="1", deduplicate=True) as stream:
                stream.ready.result(PATIENCE)
        finally:
            os.close(writer)
            os.waitpid(child, 0)
            os.close(reader)


def test_deliveries_that_no_broker_bounds_do_not_pile_up_behind_a_verdict(broker: FakeBroker, connect: Connect) -> None:
    stream = manual(connect(broker), deduplicate=True)
    deliver(broker, "a")
    first = stream.receive(PATIENCE)
    deliver(broker, *["a"] * 100, qos0=True)
    deliver(broker, "b")
    assert stream.receive(PATIENCE).payload == b"b"
    assert acknowledge(first)
    deliver(broker, "c")
    assert stream.receive(PATIENCE).payload == b"c"
    eventually(lambda: stream.counters.duplicates)
    assert stream.counters.duplicates == 1


def test_ids_of_any_length_take_bounded_room_and_differ(broker: FakeBroker, connect: Connect, tmp_path: Path) -> None:
    with manual(connect(broker, inbox_path=tmp_path), deduplicate=True) as stream:
        deliver(broker, "x" * 60_000 + "1", "x" * 60_000 + "2", "x" * 60_000 + "1", payload=b"long")
        deliver(broker, "b")
        for _ in range(3):
            assert acknowledge(stream.receive(PATIENCE))
        eventually(lambda: stream.counters.duplicates == 1)
    assert sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()) < 100_000


def test_a_refused_subscription_gives_its_inbox_back(broker: FakeBroker, connect: Connect, tmp_path: Path) -> None:
    m = connect(broker, inbox_path=tmp_path)
    broker.errors["subscribe"].append(SubscriptionRefusedError("no"))
    refused = m.subscribe("a", deduplicate=True)
    assert isinstance(refused.ready.exception(PATIENCE), SubscriptionRefusedError)
    refused.close().result(PATIENCE)
    with m.subscribe("a", deduplicate=True) as stream:
        stream.ready.result(PATIENCE)


def test_a_refused_subscription_that_is_not_closed_gives_its_inbox_back(
    broker: FakeBroker, connect: Connect, tmp_path: Path
) -> None:
    """The first one, and one that is refused when the broker is back."""
    m = connect(broker, inbox_path=tmp_path)
    broker.errors["subscribe"].append(SubscriptionRefusedError("no"))
    refused = m.subscribe("a", deduplicate=True)
    assert isinstance(refused.ready.exception(PATIENCE), SubscriptionRefusedError)

    def subscribe() -> MessageStream | None:
        try:
            return m.subscribe("a", deduplicate=True)
        except ArgumentError:
            return None  # the folder is given back on a thread of its own

    lost = eventually(subscribe, "the folder of the refused subscription")
    lost.ready.result(PATIENCE)
    broker.errors["subscribe"].append(SubscriptionRefusedError("no more"))
    broker.lose_and_reconnect()
    with eventually(subscribe, "the folder of the subscription that was refused after a loss") as again:
        again.ready.result(PATIENCE)


def test_an_inbox_is_free_when_its_instance_is_closed(broker: FakeBroker, connect: Connect, tmp_path: Path) -> None:
    begun: Recorder[bytes] = Recorder()
    may_end = threading.Event()

    def handle(payload: bytes) -> None:
        begun(payload)
        assert may_end.wait(PATIENCE)

    m = connect(broker, inbox_path=tmp_path, close_timeout=0.1)
    m.on("a", handle, model=bytes, deduplicate=True).ready.result(PATIENCE)
    deliver(broker, "a")
    begun.wait_for(1)
    m.close()
    with connect(broker, inbox_path=tmp_path).subscribe("a", deduplicate=True) as stream:
        stream.ready.result(PATIENCE)
    may_end.set()


def test_a_message_that_an_interrupt_kept_back_is_no_duplicate_of_itself(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without acknowledgement a message is settled when it is handed out; an interrupt may come right after that."""
    stream = connect(broker).subscribe("a", deduplicate=True, model=bytes)
    stream.ready.result(PATIENCE)
    monkeypatch.setattr(ReceivedMessage, "value", interrupted(ReceivedMessage.value))
    deliver(broker, "a", qos0=True)
    with pytest.raises(KeyboardInterrupt):
        stream.receive(PATIENCE)
    assert stream.receive(PATIENCE).payload == b"a"


def interrupted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method``, whose first call is interrupted."""
    calls = itertools.count()

    def call(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise KeyboardInterrupt
        return method(*arguments)

    return call

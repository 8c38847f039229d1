"""Buffers of routes with ``newest_first``: ranges of the journal, each in order, and their positions on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import messaging
from messaging.gateway.buffer import Buffer
from messaging.gateway.destinations import Destination
from messaging.gateway.settings import BufferSettings
from messaging.gateway.stored import StoredMessage
from messaging.journal.queue import MAX_RANGES, later_starts
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from tests.disks import ballast


@contextmanager
def opened(path: Path, order: str = "newest_first") -> Iterator[Buffer]:
    buffer = Buffer("r", path, BufferSettings.model_validate({"full": "block", "order": order}), lambda: None)
    try:
        yield buffer
    finally:
        buffer.close()


DESTINATION = Destination(messaging.MessageContext("t"))


def store(buffer: Buffer, numbers: range) -> None:
    accepted = buffer.accepted + len(numbers)
    for number in numbers:
        buffer.store(StoredMessage(b"%d" % number, DESTINATION, f"id{number}"))
    eventually(lambda: buffer.accepted == accepted)


def take(buffer: Buffer, most: int = 10**6) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    while len(found) < most and (stored := buffer.take()) is not None:
        found.append(stored)
    return found


def settle(buffer: Buffer, stored: StoredMessage) -> None:
    buffer.queue.settle(stored.offset, len(stored.payload))


def numbers(messages: list[StoredMessage]) -> list[int]:
    return [int(each.payload) for each in messages]


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Buffer]:
    with opened(tmp_path) as buffer:
        yield buffer


def test_new_messages_are_taken_before_the_backlog_of_an_outage(buffer: Buffer) -> None:
    store(buffer, range(5))
    buffer.queue.begin_range()  # the target is back
    store(buffer, range(5, 8))
    assert numbers(take(buffer, 2)) == [5, 6]
    store(buffer, range(8, 10))
    assert numbers(take(buffer)) == [7, 8, 9, 0, 1, 2, 3, 4]
    assert not buffer.queue.has_next


def test_the_backlog_is_taken_in_order_from_the_disk(buffer: Buffer) -> None:
    store(buffer, range(9000))
    buffer.queue.begin_range()
    store(buffer, range(9000, 9003))
    assert numbers(take(buffer)) == [9000, 9001, 9002, *range(9000)]


def test_oldest_first_has_one_range(tmp_path: Path) -> None:
    with opened(tmp_path, "oldest_first") as buffer:
        store(buffer, range(3))
        buffer.queue.begin_range()
        store(buffer, range(3, 5))
        assert numbers(take(buffer)) == [0, 1, 2, 3, 4]
        assert set(buffer.journal.cursors()) == {"target"}


def test_positions_of_ranges_survive_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        store(buffer, range(4))
        buffer.queue.begin_range()
        store(buffer, range(4, 8))
        for stored in take(buffer, 6):  # 4 to 7, then 0 and 1
            settle(buffer, stored)
        assert buffer.queue.depth == 2
    with opened(tmp_path) as buffer:
        assert buffer.queue.depth == 2
        assert numbers(take(buffer)) == [2, 3]


def test_a_drained_backlog_leaves_one_cursor(buffer: Buffer) -> None:
    store(buffer, range(4))
    buffer.queue.begin_range()
    store(buffer, range(4, 6))
    buffer.queue.begin_range()
    store(buffer, range(6, 8))
    for stored in take(buffer):
        settle(buffer, stored)
    eventually(lambda: buffer.journal.cursors() == {"target": 8})
    assert buffer.queue.depth == 0
    assert buffer.queue.unrecorded == 0
    store(buffer, range(8, 10))
    assert numbers(take(buffer)) == [8, 9]


def test_a_range_begins_only_if_messages_wait(buffer: Buffer) -> None:
    buffer.queue.begin_range()
    store(buffer, range(3))
    take(buffer)
    buffer.queue.begin_range()
    assert set(buffer.journal.cursors()) == {"target"}


def test_the_number_of_ranges_is_bounded(buffer: Buffer) -> None:
    for number in range(MAX_RANGES + 5):
        store(buffer, range(number, number + 1))
        buffer.queue.begin_range()
    assert len(buffer.journal.cursors()) == MAX_RANGES
    taken = numbers(take(buffer))
    assert sorted(taken) == list(range(MAX_RANGES + 5))


def test_messages_that_are_put_back_return_to_their_ranges(buffer: Buffer) -> None:
    store(buffer, range(3))
    buffer.queue.begin_range()
    store(buffer, range(3, 6))
    taken = take(buffer, 5)
    assert numbers(taken) == [3, 4, 5, 0, 1]
    buffer.queue.put_back(sorted(taken, key=lambda each: each.offset))
    assert numbers(take(buffer)) == [3, 4, 5, 0, 1, 2]


def test_ranges_of_an_earlier_run_are_taken_in_order_with_oldest_first(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        store(buffer, range(3))
        buffer.queue.begin_range()
        store(buffer, range(3, 5))
        settle(buffer, take(buffer, 1)[0])  # 3
    with opened(tmp_path, "oldest_first") as buffer:
        assert numbers(take(buffer)) == [0, 1, 2, 4]


def test_messages_that_are_too_old_are_dropped_when_their_turn_comes(
    virtual_clock: VirtualClock, tmp_path: Path
) -> None:
    settings_ = BufferSettings.model_validate({"full": "block", "max_age": "1 min"})
    buffer = Buffer("r", tmp_path, settings_, lambda: None)
    try:
        store(buffer, range(1))
        virtual_clock.advance(0.0)
        virtual_clock.suspend(61.0)  # so the journal did not drop it
        store(buffer, range(1, 3))
        assert numbers(take(buffer)) == [1, 2]
        assert buffer.dropped == 1
        assert buffer.queue.depth == 2
    finally:
        buffer.close()


@table("names", [["target"], ["target", "other-5", "target-x", "target-٣"]])
def test_other_cursors_are_no_ranges(names: list[str]) -> None:
    assert later_starts("target", [*names, "target-12", "target-3"]) == [3, 12]


#: messages to store, messages to settle, whether a range begins, whether the gateway restarts
STEPS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), st.booleans(), st.booleans()), max_size=10)


@given(steps=STEPS)
@settings(max_examples=30)
def test_each_message_is_settled_once(
    steps: list[tuple[int, int, bool, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("buffer")
    stored = 0
    settled: list[int] = []

    def settle_next(buffer: Buffer, most: int) -> None:
        for each in take(buffer, most):
            settled.append(int(each.payload))
            settle(buffer, each)

    buffer = Buffer("r", path, BufferSettings.model_validate({"full": "block", "order": "newest_first"}), lambda: None)
    for count, most, begins, restarts in steps:
        store(buffer, range(stored, stored + count))
        stored += count
        if begins:
            buffer.queue.begin_range()
        settle_next(buffer, most)
        assert buffer.queue.depth == stored - len(settled)
        if restarts:
            buffer.close()
            buffer = Buffer(
                "r", path, BufferSettings.model_validate({"full": "block", "order": "newest_first"}), lambda: None
            )
    settle_next(buffer, 10**6)
    buffer.close()
    assert sorted(settled) == list(range(stored))


def test_dropped_messages_are_counted_once_and_not_published(tmp_path: Path) -> None:
    chosen = BufferSettings.model_validate({"full": "drop_oldest", "max_bytes": 40_000})
    buffer = Buffer("r", tmp_path, chosen, lambda: None)
    try:
        for number in range(20):
            buffer.store(StoredMessage(b"%d" % number + bytes(1000), DESTINATION, f"id{number}"))
        eventually(lambda: buffer.accepted == 20)
        in_flight = take(buffer, 10)
        for number in range(20, 200):
            buffer.store(StoredMessage(b"%d" % number + bytes(1000), DESTINATION, f"id{number}"))
        eventually(lambda: buffer.accepted == 200)
        dropped = buffer.dropped
        for each in in_flight:  # the target has them, whatever the journal dropped meanwhile
            settle(buffer, each)
        left = take(buffer)
        assert (buffer.dropped, dropped) == (dropped, 200 - 10 - len(left))
        assert buffer.queue.depth == len(left) < 40
    finally:
        buffer.close()


@table("order", ["oldest_first", "newest_first"])
def test_records_that_the_disk_has_lost_are_counted_once(order: str, tmp_path: Path) -> None:
    with opened(tmp_path, order) as buffer:
        store(buffer, range(10))
        buffer.journal._log.start_segment()
        store(buffer, range(10, 13))
        for each in take(buffer, 4):
            settle(buffer, each)
    lost, _ = sorted(tmp_path.glob("0/*.segment"))
    lost.write_bytes(b"")  # after a loss of power, with ``fsync`` other than ``always``
    with opened(tmp_path, order) as buffer:
        assert numbers(take(buffer)) == [10, 11, 12]
        assert (buffer.dropped, buffer.queue.depth) == (6, 3)
    with opened(tmp_path, order) as buffer:
        assert (numbers(take(buffer)), buffer.dropped) == ([10, 11, 12], 0)


@table("full", ["block", "drop_oldest", "drop_newest"])
def test_a_full_disk_holds_the_source_back_with_each_policy(full: str, disk_of: Callable[[str], Path]) -> None:
    disk = disk_of("2m")
    buffer = Buffer("r", disk / full, BufferSettings.model_validate({"full": full}), lambda: None)
    try:
        file = ballast(disk, 60_000)
        for number in range(200):
            buffer.store(StoredMessage(b"%d" % number + bytes(1000), DESTINATION, f"id{number}"))
        eventually(lambda: buffer.accepted > 0 and buffer.storing > 0)
        file.unlink()
        eventually(lambda: buffer.accepted == 200)
        assert (buffer.dropped, len(take(buffer))) == (0, 200)
    finally:
        buffer.close()

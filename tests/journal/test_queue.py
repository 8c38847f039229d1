"""``DurableQueue``: messages that wait on the disk, each until it is settled, in any order."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messaging.journal import DurableQueue, Journal, Record
from messaging.testing.waiting import PATIENCE, eventually


class Waiting(NamedTuple):
    offset: int
    payload: bytes


class Party:
    """A journal, its queue, and a consumer of it."""

    def __init__(self, path: Path, *, newest_first: bool = False, most: int = 8, segment_bytes: int = 2**20) -> None:
        self.journal = Journal.open(path, fsync="never", segment_bytes=segment_bytes)
        self.queue: DurableQueue[Waiting] = DurableQueue(
            "queue 'q'",
            self.journal,
            "q",
            lambda record: Waiting(record.offset, record.payload),
            max_messages=most,
            max_bytes=2**20,
            on_recorded=lambda: None,
            newest_first=newest_first,
        )

    def store(self, count: int) -> list[int]:
        stored = []
        for _ in range(count):
            offset = self.journal.append("c", b"x")
            stored.append(Waiting(offset, b"x"))
        if stored:
            self.queue.add(stored)
        return [each.offset for each in stored]

    def take(self, most: int = 10**6) -> list[Waiting]:
        """Take messages as a consumer does: those in memory, then what is loaded from the disk."""
        found: list[Waiting] = []
        while len(found) < most:
            item = self.queue.take()
            if item is not None:
                found.append(item)
            elif self.queue.has_next:
                self.queue.load(3)
                self.queue.pass_over()
            else:
                break
        return found

    def settle(self, item: Waiting) -> None:
        self.queue.settle(item.offset, len(item.payload))

    def close(self) -> None:
        self.queue.close()


Opened = Callable[..., Party]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    parties: list[Party] = []

    def opened(**options: bool | int) -> Party:
        for each in parties:
            each.close()
        party = Party(tmp_path, **options)  # type: ignore[arg-type]
        parties.append(party)
        return party

    yield opened
    for each in parties:
        each.close()


def offsets(items: list[Waiting]) -> list[int]:
    return [each.offset for each in items]


def test_messages_settled_out_of_order_are_not_taken_again_after_a_restart(opened: Opened) -> None:
    party = opened()
    party.store(6)
    taken = party.take()
    for index in (5, 1, 3):
        party.settle(taken[index])
    assert party.queue.first == 0
    party = opened()
    assert offsets(party.take()) == [0, 2, 4]


def test_the_position_passes_messages_that_were_settled_before(opened: Opened) -> None:
    party = opened()
    party.store(5)
    taken = party.take()
    for index in (1, 2, 4):
        party.settle(taken[index])
    party.settle(taken[0])
    assert party.queue.first == 3
    party.settle(taken[3])
    assert (party.queue.first, party.queue.depth) == (5, 0)
    eventually(lambda: party.journal.cursors() == {"q": 5})


def test_only_the_bound_of_messages_is_in_memory(opened: Opened) -> None:
    party = opened(most=4)
    party.store(10)
    assert len(party.queue.ready) == 4
    assert party.queue.waiting == 10
    assert offsets(party.take()) == [*range(10)]


def test_a_message_larger_than_the_bound_is_kept_if_it_is_alone(tmp_path: Path) -> None:
    with closing(Party(tmp_path)) as party:
        large = Waiting(party.journal.append("c", bytes(2**21)), bytes(2**21))
        assert party.queue.add([large]) == 1


def test_messages_stay_on_the_disk_behind_others_that_are_only_there(opened: Opened) -> None:
    party = opened(most=2)
    party.store(3)
    for each in party.take(2):
        party.settle(each)
    party.store(1)  # there is room, but 2 is on the disk alone
    assert not party.queue.ready
    assert offsets(party.take()) == [2, 3]


def test_messages_that_are_put_back_are_taken_next_in_their_order(opened: Opened) -> None:
    party = opened()
    party.store(4)
    taken = party.take(3)
    party.settle(taken[1])
    party.queue.put_back([taken[0], taken[2]])
    assert offsets(party.take()) == [0, 2, 3]


def test_lost_records_count_as_settled_and_are_counted(opened: Opened, tmp_path: Path) -> None:
    party = opened(segment_bytes=2**12)
    party.store(30)
    party.settle(party.take(1)[0])
    segments = sorted(tmp_path.glob("0/*.segment"))
    party.journal._log.start_segment()
    party.store(1)
    party.close()
    segments[0].write_bytes(b"")
    party = opened(segment_bytes=2**12)
    assert offsets(party.take()) == [30]
    assert party.queue.lost == 29
    assert party.queue.first == 30


def test_a_range_that_is_joined_keeps_what_was_settled_out_of_order(opened: Opened) -> None:
    party = opened(newest_first=True)
    party.store(2)
    party.queue.begin_range()
    party.store(4)
    newer = party.take(4)
    party.settle(newer[2])  # of the later range, before the ranges are joined
    for each in party.take():
        party.settle(each)
    eventually(lambda: party.journal.cursors() == {"q": 2}, "the ranges are joined")
    assert party.queue.first == 2
    party.settle(newer[0])
    party.settle(newer[1])
    assert party.queue.first == 5
    party = opened(newest_first=True)
    assert offsets(party.take()) == [5]


def test_positions_of_ranges_are_joined_when_the_queue_is_opened(opened: Opened) -> None:
    party = opened(newest_first=True)
    party.store(2)
    party.queue.begin_range()
    party.store(3)
    taken = party.take()
    party.settle(taken[1])  # 3
    party.journal.cursor("q").commit(2)
    party.close()
    party = opened(newest_first=True)
    assert party.journal.cursors() == {"q": 2}
    assert offsets(party.take()) == [2, 4]


def test_a_range_that_is_joined_skips_what_an_earlier_run_has_settled(opened: Opened) -> None:
    party = opened(newest_first=True)
    party.store(2)
    party.queue.begin_range()
    party.store(4)
    party.settle(party.take()[2])  # 4
    party = opened()  # the oldest first
    for each in party.take(2):
        party.settle(each)
    eventually(lambda: party.journal.cursors() == {"q": 2}, "the ranges are joined")
    assert offsets(party.take()) == [2, 3, 5]


def test_a_settled_message_that_comes_after_the_end_is_ignored(opened: Opened) -> None:
    party = opened()
    party.store(3)
    taken = party.take()
    party.close()
    party.settle(taken[2])
    party.settle(taken[0])
    party.settle(taken[1])


def test_loading_on_another_thread_loses_and_repeats_nothing(opened: Opened) -> None:
    """The producer, the consumer and the loader each on a thread of its own, with a small memory."""
    party = opened(most=5)
    found: list[int] = []
    loading, is_over = threading.Event(), threading.Event()

    def load() -> None:
        while not is_over.is_set():
            if loading.wait(0.05):
                party.queue.load(4)
                loading.clear()

    loader = threading.Thread(target=load)
    producer = threading.Thread(target=lambda: [party.store(random.randint(1, 7)) for _ in range(100)])
    loader.start()
    producer.start()

    def consume() -> bool:
        item = party.queue.take()
        while item is not None:
            found.append(item.offset)
            party.settle(item)
            item = party.queue.take()
        if not loading.is_set():
            party.queue.pass_over()
            if party.queue.has_next:
                loading.set()
        return not producer.is_alive() and not party.queue.waiting

    try:
        eventually(consume)
    finally:
        is_over.set()
        producer.join(PATIENCE)
        loader.join(PATIENCE)
    assert found == [*range(len(found))]
    assert party.queue.first == party.journal.end == len(found)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(1, 12)),
        st.tuples(st.just("take"), st.integers(1, 12)),
        st.tuples(st.just("settle"), st.integers(0, 30)),
        st.tuples(st.just("put back"), st.just(0)),
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=40,
)


@given(steps=STEPS, newest_first=st.booleans(), most=st.integers(1, 20))
@settings(max_examples=40)
def test_each_message_is_taken_until_it_is_settled_once(
    steps: list[tuple[str, int]], newest_first: bool, most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("queue")
    party = Party(path, newest_first=newest_first, most=most)
    left: set[int] = set()
    taken: list[Waiting] = []
    try:
        for step, number in steps:
            if step == "store":
                left.update(party.store(number))
            elif step == "take":
                taken += party.take(number)
            elif step == "settle" and taken:
                item = taken.pop(number % len(taken))
                left.remove(item.offset)
                party.settle(item)
            elif step == "put back":
                party.queue.put_back(sorted(taken))
                taken = []
            elif step == "begin":
                party.queue.begin_range()
            elif step == "restart":
                party.close()
                party = Party(path, newest_first=newest_first, most=most)
                taken = []
            held = {each.offset for each in taken}
            assert len(held) == len(taken)
            assert held <= left
            assert party.queue.waiting >= len(left) - len(taken)
        taken += party.take()
        assert {each.offset for each in taken} == left
        for each in taken:
            party.settle(each)
        assert party.queue.depth == 0
        eventually(lambda: party.journal.cursors() == {"q": party.journal.end}, "joined and recorded")
    finally:
        party.close()


def test_a_record_is_restored_with_its_offset(opened: Opened) -> None:
    party = opened(most=1)
    party.store(2)
    restored: list[Record] = []
    party.queue._restore = lambda record: (restored.append(record), Waiting(record.offset, record.payload))[1]
    party.take()
    assert [each.offset for each in restored] == [1]

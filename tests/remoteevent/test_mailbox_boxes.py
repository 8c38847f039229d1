"""Open boxes of a mailbox: their number is bounded, and closing idle ones loses nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import ArgumentError
from messaging.remoteevent import EventMailbox
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST, Recorder, event, events, store, taken
from tests.threads import in_threads

MOST = 3


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[EventMailbox]:
    with EventMailbox(tmp_path / "mailbox", max_open_boxes=MOST, retry=FAST) as made:
        yield made


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def use_others(mailbox: EventMailbox) -> None:
    """Use so many boxes that idle ones are closed."""
    for _ in range(2 * MOST):
        store(mailbox.register(100.0), [event(1)])


def test_registrations_that_are_not_used_need_no_files(mailbox: EventMailbox) -> None:
    mailbox.register(100.0)  # starts the engine
    before = descriptors()
    boxes = [mailbox.register(100.0) for _ in range(50)]
    assert [len(each) for each in boxes] == [0] * 50
    assert [each.dropped for each in boxes] == [0] * 50
    assert mailbox.open_boxes == 0
    assert descriptors() == before


def test_the_number_of_open_boxes_is_bounded(mailbox: EventMailbox) -> None:
    before = descriptors()
    boxes = [mailbox.register(100.0) for _ in range(12)]
    for number in (1, 2):
        for each in boxes:
            store(each, [event(number)])
    assert mailbox.open_boxes <= MOST + 1  # one whose event was stored just now
    assert descriptors() - before <= (MOST + 1) * 15
    assert [len(each) for each in boxes] == [2] * 12
    assert {each.box.stored for each in boxes} == {2}
    for each in boxes:
        store(each, [event(2), event(3)])  # the first one is a duplicate
        assert (each.box.stored, each.box.duplicates) == (3, 1)
        assert [got.sequence_number for got in each.drain()] == [1, 2, 3]
    assert mailbox.open_boxes <= MOST + 1


def test_numbers_for_people_are_kept_while_a_box_is_closed(mailbox: EventMailbox) -> None:
    box = mailbox.register(100.0, max_events=2, full="drop_newest")
    store(box, events(1, 5))
    for _ in range(3):
        use_others(mailbox)
        assert (len(box), box.dropped, box.box.stored) == (2, 3, 2)
    box.drain()
    store(box, events(6, 9))
    assert (len(box), box.dropped) == (2, 5)


@table("keep", ["all", "latest"])
def test_an_iterator_goes_on_although_others_use_their_boxes(mailbox: EventMailbox, keep: Any) -> None:
    box = mailbox.register(100.0, keep=keep)
    store(box, [event(1, each) for each in range(4)])
    iterator = box.remote_events()
    found = []
    for _ in range(4):
        use_others(mailbox)
        found.append(iterator.next())
    assert found == [event(1, each) for each in range(4)]
    use_others(mailbox)
    iterator.close()
    assert len(box) == 0


@table("keep", ["all", "latest"])
def test_a_target_gets_each_event_once_although_others_use_their_boxes(mailbox: EventMailbox, keep: Any) -> None:
    box = mailbox.register(100.0, keep=keep)
    target = Recorder()
    with target.gate:
        box.enable_delivery(target)
        store(box, [event(1, each) for each in range(5)])
        use_others(mailbox)  # while the target has a batch
    eventually(lambda: len(box) == 0)
    use_others(mailbox)
    store(box, [event(2, each) for each in range(5)])  # opens the box, and delivers
    eventually(lambda: len(target.events) == 10)
    assert [(each.id, each.sequence_number) for each in target.events] == [(at, n) for n in (1, 2) for at in range(5)]


def test_a_wait_for_events_keeps_no_box_open(mailbox: EventMailbox) -> None:
    boxes = [mailbox.register(100.0) for _ in range(20)]
    waits = [each.pulling.fetch(each.begin_iterator(), None, 10, 30.0) for each in boxes]
    assert mailbox.open_boxes <= MOST
    for each in boxes:
        store(each, [event(1)])
    assert [[found for _, found in each.result(PATIENCE)] for each in waits] == [[event(1)]] * 20


def test_many_threads_share_few_open_boxes(mailbox: EventMailbox) -> None:
    boxes = [mailbox.register(100.0, keep="all") for _ in range(10)]
    numbers: dict[str, list[int]] = {each.id: [] for each in boxes}
    turns = {each.id: threading.Lock() for each in boxes}
    left = {each.id: 1 for each in boxes}

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            box = chance.choice(boxes)
            with turns[box.id]:
                if chance.random() < 0.6:
                    first = left[box.id]
                    store(box, events(first, first + 4))
                    left[box.id] += 5
                else:
                    numbers[box.id] += taken(box.drain(7))

    in_threads(6, work)
    for each in boxes:
        numbers[each.id] += [got.sequence_number for got in each.drain()]
        assert numbers[each.id] == [*range(1, left[each.id])]


def test_a_closed_box_is_deleted_with_its_registration(mailbox: EventMailbox, tmp_path: Path) -> None:
    box = mailbox.register(100.0)
    store(box, [event(1)])
    use_others(mailbox)
    box.lease.cancel()
    eventually(lambda: not (tmp_path / "mailbox" / "boxes" / box.id).exists())


def test_closing_the_mailbox_closes_all_boxes(tmp_path: Path) -> None:
    before = descriptors()
    for _ in range(2):
        with EventMailbox(tmp_path / "mailbox", max_open_boxes=MOST) as mailbox:
            store(mailbox.register(100.0), [event(1)])
            assert {len(each) for each in mailbox.registrations()} == {1}
    assert descriptors() <= before + 2  # of the engine


@table("most", [0, -1, True, 1.5, "x"])
def test_the_bound_is_an_int_from_1(tmp_path: Path, most: Any) -> None:
    with pytest.raises(ArgumentError, match="max_open_boxes"):
        EventMailbox(tmp_path / "mailbox", max_open_boxes=most)

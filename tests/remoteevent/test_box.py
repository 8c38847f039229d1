"""The boxes of a mailbox: bounds that hold and end, events that arrive twice or late (EV.3.3, scenarios 53 and 56)."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import BoundReachedError, ClosedError, JournalFullError
from messaging.remoteevent import RemoteEvent
from messaging.remoteevent.intake import EventIntake
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import Box, OpenMailbox, event, events, long, taken

MIB = 2**20


def deliver(box: Box, *given: RemoteEvent) -> list[Any]:
    return box.listener.deliver(given).result(PATIENCE)


# --- bounds


def test_a_full_box_takes_events_again_when_it_is_drained(reopen: OpenMailbox) -> None:
    """Scenario 56."""
    box = reopen(max_bytes=MIB).register(60.0)
    for _ in range(3):
        number = stored = 0
        while deliver(box, long(stored + 1, 10_000, str(_))) == [None]:
            stored += 1
        assert 80 < stored < 110
        found = []
        while len(found) < stored:
            found += box.drain()
        assert taken(found) == [*range(1, stored + 1)]
        number = stored + 1
        # the state that keeps the last records is stored soon
        eventually(lambda number=number, kind=str(_): deliver(box, long(number, 10_000, kind)) == [None])  # type: ignore[misc]
        box.drain()


def test_a_box_that_is_drained_in_time_drops_nothing(reopen: OpenMailbox) -> None:
    box = reopen(max_bytes=MIB).register(60.0, full="drop_oldest")
    for number in range(1, 301):
        assert deliver(box, long(number, 10_000)) == [None]
        assert taken(box.drain()) == [number]
    assert box.box.dropped == 0


def test_an_event_without_room_in_bytes_is_dropped_if_the_newest_are_dropped(
    reopen: OpenMailbox,
) -> None:
    """Scenario 56."""
    box = reopen(max_bytes=100_000).register(60.0, full="drop_newest")
    for number in range(1, 31):
        assert deliver(box, long(number, 10_000)) == [None]
    kept = taken(box.drain())
    assert kept == [*range(1, len(kept) + 1)]
    assert 5 < len(kept) < 10
    assert box.box.dropped == 30 - len(kept)


@table("size", [10, 10_000])
@table("full", ["refuse", "drop_oldest", "drop_newest"])
def test_the_newest_event_of_a_kind_always_has_room(reopen: OpenMailbox, size: int, full: Any) -> None:
    """Scenario 53: the bound is one of the stored events, not of those that they took the place of."""
    box = reopen(max_bytes=20 * size + 10_000).register(60.0, keep="latest_and_count", full=full)
    for number in range(1, 601 if size < 100 else 201):
        assert deliver(box, long(number, size)) == [None]
        assert deliver(box, long(number, size, "other")) == [None]
    assert box.box.dropped == 0
    found = box.drain()
    assert {(each.id, each.sequence_number, each.suppressed) for each in found} == {
        (kind, number, number - 1) for kind in (1, "other")
    }


def test_the_bytes_of_the_newest_events_are_bounded(reopen: OpenMailbox) -> None:
    """Scenarios 53 and 56."""
    mailbox = reopen(max_bytes=50_000)
    refusing = mailbox.register(60.0, keep="latest")
    for kind in range(4):
        assert deliver(refusing, long(1, 10_000, kind)) == [None]
    (outcome,) = deliver(refusing, long(1, 10_000, 4))
    assert isinstance(outcome, BoundReachedError)
    assert deliver(refusing, long(2, 10_000, 3)) == [None]
    dropping = mailbox.register(60.0, keep="latest", full="drop_oldest")
    for kind in range(8):
        assert deliver(dropping, long(1, 10_000, kind)) == [None]
    assert dropping.box.dropped == 4
    assert [each.id for each in reopen(max_bytes=50_000).registration(dropping.id).drain()] == [4, 5, 6, 7]


def test_the_journal_of_the_newest_events_stays_small(reopen: OpenMailbox, tmp_path: Path) -> None:
    box = reopen().register(60.0, keep="latest")
    for number in range(1, 2_001):
        deliver(box, long(number, 10_000))
    folder = tmp_path / "mailbox" / "boxes" / box.id

    def size() -> int:
        return sum(each.stat().st_size for each in folder.iterdir() if each.is_file())

    eventually(lambda: deliver(box, event(1, "another")) and size() < 12 * MIB)
    again = reopen().registration(box.id)
    assert [each.sequence_number for each in again.drain() if each.id == 1] == [2_000]


@table("keep", ["all", "latest"])
def test_an_event_that_a_full_box_stores_while_it_closes_is_answered(
    reopen: OpenMailbox, monkeypatch: pytest.MonkeyPatch, keep: Any
) -> None:
    """The oldest one goes in the next run: the journal of a box that closes moves no position."""
    mailbox = reopen()
    registration = mailbox.register(60.0, keep=keep, max_events=2, full="drop_oldest")
    assert deliver(registration, event(1, 1), event(1, 2)) == [None, None]
    box = registration.box
    may_close = threading.Event()
    finish = EventIntake._finish  # type: ignore[attr-defined]

    def is_closed() -> bool:
        with contextlib.suppress(ClosedError):
            box._cursor.commit(0, wait=False)  # type: ignore[attr-defined]
            return False
        return True

    def finish_late(self: Any, *arguments: Any) -> None:
        may_close.set()
        eventually(is_closed, "the journal of the box closes")
        finish(self, *arguments)

    monkeypatch.setattr(EventIntake, "_finish", finish_late)
    promise = registration.listener.deliver([event(1, 3)])
    assert may_close.wait(PATIENCE)
    mailbox.close()
    assert promise.result(PATIENCE) == [None]
    monkeypatch.undo()
    registration = reopen().registration(registration.id)
    assert deliver(registration, event(1, 4)) == [None]
    assert [each.id for each in registration.drain()] == [3, 4]


# --- events that arrive twice, or late


def test_an_event_that_arrives_twice_at_once_is_stored_once(reopen: OpenMailbox) -> None:
    box = reopen().register(60.0)
    promises = [box.listener.deliver([each]) for each in events(1, 50) for _ in range(3)]
    assert [promise.result(PATIENCE) for promise in promises] == [[None]] * 150
    assert taken(box.drain()) == [*range(1, 51)]
    assert box.box.duplicates == 100


def test_the_newest_event_is_back_after_a_restart_also_if_an_older_one_came_late(
    reopen: OpenMailbox,
) -> None:
    box = reopen().register(60.0, keep="latest_and_count")
    deliver(box, event(5, "a"), event(1, "c"), event(3, "a"))
    box = reopen().registration(box.id)
    with box.remote_events() as iterator:
        (first,) = iterator.batch(1)
    assert (first.id, first.sequence_number, first.suppressed) == ("a", 5, 1)
    box = reopen().registration(box.id)
    assert [(each.id, each.sequence_number, each.suppressed) for each in box.drain()] == [("c", 1, 0)]


def test_an_older_event_that_comes_after_the_newest_was_taken_is_not_stored(
    reopen: OpenMailbox,
) -> None:
    box = reopen().register(60.0, keep="latest")
    deliver(box, event(5), event(1, "other"))
    assert len(box.drain()) == 2
    assert deliver(box, event(3)) == [None]
    assert box.drain() == []
    assert reopen().registration(box.id).drain() == []


# --- hostile events


def test_long_handbacks_and_sources_cost_no_memory(reopen: OpenMailbox) -> None:
    box = reopen().register(60.0)
    for number in range(300):
        assert deliver(box, event(1, handback=f"{number}" + "h" * 100_000)) == [None]
    box.drain()
    assert len(str(box.box._snapshot()[0])) < 100_000  # type: ignore[attr-defined]


def test_a_refused_event_may_be_passed_again(reopen: OpenMailbox) -> None:
    box = reopen(max_bytes=30_000).register(60.0)
    given = [long(number, 10_000) for number in range(1, 5)]
    outcomes = deliver(box, *given)
    assert outcomes == [None, None]
    (refused,) = deliver(box, *given[2:])
    assert isinstance(refused, JournalFullError)
    box.drain()
    eventually(lambda: deliver(box, *given[2:])[0] is None)
    assert taken(box.drain()) == [3, 4]

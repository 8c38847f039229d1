"""Bounded journals of events: no listener that has all its events keeps others from being stored (EV.3.1)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import JournalFullError, MessagingError
from messaging.journal import JournalTable
from messaging.remoteevent import EventGenerator, RemoteEvent, StoreAndForwardAgent, event_journal
from messaging.remoteevent.event import encode_event
from messaging.remoteevent.event_journal import Checkpoint, EventJournal, channel_of, record_of
from messaging.testing import waiting
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST, Recorder, event, long
from tests.threads import in_background

BOUND = 200_000


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[EventJournal]:
    with_room = EventJournal(tmp_path / "events", max_bytes=BOUND, full="reject")
    yield with_room
    with_room.journal.close()


def store_batch(journal: EventJournal, events: list[RemoteEvent]) -> tuple[int, int, MessagingError | None]:
    """Store a batch; return what is told of it."""
    found: waiting.Recorder[Any] = waiting.Recorder()
    channels = [channel_of(each.kind) for each in events]
    records = [record_of(channel, encode_event(each)) for channel, each in zip(channels, events, strict=True)]
    journal.store(channels, records, lambda *outcome: found.append(outcome))
    (outcome,) = found.wait_for(1)
    return outcome


# --- batches


def test_a_batch_is_stored_as_far_as_there_is_room_and_in_order(journal: EventJournal) -> None:
    journal.journal.cursor("slow")
    batch: list[RemoteEvent] = [long(number, 30_000) for number in range(1, 9)]
    assert store_batch(journal, batch) == (5, 0, None)  # as many as it may ever have room for
    assert store_batch(journal, batch[5:7])[:2] == (1, 5)  # half of it: it has no room as a whole
    count, _, error = store_batch(journal, [batch[6], long(9, 1)])
    assert count == 0  # the small one must not take the place of the one before it
    assert isinstance(error, JournalFullError)
    assert journal.journal.end == 6


def test_a_batch_that_has_waited_for_room_is_stored_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are tried, although its deadline has passed."""
    monkeypatch.setattr(event_journal, "WRITE_TIMEOUT", 0.3)
    journal = EventJournal(tmp_path / "events", max_bytes=BOUND, full="block")
    journal.journal.cursor("slow")
    assert store_batch(journal, [long(number, 30_000) for number in range(1, 4)])[0] == 3
    assert store_batch(journal, [long(number, 40_000) for number in range(4, 6)])[0] == 2
    assert store_batch(journal, [long(number, 20_000) for number in range(6, 8)])[:2] == (1, 5)
    journal.journal.close()


def test_a_batch_that_is_larger_than_the_bound_does_not_wait(tmp_path: Path) -> None:
    journal = EventJournal(tmp_path / "events", max_bytes=BOUND, full="block")
    journal.journal.cursor("slow")
    assert store_batch(journal, [long(number, 30_000) for number in range(1, 9)])[0] == 5
    journal.journal.close()


def test_a_batch_has_a_bound_in_bytes(tmp_path: Path) -> None:
    journal = EventJournal(tmp_path / "events")
    batch: list[RemoteEvent] = [long(number, 400_000) for number in range(1, 6)]
    assert store_batch(journal, batch)[0] == 2
    assert store_batch(journal, [long(1, 3_000_000)])[0] == 1
    journal.journal.close()


# --- positions


def test_a_rare_kind_does_not_fill_a_generator(tmp_path: Path) -> None:
    listener = Recorder()
    options: dict[str, Any] = {"events": ["rare", "often"], "path": tmp_path / "g", "listeners": {"l": listener}}
    with EventGenerator(max_bytes=BOUND, **options) as generator:
        generator.register("rare", None, listener, 60.0)
        generator.register("often", None, listener, 60.0)
        generator.generate("rare").result(PATIENCE)
        accepted = 0
        for _ in range(6_000):
            if generator.generate("often").exception(PATIENCE) is not None:  # room is made when it is noticed
                break
            accepted += 1
        eventually(lambda: generator.generate("often").exception(PATIENCE) is None)
        eventually(lambda: len(listener.of("often")) == accepted + 1)  # the number of a refused one is not used again
        generator.generate("rare").result(PATIENCE)
        eventually(lambda: listener.of("rare") == [1, 2])


def test_delivered_events_do_not_fill_an_agent(tmp_path: Path) -> None:
    target = Recorder()
    with StoreAndForwardAgent(tmp_path / "agent", target=target, max_bytes=BOUND) as agent:
        for number in range(1, 4_001):
            agent.notify(event(number))
            if not number % 100:
                eventually(lambda number=number: target.numbers[-1:] == [number])  # type: ignore[misc]
    assert target.numbers == [*range(1, 4_001)]


def test_a_listener_that_was_away_passes_the_events_of_others(tmp_path: Path) -> None:
    away, other = Recorder(), Recorder()
    away.error = OSError("away")
    listeners = {"away": away, "other": other}
    with StoreAndForwardAgent(tmp_path / "agent", listeners=listeners, max_bytes=BOUND, retry=FAST) as agent:
        agent.register("source", 1, None, away, 60.0)
        agent.register("source", 2, None, other, 60.0)
        agent.notify(event(1, 1))
        number = 0
        while agent.deliver([event(number + 1, 2)]).result(PATIENCE) == [None]:
            number += 1
        eventually(lambda: len(other.events) == number)
        away.error = None
        eventually(lambda: away.numbers == [1])
        eventually(lambda: agent.deliver([event(number + 1, 2)]).result(PATIENCE) == [None])


def test_one_event_wakes_the_listeners_of_its_kind_only(tmp_path: Path) -> None:
    listeners = {f"l{number}": Recorder() for number in range(200)}
    with StoreAndForwardAgent(tmp_path / "agent", listeners=listeners) as agent:
        for number, each in enumerate(listeners.values()):
            agent.register("source", number, None, each, 60.0)
        for number in range(1, 51):
            agent.notify(event(number, 0))
        eventually(lambda: listeners["l0"].numbers == [*range(1, 51)])
        # the first look of a new registration may come behind the first events
        followed = [name for name, at in agent._events.journal.cursors().items() if at > 25]
    assert len(followed) == 1


# --- checkpoints


def test_an_older_checkpoint_does_not_replace_a_newer_one(tmp_path: Path, journal: EventJournal) -> None:
    with JournalTable(tmp_path / "state") as table:
        entered, go_on = threading.Event(), threading.Event()
        snapshots = iter(range(10))

        def snapshot() -> tuple[Any, int]:
            number = next(snapshots)
            if not number:
                entered.set()
                assert go_on.wait(PATIENCE)
            return number, 0

        checkpoint = Checkpoint(journal, table, snapshot)
        checkpoint.note(1, 1)
        first = in_background(checkpoint.store)
        assert entered.wait(PATIENCE)
        checkpoint.note(1, 1)
        second = in_background(checkpoint.store)
        go_on.set()
        first()
        second()
        assert table.get("checkpoint") == 1

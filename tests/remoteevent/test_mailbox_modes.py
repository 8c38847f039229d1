"""Mailboxes that change between storing, pushing and pulling: nothing is lost, and nothing comes twice (EV.3.3)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import (
    ArgumentError,
    DeadlineError,
    InvalidIteratorError,
    JournalError,
    UnknownLeaseError,
    WouldBlockError,
)
from messaging.remoteevent import EventMailbox, RemoteEvent
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, results, within
from tests.remoteevent.helpers import Box, Recorder, event, events, store, taken
from tests.threads import in_background, together

# --- an iterator that loses its place


def test_a_drain_that_loses_its_place_removes_nothing(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios 42 and 51: another reader begins while a drain is under way."""
    store(box, events(1, 2500))
    fetch = box.pulling.fetch
    calls: list[int | None] = []

    def interrupted(token: Any, ticket: int | None, most: int, timeout: float) -> Any:
        calls.append(ticket)
        if len(calls) == 2:
            box.begin_iterator()
        return fetch(token, ticket, most, timeout)

    monkeypatch.setattr(box.pulling, "fetch", interrupted)
    with pytest.raises(InvalidIteratorError):
        box.drain()
    assert taken(box.drain()) == [*range(1, 2501)]


def test_an_event_that_was_handed_out_is_not_pushed_when_the_switch_meets_the_next_call(
    box: Box, target: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 51: delivery is enabled between the hand-over of the ticket and the check of the iterator."""
    store(box, events(1, 3))
    fetch = box.pulling.fetch
    is_switched = threading.Event()

    def switching(token: Any, ticket: int | None, most: int, timeout: float) -> Any:
        if ticket is not None and not is_switched.is_set():
            is_switched.set()
            box.enable_delivery(target)
        return fetch(token, ticket, most, timeout)

    monkeypatch.setattr(box.pulling, "fetch", switching)
    iterator = box.remote_events()
    assert iterator.next() == event(1)
    with pytest.raises(InvalidIteratorError):
        iterator.next()
    eventually(lambda: len(box) == 0)
    assert target.numbers == [2, 3]


def test_events_that_arrive_during_the_switch_are_not_handed_out_by_the_old_iterator(
    box: Box, target: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 51: delivery is enabled after the box has answered the iterator."""
    store(box, events(1, 3))
    fetch = box.pulling.fetch

    def switching(token: Any, ticket: int | None, most: int, timeout: float) -> Any:
        found = fetch(token, ticket, most, timeout)
        box.enable_delivery(target)
        return found

    monkeypatch.setattr(box.pulling, "fetch", switching)
    with pytest.raises(InvalidIteratorError):
        box.remote_events().next()
    eventually(lambda: target.numbers == [1, 2, 3])


def test_a_failed_call_keeps_its_place(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    store(box, events(1, 3))
    iterator = box.remote_events()
    assert iterator.next() == event(1)
    stored = box.box
    acknowledge = stored.acknowledge

    def fail(_ticket: int) -> None:
        raise JournalError("box", "the disk is away")

    monkeypatch.setattr(stored, "acknowledge", fail)
    with pytest.raises(JournalError):
        iterator.next()
    monkeypatch.setattr(stored, "acknowledge", acknowledge)
    assert iterator.next() == event(2)
    iterator.close()
    assert len(box) == 1


def test_an_awaited_iterator_acknowledges_with_the_next_call(box: Box) -> None:
    store(box, events(1, 3))

    async def main() -> None:
        iterator = box.remote_events()
        assert await iterator.next_soon() == event(1)
        assert len(box) == 3
        assert await iterator.next_soon() == event(2)
        assert len(box) == 2
        box.remote_events()
        with pytest.raises(InvalidIteratorError):
            await iterator.next_soon()

    asyncio.run(main())
    assert taken(box.drain()) == [3]


def test_tokens_of_iterators_are_never_the_same(mailbox: EventMailbox, tmp_path: Path) -> None:
    """An iterator of an earlier run, or of another registration, stays invalid."""
    box = mailbox.register(100.0, keep="latest")
    old = box.begin_iterator()
    mailbox.close()
    with EventMailbox(tmp_path / "mailbox") as again:
        box = again.registration(box.id)
        store(box, events(1, 1))
        new = box.begin_iterator()
        assert new != old
        with pytest.raises(InvalidIteratorError):
            box.pulling.fetch(old, 2**62, 0, 0.0).result(PATIENCE)
        assert len(box) == 1


def test_only_the_newest_fetch_of_an_iterator_waits(box: Box) -> None:
    token = box.begin_iterator()
    waits = [box.pulling.fetch(token, None, 10, 9.0) for _ in range(100)]
    assert results(waits[:-1]) == [[]] * 99
    assert not waits[-1].done()
    store(box, [event(1)])
    assert [each for _, each in waits[-1].result(PATIENCE)] == [event(1)]


# --- a target that has a batch


class Slow(Recorder):
    """A target that returns when it is told to, event by event."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: waiting.Recorder[RemoteEvent] = waiting.Recorder()
        self.go_on = threading.Event()

    def notify(self, event: RemoteEvent) -> None:
        self.begun.append(event)
        assert self.go_on.wait(PATIENCE)
        super().notify(event)


@pytest.fixture
def slow(box: Box) -> Iterator[Slow]:
    """A target that has the first events of the box."""
    made = Slow()
    store(box, events(1, 500))
    box.enable_delivery(made)
    made.begun.wait_for(1)
    yield made
    made.go_on.set()


@pytest.mark.parametrize("how", ["drain", "next"])
def test_taking_after_pushing_waits_for_the_batch_that_the_target_has(box: Box, slow: Slow, how: str) -> None:
    """Scenarios 42 and 51: neither lost nor doubled, and not none although events are stored."""
    found: list[RemoteEvent] = []

    def take() -> None:
        if how == "drain":
            found.extend(box.drain())
            return
        with box.remote_events() as iterator:
            while (each := iterator.next()) is not None:
                found.append(each)

    join = in_background(take)
    eventually(lambda: box.target is None)
    slow.go_on.set()
    join()
    assert found
    assert slow.numbers + taken(found) == [*range(1, 501)]


def test_taking_after_pushing_says_that_the_target_does_not_answer(
    box: Box, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.remoteevent.mailbox.iterator.BATCH_WAIT", 0.05)
    with pytest.raises(DeadlineError, match="target"):
        box.drain()
    iterator = box.remote_events()
    with pytest.raises(DeadlineError, match="target"):
        iterator.next()
    assert iterator.next(0.05) is None
    slow.go_on.set()
    first = iterator.next(10)
    assert first is not None
    assert slow.numbers == [*range(1, first.sequence_number)]


def test_waiting_for_the_batch_does_not_disable_a_newer_target(box: Box, slow: Slow, target: Recorder) -> None:
    """The newer target gets what the one before has not acknowledged."""
    waiting = box.pulling.fetch(box.begin_iterator(), None, 10, 9.0)
    box.enable_delivery(target)
    with pytest.raises(InvalidIteratorError):
        waiting.result(PATIENCE)
    slow.go_on.set()
    eventually(lambda: len(slow.events) + len(target.events) == 500)
    assert slow.numbers + target.numbers == [*range(1, 501)]


# --- target, delivery and disk agree


def test_a_target_that_is_gone_is_no_target_any_more_also_after_a_restart(
    mailbox: EventMailbox, box: Box, target: Recorder, tmp_path: Path
) -> None:
    """Scenario 47."""
    target.go()
    store(box, events(1, 5))
    box.enable_delivery(target)
    eventually(lambda: box.target is None)
    mailbox.close()
    with EventMailbox(tmp_path / "mailbox", listeners={"target": target}) as again:
        found = again.registration(box.id)
        assert found.target is None
        assert taken(found.drain()) == [1, 2, 3, 4, 5]


def test_memory_disk_and_delivery_agree_after_switches_side_by_side(
    mailbox: EventMailbox, tmp_path: Path, target: Recorder, other: Recorder
) -> None:
    """Scenario 43: whichever switch comes last holds everywhere."""
    boxes = [mailbox.register(100.0) for _ in range(20)]
    for each in boxes:
        switches: list[Callable[[], object]] = [
            lambda each=each: each.enable_delivery(target),  # type: ignore[misc]
            lambda each=each: each.enable_delivery(other),  # type: ignore[misc]
            each.disable_delivery,
            each.remote_events,
            lambda each=each: each.lease.renew(100.0),  # type: ignore[misc]
        ]
        together(*switches)
    targets = {each.id: each.target for each in boxes}
    for each in boxes:
        store(each, [event(1, source=each.id)])
    delivered = [target.events, other.events]
    for each in boxes:
        eventually(lambda each=each: targets[each.id] is None or not len(each))  # type: ignore[misc]
        assert len(each) == (targets[each.id] is None)
        for recorder, found in zip((target, other), delivered, strict=True):
            assert (each.id in {got.source for got in found}) == (targets[each.id] is recorder)
    mailbox.close()
    with EventMailbox(tmp_path / "mailbox", listeners={"target": target, "other": other}) as again:
        assert {each.id: each.target for each in again.registrations()} == targets


def test_a_target_that_cannot_be_stored_changes_nothing(
    box: Box, target: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator = box.remote_events()

    def fail(*_: Any) -> None:
        raise JournalError("state", "the disk is full")

    monkeypatch.setattr(box.pushing, "_persist", fail)
    with pytest.raises(JournalError):
        box.enable_delivery(target)
    assert box.target is None
    store(box, [event(1)])
    assert iterator.next(5) == event(1)
    assert not target.calls


def test_a_target_of_this_process_alone_is_stored_only_after_a_restart(
    mailbox: EventMailbox, box: Box, tmp_path: Path
) -> None:
    found: waiting.Recorder[RemoteEvent] = waiting.Recorder()
    box.enable_delivery(found)
    store(box, [event(1)])
    found.wait_for(1)
    mailbox.close()
    with EventMailbox(tmp_path / "mailbox") as again:
        assert again.registration(box.id).target is None


def test_enabling_delivery_of_a_registration_that_ends_leaves_no_delivery(
    box: Box, target: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 48: the lease ends while the target is being stored."""
    store(box, events(1, 5))
    persist = box.pushing._persist

    def ending(*values: Any) -> None:
        persist(*values)
        box.lease.cancel()

    monkeypatch.setattr(box.pushing, "_persist", ending)
    with pytest.raises(UnknownLeaseError):
        box.enable_delivery(target)
    assert box.target is None
    assert not target.calls


# --- event loops


def test_nothing_has_changed_when_a_call_would_block_the_event_loop(
    mailbox: EventMailbox, box: Box, target: Recorder
) -> None:
    iterator = box.remote_events()

    async def main() -> None:
        for call in (
            lambda: box.enable_delivery(target),
            lambda: box.add_unknown_events([("source", 1)]),
            lambda: mailbox.register(50.0),
            lambda: mailbox.renew_lease(box, mailbox.landlord.grant(5.0)),
            box.drain,
        ):
            with pytest.raises(WouldBlockError):
                call()

    asyncio.run(main())
    assert (box.target, box.refused, len(mailbox)) == (None, frozenset(), 1)
    store(box, [event(1)])
    assert iterator.next(5) == event(1)

    async def disable() -> None:
        for call in (box.disable_delivery, box.remote_events):
            with pytest.raises(WouldBlockError):
                call()

    box.enable_delivery(target)
    asyncio.run(disable())
    assert box.target is target


def test_delivery_is_enabled_on_an_event_loop(box: Box) -> None:
    store(box, events(1, 3))
    found: list[tuple[RemoteEvent, bool]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        async def notify(each: RemoteEvent) -> None:
            found.append((each, asyncio.get_running_loop() is loop))
            if len(found) == 3:
                done.set()

        await box.enable_delivery_soon(notify)
        assert box.target is notify
        await within(done.wait())
        await box.enable_delivery_soon(None)
        assert box.target is None
        with pytest.raises(ArgumentError):
            box.enable_delivery_soon("no listener")

    asyncio.run(main())
    assert found == [(each, True) for each in events(1, 3)]


# --- the end of a registration


def test_targets_that_hang_do_not_delay_the_end_of_registrations(mailbox: EventMailbox) -> None:
    """Scenario 48: the landlord has four threads for callbacks, and none of them waits."""
    hanging = [Slow() for _ in range(6)]
    boxes = []
    try:
        for each in hanging:
            box = mailbox.register(100.0)
            store(box, [event(1)])
            box.enable_delivery(each)
            each.begun.wait_for(1)
            boxes.append(box)
        for box in boxes:
            box.lease.cancel()
        eventually(lambda: len(mailbox) == 0)
        assert not any(each.events for each in hanging)
    finally:
        for each in hanging:
            each.go_on.set()


def test_an_expired_lease_stops_delivery_before_the_landlord_has_noticed(mailbox: EventMailbox, box: Box) -> None:
    """Scenario 48."""
    slow = Slow()
    store(box, [event(1)])
    box.enable_delivery(slow)
    slow.begun.wait_for(1)
    store(box, [event(2)])
    box.lease.note_cancelled()  # its callbacks have not run
    slow.go_on.set()
    eventually(lambda: box.counts.delivered == 1)
    box.note_stored([])
    assert mailbox.registrations() == []
    assert slow.numbers == [1]


@table("most", [-1, True, "x", 1.5])
def test_a_number_of_events_is_an_int_from_0(box: Box, most: Any) -> None:
    store(box, [event(1)])
    with pytest.raises(ArgumentError):
        box.drain(most)
    assert box.drain(0) == []
    assert len(box) == 1

"""Duplicates and losses at the receiver (EV.2.3.2; scenarios 2 to 7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError, UnknownEventError
from messaging.leases import Landlord, Lease
from messaging.remoteevent import EventGenerator, EventRegistration, RemoteEvent
from messaging.remoteevent.sequences import Arrival, ArrivalKind, IdempotentListener, SequenceTracker
from messaging.testing.waiting import PATIENCE, Recorder
from tests.remoteevent.helpers import deliver_all, generate
from tests.threads import in_threads


@pytest.fixture(scope="module")
def lease() -> Iterator[Lease]:
    with Landlord() as landlord:
        yield landlord.grant(3600)


def event(number: int, event_id: Any = "x", source: str = "s") -> RemoteEvent:
    return RemoteEvent(source, event_id, number)


def registration(lease: Lease, number: int, is_fully_ordered: bool = True) -> EventRegistration:
    return EventRegistration("x", "s", lease, number, is_fully_ordered)


def test_equal_numbers_mean_the_same_event() -> None:
    """Scenario 2; and 3: the rule says nothing across ids or sources."""
    tracker = SequenceTracker()
    assert tracker.note(event(5)) == Arrival(ArrivalKind.NEW)
    assert tracker.note(event(5)) == Arrival(ArrivalKind.DUPLICATE)
    for other in (event(5, "y"), event(5, 1), event(5, "x", "t"), event(4), event(6)):
        assert tracker.note(other).is_new
    assert len(tracker) == 4


def test_losses_of_a_fully_ordered_kind_are_counted(lease: Lease) -> None:
    """Scenario 4: exactly n-m-1 events lie between; a late one takes itself out of the count."""
    tracker = SequenceTracker()
    tracker.expect(registration(lease, 7))
    assert tracker.note(event(8)) == Arrival(ArrivalKind.NEW, 0, 0)
    assert tracker.note(event(12)) == Arrival(ArrivalKind.NEW, 3, 3)
    assert tracker.note(event(10)) == Arrival(ArrivalKind.NEW, 2, 0)
    assert tracker.note(event(10)) == Arrival(ArrivalKind.DUPLICATE, 2, 0)
    assert tracker.note(event(14)) == Arrival(ArrivalKind.NEW, 3, 1)
    assert tracker.missed(("s", "x")) == tracker.missed(registration(lease, 0)) == 3


def test_a_gap_after_the_registration_is_a_loss(lease: Lease) -> None:
    """Scenario 7: the first event has a higher number than the registration."""
    tracker = SequenceTracker()
    tracker.expect(registration(lease, 7))
    assert not tracker.note(event(7)).is_new
    assert tracker.note(event(10)).missed == 2


def test_a_gap_of_another_kind_proves_nothing(lease: Lease) -> None:
    """Scenario 5."""
    tracker = SequenceTracker()
    tracker.expect(registration(lease, 0, is_fully_ordered=False))
    for number in (5, 100, 50):
        assert tracker.note(event(number)) == Arrival(ArrivalKind.NEW)
    assert tracker.note(event(1, "never registered")).missed == 0


def test_a_later_registration_does_not_make_losses_of_what_it_did_not_ask_for(lease: Lease) -> None:
    tracker = SequenceTracker()
    tracker.expect(registration(lease, 0))
    tracker.note(event(1))
    tracker.expect(registration(lease, 10))
    assert tracker.note(event(11)).missed == 0
    assert tracker.note(event(13)).missed == 1
    assert tracker.note(event(5)) == Arrival(ArrivalKind.NEW, 1)  # of the first registration
    assert tracker.note(event(12)) == Arrival(ArrivalKind.NEW, 0)


def test_a_registration_may_be_noted_after_its_first_events(lease: Lease) -> None:
    tracker = SequenceTracker()
    tracker.note(event(8))
    tracker.expect(registration(lease, 7))
    assert not tracker.note(event(8)).is_new
    assert tracker.note(event(10)).missed == 1


@given(st.lists(st.integers(1, 30), max_size=60))
def test_losses_are_what_a_set_misses(numbers: list[int]) -> None:
    """Scenario 4, in any order and with duplicates."""
    with Landlord() as landlord:
        tracker, model = SequenceTracker(), set[int]()
        tracker.expect(registration(landlord.grant(60), 0))
        for number in numbers:
            arrival = tracker.note(event(number))
            assert arrival.is_new is (number not in model)
            model.add(number)
            assert arrival.missed == max(model) - len(model)


def test_kinds_are_bounded() -> None:
    tracker = SequenceTracker(max_kinds=2)
    for each in ("a", "b", "a", "c"):
        tracker.note(event(1, each))
    assert len(tracker) == 2
    assert tracker.has(event(1, "a"))
    assert not tracker.has(event(1, "b"))
    assert tracker.forget(("s", "a"))
    assert not tracker.forget(("s", "a"))


def test_many_threads_see_each_event_new_once() -> None:
    tracker, found = SequenceTracker(), list[int]()

    def run() -> None:
        found.extend(number for number in range(2000) if tracker.note(event(number)).is_new)

    in_threads(4, lambda _: run())
    assert sorted(found) == list(range(2000))


@given(st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=5), max_size=8))
def test_an_idempotent_listener_acts_once(batches: list[list[int]]) -> None:
    """Scenario 6."""
    got: list[int] = []
    listener = IdempotentListener(lambda each: got.append(each.sequence_number))
    for batch in batches:
        deliver_all(listener, [event(number) for number in batch])
    wanted = list(dict.fromkeys(number for batch in batches for number in batch))
    assert got == wanted


def test_an_event_whose_notification_failed_is_not_taken_for_a_duplicate() -> None:
    """Scenario 6: an idempotent receiver must not lose what it has not acted on."""
    failures = [RuntimeError("not now"), None, ValueError("bad"), UnknownEventError("not yet"), None]
    got: list[int] = []

    def notify(each: RemoteEvent) -> None:
        got.append(each.sequence_number)
        error = failures.pop(0)
        if error is not None:
            raise error

    listener = IdempotentListener(notify)
    assert len(listener.deliver([event(1), event(2)]).result(PATIENCE)) == 1  # the second was not tried
    assert listener.deliver([event(1), event(2)]).result(PATIENCE)[0] is None
    assert listener.deliver([event(2)]).result(PATIENCE) == [None]  # refused for good: taken for a duplicate
    outcome = listener.deliver([event(3)]).result(PATIENCE)[0]
    assert isinstance(outcome, UnknownEventError)
    listener.notify(event(3))
    assert got == [1, 1, 2, 3, 3]


def test_losses_are_told(lease: Lease) -> None:
    told: list[Any] = []
    tracker = SequenceTracker()
    tracker.expect(registration(lease, 0))
    listener = IdempotentListener(
        lambda _event: None,
        tracker,
        on_missed=lambda each, arrival: told.append((each.sequence_number, arrival.missed)),
    )
    for number in (1, 4, 2, 6):
        listener.notify(event(number))
    assert told == [(4, 2), (6, 2)]


def test_events_of_a_generator_are_new_once_and_none_is_missed() -> None:
    """Scenarios 6 and 7, with the registration of a generator."""
    got: Recorder[int] = Recorder()

    def notify(each: RemoteEvent) -> None:
        got.append(each.sequence_number)

    with EventGenerator("boiler", events=["hot"], begin=0) as boiler:
        boiler.generate("hot")
        tracker = SequenceTracker()
        found = boiler.register("hot", None, IdempotentListener(notify, tracker))
        tracker.expect(found)
        generate(boiler, 100, "hot")
        assert got.wait_for(100) == list(range(2, 102))
        assert tracker.missed(found) == 0


def test_junk_is_refused() -> None:
    tracker = SequenceTracker()
    for junk in (None, 3, "x", object()):
        with pytest.raises(ArgumentError):
            tracker.expect(junk)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            tracker.note(junk)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            IdempotentListener(junk)
    with pytest.raises(ArgumentError):
        SequenceTracker(max_kinds=0)
    with pytest.raises(ArgumentError):
        IdempotentListener(print, 3)  # type: ignore[arg-type]

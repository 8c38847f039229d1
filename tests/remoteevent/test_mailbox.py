"""Event mailboxes (EV.3.3): storing, pushing, pulling, leases, refusals, bounds and restarts."""

from __future__ import annotations

import errno
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    ClosedError,
    InvalidIteratorError,
    ListenerGoneError,
    MessagingError,
    UnknownEventError,
    UnknownLeaseError,
)
from messaging.journal import Journal
from messaging.leases import Landlord, Lease
from messaging.remoteevent import EventGenerator, EventMailbox, RemoteEvent
from messaging.testing import waiting
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST, Box, OpenMailbox, Recorder, event, events, generate, store, taken
from tests.threads import in_background, together

# --- storing, pushing


def test_kept_events_come_first_and_in_order_then_live_ones(box: Box, target: Recorder) -> None:
    """Scenario 41: the faucet; and 53: by default all are kept."""
    store(box, events(1, 500))
    assert len(box) == 500
    box.enable_delivery(target)
    store(box, events(501, 520))
    eventually(lambda: len(target.events) == 520)
    assert target.numbers == [*range(1, 521)]
    eventually(lambda: len(box) == 0)
    box.disable_delivery()
    store(box, events(521, 530))
    assert len(box) == 10
    assert len(target.events) == 520
    box.enable_delivery(target)
    eventually(lambda: len(target.events) == 530)
    assert target.numbers == [*range(1, 531)]


def test_a_drain_empties_the_box_and_storing_goes_on(box: Box) -> None:
    """Scenario 42: the batch."""
    store(box, events(1, 2500))
    assert taken(box.drain()) == [*range(1, 2501)]
    assert len(box) == 0
    assert box.drain() == []
    store(box, events(2501, 2510))
    assert taken(box.drain(4)) == [2501, 2502, 2503, 2504]
    assert taken(box.drain()) == [*range(2505, 2511)]


def test_enabling_twice_makes_no_duplicates_and_another_target_gets_later_events(
    box: Box, target: Recorder, other: Recorder
) -> None:
    """Scenario 43."""
    store(box, events(1, 50))
    for _ in range(5):
        box.enable_delivery(target)
    eventually(lambda: len(target.events) == 50)
    box.enable_delivery(other)
    store(box, events(51, 60))
    eventually(lambda: len(other.events) == 10)
    assert target.numbers == [*range(1, 51)]
    assert other.numbers == [*range(51, 61)]


def test_changing_the_target_while_a_batch_is_under_way_doubles_nothing(
    box: Box, target: Recorder, other: Recorder
) -> None:
    """Scenario 43."""
    store(box, events(1, 20))
    with target.gate:
        box.enable_delivery(target)
        eventually(lambda: box.target is target)
        box.enable_delivery(other)
    store(box, events(21, 300))
    eventually(lambda: len(target.events) + len(other.events) == 300)
    eventually(lambda: len(box) == 0)
    assert target.numbers + other.numbers == [*range(1, 301)]


def test_no_target_is_as_disabling_and_disabling_twice_is_harmless(box: Box, target: Recorder) -> None:
    """Scenario 43."""
    box.disable_delivery()
    box.disable_delivery()
    box.enable_delivery(target)
    box.enable_delivery(None)
    assert box.target is None
    store(box, events(1, 5))
    assert len(box) == 5


def test_a_listener_of_the_mailbox_itself_is_no_target(mailbox: EventMailbox, box: Box) -> None:
    """Scenario 44."""
    second = mailbox.register(100.0)
    for each in (box.listener, second.listener):
        with pytest.raises(ArgumentError, match="itself"):
            box.enable_delivery(each)
    assert box.target is None
    with pytest.raises(ArgumentError):
        box.enable_delivery("a listener")


def test_the_mailbox_of_another_folder_may_be_the_target(box: Box, tmp_path: Path) -> None:
    with EventMailbox(tmp_path / "second") as second:
        further = second.register(100.0)
        box.enable_delivery(further.listener)
        store(box, events(1, 10))
        eventually(lambda: len(further) == 10)
        box.disable_delivery()


# --- refusals


def test_a_kind_that_the_target_does_not_know_is_refused_until_delivery_is_enabled_again(
    box: Box, target: Recorder
) -> None:
    """Scenario 45."""
    target.unknown = {("source", 2)}
    store(box, [event(1), event(1, 2), event(2), event(2, 2), event(3)])
    box.enable_delivery(target)
    eventually(lambda: len(box) == 0)
    assert target.numbers == [1, 2, 3]
    assert len([each for each in target.calls if each.id == 2]) == 1  # it was not asked again
    assert box.refused == {("source", 2)}
    with pytest.raises(UnknownEventError):
        box.listener.notify(event(3, 2))
    box.listener.notify(event(4))
    eventually(lambda: target.numbers == [1, 2, 3, 4])
    target.unknown = set()
    box.enable_delivery(target)  # the same one
    assert box.refused == frozenset()
    box.listener.notify(event(3, 2))
    eventually(lambda: target.of(2) == [3])


def test_a_mailbox_without_a_refusal_accepts_any_kind(box: Box) -> None:
    """Scenario 46."""
    given = [event(1, each, source) for each in (1, "one", 2**62, -5) for source in ("a", "b")]
    store(box, given)
    assert box.drain() == given


def test_the_owner_may_name_unknown_events(box: Box, target: Recorder) -> None:
    box.add_unknown_events([("source", 7)])
    with pytest.raises(UnknownEventError):
        box.listener.notify(event(1, 7))
    assert box.listener.deliver([event(1), event(1, 7), event(2)]).result(PATIENCE) == [None]
    box.enable_delivery(target)
    box.listener.notify(event(1, 7))
    for junk in ("x", [("source",)], [("", 1)], [5]):
        with pytest.raises(MessagingError):
            box.add_unknown_events(junk)  # type: ignore[arg-type]


def test_delivery_stops_when_the_target_is_gone_and_a_new_one_gets_all(
    box: Box, target: Recorder, other: Recorder
) -> None:
    """Scenario 47."""
    target.go()
    store(box, events(1, 20))
    box.enable_delivery(target)
    target.calls.wait_for(1)
    store(box, events(21, 40))
    assert len(box) == 40
    box.enable_delivery(other)
    eventually(lambda: len(other.events) == 40)
    assert other.numbers == [*range(1, 41)]
    assert len(target.calls) == 1


def test_a_target_that_fails_is_tried_again(box: Box, target: Recorder) -> None:
    target.error = OSError("busy")
    box.enable_delivery(target)
    store(box, events(1, 5))
    target.calls.wait_for(3)
    assert {each.sequence_number for each in target.calls} == {1}
    target.error = None
    eventually(lambda: target.numbers == [1, 2, 3, 4, 5])


# --- leases


@pytest.mark.parametrize("end", ["cancel", "expire"])
def test_a_registration_ends_with_its_lease(mailbox: EventMailbox, tmp_path: Path, target: Recorder, end: str) -> None:
    """Scenario 48."""
    box = mailbox.register(100.0)
    store(box, events(1, 10))
    folder = tmp_path / "mailbox" / "boxes" / box.id
    assert folder.is_dir()
    if end == "cancel":
        box.lease.cancel()
    else:
        box.lease.renew(0.05)
    eventually(lambda: box.lease.is_ended)
    with pytest.raises(ListenerGoneError):
        box.listener.notify(event(11))
    for call in (
        lambda: box.enable_delivery(target),
        box.disable_delivery,
        box.remote_events,
        box.drain,
        lambda: box.add_unknown_events([]),
        lambda: mailbox.registration(box.id),
        lambda: mailbox.renew_lease(box, mailbox.landlord.grant(5.0)),
    ):
        with pytest.raises(UnknownLeaseError):
            call()
    eventually(lambda: not folder.exists())
    assert mailbox.registrations() == []


def test_a_registration_ends_also_if_the_disk_fails(
    mailbox: EventMailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    box = mailbox.register(100.0)
    store(box, events(1, 10))
    box.enable_delivery(None)
    folder = tmp_path / "mailbox" / "boxes" / box.id
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail_to_sync)
        box.lease.cancel()
        eventually(lambda: not folder.exists())
    assert mailbox.registrations() == []
    assert "is not removed" in caplog.text
    assert "Traceback" not in caplog.text


def fail_to_sync(_file: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_generator_stops_sending_to_a_registration_that_has_ended(mailbox: EventMailbox) -> None:
    """Scenario 48."""
    box = mailbox.register(100.0)
    with EventGenerator("source", events=[1], begin=0) as generator:
        registration = generator.register(1, None, box.listener, 100.0)
        box.lease.cancel()
        generator.generate(1)
        eventually(lambda: registration.lease.is_ended)


# --- pulling


def test_next_returns_at_once_wakes_early_and_gives_up_in_time(box: Box) -> None:
    """Scenario 49."""
    store(box, events(1, 2))
    iterator = box.remote_events()
    assert iterator.next() == event(1)
    assert iterator.next(5) == event(2)
    begun = time.monotonic()
    assert iterator.next(0.2) is None
    assert time.monotonic() - begun > 0.15
    found: waiting.Recorder[RemoteEvent | None] = waiting.Recorder()
    join = in_background(lambda: found.append(iterator.next(PATIENCE)))
    eventually(lambda: box.pulling)
    box.listener.notify(event(3))
    join()
    assert found == [event(3)]
    assert iterator.next() is None
    for junk in (-1, -0.001, "x", None, True, float("nan")):
        with pytest.raises(ArgumentError):
            iterator.next(junk)  # type: ignore[arg-type]
    store(box, events(4, 4))
    assert iterator.next(5) == event(4)
    iterator.close()
    iterator.close()
    assert len(box) == 0


def test_an_event_counts_as_taken_with_the_next_call(box: Box) -> None:
    store(box, events(1, 3))
    iterator = box.remote_events()
    assert iterator.next() == event(1)
    assert len(box) == 3
    assert iterator.next() == event(2)
    assert len(box) == 2
    iterator.close()
    assert len(box) == 1


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("cancel", UnknownLeaseError),
        ("push", InvalidIteratorError),
        ("iterate", InvalidIteratorError),
        ("close", ClosedError),
    ],
)
def test_a_wait_ends_early_with_the_matching_error(
    mailbox: EventMailbox, box: Box, target: Recorder, end: str, error: type[Exception]
) -> None:
    """Scenario 50."""
    iterator = box.remote_events()
    join = in_background(lambda: iterator.next(3 * PATIENCE))
    eventually(lambda: box.pulling)
    {
        "cancel": lambda: box.lease.cancel(),
        "push": lambda: box.enable_delivery(target),
        "iterate": lambda: box.remote_events(),
        "close": mailbox.close,
    }[end]()
    with pytest.raises(error):
        join()


def test_a_newer_iterator_makes_the_older_one_invalid(box: Box) -> None:
    """Scenario 51."""
    store(box, events(1, 10))
    first = box.remote_events()
    assert taken(first.batch(4)) == [1, 2, 3, 4]
    second = box.remote_events()
    for call in (first.next, first.batch, first.close):
        with pytest.raises(InvalidIteratorError):
            call()
    assert taken(second.batch(100)) == [*range(5, 11)]


def test_changing_between_push_and_pull_loses_and_doubles_nothing(box: Box, target: Recorder) -> None:
    """Scenario 51."""
    found: list[int] = []
    stop = threading.Event()
    total = 3000

    def send() -> None:
        for first in range(1, total, 30):
            store(box, events(first, first + 29))
        stop.set()

    join = in_background(send)
    while not stop.is_set() or len(box):
        before = len(target.events)
        box.enable_delivery(target)
        eventually(lambda before=before: len(target.events) > before or not len(box))  # type: ignore[misc]
        iterator = box.remote_events()
        for _ in range(25):
            got = iterator.next(0.05)
            if got is None:
                break
            found.append(got.sequence_number)
        if stop.is_set() and not len(box) - (1 if found else 0) > 0:
            iterator.close()
    join()
    box.disable_delivery()
    both = sorted(found + target.numbers)
    assert both == [*range(1, total + 1)]
    assert found == sorted(found)
    assert target.numbers == sorted(target.numbers)


def test_an_undecodable_event_is_skipped(reopen: OpenMailbox, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 52."""
    box = reopen().register(100.0)
    store(box, [event(1)])
    reopen().close()
    with Journal.open(tmp_path / "mailbox" / "boxes" / box.id) as journal:
        journal.append("x", b"no event")
        journal.append("x", b'{"source":5}')
    box = reopen().registration(box.id)
    store(box, [event(2)])
    assert taken(box.drain()) == [1, 2]
    assert box.box.damaged == 2
    assert "is skipped" in caplog.text
    store(box, [event(3)])
    assert taken(box.drain()) == [3]


# --- which events are kept


@pytest.mark.parametrize("keep", ["latest", "latest_and_count"])
def test_only_the_newest_event_of_each_kind_is_kept(reopen: OpenMailbox, target: Recorder, keep: Any) -> None:
    """Scenario 53."""
    is_counting = keep == "latest_and_count"
    box = reopen().register(100.0, keep=keep)
    for number in range(1, 1501):
        promise = box.listener.deliver([event(number, each) for each in (1, 2)])
    promise.result(PATIENCE)
    assert len(box) == 2
    box = reopen().registration(box.id)
    assert len(box) == 2
    box.listener.notify(event(1501, 2))
    found = box.drain()
    assert [(each.id, each.sequence_number) for each in found] == [(1, 1500), (2, 1501)]
    assert [each.suppressed for each in found] == ([1499, 1500] if is_counting else [0, 0])
    store(box, events(2000, 2003))
    box.enable_delivery(target)
    target.events.wait_for(1)
    assert (target.numbers, target.events[0].suppressed) == ([2003], 3 if is_counting else 0)
    eventually(lambda: len(box) == 0)


def test_an_event_that_arrives_late_does_not_replace_a_newer_one(mailbox: EventMailbox) -> None:
    """Scenario 53."""
    box = mailbox.register(100.0, keep="latest_and_count")
    store(box, [event(5), event(3)])
    (found,) = box.drain()
    assert (found.sequence_number, found.suppressed) == (5, 1)


# --- restart


def test_leases_target_events_and_refusals_are_back_after_a_restart(reopen: OpenMailbox, target: Recorder) -> None:
    """Scenario 54."""
    mailbox = reopen()
    box = mailbox.register(100.0)
    idle = mailbox.register(100.0)
    target.error = OSError("away")
    target.unknown = {("source", 2)}
    store(box, [event(1, 2)])
    box.enable_delivery(target)
    eventually(lambda: box.refused)
    store(box, events(1, 20))
    store(idle, events(1, 5))
    assert box.lease.renew(200.0).result() == 200.0
    for _ in range(3):
        mailbox = reopen()
    assert {each.id for each in mailbox.registrations()} == {box.id, idle.id}
    again = mailbox.registration(box.id)
    assert 190.0 < again.lease.remaining <= 200.0
    assert again.refused == {("source", 2)}
    assert again.target is target
    with pytest.raises(UnknownEventError):
        again.listener.notify(event(2, 2))
    target.error = None
    eventually(lambda: target.numbers == [*range(1, 21)])
    assert taken(mailbox.registration(idle.id).drain()) == [1, 2, 3, 4, 5]


def test_a_lease_that_expired_while_the_mailbox_was_closed_is_gone(reopen: OpenMailbox, tmp_path: Path) -> None:
    """Scenarios 48 and 54."""
    mailbox = reopen()
    box = mailbox.register(100.0)
    store(box, events(1, 5))
    box.lease.renew(0.5)
    mailbox.close()
    eventually(lambda: box.lease.is_expired)
    mailbox = reopen()
    with pytest.raises(UnknownLeaseError):
        mailbox.registration(box.id)
    assert not (tmp_path / "mailbox" / "boxes" / box.id).exists()


def test_a_duplicate_is_stored_once_also_after_a_restart(reopen: OpenMailbox) -> None:
    """Scenario 6."""
    box = reopen().register(100.0)
    store(box, events(1, 100))
    store(box, events(50, 110))
    box = reopen().registration(box.id)
    store(box, events(90, 120))
    assert box.box.duplicates == 21
    assert taken(box.drain()) == [*range(1, 121)]
    store(box, [event(5, handback="another"), event(5, 2), event(5, source="another")])
    assert len(box) == 3  # the same number of other streams


def test_an_earlier_event_that_arrives_late_is_no_duplicate(box: Box) -> None:
    store(box, [event(10), event(3), event(10), event(3)])
    assert taken(box.drain()) == [10, 3]


def test_many_registrations_get_their_own_events_once_and_in_order(reopen: OpenMailbox) -> None:
    """Scenario 55."""
    mailbox = reopen()
    boxes = [mailbox.register(1000.0) for _ in range(20)]
    numbers: dict[str, list[int]] = {each.id: [] for each in boxes}

    def load(box: Box, first: int, seed: int) -> None:
        def note(received: RemoteEvent) -> None:
            assert received.handback == box.id
            numbers[box.id].append(received.sequence_number)

        for at in range(first, first + 100, 10):
            given = [event(number, handback=box.id) for number in range(at, at + 10)]
            store(box, given)
            if (at // 10 + seed) % 2:
                box.enable_delivery(note)
            else:
                box.disable_delivery()

    for first in (1, 101):
        together(*(partial(load, mailbox.registration(each.id), first, at) for at, each in enumerate(boxes)))
        for each in boxes:
            mailbox.registration(each.id).disable_delivery()
        mailbox = reopen()
    for each in boxes:
        numbers[each.id] += taken(mailbox.registration(each.id).drain())
        assert numbers[each.id] == [*range(1, 201)]


# --- bounds


@table("full", ["refuse", "drop_oldest", "drop_newest"])
def test_what_happens_to_an_event_without_room_is_explicit_and_counted(mailbox: EventMailbox, full: Any) -> None:
    """Scenario 56."""
    box = mailbox.register(100.0, max_events=10, full=full)
    outcomes = box.listener.deliver(events(1, 15)).result(PATIENCE)
    if full == "refuse":
        assert outcomes[:10] == [None] * 10
        assert len(outcomes) == 11
        assert isinstance(outcomes[10], BoundReachedError)
        assert box.box.dropped == 0
        assert taken(box.drain(5)) == [1, 2, 3, 4, 5]
        store(box, events(11, 15))
        assert taken(box.drain()) == [*range(6, 16)]
        return
    assert outcomes == [None] * 15
    assert box.box.dropped == 5
    assert len(box) == 10
    assert taken(box.drain()) == ([*range(6, 16)] if full == "drop_oldest" else [*range(1, 11)])


def test_the_sender_of_a_full_mailbox_tries_again(mailbox: EventMailbox) -> None:
    """Scenario 56."""
    box = mailbox.register(100.0, max_events=5)
    with EventGenerator("source", events=[1], begin=0, retry=FAST) as generator:
        generator.register(1, None, box.listener, 100.0)
        generate(generator, 12)
        found: list[int] = []
        eventually(lambda: len(box) == 5)
        while len(found) < 12:
            found += taken(box.drain())
        assert found == [*range(1, 13)]


def test_bounds_of_kinds_are_kept_by_latest(mailbox: EventMailbox) -> None:
    """Scenario 56."""
    box = mailbox.register(100.0, keep="latest", max_events=3, full="drop_oldest")
    store(box, [event(1, each) for each in range(5)])
    store(box, [event(2, each) for each in range(5)])
    assert [each.id for each in box.drain()] == [2, 3, 4]


# --- arguments, life cycle


def test_bad_arguments_are_refused(mailbox: EventMailbox, tmp_path: Path) -> None:
    for options in (
        {"duration": 0}, {"keep": "some"}, {"max_events": 0}, {"max_events": True}, {"full": "explode"},
        {"duration": "x"},
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            mailbox.register(**options)
    assert len(mailbox) == 0
    for options in ({"name": ""}, {"max_bytes": 0}, {"full": "explode"}, {"listeners": 5}):
        with pytest.raises(ArgumentError):
            EventMailbox(tmp_path / "other", **options)


def test_a_closed_mailbox_refuses_everything(mailbox: EventMailbox, box: Box) -> None:
    store(box, [event(1)])
    iterator = box.remote_events()
    assert iterator.next() == event(1)
    mailbox.close()
    mailbox.close()
    for call in (
        mailbox.register, lambda: box.listener.notify(event(1)), box.remote_events, iterator.next, box.drain,
    ):  # fmt: skip
        with pytest.raises(ClosedError):
            call()


def test_leases_are_renewed_for_the_owner(virtual_clock: VirtualClock, mailbox: EventMailbox, box: Box) -> None:
    """EV.3.3: the mailbox can be made responsible for renewing leases while an object is inactive."""
    with (
        Landlord(max_duration=10.0) as landlord,
        EventGenerator("source", events=[1], begin=0, landlord=landlord) as generator,
    ):
        registration = generator.register(1, None, box.listener, 10.0)
        mailbox.renew_lease(box, registration.lease)
        virtual_clock.advance(45.0)
        generator.generate(1)
        eventually(lambda: len(box) == 1)
        box.lease.cancel()
        virtual_clock.advance(11.0)
        assert registration.lease.is_ended


def test_iterating_waits_for_events(box: Box) -> None:
    store(box, events(1, 3))
    found: waiting.Recorder[int] = waiting.Recorder()

    def iterate() -> None:
        for each in box.remote_events():
            found.append(each.sequence_number)
            if len(found) == 5:
                break

    join = in_background(iterate)
    found.wait_for(3)
    eventually(lambda: box.pulling)
    store(box, events(4, 5))
    join()
    assert found == [1, 2, 3, 4, 5]


def test_the_longest_lease_is_a_choice(reopen: OpenMailbox) -> None:
    mailbox = reopen(max_duration=10.0)
    assert mailbox.register(Lease.FOREVER).lease.duration == 10.0

"""Handlers that do not return, or fail too often: they are blocked, the rest goes on (RFC 97 4.1.3, 5.3.2, 8.1.1)."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback

import pytest

from messaging.eventadmin import Event, Tolerance
from messaging.execution import pool
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, eventually_async
from tests.dispatch.helpers import Stubborn
from tests.eventadmin.conftest import (
    DELIVERIES,
    SOON,
    AsyncGate,
    AsyncRecorder,
    Gate,
    Hub,
    Hubs,
    Recorder,
    on,
    own_hub,
)
from tests.threads import in_background

REASON = f"it took more than {SOON:g} s for one event"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the supervisor look often."""
    monkeypatch.setattr(pool, "_LOOK", 0.02)


def until_blocked(hub: Hub, handler: Recorder) -> None:
    eventually(lambda: hub.blocked(handler) == REASON, "the handler is blocked")


def delivers(thread: int) -> bool:
    """Return whether a thread serves an admin now."""
    frame = sys._current_frames().get(thread)
    return frame is not None and any(each.f_code.co_name == "_serve" for each, _ in traceback.walk_stack(frame))


# --- posted events


@table("delivery", DELIVERIES)
@own_hub
def test_delivery_continues_without_a_handler_that_does_not_return(hub: Hub, delivery: str) -> None:
    """Scenarios 37 and 38; RFC 97 4.1.3 [19], 5.3.2: the same event goes on to the next one, on another thread."""
    last = hub.record(ranking=-1)
    gate = hub.gate(1, 2, 3, topics=["a", "b/*"], delivery=delivery, timeout=SOON)
    last.events.wait_for(3)
    assert last.numbers == [1, 2, 3]
    eventually(lambda: hub.logged("is blocked"), "the log says so")
    (text,) = hub.logged("is blocked", level=logging.ERROR)
    reference = repr(gate.registration.reference)
    for part in (hub.admin.name, reference, "Gate.handle_event", "for a, b/*", REASON, "2 events"):
        assert part in text
    found = hub.dto(gate)
    assert (found.blocked, found.dropped, found.waiting) == (REASON, 2, 0)
    gate.leave()
    hub.flush()
    assert gate.numbers == [1]


@table("delivery", DELIVERIES)
@own_hub
def test_blocked_handlers_must_not_be_notified_of_any_events(hub: Hub, delivery: str) -> None:
    """Scenario 38; RFC 97 5.3.2: posted or sent, even when it has returned."""
    other = hub.record()
    gate = hub.gate(1, 2, delivery=delivery, timeout=SOON)
    until_blocked(hub, gate)
    gate.leave()
    hub.post(3)
    hub.send_number(4)
    asyncio.run(hub.admin.asend_event(Event("a", {"n": 5})))
    hub.flush()
    assert gate.numbers == [1]
    assert sorted(other.numbers) == [1, 2, 3, 4, 5]


@table("delivery", DELIVERIES)
@own_hub
def test_an_update_of_its_registration_unblocks_a_handler(hub: Hub, delivery: str) -> None:
    """Scenario 39: it gets the events published from now on, not those that waited when it was blocked."""
    hold = hub.gate(topics="hold", ranking=1)
    gate = hub.gate(1, 2, topics="a", delivery=delivery, timeout=SOON)
    until_blocked(hub, gate)
    hub.post(0, topic="hold")
    hold.wait()  # so that what waited before is passed over after the update
    gate.leave()
    gate.registration.update({"event.topics": "a", "event.delivery": delivery, "event.timeout": SOON})
    assert hub.blocked(gate) is None
    hub.post(3)
    hold.opened.set()
    hub.flush()
    assert gate.numbers == [1, 3]
    assert hub.dto(gate).dropped == 1


def test_events_pending_at_a_block_do_not_come_back(hub: Hub) -> None:
    """Scenario 39: the log has said that it is dropped, so it is, even if the update comes before its turn."""
    hold, slow = hub.gate(topics="hold"), hub.gate(topics="a")
    hub.post(0, topic="hold")
    hold.wait()
    hub.post(1, 2)
    hub.send_number(3, timeout=SOON)
    assert hub.blocked(slow)
    slow.registration.update({"event.topics": "a"})
    hub.post(4)
    slow.opened.set()
    hold.opened.set()
    hub.flush()
    assert slow.numbers == [3, 4]
    assert hub.dto(slow).dropped == 2


def test_without_a_timeout_no_handler_is_blocked_for_its_duration(hubs: Hubs) -> None:
    """Scenario 40."""
    hub = hubs(tolerance=Tolerance(failures=0, timeout=0))
    last = hub.record(ranking=-1)
    unordered, gate = hub.gate(delivery="async.unordered"), hub.gate(1)
    unordered.wait()
    hasty = hub.gate(2, delivery="async.unordered", timeout=SOON)
    until_blocked(hub, hasty)  # the others have their events for longer
    assert [hub.blocked(each) for each in (gate, unordered)] == [None, None]
    assert last.numbers == []
    for each in (gate, unordered, hasty):
        each.opened.set()
    hub.flush()
    assert last.numbers == [1, 2]


def test_a_handler_s_own_timeout_goes_before_that_of_the_admin(hubs: Hubs) -> None:
    """Scenario 40; 0 is for ever."""
    hub = hubs(tolerance=Tolerance(failures=0, timeout=SOON))
    impatient, last = hub.gate(), hub.record(ranking=-1, timeout=0)
    patient = hub.gate(1, timeout=0, ranking=1)
    hasty = hub.gate(2, delivery="async.unordered")
    until_blocked(hub, hasty)
    assert hub.blocked(patient) is None
    patient.opened.set()
    impatient.wait()
    until_blocked(hub, impatient)
    hub.flush()
    assert last.numbers == [1, 2]
    assert hub.blocked(patient) is None
    for each in (impatient, hasty):
        each.opened.set()


@table("delivery", DELIVERIES)
@own_hub
def test_an_updated_timeout_counts_for_the_next_event(hub: Hub, delivery: str) -> None:
    gate = hub.gate(delivery=delivery)
    gate.registration.update({"event.topics": "*", "event.delivery": delivery, "event.timeout": SOON})
    hub.post(1)
    until_blocked(hub, gate)
    gate.opened.set()


def test_several_stall_in_a_row(hub: Hub) -> None:
    """Scenario 37: with one event, and with several; each costs a thread until it returns, and no more."""
    gates: list[Gate] = []
    between: list[Recorder] = []
    for number in range(3):
        between.append(hub.record(ranking=-number))
        gates.append(hub.gate(timeout=SOON, ranking=-number))
    between.append(hub.record(ranking=-3))
    hub.post(*range(10))
    between[-1].events.wait_for(10)
    assert [each.numbers for each in between] == [[*range(10)]] * 4
    assert [each.numbers for each in gates] == [[0]] * 3
    assert all(hub.blocked(each) for each in gates)
    assert hub.admin.get_dto().threads <= 1
    for each in gates:
        each.opened.set()
    hub.flush()


def test_a_thread_that_was_given_up_delivers_nothing_more(hub: Hub) -> None:
    """Scenario 37; RFC 97 4.1.2 [15]: what returns later does not run beside the one that took its place."""
    slow, last = hub.gate(topics="b", timeout=0), hub.record("b")
    stuck = hub.gate(1, topics="a", timeout=SOON)
    hub.post(2, 3, topic="b")
    slow.wait()
    stuck.leave()
    eventually(lambda: not delivers(stuck.threads[0]), "the thread is through")
    assert (slow.numbers, last.numbers) == ([2], [])
    slow.opened.set()
    hub.flush()
    assert (stuck.numbers, slow.numbers, last.numbers) == ([1], [2, 3], [2, 3])
    assert stuck.threads[0] not in last.threads


@table("before, after", [DELIVERIES, DELIVERIES[::-1]])
@own_hub
def test_a_handler_may_stall_in_its_lane_from_before_a_change_of_order(hub: Hub, before: str, after: str) -> None:
    """Scenarios 35 and 37: what waits there is dropped, and counted; flushing does not wait for it."""
    other = hub.record()
    gate = hub.gate(1, 2, topics="a", delivery=before, timeout=SOON)
    gate.registration.update({"event.topics": "a", "event.delivery": after, "event.timeout": SOON})
    until_blocked(hub, gate)
    hub.deliver(3)
    assert other.numbers == [1, 2, 3]
    gate.leave()
    hub.flush()
    assert gate.numbers == [1]
    assert hub.dto(gate).dropped == 1


def test_a_factory_that_stalls_is_no_better(hub: Hub) -> None:
    gate = Gate()

    def factory() -> Recorder:
        gate.handle_event(Event("made"))
        return Recorder()

    registration = hub.handle(factory, scope="prototype", timeout=SOON)
    other = hub.record(ranking=-1)
    hub.post(1)
    gate.wait()
    eventually(lambda: hub.blocked(registration) == REASON, "the handler is blocked")
    hub.deliver(2)
    assert other.numbers == [1, 2]
    gate.leave()


# --- coroutine functions


@table("delivery", DELIVERIES)
@own_hub
def test_a_coroutine_that_stalls_is_cancelled(hub: Hub, loop: asyncio.AbstractEventLoop, delivery: str) -> None:
    """Scenario 37: unlike a function it can be, and then it costs no thread either."""
    gate, other = AsyncGate(), hub.record(ranking=-1)
    on(loop, lambda: hub.handle(gate, delivery=delivery, timeout=SOON))
    hub.post(1, 2)
    until_blocked(hub, gate)
    gate.cancelled.wait_for(1)
    hub.flush()
    assert (gate.numbers, other.numbers) == ([1], [1, 2])


# --- sent events


def test_the_timeout_releases_the_sender(hubs: Hubs) -> None:
    """Scenarios 26 and 37: and the other handlers get the event."""
    hub = hubs(send_timeout=SOON)
    gates, last = [hub.gate(), hub.gate()], hub.record(ranking=-1)
    hub.send_number(1)
    hub.send_number(2)
    assert [each.numbers for each in gates] == [[1], [1]]
    assert last.numbers == [1, 2]
    assert [hub.blocked(each) for each in gates] == [REASON] * 2
    eventually(lambda: len(hub.logged("is blocked", level=logging.ERROR)) == 2, "it is logged")
    for each in gates:
        each.leave()


def test_a_handler_s_own_timeout_counts_when_events_are_sent(hubs: Hubs) -> None:
    """If there is one at all: a handler's 0 leaves the timeout of the sender."""
    hub = hubs(send_timeout=PATIENCE)
    gate, last = hub.gate(topics="a", timeout=SOON), hub.record(ranking=-1)
    hub.send_number(1)
    assert hub.blocked(gate) == REASON
    gate.registration.update({"event.topics": "a", "event.timeout": 0})
    hub.send_number(2, timeout=SOON)
    assert hub.blocked(gate) == REASON
    gate.registration.update({"event.topics": "a", "event.timeout": SOON})
    join = in_background(lambda: hub.send_number(3, timeout=0))
    gate.events.wait_for(3)
    hasty = hub.gate(topics="hasty", timeout=SOON)
    hub.send_number(0, "hasty", timeout=PATIENCE)
    assert hub.blocked(hasty) == REASON
    assert hub.blocked(gate) is None  # though it has its event for longer
    gate.opened.set()
    hasty.opened.set()
    join()
    assert last.numbers == [1, 2, 0, 3]


def test_coroutines_that_stall_when_sent_are_cancelled(hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
    gate, last = AsyncGate(), hub.record(ranking=-1)
    on(loop, lambda: hub.handle(gate))
    hub.send_number(1, timeout=SOON)
    assert hub.blocked(gate) == REASON
    gate.cancelled.wait_for(1)
    gate.registration.update({"event.topics": "*"})
    asyncio.run(hub.admin.asend_event(Event("a", {"n": 2}), timeout=SOON))
    assert hub.blocked(gate) == REASON
    assert last.numbers == [1, 2]
    assert gate.numbers in ([1, 2], [1])  # on a busy machine the second one is cancelled before it begins


def test_asend_gives_up_on_coroutines_of_its_own_loop(hub: Hub) -> None:
    """Scenario 37: whether they let themselves be cancelled or not."""
    gate, last, stubborn = AsyncGate(), AsyncRecorder(), Stubborn()

    async def main() -> None:
        registrations = [hub.handle(gate), hub.handle(stubborn)]
        hub.handle(last, ranking=-1)
        await hub.admin.asend_event(Event("a", {"n": 1}), timeout=SOON)
        assert len(gate.cancelled) == 1
        assert [hub.blocked(each) for each in registrations] == [REASON] * 2
        assert last.numbers == [1]
        stubborn.open()
        await eventually_async(lambda: stubborn.ended)

    asyncio.run(main())


def test_asend_gives_up_on_functions_on_other_threads(hub: Hub) -> None:
    gate, last = hub.gate(), hub.record(ranking=-1)
    asyncio.run(hub.admin.asend_event(Event("a", {"n": 1}), timeout=SOON))
    assert hub.blocked(gate) == REASON
    assert last.numbers == [1]
    gate.leave()


def test_time_spent_in_nested_sending_counts_for_the_outer_handler(hub: Hub) -> None:
    """Unless there is a timeout for what it sends: then the other one is to blame."""
    inner = hub.gate(topics="b")
    outer = hub.handle(lambda event: hub.admin.send_event(Event("b")), "a", timeout=SOON)
    last = hub.record("a")
    hub.post(1)
    last.events.wait_for(1)
    assert (hub.blocked(outer), hub.blocked(inner)) == (REASON, None)
    inner.leave()
    inner.opened.clear()
    patient = hub.handle(lambda event: hub.admin.send_event(Event("b"), timeout=SOON), "c")
    hub.deliver(2, topic="c")
    assert (hub.blocked(patient), hub.blocked(inner)) == (None, REASON)
    inner.opened.set()


# --- handlers that fail


def test_no_number_of_exceptions_blocks_a_handler_unless_the_admin_is_told_so(hubs: Hubs) -> None:
    """RFC 97 5.3.1 and 5.3.2: exceptions are one thing, not returning is another."""
    lax, strict = hubs(name="lax"), hubs(name="strict", tolerance=Tolerance(failures=3))
    failing = lax.failing(ValueError("boom"))
    lax.deliver(*range(20))
    assert lax.blocked(failing) is None
    strict.deliver(0, 1)
    failing.error = None
    strict.send_number(2)
    failing.error = ValueError("boom")
    strict.deliver(3, 4)
    assert strict.blocked(failing) is None
    strict.deliver(5, 6, 7)
    assert strict.blocked(failing) == "it failed on 3 events in a row"
    assert failing.numbers[20:] == [0, 1, 2, 3, 4, 5]
    assert strict.dto(failing).failures == 5
    assert len(lax.logged("is blocked: it failed on 3 events in a row")) == 1
    failing.registration.update({"event.topics": "*"})
    strict.deliver(8)
    assert failing.numbers[-1] == 8
    assert strict.blocked(failing) is None

"""Handlers that do not return, or fail too often: they are blocked, the rest goes on (RFC 97 4.1.3, 5.3.2, 8.1.1)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time

import pytest

from messaging.eventadmin import Event, Tolerance
from messaging.execution import pool
from tests.eventadmin.conftest import (
    PATIENCE,
    SOON,
    AsyncGate,
    AsyncRecorder,
    Failing,
    Gate,
    Hub,
    Hubs,
    Recorder,
    eventually,
    on,
)
from tests.threads import in_background

REASON = f"it took more than {SOON:g} s for one event"
DELIVERIES = ["async.ordered", "async.unordered"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the supervisor look often."""
    monkeypatch.setattr(pool, "_LOOK", 0.02)


# --- posted events


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_delivery_continues_without_a_handler_that_does_not_return(hub: Hub, delivery: str) -> None:
    """Scenarios 37 and 38; RFC 97 4.1.3 [19], 5.3.2: the same event goes on to the next one, on another thread."""
    gate, last = Gate(), hub.record(ranking=-1)
    registration = hub.handle(gate, ["a", "b/*"], delivery=delivery, timeout=SOON)
    hub.post(1, 2, 3)
    gate.wait()
    eventually(lambda: last.numbers == [1, 2, 3], "the others get theirs")
    eventually(lambda: hub.logged("is blocked"), "the log says so")
    (text,) = hub.logged("is blocked", level=logging.ERROR)
    for part in (hub.admin.name, repr(registration.reference), "Gate.handle_event", "for a, b/*", REASON, "2 events"):
        assert part in text
    found = hub.dto(registration)
    assert found is not None
    assert (found.blocked, found.dropped, found.waiting) == (REASON, 2, 0)
    gate.leave()
    hub.flush()
    assert gate.numbers == [1]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_blocked_handlers_must_not_be_notified_of_any_events(hub: Hub, delivery: str) -> None:
    """Scenario 38; RFC 97 5.3.2: posted or sent, even when it has returned."""
    gate, other = Gate(), hub.record()
    registration = hub.handle(gate, delivery=delivery, timeout=SOON)
    hub.post(1, 2)
    gate.wait()
    eventually(lambda: hub.blocked(registration), "blocked")
    gate.leave()
    hub.post(3)
    hub.admin.send_event(Event("a", {"n": 4}))
    asyncio.run(hub.admin.asend_event(Event("a", {"n": 5})))
    hub.flush()
    assert gate.numbers == [1]
    assert sorted(other.numbers) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_an_update_of_its_registration_unblocks_a_handler(hub: Hub, delivery: str) -> None:
    """Scenario 39: it gets the events published from now on, not those that waited when it was blocked."""
    hold, gate = Gate(), Gate()
    hub.handle(hold, "hold", ranking=1)
    registration = hub.handle(gate, "a", delivery=delivery, timeout=SOON)
    hub.post(1, 2)
    gate.wait()
    eventually(lambda: hub.blocked(registration), "blocked")
    hub.post(0, topic="hold")
    hold.wait()  # so that what waited before is passed over after the update
    gate.leave()
    registration.update({"event.topics": "a", "event.delivery": delivery, "event.timeout": SOON})
    assert hub.blocked(registration) is None
    hub.post(3)
    hold.opened.set()
    hub.flush()
    assert gate.numbers == [1, 3]
    assert hub.dto(registration).dropped == 1  # type: ignore[union-attr]


def test_events_pending_at_a_block_do_not_come_back(hub: Hub) -> None:
    """Scenario 39: the log has said that it is dropped, so it is, even if the update comes before its turn."""
    slow, hold = Gate(), Gate()
    hub.handle(hold, "hold")
    registration = hub.handle(slow, "a")
    hub.post(0, topic="hold")
    hold.wait()
    hub.post(1, 2)
    hub.admin.send_event(Event("a", {"n": 3}), timeout=SOON)
    assert hub.blocked(registration)
    registration.update({"event.topics": "a"})
    hub.post(4)
    slow.opened.set()
    hold.opened.set()
    hub.flush()
    assert slow.numbers == [3, 4]
    assert hub.dto(registration).dropped == 2  # type: ignore[union-attr]


def test_without_a_timeout_no_handler_is_blocked_for_its_duration(hubs: Hubs) -> None:
    """Scenario 40."""
    hub = hubs(tolerance=Tolerance(failures=0, timeout=0))
    gate, unordered, last = Gate(), Gate(), hub.record(ranking=-1)
    mine = [hub.handle(gate), hub.handle(unordered, delivery="async.unordered")]
    hub.post(1)
    gate.wait()
    unordered.wait()
    threading.Event().wait(SOON + 0.1)
    assert [hub.blocked(each) for each in mine] == [None, None]
    assert last.numbers == []
    gate.opened.set()
    unordered.opened.set()
    hub.flush()
    assert last.numbers == [1]


def test_a_handler_s_own_timeout_goes_before_that_of_the_admin(hubs: Hubs) -> None:
    """Scenario 40; 0 is for ever."""
    hub = hubs(tolerance=Tolerance(failures=0, timeout=SOON))
    patient, impatient, last = Gate(), Gate(), hub.record(ranking=-1, timeout=0)
    mine, other = hub.handle(patient, timeout=0, ranking=1), hub.handle(impatient)
    hub.post(1)
    patient.wait()
    threading.Event().wait(SOON + 0.1)
    assert hub.blocked(mine) is None
    patient.opened.set()
    impatient.wait()
    eventually(lambda: hub.blocked(other) == REASON, "blocked")
    hub.flush()
    assert last.numbers == [1]
    assert hub.blocked(mine) is None
    impatient.opened.set()


def test_an_updated_timeout_counts_for_the_next_event(hub: Hub) -> None:
    for delivery in DELIVERIES:
        gate = Gate()
        registration = hub.handle(gate, delivery=delivery)
        registration.update({"event.topics": "*", "event.delivery": delivery, "event.timeout": SOON})
        hub.post(1)
        gate.wait()
        eventually(lambda r=registration: hub.blocked(r) == REASON, "blocked")  # type: ignore[misc]
        gate.opened.set()
        registration.unregister()


def test_several_stall_in_a_row(hub: Hub) -> None:
    """Scenario 37: with one event, and with several; each costs a thread until it returns, and no more."""
    gates = [Gate() for _ in range(3)]
    between = [Recorder() for _ in range(4)]
    registrations = []
    for number, each in enumerate(between):
        hub.handle(each, ranking=-number)
        if number < 3:
            registrations.append(hub.handle(gates[number], timeout=SOON, ranking=-number))
    hub.post(*range(10))
    eventually(lambda: between[-1].numbers == [*range(10)], "all are through")
    assert [each.numbers for each in between] == [[*range(10)]] * 4
    assert [each.numbers for each in gates] == [[0]] * 3
    assert all(hub.blocked(each) for each in registrations)
    assert hub.admin.get_dto().threads <= 1
    for each in gates:
        each.opened.set()
    hub.flush()


def test_a_thread_that_was_given_up_delivers_nothing_more(hub: Hub) -> None:
    """Scenario 37; RFC 97 4.1.2 [15]: what returns later does not run beside the one that took its place."""
    stuck, slow = Gate(), Gate()
    hub.handle(stuck, "a", timeout=SOON)
    hub.handle(slow, "b", timeout=0)
    last = hub.record("b")
    hub.post(1)
    stuck.wait()
    hub.post(2, 3, topic="b")
    slow.wait()
    stuck.leave()  # on the thread that was given up
    threading.Event().wait(0.05)
    assert (slow.numbers, last.numbers) == ([2], [])
    slow.opened.set()
    hub.flush()
    assert (stuck.numbers, slow.numbers, last.numbers) == ([1], [2, 3], [2, 3])
    assert stuck.threads[0] not in last.threads


@pytest.mark.parametrize("after", ["async.ordered", "async.unordered"])
def test_a_handler_may_stall_in_its_lane_from_before_a_change_of_order(hub: Hub, after: str) -> None:
    """Scenarios 35 and 37: what waits there is dropped, and counted; flushing does not wait for it."""
    before = ({*DELIVERIES} - {after}).pop()
    gate, other = Gate(), hub.record()
    registration = hub.handle(gate, "a", delivery=before, timeout=SOON)
    hub.post(1, 2)
    gate.wait()
    registration.update({"event.topics": "a", "event.delivery": after, "event.timeout": SOON})
    eventually(lambda: hub.blocked(registration), "blocked")
    hub.post(3)
    hub.flush()
    assert other.numbers == [1, 2, 3]
    gate.leave()
    hub.flush()
    assert gate.numbers == [1]
    assert hub.dto(registration).dropped == 1  # type: ignore[union-attr]


def test_a_factory_that_stalls_is_no_better(hub: Hub) -> None:
    entered, leave = threading.Event(), threading.Event()
    made = Recorder()

    def factory() -> Recorder:
        entered.set()
        assert leave.wait(PATIENCE)
        return made

    registration = hub.handle(factory, scope="prototype", timeout=SOON)
    other = hub.record(ranking=-1)
    hub.post(1)
    assert entered.wait(PATIENCE)
    eventually(lambda: hub.blocked(registration), "blocked")
    hub.post(2)
    hub.flush()
    assert other.numbers == [1, 2]
    leave.set()


# --- coroutine functions


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_coroutine_that_stalls_is_cancelled(hub: Hub, loop: asyncio.AbstractEventLoop, delivery: str) -> None:
    """Scenario 37: unlike a function it can be, and then it costs no thread either."""
    gate, other = AsyncGate(), hub.record(ranking=-1)
    registration = on(loop, lambda: hub.handle(gate, delivery=delivery, timeout=SOON))
    hub.post(1, 2)
    gate.wait()
    eventually(lambda: hub.blocked(registration) == REASON, "blocked")
    assert gate.cancelled.wait(PATIENCE)
    hub.flush()
    assert (gate.numbers, other.numbers) == ([1], [1, 2])


@pytest.mark.parametrize("how", ["resists cancellation", "blocks its loop"])
def test_a_coroutine_that_cannot_be_cancelled_delays_no_other_handler(
    hub: Hub, loop: asyncio.AbstractEventLoop, how: str
) -> None:
    release, ended = threading.Event(), threading.Event()

    async def handler(event: Event) -> None:
        if how == "blocks its loop":
            release.wait(PATIENCE)
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        ended.set()

    registration = on(loop, lambda: hub.handle(handler, timeout=SOON))
    other = hub.record(ranking=-1)
    hub.post(1, 2)
    eventually(lambda: other.numbers == [1, 2], "the other one has them")
    assert hub.blocked(registration) == REASON
    release.set()
    assert ended.wait(PATIENCE)


def test_a_handler_within_its_time_limit_is_not_stalled(hub: Hub) -> None:
    """Each event has the time to itself."""

    def slow(event: Event) -> None:
        time.sleep(SOON / 4)

    async def slow_coroutine(event: Event) -> None:
        await asyncio.sleep(SOON / 4)

    registrations = [hub.handle(each, timeout=1) for each in (slow, slow_coroutine)]
    hub.post(*range(10))
    hub.flush()
    assert [hub.blocked(each) for each in registrations] == [None, None]


# --- sent events


def test_the_timeout_releases_the_sender(hubs: Hubs) -> None:
    """Scenarios 26 and 37: and the other handlers get the event."""
    hub = hubs(send_timeout=SOON)
    gates, last = [Gate(), Gate()], hub.record(ranking=-1)
    registrations = [hub.handle(each) for each in gates]
    hub.admin.send_event(Event("a", {"n": 1}))
    hub.admin.send_event(Event("a", {"n": 2}))
    assert [each.numbers for each in gates] == [[1], [1]]
    assert last.numbers == [1, 2]
    assert [hub.blocked(each) for each in registrations] == [REASON] * 2
    eventually(lambda: len(hub.logged("is blocked", level=logging.ERROR)) == 2, "it is logged")
    for each in gates:
        each.leave()


def test_a_handler_s_own_timeout_counts_when_events_are_sent(hubs: Hubs) -> None:
    """If there is one at all: a handler's 0 leaves the timeout of the sender."""
    hub = hubs(send_timeout=PATIENCE)
    gate, last = Gate(), hub.record(ranking=-1)
    registration = hub.handle(gate, timeout=SOON)
    hub.admin.send_event(Event("a", {"n": 1}))
    assert hub.blocked(registration) == REASON
    registration.update({"event.topics": "*", "event.timeout": 0})
    hub.admin.send_event(Event("a", {"n": 2}), timeout=SOON)
    assert hub.blocked(registration) == REASON
    registration.update({"event.topics": "*", "event.timeout": SOON})
    join = in_background(lambda: hub.admin.send_event(Event("a", {"n": 3}), timeout=0))
    for _ in range(3):
        gate.wait()
    threading.Event().wait(SOON + 0.1)
    assert hub.blocked(registration) is None
    gate.opened.set()
    join()
    assert last.numbers == [1, 2, 3]


def test_coroutines_that_stall_when_sent_are_cancelled(hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
    gate, last = AsyncGate(), hub.record(ranking=-1)
    registration = on(loop, lambda: hub.handle(gate))
    hub.admin.send_event(Event("a", {"n": 1}), timeout=SOON)
    assert hub.blocked(registration) == REASON
    assert gate.cancelled.wait(PATIENCE)
    registration.update({"event.topics": "*"})
    asyncio.run(hub.admin.asend_event(Event("a", {"n": 2}), timeout=SOON))
    assert hub.blocked(registration) == REASON
    assert last.numbers == [1, 2]
    assert gate.numbers in ([1, 2], [1])  # on a busy machine the second one is cancelled before it begins


def test_asend_gives_up_on_coroutines_of_its_own_loop(hub: Hub) -> None:
    """Scenario 37: whether they let themselves be cancelled or not."""
    gate, last = AsyncGate(), AsyncRecorder()

    async def main() -> None:
        release = asyncio.Event()

        async def stubborn(event: Event) -> None:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        registrations = [hub.handle(gate), hub.handle(stubborn)]
        hub.handle(last, ranking=-1)
        await hub.admin.asend_event(Event("a", {"n": 1}), timeout=SOON)
        assert gate.cancelled.is_set()
        assert [hub.blocked(each) for each in registrations] == [REASON] * 2
        assert last.numbers == [1]
        release.set()
        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_asend_gives_up_on_functions_on_other_threads(hub: Hub) -> None:
    gate, last = Gate(), hub.record(ranking=-1)
    registration = hub.handle(gate)
    asyncio.run(hub.admin.asend_event(Event("a", {"n": 1}), timeout=SOON))
    assert hub.blocked(registration) == REASON
    assert last.numbers == [1]
    gate.leave()


def test_time_spent_in_nested_sending_counts_for_the_outer_handler(hub: Hub) -> None:
    """Unless there is a timeout for what it sends: then the other one is to blame."""
    gate = Gate()
    inner = hub.handle(gate, "b")
    outer = hub.handle(lambda event: hub.admin.send_event(Event("b")), "a", timeout=SOON)
    last = hub.record("a")
    hub.post(1)
    eventually(lambda: last.numbers == [1], "the next one has it")
    assert (hub.blocked(outer), hub.blocked(inner)) == (REASON, None)
    gate.leave()
    gate.opened.clear()
    patient = hub.handle(lambda event: hub.admin.send_event(Event("b"), timeout=SOON), "c")
    hub.post(2, topic="c")
    hub.flush()
    assert (hub.blocked(patient), hub.blocked(inner)) == (None, REASON)
    gate.opened.set()


# --- handlers that fail


def test_no_number_of_exceptions_blocks_a_handler_unless_the_admin_is_told_so(hubs: Hubs) -> None:
    """RFC 97 5.3.1 and 5.3.2: exceptions are one thing, not returning is another."""
    lax, strict = hubs(name="lax"), hubs(name="strict", tolerance=Tolerance(failures=3))
    failing = Failing(ValueError("boom"))
    registration = lax.handle(failing)
    for number in range(20):
        lax.post(number)
    lax.flush()
    assert lax.blocked(registration) is None
    strict.post(0, 1)
    strict.flush()
    failing.error = None
    strict.admin.send_event(Event("a", {"n": 2}))
    failing.error = ValueError("boom")
    strict.post(3, 4)
    strict.flush()
    assert strict.blocked(registration) is None
    strict.post(5, 6, 7)
    strict.flush()
    assert strict.blocked(registration) == "it failed on 3 events in a row"
    assert failing.numbers[20:] == [0, 1, 2, 3, 4, 5]
    assert strict.dto(registration).failures == 5  # type: ignore[union-attr]
    assert len(lax.logged("is blocked: it failed on 3 events in a row")) == 1
    registration.update({"event.topics": "*"})
    strict.post(8)
    strict.flush()
    assert failing.numbers[-1] == 8
    assert strict.blocked(registration) is None

"""Asynchronous delivery: its time, order, receivers and limits (RFC 97 5.2.2, 5.2.3, 8.1.2)."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from messaging.errors import DeadlineError
from messaging.eventadmin import Event, EventHandler
from messaging.execution import lanes
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.dispatch.helpers import meanwhile
from tests.eventadmin.conftest import (
    DELIVERIES,
    MOMENT,
    Gate,
    Hub,
    Hubs,
    Recorder,
    handle,
    on,
    own_hub,
)
from tests.threads import in_background, in_threads

# --- when


def test_posting_returns_before_delivery_is_complete(hub: Hub) -> None:
    """Scenario 27; RFC 97 4.1.2 [8], 5.2.2, 6.4.1."""
    gate = hub.gate(1)
    assert gate.returned == []
    gate.leave()


def test_posted_events_are_delivered_on_a_different_thread(hub: Hub) -> None:
    """RFC 97 5.2.2; also events that a handler posts, after it has returned."""
    order: waiting.Recorder[Any] = waiting.Recorder()
    threads: set[int] = set()

    def handler(event: Event) -> None:
        threads.add(threading.get_ident())
        order.append(event.get_property("n"))
        if event.get_property("n") == 1:
            hub.post(2)
            order.append("returned")

    hub.handle(handler)
    hub.deliver(1)
    assert order.wait_for(3) == [1, "returned", 2]
    assert threading.get_ident() not in threads


def test_flushing_waits_for_earlier_posted_events(hub: Hub) -> None:
    unordered = hub.gate(delivery="async.unordered")
    assert hub.admin.flush().done()
    gate = hub.gate(1)
    unordered.wait()
    promise = hub.admin.flush()
    gate.opened.set()
    with pytest.raises(DeadlineError):
        promise.result(MOMENT)
    unordered.opened.set()
    promise.result(PATIENCE)


# --- order


def test_events_of_one_thread_must_be_delivered_in_their_order(hub: Hub) -> None:
    """Scenario 28; RFC 97 5.2.2, 5.2.3: whatever their topics."""
    all_of_them, some = hub.record(), hub.record(["even/*"])
    for number in range(1000):
        hub.post(number, topic="odd/x" if number % 2 else f"even/t{number % 7}")
    hub.flush()
    assert all_of_them.numbers == list(range(1000))
    assert some.numbers == list(range(0, 1000, 2))


def test_all_handlers_must_have_returned_from_one_event_before_any_gets_the_next(hub: Hub) -> None:
    """Scenario 29; RFC 97 4.1.2 [15]: also of events that different threads posted, and whatever handlers are."""
    steps: list[tuple[Any, str]] = []

    def handler(event: Event) -> None:
        steps.append((event.get_property("n"), "begin"))
        os.sched_yield()
        steps.append((event.get_property("n"), "end"))

    async def async_handler(event: Event) -> None:
        steps.append((event.get_property("n"), "begin"))
        await asyncio.sleep(0)
        steps.append((event.get_property("n"), "end"))

    for each in (handler, handler, async_handler, handler):
        hub.handle(each, ["a", "b"])

    def run(thread: int) -> None:
        for each in range(25):
            hub.post((thread, each), topic="ab"[each % 2])

    in_threads(4, run)
    hub.flush()
    events = [number for number, _ in itertools.groupby(steps, key=lambda each: each[0])]
    assert len(events) == len(set(events)) == 100
    assert [what for _, what in steps] == ["begin", "end"] * 400


def test_a_handler_sees_events_in_order_however_many_threads_deliver(hubs: Hubs) -> None:
    """Scenario 33; RFC 97 5.2.2. Those without order, which need threads, are no hindrance."""
    hub = hubs(threads=8)
    gates = [hub.gate(delivery="async.unordered") for _ in range(4)]
    recorders = [hub.record() for _ in range(3)]
    hub.post(*range(300))
    for each in gates:
        each.wait()
    for recorder in recorders:
        recorder.events.wait_for(300)
        assert recorder.numbers == [*range(300)]
    for each in gates:
        each.opened.set()
    hub.flush()
    assert [len(each.events) for each in gates] == [300] * 4


@table("delivery", DELIVERIES)
@own_hub
def test_ten_threads_post_a_thousand_events_each(hub: Hub, delivery: str) -> None:
    """Scenario 34: all arrive, and those of each thread in order."""
    recorders = [hub.record(delivery=delivery), hub.record("t3/*", delivery=delivery)]

    def run(thread: int) -> None:
        for number in range(1000):
            hub.post((thread, number), topic=f"t{thread}/x")

    in_threads(10, run)
    hub.flush()
    assert [len(each.events) for each in recorders] == [10_000, 1000]
    for thread in range(10):
        assert [each for each in recorders[0].numbers if each[0] == thread] == [(thread, n) for n in range(1000)]
    assert recorders[1].numbers == [(3, number) for number in range(1000)]


def test_order_may_be_dropped_for_one_handler_only(hub: Hub) -> None:
    """Scenario 35: it does not wait for others, nor they for it."""
    gate = hub.gate(topics="gated", ranking=5)
    unordered_gate = hub.gate(topics="gated/unordered", delivery=["async.unordered"])
    unordered, ordered = hub.record(delivery="async.unordered"), hub.record()
    hub.post(1, topic="gated")
    gate.wait()
    hub.post(2, topic="gated/unordered")
    unordered_gate.wait()
    unordered.events.wait_for(2)
    assert (unordered.numbers, ordered.numbers) == ([1, 2], [])
    gate.opened.set()
    ordered.events.wait_for(2)
    assert ordered.numbers == [1, 2]
    unordered_gate.opened.set()


@table(
    "delivery, is_ordered",
    [
        *((each, True) for each in (None, [], "async.ordered", ["async.unordered", "async.ordered"])),
        *((each, False) for each in ({"async.unordered"}, ("async.unordered",))),
    ],
)
@own_hub
def test_order_wins_if_both_are_given(hub: Hub, delivery: Any, is_ordered: bool) -> None:
    """Scenario 35."""
    recorder = hub.record(delivery=delivery)
    gate = hub.gate(1, ranking=1)
    if is_ordered:
        assert recorder.numbers == []
        gate.opened.set()
    recorder.events.wait_for(1)
    gate.opened.set()


# --- who: the snapshot


def test_handlers_registered_after_the_post_must_not_get_the_event(hub: Hub) -> None:
    """Scenario 30; RFC 97 4.1.2 [11], 5.2.2."""
    gate = hub.gate(1, 2)
    late, late_unordered = hub.record(), hub.record(delivery="async.unordered")
    hub.post(3)
    gate.opened.set()
    hub.flush()
    assert gate.numbers == [1, 2, 3]
    assert late.numbers == late_unordered.numbers == [3]


@table("delivery", DELIVERIES)
@own_hub
def test_handlers_unregistered_before_their_turn_must_not_be_called(hub: Hub, delivery: str) -> None:
    """Scenario 31; RFC 97 4.1.2 [12], 5.2.2."""
    other = hub.record()
    gate = hub.gate(1, 2, delivery=delivery, ranking=1)
    for each in (gate, other):
        each.registration.unregister()
    gate.opened.set()
    hub.flush()
    assert (gate.numbers, other.numbers) == ([1], [])


def test_unregistered_handlers_are_not_called(hub: Hub) -> None:
    """Scenario 31: and not what it has told about it, which may take its time."""
    recorder = hub.record()
    # told of updates while another listener is, the registry tells of the unregistration when that is done
    listener = Gate()
    gate = hub.gate(1, ranking=1)
    with hub.services.add_listener(lambda _: listener.handle_event(Event("told")), EventHandler):
        join = in_background(lambda: recorder.registration.update({"event.topics": "*", "x": 1}))
        listener.wait()
        assert recorder.registration.unregister()  # returns before any listener is called
        gate.opened.set()
        hub.flush()
        hub.admin.send_event(Event("a"))
        listener.opened.set()
        join()
    assert recorder.numbers == []


def test_the_filter_is_applied_when_the_event_is_posted(hub: Hub) -> None:
    """Scenario 32: unspecified; this is how it is here. The same goes for topics and order."""
    recorder, other = hub.record(filter="(n<=2)"), hub.record("a", filter="(n>=3)")
    gate = hub.gate(1, 2, 3, ranking=1)
    recorder.registration.update({"event.topics": "b", "event.filter": "(n=0)"})
    other.registration.update({"event.topics": "*"})
    hub.post(4)
    gate.opened.set()
    hub.flush()
    assert recorder.numbers == [1, 2]
    assert other.numbers == [3, 4]


def test_pending_events_are_delivered_after_the_order_was_changed(hub: Hub) -> None:
    """Scenario 35: it may change its mind, and back; nothing is lost, or delivered twice."""
    gate = hub.gate(1, 2, delivery="async.ordered")
    for delivery, numbers in (("async.unordered", (3, 4)), ("async.ordered", (5, 6)), ("async.unordered", (7, 8))):
        gate.registration.update({"event.topics": "*", "event.delivery": delivery})
        hub.post(*numbers)
    assert hub.admin.get_dto().waiting >= 5
    promise = hub.admin.flush()
    with pytest.raises(DeadlineError):
        promise.result(MOMENT)
    gate.opened.set()
    promise.result(PATIENCE)
    assert sorted(gate.numbers) == [*range(1, 9)]
    assert [each for each in gate.numbers if each in (1, 2, 5, 6)] == [1, 2, 5, 6]
    assert hub.admin.get_dto().waiting == 0


def test_handlers_change_their_mind_about_order_while_events_are_posted(hub: Hub) -> None:
    """Scenario 35: each event is delivered in one of the two orders."""
    recorder = hub.record()

    def change(delivery: str) -> None:
        recorder.registration.update({"event.topics": "*", "event.delivery": delivery})

    with meanwhile(change, DELIVERIES):
        in_threads(3, lambda thread: hub.post(*((thread, each) for each in range(500))))
    hub.flush()
    assert sorted(recorder.numbers) == [(thread, each) for thread in range(3) for each in range(500)]


@table("delivery", DELIVERIES)
@own_hub
def test_events_are_posted_while_handlers_come_and_go(hub: Hub, delivery: str) -> None:
    """Scenarios 30, 31 and 34: a handler that stays gets all; one that comes and goes gets a part, without a gap."""
    stays = hub.record(delivery=delivery)
    visitors: list[Recorder] = []

    def come_and_go(_: int) -> None:
        visitors.append(hub.record(delivery=delivery))
        visitors[-1].registration.unregister()

    with meanwhile(come_and_go, [0]):
        in_threads(2, lambda thread: hub.post(*((thread, each) for each in range(700))))
    hub.flush()
    assert len(stays.events) == 1400
    for each in visitors:
        for thread in range(2):
            numbers = [number for by, number in each.numbers if by == thread]
            assert numbers == [*range(numbers[0], numbers[0] + len(numbers))] if numbers else True


# --- handlers of all kinds


class Appending:
    """Appends events to ``events``, with methods of all kinds."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def with_prefix(self, prefix: str, event: Event) -> None:
        assert prefix == "p"
        self(event)

    async def later(self, event: Event) -> None:
        await asyncio.sleep(0)
        self(event)

    def awaitable(self, event: Event) -> Any:
        return self.later(event)


class AsyncCallable:
    def __init__(self, to: Appending) -> None:
        self._to = to

    async def __call__(self, event: Event) -> None:
        await self._to.later(event)


KINDS: dict[str, Callable[[Appending], Any]] = {
    "handle_event": lambda to: SimpleNamespace(handle_event=to),
    "async handle_event": lambda to: SimpleNamespace(handle_event=to.later),
    "function": lambda to: lambda event: to(event),
    "bound method": lambda to: to.__call__,
    "object": lambda to: to,
    "partial": lambda to: functools.partial(to.with_prefix, "p"),
    "coroutine method": lambda to: to.later,
    "coroutine partial": lambda to: functools.partial(Appending.later, to),
    "coroutine object": AsyncCallable,
    "function that returns an awaitable": lambda to: to.awaitable,
    "lambda that returns an awaitable": lambda to: lambda event: to.later(event),
}


@table("publish", ["post", "send", "asend"])
@table("where", ["on a loop", "without a loop"])
@table("kind", KINDS.values(), ids=KINDS)
@own_hub
def test_handlers_may_be_anything_that_can_be_called(
    hub: Hub, loop: asyncio.AbstractEventLoop, kind: Callable[[Appending], Any], where: str, publish: str
) -> None:
    """RFC 97 4.1.1 [2]: programming them is simple. They are called with one event after the other."""
    target = Appending()
    register = functools.partial(handle, hub.services, kind(target))
    if where == "on a loop":
        on(loop, register)
    else:
        register()
    events = [Event("a", {"n": number}) for number in range(5)]
    for event in events:
        if publish == "post":
            hub.admin.post_event(event)
        elif publish == "send":
            hub.admin.send_event(event)
        else:
            asyncio.run_coroutine_threadsafe(hub.admin.asend_event(event), loop).result(PATIENCE)
    hub.flush()
    assert target.events == events


def generator(event: Event) -> Iterator[Event]:
    yield event


async def async_generator(event: Event) -> Any:
    yield event


class HandlesNothing:
    handle_event = None


class HasTrouble:
    @property
    def handle_event(self) -> Any:
        raise RuntimeError("boom")


@table("service", [5, "handler", object(), HandlesNothing(), HasTrouble(), generator, async_generator])
@own_hub
def test_a_service_that_is_no_handler_is_ignored(hub: Hub, service: Any) -> None:
    """Found out when it is registered, not with the first event."""
    registration = hub.handle(service)
    other = hub.record()
    assert hub.ignores(registration)
    assert hub.logged("is ignored", level=logging.ERROR)
    hub.deliver(1)
    assert other.numbers == [1]


# --- what handlers do


def test_handlers_may_do_anything(hub: Hub) -> None:
    """Scenario 41; RFC 97 4.1.3 [18]: register, unregister, update, post, send, flush; no lock is held."""
    seen: list[str] = []
    own: list[Any] = []

    def handler(event: Event) -> None:
        seen.append(event.topic)
        if event.topic == "a":
            own[0].update({"event.topics": ["a", "b"]})
            added = hub.handle(lambda event: seen.append(f"{event.topic} added"), "b", ranking=-1)
            hub.admin.send_event(Event("b"))
            added.unregister()
            hub.admin.post_event(Event("b"))
            seen.append("a returned")
            hub.admin.flush()
            own[0].unregister()

    own.append(hub.handle(handler, "a"))
    other = hub.record("*", ranking=-5)
    hub.deliver(1)
    other.events.wait_for(3)
    assert seen == ["a", "b", "b added", "a returned"]
    assert other.topics == ["b", "a", "b"]


# --- how much


def test_publishers_wait_when_handlers_are_behind(hub: Hub) -> None:
    """Scenario 42; RFC 97 8.1.2: an implementation MAY limit the rate. Nothing is lost, and all is in order."""
    hub.admin._queue.room.limit = 10
    gate = hub.gate(0)
    posted: waiting.Recorder[int] = waiting.Recorder()

    def flood() -> None:
        for number in range(1, 100):
            hub.post(number)
            posted.append(number)

    join = in_background(flood)
    posted.wait_for(9)
    eventually(lambda: hub.admin._queue.room.is_awaited, "it waits for room")
    assert len(posted) <= 12
    gate.opened.set()
    join()
    hub.flush()
    assert gate.numbers == [*range(100)]


@table("delivery", DELIVERIES)
@own_hub
def test_events_without_room_are_counted_and_logged(hub: Hub, delivery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 42: never without an entry in the log."""
    monkeypatch.setattr(lanes, "_PATIENCE", 0.01)
    gate = hub.gate(delivery=delivery)
    lane = hub.admin.lanes()[-1]  # of the handler, or the only one
    lane.room.limit = 10
    hub.post(0)
    gate.wait()
    hub.post(*range(1, 20))
    gate.opened.set()
    hub.flush()
    assert gate.numbers == [*range(11)]
    assert hub.dto(gate).dropped == 9
    assert len(hub.logged("events behind: dropping", level=logging.ERROR)) == 1


class OwnThread(threading.Thread):
    """One that can be told from others."""


def test_a_thread_that_posted_leaves_nothing_behind(hub: Hub) -> None:
    """Scenario 43."""
    recorder = hub.record()
    weak: list[weakref.ref[Any]] = []

    def run(number: int) -> None:
        for each in range(10):
            event = Event("a", {"n": (number, each)})
            weak.append(weakref.ref(event))
            hub.admin.post_event(event)

    def run_all() -> None:
        threads = [OwnThread(target=run, args=(number,)) for number in range(20)]
        for thread in threads:
            weak.append(weakref.ref(thread))
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

    run_all()
    hub.flush()
    assert len(recorder.events) == 200
    recorder.events.clear()
    gc.collect()
    # the delivery thread may still be on its way out with the last event in its hands
    eventually(lambda: not [each for each in weak if each() is not None], "all gone")


def test_delivery_threads_go_when_there_is_nothing_to_do(hub: Hub) -> None:
    """RFC 97 4.1.2 [9], 4.1.5 [24]: there should be only one event thread, and not even that without events."""
    recorder = hub.record()
    hub.deliver(*range(500))
    assert len(set(recorder.threads)) == 1
    eventually(lambda: hub.admin.get_dto().threads == 0, "it has gone")

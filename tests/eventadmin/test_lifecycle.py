"""Opening and closing, and services that are made with their first event (RFC 97 5.1.3, 5.2.2)."""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from messaging.errors import ArgumentError, ClosedError
from messaging.eventadmin import Event, EventAdmin, EventHandler
from messaging.execution import clock
from messaging.services import ServiceRegistry, interface_name
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.dispatch.helpers import switching_often
from tests.eventadmin.conftest import (
    DELIVERIES,
    MOMENT,
    AsyncRecorder,
    Gate,
    Hub,
    Hubs,
    Recorder,
    handle,
    on,
    own_hub,
    post,
    record,
)
from tests.threads import in_background

# --- opening


def test_an_admin_is_a_service_with_a_name(services: ServiceRegistry, hubs: Hubs) -> None:
    """RFC 97 5.1.3."""
    one, other = hubs(name="mine"), hubs()
    assert services.service(EventAdmin, "(event.admin.name=mine)") is one.admin
    assert one.admin.name == "mine"
    (reference,) = services.find(EventAdmin, "(event.admin.name=mine)")
    assert reference.interfaces == (interface_name(EventAdmin),)
    assert other.admin.name != hubs().admin.name
    assert repr(one.admin) == "<EventAdmin 'mine'>"
    one.admin.close()
    assert services.service(EventAdmin, "(event.admin.name=mine)") is None
    assert repr(one.admin) == "<EventAdmin 'mine', closed>"


# --- closing


def test_events_dropped_by_closing_are_counted_in_the_log(hub: Hub) -> None:
    """Scenario 36: it does not hang."""
    unordered, other = hub.gate(delivery="async.unordered"), hub.record(ranking=-1)
    gate = hub.gate(1, 2, 3)
    unordered.wait()
    hub.admin.close(MOMENT)
    # the two handlers in order wait for three events each, but for the one that is being handled; the other for two
    assert len(hub.logged(hub.admin.name, "closed before 7 pending events were delivered", level=logging.ERROR)) == 1
    unordered.opened.set()
    gate.leave()
    assert (gate.numbers, other.numbers) == ([1], [])


@table("publish", ["post_event", "send_event", "asend_event"])
@own_hub
def test_a_closed_admin_takes_no_events(hub: Hub, publish: str) -> None:
    recorder = hub.record()
    hub.admin.close()
    call = getattr(hub.admin, publish)
    with pytest.raises(ClosedError, match=f"event admin '{hub.admin.name}' is closed"):
        asyncio.run(call(Event("a"))) if publish == "asend_event" else call(Event("a"))
    assert recorder.events == []
    assert hub.admin.get_dto().handlers == ()
    assert hub.admin.flush().done()
    with pytest.raises(ClosedError):
        hub.admin.__enter__()


def test_a_handler_of_a_sent_event_may_close_the_admin(hub: Hub) -> None:
    """Scenarios 36 and 41."""
    hub.handle(lambda event: hub.admin.close())
    last = hub.record(ranking=-1)
    hub.send_number(1)
    with pytest.raises(ClosedError):
        hub.post(2)
    assert last.numbers == [1]


def test_a_handler_that_a_sender_waits_for_elsewhere_may_close_the_admin(hub: Hub) -> None:
    """It is called on a thread of its own, and still a handler is waiting for it."""
    steps: list[str] = []

    def close(event: Event) -> None:
        hub.admin.close()
        steps.append("closed")

    def outer(event: Event) -> None:
        hub.admin.send_event(Event("inner"), timeout=PATIENCE)
        steps.append("sent")

    hub.handle(close, "inner")
    hub.handle(outer, "outer")
    last = hub.record("outer")
    hub.post(1, topic="outer")
    eventually(lambda: steps == ["closed", "sent"], "both")
    hub.admin.close()
    assert len(last.events) == 1


@table("way", ["close", "aclose"])
@own_hub
def test_a_coroutine_of_a_sent_event_may_close_the_admin(hub: Hub, loop: asyncio.AbstractEventLoop, way: str) -> None:
    """Scenarios 36 and 41: nor does that wait for itself."""
    done: list[Event] = []

    async def handler(event: Event) -> None:
        if way == "close":
            hub.admin.close()
        else:
            await hub.admin.aclose()
        done.append(event)

    on(loop, lambda: hub.handle(handler))
    other = hub.record(ranking=-1)
    asyncio.run_coroutine_threadsafe(hub.admin.asend_event(Event("a", {"n": 1})), loop).result(PATIENCE)
    assert done
    hub.admin.close()
    assert other.numbers == [1]


def test_an_admin_inside_a_handler_of_another_one_is_waited_for(hubs: Hubs) -> None:
    """It is another one that must not be waited for there."""
    hub, own = hubs(), ServiceRegistry()
    counts: list[int] = []

    async def handler(event: Event) -> None:
        recorder = record(own)
        async with EventAdmin(own) as inner:
            post(inner, *range(50))
        counts.append(len(recorder.events))

    hub.handle(handler)
    hub.deliver(1)
    assert counts == [50]


@table("delivery", DELIVERIES)
@own_hub
def test_posting_an_event_whose_handler_closes_the_admin_is_not_refused(hub: Hub, delivery: str) -> None:
    """Scenario 36: the event was delivered, however soon the rest happens."""
    with switching_often():
        for _ in range(50):
            admin = EventAdmin(hub.services)
            target = f"(event.admin.name={admin.name})"
            with hub.handle(lambda event, admin=admin: admin.close(), delivery=delivery, target=target):
                post(admin, 1)
                admin.close()


def test_a_publisher_that_waits_for_room_is_refused_by_closing(hub: Hub) -> None:
    """Scenarios 36 and 42."""
    hub.admin._queue.room.limit = 2
    gate = hub.gate(1)
    hub.post(2, 3)

    def wait_for_room() -> None:
        with pytest.raises(ClosedError):
            hub.post(4)

    join = in_background(wait_for_room)
    eventually(lambda: hub.admin._queue.room.is_awaited, "it waits for room")
    hub.admin.close(MOMENT)
    join()
    gate.leave()
    assert gate.numbers == [1]


@table("publish", ["send", "send in time", "asend"])
@own_hub
def test_closing_waits_for_events_that_are_being_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch, publish: str) -> None:
    gate, last = hub.gate(), hub.record(ranking=-1)
    event = Event("a", {"n": 1})
    sends: dict[str, Callable[[], object]] = {
        "send": lambda: hub.admin.send_event(event),
        "send in time": lambda: hub.admin.send_event(event, timeout=PATIENCE),
        "asend": lambda: asyncio.run(hub.admin.asend_event(event)),
    }
    join = in_background(sends[publish])
    gate.wait()
    pause = clock.pause

    def wait(seconds: float) -> None:
        gate.opened.set()
        pause(seconds)

    monkeypatch.setattr(clock, "pause", wait)  # the handler returns only when closing waits
    hub.admin.close(PATIENCE)
    assert gate.numbers == last.numbers == [1]
    gate.opened.set()
    join()


def test_sends_that_are_under_way_go_on_when_it_is_closed(hub: Hub) -> None:
    gate, last = hub.gate(), hub.record(ranking=-1)
    join = in_background(lambda: hub.send_number(1))
    gate.wait()
    hub.admin.close(MOMENT)
    gate.opened.set()
    join()
    assert gate.numbers == last.numbers == [1]


# --- services that are made with their first event


def made() -> type[Made]:
    return type("Factory", (Made,), {"instances": 0})


class Made(Recorder):
    """Counts its instances."""

    instances: int

    def __init__(self) -> None:
        super().__init__()
        type(self).instances += 1


@pytest.fixture
def factory() -> type[Made]:
    return made()


def test_a_prototype_is_made_with_its_first_event(hub: Hub, factory: type[Made]) -> None:
    """Scenario 52: not when it is registered, nor with an event that is not for it."""
    hub.handle(factory, "a", scope="prototype", filter="(n>=2)")
    hub.post(1)
    hub.deliver(5, topic="b")
    assert factory.instances == 0
    hub.post(2, 3)
    hub.send_number(4)
    hub.flush()
    assert factory.instances == 1


@table("publish", ["post", "send", "asend"])
def test_a_prototype_is_made_once_for_each_admin(hubs: Hubs, publish: str) -> None:
    """Scenario 52."""
    services, factory = ServiceRegistry(), made()
    several = [hubs(services), hubs(services)]
    handle(services, factory, scope="prototype")
    for hub in several:
        for _ in range(3):
            if publish == "post":
                hub.post(1)
            elif publish == "send":
                hub.send("a")
            else:
                asyncio.run(hub.admin.asend_event(Event("a")))
        hub.flush()
    assert factory.instances == 2


def test_a_prototype_is_made_once_even_if_many_have_its_first_event(hub: Hub) -> None:
    """Scenario 52: the others wait for it, without a lock."""
    made: list[Recorder] = []
    gate = Gate()

    def factory() -> Recorder:
        gate.handle_event(Event("made"))
        made.append(Recorder())
        return made[-1]

    hub.handle(factory, scope="prototype")
    joins = [in_background(functools.partial(hub.send_number, number)) for number in range(4)]
    hub.post(4)
    gate.wait()
    hub.handle(Recorder())  # nothing is locked meanwhile
    gate.opened.set()
    for join in joins:
        join()
    hub.flush()
    (recorder,) = made
    assert sorted(recorder.numbers) == [0, 1, 2, 3, 4]
    assert len(gate.events) == 1


def test_a_factory_that_raises_is_asked_again_with_the_next_event(hub: Hub) -> None:
    """RFC 97 5.3.1: it is no different from a handler that raises."""
    calls: list[Any] = []
    recorder = Recorder()

    def factory() -> Any:
        calls.append(None)
        if len(calls) < 4:
            raise ValueError("not yet")
        return recorder

    registration = hub.handle(factory, scope="prototype")
    other = hub.record(ranking=-1)
    hub.deliver(1)
    hub.send_number(2)
    asyncio.run(hub.admin.asend_event(Event("a", {"n": 3})))
    assert len(calls) == 3
    hub.deliver(4)
    hub.send_number(5)
    assert (len(calls), recorder.numbers, other.numbers) == (4, [4, 5], [1, 2, 3, 4, 5])
    assert len(hub.logged("failed on the event 'a'", "ValueError: not yet")) == 3
    assert hub.dto(registration).failures == 3


def test_a_factory_that_raises_is_asked_once_when_it_is_sent_to_on_an_event_loop(hub: Hub) -> None:
    """Where it has to be looked at before, to see whether it can be waited for."""
    calls: list[Any] = []

    def factory() -> Any:
        calls.append(None)
        raise ValueError("boom")

    hub.handle(factory, scope="prototype")
    other = hub.record(ranking=-1)

    async def main() -> None:
        hub.admin.send_event(Event("a"))

    asyncio.run(main())
    assert (len(calls), other.topics) == (1, ["a"])
    assert len(hub.logged("failed on the event 'a'")) == 1


def test_a_prototype_that_is_a_coroutine_function_is_refused_on_its_own_loop_too(hub: Hub) -> None:
    async def main() -> None:
        hub.handle(AsyncRecorder, scope="prototype")
        with pytest.raises(ArgumentError, match="asend_event"):
            hub.admin.send_event(Event("a"))
        await hub.admin.asend_event(Event("a"))

    asyncio.run(main())


def test_a_factory_that_makes_no_handler_is_logged_with_each_event(hub: Hub) -> None:
    hub.handle(lambda: 5, scope="prototype")
    hub.handle(lambda: None, scope="prototype")
    hub.deliver(1, 2)
    assert len(hub.logged("failed on the event 'a'", "neither a function nor has handle_event")) == 2


def test_a_factory_that_causes_an_event_for_its_service_does_not_wait_for_itself(hub: Hub) -> None:
    recorder = Recorder()

    def factory() -> Recorder:
        hub.admin.send_event(Event("inner"))
        hub.admin.post_event(Event("later"))
        return recorder

    hub.handle(factory, scope="prototype")
    hub.deliver(1)
    hub.flush()
    assert recorder.topics == ["a", "later"]
    assert len(hub.logged("failed on the event 'inner'", "its own factory caused an event")) == 1


def test_a_prototype_that_is_a_coroutine_function_runs_on_the_loop_it_was_registered_on(
    hub: Hub, loop: asyncio.AbstractEventLoop
) -> None:
    recorder = AsyncRecorder()
    on(loop, lambda: hub.handle(lambda: recorder, scope="prototype"))
    for _ in range(2):
        asyncio.run_coroutine_threadsafe(hub.admin.asend_event(Event("a")), loop).result(PATIENCE)
    hub.deliver(1)
    assert recorder.loops == [loop] * 3


@table("scope", ["singleton", "prototype"])
@table("delivery", DELIVERIES)
@own_hub
def test_a_service_is_let_go_of_when_it_is_unregistered(hub: Hub, scope: Any, delivery: str) -> None:
    """Scenario 52; RFC 97 4.1.1 [3]: at once, not when the collector comes."""
    made: list[weakref.ref[Any]] = []

    def make() -> Recorder:
        recorder = Recorder()
        made.append(weakref.ref(recorder))
        return recorder

    service = make if scope == "prototype" else make()
    properties = {"event.topics": "*", "event.delivery": delivery}
    registration = hub.services.register(EventHandler, service, properties, scope=scope)
    del service
    hub.admin.send_event(Event("a"))
    assert made[0]() is not None
    registration.unregister()
    del registration  # which has it, too
    assert made[0]() is None


def test_a_service_that_was_unregistered_while_it_was_made_gets_nothing(hub: Hub) -> None:
    """Scenarios 31 and 52."""
    recorder = Recorder()
    registrations: list[Any] = []

    def factory() -> Recorder:
        registrations[0].unregister()
        return recorder

    registrations.append(hub.handle(factory, scope="prototype"))
    hub.deliver(1, 2)
    assert recorder.events == []


def test_changing_sides_makes_a_prototype_anew(hubs: Hubs, factory: type[Made]) -> None:
    """Scenario 52: an update that takes it from an admin, and back."""
    hub = hubs(name="mine")
    registration = hub.handle(factory, scope="prototype")
    for target in (None, "(event.admin.name=other)", "(event.admin.name=mine)"):
        registration.update({"event.topics": "*", "event.target": target})
        hub.admin.send_event(Event("a"))
    assert factory.instances == 2

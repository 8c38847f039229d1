"""Asynchronous delivery: when, in which order, to whom, and how much of it (RFC 97 5.2.2, 5.2.3, 8.1.2)."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from messaging.dispatch import lanes
from messaging.errors import DeadlineError
from messaging.eventadmin import Event, EventAdmin, EventHandler
from messaging.services import ServiceRegistry
from tests.eventadmin.conftest import (
    MOMENT,
    PATIENCE,
    AsyncGate,
    AsyncRecorder,
    Failing,
    Gate,
    Recorder,
    dto,
    eventually,
    flush,
    handle,
    in_background,
    in_threads,
    logged,
    on,
    record,
)

Admins = Callable[..., EventAdmin]


def post(admin: EventAdmin, *numbers: Any, topic: str = "a") -> None:
    for number in numbers:
        admin.post_event(Event(topic, {"n": number}))


# --- when


def test_posting_returns_before_delivery_is_complete(admin: EventAdmin, services: ServiceRegistry) -> None:
    """Scenario 27; RFC 97 4.1.2 [8], 5.2.2, 6.4.1."""
    gate = Gate()
    handle(services, gate)
    post(admin, 1)
    gate.wait()
    assert gate.returned.acquire(blocking=False) is False
    gate.leave()


def test_posted_events_are_delivered_on_a_different_thread(admin: EventAdmin, services: ServiceRegistry) -> None:
    """RFC 97 5.2.2; also those that a handler posts, when its turn is over."""
    order: list[Any] = []

    def handler(event: Event) -> None:
        order.append((event.get_property("n"), threading.get_ident()))
        if event.get_property("n") == 1:
            post(admin, 2)
            order.append("returned")

    handle(services, handler)
    post(admin, 1)
    flush(admin)
    eventually(lambda: len(order) == 3, "both")
    assert [each[0] if isinstance(each, tuple) else each for each in order] == [1, "returned", 2]
    assert threading.get_ident() not in {each[1] for each in order if isinstance(each, tuple)}


def test_flushing_waits_for_what_was_posted_before(admin: EventAdmin, services: ServiceRegistry) -> None:
    gate, unordered = Gate(), Gate()
    handle(services, gate)
    handle(services, unordered, delivery="async.unordered")
    assert admin.flush().done()
    post(admin, 1)
    gate.wait()
    unordered.wait()
    promise = admin.flush()
    gate.opened.set()
    with pytest.raises(DeadlineError):
        promise.result(MOMENT)
    unordered.opened.set()
    promise.result(PATIENCE)


# --- order


def test_events_of_one_thread_must_be_delivered_in_their_order(admin: EventAdmin, services: ServiceRegistry) -> None:
    """Scenario 28; RFC 97 5.2.2, 5.2.3: whatever their topics."""
    all_of_them, some = record(services), record(services, ["even/*"])
    for number in range(1000):
        post(admin, number, topic="odd/x" if number % 2 else f"even/t{number % 7}")
    flush(admin)
    assert all_of_them.numbers == list(range(1000))
    assert some.numbers == list(range(0, 1000, 2))


def test_all_handlers_must_have_returned_from_one_event_before_any_gets_the_next(
    admin: EventAdmin, services: ServiceRegistry
) -> None:
    """Scenario 29; RFC 97 4.1.2 [15]: also of events that different threads posted, and whatever handlers are."""
    steps: list[tuple[Any, str]] = []
    tick = itertools.count()

    def slow(event: Event) -> None:
        steps.append((event.get_property("n"), "begin"))
        if next(tick) % 10 == 0:
            threading.Event().wait(0.002)
        steps.append((event.get_property("n"), "end"))

    async def slow_async(event: Event) -> None:
        steps.append((event.get_property("n"), "begin"))
        await asyncio.sleep(0)
        steps.append((event.get_property("n"), "end"))

    for handler in (slow, slow, slow_async, slow):
        handle(services, handler, ["a", "b"])

    def run(thread: int) -> None:
        for each in range(25):
            post(admin, (thread, each), topic="ab"[each % 2])

    in_threads(4, run)
    flush(admin)
    events = [number for number, _ in itertools.groupby(steps, key=lambda each: each[0])]
    assert len(events) == len(set(events)) == 100
    assert [what for _, what in steps] == ["begin", "end"] * 400


def test_a_handler_sees_events_in_order_however_many_threads_deliver(admins: Admins, services: ServiceRegistry) -> None:
    """Scenario 33; RFC 97 5.2.2. Those without order, which need threads, are no hindrance."""
    admin = admins(threads=8)
    gates = [Gate() for _ in range(4)]
    for each in gates:
        handle(services, each, delivery="async.unordered")
    recorders = [record(services) for _ in range(3)]
    post(admin, *range(300))
    for each in gates:
        each.wait()
    eventually(lambda: all(len(each.events) == 300 for each in recorders), "all are through")
    assert [each.numbers for each in recorders] == [[*range(300)]] * 3
    for each in gates:
        each.opened.set()
    flush(admin)
    assert [len(each.events) for each in gates] == [300] * 4


@pytest.mark.parametrize("delivery", ["async.ordered", "async.unordered"])
def test_ten_threads_post_a_thousand_events_each(admin: EventAdmin, services: ServiceRegistry, delivery: str) -> None:
    """Scenario 34: all arrive, and those of each thread in order."""
    recorders = [record(services, delivery=delivery), record(services, "t3/*", delivery=delivery)]

    def run(thread: int) -> None:
        for number in range(1000):
            post(admin, (thread, number), topic=f"t{thread}/x")

    in_threads(10, run)
    flush(admin)
    assert [len(each.events) for each in recorders] == [10_000, 1000]
    for thread in range(10):
        assert [each for each in recorders[0].numbers if each[0] == thread] == [(thread, n) for n in range(1000)]
    assert recorders[1].numbers == [(3, number) for number in range(1000)]


def test_order_may_be_dropped_for_one_handler_only(admin: EventAdmin, services: ServiceRegistry) -> None:
    """Scenario 35: it does not wait for others, nor they for it."""
    gate, unordered_gate = Gate(), Gate()
    handle(services, gate, "gated", ranking=5)
    handle(services, unordered_gate, "gated/unordered", delivery=["async.unordered"])
    unordered, ordered = record(services, delivery="async.unordered"), record(services)
    post(admin, 1, topic="gated")
    gate.wait()
    post(admin, 2, topic="gated/unordered")
    unordered_gate.wait()
    eventually(lambda: unordered.numbers == [1, 2], "no waiting without order")
    assert ordered.numbers == []
    gate.opened.set()
    eventually(lambda: ordered.numbers == [1, 2], "no waiting for what has no order")
    unordered_gate.opened.set()


@pytest.mark.parametrize(
    ("delivery", "is_ordered"),
    [
        (None, True),
        ([], True),
        ("async.ordered", True),
        (["async.unordered", "async.ordered"], True),
        ({"async.unordered"}, False),
        (("async.unordered",), False),
    ],
)
def test_order_wins_if_both_are_given(
    admin: EventAdmin, services: ServiceRegistry, delivery: Any, is_ordered: bool
) -> None:
    """Scenario 35."""
    gate = Gate()
    handle(services, gate, ranking=1)
    recorder = record(services, delivery=delivery)
    post(admin, 1)
    gate.wait()
    if is_ordered:
        assert recorder.numbers == []
        gate.opened.set()
    eventually(lambda: recorder.numbers == [1], "it has got it")
    gate.opened.set()


@pytest.mark.parametrize("delivery", ["ordered", 5, ["async.unordered", "fast"], [None], {"async.unordered": 1}])
def test_a_handler_with_another_delivery_is_ignored(
    admin: EventAdmin, services: ServiceRegistry, delivery: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registration = handle(services, Recorder(), delivery=delivery)
    assert dto(admin, registration) is None
    assert logged(caplog, "is ignored: event.delivery must be", level=logging.ERROR)


# --- who: the snapshot


def test_handlers_registered_after_the_post_must_not_get_the_event(
    admin: EventAdmin, services: ServiceRegistry
) -> None:
    """Scenario 30; RFC 97 4.1.2 [11], 5.2.2."""
    gate = Gate()
    handle(services, gate)
    post(admin, 1, 2)
    gate.wait()
    late = record(services)
    late_unordered = record(services, delivery="async.unordered")
    post(admin, 3)
    gate.opened.set()
    flush(admin)
    assert gate.numbers == [1, 2, 3]
    assert late.numbers == late_unordered.numbers == [3]


@pytest.mark.parametrize("delivery", ["async.ordered", "async.unordered"])
def test_handlers_unregistered_before_their_turn_must_not_be_called(
    admin: EventAdmin, services: ServiceRegistry, delivery: str
) -> None:
    """Scenario 31; RFC 97 4.1.2 [12], 5.2.2."""
    gate, other = Gate(), Recorder()
    registration = handle(services, gate, delivery=delivery, ranking=1)
    another = handle(services, other)
    post(admin, 1, 2)
    gate.wait()
    registration.unregister()
    another.unregister()
    gate.opened.set()
    flush(admin)
    assert (gate.numbers, other.numbers) == ([1], [])


def test_the_registry_says_who_is_registered(admin: EventAdmin, services: ServiceRegistry) -> None:
    """Scenario 31: and not what it has told about it, which may take its time."""
    slow = threading.Event()
    gate, recorder = Gate(), Recorder()
    handle(services, gate, ranking=1)
    registration = handle(services, recorder)
    # told of updates while another listener is, the registry tells of the unregistration when that is done
    entered = threading.Event()

    def listener(_: Any) -> None:
        entered.set()
        assert slow.wait(PATIENCE)

    with services.add_listener(listener, EventHandler):
        post(admin, 1)
        gate.wait()
        join = in_background(lambda: registration.update({"event.topics": "*", "x": 1}))
        assert entered.wait(PATIENCE)
        assert registration.unregister()  # returns before anybody was told
        gate.opened.set()
        flush(admin)
        admin.send_event(Event("a"))
        slow.set()
        join()
    assert recorder.numbers == []


def test_the_filter_is_applied_when_the_event_is_posted(admin: EventAdmin, services: ServiceRegistry) -> None:
    """Scenario 32: unspecified; this is how it is here. The same goes for topics and order."""
    gate = Gate()
    recorder, other = Recorder(), Recorder()
    handle(services, gate, ranking=1)
    registration, another = handle(services, recorder, filter="(n<=2)"), handle(services, other, "a", filter="(n>=3)")
    post(admin, 1, 2, 3)
    gate.wait()
    registration.update({"event.topics": "b", "event.filter": "(n=0)"})
    another.update({"event.topics": "*"})
    post(admin, 4)
    gate.opened.set()
    flush(admin)
    assert recorder.numbers == [1, 2]
    assert other.numbers == [3, 4]


def test_what_waits_is_delivered_whatever_a_handler_says_about_order_meanwhile(
    admin: EventAdmin, services: ServiceRegistry
) -> None:
    """Scenario 35: it may change its mind, and back; nothing is lost, or delivered twice."""
    gate = Gate()
    registration = handle(services, gate, delivery="async.ordered")
    post(admin, 1, 2)
    gate.wait()
    for delivery, numbers in (("async.unordered", (3, 4)), ("async.ordered", (5, 6)), ("async.unordered", (7, 8))):
        registration.update({"event.topics": "*", "event.delivery": delivery})
        post(admin, *numbers)
    assert admin.get_dto().waiting >= 5
    promise = admin.flush()
    with pytest.raises(DeadlineError):
        promise.result(MOMENT)
    gate.opened.set()
    promise.result(PATIENCE)
    assert sorted(gate.numbers) == [*range(1, 9)]
    assert [each for each in gate.numbers if each in (1, 2, 5, 6)] == [1, 2, 5, 6]
    assert admin.get_dto().waiting == 0


def test_handlers_change_their_mind_about_order_while_events_are_posted(
    admin: EventAdmin, services: ServiceRegistry
) -> None:
    """Scenario 35: whoever posts sees one or the other."""
    recorder = Recorder()
    registration = handle(services, recorder)
    done = threading.Event()

    def change() -> None:
        for delivery in itertools.cycle(("async.unordered", "async.ordered")):
            registration.update({"event.topics": "*", "event.delivery": delivery})
            if done.is_set():
                return

    join = in_background(change)
    in_threads(3, lambda thread: post(admin, *((thread, each) for each in range(500))))
    done.set()
    join()
    flush(admin)
    assert sorted(recorder.numbers) == [(thread, each) for thread in range(3) for each in range(500)]


@pytest.mark.parametrize("delivery", ["async.ordered", "async.unordered"])
def test_events_are_posted_while_handlers_come_and_go(
    admin: EventAdmin, services: ServiceRegistry, delivery: str
) -> None:
    """Scenarios 30, 31 and 34: whoever stays gets all; whoever comes and goes gets a part of it, without a gap."""
    stays = record(services, delivery=delivery)
    visitors: list[Recorder] = []
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            visitors.append(Recorder())
            handle(services, visitors[-1], delivery=delivery).unregister()

    join = in_background(come_and_go)
    in_threads(2, lambda thread: post(admin, *((thread, each) for each in range(700))))
    done.set()
    join()
    flush(admin)
    assert len(stays.events) == 1400
    for each in visitors:
        for thread in range(2):
            numbers = [number for by, number in each.numbers if by == thread]
            assert numbers == [*range(numbers[0], numbers[0] + len(numbers))] if numbers else True


# --- handlers of all kinds


class Callable_:  # noqa: N801
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)


class AsyncCallable(Callable_):
    async def __call__(self, event: Event) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.events.append(event)


class Method(Callable_):
    def with_prefix(self, prefix: str, event: Event) -> None:
        assert prefix == "p"
        self(event)

    async def later(self, event: Event) -> None:
        await asyncio.sleep(0)
        self(event)

    def awaitable(self, event: Event) -> Any:
        return self.later(event)


def kinds() -> Iterator[tuple[str, Callable[[Method], Any]]]:
    yield "handle_event", lambda method: recorder_of(method, Recorder())
    yield "async handle_event", lambda method: recorder_of(method, AsyncRecorder())
    yield "function", lambda method: lambda event: method(event)
    yield "bound method", lambda method: method.__call__
    yield "object", lambda method: method
    yield "partial", lambda method: functools.partial(method.with_prefix, "p")
    yield "coroutine method", lambda method: method.later
    yield "coroutine partial", lambda method: functools.partial(Method.later, method)
    yield "coroutine object", lambda method: shared(AsyncCallable(), method)
    yield "function that returns an awaitable", lambda method: method.awaitable
    yield "lambda that returns an awaitable", lambda method: lambda event: method.later(event)


def recorder_of(method: Method, recorder: Recorder) -> Any:
    return shared(recorder, method)


def shared(one: Any, other: Any) -> Any:
    one.events = other.events
    return one


KINDS = dict(kinds())


@pytest.mark.parametrize("publish", ["post", "send", "asend"])
@pytest.mark.parametrize("where", ["on a loop", "without a loop"])
@pytest.mark.parametrize("kind", KINDS)
def test_handlers_may_be_anything_that_can_be_called(
    admin: EventAdmin, services: ServiceRegistry, loop: asyncio.AbstractEventLoop, kind: str, where: str, publish: str
) -> None:
    """RFC 97 4.1.1 [2]: programming them is simple. They are called with one event after the other."""
    method = Method()
    handler = KINDS[kind](method)
    register = functools.partial(handle, services, handler)
    if where == "on a loop":
        on(loop, register)
    else:
        register()
    events = [Event("a", {"n": number}) for number in range(5)]
    for event in events:
        if publish == "post":
            admin.post_event(event)
        elif publish == "send":
            admin.send_event(event)
        else:
            asyncio.run_coroutine_threadsafe(admin.asend_event(event), loop).result(PATIENCE)
    flush(admin)
    assert method.events == events


def test_coroutine_functions_run_on_the_loop_they_were_registered_on(
    admin: EventAdmin, services: ServiceRegistry, loop: asyncio.AbstractEventLoop
) -> None:
    there, elsewhere = AsyncRecorder(), AsyncRecorder()
    on(loop, lambda: handle(services, there))
    handle(services, elsewhere)
    post(admin, 1)
    admin.send_event(Event("a"))
    flush(admin)
    assert there.loops == [loop, loop]
    assert loop not in elsewhere.loops
    assert len(set(elsewhere.loops)) == 1


def generator(event: Event) -> Iterator[Event]:
    yield event


async def async_generator(event: Event) -> Any:
    yield event


class HandlesNothing:
    handle_event = None


@pytest.mark.parametrize(
    "service", [5, "handler", object(), HandlesNothing(), generator, async_generator], ids=lambda each: repr(each)[:20]
)
def test_a_service_that_is_no_handler_is_ignored(
    admin: EventAdmin, services: ServiceRegistry, service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Found out when it is registered, not with the first event."""
    registration = handle(services, service)
    other = record(services)
    assert dto(admin, registration) is None
    assert logged(caplog, "is ignored", level=logging.ERROR)
    post(admin, 1)
    flush(admin)
    assert other.numbers == [1]


class HasTrouble:
    @property
    def handle_event(self) -> Any:
        raise RuntimeError("boom")


def test_a_service_that_cannot_be_looked_at_is_ignored(
    admin: EventAdmin, services: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    registration = handle(services, HasTrouble())
    assert dto(admin, registration) is None
    assert logged(caplog, "is ignored: boom", level=logging.ERROR)


# --- what handlers do


def test_handlers_may_do_anything(admin: EventAdmin, services: ServiceRegistry) -> None:
    """Scenario 41; RFC 97 4.1.3 [18]: register, unregister, update, post, send, flush; no lock is held."""
    seen: list[str] = []
    own: list[Any] = []

    def handler(event: Event) -> None:
        seen.append(event.topic)
        if event.topic == "a":
            own[0].update({"event.topics": ["a", "b"]})
            added = handle(services, lambda event: seen.append(f"{event.topic} added"), "b", ranking=-1)
            admin.send_event(Event("b"))
            added.unregister()
            admin.post_event(Event("b"))
            seen.append("a returned")
            admin.flush()
            own[0].unregister()

    own.append(handle(services, handler, "a"))
    other = record(services, "*", ranking=-5)
    post(admin, 1)
    flush(admin)
    eventually(lambda: len(other.events) == 3, "all three")
    assert seen == ["a", "b", "b added", "a returned"]
    assert other.topics == ["b", "a", "b"]


def test_a_handler_may_have_other_threads_use_the_admin_and_wait_for_them(
    admin: EventAdmin, services: ServiceRegistry
) -> None:
    """Scenario 41: which would not end if a lock was held."""
    done: list[str] = []

    def handler(event: Event) -> None:
        def elsewhere() -> None:
            with handle(services, lambda event: None, "c"):
                admin.send_event(Event("c"))
                admin.post_event(Event("c"))
                admin.get_dto()

        in_background(elsewhere)()
        done.append(event.topic)

    handle(services, handler, "a")
    post(admin, 1)
    flush(admin)
    admin.send_event(Event("a"))
    assert done == ["a", "a"]


def test_a_handler_that_raises_is_called_again_and_others_before(
    admin: EventAdmin, services: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 25 for posted events; RFC 97 4.1.3 [16], [17], 5.3.1: however often, and whatever it is."""
    failing = [
        Failing(error)
        for error in (ValueError("boom"), KeyboardInterrupt(), SystemExit(1), GeneratorExit(), asyncio.CancelledError())
    ]
    first = record(services, ranking=1)
    registrations = [handle(services, each) for each in failing]
    last = record(services, ranking=-1)
    post(admin, *range(20))
    flush(admin)
    for each in (first, *failing, last):
        assert each.numbers == [*range(20)]
    assert [dto(admin, each).failures for each in registrations] == [20] * 5  # type: ignore[union-attr]
    assert len(logged(caplog, "(Failing.handle_event) failed on the event 'a'", level=logging.ERROR)) == 100


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_a_coroutine_function_that_raises_ends_no_event_loop(
    admin: EventAdmin, services: ServiceRegistry, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """RFC 97 5.3.1. asyncio lets some of these out of its loops, on which others run."""

    async def handler(event: Event) -> None:
        await asyncio.sleep(0)
        raise error

    handle(services, handler)
    other = AsyncRecorder()
    handle(services, other)
    post(admin, 1, 2)
    flush(admin)
    assert other.numbers == [1, 2]
    assert len(logged(caplog, "failed on the event 'a'", level=logging.ERROR)) == 2


class RaisingLogFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if "failed on" in record.msg:
            raise RuntimeError("no logging today")
        return True


def test_not_even_a_log_that_raises_keeps_events_from_others(admin: EventAdmin, services: ServiceRegistry) -> None:
    """RFC 97 5.3.1: delivery MUST continue."""
    handle(services, Failing(ValueError("boom")))
    other = record(services)
    filter_ = RaisingLogFilter()
    log = logging.getLogger("messaging.dispatch.handler")
    log.addFilter(filter_)
    try:
        post(admin, 1, 2)
        flush(admin)
        admin.send_event(Event("a", {"n": 3}))
    finally:
        log.removeFilter(filter_)
    assert other.numbers == [1, 2, 3]


# --- loops


def test_a_coroutine_whose_loop_is_closed_is_blocked(
    admin: EventAdmin, services: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """It would fail with every event. An update gives it another loop."""
    mine = asyncio.new_event_loop()
    recorder, other = AsyncRecorder(), record(services)

    async def register() -> Any:
        return handle(services, recorder)

    registration = mine.run_until_complete(register())
    mine.close()
    post(admin, 1, 2)
    flush(admin)
    assert (recorder.numbers, other.numbers) == ([], [1, 2])
    found = dto(admin, registration)
    assert found is not None
    assert found.blocked == "the event loop it ran on is closed"
    assert len(logged(caplog, "is blocked: the event loop it ran on is closed")) == 1
    registration.update({"event.topics": "*"})
    post(admin, 3)
    flush(admin)
    assert recorder.numbers == [3]


def test_a_loop_may_be_closed_while_a_coroutine_runs_on_it(
    admin: EventAdmin, services: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    mine = asyncio.new_event_loop()
    threading.Thread(target=mine.run_forever, daemon=True).start()
    gate = AsyncGate()
    registration = on(mine, lambda: handle(services, gate))
    other = record(services)
    post(admin, 1, 2)
    gate.wait()
    mine.call_soon_threadsafe(mine.stop)
    eventually(lambda: not mine.is_running(), "the loop has stopped")
    for task in asyncio.all_tasks(mine):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # which is true, but not what this is about
    mine.close()
    flush(admin)
    assert other.numbers == [1, 2]
    assert dto(admin, registration).blocked == "the event loop it ran on is closed"  # type: ignore[union-attr]
    assert logged(caplog, "is blocked: the event loop it ran on is closed")


def test_a_loop_may_be_closed_before_a_coroutine_begins_on_it(admin: EventAdmin, services: ServiceRegistry) -> None:
    """Then nobody awaits it, and nobody complains about that."""
    mine = asyncio.new_event_loop()
    recorder, other = AsyncRecorder(), record(services)

    async def register() -> Any:
        return handle(services, recorder)

    registration = mine.run_until_complete(register())
    post(admin, 1, 2)
    eventually(lambda: mine._ready, "it is about to begin")  # type: ignore[attr-defined]
    mine.close()
    flush(admin)
    gc.collect()
    assert (recorder.numbers, other.numbers) == ([], [1, 2])
    assert dto(admin, registration).blocked == "the event loop it ran on is closed"  # type: ignore[union-attr]


# --- how much


def test_flooding_makes_whoever_posts_wait(admin: EventAdmin, services: ServiceRegistry) -> None:
    """Scenario 42; RFC 97 8.1.2: an implementation MAY limit the rate. Nothing is lost, and all is in order."""
    admin._queue._limit = 10
    gate = Gate()
    handle(services, gate)
    posted: list[int] = []

    def flood() -> None:
        for number in range(100):
            post(admin, number)
            posted.append(number)

    join = in_background(flood)
    eventually(lambda: len(posted) >= 10, "it has found room for some")
    gate.wait()
    threading.Event().wait(MOMENT)
    assert len(posted) <= 12
    gate.opened.set()
    join()
    flush(admin)
    assert gate.numbers == [*range(100)]


@pytest.mark.parametrize("delivery", ["async.ordered", "async.unordered"])
def test_what_finds_no_room_is_counted_and_logged(
    admin: EventAdmin,
    services: ServiceRegistry,
    delivery: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Scenario 42: never without an entry in the log."""
    monkeypatch.setattr(lanes, "_PATIENCE", 0.01)
    gate = Gate()
    registration = handle(services, gate, delivery=delivery)
    lane = admin.lifecycle.lanes()[-1]  # of the handler, or the only one
    lane._limit = 10
    post(admin, 0)
    gate.wait()
    post(admin, *range(1, 20))
    gate.opened.set()
    flush(admin)
    assert gate.numbers == [*range(11)]
    assert dto(admin, registration).dropped == 9  # type: ignore[union-attr]
    assert len(logged(caplog, "does not keep up", level=logging.ERROR)) == 1


def test_event_loops_and_handlers_do_not_wait_for_room(
    admin: EventAdmin, services: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 42: they would wait for themselves."""
    admin._queue._limit = 10

    def flood(event: Event) -> None:
        post(admin, *range(60))

    handle(services, flood, "flood")
    recorder = record(services, "a")
    admin.post_event(Event("flood"))
    eventually(lambda: len(recorder.events) == 60, "all")
    flush(admin)

    async def main() -> None:
        gate = Gate()
        with handle(services, gate, "b"):
            post(admin, *range(60), topic="b")
            gate.opened.set()
            await admin.flush()
        assert gate.numbers == [*range(60)]

    asyncio.run(main())
    assert recorder.numbers == [*range(60)]
    assert not logged(caplog)


class OwnThread(threading.Thread):
    """One that can be told from others."""


def test_a_thread_that_posted_leaves_nothing_behind(admin: EventAdmin, services: ServiceRegistry) -> None:
    """Scenario 43."""
    recorder = Recorder()
    handle(services, recorder)
    weak: list[weakref.ref[Any]] = []

    def run(number: int) -> None:
        for each in range(10):
            event = Event("a", {"n": (number, each)})
            weak.append(weakref.ref(event))
            admin.post_event(event)

    def all_of_them() -> None:
        threads = [OwnThread(target=run, args=(number,)) for number in range(20)]
        for thread in threads:
            weak.append(weakref.ref(thread))
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

    all_of_them()
    flush(admin)
    assert len(recorder.events) == 200
    recorder.events.clear()
    gc.collect()
    # the delivery thread may still be on its way out with the last event in its hands
    eventually(lambda: not [each for each in weak if each() is not None], "all gone")


def test_delivery_threads_go_when_there_is_nothing_to_do(admin: EventAdmin, services: ServiceRegistry) -> None:
    """RFC 97 4.1.2 [9], 4.1.5 [24]: there should be only one event thread, and not even that without events."""
    recorder = record(services)
    post(admin, *range(500))
    flush(admin)
    assert len(set(recorder.threads)) == 1
    eventually(lambda: admin.get_dto().threads == 0, "it has gone")

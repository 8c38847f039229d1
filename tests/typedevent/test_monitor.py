"""Observing a bus (157.6, 157.11): all events are seen, and no publisher or handler is delayed."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, Final

import pytest
import reactivex
from reactivex import Observable
from reactivex import operators as ops
from reactivex.internal.exceptions import SequenceContainsNoElementsError
from reactivex.scheduler.eventloop import AsyncIOThreadSafeScheduler

from messaging.errors import ArgumentError, ClosedError, InvalidTopicError, NullEventError
from messaging.execution import LIMIT
from messaging.services import ServiceRegistry
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, within
from messaging.typedevent import MonitorEvent, RangePolicy, Tolerance, TopicPermission, TopicPolicy
from tests.dispatch.helpers import FILTERS, NEITHER
from tests.threads import in_background
from tests.typedevent.conftest import Bus, Recorder, matches, own_bus

EVERYTHING = {"*": RangePolicy.unlimited()}


@pytest.fixture
def policies() -> dict[str, RangePolicy]:
    return EVERYTHING


class Watching(waiting.Recorder[MonitorEvent]):
    """Observes, and records what it is given; ``act`` is called first with each event."""

    def __init__(
        self, source: Observable[MonitorEvent], act: Callable[[MonitorEvent], object] = lambda event: None
    ) -> None:
        super().__init__(act)
        self.subscription = source.subscribe(self)

    def on_next(self, item: MonitorEvent) -> None:
        super().on_next(item)
        assert self.error is None
        assert not self.is_completed

    @property
    def numbers(self) -> list[int]:
        return [event.event_data["n"] for event in self]

    def has(self, *numbers: int) -> None:
        """These, and no others until now."""
        self.wait_for(len(numbers))
        assert self.numbers == [*numbers]

    def completes(self) -> None:
        self.wait_completed()
        assert self.error is None

    def errs(self) -> Exception:
        error = self.wait_error()
        assert not self.is_completed
        return error


class Stuck(Watching):
    """Observes, and returns from each event once it is opened."""

    def __init__(self, source: Observable[MonitorEvent]) -> None:
        self.begun: waiting.Recorder[MonitorEvent] = waiting.Recorder()
        self.opened = threading.Event()
        super().__init__(source, self._stay)

    def _stay(self, event: MonitorEvent) -> None:
        self.begun.append(event)
        assert self.opened.wait(6 * PATIENCE)


def past(bus: Bus, history: int | datetime, **options: Any) -> list[int]:
    """Return the numbers of the events of the history."""
    watching = Watching(bus.monitor.monitor_events(history, True, **options))
    watching.completes()
    return watching.numbers


def publish(bus: Bus, *numbers: int, topic: str = "a") -> None:
    for number in numbers:
        bus.deliver_untyped(topic, {"n": number})


# --- the observed events


@dataclasses.dataclass
class Item:
    price: float


@dataclasses.dataclass
class Order:
    n: int
    items: list[Item]
    _secret: str = "hush"


def test_each_event_is_seen_with_topic_data_in_map_form_and_time(bus: Bus) -> None:
    """Scenario 81; 157.6, 157.11.2: data in map form even if published typed, at every level."""
    watching = Watching(bus.monitor.monitor_events())
    before = datetime.now(UTC)
    bus.deliver(Order(1, [Item(2.5)]), "orders")
    bus.deliver_untyped("a", {"n": 2, "more": {"x": [1]}})
    with bus.create_publisher("b") as publisher:
        publisher.deliver(Order(3, []))
    watching.has(1, 2, 3)
    after = datetime.now(UTC)
    one, two, three = watching
    assert (one.topic, one.event_data) == ("orders", {"n": 1, "items": [{"price": 2.5}]})
    assert (two.topic, two.event_data) == ("a", {"n": 2, "more": {"x": [1]}})
    assert (three.topic, three.event_data) == ("b", {"n": 3, "items": []})
    times = [event.publication_time for event in watching]
    assert all(each.tzinfo is UTC for each in times)
    assert times == sorted(times)
    assert before - timedelta(microseconds=1) <= times[0]
    assert times[-1] <= after + timedelta(microseconds=1)


def test_unhandled_and_filtered_out_events_are_seen_and_watching_is_not_handling(bus: Bus) -> None:
    """Scenarios 81 and 61; 157.6. Refused events are not seen."""
    left = Recorder().unhandled(bus)
    bus.on("a", filter="(n=5)", handler=lambda topic, event: None)
    bus.on("b", handler=lambda topic, event: None)
    watching = Watching(bus.monitor.monitor_events())
    for topic, event in (("a//b", {}), ("a", None), ("a", 5)):
        with pytest.raises(ArgumentError):
            bus.deliver(event, topic)
    bus.numbered("a 1", "a 5", "b 3", "c 4")
    watching.has(1, 5, 3, 4)
    bus.drain()
    assert left.of("n") == [1, 4]
    with pytest.raises(dataclasses.FrozenInstanceError):
        watching[0].topic = "b"  # type: ignore[misc]


def test_the_time_is_that_of_publishing(bus: Bus) -> None:
    """Scenario 13; 157.6, 157.11.2.2: not of delivery, nor of looking back."""
    slow = Stuck(bus.monitor.monitor_events())
    publish(bus, 1, 2)
    published = datetime.now(UTC)
    eventually(lambda: datetime.now(UTC) > published + timedelta(milliseconds=50), "later")
    slow.opened.set()
    slow.has(1, 2)
    again = Watching(bus.monitor.monitor_events(2, True))
    again.completes()
    assert again == slow
    assert all(event.publication_time <= published + timedelta(microseconds=1) for event in slow)


def test_an_event_that_has_no_map_form_is_left_out_and_logged(bus: Bus) -> None:
    """It is no tree, or a field cannot be read: the observer gets no error for that."""

    class Unreadable:
        n: int

        @property
        def topic(self) -> str:
            return "x"

        def __getattribute__(self, name: str) -> Any:
            if name == "n":
                raise SystemError("no paper")
            return object.__getattribute__(self, name)

    watching = Watching(bus.monitor.monitor_events())
    own: list[Any] = []
    own.append(own)
    bus.deliver(Order(1, own), "bad/tree")
    bus.deliver(Unreadable(), "bad/fields")
    publish(bus, 2)
    watching.has(2)
    assert watching.error is None
    for topic in ("bad/tree", "bad/fields"):
        assert f"{bus.name!r}: an event on {topic!r} is hidden from a monitor's observer" in bus.caplog.text


# --- past and present (157.6.1)


CALENDARS: Final = [None, UTC, timezone(timedelta(hours=14)), timezone(timedelta(hours=-14))]


@table("is_empty", [False, True])
@table(
    "history",
    [
        *(0, 2, 10, datetime(2020, 1, 1, tzinfo=UTC)),
        *(end.replace(tzinfo=zone) for end in (datetime.min, datetime.max) for zone in CALENDARS),
    ],
)
def test_history_only_completes_after_the_history_even_if_there_is_none(
    history: int | datetime, is_empty: bool
) -> None:
    """Scenario 79; 157.6.1, 157.11.4.8, 157.11.4.10: and what comes is not seen."""
    with Bus(ServiceRegistry(), history={} if is_empty else EVERYTHING) as bus:
        publish(bus, 1, 2, 3)
        watching = Watching(bus.monitor.monitor_events(history, True))
        publish(bus, 4)
        watching.completes()
        expected = (
            []
            if is_empty or history == 0 or (isinstance(history, datetime) and history.year == 9999)
            else [2, 3]
            if history == 2
            else [1, 2, 3]
        )
        assert watching.numbers == expected
        assert bus.get_dto().monitors == 0


class Nowhere(tzinfo):
    """A zone that does not know where it is; times in it are as good as naive."""

    def utcoffset(self, when: datetime | None) -> None:
        return None

    def dst(self, when: datetime | None) -> None:
        return None

    def tzname(self, when: datetime | None) -> str:
        return "nowhere"


ZONES: list[Callable[[datetime], datetime]] = [
    lambda time: time,
    lambda time: time.astimezone(timezone(timedelta(hours=14))),
    lambda time: time.astimezone().replace(tzinfo=None),  # naive: local time
    lambda time: time.astimezone().replace(tzinfo=Nowhere()),
]


@table("zone", ZONES)
@own_bus
def test_events_at_or_after_an_instant_come_first(bus: Bus, zone: Callable[[datetime], datetime]) -> None:
    """Scenario 80; 157.6.1, 157.11.4.9: to the microsecond, in whatever zone."""
    for number in range(5):
        publish(bus, number, topic=f"t{number % 2}")
        before = time.time()
        eventually(lambda: time.time() > before + 2e-6, "the clock goes on")  # noqa: B023
    watching = Watching(bus.monitor.monitor_events(10, True))
    watching.completes()
    for number, event in enumerate(watching):
        instant = zone(event.publication_time)
        assert past(bus, instant) == [*range(number, 5)]
        assert past(bus, instant + timedelta(microseconds=1)) == [*range(number + 1, 5)]
    live = Watching(bus.monitor.monitor_events(zone(watching[3].publication_time)))
    publish(bus, 5)
    live.has(3, 4, 5)


def test_an_instant_to_come_leaves_out_nothing_that_comes(bus: Bus) -> None:
    """It says which of the past are wanted."""
    publish(bus, 1)
    watching = Watching(bus.monitor.monitor_events(datetime.now(UTC) + timedelta(hours=1)))
    publish(bus, 2)
    watching.has(2)


@table("history", [-1, 1.0, "1", True, False, [1], datetime.now(UTC).date(), timedelta(1)])
@own_bus
def test_a_history_that_is_neither_a_number_of_events_nor_an_instant_is_refused(bus: Bus, history: Any) -> None:
    """When it is asked for, not when it is subscribed to."""
    with pytest.raises(ArgumentError, match="history must be an int of at least 0, or a datetime"):
        bus.monitor.monitor_events(history)
    with pytest.raises(NullEventError):
        bus.monitor.monitor_events(None)  # type: ignore[call-overload]
    for history_only in (None, 1, 0, "yes"):
        with pytest.raises(ArgumentError, match="history_only must be a bool"):
            bus.monitor.monitor_events(1, history_only)  # type: ignore[call-overload]


def test_each_subscription_to_an_observable_begins_when_it_is_made(bus: Bus) -> None:
    publish(bus, 1, 2)
    source = bus.monitor.monitor_events(2)
    publish(bus, 3)
    one = Watching(source)
    publish(bus, 4)
    two = Watching(source)
    one.has(2, 3, 4)
    two.has(3, 4)
    one.subscription.dispose()
    publish(bus, 5)
    two.has(3, 4, 5)
    assert one.numbers == [2, 3, 4]
    assert bus.get_dto().monitors == 1


# --- the end


def test_it_completes_when_the_bus_is_closed_after_all_that_was_published(bus: Bus) -> None:
    slow, quick = Stuck(bus.monitor.monitor_events()), Watching(bus.monitor.monitor_events())
    publish(bus, *range(100))
    bus.close()
    slow.opened.set()
    for each in (slow, quick):
        each.completes()
        assert each.numbers == [*range(100)]
    assert bus.get_dto().monitors == 0


@table("arguments", [(), (5,), (5, True), (datetime.min,), (datetime.min, True)])
@own_bus
def test_a_subscription_to_a_closed_bus_errors_and_does_not_raise(bus: Bus, arguments: Any) -> None:
    source = bus.monitor.monitor_events(*arguments)
    publish(bus, 1)
    bus.close()
    for each in (source, bus.monitor.monitor_events(*arguments), source.pipe(ops.map(lambda event: event))):
        watching = Watching(each)
        error = watching.errs()
        assert isinstance(error, ClosedError)
        assert bus.name in str(error)
        assert watching == []
        watching.subscription.dispose()
    with pytest.raises(ClosedError):
        source.subscribe(lambda event: None)  # there is no on_error to call
    with pytest.raises(ClosedError):
        source.run()


def test_closing_and_subscribing_at_once_end_one_way_or_the_other() -> None:
    for _ in range(50):
        bus = Bus(ServiceRegistry(), history=EVERYTHING)
        publish(bus, 1)
        found: list[Watching] = []

        def subscribe(bus: Bus = bus, found: list[Watching] = found) -> None:
            for _ in range(20):
                found.append(Watching(bus.monitor.monitor_events(5)))

        thread = threading.Thread(target=subscribe, daemon=True)
        thread.start()
        bus.close()
        thread.join(PATIENCE)
        assert len(found) == 20
        for each in found:
            assert isinstance(each.wait_ended(), ClosedError | None)
            assert each.numbers == ([1] if each.is_completed else [])
        assert bus.get_dto().monitors == 0


def test_a_disposed_subscription_sees_nothing_more(bus: Bus) -> None:
    """Scenario 82: nor does it complete."""
    watching = Watching(bus.monitor.monitor_events())
    publish(bus, 1)
    watching.has(1)
    watching.subscription.dispose()
    watching.subscription.dispose()
    assert bus.get_dto().monitors == 0
    publish(bus, 2)
    other = Watching(bus.monitor.monitor_events(1))
    other.has(2)
    bus.close()
    other.completes()
    assert (watching.numbers, watching.is_completed, watching.error) == ([1], False, None)


def test_an_observer_may_dispose_of_itself(bus: Bus) -> None:
    publish(bus, *range(5))
    subscribed = threading.Event()

    def stop(event: MonitorEvent) -> None:
        if event.event_data["n"] == 2:
            assert subscribed.wait(PATIENCE)
            watching.subscription.dispose()

    watching = Watching(bus.monitor.monitor_events(10), stop)
    subscribed.set()
    watching.wait_for(3)
    publish(bus, 5)
    Watching(bus.monitor.monitor_events(1)).has(5)
    bus.drain()
    assert watching.numbers == [0, 1, 2]


class Tracked:
    def __init__(self) -> None:
        self.n = 1


@table("how", ["disposed", "raised", "taken", "only history", "closed"])
def test_an_ended_subscription_retains_nothing(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 82: neither the observer nor what waited for it."""
    caplog.set_level(logging.CRITICAL + 1, "messaging.typedevent.monitor")  # log records keep tracebacks, and so frames
    with Bus(ServiceRegistry(), history={"first": RangePolicy.at_most(1)}) as bus:
        begun, gate = waiting.Recorder[str](), threading.Event()

        def wait(event: MonitorEvent) -> None:
            begun.append(event.topic)
            assert gate.wait(PATIENCE)
            if how == "raised":
                raise LookupError("no paper")

        publish(bus, 0, topic="first")
        source = bus.monitor.monitor_events(1, how == "only history")
        watching = Watching(source.pipe(ops.take(1)) if how == "taken" else source, wait)
        begun.wait_for(1)
        tracked = Tracked()
        bus.deliver(tracked, "tracked")  # waits for the observer
        refs: list[weakref.ref[Any]] = [weakref.ref(tracked), weakref.ref(watching)]
        if how == "disposed":
            watching.subscription.dispose()
            del tracked
            assert refs[0]() is None  # at once, whatever the observer is doing
            tracked = Tracked()
        elif how == "closed":
            bus.close()
        gate.set()
        if how == "raised":
            assert isinstance(watching.errs(), LookupError)
        elif how != "disposed":
            watching.completes()
        assert bus.get_dto().monitors == 0
        del tracked, watching, source, wait
        # the delivery thread may still be on its way back
        eventually(lambda: gc.collect() >= 0 and not any(each() for each in refs), "all is gone")


# --- observers that are slow, or fail


def test_a_slow_observer_misses_the_oldest_which_are_counted_and_logged_once(bus: Bus) -> None:
    """Scenario 82; 157.6: publishers and handlers go on."""
    bus.monitor.limit = 10
    handled = Recorder().untyped(bus, "a")
    slow, quick = Stuck(bus.monitor.monitor_events()), Watching(bus.monitor.monitor_events())
    publish(bus, 0)
    slow.begun.wait_for(1)
    for number in range(1, 101, 5):
        publish(bus, *range(number, number + 5))
        quick.has(*range(number + 5))
    bus.drain()
    assert handled.of("n") == [*range(101)]
    assert bus.get_dto().missed == 90
    slow.opened.set()
    slow.has(0, *range(91, 101))
    publish(bus, 101)
    eventually(lambda: slow.numbers[-1] == 101, "the last one")
    said = [each for each in bus.caplog.records if f"{bus.name!r}: a monitor's observer is" in each.getMessage()]
    assert len(said) == 1
    slow.subscription.dispose()
    assert bus.get_dto().missed == 90  # missed events stay counted


def test_a_monitor_that_lags_is_logged_without_any_lock_of_the_bus(bus: Bus) -> None:
    """A log handler may publish the records on another thread and wait for it."""

    class Publishing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if bus.name in record.getMessage():
                in_background(lambda: publish(bus, -1))()
                published.append(record.getMessage())

    bus.monitor.limit = 1
    published: waiting.Recorder[str] = waiting.Recorder()
    stuck = Stuck(bus.monitor.monitor_events())
    handler = Publishing()
    logging.getLogger("messaging").addHandler(handler)
    try:
        publish(bus, *range(5))
        published.wait_for(1)
    finally:
        logging.getLogger("messaging").removeHandler(handler)
        stuck.opened.set()
    assert len(published) == 1
    assert -1 in [event.data["n"] for event in bus._history.all()]


def test_publishers_do_not_wait_for_an_observer_that_never_returns(bus: Bus) -> None:
    """157.6: without having the measurements disrupt the system. Nor does closing."""
    stuck = Stuck(bus.monitor.monitor_events())
    count = LIMIT + 500
    publish(bus, *range(count))
    bus.close()
    assert stuck == []
    assert count - LIMIT - 1 <= bus.get_dto().missed <= count - LIMIT
    stuck.opened.set()
    stuck.completes()
    assert stuck.numbers[-1] == count - 1


def test_observers_take_no_threads_of_handlers() -> None:
    """157.6."""
    with Bus(ServiceRegistry(), threads=1) as bus:
        stuck = [Stuck(bus.monitor.monitor_events()) for _ in range(3)]
        handled = Recorder().untyped(bus, "a")
        publish(bus, 1)
        for each in stuck:
            each.begun.wait_for(1)
        publish(bus, 2)
        bus.drain()
        assert handled.of("n") == [1, 2]
        for each in stuck:
            each.opened.set()
            each.has(1, 2)


def test_an_observer_is_not_blocked_however_long_it_takes() -> None:
    tolerance = Tolerance(failures=1, timeout=0.01)
    with Bus(ServiceRegistry(), tolerance=tolerance) as bus:
        late = threading.Event()
        bus.on("slow", handler=lambda topic, event: late.wait(PATIENCE))
        watching = Watching(bus.monitor.monitor_events(), lambda event: late.wait(PATIENCE))
        publish(bus, 1, 2, topic="slow")
        # the handler was given up, the observer was not, though it took as long
        eventually(lambda: bus.get_dto().handlers[0].blocked, "the handler is blocked")
        late.set()
        watching.has(1, 2)


def test_an_observer_that_raises_gets_its_error_and_no_one_else_does(bus: Bus) -> None:
    handled = Recorder().untyped(bus, "a")

    def fail(event: MonitorEvent) -> None:
        if event.event_data["n"] == 2:
            raise LookupError("no paper")

    failing = Watching(bus.monitor.monitor_events(), fail)
    piped = Watching(bus.monitor.monitor_events().pipe(ops.do_action(fail)))
    others = [Watching(bus.monitor.monitor_events()), Watching(bus.monitor.monitor_events())]
    publish(bus, *range(5))
    for each in (failing, piped):
        assert isinstance(each.errs(), LookupError)
        assert each.numbers == [0, 1]
    for each in others:
        each.has(*range(5))
    bus.drain()
    assert handled.of("n") == [*range(5)]
    eventually(lambda: bus.get_dto().monitors == 2, "they are gone")
    assert bus.caplog.text.count(f"{bus.name!r}: a monitor's observer failed") == 1  # the other one told itself
    for error in (KeyboardInterrupt, SystemExit, GeneratorExit):  # as an exception

        def fail_badly(event: MonitorEvent, error: type[BaseException] = error) -> None:
            raise error

        failing = Watching(bus.monitor.monitor_events(), fail_badly)
        publish(bus, 5)
        assert error.__name__ in repr(failing.errs())


@table("where", ["on_error", "on_completed", "no on_error"])
@own_bus
def test_an_observer_that_raises_at_its_end_is_logged_and_affects_no_other(bus: Bus, where: str) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("no paper")

    other = Watching(bus.monitor.monitor_events())
    source = bus.monitor.monitor_events()
    if where == "on_completed":
        source.subscribe(on_completed=fail)
    else:
        source.subscribe(fail, fail if where == "on_error" else None)
    publish(bus, 1)
    other.has(1)
    bus.close()
    other.completes()
    eventually(lambda: f"{bus.name!r}: a monitor's observer failed" in bus.caplog.text, "it is logged")
    assert bus.get_dto().monitors == 0


# --- with the operators of Rx


def test_operators_work_on_the_observed_events(bus: Bus) -> None:
    def number(event: Any) -> int:
        found: int = event.event_data["n"]
        return found

    def is_odd(event: Any) -> bool:
        return number(event) % 2 == 1

    publish(bus, *range(5))
    watch: Any = bus.monitor.monitor_events
    assert watch(3, True).pipe(ops.map(number), ops.to_list()).run() == [2, 3, 4]
    assert watch(10).pipe(ops.take(1)).run().event_data == {"n": 0}
    assert watch(10).pipe(ops.filter(is_odd), ops.first()).run().event_data == {"n": 1}
    assert watch(10, True).pipe(ops.count()).run() == 5
    twice = reactivex.concat(watch(1, True), watch(2, True))
    assert twice.pipe(ops.map(number), ops.to_list()).run() == [4, 3, 4]
    with pytest.raises(SequenceContainsNoElementsError):
        watch(0, True).run()
    eventually(lambda: bus.get_dto().monitors == 0, "all have unsubscribed")


def test_observed_events_can_be_awaited_on_an_event_loop(bus: Bus) -> None:
    """Observers are called on delivery threads: an ``observe_on`` brings it to the loop."""
    publish(bus, 1, 2)

    async def look() -> tuple[MonitorEvent, MonitorEvent]:
        on_loop: Any = ops.observe_on(AsyncIOThreadSafeScheduler(asyncio.get_running_loop()))
        last: Any = bus.monitor.monitor_events(5, True).pipe(on_loop, ops.to_future())
        following: Any = bus.monitor.monitor_events().pipe(on_loop, ops.take(1), ops.to_future())
        publish(bus, 3)
        return await within(last), await within(following)

    last, following = asyncio.run(look())
    assert (last.event_data["n"], following.event_data["n"]) == (2, 3)


def test_an_observer_may_publish_and_watch(bus: Bus) -> None:
    inner: list[Watching] = []

    def publish_more(event: MonitorEvent) -> None:
        if event.topic == "a":
            publish(bus, event.event_data["n"] + 10, topic="b")
            inner.append(Watching(bus.monitor.monitor_events(1)))

    watching = Watching(bus.monitor.monitor_events(), publish_more)
    publish(bus, 1)
    watching.has(1, 11)
    inner[0].has(11)


# --- with permissions (157.8.2)


def test_a_monitor_shows_the_topics_that_its_principal_may_subscribe_to() -> None:
    """Past and present; without a principal, the topics that are permitted without one."""
    policy = TopicPolicy(
        {
            None: [TopicPermission("*", "publish"), TopicPermission("public/*", "subscribe")],
            "auditor": [TopicPermission("*", "subscribe")],
            "publisher": [TopicPermission("*", "publish")],
        }
    )
    with Bus(ServiceRegistry(), history=EVERYTHING, permissions=policy) as bus:
        topics = ["public/a", "secret/a", "public/b", "secret/b"]
        seen: dict[str | None, list[int]] = {None: [0, 2], "auditor": [0, 1, 2, 3], "publisher": [], "stranger": []}
        for number, topic in enumerate(topics):
            publish(bus, number, topic=topic)
        live = {who: Watching(bus.monitor.monitor_events(principal=who)) for who in seen}
        for who, numbers in seen.items():
            assert past(bus, 10, principal=who) == numbers
            assert past(bus, 1, principal=who) == numbers[-1:]  # events that it may not see do not count
            assert past(bus, datetime.min, principal=who) == numbers
        for number, topic in enumerate(topics):
            publish(bus, number, topic=topic)
        bus.close()
        for who, each in live.items():
            each.completes()
            assert each.numbers == seen[who]


def test_granted_and_revoked_topics_apply_from_then_on() -> None:
    policy = TopicPolicy({None: [TopicPermission("*", "publish")]})
    with Bus(ServiceRegistry(), history=EVERYTHING, permissions=policy) as bus:
        watching = Watching(bus.monitor.monitor_events(principal="auditor"))
        publish(bus, 1)
        policy.grant("auditor", TopicPermission("a", "subscribe"))
        publish(bus, 2)
        publish(bus, 3, topic="b")
        policy.revoke("auditor")
        publish(bus, 4)
        policy.grant("auditor", TopicPermission("*", "subscribe"))
        publish(bus, 5, topic="b")
        watching.has(2, 5)


def test_a_policy_that_raises_leaves_no_observer_behind() -> None:
    class Broken(TopicPolicy):
        is_broken = False

        def permits(self, principal: str | None, permission: TopicPermission) -> bool:
            if self.is_broken:
                raise LookupError("no paper")
            return True

    policy = Broken()
    with Bus(ServiceRegistry(), history=EVERYTHING, permissions=policy) as bus:
        publish(bus, 1)
        policy.is_broken = True
        watching = Watching(bus.monitor.monitor_events(1))
        assert isinstance(watching.errs(), LookupError)
        assert bus.get_dto().monitors == 0


# --- matching topics (157.11.4.12, 157.11.4.13)


def test_both_forms_of_matching_agree(bus: Bus) -> None:
    """Scenario 83; 157.4.3."""
    levels = ("a", "B", "-", "+")
    filters = ["/".join(each) for count in (1, 2, 3) for each in itertools.product(levels, repeat=count)]
    filters += ["*", *(f"{each}/*" for each in filters if each.count("/") < 2)]
    topics = ["/".join(each) for count in (1, 2, 3) for each in itertools.product(("a", "b", "B", "-"), repeat=count)]
    for topic_filter in filters:
        tells = bus.monitor.topic_filter_matches(topic_filter)
        for topic in topics:
            wanted = matches(topic_filter, topic)
            assert tells(topic) is bus.monitor.topic_filter_matches(topic, topic_filter) is wanted


def test_matching_refuses_invalid_filters_and_topics(bus: Bus) -> None:
    """Scenario 83: null arguments are the null-type error, others the argument error."""
    match: Any = bus.monitor.topic_filter_matches
    for arguments in ((None,), (None, "a"), ("a", None), (None, None)):
        with pytest.raises(NullEventError):
            match(*arguments)
    with pytest.raises(NullEventError):
        match("a")(None)
    for bad in [*NEITHER, 5, b"a", ["a"]]:
        with pytest.raises(InvalidTopicError):
            match(bad)
        with pytest.raises(InvalidTopicError):
            match("a", bad)
    for bad in [*NEITHER, *FILTERS, 5, b"a", ["a"]]:
        with pytest.raises(InvalidTopicError):
            match("*")(bad)
        with pytest.raises(InvalidTopicError):
            match(bad, "*")
    with pytest.raises(ArgumentError):
        match()
    with pytest.raises(ArgumentError):
        match("a", "a", "a")


# --- waiting for observers


def test_flushing_waits_for_all_observers(bus: Bus) -> None:
    slow, fast = Stuck(bus.monitor.monitor_events()), Watching(bus.monitor.monitor_events())
    publish(bus, *range(10))
    flushed = bus.monitor.flush()
    fast.has(*range(10))
    assert not flushed.done()
    slow.opened.set()
    flushed.result(PATIENCE)
    assert slow.numbers == [*range(10)]
    assert bus.monitor.flush().result(PATIENCE) is None
    slow.opened.clear()
    publish(bus, 10)
    bus.close()  # events that observers receive after closing count, too
    flushed = bus.monitor.flush()
    assert not flushed.done()
    slow.opened.set()
    flushed.result(PATIENCE)
    assert slow.numbers == [*range(11)]
    assert slow.is_completed

"""Handlers that raise or hang (157.4.6): they harm no other handler, and are blocked. More: ``tests/dispatch``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from messaging.errors import ArgumentError
from messaging.services import ServiceRegistration, ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import Tolerance
from tests.dispatch.helpers import Stubborn
from tests.typedevent.conftest import SOON, Bus, Failing, Gate, Order, Recorder, coroutine_of, named, own_bus

FAILURES = Tolerance().failures


class Hanging(Gate):
    """Returns when it is told to; gates are opened at the end of each test."""

    all: ClassVar[list[Gate]] = []

    def __init__(self) -> None:
        super().__init__()
        self.all.append(self)


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    while Hanging.all:
        Hanging.all.pop().opened.set()


def until_blocked(bus: Bus, handler: ServiceRegistration | Recorder) -> str | None:
    registration = handler.registration if isinstance(handler, Recorder) else handler
    return eventually(lambda: bus.blocked(registration), "it is blocked")


# --- handlers that raise


def test_a_handler_that_keeps_raising_is_blocked_and_that_is_logged(bus: Bus) -> None:
    """Scenario 63; 157.4.6: it is not called any more, and others are."""
    failing = Failing(LookupError("not here")).untyped(bus, ["a", "b/*"])
    other = Recorder().untyped(bus, "a")
    bus.send_each(range(FAILURES - 1))
    assert bus.blocked(failing.registration) is None
    bus.send_each(range(FAILURES - 1, FAILURES + 5))
    assert failing.of("n") == [*range(FAILURES)]
    assert other.of("n") == [*range(FAILURES + 5)]
    assert bus.blocked(failing.registration) == f"it failed on {FAILURES} events in a row"
    eventually(lambda: bus.logged("is blocked", level=logging.ERROR), "it is logged")
    (text,) = bus.logged("is blocked", level=logging.ERROR)
    reference = repr(failing.registration.reference)
    for part in (bus.name, reference, "Failing", "a, b/*", f"{FAILURES} events in a row", "update"):
        assert part in text
    assert len(bus.logged("failed on an event on 'a'", "not here")) == FAILURES


def test_handlers_of_all_kinds_are_blocked(bus: Bus) -> None:
    """157.4.6."""
    error = ValueError("no")
    failing = [Failing(error).typed(bus, "a", type=Order), Failing(error).unhandled(bus, "b")]
    hanging = Hanging().typed(bus, "a", type=Order, timeout=SOON)
    for number in range(FAILURES + 2):
        bus.deliver(Order(number), "a")
        bus.deliver(Order(number), "b")
    for each in (*failing, hanging):
        until_blocked(bus, each)
    assert failing[0].data == [Order(number) for number in range(FAILURES)]
    assert failing[1].of("id") == [*range(FAILURES)]
    assert hanging.data == [Order(0)]


def test_failures_count_in_a_row(bus: Bus) -> None:
    """Not in all: a handler that fails now and then is not blocked."""
    failing, later = Failing(), Failing()
    registrations = [bus.untyped(each, "a") for each in (failing, coroutine_of(later))]
    for _ in range(5):
        failing.error = later.error = ValueError("no")
        bus.send_each(range(FAILURES - 1))
        failing.error = later.error = None
        bus.send_each([0])
    assert [bus.blocked(each) for each in registrations] == [None, None]
    assert len(failing.events) == len(later.events) == 5 * FAILURES
    failing.error = later.error = ValueError("no")
    bus.send_each(range(FAILURES))
    assert all(bus.blocked(each) for each in registrations)


@table("failures", [1, 3, 0])
def test_how_many_failures_are_tolerated_may_be_said(services: ServiceRegistry, failures: int) -> None:
    """Scenario 65; 0: any number."""
    with Bus(services, tolerance=Tolerance(failures=failures)) as bus:
        failing = Failing(ValueError("no")).untyped(bus, "a")
        bus.send_each(range(50))
        assert len(failing.events) == (failures or 50)
        assert bool(bus.blocked(failing.registration)) == bool(failures)


@table(
    "bad",
    [
        *({"failures": each} for each in (-1, 1.5, True, "1")),
        *({"timeout": each} for each in (-1, float("inf"), float("nan"), "1", None)),
    ],
)
def test_an_invalid_tolerance_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="must be"):
        Tolerance(**bad)


@table(
    "properties",
    [named("a"), named(["a", "b"]), named("*", filter="(n>=0)"), named("a", ranking=7, timeout=9)],
    ids=["same", "topics", "filter", "others"],
)
@own_bus
def test_an_update_lifts_the_block(bus: Bus, properties: dict[str, Any]) -> None:
    """Scenario 64; 157.4.6: whatever property is updated. Events published meanwhile are not delivered."""
    failing = Failing(ValueError("no")).untyped(bus, "a")
    bus.send_each(range(FAILURES + 2))
    assert bus.blocked(failing.registration)
    failing.events.clear()
    failing.error = None
    failing.registration.update(properties)
    assert bus.blocked(failing.registration) is None
    bus.send_each(range(100, 120))
    assert failing.of("n") == [*range(100, 120)]


def test_a_block_comes_back_only_after_as_many_failures_as_at_first(bus: Bus) -> None:
    """Scenario 64; 157.4.6: if it misbehaves again, the block may be reinstated."""
    failing = Failing(ValueError("no")).untyped(bus, "a")
    for round_ in range(3):
        failing.registration.update(named("a"))
        bus.send_each(range(FAILURES - 1))
        assert bus.blocked(failing.registration) is None
        bus.send_each(range(3))
        assert bus.blocked(failing.registration)
        assert len(failing.events) == FAILURES * (round_ + 1)
    eventually(lambda: len(bus.logged("is blocked")) == 3, "it is logged")


def test_registering_it_again_is_a_new_beginning(bus: Bus) -> None:
    failing = Failing(ValueError("no"))
    registration = bus.untyped(failing, "a")
    bus.send_each(range(FAILURES))
    registration.unregister()
    failing.events.clear()
    registration = bus.untyped(failing, "a")
    bus.send_each(range(FAILURES - 1))
    assert len(failing.events) == FAILURES - 1
    assert bus.blocked(registration) is None


def test_pending_events_of_a_blocked_handler_are_dropped_and_counted(bus: Bus) -> None:
    """Scenario 65: the state is there to be seen."""
    gate = Hanging()

    def handle(topic: str, event: Any) -> None:
        gate.notify(topic, event)
        raise ValueError("no")

    registration = bus.untyped(handle, "a")
    bus.count(range(FAILURES + 15))
    gate.wait()
    found = bus.state_of(registration)
    assert (found.waiting, found.failures, found.dropped, found.blocked) == (FAILURES + 14, 0, 0, None)
    gate.opened.set()
    until_blocked(bus, registration)
    eventually(lambda: (bus.handler_of(registration) or found).dropped == 15, "the others are given up")
    found = bus.state_of(registration)
    assert (found.waiting, found.failures) == (0, FAILURES)
    assert found.topics == ("a",)
    assert found.kind == "UntypedEventHandler"
    eventually(lambda: bus.logged("is blocked", "15 events"), "it is logged")
    registration.update(named("a"))
    found = bus.state_of(registration)
    assert (found.waiting, found.failures, found.dropped, found.blocked) == (0, FAILURES, 15, None)


# --- handlers that do not return


def test_a_handler_that_does_not_return_is_blocked_and_that_is_logged(bus: Bus) -> None:
    """Scenario 65; 157.4.6: what waits for it is dropped, and when it returns nothing follows."""
    hanging = Hanging().untyped(bus, ["a", "b"], timeout=SOON)
    other = Recorder().untyped(bus, "a")
    left = Recorder().unhandled(bus)
    began = time.monotonic()
    bus.count(range(20))
    assert until_blocked(bus, hanging) == f"it took more than {SOON:g} s for one event"
    assert time.monotonic() - began >= SOON
    bus.send_each([20])
    bus.send_each([21], "b")
    assert other.of("n") == [*range(21)]
    assert left.of("n") == [21]  # it was its only handler
    eventually(lambda: bus.logged("is blocked", level=logging.ERROR), "it is logged")
    (text,) = bus.logged("is blocked", level=logging.ERROR)
    for part in (repr(hanging.registration.reference), "Hanging", "a, b", f"{SOON:g} s", "19 events"):
        assert part in text
    found = bus.state_of(hanging.registration)
    assert (found.waiting, found.dropped) == (0, 19)
    hanging.opened.set()
    bus.send_each([22])
    assert hanging.of("n") == [0]


def test_the_bus_may_say_how_long_handlers_may_take(services: ServiceRegistry) -> None:
    """Scenario 65: for handlers that do not say it themselves. That of a handler may be longer, or without end.

    An update may change it, also while the handler has an event.
    """
    with Bus(services, tolerance=Tolerance(timeout=SOON)) as bus:
        others = [Hanging().untyped(bus, "a", timeout=timeout) for timeout in (300, 0, 0)]
        bus.deliver_untyped("a", {"n": 0})
        for each in others:
            each.wait()
        first = Hanging().untyped(bus, "a")
        bus.deliver_untyped("a", {"n": 1})
        until_blocked(bus, first)  # the others have theirs for longer
        assert [bus.blocked(each.registration) for each in others] == [None] * 3
        others[2].registration.update(named("a", timeout=SOON))
        until_blocked(bus, others[2])
        for each in (first, *others):
            each.opened.set()
        bus.send_each([2])
        assert [each.of("n") for each in (first, *others)] == [[1], [0, 1, 2], [0, 1, 2], [0]]


def test_an_update_gives_a_handler_that_hangs_new_events_while_the_old_one_hangs(bus: Bus) -> None:
    """Scenario 64; 157.4.6. When the old call returns at last, that changes nothing."""
    hanging, received = Hanging(), Recorder()

    def handle(topic: str, event: dict[str, Any]) -> None:
        if event["n"] == 0:
            hanging.notify(topic, event)
        received.notify(topic, event)

    registration = bus.untyped(handle, "a", timeout=SOON)
    bus.count(range(2))
    until_blocked(bus, registration)
    registration.update(named("a"))
    bus.send_each(range(2, 50))
    assert received.of("n") == [*range(2, 50)]
    hanging.opened.set()
    received.events.wait_for(49)  # the first one has returned
    bus.send_each(range(50, 100))
    assert received.of("n") == [*range(2, 50), 0, *range(50, 100)]
    assert bus.blocked(registration) is None


# --- coroutines that do not return


def test_a_coroutine_that_does_not_return_is_cancelled_and_blocked(bus: Bus) -> None:
    """157.4.6."""
    log: list[Any] = []
    other = Recorder()

    async def hang(event: dict[str, Any]) -> None:
        log.append(event["n"])
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    registration = bus.untyped(hang, "a", timeout=SOON)
    bus.untyped(coroutine_of(other), "a")
    bus.count(range(5))
    until_blocked(bus, registration)
    eventually(lambda: log == [0, "cancelled"], "it is cancelled")
    bus.send_each([5])
    assert log == [0, "cancelled"]
    assert other.of("n") == [*range(6)]
    eventually(lambda: len(bus.logged("is blocked", "hang")) == 1, "it is logged")
    registration.update(named("a", timeout=SOON))
    bus.deliver_untyped("a", {"n": 6})
    until_blocked(bus, registration)
    eventually(lambda: log == [0, "cancelled", 6, "cancelled"], "and again")


# --- waiting for handlers that misbehave


def test_closing_waits_for_a_handler_that_hangs_until_it_is_blocked(services: ServiceRegistry) -> None:
    bus = Bus(services)
    hanging = Hanging().untyped(bus, "a", timeout=SOON)
    other = Recorder().untyped(bus, "a")
    bus.count(range(3))
    bus.close(PATIENCE)
    assert other.of("n") == [0, 1, 2]
    assert hanging.of("n") == [0]


@table("kind", ["function", "coroutine"])
def test_a_handler_that_was_blocked_does_not_hold_up_closing(kind: str) -> None:
    bus = Bus(ServiceRegistry())
    hanging, stubborn = Hanging(), Stubborn()
    handler: Callable[..., Any] = hanging if kind == "function" else stubborn
    registration = bus.untyped(handler, "a", timeout=SOON)
    bus.deliver_untyped("a", {"n": 0})
    until_blocked(bus, registration)
    began = time.monotonic()
    bus.close(6 * PATIENCE)
    assert time.monotonic() - began < 6 * PATIENCE
    if kind == "coroutine":
        stubborn.open()
    hanging.opened.set()

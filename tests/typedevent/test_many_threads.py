"""Eight threads publish while handlers of all kinds come and go: each keeps the order, and nothing is lost or doubled.

``TYPED_EVENTS`` in the environment says how many events; 40,000 by default.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE
from messaging.typedevent import topic_of
from tests.typedevent.conftest import Bus, in_threads, named, typed, untyped

THREADS: Final = 8
EVENTS: Final = int(os.environ.get("TYPED_EVENTS", "40000"))
#: how long the big test may take, seconds
LIMIT: Final = 60
#: how much more memory the process may need in the end than after the first tenth, bytes
MEMORY: Final = 16_000_000


@dataclass(slots=True)
class Tick:
    thread: int
    n: int
    kind: int = 0


@dataclass(slots=True)
class Tock:
    """As a ``Tick``, to be converted to."""

    thread: int
    n: int


class Checker:
    """A handler that knows what comes next from each thread, and keeps nothing else.

    Args:
        step: it gets each event of a thread, each second one, ...
        first: beginning with this one.
    """

    def __init__(self, step: int = 1, first: int = 0) -> None:
        self.step = step
        self.first = first
        self.next = [first] * THREADS
        self.wrong: list[tuple[int, int, int]] = []

    def notify(self, topic: str, event: Any) -> None:
        self.check(event.thread, event.n)

    def notify_untyped(self, topic: str, event: dict[str, Any]) -> None:
        self.check(event["thread"], event["n"])

    def check(self, thread: int, number: int) -> None:
        if number != self.next[thread] and len(self.wrong) < 10:
            self.wrong.append((thread, number, self.next[thread]))
        self.next[thread] = number + self.step


class Visitor:
    """A handler that comes and goes: what it gets of each thread only ever grows."""

    def __init__(self) -> None:
        self.last = [-1] * THREADS
        self.wrong = 0
        self.count = 0

    def notify_untyped(self, topic: str, event: dict[str, Any]) -> None:
        self.count += 1
        if event["n"] <= self.last[event["thread"]]:
            self.wrong += 1
        self.last[event["thread"]] = event["n"]


def resident() -> int:
    """Memory of the process, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(3 * LIMIT)
def test_events_of_eight_threads_reach_ten_handlers_once_and_in_order(
    services: ServiceRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    """157.3.3, 157.9.6; scenarios 8, 9, 10, 24, 45 and 46 at once; publishers are shared by the threads."""
    each_thread = EVENTS // THREADS // 4 * 4
    with Bus(services) as bus:
        # of four events of a thread, the first and the third are untyped on ticks/even, the second is typed on the
        # topic of its class, the last typed on ticks/odd
        topics = [topic_of(Tick), "ticks/even", "ticks/odd"]
        checkers: list[tuple[Checker, Callable[..., Any], dict[str, Any]]] = [
            (Checker(), untyped, {"topics": topics}),
            (Checker(), untyped, {"topics": "*", "filter": "(n>=0)"}),
            (Checker(), typed, {"topics": "*", "type": Tock}),
            (Checker(2, 0), untyped, {"topics": ["ticks/even"]}),
            (Checker(4, 1), typed, {"type": Tick}),
            (Checker(4, 3), typed, {"topics": "ticks/odd", "type": Tock}),
            (Checker(4, 3), typed, {"topics": "+/odd", "type": Tick, "filter": "(kind=3)"}),
            (Checker(4, 0), untyped, {"topics": "ticks/even", "filter": "(kind=0)"}),
            (Checker(4, 2), untyped, {"topics": "ticks/*", "filter": "(&(kind>=2)(kind<=2))"}),
        ]
        for checker, register, options in checkers:
            register(services, checker, **options)
        later = Checker(4, 3)

        async def handle(event: dict[str, Any]) -> None:
            later.check(event["thread"], event["n"])

        bus.untyped(handle, "ticks/odd")
        never = Visitor()
        bus.unhandled(never.notify_untyped)
        size = len(bus.dispatcher._trie)

        stop = threading.Event()
        visits = itertools.count()
        visitors: list[Visitor] = []

        def visit() -> None:
            patterns = itertools.cycle(["*", "ticks/+", ["ticks/even", "a/*"], topics[0], "nothing/*"])
            while not stop.wait(0.005):
                visitor = Visitor()
                registration = bus.untyped(visitor, next(patterns), ranking=next(visits) % 3 - 1)
                visitors.append(visitor)
                stop.wait(0.01)
                registration.update(named(next(patterns)))
                stop.wait(0.005)
                registration.unregister()
                if len(visitors) > 100:
                    del visitors[:50]

        publisher = bus.create_publisher("ticks/odd", Tick)
        untyped_publisher = bus.create_publisher("ticks/even")

        def publish(thread: int) -> None:
            for number in range(0, each_thread, 4):
                untyped_publisher.deliver_untyped({"thread": thread, "n": number, "kind": 0})
                bus.deliver(Tick(thread, number + 1, 1))
                bus.deliver_untyped("ticks/even", {"thread": thread, "n": number + 2, "kind": 2})
                publisher.deliver(Tick(thread, number + 3, 3))
                if thread == 0 and number % max(4, each_thread // 40 * 4) == 0:
                    samples.append(resident())

        samples: list[int] = []
        visiting = threading.Thread(target=visit, daemon=True)
        visiting.start()
        began = time.monotonic()
        try:
            in_threads(THREADS, publish)
        finally:
            stop.set()
            visiting.join(PATIENCE)
        bus.flush().result(LIMIT)
        took = time.monotonic() - began
        samples.append(resident())

        for checker in [*(each for each, _, _ in checkers), later]:
            assert checker.wrong == []
            assert checker.next == [each_thread + checker.first] * THREADS
        assert never.count == 0
        assert sum(each.wrong for each in visitors) == 0
        assert any(each.count for each in visitors)
        assert len(bus.dispatcher._trie) == size
        assert sum(each.dropped for each in bus.get_dto().handlers) == 0
        assert samples[-1] - samples[1] < MEMORY
        with capsys.disabled():
            print(  # noqa: T201  # the figures are half of what it is for
                f"\n  {THREADS * each_thread:,} events in {took:.1f} s: {THREADS * each_thread / took:,.0f} events/s, "
                f"{next(visits)} handlers came and went, memory {[each >> 20 for each in samples]} MiB"
            )


def test_memory_does_not_grow_with_the_number_of_published_events(services: ServiceRegistry) -> None:
    """Delivered events are released, as ``tracemalloc`` measures it."""
    with Bus(services) as bus:
        counts = [0, 0]

        def count(event: Tick) -> None:
            counts[0] += 1

        async def count_async(event: Any) -> None:
            counts[1] += 1

        bus.on("ticks/*", handler=count)
        bus.on("ticks/*", handler=count_async, filter="(n>=0)")

        def publish(events: int) -> None:
            for number in range(events):
                bus.deliver_untyped(f"ticks/{number % 50}", {"thread": 0, "n": number})
            bus.flush().result(PATIENCE)

        publish(2_000)
        tracemalloc.start()
        try:
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            publish(8_000)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 200_000
        assert counts == [10_000, 10_000]


def test_two_buses_of_one_registry_keep_the_events_of_threads_apart() -> None:
    """And events that cross from one to the other keep their order."""
    services = ServiceRegistry()
    with Bus(services, name="first") as first, Bus(services, name="second") as second:
        checkers = [Checker(), Checker(), Checker()]
        first.on("a", handler=checkers[0].notify_untyped)
        first.on("a", handler=lambda event: second.deliver_untyped("b", event))
        second.on("b", handler=checkers[1].notify_untyped)
        untyped(services, checkers[2], ["a", "b"], target="(event.bus.name=second)")

        def publish(thread: int) -> None:
            for number in range(1_000):
                first.deliver_untyped("a", {"thread": thread, "n": number})

        in_threads(THREADS, publish)
        for bus in (first, second):
            bus.flush().result(PATIENCE)
        for checker in checkers:
            assert checker.wrong == []
            assert checker.next == [1_000] * THREADS

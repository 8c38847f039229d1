"""Handlers of both event services that hang, raise, or lose their event loop (157.4.6; RFC 97 5.3.1, 5.3.2)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from messaging.execution import pool
from messaging.services import ServiceRegistration
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, eventually_async
from messaging.typedevent import Tolerance
from tests.dispatch.helpers import Stubborn, logged
from tests.dispatch.services import EACH, Make, OfBus
from tests.raising import raising_log

#: seconds after which a handler that does not return is blocked, in tests of that
SOON = 0.2


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the supervisor look often."""
    monkeypatch.setattr(pool, "_LOOK", 0.02)


@contextlib.contextmanager
def opened(make: Make, **options: Any) -> Iterator[OfBus]:
    service = make(**options)
    with service.it:
        yield service


# --- handlers that raise


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise LookupError("nor this")

    __repr__ = __str__


@EACH
@table(
    "error",
    [
        *(SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(), StopAsyncIteration(), RecursionError()),
        *(asyncio.CancelledError(), MemoryError(), UnprintableError(), LookupError("no")),
        BaseExceptionGroup("several", [SystemExit(1), ValueError("no")]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_handler_may_raise_anything(make: Make, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 6; 157.4.6, 157.5.1; RFC 97 5.3.1: threads and loops go on, for it, for others and for the publisher.

    Delivery continues, and a handler that keeps raising is blocked, also if the log of the application raises. asyncio
    lets some of these out of its loops, on which others run.
    """
    log = raising_log("messaging") if isinstance(error, LookupError) else contextlib.nullcontext()
    with opened(make, tolerance=Tolerance(failures=3)) as service, log:
        received: dict[str, list[int]] = {name: [] for name in ("function", "coroutine", "awaitable", "other")}

        def raise_it(name: str, number: int) -> None:
            received[name].append(number)
            raise error

        async def raise_later(name: str, number: int) -> None:
            await asyncio.sleep(0)
            raise_it(name, number)

        async def coroutine(number: int) -> None:
            await raise_later("coroutine", number)

        failing = [
            service.handle(functools.partial(raise_it, "function")),
            service.handle(coroutine),
            service.handle(lambda number: raise_later("awaitable", number)),
        ]
        service.handle(received["other"].append, **{"service.ranking": -1})
        service.drain(0, 1)
        assert received == {name: [0, 1] for name in received}
        found = [service.state_of(each) for each in failing]
        assert [(each.failures, each.blocked) for each in found] == [(2, None)] * 3
        service.drain(2, 3, 4)
        assert all(service.state_of(each).blocked == "it failed on 3 events in a row" for each in failing)
        assert received.pop("other") == [*range(5)]
        assert received == {name: [0, 1, 2] for name in received}
        assert isinstance(error, LookupError) or len(logged(caplog, "failed on", "'a'")) == 9


# --- handlers that do not return


@EACH
def test_a_coroutine_that_cannot_be_cancelled_gets_no_more_events_and_delays_no_other(make: Make) -> None:
    """What a function returns counts as well. Once it has returned and was updated, it gets events again."""
    with opened(make) as service:
        stubborn, returned, other = Stubborn(), Stubborn(), list[int]()
        registrations = [
            service.handle(each, **{"event.timeout": SOON})
            for each in (stubborn.__call__, lambda number: returned(number))
        ]
        service.handle(other.append, **{"service.ranking": -1})
        service.publish(*range(5))
        for each in registrations:
            assert service.until_blocked(each) == f"it took more than {SOON:g} s for one event"
        for each in (stubborn, returned):
            each.open()
        service.drain(5)
        assert other == [*range(6)]
        assert stubborn.events == returned.events == [0]
        registrations[0].update({**registrations[0].reference.properties})
        service.drain(6)
        assert stubborn.events == [0, 6]


# --- event loops that end


@EACH
@table("when", ["before the event", "before it begins", "while it runs", "cancelled while it runs"])
def test_a_coroutine_whose_loop_is_closed_is_blocked_until_it_is_updated(
    make: Make, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """157.4.6: the event in progress is lost, and so are the pending ones. Then it runs on the loop of the update."""
    with opened(make) as service:
        received, other = list[tuple[int, int]](), list[int]()
        mine = asyncio.new_event_loop()

        async def handle(number: int) -> None:
            received.append((number, threading.get_ident()))
            if number < 3:
                await asyncio.get_running_loop().create_future()

        async def register() -> ServiceRegistration:
            return service.handle(handle)

        registration = mine.run_until_complete(register())
        service.handle(other.append)
        if when == "before the event":
            mine.close()
        service.publish(1, 2)
        if when == "before it begins":  # then it is not awaited, and Python does not warn about that
            eventually(lambda: mine._ready, "it is about to begin")  # type: ignore[attr-defined]
        elif "while it runs" in when:
            mine.run_until_complete(eventually_async(lambda: received))
            for task in asyncio.all_tasks(mine):
                if when.startswith("cancelled"):
                    task.cancel()
                    mine.run_until_complete(asyncio.gather(task, return_exceptions=True))
                else:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]  # true, but not what this is about
        mine.close()
        assert service.until_blocked(registration) == "the event loop it ran on is closed"
        service.it.flush().result(PATIENCE)
        gc.collect()
        assert [number for number, _ in received] == ([1] if "while it runs" in when else [])
        assert other == [1, 2]
        eventually(lambda: len(logged(caplog, "is blocked", "the event loop it ran on is closed")) == 1, "it is logged")

        async def update() -> None:
            registration.update({"event.topics": "a"})
            service.publish(3)
            await service.it.flush()

        if is_here := when.endswith("it runs"):
            asyncio.run(update())
        else:
            registration.update({"event.topics": "a"})
            service.drain(3)
        assert received[-1][0] == 3
        assert (received[-1][1] == threading.get_ident()) is is_here


@EACH
def test_coroutines_run_on_the_loop_they_were_registered_on_and_else_on_one_of_their_own(make: Make) -> None:
    threads: dict[str, set[int]] = {"mine": set(), "other": set()}

    def handler(name: str) -> Any:
        async def handle(number: int) -> None:
            threads[name].add(threading.get_ident())

        return handle

    async def main(service: OfBus) -> None:
        service.handle(handler("mine"))
        service.publish(*range(10))
        await service.it.flush()

    with opened(make) as service:
        service.handle(handler("other"))
        asyncio.run(main(service))
    assert threads["mine"] == {threading.get_ident()}
    assert len(threads["other"]) == 1
    assert threads["other"] != threads["mine"]

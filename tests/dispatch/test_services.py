"""The life of a typed event bus and of an Event Admin, which is the same: opening, and above all closing (157.5)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from messaging.errors import ArgumentError, ClosedError
from messaging.eventadmin import EventHandler
from messaging.services import ServiceRegistry
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, within
from tests.dispatch.helpers import logged
from tests.dispatch.services import EACH, Gate, Make, OfAdmin, OfBus
from tests.threads import in_background, in_threads


@table(
    "make, options",
    [
        *(
            (make, options)
            for make in (OfBus, OfAdmin)
            for options in (
                *({"name": each} for each in ("", 5)),
                *({"threads": each} for each in (0, -1, "2", True)),
                *({"tolerance": each} for each in (None, 5) if make is OfAdmin or each),
                *({"permissions": each} for each in ("all", {}, 5)),
            )
        ),
        *((OfBus, {"history_capacity": each}) for each in (-2, 1.0, "10", None, True)),
        *((OfBus, {"history": each}) for each in ({"a*": None}, {"a": 5}, [("a", 5)])),
        *((OfAdmin, {"without_topics": each}) for each in ("some", None)),
        *((OfAdmin, {"send_timeout": each}) for each in (-1, "1")),
        *((OfAdmin, {"ranking": each}) for each in ("high", None)),
    ],
)
def test_invalid_arguments_are_refused_and_leave_nothing(make: Make, options: dict[str, Any]) -> None:
    services = ServiceRegistry()
    with pytest.raises(ArgumentError):
        make(services, **options)
    assert services.find() == []
    assert services._listeners == ()


@EACH
def test_closing_waits_until_the_published_events_are_delivered(make: Make) -> None:
    """157.3; scenario 36 of Event Admin."""
    service, received, later = make(), list[int](), list[int]()

    async def handle(number: int) -> None:
        await asyncio.sleep(0)
        later.append(number)

    service.handle(received.append)
    service.handle(handle)
    service.publish(*range(1_000))
    service.it.close()
    assert received == later == [*range(1_000)]
    assert not service.is_found


@EACH
def test_every_caller_of_close_waits_and_closing_once_more_does_nothing(make: Make) -> None:
    service, gate = make(), Gate()
    service.handle(gate)
    service.publish(1, 2)
    gate.wait()
    begun: waiting.Recorder[int] = waiting.Recorder()

    def close(number: int) -> None:
        begun.append(number)
        if number == 6:
            begun.wait_for(7)
            gate.opened.set()
        elif number % 2:
            service.it.close(PATIENCE)
        else:
            asyncio.run(service.it.aclose(PATIENCE))
        assert gate.opened.is_set()

    in_threads(7, close)
    service.it.close()
    asyncio.run(service.it.aclose())
    service.it.flush().result(PATIENCE)
    assert gate.events == [1, 2]
    assert service.it.get_dto().handlers == ()


@EACH
def test_a_closed_service_knows_no_handlers_and_finds_none(make: Make) -> None:
    service, received = make(), list[int]()
    before = service.handle(received.append)
    service.it.close()
    service.handle(received.append)
    service.services.register(EventHandler, 5, {"event.topics": "a"})  # type: ignore[arg-type]  # which would be logged
    before.update({"event.topics": "b"})
    before.unregister()
    assert service.it.get_dto().handlers == ()
    assert len(service.it.dispatcher._trie) == 0
    assert service.services._listeners == ()
    assert received == []


@EACH
def test_a_service_is_closed_at_the_end_of_its_block_even_after_an_exception(make: Make) -> None:
    service, received = make(), list[int]()
    service.handle(received.append)

    def fail() -> None:
        with service.it:
            service.publish(1)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert received == [1]
    with pytest.raises(ClosedError, match=f"{service.it.name}' is closed"):
        service.publish(2)


@EACH
def test_on_an_event_loop_closing_does_not_wait_but_delivers_and_aclose_waits(make: Make) -> None:
    received: list[int] = []

    async def handle(number: int) -> None:
        await asyncio.sleep(0)
        received.append(number)

    async def main() -> None:
        service = make()
        with service.it:
            service.handle(handle)
            service.publish(*range(20))
        assert received == []  # it has not had the loop
        with pytest.raises(ClosedError):
            service.publish(20)
        await service.it.aclose()
        assert received == [*range(20)]
        another = make()
        async with another.it:
            another.handle(handle)
            another.publish(*range(20))
        assert received == [*range(20)] * 2
        with pytest.raises(ClosedError):
            await another.it.__aenter__()
        assert not another.is_found
        stuck, gate = make(), Gate()
        stuck.handle(gate)
        stuck.publish(1, 2)
        await asyncio.to_thread(gate.wait)
        stuck.it.close()  # nor does it wait for a handler on another thread
        gate.opened.set()
        await stuck.it.aclose()
        assert gate.events == [1, 2]
        with pytest.raises(LookupError):
            async with make().it:
                raise LookupError

    asyncio.run(within(main()))


@EACH
@table("way", ["function", "coroutine", "aclose", "awaitable"])
def test_a_handler_may_close_its_service(make: Make, way: str) -> None:
    """Scenarios 36 and 41 of Event Admin: it does not wait for itself; the events published before are delivered."""
    service, received, other = make(), list[int](), list[int]()
    published = threading.Event()

    def function(number: int) -> None:
        assert published.wait(PATIENCE)
        received.append(number)
        service.it.close()
        with pytest.raises(ClosedError):
            service.publish(99)

    async def coroutine(number: int) -> None:
        function(number)

    async def aclose(number: int) -> None:
        assert published.wait(PATIENCE)
        received.append(number)
        await service.it.aclose()

    handlers: dict[str, Callable[..., Any]] = {"function": function, "coroutine": coroutine, "aclose": aclose}
    service.handle(handlers.get(way, lambda number: coroutine(number)))
    service.handle(other.append)
    service.publish(*range(5))
    published.set()
    eventually(lambda: not service.is_found, "it is closing")
    service.it.close(PATIENCE)  # waits
    assert other == received == [*range(5)]


@EACH
def test_events_published_during_closing_are_delivered_or_refused(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 36 of Event Admin: no event is lost without an error."""
    for is_monitored in (False, False, True, True) if make is OfBus else (False, False):
        service, received = make(), list[int]()
        if is_monitored:
            service.it.monitor.monitor_events().subscribe(lambda _: None)
        service.handle(received.append)
        published: list[list[int]] = [[] for _ in range(3)]

        def publish(thread: int, service: OfBus = service, published: list[list[int]] = published) -> None:
            if thread == 3:
                eventually(lambda: all(published))
                service.it.close(PATIENCE)
                return
            with contextlib.suppress(ClosedError):
                while True:
                    number = thread * 10_000_000 + len(published[thread])
                    service.publish(number)
                    published[thread].append(number)

        in_threads(4, publish)
        for thread in range(3):
            assert [each for each in received if each // 10_000_000 == thread] == published[thread]
        assert not logged(caplog, "closed before")


@EACH
def test_a_handler_that_publishes_while_it_is_closed_is_told(make: Make) -> None:
    service, gate, told = make(), Gate(), list[bool]()

    def handle(number: int) -> None:
        gate(number)
        with pytest.raises(ClosedError):
            service.publish(2)
        told.append(True)

    service.handle(handle)
    service.publish(1)
    gate.wait()
    join = in_background(service.it.close)
    eventually(lambda: not service.is_found, "it is closing")
    gate.opened.set()
    join()
    assert told == [True]


@EACH
def test_handlers_that_come_and_go_while_it_is_closed_do_no_harm(make: Make) -> None:
    for _ in range(10):
        service = make()
        turns: list[int] = []

        def work(number: int, service: OfBus = service, turns: list[int] = turns) -> None:
            if number == 0:
                eventually(lambda: turns)
                service.it.close()
                return
            for turn in range(30):
                turns.append(turn)
                registration = service.handle(lambda _: None, f"b/{turn}/*", **{"service.ranking": turn})
                registration.update({"event.topics": "*"})
                if turn % 2:
                    registration.unregister()

        in_threads(4, work)
        assert service.it.get_dto().handlers == ()
        assert len(service.it.dispatcher._trie) == 0
        assert service.services._listeners == ()


@EACH
def test_a_closed_service_is_not_kept_and_keeps_no_handler(make: Make) -> None:
    """RFC 97 4.1.1 [3]."""
    service, received = make(), list[int]()
    services = service.services
    service.handle(received.append)
    service.publish(1)
    service.it.close()
    weak = weakref.ref(service.it)
    del service
    eventually(lambda: gc.collect() >= 0 and weak() is None, "it is gone")
    assert received == [1]
    assert len(services.find()) == 1


@EACH
def test_hundreds_of_services_leave_no_threads(make: Make) -> None:
    services, received = ServiceRegistry(), list[int]()
    before = threading.active_count()
    for _ in range(150):
        with contextlib.ExitStack() as stack:
            service = make(services)
            stack.enter_context(service.it)
            stack.enter_context(service.handle(received.append))
            service.publish(1)
            service.it.flush().result(PATIENCE)
    assert len(received) == 150
    eventually(lambda: threading.active_count() <= before + 3, "threads have left")
    assert services._listeners == ()

"""Signal handlers that raise.

Closing an event service leaves nothing open, and no thread waiting. Delivering costs no event and blocks no handler.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from messaging.dispatch import EventService
from messaging.eventadmin import EventAdmin
from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import TypedEventBus, UntypedEventHandler
from tests.interrupts import again, interrupt_everywhere

KINDS = pytest.mark.parametrize("kind", [TypedEventBus, EventAdmin])


@KINDS
def test_closing_ends_in_spite_of_interrupts(kind: type[TypedEventBus] | type[EventAdmin]) -> None:
    before = threading.active_count()
    made: list[EventService] = []

    def run() -> None:
        registry = ServiceRegistry()
        service = kind(registry)
        made.append(service)
        again(lambda: service.close(0.5))
        assert not registry.find(kind)
        asyncio.run(asyncio.wait_for(service.aclose(), PATIENCE))

    assert interrupt_everywhere(run, made.clear, "service.py") > 10
    assert threading.active_count() < before + 50


@KINDS
def test_waiting_for_closing_ends_although_the_closing_thread_is_interrupted(
    kind: type[TypedEventBus] | type[EventAdmin],
) -> None:
    def run() -> None:
        service = kind(ServiceRegistry())

        def closed() -> None:
            asyncio.run(asyncio.wait_for(service.aclose(0.5), PATIENCE))

        closer = threading.Thread(target=closed)
        closer.start()
        again(lambda: service.close(0.5))
        closer.join(PATIENCE)
        assert not closer.is_alive()

    interrupt_everywhere(run, lambda: None, "service.py")


@KINDS
def test_a_signal_handler_may_close_a_service_that_its_thread_is_closing(
    kind: type[TypedEventBus] | type[EventAdmin],
) -> None:
    registry = ServiceRegistry()
    service = kind(registry)
    registry.add_listener(lambda _: service.close())  # as a signal handler would: on the thread, in between
    closer = threading.Thread(target=service.close)
    closer.start()
    eventually(lambda: not closer.is_alive(), "the end of closing")


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_events_are_delivered_in_spite_of_interrupts(is_coroutine: bool) -> None:
    before = threading.active_count()
    services = ServiceRegistry()
    seen: list[int] = []

    def notify(topic: str, event: dict[str, int]) -> None:
        seen.append(event["number"])

    async def notify_later(topic: str, event: dict[str, int]) -> None:
        await asyncio.sleep(0)
        notify(topic, event)

    numbers = iter(range(10**6))
    with TypedEventBus(services) as bus:
        handler = notify_later if is_coroutine else notify
        services.register(UntypedEventHandler, handler, {"event.topics": ["a"]})

        def run() -> None:
            number = next(numbers)
            again(lambda: bus.deliver_untyped("a", {"number": number}))
            eventually(lambda: number in seen, f"event {number}")

        assert (
            interrupt_everywhere(run, lambda: None, "lanes.py", "pool.py", "threads.py", "loop.py", "mailboxes.py") > 5
        )
    assert threading.active_count() < before + 50

"""A signal handler that raises while an event is delivered costs no event and blocks no handler."""

from __future__ import annotations

import asyncio
import threading

import pytest

from messaging.services import ServiceRegistry
from messaging.typedevent import TypedEventBus, UntypedEventHandler
from tests.doubles.fake import until
from tests.interrupts import again, interrupt_everywhere


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
            until(lambda: number in seen, f"event {number}")

        assert (
            interrupt_everywhere(run, lambda: None, "lanes.py", "pool.py", "threads.py", "loop.py", "mailboxes.py") > 5
        )
    assert threading.active_count() < before + 50

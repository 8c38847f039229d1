"""A signal handler that raises while an event service is closed leaves nothing open, and no thread waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest

from messaging.dispatch.service import EventService
from messaging.eventadmin import EventAdmin
from messaging.services import ServiceRegistry
from messaging.typedevent import TypedEventBus
from tests.doubles.fake import PATIENCE, until
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
    until(lambda: not closer.is_alive(), "the end of closing")

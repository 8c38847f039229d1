"""A typed event bus and an Event Admin as the same thing: a service whose handlers get numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from messaging.eventadmin import Event, EventAdmin, EventHandler
from messaging.services import ServiceRegistration, ServiceRegistry
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import TypedEventBus, UntypedEventHandler
from tests.dispatch.helpers import Gated


class OfBus:
    """A typed event bus: its handlers get numbers."""

    service = TypedEventBus

    def __init__(self, services: ServiceRegistry | None = None, **options: Any) -> None:
        self.services = services or ServiceRegistry()
        self.it: Any = self.service(self.services, **options)

    def handle(self, handler: Callable[[int], Any], topics: str = "a", **properties: Any) -> ServiceRegistration:
        return self.services.register(
            UntypedEventHandler, self._of_numbers(handler), {"event.topics": topics, **properties}
        )

    @classmethod
    def _of_numbers(cls, handler: Callable[[int], Any]) -> Any:
        if asyncio.iscoroutinefunction(handler):

            async def handle_later(event: Any) -> None:
                await handler(cls.number(event))

            return handle_later
        return lambda event: handler(cls.number(event))

    @staticmethod
    def number(event: Any) -> int:
        return event["n"]

    def publish(self, *numbers: int) -> None:
        for number in numbers:
            self.it.deliver_untyped("a", {"n": number})

    def state_of(self, registration: ServiceRegistration) -> Any:
        """Return the snapshot of a handler."""
        (found,) = [each for each in self.it.get_dto().handlers if each.service_id == registration.reference.id]
        return found

    def until_blocked(self, registration: ServiceRegistration) -> str:
        return eventually(lambda: self.state_of(registration).blocked, "the handler is blocked")

    def drain(self, *numbers: int) -> None:
        """Publish numbers, and wait until all handlers have processed the published events."""
        self.publish(*numbers)
        self.it.flush().result(PATIENCE)

    @property
    def is_found(self) -> bool:
        return bool(self.services.find(self.service))


class OfAdmin(OfBus):
    """An Event Admin: its handlers get numbers."""

    service = EventAdmin

    def handle(self, handler: Callable[[int], Any], topics: str = "a", **properties: Any) -> ServiceRegistration:
        return self.services.register(EventHandler, self._of_numbers(handler), {"event.topics": topics, **properties})

    @staticmethod
    def number(event: Any) -> int:
        return event.get_property("n")

    def publish(self, *numbers: int) -> None:
        for number in numbers:
            self.it.post_event(Event("a", {"n": number}))


class OfUnordered(OfAdmin):
    """An Event Admin with handlers that do not ask for order."""

    def handle(self, handler: Callable[[int], Any], topics: str = "a", **properties: Any) -> ServiceRegistration:
        return super().handle(handler, topics, **{"event.delivery": "async.unordered", **properties})


EACH: Final = table("make", {"bus": OfBus, "admin": OfAdmin, "unordered": OfUnordered})
Make = Callable[..., OfBus]


class Gate(Gated):
    """A handler that returns once it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.events: waiting.Recorder[int] = waiting.Recorder()

    def __call__(self, number: int) -> None:
        self.events.append(number)
        self.stay()

"""A bus with a registry of its own, and handlers that record what they get."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Self

import pytest

from messaging.services import ServiceRegistration, ServiceRegistry
from messaging.testing import waiting
from messaging.testing.waiting import PATIENCE
from messaging.typedevent import (
    HandlerDTO,
    RangePolicy,
    TypedEventBus,
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
    topic_of,
)
from tests.dispatch.helpers import Gated, no_defects, renewed
from tests.dispatch.helpers import logged as logged
from tests.dispatch.helpers import named as named
from tests.threads import in_threads as in_threads

#: seconds after which a handler that does not return is blocked, in tests of that
SOON: Final = 0.2


@dataclass
class Item:
    name: str
    price: float = 1.0


@dataclass
class Order:
    id: int
    customer: str = "nobody"
    items: list[Item] = field(default_factory=list)


@dataclass
class RushOrder(Order):
    hours: int = 24


@dataclass
class Invoice:
    """Has fields in common with ``Order``."""

    id: str
    customer: str
    is_paid: bool = False


#: topic of orders that are published without one
ORDERS: Final = topic_of(Order)


@pytest.fixture
def services() -> ServiceRegistry:
    return ServiceRegistry()


class Bus(TypedEventBus):
    """A bus that registers handlers, publishes and waits, and reads its state and its log, in one call each."""

    #: the log of the test; only the bus of the fixture has it
    caplog: pytest.LogCaptureFixture

    def typed(self, handler: Any, topics: Any = None, **properties: Any) -> ServiceRegistration:
        return register(TypedEventHandler, self.services, handler, topics, **properties)

    def untyped(self, handler: Any, topics: Any = None, **properties: Any) -> ServiceRegistration:
        return register(UntypedEventHandler, self.services, handler, topics, **properties)

    def unhandled(self, handler: Any, topics: Any = None, **properties: Any) -> ServiceRegistration:
        return register(UnhandledEventHandler, self.services, handler, topics, **properties)

    def drain(self) -> None:
        """Wait until all handlers have processed the published events."""
        self.flush().result(PATIENCE)

    def send(self, topic: str | None, *events: Any) -> None:
        """Publish events to one topic, and wait until all handlers have processed them."""
        for event in events:
            self.deliver(event, topic)
        self.drain()

    def send_to(self, topics: Iterable[str], event: dict[str, Any]) -> None:
        """Publish an event to several topics, and wait until all handlers have processed it."""
        for topic in topics:
            self.deliver_untyped(topic, event)
        self.drain()

    def count(self, numbers: Iterable[int], topic: str = "a") -> None:
        """Publish ``{"n": number}`` for each number."""
        for number in numbers:
            self.deliver_untyped(topic, {"n": number})

    def numbered(self, *events: str, principal: str | None = None, **more: Any) -> None:
        """Publish events by topic and number: ``"a 1"`` is event 1 on topic ``a``."""
        for event in events:
            topic, number = event.split()
            self.deliver_untyped(topic, {"n": int(number), **more}, principal=principal)

    def send_each(self, numbers: Iterable[int], topic: str = "a") -> None:
        """Publish ``{"n": number}`` for each number, and wait until all handlers have processed them."""
        self.count(numbers, topic)
        self.drain()

    def handler_of(self, registration: ServiceRegistration) -> HandlerDTO | None:
        """Return the snapshot of the only handler of a registration; ``None`` if the bus ignores it."""
        found = [each for each in self.get_dto().handlers if each.service_id == registration.reference.id]
        assert len(found) <= 1
        return found[0] if found else None

    def state_of(self, registration: ServiceRegistration) -> HandlerDTO:
        """Return the snapshot of the only handler of a registration."""
        found = self.handler_of(registration)
        assert found is not None
        return found

    def blocked(self, registration: ServiceRegistration) -> str | None:
        """Return why a handler is blocked, or ``None``."""
        return self.state_of(registration).blocked

    def logged(self, *parts: str, level: int = logging.WARNING) -> list[str]:
        """Return the log records of this project from ``level`` on that contain all ``parts``."""
        return logged(self.caplog, *parts, level=level)

    def ignored(self, registration: ServiceRegistration) -> str:
        """Return the log record of a service that the bus ignores."""
        assert self.handler_of(registration) is None
        (text,) = self.logged(repr(registration.reference), "is ignored", level=logging.ERROR)
        return text


@pytest.fixture
def policies() -> dict[str, RangePolicy]:
    """The history of the bus; files with tests of it have one of their own."""
    return {}


@contextlib.contextmanager
def opened_bus(
    policies: dict[str, RangePolicy], caplog: pytest.LogCaptureFixture, services: ServiceRegistry | None = None
) -> Iterator[Bus]:
    with Bus(services or ServiceRegistry(), history=policies) as bus:
        bus.caplog = caplog
        yield bus
    no_defects(caplog)


#: gives each row of a table a bus of its own
own_bus: Final = renewed("bus", opened_bus, "policies", "caplog")


@pytest.fixture
def bus(services: ServiceRegistry, policies: dict[str, RangePolicy], caplog: pytest.LogCaptureFixture) -> Iterator[Bus]:
    with opened_bus(policies, caplog, services) as bus:
        yield bus


def register(
    interface: type[Any], services: ServiceRegistry, handler: Any, topics: Any = None, **properties: Any
) -> ServiceRegistration:
    return services.register(interface, handler, named(topics, **properties))


class Recorder:
    """A handler of any kind that records what it gets."""

    #: registration of this handler; set by ``typed``, ``untyped`` and ``unhandled``
    registration: ServiceRegistration

    def __init__(self) -> None:
        super().__init__()
        self.events: waiting.Recorder[tuple[str, Any]] = waiting.Recorder()

    def typed(self, where: Bus | ServiceRegistry, topics: Any = None, **properties: Any) -> Self:
        """Register it as a ``TypedEventHandler``."""
        return self._register(TypedEventHandler, where, topics, **properties)

    def untyped(self, where: Bus | ServiceRegistry, topics: Any = None, **properties: Any) -> Self:
        """Register it as an ``UntypedEventHandler``."""
        return self._register(UntypedEventHandler, where, topics, **properties)

    def unhandled(self, where: Bus | ServiceRegistry, topics: Any = None, **properties: Any) -> Self:
        """Register it as an ``UnhandledEventHandler``."""
        return self._register(UnhandledEventHandler, where, topics, **properties)

    def _register(self, interface: type[Any], where: Bus | ServiceRegistry, topics: Any, **properties: Any) -> Self:
        services = where.services if isinstance(where, Bus) else where
        self.registration = register(interface, services, self, topics, **properties)
        return self

    def notify(self, topic: str, event: Any) -> None:
        self.events.append((topic, event))

    notify_untyped = notify_unhandled = __call__ = notify

    @property
    def topics(self) -> list[str]:
        return [topic for topic, _ in self.events]

    @property
    def data(self) -> list[Any]:
        return [event for _, event in self.events]

    @property
    def numbered(self) -> list[str]:
        """Return the events by topic and number, as ``Bus.numbered`` takes them."""
        return [f"{topic} {event['n'] if isinstance(event, dict) else event.n}" for topic, event in self.events]

    def of(self, key: str) -> list[Any]:
        """Return the values that the events have under a key, or ``None``."""
        return [event.get(key) for event in self.data]


class Gate(Recorder, Gated):
    """A handler that returns when it is told to."""

    def notify(self, topic: str, event: Any) -> None:
        super().notify(topic, event)
        self.stay()

    notify_untyped = notify_unhandled = __call__ = notify


class Failing(Recorder):
    """A handler that raises whatever it is told to; nothing, if that is ``None``."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error

    def notify(self, topic: str, event: Any) -> None:
        super().notify(topic, event)
        if self.error is not None:
            raise self.error

    notify_untyped = notify_unhandled = __call__ = notify


def coroutine_of(handler: Recorder) -> Callable[[str, Any], Awaitable[None]]:
    """Return a coroutine function that calls the handler."""

    async def handle(topic: str, event: Any) -> None:
        await asyncio.sleep(0)
        handler.notify(topic, event)

    return handle


typed = functools.partial(register, TypedEventHandler)
untyped = functools.partial(register, UntypedEventHandler)


def matches(topic_filter: str, topic: str) -> bool:
    """Return whether a topic filter matches a topic, by a naive reading of 157.4.3."""
    wanted, tokens = topic_filter.split("/"), topic.split("/")
    if wanted[-1] == "*":
        if len(tokens) < len(wanted):
            return False
        wanted, tokens = wanted[:-1], tokens[: len(wanted) - 1]
    return len(wanted) == len(tokens) and all(one in ("+", other) for one, other in zip(wanted, tokens, strict=True))

"""A bus with a registry of its own, handlers that keep what they get, and waiting with deadlines."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from messaging.services import ServiceRegistration, ServiceRegistry
from messaging.testing.conformance.helpers import eventually as eventually
from messaging.typedevent import (
    HandlerDTO,
    TypedEventBus,
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
    topic_of,
)
from tests.dispatch.helpers import logged as logged
from tests.dispatch.helpers import named as named
from tests.dispatch.helpers import no_defects
from tests.threads import in_threads as in_threads

#: seconds any wait in a test may take
PATIENCE: Final = 20.0
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


@pytest.fixture
def bus(services: ServiceRegistry, caplog: pytest.LogCaptureFixture) -> Iterator[TypedEventBus]:
    bus = TypedEventBus(services)
    try:
        yield bus
    finally:
        bus.close()
    no_defects(caplog)


class Recorder:
    """A handler of any kind that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def notify(self, topic: str, event: Any) -> None:
        self.events.append((topic, event))

    notify_untyped = notify_unhandled = __call__ = notify

    @property
    def topics(self) -> list[str]:
        return [topic for topic, _ in self.events]

    @property
    def data(self) -> list[Any]:
        return [event for _, event in self.events]

    def of(self, key: str) -> list[Any]:
        """Return the values that the events have under a key, or ``None``."""
        return [event.get(key) for event in self.data]


class Gate(Recorder):
    """A handler that returns when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def notify(self, topic: str, event: Any) -> None:
        super().notify(topic, event)
        self.entered.release()
        assert self.opened.wait(PATIENCE)

    notify_untyped = notify_unhandled = __call__ = notify

    def wait(self) -> None:
        """Until it has got another event."""
        assert self.entered.acquire(timeout=PATIENCE)


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


def _register(
    interface: type[Any], where: TypedEventBus | ServiceRegistry, handler: Any, topics: Any = None, **properties: Any
) -> ServiceRegistration:
    services = where.services if isinstance(where, TypedEventBus) else where
    return services.register(interface, handler, named(topics, **properties))


typed = functools.partial(_register, TypedEventHandler)
untyped = functools.partial(_register, UntypedEventHandler)
unhandled = functools.partial(_register, UnhandledEventHandler)


def flush(bus: TypedEventBus) -> None:
    """Wait until all handlers have processed the published events."""
    bus.flush().result(PATIENCE)


def send(bus: TypedEventBus, topic: str | None, *events: Any) -> None:
    """Publish events to one topic, and wait until all handlers have processed them."""
    for event in events:
        bus.deliver(event, topic)
    flush(bus)


def handler_of(bus: TypedEventBus, registration: ServiceRegistration) -> HandlerDTO | None:
    """Return the snapshot of the only handler of a registration; ``None`` if the bus ignores it."""
    found = [each for each in bus.get_dto().handlers if each.service_id == registration.reference.id]
    assert len(found) <= 1
    return found[0] if found else None


def state_of(bus: TypedEventBus, registration: ServiceRegistration) -> HandlerDTO:
    """Return the snapshot of the only handler of a registration."""
    found = handler_of(bus, registration)
    assert found is not None
    return found


def blocked(bus: TypedEventBus, registration: ServiceRegistration) -> str | None:
    """Return why a handler is blocked, or ``None``."""
    return state_of(bus, registration).blocked


def ignored(caplog: pytest.LogCaptureFixture, registration: ServiceRegistration) -> str:
    """Return the log record of a service that the bus ignores."""
    (text,) = logged(caplog, repr(registration.reference), "is ignored", level=logging.ERROR)
    return text


def count(bus: TypedEventBus, numbers: Iterable[int], topic: str = "a") -> None:
    """Publish ``{"n": number}`` for each number."""
    for number in numbers:
        bus.deliver_untyped(topic, {"n": number})


def send_to(bus: TypedEventBus, topics: Iterable[str], event: dict[str, Any]) -> None:
    """Publish an event to several topics, and wait until all handlers have processed it."""
    for topic in topics:
        bus.deliver_untyped(topic, event)
    flush(bus)


def matches(topic_filter: str, topic: str) -> bool:
    """Return whether a topic filter matches a topic, by a naive reading of 157.4.3."""
    wanted, tokens = topic_filter.split("/"), topic.split("/")
    if wanted[-1] == "*":
        if len(tokens) < len(wanted):
            return False
        wanted, tokens = wanted[:-1], tokens[: len(wanted) - 1]
    return len(wanted) == len(tokens) and all(one in ("+", other) for one, other in zip(wanted, tokens, strict=True))

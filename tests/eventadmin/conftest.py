"""An EventAdmin with a registry of its own, and handlers that record their events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pytest

from messaging.eventadmin import Event, EventAdmin, EventHandler, HandlerDTO
from messaging.services import LdapFilter, ServiceRegistration, ServiceRegistry
from messaging.testing import waiting
from messaging.testing.waiting import PATIENCE
from tests.dispatch.helpers import Gated, named, no_defects, renewed
from tests.dispatch.helpers import logged as logged
from tests.threads import Loop

T = TypeVar("T")

#: seconds after which a handler that does not return is blocked, in tests of that
SOON: Final = 0.25
#: seconds that a test gives to a wait that must end with its deadline
MOMENT: Final = 0.05
#: the two ways in which posted events are delivered
DELIVERIES: Final = ("async.ordered", "async.unordered")


@pytest.fixture
def services() -> ServiceRegistry:
    return ServiceRegistry()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on another thread."""
    with contextlib.closing(Loop()) as loop:
        yield loop.loop


def on(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Call a function on an event loop and return its result."""

    async def run() -> T:
        return call()

    return asyncio.run_coroutine_threadsafe(run(), loop).result(PATIENCE)


class Recorder:
    """A handler that records its events."""

    #: registration of this handler; set by ``handle``
    registration: ServiceRegistration

    def __init__(self) -> None:
        super().__init__()
        self.events: waiting.Recorder[Event] = waiting.Recorder()
        self.threads: list[int] = []

    def handle_event(self, event: Event) -> Any:
        self.threads.append(threading.get_ident())
        self.events.append(event)

    @property
    def topics(self) -> list[str]:
        return [event.topic for event in self.events]

    @property
    def numbers(self) -> list[Any]:
        return self.of("n")

    def of(self, name: str) -> list[Any]:
        """Return the values of a property of the events."""
        return [event.get_property(name) for event in self.events]


class Gate(Recorder, Gated):
    """A handler that returns from its events once it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: waiting.Recorder[Event] = waiting.Recorder()

    def handle_event(self, event: Event) -> None:
        super().handle_event(event)
        self.stay()
        self.returned.append(event)

    def leave(self) -> None:
        """Open it, and wait until it has returned once."""
        self.opened.set()
        self.returned.wait_for(1)


class Failing(Recorder):
    """A handler that raises ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def handle_event(self, event: Event) -> None:
        super().handle_event(event)
        if self.error is not None:
            raise self.error


class AsyncRecorder(Recorder):
    """A handler that is a coroutine function; it records its event loops, too."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def handle_event(self, event: Event) -> None:
        await asyncio.sleep(0)
        self.loops.append(asyncio.get_running_loop())
        super().handle_event(event)


class AsyncGate(AsyncRecorder, Gated):
    """A coroutine function that returns once it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: waiting.Recorder[Event] = waiting.Recorder()
        self.returned: waiting.Recorder[Event] = waiting.Recorder()

    async def handle_event(self, event: Event) -> None:
        self._leave = asyncio.Event()
        await super().handle_event(event)
        try:
            await self._leave.wait()
        except asyncio.CancelledError:
            self.cancelled.append(event)
            raise
        self.returned.append(event)

    def open(self) -> None:
        self.loops[-1].call_soon_threadsafe(self._leave.set)


class Evil:
    """A value that raises when it is inspected."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("boom")


class RaisingFilter(LdapFilter):
    """A filter of the application's own."""

    def match_case(self, properties: Any) -> bool:
        raise RuntimeError("boom")


def handle(
    services: ServiceRegistry, handler: Any, topics: Any = "*", *, scope: Any = "singleton", **properties: Any
) -> ServiceRegistration:
    """Register a handler."""
    registration = services.register(EventHandler, handler, named(topics, **properties), scope=scope)
    if isinstance(handler, Recorder):
        handler.registration = registration
    return registration


def record(services: ServiceRegistry, topics: Any = "*", **properties: Any) -> Recorder:
    """Register a handler that records its events."""
    recorder = Recorder()
    handle(services, recorder, topics, **properties)
    return recorder


def post(admin: EventAdmin, *numbers: Any, topic: str = "a") -> None:
    """Post an event with each number as property ``n``."""
    for number in numbers:
        admin.post_event(Event(topic, {"n": number}))


@dataclass(frozen=True, slots=True)
class Hub:
    """An EventAdmin with its registry and its log."""

    admin: EventAdmin
    services: ServiceRegistry
    caplog: pytest.LogCaptureFixture

    def handle(self, handler: Any, topics: Any = "*", **properties: Any) -> ServiceRegistration:
        return handle(self.services, handler, topics, **properties)

    def record(self, topics: Any = "*", **properties: Any) -> Recorder:
        return record(self.services, topics, **properties)

    def post(self, *numbers: Any, topic: str = "a") -> None:
        post(self.admin, *numbers, topic=topic)

    def send(self, *topics: str, **properties: Any) -> None:
        """Send an event to each topic."""
        for topic in topics:
            self.admin.send_event(Event(topic, properties))

    def deliver(self, *numbers: Any, topic: str = "a") -> None:
        """Post as ``post`` does, and wait until all handlers have processed the events."""
        self.post(*numbers, topic=topic)
        self.flush()

    def gate(self, *numbers: Any, topics: Any = "*", **properties: Any) -> Gate:
        """Register a gate; post an event with each number, and wait until it has the first one."""
        gate = Gate()
        self.handle(gate, topics, **properties)
        self.post(*numbers)
        if numbers:
            gate.wait()
        return gate

    def failing(self, error: BaseException, topics: Any = "*", **properties: Any) -> Failing:
        """Register a handler that raises ``error``."""
        failing = Failing(error)
        self.handle(failing, topics, **properties)
        return failing

    def send_number(self, number: Any, topic: str = "a", **options: Any) -> None:
        """Send an event with ``number`` as its property ``n``."""
        self.admin.send_event(Event(topic, {"n": number}), **options)

    def flush(self) -> None:
        """Wait until all handlers have processed the posted events."""
        self.admin.flush().result(PATIENCE)

    def ignores(self, registration: ServiceRegistration) -> bool:
        """Return whether the admin ignores a handler."""
        return registration.reference.id not in {each.service_id for each in self.admin.get_dto().handlers}

    def dto(self, handler: ServiceRegistration | Recorder) -> HandlerDTO:
        """Return the snapshot of a handler."""
        registration = handler.registration if isinstance(handler, Recorder) else handler
        (found,) = [each for each in self.admin.get_dto().handlers if each.service_id == registration.reference.id]
        return found

    def blocked(self, handler: ServiceRegistration | Recorder) -> str | None:
        """Return why a handler is blocked."""
        return self.dto(handler).blocked

    def logged(self, *parts: str, level: int = logging.WARNING) -> list[str]:
        return logged(self.caplog, *parts, level=level)


Hubs = Callable[..., Hub]


@contextlib.contextmanager
def opened_hub(caplog: pytest.LogCaptureFixture, services: ServiceRegistry | None = None) -> Iterator[Hub]:
    services = services or ServiceRegistry()
    with EventAdmin(services) as admin:
        yield Hub(admin, services, caplog)
    no_defects(caplog)


#: gives each row of a table a hub of its own
own_hub: Final = renewed("hub", opened_hub, "caplog")


@pytest.fixture
def hub(services: ServiceRegistry, caplog: pytest.LogCaptureFixture) -> Iterator[Hub]:
    """An EventAdmin with the default settings."""
    with opened_hub(caplog, services) as hub:
        yield hub


@pytest.fixture
def hubs(services: ServiceRegistry, caplog: pytest.LogCaptureFixture) -> Iterator[Hubs]:
    """Make EventAdmins that are closed at the end, without waiting for stalled handlers."""
    made: list[EventAdmin] = []

    def make(services: ServiceRegistry = services, **options: Any) -> Hub:
        made.append(EventAdmin(services, **options))
        return Hub(made[-1], services, caplog)

    yield make
    for each in made:
        each.close(0)
    no_defects(caplog)

"""An EventAdmin with a registry of its own, handlers that record their events, and waits with deadlines."""

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
from messaging.testing.conformance.helpers import eventually as eventually
from tests.dispatch.helpers import logged as logged
from tests.dispatch.helpers import named as named
from tests.dispatch.helpers import no_defects as no_defects
from tests.threads import Loop

T = TypeVar("T")

#: seconds any wait in a test may take
PATIENCE: Final = 20.0
#: seconds after which a handler that does not return is blocked, in tests of that
SOON: Final = 0.25
#: and how long a test waits for what must not happen
MOMENT: Final = 0.05


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

    def __init__(self) -> None:
        self.events: list[Event] = []
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


class Gate(Recorder):
    """A handler that returns from its events once it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.returned = threading.Semaphore(0)
        self.opened = threading.Event()

    def handle_event(self, event: Event) -> None:
        super().handle_event(event)
        self.entered.release()
        assert self.opened.wait(PATIENCE)
        self.returned.release()

    def wait(self) -> None:
        """Wait until it has another event."""
        assert self.entered.acquire(timeout=PATIENCE)

    def leave(self) -> None:
        """Open it, and wait until it has returned once."""
        self.opened.set()
        assert self.returned.acquire(timeout=PATIENCE)


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


class AsyncGate(AsyncRecorder):
    """A coroutine function that returns once it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.opened: asyncio.Event | None = None
        self.cancelled = threading.Event()
        self.returned = threading.Event()

    async def handle_event(self, event: Event) -> None:
        await super().handle_event(event)
        self.opened = asyncio.Event()
        self.entered.release()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.returned.set()

    def wait(self) -> None:
        """Wait until it has another event."""
        assert self.entered.acquire(timeout=PATIENCE)

    def open(self) -> None:
        assert self.opened is not None
        self.loops[-1].call_soon_threadsafe(self.opened.set)


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
    return services.register(EventHandler, handler, named(topics, **properties), scope=scope)


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

    def flush(self) -> None:
        """Wait until all handlers have processed the posted events."""
        self.admin.flush().result(PATIENCE)

    def dto(self, registration: ServiceRegistration) -> HandlerDTO | None:
        """Return the snapshot of a handler; ``None`` if the admin ignores it."""
        found = [each for each in self.admin.get_dto().handlers if each.service_id == registration.reference.id]
        assert len(found) <= 1
        return found[0] if found else None

    def blocked(self, registration: ServiceRegistration) -> str | None:
        """Return why a handler is blocked."""
        found = self.dto(registration)
        assert found is not None
        return found.blocked

    def logged(self, *parts: str, level: int = logging.WARNING) -> list[str]:
        return logged(self.caplog, *parts, level=level)


Hubs = Callable[..., Hub]


@pytest.fixture
def hub(services: ServiceRegistry, caplog: pytest.LogCaptureFixture) -> Iterator[Hub]:
    """An EventAdmin with the default settings."""
    with EventAdmin(services) as admin:
        yield Hub(admin, services, caplog)
    no_defects(caplog)


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

"""Distributed event admins with registries of their own, consumers that record their events, and pairs of admins.

Tests of one process use ``admin``. Tests of distribution use ``pair``: two admins with two registries, on two
instances, with each transport in turn.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

import messaging
from messaging import Messaging
from messaging.distributedeventing import (
    DistributableEventConsumer,
    DistributedEventAdmin,
    EventNetwork,
    PushEvent,
    PushEventConsumer,
)
from messaging.services import ServiceRegistration, ServiceRegistry
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.dispatch.helpers import logged as logged
from tests.dispatch.helpers import named as named
from tests.dispatch.helpers import no_defects

#: the transports, as options of ``connect``
TRANSPORTS: Final = ("memory", "mqtt3", "mqtt5", "amqp")

_numbers: Final = itertools.count(1)


class Consumer:
    """A consumer that records its push events, and answers with back-pressure."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.events: Recorder[PushEvent[Any]] = Recorder()
        self.times: list[float] = []
        self.threads: list[int] = []

    def accept(self, event: PushEvent[Any]) -> Any:
        self.times.append(time.monotonic())
        self.threads.append(threading.get_ident())
        self.events.append(event)
        return self.answer

    @property
    def values(self) -> list[Any]:
        """Return the values of the data events."""
        return [each.value for each in [*self.events] if each.kind == "data"]

    @property
    def data(self) -> list[Any]:
        """Return the payloads of whole events."""
        return [each.data for each in self.values]

    @property
    def kinds(self) -> list[str]:
        return [each.kind for each in [*self.events]]

    @property
    def failures(self) -> list[Exception | None]:
        return [each.failure for each in [*self.events] if each.kind == "error"]


class Gate(Consumer):
    """A consumer that returns from its events once it is opened."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__(answer)
        self.opened = threading.Event()

    def accept(self, event: PushEvent[Any]) -> Any:
        super().accept(event)
        assert self.opened.wait(PATIENCE)
        return self.answer


class Failing(Consumer):
    """A consumer that raises ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def accept(self, event: PushEvent[Any]) -> Any:
        super().accept(event)
        raise self.error


class Prototype:
    """Makes consumers, one for each session."""

    def __init__(self, make: Callable[[], Any] = Consumer) -> None:
        self.make = make
        self.made: list[Any] = []

    def __call__(self) -> Any:
        self.made.append(self.make())
        return self.made[-1]


@pytest.fixture
def services() -> ServiceRegistry:
    return ServiceRegistry()


def consume(
    where: DistributedEventAdmin | ServiceRegistry,
    consumer: Any,
    topics: Any = "**",
    *,
    is_whole: bool = False,
    scope: Any = "singleton",
    **properties: Any,
) -> ServiceRegistration:
    """Register a consumer: ``lifecycle="SESSION"`` is the property ``event.lifecycle``."""
    services = where.services if isinstance(where, DistributedEventAdmin) else where
    interface = DistributableEventConsumer if is_whole else PushEventConsumer
    return services.register(interface, consumer, named(topics, **properties), scope=scope)


def record(where: DistributedEventAdmin | ServiceRegistry, topics: Any = "**", **options: Any) -> Consumer:
    """Register a consumer that records its events."""
    recorder = Consumer()
    consume(where, recorder, topics, **options)
    return recorder


def flush(admin: DistributedEventAdmin) -> None:
    """Wait until all consumers have processed the events that were published."""
    admin.flush().result(PATIENCE)


@pytest.fixture
def checked(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log, with every record of this project; no record may be about a defect."""
    caplog.set_level(logging.INFO, "messaging")
    yield caplog
    no_defects(caplog)


Admins = Callable[..., DistributedEventAdmin]


@pytest.fixture
def admins(services: ServiceRegistry, checked: pytest.LogCaptureFixture) -> Iterator[Admins]:
    """Make admins that are closed at the end, without waiting for consumers."""
    made: list[DistributedEventAdmin] = []

    def make(registry: ServiceRegistry | None = None, **options: Any) -> DistributedEventAdmin:
        made.append(DistributedEventAdmin(services if registry is None else registry, **options))
        return made[-1]

    yield make
    for each in made:
        each.close(0)


@pytest.fixture
def admin(admins: Admins) -> DistributedEventAdmin:
    """An admin of this process only, with the default settings."""
    return admins()


# --- distribution


def prefix() -> str:
    """Return a prefix of channels that no other test uses."""
    return f"test{next(_numbers)}x{time.monotonic_ns()}"


def connect(transport: str, request: pytest.FixtureRequest, **settings: Any) -> Messaging:
    """Connect to a broker of the tests; to the same one for each call with the same transport."""
    if transport == "memory":
        return messaging.connect("memory://distributedeventing", **settings)
    if transport == "amqp":
        return messaging.connect(request.getfixturevalue("rabbitmq").url, **settings)
    url = settings.pop("url", None) or request.getfixturevalue("mosquitto").url
    version = "5" if transport == "mqtt5" else "3.1.1"
    return messaging.connect(url, version=version, **settings)


Nodes = Callable[..., DistributedEventAdmin]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def nodes(request: pytest.FixtureRequest, checked: pytest.LogCaptureFixture) -> Iterator[Nodes]:
    """Make admins on a network of their own, each with an instance and a registry: ``nodes("memory")``."""
    made: list[tuple[DistributedEventAdmin, Messaging]] = []
    name = prefix()

    def make(transport: str = "memory", *, settings: Any = None, network: Any = None, **options: Any) -> Any:
        instance = connect(transport, request, **(settings or {}))
        try:
            admin = DistributedEventAdmin(
                ServiceRegistry(),
                instance,
                network=EventNetwork(**{"prefix": name, "heartbeat": 3.0, **(network or {})}),
                **options,
            )
        except BaseException:
            instance.close()
            raise
        made.append((admin, instance))
        admin.ready.result(PATIENCE)
        return admin

    yield make
    for admin, instance in made:
        admin.close(0)
        instance.close()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two admins on one broker."""

    one: DistributedEventAdmin
    other: DistributedEventAdmin

    def announce(self) -> None:
        """Have each admin know the consumers of the other one."""
        announce(self.one, self.other)


def announce(*admins: DistributedEventAdmin) -> None:
    """Have each admin know the consumers of the others."""
    for admin in admins:
        eventually(lambda admin=admin: len(admin.members()) >= len(admins) - 1)  # type: ignore[misc]
    for admin in admins:
        admin.announced(PATIENCE).result(PATIENCE)


@pytest.fixture
def pair(transport: str, nodes: Nodes) -> Pair:
    """Two admins, with each transport in turn."""
    return Pair(nodes(transport), nodes(transport))

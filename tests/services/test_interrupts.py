"""A signal handler that raises leaves a service registered with its registration, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from messaging.services import ServiceEvent, ServiceEventKind, ServiceReference, ServiceRegistration, ServiceRegistry
from tests.interrupts import InterruptError, again, interrupt_everywhere, ready


class Log:
    """A listener that records its events."""

    def __init__(self) -> None:
        self.events: list[tuple[ServiceEventKind, ServiceReference]] = []

    def __call__(self, event: ServiceEvent) -> None:
        self.events.append((event.kind, event.reference))

    def kinds_of(self, reference: ServiceReference) -> list[ServiceEventKind]:
        return [kind for kind, each in self.events if each is reference]


@pytest.fixture
def registry() -> Iterator[ServiceRegistry]:
    """A registry with services ranked around those of the tests."""
    found = ServiceRegistry()
    for ranking in (-10, 10):
        found.register(("a", "b"), ranking, {"service.ranking": ranking})
    yield found
    assert [found.get(each) for each in found.find("a")] == [10, -10]
    assert found.find("b") == found.find("a") == found.find()


def consistent(registry: ServiceRegistry) -> list[ServiceReference]:
    """Return the registered services, the same for every interface and in the order of ranking."""
    found = registry.find()
    assert found == registry.find("a") == registry.find("b")
    assert found == sorted(found, key=lambda each: (-each.ranking, each.id))
    assert all(registry.is_registered(each) for each in found)
    return found


def test_an_interrupted_register_leaves_nothing_registered(registry: ServiceRegistry) -> None:
    log = Log()
    registry.add_listener(log)
    before = registry.find()
    registrations: list[ServiceRegistration] = []

    def run() -> None:
        with contextlib.suppress(InterruptError), ready():
            registrations.append(registry.register(("a", "b"), "service"))

    def check() -> None:
        assert len(consistent(registry)) == len(before) + len(registrations)
        for registration in registrations:
            assert registration.unregister()
        registrations.clear()
        assert registry.find() == before
        for _, reference in log.events:
            kinds = log.kinds_of(reference)
            assert kinds == [ServiceEventKind.REGISTERED, ServiceEventKind.UNREGISTERING]
        log.events.clear()

    assert interrupt_everywhere(run, check, "registry.py") > 30


def test_an_interrupted_update_changes_properties_and_order_or_neither(registry: ServiceRegistry) -> None:
    log = Log()
    registry.add_listener(log)
    with registry.register(("a", "b"), "service") as registration:
        rankings = iter(range(10**6))

        def run() -> None:
            ranking = 20 * (next(rankings) % 2)
            with contextlib.suppress(InterruptError), ready():
                registration.update({"service.ranking": ranking})

        def check() -> None:
            assert len(consistent(registry)) == 3
            log.events.clear()
            registration.update({"service.ranking": 5})
            assert log.kinds_of(registration.reference)[-1] is ServiceEventKind.MODIFIED
            assert registry.find()[1] is registration.reference

        assert interrupt_everywhere(run, check, "registry.py") > 30


def test_listeners_receive_unregistrations_in_spite_of_interrupts(registry: ServiceRegistry) -> None:
    log = Log()
    registry.add_listener(log)
    registrations: list[ServiceRegistration] = []

    def run() -> None:
        registration = registry.register(("a", "b"), "service")
        registrations.append(registration)
        again(registration.unregister)

    def check() -> None:
        assert len(consistent(registry)) == 2
        assert log.kinds_of(registrations[-1].reference) == [
            ServiceEventKind.REGISTERED,
            ServiceEventKind.UNREGISTERING,
        ]

    assert interrupt_everywhere(run, check, "registry.py") > 30

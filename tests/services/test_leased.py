"""Services with leases: a service is there as long as its lease."""

from __future__ import annotations

import threading

import pytest

from messaging import execution
from messaging.errors import ArgumentError, UnknownLeaseError
from messaging.leases import Landlord
from messaging.services import ServiceEvent, ServiceEventKind, ServiceRegistry


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(execution.clock, "boot", made)
    return made


@pytest.fixture
def unregistered() -> threading.Event:
    return threading.Event()


@pytest.fixture
def registry(unregistered: threading.Event) -> ServiceRegistry:
    made = ServiceRegistry()

    def note(event: ServiceEvent) -> None:
        if event.kind is ServiceEventKind.UNREGISTERING:
            unregistered.set()

    made.add_listener(note)
    return made


def test_a_service_is_unregistered_when_its_lease_expires(
    registry: ServiceRegistry, unregistered: threading.Event, clock: Clock
) -> None:
    with Landlord() as landlord:
        lease = landlord.grant(10.0)
        registry.register("printer", object(), lease=lease)
        clock.now += 9.0
        lease.renew(10.0)
        clock.now += 9.0
        landlord.expire()
        assert registry.find("printer")
        clock.now += 2.0
        landlord.expire()
        assert unregistered.wait(5)
        assert not registry.find("printer")


def test_a_service_is_unregistered_when_its_lease_is_cancelled(
    registry: ServiceRegistry, unregistered: threading.Event
) -> None:
    with Landlord() as landlord:
        lease = landlord.grant(10.0)
        registry.register("printer", object(), lease=lease)
        lease.cancel()
        assert unregistered.wait(5)


def test_the_lease_is_cancelled_when_the_service_is_unregistered(registry: ServiceRegistry) -> None:
    with Landlord() as landlord:
        lease = landlord.grant(10.0)
        registration = registry.register("printer", object(), lease=lease)
        assert registration.unregister()
        assert lease.is_ended
        with pytest.raises(UnknownLeaseError):
            lease.renew(10.0)
        assert not registration.unregister()


def test_a_lease_that_has_ended_is_refused(registry: ServiceRegistry) -> None:
    with Landlord() as landlord:
        lease = landlord.grant(10.0)
        lease.cancel()
        with pytest.raises(ArgumentError, match="ended"):
            registry.register("printer", object(), lease=lease)
        with pytest.raises(ArgumentError, match="landlord of this process"):
            registry.register("printer", object(), lease="a lease")  # type: ignore[arg-type]
    assert not registry.find("printer")


def test_a_service_is_not_found_when_its_lease_has_ended_although_a_callback_blocks(clock: Clock) -> None:
    """The threads that unregister services are occupied; what is found and got does not depend on them."""
    registry = ServiceRegistry()
    go_on = threading.Event()
    try:
        with Landlord() as landlord:
            for _ in range(8):
                landlord.grant(10.0, lambda _end: go_on.wait(10))
            reference = registry.register("printer", "slow", {"size": 3}, lease=landlord.grant(11.0)).reference
            other = registry.register("printer", "other").reference
            assert registry.find("printer") == [reference, other]
            clock.now += 11.0
            landlord.expire()
            assert registry.find("printer") == [other]
            assert registry.find("printer", "(size=3)") == []
            assert registry.find_one("printer") is other
            assert registry.service("printer") == "other"
            assert registry.get(reference) is None
    finally:
        go_on.set()

"""LeaseRenewalManager: leases that are kept alive, and what its listeners are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from messaging.errors import (
    ArgumentError,
    ClosedError,
    ConnectionLostError,
    LeaseDeniedError,
    MessagingError,
    UnknownLeaseError,
)
from messaging.execution import Promise
from messaging.leases import Landlord, Lease, LeaseRenewalEvent, LeaseRenewalManager, lease_time


def wait_until(holds: Callable[[], Any], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.002)


class Grantor:
    """Grants what it is told to, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[list[tuple[Lease, float]]] = []
        self.outcome: Callable[[Lease, float], float | MessagingError] = lambda _lease, asked: asked
        self.granted_at: list[float] = []

    def grant(self, duration: float) -> Lease:
        return Lease(f"lease {len(self.requests)}", self, duration, duration)

    def renew_all(self, requests: Sequence[tuple[Lease, float]], /) -> Promise[list[float | MessagingError]]:
        self.requests.append([*requests])
        outcomes: list[float | MessagingError] = []
        for lease, asked in requests:
            outcome = self.outcome(lease, asked)
            if not isinstance(outcome, MessagingError):
                lease.note_granted(asked, outcome)
            outcomes.append(outcome)
        promise: Promise[list[float | MessagingError]] = Promise("renew")
        promise.resolve(outcomes)
        return promise

    def renew(self, lease: Lease, duration: float, /) -> Promise[float]:
        raise NotImplementedError

    def cancel(self, lease: Lease, /) -> Promise[None]:
        lease.note_cancelled()
        promise: Promise[None] = Promise("cancel")
        promise.resolve(None)
        return promise

    def cancel_all(self, leases: Sequence[Lease], /) -> Promise[list[MessagingError | None]]:
        raise NotImplementedError


class Told:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.failed: list[LeaseRenewalEvent] = []
        self.reached: list[LeaseRenewalEvent] = []

    def notify(self, event: LeaseRenewalEvent) -> None:
        self.failed.append(event)

    def expiration_reached(self, event: LeaseRenewalEvent) -> None:
        self.reached.append(event)


@pytest.fixture
def manager() -> Iterator[LeaseRenewalManager]:
    with LeaseRenewalManager() as made:
        yield made


@pytest.fixture
def grantor() -> Grantor:
    return Grantor()


def test_a_lease_is_renewed_early_enough_and_for_no_longer_than_needed(
    manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    """Scenario 21."""
    left: list[float] = []

    def outcome(lease: Lease, asked: float) -> float:
        left.append(lease.remaining)
        return asked

    grantor.outcome = outcome
    told = Told()
    lease = grantor.grant(0.5)
    manager.renew_until(lease, 1.5, 0.5, told)
    wait_until(lambda: told.reached)
    asked = [seconds for request in grantor.requests for _, seconds in request]
    assert all(0.1 < each <= 0.5 for each in left), left  # not at the last moment
    assert all(each <= 0.5 for each in asked)
    assert asked[-1] < 0.5  # min(renewal duration, remaining)
    assert not told.failed
    assert lease not in manager


def test_a_landlord_of_this_process_is_renewed(manager: LeaseRenewalManager) -> None:
    """Scenario 21."""
    with Landlord(max_duration=0.4) as landlord:
        ended = threading.Event()
        lease = landlord.grant(10.0, lambda _end: ended.set())
        manager.renew_until(lease)
        assert not ended.wait(1.2)
        assert manager.remove(lease)
        assert ended.wait(5)


@pytest.mark.parametrize("error", [UnknownLeaseError("gone"), LeaseDeniedError("no"), ArgumentError("bad")])
def test_a_definite_error_ends_the_renewal_and_the_listener_may_use_the_manager(
    manager: LeaseRenewalManager, grantor: Grantor, error: MessagingError
) -> None:
    """Scenario 21: calling the manager from the listener does not deadlock."""
    grantor.outcome = lambda _lease, _asked: error
    done = threading.Event()
    found: list[LeaseRenewalEvent] = []
    other = grantor.grant(100.0)

    class Listener:
        def notify(self, event: LeaseRenewalEvent) -> None:
            found.append(event)
            assert event.lease not in manager
            manager.renew_until(other)
            manager.set_expiration(other, 50.0)
            manager.remove(other)
            manager.clear()
            done.set()

    lease = grantor.grant(0.3)
    manager.renew_until(lease, listener=Listener())
    assert done.wait(10)
    assert found[0].error is error
    assert found[0].lease is lease
    assert len(grantor.requests) == 1
    assert not lease.is_expired  # it was not waited for


def test_an_indefinite_error_is_tried_again_until_the_lease_expires(
    manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    """Scenario 21."""
    lost = ConnectionLostError("lost")
    grantor.outcome = lambda _lease, _asked: lost
    told = Told()
    lease = grantor.grant(1.0)
    manager.renew_until(lease, listener=told)
    wait_until(lambda: told.failed)
    assert told.failed[0].error is lost
    assert lease.is_expired
    assert len(grantor.requests) >= 2
    assert not told.reached


def test_a_lease_is_renewed_after_a_passing_failure(manager: LeaseRenewalManager, grantor: Grantor) -> None:
    failures = [ConnectionLostError("lost")]
    grantor.outcome = lambda _lease, asked: failures.pop() if failures else asked
    told = Told()
    lease = grantor.grant(0.6)
    manager.renew_until(lease, 1.5, 0.6, told)
    wait_until(lambda: told.reached or told.failed)
    assert not told.failed


def test_reaching_the_desired_expiration_is_another_event_than_a_failure(
    manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    """Scenario 22."""
    told = Told()
    manager.renew_for(grantor.grant(10.0), 0.2, listener=told)
    wait_until(lambda: told.reached)
    assert told.reached[0].error is None
    assert not told.failed
    assert not grantor.requests  # the lease is longer than desired


def test_leases_of_one_grantor_are_renewed_with_one_request(manager: LeaseRenewalManager, grantor: Grantor) -> None:
    leases = [grantor.grant(0.5) for _ in range(50)]
    for each in leases:
        manager.renew_until(each)
    wait_until(lambda: grantor.requests)
    assert len(grantor.requests[0]) == 50
    assert len(manager) == 50


def test_the_desired_expiration_can_be_changed(manager: LeaseRenewalManager, grantor: Grantor) -> None:
    told = Told()
    lease = grantor.grant(100.0)
    manager.renew_until(lease, 1000.0, listener=told)
    assert 999.0 < manager.remaining(lease) <= 1000.0
    manager.set_expiration(lease, 0.1)
    wait_until(lambda: told.reached)
    with pytest.raises(UnknownLeaseError):
        manager.remaining(lease)


def test_cancelling_by_the_manager_ends_both(manager: LeaseRenewalManager, grantor: Grantor) -> None:
    lease = grantor.grant(100.0)
    manager.renew_until(lease)
    manager.cancel(lease).result()
    assert lease.is_ended
    with pytest.raises(UnknownLeaseError):
        manager.cancel(lease)


def test_bad_arguments_are_refused(manager: LeaseRenewalManager, grantor: Grantor) -> None:
    lease = grantor.grant(10.0)
    for arguments in (("x",), (lease, 0), (lease, -1.0), (lease, True), (lease, 5.0, 0.0), (lease, 5.0, 1.0, "x")):
        with pytest.raises(ArgumentError):
            manager.renew_until(*arguments)
    assert len(manager) == 0


def test_a_closed_manager_renews_nothing(grantor: Grantor) -> None:
    told = Told()
    manager = LeaseRenewalManager()
    lease = grantor.grant(0.2)
    manager.renew_until(lease, listener=told)
    manager.close()
    manager.close()
    with pytest.raises(ClosedError):
        manager.renew_until(lease)
    until = lease_time() + 0.3
    wait_until(lambda: lease_time() > until)
    assert not grantor.requests
    assert not told.failed

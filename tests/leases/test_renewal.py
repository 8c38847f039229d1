"""LeaseRenewalManager: leases that are kept alive, and what its listeners are told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from messaging.errors import (
    ArgumentError,
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    LeaseDeniedError,
    MessagingError,
    OutcomeUnknownError,
    UnknownLeaseError,
)
from messaging.execution import Promise
from messaging.leases import Landlord, Lease, LeaseRenewalEvent, LeaseRenewalManager, lease_time
from messaging.testing.clock import VirtualClock
from messaging.testing.waiting import Recorder, eventually
from tests.leases.clocks import FakeClock


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
        self.failed: Recorder[LeaseRenewalEvent] = Recorder()
        self.reached: Recorder[LeaseRenewalEvent] = Recorder()

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
    virtual_clock: VirtualClock, manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    """Scenario 21."""
    left: list[float] = []

    def outcome(lease: Lease, asked: float) -> float:
        left.append(lease.remaining)
        return asked

    grantor.outcome = outcome
    told = Told()
    lease = grantor.grant(50.0)
    manager.renew_until(lease, 150.0, 50.0, told)
    virtual_clock.advance(149.0)
    assert not told.reached
    virtual_clock.advance(1.0)
    assert told.reached
    asked = [seconds for request in grantor.requests for _, seconds in request]
    assert all(5.0 <= each <= 50.0 for each in left), left  # not at the last moment
    assert all(each <= 50.0 for each in asked)
    assert asked[-1] < 50.0  # min(renewal duration, remaining)
    assert not told.failed
    assert lease not in manager


def test_a_landlord_of_this_process_is_renewed(virtual_clock: VirtualClock, manager: LeaseRenewalManager) -> None:
    """Scenario 21."""
    with Landlord(max_duration=60.0) as landlord:
        ended: list[object] = []
        lease = landlord.grant(600.0, ended.append)
        manager.renew_until(lease)
        virtual_clock.advance(300.0)
        assert not ended
        assert manager.remove(lease)
        virtual_clock.advance(60.0)
        assert ended


@pytest.mark.parametrize("error", [UnknownLeaseError("gone"), LeaseDeniedError("no"), ArgumentError("bad")])
def test_a_definite_error_ends_the_renewal_and_the_listener_may_use_the_manager(
    virtual_clock: VirtualClock, manager: LeaseRenewalManager, grantor: Grantor, error: MessagingError
) -> None:
    """Scenario 21: calling the manager from the listener does not deadlock."""
    grantor.outcome = lambda _lease, _asked: error
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

    lease = grantor.grant(30.0)
    manager.renew_until(lease, listener=Listener())
    virtual_clock.until(lambda: found, within=30.0)
    assert found[0].error is error
    assert found[0].lease is lease
    assert len(grantor.requests) == 1
    assert not lease.is_expired  # it was not waited for


def test_an_indefinite_error_is_tried_again_until_the_lease_expires(
    virtual_clock: VirtualClock, manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    """Scenario 21."""
    lost = ConnectionLostError("lost")
    grantor.outcome = lambda _lease, _asked: lost
    told = Told()
    lease = grantor.grant(60.0)
    manager.renew_until(lease, listener=told)
    virtual_clock.advance(59.9)
    assert not told.failed
    virtual_clock.advance(0.2)
    assert told.failed[0].error is lost
    assert lease.is_expired
    assert len(grantor.requests) >= 2
    assert not told.reached


def test_a_lease_is_renewed_after_a_passing_failure(
    virtual_clock: VirtualClock, manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    failures = [ConnectionLostError("lost")]
    grantor.outcome = lambda _lease, asked: failures.pop() if failures else asked
    told = Told()
    lease = grantor.grant(60.0)
    manager.renew_until(lease, 150.0, 60.0, told)
    virtual_clock.advance(150.0)
    assert told.reached
    assert not told.failed


def test_reaching_the_desired_expiration_is_another_event_than_a_failure(
    virtual_clock: VirtualClock, manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    """Scenario 22."""
    told = Told()
    manager.renew_for(grantor.grant(600.0), 60.0, listener=told)
    virtual_clock.advance(60.0)
    assert told.reached[0].error is None
    assert not told.failed
    assert not grantor.requests  # the lease is longer than desired


def test_leases_of_one_grantor_are_renewed_with_one_request(
    virtual_clock: VirtualClock, manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    leases = [grantor.grant(60.0) for _ in range(50)]
    for each in leases:
        manager.renew_until(each)
    virtual_clock.until(lambda: grantor.requests)
    assert len(grantor.requests[0]) == 50
    assert len(manager) == 50


def test_the_desired_expiration_can_be_changed(manager: LeaseRenewalManager, grantor: Grantor) -> None:
    told = Told()
    lease = grantor.grant(100.0)
    manager.renew_until(lease, 1000.0, listener=told)
    assert 999.0 < manager.remaining(lease) <= 1000.0
    manager.set_expiration(lease, 0.1)
    eventually(lambda: told.reached)
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


def test_a_closed_manager_renews_nothing(virtual_clock: VirtualClock, grantor: Grantor) -> None:
    told = Told()
    manager = LeaseRenewalManager()
    lease = grantor.grant(60.0)
    manager.renew_until(lease, listener=told)
    manager.close()
    manager.close()
    with pytest.raises(ClosedError):
        manager.renew_until(lease)
    virtual_clock.advance(90.0)
    assert not grantor.requests
    assert not told.failed


class SilentGrantor(Grantor):
    """Answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Promise[list[float | MessagingError]]] = []

    def renew_all(self, requests: Sequence[tuple[Lease, float]], /) -> Promise[list[float | MessagingError]]:
        promise: Promise[list[float | MessagingError]] = Promise("renew")
        self.answers.append(promise)
        self.requests.append([*requests])
        return promise

    def grant_silently(self, duration: float) -> Lease:
        return Lease("silent", self, duration, duration)

    def succeed(self, number: int, duration: float) -> None:
        for lease, asked in self.requests[number]:
            lease.note_granted(asked, duration)
        self.answers[number].resolve([duration] * len(self.requests[number]))

    def lose(self, number: int) -> None:
        self.answers[number].resolve([OutcomeUnknownError("no reply")] * len(self.requests[number]))


class Clocked:
    """A manager with one lease of a silent grantor, and time that passes when the test says so."""

    def __init__(
        self,
        manager: LeaseRenewalManager,
        desired: float = Lease.FOREVER,
        duration: float = 10.0,
        *,
        grantor: SilentGrantor | None = None,
        renew_duration: float = Lease.ANY,
    ) -> None:
        self.manager = manager
        self.clock = FakeClock()
        self.grantor = SilentGrantor() if grantor is None else grantor
        self.told = Told()
        self.lease = self.grantor.grant_silently(duration)
        manager.renew_until(self.lease, desired, renew_duration, self.told)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.manager.look()

    def wait_for_requests(self, count: int) -> None:
        eventually(lambda: len(self.grantor.answers) == count)

    def look_twice(self) -> None:
        """Wait until the manager has looked at the leases."""
        other = Told()
        lease = Lease("other", Grantor(), 1.0, 1.0)
        lease.note_cancelled()
        self.manager.renew_until(lease, listener=other)
        self.manager.look()
        eventually(lambda: other.failed)


def test_a_request_without_an_answer_is_made_again_before_the_lease_expires(manager: LeaseRenewalManager) -> None:
    """Scenario 21: one lost reply does not cost the lease."""
    it = Clocked(manager)
    it.pass_time(8.1)
    it.wait_for_requests(1)
    it.pass_time(0.9)  # less than half of what was left
    it.look_twice()
    assert len(it.grantor.answers) == 1
    it.pass_time(0.1)
    it.wait_for_requests(2)
    it.grantor.succeed(1, 10.0)
    it.grantor.lose(0)  # a late failure of the first request is ignored
    it.pass_time(5.0)
    it.look_twice()
    assert len(it.grantor.answers) == 2
    assert it.lease in manager
    assert not it.told.failed
    it.pass_time(3.1)
    it.wait_for_requests(3)


def test_a_late_success_of_an_earlier_request_counts(manager: LeaseRenewalManager) -> None:
    it = Clocked(manager)
    it.pass_time(8.1)
    it.wait_for_requests(1)
    it.pass_time(1.0)
    it.wait_for_requests(2)
    it.grantor.succeed(0, 10.0)
    it.grantor.lose(1)
    it.pass_time(1.0)
    it.look_twice()
    assert len(it.grantor.answers) == 2
    assert not it.told.failed


class DistantGrantor(SilentGrantor):
    """Notes requests with the leases, as the way to a grantor in another process does."""

    def renew_all(self, requests: Sequence[tuple[Lease, float]], /) -> Promise[list[float | MessagingError]]:
        for lease, duration in requests:
            lease.note_asked(duration, lease_time())
        return super().renew_all(requests)


def test_a_request_that_shortens_a_lease_is_made_again_before_it_ends(manager: LeaseRenewalManager) -> None:
    """The shorter time counts before the answer, also for the other users of the lease."""
    it = Clocked(manager, duration=1000.0, grantor=DistantGrantor(), renew_duration=10.0)
    other = Told()
    manager.renew_until(it.lease, listener=other, owner="other")
    manager.renew_now(it.lease)
    it.wait_for_requests(1)
    it.pass_time(4.9)
    it.look_twice()
    assert len(it.grantor.answers) == 1
    it.pass_time(0.1)
    eventually(lambda: [len(each) for each in it.grantor.requests] == [1, 1, 1])  # the other user asks, too
    it.pass_time(5.0)
    eventually(lambda: it.told.failed and other.failed)


def test_a_lost_answer_to_a_shorter_renewal_is_reckoned_with_by_all_users(manager: LeaseRenewalManager) -> None:
    it = Clocked(manager, duration=1000.0, grantor=DistantGrantor(), renew_duration=10.0)
    manager.renew_until(it.lease, listener=Told(), owner="other")
    manager.renew_now(it.lease)
    it.wait_for_requests(1)
    it.grantor.lose(0)
    it.pass_time(0.1)
    it.wait_for_requests(2)  # that of the other user


def test_the_end_of_a_lease_is_told_while_a_request_is_under_way(manager: LeaseRenewalManager) -> None:
    it = Clocked(manager)
    it.pass_time(9.8)
    it.wait_for_requests(1)
    it.pass_time(0.2)
    eventually(lambda: it.told.failed)
    assert isinstance(it.told.failed[0].error, DeadlineError)
    assert it.lease not in manager
    it.grantor.succeed(0, 10.0)  # too late, and ignored
    assert len(it.told.failed) == 1


def test_the_desired_expiration_is_told_while_a_request_is_under_way(manager: LeaseRenewalManager) -> None:
    """Scenario 22."""
    it = Clocked(manager, 11.0)
    it.pass_time(8.1)
    it.wait_for_requests(1)
    it.lease.note_granted(100.0, 100.0)  # renewed by the program
    it.pass_time(2.9)
    eventually(lambda: it.told.reached)
    assert not it.told.failed


def test_a_lease_that_expired_before_its_desired_expiration_has_failed(manager: LeaseRenewalManager) -> None:
    """Scenario 22, after the machine was suspended beyond both."""
    it = Clocked(manager, 20.0)
    it.pass_time(30.0)
    eventually(lambda: it.told.failed or it.told.reached)
    assert not it.told.reached
    assert isinstance(it.told.failed[0].error, UnknownLeaseError)


def test_a_lease_that_was_cancelled_before_its_desired_expiration_has_failed(manager: LeaseRenewalManager) -> None:
    """Scenario 22."""
    it = Clocked(manager, 5.0)
    it.lease.note_cancelled()
    it.pass_time(5.0)
    eventually(lambda: it.told.failed or it.told.reached)
    assert not it.told.reached


def test_rounding_does_not_keep_a_lease_from_its_desired_expiration(manager: LeaseRenewalManager) -> None:
    """Scenario 22: the grantor granted what was asked for."""
    it = Clocked(manager, 1000.1)
    it.pass_time(9.9)
    it.wait_for_requests(1)
    asked = it.grantor.requests[0][0][1]
    it.grantor.succeed(0, asked - 1e-9)
    it.pass_time(asked)
    eventually(lambda: it.told.failed or it.told.reached)
    assert not it.told.failed
    assert len(it.grantor.answers) == 1


@pytest.mark.parametrize("answer", ["raises", "short", "long", "no promise"])
def test_a_grantor_that_misbehaves_costs_no_lease_of_another_one(
    manager: LeaseRenewalManager, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(Grantor):
        def renew_all(self, requests: Sequence[tuple[Lease, float]], /) -> Any:
            self.requests.append([*requests])
            if answer == "raises":
                raise RuntimeError("a defect")
            promise: Promise[list[float | MessagingError]] = Promise("renew")
            promise.resolve([] if answer == "short" else [1.0, 1.0, 1.0])
            return None if answer == "no promise" else promise

    clock = FakeClock()
    bad, good = Bad(), Grantor()
    lost, kept = Told(), Told()
    leases = [Lease(name, grantor, 10.0, 10.0) for name, grantor in (("bad", bad), ("good", good))]
    manager.renew_until(leases[0], listener=lost)
    manager.renew_until(leases[1], renew_duration=10.0, listener=kept)
    clock.advance(9.0)
    manager.look()
    eventually(lambda: bad.requests and leases[1].remaining == 10.0)
    clock.advance(0.9)
    manager.look()
    eventually(lambda: len(bad.requests) >= 2)  # tried again
    assert leases[1] in manager
    clock.advance(0.2)
    manager.look()
    eventually(lambda: lost.failed)
    assert not kept.failed
    assert "grantor" in str(lost.failed[0].error)


def test_a_refused_argument_of_a_whole_request_is_tried_again(manager: LeaseRenewalManager) -> None:
    it = Clocked(manager)
    it.pass_time(8.1)
    it.wait_for_requests(1)
    it.grantor.answers[0].reject(ArgumentError("no such operation"))
    it.pass_time(1.0)
    it.wait_for_requests(2)
    assert not it.told.failed


def test_a_log_handler_may_use_the_manager(manager: LeaseRenewalManager, grantor: Grantor) -> None:
    """A lease without a listener that is given up is logged without a lock."""
    done = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            manager.clear()
            done.set()

    handler = Handler()
    logging.getLogger("messaging.leases.renewal").addHandler(handler)
    try:
        lease = grantor.grant(100.0)
        lease.note_cancelled()
        manager.renew_until(lease)
        assert done.wait(10)
    finally:
        logging.getLogger("messaging.leases.renewal").removeHandler(handler)


def test_a_lease_that_one_owner_has_made_shorter_is_renewed_in_time_for_the_others(
    virtual_clock: VirtualClock, manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    lease = grantor.grant(3600.0)
    grantor.outcome = lambda _lease, asked: 3600.0 if asked == Lease.ANY else asked
    manager.renew_until(lease, owner="long")
    manager.renew_until(lease, Lease.FOREVER, 20.0, owner="short")
    manager.renew_now(lease)
    eventually(lambda: lease.duration == 20.0)
    manager.remove(lease, owner="short")
    virtual_clock.advance(19.0)
    eventually(lambda: lease.duration == 3600.0)


def test_all_owners_of_a_lease_are_told_at_once_that_it_is_unknown(
    virtual_clock: VirtualClock, manager: LeaseRenewalManager, grantor: Grantor
) -> None:
    lease = grantor.grant(3600.0)
    told = {name: Told() for name in ("one", "two")}
    for name, each in told.items():
        manager.renew_until(lease, listener=each, owner=name)
    grantor.outcome = lambda _lease, _asked: UnknownLeaseError("gone")
    manager.renew_now(lease)
    virtual_clock.advance(1.0)
    for each in told.values():
        each.failed.wait_for(1)


def test_owners_of_one_lease_renew_it_each_for_itself(manager: LeaseRenewalManager, grantor: Grantor) -> None:
    lease = grantor.grant(100.0)
    one, two = object(), object()
    manager.renew_until(lease, owner=one)
    manager.renew_until(lease, owner=two)
    manager.renew_until(lease, 50.0, owner=two)
    assert manager.remaining(lease) <= 50.0
    assert manager.remove(lease, owner=two)
    assert not manager.remove(lease, owner=two)
    assert lease in manager
    assert manager.remaining(lease) == float("inf")
    assert manager.remove(lease)
    assert lease not in manager


def test_an_expiration_beyond_the_range_of_floats_is_never(manager: LeaseRenewalManager, grantor: Grantor) -> None:
    lease = grantor.grant(100.0)
    manager.renew_until(lease, 10**400)
    assert manager.remaining(lease) == float("inf")
    manager.set_expiration(lease, 5.0)
    manager.set_expiration(lease, 10**400)
    assert manager.remaining(lease) == float("inf")
    for bad in (-(10**400), -(10**5000)):
        with pytest.raises(ArgumentError):
            manager.renew_until(lease, bad)


def test_many_desired_expirations_cost_little(grantor: Grantor) -> None:
    """A look at the leases costs no more for those that are not due."""
    clock = FakeClock()
    count = 20_000
    with LeaseRenewalManager() as manager:
        told = Told()
        for number in range(count):
            manager.renew_until(Lease(str(number), grantor, 1e6, 1e6), 10.0 + number, listener=told)
        begun = time.process_time()
        for number in range(200):
            clock.now = 1010.5 + number
            manager.look()
            eventually(lambda number=number: len(told.reached) == number + 1)  # type: ignore[misc]
        assert time.process_time() - begun < 1.5
        assert len(manager) == count - 200

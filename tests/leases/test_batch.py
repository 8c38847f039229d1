"""Batches of leases: partial failure, grantors, cost."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from messaging.errors import ArgumentError, ClosedError, LeaseMapError, UnknownLeaseError
from messaging.execution import Promise
from messaging.leases import Landlord, Lease, LeaseMap, LeaseRenewalManager, cancel_all, renew_all
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.leases.clocks import FakeClock


def test_failures_are_reported_per_lease_and_the_others_are_renewed() -> None:
    """Scenario 20."""
    clock = FakeClock()
    with Landlord() as landlord, Landlord() as other:
        leases = [landlord.grant(10.0) for _ in range(5)] + [other.grant(10.0) for _ in range(5)]
        leases[1].cancel()
        leases[7].cancel()
        clock.advance(5.0)
        with pytest.raises(LeaseMapError, match="2 of 10") as caught:
            renew_all(dict.fromkeys(leases, 10.0)).result()
        assert set(caught.value.failures) == {leases[1], leases[7]}
        assert all(isinstance(each, UnknownLeaseError) for each in caught.value.failures.values())
        alive = [each for at, each in enumerate(leases) if at not in (1, 7)]
        assert all(each.remaining == 10.0 for each in alive)
        with pytest.raises(LeaseMapError):
            cancel_all(leases).result()
        assert all(each.is_ended for each in leases)
        cancel_all([]).result()


def test_a_lease_map_takes_leases_of_one_grantor_and_forgets_those_that_failed() -> None:
    """Scenario 20."""
    with Landlord() as landlord, Landlord() as other:
        leases = LeaseMap({landlord.grant(10.0): 20.0, landlord.grant(10.0): 30.0})
        foreign = other.grant(10.0)
        assert not leases.can_contain(foreign)
        with pytest.raises(ArgumentError, match="one grantor"):
            leases[foreign] = 10.0
        with pytest.raises(ArgumentError):
            leases["lease"] = 10.0  # type: ignore[index]
        with pytest.raises(ArgumentError):
            leases[landlord.grant(10.0)] = 0.0
        first, second = leases
        first.cancel()
        with pytest.raises(LeaseMapError):
            leases.renew_all().result()
        assert [*leases] == [second]
        assert second.duration == 30.0
        leases.cancel_all().result()
        assert second.is_ended


@pytest.mark.slow
def test_a_hundred_thousand_leases_cost_little() -> None:
    """Renewing all takes at most 5 s of processor time, and a lease at most 1 KiB."""
    count = 100_000
    with Landlord(max_leases=2 * count) as landlord:
        leases = [landlord.grant(600.0, lambda _end: None) for _ in range(count)]
        begun = time.process_time()
        renew_all(dict.fromkeys(leases, 600.0)).result()
        assert time.process_time() - begun < 5.0
        cancel_all(leases).result()
        leases.clear()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            leases = [landlord.grant(600.0, lambda _end: None) for _ in range(2000)]
            assert (tracemalloc.get_traced_memory()[0] - before) / 2000 <= 1024
        finally:
            tracemalloc.stop()


def test_a_grantor_that_raises_keeps_no_other_one_from_being_asked() -> None:
    """Scenario 20: nor one that answers with too few outcomes; the promise has its outcome in any case."""

    class Bad(Landlord):
        def renew_all(self, requests: Sequence[tuple[Lease, float]]) -> Any:
            if self.name == "closed":
                raise ClosedError("the instance is closed")
            if self.name == "defect":
                raise RuntimeError("a defect")
            promise: Promise[list[Any]] = Promise("renew")
            promise.resolve([])
            return promise

    clock = FakeClock()
    landlords = [Bad("closed"), Bad("defect"), Bad("short")]
    with Landlord() as good:
        bad = [each.grant(10.0) for each in landlords]
        alive = [good.grant(10.0), good.grant(10.0)]
        clock.advance(5.0)
        with pytest.raises(LeaseMapError, match="3 of 5") as caught:
            renew_all(dict.fromkeys([alive[0], *bad, alive[1]], 10.0)).result(PATIENCE)
        assert [each.remaining for each in alive] == [10.0, 10.0]
        assert isinstance(caught.value.failures[bad[0]], ClosedError)
        assert set(caught.value.failures) == set(bad)
    for each in landlords:
        each.close()


# --- grantors that block


class _Blocking:
    """A grantor that does not return until it is told to."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: waiting.Recorder[int] = waiting.Recorder()

    def renew_all(self, requests: Any) -> Any:
        return self._answer([10.0] * len(requests))

    def cancel_all(self, leases: Any) -> Any:
        return self._answer([None] * len(leases))

    def _answer(self, outcomes: list[Any]) -> Any:
        self.asked.append(len(outcomes))
        assert self.gate.wait(PATIENCE)
        promise: Promise[Any] = Promise("an answer")
        promise.resolve(outcomes)
        return promise


@table("is_first", [True, False])
def test_a_grantor_that_blocks_delays_no_other_one_of_a_batch(is_first: bool) -> None:
    blocking = _Blocking()
    blocked: Any = Lease("x", blocking, 10.0, 10.0)  # type: ignore[arg-type]
    renewed: waiting.Recorder[Lease] = waiting.Recorder()
    with Landlord() as landlord:
        free = landlord.grant(60.0)
        free.on_renewed = renewed.append
        leases = [blocked, free] if is_first else [free, blocked]
        promise = renew_all(leases)
        renewed.wait_for(1)
        ended = cancel_all(leases)
        eventually(lambda: len(landlord) == 0)
        blocking.asked.wait_for(2)
        blocking.gate.set()
        promise.result(PATIENCE)
        ended.result(PATIENCE)


def test_a_grantor_that_blocks_delays_no_other_one_of_a_renewal_manager() -> None:
    blocking = _Blocking()
    renewed: waiting.Recorder[Lease] = waiting.Recorder()
    with Landlord() as landlord, LeaseRenewalManager() as manager:
        blocked: Any = Lease("x", blocking, 60.0, 60.0)  # type: ignore[arg-type]
        free = landlord.grant(60.0)
        free.on_renewed = renewed.append
        for lease in (blocked, free):
            manager.renew_until(lease, 3600.0)
        manager.renew_now(blocked)
        blocking.asked.wait_for(1)
        manager.renew_now(free)
        renewed.wait_for(1)
        other: Any = Lease("y", blocking, 60.0, 60.0)  # type: ignore[arg-type]
        manager.renew_until(other, 3600.0)
        manager.renew_now(other)
        manager.renew_now(free)
        renewed.wait_for(2)
        assert len(blocking.asked) == 1  # it has one thread
        blocking.gate.set()
        blocking.asked.wait_for(2)  # tried again

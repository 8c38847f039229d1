"""Batches of leases: partial failure, grantors, cost."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from messaging.errors import ArgumentError, ClosedError, LeaseMapError, UnknownLeaseError
from messaging.execution import Promise
from messaging.leases import Landlord, Lease, LeaseMap, cancel_all, renew_all
from messaging.testing.waiting import PATIENCE
from tests.leases.clocks import FakeClock


def test_failures_are_reported_per_lease_and_the_others_are_renewed() -> None:
    """Scenario 20."""
    clock = FakeClock()
    with Landlord(clock=clock) as landlord, Landlord(clock=clock) as other:
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
    landlords = [Bad("closed", clock=clock), Bad("defect", clock=clock), Bad("short", clock=clock)]
    with Landlord(clock=clock) as good:
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

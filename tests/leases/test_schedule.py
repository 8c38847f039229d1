"""The schedule of a renewal manager: which leases are due."""

from __future__ import annotations

import gc
import math
import tracemalloc
import weakref

from messaging.leases import Landlord, Lease
from messaging.leases.renewed import Schedule
from tests.leases.clocks import FakeClock


class Entry:
    def __init__(self, lease: Lease, due: float, early: float = math.inf) -> None:
        self.lease = lease
        self.due = due
        self.early = early
        self.number = 0


def test_due_leases_are_taken_with_early_ones_of_their_grantors() -> None:
    clock = FakeClock()
    with Landlord() as one, Landlord() as other:
        schedule = Schedule()
        due, early, late = (Entry(one.grant(), 1000.0 + at, 990.0 + at) for at in (10.0, 15.0, 30.0))
        foreign = Entry(other.grant(), 1012.0, 1002.0)
        for each in (due, early, late, foreign):
            schedule.add(each)
        assert schedule.left() == 10.0
        assert schedule.is_first(due)
        clock.advance(9.0)
        assert schedule.take() == []
        clock.advance(1.0)
        assert schedule.take() == [due, early]
        clock.advance(2.0)
        early.due, early.early = 1014.0, math.inf
        schedule.move(early)
        assert schedule.take() == [foreign]
        assert schedule.left() == 2.0
        schedule.remove(early)
        clock.advance(18.0)
        assert schedule.take() == [late]
        assert schedule.left() is None
        assert len(schedule) == 3


def test_a_removed_lease_is_not_kept_alive_and_moving_costs_no_memory() -> None:
    with Landlord() as landlord:
        schedule = Schedule()
        entry, removed = (Entry(landlord.grant(), 1e6, 0.9e6) for _ in range(2))
        schedule.add(entry)
        schedule.add(removed)
        schedule.remove(removed)
        landlord.suspend([removed.lease.id])
        found = weakref.ref(removed)
        del removed
        gc.collect()
        assert found() is None
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(20_000):
                entry.due, entry.early = 1e6 + number, 0.9e6 + number
                schedule.move(entry)
            assert tracemalloc.get_traced_memory()[0] - before < 100_000
        finally:
            tracemalloc.stop()

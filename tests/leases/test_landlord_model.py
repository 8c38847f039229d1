"""A landlord against a model, with a clock that the test sets."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from messaging import execution
from messaging.errors import UnknownLeaseError
from messaging.leases import ANY, Landlord, LeaseEnd, StoredTime, cancel_all, renew_all
from messaging.leases.landlord import GrantedLease
from messaging.testing.waiting import Recorder
from tests.leases.clocks import FakeClock

_LONGEST = 50.0
_DEFAULT = 7.0
durations = st.one_of(st.just(ANY), st.floats(0.5, 100.0), st.just(float("inf")))


def granted(asked: float) -> float:
    return _DEFAULT if asked == ANY else min(asked, _LONGEST)


class Leases(RuleBasedStateMachine):
    """The model: when each lease ends, and how it ended."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.landlord = Landlord(max_duration=_LONGEST, default_duration=_DEFAULT)
        self.expires: dict[GrantedLease, float] = {}
        self.cancelled: set[GrantedLease] = set()
        self.told: dict[str, Recorder[LeaseEnd]] = {}

    def is_alive(self, lease: GrantedLease) -> bool:
        return lease not in self.cancelled and self.clock.now < self.expires[lease]

    @rule(target=leases, asked=durations)
    def grant(self, asked: float) -> GrantedLease:
        told: Recorder[LeaseEnd] = Recorder()
        lease = self.landlord.grant(asked, told)
        self.told[lease.id] = told
        self.expires[lease] = self.clock.now + granted(asked)
        assert lease.duration == granted(asked)
        return lease

    @rule(lease=leases, asked=durations)
    def renew(self, lease: GrantedLease, asked: float) -> None:
        if self.is_alive(lease):
            assert lease.renew(asked).result() == granted(asked)
            self.expires[lease] = self.clock.now + granted(asked)
        else:
            try:
                lease.renew(asked)
            except UnknownLeaseError:
                return
            raise AssertionError("a lease that has ended was renewed")

    @rule(lease=leases)
    def cancel(self, lease: GrantedLease) -> None:
        is_alive = self.is_alive(lease)
        try:
            lease.cancel()
        except UnknownLeaseError:
            assert not is_alive
        else:
            assert is_alive
            self.cancelled.add(lease)

    @rule(chosen=st.lists(leases, max_size=5, unique_by=id), asked=durations)
    def renew_several(self, chosen: list[GrantedLease], asked: float) -> None:
        alive = [each for each in chosen if self.is_alive(each)]
        error = renew_all(dict.fromkeys(chosen, asked)).exception()
        failures = {} if error is None else error.failures  # type: ignore[attr-defined]
        assert set(failures) == set(chosen) - set(alive)
        for each in alive:
            self.expires[each] = self.clock.now + granted(asked)

    @rule(chosen=st.lists(leases, max_size=3, unique_by=id))
    def cancel_several(self, chosen: list[GrantedLease]) -> None:
        alive = [each for each in chosen if self.is_alive(each)]
        error = cancel_all(chosen).exception()
        assert (error is None) == (len(alive) == len(chosen))
        self.cancelled.update(alive)

    @rule(seconds=st.floats(0.0, 30.0))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def let_the_timer_fire(self) -> None:
        self.landlord.expire()
        assert len(self.landlord) == sum(map(self.is_alive, self.expires))

    @rule(lease=consumes(leases))
    def restart(self, lease: GrantedLease) -> None:
        """A lease moves to another landlord, as after a restart, whatever the wall clock says there."""
        if not self.is_alive(lease):
            return
        day = 86_400.0
        for wall in (time.time() - day, time.time() + day):
            stored = StoredTime.after(lease.remaining)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(execution.clock, "wall", lambda wall=wall: wall)
                left = stored.remaining()
            assert abs(left - lease.remaining) < 1e-6
        with Landlord() as other:
            again = other.restore(lease.id, left, lease.duration)
            assert abs(again.remaining - lease.remaining) < 1e-6

    @invariant()
    def every_lease_tells_the_truth(self) -> None:
        for lease, expires in self.expires.items():
            is_alive = self.is_alive(lease)
            assert lease.is_ended != is_alive
            assert (self.landlord.lease(lease.id) is not None) == is_alive
            assert abs(lease.remaining - (max(0.0, expires - self.clock.now) if is_alive else 0.0)) < 1e-6

    def teardown(self) -> None:
        self.landlord.close()
        for lease in self.expires:
            expected = LeaseEnd.CANCELLED if lease in self.cancelled else lease.end
            assert self.told[lease.id].wait_for(1) == [expected]


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

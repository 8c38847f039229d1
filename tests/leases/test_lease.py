"""Leases of a landlord in this process: what is granted, renewed and refused."""

from __future__ import annotations

import datetime
import math
import pickle
import threading
import tracemalloc
from typing import Any

import pytest

from messaging.errors import ArgumentError, ClosedError, LeaseDeniedError, UnknownLeaseError
from messaging.execution import threads
from messaging.leases import ANY, FOREVER, Landlord, Lease, LeaseEnd, release
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder
from tests.leases.clocks import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def landlord(clock: FakeClock) -> Any:
    with Landlord(max_duration=100.0, default_duration=20.0, max_leases=3) as made:
        yield made


def test_the_granted_duration_may_be_shorter_and_the_lease_says_so(landlord: Landlord) -> None:
    """Scenario 16."""
    lease = landlord.grant(1000.0)
    assert (lease.requested, lease.duration, lease.remaining) == (1000.0, 100.0, 100.0)
    expiration = lease.expiration
    assert expiration is not None
    left = expiration - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(seconds=99) < left <= datetime.timedelta(seconds=100)


@table("duration", [0, 0.0, -2, -0.5, -math.inf, math.nan, True, "60", None, datetime.timedelta(seconds=5)])
def test_a_duration_that_is_none_is_refused(clock: FakeClock, duration: Any) -> None:
    """Scenario 17."""
    with Landlord() as landlord:
        lease = landlord.grant(10.0)
        for ask in (landlord.grant, lease.renew):
            with pytest.raises(ArgumentError):
                ask(duration)
        assert len(landlord) == 1
        assert lease.remaining == 10.0


def test_any_and_forever_are_accepted(landlord: Landlord, clock: FakeClock) -> None:
    """Scenario 17."""
    assert (Lease.ANY, Lease.FOREVER) == (ANY, FOREVER) == (-1.0, math.inf)
    assert landlord.grant(Lease.ANY).duration == 20.0
    assert landlord.grant(Lease.FOREVER).duration == 100.0
    with Landlord(max_duration=math.inf) as generous:
        lease = generous.grant(Lease.FOREVER)
        clock.advance(1e9)
        assert lease.remaining == math.inf
        assert lease.expiration is None
        assert not lease.is_expired
        assert lease.renew(5.0).result() == 5.0
        clock.advance(6.0)
        assert lease.is_expired


def test_an_expired_lease_is_refused_before_any_timer_ran(landlord: Landlord, clock: FakeClock) -> None:
    """Scenario 19; the timer has no part in it, so a process that was suspended refuses at once."""
    lease = landlord.grant(10.0)
    clock.advance(10.0)
    assert lease.is_expired
    assert lease.is_ended
    assert landlord.lease(lease.id) is None
    assert landlord.leases() == []
    refuses(lease, UnknownLeaseError)


def refuses(lease: Lease, error: type[Exception]) -> None:
    """Check that a lease can be neither renewed nor cancelled."""
    with pytest.raises(error):
        lease.renew(10.0)
    with pytest.raises(error):
        lease.cancel()


def test_a_cancelled_lease_is_refused(landlord: Landlord) -> None:
    """Scenario 19."""
    lease = landlord.grant(10.0)
    assert lease.cancel().result() is None
    assert lease.is_ended
    assert lease.remaining == 0.0
    refuses(lease, UnknownLeaseError)


@table("end", [*LeaseEnd])
def test_the_callback_gets_the_reason_once(clock: FakeClock, end: LeaseEnd) -> None:
    found: Recorder[LeaseEnd] = Recorder()
    landlord = Landlord()
    lease = landlord.grant(10.0, found)
    if end is LeaseEnd.EXPIRED:
        clock.advance(11.0)
        landlord.expire()
        landlord.expire()
    elif end is LeaseEnd.CANCELLED:
        lease.cancel()
    else:
        landlord.close()
    found.wait_for(1)
    lease.when_ended(found)  # too late: it is called at once
    assert found.wait_for(2) == [end, end]
    landlord.close()


def test_a_callback_that_raises_does_not_keep_others(landlord: Landlord, caplog: pytest.LogCaptureFixture) -> None:
    ended: Recorder[LeaseEnd] = Recorder()
    lease = landlord.grant(10.0, lambda _end: 1 / 0)
    lease.when_ended(ended)
    lease.cancel()
    ended.wait_for(1)
    assert "callback failed" in caplog.text


def test_a_callback_may_use_the_landlord(landlord: Landlord) -> None:
    found: Recorder[Lease] = Recorder()
    landlord.grant(10.0, lambda _end: found.append(landlord.grant(5.0))).cancel()
    assert not found.wait_for(1)[0].is_ended


def test_leases_are_bounded(landlord: Landlord, clock: FakeClock) -> None:
    leases = [landlord.grant(10.0) for _ in range(3)]
    with pytest.raises(LeaseDeniedError, match="3 leases"):
        landlord.grant(10.0)
    leases[0].cancel()
    landlord.grant(10.0)
    clock.advance(11.0)
    landlord.expire()
    assert len(landlord) == 0


def test_the_timer_ends_leases_without_help() -> None:
    """The real clock."""
    ended: Recorder[str] = Recorder()
    with Landlord() as landlord:
        for name, seconds in (("late", 3000.0), ("middle", 0.3), ("early", 0.1)):
            landlord.grant(seconds, lambda _end, name=name: ended.append(name))  # type: ignore[misc]
        assert ended.wait_for(2) == ["early", "middle"]


def test_a_lease_does_not_show_more_than_it_must(landlord: Landlord) -> None:
    lease = landlord.grant(10.0, about="events 'hot'")
    assert repr(lease) == f"<Lease {lease.id}: 10.0 s left>"
    info = landlord.leases()[0]
    assert (info.id, info.about, info.duration, info.remaining) == (lease.id, "events 'hot'", 10.0, 10.0)
    with pytest.raises(TypeError):
        pickle.dumps(lease)


def test_a_closed_landlord_is_no_definite_answer(landlord: Landlord) -> None:
    """The lease may go on in the next run: its holder has to try again."""
    lease = landlord.grant(10.0)
    landlord.close()
    landlord.close()
    assert lease.is_ended
    with pytest.raises(ClosedError):
        landlord.grant(10.0)
    assert [type(each) for each in landlord.renew_ids([(lease.id, 10.0)])] == [ClosedError]
    assert [type(each) for each in landlord.cancel_ids([lease.id])] == [ClosedError]
    refuses(lease, ClosedError)
    release(lease)


def test_a_suspended_lease_is_continued(landlord: Landlord, clock: FakeClock) -> None:
    found: Recorder[LeaseEnd] = Recorder()
    lease, other = landlord.grant(10.0, found), landlord.grant(10.0)
    landlord.suspend([lease.id, other.id, "unknown"])
    assert found.wait_for(1) == [LeaseEnd.CLOSED]
    assert landlord.lease(lease.id) is None
    assert [type(each) for each in landlord.renew_ids([(lease.id, 10.0)])] == [ClosedError]
    again = landlord.restore(lease.id, 5.0, 10.0, found)
    assert landlord.lease(lease.id) is again
    assert landlord.renew_ids([(lease.id, 10.0)]) == [10.0]
    clock.advance(10.0)
    landlord.expire()
    assert [type(each) for each in landlord.renew_ids([(lease.id, 10.0), (other.id, 10.0)])] == [UnknownLeaseError] * 2


def test_shortened_renewals_cost_no_memory() -> None:
    with Landlord() as landlord:
        leases = [landlord.grant(1000.0) for _ in range(2)]
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(20_000):
                leases[0].renew(200.0)
                leases[0].renew(100.0)
                leases[1].renew(1000.0 - number / 100)
            assert tracemalloc.get_traced_memory()[0] - before < 300_000
        finally:
            tracemalloc.stop()


def test_a_callback_that_blocks_delays_no_callback_of_another_lease(landlord: Landlord) -> None:
    go_on = threading.Event()
    begun: Recorder[LeaseEnd] = Recorder()
    ended: Recorder[LeaseEnd] = Recorder()
    try:
        landlord.grant(10.0, lambda end: (begun.append(end), go_on.wait(PATIENCE))).cancel()
        begun.wait_for(1)
        landlord.grant(10.0, ended).cancel()
        ended.wait_for(1)
    finally:
        go_on.set()


def test_callbacks_are_called_later_if_no_thread_can_be_started(
    landlord: Landlord, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoWorkers:
        def submit(self, _job: object) -> None:
            raise RuntimeError("can't start new thread")

    ended: Recorder[LeaseEnd] = Recorder()
    lease = landlord.grant(10.0, ended)
    with monkeypatch.context() as patched:
        patched.setattr(threads, "workers", NoWorkers)
        lease.cancel()
    assert "cannot start a thread" in caplog.text
    ended.wait_for(1)


def test_a_renewal_is_told_although_an_earlier_callback_failed(landlord: Landlord) -> None:
    renewed: Recorder[Lease] = Recorder()
    lease, other = landlord.grant(10.0), landlord.grant(10.0)
    lease.on_renewed = other.on_renewed = renewed.append
    lease.renew(10.0)
    lease.on_renewed = lambda _lease: 1 // 0
    assert lease.renew(10.0).result() == 10.0
    other.renew(10.0)
    assert renewed == [lease, other]


@table("value", {"big": 10**400, "low": -(10**400), "long": -(10**5000), "nan": math.nan, "bool": True, "text": "5"})
def test_numbers_beyond_the_range_of_floats_raise_no_other_errors(value: Any) -> None:
    for option in ("max_duration", "default_duration"):
        if value == 10**400:
            with Landlord(**{option: value}) as landlord:
                assert landlord.grant(10.0).duration == 10.0
        else:
            with pytest.raises(ArgumentError):
                Landlord(**{option: value})
    with pytest.raises(ArgumentError):
        Landlord(max_leases=-(10**5000))
    with Landlord() as landlord:
        if value == 10**400:
            assert landlord.grant(value).duration == 3600.0
        else:
            with pytest.raises(ArgumentError):
                landlord.grant(value)
        with pytest.raises(ArgumentError):
            landlord.restore("id", math.nan, 5.0)


def test_a_callback_that_cannot_be_called_is_refused(landlord: Landlord) -> None:
    bad: Any = 5
    with pytest.raises(ArgumentError, match="on_end"):
        landlord.grant(5.0, bad)
    assert len(landlord) == 0
    with pytest.raises(ArgumentError):
        landlord.grant(5.0).when_ended(bad)

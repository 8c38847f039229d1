"""Lease renewal sets (scenario 23)."""

from __future__ import annotations

from typing import Any

import pytest

from messaging.errors import ArgumentError, ClosedError, LeaseDeniedError, UnknownLeaseError
from messaging.leases import Landlord, Lease, LeaseRenewalManager
from messaging.remoteevent import EventGenerator, renewal_set
from messaging.remoteevent.renewal_set import (
    EXPIRATION_WARNING,
    RENEWAL_FAILURE,
    ExpirationWarningEvent,
    LeaseRenewalSet,
    RenewalFailureEvent,
)
from messaging.testing.tables import table
from messaging.testing.waiting import Recorder, eventually


def test_leases_in_a_set_are_renewed_as_long_as_the_set_lives() -> None:
    with Landlord() as landlord, LeaseRenewalSet(60) as renewals:
        lease = landlord.grant(0.3)
        granted: Recorder[Lease] = Recorder()
        lease.on_renewed = granted.append
        renewals.renew_for(lease, renew_duration=0.3)
        assert renewals.leases() == [lease]
        granted.wait_for(3)
        assert renewals.remove(lease)
        assert not renewals.remove(lease)
        eventually(lambda: lease.is_expired)


def test_a_lease_leaves_the_set_after_its_membership() -> None:
    with Landlord() as landlord, LeaseRenewalSet(60) as renewals:
        failures: Recorder[Any] = Recorder()
        renewals.set_renewal_failure_listener(failures.append)
        renewals.renew_for(landlord.grant(60), 0.05)
        eventually(lambda: not renewals.leases())
        assert failures == []


def test_nothing_is_renewed_after_the_end_of_the_set() -> None:
    with Landlord() as landlord, LeaseRenewalManager() as manager:
        renewals = LeaseRenewalSet(0.1, manager=manager)
        lease = landlord.grant(60)
        renewals.renew_for(lease)
        assert lease in manager
        eventually(lambda: lease not in manager)
        assert not lease.is_ended  # it is not cancelled
        for call in (
            renewals.leases,
            lambda: renewals.remove(lease),
            lambda: renewals.renew_for(lease),
            lambda: renewals.set_renewal_failure_listener(print),
            lambda: renewals.set_expiration_warning_listener(print, 1),
            renewals.clear_renewal_failure_listener,
            renewals.clear_expiration_warning_listener,
        ):
            with pytest.raises(UnknownLeaseError):
                call()
        renewals.close()


def test_failures_have_one_id_and_rising_numbers() -> None:
    """Scenario 23, for failures."""
    with Landlord() as landlord, LeaseRenewalSet(60, source="norm") as renewals:
        events: Recorder[RenewalFailureEvent] = Recorder()
        found = renewals.set_renewal_failure_listener(events.append, {"why": 1})
        assert (found.id, found.source) == (RENEWAL_FAILURE, "norm")
        begin = found.sequence_number
        assert found.lease is renewals.lease
        for _ in range(3):
            lease = landlord.grant(0.2)
            renewals.renew_for(lease)
            lease.cancel()
        events.wait_for(3)
        assert [each.sequence_number - begin for each in events] == [1, 2, 3]
        assert {each.kind for each in events} == {found.kind}
        assert {each.error for each in events} == {"UnknownLeaseError"}
        assert events[0].handback == {"why": 1}
        assert renewals.leases() == []
        later: Recorder[RenewalFailureEvent] = Recorder()
        again = renewals.set_renewal_failure_listener(later.append)
        assert (again.id, again.sequence_number) == (found.id, begin + 3)
        lease = landlord.grant(0.2)
        renewals.renew_for(lease)
        lease.cancel()
        later.wait_for(1)
        assert later[0].sequence_number == begin + 4
        assert len(events) == 3  # the earlier listener is told no more
        assert renewals.clear_renewal_failure_listener()
        assert not renewals.clear_renewal_failure_listener()


def test_warnings_have_one_id_and_rising_numbers() -> None:
    """Scenario 23, for warnings: one for each time that the set is about to end."""
    with LeaseRenewalSet(60, source="norm") as renewals:
        events: Recorder[ExpirationWarningEvent] = Recorder()
        found = renewals.set_expiration_warning_listener(events.append, 59.9)
        assert (found.id, found.source) == (EXPIRATION_WARNING, "norm")
        events.wait_for(1)
        assert 0 < events[0].remaining <= 59.9
        assert events[0].lease_id == renewals.lease.id
        renewals.lease.renew(60)
        events.wait_for(2)
        renewals.lease.renew(30)
        events.wait_for(3)
        assert [each.sequence_number - found.sequence_number for each in events] == [1, 2, 3]
        assert {each.kind for each in events} == {found.kind}
        renewals.lease.renew(3600)
        again = renewals.set_expiration_warning_listener(events.append, 1)
        assert again.sequence_number == found.sequence_number + 3
        assert renewals.clear_expiration_warning_listener()


def test_sets_share_a_landlord() -> None:
    with Landlord() as landlord:
        events: dict[int, list[Any]] = {0: [], 1: []}
        sets = [LeaseRenewalSet(60, landlord=landlord) for _ in range(2)]
        for number, each in enumerate(sets):
            each.set_expiration_warning_listener(events[number].append, 59.95)
        eventually(lambda: all(events.values()))
        sets[1].lease.renew(60)
        eventually(lambda: len(events[1]) == 2)
        assert len(events[0]) == 1
        assert len(landlord) == 2
        for each in sets:
            each.close()
        assert len(landlord) == 0


def test_junk_is_refused() -> None:
    with Landlord() as landlord, LeaseRenewalSet() as renewals:
        for junk in (None, 3, "x"):
            with pytest.raises(ArgumentError):
                renewals.renew_for(junk)  # type: ignore[arg-type]
            with pytest.raises(ArgumentError):
                renewals.set_renewal_failure_listener(junk)
        for warning in (-1, "x", None, True, float("nan"), float("inf")):
            with pytest.raises(ArgumentError):
                renewals.set_expiration_warning_listener(print, warning)  # type: ignore[arg-type]
        for duration in (0, -3, "x"):
            with pytest.raises(ArgumentError):
                renewals.renew_for(landlord.grant(), duration)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            renewals.renew_for(renewals.lease)
        assert renewals.leases() == []


class TellsAtOnce(LeaseRenewalManager):
    """A manager that gives a lease up before the call that caused it returns."""

    def renew_until(self, lease: Lease, *arguments: Any, **options: Any) -> None:
        super().renew_until(lease, *arguments, **options)
        if lease.is_ended:
            eventually(lambda: lease not in self)


def test_a_failure_that_is_told_at_once_leaves_no_dead_lease_in_the_set() -> None:
    with Landlord() as landlord, TellsAtOnce() as manager, LeaseRenewalSet(60, manager=manager) as renewals:
        events: Recorder[RenewalFailureEvent] = Recorder()
        renewals.set_renewal_failure_listener(events.append)
        lease = landlord.grant(50)
        lease.cancel()
        renewals.renew_for(lease)
        events.wait_for(1)
        assert renewals.leases() == []


def test_a_refused_lease_is_not_in_the_set() -> None:
    with Landlord() as landlord, LeaseRenewalManager() as manager, LeaseRenewalSet(60, manager=manager) as renewals:
        lease, other = landlord.grant(50), landlord.grant(50)
        renewals.renew_for(lease)
        for each in (lease, other):
            with pytest.raises(ArgumentError):
                renewals.renew_for(each, -5)
        assert renewals.leases() == [lease]  # the earlier call is still valid
        assert lease in manager
        manager.close()
        with pytest.raises(ClosedError):
            renewals.renew_for(other)
        assert renewals.leases() == [lease]


@table("last", [0, 1])
def test_sets_that_share_a_manager_renew_a_lease_each_for_itself(last: int) -> None:
    with Landlord() as landlord, LeaseRenewalManager() as manager:
        sets = [LeaseRenewalSet(60, manager=manager) for _ in range(2)]
        lease = landlord.grant(50)
        for each in sets:
            each.renew_for(lease)
        sets[1 - last].close()
        assert sets[last].leases() == [lease]
        assert lease in manager
        assert sets[last].remove(lease)
        assert lease not in manager
        sets[last].close()


def test_a_failure_is_told_to_each_set_that_has_the_lease() -> None:
    with Landlord() as landlord, LeaseRenewalManager() as manager:
        sets = [LeaseRenewalSet(60, manager=manager) for _ in range(2)]
        events: Recorder[Any] = Recorder()
        for each in sets:
            each.set_renewal_failure_listener(events.append)
        lease = landlord.grant(0.2)
        for each in sets:
            each.renew_for(lease)
        lease.cancel()
        events.wait_for(2)
        for each in sets:
            assert each.leases() == []
            each.close()


def test_a_set_without_a_lease_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Noted(EventGenerator):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(renewal_set, "EventGenerator", Noted)
    with Landlord(max_leases=1) as landlord:
        landlord.grant()
        with pytest.raises(LeaseDeniedError):
            LeaseRenewalSet(60, landlord=landlord)
    with pytest.raises(ClosedError):
        made[0].register(RENEWAL_FAILURE, None, print)
    with pytest.raises(ClosedError):
        made[0].landlord.grant()


def test_a_set_whose_lease_ends_at_once_is_closed() -> None:
    renewals = LeaseRenewalSet(1e-9)
    with pytest.raises(UnknownLeaseError):
        renewals.leases()
    renewals.close()

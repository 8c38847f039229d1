"""Leases that a durable party renews for its owners, also after a restart (EV.3.1, EV.3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from messaging import Messaging
from messaging.errors import ArgumentError, ClosedError, JournalFullError
from messaging.journal import JournalTable
from messaging.leases import (
    Landlord,
    Lease,
    LeaseRenewalManager,
    LeaseServer,
    RemoteGrantor,
    StoredTime,
)
from messaging.remoteevent.renewals import OwnedRenewals, RenewalFailure
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.remoteevent.helpers import ready

CHANNEL = "leases/here"


@pytest.fixture
def landlord() -> Iterator[Landlord]:
    with Landlord(max_duration=200.0) as made:
        yield made


@pytest.fixture
def lease(m: Messaging, landlord: Landlord) -> Lease:
    granted = landlord.grant(100.0)
    return Lease(granted.id, RemoteGrantor(m, CHANNEL), 100.0, granted.remaining)


class Party:
    """A party with kept renewals, which can be opened again."""

    def __init__(
        self, path: Path, m: Messaging | None, on_failed: Callable[[RenewalFailure], object] | None = None
    ) -> None:
        self.table = JournalTable(path)
        self.manager = LeaseRenewalManager()
        self.renewals = OwnedRenewals(self.table, m, self.manager, "party", on_failed)

    @property
    def records(self) -> list[str]:
        return self.table.keys_with("renewal ")

    def close(self) -> None:
        self.renewals.close()
        self.kill()

    def kill(self) -> None:
        self.manager.close()
        self.table.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@contextmanager
def served(m: Messaging, landlord: Landlord) -> Iterator[None]:
    """Serve the leases of a landlord."""
    with ready(LeaseServer(m, CHANNEL, landlord)):
        yield


def test_the_same_lease_is_renewed_once_however_often_it_is_kept(path: Path, m: Messaging, landlord: Landlord) -> None:
    party = Party(path, m)
    granted = landlord.grant(100.0)
    for _ in range(20):  # a handle each, as requests of other processes make them
        party.renewals.keep("owner", Lease(granted.id, RemoteGrantor(m, CHANNEL), 100.0, 100.0), 1000.0).result(
            PATIENCE
        )
    assert (len(party.renewals), len(party.manager), len(party.records)) == (1, 1, 1)
    local = landlord.grant(100.0)
    for _ in range(5):
        party.renewals.keep("owner", local).result(PATIENCE)
    assert (len(party.renewals), len(party.manager), len(party.records)) == (2, 2, 1)
    party.close()


def test_a_later_call_may_shorten_the_renewals(path: Path, m: Messaging, lease: Lease) -> None:
    party = Party(path, m)
    party.renewals.keep("owner", lease).result(PATIENCE)
    assert party.manager.remaining(lease) == float("inf")
    party.renewals.keep("owner", lease, 50.0).result(PATIENCE)
    assert party.manager.remaining(lease) <= 50.0
    (record,) = party.records
    assert StoredTime.from_value(party.table.get(record)[2]).remaining() <= 50.0
    party.close()


def test_each_owner_keeps_a_lease_for_itself(path: Path, m: Messaging, lease: Lease) -> None:
    party = Party(path, m)
    party.renewals.keep("a", lease, 50.0).result(PATIENCE)
    party.renewals.keep("b", lease, 80.0).result(PATIENCE)
    party.renewals.forget("b")
    assert lease in party.manager
    assert len(party.records) == 1
    party.renewals.forget("a")
    assert lease not in party.manager
    assert party.records == []
    party.close()


def test_a_lease_that_was_refused_because_too_many_records_wait_is_not_kept(
    path: Path, m: Messaging, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = Party(path, m)
    with monkeypatch.context() as patched:
        patched.setattr("messaging.journal.journal._WAITING_BYTES", 0)
        with pytest.raises(JournalFullError):
            party.renewals.keep("owner", lease).result(PATIENCE)
    assert (len(party.renewals), len(party.manager), party.records) == (0, 0, [])
    party.close()


@table("duration", [0, -1, -0.5, Lease.ANY, True, "x", float("nan")])
def test_a_duration_is_a_number_of_seconds_above_0(path: Path, m: Messaging, lease: Lease, duration: float) -> None:
    party = Party(path, m)
    with pytest.raises(ArgumentError):
        party.renewals.keep("owner", lease, duration).result(PATIENCE)
    with pytest.raises(ArgumentError):
        party.renewals.keep("owner", "a lease").result(PATIENCE)  # type: ignore[arg-type]
    assert (len(party.renewals), len(party.manager), party.records) == (0, 0, [])
    party.close()


def test_a_lease_whose_id_is_too_long_is_not_renewed(path: Path, m: Messaging) -> None:
    party = Party(path, m)
    with pytest.raises(ArgumentError):
        party.renewals.keep("owner", Lease("x" * 20_000, RemoteGrantor(m, CHANNEL), 5.0, 5.0)).result(PATIENCE)
    assert (len(party.renewals), len(party.manager)) == (0, 0)
    party.close()
    with pytest.raises(ClosedError):
        party.renewals.keep("owner", Lease("x", RemoteGrantor(m, CHANNEL), 5.0, 5.0)).result(PATIENCE)


def test_a_lease_that_is_renewed_again_stays_for_the_next_run_when_its_owner_is_told_of_a_failure_late(
    path: Path, m: Messaging, lease: Lease, virtual_clock: VirtualClock
) -> None:
    """The notice of the failure is stored while the party closes."""
    failures: Recorder[RenewalFailure] = Recorder()
    party = Party(path, m, failures.append)
    other = Lease("other", RemoteGrantor(m, CHANNEL), 10.0, 10.0)
    for each in (Lease(lease.id, RemoteGrantor(m, CHANNEL), 10.0, 10.0), other):
        party.renewals.keep("owner", each).result(PATIENCE)
    virtual_clock.advance(20.0)
    party.renewals.keep("owner", lease).result(PATIENCE)
    party.renewals.close()
    for failure in failures:
        failure.told()
    party.kill()
    party = Party(path, m)
    (record,) = party.records
    assert lease.id in record
    party.close()


@table("end", ["close", "kill"])
def test_a_lease_is_renewed_at_once_after_a_restart(
    path: Path, m: Messaging, landlord: Landlord, lease: Lease, end: str
) -> None:
    """Scenario 54."""
    party = Party(path, m)
    party.renewals.keep("owner", lease).result(PATIENCE)
    getattr(party, end)()
    renewed: Recorder[Lease] = Recorder()
    granted = landlord.lease(lease.id)
    assert granted is not None
    granted.on_renewed = renewed
    with served(m, landlord):
        party = Party(path, m)
        party.renewals.recover(["owner"])
        renewed.wait_for(1)
        party.close()


@table("end", ["close", "kill"])
def test_a_grantor_that_is_away_after_a_restart_is_asked_until_the_lease_ends(
    path: Path, m: Messaging, landlord: Landlord, lease: Lease, end: str
) -> None:
    """The lease has 100 s left: its renewals are given up no earlier."""
    party = Party(path, m)
    party.renewals.keep("owner", lease).result(PATIENCE)
    getattr(party, end)()
    party = Party(path, m)
    party.renewals.recover(["owner"])
    (found,) = [kept.lease for kept in party.renewals._leases.values()]
    assert 90.0 < found.remaining <= 100.0
    assert found in party.manager
    party.close()


def test_the_end_of_a_lease_is_that_of_its_last_renewal(
    path: Path, m: Messaging, landlord: Landlord, lease: Lease
) -> None:
    with served(m, landlord):
        party = Party(path, m)
        party.renewals.keep("owner", lease).result(PATIENCE)
        lease.renew(180.0).result(PATIENCE)
        party.close()
    party = Party(path, m)
    party.renewals.recover(["owner"])
    (found,) = [kept.lease for kept in party.renewals._leases.values()]
    assert 170.0 < found.remaining <= 180.0
    party.close()


def test_a_lease_that_has_ended_is_forgotten(
    path: Path, m: Messaging, landlord: Landlord, lease: Lease, caplog: pytest.LogCaptureFixture
) -> None:
    party = Party(path, m)
    party.renewals.keep("owner", lease).result(PATIENCE)
    party.kill()
    landlord.cancel_ids([lease.id])
    with served(m, landlord):
        party = Party(path, m)
        party.renewals.recover(["owner"])
        eventually(lambda: not party.records)
        eventually(lambda: "is not renewed any more" in caplog.text)  # said when the record is removed
    assert len(party.renewals) == 0
    party.close()


def test_records_of_owners_that_are_gone_and_of_passed_times_are_removed(
    path: Path, m: Messaging, landlord: Landlord, caplog: pytest.LogCaptureFixture
) -> None:
    party = Party(path, m)

    for owner in ("here", "gone", "late"):
        lease = Lease(landlord.grant(100.0).id, RemoteGrantor(m, CHANNEL), 100.0, 100.0)
        party.renewals.keep(owner, lease).result(PATIENCE)
    party.close()
    with JournalTable(path) as table:
        for key in table.keys_with("renewal "):
            if '"late"' in key:
                granted, end, _ = table.get(key)
                table.put(key, [granted, end, StoredTime.after(-1.0).to_value()])
        table.put("renewal junk", 5)
        table.put('renewal ["here", "a", "b"]', [5])
    party = Party(path, m)
    party.renewals.recover(["here", "late"])
    assert len(party.renewals) == 1
    assert len(party.records) == 3  # malformed ones stay, for people
    assert "'renewal junk' is not a lease to renew" in caplog.text
    party.close()
    party = Party(path, None)
    party.renewals.recover(["here"])
    assert (len(party.renewals), len(party.records)) == (0, 3)  # for a run with an instance
    party.close()

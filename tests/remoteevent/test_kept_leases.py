"""Registrations with leases on the disk: renewals, changes and ends that overlap; landlords that outlive parties."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import ClosedError
from messaging.journal import JournalTable
from messaging.leases import GrantedLease, Landlord, LeaseEnd
from messaging.remoteevent import EventGenerator
from messaging.remoteevent.party import REGISTRATION, KeptLeases
from messaging.testing.waiting import PATIENCE, Recorder
from tests.threads import in_background

Kept = tuple[GrantedLease, dict[str, Any]]


class SlowTable(JournalTable):
    """A table whose reader of a value can be stopped before it goes on."""

    reads: Recorder[str] | None = None
    may_go_on: threading.Event

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        if self.reads is not None:
            self.reads.append(key)
            assert self.may_go_on.wait(PATIENCE)
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def landlord() -> Iterator[Landlord]:
    with Landlord() as made:
        yield made


def recovered(folder: Path, landlord: Landlord | None = None) -> list[dict[str, Any]]:
    """Return the registrations that a later run finds."""
    with JournalTable(folder) as table, Landlord() as other:
        return [values for _, _, values in KeptLeases(table, landlord or other).kept()]


def overlapped(table: SlowTable, lease: GrantedLease, change: Any) -> None:
    """Make a change while the renewal of a lease is being stored."""
    table.may_go_on = threading.Event()
    table.reads = Recorder()
    joins = [in_background(lambda: lease.renew(500.0))]
    table.reads.wait_for(1)
    begun: Recorder[int] = Recorder()
    joins.append(in_background(lambda: (begun.append(1), change())))
    begun.wait_for(1)  # it waits for the renewal, or comes in between
    table.may_go_on.set()
    for join in joins:
        join()
    table.reads = None


def test_a_renewal_does_not_bring_a_cancelled_registration_back(folder: Path, landlord: Landlord) -> None:
    with SlowTable(folder) as table:
        kept = KeptLeases(table, landlord)
        lease = landlord.grant(1000.0)
        forgotten: Recorder[LeaseEnd] = Recorder(lambda _: kept.forget(lease.id))
        lease.when_ended(forgotten)
        kept.keep(lease, {"target": "old"})
        overlapped(table, lease, lambda: (lease.cancel(), forgotten.wait_for(1)))
        assert REGISTRATION + lease.id not in table
    assert recovered(folder) == []


def test_a_renewal_does_not_undo_a_change_of_the_registration(folder: Path, landlord: Landlord) -> None:
    with SlowTable(folder) as table:
        kept = KeptLeases(table, landlord)
        lease = landlord.grant(1000.0)
        kept.keep(lease, {"target": None})
        overlapped(table, lease, lambda: kept.keep(lease, {"target": "new"}))
        assert table.get(REGISTRATION + lease.id)["target"] == "new"
        assert table.get(REGISTRATION + lease.id)["lease"][1] == 500.0
    assert [each["target"] for each in recovered(folder)] == ["new"]


def test_a_registration_whose_lease_has_ended_is_not_stored(folder: Path, landlord: Landlord) -> None:
    with JournalTable(folder) as table:
        kept = KeptLeases(table, landlord)
        lease = landlord.grant(1000.0)
        lease.cancel()
        kept.keep(lease, {})
        assert REGISTRATION + lease.id not in table


def test_forgetting_costs_the_same_among_many_registrations(folder: Path, landlord: Landlord) -> None:
    class NoDisk:
        """Stores nothing, and knows every key."""

        def put_soon(self, _key: str, _value: Any) -> Any:
            return self

        def result(self) -> None:
            """Be stored."""

        def remove_soon(self, _key: str) -> None:
            return None

    table: Any = NoDisk()
    kept = KeptLeases(table, landlord)
    leases = [landlord.grant(1000.0) for _ in range(20_000)]
    for lease in leases:
        kept.keep(lease, {})
    begun = time.process_time()
    for lease in leases:
        kept.forget(lease.id)
    assert time.process_time() - begun < 1.0


def test_a_landlord_keeps_no_closed_party_alive(folder: Path, landlord: Landlord) -> None:
    with JournalTable(folder) as table:
        kept = KeptLeases(table, landlord)
        found = weakref.ref(kept)
        del kept
        gc.collect()
        assert found() is None
    landlord.grant(10.0).renew(10.0)


def test_closing_ends_the_leases_and_a_later_party_continues_them(folder: Path, landlord: Landlord) -> None:
    ends: Recorder[LeaseEnd] = Recorder()
    with JournalTable(folder) as table:
        kept = KeptLeases(table, landlord)
        lease, foreign = landlord.grant(1000.0, ends), landlord.grant(1000.0)
        kept.keep(lease, {"target": 1})
        kept.close()
        kept.close()
        assert ends.wait_for(1) == [LeaseEnd.CLOSED]
        assert not foreign.is_ended
        with pytest.raises(ClosedError):
            lease.renew(10.0)
    with JournalTable(folder) as table:
        kept = KeptLeases(table, landlord)
        [(key, grant, values)] = kept.kept()
        assert (key, values["target"]) == (REGISTRATION + lease.id, 1)
        again = grant(ends)
        assert again.id == lease.id
        assert again.remaining > 990.0
        again.renew(100.0)
        assert table.get(REGISTRATION + lease.id)["lease"][1] == 100.0
        kept.close()


@pytest.mark.parametrize("change", ["renew", "cancel"])
def test_a_change_of_a_lease_whose_callback_comes_after_the_end_of_its_party_is_stored(
    folder: Path, landlord: Landlord, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The holder was told that the lease is renewed, or cancelled."""
    call = landlord.callbacks.call
    with JournalTable(folder) as table:
        kept = KeptLeases(table, landlord)
        lease = landlord.grant(10.0, lambda _end: None)
        kept.keep(lease, {"target": 1})
        ended: Recorder[None] = Recorder()

        def call_late(callback: Any, argument: Any) -> None:
            kept.close()
            call(callback, argument)
            ended.append(None)

        monkeypatch.setattr(landlord.callbacks, "call", call_late)
        lease.renew(1000.0) if change == "renew" else lease.cancel()
        ended.wait_for(1)
    with JournalTable(folder) as table:
        found = [
            (values["target"], grant(lambda _end: None)) for _, grant, values in KeptLeases(table, landlord).kept()
        ]
        assert [target for target, _ in found] == ([1] if change == "renew" else [])
        assert all(again.id == lease.id and again.remaining > 900.0 for _, again in found)


def test_a_lease_that_its_party_left_at_the_landlord_is_stored_when_the_next_party_closes(
    folder: Path, landlord: Landlord
) -> None:
    with JournalTable(folder) as table:
        KeptLeases(table, landlord).keep(lease := landlord.grant(10.0), {})
    lease.renew(1000.0)  # it cannot be stored any more
    with JournalTable(folder) as table:
        kept = KeptLeases(table, landlord)
        [(_, grant, _)] = kept.kept()
        grant(lambda _end: None)
        kept.close()
    with JournalTable(folder) as table, Landlord() as other:
        [(_, grant, _)] = KeptLeases(table, other).kept()
        assert grant(lambda _end: None).remaining > 900.0


def test_a_lease_that_its_party_left_at_the_landlord_is_continued(folder: Path, landlord: Landlord) -> None:
    ends: Recorder[LeaseEnd] = Recorder()
    with JournalTable(folder) as table:
        kept = KeptLeases(table, landlord)
        lease = landlord.grant(1000.0, ends)
        kept.keep(lease, {})
        del kept
    lease.renew(500.0)  # it cannot be stored any more
    with JournalTable(folder) as table:
        [(_, grant, _)] = KeptLeases(table, landlord).kept()
        again = grant(lambda _end: None)
        assert 490.0 < again.remaining <= 500.0
        assert ends.wait_for(1) == [LeaseEnd.CLOSED]


def test_a_generator_can_be_opened_again_with_the_same_landlord(tmp_path: Path, landlord: Landlord) -> None:
    def listener(_event: Any) -> None:
        """Take an event."""

    for _ in range(2):
        generator = EventGenerator(
            "norm", events=[1], landlord=landlord, path=tmp_path, listeners={"listener": listener}
        )
        if not landlord.leases():
            generator.register(1, None, listener, 1000.0)
        generator.close()


def test_a_registration_that_overlaps_the_end_of_its_party_does_not_succeed_without_being_stored(
    folder: Path, landlord: Landlord
) -> None:
    with JournalTable(folder) as table:
        kept = KeptLeases(table, landlord)
        lease = landlord.grant(60.0)
        landlord.close()
        with pytest.raises(ClosedError):
            kept.keep(lease, {})
    assert recovered(folder) == []


def test_a_registration_whose_lease_has_ended_meanwhile_is_not_stored(folder: Path, landlord: Landlord) -> None:
    with JournalTable(folder) as table:
        kept = KeptLeases(table, landlord)
        lease = landlord.grant(60.0)
        lease.cancel().result(PATIENCE)
        kept.keep(lease, {})
    assert recovered(folder) == []

"""Mailboxes that are opened again: what they continue with, and what they leave alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from messaging import execution
from messaging.errors import ArgumentError, ClosedError, JournalLockedError, UnknownLeaseError
from messaging.journal import Journal, JournalTable
from messaging.leases import Landlord, LeaseEnd
from messaging.remoteevent import EventMailbox
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import Recorder, event, events, store, taken


def test_a_restart_stores_nothing_for_each_registration(tmp_path: Path) -> None:
    target = Recorder()
    with EventMailbox(tmp_path, listeners={"target": target}) as mailbox:
        for _ in range(10):
            mailbox.register(100.0).enable_delivery(target)

    def records() -> int:
        with Journal.open(tmp_path / "state") as journal:
            return journal.end

    before = records()
    EventMailbox(tmp_path, listeners={"target": target}).close()
    assert records() == before


def test_a_lease_that_expires_after_the_mailbox_was_closed_harms_no_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenarios 48 and 54: the landlord outlives the mailbox, and the next one has another landlord."""
    now = [0.0]
    ended: list[LeaseEnd] = []
    monkeypatch.setattr(execution.clock, "boot", lambda: now[0])
    with Landlord("shared") as landlord:
        first = EventMailbox(tmp_path, landlord=landlord)
        box = first.register(100.0)
        store(box, [event(1)])
        first.close()
        with EventMailbox(tmp_path) as second:
            again = second.registration(box.id)
            assert again.lease.renew(2000.0).result(PATIENCE) == 2000.0
            store(again, [event(2)])
            now[0] = 1000.0
            landlord.expire()
            box.lease.when_ended(ended.append)
            first._end(box, LeaseEnd.EXPIRED)  # as if its callback came this late
            eventually(lambda: ended)
            assert (tmp_path / "boxes" / box.id).is_dir()
            assert taken(again.drain()) == [1, 2]
        with EventMailbox(tmp_path) as third:
            assert third.registration(box.id).id == box.id


def test_a_registration_that_was_cancelled_before_the_mailbox_closed_is_not_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 48: the callback of the lease comes too late."""
    monkeypatch.setattr(EventMailbox, "_end", lambda *_: None)
    with EventMailbox(tmp_path) as mailbox:
        box = mailbox.register(100.0)
        store(box, [event(1)])
        box.lease.cancel()
    monkeypatch.undo()
    with EventMailbox(tmp_path) as mailbox:
        assert mailbox.registrations() == []
        assert not (tmp_path / "boxes" / box.id).exists()


def test_senders_are_not_told_that_a_registration_is_gone_when_its_landlord_closes(tmp_path: Path) -> None:
    """A sender that is told ``ListenerGoneError`` ends its registration for good."""
    landlord = Landlord()
    with EventMailbox(tmp_path, landlord=landlord) as mailbox:
        box = mailbox.register(100.0)
        landlord.close()
        with pytest.raises(ClosedError):
            box.listener.notify(event(1))
        with pytest.raises(ClosedError):
            box.remote_events()


def _without_full(values: dict[str, Any]) -> Any:
    del values["full"]
    return values


@table(
    "damage",
    [
        _without_full,
        lambda values: {**values, "keep": "some"},
        lambda values: {**values, "lease": ["x"]},
        lambda values: {**values, "lease": [values["lease"][0], "long", None]},
        lambda values: {**values, "refused": [[1]]},
        lambda values: {**values, "max_events": -1},
        lambda _values: ["junk"],
        lambda _values: None,
    ],
)
def test_the_events_of_a_registration_with_a_malformed_record_are_kept(
    tmp_path: Path, damage: Callable[[dict[str, Any]], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with EventMailbox(tmp_path) as mailbox:
        box, other = mailbox.register(100.0), mailbox.register(100.0)
        for each in (box, other):
            store(each, events(1, 3))
    with JournalTable(tmp_path / "state") as table:
        key = f"registration {box.id}"
        table.put(key, damage(table.get(key)))
    for _ in range(3):
        with EventMailbox(tmp_path) as mailbox:
            assert [each.id for each in mailbox.registrations()] == [other.id]
            with pytest.raises(UnknownLeaseError):
                mailbox.registration(box.id)
            assert len(mailbox.registration(other.id)) == 3
    assert box.id in caplog.text
    assert str(tmp_path / "damaged" / box.id) in caplog.text
    with Journal.open(tmp_path / "damaged" / box.id) as journal:
        assert journal.end - journal.begin == 3


def test_a_mailbox_that_cannot_be_opened_delivers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Recorder(OSError("away"))
    with EventMailbox(tmp_path, listeners={"target": target}) as mailbox:
        box = mailbox.register(100.0)
        store(box, [event(1)])
        box.enable_delivery(target)
        target.calls.wait_for(1)
    target.error = None
    target.calls.clear()

    def fail(*_: Any) -> None:
        raise OSError("the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr("messaging.remoteevent.renewals.OwnedRenewals.recover", fail)
        with pytest.raises(OSError, match="away"):
            EventMailbox(tmp_path, listeners={"target": target})
    assert not target.calls
    with EventMailbox(tmp_path, listeners={"target": target}):
        target.events.wait_for(1)


def test_a_folder_in_use_and_a_path_that_is_none_are_refused(tmp_path: Path) -> None:
    with (
        EventMailbox(tmp_path),
        pytest.raises(JournalLockedError, match="another mailbox uses the folder") as caught,
    ):
        EventMailbox(tmp_path)
    assert caught.value.path == str(tmp_path)
    for junk in ("", None, 5):
        with pytest.raises(ArgumentError, match="path"):
            EventMailbox(junk)  # type: ignore[arg-type]


def test_opening_and_closing_takes_no_time_for_each_idle_registration(tmp_path: Path) -> None:
    with EventMailbox(tmp_path) as mailbox:
        for _ in range(200):
            mailbox.register(1000.0)
    begun = time.process_time()
    with EventMailbox(tmp_path) as mailbox:
        assert len(mailbox) == 200
        assert mailbox.open_boxes == 0
    assert time.process_time() - begun < 5

"""Owners of mailboxes learn which leases the mailbox does not renew any more (EV.3.3)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging import Messaging
from messaging.journal import JournalTable
from messaging.leases import Landlord, Lease, LeaseServer, RemoteGrantor
from messaging.remoteevent import (
    EventMailbox,
    EventServer,
    LeaseRenewalSet,
    MailboxServer,
    RemoteEvent,
    RemoteGenerator,
    RemoteMailbox,
    RenewalFailureEvent,
    RetryPolicy,
)
from messaging.remoteevent.generator import EventGenerator
from messaging.remoteevent.renewal_set import RENEWAL_FAILURE
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.leases.conftest import Connect
from tests.remoteevent.helpers import Box, OpenMailbox, Recorder, event, events, ready, store


@pytest.fixture
def landlord(virtual_clock: VirtualClock) -> Iterator[Landlord]:
    with Landlord(max_duration=10.0) as made:
        yield made


def _failed(found: list[RemoteEvent]) -> list[str]:
    """Return the ids of the leases that events say were not renewed."""
    return [each.lease_id for each in found if isinstance(each, RenewalFailureEvent)]


def _fail(
    mailbox: EventMailbox, box: Box, landlord: Landlord, virtual_clock: VirtualClock, count: int = 1
) -> list[str]:
    """Have the mailbox renew leases that their landlord has cancelled, until it does not renew them any more."""
    leases = [landlord.grant(10.0) for _ in range(count)]
    for each in leases:
        mailbox.renew_lease(box, each)
    landlord.cancel_ids([each.id for each in leases])
    virtual_clock.advance(10.0)
    eventually(lambda: not len(mailbox._renewals))
    return [each.id for each in leases]


def test_the_owner_is_told_over_the_broker(connect: Connect, channel: str, tmp_path: Path) -> None:
    here, there = connect(), connect()
    with (
        Landlord(max_duration=1.0) as landlord,
        EventGenerator("s", events=[1], begin=0, landlord=landlord) as generator,
        ready(EventServer(there, f"{channel}/g", generator)),
        EventMailbox(tmp_path / "m", messaging=here) as mailbox,
        ready(MailboxServer(here, channel, mailbox)),
    ):
        box = RemoteMailbox(there, channel).register(100.0).result(PATIENCE)
        registration = RemoteGenerator(there, f"{channel}/g").register(1, None, box.listener, 1.0).result(PATIENCE)
        box.renew_lease(registration.lease).result(PATIENCE)
        landlord.cancel_ids([registration.lease.id])
        iterator = box.remote_events().result(PATIENCE)
        found = iterator.next(PATIENCE)
        assert isinstance(found, RenewalFailureEvent)
        assert found.id == RENEWAL_FAILURE
        assert found.lease_id == registration.lease.id
        assert found.error in ("UnknownLeaseError", "DeadlineError")  # the latter if the answer took too long
        iterator.close()


def test_the_owner_is_told_of_a_grantor_that_does_not_answer(m: Messaging, channel: str, tmp_path: Path) -> None:
    with EventMailbox(tmp_path / "m", messaging=m) as mailbox:
        box = mailbox.register(100.0)
        mailbox.renew_lease(box, Lease("lease", RemoteGrantor(m, channel, timeout=0.1), 0.5, 0.5))
        eventually(lambda: len(box) == 1)
        assert _failed(box.drain()) == ["lease"]


def test_the_owner_is_told_in_each_mode(
    virtual_clock: VirtualClock, landlord: Landlord, mailbox: EventMailbox, target: Recorder
) -> None:
    for keep in ("all", "latest", "latest_and_count"):
        box = mailbox.register(1000.0, keep=keep)
        names = _fail(mailbox, box, landlord, virtual_clock, 3)
        eventually(lambda box=box: len(box) == 3)  # type: ignore[misc]
        assert sorted(_failed(box.drain())) == sorted(names)
        box.enable_delivery(target)
        (name,) = _fail(mailbox, box, landlord, virtual_clock)
        eventually(lambda name=name: name in _failed([*target.events]))  # type: ignore[misc]


@table("full", ["refuse", "drop_oldest", "drop_newest"])
def test_a_full_box_has_the_notice_as_soon_as_it_has_room(
    virtual_clock: VirtualClock, landlord: Landlord, mailbox: EventMailbox, full: Any
) -> None:
    box = mailbox.register(1000.0, max_events=2, full=full)
    store(box, events(1, 2))
    names = _fail(mailbox, box, landlord, virtual_clock)
    assert box.drain() == events(1, 2)
    virtual_clock.advance(3.0)
    eventually(lambda: len(box) == 1)
    assert _failed(box.drain()) == names
    assert box.dropped == 0


def test_one_notice_of_each_lease_waits_for_room_however_often_its_owner_has_it_renewed(
    virtual_clock: VirtualClock, landlord: Landlord, mailbox: EventMailbox
) -> None:
    box = mailbox.register(1000.0, max_events=1)
    store(box, [event(1)])
    leases = [landlord.grant(10.0), landlord.grant(10.0)]
    landlord.cancel_ids([each.id for each in leases])
    for _ in range(10):
        for each in leases:
            mailbox.renew_lease(box, each)
        virtual_clock.advance(10.0)
    found = []
    for _ in range(6):
        found += box.drain()
        virtual_clock.advance(3.0)
    assert found[0] == event(1)
    assert sorted(_failed(found)) == sorted(each.id for each in leases)


def test_a_mailbox_that_cannot_be_opened_stores_no_notice(
    virtual_clock: VirtualClock,
    m: Messaging,
    channel: str,
    reopen: OpenMailbox,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    mailbox = reopen(messaging=m)
    box = mailbox.register(1000.0)
    for name, duration in (("ended", 10.0), ("failing", 100.0)):
        mailbox.renew_lease(box, Lease(name, RemoteGrantor(m, channel, timeout=0.1), duration, duration))
    mailbox.close()
    virtual_clock.advance(20.0)

    boxes = tmp_path / "mailbox" / "boxes"
    (boxes / "of an earlier registration").mkdir(parents=True)

    def fail(*_: object, **__: object) -> None:
        virtual_clock.advance(100.0)
        raise OSError("the disk")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        with pytest.raises(OSError, match="the disk"):
            reopen(messaging=m)
    assert not (boxes / box.id).exists()
    box = reopen(messaging=m).registration(box.id)
    virtual_clock.advance(100.0)
    assert sorted(_failed(box.drain())) == ["ended", "failing"]


def test_a_notice_that_waits_for_room_is_there_after_a_restart(
    virtual_clock: VirtualClock, landlord: Landlord, m: Messaging, channel: str, reopen: OpenMailbox
) -> None:
    with ready(LeaseServer(m, channel, landlord)):
        mailbox = reopen(messaging=m)
        box = mailbox.register(1000.0, max_events=1)
        store(box, [event(1)])
        lease = Lease("lease", RemoteGrantor(m, channel), 10.0, 10.0)  # no landlord has granted it
        mailbox.renew_lease(box, lease)
        virtual_clock.advance(10.0)
        eventually(lambda: not len(mailbox._renewals))
        mailbox = reopen(messaging=m)
        box = mailbox.registration(box.id)
        eventually(lambda: not len(mailbox._renewals))
        assert box.drain() == [event(1)]
        virtual_clock.advance(3.0)
        eventually(lambda: len(box) == 1)
        assert _failed(box.drain()) == ["lease"]
        mailbox = reopen(messaging=m)
        virtual_clock.advance(3.0)
        assert mailbox.registration(box.id).drain() == []


def test_nothing_is_kept_of_a_lease_that_failed_when_its_owner_is_gone(
    virtual_clock: VirtualClock, m: Messaging, channel: str, mailbox: EventMailbox, tmp_path: Path
) -> None:
    box = mailbox.register(1000.0, max_events=1)
    store(box, [event(1)])
    mailbox.renew_lease(box, Lease("lease", RemoteGrantor(m, channel, timeout=0.1), 10.0, 10.0))
    virtual_clock.advance(20.0)
    assert not len(mailbox._renewals)
    box.lease.cancel()
    virtual_clock.advance(5.0)
    mailbox.close()
    with JournalTable(tmp_path / "mailbox" / "state") as state:
        assert state.keys_with("renewal ") == []


def test_the_owner_is_told_of_a_lease_that_ended_while_the_mailbox_was_closed(
    virtual_clock: VirtualClock, m: Messaging, channel: str, reopen: OpenMailbox
) -> None:
    mailbox = reopen(messaging=m)
    box = mailbox.register(1000.0)
    mailbox.renew_lease(box, Lease("lease", RemoteGrantor(m, channel), 10.0, 10.0))
    mailbox.close()
    virtual_clock.advance(20.0)
    for expected in (["lease"], []):
        mailbox = reopen(messaging=m)
        box = mailbox.registration(box.id)
        if expected:
            eventually(lambda box=box: len(box) == 1)  # type: ignore[misc]
        assert _failed(box.drain()) == expected


def _wanted_no_longer(mailbox: EventMailbox, box: Box, lease: Lease) -> None:
    mailbox.renew_lease(box, lease, 30.0)


def _kept_twice(mailbox: EventMailbox, box: Box, lease: Lease) -> None:
    mailbox.renew_lease(box, lease)
    mailbox.renew_lease(box, lease, 30.0)


@table("keep", [_wanted_no_longer, _kept_twice])
def test_the_owner_is_told_nothing_of_a_lease_that_it_wants_no_longer(
    virtual_clock: VirtualClock, landlord: Landlord, mailbox: EventMailbox, keep: Callable[..., None]
) -> None:
    box, lease = mailbox.register(1000.0), landlord.grant(10.0)
    keep(mailbox, box, lease)
    virtual_clock.advance(45.0)
    assert lease.is_ended
    assert not len(mailbox._renewals)
    assert box.drain() == []


@table("keep", ["all", "latest"])
@table("full", ["drop_oldest", "drop_newest"])
def test_failures_that_a_renewal_set_sends_find_no_full_box(
    virtual_clock: VirtualClock, landlord: Landlord, mailbox: EventMailbox, full: Any, keep: Any
) -> None:
    """Only what the mailbox itself says waits for room: the sender of other events is told of no bound."""
    box = mailbox.register(1000.0, max_events=2, full=full, keep=keep)
    store(box, [event(1), event(1, "other")])
    with LeaseRenewalSet(1000.0, retry=RetryPolicy(attempts=1)) as renewals:
        renewals.set_renewal_failure_listener(box.listener)
        lease = landlord.grant(10.0)
        renewals.renew_for(lease)
        landlord.cancel_ids([lease.id])
        virtual_clock.advance(10.0)
        eventually(lambda: box.dropped == 1)
    assert _failed(box.drain()) == ([lease.id] if full == "drop_oldest" else [])

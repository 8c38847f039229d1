"""A party that closes answers "later", never "gone": its registrations and leases may continue with its next run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging import Messaging
from messaging.errors import ClosedError, ListenerGoneError, MessagingError, UnknownLeaseError, UnknownTransactionError
from messaging.execution import Promise
from messaging.leases import GrantedLease, Landlord, Lease, LeaseEnd, RemoteGrantor
from messaging.remoteevent import (
    EventGenerator,
    EventMailbox,
    EventServer,
    ListenerReference,
    ListenerServer,
    MailboxServer,
    NotificationMultiplexer,
    RemoteListener,
    RemoteMailbox,
    RemoteMailboxRegistration,
)
from messaging.remoteevent.remote import STARTING
from messaging.remoteevent.renewal_set import LeaseRenewalSet
from messaging.remoteevent.transactions import RemoteTransactionManager, TransactionManager, TransactionServer
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.leases.conftest import Connect
from tests.remoteevent.helpers import FAST, Recorder, event, events, generate, ready, store

CHANNEL = "mailboxes/field"


def test_a_mailbox_that_closes_before_its_server_ends_no_registration_at_a_generator(
    connect: Connect, channel: str, tmp_path: Path
) -> None:
    m, device = connect(), connect()
    with EventGenerator("boiler", events=[1], messaging=m, retry=FAST) as boiler:
        with EventMailbox(tmp_path, retry=FAST) as mailbox, ready(MailboxServer(m, channel, mailbox)):
            box = mailbox.register(100.0)
            listener = RemoteListener(device, ListenerReference(channel, box.id))
            registration = boiler.register(1, None, listener, 100.0)
            generate(boiler, 1)
            eventually(lambda: len(box) == 1)
            mailbox.close()
            generate(boiler, 1)
            counts = boiler.counts(registration)
            eventually(lambda: counts is not None and counts.retries)
        with EventMailbox(tmp_path, retry=FAST) as mailbox, ready(MailboxServer(m, channel, mailbox)):
            again = mailbox.registration(box.id)
            generate(boiler, 1)
            eventually(lambda: len(again) == 3)
            assert boiler.counts(registration) is not None


@pytest.fixture
def closed(m: Messaging, tmp_path: Path) -> Iterator[RemoteMailboxRegistration]:
    """A registration of a mailbox that has closed, and is still served."""
    with (
        EventMailbox(tmp_path / "mailbox", messaging=m) as mailbox,
        ready(MailboxServer(m, CHANNEL, mailbox)),
        RemoteMailbox(m, CHANNEL) as remote,
    ):
        box = remote.register(100.0).result(PATIENCE)
        store(mailbox.registration(box.id), events(1, 3))
        mailbox.close()
        yield box


def _renew_a_lease(m: Messaging, box: RemoteMailboxRegistration) -> Promise[None]:
    return box.renew_lease(Lease("lease", RemoteGrantor(m, "generators/boiler"), 10.0, 10.0))


@table(
    "ask",
    [
        lambda _, box: box.drain(),
        lambda _, box: box.lease.renew(50.0),
        lambda _, box: box.lease.cancel(),
        lambda _, box: box.remote_events(),
        lambda _, box: box.enable_delivery(Recorder()),
        lambda _, box: box.disable_delivery(),
        lambda _, box: box.add_unknown_events([("source", 1)]),
        _renew_a_lease,
        lambda _, box: box.listener.notify(event(4)),
        lambda m, _: RemoteMailbox(m, CHANNEL).registration("0" * 24).drain(),
    ],
)
def test_a_closed_mailbox_tells_no_owner_that_its_registration_has_ended(
    m: Messaging, closed: RemoteMailboxRegistration, ask: Callable[[Messaging, RemoteMailboxRegistration], Any]
) -> None:
    def answer() -> None:
        found = ask(m, closed)
        if isinstance(found, Promise):
            found.result(PATIENCE)

    with pytest.raises(ClosedError):
        answer()


def test_a_mailbox_that_is_open_tells_that_a_registration_has_ended(m: Messaging, tmp_path: Path) -> None:
    with EventMailbox(tmp_path) as mailbox, ready(MailboxServer(m, CHANNEL, mailbox)), RemoteMailbox(m, CHANNEL) as far:
        box = far.register(100.0).result(PATIENCE)
        box.lease.cancel().result(PATIENCE)
        for ask in (box.drain, lambda: box.lease.renew(50.0).result(PATIENCE)):
            with pytest.raises(UnknownLeaseError):
                ask()


@table("landlord_of", [lambda: None, Landlord])
def test_a_multiplexer_that_closes_ends_no_registration_at_a_generator(
    m: Messaging, channel: str, landlord_of: Callable[[], Landlord | None]
) -> None:
    landlord = landlord_of()
    multiplexer = NotificationMultiplexer(landlord=landlord)
    with EventGenerator("boiler", events=[1], retry=FAST) as boiler, ready(EventServer(m, channel, multiplexer)):
        multiplexer.register("boiler", 1, None, Recorder(), 100.0)
        registration = boiler.register(1, None, RemoteListener(m, channel), 100.0)
        (landlord or multiplexer).close()
        generate(boiler, 1)
        counts = boiler.counts(registration)
        eventually(lambda: counts is not None and counts.retries)
        assert not registration.lease.is_ended
        with pytest.raises(ClosedError):
            multiplexer.register("boiler", 1, None, Recorder(), 100.0)


def test_a_lease_has_the_reason_of_its_end_before_it_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that use the lease of a party that closes take no lock of its landlord."""
    seen: list[Any] = []
    monkeypatch.setattr(GrantedLease, "note_cancelled", lambda lease: seen.append(lease.end))
    with Landlord() as landlord:
        leases = [landlord.grant(100.0) for _ in range(3)]
        leases[0].cancel()
        landlord.suspend([leases[1].id])
    assert seen == [LeaseEnd.CANCELLED, LeaseEnd.CLOSED, LeaseEnd.CLOSED]


def test_a_renewal_set_whose_landlord_closes_says_so() -> None:
    """Unlike one whose lease has ended."""
    landlord = Landlord()
    sets = [LeaseRenewalSet(60.0, landlord=landlord) for _ in range(3)]
    sets[0].close()
    sets[1].lease.cancel()
    eventually(lambda: _error_of(sets[1].leases))
    landlord.close()
    assert [_error_of(each.leases) for each in sets] == [ClosedError, UnknownLeaseError, ClosedError]
    for each in sets:
        each.close()


def _error_of(call: Callable[[], Any]) -> type[MessagingError] | None:
    try:
        call()
    except MessagingError as error:
        return type(error)
    return None


def test_a_transaction_manager_that_closed_tells_no_participant_that_a_transaction_is_unknown(
    m: Messaging, channel: str
) -> None:
    """A participant takes a transaction that is not known for aborted."""
    manager = TransactionManager()
    with ready(TransactionServer(m, channel, manager)), RemoteTransactionManager(m, channel) as remote:
        known = remote.create(100.0)
        with pytest.raises(UnknownTransactionError):
            remote.state("x").result(PATIENCE)
        manager.close()
        for ask in (lambda: remote.state("x"), lambda: remote.transaction("x").commit_soon()):
            with pytest.raises(ClosedError):
                ask().result(PATIENCE)
        known.abort()
        with pytest.raises(ClosedError):
            remote.create()


def test_a_listener_server_that_has_just_started_says_that_a_listener_is_not_there_yet(
    virtual_clock: VirtualClock, m: Messaging
) -> None:
    """A definite answer would end the registrations of its senders, before the program has added its listeners."""
    target = Recorder()
    with EventGenerator("boiler", events=[1], messaging=m, retry=FAST) as boiler:
        with ready(ListenerServer(m, CHANNEL)) as server:
            registration = boiler.register(1, None, RemoteListener(m, server.add(target, "x")), 3600.0)
            generate(boiler, 1)
            eventually(lambda: len(target.events) == 1)
        with ready(ListenerServer(m, CHANNEL)) as server:
            generate(boiler, 1)
            counts = boiler.counts(registration)
            eventually(lambda: counts is not None and counts.retries)
            assert not registration.lease.is_ended
            reference = server.add(target, "x")
            generate(boiler, 1)
            eventually(lambda: target.numbers and len(target.events) >= 2)
            server.remove(reference)
            with pytest.raises(ListenerGoneError):  # the program says so
                RemoteListener(m, reference).notify(event(9))
            with pytest.raises(ClosedError, match="yet"):
                RemoteListener(m, reference._replace(id="y")).notify(event(9))
            virtual_clock.advance(STARTING)
            with pytest.raises(ListenerGoneError):
                RemoteListener(m, reference._replace(id="y")).notify(event(9))

"""A call that would block an event loop is refused before it has done anything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from messaging import Messaging
from messaging.errors import WouldBlockError
from messaging.journal import JournalTable
from messaging.leases import Landlord, LeaseServer
from messaging.leases.remote import ANSWERS, find_leases
from messaging.remoteevent import (
    EventGenerator,
    EventMailbox,
    ListenerServer,
    MailboxServer,
    RemoteListener,
    RemoteMailbox,
    StoreAndForwardAgent,
)
from messaging.remoteevent.transactions import RemoteTransactionManager, TransactionManager, TransactionServer
from messaging.remoteevent.transactions.participant import TransactionState
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent import participants
from tests.remoteevent.helpers import Recorder, event, events, ready, store


def refused(call: Any) -> None:
    """Make a call in an event loop, which refuses it."""

    async def main() -> None:
        with pytest.raises(WouldBlockError):
            call()

    asyncio.run(main())


def test_no_transaction_is_created_joined_or_ended(m: Messaging, channel: str) -> None:
    with (
        TransactionManager() as manager,
        ready(TransactionServer(m, channel, manager)),
        RemoteTransactionManager(m, channel) as remote,
    ):
        mine, far = manager.create(), remote.create()
        for call in (
            remote.create,
            lambda: far.join(participants.Recorder()),
            lambda: remote.recover("x", participants.Recorder()),
            *(each for transaction in (mine, far) for each in (transaction.commit, transaction.abort)),
        ):
            refused(call)
        remote.state(far.id).result(PATIENCE)  # a request that was sent has arrived before this one
        assert [(each.state, each.waiting_for) for each in manager.transactions()] == [
            (TransactionState.ACTIVE, [])
        ] * 2
        assert len(remote.servers) == 0


def test_no_listener_is_notified(m: Messaging) -> None:
    listener = Recorder()
    with ready(ListenerServer(m)) as server:
        stub = RemoteListener(m, server.add(listener))
        refused(lambda: stub.notify(event(1)))
        stub.notify(event(2))
    assert listener.numbers == [2]


def test_no_lease_is_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    granted: list[Any] = []
    monkeypatch.setattr(Landlord, "grant", lambda *_, **__: granted.append(1))
    with (
        StoreAndForwardAgent(tmp_path / "agent", listeners={"x": print}) as agent,
        EventGenerator("s", events=[1], path=tmp_path / "generator", listeners={"x": print}) as generator,
        EventMailbox(tmp_path / "mailbox") as mailbox,
    ):
        refused(lambda: agent.register("s", 1, None, print))
        refused(lambda: generator.register(1, None, print))
        refused(mailbox.register)
    assert granted == []


def test_no_event_is_taken(m: Messaging, channel: str, tmp_path: Path) -> None:
    with (
        EventMailbox(tmp_path) as mailbox,
        ready(MailboxServer(m, channel, mailbox)),
        RemoteMailbox(m, channel) as remote,
    ):
        box = remote.register().result(PATIENCE)
        own = mailbox.registration(box.id)
        store(own, events(1, 3))
        iterator = box.remote_events().result(PATIENCE)
        assert iterator.next(PATIENCE) == event(1)
        refused(iterator.close)
        refused(box.drain)
        refused(own.drain)
        remote.registrations().result(PATIENCE)  # a request that was sent has arrived before this one
        assert len(own) == 3
        iterator.close()
        eventually(lambda: len(own) == 2)


def test_no_lease_is_asked_for(m: Messaging, channel: str) -> None:
    with Landlord() as landlord, ready(LeaseServer(m, channel, landlord)), m.subscribe(f"{ANSWERS}#") as answers:
        answers.ready.result(PATIENCE)
        refused(lambda: find_leases(m, 0.1))
        m.publish(f"{ANSWERS}last", b"x").result(PATIENCE)
        assert answers.receive(timeout=PATIENCE).payload == b"x"


def test_no_entry_of_a_table_is_changed(tmp_path: Path) -> None:
    with JournalTable(tmp_path) as table:
        table.put("old", 1)
        refused(lambda: table.put("new", 2))
        refused(lambda: table.remove("old"))
        assert dict(table.items()) == {"old": 1}

"""Disks that fail: what is not stored is refused, what was accepted is kept, and the parties go on (EV.3)."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from messaging import Messaging
from messaging.errors import ClosedError, JournalError, ReplyError
from messaging.execution import Promise
from messaging.leases import Landlord
from messaging.remoteevent import EventGenerator, EventMailbox, StoreAndForwardAgent
from messaging.remoteevent.transactions import RemoteTransactionManager, TransactionManager, TransactionServer, Vote
from messaging.remoteevent.transactions.two_phases import Decisions
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST, Recorder, events, ready, store
from tests.remoteevent.participants import Recorder as Participant


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, part: str = "") -> Iterator[None]:
    """Have writes fail within a block: all of them, or those to files with ``part`` in their paths."""
    real = os.pwritev

    def write(descriptor: int, *arguments: object) -> int:
        if part in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", write)
        yield


def outcome(promise: Promise[int]) -> object:
    error = promise.exception(PATIENCE)
    return promise.result(PATIENCE) if error is None else type(error)


def test_an_event_that_a_generator_cannot_store_fails_and_the_next_one_is_notified_of(
    tmp_path: Path, target: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EventGenerator("source", events=[1], path=tmp_path / "g", listeners={"l": target}) as generator:
        generator.register(1, None, target, 60.0)
        with failing(monkeypatch):
            assert outcome(generator.generate(1)) is JournalError
        assert outcome(generator.generate(1)) == 2
        target.events.wait_for(1)
    assert target.numbers == [2]


@pytest.mark.parametrize("keep", ["all", "latest"])
def test_an_event_that_a_mailbox_cannot_store_is_refused_and_stored_when_it_comes_again(
    mailbox: EventMailbox, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    box = mailbox.register(100.0, keep=keep)  # type: ignore[arg-type]
    store(box, events(1, 1))
    with failing(monkeypatch):
        (refused,) = box.listener.deliver(events(2, 2)).result(PATIENCE)
    assert type(refused) is JournalError
    store(box, events(2, 2))
    assert [each.sequence_number for each in box.drain()] == ([1, 2] if keep == "all" else [2])


def test_an_event_that_an_agent_cannot_store_is_refused_and_passed_on_when_it_comes_again(
    tmp_path: Path, target: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreAndForwardAgent(tmp_path / "agent", target=target, retry=FAST) as agent:
        with failing(monkeypatch):
            (refused,) = agent.deliver(events(1, 1)).result(PATIENCE)
        assert type(refused) is JournalError
        assert agent.deliver(events(1, 1)).result(PATIENCE) == [None]
        target.events.wait_for(1)
    assert target.numbers == [1]


def test_parties_are_opened_although_the_remains_of_expired_leases_cannot_be_removed(
    tmp_path: Path, target: Recorder, virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        EventGenerator("source", events=[1], path=tmp_path / "g", listeners={"l": target}) as generator,
        EventMailbox(tmp_path / "mailbox", listeners={"l": target}) as mailbox,
        StoreAndForwardAgent(tmp_path / "agent", listeners={"l": target}) as agent,
    ):
        for seconds in (10.0, 1000.0):
            generator.register(1, None, target, seconds)
            store(mailbox.register(seconds), events(1, 1))
            agent.register("source", 1, None, target, seconds)
    virtual_clock.advance(100.0)
    with ExitStack() as stack:
        with failing(monkeypatch):
            listeners = {"l": target}
            generator = stack.enter_context(EventGenerator("source", path=tmp_path / "g", listeners=listeners))
            mailbox = stack.enter_context(EventMailbox(tmp_path / "mailbox", listeners=listeners))
            agent = stack.enter_context(StoreAndForwardAgent(tmp_path / "agent", listeners=listeners))
        assert len(generator._kind(1).interests) == len(mailbox.registrations()) == len(agent._all_forwardings()) == 1
        assert len(mailbox.registrations()[0]) == 1


def test_a_renewal_that_could_not_be_stored_is_kept_by_a_party_that_closes(
    tmp_path: Path, target: Recorder, virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EventMailbox(tmp_path / "mailbox") as mailbox:
        box = mailbox.register(10.0)
        with failing(monkeypatch):
            assert box.lease.renew(1000.0).result(PATIENCE) == 1000.0
            eventually(lambda: mailbox._state._failed)
    virtual_clock.advance(100.0)
    with EventMailbox(tmp_path / "mailbox") as mailbox:
        assert mailbox.registration(box.id).lease.remaining > 800.0


def test_a_party_that_cannot_store_a_renewal_when_it_closes_says_so(
    tmp_path: Path, target: Recorder, virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners = {"l": target}
    generator = EventGenerator("source", events=[1], path=tmp_path / "generator", listeners=listeners)
    mailbox = EventMailbox(tmp_path / "mailbox")
    agent = StoreAndForwardAgent(tmp_path / "agent", listeners=listeners)
    leases = [
        generator.register(1, None, target, 10.0).lease,
        mailbox.register(10.0).lease,
        agent.register("source", 1, None, target, 10.0).lease,
    ]
    with failing(monkeypatch, "state"):
        for lease, party in zip(leases, (generator, mailbox, agent), strict=True):
            assert lease.renew(1000.0).result(PATIENCE) == 1000.0
            with pytest.raises(JournalError, match="not stored"):
                party.close()
            party.close()
    virtual_clock.advance(5.0)
    with (
        EventGenerator("source", path=tmp_path / "generator", listeners=listeners) as generator,
        EventMailbox(tmp_path / "mailbox") as mailbox,
        StoreAndForwardAgent(tmp_path / "agent", listeners=listeners) as agent,
    ):
        for lease, party in zip(leases, (generator, mailbox, agent), strict=True):
            found = party.landlord.lease(lease.id)
            assert found is not None
            assert found.remaining == pytest.approx(5.0, abs=0.1), "the state before"


def test_a_commit_whose_events_cannot_be_stored_is_not_confirmed(
    tmp_path: Path, target: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        EventGenerator("source", events=[1], path=tmp_path / "g", listeners={"l": target}) as generator,
        TransactionManager(retry=FAST) as manager,
    ):
        generator.register(1, None, target, 60.0)
        transaction = manager.create(60.0)
        generator.generate(1, transaction=transaction)
        participant = generator.participant
        assert participant.prepare(transaction.id) is Vote.PREPARED
        with failing(monkeypatch, "/events/"):
            for _ in range(2):
                with pytest.raises(JournalError):
                    participant.commit(transaction.id)
        with failing(monkeypatch, "/state/"):
            for _ in range(2):
                with pytest.raises(JournalError):
                    participant.commit(transaction.id)
        assert participant.is_active
        participant.commit(transaction.id)
        assert not generator.participant.is_active
        target.events.wait_for(1)
    assert len(target.numbers) == 1


def test_an_abort_that_cannot_be_stored_is_not_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventGenerator("source", events=[1], path=tmp_path / "g") as generator, TransactionManager() as manager:
        transaction = manager.create(60.0)
        generator.generate(1, transaction=transaction)
        participant = generator.participant
        participant.prepare(transaction.id)
        with failing(monkeypatch, "/state/"):
            for _ in range(2):
                with pytest.raises(JournalError):
                    participant.abort(transaction.id)
        assert participant.is_active
        participant.abort(transaction.id)
    with EventGenerator("source", events=[1], path=tmp_path / "g") as generator:
        assert not generator.participant.is_active


@contextmanager
def failing_from(monkeypatch: pytest.MonkeyPatch, participant: Participant, operation: str) -> Iterator[None]:
    """Have writes of managers fail within a block, from the first call of this operation on."""
    with ExitStack() as stack:

        def fail(called: str) -> None:
            if called == operation:
                participant.before = lambda _: None
                stack.enter_context(failing(monkeypatch, "/manager/"))

        participant.before = fail
        yield


@table("timeout", [None, PATIENCE])
def test_a_participant_without_a_name_is_reachable_until_the_end_of_its_transaction_is_stored(
    m: Messaging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """Otherwise a manager whose process was killed would tell it again, and not reach it."""
    monkeypatch.setattr("messaging.remoteevent.transactions.remote_participant.GRACE", 0.05)
    participant = Participant()
    with (
        TransactionManager(tmp_path / "manager", messaging=m, retry=FAST) as manager,
        ready(TransactionServer(m, "transactions", manager)),
        RemoteTransactionManager(m, "transactions") as remote,
    ):
        transaction = remote.create(60.0)
        transaction.join(participant)
        with failing_from(monkeypatch, participant, "commit"):
            transaction.commit(timeout)
            eventually(lambda: not manager.transactions())
            shutil.copytree(tmp_path / "manager", tmp_path / "killed")
            with TransactionManager(tmp_path / "killed", messaging=m, retry=FAST, time_limit=1.0) as killed:
                eventually(lambda: not killed.transactions())
            assert participant.operations == ["prepare", "commit", "commit"]
            assert len(remote.servers) == 1
        eventually(lambda: len(remote.servers) == 0)
        shutil.copytree(tmp_path / "manager", tmp_path / "killed later")
    with closing(Decisions(tmp_path / "killed later")) as decisions:
        assert decisions.load() == []


def test_a_transaction_whose_end_could_not_be_stored_is_released_with_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TransactionManager(tmp_path / "manager", retry=FAST) as manager:
        participant = Participant()
        with failing_from(monkeypatch, participant, "commit"):
            transaction = manager.create(60.0)
            transaction.join(participant, name="one")
            transaction.commit()
            eventually(lambda: not manager.transactions())
            released = weakref.ref(participant)
            participant.before = lambda _: None
            del participant, transaction
            gc.collect()
            assert released() is not None, "its record may be on the disk"
        other = manager.create(60.0)
        other.join(Participant(), name="two")
        other.commit()
        eventually(lambda: not manager.transactions())
        eventually(lambda: gc.collect() >= 0 and released() is None)


@table("is_completed", [False, True])
def test_a_participant_whose_new_place_is_not_stored_is_told_so(
    m: Messaging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_completed: bool
) -> None:
    """A manager whose process was killed would tell it the outcome where it was, and it would not ask again."""
    participant, other = Participant(), Participant()
    other.failures["commit"] = 0 if is_completed else 1000
    with (
        TransactionManager(tmp_path / "manager", messaging=m, retry=FAST) as manager,
        ready(TransactionServer(m, "transactions", manager)),
        RemoteTransactionManager(m, "transactions") as remote,
    ):
        transaction = remote.create(60.0)
        transaction.join(participant, name="one")
        transaction.join(other, name="two")
        before = remote.reach("one", participant)
        with failing_from(monkeypatch, participant, "commit"):
            transaction.commit()
            eventually(lambda: bool(manager.transactions()) is not is_completed)
            eventually(lambda: participant.operations == ["prepare", "commit"])
            with RemoteTransactionManager(m, "transactions") as moved:
                for _ in range(2):
                    with pytest.raises(ReplyError, match="JournalError"):
                        moved.recover("one", participant).result(PATIENCE)
        with RemoteTransactionManager(m, "transactions") as moved:
            assert moved.recover("one", participant).result(PATIENCE) == ([] if is_completed else [transaction.id])
            shutil.copytree(tmp_path / "manager", tmp_path / "killed")
            after = moved.reach("one", participant)
    with closing(Decisions(tmp_path / "killed")) as decisions:
        places = [[each.reference for each in enlisted] for _, _, enlisted in decisions.load()]
    assert before != after
    assert [found[0] for found in places] == ([] if is_completed else [after])


def test_a_generator_that_cannot_store_its_state_closes_its_landlord(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = EventGenerator("source", events=[1], path=tmp_path / "g")
    generator.generate(1).result(PATIENCE)
    with failing(monkeypatch), pytest.raises(JournalError):
        generator.close()
    with pytest.raises(ClosedError):
        generator.landlord.grant(1.0)
    with EventGenerator("source", path=tmp_path / "g", landlord=Landlord()) as again:  # its folder is free
        assert again.sequence_number(1) == 1

"""Disks that fail: what is not stored is refused, what was accepted is kept, and the parties go on (EV.3)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from messaging.errors import ClosedError, JournalError
from messaging.execution import Promise
from messaging.leases import Landlord
from messaging.remoteevent import EventGenerator, EventMailbox, StoreAndForwardAgent
from messaging.remoteevent.transactions import TransactionManager, Vote
from messaging.testing.clock import VirtualClock
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST, Recorder, events, store


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

"""Joining transactions, and leaving them behind: generators that are late, restarted, or without a name (EV.2.4)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging import Messaging
from messaging.errors import (
    CannotCommitError,
    CannotJoinError,
    DeadlineError,
    MessagingError,
    OutcomeUnknownError,
    UnknownTransactionError,
    WouldBlockError,
)
from messaging.remoteevent import EventGenerator, RetryPolicy
from messaging.remoteevent.transactions import (
    RemoteTransactionManager,
    Transaction,
    TransactionManager,
    TransactionServer,
    TransactionState,
    Vote,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import Recorder, ready
from tests.remoteevent.participants import Recorder as Participant
from tests.threads import in_background

CHANNEL = "transactions/here"
FAST = RetryPolicy(first_delay=0.02, max_delay=0.05)


@pytest.fixture
def manager() -> Iterator[TransactionManager]:
    with TransactionManager(time_limit=10, retry=FAST) as made:
        yield made


@pytest.fixture
def generator() -> Iterator[EventGenerator]:
    with EventGenerator("source", events=["hot"]) as made:
        yield made


@pytest.fixture
def remote(m: Messaging, manager: TransactionManager) -> Iterator[RemoteTransactionManager]:
    with ready(TransactionServer(m, CHANNEL, manager)), RemoteTransactionManager(m, CHANNEL) as made:
        yield made


class Interrupted:
    """A transaction that another thread ends just after it was joined."""

    def __init__(self, transaction: Transaction, end: Any) -> None:
        self.id = transaction.id
        self._transaction = transaction
        self._end = end

    def join(self, *given: Any, **options: Any) -> None:
        self._transaction.join(*given, **options)
        self._end()

    def when_ended(self, callback: Any) -> None:
        self._transaction.when_ended(callback)


# --- generators


def test_an_event_is_refused_if_the_transaction_commits_while_its_generator_joins(
    manager: TransactionManager, generator: EventGenerator
) -> None:
    """The commit succeeds without the event, and the caller of ``generate`` is told."""
    outside = Recorder()
    generator.register("hot", None, outside, 60.0)
    transaction: Any = manager.create(60.0)
    with pytest.raises(CannotJoinError):
        generator.generate("hot", transaction=Interrupted(transaction, lambda: transaction.commit(10)))
    assert transaction.state is TransactionState.COMMITTED
    generator.generate("hot")
    outside.events.wait_for(1)
    assert len(outside.events) == 1


def test_a_generator_that_lost_the_events_of_a_transaction_aborts_it(
    manager: TransactionManager, tmp_path: Path
) -> None:
    """Its process ended between joining and preparing."""

    def open_generator() -> EventGenerator:
        return EventGenerator("source", events=["hot"], path=tmp_path)

    other = Participant()
    transaction = manager.create(60.0)
    transaction.join(other, name="other")
    present: list[EventGenerator] = []

    class Process:
        """The generator, as it is now, behind a stub."""

        def prepare(self, transaction_id: str) -> Any:
            return present[-1].participant.prepare(transaction_id)

        def commit(self, transaction_id: str) -> Any:
            return present[-1].participant.commit(transaction_id)

        def abort(self, transaction_id: str) -> Any:
            return present[-1].participant.abort(transaction_id)

    class Stub(Interrupted):
        def join(self, _participant: Any, **options: Any) -> None:
            self._transaction.join(Process(), **options)

    with open_generator() as generator:
        present.append(generator)
        generator.generate("hot", transaction=Stub(transaction, None))
    with open_generator() as generator:
        present.append(generator)
        with pytest.raises(CannotJoinError, match="crash count"):
            generator.generate("hot", transaction=Stub(transaction, None))  # half of the events would be missing
        with pytest.raises(CannotCommitError, match="lost with an earlier run"):
            transaction.commit(10)
    assert "commit" not in other.operations


def test_a_transaction_that_cannot_be_joined_leaves_nothing_behind(
    manager: TransactionManager, generator: EventGenerator
) -> None:
    transaction = manager.create(60.0)
    transaction.abort(10)
    with pytest.raises(MessagingError):
        generator.generate("hot", transaction=transaction)
    assert not generator.participant.is_active
    with pytest.raises(UnknownTransactionError):
        generator.participant.prepare(transaction.id)


def test_a_thread_does_not_add_events_to_a_transaction_that_another_one_failed_to_join(
    manager: TransactionManager, generator: EventGenerator
) -> None:
    outside = Recorder()
    generator.register("hot", None, outside, 60.0)
    transaction = manager.create(60.0)
    is_joining, go_on = threading.Event(), threading.Event()

    def fail() -> None:
        is_joining.set()
        assert go_on.wait(PATIENCE)
        raise OutcomeUnknownError("the connection was lost")

    join = in_background(lambda: generator.generate("hot", transaction=Interrupted(transaction, fail)))
    assert is_joining.wait(PATIENCE)
    generator.generate("hot", transaction=transaction)  # joins for itself
    go_on.set()
    with pytest.raises(OutcomeUnknownError):
        join()
    transaction.commit(10)
    outside.events.wait_for(1)
    assert len(outside.events) == 1


# --- transactions


def test_transactions_whose_leases_end_at_once_are_completed(manager: TransactionManager) -> None:
    for _ in range(500):
        manager.create(1e-9)
    eventually(lambda: not manager.transactions())


# --- participants without a name, of other processes


@table("vote", [Vote.PREPARED, Vote.NOTCHANGED])
@table("end", ["commit", "abort"])
def test_participants_without_a_name_are_reachable_as_long_as_their_transaction(
    remote: RemoteTransactionManager, vote: Vote, end: str
) -> None:
    for _ in range(5):
        transaction = remote.create(60.0)
        participant = Participant(vote)
        transaction.join(participant)
        transaction.join(participant)
        transaction.join(Participant(vote))
        assert len(remote.servers) == 2
        getattr(transaction, end)(10)
        eventually(lambda: len(remote.servers) == 0)
        expected = {"abort": ["abort"], "commit": ["prepare", "commit"] if vote is Vote.PREPARED else ["prepare"]}
        assert participant.operations == expected[end]


def test_a_participant_without_a_name_is_reachable_until_it_knows_the_outcome(
    remote: RemoteTransactionManager, manager: TransactionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.remoteevent.transactions.remote_participant.GRACE", 1.0)
    transaction = remote.create(60.0)
    participant = Participant()
    participant.failures["commit"] = 3
    transaction.join(participant)
    transaction.commit()  # told once, without success
    eventually(lambda: not manager.transactions())
    assert participant.operations == ["prepare", *["commit"] * 4]
    eventually(lambda: len(remote.servers) == 0)


def test_participants_without_a_name_of_several_processes_are_told_apart(
    remote: RemoteTransactionManager, m: Messaging
) -> None:
    participant = Participant()
    transaction = remote.create(60.0)
    transaction.join(participant)
    with RemoteTransactionManager(m, CHANNEL) as other:
        other.transaction(transaction.id).join(participant)  # the same object: its address can be that of another one
        transaction.commit(10)
    assert sorted(participant.operations) == ["commit", "commit", "prepare", "prepare"]


def test_a_participant_without_a_name_is_reachable_until_its_manager_knows_that_it_knows_the_outcome(
    m: Messaging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision is on the disk, the confirmation of one of two participants is not when the manager ends."""
    monkeypatch.setattr("messaging.remoteevent.transactions.remote_participant.GRACE", 0.2)
    good, bad = Participant(), Participant()
    bad.failures["commit"] = 1_000_000
    with RemoteTransactionManager(m, CHANNEL) as remote:
        with (
            TransactionManager(tmp_path / "t", messaging=m, retry=FAST) as manager,
            ready(TransactionServer(m, CHANNEL, manager)),
        ):
            transaction = remote.create(60.0)
            transaction.join(good)
            transaction.join(bad, name="bad")
            transaction.commit()
            assert good.operations == ["prepare", "commit"]
        with (
            TransactionManager(tmp_path / "t", messaging=m, time_limit=3, retry=FAST) as manager,
            ready(TransactionServer(m, CHANNEL, manager)),
        ):
            eventually(lambda: good.operations == ["prepare", "commit", "commit"])
            bad.failures.clear()
            eventually(lambda: not manager.transactions())
            eventually(lambda: len(remote.servers) == 1)


def test_a_manager_that_was_restarted_does_not_tell_participants_without_a_name_for_ever(
    m: Messaging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        TransactionManager(tmp_path / "t", messaging=m, retry=FAST) as manager,
        ready(TransactionServer(m, CHANNEL, manager)),
        RemoteTransactionManager(m, CHANNEL) as remote,
    ):
        transaction = remote.create(60.0)
        for name in (None, "stock"):
            participant = Participant()
            participant.failures["commit"] = 1_000_000
            transaction.join(participant, name=name)
        transaction.commit()
        unnamed, named = manager.transactions()[0].waiting_for
    # both are gone with their client
    monkeypatch.setattr("messaging.remoteevent.transactions.participant.UNNAMED_TIME", 0.0)
    with TransactionManager(tmp_path / "t", messaging=m, time_limit=0.2, retry=FAST) as manager:
        eventually(lambda: manager.transactions()[0].waiting_for == [named])
        eventually(lambda: f"at participant '{named}' failed" in caplog.text)
    assert named == "stock"
    gone = [each for each in caplog.messages if f"at participant '{unnamed}' failed" in each and "given up" in each]
    assert len(gone) == 1


def test_a_participant_that_cannot_join_is_not_reachable(remote: RemoteTransactionManager) -> None:
    transaction = remote.create(60.0)
    transaction.abort(10)
    with pytest.raises((CannotJoinError, UnknownTransactionError)):
        transaction.join(Participant())
    assert len(remote.servers) == 0


def test_joining_in_an_event_loop_leaves_nothing_behind(remote: RemoteTransactionManager) -> None:
    async def main() -> None:
        transaction = await remote.create_soon(60.0)
        with pytest.raises(WouldBlockError):
            transaction.join(Participant())

    asyncio.run(main())
    assert len(remote.servers) == 0


def test_named_participants_stay_reachable(remote: RemoteTransactionManager) -> None:
    participant = Participant()
    for _ in range(3):
        transaction = remote.create(60.0)
        transaction.join(participant, name="stock")
        transaction.commit(10)
    assert len(remote.servers) == 1
    remote.close()
    assert len(remote.servers) == 0


# --- timeouts


@pytest.mark.usefixtures("virtual_clock")
def test_a_commit_waits_for_the_participants_beyond_the_timeout_of_requests(
    m: Messaging, manager: TransactionManager
) -> None:
    go_on = threading.Event()
    participant = Participant()
    participant.before = lambda operation: operation == "commit" and go_on.wait(PATIENCE)
    with (
        ready(TransactionServer(m, CHANNEL, manager)),
        RemoteTransactionManager(m, CHANNEL, timeout=0.5) as remote,
    ):
        transaction = remote.create(60.0)
        transaction.join(participant, name="slow")
        promise = transaction.commit_soon(8.0)
        with pytest.raises(DeadlineError) as caught:
            promise.result(1.5)  # the request goes on
        assert not isinstance(caught.value, OutcomeUnknownError)
        assert not promise.done()
        go_on.set()
        promise.result(PATIENCE)
        assert transaction.state is TransactionState.COMMITTED

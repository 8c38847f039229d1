"""Transactions between processes: managers and participants behind channels of a broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Messaging
from messaging.errors import (
    ArgumentError,
    CannotAbortError,
    CannotCommitError,
    CannotJoinError,
    DeadlineError,
    InvalidChannelError,
    UnknownLeaseError,
    UnknownTransactionError,
    WouldBlockError,
)
from messaging.remoteevent import EventGenerator, RetryPolicy
from messaging.remoteevent.transactions import (
    ParticipantServer,
    RemoteParticipant,
    RemoteTransactionManager,
    TransactionManager,
    TransactionServer,
    TransactionState,
    Vote,
)
from messaging.testing import waiting
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import ready
from tests.remoteevent.participants import Recorder, joined

CHANNEL = "transactions/test"
FAST = RetryPolicy(first_delay=0.05, max_delay=0.1)


@pytest.fixture(params=["memory", "mqtt"])
def instances(request: pytest.FixtureRequest) -> Iterator[tuple[Messaging, Messaging]]:
    """Two instances at one broker."""
    url = "memory://transactions" if request.param == "memory" else request.getfixturevalue("mosquitto").url
    with messaging.connect(url) as one, messaging.connect(url) as other:
        yield one, other


@pytest.fixture
def manager() -> Iterator[TransactionManager]:
    with TransactionManager(time_limit=3, retry=FAST) as found:
        yield found


@pytest.fixture
def remote(instances: tuple[Messaging, Messaging], manager: TransactionManager) -> Iterator[RemoteTransactionManager]:
    one, other = instances
    with ready(TransactionServer(one, CHANNEL, manager)), RemoteTransactionManager(other, CHANNEL) as found:
        yield found


def test_a_transaction_of_another_process_is_committed(
    remote: RemoteTransactionManager, manager: TransactionManager
) -> None:
    participants = [Recorder(), Recorder()]
    ended: waiting.Recorder[TransactionState] = waiting.Recorder()
    transaction = remote.create(60)
    assert transaction.lease is not None
    assert transaction.lease.renew(90).result(PATIENCE) == 90
    for number, each in enumerate(participants):
        transaction.join(each, name=str(number))
        transaction.join(each, name=str(number))
    transaction.when_ended(ended.append)
    transaction.commit(timeout=PATIENCE)
    assert [each.operations for each in participants] == [["prepare", "commit"]] * 2
    ended.wait_for(1)
    assert (ended, transaction.state) == ([TransactionState.COMMITTED], TransactionState.COMMITTED)
    assert remote.state(transaction.id).result(PATIENCE) is TransactionState.COMMITTED
    transaction.commit()  # the first answer may have been lost
    with pytest.raises(CannotAbortError):
        transaction.abort()
    with pytest.raises(UnknownLeaseError):
        transaction.lease.renew().result(PATIENCE)
    with pytest.raises((UnknownTransactionError, CannotJoinError)):
        transaction.join(Recorder(), name="late")


def test_a_transaction_of_another_process_is_aborted(
    remote: RemoteTransactionManager, manager: TransactionManager
) -> None:
    good, bad = Recorder(), Recorder(Vote.ABORTED)
    transaction = joined(remote, good=good, bad=bad)
    with pytest.raises(CannotJoinError):
        transaction.join(bad, name="bad", crash_count=1)
    with pytest.raises(CannotCommitError):
        transaction.commit()
    assert transaction.state is TransactionState.ABORTED
    eventually(lambda: not manager.transactions())
    assert "commit" not in good.operations
    assert good.operations[-1] == "abort"
    again = joined(remote, good=good)
    again.abort(timeout=PATIENCE)
    with pytest.raises(CannotCommitError):
        again.commit()
    with pytest.raises(UnknownTransactionError):
        remote.state("unknown").result(PATIENCE)
    with pytest.raises(UnknownTransactionError):
        remote.transaction("unknown").commit()


def test_a_deadline_of_another_process_says_what_was_decided(remote: RemoteTransactionManager) -> None:
    stuck, go_on = Recorder(), threading.Event()
    stuck.before = lambda operation: go_on.wait(PATIENCE) if operation == "commit" else None
    transaction = joined(remote, stuck=stuck)
    try:
        with pytest.raises(DeadlineError, match="committed"):
            transaction.commit(timeout=0.05)
        assert transaction.state is TransactionState.COMMITTED
    finally:
        go_on.set()
    transaction.commit(timeout=PATIENCE)


def test_a_failing_participant_is_called_again(
    remote: RemoteTransactionManager, instances: tuple[Messaging, Messaging]
) -> None:
    participant = Recorder()
    participant.failures["commit"] = 2
    with ready(ParticipantServer(instances[1], "participants/one", participant)):
        transaction = remote.create()
        transaction.join(RemoteParticipant(instances[1], "participants/one"), name="one")
        transaction.commit(timeout=PATIENCE)
    assert participant.operations == ["prepare", "commit", "commit", "commit"]


def test_participants_are_reached_again_after_a_restart(instances: tuple[Messaging, Messaging], tmp_path: Path) -> None:
    one, other = instances
    first, second = Recorder(), Recorder()
    for each in (first, second):
        each.failures["commit"] = 1000
    servers = [ParticipantServer(other, f"participants/{n}", each) for n, each in enumerate((first, second))]
    for server in servers:
        server.ready.result(PATIENCE)
    manager = TransactionManager(tmp_path / "t", retry=RetryPolicy(first_delay=100, max_delay=100))
    with (
        ready(TransactionServer(one, "transactions/restart", manager)),
        RemoteTransactionManager(other, "transactions/restart") as remote,
    ):
        transaction = remote.create()
        transaction.join(first, name="first", reference="participants/0")
        transaction.join(second, name="second", reference="participants/1")
        transaction.commit()  # decided; both fail
        manager.close()
    servers[1].close()
    first.failures.clear()
    second.failures.clear()
    with (
        TransactionManager(tmp_path / "t", messaging=one, time_limit=5, retry=FAST) as manager,
        TransactionServer(one, "transactions/restart", manager) as served,
    ):
        eventually(lambda: first.operations[-2:] == ["commit", "commit"])
        eventually(lambda: [each.waiting_for for each in manager.transactions()] == [["second"]])
        served.ready.result(PATIENCE)
        with RemoteTransactionManager(other, "transactions/restart") as remote:  # the second one has a new channel
            assert remote.recover("second", second).result(PATIENCE) == [transaction.id]
            eventually(lambda: not manager.transactions())
    assert second.operations[-1] == "commit"
    servers[0].close()


def test_a_generator_takes_part_in_a_transaction_of_another_process(remote: RemoteTransactionManager) -> None:
    """Scenarios 24 to 27, with a manager in another process."""
    inside: waiting.Recorder[Any] = waiting.Recorder()
    outside: waiting.Recorder[Any] = waiting.Recorder()
    with EventGenerator("boiler", events=["hot"], begin=0) as boiler:
        boiler.register("hot", None, outside.append)
        transaction: Any = remote.create()
        inner = boiler.register("hot", None, inside.append, transaction=transaction)
        boiler.generate("hot", transaction=transaction)
        inside.wait_for(1)
        assert outside == []
        transaction.commit(timeout=PATIENCE)
        outside.wait_for(1)
        assert inner.id != "hot"
        eventually(lambda: inner.lease.is_ended)


def test_a_remote_manager_is_used_on_an_event_loop(remote: RemoteTransactionManager) -> None:
    async def main() -> None:
        with pytest.raises(WouldBlockError):
            remote.create()
        await (await remote.create_soon()).commit_soon()
        await (await remote.create_soon()).abort_soon()

    asyncio.run(main())


def test_junk_is_refused(remote: RemoteTransactionManager, instances: tuple[Messaging, Messaging]) -> None:
    with pytest.raises(InvalidChannelError):
        RemoteTransactionManager(instances[0], "")
    transaction: Any = remote.create()
    for call in (
        lambda: RemoteTransactionManager(instances[0], "x", timeout=0),
        lambda: remote.transaction(3),  # type: ignore[arg-type]
        *(partial(transaction.join, junk) for junk in (None, 3, Recorder)),
        lambda: transaction.commit("x"),
        lambda: transaction.when_ended(3),
        lambda: remote.create(0),
    ):
        with pytest.raises(ArgumentError):
            call()
    transaction.abort()

"""The transaction manager: two phases, leases, failures (EV.2.4; scenarios 26 to 28)."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    CannotAbortError,
    CannotCommitError,
    CannotJoinError,
    ClosedError,
    DeadlineError,
    JournalError,
    OutcomeUnknownError,
    UnknownLeaseError,
    UnknownTransactionError,
)
from messaging.execution import Promise
from messaging.journal import JournalTable
from messaging.leases import Lease
from messaging.remoteevent import RetryPolicy
from messaging.remoteevent.transactions import TransactionManager, TransactionState, Vote, two_phases
from messaging.remoteevent.transactions import participant as module
from messaging.remoteevent.transactions.participant import ABORT_ATTEMPTS
from messaging.remoteevent.transactions.two_phases import Decisions
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST
from tests.remoteevent.participants import Recorder, joined
from tests.threads import in_background, together


@pytest.fixture(params=["memory", "disk"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    path = None if request.param == "memory" else tmp_path / "transactions"
    with TransactionManager(path, time_limit=2, retry=FAST) as found:
        yield found


def test_commit_asks_all_participants_to_prepare_before_it_tells_one_to_commit(manager: TransactionManager) -> None:
    order: list[tuple[str, str]] = []
    participants = {name: Recorder() for name in "abc"}
    for name, each in participants.items():
        each.before = lambda operation, name=name: order.append((operation, name))  # type: ignore[misc]
    transaction = joined(manager, **participants)
    transaction.commit()
    assert transaction.state is TransactionState.COMMITTED
    assert {operation for operation, _ in order[:3]} == {"prepare"}
    assert sorted(order[3:]) == [("commit", "a"), ("commit", "b"), ("commit", "c")]
    with pytest.raises(CannotAbortError):
        transaction.abort()
    transaction.commit()  # again: it is committed
    assert len(order) == 6


def test_a_transaction_without_participants_commits(manager: TransactionManager) -> None:
    transaction = manager.create()
    transaction.commit(timeout=0)
    assert manager.state(transaction.id) is TransactionState.COMMITTED
    assert manager.transactions() == []


@table("vote", [Vote.ABORTED, None, "prepared"])
def test_one_vote_to_abort_aborts_all(manager: TransactionManager, vote: Any) -> None:
    good, bad = Recorder(), Recorder(vote)
    transaction = joined(manager, good=good, bad=bad)
    with pytest.raises(CannotCommitError, match="bad"):
        transaction.commit(timeout=PATIENCE)
    eventually(lambda: not manager.transactions())
    assert "commit" not in good.operations + bad.operations
    assert good.operations == ["prepare", "abort"] or good.operations == ["abort"]
    assert bad.operations == (["prepare"] if vote is Vote.ABORTED else ["prepare", "abort"])
    assert manager.state(transaction.id) is TransactionState.ABORTED


def test_an_exception_in_prepare_votes_to_abort(manager: TransactionManager) -> None:
    bad = Recorder()
    bad.failures["prepare"] = 1
    transaction = joined(manager, bad=bad)
    with pytest.raises(CannotCommitError, match="prepare fails"):
        transaction.commit()
    assert bad.operations == ["prepare", "abort"]


def test_a_participant_that_changed_nothing_is_told_no_more(manager: TransactionManager) -> None:
    reader, writer = Recorder(Vote.NOTCHANGED), Recorder()
    transaction = joined(manager, reader=reader, writer=writer)
    transaction.commit(timeout=PATIENCE)
    assert reader.operations == ["prepare"]
    assert writer.operations == ["prepare", "commit"]
    second = manager.create()
    second.join(reader, name="reader")
    second.commit(timeout=PATIENCE)
    assert reader.operations == ["prepare"] * 2


@table("has_writer", [True, False])
def test_a_participant_that_changed_nothing_is_told_no_more_after_a_restart(tmp_path: Path, has_writer: bool) -> None:
    reader, writer, passing = Recorder(Vote.NOTCHANGED), Recorder(), Recorder()
    for each in (writer, passing):
        each.failures["commit"] = 1
    path = tmp_path / str(has_writer)
    with TransactionManager(path, retry=RetryPolicy(first_delay=600.0, max_delay=600.0)) as manager:
        transaction = joined(manager, reader=reader, **({"writer": writer} if has_writer else {}))
        transaction.join(passing)  # without a name
        transaction.commit()  # told once: it failed
        assert transaction.state is TransactionState.COMMITTED
    with TransactionManager(path, retry=FAST) as manager:
        assert manager.recover("reader", reader) == []
        assert manager.recover("writer", writer) == ([transaction.id] if has_writer else [])
        eventually(lambda: manager.transactions() == [])
    assert reader.operations == ["prepare"]
    assert writer.operations == (["prepare", "commit", "commit"] if has_writer else [])


def test_commit_is_told_until_it_succeeds(manager: TransactionManager) -> None:
    slow = Recorder()
    slow.failures["commit"] = 3
    transaction = joined(manager, slow=slow)
    transaction.commit()  # told once: it failed
    assert transaction.state is TransactionState.COMMITTED
    transaction.commit(timeout=PATIENCE)
    assert slow.operations == ["prepare"] + ["commit"] * 4


def test_a_timer_that_fires_early_makes_the_call(manager: TransactionManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers of uvloop do, by some milliseconds; to this clock each one is early."""
    monkeypatch.setattr(module, "clock", SimpleNamespace(monotonic=lambda: 0.0))
    slow = Recorder()
    slow.failures["commit"] = 3
    joined(manager, slow=slow).commit(timeout=PATIENCE)
    eventually(lambda: slow.operations == ["prepare"] + ["commit"] * 4)


@pytest.mark.usefixtures("virtual_clock")
def test_a_deadline_after_the_decision_says_that_it_is_committed(manager: TransactionManager) -> None:
    stuck, go_on = Recorder(), threading.Event()
    stuck.before = lambda operation: go_on.wait(PATIENCE) if operation == "commit" else None
    transaction = joined(manager, stuck=stuck)
    try:
        with pytest.raises(DeadlineError, match=r"committed.*stuck"):
            transaction.commit(timeout=0.05)
        assert manager.transactions()[0].waiting_for == ["stuck"]
    finally:
        go_on.set()
    transaction.commit(timeout=PATIENCE)
    assert stuck.operations == ["prepare", "commit"]  # a call that has not returned is not made twice


def test_a_participant_that_does_not_answer_in_time_votes_to_abort() -> None:
    stuck, go_on = Recorder(), threading.Event()
    stuck.before = lambda operation: go_on.wait(PATIENCE) if operation == "prepare" else None
    with TransactionManager(time_limit=0.05, retry=FAST) as manager:
        transaction = joined(manager, stuck=stuck)
        try:
            with pytest.raises(CannotCommitError, match=r"has not prepared within 0\.05 s"):
                transaction.commit()
            assert stuck.operations == ["prepare"]
        finally:
            go_on.set()
        eventually(lambda: not manager.transactions())
        assert stuck.operations == ["prepare", "abort"]  # one call at a time, in order


def test_abort_tells_the_participants_a_few_times(manager: TransactionManager) -> None:
    deaf = Recorder()
    deaf.failures["abort"] = 100
    transaction = joined(manager, deaf=deaf)
    transaction.abort()
    transaction.abort(timeout=PATIENCE)
    assert deaf.operations == ["abort"] * 5
    with pytest.raises(CannotCommitError):
        transaction.commit()


def test_unknown_transaction_counts_as_confirmed(manager: TransactionManager) -> None:
    class Forgetful(Recorder):
        def commit(self, transaction_id: str) -> None:
            super().commit(transaction_id)
            raise UnknownTransactionError("done before")

    forgetful = Forgetful()
    transaction = joined(manager, forgetful=forgetful)
    transaction.commit(timeout=PATIENCE)
    assert forgetful.operations == ["prepare", "commit"]


def test_joining_again_changes_nothing_and_another_crash_count_is_refused(manager: TransactionManager) -> None:
    one, other = Recorder(), Recorder()
    transaction = manager.create()
    transaction.join(one, name="one", crash_count=1)
    transaction.join(one, name="one", crash_count=1)
    with pytest.raises(CannotJoinError, match="crash count"):
        transaction.join(one, name="one", crash_count=2)
    transaction.join(other)
    transaction.join(other)
    transaction.commit(timeout=PATIENCE)
    assert one.operations == other.operations == ["prepare", "commit"]
    with pytest.raises(CannotJoinError, match="committed"):
        transaction.join(one, name="one", crash_count=1)


def test_a_lease_that_ends_aborts_an_active_transaction(manager: TransactionManager) -> None:
    """Scenario 28, for the transaction itself."""
    participant = Recorder()
    transaction = joined(manager, one=participant)
    ended: waiting.Recorder[TransactionState] = waiting.Recorder()
    transaction.when_ended(ended)
    transaction.lease.renew(0.05)
    assert ended.wait_for(1) == [TransactionState.ABORTED]
    assert participant.operations == ["abort"]
    with pytest.raises(CannotCommitError, match="lease"):
        transaction.commit()
    with pytest.raises(CannotJoinError):
        transaction.join(participant)
    cancelled = manager.create()
    assert cancelled.lease is not None
    cancelled.lease.cancel()
    with pytest.raises(CannotJoinError):
        cancelled.join(participant)


def test_the_lease_of_an_ended_transaction_cannot_be_renewed(manager: TransactionManager) -> None:
    """Scenario 27, for the transaction itself."""
    for end in ("commit", "abort"):
        transaction = manager.create(60)
        getattr(transaction, end)()
        assert transaction.lease is not None
        with pytest.raises(UnknownLeaseError):
            transaction.lease.renew(60)


def test_callbacks_run_in_order_after_the_participants_were_told(manager: TransactionManager) -> None:
    """Scenarios 26 and 27: what belongs to the transaction ends after the participants have its outcome."""
    order: waiting.Recorder[str] = waiting.Recorder()
    participant = Recorder()
    participant.before = order
    transaction = joined(manager, one=participant)

    def fail(_state: TransactionState) -> None:
        order.append("first")
        raise RuntimeError("a callback fails")

    transaction.when_ended(fail)
    for _ in range(2):  # also when it has ended
        transaction.when_ended(lambda state: order.append(state.name))
        transaction.commit(timeout=PATIENCE)
        eventually(lambda: order[-1] == "COMMITTED")
    assert order.wait_for(5) == ["prepare", "commit", "first", "COMMITTED", "COMMITTED"]


def test_many_commits_and_aborts_of_one_transaction_agree(manager: TransactionManager) -> None:
    for _ in range(20):
        participants = [Recorder() for _ in range(3)]
        transaction = joined(manager, **{str(number): each for number, each in enumerate(participants)})
        outcomes: list[str] = []

        def run(operation: str, transaction: Any = transaction, outcomes: list[str] = outcomes) -> None:
            try:
                getattr(transaction, operation)(timeout=PATIENCE)
                outcomes.append(operation)
            except (CannotCommitError, CannotAbortError):
                outcomes.append(f"not {operation}")

        together(*(partial(run, each) for each in ("commit", "abort", "commit", "abort")))
        committed = transaction.state is TransactionState.COMMITTED
        good, bad = ("commit", "not abort") if committed else ("abort", "not commit")
        assert sorted(outcomes) == sorted([good, good, bad, bad])
        for each in participants:
            assert ("commit" in each.operations) is committed
            assert ("abort" in each.operations) is not committed


def test_participants_may_answer_with_promises(manager: TransactionManager) -> None:
    class Later:
        def _later(self, value: Any) -> Promise[Any]:
            promise: Promise[Any] = Promise("later")
            in_background(lambda: promise.resolve(value))
            return promise

        def prepare(self, _id: str) -> Promise[Any]:
            return self._later(Vote.PREPARED)

        def commit(self, _id: str) -> Promise[Any]:
            return self._later(None)

        abort = commit

    transaction = manager.create()
    transaction.join(Later(), name="later")
    transaction.commit(timeout=PATIENCE)
    assert manager.transactions() == []


def test_a_transaction_is_committed_on_an_event_loop(manager: TransactionManager) -> None:
    async def main() -> None:
        transaction = joined(manager, one=Recorder())
        await transaction.commit_soon(PATIENCE)
        assert transaction.state is TransactionState.COMMITTED
        await manager.create().abort_soon()

    asyncio.run(main())


def test_closing_aborts_what_is_not_decided(tmp_path: Path) -> None:
    participant = Recorder()
    manager = TransactionManager(tmp_path / "t", retry=FAST)
    joined(manager, one=participant)
    manager.close()
    manager.close()
    assert participant.operations == ["abort"]
    for call in (manager.create, lambda: manager.recover("one", participant)):
        with pytest.raises(ClosedError):
            call()


def test_the_decision_is_on_the_disk_before_the_first_participant_is_told(tmp_path: Path) -> None:
    seen: list[Any] = []
    manager = TransactionManager(tmp_path / "t", retry=FAST)
    participant = Recorder()
    transaction = manager.create()
    table: Any = manager.decisions
    participant.before = lambda operation: seen.append((operation, table._table.get(transaction.id)["state"]))
    transaction.join(participant, name="one")
    transaction.commit(timeout=PATIENCE)
    assert seen == [("prepare", "voting"), ("commit", "committed")]
    manager.close()
    with JournalTable(tmp_path / "t") as records:
        assert len(records) == 0


def test_a_decision_that_cannot_be_stored_leaves_the_outcome_unknown_until_it_is(tmp_path: Path) -> None:
    manager = TransactionManager(tmp_path / "t", retry=FAST)
    participant = Recorder()
    transaction = joined(manager, one=participant)
    real = JournalTable.put_soon
    failures = 3

    def put_soon(table: JournalTable, key: str, value: Any) -> Any:
        nonlocal failures
        if value["state"] == "committed" and failures:
            failures -= 1
            raise JournalError("t", "the disk is full")
        return real(table, key, value)

    with mock.patch.object(JournalTable, "put_soon", put_soon):
        with pytest.raises(OutcomeUnknownError, match="disk is full"):
            transaction.commit()
        eventually(lambda: not manager.transactions())
    transaction.commit()
    assert participant.operations == ["prepare", "commit"]
    manager.close()


def test_a_vote_record_that_cannot_be_stored_aborts(tmp_path: Path) -> None:
    manager = TransactionManager(tmp_path / "t", retry=FAST)
    participant = Recorder()
    transaction = joined(manager, one=participant)
    with (
        mock.patch.object(JournalTable, "put_soon", side_effect=JournalError("t", "the disk is full")),
        pytest.raises(CannotCommitError, match="disk is full"),
    ):
        transaction.commit()
    assert participant.operations == ["abort"]
    manager.close()


def test_bounds() -> None:
    with TransactionManager(max_transactions=2) as manager:
        first = manager.create()
        manager.create()
        with pytest.raises(Exception, match="2"):
            manager.create()
        first.abort()
        third = manager.create()
        for number in range(1000):
            third.join(Recorder(Vote.NOTCHANGED), name=str(number))
        with pytest.raises(BoundReachedError):
            third.join(Recorder(), name="one more")


@table("options", [{"time_limit": 0}, {"time_limit": "x"}, {"retry": 3}, {"path": 4}, {"max_transactions": 0}])
def test_junk_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        TransactionManager(**options)


def test_junk_arguments_are_refused(manager: TransactionManager) -> None:
    transaction = manager.create()
    for participant in (None, object(), Recorder):
        with pytest.raises(ArgumentError):
            transaction.join(participant)
    for options in ({"name": ""}, {"name": 3}, {"crash_count": "x"}, {"crash_count": 2**63}):
        with pytest.raises(ArgumentError):
            transaction.join(Recorder(), **options)
    for duration in (0, -2, "x", None):
        with pytest.raises(ArgumentError):
            manager.create(duration)  # type: ignore[arg-type]
    for call in (transaction.commit, transaction.abort):
        with pytest.raises(ArgumentError):
            call("x")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        transaction.when_ended(3)  # type: ignore[arg-type]
    unknown: tuple[Any, ...] = (None, 3, "unknown", [], {})
    for junk in unknown:
        with pytest.raises(UnknownTransactionError):
            manager.get(junk)
        with pytest.raises(UnknownTransactionError):
            manager.state(junk)
    assert transaction.state is TransactionState.ACTIVE
    assert Lease.ANY == -1


def test_each_participant_is_called_once_for_each_step_while_others_answer(manager: TransactionManager) -> None:
    for _ in range(20):
        participants = [Recorder() for _ in range(20)]
        transaction = joined(manager, **{str(number): each for number, each in enumerate(participants)})
        transaction.commit(timeout=PATIENCE)
        assert [each.operations for each in participants] == [["prepare", "commit"]] * 20


@table("operation", ["commit", "abort"])
def test_the_timeout_counts_from_the_decision(operation: str) -> None:
    """Whatever time the participants take for their first answer."""
    participant = Recorder()
    gate = threading.Event()
    participant.before = lambda asked: None if asked == "prepare" else gate.wait(PATIENCE)
    with TransactionManager(time_limit=3600.0) as manager:
        transaction = joined(manager, one=participant)
        ended = transaction.commit_soon(0.05) if operation == "commit" else transaction.abort_soon(0.05)
        with pytest.raises(DeadlineError, match="not confirmed within"):
            ended.result(PATIENCE)
        gate.set()


@table("timeout", [-1, -0.001, True, "x", float("nan")])
def test_a_timeout_that_is_none_ends_no_transaction(manager: TransactionManager, timeout: Any) -> None:
    transaction = joined(manager, one=Recorder())
    for call in (transaction.commit, transaction.commit_soon, transaction.abort, transaction.abort_soon):
        with pytest.raises(ArgumentError):
            call(timeout)
    assert transaction.state is TransactionState.ACTIVE


# --- participants that are there again


def test_a_participant_that_is_there_again_while_others_vote_is_told_the_outcome(manager: TransactionManager) -> None:
    gate = threading.Lock()
    one, two, again = Recorder(), Recorder(), Recorder()

    def wait(_operation: str) -> None:
        with gate:
            pass

    two.before = wait
    transaction = joined(manager, one=one, two=two)
    with gate:
        promise = transaction.commit_soon(PATIENCE)
        eventually(lambda: one.operations == ["prepare"] and two.operations == ["prepare"])
        assert manager.recover("one", again) == [transaction.id]
    promise.result(PATIENCE)
    assert (one.operations, again.operations) == (["prepare"], ["commit"])


def test_a_participant_that_was_not_asked_yet_is_asked_where_it_has_joined(manager: TransactionManager) -> None:
    """One that is there again has lost what it did."""
    one, again = Recorder(Vote.ABORTED), Recorder()
    transaction = joined(manager, one=one)
    assert manager.recover("one", again) == [transaction.id]
    with pytest.raises(CannotCommitError):
        transaction.commit(PATIENCE)
    assert (one.operations, again.operations) == (["prepare"], [])


def test_a_participant_that_was_told_of_an_abort_in_vain_is_told_again_when_it_is_there(
    manager: TransactionManager,
) -> None:
    """It has prepared, and takes only what is not among its transactions for aborted."""
    one, two, again, go_on = Recorder(), Recorder(), Recorder(), threading.Event()
    transaction = joined(manager, one=one, two=two)
    two.before = lambda _: go_on.wait(PATIENCE)
    one.failures["abort"] = ABORT_ATTEMPTS
    again.failures["abort"] = ABORT_ATTEMPTS - 1
    try:
        aborted = transaction.abort_soon(PATIENCE)
        eventually(lambda: manager.transactions()[0].waiting_for == ["two"])
        assert manager.recover("one", again) == [transaction.id]
        eventually(lambda: again.operations == ["abort"] * ABORT_ATTEMPTS)
    finally:
        go_on.set()
    aborted.result(PATIENCE)
    assert one.operations == ["abort"] * ABORT_ATTEMPTS


@table("has_confirmed", [False, True])
def test_the_place_of_a_participant_that_is_there_again_is_stored(tmp_path: Path, has_confirmed: bool) -> None:
    """The next run tells it the outcome there, also if it has confirmed before: it does not ask a second time."""
    failing, participant = Recorder(), Recorder()
    failing.failures["commit"] = 1000
    participant.failures["commit"] = 0 if has_confirmed else 1000
    with TransactionManager(tmp_path, retry=FAST) as manager:
        transaction = manager.create(60)
        transaction.join(participant, name="one", reference="before")
        transaction.join(failing, name="two", reference="there")
        transaction.commit()
        assert manager.recover("one", participant, reference="after") == [transaction.id]
        if has_confirmed:
            assert participant.operations == ["prepare", "commit"]
    with closing(Decisions(tmp_path)) as decisions:
        [(_, state, enlisted)] = decisions.load()
    assert (state, [each.reference for each in enlisted]) == (TransactionState.COMMITTED, ["after", "there"])


@table("is_aborted", [False, True])
def test_the_place_of_a_participant_that_is_there_again_before_the_decision_is_stored(
    tmp_path: Path, is_aborted: bool
) -> None:
    """The next run aborts the transaction, and tells it there."""
    one, two, go_on = Recorder(), Recorder(), threading.Event()
    two.before = lambda _: go_on.wait(PATIENCE)
    with TransactionManager(tmp_path / "manager", retry=FAST) as manager:
        transaction = manager.create(60)
        transaction.join(one, name="one", reference="before")
        transaction.join(two, name="two", reference="there")
        try:
            transaction.commit_soon().was_retrieved = True
            eventually(lambda: one.operations == ["prepare"] and two.operations == ["prepare"])
            if is_aborted:
                transaction.abort_soon().was_retrieved = True
            recovered = manager.recover_soon("one", one, "after")
            assert recovered.result(PATIENCE) == [transaction.id]
            shutil.copytree(tmp_path / "manager", tmp_path / "killed")
        finally:
            go_on.set()
    with closing(Decisions(tmp_path / "killed")) as decisions:
        [(_, state, enlisted)] = decisions.load()
    assert (state, [each.reference for each in enlisted]) == (TransactionState.ABORTED, ["after", "there"])


def test_no_participant_is_asked_to_prepare_before_the_record_of_the_vote_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one is there again meanwhile: a record behind the decision would have the next run abort it."""
    one, go_on, begun = Recorder(), threading.Event(), threading.Event()
    asked: list[str] = []
    ask = two_phases.ask
    monkeypatch.setattr(two_phases, "ask", lambda *call: (asked.append(call[1]), ask(*call))[1])
    with TransactionManager(tmp_path / "manager", retry=FAST) as manager:
        store = manager.decisions.store

        def slow(transaction_id: str, state: TransactionState, participants: Any) -> Any:
            if state is TransactionState.VOTING:
                begun.set()
                assert go_on.wait(PATIENCE)
            return store(transaction_id, state, participants)

        monkeypatch.setattr(manager.decisions, "store", slow)
        transaction = manager.create(60)
        transaction.join(one, name="one", reference="there")
        one.failures["commit"] = 1000
        try:
            join = in_background(transaction.commit)
            assert begun.wait(PATIENCE)
            assert manager.recover("one", one, reference="there") == [transaction.id]
            assert asked == []
        finally:
            go_on.set()
        join()
        shutil.copytree(tmp_path / "manager", tmp_path / "killed")
    with closing(Decisions(tmp_path / "killed")) as decisions:
        assert [state for _, state, _ in decisions.load()] == [TransactionState.COMMITTED]
    assert one.operations[:2] == ["prepare", "commit"]

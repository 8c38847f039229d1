"""Any sequence of calls to a transaction manager, beside a model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from messaging.errors import CannotAbortError, CannotCommitError, CannotJoinError, MessagingError
from messaging.remoteevent import RetryPolicy
from messaging.remoteevent.transactions import Transaction, TransactionManager, TransactionState, Vote
from messaging.testing.waiting import eventually

NAMES = ("a", "b", "c")
FAST = RetryPolicy(first_delay=0.001, max_delay=0.002)


class Ledger:
    """A participant that keeps its state over restarts of the manager."""

    def __init__(self) -> None:
        self.votes: dict[str, Vote | None] = {}
        self.outcomes: dict[str, list[str]] = {}
        self.failing = 0

    def prepare(self, transaction_id: str) -> Any:
        vote = self.votes[transaction_id]
        if vote is None:
            raise RuntimeError("prepare fails")
        self.outcomes.setdefault(transaction_id, []).append("prepare")
        return vote

    def _end(self, transaction_id: str, outcome: str) -> None:
        if self.failing:
            self.failing -= 1
            raise RuntimeError("not now")
        self.outcomes.setdefault(transaction_id, []).append(outcome)

    def commit(self, transaction_id: str) -> None:
        self._end(transaction_id, "commit")

    def abort(self, transaction_id: str) -> None:
        self._end(transaction_id, "abort")


class Model:
    """What is expected of one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self.state = TransactionState.ACTIVE
        self.joined: dict[str, tuple[int, Vote | None]] = {}
        #: seconds to wait for all participants; a closed manager tells them nothing further
        self.timeout: float | None = 20


class Machine(RuleBasedStateMachine):
    transactions = Bundle("transactions")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.ledgers = {name: Ledger() for name in NAMES}
        self.models: list[Model] = []

    @initialize(is_stored=st.booleans())
    def begin(self, is_stored: bool) -> None:
        self.path = self.folder / "t" if is_stored else None
        self.manager = TransactionManager(self.path, retry=FAST)

    @rule(target=transactions)
    def create(self) -> Model:
        model = Model(self.manager.create(60))
        self.models.append(model)
        return model

    @rule(
        model=transactions,
        name=st.sampled_from(NAMES),
        crash_count=st.sampled_from([0, 0, 0, 1]),
        vote=st.sampled_from([Vote.PREPARED, Vote.PREPARED, Vote.PREPARED, Vote.NOTCHANGED, Vote.ABORTED, None]),
    )
    def join(self, model: Model, name: str, crash_count: int, vote: Vote | None) -> None:
        before = model.joined.get(name)
        if model.state is not TransactionState.ACTIVE or (before is not None and before[0] != crash_count):
            with pytest.raises(CannotJoinError):
                model.transaction.join(self.ledgers[name], name=name, crash_count=crash_count)
            return
        model.transaction.join(self.ledgers[name], name=name, crash_count=crash_count)
        if before is None:
            model.joined[name] = (crash_count, vote)
            self.ledgers[name].votes[model.transaction.id] = vote

    @rule(model=transactions)
    def commit(self, model: Model) -> None:
        votes = {vote for _, vote in model.joined.values()}
        if model.state is TransactionState.ACTIVE:
            refuses = bool(votes & {Vote.ABORTED, None})
            model.state = TransactionState.ABORTED if refuses else TransactionState.COMMITTED
        if model.state is TransactionState.ABORTED:
            with pytest.raises(CannotCommitError):
                model.transaction.commit(model.timeout)
        else:
            model.transaction.commit(model.timeout)

    @rule(model=transactions)
    def abort(self, model: Model) -> None:
        if model.state is TransactionState.COMMITTED:
            with pytest.raises(CannotAbortError):
                model.transaction.abort(model.timeout)
            return
        model.state = TransactionState.ABORTED
        model.transaction.abort(model.timeout)

    @rule(model=transactions)
    def end_lease(self, model: Model) -> None:
        assert model.transaction.lease is not None
        try:
            model.transaction.lease.cancel()
            assert model.state is TransactionState.ACTIVE
        except MessagingError:
            assert model.state is not TransactionState.ACTIVE
            return
        model.state = TransactionState.ABORTED

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 3))
    def fail(self, name: str, count: int) -> None:
        self.settle()  # a participant is told to abort five times at most
        self.ledgers[name].failing = count

    @rule()
    def restart(self) -> None:
        for model in self.models:
            if model.state is TransactionState.ACTIVE:
                model.state = TransactionState.ABORTED
        self.settle()
        for model in self.models:
            model.timeout = None
        self.manager.close()
        self.manager = TransactionManager(self.path, retry=FAST)
        for name, ledger in self.ledgers.items():
            self.manager.recover(name, ledger)

    @invariant()
    def the_states_agree(self) -> None:
        for model in self.models:
            assert model.transaction.state is model.state

    def settle(self) -> None:
        """Wait until the ended transactions are completed."""
        active = {each.transaction.id for each in self.models if each.state is TransactionState.ACTIVE}
        eventually(
            lambda: all(
                each.id in active or each.state is TransactionState.ACTIVE for each in self.manager.transactions()
            )
        )

    def teardown(self) -> None:
        self.settle()
        self.manager.close()
        for model in self.models:
            for name, (_, vote) in model.joined.items():
                found = self.ledgers[name].outcomes.get(model.transaction.id, [])
                if model.state is TransactionState.COMMITTED:
                    assert found == (["prepare", "commit"] if vote is Vote.PREPARED else ["prepare"])
                else:
                    assert "commit" not in found
                    if "prepare" in found and vote is Vote.PREPARED:
                        assert found[-1] == "abort"
        shutil.rmtree(self.folder)


TestTransactions = Machine.TestCase
TestTransactions.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

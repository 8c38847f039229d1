"""The process of a manager is killed at each step of the two phases."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from messaging.remoteevent import RetryPolicy
from messaging.remoteevent.transactions import TransactionManager, Vote
from messaging.testing.waiting import eventually

SCRIPT = """
import json, os, signal, sys, threading
from pathlib import Path
from messaging.remoteevent.transactions import TransactionManager, TransactionState, Vote
from messaging.remoteevent.transactions.two_phases import Decisions

folder, step = Path(sys.argv[1]), sys.argv[2]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Participant:
    def __init__(self, name):
        self.name = name
    def _note(self, operation, transaction_id):
        if step == f"before {operation} {self.name}":
            die()
        if operation == "commit" and self.name == "two":
            assert one_committed.wait(20)
        with (folder / self.name).open("a") as file:
            file.write(json.dumps([operation, transaction_id]) + "\\n")
            file.flush()
            os.fsync(file.fileno())
        if operation == "commit" and self.name == "one":
            one_committed.set()
        if step == f"after {operation} {self.name}":
            die()
    def prepare(self, transaction_id):
        self._note("prepare", transaction_id)
        return Vote.PREPARED
    def commit(self, transaction_id):
        self._note("commit", transaction_id)
    def abort(self, transaction_id):
        self._note("abort", transaction_id)

one_committed = threading.Event()
store, forget = Decisions.store, Decisions.forget

def stored(self, transaction_id, state, participants):
    name = "decision" if state is TransactionState.COMMITTED else "voting"
    if step == f"before {name}":
        die()
    promise = store(self, transaction_id, state, participants)
    if step == f"after {name}":
        promise.listen(die)  # the thread of the journal may be the one that votes were counted on
    return promise

def forgotten(self, transaction_id):
    if step == "before forget":
        die()
    forget(self, transaction_id)

Decisions.store, Decisions.forget = stored, forgotten
manager = TransactionManager(folder / "manager")
transaction = manager.create()
(folder / "id").write_text(transaction.id)
for name in ("one", "two"):
    transaction.join(Participant(name), name=name)
if step == "active":
    die()
transaction.commit(20)
if step == "end":
    manager.close()
    die()
"""

ABORTED = [
    "active", "before voting", "after voting", "before prepare one", "after prepare one", "before prepare two",
    "after prepare two", "before decision",
]  # fmt: skip
COMMITTED = [
    "after decision", "before commit one", "after commit one", "before commit two", "after commit two",
    "before forget", "end",
]  # fmt: skip


class Participant:
    """A participant of the next run: it goes on with what it has noted."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        self.calls: list[Any] = [operation for operation, _ in map(json.loads, lines)]

    def prepare(self, _id: str) -> Vote:
        self.calls.append("prepare")
        return Vote.PREPARED

    def commit(self, _id: str) -> None:
        self.calls.append("commit")

    def abort(self, _id: str) -> None:
        self.calls.append("abort")

    @property
    def is_in_doubt(self) -> bool:
        return "prepare" in self.calls and not {"commit", "abort"} & set(self.calls)


#: a step on each side of the record of the votes, of the decision, and of the first call that follows it
QUICK = {"after voting", "before decision", "after decision", "after commit one"}


@pytest.mark.parametrize(
    "step",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in (*ABORTED, *COMMITTED)],
)
def test_all_participants_agree_after_a_kill(step: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), step], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    transaction_id = (tmp_path / "id").read_text()
    participants = {name: Participant(tmp_path / name) for name in ("one", "two")}
    with TransactionManager(tmp_path / "manager", retry=RetryPolicy(first_delay=0.01)) as manager:
        for name, each in participants.items():
            pending = manager.recover(name, each)
            assert pending in ([], [transaction_id])
            if not pending and each.is_in_doubt:
                each.abort(transaction_id)  # what the manager does not know was aborted
        eventually(lambda: not manager.transactions())
    wanted, other = ("commit", "abort") if step in COMMITTED else ("abort", "commit")
    for each in participants.values():
        assert other not in each.calls
        assert not each.is_in_doubt
        if step in COMMITTED:
            assert each.calls[0] == "prepare"
            assert wanted in each.calls
    with TransactionManager(tmp_path / "manager") as manager:
        assert manager.transactions() == []

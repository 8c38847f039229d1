"""Participants of transactions for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from messaging.leases import Lease
from messaging.remoteevent.transactions import Vote


class Recorder:
    """A participant that notes its calls, and answers as it is told."""

    def __init__(self, vote: Any = Vote.PREPARED) -> None:
        self.vote = vote
        self.calls: list[tuple[str, str]] = []
        self.failures: dict[str, int] = {}
        self.before: Callable[[str], object] = lambda _operation: None
        self.lock = threading.Lock()

    def _note(self, operation: str, transaction_id: str) -> None:
        with self.lock:
            self.calls.append((operation, transaction_id))
        self.before(operation)
        with self.lock:
            left = self.failures.get(operation, 0)
            self.failures[operation] = left - 1
        if left > 0:
            raise RuntimeError(f"{operation} fails")

    def prepare(self, transaction_id: str) -> Any:
        self._note("prepare", transaction_id)
        return self.vote

    def commit(self, transaction_id: str) -> None:
        self._note("commit", transaction_id)

    def abort(self, transaction_id: str) -> None:
        self._note("abort", transaction_id)

    @property
    def operations(self) -> list[str]:
        return [operation for operation, _ in self.calls]


def joined(manager: Any, *, duration: float = Lease.ANY, **participants: Any) -> Any:
    """Return a new transaction with these participants."""
    transaction = manager.create(duration)
    for name, each in participants.items():
        transaction.join(each, name=name)
    return transaction

"""The state of transactions on the disk: what a manager must know after its process was killed.

========================  ==========================================================================================
record                    meaning after a restart
========================  ==========================================================================================
none                      aborted, or committed and confirmed by all participants
``voting``                no decision was taken: participants that may have prepared are told to abort
``committed``             participants are told to commit: all that have voted ``PREPARED``
========================  ==========================================================================================

The record ``voting`` is stored before the first participant is asked to prepare, and ``committed`` before the first
one is told to commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from messaging.errors import DecodeError
from messaging.execution import Promise
from messaging.journal import JournalTable
from messaging.remoteevent.transactions.participant import Enlisted, TransactionState, Vote

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_VOTING: Final = "voting"
_COMMITTED: Final = "committed"
_STORE: Final = "store the state of a transaction"


class Decisions:
    """The records of one manager. Thread safe. No method waits.

    Args:
        path: folder of the records; ``None``: nothing is stored.

    Raises:
        JournalError: the folder cannot be used.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._table = None if path is None else JournalTable(path)

    def store(self, transaction_id: str, state: TransactionState, participants: Sequence[Enlisted]) -> Promise[Any]:
        """Store the record of a transaction; return the promise that it is on the disk.

        Raises:
            JournalError, ClosedError: it is not stored.
        """
        if self._table is None:
            return Promise.resolved(None, _STORE)
        is_committed = state is TransactionState.COMMITTED
        lasting = [
            each.to_value()
            for each in participants
            if each.is_lasting and not (is_committed and each.vote is Vote.NOTCHANGED)
        ]
        if lasting:
            value = {"state": _COMMITTED if is_committed else _VOTING, "participants": lasting}
            return self._table.put_soon(transaction_id, value)
        # the record "voting" would have the next run abort it
        removed = self._table.remove_soon(transaction_id)
        return Promise.resolved(None, _STORE) if removed is None else removed

    def forget(self, transaction_id: str) -> Promise[Any] | None:
        """Remove the record of a transaction that all participants have confirmed.

        While the record is on the disk, the next run tells the participants once more.

        Returns:
            The promise that it is removed; ``None`` if there is none.

        Raises:
            JournalError, ClosedError: as :meth:`store`.
        """
        return None if self._table is None else self._table.remove_soon(transaction_id)

    def load(self) -> list[tuple[str, TransactionState, list[Enlisted]]]:
        """Return the transactions of earlier runs: committed or aborted.

        Raises:
            DecodeError: a record is malformed.
        """
        if self._table is None:
            return []
        found = []
        for transaction_id, value in self._table.items():
            try:
                participants = [Enlisted.from_value(each) for each in value["participants"]]
                state = TransactionState.COMMITTED if value["state"] == _COMMITTED else TransactionState.ABORTED
            except (KeyError, TypeError, ValueError) as error:
                raise DecodeError(f"transaction {transaction_id}: malformed record ({type(error).__name__})") from None
            found.append((transaction_id, state, participants))
        return found

    def close(self) -> None:
        """Close the records. Idempotent. Raises ``JournalError``."""
        if self._table is not None:
            self._table.close()

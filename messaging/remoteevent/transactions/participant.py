"""Participants of transactions: what the manager asks them, and what they answer."""

from __future__ import annotations

import enum
from typing import Any, Protocol, runtime_checkable


class TransactionState(enum.IntEnum):
    """State of a transaction, with the numbers of Jini's ``TransactionConstants``."""

    #: participants may join
    ACTIVE = 1
    #: participants are asked to prepare
    VOTING = 2
    #: all have prepared; the decision to commit is being stored
    PREPARED = 3
    #: committed: participants are told until each has confirmed
    COMMITTED = 5
    #: aborted
    ABORTED = 6


class Vote(enum.Enum):
    """Answer of a participant that was asked to prepare."""

    #: it can commit and abort from now on, also after a restart if it is persistent
    PREPARED = "prepared"
    #: it has nothing to commit, and is told no more about the transaction
    NOTCHANGED = "not changed"
    #: it cannot commit, has undone what it did, and is told no more about the transaction
    ABORTED = "aborted"


@runtime_checkable
class TransactionParticipant(Protocol):
    """Does something within transactions.

    The manager calls it on worker threads: one call at a time for each transaction, several side by side for several
    transactions. Each method may return a promise of its result. A call whose outcome is not known is made again, so
    ``commit`` and ``abort`` must be idempotent.
    """

    def prepare(self, transaction_id: str, /) -> Any:
        """Make sure that :meth:`commit` cannot fail for good, and return a :class:`Vote`.

        An exception counts as ``Vote.ABORTED``, and so does an answer that comes too late; :meth:`abort` follows then.
        """

    def commit(self, transaction_id: str, /) -> Any:
        """Make the prepared changes permanent.

        Raises:
            UnknownTransactionError: it was committed already; counts as success.
            Exception: any other one: the manager calls again, until the call succeeds or the manager is closed.
        """

    def abort(self, transaction_id: str, /) -> Any:
        """Undo the changes of the transaction.

        Raises:
            UnknownTransactionError: it was undone already; counts as success.
            Exception: any other one: the manager calls again a few times.
        """

"""Participants of transactions: what the manager asks them, and what they answer.

**Threads.** The lock of the transaction guards the attributes of an :class:`Enlisted`. :func:`ask` calls a participant
on a worker thread.
"""

from __future__ import annotations

import enum
import math
from typing import Any, Final, Protocol, runtime_checkable

from messaging.errors import MessagingError
from messaging.errors.checks import check_result
from messaging.execution import Promise, clock, workers
from messaging.remoteevent.delivery import RetryPolicy
from messaging.remoteevent.listener import as_failure

#: how often a participant is told that a transaction was aborted
ABORT_ATTEMPTS: Final = 5
#: how long a manager that was restarted tells a participant without a name of a commit, seconds
UNNAMED_TIME: Final = 86_400.0


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
    #: it has nothing to commit; the manager does not call it again
    NOTCHANGED = "not changed"
    #: it cannot commit, has undone its work; the manager does not call it again
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


class Enlisted:
    """A participant of a transaction.

    Attributes:
        name: by which the participant is found again after a restart.
        crash_count: a number that changes when the participant has lost its state.
        reference: channel of a participant in another process; ``None`` for one of this process.
        participant: ``None`` after a restart, until the participant is there again.
        vote: its answer to ``prepare``; ``None`` before.
        is_lasting: it may be there again after a restart, so it is stored.
        is_busy: a call to it has not returned.
        is_done: the manager does not call it again.
        is_abandoned: that is so because it was told in vain, often or long enough.
        was_told: a call with the outcome of the transaction has returned, or failed.
        failures: failed calls since the last one that succeeded.
        retry_at: monotonic time of the next attempt; ``None``: it can be called now. A timer sets it to ``None``:
            timers may fire early, so the clock is not asked whether the time has come.
        told_until: monotonic time after which a failed attempt is the last one.
    """

    __slots__ = (
        "crash_count", "failures", "is_abandoned", "is_busy", "is_done", "is_lasting", "name", "participant",
        "reference", "retry_at", "told_until", "vote", "was_told",
    )  # fmt: skip

    def __init__(
        self, name: str, crash_count: int, participant: Any, reference: str | None, *, is_lasting: bool = True
    ) -> None:
        self.is_lasting = is_lasting
        self.name = name
        self.crash_count = crash_count
        self.participant = participant
        self.reference = reference
        self.vote: Vote | None = None
        self.is_busy = False
        self.is_done = False
        self.is_abandoned = False
        self.was_told = False
        self.failures = 0
        self.retry_at: float | None = None
        self.told_until = math.inf

    def next_operation(self, state: TransactionState) -> str | None:
        """Return the call to make next; ``None`` if there is none, or its time has not come."""
        if self.is_busy or self.is_done or self.participant is None or self.retry_at is not None:
            return None
        if state is TransactionState.VOTING:
            return "prepare" if self.vote is None else None
        if state is TransactionState.COMMITTED:
            return "commit"
        return "abort" if state is TransactionState.ABORTED else None

    def note_vote(self, vote: object, error: MessagingError | None) -> None:
        """Note the answer to ``prepare``: an error, or any other value than a vote, counts as ``Vote.ABORTED``."""
        if error is None and isinstance(vote, Vote):
            self.vote = vote
            # skip participants that voted NOTCHANGED, or have aborted
            self.is_done = vote is not Vote.PREPARED
        else:
            self.vote = Vote.ABORTED

    def note_failure(self, policy: RetryPolicy) -> float:
        """Note that a call failed, and return after how many seconds it is to be made again."""
        self.failures += 1
        delay = policy.delay_after(self.failures)
        self.retry_at = clock.monotonic() + delay
        return delay

    @property
    def is_unnamed(self) -> bool:
        """Return whether it joined without a name over the network: nothing finds it again but its reference."""
        return self.reference is not None and self.name.endswith(unnamed("", self.reference))

    def move(self, participant: Any, reference: str | None) -> None:
        """Note that it is there again, and has to be told the outcome there unless it has confirmed."""
        self.participant = participant
        self.reference = reference
        self.retry_at = None
        self.failures = 0
        if self.is_abandoned:
            self.is_done = self.is_abandoned = False

    def limit_attempts(self) -> None:
        """End the attempts to tell it the outcome after some time if it has no name: it may have ended for good."""
        if self.is_unnamed:
            self.told_until = clock.monotonic() + UNNAMED_TIME

    def to_value(self) -> list[Any]:
        """Return the participant in portable form, for :meth:`from_value`."""
        return [self.name, self.crash_count, self.reference]

    @classmethod
    def from_value(cls, value: Any) -> Enlisted:
        """Return the participant of a portable form. Raises ``ValueError``, ``TypeError``."""
        name, crash_count, reference = value
        return cls(str(name), int(crash_count), None, None if reference is None else str(reference))


def unnamed(kind: str, reference: str) -> str:
    """Return the name under which a participant without one joins: no other participant of any process has it.

    Args:
        kind: name of its class.
        reference: its channel.
    """
    return f"{kind} at {reference[-900:]}"


def ask(participant: Any, operation: str, transaction_id: str) -> Promise[Any]:
    """Call a method of a participant on a worker thread; return the promise of its result.

    The promise has no deadline: a call that does not return must not be repeated beside itself.
    """
    promise: Promise[Any] = Promise(lambda: f"{operation} of transaction {transaction_id}")
    promise.was_retrieved = True

    def run() -> None:
        try:
            found = check_result(getattr(participant, operation)(transaction_id), f"{operation} of a participant")
        except Exception as error:  # noqa: BLE001  # of the participant
            promise.reject(as_failure(error))
            return
        if isinstance(found, Promise):
            found.listen(lambda: _hand_on(found, promise))
        else:
            promise.resolve(found)

    try:
        workers().submit(run)
    except RuntimeError as error:  # no thread can be started
        promise.reject(as_failure(error))
    return promise


def _hand_on(found: Promise[Any], promise: Promise[Any]) -> None:
    error = found.exception(0)
    if error is None:
        promise.resolve(found.result(0))
    else:
        promise.reject(error)

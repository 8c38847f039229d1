"""The two phases of a transaction, and its state on the disk.

**Commit.** The participants are asked to prepare, side by side. One that votes ``ABORTED``, fails, or does not answer
within the time limit aborts the transaction. When all have prepared, the decision is stored; only then the
participants are told to commit, until each has confirmed.

========================  ==========================================================================================
record                    meaning after a restart of the manager
========================  ==========================================================================================
none                      aborted, or committed and confirmed by all participants
``voting``                no decision was taken: participants that may have prepared are told to abort
``committed``             participants are told to commit: all that have voted ``PREPARED``
========================  ==========================================================================================

The record ``voting`` is stored before the first participant is asked to prepare, and ``committed`` before the first
one is told to commit.

**Threads.** Any thread may call the methods. The lock guards the state and the participants. Participants are called
on worker threads, without the lock. Answers may arrive on the loop of the engine, which does no more than to take the
next step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from messaging.errors import (
    BoundReachedError,
    CannotJoinError,
    DecodeError,
    MessagingError,
    OutcomeUnknownError,
    UnknownTransactionError,
)
from messaging.errors.checks import plain_function
from messaging.errors.text import SafeLog
from messaging.execution import Promise, Serial, clock, engine, workers
from messaging.journal import JournalTable
from messaging.leases import Lease, LeaseEnd
from messaging.remoteevent.delivery import RetryPolicy
from messaging.remoteevent.transactions.participant import ABORT_ATTEMPTS, Enlisted, TransactionState, Vote, ask

logger = SafeLog(__name__)


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
            value = {"state": "committed" if is_committed else "voting", "participants": lasting}
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
                state = TransactionState.COMMITTED if value["state"] == "committed" else TransactionState.ABORTED
            except (KeyError, TypeError, ValueError) as error:
                raise DecodeError(f"transaction {transaction_id}: malformed record ({type(error).__name__})") from None
            found.append((transaction_id, state, participants))
        return found

    def close(self) -> None:
        """Close the records. Idempotent. Raises ``JournalError``."""
        if self._table is not None:
            self._table.close()


#: participants of one transaction
MAX_PARTICIPANTS: Final = 1000
_ACTIVE, _VOTING = TransactionState.ACTIVE, TransactionState.VOTING
_COMMITTED, _ABORTED = TransactionState.COMMITTED, TransactionState.ABORTED


class Keeper(Protocol):
    """The manager, as its transactions see it."""

    name: str
    time_limit: float
    retry: RetryPolicy
    decisions: Decisions
    is_closed: bool

    def watch(self, phases: TwoPhases) -> None:
        """Call ``phases.expire`` after the time limit, instead of an earlier time."""

    def forget(self, transaction_id: str, state: TransactionState) -> None:
        """Note that all participants of a transaction know its outcome."""

    def remove(self, transaction_id: str) -> Promise[Any] | None:
        """Remove the record of such a transaction; return the promise that it is removed, ``None`` if it is."""


class EndCallbacks:
    """The callbacks for the end of one transaction. Thread safe.

    They run on a worker thread, in the order in which they were added, without a lock.

    Args:
        transaction_id: for the log.
    """

    def __init__(self, transaction_id: str) -> None:
        self._id = transaction_id
        self._waiting: deque[Callable[[TransactionState], object]] = deque()
        self._state: TransactionState | None = None
        self._caller = Serial(self._call, lambda: self._waiting and self._state is not None)

    def add(self, callback: Callable[[TransactionState], object]) -> None:
        """Call ``callback`` with the outcome when it is known, at once if it is. Raises ``ArgumentError``."""
        self._waiting.append(plain_function(callback, "a callback"))
        if self._state is not None:
            self._caller.wake()

    def run(self, state: TransactionState) -> None:
        """Call the callbacks with the outcome. Later calls do nothing."""
        if self._state is None:
            self._state = state
            if self._waiting:
                self._caller.wake()

    def _call(self) -> None:
        state = self._state
        while state is not None and self._waiting:
            callback = self._waiting.popleft()
            try:
                callback(state)
            except Exception:
                logger.exception("a callback of transaction %s failed", self._id)


class TwoPhases:
    """State and participants of one transaction, which is a subclass. Thread safe.

    Attributes:
        id: of the transaction.
        lease: of the transaction, or ``None``.
        reason: why it was aborted.
        outcome: promise that the outcome is decided, and each participant was told once. It fails with
            ``OutcomeUnknownError`` if the decision could not be stored yet.
        decided: promise that the outcome is decided. It fails as ``outcome``.
        completed: promise that all participants have confirmed.
        callbacks: run when all participants have confirmed.
    """

    def __init__(
        self, transaction_id: str, keeper: Keeper, state: TransactionState, participants: list[Enlisted]
    ) -> None:
        self.id = transaction_id
        self.lease: Lease | None = None
        self.reason = "it was aborted"
        self.outcome: Promise[None] = Promise(f"end transaction {transaction_id}")
        self.completed: Promise[None] = Promise(f"complete transaction {transaction_id}")
        self.decided: Promise[None] = Promise(f"decide transaction {transaction_id}")
        self.outcome.was_retrieved = self.completed.was_retrieved = self.decided.was_retrieved = True
        self.callbacks = EndCallbacks(transaction_id)
        self._keeper = keeper
        self._lock = threading.Lock()  # guards the following
        self._state = state
        self._participants = participants
        self._is_finished = False
        #: the state is on the disk, as far as it is kept there: participants are asked to prepare after that
        self._is_recorded = state is not _ACTIVE
        #: a participant is there again, at another place than the record says
        self._is_moved = False
        #: the promise that the places are stored where participants have moved to
        self._placed: Promise[Any] | None = None
        #: how often the decision could not be stored
        self._doubts = 0

    @property
    def state(self) -> TransactionState:
        """The state now."""
        if self._state is _ACTIVE and self.lease is not None and self.lease.is_ended:
            return _ABORTED  # its lease has ended, and the callback is about to run
        return self._state

    @property
    def waiting_for(self) -> list[str]:
        """Names of the participants that have not confirmed the outcome."""
        with self._lock:
            return [each.name for each in self._participants if not each.is_done]

    def enlist(self, enlisted: Enlisted, *, is_named: bool) -> None:
        """Let a participant take part; see ``Transaction.join``."""
        with self._lock:
            if self.state is not _ACTIVE:
                raise CannotJoinError(f"transaction {self.id} is no longer active: {self.state.name.lower()}")
            for each in self._participants:
                is_same = each.name == enlisted.name if is_named else each.participant is enlisted.participant
                if is_same and each.crash_count != enlisted.crash_count:
                    raise CannotJoinError(
                        f"transaction {self.id}: participant {each.name!r:.80} joined with crash count "
                        f"{each.crash_count}, and has {enlisted.crash_count} now: it has lost what it did"
                    )
                if is_same:
                    return
            if len(self._participants) >= MAX_PARTICIPANTS:
                raise BoundReachedError(f"transaction {self.id} has {MAX_PARTICIPANTS} participants already")
            self._participants.append(enlisted)

    def end_with_lease(self, end: LeaseEnd) -> None:
        """Abort the transaction if it is active: its lease has ended. For the landlord."""
        with self._lock:
            if self._state is not _ACTIVE or end is LeaseEnd.CLOSED:
                return
        self.begin_abort("its lease has ended")

    # --- the first phase

    def begin_commit(self) -> None:
        """Ask the participants to prepare, if the transaction is active."""
        with self._lock:
            if self._state is not _ACTIVE:
                return
            self._state = _VOTING
        keeper = self._keeper
        if not self._end_lease():
            self.begin_abort("its lease has ended")
            return
        if not self._participants:
            self._set_committed()
            return
        try:
            stored = keeper.decisions.store(self.id, _VOTING, self._participants)
        except MessagingError as error:
            self.begin_abort(f"its state cannot be stored: {error}")
            return

        def ask_all() -> None:
            stored.was_retrieved = True
            error = stored.exception(0)
            if error is not None:
                self.begin_abort(f"its state cannot be stored: {error}")
                return
            self._is_recorded = True
            keeper.watch(self)
            self.proceed()

        stored.listen(ask_all)

    def expire(self) -> None:
        """End the phase that took longer than the time limit. For the manager, on the loop of the engine.

        A participant that has not voted aborts the transaction. One that has not returned after the decision is waited
        for no longer.
        """
        if self._state in (_COMMITTED, _ABORTED):
            self.outcome.resolve(None)
            return
        with self._lock:
            late = [each.name for each in self._participants if each.vote is None]
        if late and self._state is _VOTING:
            self.begin_abort(f"{late[0]!r:.80} has not prepared within {self._keeper.time_limit:g} s")

    def _voted(self, enlisted: Enlisted, vote: Any, error: MessagingError | None) -> None:
        with self._lock:
            enlisted.is_busy = False  # together with the vote, or another thread would ask again
            enlisted.note_vote(vote, error)
            is_voting = self._state is _VOTING
            votes = [each.vote for each in self._participants]
            decides = is_voting and None not in votes and Vote.ABORTED not in votes
            if decides:
                self._state = TransactionState.PREPARED
        if not is_voting:
            self.proceed()  # too late: it is told to abort unless it has
        elif enlisted.vote is Vote.ABORTED:
            self.begin_abort(f"participant {enlisted.name!r:.80} voted to abort" + (f": {error}" if error else ""))
        elif decides:
            self._decide()

    def _decide(self) -> None:
        """Store the decision to commit, and tell it."""
        if all(each.is_done for each in self._participants):
            self._set_committed()  # none has changed anything: nothing has to survive
            return
        try:
            stored = self._keeper.decisions.store(self.id, _COMMITTED, self._participants)
        except MessagingError as error:
            self._doubt(error)
            return

        def told() -> None:
            stored.was_retrieved = True
            error = stored.exception(0)
            if error is None:
                self._set_committed()
            else:
                self._doubt(error)

        stored.listen(told)

    def _doubt(self, error: MessagingError) -> None:
        """Try again to store the decision: whether it is on the disk is unknown, so it cannot be changed any more."""
        logger.error(
            "transaction manager '%s': the decision to commit %s is not stored: %s; storing it is tried again",
            self._keeper.name, self.id, error,
        )  # fmt: skip
        unknown = OutcomeUnknownError(f"transaction {self.id}: the decision to commit is not stored: {error}")
        self.outcome.reject(unknown)
        self.decided.reject(unknown)
        self._doubts += 1
        if not self._keeper.is_closed:
            after(self._keeper.retry.delay_after(self._doubts), lambda: workers().submit(self._decide))

    # --- the second phase

    def _set_committed(self) -> None:
        with self._lock:
            self._state = _COMMITTED
            self._store_again()
        self._begin_telling()

    def begin_abort(self, reason: str) -> None:
        """Abort, unless the decision to commit is taken or it is aborted already."""
        with self._lock:
            if self._state not in (_ACTIVE, _VOTING):
                return
            self._state = _ABORTED
            self.reason = reason
        self._end_lease()
        self._begin_telling()

    def _end_lease(self) -> bool:
        """Cancel the lease; return ``False`` if it has ended before."""
        try:
            if self.lease is not None:
                self.lease.cancel()
        except MessagingError:
            return False
        return True

    def _begin_telling(self) -> None:
        self.proceed()
        if not self.outcome.done():
            self._keeper.watch(self)

    def proceed(self) -> None:
        """Make the calls that can be made now. On any thread."""
        with self._lock:
            calls = []
            is_waiting = self._keeper.is_closed or (self._state is _VOTING and not self._is_recorded)
            for each in self._participants:
                operation = None if is_waiting else each.next_operation(self._state)
                if operation is not None:
                    each.is_busy = True
                    calls.append((each, operation))
            is_decided = self._state in (_COMMITTED, _ABORTED)
            was_told = all(each.is_done or each.was_told or each.participant is None for each in self._participants)
            is_finished = is_decided and all(each.is_done for each in self._participants) and not self._is_finished
            if is_finished:
                self._is_finished = True
        if is_decided:
            self.decided.resolve(None)
        if is_finished:
            self._finish()
        elif is_decided and was_told:
            self.outcome.resolve(None)
        for each, operation in calls:
            self._call(each, operation)

    def _call(self, enlisted: Enlisted, operation: str) -> None:
        answer = ask(enlisted.participant, operation, self.id)

        def answered() -> None:
            error = answer.exception(0)
            if operation == "prepare":
                self._voted(enlisted, None if error is not None else answer.result(0), error)
            else:
                self._told(enlisted, operation, error)

        answer.listen(answered)

    def _told(self, enlisted: Enlisted, operation: str, error: MessagingError | None) -> None:
        delay: float | None = None
        at: float | None = None

        def retry() -> None:
            with self._lock:
                if enlisted.retry_at == at:  # it has not moved meanwhile
                    enlisted.retry_at = None
            self.proceed()

        with self._lock:
            enlisted.is_busy = False  # together with the outcome, or another thread would call again
            enlisted.was_told = True
            if error is None or isinstance(error, UnknownTransactionError):
                enlisted.is_done = True
            else:
                delay, at = enlisted.note_failure(self._keeper.retry), enlisted.retry_at
                is_over = clock.monotonic() >= enlisted.told_until
                if is_over or (operation == "abort" and enlisted.failures >= ABORT_ATTEMPTS):
                    enlisted.is_done = enlisted.is_abandoned = True
                    delay = None
        if error is not None and not isinstance(error, UnknownTransactionError):
            logger.warning(
                "transaction manager '%s': %s of %s at participant '%s' failed: %s; %s",
                self._keeper.name, operation, self.id, enlisted.name, error,
                "given up" if delay is None else f"retrying in {delay:.1f} s",
            )  # fmt: skip
        if delay is not None and not self._keeper.is_closed:
            after(delay, retry)
        self.proceed()

    def _finish(self) -> None:
        """Forget the transaction: all participants know its outcome."""
        self._keeper.forget(self.id, self._state)
        self.callbacks.run(self._state)
        self.outcome.resolve(None)
        self.completed.resolve(None)

    # --- recovery

    def recover(self, name: str, participant: Any, reference: str | None) -> tuple[bool, Promise[Any] | None]:
        """Tell the outcome to a participant that is there again.

        Also one that has confirmed: until the record of the transaction is removed, the next run would tell it again.

        Returns:
            Whether it takes part, and the promise that the next run does not tell it where it was before; ``None`` if
            nothing has to be stored for that.
        """
        with self._lock:
            found = [each for each in self._participants if each.name == name]
            is_finished = self._is_finished
            for each in found if not is_finished else ():
                if not self._is_to_be_asked(each):
                    self._is_moved = self._is_moved or each.reference != reference
                    each.move(participant, reference)
            if found and not is_finished and self._is_recorded and self._state is not TransactionState.PREPARED:
                self._store_again()  # those of a prepared one are stored after the decision
            placed = self._placed if found else None
        if is_finished:
            # after an abort, the next run tells the participants a few times only
            return False, self._keeper.remove(self.id) if found and self._state is _COMMITTED else None
        self.proceed()
        return bool(found), placed

    def _is_to_be_asked(self, enlisted: Enlisted) -> bool:
        """Return whether a participant was not asked to prepare yet: it is asked where it has joined. With the lock.

        One that is there again has lost what it did, so asking it must fail.
        """
        is_asked = enlisted.is_busy or enlisted.vote is not None
        return self._state is _ACTIVE or (self._state is _VOTING and not is_asked)

    def _store_again(self) -> None:
        """Store where the participants are now, if they have moved since the state was stored. With the lock.

        Otherwise the next run would tell them the outcome where they were, and they would not ask again.
        """
        if self._is_moved:
            self._is_moved = False
            self._placed = placed = self._store_places()

            def settled() -> None:
                error = placed.exception(0)
                if error is not None:
                    self._is_moved = True  # without the lock: this thread may have it, or that of the table
                    logger.warning(
                        "transaction manager '%s': the new places of the participants of %s are not stored: %s",
                        self._keeper.name, self.id, error,
                    )  # fmt: skip

            placed.listen(settled)

    def _store_places(self) -> Promise[Any]:
        try:
            state = _COMMITTED if self._state is _COMMITTED else _VOTING  # the next run aborts what is not committed
            return self._keeper.decisions.store(self.id, state, self._participants)
        except MessagingError as error:
            failed: Promise[Any] = Promise("store the places of participants")
            failed.reject(error)
            return failed


def after(delay: float, run: Callable[[], object]) -> None:
    """Call ``run`` on the loop of the engine after ``delay`` seconds. It must be quick."""
    running = engine()
    running.call(lambda: clock.call_later(running.loop, delay, run))

"""One transaction: its state, and its two phases.

**Commit.** The participants are asked to prepare, side by side. One that votes ``ABORTED``, fails, or does not answer
within the time limit aborts the transaction. When all have prepared, the decision is stored; only then the
participants are told to commit, until each has confirmed.

**Threads.** Any thread may use a transaction. Its lock guards the state and the participants. Participants and
callbacks run on worker threads, without the lock. Answers may arrive on the loop of the engine, which does no more than
to take the next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.calls import result_of
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    CannotAbortError,
    CannotCommitError,
    CannotJoinError,
    DeadlineError,
    MessagingError,
    OutcomeUnknownError,
    UnknownTransactionError,
)
from messaging.execution import Promise, engine, seconds, workers
from messaging.remoteevent.transactions.enlisted import ABORT_ATTEMPTS, Enlisted, ask
from messaging.remoteevent.transactions.participant import TransactionState, Vote
from messaging.text import SafeLog, tolerant

if TYPE_CHECKING:
    from messaging.leases import Lease
    from messaging.remoteevent.delivery import RetryPolicy
    from messaging.remoteevent.transactions.decisions import Decisions

logger = SafeLog(__name__)

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

    def forget(self, transaction: Transaction) -> None:
        """Note that all participants of a transaction know its outcome."""


class Transaction:
    """A transaction of a manager in this process. Thread safe. Managers make it.

    Attributes:
        id: of the transaction, unique among all managers.
        lease: of the transaction: when it ends before :meth:`commit`, the transaction is aborted. ``None`` for a
            transaction of an earlier run, whose outcome is decided.
    """

    def __init__(
        self,
        transaction_id: str,
        keeper: Keeper,
        state: TransactionState = _ACTIVE,
        participants: list[Enlisted] | None = None,
    ) -> None:
        self.id = transaction_id
        self.lease: Lease | None = None
        self._keeper = keeper
        self._lock = threading.Lock()  # guards the following
        self._state = state
        self._participants = participants or []
        #: why it was aborted
        self._reason = "it was aborted"
        #: resolves when the outcome is decided, and each participant was told once
        self._outcome: Promise[None] = self._promise("end")
        #: resolves when all participants have confirmed
        self._completed: Promise[None] = self._promise("complete")
        self._callbacks: list[Callable[[TransactionState], object]] = []
        self._is_finished = False
        #: how often the decision could not be stored
        self._doubts = 0

    def _promise(self, what: str) -> Promise[None]:
        promise: Promise[None] = Promise(f"{what} transaction {self.id}")
        promise.looked_at = True
        return promise

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

    # --- joining

    def join(
        self, participant: Any, *, name: str | None = None, crash_count: int = 0, reference: str | None = None
    ) -> None:
        """Let a participant take part. Joining again with the same name and crash count changes nothing.

        Args:
            participant: see :class:`~messaging.remoteevent.transactions.TransactionParticipant`.
            name: unique among the participants of the manager; by it the participant is found again after a restart.
                ``None``: a generated one, for a participant that does not outlive the process.
            crash_count: a number that changes when the participant has lost its state.
            reference: channel of a participant in another process, which is called again after a restart.

        Raises:
            ArgumentError: an argument is not as described.
            CannotJoinError: the transaction is no longer active, or the participant joined with another crash count.
            BoundReachedError: the transaction has 1000 participants.
        """
        found, count = check_join(participant, name, crash_count)
        with self._lock:
            if self.state is not _ACTIVE:
                raise CannotJoinError(f"transaction {self.id} is no longer active: {self.state.name.lower()}")
            for each in self._participants:
                if (each.participant is participant) if name is None else (each.name == name):
                    if each.crash_count != count:
                        raise CannotJoinError(
                            f"transaction {self.id}: participant {each.name!r:.80} joined with crash count "
                            f"{each.crash_count}, and has {count} now: it has lost what it did"
                        )
                    return
            if len(self._participants) >= MAX_PARTICIPANTS:
                raise BoundReachedError(f"transaction {self.id} has {MAX_PARTICIPANTS} participants already")
            is_lasting = name is not None or reference is not None
            self._participants.append(Enlisted(found, count, participant, reference, is_lasting=is_lasting))

    def when_ended(self, callback: Callable[[TransactionState], object]) -> None:
        """Call ``callback`` with ``COMMITTED`` or ``ABORTED`` after all participants have confirmed; at once if so.

        Callbacks run on a worker thread, in the order in which they were added, once each. Their exceptions are
        logged. Of a transaction that is not completed when its manager is closed they are not called.
        """
        if not callable(callback):
            raise ArgumentError(f"a callback must be callable, not {type(callback).__name__}")
        with self._lock:
            if not self._is_finished:
                self._callbacks.append(callback)
                return
        workers().submit(lambda: self._call_back([callback]))

    # --- ending

    def commit(self, timeout: float | None = None) -> None:
        """Commit the transaction: ask all participants to prepare, store the decision, tell it to them.

        Committing a committed transaction again changes nothing.

        Args:
            timeout: seconds to wait after the decision until all participants have confirmed. ``None``: until each was
                told once; one that failed is told again in the background.

        Raises:
            CannotCommitError: the transaction is aborted: a participant or the lease did not let it commit.
            DeadlineError: committed, but not confirmed by all participants within ``timeout``; the manager goes on.
            OutcomeUnknownError: the decision could not be stored; the manager tries again until it is closed.
            ArgumentError: ``timeout`` is no number.
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`commit_soon`.
        """
        result_of(self.commit_soon(timeout), "`await` commit_soon()")

    def commit_soon(self, timeout: float | None = None) -> Promise[None]:
        """Commit the transaction; return the promise that :meth:`commit` has returned. It fails as that raises."""
        limit = None if timeout is None else seconds(timeout)
        with self._lock:
            begins = self._state is _ACTIVE
            if begins:
                self._state = _VOTING
        if begins:
            self._begin_commit()
        return self._awaited(limit, _COMMITTED)

    def abort(self, timeout: float | None = None) -> None:
        """Abort the transaction, and tell its participants. Aborting an aborted one changes nothing.

        Args:
            timeout: seconds to wait until all participants have confirmed; otherwise as :meth:`commit`.

        Raises:
            CannotAbortError: the transaction is committed.
            DeadlineError: aborted, but not confirmed by all participants within ``timeout``.
            OutcomeUnknownError: all have prepared, and the decision to commit could not be stored yet.
            ArgumentError, WouldBlockError: as :meth:`commit`.
        """
        result_of(self.abort_soon(timeout), "`await` abort_soon()")

    def abort_soon(self, timeout: float | None = None) -> Promise[None]:
        """Abort the transaction; return the promise that :meth:`abort` has returned. It fails as that raises."""
        limit = None if timeout is None else seconds(timeout)
        self._abort("it was aborted by a client")
        return self._awaited(limit, _ABORTED)

    def end_with_lease(self) -> None:
        """Abort the transaction if it is active: its lease has ended. For the manager."""
        with self._lock:
            if self._state is not _ACTIVE:
                return
        self._abort("its lease has ended")

    def _awaited(self, limit: float | None, wanted: TransactionState) -> Promise[None]:
        """Return a promise of the outcome, for one caller."""
        promise: Promise[None] = Promise(f"{'commit' if wanted is _COMMITTED else 'abort'} transaction {self.id}")

        def completed() -> None:
            promise.resolve(None)

        def expired() -> None:
            names = ", ".join(self.waiting_for[:10])
            promise.reject(
                DeadlineError(
                    f"transaction {self.id} is {wanted.name.lower()}, and not confirmed within {limit:g} s by {names}"
                )
            )

        def decided() -> None:
            error = self._outcome.exception(0) if self._state is not wanted else None
            if self._state not in (wanted, _COMMITTED, _ABORTED):
                promise.reject(error or OutcomeUnknownError(f"transaction {self.id}: the outcome is not known"))
            elif self._state is not wanted:
                promise.reject(self._refusal(wanted))
            elif limit is None:
                promise.resolve(None)
            else:
                self._completed.listen(completed)
                if not promise.done():
                    after(limit, expired)

        self._outcome.listen(decided)
        return promise

    def _refusal(self, wanted: TransactionState) -> MessagingError:
        if wanted is _COMMITTED:
            return CannotCommitError(f"transaction {self.id} is aborted: {self._reason}")
        return CannotAbortError(f"transaction {self.id} is committed")

    # --- the first phase

    def _begin_commit(self) -> None:
        keeper = self._keeper
        if not self._end_lease():
            self._abort("its lease has ended")
            return
        if not self._participants:
            self._set_committed()
            return
        try:
            stored = keeper.decisions.store(self.id, _VOTING, self._participants)
        except MessagingError as error:
            self._abort(f"its state cannot be stored: {error}")
            return

        def ask_all() -> None:
            stored.looked_at = True
            error = stored.exception(0)
            if error is not None:
                self._abort(f"its state cannot be stored: {error}")
                return
            after(keeper.time_limit, self._end_voting)
            self.proceed()

        stored.listen(ask_all)

    def _end_voting(self) -> None:
        """Abort the transaction if a participant has not voted in time. On the loop of the engine."""
        with self._lock:
            late = [each.name for each in self._participants if each.vote is None]
        if late and self._state is _VOTING:
            self._abort(f"{late[0]!r:.80} has not prepared within {self._keeper.time_limit:g} s")

    def _voted(self, enlisted: Enlisted, vote: Any, error: MessagingError | None) -> None:
        with self._lock:
            enlisted.note_vote(vote, error)
            is_voting = self._state is _VOTING
            votes = [each.vote for each in self._participants]
            if is_voting and None not in votes and Vote.ABORTED not in votes:
                self._state = TransactionState.PREPARED
        if not is_voting:
            self.proceed()  # too late: it is told to abort unless it has
        elif enlisted.vote is Vote.ABORTED:
            self._abort(f"participant {enlisted.name!r:.80} voted to abort" + (f": {error}" if error else ""))
        elif self._state is TransactionState.PREPARED:
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
            stored.looked_at = True
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
        self._outcome.reject(
            OutcomeUnknownError(f"transaction {self.id}: the decision to commit is not stored: {error}")
        )
        self._doubts += 1
        if not self._keeper.is_closed:
            after(self._keeper.retry.delay_after(self._doubts), lambda: workers().submit(self._decide))

    # --- the second phase

    def _set_committed(self) -> None:
        with self._lock:
            self._state = _COMMITTED
        self._begin_telling()

    def _abort(self, reason: str) -> None:
        """Abort, unless the decision to commit is taken or it is aborted already."""
        with self._lock:
            if self._state not in (_ACTIVE, _VOTING):
                return
            self._state = _ABORTED
            self._reason = reason
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
        if not self._outcome.done():
            after(self._keeper.time_limit, lambda: self._outcome.resolve(None))

    def proceed(self) -> None:
        """Make the calls that can be made now. On any thread."""
        with self._lock:
            calls = []
            for each in self._participants:
                operation = None if self._keeper.is_closed else each.next_operation(self._state)
                if operation is not None:
                    each.is_busy = True
                    calls.append((each, operation))
            is_decided = self._state in (_COMMITTED, _ABORTED)
            was_told = all(each.is_done or each.was_told or each.participant is None for each in self._participants)
            is_finished = is_decided and all(each.is_done for each in self._participants) and not self._is_finished
            if is_finished:
                self._is_finished = True
        if is_finished:
            self._finish()
        elif is_decided and was_told:
            self._outcome.resolve(None)
        for each, operation in calls:
            self._call(each, operation)

    def _call(self, enlisted: Enlisted, operation: str) -> None:
        answer = ask(enlisted.participant, operation, self.id)

        def answered() -> None:
            error = answer.exception(0)
            with self._lock:
                enlisted.is_busy = False
            if operation == "prepare":
                self._voted(enlisted, None if error is not None else answer.result(0), error)
            else:
                self._told(enlisted, operation, error)

        answer.listen(answered)

    def _told(self, enlisted: Enlisted, operation: str, error: MessagingError | None) -> None:
        delay: float | None = None
        with self._lock:
            enlisted.was_told = True
            if error is None or isinstance(error, UnknownTransactionError):
                enlisted.is_done = True
            else:
                enlisted.note_failure(self._keeper.retry)
                if operation == "abort" and enlisted.failures >= ABORT_ATTEMPTS:
                    enlisted.is_done = True
                else:
                    delay = max(0.0, enlisted.retry_at - time.monotonic())
        if error is not None and not isinstance(error, UnknownTransactionError):
            logger.warning(
                "transaction manager '%s': %s of %s at participant '%s' failed: %s; %s",
                self._keeper.name, operation, self.id, enlisted.name, error,
                "it is told no more" if delay is None else f"it is told again in {delay:.1f} s",
            )  # fmt: skip
        if delay is not None and not self._keeper.is_closed:
            after(delay, self.proceed)
        self.proceed()

    def _finish(self) -> None:
        """Forget the transaction: all participants know its outcome."""
        self._keeper.forget(self)
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        if callbacks:
            workers().submit(lambda: self._call_back(callbacks))
        self._outcome.resolve(None)
        self._completed.resolve(None)

    def _call_back(self, callbacks: list[Callable[[TransactionState], object]]) -> None:
        for each in callbacks:
            try:
                each(self._state)
            except Exception:
                logger.exception("transaction manager '%s': a callback of %s failed", self._keeper.name, self.id)

    # --- recovery, for the manager

    def recover(self, name: str, participant: Any, reference: str | None) -> bool:
        """Tell the outcome to a participant that is there again; return whether it takes part."""
        with self._lock:
            found = [each for each in self._participants if each.name == name and not each.is_done]
            for each in found:
                if self._state in (_COMMITTED, _ABORTED):
                    each.participant = participant
                    each.reference = reference
                    each.retry_at = 0.0
        self.proceed()
        return bool(found)

    @tolerant
    def __repr__(self) -> str:
        return f"<Transaction {self.id}: {self.state.name}>"


def after(delay: float, run: Callable[[], object]) -> None:
    """Call ``run`` on the loop of the engine after ``delay`` seconds. It must be quick."""
    running = engine()
    running.call(lambda: running.loop.call_later(delay, run))


def check_join(participant: object, name: object, crash_count: object) -> tuple[str, int]:
    """Return name and crash count of a participant. Raises ``ArgumentError``."""
    missing = [each for each in ("prepare", "commit", "abort") if not callable(getattr(participant, each, None))]
    if missing or isinstance(participant, type):
        raise ArgumentError(f"a participant must have prepare, commit and abort, not {type(participant).__name__}")
    if isinstance(crash_count, bool) or not isinstance(crash_count, int) or not -(2**63) <= crash_count < 2**63:
        raise ArgumentError(f"crash_count must be an int of 64 bits, not {crash_count!r:.80}")
    if name is None:
        return f"{type(participant).__name__} {id(participant):x}", crash_count
    return check_participant_name(name), crash_count


def check_participant_name(name: object) -> str:
    """Return ``name`` if it can be that of a participant; raise ``ArgumentError``."""
    if not isinstance(name, str) or not 0 < len(name) <= 1000:
        raise ArgumentError(f"the name of a participant must be a text of 1 to 1000 characters, not {name!r:.80}")
    return name

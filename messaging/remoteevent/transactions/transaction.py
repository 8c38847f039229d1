"""A transaction, as programs use it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

from messaging.errors import (
    ArgumentError,
    CannotAbortError,
    CannotCommitError,
    DeadlineError,
    MessagingError,
    OutcomeUnknownError,
)
from messaging.errors.checks import check_procedure
from messaging.errors.text import tolerant
from messaging.execution import Promise, result_of
from messaging.remoteevent.listener import check_wait
from messaging.remoteevent.transactions.participant import Enlisted, TransactionState
from messaging.remoteevent.transactions.two_phases import TwoPhases, after

#: of participants without a name
_numbers: Final = itertools.count(1)
_COMMITTED, _ABORTED = TransactionState.COMMITTED, TransactionState.ABORTED


class Transaction(TwoPhases):
    """A transaction of a manager in this process. Thread safe. Managers make it.

    Attributes:
        id: of the transaction, unique among all managers.
        lease: of the transaction: when it ends before :meth:`commit`, the transaction is aborted. ``None`` for a
            transaction of an earlier run, whose outcome is decided.
    """

    @property
    def remaining(self) -> float:
        """Seconds until the lease ends, as far as it is known here; 0 if it has ended."""
        return 0.0 if self.lease is None else self.lease.remaining

    def ask_state(self) -> Promise[TransactionState]:
        """Return the promise of the state. For participants."""
        return Promise.resolved(self.state, f"the state of transaction {self.id}")

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
        is_lasting = name is not None or reference is not None
        enlisted = Enlisted(found, count, participant, reference, is_lasting=is_lasting)
        self.enlist(enlisted, is_named=name is not None)

    def when_ended(self, callback: Callable[[TransactionState], object]) -> None:
        """Call ``callback`` with ``COMMITTED`` or ``ABORTED`` after all participants have confirmed; at once if so.

        Callbacks run on a worker thread, in the order in which they were added, once each. Their exceptions are
        logged. Of a transaction that is not completed when its manager is closed they are not called.
        """
        self.callbacks.add(callback)

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
            ArgumentError: ``timeout`` is negative, or no number.
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`commit_soon`. Nothing was done.
        """
        result_of(lambda: self.commit_soon(timeout), "the participants", "`await` commit_soon()")

    def commit_soon(self, timeout: float | None = None) -> Promise[None]:
        """Commit the transaction; return the promise that :meth:`commit` has returned. It fails as that raises."""
        limit = check_timeout(timeout)
        self.begin_commit()
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
        result_of(lambda: self.abort_soon(timeout), "the participants", "`await` abort_soon()")

    def abort_soon(self, timeout: float | None = None) -> Promise[None]:
        """Abort the transaction; return the promise that :meth:`abort` has returned. It fails as that raises."""
        limit = check_timeout(timeout)
        self.begin_abort("it was aborted by a client")
        return self._awaited(limit, _ABORTED)

    def _awaited(self, limit: float | None, wanted: TransactionState) -> Promise[None]:
        """Return a promise of the outcome, for one caller."""
        known = self.outcome if limit is None else self.decided
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
            error = known.exception(0)
            if self.state not in (wanted, _COMMITTED, _ABORTED):
                promise.reject(error or OutcomeUnknownError(f"transaction {self.id}: the outcome is not known"))
            elif self.state is not wanted:
                promise.reject(self._refusal(wanted))
            elif limit is None:
                promise.resolve(None)
            else:
                self.completed.listen(completed)
                if not promise.done():
                    after(limit, expired)

        known.listen(decided)
        return promise

    def _refusal(self, wanted: TransactionState) -> MessagingError:
        if wanted is _COMMITTED:
            return CannotCommitError(f"transaction {self.id} is aborted: {self.reason}")
        return CannotAbortError(f"transaction {self.id} is committed")

    @tolerant
    def __repr__(self) -> str:
        return f"<Transaction {self.id}: {self.state.name}>"


def check_transaction(value: object) -> None:
    """Refuse what is neither a transaction nor ``None``.

    Raises:
        ArgumentError: it cannot be joined.
    """
    if value is not None and not (
        callable(getattr(value, "join", None)) and isinstance(getattr(value, "id", None), str)
    ):
        raise ArgumentError(f"transaction must be a Transaction, not {type(value).__name__}")


def check_join(participant: object, name: object, crash_count: object) -> tuple[str, int]:
    """Return name and crash count of a participant. Raises ``ArgumentError``."""
    missing = [each for each in ("prepare", "commit", "abort") if not callable(getattr(participant, each, None))]
    if missing or isinstance(participant, type):
        raise ArgumentError(f"a participant must have prepare, commit and abort, not {type(participant).__name__}")
    for each in ("prepare", "commit", "abort"):
        check_procedure(getattr(participant, each), f"{each} of a participant")
    if isinstance(crash_count, bool) or not isinstance(crash_count, int) or not -(2**63) <= crash_count < 2**63:
        raise ArgumentError(f"crash_count must be an int of 64 bits, not {crash_count!r:.80}")
    if name is None:
        return f"{type(participant).__name__} {next(_numbers)}", crash_count
    return check_participant_name(name), crash_count


def check_timeout(timeout: object) -> float | None:
    """Return the seconds that a commit or an abort waits. Raises ``ArgumentError``."""
    return None if timeout is None else check_wait(timeout)


def check_participant_name(name: object) -> str:
    """Return ``name`` if it can be that of a participant; raise ``ArgumentError``."""
    if not isinstance(name, str) or not 0 < len(name) <= 1000:
        raise ArgumentError(f"the name of a participant must be a text of 1 to 1000 characters, not {name!r:.80}")
    return name

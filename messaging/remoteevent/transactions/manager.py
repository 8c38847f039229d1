"""The transaction manager: creates transactions, and completes those of an earlier run.

**Restart.** A manager with a path knows, after its process was killed, which transactions were decided
(:mod:`messaging.remoteevent.transactions.two_phases`). It commits these and aborts the others, as soon as the
participants are there: those of other processes by their channel, those of this process by :meth:`recover`. A
transaction without a record was aborted.

**Threads.** Any thread may use a manager. Its lock guards the table of transactions.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.environment.forks import LiveObjects
from messaging.environment.signals import on_failure
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    ClosedError,
    DeadlineError,
    MessagingError,
    UnknownTransactionError,
)
from messaging.errors.checks import check_path
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Closeable, Deadlines, Promise, clock, engine, may_block, seconds
from messaging.leases import Landlord, Lease
from messaging.remoteevent.delivery import PATIENT, RetryPolicy
from messaging.remoteevent.transactions.participant import Enlisted, TransactionState
from messaging.remoteevent.transactions.remote_participant import RemoteParticipant
from messaging.remoteevent.transactions.transaction import Transaction, check_participant_name
from messaging.remoteevent.transactions.two_phases import Decisions, TwoPhases

if TYPE_CHECKING:
    from messaging.instance import Messaging

logger = SafeLog(__name__)

#: how long a participant may take to prepare, seconds
TIME_LIMIT: Final = 10.0
#: transactions at a time
MAX_TRANSACTIONS: Final = 100_000
#: ended transactions whose outcome is remembered, for clients that ask again
_REMEMBERED: Final = 10_000
#: how long closing waits for participants, seconds
_CLOSE_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """A transaction that is not completed, for people. Immutable.

    Attributes:
        id: of the transaction.
        state: its state.
        waiting_for: names of the participants that have not confirmed the outcome.
    """

    id: str
    state: TransactionState
    waiting_for: list[str]


class TransactionManager(Closeable):
    """Creates transactions and completes them. Thread safe; a context manager, which closes it.

    Args:
        path: folder of the decisions, which survive a restart; ``None``: they are in memory.
        name: for the log and in errors.
        messaging: reaches participants of other processes again after a restart.
        max_duration: longest lease of a transaction, seconds.
        default_duration: lease for ``Lease.ANY``, seconds.
        max_transactions: transactions at a time that are not completed.
        time_limit: seconds that a participant may take to prepare.
        retry: delays between the attempts to tell a participant the outcome. Committing is tried without
            end; after a restart for one day, if the participant joined without a name.

    Raises:
        ArgumentError: an argument is not as described.
        JournalError, DecodeError: the folder cannot be used.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        name: str = "transactions",
        messaging: Messaging | None = None,
        max_duration: float = 3600.0,
        default_duration: float = 300.0,
        max_transactions: int = MAX_TRANSACTIONS,
        time_limit: float = TIME_LIMIT,
        retry: RetryPolicy = PATIENT,
    ) -> None:
        if isinstance(time_limit, bool) or seconds(time_limit, "time_limit") <= 0:
            raise ArgumentError(f"time_limit must be a number of seconds above 0, not {time_limit!r:.80}")
        if not isinstance(retry, RetryPolicy):
            raise ArgumentError(f"retry must be a RetryPolicy, not {type(retry).__name__}")
        if path is not None:
            check_path("path", path)
        self.landlord = Landlord(
            name, max_duration=max_duration, default_duration=default_duration, max_leases=max_transactions
        )
        self.name = name
        self.time_limit = seconds(time_limit)
        self.retry = retry
        self.is_closed = False
        self._most = max_transactions
        self._lock = threading.Lock()  # guards the following
        self._transactions: dict[str, Transaction] = {}
        self._ended: OrderedDict[str, TransactionState] = OrderedDict()
        #: committed transactions that are completed, and whose records are not removed yet
        self._recorded: dict[str, Transaction] = {}
        #: whether the disk has refused to remove one of them since a removal succeeded
        self._has_refused = False
        #: transactions with a phase under way, and when it is to end in monotonic time; the earliest first
        self._watched: OrderedDict[str, tuple[float, TwoPhases]] = OrderedDict()
        self._deadlines = Deadlines(engine(), self.time_limit, self._expire)
        self.decisions = Decisions(path)
        with on_failure(self.decisions.close):
            found = self.decisions.load()
        _managers.add(self)
        for transaction_id, state, participants in found:
            self._recover(Transaction(transaction_id, self, state, participants), participants, messaging)

    def after_fork(self) -> None:
        """See ``Forkable``: the transactions stay in the parent; the manager of the child is closed."""
        self._lock = threading.Lock()
        self._transactions = {}
        self._ended = OrderedDict()
        self._recorded = {}
        self._has_refused = False
        self._watched = OrderedDict()
        self.is_closed = True

    def _recover(self, transaction: Transaction, participants: list[Enlisted], messaging: Messaging | None) -> None:
        """Continue with a transaction of an earlier run."""
        self._transactions[transaction.id] = transaction
        for each in participants:
            if each.reference is not None and messaging is not None:
                each.participant = RemoteParticipant(messaging, each.reference, timeout=self.time_limit)
            each.limit_attempts()
        transaction.proceed()

    # --- transactions

    def create(self, duration: float = Lease.ANY) -> Transaction:
        """Create a transaction.

        Args:
            duration: seconds that are asked for; when the lease ends, the transaction is aborted unless it is being
                committed.

        Raises:
            ArgumentError: ``duration`` is not one of leases.
            BoundReachedError, LeaseDeniedError: there are ``max_transactions`` transactions.
            ClosedError: the manager is closed.
        """
        self._refuse_closed()
        transaction = Transaction(secrets.token_hex(12), self, TransactionState.ACTIVE, [])
        with self._lock:
            is_full = len(self._transactions) >= self._most
            if not is_full:
                self._transactions[transaction.id] = transaction  # before its lease, which may end at once
        if is_full:
            raise BoundReachedError(f"transaction manager '{self.name}': {self._most} transactions are not completed")
        with on_failure(self._drop, transaction.id):  # without a lease it would stay for good
            transaction.lease = self.landlord.grant(
                duration, transaction.end_with_lease, about=f"transaction {transaction.id}"
            )
        return transaction

    def _drop(self, transaction_id: str) -> None:
        with self._lock:
            self._transactions.pop(transaction_id, None)

    def _refuse_closed(self) -> None:
        if self.is_closed:
            raise ClosedError(f"transaction manager '{self.name}': closed")

    def get(self, transaction_id: str) -> Transaction:
        """Return a transaction that is not completed.

        Raises:
            UnknownTransactionError: there is none with this id, or it is completed.
            ClosedError: the manager is closed, and has none with this id; another run may have it.
        """
        found = self._transactions.get(transaction_id) if isinstance(transaction_id, str) else None
        if found is None:
            self._refuse_closed()
            raise UnknownTransactionError(f"transaction manager '{self.name}': no transaction {transaction_id!r:.80}")
        return found

    def state(self, transaction_id: str) -> TransactionState:
        """Return the state of a transaction, also of one of the last 10,000 that were completed.

        Raises:
            UnknownTransactionError: it is not known. A participant that has prepared it can take it for aborted.
            ClosedError: as :meth:`get`.
        """
        with self._lock:
            ended = self._ended.get(transaction_id) if isinstance(transaction_id, str) else None
        return self.get(transaction_id).state if ended is None else ended

    def transactions(self) -> list[TransactionInfo]:
        """Return the transactions that are not completed, for people."""
        with self._lock:
            found = [*self._transactions.values()]
        return [TransactionInfo(each.id, each.state, each.waiting_for) for each in found]

    def recover(self, name: str, participant: Any, *, reference: str | None = None) -> list[str]:
        """Tell a participant that is there again the outcomes of the transactions that it has joined.

        Args:
            name: under which it joined.
            participant: as it is now.
            reference: channel of a participant in another process.

        Returns:
            The ids of its transactions that are not completed. The participant can take any other transaction that it
            has prepared for aborted.

        Raises:
            ArgumentError: an argument is not as described.
            ClosedError: the manager is closed.
        """
        return self._recover_all(name, participant, reference)[0]

    def recover_soon(self, name: str, participant: Any, reference: str) -> Promise[list[str]]:
        """Tell the outcomes to a participant of another process, as :meth:`recover` does. For the server.

        The promise resolves when the next run does not tell the participant where it was before: it does not ask again.
        It fails with ``JournalError`` if that cannot be stored.
        """
        found, storing = self._recover_all(name, participant, reference)
        promise: Promise[list[str]] = Promise(f"recover participant {name!r:.80}")

        def go_on() -> None:
            while storing:
                if not storing[-1].done():
                    storing[-1].listen(go_on)
                    return
                error = storing.pop().exception(0)
                if error is not None:
                    promise.reject(error)
                    return
            promise.resolve(found)

        go_on()
        return promise

    def _recover_all(self, name: str, participant: Any, reference: str | None) -> tuple[list[str], list[Promise[Any]]]:
        """Return the transactions of a participant that are not completed, and promises of what has to be stored."""
        check_participant_name(name)
        self._refuse_closed()
        with self._lock:
            transactions = {**self._transactions, **self._recorded}
        found, storing = [], []
        for each in transactions.values():
            takes_part, stored = each.recover(name, participant, reference)
            if takes_part:
                found.append(each.id)
            if stored is not None:
                storing.append(stored)
        return found, storing

    def forget(self, transaction_id: str, state: TransactionState) -> None:
        """Note that all participants of a transaction know its outcome. For transactions."""
        with self._lock:
            transaction = self._transactions.get(transaction_id)
            if transaction is not None and state is TransactionState.COMMITTED:
                self._recorded[transaction_id] = transaction
        self.remove(transaction_id)
        with self._lock:
            self._transactions.pop(transaction_id, None)
            self._watched.pop(transaction_id, None)
            self._ended[transaction_id] = state
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def remove(self, transaction_id: str) -> Promise[Any] | None:
        """Remove the record of a completed transaction; return the promise that it is removed. For transactions.

        Until then it counts as recorded, and its participants have it removed again when they ask.

        Returns:
            ``None`` if there is no record.
        """
        try:
            promise = self.decisions.forget(transaction_id)
        except MessagingError as error:
            promise = Promise(f"remove the record of transaction {transaction_id}")
            promise.reject(error)
        if promise is None:
            self._note_removed(transaction_id)
            return None
        removed = promise

        def settled() -> None:
            error = removed.exception(0)
            if error is None:
                self._note_removed(transaction_id)
            elif not isinstance(error, ClosedError):
                self._has_refused = True
                logger.warning(
                    "transaction manager '%s': the record of %s is not removed: %s; the next run completes it again, "
                    "unless a later change removes the record",
                    self.name, transaction_id, error,
                )  # fmt: skip

        removed.listen(settled)
        return removed

    def _note_removed(self, transaction_id: str) -> None:
        with self._lock:
            self._recorded.pop(transaction_id, None)
            has_refused, self._has_refused = self._has_refused, False
            others = [*self._recorded] if has_refused else []
        for each in others:  # the table has appended the removals again that the disk refused: note their outcomes
            self.remove(each)

    def watch(self, transaction: TwoPhases) -> None:
        """End a phase of a transaction after the time limit. For transactions."""
        with self._lock:
            self._watched.pop(transaction.id, None)
            self._watched[transaction.id] = (clock.monotonic() + self.time_limit, transaction)
        self._deadlines.watch(self.time_limit)

    def _expire(self, now: float) -> float | None:
        """End the phases whose time is over; return the seconds until the next one. On the loop of the engine."""
        late: list[TwoPhases] = []
        left: float | None = None
        with self._lock:
            while self._watched:
                transaction_id, (due, transaction) = next(iter(self._watched.items()))
                if due > now:
                    left = due - now
                    break
                del self._watched[transaction_id]
                late.append(transaction)
        for each in late:
            each.expire()
        return left

    # --- life cycle

    def close(self) -> None:
        """Abort the transactions without a decision, wait up to 5 s for the participants, and stop. Idempotent.

        Participants that have not confirmed are told by the next run with the same path.

        Raises:
            JournalError: the last state is not stored.
        """
        with self._lock:
            if self.is_closed:
                return
            transactions = [*self._transactions.values()]
        aborts = [each.abort_soon() for each in transactions]
        for each in aborts:
            each.was_retrieved = True
        if may_block():
            _wait_for(aborts)
        with self._lock:
            self.is_closed = True
        self.landlord.close()
        self.decisions.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<TransactionManager {self.name!r} of {len(self._transactions)} transactions>"


_managers: Final = LiveObjects[TransactionManager]()


def _wait_for(promises: list[Promise[None]]) -> None:
    """Wait for promises, for at most 5 s in all."""
    deadline = clock.monotonic() + _CLOSE_TIMEOUT
    for each in promises:
        try:
            each.exception(max(0.0, deadline - clock.monotonic()))
        except DeadlineError:
            continue

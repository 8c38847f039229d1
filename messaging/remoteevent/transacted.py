"""Registrations and events within transactions (EV.2.4), for one generator.

A registration within a transaction has an event id of its own, and numbers relative to the transaction. It gets the
events of the transaction at once, and those outside of it as well, because they are visible inside. Registrations
outside get the events of the transaction when it is committed, with numbers that they are given then. So do
registrations within other transactions.

**The lease of the transaction.** When it is over, and the generator was not told the outcome, it asks the manager. If
the transaction has ended, or the manager does not answer, its registrations end, and its events are dropped. Only a
prepared transaction waits for its outcome, whatever it takes: the generator asks for it every minute, since a manager
tells of an abort a few times only.

**Threads.** The generator is a participant of its transactions, see :mod:`messaging.remoteevent.transactions`: the
manager calls it on worker threads. The lock guards the scopes; no code of the application runs under it. Each scope has
a lock of its own, held while the disk is waited for.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

from messaging.environment.signals import on_failure
from messaging.errors import (
    BoundReachedError,
    CannotJoinError,
    ClosedError,
    DeadlineError,
    MessagingError,
    UnknownTransactionError,
)
from messaging.errors.text import SafeLog
from messaging.execution import Deadlines, Promise, clock, engine, seconds, workers
from messaging.leases import Landlord, LeaseEnd, release
from messaging.remoteevent.delivery import SHORT, GeneratedKind, Interest, MemoryQueue, wait_for_all
from messaging.remoteevent.event import EventId, EventRegistration, RemoteEvent
from messaging.remoteevent.listener import as_target
from messaging.remoteevent.storage import Storage
from messaging.remoteevent.transactions import Transaction, TransactionState, Vote

logger = SafeLog(__name__)

#: events of one transaction, and events that wait for one listener within it
MAX_EVENTS: Final = 10_000
#: how long a commit waits for the disk, seconds
_TIMEOUT: Final = 30.0
#: longest time until a transaction is looked at again, and after its manager said that it goes on, seconds
_LONGEST: Final = 60.0
_AGAIN: Final = 10.0


class _TransactionScope:
    """The registrations and the events of one transaction."""

    __slots__ = (
        "due", "events", "is_asked", "is_ended", "is_joined", "is_prepared", "joining", "kinds", "published",
        "publishing", "settling", "transaction",
    )  # fmt: skip

    def __init__(self, events: list[RemoteEvent], *, is_joined: bool = False) -> None:
        self.kinds: dict[EventId, GeneratedKind] = {}
        #: for listeners outside, in order
        self.events = events
        #: those that `commit` publishes, by their numbers, and the numbers of those that are on the disk
        self.publishing: dict[int, Promise[int]] = {}
        self.published: set[int] = set()
        #: held while the events are stored, published or dropped: by one call of the manager at a time
        self.settling = threading.Lock()
        #: calls that join the transaction now, and whether one has succeeded
        self.joining = 0
        self.is_joined = is_joined
        self.is_ended = False
        #: its events are kept until the outcome is known
        self.is_prepared = False
        #: the transaction, and the monotonic time at which to look at its lease; not of one of an earlier run
        self.transaction: Transaction | None = None
        self.due = math.inf
        #: a worker asks the transaction for its time, which may take any
        self.is_asked = False


class TransactedEvents:
    """The transactions of one generator; a ``TransactionParticipant``. Thread safe.

    Args:
        source: of the generator.
        landlord: grants the leases of registrations.
        publish: numbers an event outside of transactions, with the message id of its record, and notifies of it.
        prepared: keeps prepared transactions over a restart.
    """

    def __init__(
        self, source: str, landlord: Landlord, publish: Callable[[RemoteEvent, str], Promise[int]], prepared: Storage
    ) -> None:
        self._source = source
        self._landlord = landlord
        self._publish_outside = publish
        self._prepared = prepared
        self._lock = threading.Lock()  # guards the scopes and what is in them
        self._is_closed = False
        self._scopes: dict[str, _TransactionScope] = {}
        for name, events in prepared.transactions().items():
            self._scopes[name] = _TransactionScope([*events], is_joined=True)
        self._deadlines = Deadlines(engine(), _LONGEST, self._look)
        #: for :meth:`Transaction.join`; another one in each run: what was not prepared is lost with the process
        self.crash_count = secrets.randbits(62)

    @property
    def name(self) -> str:
        """Name of the participant; the same in each run of a persistent generator."""
        return f"generator {self._source}"

    @property
    def is_active(self) -> bool:
        """Whether there is a transaction."""
        return bool(self._scopes)

    def _join(self, transaction: Transaction) -> _TransactionScope:
        """Return the scope of a transaction, after joining it. The scope is there before: a commit may follow at once.

        Threads that join side by side each ask the manager, which notes the first one.
        """
        with self._lock:
            scope = self._scopes.setdefault(transaction.id, _TransactionScope([]))
            if scope.is_joined:
                return scope
            scope.joining += 1
        with on_failure(self._undo_joining, transaction.id, scope):
            transaction.join(self, name=self.name, crash_count=self.crash_count)
        with self._lock:
            scope.joining -= 1
            is_first = not scope.is_joined
            scope.is_joined = True
        if is_first:
            scope.transaction = transaction
            transaction.when_ended(lambda *_: self._end(transaction.id))
            left = getattr(transaction, "remaining", None)  # those of other managers do not say
            if left is not None:
                self._watch(scope, left)
        return scope

    def _undo_joining(self, transaction_id: str, scope: _TransactionScope) -> None:
        with self._lock:
            scope.joining -= 1
            if not scope.joining and not scope.is_joined and self._scopes.get(transaction_id) is scope:
                del self._scopes[transaction_id]

    # --- the lease of the transaction

    def _watch(self, scope: _TransactionScope, delay: float) -> None:
        """Look at the lease of a transaction after ``delay`` seconds."""
        delay = min(delay, _LONGEST)
        scope.due = clock.monotonic() + delay
        self._deadlines.watch(delay)

    def _look(self, now: float) -> float | None:
        """Look at the leases; return the seconds until the next look. On the loop of the engine."""
        with self._lock:
            watched = [each for each in self._scopes.values() if each.due < math.inf]
            due = [each for each in watched if each.due <= now]
            for each in due:
                each.due = now + _AGAIN
            due = [each for each in due if not each.is_asked]
            for each in due:
                each.is_asked = True
        for each in due:
            try:
                workers().submit(partial(self._look_at, each))
            except RuntimeError:  # no thread can be started: it is looked at again
                each.is_asked = False
        left = min((each.due for each in watched), default=math.inf) - now
        return None if left == math.inf else left

    def _look_at(self, scope: _TransactionScope) -> None:
        """Look at the lease of a transaction, which may be of an application. On a worker thread of its own."""
        transaction = scope.transaction
        try:
            if transaction is None:
                return
            if scope.is_ended:
                self._ask(transaction)
                return
            try:
                left = seconds(transaction.remaining, "remaining")
            except Exception:
                logger.exception(
                    "generator '%s': transaction %s does not say when it ends; its manager is asked",
                    self._source, transaction.id,
                )  # fmt: skip
                left = 0.0
            if left > 0:
                self._watch(scope, left)
            else:
                self._ask(transaction)
        finally:
            scope.is_asked = False

    def _ask(self, transaction: Transaction) -> None:
        """Ask the manager whether a transaction whose lease is over goes on."""
        try:
            answer = transaction.ask_state()
        except Exception as error:  # noqa: BLE001  # nothing was sent, or it is of an application
            answer = Promise("ask the state of a transaction")
            answer.reject(error if isinstance(error, MessagingError) else MessagingError(f"{type(error).__name__}"))

        def answered() -> None:
            error = answer.exception(0)
            state = None if error is not None else answer.result(0)
            if state is not None and state not in (TransactionState.COMMITTED, TransactionState.ABORTED):
                return
            scope = self._scopes.get(transaction.id)
            if scope is not None and scope.is_prepared:
                is_aborted = state is TransactionState.ABORTED or isinstance(error, UnknownTransactionError)
                if is_aborted or state is TransactionState.COMMITTED:
                    workers().submit(partial(self._settle, transaction.id, self.abort if is_aborted else self.commit))
                return
            logger.info(
                "generator '%s': the lease of transaction %s has ended: %s; its registrations end",
                self._source, transaction.id, error or f"it is {state.name.lower() if state else 'unknown'}",
            )  # fmt: skip
            workers().submit(partial(self._settle, transaction.id, self._give_up))

        answer.listen(answered)

    def _settle(self, transaction_id: str, settle: Callable[[str], object]) -> None:
        """End a transaction whose outcome the manager has told on request, or whose lease is over. On a worker."""
        try:
            settle(transaction_id)
        except MessagingError as error:  # it is asked again
            logger.warning(
                "generator '%s': the outcome of transaction %s is not carried out: %s; the manager is asked again",
                self._source, transaction_id, error,
            )  # fmt: skip

    def _give_up(self, transaction_id: str) -> None:
        """Drop the events of a transaction whose lease is over. One that is being prepared is asked for again."""
        scope = self._scopes.get(transaction_id)
        if scope is None or not scope.settling.acquire(blocking=False):
            return
        try:
            if not scope.is_prepared:
                self._prepared.keep_transaction(transaction_id, None)
                self._end(transaction_id)
        finally:
            scope.settling.release()

    # --- registering and generating

    def register(
        self, transaction: Transaction, event_id: EventId, handback: Any, listener: Any, duration: float
    ) -> EventRegistration:
        """Register interest within a transaction; see ``EventGenerator.register``."""
        target = as_target(listener)
        scope = self._join(transaction)
        inner_id = f"{event_id}@{transaction.id}"
        interest = Interest((self._source, inner_id), listener, handback)
        interest.queue = queue = MemoryQueue(MAX_EVENTS, handback)
        lease = self._landlord.grant(
            duration, lambda end: self._end_interest(scope, event_id, interest, end), about=f"events {inner_id!r}"
        )
        interest.lease = lease
        interest.begin(f"{self._source} {inner_id}", target, queue, SHORT)
        with self._lock:
            is_ended = scope.is_ended
            if not is_ended:
                kind = scope.kinds.setdefault(event_id, GeneratedKind(inner_id))
                kind.interests = (*kind.interests, interest)
                number = kind.sequence
        if is_ended:
            release(lease)
            raise CannotJoinError(f"transaction {transaction.id} has ended")
        return EventRegistration(inner_id, self._source, lease, number, is_fully_ordered=True)

    def _end_interest(self, scope: _TransactionScope, event_id: EventId, interest: Interest, _end: LeaseEnd) -> None:
        interest.stop()
        with self._lock:
            kind = scope.kinds.get(event_id)
            if kind is not None:
                kind.remove(interest)

    def generate(self, transaction: Transaction, event: RemoteEvent) -> Promise[int]:
        """Generate an event within a transaction; see ``EventGenerator.generate``."""
        scope = self._join(transaction)
        with self._lock:
            if scope.is_ended:
                raise CannotJoinError(f"transaction {transaction.id} has ended")
            if len(scope.events) >= MAX_EVENTS:
                raise BoundReachedError(f"transaction {transaction.id} has {MAX_EVENTS} events already")
            scope.events.append(event)
            interests = self._add(scope, event)
        for each in interests:
            each.delivery.wake()
        return Promise.resolved(0, "generate a remote event")

    def note_outside(self, event: RemoteEvent, origin: str | None = None) -> None:
        """Notify the registrations within transactions of an event outside of them, which they see.

        Args:
            event: the event.
            origin: id of the transaction that it was generated in, whose registrations have it already.
        """
        with self._lock:
            scopes = [each for transaction_id, each in self._scopes.items() if transaction_id != origin]
            interests = [interest for scope in scopes for interest in self._add(scope, event)]
        for each in interests:
            each.delivery.wake()

    @staticmethod
    def _add(scope: _TransactionScope, event: RemoteEvent) -> tuple[Interest, ...]:
        """Queue an event for the registrations of a transaction, and return them. With the lock."""
        kind = scope.kinds.get(event.id)
        if kind is None:
            return ()
        kind.sequence += 1
        inner = event.renamed(kind.id, kind.sequence)
        for each in kind.interests:
            if each.queue is not None:
                each.queue.put(inner)
        return kind.interests

    # --- the participant

    def prepare(self, transaction_id: str) -> Vote:
        """Store the events of a transaction, so that :meth:`commit` cannot fail for good.

        Raises:
            UnknownTransactionError: the generator has joined it in an earlier run, and lost its events.
            JournalError: the events are not stored.
            ClosedError: the generator is closed, and would notify of none of them.
        """
        with self._lock:
            scope = self._scopes.get(transaction_id)
            if scope is None:
                raise UnknownTransactionError(
                    f"generator {self._source!r}: the events of transaction {transaction_id} are not known; "
                    "they were lost with an earlier run"
                )
            events = [*scope.events]
            if events and self._is_closed:
                raise ClosedError(f"generator {self._source!r}: closed")
            scope.is_ended = True  # no further events
        if not events:
            self._end(transaction_id)
            return Vote.NOTCHANGED
        with scope.settling:
            if self._scopes.get(transaction_id) is not scope:
                raise UnknownTransactionError(f"transaction {transaction_id} was aborted meanwhile")
            self._prepared.keep_transaction(transaction_id, events)
            scope.is_prepared = True
        if scope.transaction is not None:
            self._watch(scope, _LONGEST)
        return Vote.PREPARED

    def commit(self, transaction_id: str) -> None:
        """Publish the events of a transaction. Idempotent.

        A manager that got no answer calls again, also while an earlier call is waiting for the disk.

        Raises:
            DeadlineError: an earlier call has not returned: call it again.
            MessagingError: the events are not stored: call it again.
        """
        with self._lock:
            scope = self._scopes.get(transaction_id)
        if scope is None:
            self._prepared.keep_transaction(transaction_id, None)
            return
        if not scope.settling.acquire(blocking=False):
            raise DeadlineError(f"generator {self._source!r}: {transaction_id} is being committed")
        try:
            self._publish(transaction_id, scope)
            self._prepared.keep_transaction(transaction_id, None)
        finally:
            scope.settling.release()
        self._end(transaction_id)

    def _publish(self, transaction_id: str, scope: _TransactionScope) -> None:
        """Publish the events that are not published yet, and wait for the disk. By one thread at a time."""
        for number, event in enumerate(scope.events):
            message_id = f"{transaction_id}/{number}"
            promise = scope.publishing.get(number)
            has_failed = promise is not None and promise.done() and promise.exception(0) is not None
            if has_failed or (promise is None and not self._prepared.is_stored(message_id)):
                scope.publishing[number] = self._publish_outside(event, message_id)
        failure: MessagingError | None = None
        for number, promise in scope.publishing.items():
            if number in scope.published:
                continue
            error = promise.exception(_TIMEOUT)
            if error is None:
                scope.published.add(number)
                self.note_outside(scope.events[number], transaction_id)
            failure = failure or error
        if failure is not None:
            raise failure

    def abort(self, transaction_id: str) -> None:
        """Drop the events of a transaction. Idempotent. Raises ``JournalError``: call it again."""
        with self._lock:
            scope = self._scopes.get(transaction_id)
        with nullcontext() if scope is None else scope.settling:  # the events may be being stored
            self._prepared.keep_transaction(transaction_id, None)
            self._end(transaction_id)

    def _end(self, transaction_id: str) -> None:
        """End the registrations of a transaction (EV.2.4)."""
        with self._lock:
            scope = self._scopes.pop(transaction_id, None)  # a later `prepare` finds no transaction
            if scope is None:
                return
            scope.is_ended = True
            interests = [each for kind in scope.kinds.values() for each in kind.interests]
        for each in interests:
            release(each.lease)

    def close(self) -> None:
        """Stop all deliveries. A transaction that is not prepared cannot be committed any more."""
        engine().call(self._deadlines.stop)
        with self._lock:
            self._is_closed = True
            interests = [
                each for scope in self._scopes.values() for kind in scope.kinds.values() for each in kind.interests
            ]
        wait_for_all([each.delivery.close() for each in interests])

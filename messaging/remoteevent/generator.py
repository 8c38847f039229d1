"""Event generators: they number the events of their kinds, and notify the listeners that registered (EV.2.3.4).

**Sequence numbers** rise by one from event to event of a kind, in the order of the calls of
:meth:`EventGenerator.generate`; none is skipped: they are fully ordered (EV.2.3.2). A receiver that misses a number
missed an event. A generator with a path keeps its numbers, registrations and undelivered events over a restart. An
event whose write failed has a number that no listener gets: it is lost, and the gap says so.

**Threads.** :meth:`EventGenerator.generate` runs on the calling thread and does not wait for listeners. Each
registration has a delivery of its own (:mod:`messaging.remoteevent.delivery`), so a listener that fails or blocks
delays no other one. The lock of a generator guards the numbers and the registrations; no code of the application runs
under it.

**Bounds.** Without a path, at most ``max_pending`` events wait for each listener; when more do, the oldest is dropped
and counted, and its number is missing at the listener. With a path, the journal is bounded by ``max_bytes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from messaging.dispatch.eventdata import from_portable, to_portable
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, InvalidEventError, MessagingError, UnknownEventError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Promise, clock
from messaging.leases import Landlord, Lease, LeaseEnd, release
from messaging.remoteevent.delivery import SHORT, DeliveryCounts, GeneratedKind, Interest, RetryPolicy
from messaging.remoteevent.event import (
    EventId,
    EventRegistration,
    RemoteEvent,
    check_event_id,
    check_sequence_number,
)
from messaging.remoteevent.listener import as_target
from messaging.remoteevent.party import Grant, Party
from messaging.remoteevent.storage import DurableStorage, Storage, generated_source
from messaging.remoteevent.transacted import TransactedEvents
from messaging.remoteevent.transactions import Transaction
from messaging.remoteevent.transactions.transaction import check_transaction

if TYPE_CHECKING:
    from messaging.instance import Messaging

logger = SafeLog(__name__)

E = TypeVar("E", bound=RemoteEvent)

#: events that wait for one listener of a generator without a disk
MAX_PENDING: Final = 10_000
#: bytes of the undelivered events of a generator with a path
MAX_BYTES: Final = 2**30


class EventGenerator(Party):
    """An object whose events others register for (EV.2.3.4). Thread safe; a context manager, which closes it.

    A program declares the kinds of events, and calls :meth:`generate` when one occurs::

        with EventGenerator("boiler", events=["overheated"]) as boiler:
            registration = boiler.register("overheated", None, print, 60.0)
            boiler.generate("overheated")

    Args:
        source: names the generator in its events; unique among the generators that a listener has to do with. ``None``:
            generated; with a path it is kept.
        events: the kind or kinds that can be registered for; :meth:`declare` adds further ones.
        path: folder of a persistent generator; ``None``: numbers, registrations and events are in memory.
        messaging: reaches the listeners of other processes that are registered; needed again after a restart.
        listeners: listeners of this process by name, with a path: registrations of these survive a restart.
        landlord: grants the leases; ``None``: one of its own, which grants up to an hour.
        retry: what happens after a notification failed; by default 10 attempts, the last one 41 s to 51 s after the
            first; with a path unlimited ones until the lease ends.
        max_pending: events that wait for one listener, without a path.
        begin: sequence number of each kind before its first event. ``None``: 0 for a generated source or a new path;
            otherwise, without a path, the microseconds since the epoch: a durable party that has received events of an
            earlier run would take lower numbers for duplicates.
        max_bytes: bytes of the events on the disk, with a path; when they are reached, ``generate`` fails.

    Raises:
        ArgumentError, InvalidEventError: an argument is not as described.
        JournalError: the folder cannot be used.
    """

    def __init__(
        self,
        source: str | None = None,
        *,
        events: EventId | Iterable[EventId] = (),
        path: str | Path | None = None,
        messaging: Messaging | None = None,
        listeners: Mapping[str, Any] | None = None,
        landlord: Landlord | None = None,
        retry: RetryPolicy | None = None,
        max_pending: int = MAX_PENDING,
        max_bytes: int = MAX_BYTES,
        begin: int | None = None,
    ) -> None:
        if source is not None and (not isinstance(source, str) or not 0 < len(source) <= 500):
            raise ArgumentError(f"source must be a text of 1 to 500 characters, not {source!r:.80}")
        for name, value in (("max_pending", max_pending), ("max_bytes", max_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} must be an int from 1, not {value!r:.80}")
        if begin is None:
            begin = 0 if source is None or path is not None else clock.wall_ns() // 1000
        self._begin = check_sequence_number(begin)
        super().__init__("generator", landlord, "events")
        #: the kinds, their numbers and registrations are guarded by the lock
        self._kinds: dict[EventId, GeneratedKind] = {}
        self._storage: Storage
        with on_failure(self.resources.close):
            if path is None:
                self._retry = retry or SHORT
                self._storage = Storage(source or generated_source(), max_pending)
            else:
                self._retry = retry or RetryPolicy()
                self._storage = DurableStorage(path, source, max_bytes, self, messaging, listeners)
            self.source = self._storage.source
            self.title = f"generator {self.source!r}"
            self.declare(*_several(events))
            self._storage.recover(self._recover_number, self._recover_interest)
            self._transacted = TransactedEvents(self.source, self.landlord, self.publish, self._storage)
        for kind in [*self._kinds.values()]:
            for each in kind.interests:
                each.delivery.wake()

    # --- kinds of events

    def declare(self, *event_ids: EventId) -> None:
        """Make kinds of events known, so that they can be registered for and generated.

        Raises:
            InvalidEventError: an id is neither an int of 64 bits nor a text of 1 to 200 characters.
        """
        for each in event_ids:
            check_event_id(each)
        with self._lock:
            for each in event_ids:
                self._kinds.setdefault(each, GeneratedKind(each, self._begin))

    def sequence_number(self, event_id: EventId) -> int:
        """Return the number of the last event of a kind; ``begin`` before it. Raises ``UnknownEventError``."""
        return self._kind(event_id).sequence

    def _kind(self, event_id: EventId) -> GeneratedKind:
        kind = self._kinds.get(event_id) if isinstance(event_id, (int, str)) else None
        if kind is None or isinstance(event_id, bool):
            known = ", ".join(repr(each) for each in [*self._kinds][:10]) or "none"
            raise UnknownEventError(f"generator {self.source!r}: no event {event_id!r:.80}; declared are {known}")
        return kind

    # --- registering

    def register(
        self,
        event_id: EventId,
        handback: Any,
        listener: Any,
        duration: float = Lease.ANY,
        *,
        transaction: Transaction | None = None,
    ) -> EventRegistration:
        """Register interest in a kind of event (EV.2.3.4).

        Args:
            event_id: a declared kind.
            handback: a value with a form in JSON, see :mod:`messaging.dispatch.eventdata`, bytes included: it comes
                back with each notification. ``None``: none.
            listener: gets the notifications: an object with ``notify``, a function of one parameter, a third party such
                as a mailbox, or a stub of a listener in another process. A coroutine function runs on the event loop
                that runs where this is called.
            duration: seconds that are asked for; fewer may be granted.
            transaction: scopes the registration (EV.2.4): its events have an id of their own and numbers relative to
                the transaction, and it ends with the transaction.

        Returns:
            The registration. Its number is that of the last event before it.

        Raises:
            UnknownEventError: the kind is not declared. No lease was granted.
            ArgumentError: the duration or the listener is not as described; or the registration of a persistent
                generator could not be restored after a restart, because the listener is neither in another process nor
                one of ``listeners``.
            InvalidEventError: the handback has no form in JSON.
            CannotJoinError, UnknownTransactionError: the transaction has ended.
            LeaseDeniedError, JournalError, ClosedError: it cannot be registered.
            WouldBlockError: the thread runs an event loop, and the generator is persistent. Nothing was done.
        """
        kind = self._kind(event_id)
        form = None if handback is None else from_portable(to_portable(handback))
        check_transaction(transaction)
        if transaction is not None:
            return self._transacted.register(transaction, event_id, form, listener, duration)
        self._refuse_closed()
        interest = Interest((self.source, event_id), listener, form)
        target = as_target(listener)
        self._storage.check(interest)
        lease = interest.lease = self.landlord.grant(duration, about=f"events {event_id!r}")
        with on_failure(self._undo, interest):
            interest.begin(f"{self.source} {event_id}", target, self._storage.queue(interest), self._retry)
            with self._lock:
                interest.after = kind.sequence
                kind.interests = (*kind.interests, interest)
            self._storage.keep(interest)
        # last: it is called at once if the lease has ended meanwhile
        lease.when_ended(lambda end: self._end(interest, end))
        interest.delivery.wake()
        return EventRegistration(event_id, self.source, lease, interest.after, is_fully_ordered=True)

    def _undo(self, interest: Interest) -> None:
        """End a registration that failed."""
        release(interest.lease)
        self._end(interest, LeaseEnd.CANCELLED)

    def _end(self, interest: Interest, end: LeaseEnd) -> None:
        """End a registration with its lease. On a worker thread, or of one that failed."""
        interest.stop()
        if end is not LeaseEnd.CLOSED:
            self._storage.forget(interest)
        with self._lock:  # last: closing looks for registrations that are not forgotten yet
            self._kinds[interest.kind[1]].remove(interest)

    def _recover_number(self, event_id: EventId, number: int) -> None:
        self._kinds.setdefault(event_id, GeneratedKind(event_id)).sequence = number

    def _recover_interest(self, interest: Interest, grant: Grant) -> None:
        event_id = interest.kind[1]
        kind = self._kinds.setdefault(event_id, GeneratedKind(event_id))
        # numbers of events that were lost with the earlier run, before they were stored, are not given again
        kind.sequence = max(kind.sequence, interest.after)
        lease = interest.lease = grant(lambda _end: None)
        target = as_target(interest.listener)
        interest.begin(f"{self.source} {event_id}", target, self._storage.queue(interest), self._retry)
        kind.interests = (*kind.interests, interest)
        lease.when_ended(lambda end: self._end(interest, end))

    # --- generating

    def generate(
        self,
        event_id: EventId,
        event_type: type[RemoteEvent] = RemoteEvent,
        /,
        *,
        transaction: Transaction | None = None,
        **fields: Any,
    ) -> Promise[int]:
        """Notify the registered listeners of an event; return without waiting for them.

        Args:
            event_id: a declared kind.
            event_type: class of the event, with ``fields`` beyond those of ``RemoteEvent``.
            transaction: hides the event from listeners outside of the transaction until it is committed (EV.2.4).
            **fields: of the event.

        Returns:
            The promise of the sequence number. Without a path it has its outcome already. With a path it resolves when
            the event is on the disk, from where on it is not lost. In a transaction it has the outcome already: 0.

        Raises:
            UnknownEventError: the kind is not declared.
            InvalidEventError: the event has a value without a form in JSON, or does not fit its class.
            CannotJoinError: the transaction is no longer active.
            ClosedError: the generator is closed.
        """
        self._kind(event_id)
        check_transaction(transaction)
        self._refuse_closed()
        try:
            event = event_type(self.source, event_id, 0, None, **fields)  # numbered by `publish`
        except TypeError as error:
            raise InvalidEventError(f"an event {event_id!r} is not made: {error}") from None
        if transaction is not None:
            return self._transacted.generate(transaction, event)
        if self._transacted.is_active:
            self._transacted.note_outside(event)
        return self.publish(event)

    def publish(self, event: RemoteEvent, message_id: str | None = None) -> Promise[int]:
        """Number an event and notify of it. For the transactions of this generator. Raises as :meth:`generate`."""
        kind = self._kind(event.id)
        promise: Promise[int] = Promise("generate a remote event")
        prepared = self._storage.prepare(event)
        with self._lock:
            number = kind.sequence + 1
            event.number(number)
            interests = kind.interests
            try:
                self._storage.add(event, prepared, interests, promise, message_id)
            except MessagingError as error:
                promise.reject(error)
                return promise
            kind.sequence = number
        self._storage.added(interests, promise, number)
        return promise

    @property
    def participant(self) -> TransactedEvents:
        """The generator as a participant of transactions.

        A persistent generator whose process ended between the two phases of a commit is told the outcome after the
        restart: pass its participant to the manager, ``manager.recover(participant.name, participant)``.
        """
        return self._transacted

    # --- state and life cycle

    def counts(self, registration: EventRegistration) -> DeliveryCounts | None:
        """Return the numbers of notifications of a registration; ``None`` if it has ended."""
        check_instance("registration", registration, EventRegistration)
        for each in self._kind(registration.id).interests:
            if each.lease.id == registration.lease.id:
                return each.delivery.counts
        return None

    def _stop(self) -> None:
        """See ``Party``."""
        with self._lock:
            kinds = [*self._kinds.values()]
        interests = [each for kind in kinds for each in kind.interests]
        stopped = [each.delivery.close() for each in interests]
        self._transacted.close()
        self._storage.stop(stopped)

    @tolerant
    def __repr__(self) -> str:
        return f"<EventGenerator {self.source!r}>"


def _several(events: Any) -> Iterable[EventId]:
    """Return the kinds of events that a program gave; a text is one kind."""
    if isinstance(events, (str, int)):
        return (events,)
    if not isinstance(events, Iterable):
        raise ArgumentError(f"events must be ids of events, not {type(events).__name__}")
    return events

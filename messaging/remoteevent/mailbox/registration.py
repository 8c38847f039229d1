"""Registrations of a mailbox: each has a lease, a listener, a box, and one reader of the box at a time.

**Modes.** The events of a registration are stored only; or pushed to a target (``enable_delivery``); or pulled by an
iterator (``remote_events``). Each mode ends the one before. The events stay in their order, and none is lost.

**Threads.** Any thread may use a registration. Its lock guards the mode and the refused kinds; no code of the
application runs under it. Targets are called as :mod:`messaging.remoteevent.delivery` says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from messaging.errors import (
    ArgumentError,
    ClosedError,
    InvalidIteratorError,
    ListenerGoneError,
    MessagingError,
    UnknownEventError,
    UnknownLeaseError,
)
from messaging.execution import Serial
from messaging.remoteevent.delivery import Delivery, DeliveryCounts, RetryPolicy
from messaging.remoteevent.event import EventRegistration, check_kind
from messaging.remoteevent.listener import BatchListener
from messaging.remoteevent.mailbox.iterator import Fetches, RemoteEventIterator
from messaging.remoteevent.targets import as_target, settled
from messaging.text import tolerant

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.leases import GrantedLease
    from messaging.remoteevent.event import EventKind, RemoteEvent
    from messaging.remoteevent.listener import Outcome
    from messaging.remoteevent.mailbox.box import Box, Entry

#: which events a box keeps
Keep = Literal["all", "latest", "latest_and_count"]
KEEP: Final = ("all", "latest", "latest_and_count")
#: events of one request of ``drain``
_DRAIN: Final = 1000


class MailboxListener(BatchListener):
    """The listener of one registration: stores what it is notified of. Thread safe.

    Returning from ``notify`` means that the event is on the disk. An event that arrives twice is stored once.
    """

    def __init__(self, registration: MailboxRegistration) -> None:
        #: the registration; mailboxes refuse its listener as a target
        self.registration = registration

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`.

        The outcomes are ``ListenerGoneError`` when the registration has ended, ``UnknownEventError`` for a kind that
        the target refused, and ``BoundReachedError`` when the box is full.
        """
        return self.registration.store(events)


class MailboxRegistration:
    """A registration at a mailbox. Thread safe; get it with :meth:`EventMailbox.register`.

    Attributes:
        lease: the registration ends with it, and its events are deleted.
        keep: which events are kept.
        listener: give it to generators.
    """

    lease: GrantedLease

    def __init__(
        self,
        keep: Keep,
        open_box: Callable[[MailboxRegistration], Box],
        changed: Callable[[MailboxRegistration], object],
        refuse_loop: Callable[[Any], object],
        retry: RetryPolicy,
        name: str,
    ) -> None:
        self.keep: Keep = keep
        self._refuse_loop = refuse_loop
        self.listener = MailboxListener(self)
        self._open_box = open_box
        self._persist = changed
        self._retry = retry
        self._name = name
        self._lock = threading.RLock()  # guards the following
        self._box: Box | None = None
        self._target: Any = None
        self._delivery: Delivery | None = None
        self._refused: set[EventKind] = set()
        self._iterator: RemoteEventIterator | None = None
        #: of the newest iterator
        self._number = 0
        self._end: MessagingError | None = None
        self._fetches = Fetches(self._first, self._acknowledge, self._refusal)
        self._waker = Serial(self._wake_fetches, lambda: self._is_woken)
        self._is_woken = False

    # --- storing

    @property
    def id(self) -> str:
        """Identifies the registration within its mailbox; also of its lease."""
        return self.lease.id

    @property
    def box(self) -> Box:
        """The stored events, opened with the first use. Raises ``JournalError``, ``ClosedError``, ``LeaseError``."""
        with self._lock:
            if self._box is None:
                self._refuse_ended()
                self._box = self._open_box(self)
            return self._box

    def store(self, events: Sequence[RemoteEvent]) -> Promise[list[Outcome]]:
        """Store events; see :meth:`MailboxListener.deliver`."""
        if self.lease.is_ended or self._end is not None:
            error = self._end
            if not isinstance(error, ClosedError):
                error = ListenerGoneError(f"{self._name}: the registration {self.id} has ended")
            return settled([error])
        refused = self._refused
        if refused:
            kind = events[0].kind
            if kind in refused:
                return settled([UnknownEventError(f"{self._name}: event {kind[1]!r} of {kind[0]!r:.80} was refused")])
            count = next((at for at, each in enumerate(events) if each.kind in refused), len(events))
            events = events[:count]
        try:
            return self.box.store(events)
        except MessagingError as error:
            return settled([error])

    def note_stored(self) -> None:
        """Deliver what was stored. On the thread that wrote it; quick."""
        delivery = self._delivery
        if delivery is not None:
            delivery.wake()
        if self._fetches.is_waiting:
            self._wake()

    def _wake(self) -> None:
        self._is_woken = True
        self._waker.wake()

    def _wake_fetches(self) -> None:
        self._is_woken = False
        self._fetches.wake()

    # --- pushing

    def enable_delivery(self, target: Any) -> None:
        """Push the stored events to ``target``, in order, then each further one when it arrives.

        The mailbox forgets which kinds a target refused, also if the target is the same. An iterator becomes invalid.

        Args:
            target: a listener, see :meth:`EventGenerator.register <messaging.remoteevent.EventGenerator.register>`; it
                takes the place of an earlier one. ``None``: as :meth:`disable_delivery`.

        Raises:
            ArgumentError: it is no listener, or one of this mailbox; or it cannot be found again after a restart,
                because it is neither in another process nor one of ``listeners``.
            UnknownLeaseError: the registration has ended.
            JournalError: it cannot be stored.
            ClosedError: the mailbox is closed.
        """
        if target is None:
            self.disable_delivery()
            return
        self._refuse_ended()
        self._refuse_loop(target)
        found = as_target(target)
        with self._lock:
            is_same = self._target is not None and (self._target is target or self._target == target)
            self._end_iterator()
            self._target = target
            self._refused = set()
            if self._delivery is None:
                self._delivery = Delivery(
                    f"{self._name} {self.id}",
                    found,
                    _BoxQueue(self),
                    policy=self._retry,
                    on_unknown_event=self._refuse_kind,
                    is_enabled=False,
                )
            delivery = self._delivery
        self._persist(self)
        delivery.enable(None if is_same else found)
        self._wake()

    def disable_delivery(self) -> None:
        """Store events only. Idempotent.

        Raises:
            UnknownLeaseError: the registration has ended.
            JournalError, ClosedError: as :meth:`enable_delivery`.
        """
        self._refuse_ended()
        self._stop_delivery()

    def _stop_delivery(self) -> None:
        with self._lock:
            was_enabled = self._target is not None
            self._target = None
            if self._delivery is not None:
                self._delivery.disable()
        if was_enabled:
            self._persist(self)

    def _refuse_kind(self, kind: EventKind) -> None:
        """Refuse a kind that the target does not know. On a worker thread."""
        with self._lock:
            self._refused = {*self._refused, kind}
        self._persist(self)

    def add_unknown_events(self, kinds: Iterable[EventRegistration | EventKind]) -> None:
        """Refuse events of these kinds towards senders from now on, until delivery is enabled again.

        Raises:
            ArgumentError, InvalidEventError: a kind is not a registration, nor (source, id).
            UnknownLeaseError: the registration has ended.
        """
        self._refuse_ended()
        found = {each.kind if isinstance(each, EventRegistration) else _kind(each) for each in kinds}
        with self._lock:
            self._refused = self._refused | found
        self._persist(self)

    # --- pulling

    def remote_events(self) -> RemoteEventIterator:
        """Return an iterator over the stored events, in order. Delivery to a target ends; an earlier one is invalid.

        Raises:
            UnknownLeaseError: the registration has ended.
            JournalError, ClosedError: as :meth:`enable_delivery`.
        """
        number = self.begin_iterator()
        with self._lock:
            iterator = RemoteEventIterator(
                lambda ticket, most, timeout: self.fetch(number, ticket, most, timeout), self._acknowledge
            )
            self._iterator = iterator
        return iterator

    def begin_iterator(self) -> int:
        """Begin to pull; return the number of the iterator. Raises as :meth:`remote_events`."""
        self._refuse_ended()
        self._stop_delivery()
        with self._lock:
            self._end_iterator()
            number = self._number
        self._wake()
        return number

    def _end_iterator(self) -> None:
        """Make the iterator invalid. With the lock."""
        self._number += 1
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.surrender()

    def fetch(self, number: int, ticket: int | None, most: int, timeout: float) -> Promise[list[Entry]]:
        """Acknowledge events up to a ticket, and promise the next ones, for the iterator with a number."""
        return self._fetches.fetch(number, ticket, most, timeout)

    def drain(self, most: int | None = None) -> list[RemoteEvent]:
        """Return the stored events, and remove them; storing goes on. Delivery to a target ends.

        Args:
            most: number of events, at most; ``None``: all that are stored now.

        Raises:
            As :meth:`remote_events`.
        """
        found: list[RemoteEvent] = []
        left = len(self.box) if most is None else most
        with self.remote_events() as iterator:
            while left > 0 and (batch := iterator.batch(min(left, _DRAIN))):
                found += batch
                left -= len(batch)
        return found

    def _refusal(self, number: int) -> MessagingError | None:
        if self._end is not None or self.lease.is_ended:
            return self._end or UnknownLeaseError(f"{self._name}: the registration {self.id} has ended")
        if number != self._number:
            return InvalidIteratorError("a newer iterator, or delivery to a target, took the place of this iterator")
        return None

    def _first(self, most: int) -> list[Entry]:
        delivery = self._delivery
        if delivery is not None and delivery.is_busy:  # its last batch has no outcomes yet
            delivery.disable().listen(self._wake)
            return []
        return self.box.first(most)

    def _acknowledge(self, ticket: int) -> None:
        self.box.acknowledge(ticket)

    # --- state

    @property
    def target(self) -> Any:
        """The target of the delivery; ``None`` without delivery."""
        return self._target

    @property
    def refused(self) -> frozenset[EventKind]:
        """The kinds that are refused towards senders."""
        return frozenset(self._refused)

    @property
    def counts(self) -> DeliveryCounts:
        """Numbers of notifications of targets."""
        return DeliveryCounts() if self._delivery is None else self._delivery.counts

    def __len__(self) -> int:
        """Return the number of stored events that were not taken or delivered yet."""
        return len(self.box)

    def __bool__(self) -> bool:
        """Return ``True``, also when it is empty."""
        return True

    def _refuse_ended(self) -> None:
        if self._end is not None:
            raise self._end
        if self.lease.is_ended:
            raise UnknownLeaseError(f"{self._name}: the registration {self.id} has ended")

    def restore(self, refused: Iterable[EventKind], target: Any) -> None:
        """Continue with the state of an earlier run. For the mailbox."""
        kinds = set(refused)
        if target is not None:
            self.enable_delivery(target)
        with self._lock:
            self._refused = kinds

    def end(self, error: MessagingError) -> tuple[Box | None, list[Promise[None]]]:
        """End the registration: waiting iterators fail with ``error``.

        Returns:
            The box, if it was opened, and promises to wait for before it is closed.
        """
        with self._lock:
            is_first = self._end is None
            self._end = self._end or error
            delivery, box = self._delivery, self._box
            if is_first and self._iterator is not None and isinstance(error, ClosedError):
                self._iterator.surrender()
        self._fetches.wake()
        return box, [] if delivery is None else [delivery.close()]

    @tolerant
    def __repr__(self) -> str:
        return f"<MailboxRegistration {self.id}>"


class _BoxQueue:
    """The box of a registration as an ``EventQueue``: without the kinds that the target refused."""

    def __init__(self, registration: MailboxRegistration) -> None:
        self._registration = registration
        self._tickets: list[int] = []

    def peek(self, most: int) -> list[RemoteEvent]:
        """See ``EventQueue``."""
        box = self._registration.box
        while True:
            entries = box.first(most)
            refused = self._registration.refused
            wanted = [each for each in entries if each[1].kind not in refused] if refused else entries
            if wanted or not entries:
                break
            box.acknowledge(entries[-1][0])
        self._tickets = [ticket for ticket, _ in wanted]
        return [event for _, event in wanted]

    def settle(self, count: int) -> None:
        """See ``EventQueue``."""
        if count:
            self._registration.box.acknowledge(self._tickets[count - 1])
            del self._tickets[:count]


def _kind(value: object) -> EventKind:
    if isinstance(value, tuple) and len(value) == 2:
        return check_kind(*value)
    raise ArgumentError(f"a kind of event must be a registration, or (source, id), not {value!r:.80}")

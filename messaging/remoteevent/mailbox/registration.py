"""Registrations of a mailbox: each has a lease, a listener, a box, and one reader of the box at a time.

**Modes.** The events of a registration are stored only; or pushed to a target (``enable_delivery``); or pulled by an
iterator (``remote_events``). Each mode ends the one before. The events stay in their order, and none is lost.

**Threads.** Any thread may use a registration. One lock is held while the mode or the refused kinds change, until the
change is on the disk: it keeps memory, disk and delivery in one order. A second lock guards the state in memory, for
moments. No code of the application runs under either. Targets are called as :mod:`messaging.remoteevent.delivery` says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
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
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Promise, Serial, refuse_in_loop, workers
from messaging.leases import LeaseEnd
from messaging.remoteevent.delivery import Delivery, DeliveryCounts, RetryPolicy
from messaging.remoteevent.event import EventRegistration, check_kind
from messaging.remoteevent.listener import BatchListener
from messaging.remoteevent.mailbox.box_queue import BoxQueue
from messaging.remoteevent.mailbox.iterator import Fetches, RemoteEventIterator, checked_most, new_token
from messaging.remoteevent.mailbox.open_boxes import BoxSlot, OpenBoxes
from messaging.remoteevent.targets import as_target, settled

if TYPE_CHECKING:
    from messaging.leases import GrantedLease
    from messaging.remoteevent.event import EventKind, RemoteEvent
    from messaging.remoteevent.listener import EventTarget, Outcome
    from messaging.remoteevent.mailbox.box import Box, Entry

logger = SafeLog(__name__)

#: which events a box keeps
Keep = Literal["all", "latest", "latest_and_count"]
KEEP: Final = ("all", "latest", "latest_and_count")


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
        boxes: OpenBoxes,
        open_box: Callable[[MailboxRegistration], Box],
        path_of: Callable[[str], Path],
        persist: Callable[[MailboxRegistration, Any, frozenset[EventKind]], object],
        refuse_loop: Callable[[Any], object],
        retry: RetryPolicy,
        name: str,
    ) -> None:
        self.keep: Keep = keep
        self._refuse_loop = refuse_loop
        self.listener = MailboxListener(self)
        #: the box, open or closed
        self.slot = BoxSlot(
            boxes,
            lambda: open_box(self),
            self.refuse_ended,
            lambda: path_of(self.id).exists(),
            lambda: self._has_tickets,
        )
        self._persist = persist
        self._retry = retry
        self._name = name
        #: held while the mode changes, on the disk as well. Acquired before `_lock`
        self._changing = threading.Lock()
        self._lock = threading.RLock()  # guards the following
        self._target: Any = None
        self._delivery: Delivery | None = None
        #: rises with each call that enables delivery
        self._enabled = 0
        #: promise that no target has events of the last delivery any more
        self._stopping: Promise[None] | None = None
        self._refused: frozenset[EventKind] = frozenset()
        self._iterator: RemoteEventIterator | None = None
        #: begins all tokens of this run
        self._run = new_token()
        #: of the newest iterator
        self._token = self._new_token()
        #: last ticket that it has, and has not acknowledged
        self._ticket: int | None = None
        self._end: MessagingError | None = None
        self._fetches = Fetches(self)
        self._waker = Serial(self._wake_fetches, lambda: self._is_woken)
        self._is_woken = False

    # --- storing

    @property
    def id(self) -> str:
        """Identifies the registration within its mailbox; also of its lease."""
        return self.lease.id

    @property
    def box(self) -> Box:
        """The stored events. An idle box may be closed at any time: for tests and for people.

        Raises ``JournalError``, ``ClosedError``, ``LeaseError``.
        """
        with self.slot.using() as box:
            return box

    @property
    def _has_tickets(self) -> bool:
        """Whether a reader has tickets of the open box, which a box of the latest events does not know later."""
        if self.keep == "all":
            return False
        delivery = self._delivery
        return self._ticket is not None or (delivery is not None and delivery.is_busy)

    def store(self, events: Sequence[RemoteEvent]) -> Promise[list[Outcome]]:
        """Store events; see :meth:`MailboxListener.deliver`."""
        error = self._ended()
        if error is not None:
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
            box = self.slot.acquire()
        except MessagingError as error:
            return settled([error])
        try:
            promise = box.store(events)
        except BaseException as error:
            self.slot.release()
            if isinstance(error, MessagingError):
                return settled([error])
            raise
        promise.listen(self.slot.release)
        return promise

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
                takes the place of an earlier one. After a restart, delivery resumes to a target in another process and
                to one of ``listeners``; to any other target it does not: the events are stored then. ``None``: as
                :meth:`disable_delivery`.

        Raises:
            ArgumentError: it is no listener, or one of this mailbox.
            UnknownLeaseError: the registration has ended.
            JournalError: it cannot be stored. The mode is as before, perhaps until the next restart only.
            ClosedError: the mailbox is closed.
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`enable_delivery_soon`. Nothing has changed.
        """
        if target is None:
            self.disable_delivery()
            return
        found = self._checked_target(target)
        refuse_in_loop("the disk of a mailbox", "`await` enable_delivery_soon()")
        self._enable(target, found)

    def enable_delivery_soon(self, target: Any) -> Promise[None]:
        """As :meth:`enable_delivery`, for event loops: return the promise that it has returned.

        A coroutine function runs on the event loop that runs where this is called.
        """
        if target is None:
            return _soon("disable delivery", self.disable_delivery)
        found = self._checked_target(target)
        return _soon("enable delivery", lambda: self._enable(target, found))

    def _checked_target(self, target: Any) -> EventTarget:
        self.refuse_ended()
        self._refuse_loop(target)
        return as_target(target)

    def _enable(self, target: Any, found: EventTarget) -> None:
        with self._changing:
            self.refuse_ended()
            self._persist(self, target, frozenset())
            with self._lock:
                self.refuse_ended()
                self._end_iterator()
                self._refused = frozenset()
                self._deliver_to(target, found)
        self._wake()

    def _deliver_to(self, target: Any, found: EventTarget) -> None:
        """Begin delivery. With the lock."""
        is_same = self._target is not None and (self._target is target or self._target == target)
        self._target = target
        self._enabled += 1
        if self._delivery is None:
            self._delivery = Delivery(
                f"{self._name} {self.id}",
                found,
                BoxQueue(self),
                policy=self._retry,
                on_unknown_event=self._refuse_kind,
                on_gone=self._note_gone,
                lease=self.lease,
                is_enabled=False,
            )
        self._delivery.enable(None if is_same else found)

    def disable_delivery(self) -> None:
        """Store events only. Idempotent. An iterator stays valid.

        Raises:
            UnknownLeaseError: the registration has ended.
            JournalError, ClosedError, WouldBlockError: as :meth:`enable_delivery`.
        """
        self.refuse_ended()
        with self._changing:
            self._stop_delivery()

    def _stop_delivery(self) -> None:
        """End delivery. With the lock for changes."""
        if self._target is None:
            return
        refuse_in_loop("the disk of a mailbox", "call it on a worker thread")
        self._persist(self, None, self._refused)
        with self._lock:
            self._target = None
            if self._delivery is not None:
                self._stopping = self._delivery.disable()
                self._stopping.listen(self._wake)

    def _note_gone(self, _error: MessagingError) -> None:
        """Note that delivery has stopped, because its target is gone. On a worker thread."""
        with self._changing:
            with self._lock:
                delivery = self._delivery
                if self._target is None or delivery is None or delivery.is_enabled or self._end is not None:
                    return  # delivery was disabled, or enabled for another target
                self._target = None
            self._store_state("that its target is gone")

    def _refuse_kind(self, kind: EventKind) -> None:
        """Refuse a kind that the target does not know. On a worker thread."""
        enabled = self._enabled
        with self._changing:
            if self._enabled != enabled:  # delivery was enabled again, and the target that refused it may be another
                return
            with self._lock:
                self._refused = self._refused | {kind}
            self._store_state(f"that its target refused {kind!r}")

    def _store_state(self, what: str) -> None:
        """Store the state, as far as possible. With the lock for changes."""
        try:
            self._persist(self, self._target, self._refused)
        except MessagingError as error:
            logger.warning("%s: registration %s: %s is not stored: %s", self._name, self.id, what, error)

    def add_unknown_events(self, kinds: Iterable[EventRegistration | EventKind]) -> None:
        """Refuse events of these kinds towards senders from now on, until delivery is enabled again.

        Raises:
            ArgumentError, InvalidEventError: a kind is not a registration, nor (source, id).
            UnknownLeaseError: the registration has ended.
            JournalError, ClosedError, WouldBlockError: as :meth:`enable_delivery`.
        """
        self.refuse_ended()
        found = frozenset(each.kind if isinstance(each, EventRegistration) else _kind(each) for each in kinds)
        refuse_in_loop("the disk of a mailbox", "call it on a worker thread")
        with self._changing:
            self._persist(self, self._target, self._refused | found)
            with self._lock:
                self._refused = self._refused | found

    # --- pulling

    def remote_events(self) -> RemoteEventIterator:
        """Return an iterator over the stored events, in order. Delivery to a target ends; an earlier one is invalid.

        Raises:
            UnknownLeaseError: the registration has ended.
            JournalError, ClosedError: as :meth:`enable_delivery`.
            WouldBlockError: the thread runs an event loop, and delivery is enabled: disable it before.
        """
        made: list[RemoteEventIterator] = []

        def make(token: str) -> RemoteEventIterator:
            made.append(RemoteEventIterator(partial(self.fetch, token), self._acknowledge, token=token))
            return made[0]

        self._begin(make)
        return made[0]

    def begin_iterator(self) -> str:
        """Begin to pull; return the token of the iterator. Raises as :meth:`remote_events`."""
        return self._begin(lambda _token: None)

    def _begin(self, make: Callable[[str], RemoteEventIterator | None]) -> str:
        self.refuse_ended()
        with self._changing:
            self._stop_delivery()
            with self._lock:
                self.refuse_ended()
                self._end_iterator()
                token = self._token
                self._iterator = make(token)
        self._wake()
        return token

    def _new_token(self) -> str:
        return f"{self._run}{new_token()}"

    def _end_iterator(self) -> None:
        """Make the iterator invalid. With the lock."""
        self._token = self._new_token()
        self._ticket = None
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.surrender()

    def note_taken(self, token: str, ticket: int) -> None:
        """Acknowledge the events up to a ticket, because another reader takes over; nothing without such an iterator.

        Raises ``JournalError``, ``ClosedError``.
        """
        with self._lock:
            if token == self._token and self._ended() is None:
                self._acknowledge(ticket)

    def fetch(self, token: str, ticket: int | None, most: int, timeout: float) -> Promise[list[Entry]]:
        """Acknowledge events up to a ticket, and promise the next ones, for the iterator with a token.

        An earlier fetch of the same iterator that still waits is answered without events.
        """
        return self._fetches.fetch(token, ticket, most, timeout)

    def drain(self, most: int | None = None) -> list[RemoteEvent]:
        """Return the stored events, and remove them; storing goes on. Delivery to a target ends.

        All events are returned, or none is removed. If a target has the last batch of a delivery, its answer is waited
        for, up to 5 s.

        Args:
            most: number of events, at most; ``None``: all that are stored now.

        Raises:
            ArgumentError: ``most`` is negative, or no number.
            DeadlineError: the target has not answered.
            WouldBlockError: the thread runs an event loop: use :meth:`remote_events`.
            UnknownLeaseError, InvalidIteratorError, JournalError, ClosedError: as :meth:`RemoteEventIterator.next`.
        """
        checked_most(most)
        refuse_in_loop("the events of a mailbox", "use remote_events(), and `await` next_soon()")
        token = self.begin_iterator()
        found = self.fetch(token, None, len(self) if most is None else most, 0.0).result()
        if found:
            self.fetch(token, found[-1][0], 0, 0.0).result()
        return [event for _, event in found]

    # --- the reader, see ``Fetches``

    def refusal(self, token: str) -> MessagingError | None:
        """Return why an iterator gets no more events; ``None`` if it does."""
        error = self._ended()
        if error is None and not token.startswith(self._run):
            error = InvalidIteratorError(
                "the iterator is of an earlier run of the mailbox: get a new one with remote_events()"
            )
        elif error is None and token != self._token:
            error = InvalidIteratorError("a newer iterator, or delivery to a target, took the place of this iterator")
        return error

    def accept(self, token: str, ticket: int | None) -> None:
        """Acknowledge the events up to a ticket, if the iterator is valid; otherwise raise its error."""
        with self._lock:
            error = self.refusal(token)
            if error is not None:
                raise error
            if ticket is not None:
                self._acknowledge(ticket)

    def read(self, token: str, most: int) -> list[Entry] | None:
        """Return the first events, for an iterator; ``None`` while a target has some of them."""
        stopping = self._stopping
        if stopping is not None and not stopping.done():
            return None
        with self.slot.using() as box:
            entries = box.first(most)
            with self._lock:
                if entries and token == self._token:
                    self._ticket = entries[-1][0]
        return entries

    def pass_over(self, box: Box, ticket: int, refused: frozenset[EventKind]) -> bool:
        """Remove events that the target refused; return ``False`` if delivery has changed meanwhile."""
        with self._lock:
            if self._target is None or self._refused is not refused:
                return False
            box.acknowledge(ticket)
            return True

    def _acknowledge(self, ticket: int) -> None:
        with self.slot.using() as box:
            box.acknowledge(ticket)
        if self._ticket is not None and ticket >= self._ticket:
            self._ticket = None

    # --- state

    @property
    def target(self) -> Any:
        """The target of the delivery; ``None`` without delivery, also after the target was gone."""
        return self._target

    @property
    def refused(self) -> frozenset[EventKind]:
        """The kinds that are refused towards senders."""
        return self._refused

    @property
    def counts(self) -> DeliveryCounts:
        """Numbers of notifications of targets."""
        return DeliveryCounts() if self._delivery is None else self._delivery.counts

    @property
    def dropped(self) -> int:
        """Number of events that were dropped because the box was full. Raises as :attr:`box`."""
        return self.slot.dropped()

    def __len__(self) -> int:
        """Return the number of stored events that were not taken or delivered yet."""
        return self.slot.size()

    def __bool__(self) -> bool:
        """Return ``True``, also when it is empty."""
        return True

    def _ended(self) -> MessagingError | None:
        """Return why the registration has ended; ``None`` before."""
        if self._end is None and self.lease.is_ended:
            if self.lease.end is LeaseEnd.CLOSED:
                return ClosedError(f"{self._name}: closed")
            return UnknownLeaseError(f"{self._name}: the registration {self.id} has ended")
        return self._end

    def refuse_ended(self) -> None:
        """Raise why the registration has ended: ``UnknownLeaseError``; ``ClosedError`` if the mailbox is closed."""
        error = self._ended()
        if error is not None:
            raise error

    def restore(self, refused: Iterable[EventKind], target: Any) -> None:
        """Continue with the state of an earlier run. For the mailbox, before others know the registration."""
        self._refused = frozenset(refused)
        if target is not None:
            with self._lock:
                self._deliver_to(target, as_target(target))

    def end(self, error: MessagingError) -> Promise[None] | None:
        """End the registration: waiting iterators fail with ``error``.

        Returns:
            The promise that no target has events any more; ``None`` if delivery was never enabled.
        """
        with self._lock:
            if self._end is None and self._iterator is not None and isinstance(error, ClosedError):
                self._iterator.surrender()
            self._end = self._end or error
            delivery = self._delivery
        self._fetches.wake()
        return None if delivery is None else delivery.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<MailboxRegistration {self.id}>"


def _soon(what: str, function: Callable[[], object]) -> Promise[None]:
    """Call a function on a worker thread; return the promise that it has returned."""
    promise: Promise[None] = Promise(what)

    def run() -> None:
        try:
            function()
        except MessagingError as error:
            promise.reject(error)
        else:
            promise.resolve(None)

    workers().submit(run)
    return promise


def _kind(value: object) -> EventKind:
    if isinstance(value, tuple) and len(value) == 2:
        return check_kind(*value)
    raise ArgumentError(f"a kind of event must be a registration, or (source, id), not {value!r:.80}")

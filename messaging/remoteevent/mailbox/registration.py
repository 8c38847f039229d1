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
from typing import Any

from messaging.environment.signals import on_failure
from messaging.errors import (
    ClosedError,
    ListenerGoneError,
    MessagingError,
    UnknownEventError,
    UnknownLeaseError,
)
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Promise, refuse_in_loop, workers
from messaging.leases import GrantedLease, LeaseEnd
from messaging.remoteevent.delivery import DeliveryCounts, EventDelivery, RetryPolicy
from messaging.remoteevent.event import EventKind, EventRegistration, RemoteEvent, as_kind
from messaging.remoteevent.listener import BatchListener, EventTarget, Outcome, as_target, settled
from messaging.remoteevent.mailbox.box import Box, BoxOptions, Keep
from messaging.remoteevent.mailbox.iterator import Pulling, RemoteEventIterator, checked_most
from messaging.remoteevent.mailbox.open_boxes import BoxSlot, OpenBoxes

logger = SafeLog(__name__)


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
        registration = self.registration
        error = registration.ended()
        if error is not None:
            if not isinstance(error, ClosedError):
                error = ListenerGoneError(f"{registration.title}: the registration {registration.id} has ended")
            return settled([error])
        refused = registration.refused
        if refused:
            source, event_id = kind = events[0].kind
            if kind in refused:
                return settled(
                    [UnknownEventError(f"{registration.title}: event {event_id!r} of {source!r:.80} was refused")]
                )
            count = next((at for at, each in enumerate(events) if each.kind in refused), len(events))
            events = events[:count]
        slot = registration.slot
        try:
            box = slot.acquire()
            with on_failure(slot.release):
                promise = box.store(events)
        except MessagingError as error:
            return settled([error])
        promise.listen(slot.release)
        return promise


class Pushing:
    """The delivery of the events of one registration to its target. Thread safe.

    It is the ``EventQueue`` of the delivery: the box, without the kinds that the target refused.

    Args:
        registration: the registration.
        persist: stores its target and its refused kinds. Raises ``JournalError``, ``ClosedError``.
        retry: for failed notifications.

    Attributes:
        changing: held while the mode changes, on the disk as well. Acquired before the lock of the registration.
        target: gets the events; ``None`` without delivery.
        refused: kinds that are refused towards senders.
    """

    def __init__(
        self,
        registration: MailboxRegistration,
        persist: Callable[[MailboxRegistration, Any, frozenset[EventKind]], object],
        retry: RetryPolicy,
    ) -> None:
        self._registration = registration
        self._persist = persist
        self._retry = retry
        self.changing = threading.Lock()
        # --- guarded by the lock of the registration
        self.target: Any = None
        self.refused: frozenset[EventKind] = frozenset()
        self.delivery: EventDelivery | None = None
        #: rises with each call that enables delivery
        self._enabled = 0
        # --- of the thread of the delivery
        self._tickets: list[int] = []

    @property
    def is_busy(self) -> bool:
        """Whether a batch is with the target."""
        return self.delivery is not None and self.delivery.is_busy

    def peek(self, most: int) -> list[RemoteEvent]:
        """See ``EventQueue``."""
        registration = self._registration
        with registration.slot.using() as box:
            while True:
                entries = box.first(most)
                refused = self.refused
                wanted = [each for each in entries if each[1].kind not in refused] if refused else entries
                if wanted or not entries:
                    break
                with registration.lock:
                    if self.target is None:
                        return []
                    if self.refused is refused:  # otherwise delivery has changed meanwhile
                        box.acknowledge(entries[-1][0])
        self._tickets = [ticket for ticket, _ in wanted]
        return [event for _, event in wanted]

    def settle(self, count: int) -> None:
        """See ``EventQueue``."""
        if count:
            with self._registration.slot.using() as box:
                box.acknowledge(self._tickets[count - 1])
            del self._tickets[:count]

    def enable(self, target: Any, found: EventTarget) -> None:
        """Store a target, and deliver to it. Raises as :meth:`MailboxRegistration.enable_delivery`."""
        registration = self._registration
        with self.changing:
            registration.refuse_ended()
            self._persist(registration, target, frozenset())
            with registration.lock:
                registration.refuse_ended()
                registration.pulling.end()
                self.refused = frozenset()
                self.deliver_to(target, found)
        registration.pulling.wake_soon()

    def deliver_to(self, target: Any, found: EventTarget) -> None:
        """Begin delivery. With the lock of the registration."""
        registration = self._registration
        is_same = self.target is not None and (self.target is target or self.target == target)
        self.target = target
        self._enabled += 1
        if self.delivery is None:
            self.delivery = EventDelivery(
                f"{registration.title} {registration.id}",
                found,
                self,
                policy=self._retry,
                on_unknown_event=self._refuse_kind,
                on_gone=self._note_gone,
                lease=registration.lease,
                is_enabled=False,
            )
        self.delivery.enable(None if is_same else found)

    def restore(self, refused: Iterable[EventKind], target: Any) -> None:
        """Continue with the state of an earlier run. For the mailbox, before others know the registration."""
        self.refused = frozenset(refused)
        if target is not None:
            with self._registration.lock:
                self.deliver_to(target, as_target(target))

    def stop(self) -> None:
        """End delivery. With the lock for changes. Raises as :meth:`MailboxRegistration.disable_delivery`."""
        registration = self._registration
        if self.target is None:
            return
        refuse_in_loop("the disk of a mailbox", "call it on a worker thread")
        self._persist(registration, None, self.refused)
        with registration.lock:
            self.target = None
            if self.delivery is not None:
                registration.pulling.stopping = stopping = self.delivery.disable()
                stopping.listen(registration.pulling.wake_soon)

    def refuse(self, kinds: frozenset[EventKind]) -> None:
        """Store kinds that are refused towards senders. Raises as :meth:`MailboxRegistration.add_unknown_events`."""
        with self.changing:
            self._persist(self._registration, self.target, self.refused | kinds)
            with self._registration.lock:
                self.refused = self.refused | kinds

    def _note_gone(self, _error: MessagingError) -> None:
        """Note that delivery has stopped, because its target is gone. On a worker thread."""
        with self.changing:
            with self._registration.lock:
                is_stopped = self.delivery is not None and not self.delivery.is_enabled
                if self.target is None or not is_stopped or self._registration.ended() is not None:
                    return  # delivery was disabled, or enabled for another target
                self.target = None
            self._store_state("that its target is gone")

    def _refuse_kind(self, kind: EventKind) -> None:
        """Refuse a kind that the target does not know. On a worker thread."""
        enabled = self._enabled
        with self.changing:
            if self._enabled != enabled:  # delivery was enabled again, and the target that refused it may be another
                return
            with self._registration.lock:
                self.refused = self.refused | {kind}
            self._store_state(f"that its target refused {kind!r}")

    def _store_state(self, what: str) -> None:
        """Store the state, as far as possible. With the lock for changes."""
        registration = self._registration
        try:
            self._persist(registration, self.target, self.refused)
        except MessagingError as error:
            logger.warning(
                "%s: registration %s: %s is not stored: %s", registration.title, registration.id, what, error
            )


class MailboxRegistration:
    """A registration at a mailbox. Thread safe; get it with :meth:`EventMailbox.register`.

    Attributes:
        lease: the registration ends with it, and its events are deleted.
        keep: which events are kept.
        listener: give it to generators.
        options: what it has asked for. For the parts of the mailbox, as the following ones.
        title: of its mailbox, for the log and in errors.
        slot: the box, open or closed.
        lock: guards the state in memory.
        pulling, pushing: the two readers of the box.
    """

    lease: GrantedLease

    def __init__(
        self,
        options: BoxOptions,
        boxes: OpenBoxes,
        open_box: Callable[[MailboxRegistration], Box],
        path_of: Callable[[str], Path],
        persist: Callable[[MailboxRegistration, Any, frozenset[EventKind]], object],
        refuse_loop: Callable[[Any], object],
        retry: RetryPolicy,
        name: str,
    ) -> None:
        self.options = options
        self.keep: Keep = options.keep
        self._refuse_loop = refuse_loop
        self.listener = MailboxListener(self)
        self.slot = BoxSlot(
            boxes,
            lambda: open_box(self),
            self.refuse_ended,
            lambda: path_of(self.id).exists(),
            # a reader has tickets, which a box of the latest events does not know when it is opened again
            lambda: self.keep != "all" and (self.pulling.ticket is not None or self.pushing.is_busy),
        )
        self.title = name
        self.lock = threading.RLock()  # guards the following, and what its readers say
        self._end: MessagingError | None = None
        self.pulling = Pulling(self.slot, self.lock, self.ended)
        self.pushing = Pushing(self, persist, retry)

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

    def note_stored(self, _channels: Sequence[str]) -> None:
        """Deliver what was stored. On the thread that wrote it; quick."""
        delivery = self.pushing.delivery
        if delivery is not None:
            delivery.wake()
        if self.pulling.is_waiting:
            self.pulling.wake_soon()

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
        found = self._checked(target)
        refuse_in_loop("the disk of a mailbox", "`await` enable_delivery_soon()")
        self.pushing.enable(target, found)

    def enable_delivery_soon(self, target: Any) -> Promise[None]:
        """As :meth:`enable_delivery`, for event loops: return the promise that it has returned.

        A coroutine function runs on the event loop that runs where this is called.
        """
        if target is None:
            return _soon("disable delivery", self.disable_delivery)
        found = self._checked(target)
        return _soon("enable delivery", lambda: self.pushing.enable(target, found))

    def _checked(self, target: Any) -> EventTarget:
        """Return what events are passed to; raise why they cannot be passed to a target."""
        self.refuse_ended()
        self._refuse_loop(target)
        return as_target(target)

    def disable_delivery(self) -> None:
        """Store events only. Idempotent. An iterator stays valid.

        Raises:
            UnknownLeaseError: the registration has ended.
            JournalError, ClosedError, WouldBlockError: as :meth:`enable_delivery`.
        """
        self.refuse_ended()
        with self.pushing.changing:
            self.pushing.stop()

    def add_unknown_events(self, kinds: Iterable[EventRegistration | EventKind]) -> None:
        """Refuse events of these kinds towards senders from now on, until delivery is enabled again.

        Raises:
            ArgumentError, InvalidEventError: a kind is not a registration, nor (source, id).
            UnknownLeaseError: the registration has ended.
            JournalError, ClosedError, WouldBlockError: as :meth:`enable_delivery`.
        """
        self.refuse_ended()
        found = frozenset(map(as_kind, kinds))
        refuse_in_loop("the disk of a mailbox", "call it on a worker thread")
        self.pushing.refuse(found)

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
            made.append(RemoteEventIterator(partial(self.pulling.fetch, token), self.pulling.acknowledge, token=token))
            return made[0]

        self.begin_iterator(make)
        return made[0]

    def begin_iterator(self, make: Callable[[str], RemoteEventIterator | None] = lambda _token: None) -> str:
        """Begin to pull; return the token of the iterator, of which ``make`` may make one. As :meth:`remote_events`."""
        self.refuse_ended()
        with self.pushing.changing:
            self.pushing.stop()
            with self.lock:
                self.refuse_ended()
                token = self.pulling.begin(make)
        self.pulling.wake_soon()
        return token

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
        found = self.pulling.fetch(token, None, len(self) if most is None else most, 0.0).result()
        if found:
            self.pulling.fetch(token, found[-1][0], 0, 0.0).result()
        return [event for _, event in found]

    # --- state

    @property
    def target(self) -> Any:
        """The target of the delivery; ``None`` without delivery, also after the target was gone."""
        return self.pushing.target

    @property
    def refused(self) -> frozenset[EventKind]:
        """The kinds that are refused towards senders."""
        return self.pushing.refused

    @property
    def counts(self) -> DeliveryCounts:
        """Numbers of notifications of targets."""
        delivery = self.pushing.delivery
        return DeliveryCounts() if delivery is None else delivery.counts

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

    def ended(self) -> MessagingError | None:
        """Return why the registration has ended; ``None`` before."""
        if self._end is None and self.lease.is_ended:
            if self.lease.end is LeaseEnd.CLOSED:
                return ClosedError(f"{self.title}: closed")
            return UnknownLeaseError(f"{self.title}: the registration {self.id} has ended")
        return self._end

    def refuse_ended(self) -> None:
        """Raise why the registration has ended: ``UnknownLeaseError``; ``ClosedError`` if the mailbox is closed."""
        error = self.ended()
        if error is not None:
            raise error

    def end(self, error: MessagingError) -> Promise[None] | None:
        """End the registration: waiting iterators fail with ``error``.

        Returns:
            The promise that no target has events any more; ``None`` if delivery was never enabled.
        """
        with self.lock:
            if self._end is None and isinstance(error, ClosedError):
                self.pulling.surrender()
            self._end = self._end or error
            delivery = self.pushing.delivery
        self.pulling.wake()
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

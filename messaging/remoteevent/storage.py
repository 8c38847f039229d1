"""Where a generator keeps its numbers, its registrations and the events that wait: in memory, or on the disk.

The folder of a persistent generator holds::

    DIRECTORY/
      events/     journal of the generated events
      state/      source, registrations, prepared transactions, and the number of the last event of each kind

**Threads.** :meth:`Storage.add` runs with the lock of the generator, so that the order on the disk is that of the
numbers. Outcomes of writes are noted on the thread of the journal."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.eventdata import from_portable, to_portable
from messaging.errors import ClosedError, DecodeError, JournalFullError, JournalUnreadableError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import clock, refuse_in_loop
from messaging.remoteevent.delivery import wait_for_all
from messaging.remoteevent.event import NumberedLine, check_event_id, decode_event, encode_event
from messaging.remoteevent.event_journal import WRITE_TIMEOUT, Checkpoint, EventJournal, channel_of, record_of
from messaging.remoteevent.party import Party, PartyFolder

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.instance import Messaging
    from messaging.journal import Record
    from messaging.leases import GrantedLease, LeaseEnd
    from messaging.remoteevent.delivery import Delivery, EventQueue
    from messaging.remoteevent.event import EventId, RemoteEvent

logger = SafeLog(__name__)


class MemoryQueue:
    """A bounded queue of events in memory; an ``EventQueue``. When it is full, the oldest event is dropped.

    Any thread puts; one thread at a time reads.

    Args:
        limit: events that may wait.
        handback: of the registration; each event gets it when it is read.
    """

    def __init__(self, limit: int, handback: Any = None) -> None:
        self._limit = limit
        self._handback = handback
        self._lock = threading.Lock()  # guards the following
        self._events: deque[RemoteEvent] = deque()
        #: numbers of events that left the queue, and that had left it when the last peek, or settled part of it, ended
        self._left = self._read = 0

    def put(self, event: RemoteEvent) -> bool:
        """Add an event; return whether the oldest one was dropped for it."""
        with self._lock:
            is_full = len(self._events) >= self._limit
            if is_full:
                self._events.popleft()
                self._left += 1
            self._events.append(event)
        return is_full

    def peek(self, most: int) -> list[RemoteEvent]:
        """See ``EventQueue``."""
        with self._lock:
            self._read = self._left
            events = list(islice(self._events, most))
        if self._handback is None:
            return events
        return [event.with_handback(self._handback) for event in events]

    def settle(self, count: int) -> None:
        """See ``EventQueue``. Events that were dropped meanwhile count among the settled ones."""
        with self._lock:
            self._read += count
            while self._left < self._read and self._events:
                self._events.popleft()
                self._left += 1

    def __len__(self) -> int:
        return len(self._events)


class Interest:
    """One registration at a generator.

    Attributes:
        event_id: kind of the events, as registered.
        listener: as registered.
        handback: in the form in which it travels.
        after: sequence number of the last event before the registration.
        lease: of the registration; set when it is granted.
        delivery: passes the events to the listener; set when it begins.
        queue: of a generator without a disk.
    """

    __slots__ = ("after", "delivery", "event_id", "handback", "lease", "listener", "queue")

    lease: GrantedLease
    delivery: Delivery

    def __init__(self, event_id: EventId, listener: Any, handback: Any, after: int = 0) -> None:
        self.event_id = event_id
        self.listener = listener
        self.handback = handback
        self.after = after
        self.queue: MemoryQueue | None = None

    def stop(self) -> None:
        """Stop the delivery. A lease may end before its delivery has begun."""
        delivery: Delivery | None = getattr(self, "delivery", None)
        if delivery is not None:
            delivery.close()


#: continues the lease of a registration of an earlier run, with the callback for its end
Grant = Callable[[Callable[["LeaseEnd"], Any]], "GrantedLease"]


class Storage:
    """The state of one generator, in memory. Subclasses keep it elsewhere as well.

    The generator calls :meth:`queue` and :meth:`add` with its lock; the other methods without.

    Args:
        source: of the generator.
        max_pending: events that wait for one listener.
    """

    def __init__(self, source: str, max_pending: int = 0) -> None:
        self.source = source
        self._max_pending = max_pending

    def check(self, interest: Interest) -> None:
        """Raise ``ArgumentError`` if the registration cannot be kept."""

    def queue(self, interest: Interest) -> EventQueue:
        """Return the events that wait for a registration, whose lease is granted."""
        interest.queue = MemoryQueue(self._max_pending, interest.handback)
        return interest.queue

    def keep(self, interest: Interest) -> None:
        """Keep a registration over a restart. Raises ``JournalError``."""

    def forget(self, interest: Interest) -> None:
        """Forget a registration that has ended."""

    def prepare(self, event: RemoteEvent) -> Any:
        """Return what :meth:`add` needs of an event, beside its number. Raises ``InvalidEventError``."""
        return NumberedLine(event) if event.type_name is not None else None

    def add(
        self,
        event: RemoteEvent,
        prepared: Any,
        interests: tuple[Interest, ...],
        _promise: Promise[int],
        _message_id: str | None,
        /,
    ) -> None:
        """Add a numbered event for these registrations. It must be quick.

        Raises:
            JournalFullError, ClosedError: it is not added; its number is free.
        """
        if prepared is not None:
            event.keep_line(prepared.numbered(event.sequence_number))
        for each in interests:
            if each.queue is not None and each.queue.put(event):
                each.delivery.counts.overflowed += 1

    def added(self, interests: tuple[Interest, ...], promise: Promise[int], number: int) -> None:
        """Continue after :meth:`add`, without the lock."""
        promise.resolve(number)
        for each in interests:
            each.delivery.wake()

    def keep_transaction(self, name: str, events: list[RemoteEvent] | None) -> None:
        """Keep the events of a prepared transaction over a restart, or forget it. Raises ``JournalError``."""

    def transactions(self) -> Mapping[str, list[RemoteEvent]]:
        """Return the prepared transactions of earlier runs: their events that are not stored for listeners yet."""
        return {}

    def is_stored(self, _message_id: str, /) -> bool:
        """Return whether an event of such a transaction was published already, by its message id."""
        return False

    def recover(
        self,
        number: Callable[[EventId, int], object],
        interest: Callable[[Interest, Grant], object],
    ) -> None:
        """Pass on the numbers and the registrations of earlier runs."""

    def stop(self, stopped: Iterable[Promise[None]]) -> None:
        """Wait until the deliveries have stopped; end the leases of kept registrations."""


_SOURCE: Final = "source"
_REGISTRATION: Final = "registration "
_TRANSACTION: Final = "transaction "


class _Stored:
    """An event on its way to the disk; an ``Append`` of the journal."""

    __slots__ = ("_interests", "_number", "_promise", "_storage", "channel", "deadline", "message_id", "record")
    count = 1

    def __init__(
        self,
        storage: DurableStorage,
        channel: str,
        record: bytes,
        message_id: str | None,
        number: int,
        interests: tuple[Interest, ...],
        promise: Promise[int],
    ) -> None:
        self.channel = channel
        self.record = record
        self.message_id = message_id
        self.deadline = clock.monotonic() + WRITE_TIMEOUT
        self._storage = storage
        self._number = number
        self._interests = interests
        self._promise = promise

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        self._storage.note_stored(self, offset)
        self._promise.resolve(self._number)
        for each in self._interests:
            each.delivery.wake()

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        if isinstance(error, JournalFullError):
            self._storage._checkpoint.note_full()
        self._promise.reject(error)


class DurableStorage(Storage):
    """Keeps everything on the disk.

    Args:
        path: the folder.
        source: of the generator; ``None``: that of the earlier runs, or a generated one.
        max_bytes: bytes of the events.
        party: the generator, which is being opened.
        messaging, listeners: see :class:`~messaging.remoteevent.EventGenerator`.

    Raises:
        JournalUnreadableError: the folder belongs to a generator with another source.
        JournalError: the folder cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        source: str | None,
        max_bytes: int,
        party: Party,
        messaging: Messaging | None,
        listeners: Mapping[str, Any] | None,
    ) -> None:
        self._folder = PartyFolder(path, party, messaging, listeners)
        self._state, self._leases = self._folder.table, self._folder.leases
        known = self._state.get(_SOURCE)
        if known is None:
            known = source or generated_source()
            self._state.put(_SOURCE, known)
        elif source is not None and source != known:
            raise JournalUnreadableError(
                str(self._folder.path), f"it belongs to the generator {known!r:.100}, not {source!r:.100}"
            )
        super().__init__(known)
        self._numbers: dict[EventId, int] = {}
        self._until = 0
        self._prepared: dict[str, list[RemoteEvent]] = {}
        #: message ids of events of transactions that are on the disk
        self._committed: dict[str, None] = {}
        self._events = EventJournal(self._folder.path / "events", max_bytes=max_bytes, full="reject")
        party.resources.callback(self._events.journal.close)
        self._checkpoint = Checkpoint(self._events, self._state, self._snapshot)
        party.resources.callback(self._store_checkpoint)

    # --- registrations

    def check(self, interest: Interest) -> None:
        """See ``Storage``."""
        self._folder.reference(interest.listener)
        refuse_in_loop("the disk of a generator", "`await asyncio.to_thread(generator.register, ...)`")

    def queue(self, interest: Interest) -> EventQueue:
        """See ``Storage``."""
        channel = channel_of((self.source, interest.event_id))
        return self._events.queue(_position_of(interest.lease.id), channel, lambda event: _for(interest, event))

    def keep(self, interest: Interest) -> None:
        """See ``Storage``."""
        self._leases.keep(
            _REGISTRATION + interest.lease.id,
            interest.lease,
            {
                "id": interest.event_id,
                "handback": None if interest.handback is None else to_portable(interest.handback),
                "listener": self._folder.reference(interest.listener),
                "after": interest.after,
            },
        )

    def forget(self, interest: Interest) -> None:
        """See ``Storage``."""
        with contextlib.suppress(ClosedError):
            self._leases.forget(_REGISTRATION + interest.lease.id)
            self._events.forget(_position_of(interest.lease.id))

    # --- events

    def prepare(self, event: RemoteEvent) -> tuple[str, NumberedLine]:
        """See ``Storage``."""
        return channel_of(event.kind), NumberedLine(event)

    def add(
        self,
        event: RemoteEvent,
        prepared: Any,
        interests: tuple[Interest, ...],
        promise: Promise[int],
        message_id: str | None,
        /,
    ) -> None:
        """See ``Storage``."""
        channel, line = prepared
        number = event.sequence_number
        record = record_of(channel, line.numbered(number), message_id or "")
        self._numbers[event.id] = number  # first: a checkpoint that has the record has the number
        try:
            self._events.put(_Stored(self, channel, record, message_id, number, interests, promise))
        except MessagingError as error:
            self._numbers[event.id] = number - 1
            if isinstance(error, JournalFullError):
                self._checkpoint.note_full()
            raise

    def added(self, interests: tuple[Interest, ...], promise: Promise[int], number: int) -> None:
        """See ``Storage``."""

    def note_stored(self, stored: _Stored, offset: int) -> None:
        """Note that a record is on the disk. On the thread of the journal."""
        self._events.note((stored.channel,), offset)
        if stored.message_id is not None:
            self._committed[stored.message_id] = None
        self._until = offset + 1
        self._checkpoint.note(1, len(stored.record))

    # --- transactions

    def keep_transaction(self, name: str, events: list[RemoteEvent] | None) -> None:
        """See ``Storage``."""
        if events is None:
            self._state.remove(_TRANSACTION + name)
        else:
            self._state.put(_TRANSACTION + name, [encode_event(event).decode() for event in events])

    def transactions(self) -> Mapping[str, list[RemoteEvent]]:
        """See ``Storage``."""
        return self._prepared

    def is_stored(self, message_id: str, /) -> bool:
        """See ``Storage``."""
        return message_id in self._committed

    # --- opening and closing

    def recover(self, number: Callable[[EventId, int], object], interest: Callable[[Interest, Grant], object]) -> None:
        """See ``Storage``."""
        self._checkpoint.recover(self._restore, self._recover_record)
        for event_id, last in self._numbers.items():
            number(event_id, last)
        for key, grant, values in self._leases.kept(_REGISTRATION):
            try:
                handback = None if values["handback"] is None else from_portable(values["handback"])
                listener = self._folder.listener(values["listener"])
                found = Interest(check_event_id(values["id"]), listener, handback, int(values["after"]))
            except (KeyError, TypeError, ValueError) as error:
                logger.warning("generator '%s': %r is not a registration: %s", self.source, key, error)
                continue
            interest(found, grant)
        # a crash may have come between two steps of registering
        known = [_position_of(key.removeprefix(_REGISTRATION)) for key in self._state.keys_with(_REGISTRATION)]
        self._events.remove_others(_position_of(""), known)
        for key, lines in self._state.items():
            if key.startswith(_TRANSACTION):
                self._prepared[key.removeprefix(_TRANSACTION)] = [decode_event(line.encode()) for line in lines]

    def _restore(self, value: Any) -> None:
        try:
            self._numbers = {check_event_id(event_id): int(number) for event_id, number in value["numbers"]}
            self._committed = dict.fromkeys(value["committed"])
        except (KeyError, TypeError, ValueError) as error:
            raise DecodeError(f"not the state of a generator: {type(error).__name__}") from None

    def _recover_record(self, record: Record) -> None:
        if record.message_id is not None:
            self._committed[record.message_id] = None
        self._until = record.offset + 1
        try:
            event = decode_event(record.payload)
        except DecodeError as error:
            logger.warning("generator '%s': record %d holds no event: %s", self.source, record.offset, error)
            return
        self._numbers[event.id] = max(self._numbers.get(event.id, 0), event.sequence_number)

    def _snapshot(self) -> tuple[Any, int]:
        until = self._until  # first: a number may belong to a later record, which does no harm
        prepared = {each.removeprefix(_TRANSACTION) for each in self._state.keys_with(_TRANSACTION)}
        for each in [*self._committed]:
            if each.split("/")[0] not in prepared:
                self._committed.pop(each, None)
        return {"numbers": [[*each] for each in self._numbers.copy().items()], "committed": [*self._committed]}, until

    def stop(self, stopped: Iterable[Promise[None]]) -> None:
        """See ``Storage``."""
        wait_for_all(stopped)
        self._leases.close()

    def _store_checkpoint(self) -> None:
        """Store the state for the last time. Raises ``JournalError``."""
        try:
            self._checkpoint.store()
        except ClosedError:
            pass  # the table is closed already
        finally:
            self._checkpoint.close()


def generated_source() -> str:
    """Return a source for a generator that has none."""
    return f"generator-{secrets.token_hex(8)}"


def _position_of(lease_id: str) -> str:
    """Return the name of the position of a registration."""
    return f"lease {lease_id}"


def _for(interest: Interest, event: RemoteEvent) -> RemoteEvent | None:
    """Return an event as the listener of a registration gets it; ``None`` for one from before its registration."""
    if event.sequence_number <= interest.after:
        return None
    return event if interest.handback is None else event.with_handback(interest.handback)

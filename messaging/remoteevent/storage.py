"""Where a generator keeps its numbers, its registrations and the events that wait: in memory, or on the disk.

The folder of a persistent generator holds::

    DIRECTORY/
      events/     journal of the generated events
      state/      source, registrations, prepared transactions, and the number of the last event of each kind

**Threads.** :meth:`Storage.add` runs with the lock of the generator, so that the order on the disk is that of the
numbers. Outcomes of writes are noted on the thread of the journal."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ClosedError, DecodeError, JournalFullError, JournalUnreadableError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, clock, refuse_in_loop
from messaging.journal import Record
from messaging.remoteevent.delivery import EventQueue, Interest, MemoryQueue, wait_for_all
from messaging.remoteevent.event import EventId, NumberedLine, RemoteEvent, check_event_id, decode_event, encode_event
from messaging.remoteevent.event_journal import WRITE_TIMEOUT, Checkpoint, channel_of, record_of
from messaging.remoteevent.party import REGISTRATION, EventFolder, Grant, Party

if TYPE_CHECKING:
    from messaging.instance import Messaging

logger = SafeLog(__name__)


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
_TRANSACTION: Final = "transaction "


class EventAppend:
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
            self._storage._checkpoint.note(0, 0, is_full=True)
        self._promise.reject(error)


class DurableStorage(EventFolder, Storage):
    """Keeps everything on the disk; the registrations as the folder does.

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
        EventFolder.__init__(self, path, party, messaging, listeners, max_bytes=max_bytes, full="reject")
        known = self.table.get(_SOURCE)
        if known is None:
            known = source or generated_source()
            self.table.put(_SOURCE, known)
        elif source is not None and source != known:
            raise JournalUnreadableError(
                str(self.path), f"it belongs to the generator {known!r:.100}, not {source!r:.100}"
            )
        Storage.__init__(self, known)
        self._numbers: dict[EventId, int] = {}
        self._until = 0
        self._prepared: dict[str, list[RemoteEvent]] = {}
        #: message ids of events of transactions that are on the disk
        self._committed: dict[str, None] = {}
        self._checkpoint = Checkpoint(self.events, self.table, self._snapshot)
        party.resources.callback(self._store_checkpoint)

    # --- registrations

    def check(self, interest: Interest) -> None:
        """See ``Storage``."""
        self.reference(interest.listener)
        refuse_in_loop("the disk of a generator", "`await asyncio.to_thread(generator.register, ...)`")

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
            self.events.put(EventAppend(self, channel, record, message_id, number, interests, promise))
        except MessagingError as error:
            self._numbers[event.id] = number - 1
            if isinstance(error, JournalFullError):
                self._checkpoint.note(0, 0, is_full=True)
            raise

    def added(self, interests: tuple[Interest, ...], promise: Promise[int], number: int) -> None:
        """See ``Storage``."""

    def note_stored(self, stored: EventAppend, offset: int) -> None:
        """Note that a record is on the disk. On the thread of the journal."""
        self.events.note((stored.channel,), offset)
        if stored.message_id is not None:
            self._committed[stored.message_id] = None
        self._until = offset + 1
        self._checkpoint.note(1, len(stored.record))

    # --- transactions

    def keep_transaction(self, name: str, events: list[RemoteEvent] | None) -> None:
        """See ``Storage``."""
        if events is None:
            self.table.remove(_TRANSACTION + name)
        else:
            self.table.put(_TRANSACTION + name, [encode_event(event).decode() for event in events])

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
        for found, grant in self.interests(self.source):
            interest(found, grant)
        # a crash may have come between two steps of registering
        known = [key.removeprefix(REGISTRATION) for key in self.table.keys_with(REGISTRATION)]
        self.remove_others(known)
        for key, lines in self.table.items():
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
        prepared = {each.removeprefix(_TRANSACTION) for each in self.table.keys_with(_TRANSACTION)}
        for each in [*self._committed]:
            if each.split("/")[0] not in prepared:
                self._committed.pop(each, None)
        return {"numbers": [[*each] for each in self._numbers.copy().items()], "committed": [*self._committed]}, until

    def stop(self, stopped: Iterable[Promise[None]]) -> None:
        """See ``Storage``."""
        wait_for_all(stopped)
        self.leases.close()

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

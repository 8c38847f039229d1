"""Where a persistent generator keeps its numbers, its registrations and the events that wait: on the disk.

A folder holds::

    DIRECTORY/
      events/     journal of the generated events
      state/      source, registrations, prepared transactions, and the number of the last event of each kind

**Threads.** :meth:`DurableStorage.add` runs with the lock of the generator, so that the order on the disk is that of
the numbers. Outcomes of writes are noted on the thread of the journal.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.eventdata import from_portable, to_portable
from messaging.errors import ClosedError, DecodeError, JournalFullError, JournalUnreadableError, MessagingError
from messaging.errors.checks import check_path
from messaging.errors.text import SafeLog
from messaging.execution import clock, refuse_in_loop
from messaging.journal import JournalTable
from messaging.remoteevent.delivery import wait_for_all
from messaging.remoteevent.event import check_event_id
from messaging.remoteevent.event_journal import WRITE_TIMEOUT, Checkpoint, EventJournal, channel_of, record_of
from messaging.remoteevent.interests import Interest
from messaging.remoteevent.kept_leases import KeptLeases
from messaging.remoteevent.kept_listeners import KeptListeners
from messaging.remoteevent.layout import NumberedLine, decode_event, encode_event

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.instance import Messaging
    from messaging.journal import Record
    from messaging.leases import Landlord
    from messaging.remoteevent.delivery import EventQueue
    from messaging.remoteevent.event import EventId, RemoteEvent
    from messaging.remoteevent.storage import Grant

logger = SafeLog(__name__)

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
            self._storage.note_full()
        self._promise.reject(error)


class DurableStorage:
    """Keeps everything on the disk; a ``Storage``.

    Args:
        path: the folder.
        source: of the generator; ``None``: that of the earlier runs, or a generated one.
        max_bytes: bytes of the events.
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
        messaging: Messaging | None,
        listeners: Mapping[str, Any],
        landlord: Landlord,
    ) -> None:
        folder = check_path("path", path).expanduser()
        self._kept = KeptListeners(messaging, listeners)
        self._numbers: dict[EventId, int] = {}
        self._until = 0
        self._prepared: dict[str, list[RemoteEvent]] = {}
        #: message ids of events of transactions that are on the disk
        self._committed: dict[str, None] = {}
        with contextlib.ExitStack() as resources:
            self._state = JournalTable(folder / "state")
            resources.callback(self._state.close)
            known = self._state.get(_SOURCE)
            if known is None:
                known = source or f"generator-{secrets.token_hex(8)}"
                self._state.put(_SOURCE, known)
            elif source is not None and source != known:
                raise JournalUnreadableError(
                    str(folder), f"it belongs to the generator {known!r:.100}, not {source!r:.100}"
                )
            self.source: str = known
            self._events = EventJournal(folder / "events", max_bytes=max_bytes, full="reject")
            resources.callback(self._events.close)
            self._leases = KeptLeases(self._state, landlord)
            self._checkpoint = Checkpoint(self._events, self._state, self._snapshot)
            resources.pop_all()

    # --- registrations

    def check(self, interest: Interest) -> None:
        """See ``Storage``."""
        self._kept.reference(interest.listener)
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
                "listener": self._kept.reference(interest.listener),
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
                self.note_full()
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

    def note_full(self) -> None:
        """Make room if it is kept without need. On any thread; quick."""
        self._checkpoint.note_full()

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
                listener = self._kept.listener(values["listener"], self._events.journal.path)
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

    def close(self, stopped: Iterable[Promise[None]] = ()) -> None:
        """See ``Storage``."""
        wait_for_all(stopped)
        self._leases.close()
        try:
            self._checkpoint.store()
        except ClosedError:
            return
        finally:
            self._checkpoint.close()
            self._state.close()
            self._events.close()


def _position_of(lease_id: str) -> str:
    """Return the name of the position of a registration."""
    return f"lease {lease_id}"


def _for(interest: Interest, event: RemoteEvent) -> RemoteEvent | None:
    """Return an event as the listener of a registration gets it; ``None`` for one from before its registration."""
    if event.sequence_number <= interest.after:
        return None
    return event if interest.handback is None else event.with_handback(interest.handback)

"""The stored events of one registration of a mailbox, on the disk.

Two classes with the same methods: :class:`QueueBox` keeps all events, in order; :class:`LatestBox` keeps the newest
event of each kind. Readers take events from the front, and acknowledge them by their *tickets*, numbers that rise in
the order of the events. So any reader may follow on another one.

**Threads.** Any thread may use a box. Its lock guards the entries; no code of the application runs under it.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from messaging.errors import BoundReachedError, ClosedError, DecodeError, MessagingError
from messaging.execution import Promise, workers
from messaging.remoteevent.event_journal import Checkpoint, EventJournal, StoredBatch, channel_of
from messaging.remoteevent.layout import decode_event, encode_event
from messaging.remoteevent.received import ReceivedEvents, stream_of
from messaging.remoteevent.targets import settled
from messaging.text import SafeLog

if TYPE_CHECKING:
    from pathlib import Path

    from messaging.journal import JournalTable, Record
    from messaging.remoteevent.event import EventKind, RemoteEvent
    from messaging.remoteevent.listener import Outcome

logger = SafeLog(__name__)

#: what happens to an event that has no room
BoxFull = Literal["refuse", "drop_oldest", "drop_newest"]
BOX_FULL: Final = ("refuse", "drop_oldest", "drop_newest")
#: records that are read at a time
_READ: Final = 1000
#: records beyond twice the entries from which on the journal of a ``LatestBox`` is compacted
_SLACK: Final = 1000
_CURSOR: Final = "box"

#: a ticket, and its event
Entry = tuple[int, "RemoteEvent"]


class Box(Protocol):
    """Stored events. Thread safe."""

    #: numbers of events since the mailbox was opened: stored; arrived again; skipped because their records are damaged
    stored: int
    duplicates: int
    damaged: int

    @property
    def dropped(self) -> int:
        """Number of events that were dropped because the box was full, since it was made or, of some, opened."""

    def store(self, events: Sequence[RemoteEvent]) -> Promise[list[Outcome]]:
        """Store events; see :class:`~messaging.remoteevent.listener.EventTarget`."""

    def first(self, most: int) -> list[Entry]:
        """Return the first events, in order, without removing them. Raises ``JournalError``, ``ClosedError``."""

    def acknowledge(self, ticket: int) -> None:
        """Remove the events up to a ticket. Raises ``JournalError``, ``ClosedError``."""

    def __len__(self) -> int: ...

    def close(self) -> None:
        """Close the files. Idempotent. Raises ``JournalError``."""

    def abandon(self) -> None:
        """Close the files without storing a state: they are about to be deleted."""


class _BoxBase:
    """What both boxes have in common: the journal, the bound, and the events that arrive again."""

    def __init__(
        self,
        path: Path,
        state: JournalTable,
        name: str,
        *,
        max_events: int | None,
        max_bytes: int | None,
        full: BoxFull,
        changed: Callable[[], object],
    ) -> None:
        self._max_events = max_events
        self._full = full
        self._changed = changed
        self._lock = threading.Lock()  # guards the following, and the entries of the subclass
        self._received = ReceivedEvents()
        self._until = 0
        #: events on their way to the disk
        self._pending = 0
        self._is_closed = False
        self.stored = self.duplicates = self.damaged = 0
        self._dropped = 0
        self._events = EventJournal(
            path, max_bytes=max_bytes, full="drop_oldest" if full == "drop_oldest" else "reject"
        )
        try:
            self._cursor = self._events.journal.cursor(_CURSOR)
            self._checkpoint = Checkpoint(self._events.journal, state, self._snapshot, f"box {name}")
            self._checkpoint.recover(self._received.restore, self._recover_record)
        except BaseException:
            self._events.close()
            raise

    @property
    def dropped(self) -> int:
        """Number of events that were dropped because the box was full."""
        return self._dropped + self._events.journal.dropped

    def _recover_record(self, record: Record) -> None:
        try:
            event = decode_event(record.payload)
        except DecodeError:
            return  # reading the box counts it
        self._received.add(stream_of(event), event)
        self._until = record.offset + 1

    def _snapshot(self) -> tuple[Any, int]:
        with self._lock:
            return self._received.to_value(), self._until

    def store(self, events: Sequence[RemoteEvent]) -> Promise[list[Outcome]]:
        """See :class:`Box`."""
        prepared: list[tuple[RemoteEvent, str, bytes]] = []
        failure: MessagingError | None = None
        for event in events:
            try:
                prepared.append((event, stream_of(event), encode_event(event)))
            except MessagingError as error:
                failure = error
                break
        if failure is not None and not prepared:
            return settled([failure])
        plan: list[bool] = []  # whether each event is stored; otherwise it is acknowledged only
        with self._lock:
            if self._is_closed:
                return settled([ClosedError("the mailbox is closed")])
            full = None
            coming: set[tuple[str, int]] = set()
            for event, stream, _ in prepared:
                key = stream, event.sequence_number
                if key in coming or self._received.has(*key):
                    self.duplicates += 1
                    plan.append(False)
                elif self._full == "drop_oldest" or self._has_room(event):
                    self._pending += 1
                    coming.add(key)
                    plan.append(True)
                elif self._full == "drop_newest":
                    self._dropped += 1
                    self._received.add(stream, event)
                    plan.append(False)
                else:
                    full = BoundReachedError(f"the mailbox is full: {self._max_events} events are stored")
                    break
            prepared = prepared[: len(plan)]
            count = len(prepared) + (full is not None)
            batch: StoredBatch
            batch = StoredBatch(count, lambda outcomes: self._note_stored(prepared, plan, outcomes, batch.offsets))
            for index, ((event, _, line), is_stored) in enumerate(zip(prepared, plan, strict=True)):
                if is_stored:
                    self._events.store(batch, index, channel_of(event.kind), line, self._message_id(event))
        for index, is_stored in enumerate(plan):
            if not is_stored:
                batch.note(index, None)
        if full is not None:
            batch.note(len(plan), full)
        batch.seal()
        return batch.promise

    def _has_room(self, event: RemoteEvent) -> bool:
        """Return whether there is room for an event. With the lock."""
        raise NotImplementedError

    def _drop_oldest(self, most: int) -> int:
        """Drop events until there are at most ``most``; return how many were dropped. With the lock."""
        raise NotImplementedError

    def _message_id(self, _event: RemoteEvent) -> str | None:
        """Return the message id of the record of an event. With the lock."""
        return None

    def _add(self, event: RemoteEvent, offset: int) -> None:
        """Add a stored event to the entries; offset -1: it could not be stored. With the lock."""

    def _note_stored(
        self,
        prepared: list[tuple[RemoteEvent, str, bytes]],
        plan: list[bool],
        outcomes: list[Outcome],
        offsets: list[int],
    ) -> None:
        """Note what is on the disk. On the thread that wrote it, or on the caller's."""
        with self._lock:
            for index, (event, stream, _) in enumerate(prepared):
                if plan[index]:
                    self._pending -= 1
                    is_stored = outcomes[index] is None
                    if is_stored:
                        self.stored += 1
                        self._received.add(stream, event)
                    self._add(event, offsets[index] if is_stored else -1)
            self._until = max(self._until, max(offsets, default=-1) + 1)
            if self._max_events is not None and self._full == "drop_oldest":
                self._dropped += self._drop_oldest(self._max_events)
        self._checkpoint.note(sum(plan))
        self._changed()

    def close(self) -> None:
        """See :class:`Box`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._checkpoint.store()
        finally:
            self._events.close()

    def abandon(self) -> None:
        """See :class:`Box`."""
        with self._lock:
            self._is_closed = True
        self._events.close()


class QueueBox(_BoxBase):
    """Keeps all events, in order. A ticket is the offset of a record."""

    def __init__(self, *args: Any, **options: Any) -> None:
        #: events that were read ahead, from the front of the box
        self._ready: deque[Entry] = deque()
        super().__init__(*args, **options)
        self._reading = threading.Lock()  # held while records are read: in order. Acquired before `_lock`

    def __len__(self) -> int:
        return self._cursor.behind

    def _has_room(self, event: RemoteEvent) -> bool:  # noqa: ARG002  # of a ``LatestBox`` it depends on the kind
        return self._max_events is None or self._cursor.behind + self._pending < self._max_events

    def _drop_oldest(self, most: int) -> int:
        excess = self._cursor.behind - most
        if excess <= 0:
            return 0
        self._cursor.commit(self._cursor.position + excess, wait=False)
        return excess

    def first(self, most: int) -> list[Entry]:
        """See :class:`Box`."""
        with self._reading:
            ready = self._ready
            position = self._cursor.position
            while ready and ready[0][0] < position:  # acknowledged, or dropped
                ready.popleft()
            while len(ready) < most:
                records = self._cursor.read(_READ)
                if not records:
                    break
                for record in records:
                    if record.offset < position:
                        continue
                    try:
                        ready.append((record.offset, decode_event(record.payload)))
                    except DecodeError as error:
                        self.damaged += 1
                        logger.warning("mailbox: record %d is skipped: %s", record.offset, error)
                        self._cursor.acknowledge(record.offset)
            return [*islice(ready, most)]

    def acknowledge(self, ticket: int) -> None:
        """See :class:`Box`."""
        with self._reading:
            self._cursor.commit(ticket + 1, wait=False)
            ready = self._ready
            while ready and ready[0][0] <= ticket:
                ready.popleft()


class _Latest:
    """The newest event of a kind."""

    __slots__ = ("event", "offset", "suppressed", "ticket")

    def __init__(self, event: RemoteEvent, suppressed: int, ticket: int, offset: int) -> None:
        self.event = event
        #: older events of the kind that were dropped for this one
        self.suppressed = suppressed
        self.ticket = ticket
        #: of its record
        self.offset = offset


class LatestBox(_BoxBase):
    """Keeps the newest event of each kind, with the number of the older ones that it took the place of.

    The entries are in memory; the journal has them as well, and older ones until it is compacted. The message id of a
    record is the number of suppressed events.

    Args:
        is_counting: whether events carry that number.
    """

    def __init__(self, *args: Any, is_counting: bool, **options: Any) -> None:
        self._is_counting = is_counting
        self._tickets = 0
        #: in the order of their tickets, which is that of their records
        self._latest: OrderedDict[EventKind, _Latest] = OrderedDict()
        #: events of each kind on their way to the disk
        self._coming: Counter[EventKind] = Counter()
        super().__init__(*args, **options)
        while records := self._cursor.read(_READ, most_bytes=2**22):
            for record in records:
                try:
                    event = decode_event(record.payload)
                except DecodeError as error:
                    self.damaged += 1
                    logger.warning("mailbox: record %d is skipped: %s", record.offset, error)
                else:
                    self._put(event, int(record.message_id or 0), record.offset)

    def __len__(self) -> int:
        return len(self._latest)

    def _has_room(self, event: RemoteEvent) -> bool:
        kind = event.kind
        return (
            self._max_events is None
            or kind in self._latest
            or kind in self._coming
            or len(self._latest.keys() | self._coming.keys()) < self._max_events
        )

    def _drop_oldest(self, most: int) -> int:
        excess = max(0, len(self._latest) - most)
        for _ in range(excess):
            self._latest.popitem(last=False)
        return excess

    def _message_id(self, event: RemoteEvent) -> str:
        kind = event.kind
        found = self._latest.get(kind)
        suppressed = (0 if found is None else found.suppressed + 1) + self._coming[kind]
        self._coming[kind] += 1
        return str(suppressed)

    def _add(self, event: RemoteEvent, offset: int) -> None:
        kind = event.kind
        self._coming[kind] -= 1
        if not self._coming[kind]:
            del self._coming[kind]
        if offset >= 0:
            found = self._latest.get(kind)
            self._put(event, 0 if found is None else found.suppressed + 1, offset)

    def _put(self, event: RemoteEvent, suppressed: int, offset: int) -> None:
        """Make an event the newest one of its kind, unless that has a higher number. With the lock."""
        kind = event.kind
        found = self._latest.get(kind)
        if found is not None and found.event.sequence_number > event.sequence_number:
            event = found.event  # it arrived late: its record is passed with that of the newest one
        self._tickets += 1
        self._latest[kind] = _Latest(event, suppressed, self._tickets, offset)
        self._latest.move_to_end(kind)

    def first(self, most: int) -> list[Entry]:
        """See :class:`Box`."""
        with self._lock:
            if self._is_closed:
                raise ClosedError("the mailbox is closed")
            found = [*islice(self._latest.values(), most)]
            if self._is_counting:
                return [(each.ticket, each.event.suppressing(each.suppressed)) for each in found]
            return [(each.ticket, each.event) for each in found]

    def acknowledge(self, ticket: int) -> None:
        """See :class:`Box`."""
        with self._lock:
            if self._is_closed:
                raise ClosedError("the mailbox is closed")
            offset = -1
            while self._latest:
                kind, first = next(iter(self._latest.items()))
                if first.ticket > ticket:
                    break
                del self._latest[kind]
                offset = first.offset
            if offset >= 0:
                self._cursor.commit(offset + 1, wait=False)

    def compact(self) -> None:
        """Append the entries again if most records are out of date, and pass over the records before them."""
        with self._lock:
            if self._is_closed or self._pending or self._cursor.behind <= 2 * len(self._latest) + _SLACK:
                return
            entries = [*self._latest.items()]
            if not entries:
                self._cursor.commit(self._events.journal.end, wait=False)
                return
            batch: StoredBatch
            batch = StoredBatch(len(entries), lambda outcomes: self._compacted(entries, outcomes, batch.offsets))
            for index, (kind, each) in enumerate(entries):
                line = encode_event(each.event)
                self._events.store(batch, index, channel_of(kind), line, str(each.suppressed))
        batch.seal()

    def _compacted(self, entries: list[tuple[EventKind, _Latest]], outcomes: list[Outcome], offsets: list[int]) -> None:
        if any(each is not None for each in outcomes):
            return  # the older records hold; the next compaction tries again
        with self._lock:
            for (_, each), offset in zip(entries, offsets, strict=True):
                each.offset = offset
            alive = [each.offset for kind, each in entries if self._latest.get(kind) is each]
            self._cursor.commit(min(alive, default=max(offsets) + 1), wait=False)

    def _note_stored(self, *args: Any) -> None:
        super()._note_stored(*args)
        if self._cursor.behind > 2 * len(self._latest) + _SLACK:
            workers().submit(self.compact)

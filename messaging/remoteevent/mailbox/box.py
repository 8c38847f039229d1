"""The stored events of one registration of a mailbox, on the disk.

A :class:`QueueBox` keeps all events, in order, and a :class:`LatestBox` the newest event of each kind (EV.3.3). Readers
take events from the front, and acknowledge them by their *tickets*, numbers that rise in the order of the events. So
any reader may follow on another one.

**Threads.** Any thread may use a box. Its lock guards the entries; no code of the application runs under it."""

from __future__ import annotations

import heapq
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from messaging.environment.signals import on_failure
from messaging.errors import BoundReachedError, ClosedError, DecodeError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import clock, workers
from messaging.journal import JournalTable
from messaging.remoteevent.event import EventKind, RemoteEvent, decode_event, encode_event
from messaging.remoteevent.event_journal import EventJournal, channel_of, record_of
from messaging.remoteevent.intake import EventIntake

logger = SafeLog(__name__)


#: what happens to an event that has no room
BoxFull = Literal["refuse", "drop_oldest", "drop_newest"]
BOX_FULL: Final = ("refuse", "drop_oldest", "drop_newest")
#: which events a box keeps
Keep = Literal["all", "latest", "latest_and_count"]
KEEP: Final = ("all", "latest", "latest_and_count")
#: records that are read at a time
_READ: Final = 1000
_CURSOR: Final = "box"


def notices_of(name: str) -> str:
    """Return how the sources of a mailbox's own notices to a registration begin."""
    return f"mailbox/{name}/"


#: a ticket, and its event
Entry = tuple[int, "RemoteEvent"]


class BoxOptions(NamedTuple):
    """What a registration has asked for.

    Attributes:
        keep: which events are kept.
        max_events: bound of the stored events; ``None``: unlimited.
        full: what happens to an event that has no room.
    """

    keep: Keep
    max_events: int | None
    full: BoxFull


class Box(EventIntake):
    """Stored events. Thread safe.

    Args:
        path: folder of the journal.
        state: the table of the mailbox.
        name: of the registration.
        options: of the registration.
        max_bytes: bound of the journal.
        changed: see ``EventIntake``.

    Attributes:
        stored, duplicates: see ``EventIntake``.
        damaged: number of events that were skipped because their records are damaged.
    """

    def __init__(
        self,
        path: Path,
        state: JournalTable,
        name: str,
        options: BoxOptions,
        *,
        max_bytes: int | None,
        changed: Callable[[Sequence[str]], object],
    ) -> None:
        self._max_events = options.max_events
        self._full = full = options.full
        #: begins the sources of the events of the mailbox itself: renewal sets send events of the same class
        self._notices = notices_of(name)
        #: events on their way to the disk
        self._pending = 0
        self._dropped = 0
        self.damaged = 0
        events = EventJournal(path, max_bytes=max_bytes, full="drop_oldest" if full == "drop_oldest" else "reject")
        with on_failure(events.journal.close):
            self._cursor = events.journal.cursor(_CURSOR)
            super().__init__(events, state, f"box {name}", f"mailbox, registration {name}", changed)
            self.recover()

    @property
    def dropped(self) -> int:
        """Number of events that were dropped because the box was full, since it was opened."""
        return self._dropped + self.events.journal.dropped

    def first(self, most: int) -> list[Entry]:
        """Return the first events, in order, without removing them. Raises ``JournalError``, ``ClosedError``."""
        raise NotImplementedError

    def acknowledge(self, ticket: int) -> None:
        """Remove the events up to a ticket. Raises ``JournalError``, ``ClosedError``."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of stored events."""
        raise NotImplementedError

    def admit(self, event: RemoteEvent, size: int) -> MessagingError | bool:
        """See ``EventIntake``."""
        is_notice = event.source.startswith(self._notices)  # waits for room: the mailbox tries again
        if self.has_room(event, size) or (self._full == "drop_oldest" and not is_notice):
            self._pending += 1
            return True
        if self._full == "drop_newest" and not is_notice:
            self._dropped += 1
            return False
        return BoundReachedError(f"the mailbox is full: {self._describe()} are stored")

    def drops(self, event: RemoteEvent) -> bool:
        """See ``EventIntake``."""
        if self._full != "drop_newest" or event.source.startswith(self._notices):
            return False
        self._dropped += 1
        return True

    def has_room(self, event: RemoteEvent, size: int) -> bool:
        """Return whether there is room for an event. With the lock."""
        raise NotImplementedError

    def _describe(self) -> str:
        return f"{self._max_events} events"

    def note(self, event: RemoteEvent, offset: int, size: int) -> None:
        """See ``EventIntake``."""
        self._pending -= 1
        self.keep(event, offset, size)
        if self._full == "drop_oldest" and offset >= 0 and not self._is_closed:  # else the next run drops them
            self._dropped += self.drop_oldest()

    def keep(self, event: RemoteEvent, offset: int, size: int) -> None:
        """Add a stored event to the entries; offset -1: it could not be stored. With the lock."""

    def drop_oldest(self) -> int:
        """Drop events beyond the bound; return how many. With the lock."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files. Idempotent. Raises ``JournalError``."""
        if self._is_closed:
            return
        self.refuse_further()
        try:
            self.close_checkpoint()
        finally:
            self.events.journal.close()

    def abandon(self) -> None:
        """Close the files without storing a state: they are about to be deleted."""
        self.refuse_further()
        self.close_checkpoint(is_stored=False)
        self.events.journal.close()


class QueueBox(Box):
    """Keeps all events, in order. A ticket is the offset of a record."""

    def __init__(self, *args: Any, **options: Any) -> None:
        #: events that were read ahead, from the front of the box
        self._ready: deque[Entry] = deque()
        super().__init__(*args, **options)
        self._reading = threading.Lock()  # held while records are read: in order. Acquired before `_lock`

    def __len__(self) -> int:
        return self._cursor.behind

    def has_room(self, _event: RemoteEvent, _size: int) -> bool:
        """See ``Box``."""
        return self._max_events is None or self._cursor.behind + self._pending < self._max_events

    def drop_oldest(self) -> int:
        """See ``Box``."""
        excess = 0 if self._max_events is None else self._cursor.behind - self._max_events
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


#: records beyond twice the entries from which on the journal is compacted, and bytes beyond twice those of the entries
_SLACK: Final = 1000
_SLACK_BYTES: Final = 2**20


@dataclass(slots=True, eq=False)
class _Latest:
    """The newest event of a kind."""

    event: RemoteEvent
    #: older events of the kind that were dropped for this one
    suppressed: int
    ticket: int
    #: of its record
    offset: int
    #: bytes of its line
    size: int


class LatestBox(Box):
    """Keeps the newest event of each kind, with the number of the older ones that it took the place of.

    The entries are in memory; the journal has them as well, and older ones until it is compacted: it then has at most
    twice the bytes of the entries, and some more. The message id of a record is the number of suppressed events.

    Args:
        max_bytes: bound of the lines of the entries.
    """

    def __init__(
        self,
        path: Path,
        state: JournalTable,
        name: str,
        options: BoxOptions,
        *,
        max_bytes: int | None,
        changed: Callable[[Sequence[str]], object],
    ) -> None:
        def stored(channels: Sequence[str]) -> None:
            changed(channels)
            if not self._is_compacting and self._needs_compaction():
                workers().submit(self.compact)

        #: whether events carry that number
        self._is_counting = options.keep == "latest_and_count"
        self._max_bytes = max_bytes
        #: bytes of the lines of the entries, and of those on their way to the disk
        self._size = self._coming_size = 0
        self._tickets = 0
        #: in the order of their tickets
        self._latest: OrderedDict[EventKind, _Latest] = OrderedDict()
        #: events of each kind on their way to the disk
        self._coming_kinds: Counter[EventKind] = Counter()
        #: offsets of the records of the entries, the lowest first, and others that are out of date
        self._offsets: list[tuple[int, EventKind]] = []
        #: bytes of the records since the last compaction
        self._written = 0
        self._is_compacting = False
        super().__init__(path, state, name, options, max_bytes=None, changed=stored)
        # tickets of an earlier run are lower than those of this one
        self._tickets = clock.wall_ns()
        while records := self._cursor.read(_READ, most_bytes=2**22):
            for record in records:
                self._written += len(record.payload)
                try:
                    event = decode_event(record.payload)
                except DecodeError as error:
                    self.damaged += 1
                    logger.warning("%s: record %d is skipped: %s", self.name, record.offset, error)
                else:
                    self._put(event, int(record.message_id or 0), record.offset, len(record.payload))

    def __len__(self) -> int:
        return len(self._latest)

    def has_room(self, event: RemoteEvent, size: int) -> bool:
        """See ``Box``."""
        kind = event.kind
        found = self._latest.get(kind)
        if self._max_bytes is not None:
            rest = self._size - (0 if found is None else found.size)
            if rest + self._coming_size + size > self._max_bytes and (rest or self._coming_size):
                return False
        return (
            self._max_events is None
            or found is not None
            or kind in self._coming_kinds
            or len(self._latest.keys() | self._coming_kinds.keys()) < self._max_events
        )

    def _describe(self) -> str:
        return f"{len(self._latest)} events ({self._size} bytes)"

    def drop_oldest(self) -> int:
        """See ``Box``."""
        count = 0
        while len(self._latest) > 1 and (
            (self._max_events is not None and len(self._latest) > self._max_events)
            or (self._max_bytes is not None and self._size > self._max_bytes)
        ):
            _, dropped = self._latest.popitem(last=False)
            self._size -= dropped.size
            count += 1
        if count:
            self._advance()
        return count

    def message_id(self, event: RemoteEvent) -> str:
        """See ``EventIntake``."""
        kind = event.kind
        found = self._latest.get(kind)
        suppressed = (0 if found is None else found.suppressed + 1) + self._coming_kinds[kind]
        self._coming_kinds[kind] += 1
        self._coming_size += len(encode_event(event))
        return str(suppressed)

    def keep(self, event: RemoteEvent, offset: int, size: int) -> None:
        """See ``Box``."""
        kind = event.kind
        if self._coming_kinds[kind]:  # it was passed to the journal
            self._coming_kinds[kind] -= 1
            self._coming_size -= size
        if not self._coming_kinds[kind]:
            del self._coming_kinds[kind]
        if offset >= 0:
            self._written += size
            found = self._latest.get(kind)
            self._put(event, 0 if found is None else found.suppressed + 1, offset, size)

    def _put(self, event: RemoteEvent, suppressed: int, offset: int, size: int) -> None:
        """Make an event the newest one of its kind, unless there was one with a higher number. With the lock."""
        kind = event.kind
        found = self._latest.get(kind)
        if event.sequence_number < self._received.last(kind):  # it arrived late: behind one that may be taken already
            if found is not None:
                found.suppressed = max(found.suppressed, suppressed)
            return
        if found is not None:
            self._size -= found.size
            suppressed = max(found.suppressed, suppressed)
        self._size += size
        self._tickets += 1
        self._latest[kind] = _Latest(event, suppressed, self._tickets, offset, size)
        self._latest.move_to_end(kind)
        self._note_offset(kind, offset)

    def _note_offset(self, kind: EventKind, offset: int) -> None:
        heapq.heappush(self._offsets, (offset, kind))
        if len(self._offsets) > 2 * len(self._latest) + _SLACK:
            self._offsets = [(each.offset, kind) for kind, each in self._latest.items()]
            heapq.heapify(self._offsets)

    def _advance(self) -> None:
        """Move the position of the box to the first record of an entry, unless it is closed. With the lock."""
        if self._is_closed:
            return
        while self._offsets:
            offset, kind = self._offsets[0]
            found = self._latest.get(kind)
            if found is not None and found.offset == offset:
                break
            heapq.heappop(self._offsets)
        end = self._until if not self._offsets else min(self._until, self._offsets[0][0])
        if end > self._cursor.position:
            self._cursor.commit(end, wait=False)

    def first(self, most: int) -> list[Entry]:
        """See :class:`Box`."""
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"{self.name}: closed")
            found = [*islice(self._latest.values(), most)]
            if self._is_counting:
                return [(each.ticket, each.event.suppressing(each.suppressed)) for each in found]
            return [(each.ticket, each.event) for each in found]

    def acknowledge(self, ticket: int) -> None:
        """See :class:`Box`."""
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"{self.name}: closed")
            while self._latest:
                kind, first = next(iter(self._latest.items()))
                if first.ticket > ticket:
                    break
                del self._latest[kind]
                self._size -= first.size
            self._advance()

    def compact(self) -> None:
        """Append the entries again, and pass over the records before them. On a worker thread."""
        with self._lock:
            self._advance()
            if self._is_closed or self._is_compacting or not self._needs_compaction():
                return
            entries = [*self._latest.items()]
            if not entries:
                self._written = 0
                return
            self._is_compacting = True
            self._written = 0
            self._append(entries)

    def _append(self, entries: list[tuple[EventKind, _Latest]]) -> None:
        """Append entries again. With the lock."""
        lines = [encode_event(each.event) for _, each in entries]
        channels = [channel_of(kind) for kind, _ in entries]
        records = [
            record_of(channel, line, str(each.suppressed))
            for channel, line, (_, each) in zip(channels, lines, entries, strict=True)
        ]
        try:
            self.events.store(channels, records, lambda count, first, _: self._compacted(entries, count, first))
        except MessagingError:
            self._is_compacting = False  # the older records hold; the next compaction tries again

    def _compacted(self, entries: list[tuple[EventKind, _Latest]], count: int, first: int) -> None:
        """Note the new records of entries, and go on with the others. On the writing thread."""
        with self._lock:
            for offset, (kind, each) in enumerate(entries[:count], first):
                if self._latest.get(kind) is each:
                    each.offset = offset
                    self._note_offset(kind, offset)
            self._until = max(self._until, first + count)
            rest = [(kind, each) for kind, each in entries[count:] if self._latest.get(kind) is each]
            if count and rest:
                self._append(rest)
            else:
                self._is_compacting = False
                self._advance()

    def _needs_compaction(self) -> bool:
        return self._cursor.behind > 2 * len(self._latest) + _SLACK or self._written > 2 * self._size + _SLACK_BYTES

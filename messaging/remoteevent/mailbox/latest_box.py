"""The box that keeps the newest event of each kind (EV.3.3)."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ClosedError, DecodeError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import clock, workers
from messaging.remoteevent.event_journal import channel_of, record_of
from messaging.remoteevent.layout import decode_event, encode_event
from messaging.remoteevent.mailbox.box import BoxBase

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventKind, RemoteEvent
    from messaging.remoteevent.mailbox.box import Entry

logger = SafeLog(__name__)

#: records that are read at a time
_READ: Final = 1000
#: records beyond twice the entries from which on the journal is compacted, and bytes beyond twice those of the entries
_SLACK: Final = 1000
_SLACK_BYTES: Final = 2**20


class _Latest:
    """The newest event of a kind."""

    __slots__ = ("event", "offset", "size", "suppressed", "ticket")

    def __init__(self, event: RemoteEvent, suppressed: int, ticket: int, offset: int, size: int) -> None:
        self.event = event
        #: older events of the kind that were dropped for this one
        self.suppressed = suppressed
        self.ticket = ticket
        #: of its record
        self.offset = offset
        #: bytes of its line
        self.size = size


class LatestBox(BoxBase):
    """Keeps the newest event of each kind, with the number of the older ones that it took the place of.

    The entries are in memory; the journal has them as well, and older ones until it is compacted: it then has at most
    twice the bytes of the entries, and some more. The message id of a record is the number of suppressed events.

    Args:
        max_bytes: bound of the lines of the entries.
        is_counting: whether events carry that number.
    """

    def __init__(self, *args: Any, is_counting: bool, max_bytes: int | None, **options: Any) -> None:
        self._is_counting = is_counting
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
        super().__init__(*args, max_bytes=None, **options)
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
        """See ``BoxBase``."""
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
        """See ``BoxBase``."""
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
        """See ``BoxBase``."""
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

    def stored_all(self, channels: Sequence[str]) -> None:
        """See ``EventIntake``."""
        super().stored_all(channels)
        if not self._is_compacting and self._needs_compaction():
            workers().submit(self.compact)

"""The stored events of one registration of a mailbox, on the disk.

Two classes have the same methods: :class:`QueueBox` keeps all events, in order, and ``LatestBox`` (``latest_box``) the
newest event of each kind. Readers take events from the front, and acknowledge them by their *tickets*, numbers that
rise in the order of the events. So any reader may follow on another one.

**Threads.** Any thread may use a box. Its lock guards the entries; no code of the application runs under it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from messaging.errors import BoundReachedError, DecodeError, MessagingError
from messaging.errors.text import SafeLog
from messaging.remoteevent.event_journal import EventJournal
from messaging.remoteevent.intake import EventIntake
from messaging.remoteevent.layout import decode_event

if TYPE_CHECKING:
    from pathlib import Path

    from messaging.execution import Promise
    from messaging.journal import JournalTable
    from messaging.remoteevent.event import RemoteEvent
    from messaging.remoteevent.listener import Outcome

logger = SafeLog(__name__)

#: what happens to an event that has no room
BoxFull = Literal["refuse", "drop_oldest", "drop_newest"]
BOX_FULL: Final = ("refuse", "drop_oldest", "drop_newest")
#: records that are read at a time
_READ: Final = 1000
_CURSOR: Final = "box"


def notices_of(name: str) -> str:
    """Return how the sources of a mailbox's own notices to a registration begin."""
    return f"mailbox/{name}/"


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
        """Number of events that were dropped because the box was full, since it was opened."""

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


class BoxBase(EventIntake):
    """What both boxes have in common: the journal, the bound, and the events that arrive again.

    Args:
        path: folder of the journal.
        state: the table of the mailbox.
        name: of the registration.
        max_events: bound of the stored events.
        max_bytes: bound of the journal.
        full: what happens to an event that has no room.
        changed: called when events were stored, on the writing thread; quick.
    """

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
        self._notices = notices_of(name)
        #: events on their way to the disk
        self._pending = 0
        self._dropped = 0
        self.damaged = 0
        events = EventJournal(path, max_bytes=max_bytes, full="drop_oldest" if full == "drop_oldest" else "reject")
        try:
            self._cursor = events.journal.cursor(_CURSOR)
            super().__init__(events, state, f"box {name}", f"mailbox, registration {name}")
            self.recover()
        except BaseException:
            events.close()
            raise

    @property
    def dropped(self) -> int:
        """See :class:`Box`."""
        return self._dropped + self.events.journal.dropped

    def admit(self, event: RemoteEvent, size: int) -> MessagingError | bool:
        """See ``EventIntake``."""
        is_notice = self._is_notice(event)  # waits for room: the mailbox tries again
        if self.has_room(event, size) or (self._full == "drop_oldest" and not is_notice):
            self._pending += 1
            return True
        if self._full == "drop_newest" and not is_notice:
            self._dropped += 1
            return False
        return BoundReachedError(f"the mailbox is full: {self._describe()} are stored")

    def drops(self, event: RemoteEvent) -> bool:
        """See ``EventIntake``."""
        if self._full != "drop_newest" or self._is_notice(event):
            return False
        self._dropped += 1
        return True

    def _is_notice(self, event: RemoteEvent) -> bool:
        """Return whether an event is one of the mailbox itself: renewal sets send events of the same class."""
        return event.source.startswith(self._notices)

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

    def stored_all(self, _channels: Sequence[str]) -> None:
        """See ``EventIntake``."""
        self._changed()

    def close(self) -> None:
        """See :class:`Box`."""
        if self._is_closed:
            return
        self.refuse_further()
        try:
            self.close_checkpoint()
        finally:
            self.events.close()

    def abandon(self) -> None:
        """See :class:`Box`."""
        self.refuse_further()
        self.close_checkpoint(is_stored=False)
        self.events.close()


class QueueBox(BoxBase):
    """Keeps all events, in order. A ticket is the offset of a record."""

    def __init__(self, *args: Any, **options: Any) -> None:
        #: events that were read ahead, from the front of the box
        self._ready: deque[Entry] = deque()
        super().__init__(*args, **options)
        self._reading = threading.Lock()  # held while records are read: in order. Acquired before `_lock`

    def __len__(self) -> int:
        return self._cursor.behind

    def has_room(self, _event: RemoteEvent, _size: int) -> bool:
        """See ``BoxBase``."""
        return self._max_events is None or self._cursor.behind + self._pending < self._max_events

    def drop_oldest(self) -> int:
        """See ``BoxBase``."""
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

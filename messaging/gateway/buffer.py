"""The buffer of a route: its messages on disk, from their acceptance until the target has confirmed them.

A message is accepted when the journal has stored it. Messages leave in the order of their offsets. The first ones are
also in memory, up to ``MEMORY_MESSAGES`` and ``MEMORY_BYTES``; the others are read from the disk when their turn comes.

**Threads.** :meth:`Buffer.store` runs on any thread; the journal tells the outcome on its own thread. The reading side
(:meth:`Buffer.take`, :meth:`Buffer.put_back`, :meth:`Buffer.settle`) is for one thread at a time, the drain's. One lock
guards what both sides use; it is held for assignments only.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from messaging.bounded import BoundedCache
from messaging.errors import ArgumentError, ClosedError, JournalFullError, MessagingError
from messaging.execution import Waiters, engine, workers
from messaging.gateway.destinations import Destination
from messaging.journal import Journal
from messaging.text import SafeLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from messaging.gateway.settings import BufferSettings
    from messaging.journal import Record

logger = SafeLog(__name__)

#: folder of the buffers in the data folder of a gateway: one folder for each route
ROUTES_FOLDER: Final = "routes"
#: the name of the cursor of the target
CURSOR: Final = "target"
#: messages of a route in memory behind the disk, and bytes of their payloads
MEMORY_MESSAGES: Final = 4096
MEMORY_BYTES: Final = 8 * 2**20
#: messages that are read from the disk at a time, and bytes
_LOAD: Final = 1000
_LOAD_BYTES: Final = 2**20
#: pause before a record is given to the journal again after a failure of the disk, seconds
_RETRY: Final = 0.5
#: pause before the position is recorded: confirmations gather, seconds
_RECORD_PAUSE: Final = 0.003
#: restored contexts that are kept
_CONTEXTS: Final = 1024


class Source(Protocol):
    """A message of the source: the context of a received message, say."""

    def settle(self, acknowledged: bool) -> object:
        """Acknowledge the message: it is on the disk, or was dropped as the policy says. On any thread."""


class Stored:
    """A message of a route; for the journal an ``Append``.

    Attributes:
        offset: its place in the journal; -1 until it is stored.
        payload, destination, message_id: what is published, and where.
        timestamp: when it was stored, seconds since the epoch.
        attempts: how often the target has refused it.
    """

    __slots__ = (
        "_owner", "attempts", "destination", "message_id", "offset", "payload", "record", "sources", "timestamp",
    )  # fmt: skip
    count = 1
    #: with the policy ``block`` a record waits for room until the gateway stops
    deadline = math.inf

    def __init__(
        self,
        owner: Buffer | None,
        payload: bytes,
        destination: Destination,
        message_id: str,
        sources: Sequence[Source] = (),
    ) -> None:
        self._owner = owner
        self.payload = payload
        self.destination = destination
        self.message_id = message_id
        self.sources = sources
        self.record = b"" if owner is None else destination.template.encode(payload, message_id)
        self.offset = -1
        self.timestamp = 0.0
        self.attempts = 0

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        self.offset = offset
        if self._owner is not None:
            self._owner.note_stored(self)

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        if self._owner is not None:
            self._owner.note_refused(self, error)


class Buffer:
    """The messages of one route on disk. See the module for threads.

    Args:
        name: of the route, for the log.
        path: folder of the journal.
        settings: bounds and policies.
        wake: called when there is something to take; on the thread of the journal.

    Raises:
        JournalError: the folder cannot be used, or another gateway uses it.

    Attributes:
        journal: the records.
        recorded: the offset of the first message that is not settled, as the disk has it.
    """

    def __init__(self, name: str, path: Path, settings: BufferSettings, wake: Callable[[], object]) -> None:
        self._name = name
        self._wake = wake
        self.is_dropping_newest = settings.full == "drop_newest"
        self.max_dead_letters = settings.max_dead_letters
        self.journal = Journal.open(
            path,
            fsync=settings.fsync,
            max_bytes=settings.max_bytes,
            max_age=settings.max_age,
            full="reject" if self.is_dropping_newest else settings.full,  # type: ignore[arg-type]
            lock_timeout=5.0,
            option="data",
        )
        self._cursor = self.journal.cursor(CURSOR)
        self._lock = threading.Lock()  # guards the following four
        self._ready: deque[Stored] = deque()
        self._ready_bytes = 0
        #: the offset behind the last message of ``_ready``
        self._tail = self._cursor.position
        #: the offset behind the last stored message
        self._end = self.journal.end
        #: messages that wait for the disk, and threads that wait until there are fewer
        self.storing = 0
        self.room = Waiters()
        #: messages that were accepted, and dropped because the buffer was full, since the start
        self.accepted = self.dropped_newest = 0
        #: why the disk does not take messages; ``None``: it does
        self.problem: str | None = None
        self._is_closed = False
        #: whether the position is being recorded, or will be; whether the last attempt failed
        self._is_recording = self._is_unrecorded = False
        # --- the drain
        self._records: Iterator[Record] = iter(())
        self._next_record = self._until = -1
        self._contexts: BoundedCache[tuple[str, str], Destination] = BoundedCache(_CONTEXTS)
        #: the offset of the first message that is not settled, and the one that is on the disk; settled offsets behind
        #: it; ranges of offsets that the journal does not have any more: the first -> the one behind the last
        self._first = self.recorded = self._cursor.position
        self._settled: set[int] = set()
        self._gaps: dict[int, int] = {}

    # --- storing

    def store(self, stored: Stored) -> None:
        """Store a message. From any thread. Raises ``ClosedError``, ``JournalError``."""
        with self._lock:
            self.storing += 1
        try:
            self.journal.put(stored)
        except MessagingError:
            with self._lock:
                self.storing -= 1
            raise

    def note_stored(self, stored: Stored) -> None:
        """Accept a message that is on the disk. On the thread of the journal."""
        sources, stored.sources, stored.record = stored.sources, (), b""
        stored.timestamp = time.time()
        size = len(stored.payload)
        with self._lock:
            self.storing -= 1
            self.accepted += 1
            self._end = stored.offset + 1
            if stored.offset == self._tail and (
                not self._ready or (len(self._ready) < MEMORY_MESSAGES and self._ready_bytes + size <= MEMORY_BYTES)
            ):
                self._tail = stored.offset + 1
                self._ready.append(stored)
                self._ready_bytes += size
        self.problem = None
        self._acknowledge(sources)
        self._wake()

    def note_refused(self, stored: Stored, error: MessagingError) -> None:
        """Drop a message, leave it to its source, or try again. On the thread of the journal."""
        if isinstance(error, ClosedError) or self._is_closed:
            self._abandon(stored)
        elif self.is_dropping_newest and isinstance(error, JournalFullError):
            with self._lock:
                self.storing -= 1
                self.dropped_newest += 1
            sources, stored.sources, stored.record = stored.sources, (), b""
            self._acknowledge(sources)
        else:
            if self.problem is None:
                logger.error("route '%s': cannot store messages: %s; trying again each %g s", self._name, error, _RETRY)
            self.problem = str(error)
            running = engine()
            running.call(running.loop.call_later, _RETRY, self._put_again, stored)

    def _put_again(self, stored: Stored) -> None:
        try:
            self.journal.put(stored)
        except MessagingError as error:
            self.note_refused(stored, error)

    def _abandon(self, stored: Stored) -> None:
        """Leave the messages of the source to their broker, which delivers them again: the gateway is stopping."""
        with self._lock:
            self.storing -= 1
        stored.sources, stored.record = (), b""

    def _acknowledge(self, sources: Sequence[Source]) -> None:
        for source in sources:
            source.settle(True)
        if self.room.flags:
            self.room.wake()

    # --- taking

    @property
    def depth(self) -> int:
        """Return the number of stored messages that are not settled. From any thread."""
        return self._cursor.behind

    @property
    def has_next(self) -> bool:
        """Return whether :meth:`take` has a message. From any thread."""
        return bool(self._ready) or self._tail < self._end

    @property
    def next_offset(self) -> int:
        """Return the offset of the next message, or one before it."""
        try:
            return self._ready[0].offset
        except IndexError:
            return self._tail

    def take(self) -> Stored | None:
        """Return the next message, which stays in the buffer until :meth:`settle`; ``None``: there is none now.

        Raises:
            JournalError: the disk cannot be read.
        """
        while True:
            with self._lock:
                if self._ready:
                    stored = self._ready.popleft()
                    self._ready_bytes -= len(stored.payload)
                    break
                start, end = self._tail, self._end
            if start >= end:
                return None
            self._load(start, end)
        return stored

    def _load(self, start: int, end: int) -> None:
        """Read the next messages from the disk. Nothing is added in memory meanwhile: it would not follow the tail."""
        if self._next_record != start or self._until <= start:
            self._records = self.journal.read(max(start, self.journal.begin), end)
            self._until = end
        loaded: list[Stored] = []
        size = 0
        following = self._until
        for record in self._records:
            loaded.append(self._restored(record))
            size += len(record.payload)
            if len(loaded) >= _LOAD or size >= _LOAD_BYTES:
                following = record.offset + 1
                break
        self._next_record = following
        # offsets in between that are missing were dropped to make room, or for their age, or are damaged
        expected = start
        for stored in loaded:
            if stored.offset > expected:
                self._gaps[expected] = stored.offset
            expected = stored.offset + 1
        if following > expected:
            self._gaps[expected] = following
        self._pass_over(self._first)
        with self._lock:
            self._ready.extend(loaded)
            self._ready_bytes += size
            self._tail = following

    def _restored(self, record: Record) -> Stored:
        key = (record.channel, record.properties)
        destination = self._contexts.get(key)
        if destination is None:
            try:
                context = record.context
            except ArgumentError:  # of a program with properties of its own
                logger.error("route '%s': the properties of record %d do not parse", self._name, record.offset)
                context = type(record)(*record[:4], "", record.message_id).context
            destination = self._contexts[key] = Destination(context, record.properties)
        stored = Stored(None, record.payload, destination, record.message_id or "")
        stored.offset = record.offset
        stored.timestamp = record.timestamp
        return stored

    def put_back(self, messages: Sequence[Stored]) -> None:
        """Return messages that were taken, in order, to the front: they were not published, or it is not known.

        No other message that was taken may be unsettled.
        """
        with self._lock:
            self._ready.extendleft(reversed(messages))
            self._ready_bytes += sum(len(each.payload) for each in messages)

    def settle(self, stored: Stored) -> None:
        """Remove a message that was taken: the target has it, or it is a dead letter. Recorded on the disk soon."""
        if stored.offset == self._first:
            self._pass_over(stored.offset + 1)
        else:
            self._settled.add(stored.offset)

    def _pass_over(self, position: int) -> None:
        """Move the position to the first message that is neither settled nor lost."""
        while True:
            if position in self._settled:
                self._settled.remove(position)
                position += 1
            elif position in self._gaps:
                position = self._gaps.pop(position)
            else:
                break
        if position != self._first:
            self._first = position
            self._record_soon(_RECORD_PAUSE)

    # --- the position on the disk

    def _record_soon(self, pause: float) -> None:
        if not self._is_recording:
            self._is_recording = True
            running = engine()
            running.call(running.loop.call_later, pause, workers().submit, self._record)

    def _record(self) -> None:
        """Record the position on the disk. On a worker thread, one at a time."""
        position, pause = self._first, _RECORD_PAUSE
        try:
            self._cursor.commit(position)
            self._is_unrecorded = False
        except ClosedError:
            return
        except MessagingError as error:  # of a full disk: publishing must go on, because it frees the disk
            if not self._is_unrecorded:
                logger.warning("route '%s': %s; a crash now makes more duplicates", self._name, error)
            self._is_unrecorded = True
            pause = _RETRY
        self.recorded = position
        self._wake()
        # cleared before the position is read again: a change after this line sees it
        self._is_recording = False
        if self._first != position:
            self._record_soon(pause)

    # --- state, from any thread

    @property
    def age(self) -> float:
        """Return the seconds since the oldest message was stored that is not settled; 0 without one."""
        return self.journal.age_of(self._first)

    # --- the end

    def close(self) -> None:
        """Store what waits for the disk, and close the journal. Raises ``JournalError``."""
        self._is_closed = True
        self._cursor.commit(self._first, wait=False)
        self.journal.close()

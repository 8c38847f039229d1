"""The buffer of a route: its messages on disk, from their acceptance until the target has confirmed them.

A message is accepted when the journal has stored it, and leaves by the queue of the buffer, in the order of the
offsets. With ``newest_first`` messages that are stored after an outage leave first, see :mod:`messaging.journal.queue`.

**Threads.** :meth:`Buffer.store` runs on any thread; the journal tells the outcome on its own thread. The queue and
:meth:`Buffer.take` are for one thread at a time, the drain's.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from messaging.codecs.cache import BoundedCache
from messaging.errors import ArgumentError, ClosedError, JournalFullError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Waiters, clock, engine
from messaging.gateway.destinations import Destination
from messaging.gateway.recognition import Recognition
from messaging.gateway.stored import Stored, without_members
from messaging.journal import DurableQueue, Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from messaging.gateway.settings import BufferSettings
    from messaging.gateway.stored import Source
    from messaging.journal import Record

logger = SafeLog(__name__)

#: folder of the buffers in the data folder of a gateway: one folder for each route
ROUTES_FOLDER: Final = "routes"
#: the name of the position of the target
CURSOR: Final = "target"
#: messages in memory behind the disk, and bytes of their payloads
MEMORY_MESSAGES: Final = 4096
MEMORY_BYTES: Final = 8 * 2**20
#: pause before a record is given to the journal again after a failure of the disk, seconds
_RETRY: Final = 0.5
#: messages that are recognised if their source delivers them again: the last so many
RECENT: Final = 20_000
#: pause between two looks at what is being stored, seconds
_LOOK: Final = 0.05
#: restored contexts that are kept
_CONTEXTS: Final = 1024


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
            full_disk="block",
            lock_timeout=5.0,
            option="data",
        )
        self.queue: DurableQueue[Stored] = DurableQueue(
            f"route '{name}'",
            self.journal,
            CURSOR,
            self._restored,
            max_messages=MEMORY_MESSAGES,
            max_bytes=MEMORY_BYTES,
            on_recorded=wake,
            newest_first=settings.order == "newest_first",
        )
        self._max_age = settings.max_age
        self._lock = threading.Lock()  # guards the following two
        #: messages that wait for the disk, and threads that wait until there are fewer
        self.storing = 0
        #: those of them that can be recognised, by their keys and those of the messages of a batch. Guarded by the
        #: lock, as are their sources
        self._on_the_way: dict[str, Stored] = {}
        self.room = Waiters()
        #: messages that were accepted, since the start
        self.accepted = 0
        #: that were dropped: new ones because the buffer was full, for their age, and those in memory whose records the
        #: journal dropped before they were taken
        self._dropped_newest = self.expired = self._missed = 0
        #: recognises messages that their source delivers again
        self.recognition = Recognition(name, self.journal, RECENT)
        #: why the disk does not take messages; ``None``: it does
        self.problem: str | None = None
        self.journal.listen_held(self._log_held)
        self._is_closed = False
        self._contexts: BoundedCache[tuple[str, str], Destination] = BoundedCache(_CONTEXTS)

    # --- storing

    def store(self, stored: Stored) -> None:
        """Store a message. From any thread. Raises ``ClosedError``, ``JournalError``."""
        with self._lock:
            self.storing += 1
            for key in stored.all_keys:
                self._on_the_way[key] = stored
        try:
            self.journal.put(stored)
        except MessagingError:
            with self._lock:
                self.storing -= 1
                self._forget(stored)
            raise

    def _forget(self, stored: Stored) -> None:
        """Have no message join one that is not on its way to the disk any more. Under the lock."""
        for key in stored.all_keys:
            if self._on_the_way.get(key) is stored:
                del self._on_the_way[key]

    def _release(self, stored: Stored) -> Sequence[Source]:
        """Return the sources of a message that is not on its way to the disk any more."""
        with self._lock:
            self._forget(stored)
            sources, stored.sources, stored.record = stored.sources, (), b""
        return sources

    def note_stored(self, stored: Stored) -> None:
        """Accept a message that is on the disk. On the thread of the journal."""
        stored.timestamp = clock.wall()
        if stored.all_keys:
            self.recognition.note(stored)  # first: it is known at each moment
        self._acknowledge(self._release(stored))
        self.queue.add((stored,))
        with self._lock:
            self.storing -= 1  # after it is acknowledged: see ``wait_stored``
            self.accepted += 1
        self.problem = None
        self._wake_waiting()
        self._wake()

    def key(self, message_id: str, channel: str, payload: bytes) -> str:
        """See ``Recognition.key``."""
        return self.recognition.key(message_id, channel, payload)

    def joins(self, key: str, sources: Sequence[Source]) -> bool:
        """Return whether a message is on its way to the disk, in a batch or not; then these sources are its, too.

        Ask before :meth:`is_stored`: a message is stored before it is not on its way any more.
        """
        with self._lock:
            first = self._on_the_way.get(key)
            if first is None:
                return False
            first.sources = [*first.sources, *sources]
        return True

    def is_stored(self, key: str) -> bool:
        """Return whether a message is among the last ``RECENT`` stored ones, in a batch or not."""
        return self.recognition.is_stored(key)

    def note_refused(self, stored: Stored, error: MessagingError) -> None:
        """Drop a message, leave it to its source, or try again. On the thread of the journal."""
        if isinstance(error, ClosedError) or self._is_closed:
            self._abandon(stored)
        elif self.is_dropping_newest and isinstance(error, JournalFullError):
            self._acknowledge(self._release(stored))
            with self._lock:
                self.storing -= 1
                self._dropped_newest += 1
            self._wake_waiting()
        else:
            if self.problem is None:
                logger.error("route '%s': cannot store messages: %s; trying again each %g s", self._name, error, _RETRY)
            self.problem = str(error)
            running = engine()
            running.call(clock.call_later, running.loop, _RETRY, self._put_again, stored)

    def _put_again(self, stored: Stored) -> None:
        try:
            self.journal.put(stored)
        except MessagingError as error:
            self.note_refused(stored, error)

    def wait_stored(self, timeout: float) -> None:
        """Wait for at most ``timeout`` seconds until the messages that are on their way to the disk are acknowledged.

        Messages that wait for room, or for a disk that fails, are not waited for.
        """
        deadline = clock.monotonic() + timeout
        with self._lock:  # later ones may follow without end: the route may have another subscription already
            goal = self.accepted + self._dropped_newest + self.storing

        def is_over() -> bool:
            return not self.storing or self.accepted + self._dropped_newest >= goal

        while not is_over() and not self.is_held_back and self.problem is None:
            left = deadline - clock.monotonic()
            if left <= 0:
                return
            self.room.wait_for(is_over, min(left, _LOOK))

    def _log_held(self, error: JournalFullError | None) -> None:
        """Log that the source is held back by a full disk, and the end of it. On the thread of the journal."""
        if error is not None:
            logger.error("route '%s': the source is held back: %s", self._name, error)
        else:
            logger.warning("route '%s': the source is not held back any more: there is room on the disk", self._name)

    def _abandon(self, stored: Stored) -> None:
        """Leave the messages of the source to their broker, which delivers them again: the gateway is stopping."""
        self._release(stored)
        with self._lock:
            self.storing -= 1
        self._wake_waiting()

    @staticmethod
    def _acknowledge(sources: Sequence[Source]) -> None:
        for source in sources:
            source.settle(True)

    def _wake_waiting(self) -> None:
        if self.room.flags:
            self.room.wake()

    # --- taking

    @property
    def dropped(self) -> int:
        """Return the number of messages that were dropped and not published, since the start. From any thread.

        Includes records that the disk has lost, unless the position says that the target has them.
        """
        return self._dropped_newest + self.expired + self._missed + self.queue.lost + self.queue.dropped_unseen

    def take(self) -> Stored | None:
        """Return the next message, which stays in the buffer until it is settled; ``None``: there is none now.

        Raises:
            JournalError: the disk cannot be read.
        """
        queue = self.queue
        while True:
            stored = queue.take()
            if stored is None:
                if not queue.has_next:
                    return None
                queue.load()
                queue.pass_over()
            elif stored.offset < self.journal.begin:  # dropped to make room, or for its age
                self._missed += 1
                queue.settle(stored.offset, len(stored.payload))
            elif self._max_age is not None and self.journal.age_of(stored.offset, stored.timestamp) > self._max_age:
                self.expired += 1
                queue.settle(stored.offset, len(stored.payload))
            else:
                return stored

    def _restored(self, record: Record) -> Stored:
        properties = without_members(record.properties)
        key = (record.channel, properties)
        destination = self._contexts.get(key)
        if destination is None:
            try:
                context = record.context
            except ArgumentError:  # of a program with properties of its own
                logger.error("route '%s': the properties of record %d do not parse", self._name, record.offset)
                context = type(record)(*record[:4], "", record.message_id).context
            destination = self._contexts[key] = Destination(context, properties)
        stored = Stored(None, record.payload, destination, record.message_id or "")
        stored.offset = record.offset
        stored.timestamp = record.timestamp
        return stored

    # --- state, from any thread

    @property
    def is_held_back(self) -> bool:
        """Return whether new messages wait for room: on the disk, or within the bounds of the buffer."""
        return self.journal.is_blocked

    # --- the end

    def close(self) -> None:
        """Store what waits for the disk, and close the journal. Raises ``JournalError``."""
        self._is_closed = True
        self.queue.close()

"""The buffer of a route: its messages on disk, from their acceptance until the target has confirmed them.

A message is accepted when the journal has stored it, and leaves by the queue of the buffer, in the order of the
offsets. With ``newest_first`` messages that are stored after an outage leave first, see :mod:`messaging.journal.queue`.

**Threads.** :meth:`Buffer.store` runs on any thread; the journal tells the outcome on its own thread. The queue and
:meth:`Buffer.take` are for one thread at a time, the drain's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from messaging.codecs.cache import BoundedCache
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ClosedError, JournalFullError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Waiters, clock, engine
from messaging.gateway.destinations import Destination
from messaging.gateway.recognition import Recognition
from messaging.gateway.settings import BufferSettings
from messaging.gateway.stored import StoredMessage, without_members
from messaging.journal import DurableQueue, Journal, Record

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
        self._is_dropping_newest = settings.full == "drop_newest"
        self._max_dead_letters = settings.max_dead_letters
        self.journal = Journal.open(
            path,
            fsync=settings.fsync,
            max_bytes=settings.max_bytes,
            max_age=settings.max_age,
            full="reject" if self._is_dropping_newest else settings.full,  # type: ignore[arg-type]
            full_disk="block",
            lock_timeout=5.0,
            option="data",
        )
        with on_failure(self.journal.close):  # a disk that is full takes no position
            self.queue: DurableQueue[StoredMessage] = DurableQueue(
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
        self._lock = threading.Lock()  # guards the following three
        #: messages that wait for the disk
        self.storing = 0
        #: messages that were accepted since the start, and that were dropped because the buffer was full
        self.accepted = self._dropped_newest = 0
        #: threads that wait until fewer messages wait for the disk
        self.room = Waiters()
        #: stored messages that were dropped when they were taken: too old, or deleted by the journal meanwhile
        self._dropped_stored = 0
        #: recognises messages that their source delivers again
        self.recognition = Recognition(name, self.journal, RECENT)
        #: why the disk does not take messages; ``None``: it does
        self.problem: str | None = None
        self.journal.disk.listen(self._log_held)
        self._is_closed = False
        self._contexts: BoundedCache[tuple[str, str], Destination] = BoundedCache(_CONTEXTS)

    # --- storing

    def store(self, stored: StoredMessage, unless: Callable[[], object] | None = None) -> None:
        """Store a message, unless ``unless()`` says that its source was left: :meth:`wait_stored` may be over then.

        From any thread. Raises ``ClosedError``, then as well, and ``JournalError``.
        """
        with self._lock:
            self.storing += 1
        if stored.keys:
            self.recognition.begin(stored)
        stored.on_outcome = self._note_outcome
        try:
            if unless is not None and unless():  # asked while it counts as being stored
                raise ClosedError(f"route '{self._name}': its source was left")
            self.journal.put(stored)
        except MessagingError:
            self._end(stored)
            raise

    def _note_outcome(self, stored: StoredMessage, error: MessagingError | None) -> None:
        """Accept a message; or drop it, leave it to its source, or try again. On the journal's thread, or the loop."""
        if error is None:
            stored.timestamp = clock.wall()
            self.problem = None
            self._end(stored, accepted=1)
            self._wake()
        elif isinstance(error, ClosedError) or self._is_closed:  # its broker delivers it again
            self._end(stored)
        elif self._is_dropping_newest and isinstance(error, JournalFullError):
            self._end(stored, dropped=1)
        else:
            if self.problem is None:
                logger.error("route '%s': cannot store messages: %s; trying again each %g s", self._name, error, _RETRY)
            self.problem = str(error)
            running = engine()
            running.call(clock.call_later, running.loop, _RETRY, self._put_again, stored)

    def _put_again(self, stored: StoredMessage) -> None:
        try:
            self.journal.put(stored)
        except MessagingError as error:
            self._note_outcome(stored, error)

    def _end(self, stored: StoredMessage, *, accepted: int = 0, dropped: int = 0) -> None:
        """Finish storing a message: acknowledge it at its source if it was accepted or dropped, and count it.

        An accepted message enters the queue, from which the drain takes it.
        """
        if stored.keys:
            self.recognition.end(stored, is_stored=bool(accepted))  # first: it is known at each moment
        if accepted or dropped:
            for source in stored.sources:
                source.settle(True)
        stored.sources, stored.record = (), b""
        if accepted:
            self.queue.add((stored,))
        with self._lock:
            self.storing -= 1  # after it is acknowledged: see ``wait_stored``
            self.accepted += accepted
            self._dropped_newest += dropped
        if self.room.flags:
            self.room.wake()

    def wait_stored(self, timeout: float) -> None:
        """Wait for at most ``timeout`` seconds until the messages that are on their way to the disk are acknowledged.

        Messages that wait for room, or for a disk that fails, are not waited for.
        """
        deadline = clock.monotonic() + timeout
        with self._lock:  # later ones may follow without end: the route may have another subscription already
            goal = self.accepted + self._dropped_newest + self.storing

        def is_over() -> bool:
            return not self.storing or self.accepted + self._dropped_newest >= goal

        while not is_over() and not self.journal.is_blocked and self.problem is None:
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

    # --- taking

    @property
    def dropped(self) -> int:
        """Return the number of messages that were dropped and not published, since the start. From any thread.

        Includes records that the disk has lost, unless the position says that the target has them.
        """
        return self._dropped_newest + self._dropped_stored + self.queue.lost + self.queue.dropped_unseen

    def take(self) -> StoredMessage | None:
        """Return the next message, which stays in the buffer until it is settled; ``None``: there is none now.

        Raises:
            JournalError: the disk cannot be read.
        """
        queue, journal = self.queue, self.journal
        while True:
            stored = queue.take()
            if stored is None:
                if not queue.has_next:
                    return None
                queue.load()
                queue.pass_over()
            elif stored.offset < journal.begin or (  # dropped to make room, or for its age
                self._max_age is not None and journal.ages.age_of(stored.offset, stored.timestamp) > self._max_age
            ):
                self._dropped_stored += 1
                queue.settle(stored.offset, len(stored.payload))
            else:
                return stored

    def _restored(self, record: Record) -> StoredMessage:
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
        stored = StoredMessage(record.payload, destination, record.message_id or "", offset=record.offset)
        stored.timestamp = record.timestamp
        return stored

    # --- dead letters

    def add_dead_letter(self, record: Record, reason: MessagingError) -> None:
        """Keep a message that cannot be handled, and drop the oldest one beyond the bound. Raises ``JournalError``."""
        text = f"{type(reason).__name__}: {reason}"
        if self.journal.add_dead_letter(record, text, most=self._max_dead_letters):
            logger.warning("route '%s': dropped the oldest of its dead letters", self._name)

    # --- the end

    def close(self) -> None:
        """Store what waits for the disk, and close the journal. Raises ``JournalError``."""
        self._is_closed = True
        self.queue.close()

"""The durable outbox: messages are on disk before they are sent, and survive the process.

A message goes ``DiskIntake.accept`` (any thread) → the journal, which stores many at once → ``_keep`` (loop) → the
queue → the sender → the broker. Its confirm settles it in the queue, whose position follows the oldest message that is
not settled, so after a crash an instance with the same path continues there.

**Memory.** The messages in memory are bounded as those of the outbox in memory are. Messages beyond are only on disk. A
worker thread reads them when there is room, see :mod:`messaging.publishing.backlog`.

**Duplicates.** At most ``WINDOW`` messages are handed over whose confirms are not recorded, and only while there is a
connection. That many may be sent again after a crash, with their message ids.

**Threads.** ``DiskIntake.accept`` runs on any thread. The journal tells on its own thread that a publication is stored.
Records are read, and the position is recorded, on worker threads. Everything else runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from messaging.errors import ClosedError, MessagingError, OutboxFullError, OutcomeUnknownError
from messaging.execution import Engine, clock, may_block, workers
from messaging.journal import DurableQueue, Journal, Record
from messaging.publishing.backlog import Backlog, Spilled, Unpublishable
from messaging.publishing.dead_letters import DeadLetters
from messaging.publishing.outbox import Outbox
from messaging.publishing.publication import Publication
from messaging.publishing.stored import DiskIntake, DurableOutboxDTO, StoredPublication

if TYPE_CHECKING:
    from messaging.adapter import Adapter

logger = logging.getLogger(__name__)

#: the name of the cursor
CURSOR: Final = "outbox"
#: messages that may be sent and not recorded as confirmed: the most duplicates after a crash
WINDOW: Final = 4096
#: losses of the connection over one message that are reported
_MANY_LOSSES: Final = 5
#: longest pause between two looks at the connection while closing, seconds
_LOOK: Final = 1.0
#: how long opening waits for another instance that is closing, seconds; not on an event loop
_LOCK_TIMEOUT: Final = 5.0
#: how long closing waits for the disk, seconds
_FINISH_TIMEOUT: Final = 15.0


class DurableOutbox(Outbox):
    """The messages of one instance, on disk before they are sent; a will, requests and replies are in memory only.

    Args:
        engine: its loop.
        adapter: of the instance.
        journal: holds the messages. It is closed with the outbox.
    """

    intake: DiskIntake
    journal: Journal

    def __init__(self, engine: Engine, adapter: Adapter, journal: Journal) -> None:
        settings, name = adapter.settings, adapter.name
        max_messages, max_bytes = settings.outbox_size, settings.outbox_bytes
        super().__init__(engine, adapter, settings.timeout, max_messages, max_bytes)
        self._name = name
        self.journal = journal
        self.intake = DiskIntake(engine, name, journal, self, self._keep, self.advance, max_messages, max_bytes)
        # --- the loop
        self._dead_letters = DeadLetters(engine, name, journal, self._release)
        self._backlog = Backlog(engine, name, self.intake, self.advance)
        self._queue: DurableQueue[StoredPublication | Unpublishable] = DurableQueue(
            f"{name}: outbox",
            journal,
            CURSOR,
            self._backlog.restored,
            max_messages=max_messages,
            max_bytes=max_bytes,
            on_recorded=lambda: engine.call(self.advance),
        )
        self._backlog.queue = self._queue
        #: publications of messages that are only on disk, or were loaded and not taken
        self._spilled = Spilled()
        #: losses of the connection in a row over which the oldest message, at this offset, was not confirmed
        self._losses = 0
        self._lost = -1
        self._is_started = False
        self._is_closed = False
        #: messages that this instance could not publish
        self._unsent = 0
        #: set when something is stored, or the position, for :meth:`drain`
        self._progress = asyncio.Event()

    # --- any thread

    @property
    def pending(self) -> int:
        """Return the number of messages that are accepted and not settled."""
        return super().pending + self.intake.admission.pending + self._queue.waiting

    @property
    def failed(self) -> int:
        """Return the number of messages that failed, were dropped or refused."""
        return super().failed + self._unsent + self._queue.lost

    def get_dto(self) -> DurableOutboxDTO:
        """See ``Outbox``."""
        journal, first = self.journal, self._queue.first
        end = max(first, journal.end)
        return DurableOutboxDTO(
            path=journal.path,
            waiting=end - first,
            unstored=self.intake.admission.pending,
            bytes=journal.bytes_from(first),
            oldest=journal.ages.age_of(first),
            failed=self._unsent + self._queue.lost,
            dead_letters=journal.dead_letter_count,
        )

    # --- the loop: storing

    def _keep(self, publications: Sequence[StoredPublication]) -> None:
        """Keep stored messages in memory that follow the ones there, as far as there is room."""
        kept = self._queue.add(publications)
        if self._is_closed:
            for each in publications:
                _end_promise(each, self.journal.begin)
        elif kept < len(publications):
            for each in publications[kept:]:
                del each.payload
                self._spilled.add(each)

    # --- the loop: sending

    def start(self) -> None:
        """Start sending: first the messages that an earlier instance has left."""
        super().start()
        self._is_started = True
        left = self._queue.depth
        if left:
            logger.info("%s: the outbox %s holds %d messages of an earlier instance", self._name, self.journal.path,
                        left)  # fmt: skip
        self.advance()

    def connected(self) -> None:
        """See ``Outbox``."""
        super().connected()
        self.advance()

    def advance(self) -> None:
        """Hand messages over within the window, and read more from the disk."""
        if self._is_closed or not self._is_started:
            return
        self._progress.set()
        queue = self._queue
        if self.is_connected:
            batch = queue.take_before(queue.recorded + WINDOW)
            if self._spilled or self._backlog.has_unpublishable:
                batch = self._promised(batch)
            if batch:
                self.admission.post_all(batch)  # type: ignore[arg-type]  # publications
        if queue.tail < queue.end:
            self._backlog.read_ahead()
        elif self._spilled and not self._backlog.is_loading and not queue.waiting:
            self._end_lost(queue.end)
        if not self.deadlines.is_watching and queue.end > queue.first:
            self.deadlines.start()

    def _release(self, offset: int, size: int) -> None:
        """Note that a message needs not be sent any more, and has left the memory."""
        queue = self._queue
        queue.settle(offset, size)
        if not self._backlog.is_loading and queue.tail < queue.end:
            self._backlog.read_ahead()

    # --- from the disk

    def _promised(self, taken: Sequence[StoredPublication | Unpublishable]) -> list[StoredPublication | Unpublishable]:
        """Return the publications of messages, with the promises that the application has; the others are dead letters.

        The messages were taken in order: of those before them, the ones that are not sent are lost.
        """
        found: list[StoredPublication | Unpublishable] = []
        expected = -1
        for each in taken:
            offset = each.offset
            if offset != expected:
                self._end_lost(offset)
            expected = offset + 1
            publication = self._spilled.pop(offset)
            if isinstance(each, Unpublishable):
                if publication is not None:
                    publication.settled = True
                    publication.reject(each.error)
                self._unsent += 1
                self._dead_letters.add(each.record, each.error)
            elif publication is not None:
                publication.payload = each.payload
                found.append(publication)
            else:
                found.append(each)
        return found

    def _end_lost(self, before: int) -> None:
        """End the promises of messages that the journal does not have any more: dropped to make room, or damaged."""
        for publication in self._spilled.pop_before(before):
            publication.settled = True
            publication.reject(_dropped(publication))

    # --- the outbox of its publications: see ``Publications``

    def count_settled(self, entry: Publication) -> None:
        """A message is confirmed."""
        size = len(entry.payload)
        self._count(entry)
        if entry.is_stored:
            self._release(entry.offset, size)

    def retry(self, entry: Publication) -> bool:
        """See ``Publications``. Report a message over which a broker may have closed the connection again and again."""
        if entry.is_stored and entry.offset == self._queue.first and entry.was_sent:
            self._losses = self._losses + 1 if entry.offset == self._lost else 1
            self._lost = entry.offset
            if self._losses == _MANY_LOSSES:
                logger.error(
                    "%s: the connection was lost %d times while message %s to %r (%d bytes) was sent; if the broker "
                    "refuses it, set max_message_size",
                    self._name, _MANY_LOSSES, entry.message_id, entry.plan.channel, len(entry.payload),
                )  # fmt: skip
        return super().retry(entry)

    def fail(self, entry: Publication, error: MessagingError) -> None:
        """Keep a message that the broker refused as a dead letter; one of a closed instance stays in the journal."""
        if not isinstance(entry, StoredPublication) or entry.settled:
            super().fail(entry, error)
            return
        if not entry.is_stored:  # its publisher was interrupted
            self.intake.forget(entry)
            entry.settled = True
            entry.reject(error)
            return
        if isinstance(error, (ClosedError, OutcomeUnknownError)):
            super().fail(entry, error)
            return
        plan, payload = entry.plan, entry.payload
        super().fail(entry, error)
        record = Record(entry.offset, clock.wall(), plan.channel, payload, plan.record.properties, entry.message_id)
        self._dead_letters.add(record, error)

    def fail_expired(self, entry: Publication, error: MessagingError) -> None:
        """See ``Publications``. It is no dead letter."""
        size = len(entry.payload)
        super().fail(entry, error)
        if entry.is_stored:
            logger.warning("%s: %s", self._name, error)
            self._release(entry.offset, size)

    # --- deadlines and closing

    def _expire(self, now: float) -> float | None:
        """See ``Outbox``; of the messages that are not handed over, the promises fail."""
        found = super()._expire(now)
        times = [] if found is None else [found]
        ready = self._queue.ready
        if ready:
            earliest = min([each.deadline for each in ready])
            if earliest <= now:
                for each in ready:
                    if isinstance(each, StoredPublication) and each.deadline <= now:
                        each.pass_deadline()
            times.append(max(earliest - now, 0.0))
        left = self._spilled.pass_deadlines(now)
        if left is not None:
            times.append(left)
        return min(times, default=None)

    def refuse(self) -> None:
        """See ``Outbox``."""
        super().refuse()
        self.intake.admission.refuse()

    def abandon(self) -> None:
        """See ``Outbox``."""
        super().abandon()
        self.intake.admission.abandon()

    async def drain(self, deadline: float) -> None:
        """Wait until every message is settled; without a connection until every message is stored."""
        loop = self._engine.loop
        while (left := deadline - clock.time_of(loop)) > 0:
            if not self.intake.admission.pending and (not self.is_connected or self._queue.first >= self._queue.end):
                break
            self._progress.clear()
            with contextlib.suppress(TimeoutError):
                await clock.wait_for(self._progress.wait(), min(left, _LOOK))
        if self.is_connected:
            await super().drain(deadline)

    def close(self) -> None:
        """See ``Outbox``; the messages that are left stay in the journal, and their promises end."""
        super().close()
        self._is_closed = True
        self._backlog.is_closed = True
        for each in (*self._queue.ready, *self._spilled.pop_before(self._queue.end)):
            if isinstance(each, StoredPublication):
                _end_promise(each, self.journal.begin)

    async def finish(self) -> None:
        """Keep the dead letters, store the position and close the journal, for a bounded time."""
        loop = self._engine.loop
        deadline = clock.time_of(loop) + _FINISH_TIMEOUT
        # first, and on the loop: the position that is stored is behind a message that is kept as a dead letter
        await self._dead_letters.finish(_FINISH_TIMEOUT)
        done = asyncio.Event()

        def close() -> None:
            try:
                self._queue.close()
            except MessagingError as error:
                logger.error("%s: the outbox was not closed in good order: %s", self._name, error)
            finally:
                self._engine.call(done.set)

        workers().submit(close)
        try:
            await clock.wait_for(done.wait(), deadline - clock.time_of(loop))
        except TimeoutError:
            logger.error("%s: the outbox is not closed after %g s: the disk is slow", self._name, _FINISH_TIMEOUT)
        self.intake.take_arrived()


def _dropped(publication: StoredPublication) -> OutboxFullError:
    return OutboxFullError(f"{publication.what}: dropped from the full outbox, or damaged")


def _end_promise(publication: StoredPublication, begin: int) -> None:
    """End the promise of a message of a closed instance, whose journal begins with the offset ``begin``."""
    publication.settled = True
    is_left = publication.offset >= begin
    publication.reject(publication.unfinished("the instance was closed") if is_left else _dropped(publication))


def open_durable(engine: Engine, adapter: Adapter) -> DurableOutbox:
    """Open the durable outbox of an instance, whose settings have an ``outbox_path``.

    Raises:
        JournalError: the folder cannot be used, or another instance uses it.
    """
    settings = adapter.settings
    journal = Journal.open(
        settings.outbox_path or "",
        fsync=settings.outbox_fsync,
        max_bytes=settings.outbox_disk_bytes,
        full=settings.outbox_full,
        timeout=settings.timeout,
        lock_timeout=_LOCK_TIMEOUT if may_block() else 0.0,
        option="outbox_path",
    )
    try:
        return DurableOutbox(engine, adapter, journal)
    except BaseException:
        journal.close()
        raise

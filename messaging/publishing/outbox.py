"""The outbox: the messages of one instance from their acceptance until they are settled, each with a deadline.

:class:`~messaging.publishing.sending.Admission` accepts them from any thread and wakes the loop once per burst. The
outbox is the :class:`~messaging.publishing.sending.Sender` that hands them to the adapter; it also counts them, fails
them at their deadlines, and closes.
"""

from __future__ import annotations

import asyncio
import secrets
from math import inf
from typing import TYPE_CHECKING

from messaging.environment import forks
from messaging.errors import DeadlineError, MessagingError, OutcomeUnknownError
from messaging.execution import Deadlines, Engine, clock
from messaging.publishing.publication import Publication
from messaging.publishing.sending import Admission, Sender

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.journal import Journal
    from messaging.publishing.stored import DiskIntake, DurableOutboxDTO


class Outbox(Sender):
    """The messages of one instance that are not settled yet, bounded in messages and bytes.

    Everything runs on the loop, except :meth:`put`, :attr:`deadlines` ``.watch`` and the properties, which are for any
    thread.

    Attributes:
        put, post, withdraw: see :class:`~messaging.publishing.sending.Admission`.
        admission: accepts the messages; public, because the publisher calls it without a detour.
        id: distinguishes the outboxes of all processes: message ids must not repeat.
        generation: see :mod:`messaging.environment.forks`.
        intake, journal: take and hold the messages on disk, with the setting ``outbox_path``, see
            :class:`~messaging.publishing.durable.DurableOutbox`.
    """

    intake: DiskIntake | None = None
    journal: Journal | None = None

    def __init__(self, engine: Engine, adapter: Adapter, timeout: float, max_messages: int, max_bytes: int) -> None:
        self.id = secrets.token_hex(8)
        self.generation = forks.generation
        admission = Admission(engine, adapter.name, max_messages, max_bytes, self._wake)
        super().__init__(engine, adapter, admission, Deadlines(engine, timeout, self._expire))
        self._failed = 0
        #: resolved when every accepted message is settled; ``None`` unless :meth:`drain` waits for that
        self._drained: asyncio.Future[None] | None = None
        # the methods of its part are its own, without a call in between
        self.put, self.post, self.withdraw = admission.put, admission.post, admission.withdraw

    @property
    def published(self) -> int:
        """Return the number of confirmed messages."""
        return self.admission.settled - self._failed

    @property
    def failed(self) -> int:
        """Return the number of messages that failed."""
        return self._failed

    @property
    def pending(self) -> int:
        """Return the number of messages that are accepted and not settled."""
        return self.admission.pending

    def get_dto(self) -> DurableOutboxDTO | None:
        """Return a snapshot of the messages on disk; ``None`` without the setting ``outbox_path``."""
        return None

    def refuse(self) -> None:
        """Accept no more messages."""
        self.admission.refuse()

    @property
    def is_accepting(self) -> bool:
        """Return whether posted messages are not accepted yet, so that another message could overtake them."""
        return bool(self.admission.posted)

    def _wake(self) -> None:
        """Send the messages that were accepted."""
        if self.is_stopped:  # meanwhile, by a signal handler that interrupted ``put``
            self.close()
            return
        self._wakeup.set()
        if not self.deadlines.is_watching:
            self.deadlines.start()

    def _count(self, entry: Publication) -> None:
        """Count a settled message and make room for others; called once per message."""
        admission = self.admission
        size = len(entry.payload)
        admission.settled += 1
        admission.settled_bytes += size
        if entry.is_stored:
            admission.widen(-1, -size)
        if not entry.plan.options.last_will:  # the adapter hands a will to the broker with every connection
            del entry.payload
        if self.in_flight:
            self.in_flight.pop(entry.sequence, None)
        if admission.blocked.flags:
            admission.offer_room_in_steps()
        if self._drained is not None and not admission.pending and not self._drained.done():
            self._drained.set_result(None)

    #: see ``Publications``
    count_settled = _count

    def count_late(self, entry: Publication) -> None:
        """Count a message that failed before it was accepted, unless it is counted already."""
        if _is_uncounted(entry):
            self._failed += 1
            self._count(entry)

    def fail(self, entry: Publication, error: MessagingError) -> None:
        """Fail a message, unless it is settled; it is not sent afterwards, even if it is put later."""
        if entry.settled:
            return
        entry.settled = True
        if entry.sequence:
            self._failed += 1
            self._count(entry)
        entry.reject(error)

    #: see ``Publications``
    fail_expired = fail

    def adopt(self, will: Publication) -> None:
        """Fail a will at its deadline, as a message in flight."""
        if self.is_stopped:
            self.fail(will, will.unfinished("the instance was closed"))
        elif not will.settled:
            will.is_waiting = False
            self.in_flight[will.sequence] = will

    async def drain(self, deadline: float) -> None:
        """Wait until every accepted message is settled, or until ``deadline`` (loop time)."""
        while self.admission.pending and (left := deadline - clock.time_of(self._engine.loop)) > 0:
            self._drained = self._engine.loop.create_future()
            await clock.wait([self._drained], timeout=left)
        self._drained = None

    def close(self) -> None:
        """Fail every remaining message with ``ClosedError``, or with ``OutcomeUnknownError`` if it was sent."""
        admission = self.admission
        self.refuse()
        self.stop()
        # ``put`` may be about to accept another message on its thread: its wake-up settles that one
        admission.is_signalled = False
        self.deadlines.stop()
        for entry in self.outstanding():
            self.fail(entry, entry.unfinished("the instance was closed"))
            self.count_late(entry)
        self.drop_settled()
        admission.purge()

    async def finish(self) -> None:
        """Wait until everything is on the disk that must be there; after :meth:`close`."""

    def abandon(self) -> None:
        """Refuse every message in a forked child; the promises of the parent's messages end by themselves."""
        self.admission.abandon()
        self.is_stopped = True

    def _expire(self, now: float) -> float | None:
        """Fail the messages whose deadline has passed; see ``Deadlines``."""
        earliest = inf
        expired = False
        for entry in self.outstanding():
            if entry.settled:
                expired = expired or _is_uncounted(entry)
                continue
            left = entry.deadline - now
            if left > 0:
                earliest = min(earliest, left)
                continue
            if entry.is_stored:
                entry.pass_deadline()
                continue
            expired = True
            if entry.was_sent:
                why = "sent, but not confirmed before its deadline; it may arrive"
                self.fail(entry, OutcomeUnknownError(f"{entry.what}: {why}"))
            else:
                why = "the broker takes no more messages" if self.is_connected else "no connection"
                self.fail(entry, DeadlineError(f"{entry.what}: not sent before its deadline: {why}"))
        if expired:
            # settled messages leave the queue now, also behind messages that still have time: they do not count
            self.admission.purge()
        self.drop_settled()
        if self.admission.blocked.flags:
            self.admission.offer_room()
        return earliest if self.admission.pending else None


def _is_uncounted(entry: Publication) -> bool:
    """Return whether a message failed before it was accepted: a counted message has no payload."""
    return entry.settled and hasattr(entry, "payload") and not entry.plan.options.last_will

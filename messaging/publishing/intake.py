"""The intake of a durable outbox: takes messages from any thread, and has the journal store them.

The journal stores many messages at once on its own thread, which tells the event loop once for all of them.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from messaging.errors import ClosedError, MessagingError, OutboxFullError
from messaging.publishing.sending import Admission
from messaging.publishing.stored import StoredPublication

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from messaging.execution import Engine
    from messaging.journal import Journal
    from messaging.model import PublishPlan
    from messaging.publishing.publication import Publications


class Intake:
    """Accepts messages, bounded in number and bytes until they are stored.

    Args:
        engine: its loop.
        name: of the instance, for errors.
        journal: stores the messages.
        outbox: the publications report to it.
        stored: called on the loop with messages that are stored, in the order of the journal.
        done: called on the loop after that.
        max_messages, max_bytes: bounds of the messages on their way to the disk.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        journal: Journal,
        outbox: Publications,
        stored: Callable[[Sequence[StoredPublication]], object],
        done: Callable[[], object],
        max_messages: int,
        max_bytes: int,
    ) -> None:
        self._engine = engine
        self._put = journal.put
        self._outbox = outbox
        self._on_stored = stored
        self._on_done = done
        self._admission = Admission(engine, name, max_messages, max_bytes, lambda: None)
        self._admission.is_signalled = True  # it has no sender to wake: the journal takes the messages
        self.refuse, self.abandon = self._admission.refuse, self._admission.abandon
        self._numbers = itertools.count(1)
        #: stored or refused, and not seen by the loop yet; and whether the loop is about to look
        self._arrived: deque[StoredPublication] = deque()
        self._is_signalled = False

    # --- any thread

    @property
    def pending(self) -> int:
        """Return the number of messages on their way to the disk."""
        return self._admission.pending

    def accept(self, payload: bytes, plan: PublishPlan, deadline: float) -> StoredPublication:
        """Accept a message; it is sent when it is stored. The plan has a ``RecordPlan``.

        Raises:
            ClosedError: the outbox is closed.
            OutboxFullError: too many messages wait for the disk, and the caller runs an event loop, or its deadline
                passed.
        """
        publication = StoredPublication(self._outbox, self, payload, plan, deadline)
        publication.own_id = identity = plan.options.message_id or self.new_id()
        publication.record = plan.record.template.encode(payload, identity)
        self._admission.put(publication, queue=False)
        try:
            self._put(publication)
        except BaseException:  # an interrupt, too
            self._engine.call(self.forget, publication)
            raise
        return publication

    def new_id(self) -> str:
        """Return a message id that is unique across instances and processes."""
        return f"{self._outbox.id}-{next(self._numbers):x}"

    def note_arrived(self, publication: StoredPublication) -> None:
        """Have the loop take a message that is stored, or was refused. On the thread of the journal."""
        self._arrived.append(publication)
        if not self._is_signalled:
            self._is_signalled = True
            self._engine.call(self.take_arrived)

    # --- the loop

    def forget(self, publication: StoredPublication) -> None:
        """Count a message that does not wait for the disk any more, once."""
        if not publication.is_arriving:
            return  # its publisher was interrupted after the journal had taken it
        publication.is_arriving = False
        admission = self._admission
        admission.settled += 1
        admission.settled_bytes += len(publication.payload)
        if admission.blocked.flags:
            admission.offer_room_in_steps()

    def take_arrived(self) -> None:
        """Take the messages that the journal has stored or refused."""
        self._is_signalled = False
        arrived = self._arrived
        stored: list[StoredPublication] = []
        while arrived:
            publication = arrived.popleft()
            self.forget(publication)
            publication.record = b""
            if publication.store_error is not None:
                publication.refuse(_refusal(publication, publication.store_error))
                continue
            publication.is_stored = True
            publication.tell_stored()
            if publication.plan.record.resolves:
                publication.resolve(None)
            stored.append(publication)
        if stored:
            self._on_stored(stored)
        self._on_done()


def _refusal(publication: StoredPublication, error: MessagingError) -> MessagingError:
    if isinstance(error, ClosedError):
        return ClosedError(f"{publication.what}: the instance was closed before the message was stored")
    refusal = OutboxFullError(f"{publication.what}: not accepted: {error}")
    refusal.__cause__ = error
    return refusal

"""Messages on their way to the disk: their publications, and the intake that takes them from any thread.

The journal stores many messages at once on its own thread, which tells the event loop once for all of them.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from messaging.environment import forks
from messaging.errors import ClosedError, MessagingError, OutboxFullError, OutcomeUnknownError
from messaging.execution import PENDING, Engine, Promise, clock
from messaging.journal import Journal, Record, RecordTemplate
from messaging.model import Features, MessageContext, PublishPlan, stored_properties
from messaging.publishing.publication import Publications, SpecialPublication
from messaging.publishing.sending import Admission
from messaging.services.reporting import counter, gauge

#: extensions that do not belong to a stored message: they concern the promise. The message id does: an id of the
#: application travels where a generated one does not
_NOT_STORED: Final = frozenset({Features.EXTENSION_STORE_AND_FORWARD, Features.EXTENSION_TIMEOUT})
#: guards the first access to ``stored`` of each publication; held rarely and shortly, so one lock serves all
_stored_lock: Final = threading.Lock()
forks.hold_over_fork(_stored_lock)


@dataclass(frozen=True, slots=True)
class DurableOutboxDTO:
    """A snapshot of a durable outbox."""

    #: its folder
    path: str
    waiting: int = field(metadata=gauge("messages on disk from the oldest that is not confirmed", "messages"))
    unstored: int = field(metadata=gauge("messages that wait for the disk: a crash would lose these", "messages"))
    bytes: int = field(metadata=gauge("bytes of the messages on disk from the oldest that is not confirmed", "bytes"))
    oldest: float = field(
        metadata=gauge("age of the oldest message on disk that is not confirmed; 0: there is none", "seconds")
    )
    failed: int = field(
        metadata=counter("stored messages that expired, were dropped or refused without being sent", "messages")
    )
    dead_letters: int = field(metadata=gauge("refused messages that are kept as dead letters", "messages"))


class RecordPlan:
    """What all stored messages of one publish plan share.

    Attributes:
        properties: see ``Record.properties``.
        template: encodes the records.
        resolves: whether the promise resolves when the message is stored (extension ``storeAndForward``).
    """

    __slots__ = ("properties", "resolves", "template")

    def __init__(self, channel: str, context: MessageContext, extensions: Mapping[str, Any]) -> None:
        kept = {key: value for key, value in extensions.items() if key not in _NOT_STORED}
        self.properties = stored_properties(context.replace(extensions=kept))
        self.template = RecordTemplate(channel, self.properties)
        self.resolves = bool(extensions.get(Features.EXTENSION_STORE_AND_FORWARD))


class StoredPublication(SpecialPublication):
    """A message of a durable outbox; for the journal an ``Append``."""

    __slots__ = ("_stored", "intake", "is_arriving", "is_stored", "offset", "record", "store_error")
    count = 1

    def __init__(self, intake: DiskIntake, payload: bytes, plan: PublishPlan, deadline: float) -> None:
        # spelled out, as in Publication
        self._value = PENDING
        self._error = None
        self._listeners = None
        self.was_retrieved = False
        self.outbox = intake.outbox
        self.payload = payload
        self.plan = plan
        self.correlation_id = plan.correlation_id
        self.deadline = deadline
        self.sequence = 0
        self.settled = False
        self.was_sent = False
        self.is_waiting = True
        options = plan.options
        self.own_id = options.message_id
        self.may_expire = options.time_to_live is not None
        if options.time_to_live is not None:
            self.expires = clock.monotonic() + options.time_to_live
        self.intake = intake
        #: whether it counts as on its way to the disk
        self.is_arriving = True
        #: its bytes for the journal, until they are stored
        self.record = b""
        #: its place in the journal, once it is stored
        self.offset = -1
        self.is_stored = False
        self.store_error: MessagingError | None = None
        self._stored: Promise[None] | None = None

    @property
    def stored(self) -> Promise[None]:
        """See ``Promise``."""
        with _stored_lock:
            promise = self._stored
            if promise is None:
                promise = self._stored = Promise(lambda: f"store the message to {self.plan.channel!r}")
        self.tell_stored()  # its outcome may be known already
        return promise

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        self.offset = offset
        self.intake.note_arrived(self)

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        self.store_error = error
        self.intake.note_arrived(self)

    def tell_stored(self) -> None:
        """Settle the promise ``stored``, if there is one and its outcome is known."""
        promise = self._stored
        if promise is None:
            return
        if self.is_stored:
            promise.resolve(None)
        elif self.settled and self.store_error is not None:
            self.was_retrieved = True  # both fail with the same error: one of them has to be looked at
            promise.reject(self.store_error)
        elif self.is_inherited:
            promise.reject(ClosedError(f"{promise.what}: begun by the parent of this process, which alone stores it"))

    def pass_deadline(self) -> None:
        """Fail the promise; the message is still sent. On the loop."""
        self.deadline = inf
        self.reject(
            OutcomeUnknownError(f"{self.what}: not confirmed before its deadline; it is stored, and will be sent")
        )

    def unfinished(self, why: str) -> MessagingError:
        """See ``Publication``. An application that does not look at this error loses nothing: it is not logged."""
        self.was_retrieved = True
        return OutcomeUnknownError(
            f"{self.what}: {why} before the broker confirmed; it is stored, and the next instance with this "
            "outbox_path sends it"
        )


class DiskIntake:
    """Accepts messages, bounded in number and bytes until they are stored.

    Args:
        engine: its loop.
        name: of the instance, for errors.
        journal: stores the messages.
        outbox: the publications report to it.
        stored: called on the loop with messages that are stored, in the order of the journal.
        done: called on the loop after that.
        max_messages, max_bytes: bounds of the messages on their way to the disk.

    Attributes:
        admission: bounds the messages on their way to the disk.
        restore: returns the plan of a payload and a restored context, on a worker thread. Set by the publisher.
    """

    restore: Callable[[bytes, MessageContext], PublishPlan]

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
        self._ages = journal.ages
        self.outbox = outbox
        #: not that of the outbox, whose messages in memory have ids of their own numbers
        self._id = secrets.token_hex(8)
        self._on_stored = stored
        self._on_done = done
        self.admission = Admission(engine, name, max_messages, max_bytes, lambda: None)
        self.admission.is_signalled = True  # it has no sender to wake: the journal takes the messages
        self._numbers = itertools.count(1)
        #: stored or refused, and not seen by the loop yet; and whether the loop is about to look
        self._arrived: deque[StoredPublication] = deque()
        self._is_signalled = False

    # --- any thread

    def accept(self, payload: bytes, plan: PublishPlan, deadline: float) -> StoredPublication:
        """Accept a message; it is sent when it is stored. The plan has a ``RecordPlan``.

        Raises:
            ClosedError: the outbox is closed.
            OutboxFullError: too many messages wait for the disk, and the caller runs an event loop, or its deadline
                passed.
        """
        publication = StoredPublication(self, payload, plan, deadline)
        identity = publication.own_id
        if identity is None:
            identity = publication.own_id = f"{self._id}-{next(self._numbers):x}"
        publication.record = plan.record.template.encode(payload, identity)
        self.admission.put(publication, queue=False)
        try:
            self._put(publication)
        except BaseException:  # an interrupt, too
            self._engine.call(self.forget, publication)
            raise
        return publication

    def restored(self, record: Record, plan: PublishPlan) -> StoredPublication:
        """Return a publication for a stored message whose promise the application has dropped."""
        publication = StoredPublication(self, record.payload, plan, inf)
        publication.own_id = record.message_id or f"{self._id}-{next(self._numbers):x}"
        publication.offset = record.offset
        publication.is_stored = True
        publication.was_retrieved = True
        if publication.may_expire:  # a clock that was set back makes it no younger
            publication.expires -= max(0.0, self._ages.age_of(record.offset, record.timestamp))
        return publication

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
        admission = self.admission
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
                publication.store_error = error = _refusal(publication, publication.store_error)
                publication.settled = True
                publication.tell_stored()
                publication.reject(error)
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

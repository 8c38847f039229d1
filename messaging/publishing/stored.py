"""A message of a durable outbox: its publication, its way to the disk, and what its record holds."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging import forking
from messaging.errors import MessagingError, OutcomeUnknownError
from messaging.execution import Promise
from messaging.model import Features, stored_properties
from messaging.publishing.publication import IdentifiedPublication, Publications

if TYPE_CHECKING:
    from messaging.model import MessageContext, PublishPlan

#: extensions that do not belong to a stored message: its id has a place of its own, the others concern the promise
_NOT_STORED: Final = frozenset(
    {Features.EXTENSION_MESSAGE_ID, Features.EXTENSION_STORE_AND_FORWARD, Features.EXTENSION_TIMEOUT}
)
#: guards the first access to ``stored`` of each publication; held rarely and shortly, so one lock serves all
_stored_lock: Final = threading.Lock()
forking.hold_over_fork(_stored_lock)


class Arrivals(Protocol):
    """The interface of the durable outbox that :class:`Storing` uses."""

    def note_arrived(self, entry: Storing) -> None:
        """Take a message that is stored, or was refused. On the thread of the journal."""

    def fail(self, entry: Any, error: MessagingError) -> None:
        """Forget a message whose publisher was interrupted. On the loop."""


class RecordPlan:
    """What all stored messages of one publish plan share.

    Attributes:
        properties: see ``Record.properties``.
        resolves: whether the promise resolves when the message is stored (extension ``storeAndForward``).
    """

    __slots__ = ("properties", "resolves")

    def __init__(self, context: MessageContext, extensions: Mapping[str, Any]) -> None:
        kept = {key: value for key, value in extensions.items() if key not in _NOT_STORED}
        self.properties = stored_properties(context.replace(extensions=kept))
        self.resolves = bool(extensions.get(Features.EXTENSION_STORE_AND_FORWARD))


class StoredPublication(IdentifiedPublication):
    """A message of a durable outbox."""

    __slots__ = ("_stored", "is_stored", "offset", "store_error")

    def __init__(self, outbox: Publications, payload: bytes, plan: PublishPlan, deadline: float) -> None:
        super().__init__(outbox, payload, plan, deadline)
        #: its place in the journal, once it is stored
        self.offset = -1
        self.is_stored = False
        self.store_error: MessagingError | None = None
        self._stored: Promise[None] | None = None

    @property
    def stored(self) -> Promise[None]:
        """See ``Publication``."""
        with _stored_lock:
            promise = self._stored
            if promise is None:
                promise = self._stored = Promise(lambda: f"store the message to {self.plan.channel!r}")
        self._tell_stored()  # it may have been stored before
        return promise

    def note_stored(self, offset: int) -> None:
        """The message is on disk. On the loop."""
        self.offset = offset
        self.is_stored = True
        self._tell_stored()

    def refuse(self, error: MessagingError) -> None:
        """The message is not on disk, and will not be sent. On the loop."""
        self.store_error = error
        self.settled = True
        self._tell_stored()
        self.reject(error)

    def _tell_stored(self) -> None:
        promise = self._stored
        if promise is None:
            return
        if self.is_stored:
            promise.resolve(None)
        elif self.store_error is not None:
            promise.reject(self.store_error)

    def pass_deadline(self) -> None:
        """Fail the promise; the message is still sent. On the loop."""
        self.deadline = float("inf")
        self.reject(
            OutcomeUnknownError(f"{self.what}: not confirmed before its deadline; it is stored, and will be sent")
        )

    def unfinished(self, why: str) -> MessagingError:
        """See ``Publication``."""
        return OutcomeUnknownError(
            f"{self.what}: {why} before the broker confirmed; it is stored, and the next instance with this "
            "outbox_path sends it"
        )


class Storing:
    """A message on its way to the disk: an ``Append`` of the journal, and an entry of the admission."""

    __slots__ = (
        "deadline",
        "error",
        "is_waiting",
        "looked_at",
        "offset",
        "outbox",
        "publication",
        "record",
        "sequence",
    )

    def __init__(self, outbox: Arrivals, record: bytes, publication: StoredPublication) -> None:
        self.outbox = outbox
        self.record = record
        self.publication = publication
        self.deadline = publication.deadline
        self.sequence = 0
        self.offset = -1
        self.error: MessagingError | None = None
        self.is_waiting = True
        self.looked_at = False

    @property
    def payload(self) -> bytes:
        """What the admission counts."""
        return self.record

    @property
    def what(self) -> str:
        """See ``Promise``."""
        return self.publication.what

    def stored(self, offset: int) -> None:
        """See ``Append``."""
        self.offset = offset
        self.outbox.note_arrived(self)

    def failed(self, error: MessagingError) -> None:
        """See ``Append``."""
        self.error = error
        self.outbox.note_arrived(self)

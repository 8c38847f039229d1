"""A message of a durable outbox: its publication, and what its record holds."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.environment import forks
from messaging.errors import ClosedError, MessagingError, OutcomeUnknownError
from messaging.execution import PENDING, Promise, clock
from messaging.journal import RecordTemplate
from messaging.model import Features, stored_properties
from messaging.publishing.publication import IdentifiedPublication, Publications, has_time

if TYPE_CHECKING:
    from messaging.model import MessageContext, PublishPlan

#: extensions that do not belong to a stored message: they concern the promise. The message id does: an id of the
#: application travels where a generated one does not
_NOT_STORED: Final = frozenset({Features.EXTENSION_STORE_AND_FORWARD, Features.EXTENSION_TIMEOUT})
#: guards the first access to ``stored`` of each publication; held rarely and shortly, so one lock serves all
_stored_lock: Final = threading.Lock()
forks.hold_over_fork(_stored_lock)


class Arrivals(Protocol):
    """The interface of the durable outbox that its publications use."""

    def note_arrived(self, publication: StoredPublication) -> None:
        """Take a message that is stored, or was refused. On the thread of the journal."""


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


class StoredPublication(IdentifiedPublication):
    """A message of a durable outbox; for the journal an ``Append``."""

    __slots__ = ("_expires", "_stored", "arrivals", "is_arriving", "is_stored", "offset", "record", "store_error")
    count = 1
    may_expire = True

    def __init__(
        self, outbox: Publications, arrivals: Arrivals, payload: bytes, plan: PublishPlan, deadline: float
    ) -> None:
        # spelled out, as in Publication
        self._value = PENDING
        self._error = None
        self._listeners = None
        self.was_retrieved = False
        self.outbox = outbox
        self.payload = payload
        self.plan = plan
        self.correlation_id = plan.correlation_id
        self.deadline = deadline
        self.sequence = 0
        self.settled = False
        self.was_sent = False
        self.is_waiting = True
        self.arrivals = arrivals
        #: whether it counts as on its way to the disk
        self.is_arriving = True
        #: its bytes for the journal, until they are stored
        self.record = b""
        #: its place in the journal, once it is stored
        self.offset = -1
        self.is_stored = False
        self.store_error: MessagingError | None = None
        self._stored: Promise[None] | None = None
        time_to_live = plan.options.time_to_live
        #: when its time to live is over, monotonic seconds
        self._expires = inf if time_to_live is None else clock.monotonic() + time_to_live

    @property
    def stored(self) -> Promise[None]:
        """See ``Promise``."""
        if self.store_error is not None:  # it fails with the same error
            self.was_retrieved = True
        with _stored_lock:
            promise = self._stored
            if promise is None:
                promise = self._stored = Promise(lambda: f"store the message to {self.plan.channel!r}")
        self.tell_stored()  # it may have been stored before
        return promise

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        self.offset = offset
        self.arrivals.note_arrived(self)

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        self.store_error = error
        self.arrivals.note_arrived(self)

    def refuse(self, error: MessagingError) -> None:
        """Fail: the message is not on disk, and will not be sent. On the loop."""
        self.store_error = error
        self.settled = True
        if self._stored is not None:  # which fails with the same error: one of them has to be looked at
            self.was_retrieved = True
        self.tell_stored()
        self.reject(error)

    def tell_stored(self) -> None:
        """Settle the promise ``stored``, if there is one and its outcome is known."""
        promise = self._stored
        if promise is None:
            return
        if self.is_stored:
            promise.resolve(None)
        elif self.settled and self.store_error is not None:
            promise.reject(self.store_error)
        elif self.is_inherited:
            promise.reject(ClosedError(f"{promise.what}: begun by the parent of this process, which alone stores it"))

    def age(self, seconds: float) -> None:
        """Note that the message was accepted so long ago. A clock that was set back makes it no younger."""
        self._expires -= max(0.0, seconds)

    def prepare(self) -> bool:
        """See ``Publication``."""
        if self._expires == inf:
            return True
        return has_time(self, self.plan.options.time_to_live or 0.0, self._expires)

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

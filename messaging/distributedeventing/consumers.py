"""Consumers of this process: each with its terms, and its objects (RFC 214 5.2).

A *consumer* is a registered service. It has one *consumer object*, or with lifecycle ``SESSION`` and prototype scope
one for each session. Each object has a queue of its own. It is made for its first data event, and released after the
last lifecycle event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch import DispatchHandler
from messaging.distributedeventing.dispatched import DispatchedEvent
from messaging.distributedeventing.objects import ConsumerObject, ConsumerObjects
from messaging.distributedeventing.queues import ConsumerQueue, QueuedEvent
from messaging.distributedeventing.terms import ConsumerTerms, is_prototype, read_terms
from messaging.distributedeventing.whiteboard import DistributableEventConsumer, PushEventConsumer
from messaging.errors import EventQueueOverflowError, TooManyRequestsError
from messaging.execution import handlers_loop, running_loop
from messaging.services import interface_name
from messaging.text import SafeLog, tolerant

if TYPE_CHECKING:
    from messaging.dispatch import Tolerance
    from messaging.eventnetwork import Notification
    from messaging.execution import Lane, Pool
    from messaging.services import LdapFilter, ServiceReference, ServiceRegistry

logger = SafeLog(__name__)

PLAIN: Final = interface_name(PushEventConsumer)
WHOLE: Final = interface_name(DistributableEventConsumer)
#: close and error events may fill a queue to this many times its limit: they are what a consumer waits for
_LIFECYCLE_FACTOR: Final = 2


class EventConsumer(DispatchHandler[DispatchedEvent]):
    """A consumer: its terms and its objects. Thread safe.

    Args:
        reference: its service.
        kind: the interface that it is registered with.
        services: the registry that has it.
        terms: see :func:`read_terms`.
        pool: its threads deliver.
        tolerance: its time limit.
        limit: maximum number of events that one object may queue.
        changed: called after the consumer was added, changed or removed.
        forget: has routes made without the consumer, after it was discarded.
    """

    terms: ConsumerTerms

    def __init__(
        self,
        reference: ServiceReference,
        kind: str,
        services: ServiceRegistry,
        terms: ConsumerTerms,
        *,
        pool: Pool,
        tolerance: Tolerance,
        limit: int,
        changed: Callable[[], object],
        forget: Callable[[], object],
    ) -> None:
        super().__init__(reference, terms, tolerance=tolerance, block=lambda *_: None)
        self.kind = kind
        self.is_whole = kind == WHOLE
        self.pool = pool
        self.limit = limit
        self.loop = running_loop() or handlers_loop()
        self.services = services
        self._changed = changed
        self._forget_routes = forget
        self._is_prototype = is_prototype(reference)
        self._objects = ConsumerObjects()
        #: the object of the default session, or of all sessions, once it was made; what it is given after its queue has
        #: ended is dropped there
        self._only: ConsumerObject | None = None
        self.released: Callable[[ConsumerObject], None] = self._objects.released
        self._dropped = 0
        #: a further session was refused since the last one was accepted
        self._is_refusing = False

    @property
    def name(self) -> str:
        """Its name in the log."""
        return f"consumer {self.reference!r}"

    @property
    def waiting(self) -> int:
        """Number of events that wait for it."""
        return sum(len(each.queue) for each in self.objects())

    @property
    def dropped(self) -> int:
        """Number of events that it did not receive: its queue was full, it was discarded, or their session was over."""
        return self._dropped

    def objects(self) -> list[ConsumerObject]:
        """Return its objects."""
        return self._objects.all()

    @property
    def _has_several(self) -> bool:
        """Return whether each session has an object of its own (5.2.3)."""
        return self._is_prototype and self.terms.is_session_aware

    # --- called by the dispatcher

    def change(self, properties: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that sets new properties; a consumer that was discarded stays so."""
        terms = read_terms(properties, is_prototype=self._is_prototype)

        def take_over() -> None:
            self.terms = terms
            self._changed()

        return take_over

    def added(self) -> Callable[[], object]:
        """See ``DispatchHandler``."""
        return self._changed

    def removed(self) -> None:
        """Drop the events that wait for it."""
        self._close()
        self._changed()

    def unblock(self) -> None:
        """Do nothing: a consumer that was discarded stays so until it is registered anew."""

    def discard_waiting(self, lane: Lane) -> int:  # noqa: ARG002
        """Drop the events that wait for it."""
        return self._close()

    def describe(self, event: DispatchedEvent) -> str:
        """Return the event in words for the log."""
        return f"an event on {event.topic!r}"

    def _close(self) -> int:
        lost = self._objects.close()
        self._dropped += lost
        return lost

    # --- events

    def offer(
        self,
        event: DispatchedEvent,
        terms: ConsumerTerms,
        notification: Notification | None = None,
        later: dict[ConsumerQueue, int] | None = None,
    ) -> bool:
        """Queue an event if it is for this consumer; return whether it is. From any thread; never waits.

        Args:
            event: the event.
            terms: by which the consumer was found for its topic.
            notification: waits for its delivery.
            later: counts the data events of each queue, whose delivery the caller begins later.
        """
        if event.is_late and terms.is_session_aware:
            self._dropped += 1
            return False
        if event.kind != "data":
            return terms.is_session_aware and self._offer_lifecycle(event, notification)
        if terms.filter is not None and not _matches(terms.filter, event, self.name):
            return False
        found = self._only if event.session is None else None
        if found is None:
            found = self._object_for(event)
            if found is None:
                return False
        queued: Any = event
        if notification is not None:
            queued = QueuedEvent(event, notification.expect_part(self.name))
        queue = found.queue
        if queue.put(queued, is_delivered_now=later is None):
            if later is not None:
                later[queue] = later.get(queue, 0) + 1
            return True
        if notification is not None:
            queued.end()
        self._dropped += 1
        if not queue.has_ended:
            self._overflow(found)
        return True

    def _offer_lifecycle(self, event: DispatchedEvent, notification: Notification | None) -> bool:
        is_last = self._has_several
        found = self._objects.take(event.session) if is_last else self._objects.find(None)
        if found is None:  # it has no data of this session: nothing is made merely to be closed
            return False
        over = None if notification is None else notification.expect_part(self.name)
        queued = QueuedEvent(event, over, is_last=is_last)
        if is_last:
            found.queue.end(queued)
        elif not found.queue.put(queued, _LIFECYCLE_FACTOR * self.limit):
            queued.end()
            self._dropped += 1
            if not found.queue.has_ended:
                self._overflow(found)
        return True

    def _object_for(self, event: DispatchedEvent) -> ConsumerObject | None:
        try:
            found = self._objects.get(
                event.session if self._has_several else None, lambda session: ConsumerObject(self, session)
            )
        except TooManyRequestsError as error:
            self._dropped += 1
            if not self._is_refusing:
                self._is_refusing = True
                logger.error("%s: events of further sessions are dropped: %s", self.name, error)
            return None
        self._is_refusing = False
        if found is not None:
            if event.session is not None and self.terms.is_session_aware:
                found.note(event.session)
            if found.session is None:
                self._only = found
        return found

    def _overflow(self, found: ConsumerObject) -> None:
        """Disconnect an object whose queue is full: it receives one error event, and nothing after it (5.2.1)."""
        error = EventQueueOverflowError(f"{self.name} is {self.limit} events behind: it is disconnected")
        event = DispatchedEvent("", "error", None, session=found.session, failure=error)
        self._forget(found, str(error), last=QueuedEvent(event, is_last=True))

    def discard(self, found: ConsumerObject, reason: str, *, is_failure: bool = True) -> None:
        """Call an object no more (5.2.1)."""
        self._forget(found, f"{self.name} is discarded: {reason}", is_failure=is_failure)

    def _forget(
        self, found: ConsumerObject, text: str, *, last: QueuedEvent | None = None, is_failure: bool = True
    ) -> None:
        if not self._objects.discard(found, has_last=last is not None):
            return
        if not self._has_several:
            self.blocked = text
        (logger.error if is_failure else logger.info)("%s", text)
        self._dropped += found.queue.close() if last is None else found.queue.end(last, at_once=True)
        if self.blocked is not None:
            self._forget_routes()
            self._changed()

    @tolerant
    def __repr__(self) -> str:
        return f"<EventConsumer {self.reference!r}>"


def _matches(wanted: LdapFilter, event: DispatchedEvent, name: str) -> bool:
    """Return whether the payload of an event passes the filter of the consumer ``name``."""
    try:
        return event.matches(wanted.matches)
    except Exception as error:  # the payload is the application's
        logger.error("%s does not get an event on %r: its filter failed", name, event.topic, exc_info=error)
        return False

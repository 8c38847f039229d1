"""Consumers of this process, made of functions and services: each with its terms, and its objects (RFC 214 5.2).

A *consumer* is a registered service. It has one *consumer object*, or with lifecycle ``SESSION`` and prototype scope
one for each session. Each object has a queue of its own. It is fetched for its first data event, called with one event
at a time, and released after the last lifecycle event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from inspect import isawaitable
from typing import Any, Final, TypeAlias, TypedDict

from messaging.dispatch import DispatchHandler, EventService, Principal, contained, run_elsewhere, too_long
from messaging.dispatch.eventnetwork import DeliveryNotification
from messaging.distributedeventing.events import DispatchedEvent, SessionKey
from messaging.distributedeventing.queues import ConsumerQueue, QueuedEvent
from messaging.distributedeventing.whiteboard import (
    ConsumerTerms,
    DistributableEventConsumer,
    PushEventConsumer,
    is_prototype,
    read_terms,
)
from messaging.distributedeventing.whiteboard import DistributedEventConstants as Names
from messaging.errors import (
    ArgumentError,
    ConversionError,
    EventQueueOverflowError,
    InvalidEventError,
    TooManyRequestsError,
)
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Lane, Promise, handlers_loop, running_loop
from messaging.services import LdapFilter, ServiceProperties, ServiceReference, ServiceRegistration, interface_name

logger = SafeLog(__name__)

PLAIN: Final = interface_name(PushEventConsumer)
WHOLE: Final = interface_name(DistributableEventConsumer)
#: sessions that one consumer may have at a time; further ones are refused and logged
MAX_SESSIONS: Final = 10_000
#: longest delay that a consumer may ask for, seconds
_MAX_DELAY: Final = 86_400.0
#: close and error events may fill a queue to this many times its limit: they are what a consumer waits for
_LIFECYCLE_FACTOR: Final = 2


class ConsumerObject:
    """One consumer object with its queue.

    Args:
        consumer: its consumer.
        session: its session; ``None`` for the default session, or for all of them.
    """

    def __init__(self, consumer: EventConsumer, session: SessionKey) -> None:
        self.session = session
        #: sessions that it has data events of and no lifecycle event yet
        self.active: set[SessionKey] = set()
        self._consumer = consumer
        self._accept: Callable[[Any], Any] | None = None
        self.queue = ConsumerQueue(
            self._deliver,
            consumer.admin.pool,
            consumer.name,
            timeout=consumer.timeout,
            stalled=self._stalled,
            limit=consumer.limit,
        )

    def _stalled(self, _: Lane) -> None:
        self._consumer.discard(self, too_long(self._consumer.timeout))

    def _deliver(self, queued: QueuedEvent | DispatchedEvent) -> float:
        """Call the consumer object with an event; return the delay before the next one, seconds. Never raises."""
        consumer = self._consumer
        event: DispatchedEvent = queued if isinstance(queued, DispatchedEvent) else queued.event
        delay = 0.0
        with contained(self._failed, event):
            push_event = self._push_event(event)
            if push_event is not None:
                accept = self._accept or self._fetch()
                result = None if accept is None else accept(push_event)
                if result and not isinstance(result, Promise):  # a consumer may end with publish_event
                    if isawaitable(result):
                        result = run_elsewhere(result, consumer.loop, consumer.timeout)
                    delay = self._back_pressure(result)
        if not isinstance(queued, DispatchedEvent):
            self._end(queued, event)
        return delay

    def _failed(self, event: DispatchedEvent, error: BaseException) -> None:
        consumer = self._consumer
        consumer.failures += 1
        logger.error("%s: %s failed on an event on %r", consumer.title, consumer.name, event.topic, exc_info=error)
        consumer.discard(self, f"it raised {type(error).__name__}")

    def _end(self, queued: QueuedEvent, event: DispatchedEvent) -> None:
        """Note that an event was delivered that a notification waits for, or that ends a session."""
        queued.end()
        if queued.is_last:
            self.queue.close()
            self._consumer.objects.released(self)
        elif event.kind != "data":
            self.active.discard(event.session)
            if not self.active:  # none of its sessions is left: it is released (5.2.3)
                self._accept = None

    def _push_event(self, event: DispatchedEvent) -> Any:
        consumer = self._consumer
        try:
            return event.push_event(consumer.terms.convert, consumer.is_whole)
        except (ConversionError, InvalidEventError) as error:
            logger.error("%s: %s: event on %r skipped: %s", consumer.title, consumer.name, event.topic, error)
            return None

    def _fetch(self) -> Callable[[Any], Any] | None:
        """Return the function of the consumer object, which the registry makes or has; ``None`` if it has gone."""
        consumer = self._consumer
        service = consumer.admin.services.get(consumer.reference)
        if service is None:
            if not (is_prototype(consumer.reference) and consumer.admin.services.is_registered(consumer.reference)):
                return None  # unregistered just now, or its lease ended: it gets no event any more, which is no failure
            raise ArgumentError("its factory returned None")
        accept: Callable[[Any], Any] = getattr(service, "accept", service)
        if not callable(accept):
            raise ArgumentError(f"a {type(service).__name__} is neither a function nor has accept()")
        self._accept = accept
        return accept

    def _back_pressure(self, result: Any) -> float:
        """Return the delay that a consumer asks for, seconds; discard it if the result is negative."""
        if not result:
            return 0.0
        if isinstance(result, bool) or not isinstance(result, (int, float)):
            logger.error(
                "%s: %s returned a %s: back-pressure is a number of milliseconds, or negative to end; taken as 0",
                self._consumer.title, self._consumer.name, type(result).__name__,
            )  # fmt: skip
            return 0.0
        if result < 0:
            self._consumer.discard(self, "it answered with negative back-pressure", is_failure=False)
            return 0.0
        return min(result / 1000.0, _MAX_DELAY)


class ConsumerObjects:
    """The objects of one consumer, by session. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        #: by session; ``None`` in place of an object that was discarded
        self.opened: dict[SessionKey, ConsumerObject | None] = {}
        #: objects that receive no further event, and have not received their last one yet
        self._ending: dict[ConsumerObject, None] = {}
        self._is_closed = False

    def all(self) -> list[ConsumerObject]:
        """Return the objects."""
        with self._lock:
            return self._all()

    def _all(self) -> list[ConsumerObject]:
        return [*(each for each in self.opened.values() if each is not None), *self._ending]

    def get(self, session: SessionKey, make: Callable[[SessionKey], ConsumerObject]) -> ConsumerObject | None:
        """Return the object of a session, made if necessary; ``None`` if it was discarded.

        Raises:
            TooManyRequestsError: there are ``MAX_SESSIONS``.
        """
        with self._lock:
            if self._is_closed:
                return None
            if session not in self.opened:
                if len(self.opened) + len(self._ending) >= MAX_SESSIONS:
                    raise TooManyRequestsError(f"{MAX_SESSIONS} sessions are open, which is the maximum")
                self.opened[session] = make(session)
            return self.opened[session]

    def take(self, session: SessionKey) -> ConsumerObject | None:
        """Return the object of a session, if there is one, which is over: it stays until it is :meth:`released`."""
        with self._lock:
            found = self.opened.pop(session, None)
            if found is not None:
                self._ending[found] = None
            return found

    def released(self, found: ConsumerObject) -> None:
        """Forget an object that received its last event."""
        with self._lock:
            self._ending.pop(found, None)

    def discard(self, found: ConsumerObject, *, has_last: bool = False) -> bool:
        """Have no object in the place of ``found`` any more; return whether it was there.

        With ``has_last`` it stays until it is :meth:`released`, because it receives a last event.
        """
        with self._lock:
            if self.opened.get(found.session) is found:
                self.opened[found.session] = None
                if has_last:
                    self._ending[found] = None
                return True
            if has_last or found not in self._ending:
                return False
            del self._ending[found]
            return True

    def close(self) -> int:
        """Remove all objects, and make no more; return how many events waited for them."""
        with self._lock:
            self._is_closed = True
            found = self._all()
            self.opened.clear()
            self._ending.clear()
        return sum(each.queue.close() for each in found)


class EventConsumer(DispatchHandler[DispatchedEvent]):
    """A consumer: its terms and its objects. Thread safe.

    Args:
        reference: its service.
        kind: the interface that it is registered with.
        terms: see :func:`read_terms`.
        admin: its threads deliver, its tolerance has the time limit.
        limit: maximum number of events that one object may queue.
    """

    terms: ConsumerTerms

    def __init__(
        self,
        reference: ServiceReference,
        kind: str,
        terms: ConsumerTerms,
        *,
        admin: EventService,
        limit: int,
    ) -> None:
        super().__init__(admin.title, reference, terms, tolerance=admin.tolerance, block=lambda *_: None)
        self.kind = kind
        #: whether it receives whole events
        self.is_whole = kind == WHOLE
        self.admin = admin
        self.limit = limit
        #: where its coroutines run
        self.loop = running_loop() or handlers_loop()
        self._is_prototype = is_prototype(reference)
        #: its objects, by session
        self.objects = ConsumerObjects()
        #: the object of the default session, or of all sessions, once it was made; what it is given after its queue has
        #: ended is dropped there
        self._only: ConsumerObject | None = None
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
        return sum(len(each.queue) for each in self.objects.all())

    @property
    def dropped(self) -> int:
        """Number of events that it did not receive: its queue was full, it was discarded, or their session was over."""
        return self._dropped

    @property
    def _has_several(self) -> bool:
        """Return whether each session has an object of its own (5.2.3)."""
        return self._is_prototype and self.terms.is_session_aware

    # --- called by the dispatcher

    def change(self, properties: Mapping[str, Any]) -> Callable[[], None]:
        """See ``DispatchHandler``; a consumer that was discarded stays so."""
        terms = read_terms(properties, is_prototype=self._is_prototype)

        def take_over() -> None:
            self.terms = terms

        return take_over

    def removed(self) -> None:
        """Drop the events that wait for it."""
        self._close()

    def unblock(self) -> None:
        """Do nothing: a consumer that was discarded stays so until it is registered anew."""

    def discard_waiting(self, lane: Lane) -> int:  # noqa: ARG002
        """Drop the events that wait for it."""
        return self._close()

    def _close(self) -> int:
        lost = self.objects.close()
        self._dropped += lost
        return lost

    # --- events

    def offer(
        self,
        event: DispatchedEvent,
        terms: ConsumerTerms,
        notification: DeliveryNotification | None = None,
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
        if terms.filter is not None and not self._accepts(event, terms.filter):
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

    def _accepts(self, event: DispatchedEvent, wanted: LdapFilter) -> bool:
        """Return whether the payload of an event passes a filter."""
        try:
            return event.matches(wanted.matches)
        except Exception as error:  # the payload is the application's
            logger.error(
                "%s: %s: event on %r skipped: its filter failed", self.title, self.name, event.topic, exc_info=error
            )
            return False

    def _offer_lifecycle(self, event: DispatchedEvent, notification: DeliveryNotification | None) -> bool:
        is_last = self._has_several
        found = self.objects.take(event.session) if is_last else self.objects.opened.get(None)
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
            found = self.objects.get(
                event.session if self._has_several else None, lambda session: ConsumerObject(self, session)
            )
        except TooManyRequestsError as error:
            self._dropped += 1
            if not self._is_refusing:
                self._is_refusing = True
                logger.error("%s: %s: events of further sessions are dropped: %s", self.title, self.name, error)
            return None
        self._is_refusing = False
        if found is not None:
            if event.session is not None and self.terms.is_session_aware and len(found.active) < MAX_SESSIONS:
                found.active.add(event.session)
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
        if not self.objects.discard(found, has_last=last is not None):
            return
        if not self._has_several:
            self.blocked = text
        (logger.error if is_failure else logger.info)("%s: %s", self.title, text)
        self._dropped += found.queue.close() if last is None else found.queue.end(last, at_once=True)
        if self.blocked is not None:
            self.admin.dispatcher.forget()

    @tolerant
    def __repr__(self) -> str:
        return f"<EventConsumer {self.reference!r}>"


#: the route of a topic: its consumers with the terms by which they match, the preferred first
Route: TypeAlias = tuple[tuple[EventConsumer, ConsumerTerms], ...]

#: see ``ConsumerRegistrar``
_PRUNE_AT: Final = 64


class ConsumerOptions(TypedDict, total=False):
    """Options of ``DistributedEventAdmin.on``; see there."""

    type: Any
    is_whole: bool
    is_session_aware: bool
    is_advertised: bool
    filter: str | None
    principal: Principal
    timeout: float | None


class ConsumerRegistrar:
    """Registers functions as consumers of one admin, and makes the consumers of its services. Thread safe.

    Args:
        admin: its registry, its delivery threads, and the time limit of its consumers.
        target: LDAP filter that matches the admin only.
        limit: maximum number of events that a consumer may queue.
    """

    def __init__(self, admin: EventService, target: str, limit: int) -> None:
        self._admin = admin
        self._target = target
        self._limit = limit
        self._lock = threading.RLock()  # guards the following; reentrant for signal handlers
        self._made: list[ServiceRegistration] = []
        #: number of registrations at which ended ones are forgotten
        self._prune_at = _PRUNE_AT

    def close(self) -> None:
        """Unregister the consumers that :meth:`register` registered."""
        with self._lock:
            made, self._made = self._made, []
        for each in made:
            each.unregister()

    def _keep(self, registration: ServiceRegistration) -> None:
        with self._lock:
            self._made.append(registration)
            if len(self._made) >= self._prune_at:
                self._made = [each for each in self._made if self._admin.services.is_registered(each.reference)]
                self._prune_at = max(_PRUNE_AT, 2 * len(self._made))
        if not self._admin.is_open:  # closed meanwhile
            registration.unregister()
            self._admin.refuse_closed()

    def register(
        self,
        consumer: Any,
        topics: tuple[str, ...],
        type_: Any,
        *,
        is_whole: bool = False,
        is_session_aware: bool = False,
        is_advertised: bool = True,
        filter: str | None = None,  # noqa: A002  # the name of the option
        principal: Principal = None,
        timeout: float | None = None,
    ) -> ServiceRegistration:
        """Register a consumer of this admin only; raise the errors for which the admin ignores a consumer."""
        self._admin.refuse_closed()
        if not callable(getattr(consumer, "accept", consumer)):
            raise ArgumentError(f"a {type(consumer).__name__} is neither a function nor has accept()")
        optional = {
            Names.EVENT_TYPE: type_,
            Names.EVENT_FILTER: filter,
            Names.EVENT_PRINCIPAL: principal,
            Names.EVENT_TIMEOUT: timeout,
        }
        properties = {
            Names.EVENT_TOPICS: list(topics),
            Names.EVENT_LIFECYCLE: "SESSION" if is_session_aware else "UNIFIED",
            Names.EVENT_ADVERTISED: is_advertised,
            Names.EVENT_TARGET: self._target,
            **{name: value for name, value in optional.items() if value is not None},
        }
        terms = read_terms(properties, is_prototype=False)
        whole = is_whole or isinstance(consumer, DistributableEventConsumer)
        interface = DistributableEventConsumer if whole else PushEventConsumer
        registration = self._admin.dispatcher.register(interface, consumer, properties, terms)
        self._keep(registration)
        return registration

    def make(self, reference: ServiceReference, kind: str, properties: ServiceProperties) -> EventConsumer | None:
        """Return the consumer of a service; ``None`` if its other interface counts (5.2.1). See ``Dispatcher``."""
        if kind == PLAIN and WHOLE in reference.interfaces:
            return None
        return EventConsumer(
            reference,
            kind,
            read_terms(properties, is_prototype=is_prototype(reference)),
            admin=self._admin,
            limit=self._limit,
        )

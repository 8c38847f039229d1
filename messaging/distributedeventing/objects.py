"""The objects of a consumer: fetched for the first event, called one event at a time, released (RFC 214 5.2.1,
5.2.3)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.dispatch import run_elsewhere, too_long
from messaging.distributedeventing.dispatched import DispatchedEvent
from messaging.distributedeventing.queues import ConsumerQueue, QueuedEvent
from messaging.distributedeventing.terms import is_prototype
from messaging.errors import ArgumentError, ConversionError, InvalidEventError, TooManyRequestsError
from messaging.execution import Promise
from messaging.text import SafeLog

if TYPE_CHECKING:
    import asyncio

    from messaging.distributedeventing.dispatched import SessionKey
    from messaging.distributedeventing.terms import ConsumerTerms
    from messaging.execution import Lane, Pool
    from messaging.services import ServiceReference, ServiceRegistry

logger = SafeLog(__name__)

#: sessions that one consumer may have at a time; further ones are refused and logged
MAX_SESSIONS: Final = 10_000
#: longest delay that a consumer may ask for, seconds
_MAX_DELAY: Final = 86_400.0


class Owner(Protocol):
    """The consumer of an object, as the object uses it."""

    services: ServiceRegistry
    reference: ServiceReference
    terms: ConsumerTerms
    pool: Pool
    limit: int
    #: events that it failed on
    failures: int
    #: whether it receives whole events
    is_whole: bool
    #: called with an object that received its last event
    released: Callable[[ConsumerObject], None]
    #: where its coroutines run
    loop: asyncio.AbstractEventLoop

    @property
    def name(self) -> str:
        """Its name in the log."""

    @property
    def timeout(self) -> float:
        """Its time limit for one event, seconds; 0: none."""

    def discard(self, found: ConsumerObject, reason: str, *, is_failure: bool = True) -> None:
        """Call an object no more."""


class ConsumerObject:
    """One consumer object with its queue.

    Args:
        consumer: its consumer.
        session: its session; ``None`` for the default session, or for all of them.
    """

    def __init__(self, consumer: Owner, session: SessionKey) -> None:
        self.session = session
        #: sessions that it has data events of and no lifecycle event yet
        self.active: set[SessionKey] = set()
        self._consumer = consumer
        self._accept: Callable[[Any], Any] | None = None
        self.queue = ConsumerQueue(
            self._deliver,
            consumer.pool,
            consumer.name,
            timeout=consumer.timeout,
            stalled=self._stalled,
            limit=consumer.limit,
        )

    def note(self, session: SessionKey) -> None:
        """Note that a session has data events for it. Any thread."""
        if len(self.active) < MAX_SESSIONS:
            self.active.add(session)

    def _stalled(self, _: Lane) -> None:
        self._consumer.discard(self, too_long(self._consumer.timeout))

    def _deliver(self, queued: QueuedEvent | DispatchedEvent) -> float:
        """Call the consumer object with an event; return the delay before the next one, seconds. Never raises."""
        consumer = self._consumer
        event: DispatchedEvent = queued if isinstance(queued, DispatchedEvent) else queued.event
        delay = 0.0
        try:
            push_event = self._push_event(event)
            if push_event is not None:
                accept = self._accept or self._fetch()
                result = None if accept is None else accept(push_event)
                if result and not isinstance(result, Promise):  # a consumer may end with publish_event
                    if isawaitable(result):
                        result = run_elsewhere(result, consumer.loop, consumer.timeout)
                    delay = self._back_pressure(result)
        except BaseException as error:  # no exception of a consumer may keep events from others
            consumer.failures += 1
            logger.error("%s failed on an event on %r", consumer.name, event.topic, exc_info=error)
            consumer.discard(self, f"it raised {type(error).__name__}")
        finally:
            if not isinstance(queued, DispatchedEvent):
                self._end(queued, event)
        return delay

    def _end(self, queued: QueuedEvent, event: DispatchedEvent) -> None:
        """Note that an event was delivered that a notification waits for, or that ends a session."""
        queued.end()
        if queued.is_last:
            self.queue.close()
            self._consumer.released(self)
        elif event.kind != "data":
            self._session_over(event.session)

    def _push_event(self, event: DispatchedEvent) -> Any:
        consumer = self._consumer
        try:
            return event.push_event(consumer.terms.convert, consumer.is_whole)
        except (ConversionError, InvalidEventError) as error:
            logger.error("%s does not get an event on %r: %s", consumer.name, event.topic, error)
            return None

    def _fetch(self) -> Callable[[Any], Any] | None:
        """Return the function of the consumer object, which the registry makes or has; ``None`` if it has gone."""
        consumer = self._consumer
        service = consumer.services.get(consumer.reference)
        if service is None:
            if not (is_prototype(consumer.reference) and consumer.services.is_registered(consumer.reference)):
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
                "%s returned a %s: back-pressure is a number of milliseconds, or negative to end; taken as 0",
                self._consumer.name, type(result).__name__,
            )  # fmt: skip
            return 0.0
        if result < 0:
            self._consumer.discard(self, "it answered with negative back-pressure", is_failure=False)
            return 0.0
        return min(result / 1000.0, _MAX_DELAY)

    def _session_over(self, session: SessionKey) -> None:
        """Release the object when none of its sessions is left (5.2.3)."""
        self.active.discard(session)
        if not self.active:
            self._accept = None


class ConsumerObjects:
    """The objects of one consumer, by session. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        #: ``None`` in place of an object that was discarded
        self._objects: dict[SessionKey, ConsumerObject | None] = {}
        #: objects that receive no further event, and have not received their last one yet
        self._ending: dict[ConsumerObject, None] = {}
        self._is_closed = False

    def all(self) -> list[ConsumerObject]:
        """Return the objects."""
        with self._lock:
            return self._all()

    def _all(self) -> list[ConsumerObject]:
        return [*(each for each in self._objects.values() if each is not None), *self._ending]

    def get(self, session: SessionKey, make: Callable[[SessionKey], ConsumerObject]) -> ConsumerObject | None:
        """Return the object of a session, made if necessary; ``None`` if it was discarded.

        Raises:
            TooManyRequestsError: there are ``MAX_SESSIONS``.
        """
        with self._lock:
            if self._is_closed:
                return None
            if session not in self._objects:
                if len(self._objects) + len(self._ending) >= MAX_SESSIONS:
                    raise TooManyRequestsError(f"{MAX_SESSIONS} sessions are open, which is the maximum")
                self._objects[session] = make(session)
            return self._objects[session]

    def find(self, session: SessionKey) -> ConsumerObject | None:
        """Return the object of a session, if there is one."""
        return self._objects.get(session)

    def take(self, session: SessionKey) -> ConsumerObject | None:
        """Return the object of a session, if there is one, which is over: it stays until it is :meth:`released`."""
        with self._lock:
            found = self._objects.pop(session, None)
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
            if self._objects.get(found.session) is found:
                self._objects[found.session] = None
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
            self._objects.clear()
            self._ending.clear()
        return sum(each.queue.close() for each in found)

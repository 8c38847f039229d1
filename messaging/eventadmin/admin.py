"""EventAdmin: events by topic and filter, synchronous and asynchronous (RFC 97 5.1.3, 5.2, 5.3, 6.4).

**Posted events** go through one queue, handler by handler: who gets an event is determined when it is posted, and all
of them have returned from it before anybody gets the next one (requirement 15). Handlers that do without
(``async.unordered``) have queues of their own. A handler that has been unregistered meanwhile is not called. If its
filter was changed meanwhile, it is called: the filter is applied when the event is posted.

**Sent events** are handled before ``send_event`` returns, handler by handler, on the thread that sends. With a
``send_timeout`` each handler is called on a thread of its own instead, and whoever sends does not wait any longer.

**Stalled handlers** are blocked: they get no more events until their registration is updated, and delivery goes on
with the next handler on another thread. No lock is held while a handler runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from messaging.coroutines import is_coroutine, running_loop
from messaging.dispatch.dispatcher import Dispatcher
from messaging.dispatch.handler import (
    Handler,
    HandlerDTO,
    Terms,
    Tolerance,
    dto_of,
    read_filter,
    read_principal,
    read_timeout,
    read_topics,
)
from messaging.dispatch.lanes import ThreadLane
from messaging.dispatch.permission import TopicPermission
from messaging.dispatch.service import EventService
from messaging.dispatch.topics import parse_filter
from messaging.errors import ArgumentError, ClosedError, NullEventError
from messaging.eventadmin.constants import EventConstants as Names
from messaging.eventadmin.event import Event
from messaging.eventadmin.handlers import EventHandler
from messaging.promise import Promise
from messaging.services import ServiceRegistry, default_registry
from messaging.services.filter import as_filter
from messaging.workers import workers

if TYPE_CHECKING:
    from messaging.dispatch.lanes import Lane
    from messaging.dispatch.permission import Principal, TopicPolicy
    from messaging.services import ServiceProperties, ServiceReference

logger = logging.getLogger(__name__)

#: exceptions do not block a handler (5.3.1), not returning does (5.3.2)
TOLERANCE: Final = Tolerance(failures=0)

#: the event that is being delivered in this context
delivering: contextvars.ContextVar[Event | None] = contextvars.ContextVar("delivering", default=None)

_numbers: Final = itertools.count(1)


@dataclass(frozen=True, slots=True)
class AdminTerms(Terms):
    """What the properties of an event handler ask for.

    Attributes:
        is_ordered: whether it needs its events in order.
    """

    is_ordered: bool = True


class AdminHandler(Handler[Event]):
    """A handler. If its service is a prototype, it is made with its first event; it is let go of when unregistered.

    Args:
        services: where it is registered.
        queue: of all posted events.
        reference, terms, options: see :class:`Handler`.
    """

    terms: AdminTerms

    def __init__(
        self, reference: ServiceReference, terms: AdminTerms, *, services: ServiceRegistry, queue: Lane, **options: Any
    ) -> None:
        self._services = services
        self._queue = queue
        self._function: Callable[[Event], Any] | None = None
        super().__init__(reference, self._call_service, terms, **options)
        self._loop = running_loop()

    @property
    def name(self) -> str:
        """See ``Handler``."""
        function = getattr(self._function, "__func__", self._function)
        what = "" if function is None else f" ({getattr(function, '__qualname__', type(function).__name__)})"
        return f"{self.reference!r}{what}"

    @property
    def is_active(self) -> bool:
        """Whether it may be called (5.2.2, 5.3.2)."""
        return self.is_registered and self.blocked is None

    @property
    def waiting(self) -> int:
        """Events on their way to it; if it needs them in order, those of others are counted, too."""
        return len(self.lane)

    # --- its service

    def fetch(self) -> Callable[[Event], Any] | None:
        """The function to call; ``None`` if it was unregistered. Raises what its factory raises."""
        if self._function is None:
            service = self._services.get(self.reference)
            if service is None:
                return None
            function = getattr(service, "handle_event", service)
            if not callable(function):
                raise ArgumentError(f"a {type(service).__name__} is neither a function nor has handle_event()")
            if self._function is None:  # two threads may have its first event
                self._function = function
        return self._function

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it is a coroutine function that runs on this loop."""
        return self._loop is loop and self._function is not None and is_coroutine(self._function)

    def _call_service(self, event: Event) -> Any:
        function = self.fetch()
        return None if function is None else function(event)

    # --- its lane

    def new_lane(self, *, is_held: bool = False) -> Lane:
        """See ``Handler``."""
        if self.terms.is_ordered:
            return self._queue
        lane: Lane = ThreadLane(
            self.receive_if_active,
            self._pool,
            self.name,
            timeout=self.timeout,
            stalled=lambda: self._stalled(lane),
            is_held=is_held,
        )
        return lane

    def give_up(self, lane: Lane) -> int:
        """See ``Handler``: what waits for it among others is passed over when it comes up."""
        return 0 if lane is self._queue else super().give_up(lane)

    def removed(self) -> None:
        """See ``Handler``."""
        if self.lane is not self._queue:
            super().removed()
        self._function = None

    def take_over(self, terms: AdminTerms) -> None:
        """Take over new properties. With the lock of the dispatcher."""
        was_ordered = self.terms.is_ordered
        self.terms = terms
        if terms.is_ordered != was_ordered:
            # what waits in the old one is delivered: its lane is not closed
            self.lane = self.new_lane()
        elif self.lane is not self._queue:
            self.lane.timeout = self.timeout

    # --- events

    def accepts(self, event: Event) -> bool:
        """Whether an event passes its filter."""
        try:
            return self.terms.filter is None or event.matches(self.terms.filter)
        except Exception:
            logger.exception("%s: its filter failed on %s", self.name, self.describe(event))
            return False

    def call(self, event: Event) -> Any:
        """See ``Handler``."""
        return self.function(event)

    def receive(self, event: Event) -> None:
        """See ``Handler``."""
        token = delivering.set(event)
        try:
            super().receive(event)
        finally:
            delivering.reset(token)

    def receive_if_active(self, event: Event) -> None:
        """Give it a posted event, unless it was unregistered or blocked meanwhile."""
        if self.is_active:
            self.receive(event)

    async def receive_async(self, event: Event) -> None:
        """Give it an event, on its loop."""
        token = delivering.set(event)
        try:
            await self._receive_async(event)
        finally:
            delivering.reset(token)

    def describe(self, event: Event) -> str:
        """See ``Handler``."""
        return f"the event {event.topic!r}"


@dataclass(frozen=True, slots=True)
class EventAdminDTO:
    """An EventAdmin as it is now. A snapshot."""

    name: str
    handlers: tuple[HandlerDTO, ...]
    #: threads that deliver now
    threads: int
    #: posted events times handlers that are still to come, but for those without order
    waiting: int


class EventAdmin(EventService):
    """An Event Admin service (5.1.3). Thread safe; a context manager, sync or async, that closes it.

    It registers itself in ``services``, and finds its handlers there. If there is more than one, clients use the one
    of the highest ranking, which is what ``services.service(EventAdmin)`` finds.

    Args:
        services: where handlers are registered; by default the process's registry.
        name: of it, in the log and as property ``event.admin.name``; made up if not given.
        permissions: who may publish and subscribe to what; without it everybody may everything.
        tolerance: when a handler that fails or does not return is blocked. By default one that takes more than 30
            seconds for a posted event is; exceptions block none.
        send_timeout: how long a handler may take for an event that was sent, seconds; 0: for ever, on the thread that
            sends. A handler's own ``event.timeout`` takes the place of it, unless it is 0.
        without_topics: what handlers get that say nothing about topics: ``all`` events, as the RFC has it, or
            ``none``, as later versions of Event Admin do.
        threads: how many threads deliver at most.
        ranking: ``service.ranking`` of its registration.

    Raises:
        ArgumentError: one of these is not as described.
    """

    _dispatcher: Dispatcher[AdminHandler, list[AdminHandler]]

    def __init__(
        self,
        services: ServiceRegistry | None = None,
        *,
        name: str | None = None,
        permissions: TopicPolicy | None = None,
        tolerance: Tolerance = TOLERANCE,
        send_timeout: float = 0,
        without_topics: Literal["all", "none"] = "all",
        threads: int | None = None,
        ranking: int = 0,
    ) -> None:
        super().__init__(f"event-admin-{next(_numbers)}" if name is None else name, threads)
        if without_topics not in ("all", "none"):
            raise ArgumentError(f"without_topics must be 'all' or 'none', not {without_topics!r:.80}")
        self.services = default_registry() if services is None else services
        self._tolerance = tolerance
        self._send_timeout = read_timeout(send_timeout, "send_timeout") or 0.0
        self._without_topics = () if without_topics == "none" else (parse_filter("*"),)
        self._properties = {Names.EVENT_ADMIN_NAME: self.name, "service.ranking": ranking}
        #: whose turn it is, of posted events
        self._current: AdminHandler | None = None
        self._queue = ThreadLane(
            self._deliver, self._pool, f"the event admin {self.name!r}", timeout=0, stalled=self._stalled
        )
        self._open(
            Dispatcher(
                f"the event admin {self.name!r}",
                self.services,
                (EventHandler,),
                make=self._make,
                change=self._change,
                route=lambda _, handlers: handlers,
                policy=permissions,
            ),
            [(EventAdmin, self, self._properties)],
        )

    # --- events

    def post_event(self, event: Event, *, principal: Principal = None) -> None:
        """Publish an event asynchronously: returns before it is delivered (5.2.2, 6.4.1).

        Who gets it is determined here. Events of one thread are delivered in the order they were posted; of all
        events, none is delivered to anybody before the one before it has been to all.

        Where handlers are thousands of events behind, this waits for them (not on event loops, nor in handlers).

        Args:
            event: what happened.
            principal: who publishes.

        Raises:
            NullEventError, ArgumentError: it is no event.
            PermissionDeniedError: the principal may not publish to its topic.
            ClosedError: the service is closed.
        """
        handlers = self._handlers_for(event, principal)
        ordered: list[tuple[AdminHandler, Event]] = []
        for handler in handlers:
            if handler.terms.is_ordered:
                ordered.append((handler, event))
            elif handler.lane.has_room():
                handler.lane.put(event)
        if ordered and self._queue.has_room():
            self._queue.put_all(ordered)

    def send_event(self, event: Event, *, principal: Principal = None, timeout: float | None = None) -> None:
        """Publish an event synchronously: returns when all handlers have returned (5.2.1, 6.4.2).

        Hold no locks that handlers may need. A handler may send events itself: those come before what is left of
        this one.

        Args:
            event: what happened.
            principal: who publishes.
            timeout: takes the place of ``send_timeout``.

        Raises:
            NullEventError, ArgumentError: it is no event; or one of its handlers is a coroutine function on the event
                loop that runs here, which would wait for itself: use :meth:`asend_event`. Nobody gets the event then.
            PermissionDeniedError: the principal may not publish to its topic.
            ClosedError: the service is closed.
        """
        seconds = self._seconds(timeout)
        handlers = self._handlers_for(event, principal)
        here = running_loop()
        if here is not None:
            for handler in handlers:
                self._fetch(handler)
                if handler.runs_on(here):
                    raise ArgumentError(
                        f"{handler.name} runs on the event loop that would wait for it: use asend_event()"
                    )
        for handler in handlers:
            if not handler.is_active:
                continue
            if not seconds:
                handler.receive(event)
                continue
            done = threading.Event()
            self._receive_elsewhere(handler, event, done.set)
            if not done.wait(handler.terms.timeout or seconds):
                self._took_too_long(handler, handler.terms.timeout or seconds)

    async def asend_event(self, event: Event, *, principal: Principal = None, timeout: float | None = None) -> None:
        """As :meth:`send_event`, for event loops: handlers that are functions are called on other threads."""
        seconds = self._seconds(timeout)
        here = asyncio.get_running_loop()
        for handler in self._handlers_for(event, principal):
            if not handler.is_active:
                continue
            self._fetch(handler)
            limit = (handler.terms.timeout or seconds) if seconds else None
            try:
                async with asyncio.timeout(limit):
                    if handler.runs_on(here):
                        await handler.receive_async(event)
                    else:
                        done: Promise[None] = Promise(f"the event {event.topic!r} for {handler.name}")
                        self._receive_elsewhere(handler, event, lambda done=done: done.resolve(None))  # type: ignore[misc]
                        await done
            except TimeoutError:
                self._took_too_long(handler, limit or 0.0)

    def _seconds(self, timeout: float | None) -> float:
        return self._send_timeout if timeout is None else read_timeout(timeout, "timeout") or 0.0

    def _handlers_for(self, event: Event, principal: Principal) -> list[AdminHandler]:
        """Who gets an event, now."""
        if event is None:
            raise NullEventError("an event is needed, not None")
        if not isinstance(event, Event):
            raise ArgumentError(f"an Event is needed; this is of type {type(event).__name__}")
        if not self._is_open:
            raise ClosedError(f"{self._dispatcher.name} is closed")
        topic = event.topic
        if self._dispatcher.policy is not None:
            self._dispatcher.check(principal, TopicPermission.PUBLISH, topic)
        handlers = self._dispatcher.routes.get(topic)
        if handlers is None:
            handlers = self._dispatcher.route(topic)
        return [each for each in handlers if each.terms.filter is None or each.accepts(event)]

    def _fetch(self, handler: AdminHandler) -> None:
        """Get its service, to see what it is; what is wrong with it shows when it is called."""
        try:
            handler.fetch()
        except Exception as error:  # noqa: BLE001
            logger.debug("%s: %s", handler.name, error)

    @staticmethod
    def _receive_elsewhere(handler: AdminHandler, event: Event, done: Callable[[], object]) -> None:
        context = contextvars.copy_context()

        def run() -> None:
            try:
                context.run(handler.receive, event)
            finally:
                done()

        workers().submit(run)

    def _took_too_long(self, handler: AdminHandler, seconds: float) -> None:
        self._dispatcher.block(handler, handler.lane, f"it took more than {seconds:g} s for one event")

    # --- the queue of posted events

    def _deliver(self, item: tuple[AdminHandler, Event]) -> None:
        handler, event = item
        if handler.is_active:
            self._current = handler
            self._queue.timeout = handler.timeout
            handler.receive(event)

    def _stalled(self) -> None:
        """Whoever has its turn does not return: it is the next one's, on another thread (5.3.2)."""
        handler = self._current
        if handler is not None:
            self._took_too_long(handler, handler.timeout)
        self._queue.restart()

    # --- handlers

    def _make(self, reference: ServiceReference, _: str, properties: ServiceProperties) -> AdminHandler | None:
        if not self._is_meant(properties):
            return None
        terms = self._read(properties)
        if _first(properties, Names.EVENT_TOPIC_NAMES) is None:
            logger.warning(
                "%s: the handler %r has no %s: it gets %s events",
                self._dispatcher.name if self._is_open else self.name,
                reference,
                Names.EVENT_TOPIC,
                "all" if self._without_topics else "no",
            )
        made = AdminHandler(
            reference,
            terms,
            services=self.services,
            queue=self._queue,
            pool=self._pool,
            tolerance=self._tolerance,
            block=self._dispatcher.block,
        )
        if properties["service.scope"] == "singleton":
            made.fetch()  # nothing is made by that, and what is no handler is found out at once
        return made

    def _change(self, handler: AdminHandler, properties: ServiceProperties) -> Callable[[], object] | None:
        if not self._is_meant(properties):
            return None
        terms = self._read(properties)
        return lambda: handler.take_over(terms)

    def _is_meant(self, properties: ServiceProperties) -> bool:
        target = as_filter(properties.get(Names.EVENT_TARGET))
        return target is None or target.matches(self._properties)

    def _read(self, properties: Mapping[str, Any]) -> AdminTerms:
        """What a handler asks for. Raises ``ArgumentError``: what is wrong with it."""
        topics = read_topics(_first(properties, Names.EVENT_TOPIC_NAMES), Names.EVENT_TOPIC, single_level=False)
        return AdminTerms(
            self._without_topics if topics is None else topics,
            read_filter(_first(properties, Names.EVENT_FILTER_NAMES)),
            read_principal(properties.get(Names.EVENT_PRINCIPAL), Names.EVENT_PRINCIPAL),
            read_timeout(properties.get(Names.EVENT_TIMEOUT), Names.EVENT_TIMEOUT),
            _read_delivery(properties.get(Names.EVENT_DELIVERY)),
        )

    # --- state

    def get_dto(self) -> EventAdminDTO:
        """What there is now: handlers, which of them are blocked and why, and how much waits."""
        return EventAdminDTO(
            name=self.name,
            handlers=tuple(dto_of(each, "EventHandler") for _, each in self._dispatcher.handlers()),
            threads=self._pool.threads,
            waiting=len(self._queue),
        )

    def _lanes(self) -> list[Lane]:
        return [*super()._lanes(), self._queue]

    def _closed(self) -> None:
        self._queue.close()

    def __repr__(self) -> str:
        return f"<EventAdmin {self.name!r}{'' if self._is_open else ', closed'}>"


def _first(properties: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((properties[name] for name in names if properties.get(name) is not None), None)


def _read_delivery(value: Any) -> bool:
    """Whether order is needed: unless there is ``async.unordered`` and no ``async.ordered``."""
    if value is None:
        return True
    several = (value,) if isinstance(value, str) else value
    known = (Names.DELIVERY_ASYNC_ORDERED, Names.DELIVERY_ASYNC_UNORDERED)
    if not isinstance(several, (list, tuple, set, frozenset)) or any(each not in known for each in several):
        raise ArgumentError(f"{Names.EVENT_DELIVERY} must be one or both of {', '.join(known)}, not {value!r:.80}")
    return Names.DELIVERY_ASYNC_ORDERED in several or Names.DELIVERY_ASYNC_UNORDERED not in several

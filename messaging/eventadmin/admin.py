"""EventAdmin: events by topic and filter, synchronous and asynchronous (RFC 97 5.1.3, 5.2, 5.3, 6.4).

**Posted events** go through one queue, handler by handler: who gets an event is determined when it is posted, and all
of them have returned from it before anybody gets the next one (requirement 15). Handlers that do without
(``async.unordered``) have queues of their own. A handler that has been unregistered meanwhile is not called, nor one
whose principal may not have the event any more. If its filter was changed meanwhile, it is called: the filter is
applied when the event is posted.

**Sent events** are handled before ``send_event`` returns, handler by handler, on the thread that sends. With a
``send_timeout`` each handler is called on a thread of its own instead, and whoever sends does not wait any longer.

**Stalled handlers** are blocked: they get no more events until their registration is updated, and delivery goes on
with the next handler on another thread. No lock is held while a handler runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from messaging.dispatch.dispatcher import Dispatcher
from messaging.dispatch.handler import (
    HandlerDTO,
    Tolerance,
    dto_of,
    read_timeout,
)
from messaging.dispatch.permission import TopicPermission, TopicPolicy
from messaging.dispatch.service import EventService
from messaging.dispatch.topics import parse_filter
from messaging.errors import ArgumentError, NullEventError, check_instance
from messaging.eventadmin.constants import EventConstants as Names
from messaging.eventadmin.event import Event
from messaging.eventadmin.handlers import EventHandler
from messaging.eventadmin.receiver import QUIET, AdminHandler, AdminTerms, read_terms, straggles, too_long, within
from messaging.execution import Flag, Promise, ThreadLane, running_loop, workers
from messaging.services import ServiceRegistry, default_registry
from messaging.services.filter import as_filter
from messaging.text import SafeLog, tolerant

if TYPE_CHECKING:
    from messaging.dispatch.permission import Principal
    from messaging.execution import Lane
    from messaging.services import ServiceProperties, ServiceReference

logger = SafeLog(__name__)

#: exceptions do not block a handler (5.3.1), not returning does (5.3.2)
TOLERANCE: Final = Tolerance(failures=0)

_numbers: Final = itertools.count(1)
_NOBODY: Final[Mapping[Any, Exception]] = {}


#: whose turn it is; its era when the event was posted; the event; whether that was since something was logged
_Item: TypeAlias = tuple[AdminHandler, int, Event, bool]


class Queue(ThreadLane):
    """All posted events, handler by handler."""

    def waiting(self) -> Counter[AdminHandler]:
        """How many events wait for whom."""
        items = [item for item in self._items.copy() if type(item) is tuple]
        return Counter(handler for handler, era, _, _ in items if handler.era == era)


class Route:
    """What there is to know to publish to one topic. Immutable.

    Args:
        handlers: those that match it, the preferred first.
    """

    __slots__ = ("_is_filtered", "handlers", "may_be_coroutines")

    def __init__(self, handlers: list[AdminHandler]) -> None:
        self.handlers = handlers
        #: or turn out to be when they are made
        self.may_be_coroutines = any(each.is_coroutine is not False for each in handlers)
        self._is_filtered = any(each.terms.filter is not None for each in handlers)

    def handlers_for(self, event: Event) -> list[AdminHandler]:
        """Those whose filters an event passes. Not to be changed."""
        return [each for each in self.handlers if each.accepts(event)] if self._is_filtered else self.handlers


@dataclass(frozen=True, slots=True)
class EventAdminDTO:
    """An EventAdmin as it is now. A snapshot."""

    name: str
    handlers: tuple[HandlerDTO, ...]
    #: threads that deliver now
    threads: int
    #: posted events that are still to come, once for each handler
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

    _dispatcher: Dispatcher[AdminHandler, Route]

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
        super().__init__(f"event-admin-{next(_numbers)}" if name is None else name, threads, tolerance, permissions)
        if without_topics not in ("all", "none"):
            raise ArgumentError(f"without_topics must be 'all' or 'none', not {without_topics!r:.80}")
        if services is not None:
            check_instance("services", services, ServiceRegistry)
        self.services = default_registry() if services is None else services
        self._send_timeout = read_timeout(send_timeout, "send_timeout") or 0.0
        self._without_topics = () if without_topics == "none" else (parse_filter("*"),)
        self._properties = {Names.EVENT_ADMIN_NAME: self.name, "service.ranking": ranking}
        #: whose turn it is, of posted events
        self._current: AdminHandler | None = None
        self._queue = Queue(
            self._deliver, self._pool, f"the event admin {self.name!r}", timeout=0, stalled=self._stalled
        )
        self._open(
            Dispatcher(
                f"the event admin {self.name!r}",
                self.services,
                (EventHandler,),
                make=self._make,
                change=self._change,
                route=lambda _, handlers: Route(handlers),
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
        thread = threading.get_ident()
        self._publishing.add(thread)
        try:
            route = self._route_of(event, principal)  # from here on, who closes it waits for this thread
            queue, is_quiet = self._queue, QUIET in within.get()
            ordered: list[_Item] = []
            for handler in route.handlers_for(event):
                lane = handler.lane
                if lane is queue:
                    ordered.append((handler, handler.era, event, is_quiet))
                elif lane.has_room():
                    lane.put((event, is_quiet))
            if ordered:
                if queue.has_room():
                    queue.put_all(ordered)
                else:
                    for handler, *_ in ordered:
                        handler.miss()
            if queue.is_closed:  # who closed it did not wait any longer, or was a signal on this thread
                self._refuse_closed()
        finally:
            self._publishing.discard(thread)

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
            KeyboardInterrupt, SystemExit: raised while a handler had the event, on the main thread; it is raised again
                when the others have had it, too.
        """
        seconds = self._send_timeout if timeout is None else self._seconds(timeout)
        route = self._route_of(event, principal)
        handlers = route.handlers_for(event)
        failed = self._refuse_waiting_for_itself(handlers) if route.may_be_coroutines else _NOBODY
        interrupt: BaseException | None = None
        for handler in handlers:
            if not handler.is_active:
                continue
            try:
                if handler in failed:
                    handler.fail(event, failed[handler])
                elif not seconds:
                    handler.receive(event)
                else:
                    limit = handler.terms.timeout or seconds
                    done = Flag()
                    self._receive_elsewhere(handler, event, limit, running_loop(), done.set)
                    if not done.wait(limit):
                        self._took_too_long(handler, limit)
            except (KeyboardInterrupt, SystemExit) as error:
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt

    @staticmethod
    def _refuse_waiting_for_itself(handlers: list[AdminHandler]) -> dict[AdminHandler, Exception]:
        """Refuse to send to coroutine functions on the event loop that runs here.

        Returns:
            Handlers that had to be made to see what they are, and could not be.
        """
        failed: dict[AdminHandler, Exception] = {}
        here = running_loop()
        if here is None:
            return failed
        for handler in handlers:
            try:
                handler.fetch()
            except Exception as error:  # noqa: BLE001
                failed[handler] = error
            if handler.runs_on(here):
                raise ArgumentError(f"{handler.name} runs on the event loop that would wait for it: use asend_event()")
        return failed

    async def asend_event(self, event: Event, *, principal: Principal = None, timeout: float | None = None) -> None:
        """As :meth:`send_event`, for event loops: handlers that are functions are called on other threads.

        If it is cancelled, the handler that has the event is cancelled, if it is a coroutine function; those after it
        do not get the event.
        """
        seconds = self._send_timeout if timeout is None else self._seconds(timeout)
        here = asyncio.get_running_loop()
        for handler in self._route_of(event, principal).handlers_for(event):
            if not handler.is_active:
                continue
            limit = (handler.terms.timeout or seconds) if seconds else 0.0
            if handler.runs_on(here):
                in_time = await self._receive_here(handler, event, limit)
            else:
                done: Promise[None] = Promise(f"the event {event.topic!r} for {handler.name}")
                self._receive_elsewhere(handler, event, limit, None, lambda done=done: done.resolve(None))  # type: ignore[misc]
                try:
                    async with asyncio.timeout(limit or None):
                        await done
                    in_time = True
                except TimeoutError:
                    in_time = False
            if not in_time:
                self._took_too_long(handler, limit)

    @staticmethod
    def _seconds(timeout: float) -> float:
        return read_timeout(timeout, "timeout") or 0.0

    def _route_of(self, event: Event, principal: Principal) -> Route:
        """Who may get an event, now."""
        if event is None:
            raise NullEventError("an event is needed, not None")
        if not isinstance(event, Event):
            raise ArgumentError(f"an Event is needed; this is of type {type(event).__name__}")
        if not self._is_open:
            self._refuse_closed()
        topic, dispatcher = event.topic, self._dispatcher
        if dispatcher.policy is not None:
            dispatcher.check(principal, TopicPermission.PUBLISH, topic)
        return dispatcher.routes.get(topic) or dispatcher.route(topic)

    @staticmethod
    async def _receive_here(handler: AdminHandler, event: Event, limit: float) -> bool:
        """Give an event to a coroutine function. Whether it has returned in time."""
        if not limit:
            await handler.receive_async(event)
            return True
        task = asyncio.ensure_future(handler.receive_async(event))
        straggles(task)
        try:
            done, _ = await asyncio.wait((task,), timeout=limit)
        finally:
            task.cancel()  # if it has not ended
        return bool(done)

    @staticmethod
    def _receive_elsewhere(
        handler: AdminHandler,
        event: Event,
        limit: float,
        waits: asyncio.AbstractEventLoop | None,
        done: Callable[[], object],
    ) -> None:
        context = contextvars.copy_context()

        def run() -> None:
            try:
                context.run(handler.receive, event, False, limit, waits)
            finally:
                done()

        workers().submit(run)

    def _took_too_long(self, handler: AdminHandler, seconds: float) -> None:
        self._dispatcher.block(handler, handler.lane, too_long(seconds))

    # --- the queue of posted events

    def _deliver(self, item: _Item) -> None:
        handler, era, event, is_quiet = item
        if handler.era == era:
            self._current = handler
            self._queue.timeout = timeout = handler.timeout
            handler.receive_posted(event, is_quiet, timeout)

    def _stalled(self) -> None:
        """Whoever has its turn does not return: it is the next one's, on another thread (5.3.2)."""
        handler = self._current
        try:
            if handler is not None:
                self._took_too_long(handler, self._queue.timeout)
        finally:
            self._queue.restart()

    # --- handlers

    def _make(self, reference: ServiceReference, _: str, properties: ServiceProperties) -> AdminHandler | None:
        if not self._is_meant(properties):
            return None
        made = AdminHandler(
            reference,
            self._read(reference, properties),
            admin=self,
            dispatcher=self._dispatcher,
            queue=self._queue,
            pool=self._pool,
            tolerance=self._tolerance,
        )
        if properties["service.scope"] == "singleton":
            # nothing is made by that, and what is no handler is found out at once
            made.fetch()
        return made

    def _change(self, handler: AdminHandler, properties: ServiceProperties) -> Callable[[], object] | None:
        if not self._is_meant(properties):
            return None
        terms = self._read(handler.reference, properties)
        return lambda: handler.take_over(terms)

    def _is_meant(self, properties: ServiceProperties) -> bool:
        target = as_filter(properties.get(Names.EVENT_TARGET))
        return target is None or target.matches(self._properties)

    def _read(self, reference: ServiceReference, properties: Mapping[str, Any]) -> AdminTerms:
        """What a handler asks for. Raises ``ArgumentError``: what is wrong with it."""
        terms = read_terms(properties)
        if terms.topics is not None:
            return terms
        logger.warning(
            "%s: the handler %r has no %s: it gets %s events",
            self._dispatcher.name,
            reference,
            Names.EVENT_TOPIC,
            "all" if self._without_topics else "no",
        )
        return replace(terms, topics=self._without_topics)

    # --- state

    def get_dto(self) -> EventAdminDTO:
        """What there is now: handlers, which of them are blocked and why, and how much waits."""
        queued = self._queue.waiting()
        found = [(each, dto_of(each, "EventHandler")) for _, each in self._dispatcher.handlers()]
        return EventAdminDTO(
            name=self.name,
            handlers=tuple(replace(dto, waiting=dto.waiting + queued[each]) for each, dto in found),
            threads=self._pool.threads,
            waiting=queued.total() + sum(dto.waiting for _, dto in found),
        )

    def _lanes(self) -> list[Lane]:
        # the queue first: if one of the others is closed, so is the queue
        return [self._queue, *(lane for _, each in self._dispatcher.handlers() for lane in each.lanes)]

    def _is_inside(self) -> bool:
        return self in within.get() or super()._is_inside()

    def _closed(self) -> None:
        self._queue.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<EventAdmin {self.name!r}{'' if self._is_open else ', closed'}>"

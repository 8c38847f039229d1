"""A handler as its EventAdmin knows it (RFC 97 5.1.2, 5.3): its function, its posted events and its failures.

Its function is found, or made by a factory, when its first event comes. Posted events wait in one queue for all
handlers, and in a lane for each handler that needs no order.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from messaging.dispatch import (
    EVENT_ADMIN,
    EventService,
    FunctionHandler,
    Terms,
    TopicPermission,
    check_principal,
    name_of,
    read_filter,
    read_timeout,
    read_topics,
    run_elsewhere,
    too_long,
)
from messaging.errors import ArgumentError, ClosedError, DeadlineError
from messaging.errors.checks import is_coroutine
from messaging.errors.text import SafeLog
from messaging.eventadmin.event import LOG_TOPIC, Event
from messaging.eventadmin.event import EventConstants as Names
from messaging.execution import Flag, Lane, Pool, ThreadLane, clock, handlers_loop, running_loop
from messaging.services import LdapFilter, ServiceReference, ServiceRegistry

logger = SafeLog(__name__)

#: a posted event for one handler: the handler, its era when the event was posted, the event, and whether it was posted
#: while a log event was handled
PostedItem: TypeAlias = "tuple[AdminHandler, int, Event, bool]"


class PostedQueue(ThreadLane):
    """The posted events of all ordered handlers: each event goes to all of its handlers before the next one does."""

    def __init__(self, pool: Pool, name: str) -> None:
        super().__init__(self._deliver, pool, name, timeout=0, stalled=self._pass_over)
        #: the handler that has the event being delivered
        self._current: AdminHandler | None = None

    def waiting_by_handler(self) -> Counter[AdminHandler]:
        """Return the number of waiting events of each handler."""
        items = [item for item in self.items() if type(item) is tuple]
        return Counter(handler for handler, era, _, _ in items if handler.era == era)

    def _deliver(self, item: PostedItem) -> None:
        handler, era, event, is_quiet = item
        if handler.era == era:
            self._current = handler
            self.timeout = timeout = handler.limit
            handler.receive_posted(event, is_quiet, timeout)

    def _pass_over(self, _: Lane) -> None:
        """Continue with the next handler, on another thread, since the current one does not return (5.3.2)."""
        handler = self._current
        try:
            if handler is not None:
                handler.stalled(self.timeout)
        finally:
            self.restart()


class _Making:
    """A call that makes the service, on one thread; other threads wait for it."""

    __slots__ = ("_thread", "done")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.done = Flag()

    def wait(self) -> None:
        """Wait until the service is made, or the call has failed."""
        if self._thread == threading.get_ident():
            raise ArgumentError("it is not made yet: its own factory caused an event for it")
        self.done.wait()


class HandlerFunction:
    """The function that a handler's service provides. Thread safe.

    A prototype's service is made with the first event, and released when the handler is removed. A coroutine function
    runs on the event loop of the registering thread, or else on one that all of those share.
    """

    __slots__ = ("_loop", "_making", "_reference", "_services", "current", "is_coroutine", "is_released")

    def __init__(self, reference: ServiceReference, services: ServiceRegistry) -> None:
        self._reference = reference
        self._services = services
        self._loop = running_loop()
        #: the call that makes the service, by process: a child process does not continue the call of its parent
        self._making: dict[int, _Making] = {}
        #: the function; ``None`` before it is made, and after it was released
        self.current: Callable[[Event], Any] | None = None
        #: whether it is a coroutine function; ``None`` before it is made
        self.is_coroutine: bool | None = None
        self.is_released = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop for coroutines."""
        return self._loop or handlers_loop()

    def fetch(self) -> Callable[[Event], Any] | None:
        """Return the function; ``None`` if the service was unregistered.

        The service is made once: further threads wait for the thread that makes it.

        Raises:
            ArgumentError: the service is no handler.
            Exception: raised by its factory.
        """
        while (function := self.current) is None:
            mine, process = _Making(), os.getpid()
            making = self._making.setdefault(process, mine)  # atomic
            if making is not mine:
                making.wait()
                continue
            try:
                function = self.current or self._get()
                self.current = function
            finally:
                del self._making[process]
                mine.done.set()
            if function is None or self.is_released:
                self.current = None
                return None
        return function

    def _get(self) -> Any:
        service = None if self.is_released else self._services.get(self._reference)
        if service is None:
            return None
        function = getattr(service, "handle_event", service)
        if not callable(function):
            raise ArgumentError(f"a {type(service).__name__} is neither a function nor has handle_event()")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ArgumentError(f"{name_of(function)} is a generator function: calling it would run nothing")
        self.is_coroutine = is_coroutine(function)
        return function

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether it is a coroutine function that runs on ``loop``."""
        return bool(self.is_coroutine) and self.loop is loop

    def renew_loop(self) -> None:
        """Replace a closed event loop with the one that runs here."""
        if self._loop is not None and self._loop.is_closed():
            self._loop = running_loop()

    def release(self) -> None:
        """Keep neither the function nor the service any longer."""
        self.is_released = True
        self.current = None


# --- the EventAdmins whose handlers the running code is part of: of a thread, or of a task and those that it starts

#: stands among the EventAdmins of a context that handles a log event, or an event caused by one
_LOG_EVENT: Final = object()

_admins: Final[contextvars.ContextVar[tuple[object, ...]]] = contextvars.ContextVar("admins", default=())


def is_inside(admin: object) -> bool:
    """Return whether the running code is part of a handler of ``admin``."""
    return admin in _admins.get()


def is_quiet() -> bool:
    """Return whether the running code handles a log event, or an event caused by one: its log is not posted."""
    return _LOG_EVENT in _admins.get()


def enter(admin: object, event: Event, is_quiet: bool = False) -> contextvars.Token[Any]:
    """Begin the delivery of ``event`` to a handler of ``admin``; return what :func:`leave` takes.

    Args:
        admin: the EventAdmin.
        event: the event.
        is_quiet: whether it was posted while a log event was handled.
    """
    inside = (admin, _LOG_EVENT) if is_quiet or event.topic == LOG_TOPIC else (admin,)
    outside = _admins.get()
    return _admins.set(tuple(dict.fromkeys((*outside, *inside))) if outside else inside)


#: ends the delivery that :func:`enter` began
leave: Final = _admins.reset


def leave_anywhere(token: contextvars.Token[Any]) -> None:
    """End a delivery even in another context, where a coroutine ends whose event loop was closed."""
    with contextlib.suppress(ValueError):
        leave(token)


# --- handlers


@dataclass(frozen=True, slots=True)
class AdminTerms(Terms):
    """The terms of an event handler.

    Attributes:
        is_ordered: whether it needs its events in order.
    """

    is_ordered: bool = True


def read_terms(properties: Mapping[str, Any]) -> AdminTerms:
    """Read the terms from the properties of an event handler; ``topics`` is ``None`` if they name none.

    Raises:
        ArgumentError: a property is invalid.
    """
    return AdminTerms(
        read_topics(_first(properties, Names.EVENT_TOPIC_NAMES), Names.EVENT_TOPIC, EVENT_ADMIN),
        read_filter(_first(properties, Names.EVENT_FILTER_NAMES)),
        check_principal(properties.get(Names.EVENT_PRINCIPAL), Names.EVENT_PRINCIPAL),
        read_timeout(properties.get(Names.EVENT_TIMEOUT), Names.EVENT_TIMEOUT),
        _read_delivery(properties.get(Names.EVENT_DELIVERY)),
    )


def _first(properties: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((properties[name] for name in names if properties.get(name) is not None), None)


def _read_delivery(value: Any) -> bool:
    """Return whether order is needed: unless there is ``async.unordered`` and no ``async.ordered``."""
    if value is None:
        return True
    several = (value,) if isinstance(value, str) else value
    known = (Names.DELIVERY_ASYNC_ORDERED, Names.DELIVERY_ASYNC_UNORDERED)
    if not isinstance(several, (list, tuple, set, frozenset)) or any(each not in known for each in several):
        raise ArgumentError(f"{Names.EVENT_DELIVERY} must be one or both of {', '.join(known)}, not {value!r:.80}")
    return Names.DELIVERY_ASYNC_ORDERED in several or Names.DELIVERY_ASYNC_UNORDERED not in several


class AdminHandler(FunctionHandler[Event]):
    """A handler of an EventAdmin. Its posted events wait in the queue of all handlers, or in a lane of its own.

    Args:
        reference, properties: its service, and what it asks for.
        admin: finds it, and has the threads that deliver.
        read: returns the terms that properties set. Raises ``ArgumentError`` if they are invalid.
        queue: the posted events of all handlers.
    """

    terms: AdminTerms
    passes_interrupts = True
    described = "the event"

    def __init__(
        self,
        reference: ServiceReference,
        properties: Mapping[str, Any],
        *,
        admin: EventService,
        read: Callable[[ServiceReference, Mapping[str, Any]], AdminTerms],
        queue: PostedQueue,
    ) -> None:
        self._dispatcher = dispatcher = admin.dispatcher
        terms = read(reference, properties)
        super().__init__(admin.title, reference, terms, tolerance=admin.tolerance, block=dispatcher.block)
        self.function = HandlerFunction(reference, admin.services)
        #: how long it may take for a posted event, seconds; 0: unlimited
        self.limit = 0.0
        #: grows when it is blocked: events posted in an earlier era are not delivered
        self.era = 0
        self.lane: Lane = queue
        self._queue = queue
        self._pool = admin.pool
        #: lanes from before a change of the order that still have events; replaced as a whole
        self._earlier: list[Lane] = []
        #: dropped events that the present lane has not counted
        self.dropped_before = 0
        self._read = read
        self._admin = admin
        self._services = admin.services
        self._apply_terms()

    @property
    def name(self) -> str:
        """Its name in the log: its service, and its function once that is made."""
        function = self.function.current
        return f"{self.reference!r}{'' if function is None else f' ({name_of(function)})'}"

    @property
    def waiting(self) -> int:
        """Number of events that wait for it, without those in the queue of all handlers."""
        return sum(map(len, self.lanes))

    @property
    def dropped(self) -> int:
        """Number of events that found no room, or waited when it was blocked."""
        return self.dropped_before + (0 if self.lane is self._queue else self.lane.room.dropped)

    @property
    def lanes(self) -> list[Lane]:
        """The lanes of its own."""
        lane = self.lane
        return self._earlier if lane is self._queue else [*self._earlier, lane]

    @property
    def is_active(self) -> bool:
        """Return whether it may be called (5.2.2, 5.3.2).

        The registry knows of an unregistration before the dispatcher.
        """
        return self.blocked is None and self.is_registered and self._services.is_registered(self.reference)

    # --- called by the dispatcher

    def change(self, properties: Mapping[str, Any]) -> Callable[[], object]:
        """See ``DispatchHandler``."""
        terms = self._read(self.reference, properties)

        def take_over() -> None:
            self.terms = terms
            self._apply_terms()

        return take_over

    def _apply_terms(self) -> None:
        """Choose the lane of events from now on. Events that wait already are delivered."""
        is_ordered = self.terms.is_ordered
        if is_ordered != (self.lane is self._queue):
            self.dropped_before = self.dropped
            self._earlier = [each for each in self.lanes if len(each) or each.is_scheduled]
            self.lane = self._queue if is_ordered else self._new_lane()
        self.limit = self.timeout
        for each in self.lanes:
            each.timeout = self.limit

    def _new_lane(self) -> Lane:
        def receive(item: tuple[Event, bool]) -> None:
            self.receive_posted(*item, self.timeout)

        return ThreadLane(receive, self._pool, self.name, timeout=self.timeout, stalled=self._lane_stalled)

    def _lane_stalled(self, lane: Lane) -> None:
        self.stalled(lane.timeout)
        self.dropped_before += lane.close()  # an earlier lane: blocking the handler has closed the present one

    def unblock(self) -> None:
        """Accept the events published from now on, in a new lane unless it is the queue of all."""
        self.function.renew_loop()
        self.dropped_before = self.dropped
        self._earlier = []
        if self.lane is not self._queue:
            self.lane = self._new_lane()
        self.blocked = None
        self.failures_in_a_row = 0

    def discard_waiting(self, lane: Lane) -> int:
        """Drop the events that wait for it, in ``lane`` and elsewhere; return how many. The queue passes over them."""
        del lane
        waiting = self._queue.waiting_by_handler()[self]
        self.era += 1
        lost = waiting + sum(each.close() for each in self.lanes)
        self.dropped_before += lost
        return lost

    def removed(self) -> None:
        """Drop the events in lanes of its own, and release its service."""
        for each in self.lanes:
            each.close()
        self.function.release()

    def stalled(self, limit: float) -> None:
        """Block it, since it did not return within ``limit`` seconds."""
        self.block(self.lane, too_long(limit))

    # --- events

    def accepts(self, event: Event, wanted: LdapFilter) -> bool:
        """Return whether ``event`` passes a filter that it has or had; a filter that raises lets nothing pass."""
        try:
            return event.matches(wanted)
        except Exception:
            logger.exception(
                "%s: handler %s: its filter failed on the event %r; the event is skipped",
                self.title, self.name, event.topic,
            )  # fmt: skip
            return False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its coroutines."""
        return self.function.loop

    def call(self, event: Event) -> Any:
        """Call the function, unless the service was unregistered; make it first if necessary."""
        function = self.function.current or self.function.fetch()
        return None if function is None else function(event)

    def receive(
        self,
        event: Event,
        is_quiet: bool = False,
        limit: float = 0.0,
        waiting_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Deliver ``event``.

        Args:
            event: the event.
            is_quiet: whether it was posted while a log event was handled.
            limit: how long an awaitable that the function returns may take, seconds; 0: unlimited.
            waiting_loop: an event loop that waits for the delivery.

        Raises:
            KeyboardInterrupt, SystemExit: on the main thread, where they are meant for the program. Nothing else.
        """
        token = enter(self._admin, event, is_quiet)
        try:
            self.deliver(event, partial(self._wait_for, limit, waiting_loop))
        finally:
            leave(token)

    def _wait_for(self, limit: float, waiting_loop: asyncio.AbstractEventLoop | None, awaitable: Any) -> None:
        loop = awaitable.get_loop() if asyncio.isfuture(awaitable) else self.loop
        if loop is waiting_loop or loop is running_loop():
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise ArgumentError("its result must be awaited by the event loop that waits for it: use asend_event()")
        begun = clock.monotonic()
        try:
            run_elsewhere(awaitable, loop, limit)
        except ClosedError:
            if not loop.is_closed():
                raise
            self.block(self.lane, "the event loop it ran on is closed")
        except DeadlineError:
            if not limit or clock.monotonic() - begun < limit:
                raise
            self.stalled(limit)

    def receive_posted(self, event: Event, is_quiet: bool, limit: float) -> None:
        """Deliver a posted event, unless it was unregistered or blocked meanwhile, or lost the permission."""
        dispatcher = self._dispatcher
        if self.is_active and (
            dispatcher.policy is None or dispatcher.may(self.terms.principal, TopicPermission.SUBSCRIBE, event.topic)
        ):
            self.receive(event, is_quiet, limit)

    async def receive_async(self, event: Event) -> None:
        """Deliver ``event`` on the event loop of the handler."""
        token = enter(self._admin, event)
        try:
            await self.deliver_async(event)
        finally:
            leave_anywhere(token)

    def fail(self, event: Event, error: Exception) -> None:
        """Count and log a failure before the function could be called."""
        token = enter(self._admin, event)
        try:
            self.failed(event, error)
        finally:
            leave(token)

"""One event handler, as its EventAdmin knows it (RFC 97 5.1.2, 5.3): its service, its queue, and its failures."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.handler import (
    Handler,
    Terms,
    is_awaitable,
    name_of,
    read_filter,
    read_principal,
    read_timeout,
    read_topics,
    run_elsewhere,
)
from messaging.dispatch.permission import TopicPermission
from messaging.errors import ArgumentError, ClosedError, DeadlineError
from messaging.eventadmin.constants import LOG_TOPIC
from messaging.eventadmin.constants import EventConstants as Names
from messaging.eventadmin.event import Event
from messaging.execution import Flag, ThreadLane, handlers_loop, is_coroutine, running_loop
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.dispatch.dispatcher import Dispatcher
    from messaging.eventadmin.admin import EventAdmin, Queue, Route
    from messaging.execution import Lane
    from messaging.services import ServiceReference

logger = SafeLog(__name__)

#: what :data:`within` holds if all this happens since something was logged
QUIET: Final = object()

#: the EventAdmins whose handlers this context runs in: a thread, or a task and those it starts
within: Final[contextvars.ContextVar[tuple[object, ...]]] = contextvars.ContextVar("within", default=())

#: tasks of handlers that nobody waits for any more, until they end: event loops hold them weakly
_stragglers: Final[set[asyncio.Task[None]]] = set()


@dataclass(frozen=True, slots=True)
class AdminTerms(Terms):
    """What the properties of an event handler ask for.

    Attributes:
        is_ordered: whether it needs its events in order.
    """

    is_ordered: bool = True


def read_terms(properties: Mapping[str, Any]) -> AdminTerms:
    """What the properties of an event handler ask for; ``topics`` is ``None`` if they say nothing about it.

    Raises:
        ArgumentError: what is wrong with them.
    """
    return AdminTerms(
        read_topics(_first(properties, Names.EVENT_TOPIC_NAMES), Names.EVENT_TOPIC, single_level=False),
        read_filter(_first(properties, Names.EVENT_FILTER_NAMES)),
        read_principal(properties.get(Names.EVENT_PRINCIPAL), Names.EVENT_PRINCIPAL),
        read_timeout(properties.get(Names.EVENT_TIMEOUT), Names.EVENT_TIMEOUT),
        _read_delivery(properties.get(Names.EVENT_DELIVERY)),
    )


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


class _Making:
    """A service that is being made, by one thread; others wait."""

    __slots__ = ("_done", "_thread")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._done = Flag()

    def wait(self) -> None:
        """Until it is made, or has failed."""
        if self._thread == threading.get_ident():
            raise ArgumentError("it is not made yet: its own factory caused an event for it")
        self._done.wait()

    def end(self) -> None:
        """Made, or failed."""
        self._done.set()


class AdminHandler(Handler[Event]):
    """A handler. If its service is a prototype, it is made with its first event; it is let go of when unregistered.

    Args:
        admin: whose handler it is.
        dispatcher: of ``admin``.
        queue: of all posted events.
        reference, terms, options: see :class:`Handler`.
    """

    terms: AdminTerms

    def __init__(
        self,
        reference: ServiceReference,
        terms: AdminTerms,
        *,
        admin: EventAdmin,
        dispatcher: Dispatcher[AdminHandler, Route],
        queue: Queue,
        **options: Any,
    ) -> None:
        self._dispatcher = dispatcher
        self._services = dispatcher.services
        self._queue = queue
        self._function: Callable[[Event], Any] | None = None
        #: by whom it is being made, if by anybody; by process: in a child it is not, any more
        self._making: dict[int, _Making] = {}
        #: whether it is a coroutine function; ``None`` if it is not made yet
        self.is_coroutine: bool | None = None
        #: grows when it is blocked: what was posted before that is not delivered
        self.era = 0
        #: lanes it had before it changed its mind about order, as long as something is in them; replaced
        self._earlier: list[Lane] = []
        #: what :data:`within` holds while it has an event
        self._inside: tuple[object, ...] = (admin,)
        self._inside_quietly: tuple[object, ...] = (admin, QUIET)
        super().__init__(reference, self._call_service, terms, block=dispatcher.block, **options)
        self._loop = running_loop()

    @property
    def name(self) -> str:
        """See ``Handler``."""
        function = self._function
        return f"{self.reference!r}{'' if function is None else f' ({name_of(function)})'}"

    @property
    def is_active(self) -> bool:
        """Whether it may be called (5.2.2, 5.3.2). The registry knows first, and then tells."""
        return self.blocked is None and self.is_registered and self._services.is_registered(self.reference)

    @property
    def lanes(self) -> list[Lane]:
        """Those that are its own."""
        lane = self.lane
        return self._earlier if lane is self._queue else [*self._earlier, lane]

    @property
    def waiting(self) -> int:
        """Events on their way to it, but for those in the queue."""
        return sum(map(len, self.lanes))

    @property
    def dropped(self) -> int:
        """See ``Handler``."""
        return self._dropped_before + (0 if self.lane is self._queue else self.lane.dropped)

    def miss(self) -> None:
        """There was no room for an event."""
        self._dropped_before += 1

    # --- its service

    def fetch(self) -> Callable[[Event], Any] | None:
        """The function to call; ``None`` if it was unregistered. Raises what its factory raises.

        It is made once: who comes while another thread makes it waits for that.
        """
        while (function := self._function) is None:
            mine, process = _Making(), os.getpid()
            making = self._making.setdefault(process, mine)  # in one step
            if making is not mine:
                making.wait()
                continue
            try:
                function = self._function or self._get()
                self._function = function
            finally:
                del self._making[process]
                mine.end()
            if function is None or not self.is_registered:
                self._function = None
                return None
        return function

    def _get(self) -> Callable[[Event], Any] | None:
        service = self._services.get(self.reference) if self.is_registered else None
        if service is None:
            return None
        function = getattr(service, "handle_event", service)
        if not callable(function):
            raise ArgumentError(f"a {type(service).__name__} is neither a function nor has handle_event()")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ArgumentError(f"{name_of(function)} is a generator function: nothing of it would run")
        self.is_coroutine = is_coroutine(function)
        return function  # type: ignore[no-any-return]

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it is a coroutine function that runs on this loop."""
        return bool(self.is_coroutine) and (self._loop or handlers_loop()) is loop

    def _call_service(self, event: Event) -> Any:
        function = self.fetch()
        return None if function is None else function(event)

    # --- its lane

    def new_lane(self, *, is_held: bool = False) -> Lane:
        """See ``Handler``."""
        if self.terms.is_ordered:
            return self._queue
        lane: Lane = ThreadLane(
            self._receive_unordered,
            self._pool,
            self.name,
            timeout=self.timeout,
            stalled=lambda: self._stalled(lane),
            is_held=is_held,
        )
        return lane

    def give_up(self, lane: Lane) -> int:  # noqa: ARG002  # all of its lanes
        """See ``Handler``: what waits for it among others is passed over when it comes up."""
        waiting = self._queue.waiting()[self]
        self.era += 1
        lost = waiting + sum(each.close() for each in self.lanes)
        self._dropped_before += lost
        return lost

    def unblock(self) -> None:
        """See ``Handler``."""
        self._dropped_before = self.dropped
        self._earlier = []
        if self._loop is not None and self._loop.is_closed():
            self._loop = running_loop()
        self.lane = self.new_lane()
        self.blocked = None
        self.failures_in_a_row = 0

    def removed(self) -> None:
        """See ``Handler``."""
        for each in self.lanes:
            each.close()
        self._function = None

    def take_over(self, terms: AdminTerms) -> None:
        """Take over new properties. With the lock of the dispatcher."""
        was_ordered = self.terms.is_ordered
        self.terms = terms
        if terms.is_ordered != was_ordered:
            self._dropped_before = self.dropped
            # what waits there is delivered
            self._earlier = [each for each in self.lanes if len(each) or each.is_scheduled]
            self.lane = self.new_lane()
        for each in self.lanes:
            each.timeout = self.timeout

    def _stalled(self, lane: Lane) -> None:
        self._block(self, self.lane, too_long(lane.timeout))
        self._dropped_before += lane.close()  # if it is not closed by that, it is one that it had before

    # --- events

    def accepts(self, event: Event) -> bool:
        """Whether an event passes its filter."""
        wanted = self.terms.filter  # read once: an update may take it away meanwhile
        try:
            return wanted is None or event.matches(wanted)
        except Exception:
            logger.exception("%s: its filter failed on %s", self.name, self.describe(event))
            return False

    def call(self, event: Event) -> Any:
        """See ``Handler``."""
        return self._call_service(event)

    def receive(
        self,
        event: Event,
        is_quiet: bool = False,
        limit: float = 0.0,
        waits: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Give it an event.

        Args:
            event: what it gets.
            is_quiet: the event was posted since something was logged.
            limit: how long what it returns may take, if that has to be awaited, seconds; 0: for ever.
            waits: an event loop that waits for this.

        Raises:
            KeyboardInterrupt, SystemExit: on the main thread, where they are no affair of handlers. Nothing else.
        """
        token = self._enter(event, is_quiet)
        try:
            function = self._function or self.fetch()
            found = None if function is None else function(event)
            if found is not None and is_awaitable(found):
                self._wait_for(found, limit, waits)
        except BaseException as error:  # whatever a handler raises, the others get their events
            if is_interrupt(error):
                raise
            self._failed(event, error)
        else:
            if self.failures_in_a_row:
                self.failures_in_a_row = 0
        finally:
            within.reset(token)

    def _enter(self, event: Event, is_quiet: bool) -> contextvars.Token[tuple[object, ...]]:
        inside = self._inside_quietly if is_quiet or event.topic == LOG_TOPIC else self._inside
        outside = within.get()
        return within.set(tuple(dict.fromkeys((*outside, *inside))) if outside else inside)

    def _wait_for(self, found: Any, limit: float, waits: asyncio.AbstractEventLoop | None) -> None:
        loop = found.get_loop() if asyncio.isfuture(found) else self._loop or handlers_loop()
        if loop is waits or loop is running_loop():
            if inspect.iscoroutine(found):
                found.close()
            raise ArgumentError("it returned what the event loop has to await that waits for it: use asend_event()")
        begun = time.monotonic()
        try:
            run_elsewhere(found, loop, limit)
        except ClosedError:
            if not loop.is_closed():
                raise
            self._block(self, self.lane, "the event loop it ran on is closed")
        except DeadlineError:
            if not limit or time.monotonic() - begun < limit:
                raise
            self._block(self, self.lane, too_long(limit))

    def receive_posted(self, event: Event, is_quiet: bool, limit: float) -> None:
        """Give it a posted event, unless it was unregistered or blocked meanwhile, or may not have it any more."""
        dispatcher = self._dispatcher
        if self.is_active and (
            dispatcher.policy is None or dispatcher.may(self.terms.principal, TopicPermission.SUBSCRIBE, event.topic)
        ):
            self.receive(event, is_quiet, limit)

    def _receive_unordered(self, item: tuple[Event, bool]) -> None:
        self.receive_posted(*item, self.timeout)

    async def receive_async(self, event: Event) -> None:
        """Give it an event, on its loop."""
        token = self._enter(event, is_quiet=False)
        try:
            found = self.call(event)
            if found is not None:
                await found
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # whoever sends gives up
            self._failed(event, error)  # of something that the handler awaited
        except GeneratorExit:
            raise  # its loop was closed on it: it is never to be awaited again
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._failed(event, error)
        else:
            if self.failures_in_a_row:
                self.failures_in_a_row = 0
        finally:
            with contextlib.suppress(ValueError):  # it ends elsewhere if its loop was closed on it
                within.reset(token)

    def fail(self, event: Event, error: Exception) -> None:
        """It did not get as far as to be called with an event."""
        token = self._enter(event, is_quiet=False)
        try:
            self._failed(event, error)
        finally:
            within.reset(token)

    def describe(self, event: Event) -> str:
        """See ``Handler``."""
        return f"the event {event.topic!r}"


def straggles(task: asyncio.Task[None]) -> None:
    """Hold a handler's task that nobody waits for any more, until it ends: event loops hold theirs weakly."""
    _stragglers.add(task)
    task.add_done_callback(_stragglers.discard)


def is_interrupt(error: BaseException) -> bool:
    """Whether this ends the program, rather than being the failure of a handler that happened to run."""
    return isinstance(error, (KeyboardInterrupt, SystemExit)) and threading.current_thread() is threading.main_thread()


def too_long(seconds: float) -> str:
    """Why a handler is blocked that did not return in time."""
    return f"it took more than {seconds:g} s for one event"

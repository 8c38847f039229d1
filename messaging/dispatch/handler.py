"""One handler, as its bus knows it: what it asks for, its lane, and whether it is blocked (157.4.6, RFC 97 5.3)."""

from __future__ import annotations

import abc
import asyncio
import functools
import inspect
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from messaging.dispatch.topics import TopicFilter, parse_filter
from messaging.errors import ArgumentError, ClosedError, DeadlineError
from messaging.execution import Lane, LoopLane, ThreadLane, handlers_loop, is_coroutine, running_loop
from messaging.services.filter import LdapFilter
from messaging.text import SafeLog, exact

if TYPE_CHECKING:
    from messaging.dispatch.permission import Principal
    from messaging.execution import Pool
    from messaging.services import ServiceReference

logger = SafeLog(__name__)

E = TypeVar("E")

#: how often somebody who waits for an event loop looks whether it is still there, seconds
_LOOK: Final = 0.5


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much a bus puts up with before it blocks a handler. A blocked one is called again once it is updated.

    Attributes:
        failures: events in a row that a handler may fail on; 0: as many as it likes.
        timeout: how long it may take for one event, seconds; 0: as long as it likes. A handler's own property
            ``event.timeout`` takes the place of it.
    """

    failures: int = 10
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.failures, int) or isinstance(self.failures, bool) or self.failures < 0:
            raise ArgumentError(f"failures must be an int of at least 0, not {self.failures!r:.80}")
        _check_seconds("timeout", self.timeout)


def _check_seconds(what: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ArgumentError(f"{what} must be seconds, 0 or more, not {value!r:.80}")
    return value


@dataclass(frozen=True, slots=True)
class Terms:
    """What the properties of a handler ask for.

    Attributes:
        topics: filters of the topics; ``None`` if there is nothing said about them.
        filter: what the data must match; case-sensitive.
        principal: whose permissions count; see :mod:`messaging.dispatch.permission`.
        timeout: how long it may take for one event, seconds; 0: for ever; ``None``: what its bus says.
    """

    topics: tuple[TopicFilter, ...] | None
    filter: LdapFilter | None
    principal: Principal
    timeout: float | None


def read_topics(value: Any, name: str, *, single_level: bool = True) -> tuple[TopicFilter, ...] | None:
    """Topic filters: one text, or several (``String+``). One that is bad spoils them all (157.4.9).

    Raises:
        ArgumentError, InvalidTopicError: it is none, or names no topic.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise ArgumentError(f"{name} must be a str or several, not {type(value).__name__}")
    topics = tuple(dict.fromkeys(parse_filter(each, single_level=single_level) for each in value))
    if not topics:
        raise ArgumentError(f"{name} is empty: name at least one topic")
    return topics


def read_filter(value: Any) -> LdapFilter | None:
    """A filter over event data, where case counts; an empty text is none.

    Raises:
        InvalidFilterError: it does not parse.
    """
    if value is None or value == "":
        return None
    if isinstance(value, LdapFilter):
        return value if value.case_sensitive else LdapFilter(str(value), case_sensitive=True)
    return LdapFilter(value, case_sensitive=True)


def read_principal(value: Any, name: str) -> Principal:
    """The name of a principal, or ``None``.

    Raises:
        ArgumentError: it is none.
    """
    if value is not None and not isinstance(value, str):
        raise ArgumentError(f"{name} must be a str, not {type(value).__name__}")
    return None if value is None else exact(value)


def read_timeout(value: Any, name: str) -> float | None:
    """Seconds.

    Raises:
        ArgumentError: it is no number of at least 0.
    """
    return None if value is None else _check_seconds(name, value)


def name_of(function: Any) -> str:
    """How a function is called to people: a method with its object's class, an object like a function by its class."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.ismethod(function):
        owner = function.__self__
        class_ = owner if isinstance(owner, type) else type(owner)
        return f"{class_.__qualname__}.{getattr(function, '__name__', '?')}"
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__qualname__


def is_awaitable(found: Any) -> bool:
    """Whether what a function returned has to be awaited."""
    return inspect.isawaitable(found)


def run_elsewhere(found: Any, loop: asyncio.AbstractEventLoop, timeout: float = 0) -> Any:
    """Await something on another thread's event loop, and wait for it.

    Args:
        found: an awaitable.
        loop: where.
        timeout: how long, seconds; 0: for ever. What is not done by then is cancelled.

    Raises:
        DeadlineError: ``timeout`` passed.
        ClosedError: the loop is closed.
        Exception: what it raised.
    """
    deadline = time.monotonic() + timeout if timeout else math.inf
    waiting = _awaited(found)
    try:
        future = asyncio.run_coroutine_threadsafe(waiting, loop)
    except RuntimeError:
        _forsake(waiting, found)
        raise ClosedError("the event loop it ran on is closed") from None
    while True:
        try:
            return future.result(max(0.0, min(_LOOK, deadline - time.monotonic())))
        except TimeoutError:
            if future.done():
                raise  # its own
            if loop.is_closed():
                _forsake(waiting, found)
                raise ClosedError("the event loop it ran on is closed") from None
            if time.monotonic() >= deadline:
                future.cancel()
                raise DeadlineError(f"it took more than {timeout:g} s") from None


def _nothing() -> None:
    """What is left to be done for most handlers."""


async def _awaited(found: Any) -> Any:
    try:
        return await found
    except (KeyboardInterrupt, SystemExit) as error:
        if threading.current_thread() is threading.main_thread():
            raise
        # it would end the event loop, on which others run
        raise RuntimeError(f"a handler raised {type(error).__name__}") from error


def _forsake(*several: Any) -> None:
    """Nobody will await these: of those that have not begun, asyncio need not complain."""
    for each in several:
        if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
            each.close()


class Handler(abc.ABC, Generic[E]):
    """A handler of events of type ``E``.

    Its terms and its lane are replaced, never changed, with the lock of its dispatcher; they are read without. What it
    counts is counted by its lane, which gives it one event at a time.

    Args:
        reference: its service.
        function: what is called with events; a coroutine function runs on the event loop of the calling thread, or
            else on one for all of those.
        terms: what it asks for.
        pool: whose threads deliver.
        tolerance: when it is blocked.
        block: called with the handler, the lane and a reason when it has to be blocked.
    """

    #: what is on its way to it
    lane: Lane

    def __init__(
        self,
        reference: ServiceReference,
        function: Callable[..., Any],
        terms: Terms,
        *,
        pool: Pool,
        tolerance: Tolerance,
        block: Callable[[Any, Lane, str], object],
    ) -> None:
        self.reference = reference
        self.function = function
        self.terms = terms
        self.tolerance = tolerance
        #: why it is blocked
        self.blocked: str | None = None
        #: whether its service is still registered
        self.is_registered = True
        #: events it failed on: in a row, and in all
        self.failures_in_a_row = 0
        self.failures = 0
        #: of lanes it had before
        self._dropped_before = 0
        self._pool = pool
        self._block = block
        self._loop = (running_loop() or handlers_loop()) if is_coroutine(function) else None
        self.lane = self.new_lane()

    @property
    def name(self) -> str:
        """How it is called in the log and to people: its service, and what it is."""
        return f"{self.reference!r} ({name_of(self.function)})"

    @property
    def topics(self) -> tuple[TopicFilter, ...]:
        """Filters of the topics it gets."""
        return self.terms.topics or ()

    @property
    def timeout(self) -> float:
        """How long it may take for one event, seconds; 0: for ever."""
        return self.tolerance.timeout if self.terms.timeout is None else self.terms.timeout

    @property
    def waiting(self) -> int:
        """Events on their way to it."""
        return len(self.lane)

    @property
    def dropped(self) -> int:
        """Events that did not find room, or that were waiting when it was blocked."""
        return self._dropped_before + self.lane.dropped

    @property
    def order(self) -> tuple[int, int]:
        """The preferred first."""
        return -self.reference.ranking, self.reference.id

    def added(self) -> Callable[[], object]:
        """It is found from now on. With the lock of its dispatcher.

        Returns:
            What is left to be done without it.
        """
        return _nothing

    def removed(self) -> None:
        """It is found no more: nothing that waits for it is delivered."""
        self.lane.close()

    # --- its lane

    def new_lane(self, *, is_held: bool = False) -> Lane:
        """A lane for it."""
        if self._loop is None:
            lane: Lane = ThreadLane(
                self.receive,
                self._pool,
                self.name,
                timeout=self.timeout,
                stalled=lambda: self._stalled(lane),
                is_held=is_held,
            )
        else:
            lane = LoopLane(
                self._receive_async,
                self._loop,
                self._pool,
                self.name,
                timeout=self.timeout,
                stalled=lambda: self._stalled(lane),
                is_held=is_held,
            )
        return lane

    def unblock(self) -> None:
        """Give it what is published from now on; what was on its way has been given up. With the dispatcher's lock."""
        self._dropped_before += self.lane.dropped
        if self._loop is not None and self._loop.is_closed():
            self._loop = running_loop() or handlers_loop()
        self.lane = self.new_lane()
        self.blocked = None
        self.failures_in_a_row = 0

    def give_up(self, lane: Lane) -> int:
        """It is blocked: give up what waits in ``lane``. Returns how many events that were."""
        lost = lane.close()
        lane.count_dropped(lost)
        return lost

    def _stalled(self, lane: Lane) -> None:
        if self._loop is not None and self._loop.is_closed():
            self._block(self, lane, "the event loop it ran on is closed")
            return
        if isinstance(lane, LoopLane):
            lane.cancel()
        self._block(self, lane, f"it took more than {lane.timeout:g} s for one event")

    # --- events

    @abc.abstractmethod
    def call(self, event: E) -> Any:
        """Call the function with an event, if it can have it. Returns what that returned."""

    @abc.abstractmethod
    def describe(self, event: E) -> str:
        """Which event it is, for the log."""

    def receive(self, event: E) -> None:
        """Give it an event; never raises. On a delivery thread."""
        try:
            found = self.call(event)
            if found is not None and is_awaitable(found):
                # of a function that does what a coroutine function would have done
                run_elsewhere(found, self._loop or handlers_loop())
        except BaseException as error:  # noqa: BLE001  # whatever a handler raises, the others get their events
            self._failed(event, error)
        else:
            if self.failures_in_a_row:
                self.failures_in_a_row = 0

    async def _receive_async(self, event: E) -> None:
        try:
            found = self.call(event)
            if found is not None:
                await found
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # its loop ends, say: see LoopLane
            self._failed(event, error)  # of something that the handler awaited
        except BaseException as error:
            if isinstance(error, GeneratorExit) and self._loop is not None and not self._loop.is_running():
                raise  # what its loop has left behind is cleared away: it is never to be awaited again
            self._failed(event, error)
        else:
            if self.failures_in_a_row:
                self.failures_in_a_row = 0

    def _failed(self, event: E, error: BaseException) -> None:
        lane = self.lane
        self.failures += 1
        self.failures_in_a_row += 1
        logger.error("%s failed on %s", self.name, self.describe(event), exc_info=error)
        allowed: Final = self.tolerance.failures
        if allowed and self.failures_in_a_row >= allowed:
            self._block(self, lane, f"it failed on {self.failures_in_a_row} events in a row")


@dataclass(frozen=True, slots=True)
class HandlerDTO:
    """A handler as it is now."""

    #: ``service.id`` of its registration
    service_id: int
    name: str
    #: the interface it is registered with
    kind: str
    topics: tuple[str, ...]
    filter: str | None
    principal: str | None
    #: events on their way to it
    waiting: int
    #: events it failed on
    failures: int
    #: events it did not get, since there was no room for them or it was blocked
    dropped: int
    #: why it is blocked, or ``None``
    blocked: str | None


def dto_of(handler: Handler[Any], kind: str) -> HandlerDTO:
    """A snapshot of a handler."""
    return HandlerDTO(
        service_id=handler.reference.id,
        name=handler.name,
        kind=kind,
        topics=tuple(each.text for each in handler.topics),
        filter=None if handler.terms.filter is None else str(handler.terms.filter),
        principal=handler.terms.principal,
        waiting=handler.waiting,
        failures=handler.failures,
        dropped=handler.dropped,
        blocked=handler.blocked,
    )

"""A handler as its bus knows it: its terms, its lane, its failures, and why it is blocked (157.4.6, RFC 97 5.3)."""

from __future__ import annotations

import abc
import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from typing import Any, Generic, TypeVar

from messaging.dispatch.calling import run_elsewhere
from messaging.dispatch.permission import Principal
from messaging.dispatch.topics import TYPED_EVENTS, AbstractTopicFilter, TopicGrammar
from messaging.environment.signals import is_interrupt
from messaging.errors import ArgumentError
from messaging.errors.text import SafeLog
from messaging.execution import Lane
from messaging.services import LdapFilter, ServiceReference
from messaging.services.reporting import counter, gauge, identity, label

logger = SafeLog(__name__)

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much failure a bus accepts before it blocks a handler. An update of its registration unblocks a handler.

    Attributes:
        failures: consecutive events that a handler may fail on; 0: unlimited.
        timeout: how long a handler may take for one event, seconds; 0: unlimited. The handler's own property
            ``event.timeout`` takes precedence.
    """

    failures: int = 10
    timeout: float = 30.0

    def __post_init__(self) -> None:
        check_count("failures", self.failures)
        _check_seconds("timeout", self.timeout)


def check_count(name: str, value: Any, at_least: int = 0) -> int:
    """Return a whole number. Raise ``ArgumentError`` for a value that is no int of at least ``at_least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ArgumentError(f"{name} must be an int of at least {at_least}, not {value!r:.80}")
    return value


def _check_seconds(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ArgumentError(f"{name} must be seconds, 0 or more, not {value!r:.80}")
    return value


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a handler.

    Attributes:
        topics: filters of its topics; ``None`` if its properties name none.
        filter: the event data must match it; case-sensitive.
        principal: whose permissions count; see :mod:`messaging.dispatch.permission`.
        timeout: how long the handler may take for one event, seconds; 0: unlimited; ``None``: as the bus tolerates.
    """

    topics: tuple[AbstractTopicFilter, ...] | None
    filter: LdapFilter | None
    principal: Principal
    timeout: float | None


def read_topics(
    value: Any, name: str, grammar: TopicGrammar[Any] = TYPED_EVENTS
) -> tuple[AbstractTopicFilter, ...] | None:
    """Parse one topic filter or several (``String+``). One invalid filter makes all of them invalid (157.4.9).

    Args:
        value: the value of a service property; ``None`` if there is none.
        name: of the property, for errors.
        grammar: of the filters.

    Raises:
        ArgumentError, InvalidTopicError: ``value`` is no topic filter, or is empty.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise ArgumentError(f"{name} must be a str or several, not {type(value).__name__}")
    topics = tuple(dict.fromkeys(grammar.parse(each) for each in value))
    if not topics:
        raise ArgumentError(f"{name} is empty: name at least one topic")
    return topics


def read_filter(value: Any) -> LdapFilter | None:
    """Parse a case-sensitive filter over event data, or raise ``InvalidFilterError``; an empty text means no filter."""
    if value is None or value == "":
        return None
    if isinstance(value, LdapFilter):
        return value if value.case_sensitive else LdapFilter(str(value), case_sensitive=True)
    return LdapFilter(value, case_sensitive=True)


def read_timeout(value: Any, name: str) -> float | None:
    """Return a number of seconds, or ``None``. Raise ``ArgumentError`` for a value that is no number of at least 0."""
    return None if value is None else _check_seconds(name, value)


#: called with a handler, its lane and the reason why it has to be blocked; see ``Dispatcher.block``
Block = Callable[[Any, Lane, str], object]


class DispatchHandler(abc.ABC, Generic[E]):
    """A handler of events of type ``E``, as its dispatcher finds, blocks, unblocks and removes it.

    The dispatcher's lock guards changes of its terms and its lane. They are replaced as a whole and read without the
    lock. Failures are counted by the deliveries, which come one at a time.

    Args:
        title: of its event service, for the log.
        reference: its service.
        terms: what it asks for.
        tolerance: when it is blocked.
        block: blocks it.
    """

    #: its events wait there
    lane: Lane
    #: names an event in the log, before its topic
    described = "an event on"

    def __init__(
        self, title: str, reference: ServiceReference, terms: Terms, *, tolerance: Tolerance, block: Block
    ) -> None:
        self.title = title
        self.reference = reference
        self.terms = terms
        self.tolerance = tolerance
        #: why it is blocked
        self.blocked: str | None = None
        #: whether its service is still registered
        self.is_registered = True
        #: events it failed on: in a row, and in all
        self.failures_in_a_row = 0
        self.failures = 0
        #: has the dispatcher block it because of a delivery from a lane, for a reason
        self.block: Callable[[Lane, str], object] = partial(block, self)

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Its name in the log: its service, and its function if that is known."""

    @property
    @abc.abstractmethod
    def waiting(self) -> int:
        """Number of events that wait for it."""

    @property
    @abc.abstractmethod
    def dropped(self) -> int:
        """Number of events that found no room, or waited when it was blocked."""

    @property
    def topics(self) -> tuple[AbstractTopicFilter, ...]:
        """Filters of the topics it receives."""
        return self.terms.topics or ()

    @property
    def timeout(self) -> float:
        """Return the time limit for one event, seconds; 0: unlimited."""
        return self.tolerance.timeout if self.terms.timeout is None else self.terms.timeout

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the preferred handler comes first."""
        return -self.reference.ranking, self.reference.id

    # --- called by the dispatcher

    @abc.abstractmethod
    def change(self, properties: Mapping[str, Any]) -> Callable[[], object]:
        """Return the call that applies new properties, to be made with the lock. Raises if they are invalid."""

    def added(self) -> Callable[[], object]:
        """Note that it is found by topic from now on. With the dispatcher's lock.

        Returns:
            The rest of the work, to be called without the lock.
        """
        return lambda: None

    @abc.abstractmethod
    def removed(self) -> None:
        """Drop the events that wait for it: it is no longer found."""

    @abc.abstractmethod
    def unblock(self) -> None:
        """Accept the events published from now on. With the dispatcher's lock."""

    @abc.abstractmethod
    def discard_waiting(self, lane: Lane) -> int:
        """Drop the events that wait in ``lane``, since it is blocked; return how many."""

    # --- failures

    def failed(self, event: Any, error: BaseException) -> None:
        """Count and log that it failed on ``event``; block it if that is once too often."""
        lane = self.lane
        self.failures += 1
        self.failures_in_a_row += 1
        event_name = f"{self.described} {event.topic!r}"
        logger.error("%s: handler %s failed on %s", self.title, self.name, event_name, exc_info=error)
        allowed = self.tolerance.failures
        if allowed and self.failures_in_a_row >= allowed:
            self.block(lane, f"it failed on {self.failures_in_a_row} events in a row")


class FunctionHandler(DispatchHandler[E]):
    """A handler that is one function: what calls it, and contains what it raises."""

    #: whether its deliveries raise interrupts of the program, which are not the failure of the handler that they meet
    passes_interrupts = False

    @property
    @abc.abstractmethod
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its coroutines."""

    @abc.abstractmethod
    def call(self, event: E) -> Any:
        """Call the function with ``event``, if it is fit for it; return the result."""

    def deliver(self, event: E, wait: Callable[[Any], object] | None = None) -> None:
        """Call the function, and contain what it raises. On a delivery thread, or on the thread that waits for it.

        Args:
            event: the event.
            wait: waits for the result of a function that acts like a coroutine function without being one; by default
                until it is there.

        Raises:
            KeyboardInterrupt, SystemExit: with ``passes_interrupts``, on the main thread. Nothing else.
        """
        try:
            result = self.call(event)
            if result is not None and isawaitable(result):
                if wait is None:
                    run_elsewhere(result, self.loop)
                else:
                    wait(result)
        except BaseException as error:  # no exception of one handler may keep events from the others
            if self.passes_interrupts and is_interrupt(error):
                raise
            self.failed(event, error)
        else:
            if self.failures_in_a_row:
                self.failures_in_a_row = 0

    async def deliver_async(self, event: E) -> None:
        """Call a coroutine function as :meth:`deliver` does, on its event loop."""
        try:
            result = self.call(event)
            if result is not None:
                await result
        except BaseException as error:
            if self._ends_task(error):
                raise
            self.failed(event, error)
        else:
            if self.failures_in_a_row:
                self.failures_in_a_row = 0

    def _ends_task(self, error: BaseException) -> bool:
        """Return whether ``error`` ends the task or the program, and is not raised by what the handler awaited."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0  # by the lane or the sender
        if isinstance(error, GeneratorExit):
            return not self.loop.is_running()  # the closed loop discards its coroutines: nothing may be awaited
        return self.passes_interrupts and is_interrupt(error)


@dataclass(frozen=True, slots=True)
class HandlerDTO:
    """A snapshot of a handler."""

    #: ``service.id`` of its registration
    service_id: int = field(metadata=identity())
    name: str = field(metadata=label("handler"))
    #: the interface it is registered with
    kind: str
    topics: tuple[str, ...]
    filter: str | None
    principal: str | None
    waiting: int = field(metadata=gauge("events that wait for the handler", "events"))
    failures: int = field(metadata=counter("events that the handler failed on", "events", name="failed"))
    dropped: int = field(
        metadata=counter(
            "events that the handler did not receive, because there was no room for them or it was blocked", "events"
        )
    )
    #: why it is blocked, or ``None``
    blocked: str | None
    is_blocked: bool = field(default=False, metadata=gauge("whether the handler is blocked", name="blocked"))


def dto_of(handler: DispatchHandler[Any], kind: str) -> HandlerDTO:
    """Return a snapshot of ``handler``."""
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
        is_blocked=handler.blocked is not None,
    )

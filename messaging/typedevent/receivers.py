"""Receivers: the handlers of a bus, typed, untyped and unhandled, with their properties (157.4).

Functions are registered as services, and receivers are made of services.

A route holds the receivers, observers and history policy that apply to the events of one topic (157.3, 157.4.4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from messaging.dispatch import (
    EventService,
    FunctionHandler,
    Terms,
    TopicPermission,
    check_count,
    check_principal,
    name_of,
    parse_filter,
    read_filter,
    read_timeout,
    read_topics,
    too_long,
)
from messaging.dispatch.eventdata import Converter, converter_to, is_untyped, load_type, to_map, topic_of
from messaging.errors import ArgumentError, ConversionError, InvalidEventError
from messaging.errors.checks import is_coroutine
from messaging.errors.text import SafeLog
from messaging.execution import Lane, LoopLane, ThreadLane, handlers_loop, running_loop
from messaging.services import ServiceProperties, ServiceReference, ServiceRegistration, interface_name
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.handlers import TypedEventConstants as Names
from messaging.typedevent.handlers import (
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
    declared_properties,
    event_parameter,
    reified_type,
)
from messaging.typedevent.history import EventHistory, RangePolicy, newest
from messaging.typedevent.monitor import Tap
from messaging.typedevent.store import EventStore

logger = SafeLog(__name__)

TYPED: Final = interface_name(TypedEventHandler)
UNTYPED: Final = interface_name(UntypedEventHandler)
UNHANDLED: Final = interface_name(UnhandledEventHandler)

#: method of each interface
_METHODS: Final = {TYPED: "notify", UNTYPED: "notify_untyped", UNHANDLED: "notify_unhandled"}


class EventRelay:
    """A handler that forwards events to another event service; registered as an ``UntypedEventHandler``.

    It receives events as they were published. It does not count as a handler: an event that only relays receive is
    unhandled.

    Args:
        receive: called with each event.
    """

    def __init__(self, receive: Callable[[PublishedEvent], object]) -> None:
        self.receive = receive


@dataclass(frozen=True, slots=True)
class EventTerms(Terms):
    """The terms that the properties of an event handler set.

    Attributes:
        history: maximum number of past events that it receives first.
        type: the type that a typed handler wants.
        convert: converts events to that type; to maps for handlers of other kinds.
    """

    history: int = 0
    type: Any = None
    convert: Converter = to_map


def read_terms(kind: str, service: Any, properties: Mapping[str, Any]) -> EventTerms:
    """Read the terms of a handler from its properties (157.4.8).

    Args:
        kind: the interface it is registered with.
        service: the registered object.
        properties: properties of the registration; they override properties that decorators declare.

    Raises:
        ArgumentError: a property is invalid (157.4.9).
    """
    declared = declared_properties(service)

    def asked(name: str) -> Any:
        return properties.get(name, declared.get(name))

    type_: Any = asked(Names.TYPED_EVENT_TYPE)
    if kind == TYPED:
        type_ = _read_type(service, type_)
    elif type_ is not None:
        type_ = None
        logger.warning(
            "handler %s: %s is not for an %s: it is ignored",
            name_of(function_of(kind, service)), Names.TYPED_EVENT_TYPE, kind.rpartition(".")[2],
        )  # fmt: skip
    history = asked(Names.TYPED_EVENT_HISTORY)
    if kind == UNHANDLED and history is not None:
        raise ArgumentError(f"{Names.TYPED_EVENT_HISTORY} is not for an UnhandledEventHandler")
    topics = read_topics(asked(Names.TYPED_EVENT_TOPICS), Names.TYPED_EVENT_TOPICS)
    if topics is None and kind == UNHANDLED:
        topics = (parse_filter("*"),)
    elif topics is None and kind == TYPED:
        topics = (parse_filter(topic_of(type_)),)
    return EventTerms(
        topics,
        read_filter(asked(Names.TYPED_EVENT_FILTER)),
        check_principal(asked(Names.TYPED_EVENT_PRINCIPAL), Names.TYPED_EVENT_PRINCIPAL),
        read_timeout(asked(Names.TYPED_EVENT_TIMEOUT), Names.TYPED_EVENT_TIMEOUT),
        0 if history is None else check_count(Names.TYPED_EVENT_HISTORY, history),
        type_,
        converter_to(type_) if kind == TYPED else to_map,
    )


def _read_type(service: Any, named: Any) -> Any:
    if named is not None:
        return load_type(named)
    found = reified_type(service)
    if found is None:
        raise ArgumentError(
            "the type of its events is unknown: give event.type, a parameter of TypedEventHandler, or an annotation"
        )
    return found


def function_of(kind: str, service: Any) -> Callable[..., Any]:
    """Return the function of topic and event: the method of the interface, or the service if it is a function.

    Raise ``ArgumentError`` if the service has neither, or does not take these arguments.
    """
    if isinstance(service, EventRelay):
        return service.receive
    method = getattr(service, _METHODS[kind], None)
    function = service if method is None else method
    if not callable(function):
        raise ArgumentError(f"a {type(service).__name__} is neither a function nor has {_METHODS[kind]}()")
    takes_topic, _ = event_parameter(function, is_method=method is not None)
    return function if takes_topic else _without_topic(function)


def _without_topic(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call_async(_: str, event: Any) -> Any:
        return await function(event)

    def call(_: str, event: Any) -> Any:
        return function(event)

    wrapper: Callable[..., Any] = call_async if is_coroutine(function) else call
    wrapper.__qualname__ = name_of(function)
    return wrapper


class EventReceiver(FunctionHandler[PublishedEvent]):
    """A handler of any kind, with a lane of its own. This class passes on data in map form.

    A coroutine function runs on the event loop of the calling thread, or else on one that all of those share.

    Args:
        reference: its service.
        kind: the interface it is registered with.
        service: the registered object.
        terms: the terms that its properties set.
        bus: its threads deliver, its tolerance decides when the handler is blocked.
        history: the history that it is given events of; guarded by the lock of the dispatcher.
    """

    terms: EventTerms

    def __init__(
        self,
        reference: ServiceReference,
        kind: str,
        service: Any,
        terms: EventTerms,
        *,
        bus: EventService,
        history: EventHistory,
    ) -> None:
        super().__init__(bus.title, reference, terms, tolerance=bus.tolerance, block=bus.dispatcher.block)
        self.kind = kind
        self.service = service
        self.is_relay = isinstance(service, EventRelay)
        self.function = function_of(kind, service)
        self._may = bus.dispatcher.may
        self._history = history
        #: number of past events that it received when it was registered
        self.replayed = 0
        self._pool = bus.pool
        #: events that its earlier lanes dropped
        self._dropped_before = 0
        self._loop = (running_loop() or handlers_loop()) if is_coroutine(self.function) else None
        self.lane = self.new_lane()

    @property
    def name(self) -> str:
        """Its name in the log: its service and its function."""
        return f"{self.reference!r} ({name_of(self.function)})"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its coroutines."""
        return self._loop or handlers_loop()

    @property
    def waiting(self) -> int:
        """Number of events in its lane."""
        return len(self.lane)

    @property
    def dropped(self) -> int:
        """Number of events that found no room, or waited when it was blocked."""
        return self._dropped_before + self.lane.room.dropped

    # --- its lane

    def new_lane(self, *, is_held: bool = False) -> Lane:
        """Return a lane for it; one that is held delivers nothing before it is released."""
        options: dict[str, Any] = {"timeout": self.timeout, "stalled": self._stalled, "is_held": is_held}
        if self._loop is None:
            return ThreadLane(self.deliver, self._pool, self.name, **options)
        return LoopLane(self.deliver_async, self._loop, self._pool, self.name, **options)

    def removed(self) -> None:
        """Drop the events that wait for it."""
        self.lane.close()

    def unblock(self) -> None:
        """Accept the events published from now on, in a new lane."""
        self._dropped_before += self.lane.room.dropped
        if self._loop is not None and self._loop.is_closed():
            self._loop = running_loop() or handlers_loop()
        self.lane = self.new_lane()
        self.blocked = None
        self.failures_in_a_row = 0

    def discard_waiting(self, lane: Lane) -> int:
        """Drop the events that wait in ``lane``; return how many."""
        lost = lane.close()
        lane.room.count_dropped(lost)
        return lost

    def _stalled(self, lane: Lane) -> None:
        if self._loop is not None and self._loop.is_closed():
            self.block(lane, "the event loop it ran on is closed")
            return
        if isinstance(lane, LoopLane):
            lane.task.cancel()
        self.block(lane, too_long(lane.timeout))

    # --- called by the dispatcher

    def change(self, properties: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that sets new properties; see ``Dispatcher``. The history is not replayed again."""
        terms = read_terms(self.kind, self.service, properties)

        def take_over() -> None:
            self.terms = terms
            self.lane.timeout = self.timeout

        return take_over

    # --- history (157.4.7)

    def added(self) -> Callable[[], object]:
        """Replay the history before all events that are published from now on; see ``DispatchHandler``."""
        if not self.terms.history:
            return super().added()
        lane = self.lane = self.new_lane(is_held=True)
        past, principal = self._history.of(self.topics), self.terms.principal

        def go_on() -> None:
            first: list[PublishedEvent] = []
            try:
                terms = self.terms
                seen = (each for each in past if self._may(principal, TopicPermission.SUBSCRIBE, each.topic))
                wanted = (each for each in seen if self.accepts(each, terms))
                first = [each.owned() for each in newest(terms.history, wanted)]
                self.replayed = len(first)
            finally:  # also on an interrupt
                lane.release(first)

        return go_on

    # --- events

    def accepts(self, event: PublishedEvent, terms: EventTerms) -> bool:
        """Return whether an event passes the filter of its terms (157.4.5). Runs on the publishing thread."""
        wanted = terms.filter
        if wanted is None:
            return True
        try:
            return wanted.matches(event.as_map())
        except InvalidEventError as error:
            self._log_missed(event, error)
        except Exception as error:  # noqa: BLE001  # values may raise anything when they are compared
            self._log_missed(event, "its filter failed", error)
        return False

    def call(self, event: PublishedEvent) -> Any:
        """Call the handler with an event in map form; see ``FunctionHandler``."""
        if self.is_relay:
            return self.function(event)
        try:
            data = event.as_map()
        except InvalidEventError as error:
            self._log_missed(event, error)
            return None
        return self.function(event.topic, data)

    def _log_missed(self, event: PublishedEvent, why: Exception | str, raised: Exception | None = None) -> None:
        where = f"event on {event.topic!r}"
        logger.error("%s: handler %s: %s skipped: %s", self.title, self.name, where, why, exc_info=raised)


class TypedReceiver(EventReceiver):
    """A handler that receives instances of a type."""

    def call(self, event: PublishedEvent) -> Any:
        """Call the handler with an event converted to its type; see ``FunctionHandler``."""
        data, terms = event.data, self.terms
        if data.__class__ is not terms.type:
            try:
                data = event.converted(terms.convert)
            except (ConversionError, InvalidEventError) as error:
                self._log_missed(event, error)
                return None
        return self.function(event.topic, data)


class BusRoute:
    """Cached routing of one topic: receivers, history policy, observers. Immutable.

    Args:
        handlers: receivers that match the topic, with the terms by which they do, those for unhandled events included.
        policy: the history policy of the topic.
        taps: subscriptions to the monitor that may see the topic.
        outlets: called with each event: connections to networks that may have to send it. They never wait.
        store: the durable history, if the events of the topic are stored there.
    """

    __slots__ = (
        "filtered",
        "is_fixed",
        "is_recorded",
        "lanes",
        "outlets",
        "policy",
        "regular",
        "relays",
        "store",
        "taps",
        "unhandled",
    )

    def __init__(
        self,
        handlers: list[tuple[EventReceiver, EventTerms]],
        policy: RangePolicy,
        taps: list[Tap],
        outlets: tuple[Callable[[PublishedEvent], object], ...] = (),
        store: EventStore | None = None,
    ) -> None:
        self.regular = regular = [each for each in handlers if each[0].kind != UNHANDLED and not each[0].is_relay]
        #: lanes of the receivers without a filter
        self.lanes: list[Lane] = [each.lane for each, terms in regular if terms.filter is None]
        self.filtered = [each for each in regular if each[1].filter is not None]
        self.unhandled = [each for each in handlers if each[0].kind == UNHANDLED]
        self.relays = [each for each in handlers if each[0].is_relay]
        self.policy = policy
        self.taps = taps
        self.outlets = outlets
        self.store = store
        self.is_recorded = bool(taps) or policy.maximum > 0 or store is not None
        #: whether all events go to the same lanes
        self.is_fixed = bool(self.lanes) and not (self.filtered or self.relays)

    def lanes_for_copy(self, event: PublishedEvent) -> list[Lane]:
        """Return the lanes that ``event`` goes to if it came as a past event before: handlers with a history had it."""
        wanted = [(each, terms) for each, terms in self.regular if each.accepts(event, terms)]
        if not wanted:
            return self.lanes_for(event)
        relays = [each.lane for each, terms in self.relays if each.accepts(event, terms)]
        return [each.lane for each, terms in wanted if not terms.history] + relays

    def lanes_for(self, event: PublishedEvent) -> list[Lane]:
        """Return the lanes that ``event`` goes to; without any, those for unhandled events (157.4.4)."""
        lanes = self.lanes
        if self.is_fixed:
            return lanes
        if self.filtered:
            lanes = lanes + [each.lane for each, terms in self.filtered if each.accepts(event, terms)]
        if not lanes:
            lanes = [each.lane for each, terms in self.unhandled if each.accepts(event, terms)]
        if self.relays:
            lanes = lanes + [each.lane for each, terms in self.relays if each.accepts(event, terms)]
        return lanes


#: property of a bus, unique in the process; names of buses need not be unique
_BUS_ID: Final = "event.bus.id"


class HandlerRegistrar:
    """Registers functions as handlers of one bus, and makes the receivers of its handlers. Thread safe.

    Args:
        bus_id: the number of the bus.
        announced: other properties that the bus announces; handlers select buses by these.
        history: the history that new handlers are given events of; guarded by the lock of the dispatcher.
        bus: whether it is open, its delivery threads, and when a handler is blocked.
    """

    def __init__(self, bus_id: int, announced: Mapping[str, Any], history: EventHistory, bus: EventService) -> None:
        self.properties = {**announced, _BUS_ID: bus_id}
        self._history = history
        self._bus = bus

    # --- from functions to services

    def register_by_type(
        self, function: Callable[..., Any], topics: tuple[Any, ...], type_: Any, options: Mapping[str, Any]
    ) -> ServiceRegistration:
        """Register a function as a typed handler, or as an untyped one if it names no type; see :meth:`register`."""
        declared = declared_properties(function)
        wanted = declared.get(Names.TYPED_EVENT_TYPE) if type_ is None else type_
        if wanted is None:
            wanted = reified_type(function)
        elif isinstance(wanted, str) or not is_untyped(wanted):
            wanted = load_type(wanted)
        if not is_untyped(wanted):
            return self.register(TypedEventHandler, function, topics, {**options, Names.TYPED_EVENT_TYPE: wanted})
        if not topics and Names.TYPED_EVENT_TOPICS not in declared:
            raise ArgumentError("a handler that is not annotated with the type of its events needs a topic")
        return self.register(UntypedEventHandler, function, topics, options)

    def register(
        self, interface: type[Any], function: Callable[..., Any], topics: tuple[Any, ...], options: Mapping[str, Any]
    ) -> ServiceRegistration:
        """Register a function as a handler of this bus only; raises the errors for which a bus ignores a handler."""
        self._bus.refuse_closed()
        named = [topic_of(each) if isinstance(each, type) else each for each in topics]
        properties = {
            **{name: value for name, value in options.items() if value is not None},
            Names.TYPED_EVENT_TARGET: f"({_BUS_ID}={self.properties[_BUS_ID]})",
        }
        if named:
            properties[Names.TYPED_EVENT_TOPICS] = named
        kind = interface_name(interface)
        function_of(kind, function)
        terms = read_terms(kind, function, properties)
        return self._bus.dispatcher.register(interface, function, properties, terms)

    # --- from services to receivers

    def make(self, reference: ServiceReference, kind: str, properties: ServiceProperties) -> EventReceiver | None:
        """Return the receiver of a service, or ``None`` if the service is gone; see ``Dispatcher``."""
        services = self._bus.services
        service = services.get(reference)
        if service is None:
            if services.is_registered(reference):
                raise ArgumentError("its factory returned None")
            return None
        return (TypedReceiver if kind == TYPED else EventReceiver)(
            reference,
            kind,
            service,
            read_terms(kind, service, properties),
            bus=self._bus,
            history=self._history,
        )

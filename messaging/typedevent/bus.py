"""TypedEventBus: events from whoever publishes them to whoever wants them, within the process (157.3, 157.5, 157.9.3).

**What happens where.** ``deliver`` finds the handlers of the topic, applies their filters, and appends the event to the
lane of each; that is all that happens on the publishing thread. Lanes are emptied by delivery threads, or on the event
loops of coroutines, where the event is converted to what the handler wants: once for all handlers that want the same.
No user code runs with a lock, but ``deliver`` may wait where a handler is thousands of events behind (not on event
loops, and not in handlers).

**Order.** Each lane is first in, first out; so each handler gets the events of one thread, or of one task, in the
order they were published, whatever their topics. Handlers do not wait for each other.

**History and monitors.** Only topics that are recorded, or all of them as long as there is a monitor, are published
with the lock of the bus, so that whoever joins gets every event once, from the history or live.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack, overload

from messaging.arguments import check_instance
from messaging.coroutines import running_loop
from messaging.dispatch import (
    Dispatcher,
    EventService,
    HandlerDTO,
    Lifecycle,
    LoopLane,
    Principal,
    Tolerance,
    TopicPermission,
    TopicPolicy,
    check_topic,
    dto_of,
)
from messaging.errors import ArgumentError, InvalidEventError, NullEventError
from messaging.reprs import tolerant
from messaging.services import (
    ServiceRegistration,
    ServiceRegistry,
    Version,
    as_filter,
    default_registry,
    interface_name,
)
from messaging.typedevent.constants import TypedEventConstants as Names
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.handlers import (
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
    declared_properties,
)
from messaging.typedevent.history import History, RangePolicy
from messaging.typedevent.maps import checked_copy
from messaging.typedevent.monitor import TypedEventMonitor
from messaging.typedevent.publisher import TypedEventPublisher
from messaging.typedevent.receivers import UNHANDLED, Receiver, function_of, make, read_terms
from messaging.typedevent.reify import is_untyped, load_type, reified_type, topic_of
from messaging.typedevent.schema import schema_of

if TYPE_CHECKING:
    from messaging.dispatch import Lane
    from messaging.services import ServiceProperties, ServiceReference
    from messaging.typedevent.monitor import Tap

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: events that the history of a bus holds, unless it is told otherwise
HISTORY_CAPACITY: Final = 10_000
#: when handlers are blocked, unless it is told otherwise
TOLERANCE: Final = Tolerance()

_numbers: Final = itertools.count(1)
#: property of a bus that no other one in the process has the same of; names may be given twice
_BUS_ID: Final = "event.bus.id"


class UnhandledOptions(TypedDict, total=False):
    """Options of ``TypedEventBus.on_unhandled``; see there."""

    filter: str | None
    principal: Principal
    timeout: float | None
    ranking: int


class HandlerOptions(UnhandledOptions, total=False):
    """Options of ``TypedEventBus.on``; see there."""

    type: Any
    history: int


class Route:
    """What there is to know to publish to one topic. Immutable.

    Args:
        handlers: those that match it, with those for unhandled events.
        policy: which events of the topic are kept.
        taps: observers of the monitor that may see them.
    """

    __slots__ = ("filtered", "is_recorded", "lanes", "policy", "relays", "taps", "unhandled")

    def __init__(self, handlers: list[Receiver], policy: RangePolicy, taps: list[Tap]) -> None:
        meant = [each for each in handlers if each.kind != UNHANDLED and not each.is_relay]
        #: of the handlers that want every event
        self.lanes: list[Lane] = [each.lane for each in meant if each.terms.filter is None]
        self.filtered = [each for each in meant if each.terms.filter is not None]
        self.unhandled = [each for each in handlers if each.kind == UNHANDLED]
        self.relays = [each for each in handlers if each.is_relay]
        self.policy = policy
        self.taps = taps
        self.is_recorded = bool(taps) or policy.maximum > 0

    def lanes_for(self, event: PublishedEvent) -> list[Lane]:
        """Of the handlers that the event is for; of those for unhandled events, if there is no other (157.4.4)."""
        if self.relays:
            return [*self._handlers_for(event), *(each.lane for each in self.relays if each.accepts(event))]
        return self._handlers_for(event)

    def _handlers_for(self, event: PublishedEvent) -> list[Lane]:
        if self.filtered:
            lanes = [*self.lanes, *(each.lane for each in self.filtered if each.accepts(event))]
            if lanes:
                return lanes
        elif self.lanes:
            return self.lanes
        return [each.lane for each in self.unhandled if each.accepts(event)]


@dataclass(frozen=True, slots=True)
class TypedEventBusDTO:
    """A bus as it is now. A snapshot."""

    name: str
    handlers: tuple[HandlerDTO, ...]
    #: threads that deliver now
    threads: int
    #: events in the history, and how many there may be (-1: any number)
    recorded: int
    capacity: int
    #: observers of the monitor, and how many events they did not get since they were too slow
    monitors: int
    missed: int


class TypedEventBus(EventService):
    """A Typed Event Bus (157.5). Thread safe; also a context manager, sync or async, that closes it.

    It registers itself and its monitor in ``services``, finds its handlers there, and goes on until it is closed;
    then monitors complete.

    Args:
        services: where handlers are registered; by default the process's registry.
        name: of the bus, in the log and as property ``event.bus.name``; made up if not given.
        history: which events are kept: a policy for each topic filter, as ``configure_history_storage`` takes them.
        history_capacity: how many events are kept in all; -1: any number, 0: none.
        permissions: who may publish and subscribe to what; without it everybody may everything.
        tolerance: when a handler that fails or does not return is blocked.
        threads: how many threads deliver at most. There is one, unless handlers hold it up. Those of monitors are not
            among them.

    Raises:
        ArgumentError, InvalidTopicError, HistoryFullError: what is said about the history is wrong.

    Example::

        with TypedEventBus() as bus:
            @bus.on()
            def handle(order: Order) -> None: ...

            bus.deliver(Order(id=7))
    """

    _dispatcher: Dispatcher[Receiver, Route]

    def __init__(
        self,
        services: ServiceRegistry | None = None,
        *,
        name: str | None = None,
        history: Mapping[str, RangePolicy] | None = None,
        history_capacity: int = HISTORY_CAPACITY,
        permissions: TopicPolicy | None = None,
        tolerance: Tolerance = TOLERANCE,
        threads: int | None = None,
    ) -> None:
        number = next(_numbers)
        super().__init__(
            Lifecycle(
                f"typed-events-{number}" if name is None else name,
                threads,
                tolerance,
                permissions,
                is_inside=self._is_inside,
                closed=lambda: self.monitor.close(),
            )
        )
        if history is not None and not isinstance(history, Mapping):
            raise ArgumentError(f"history must be a mapping of topic filters, not {type(history).__name__}")
        if services is not None:
            check_instance("services", services, ServiceRegistry)
        self.services = default_registry() if services is None else services
        self._history = History(history_capacity)
        self._publishing = self.lifecycle.publishing
        self._dispatcher = dispatcher = Dispatcher[Receiver, Route](
            f"typed event bus {self.name!r}",
            self.services,
            (TypedEventHandler, UntypedEventHandler, UnhandledEventHandler),
            make=self._make,
            change=self._change,
            route=self._route,
            policy=permissions,
        )
        #: history and stream of all events (157.6)
        self.monitor = TypedEventMonitor(dispatcher, self._history)
        for topic_filter, policy in (history or {}).items():
            self.monitor.configure_history_storage(topic_filter, policy)
        self._properties = {
            Names.TYPED_EVENT_BUS_NAME: self.name,
            _BUS_ID: number,
            "osgi.implementation": Names.TYPED_EVENT_IMPLEMENTATION,
            "version": Version(Names.TYPED_EVENT_SPECIFICATION_VERSION),
        }
        self.lifecycle.open(
            self._dispatcher,
            [(TypedEventBus, self, self._properties), (TypedEventMonitor, self.monitor, self._properties)],
        )

    # --- publishing (157.3)

    def deliver(self, event: Any, topic: str | None = None, *, principal: Principal = None) -> None:
        """Publish a typed event: it is delivered asynchronously, in the order of the calls of each thread (157.9.3.5).

        Args:
            event: an instance of a schema: a pydantic model, dataclass, ``NamedTuple``, msgspec struct, or any class
                with annotated fields. A mapping is published as with :meth:`deliver_untyped`. It must not change any
                more (157.2.4.1).
            topic: where to; by default the one made of the name of its class, ``package/module/Class`` (157.3.2).
            principal: who publishes.

        Raises:
            NullEventError: the event is ``None``.
            InvalidTopicError: it is no topic, or none can be made of the name of the class.
            InvalidEventError: the event has no schema.
            PermissionDeniedError: the principal may not publish there.
            ArgumentError: the principal is no str.
            ClosedError: the bus is closed.
        """
        if topic is None:
            topic = _topic_of(event)
        self.publish(topic, event, principal)

    def deliver_untyped(self, topic: str, event: Mapping[str, Any], *, principal: Principal = None) -> None:
        """Publish an untyped event; otherwise as :meth:`deliver` (157.9.3.6).

        Args:
            topic: where to.
            event: a mapping with ``str`` keys; its values are simple, collections, or mappings like it: a tree
                (157.2.2). It is copied.
            principal: who publishes.

        Raises:
            NullEventError: the topic or the event is ``None``.
            InvalidTopicError: it is no topic.
            InvalidEventError: the event is not as described; says where.
            PermissionDeniedError: the principal may not publish there.
            ArgumentError: the principal is no str.
            ClosedError: the bus is closed.
        """
        self.publish(topic, event, principal, True)

    def publish(
        self,
        topic: str,
        event: Any,
        principal: Principal = None,
        is_untyped: bool = False,
        is_checked: bool = False,
        passed: tuple[object, ...] = (),
    ) -> None:
        """Publish an event: the path of all events. For the modules of this project; see :meth:`deliver` for errors.

        Args:
            topic: the topic.
            event: an instance of a schema, or a mapping, which is copied.
            principal: the publisher.
            is_untyped: whether only a mapping is allowed.
            is_checked: whether topic and permission were checked before.
            passed: the event services that the event came through; see ``PublishedEvent.passed``.
        """
        # called with positional arguments, since Python 3.11 calls functions with keyword arguments slowly
        if event is None:
            raise NullEventError("an event is needed, not None")
        if topic.__class__ is not str:
            topic = check_topic(topic)  # an exact one: the topic that is checked is the one that is published to
        dispatcher = self._dispatcher
        try:
            route = dispatcher.routes[topic]
        except KeyError:
            route = dispatcher.route(topic)
        if not is_checked and (principal is not None or dispatcher.policy is not None):
            dispatcher.check(principal, TopicPermission.PUBLISH, topic)
        if is_untyped or schema_of(event.__class__) is None:
            event = _copied(event, is_untyped)
        published = PublishedEvent(topic, event)
        if passed:
            published.passed = passed
        thread = get_ident()
        self._publishing.add(thread)
        try:
            if not self.lifecycle.is_open:  # if it was open here, closing waits for this thread
                self.lifecycle.refuse_closed()
            if route.is_recorded:
                self._record(route, published)
            else:
                for lane in route.lanes_for(published):
                    if lane.has_room():
                        lane.put(published)
            if thread not in self._publishing:  # closed by a signal handler on this thread: perhaps too late for it
                self.lifecycle.refuse_closed()
        finally:
            self._publishing.discard(thread)

    def _record(self, route: Route, event: PublishedEvent) -> None:
        """Publish to a topic that is recorded or watched, in one step with whoever joins or leaves."""
        dispatcher = self._dispatcher
        kept = event.owned()  # a handler may change what it gets, but not what others see later
        while True:
            lanes = [lane for lane in route.lanes_for(event) if lane.has_room()]  # this may take time: without the lock
            with dispatcher.lock:
                if dispatcher.routes.get(event.topic) is route:
                    event.time = kept.time = time.time()
                    dropped = self._history.append(kept, route.policy)  # noqa: F841  # let go of without the lock
                    event.sequence = kept.sequence
                    for lane in lanes:
                        lane.put(event)
                    for tap in route.taps:
                        tap.put(kept)
                    return
            dispatcher.refuse_closed()
            route = dispatcher.route(event.topic)

    @overload
    def create_publisher(self, topic: str, *, principal: Principal = None) -> TypedEventPublisher[Any]: ...
    @overload
    def create_publisher(self, topic: type[T], *, principal: Principal = None) -> TypedEventPublisher[T]: ...
    @overload
    def create_publisher(
        self, topic: str, event_type: type[T], *, principal: Principal = None
    ) -> TypedEventPublisher[T]: ...
    def create_publisher(
        self, topic: str | type[Any], event_type: type[Any] | None = None, *, principal: Principal = None
    ) -> TypedEventPublisher[Any]:
        """A publisher for one topic, which is checked here and not with each event (157.3.4).

        Args:
            topic: the topic; or a class, for the topic that is made of its name (157.9.3.1 to 157.9.3.3).
            event_type: of the events, for type checkers.
            principal: who publishes.

        Raises:
            NullEventError: there is no topic.
            InvalidTopicError: it is no topic, or none can be made of the name of the class.
            ArgumentError: ``event_type`` is no class, or the principal no str.
            PermissionDeniedError: the principal may not publish there.
            ClosedError: the bus is closed.
        """
        if event_type is not None and not isinstance(event_type, type):
            raise ArgumentError(f"event_type must be a class, not {event_type!r:.80}")
        if isinstance(topic, type):
            topic = topic_of(topic)
        topic = check_topic(topic)
        self.lifecycle.refuse_closed()
        self._dispatcher.check(principal, TopicPermission.PUBLISH, topic)
        return TypedEventPublisher(self, topic, principal)

    # --- handlers (157.4)

    @overload
    def on(
        self, *topics: str | type[Any], handler: Callable[..., Any], **options: Unpack[HandlerOptions]
    ) -> ServiceRegistration: ...
    @overload
    def on(self, *topics: str | type[Any], **options: Unpack[HandlerOptions]) -> Callable[[F], F]: ...
    @overload
    def on(self, function: F, /) -> F: ...
    def on(
        self,
        *topics: Any,
        handler: Callable[..., Any] | None = None,
        type: Any = None,  # noqa: A002  # as the property is called
        filter: str | None = None,  # noqa: A002
        history: int = 0,
        principal: Principal = None,
        timeout: float | None = None,
        ranking: int = 0,
    ) -> Any:
        """Have a function called with events, or the function below; only those of this bus.

        Args:
            *topics: filters of the topics; a class stands for the topic made of its name. Without any, it is that of
                the class that the function wants.
            handler: a function or coroutine function of the event, or of topic and event. What the event is annotated
                with is what it gets; without annotation, or with ``dict`` or ``Mapping``, that is a nested dict.
            type: what it gets, if the annotation does not say so.
            filter: LDAP filter over the top level of the data; case-sensitive.
            history: how many past events it gets first, at most.
            principal: whose permissions count.
            timeout: how long it may take for one event, seconds; 0: for ever.
            ranking: ``service.ranking`` of the registration.

        Returns:
            The registration in ``services``, which ends it, or without ``handler`` a decorator.

        Raises:
            ArgumentError, InvalidTopicError, InvalidFilterError: one of these is not as described.
            PermissionDeniedError: the principal may not subscribe to a topic that has no wildcard.
            ClosedError: the bus is closed.

        Example::

            @bus.on("orders/+/placed", filter="(total>=100)")
            def large(topic: str, order: Order) -> None: ...
        """
        topics, bare = _without_function(topics)
        options = {
            Names.TYPED_EVENT_FILTER: filter,
            Names.TYPED_EVENT_HISTORY: history,
            Names.TYPED_EVENT_PRINCIPAL: principal,
            Names.TYPED_EVENT_TIMEOUT: timeout,
            "service.ranking": ranking,
        }

        def register(function: Callable[..., Any]) -> ServiceRegistration:
            declared = declared_properties(function)
            wanted = declared.get(Names.TYPED_EVENT_TYPE) if type is None else type
            if wanted is None:
                wanted = reified_type(function)
            elif isinstance(wanted, str) or not is_untyped(wanted):
                wanted = load_type(wanted)
            if not is_untyped(wanted):
                return self._register(TypedEventHandler, function, topics, {**options, Names.TYPED_EVENT_TYPE: wanted})
            if not topics and Names.TYPED_EVENT_TOPICS not in declared:
                raise ArgumentError("a handler that is not annotated with the type of its events needs a topic")
            return self._register(UntypedEventHandler, function, topics, options)

        return _registered(register, bare if handler is None else handler, is_decorated=handler is None)

    @overload
    def on_unhandled(
        self, *topics: str, handler: Callable[..., Any], **options: Unpack[UnhandledOptions]
    ) -> ServiceRegistration: ...
    @overload
    def on_unhandled(self, *topics: str, **options: Unpack[UnhandledOptions]) -> Callable[[F], F]: ...
    @overload
    def on_unhandled(self, function: F, /) -> F: ...
    def on_unhandled(
        self,
        *topics: Any,
        handler: Callable[..., Any] | None = None,
        filter: str | None = None,  # noqa: A002
        principal: Principal = None,
        timeout: float | None = None,
        ranking: int = 0,
    ) -> Any:
        """Have a function called with events that no other handler got (157.4.4); otherwise as :meth:`on`.

        Args:
            *topics: filters of the topics; without any, all of them.
            handler: a function or coroutine function of the event, a nested dict, or of topic and event.
            filter, principal, timeout, ranking: see :meth:`on`.
        """
        topics, bare = _without_function(topics)
        options = {
            Names.TYPED_EVENT_FILTER: filter,
            Names.TYPED_EVENT_PRINCIPAL: principal,
            Names.TYPED_EVENT_TIMEOUT: timeout,
            "service.ranking": ranking,
        }

        def register(function: Callable[..., Any]) -> ServiceRegistration:
            return self._register(UnhandledEventHandler, function, topics, options)

        return _registered(register, bare if handler is None else handler, is_decorated=handler is None)

    def _register(
        self, interface: type[Any], function: Callable[..., Any], topics: tuple[Any, ...], options: Mapping[str, Any]
    ) -> ServiceRegistration:
        """Register a function; all that would make the bus ignore it is raised here."""
        self.lifecycle.refuse_closed()
        named = [topic_of(each) if isinstance(each, type) else each for each in topics]
        properties = {
            **{name: value for name, value in options.items() if value is not None},
            Names.TYPED_EVENT_TARGET: f"({_BUS_ID}={self._properties[_BUS_ID]})",
        }
        if named:
            properties[Names.TYPED_EVENT_TOPICS] = named
        kind = interface_name(interface)
        function_of(kind, function)
        terms = read_terms(kind, function, properties)
        for each in terms.topics or ():
            if not each.has_wildcard:
                self._dispatcher.check(terms.principal, TopicPermission.SUBSCRIBE, each.text)
        return self.services.register(interface, function, properties)

    def _make(self, reference: ServiceReference, kind: str, properties: ServiceProperties) -> Receiver | None:
        if not self._is_meant(properties):
            return None
        service = self.services.get(reference)
        if service is None:
            if self.services.is_registered(reference):
                raise ArgumentError("its factory made None")
            return None
        return make(
            reference,
            kind,
            service,
            properties,
            replay=self._replay,
            pool=self.lifecycle.pool,
            tolerance=self.lifecycle.tolerance,
            block=self._dispatcher.block,
        )

    def _change(self, receiver: Receiver, properties: ServiceProperties) -> Callable[[], object] | None:
        return receiver.change(properties) if self._is_meant(properties) else None

    def _is_meant(self, properties: ServiceProperties) -> bool:
        target = as_filter(properties.get(Names.TYPED_EVENT_TARGET))
        return target is None or target.matches(self._properties)

    def _is_inside(self) -> bool:
        loop = running_loop()
        return any(
            isinstance(lane, LoopLane) and lane.loop is loop and lane.has_the_turn for lane in self.lifecycle.lanes()
        )

    def _route(self, topic: str, handlers: list[Receiver]) -> Route:
        taps = [each for each in self.monitor.taps if each.may_see(topic)]
        with self._dispatcher.lock:
            return Route(handlers, self._history.effective(topic), taps)

    def _replay(self, receiver: Receiver) -> Iterator[PublishedEvent]:
        """What the history has now of the topics of a handler, the newest first. With the lock; to be used without."""
        past = self._history.of(receiver.topics)
        principal = receiver.terms.principal
        return (each for each in past if self._dispatcher.may(principal, TopicPermission.SUBSCRIBE, each.topic))

    # --- state

    def get_dto(self) -> TypedEventBusDTO:
        """What there is now: handlers, which of them are blocked and why, and how full it is."""
        return TypedEventBusDTO(
            name=self.name,
            handlers=tuple(dto_of(each, name.rpartition(".")[2]) for name, each in self._dispatcher.handlers()),
            threads=self.lifecycle.pool.threads,
            recorded=len(self._history),
            capacity=self._history.capacity,
            monitors=len(self.monitor.taps),
            missed=self.monitor.missed,
        )

    @tolerant
    def __repr__(self) -> str:
        return f"<TypedEventBus {self.name!r}{'' if self.lifecycle.is_open else ', closed'}>"


def _copied(event: Any, is_untyped: bool) -> dict[str, Any]:
    """Return a copy of an event that is a mapping."""
    if isinstance(event, Mapping):
        return checked_copy(event)
    if is_untyped:
        raise InvalidEventError(f"an untyped event must be a mapping; this is of type {type(event).__name__}")
    raise InvalidEventError(
        f"an event must be an instance of a class with fields, or a mapping; this is of type {type(event).__name__}"
    )


def _topic_of(event: Any) -> str:
    """Return the topic made of the class of an event."""
    if event is None:
        raise NullEventError("an event is needed, not None")
    if isinstance(event, Mapping):
        raise InvalidEventError("a mapping has no class that a topic can be made of: give one")
    if schema_of(event.__class__) is None:
        _copied(event, is_untyped=False)  # which says why it is refused
    return topic_of(event.__class__)


def _without_function(topics: tuple[Any, ...]) -> tuple[tuple[Any, ...], Callable[..., Any] | None]:
    """The topics, and the function that stands there of ``@bus.on`` without parentheses."""
    if len(topics) == 1 and callable(topics[0]) and not isinstance(topics[0], type):
        return (), topics[0]
    return topics, None


def _registered(
    register: Callable[[Callable[..., Any]], ServiceRegistration],
    function: Callable[..., Any] | None,
    *,
    is_decorated: bool,
) -> Any:
    """The registration of a function, or what a decorator returns."""

    def decorate(decorated: F) -> F:
        register(decorated)
        return decorated

    if function is None:
        return decorate
    return decorate(function) if is_decorated else register(function)

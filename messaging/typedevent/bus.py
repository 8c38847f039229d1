"""TypedEventBus: deliver events from publishers to handlers within the process (157.3, 157.5, 157.9.3).

**Threads.** ``deliver`` finds the handlers of the topic, applies their filters, and appends the event to the lane of
each handler; the publishing thread does no more. Delivery threads, or the event loops of coroutines, empty the lanes
and convert the event to the type that the handler wants: once for all handlers that want the same type. No user code
runs with a lock. ``deliver`` may wait for a handler that is thousands of events behind, except on event loops and in
handlers.

**Order.** Each lane is first in, first out. So each handler receives the events of one thread, or of one task, in the
order they were published, whatever their topics. Handlers do not wait for each other.

**History and monitors.** Topics that are recorded, and all topics while a monitor is subscribed, are published with the
lock of the bus. A new handler or observer then receives every event once, from the history or live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack, overload

from messaging.dispatch import (
    Dispatcher,
    EventService,
    HandlerDTO,
    Principal,
    Tolerance,
    TopicPermission,
    TopicPolicy,
    check_topic,
    registered,
)
from messaging.dispatch.eventdata import schema_of, topic_of
from messaging.dispatch.eventnetwork import EventNetwork
from messaging.errors import ArgumentError, NullEventError
from messaging.errors.checks import check_instance
from messaging.execution import LoopLane, clock, running_loop
from messaging.journal import JournalReporter
from messaging.services import ServiceRegistration, ServiceRegistry, Version
from messaging.services.reporting import PartReporter, Reporter, counter, gauge, part
from messaging.typedevent.bus_connection import BusConnection, ConnectedBus
from messaging.typedevent.connection_terms import LIMIT, ConnectionTerms
from messaging.typedevent.durable import DurableHistory, DurableHistoryDTO
from messaging.typedevent.event import PublishedEvent, copy_of, topic_of_event
from messaging.typedevent.handlers import TypedEventConstants as Names
from messaging.typedevent.handlers import TypedEventHandler, UnhandledEventHandler, UntypedEventHandler
from messaging.typedevent.history import EventHistory, RangePolicy
from messaging.typedevent.monitor import TypedEventMonitor
from messaging.typedevent.past import OwnPast
from messaging.typedevent.receivers import BusRoute, EventReceiver, EventTerms, HandlerRegistrar, next_bus_id
from messaging.typedevent.store import EventStore
from messaging.typedevent.topic_publisher import TypedEventPublisher

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from uuid import UUID

    from messaging.execution import Lane
    from messaging.instance import Messaging
    from messaging.typedevent.connection_terms import RelayOverflow

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: policy of a topic that is kept
_ANY: Final = RangePolicy.unlimited()
#: default capacity of the history of a bus, events
HISTORY_CAPACITY: Final = 10_000
#: default limits beyond which a handler is blocked
TOLERANCE: Final = Tolerance()


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


def _properties_of(
    *,
    filter: str | None = None,  # noqa: A002  # the name of the option
    principal: Principal = None,
    timeout: float | None = None,
    ranking: int = 0,
) -> dict[str, Any]:
    """Return the service properties that stand for the options of a handler."""
    return {
        Names.TYPED_EVENT_FILTER: filter,
        Names.TYPED_EVENT_PRINCIPAL: principal,
        Names.TYPED_EVENT_TIMEOUT: timeout,
        "service.ranking": ranking,
    }


@dataclass(frozen=True, slots=True)
class TypedEventBusDTO:
    """A snapshot of a bus."""

    name: str
    handlers: tuple[HandlerDTO, ...] = field(metadata=part("handler"))
    threads: int = field(metadata=gauge("running delivery threads", "threads"))
    recorded: int = field(metadata=gauge("events in the history", "events"))
    capacity: int = field(metadata=gauge("capacity of the history; -1: unlimited", "events"))
    monitors: int = field(metadata=gauge("subscriptions to the monitor"))
    missed: int = field(metadata=counter("events that slow observers of the monitor missed", "events"))
    #: the events on the disk; ``None`` without a durable history
    durable: DurableHistoryDTO | None = field(default=None, metadata=part("durable_history"))


class TypedEventBus(EventService):
    """A Typed Event Bus (157.5). Thread safe; also a context manager, sync or async, that closes it.

    It registers itself and its monitor in ``services``, and serves the handlers that are registered there, until it is
    closed. Then monitors complete.

    Args:
        services: registry of the handlers; by default the registry of the process.
        name: name of the bus, in the log and as property ``event.bus.name``; generated by default.
        history: policies of the history by topic filter; see ``TypedEventMonitor.configure_history_storage``.
        history_capacity: maximum number of events in the history in memory; -1: unlimited, 0: none.
        durable_history: keeps the history on the disk, too, so that it survives a restart. The history in memory begins
            with the newest events of earlier runs that ``history`` keeps; policies that are set later do not add any.
        permissions: which principals may publish and subscribe to which topics; by default all to all.
        tolerance: limits beyond which a handler that fails or does not return is blocked.
        threads: maximum number of delivery threads. One is used, unless handlers hold it up. Threads of monitors are
            not included.

    Raises:
        ArgumentError, InvalidTopicError, HistoryFullError: an argument is invalid.
        JournalError: the folder of the durable history cannot be used: a ``JournalLockedError`` if another bus uses it,
            a ``JournalFullError`` if the disk is full, a ``JournalUnreadableError`` if it holds something else.

    Example::

        with TypedEventBus() as bus:
            @bus.on()
            def handle(order: Order) -> None: ...

            bus.deliver(Order(id=7))
    """

    dispatcher: Dispatcher[EventReceiver, BusRoute]

    def __init__(
        self,
        services: ServiceRegistry | None = None,
        *,
        name: str | None = None,
        history: Mapping[str, RangePolicy] | None = None,
        history_capacity: int = HISTORY_CAPACITY,
        durable_history: DurableHistory | None = None,
        permissions: TopicPolicy | None = None,
        tolerance: Tolerance = TOLERANCE,
        threads: int | None = None,
    ) -> None:
        bus_id = next_bus_id()
        super().__init__(
            "typed event bus",
            f"typed-events-{bus_id}" if name is None else name,
            services,
            threads=threads,
            tolerance=tolerance,
            permissions=permissions,
        )
        if history is not None and not isinstance(history, Mapping):
            raise ArgumentError(f"history must be a mapping of topic filters, not {type(history).__name__}")
        if durable_history is not None:
            check_instance("durable_history", durable_history, DurableHistory)
        self._history = EventHistory(history_capacity)
        self._store: EventStore | None = None
        announced = {
            Names.TYPED_EVENT_BUS_NAME: self.name,
            "osgi.implementation": Names.TYPED_EVENT_IMPLEMENTATION,
            "version": Version(Names.TYPED_EVENT_SPECIFICATION_VERSION),
        }
        self._registrar = registrar = HandlerRegistrar(bus_id, announced, self._history, self)
        self.dispatcher = dispatcher = Dispatcher[EventReceiver, BusRoute](
            self.title,
            self.services,
            (TypedEventHandler, UntypedEventHandler, UnhandledEventHandler),
            announced=registrar.properties,
            make=registrar.make,
            route=self._make_route,
            policy=permissions,
        )
        #: history and stream of all events (157.6)
        self.monitor = TypedEventMonitor(dispatcher, self._history, lambda: self._store)
        for topic_filter, policy in (history or {}).items():
            self.monitor.configure_history_storage(topic_filter, policy)
        if durable_history is not None:
            self._store = EventStore(durable_history, self.title, self._history, self._guaranteed)
        past = OwnPast(dispatcher, self._history, lambda: self._store)
        self._network = ConnectedBus(self, self.publish, self.monitor, past, self._record)
        dispatcher.on_change = self._network.refresh
        offered: list[tuple[type, Any]] = [(TypedEventBus, self), (TypedEventMonitor, self.monitor)]
        offered.append((Reporter, PartReporter("typed_event_bus", self.name, self.get_dto, self.problems)))
        if self._store is not None:
            offered.append((Reporter, JournalReporter(self._store.journal, f"{self.name}/history")))
        self.open([(interface, service, registrar.properties) for interface, service in offered])

    # --- publishing (157.3)

    def deliver(self, event: Any, topic: str | None = None, *, principal: Principal = None) -> None:
        """Publish a typed event: it is delivered asynchronously, in the order of the calls of each thread (157.9.3.5).

        Args:
            event: an instance of a schema: a pydantic model, dataclass, ``NamedTuple``, msgspec struct, or any class
                with annotated fields. A mapping is published as by :meth:`deliver_untyped`. It must not be mutated
                after publishing (157.2.4.1).
            topic: the topic; by default the one made of the name of its class, ``package/module/Class`` (157.3.2).
            principal: the principal that publishes.

        Raises:
            NullEventError: the event is ``None``.
            InvalidTopicError: the topic is invalid, or none can be made of the name of the class.
            InvalidEventError: the event has no schema.
            PermissionDeniedError: the principal may not publish to the topic.
            ArgumentError: the principal is no str.
            ClosedError: the bus is closed.
        """
        if topic is None:
            topic = topic_of_event(event)
        self.publish(topic, event, principal)

    def deliver_untyped(self, topic: str, event: Mapping[str, Any], *, principal: Principal = None) -> None:
        """Publish an untyped event; see :meth:`deliver` (157.9.3.6).

        Args:
            topic: the topic.
            event: a mapping with ``str`` keys. Its values are simple, collections, or such mappings: a tree (157.2.2).
                It is copied.
            principal: the principal that publishes.

        Raises:
            NullEventError: the topic or the event is ``None``.
            InvalidTopicError: the topic is invalid.
            InvalidEventError: the event is not as described; the error shows the place.
            PermissionDeniedError: the principal may not publish to the topic.
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
        origin: UUID | None = None,
        time: float = 0.0,
    ) -> None:
        """Publish an event: the path of all events. For the modules of this project; see :meth:`deliver` for errors.

        Args:
            topic: the topic.
            event: an instance of a schema, or a mapping, which is copied.
            principal: the principal that publishes.
            is_untyped: whether only a mapping is allowed.
            is_checked: whether topic and permission were checked before.
            passed: the event services that the event came through; see ``PublishedEvent.passed``.
            origin: the framework that a remote event came from.
            time: when a remote event was published, seconds since the epoch; 0: now.
        """
        # Callers pass arguments by position: Python 3.11 is slow to pass them by keyword.
        if event is None:
            raise NullEventError("the event is None")
        if topic.__class__ is not str:
            topic = check_topic(topic)  # returns a plain str: the topic that is checked is the one published to
        dispatcher = self.dispatcher
        try:
            route = dispatcher.routes[topic]
        except KeyError:
            route = dispatcher.route(topic)
        if not is_checked and (principal is not None or dispatcher.policy is not None):
            dispatcher.check(principal, TopicPermission.PUBLISH, topic)
        if is_untyped or schema_of(event.__class__) is None:
            event = copy_of(event, is_untyped)
        published = PublishedEvent(topic, event)
        if passed:
            published.passed = passed
        if origin is not None:
            published.origin = origin
        if time:
            published.time = time
        thread = get_ident()
        self.publishing.add(thread)
        try:
            if not self.is_open:  # checked after add(): from there on, close() waits for this thread
                self.refuse_closed()
            for offer in route.outlets:
                offer(published)
            if route.is_recorded:
                self._record(route, published)
            else:
                for lane in route.lanes_for(published):
                    if lane.has_room():
                        lane.put(published)
            if thread not in self.publishing:  # a signal handler on this thread closed the bus, perhaps before the put
                self.refuse_closed()
        finally:
            self.publishing.discard(thread)

    def _record(
        self,
        route: BusRoute,
        event: PublishedEvent,
        lanes_for: Callable[[PublishedEvent], list[Lane]] | None = None,
    ) -> None:
        """Publish to a topic that is recorded or observed, atomically with handlers and observers that join."""
        dispatcher = self.dispatcher
        kept = event.owned()  # handlers of ``event`` cannot mutate the recorded copy
        while True:
            lanes = route.lanes_for(event) if lanes_for is None else lanes_for(event)
            lanes = [lane for lane in lanes if lane.has_room()]  # may wait, so without the lock
            with dispatcher.lock:
                if dispatcher.routes.get(event.topic) is route:
                    if not event.time:
                        event.time = kept.time = clock.wall()
                    if route.store is not None:
                        self._history.number(kept)
                        route.store.put(kept)
                    _dropped = self._history.append(kept, route.policy)  # released without the lock
                    event.sequence = kept.sequence
                    for lane in lanes:
                        lane.put(event)
                    for tap in route.taps:
                        tap.put(kept)
                    return
            dispatcher.refuse_closed()
            route = dispatcher.route(event.topic)

    def _make_route(self, topic: str, handlers: list[tuple[EventReceiver, EventTerms]]) -> BusRoute:
        taps = [each for each in self.monitor.taps if each.may_see(topic)]
        outlets = tuple(each.offer for each in self._network.connections if each.sends(topic))
        with self.dispatcher.lock:
            policy = self._history.effective(topic)
            store = self._store
            stored = store if store is not None and store.stores(topic, policy) else None
            return BusRoute(handlers, policy, taps, outlets, stored)

    def _guaranteed(self) -> Iterator[PublishedEvent]:
        """Yield the events of the durable history that minima guarantee, the newest first."""
        store, history = self._store, self._history
        with self.dispatcher.lock:
            found = history.guaranteed()
        return (each for each in found if store is None or store.stores(each.topic, _ANY))

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
        """Return a publisher for one topic. Topic and permission are checked here, not with each event (157.3.4).

        Args:
            topic: the topic, or a class for the topic made of its name (157.9.3.1 to 157.9.3.3).
            event_type: the class of the events, for type checkers.
            principal: the principal that publishes.

        Raises:
            NullEventError: the topic is ``None``.
            InvalidTopicError: the topic is invalid, or none can be made of the name of the class.
            ArgumentError: ``event_type`` is no class, or the principal no str.
            PermissionDeniedError: the principal may not publish to the topic.
            ClosedError: the bus is closed.
        """
        if event_type is not None and not isinstance(event_type, type):
            raise ArgumentError(f"event_type must be a class, not {event_type!r:.80}")
        if isinstance(topic, type):
            topic = topic_of(topic)
        topic = check_topic(topic)
        self.refuse_closed()
        self.dispatcher.check(principal, TopicPermission.PUBLISH, topic)
        return TypedEventPublisher(self.publish, topic)

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
        type: Any = None,  # noqa: A002  # the name of the property
        history: int = 0,
        **options: Unpack[UnhandledOptions],
    ) -> Any:
        """Register a function as a handler of this bus only; also as a decorator.

        Args:
            *topics: topic filters; a class stands for the topic made of its name. By default the topic made of the
                name of the class that the function wants.
            handler: a function or coroutine function of the event, or of topic and event. It receives the event as its
                annotation says; without one, or with ``dict`` or ``Mapping``, as a nested dict.
            type: the type of the event, if the annotation does not say it.
            filter: LDAP filter over the top level of the data; case-sensitive.
            history: maximum number of past events that it receives first.
            principal: the principal whose permissions count.
            timeout: time limit for one event, seconds; 0: none.
            ranking: ``service.ranking`` of the registration.

        Returns:
            The registration in ``services``, which unregisters the handler; without ``handler``, a decorator.

        Raises:
            ArgumentError, InvalidTopicError, InvalidFilterError: an argument is invalid.
            PermissionDeniedError: the principal may not subscribe to a topic that has no wildcard.
            ClosedError: the bus is closed.

        Example::

            @bus.on("orders/+/placed", filter="(total>=100)")
            def large(topic: str, order: Order) -> None: ...
        """
        properties = {**_properties_of(**options), Names.TYPED_EVENT_HISTORY: history}
        register = self._registrar.register_by_type
        return registered(lambda each, topics: register(each, topics, type, properties), topics, handler)

    @overload
    def on_unhandled(
        self, *topics: str, handler: Callable[..., Any], **options: Unpack[UnhandledOptions]
    ) -> ServiceRegistration: ...
    @overload
    def on_unhandled(self, *topics: str, **options: Unpack[UnhandledOptions]) -> Callable[[F], F]: ...
    @overload
    def on_unhandled(self, function: F, /) -> F: ...
    def on_unhandled(
        self, *topics: Any, handler: Callable[..., Any] | None = None, **options: Unpack[UnhandledOptions]
    ) -> Any:
        """Register a function for events that no other handler received (157.4.4); see :meth:`on`.

        Args:
            *topics: topic filters; by default all topics.
            handler: a function or coroutine function of the event, a nested dict, or of topic and event.
            filter, principal, timeout, ranking: see :meth:`on`.
        """
        properties = _properties_of(**options)
        register = self._registrar.register
        return registered(
            lambda each, topics: register(UnhandledEventHandler, each, topics, properties), topics, handler
        )

    # --- the network

    def connect(
        self,
        instance: Messaging,
        topics: str | Iterable[str],
        *,
        outbound: bool | str | Iterable[str] = True,
        inbound: bool | str | Iterable[str] = True,
        network: EventNetwork | None = None,
        principal: Principal = None,
        outbound_policy: TopicPolicy | None = None,
        inbound_policy: TopicPolicy | None = None,
        limit: int = LIMIT,
        overflow: RelayOverflow = "drop_oldest",
        history: int | datetime | timedelta | None = None,
        shares_history: bool = False,
    ) -> BusConnection:
        """Connect the bus to the event network of a broker: events of these topics go to other processes, and arrive.

        Handlers, monitors and the history receive events of other processes as they do those of this one. Nothing is
        sent that no process wants. A publisher never waits for the network.

        Args:
            instance: the messaging instance of the broker. It is not closed with the bus. With its setting
                ``outbox_path``, events that it accepted are sent after a crash, too.
            topics: the topic filters of the events that cross, at least one.
            outbound, inbound: the directions; topic filters restrict one further.
            network: settings that all processes share, such as the prefix of the channels.
            principal: publishes the events of other processes here, and those of this process there.
            outbound_policy, inbound_policy: which principals may send to the network, and to this bus; by default all.
            limit: number of events that may wait to be sent.
            overflow: which event is dropped, and counted, if more wait: ``drop_oldest`` or ``drop_latest``.
            history: has the past events of other processes precede their live ones: the number of newest events, or the
                time of the first one, or how far back it was. They are recorded here; handlers with ``event.history``
                receive them, others do not. ``BusConnection.caught_up`` tells when. At most 10,000.
            shares_history: whether other processes may ask for the recorded events of these topics, see
                ``BusConnection.replay``.

        Returns:
            The connection, which is closed with the bus.

        Raises:
            InvalidTopicError: one of the topics is no topic filter.
            ArgumentError: another argument is not as described.
            UnsupportedFeatureError: the instance lacks wildcards.
            ClosedError: the bus or the instance is closed.

        Example::

            with messaging.connect("mqtt://localhost") as m, bus.connect(m, "orders/*"):
                bus.deliver(Order(1), "orders/placed")
        """
        terms = ConnectionTerms(
            topics,
            outbound=outbound,
            inbound=inbound,
            principal=principal,
            outbound_policy=outbound_policy,
            inbound_policy=inbound_policy,
            limit=limit,
            overflow=overflow,
            history=history,
            shares_history=shares_history,
        )
        return BusConnection(self._network, instance, EventNetwork() if network is None else network, terms)

    # --- state

    def get_dto(self) -> TypedEventBusDTO:
        """Return a snapshot: the handlers, which of them are blocked and why, and the state of the history."""
        return TypedEventBusDTO(
            name=self.name,
            handlers=self.handler_dtos(),
            threads=self.pool.threads,
            recorded=len(self._history),
            capacity=self._history.capacity,
            monitors=len(self.monitor.taps),
            missed=self.monitor.missed,
            durable=None if self._store is None else self._store.get_dto(),
        )

    def _stop_accepting(self) -> None:
        self._network.close()

    def _release(self) -> None:
        """Store the published events, and complete the observers."""
        if self._store is not None:
            self._store.close()
        self.monitor.close()

    def _is_in_handler(self) -> bool:
        loop = running_loop()
        return any(isinstance(lane, LoopLane) and lane.loop is loop and lane.task.has_the_turn for lane in self.lanes())

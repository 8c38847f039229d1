"""The side of a typed event bus that faces its networks: what it wants, and the events of other processes.

The bus announces the topic filters of its handlers, monitors and history, as far as they are connected, and publishes
what arrives: handlers receive it as events of this process, converted to their types. Publication time and origin are
kept.

**Loop guard.** An event keeps its id and the members it passed, see :mod:`messaging.dispatch.eventnetwork.hops`. A bus
takes an event once, over however many connections and bridges it comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Final
from uuid import UUID

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import EventService, TopicPermission, parse_filter
from messaging.dispatch.eventdata import checked_copy
from messaging.dispatch.eventnetwork import MAX_PAST, TYPED, NodeService, SeenEvents, TopicInterest
from messaging.errors import DecodeError, MessagingError
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.late import PAST_TIMEOUT, LateJoin, PastDelivery, past_request, read_past

if TYPE_CHECKING:
    from datetime import datetime

    from messaging.dispatch import Principal, TopicFilter, TopicPolicy
    from messaging.dispatch.eventnetwork import Announcement, ArrivedEvent, EventNode
    from messaging.execution import Lane
    from messaging.typedevent.monitor import TypedEventMonitor
    from messaging.typedevent.past import OwnPast, PastSender
    from messaging.typedevent.receivers import BusRoute, EventOutlet

_MICROSECONDS: Final = 1_000_000
#: origin of a remote event whose sender gave none
_UNKNOWN_FRAMEWORK: Final = UUID(int=0)
#: most keys of past events that are remembered until the events come live
_PAST_ONLY: Final = 100_000
_ABSENT: Final = object()


class ConnectedBus:
    """The side of a typed event bus that its connections use. Thread safe.

    Args:
        bus: the service.
        publish: its method ``publish``.
        monitor: the history and the observers of the bus.
        past: the recorded events of the bus.
        record: publishes an event by a route, to the lanes that a function returns for it, and records it.
    """

    def __init__(
        self,
        bus: EventService,
        publish: Callable[..., None],
        monitor: TypedEventMonitor,
        past: OwnPast,
        record: Callable[[BusRoute, PublishedEvent, Callable[[PublishedEvent], list[Lane]]], object],
    ) -> None:
        self.bus = bus
        self.title = bus.title
        self.dispatcher = bus.dispatcher
        self.past = past
        self.publish = publish
        self._monitor = monitor
        self._record = record
        self.seen = SeenEvents()
        #: keys of events that came as past ones: handlers without a history get those that come live, too
        self.past_only: BoundedCache[str, None] = BoundedCache(_PAST_ONLY)
        self._lock = threading.Lock()  # guards the following, which is replaced as a whole
        self.connections: tuple[EventOutlet, ...] = ()

    def add(self, connection: EventOutlet) -> None:
        """Add a connection."""
        with self._lock:
            self.connections = (*self.connections, connection)
        self.dispatcher.forget()

    def remove(self, connection: EventOutlet) -> None:
        """Remove a connection; idempotent."""
        with self._lock:
            self.connections = tuple(each for each in self.connections if each is not connection)
        self.dispatcher.forget()

    def refresh(self) -> None:
        """Note that the handlers changed. From any thread; does not wait."""
        for each in self.connections:
            each.refresh()

    def close(self) -> None:
        """Close all connections."""
        for each in self.connections:
            each.close()

    def publish_copy(self, event: PublishedEvent, principal: Principal) -> None:
        """Publish an event of another process that is recorded as a past event already."""
        dispatcher = self.dispatcher
        dispatcher.check(principal, TopicPermission.PUBLISH, event.topic)
        route = dispatcher.route(event.topic)
        thread = get_ident()
        self.bus.publishing.add(thread)
        try:
            self.bus.refuse_closed()
            for connection in route.connections:
                connection.offer(event)
            for lane in route.lanes_for_copy(event):
                if lane.has_room():
                    lane.put(event)
        finally:
            self.bus.publishing.discard(thread)

    def publish_past(self, events: list[PublishedEvent], principal: Principal) -> None:
        """Record past events of other processes, and deliver them to handlers that want past events."""
        dispatcher = self.dispatcher
        delivery = PastDelivery(dispatcher, events)
        thread = get_ident()
        for number, event in enumerate(events):
            if not dispatcher.may(principal, TopicPermission.PUBLISH, event.topic):
                continue
            self.bus.publishing.add(thread)
            try:
                self.bus.refuse_closed()
                self._record(dispatcher.route(event.topic), event, partial(delivery.lanes_for, number))
            finally:
                self.bus.publishing.discard(thread)

    def wanted(self) -> Iterable[tuple[str, str | None]]:
        """Return the topic filters of handlers, monitors and history, each with its LDAP filter."""
        found = {
            (topics.text, None if each.terms.filter is None else str(each.terms.filter)): None
            for _, each in self.dispatcher.handlers()
            if each.blocked is None
            for topics in each.topics
        }
        policies = self._monitor.get_configured_history_storage()
        found |= {(text, None): None for text, policy in policies.items() if policy.maximum}
        if self._monitor.taps:
            found["*", None] = None
        return found


class InboundEvents(NodeService):
    """The events of other processes that one connection takes in. Its methods run on worker threads.

    Args:
        bus: the bus.
        topics: filters of the topics that are connected inbound.
        policy: who may publish to which of them; ``None``: all.
        principal: publishes the events on the bus.
        past: answers the requests of other members; ``None`` if the history is not shared.
    """

    def __init__(
        self,
        bus: ConnectedBus,
        topics: tuple[TopicFilter, ...],
        policy: TopicPolicy | None,
        principal: Principal,
        past: PastSender | None,
    ) -> None:
        self._bus = bus
        self.topics = topics
        self.policy = policy
        self._principal = principal
        self._past = past
        #: number of events that had arrived before
        self.duplicates = 0
        #: the past events of other processes; until they are there, live ones are held
        self.late: LateJoin | None = None

    def begin_with_past(self) -> LateJoin:
        """Hold live events until there are past ones. Called before any arrive."""
        late = self.late = LateJoin(
            self._bus.title,
            past_event=self._past_event,
            publish_past=lambda events: self._bus.publish_past(events, self._principal),
            publish=self._publish,
        )
        return late

    def wanted(self) -> tuple[Iterable[TopicInterest], Iterable[str]]:
        """See ``NodeService``: what handlers, monitors and history of the bus want, as far as it is connected."""
        found: dict[TopicInterest, None] = {}
        for text, ldap in self._bus.wanted():
            for mine in self.topics:
                common = mine.intersection(parse_filter(text))
                if common is not None:
                    found[TopicInterest(common, ldap, grammar=TYPED)] = None
        return found, ()

    def interest_changed(self) -> None:
        """See ``NodeService``: have routes made anew."""
        self._bus.dispatcher.forget()

    def member_lost(self, member: str) -> None:
        """See ``NodeService``: a typed event bus has no sessions."""

    def replay_asked(self, request: Announcement) -> None:
        """See ``NodeService``."""
        if self._past is not None:
            self._past.ask(request)

    def receive(self, arrival: ArrivedEvent) -> None:
        """See ``NodeService``: publish an event, or hold it."""
        wire = arrival.event
        topic = wire.topic
        if wire.kind != "data" or not any(each.matches(topic) for each in self.topics):
            if arrival.notified is not None:
                arrival.notified()  # no handler of the bus wants it
            return
        if self.policy is not None:
            self.policy.check(wire.principal, TopicPermission(topic, TopicPermission.PUBLISH))
        late = self.late
        if late is None or not late.hold(arrival):
            self._publish(arrival)

    def _publish(self, arrival: ArrivedEvent) -> None:
        """Publish an event that passed the checks, unless it arrived before. Its sender is answered in any case."""
        wire, hop = arrival.event, arrival.hop
        bus = self._bus
        is_copy = False
        try:
            if (key := hop.key) is not None and not bus.seen.is_new(key):
                if bus.past_only.pop(key, _ABSENT) is _ABSENT:
                    self.duplicates += 1
                    return
                is_copy = True
            data = wire.value()
            if type(data) is not dict:
                raise DecodeError(f"its data is a {type(data).__name__}: the events of a typed event bus are maps")
            origin = hop.framework or _UNKNOWN_FRAMEWORK
            time = 0.0 if hop.time is None else hop.time / _MICROSECONDS
            if is_copy:
                event = PublishedEvent(wire.topic, checked_copy(data))
                event.passed, event.origin, event.time = (hop,), origin, time
                bus.publish_copy(event, self._principal)
            else:
                bus.publish(wire.topic, data, self._principal, True, False, (hop,), origin, time)
        finally:
            if arrival.notified is not None:  # when the handlers have processed the events published so far
                bus.bus.flush().listen(arrival.notified)

    def catch_up(self, node: EventNode, late: LateJoin, since: Callable[[], datetime] | None, limit: int) -> None:
        """Ask for the past events, once the connection is there or has failed."""
        error = node.ready.exception()
        if error is None:
            bus = self._bus
            start = None if since is None else since()
            try:
                for each in bus.past.newest(self.topics, start, MAX_PAST):
                    if bus.seen.is_new(key := bus.past.key_of(each)):  # others may have recorded it, too
                        bus.past_only[key] = None
                node.replays.ask(past_request(bus.title, self.topics, start, limit, PAST_TIMEOUT, late.done))
                return
            except MessagingError as raised:
                error = raised
        late.done([], error)

    def _past_event(self, arrival: ArrivedEvent) -> PublishedEvent | None:
        """Return the past event that arrived, ``None`` if the bus has it."""
        hop = arrival.hop
        read = read_past(arrival, self.policy)
        if (key := hop.key) is not None:
            if not self._bus.seen.is_new(key):
                self.duplicates += 1
                return None
            self._bus.past_only[key] = None
        event = PublishedEvent(read.topic, checked_copy(read.event_data))
        event.passed = (hop,)
        event.origin = read.origin or _UNKNOWN_FRAMEWORK
        event.time = 0.0 if hop.time is None else hop.time / _MICROSECONDS
        return event

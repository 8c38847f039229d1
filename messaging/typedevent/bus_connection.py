"""The connection of a typed event bus to an event network: its events go to other processes, and theirs arrive.

**Outbound.** An event that is published to a connected topic, and that another member wants, is queued on the
publishing thread, which never waits. A worker thread encodes it and puts it into the outbox of the messaging instance.
If the queue is full, the ``overflow`` policy drops an event and counts it. A topic that no other member wants costs a
publisher nothing.

**Inbound.** The bus announces the topic filters of its handlers, monitors and history, as far as they are connected,
and publishes what arrives: handlers receive it as events of this process, converted to their types. Publication time
and origin are kept.

**Loop guard.** An event keeps its id and the members it passed, see :mod:`messaging.dispatch.eventnetwork.hops`. A bus
takes an event once, over however many connections and bridges it comes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Final
from uuid import UUID

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import TYPED_EVENTS, EventService, Principal, TopicPermission, parse_filter
from messaging.dispatch.eventdata import WireEvent, checked_copy
from messaging.dispatch.eventnetwork import (
    MAX_PAST,
    TYPED,
    EventNetwork,
    EventNode,
    NodeDTO,
    NodeService,
    SeenEvents,
    TopicInterest,
    framework_uuid,
    last_hop,
)
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, DecodeError, MessagingError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import AsyncCloseable, Closeable, Lane, Promise, clock, engine, may_block, seconds, workers
from messaging.instance import Messaging
from messaging.services.reporting import PartReporter, counter, gauge, register_reporter
from messaging.typedevent.connection_terms import PAST_LIMIT, ConnectionTerms, filters_of
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.monitor import MonitorEvent, TypedEventMonitor
from messaging.typedevent.outbound import OutboundQueue
from messaging.typedevent.past import (
    PAST_TIMEOUT,
    LateJoin,
    OwnPast,
    PastDelivery,
    PastSender,
    ask_past,
    past_request,
    read_past,
)
from messaging.typedevent.receivers import BusRoute

if TYPE_CHECKING:
    from reactivex import Observable

    from messaging.dispatch.eventnetwork import Announcement, ArrivedEvent

logger = SafeLog(__name__)

#: default timeout of closing, seconds
CLOSE_TIMEOUT: Final = 5.0
_MICROSECONDS: Final = 1_000_000
#: this process, as the origin of events
_FRAMEWORK: Final = str(framework_uuid())


@dataclass(frozen=True, slots=True)
class BusConnectionDTO:
    """A snapshot of a connection."""

    waiting: int = field(metadata=gauge("outbound events that wait", "events"))
    dropped: int = field(metadata=counter("outbound events dropped because the queue was full", "events"))
    unfit: int = field(metadata=counter("outbound events that could not be encoded", "events"))
    failed: int = field(metadata=counter("outbound events that the instance did not accept", "events"))
    duplicates: int = field(
        metadata=counter("inbound events that had arrived before, by this or another way", "events", name="duplicate")
    )
    past_arrived: int = field(metadata=counter("past events that arrived", "events"))
    past_sent: int = field(metadata=counter("past events that were sent to members that asked for them", "events"))
    node: NodeDTO


class BusConnection(AsyncCloseable):
    """The connection of a typed event bus to an event network; ``TypedEventBus.connect`` makes it. Thread safe.

    A context manager, sync and async, that closes it. It closes with its bus.

    Attributes:
        ready: resolves when the bus has joined the network.
        caught_up: resolves when the past events of other processes were published here (option ``history``): handlers
            that are registered after it have them in the history of the bus. It fails with
            ``PartialNotificationError`` if some are missing. Without the option it resolves at once.
    """

    def __init__(self, bus: ConnectedBus, instance: Messaging, network: EventNetwork, terms: ConnectionTerms) -> None:
        check_instance("network", network, EventNetwork)
        bus.bus.refuse_closed()
        self._bus = bus
        self._terms = terms
        #: answers the requests of other members; ``None`` if the history is not shared
        self._past = past = (
            PastSender(bus.title, bus.past, terms, network.max_event_bytes) if terms.shares_history else None
        )
        self._inbound = InboundEvents(bus, terms, past)
        self._queue = OutboundQueue(bus.title, terms.limit, terms.overflow, self._send)
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # guards the following; reentrant for signal handlers
        self._closing: Promise[None] | None = None
        reach = terms.reach
        late = self._inbound.begin_with_past() if reach is not None and terms.inbound_topics else None
        self._node = EventNode(
            self._inbound, instance, network, title=bus.title, name=bus.bus.name, grammar=TYPED_EVENTS,
            shares_history=terms.shares_history,
        )  # fmt: skip
        if past is not None:
            past.start(self._node)
        self.ready: Promise[None] = self._node.ready
        #: announces what the bus wants now; from any thread, without waiting
        self.refresh = self._node.refresh
        if reach is None or late is None:
            self.caught_up: Promise[None] = Promise(f"receiving the past events for {bus.title}")
            engine().call(self.caught_up.resolve, None)
        else:
            self.caught_up = late.promise
            catch_up = partial(self._inbound.catch_up, self._node, late, *reach)
            self.ready.listen(lambda: workers().submit(catch_up))
        name = f"{bus.bus.name}/{instance.name}"
        reporter = PartReporter("typed_event_bus_connection", name, self.get_dto, self._node.problems)
        self._reporter = register_reporter(bus.bus.services, reporter)
        with on_failure(self._reporter.unregister):
            bus.add(self)

    # --- outbound

    def sends(self, topic: str) -> bool:
        """Return whether events of a topic may have to be sent. From any thread."""
        return any(each.matches(topic) for each in self._terms.outbound_topics) and self._node.sender.may_send(topic)

    def offer(self, event: PublishedEvent) -> None:
        """Queue an event for the other members, unless it came from this network. Never waits."""
        hop = last_hop(event.passed)
        if hop is None:
            if event.id is None:
                event.id = f"{self._node.member}-e{next(self._numbers)}"
                self._bus.seen.is_new(event.id)  # it may come back by way of another network
        elif hop.node is self._node or self._node.member in hop.path:
            return
        self._queue.put(event)

    def _send(self, event: PublishedEvent) -> None:
        """Send an event to the other members. On the worker thread of the queue."""
        principal, policy = self._terms.principal, self._terms.outbound_policy
        if policy is not None:
            policy.check(principal, TopicPermission(event.topic, TopicPermission.PUBLISH))
        data = event.as_map()
        hop = last_hop(event.passed)
        wire = WireEvent.of(event.topic, data, principal=principal)
        if hop is None:
            wire.id = event.id
            wire.origin = _FRAMEWORK
            wire.time = int((event.time or clock.wall()) * _MICROSECONDS)
        else:
            wire.id = hop.id
            wire.origin = hop.origin
            wire.bundle = hop.bundle
            wire.time = hop.time
            wire.path = hop.path
        self._node.sender.send(wire, lambda: data, qos="1")

    # --- past events

    def replay(
        self,
        topics: str | Iterable[str],
        history: int | datetime | timedelta,
        *,
        timeout: float = PAST_TIMEOUT,
        limit: int = PAST_LIMIT,
    ) -> Observable[MonitorEvent]:
        """Return a stream of the past events of other processes, for a process that joins late.

        Each subscription asks the members that share their history (``shares_history``). The stream emits the events of
        all answers in the order of their publication times, each event once, and completes. It errors after the events
        that arrived with ``PartialNotificationError`` if a member was lost or has not answered in time, or sent more
        than was asked for; ``missing`` names it. It errors with ``ConnectionLostError`` if the connection is lost, with
        ``ClosedError`` if it is closed, and with ``TooManyRequestsError`` if 16 requests are pending.

        Events that this process published are among them, if others recorded them. ``MonitorEvent.sequence`` is 0: the
        others have their own numbers. Observers are called on a worker thread.

        Args:
            topics: topic filter, or several; only topics that are connected ``inbound`` are asked for.
            history: the number of newest events; or the time of the first one, inclusive (a naive time is local time);
                or how far back it was, counted from the subscription.
            timeout: deadline of the answers, seconds.
            limit: maximum number of events: the newest ones. At most 100,000.

        Raises:
            ArgumentError: an argument is not as described, or no topic is connected inbound.
            NullEventError, InvalidTopicError: one of the topics is no topic filter.
        """
        asked = filters_of("topics", topics)
        common = [mine.intersection(theirs) for mine in self._terms.inbound_topics for theirs in asked]
        filters = dict.fromkeys(parse_filter(each) for each in common if each is not None)
        if not filters:
            raise ArgumentError("topics: none of them is connected inbound")
        return ask_past(
            self._bus.title, self._node, filters, history, limit, seconds(timeout), self._terms.inbound_policy
        )

    # --- state

    def announced(self, timeout: float = 30.0) -> Promise[None]:
        """Return a promise that resolves when every other process knows the handlers that are registered now.

        It fails with ``PartialNotificationError`` after ``timeout`` seconds, or if a process is lost meanwhile.
        """
        return self._node.announced(seconds(timeout))

    def get_dto(self) -> BusConnectionDTO:
        """Return a snapshot."""
        queue = self._queue
        return BusConnectionDTO(
            waiting=len(queue),
            dropped=queue.dropped,
            unfit=queue.unfit,
            failed=queue.failed,
            duplicates=self._inbound.duplicates,
            past_arrived=self._node.replays.received,
            past_sent=0 if self._past is None else self._past.events,
            node=self._node.get_dto(),
        )

    def problems(self) -> list[str]:
        """Return what keeps events from other processes, as texts for people; empty: the connection works."""
        return self._node.problems()

    # --- closing

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Send the events that wait, for up to ``timeout`` seconds, and leave the network; idempotent.

        On a thread that runs an event loop it does not wait: ``await aclose()`` does.

        Raises:
            ArgumentError: ``timeout`` is no number.
        """
        closing = self._close(timeout)
        if may_block():
            closing.result()

    async def aclose(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """As :meth:`close`, for event loops."""
        await self._close(timeout)

    def _close(self, timeout: float) -> Promise[None]:
        timeout = seconds(timeout)
        with self._lock:
            if self._closing is None:
                closing: Promise[None] = Promise(f"closing a connection of {self._bus.title}")

                def finish() -> None:
                    self._reporter.unregister()
                    try:
                        self._bus.remove(self)
                        if self._past is not None:
                            self._past.close()
                        if not self._queue.wait(timeout) and (lost := self._queue.clear()):
                            logger.error(
                                "%s: closed before %d events were sent to other processes; they are dropped",
                                self._bus.title,
                                lost,
                            )
                        self._node.close()
                    finally:
                        engine().call(closing.resolve, None)

                workers().submit(finish)
                self._closing = closing
            return self._closing

    @tolerant
    def __repr__(self) -> str:
        return f"<BusConnection of {self._bus.title}{', closed' if self._closing is not None else ''}>"


#: origin of a remote event whose sender gave none
_UNKNOWN_FRAMEWORK: Final = UUID(int=0)
#: most keys of past events that are remembered until the events come live
_PAST_ONLY: Final = 100_000
_ABSENT: Final = object()


class ConnectedBus(Closeable):
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
        self.connections: tuple[BusConnection, ...] = ()

    def add(self, connection: BusConnection) -> None:
        """Add a connection."""
        with self._lock:
            self.connections = (*self.connections, connection)
        self.dispatcher.forget()

    def remove(self, connection: BusConnection) -> None:
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
            for offer in route.outlets:
                offer(event)
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
        terms: which topics are connected inbound, who may publish to them, and who publishes the events on the bus.
        past: answers the requests of other members; ``None`` if the history is not shared.
    """

    def __init__(self, bus: ConnectedBus, terms: ConnectionTerms, past: PastSender | None) -> None:
        self._bus = bus
        self._topics = terms.inbound_topics
        self._policy = terms.inbound_policy
        self._principal = terms.principal
        self._past = past
        self.on_interest = bus.dispatcher.forget
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
            for mine in self._topics:
                common = mine.intersection(parse_filter(text))
                if common is not None:
                    found[TopicInterest(common, ldap, grammar=TYPED)] = None
        return found, ()

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
        if wire.kind != "data" or not any(each.matches(topic) for each in self._topics):
            if arrival.notified is not None:
                arrival.notified()  # no handler of the bus wants it
            return
        if self._policy is not None:
            self._policy.check(wire.principal, TopicPermission(topic, TopicPermission.PUBLISH))
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
                for each in bus.past.newest(self._topics, start, MAX_PAST):
                    if bus.seen.is_new(key := bus.past.key_of(each)):  # others may have recorded it, too
                        bus.past_only[key] = None
                node.replays.ask(past_request(bus.title, self._topics, start, limit, PAST_TIMEOUT, late.done))
                return
            except MessagingError as raised:
                error = raised
        late.done([], error)

    def _past_event(self, arrival: ArrivedEvent) -> PublishedEvent | None:
        """Return the past event that arrived, ``None`` if the bus has it."""
        hop = arrival.hop
        read = read_past(arrival, self._policy)
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

"""The connection of a typed event bus to an event network: its events go to other processes, and theirs arrive.

**Outbound.** An event that is published to a connected topic, and that another member wants, is queued on the
publishing thread, which never waits. A worker thread encodes it and puts it into the outbox of the messaging instance.
If the queue is full, the ``overflow`` policy drops an event and counts it. A topic that no other member wants costs a
publisher nothing.

**Inbound.** The bus announces the topic filters of its handlers, monitors and history, as far as they are connected,
and publishes what arrives: handlers receive it as events of this process, converted to their types. Publication time
and origin are kept.

**Loop guard.** An event keeps its id and the members it passed, see :mod:`messaging.eventnetwork.hops`. A bus takes an
event once, over however many connections and bridges it comes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, get_args
from uuid import UUID

from messaging.bounded import BoundedCache
from messaging.dispatch import TYPED_EVENTS, TopicFilter, TopicPermission, TopicPolicy, check_count, parse_filter
from messaging.errors import (
    ArgumentError,
    DecodeError,
    MessagingError,
    check_instance,
)
from messaging.eventdata import WireEvent, checked_copy
from messaging.eventnetwork import (
    MAX_PAST,
    TYPED,
    Announcement,
    Arrival,
    EventNetwork,
    EventNode,
    Interest,
    MemberProfile,
    NodeDTO,
    NodeService,
    SeenEvents,
    framework_uuid,
    last_hop,
)
from messaging.execution import Promise, clock, engine, may_block, seconds, workers
from messaging.reporting import PartReporter, counter, gauge, register_reporter
from messaging.text import SafeLog, tolerant
from messaging.typedevent.asking import PAST_LIMIT, PAST_TIMEOUT, ask_past, past_request, read_history, read_past
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.late import LateJoin
from messaging.typedevent.outbound import OutboundQueue, RelayOverflow
from messaging.typedevent.past import OwnPast, PastSender

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from reactivex import Observable

    from messaging.dispatch import Principal
    from messaging.instance import Messaging
    from messaging.services import ServiceRegistry
    from messaging.typedevent.monitor import MonitorEvent

logger = SafeLog(__name__)

#: default bound of the queue of outbound events
LIMIT: Final = 10_000
#: default timeout of closing, seconds
CLOSE_TIMEOUT: Final = 5.0
_MICROSECONDS: Final = 1_000_000
#: this process, as the origin of events
_FRAMEWORK: Final = str(framework_uuid())
#: origin of a remote event whose sender gave none
_UNKNOWN_FRAMEWORK: Final = UUID(int=0)
#: most keys of past events that are remembered until the events come live
_PAST_ONLY: Final = 100_000
_ABSENT: Final = object()


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


class ConnectedBus:
    """The side of a typed event bus that its connections use. Thread safe.

    Args:
        title: of the bus, for the log.
        name: of the bus.
        wanted: returns the topic filters of the bus, each with its LDAP filter: handlers, monitors, history.
        publish: publishes an event of another process: topic, data, principal, the services that it came through,
            origin, time, and whether it was published as a past event before.
        flush: returns a promise that resolves when the handlers have processed the events published so far.
        changed: has routes made anew.
        refuse_closed: raises ``ClosedError`` if the bus is closed.
        publish_past: publishes past events of other processes, on behalf of a principal.
        past: the recorded events of the bus.
        services: registry of the bus.
    """

    def __init__(
        self,
        title: str,
        name: str,
        *,
        wanted: Callable[[], Iterable[tuple[str, str | None]]],
        publish: Callable[[str, dict[str, Any], Principal, tuple[object, ...], UUID | None, float, bool], object],
        flush: Callable[[], Promise[None]],
        changed: Callable[[], object],
        refuse_closed: Callable[[], object],
        publish_past: Callable[[list[PublishedEvent], Principal], object],
        past: OwnPast,
        services: ServiceRegistry,
    ) -> None:
        self.publish_past = publish_past
        self.past = past
        self.services = services
        self.title = title
        self.name = name
        self.wanted = wanted
        self.publish = publish
        self.flush = flush
        self.changed = changed
        self.refuse_closed = refuse_closed
        self.seen = SeenEvents()
        #: keys of events that came as past ones: handlers without a history get those that come live, too
        self.past_only: BoundedCache[str, None] = BoundedCache(_PAST_ONLY)
        self._lock = threading.Lock()  # guards the following, which is replaced as a whole
        self.connections: tuple[BusConnection, ...] = ()

    def add(self, connection: BusConnection) -> None:
        """Add a connection."""
        with self._lock:
            self.connections = (*self.connections, connection)
        self.changed()

    def remove(self, connection: BusConnection) -> None:
        """Remove a connection; idempotent."""
        with self._lock:
            self.connections = tuple(each for each in self.connections if each is not connection)
        self.changed()

    def refresh(self) -> None:
        """Note that the handlers changed. From any thread; does not wait."""
        for each in self.connections:
            each.refresh()

    def close(self) -> None:
        """Close all connections."""
        for each in self.connections:
            each.close()


class _Inbound:
    """The events of other processes that one connection takes in. Its methods run on worker threads.

    Args:
        bus: the bus.
        topics: filters of the topics that are connected inbound.
        policy: who may publish to which of them; ``None``: all.
        principal: publishes the events on the bus.
    """

    def __init__(
        self, bus: ConnectedBus, topics: tuple[TopicFilter, ...], policy: TopicPolicy | None, principal: Principal
    ) -> None:
        self._bus = bus
        self.topics = topics
        self.policy = policy
        self._principal = principal
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

    def wanted(self) -> Iterable[Interest]:
        """Return what handlers, monitors and history of the bus want, as far as it is connected."""
        found: dict[Interest, None] = {}
        for text, ldap in self._bus.wanted():
            for mine in self.topics:
                common = mine.intersection(parse_filter(text))
                if common is not None:
                    found[Interest(common, ldap, grammar=TYPED)] = None
        return found

    def receive(self, arrival: Arrival) -> None:
        """Publish an event, or hold it."""
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

    def _publish(self, arrival: Arrival) -> None:
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
            published = 0.0 if hop.time is None else hop.time / _MICROSECONDS
            bus.publish(wire.topic, data, self._principal, (hop,), origin, published, is_copy)
        finally:
            self._confirm(arrival)

    def _confirm(self, arrival: Arrival) -> None:
        """Tell the sender when the handlers have processed the events published so far, if it asked for it."""
        if arrival.notified is not None:
            self._bus.flush().listen(arrival.notified)

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

    def _past_event(self, arrival: Arrival) -> PublishedEvent | None:
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


class BusConnection(NodeService):
    """The connection of a typed event bus to an event network; ``TypedEventBus.connect`` makes it. Thread safe.

    A context manager, sync and async, that closes it. It closes with its bus.

    Attributes:
        ready: resolves when the bus has joined the network.
        caught_up: resolves when the past events of other processes were published here (option ``history``): handlers
            that are registered after it have them in the history of the bus. It fails with
            ``PartialNotificationError`` if some are missing. Without the option it resolves at once.
    """

    def __init__(
        self,
        bus: ConnectedBus,
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
    ) -> None:
        reach = None if history is None else read_history(history, PAST_LIMIT)
        check_instance("shares_history", shares_history, bool)
        network = EventNetwork() if network is None else network
        check_instance("network", network, EventNetwork)
        for name, policy in (("outbound_policy", outbound_policy), ("inbound_policy", inbound_policy)):
            if policy is not None:
                check_instance(name, policy, TopicPolicy)
        if overflow not in get_args(RelayOverflow):
            raise ArgumentError(f"overflow must be one of {', '.join(get_args(RelayOverflow))}, not {overflow!r:.80}")
        connected = _filters("topics", topics)
        self._outbound_topics = _direction("outbound", outbound, connected)
        self._inbound = _Inbound(bus, _direction("inbound", inbound, connected), inbound_policy, principal)
        if not (self._outbound_topics or self._inbound.topics):
            raise ArgumentError("a connection needs a direction: outbound, inbound or both")
        bus.refuse_closed()
        self._bus = bus
        self._queue = OutboundQueue(
            bus.title,
            check_count("limit", limit, 1),
            overflow,
            lambda event: _send(self._node, event, principal, outbound_policy),
        )
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # guards the following; reentrant for signal handlers
        self._closing: Promise[None] | None = None
        late = self._inbound.begin_with_past() if reach is not None and self._inbound.topics else None
        #: answers the requests of other members; ``None`` if the history is not shared
        self._past: PastSender | None = None
        #: requests that arrive before it is made: the node is a member at once
        self._early_requests: list[Announcement] | None = [] if shares_history else None
        profile = MemberProfile(bus.title, bus.name, TYPED_EVENTS, shares_history=shares_history)
        self._node = EventNode(profile, self, instance, network)
        if shares_history:
            past = PastSender(
                bus.title,
                bus.past,
                self._node,
                self._outbound_topics,
                principal,
                outbound_policy,
                network.max_event_bytes,
            )
            with self._lock:
                self._past = past
                early, self._early_requests = self._early_requests or (), None
            for request in early:
                past.ask(request)
        self.ready: Promise[None] = self._node.ready
        if reach is None or late is None:
            self.caught_up: Promise[None] = Promise(f"receiving the past events for {bus.title}")
            engine().call(self.caught_up.resolve, None)
        else:
            self.caught_up = late.promise
            catch_up = partial(self._inbound.catch_up, self._node, late, *reach)
            self.ready.listen(lambda: workers().submit(catch_up))
        reporter = PartReporter(
            "typed_event_bus_connection", f"{bus.name}/{instance.name}", self.get_dto, self.problems
        )
        self._reporter = register_reporter(bus.services, reporter)
        try:
            bus.add(self)
        except BaseException:
            self._reporter.unregister()
            raise

    # --- outbound

    def sends(self, topic: str) -> bool:
        """Return whether events of a topic may have to be sent. From any thread."""
        return any(each.matches(topic) for each in self._outbound_topics) and self._node.sender.may_send(topic)

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

    # --- inbound: on worker threads, see ``NodeService``

    def wanted(self) -> tuple[Iterable[Interest], Iterable[str]]:
        """See ``NodeService``: what handlers, monitors and history of the bus want, as far as it is connected."""
        return self._inbound.wanted(), ()

    def receive(self, arrival: Arrival) -> None:
        """See ``NodeService``: publish an event of another member on the bus."""
        self._inbound.receive(arrival)

    def interest_changed(self) -> None:
        """See ``NodeService``."""
        self._bus.changed()

    def member_lost(self, member: str) -> None:
        """See ``NodeService``: a typed event bus has no sessions."""

    # --- past events

    def replay_asked(self, request: Announcement) -> None:
        """See ``NodeService``."""
        with self._lock:
            past = self._past
            if past is None and self._early_requests is not None:
                self._early_requests.append(request)
        if past is not None:
            past.ask(request)

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
        asked = _filters("topics", topics)
        common = [mine.intersection(theirs) for mine in self._inbound.topics for theirs in asked]
        filters = dict.fromkeys(parse_filter(each) for each in common if each is not None)
        if not filters:
            raise ArgumentError("topics: none of them is connected inbound")
        return ask_past(self._bus.title, self._node, filters, history, limit, seconds(timeout), self._inbound.policy)

    def refresh(self) -> None:
        """Announce what the bus wants now. From any thread."""
        self._node.refresh()

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
                                "%s: closed before %d events were sent to other processes", self._bus.title, lost
                            )
                        self._node.close()
                    finally:
                        engine().call(closing.resolve, None)

                workers().submit(finish)
                self._closing = closing
            return self._closing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @tolerant
    def __repr__(self) -> str:
        return f"<BusConnection of {self._bus.title}{', closed' if self._closing is not None else ''}>"


def _send(node: EventNode, event: PublishedEvent, principal: Principal, policy: TopicPolicy | None) -> None:
    """Send an event to the other members. On the worker thread of the queue."""
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
    node.sender.send(wire, lambda: data, qos="1")


def _filters(name: str, topics: Any) -> tuple[TopicFilter, ...]:
    several = (topics,) if isinstance(topics, str) else topics
    if not isinstance(several, Iterable):
        raise ArgumentError(f"{name} must be topic filters, not {type(topics).__name__}")
    found = tuple(dict.fromkeys(map(parse_filter, several)))
    if not found:
        raise ArgumentError(f"{name} must be at least one topic filter: topics are connected one by one, or by '*'")
    return found


def _direction(name: str, value: Any, connected: tuple[TopicFilter, ...]) -> tuple[TopicFilter, ...]:
    """Return the filters of one direction: all that are connected, none, or their part in ``value``."""
    if isinstance(value, bool):
        return connected if value else ()
    common = [mine.intersection(theirs) for mine in connected for theirs in _filters(name, value)]
    found = tuple(dict.fromkeys(parse_filter(each) for each in common if each is not None))
    if not found:
        raise ArgumentError(f"{name}: none of its topics is in topics")
    return found

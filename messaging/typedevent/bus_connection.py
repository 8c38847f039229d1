"""The connection of a typed event bus to an event network: its events go to other processes, and theirs arrive.

**Outbound.** An event that is published to a connected topic, and that another member wants, is queued on the
publishing thread, which never waits. A worker thread encodes it and puts it into the outbox of the messaging instance.
If the queue is full, the ``overflow`` policy drops an event and counts it. A topic that no other member wants costs a
publisher nothing.

**Inbound.** See :mod:`messaging.typedevent.connected_bus`.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from messaging.dispatch import TYPED_EVENTS, TopicPermission, parse_filter
from messaging.dispatch.eventdata import WireEvent
from messaging.dispatch.eventnetwork import EventNetwork, EventNode, MemberProfile, NodeDTO, framework_uuid, last_hop
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ClosedError, InvalidEventError, MessagingError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Closeable, Promise, Serial, Waiters, clock, engine, may_block, seconds, workers
from messaging.services.reporting import PartReporter, counter, gauge, register_reporter
from messaging.typedevent.connected_bus import InboundEvents
from messaging.typedevent.connection_terms import filters_of
from messaging.typedevent.late import PAST_LIMIT, PAST_TIMEOUT, ask_past
from messaging.typedevent.past import PastSender

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from reactivex import Observable

    from messaging.instance import Messaging
    from messaging.typedevent.connected_bus import ConnectedBus
    from messaging.typedevent.connection_terms import ConnectionTerms, RelayOverflow
    from messaging.typedevent.event import PublishedEvent
    from messaging.typedevent.monitor import MonitorEvent

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


class BusConnection(Closeable):
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
        self._inbound = InboundEvents(bus, terms.inbound_topics, terms.inbound_policy, terms.principal, past)
        self._queue = OutboundQueue(bus.title, terms.limit, terms.overflow, self._send)
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # guards the following; reentrant for signal handlers
        self._closing: Promise[None] | None = None
        reach = terms.reach
        late = self._inbound.begin_with_past() if reach is not None and terms.inbound_topics else None
        profile = MemberProfile(bus.title, bus.bus.name, TYPED_EVENTS, shares_history=terms.shares_history)
        self._node = EventNode(profile, self._inbound, instance, network)
        if past is not None:
            past.start(self._node)
        self.ready: Promise[None] = self._node.ready
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @tolerant
    def __repr__(self) -> str:
        return f"<BusConnection of {self._bus.title}{', closed' if self._closing is not None else ''}>"


#: interval of the log for events that are not sent, seconds
_LOG_INTERVAL: Final = 1.0


class OutboundQueue:
    """The queue of outbound events, and the worker thread that sends them. Thread safe.

    Args:
        title: of the bus, for the log.
        limit: bound of the queue, events.
        overflow: policy of the full queue.
        send: sends one event.
    """

    def __init__(
        self, title: str, limit: int, overflow: RelayOverflow, send: Callable[[PublishedEvent], object]
    ) -> None:
        self._title = title
        self._limit = limit
        self._drops_oldest = overflow == "drop_oldest"
        self._send = send
        self._events: deque[PublishedEvent] = deque()
        self._serial = Serial(self._drain, lambda: self._events)
        self._is_sending = False
        self._is_dropping = False
        self._idle = Waiters()
        self._next_log = 0.0
        self.dropped = self.unfit = self.failed = 0

    def __len__(self) -> int:
        return len(self._events) + self._is_sending

    def put(self, event: PublishedEvent) -> None:
        """Queue an event; a full queue drops one. Never waits."""
        events = self._events
        if len(events) >= self._limit:
            self.dropped += 1
            if not self._is_dropping:
                self._is_dropping = True
                workers().submit(self._log_dropping)  # not here: log handlers may take any lock
            if not self._drops_oldest:
                return
            try:
                events.popleft()
            except IndexError:  # the worker took all of them just now
                self.dropped -= 1
        events.append(event)
        self._serial.wake()

    def _log_dropping(self) -> None:
        logger.error(
            "%s: %d events wait to be sent to other processes: dropping the %s until half of them are sent",
            self._title, self._limit, "oldest ones" if self._drops_oldest else "new ones",
        )  # fmt: skip

    def _drain(self) -> None:
        events = self._events
        self._is_sending = True
        try:
            while events:
                event = events.popleft()
                try:
                    self._send(event)
                except InvalidEventError as error:
                    self.unfit += 1
                    self._log(event.topic, error)
                except ClosedError:
                    self.failed += 1
                except MessagingError as error:
                    self.failed += 1
                    self._log(event.topic, error)
                except Exception:
                    self.unfit += 1
                    logger.exception("%s: cannot send an event on %r; it is dropped", self._title, event.topic)
                if self._is_dropping and len(events) <= self._limit // 2:
                    self._is_dropping = False
        finally:
            self._is_sending = False
            self._idle.wake()

    def _log(self, topic: str, error: Exception) -> None:
        now = clock.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL
            logger.error("%s: an event on %r is not sent to other processes: %s", self._title, topic, error)

    def wait(self, timeout: float) -> bool:
        """Wait until every event is sent; return whether that is so after ``timeout`` seconds."""
        return self._idle.wait_for(lambda: not len(self), timeout)

    def clear(self) -> int:
        """Drop the events that wait; return how many."""
        lost = len(self._events)
        self._events.clear()
        self.dropped += lost
        return lost

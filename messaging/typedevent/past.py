"""Past events, between the bus of this process and those of others: asked for, received late, and sent.

**Of other processes.** An application asks for them, or a bus that joins late. The connection asks the others once it
is connected. Until they have answered, live events are held. Then the past events are published as events of the past:
they are recorded, monitors observe them, and handlers with ``event.history`` receive the newest of them, as many as the
history of this bus has left of their number. Handlers without do not. Then the held events follow, and each event is
taken once, by its id.

**For other processes.** They are selected from the history of the bus, and sent to the member that asked.

**Threads.** Live events arrive on the intake thread. The answers arrive on a worker thread, which publishes the past
events and the held ones; meanwhile new ones are still held. Requests of others are queued by the control thread of the
network, and answered on a worker thread, one at a time: neither publishers nor heartbeats wait. Sending is paced by the
outbox of the instance, and by the confirms of the broker: at most ``_WINDOW`` events of an answer are unconfirmed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from reactivex.disposable import Disposable

from messaging.dispatch import (
    PlainObservable,
    TopicFilter,
    TopicPermission,
    contained,
    fail_observer,
    is_topic,
    parse_filter,
)
from messaging.dispatch.eventdata import WireError, WireEvent, microseconds, time_of
from messaging.dispatch.eventnetwork import (
    MAX_ANSWER_BYTES,
    MAX_PAST,
    TYPED,
    ArrivedEvent,
    PastRequest,
    TopicInterest,
    framework_uuid,
    key_of,
    last_hop,
)
from messaging.dispatch.eventnetwork.asking import Done
from messaging.errors import (
    ClosedError,
    DeadlineError,
    DecodeError,
    InvalidEventError,
    JournalError,
    MessagingError,
)
from messaging.errors.text import SafeLog
from messaging.execution import Lane, Promise, Serial, clock, engine
from messaging.typedevent.connection_terms import ConnectionTerms, read_history
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.history import EventHistory
from messaging.typedevent.monitor import MonitorEvent
from messaging.typedevent.receivers import UNHANDLED, BusRoute, EventReceiver
from messaging.typedevent.store import EventStore, replayed

if TYPE_CHECKING:
    from reactivex import Observable
    from reactivex import abc as rx

    from messaging.dispatch import Dispatcher, TopicPolicy
    from messaging.dispatch.eventnetwork import Announcement, EventNode

logger = SafeLog(__name__)

# --- of other processes

#: default deadline of the other processes, seconds
PAST_TIMEOUT: Final = 30.0


def ask_past(
    title: str,
    node: EventNode,
    topics: Iterable[TopicFilter],
    history: int | datetime | timedelta,
    limit: int,
    timeout: float,
    policy: TopicPolicy | None,
) -> Observable[MonitorEvent]:
    """Return the past events of other processes; see ``BusConnection.replay``."""
    since, limit = read_history(history, limit)
    filters = tuple(topics)

    def subscribe(observer: rx.ObserverBase[MonitorEvent], _: Any = None) -> rx.DisposableBase:
        disposed: list[None] = []

        def done(events: list[ArrivedEvent], error: MessagingError | None) -> None:
            # an observer that raises gets its error, and no more events
            with contained(fail_observer, observer, f"{title}: replay observer"):
                for each in map(event_of, events):
                    if disposed:
                        return
                    if each is not None:
                        observer.on_next(each)
                if disposed:
                    return
                if error is None:
                    observer.on_completed()
                else:
                    observer.on_error(error)

        start = None if since is None else since()
        request = past_request(title, filters, start, limit, timeout, done)
        node.replays.ask(request)
        return Disposable(lambda: disposed.append(None))

    def event_of(arrival: ArrivedEvent) -> MonitorEvent | None:
        try:
            return read_past(arrival, policy)
        except MessagingError as error:
            logger.error("%s: a past event on %r is refused: %s", title, arrival.event.topic, error)
            return None

    return PlainObservable(subscribe)


def past_request(
    title: str, topics: Iterable[TopicFilter], since: datetime | None, limit: int, timeout: float, done: Done
) -> PastRequest:
    """Return a request for the past events of some topics."""
    filters = tuple(topics)

    def accepts(topic: str) -> bool:
        return is_topic(topic) and any(each.matches(topic) for each in filters)

    return PastRequest(
        f"replaying the past events for {title}",
        tuple(TopicInterest(each.text, grammar=TYPED) for each in filters),
        accepts,
        None if since is None else microseconds(since),
        limit,
        timeout,
        done,
    )


def read_past(arrival: ArrivedEvent, policy: TopicPolicy | None) -> MonitorEvent:
    """Return a past event of another process.

    Raises:
        PermissionDeniedError: its principal may not publish to its topic.
        DecodeError: its data is not in portable form, or no map.
    """
    wire, hop = arrival.event, arrival.hop
    if policy is not None:
        policy.check(wire.principal, TopicPermission(wire.topic, TopicPermission.PUBLISH))
    data = wire.value()
    if type(data) is not dict:
        raise DecodeError(f"its data is a {type(data).__name__}: the events of a typed event bus are maps")
    return MonitorEvent(wire.topic, data, time_of(wire.time or 0), 0, hop.framework)


#: live events that are held
MAX_HELD: Final = 10_000


class LateJoin:
    """The past events of other processes, and the live ones that wait for them. Thread safe.

    Args:
        title: of the bus, for the log.
        past_event: returns the past event that arrived, ``None`` if the bus has it. Raises a ``MessagingError`` to
            refuse it.
        publish_past: publishes past events.
        publish: publishes a live event that was held. Raises a ``MessagingError`` to refuse it.
    """

    def __init__(
        self,
        title: str,
        *,
        past_event: Callable[[ArrivedEvent], PublishedEvent | None],
        publish_past: Callable[[list[PublishedEvent]], object],
        publish: Callable[[ArrivedEvent], object],
    ) -> None:
        self._title = title
        self._past_event = past_event
        self._publish_past = publish_past
        self._publish = publish
        #: resolves when the past events were published
        self.promise: Promise[None] = Promise(f"receiving the past events for {title}")
        self.promise.was_retrieved = True
        self._releasing = threading.Lock()  # one thread at a time publishes held events: their order is kept
        self._lock = threading.Lock()  # guards the following
        self._held: deque[ArrivedEvent] = deque()
        self._is_holding = True

    def hold(self, arrival: ArrivedEvent) -> bool:
        """Hold a live event; return whether it is held. A full queue ends the holding of further ones."""
        with self._lock:
            if not self._is_holding:
                return False
            if len(self._held) < MAX_HELD:
                self._held.append(arrival)
                return True
        self._release()
        return False

    def done(self, arrivals: list[ArrivedEvent], error: MessagingError | None) -> None:
        """Publish the past events, then the held ones. On a worker thread."""
        if error is not None and not isinstance(error, ClosedError):
            logger.error("%s: past events of other processes are missing: %s; live events follow", self._title, error)
        try:
            self._publish_past([event for each in arrivals if (event := self._read(each)) is not None])
        except ClosedError as closed:
            error = closed
        finally:
            self._release()
            if error is None:
                engine().call(self.promise.resolve, None)
            else:
                engine().call(self.promise.reject, error)

    def _read(self, arrival: ArrivedEvent) -> PublishedEvent | None:
        try:
            return self._past_event(arrival)
        except MessagingError as error:
            logger.error("%s: a past event on %r is refused: %s", self._title, arrival.event.topic, error)
            return None

    def _release(self) -> None:
        """Publish the held events, and hold no more."""
        with self._releasing:
            while True:
                with self._lock:
                    if not self._held:
                        self._is_holding = False
                        return
                    held = self._held.popleft()
                try:
                    self._publish(held)
                except ClosedError:
                    continue
                except MessagingError as error:
                    logger.error("%s: an event on %r is refused: %s", self._title, held.event.topic, error)
                except Exception:  # the others must be released all the same
                    logger.exception("%s: cannot publish an event on %r; it is dropped", self._title, held.event.topic)


class PastDelivery:
    """Which handlers receive which of some past events. Used by one thread.

    Args:
        dispatcher: the handlers of the bus.
        events: the events, the oldest first.
    """

    def __init__(self, dispatcher: Dispatcher[EventReceiver, BusRoute], events: list[PublishedEvent]) -> None:
        self._dispatcher = dispatcher
        #: number of events that a handler may still receive, for the handlers that were there at the beginning
        self._first: dict[EventReceiver, int] = {}
        for receiver in self._receivers():
            left = receiver.terms.history - receiver.replayed
            first = len(events)
            while first and left > 0:
                first -= 1
                left -= self._is_for(receiver, events[first])
            self._first[receiver] = first

    def _receivers(self) -> list[EventReceiver]:
        return [
            each
            for _, each in self._dispatcher.handlers()
            if each.terms.history and each.kind != UNHANDLED and each.blocked is None
        ]

    def _is_for(self, receiver: EventReceiver, event: PublishedEvent) -> bool:
        topic = event.topic
        return (
            any(each.matches(topic) for each in receiver.topics)
            and self._dispatcher.may(receiver.terms.principal, TopicPermission.SUBSCRIBE, topic)
            and receiver.accepts(event, receiver.terms)
        )

    def lanes_for(self, number: int, event: PublishedEvent) -> list[Lane]:
        """Return the lanes that the event with this index goes to.

        A handler that came meanwhile has the earlier ones from the history of the bus, and receives the rest.
        """
        first = self._first
        return [
            each.lane
            for each in self._receivers()
            if number >= first.setdefault(each, number) and self._is_for(each, event)
        ]


# --- for other processes

#: requests that may wait; further ones are refused
_MAX_WAITING: Final = 64
#: seconds for one answer
_TIMEOUT: Final = 120.0
#: events of an answer that may be unconfirmed
_WINDOW: Final = 256
_MICROSECONDS: Final = 1_000_000
_FRAMEWORK: Final = str(framework_uuid())


class OwnPast:
    """The recorded events of a bus, in memory and on the disk. Thread safe.

    Args:
        dispatcher: its lock guards the history.
        history: the events in memory.
        store: the events on the disk; ``None`` without a durable history.
    """

    def __init__(self, dispatcher: Dispatcher[Any, Any], history: EventHistory, store: EventStore | None) -> None:
        self._dispatcher = dispatcher
        self._history = history
        self._store = store
        #: identifies the sequences of the bus
        self._recorder = str(uuid4()) if store is None else store.journal.id

    def newest(self, topics: Iterable[TopicFilter], since: datetime | None, limit: int) -> list[PublishedEvent]:
        """Return the newest ``limit`` events of some topics from a time on, the oldest first.

        Raises:
            JournalError: a file cannot be read.
        """
        filters = tuple(topics)
        on_disk = [] if self._store is None else deque(self._on_disk(self._store, filters, since), limit)
        with self._dispatcher.lock:
            past = self._history.of(filters)
        in_memory = [*islice((each for each in past if since is None or each.publication_time >= since), limit)][::-1]
        found = {each.sequence: each for each in merge(on_disk, in_memory, key=attrgetter("sequence"))}
        return [*found.values()][-limit:]

    def _on_disk(
        self, store: EventStore, filters: tuple[TopicFilter, ...], since: datetime | None
    ) -> Iterator[PublishedEvent]:
        def join() -> tuple[int, list[PublishedEvent]]:
            with self._dispatcher.lock:
                return self._history.sequence, store.pending()

        def accepts(topic: str) -> bool:
            return any(each.matches(topic) for each in filters)

        found = replayed(store, 0 if since is None else since, accepts, join, lambda _: None)
        return (each for each in found if each is not None)

    def id_of(self, event: PublishedEvent) -> str:
        """Return the id of a recorded event in event networks, the same each time."""
        return event.network_id or f"{self._recorder}-{event.sequence}"

    def key_of(self, event: PublishedEvent) -> str:
        """Return the key of a recorded event; see ``Hop.key``."""
        hop = last_hop(event.passed)
        found = None if hop is None else hop.key
        return found or key_of(_FRAMEWORK if event.origin is None else str(event.origin), self.id_of(event))


class PastSender:
    """Answers the requests of other members. Thread safe.

    Args:
        title: of the bus, for the log.
        past: the events of the bus.
        terms: which topics may be sent, and who publishes them in the network.
        max_bytes: larger events are left out: the others refuse them.
    """

    #: the member that answers; set by :meth:`start`
    _node: EventNode

    def __init__(self, title: str, past: OwnPast, terms: ConnectionTerms, max_bytes: int) -> None:
        self._title = title
        self._past = past
        self._terms = terms
        self._max_bytes = max_bytes
        self._is_started = False
        self._is_closed = False
        self._waiting: deque[tuple[Announcement, float]] = deque()
        self._serial = Serial(self._drain, lambda: self._is_started and self._waiting)
        #: number of events that were sent
        self.events = 0

    def start(self, node: EventNode) -> None:
        """Answer requests as a member. Some may have come before: the node is a member at once."""
        self._node = node
        self._is_started = True
        self._serial.wake()

    def ask(self, request: Announcement) -> None:
        """Queue a request. From any thread; never waits."""
        if request.token is None or self._is_closed:
            return
        if len(self._waiting) >= _MAX_WAITING:
            logger.error("%s: %d requests for past events wait: dropping another one", self._title, _MAX_WAITING)
            return
        self._waiting.append((request, clock.monotonic() + _TIMEOUT))
        self._serial.wake()

    def close(self) -> None:
        """Answer no more requests; an answer that is being sent ends."""
        self._is_closed = True
        self._waiting.clear()

    def _drain(self) -> None:
        while self._is_started and self._waiting:
            request, deadline = self._waiting.popleft()
            try:
                self._answer(request, deadline)
            except Exception as error:
                is_expected = isinstance(error, MessagingError)
                logger.error(
                    "%s: a request for past events is not answered: %s: %s", self._title, type(error).__name__, error,
                    exc_info=None if is_expected else error,
                )  # fmt: skip
                self._refuse(request, error)

    def _answer(self, request: Announcement, deadline: float) -> None:
        channel = self._node.names.past(request.member)
        payloads = self._payloads(request, deadline)
        unconfirmed: deque[Promise[None]] = deque()
        for payload in payloads:
            self._go_on(request, deadline)
            unconfirmed.append(self._node.sender.send_to(channel, payload))
            if len(unconfirmed) >= _WINDOW:
                unconfirmed.popleft().result(max(0.0, deadline - clock.monotonic()))
        for each in unconfirmed:
            each.result(max(0.0, deadline - clock.monotonic()))
        self._send_end(WireEvent(_END, kind="close", correlation_id=request.token, sequence=len(payloads)), channel)
        self.events += len(payloads)

    def _send_end(self, end: WireEvent, channel: str) -> None:
        sender = self._node.sender
        sender.send_to(channel, sender.encode(end)).was_retrieved = True

    def _go_on(self, request: Announcement, deadline: float) -> None:
        if self._is_closed:
            raise DeadlineError("the connection is being closed")
        if clock.monotonic() > deadline:
            raise DeadlineError(f"not sent within {_TIMEOUT:g} s")
        if not self._node.is_live(request.member):
            raise DeadlineError(f"member {request.member} is gone")

    def _payloads(self, request: Announcement, deadline: float) -> list[bytes]:
        """Return the events of an answer, the oldest first: the newest ones that fit into its bounds."""
        asked = [parse_filter(each.topics) for each in request.interests if each.grammar == "typed"]
        common = [mine.intersection(theirs) for mine in self._terms.outbound_topics for theirs in asked]
        filters = {parse_filter(each) for each in common if each is not None}
        limit = min(request.limit, MAX_PAST)
        if not filters or not limit:
            return []
        since = None if request.since is None else _time_of(request.since)
        found: list[bytes] = []
        size = 0
        may_send: dict[str, bool] = {}
        events = self._past.newest(filters, since, limit)
        for number in reversed(range(len(events))):
            self._go_on(request, deadline)
            payload = self._payload(events[number], number, request.token, may_send)
            if payload is None:
                continue
            size += len(payload)
            if size > MAX_ANSWER_BYTES:
                logger.warning(
                    "%s: the past events for member %s have more than %d bytes: sending the newest %d of %d",
                    self._title, request.member, MAX_ANSWER_BYTES, len(found), len(events),
                )  # fmt: skip
                break
            found.append(payload)
        return found[::-1]

    def _payload(
        self, event: PublishedEvent, number: int, token: str | None, may_send: dict[str, bool]
    ) -> bytes | None:
        """Return one event of an answer; ``None`` if it must not or cannot be sent."""
        topic = event.topic
        is_allowed = may_send.get(topic)
        if is_allowed is None:
            is_allowed = may_send[topic] = self._may_send(topic)
        if not is_allowed:
            return None
        hop = last_hop(event.passed)
        wire = WireEvent(topic, principal=self._terms.principal, correlation_id=token, sequence=number)
        wire.id = self._past.id_of(event)
        wire.time = int(event.time * _MICROSECONDS)
        wire.path = () if hop is None else hop.path
        if event.origin is None:
            wire.origin = _FRAMEWORK
        elif event.origin.int:  # otherwise its sender gave none
            wire.origin = str(event.origin)
        try:
            wire.put(event.data)
            payload = self._node.sender.encode(wire)
        except InvalidEventError as error:
            logger.error("%s: a past event on %r is not sent: %s", self._title, topic, error)
            return None
        return payload if len(payload) <= self._max_bytes else None

    def _may_send(self, topic: str) -> bool:
        policy, publish = self._terms.outbound_policy, TopicPermission.PUBLISH
        return policy is None or policy.permits(self._terms.principal, TopicPermission(topic, publish))

    def _refuse(self, request: Announcement, error: Exception) -> None:
        """Tell the member that asked that there is no answer."""
        # not the text of the error, which may have paths
        text = "its durable history cannot be read" if isinstance(error, JournalError) else "it ended early"
        end = WireEvent(_END, kind="error", correlation_id=request.token, sequence=0)
        end.error = WireError(type(error).__name__, text)
        try:
            self._send_end(end, self._node.names.past(request.member))
        except MessagingError as problem:
            logger.info("%s: cannot send the refusal of a replay request: %s", self._title, problem)


#: topic of the end of an answer, which has none
_END: Final = "*"


def _time_of(count: int) -> datetime:
    try:
        return time_of(count)
    except OverflowError:
        return time_of(0) if count < 0 else time_of(253_402_300_799_999_999)

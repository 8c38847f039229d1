"""The past events of other processes: asked for by an application, or by a bus that joins late.

Of a bus that joins late they come before the live events of the others.

The connection asks the others once it is connected. Until they have answered, live events are held. Then the past
events are published as events of the past: they are recorded, monitors observe them, and handlers with
``event.history`` receive the newest of them, as many as the history of this bus has left of their number. Handlers
without do not. Then the held events follow, and each event is taken once, by its id.

**Threads.** Live events arrive on the intake thread. The answers arrive on a worker thread, which publishes the past
events and the held ones; meanwhile new ones are still held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from reactivex.disposable import Disposable

from messaging.dispatch import (
    PlainObservable,
    TopicFilter,
    TopicPermission,
    check_count,
    contained,
    fail_observer,
    is_topic,
)
from messaging.dispatch.eventdata import microseconds, time_of
from messaging.dispatch.eventnetwork import MAX_PAST, TYPED, ArrivedEvent, PastRequest, TopicInterest
from messaging.errors import ArgumentError, ClosedError, DecodeError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, clock, engine
from messaging.typedevent.monitor import MonitorEvent, in_utc
from messaging.typedevent.receivers import UNHANDLED, BusRoute, EventReceiver

if TYPE_CHECKING:
    from reactivex import Observable
    from reactivex import abc as rx

    from messaging.dispatch import Dispatcher, TopicPolicy
    from messaging.dispatch.eventnetwork import EventNode
    from messaging.dispatch.eventnetwork.asking import Done
    from messaging.execution import Lane
    from messaging.typedevent.event import PublishedEvent

logger = SafeLog(__name__)


#: default number of past events
PAST_LIMIT: Final = 10_000
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


def read_history(history: int | datetime | timedelta, limit: int) -> tuple[Callable[[], datetime] | None, int]:
    """Return a function of the time of the first event, ``None`` for any, and the number of events.

    Raises:
        ArgumentError: ``history`` is no number, time or duration; ``limit`` is out of range.
    """
    if check_count("limit", limit, 1) > MAX_PAST:
        raise ArgumentError(f"limit must be at most {MAX_PAST} events, not {limit}")
    if isinstance(history, timedelta):
        back = history
        if back < timedelta(0):
            raise ArgumentError(f"history must be a duration of at least 0, not {back}")
        return lambda: _before(back), limit
    if isinstance(history, datetime):
        at = in_utc(history)
        return lambda: at, limit
    if isinstance(history, bool) or not isinstance(history, int) or history < 1:
        raise ArgumentError(f"history must be an int of at least 1, a datetime or a timedelta, not {history!r:.80}")
    return None, min(history, limit)


def _before(back: timedelta) -> datetime:
    try:
        return clock.now() - back
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)


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

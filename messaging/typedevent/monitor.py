"""TypedEventMonitor: observe all events of a bus, and configure its history (157.6, 157.11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, overload
from weakref import WeakSet

import reactivex
from reactivex import Observable
from reactivex.disposable import Disposable

from messaging.dispatch import TopicPermission, check_principal, check_topic, parse_filter, when_all_done
from messaging.errors import ArgumentError, InvalidEventError, NullEventError, check_instance
from messaging.execution import LIMIT, Pool, ThreadLane, workers
from messaging.text import SafeLog
from messaging.typedevent.history import UNLIMITED, RangePolicy, newest
from messaging.typedevent.maps import to_map

if TYPE_CHECKING:
    from reactivex import abc as rx

    from messaging.dispatch import Dispatcher, Principal
    from messaging.execution import Promise
    from messaging.typedevent.event import PublishedEvent
    from messaging.typedevent.history import History

logger = SafeLog(__name__)

#: default of a topic filter that was not given
_ALL: Final = object()
#: last item of a lane
_END: Final = object()


@dataclass(frozen=True, slots=True)
class MonitorEvent:
    """A published event (157.11.2)."""

    topic: str
    #: in map form, copied for each observer
    event_data: dict[str, Any]
    #: in UTC
    publication_time: datetime


class Tap:
    """One subscription to a monitor. Its observer is called on a delivery thread, one event at a time.

    It never delays a publisher: when its lane is full, the oldest pending events are dropped.
    """

    def __init__(
        self, monitor: TypedEventMonitor, observer: rx.ObserverBase[MonitorEvent], principal: Principal
    ) -> None:
        self._monitor = monitor
        self._observer = observer
        self._principal = principal
        self._is_lagging = False
        self.lane = ThreadLane(
            self._receive,
            monitor.pool,
            "a monitor",
            timeout=0,
            stalled=lambda _: None,
            is_held=True,
            limit=monitor.limit,
        )

    def may_see(self, topic: str) -> bool:
        """Return whether its principal may subscribe to ``topic``."""
        return self._monitor.dispatcher.may(self._principal, TopicPermission.SUBSCRIBE, topic)

    def put(self, event: PublishedEvent) -> None:
        """Enqueue a published event that it may see. Called with the lock of the bus."""
        self.lane.put_newest(event)
        if self.lane.dropped and not self._is_lagging:
            self._is_lagging = True
            workers().submit(self._log_lag)  # not here: log handlers may take any lock

    def _log_lag(self) -> None:
        logger.warning(
            "%s: a monitor's observer is %d events behind: dropping its oldest pending events",
            self._monitor.dispatcher.name,
            self._monitor.limit,
        )

    def end(self) -> None:
        """Complete the observer after the events that were published so far."""
        self.lane.put(_END)

    def _receive(self, item: Any) -> None:
        try:
            if item is _END:
                self._observer.on_completed()
                return
            data = self._map_of(item)
            if data is not None:
                self._observer.on_next(MonitorEvent(item.topic, data, item.publication_time))
        except BaseException as error:  # noqa: BLE001  # an observer may raise anything without affecting others
            self._fail(error)

    def _map_of(self, event: PublishedEvent) -> dict[str, Any] | None:
        try:
            return to_map(event.data)  # not event.as_map(), which handlers share
        except InvalidEventError as error:
            logger.error(
                "%s: an event on %r is hidden from a monitor's observer: %s",
                self._monitor.dispatcher.name,
                event.topic,
                error,
            )
            return None

    def _fail(self, error: BaseException) -> None:
        self.dispose()
        logger.error(
            "%s: a monitor's observer failed, its subscription ends", self._monitor.dispatcher.name, exc_info=error
        )
        try:
            self._observer.on_error(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        except BaseException:
            logger.exception("%s: a monitor's observer failed in on_error", self._monitor.dispatcher.name)

    def dispose(self) -> None:
        """Unsubscribe, and release its pending events."""
        self._monitor.remove(self)
        self.lane.close()


class TypedEventMonitor:
    """Observes all events of a bus, and configures its history (157.11.4). Thread safe.

    It is available as ``TypedEventBus.monitor``, and as a service.
    """

    def __init__(self, dispatcher: Dispatcher[Any, Any], history: History, limit: int = LIMIT) -> None:
        self.dispatcher = dispatcher
        #: separate from the pool of the handlers, since observers have no time limit
        self.pool = Pool(name=f"the monitor of {dispatcher.name}")
        self.limit = limit
        self._history = history
        #: replaced with the lock, read without it
        self.taps: tuple[Tap, ...] = ()
        #: events that ended subscriptions missed
        self._missed_before = 0
        #: lanes of observers that receive the events published before the bus was closed, and then complete
        self._ending: WeakSet[ThreadLane] = WeakSet()

    # --- observing (157.6.1)

    @overload
    def monitor_events(self, *, principal: Principal = None) -> Observable[MonitorEvent]: ...
    @overload
    def monitor_events(
        self, history: int | datetime, history_only: bool = False, *, principal: Principal = None
    ) -> Observable[MonitorEvent]: ...
    def monitor_events(
        self, history: int | datetime = 0, history_only: bool = False, *, principal: Principal = None
    ) -> Observable[MonitorEvent]:
        """Return a stream of all events: delivered, filtered out or unhandled.

        Each subscription begins when it is made. It emits the requested past events, then the events published from
        then on, without loss, duplicates or disorder in between. It completes when the bus is closed, or after the
        past events with ``history_only``. It errors if its observer raises, or with ``ClosedError`` if the bus was
        closed before.

        Observers are called on delivery threads, one event at a time. For an observer that is ``LIMIT`` events behind,
        the oldest pending events are dropped. An observer that belongs on an event loop needs ``observe_on`` with the
        thread-safe scheduler of that loop.

        Args:
            history: maximum number of past events that come first; or the time of the first of them, inclusive (a
                naive time is local time).
            history_only: whether the stream ends after the past events.
            principal: only topics that this principal may subscribe to are observed.

        Raises:
            ArgumentError: ``history`` is neither an int of at least 0 nor a datetime.
        """
        if history is None:
            raise NullEventError("history must be an int of at least 0, or a datetime, not None")
        is_count = isinstance(history, int) and not isinstance(history, bool)
        if not (isinstance(history, datetime) or (is_count and history >= 0)):
            raise ArgumentError(f"history must be an int of at least 0, or a datetime, not {history!r:.80}")
        since = _in_utc(history) if isinstance(history, datetime) else history
        check_instance("history_only", history_only, bool)
        principal = check_principal(principal)

        def subscribe(observer: rx.ObserverBase[MonitorEvent], _: Any = None) -> rx.DisposableBase:
            tap = Tap(self, observer, principal)
            try:
                self._start(tap, since, history_only)
            except BaseException:
                tap.dispose()
                raise  # reactivex.create() passes it to on_error()
            return Disposable(tap.dispose)

        return reactivex.create(subscribe)

    def _start(self, tap: Tap, history: int | datetime, history_only: bool) -> None:
        with self.dispatcher.lock:
            self.dispatcher.refuse_closed()
            past = self._history.all() if history != 0 else iter(())
            if not history_only:
                self.taps = (*self.taps, tap)
                self.dispatcher.forget()
        seen = (event for event in past if tap.may_see(event.topic))
        if isinstance(history, datetime):
            first = newest(UNLIMITED, (event for event in seen if event.publication_time >= history))
        else:
            first = newest(history, seen)
        tap.lane.release(first)
        if history_only:
            tap.end()

    def remove(self, tap: Tap) -> None:
        """End a subscription."""
        with self.dispatcher.lock:
            if tap in self.taps:
                self._missed_before += tap.lane.dropped
                self.taps = tuple(each for each in self.taps if each is not tap)
                self.dispatcher.forget()

    @property
    def missed(self) -> int:
        """The number of events that observers missed because they were too slow."""
        with self.dispatcher.lock:
            return self._missed_before + sum(each.lane.dropped for each in self.taps)

    def flush(self) -> Promise[None]:
        """Return a promise that resolves when observers have processed the events published before this call."""
        lanes = [*(each.lane for each in self.taps), *self._ending]
        return when_all_done(lanes, f"flushing the monitor of {self.dispatcher.name}")

    def close(self) -> None:
        """Complete all subscriptions."""
        for tap in self.taps:
            self._ending.add(tap.lane)
            self.remove(tap)
            tap.end()

    # --- history (157.6.2)

    def get_maximum_event_storage(self) -> int:
        """Return the capacity of the history in events: -1 for unlimited, 0 for none (157.11.4.5)."""
        return self._history.capacity

    def configure_history_storage(self, topic_filter: str, policy: RangePolicy) -> int:
        """Set the policy of a topic filter, in place of an earlier one (157.11.4.1).

        Of several filters that match a topic, the most specific one applies: level by level, a token precedes ``+``,
        and ``+`` precedes ``*``.

        Args:
            topic_filter: the topics.
            policy: number of events that are kept of each topic. A minimum requires an exact topic, or an unlimited
                history.

        Returns:
            The number of events of one such topic that can be kept now: at least the minimum, at most the maximum.

        Raises:
            NullEventError: the filter or the policy is ``None``.
            InvalidTopicError: ``topic_filter`` is no topic filter.
            ArgumentError: ``policy`` is no RangePolicy, or it has a minimum and the filter has wildcards.
            HistoryFullError: the history has no room for the minimum; nothing has changed.
        """
        parsed = parse_filter(topic_filter)
        if policy is None:
            raise NullEventError("policy must be a RangePolicy, not None")
        check_instance("policy", policy, RangePolicy)
        with self.dispatcher.lock:
            room = self._history.configure(parsed, policy)
            self.dispatcher.forget()
        return room

    def remove_history_storage(self, topic_filter: str) -> None:
        """Remove the policy of a topic filter, and at once the events that no other policy keeps (157.11.4.11).

        Raises:
            NullEventError, InvalidTopicError: ``topic_filter`` is no topic filter.
        """
        parsed = parse_filter(topic_filter)
        with self.dispatcher.lock:
            self._history.remove(parsed)
            self.dispatcher.forget()

    @overload
    def get_configured_history_storage(self) -> dict[str, RangePolicy]: ...
    @overload
    def get_configured_history_storage(self, topic_filter: str) -> RangePolicy | None: ...
    def get_configured_history_storage(self, topic_filter: Any = _ALL) -> dict[str, RangePolicy] | RangePolicy | None:
        """Return all policies by filter, or the policy of one filter (157.11.4.2, 157.11.4.3).

        Returns:
            Without an argument a dict, in which the first filter that matches a topic is its effective one. With an
            argument, the policy of exactly that filter, or ``None``.

        Raises:
            NullEventError, InvalidTopicError: ``topic_filter`` is no topic filter.
        """
        if topic_filter is _ALL:
            with self.dispatcher.lock:
                return self._history.configured()
        parsed = parse_filter(topic_filter)
        with self.dispatcher.lock:
            return self._history.policy(parsed)

    def get_effective_history_storage(self, topic_name: str) -> RangePolicy:
        """Return the effective policy of a topic, by default ``RangePolicy.none()`` (157.11.4.4).

        Raises:
            NullEventError, InvalidTopicError: ``topic_name`` is no topic, or has wildcards.
        """
        topic_name = check_topic(topic_name)
        with self.dispatcher.lock:
            return self._history.effective(topic_name)

    # --- matching

    @overload
    def topic_filter_matches(self, topic_filter: str, /) -> Callable[[str], bool]: ...
    @overload
    def topic_filter_matches(self, topic_name: str, topic_filter: str, /) -> bool: ...
    def topic_filter_matches(self, *arguments: str) -> Callable[[str], bool] | bool:
        """Return whether a filter matches a topic (157.11.4.13); for a filter alone, a predicate (157.11.4.12).

        Args:
            *arguments: topic name and topic filter, or the filter alone.

        Raises:
            ArgumentError: there are neither one nor two arguments.
            NullEventError, InvalidTopicError: the name is no topic, or the filter no topic filter. The predicate
                raises them too.
        """
        if len(arguments) not in (1, 2):
            raise ArgumentError("topic_filter_matches() takes a topic filter, or a topic name and a topic filter")
        parsed = parse_filter(arguments[-1])

        def matches(topic_name: str) -> bool:
            return parsed.matches(check_topic(topic_name))

        return matches if len(arguments) == 1 else matches(arguments[0])


def _in_utc(time: datetime) -> datetime:
    try:
        return time.astimezone(UTC)
    except (OverflowError, ValueError):  # at the ends of the calendar, where the zone is irrelevant
        return time.replace(tzinfo=UTC)

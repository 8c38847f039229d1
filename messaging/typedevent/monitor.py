"""TypedEventMonitor: what flows through a bus, without disturbing it, and what is kept of it (157.6, 157.11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, overload
from weakref import WeakSet

import reactivex
from reactivex import Observable
from reactivex.disposable import Disposable

from messaging.dispatch.dispatcher import when_all_done
from messaging.dispatch.lanes import LIMIT, ThreadLane
from messaging.dispatch.permission import TopicPermission
from messaging.dispatch.pool import Pool
from messaging.dispatch.terms import read_principal
from messaging.dispatch.topics import check_topic, parse_filter
from messaging.errors import ArgumentError, NullEventError
from messaging.safelog import SafeLog
from messaging.typedevent.history import UNLIMITED, RangePolicy, last
from messaging.typedevent.maps import to_map
from messaging.workers import workers

if TYPE_CHECKING:
    from reactivex import abc as rx

    from messaging.dispatch.dispatcher import Dispatcher
    from messaging.dispatch.permission import Principal
    from messaging.promise import Promise
    from messaging.typedevent.event import PublishedEvent
    from messaging.typedevent.history import History

logger = SafeLog(__name__)

#: no filter is given
_ALL: Final = object()
#: item of a lane: nothing follows
_END: Final = object()


@dataclass(frozen=True, slots=True)
class MonitorEvent:
    """An event that was published (157.11.2)."""

    topic: str
    #: in map form: a copy for this observer
    event_data: dict[str, Any]
    #: in UTC
    publication_time: datetime


class Tap:
    """One observer of a monitor. Its observer is called on a delivery thread, one event at a time.

    It never holds up a publisher: if it is slower than they are, the oldest events that wait for it are left out.
    """

    def __init__(
        self, monitor: TypedEventMonitor, observer: rx.ObserverBase[MonitorEvent], principal: Principal
    ) -> None:
        self._monitor = monitor
        self._observer = observer
        self._principal = principal
        self._is_lagging = False
        self.lane = ThreadLane(
            self._receive, monitor.pool, "a monitor", timeout=0, stalled=lambda: None, is_held=True, limit=monitor.limit
        )

    def may_see(self, topic: str) -> bool:
        """Whether its principal may."""
        return self._monitor.dispatcher.may(self._principal, TopicPermission.SUBSCRIBE, topic)

    def put(self, event: PublishedEvent) -> None:
        """An event was published that it may see. With the lock of the bus."""
        self.lane.put_newest(event)
        if self.lane.dropped and not self._is_lagging:
            self._is_lagging = True
            workers().submit(self._tell_that_it_lags)  # whoever logs may do anything, with any lock

    def _tell_that_it_lags(self) -> None:
        logger.warning(
            "%s: a monitor does not keep up: the oldest of what waits for it is left out", self._monitor.dispatcher.name
        )

    def end(self) -> None:
        """Complete, after what was published so far."""
        self.lane.put(_END)

    def _receive(self, item: Any) -> None:
        try:
            if item is _END:
                self._observer.on_completed()
                return
            data = self._map_of(item)
            if data is not None:
                self._observer.on_next(MonitorEvent(item.topic, data, item.publication_time))
        except BaseException as error:  # noqa: BLE001  # whatever an observer raises, the others go on
            self._fail(error)

    def _map_of(self, event: PublishedEvent) -> dict[str, Any] | None:
        try:
            return to_map(event.data)  # a copy for each observer: the map of the event is shared
        except Exception as error:  # noqa: BLE001  # a property of the event may raise anything
            logger.error("%s: no monitor sees an event on %r: %s", self._monitor.dispatcher.name, event.topic, error)
            return None

    def _fail(self, error: BaseException) -> None:
        self.dispose()
        logger.error("%s: a monitor's observer failed", self._monitor.dispatcher.name, exc_info=error)
        try:
            self._observer.on_error(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        except BaseException:
            logger.exception("%s: a monitor's observer failed on an error", self._monitor.dispatcher.name)

    def dispose(self) -> None:
        """See no more; nothing is retained for it."""
        self._monitor.remove(self)
        self.lane.close()


class TypedEventMonitor:
    """What flows through a bus, and its history; get it as ``TypedEventBus.monitor``, or as a service (157.11.4).

    Thread safe.
    """

    def __init__(self, dispatcher: Dispatcher[Any, Any], history: History, limit: int = LIMIT) -> None:
        self.dispatcher = dispatcher
        #: not that of the handlers: observers may take as long as they like
        self.pool = Pool()
        self.limit = limit
        self._history = history
        #: replaced with the lock, read without
        self.taps: tuple[Tap, ...] = ()
        #: what those that are gone have missed
        self._missed_before = 0
        #: of observers that get what was published before the bus was closed, and then complete
        self._ending: WeakSet[ThreadLane] = WeakSet()

    # --- watching (157.6.1)

    @overload
    def monitor_events(self, *, principal: Principal = None) -> Observable[MonitorEvent]: ...
    @overload
    def monitor_events(
        self, history: int | datetime, history_only: bool = False, *, principal: Principal = None
    ) -> Observable[MonitorEvent]: ...
    def monitor_events(
        self, history: int | datetime = 0, history_only: bool = False, *, principal: Principal = None
    ) -> Observable[MonitorEvent]:
        """Watch all events, delivered or not, filtered out, or unhandled.

        Each subscription begins when it is made: with what the history has of what is asked for, followed by what is
        published from then on, without loss, doubling or disorder at the seam. It completes when the bus is closed, or
        after the history with ``history_only``. It errors only if its observer raises, or with ``ClosedError`` if the
        bus was closed before.

        Observers are called on delivery threads, one event at a time; for one that lags ``LIMIT`` events behind, the
        oldest are left out. What has to be on an event loop needs an ``observe_on`` with its thread-safe scheduler.

        Args:
            history: how many past events come first, at most; or the time from which on they do, inclusive (a naive
                one is local time).
            history_only: whether that is all.
            principal: only topics that it may subscribe to.

        Raises:
            ArgumentError: ``history`` is neither an int of at least 0 nor a datetime.
        """
        if history is None:
            raise NullEventError("history must be a number of events or a datetime, not None")
        is_count = isinstance(history, int) and not isinstance(history, bool)
        if not (isinstance(history, datetime) or (is_count and history >= 0)):
            raise ArgumentError(f"history must be an int of at least 0, or a datetime, not {history!r:.80}")
        since = _in_utc(history) if isinstance(history, datetime) else history
        if not isinstance(history_only, bool):
            raise ArgumentError(f"history_only must be a bool, not {type(history_only).__name__}")
        principal = read_principal(principal, "principal")

        def subscribe(observer: rx.ObserverBase[MonitorEvent], _: Any = None) -> rx.DisposableBase:
            tap = Tap(self, observer, principal)
            try:
                self._watch(tap, since, history_only)
            except BaseException:
                tap.dispose()
                raise  # to ``create``, which hands it to ``on_error``
            return Disposable(tap.dispose)

        return reactivex.create(subscribe)

    def _watch(self, tap: Tap, history: int | datetime, history_only: bool) -> None:
        with self.dispatcher.lock:
            self.dispatcher.refuse_closed()
            past = self._history.all() if history != 0 else iter(())
            if not history_only:
                self.taps = (*self.taps, tap)
                self.dispatcher.forget()
        seen = (event for event in past if tap.may_see(event.topic))
        if isinstance(history, datetime):
            first = last(UNLIMITED, (event for event in seen if event.publication_time >= history))
        else:
            first = last(history, seen)
        tap.lane.release(first)
        if history_only:
            tap.end()

    def remove(self, tap: Tap) -> None:
        """Let go of an observer."""
        with self.dispatcher.lock:
            if tap in self.taps:
                self._missed_before += tap.lane.dropped
                self.taps = tuple(each for each in self.taps if each is not tap)
                self.dispatcher.forget()

    @property
    def missed(self) -> int:
        """How many events observers did not get since they were too slow."""
        with self.dispatcher.lock:
            return self._missed_before + sum(each.lane.dropped for each in self.taps)

    def flush(self) -> Promise[None]:
        """Resolves when all observers are through with what was published before this call."""
        lanes = [*(each.lane for each in self.taps), *self._ending]
        return when_all_done(lanes, f"flushing the monitor of {self.dispatcher.name}")

    def close(self) -> None:
        """Complete all that watch."""
        for tap in self.taps:
            self._ending.add(tap.lane)
            self.remove(tap)
            tap.end()

    # --- history (157.6.2)

    def get_maximum_event_storage(self) -> int:
        """How many events the history holds: -1 for any number, 0 for none (157.11.4.5)."""
        return self._history.capacity

    def configure_history_storage(self, topic_filter: str, policy: RangePolicy) -> int:
        """Have a policy for the topics that match (157.11.4.1); it takes the place of an earlier one of that filter.

        Of several filters that match a topic, the most specific one counts: level by level, a token goes before
        ``+``, and that before ``*``.

        Args:
            topic_filter: which topics.
            policy: how many events of each are kept. A minimum is for exact topics, or for a history without bound.

        Returns:
            How many events of one such topic can be kept now: at least the minimum, at most the maximum.

        Raises:
            NullEventError: the filter or the policy is ``None``.
            InvalidTopicError: it is no topic filter.
            ArgumentError: the policy is none, or it has a minimum and the filter has wildcards.
            HistoryFullError: the minimum is more than there is room for; nothing has changed.
        """
        parsed = parse_filter(topic_filter)
        if policy is None:
            raise NullEventError("a RangePolicy is needed, not None")
        if not isinstance(policy, RangePolicy):
            raise ArgumentError(f"a RangePolicy is needed, not {type(policy).__name__}")
        with self.dispatcher.lock:
            room = self._history.configure(parsed, policy)
            self.dispatcher.forget()
        return room

    def remove_history_storage(self, topic_filter: str) -> None:
        """Have no policy for that filter any more; what no other one keeps is dropped at once (157.11.4.11).

        Raises:
            NullEventError, InvalidTopicError: it is no topic filter.
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
        """All policies by filter, or that of one filter (157.11.4.2, 157.11.4.3).

        Returns:
            Without argument a dict, in which the first filter that matches a topic is the one that counts. With one,
            the policy of exactly that filter, or ``None``.

        Raises:
            NullEventError, InvalidTopicError: it is no topic filter.
        """
        if topic_filter is _ALL:
            with self.dispatcher.lock:
                return self._history.configured()
        parsed = parse_filter(topic_filter)
        with self.dispatcher.lock:
            return self._history.policy(parsed)

    def get_effective_history_storage(self, topic_name: str) -> RangePolicy:
        """The policy that counts for a topic, ``RangePolicy.none()`` if there is none (157.11.4.4).

        Raises:
            NullEventError, InvalidTopicError: it is no topic; one with wildcards is none.
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
        """Whether a filter matches a topic (157.11.4.13); with the filter alone, a function that tells (157.11.4.12).

        Args:
            *arguments: topic name and topic filter, or the filter alone.

        Raises:
            NullEventError, InvalidTopicError: one of them is not what it should be. The function raises them, too.
        """
        if len(arguments) not in (1, 2):
            raise ArgumentError("a topic filter is needed, or a topic name and a topic filter")
        parsed = parse_filter(arguments[-1])

        def matches(topic_name: str) -> bool:
            return parsed.matches(check_topic(topic_name))

        return matches if len(arguments) == 1 else matches(arguments[0])


def _in_utc(time: datetime) -> datetime:
    try:
        return time.astimezone(UTC)
    except (OverflowError, ValueError):  # at the ends of the calendar, where a zone does not matter
        return time.replace(tzinfo=UTC)

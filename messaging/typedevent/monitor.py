"""TypedEventMonitor: observe all events of a bus, and configure its history (157.6, 157.11)."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, overload
from uuid import UUID
from weakref import WeakSet

from reactivex.disposable import Disposable

from messaging.dispatch import (
    PlainObservable,
    TopicPermission,
    check_principal,
    check_topic,
    contained,
    fail_observer,
    parse_filter,
    when_all_done,
)
from messaging.dispatch.eventdata import to_map
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, InvalidEventError, NullEventError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog
from messaging.execution import LIMIT, Pool, Promise, ThreadLane, workers
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.history import UNLIMITED, EventHistory, RangePolicy, newest
from messaging.typedevent.store import NEAR, EventStore, is_since, replayed

if TYPE_CHECKING:
    from reactivex import Observable
    from reactivex import abc as rx

    from messaging.dispatch import Dispatcher, Principal, TopicFilter

logger = SafeLog(__name__)

#: default of a topic filter that was not given
_ALL: Final = object()
#: last item of a lane
_END: Final = object()
#: item of a lane: past events from the disk come next
_MORE: Final = object()
#: records of the disk that are read before the thread goes on to another subscription
_STEP: Final = 256


@dataclass(frozen=True, slots=True)
class MonitorEvent:
    """A published event (157.11.2)."""

    topic: str
    #: in map form, copied for each observer
    event_data: dict[str, Any]
    #: in UTC
    publication_time: datetime
    #: number of the event among the recorded ones, see ``TypedEventMonitor.replay``; 0 if it was not recorded
    sequence: int = 0
    #: the framework that a remote event came from; ``None`` for local events
    origin: UUID | None = None


class _TapLane(ThreadLane):
    """The lane of one subscription, with which a callback waits for past events that are not in the lane yet."""

    #: past events from the disk come first, and are not in the lane
    is_catching_up = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        super().__init__(*arguments, **options)

    def when_done(self, reached: Callable[[], object]) -> None:
        """See ``Lane``."""
        if not self.is_catching_up:
            super().when_done(reached)
            return
        self._waiting.append(reached)
        if not self.is_catching_up or self.is_closed:  # since just now
            self.end_catching_up()

    def end_catching_up(self) -> None:
        """Have callbacks wait for the items of the lane only."""
        self.is_catching_up = False
        with contextlib.suppress(IndexError):  # each of two threads takes some
            while True:
                super().when_done(self._waiting.popleft())

    def close(self) -> int:
        """See ``Lane``."""
        lost = super().close()
        self.end_catching_up()
        return lost

    def after_fork(self) -> None:
        """See ``Lane``: the past events are the parent's, too."""
        super().after_fork()
        self.end_catching_up()


class Tap:
    """One subscription to a monitor. Its observer is called on a delivery thread, one event at a time.

    It never delays a publisher: when its lane is full, the oldest pending events are dropped.
    """

    def __init__(
        self,
        monitor: TypedEventMonitor,
        observer: rx.ObserverBase[MonitorEvent],
        principal: Principal,
        topics: tuple[TopicFilter, ...] | None = None,
        limit: int | None = None,
    ) -> None:
        self._monitor = monitor
        self._observer = observer
        self._principal = principal
        self._topics = topics
        self._is_lagging = False
        #: past events from the disk that come before the items of the lane; ``None`` inside is no event
        self._past: Iterator[PublishedEvent | None] | None = None
        #: it receives all events that are published
        self.is_live = False
        self.limit = monitor.limit if limit is None else limit
        self.lane = _TapLane(
            self._receive,
            monitor.pool,
            "a monitor",
            timeout=0,
            stalled=lambda _: None,
            is_held=True,
            limit=self.limit,
        )

    def may_see(self, topic: str) -> bool:
        """Return whether it wants ``topic``, and its principal may subscribe to it."""
        if self._topics is not None and not any(each.matches(topic) for each in self._topics):
            return False
        return self._monitor.dispatcher.may(self._principal, TopicPermission.SUBSCRIBE, topic)

    def put(self, event: PublishedEvent) -> None:
        """Enqueue a published event that it may see. Called with the lock of the bus."""
        self.lane.put_newest(event)
        if self.lane.room.dropped and not self._is_lagging:
            self._is_lagging = True
            workers().submit(self._log_lag)  # not here: log handlers may take any lock

    def _log_lag(self) -> None:
        logger.warning(
            "%s: a monitor's observer is %d events behind: dropping its oldest pending events",
            self._monitor.dispatcher.name,
            self.limit,
        )

    def begin_with(self, past: Iterator[PublishedEvent | None]) -> None:
        """Receive past events from the disk, a few at a time, then the items of the lane."""
        self._past = past
        self.lane.is_catching_up = True
        self.lane.release([_MORE])

    def end(self) -> None:
        """Complete the observer after the events that were published so far."""
        self.lane.put(_END)

    def _receive(self, item: Any) -> None:
        with contained(self._fail):
            if item is _MORE:
                if self._advance(_STEP):
                    self.lane.put(_MORE)
            elif item is _END:
                while self._advance(_STEP):
                    pass
                self._observer.on_completed()
            else:
                self._emit(item)

    def _advance(self, steps: int) -> bool:
        """Emit some past events; return whether there may be more.

        Once live events are in the lane, the rest of the past comes at once: it must not be emitted after them.
        """
        past = self._past
        while past is not None and (steps > 0 or self.is_live) and not self.lane.is_closed:
            event = next(past, _END)
            if event is _END:
                self._past = past = None
                self.lane.end_catching_up()
            elif event is not None:
                self._emit(event)
            steps -= 1
        return past is not None and not self.lane.is_closed

    def _emit(self, event: Any) -> None:
        try:
            data = to_map(event.data)  # not event.as_map(), which handlers share
        except InvalidEventError as error:
            logger.error(
                "%s: an event on %r is hidden from a monitor's observer: %s",
                self._monitor.dispatcher.name, event.topic, error,
            )  # fmt: skip
            return
        self._observer.on_next(MonitorEvent(event.topic, data, event.publication_time, event.sequence, event.origin))

    def _fail(self, error: BaseException) -> None:
        self.dispose()
        fail_observer(self._observer, f"{self._monitor.dispatcher.name}: a monitor's observer", error)

    def dispose(self) -> None:
        """Unsubscribe, and release its pending events."""
        self._monitor.remove(self)
        self.lane.close()


class TypedEventMonitor:
    """Observes all events of a bus, and configures its history (157.11.4). Thread safe.

    It is available as ``TypedEventBus.monitor``, and as a service.

    Args:
        dispatcher: the handlers of the bus, and its lock.
        history: the events in memory; guarded by that lock.
        limit: bound of the events that wait for one observer.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[Any, Any],
        history: EventHistory,
        limit: int = LIMIT,
    ) -> None:
        self.dispatcher = dispatcher
        #: separate from the pool of the handlers, since observers have no time limit
        self.pool = Pool(name=f"the monitor of {dispatcher.name}")
        self.limit = limit
        self._history = history
        #: the events on the disk; ``None`` without a durable history. Set before the bus is open
        self.store: EventStore | None = None
        #: subscriptions that receive past events from the disk; guarded by the lock of the dispatcher
        self._replaying: dict[Tap, None] = {}
        self._is_closed = False
        #: replaced with the lock, read without it
        self.taps: tuple[Tap, ...] = ()
        #: events that ended subscriptions missed
        self._missed_before = 0
        #: lanes of observers that receive the events published before the bus was closed, and then complete
        self._ending: WeakSet[ThreadLane] = WeakSet()

    # --- observing (157.6.1)

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
        since, count = (in_utc(history), UNLIMITED) if isinstance(history, datetime) else (0, history)
        check_instance("history_only", history_only, bool)
        principal = check_principal(principal)

        return self._stream(lambda tap: self._start(tap, since, count, history_only), principal)

    def _stream(
        self,
        begin: Callable[[Tap], object],
        principal: Principal,
        topics: tuple[TopicFilter, ...] | None = None,
        limit: int | None = None,
    ) -> Observable[MonitorEvent]:
        """Return a stream for which ``begin`` is called with each subscription; see ``Tap`` for the rest."""

        def subscribe(observer: rx.ObserverBase[MonitorEvent], _: Any = None) -> rx.DisposableBase:
            tap = Tap(self, observer, principal, topics, limit)
            with on_failure(tap.dispose):  # the observable passes the exception to on_error()
                begin(tap)
            return Disposable(tap.dispose)

        return PlainObservable(subscribe)

    def _start(self, tap: Tap, since: int | datetime, count: int, history_only: bool = False) -> None:
        """Emit past events of the history in memory, the newest ``count`` from ``since`` on, then live events."""
        with self.dispatcher.lock:
            self.dispatcher.refuse_closed()
            past = self._history.all() if count else iter(())
            if not history_only:
                self._add(tap)
        seen = (event for event in past if tap.may_see(event.topic) and is_since(event, since))
        tap.lane.release(newest(count, seen))
        if history_only:
            tap.end()

    def replay(
        self, since: int | datetime, topics: str | Iterable[str] = "*", *, principal: Principal = None
    ) -> Observable[MonitorEvent]:
        """Return a stream of the recorded events from a sequence or a time on, then of all events.

        With a durable history, the past events come from the disk, also those of earlier runs and events that the
        history in memory has dropped; otherwise from the history in memory. They come in the order of their sequences,
        each once, as fast as the observer takes them. Then the stream goes on as :meth:`monitor_events`, without loss,
        duplicates or disorder of recorded events. While past events are left on the disk, events of topics that are
        not recorded are left out.

        To resume after a restart, pass the sequence of the last event that was processed, plus one. Live events are
        emitted whatever ``since`` is. Events that the bounds of the durable history drop before this stream has read
        them are counted in :attr:`missed`.

        Args:
            since: sequence of the first event, inclusive; or its publication time (a naive time is local time).
            topics: filter of the topics, or several.
            principal: only topics that this principal may subscribe to are observed.

        Raises:
            ArgumentError: ``since`` is neither an int of at least 0 nor a datetime; ``topics`` is no filter.
            NullEventError, InvalidTopicError: ``topics`` is no topic filter.

        The stream errors as that of :meth:`monitor_events`, and with ``JournalError`` if the disk cannot be read.
        """
        if isinstance(since, bool) or not isinstance(since, (int, datetime)) or (isinstance(since, int) and since < 0):
            raise ArgumentError(f"since must be a sequence, an int of at least 0, or a datetime, not {since!r:.80}")
        start = in_utc(since) if isinstance(since, datetime) else since
        if isinstance(topics, str) or not isinstance(topics, Iterable):
            topics = (topics,)
        filters = tuple(map(parse_filter, topics))
        if not filters:
            raise ArgumentError("topics must have at least one topic filter")
        principal, store = check_principal(principal), self.store
        if store is None:
            return self._stream(lambda tap: self._start(tap, start, UNLIMITED), principal, filters)
        limit = self.limit + store.max_pending + NEAR
        return self._stream(lambda tap: self._replay(tap, store, start), principal, filters, limit)

    def _replay(self, tap: Tap, store: EventStore, since: int | datetime) -> None:
        """Emit past events of the disk, then live events."""

        def join() -> tuple[int, list[PublishedEvent]]:
            with self.dispatcher.lock:
                if tap in self._replaying:
                    self._replaying.pop(tap, None)
                    if not self._is_closed:
                        self._add(tap)
                return self._history.sequence, store.pending()

        with self.dispatcher.lock:
            self.dispatcher.refuse_closed()
            self._replaying[tap] = None
            live_from = self._history.sequence + 1
        tap.begin_with(replayed(store, since, tap.may_see, join, tap.lane.room.count_dropped, live_from))

    def _add(self, tap: Tap) -> None:
        """Have a subscription receive all events from now on. Called with the lock."""
        tap.is_live = True
        self.taps = (*self.taps, tap)
        self.dispatcher.forget()

    def remove(self, tap: Tap) -> None:
        """End a subscription."""
        with self.dispatcher.lock:
            is_live = tap in self.taps
            if is_live or tap in self._replaying:
                self._missed_before += tap.lane.room.dropped
                self._replaying.pop(tap, None)
            if is_live:
                self.taps = tuple(each for each in self.taps if each is not tap)
                self.dispatcher.forget()

    @property
    def history_id(self) -> str | None:
        """The id of the durable history: with ``MonitorEvent.sequence`` it identifies a recorded event over all runs.

        ``None`` without a durable history.
        """
        return None if self.store is None else self.store.journal.id

    @property
    def missed(self) -> int:
        """The number of events that observers missed because they were too slow."""
        with self.dispatcher.lock:
            return self._missed_before + sum(each.lane.room.dropped for each in (*self.taps, *self._replaying))

    def flush(self) -> Promise[None]:
        """Return a promise that resolves when observers have processed the events published before this call."""
        with self.dispatcher.lock:
            lanes = [*(each.lane for each in (*self.taps, *self._replaying)), *self._ending]
        return when_all_done(lanes, f"flushing the monitor of {self.dispatcher.name}")

    def close(self) -> None:
        """Complete all subscriptions."""
        with self.dispatcher.lock:
            self._is_closed = True
            taps = (*self.taps, *self._replaying)
        for tap in taps:
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
            return self._history.configured().get(parsed.text)

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


def in_utc(time: datetime) -> datetime:
    """Return a time in UTC; a naive time is local time."""
    try:
        return time.astimezone(UTC)
    except (OverflowError, ValueError):  # at the ends of the calendar, where the zone is irrelevant
        return time.replace(tzinfo=UTC)

"""Asking other processes for past events: the request, and the answers as events of a monitor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from reactivex.disposable import Disposable

from messaging.dispatch import PlainObservable, TopicFilter, TopicPermission, check_count, is_topic
from messaging.dispatch.eventdata import microseconds, time_of
from messaging.dispatch.eventnetwork import MAX_PAST, TYPED, ArrivedEvent, PastRequest, TopicInterest
from messaging.errors import ArgumentError, DecodeError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import clock
from messaging.typedevent.monitor import MonitorEvent

if TYPE_CHECKING:
    from reactivex import Observable
    from reactivex import abc as rx

    from messaging.dispatch import TopicPolicy
    from messaging.dispatch.eventnetwork import EventNode
    from messaging.dispatch.eventnetwork.asking import Done

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
            emit(title, observer, (each for each in map(event_of, events) if each is not None), error, disposed)

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


def emit(
    title: str,
    observer: rx.ObserverBase[MonitorEvent],
    events: Iterable[MonitorEvent],
    error: MessagingError | None,
    disposed: list[None],
) -> None:
    """Emit events and the end. An observer that raises gets its error, and no more events."""
    try:
        for each in events:
            if disposed:
                return
            observer.on_next(each)
    except Exception as raised:
        logger.exception("%s: replay observer failed: %s; subscription closed", title, type(raised).__name__)
        observer.on_error(raised)
        return
    if disposed:
        return
    if error is None:
        observer.on_completed()
    else:
        observer.on_error(error)


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
        try:
            at = history.astimezone(UTC)
        except (OverflowError, ValueError):  # at the ends of the calendar, where the zone is irrelevant
            at = history.replace(tzinfo=UTC)
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

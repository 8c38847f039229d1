"""What an application asks of the connection of a typed event bus to a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, get_args

from messaging.dispatch import Principal, TopicFilter, TopicPolicy, check_count, parse_filter
from messaging.dispatch.eventnetwork import MAX_PAST
from messaging.errors import ArgumentError
from messaging.errors.checks import check_instance, check_optional
from messaging.execution import clock
from messaging.typedevent.monitor import in_utc

#: policy of a full queue of outbound events
RelayOverflow = Literal["drop_oldest", "drop_latest"]
#: default bound of the queue of outbound events
LIMIT: Final = 10_000
#: default number of past events
PAST_LIMIT: Final = 10_000


@dataclass(frozen=True, slots=True)
class ConnectionTerms:
    """Which events cross a connection, and how: the arguments of ``TypedEventBus.connect``, checked. Immutable.

    Attributes:
        outbound_topics, inbound_topics: the topic filters of the two directions.
        reach: the time of the first past event of other processes, and their number; ``None``: none are asked for.
    """

    topics: str | Iterable[str]
    _: KW_ONLY
    outbound: bool | str | Iterable[str]
    inbound: bool | str | Iterable[str]
    principal: Principal
    outbound_policy: TopicPolicy | None
    inbound_policy: TopicPolicy | None
    limit: int
    overflow: RelayOverflow
    history: int | datetime | timedelta | None
    shares_history: bool
    outbound_topics: tuple[TopicFilter, ...] = field(init=False)
    inbound_topics: tuple[TopicFilter, ...] = field(init=False)
    reach: tuple[Callable[[], datetime] | None, int] | None = field(init=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "reach", None if self.history is None else read_history(self.history, PAST_LIMIT))
        check_instance("shares_history", self.shares_history, bool)
        for name in ("outbound_policy", "inbound_policy"):
            check_optional(name, getattr(self, name), TopicPolicy)
        if self.overflow not in get_args(RelayOverflow):
            choices = ", ".join(get_args(RelayOverflow))
            raise ArgumentError(f"overflow must be one of {choices}, not {self.overflow!r:.80}")
        connected = filters_of("topics", self.topics)
        put(self, "outbound_topics", _direction("outbound", self.outbound, connected))
        put(self, "inbound_topics", _direction("inbound", self.inbound, connected))
        if not (self.outbound_topics or self.inbound_topics):
            raise ArgumentError("a connection needs a direction: outbound, inbound or both")
        check_count("limit", self.limit, 1)


def filters_of(name: str, topics: Any) -> tuple[TopicFilter, ...]:
    """Return the topic filters of the argument ``name``, at least one. Raises ``ArgumentError``."""
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
    common = [mine.intersection(theirs) for mine in connected for theirs in filters_of(name, value)]
    found = tuple(dict.fromkeys(parse_filter(each) for each in common if each is not None))
    if not found:
        raise ArgumentError(f"{name}: none of its topics is in topics")
    return found


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

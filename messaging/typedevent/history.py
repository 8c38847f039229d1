"""The history of a typed event bus: the events that are kept of each topic (157.6.1, 157.6.2).

Two bounds apply: the policy of each topic, and the capacity of the whole history. When the history exceeds its
capacity, it drops the oldest event that no policy guarantees. A record has the topic, the time and the data of an
event, without the results of its conversions.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Final, TypeAlias
from uuid import UUID

from messaging.dispatch import AbstractTopicFilter, TopicFilter, TopicTrie, check_count
from messaging.errors import ArgumentError, HistoryFullError
from messaging.typedevent.event import PublishedEvent, StoredEvent

#: maximum that means unlimited
UNLIMITED: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RangePolicy:
    """The number of events of a topic that the history keeps (157.11.3). Immutable.

    Attributes:
        minimum: number of events that are guaranteed to be kept, once as many were published.
        maximum: number of events that is never exceeded. Events above the minimum may be dropped at any time.

    Raises:
        ArgumentError: a bound is no int of at least 0, or the minimum is more than the maximum (157.6.2.2).
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        for name in ("minimum", "maximum"):
            check_count(f"the {name} of a RangePolicy", getattr(self, name))
        if self.minimum > self.maximum:
            raise ArgumentError(
                f"the minimum of a RangePolicy, {self.minimum}, is more than its maximum, {self.maximum}"
            )

    @classmethod
    def range(cls, minimum: int, maximum: int) -> RangePolicy:
        """Return a policy of at least ``minimum`` and at most ``maximum`` events (157.11.3.7)."""
        return cls(minimum, maximum)

    @classmethod
    def exact(cls, count: int) -> RangePolicy:
        """Return ``range(count, count)`` (157.11.3.3)."""
        return cls(count, count)

    @classmethod
    def at_least(cls, minimum: int) -> RangePolicy:
        """Return ``range(minimum, UNLIMITED)`` (157.11.3.1)."""
        return cls(minimum, UNLIMITED)

    @classmethod
    def at_most(cls, maximum: int) -> RangePolicy:
        """Return ``range(0, maximum)`` (157.11.3.2)."""
        return cls(0, maximum)

    @classmethod
    def none(cls) -> RangePolicy:
        """Return ``range(0, 0)``: no events (157.11.3.6)."""
        return cls(0, 0)

    @classmethod
    def unlimited(cls) -> RangePolicy:
        """Return ``range(0, UNLIMITED)``: as many events as the history has room for (157.11.3.8)."""
        return cls(0, UNLIMITED)


_NONE: Final = RangePolicy.none()
_sequence_of: Final = itemgetter(0)

#: a kept event: its unique sequence, time, topic, data, the event services it came through, its origin and its id. An
#: event of an earlier run has a ``StoredEvent`` as its data, which holds the rest, too
_Record: TypeAlias = tuple[int, float, str, Any, tuple[object, ...], "UUID | None", "str | None"]


class _TopicHistory:
    """The kept events of one topic."""

    __slots__ = ("is_listed", "policy", "records")

    def __init__(self, policy: RangePolicy) -> None:
        self.policy = policy
        #: the oldest first
        self.records: deque[_Record] = deque()
        #: whether the topic is in the heap of topics that may lose an event
        self.is_listed = False


class EventHistory:
    """The kept events of a bus. Not thread safe: guarded by the lock of the bus.

    Args:
        capacity: maximum number of events; -1: unlimited, 0: none.

    Raises:
        ArgumentError: the capacity is no such number.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = check_count("the capacity of the history", capacity, -1)
        self._policies: dict[TopicFilter, RangePolicy] = {}
        self._trie: TopicTrie[TopicFilter] = TopicTrie()
        self._kept: dict[str, _TopicHistory] = {}
        self._count = 0
        #: number of the last recorded event
        self.sequence = 0
        #: heap of the topics that may lose an event, each once, with the sequence of its oldest event. In an outdated
        #: entry the topic has lost that event already, so its oldest event is younger than the entry says
        self._spare: list[tuple[int, str]] = []

    def __len__(self) -> int:
        """Return the number of kept events."""
        return self._count

    # --- policies

    def configure(self, topic_filter: TopicFilter, policy: RangePolicy) -> int:
        """Set the policy of a filter; see :meth:`TypedEventMonitor.configure_history_storage`."""
        if topic_filter.has_wildcard and policy.minimum and self.capacity >= 0:
            raise ArgumentError(
                f"{topic_filter.text!r} has a wildcard: a minimum cannot be guaranteed for any number of topics in a "
                f"history of {self.capacity} events"
            )
        room = self.capacity - sum(each.minimum for other, each in self._policies.items() if other != topic_filter)
        if self.capacity >= 0 and policy.minimum > room:
            raise HistoryFullError(
                f"{policy.minimum} events of {topic_filter.text!r} cannot be guaranteed: {self.capacity - room} of the "
                f"{self.capacity} events of the history are guaranteed to other topics"
            )
        self._policies[topic_filter] = policy
        self._trie.add(topic_filter, topic_filter)
        self._apply(topic_filter)
        return policy.maximum if self.capacity < 0 else min(policy.maximum, room)

    def remove(self, topic_filter: TopicFilter) -> None:
        """Remove the policy of a filter, and the events that no other policy keeps."""
        if self._policies.pop(topic_filter, None) is not None:
            self._trie.remove(topic_filter, topic_filter)
            self._apply(topic_filter)

    def configured(self) -> dict[str, RangePolicy]:
        """Return the policies by filter. The first filter that matches a topic is its effective one."""
        return {each.text: self._policies[each] for each in sorted(self._policies, key=lambda each: each.order)}

    def effective(self, topic: str) -> RangePolicy:
        """Return the policy of a topic: that of the most specific filter."""
        found = self._trie.preferred(topic)
        return _NONE if found is None else self._policies[found]

    def _apply(self, topic_filter: TopicFilter) -> None:
        """Apply changed policies to the topics that match."""
        dropped = []  # keeps dropped events until the history is consistent: releasing them may run finalizers
        for topic in [*self._kept] if topic_filter.has_wildcard else [topic_filter.text]:
            kept = self._kept.get(topic)
            if kept is not None and topic_filter.matches(topic):
                kept.policy = self.effective(topic)
                while len(kept.records) > kept.policy.maximum:
                    dropped.append(self._drop_oldest(topic, kept))
        # A larger minimum needs no change: the history has room for all minima.
        self._spare.clear()
        for topic, kept in self._kept.items():
            kept.is_listed = False
            self._list(topic, kept)

    # --- events

    def number(self, event: PublishedEvent) -> None:
        """Give an event the next sequence."""
        event.sequence = self.sequence = self.sequence + 1

    def append(self, event: PublishedEvent, policy: RangePolicy) -> object:
        """Record an event, and number it if it has no sequence. ``policy`` is the effective policy of its topic.

        Returns:
            The dropped records, to be released without the lock: they may hold the last reference to data with a
            finalizer.
        """
        if not policy.maximum or not self.capacity:
            return None
        topic = event.topic
        if not event.sequence:
            self.number(event)
        kept = self._kept.get(topic)
        if kept is None:
            kept = self._kept.setdefault(topic, _TopicHistory(policy))
        records = kept.records
        records.append((event.sequence, event.time, topic, event.data, event.passed, event.origin, event.id))
        if len(records) > policy.maximum:
            return records.popleft()
        self._count += 1
        if self.capacity < 0:
            return None
        if not kept.is_listed:
            self._list(topic, kept)
        dropped: object = None
        while self._count > self.capacity and self._spare:
            dropped = self._evict(), dropped
        return dropped

    def _list(self, topic: str, kept: _TopicHistory) -> None:
        """Add a topic to the heap if it may lose an event."""
        records = kept.records
        if len(records) > kept.policy.minimum and self.capacity >= 0:
            kept.is_listed = True
            heapq.heappush(self._spare, (records[0][0], topic))

    def _evict(self) -> object:
        """Drop the oldest event that no minimum guarantees. One exists, since the minima fit in the capacity."""
        sequence, topic = heapq.heappop(self._spare)
        kept = self._kept[topic]
        kept.is_listed = False
        records = kept.records
        is_current = records[0][0] == sequence and len(records) > kept.policy.minimum
        dropped = self._drop_oldest(topic, kept) if is_current else None
        self._list(topic, kept)
        return dropped

    def _drop_oldest(self, topic: str, kept: _TopicHistory) -> _Record:
        dropped = kept.records.popleft()
        self._count -= 1
        if not kept.records:
            del self._kept[topic]
        return dropped

    # --- looking back

    def of(self, filters: Iterable[AbstractTopicFilter]) -> Iterator[PublishedEvent]:
        """Yield the current events of the topics that match, the newest first; see :meth:`all`."""
        exact: dict[str, None] = {}
        patterns = []
        for each in filters:
            if each.has_wildcard:
                patterns.append(each)
            else:
                exact[each.text] = None
        found: list[_Record] = []
        for topic in [*self._kept] if patterns else exact:
            kept = self._kept.get(topic)
            if kept is not None and (topic in exact or any(each.matches(topic) for each in patterns)):
                found += kept.records
        return _newest_first(found)

    def all(self) -> Iterator[PublishedEvent]:
        """Yield all current events, the newest first.

        They are collected by this call, with the lock; they are sorted and made while iterating, which needs no lock.
        """
        return _newest_first([each for kept in self._kept.values() for each in kept.records])

    def guaranteed(self) -> Iterator[PublishedEvent]:
        """Yield the current events that minima guarantee, the newest first; see :meth:`all`."""
        several = (islice(reversed(kept.records), kept.policy.minimum) for kept in self._kept.values())
        return _newest_first([*chain.from_iterable(several)])


def newest(count: int, newest_first: Iterable[PublishedEvent]) -> list[PublishedEvent]:
    """Return the newest ``count`` events, the oldest first."""
    return [*islice(newest_first, min(count, UNLIMITED))][::-1]


def _newest_first(records: list[_Record]) -> Iterator[PublishedEvent]:
    records.sort(reverse=True, key=_sequence_of)
    for sequence, time, topic, data, passed, origin, event_id in records:
        if data.__class__ is StoredEvent:
            stored = data.load()
            if stored is not None:
                yield stored
            continue
        event = PublishedEvent(topic, data)
        event.origin = origin
        event.id = event_id
        event.sequence = sequence
        event.time = time
        event.passed = passed
        yield event

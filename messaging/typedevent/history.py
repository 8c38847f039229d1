"""The history of events: which are kept, by topic, and for how long (157.6.1, 157.6.2).

What is kept is bounded twice: each topic by its policy, and all topics together by the capacity. When the capacity is
reached, the oldest event of all goes that its policy does not guarantee. Kept are topic, time and data, but not what
handlers had the data converted to.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeAlias

from messaging.dispatch.topics import TopicFilter, TopicTrie
from messaging.errors import ArgumentError, HistoryFullError
from messaging.typedevent.event import PublishedEvent

#: a maximum that is none
UNLIMITED: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RangePolicy:
    """How many events of a topic are kept (157.11.3). Immutable.

    Attributes:
        minimum: that many are kept for certain, once there were as many.
        maximum: never more than that are kept; what is between the two may be dropped at any time.

    Raises:
        ArgumentError: one of them is no int of at least 0, or the minimum is more than the maximum (157.6.2.2).
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        for name in ("minimum", "maximum"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ArgumentError(f"the {name} of a RangePolicy must be an int of at least 0, not {value!r:.80}")
        if self.minimum > self.maximum:
            raise ArgumentError(
                f"the minimum of a RangePolicy, {self.minimum}, is more than its maximum, {self.maximum}"
            )

    @classmethod
    def range(cls, minimum: int, maximum: int) -> RangePolicy:
        """At least ``minimum`` and at most ``maximum`` (157.11.3.7)."""
        return cls(minimum, maximum)

    @classmethod
    def exact(cls, count: int) -> RangePolicy:
        """``range(count, count)`` (157.11.3.3)."""
        return cls(count, count)

    @classmethod
    def at_least(cls, minimum: int) -> RangePolicy:
        """``range(minimum, UNLIMITED)`` (157.11.3.1)."""
        return cls(minimum, UNLIMITED)

    @classmethod
    def at_most(cls, maximum: int) -> RangePolicy:
        """``range(0, maximum)`` (157.11.3.2)."""
        return cls(0, maximum)

    @classmethod
    def none(cls) -> RangePolicy:
        """No events: ``range(0, 0)`` (157.11.3.6)."""
        return cls(0, 0)

    @classmethod
    def unlimited(cls) -> RangePolicy:
        """As many as there is room for: ``range(0, UNLIMITED)`` (157.11.3.8)."""
        return cls(0, UNLIMITED)


_NONE: Final = RangePolicy.none()

#: of an event that is kept: its sequence, which no other one has, its time, its topic, its data, what it came through
_Record: TypeAlias = tuple[int, float, str, Any, tuple[object, ...]]


class _Kept:
    """What is kept of one topic."""

    __slots__ = ("is_listed", "policy", "records")

    def __init__(self, policy: RangePolicy) -> None:
        self.policy = policy
        #: the oldest first
        self.records: deque[_Record] = deque()
        #: whether it is in the heap of those that may lose an event
        self.is_listed = False


class History:
    """Events that are kept. Not thread safe: the lock of its bus guards it.

    Args:
        capacity: how many events there may be; -1: any number, 0: none.

    Raises:
        ArgumentError: it is no such number.
    """

    def __init__(self, capacity: int) -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < -1:
            raise ArgumentError(f"the capacity of the history must be an int of at least -1, not {capacity!r:.80}")
        self.capacity = capacity
        self._policies: dict[TopicFilter, RangePolicy] = {}
        self._trie: TopicTrie[TopicFilter] = TopicTrie()
        self._kept: dict[str, _Kept] = {}
        self._count = 0
        self._sequence = 0
        #: of each topic that may lose an event, once: the sequence of its oldest one, and the topic. An entry may be
        #: out of date, but then the topic has lost that event, and its next one is younger
        self._spare: list[tuple[int, str]] = []

    def __len__(self) -> int:
        """How many events are kept."""
        return self._count

    # --- policies

    def configure(self, topic_filter: TopicFilter, policy: RangePolicy) -> int:
        """Have a policy for the topics that match; see :meth:`TypedEventMonitor.configure_history_storage`."""
        if topic_filter.has_wildcard and policy.minimum and self.capacity >= 0:
            raise ArgumentError(
                f"{topic_filter.text!r} has a wildcard: no minimum can be guaranteed for any number of topics in a "
                f"history of {self.capacity} events"
            )
        room = self.capacity - sum(each.minimum for other, each in self._policies.items() if other != topic_filter)
        if self.capacity >= 0 and policy.minimum > room:
            raise HistoryFullError(
                f"{policy.minimum} events of {topic_filter.text!r} cannot be guaranteed: of {self.capacity} that the "
                f"history holds, {self.capacity - room} are guaranteed to other topics"
            )
        self._policies[topic_filter] = policy
        self._trie.add(topic_filter, topic_filter)
        self._apply(topic_filter)
        return policy.maximum if self.capacity < 0 else min(policy.maximum, room)

    def remove(self, topic_filter: TopicFilter) -> None:
        """Have no policy for that filter; what no other one keeps is gone."""
        if self._policies.pop(topic_filter, None) is not None:
            self._trie.remove(topic_filter, topic_filter)
            self._apply(topic_filter)

    def configured(self) -> dict[str, RangePolicy]:
        """The policies by filter; of several that match a topic, the one that counts comes first."""
        return {each.text: self._policies[each] for each in sorted(self._policies, key=lambda each: each.order)}

    def policy(self, topic_filter: TopicFilter) -> RangePolicy | None:
        """The policy of exactly this filter."""
        return self._policies.get(topic_filter)

    def effective(self, topic: str) -> RangePolicy:
        """The policy of a topic: that of the most specific filter."""
        found = self._trie.preferred(topic)
        return _NONE if found is None else self._policies[found]

    def _apply(self, topic_filter: TopicFilter) -> None:
        """The policies of some topics have changed."""
        dropped = []  # not let go of before all is as it should be: that may run finalizers
        for topic in [*self._kept] if topic_filter.has_wildcard else [topic_filter.text]:
            kept = self._kept.get(topic)
            if kept is not None and topic_filter.matches(topic):
                kept.policy = self.effective(topic)
                while len(kept.records) > kept.policy.maximum:
                    dropped.append(self._drop_oldest(topic, kept))
        # a minimum that has grown needs nothing: there is room for all of them
        self._spare.clear()
        for topic, kept in self._kept.items():
            kept.is_listed = False
            self._list(topic, kept)

    # --- events

    def append(self, event: PublishedEvent, policy: RangePolicy) -> object:
        """Keep an event as long as ``policy`` says, which is the effective one of its topic.

        Returns:
            What was dropped, to be let go of without the lock: it may be the last to know of data with a finalizer.
        """
        if not policy.maximum or not self.capacity:
            return None
        topic = event.topic
        event.sequence = self._sequence = self._sequence + 1
        kept = self._kept.get(topic)
        if kept is None:
            kept = self._kept.setdefault(topic, _Kept(policy))
        records = kept.records
        records.append((event.sequence, event.time, topic, event.data, event.passed))
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

    def _list(self, topic: str, kept: _Kept) -> None:
        """Put a topic in the heap if it may lose an event."""
        records = kept.records
        if len(records) > kept.policy.minimum and self.capacity >= 0:
            kept.is_listed = True
            heapq.heappush(self._spare, (records[0][0], topic))

    def _evict(self) -> object:
        """Drop the oldest event that no minimum guarantees. There is one, since the minima fit in the capacity."""
        sequence, topic = heapq.heappop(self._spare)
        kept = self._kept[topic]
        kept.is_listed = False
        records = kept.records
        is_current = records[0][0] == sequence and len(records) > kept.policy.minimum
        dropped = self._drop_oldest(topic, kept) if is_current else None
        self._list(topic, kept)
        return dropped

    def _drop_oldest(self, topic: str, kept: _Kept) -> _Record:
        dropped = kept.records.popleft()
        self._count -= 1
        if not kept.records:
            del self._kept[topic]
        return dropped

    # --- looking back

    def of(self, filters: Iterable[TopicFilter]) -> Iterator[PublishedEvent]:
        """The events of the topics that match, as they are now, the newest first; see :meth:`all`."""
        exact: set[str] = set()
        patterns = []
        for each in filters:
            if each.has_wildcard:
                patterns.append(each)
            else:
                exact.add(each.text)
        found: list[_Record] = []
        for topic in [*self._kept] if patterns else exact:
            kept = self._kept.get(topic)
            if kept is not None and (topic in exact or any(each.matches(topic) for each in patterns)):
                found += kept.records
        return _newest_first(found)

    def all(self) -> Iterator[PublishedEvent]:
        """All events as they are now, the newest first.

        They are found at once, but sorted and made when somebody goes through them, which needs no lock.
        """
        found: list[_Record] = []
        for kept in self._kept.values():
            found += kept.records
        return _newest_first(found)


def last(count: int, newest_first: Iterable[PublishedEvent]) -> list[PublishedEvent]:
    """The newest so many of some events, the oldest first."""
    return [*islice(newest_first, min(count, UNLIMITED))][::-1]


def _newest_first(records: list[_Record]) -> Iterator[PublishedEvent]:
    records.sort(reverse=True)
    for sequence, time, topic, data, passed in records:
        event = PublishedEvent(topic, data)
        event.sequence = sequence
        event.time = time
        event.passed = passed
        yield event

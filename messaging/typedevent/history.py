"""The history of events: which are kept, by topic, and for how long (157.6.1, 157.6.2).

What is kept is bounded twice: each topic by its policy, and all topics together by the capacity. When the capacity is
reached, the oldest event of all goes that its policy does not guarantee.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.topics import TopicFilter, TopicTrie
from messaging.errors import ArgumentError, HistoryFullError

if TYPE_CHECKING:
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


class _Kept:
    """What is kept of one topic."""

    __slots__ = ("events", "is_listed", "policy")

    def __init__(self, policy: RangePolicy) -> None:
        self.policy = policy
        #: the oldest first
        self.events: deque[PublishedEvent] = deque()
        #: whether it is in the heap of those that may lose an event
        self.is_listed = False

    @property
    def has_spare(self) -> bool:
        """Whether its oldest event may go."""
        return len(self.events) > self.policy.minimum


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
        room = self.capacity - sum(
            each.minimum for other, each in self._policies.items() if other != topic_filter and not other.has_wildcard
        )
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
        for topic in [*self._kept] if topic_filter.has_wildcard else [topic_filter.text]:
            kept = self._kept.get(topic)
            if kept is not None and topic_filter.matches(topic):
                kept.policy = self.effective(topic)
                while len(kept.events) > kept.policy.maximum:
                    self._drop_oldest(topic, kept)
        # a minimum that has grown needs nothing: there is room for all of them
        self._spare.clear()
        for topic, kept in self._kept.items():
            kept.is_listed = False
            self._list(topic, kept)

    # --- events

    def append(self, event: PublishedEvent, policy: RangePolicy) -> None:
        """Keep an event as long as ``policy`` says, which is the effective one of its topic."""
        self._sequence += 1
        event.sequence = self._sequence
        if not policy.maximum or not self.capacity:
            return
        kept = self._kept.get(event.topic)
        if kept is None:
            kept = self._kept[event.topic] = _Kept(policy)
        kept.events.append(event)
        self._count += 1
        if len(kept.events) > policy.maximum:
            kept.events.popleft()
            self._count -= 1
        if self.capacity >= 0:
            self._list(event.topic, kept)
            if self._count > self.capacity:
                self._evict()

    def _list(self, topic: str, kept: _Kept) -> None:
        if not kept.is_listed and kept.has_spare and self.capacity >= 0:
            kept.is_listed = True
            heapq.heappush(self._spare, (kept.events[0].sequence, topic))

    def _evict(self) -> None:
        """Drop the oldest event that no minimum guarantees. There is one, since the minima fit in the capacity."""
        while True:
            sequence, topic = heapq.heappop(self._spare)
            kept = self._kept[topic]
            kept.is_listed = False
            is_current = kept.has_spare and kept.events[0].sequence == sequence
            if is_current:
                self._drop_oldest(topic, kept)
            self._list(topic, kept)
            if is_current:
                return

    def _drop_oldest(self, topic: str, kept: _Kept) -> None:
        kept.events.popleft()
        self._count -= 1
        if not kept.events:
            del self._kept[topic]

    def of(self, filters: Iterable[TopicFilter]) -> list[PublishedEvent]:
        """The events of the topics that match, the oldest first."""
        return sorted(self._events(filters), key=lambda event: event.sequence)

    def all(self) -> list[PublishedEvent]:
        """All events, the oldest first."""
        return sorted(
            (event for kept in self._kept.values() for event in kept.events), key=lambda event: event.sequence
        )

    def _events(self, filters: Iterable[TopicFilter]) -> Iterator[PublishedEvent]:
        exact: dict[str, Any] = {}
        patterns = []
        for each in filters:
            if each.has_wildcard:
                patterns.append(each)
            else:
                exact[each.text] = None
        topics = [*self._kept] if patterns else exact
        for topic in topics:
            kept = self._kept.get(topic)
            if kept is not None and (topic in exact or any(each.matches(topic) for each in patterns)):
                yield from kept.events

"""Routes of topics: which receivers, observers and history policy apply to the events of one topic (157.3, 157.4.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from messaging.typedevent.receivers import UNHANDLED

if TYPE_CHECKING:
    from messaging.execution import Lane
    from messaging.typedevent.event import PublishedEvent
    from messaging.typedevent.history import RangePolicy
    from messaging.typedevent.monitor import Tap
    from messaging.typedevent.receivers import Receiver


class TopicRoute:
    """Cached routing of one topic: receivers, history policy, observers. Immutable.

    Args:
        handlers: receivers that match the topic, those for unhandled events included.
        policy: the history policy of the topic.
        taps: subscriptions to the monitor that may see the topic.
    """

    __slots__ = ("filtered", "is_fixed", "is_recorded", "lanes", "policy", "relays", "taps", "unhandled")

    def __init__(self, handlers: list[Receiver], policy: RangePolicy, taps: list[Tap]) -> None:
        regular = [each for each in handlers if each.kind != UNHANDLED and not each.is_relay]
        #: lanes of the receivers without a filter
        self.lanes: list[Lane] = [each.lane for each in regular if each.terms.filter is None]
        self.filtered = [each for each in regular if each.terms.filter is not None]
        self.unhandled = [each for each in handlers if each.kind == UNHANDLED]
        self.relays = [each for each in handlers if each.is_relay]
        self.policy = policy
        self.taps = taps
        self.is_recorded = bool(taps) or policy.maximum > 0
        #: whether all events go to the same lanes
        self.is_fixed = bool(self.lanes) and not (self.filtered or self.relays)

    def lanes_for(self, event: PublishedEvent) -> list[Lane]:
        """Return the lanes that ``event`` goes to; without any, those for unhandled events (157.4.4)."""
        if self.is_fixed:
            return self.lanes
        if self.relays:
            return [*self._handlers_for(event), *(each.lane for each in self.relays if each.accepts(event))]
        return self._handlers_for(event)

    def _handlers_for(self, event: PublishedEvent) -> list[Lane]:
        if self.filtered:
            lanes = [*self.lanes, *(each.lane for each in self.filtered if each.accepts(event))]
            if lanes:
                return lanes
        elif self.lanes:
            return self.lanes
        return [each.lane for each in self.unhandled if each.accepts(event)]

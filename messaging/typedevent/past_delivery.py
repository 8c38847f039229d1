"""Past events of other processes for handlers that were registered before they arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from messaging.dispatch import TopicPermission
from messaging.typedevent.receivers import UNHANDLED, BusRoute, EventReceiver

if TYPE_CHECKING:
    from messaging.dispatch import Dispatcher
    from messaging.execution import Lane
    from messaging.typedevent.event import PublishedEvent


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

"""Posted events on their way: one queue for all handlers, and a lane for each handler that needs no order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from messaging.execution import ThreadLane

if TYPE_CHECKING:
    from messaging.eventadmin.event import Event
    from messaging.execution import Lane, Pool

#: a posted event for one handler: its inbox, the era of the inbox when the event was posted, the event, and whether it
#: was posted while a log event was handled
PostedItem: TypeAlias = "tuple[EventInbox, int, Event, bool]"


class PostedQueue(ThreadLane):
    """The posted events of all ordered handlers: each event goes to all of its handlers before the next one does."""

    def __init__(self, pool: Pool, name: str) -> None:
        super().__init__(self._deliver, pool, name, timeout=0, stalled=self._pass_over)
        #: of the handler that has the event being delivered
        self._current: EventInbox | None = None

    def waiting_by_inbox(self) -> Counter[EventInbox]:
        """Return the number of waiting events of each handler."""
        items = [item for item in self.items() if type(item) is tuple]
        return Counter(inbox for inbox, era, _, _ in items if inbox.era == era)

    def _deliver(self, item: PostedItem) -> None:
        inbox, era, event, is_quiet = item
        if inbox.era == era:
            self._current = inbox
            self.timeout = timeout = inbox.timeout
            inbox.receive(event, is_quiet, timeout)

    def _pass_over(self, _: Lane) -> None:
        """Continue with the next handler, on another thread, since the current one does not return (5.3.2)."""
        inbox = self._current
        try:
            if inbox is not None:
                inbox.stalled(self.timeout)
        finally:
            self.restart()


class EventInbox:
    """The posted events of one handler: in the queue of all, or in a lane of its own if it needs no order.

    The dispatcher's lock guards its changes.

    Args:
        queue: the queue of all.
        pool: its threads deliver.
        receive: delivers an event to the handler: called with the event, whether a log event caused it, and the seconds
            that the handler may take.
        stalled: called with the seconds if the handler has not returned after them.
    """

    def __init__(
        self,
        queue: PostedQueue,
        pool: Pool,
        receive: Callable[[Event, bool, float], object],
        stalled: Callable[[float], object],
    ) -> None:
        self.receive = receive
        self.stalled = stalled
        self.lane: Lane = queue
        #: how long the handler may take for one event, seconds; 0: unlimited
        self.timeout = 0.0
        #: grows when the handler is blocked: events posted in an earlier era are not delivered
        self.era = 0
        self._queue = queue
        self._pool = pool
        #: lanes from before a change of the order that still have events; replaced as a whole
        self._earlier: list[Lane] = []
        #: dropped events that the present lane has not counted
        self._dropped_before = 0

    @property
    def lanes(self) -> list[Lane]:
        """The lanes of its own."""
        lane = self.lane
        return self._earlier if lane is self._queue else [*self._earlier, lane]

    @property
    def dropped(self) -> int:
        """Number of events that found no room, or waited when the handler was blocked."""
        return self._dropped_before + (0 if self.lane is self._queue else self.lane.dropped)

    def count_dropped(self) -> None:
        """Count an event that found no room in the queue."""
        self._dropped_before += 1

    def apply(self, name: str, timeout: float, *, is_ordered: bool) -> Lane:
        """Take over new terms; return the lane of events from now on. Events that wait already are delivered."""
        self.timeout = timeout
        if is_ordered != (self.lane is self._queue):
            self._dropped_before = self.dropped
            self._earlier = [each for each in self.lanes if len(each) or each.is_scheduled]
            self.lane = self._queue if is_ordered else self._new_lane(name)
        for each in self.lanes:
            each.timeout = timeout
        return self.lane

    def reopen(self, name: str) -> Lane:
        """Replace the lane that was closed when the handler was blocked; return the new one."""
        self._dropped_before = self.dropped
        self._earlier = []
        if self.lane is not self._queue:
            self.lane = self._new_lane(name)
        return self.lane

    def _new_lane(self, name: str) -> Lane:
        return ThreadLane(self._receive_unordered, self._pool, name, timeout=self.timeout, stalled=self._stalled)

    def _stalled(self, lane: Lane) -> None:
        self.stalled(lane.timeout)
        self._dropped_before += lane.close()  # an earlier lane: blocking the handler has closed the present one

    def _receive_unordered(self, item: tuple[Event, bool]) -> None:
        self.receive(*item, self.timeout)

    def discard(self) -> int:
        """Drop the events that wait; return how many. The queue passes over them when their turn comes."""
        waiting = self._queue.waiting_by_inbox()[self]
        self.era += 1
        lost = waiting + sum(each.close() for each in self.lanes)
        self._dropped_before += lost
        return lost

    def close(self) -> None:
        """Drop the events in the lanes of its own: the handler is removed."""
        for each in self.lanes:
            each.close()

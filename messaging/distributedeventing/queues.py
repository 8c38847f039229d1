"""The queue of one consumer object: bounded, in order, and delayed by back-pressure (RFC 214 5.2.1).

**Threads.** Any thread puts. A delivery thread of the pool delivers, one event at a time. No thread waits for a delay.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Final

from messaging.execution import Lane, Pool, ThreadLane, clock, engine

#: item of the lane: one queued event may be delivered
_TOKEN: Final = object()


@dataclass(slots=True, eq=False)
class QueuedEvent:
    """One event in one queue.

    Attributes:
        event: the event; ``None`` for a barrier.
        over: called once, when the event was delivered or dropped.
        is_last: whether the consumer object is released after it.
    """

    event: Any
    over: Callable[[], object] | None = None
    _: KW_ONLY
    is_last: bool = False

    def end(self) -> None:
        """Call ``over``, unless that was done."""
        over, self.over = self.over, None
        if over is not None:
            over()


class ConsumerQueue:
    """A bounded FIFO queue in front of one consumer object. Thread safe.

    Every event adds a token to the lane of the queue; a token delivers one event. During a delay tokens have no effect;
    at its end there is one for each event that waits.

    Args:
        deliver: called with an event, or with a queued event; returns the delay before the next one, seconds; never
            raises.
        pool: its threads deliver.
        name: of the consumer, for the log.
        timeout: time limit of one event, seconds; 0: none.
        stalled: called if an event exceeds it.
        limit: maximum number of queued events.
    """

    def __init__(
        self,
        deliver: Callable[[Any], float],
        pool: Pool,
        name: str,
        *,
        timeout: float,
        stalled: Callable[[Lane], object],
        limit: int,
    ) -> None:
        self._deliver = deliver
        self._limit = limit
        #: queued events, or just the events of which nothing has to be known but themselves
        self._events: deque[Any] = deque()
        self._lock = threading.Lock()  # guards the end of the queue: after it, nothing is added
        #: whether nothing may be added any more
        self.has_ended = False
        self._is_delayed = False
        self._lane = ThreadLane(self._run, pool, name, timeout=timeout, stalled=stalled)

    def __len__(self) -> int:
        return len(self._events)

    # --- like a lane, for flushing and closing

    @property
    def is_scheduled(self) -> bool:
        """Return whether an event is being delivered, or waits."""
        return self._lane.is_scheduled or bool(self._events)

    @property
    def is_closed(self) -> bool:
        """Return whether the queue was closed."""
        return self._lane.is_closed

    def when_done(self, reached: Callable[[], object]) -> None:
        """Call ``reached`` when every earlier event was delivered or dropped."""
        barrier = QueuedEvent(None, reached)
        with self._lock:
            is_open = not self._lane.is_closed
            if is_open:  # also after the last event was added: it is not delivered yet
                self._events.append(barrier)
        if is_open:
            self._lane.put(_TOKEN)
        if self._lane.is_closed:
            self.close()  # it was closed meanwhile: drop the barrier, too
            barrier.end()

    # --- events

    def put(self, queued: Any, limit: float | None = None, *, is_delivered_now: bool = True) -> bool:
        """Add an event; return ``False`` if the queue has ended, or has ``limit`` events (by default, its limit).

        With ``is_delivered_now=False`` the caller calls :meth:`deliver` later, once for several events: a delivery
        thread that is quick would be woken for each of them.
        """
        with self._lock:
            if self.has_ended or len(self._events) >= (self._limit if limit is None else limit):
                return False
            self._events.append(queued)
        if is_delivered_now:
            self._lane.put(_TOKEN)
        return True

    def deliver(self, events: int) -> None:
        """Deliver events that were added with ``is_delivered_now=False``."""
        self._lane.put_all([_TOKEN] * events)

    def end(self, last: QueuedEvent, *, at_once: bool = False) -> int:
        """Add ``last``, and nothing after it; drop ``last`` if the queue has ended.

        With ``at_once`` the events that wait are dropped before; the number of dropped events is returned.
        """
        dropped: list[Any] = []
        with self._lock:
            was_ended, self.has_ended = self.has_ended, True
            if was_ended:
                dropped = [last]
            else:
                if at_once:
                    dropped = [*self._events]
                    self._events.clear()
                self._events.append(last)
        if not was_ended:
            self._lane.put(_TOKEN)
        return _end_all(dropped)

    def close(self) -> int:
        """Drop the events that wait, and deliver nothing more; return how many events were dropped."""
        with self._lock:
            self.has_ended = True
        self._lane.close()  # first: a barrier that comes meanwhile is dropped here, or finds the lane closed
        with self._lock:
            dropped = [*self._events]
            self._events.clear()
        return _end_all(dropped)

    def _run(self, _: object) -> None:
        if self._is_delayed:
            return
        try:
            queued = self._events.popleft()
        except IndexError:
            return
        if queued.__class__ is QueuedEvent and queued.event is None:
            queued.end()
            return
        delay = self._deliver(queued)
        if delay > 0 and not self._lane.is_closed:
            self._is_delayed = True
            engine().call(partial(clock.call_later, engine().loop, delay, self._resume))

    def _resume(self) -> None:
        """End a delay. On the loop."""
        self._is_delayed = False
        for _ in range(len(self._events)):
            self._lane.put(_TOKEN)


def _end_all(dropped: list[Any]) -> int:
    """Call what waits for events that were dropped; return the number of events, without barriers."""
    events = 0
    for each in dropped:
        if isinstance(each, QueuedEvent):
            each.end()
            events += each.event is not None
        else:
            events += 1
    return events

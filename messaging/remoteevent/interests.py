"""Registrations of interest at a generator: each with its lease, its queue and its delivery (EV.2.1)."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from messaging.leases import GrantedLease
    from messaging.remoteevent.delivery import Delivery
    from messaging.remoteevent.event import EventId, RemoteEvent


class MemoryQueue:
    """A bounded queue of events in memory; an ``EventQueue``. When it is full, the oldest event is dropped.

    Any thread puts; one thread at a time reads.

    Args:
        limit: events that may wait.
        handback: of the registration; each event gets it when it is read.
    """

    def __init__(self, limit: int, handback: Any = None) -> None:
        self._limit = limit
        self._handback = handback
        self._lock = threading.Lock()  # guards the following
        self._events: deque[RemoteEvent] = deque()
        #: numbers of events that left the queue, and that had left it when the last peek, or settled part of it, ended
        self._left = self._read = 0

    def put(self, event: RemoteEvent) -> bool:
        """Add an event; return whether the oldest one was dropped for it."""
        with self._lock:
            is_full = len(self._events) >= self._limit
            if is_full:
                self._events.popleft()
                self._left += 1
            self._events.append(event)
        return is_full

    def peek(self, most: int) -> list[RemoteEvent]:
        """See ``EventQueue``."""
        with self._lock:
            self._read = self._left
            events = list(islice(self._events, most))
        if self._handback is None:
            return events
        return [event.with_handback(self._handback) for event in events]

    def settle(self, count: int) -> None:
        """See ``EventQueue``. Events that were dropped meanwhile count among the settled ones."""
        with self._lock:
            self._read += count
            while self._left < self._read and self._events:
                self._events.popleft()
                self._left += 1

    def __len__(self) -> int:
        return len(self._events)


class Interest:
    """One registration at a generator.

    Attributes:
        event_id: kind of the events, as registered.
        listener: as registered.
        handback: in the form in which it travels.
        after: sequence number of the last event before the registration.
        lease: of the registration; set when it is granted.
        delivery: passes the events to the listener; set when it begins.
        queue: of a generator without a disk.
    """

    __slots__ = ("after", "delivery", "event_id", "handback", "lease", "listener", "queue")

    lease: GrantedLease
    delivery: Delivery

    def __init__(self, event_id: EventId, listener: Any, handback: Any, after: int = 0) -> None:
        self.event_id = event_id
        self.listener = listener
        self.handback = handback
        self.after = after
        self.queue: MemoryQueue | None = None

    def stop(self) -> None:
        """Stop the delivery. A lease may end before its delivery has begun."""
        delivery: Delivery | None = getattr(self, "delivery", None)
        if delivery is not None:
            delivery.close()

"""The viewers of the page: server-sent events to each.

A viewer that is slower than the events gets the newest state of each process, not every one.

**Threads.** One thread puts events, and each viewer takes them on the thread of its connection.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, Final

from messaging.execution import Flag

#: viewers at a time
MAX_VIEWERS: Final = 16


def event(name: str, value: Any) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


class Viewer:
    """What one viewer has not been sent yet: the newest event of each topic. Thread safe; one thread takes."""

    __slots__ = ("_lock", "_pending", "_wake", "is_ended")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        self._pending: dict[str, bytes] = {}
        self._wake = Flag()
        self.is_ended = False

    def put(self, topic: str, data: bytes) -> None:
        """Replace the pending event of a topic."""
        with self._lock:
            self._pending[topic] = data
            self._wake.set()

    def end(self) -> None:
        """End the stream: the server stops."""
        self.is_ended = True
        self._wake.set()

    def take(self, timeout: float) -> list[bytes]:
        """Wait for events for at most ``timeout`` seconds, and return the pending ones."""
        self._wake.wait(timeout)
        with self._lock:
            if not self.is_ended:
                self._wake.clear()
            pending, self._pending = self._pending, {}
        return [*pending.values()]


class Viewers:
    """All viewers, and the newest event of each topic, which a new viewer gets first. Thread safe.

    Attributes:
        dropped: number of viewers that were too slow.
        refused: number of viewers for whom there was no room.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        self._viewers: set[Viewer] = set()
        self._newest: dict[str, bytes] = {}
        self._is_closed = False
        self.dropped = 0
        self.refused = 0

    def put(self, topic: str, data: bytes) -> None:
        """Send an event to all viewers, and to new ones."""
        with self._lock:
            self._newest[topic] = data
            for each in self._viewers:
                each.put(topic, data)

    def remove(self, topic: str, data: bytes) -> None:
        """Send the last event of a topic: new viewers do not get it."""
        with self._lock:
            self._newest.pop(topic, None)
            for each in self._viewers:
                each.put(topic, data)

    def join(self) -> Viewer | None:
        """Return a new viewer; ``None``: there is no room for it."""
        with self._lock:
            if len(self._viewers) >= MAX_VIEWERS or self._is_closed:
                self.refused += 1
                return None
            viewer = Viewer()
            for topic, data in self._newest.items():
                viewer.put(topic, data)
            self._viewers.add(viewer)
            return viewer

    def leave(self, viewer: Viewer, *, is_dropped: bool = False) -> None:
        """Forget a viewer; count it as dropped if it was too slow."""
        with self._lock:
            self._viewers.discard(viewer)
            self.dropped += is_dropped

    def close(self) -> None:
        """End the streams of all viewers."""
        with self._lock:
            self._is_closed = True
            for each in self._viewers:
                each.end()

    def counts(self) -> Mapping[str, int]:
        """Return the number of viewers, of dropped and of refused ones."""
        with self._lock:
            return {"viewers": len(self._viewers), "dropped": self.dropped, "refused": self.refused}

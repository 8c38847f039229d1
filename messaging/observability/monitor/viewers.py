"""The viewers of the page: server-sent events to each. On the event loop of the server.

A viewer that is slower than the events gets the newest state of each process, not every one. A viewer that takes
nothing for some seconds is dropped, and counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from messaging.execution import clock

#: viewers at a time
MAX_VIEWERS: Final = 16
#: a viewer that has not taken an event for this long is dropped, seconds
SLOW_SECONDS: Final = 10.0


def event(name: str, value: Any) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


class SlowViewerError(Exception):
    """A viewer has not taken an event for ``SLOW_SECONDS``."""


class Viewer:
    """What one viewer has not been sent yet: the newest event of each topic."""

    __slots__ = ("_pending", "_wake", "is_ended")

    def __init__(self) -> None:
        self._pending: dict[str, bytes] = {}
        self._wake = asyncio.Event()
        self.is_ended = False

    def put(self, topic: str, data: bytes) -> None:
        """Replace the pending event of a topic."""
        self._pending[topic] = data
        self._wake.set()

    def end(self) -> None:
        """End the stream: the server stops."""
        self.is_ended = True
        self._wake.set()

    async def take(self) -> list[bytes]:
        """Wait for events, and return those that are pending."""
        await self._wake.wait()
        self._wake.clear()
        pending, self._pending = self._pending, {}
        return [*pending.values()]


class Viewers:
    """All viewers, and the newest event of each topic, which a new viewer gets first.

    Args:
        most: number of viewers.
        slow_seconds: see :class:`SlowViewerError`.

    Attributes:
        dropped: number of viewers that were too slow.
        refused: number of viewers for whom there was no room.
    """

    def __init__(self, most: int = MAX_VIEWERS, slow_seconds: float = SLOW_SECONDS) -> None:
        self._most = most
        self._slow_seconds = slow_seconds
        self._viewers: set[Viewer] = set()
        self._newest: dict[str, bytes] = {}
        self._is_closed = False
        self.dropped = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._viewers)

    def put(self, topic: str, data: bytes) -> None:
        """Send an event to all viewers, and to new ones."""
        self._newest[topic] = data
        for each in self._viewers:
            each.put(topic, data)

    def remove(self, topic: str, data: bytes) -> None:
        """Send the last event of a topic: new viewers do not get it."""
        self._newest.pop(topic, None)
        for each in self._viewers:
            each.put(topic, data)

    def join(self) -> Viewer | None:
        """Return a new viewer; ``None``: there is no room for it."""
        if len(self._viewers) >= self._most or self._is_closed:
            self.refused += 1
            return None
        viewer = Viewer()
        for topic, data in self._newest.items():
            viewer.put(topic, data)
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Forget a viewer."""
        self._viewers.discard(viewer)

    def close(self) -> None:
        """End the streams of all viewers."""
        self._is_closed = True
        for each in self._viewers:
            each.end()

    async def send(self, send: Callable[[], Awaitable[None]]) -> None:
        """Have one event sent to a viewer, within ``slow_seconds``; otherwise count the viewer as dropped.

        Raises:
            SlowViewerError: it did not take the event.
        """
        try:
            async with clock.timeout(self._slow_seconds):
                await send()
        except TimeoutError:
            self.dropped += 1
            raise SlowViewerError from None

    def counts(self) -> Mapping[str, int]:
        """Return the number of viewers, of dropped and of refused ones."""
        return {"viewers": len(self._viewers), "dropped": self.dropped, "refused": self.refused}

"""The position of a subscription in a stream, which outlives its connections."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime

from messaging.execution import clock
from messaging_adapters.amqp.extensions import seconds_of


class StreamPosition:
    """The position at which reading begins, and continues after a loss: after the last message settled without a gap.

    Args:
        start: the first position; a checked ``streamOffset``.
    """

    def __init__(self, start: str | int | float) -> None:
        self._start = start
        #: the first offset that is not known to be settled; ``None`` before the first delivery
        self.next: int | None = None
        self._since: float | None = None
        #: delivery tag and offset of the deliveries on this connection, from the first unsettled one
        self._delivered: deque[tuple[int, int]] = deque()

    def attach(self) -> str | int | datetime:
        """Start reading on a new connection, and return the value of the argument ``x-stream-offset``."""
        self._delivered.clear()
        if self.next is not None:
            return self.next
        start = self._start
        if self._since is None:
            self._since = clock.wall()
        elif isinstance(start, str) and start != "first":
            # Nothing was delivered yet, and messages published since must not be missed: the end of the stream, or
            # one hour before now, has moved since the first connection.
            start = self._since if start in ("next", "last") else self._since - seconds_of(start)
        return datetime.fromtimestamp(max(0.0, start), UTC) if isinstance(start, float) else start

    def arrived(self, tag: int, offset: int) -> None:
        """Record a delivery. Tags and offsets rise."""
        if self.next is None:
            self.next = offset
        self._delivered.append((tag, offset))

    def settled(self, floor: int) -> None:
        """Record that all deliveries up to the tag ``floor`` are settled."""
        delivered = self._delivered
        while delivered and delivered[0][0] <= floor:
            self.next = delivered.popleft()[1] + 1

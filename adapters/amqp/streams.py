"""How far a subscription has read a stream: it outlives the connections it reads over."""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime

from adapters.amqp.extensions import seconds_of


class StreamPosition:
    """Where reading begins, and goes on after a loss: behind everything that was settled without a gap.

    Args:
        start: where it begins; a checked ``streamOffset``.
    """

    def __init__(self, start: str | int | float) -> None:
        self._start = start
        #: the first offset that is not known to be settled; ``None`` until anything was delivered
        self.next: int | None = None
        self._since: float | None = None
        #: delivery tag and offset of what was delivered on this connection, from the first that is not settled
        self._delivered: deque[tuple[int, int]] = deque()

    def attach(self) -> str | int | datetime:
        """Begin to read, on a new connection; returns the value of the argument ``x-stream-offset``."""
        self._delivered.clear()
        if self.next is not None:
            return self.next
        start = self._start
        if self._since is None:
            self._since = time.time()
        elif isinstance(start, str) and start != "first":
            # Nothing has come yet, and what was published meanwhile must not be missed: the end of the stream, or an
            # hour before now, is another place by this time.
            start = self._since if start in ("next", "last") else self._since - seconds_of(start)
        return datetime.fromtimestamp(max(0.0, start), UTC) if isinstance(start, float) else start

    def arrived(self, tag: int, offset: int) -> None:
        """A message was delivered. Tags and offsets rise."""
        if self.next is None:
            self.next = offset
        self._delivered.append((tag, offset))

    def settled(self, floor: int) -> None:
        """All deliveries up to the tag ``floor`` are settled."""
        delivered = self._delivered
        while delivered and delivered[0][0] <= floor:
            self.next = delivered.popleft()[1] + 1

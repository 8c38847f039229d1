"""Suspends reading from the broker while a consumer is behind.

Two threads that both have work take the interpreter from each other all the time. So while the buffer of a consumer is
at least half full, nothing more is read from the broker, as long as the consumer takes messages at a good rate.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from messaging.connection import Connection, Subscribed
    from messaging.receiving.counters import StreamCounters

#: a buffer with so many messages, or half full, suspends reading; a quarter of that resumes it
FULL: Final = 512
#: how long a consumer is given to catch up, seconds; again only if it takes ``FULL`` messages in that time
CATCH_UP_SECONDS: Final = 0.05


class ReadThrottle:
    """Suspends reading while one consumer is behind. On the engine's loop, unless an attribute says otherwise.

    Args:
        connection: reads.
        owner: the subscription.
        counters: of the subscription: how many messages the consumer has taken.

    Attributes:
        is_throttled: reading is suspended. Any thread may read it, and clear it when at most :attr:`low` messages are
            buffered.
        high: number of buffered messages from which on to call :meth:`suspend`.
        low: see ``is_throttled``.
        catches_up: the consumer caught up when it was last given time, or has emptied its buffer since.
    """

    __slots__ = ("_connection", "_counters", "_owner", "_timer", "catches_up", "high", "is_throttled", "low")

    def __init__(self, connection: Connection, owner: Subscribed, counters: StreamCounters) -> None:
        self._connection = connection
        self._owner = owner
        self._counters = counters
        self._timer: asyncio.TimerHandle | None = None
        self.high = min(max(1, owner.spec.options.buffer_size // 2), FULL)
        self.low = self.high // 4
        self.is_throttled = False
        self.catches_up = True

    def suspend(self) -> None:
        """Suspend reading if the consumer catches up."""
        if self.catches_up and not self.is_throttled:
            self._give_time()
            self.is_throttled = True
            self._connection.reading.suspend(self._owner)

    def release(self) -> None:
        """Resume reading. Idempotent."""
        self.is_throttled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._connection.reading.resume(self._owner)

    def _give_time(self) -> None:
        delivered = self._counters.delivered
        self._timer = self._connection.engine.loop.call_later(CATCH_UP_SECONDS, self._check_progress, delivered)

    def _check_progress(self, delivered: int) -> None:
        """Give the consumer more time if it made progress; otherwise resume reading."""
        if self.is_throttled and self._counters.delivered - delivered >= FULL:
            self._give_time()
            return
        self.catches_up = not self.is_throttled
        self.release()

"""When to suspend reading from the broker because a consumer is behind.

Two threads that both have work take the interpreter from each other all the time. So while the buffer of a consumer is
at least half full, nothing more is read from the broker, as long as the consumer takes messages at a good rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

#: a buffer with so many messages, or half full, suspends reading; a quarter of that resumes it
FULL: Final = 512
#: how long a consumer is given to catch up, seconds; again only if it takes ``FULL`` messages in that time
CATCH_UP_SECONDS: Final = 0.05


class ReadThrottle:
    """Suspends reading while one consumer is behind. On the engine's loop, unless an attribute says otherwise.

    Args:
        loop: the engine's.
        capacity: bound of the consumer's buffer, messages.
        taken: returns how many messages the consumer has taken so far; from any thread.
        suspend, resume: suspend and resume reading. ``resume`` is idempotent.

    Attributes:
        is_throttled: reading is suspended. Any thread may read it, and clear it when at most :attr:`low` messages are
            buffered.
        low: see there.
    """

    __slots__ = ("_catches_up", "_high", "_loop", "_resume", "_suspend", "_taken", "_timer", "is_throttled", "low")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        capacity: int,
        taken: Callable[[], int],
        suspend: Callable[[], object],
        resume: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._taken = taken
        self._suspend = suspend
        self._resume = resume
        self._high = min(max(1, capacity // 2), FULL)
        self.low = self._high // 4
        self.is_throttled = False
        #: the consumer caught up when it was last given time
        self._catches_up = True
        self._timer: asyncio.TimerHandle | None = None

    def on_empty(self) -> None:
        """Note that the buffer was empty: the consumer catches up."""
        self._catches_up = True

    def on_buffered(self, count: int) -> None:
        """Suspend reading if ``count`` buffered messages are many, and the consumer catches up."""
        if count >= self._high and self._catches_up and not self.is_throttled:
            self._give_time()
            self.is_throttled = True
            self._suspend()

    def release(self) -> None:
        """Resume reading. Idempotent."""
        self.is_throttled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._resume()

    def _give_time(self) -> None:
        self._timer = self._loop.call_later(CATCH_UP_SECONDS, self._judge, self._taken())

    def _judge(self, taken: int) -> None:
        """Give the consumer more time if it made progress; otherwise resume reading."""
        if self.is_throttled and self._taken() - taken >= FULL:
            self._give_time()
            return
        self._catches_up = not self.is_throttled
        self.release()

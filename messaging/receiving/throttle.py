"""Suspends reading from the broker while a consumer is behind.

Two threads that both have work take the interpreter from each other all the time. So while the buffer of a consumer is
at least half full, nothing more is read from the broker, as long as the consumer takes messages at a good rate.

Without it a burst of QoS 0 messages is lost only because it comes faster than threads can switch: see
``test_a_burst_without_acknowledgement_loses_nothing_as_reading_waits`` in
``tests/receiving/test_batches.py``, which fails without it. Of bursts of 20,000 messages from mosquitto to an observer,
on two busy cores, 9 % were dropped without it, 2 % with it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from messaging.execution import clock

if TYPE_CHECKING:
    from messaging.receiving.receiver import Receiver

#: a buffer with so many messages, or half full, suspends reading; a quarter of that resumes it
FULL: Final = 512
#: how long a consumer is given to catch up, seconds; again only if it takes ``FULL`` messages in that time
CATCH_UP_SECONDS: Final = 0.05


class ReadThrottle:
    """Suspends reading while one consumer is behind. On the engine's loop, unless an attribute says otherwise.

    Attributes:
        is_throttled: reading is suspended. Any thread may read it, and clear it when at most :attr:`low` messages are
            buffered.
        high: number of buffered messages from which on to call :meth:`suspend`.
        low: see ``is_throttled``.
        catches_up: the consumer caught up when it was last given time, or has emptied its buffer since.
    """

    def __init__(self, owner: Receiver) -> None:
        self._owner = owner
        self._reading = owner.connection.reading
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
            self._reading.suspend(self._owner)

    def release(self) -> None:
        """Resume reading. Idempotent."""
        self.is_throttled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._reading.resume(self._owner)

    def _give_time(self) -> None:
        loop, delivered = self._owner.connection.engine.loop, self._owner.counters.delivered
        self._timer = clock.call_later(loop, CATCH_UP_SECONDS, self._check_progress, delivered)

    def _check_progress(self, delivered: int) -> None:
        """Give the consumer more time if it made progress; otherwise resume reading."""
        if self.is_throttled and self._owner.counters.delivered - delivered >= FULL:
            self._give_time()
            return
        self.catches_up = not self.is_throttled
        self.release()

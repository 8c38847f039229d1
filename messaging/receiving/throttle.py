"""When to read from a broker again while a consumer has much to do.

Two threads that both have work take the interpreter from each other all the time. So while a consumer has
many messages to go nothing more is read, as long as it takes them at a good rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

#: a buffer with so many messages, or half full, is crowded; with a quarter of that it is not any more
CROWD: Final = 512
#: how long a consumer is given to catch up, seconds: longer only if it takes so many in that time
CROWD_SECONDS: Final = 0.05


class Crowd:
    """Gives one consumer time to catch up. On the engine's loop, but for what says otherwise.

    Args:
        loop: the engine's.
        capacity: messages that its buffer holds.
        taken: how many it has taken so far; from any thread.
        suspend, resume: have nothing more read, and have it read again. ``resume`` is idempotent.

    Attributes:
        is_there: nothing more is read; any thread may look, and withdraw it when :attr:`few` messages are left.
        few: see there.
    """

    __slots__ = ("_catches_up", "_loop", "_many", "_resume", "_suspend", "_taken", "_timer", "few", "is_there")

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
        self._many = min(max(1, capacity // 2), CROWD)
        self.few = self._many // 4
        self.is_there = False
        #: whether it did when it was given time
        self._catches_up = True
        self._timer: asyncio.TimerHandle | None = None

    def nobody(self) -> None:
        """The buffer was empty: it catches up."""
        self._catches_up = True

    def count(self, waiting: int) -> None:
        """So many messages wait."""
        if waiting >= self._many and self._catches_up and not self.is_there:
            self._wait()
            self.is_there = True
            self._suspend()

    def disperse(self) -> None:
        """There is none any more, or it is not waited for. Idempotent."""
        self.is_there = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._resume()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(CROWD_SECONDS, self._look, self._taken())

    def _look(self, taken: int) -> None:
        """The consumer has had its time; it gets more if it makes progress."""
        if self.is_there and self._taken() - taken >= CROWD:
            self._wait()
            return
        self._catches_up = not self.is_there
        self.disperse()

"""When to read from a broker again: at once, or in a moment, when a read is worth more.

**Pieces.** A broker writes message by message, and a client that is waiting reads them one by one: each read, each turn
of the loop and each hand-over to a consumer's thread is then for the sake of a few bytes. Under load that is most of
the work, on both sides. So where much arrives in small pieces, reading waits for a millisecond, as network cards do
with their interrupts; and stops doing so when that does not bring enough, since the broker may be the one that waits.

**Crowds.** Two threads that both have work take the interpreter from each other all the time. So while a consumer has
many messages to go nothing more is read, as long as it takes them at a good rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

#: how long reading waits, seconds: the shortest that event loops can
PAUSE: Final = 0.001
#: packets that make a read worth while
WORTH: Final = 32
#: packets a second from which on it may be worth waiting
BUSY: Final = 10_000
#: how long to look before that is said, seconds
_LOOK: Final = 0.01
#: how long not to try it again if it brought too little: doubled each time, seconds
_FIRST_BREAK: Final = 0.1
_LONGEST_BREAK: Final = 10.0
#: a buffer with so many messages, or half full, is crowded; with a quarter of that it is not any more
CROWD: Final = 512
#: how long a consumer is given to catch up, seconds: longer only if it takes so many in that time
CROWD_SECONDS: Final = 0.05


class ReadPacer:
    """Decides for one connection. Not thread safe."""

    __slots__ = ("_break", "_count", "_not_before", "_paced", "_reads", "_since")

    def __init__(self) -> None:
        self._paced = False
        self._reads = self._count = 0
        self._since = self._not_before = 0.0
        self._break = _FIRST_BREAK

    def pause_after(self, count: int, now: float) -> float:
        """How long to wait before reading again, seconds; 0 for not at all.

        Args:
            count: packets in what was read just now.
            now: monotonic seconds.
        """
        if self._paced:
            if count >= WORTH:
                self._break = _FIRST_BREAK
                return PAUSE
            self._paced = False
            self._not_before = now + self._break
            self._break = min(self._break * 2, _LONGEST_BREAK)
            self._look(now)
            return 0.0
        self._reads += 1
        self._count += count
        seconds = now - self._since
        if seconds < _LOOK:
            return 0.0
        self._paced = self._count >= BUSY * seconds and self._count < WORTH * self._reads and now >= self._not_before
        self._look(now)
        return PAUSE if self._paced else 0.0

    def _look(self, now: float) -> None:
        self._since = now
        self._reads = self._count = 0


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

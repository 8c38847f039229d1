"""When to read from a broker again: at once, or in a moment, when a read is worth more.

A broker writes message by message, and a client that is waiting reads them one by one: each read, each turn
of the loop and each hand-over to a consumer's thread is then for the sake of a few bytes. Under load that is most of
the work, on both sides. So where much arrives in small pieces, reading waits for a millisecond, as network cards do
with their interrupts; and stops doing so when that does not bring enough, since the broker may be the one that waits.
"""

from __future__ import annotations

from typing import Final

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
            count: packets in the last read.
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

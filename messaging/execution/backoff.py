"""Growing pauses between attempts at one thing."""

from __future__ import annotations

from random import SystemRandom
from typing import Final

#: a random float between two bounds
jitter: Final = SystemRandom().uniform

#: doublings after which every pause is the longest one
_MAX_DOUBLINGS: Final = 64


def doubled(first: float, longest: float, count: int) -> float:
    """Return a pause that begins with ``first`` and was doubled ``count`` times, at most ``longest``."""
    return min(longest, first * 2.0 ** min(count, _MAX_DOUBLINGS))


class Backoff:
    """The pauses between attempts, seconds: each is longer than the one before, up to a bound.

    An iterator of pauses, without end. The jitter is decorrelated: it keeps clients that lost the same broker from
    reconnecting at the same time. Without jitter each pause is twice the one before.

    Args:
        shortest, longest: bounds of the pauses, seconds; with jitter the first pause may be shorter.
        has_jitter: whether the pauses are random.

    Attributes:
        pause: before the next attempt, seconds.
    """

    __slots__ = ("_base", "_has_jitter", "_longest", "_shortest", "pause")

    def __init__(self, shortest: float, longest: float, *, has_jitter: bool = True) -> None:
        self._shortest = shortest
        self._longest = max(shortest, longest)
        self._has_jitter = has_jitter
        self.reset()

    def reset(self) -> None:
        """Begin with the shortest pause again: an attempt succeeded."""
        self._base = self._shortest
        self.pause = jitter(0, self._shortest) if self._has_jitter else self._shortest

    def grow(self) -> None:
        """Make the pause longer: an attempt failed."""
        base = self._base
        self._base = self.pause = min(self._longest, jitter(self._shortest, base * 3) if self._has_jitter else base * 2)

    def __iter__(self) -> Backoff:
        """Return the iterator itself: a ``for`` loop is a loop of attempts."""
        return self

    def __next__(self) -> float:
        """Return the pause before the next attempt, and grow."""
        pause = self.pause
        self.grow()
        return pause

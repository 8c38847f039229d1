"""Growing delays between attempts to connect."""

from __future__ import annotations

from collections.abc import Iterator
from random import SystemRandom
from typing import Final

#: a random float between two bounds
jitter: Final = SystemRandom().uniform


def delays(shortest: float, longest: float) -> Iterator[float]:
    """Yield delays in seconds, without end, with decorrelated jitter.

    The jitter keeps clients that lost the same broker from reconnecting at the same time.

    Args:
        shortest, longest: bounds of the delays, seconds; the first delay may be shorter.
    """
    longest = max(shortest, longest)
    delay = shortest
    yield jitter(0, shortest)
    while True:
        delay = min(longest, jitter(shortest, delay * 3))
        yield delay

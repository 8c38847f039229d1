"""Growing delays between attempts to connect."""

from __future__ import annotations

import random
from collections.abc import Iterator


def delays(shortest: float, longest: float) -> Iterator[float]:
    """Yield delays in seconds, without end: decorrelated jitter.

    Clients that lost the same broker do not come back in step.

    Args:
        shortest, longest: bounds of the delays, seconds; the first delay may be shorter.
    """
    longest = max(shortest, longest)
    delay = shortest
    yield random.uniform(0, shortest)  # noqa: S311  # spreads load, guards nothing
    while True:
        delay = min(longest, random.uniform(shortest, delay * 3))  # noqa: S311
        yield delay

"""Deadlines of many entries, watched by one timer.

An owner (the outbox, the requests of an instance) keeps its entries in collections of its own. ``Deadlines`` calls its
scan at intervals of a twentieth of the shortest time left, at least 10 ms and at most 250 ms. So an entry expires at
most one interval late, and neither adding nor removing an entry costs a timer.

**Threads.** ``watch`` may be called from any thread; everything else, the scan included, runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from messaging.environment.signals import on_failure
from messaging.execution.clock import clock
from messaging.execution.loop import Engine

#: bounds of the interval between two scans, seconds
_SHORTEST_STEP: Final = 0.01
_LONGEST_STEP: Final = 0.25
#: scans within the shortest time left
_STEPS: Final = 20


def step_of(left: float) -> float:
    """Return the seconds until the next scan, if the earliest deadline is ``left`` seconds away."""
    return min(max(left / _STEPS, _SHORTEST_STEP), _LONGEST_STEP)


class Deadlines:
    """One timer for the deadlines of any number of entries.

    Args:
        engine: its loop runs the timer and the scan.
        timeout: the usual timeout of an entry, seconds. :meth:`watch` announces shorter ones.
        scan: called with the current monotonic time. It expires the entries whose deadline has passed, and returns the
            seconds until the earliest remaining deadline, or ``None`` if no entry is left. Its cost is proportional to
            the number of entries.
    """

    __slots__ = ("_due", "_engine", "_scan", "_shortest", "_timeout", "_timer", "is_watching")

    def __init__(self, engine: Engine, timeout: float, scan: Callable[[float], float | None]) -> None:
        self._engine = engine
        self._timeout = timeout
        self._scan = scan
        #: the shortest timeout that was announced since the last scan, or the time that was left then; seconds
        self._shortest = timeout
        #: whether a scan is scheduled, or is about to be
        self.is_watching = False
        self._timer: asyncio.TimerHandle | None = None
        #: when the timer fires, in the time of the loop
        self._due = 0.0

    def watch(self, timeout: float) -> None:
        """Watch an entry that expires ``timeout`` seconds from now. From any thread.

        Add the entry to its collection first. A scan in between forgets an entry that it does not see: the next call of
        :meth:`watch` or :meth:`start` watches it, at the interval of the usual timeout.
        """
        if timeout < self._shortest or not self.is_watching:
            with on_failure(setattr, self, "is_watching", False):  # the next entry starts the timer
                self._shortest = min(timeout, self._shortest)
                self.is_watching = True
                self._engine.call(self.start)

    def start(self) -> None:
        """Start the timer, or bring it forward if a shorter timeout was announced. On the loop."""
        self.is_watching = True
        loop = self._engine.loop
        due = clock.time_of(loop) + step_of(self._shortest)
        if self._timer is None or due < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = clock.call_at(loop, due, self.run)

    def stop(self) -> None:
        """Stop the timer; :meth:`watch` and :meth:`start` start it again. On the loop."""
        self.is_watching = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def run(self) -> None:
        """Scan now. On the loop."""
        # first: a thread that adds an entry from here on starts the timer itself
        self.stop()
        self._shortest = self._timeout
        left = self._scan(clock.monotonic())
        if left is not None:
            self._shortest = min(left, self._shortest)
            self.start()

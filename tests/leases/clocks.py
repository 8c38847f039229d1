"""A lease clock that tests set."""

from __future__ import annotations

from messaging.execution import clock


class FakeClock:
    """Seconds that pass when a test says so. It is the lease clock of the process until the end of the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        clock.boot = self

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

"""The parameters of a simulated fleet. Imports little: the list of commands loads it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

#: between two readings of a device, simulated
INTERVAL: Final = timedelta(minutes=6)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The parameters of a simulation.

    Attributes:
        seconds: how long to publish, in real time.
        rate: messages per second, of all devices together.
    """

    seed: int = 1
    devices: int = 48
    seconds: float = 25.0
    rate: float = 320.0

    @property
    def readings(self) -> int:
        """Number of readings of each device."""
        return max(1, round(self.rate * self.seconds / self.devices))

    @property
    def span(self) -> timedelta:
        """The simulated time of the run."""
        return self.readings * INTERVAL

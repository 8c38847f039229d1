"""The clock of leases, and moments of it that survive a restart of the process or of the machine.

Its seconds pass evenly, whatever happens to the wall clock. ``CLOCK_BOOTTIME`` also counts the time during which the
machine is suspended, so that a lease ends in time on a machine that slept. Where there is no such clock, the monotonic
one takes its place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from messaging.errors import DecodeError
from messaging.errors.text import brief
from messaging.execution import clock


def lease_time() -> float:
    """Return the seconds since some moment; it never goes back. From any thread."""
    return clock.boot()


def boot_id() -> str:
    """Return a text that is the same until the machine starts anew; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


_BOOT: Final = boot_id()


@dataclass(frozen=True, slots=True)
class StoredTime:
    """A moment, as a durable party stores the end of a lease. Immutable.

    As long as the machine runs, the moment is one of the lease clock, and a changed wall clock does not matter. After
    the machine was started anew it is one of the wall clock.

    Attributes:
        boot: tells whether the machine was started anew since.
        at: seconds of the lease clock; infinite for never.
        wall: seconds since the epoch.
    """

    boot: str
    at: float
    wall: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Return the moment that is ``seconds`` from now."""
        return cls(_BOOT, clock.boot() + seconds, clock.wall() + seconds)

    def remaining(self) -> float:
        """Return the seconds until the moment; 0 or less if it has passed."""
        if self.at == math.inf:
            return math.inf
        if _BOOT and self.boot == _BOOT:
            return self.at - clock.boot()
        return self.wall - clock.wall()

    def to_value(self) -> list[Any]:
        """Return the moment in portable form."""
        return [self.boot, None, None] if self.at == math.inf else [self.boot, self.at, self.wall]

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Return the moment of a portable form. Raises ``DecodeError``."""
        try:
            boot, at, wall = value
            if at is None:
                return cls(str(boot), math.inf, math.inf)
            found = cls(str(boot), float(at), float(wall))
        except (OverflowError, TypeError, ValueError):
            raise DecodeError(f"not a stored time: {brief(value)}") from None
        if math.isnan(found.at) or math.isnan(found.wall):
            raise DecodeError(f"not a stored time: {brief(value)}")
        return found

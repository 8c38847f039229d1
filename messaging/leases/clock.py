"""The clock of leases: seconds that pass evenly, whatever happens to the wall clock.

``CLOCK_BOOTTIME`` also counts the time during which the machine is suspended, so that a lease ends in time on a machine
that slept. Where there is no such clock, the monotonic one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from messaging.execution import clock

Clock = Callable[[], float]


def lease_time() -> float:
    """Return the seconds since some moment; it never goes back. From any thread."""
    return clock.boot()


def wall_time() -> float:
    """Return the seconds since the epoch. From any thread."""
    return clock.wall()


def boot_id() -> str:
    """Return a text that is the same until the machine starts anew; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""

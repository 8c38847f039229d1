"""The clock of leases: seconds that pass evenly, whatever happens to the wall clock.

``CLOCK_BOOTTIME`` also counts the time during which the machine is suspended, so that a lease ends in time on a machine
that slept. Where there is no such clock, ``time.monotonic`` takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

Clock = Callable[[], float]


def _lease_clock() -> Clock:
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    if boot_time is None:
        return time.monotonic
    return lambda: time.clock_gettime(boot_time)


#: seconds since some moment; it never goes back
lease_time: Final[Clock] = _lease_clock()


def boot_id() -> str:
    """Return a text that is the same until the machine starts anew; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""

"""The world that this process is, and its scheduler: where the stand-ins of the standard library look.

Before a world begins there is a scheduler that runs nothing: locks can be acquired, and nothing may wait.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.simulation.world.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

#: the scheduler of the world
scheduler = Scheduler(random.Random(0), gap=float("inf"))
#: how far the wall clock of the current process is set off, seconds
wall_offset: Callable[[], float] = lambda: 0.0  # noqa: E731
#: the world itself
world: Any = None
#: number of objects whose hash was asked for, see ``loops``
objects_made = 0

"""Makes this process one of worlds: replaces what the standard library asks from outside.

Import this module before the project. The process cannot be used for anything else afterwards.
"""

from __future__ import annotations

import asyncio  # noqa: F401  # before its parts are replaced
import concurrent.futures.thread
import logging
import sys

from tests.simulation.world import disk, loops, network, threading_of_world

if "messaging" in sys.modules:
    raise RuntimeError("the project must be imported after the world is installed")

threading_of_world.install()
# made before: a thread that was interrupted while it holds the real one would block all others
setattr(concurrent.futures.thread, "_global_shutdown_lock", threading_of_world.Lock())  # noqa: B010
network.install()
loops.install()
disk.install()

import messaging.environment.forks  # noqa: E402
from tests.simulation.world.processes import Objects  # noqa: E402

messaging.environment.forks.objects = Objects()

import math  # noqa: E402
import time  # noqa: E402
from datetime import UTC, datetime  # noqa: E402

import messaging.execution.waiting  # noqa: E402
from messaging.execution import clock  # noqa: E402

clock.now = lambda: datetime.fromtimestamp(time.time(), UTC)
# no signal interrupts a thread of a world
messaging.execution.waiting.STEP = math.inf
logging.raiseExceptions = True

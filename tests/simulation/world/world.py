"""A world: a scheduler, a network, a disk, processes and brokers, all decided by one seed."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import traceback
import zlib
from typing import TYPE_CHECKING, Final

from tests.simulation.world import current
from tests.simulation.world.disk import Disk
from tests.simulation.world.network import Conditions, Network, Service
from tests.simulation.world.processes import Process
from tests.simulation.world.scheduler import BEGIN, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.brokers.host import Broker
    from tests.simulation.world.scheduler import Fiber, Timer

#: addresses of objects in texts, which differ from run to run
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+|\b7[ef][0-9a-f]{10}\b")
#: changes of threads after which a world counts as one that never comes to rest
MOST_SWITCHES: Final = 400_000


class PlannedError(ValueError):
    """What handlers raise because the plan says so."""


class Host:
    """What a broker of the world asks for: see ``brokers.host.Host``."""

    def __init__(self, world: World, name: str) -> None:
        self.random = world.chance(name)
        self._world = world
        self._name = name

    def now(self) -> float:
        """See ``Host``."""
        return self._world.scheduler.now

    def call_later(self, delay: float, function: Callable[[], object]) -> Timer:
        """See ``Host``."""
        return self._world.scheduler.call_later(delay, function)

    def note(self, text: str) -> None:
        """See ``Host``."""
        self._world.note(self._name, text)


class World:
    """Everything that one seed decides.

    Args:
        seed: a text. Each part of the world draws from a sequence of its own, so a change of one leaves the others.
        gap, hold_up, longest: see ``Scheduler``.
        conditions: of the network.
    """

    def __init__(
        self,
        seed: str,
        *,
        gap: float = 20.0,
        hold_up: float = 0.02,
        longest: float = 0.5,
        conditions: Conditions | None = None,
    ) -> None:
        self.seed = seed
        self.scheduler = Scheduler(self.chance("threads"), gap=gap, hold_up=hold_up, longest=longest)
        self.network = Network(self.scheduler, self.chance("network"), conditions or Conditions())
        self.disk = Disk(self.chance("disk"))
        self.processes: list[Process] = []
        #: who did what when
        self.history: list[tuple[float, str, str]] = []
        #: exceptions that left threads, and errors that the project logged as its own defects
        self.defects: list[str] = []
        self.faults: dict[str, int] = {}
        self._entropy = self.chance("entropy")
        self.scheduler.failed = self._failed

    def chance(self, name: str) -> random.Random:
        """Return a sequence of random numbers for ``name``."""
        return random.Random(f"{self.seed}/{name}")

    # --- history

    def note(self, who: str, what: str) -> None:
        """Write a line of the history."""
        text = _ADDRESS.sub("", what.replace(str(self.disk.folder), "/disk"))
        self.history.append((self.scheduler.now - BEGIN, who, text))

    def fault(self, kind: str, what: str = "") -> None:
        """Note a fault that was injected."""
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.note("fault", f"{kind} {what}".rstrip())

    def digest(self) -> str:
        """Return a text that two worlds share if, and only if, they had the same history and changes of threads."""
        text = "\n".join(f"{when:.9f} {who} {what}" for when, who, what in self.history)
        return f"{zlib.crc32(text.encode()):08x}-{self.scheduler.digest:012x}-{self.scheduler.switches}"

    def _failed(self, fiber: Fiber, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))[-1500:]
        self.defects.append(f"{type(error).__name__} left the thread {fiber.name}: {text}")

    # --- parts

    def process(self, name: str) -> Process:
        """Start a process."""
        made = Process(self, name)
        self.processes.append(made)
        return made

    def serve(self, host: str, port: int, broker: Broker) -> Service:
        """Have a broker listen."""
        return self.network.serve(host, port, broker)

    def host(self, name: str) -> Host:
        """Return what a broker asks for."""
        return Host(self, name)

    # --- running

    def begin(self) -> None:
        """Take the place of the world before. Once in a process: what was left of that one is not removed."""
        current.world = self
        current.scheduler = self.scheduler
        current.wall_offset = self._wall_offset
        random.seed(f"{self.seed}/module")
        setattr(os, "urandom", self._entropy.randbytes)  # noqa: B010  # mypy: it is a function
        setattr(random, "_urandom", self._entropy.randbytes)  # noqa: B010  # SystemRandom looks here
        gc.disable()  # it would run at moments that depend on what ran before
        logging.getLogger().addHandler(_Log(self))

    def _wall_offset(self) -> float:
        fiber = self.scheduler.current
        return 0.0 if fiber is None or fiber.process is None else fiber.process.wall_offset

    def run(self, is_over: Callable[[], bool], *, horizon: float = 86_400.0, most: int = MOST_SWITCHES) -> None:
        """Run until ``is_over()``; see ``Scheduler.run``."""
        self.scheduler.run(is_over, most=most, horizon=horizon)

    def end(self) -> None:
        """Remove the files."""
        current.world = None
        self.disk.remove()


class _Log(logging.Handler):
    """Writes what the project logs into the history. Errors with a traceback are defects."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        text = _ADDRESS.sub("", record.getMessage())
        fiber = self._world.scheduler.current
        who = "hub" if fiber is None else fiber.name
        self._world.note(
            who, f"{record.levelname} {record.name}: {text.replace(str(self._world.disk.folder), '/disk')}"[:300]
        )
        if record.levelno >= logging.ERROR and record.exc_info:
            error = record.exc_info[1]
            if not isinstance(error, PlannedError):
                trace = "".join(traceback.format_exception(error))[-1500:]
                self._world.defects.append(f"logged: {text}: {trace}"[:2500])

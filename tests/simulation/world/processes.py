"""The processes of a world: fibers, sockets, files, and the objects that there are once per process.

All run in one interpreter and share its modules. What the project keeps once per process (the engine, the workers) each
has for itself, by the table :data:`messaging.environment.forks.objects`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.world import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world.scheduler import Fiber
    from tests.simulation.world.world import World


class Process:
    """A process of a world.

    Attributes:
        objects: what there is once per process, by the functions that make it.
        threads_left: how many threads may still be started.
        wall_offset: how far its wall clock is set off, seconds.
        is_alive: false after :meth:`kill` and :meth:`end`.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.objects: dict[Callable[[], Any], Any] = {}
        self.threads_left = 1_000_000
        self.wall_offset = 0.0
        self.is_alive = True
        self._threads = 0

    def __repr__(self) -> str:
        return self.name

    def start(self, function: Callable[[], object], name: str) -> Fiber:
        """Run ``function`` on a thread of the process."""
        return self.world.scheduler.spawn(function, f"{self.name}/{name}", self)

    def kill(self, *, vanishes: bool = False) -> None:
        """End it between two instructions, as SIGKILL does: nothing of it is executed any more.

        Args:
            vanishes: its machine ends with it: brokers are not told, and writes that were not synced may be lost.
        """
        if not self.is_alive:
            return
        self.is_alive = False
        world = self.world
        for fiber in world.scheduler.fibers:
            if fiber.process is self:
                world.scheduler.crash(fiber)
        for sock in [*world.network.sockets.values()]:
            if sock.process is self:
                sock.killed(vanishes=vanishes)
        world.disk.close_all(self)
        if vanishes:
            world.disk.lose_power(self)


class Objects(dict[Any, Any]):
    """:data:`messaging.environment.forks.objects`: of whichever process is running. Outside of all: of none."""

    def _own(self) -> dict[Any, Any]:
        fiber = current.scheduler.current
        process = None if fiber is None else fiber.process
        return _outside if process is None else process.objects

    def get(self, key: Any, default: Any = None) -> Any:
        """See ``dict``."""
        return self._own().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """See ``dict``."""
        return self._own().pop(key, *default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value


_outside: dict[Any, Any] = {}

"""Runs seeds: each in a child process, forked from one that has run a program of its service and protocol.

A child therefore begins in the same state whatever ran before, and leaves nothing behind.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import logging
import os
import pkgutil
import random
import resource
import select
import signal
import sys
import traceback
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from tests.simulation import coverage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.simulation.plans import Plan
    from tests.simulation.simulation import Simulation

#: real seconds after which a run counts as one that hangs; its stack is written to standard error
LIMIT: Final = 120
#: memory by which the process of a run may grow, MiB
MEMORY: Final = 64


@dataclass(frozen=True, slots=True)
class Case:
    """A run, by what decides it.

    Attributes:
        service: its name.
        protocol: ``memory``, ``mqtt311``, ``mqtt5`` or ``amqp``.
        seed: a number.
        steps, faults: numbers of those of the plan that happen; ``None``: all.
        world: number of the world: the same plan, other choices of threads, network and brokers.
    """

    service: str
    protocol: str
    seed: int
    steps: tuple[int, ...] | None = None
    faults: tuple[int, ...] | None = None
    world: int = 0

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        text = f"{self.service}/{self.protocol}/{self.seed}"
        for name, numbers in (("steps", self.steps), ("faults", self.faults)):
            if numbers is not None:
                text += f"/{name}={','.join(map(str, numbers))}"
        return text + (f"/world={self.world}" if self.world else "")

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case of a text such as ``messages/mqtt5/17/steps=0,3/faults=1``."""
        service, protocol, seed, *rest = text.split("/")
        chosen: dict[str, Any] = {}
        for each in rest:
            name, _, numbers = each.partition("=")
            if name == "world":
                chosen[name] = int(numbers)
            else:
                chosen[name] = tuple(int(number) for number in numbers.split(",") if number)
        return cls(service, protocol, int(seed), **chosen)


@dataclass(slots=True)
class Result:
    """What a run showed.

    Attributes:
        failures: the promises that were broken.
        digest: see ``World.digest``.
        seconds: virtual time.
        steps: number of steps of the plan.
        faults: faults that were injected, by kind.
        history: if it failed, or was asked for.
        cost: processor time, seconds.
        memory: by which the process grew, MiB.
        measured: what :mod:`tests.simulation.coverage` has measured, if it was asked for.
    """

    case: str
    failures: list[str]
    digest: str = ""
    seconds: float = 0.0
    switches: int = 0
    steps: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    history: list[tuple[float, str, str]] = field(default_factory=list)
    cost: float = 0.0
    memory: float = 0.0
    measured: str = ""


@cache
def services() -> dict[str, type[Simulation]]:
    """Return all services by name: the classes with a name in the modules of :mod:`tests.simulation.services`."""
    from tests.simulation import services as package
    from tests.simulation.simulation import Simulation

    found = {}
    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        names = vars(importlib.import_module(f"{package.__name__}.{module}"))
        found |= {
            kind.name: kind
            for kind in names.values()
            if isinstance(kind, type)
            and issubclass(kind, Simulation)
            and kind.name
            and kind.__module__.endswith(module)
        }
    return found


def plan_of(case: Case) -> Plan:
    """Return the plan of a case."""
    kind = services()[case.service]
    plan = kind.make_plan(random.Random(f"{case.service}/{case.protocol}/{case.seed}"), case.protocol)
    return plan.only(case.steps, case.faults)


def run_here(case: Case, *, wants_history: bool = False) -> Result:
    """Run a case in this process, which is used up by it."""
    begin, taken = sum(os.times()[:2]), _memory()
    plan = plan_of(case)
    seed = f"{case.service}/{case.protocol}/{case.seed}" + (f"/{case.world}" if case.world else "")
    simulation = services()[case.service](seed, case.protocol, plan)
    world = simulation.world
    try:
        simulation.run()
    except Exception:  # noqa: BLE001  # of the simulation itself
        simulation.broken("the simulation failed: " + traceback.format_exc()[-3000:])
    finally:
        world.end()
    from tests.simulation.world.scheduler import BEGIN

    grown = _memory() - taken
    if grown > MEMORY:
        simulation.broken(f"memory is not bounded: {grown:.0f} MiB")
    return Result(
        str(case),
        simulation.failures,
        world.digest(),
        world.scheduler.now - BEGIN,
        world.scheduler.switches,
        len(plan.steps),
        dict(world.faults),
        world.history if simulation.failures or wants_history else [],
        sum(os.times()[:2]) - begin,
        grown,
    )


def _memory() -> float:
    """Return the most memory that this process has had, MiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def import_all() -> None:
    """Install the world, and import the project and all services."""
    # in this order: the project finds what the world has put in place
    for module in (
        "tests.simulation.world.install",
        *(f"messaging_adapters.{name}.adapter" for name in ("amqp", "memory", "mqtt")),
    ):
        importlib.import_module(module)
    services()


class Stem:
    """A process that has run the first program of a service and protocol, and is forked for each further one.

    What the first run fills, such as caches, is the same for all that follow.

    Args:
        service, protocol: of all cases that it runs.
    """

    #: the ends of pipes to other stems of this process; who inherits them would keep those stems alive
    _others: ClassVar[set[int]] = set()

    def __init__(self, service: str, protocol: str) -> None:
        wanted, self._requests = os.pipe()
        self._results, write = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(wanted)
            os.close(write)
            self._lines = os.fdopen(self._results, "r")
            self._others.add(self._requests)
            return
        with _child():
            for pipe in (self._requests, self._results, *self._others):
                os.close(pipe)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            run_here(Case(service, protocol, 0))
            faulthandler.cancel_dump_traceback_later()
            for handler in [*logging.getLogger().handlers]:
                logging.getLogger().removeHandler(handler)
            gc.collect()
            gc.freeze()
            with os.fdopen(wanted, "r") as requests:
                for line in requests:
                    case, wants_history, covers = json.loads(line)
                    _fork_and_run(Case.parse(case), wants_history, covers, write)

    def run(self, case: Case, *, wants_history: bool = False, covers: bool = False) -> Result:
        """Run a case in a process of its own, and return its result."""
        try:
            _write(self._requests, [str(case), wants_history, covers])
        except BrokenPipeError:
            return Result(str(case), [f"no program of {case.service} on {case.protocol} can run"])
        while (line := self._lines.readline()) and not line.startswith("{"):
            pass  # of a run that broke off while it wrote
        return Result(**json.loads(line)) if line else Result(str(case), ["the runs broke off"])

    def close(self) -> None:
        """End the process, after the run that goes on."""
        self._others.remove(self._requests)
        os.close(self._requests)
        self._lines.close()
        os.waitpid(self._pid, 0)


class Stems:
    """Runs cases of all services and protocols. A context manager: its processes end with it."""

    def __init__(self) -> None:
        self._stems: dict[tuple[str, str], Stem] = {}

    def run(self, case: Case, *, wants_history: bool = False, covers: bool = False) -> Result:
        """See :meth:`Stem.run`."""
        kind = case.service, case.protocol
        if kind not in self._stems:
            self._stems[kind] = Stem(*kind)
        return self._stems[kind].run(case, wants_history=wants_history, covers=covers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stem in self._stems.values():
            stem.close()


def run_all(cases: Iterable[Case], jobs: int, *, covers: bool = False) -> Iterator[Result]:
    """Run so many cases at a time, and yield their results as they come.

    The processes end when all cases have run, or when the iterator is closed.
    """
    listed = [*cases]
    pipes: dict[int, int] = {}
    for number in range(jobs):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with _child(), Stems() as stems:
                for pipe in [*pipes, read]:
                    os.close(pipe)
                for case in listed[number::jobs]:
                    _write(write, asdict(stems.run(case, covers=covers)))
        os.close(write)
        pipes[read] = pid
    rest = dict.fromkeys(pipes, b"")
    try:
        while pipes:
            ready, _, _ = select.select([*pipes], [], [])
            for pipe in ready:
                chunk = os.read(pipe, 1 << 20)
                if not chunk:
                    os.close(pipe)
                    os.waitpid(pipes.pop(pipe), 0)
                    continue
                *lines, rest[pipe] = (rest[pipe] + chunk).split(b"\n")
                for line in lines:
                    yield Result(**json.loads(line))
    finally:
        for pipe in pipes:
            os.close(pipe)
        for pid in pipes.values():
            os.waitpid(pid, 0)


def _fork_and_run(case: Case, wants_history: bool, covers: bool, pipe: int) -> None:
    """Run a case in a child process, which writes the result to ``pipe``."""
    pid = os.fork()
    if pid == 0:
        with _child():
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            result = coverage.measure(case, wants_history) if covers else run_here(case, wants_history=wants_history)
            _write(pipe, asdict(result))
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        os.write(pipe, b"\n")
        _write(pipe, asdict(Result(str(case), [f"the run did not end, or broke: status {status}"])))


@contextmanager
def _child() -> Iterator[None]:
    """End a process that was forked with the block, whatever happens: it must not go on as its parent."""
    status = 1
    # who interrupts the program interrupts the process that began it: the others end with their pipes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
        status = 0
    except BrokenPipeError:
        pass  # nobody waits for the results any more
    except BaseException:  # noqa: BLE001  # of whatever kind
        sys.stderr.write(traceback.format_exc())
        sys.stderr.flush()
    finally:
        os._exit(status)


def _write(pipe: int, what: Any) -> None:
    """Write something as a line of JSON."""
    data = memoryview(json.dumps(what).encode() + b"\n")
    while data:
        data = data[os.write(pipe, data) :]

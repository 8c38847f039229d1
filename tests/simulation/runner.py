"""Runs seeds: each in a child process, forked from one in which everything is imported and has run once.

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
import select
import sys
import traceback
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from tests.simulation import coverage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.simulation.plans import Plan
    from tests.simulation.simulation import Simulation

#: real seconds after which a run counts as one that hangs; its stack is written to standard error
LIMIT: Final = 120


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
    begin = sum(os.times()[:2])
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
    )


def import_all() -> None:
    """Install the world, and import the project and all services."""
    # in this order: the project finds what the world has put in place
    for module in (
        "tests.simulation.world.install",
        *(f"adapters.{name}.adapter" for name in ("amqp", "memory", "mqtt")),
    ):
        importlib.import_module(module)
    services()


def warm_up() -> None:
    """Import everything, and run each service once. The state of this process is that of each run to come."""
    import_all()
    for name, kind in services().items():
        for protocol in kind.protocols:
            result = run_here(Case(name, protocol, 0))
            for handler in [*logging.getLogger().handlers]:
                logging.getLogger().removeHandler(handler)
            del result
    gc.collect()
    gc.freeze()


def run_forked(case: Case, *, wants_history: bool = False, covers: bool = False) -> Result:
    """Run a case in a child process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            os.close(read)
            result = coverage.measure(case, wants_history) if covers else run_here(case, wants_history=wants_history)
            _send(write, result)
        except BaseException:  # noqa: BLE001  # of whatever kind: the child must not go on as its parent
            sys.stderr.write(traceback.format_exc())
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(write)
    data = b""
    while chunk := os.read(read, 1 << 20):
        data += chunk
    os.close(read)
    _, status = os.waitpid(pid, 0)
    if not data:
        return Result(str(case), [f"the run did not end, or broke: status {status}"])
    return Result(**json.loads(data))


def run_all(cases: Iterable[Case], jobs: int, *, covers: bool = False) -> Iterator[Result]:
    """Run cases in so many processes at a time, and yield their results as they come.

    The processes end when all cases have run, or when the iterator is closed.
    """
    listed = [*cases]
    pipes: dict[int, int] = {}
    for number in range(jobs):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read)
                for case in listed[number::jobs]:
                    _send(write, run_forked(case, covers=covers))
            except BrokenPipeError:
                pass  # the results are not wanted any more
            except BaseException:  # noqa: BLE001  # as above
                sys.stderr.write(traceback.format_exc())
            finally:
                os._exit(0)
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


def _send(pipe: int, result: Result) -> None:
    """Write a result as a line."""
    data = memoryview(json.dumps(asdict(result)).encode() + b"\n")
    while data:
        data = data[os.write(pipe, data) :]

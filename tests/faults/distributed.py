"""Distributed events under random faults: every promise of the event admin and of the connected bus is checked.

``python -m tests.faults.distributed --protocol amqp --faults 70 --seed 7`` (or ``make distributed``). Three processes
(see ``member.py``) share a private broker, each through a proxy of its own:

==========  ==========================================================================================================
process     form
==========  ==========================================================================================================
``a, b``    durable: the broker keeps their events (a session on MQTT, a queue on AMQP), and they have an outbox on the
            disk. They are killed, suspended and cut off
``c``       plain. It is suspended and cut off, and never killed: its memory and its threads are measured
==========  ==========================================================================================================

Rounds of faults alternate with quiet times, in which the members, the sources and the broker are looked at. At the end
``promises.py`` compares the ledgers with what is promised. Ends with status 1, and says why, if a promise is broken.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from messaging.testing.brokers import Broker, Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import eventually
from tests.faults import command
from tests.faults.member import HEARTBEAT, LINGER, PROGRAM
from tests.faults.promises import Fault, Findings, Lines, check
from tests.faults.scenario import OUTAGE, Lives, through

PROTOCOLS: Final = ("mqtt", "mqtt5", "amqp")
#: processes with their forms
PROCESSES: Final = {"a": "durable", "b": "durable", "c": "plain"}
#: kinds of faults with their weights; a broker takes seconds to return
FAULTS: Final = {"kill": 8, "suspend": 4, "cut": 6, "restart": 1, "crash": 1}
_ROUND: Final = 8
#: pause before a fault, and length of a suspension: mostly longer than two heartbeats; seconds
_PAUSE: Final = (0.05, 1.5)
_SUSPENDED: Final = (1.2, 2.2)
#: time for all events to arrive, and for members to see each other; seconds
_SETTLING: Final = 30.0
#: growth of the memory of a process that lives on, bytes
_MEMORY_SLACK: Final = 24 << 20
_THREAD_SLACK: Final = 8
#: looks, one in half a second, between which nothing arrives at the end
_STILL: Final = 4
#: entries of a ledger that something arrived
_ARRIVALS: Final = ("got", "session-got", "session-end", "reply")


class Process(Lives):
    """One process, with its proxy, its lives and its ledgers."""

    def __init__(self, name: str, protocol: str, broker: Broker, proxy: Proxy, folder: Path) -> None:
        super().__init__(PROGRAM, folder / f"{name}.log")
        self.name = name
        self.proxy = proxy
        self._arguments = protocol, through(proxy, broker.url), str(folder), PROCESSES[name]
        self._folder = folder
        self.begin()

    def begin(self) -> None:
        """Begin the next life, with a ledger of its own; does not wait until it is up."""
        self.start(self.name, str(self.count + 1), *self._arguments)
        self.lines = Lines(self._folder / f"{self.id}.ledger")

    @property
    def id(self) -> str:
        """Name and life."""
        return f"{self.name}.{self.count}"

    def wait_up(self) -> None:
        """Wait until it has joined."""
        eventually(lambda: self.lines.count("up"), lambda: f"{self.id} to be up: {self.errors()}", patience=OUTAGE)

    def resources(self) -> tuple[int, int]:
        """Resident memory in bytes, and the number of threads."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return int(found["VmRSS"].split()[0]) * 1024, int(found["Threads"])


@dataclass
class Outcome:
    """What a run showed."""

    kinds: Counter[str]
    findings: Findings
    problems: list[str] = field(default_factory=list)
    #: (memory, threads) of the process that was never killed, in each quiet time
    resources: list[tuple[int, int]] = field(default_factory=list)

    def __str__(self) -> str:
        memory = [each for each, _ in self.resources]
        threads = [each for _, each in self.resources]
        grown = f"memory {memory[0] >> 20} to {memory[-1] >> 20} MiB, threads {min(threads)} to {max(threads)}"
        return "\n  ".join([f"{self.kinds.total()} faults {dict(self.kinds)}; {grown}", *self.findings.lines()])


class Run:
    """One run with one broker."""

    def __init__(self, protocol: str, folder: Path, seed: int, say: Callable[[str], object] = lambda _: None) -> None:
        self._protocol = protocol
        self._folder = folder
        self._random = random.Random(seed)
        self._faults: list[Fault] = []
        self._kinds: Counter[str] = Counter()
        self._problems: list[str] = []
        self._resources: list[tuple[int, int]] = []
        self._processes: dict[str, Process] = {}
        self._say = say
        self._ended = float("inf")
        self._joins = itertools.count()
        #: bindings at RabbitMQ in the first quiet time
        self._bindings: int | None = None

    def run(self, faults: int) -> Outcome:
        """Cause so many faults, and compare."""
        with ExitStack() as stack:
            broker = stack.enter_context(self._broker())
            for name in PROCESSES:
                proxy = stack.enter_context(Proxy(broker.host, broker.port))
                process = self._processes[name] = Process(name, self._protocol, broker, proxy, self._folder)
                stack.callback(process.kill)
            for each in self._processes.values():
                each.wait_up()
            time.sleep(2 * HEARTBEAT)  # sleeps: traffic before the first fault
            self._look(broker)
            told = 0
            for start in range(0, faults, _ROUND):
                for _ in range(min(_ROUND, faults - start)):
                    self._cause(broker)
                self._look(broker)
                self._say(f"{self._kinds.total()} faults, {len(self._problems)} problems")
                for problem in self._problems[told:]:
                    self._say(f"  {problem[:500]}")
                told = len(self._problems)
            self._finish()
            self._ended = time.monotonic()
        self._grown()
        (self._folder / "faults").write_text("".join(f"{each}\n" for each in self._faults))
        findings = check(self._folder, self._faults, PROCESSES, self._protocol, self._ended)
        return Outcome(self._kinds, findings, self._problems + findings.problems, self._resources)

    def _broker(self) -> Broker:
        if self._protocol == "amqp":
            return RabbitMQ()
        return Mosquitto(["autosave_on_changes false", "autosave_interval 1"], persistence=True)

    # --- faults

    def _cause(self, broker: Broker) -> None:
        time.sleep(self._random.uniform(*_PAUSE))  # sleeps: a random moment
        kind = self._random.choices([*FAULTS], [*FAULTS.values()])[0]
        process = self._processes[self._random.choice("ab" if kind == "kill" else "abc")]
        self._kinds[kind] += 1
        fault = Fault(kind, "" if kind in ("restart", "crash") else process.id, time.monotonic())
        self._faults.append(fault)
        match kind:
            case "kill":
                process.kill()
                fault.at = time.monotonic()
                if self._random.random() < 0.5:
                    time.sleep(self._random.uniform(0.0, 2.5))  # sleeps: a random outage
                process.begin()
                process.wait_up()
            case "suspend":
                process.signal(signal.SIGSTOP)
                time.sleep(self._random.uniform(*_SUSPENDED))  # sleeps: a random outage
                process.signal(signal.SIGCONT)
            case "cut":
                process.proxy.sever()
                if self._random.random() < 0.3:
                    process.proxy.refuse()
                    time.sleep(self._random.uniform(0.1, 1.5))  # sleeps: a random outage
                    process.proxy.accept()
            case "restart":
                broker.restart()
            case "crash":
                broker.kill()
                broker.start()
        fault.over = time.monotonic()

    # --- quiet times

    def _look(self, broker: Broker) -> None:
        """Look at members, sources and the broker, with no fault under way."""
        self._wait(self._all_see_all, "every process to see every other", 10.0)
        self._resources.append(self._processes["c"].resources())
        self._sources()
        if isinstance(broker, RabbitMQ):
            self._queues(broker)

    def _wait(self, condition: Callable[[], bool], what: str, patience: float) -> None:
        try:
            eventually(condition, what, patience=patience)
        except AssertionError as error:
            self._problems.append(f"after {self._kinds.total()} faults: {error}")

    def _all_see_all(self) -> bool:
        ids = {each.id for each in self._processes.values()}
        parts = {f"{each}.{part}" for each in ids for part in ("admin", "bus")}
        return all(process.lines.seen() == parts - {f"{process.id}.admin"} for process in self._processes.values())

    def _sources(self) -> None:
        """Have a consumer join and leave; now and then it is killed."""
        holder = self._processes[self._random.choice("abc")]
        label = f"probe-{next(self._joins)}"
        holder.tell(f"join {label} sources/*")
        self._wait(lambda: self._sources_are(is_open=True), "the sources to open", 5.0)
        if holder.name != "c" and self._random.random() < 0.3:
            self._kinds["kill"] += 1
            fault = Fault("kill", holder.id, time.monotonic())
            holder.kill()
            fault.at = time.monotonic()
            holder.begin()
            holder.wait_up()
            fault.over = time.monotonic()
            self._faults.append(fault)
        else:
            self._wait(
                lambda: any(each[1:3] == ["joined", label] for each in holder.lines.all()), f"{label} to join", 5.0
            )
            holder.tell(f"leave {label}")
        self._wait(lambda: self._sources_are(is_open=False), "the sources to close", LINGER + 2 * HEARTBEAT + 4.0)

    def _sources_are(self, *, is_open: bool) -> bool:
        return all(each.lines.source_is_open() is is_open for each in self._processes.values())

    def _queues(self, broker: RabbitMQ) -> None:
        """Compare the queues and bindings with those of the first quiet time."""
        names = [line for line in broker.ctl("list_queues", "name").splitlines() if line not in ("", "name")]
        wanted = 2 * len(PROCESSES)
        if len(names) > wanted:
            self._problems.append(f"{len(names)} queues at RabbitMQ, for {wanted} members: {names}")
        bindings = broker.ctl("list_bindings", "source_name", "destination_name", "routing_key").splitlines()
        found = len([line for line in bindings if "topics" in line])
        if self._bindings is None:
            self._bindings = found
        elif found > self._bindings + 40:  # consumers that come and go have a few
            self._problems.append(f"{found} bindings at RabbitMQ, and {self._bindings} at first: {bindings}")

    def _finish(self) -> None:
        """Stop publishing, and wait until all events and sessions are confirmed, and nothing more arrives."""
        for each in self._processes.values():
            each.tell("quiet")
        end = time.monotonic() + _SETTLING
        sizes: list[int] = []
        while time.monotonic() < end:
            sizes.append(sum(each.lines.count(kind) for each in self._processes.values() for kind in _ARRIVALS))
            if (
                len(sizes) > _STILL
                and sizes[-1] == sizes[-1 - _STILL]
                and all(each.lines.all_confirmed() for each in self._processes.values())
            ):
                return
            time.sleep(0.5)  # sleeps: that nothing more arrives takes its time
        self._problems.append("events still arrive, or are not confirmed, long after the last one was published")

    def _grown(self) -> None:
        half = self._resources[len(self._resources) // 3 :]
        if len(half) > 2:
            if half[-1][0] > half[0][0] + _MEMORY_SLACK:
                self._problems.append(f"memory grew from {half[0][0] >> 20} to {half[-1][0] >> 20} MiB")
            if half[-1][1] > half[0][1] + _THREAD_SLACK:
                self._problems.append(f"threads grew from {half[0][1]} to {half[-1][1]}")


def main() -> int:
    """The command; see the module."""
    parser = command.parser(__doc__, PROTOCOLS)
    parser.add_argument("--faults", type=int, default=70)
    given = parser.parse_args()
    return command.run_all(
        given, lambda protocol, folder: Run(protocol, folder, given.seed, command.progress).run(given.faults)
    )


if __name__ == "__main__":
    sys.exit(main())

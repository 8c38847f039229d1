"""Runs contenders side by side: one process per role, one contender after the other in rotating order, several rounds.

The first run of each is a warm-up, and tells how many messages it manages: the number for the runs that count is chosen
so that they take about the same time. All runs of a case use one broker, started for it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.contenders import Contender

_ROOT: Final = Path(__file__).parent.parent
#: seconds until a process must have connected, and until it must have ended after its result
_SETUP: Final = 30.0
#: fewest messages a second that is waited for
_SLOWEST: Final = 100
#: most messages of a run, usually: beyond this they tell nothing more
_MOST: Final = 400_000


class RunError(Exception):
    """A run that yielded nothing; says why.

    Attributes:
        said: what each process wrote to standard error, with the stacks of its threads.
    """

    said: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One run: what each role said at its end; see :mod:`benchmarks.peers.job`."""

    count: int
    said: dict[str, dict[str, Any]]
    #: processor time that the broker took meanwhile, seconds
    broker_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Messages a second: of the last role, from the start of the first (``publish`` before ``subscribe``).

        Or requests a second.
        """
        roles = sorted(self.said)
        first, last = self.said[roles[0]], self.said[roles[-1]]
        if "request" in self.said:
            last = first  # it has the replies
        messages = last.get("received", self.count)
        return float(messages / (last["end"] - first["start"])) if messages else 0.0

    @property
    def lost(self) -> int:
        """Messages that did not arrive."""
        return sum(said.get("lost", 0) for said in self.said.values())


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a run."""

    name: str
    unit: str
    of: Callable[[Run], float]
    more_is_better: bool = False


RATE: Final = Metric("rate", "messages/s", lambda run: run.rate, more_is_better=True)


@dataclass(frozen=True, slots=True)
class Case:
    """What is done in a group of runs, and measured.

    Attributes:
        labels: what tells it from other cases.
        options: of the command line of :mod:`benchmarks.peers.job`.
        port: where the broker listens.
        broker: its process id, where its processor time is to be measured.
        roles: ``publish``, ``consume``, or at the same time ``publish`` and ``subscribe``, or ``request`` and
            ``respond``.
        metrics: what is measured.
        lossy: whether messages may be lost without the run being void.
        setup: how long a process may take until it is ready, and until it has ended after its result, seconds.
        before: called before each run with the number of messages.
        after: called after it, likewise; both raise ``RunError`` if something is wrong.
    """

    labels: dict[str, str]
    options: dict[str, Any]
    port: int
    broker: int | None = None
    roles: tuple[str, ...] = ("publish", "subscribe")
    metrics: tuple[Metric, ...] = (RATE,)
    lossy: bool = False
    setup: float = _SETUP
    before: Callable[[int], None] = field(default=lambda _: None)
    after: Callable[[int], None] = field(default=lambda _: None)


@dataclass(slots=True)
class Outcome:
    """What came of the runs of one contender in a case."""

    contender: Contender
    #: messages in each run
    count: int = 0
    runs: list[Run] = field(default_factory=list)
    #: why there is nothing
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How often, and how long."""

    #: rounds that count
    runs: int = 5
    #: seconds a run should take
    seconds: float = 1.5
    #: messages of the warm-up; 0: none, where ``messages`` are given and every process warms up by itself
    warm_up: int = 4_000
    #: messages in each run, whatever the warm-up told
    messages: int | None = None
    #: most messages of a run, by the warm-up
    most: int = _MOST

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Plan:
        """What the command line asks for; ``--quick`` is for trying, not for figures."""
        if arguments.quick:
            return cls(min(arguments.runs, 2), 0.2, 500, arguments.messages)
        return cls(arguments.runs, arguments.seconds, messages=arguments.messages)

    def paced(self, rate: float) -> Plan:
        """The same with a fixed number of messages: those of ``seconds`` at ``rate``."""
        messages = self.messages or max(20, round(rate * self.seconds))
        return dataclasses.replace(self, messages=messages, warm_up=max(10, messages // 10))

    def count(self, warm_up: Run) -> int:
        """Messages for the runs that count, by the warm-up."""
        if self.messages is not None:
            return self.messages
        return max(self.warm_up // 4, min(self.most, round(warm_up.rate * self.seconds)))


def measure(case: Case, contenders: Sequence[Contender], plan: Plan) -> list[Outcome]:
    """Run everybody: a warm-up each, then rounds, each beginning with another contender."""
    outcomes = [Outcome(contender, failure=contender.missing) for contender in contenders]
    for outcome in outcomes:
        if not plan.warm_up and plan.messages:
            outcome.count = plan.messages
            continue
        warm_up = _attempt(outcome, case, plan.warm_up)
        if warm_up is not None:
            outcome.count = plan.count(warm_up)
    for number in range(plan.runs):
        turn = number % max(1, len(outcomes))
        for outcome in outcomes[turn:] + outcomes[:turn]:
            run = _attempt(outcome, case, outcome.count)
            if run is not None:
                outcome.runs.append(run)
                _tell(case, outcome, run)
    return outcomes


def _attempt(outcome: Outcome, case: Case, count: int) -> Run | None:
    """A run of whoever has not failed before; who fails, fails for good, and the others go on."""
    if outcome.failure is not None:
        return None
    try:
        return run_once(outcome.contender, case, count)
    except RunError as error:
        outcome.failure = str(error)
        print(f"failed: {error}", *error.said, sep="\n", file=sys.stderr, flush=True)
        return None


def _tell(case: Case, outcome: Outcome, run: Run) -> None:
    """Say what a run came to, on standard error: a whole measurement takes long."""
    labels = ", ".join(f"{key} {value}" for key, value in case.labels.items())
    figures = ", ".join(f"{metric.of(run):,.0f} {metric.unit}" for metric in case.metrics)
    print(f"{labels}: {outcome.contender.name} {figures}", file=sys.stderr, flush=True)


def run_once(
    contender: Contender,
    case: Case,
    count: int,
    *,
    prefix: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Run:
    """One run.

    Args:
        contender: whose processes.
        case: what they do.
        count: messages.
        prefix: role -> command that its process runs under.

    Raises:
        RunError: a process failed or was too slow, or messages were lost, duplicated or damaged.
    """
    options = case.options | {"port": case.port, "count": count}
    line = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    slack = 20.0 if prefix else 1.0  # whatever it is that watches, it takes time
    case.before(count)
    with contextlib.ExitStack() as stack:
        processes: dict[str, Process] = {}
        try:
            for role in sorted(case.roles, reverse=True):  # subscriber first: it must be there for the first message
                command = [*prefix.get(role, ()), *contender.command, role, *line, *contender.options]
                processes[role] = stack.enter_context(Process(command, f"{contender.name} {role}"))
                processes[role].expect_ready(case.setup * slack)
            broker_seconds = _processor_seconds(case.broker)
            said = {
                role: process.result(role, (case.setup + count / _SLOWEST) * slack)
                for role, process in sorted(processes.items())  # publisher first: then the other is told
            }
        except RunError as error:
            error.said = [process.explain() for process in processes.values()]
            raise
        broker_seconds = _processor_seconds(case.broker) - broker_seconds
        for process in processes.values():
            process.expect_end(case.setup * slack)
    case.after(count)
    for role, result in said.items():
        for fault in ("wrong", "duplicates", "lost"):
            if result.get(fault) and not (fault == "lost" and case.lossy):
                raise RunError(f"{result[fault]} of {count} messages {fault} ({role})")
    return Run(count, said, broker_seconds)


def _processor_seconds(pid: int | None) -> float:
    """Processor time that a process has taken so far, user and system; nothing where the system does not tell."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


class Process:
    """A process of a peer, and the conversation with it."""

    def __init__(self, command: Sequence[str], what: str) -> None:
        self._what = what
        self._popen = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_lines, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read_lines(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._popen.stderr is not None
        self._errors.extend(self._popen.stderr)

    def _hear(self, timeout: float) -> str:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise RunError(f"{self._what}: nothing heard for {timeout:.0f} s; {self._last_words()}") from None
        if line is None:
            self._readers[1].join(1.0)
            raise RunError(f"{self._what}: ended; {self._last_words()}")
        return line

    def tell(self, word: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: what is heard from it next tells
            self._popen.stdin.write(word + "\n")
            self._popen.stdin.flush()

    def explain(self) -> str:
        """Have a peer in Python write the stacks of its threads; return all it wrote to standard error."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGUSR1)
            self._readers[1].join(1.0)  # it goes on, and so does the reader
        return f"{self._what} wrote:\n{''.join(self._errors)}"

    def _last_words(self) -> str:
        words = [line.strip() for line in self._errors if line.strip()]
        return words[-1] if words else "it said nothing"

    def expect_ready(self, timeout: float) -> None:
        """Wait until it is set up."""
        line = self._hear(timeout)
        if line != "READY":
            raise RunError(f"{self._what}: said {line!r} rather than READY")

    def result(self, role: str, timeout: float) -> dict[str, Any]:
        """Have it begin, or end, as its role is; and wait for what it says."""
        if role not in ("subscribe", "respond"):
            self.tell("GO")
        if role not in ("publish", "request"):
            self.tell("PUBLISHED")
        line = self._hear(timeout)
        try:
            result: dict[str, Any] = json.loads(line)
        except ValueError:
            raise RunError(f"{self._what}: said {line[:200]!r} rather than its result") from None
        return result

    def expect_end(self, timeout: float) -> None:
        """Let it disconnect in good order: what it acknowledged last is only then with the broker for sure."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)

"""Runs contenders side by side: one process per role, one after the other in rotating order, several rounds.

The first run of each is a warm-up, and tells how many messages it manages: the number for the runs that count is chosen
so that they take about the same time. All runs of a group use one broker, started for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.contenders import Contender

_ROOT: Final = Path(__file__).parent.parent
#: seconds until a process must have connected, and until it must have ended after its result
_SETUP: Final = 30.0
#: fewest messages a second that is waited for
_SLOWEST: Final = 200


class RunError(Exception):
    """A run that yielded nothing; says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured in a group: options of the command line of :mod:`benchmarks.peers.job`."""

    #: columns of the table and keys of the results
    labels: dict[str, str]
    options: dict[str, Any]
    #: roles: "publish", "consume", or both sides, "publish" and "subscribe"
    roles: tuple[str, ...] = ("publish", "subscribe")
    #: where the broker listens
    port: int = 0
    #: whether a message may be lost without the run being void
    lossy: bool = False
    #: called before each run with the number of messages, and after it; raises ``RunError`` if something is wrong
    before: Callable[[int], None] = field(default=lambda _: None)
    after: Callable[[int], None] = field(default=lambda _: None)


@dataclass(slots=True)
class Outcome:
    """What came of the runs of one contender in a case."""

    contender: Contender
    #: messages in each run
    count: int = 0
    #: one entry for each run: what its roles said
    runs: list[dict[str, Any]] = field(default_factory=list)
    #: why there is nothing
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How often, and how long."""

    #: rounds that count
    runs: int = 5
    #: seconds a run should take
    seconds: float = 1.5
    #: messages of the warm-up
    warm_up: int = 4_000
    #: messages in each run, whatever the warm-up told
    messages: int | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Plan:
        """What the command line asks for; ``--quick`` is for trying, not for figures."""
        if arguments.quick:
            return cls(min(arguments.runs, 2), 0.2, 1_000, arguments.messages)
        return cls(arguments.runs, arguments.seconds, messages=arguments.messages)

    def count(self, warm_up: dict[str, Any], case: Case) -> int:
        """Messages for the runs that count, by the warm-up."""
        if self.messages is not None:
            return self.messages
        rate = rate_of(warm_up, case)
        return max(self.warm_up // 4, min(400_000, round(rate * self.seconds)))

    def progress(self, case: Case, outcome: Outcome) -> None:
        """Say what a run came to, on standard error: a whole measurement takes long."""
        labels = ", ".join(f"{key} {value}" for key, value in case.labels.items())
        rate = rate_of(outcome.runs[-1], case)
        print(f"{labels}: {outcome.contender.name} {rate:,.0f}/s", file=sys.stderr, flush=True)


def measure(case: Case, contenders: Sequence[Contender], plan: Plan) -> list[Outcome]:
    """Run everybody in ``case``: a warm-up each, then rounds in which the first of one is the last of the next."""
    outcomes = [Outcome(contender, failure=contender.missing) for contender in contenders]
    for outcome in outcomes:
        if outcome.failure is None:
            with _failing(outcome):
                outcome.count = plan.count(run_once(outcome.contender, case, plan.warm_up), case)
    for number in range(plan.runs):
        turn = number % len(outcomes) if outcomes else 0
        for outcome in outcomes[turn:] + outcomes[:turn]:
            if outcome.failure is None:
                with _failing(outcome):
                    outcome.runs.append(run_once(outcome.contender, case, outcome.count))
                    plan.progress(case, outcome)
    return outcomes


@contextlib.contextmanager
def _failing(outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except RunError as error:
        outcome.failure = str(error)
        print(f"{outcome.contender.name}: {error}", file=sys.stderr, flush=True)


def rate_of(run: dict[str, Any], case: Case) -> float:
    """Messages per second of a run: from the first publish, or the start of consuming, to the end of the last role."""
    first, last = run[case.roles[0]], run[case.roles[-1]]
    messages = last.get("received", last["count"])
    return float(messages / (last["end"] - first["start"])) if messages else 0.0


def run_once(contender: Contender, case: Case, count: int, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """One run: what each role said.

    Args:
        contender: whose processes.
        case: what they do.
        count: messages.
        prefix: command that the processes run under.

    Raises:
        RunError: a process failed or was too slow, or messages were lost, duplicated or damaged.
    """
    options = case.options | {"port": case.port, "count": count}
    line = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    case.before(count)
    with contextlib.ExitStack() as stack:
        # the subscriber first: it must be there when the first message is
        processes = {
            role: stack.enter_context(
                _Process([*prefix, *contender.command, role, *line, *contender.options], contender.name, role)
            )
            for role in sorted(case.roles, reverse=True)
        }
        for process in processes.values():
            process.expect_ready()
        deadline = _SETUP + count / _SLOWEST
        result: dict[str, Any] = {}
        for role, process in processes.items():
            if role != "subscribe":
                process.tell("GO")
                if role == "publish":
                    result[role] = process.result(deadline) | {"count": count}
        for role, process in processes.items():
            if role != "publish":
                process.tell("PUBLISHED")
                result[role] = process.result(deadline) | {"count": count}
        for process in processes.values():
            process.expect_end()
    case.after(count)
    _check(result, case)
    return result


def _check(result: dict[str, Any], case: Case) -> None:
    for role, said in result.items():
        for fault in ("wrong", "duplicates", "lost"):
            if said.get(fault) and not (fault == "lost" and case.lossy):
                raise RunError(f"{said[fault]} of {said['count']} messages {fault} ({role})")


class _Process:
    """A process of a peer, and the conversation with it."""

    def __init__(self, command: Sequence[str], name: str, role: str) -> None:
        self._what = f"{name} {role}"
        self._popen = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        for target in (self._read_lines, self._read_errors):
            threading.Thread(target=target, daemon=True).start()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _read_lines(self) -> None:
        assert self._popen.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in self._popen.stdout:
                self._lines.put(line.strip())
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._popen.stderr is not None
        with contextlib.suppress(ValueError):
            self._errors.extend(self._popen.stderr)

    def _next(self, timeout: float) -> str:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise RunError(f"{self._what}: nothing heard for {timeout:.0f} s; {self._last_words()}") from None
        if line is None:
            raise RunError(f"{self._what}: ended; {self._last_words()}")
        return line

    def _last_words(self) -> str:
        words = [line.strip() for line in self._errors if line.strip()]
        return words[-1] if words else "it said nothing"

    def expect_ready(self) -> None:
        line = self._next(_SETUP)
        if line != "READY":
            raise RunError(f"{self._what}: said {line!r} rather than READY")

    def tell(self, word: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: what is heard from it next tells
            self._popen.stdin.write(word + "\n")
            self._popen.stdin.flush()

    def result(self, timeout: float) -> dict[str, Any]:
        line = self._next(timeout)
        try:
            result: dict[str, Any] = json.loads(line)
        except ValueError:
            raise RunError(f"{self._what}: said {line!r} rather than its result") from None
        return result

    def expect_end(self) -> None:
        """It disconnects in good order: what it acknowledged last is only then with the broker for sure."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_SETUP)

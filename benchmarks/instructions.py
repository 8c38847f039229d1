"""Instructions a message, counted by ``perf stat`` or by callgrind.

Starting and ending a process costs many: what is told is the difference between a run with many messages and one with
few, divided by the difference of the messages.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import Case, Metric, Outcome, Run, RunError, run_once

if TYPE_CHECKING:
    from benchmarks.contenders import Contender

#: messages of the two runs
FEW: Final = 500
MANY: Final = 3_500


@dataclass(frozen=True, slots=True)
class Counter:
    """A program that counts the instructions of another."""

    name: str
    #: its command line; ``{file}`` is where it writes
    command: tuple[str, ...]
    #: what to look for there
    pattern: str

    def read(self, file: Path) -> int:
        """The count.

        Raises:
            RunError: there is none.
        """
        found = re.search(self.pattern, file.read_text(errors="replace") if file.exists() else "", re.MULTILINE)
        if found is None:
            raise RunError(f"{self.name} counted nothing")
        return int(found[1])


PERF: Final = Counter(
    "perf", ("perf", "stat", "-x,", "-e", "instructions:u", "-o", "{file}", "--"), r"^(\d+),.*instructions"
)
CALLGRIND: Final = Counter(
    "callgrind",
    ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--log-file={file}"),
    r"Collected : (\d+)",
)


def find() -> Counter | None:
    """Who can count here, the better one first: on virtual machines, perf often has no counters."""
    for counter in (PERF, CALLGRIND):
        if shutil.which(counter.command[0]) is not None:
            try:
                _count(counter, lambda prefix: subprocess.run([*prefix, "/bin/true"], check=True, capture_output=True))
            except (RunError, subprocess.CalledProcessError):
                continue
            return counter
    return None


def _count(counter: Counter, run: Callable[[list[str]], object]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "count"
        run([part.format(file=file) for part in counter.command])
        return counter.read(file)


def measure(counter: Counter, case: Case, contenders: Sequence[Contender]) -> tuple[Case, list[Outcome]]:
    """Count for each role of everybody, one at a time: the other side runs at its own speed.

    Returns:
        The case, with metrics of its own, and what came of it.
    """
    metrics = tuple(
        Metric(f"{role[:3]} instructions ({counter.name})", "thousands", _counted(role)) for role in case.roles
    )
    outcomes = []
    for contender in contenders:
        outcome = Outcome(contender, MANY - FEW, failure=contender.missing)
        if outcome.failure is None:
            try:
                said = {role: {"counted": _per_message(counter, case, contender, role) / 1e3} for role in case.roles}
            except RunError as error:
                outcome.failure = str(error)
            else:
                outcome.runs.append(Run(MANY - FEW, said))
        outcomes.append(outcome)
    return dataclasses.replace(case, metrics=metrics), outcomes


def _counted(role: str) -> Callable[[Run], float]:
    return lambda run: float(run.said[role]["counted"])


def _per_message(counter: Counter, case: Case, contender: Contender, role: str) -> float:
    def total(count: int) -> int:
        return _count(counter, lambda prefix: run_once(contender, case, count, prefix={role: prefix}))

    return (total(MANY) - total(FEW)) / (MANY - FEW)

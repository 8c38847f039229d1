"""Run tests many times, half of the runs with every core kept busy, and list those that failed once.

::

    python -m tests.stress --times 50 tests/mqtt/test_session.py

``make test-stress TESTS=... TIMES=50`` is the same. Without tests: the test files that differ from ``main``. Each run
is one pytest with pytest-xdist over all tests. Every second run is under load. The output of failed tests is kept in
``.cache/stress``, one file for each test.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from messaging.testing.waiting import PATIENCE

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / ".cache" / "stress"
#: folders with tests
FOLDERS: Final = ("tests", "messaging/testing")
QUIET, BUSY = "quiet", "busy"
#: seconds that pytest has to end after an interrupt
_PATIENCE: Final = 3 * PATIENCE
#: ends with its parent, however that ends
_SPIN: Final = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(1_000_000): pass"


# --- which tests


def changed_tests(since: str, root: Path = ROOT) -> list[str]:
    """Return the test files that differ from the commit ``since``, those that git does not know yet included."""
    changed = _git(root, "diff", "--name-only", since, "--", *FOLDERS)
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *FOLDERS)
    return sorted(
        name for name in {*changed, *new} if re.search(r"(^|/)test_[^/]*\.py$", name) and (root / name).exists()
    )


def _git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"stress: git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.splitlines()


# --- load


@contextlib.contextmanager
def load(cores: int | None = None) -> Iterator[list[int]]:
    """Keep ``cores`` cores busy, by default all of the machine; yield the ids of the processes that do it."""
    command = [sys.executable, "-S", "-c", _SPIN, str(os.getpid())]
    spinning: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(cores or os.cpu_count() or 1):
            spinning.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield [each.pid for each in spinning]
    finally:
        for each in spinning:
            each.kill()
            each.wait()


# --- results


@dataclass(frozen=True)
class Failure:
    """A test that failed in a run, and what pytest wrote about it."""

    test: str
    output: str


def read_report(path: Path) -> tuple[int, list[Failure]]:
    """Return the number of tests in a report in JUnit's format, and those of them that failed."""
    cases = [*ElementTree.parse(path).iter("testcase")]
    failures: dict[str, str] = {}
    for case in cases:
        found = [each for each in case if each.tag in ("failure", "error")]
        if found:
            test = _name(case)
            told = "\n".join(f"{each.get('message') or ''}\n{each.text or ''}" for each in found)
            printed = "\n".join(each.text or "" for each in case if each.tag in ("system-out", "system-err"))
            failures[test] = f"{failures.get(test, '')}{told}\n{printed}"
    return len({_name(case) for case in cases}), [Failure(*each) for each in failures.items()]


def _name(case: ElementTree.Element) -> str:
    file, name = case.get("file") or "", case.get("name") or ""
    module = file.removesuffix(".py").replace("/", ".")
    classes = (case.get("classname") or "").removeprefix(module).strip(".")
    return "::".join(part for part in (file, *classes.split("."), name) if part)


class Tally:
    """Counts the failures of all runs.

    Args:
        results: the folder for the output of failed tests.
    """

    def __init__(self, results: Path) -> None:
        self.runs: Counter[str] = Counter()
        self.failed: dict[str, Counter[str]] = defaultdict(Counter)
        self._results = results

    def add(self, half: str, failures: Sequence[Failure]) -> None:
        """Count a run, and keep the output of its failures."""
        self.runs[half] += 1
        for failure in failures:
            self.failed[failure.test][half] += 1
            with self.file(failure.test).open("a") as file:
                file.write(f"===== run {self.runs.total()}, {half}\n{failure.output}\n")

    def file(self, test: str) -> Path:
        """Return where the output of a test is kept."""
        return self._results / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', test)[-150:]}.txt"

    def lines(self) -> list[str]:
        """Return the report: each failed test, how often it failed in each half, and the file with its output."""
        told = [f"{self.runs.total()} runs: {self.runs[QUIET]} quiet, {self.runs[BUSY]} busy"]
        for test, counts in sorted(self.failed.items(), key=lambda each: (-each[1].total(), each[0])):
            told.append(f"failed {counts.total()} times ({counts[QUIET]} quiet, {counts[BUSY]} busy): {test}")
            told.append(f"    {self.file(test)}")
        return told if self.failed else [*told, "no test failed"]


# --- runs


def run(tests: Sequence[str], results: Path, number: int, options: Sequence[str]) -> tuple[int, list[Failure]]:
    """Run the tests once; return how many there were, and what failed."""
    report, output = results / f"run-{number}.xml", results / f"run-{number}.txt"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
    command += ["-o", "junit_family=xunit1", "-o", "junit_logging=all", *options, *tests]
    with output.open("w") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    count, failures = read_report(report) if report.exists() else (0, [])
    report.unlink(missing_ok=True)
    if code not in (0, 1) or (code == 1 and not failures):
        return count, [*failures, Failure("pytest itself", f"it ended with code {code}\n{output.read_text()}")]
    if not failures:
        output.unlink()
    return count, failures


def _end(process: subprocess.Popen[bytes]) -> None:
    """End pytest: it stops its brokers when it is interrupted."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_PATIENCE)
    except BaseException:  # too long, or a second interrupt
        process.kill()
        process.wait()
        raise


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Run tests many times; return 1 if one failed once, 130 after an interrupt, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", help="files, folders or ids of tests")
    parser.add_argument("--times", type=int, default=50, help="runs, half of them under load")
    parser.add_argument(
        "--since", default="main", help="without tests: run the test files that differ from this commit"
    )
    parser.add_argument("--processes", type=int, default=3, help="workers of each run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the output of failed tests")
    parser.add_argument("--pytest", action="append", default=[], metavar="OPTION", help="for pytest; repeatable")
    given = parser.parse_args(arguments)
    tests = given.tests or changed_tests(given.since)
    if not tests:
        _say(f"stress: no test file differs from {given.since}")
        return 0
    shutil.rmtree(given.results, ignore_errors=True)
    given.results.mkdir(parents=True)
    options = ["--numprocesses", str(given.processes), "--dist", "worksteal", *given.pytest]
    tally = Tally(given.results)
    is_interrupted = False
    try:
        for number in range(1, given.times + 1):
            half = QUIET if number % 2 else BUSY
            begun = time.monotonic()
            with load() if half == BUSY else contextlib.nullcontext():
                count, failures = run(tests, given.results, number, options)
            tally.add(half, failures)
            took = time.monotonic() - begun
            _say(f"{number}/{given.times} {half}: {count} tests, {len(failures)} failed, {took:.0f} s")
    except KeyboardInterrupt:
        is_interrupted = True
    _say(*tally.lines())
    return 130 if is_interrupted else 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``tests/durations.md``: what the tests cost, so that growth is seen.

::

    python -m tests.durations                  # runs `make test`'s tests, and writes the page
    python -m tests.durations record.json      # writes it from a run that was

A run is recorded with ``pytest -p tests.durations --record-durations record.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = Path(__file__).with_suffix(".md")
DEAREST: Final = 30
_CONFORMANCE: Final = "messaging/testing/conformance"
_RUN: Final = ("--numprocesses", "5", "--dist", "worksteal", "-m", "not slow")


# --- recording, as a plugin of pytest


def _used() -> float:
    """Return the processor seconds of this process, and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


class Meter:
    """Adds the processor seconds of a phase to its report, in the process that runs the test."""

    def __init__(self) -> None:
        self._used = 0.0

    def pytest_runtest_logstart(self) -> None:
        """Begin with a test."""
        self._used = _used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """End a phase, and begin with the next one."""
        report = yield
        used = _used()
        report.processor = used - self._used
        self._used = used
        return report


class Recorder:
    """Keeps the seconds of each test: ``{id: {"setup": …, "call": …, "teardown": …, "processor": …}}``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: {"processor": 0.0})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase."""
        seconds = self._seconds[report.nodeid]
        seconds[report.when] = round(report.duration, 4)
        seconds["processor"] = round(seconds["processor"] + getattr(report, "processor", 0.0), 4)

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        self._path.write_text(json.dumps(self._seconds, indent=0))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records a run."""
    parser.addoption("--record-durations", type=Path, metavar="FILE", help="record how long each test takes")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in the processes that run tests, and record in the one that has the reports of all of them."""
    path = config.getoption("--record-durations")
    if path is None:
        return
    config.pluginmanager.register(Meter())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


# --- the page


@dataclass
class Room:
    """The tests of a folder.

    Attributes:
        items: their number.
        calls: seconds of the tests themselves.
        around: seconds of fixtures, before and after.
        processor: processor seconds of both, with the processes that they started.
    """

    items: int = 0
    calls: float = 0.0
    around: float = 0.0
    processor: float = 0.0


@dataclass
class Summary:
    """What a run cost."""

    rooms: dict[str, Room] = field(default_factory=lambda: defaultdict(Room))
    #: processor seconds, seconds and id
    dearest: list[tuple[float, float, str]] = field(default_factory=list)


def room_of(test: str) -> str:
    """Return the room of a test: its folder below ``tests``."""
    folder = str(Path(test.partition("::")[0]).parent)
    return _CONFORMANCE if folder == _CONFORMANCE else "/".join(folder.split("/")[:2])


def summed(record: dict[str, dict[str, float]]) -> Summary:
    """Add up a record."""
    found = Summary()
    for test, seconds in record.items():
        room = found.rooms[room_of(test)]
        room.items += 1
        room.calls += seconds.get("call", 0.0)
        room.around += seconds.get("setup", 0.0) + seconds.get("teardown", 0.0)
        room.processor += seconds["processor"]
    each = (
        (seconds["processor"], sum(seconds.values()) - seconds["processor"], test) for test, seconds in record.items()
    )
    found.dearest = sorted(each, reverse=True)[:DEAREST]
    return found


def _row(name: str, room: Room) -> str:
    return f"| {name} | {room.items:,} | {room.processor:,.1f} | {room.calls:,.1f} | {room.around:,.1f} |"


def page(summary: Summary, where: str) -> str:
    """Return the page."""
    rooms = sorted(summary.rooms.items(), key=lambda each: (-each[1].processor, each[0]))
    total = Room(
        sum(room.items for _, room in rooms),
        sum(room.calls for _, room in rooms),
        sum(room.around for _, room in rooms),
        sum(room.processor for _, room in rooms),
    )
    lines = [
        "# What the tests cost",
        "",
        f"Made by `make durations` on {where}. Seconds of all workers together: of the processor, with the",
        "processes that a test started and ended, and of the clock. Workers wait for each other and for the processor:",
        "a busy machine shows more seconds of the clock.",
        "",
        "| folder | tests | processor, s | tests, s | fixtures, s |",
        "|---|--:|--:|--:|--:|",
        *(_row(f"`{name}`", room) for name, room in rooms),
        _row("all", total),
        "",
        f"## The {len(summary.dearest)} that take most",
        "",
        "| test | processor, s | with its fixtures, s |",
        "|---|--:|--:|",
        *(
            f"| `{test.replace('|', chr(92) + '|')}` | {processor:,.1f} | {seconds:,.1f} |"
            for processor, seconds, test in summary.dearest
        ),
        "",
    ]
    return "\n".join(lines)


def machine() -> str:
    """Return where the tests ran."""
    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def main(arguments: Sequence[str]) -> int:
    """Write the page; return pytest's exit code if a run is needed for it and failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", nargs="?", type=Path, help="of a run that was; without it, the tests are run")
    parser.add_argument("--page", type=Path, default=PAGE, help="what to write")
    given = parser.parse_args(arguments)
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        record: Path = given.record or Path(folder) / "record.json"
        if given.record is None:
            command = [sys.executable, "-m", "pytest", "-p", "tests.durations", "--record-durations", str(record)]
            code = subprocess.run([*command, *_RUN], cwd=ROOT, check=False).returncode
            if code not in (0, 1):
                return code
        found: dict[str, Any] = json.loads(record.read_text())
    given.page.write_text(page(summed(found), machine()))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

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
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = Path(__file__).with_suffix(".md")
LONGEST: Final = 30
_CONFORMANCE: Final = "messaging/testing/conformance"
_RUN: Final = ("--numprocesses", "5", "--dist", "worksteal", "-m", "not slow")


# --- recording, as a plugin of pytest


class Recorder:
    """Keeps the seconds of each phase of each test: ``{id: {"setup": …, "call": …, "teardown": …}}``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, dict[str, float]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase."""
        self._seconds[report.nodeid][report.when] = round(report.duration, 4)

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        self._path.write_text(json.dumps(self._seconds, indent=0))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records a run."""
    parser.addoption("--record-durations", type=Path, metavar="FILE", help="record how long each test takes")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that has the reports of all workers."""
    path = config.getoption("--record-durations")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


# --- the page


@dataclass
class Room:
    """The tests of a folder.

    Attributes:
        items: their number.
        calls: seconds of the tests themselves.
        around: seconds of fixtures, before and after.
    """

    items: int = 0
    calls: float = 0.0
    around: float = 0.0


@dataclass
class Summary:
    """What a run cost."""

    rooms: dict[str, Room] = field(default_factory=lambda: defaultdict(Room))
    #: seconds and id
    longest: list[tuple[float, str]] = field(default_factory=list)


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
    longest = sorted(((sum(seconds.values()), test) for test, seconds in record.items()), reverse=True)
    found.longest = longest[:LONGEST]
    return found


def page(summary: Summary, where: str) -> str:
    """Return the page."""
    rooms = sorted(summary.rooms.items(), key=lambda each: (-each[1].calls - each[1].around, each[0]))
    total = Room(
        sum(room.items for _, room in rooms),
        sum(room.calls for _, room in rooms),
        sum(room.around for _, room in rooms),
    )
    lines = [
        "# What the tests cost",
        "",
        f"Made by `make durations` on {where}. Seconds of all workers together; they wait for each other and for the",
        "processor, so a busy machine shows more.",
        "",
        "| folder | tests | tests, s | fixtures, s |",
        "|---|--:|--:|--:|",
        *(f"| `{name}` | {room.items:,} | {room.calls:,.1f} | {room.around:,.1f} |" for name, room in rooms),
        f"| all | {total.items:,} | {total.calls:,.1f} | {total.around:,.1f} |",
        "",
        f"## The {len(summary.longest)} longest",
        "",
        "| test | s, with its fixtures |",
        "|---|--:|",
        *(f"| `{test.replace('|', chr(92) + '|')}` | {seconds:,.1f} |" for seconds, test in summary.longest),
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

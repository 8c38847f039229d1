"""The board: the newest snapshot of each process, its rates, and the recent values of its charts. Bounded."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from messaging.execution import clock
from messaging.observability.monitor.snapshot import FORGET, Report, Snapshot
from messaging.observability.monitor.views import Path, Rates, numbers, view

#: values of a line of a chart that are kept, and lines of all charts
POINTS: Final = 120
_MAX_LINES: Final = 2_000
#: a process is silent after this many of its intervals without a snapshot, and at least after so many seconds
_SILENT_INTERVALS: Final = 3.0
_SILENT_LEAST: Final = 2.0
#: kinds of reports that are shown first -> place
_ORDER: Final = {"gateway": 0, "instance": 1, "journal": 2}
#: most processes
MAX_PROCESSES: Final = 64


@dataclass(frozen=True, slots=True)
class BoardChange:
    """A change of the board, for the viewers."""

    key: str
    #: of JSON; ``None``: the process is gone
    view: dict[str, Any] | None


@dataclass(slots=True)
class _Process:
    snapshot: Snapshot
    #: when the snapshot was taken, by the monotonic clock of this process
    at: float
    is_silent: bool = False
    numbers: dict[str, dict[Path, float]] = field(default_factory=dict)
    views: list[dict[str, Any]] = field(default_factory=list)
    #: report -> line -> values, the oldest first
    lines: dict[str, dict[str, deque[float | None]]] = field(default_factory=dict)


class Board:
    """The processes that a monitor shows. Thread safe.

    Args:
        most: number of processes; the snapshots of further ones are counted and dropped.

    Attributes:
        refused: number of snapshots that were dropped for lack of room.
    """

    def __init__(self, most: int = MAX_PROCESSES) -> None:
        self._most = most
        self._lock = threading.Lock()  # guards the following
        self._processes: dict[str, _Process] = {}
        self.refused = 0

    def add(self, key: str, snapshot: Snapshot, age: float = 0.0) -> list[BoardChange]:
        """Take a snapshot; return the changes.

        Args:
            key: identifies the process.
            snapshot: of the process; one that is not newer than the one before is ignored.
            age: how long ago it was taken, seconds.
        """
        now = clock.monotonic()
        with self._lock:
            changes: list[BoardChange] = []
            process = self._processes.get(key)
            if process is None:
                if len(self._processes) >= self._most:
                    silent = [name for name, each in self._processes.items() if each.is_silent]
                    if not silent:
                        self.refused += 1
                        return []
                    oldest = min(silent, key=lambda name: self._processes[name].at)
                    del self._processes[oldest]
                    changes.append(BoardChange(oldest, None))
                process = self._processes[key] = _Process(snapshot, now - age)
                self._update(process, snapshot, None)
            else:
                before = process.snapshot
                is_same = before.start == snapshot.start
                if is_same and snapshot.uptime <= before.uptime:
                    return []
                if not is_same:
                    process.lines.clear()
                process.snapshot, process.at = snapshot, now - age
                self._update(process, snapshot, before if is_same else None)
            process.is_silent = self._has_gone_silent(process, now)
            changes.append(BoardChange(key, self._view(key, process, now)))
            return changes

    def _update(self, process: _Process, snapshot: Snapshot, before: Snapshot | None) -> None:
        seconds = 0.0 if before is None else snapshot.uptime - before.uptime
        earlier, process.numbers, process.views = process.numbers, {}, []
        lines, process.lines = process.lines, {}
        for key, report in _named(snapshot.reports):
            found = process.numbers[key] = numbers(report.data)
            rates = Rates(found, None if before is None else earlier.get(key), seconds)
            shown = view(report, rates)
            kept = process.lines[key] = lines.get(key, {})
            for line, value in shown["chart"].items():
                if line in kept or self._lines() < _MAX_LINES:
                    kept.setdefault(line, deque(maxlen=POINTS)).append(value)
            about = {"key": key, "kind": report.kind, "name": report.name, "error": report.error}
            process.views.append({**about, "problems": list(report.problems), **shown})

    def _lines(self) -> int:
        return sum(len(lines) for process in self._processes.values() for lines in process.lines.values())

    def tick(self) -> list[BoardChange]:
        """Return the changes that come with time: processes that have become silent, and forgotten ones."""
        now = clock.monotonic()
        with self._lock:
            changes: list[BoardChange] = []
            for key, process in [*self._processes.items()]:
                if now - process.at > max(FORGET, 2 * process.snapshot.interval * _SILENT_INTERVALS):
                    del self._processes[key]
                    changes.append(BoardChange(key, None))
                elif not process.is_silent and self._has_gone_silent(process, now):
                    process.is_silent = True
                    changes.append(BoardChange(key, self._view(key, process, now)))
            return changes

    def remove(self, key: str) -> list[BoardChange]:
        """Forget a process that has ended; return the changes."""
        with self._lock:
            return [] if self._processes.pop(key, None) is None else [BoardChange(key, None)]

    def histories(self) -> dict[str, dict[str, dict[str, list[float | None]]]]:
        """Return the values of the charts: process -> report -> line -> values, the oldest first."""
        with self._lock:
            return {
                key: {
                    report: {line: list(values) for line, values in lines.items()}
                    for report, lines in process.lines.items()
                }
                for key, process in self._processes.items()
            }

    def snapshots(self) -> dict[str, Snapshot]:
        """Return the newest snapshot of each process by its key."""
        with self._lock:
            return {key: process.snapshot for key, process in self._processes.items()}

    @staticmethod
    def _has_gone_silent(process: _Process, now: float) -> bool:
        limit = max(_SILENT_LEAST, _SILENT_INTERVALS * process.snapshot.interval)
        return now - process.at > limit

    @staticmethod
    def _view(key: str, process: _Process, now: float) -> dict[str, Any]:
        snapshot = process.snapshot
        return {
            "key": key,
            "process": snapshot.process,
            "host": snapshot.host,
            "pid": snapshot.pid,
            "uptime": round(snapshot.uptime, 1),
            "age": max(0.0, math.floor(now - process.at)),
            "interval": snapshot.interval,
            "status": "silent" if process.is_silent else "live",
            "omitted": snapshot.omitted,
            "reports": process.views,
        }


def _named(reports: tuple[Report, ...]) -> list[tuple[str, Report]]:
    """Return each report with a key, in the order of the page; reports of one kind and name are numbered."""
    found: dict[str, Report] = {}
    for report in sorted(reports, key=lambda each: _ORDER.get(each.kind, len(_ORDER))):
        key, number = f"{report.kind}/{report.name}", 1
        while key in found:
            number += 1
            key = f"{report.kind}/{report.name}#{number}"
        found[key] = report
    return [*found.items()]

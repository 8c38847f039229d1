"""Tables, files, plots."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.contenders import OURS
from benchmarks.harness import Case, Outcome, rate_of

RESULTS: Final = Path(__file__).parent / "results"


class Results:
    """What a benchmark found: printed case by case, saved at the end.

    Args:
        name: of the benchmark.
        unit: of the figures.
        arguments: the command line.
    """

    def __init__(self, name: str, unit: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self.unit = unit
        self.broker: dict[str, Any] = {}
        self._arguments = arguments
        self._started = datetime.datetime.now(datetime.UTC)
        self._cases: list[dict[str, Any]] = []
        self._libraries: dict[str, str] = {}

    def add(self, case: Case, outcomes: Sequence[Outcome]) -> None:
        """Print a case, and keep it."""
        rows = [self._row(case, outcome) for outcome in outcomes]
        self._cases.append({"labels": case.labels, "options": case.options, "rows": rows})
        print_case(self.unit, self._cases[-1])

    def _row(self, case: Case, outcome: Outcome) -> dict[str, Any]:
        contender = outcome.contender
        row: dict[str, Any] = {"name": contender.name, "how": contender.how, "loop": contender.loop}
        if outcome.failure is not None:
            return row | {"failure": outcome.failure}
        rates = [rate_of(run, case) for run in outcome.runs]
        for run in outcome.runs:
            for said in run.values():
                self._libraries |= said["libraries"]
        return row | {
            "messages": outcome.count,
            "rates": rates,
            "median": statistics.median(rates),
            "lost": [run[case.roles[-1]].get("lost", 0) for run in outcome.runs],
        }

    def finish(self) -> None:
        """Save."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}-{self._started:%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        print(f"saved as {path}")

    def as_json(self) -> dict[str, Any]:
        """Everything, as it is saved."""
        return {
            "benchmark": self.name,
            "unit": self.unit,
            "date": self._started.isoformat(timespec="seconds"),
            "machine": machine(),
            "broker": self.broker,
            "libraries": self._libraries,
            "runs": self._arguments.runs,
            "cases": self._cases,
        }


def machine() -> dict[str, Any]:
    """Where this was measured."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def print_case(unit: str, case: dict[str, Any]) -> None:
    """A table: one line for each contender, with its ratio to ours."""
    title = ", ".join(f"{key} {value}" for key, value in case["labels"].items())
    print(f"\n{title + ': ' + unit:58} {'median':>10} {'min':>10} {'max':>10} {'ours is':>9}")
    ours = next((row.get("median") for row in case["rows"] if row["name"] == OURS), None)
    for row in case["rows"]:
        if "failure" in row:
            print(f"{row['name']:16} {row['failure']}")
            continue
        ratio = f"{ours / row['median']:8.2f}x" if ours is not None and row["median"] else ""
        lost = sum(row["lost"])
        note = f"  lost {lost} of {row['messages'] * len(row['lost'])}" if lost else ""
        low, high = min(row["rates"]), max(row["rates"])
        print(
            f"{row['name']:16} {row['how'][:41]:41} {row['median']:10,.0f} {low:10,.0f} {high:10,.0f} {ratio:>9}{note}"
        )

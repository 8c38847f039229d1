"""Tables, result files, plots, and the figures of ``docs/performance.md``.

``python -m benchmarks report`` makes the figures of that page anew from the reference results, which
``--reference`` saves.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import targets
from benchmarks.contenders import OURS

if TYPE_CHECKING:
    from benchmarks.harness import Case, Outcome

RESULTS: Final = Path(__file__).parent / "results"
PAGE: Final = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN: Final = "<!-- figures: begin -->\n"
END: Final = "<!-- figures: end -->\n"
#: in the order they appear on the page
REFERENCES: Final = ("mqtt", "amqp", "requests", "events", "remote", "latency", "footprint", "journal", "spark")


class Results:
    """What a benchmark found: printed case by case, saved at the end.

    Args:
        name: of the benchmark.
        title: what is measured, in words.
        column: the label whose values are columns of the page's tables; the others make tables of their own.
        arguments: the command line.
    """

    def __init__(self, name: str, title: str, column: str, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._started = datetime.datetime.now(datetime.UTC)
        self._libraries: dict[str, str] = {}
        self._cases: list[dict[str, Any]] = []
        self.found: dict[str, Any] = {
            "benchmark": name,
            "title": title,
            "column": column,
            "date": self._started.isoformat(timespec="seconds"),
            "machine": machine(),
            "runs": arguments.runs,
            "libraries": self._libraries,
            "brokers": {},
            "cases": self._cases,
        }

    def broker(self, name: str, configuration: Sequence[str]) -> None:
        """Note the broker and how it is configured, for everybody alike."""
        self.found["brokers"][name] = list(configuration)

    def add(self, case: Case, outcomes: Sequence[Outcome]) -> None:
        """Print a case, and keep it."""
        for outcome in outcomes:
            for run in outcome.runs:
                for said in run.said.values():
                    self._libraries.update(said.get("libraries", {}))
        metrics = [
            {"name": metric.name, "unit": metric.unit, "more_is_better": metric.more_is_better}
            for metric in case.metrics
        ]
        rows = [_row(case, outcome) for outcome in outcomes]
        found = {"labels": case.labels, "options": case.options, "metrics": metrics, "rows": rows}
        self._cases.append(found)
        print("\n".join(table(found)), flush=True)

    def finish(self) -> None:
        """Print how the targets were met; save, and plot."""
        print("\n".join(targets.lines(self.found)))
        name = f"{self.found['benchmark']}-{self._started:%Y%m%d-%H%M%S}"
        if self._arguments.reference:
            name = f"reference-{self.found['benchmark']}"
        folder: Path = self._arguments.results
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"\nsaved as {path}")
        try:
            from benchmarks import plot
        except ImportError:
            print("no plot: matplotlib is not installed")
        else:
            print(f"plotted in {plot.draw(self.found, path.with_suffix('.png'))}")


def machine() -> dict[str, Any]:
    """Where this was measured."""
    processor = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = models[0] if models else processor
    return {
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "processor": processor,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def _row(case: Case, outcome: Outcome) -> dict[str, Any]:
    contender = outcome.contender
    row: dict[str, Any] = {"name": contender.name, "how": contender.how, "loop": contender.loop}
    if outcome.failure is not None or not outcome.runs:
        return row | {"failure": outcome.failure or "no runs"}
    figures = {}
    for metric in case.metrics:
        values = [metric.of(run) for run in outcome.runs]
        figures[metric.name] = {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "runs": values,
        }
    return row | {"messages": outcome.count, "lost": [run.lost for run in outcome.runs], "figures": figures}


# --- tables


def better(case: dict[str, Any], row: dict[str, Any], metric: dict[str, Any]) -> float | None:
    """By what factor ours is better than ``row``; ``None`` if there is nothing to compare, or it is ours."""
    ours = next((each for each in case["rows"] if each["name"] == OURS), None)
    if ours is None or row is ours or "failure" in ours or "failure" in row:
        return None
    mine, its = (each["figures"][metric["name"]]["median"] for each in (ours, row))
    if not mine or not its:
        return None
    return float(mine / its if metric["more_is_better"] else its / mine)


def table(case: dict[str, Any]) -> Iterator[str]:
    """A case for the terminal: medians, and how much better ours is; of a single metric also the range."""
    single = len(case["metrics"]) == 1
    title = ", ".join(f"{key} {value}" for key, value in case["labels"].items())
    heads = [f"{metric['name']}, {metric['unit']}" for metric in case["metrics"]]
    widths = [max(10, len(head)) for head in heads]
    header = f"{title:60}" if single else f"{title:20}"
    for head, width in zip(heads, widths, strict=True):
        header += f" {head:>{width}}" + (f" {'min':>10} {'max':>10}" if single else "") + " better by"
    yield "\n" + header
    for row in case["rows"]:
        line = f"{row['name']:19} "
        if "failure" in row:
            yield line + row["failure"]
            continue
        if single:
            line += f"{row['how'][:39]:39} "
        for metric, width in zip(case["metrics"], widths, strict=True):
            figure = row["figures"][metric["name"]]
            line += f" {shown(figure['median']):>{width}}"
            line += f" {shown(figure['min']):>10} {shown(figure['max']):>10}" if single else ""
            factor = better(case, row, metric)
            line += f" {factor:8.2f}x" if factor is not None else " " * 10
        lost = sum(row["lost"])
        yield line + (f"  lost {lost} of {row['messages'] * len(row['lost'])}" if lost else "")


def shown(value: float) -> str:
    """A figure as people read it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


# --- the page


def run(_: argparse.Namespace) -> None:
    """``python -m benchmarks report``: make the figures of the page anew."""
    PAGE.write_text(page())
    print(f"written: {PAGE}")


def page() -> str:
    """The page with its figures made from the reference results."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(_figures()) + "\n" + END + after


def _figures() -> Iterator[str]:
    for name in REFERENCES:
        path = RESULTS / f"reference-{name}.json"
        if not path.exists():
            yield f"\n`{name}`: not measured yet; `python -m benchmarks {name} --reference` does it.\n"
            continue
        found = json.loads(path.read_text())
        yield f"\n### {found['title']}\n"
        yield from _origin(found)
        yield from _markdown(found)
        rows = [*targets.markdown(found)]
        if rows:
            yield "\nTargets:\n"
            yield from rows


def _origin(found: dict[str, Any]) -> Iterator[str]:
    where = found["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(found["libraries"].items()))
    brokers = "; ".join(f"{name} ({', '.join(lines) or 'as it comes'})" for name, lines in found["brokers"].items())
    brokers = f"brokers: {brokers}; " if brokers else ""
    yield (
        f"{found['date'][:10]}, {where['cores']} cores ({where['processor']}), {where['system']}, "
        f"Python {where['python']}; medians of {found['runs']}; {brokers}{libraries}."
    )


def _markdown(found: dict[str, Any]) -> Iterator[str]:
    """A table for each combination of labels but the one that makes the columns."""
    tables: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for case in found["cases"]:
        rest = tuple((key, value) for key, value in case["labels"].items() if key != found["column"])
        tables.setdefault(rest, []).append(case)
    for labels, cases in tables.items():
        columns = [(case, metric) for case in cases for metric in case["metrics"]]
        yield f"\n{', '.join(f'{key} {value}' for key, value in labels)}\n"
        heads = [_head(found["column"], case, metric) for case, metric in columns]
        yield f"| | {' | '.join(heads)} |"
        yield "|---|" + "---:|" * len(columns)
        for name in dict.fromkeys(row["name"] for case in cases for row in case["rows"]):
            cells = [_cell(case, name, metric) for case, metric in columns]
            yield f"| {name} | {' | '.join(cells)} |"


def _head(column: str, case: dict[str, Any], metric: dict[str, Any]) -> str:
    value = case["labels"].get(column)
    return ", ".join(filter(None, [value and f"{column} {value}", metric["name"], metric["unit"]]))


def _cell(case: dict[str, Any], name: str, metric: dict[str, Any]) -> str:
    row = next((row for row in case["rows"] if row["name"] == name), None)
    if row is None:
        return ""
    if "failure" in row:
        return "failed" if row["failure"] else ""
    factor = better(case, row, metric)
    text = shown(row["figures"][metric["name"]]["median"])
    text += f" ({factor:.2f}x)" if factor is not None else ""
    lost = sum(row["lost"])
    return text + (f", lost {100 * lost / (row['messages'] * len(row['lost'])):.1f}%" if lost else "")

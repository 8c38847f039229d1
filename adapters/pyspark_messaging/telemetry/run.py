"""``run``: the whole pipeline, from the start of its broker to the last plot.

Shows a line for each stage and, on a terminal, a status line below.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import TYPE_CHECKING, Final, Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from messaging.cli.output import one_line, show
from messaging.errors import ArgumentError, MessagingError
from messaging.execution import Flag, start_thread
from pyspark_messaging.errors import first_line
from pyspark_messaging.telemetry import FleetPlan
from pyspark_messaging.telemetry.bridge import SEVERE, AlertBridge
from pyspark_messaging.telemetry.fleet import START
from pyspark_messaging.telemetry.processes import Fleet, check_mosquitto, mosquitto
from pyspark_messaging.telemetry.session import LocalSpark, SparkFailedError, check_installed

if TYPE_CHECKING:
    from pyspark_messaging.telemetry.job import TelemetryJob
    from pyspark_messaging.telemetry.report import PipelineRun

T = TypeVar("T")

#: file that marks an output folder, with the parameters of the run
MARKER: Final = "pipeline.json"
_LEDGER: Final = "sent.jsonl"
#: interval of the status line on a terminal, and of status lines elsewhere, in seconds
_TICK: Final = 0.25
_TELL: Final = 5.0
#: timeout of each step of Spark, in seconds
_STEP_TIMEOUT: Final = 180.0


def prepare(output: Path, *, overwrite: bool) -> None:
    """Create the folder of a run; empty it only with ``overwrite``, and only if it is the output of a pipeline."""
    if output.exists() and not output.is_dir():
        raise ArgumentError(f"--output {output} is a file; name a directory")
    if output.exists() and any(output.iterdir()):
        if not overwrite:
            raise ArgumentError(f"--output {output} is not empty: name another directory, or add --overwrite")
        if not (output / MARKER).is_file():
            raise ArgumentError(f"--output {output} is no output of a pipeline: it is not overwritten")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)


def run(plan: FleetPlan, output: Path, *, overwrite: bool = False, keep: bool = False) -> bool:
    """Run the whole pipeline once, with all files in ``output``; return whether all checks were right.

    ``overwrite`` replaces an earlier run. With ``keep``, journal, checkpoints and logs of a successful run stay.
    """
    check_installed("matplotlib")
    check_mosquitto()
    prepare(output, overwrite=overwrite)
    (output / MARKER).write_text(json.dumps(asdict(plan)) + "\n")
    with Display() as display, _torn_down() as stack:
        try:
            done, plots = _run(plan, output, display, stack)
        except (MessagingError, KeyboardInterrupt):
            display.say(f"ended early; logs and stored messages are in {output}")
            raise
    is_right = all(check.is_right for check in done.checks())
    if is_right and not keep:
        shutil.rmtree(output / "work", ignore_errors=True)
    _summary(done, output, plots, display.seconds)
    return is_right


@contextlib.contextmanager
def _torn_down() -> Iterator[contextlib.ExitStack]:
    """Provide a stack that is always unwound: a second Ctrl-C does not stop the teardown."""
    stack = contextlib.ExitStack()
    try:
        yield stack
    finally:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            stack.close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _run(
    plan: FleetPlan, output: Path, display: Display, stack: contextlib.ExitStack
) -> tuple[PipelineRun, list[Path]]:
    # not at import: PySpark and matplotlib are slow to import, and may be missing
    from pyspark_messaging.telemetry import batch, plots
    from pyspark_messaging.telemetry.job import Folders, TelemetryJob
    from pyspark_messaging.telemetry.report import PipelineRun

    folders = Folders(output)
    ledger = output / _LEDGER

    def wait(what: str, function: Callable[[], T]) -> T:
        """Run a step in another thread, and show it in the status line."""
        return display.wait(function, lambda: display.status(what, quietly=True))

    url = stack.enter_context(mosquitto())
    display.say(f"mosquitto listens at {url}")
    bridge = stack.enter_context(AlertBridge(url))

    local = LocalSpark("telemetry", folders.work / "spark")
    stack.callback(local.close)
    spark = wait("Spark starts", local.start)
    display.say(f"Spark {spark.version} runs, on {spark.sparkContext.defaultParallelism} cores")

    job = wait("the queries start", lambda: TelemetryJob(spark, url, folders))
    wait("the first query subscribes", job.wait_subscribed)
    display.say(f"{len(job.queries)} queries run: {', '.join(job.queries)}")

    status = _QueryProgress(job, bridge)
    with Fleet(url, plan, ledger, folders.work / "fleet.log") as fleet:
        end = START + plan.span
        display.say(
            f"{plan.devices} devices publish for {plan.seconds:g} s: {START:%a %H:%M} to {end:%a %H:%M} by their clocks"
        )
        while fleet.is_running:
            display.status(status.text(fleet))
            job.check()
            time.sleep(_TICK)
    display.say(f"the fleet has sent {fleet.accepted:,} messages, {fleet.failed:,} failed; the queries finish")
    for step in (job.drain, bridge.flush):
        display.wait(step, lambda: display.status(status.text(fleet)))
    display.say(f"streaming is done: {status.text(fleet)}")

    batches, watermark = wait("the queries end", lambda: (list(job.batches()), job.watermark()))
    wait("the queries end", job.stop)
    tables = wait("the batch job runs", lambda: batch.run(spark, folders, ledger))
    display.say("the batch job has written site_hourly, site_daily, top_devices and completeness")
    live = {"alerts": dict(bridge.delays), "severe": len(bridge.severe), "watermark": watermark}
    done = wait("the tables are verified", lambda: PipelineRun.load(spark, folders, tables, ledger, batches, **live))
    wait("Spark ends", local.close)
    drawn = wait("plots are drawn", lambda: plots.draw(done, output / "plots"))
    display.say(f"{len(drawn)} plots are drawn")
    return done, drawn


class _QueryProgress:
    """The progress of the queries, in a line."""

    def __init__(self, job: TelemetryJob, bridge: AlertBridge) -> None:
        self._job = job
        self._bridge = bridge
        self._rows: dict[str, dict[int, int]] = {name: {} for name in job.queries}

    def text(self, fleet: Fleet) -> str:
        """Return the line."""
        for name, query in self._job.queries.items():
            progress = query.lastProgress
            if progress is not None and progress["numInputRows"]:
                self._rows[name][progress["batchId"]] = progress["numInputRows"]
        sums = {name: sum(rows.values()) for name, rows in self._rows.items()}
        text = f"sent {fleet.accepted:,}, stored {sums['messages']:,}, aggregated {sums['aggregates']:,}"
        text += f", judged {sums['anomalies']:,}, alerts {len(self._bridge.delays)}"
        last = self._bridge.last
        return text if last is None else f"{text}; last: {last.device} {last.metric} {last.value:.1f}"


def _summary(done: PipelineRun, output: Path, plots: list[Path], seconds: float) -> None:
    """Print the figures, the checks, and the paths of tables and plots."""
    made, found, others = done.injected()
    injected = f"of {made:,} that the fleet made up {found:,} were found; {others:,} others"
    delays = sorted(done.alerts.values())
    figures = [
        ("readings stored", f"{len(done.readings):,} of {done.readings['device'].nunique()} devices"),
        ("dead letters", f"{done.rejected:,}"),
        ("windows closed", f"{len(done.aggregates):,}; {done.dropped():,} readings came too late for theirs"),
        ("anomalies", f"{len(done.anomalies):,}; {injected}"),
        ("alerts on the event bus", f"{len(delays):,}, of which {done.severe:,} with a score of {SEVERE} or more"),
    ]
    if delays:
        figures.append(("from reading to alert", f"{median(delays):.1f} s (median), {delays[-1]:.1f} s (longest)"))
    worst = done.anomalies.groupby("device").agg(
        count=("id", "size"), score=("score", "max"), metrics=("metric", lambda names: ", ".join(sorted(set(names))))
    )
    rows = worst.sort_values(["count", "score"], ascending=False).head(5).itertuples()
    checks = done.checks()
    right = Text("ok", style="green")
    wrong = Text("WRONG", style="bold red")
    tables = sorted(folder for folder in (output / "tables").iterdir() if folder.is_dir())
    places = [(f"table {each.name}", str(each)) for each in tables] + [
        (f"plot {each.stem}", str(each)) for each in plots
    ]
    for columns, lines in (
        (("run", ""), figures),
        (
            ("devices with most anomalies", "anomalies", "highest score", "metrics"),
            [(row.Index, str(row.count), f"{row.score:.0f}", row.metrics) for row in rows],
        ),
        (
            ("check", "expected", "found", ""),
            [
                (each.what, f"{each.expected:,}", f"{each.found:,}", right if each.is_right else wrong)
                for each in checks
            ],
        ),
        (("where", ""), places),
    ):
        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for line in lines:
            table.add_row(*(each if isinstance(each, Text) else one_line(each) for each in line))
        show("", table)
    if failed := sum(not check.is_right for check in checks):
        verdict = Text(f"{failed} of {len(checks)} checks are WRONG", style="bold red")
        verdict.append(f"; logs, journal and checkpoints are in {output / 'work'}")
    else:
        stored = len(done.readings) + done.rejected
        text = f"{len(checks)} checks, all right: each of the {stored:,} accepted messages is stored exactly once"
        verdict = Text(text, style="bold")
    show("", verdict.append(f"; {seconds:.1f} s"))


# --- output


class Display:
    """Lines with the time since the start, and a status line that changes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = 0.0
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_working = False
        self._spinner = Spinner("dots")
        console = Console(highlight=False, emoji=False)
        is_terminal = console.is_terminal and sys.stdout is not None
        self._live = Live(console=console, refresh_per_second=8, transient=True) if is_terminal else None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        line = Text.assemble((f"{self.seconds:5.1f} s  ", "dim"), one_line(text))
        if self._live is not None:
            self._live.console.print(line)
        else:
            show(line)

    def status(self, text: str, *, quietly: bool = False) -> None:
        """Redraw the status line; without a terminal print one every few seconds, unless ``quietly``."""
        if self._live is not None:
            self._spinner.update(text=Text(f"{self.seconds:4.0f} s  {one_line(text)}"))
            self._live.update(self._spinner)
        elif not quietly and self.seconds - self._told >= _TELL:
            self._told = self.seconds
            self.say(text)

    def wait(self, function: Callable[[], T], tick: Callable[[], None]) -> T:
        """Call ``function`` in another thread, call ``tick`` here until it returns, and return its result.

        An interrupt ends this wait, but not a call of Spark. The other thread is always the same: Spark binds its
        session to it.

        Raises:
            SparkFailedError: ``function`` failed, or has not returned within ``_STEP_TIMEOUT``.
        """
        until = time.monotonic() + _STEP_TIMEOUT
        outcome: list[T] = []
        failure: list[MessagingError] = []
        done = Flag()

        def work() -> None:
            try:
                outcome.append(function())
            except MessagingError as error:
                failure.append(error)
            except BaseException as error:  # noqa: BLE001  # raised in the calling thread
                failure.append(SparkFailedError(first_line(error)))  # while Spark can still describe it
            done.set()

        if not self._is_working:
            start_thread(self._run, "messaging-pipeline")
            self._is_working = True
        self._work.put(work)
        while not done.is_set():
            if time.monotonic() > until:
                raise SparkFailedError(f"Spark has not finished within {_STEP_TIMEOUT:g} s")
            tick()
            done.wait(_TICK)
        if failure:
            raise failure[0]
        return outcome[0]

    def _run(self) -> None:
        while True:
            self._work.get()()

"""``run``: the whole pipeline, from the start of its broker to the last plot."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from rich.table import Table
from rich.text import Text

from adapters.spark.telemetry.bridge import SEVERE, AlertBridge
from adapters.spark.telemetry.display import TICK, Display
from adapters.spark.telemetry.fleet import START, FleetPlan
from adapters.spark.telemetry.processes import Fleet, find_mosquitto, mosquitto
from adapters.spark.telemetry.session import LocalSpark, SparkFailedError, check_installed, first_line
from messaging.cli.output import one_line, show
from messaging.errors import ArgumentError, MessagingError

if TYPE_CHECKING:
    from adapters.spark.telemetry.job import TelemetryJob
    from adapters.spark.telemetry.report import Run

T = TypeVar("T")

#: file that marks an output folder, with the parameters of the run
MARKER: Final = "pipeline.json"
_LEDGER: Final = "sent.jsonl"
#: timeout of each step of Spark after the end of the fleet, in seconds
_STEP_TIMEOUT: Final = 180.0


class NotInTimeError(MessagingError):
    """A step of Spark has exceeded its timeout."""


def prepare(output: Path, *, overwrite: bool) -> None:
    """Create the folder of a run.

    Raises:
        ArgumentError: it is not empty, and ``overwrite`` is false, or it is no output of a pipeline.
    """
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
    """Run the whole pipeline once.

    Args:
        plan: the parameters of the fleet.
        output: the directory of all files.
        overwrite: whether to replace an earlier run.
        keep: whether to keep journal, checkpoints and logs after a successful run.

    Returns:
        Whether all checks were right.

    Raises:
        ConfigurationError: a program or package is not installed.
        ArgumentError: the output directory cannot be used.
        MessagingError: a part of the pipeline failed.
    """
    check_installed("matplotlib")
    find_mosquitto()
    prepare(output, overwrite=overwrite)
    (output / MARKER).write_text(json.dumps(asdict(plan)) + "\n")
    with Display() as display, _torn_down() as stack:
        try:
            done, plots = _run(plan, output, display, stack)
        except (MessagingError, KeyboardInterrupt):
            display.say(f"ended early; logs and stored messages are in {output}")
            raise
    work = output / "work"
    checks = done.checks()
    is_right = all(check.is_right for check in checks)
    if is_right and not keep:
        shutil.rmtree(work, ignore_errors=True)
    _summary(done, output, plots, display.seconds)
    return is_right


@contextlib.contextmanager
def _torn_down() -> Iterator[contextlib.ExitStack]:
    """Provide a stack that is always unwound: a second Ctrl-C does not stop the teardown."""
    stack = contextlib.ExitStack()
    try:
        yield stack
    finally:
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            stack.close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _run(plan: FleetPlan, output: Path, display: Display, stack: contextlib.ExitStack) -> tuple[Run, list[Path]]:
    # not at import: PySpark and matplotlib are slow to import, and may be missing
    from adapters.spark.telemetry import batch, plots
    from adapters.spark.telemetry.job import Folders, TelemetryJob
    from adapters.spark.telemetry.report import Run

    folders = Folders(output)
    ledger = output / _LEDGER

    def wait(what: str, function: Callable[[], T]) -> T:
        """Run a step in another thread, and show it in the status line."""
        return _within(display, function, lambda: display.status(what, quietly=True))

    url = stack.enter_context(mosquitto(folders.work / "mosquitto"))
    display.say(f"mosquitto listens at {url}")
    bridge = stack.enter_context(AlertBridge(url))

    local = LocalSpark("telemetry", folders.work / "spark")
    stack.callback(local.close)
    spark = wait("Spark starts", local.start)
    display.say(f"Spark {spark.version} runs, on {spark.sparkContext.defaultParallelism} cores")

    job = wait("the queries start", lambda: TelemetryJob(spark, url, folders))
    wait("the first query subscribes", job.wait_subscribed)
    display.say(f"{len(job.queries)} queries run: {', '.join(job.queries)}")

    status = _Status(job, bridge)
    with Fleet(url, plan, ledger, folders.work / "fleet.log") as fleet:
        end = START + plan.span
        display.say(
            f"{plan.devices} devices publish for {plan.seconds:g} s: {START:%a %H:%M} to {end:%a %H:%M} by their clocks"
        )
        while fleet.is_running:
            display.status(status.text(fleet))
            job.check()
            time.sleep(TICK)
    display.say(f"the fleet has sent {fleet.accepted:,} messages, {fleet.failed:,} failed; the queries finish")
    for step in (job.drain, bridge.flush):
        _within(display, step, lambda: display.status(status.text(fleet)))
    display.say(f"streaming is done: {status.text(fleet)}")

    batches, watermark = wait("the queries end", lambda: (list(job.batches()), job.watermark()))
    wait("the queries end", job.stop)
    tables = wait("the batch job runs", lambda: batch.run(spark, folders, ledger))
    display.say("the batch job has written site_hourly, site_daily, top_devices and completeness")
    live = {"alerts": dict(bridge.delays), "severe": len(bridge.severe), "watermark": watermark}
    done = wait(
        "the tables are verified",
        lambda: Run.load(spark, folders, tables, ledger, batches, **live),
    )
    ending = threading.Thread(target=local.close)  # while the plots are drawn
    ending.start()
    drawn = wait("plots are drawn", lambda: plots.draw(done, output / "plots"))
    wait("Spark ends", ending.join)
    display.say(f"{len(drawn)} plots are drawn")
    return done, drawn


def _within(display: Display, function: Callable[[], T], tick: Callable[[], None]) -> T:
    """Call ``display.wait`` with a timeout."""
    until = time.monotonic() + _STEP_TIMEOUT

    def explained() -> T:
        try:
            return function()
        except MessagingError:
            raise
        except Exception as error:  # while Spark can still describe it
            raise SparkFailedError(first_line(error)) from error

    def in_time() -> None:
        if time.monotonic() > until:
            raise NotInTimeError(f"Spark has not finished within {_STEP_TIMEOUT:g} s")
        tick()

    return display.wait(explained, in_time)


class _Status:
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


def _summary(done: Run, output: Path, plots: list[Path], seconds: float) -> None:
    """Print the figures, the checks, and the paths of tables and plots."""
    made, found, others = done.injected()
    delays = sorted(done.alerts.values())
    figures = {
        "readings stored": f"{len(done.readings):,} of {done.readings['device'].nunique()} devices",
        "dead letters": f"{done.rejected:,}",
        "windows closed": f"{len(done.aggregates):,}; {done.dropped():,} readings came too late for theirs",
        "anomalies": f"{len(done.anomalies):,}; of {made:,} that the fleet made up {found:,} were found; "
        f"{others:,} others",
        "alerts on the event bus": f"{len(delays):,}, of which {done.severe:,} with a score of {SEVERE} or more",
    }
    if delays:
        figures["from reading to alert"] = f"{delays[len(delays) // 2]:.1f} s (median), {delays[-1]:.1f} s (longest)"
    show("", _table(("run", ""), *figures.items()), "")
    worst = done.anomalies.groupby("device").agg(
        count=("id", "size"), metrics=("metric", lambda names: ", ".join(sorted(set(names)))), score=("score", "max")
    )
    rows = worst.sort_values(["count", "score"], ascending=False).head(5).itertuples()
    columns = ("devices with most anomalies", "anomalies", "highest score", "metrics")
    show(_table(columns, *((row.Index, str(row.count), f"{row.score:.0f}", row.metrics) for row in rows)), "")
    checks = done.checks()
    wrong = sum(not check.is_right for check in checks)
    table = Table("check", "expected", "found", "", box=None, pad_edge=False, header_style="bold")
    for check in checks:
        mark = Text("ok", style="green") if check.is_right else Text("WRONG", style="bold red")
        table.add_row(check.what, f"{check.expected:,}", f"{check.found:,}", mark)
    show(table, "")
    tables = sorted(folder for folder in (output / "tables").iterdir() if folder.is_dir())
    places = [(f"table {each.name}", str(each)) for each in tables] + [
        (f"plot {each.stem}", str(each)) for each in plots
    ]
    show(_table(("where", ""), *places), "")
    if wrong:
        verdict = Text(f"{wrong} of {len(checks)} checks are WRONG", style="bold red")
        verdict.append(f"; logs, journal and checkpoints are in {output / 'work'}")
    else:
        stored = len(done.readings) + done.rejected
        verdict = Text(
            f"{len(checks)} checks, all right: each of the {stored:,} accepted messages is stored exactly once"
        )
        verdict.stylize("bold")
    show(verdict.append(f"; {seconds:.1f} s"))


def _table(columns: tuple[str, ...], *rows: tuple[str, ...]) -> Table:
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for row in rows:
        table.add_row(*map(one_line, row))
    return table

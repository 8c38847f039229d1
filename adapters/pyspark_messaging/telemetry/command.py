"""``messaging pipeline``: found by the command line through the entry point group ``messaging.commands``.

Spark is imported when a command runs: the help must be fast, and must work without Spark.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from messaging.cli import options
from messaging.cli.output import ExitCode
from messaging.errors import ArgumentError
from pyspark_messaging.telemetry import FleetPlan

app = options.group("pipeline")

_DEFAULT = FleetPlan()


@app.callback()
def pipeline() -> None:
    """Device telemetry through Spark: a pipeline at work, from MQTT to tables, alerts and plots."""


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(metavar="S", help="How long the devices publish.")] = _DEFAULT.seconds,
    devices: Annotated[int, typer.Option(metavar="N", help="How many devices there are.")] = _DEFAULT.devices,
    rate: Annotated[
        float, typer.Option(metavar="N", help="Messages a second, of all devices together.")
    ] = _DEFAULT.rate,
    seed: Annotated[int, typer.Option(metavar="N", help="Decides what the devices send.")] = _DEFAULT.seed,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", show_default=False, help="By default telemetry-DATE-TIME, a new one here."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier run has left in DIR.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep journal, checkpoints and logs, too; else only if something is wrong.")
    ] = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """See it work, from MQTT to plots: ends by itself, after about a minute.

    Starts a mosquitto and a Spark of its own, simulated devices that publish over MQTT, a streaming job that stores,
    aggregates and judges what they send and publishes alerts, and a batch job over the tables. Then it draws plots and
    verifies that every message the broker has accepted is stored exactly once. Exit code 1 if that, or anything else
    that must hold, does not.

    Needs the extra 'pipeline', a Java runtime and mosquitto.
    """
    del quiet, debug  # their callbacks have applied them
    for name, value, low, high in (
        ("seconds", seconds, 2, 3600),
        ("devices", devices, 1, 1000),
        ("rate", rate, 1, 5000),
    ):
        if not low <= value <= high:  # nan, too
            raise ArgumentError(f"--{name} must be from {low} to {high}, not {value:g}")
    if seconds * rate < devices:
        raise ArgumentError(f"--devices {devices}: with {seconds * rate:g} messages not each of them sends one")
    if output is None:
        output = Path(f"telemetry-{datetime.now():%Y%m%d-%H%M%S}")
    from pyspark_messaging.telemetry.run import run

    plan = FleetPlan(seed=seed, devices=devices, seconds=seconds, rate=rate)
    return ExitCode.OK if run(plan, output, overwrite=overwrite, keep=keep) else ExitCode.FAILED

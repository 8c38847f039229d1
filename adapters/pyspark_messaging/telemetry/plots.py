"""Four plots of a run. The colours of Okabe and Ito suit colour-blind readers; shapes differ, too."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.dates import AutoDateLocator
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from pyspark_messaging.telemetry.job import TRIGGER, WATERMARK, WINDOW
from pyspark_messaging.telemetry.model import METRICS
from pyspark_messaging.telemetry.report import PipelineRun, duration

BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
VERMILLION: Final = "#D55E00"
_STYLES: Final = {
    "messages": (BLUE, "o", "store messages"),
    "aggregates": ("#E69F00", "s", "aggregate"),
    "anomalies": (VERMILLION, "^", "detect anomalies"),
    "alerts": ("#009E73", "D", "publish alerts"),
}

_STYLE: Final = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "font.size": 9.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "date.converter": "concise",
    "savefig.dpi": 130,
}


def draw(run: PipelineRun, folder: Path) -> list[Path]:
    """Draw all plots; return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = {"readings": readings, "aggregates": heat_map, "lateness": lateness, "batches": batches}
    files = {folder / f"{name}.png": make for name, make in plots.items()}
    with mpl.rc_context(_STYLE):
        for file, make in files.items():
            make(run).savefig(file)
    return list(files)


def _figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - 0.75 / height)))
    figure.text(0.01, 1 - 0.12 / height, title, ha="left", va="top", fontsize=13, fontweight="bold")
    figure.text(0.01, 1 - 0.42 / height, subtitle, ha="left", va="top", fontsize=9.5, color="#444444")
    return figure


def readings(run: PipelineRun) -> Figure:
    """Draw the readings and the anomalies of three devices, those with the most kinds of anomalies."""
    kinds = run.anomalies.groupby("device")["metric"].agg(["nunique", "size"]).sort_values(["nunique", "size"])
    devices = list(kinds.index[-3:]) or sorted(run.readings["device"].unique())[:3]
    figure = _figure(
        13, 2.3 * len(devices) + 1.5,
        "Readings of the devices, and their anomalies",
        "Devices that had anomalies of several kinds; time of measurement, by the clock of the device (UTC)",
    )  # fmt: skip
    axes = figure.subplots(len(devices), len(METRICS), sharex=True, sharey="col", squeeze=False)
    for row, device in zip(axes, devices, strict=True):
        mine = run.readings[run.readings["device"] == device].sort_values("measured_at")
        flagged = run.anomalies[run.anomalies["device"] == device]
        row[0].set_title(device, fontweight="bold")
        for ax, metric in zip(row, METRICS, strict=True):
            ax.plot(mine["measured_at"], mine[metric.name], color=BLUE, linewidth=0.9, label="reading")
            found = flagged[flagged["metric"] == metric.name]
            ax.scatter(
                found["measured_at"], found["value"], s=46, facecolor="none", edgecolor=VERMILLION, linewidth=1.6,
                zorder=3, label="anomaly",
            )  # fmt: skip
            ax.set_ylabel(f"{metric.name} ({metric.unit})")
            ax.xaxis.set_major_locator(AutoDateLocator(maxticks=7))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper right", ncols=2)
    return figure


def heat_map(run: PipelineRun) -> Figure:
    """Draw the aggregates: a row for each device, a column for each window."""
    devices = sorted(run.readings["device"].unique())
    hours = pd.date_range(run.readings["start"].min(), run.readings["start"].max(), freq="h")
    figure = _figure(
        13, min(11.0, 2.6 + 0.16 * len(devices)),
        f"Aggregates: a cell is a device in a window of {WINDOW}",
        "Left: the mean of the temperature. Right: standard deviation of the vibration within the window, where bursts "
        "show. Grey: no readings, or a window that the stream has not closed yet",
    )  # fmt: skip
    panels = (
        ("temperature_mean", "mean temperature (°C)", "cividis", None),
        ("vibration_stddev", "standard deviation of vibration (mm/s)", "magma", "log"),
    )
    for ax, (column, label, colours, scale) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        cells = run.aggregates.pivot_table(index="device", columns="start", values=column)
        cells = cells.reindex(index=devices, columns=hours).astype(float)
        if scale == "log":
            cells = cells.where(cells > 0)
        if cells.isna().all(axis=None):  # in a short run
            ax.text(0.5, 0.5, "no window was closed", transform=ax.transAxes, ha="center", va="center")
            cells, scale = cells.fillna(0), None
        ax.set_facecolor("#D9D9D9")
        ax.grid(visible=False)
        image = ax.imshow(cells.to_numpy(), aspect="auto", cmap=colours, norm=scale, interpolation="nearest")
        figure.colorbar(image, ax=ax, label=label, pad=0.02, aspect=35)
        step = max(1, len(hours) // 8)
        ax.set_xticks(range(0, len(hours), step), [f"{hour:%H:%M}" for hour in hours[::step]])
        ax.set_xlabel(f"start of the window (UTC), from {hours[0]:%Y-%m-%d}")
        every = len(devices) // 60 + 1
        ax.set_yticks(range(0, len(devices), every), devices[::every], fontsize=7.5)
    return figure


def lateness(run: PipelineRun) -> Figure:
    """Draw how late readings were, against the watermark."""
    figure = _figure(
        10.5, 5.2,
        "How late readings were",
        f"{len(run.readings):,} readings; {run.dropped():,} came when their window of {WINDOW} was closed: stored, "
        "seen by the batch job, but not in the aggregates of the stream",
    )  # fmt: skip
    ax = figure.subplots()
    # logarithmic steps from a minute on; linear below, since readings of clocks that are ahead are early
    edges = [-600, -300, -180, -120, -60, -30, 0, 5, 10, 15, 20, 30, 45, 60, *np.geomspace(90, 43200, 20)]
    late = run.readings["late"]
    groups = [run.readings[rows]["lateness"].clip(edges[0], edges[-1] - 1) for rows in (~late, late)]
    names = ("in time for its window", "late: its window was due to be closed")
    ax.hist(
        groups, bins=edges, stacked=True, color=[BLUE, VERMILLION], hatch=["", "////"], edgecolor="white",
        label=[f"{name} ({len(values):,})" for name, values in zip(names, groups, strict=True)],
    )  # fmt: skip
    limit = duration(WATERMARK).total_seconds()
    ax.axvline(limit, color="black", linestyle="--", linewidth=1.3, label=f"watermark: {WATERMARK} behind the newest")
    ax.set_xscale("symlog", linthresh=60, linscale=1.2)
    ax.set_yscale("log")
    ticks = {-300: "-5 min", -60: "-1 min", 0: "0", 30: "30 s", 60: "1 min", 300: "5 min", 1800: "30 min", 7200: "2 h"}
    ticks |= {21600: "6 h"}
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.set_xticks([], minor=True)
    ax.set_xlabel(
        "from the measurement, by the clock of the device, until the gateway sent it (negative: a clock that is ahead)"
    )
    ax.set_ylabel("readings (logarithmic)")
    ax.set_ylim(bottom=0.7)
    ax.legend(loc="upper left")
    return figure


def batches(run: PipelineRun) -> Figure:
    """Draw the rows per second and the duration of micro-batches."""
    rows = run.batches.sort_values("at")
    began = rows["at"].min()
    rows["began"] = (rows["at"] - began).dt.total_seconds()
    told = f"; an alert came {np.median([*run.alerts.values()]):.1f} s after its reading (median)" if run.alerts else ""
    figure = _figure(
        10.5, 6.2,
        "Micro-batches",
        f"A query starts one every {TRIGGER} if there is anything to do; the first ones compile what they run{told}",
    )  # fmt: skip
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.4))
    seconds = (run.readings["received_at"] - pd.Timestamp(began).tz_convert(None)).dt.total_seconds()
    if len(seconds):
        bins = np.arange(np.floor(seconds.min()), np.ceil(seconds.max()) + 1)
        above.hist(seconds, bins=list(bins), color=SKY, label="readings that came, each second")
    stored = rows[rows["query"] == "messages"]
    above.bar(
        stored["began"], stored["rows"] / stored["seconds"].clip(lower=0.001), stored["seconds"], align="edge",
        facecolor="none", edgecolor=BLUE, linewidth=1.4, label="stored: a box is a micro-batch, its area the messages",
    )  # fmt: skip
    above.set_ylabel("messages / s")
    above.legend(loc="upper right")
    for query, (colour, marker, name) in _STYLES.items():
        mine = rows[rows["query"] == query]
        label = f"{name}: median {mine['seconds'].median():.1f} s" if len(mine) else f"{name}: none"
        below.plot(mine["began"], mine["seconds"], color=colour, marker=marker, markersize=5, linewidth=1, label=label)
    below.set_ylabel("duration of a micro-batch (s)")
    below.set_ylim(bottom=0)
    below.set_xlabel("start of the micro-batch, seconds since the first one (real time)")
    below.legend(loc="upper right")
    return figure

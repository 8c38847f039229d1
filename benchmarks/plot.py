"""A picture of results: bars of the medians, whiskers from the slowest run to the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.contenders import OURS


def draw(found: dict[str, Any], path: Path) -> Path:
    """Draw one panel for each case and metric, save it as ``path`` and return that."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [(case, metric) for case in found["cases"] for metric in case["metrics"]]
    columns = min(3, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 2.8 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (case, metric) in zip(axes.flat, panels, strict=False):
        shown = [row for row in case["rows"] if "figures" in row]
        figures = [row["figures"][metric["name"]] for row in shown]
        medians = [each["median"] for each in figures]
        reach = [[each["median"] - each["min"] for each in figures], [each["max"] - each["median"] for each in figures]]
        colours = ["tab:orange" if row["name"].startswith(OURS) else "tab:blue" for row in shown]
        axis.barh([row["name"] for row in shown], medians, xerr=reach, color=colours, capsize=3)
        axis.invert_yaxis()
        axis.set_title(", ".join(f"{key} {value}" for key, value in case["labels"].items()), fontsize=9)
        axis.set_xlabel(f"{metric['name']}, {metric['unit']}", fontsize=8)
        axis.tick_params(labelsize=8)
    figure.suptitle(found["title"])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path

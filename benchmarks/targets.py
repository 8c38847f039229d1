"""What the project wants to reach beside its peers, and whether results show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.contenders import OURS


@dataclass(frozen=True, slots=True)
class Target:
    """Ours should be at least ``factor`` times as fast as ``peer``, with payloads of 100 bytes."""

    benchmark: str
    #: label and value of the case
    label: tuple[str, str]
    peer: str
    factor: float


TARGETS: Final = (
    *(Target("mqtt", ("qos", qos), "paho", factor) for qos, factor in zip("012", (1.5, 2, 1.5), strict=True)),
    *(Target("mqtt", ("qos", qos), "aiomqtt", factor) for qos, factor in zip("012", (3, 3, 2.5), strict=True)),
    *(Target("mqtt", ("qos", qos), "faststream", factor) for qos, factor in zip("012", (5, 4, 2.5), strict=True)),
    *(Target("mqtt", ("qos", qos), "gmqtt", 0.9) for qos in "012"),
    Target("amqp", ("operation", "publish"), "aio-pika", 6),
    Target("amqp", ("operation", "publish"), "pika", 1),
    Target("amqp", ("operation", "consume"), "aio-pika", 2.5),
    Target("amqp", ("operation", "consume"), "pika", 1),
    Target("amqp", ("operation", "both"), "aio-pika", 4),
    Target("amqp", ("operation", "both"), "faststream", 5),
    Target("amqp", ("operation", "both"), "pika", 1),
)
PAYLOAD: Final = "100"


def reached(found: dict[str, Any]) -> Iterator[tuple[Target, dict[str, str], float]]:
    """Each target that the results of a benchmark tell of, the labels of the case, and the factor there."""
    targets = [target for target in TARGETS if target.benchmark == found["benchmark"]]
    for case in found["cases"] if targets else ():
        labels = case["labels"]
        rates = {row["name"]: row["figures"]["rate"]["median"] for row in case["rows"] if "figures" in row}
        for target in targets:
            key, value = target.label
            fits = labels[key] == value and labels["payload"] == PAYLOAD
            if fits and rates.get(OURS) and rates.get(target.peer):
                yield target, labels, rates[OURS] / rates[target.peer]


def lines(found: dict[str, Any]) -> Iterator[str]:
    """For the terminal."""
    for target, labels, factor in reached(found):
        where = ", ".join(f"{key} {value}" for key, value in labels.items())
        verdict = "met" if factor >= target.factor else "MISSED"
        yield f"target {verdict:7} {where}: {target.factor:g}x {target.peer}, is {factor:.2f}x"


def markdown(found: dict[str, Any]) -> Iterator[str]:
    """For the page."""
    rows = [*reached(found)]
    if not rows:
        return
    yield "| case | peer | wanted | is | |"
    yield "|---|---|---:|---:|---|"
    for target, labels, factor in rows:
        where = ", ".join(f"{key} {value}" for key, value in labels.items() if key != "payload")
        verdict = "met" if factor >= target.factor else "**missed**"
        yield f"| {where} | {target.peer} | {target.factor:g}x | {factor:.2f}x | {verdict} |"

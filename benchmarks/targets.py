"""What the project wants to reach beside its peers, and whether results show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.contenders import OURS


@dataclass(frozen=True, slots=True)
class Target:
    """Ours should be at least ``factor`` times as good as ``peer``."""

    benchmark: str
    #: label and value of the cases it is about
    labels: tuple[tuple[str, str], ...]
    peer: str
    factor: float
    #: what is compared
    metric: str = "rate"
    #: the peer's case, where that is another one: labels that differ
    beside: tuple[tuple[str, str], ...] = ()
    #: or this much, whatever the peer does
    enough: float | None = None

    @property
    def wanted(self) -> str:
        """In words."""
        return f"{self.factor:g}x" + (f" (or {self.enough:,.0f}/s)" if self.enough is not None else "")


def _mqtt(qos: str, peer: str, factor: float) -> Target:
    return Target("mqtt", (("qos", qos), _PAYLOAD), peer, factor)


def _amqp(operation: str, peer: str, factor: float) -> Target:
    return Target("amqp", (("operation", operation), _PAYLOAD), peer, factor)


def _requests(protocol: str, concurrency: str, peer: str, factor: float, metric: str = "rate") -> Target:
    return Target("requests", (("protocol", protocol), ("concurrency", concurrency)), peer, factor, metric)


def _spark(source: str, peer: str, factor: float, enough: float | None = None) -> Target:
    return Target("spark", (("from", source), ("into", "noop")), peer, factor, enough=enough)


def _journal(peer: str) -> Target:
    return Target("journal", (("writers", "64"), _PAYLOAD), peer, 5)


def _events(peer: str, factor: float) -> Target:
    return Target("events", (("kind", "typed"), ("handlers", "1"), ("topics", "1")), peer, factor)


def _distributed(protocol: str, peer: str, factor: float) -> Target:
    return Target("distributed", (("protocol", protocol), ("load", "as fast as possible")), peer, factor)


def _remote(between: str, peer: str, factor: float, **options: Any) -> Target:
    return Target("remote", (("between", between),), peer, factor, **options)


_PAYLOAD: Final = ("payload", "100")
TARGETS: Final = (
    *(_mqtt(qos, "paho", factor) for qos, factor in zip("012", (1.5, 2, 1.5), strict=True)),
    *(_mqtt(qos, "aiomqtt", factor) for qos, factor in zip("012", (3, 3, 2.5), strict=True)),
    *(_mqtt(qos, "faststream", factor) for qos, factor in zip("012", (5, 4, 2.5), strict=True)),
    *(_mqtt(qos, "gmqtt", 0.9) for qos in "012"),
    _amqp("publish", "aio-pika", 6),
    _amqp("publish", "pika", 1),
    _amqp("consume", "aio-pika", 2.5),
    _amqp("consume", "pika", 1),
    _amqp("both", "aio-pika", 4),
    _amqp("both", "faststream", 5),
    _amqp("both", "pika", 1),
    _requests("MQTT 5", "100", "paho", 1.5),
    _requests("MQTT 5", "100", "paho-nodelay", 1.5),
    _requests("MQTT 5", "100", "faststream", 2),
    Target(
        "requests", (("protocol", "MQTT 3.1.1"), ("concurrency", "100")), OURS, 0.8, beside=(("protocol", "MQTT 5"),)
    ),
    _requests("AMQP", "100", "aio-pika-direct", 4),
    _requests("AMQP", "100", "aio-pika-queue", 4),
    _requests("AMQP", "100", "faststream", 15),
    *(_requests("MQTT 5", "1", peer, 1, "p50") for peer in ("paho", "paho-nodelay")),
    *(_requests("AMQP", "1", peer, 1, "p50") for peer in ("aio-pika-direct", "aio-pika-queue")),
    _journal("sqlite"),
    _journal("persist-queue"),
    _events("ipopo-post", 40),
    _events("bubus", 150),
    # asynchronous and ordered, at most four times what calling the handler through a signal costs
    _events("blinker", 0.25),
    Target("events", (("handlers", "1"), ("topics", "10000")), OURS, 1 / 1.3, beside=(("topics", "1"),)),
    *(_distributed(protocol, "raw", 0.6) for protocol in ("MQTT 3.1.1", "MQTT 5", "AMQP")),
    *(_distributed(protocol, "ipopo", 5) for protocol in ("MQTT 3.1.1", "MQTT 5")),
    _remote("nothing", "requests", 0.7),
    *(
        # the journal is measured in one process only
        _remote(between, "journal", 0.5, beside=(("where", "one process"),))
        for between in ("agent", "mailbox", "agent, mailbox")
    ),
    _spark("journal", "arrow", 0.7, enough=500_000),
    _spark("mosquitto", "adapter", 0.8),
    _spark("mosquitto", "simple", 5),
)


def reached(found: dict[str, Any]) -> Iterator[tuple[Target, dict[str, str], float, bool]]:
    """Each target that results tell of, the labels of the case, the factor there, and whether it is met."""
    targets = [target for target in TARGETS if target.benchmark == found["benchmark"]]
    for case in found["cases"] if targets else ():
        labels: dict[str, str] = case["labels"]
        for target in targets:
            if not labels.items() >= {*target.labels}:
                continue
            theirs = next((each for each in found["cases"] if each["labels"] == labels | dict(target.beside)), None)
            figures = _median(case, OURS, target.metric), _median(theirs, target.peer, target.metric)
            if all(figures):
                more_is_better = target.metric == "rate"
                ours, peer = figures if more_is_better else figures[::-1]
                is_enough = target.enough is not None and ours >= target.enough
                yield target, labels, ours / peer, is_enough or ours / peer >= target.factor


def _median(case: dict[str, Any] | None, name: str, metric: str) -> float:
    """Of a contender; nothing if it did not take part."""
    rows = case["rows"] if case is not None else ()
    found = next((row for row in rows if row["name"] == name and "figures" in row), None)
    return float(found["figures"][metric]["median"]) if found is not None else 0.0


def _peer(target: Target) -> str:
    what = "" if target.metric == "rate" else f", {target.metric}"
    return " ".join((target.peer, *(value for _, value in target.beside))) + what


def lines(found: dict[str, Any]) -> Iterator[str]:
    """For the terminal."""
    for target, labels, factor, is_met in reached(found):
        where = ", ".join(f"{key} {value}" for key, value in labels.items())
        verdict = "met" if is_met else "MISSED"
        yield f"target {verdict:7} {where}: {target.wanted} {_peer(target)}, is {factor:.2f}x"


def markdown(found: dict[str, Any]) -> Iterator[str]:
    """For the page."""
    rows = [*reached(found)]
    if not rows:
        return
    yield "| case | peer | wanted | is | |"
    yield "|---|---|---:|---:|---|"
    for target, labels, factor, is_met in rows:
        where = ", ".join(f"{key} {value}" for key, value in labels.items() if key != "payload")
        verdict = "met" if is_met else "**missed**"
        yield f"| {where} | {_peer(target)} | {target.wanted} | {factor:.2f}x | {verdict} |"

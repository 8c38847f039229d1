"""Events within a process: by handlers, by topics, typed and untyped, and how long a single event takes.

Everybody in a process of its own. What is asynchronous is measured until the last handler has returned.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Final

from benchmarks import contenders, report
from benchmarks.harness import Case, Metric, Plan, measure

#: handlers of the topic that is published to, and topics that have any: one of the two grows at a time
SIZES: Final = ((1, 1), (10, 1), (1000, 1), (1, 100), (1, 10_000))
#: rate is that of events, whatever the number of handlers
RATE: Final = (Metric("rate", "events/s", lambda run: run.rate, more_is_better=True),)
LATENCY: Final = (
    Metric("p50", "us", lambda run: float(run.said["latency"]["p50"])),
    Metric("p99", "us", lambda run: float(run.said["latency"]["p99"])),
)
#: calls of handlers in the warm-up: the slowest manage a thousand in a second
_WARM_UP: Final = 100
#: events whose latency is taken
_SINGLE: Final = 2_000


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    results = report.Results("events", "Events within a process", "topics", arguments)
    plan = Plan.of(arguments)
    peers = contenders.choose(contenders.EVENTS, arguments.peers)
    for kind in ("typed", "untyped"):
        for handlers, topics in SIZES:
            case = Case(
                labels={"kind": kind, "handlers": str(handlers), "topics": str(topics)},
                options={"kind": kind, "handlers": handlers, "topics": topics},
                port=0,
                roles=("dispatch",),
                metrics=RATE,
            )
            warm_up = max(4, min(plan.warm_up, _WARM_UP) // handlers)
            results.add(case, measure(case, peers, dataclasses.replace(plan, warm_up=warm_up)))
    case = Case({"kind": "typed", "one at a time": "1 handler"}, {}, port=0, roles=("latency",), metrics=LATENCY)
    single = dataclasses.replace(plan, warm_up=20, messages=plan.messages or min(_SINGLE, plan.warm_up))
    results.add(case, measure(case, peers, single))
    results.finish()

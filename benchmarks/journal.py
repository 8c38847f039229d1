"""Durable appends a second, from 1 and from 64 threads: the journal, SQLite used directly, and persist-queue.

Every append returns when the disk has the record (``fsync="always"``; WAL and ``synchronous=FULL``). The contenders
take turns on one disk: that of the results, because ``/tmp`` may be in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Final

from benchmarks import contenders, report
from benchmarks.harness import Case, Metric, Plan, measure

WRITERS: Final = (1, 64)
RATE: Final = (Metric("rate", "appends/s", lambda run: run.rate, more_is_better=True),)
#: appends of the warm-up
_WARM_UP: Final = 1_000


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    results = report.Results("journal", "Durable appends", "writers", arguments)
    plan = Plan.of(arguments)
    plan = dataclasses.replace(plan, warm_up=min(plan.warm_up, _WARM_UP))
    peers = contenders.choose(contenders.JOURNAL, arguments.peers)
    arguments.results.mkdir(parents=True, exist_ok=True)
    for size in arguments.payload or [100]:
        for writers in WRITERS:
            case = Case(
                labels={"writers": str(writers), "payload": str(size)},
                options={"window": writers, "size": size, "folder": str(arguments.results)},
                port=0,
                roles=("append",),
                metrics=RATE,
                setup=120.0,
            )
            results.add(case, measure(case, peers, plan))
    results.finish()

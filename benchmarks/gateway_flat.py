"""The memory of a gateway with a million messages in its buffer, while its target is away, and while it drains."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import messaging
from benchmarks import report
from benchmarks.gateway import FAST, Arrivals, fill, process, settings, subscribe
from messaging.gateway.control import call
from messaging.testing.brokers import Mosquitto

_PATIENCE = 120.0


def _resident(pid: int) -> float:
    """Return the resident memory of a process, MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"process {pid} is gone")


def run(arguments: argparse.Namespace) -> None:
    """Fill the buffer of a gateway whose target is away; print its memory on the way, and while it drains."""
    count = arguments.messages or (20_000 if arguments.quick else 1_000_000)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(Mosquitto(FAST))
        target = stack.enter_context(Mosquitto(FAST))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target_url = target.url
        target.stop()
        subscribe(source)
        gateway = stack.enter_context(process("gateway", settings(source.url, target_url, folder / "data"), folder))
        print(f"a gateway with {count:,} messages in its buffer; {report.machine()}")
        step = max(1, count // 10)
        for filled in range(step, count + 1, step):
            fill(source, step)
            _await_depth(folder / "data", filled)
            print(f"{filled:>10,} stored: {_resident(gateway.pid):6.1f} MiB")
        target.start()
        arrivals = Arrivals(target, count)
        stack.callback(arrivals.close)
        peak = 0.0
        while arrivals.seen < count:
            peak = max(peak, _resident(gateway.pid))
            time.sleep(0.2)
        print(f"drained with {arrivals.rate:,.0f} messages/s: at most {peak:.1f} MiB")


def _await_depth(data: Path, depth: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(messaging.MessagingError):
            report_ = call(data, "status", timeout=5.0)
            if report_["routes"][0]["buffer"]["depth"] >= depth:
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"{depth} messages were not stored within {_PATIENCE:g} s")
        time.sleep(0.1)

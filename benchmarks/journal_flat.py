"""A journal with a million records behind its cursor: memory stays flat; and a journal of 2 GB is open within a second.

Records of 100 bytes are submitted by the window; then the cursor reads and acknowledges them all. After that a journal
of 2 GB is filled, and opened five times, each time in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.flat import resident
from messaging.journal import Journal

if TYPE_CHECKING:
    from messaging.execution import Promise

#: submitted records that are not stored yet
_WINDOW: Final = 2_000
_LARGE: Final = 2 * 10**9
_MIB: Final = 2**20
_OPEN: Final = (
    "import sys, time; from messaging.journal import Journal; began = time.perf_counter();"
    "journal = Journal.open(sys.argv[1]); print(time.perf_counter() - began, journal.end); journal.close()"
)


def behind(folder: Path, count: int) -> None:
    """Append ``count`` records, then read and acknowledge them; print the memory at each step."""
    with Journal.open(folder, fsync="never") as journal:
        cursor = journal.cursor("slow")
        pending: deque[Promise[int]] = deque()

        def append(number: int) -> None:
            for _ in range(number):
                pending.append(journal.submit("benchmark/flat", b"x" * 100))
                if len(pending) >= _WINDOW:
                    pending.popleft().result(60)
            while pending:
                pending.popleft().result(60)

        append(20_000)
        before, began = resident(), time.monotonic()
        append(count)
        filled, seconds = resident(), time.monotonic() - began
        print(f"{count:,} records behind: {(filled - before) / _MIB:+.1f} MiB, {count / seconds:,.0f} appends/s")
        began, peak, seen = time.monotonic(), 0, 0
        while records := cursor.read():
            seen += len(records)
            cursor.commit(wait=False)
            peak = max(peak, resident())
        seconds = time.monotonic() - began
        print(f"read and acknowledged: {(peak - before) / _MIB:+.1f} MiB, {seen / seconds:,.0f} records/s")


def reopened(folder: Path, size: int) -> None:
    """Fill a journal of ``size`` bytes; print how long it takes to open it."""
    with Journal.open(folder, fsync="never") as journal:
        pending: deque[Promise[int]] = deque()
        for _ in range(size // 10_000):
            pending.append(journal.submit("benchmark/large", b"x" * 10_000))
            if len(pending) >= 500:
                pending.popleft().result(60)
        for promise in pending:
            promise.result(60)
        held = journal.info().bytes
    times = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", _OPEN, str(folder)], check=True, capture_output=True, text=True,
            cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        times.append(float(done.stdout.split()[0]))
    median = statistics.median(times)
    verdict = "met" if median < 1.0 else "MISSED"
    print(f"a journal of {held / 10**9:.2f} GB opens in {median * 1000:.0f} ms (max {max(times) * 1000:.0f})")
    print(f"target {verdict:7} opening 2 GB: 1 s, is {median:.3f} s")


def run(arguments: argparse.Namespace) -> None:
    """Run and print."""
    count = arguments.messages or (50_000 if arguments.quick else 1_000_000)
    arguments.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.results) as folder:
        behind(Path(folder, "behind"), count)
    with tempfile.TemporaryDirectory(dir=arguments.results) as folder:
        reopened(Path(folder, "large"), _LARGE // 20 if arguments.quick else _LARGE)

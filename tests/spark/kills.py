"""Drivers that are killed with -9 at random moments, and checks of their table.

Messages are published all the while. A round ends with a kill: of the driver's JVM, of the Python process that
receives for the query, or of everything the driver had started (as if the machine had gone). What the journal holds is
noted after each kill. In the end: every confirmed message is in the table once, and each row is that of the journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import messaging
from adapters.spark.errors import JournalUnreadableError
from adapters.spark.journal import Journal
from adapters.spark.journal.log import read
from messaging import MessagingError
from messaging.testing.brokers import Mosquitto
from tests.spark.harness import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from messaging.testing.brokers import Broker

_START_SECONDS: Final = 120.0


class Driver:
    """A process of ``tests.spark.driver``, and all it starts."""

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        self.batches = 0
        self.error: str | None = None
        self._running = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.driver", str(folder), *[f"{k}={v}" for k, v in options.items()]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "batch":
                self.batches += 1
            elif word == "failed":
                self.error = rest
            if word in ("batch", "failed"):
                self._running.set()
        self._running.set()

    def started(self) -> None:
        """Wait until it has done something."""
        assert self._running.wait(_START_SECONDS), "the driver does not start"
        assert self.error is None, self.error
        assert self._process.poll() is None, "the driver ended"

    def processes(self) -> dict[int, str]:
        """Everything of its session that is alive, with the command line."""
        found = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    stat = (path / "stat").read_text().rpartition(")")[2].split()
                    if int(stat[3]) == self._process.pid and stat[0] != "Z":
                        found[int(path.name)] = (path / "cmdline").read_text().replace("\x00", " ")
        return found

    def kill(self, kind: str) -> None:
        """End it as ``kind`` says."""
        processes = self.processes()
        if kind == "receiver":
            wanted = [pid for pid, line in processes.items() if "python_streaming_source_runner" in line]
        elif kind == "driver":
            wanted = [
                pid for pid, line in processes.items() if pid == self._process.pid or "java" in line.split(" ")[0]
            ]
        else:
            wanted = list(processes)
        for pid in wanted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind == "receiver":  # the query fails, and the driver with it
            self._close_input()
        self._process.wait(60)
        wait_for(lambda: not self.processes(), f"processes to end after the {kind} was killed: {self.processes()}")
        self._close()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _close(self) -> None:
        """Let go of a process that has ended."""
        assert self._process.stdout is not None
        self._close_input()
        self._reader.join(10)
        self._process.stdout.close()

    def stop(self) -> None:
        """End it in order."""
        self._close_input()
        assert self._process.wait(60) == 0, self.error
        wait_for(lambda: not self.processes(), "the driver's processes to end")
        self._close()


class Publisher:
    """Publishes numbers until it is stopped; :attr:`confirmed` says how many the broker has for sure."""

    def __init__(self, url: str, channel: str, rate: float) -> None:
        self.confirmed = 0
        self._url, self._channel, self._rate = url, channel, rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with messaging.connect(self._url) as m:
            while not self._stop.wait(0.05):
                numbers = range(self.confirmed, self.confirmed + max(1, int(self._rate * 0.05)))
                promises = [m.publish(self._channel, b"%d" % number, qos=1) for number in numbers]
                for promise in promises:
                    promise.result(30)
                self.confirmed = numbers.stop

    def stop(self) -> int:
        """End it; returns how many messages were confirmed."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.confirmed


class Ledger:
    """The rows that the journal had after each kill, by offset."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self.seen: dict[int, bytes] = {}

    def note(self) -> None:
        """Read the journal, and compare it with its earlier rows."""
        try:
            opened = Journal.view(self._path)
        except JournalUnreadableError:
            return
        (log,) = opened.logs
        for batch in read(opened.folder, log.spans(log.begin, log.end)):
            offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
            for offset, value in zip(offsets, values, strict=True):
                assert self.seen.setdefault(offset, value) == value, f"offset {offset} was {self.seen[offset]!r}"


def run(
    broker: Broker, folder: Path, kinds: Sequence[str], chance: random.Random, *, rate: float = 2000.0
) -> Counter[str]:
    """Run a round for each of ``kinds``, then one without a kill. Return counters.

    Raises:
        AssertionError: something was lost, came twice, or changed.
    """
    if isinstance(broker, Mosquitto):
        options = {"url": broker.url, "channel": "readings/#"}
    else:
        options = {"url": broker.url, "channel": "readings/#", "group": "readings"}
    ledger = Ledger(folder / "journal")
    counted: Counter[str] = Counter()
    publisher: Publisher | None = None
    for kind in [*kinds, None]:
        driver = Driver(folder, options)
        try:
            driver.started()
            if publisher is None:  # the first round has made the session, or the queue
                publisher = Publisher(broker.url, "readings/a", rate)
            if kind is not None:
                time.sleep(chance.uniform(0, 2.5))  # the random moment
                driver.kill(kind)
                ledger.note()
                counted[kind] += 1
                counted["batches"] += driver.batches
                continue
            confirmed = publisher.stop()
            wait_for(partial(_has_all, folder, confirmed), f"{confirmed} messages")
            driver.stop()
        except BaseException:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired, MessagingError):
                driver.kill("machine")
            raise
    ledger.note()
    rows = table(folder)
    found = Counter(value for _, value in rows)
    counted["messages"] = confirmed
    counted["rows"] = len(rows)
    assert len({offset for offset, _ in rows}) == len(rows), "an offset is in the table twice"
    twice = [(offset, value) for offset, value in sorted(rows) if found[value] > 1]
    assert not twice, f"{len(twice) // 2} messages are in the table twice: {twice[:3]} ... {twice[-3:]}"
    for offset, value in rows:
        assert ledger.seen.get(offset, value) == value, f"row {offset} is not that of the journal"
    return counted


def _has_all(folder: Path, count: int) -> bool:
    found = {value for _, value in table(folder)}
    return all(b"%d" % number in found for number in range(count))


def table(folder: Path) -> list[tuple[int, bytes]]:
    """Offset and value of the rows of the table, as Spark's log of it says."""
    log = folder / "table" / "_spark_metadata"
    files: list[str] = []
    names = [path.name for path in log.iterdir() if not path.name.startswith(".")] if log.is_dir() else []
    compact = [int(name.removesuffix(".compact")) for name in names if name.endswith(".compact")]
    start = max(compact, default=-1)
    for name in names:
        number = int(name.removesuffix(".compact"))
        if number > start or name == f"{start}.compact":
            with contextlib.suppress(FileNotFoundError):  # compacted just now
                files += [json.loads(line)["path"] for line in (log / name).read_text().splitlines()[1:]]
    rows: list[tuple[int, bytes]] = []
    for file in files:
        rows += _rows_of(file.removeprefix("file://"))
    return rows


@lru_cache(maxsize=10_000)
def _rows_of(file: str) -> list[tuple[int, bytes]]:
    """Offset and value of the rows of one file, which is written once: a table is read many times while it grows."""
    import pyarrow.parquet as pq

    found = pq.read_table(file, columns=["offset", "value"])
    return list(zip(found.column("offset").to_pylist(), found.column("value").to_pylist(), strict=True))

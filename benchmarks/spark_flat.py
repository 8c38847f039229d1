"""Spark reads MQTT for minutes: the memory of its driver stays flat, and so does the journal.

A streaming query from mosquitto, QoS 1, 5,000 messages a second, into nothing. Sampled each second: resident memory of
the JVM, whose heap is bounded to 1 GiB, and of the Python process on the driver in which the data source receives; the
size of the journal on disk. A JVM takes of its heap what it is given before it looks for garbage: what is in use once
it has looked is told for the begin, after the first minute, which is for warming up, and for the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import harness, mqtt, report
from benchmarks.contenders import Contender
from benchmarks.peers.job import TOPIC
from benchmarks.peers.spark import Watch, messages, session, started

RATE: Final = 5_000.0
HEAP: Final = "1g"
#: seconds until growth counts
_WARM: Final = 60.0
#: timeout of every other step, in seconds
_PATIENCE: Final = 120.0
#: part of the command line of the data source's process
_SOURCE: Final = "python_streaming_source_runner"
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """Sizes in bytes, and their time in seconds."""

    seconds: float
    jvm: int
    source: int
    journal: int
    rows: int
    #: used heap of the JVM after a garbage collection; ``None`` where it was not measured
    heap: int | None = None


def descendants(pid: int) -> Iterator[int]:
    """Return the descendants of the process ``pid``."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = [int(each) for each in children.read_text().split()]
        except OSError:  # the thread is gone
            continue
        for child in found:
            yield child
            yield from descendants(child)


def command_line(pid: int) -> str:
    """Of a process; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes; nothing if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def in_use(jvm: Any) -> int:
    """Return the used bytes of the heap of a JVM after a garbage collection."""
    runtime = jvm.java.lang.Runtime.getRuntime()
    runtime.gc()
    return int(runtime.totalMemory() - runtime.freeMemory())


def on_disk(folder: Path) -> int:
    """Return the bytes of all files in ``folder``."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # deleted meanwhile
            continue
    return total


def sampled(folder: Path, port: int, seconds: float, size: int) -> tuple[list[Sample], int]:
    """Run for ``seconds``; return the samples, and the number of published messages."""
    count = round(RATE * seconds)
    with session(folder, **{"spark.driver.memory": HEAP}) as spark:
        from pyspark import SparkContext

        watch = Watch(spark)
        query = started(messages(spark, folder, url=f"mqtt://127.0.0.1:{port}", channel=TOPIC), folder)
        watch.wait_for_begin(query)
        gateway: Any = SparkContext._gateway
        jvm: int = gateway.proc.pid
        source = next((pid for pid in descendants(jvm) if _SOURCE in command_line(pid)), None)
        if source is None:
            raise SystemExit("the process of the data source is not found")
        (journal,) = folder.glob("journal-*")
        options = {"port": port, "count": count, "size": size, "qos": 1, "version": "5", "window": mqtt.WINDOW}
        line = [text for key, value in (options | {"rate": RATE}).items() for text in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "benchmarks.peers.spark", "publish", *line, *PUBLISHER.options]
        samples: list[Sample] = []

        def sample(*, looks_for_garbage: bool) -> None:
            at, rows = time.monotonic() - start, watch.rows(query)
            heap = in_use(gateway.jvm) if looks_for_garbage else None
            samples.append(Sample(at, resident(jvm), resident(source), on_disk(journal), rows, heap))

        with harness.Process(command, "publisher") as publisher:
            publisher.expect_ready(_PATIENCE)
            publisher.tell("GO")
            start = time.monotonic()
            deadline = start + seconds + _PATIENCE
            while watch.rows(query) < count and time.monotonic() < deadline:
                if not query.isActive:
                    raise SystemExit(f"the query ended: {query.exception()}")
                sample(looks_for_garbage=len(samples) in (0, round(_WARM)))
                time.sleep(max(0.0, start + len(samples) - time.monotonic()))
            sample(looks_for_garbage=True)
        query.stop()
    return samples, count


PUBLISHER: Final = Contender("publisher", "spark", "messaging", "", "messaging")


def run(arguments: argparse.Namespace) -> None:
    """Run, print, save."""
    from messaging.testing.brokers import Mosquitto

    began = datetime.datetime.now(datetime.UTC)
    size = (arguments.payload or [100])[0]
    with (
        tempfile.TemporaryDirectory(prefix="rx-messaging-spark-", ignore_cleanup_errors=True) as folder,
        Mosquitto(mqtt.BROKER) as broker,
    ):
        samples, count = sampled(Path(folder), broker.port, 60 * arguments.minutes, size)
    first, last = samples[0], samples[-1]
    warm = next((each for each in samples if each.seconds >= _WARM - 1 and each.heap is not None), last)
    title = f"Spark from MQTT, {last.rows:,} of {count:,} rows, {last.seconds:,.0f} s"
    print(f"{title:60} {'start':>11} {'after 60 s':>11} {'end':>11} {'most':>11} {'growth':>11}")
    for name, what in (
        ("jvm", f"JVM, heap of {HEAP}"),
        ("heap", "in use in the heap, after looking for garbage"),
        ("source", "data source on the driver"),
        ("journal", "journal on disk"),
    ):
        values = [getattr(each, name) for each in (first, warm, last)]
        most = max(value for each in samples if (value := getattr(each, name)) is not None)
        figures = [*values, most, values[2] - values[1]]
        print(f"{what:60} " + " ".join(f"{value / _MIB:8.1f}MiB" for value in figures))
    name = "reference-spark_flat" if arguments.reference else f"spark_flat-{began:%Y%m%d-%H%M%S}"
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"{name}.json"
    found = {
        "benchmark": "spark_flat",
        "date": began.isoformat(timespec="seconds"),
        "machine": report.machine(),
        "rate": RATE,
        "published": count,
        "samples": [asdict(each) for each in samples],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nsaved as {path}")
    if last.rows != count:
        raise SystemExit(f"{count - last.rows} rows are missing")

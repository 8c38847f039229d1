"""A slow subscriber with many messages behind it: the memory of its process stays flat.

The observer holds its first message until everything was published (``memory://``, where publishers wait for it: until
the queues are full), then works through the rest. A process of its own publishes, so that the figure is the
subscriber's alone. Payloads of 1 KiB: a million of them would be a gigabyte.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import messaging

SIZE = 1024
CHANNEL = "benchmark/flat"
#: seconds without any progress after which the run is given up
STALLED = 60.0


@dataclass(frozen=True)
class Flat:
    """What came of a run; sizes in bytes."""

    received: int
    before: int
    peak: int
    seconds: float

    @property
    def growth(self) -> int:
        return self.peak - self.before


def resident() -> int:
    """Resident memory of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status does not tell the resident memory")


def slow_subscriber(url: str, count: int) -> Flat:
    """Receive ``count`` messages slowly, and watch the memory of this process."""
    local = url.startswith("memory:")
    hold, done = threading.Event(), threading.Event()
    received = 0
    peak = 0

    def on_next(_: messaging.Message) -> None:
        nonlocal received, peak
        if received == 0:
            hold.wait(600)
        received += 1
        if received % 1000 == 0:
            peak = max(peak, resident())
        if received == count:
            done.set()

    with messaging.connect(url) as m:
        with m.subscribe("benchmark/warm-up", qos="1") as stream:
            for _ in range(2000):
                m.publish("benchmark/warm-up", b"x" * SIZE, qos="1")
                stream.receive(30)
        before = peak = resident()
        stream = m.subscribe(CHANNEL, qos="1")
        stream.subscribe(on_next)
        start = time.perf_counter()
        with publisher(url, count) as publishing:
            while publishing.is_alive():
                publishing.join(0.05)
                peak = max(peak, resident())
                if local and stream.counters.received >= 1000:
                    hold.set()  # the stream's buffer is full: the publisher is about to wait
        hold.set()
        last = -1
        while not done.wait(STALLED):
            if received == last:
                break
            last = received
        return Flat(received, before, max(peak, resident()), time.perf_counter() - start)


@contextlib.contextmanager
def publisher(url: str, count: int) -> Iterator[threading.Thread]:
    """Publish ``count`` messages: in a process of its own or, where that cannot be, in a thread."""
    if url.startswith("memory:"):
        thread = threading.Thread(target=publish, args=(url, count))
    else:
        command = [sys.executable, "-m", "benchmarks.flat", url, str(count)]
        thread = threading.Thread(target=subprocess.run, args=(command,), kwargs={"check": True, "timeout": 1800})
    thread.start()
    yield thread
    thread.join()


def publish(url: str, count: int) -> None:
    """Publish ``count`` messages, and wait until the broker has them."""
    with messaging.connect(url, timeout=600.0, close_timeout=600.0) as m:
        for _ in range(count):
            m.publish(CHANNEL, b"x" * SIZE, qos="1")


def run(arguments: argparse.Namespace) -> None:
    """Run on the backends asked for and print."""
    from messaging.testing.brokers import Mosquitto, RabbitMQ

    count = arguments.messages or 1_000_000
    title = f"slow subscriber, {count:,} messages"
    print(f"{title:40} {'before':>10} {'peak':>10} {'growth':>10} {'s':>7}")
    for name in arguments.backends.split(","):
        with contextlib.ExitStack() as stack:
            if name == "memory":
                url = "memory://flat"
            elif name == "mqtt":
                url = stack.enter_context(Mosquitto(["max_queued_messages 0", "set_tcp_nodelay true"])).url
            else:
                url = stack.enter_context(RabbitMQ()).url
            flat = slow_subscriber(url, count)
        mib = 2**20
        print(
            f"{name + ': ' + format(flat.received, ',') + ' received':40} {flat.before / mib:7.1f}MiB "
            f"{flat.peak / mib:7.1f}MiB {flat.growth / mib:7.1f}MiB {flat.seconds:7.1f}"
        )


if __name__ == "__main__":
    publish(sys.argv[1], int(sys.argv[2]))

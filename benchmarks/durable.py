"""Publishing through a durable outbox, beside the outbox in memory, in one process with the broker on the same machine.

A run publishes as fast as it can, with confirmation, and ends when every message is confirmed. Runs with and without
``outbox_path`` take turns. 100-byte payloads, ``outbox_fsync=always``. The outbox holds as many messages in memory in
both, so a run with ``outbox_path`` reads a part of its messages back from the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import messaging
from benchmarks import report
from messaging.testing.brokers import Mosquitto, RabbitMQ

_PAYLOAD: Final = b"x" * 100
_WARM_UP: Final = 2_000


def published(url: str, count: int, **settings: Any) -> tuple[float, float]:
    """Return messages a second, and microseconds of processor time for each."""
    with messaging.connect(url, **settings) as m:
        m.ready.result(30)
        promise = None
        for _ in range(_WARM_UP):
            promise = m.publish("bench/durable", _PAYLOAD, guaranteed_delivery=True)
        if promise is not None:
            promise.result(60)
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            promise = m.publish("bench/durable", _PAYLOAD, guaranteed_delivery=True)
        if promise is not None:
            promise.result(120)
        return count / (time.perf_counter() - start), (time.process_time() - busy) / count * 1e6


def run(arguments: argparse.Namespace) -> None:
    """Run and print."""
    count = arguments.messages or (2_000 if arguments.quick else 60_000)
    runs = 1 if arguments.quick else arguments.runs
    with contextlib.ExitStack() as stack:
        brokers: dict[str, Callable[[], str]] = {
            "memory": lambda: "memory://durable",
            "mqtt": lambda: stack.enter_context(Mosquitto(["max_inflight_messages 0"])).url,
            "amqp": lambda: stack.enter_context(RabbitMQ()).url,
        }
        print(f"messages/s, {count} messages, 100 bytes, median of {runs}; {report.machine()}")
        print(f"{'':10} {'memory':>10} {'us':>6} {'durable':>10} {'us':>6} {'ratio':>6}")
        for broker in arguments.backends.split(","):
            url = brokers[broker]()
            pairs = []
            for _ in range(runs):
                plain = published(url, count)
                with tempfile.TemporaryDirectory(dir=".") as folder:
                    pairs.append((plain, published(url, count, outbox_path=folder)))
            rates = [statistics.median(pair[side][0] for pair in pairs) for side in (0, 1)]
            costs = [statistics.median(pair[side][1] for pair in pairs) for side in (0, 1)]
            ratio = statistics.median(durable[0] / plain[0] for plain, durable in pairs)
            print(f"{broker:10} {rates[0]:10,.0f} {costs[0]:6.1f} {rates[1]:10,.0f} {costs[1]:6.1f} {ratio:6.2f}")

"""Publishing through a durable outbox, beside the outbox in memory, in one process with the broker on the same machine.

A run publishes with confirmation, and ends when every message is confirmed. Runs with and without ``outbox_path`` take
turns. 100-byte payloads, ``outbox_fsync=always``.

``bounded``: the publisher has at most 5,000 unconfirmed messages. ``burst``: it publishes as fast as messages are
accepted. The outbox holds as many messages in memory in both runs of a pair. The one in memory lets its publisher wait;
the durable one accepts more, and reads them back from the disk.

``left``: an instance publishes the messages that an earlier one left on the disk. It has no counterpart in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import messaging
from benchmarks import report
from messaging import Promise
from messaging.testing.brokers import Mosquitto, RabbitMQ

_PAYLOAD: Final = b"x" * 100
_WARM_UP: Final = 2_000
#: unconfirmed messages of the bounded publisher, at most, and how many of them it waits for at a time
_UNCONFIRMED: Final = 5_000
_STEP: Final = 500
#: where no broker listens
_NO_BROKER: Final = "mqtt://127.0.0.1:1"


def published(url: str, count: int, *, is_bounded: bool, **settings: Any) -> tuple[float, float]:
    """Return messages a second, and microseconds of processor time for each."""
    with messaging.connect(url, **settings) as m:
        m.ready.result(30)
        promise = None
        for _ in range(_WARM_UP):
            promise = m.publish("bench/durable", _PAYLOAD, guaranteed_delivery=True)
        if promise is not None:
            promise.result(60)
        start, busy = time.perf_counter(), time.process_time()
        unconfirmed: deque[Promise[None]] = deque()
        for _ in range(count):
            promise = m.publish("bench/durable", _PAYLOAD, guaranteed_delivery=True)
            if is_bounded:
                unconfirmed.append(promise)
                if len(unconfirmed) == _UNCONFIRMED:
                    for _ in range(_STEP):
                        unconfirmed.popleft().result(120)
        if promise is not None:
            promise.result(120)
        return count / (time.perf_counter() - start), (time.process_time() - busy) / count * 1e6


def left(url: str, count: int, folder: str) -> tuple[float, float]:
    """Return messages a second, and microseconds of processor time for each, from the start of an instance."""
    with messaging.connect(
        _NO_BROKER, outbox_path=folder, start_offline=True, outbox_size=count, close_timeout=0.1
    ) as m:
        for _ in range(count):
            promise = m.publish("bench/durable", _PAYLOAD, guaranteed_delivery=True)
        promise.stored.result(60)
    start, busy = time.perf_counter(), time.process_time()
    with messaging.connect(url, outbox_path=folder) as m:
        m.publish("bench/durable", _PAYLOAD, guaranteed_delivery=True).result(120)
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
        print(f"{'':16} {'memory':>10} {'us':>6} {'durable':>10} {'us':>6} {'ratio':>6}")
        for broker in arguments.backends.split(","):
            url = brokers[broker]()
            for style in ("bounded", "burst"):
                pairs = []
                for _ in range(runs):
                    plain = published(url, count, is_bounded=style == "bounded")
                    with tempfile.TemporaryDirectory(dir=arguments.results) as folder:
                        durable = published(url, count, is_bounded=style == "bounded", outbox_path=folder)
                    pairs.append((plain, durable))
                rates = [statistics.median(pair[side][0] for pair in pairs) for side in (0, 1)]
                costs = [statistics.median(pair[side][1] for pair in pairs) for side in (0, 1)]
                ratio = statistics.median(durable[0] / plain[0] for plain, durable in pairs)
                columns = " ".join(f"{rate:10,.0f} {cost:6.1f}" for rate, cost in zip(rates, costs, strict=True))
                print(f"{broker:7} {style:8} {columns} {ratio:6.2f}")
            rests = []
            for _ in range(runs):
                with tempfile.TemporaryDirectory(dir=arguments.results) as folder:
                    rests.append(left(url, count, folder))
            rate, cost = (statistics.median(each) for each in zip(*rests, strict=True))
            print(f"{broker:7} {'left':8} {'':10} {'':6} {rate:10,.0f} {cost:6.1f}")

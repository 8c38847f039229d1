"""Publish to observer through ``memory://``, beside what one would use without it.

All on one core (the process pins itself where the system lets it), 100-byte payloads, one publisher, one observer.
The peers do less: a ``reactivex.Subject`` calls the observer inline, without a queue, a thread, an acknowledgement or
a promise; a ``queue.SimpleQueue`` hand-over to a waiting thread is a C deque and a lock. They are there as the floor.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable

import reactivex

import messaging
from messaging import Message, MessageContext

PAYLOAD = b"x" * 100


def publish_to_observer(count: int) -> float:
    """Messages per second from ``publish`` to ``on_next``, acknowledged."""
    arrived = 0
    done = threading.Event()

    def on_next(_: Message) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            done.set()

    with messaging.connect("memory://benchmark") as m:
        m.subscribe("a/b").subscribe(on_next)
        message = Message(PAYLOAD, MessageContext("a/b"))
        publish = m.publisher.publish
        start = time.perf_counter()
        for _ in range(count):
            publish(message)
        if not done.wait(120):
            raise SystemExit(f"only {arrived} of {count} messages arrived")
        return count / (time.perf_counter() - start)


def subject(count: int) -> float:
    """Calls per second of an observer through a bare ``reactivex.Subject``."""
    arrived = 0

    def on_next(_: object) -> None:
        nonlocal arrived
        arrived += 1

    source: reactivex.Subject[bytes] = reactivex.Subject()
    source.subscribe(on_next)
    start = time.perf_counter()
    for _ in range(count):
        source.on_next(PAYLOAD)
    return count / (time.perf_counter() - start)


def simple_queue(count: int) -> float:
    """Items per second through a ``queue.SimpleQueue`` to a waiting thread."""
    items: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def consume() -> None:
        for _ in range(count):
            items.get()

    consumer = threading.Thread(target=consume)
    consumer.start()
    start = time.perf_counter()
    for _ in range(count):
        items.put(PAYLOAD)
    consumer.join()
    return count / (time.perf_counter() - start)


def run(arguments: argparse.Namespace) -> None:
    """Run and print."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    count = arguments.messages or 200_000
    measured: dict[str, list[float]] = {}
    contenders: dict[str, Callable[[int], float]] = {
        "memory://": publish_to_observer,
        "reactivex.Subject": subject,
        "queue.SimpleQueue": simple_queue,
    }
    for contender in contenders.values():
        contender(count // 10)  # warm-up
    for _ in range(arguments.runs):  # in turns, so that all see the same machine
        for name, contender in contenders.items():
            measured.setdefault(name, []).append(contender(count))
    own = statistics.median(measured["memory://"])
    print(f"{'one core, ' + str(count) + ' messages':34} {'median/s':>12} {'min':>12} {'max':>12} {'memory:// is':>13}")
    for name, rates in measured.items():
        median = statistics.median(rates)
        print(f"{name:34} {median:12,.0f} {min(rates):12,.0f} {max(rates):12,.0f} {own / median:12.3f}x")

"""Hundreds of instances come and go on each backend, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import messaging
from adapters.memory import broker as memory_broker
from messaging.execution import engine
from messaging.services import ServiceRegistry
from tests.brokers import Mosquitto, RabbitMQ

ROUNDS = {"memory": 1000, "mqtt": 300, "amqp": 300}  # starting a connection to a broker takes its time
DEADLINE = 30.0


def tasks() -> int:
    """Tasks on the engine's loop."""
    counted: list[int] = []
    done = threading.Event()

    def count() -> None:
        counted.append(len(asyncio.all_tasks(engine().loop)))
        done.set()

    engine().call(count)
    assert done.wait(DEADLINE)
    return counted[0]


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def rounds(url: str, count: int, registry: ServiceRegistry) -> None:
    for number in range(count):
        with messaging.connect(url, services=registry) as m, m.subscribe("rounds/#") as stream:
            m.publish("rounds/a", b"x", qos=1)
            if number % 10 == 0:
                assert stream.receive(DEADLINE).payload == b"x"


def settled(look: Callable[[], int], before: int, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while (now := look()) > before:
        assert time.monotonic() < deadline, f"{what}: {now} where there were {before}"
        time.sleep(0.05)  # until idle workers have left


@pytest.fixture(params=["memory", "mqtt", "amqp"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://rounds"
    broker: Mosquitto | RabbitMQ = request.getfixturevalue("mosquitto" if request.param == "mqtt" else "rabbitmq")
    return broker.url


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_rounds_leave_nothing_behind(url: str) -> None:
    registry = ServiceRegistry()
    rounds(url, 20, registry)  # warm-up: imports, caches, executor threads
    gc.collect()
    threads, files, running = threading.active_count(), open_files(), tasks()
    rounds(url, ROUNDS[url.partition(":")[0]], registry)
    gc.collect()
    settled(threading.active_count, threads, "threads")
    settled(open_files, files, "open files")
    settled(tasks, running, "tasks")
    assert registry.find() == []
    assert "rounds" not in memory_broker._brokers
    instances = [each for each in gc.get_objects() if isinstance(each, messaging.Messaging)]
    assert [each for each in instances if each.services is registry] == []

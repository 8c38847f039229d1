"""Hundreds of instances come and go at real brokers, and leave nothing behind; ``test_leaks.py`` has ``memory://``."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import messaging
from messaging.execution import engine
from messaging.services import ServiceRegistry
from tests.brokers import Mosquitto, RabbitMQ
from tests.doubles.fake import on_loop

ROUNDS = 300
DEADLINE = 30.0


def tasks() -> int:
    """Tasks on the engine's loop."""
    return on_loop(lambda: len(asyncio.all_tasks(engine().loop)))


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


@pytest.fixture(params=["mqtt", "amqp"])
def url(request: pytest.FixtureRequest) -> str:
    broker: Mosquitto | RabbitMQ = request.getfixturevalue("mosquitto" if request.param == "mqtt" else "rabbitmq")
    return broker.url


@pytest.mark.timeout(240)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_rounds_leave_nothing_behind(url: str) -> None:
    registry = ServiceRegistry()
    rounds(url, 20, registry)  # warm-up: imports, caches, executor threads
    gc.collect()
    threads, files, running = threading.active_count(), open_files(), tasks()
    rounds(url, ROUNDS, registry)
    gc.collect()
    settled(threading.active_count, threads, "threads")
    settled(open_files, files, "open files")
    settled(tasks, running, "tasks")
    assert registry.find() == []
    instances = [each for each in gc.get_objects() if isinstance(each, messaging.Messaging)]
    assert [each for each in instances if each.services is registry] == []

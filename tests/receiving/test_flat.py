"""The memory of a slow subscriber's process stays flat, however much is behind it (the long run is a benchmark)."""

from __future__ import annotations

import pytest

from messaging.testing.brokers import Mosquitto, RabbitMQ
from tests.scripts import run_script

COUNT = 20_000
#: a third of what the payloads alone would take
BOUND = COUNT * 1024 // 3

SCRIPT = """
from benchmarks.flat import slow_subscriber
flat = slow_subscriber(%r, %d)
print(flat.received, flat.growth)
"""


@pytest.mark.slow
def test_memory_stays_flat_behind_a_slow_subscriber(request: pytest.FixtureRequest) -> None:
    broker: Mosquitto | RabbitMQ
    for name in ("mosquitto", "rabbitmq"):
        broker = request.getfixturevalue(name)
        received, growth = run(broker.url)
        assert received == COUNT
        assert growth < BOUND, f"{name}: {growth} bytes"


def test_publishers_wait_for_a_slow_subscriber_in_the_process() -> None:
    """Queue, outbox and buffer are full then: that is the bound."""
    received, growth = run("memory://flat", 5 * COUNT)
    assert received == 5 * COUNT
    assert growth < 9 * BOUND, f"{growth} bytes"


def run(url: str, count: int = COUNT) -> tuple[int, int]:
    received, growth = run_script(SCRIPT % (url, count), seconds=110).stdout.split()
    return int(received), int(growth)

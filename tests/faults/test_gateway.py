"""The gateway under random faults: a few, and hundreds with ``make gateway``. ``make test`` has simulated worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from messaging.testing.brokers import require
from tests.faults.gateway import IN_FLIGHT, PROTOCOLS, Run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_kills_black_holes_and_restarts_of_brokers_lose_no_accepted_message(protocol: str, tmp_path: Path) -> None:
    require("rabbitmq" if protocol == "amqp" else "mosquitto")
    outcome = Run(protocol, tmp_path, seed=11).run(5, brokers=2, black_holes=1, black_hole=3.0)
    assert outcome.problems == []
    assert outcome.confirmed > 100
    assert outcome.burst <= IN_FLIGHT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_disk_holds_the_source_back_and_loses_nothing(tmp_path: Path, disk_of: Callable[[str], Path]) -> None:
    require("mosquitto")
    disk = disk_of("16m")
    outcome = Run("mqtt", tmp_path, seed=12, rate=6000, body=1000, data=disk / "data").run(0, outage=20_000)
    assert outcome.problems == []
    assert outcome.confirmed >= 20_000
    assert outcome.disk > 14 * 2**20, "the disk was not filled"

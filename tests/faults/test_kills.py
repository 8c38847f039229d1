"""Random kills, a few of them. Hundreds are a command of their own: ``make kills``."""

from __future__ import annotations

from pathlib import Path

import pytest

from messaging.testing.brokers import require
from tests.faults.kills import PROTOCOLS, Run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_random_kills_lose_nothing_and_repeat_nothing(name: str, tmp_path: Path) -> None:
    require("mosquitto" if name == "mqtt" else "rabbitmq")
    outcome = Run(PROTOCOLS[name], tmp_path, seed=7).run(kills=12)
    assert outcome.problems == []
    assert outcome.verdict.confirmed > 200
    assert outcome.kills["publisher"]
    assert outcome.kills["consumer"]

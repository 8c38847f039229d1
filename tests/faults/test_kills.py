"""Random kills: a dozen, and hundreds with ``make kills``. In ``make test`` simulated worlds hold the same promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from messaging.testing.brokers import require
from tests.faults.kills import PROTOCOLS, Run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_random_kills_lose_nothing_and_repeat_nothing(name: str, tmp_path: Path) -> None:
    kills = 12
    require("mosquitto" if name == "mqtt" else "rabbitmq")
    outcome = Run(PROTOCOLS[name], tmp_path, seed=11).run(kills)
    assert outcome.problems == []
    assert outcome.verdict.confirmed > 15 * kills
    assert outcome.kills["publisher"]
    assert outcome.kills["consumer"]

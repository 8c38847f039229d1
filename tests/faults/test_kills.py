"""Random kills: three, in the slow tier a dozen, and hundreds with ``make kills``."""

from __future__ import annotations

from pathlib import Path

import pytest

from messaging.testing.brokers import require
from tests.faults.kills import PROTOCOLS, Run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "kills"), [("mqtt", 3), *(pytest.param(each, 12, marks=pytest.mark.slow) for each in PROTOCOLS)]
)
def test_random_kills_lose_nothing_and_repeat_nothing(name: str, kills: int, tmp_path: Path) -> None:
    require("mosquitto" if name == "mqtt" else "rabbitmq")
    outcome = Run(PROTOCOLS[name], tmp_path, seed=11).run(kills)
    assert outcome.problems == []
    assert outcome.verdict.confirmed > 15 * kills
    assert outcome.kills["publisher"]
    assert outcome.kills["consumer"]

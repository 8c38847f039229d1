"""Remote events under random kills: two, in the slow tier a few, and hundreds with ``make remote-events``."""

from __future__ import annotations

from pathlib import Path

import pytest

from messaging.testing.brokers import require
from tests.faults.remote import PROTOCOLS, Run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("protocol", "kills"), [("mqtt", 2), *(pytest.param(each, 6, marks=pytest.mark.slow) for each in PROTOCOLS)]
)
def test_random_kills_lose_no_remote_event(protocol: str, kills: int, tmp_path: Path) -> None:
    require("rabbitmq" if protocol == "amqp" else "mosquitto")
    outcome = Run(protocol, tmp_path, seed=11).run(kills)
    assert outcome.problems == []
    assert outcome.confirmed > 10 * kills
    assert outcome.received >= outcome.confirmed

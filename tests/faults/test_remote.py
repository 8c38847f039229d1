"""Remote events under random kills, a few of them. Hundreds are a command of their own: ``make remote-events``."""

from __future__ import annotations

from pathlib import Path

import pytest

from messaging.testing.brokers import require
from tests.faults.remote import PROTOCOLS, Run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_random_kills_lose_no_remote_event(protocol: str, tmp_path: Path) -> None:
    require("rabbitmq" if protocol == "amqp" else "mosquitto")
    outcome = Run(protocol, tmp_path, seed=11).run(kills=6)
    assert outcome.problems == []
    assert outcome.confirmed > 100
    assert outcome.received >= outcome.confirmed

"""Remote events under random kills: a few, hundreds with ``make remote-events``; ``make test`` has simulated worlds."""

from __future__ import annotations

from pathlib import Path

import pytest

from messaging.testing.brokers import require
from tests.faults.remote import PROTOCOLS, Run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_random_kills_lose_no_remote_event(protocol: str, tmp_path: Path) -> None:
    kills = 6
    require("rabbitmq" if protocol == "amqp" else "mosquitto")
    outcome = Run(protocol, tmp_path, seed=11).run(kills)
    assert outcome.problems == []
    assert outcome.confirmed > 10 * kills
    assert outcome.received >= outcome.confirmed

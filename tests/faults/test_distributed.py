"""Distributed events under random faults, a few of them. Hundreds are a command of their own: ``make distributed``."""

from __future__ import annotations

from pathlib import Path

import pytest

from messaging.testing.brokers import require
from tests.faults.distributed import PROTOCOLS, Run


@pytest.mark.slow
@pytest.mark.alone  # losses are noticed by heartbeats: a busy broker is one that is away
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_random_faults_break_no_promise_of_distributed_events(protocol: str, tmp_path: Path) -> None:
    require("rabbitmq" if protocol == "amqp" else "mosquitto")
    outcome = Run(protocol, tmp_path, seed=11).run(faults=4)
    assert outcome.problems == []
    counts = outcome.findings.counts
    assert counts["confirmed"] > 200
    assert counts["received"] > 1_000
    assert counts["notifications resolved"] > 20

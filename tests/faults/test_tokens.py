"""Credentials that expire every three seconds, for a few of them. Ten minutes are a command: ``make soak-tokens``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from messaging.testing.brokers import require
from tests.faults.tokens import PROTOCOLS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(150)
def test_tokens_that_expire_lose_no_message_and_with_rabbitmq_no_connection(tmp_path: Path) -> None:
    """All protocols at once, in a process of its own."""
    require("mosquitto", "rabbitmq")
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.faults.tokens", "--minutes", "0.15", "--lifetime", "3"]
    done = subprocess.run(
        [*command, "--json", str(figures)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=140,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    found = {each["protocol"]: each for each in json.loads(figures.read_text())}
    assert [*found] == [*PROTOCOLS]
    for protocol, each in found.items():
        assert each["problems"] == []
        assert each["lost"] == each["failed"] == 0
        assert each["confirmed"] == each["received"] == each["published"] > 300
        assert each["tokens"] > 6
        assert each["reconnects"] == 0 if protocol == "amqp" else each["reconnects"] >= 4
    assert found["amqp"]["same_connections"]

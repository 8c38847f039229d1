"""Credentials that expire every three seconds, for a few of them. Ten minutes are a command: ``make soak-tokens``.

RabbitMQ's tokens: ``tests/amqp/test_credentials.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from messaging.testing.brokers import require

ROOT = Path(__file__).parents[2]
MQTT = ("mqtt", "mqtt311")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_tokens_that_expire_lose_no_message_and_cost_planned_reconnects_only(tmp_path: Path) -> None:
    """Both versions of MQTT at once, in a process of its own."""
    require("mosquitto")
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.faults.tokens", "--minutes", "0.12", "--lifetime", "3"]
    command += [f"--protocol={each}" for each in MQTT]
    done = subprocess.run(
        [*command, "--json", str(figures)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=140,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    found = {each["protocol"]: each for each in json.loads(figures.read_text())}
    assert [*found] == [*MQTT]
    for each in found.values():
        assert each["problems"] == []
        assert each["lost"] == each["failed"] == 0
        assert each["confirmed"] == each["received"] == each["published"] > 200
        assert each["tokens"] >= 6
        assert each["reconnects"] >= 2

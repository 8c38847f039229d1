"""A process that is killed while a message handler runs: the message is delivered again."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import messaging
from tests.brokers import Broker
from tests.faults.scenario import AMQP, MQTT5, MQTT311, PATIENCE, Profile, eventually

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("profile", [MQTT5, MQTT311, AMQP], ids=str)
def test_a_message_whose_handler_was_killed_comes_again(request: pytest.FixtureRequest, profile: Profile) -> None:
    broker: Broker = request.getfixturevalue("rabbitmq" if profile is AMQP else "broker")
    unique = secrets.token_hex(6)
    channel, queue = f"killed/{unique}", {}
    settings: dict[str, Any] = {"client_id": unique}
    if profile is AMQP:
        settings, queue = {}, {"queue": unique}
    elif profile is MQTT5:
        settings |= {"session_expiry": 60, "clean_start": "false"}
    else:
        settings |= {"version": "3.1.1", "clean_start": "false"}
    arguments = [f"{key}={value}" for key, value in {**settings, **queue}.items()]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.handling", broker.url, channel, *arguments],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            with messaging.connect(broker.url) as m:
                m.publish(channel, b"1", guaranteed_delivery=True).result(PATIENCE)
                m.publish(channel, b"2", guaranteed_delivery=True).result(PATIENCE)
            assert process.stdout.readline() == "1\n"
        finally:
            process.kill()
    seen: list[bytes] = []
    with messaging.connect(broker.url, **settings) as m:
        m.on(channel, lambda message: seen.append(message.payload), keep_subscription=True, **queue)
        eventually(lambda: sorted(seen) == [b"1", b"2"], "both handled")

"""A process that is killed while a message handler runs: the message is delivered again."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

import messaging
from messaging.testing.brokers import Broker
from messaging.testing.waiting import PATIENCE, Recorder
from tests.faults.scenario import AMQP, MQTT5, MQTT311, Profile, Victim

#: a program whose message handler never returns
_HANDLING = """
import sys, threading
import messaging
url, channel, settings, queue = *sys.argv[1:3], *map(eval, sys.argv[3:])
m = messaging.connect(url, **settings)
def handle(message):
    print(message.payload.decode(), flush=True)
    threading.Event().wait()
m.on(channel, handle, keep_subscription=True, **queue)
print("up", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("profile", [MQTT5, MQTT311, AMQP], ids=str)
def test_a_message_whose_handler_was_killed_comes_again(request: pytest.FixtureRequest, profile: Profile) -> None:
    broker: Broker = request.getfixturevalue("rabbitmq" if profile is AMQP else "broker")
    unique = secrets.token_hex(6)
    channel, queue = f"killed/{unique}", {}
    settings: dict[str, Any] = {"client_id": unique}
    if profile is AMQP:
        settings, queue = {}, {"queue": unique}
    elif profile is MQTT5:
        settings |= {"session_expiry": 60, "clean_start": False}
    else:
        settings |= {"version": "3.1.1", "clean_start": False}
    with Victim(_HANDLING, broker.url, channel, *map(repr, [settings, queue])) as program:
        with messaging.connect(broker.url) as m:
            m.publish(channel, b"1", guaranteed_delivery=True).result(PATIENCE)
            m.publish(channel, b"2", guaranteed_delivery=True).result(PATIENCE)
        program.expect("1")
    seen: Recorder[bytes] = Recorder()
    with messaging.connect(broker.url, **settings) as m:
        m.on(channel, seen, model=bytes, keep_subscription=True, **queue)
        seen.wait_until(lambda payloads: sorted(payloads) == [b"1", b"2"])

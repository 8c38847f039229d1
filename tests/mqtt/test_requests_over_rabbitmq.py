"""Requests over RabbitMQ's MQTT plugin, which tells nothing of a message that has no subscriber."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

import messaging
from messaging import OutcomeUnknownError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE

if TYPE_CHECKING:
    from messaging.testing.brokers import RabbitMQ

TIMEOUT = 0.5


@table("qos", [0, 1])
@table("responder", ["none", "silent"])
def test_a_request_without_reply_ends_at_its_deadline(rabbitmq_mqtt: RabbitMQ, responder: str, qos: int) -> None:
    """Whether there is no subscriber, or one that answers nothing."""
    url = f"{rabbitmq_mqtt.mqtt_url}?version=3.1.1&envelope=true"
    going = threading.Event()
    with messaging.connect(url, services=ServiceRegistry(), timeout=PATIENCE) as m:
        m.reply("deadlines/known", lambda: b"here")
        assert m.request("deadlines/known", qos=qos).result(PATIENCE).payload == b"here"  # the reply channel is there
        if responder == "silent":
            m.reply("deadlines/silent", lambda: going.wait(PATIENCE))
        try:
            start = time.monotonic()
            with pytest.raises(OutcomeUnknownError, match="no reply before its deadline"):
                m.request("deadlines/silent", qos=qos, timeout=TIMEOUT).result(PATIENCE)
            assert time.monotonic() - start >= TIMEOUT
        finally:
            going.set()

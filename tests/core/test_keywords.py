"""The keywords of the short way: typed, complete, and none of them two things at once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from adapters.amqp.adapter import AmqpAdapter
from adapters.memory.adapter import MemoryAdapter
from adapters.mqtt.adapter import MqttAdapter
from messaging import Messaging
from messaging.extensions import CHECKS, PUBLISH_ONLY, SUBSCRIBE_ONLY

ADAPTERS = (MemoryAdapter, MqttAdapter, AmqpAdapter)


def snake(key: str) -> str:
    return re.sub("([A-Z])", lambda found: "_" + found[1].lower(), key)


PUBLISHING = {snake(key) for key in CHECKS.keys() - SUBSCRIBE_ONLY}.union(
    *({snake(key) for key in adapter.publish_extensions} for adapter in ADAPTERS)
)
SUBSCRIBING = {snake(key) for key in CHECKS.keys() - PUBLISH_ONLY}.union(
    *({snake(key) for key in adapter.subscribe_extensions} for adapter in ADAPTERS)
)


@pytest.mark.parametrize(
    ("method", "extensions", "shared"),
    [
        (Messaging.publish, PUBLISHING, set()),
        (Messaging.request, PUBLISHING, {"timeout"}),
        (Messaging.request_many, PUBLISHING, {"timeout"}),
        (Messaging.subscribe, SUBSCRIBING, set()),
        (Messaging.on, SUBSCRIBING, set()),
        (Messaging.reply, SUBSCRIBING, set()),
    ],
)
def test_no_parameter_hides_an_extension(method: Callable[..., Any], extensions: set[str], shared: set[str]) -> None:
    """``durable`` is an extension of AMQP queues: a parameter of that name would keep it from the broker."""
    assert inspect.signature(method).parameters.keys() & extensions == shared

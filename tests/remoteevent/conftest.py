"""Instances at one broker, for each adapter."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

import messaging


@pytest.fixture(params=["memory", "mqtt", "amqp"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[], messaging.Messaging]]:
    """Connects instances to one broker; they are closed at the end."""
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}"
    elif request.param == "mqtt":
        url = request.getfixturevalue("mosquitto").url + "?version=5"
    else:
        url = request.getfixturevalue("rabbitmq").url
    instances: list[messaging.Messaging] = []

    def make() -> messaging.Messaging:
        instances.append(messaging.connect(url))
        return instances[-1]

    yield make
    for each in instances:
        each.close()


@pytest.fixture
def channel() -> str:
    """A channel that no other test uses."""
    return f"parties/{uuid.uuid4().hex}"

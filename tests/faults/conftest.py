"""Brokers that may be killed, stopped and starved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import Mosquitto, RabbitMQ, require


@pytest.fixture
def broker() -> Iterator[Mosquitto]:
    """A Mosquitto of the test's own: it starts within a tenth of a second."""
    require("mosquitto")
    with Mosquitto() as broker:
        yield broker


@pytest.fixture(scope="session")
def frail_rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ for those that kill, stop or starve it; whoever does leaves it in order."""
    require("rabbitmq")
    with RabbitMQ() as broker:
        yield broker

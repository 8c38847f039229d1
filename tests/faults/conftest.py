"""Brokers that may be killed, stopped and starved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from messaging.testing.brokers import Mosquitto, require
from tests.certificates import TlsRabbitMQ


class FrailRabbitMQ(TlsRabbitMQ):
    """A RabbitMQ that listens with TLS, too, and takes no large messages. A test that breaks it repairs it."""

    #: largest message, bytes
    limit = 500_000

    def __init__(self) -> None:
        super().__init__([f"max_message_size = {self.limit}"])


@pytest.fixture
def broker() -> Iterator[Mosquitto]:
    """A Mosquitto of the test's own: it starts within a tenth of a second."""
    require("mosquitto")
    with Mosquitto() as broker:
        yield broker


@pytest.fixture(scope="session")
def frail_rabbitmq() -> Iterator[FrailRabbitMQ]:
    """See the class. One for all tests that need it: it takes seconds to start."""
    require("rabbitmq")
    with FrailRabbitMQ() as broker:
        yield broker

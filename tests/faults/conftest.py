"""Brokers that may be killed, stopped and starved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import Mosquitto, RabbitMQ, accepts, free_port, require
from tests.faults.certificates import Certificates


class FrailRabbitMQ(RabbitMQ):
    """A RabbitMQ that listens with TLS, too, and takes no large messages. Whoever breaks it leaves it in order."""

    #: largest message, bytes
    limit = 500_000

    def __init__(self) -> None:
        super().__init__()
        self.tls_port = free_port()
        self.certificates = Certificates(self.directory)
        self._lines += [
            f"max_message_size = {self.limit}",
            f"listeners.ssl.1 = {self.host}:{self.tls_port}",
            f"ssl_options.cacertfile = {self.certificates.authority}",
            f"ssl_options.certfile = {self.certificates.certificate}",
            f"ssl_options.keyfile = {self.certificates.key}",
        ]

    def _answers(self) -> bool:
        return super()._answers() and accepts(self.tls_port)


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

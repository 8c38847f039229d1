from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pika
import pytest

from tests.brokers import RabbitMQ, require
from tests.certificates import TlsRabbitMQ

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel


@pytest.fixture(scope="session")
def own_rabbitmq() -> Iterator[TlsRabbitMQ]:
    """A RabbitMQ that may be killed, stopped and starved; and one that speaks TLS, too."""
    require("rabbitmq")
    with TlsRabbitMQ() as broker:
        yield broker


@pytest.fixture
def foreign(rabbitmq: RabbitMQ) -> Iterator[BlockingChannel]:
    """A channel of another AMQP client, pika, to the shared broker."""
    with foreign_channel(rabbitmq) as channel:
        yield channel


@contextlib.contextmanager
def foreign_channel(broker: RabbitMQ) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.ConnectionParameters(broker.host, broker.port))
    try:
        yield connection.channel()
    finally:
        connection.close()

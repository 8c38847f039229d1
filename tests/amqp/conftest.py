from __future__ import annotations

import contextlib
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import pika
import pytest

import messaging
from messaging.services import ServiceRegistry
from messaging.testing.brokers import RabbitMQ
from tests.amqp.harness import BrokerProxy, Client, connected, unique
from tests.amqp.peer import Peer
from tests.doubles.core import loop_factory as loop_factory
from tests.doubles.core import pytest_pyfunc_call as pytest_pyfunc_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pika.adapters.blocking_connection import BlockingChannel

    Connect = Callable[..., messaging.Messaging]


@pytest.fixture
def foreign(rabbitmq: RabbitMQ) -> Iterator[BlockingChannel]:
    """A channel of another AMQP client, pika, to the shared broker."""
    with foreign_channel(rabbitmq) as channel:
        yield channel


@contextlib.contextmanager
def foreign_channel(broker: RabbitMQ) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    try:
        yield connection.channel()
    finally:
        connection.close()


@pytest.fixture
def proxy(rabbitmq: RabbitMQ) -> Iterator[BrokerProxy]:
    """A proxy before the shared broker."""
    with BrokerProxy(rabbitmq) as proxy:
        yield proxy


@pytest.fixture
def client(rabbitmq: RabbitMQ) -> AbstractAsyncContextManager[Client]:
    """A client that is connected to the shared broker."""
    return connected(rabbitmq.url)


@pytest.fixture
def queue(foreign: BlockingChannel) -> Iterator[str]:
    """The name of a queue, which is deleted after the test with the queues of its delays."""
    name = unique("queue")
    yield name
    for found in (name, *(f"{name}.delay.{delay}" for delay in (50, 100, 200, 300, 500, 60_000))):
        foreign.queue_delete(found)  # a queue that does not exist is no error


@pytest.fixture
def exchange(foreign: BlockingChannel) -> Iterator[str]:
    """The name of an exchange, which is deleted after the test."""
    name = unique("exchange")
    yield name
    foreign.exchange_delete(name)  # an exchange that does not exist is no error


@pytest.fixture
def connect(rabbitmq: RabbitMQ) -> Iterator[Connect]:
    """``connect(url, **settings)``: an instance, by default at the shared broker, that is closed after the test."""
    with contextlib.ExitStack() as stack:
        services = ServiceRegistry()

        def make(url: str = rabbitmq.url, **settings: Any) -> messaging.Messaging:
            given = {"services": services, "reconnect_min": 0.02, "reconnect_max": 0.2, **settings}
            return stack.enter_context(messaging.connect(url, **given))

        yield make


@pytest.fixture
def peer() -> Peer:
    """A broker that is scripted frame by frame."""
    return Peer()

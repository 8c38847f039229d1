"""Interoperation with kombu, and so with Celery: queues, content types, encodings, compression, headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kombu
import pytest

import messaging
from tests.amqp.harness import unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel

    from tests.brokers import RabbitMQ

DEADLINE = 15.0


@pytest.fixture
def connection(rabbitmq: RabbitMQ) -> Iterator[kombu.Connection]:
    with kombu.Connection(f"amqp://guest:guest@{rabbitmq.host}:{rabbitmq.port}//") as opened:
        yield opened


@pytest.mark.parametrize("is_first", [True, False])
def test_a_plain_queue_is_declared_by_pika_and_kombu_before_and_after(
    rabbitmq: RabbitMQ, foreign: BlockingChannel, connection: kombu.Connection, is_first: bool
) -> None:
    queue = unique("plain")

    def declare() -> None:
        foreign.queue_declare(queue, durable=True)
        kombu.Queue(queue, channel=connection.default_channel).queue_declare()

    if not is_first:
        declare()
    with messaging.connect(rabbitmq.url) as m, m.subscribe("plain", queue=queue) as stream:
        stream.ready.result(timeout=DEADLINE)
        if is_first:
            declare()
        kombu.Producer(connection.default_channel).publish({"x": 1}, routing_key=queue)
        assert stream.receive(timeout=DEADLINE).value() == {"x": 1}
    foreign.queue_delete(queue)

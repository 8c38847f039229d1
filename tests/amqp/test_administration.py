"""Declaring, peeking at, purging and deleting queues of a real RabbitMQ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pika
import pytest

import messaging
from messaging import InvalidExtensionError, QueueRefusedError
from messaging.errors import ConnectFailedError, ConnectionLostError, DeadlineError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.amqp.harness import BrokerProxy, Client, unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel

    from messaging import Messaging
    from messaging.testing.brokers import RabbitMQ


@pytest.fixture
def m(rabbitmq: RabbitMQ) -> Iterator[Messaging]:
    with messaging.connect(rabbitmq.url) as m:
        yield m


def losses(m: Messaging) -> int:
    """The number of lost connections of an instance."""
    return m.runtime.get_runtime_dto().connection.losses


@table("first", ["declared", "subscribed"])
@table(
    "context",
    [
        {},
        {"queue_type": "classic"},
        {"queue_type": "quorum", "delivery_limit": 4},
        {"queue_type": "stream", "max_age": 3600.0, "max_length_bytes": 5_000_000},
        {"durable": False, "auto_delete": True, "max_priority": 2},
        {"message_time_to_live": 60.0, "queue_expires": 120.0, "max_length": 9, "queue_overflow": "reject-publish"},
        {"dead_letter_exchange": "amq.fanout", "dead_letter_routing_key": "d", "single_active_consumer": True},
        {"queue_arguments": {"x-queue-mode": "lazy"}, "bindings": ["a/+", "b"]},
        {"redelivery_delay": 0.1, "prefetch": 3, "max_deliveries": 3, "dead_letter_channel": "dead"},
        {"exchange_type": "direct", "exchange_auto_delete": True, "channel_extension": "key"},
    ],
)
def test_a_queue_is_declared_as_a_subscription_declares_it(
    rabbitmq: RabbitMQ, first: str, context: dict[str, Any]
) -> None:
    """In either order the broker compares the two declarations and finds them equal."""
    queue, channel = unique("queue"), unique("channel")
    with messaging.connect(rabbitmq.url, max_priority=0 if context.get("max_priority") else 5) as m:
        if first == "declared":
            m.queues.declare(queue, channel, **context).result(PATIENCE)
        with m.subscribe(channel, queue=queue, **context):
            m.queues.declare(queue, channel, **context).result(PATIENCE)
            m.queues.delete(queue).result(PATIENCE)


def test_a_queue_that_differs_is_refused_with_what_differs_and_stays(m: Messaging, queue: str) -> None:
    m.queues.declare(queue, "differs/here").result(PATIENCE)
    m.publish("differs/here", b"x").result(PATIENCE)
    for context, what in (({"durable": False}, "durable"), ({"queue_type": "quorum"}, "x-queue-type")):
        with pytest.raises(QueueRefusedError, match=f"406 PRECONDITION_FAILED.*{what}.*declared here with") as refusal:
            m.queues.declare(queue, "differs/here", **context).result(PATIENCE)
        assert refusal.value.code == 406
    m.queues.declare(queue, declare="passive").result(PATIENCE)  # as it is
    assert m.queues.purge(queue).result(PATIENCE) == 1


@table("context, key", [({"exclusive": True}, "exclusive"), ({"declare": "none"}, "declare")])
def test_a_declaration_without_effect_is_refused(m: Messaging, queue: str, context: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidExtensionError, match=f"extension '{key}'"):
        m.queues.declare(queue, **context).result(PATIENCE)


def test_the_exclusive_queue_of_another_connection_is_refused(
    m: Messaging, queue: str, foreign: BlockingChannel
) -> None:
    foreign.queue_declare(queue, exclusive=True)
    for request in (m.queues.peek, m.queues.purge, m.queues.delete, m.queues.declare):
        with pytest.raises(QueueRefusedError, match=f"{queue}.*405 RESOURCE_LOCKED") as refusal:
            request(queue).result(PATIENCE)
        assert refusal.value.code == 405
    assert losses(m) == 0


def test_a_reserved_name_is_refused(m: Messaging) -> None:
    with pytest.raises(QueueRefusedError, match="403 ACCESS_REFUSED"):
        m.queues.declare("amq.own").result(PATIENCE)


def test_what_a_queue_type_does_not_support_costs_no_connection(m: Messaging, queue: str) -> None:
    """RabbitMQ ends the connection over it, on which nothing else is."""
    m.queues.declare(queue, queue_type="stream").result(PATIENCE)
    with m.subscribe("administered/else") as stream:
        for request in (m.queues.peek, m.queues.purge):
            with pytest.raises(QueueRefusedError, match="540 NOT_IMPLEMENTED"):
                request(queue).result(PATIENCE)
        assert m.queues.delete(queue).result(PATIENCE) == 0
        m.queues.declare(queue, queue_type="quorum").result(PATIENCE)
        with pytest.raises(QueueRefusedError, match="540 NOT_IMPLEMENTED"):
            m.queues.delete(queue, if_empty=True).result(PATIENCE)
        m.publish("administered/else", b"x").result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"x"
    assert losses(m) == 0


def test_peeking_at_a_quorum_queue_counts_a_delivery_and_keeps_the_order(m: Messaging, queue: str) -> None:
    m.queues.declare(queue, "quorum/peeked", queue_type="quorum").result(PATIENCE)
    m.publish("quorum/peeked", b"x").result(PATIENCE)
    counts = [m.queues.peek(queue).result(PATIENCE)[0].context.delivery_count for _ in range(3)]
    assert counts == [1, 2, 3]
    for payload in (b"y", b"z"):
        m.publish("quorum/peeked", payload).result(PATIENCE)
    m.queues.peek(queue, 1).result(PATIENCE)
    assert [each.payload for each in m.queues.peek(queue).result(PATIENCE)] == [b"x", b"y", b"z"]


def test_many_messages_of_other_programs_are_peeked_at_in_their_order(
    m: Messaging, queue: str, foreign: BlockingChannel
) -> None:
    """More than are asked for at once, of any size, on routing keys of any form."""
    m.queues.declare(queue).result(PATIENCE)
    payloads = [b"%d" % number + b"." * (number % 5 * 100_000) for number in range(40)]
    properties = pika.BasicProperties(headers={"n": 2**40, "l": [1, {"a": None}]}, content_type="text/plain")
    for payload in payloads:
        foreign.basic_publish("", queue, payload, properties)
    foreign.exchange_declare("amq.fanout", passive=True)
    foreign.queue_bind(queue, "amq.fanout")
    foreign.basic_publish("amq.fanout", "a.b/ü", b"last")
    eventually(lambda: len(m.queues.peek(queue, 100).result(PATIENCE)) == 41)
    found = m.queues.peek(queue, 1000).result(PATIENCE)
    assert [each.payload for each in found] == [*payloads, b"last"]
    assert (found[0].context.channel, found[0].value()) == (queue.replace(".", "/"), "0")
    assert (found[-1].context.channel, found[-1].context.channel_extension) == ("amq.fanout", "a.b/ü")
    assert m.queues.purge(queue).result(PATIENCE) == 41


async def test_a_request_leaves_no_connection_behind(client: Client, queue: str, foreign: BlockingChannel) -> None:
    foreign.queue_declare(queue)
    assert await client.adapter.purge_queue(queue) == 0
    with pytest.raises(QueueRefusedError):
        await client.adapter.peek_queue(unique("none"), 1)
    assert len(client.wires) == 1


def test_a_broker_that_is_gone_or_silent_fails_a_request_in_time(proxy: BrokerProxy, queue: str) -> None:
    with messaging.connect(proxy.url, timeout=1.0, connect_timeout=0.5, close_timeout=0.1) as m:
        m.queues.declare(queue).result(PATIENCE)
        proxy.up.swallow()
        with pytest.raises((ConnectFailedError, ConnectionLostError, DeadlineError)):
            m.queues.purge(queue).result(PATIENCE)

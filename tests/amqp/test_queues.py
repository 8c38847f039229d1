"""Queues with arguments at a real broker: what each does, and what goes wrong with one only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from messaging.errors import PublishRefusedError, SubscriptionRefusedError, UnroutableError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually_async
from tests.amqp.harness import Client, connected, settled, unique
from tests.amqp.test_consumer import depth, exists
from tests.amqp.test_publisher import outcomes, receive

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel

    from messaging.testing.brokers import RabbitMQ


@table(
    "given, declared",
    [
        ({"queueType": "classic", "maxPriority": 0}, {"arguments": {"x-queue-type": "classic"}}),
        ({"queueType": "quorum", "deliveryLimit": 4}, {"arguments": {"x-queue-type": "quorum", "x-delivery-limit": 4}}),
        ({"queueType": "stream", "maxAge": 3600.0, "streamSegmentBytes": 1_000_000, "maxLengthBytes": 5_000_000},
         {"arguments": {"x-queue-type": "stream", "x-max-age": "3600s", "x-max-length-bytes": 5_000_000,
                        "x-stream-max-segment-size-bytes": 1_000_000}}),
        ({"queueType": "quorum", "maxLength": 9, "queueArguments": {"x-queue-leader-locator": "balanced"}},
         {"arguments": {"x-queue-type": "quorum", "x-max-length": 9, "x-queue-leader-locator": "balanced"}}),
        ({"durable": False, "autoDelete": True, "maxPriority": 2},
         {"durable": False, "auto_delete": True, "arguments": {"x-max-priority": 2}}),
        ({"maxPriority": 0, "messageTimeToLive": 60, "queueExpires": 120, "maxLength": 9, "maxLengthBytes": 90,
          "queueOverflow": "reject-publish", "deadLetterExchange": "amq.fanout", "deadLetterRoutingKey": "d",
          "singleActiveConsumer": True},
         {"arguments": {"x-message-ttl": 60_000, "x-expires": 120_000, "x-max-length": 9, "x-max-length-bytes": 90,
                        "x-overflow": "reject-publish", "x-dead-letter-exchange": "amq.fanout",
                        "x-dead-letter-routing-key": "d", "x-single-active-consumer": True}}),
    ],
)  # fmt: skip
async def test_a_queue_is_declared_with_its_arguments(
    client: Client, foreign: BlockingChannel, queue: str, given: dict[str, Any], declared: dict[str, Any]
) -> None:
    sink, handle = await client.subscribe(queue, queue=queue, **given)
    # the same again, or it would be refused
    foreign.queue_declare(queue, **{"durable": True} | declared)
    await client.publish(queue, b"x")
    await sink.count(1)
    client.acknowledge(*sink.arrived)
    await client.adapter.unsubscribe(handle)
    foreign.queue_delete(queue)


async def test_an_exclusive_queue_is_for_one_connection_and_deleted_with_it(
    rabbitmq: RabbitMQ, foreign: BlockingChannel
) -> None:
    queue = unique("mine")
    async with connected(rabbitmq.url) as one, connected(rabbitmq.url) as other:
        await one.subscribe("a", queue=queue, exclusive=True)
        with pytest.raises(SubscriptionRefusedError, match="405 RESOURCE_LOCKED") as caught:
            await other.subscribe("a", queue=queue, exclusive=True)
        assert caught.value.code == 405
        await one.subscribe("a", queue=queue, exclusive=True)
    assert not exists(foreign, queue)


async def test_an_auto_delete_queue_is_deleted_with_its_last_consumer(client: Client, foreign: BlockingChannel) -> None:
    queue = unique("shared")
    handles = [(await client.subscribe("a", queue=queue, autoDelete=True))[1] for _ in range(2)]
    await client.adapter.unsubscribe(handles[0])
    assert exists(foreign, queue)
    await client.adapter.unsubscribe(handles[1])
    await eventually_async(lambda: not exists(foreign, queue), "its end")


async def test_an_unused_queue_expires(client: Client, foreign: BlockingChannel) -> None:
    queue = unique("expiring")
    _, handle = await client.subscribe("a", queue=queue, queueExpires=0.1)
    await asyncio.sleep(0.3)  # sleeps: the broker's time cannot be turned
    assert exists(foreign, queue)  # it is consumed
    await client.adapter.unsubscribe(handle)
    message = client.message("amq.default")
    async with asyncio.timeout(PATIENCE):
        while message.error is None:  # asking for the queue would be a use
            message = client.message("amq.default", key=queue, extensions={"mandatory": True})
            await client.adapter.publish([message])
            await settled(message.done)
    assert isinstance(message.error, UnroutableError)


@pytest.fixture
def graves(foreign: BlockingChannel) -> dict[str, Any]:
    """The extensions of a queue whose dead letters go to a queue of their own."""
    name = unique("graves")
    foreign.queue_declare(name, exclusive=True)
    return {"deadLetterExchange": "amq.default", "deadLetterRoutingKey": name}


def dead(foreign: BlockingChannel, graves: dict[str, Any]) -> tuple[str, bytes]:
    """Why the next dead letter died, and its payload."""
    _, properties, body = receive(foreign, graves["deadLetterRoutingKey"])
    return properties.headers["x-first-death-reason"], body


async def test_messages_stay_for_so_long_and_then_go_where_the_broker_sends_dead_letters(
    client: Client, foreign: BlockingChannel, queue: str, graves: dict[str, Any]
) -> None:
    _, handle = await client.subscribe("short", queue=queue, messageTimeToLive=0.05, **graves)
    await client.adapter.unsubscribe(handle)
    await client.publish("short", b"x")
    assert dead(foreign, graves) == ("expired", b"x")


@table(
    "overflow, results, kept",
    [("drop-head", ["", "", ""], b"2"), ("reject-publish", ["", "PublishRefusedError", "PublishRefusedError"], b"0")],
)
async def test_a_full_queue_loses_its_oldest_or_refuses_the_newest(
    client: Client, foreign: BlockingChannel, queue: str, overflow: str, results: list[str], kept: bytes
) -> None:
    foreign.queue_delete(queue)
    _, handle = await client.subscribe(queue, queue=queue, maxLength=1, queueOverflow=overflow)
    await client.adapter.unsubscribe(handle)
    batch = [client.message(queue, b"%d" % number) for number in range(3)]
    await client.adapter.publish(batch)
    assert await outcomes(batch) == results
    for message in batch[1:]:
        assert message.error is None or isinstance(message.error, PublishRefusedError)
    assert receive(foreign, queue)[2] == kept


async def test_a_single_active_consumer_receives_all_messages_until_it_ends(client: Client, queue: str) -> None:
    first, handle = await client.subscribe("single", queue=queue, singleActiveConsumer=True)
    second, _ = await client.subscribe("single", queue=queue, singleActiveConsumer=True)
    await client.publish("single", b"1", b"2")
    await first.count(2)
    assert second.arrived == []
    client.acknowledge(first.arrived[0])
    await client.adapter.unsubscribe(handle)
    await client.publish("single", b"3")
    await second.count(2)
    assert second.payloads == [b"2", b"3"]


async def test_consumers_of_a_higher_priority_go_first(client: Client, queue: str) -> None:
    low, _ = await client.subscribe("first", queue=queue, prefetch=10, consumerPriority=-1)
    high, _ = await client.subscribe("first", queue=queue, prefetch=3, consumerPriority=5)
    await client.publish("first", *[b"%d" % number for number in range(5)])
    await high.count(3)
    await low.count(2)
    assert (high.payloads, low.payloads) == ([b"0", b"1", b"2"], [b"3", b"4"])


async def test_a_quorum_queue_counts_and_dead_letters_at_its_limit(
    client: Client, foreign: BlockingChannel, queue: str, graves: dict[str, Any]
) -> None:
    sink, _ = await client.subscribe("quorum", queue=queue, queueType="quorum", deliveryLimit=2, **graves)
    await client.publish("quorum", b"x")
    counts = []
    for _ in range(3):
        arrived = await sink.next()
        counts.append(arrived.delivery_count)
        client.reject(arrived)
    assert counts == [None, 2, 3]
    await eventually_async(lambda: depth(foreign, graves["deadLetterRoutingKey"]), "the dead letter")
    assert dead(foreign, graves) == ("delivery_limit", b"x")


async def test_levels_of_priority_are_chosen_for_each_queue(client: Client, queue: str) -> None:
    _, handle = await client.subscribe("levels", queue=queue, maxPriority=1)
    await client.adapter.unsubscribe(handle)
    for priority in (0, 1, 9):
        await client.publish("levels", b"%d" % priority, extensions={"priority": priority})
    sink, _ = await client.subscribe("levels", queue=queue)
    await sink.count(3)
    assert sink.payloads == [b"1", b"9", b"0"]  # a priority above the highest level counts as the highest


async def test_without_levels_a_priority_is_received_and_the_order_is_that_of_publishing(client: Client) -> None:
    sink, _ = await client.subscribe("no/levels", prefetch=1)
    for priority in (0, 9, 5):
        await client.publish("no/levels", b"%d" % priority, extensions={"priority": priority})
    for number in range(1, 4):
        client.acknowledge((await sink.count(number))[-1])
    assert sink.payloads == [b"0", b"9", b"5"]
    assert [arrived.extensions["priority"] for arrived in sink.arrived] == [0, 9, 5]

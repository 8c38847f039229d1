"""Subscribing at a real broker: delivery, acknowledgement, requeueing, and the end of a subscription."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import SubscriptionRefusedError
from messaging.testing.tables import table
from messaging.testing.waiting import eventually_async
from messaging_adapters.amqp import frames
from tests.amqp.harness import Client, bare_consumer, connected, run, unique

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel

    from messaging.testing.brokers import RabbitMQ


def depth(foreign: BlockingChannel, queue: str) -> int:
    """Messages ready in a queue."""
    return int(foreign.queue_declare(queue, passive=True).method.message_count)


def exists(foreign: BlockingChannel, queue: str) -> bool:
    with foreign.connection.channel() as probe:  # asking for what does not exist costs the channel
        try:
            probe.queue_declare(queue, passive=True)
        except pika.exceptions.ChannelClosedByBroker:
            return False
        return True


async def test_a_queue_that_exists_is_used_as_it_is(client: Client, foreign: BlockingChannel) -> None:
    queue = unique("existing")
    foreign.queue_declare(queue, auto_delete=True, arguments={"x-max-length": 10})
    sink, _ = await client.subscribe("existing", queue=queue)
    await client.publish("existing", b"x")
    await sink.count(1)


async def test_without_autocreate_nothing_is_declared_or_bound(
    client: Client, foreign: BlockingChannel, queue: str
) -> None:
    missing = unique("missing")
    with pytest.raises(SubscriptionRefusedError, match=f"'{missing}'.*404 NOT_FOUND"):
        await client.subscribe("a", queue=missing, autocreate=False)
    assert not exists(foreign, missing)
    foreign.queue_declare(queue)
    foreign.queue_bind(queue, "amq.topic", "elsewhere")
    sink, _ = await client.subscribe("a", queue=queue, autocreate=False)
    await client.publish("a", b"not bound")
    await client.publish("elsewhere", b"bound")
    foreign.basic_publish("", queue, b"direct")
    await sink.count(2)
    assert [(each.channel, each.payload) for each in sink.arrived] == [("elsewhere", b"bound"), (queue, b"direct")]
    with pytest.raises(SubscriptionRefusedError, match=f"404 NOT_FOUND - no exchange '{missing}'"):
        await client.subscribe(missing, key="k", queue=queue, autocreate=False)


async def test_messages_by_bindings_of_other_programs_are_delivered(
    client: Client, foreign: BlockingChannel, queue: str, exchange: str
) -> None:
    foreign.exchange_declare(exchange, "fanout")
    sink, _ = await client.subscribe("+/x", queue=queue)
    foreign.queue_bind(queue, exchange)
    foreign.queue_bind(queue, "amq.topic", "other")
    await client.publish("$SYS/x", b"not for a wildcard")
    await client.publish("other", b"1")
    await client.publish(exchange, b"2", key="k", extensions={"autocreate": False})
    await sink.count(2)
    assert [(each.channel, each.channel_extension) for each in sink.arrived] == [("other", None), (exchange, "k")]


# --- credit and acknowledgement


class Broker:
    """What a broker makes of acknowledgements on one channel; stands in for the ``Wire``."""

    alive = True

    def __init__(self, count: int) -> None:
        self.unacknowledged = set(range(1, count + 1))
        self.acknowledged: set[int] = set()
        self.requeued: set[int] = set()

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), 21):
            frame = data[start : start + 21]
            tag, multiple = frames.read_settlement(frame, 7)
            assert tag in self.unacknowledged, "406 PRECONDITION_FAILED - unknown delivery tag"
            is_ack = frame[7:11] == frames.BASIC_ACK  # the flag of a reject is "requeue"
            settled = {each for each in self.unacknowledged if each <= tag} if is_ack and multiple else {tag}
            self.unacknowledged -= settled
            (self.acknowledged if is_ack else self.requeued).update(settled)


@given(st.lists(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=12), max_size=12))
def test_the_broker_learns_the_first_verdict_on_each_delivery_and_nothing_else(
    turns: list[list[tuple[int, bool]]],
) -> None:
    broker = Broker(30)

    async def main() -> None:
        consumer = bare_consumer(broker)
        consumer._open = True
        for turn in turns:
            for tag, requeue in turn:
                consumer.settle(tag, requeue=requeue)
            await asyncio.sleep(0)

    run(main())
    first: dict[int, bool] = {}
    for tag, requeue in itertools.chain(*turns):
        first.setdefault(tag, requeue)
    assert broker.requeued == {tag for tag, requeue in first.items() if requeue}
    assert broker.acknowledged == {tag for tag, requeue in first.items() if not requeue}


@table("rejected", [(), (3,), (0, 9)])
async def test_unsettled_and_rejected_messages_are_requeued_in_order(
    client: Client, queue: str, rejected: tuple[int, ...]
) -> None:
    wanted = [b"%d" % number for number in range(12)]
    sink, handle = await client.subscribe("order", queue=queue, prefetch=10)
    await client.publish("order", *wanted)
    await sink.count(10)
    client.reject(*[sink.arrived[number] for number in rejected])
    await client.adapter.unsubscribe(handle)
    again, handle = await client.subscribe("order", queue=queue)
    await again.count(12)
    assert again.payloads == wanted
    client.acknowledge(*again.arrived)
    await client.adapter.unsubscribe(handle)


async def test_qos_0_needs_no_acknowledgement_and_has_no_token(
    client: Client, foreign: BlockingChannel, queue: str
) -> None:
    sink, handle = await client.subscribe("zero", queue=queue, qos="0")
    await client.publish("zero", *[b"x"] * 10)
    await sink.count(10)
    assert [each.token for each in sink.arrived] == [None] * 10
    await client.adapter.unsubscribe(handle)
    assert depth(foreign, queue) == 0


async def test_a_channel_the_broker_closes_ends_that_subscription_only(client: Client) -> None:
    others, _ = await client.subscribe("others")
    sink, _ = await client.subscribe("broken")
    await client.publish("broken", b"x")
    arrived = (await sink.count(1))[0]
    wire = client.wires[1]
    # an acknowledgement of a message that was never delivered
    wire.write(frames.ack(max(wire.lanes), 2**60, multiple=False))
    await eventually_async(lambda: sink.error, "the end")
    assert "406 PRECONDITION_FAILED - unknown delivery tag" in str(sink.error)
    assert client.adapter.is_stale(arrived.token)
    client.acknowledge(arrived)
    await client.publish("others", b"x")
    await others.count(1)
    assert (sink.failures, others.error, client.losses) == (1, None, [])


async def test_subscribing_can_be_cancelled_and_leaves_nothing(rabbitmq: RabbitMQ) -> None:
    for turns in range(40):  # the connection included
        async with connected(rabbitmq.url) as client:
            subscribing = asyncio.create_task(client.subscribe("cancelled"))
            for _ in range(turns):
                await asyncio.sleep(0)
            subscribing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await subscribing
    async with connected(rabbitmq.url) as client:
        for turns in range(0, 60, 3):
            subscribing = asyncio.create_task(client.subscribe("cancelled"))
            for _ in range(turns):
                await asyncio.sleep(0)
            subscribing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                _, handle = await subscribing
                await client.adapter.unsubscribe(handle)
        link = client.link
        await eventually_async(lambda: not link._tasks, "cleaning up")
        assert client.losses == []
        sink, _ = await client.subscribe("cancelled")
        await client.publish("cancelled", b"x")
        await sink.count(1)
        queues = await asyncio.to_thread(rabbitmq.ctl, "list_queues", "name")
        assert queues.count("amq.gen") == 1

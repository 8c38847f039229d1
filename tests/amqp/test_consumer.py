"""Subscribing at a real broker: who gets what, how often, and what becomes of what is not acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.amqp import frames
from adapters.amqp.consumer import QueueConsumer
from adapters.amqp.declarations import source
from messaging.errors import ConnectionLostError, SubscriptionRefusedError
from messaging.model import SubscriptionSpec, channels
from messaging.model.extensions import SubscribeOptions
from tests.amqp.conftest import Freeze
from tests.amqp.harness import Client, Sink, connected, run, unique, until, within

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel

    from tests.brokers import RabbitMQ


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


# --- who gets what

NAMES = [
    "a", "a/b", "a/b/c", "b", "b/b", "/", "/a", "a/", "a//b", "//", "a.b", "a.b/c", "a*b", "%2E", "50%", "$SYS",
    "$SYS/a", "$a/b", "ä/ö", "a b/c",
]  # fmt: skip
PATTERNS = [
    "#", "+", "a", "a/b", "a/#", "a/+", "+/b", "+/+", "+/#", "a/+/c", "a/b/#", "/#", "/+", "+/", "a//b", "a/+/b",
    "a.b", "a.b/+", "a*b", "%2E", "50%", "$SYS/#", "$SYS/+", "ä/+", "a/+/#", "+/+/+",
]  # fmt: skip


async def test_every_pattern_gets_exactly_the_channels_it_matches(client: Client) -> None:
    sinks = {pattern: (await client.subscribe(pattern))[0] for pattern in PATTERNS}
    # twice: once the second round is there, everything of the first has been seen, also what was not wanted
    for name in NAMES * 2:
        await client.publish(name, name.encode())
    for pattern, sink in sinks.items():
        wanted = [name for name in NAMES if channels.matches(pattern, name)]
        assert wanted, pattern
        await sink.count(2 * len(wanted))
        assert [arrived.channel for arrived in sink.arrived] == wanted * 2, pattern
        assert sink.payloads == [name.encode() for name in wanted * 2], pattern


async def test_channel_and_extension_are_exchange_and_binding_pattern(client: Client) -> None:
    exchange = unique("raw")
    sink, _ = await client.subscribe(exchange, key="orders.*.new")
    default, _ = await client.subscribe("amq.topic", key="orders.#")
    for key in ("orders.1.new", "orders.1.old", "orders.%2E.new"):
        await client.publish(exchange, key.encode(), key=key)
    await client.publish("orders/2", b"x")
    await sink.count(2)
    assert [(each.channel, each.channel_extension) for each in sink.arrived] == [
        (exchange, "orders.1.new"),
        (exchange, "orders.%2E.new"),
    ]
    [arrived] = await default.count(1)
    assert (arrived.channel, arrived.channel_extension) == ("amq.topic", "orders.2")


async def test_private_queues_are_deleted_with_the_subscription(rabbitmq: RabbitMQ, client: Client) -> None:
    _, handle = await client.subscribe("private")
    queues = await asyncio.to_thread(rabbitmq.ctl, "list_queues", "name", "exclusive", "auto_delete")
    [line] = [line for line in queues.splitlines() if line.startswith("amq.gen")]
    assert line.split()[1:] == ["true", "true"]
    await client.adapter.unsubscribe(handle)
    await client.adapter.unsubscribe(handle)
    assert "amq.gen" not in await asyncio.to_thread(rabbitmq.ctl, "list_queues", "name")


# --- what a delivery tells


async def test_messages_of_another_client_are_read_with_all_properties(
    client: Client, foreign: BlockingChannel
) -> None:
    sink, _ = await client.subscribe("foreign/+")
    foreign.basic_publish(
        "amq.topic",
        "foreign.50%",
        b"\x00\xff",
        pika.BasicProperties(
            content_type="application/json", content_encoding="gzip", correlation_id="c",
            reply_to="answers.%2E",
            headers={"text": "ü", "number": 7, "list": [1, {"a": None}], "yes": True}, priority=200,
            expiration="60000", message_id="m", timestamp=1_700_000_000, type="t", user_id="guest", app_id="a",
        ),
    )  # fmt: skip
    arrived = await sink.next()
    assert (arrived.payload, arrived.channel, arrived.channel_extension) == (b"\x00\xff", "foreign/50%", None)
    assert (arrived.content_type, arrived.content_encoding) == ("application/json", "gzip")
    assert (arrived.correlation_id, arrived.reply_to_channel) == ("c", "answers/.")
    assert dict(arrived.extensions) == {
        "headers": {"text": "ü", "number": 7, "list": (1, {"a": None}), "yes": True},
        "priority": 200,
        "timeToLive": 60.0,
        "messageId": "m",
        "timestamp": 1_700_000_000.0,
        "type": "t",
        "userId": "guest",
        "appId": "a",
    }
    assert arrived.delivery_count is None
    foreign.basic_publish("amq.topic", "foreign.", b"")
    arrived = await sink.next()
    assert (arrived.channel, arrived.payload, dict(arrived.extensions)) == ("foreign/", b"", {})


async def test_a_published_message_is_received_unchanged(client: Client) -> None:
    sink, _ = await client.subscribe("back")
    extensions = {"headers": {"a": "b"}, "priority": 3, "timeToLive": 60.0, "guaranteedDelivery": True}
    message = client.message(
        "back", b"x", content_type="t", content_encoding="e", correlation_id="c", reply_to_channel="r/.%",
        extensions=extensions,
    )  # fmt: skip
    await client.adapter.publish([message])
    arrived = await sink.next()
    assert (arrived.content_type, arrived.content_encoding, arrived.correlation_id) == ("t", "e", "c")
    assert arrived.reply_to_channel == "r/.%"
    known = dict(arrived.extensions)
    assert known.pop("timestamp") == pytest.approx(time.time(), abs=5)
    assert known == {
        "headers": {"a": "b"}, "priority": 3, "timeToLive": 60.0, "messageId": message.message_id,
    }  # fmt: skip


@pytest.mark.parametrize(
    "properties",
    [
        pika.BasicProperties(timestamp=2**63),
        pika.BasicProperties(headers={"x": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]}),
    ],
)
async def test_messages_that_the_amqp_library_cannot_decode_are_delivered(
    client: Client, foreign: BlockingChannel, properties: pika.BasicProperties
) -> None:
    sink, _ = await client.subscribe("odd")
    foreign.basic_publish("amq.topic", "odd", b"1", properties)
    foreign.basic_publish("amq.topic", "odd", b"2")
    await sink.count(2)
    assert sink.payloads == [b"1", b"2"]
    assert client.losses == []


# --- named queues


async def test_a_queue_keeps_messages_while_it_has_no_consumer(rabbitmq: RabbitMQ, foreign: BlockingChannel) -> None:
    queue = unique("kept ü%")
    async with connected(rabbitmq.url) as client:
        _, handle = await client.subscribe("kept", queue=queue)
        await client.adapter.unsubscribe(handle)
        await client.publish("kept", b"1", b"2")
    async with connected(rabbitmq.url) as client:
        sink, _ = await client.subscribe("kept", queue=queue)
        await sink.count(2)
        assert sink.payloads == [b"1", b"2"]
        assert not any(arrived.extensions.get("redelivered") for arrived in sink.arrived)
    foreign.queue_declare(queue, durable=True)  # the same, or it would be refused
    foreign.queue_delete(queue)


async def test_a_queue_that_exists_is_used_as_it_is(client: Client, foreign: BlockingChannel) -> None:
    queue = unique("existing")
    foreign.queue_declare(queue, auto_delete=True, arguments={"x-max-length": 10})
    sink, _ = await client.subscribe("existing", queue=queue)
    await client.publish("existing", b"x")
    await sink.count(1)


async def test_without_autocreate_nothing_is_declared_or_bound(rabbitmq: RabbitMQ, foreign: BlockingChannel) -> None:
    queue, missing = unique("bound"), unique("missing")
    async with connected(rabbitmq.url) as client:
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
        assert [(each.channel, each.payload) for each in sink.arrived] == [
            ("elsewhere", b"bound"),
            (queue, b"direct"),
        ]
        with pytest.raises(SubscriptionRefusedError, match=f"404 NOT_FOUND - no exchange '{missing}'"):
            await client.subscribe(missing, key="k", queue=queue, autocreate=False)
    foreign.queue_delete(queue)


async def test_messages_by_bindings_of_other_programs_are_delivered(
    rabbitmq: RabbitMQ, foreign: BlockingChannel
) -> None:
    queue, exchange = unique("shared"), unique("other")
    foreign.exchange_declare(exchange, "fanout", auto_delete=True)
    async with connected(rabbitmq.url) as client:
        sink, _ = await client.subscribe("+/x", queue=queue)
        foreign.queue_bind(queue, exchange)
        foreign.queue_bind(queue, "amq.topic", "other")
        await client.publish("$SYS/x", b"not for a wildcard")
        await client.publish("other", b"1")
        await client.publish(exchange, b"2", key="k", extensions={"autocreate": False})
        await sink.count(2)
        assert [(each.channel, each.channel_extension) for each in sink.arrived] == [
            ("other", None),
            (exchange, "k"),
        ]
    foreign.queue_delete(queue)


# --- credit and acknowledgement


async def test_prefetch_bounds_unsettled_messages(client: Client) -> None:
    sink, _ = await client.subscribe("credit", prefetch=3)
    probe, _ = await client.subscribe("credit", qos="0")
    await client.publish("credit", *[b"%d" % number for number in range(10)])
    await probe.count(10)
    await sink.count(3)
    client.acknowledge(sink.arrived[1])
    await sink.count(4)
    client.acknowledge(sink.arrived[0], sink.arrived[2])
    await sink.count(6)
    await client.publish("credit", b"10")
    await probe.count(11)
    assert sink.payloads == [b"%d" % number for number in range(6)]


async def test_messages_acknowledged_in_any_order_are_not_redelivered(client: Client, queue: str) -> None:
    sink, handle = await client.subscribe("acks", queue=queue)
    await client.publish("acks", *[b"%d" % number for number in range(12)])
    arrived = [*await sink.count(12)]
    client.acknowledge(*arrived[6:8])  # beyond a gap
    client.acknowledge(arrived[1], arrived[0])  # from the start
    await asyncio.sleep(0)
    client.acknowledge(arrived[2], arrived[2])  # twice
    client.acknowledge(arrived[2], arrived[6])
    client.acknowledge(*arrived[3:6])  # closes the gap
    client.acknowledge(arrived[11])
    await client.adapter.unsubscribe(handle)
    assert client.losses == []
    again, _ = await client.subscribe("acks", queue=queue)
    await again.count(3)
    assert again.payloads == [b"8", b"9", b"10"]
    assert all(each.extensions["redelivered"] for each in again.arrived)


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
            settled = {each for each in self.unacknowledged if each <= tag} if multiple else {tag}
            self.unacknowledged -= settled
            (self.acknowledged if frame[7:11] == frames.BASIC_ACK else self.requeued).update(settled)


@given(st.lists(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=12), max_size=12))
def test_the_broker_learns_the_first_verdict_on_each_delivery_and_nothing_else(
    turns: list[list[tuple[int, bool]]],
) -> None:
    broker = Broker(30)

    async def main() -> None:
        spec = SubscriptionSpec("c", None, SubscribeOptions())
        wire: Any = broker
        consumer = QueueConsumer(
            wire,
            spec,
            Sink(),
            source(spec, "e", 0),
            exchange="e",
            tag="t",
            spawn=lambda _: None,
        )
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


async def test_a_rejected_message_is_delivered_again_where_it_was(client: Client) -> None:
    sink, _ = await client.subscribe("rejected", prefetch=1)
    await client.publish("rejected", b"1", b"2")
    await sink.count(1)
    assert "redelivered" not in sink.arrived[0].extensions
    client.reject(sink.arrived[0])
    await sink.count(2)
    assert sink.payloads == [b"1", b"1"]
    assert sink.arrived[1].extensions["redelivered"] is True
    client.acknowledge(sink.arrived[0])  # the verdict is given
    client.acknowledge(sink.arrived[1])
    await sink.count(3)
    assert sink.payloads == [b"1", b"1", b"2"]
    assert "redelivered" not in sink.arrived[2].extensions


async def test_verdicts_of_one_turn_are_not_mixed_up(client: Client) -> None:
    sink, _ = await client.subscribe("mixed", prefetch=6)
    await client.publish("mixed", *[b"%d" % number for number in range(6)])
    arrived = [*await sink.count(6)]
    client.acknowledge(arrived[0])
    client.reject(arrived[1])
    client.acknowledge(arrived[2])
    client.reject(arrived[3])
    client.acknowledge(arrived[4], arrived[5])
    await sink.count(8)
    assert sorted(sink.payloads[6:]) == sorted([arrived[1].payload, arrived[3].payload])
    client.acknowledge(*sink.arrived[6:])
    await client.publish("mixed", b"end")
    await sink.count(9)
    assert sink.payloads[8] == b"end"


async def test_unsubscribing_requeues_unsettled_messages(client: Client, foreign: BlockingChannel, queue: str) -> None:
    sink, handle = await client.subscribe("back", queue=queue)
    await client.publish("back", b"1", b"2", b"3")
    arrived = [*await sink.count(3)]
    client.acknowledge(arrived[1])
    assert not client.adapter.is_stale(arrived[0].token)
    await client.adapter.unsubscribe(handle)
    assert all(client.adapter.is_stale(each.token) for each in arrived)
    client.acknowledge(*arrived)  # too late
    await until(lambda: depth(foreign, queue) == 2, "the return")
    again, _ = await client.subscribe("back", queue=queue)
    await again.count(2)
    assert again.payloads == [b"1", b"3"]
    assert len(sink.arrived) == 3
    assert client.losses == []


@pytest.mark.parametrize("rejected", [(), (3,), (0, 9)])
async def test_unsettled_and_rejected_messages_are_requeued_in_order(
    client: Client, queue: str, rejected: tuple[int, ...]
) -> None:
    wanted = [b"%d" % number for number in range(12)]
    sink, handle = await client.subscribe("order", queue=queue, prefetch=10)
    await client.publish("order", *wanted)
    await sink.count(10)
    client.reject(*[sink.arrived[number] for number in rejected])
    await client.adapter.unsubscribe(handle)
    again, _ = await client.subscribe("order", queue=queue)
    await again.count(12)
    assert again.payloads == wanted


async def test_qos_0_needs_no_acknowledgement_and_has_no_token(
    client: Client, foreign: BlockingChannel, queue: str
) -> None:
    sink, handle = await client.subscribe("zero", queue=queue, qos="0")
    await client.publish("zero", *[b"x"] * 10)
    await sink.count(10)
    assert [each.token for each in sink.arrived] == [None] * 10
    await client.adapter.unsubscribe(handle)
    assert depth(foreign, queue) == 0


# --- what the broker ends


async def test_a_channel_the_broker_closes_ends_that_subscription_only(client: Client) -> None:
    others, _ = await client.subscribe("others")
    sink, _ = await client.subscribe("broken")
    await client.publish("broken", b"x")
    arrived = (await sink.count(1))[0]
    wire = client.wires[1]
    # an acknowledgement of a message that was never delivered
    wire.write(frames.ack(max(wire.lanes), 2**60, multiple=False))
    await until(lambda: sink.error, "the end")
    assert "406 PRECONDITION_FAILED - unknown delivery tag" in str(sink.error)
    assert client.adapter.is_stale(arrived.token)
    client.acknowledge(arrived)
    await client.publish("others", b"x")
    await others.count(1)
    assert (sink.failures, others.error, client.losses) == (1, None, [])


async def test_a_user_who_may_not_read_is_refused_and_leaves_no_queue(rabbitmq: RabbitMQ) -> None:
    rabbitmq.ctl("add_user", "writer", "writer")
    # may bind, which takes reading from the exchange, but not consume
    rabbitmq.ctl("set_permissions", "writer", ".*", ".*", "^amq.topic$")
    async with connected(f"amqp://writer:writer@{rabbitmq.host}:{rabbitmq.port}") as client:
        sink = Sink()
        with pytest.raises(SubscriptionRefusedError, match="403 ACCESS_REFUSED"):
            await client.subscribe("a", sink=sink)
        await client.publish("a", b"x")
        assert (sink.failures, client.losses) == (0, [])
        assert "amq.gen" not in await asyncio.to_thread(rabbitmq.ctl, "list_queues", "name")


def test_more_channels_than_the_broker_allows_are_refused_and_the_others_live(own_rabbitmq: RabbitMQ) -> None:
    own_rabbitmq.ctl("eval", "application:set_env(rabbit, channel_max, 3).")

    async def main() -> None:
        async with connected(own_rabbitmq.url) as client:
            sinks = [(await client.subscribe("few"))[0] for _ in range(3)]
            with pytest.raises(SubscriptionRefusedError, match="allows 3 channels"):
                await client.subscribe("few")
            await client.publish("few", b"x")
            for sink in sinks:
                await sink.count(1)
            assert client.losses == []

    try:
        run(main())
    finally:
        own_rabbitmq.ctl("eval", "application:set_env(rabbit, channel_max, 2047).")


# --- what ends altogether


async def test_closing_takes_no_longer_if_the_broker_is_silent(own_rabbitmq: RabbitMQ, freeze: Freeze) -> None:
    async with connected(own_rabbitmq.url) as client:
        await client.subscribe("silent")
        await client.publish("silent", b"x")
        freeze()
        subscribing = asyncio.create_task(client.subscribe("too late"))
        message = client.message("silent")
        await client.adapter.publish([message])
        started = time.monotonic()
        await client.adapter.close()
        assert time.monotonic() - started < 2
        with pytest.raises(ConnectionLostError):
            await within(subscribing)
        assert message.was_sent
        assert client.losses == []


async def test_closing_ends_a_subscription_that_waits_for_its_connection(
    own_rabbitmq: RabbitMQ, freeze: Freeze
) -> None:
    async with connected(own_rabbitmq.url) as client:
        freeze()
        subscribing = asyncio.create_task(client.subscribe("too late"))
        link = client.link
        await until(lambda: link._dialling, "the second connection")
        await client.adapter.close()
        with pytest.raises(ConnectionLostError):
            await within(subscribing)


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
        await until(lambda: not link._tasks, "cleaning up")
        assert client.losses == []
        sink, _ = await client.subscribe("cancelled")
        await client.publish("cancelled", b"x")
        await sink.count(1)
        queues = await asyncio.to_thread(rabbitmq.ctl, "list_queues", "name")
        assert queues.count("amq.gen") == 1


async def test_a_connection_without_answer_to_a_request_is_closed(own_rabbitmq: RabbitMQ, freeze: Freeze) -> None:
    async with connected(own_rabbitmq.url, connect_timeout=0.3, heartbeat=0) as client:
        await client.subscribe("silent")
        freeze()
        with pytest.raises(ConnectionLostError, match=r"no answer within 0\.3 s"):
            await client.subscribe("silent")
        assert "no answer within 0.3 s" in str(await client.lost())

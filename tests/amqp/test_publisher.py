"""Publishing to a real broker: confirms, order, bounds, refusals, and what other clients see of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

import messaging
from adapters.amqp.connection import CLOSE_GRACE
from messaging.errors import BrokerError, ConnectionLostError, PublishRefusedError
from messaging.model import MessageContext
from tests.amqp.harness import Client, Out, blocked, connected, run, unique, until, within

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingChannel
    from pika.spec import Basic

    from tests.brokers import RabbitMQ


def listen(foreign: BlockingChannel, key: str, exchange: str = "amq.topic") -> str:
    """A queue of another client, bound to ``key``."""
    queue = str(foreign.queue_declare("", exclusive=True).method.queue)
    foreign.queue_bind(queue, exchange, key)
    return queue


def receive(foreign: BlockingChannel, queue: str) -> tuple[Basic.GetOk, BasicProperties, bytes]:
    """The next message of a queue."""
    deadline = time.monotonic() + 10
    while True:
        method, properties, body = foreign.basic_get(queue, auto_ack=True)
        if method is not None:
            return method, properties, body
        assert time.monotonic() < deadline, "nothing arrived"


async def outcomes(messages: list[Out]) -> list[str]:
    """How each ended: "" or the name of its error."""
    for message in messages:
        await within(message.outcome.wait())
    return ["" if message.error is None else type(message.error).__name__ for message in messages]


async def test_another_client_sees_all_properties(client: Client, foreign: BlockingChannel) -> None:
    queue = listen(foreign, "props.#")
    message = client.message(
        "props/a.b",
        "größe".encode(),
        content_type="text/plain",
        content_encoding="gzip",
        correlation_id="c-1",
        reply_to_channel="answers/here",
        extensions={
            "guaranteedDelivery": True,
            "priority": 7,
            "timeToLive": 12.5,
            "headers": {"tenant": "ä", "empty": ""},
        },
    )
    before = int(time.time())
    await client.adapter.publish([message])
    await message.result()
    method, properties, body = receive(foreign, queue)
    assert (method.exchange, method.routing_key, body) == ("amq.topic", "props.a%2Eb", "größe".encode())
    assert (properties.content_type, properties.content_encoding) == ("text/plain", "gzip")
    assert (properties.correlation_id, properties.reply_to) == ("c-1", "answers.here")
    assert (properties.delivery_mode, properties.priority, properties.expiration) == (2, 7, "12500")
    assert properties.headers == {"tenant": "ä", "empty": ""}
    assert properties.message_id == message.message_id
    assert before <= properties.timestamp <= time.time()


async def test_a_plain_message_is_transient_and_has_nothing_it_was_not_given(
    client: Client, foreign: BlockingChannel
) -> None:
    queue = listen(foreign, "plain")
    await client.publish("plain", b"", extensions={"qos": "0"})
    _, properties, body = receive(foreign, queue)
    assert body == b""
    assert properties.delivery_mode == 1
    values = {name: value for name, value in vars(properties).items() if value is not None}
    assert set(values) == {"delivery_mode", "timestamp"}


@pytest.mark.parametrize("size", [0, 1, 131_064, 131_065, 500_000])
async def test_any_size_arrives_in_as_many_frames_as_it_takes(
    rabbitmq: RabbitMQ, foreign: BlockingChannel, size: int
) -> None:
    channel = unique("size")
    queue = listen(foreign, channel)
    payload = bytes(index * 7 % 251 for index in range(size))
    async with connected(rabbitmq.url) as client:
        sink, _ = await client.subscribe(channel)
        await client.publish(channel, payload)
        [arrived] = await sink.count(1)
        assert arrived.payload == payload
    assert receive(foreign, queue)[2] == payload


async def test_qos_0_is_confirmed_once_written_and_qos_1_once_the_broker_has_it(client: Client) -> None:
    await client.publish("warm/up", b"", extensions={"qos": "0"})
    await client.publish("warm/up", b"")
    unconfirmed = [client.message("q", extensions={"qos": "0"}) for _ in range(10)]
    confirmed = [client.message("q") for _ in range(10)]
    await client.adapter.publish(unconfirmed + confirmed)
    # the channels are open, so there was nothing to wait for and no turn of the loop in between
    assert [message.settled for message in unconfirmed] == [True] * 10
    assert not any(message.was_sent for message in unconfirmed)
    assert [message.settled for message in confirmed] == [False] * 10
    assert all(message.was_sent for message in confirmed)
    assert await outcomes(confirmed) == [""] * 10


async def test_ten_thousand_confirms_pipelined_and_everything_arrives_in_order(rabbitmq: RabbitMQ) -> None:
    async with connected(rabbitmq.url, publish_window=500) as client:
        sink, _ = await client.subscribe("many", qos="0")
        messages = [client.message("many", b"%d" % number) for number in range(10_000)]
        most = 0
        for start in range(0, len(messages), 1024):
            await within(client.adapter.publish(messages[start : start + 1024]))
            most = max(most, sum(message.was_sent and not message.settled for message in messages))
        assert await outcomes(messages) == [""] * len(messages)
        assert 1 < most <= 500
        await sink.count(len(messages))
        assert sink.payloads == [b"%d" % number for number in range(10_000)]
        assert max(sink.batches) > 1


async def test_a_window_of_one_publishes_one_at_a_time(rabbitmq: RabbitMQ) -> None:
    async with connected(rabbitmq.url, publish_window=1) as client:
        assert client.adapter.capabilities.publish_window == 1
        messages = [client.message("one") for _ in range(5)]
        await within(client.adapter.publish(messages))
        assert [message.settled for message in messages[:4]] == [True] * 4
        assert await outcomes(messages) == [""] * 5


async def test_a_settled_message_is_not_sent(client: Client) -> None:
    sink, _ = await client.subscribe("settled")
    messages = [client.message("settled", payload) for payload in (b"a", b"late", b"b")]
    messages[1].confirm()
    await client.adapter.publish(messages)
    await outcomes(messages)
    await sink.count(2)
    assert sink.payloads == [b"a", b"b"]


@pytest.mark.parametrize("qos", ["0", "1"])
async def test_the_message_id_of_the_application_is_the_property(
    client: Client, foreign: BlockingChannel, qos: str
) -> None:
    queue = listen(foreign, "own")
    for own in ("order 1", "é" * 127):
        await client.publish("own", b"x", extensions={"qos": qos, "messageId": own})
        _, properties, _ = receive(foreign, queue)
        assert properties.message_id == own


async def test_the_message_id_is_not_made_unless_it_is_needed(client: Client) -> None:
    class Anonymous(Out):
        @property
        def message_id(self) -> str:
            raise AssertionError("qos 0 has no message id")

        @message_id.setter
        def message_id(self, _: str) -> None:
            pass

    message = Anonymous(client.adapter, b"x", MessageContext("a", extensions=MappingProxyType({"qos": "0"})))
    await client.adapter.publish([message])
    await message.result()


# --- exchanges


async def test_channel_and_extension_are_exchange_and_routing_key(rabbitmq: RabbitMQ, foreign: BlockingChannel) -> None:
    exchange = unique("exchange")
    foreign.exchange_declare(exchange, "direct")
    queue = listen(foreign, "raw.%2E/key", exchange)
    async with connected(rabbitmq.url) as client:
        await client.publish(exchange, b"x", key="raw.%2E/key")
    method, _, body = receive(foreign, queue)
    assert (method.exchange, method.routing_key, body) == (exchange, "raw.%2E/key", b"x")


async def test_an_exchange_that_does_not_exist_is_made_a_durable_topic_exchange(
    rabbitmq: RabbitMQ, foreign: BlockingChannel
) -> None:
    exchange = unique("größe/50%")
    async with connected(rabbitmq.url) as client:
        await client.publish(exchange, b"nobody listens", key="k")
    foreign.exchange_declare(exchange, "topic", durable=True)  # the same again, or it would be refused
    foreign.exchange_delete(exchange)


async def test_the_setting_names_the_exchange_of_plain_channels(rabbitmq: RabbitMQ, foreign: BlockingChannel) -> None:
    exchange = unique("plain")
    async with connected(rabbitmq.url, exchange=exchange) as client:
        sink, _ = await client.subscribe("a/+")
        await client.publish("a/b", b"x")
        [arrived] = await sink.count(1)
        assert (arrived.channel, arrived.channel_extension) == ("a/b", None)
    foreign.exchange_delete(exchange)


async def test_without_autocreate_a_missing_exchange_fails_its_messages_only(client: Client) -> None:
    sink, _ = await client.subscribe("fine")
    missing = unique("missing")
    batch = [
        client.message("fine", b"1"),
        client.message(missing, b"2", key="k", extensions={"autocreate": False}),
        client.message("amq.missing", b"3", key="k"),
        client.message("fine", b"4"),
    ]
    await within(client.adapter.publish(batch))
    assert await outcomes(batch) == ["", "PublishRefusedError", "PublishRefusedError", ""]
    assert f"404 NOT_FOUND - no exchange '{missing}'" in str(batch[1].error)
    await sink.count(2)
    assert sink.payloads == [b"1", b"4"]
    assert client.losses == []


async def test_an_exchange_that_vanishes_fails_its_messages_and_the_rest_goes_on(
    client: Client, foreign: BlockingChannel, exchange: str
) -> None:
    sink, _ = await client.subscribe("stays")
    no = {"autocreate": False}
    await client.publish(exchange, b"", key="k")
    await client.publish("stays", b"")
    foreign.exchange_delete(exchange)
    batch = [
        client.message(exchange, b"bad", key="k", extensions=no) if number in (20, 21, 60) else
        client.message("stays", b"%d" % number)
        for number in range(100)
    ]  # fmt: skip
    await within(client.adapter.publish(batch))
    results = await outcomes(batch)
    assert {number for number, result in enumerate(results) if result} == {20, 21, 60}
    for number in (20, 21, 60):
        assert isinstance(batch[number].error, PublishRefusedError)
        assert f"404 NOT_FOUND - no exchange '{exchange}'" in str(batch[number].error)
    # what was not confirmed when the channel was closed may have been sent twice, but nothing is missing
    wanted = {b"%d" % number for number in range(100)} - {b"20", b"21", b"60"}
    await until(lambda: wanted <= set(sink.payloads), "all the others")
    assert b"bad" not in sink.payloads
    assert client.losses == []
    # and with autocreate it is simply made again
    await client.publish(exchange, b"", key="k")


async def test_a_refused_message_with_qos_0_is_logged_and_the_next_arrives(
    client: Client, foreign: BlockingChannel, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = unique("vanishing")
    sink, _ = await client.subscribe("survives")
    qos: dict[str, Any] = {"qos": "0", "autocreate": False}
    foreign.exchange_declare(exchange, "topic")
    await client.publish(exchange, b"", key="k", extensions=qos)
    foreign.exchange_delete(exchange)
    await client.publish(exchange, b"", key="k", extensions=qos)
    await until(lambda: "404 NOT_FOUND" in caplog.text, "the warning")
    await client.publish("survives", b"x", extensions=qos)
    await sink.count(1)
    assert client.losses == []


def test_a_message_over_the_brokers_limit_is_refused_and_the_rest_goes_on(own_rabbitmq: RabbitMQ) -> None:
    def limit(size: int) -> None:
        # RabbitMQ 3.10 reads the first, 4 the second
        own_rabbitmq.ctl(
            "eval",
            f"application:set_env(rabbit, max_message_size, {size}), persistent_term:put(max_message_size, {size}).",
        )

    limit(1000)

    async def main() -> None:
        async with connected(own_rabbitmq.url) as client:
            sink, _ = await client.subscribe("limited")
            batch = [client.message("limited", b"x" * size) for size in (10, 2_000, 20)]
            await within(client.adapter.publish(batch))
            assert await outcomes(batch) == ["", "PublishRefusedError", ""]
            assert "406 PRECONDITION_FAILED - message size 2000" in str(batch[1].error)
            await until(lambda: {10, 20} <= {len(payload) for payload in sink.payloads}, "the others")
            assert client.losses == []

    try:
        run(main())
    finally:
        limit(134_217_728)


async def test_without_the_right_to_write_each_message_is_refused(rabbitmq: RabbitMQ) -> None:
    rabbitmq.ctl("add_user", "reader", "reader")
    rabbitmq.ctl("set_permissions", "reader", ".*", "^allowed$", ".*")
    url = f"amqp://reader:reader@{rabbitmq.host}:{rabbitmq.port}"
    async with connected(url) as client:
        batch = [client.message(channel, key="k") for channel in ("amq.topic", "allowed", "amq.topic", "allowed")]
        await within(client.adapter.publish(batch))
        assert await outcomes(batch) == ["PublishRefusedError", "", "PublishRefusedError", ""]
        assert "403 ACCESS_REFUSED" in str(batch[0].error)
        assert client.losses == []


#: of messages to a queue of another program
REFUSING = {"queueOverflow": "reject-publish"}


# --- effects of the extensions


# --- a broker that takes nothing for a while


async def test_a_broker_out_of_memory_holds_publishers_back_but_not_consumers(own_rabbitmq: RabbitMQ) -> None:
    async with connected(own_rabbitmq.url) as client:
        told = client.events.impairments
        sink, _ = await client.subscribe("alarm", queue=unique("alarm"), prefetch=1)
        await client.publish("alarm", b"1", b"2")
        await sink.count(1)
        await asyncio.to_thread(own_rabbitmq.ctl, "set_vm_memory_high_watermark", "0")
        try:
            await blocked(client)
            [reason] = told
            assert isinstance(reason, BrokerError)
            assert reason.detail == "low on memory"
            assert "takes no messages for now: low on memory" in str(reason)
            late = [client.message("alarm", b"4"), client.message("alarm", b"5")]
            publishing = asyncio.create_task(client.adapter.publish(late))
            # consuming goes on meanwhile
            client.acknowledge(sink.arrived[0])
            await sink.count(2)
            assert not publishing.done()
            assert not any(message.was_sent for message in late)
            # a deadline of the core's passes: this one must not be sent any more
            late[0].fail(ConnectionLostError("its deadline passed"))
        finally:
            await asyncio.to_thread(own_rabbitmq.ctl, "set_vm_memory_high_watermark", "0.8")
        await within(publishing)
        assert told == [reason, None]
        await late[1].result()
        client.acknowledge(*sink.arrived[-1:])
        await sink.count(3)
        assert sink.payloads == [b"1", b"2", b"5"]


def test_closing_waits_for_a_slow_broker_to_read_unconfirmed_messages(own_rabbitmq: RabbitMQ) -> None:
    """The transport must not be cut over messages whose promises resolved."""
    count = 500
    with (
        messaging.connect(own_rabbitmq.url) as receiver,
        receiver.subscribe("slow/broker", queue="slow-broker") as stream,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        stream.ready.result(10)
        m = messaging.connect(own_rabbitmq.url)
        m.publish("slow/broker", b"0", qos=0).result(10)
        os.kill(own_rabbitmq.pid, signal.SIGSTOP)
        try:
            for number in range(1, count):
                m.publish("slow/broker", b"%d" % number, qos=0).result(10)
            closing = pool.submit(m.close)
            # longer than a broker is given that confirmed everything
            assert concurrent.futures.wait([closing], timeout=2 * CLOSE_GRACE)[1]
        finally:
            os.kill(own_rabbitmq.pid, signal.SIGCONT)
        closing.result(10)
        assert [int(stream.receive(10).payload) for _ in range(count)] == list(range(count))

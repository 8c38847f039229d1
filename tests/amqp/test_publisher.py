"""Publishing to a real broker: confirms, order, bounds, refusals, and what other clients see of it."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from messaging.errors import PublishRefusedError
from messaging.testing.waiting import PATIENCE, eventually, eventually_async, results, subscribed, within
from messaging_adapters.amqp.connection import CLOSE_GRACE
from tests.amqp.harness import Client, Out, connected, settled, unique

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingChannel
    from pika.spec import Basic

    from messaging.testing.brokers import RabbitMQ
    from tests.amqp.conftest import Connect


def listen(foreign: BlockingChannel, key: str, exchange: str = "amq.topic") -> str:
    """A queue of another client, bound to ``key``."""
    queue = str(foreign.queue_declare("", exclusive=True).method.queue)
    foreign.queue_bind(queue, exchange, key)
    return queue


def receive(foreign: BlockingChannel, queue: str) -> tuple[Basic.GetOk, BasicProperties, bytes]:
    """The next message of a queue."""

    def get() -> Any:
        found = foreign.basic_get(queue, auto_ack=True)
        return found if found[0] is not None else None

    return eventually(get, "a message")  # type: ignore[no-any-return]


async def outcomes(messages: list[Out]) -> list[str]:
    """How each ended: "" or the name of its error."""
    await settled(*(message.done for message in messages))
    return ["" if message.error is None else type(message.error).__name__ for message in messages]


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


# --- exchanges


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
    # messages without confirm at the close of the channel may have been sent twice, but none is missing
    wanted = {b"%d" % number for number in range(100)} - {b"20", b"21", b"60"}
    await eventually_async(lambda: wanted <= set(sink.payloads), "all the others")
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
    await eventually_async(lambda: "404 NOT_FOUND" in caplog.text, "the warning")
    await client.publish("survives", b"x", extensions=qos)
    await sink.count(1)
    assert client.losses == []


def test_closing_waits_for_a_slow_broker_to_read_unconfirmed_messages(own_rabbitmq: RabbitMQ, connect: Connect) -> None:
    """The transport must not be cut over messages whose promises resolved."""
    count = 500
    received = subscribed(connect(own_rabbitmq.url), "slow/broker", queue="slow-broker")
    m = connect(own_rabbitmq.url)
    m.publish("slow/broker", b"0", qos=0).result(PATIENCE)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        os.kill(own_rabbitmq.pid, signal.SIGSTOP)
        try:
            results(m.publish("slow/broker", b"%d" % number, qos=0) for number in range(1, count))
            closing = pool.submit(m.close)
            # longer than a broker is given that confirmed everything
            assert concurrent.futures.wait([closing], timeout=1.5 * CLOSE_GRACE)[1]
        finally:
            os.kill(own_rabbitmq.pid, signal.SIGCONT)
        closing.result(PATIENCE)
    assert [int(message.payload) for message in received.wait_for(count)] == list(range(count))

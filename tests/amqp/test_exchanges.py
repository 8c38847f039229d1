"""Exchanges of every type at a real broker: made, found, bound, published to."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from messaging.errors import ConnectionLostError, PublishRefusedError, SubscriptionRefusedError
from messaging.testing.tables import table
from messaging.testing.waiting import within
from tests.amqp.harness import Client, connected, unique
from tests.amqp.test_consumer import exists
from tests.amqp.test_publisher import outcomes

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel

    from messaging.testing.brokers import RabbitMQ


async def test_the_default_exchange_delivers_to_a_queue_by_its_name(
    rabbitmq: RabbitMQ, foreign: BlockingChannel
) -> None:
    queue = unique("by/name".replace("/", "-"))
    async with connected(rabbitmq.url) as client:
        sink, _ = await client.subscribe("amq.default", key=queue, queue=queue)
        await client.publish("amq.default", b"1", key=queue)
        foreign.basic_publish("", queue, b"2")
        await sink.count(2)
        assert [(each.channel, each.channel_extension) for each in sink.arrived] == [("amq.default", queue)] * 2
    foreign.queue_delete(queue)


async def test_a_direct_exchange_is_made_and_takes_keys_as_they_are(
    client: Client, foreign: BlockingChannel, exchange: str
) -> None:
    sink, _ = await client.subscribe(exchange, key="a.*", exchangeType="direct", bindings=["b/c"])
    for key in ("a.*", "a.b", "b/c", "#"):
        await client.publish(exchange, key.encode(), key=key)
    await sink.count(2)
    assert sink.payloads == [b"a.*", b"b/c"]
    assert [each.channel_extension for each in sink.arrived] == ["a.*", "b/c"]
    foreign.exchange_declare(exchange, "direct", durable=True)  # the same again, or it would be refused


async def test_a_fanout_exchange_reaches_all_queues_with_any_key(client: Client, exchange: str) -> None:
    sinks = [(await client.subscribe(exchange, key=key, exchangeType="fanout"))[0] for key in ("x", "")]
    await client.publish(exchange, b"1", key="anything")
    await client.publish(exchange, b"2", key="")
    for sink in sinks:
        await sink.count(2)
        assert sink.payloads == [b"1", b"2"]


@table(
    "match, wanted",
    [
        ({"x-match": "all", "colour": "red", "size": "9"}, [b"both"]),
        ({"colour": "red", "size": "9"}, [b"both"]),
        ({"x-match": "any", "colour": "red", "size": "9"}, [b"both", b"colour", b"size"]),
    ],
)
async def test_a_headers_exchange_matches_user_headers(
    client: Client, exchange: str, match: dict[str, Any], wanted: list[bytes]
) -> None:
    sink, _ = await client.subscribe(exchange, key="", exchangeType="headers", bindingArguments=match)
    for payload, headers in (
        (b"none", {"colour": "blue"}),
        (b"both", {"colour": "red", "size": "9", "more": "x"}),
        (b"colour", {"colour": "red"}),
        (b"size", {"size": "9", "colour": "green"}),
    ):
        await client.publish(exchange, payload, key="", extensions={"headers": headers})
    await client.publish(exchange, b"end", key="", extensions={"headers": {"colour": "red", "size": "9"}})
    await sink.count(len(wanted) + 1)
    assert sink.payloads == [*wanted, b"end"]


@table(
    "value",
    [5, -1, 2**40, True, False, 0.1, b"\xff", "5", None, datetime(2026, 11, 22, tzinfo=UTC), ("a", ("b", 1))],
    ids=repr,
)
async def test_a_header_matches_a_binding_by_its_value_and_type(rabbitmq: RabbitMQ, client: Client, value: Any) -> None:
    if isinstance(value, datetime) and rabbitmq.version >= (4, 3):
        pytest.skip("this RabbitMQ matches no times")
    others: list[Any] = [6, "five", 0.25, b"\xfe", datetime(2025, 1, 1, tzinfo=UTC)]
    sink, _ = await client.subscribe("amq.headers", key="", bindingArguments={"n": value})
    for number, each in enumerate([*others, value]):
        if value is not None or number == len(others):  # no value in a binding stands for any
            await client.publish("amq.headers", b"%d" % number, key="", extensions={"headers": {"n": each}})
    [arrived] = await sink.count(1)
    assert (arrived.payload, arrived.extensions["headers"]) == (b"%d" % len(others), {"n": value})
    assert type(arrived.extensions["headers"]["n"]) is type(value)


async def test_further_patterns_of_a_channel_are_subscribed_to_as_well(client: Client) -> None:
    sink, _ = await client.subscribe("first/+", bindings=["second/#", "first/x", "+/third"])
    for name in ("first/x", "second", "second/a/b", "other", "a/third", "$SYS/third", "first/x"):
        await client.publish(name, name.encode())
    await sink.count(5)
    assert sink.payloads == [b"first/x", b"second", b"second/a/b", b"a/third", b"first/x"]
    assert [each.channel for each in sink.arrived] == [payload.decode() for payload in sink.payloads]


async def test_an_exchange_is_declared_with_further_arguments(client: Client, foreign: BlockingChannel) -> None:
    exchange, alternate = unique("main"), unique("alternate")
    arguments = {"x-own": {"list": [1, "two"]}, "x-flag": False}
    await client.subscribe(exchange, key="k", exchangeArguments=arguments, alternateExchange=alternate)
    # the same again, or it would be refused
    foreign.exchange_declare(exchange, "topic", durable=True, arguments={"alternate-exchange": alternate} | arguments)


async def test_unroutable_messages_go_to_the_alternate_exchange(rabbitmq: RabbitMQ, foreign: BlockingChannel) -> None:
    exchange, alternate = unique("main"), unique("alternate")
    async with connected(rabbitmq.url) as client:
        lost, _ = await client.subscribe(alternate, key="", exchangeType="fanout", exchangeInternal=True)
        wanted, _ = await client.subscribe(exchange, key="known", alternateExchange=alternate)
        for key in ("known", "unknown"):
            await client.publish(exchange, key.encode(), key=key)
        await wanted.count(1)
        await lost.count(1)
        assert (wanted.payloads, lost.payloads) == ([b"known"], [b"unknown"])
        assert (lost.arrived[0].channel, lost.arrived[0].channel_extension) == (exchange, "unknown")
        foreign.exchange_declare(alternate, "fanout", durable=True, internal=True)
        # only other exchanges publish to an internal one
        message = client.message(alternate, key="k")
        await within(client.adapter.publish([message]))
        with pytest.raises(PublishRefusedError, match="403 ACCESS_REFUSED") as caught:
            await message.result()
        assert caught.value.code == 403
        assert "internal exchange" in (caught.value.detail or "")
    for name in (exchange, alternate):
        foreign.exchange_delete(name)


async def test_messages_by_way_of_another_exchange_are_not_filtered(client: Client, foreign: BlockingChannel) -> None:
    exchange = unique("behind")
    foreign.exchange_declare(exchange, "fanout", auto_delete=True)
    foreign.exchange_bind(exchange, "amq.topic", "forwarded.#")
    sink, _ = await client.subscribe(exchange, key="")
    await client.publish("forwarded/a", b"x")
    [arrived] = await sink.count(1)
    assert (arrived.channel, arrived.payload) == ("forwarded/a", b"x")


async def test_exchanges_are_made_transient_and_for_as_long_as_they_are_bound(
    client: Client, foreign: BlockingChannel
) -> None:
    exchange = unique("passing")
    _, handle = await client.subscribe(exchange, key="k", exchangeDurable=False, exchangeAutoDelete=True)
    foreign.exchange_declare(exchange, "topic", auto_delete=True)  # the same again, or it would be refused
    await client.publish(exchange, b"x", key="k")
    await client.adapter.unsubscribe(handle)
    # the publisher believes that it still exists, and declares it again
    await client.publish(exchange, b"x", key="k", extensions={"exchangeAutoDelete": True})
    foreign.exchange_declare(exchange, "topic", durable=True, auto_delete=True)
    _, handle = await client.subscribe(exchange, key="k")
    await client.adapter.unsubscribe(handle)


async def test_an_existing_exchange_is_used_as_it_is(client: Client, foreign: BlockingChannel) -> None:
    exchange = unique("existing")
    foreign.exchange_declare(exchange, "direct", auto_delete=True)
    sink, _ = await client.subscribe(exchange, key="a", exchangeType="fanout")
    await client.publish(exchange, b"other", key="b", extensions={"exchangeType": "headers"})
    await client.publish(exchange, b"x", key="a")
    await sink.count(1)
    assert sink.payloads == [b"x"]


async def test_a_type_the_broker_does_not_know_is_refused_though_it_costs_the_connection(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    """Sent again on the next connection it would cost that one as well, and so on for ever."""
    exchange = unique("odd")
    code = 503 if rabbitmq.version < (4, 3) else 406  # which closes the channel alone
    message = client.message(exchange, key="k", extensions={"exchangeType": "x-unheard-of"})
    await within(client.adapter.publish([message]))
    with pytest.raises(PublishRefusedError, match=f"{code} [A-Z_]* - unknown exchange type") as caught:
        await message.result()
    assert (caught.value.code, message.settlements) == (code, 1)
    if code == 503:
        lost = await client.lost()
        assert isinstance(lost, ConnectionLostError)
        assert lost.code == code
        await client.open()
    with pytest.raises(SubscriptionRefusedError, match="unknown exchange type 'x-unheard-of'") as refused:
        await client.subscribe(exchange, key="k", exchangeType="x-unheard-of")
    assert refused.value.code == code


@table("declare", ["passive", "none"])
async def test_without_declaring_a_missing_exchange_is_refused(
    client: Client, rabbitmq: RabbitMQ, declare: str
) -> None:
    exchange = unique("missing")
    sink, _ = await client.subscribe("sibling")
    batch = [client.message(exchange, key="k", extensions={"declare": declare}), client.message("sibling", b"x")]
    await within(client.adapter.publish(batch))
    assert await outcomes(batch) == ["PublishRefusedError", ""]
    error = batch[0].error
    assert isinstance(error, PublishRefusedError)
    assert (error.code, error.detail) == (
        404,
        f"NOT_FOUND - no exchange '{exchange}' in vhost '{rabbitmq.virtual_host}'",
    )
    await sink.count(1)
    assert client.losses == []


async def test_a_refusal_that_the_broker_cuts_off_within_a_character_costs_no_connection(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    if rabbitmq.version >= (4, 3):
        pytest.skip("this RabbitMQ ends the connection itself (541 INTERNAL_ERROR)")
    message = client.message("x" + "ü" * 120, key="k", extensions={"declare": "passive"})
    await within(client.adapter.publish([message]))
    with pytest.raises(PublishRefusedError, match="404 NOT_FOUND - no exchange 'xüüü"):
        await message.result()
    assert client.losses == []


async def test_declare_none_asks_nothing(rabbitmq: RabbitMQ, foreign: BlockingChannel) -> None:
    """A user without the right to ask may still publish and consume."""
    queue, exchange = unique("given"), unique("given")
    foreign.exchange_declare(exchange, "fanout", auto_delete=True)
    foreign.queue_declare(queue)
    foreign.queue_bind(queue, exchange)
    sibling = unique("missing")
    async with connected(rabbitmq.url) as client:
        sink, _ = await client.subscribe(exchange, key="", queue=queue, declare="none")
        await client.publish(exchange, b"x", key="k", extensions={"declare": "none"})
        [arrived] = await sink.count(1)
        assert (arrived.channel, arrived.channel_extension) == (exchange, "k")
        with pytest.raises(SubscriptionRefusedError) as caught:
            await client.subscribe("a", queue=sibling, declare="none")
        assert caught.value.code == 404
        await client.publish(exchange, b"y", key="k", extensions={"declare": "none"})
        await sink.count(2)
        assert not exists(foreign, sibling)
        assert client.losses == []
    foreign.queue_delete(queue)

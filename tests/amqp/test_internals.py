"""The adaptations to the AMQP library and their plain fallbacks: the same cases through both."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING

import aio_pika
import pytest

from messaging.errors import ConnectionLostError, SubscriptionRefusedError
from messaging.testing.tables import table
from messaging_adapters.amqp import connection, internals
from tests.amqp.harness import BrokerProxy, Client, connected, unique

if TYPE_CHECKING:
    from messaging.testing.brokers import RabbitMQ


@pytest.fixture(params=[True, False], ids=["adapted", "plain"])
def is_adapted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(internals, "ENABLED", request.param)
    return bool(request.param)


def test_the_adaptations_are_tested_with_the_installed_libraries() -> None:
    assert internals.untested() == []
    assert internals.ENABLED


def test_other_versions_are_named_and_turn_the_adaptations_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        internals, "version", lambda name: "7.3.1" if name == "aiormq" else internals.TESTED[name] + "0"
    )
    assert internals.untested() == ["aiormq 7.3.1"]


async def test_messages_and_declarations_pass(client: Client, queue: str, exchange: str, is_adapted: bool) -> None:
    given = {"exchangeType": "headers", "bindingArguments": {"x-match": "any", "n": 5}}
    sink, handle = await client.subscribe(exchange, key="", queue=queue, autoDelete=True, **given)
    headers = {"headers": {"n": 5}, "exchangeType": "headers"}
    await client.publish(exchange, b"1", b"2", key="", extensions=headers)
    client.acknowledge(*await sink.count(2))
    own, _ = await client.subscribe("both/ways")
    await client.publish("both/ways", b"3")
    assert (await own.next()).payload == b"3"
    with pytest.raises(SubscriptionRefusedError, match="404 NOT_FOUND"):
        await client.subscribe("both/ways", queue=unique("missing"), declare="passive")
    await client.adapter.unsubscribe(handle)
    assert client.losses == []


async def test_a_loss_is_reported_and_only_the_adaptation_keeps_aiormq_quiet(
    proxy: BrokerProxy, is_adapted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(proxy.url) as client:
        await client.subscribe("lost")
        proxy.sever()
        assert isinstance(await client.lost(), ConnectionLostError)
        await client.open()
        await client.publish("lost", b"x")
    said = [record for record in caplog.records if record.name.startswith(("aiormq", "aio_pika"))]
    assert not is_adapted or not said, said


@table("name", ["ü?*", "x" * 200])
async def test_a_name_that_pamqp_refuses_is_used_or_refused_with_the_reason(
    client: Client, is_adapted: bool, name: str
) -> None:
    given = {"queue": unique("odd ü"), "autoDelete": True, "exchangeAutoDelete": True}
    if is_adapted:
        sink, _ = await client.subscribe(name, key="k", **given)
        await client.publish(name, b"x", key="k", extensions={"exchangeAutoDelete": True})
        await sink.count(1)
    else:
        with pytest.raises(SubscriptionRefusedError, match="502 the AMQP library does not send it"):
            await client.subscribe(name, key="k", **given)
    assert client.losses == []


async def test_a_busy_connection_is_not_taken_for_silent(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that sends messages sends no heartbeats, and aiormq, which sees no messages, gives up after 6 s."""
    monkeypatch.setattr(connection, "SILENT_HEARTBEATS", 1)  # silence of 1 s is a loss
    caplog.set_level(logging.WARNING)
    async with connected(rabbitmq.url, heartbeat=1) as client:
        sink, _ = await client.subscribe("busy", qos="0")
        for number in range(1, 141):
            await client.publish("busy", b"x")
            await sink.count(number)
            await asyncio.sleep(0.05)  # sleeps: the broker's heartbeats are in real time
        assert client.losses == []
    assert "stuck" not in caplog.text


async def test_channels_leave_nothing_behind_in_an_open_connection(client: Client) -> None:
    """aio-pika registers callbacks at the connection for each channel, which it cannot remove by itself."""

    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, (asyncio.Future, aio_pika.tools.OneShotCallback)) for each in gc.get_objects())

    async def subscribe() -> None:
        _, handle = await client.subscribe("left/behind")
        await client.adapter.unsubscribe(handle)

    await subscribe()
    before = alive()
    for _ in range(30):
        await subscribe()
    assert alive() - before < 30

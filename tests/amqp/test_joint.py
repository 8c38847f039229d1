"""Joint subscriptions at a real broker: one queue, no leaks, refusals of single bindings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from messaging.errors import SubscriptionRefusedError
from messaging.model import SubscriptionSpec
from messaging.model.extensions import subscribe_options
from messaging.testing.waiting import eventually_async, within
from tests.amqp.harness import Client, Sink, connected, unique
from tests.amqp.test_consumer import exists

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel

    from messaging.testing.brokers import RabbitMQ
    from messaging_adapters.amqp.consumer import QueueConsumer


def spec_of(client: Client, channel: str, **extensions: Any) -> SubscriptionSpec:
    adapter = client.adapter
    return SubscriptionSpec(channel, None, subscribe_options(extensions, adapter.capabilities, adapter.settings))


async def joined(client: Client, *channels: str, **extensions: Any) -> tuple[Sink, QueueConsumer]:
    sink, handle = Sink(), None
    for channel in channels:
        handle = await within(client.adapter.join(spec_of(client, channel, **extensions), sink, handle))
    assert handle is not None
    return sink, handle


async def listed(broker: RabbitMQ, what: str, *columns: str) -> list[str]:
    return (await asyncio.to_thread(broker.ctl, what, *columns)).splitlines()


async def consumers_of_channels(broker: RabbitMQ) -> list[str]:
    """Return the number of consumers of each channel; the command lists those of all virtual hosts."""
    lines = (line.split("\t") for line in await listed(broker, "list_channels", "vhost", "consumer_count"))
    return sorted(count for virtual_host, count in lines if virtual_host == broker.virtual_host)


async def test_there_is_one_exclusive_queue_and_one_channel_and_nothing_is_left(
    rabbitmq: RabbitMQ, foreign: BlockingChannel
) -> None:
    base = unique("joint")
    async with connected(rabbitmq.url) as client:
        _, handle = await joined(client, *(f"{base}/{number}" for number in range(50)))
        channels = await consumers_of_channels(rabbitmq)
        assert channels.count("1") == 1
        await asyncio.gather(*(handle.join(f"{base}/more/{n}", f"{base}.more.{n}") for n in range(50)))
        bindings, queues, after = await asyncio.gather(
            listed(rabbitmq, "list_bindings", "destination_name", "routing_key"),
            listed(rabbitmq, "list_queues", "name", "exclusive"),
            consumers_of_channels(rabbitmq),
        )
        bound = [queue for queue, key in (each.split("\t") for each in bindings[1:]) if key.startswith(base)]
        assert len(bound) == 100
        [queue] = set(bound)
        assert f"{queue}\ttrue" in queues
        assert after == channels  # those that asked for the bindings are closed
        await within(client.adapter.part(handle, f"{base}/0"))
        await within(client.adapter.part(handle, f"{base}/0"))
        await within(client.adapter.unsubscribe(handle))
        await within(client.adapter.unsubscribe(handle))
        assert not exists(foreign, queue)


async def test_a_refused_binding_ends_no_other_channel(rabbitmq: RabbitMQ) -> None:
    """A topic permission refuses it, which closes the AMQP channel that asked."""
    user, base = unique("joint"), unique("allowed")
    calls = (
        '{0}:add_user(<<"{1}">>, <<"password">>, <<"t">>), '
        '{0}:set_permissions(<<"{1}">>, <<"{2}">>, <<".*">>, <<".*">>, <<".*">>, <<"t">>), '
        '{0}:set_topic_permissions(<<"{1}">>, <<"{2}">>, <<"amq.topic">>, <<".*">>, <<"^allowed.*">>, <<"t">>).'
    )
    await asyncio.to_thread(
        rabbitmq.ctl, "eval", calls.format("rabbit_auth_backend_internal", user, rabbitmq.virtual_host)
    )
    try:
        async with connected(rabbitmq.url.replace("guest:guest", f"{user}:password")) as client:
            sink, handle = await joined(client, base)
            joining = [
                client.adapter.join(spec_of(client, f"{kind}/{n}"), sink, handle)
                for n in range(5)
                for kind in (base, "refused")
            ]
            outcomes = await within(asyncio.gather(*joining, return_exceptions=True))
            assert outcomes[::2] == [handle] * 5
            for outcome in outcomes[1::2]:
                assert isinstance(outcome, SubscriptionRefusedError)
                assert outcome.code == 403
            await client.publish(f"{base}/4", b"1")
            await client.publish(base, b"2")
            await sink.count(2)
            assert [each.payload for each in sink.arrived] == [b"1", b"2"]
            assert sink.failures == 0
            with pytest.raises(SubscriptionRefusedError):
                await joined(client, "refused")
        assert client.losses == []
    finally:
        await asyncio.to_thread(rabbitmq.ctl, "delete_user", user)


async def test_a_deleted_queue_ends_all_channels(client: Client, foreign: BlockingChannel, queue: str) -> None:
    sink, handle = await joined(client, unique("a"), unique("b"), queue=queue)
    await asyncio.to_thread(foreign.queue_delete, queue)
    await eventually_async(lambda: sink.failures, "the end")
    assert isinstance(sink.error, SubscriptionRefusedError)
    with pytest.raises(SubscriptionRefusedError):
        await within(client.adapter.join(spec_of(client, unique("c"), queue=queue), sink, handle))
    await within(client.adapter.part(handle, unique("a")))
    await within(client.adapter.unsubscribe(handle))
    assert client.losses == []

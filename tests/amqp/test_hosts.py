"""Several hosts: a node that closes its connections, stops accepting messages, or is the home of a queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pamqp import commands
from pamqp.commands import Basic

import messaging
from messaging.errors import ConnectFailedError, ConnectionLostError, SubscriptionRefusedError
from messaging.model import Endpoint, Host
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually_async, within
from tests.amqp.harness import Client, Sink, connected, make_adapter
from tests.amqp.peer import Peer, Session, client_of, consuming, opened
from tests.certificates import TlsRabbitMQ

ABSENT = "NOT_FOUND - home node 'rabbit@b' of durable queue 'q' in vhost '/' is down or inaccessible"
#: longer than any test waits
NEVER = 3 * PATIENCE


@contextlib.asynccontextmanager
async def instance(*peers: Peer, **settings: Any) -> AsyncIterator[messaging.Messaging]:
    """An instance that is connecting to the first of ``peers``."""
    hosts = ",".join(f"127.0.0.1:{peer.port}" for peer in peers)
    settings = {"reconnect_min": NEVER, "reconnect_max": NEVER, "close_timeout": 0.1, **settings}
    m = messaging.connect(f"amqp://guest:guest@{hosts}", services=ServiceRegistry(), **settings)
    try:
        async with asyncio.timeout(2 * PATIENCE):
            yield m
    finally:
        for peer in peers:
            for connection in peer.connections:
                connection.abort()
        await m.aclose()


async def connected_at(m: messaging.Messaging, peer: Peer) -> None:
    await eventually_async(
        lambda: m.connection_state.value.is_up and m.connection_state.value.host == f"127.0.0.1:{peer.port}",
        "connected to the other host",
    )


async def takes_over(peer: Peer, m: messaging.Messaging) -> None:
    """Accept the instance, and the message that waits."""
    session = await (await peer.session()).open()
    await connected_at(m, peer)
    channel = await session.published(1)
    session.send(Basic.Ack(1), channel)


async def test_a_node_that_closes_its_connections_is_left_for_the_next_at_once(peer: Peer) -> None:
    async with Peer() as other, instance(peer, other) as m:
        session = await (await peer.session()).open()
        await m
        promise = m.publish("c", b"x")
        await session.published(1)
        session.close_reason(320, "CONNECTION_FORCED - Node was put into maintenance mode")
        await takes_over(other, m)
        await promise


async def test_a_node_that_refuses_connections_is_left_for_the_next_at_once(peer: Peer) -> None:
    async with Peer() as other, instance(peer, other) as m:
        session = await peer.session()
        await session.greet()
        session.close_reason(530, "NOT_ALLOWED - connection to vhost '/' refused: limit is reached")
        await (await other.session()).open()
        await m
        await connected_at(m, other)


async def test_a_node_that_takes_no_messages_for_too_long_is_left(peer: Peer) -> None:
    async with Peer() as other, instance(peer, other, blocked_timeout=0.3) as m:
        session = await (await peer.session()).open()
        await m
        states: Recorder[Any] = Recorder()
        m.connection_state.subscribe(states)
        session.send(commands.Connection.Blocked("low on memory"))
        await eventually_async(lambda: "degraded" in [state.name for state in states])
        promise = m.publish("c", b"x")
        await takes_over(other, m)
        await promise


@table("blocked_timeout", [None, 1.0])
async def test_a_node_that_takes_messages_again_in_time_is_kept(peer: Peer, blocked_timeout: float | None) -> None:
    async with client_of(peer, blocked_timeout=blocked_timeout) as client:
        session = await opened(client, peer)
        session.send(commands.Connection.Blocked("low on memory"))
        await eventually_async(lambda: client.events.impairments)
        if blocked_timeout is not None:
            session.send(commands.Connection.Unblocked())
            await eventually_async(lambda: client.events.impairments[-1] is None)
        await asyncio.sleep(1.2 * (blocked_timeout or 0.1))  # sleeps: no event ends this wait
        assert client.losses == []


# --- queues whose node is down


async def cancelled(client: Client, peer: Peer) -> tuple[Sink, Session, int]:
    """Cancel the consumer of a queue, and wait for the question whether the queue exists; its channel."""
    await opened(client, peer)
    sink, session, channel = await consuming(client, peer, queue="q")
    session.send(Basic.Cancel("tag"), channel)
    channel, frame = await asked_for(session)
    assert frame.passive
    return sink, session, channel


async def asked_for(session: Session) -> tuple[int, commands.Queue.Declare]:
    """The next declaration of a queue, on a channel of its own."""
    channel, _ = await session.expect(commands.Channel.Open)
    session.send(commands.Channel.OpenOk(), channel)
    channel, frame = await session.expect(commands.Queue.Declare)
    assert isinstance(frame, commands.Queue.Declare)
    return channel, frame


async def waiting(client: Client, peer: Peer, attempts: int) -> tuple[asyncio.Task[Any], Session]:
    """Have the client subscribe to a queue whose node is down, until so many declarations were refused."""
    await opened(client, peer)
    subscribing = asyncio.create_task(client.subscribe("c", queue="q"))
    session = await (await peer.session()).open()
    for _ in range(attempts):
        channel, _ = await asked_for(session)
        session.send(commands.Channel.Close(404, ABSENT, 50, 10), channel)
        await session.expect(commands.Channel.CloseOk)
    return subscribing, session


@table("answer", ["there", "absent"])
async def test_a_consumer_that_is_cancelled_though_its_queue_exists_is_subscribed_again(
    peer: Peer, answer: str
) -> None:
    """By the next connection: the loss is reported, and the sink has not failed."""
    async with client_of(peer) as client:
        sink, session, channel = await cancelled(client, peer)
        if answer == "there":
            session.send(commands.Queue.DeclareOk("q", 0, 0), channel)
            await session.expect(commands.Channel.Close)
            session.send(commands.Channel.CloseOk(), channel)
        else:
            session.send(commands.Channel.Close(404, ABSENT, 50, 10), channel)
        assert "which exists" in str(await client.lost())
        assert sink.failures == 0


async def test_a_consumer_that_is_cancelled_with_its_queue_has_ended(peer: Peer) -> None:
    async with client_of(peer) as client:
        sink, session, channel = await cancelled(client, peer)
        session.send(commands.Channel.Close(404, "NOT_FOUND - no queue 'q' in vhost '/'", 50, 10), channel)
        await eventually_async(lambda: sink.failures, "the end")
        assert isinstance(sink.error, SubscriptionRefusedError)
        assert client.losses == []


async def test_a_subscription_waits_for_a_queue_whose_node_is_down(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(peer) as client:
        subscribing, session = await waiting(client, peer, 4)  # asked for and declared, twice
        await session.consumer()
        await within(subscribing)
        assert client.losses == []
    assert caplog.text.count("the queue cannot be used for now") == 1


async def test_a_subscription_that_waits_for_its_queue_can_be_cancelled(peer: Peer) -> None:
    async with client_of(peer) as client:
        subscribing, _ = await waiting(client, peer, 2)
        subscribing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await subscribing


async def test_an_address_is_connected_to_and_the_name_is_verified(own_rabbitmq: TlsRabbitMQ) -> None:
    """The certificate is for 127.0.0.1, not for the name of the host that has this address."""
    cafile = own_rabbitmq.authority.cafile
    async with connected(own_rabbitmq.tls_url, cafile=cafile) as client:
        assert client.losses == []
    client = Client(make_adapter(own_rabbitmq.tls_url, cafile=cafile))
    client.adapter.set_endpoint(Endpoint(Host("elsewhere.invalid", own_rabbitmq.tls_port), "127.0.0.1"))
    with pytest.raises(ConnectFailedError, match="certificate verify failed: Hostname mismatch") as caught:
        await within(client.open())
    assert f"elsewhere.invalid:{own_rabbitmq.tls_port} at 127.0.0.1" in str(caught.value)
    await client.adapter.close()


async def test_a_lost_connection_is_an_error_of_its_host() -> None:
    client = Client(make_adapter("amqp://a,b:1234"))
    client.adapter.set_endpoint(Endpoint(Host("b", 1234)))
    message = client.message("c")
    await client.adapter.publish([message])
    assert isinstance(message.error, ConnectionLostError)
    assert "b:1234" in str(message.error)

"""Half-open connections are noticed within twice ``keepalive``, slow ones are kept."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from messaging.errors import ConnectionLostError
from messaging.testing.waiting import PATIENCE
from messaging_adapters.mqtt import packets
from tests.mqtt.harness import Core
from tests.mqtt.peer import Connection, Peer, accept, session, subscribed

#: seconds
KEEPALIVE = 1
#: twice as long, and what a busy machine may add
SLACK = KEEPALIVE * 2 + PATIENCE / 4

Traffic = Callable[[Core, Connection], Awaitable[None]]


async def idle(core: Core, connection: Connection) -> None:
    """Nothing happens."""


async def publishing_a_little(core: Core, connection: Connection) -> None:
    """QoS 0, ten a second: something is always sent, and the socket takes it all."""
    while not core.losses:
        await core.send(core.out("t", b"x"))
        await asyncio.sleep(0.1)  # sleeps: ten a second


async def publishing_a_lot(core: Core, connection: Connection) -> None:
    """QoS 0, until neither the socket nor the adapter takes any more."""
    with contextlib.suppress(TimeoutError):
        while not core.losses:
            await core.send(core.out("t", bytes(65_536)))


async def publishing_unanswered(core: Core, connection: Connection) -> None:
    """QoS 1, and no answers."""
    while not core.losses:
        await core.send(core.out("t", b"x", qos="1"))
        await asyncio.sleep(0.1)  # sleeps: ten a second


async def test_a_silent_broker_is_lost_within_twice_the_keepalive() -> None:
    async def lose(traffic: Traffic) -> None:
        async with session(keepalive=KEEPALIVE) as (core, _, connection):
            connection.pause()
            start = time.monotonic()
            busy = asyncio.create_task(traffic(core, connection))
            error = await core.lost()
            assert KEEPALIVE * 0.5 < time.monotonic() - start < SLACK, traffic
            assert isinstance(error, ConnectionLostError)
            assert "no answer to a ping" in str(error)
            await busy

    await asyncio.gather(*map(lose, [idle, publishing_a_little, publishing_a_lot, publishing_unanswered]))


async def test_a_broker_that_goes_silent_while_it_sends_is_lost_within_twice_the_keepalive() -> None:
    async with session(keepalive=KEEPALIVE) as (core, _, connection):
        sink, _ = await subscribed(core, connection)
        for number in range(20):  # for longer than it may be silent
            connection.deliver("t", b"%d" % number)
            await asyncio.sleep(0.1)  # sleeps: ten a second
        await sink.count(20)
        assert not core.losses
        connection.write(bytes((packets.PUBLISH, 100)) + packets.text("t"))  # and nothing follows
        start = time.monotonic()
        await core.lost()
        assert time.monotonic() - start < SLACK


async def test_a_broker_that_sends_is_alive_even_if_its_answers_to_pings_are_late() -> None:
    async with session(keepalive=KEEPALIVE) as (core, _, connection):
        _, _ = await subscribed(core, connection)
        for _ in range(20):
            connection.deliver("t", b"")
            await asyncio.sleep(0.1)  # sleeps: ten a second
        assert not core.losses
        assert await connection.packet() == (packets.PINGREQ, b"")  # it was asked, and needed not answer


async def test_an_idle_connection_lives_on_pings() -> None:
    async with session(keepalive=KEEPALIVE) as (core, _, connection):
        start = time.monotonic()
        for _ in range(4):
            assert await connection.packet() == (packets.PINGREQ, b"")
            connection.send(packets.PINGRESP, b"")
        assert time.monotonic() - start > 4 * KEEPALIVE * 0.5  # no more often than needed
        assert not core.losses


async def test_without_keepalive_there_are_no_pings_and_silence_is_no_loss() -> None:
    async with session(keepalive=0) as (core, _, connection):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.2):
                await connection.packet()
        assert not core.losses


async def test_a_slow_upstream_with_a_large_backlog_is_not_taken_for_dead_while_it_makes_progress() -> None:
    """The ping stands behind megabytes: some in the adapter's buffer, most in the kernel's."""
    rate = 700_000  # bytes a second
    count, size = 16, 100_000

    async def publish(qos: str) -> None:
        async with Peer() as peer:
            # a small buffer on that side, so that delivered bytes are taken; accepted connections inherit it
            peer._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
            core = Core(peer.url, keepalive=KEEPALIVE)
            connection, _ = await accept(core, peer)
            outs = [core.out("t", bytes(size), qos=qos) for _ in range(count)]
            sending = asyncio.create_task(core.adapter.publish(outs))
            taken = 0
            while taken < count:
                head, body = await connection.packet()
                if head == packets.PINGREQ:
                    connection.send(packets.PINGRESP, b"")
                else:
                    await asyncio.sleep(len(body) / rate)  # sleeps: as slow as the line
                    taken += 1
            assert not core.losses, qos
            await sending
            connection.close()
            await core.lost()
            await core.adapter.close()

    await asyncio.gather(publish("0"), publish("1"))

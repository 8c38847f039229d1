"""Unsettled messages of a subscription that ends, on a broker that answers frame by frame."""

from __future__ import annotations

import asyncio

from pamqp.commands import Basic, Channel

import messaging
from tests.amqp.harness import within
from tests.amqp.peer import Peer
from tests.conformance.helpers import Failing, eventually


async def test_a_message_that_no_other_consumer_receives_is_not_requeued_and_counts_once() -> None:
    """A nameless queue would deliver it to the subscription that ends, which would count it again."""
    async with Peer() as peer:
        connecting = asyncio.create_task(asyncio.to_thread(messaging.connect, peer.url))
        await (await peer.session()).open()
        m = await within(connecting)
        stream = m.subscribe("c")
        stream.subscribe(Failing(b"1"))
        session = await (await peer.session()).open()
        channel = await session.consumer()
        session.send(Basic.Deliver("t", 1, False, "amq.topic", "c"), channel)
        session.content(channel, b"\0\0", b"1")
        await session.expect(Channel.Close)  # and no Basic.Nack before it
        session.send(Channel.CloseOk(), channel)
        await asyncio.to_thread(eventually, lambda: stream.counters.dropped, "counted")
        assert (stream.counters.dropped, stream.counters.rejected) == (1, 1)
    await asyncio.to_thread(m.close)

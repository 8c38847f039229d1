"""Joint subscriptions, packet by packet: order within one read, and who takes a message while channels change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messaging.errors import ConnectionLostError, SubscriptionRefusedError
from messaging.testing.tables import table
from messaging.testing.waiting import eventually_async
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.streams import JointOutlet
from tests.doubles.timers import LongTimers
from tests.mqtt.harness import Core, Sink, lasting
from tests.mqtt.peer import Connection, Peer, accept, farewell, reconnect, session, subscribed

#: Success, and Not authorized (MQTT 5, 3.9.3)
REFUSED = 0x87


def message(topic: str, payload: bytes, *identifiers: int, packet_id: int = 0, qos: int = 1) -> bytes:
    """A PUBLISH of version 5, of QoS 0 without a packet id, sent for the subscriptions with these identifiers."""
    properties = b"".join(b"\x0b" + packets.varint(each) for each in identifiers)
    body = packets.text(topic) + (packet_id.to_bytes(2, "big") if packet_id else b"")
    body += packets.varint(len(properties)) + properties + payload
    return bytes((packets.PUBLISH | (packet_id and qos) << 1,)) + packets.varint(len(body)) + body


def answer(kind: int, asked: bytes, reason: int = 0) -> bytes:
    """SUBACK or UNSUBACK to the packet with this body."""
    body = asked[:2] + b"\0" + bytes((reason,))
    return bytes((kind, len(body))) + body


async def joined(core: Core, connection: Connection, *channels: str, **options: Any) -> tuple[Sink, JointOutlet]:
    sink, joint = Sink(), None
    for channel in channels:
        joining = asyncio.create_task(core.adapter.join(core.spec(channel, **options), sink, joint))
        await connection.suback()
        joint = await joining
    assert joint is not None
    return sink, joint


async def parted(core: Core, connection: Connection, joint: JointOutlet, channel: str) -> None:
    parting = asyncio.create_task(core.adapter.part(joint, channel))
    await connection.unsuback()
    await parting


async def test_messages_of_one_read_keep_their_order_across_channels() -> None:
    async with session() as (core, _, connection):
        sink, _ = await joined(core, connection, "a", "b", "c")
        connection.write(b"".join(message("abc"[n % 3], b"%d" % n, n % 3 + 1) for n in range(30)))
        await sink.count(30)
        assert sink.payloads == [b"%d" % n for n in range(30)]
        assert len(sink.batches) == 1


@table("separate", [True, False])
async def test_the_taker_changes_with_the_answer_to_unsubscribe(separate: bool) -> None:
    """Everything in one read: packets before the answer are for the stream of before."""
    async with session() as (core, _, connection):
        sink, joint = await joined(core, connection, "a/#", "a/b")

        def copies(payload: bytes) -> bytes:
            if separate:
                return message("a/b", payload, 2) + message("a/b", payload, 1)
            return message("a/b", payload, 1, 2)

        connection.write(copies(b"1"))
        await sink.count(1)
        parting = asyncio.create_task(core.adapter.part(joint, "a/#"))
        asked = await connection.expect(0xA0)
        connection.write(copies(b"2") + answer(0xB0, asked) + message("a/b", b"3", 2) + message("a/b", b"4", 2))
        await parting
        await sink.count(4)
        assert sink.payloads == [b"1", b"2", b"3", b"4"]
        await core.adapter.part(joint, "a/#")  # without effect: it is not joined


async def test_what_the_broker_had_for_a_channel_that_was_parted_waits_for_the_next_join() -> None:
    async with session(client_id="me", clean_start=False, session_expiry=1000) as (core, _, connection):
        sink, joint = await joined(core, connection, "a", "b", qos="1", queue="q")
        await parted(core, connection, joint, "a")
        connection.deliver("a", b"late", 7, 1)
        connection.deliver("b", b"behind it", 8, 1)
        await sink.count(1)
        joining = asyncio.create_task(core.adapter.join(core.spec("a", qos="1", queue="q"), sink, joint))
        await connection.suback()  # no PUBACK before SUBSCRIBE
        await joining
        await sink.count(2)
        assert sink.payloads == [b"behind it", b"late"]
        core.acknowledge(*sink.arrived)
        assert {await connection.expect(packets.PUBACK) for _ in range(2)} == {b"\0\x07", b"\0\x08"}


async def test_a_refused_channel_takes_nothing_from_one_that_matches_too() -> None:
    """The broker refuses the wider pattern, which was asked for first, and sends a message right after the answers."""
    async with session() as (core, _, connection):
        sink, joint = await joined(core, connection, "z")
        first = asyncio.create_task(core.adapter.join(core.spec("a/#"), sink, joint))
        refused = await connection.expect(0x80)
        second = asyncio.create_task(core.adapter.join(core.spec("a/b"), sink, joint))
        granted = await connection.expect(0x80)
        connection.write(
            answer(0x90, granted) + message("a/b", b"1", 3) + answer(0x90, refused, REFUSED) + message("a/b", b"2", 3)
        )
        with pytest.raises(SubscriptionRefusedError):
            await first
        assert await second is joint
        await sink.count(2)
        assert sink.payloads == [b"1", b"2"]
        await connection.unsuback()  # of the refused one, in case it has taken effect


async def test_a_message_of_a_parted_channel_is_acknowledged_when_it_is_settled() -> None:
    async with session() as (core, _, connection):
        sink, joint = await joined(core, connection, "a", "b", qos=1)
        connection.write(message("a", b"1", 1, packet_id=7) + message("b", b"2", 2, packet_id=8))
        await sink.count(2)
        await parted(core, connection, joint, "a")
        assert not core.adapter.is_stale(sink.arrived[0].token)
        core.acknowledge(*sink.arrived, *sink.arrived)
        assert (await connection.expect(0x40))[:2] == b"\0\7"
        assert (await connection.expect(0x40))[:2] == b"\0\10"


async def test_the_copies_that_are_not_taken_are_acknowledged_at_once() -> None:
    async with session() as (core, _, connection):
        sink, _ = await joined(core, connection, "a/#", "a/b", qos=1)
        connection.write(message("a/b", b"1", 2, packet_id=7) + message("a/b", b"1", 1, packet_id=8))
        assert (await connection.expect(0x40))[:2] == b"\0\7"
        await sink.count(1)
        core.acknowledge(*sink.arrived)
        assert (await connection.expect(0x40))[:2] == b"\0\10"


async def test_closing_unsubscribes_from_every_channel_and_ends_the_tokens() -> None:
    async with session() as (core, _, connection):
        sink, joint = await joined(core, connection, "a", "b", "c", qos=1)
        connection.write(message("a", b"1", 1, packet_id=7) + message("b", b"2", 2, packet_id=8))
        await sink.count(2)
        await parted(core, connection, joint, "a")
        closing = asyncio.create_task(core.adapter.unsubscribe(joint))
        acknowledged = [(await connection.expect(0x40))[1] for _ in range(2)]  # there is no session to keep them
        for _ in range(2):
            await connection.unsuback()
        await closing
        assert sorted(acknowledged) == [7, 8]
        assert all(core.adapter.is_stale(each.token) for each in sink.arrived)
        await core.adapter.unsubscribe(joint)


async def test_a_part_that_a_loss_interrupts_is_repeated_in_the_resumed_session() -> None:
    async with session(**lasting("5")) as (core, peer, connection):
        sink, joint = await joined(core, connection, "a", "b", qos=1)
        parting = asyncio.create_task(core.adapter.part(joint, "a"))
        await connection.expect(0xA0)
        connection.close()
        with pytest.raises(ConnectionLostError):
            await parting
        await core.lost()
        with pytest.raises(ConnectionLostError):
            await core.adapter.part(joint, "a")
        opening = asyncio.create_task(core.open())
        connection, _ = await peer.accept()
        connection.connack(session=True)
        assert await opening
        await parted(core, connection, joint, "a")
        assert [*joint.streams] == ["b"]
        (stream,) = joint.streams.values()
        connection.write(message("b", b"1", stream.route.identifiers[-1], packet_id=7))
        await eventually_async(lambda: sink.arrived, "a message")


async def test_a_copy_that_comes_after_its_channel_was_parted_is_taken() -> None:
    """The broker sends a copy for each filter, and answers UNSUBSCRIBE between them: its queue is behind."""
    async with session() as (core, _, connection):
        sink, joint = await joined(core, connection, "a/b", "a/#", qos=1)
        parting = asyncio.create_task(core.adapter.part(joint, "a/b"))
        asked = await connection.expect(0xA0)
        connection.write(message("a/b", b"1", 2, packet_id=7))  # left to the other copy
        connection.write(answer(0xB0, asked) + message("a/b", b"1", 1, packet_id=8))
        await parting
        await sink.count(1)
        assert sink.payloads == [b"1"]


async def test_messages_of_abandoned_channels_are_handed_over_and_their_channels_unsubscribed_from() -> None:
    """The session has subscriptions of a process that was killed, and messages for them."""
    async with Peer() as peer:
        core = Core(peer.url, **lasting("5"))
        connection, _ = await accept(core, peer, present=True)
        connection.write(message("dead/1", b"1", packet_id=7) + message("other", b"2", packet_id=8))
        sink, joint = await joined(core, connection, "live", qos=1)
        assert sink.payloads == []
        core.adapter.abandon(joint, lambda channel: channel.startswith("dead/"))
        connection.write(message("dead/2", b"3", packet_id=9))
        await sink.count(2)
        assert sink.payloads == [b"1", b"3"]
        core.acknowledge(*sink.arrived)
        assert [(await connection.expect(0x40))[1] for _ in range(2)] == [7, 9]
        await core.adapter.part(joint, "dead/1")
        assert (await connection.unsuback())[3:] == packets.text("dead/1")
        late, _ = await subscribed(core, connection, "other", qos=1)  # claims what is its own
        assert late.payloads == [b"2"]
        await core.adapter.part(joint, "unknown")  # without effect
        await farewell(core, connection)


@table("where", ["unanswered", "offline"])
async def test_an_abandoned_channel_is_unsubscribed_from_again_if_the_broker_did_not_confirm_it(
    where: str, long_timers: LongTimers
) -> None:
    async with Peer() as peer:
        core = Core(peer.url, **lasting("5"))
        connection, _ = await accept(core, peer, present=True)
        _, joint = await joined(core, connection, "live", qos=1)
        core.adapter.abandon(joint, lambda channel: channel.startswith("dead/"))
        if where == "offline":
            connection.abort()
            await core.lost(1)
        await core.adapter.part(joint, "dead/1")
        await core.adapter.part(joint, "dead/2")
        if where == "unanswered":
            for channel in ("dead/1", "dead/2"):
                assert (await connection.expect(0xA0))[3:] == packets.text(channel)
            connection.abort()
            await core.lost(1)
        connection, _ = await accept(core, peer, present=True)
        await subscribed(core, connection, "dead/2", qos=1)  # has been taken over
        long_timers.elapse()
        assert (await connection.unsuback())[3:] == packets.text("dead/1")
        await farewell(core, connection)


def identifiers(*streams: Any) -> list[int]:
    return [each.route.identifiers[-1] for each in streams]


async def test_a_resumed_session_may_get_one_copy_for_overlapping_filters_or_one_for_each() -> None:
    """mosquitto sends one of what was published after its restart and before its client was back, else one for each."""
    async with session(**lasting("5")) as (core, peer, connection):
        wide, one = await subscribed(core, connection, "a/#", qos=1)
        narrow, two = await subscribed(core, connection, "a/b", qos=1)
        loose, three = await subscribed(core, connection, "a/+", qos=0)
        connection, resumed = await reconnect(core, peer, connection, present=True)
        assert resumed
        w, n, q = identifiers(one, two, three)
        each = [(w, b"1"), (n, b"1"), (n, b"2"), (w, b"3"), (n, b"3"), (w, b"3"), (n, b"3"), (w, b"4"), (n, b"5")]
        for number, (identifier, payload) in enumerate(each, 1):
            connection.write(message("a/b", payload, identifier, packet_id=number))
        connection.write(message("a/b", b"6", q))
        connection.write(message("a/c", b"7", w, packet_id=20))
        await wide.count(7)
        assert wide.payloads == [b"1", b"2", b"3", b"3", b"4", b"5", b"7"]
        assert narrow.payloads == [b"1", b"2", b"3", b"3", b"4", b"5"]
        assert loose.payloads == [b"6"]
        answered = [(await connection.expect(0x40))[1] for _ in range(3)]
        assert answered == [2, 5, 7]  # the further copies
        core.acknowledge(*wide.arrived, *narrow.arrived)
        answered = [(await connection.expect(0x40))[1] for _ in range(7)]
        assert sorted(answered) == [1, 3, 4, 6, 8, 9, 20]


async def test_a_loss_between_the_copies_of_a_message_gives_it_to_no_stream_twice() -> None:
    async with session(**lasting("5")) as (core, peer, connection):
        wide, one = await subscribed(core, connection, "a/#", qos=2)
        narrow, two = await subscribed(core, connection, "a/b", qos=2)
        w, n = identifiers(one, two)
        connection.write(message("a/b", b"1", n, packet_id=7, qos=2))
        await narrow.count(1)
        core.acknowledge(*narrow.arrived)
        assert (await connection.expect(0x50))[1] == 7
        connection, _ = await reconnect(core, peer, connection, present=True)
        for number, (identifier, payload) in enumerate([(w, b"1"), (n, b"2"), (w, b"2"), (n, b"3")], 8):
            connection.write(message("a/b", payload, identifier, packet_id=number, qos=2))
        await wide.count(3)
        assert (wide.payloads, narrow.payloads) == ([b"1", b"2", b"3"], [b"1", b"2", b"3"])

"""Handshakes and sessions over the loss of a connection: against a scripted peer, and against mosquitto."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import messaging
from messaging.errors import ConnectionLostError, PayloadTooLargeError, PublishRefusedError, SubscriptionRefusedError
from messaging.testing.tables import table
from messaging.testing.waiting import eventually_async
from messaging_adapters.mqtt import in_flight, packets
from tests.doubles.timers import LongTimers
from tests.mqtt.harness import Core, settled
from tests.mqtt.peer import Peer, accept, farewell, reconnect, sent, session, subscribed
from tests.mqtt.test_joint import joined

PERSISTENT: dict[str, Any] = {"client_id": "me", "clean_start": False, "session_expiry": 1000}


# --- publishing


async def test_the_window_is_receive_maximum_and_ids_are_unique() -> None:
    async with session(b"\x21\x00\x03") as (core, _, connection):
        outs = [core.out("t", b"%d" % number, qos="12"[number % 2]) for number in range(8)]
        sending = asyncio.create_task(core.adapter.publish(outs))
        first = [await connection.publish() for _ in range(3)]
        assert [publish.payload for publish in first] == [b"0", b"1", b"2"]
        assert len({publish.id for publish in first}) == 3
        assert [out.was_sent for out in outs] == [True] * 3 + [False] * 5
        # the core gives one up: its slot is not free before the broker answers
        outs[0].fail(PublishRefusedError("deadline"))
        # and one that was never sent must not be sent any more
        outs[4].fail(PublishRefusedError("deadline"))
        connection.answer(packets.PUBREC, first[1].id)
        assert await connection.expect(packets.PUBREL) == first[1].id.to_bytes(2, "big")
        assert not outs[1].settled
        connection.answer(packets.PUBCOMP, first[1].id)
        third = await connection.publish()
        assert third.payload == b"3"
        await outs[1].done
        connection.answer(packets.PUBACK, first[0].id)
        connection.answer(packets.PUBACK, first[2].id)
        rest = [await connection.publish() for _ in range(2)]
        assert [publish.payload for publish in rest] == [b"5", b"6"]
        assert not sending.done()
        connection.answer(packets.PUBACK, rest[1].id)
        last = await connection.publish()
        assert last.payload == b"7"
        await sending


@table("version, qos, window", [("3.1.1", "1", 100), ("3.1.1", "2", 20), ("5", "1", 1024)])
async def test_the_window_where_the_broker_names_none(peer: Peer, version: str, qos: str, window: int) -> None:
    for setting, expected in ((None, window), (5, 5)):
        core = Core(peer.url, version=version, max_inflight=setting)
        connection, _ = await accept(core, peer)
        outs = [core.out("t", b"", qos=qos) for _ in range(1100)]
        sending = asyncio.create_task(core.adapter.publish(outs))
        for _ in range(expected):
            await connection.publish(version == "5")
        subscribing = asyncio.create_task(core.subscribe("mark"))
        await connection.expect(0x80)  # and no PUBLISH before it
        connection.abort()
        await settled(sending, subscribing)
        await core.adapter.close()


@table("kind", [packets.PUBACK, packets.PUBREC])
@table(
    "rest, text",
    [
        (b"\x00\x09", "answered the message on 'some/where' with properties longer than their packet"),
        (b"\x00\x02\x7f\x00", "with unexpected property 0x7F"),
        (b"\x97\x04\x1f\x00\x01\xff", r"refused .* 'some/where': Quota exceeded \(malformed properties\)"),
    ],
)
async def test_a_malformed_answer_fails_its_message_only(kind: int, rest: bytes, text: str) -> None:
    async with session(b"\x21\x00\x01") as (core, _, connection):
        out, publish = await sent(core, connection, "some/where", b"", qos="1" if kind == packets.PUBACK else "2")
        connection.send(kind, publish.id.to_bytes(2, "big") + rest)
        with pytest.raises(PublishRefusedError, match=text):
            await out.done
        if kind == packets.PUBREC and rest[0] < packets.FAILURE:  # the broker holds the id until told otherwise
            assert await connection.expect(packets.PUBREL) == publish.id.to_bytes(2, "big")
            connection.answer(packets.PUBCOMP, publish.id)
        out, publish = await sent(core, connection, "t", b"", qos="1")
        await connection.confirm(out, publish)
        assert not core.losses


async def test_answers_to_unknown_messages_are_harmless() -> None:
    async with session() as (core, _, connection):
        for kind in (packets.PUBACK, packets.PUBREC, packets.PUBCOMP, packets.PUBREL | 2):
            connection.answer(kind, 77)
        assert await connection.packet() == (packets.PUBREL | 2, b"\x00\x4d")
        assert await connection.packet() == (packets.PUBCOMP, b"\x00\x4d")
        out, publish = await sent(core, connection, "t", b"", qos="2")
        connection.answer(packets.PUBREC, publish.id)
        connection.answer(packets.PUBREC, publish.id)  # twice
        for _ in range(2):
            await connection.expect(packets.PUBREL)
        assert not out.settled
        connection.answer(packets.PUBCOMP, publish.id)
        await out.done
        out, publish = await sent(core, connection, "t", b"", qos="1")
        connection.answer(packets.PUBREC, publish.id)  # of the wrong kind
        await connection.expect(packets.PUBREL)
        assert not out.settled
        await connection.confirm(out, publish)
        assert not core.losses


async def test_a_broker_may_make_qos_1_of_qos_2() -> None:
    async with session(b"\x21\x00\x01") as (core, _, connection):
        for _ in range(2):
            out, publish = await sent(core, connection, "t", b"", qos="2")
            await connection.confirm(out, publish)


async def test_without_a_session_unconfirmed_messages_fail() -> None:
    async with session() as (core, peer, connection):
        outs = [core.out("t", b"", qos=qos) for qos in "12"]
        await core.send(*outs)
        publishes = [await connection.publish() for _ in range(2)]
        connection.answer(packets.PUBREC, publishes[1].id)
        await connection.expect(packets.PUBREL)
        connection, resumed = await reconnect(core, peer, connection, present=False)
        assert not resumed
        assert all(isinstance(out.error, ConnectionLostError) for out in outs)
        out = core.out("t", b"new", qos="1")
        await core.send(out)
        assert (await connection.publish()).payload == b"new"


async def test_a_resumed_session_finishes_every_handshake_in_order_within_the_window() -> None:
    async with session(**PERSISTENT) as (core, peer, connection):
        outs = [core.out("t", b"%d" % number, qos=qos) for number, qos in enumerate("12212")]
        await core.send(*outs)
        sent = [await connection.publish() for _ in range(5)]
        connection.answer(packets.PUBREC, sent[1].id)
        await connection.expect(packets.PUBREL)
        # the core gives two up meanwhile: the handshake of QoS 2 has to be finished all the same
        outs[2].fail(PublishRefusedError("deadline"))
        outs[3].fail(PublishRefusedError("deadline"))
        connection, resumed = await reconnect(core, peer, connection, present=True, properties=b"\x21\x00\x02")
        assert resumed
        assert not outs[0].settled
        late = core.out("t", b"late", qos="1")
        sending = asyncio.create_task(core.adapter.publish([late]))
        again = await connection.publish()
        assert (again.id, again.payload, again.dup, again.qos) == (sent[0].id, b"0", True, 1)
        assert await connection.expect(packets.PUBREL) == sent[1].id.to_bytes(2, "big")
        connection.answer(packets.PUBCOMP, sent[1].id)
        again = await connection.publish()
        assert (again.id, again.payload, again.dup) == (sent[2].id, b"2", True)
        connection.answer(packets.PUBACK, sent[0].id)
        again = await connection.publish()
        assert (again.id, again.payload, again.dup) == (sent[4].id, b"4", True)
        assert not sending.done()
        for publish in (sent[2], sent[4]):
            await connection.complete(publish.id)
        new = await connection.publish()
        assert (new.payload, new.dup) == (b"late", False)
        await sending
        connection.answer(packets.PUBACK, new.id)
        await settled(*(out.done for out in (*outs, late)))
        assert [out.error is None for out in outs] == [True, True, False, False, True]


async def test_if_the_session_is_lost_unfinished_messages_are_sent_as_new_ones() -> None:
    async with session(**PERSISTENT) as (core, peer, connection):
        outs = [core.out("t", b"%d" % number, qos=qos) for number, qos in enumerate("122")]
        await core.send(*outs)
        sent = [await connection.publish() for _ in range(3)]
        connection.answer(packets.PUBREC, sent[1].id)
        await connection.expect(packets.PUBREL)
        outs[2].fail(PublishRefusedError("deadline"))
        connection, resumed = await reconnect(core, peer, connection, present=False)
        assert not resumed
        again = [await connection.publish() for _ in range(2)]
        assert [(publish.payload, publish.dup) for publish in again] == [(b"0", False), (b"1", False)]
        connection.answer(packets.PUBACK, again[0].id)
        await connection.complete(again[1].id)
        await settled(*(out.done for out in outs))
        assert [out.error is None for out in outs] == [True, True, False]


@table("present", [True, False])
async def test_a_resumed_session_sends_no_message_again_whose_time_to_live_is_over(present: bool) -> None:
    """``extensions.md``: "an expired message is not sent"; the broker has begun with one of QoS 2 that it knows."""
    async with session(**PERSISTENT) as (core, peer, connection):
        outs = [core.out("t", b"%d" % number, qos=qos) for number, qos in enumerate("1212")]
        await core.send(*outs)
        for _ in outs:
            await connection.publish()
        outs[0].is_over = outs[1].is_over = True
        connection, _ = await reconnect(core, peer, connection, present=present)
        again = [await connection.publish() for _ in range(3 if present else 2)]
        assert [publish.payload for publish in again] == ([b"1", b"2", b"3"] if present else [b"2", b"3"])
        for publish in again:
            await connection.complete(publish.id) if publish.qos == 2 else connection.answer(packets.PUBACK, publish.id)
        await settled(*(out.done for out in outs))
        assert [out.error is None for out in outs] == [False, False, True, True]


async def test_packet_ids_of_publish_and_subscribe_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "FIRST_ID", 65_535)

    async with session() as (core, _, connection):
        outs = [core.out("t", b"", qos="1") for _ in range(3)]
        await core.send(*outs)
        publishes = [await connection.publish() for _ in range(3)]
        assert [publish.id for publish in publishes] == [65_535, 1, 2]
        subscribing = asyncio.create_task(core.subscribe("x"))
        body = await connection.expect(0x80)
        assert body[:2] == b"\x00\x03"  # 1 and 2 wait for PUBACK
        _, publish = await sent(core, connection, "t", b"", qos="1")
        assert publish.id == 4  # 3 waits for SUBACK
        connection.send(0x90, body[:2] + b"\0\0")
        _, handle = await subscribing
        unsubscribing = asyncio.create_task(core.adapter.unsubscribe(handle))
        body = await connection.expect(0xA0)
        assert body[:2] == b"\x00\x05"  # 4 waits for PUBACK
        connection.send(0xB0, body[:2] + b"\0\0")
        await unsubscribing


async def test_messages_over_the_brokers_packet_size_are_not_sent() -> None:
    async with session(b"\x27\x00\x00\x00\x40") as (core, _, connection):
        fits = core.out("t", bytes(64 - 2 - 3 - 1))
        over = core.out("t", bytes(64 - 2 - 3 - 1 + 1))
        long = core.out("t" * 30, bytes(40))
        await core.send(over, long, fits)
        for out, limit in ((over, 58), (long, 29)):
            error = out.error
            assert isinstance(error, PayloadTooLargeError)
            assert error.limit == limit
        assert len((await connection.publish()).payload) == 58


# --- receiving


async def test_qos_2_is_released_in_two_steps_and_a_duplicate_is_answered_not_delivered() -> None:
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection, qos="2")
        connection.deliver("t", b"x", 9, 2)
        (message,) = await sink.count(1)
        connection.deliver("t", b"x", 9, 2, packets.DUP)  # impatient
        connection.deliver("t", b"mark")
        await sink.count(2)
        core.acknowledge(message)
        assert await connection.packet() == (packets.PUBREC, b"\x00\x09")
        connection.deliver("t", b"x", 9, 2, packets.DUP)  # PUBREC was not seen
        assert await connection.packet() == (packets.PUBREC, b"\x00\x09")
        connection.answer(packets.PUBREL | 2, 9)
        assert await connection.packet() == (packets.PUBCOMP, b"\x00\x09")
        connection.deliver("t", b"y", 9, 2)  # the id is free again
        assert (await sink.count(3))[2].payload == b"y"
        assert sink.payloads == [b"x", b"mark", b"y"]


async def test_tokens_of_a_resumed_session_stay_valid_and_messages_come_once() -> None:
    async with session(**PERSISTENT) as (core, peer, connection):
        sink, _ = await subscribed(core, connection, qos="2")
        for packet_id, qos in ((1, 1), (2, 2), (3, 1), (4, 2)):
            connection.deliver("t", b"%d" % packet_id, packet_id, qos)
        one, two, three, four = await sink.count(4)
        core.acknowledge(four)
        await connection.expect(packets.PUBREC)
        connection.abort()
        await core.lost()
        core.acknowledge(one)  # without a connection
        connection, resumed = await accept(core, peer, present=True)
        assert resumed
        assert not any(core.adapter.is_stale(message.token) for message in (two, three))
        core.acknowledge(three)  # not before the broker has sent it here too
        for packet_id, qos in ((1, 1), (2, 2), (3, 1)):
            connection.deliver("t", b"%d" % packet_id, packet_id, qos, packets.DUP)
        connection.deliver("t", b"4", 4, 2, packets.DUP)  # PUBREC got lost
        assert await connection.packet() == (packets.PUBACK, b"\x00\x01")
        assert await connection.packet() == (packets.PUBACK, b"\x00\x03")
        assert await connection.packet() == (packets.PUBREC, b"\x00\x04")
        core.acknowledge(two)
        assert await connection.packet() == (packets.PUBREC, b"\x00\x02")
        connection.deliver("t", b"end")
        await sink.count(5)
        assert sink.payloads == [b"1", b"2", b"3", b"4", b"end"]


async def test_an_id_that_a_forgetful_broker_gives_to_another_message_is_another_message() -> None:
    async with session(**PERSISTENT) as (core, peer, connection):
        sink, _ = await subscribed(core, connection, qos="1")
        connection.deliver("t", b"old", 1, 1)
        connection.deliver("t", b"older", 2, 1)
        old, older = await sink.count(2)
        connection, _ = await reconnect(core, peer, connection, present=True)
        connection.deliver("t", b"new", 1, 1)
        connection.deliver("t", b"newer", 2, 1, packets.DUP)
        _, _, new, newer = await sink.count(4)
        core.acknowledge(old, older)  # must not answer for the new ones
        core.acknowledge(newer, new)
        assert await connection.packet() == (packets.PUBACK, b"\x00\x02")
        assert await connection.packet() == (packets.PUBACK, b"\x00\x01")


@table("settings", [{}, PERSISTENT])
async def test_tokens_of_a_lost_session_are_stale_and_never_reach_the_next_one(settings: dict[str, Any]) -> None:
    async with session(**settings) as (core, peer, connection):
        sink, old_handle = await subscribed(core, connection, qos="1")
        connection.deliver("t", b"old", 1, 1)
        (old,) = await sink.count(1)
        connection, resumed = await reconnect(core, peer, connection, present=False)
        assert not resumed
        assert core.adapter.is_stale(old.token)
        new_sink, _ = await subscribed(core, connection, qos="1")
        connection.deliver("t", b"new", 1, 1)
        (new,) = await new_sink.count(1)
        core.acknowledge(old)
        await core.adapter.unsubscribe(old_handle)
        core.acknowledge(new)
        assert await connection.packet() == (packets.PUBACK, b"\x00\x01")
        assert len(sink.arrived) == 1


async def test_closing_leaves_unsettled_messages_to_the_session() -> None:
    async with session(**PERSISTENT) as (core, _, connection):
        sink, _ = await subscribed(core, connection, qos="1")
        connection.deliver("t", b"x", 1, 1)
        (message,) = await sink.count(1)
        closing = asyncio.create_task(core.adapter.close())
        assert await connection.packet() == (0xE0, b"")
        core.acknowledge(message)
        connection.close()
        await closing


async def test_messages_of_a_resumed_session_wait_for_the_streams_that_subscribe(
    long_timers: LongTimers, caplog: pytest.LogCaptureFixture
) -> None:
    async with Peer() as peer:
        core = Core(peer.url, **PERSISTENT)
        opening = asyncio.create_task(core.open())
        connection, _ = await peer.accept()
        connection.connack(session=True)
        for packet_id, topic in ((1, "a"), (2, "b"), (3, "a")):
            connection.deliver(topic, b"%d" % packet_id, packet_id, 1)
        assert await opening is False  # the core does not know of it
        sink, _ = await subscribed(core, connection, "a", qos="1")
        await sink.count(2)
        assert sink.payloads == [b"1", b"3"]
        # one without acknowledgement is not kept, and may be of a subscription that this process is about to make
        connection.deliver("c", b"", 0, 0)
        connection.deliver("a", b"", 0, 0)
        await sink.count(3)
        assert "is dropped" not in caplog.text
        core.acknowledge(sink.arrived[0])
        assert await connection.packet() == (packets.PUBACK, b"\x00\x01")
        long_timers.elapse()
        assert await connection.packet() == (packets.PUBACK, b"\x00\x02")  # no stream wanted it
        assert "the first on 'b'" in caplog.text
        # the subscription of the earlier process is still there
        for packet_id in (4, 5):
            connection.deliver("b", b"", packet_id, 1)
            assert await connection.packet() == (packets.PUBACK, packet_id.to_bytes(2, "big"))
        assert caplog.text.count("message on 'b' matches no subscription and is dropped") == 1
        await farewell(core, connection)


@table(
    "options, expected",
    {
        "of the publisher": ({"retain_as_published": True}, [b"1", b"2"]),
        "of a replay": ({}, [b"2"]),
        "of a replay, or of an earlier process's subscription": ({"packet_id": True}, [b"1", b"2"]),
    },
)
async def test_a_retained_flag_of_a_resumed_session_tells_a_replay_only_without_retain_as_published(
    options: dict[str, bool], expected: list[bytes]
) -> None:
    """With it the flag is that of the publisher: the message may be a new one, which no subscription brings again.

    A stream with packet identifiers recognises a message that comes twice, and may follow one with other options.
    """
    async with Peer() as peer:
        core = Core(peer.url, **PERSISTENT)
        opening = asyncio.create_task(core.open())
        connection, _ = await peer.accept()
        connection.connack(session=True)
        connection.deliver("a", b"1", 1, 1, packets.DUP | 1)
        connection.deliver("a", b"2", 2, 1, packets.DUP)
        await opening
        subscribing = asyncio.create_task(core.subscribe("a", qos="1", **options))
        if not options:
            assert await connection.packet() == (packets.PUBACK, b"\x00\x01")
        await connection.suback()
        sink, _ = await subscribing
        await sink.count(len(expected))
        assert sink.payloads == expected
        core.acknowledge(*sink.arrived)
        for number in expected:
            assert await connection.packet() == (packets.PUBACK, bytes((0, int(number))))
        await farewell(core, connection)


async def test_without_a_session_messages_without_a_stream_are_acknowledged_at_once() -> None:
    async with session() as (_, _, connection):
        connection.deliver("none", b"", 1, 1)
        connection.deliver("none", b"", 2, 2)
        assert await connection.packet() == (packets.PUBACK, b"\x00\x01")
        assert await connection.packet() == (packets.PUBREC, b"\x00\x02")


async def test_answers_wait_if_the_broker_exceeds_its_credit_and_stay_within_its_window() -> None:
    """The newest settled message first, but none beyond the window. Waiting answers need no further verdict."""
    async with session(receive_maximum=3) as (core, _, connection):

        async def answered(count: int) -> list[int]:
            return [int.from_bytes(await connection.expect(packets.PUBACK), "big") for _ in range(count)]

        sink, _ = await subscribed(core, connection, qos="1")
        for packet_id in range(1, 8):
            connection.deliver("t", b"", packet_id, 1)
        messages = await sink.count(7)
        core.acknowledge(*messages[:4])  # still three unsettled
        core.acknowledge(messages[4])  # two: there is credit for one
        assert await answered(5) == [3, 4, 5, 2, 1]
        connection.deliver("t", b"", 8, 1)
        await sink.count(8)
        core.acknowledge(*sink.arrived[5:8])
        assert await answered(3) == [6, 7, 8]


async def test_messages_that_arrive_together_are_handed_over_together() -> None:
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection, "t")
        other, _ = await subscribed(core, connection, "#")
        for number in range(500):
            connection.deliver("t", b"%d" % number)
        await other.count(500)
        assert sink.payloads == other.payloads == [b"%d" % number for number in range(500)]
        assert len(sink.batches) < 50


# --- subscriptions


async def test_a_refused_subscription_names_channel_queue_and_reason() -> None:
    async with session() as (core, _, connection):
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, "'a/#': Not authorized"),
            ({"queue": "q"}, r"'a/#' \(queue 'q'\): Not authorized"),
        ]
        for options, text in cases:
            subscribing = asyncio.create_task(core.subscribe("a/#", **options))
            await connection.suback(0x87)
            with pytest.raises(SubscriptionRefusedError, match=text):
                await subscribing
            await connection.unsuback()  # harmless, and certain
        sink, _ = await subscribed(core, connection, "a/#", qos="2")
        connection.deliver("a/b", b"")
        await sink.count(1)


async def test_a_connection_without_suback_is_lost_at_the_timeout() -> None:
    async with session(timeout=0.5) as (core, _, connection):
        with pytest.raises(ConnectionLostError, match=r"no answer to the subscription to 'x' within 0\.5 s"):
            await core.subscribe("x")
        await connection.expect(0x80)
        assert "no answer to the subscription to 'x'" in str(await core.lost())


async def test_a_subscription_without_suback_is_made_again_on_the_next_connection() -> None:
    async with Peer() as peer:

        async def answer_the_second() -> None:
            first, _ = await peer.accept()
            first.connack()
            await first.expect(0x80)
            second, _ = await peer.accept()
            second.connack()
            await second.suback()
            second.deliver("x", b"arrives")

        answering = asyncio.create_task(answer_the_second())
        async with messaging.connect(peer.url, timeout=0.2, close_timeout=0.1) as m:
            async with m.subscribe("x") as stream:
                async for message in stream:
                    assert message.payload == b"arrives"
                    break
            await answering


async def test_closing_fails_pending_requests_with_a_typed_error() -> None:
    async with session() as (core, _, connection):
        _, handle = await subscribed(core, connection)
        subscribing = asyncio.create_task(core.subscribe("x"))
        unsubscribing = asyncio.create_task(core.adapter.unsubscribe(handle))
        for _ in range(2):
            await connection.packet()
        await farewell(core, connection)
        for waiting in (subscribing, unsubscribing):
            with pytest.raises(ConnectionLostError):  # these tasks were not cancelled
                await waiting


async def test_a_cancelled_subscription_is_taken_back() -> None:
    async with session() as (core, _, connection):
        subscribing = asyncio.create_task(core.subscribe("x"))
        await connection.expect(0x80)
        subscribing.cancel()
        await settled(subscribing)
        await connection.expect(0xA0)


@table("closes", ["stream", "instance"])
async def test_a_session_keeps_a_subscription_that_is_closed_before_the_broker_answers(closes: str) -> None:
    async with Peer() as peer:

        async def begin() -> Any:
            connection, _ = await peer.accept()
            connection.connack()
            return connection

        beginning = asyncio.create_task(begin())
        async with messaging.connect(peer.url, **PERSISTENT) as m:
            connection = await beginning
            stream = m.subscribe("t", keep_subscription=True)
            subscribe = await connection.expect(0x80)
            if closes == "stream":
                await stream.close()
            else:
                closing = asyncio.create_task(m.aclose())
                await eventually_async(lambda: not m.runtime.get_runtime_dto().subscriptions)
            connection.send(0x90, subscribe[:2] + b"\0\x01")
            if closes == "stream":
                m.publish("x", b"", qos="0")
                await connection.publish()  # what is sent next
                closing = asyncio.create_task(m.aclose())
            await connection.expect(packets.DISCONNECT)
            connection.close()
            await closing


async def test_an_unsubscription_without_a_connection_is_sent_in_the_resumed_session(long_timers: LongTimers) -> None:
    async with session(**PERSISTENT) as (core, peer, connection):
        kept, _ = await subscribed(core, connection, "kept")
        _, gone = await subscribed(core, connection, "gone")
        connection.abort()
        await core.lost()
        await core.adapter.unsubscribe(gone)
        connection, resumed = await accept(core, peer, present=True)
        assert resumed
        long_timers.elapse()
        assert (await connection.expect(0xA0)).endswith(b"\x00\x04gone")
        connection.deliver("kept", b"")
        await kept.count(1)


@table("losses", [1, 2])
async def test_an_unsubscription_that_was_not_answered_is_sent_again_in_the_resumed_session(
    losses: int, long_timers: LongTimers
) -> None:
    """The broker may not have got it."""
    async with session(**PERSISTENT) as (core, peer, connection):
        kept, _ = await subscribed(core, connection, "kept")
        _, gone = await subscribed(core, connection, "gone")
        unsubscribing = asyncio.create_task(core.adapter.unsubscribe(gone))
        for _ in range(losses):
            assert (await connection.expect(0xA0)).endswith(b"\x00\x04gone")
            connection, resumed = await reconnect(core, peer, connection, present=True)
            assert resumed
            long_timers.elapse()
        with pytest.raises(ConnectionLostError):
            await unsubscribing
        assert (await connection.expect(0xA0)).endswith(b"\x00\x04gone")
        connection.deliver("kept", b"")
        await kept.count(1)


async def test_a_stream_takes_over_a_subscription_whose_end_was_not_answered(long_timers: LongTimers) -> None:
    async with session(**PERSISTENT) as (core, peer, connection):
        _, ended = await subscribed(core, connection, "t", qos="1")
        unsubscribing = asyncio.create_task(core.adapter.unsubscribe(ended))
        await connection.expect(0xA0)
        connection, _ = await reconnect(core, peer, connection, present=True)
        with pytest.raises(ConnectionLostError):
            await unsubscribing
        sink, _ = await subscribed(core, connection, "t", qos="1")
        long_timers.elapse()  # an UNSUBSCRIBE would be the next packet
        connection.deliver("t", b"1", 1, 1)
        core.acknowledge(*(await sink.count(1)))
        await connection.expect(packets.PUBACK)


async def test_an_unsubscription_whose_time_comes_while_a_connection_closes_is_sent_on_the_next_one(
    long_timers: LongTimers,
) -> None:
    async with session(**PERSISTENT) as (core, peer, connection):
        kept, _ = await subscribed(core, connection, "kept")
        _, gone = await subscribed(core, connection, "gone")
        connection.abort()
        await core.lost()
        await core.adapter.unsubscribe(gone)
        connection, _ = await accept(core, peer, present=True)
        setting = asyncio.create_task(core.adapter.set_will(core.out("last", b"", last_will=True)))
        await connection.expect(packets.DISCONNECT)  # a planned reconnection
        long_timers.elapse()
        connection.close()
        await setting
        connection, resumed = await accept(core, peer, present=True)
        assert resumed
        long_timers.elapse()
        assert (await connection.expect(0xA0)).endswith(b"\x00\x04gone")
        connection.deliver("kept", b"")
        await kept.count(1)


async def test_an_unsubscription_without_a_connection_is_sent_when_the_session_is_left() -> None:
    async with session(**PERSISTENT) as (core, peer, connection):
        kept, _ = await subscribed(core, connection, "kept")
        _, gone = await subscribed(core, connection, "gone", qos="1")
        connection.abort()
        await core.lost()
        await core.adapter.unsubscribe(gone)
        connection, _ = await accept(core, peer, present=True)
        connection, _ = await reconnect(core, peer, connection, present=True)  # it waits on each connection
        connection.deliver("gone", b"for the session's next connection: no PUBACK", 7, 1)
        connection.deliver("kept", b"behind it")
        await kept.count(1)
        closing = asyncio.create_task(core.adapter.close())
        assert (await connection.expect(0xA0)).endswith(b"\x00\x04gone")
        await connection.expect(packets.DISCONNECT)
        connection.close()
        await closing


async def test_a_stream_that_takes_an_ended_subscription_over_leaves_no_gap(long_timers: LongTimers) -> None:
    """Between UNSUBSCRIBE and the next SUBSCRIBE the session would miss messages."""
    async with session(**PERSISTENT) as (core, peer, connection):
        _, ended = await subscribed(core, connection, "t", qos="1")
        _, joint = await joined(core, connection, "a", "b", qos=1)
        connection.abort()
        await core.lost()
        await core.adapter.unsubscribe(ended)
        await core.adapter.unsubscribe(joint)
        connection, _ = await accept(core, peer, present=True)
        sink, _ = await subscribed(core, connection, "t", qos="1")
        await joined(core, connection, "a", "b", qos=1)
        long_timers.elapse()  # an UNSUBSCRIBE would be the next packet
        connection.deliver("t", b"1", 1, 1)
        core.acknowledge(*(await sink.count(1)))
        await connection.expect(packets.PUBACK)


@table("is_taken_over", [True, False])
async def test_a_message_for_an_ended_subscription_waits_although_another_stream_takes_it(
    is_taken_over: bool, long_timers: LongTimers
) -> None:
    """Without subscription identifiers a broker sends one copy for all filters that overlap."""
    async with session(**PERSISTENT) as (core, peer, connection):
        another, _ = await subscribed(core, connection, "t/+", qos="1")
        _, ended = await subscribed(core, connection, "t/1", qos="1")
        connection.abort()
        await core.lost()
        await core.adapter.unsubscribe(ended)
        connection, _ = await accept(core, peer, present=True)
        connection.deliver("t/1", b"1", 1, 1)
        core.acknowledge(*(await another.count(1)))
        if is_taken_over:
            sink, _ = await subscribed(core, connection, "t/1", qos="1")  # nothing is acknowledged before it
            core.acknowledge(*(await sink.count(1)))
        else:
            long_timers.elapse()
            await connection.expect(0xA0)
        await connection.expect(packets.PUBACK)


@table("how", ["connection lost", "no answer", "cancelled"])
async def test_an_attempt_to_subscribe_leaves_the_session_what_it_has(how: str) -> None:
    """The subscription may be that of an earlier process, and the next attempt comes soon."""
    async with session(**PERSISTENT, timeout=0.3 if how == "no answer" else 30) as (core, peer, connection):
        subscribing = asyncio.create_task(core.subscribe("t", qos="1"))
        await connection.expect(0x80)
        if how == "connection lost":
            connection, _ = await reconnect(core, peer, connection, present=True)
        elif how == "cancelled":
            subscribing.cancel()
        (failure,) = await asyncio.gather(subscribing, return_exceptions=True)
        assert isinstance(failure, ConnectionLostError | asyncio.CancelledError)
        if how == "no answer":
            connection, _ = await accept(core, peer, present=True)
        sink, _ = await subscribed(core, connection, "t", qos="1")  # the next packet
        connection.deliver("t", b"1", 1, 1)
        await sink.count(1)


async def test_a_subscription_that_is_granted_less_than_it_needs_is_ended() -> None:
    async with session(**PERSISTENT) as (core, _, connection):
        subscribing = asyncio.create_task(core.subscribe("t", qos="1"))
        await connection.suback(0)
        with pytest.raises(SubscriptionRefusedError, match="grants QoS 0"):
            await subscribing
        await connection.unsuback()


async def test_a_session_created_by_a_failed_attempt_is_not_taken_for_the_old_one() -> None:
    async with session(**PERSISTENT) as (core, peer, connection):
        await subscribed(core, connection)
        connection.abort()
        await core.lost()
        # accepted with a new session, and lost in the same moment
        opening = asyncio.create_task(core.open())
        connection, _ = await peer.accept()
        connection.write(b"\x20\x03\x00\x00\x00\xe0\x02\x8b\x00")
        results = await asyncio.gather(opening, return_exceptions=True)
        if results[0] is not False:
            connection, resumed = await accept(core, peer, present=True)
            assert not resumed

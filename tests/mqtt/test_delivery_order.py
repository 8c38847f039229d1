"""Messages of a stream come in order, also from a broker that sends more than it may.

mosquitto 2.0 counts its window from the position of the message that is answered. An answer to one beyond the window
leaves a slot which the next message published takes, ahead of all that wait in its queue: on the wire, packet ids 177,
178, 179, 224, 225, 180. So such answers must not be given; see ``messaging_adapters.mqtt.answers``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually_async, within
from messaging_adapters.mqtt import answers, packets
from tests.mqtt.harness import Core, Sink, connected
from tests.mqtt.peer import Connection, Peer, accept, farewell, reconnect, session, subscribed

pytestmark = pytest.mark.usefixtures("needs_mosquitto")

V3: dict[str, Any] = {"version": "3.1.1", "client_id": "me", "clean_start": False}


@table("qos", [1, 2])
@table("seed", range(6))
async def test_no_answer_goes_beyond_the_window_in_any_order_of_settling(seed: int, qos: int) -> None:
    chance = random.Random(seed)
    limit, count = chance.randint(1, 6), 40

    async with session(receive_maximum=limit) as (core, _, connection):
        sink, _ = await subscribed(core, connection, qos=str(qos))
        for packet_id in range(1, count + 1):
            connection.deliver("t", b"", packet_id, qos)
        messages = [*await sink.count(count)]
        chance.shuffle(messages)
        held = [*range(1, count + 1)]

        async def answers() -> None:
            while held:
                head, body = await connection.packet()
                packet_id = int.from_bytes(body[:2], "big")
                if head == packets.PUBREC:
                    connection.answer(packets.PUBREL | 2, packet_id)
                else:
                    assert head == (packets.PUBACK if qos == 1 else packets.PUBCOMP)
                    assert held.index(packet_id) < limit
                    held.remove(packet_id)

        answering = asyncio.create_task(answers())
        while messages:
            for _ in range(min(chance.randint(1, 10), len(messages))):
                core.acknowledge(messages.pop())
            await asyncio.sleep(0)
        await within(answering)


@table("seed", range(4))
async def test_beyond_the_limit_answers_of_3_1_1_keep_to_mosquittos_window(seed: int) -> None:
    """The broker's window is not known there: 20 unless it was changed."""
    chance = random.Random(seed)
    count = 60

    async with session(**V3, receive_maximum=40) as (core, _, connection):
        sink, _ = await subscribed(core, connection, qos="2")
        deliver_v3(connection, range(1, count + 1))
        messages = [*await sink.count(count)]
        chance.shuffle(messages)
        core.acknowledge(*messages)
        held = [*range(1, count + 1)]
        for packet_id in await answered(connection, count):
            assert held.index(packet_id) < 20
            held.remove(packet_id)


async def test_each_message_is_recorded_once_also_where_the_limit_is_exceeded_later() -> None:
    """Of two PUBREC come two PUBCOMP, and for the second one mosquitto lets a message overtake its queue."""
    count = 60

    async with session(**V3, receive_maximum=40) as (core, _, connection):
        sink, _ = await subscribed(core, connection, qos="2")
        deliver_v3(connection, range(1, 31), qos=2)
        core.acknowledge(*await sink.count(30))
        assert [await connection.expect(packets.PUBREC) for _ in range(30)]
        deliver_v3(connection, range(31, count + 1), qos=2)
        await sink.count(count)
        for packet_id in range(1, 31):
            connection.answer(packets.PUBREL | 2, packet_id)
        core.acknowledge(*sink.arrived[30:])
        answers: list[tuple[int, int]] = []
        while len(answers) < 30 + 2 * 30:
            answers.append(await next_answer(connection))
        assert len(set(answers)) == len(answers)
        assert {each for head, each in answers if head == packets.PUBREC} == {*range(31, count + 1)}


async def test_a_message_whose_record_was_lost_is_recorded_again_also_beyond_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for one that is not settled, while the broker exceeds the limit."""
    monkeypatch.setattr(answers, "ORDER_TIMEOUT", 0.05)
    count = 60

    async with session(**V3, receive_maximum=40) as (core, peer, connection):
        sink, _ = await subscribed(core, connection, qos="2")
        deliver_v3(connection, range(1, 41), qos=2)
        core.acknowledge(*(await sink.count(40))[1:])
        for _ in range(39):
            await connection.expect(packets.PUBREC)
        connection, _ = await reconnect(core, peer, connection, present=True)
        deliver_v3(connection, range(1, count + 1), qos=2, flags=8)
        recorded: set[int] = set()
        await sink.count(count)
        core.acknowledge(*sink.arrived[40:])
        while len(recorded) < count - 1:
            head, packet_id = await next_answer(connection)
            if head == packets.PUBREC:
                recorded.add(packet_id)
        assert recorded == {*range(2, count + 1)}
        assert len(sink.arrived) == count


@table("qos", ["1", "2"])
async def test_streams_that_settle_at_different_speeds_stay_in_order_with_mosquitto(qos: str) -> None:
    with Mosquitto() as broker:
        url = broker.url
        async with connected(url, receive_maximum=2) as core, connected(url) as other:
            sinks = [(await core.subscribe(channel, qos=qos))[0] for channel in ("slow", "fast")]
            done = [0, 0]

            def settle(which: int, at_most: int) -> None:
                messages = sinks[which].arrived[done[which] : done[which] + at_most]
                core.acknowledge(*messages)
                done[which] += len(messages)

            async def settled(count: int) -> None:
                def look() -> bool:
                    settle(1, 1000)
                    settle(0, 3)
                    return min(done) >= count

                await eventually_async(look, f"{count} of each are settled")

            total = 0
            for _ in range(12):  # the queue at the broker grows and shrinks
                for _ in range(25):
                    for channel in ("slow", "fast"):
                        await other.send(other.out(channel, b"%d" % total, qos=qos))
                    total += 1
                    settle(1, 1000)
                    settle(0, 1)
                    await asyncio.sleep(0)
                await settled(total // 2)
            await settled(total)
            for sink in sinks:
                assert sink.payloads == [b"%d" % number for number in range(total)]


@table("qos", ["1", "2"])
async def test_streams_of_3_1_1_stay_in_order_with_the_window_that_mosquitto_has(qos: str) -> None:
    """One stream settles all that it has while mosquitto has sent twice its window, and keeps a queue."""
    with Mosquitto() as broker:
        url = broker.url
        async with connected(url, version="3.1.1") as core, connected(url) as other:
            sinks = [(await core.subscribe(channel, qos=qos))[0] for channel in ("slow", "fast")]
            slow, fast = sinks

            async def publish(number: int) -> None:
                for channel in ("slow", "fast"):
                    await other.publish(channel, b"%d" % number, qos=qos)

            for number in range(60):
                await publish(number)
            await fast.count(10)
            core.acknowledge(slow.arrived[0])
            await fast.count(19)
            core.acknowledge(*fast.arrived[:9:-1])  # beyond the window
            await core.publish("after", qos="1")  # so mosquitto has read what was answered
            done = [1, 0]
            await publish(60)

            def is_complete() -> bool:
                for which, sink in enumerate(sinks):
                    core.acknowledge(*sink.arrived[done[which] :])
                    done[which] = len(sink.arrived)
                return min(done) == 61

            await eventually_async(is_complete)
            for sink in sinks:
                assert sink.payloads == [b"%d" % number for number in range(61)]


def deliver_v3(
    connection: Connection, packet_ids: Iterable[int], qos: int = 1, flags: int = 0, topic: str = "t"
) -> None:
    for packet_id in packet_ids:
        body = packets.text(topic) + packet_id.to_bytes(2, "big") + b"%d" % packet_id
        connection.send(packets.PUBLISH | qos << 1 | flags, body)


async def next_answer(connection: Connection) -> tuple[int, int]:
    """Kind and packet id; a PUBREC is answered by the PUBREL that it asks for."""
    head, body = await connection.packet()
    packet_id = int.from_bytes(body, "big")
    if head == packets.PUBREC:
        connection.answer(packets.PUBREL | 2, packet_id)
    return head, packet_id


@asynccontextmanager
async def resumed_with_lost_answers(lost: int, count: int) -> AsyncIterator[tuple[Core, Sink, Connection]]:
    """The answers to the first ``lost`` messages were lost, the others are settled, and all are sent again."""
    async with session(**V3) as (core, peer, connection):
        sink, _ = await subscribed(core, connection, qos="2")
        deliver_v3(connection, range(1, count + 1))
        messages = [*await sink.count(count)]
        core.acknowledge(*messages[:lost])
        assert await answered(connection, lost) == [*range(1, lost + 1)]
        connection.abort()
        await core.lost(1)
        core.acknowledge(*messages[lost:])
        connection, _ = await accept(core, peer, present=True)
        deliver_v3(connection, range(1, count + 1), flags=8)
        await sink.count(count + lost)
        assert sink.payloads[count:] == [b"%d" % number for number in range(1, lost + 1)]
        yield core, sink, connection


async def answered(connection: Connection, count: int) -> list[int]:
    return [int.from_bytes(await connection.expect(packets.PUBACK), "big") for _ in range(count)]


async def test_answers_of_3_1_1_keep_to_mosquittos_window_also_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams settle at different speeds while mosquitto has sent more than its window: the fast one waits its turn."""
    monkeypatch.setattr(answers, "ORDER_TIMEOUT", PATIENCE)
    async with slow_and_fast(30, 10) as (core, slow, fast, connection):
        core.acknowledge(*await fast.count(10))
        assert await connection.is_silent()
        core.acknowledge(*slow.arrived[9::-1])
        assert await answered(connection, 10) == [*range(10, 0, -1)]
        assert await connection.is_silent()
        core.acknowledge(slow.arrived[10])
        assert await answered(connection, 11) == [11, *range(31, 41)]


async def test_a_window_of_unsettled_messages_holds_up_the_answers_to_others_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another broker's window may be larger, and one stream must not stop the others."""
    monkeypatch.setattr(answers, "ORDER_TIMEOUT", 0.05)
    async with slow_and_fast(30, 5) as (core, slow, fast, connection):
        core.acknowledge(*await fast.count(5))
        assert await answered(connection, 5) == [*range(31, 36)]
        monkeypatch.setattr(answers, "ORDER_TIMEOUT", PATIENCE)
        deliver_v3(connection, range(36, 41), topic="fast")
        core.acknowledge(*(await fast.count(10))[5:])
        assert await answered(connection, 5) == [*range(36, 41)]  # at once
        core.acknowledge(slow.arrived[0])  # one moves up: from now on the others wait again
        assert await answered(connection, 1) == [1]
        deliver_v3(connection, range(41, 46), topic="fast")
        core.acknowledge(*(await fast.count(15))[10:])
        assert await connection.is_silent()
        core.acknowledge(*slow.arrived[1:])
        assert {*await answered(connection, 34)} == {*range(2, 31), *range(41, 46)}


async def test_messages_that_move_up_have_that_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ORDER_TIMEOUT", 0.2)
    async with slow_and_fast(40, 1) as (core, slow, fast, connection):
        core.acknowledge(*await fast.count(1))
        for number in range(20):
            await asyncio.sleep(0.05)  # sleeps: a stream that is slow, and not stuck
            core.acknowledge(slow.arrived[number])
            assert await answered(connection, 1) == [number + 1]
        core.acknowledge(slow.arrived[20])
        assert await answered(connection, 2) == [21, 41]


@asynccontextmanager
async def slow_and_fast(slow: int, fast: int) -> AsyncIterator[tuple[Core, Sink, Sink, Connection]]:
    """Two streams of one instance, and so many messages that the broker has sent for each."""
    async with session(**V3) as (core, _, connection):
        sinks = [(await subscribed(core, connection, each, qos="1"))[0] for each in ("slow", "fast")]
        deliver_v3(connection, range(1, slow + 1), topic="slow")
        deliver_v3(connection, range(slow + 1, slow + fast + 1), topic="fast")
        await sinks[0].count(slow)
        yield core, sinks[0], sinks[1], connection


async def test_resent_messages_of_a_3_1_1_session_are_answered_within_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mosquitto lets new messages overtake its queue where it is not so."""
    monkeypatch.setattr(answers, "ORDER_TIMEOUT", PATIENCE)
    async with resumed_with_lost_answers(25, 40) as (core, sink, connection):
        assert await connection.is_silent()
        core.acknowledge(*sink.arrived[:39:-1])
        held = [*range(1, 41)]
        for packet_id in await answered(connection, 40):
            assert held.index(packet_id) < 20
            held.remove(packet_id)


async def test_a_resent_message_without_a_stream_holds_up_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of a process that was killed: one of its subscriptions is not made again at once."""
    monkeypatch.setattr(answers, "ORDER_TIMEOUT", PATIENCE)
    async with Peer() as peer:
        core = Core(peer.url, **V3)
        connection, _ = await accept(core, peer, present=True)
        deliver_v3(connection, range(1, 11), flags=8, topic="gone")
        deliver_v3(connection, range(11, 21), flags=8)
        sink, _ = await subscribed(core, connection, qos="1")
        messages = [*await sink.count(10)]
        core.acknowledge(*messages)
        assert await answered(connection, 10) == [*range(11, 21)]
        late, _ = await subscribed(core, connection, "gone", qos="1")
        core.acknowledge(*await late.count(10))
        assert await answered(connection, 10) == [*range(1, 11)]
        await farewell(core, connection)


@table("qos", ["1", "2"])
@table("seed", range(3))
async def test_messages_may_be_acknowledged_by_hand_in_any_order_and_only_the_others_come_again(
    qos: str, seed: int
) -> None:
    chance = random.Random(seed)
    settings = {"client_id": "me", "clean_start": False, "session_expiry": 1000, "receive_maximum": 20}

    with Mosquitto() as broker:
        url = broker.url
        async with connected(url) as other:
            core = Core(url, **settings)
            await core.open()
            sink, _ = await core.subscribe("s", qos=qos)
            sent = [b"%d" % number for number in range(20)]
            for payload in sent:
                await other.publish("s", payload, qos=qos)
            messages = [*await sink.count(20)]
            done = chance.sample(messages, 12)
            for message in done:
                core.acknowledge(message)
                await asyncio.sleep(0)
            # one more for one that is done: when it is here, the broker has had the answers that were sent before
            await other.publish("s", b"mark", qos=qos)
            await sink.count(21)
            left = [message.payload for message in messages if message not in done] + [b"mark"]
            await core.adapter.close()
            core = Core(url, **settings)
            await core.open()
            again, _ = await core.subscribe("s", qos=qos)
            await again.count(len(left))
            await other.publish("s", b"end", qos=qos)
            await again.count(len(left) + 1)
            assert again.payloads == [*left, b"end"]
            core.acknowledge(*again.arrived)
            await core.adapter.close()

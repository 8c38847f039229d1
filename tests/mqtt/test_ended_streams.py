"""What the broker keeps for a session when a stream ends, and which consumer receives it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading

import pytest

from messaging import ConnectionLostError, DecodeError, Message, Messaging
from messaging.execution import engine
from messaging.testing.conformance.helpers import publish, receive, retried
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, observed, results
from messaging.testing.waiting import subscribed as subscribed_at
from messaging_adapters.mqtt import leftovers, packets
from tests.doubles.timers import LongTimers
from tests.mqtt.conftest import Connect, both_versions
from tests.mqtt.harness import Core, lasting
from tests.mqtt.peer import Peer, accept, farewell, reconnect, session, subscribed, unsubscribed


@table("is_awaited, is_answered", [(True, True), (False, True), (False, False)])
async def test_a_message_that_crosses_the_unsubscription_is_left_to_the_next_stream_of_the_session(
    *, is_awaited: bool, is_answered: bool
) -> None:
    async with session(client_id="me", clean_start=False, session_expiry=1000) as (core, peer, connection):
        other, _ = await subscribed(core, connection, "b")
        _, handle = await subscribed(core, connection, "a", qos="1")
        ending = asyncio.create_task(core.adapter.unsubscribe(handle))
        body = await connection.expect(0xA0)
        if not is_awaited:  # it takes too long
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        connection.deliver("a", b"crossed", 7, 1)
        connection.deliver("b", b"behind it")
        await other.count(1)
        if is_answered:
            connection.send(packets.UNSUBACK, body[:2] + b"\0\0")
        else:
            connection, _ = await reconnect(core, peer, connection, present=True)
            connection.deliver("a", b"crossed", 7, 1, 8)
        if is_awaited:
            await ending
        sink, _ = await subscribed(core, connection, "a", qos="1")  # no PUBACK before SUBSCRIBE
        await sink.count(1)
        assert [message.payload for message in sink.arrived] == [b"crossed"]
        core.acknowledge(*sink.arrived)
        assert await connection.expect(packets.PUBACK) == b"\0\x07"


@table("names_filter", [True, False])
async def test_a_message_assigned_to_a_member_of_a_queue_that_has_left_waits_for_its_next_stream(
    *, names_filter: bool
) -> None:
    """A broker may send what it had queued for the member. Acknowledged, it would be lost to the queue."""
    async with session(client_id="me", clean_start=False, session_expiry=1000) as (core, _, connection):
        other, _ = await subscribed(core, connection, "b")
        subscribing = asyncio.create_task(core.subscribe("a", qos="1", queue="q"))
        subscribe = await connection.suback()
        properties = subscribe[2 : 3 + subscribe[2]] if names_filter else b"\0"  # the identifier of the subscription
        await unsubscribed(core, connection, (await subscribing)[1])
        connection.send(packets.PUBLISH | 2, packets.text("a") + b"\0\x07" + properties + b"late")
        connection.deliver("b", b"behind it")
        await other.count(1)
        sink, _ = await subscribed(core, connection, "a", qos="1", queue="q")  # no PUBACK before SUBSCRIBE
        await sink.count(1)
        assert sink.payloads == [b"late"]
        core.acknowledge(*sink.arrived)
        assert await connection.expect(packets.PUBACK) == b"\0\x07"


async def test_messages_of_queues_that_were_left_hold_up_other_streams_once(
    long_timers: LongTimers, caplog: pytest.LogCaptureFixture
) -> None:
    async with session(client_id="me", clean_start=False, session_expiry=1000, receive_maximum=2) as opened:
        core, _, connection = opened
        other, _ = await subscribed(core, connection, "b", qos="1")
        _, handle = await subscribed(core, connection, "a", qos="1", queue="q")
        await unsubscribed(core, connection, handle)
        for number in (1, 2):
            connection.deliver("a", b"late", number, 1)
        connection.deliver("b", b"behind them")
        await other.count(1)
        long_timers.elapse()
        assert {await connection.expect(packets.PUBACK) for _ in range(2)} == {b"\0\x01", b"\0\x02"}
        assert "fill the window of 2 messages: 2 are acknowledged" in caplog.text
        connection.deliver("a", b"later", 3, 1)
        assert await connection.expect(packets.PUBACK) == b"\0\x03"


@table(
    "queue, end",
    {
        "kept": (None, "detach"),
        "kept, in a queue": ("q", "detach"),
        "unsubscribed": (None, "unsubscribe"),
        "unsubscribed, in a queue": ("q", "unsubscribe"),
    },
)
async def test_messages_of_an_ending_stream_go_to_a_stream_that_has_subscribed_meanwhile(
    queue: str | None, end: str
) -> None:
    options = {} if queue is None else {"queue": queue}
    async with session(client_id="me", clean_start=False, session_expiry=1000) as (core, _, connection):
        first, handle = await subscribed(core, connection, "a", qos="1", **options)
        connection.deliver("a", b"1", 7, 1)
        await first.count(1)
        if queue is None:
            second, _ = await subscribed(core, connection, "a", qos="1")
        else:  # no SUBSCRIBE: the broker has the subscription
            second, _ = await core.subscribe("a", qos="1", queue=queue)
        ended = getattr(core.adapter, end)(handle)
        if ended is not None:
            await ended
        await second.count(1)
        core.acknowledge(*second.arrived)
        assert await connection.expect(packets.PUBACK) == b"\0\x07"
        assert [message.payload for message in second.arrived] == [b"1"]


@table("where", ["ended stream", "resumed session"])
async def test_messages_left_to_the_next_stream_survive_a_connection_that_is_lost_while_it_subscribes(
    peer: Peer, where: str
) -> None:
    core = Core(peer.url, client_id="me", clean_start=False, session_expiry=1000)
    connection, _ = await accept(core, peer, present=where == "resumed session")
    if where == "ended stream":
        sink, handle = await subscribed(core, connection, "a", qos="1")
        connection.deliver("a", b"left", 7, 1)
        await sink.count(1)
        await unsubscribed(core, connection, handle)
    else:
        connection.deliver("a", b"left", 7, 1)
    subscribing = asyncio.create_task(core.subscribe("a", qos="1"))
    await connection.expect(0x80)
    connection, _ = await reconnect(core, peer, connection, present=True)
    with pytest.raises(ConnectionLostError):
        await subscribing
    connection.deliver("a", b"left", 7, 1, 8)  # again
    sink, _ = await subscribed(core, connection, "a", qos="1")  # no PUBACK before SUBSCRIBE
    await sink.count(1)
    core.acknowledge(*sink.arrived)
    assert await connection.expect(packets.PUBACK) == b"\0\x07"
    await farewell(core, connection)


@table("where", ["ended stream", "resumed session"])
async def test_messages_kept_over_a_connection_come_behind_those_sent_again_in_front_of_them(
    peer: Peer, where: str
) -> None:
    """The answers to the first ones were lost with the connection: the broker sends them again, at the old place."""
    core = Core(peer.url, client_id="me", clean_start=False, session_expiry=1000)
    connection, _ = await accept(core, peer, present=where == "resumed session")
    other, _ = await subscribed(core, connection, "b", qos="0")
    if where == "ended stream":
        sink, handle = await subscribed(core, connection, "a", qos="1")
        for number in (1, 2, 3):
            connection.deliver("a", b"%d" % number, number, 1)
        await sink.count(3)
        core.acknowledge(*sink.arrived[:2])
        assert [await connection.expect(packets.PUBACK) for _ in range(2)] == [b"\0\x01", b"\0\x02"]
        await unsubscribed(core, connection, handle)
    else:
        connection.deliver("a", b"3", 3, 1)
    connection.deliver("b", b"behind it")
    await other.count(1)
    connection, _ = await reconnect(core, peer, connection, present=True)
    for number in (1, 2, 3, 4):
        connection.deliver("a", b"%d" % number, number, 1, 8)
    connection.deliver("b", b"behind them")
    await other.count(2)
    sink, _ = await subscribed(core, connection, "a", qos="1")
    await sink.count(4)
    assert sink.payloads == [b"1", b"2", b"3", b"4"]
    core.acknowledge(*sink.arrived)
    assert [await connection.expect(packets.PUBACK) for _ in range(4)] == [bytes([0, each]) for each in (1, 2, 3, 4)]
    await farewell(core, connection)


async def test_messages_of_a_resumed_session_wait_for_a_stream_whose_first_attempt_was_lost(peer: Peer) -> None:
    core = Core(peer.url, client_id="me", clean_start=False, session_expiry=1000)
    connection, _ = await accept(core, peer, present=False)
    other, _ = await subscribed(core, connection, "b", qos="0")
    subscribing = asyncio.create_task(core.subscribe("a", qos="1"))
    await connection.expect(0x80)  # the broker has the subscription, and this connection never learns it
    connection, _ = await reconnect(core, peer, connection, present=True)
    with pytest.raises(ConnectionLostError):
        await subscribing
    connection.deliver("a", b"meanwhile", 7, 1)
    connection.deliver("b", b"behind it")
    await other.count(1)
    sink, _ = await subscribed(core, connection, "a", qos="1")  # no PUBACK before SUBSCRIBE
    await sink.count(1)
    core.acknowledge(*sink.arrived)
    assert await connection.expect(packets.PUBACK) == b"\0\x07"


@table("names_filter", [True, False])
async def test_a_message_of_a_lost_attempt_waits_although_an_ended_stream_matches_it(
    peer: Peer, *, names_filter: bool
) -> None:
    """A broker that has restored the session may send one copy for both, which names either."""
    core = Core(peer.url, client_id="me", clean_start=False, session_expiry=1000)
    connection, _ = await accept(core, peer, present=False)
    other, _ = await subscribed(core, connection, "b")
    await unsubscribed(core, connection, (await subscribed(core, connection, "a/b", qos="1"))[1])
    subscribing = asyncio.create_task(core.subscribe("a/+", qos="1"))
    subscribe = await connection.expect(0x80)
    properties = subscribe[2 : 3 + subscribe[2]] if names_filter else b"\0"  # the identifier of the subscription
    connection, _ = await reconnect(core, peer, connection, present=True)
    with pytest.raises(ConnectionLostError):
        await subscribing
    for number in (b"\0\x07", b"\0\x08"):
        connection.send(packets.PUBLISH | 2, packets.text("a/b") + number + properties + b"meanwhile")
    connection.deliver("b", b"behind them")
    await other.count(1)
    sink, _ = await subscribed(core, connection, "a/+", qos="1")
    await sink.count(2)
    core.acknowledge(*sink.arrived)
    sink, _ = await subscribed(core, connection, "a/b", qos="1")
    core.acknowledge(*await sink.count(2))
    assert [await connection.expect(packets.PUBACK) for _ in range(2)] == [b"\0\x07", b"\0\x08"]
    await farewell(core, connection)


async def test_messages_that_a_second_connection_resumes_are_claimed_or_dropped(
    peer: Peer, long_timers: LongTimers
) -> None:
    """They come again as duplicates of messages that are held: unanswered, they would fill the window for ever."""
    core = Core(peer.url, client_id="me", clean_start=False, session_expiry=1000)
    connection, _ = await accept(core, peer, present=True)
    other, _ = await subscribed(core, connection, "c", qos="0")
    connection.deliver("a", b"for a later stream", 7, 1)
    connection.deliver("b", b"for none", 8, 1)
    connection.deliver("c", b"behind them")
    await other.count(1)
    connection, _ = await reconnect(core, peer, connection, present=True)
    connection.deliver("a", b"for a later stream", 7, 1, 8)
    connection.deliver("b", b"for none", 8, 1, 8)
    sink, _ = await subscribed(core, connection, "a", qos="1")
    await sink.count(1)
    core.acknowledge(*sink.arrived)
    long_timers.elapse()
    assert {await connection.expect(packets.PUBACK), await connection.expect(packets.PUBACK)} == {b"\0\x07", b"\0\x08"}
    await farewell(core, connection)


def test_a_closed_instance_does_not_warn_of_messages_left_in_the_window(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "LEFT_TIMEOUT", 0.7)
    m, other = connect(receive_maximum=2, **lasting("5")), connect()
    subscribed_at(m, "b", qos=1)
    with m.subscribe("a", qos=1) as stream:
        publish(other, "a", [b"1", b"2"], qos=1)
        eventually(lambda: stream.counters.received == 2, "all there")
    m.close()
    over: Recorder[None] = Recorder()
    engine().call(engine().loop.call_later, 0.8, over, None)  # after the warning would have come
    over.wait_for(1)
    assert "fill the window" not in caplog.text


@table("qos", [1, 2])
@table("where", ["stream", "instance"])
@both_versions
def test_an_observer_that_raises_leaves_its_messages_to_the_next_consumer_of_the_session(
    connect: Connect, version: str, where: str, qos: int
) -> None:
    settings = lasting(version)
    m, other = connect(**settings), connect()
    published = threading.Event()

    def fail(message: Message) -> None:
        if message.payload == b"2":
            published.wait(PATIENCE)
            raise ValueError("this one")

    stream = m.subscribe("a", qos=qos, max_deliveries=3, dead_letter_channel="dead")
    failing = observed(stream, fail)
    publish(other, "a", [b"1", b"2", b"3"], qos=qos)
    published.set()
    failing.wait_ended()
    stream.close().result(PATIENCE)
    if where == "instance":
        m.close()
        m = connect(**settings)
    with m.subscribe("a", qos=qos) as rest:
        found = [rest.receive(PATIENCE) for _ in range(2)]
        assert sorted(message.payload for message in found) == [b"2", b"3"]
        assert all(message.context.extensions["redelivered"] for message in found)
    assert stream.counters.dropped == 0
    assert stream.counters.dead_lettered == 0


@table("how", ["exception", "invalid", "break"])
@both_versions
def test_an_iterator_leaves_its_unsettled_messages_to_the_next_consumer_of_the_session(
    connect: Connect, version: str, how: str
) -> None:
    settings = lasting(version)
    m, other = connect(**settings), connect()
    second = b'"x"' if how == "invalid" else b"2"
    raised = {"exception": pytest.raises(ValueError, match="enough"), "invalid": pytest.raises(DecodeError)}
    with (
        raised.get(how, contextlib.nullcontext()),
        m.subscribe("a", model=int if how == "invalid" else None, on_invalid="raise", qos=1) as stream,
    ):
        publish(other, "a", [b"1", second, b"3"], qos=1)
        stream.receive(PATIENCE)
        eventually(lambda: stream.counters.received == 3, "all there")
        stream.receive(PATIENCE)
        if how == "exception":
            raise ValueError("enough")
    m.close()
    m = connect(**settings)
    with m.subscribe("a", qos=1) as rest:
        expected = [b"3"] if how == "break" else [second, b"3"]
        assert sorted(receive(rest, len(expected))) == sorted(expected)


@table("kept", [True, False])
@both_versions
def test_retry_gets_the_message_again_with_or_without_a_session(connect: Connect, version: str, kept: bool) -> None:
    settings = lasting(version) if kept else {"version": version}
    m, other = connect(**settings), connect()
    stream = m.subscribe("a", qos=1)
    seen = retried(stream, [b"2", b"4"])
    for payload in (b"1", b"2", b"3", b"4"):
        publish(other, "a", [payload], qos=1)
    eventually(lambda: sorted(seen) == [b"1", b"2", b"2", b"3", b"4", b"4"], "all, and two of them again")
    assert stream.counters.dropped == 0


@both_versions
def test_messages_left_in_the_window_are_dropped_with_a_warning_where_they_hold_up_other_streams(
    connect: Connect, version: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "LEFT_TIMEOUT", 0.05)
    m, other = connect(receive_maximum=4, **lasting(version)), connect()
    with m.subscribe("b", qos=1) as stays:
        with m.subscribe("a", qos=1) as stream:
            publish(other, "a", [b"%d" % number for number in range(4)], qos=1)
            eventually(lambda: stream.counters.received == 4, "all there")
        publish(other, "b", [b"1"], qos=1)
        assert receive(stays, 1) == [b"1"]
    told = [record.getMessage() for record in caplog.records if "fill the window" in record.getMessage()]
    if version == "5":  # mosquitto is not told the limit with 3.1.1, and sends more
        assert len(told) == 1


@table("is_shared", [False, True])
@both_versions
def test_messages_that_the_broker_had_queued_for_a_closed_stream_wait_for_the_next_one(
    connect: Connect, version: str, is_shared: bool
) -> None:
    """The broker sends them after UNSUBACK, when another stream has emptied the window."""
    m, other = connect(receive_maximum=20, **lasting(version)), connect()
    queue = secrets.token_hex(6) if is_shared else None
    with m.subscribe("a", acknowledge="manual", qos=1) as stays:
        stays.ready.result(PATIENCE)
        stream = m.subscribe("b", qos=1, queue=queue)
        stream.ready.result(PATIENCE)
        publish(other, "a", [b"fills the window"] * 20, qos=1)
        publish(other, "b", [b"1", b"2"], qos=1)
        publish(other, "a", [b"behind them"], qos=1)
        stream.close().result(PATIENCE)
        for _ in range(20):
            stays.receive(PATIENCE).acknowledge()
        assert receive(stays, 1) == [b"behind them"]
        with m.subscribe("b", qos=1, queue=queue) as stream:
            assert receive(stream, 2) == [b"1", b"2"]


async def test_messages_that_arrive_for_a_closed_stream_hold_up_the_others_once(long_timers: LongTimers) -> None:
    settings = {"client_id": "me", "clean_start": False, "session_expiry": 1000, "receive_maximum": 2}
    async with session(**settings) as (core, _, connection):
        other, _ = await subscribed(core, connection, "other", qos="1")
        _, handle = await subscribed(core, connection, "a", qos="1")
        await unsubscribed(core, connection, handle)
        connection.deliver("a", b"1", 1, 1)
        connection.deliver("a", b"2", 2, 1)
        connection.deliver("other", b"behind them")
        await other.count(1)
        long_timers.elapse()
        assert {await connection.expect(packets.PUBACK) for _ in range(2)} == {b"\0\x01", b"\0\x02"}
        connection.deliver("a", b"3", 3, 1)
        assert await connection.expect(packets.PUBACK) == b"\0\x03"


@both_versions
async def test_a_stream_that_ends_a_kept_subscription_holds_up_the_others_for_a_limited_time(
    peer: Peer, version: str, long_timers: LongTimers
) -> None:
    core = Core(peer.url, receive_maximum=2, **lasting(version))
    connection, _ = await accept(core, peer, present=False)
    await subscribed(core, connection, "other", qos="1")
    _, handle = await subscribed(core, connection, "a", qos="1")
    core.adapter.detach(handle)
    sink, handle = await subscribed(core, connection, "a", qos="1")
    for number in (b"\x01", b"\x02"):
        properties = b"\0" * core.adapter.settings.v5
        connection.send(packets.PUBLISH | 1 << 1, packets.text("a") + b"\0" + number + properties + number)
    await sink.count(2)
    await unsubscribed(core, connection, handle)
    long_timers.elapse()
    assert {await connection.expect(packets.PUBACK) for _ in range(2)} == {b"\0\x01", b"\0\x02"}
    await farewell(core, connection)


# --- kept subscriptions


async def test_an_attempt_that_is_cancelled_leaves_a_kept_subscription_its_messages() -> None:
    async with session(client_id="me", clean_start=False, session_expiry=60) as (core, _, connection):
        other, _ = await subscribed(core, connection, "other")
        _, handle = await subscribed(core, connection, "t", qos="1")
        core.adapter.detach(handle)
        subscribing = asyncio.create_task(core.subscribe("t", qos="1"))
        body = await connection.expect(0x80)
        subscribing.cancel()
        await asyncio.wait([subscribing])
        connection.send(0x90, body[:2] + b"\0\1")
        connection.deliver("t", b"meanwhile", 1, 1)
        connection.deliver("other", b"behind it")
        await other.count(1)
        sink, _ = await subscribed(core, connection, "t", qos="1")  # no PUBACK before SUBSCRIBE
        await sink.count(1)
        core.acknowledge(*sink.arrived)
        assert await connection.expect(packets.PUBACK) == b"\0\x01"


@table("qos", [None, 2])
@both_versions
def test_a_kept_subscription_stays_when_its_stream_is_closed(
    connect: Connect, version: str, qos: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = lasting(version)
    options = {} if qos is None else {"qos": qos}
    other = connect()
    with connect(**settings) as m, m.subscribe("a", keep_subscription=True, **options) as stream:
        publish(other, "a", [b"1"], qos=2)
        assert stream.receive(PATIENCE).payload == b"1"
    publish(other, "a", [b"2", b"3"], qos=2)
    with connect(**settings) as m, m.subscribe("a", keep_subscription=True, **options) as stream:
        assert receive(stream, 2) == [b"2", b"3"]
    assert not [record for record in caplog.records if "keep_subscription=True" in record.getMessage()]


@both_versions
def test_messages_for_the_kept_subscription_of_a_closed_stream_wait_for_the_next_stream(
    connect: Connect, version: str
) -> None:
    other, m = connect(), connect(**lasting(version))
    with m.subscribe("a", keep_subscription=True):
        pass
    publish(other, "a", [b"1", b"2"], qos=1)
    with m.subscribe("a", keep_subscription=True) as stream:
        assert receive(stream, 2) == [b"1", b"2"]
        publish(other, "a", [b"3"], qos=1)
        assert receive(stream, 1) == [b"3"]


@table("is_resumed", [False, True])
@both_versions
def test_messages_for_a_kept_subscription_wait_although_another_stream_takes_them(
    connect: Connect, version: str, is_resumed: bool
) -> None:
    """A broker that has resumed a session may send one copy of a message for all its filters."""
    other, settings = connect(), lasting(version)
    if is_resumed:
        with connect(**settings) as m, m.subscribe("a/+", keep_subscription=True):
            pass
    m = connect(**settings)
    with m.subscribe("a/+", keep_subscription=True):
        pass
    with m.subscribe("a/b", keep_subscription=True) as another:
        publish(other, "a/b", [b"1", b"2"], qos=1)
        assert receive(another, 2) == [b"1", b"2"]
        with m.subscribe("a/+", keep_subscription=True) as stream:
            assert receive(stream, 2) == [b"1", b"2"]
            publish(other, "a/b", [b"3"], qos=1)
            assert (receive(stream, 1), receive(another, 1)) == ([b"3"], [b"3"])


@table("is_shared", [False, True])
@table("is_resumed", [False, True])
@both_versions
def test_a_message_for_two_kept_subscriptions_waits_once_for_each(
    connect: Connect, version: str, is_resumed: bool, is_shared: bool
) -> None:
    """A broker sends one copy for each of them, or one for both."""
    other, settings = connect(), lasting(version)
    top = f"test-{secrets.token_hex(6)}"
    queues = {f"{top}/#": None, f"{top}/+": top if is_shared else None}

    def keep(m: Messaging) -> None:
        for channel, queue in queues.items():
            with m.subscribe(channel, keep_subscription=True, queue=queue) as stream:
                stream.ready.result(PATIENCE)

    if is_resumed:
        with connect(**settings) as m:
            keep(m)
    m = connect(**settings)
    keep(m)
    with m.subscribe(f"behind/{top}", qos=1) as behind:
        publish(other, f"{top}/a", [b"1", b"2"], qos=1)
        publish(other, f"behind/{top}", [b"behind them"], qos=1)
        assert receive(behind, 1) == [b"behind them"]
    for channel, queue in queues.items():
        with m.subscribe(channel, keep_subscription=True, queue=queue) as stream:
            publish(other, f"{top}/a", [b"3"], qos=1)
            assert receive(stream, 3) == [b"1", b"2", b"3"]


@both_versions
async def test_messages_for_a_kept_subscription_wait_for_a_stream_that_was_closed_without_a_connection_too(
    peer: Peer, version: str
) -> None:
    settings = lasting(version)
    core = Core(peer.url, **settings)
    connection, _ = await accept(core, peer, present=False)
    _, kept = await subscribed(core, connection, "a/+", qos="1")
    _, ended = await subscribed(core, connection, "a/#", qos="1")
    other, _ = await subscribed(core, connection, "b", qos="0")
    core.adapter.detach(kept)
    connection.abort()
    await core.lost()
    await core.adapter.unsubscribe(ended)
    connection, _ = await accept(core, peer, present=True)
    properties = b"\0" * core.adapter.settings.v5
    connection.send(packets.PUBLISH | 1 << 1, packets.text("a/b") + b"\0\x07" + properties + b"meanwhile")
    connection.send(packets.PUBLISH, packets.text("b") + properties + b"behind it")
    await other.count(1)
    for channel in ("a/+", "a/#"):
        sink, _ = await subscribed(core, connection, channel, qos="1")  # no PUBACK before SUBSCRIBE
        await sink.count(1)
        assert [message.payload for message in sink.arrived] == [b"meanwhile"]
        core.acknowledge(*sink.arrived)
    assert await connection.expect(packets.PUBACK) == b"\0\x07"
    await farewell(core, connection)


@both_versions
def test_a_kept_subscription_is_ended_by_a_stream_that_does_not_keep_it(connect: Connect, version: str) -> None:
    settings = lasting(version)
    other = connect()
    with connect(**settings) as m, m.subscribe("a", keep_subscription=True):
        pass
    with connect(**settings) as m, m.subscribe("a", qos=1):
        pass
    publish(other, "a", [b"1"], qos=1)
    with connect(**settings) as m, m.subscribe("a", qos=1) as stream:
        publish(other, "a", [b"2"], qos=1)
        assert receive(stream, 1) == [b"2"]


@both_versions
def test_closing_the_only_stream_of_a_session_is_warned_of_once(
    connect: Connect, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    m = connect(**lasting(version))
    for channels in (("a", "b"), ("c",)):
        streams = [m.subscribe(channel, qos=1) for channel in channels]
        results(stream.ready for stream in streams)
        for stream in streams:
            stream.close().result(PATIENCE)
    told = [record.getMessage() for record in caplog.records if "keep_subscription=True" in record.getMessage()]
    assert len(told) == 1
    assert "'b'" in told[0]

"""A broker that misbehaves: a typed error or a clean loss, nothing hung, and at most one line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import pytest
from pamqp import commands
from pamqp.commands import Basic

import messaging
from messaging.errors import (
    BrokerError,
    ConnectFailedError,
    ConnectionLostError,
    PublishRefusedError,
    SubscriptionRefusedError,
)
from messaging.model import as_text
from messaging.testing.tables import table
from messaging.testing.waiting import Recorder, eventually_async, within
from messaging_adapters.amqp import frames
from tests.amqp.harness import Client, Sink, make_adapter
from tests.amqp.peer import FRAME_MAX, Peer, Session, client_of, consuming, opened
from tests.amqp.test_publisher import outcomes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.amqp.harness import Out

    Quiet = Callable[[], None]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], None]]:
    """No traceback, nothing of aiormq's, and at most one line of ours: a function that checks it, and begins anew."""
    caplog.set_level(logging.INFO)

    def check(records: list[logging.LogRecord]) -> None:
        loud = [record for record in records if record.levelno > logging.INFO]
        assert len(loud) <= 1, [record.getMessage() for record in loud]
        assert not any(record.exc_info for record in records)
        assert not any(record.name.startswith(("aiormq", "asyncio")) for record in loud)
        records.clear()

    yield lambda: check(caplog.records)
    check(caplog.get_records("call"))


@contextlib.asynccontextmanager
async def talk(quiet: Quiet) -> AsyncIterator[tuple[Client, Peer]]:
    """A client that is not connected yet, and its broker, of one row of a table."""
    async with Peer() as peer, client_of(peer) as client:
        yield client, peer
    quiet()


@pytest.fixture
def client(peer: Peer) -> AbstractAsyncContextManager[Client]:
    """A client that is not connected yet. Tests name ``peer`` first, so that it listens by then."""
    return client_of(peer)


async def subscribed(client: Client, peer: Peer, **options: Any) -> tuple[Sink, Session, int]:
    """Connect and subscribe; see :func:`consuming`."""
    await opened(client, peer)
    return await consuming(client, peer, **options)


async def published(client: Client, peer: Peer, count: int, **extensions: Any) -> tuple[list[Out], Session, int]:
    session = await opened(client, peer)
    batch = [client.message("c", b"x", extensions=extensions) for _ in range(count)]
    publishing = asyncio.create_task(client.adapter.publish(batch))
    channel = await session.published(count)
    await publishing
    return batch, session, channel


# --- while connecting


async def test_silence_after_accepting_ends_with_the_attempt(peer: Peer, client: Client) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await client.open()
    assert await (await peer.session()).end() == b"AMQP\x00\x00\x09\x01"


async def test_silence_in_the_middle_of_the_handshake_ends_with_the_attempt(peer: Peer, client: Client) -> None:
    opening = asyncio.create_task(client.open())
    session = await peer.session()
    await session.greet()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await session.end()


async def test_a_connection_closed_while_it_is_opened_is_refused_in_the_brokers_words(
    peer: Peer, client: Client
) -> None:
    opening = asyncio.create_task(client.open())
    session = await peer.session()
    await session.greet()
    session.close_reason(530, "NOT_ALLOWED - too many connections")
    with pytest.raises(ConnectFailedError, match="530 NOT_ALLOWED - too many connections") as caught:
        await opening
    assert (caught.value.code, caught.value.detail) == (530, "NOT_ALLOWED - too many connections")


@table(
    "says, what",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak AMQP"),
        (b"AMQP\x00\x01\x00\x00", "does not speak AMQP"),
        (b"", "the peer closed it"),
        (frames.PREFIX.pack(frames.METHOD, 0, 4) + b"\x00\x0a\x00\xff\xce", "does not speak AMQP"),  # no such method
        (frames.PREFIX.pack(frames.METHOD, 0, 4) + b"\x00\x0a\x00\x0a\xce", "does not speak AMQP"),  # start is cut off
        (frames.PREFIX.pack(frames.METHOD, 0, 2**31), "does not speak AMQP"),
        (b"\x00" * 50, "does not speak AMQP"),
    ],
)
async def test_opening_fails_if_the_peer_is_no_broker(quiet: Quiet, says: bytes, what: str) -> None:
    async with talk(quiet) as (client, peer):
        opening = asyncio.create_task(client.open())
        session = await peer.session()
        session.write(says)
        session.close()
        with pytest.raises(ConnectFailedError, match=what):
            await opening


@table("offered, agreed", [(0, 2**20), (2**31, 2**20), (2**20 + 1, 2**20), (2**20, 2**20), (8192, 8192)])
async def test_frames_are_bounded_for_any_offer_of_the_broker(quiet: Quiet, offered: int, agreed: int) -> None:
    """0 stands for no limit."""
    async with talk(quiet) as (client, peer):
        opening = asyncio.create_task(client.open())
        session = await peer.session()
        assert await session.greet(offered) == agreed
        session.send(commands.Connection.OpenOk())
        await within(opening)
        session.write(frames.PREFIX.pack(frames.BODY, 1, agreed))
        with pytest.raises(ConnectionLostError, match=f"a frame of {agreed} bytes; at most {agreed - 8}"):
            raise await client.lost()


@table("offered", [1, 8, 4095])
async def test_a_broker_that_takes_only_tiny_frames_is_refused(quiet: Quiet, offered: int) -> None:
    async with talk(quiet) as (client, peer):
        opening = asyncio.create_task(client.open())
        await (await peer.session()).open(offered)
        with pytest.raises(ConnectFailedError, match=f"it takes frames of {offered} bytes; AMQP 0-9-1 asks for 4096"):
            await within(opening)


async def test_a_broker_without_publisher_confirms_is_refused(quiet: Quiet) -> None:
    async with talk(quiet) as (client, peer):
        opening = asyncio.create_task(client.open())
        session = await peer.session()
        session.capabilities = {}  # type: ignore[misc]  # of this one alone
        await session.greet()
        session.send(commands.Connection.OpenOk())
        with pytest.raises(ConnectFailedError, match="no publisher confirms"):
            await within(opening)


async def test_connections_carry_the_name_of_the_instance(peer: Peer) -> None:
    async with client_of(peer, name="plant 7") as client:
        publishing = await opened(client, peer)
        _, session, _ = await consuming(client, peer)
    assert (publishing.client_name, session.client_name) == ("plant 7 (publishing)", "plant 7 (consuming)")


async def test_an_odd_virtual_host_and_a_password_that_is_shown_nowhere(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "s3cr3t/pässwörd%"
    client = Client(make_adapter(f"{peer.url}/a%2Fb%20%252F", username="odd user", password=secret))
    session = await opened(client, peer)
    assert session.vhost == "a/b %2F"
    assert session.login == f"\0odd user\0{secret}"
    shown = [repr(vars(thing)) for thing in (client.adapter, client.adapter._connector, client.link)]
    await client.adapter.close()
    assert "s3cr3t" not in "".join(shown)
    assert caplog.records
    assert "s3cr3t" not in caplog.text


# --- declarations


async def test_more_channels_than_the_broker_allows_are_refused_and_the_others_live(peer: Peer, client: Client) -> None:
    await opened(client, peer)
    subscribing = asyncio.create_task(client.subscribe("c"))
    session = await (await peer.session()).open(channel_max=2)
    await session.consumer()
    await subscribing
    (sink, _), channel = await asyncio.gather(client.subscribe("c"), session.consumer())
    with pytest.raises(SubscriptionRefusedError, match="allows 2 channels"):
        await client.subscribe("c")
    session.send(DELIVER, channel)
    session.content(channel, b"\0\0", b"x")
    await sink.count(1)
    assert client.losses == []


async def test_a_user_who_may_not_consume_is_refused_and_leaves_no_queue(peer: Peer, client: Client) -> None:
    await opened(client, peer)
    sink = Sink()
    subscribing = asyncio.create_task(client.subscribe("c", sink=sink))
    session = await (await peer.session()).open()
    channel, _ = await session.answer()
    session.send(commands.Channel.Close(403, "ACCESS_REFUSED", 60, 20), channel)
    with pytest.raises(SubscriptionRefusedError, match="403 ACCESS_REFUSED"):
        await subscribing
    await session.expect(commands.Channel.CloseOk)
    channel, frame = await session.answer()
    assert isinstance(frame, commands.Queue.Delete)
    assert frame.queue == "q"
    session.send(commands.Queue.DeleteOk(0), channel)
    assert isinstance((await session.frame())[1], commands.Channel.Close)
    assert (sink.failures, client.losses) == (0, [])


async def test_a_queue_that_is_another_one_is_refused_with_its_declaration_and_the_ways_out(
    peer: Peer, client: Client
) -> None:
    """Declared by another program between the question whether it exists and the declaration."""
    await opened(client, peer)
    subscribing = asyncio.create_task(client.subscribe("c", queue="q", maxLength=5))
    session = await (await peer.session()).open()
    for code, text in ((404, "NOT_FOUND"), (406, "PRECONDITION_FAILED - inequivalent arg 'x-max-length' for q")):
        channel, _ = await session.expect(commands.Channel.Open)
        session.send(commands.Channel.OpenOk(), channel)
        await session.expect(commands.Queue.Declare)
        session.send(commands.Channel.Close(code, text, 50, 10), channel)
        await session.expect(commands.Channel.CloseOk)
    with pytest.raises(
        SubscriptionRefusedError, match="inequivalent arg 'x-max-length' for q; declared here"
    ) as caught:
        await within(subscribing)
    assert (caught.value.code, caught.value.detail) == (406, text)
    for words in ("durable=True", "{'x-max-length': 5}", "declare='passive'", "delete it"):
        assert words in str(caught.value)


# --- deliveries


def nested(depth: int) -> bytes:
    """A header table in a header table and so on, as properties on the wire."""
    table = b""
    for _ in range(depth):
        table = b"\x01n" + b"F" + struct.pack(">I", len(table)) + table
    return struct.pack(">H", 1 << 13) + struct.pack(">I", len(table)) + table


@table(
    "properties, value",
    {
        "nested ten thousand times": (nested(10_000), lambda found: "<nested too deeply>" in as_text(found["headers"])),
        "malformed": (b"\xff\xfe\xff", lambda found: dict(found) == {}),
    },
)
async def test_a_message_is_delivered_whatever_its_properties(
    quiet: Quiet, properties: bytes, value: Callable[[Any], bool]
) -> None:
    async with talk(quiet) as (client, peer):
        sink, session, channel = await subscribed(client, peer)
        session.send(Basic.Deliver("t", 1, False, "amq.topic", "c"), channel)
        session.content(channel, properties, b"x")
        arrived = await sink.next()
        assert arrived.payload == b"x"
        assert value(arrived.extensions)
        assert client.losses == []


DELIVER = Basic.Deliver("t", 1, False, "amq.topic", "c")


def raw(kind: int, payload: bytes) -> Callable[[Session, int], None]:
    def send(session: Session, channel: int) -> None:
        session.write(frames.PREFIX.pack(kind, channel, len(payload)) + payload + b"\xce")

    return send


def announced(session: Session, channel: int, size: int) -> None:
    """A content header of ``size`` bytes of content."""
    raw(frames.HEADER, struct.pack(">HHQH", 60, 0, size, 0))(session, channel)


@table("sizes", [[1] * 1000, [3, 1, 200] * 30, [2, 70_000]])
async def test_a_payload_in_many_frames_is_delivered_whole(quiet: Quiet, sizes: list[int]) -> None:
    async with talk(quiet) as (client, peer):
        sink, session, channel = await subscribed(client, peer)
        payload = bytes(number % 251 for number in range(sum(sizes)))
        for _ in range(2):
            session.send(DELIVER, channel)
            announced(session, channel, len(payload))
            at = 0
            for size in sizes:
                raw(frames.BODY, payload[at : at + size])(session, channel)
                at += size
        await sink.count(2)
        assert sink.payloads == [payload] * 2


@table(
    "says, why",
    [
        (raw(frames.METHOD, b"\x00\x3c\x00\x3c"), "malformed frame"),
        (raw(frames.METHOD, b"\x00\x3c\x00\xfe"), r"unexpected method 60\.254"),
        (raw(frames.METHOD, b"\xff"), "unexpected|malformed"),
        (raw(frames.METHOD, b"\x00\x14\x00\x0b\xff\xff"), "malformed frame"),
        (raw(frames.BODY, b"abc"), "unexpected content"),
        (raw(frames.HEADER, b"abc"), "unexpected content"),
        (raw(frames.BODY, b"x" * FRAME_MAX), f"a frame of {FRAME_MAX} bytes; at most {FRAME_MAX - 8}"),
        (lambda session, _: session.write(b"\x05garbage, and more of it"), "no frame"),
        (lambda session, channel: session.send(Basic.Ack(1), channel), r"unexpected method 60\.80"),
        (lambda session, channel: session.send(commands.Tx.SelectOk(), channel), r"unexpected method 90\.11"),
        (lambda session, channel: session.send(commands.Tx.SelectOk(), 77), r"unexpected method 90\.11 on channel 77"),
        (lambda session, channel: (session.send(DELIVER, channel), raw(frames.HEADER, b"ab")(session, channel)),
         "malformed frame"),
        (lambda session, channel: (session.send(DELIVER, channel), raw(frames.BODY, b"ab")(session, channel)),
         "unexpected content"),
        (lambda session, channel: (session.send(DELIVER, channel),
                                   raw(frames.HEADER, b"\x00\x3c\x00\x00" + b"\xff" * 8 + b"\0\0")(session, channel)),
         "malformed frame"),
        (lambda session, channel: (session.send(DELIVER, channel), announced(session, channel, 2),
                                   raw(frames.BODY, b"")(session, channel)),
         "malformed frame"),
        (lambda session, channel: (session.send(DELIVER, channel), announced(session, channel, 2),
                                   raw(frames.BODY, b"abc")(session, channel)),
         "malformed frame"),
        (lambda session, channel: (session.send(DELIVER, channel), announced(session, channel, 3),
                                   raw(frames.BODY, b"ab")(session, channel),
                                   raw(frames.BODY, b"cd")(session, channel)),
         "malformed frame"),
    ],
)  # fmt: skip
async def test_a_frame_that_does_not_belong_there_is_a_loss_that_says_so(
    quiet: Quiet, says: Callable[[Session, int], object], why: str
) -> None:
    async with talk(quiet) as (client, peer):
        sink, session, channel = await subscribed(client, peer)
        says(session, channel)
        lost = await client.lost()
        assert isinstance(lost, ConnectionLostError)
        with pytest.raises(ConnectionLostError, match=why):
            raise lost
        await session.end()
        assert (sink.error, sink.arrived, len(client.losses)) == (None, [], 1)


async def test_a_message_that_no_other_consumer_receives_is_not_requeued_and_counts_once(peer: Peer) -> None:
    """A nameless queue would deliver it to the subscription that ends, which would count it again."""
    connecting = asyncio.create_task(asyncio.to_thread(messaging.connect, peer.url))
    await (await peer.session()).open()
    m = await within(connecting)
    stream = m.subscribe("c")

    def fail(_: messaging.Message) -> None:
        raise ValueError("this one")

    stream.subscribe(Recorder(fail))
    session = await (await peer.session()).open()
    channel = await session.consumer()
    session.send(Basic.Deliver("t", 1, False, "amq.topic", "c"), channel)
    session.content(channel, b"\0\0", b"1")
    await session.expect(commands.Channel.Close)  # and no Basic.Nack before it
    session.send(commands.Channel.CloseOk(), channel)
    await eventually_async(lambda: stream.counters.dropped, "counted")
    assert (stream.counters.dropped, stream.counters.rejected) == (1, 1)
    await asyncio.to_thread(m.close)


# --- publishing


def returned(session: Session, channel: int, message_id: str | None, body: bytes = b"x") -> None:
    session.send(Basic.Return(312, "NO_ROUTE", "amq.topic", "c"), channel)
    session.content(channel, Basic.Properties(message_id=message_id).marshal(), body)


NOT_TAKEN = Basic.Nack(4, multiple=True, requeue=False)
ALL = Basic.Ack(2, multiple=True)


@table(
    "answers, results",
    {
        # an answer is a frame, or the number of the message that is returned; numbers begin at 0
        "one nack for several": ([Basic.Ack(1), NOT_TAKEN, Basic.Ack(5)], ["", *["PublishRefusedError"] * 3, ""]),
        "a return without a confirm": ([1, Basic.Ack(1), Basic.Ack(3)], ["", "UnroutableError", ""]),
        "returns of unknown messages, and one that comes twice": (["other", None, 0, 0, ALL], ["UnroutableError", ""]),
        "a confirm before the return": ([Basic.Ack(1), 0], [""]),
        "a confirm of several before the return": ([Basic.Ack(1, multiple=True), 0], [""]),
    },
)
async def test_each_message_has_its_own_answer(quiet: Quiet, answers: list[Any], results: list[str]) -> None:
    async with talk(quiet) as (client, peer):
        given = {"mandatory": True, "queueOverflow": "reject-publish"}
        batch, session, channel = await published(client, peer, len(results), **given)
        for answer in answers:
            if isinstance(answer, int):
                returned(session, channel, batch[answer].message_id, b"y" * 300_000)
            elif answer is None or isinstance(answer, str):
                returned(session, channel, answer)
            else:
                session.send(answer, channel)
        assert await outcomes(batch) == results
        assert {message.settlements for message in batch} == {1}
        assert client.losses == []


SAME: dict[str, Any] = {"mandatory": True, "messageId": "same", "queueOverflow": "reject-publish"}


@table("answer", ["ack", "nack", "return"])
async def test_of_two_mandatory_messages_with_one_id_the_second_waits_for_the_first(quiet: Quiet, answer: str) -> None:
    """The id is all that a returned message is known by. What follows waits as well: it must not overtake."""
    async with talk(quiet) as (client, peer):
        session = await opened(client, peer)
        batch = [client.message("c", b"x", extensions=each) for each in (SAME, SAME, {"messageId": "same"}, {})]
        publishing = asyncio.create_task(client.adapter.publish(batch))
        channel = await session.published(1)
        assert await session.is_silent()
        assert not publishing.done()
        if answer == "return":
            returned(session, channel, "same")
        else:
            session.send(Basic.Ack(1) if answer == "ack" else Basic.Nack(1, requeue=False), channel)
        await session.published(3)
        await publishing
        if answer == "return":
            session.send(Basic.Ack(1), channel)  # follows the return, and is not the second one's
        assert not batch[1].settled
        returned(session, channel, "same")
        session.send(Basic.Ack(4, multiple=True), channel)
        first = {"ack": "", "nack": "PublishRefusedError", "return": "UnroutableError"}[answer]
        assert await outcomes(batch) == [first, "UnroutableError", "", ""]


async def test_an_id_stays_taken_when_its_message_fails(peer: Peer, client: Client) -> None:
    """It may come back all the same."""
    batch, session, channel = await published(client, peer, 1, **SAME)
    batch[0].fail(PublishRefusedError("its deadline passed"))
    second = client.message("c", b"x", extensions=SAME)
    publishing = asyncio.create_task(client.adapter.publish([second]))
    assert await session.is_silent()
    returned(session, channel, "same")
    await session.published(1)
    await publishing
    session.send(Basic.Ack(2, multiple=True), channel)
    assert await outcomes([second]) == [""]


async def test_messages_that_wait_for_an_id_fail_with_the_connection(peer: Peer, client: Client) -> None:
    session = await opened(client, peer)
    batch = [client.message("c", b"x", extensions=SAME) for _ in range(3)]
    publishing = asyncio.create_task(client.adapter.publish(batch))
    await session.published(1)
    session.close()
    await client.lost()
    await publishing
    assert await outcomes(batch) == ["ConnectionLostError"] * 3
    assert [message.was_sent for message in batch] == [True, False, False]


async def test_a_return_that_never_ends_is_cut_off_by_the_next_method(peer: Peer, client: Client) -> None:
    batch, session, channel = await published(client, peer, 1, mandatory=True)
    session.send(Basic.Return(312, "NO_ROUTE", "amq.topic", "c"), channel)
    session.send(Basic.Ack(1), channel)
    assert await outcomes(batch) == [""]
    raw(frames.METHOD, frames.BASIC_RETURN + b"\x01")(session, channel)
    assert "malformed frame" in str(await client.lost())


@table("code", [320, 501, 541])
async def test_a_connection_closed_with_messages_on_their_way_is_a_loss_with_code_and_text(
    quiet: Quiet, code: int
) -> None:
    async with talk(quiet) as (client, peer):
        batch, session, _ = await published(client, peer, 2)
        batch.append(client.message("exchange", key="k"))
        publishing = asyncio.create_task(client.adapter.publish(batch[2:]))
        await session.expect(commands.Channel.Open)  # and the request for the exchange is not answered
        session.close_reason(code, "for a test")
        assert await outcomes(batch) == ["ConnectionLostError"] * 3
        await publishing
        lost = await client.lost()
        assert isinstance(lost, ConnectionLostError)
        assert (lost.code, lost.detail) == (code, "for a test")
        # it is answered
        assert frames.PREFIX.pack(frames.METHOD, 0, 4) + b"\x00\x0a\x00\x33\xce" in await session.end()


async def test_a_request_that_is_never_answered_ends_with_the_connection(peer: Peer, client: Client) -> None:
    session = await opened(client, peer)
    message = client.message("c")
    publishing = asyncio.create_task(client.adapter.publish([message]))
    _, frame = await session.frame()
    assert isinstance(frame, commands.Channel.Open)
    session.close()
    await within(publishing)
    with pytest.raises(ConnectionLostError):
        await message.result()


async def test_a_request_to_a_broker_that_takes_no_messages_waits_until_it_does(peer: Peer) -> None:
    """It reads nothing from the connection meanwhile, requests included."""

    async with client_of(peer, connect_timeout=1) as client:
        session = await opened(client, peer)
        message = client.message("c")
        publishing = asyncio.create_task(client.adapter.publish([message]))
        channel, frame = await session.frame()
        assert isinstance(frame, commands.Channel.Open)
        session.send(commands.Connection.Blocked("low on memory"))
        await asyncio.sleep(1.2)  # sleeps: longer than a request may take
        session.send(commands.Connection.Unblocked())
        session.send(commands.Channel.OpenOk(), channel)
        channel = await session.published(1)
        session.send(Basic.Ack(1), channel)
        await message.result()
        await publishing
        assert client.losses == []


async def test_a_broker_short_of_memory_is_told_of_and_messages_wait_until_it_takes_them(
    peer: Peer, client: Client
) -> None:
    told = client.events.impairments
    _, session, channel = await published(client, peer, 1)
    session.send(commands.Connection.Blocked("low on memory"))
    await eventually_async(lambda: told, "the broker's word")
    [reason] = told
    assert isinstance(reason, BrokerError)
    assert reason.detail == "low on memory"
    assert "takes no messages for now: low on memory" in str(reason)
    late = [client.message("c"), client.message("c")]
    publishing = asyncio.create_task(client.adapter.publish(late))
    assert await session.is_silent()
    assert not any(message.was_sent for message in late)
    late[0].fail(ConnectionLostError("its deadline passed"))
    session.send(commands.Connection.Unblocked())
    await session.published(1)
    await publishing
    assert told == [reason, None]
    session.send(Basic.Ack(2), channel)
    await late[1].result()
    assert await session.is_silent()


async def test_a_memory_alarm_suspends_delayed_messages_and_consuming_goes_on(peer: Peer, client: Client) -> None:
    publishing = await opened(client, peer)
    sink, session, channel = await consuming(client, peer, queue="q", redeliveryDelay=0.1)
    session.send(DELIVER, channel)
    session.content(channel, b"\0\0", b"1")
    rejected = await sink.next()
    publishing.send(commands.Connection.Blocked("low on memory"))
    await eventually_async(lambda: client.link.publisher.is_blocked)
    client.reject(rejected)
    assert await publishing.is_silent()
    session.send(Basic.Deliver("t", 2, False, "amq.topic", "c"), channel)
    session.content(channel, b"\0\0", b"2")
    client.acknowledge(await sink.next())
    _, frame = await session.expect(Basic.Ack)
    assert isinstance(frame, Basic.Ack)
    assert (frame.delivery_tag, frame.multiple) == (2, False)
    publishing.send(commands.Connection.Unblocked())
    channel = await publishing.published(1)
    publishing.send(Basic.Ack(1), channel)
    _, frame = await session.expect(Basic.Ack)
    assert isinstance(frame, Basic.Ack)
    assert frame.delivery_tag in (1, 2)
    assert client.losses == []


async def test_a_channel_that_is_always_closed_over_publishing_refuses_each_message(peer: Peer, client: Client) -> None:
    session = await opened(client, peer)
    batch = [client.message("c") for _ in range(3)]
    publishing = asyncio.create_task(client.adapter.publish(batch))

    async def refuse() -> None:
        while True:
            channel, frame = await session.answer()
            if isinstance(frame, Basic.Publish):
                session.send(commands.Channel.Close(403, "ACCESS_REFUSED - for a test", 60, 40), channel)
                while not isinstance(frame, commands.Channel.CloseOk):  # the rest is for a closed channel
                    _, frame = await session.frame()

    refusing = asyncio.create_task(refuse())
    await within(publishing)
    assert await outcomes(batch) == ["PublishRefusedError"] * 3
    for message in batch:
        assert isinstance(message.error, PublishRefusedError)
        assert (message.error.code, message.error.detail) == (403, "ACCESS_REFUSED - for a test")
    refusing.cancel()


# --- silence


async def test_silence_is_a_loss_after_two_heartbeats(peer: Peer) -> None:
    async with client_of(peer, heartbeat=1) as client:
        await opened(client, peer)
        assert "it was silent for 2 s" in str(await client.lost())


async def test_without_heartbeats_it_still_says_good_bye(peer: Peer) -> None:
    async with client_of(peer, heartbeat=0) as client:
        session = await opened(client, peer)
        await asyncio.sleep(3.5)  # sleeps: aiormq takes a silence of 3 s for a loss, and would say no good-bye
        closing = asyncio.create_task(client.adapter.close())
        await session.expect(commands.Connection.Close)
        session.send(commands.Connection.CloseOk())
        await closing


async def test_closing_takes_no_longer_if_the_broker_is_silent(peer: Peer, client: Client) -> None:
    [message], _, _ = await published(client, peer, 1)
    await consuming(client, peer)
    subscribing = asyncio.create_task(client.subscribe("too late"))
    await asyncio.sleep(0)
    await within(client.adapter.close(), 5)
    with pytest.raises(ConnectionLostError):
        await within(subscribing)
    assert message.was_sent
    assert client.losses == []


async def test_closing_ends_a_subscription_that_waits_for_its_connection(peer: Peer, client: Client) -> None:
    await opened(client, peer)
    subscribing = asyncio.create_task(client.subscribe("too late"))
    await peer.session()
    await client.adapter.close()
    with pytest.raises(ConnectionLostError):
        await within(subscribing)


async def test_a_connection_without_answer_to_a_request_is_closed(peer: Peer) -> None:
    async with client_of(peer, connect_timeout=0.3, heartbeat=0) as client:
        await opened(client, peer)
        subscribing = asyncio.create_task(client.subscribe("silent"))
        await (await peer.session()).open()
        with pytest.raises(ConnectionLostError, match=r"no answer within 0\.3 s"):
            await subscribing
        assert "no answer within 0.3 s" in str(await client.lost())

"""``basic.nack``: messages that are sent again until their deadline, in order, and messages that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, header
from pamqp.commands import Basic

from messaging.errors import ConnectionLostError, DeadlineError, OutcomeUnknownError, PublishRefusedError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually_async, within
from messaging_adapters.amqp import publisher
from messaging_adapters.amqp.declarations import topic_pattern
from tests.amqp.harness import connected, unique
from tests.amqp.peer import Peer, client_of, consuming, opened
from tests.amqp.test_publisher import outcomes
from tests.memory.test_adapter import naive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from pika.adapters.blocking_connection import BlockingChannel

    from messaging.testing.brokers import RabbitMQ
    from tests.amqp.conftest import Connect
    from tests.amqp.harness import Client, Out
    from tests.amqp.peer import Session


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no delay between two attempts: one that is due comes before what is published later."""
    monkeypatch.setattr(publisher, "_FIRST", 0.0)


class Broker:
    """Takes published messages, and answers as the test says."""

    def __init__(self, session: Session, client: Client, peer: Peer) -> None:
        self.session = session
        self.client = client
        self.peer = peer
        self.channel = 0
        #: confirmed messages, and those of them on earlier channels: on each the broker's tags begin at 1
        self.confirmed = self.base = 0
        self._selected = 1
        #: routing key, payload and message id of what arrived, in its order; tags count from 1
        self.arrived: list[tuple[str, bytes, str]] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            channel, frame = await self.session.answer()
            if isinstance(frame, commands.Channel.CloseOk):
                continue
            assert isinstance(frame, Basic.Publish)
            _, head = await self.session.expect(header.ContentHeader)  # type: ignore[type-var]
            _, content = await self.session.frame()
            assert isinstance(head, header.ContentHeader)
            assert isinstance(content, body.ContentBody)
            if head.properties.message_id is not None:  # confirmed
                self.channel = channel
                if self.session.selected != self._selected:
                    self._selected, self.base = self.session.selected, self.confirmed
                self.confirmed += 1
            self.arrived.append((frame.routing_key, content.value, head.properties.message_id or ""))

    async def count(self, number: int) -> list[bytes]:
        """Wait for so many messages; the payloads of all."""
        await eventually_async(lambda: len(self.arrived) >= number, f"{number} messages")
        assert len(self.arrived) == number
        return [payload for _, payload, _ in self.arrived]

    async def stays(self, number: int) -> None:
        """No further message comes before one that is published now, and before another one."""
        for _ in range(2):
            await self.client.publish("mark", b"mark", extensions={"qos": "0"})
            await eventually_async(lambda: self.arrived[-1][1] == b"mark", "the mark")
            self.arrived.pop()
            assert len(self.arrived) == number

    async def heard(self) -> None:
        """Wait until the client has processed the answers so far."""
        self.session.send(commands.Connection.Blocked("for a moment"))
        self.session.send(commands.Connection.Unblocked())
        await eventually_async(lambda: len(self.client.events.impairments) == 2)

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        self.session.send(Basic.Ack(tag - self.base, multiple), self.channel)

    def nack(self, tag: int, *, multiple: bool = False) -> None:
        self.session.send(Basic.Nack(tag - self.base, multiple, False), self.channel)

    def end(self) -> None:
        self._reading.cancel()


@contextlib.asynccontextmanager
async def answering(**settings: Any) -> AsyncIterator[Broker]:
    """A broker, and its client, which is connected."""
    async with Peer() as peer, client_of(peer, **settings) as client:
        broker = Broker(await opened(client, peer), client, peer)
        try:
            yield broker
        finally:
            broker.end()


@pytest.fixture
def broker() -> AbstractAsyncContextManager[Broker]:
    return answering()


def messages(client: Client, payloads: Iterable[int], channel: str = "c", **extensions: Any) -> list[Out]:
    return [client.message(channel, b"%d" % number, extensions=extensions) for number in payloads]


async def test_a_message_that_is_refused_is_sent_again_with_its_id_until_it_is_taken(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    client = broker.client
    [message] = messages(client, [1])
    await client.adapter.publish([message])
    for tag in range(1, 5):
        await broker.count(tag)
        broker.nack(tag)
    await broker.count(5)
    assert not message.settled
    broker.ack(5)
    await message.result()
    assert len({identity for _, _, identity in broker.arrived}) == 1
    await broker.stays(5)
    [record] = caplog.records
    assert "exchange 'amq.topic' with routing key 'c' for now (basic.nack)" in record.getMessage()


async def test_another_channel_is_taken_when_attempts_are_refused(broker: Broker) -> None:
    """A channel of RabbitMQ may refuse messages to a quorum queue whose new leader it does not know."""
    client = broker.client
    [message] = messages(client, [1])
    await client.adapter.publish([message])
    for tag in range(1, 4):
        await broker.count(tag)
        assert broker.session.selected == 1
        broker.nack(tag)
    await broker.count(4)
    assert broker.session.selected == 2
    broker.ack(4)
    await message.result()


async def test_another_channel_is_taken_only_after_unconfirmed_messages_are_answered(broker: Broker) -> None:
    """So that messages to other destinations keep their order."""
    client = broker.client
    [message] = messages(client, [1])
    [other] = messages(client, [2], "another/destination")
    await client.adapter.publish([message])
    await broker.count(1)
    broker.nack(1)
    await broker.count(2)
    await client.adapter.publish([other])
    await broker.count(3)
    broker.nack(2)
    await broker.count(4)
    broker.nack(4)
    await broker.heard()
    assert (len(broker.arrived), broker.session.selected) == (4, 1)
    broker.ack(3)
    await other.result()
    await broker.count(5)
    assert broker.session.selected == 2
    broker.ack(5)
    await message.result()


async def test_messages_that_are_refused_are_sent_again_in_their_order_one_first(broker: Broker) -> None:
    """With the flag "multiple", and confirms of later messages in between."""
    client = broker.client
    batch = messages(client, range(1, 8))
    await client.adapter.publish(batch)
    await broker.count(7)
    broker.nack(6)
    broker.ack(5)
    broker.nack(3, multiple=True)
    await broker.stays(7)  # two are not answered yet
    broker.ack(7)
    broker.ack(4)
    assert (await broker.count(8))[7:] == [b"1"]
    await broker.stays(8)
    broker.nack(8)
    assert (await broker.count(9))[8:] == [b"1"]
    broker.ack(9)
    assert (await broker.count(12))[9:] == [b"2", b"3", b"6"]
    broker.ack(10)
    broker.nack(12)
    broker.nack(11)
    assert (await broker.count(13))[12:] == [b"3"]
    broker.ack(13)
    assert (await broker.count(14))[13:] == [b"6"]
    broker.ack(14)
    assert await outcomes(batch) == [""] * 7
    assert {message.settlements for message in batch} == {1}


async def test_later_messages_to_the_same_destination_wait_and_others_pass(broker: Broker) -> None:
    client = broker.client
    first, later = messages(client, [1]), messages(client, [2, 3])
    others, unconfirmed = messages(client, [4], "d"), messages(client, [5], "c", qos="0")
    await client.adapter.publish(first)
    await broker.count(1)
    broker.nack(1)
    assert (await broker.count(2))[1:] == [b"1"]
    await client.adapter.publish([*later, *others, *unconfirmed])
    assert sorted((await broker.count(4))[2:]) == [b"4", b"5"]
    broker.ack(3)
    broker.nack(2)
    assert await outcomes(others) == [""]
    assert (await broker.count(5))[4:] == [b"1"]
    broker.ack(4)
    assert (await broker.count(7))[5:] == [b"2", b"3"]
    broker.ack(6, multiple=True)
    assert await outcomes([*first, *later]) == [""] * 3
    await client.adapter.publish(messages(client, [6]))  # nothing waits any more
    assert (await broker.count(8))[7:] == [b"6"]


async def test_waiting_messages_are_bounded_by_the_window() -> None:
    async with answering(publish_window=4) as broker:
        client = broker.client
        batch = messages(client, range(10))
        publishing = asyncio.create_task(client.adapter.publish(batch))
        await broker.count(4)
        broker.nack(4, multiple=True)
        await broker.count(5)
        assert not publishing.done()
        assert [message.was_sent for message in batch] == [True] * 4 + [False] * 6
        tag = 5
        while not all(message.settled for message in batch):
            await eventually_async(lambda expected=tag: len(broker.arrived) >= expected or batch[-1].settled)
            broker.ack(tag)
            tag += 1
        assert [payload for _, payload, _ in broker.arrived[4:]] == [b"%d" % number for number in range(10)]
        await within(publishing)


async def test_a_message_whose_deadline_has_passed_is_not_sent_again(broker: Broker) -> None:
    client = broker.client
    batch = messages(client, [1, 2, 3])
    await client.adapter.publish(batch)
    await broker.count(3)
    broker.nack(3, multiple=True)
    await broker.count(4)
    for message in batch[:2]:  # the first is the one that is tried
        message.fail(PublishRefusedError("its deadline passed"))
    broker.nack(4)
    assert (await broker.count(5))[4:] == [b"3"]
    batch[2].fail(PublishRefusedError("its deadline passed"))
    await broker.stays(5)
    broker.ack(5)
    await client.adapter.publish(messages(client, [4]))
    assert (await broker.count(6))[5:] == [b"4"]


async def test_a_message_whose_time_to_live_is_over_is_not_sent_again(broker: Broker) -> None:
    """``extensions.md``: "an expired message is not sent"."""
    client = broker.client
    batch = messages(client, [1, 2, 3, 4])
    await client.adapter.publish(batch)
    await broker.count(4)
    broker.nack(4, multiple=True)
    await broker.count(5)
    batch[0].is_over = batch[2].is_over = True
    broker.nack(5)
    assert (await broker.count(6))[5:] == [b"2"]
    batch[3].is_over = True
    broker.ack(6)
    assert await outcomes(batch) == ["OutcomeUnknownError", "", "OutcomeUnknownError", "OutcomeUnknownError"]
    await broker.stays(6)
    await client.adapter.publish(messages(client, [5]))
    assert (await broker.count(7))[6:] == [b"5"]


async def test_a_closed_channel_sends_no_message_again_whose_time_to_live_is_over(broker: Broker) -> None:
    client = broker.client
    batch = messages(client, [1, 2, 3])
    await client.adapter.publish(batch)
    await broker.count(3)
    batch[0].is_over = batch[2].is_over = True
    broker.session.send(commands.Channel.Close(406, "PRECONDITION_FAILED - for a test", 60, 40), broker.channel)
    assert (await broker.count(4))[3:] == [b"2"]
    broker.ack(4)
    assert await outcomes(batch) == ["OutcomeUnknownError", "", "OutcomeUnknownError"]
    await broker.stays(4)


async def test_a_loss_fails_waiting_messages(broker: Broker) -> None:
    client = broker.client
    first, later = messages(client, [1, 2]), messages(client, [3])
    await client.adapter.publish(first)
    await broker.count(2)
    broker.nack(2, multiple=True)
    await broker.count(3)
    await client.adapter.publish(later)
    broker.session.close()
    assert await outcomes([*first, *later]) == ["ConnectionLostError"] * 3
    assert isinstance(await client.lost(), ConnectionLostError)


async def test_waiting_messages_survive_a_closed_channel(broker: Broker) -> None:
    client = broker.client
    batch = messages(client, [1, 2])
    await client.adapter.publish(batch)
    await broker.count(2)
    broker.nack(2, multiple=True)
    await broker.count(3)
    broker.session.send(commands.Channel.Close(404, "NOT_FOUND - for a test", 60, 40), broker.channel)
    assert (await broker.count(4))[3:] == [b"1"]
    broker.ack(4)
    assert (await broker.count(5))[4:] == [b"2"]
    broker.ack(5)
    assert await outcomes(batch) == ["", ""]


async def test_the_extension_names_a_refusing_queue_of_another_program(broker: Broker) -> None:
    client = broker.client
    batch = messages(client, [1, 2], queueOverflow="reject-publish")
    await client.adapter.publish(batch)
    await broker.count(2)
    broker.nack(1)
    broker.ack(2)
    assert await outcomes(batch) == ["PublishRefusedError", ""]
    await broker.stays(2)


@table(
    "given, key, is_refused",
    [
        ({"queueOverflow": "reject-publish"}, "c", True),
        ({"queueOverflow": "reject-publish-dlx"}, "c", True),
        ({"queueOverflow": "drop-head"}, "c", False),
        ({}, "c", False),
        ({"queueOverflow": "reject-publish"}, "d", False),
    ],
)
async def test_a_queue_declared_here_that_refuses_is_known(given: dict[str, Any], key: str, is_refused: bool) -> None:
    async with answering() as broker:
        client = broker.client
        await consuming(client, broker.peer, queue="q", maxLength=1, **given)
        [message] = messages(client, [1], key)
        await client.adapter.publish([message])
        await broker.count(1)
        broker.nack(1)
        if is_refused:
            assert await outcomes([message]) == ["PublishRefusedError"]
            assert "the queue is full" in str(message.error)
            await broker.stays(1)
        else:
            await broker.count(2)
            assert not message.settled


WORD = st.sampled_from(["a", "b", "", "a.b", "*", "#"])


@given(st.lists(WORD, min_size=1, max_size=5), st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=5))
def test_bindings_of_topic_exchanges_match_as_the_broker_has_it(binding: list[str], key: list[str]) -> None:
    text = ".".join(binding)
    found = topic_pattern(text).fullmatch("." + ".".join(key)) is not None
    assert found == naive(text.split("."), key)


@pytest.fixture
def full(foreign: BlockingChannel) -> Callable[[int], str]:
    """``full(count)``: a queue of another program that refuses further messages; this instance cannot know."""

    def make(count: int) -> str:
        name = unique("full")
        foreign.queue_declare(name, exclusive=True, arguments={"x-max-length": count, "x-overflow": "reject-publish"})
        foreign.queue_bind(name, "amq.topic", name)
        return name

    return make


def test_a_publish_fails_at_its_deadline_if_the_broker_refuses_until_then(
    connect: Connect, foreign: BlockingChannel, full: Callable[[int], str]
) -> None:
    queue, m = full(1), connect()
    m.publish(queue, b"1").result(PATIENCE)
    with pytest.raises((OutcomeUnknownError, DeadlineError)):
        m.publish(queue, b"2", timeout=0.5).result(PATIENCE)
    third = m.publish(queue, b"3", timeout=PATIENCE)
    m.publish("elsewhere", b"").result(PATIENCE)
    assert not third.done()
    assert foreign.basic_get(queue, auto_ack=True)[2] == b"1"
    third.result(PATIENCE)
    assert foreign.basic_get(queue, auto_ack=True)[2] == b"3"


async def test_order_is_kept_while_a_real_queue_refuses_now_and_then(
    rabbitmq: RabbitMQ, foreign: BlockingChannel, full: Callable[[int], str]
) -> None:
    """Each message is published when the one before is confirmed, or waits behind it."""
    queue = full(3)
    async with connected(rabbitmq.url, publish_window=8) as client:
        batch = [client.message(queue, b"%d" % number) for number in range(20)]
        publishing = asyncio.create_task(client.adapter.publish(batch))
        seen: list[int] = []

        def take() -> bool:
            _, _, content = foreign.basic_get(queue, auto_ack=True)
            if content is not None:
                seen.append(int(content))
            return len(seen) == 20

        await eventually_async(take, lambda: f"20 messages, not {seen}")
        await within(publishing)
        assert await outcomes(batch) == [""] * 20
        assert sorted(seen) == list(range(20))
        # only messages in flight when one was refused may come before it
        assert max(at - number for at, number in enumerate(seen)) < 8

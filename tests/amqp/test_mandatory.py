"""Mandatory messages: a message that reaches no queue fails, and no other does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic

from messaging.errors import PublishRefusedError, UnroutableError
from messaging.testing.waiting import eventually_async, within
from messaging_adapters.amqp import frames
from messaging_adapters.amqp.publish_channels import ConfirmChannel
from tests.amqp.harness import Client, connected, unique
from tests.amqp.test_publisher import outcomes

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel

    from messaging.errors import MessagingError
    from messaging.testing.brokers import RabbitMQ

MANDATORY: dict[str, Any] = {"mandatory": True}


async def test_a_message_that_reaches_no_queue_fails_with_code_and_text(client: Client) -> None:
    message = client.message("no/queue", b"x" * 300_000, extensions=MANDATORY)  # several frames
    await within(client.adapter.publish([message]))
    with pytest.raises(UnroutableError, match=r"312 NO_ROUTE: no queue takes 'no\.queue'") as caught:
        await message.result()
    assert (caught.value.code, caught.value.detail) == (312, "NO_ROUTE")
    await client.publish("no/queue", b"", extensions={"mandatory": False})
    await client.publish("no/queue", b"")
    assert message.settlements == 1
    assert client.losses == []


async def test_a_mandatory_message_to_a_missing_queue_fails(client: Client) -> None:
    for payload in (b"", b"x"):
        with pytest.raises(UnroutableError):
            await client.publish("amq.default", payload, key=unique("missing"), extensions=MANDATORY)


async def test_an_alternate_exchange_counts_as_a_route(client: Client, exchange: str) -> None:
    sink, _ = await client.subscribe("amq.fanout", key="")
    await client.publish(exchange, b"x", key="k", extensions={"alternateExchange": "amq.fanout"} | MANDATORY)
    await sink.count(1)


async def test_thousands_in_flight_of_every_kind_each_get_their_own_answer(rabbitmq: RabbitMQ) -> None:
    """Two channels, a window smaller than the batches, multiple confirms, returns between them, retries."""
    dice = random.Random(7)
    async with connected(rabbitmq.url, publish_window=700) as client:
        sink, _ = await client.subscribe("there", qos="0")
        kinds = [
            ("there", MANDATORY, ""),
            ("nowhere", MANDATORY, "UnroutableError"),
            ("nowhere", {}, ""),
            ("there", {}, ""),
            ("nowhere", {"qos": "0"}, ""),
        ]
        chosen = [dice.choice(kinds) for _ in range(4000)]
        batch = [
            client.message(channel, b"x" * dice.choice((0, 10, 3000)), extensions=extensions)
            for channel, extensions, _ in chosen
        ]
        for start in range(0, len(batch), 1000):
            await within(client.adapter.publish(batch[start : start + 1000]))
        assert await outcomes(batch) == [result for _, _, result in chosen]
        assert {message.settlements for message in batch} == {1}
        await sink.count(sum(channel == "there" for channel, _, _ in chosen))
        link = client.link
        for channel in link.publisher.channels.open.values():
            assert (channel.pending, channel.mandatory) == ({}, {})


async def test_messages_sent_again_on_a_new_channel_stay_mandatory(client: Client, foreign: BlockingChannel) -> None:
    exchange = unique("vanishing")
    sink, _ = await client.subscribe("stays")
    await client.publish(exchange, b"", key="k")
    await client.publish("stays", b"")
    foreign.exchange_delete(exchange)
    batch = [
        client.message(exchange, key="k", extensions={"autocreate": False}) if number == 3 else
        client.message(("stays", "nowhere")[number % 2], b"%d" % number, extensions=MANDATORY)
        for number in range(10)
    ]  # fmt: skip
    await within(client.adapter.publish(batch))
    wanted = ["", "UnroutableError"] * 5
    wanted[3] = "PublishRefusedError"
    assert await outcomes(batch) == wanted
    await eventually_async(lambda: {b"0", b"8"} <= set(sink.payloads), "the others")


async def test_a_late_return_or_confirm_of_a_failed_message_is_ignored(client: Client) -> None:
    batch = [client.message("nowhere", extensions=MANDATORY) for _ in range(3)]
    await client.adapter.publish(batch)
    batch[1].fail(PublishRefusedError("its deadline passed"))
    assert await outcomes(batch) == ["UnroutableError", "PublishRefusedError", "UnroutableError"]
    await client.publish("nowhere", b"")


# --- the parser alone: hypothesis plays the broker


class Letter(list[str]):
    """A message that remembers what became of it."""

    def confirm(self) -> None:
        self.append("ack")

    def fail(self, error: MessagingError) -> None:
        self.append(type(error).__name__)


class Channel(ConfirmChannel[Letter]):
    def __init__(self) -> None:
        super().__init__(1)
        self.came_back: list[tuple[int, str, str, str | None]] = []

    def returned(self, code: int, text: str, key: str, message_id: str | None) -> None:
        self.came_back.append((code, text, key, message_id))


def fed(channel: Channel, data: bytes) -> list[bool]:
    """Which frames of ``data`` the channel took."""
    taken, at = [], 0
    while at < len(data):
        kind, _, size = frames.PREFIX.unpack_from(data, at)
        taken.append(channel.take(kind, data, at + 7, at + 7 + size))
        at += size + 8
    return taken


SHORT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(
    st.lists(st.tuples(st.integers(0, 999), SHORT, SHORT, st.none() | SHORT.filter(bool), st.binary(max_size=90))),
    st.integers(12, 40),
)
def test_returned_messages_are_read_with_key_and_id(
    messages: list[tuple[int, str, str, str | None, bytes]], frame_max: int
) -> None:
    channel = Channel()
    for code, text, key, message_id, body in messages:
        data = pamqp.frame.marshal(Basic.Return(code, text, "e", key), 1)
        properties = Basic.Properties(content_type="text/plain", headers={"a": "b"}, message_id=message_id).marshal()
        data += b"".join(frames.content(1, properties, body, frame_max))
        assert all(fed(channel, data))
    assert channel.came_back == [(code, text, key, message_id) for code, text, key, message_id, _ in messages]
    # content without a return is nothing of ours
    assert fed(channel, b"".join(frames.content(1, b"\0\0", b"x", 4096))) == [False, False]


@given(st.integers(0, 30), st.lists(st.tuples(st.sampled_from(["ack", "nack"]), st.integers(0, 35), st.booleans())))
def test_every_message_gets_its_first_answer_and_no_other(count: int, answers: list[tuple[str, int, bool]]) -> None:
    channel = Channel()
    letters = [Letter() for _ in range(count)]
    assert [channel.expect(letter) for letter in letters] == list(range(1, count + 1))
    wanted: dict[int, str] = {}
    for answer, tag, multiple in answers:
        if answer == "ack":
            data = frames.ack(1, tag, multiple=multiple)
        else:
            data = pamqp.frame.marshal(Basic.Nack(tag, multiple, False), 1)
        assert fed(channel, data) == [True]
        for each in range(1, (tag or count) + 1) if multiple else [tag]:  # 0 is all there are
            wanted.setdefault(each, "ack" if answer == "ack" else "PublishRefusedError")
    assert letters == [[wanted[tag]] if tag in wanted else [] for tag in range(1, count + 1)]
    assert set(channel.pending) == set(range(1, count + 1)) - set(wanted)

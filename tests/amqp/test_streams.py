"""Streams: queues that keep messages after they were read, and remember no reader."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import SubscriptionRefusedError
from messaging.model.extensions import publish_options
from messaging.testing.waiting import PATIENCE, eventually, eventually_async, subscribed
from messaging_adapters.amqp.deliveries import StreamPosition
from tests.amqp.harness import BrokerProxy, Client, Sink, connected, unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel

    from tests.amqp.conftest import Connect

STREAM: dict[str, Any] = {"queueType": "stream", "prefetch": 100}


@pytest.fixture
def stream(foreign: BlockingChannel) -> Iterator[str]:
    """A stream bound to the channel of its name."""
    name = unique("stream")
    foreign.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    foreign.queue_bind(name, "amq.topic", name)
    yield name
    foreign.queue_delete(name)


def offsets(sink: Sink) -> list[int]:
    return [arrived.extensions["streamOffset"] for arrived in sink.arrived]


async def test_a_stream_is_read_from_any_position(client: Client, stream: str) -> None:
    await client.publish(stream, *[b"%d" % number for number in range(10)])
    for where, first in (("first", 0), (4, 4), ("1h", 0), (datetime.now(UTC).timestamp() - 60, 0)):
        sink, handle = await client.subscribe(stream, queue=stream, streamOffset=where, **STREAM)
        await sink.count(10 - first)
        assert offsets(sink) == list(range(first, 10))
        assert sink.payloads == [b"%d" % number for number in range(first, 10)]
        client.acknowledge(*sink.arrived)
        await client.adapter.unsubscribe(handle)
    last, _ = await client.subscribe(stream, queue=stream, streamOffset="last", **STREAM)
    await last.count(1)
    assert offsets(last)[-1] == 9


async def test_by_default_reading_begins_with_the_next_message(client: Client, stream: str) -> None:
    await client.publish(stream, b"before")
    sinks = [(await client.subscribe(stream, queue=stream, **STREAM))[0] for _ in range(2)]
    await client.publish(stream, b"after", b"later")
    for sink in sinks:  # each gets everything
        await sink.count(2)
        assert sink.payloads == [b"after", b"later"]
        assert offsets(sink) == [1, 2]


async def test_a_message_of_a_stream_has_its_offset_as_extension_and_not_as_header(client: Client, stream: str) -> None:
    await client.publish(stream, b"1")
    await client.publish(stream, b"2", extensions={"headers": {"a": "b"}})
    sink, _ = await client.subscribe(stream, queue=stream, streamOffset="first", **STREAM)
    first, second = await sink.count(2)
    assert (first.extensions["streamOffset"], "headers" in first.extensions) == (0, False)
    assert (second.extensions["streamOffset"], dict(second.extensions["headers"])) == (1, {"a": "b"})
    # it can be passed on as it is: to publishing, an offset is nothing
    assert publish_options(second.extensions, client.adapter.capabilities).custom == {}


async def test_no_more_is_handed_over_than_prefetch_allows_though_more_is_sent(client: Client, stream: str) -> None:
    await client.publish(stream, *[b"x"] * 50)
    sink, _ = await client.subscribe(stream, queue=stream, streamOffset="first", **STREAM | {"prefetch": 5})
    for number in range(5, 51, 5):
        await sink.count(number)
        assert offsets(sink) == list(range(number))
        client.acknowledge(*sink.arrived[-5:])


async def test_a_rejected_message_of_a_stream_is_redelivered_here_and_counted(client: Client, stream: str) -> None:
    sink, _ = await client.subscribe(stream, queue=stream, **STREAM | {"prefetch": 1})
    await client.publish(stream, b"1", b"2")
    for deliveries in (1, 2, 3):
        arrived = await sink.next()
        assert (arrived.payload, arrived.delivery_count) == (b"1", deliveries)
        assert arrived.extensions.get("redelivered", False) == (deliveries > 1)
        if deliveries < 3:
            client.reject(arrived)
    client.acknowledge(arrived)
    arrived = await sink.next()
    assert (arrived.payload, arrived.delivery_count) == (b"2", 1)


@pytest.mark.parametrize("begin", ["last", "next"])  # each on a stream of its own: times are those of whole chunks
async def test_messages_published_before_the_first_delivery_are_not_missed(
    client: Client, proxy: BrokerProxy, stream: str, begin: str
) -> None:
    async with connected(proxy.url) as reader:
        sink, _ = await reader.subscribe(stream, queue=stream, streamOffset=begin, **STREAM)
        proxy.sever()
        await reader.lost()
        await client.publish(stream, begin.encode())
        await reader.reopen()
        await reader.subscribe(stream, queue=stream, sink=sink, streamOffset=begin, **STREAM)
        await sink.count(1)
        assert sink.payloads == [begin.encode()]


def test_an_instance_reads_on_by_itself_after_a_loss(proxy: BrokerProxy, connect: Connect, stream: str) -> None:
    m, publisher = connect(proxy.url), connect()
    given = {"queue": stream, "queue_type": "stream", "stream_offset": "first", "prefetch": 10}
    received = subscribed(m, stream, **given)
    for number in range(60):
        publisher.publish(stream, b"%d" % number).result(PATIENCE)
        if number % 20 == 10:
            proxy.sever()
    eventually(lambda: b"59" in received.payloads)
    wanted = [b"%d" % number for number in range(60)]
    assert [*dict.fromkeys(received.payloads)] == wanted  # in order and whole, once what came twice is left out


async def test_a_stream_of_the_wrong_kind_is_refused(client: Client, foreign: BlockingChannel) -> None:
    queue = unique("classic")
    foreign.queue_declare(queue, exclusive=False, auto_delete=True)
    with pytest.raises(SubscriptionRefusedError) as caught:
        await client.subscribe("a", queue=queue, autocreate=False, streamOffset="first", **STREAM)
    assert caught.value.code == 406
    assert client.losses == []


async def test_without_acknowledgement_an_existing_stream_refuses_and_the_next_connection_lives(
    client: Client, stream: str
) -> None:
    """Not called a stream: the broker finds out, and closes the connection over it."""
    with pytest.raises(SubscriptionRefusedError) as caught:
        await client.subscribe(stream, queue=stream, qos="0")
    assert caught.value.code == 540
    await eventually_async(lambda: client.losses, "the loss")
    await client.open()
    await client.publish(stream, b"x")


# --- the position alone


def test_before_anything_came_a_relative_place_is_kept_as_a_time() -> None:
    now = time.time()
    for start, ago in (("next", 0), ("last", 0), ("1h", 3600)):
        position = StreamPosition(start)
        assert position.attach() == start
        again = position.attach()
        assert isinstance(again, datetime)
        assert again.timestamp() == pytest.approx(now - ago, abs=5)
    for absolute in ("first", 7):
        position = StreamPosition(absolute)
        assert [position.attach() for _ in range(2)] == [absolute] * 2
    at = StreamPosition(1_700_000_000.5).attach()
    assert isinstance(at, datetime)
    assert at.timestamp() == 1_700_000_000.5


@given(st.lists(st.integers(1, 5), max_size=20), st.lists(st.integers(0, 25), max_size=8))
def test_the_place_is_the_first_that_is_not_settled(gaps: list[int], floors: list[int]) -> None:
    """Offsets rise, not always by one; floors of settled tags rise."""
    position = StreamPosition("first")
    position.attach()
    offset, delivered = 10, []
    for tag, gap in enumerate(gaps, 1):
        position.arrived(tag, offset)
        delivered.append(offset)
        offset += gap
    floor = 0
    for floor in sorted(floors):
        position.settled(floor)
    if not delivered:
        assert position.attach() == "first"
    elif floor >= len(delivered):
        assert position.attach() == delivered[-1] + 1
    else:
        place = position.attach()
        assert isinstance(place, int)
        assert place <= delivered[floor]
        assert not floor or place == delivered[floor - 1] + 1

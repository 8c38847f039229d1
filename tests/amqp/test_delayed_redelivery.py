"""Rejected messages that wait at the broker: what comes back, when, how often counted, and what if it cannot wait."""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pamqp.frame
import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import header
from pamqp.commands import Basic

import messaging
from messaging.model import Incoming
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually_async, observed, subscribed
from messaging_adapters.amqp import consumer, counting, delays, properties
from messaging_adapters.amqp.frames import short_string
from tests.amqp.harness import Client
from tests.amqp.test_consumer import depth, exists

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel

    from tests.amqp.conftest import Connect


DELAY: dict[str, Any] = {"redeliveryDelay": 0.1, "redeliveryDelayMax": 0.2}


async def test_a_rejected_message_comes_back_later_each_time_and_is_counted(
    client: Client, foreign: BlockingChannel, queue: str
) -> None:
    """The queues of the delays are durable, and go away when they are not used."""
    sink, handle = await client.subscribe("delayed/+", queue=queue, **DELAY)
    await client.publish("delayed/a", b"x")
    times = []
    for deliveries in (1, 2, 3, 4):
        arrived = await sink.next()
        times.append(time.monotonic())
        assert (arrived.payload, arrived.delivery_count) == (b"x", deliveries)
        assert (arrived.channel, arrived.channel_extension) == ("delayed/a", None)
        client.reject(arrived)
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert all(wait >= wanted for wait, wanted in zip(waits, (0.1, 0.2, 0.2), strict=True)), waits
    client.acknowledge(await sink.next())
    await client.adapter.unsubscribe(handle)
    for name in (queue, f"{queue}.delay.100", f"{queue}.delay.200"):
        assert depth(foreign, name) == 0
    assert [delay for delay in (100, 200, 300, 400) if exists(foreign, f"{queue}.delay.{delay}")] == [100, 200]
    arguments = {"x-queue-type": "classic", "x-message-ttl": 100, "x-expires": 600_100, **to_queue(queue)}
    foreign.queue_declare(f"{queue}.delay.100", durable=True, arguments=arguments)  # the same, or it would be refused


def to_queue(queue: str) -> dict[str, str]:
    """The arguments of a queue whose messages expire into ``queue``."""
    return {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}


async def test_everything_about_the_message_is_as_it_was(client: Client, foreign: BlockingChannel, queue: str) -> None:
    """The types of header fields too, which another program sees; twice delayed."""
    sent = pika.BasicProperties(
        content_type="application/json", content_encoding="gzip", correlation_id="c", reply_to="answers",
        headers={"text": "ü", "number": 7, "list": [1, {"a": None}], "yes": True, "decimal": Decimal("1.5"),
                 "CC": ["nowhere", "amq.nowhere"], "x-death": [{"queue": queue, "reason": "expired", "count": 3}]},
        delivery_mode=2, priority=3, message_id="m", timestamp=1_700_000_000, type="t", user_id="guest", app_id="a",
    )  # fmt: skip
    sink, handle = await client.subscribe("as/it/was", queue=queue, prefetch=1, **DELAY)
    foreign.basic_publish("amq.topic", "as.it.was", b"\x00\xff", sent)
    first = await sink.next()
    client.reject(first)
    second = await sink.next()
    client.reject(second)
    third = await sink.next()
    for again in (second, third):
        assert _told(again) == _told(first)
    assert [each.delivery_count for each in (first, second, third)] == [1, 2, 3]
    assert first.extensions["headers"]["x-death"][0]["count"] == 3
    client.reject(third)
    await client.adapter.unsubscribe(handle)
    await eventually_async(lambda: depth(foreign, queue) == 1, "its return")
    method, seen, body = foreign.basic_get(queue, auto_ack=True)
    assert method is not None
    assert body == b"\x00\xff"
    kept = {name: value for name, value in seen.headers.items() if not name.startswith("x-")}
    assert kept == {name: sent.headers[name] for name in ("text", "number", "list", "yes", "decimal")}
    assert {name: value for name, value in vars(seen).items() if name != "headers"} == {
        name: value for name, value in vars(sent).items() if name != "headers"
    }


def _told(incoming: Incoming) -> tuple[object, ...]:
    extensions = {name: value for name, value in incoming.extensions.items() if name != "redelivered"}
    return incoming.payload, incoming._values()[:-1], extensions


async def test_a_forged_header_does_not_change_the_channel_of_a_message(
    client: Client, foreign: BlockingChannel, queue: str
) -> None:
    claim = {"count": 1, "exchange": "amq.topic", "routing-key": "claimed.channel", "aside": {}}
    sink, _ = await client.subscribe("+/channel", queue=queue, **DELAY)
    headers = pika.BasicProperties(headers={"x-delayed-redelivery": claim})
    foreign.basic_publish("amq.topic", "true.channel", b"x", headers)
    assert (await sink.next()).channel == "true/channel"


async def test_only_rejected_messages_are_delayed(client: Client, queue: str) -> None:
    sink, _ = await client.subscribe("mixed", queue=queue, redeliveryDelay=0.3)
    await client.publish("mixed", *[b"%d" % number for number in range(10)])
    await sink.count(10)
    client.reject(*sink.arrived[::2])
    client.acknowledge(*sink.arrived[1::2])
    await client.publish("mixed", b"overtakes")
    await sink.count(16)
    assert sink.payloads[10] == b"overtakes"
    assert sorted(sink.payloads[11:]) == [b"0", b"2", b"4", b"6", b"8"]


async def test_a_quorum_queue_delays_in_quorum_queues_and_its_own_returns_count(
    client: Client, foreign: BlockingChannel, queue: str
) -> None:
    given = {"queue": queue, "queueType": "quorum", **DELAY}
    sink, handle = await client.subscribe("quorum", **given)
    await client.publish("quorum", b"x")
    counts = []
    for _ in range(2):
        arrived = await sink.next()
        counts.append(arrived.delivery_count)
        client.reject(arrived)
    counts.append((await sink.next()).delivery_count)
    await client.adapter.unsubscribe(handle)  # given back: the broker counts that
    sink, _ = await client.subscribe("quorum", **given)
    counts.append((arrived := await sink.next()).delivery_count)
    client.reject(arrived)
    counts.append((await sink.next()).delivery_count)
    assert counts == [1, 2, 3, 4, 5]
    arguments = {
        "x-queue-type": "quorum", "x-message-ttl": 100, "x-expires": 600_100, **to_queue(queue),
        "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
    }  # fmt: skip
    foreign.queue_declare(f"{queue}.delay.100", durable=True, arguments=arguments)  # the same, or it would be refused


def test_the_limit_on_deliveries_counts_across_processes(connect: Connect, queue: str) -> None:
    """Two instances share the queue; neither sees all of the deliveries."""
    dead = f"dead/{queue}"
    one, two = connect(), connect()
    seen: list[messaging.Messaging] = []
    graves = subscribed(one, dead)
    extensions = {
        "queue": queue, "maxDeliveries": 4, "deadLetterChannel": dead, "redeliveryDelay": 0.05, "prefetch": 1,
    }  # fmt: skip
    for m in (one, two):
        builder = m.acknowledge_context_builder()
        builder.filter_acknowledge(lambda _, m=m: seen.append(m))  # None is no
        context = builder.message_context_builder().channel(queue).extensions(extensions).build_context()
        observed(m.subscription.subscribe(context))
    one.publish(queue, b"x").result(PATIENCE)
    [message] = graves.wait_for(1)
    assert message.payload == b"x"
    assert message.context.extensions["headers"]["x-dead-letter-deliveries"] == "4"
    assert "x-delayed-redelivery" not in message.context.extensions["headers"]
    assert len(seen) == 4
    assert {*map(id, seen)} == {id(one), id(two)}


# --- when it cannot wait


async def test_a_message_whose_delay_queue_cannot_be_declared_goes_back_with_a_pause(
    client: Client, foreign: BlockingChannel, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    foreign.queue_declare(f"{queue}.delay.200", durable=True)  # without the arguments of a delay
    sink, _ = await client.subscribe(queue, queue=queue, redeliveryDelay=0.2)
    await client.publish(queue, b"x")
    for _ in range(3):
        arrived = await sink.next()
        assert (arrived.payload, arrived.delivery_count) == (b"x", 1)
        began = time.monotonic()
        client.reject(arrived)
        await sink.count(1)
        assert time.monotonic() - began >= 0.2
    client.acknowledge(*sink.arrived)
    assert client.losses == []
    [told] = [record.getMessage() for record in caplog.records if "cannot be delayed" in record.getMessage()]
    assert "406 PRECONDITION_FAILED" in told


async def test_a_queue_of_a_delay_that_was_deleted_is_made_again(
    client: Client, foreign: BlockingChannel, queue: str
) -> None:
    sink, _ = await client.subscribe(queue, queue=queue, **DELAY)
    await client.publish(queue, b"1")
    client.reject(await sink.next())
    client.acknowledge(await sink.next())
    foreign.queue_delete(f"{queue}.delay.100")
    # it is found out by the message that comes back, and is in its queue again
    await client.publish(queue, b"2")
    client.reject(await sink.next())
    again = await sink.next()
    assert (again.payload, again.extensions.get("redelivered")) == (b"2", True)
    client.reject(again)
    assert (await sink.next()).delivery_count == 2
    assert exists(foreign, f"{queue}.delay.100")
    assert client.losses == []


async def test_a_confirm_after_the_lease_of_the_queue_does_not_count(
    client: Client, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delays, "LEASE", delays.LEASE_MARGIN)  # over as soon as it has begun
    sink, _ = await client.subscribe(queue, queue=queue, redeliveryDelay=0.5)
    await client.publish(queue, b"x")
    client.reject(await sink.next())
    both = [await sink.next(), await sink.next()]  # twice rather than never
    assert sorted(each.delivery_count or 0 for each in both) == [1, 2]


async def test_closing_waits_until_rejected_messages_are_moved(
    client: Client, foreign: BlockingChannel, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "CLOSE_GRACE", PATIENCE)
    sink, handle = await client.subscribe(queue, queue=queue, redeliveryDelay=60)
    await client.publish(queue, *[b"x"] * 300)  # more than the window
    client.reject(*await sink.count(300))
    await client.adapter.unsubscribe(handle)
    assert depth(foreign, queue) == 0
    assert depth(foreign, f"{queue}.delay.60000") == 300


async def test_a_loss_during_a_delay_redelivers_all_messages(client: Client, queue: str) -> None:
    sink, _ = await client.subscribe(queue, queue=queue, redeliveryDelay=0.1)
    await client.publish(queue, *[b"%d" % number for number in range(50)])
    client.reject(*await sink.count(50))
    client.wires[0].abort("test")
    await client.lost()
    await client.open()
    sink, _ = await client.subscribe(queue, queue=queue, redeliveryDelay=0.1)
    await eventually_async(lambda: len(set(sink.payloads)) == 50, "all of them")


# --- the header alone

SHORT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
FIELDS = st.dictionaries(
    st.sampled_from(["a", "b", "x-death", "CC", "x-first-death-queue", "x-delivery-count", "x-acquired-count", "ü"]),
    st.integers(0, 2**40) | SHORT | st.booleans() | st.lists(st.integers(0, 9), max_size=3)
    | st.dictionaries(st.sampled_from(["n", "m"]), SHORT, max_size=2),
    max_size=6,
)  # fmt: skip


def raw(given: Basic.Properties) -> bytes:
    data = pamqp.frame.marshal(header.ContentHeader(0, 1, given), 1)
    return data[7 + 12 : -1]


@given(
    FIELDS, st.none() | SHORT, st.none() | SHORT, st.none() | st.integers(0, 9), st.none() | SHORT,
    st.none() | st.sampled_from(["me", "other"]), SHORT, SHORT,
)  # fmt: skip
def test_counting_changes_nothing_else_and_can_be_undone(
    fields: dict[str, Any], content_type: str | None, correlation: str | None, priority: int | None,
    app_id: str | None, user: str | None, exchange: str, key: str,
) -> None:  # fmt: skip
    given = Basic.Properties(
        content_type=content_type, headers=fields or None, correlation_id=correlation, priority=priority,
        app_id=app_id, user_id=user, delivery_mode=2, expiration="5",
    )  # fmt: skip
    route = short_string(exchange) + short_string(key)
    counted, total = raw(given), 0
    counts = [fields.get(name) for name in ("x-acquired-count", "x-delivery-count")]
    returned = next((count for count in counts if type(count) is int), 0)
    elsewhere = short_string("") + short_string("the queue")
    for times in (1, 2, 3):
        # on its second way the broker has added headers of its own
        counted, total = counting.recount(counted, route if times == 1 else elsewhere, "me")
        assert total == times + returned
        read = properties.read(counted, 0, len(counted), False)
        assert read.origin == (exchange, key)
        assert read.delivery_count == total + 1
    before = properties.read(raw(given), 0, len(raw(given)), False)
    expected = dict(before.extensions.get("headers", {}))
    for name in ("x-acquired-count", "x-delivery-count"):
        expected.pop(name, None)
    assert dict(read.extensions.get("headers", {})) == expected
    assert read[:4] == before[:4]
    told = {key: value for key, value in before.extensions.items() if key != "userId" or user == "me"}
    assert {**read.extensions, "headers": 0} == {**told, "headers": 0}
    _, _, frame = pamqp.frame.unmarshal(
        struct.pack(">BHI", 2, 1, 12 + len(counted)) + struct.pack(">HHQ", 60, 0, 0) + counted + b"\xce"
    )
    assert isinstance(frame, header.ContentHeader)
    assert frame.properties.user_id == (user if user == "me" else None)
    assert frame.properties.app_id == app_id
    for name, value in fields.items():
        if name in ("a", "b", "ü"):
            assert frame.properties.headers[name] == value


@given(st.binary(max_size=80), st.binary(min_size=1, max_size=20))
def test_malformed_properties_raise_documented_errors_only(data: bytes, route: bytes) -> None:
    with contextlib.suppress(ValueError, IndexError, struct.error):
        counting.recount(data, route, "me")


@table("theirs", ["text", 5, {"count": 1}, {"count": "1", "exchange": "", "routing-key": "", "aside": {}}])
def test_a_header_of_that_name_of_another_program_is_left_unchanged(theirs: Any) -> None:
    data = raw(Basic.Properties(headers={"x-delayed-redelivery": theirs}))
    read = properties.read(data, 0, len(data), False)
    assert (read.origin, read.delivery_count) == (None, None)
    assert "x-delayed-redelivery" in read.extensions["headers"]

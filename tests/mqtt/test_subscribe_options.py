"""``retainHandling``, ``retainAsPublished`` and ``noLocal`` (MQTT 5, 3.8.3.1)."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from messaging import Messaging
from messaging.errors import (
    ConnectionLostError,
    InvalidExtensionError,
    SubscriptionRefusedError,
    UnsupportedFeatureError,
)
from messaging.testing.brokers import Mosquitto
from messaging.testing.conformance.helpers import nothing_more, online, publish, receive
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from messaging.testing.waiting import subscribed as subscribed_at
from tests.mqtt.conftest import Connect
from tests.mqtt.harness import url_of
from tests.mqtt.peer import accept, reconnect, session, subscribed

pytestmark = pytest.mark.usefixtures("needs_mosquitto")

_numbers = itertools.count(1)
#: CONNACK properties: Subscription Identifier Available 0
NO_IDENTIFIERS = b"\x29\x00"


@pytest.fixture
def m(mosquitto: Mosquitto, connect: Connect) -> Messaging:
    return connect()


@pytest.fixture
def other(mosquitto: Mosquitto, connect: Connect) -> Messaging:
    return connect()


@pytest.fixture
def channel(other: Messaging) -> str:
    """A channel of this test alone, with the retained message ``b"kept"``."""
    name = f"options/{next(_numbers)}"
    publish(other, name, [b"kept"], qos=1, retain=True)
    return name


# --- retain handling


@table("first", [0, 1, 2])
@table("second, expected", [(0, [b"kept"]), (1, []), (2, [])])
def test_retain_handling_of_a_second_stream_is_its_own(
    m: Messaging, channel: str, first: int, second: int, expected: list[bytes]
) -> None:
    with m.subscribe(channel, qos=1, retain_handling=first) as one:
        receive(one, 0 if first == 2 else 1)
        with m.subscribe(channel, qos=1, retain_handling=second) as two:
            assert receive(two, len(expected)) == expected
            nothing_more(m, channel, two, qos=1)
            assert receive(one, 1) == [b"sentinel"]


@table("handling", [0, 1])
def test_a_subscription_that_was_ended_is_new_again(m: Messaging, channel: str, handling: int) -> None:
    for _ in range(2):
        with m.subscribe(channel, qos=1, retain_handling=handling) as stream:
            assert receive(stream, 1) == [b"kept"]


@table("handling", [0, 1, 2])
@table("is_kept", {"where the session is gone": False, "where the session is kept": True})
def test_reconnecting_brings_retained_messages_again_only_where_it_subscribes_anew(
    proxy: Proxy, connect: Connect, channel: str, handling: int, is_kept: bool
) -> None:
    expected = [b"kept"] * (handling < 2)
    m = connect(url_of(proxy), session_expiry=100 if is_kept else 0)
    qos = 0 if is_kept else 1  # an answer may get lost
    with m.subscribe(channel, qos=qos, retain_handling=handling) as stream:
        assert receive(stream, len(expected)) == expected
        _sever(m, proxy)
        if not is_kept:
            assert receive(stream, len(expected)) == expected
        nothing_more(m, channel, stream, qos=qos)


def test_of_two_streams_that_want_retained_messages_of_new_subscriptions_one_gets_them_after_a_loss(
    proxy: Proxy, connect: Connect, channel: str
) -> None:
    """The broker is asked twice, and has one subscription: it is new once."""
    m = connect(url_of(proxy))
    inboxes = [subscribed_at(m, channel, qos=1, retain_handling=1) for _ in range(2)]
    inboxes[0].wait_for(1)
    _sever(m, proxy)
    publish(m, channel, [b"end"], qos=1)
    for inbox in inboxes:
        eventually(lambda: b"end" in inbox.payloads)  # noqa: B023  # called at once
    assert sum(inbox.payloads.count(b"kept") for inbox in inboxes) == 2


def _sever(m: Messaging, proxy: Proxy) -> None:
    proxy.sever()
    eventually(lambda: m.runtime.get_runtime_dto().connection.cause is not None, "the loss is noticed")
    online(m)


# --- retain as published


def test_live_messages_say_whether_they_are_retained_and_old_ones_do_anyway(
    m: Messaging, other: Messaging, channel: str
) -> None:
    with m.subscribe(channel, qos=1, retain_as_published=True) as told, other.subscribe(channel, qos=1) as untold:
        publish(other, channel, [b"live"], qos=1, retain=True)
        publish(other, channel, [b"fleeting"], qos=1)
        assert _flags(told, 3) == [(b"kept", True), (b"live", True), (b"fleeting", None)]
        assert _flags(untold, 3) == [(b"kept", True), (b"live", None), (b"fleeting", None)]


def test_a_stream_beside_one_that_overlaps_gets_each_message_once_with_its_own_flag(
    m: Messaging, other: Messaging, channel: str
) -> None:
    with m.subscribe(channel, qos=1, retain_as_published=True) as told, m.subscribe(f"{channel}/#", qos=1) as untold:
        assert _flags(told, 1) == _flags(untold, 1) == [(b"kept", True)]
        publish(other, channel, [b"live"], qos=1, retain=True)
        assert _flags(told, 1) == [(b"live", True)]
        assert _flags(untold, 1) == [(b"live", None)]
        for stream in (told, untold):
            nothing_more(other, channel, stream, qos=1)
            if stream is told:
                assert receive(untold, 1) == [b"sentinel"]


def test_a_second_stream_of_the_channel_is_refused_until_the_first_has_ended(m: Messaging, channel: str) -> None:
    with m.subscribe(channel, qos=1, retain_as_published=True) as stream:
        assert receive(stream, 1) == [b"kept"]
        for options, text in (
            ({"retain_as_published": True}, "there can be but one"),
            ({}, "other values"),
            ({"no_local": True, "retain_as_published": True}, "other values"),
        ):
            refused = m.subscribe(channel, qos=1, **options)
            error = refused.ready.exception(PATIENCE)
            assert isinstance(error, SubscriptionRefusedError)
            assert repr(channel) in str(error)
            assert text in str(error)
        nothing_more(m, channel, stream, qos=1)  # and the first one does not notice
    with m.subscribe(channel, qos=1, retain_as_published=True) as again:
        assert receive(again, 1) == [b"kept"]


def test_a_stream_may_follow_one_whose_subscription_is_kept(other: Messaging, connect: Connect, channel: str) -> None:
    m = connect(client_id=f"keeper of {channel}", clean_start=False, session_expiry=60)
    options: dict[str, Any] = {"qos": 1, "retain_as_published": True, "keep_subscription": True}
    with m.subscribe(channel, **options) as stream:
        assert _flags(stream, 1) == [(b"kept", True)]
    publish(other, channel, [b"meanwhile"], qos=1)
    with m.subscribe(channel, retain_handling=2, **options) as stream:
        stream.ready.result(PATIENCE)
        publish(other, channel, [b"live"], qos=1, retain=True)
        assert _flags(stream, 2) == [(b"meanwhile", None), (b"live", True)]
        nothing_more(other, channel, stream, qos=1)


@table(
    "first, second",
    [
        ({}, {"retain_as_published": True}),
        ({"retain_as_published": True}, {}),
        ({}, {"no_local": True}),
        ({"no_local": True}, {"retain_as_published": True}),
        ({"queue": "q"}, {"queue": "q", "retain_as_published": True}),
        ({"queue": "q", "retain_as_published": True}, {"queue": "q"}),
    ],
)
def test_the_next_stream_of_a_kept_subscription_may_have_other_options(
    first: dict[str, Any], second: dict[str, Any], other: Messaging, connect: Connect
) -> None:
    channel = f"options/{next(_numbers)}"
    m = connect(client_id=f"changer of {channel}", clean_start=False, session_expiry=60)
    more: dict[str, Any] = {"qos": 1, "keep_subscription": True, "retain_handling": 2}
    for options, name in ((first, b"1"), (second, b"2"), (first, b"3"), (second, b"4")):
        with m.subscribe(channel, **more, **options) as stream:
            stream.ready.result(PATIENCE)
            if name > b"1":
                # what the session has for the kept subscription has the flag of the options of before
                before = first if options is second else second
                flag = before.get("retain_as_published")
                assert _flags(stream, 2) == [(b"meanwhile", flag), (b"and then", flag)]
            publish(m, channel, [b"mine"], qos=1)
            publish(other, channel, [name], qos=1, retain=True)
            if not options.get("no_local"):
                assert receive(stream, 1) == [b"mine"]
            assert _flags(stream, 1) == [(name, options.get("retain_as_published"))]
        publish(other, channel, [b"meanwhile", b"and then"], qos=1, retain=True)


async def test_a_subscription_with_other_options_is_ended_and_made_again_in_one_write() -> None:
    async with session(client_id="me", clean_start=False, session_expiry=60) as (core, _, connection):
        _, handle = await subscribed(core, connection, "t", qos="1")
        core.adapter.detach(handle)
        subscribing = asyncio.create_task(core.subscribe("t", qos="1", no_local=True))
        ending = await connection.expect(0xA0)
        beginning = await connection.expect(0x80)  # without the answer to UNSUBSCRIBE
        connection.deliver("t", b"on its way", 1, 1)
        connection.send(0xB0, ending[:2] + b"\0\0")
        connection.send(0x90, beginning[:2] + b"\0\1")
        sink, _ = await subscribing
        await sink.count(1)
        # and now that is the subscription
        subscribing = asyncio.create_task(core.subscribe("t", qos="1", no_local=True))
        await connection.suback()
        await subscribing


@table("end", ["lost", "cancelled", "refused unsubscription"])
async def test_other_options_are_asked_for_until_the_broker_has_confirmed_them(end: str) -> None:
    async with session(client_id="me", clean_start=False, session_expiry=60) as (core, peer, connection):
        other, _ = await subscribed(core, connection, "other")
        _, handle = await subscribed(core, connection, "t", qos="1")
        core.adapter.detach(handle)
        subscribing = asyncio.create_task(core.subscribe("t", qos="1", retain_as_published=True))
        ending = await connection.expect(0xA0)
        beginning = await connection.expect(0x80)
        if end == "lost":
            connection, _ = await reconnect(core, peer, connection, present=True)
            with pytest.raises(ConnectionLostError):
                await subscribing
        else:
            if end == "cancelled":
                subscribing.cancel()
                await asyncio.wait([subscribing])
            connection.send(0xB0, ending[:2] + b"\0" + (b"\x87" if end.startswith("refused") else b"\0"))
            connection.send(0x90, beginning[:2] + b"\0\1")
        if end == "refused unsubscription":
            core.adapter.detach((await subscribing)[1])
        connection.deliver("t", b"meanwhile", 1, 1, 1)
        connection.deliver("other", b"behind it")
        await other.count(1)
        again = asyncio.create_task(core.subscribe("t", qos="1", retain_as_published=True))
        if end != "cancelled":  # then the broker has answered all the same
            await connection.unsuback()
        await connection.suback()
        sink, _ = await again
        await sink.count(1)


@table("end", ["offline", "unanswered"])
async def test_a_stream_with_other_options_follows_one_that_the_broker_did_not_confirm_to_end(end: str) -> None:
    async with session(client_id="me", clean_start=False, session_expiry=60) as (core, peer, connection):
        _, handle = await subscribed(core, connection, "t", qos="1", retain_as_published=True)
        if end == "offline":
            connection.abort()
            await core.lost(1)
            await core.adapter.unsubscribe(handle)
            connection, _ = await accept(core, peer, present=True)
        else:
            unsubscribing = asyncio.create_task(core.adapter.unsubscribe(handle))
            await connection.expect(0xA0)
            connection, _ = await reconnect(core, peer, connection, present=True)
            with pytest.raises(ConnectionLostError):
                await unsubscribing
        # a message of the old subscription: with the flag it may be a new one
        connection.deliver("t", b"live", 1, 1, 1)
        subscribing = asyncio.create_task(core.subscribe("t", qos="1"))
        await connection.unsuback()
        await connection.suback()
        sink, _ = await subscribing
        await sink.count(1)


async def test_a_stream_with_other_options_waits_for_the_end_of_the_one_before() -> None:
    async with session(client_id="me", clean_start=False, session_expiry=60) as (core, _, connection):
        _, handle = await subscribed(core, connection, "t", qos="1", retain_as_published=True)
        unsubscribing = asyncio.create_task(core.adapter.unsubscribe(handle))
        ending = await connection.expect(0xA0)
        subscribing = asyncio.create_task(core.subscribe("t", qos="1"))
        connection.deliver("t", b"crossed", 1, 1, 1)
        connection.send(0xB0, ending[:2] + b"\0\0")
        await unsubscribing
        await connection.suback()  # the subscription has ended: no second UNSUBSCRIBE
        sink, _ = await subscribing
        await sink.count(1)


def test_members_of_a_queue_may_be_several_and_get_the_flag_but_no_old_messages(
    m: Messaging, other: Messaging, channel: str
) -> None:
    inboxes = [subscribed_at(m, channel, qos=1, queue="q", retain_as_published=True) for _ in range(2)]
    publish(other, channel, [b"1", b"2"], qos=1, retain=True)
    publish(other, channel, [b"3", b"4"], qos=1)
    eventually(lambda: sum(map(len, inboxes)) == 4, "four messages")
    found = {message.payload: message.context.extensions.get("retain") for inbox in inboxes for message in inbox}
    assert found == {b"1": True, b"2": True, b"3": None, b"4": None}
    assert all(inboxes)


async def test_retain_as_published_works_without_subscription_identifiers() -> None:
    """The broker cannot say which SUBSCRIBE a retained message answers: there is but one that it can be."""
    async with session(NO_IDENTIFIERS) as (core, _, connection):
        told, _ = await subscribed(core, connection, "t", retain_as_published=True)
        for payload, flags in ((b"old", 1), (b"live", 1), (b"again", 1), (b"fleeting", 0)):
            connection.deliver("t", payload, flags=flags)
        await told.count(4)
        assert [(each.payload, each.extensions.get("retain")) for each in told.arrived] == [
            (b"old", True), (b"live", True), (b"again", True), (b"fleeting", None),
        ]  # fmt: skip


async def test_without_identifiers_other_streams_have_a_retained_message_once() -> None:
    async with session(NO_IDENTIFIERS) as (core, _, connection):
        one, _ = await subscribed(core, connection, "t")
        connection.deliver("t", b"old", flags=1)
        await one.count(1)
        two, _ = await subscribed(core, connection, "t")
        connection.deliver("t", b"old", flags=1)
        await two.count(1)
        connection.deliver("t", b"live")
        for sink in (one, two):
            await sink.count(2)
            assert sink.payloads == [b"old", b"live"]


def _flags(stream: Any, count: int) -> list[tuple[bytes, bool | None]]:
    messages = [stream.receive(PATIENCE) for _ in range(count)]
    return [(message.payload, message.context.extensions.get("retain")) for message in messages]


# --- no local


def test_with_no_local_own_messages_do_not_come_back(m: Messaging, other: Messaging, channel: str) -> None:
    with (
        m.subscribe(channel, qos=1, no_local=True, retain_handling=2) as quiet,
        m.subscribe(f"{channel}/#", qos=1, retain_handling=2) as loud,
    ):
        publish(m, channel, [b"mine"], qos=1)
        publish(other, channel, [b"theirs"], qos=1)
        assert receive(loud, 2) == [b"mine", b"theirs"]
        assert receive(quiet, 1) == [b"theirs"]


def test_two_no_local_streams_of_a_channel_share_a_subscription(m: Messaging, other: Messaging, channel: str) -> None:
    with (
        m.subscribe(channel, no_local=True, retain_handling=2) as one,
        m.subscribe(channel, no_local=True, retain_handling=2) as two,
    ):
        publish(m, channel, [b"mine"], qos=1)
        publish(other, channel, [b"theirs"], qos=1)
        assert receive(one, 1) == receive(two, 1) == [b"theirs"]
        loud = m.subscribe(channel)
        assert isinstance(loud.ready.exception(PATIENCE), SubscriptionRefusedError)


def test_no_local_is_not_for_queues(m: Messaging) -> None:
    """A protocol error, says MQTT 5, 3.8.3.1: the broker would hang up."""
    with pytest.raises(InvalidExtensionError, match="without queue") as refusal:
        m.subscribe("x", queue="q", no_local=True)
    assert refusal.value.key == "noLocal"
    with m.subscribe("x", queue="q", no_local=False) as stream:
        publish(m, "x", [b"mine"], qos=1)
        assert receive(stream, 1) == [b"mine"]


# --- all of them


@table(
    "options, byte",
    [
        ({}, 0x00),
        ({"qos": "2"}, 0x02),
        ({"no_local": True}, 0x04),
        ({"retain_as_published": True}, 0x08),
        ({"retain_handling": 1}, 0x10),
        ({"retain_handling": 2}, 0x20),
        ({"queue": "q", "retain_handling": 0}, 0x20),  # a queue gets no retained messages
        ({"qos": "1", "no_local": True, "retain_as_published": True, "retain_handling": 2}, 0x2D),
    ],
)
async def test_subscribe_carries_the_options(options: dict[str, Any], byte: int) -> None:
    async with session() as (core, peer, connection):
        for _ in range(2):  # the core asks again after a loss
            subscribing = asyncio.create_task(core.subscribe("t", **options))
            assert (await connection.suback())[-1] == byte
            await subscribing
            connection, _ = await reconnect(core, peer, connection, present=False)


@table(
    "key, value",
    [
        ("retain_handling", 3), ("retain_handling", -1), ("retain_handling", True), ("retain_handling", "1"),
        ("retain_as_published", 1), ("no_local", "yes"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(m: Messaging, key: str, value: object) -> None:
    with pytest.raises(InvalidExtensionError):
        m.subscribe("x", **{key: value})


@table("key", ["retain_handling", "retain_as_published", "no_local"])
def test_subscribe_options_need_mqtt_5_and_are_for_subscribing(connect: Connect, m: Messaging, key: str) -> None:
    value = 1 if key == "retain_handling" else True
    with pytest.raises(InvalidExtensionError, match="for subscribing"):
        m.publish("x", b"", **{key: value})
    old = connect(version="3.1.1")
    with pytest.raises(UnsupportedFeatureError):
        old.subscribe("x", **{key: value})

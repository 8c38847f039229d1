"""The broker behind ``memory://``, where the core's tests and the conformance suite do not look."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.memory import MemoryAdapter
from adapters.memory import broker as module
from adapters.memory.broker import Broker, routing_matcher
from messaging import Message, MessageStream
from messaging.errors import (
    ConfigurationError,
    DeadlineError,
    PublishRefusedError,
    SubscriptionRefusedError,
)
from messaging.instance import Messaging
from messaging.services import ServiceRegistry
from tests.doubles.consumers import acknowledge, manual, numbered, receive, reject
from tests.doubles.fake import PATIENCE, on_loop, settle_loop, until
from tests.doubles.fixtures import Connect


def broker_of(m: Messaging) -> Broker:
    adapter = m._adapter
    assert isinstance(adapter, MemoryAdapter)
    return on_loop(lambda: adapter.broker)


def drop(m: Messaging) -> None:
    """Have the broker drop the connection, as for one that misbehaves."""
    broker = broker_of(m)
    assert on_loop(broker.disconnect, m.name)


def quiet(stream: MessageStream) -> bool:
    """Whether nothing comes."""
    settle_loop()
    try:
        stream.receive(0.02)
    except DeadlineError:
        return True
    return False


# --- who meets whom


def test_instances_with_the_same_name_meet_and_others_do_not(connect: Connect) -> None:
    first, second, other = connect("memory://x"), connect("memory://x"), connect("memory://y")
    with second.subscribe("a") as stream, other.subscribe("a") as elsewhere:
        first.publish("a", b"1").result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"1"
        assert quiet(elsewhere)


def test_a_broker_lives_as_long_as_somebody_is_connected(connect: Connect) -> None:
    first = connect("memory://x")
    first.publish("a", b"kept", retain=True).result(PATIENCE)
    second = connect("memory://x")
    first.close()
    with second.subscribe("a") as stream:
        assert stream.receive(PATIENCE).payload == b"kept"
    second.close()
    assert "x" not in module._brokers
    with connect("memory://x").subscribe("a") as stream:
        assert quiet(stream)


def test_two_instances_of_one_name_in_two_registries_are_two_clients(connect: Connect) -> None:
    """A name is unique in its registry only."""
    first = connect("memory://x", name="same", services=ServiceRegistry())
    second = connect("memory://x", name="same", services=ServiceRegistry())
    first.close()
    third = connect("memory://x")
    with second.subscribe("a") as stream:
        third.publish("a", b"1").result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"1"


@pytest.mark.parametrize("url", ["memory://x:1", "memory://u@x", "memory://u:p@x", "memory://x/p"])
def test_a_memory_url_is_a_name_and_nothing_else(connect: Connect, url: str) -> None:
    with pytest.raises(ConfigurationError, match="just memory://name"):
        connect(url)
    assert connect("memory://x/")


# --- queues


def test_subscribers_of_a_queue_share_and_others_get_everything(connect: Connect) -> None:
    m = connect()
    with (
        m.subscribe("a", queue="jobs", prefetch=1) as first,
        m.subscribe("a", queue="jobs", prefetch=1) as second,
        m.subscribe("a") as everything,
    ):
        for payload in numbered(10):
            m.publish("a", payload).result(PATIENCE)
        shared = sorted(receive(first, 5) + receive(second, 5))
        assert shared == numbered(10)
        assert receive(everything, 10) == numbered(10)


def test_a_queue_keeps_what_arrives_while_nobody_consumes(connect: Connect) -> None:
    m = connect()
    m.subscribe("a", queue="jobs").close().result(PATIENCE)
    with m.subscribe("a", queue="jobs"):
        pass
    for payload in numbered(3):
        m.publish("a", payload).result(PATIENCE)
    with m.subscribe("a", queue="jobs") as stream:
        assert receive(stream, 3) == numbered(3)


def test_what_was_not_settled_goes_back_in_order_and_is_marked(connect: Connect) -> None:
    m = connect()
    stream = manual(m, queue="jobs")
    for payload in numbered(3):
        m.publish("a", payload).result(PATIENCE)
    receive(stream, 3)
    stream.close().result(PATIENCE)
    stream = manual(m, queue="jobs")
    again = [stream.receive(PATIENCE) for _ in range(3)]
    assert [message.payload for message in again] == numbered(3)
    assert all(message.context.extensions["redelivered"] for message in again)
    for message in again:
        assert acknowledge(message)
    stream.close().result(PATIENCE)


def test_a_rejected_message_comes_again_first_and_counts(connect: Connect) -> None:
    m = connect()
    stream = manual(m, maxDeliveries=3, deadLetterChannel="dead")
    with m.subscribe("dead") as dead:
        m.publish("a", b"bad", headers={"x": "y"}).result(PATIENCE)
        for delivery in range(3):
            message = stream.receive(PATIENCE)
            assert message.context.extensions.get("redelivered", False) == (delivery > 0)
            assert reject(message)
        letter = dead.receive(PATIENCE)
        assert letter.payload == b"bad"
        headers = letter.context.extensions["headers"]
        assert headers["x"] == "y"
        assert headers["x-dead-letter-deliveries"] == "3"
    stream.close().result(PATIENCE)


def test_a_full_queue_makes_publishers_wait(connect: Connect) -> None:
    m = connect(max_queue_length=2)
    stream = manual(m, prefetch=1)
    for payload in numbered(3):
        m.publish("a", payload).result(PATIENCE)
    waiting = m.publish("a", b"3")
    settle_loop()
    assert not waiting.done()
    for payload in numbered(4):
        message = stream.receive(PATIENCE)
        assert message.payload == payload
        acknowledge(message)
    assert waiting.result(PATIENCE) is None
    stream.close().result(PATIENCE)


def test_a_full_queue_does_not_stop_the_publisher_for_ever(connect: Connect) -> None:
    """The deadline of the message that waits ends its waiting, and what is behind it goes on."""
    m = connect(max_queue_length=1)
    stream = manual(m, channel="full", prefetch=1)
    m.publish("full", b"0").result(PATIENCE)
    m.publish("full", b"1").result(PATIENCE)
    blocked = m.publish("full", b"2", timeout=0.1)
    behind = m.publish("elsewhere", b"3", timeout=PATIENCE)
    assert isinstance(blocked.exception(PATIENCE), DeadlineError)
    assert behind.result(PATIENCE) is None
    stream.close().result(PATIENCE)


def test_a_connection_dropped_while_waiting_for_room_is_usable_again(connect: Connect) -> None:
    m, consumer = connect("memory://x", max_queue_length=1), connect("memory://x", max_queue_length=1)
    stream = manual(consumer, channel="full", prefetch=1)
    m.publish("full", b"0").result(PATIENCE)
    m.publish("full", b"1").result(PATIENCE)
    blocked = m.publish("full", b"2", timeout=0.5)
    settle_loop()
    drop(m)
    assert m.publish("elsewhere", b"3", timeout=PATIENCE).result(PATIENCE) is None
    assert isinstance(blocked.exception(PATIENCE), DeadlineError)
    stream.close().result(PATIENCE)


def test_a_queue_that_ends_lets_its_publishers_go(connect: Connect) -> None:
    m = connect(max_queue_length=1)
    stream = manual(m, prefetch=1)
    m.publish("a", b"0").result(PATIENCE)
    m.publish("a", b"1").result(PATIENCE)
    waiting = m.publish("a", b"2")
    settle_loop()
    assert not waiting.done()
    stream.close().result(PATIENCE)
    assert waiting.result(PATIENCE) is None


def test_without_autocreate_what_nobody_gets_is_refused(connect: Connect) -> None:
    m = connect()
    error = m.publish("a", b"1", autocreate=False).exception(PATIENCE)
    assert isinstance(error, PublishRefusedError)
    assert "'a'" in str(error)
    stream = m.subscribe("a", queue="nowhere", autocreate=False)
    assert isinstance(stream.ready.exception(PATIENCE), SubscriptionRefusedError)
    with m.subscribe("a"):
        assert m.publish("a", b"1", autocreate=False).result(PATIENCE) is None


# --- retained, priority, time to live, wills


def test_retained_messages_come_first_and_can_be_forgotten(connect: Connect) -> None:
    m = connect()
    m.publish("a/b", b"old", retain=True).result(PATIENCE)
    m.publish("a/b", b"new", retain=True).result(PATIENCE)
    with m.subscribe("a/+") as stream:
        message = stream.receive(PATIENCE)
        assert (message.payload, message.context.extensions["retain"]) == (b"new", True)
        m.publish("a/b", b"live", retain=True).result(PATIENCE)
        assert "retain" not in stream.receive(PATIENCE).context.extensions
    m.publish("a/b", b"", retain=True).result(PATIENCE)
    with m.subscribe("a/+") as stream:
        assert quiet(stream)


def test_higher_priority_overtakes_what_waits(connect: Connect) -> None:
    m = connect()
    stream = manual(m, prefetch=1)
    m.publish("a", b"first").result(PATIENCE)
    for payload, priority in ((b"low", 0), (b"high", 9), (b"middle", 5), (b"low2", None), (b"high2", 9)):
        keywords = {} if priority is None else {"priority": priority}
        m.publish("a", payload, **keywords).result(PATIENCE)
    order = []
    for _ in range(6):
        message = stream.receive(PATIENCE)
        order.append(message.payload)
        acknowledge(message)
    assert order == [b"first", b"high", b"high2", b"middle", b"low", b"low2"]
    stream.close().result(PATIENCE)


def test_what_is_too_old_is_not_delivered_and_the_rest_of_the_time_is_told(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = connect()
    stream = manual(m, prefetch=1)
    m.publish("a", b"first").result(PATIENCE)
    m.publish("a", b"short", time_to_live=5).result(PATIENCE)
    m.publish("a", b"long", time_to_live=500).result(PATIENCE)
    real = time.monotonic

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return real() + 10

    monkeypatch.setattr(module, "time", Clock)
    acknowledge(stream.receive(PATIENCE))
    message = stream.receive(PATIENCE)
    assert message.payload == b"long"
    assert 480 < message.context.extensions["timeToLive"] < 491
    stream.close().result(PATIENCE)


def test_a_will_is_published_when_a_client_is_dropped_and_not_when_it_leaves(connect: Connect) -> None:
    watcher = connect("memory://x")
    with watcher.subscribe("wills") as stream:
        leaving, dropped = connect("memory://x"), connect("memory://x")
        for m in (leaving, dropped):
            m.publish("wills", m.name.encode(), last_will=True).result(PATIENCE)
        leaving.close()
        drop(dropped)
        assert stream.receive(PATIENCE).payload == dropped.name.encode()
        assert quiet(stream)


# --- reconnecting


def test_a_dropped_client_comes_back_with_its_subscriptions(connect: Connect) -> None:
    m, other = connect("memory://x"), connect("memory://x")
    with m.subscribe("a") as stream:
        for payload in numbered(5):
            drop(m)
            until(lambda: m._connection.state == "connected" and len(broker_of(other).clients) == 2)
            stream._primary.ready.result(PATIENCE)
            until(lambda: stream._primary.handle is not None)
            other.publish("a", payload).result(PATIENCE)
            assert stream.receive(PATIENCE).payload == payload


def test_what_a_dropped_consumer_of_a_queue_had_goes_to_another(connect: Connect) -> None:
    first, second = connect("memory://x", reconnect_min=5.0), connect("memory://x")
    stream = manual(first, queue="jobs")
    second.publish("a", b"1").result(PATIENCE)
    message = stream.receive(PATIENCE)
    with second.subscribe("a", queue="jobs") as other:
        drop(first)
        again = other.receive(PATIENCE)
        assert again.payload == b"1"
        assert again.context.extensions["redelivered"]
    assert not acknowledge(message)
    stream.close().result(PATIENCE)


# --- load


def test_many_threads_many_streams_nothing_lost(connect: Connect) -> None:
    m = connect()
    seen: list[list[bytes]] = [[] for _ in range(5)]
    streams = [m.subscribe("a/#", buffer_size=64) for _ in seen]
    for number, stream in enumerate(streams):
        stream.subscribe(lambda message, number=number: seen[number].append(message.payload))
    barrier = threading.Barrier(4)

    def publish(thread: int) -> None:
        barrier.wait(PATIENCE)
        for number in range(250):
            m.publish(f"a/{thread}", b"%d/%d" % (thread, number))

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(publish, thread) for thread in range(4)]:
            each.result(PATIENCE)
    for received in seen:
        until(lambda received=received: len(received) == 1000)  # type: ignore[misc]
        for thread in range(4):
            mine = [payload for payload in received if payload.startswith(b"%d/" % thread)]
            assert mine == [b"%d/%d" % (thread, number) for number in range(250)]


def test_a_payload_is_not_copied_per_subscriber(connect: Connect) -> None:
    m = connect()
    with m.subscribe("a") as first, m.subscribe("a") as second:
        m.publish("a", b"x" * 1000).result(PATIENCE)
        messages: list[Message] = [first.receive(PATIENCE), second.receive(PATIENCE)]
        assert messages[0].payload is messages[1].payload
        assert messages[0].context is not messages[1].context


# --- routing keys


def naive(words: list[str], key: list[str]) -> bool:
    if not words:
        return not key
    if words[0] == "#":
        return any(naive(words[1:], key[skip:]) for skip in range(len(key) + 1))
    return bool(key) and words[0] in ("*", key[0]) and naive(words[1:], key[1:])


WORDS = st.sampled_from(["a", "b", "", "*", "#", "aa"])


@given(st.lists(WORDS, min_size=1, max_size=6), st.lists(st.sampled_from(["a", "b", "", "aa"]), min_size=1, max_size=6))
def test_routing_keys_match_as_a_naive_matcher_says(pattern: list[str], key: list[str]) -> None:
    assert routing_matcher(".".join(pattern))(".".join(key)) is naive(pattern, key)


def test_a_pattern_of_many_hashes_is_matched_in_reasonable_time() -> None:
    matches = routing_matcher(".".join(["#", "a"] * 20))
    started = time.monotonic()
    assert not matches(".".join(["a"] * 19))
    assert matches(".".join(["a"] * 200))
    assert time.monotonic() - started < 2


# --- a session that is kept


@pytest.mark.parametrize("observed", [True, False])
def test_closing_keeps_the_subscriptions_of_a_session_and_closing_a_stream_does_not(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, observed: bool
) -> None:
    unsubscribed: list[object] = []
    unsubscribe = MemoryAdapter.unsubscribe

    async def noted(self: MemoryAdapter, handle: object) -> None:
        unsubscribed.append(handle)
        await unsubscribe(self, handle)

    monkeypatch.setattr(MemoryAdapter, "keeps_session", property(lambda _: True))
    monkeypatch.setattr(MemoryAdapter, "unsubscribe", noted)
    for _ in range(20):
        m = connect("memory://x")
        stream = m.subscribe("a")
        if observed:
            stream.subscribe()
        stream.ready.result(PATIENCE)
        m.close()
    assert unsubscribed == []
    m = connect("memory://x")
    stream = m.subscribe("a")
    stream.ready.result(PATIENCE)
    stream.close().result(PATIENCE)
    assert len(unsubscribed) == 1

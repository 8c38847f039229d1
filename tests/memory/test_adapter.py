"""The broker behind ``memory://``: its own promises, beside those of the conformance suite and the model."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging import Message
from messaging.errors import ConfigurationError, DeadlineError, InvalidUrlError
from messaging.services import ServiceRegistry
from messaging.testing.conformance.helpers import nothing_more
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from messaging_adapters.memory import MemoryAdapter
from messaging_adapters.memory.queues import routing_matcher
from tests.doubles.consumers import acknowledge, manual, numbered
from tests.doubles.fake import settle_loop
from tests.doubles.fixtures import Connect
from tests.doubles.memory import change_capabilities, drop

# --- who meets whom


def test_instances_with_the_same_name_meet_and_others_do_not(connect: Connect) -> None:
    first, second, other = connect("memory://x"), connect("memory://x"), connect("memory://y")
    with second.subscribe("a") as stream, other.subscribe("a") as elsewhere:
        first.publish("a", b"1").result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"1"
        nothing_more(other, "a", elsewhere)


def test_a_broker_lives_as_long_as_an_instance_is_connected(connect: Connect) -> None:
    first = connect("memory://x")
    first.publish("a", b"kept", retain=True).result(PATIENCE)
    second = connect("memory://x")
    first.close()
    with second.subscribe("a") as stream:
        assert stream.receive(PATIENCE).payload == b"kept"
    second.close()
    m = connect("memory://x")
    with m.subscribe("a") as stream:
        nothing_more(m, "a", stream)


def test_two_instances_of_one_name_in_two_registries_are_two_clients(connect: Connect) -> None:
    """A name is unique in its registry only."""
    first = connect("memory://x", name="same", services=ServiceRegistry())
    second = connect("memory://x", name="same", services=ServiceRegistry())
    first.close()
    third = connect("memory://x")
    with second.subscribe("a") as stream:
        third.publish("a", b"1").result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"1"


@table("url", ["memory://x:1", "memory://u@x", "memory://u:secret@x", "memory://x/p"])
def test_a_memory_url_is_a_name_and_nothing_else(connect: Connect, url: str) -> None:
    with pytest.raises(InvalidUrlError, match="just memory://name") as caught:
        connect(url)
    assert isinstance(caught.value, ConfigurationError)
    assert "secret" not in str(caught.value)
    assert connect("memory://x/")


# --- queues


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


@pytest.mark.usefixtures("virtual_clock")
def test_a_message_that_waits_for_room_fails_at_its_deadline_and_the_next_is_sent(connect: Connect) -> None:
    m = connect(max_queue_length=1)
    stream = manual(m, channel="full", prefetch=1)
    m.publish("full", b"0").result(PATIENCE)
    m.publish("full", b"1").result(PATIENCE)
    blocked = m.publish("full", b"2", timeout=0.1)
    behind = m.publish("elsewhere", b"3", timeout=PATIENCE)
    assert isinstance(blocked.exception(PATIENCE), DeadlineError)
    assert behind.result(PATIENCE) is None
    stream.close().result(PATIENCE)


@pytest.mark.usefixtures("virtual_clock")
def test_an_instance_dropped_while_it_waits_for_room_publishes_again(connect: Connect) -> None:
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


def test_publishers_that_wait_for_room_are_released_when_the_queue_ends(connect: Connect) -> None:
    m = connect(max_queue_length=1)
    stream = manual(m, prefetch=1)
    m.publish("a", b"0").result(PATIENCE)
    m.publish("a", b"1").result(PATIENCE)
    waiting = m.publish("a", b"2")
    settle_loop()
    assert not waiting.done()
    stream.close().result(PATIENCE)
    assert waiting.result(PATIENCE) is None


def test_unsettled_messages_of_a_dropped_consumer_go_to_another_consumer_of_the_queue(connect: Connect) -> None:
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


def test_a_payload_is_not_copied_per_subscriber(connect: Connect) -> None:
    m = connect()
    with m.subscribe("a") as first, m.subscribe("a") as second:
        m.publish("a", b"x" * 1000).result(PATIENCE)
        messages: list[Message] = [first.receive(PATIENCE), second.receive(PATIENCE)]
        assert messages[0].payload is messages[1].payload
        assert messages[0].context is not messages[1].context


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
    started = time.process_time()
    assert not matches(".".join(["a"] * 19))
    assert matches(".".join(["a"] * 200))
    assert time.process_time() - started < 2


@table("observed", [True, False])
def test_closing_keeps_the_subscriptions_of_a_session_and_closing_a_stream_does_not(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, observed: bool
) -> None:
    unsubscribed: list[object] = []
    unsubscribe = MemoryAdapter.unsubscribe

    async def noted(self: MemoryAdapter, handle: object) -> None:
        unsubscribed.append(handle)
        await unsubscribe(self, handle)

    change_capabilities(monkeypatch, keeps_session=True)
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

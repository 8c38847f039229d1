"""Queues are declared, peeked at, purged and deleted without consuming them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messaging import (
    AcknowledgeType,
    ArgumentError,
    ClosedError,
    Features,
    InvalidChannelError,
    InvalidExtensionError,
    Messaging,
    Promise,
    QueueRefusedError,
    SubscriptionRefusedError,
    UnsupportedFeatureError,
)
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature, nothing_more, publish, receive
from messaging.testing.waiting import PATIENCE, eventually, observed

administration = feature(Features.QUEUE_ADMINISTRATION, Features.EXTENSION_QUEUE)


def requests(m: Messaging, name: Any) -> list[Any]:
    """All requests about a queue, except for declaring it."""
    return [lambda: m.queues.peek(name), lambda: m.queues.purge(name), lambda: m.queues.delete(name)]


def declared(m: Messaging, queue: str, channel: str, *payloads: bytes, **context: Any) -> None:
    """Declare a queue, and publish to it."""
    m.queues.declare(queue, channel, **context).result(PATIENCE)
    publish(m, channel, payloads)


@administration
def test_a_declared_queue_keeps_messages_for_its_first_consumer(backend: Backend, m: Messaging) -> None:
    """Declaring it again, with further channels, keeps its messages and its earlier bindings."""
    first, second, queue = backend.channel(), backend.channel(), backend.queue()
    declared(m, queue, first, b"1")
    m.queues.declare(queue, second).result(PATIENCE)
    m.queues.declare(queue).result(PATIENCE)  # as it is
    publish(m, second, [b"2"], **backend.reliable)
    publish(m, first, [b"3"], **backend.reliable)
    with backend.connect().subscribe(first, queue=queue, **backend.reliable) as stream:
        assert receive(stream, 3) == [b"1", b"2", b"3"]


@administration
def test_purging_removes_what_waits_and_says_how_much(backend: Backend, m: Messaging) -> None:
    channel, queue = backend.channel(), backend.queue()
    declared(m, queue, channel, b"1", b"2", b"3")
    assert [m.queues.purge(queue).result(PATIENCE) for _ in range(2)] == [3, 0]
    with m.subscribe(channel, queue=queue, **backend.reliable) as stream:
        nothing_more(m, channel, stream, **backend.reliable)


@administration
def test_peeked_messages_stay_in_order_and_are_marked_as_redelivered(backend: Backend, m: Messaging) -> None:
    channel, queue = backend.channel(), backend.queue()
    payloads = [b"", b"2", b"x" * 300_000, b"4"]
    declared(m, queue, channel, *payloads)
    found = m.queues.peek(queue, 3).result(PATIENCE)
    assert [(each.payload, each.context.channel) for each in found] == [(each, channel) for each in payloads[:3]]
    assert {each.context.acknowledge_state for each in found} == {AcknowledgeType.UNSUPPORTED}
    assert not found[0].context.acknowledge_handler.acknowledge()
    assert "redelivered" not in found[0].context.extensions
    assert [each.payload for each in m.queues.peek(queue).result(PATIENCE)] == payloads
    with m.subscribe(channel, queue=queue, **backend.reliable) as stream:
        messages = [stream.receive(PATIENCE) for _ in payloads]
    assert [each.payload for each in messages] == payloads
    assert all(each.context.extensions.get("redelivered") for each in messages)


@administration
def test_peeking_shows_a_message_as_a_subscription_does(backend: Backend, m: Messaging) -> None:
    channel, queue = backend.channel(), backend.queue()
    m.queues.declare(queue, channel).result(PATIENCE)
    m.publish(channel, {"celsius": 21.5}, headers={"site": "plant"}, correlation_id="7").result(PATIENCE)
    (found,) = m.queues.peek(queue).result(PATIENCE)
    assert found.value() == {"celsius": 21.5}
    context = found.context
    assert (context.content_type, context.correlation_id) == ("application/json", "7")
    assert dict(context.extensions[Features.EXTENSION_HEADERS]) == {"site": "plant"}
    assert m.queues.purge(queue).result(PATIENCE) == 1
    assert m.queues.peek(queue).result(PATIENCE) == []


@administration
def test_deleting_a_queue_says_what_was_in_it_and_ends_its_subscriptions(backend: Backend, m: Messaging) -> None:
    channel, queue = backend.channel(), backend.queue()
    declared(m, queue, channel, b"1", b"2")
    assert m.queues.delete(queue).result(PATIENCE) == 2
    inbox = observed(m.subscribe(channel, queue=queue, **backend.reliable))
    assert m.queues.delete(queue).result(PATIENCE) == 0
    eventually(lambda: inbox.error is not None, "the subscription ended")
    assert isinstance(inbox.error, SubscriptionRefusedError)


@administration
def test_a_queue_is_deleted_only_if_it_is_empty_or_unused(backend: Backend, m: Messaging) -> None:
    channel, queue = backend.channel(), backend.queue()
    declared(m, queue, channel, b"1")
    with pytest.raises(QueueRefusedError, match="empty"):
        m.queues.delete(queue, if_empty=True).result(PATIENCE)
    with m.subscribe(channel, queue=queue, **backend.reliable) as stream:
        assert receive(stream, 1) == [b"1"]
        with pytest.raises(QueueRefusedError, match=queue):
            m.queues.delete(queue, if_unused=True).result(PATIENCE)
        publish(m, channel, [b"2"], **backend.reliable)
        assert receive(stream, 1) == [b"2"]
        stream.close().result(PATIENCE)
    m.queues.purge(queue).result(PATIENCE)
    assert m.queues.delete(queue, if_empty=True, if_unused=True).result(PATIENCE) == 0


@administration
def test_a_queue_that_does_not_exist_is_refused(backend: Backend, m: Messaging) -> None:
    queue = backend.queue()
    for request in (*requests(m, queue), lambda: m.queues.declare(queue, autocreate=False)):
        with pytest.raises(QueueRefusedError, match=queue):
            request().result(PATIENCE)
    with m.subscribe(backend.channel(), **backend.reliable):  # the instance is as it was
        assert m.connection_state.value.is_up


@administration
def test_wrong_arguments_are_refused_at_once(backend: Backend, m: Messaging) -> None:
    queue, channel = backend.queue(), backend.channel()
    for name in ("", "a/b", "a+", "#", "nul\0", 7, None, "x" * 201):
        for request in (*requests(m, name), lambda name=name: m.queues.declare(name)):
            with pytest.raises(InvalidExtensionError, match="queue"):
                request()
    for limit in (0, -1, 1001, 1.5, "3", True, None):
        with pytest.raises(ArgumentError, match="limit"):
            m.queues.peek(queue, limit)  # type: ignore[arg-type]
    for flag in ("if_empty", "if_unused"):
        with pytest.raises(ArgumentError, match=flag):
            m.queues.delete(queue, **{flag: 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidChannelError):
        m.queues.declare(queue, "a/#/b")
    with pytest.raises(InvalidExtensionError, match="priority"):
        m.queues.declare(queue, channel, priority=3)  # type: ignore[call-arg]
    with pytest.raises(UnsupportedFeatureError, match="nonesuch"):
        m.queues.declare(queue, channel, nonesuch=3)  # type: ignore[call-arg]


@administration
def test_requests_about_queues_are_promises_in_event_loops_too(backend: Backend) -> None:
    channel, queue = backend.channel(), backend.queue()

    async def administer() -> tuple[list[bytes], int, int]:
        async with backend.connect() as m:
            await m.queues.declare(queue, channel)
            await m.publish(channel, b"1", **backend.reliable)
            found = await m.queues.peek(queue)
            return [each.payload for each in found], await m.queues.purge(queue), await m.queues.delete(queue)

    assert asyncio.run(administer()) == ([b"1"], 1, 0)


@administration
def test_a_closed_instance_refuses_requests_about_queues(backend: Backend) -> None:
    m, queue = backend.connect(), backend.queue()
    m.queues.declare(queue).result(PATIENCE)
    under_way: list[Promise[Any]] = [request() for request in requests(m, queue)]
    m.close()
    for promise in under_way:  # an answer is always given
        assert promise.exception(PATIENCE) is None or isinstance(promise.exception(), (ClosedError, QueueRefusedError))
    for request in (*requests(m, queue), lambda: m.queues.declare(queue)):
        with pytest.raises(ClosedError):
            request()


def test_queues_are_administered_or_refused(backend: Backend, m: Messaging) -> None:
    """Without the feature the refusal names it, and the instance, before anything is sent."""
    if Features.QUEUE_ADMINISTRATION in m.features:
        return
    for request in (*requests(m, "q"), lambda: m.queues.declare("q", backend.channel())):
        with pytest.raises(UnsupportedFeatureError) as refusal:
            request()
        assert (refusal.value.feature, refusal.value.instance) == (Features.QUEUE_ADMINISTRATION, m.name)

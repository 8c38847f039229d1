"""The extension ``deduplicate``: deliveries of messages that were settled before do not reach the consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reactivex import operators as ops

from messaging import ArgumentError, Features, Message, Messaging, UnsupportedFeatureError
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature, nothing_more, online, publish, receive
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually

pytestmark = [pytest.mark.envelope]

deduplicates = feature("deduplicate", "messageId")


def publish_as(m: Messaging, backend: Backend, channel: str, *ids: str) -> None:
    """Publish a message with each of these ids; its payload is its id."""
    for each in ids:
        m.publish(channel, each.encode(), message_id=each, **backend.reliable).result(PATIENCE)


def deduplicated(backend: Backend, **more: Any) -> dict[str, Any]:
    return {**backend.reliable, "deduplicate": True, **more}


@feature("deduplicate", "messageId", "autoAcknowledge")
@table("auto", [False, True])
def test_a_settled_message_is_delivered_once(backend: Backend, m: Messaging, auto: bool) -> None:
    channel = backend.channel()
    options = deduplicated(backend, auto_acknowledge=auto)
    with m.subscribe(channel, **options) as stream, m.subscribe(channel, **backend.reliable) as other:
        publish_as(m, backend, channel, "a", "a", "b", "a", "b", "c")
        assert receive(stream, 3) == [b"a", b"b", b"c"]
        assert receive(other, 6) == [b"a", b"a", b"b", b"a", b"b", b"c"]
        nothing_more(m, channel, stream, **backend.reliable)
        eventually(lambda: stream.counters.duplicates == 3, "counted")


@deduplicates
def test_another_channel_or_no_id_is_another_message(backend: Backend, m: Messaging) -> None:
    base = backend.channel()
    with m.subscribe(f"{base}/+", **deduplicated(backend)) as stream:
        for channel in ("x", "y", "x"):
            publish_as(m, backend, f"{base}/{channel}", "a")
        publish(m, f"{base}/x", [b"same"] * 3, **backend.reliable)
        assert receive(stream, 5) == [b"a", b"a", *[b"same"] * 3]
        nothing_more(m, f"{base}/x", stream, **backend.reliable)


@feature("deduplicate", "messageId", "acknowledge")
@table("is_acknowledged", [True, False])
def test_a_second_delivery_waits_for_the_first_verdict(backend: Backend, m: Messaging, is_acknowledged: bool) -> None:
    channel = backend.channel()
    with m.subscribe(channel, acknowledge="manual", **deduplicated(backend)) as stream:
        publish_as(m, backend, channel, "a")
        first = stream.receive(timeout=PATIENCE)
        publish_as(m, backend, channel, "a", "b")
        between = stream.receive(timeout=PATIENCE)
        assert between.payload == b"b"
        between.acknowledge()
        if is_acknowledged:
            first.acknowledge()
            eventually(lambda: stream.counters.duplicates == 1, "the second delivery to be dropped")
            nothing_more(m, channel, stream, **backend.reliable)
        else:
            first.reject()
            again = stream.receive(timeout=PATIENCE)
            assert again.payload == b"a"
            again.acknowledge()

            def is_dropped() -> bool:
                nothing_more(
                    m, channel, stream, **backend.reliable
                )  # the redelivery may come after an earlier sentinel
                return stream.counters.duplicates == 1

            eventually(is_dropped, "the other delivery to be dropped")


@deduplicates
def test_a_handler_that_outlives_its_connection_is_not_called_again(backend: Backend) -> None:
    m, link = backend.connect_severable()
    channel, queue = backend.channel(), backend.queue()
    calls: Recorder[bytes] = Recorder()
    may_end = threading.Event()

    def handle(payload: bytes) -> None:
        calls.append(payload)
        may_end.wait(PATIENCE)

    shared: dict[str, Any] = {"queue": queue} if Features.EXTENSION_QUEUE in m.features else {}
    handler = m.on(channel, handle, model=bytes, **deduplicated(backend), **shared)
    handler.ready.result(PATIENCE)
    publisher = backend.connect()
    publish_as(publisher, backend, channel, "a")
    calls.wait_for(1)
    link.sever()
    online(m)
    publish_as(publisher, backend, channel, "a", "b")
    may_end.set()
    assert calls.wait_until(lambda seen: b"b" in seen, "the next message") == [b"a", b"b"]


def rejecting(message: Message) -> None:
    """Handle a message in vain."""
    raise ValueError("rejected")


def settle_on_arrival(m: Messaging, backend: Backend, publisher: Messaging, channel: str) -> None:
    with m.subscribe(channel, **deduplicated(backend, auto_acknowledge=True)) as stream:
        publish_as(publisher, backend, channel, "a")
        assert receive(stream, 1) == [b"a"]


def settle_unacknowledged(m: Messaging, backend: Backend, publisher: Messaging, channel: str) -> None:
    with m.subscribe(channel, deduplicate=True, qos="0") as stream:
        publish_as(publisher, backend, channel, "a")
        assert receive(stream, 1) == [b"a"]


def settle_dead_lettered(m: Messaging, backend: Backend, publisher: Messaging, channel: str, **model: Any) -> None:
    dead = f"{channel}/dead"
    with (
        publisher.subscribe(dead, **backend.reliable),
        m.on(channel, rejecting, **model, **deduplicated(backend, dead_letter_channel=dead)) as handler,
    ):
        publish_as(publisher, backend, channel, "a")
        eventually(lambda: handler.counters.dead_lettered == 1, "the dead letter")


def settle_by_close(m: Messaging, backend: Backend, publisher: Messaging, channel: str) -> None:
    dead = f"{channel}/dead"
    options = deduplicated(backend, dead_letter_channel=dead)
    with (
        publisher.subscribe(dead, **backend.reliable),
        m.subscribe(channel, acknowledge="manual", **options) as stream,
    ):
        publish_as(publisher, backend, channel, "a")
        assert receive(stream, 1) == [b"a"]
    assert stream.counters.dead_lettered == 1


@deduplicates
@table(
    "settle",
    {
        "on arrival": settle_on_arrival,
        "unacknowledged": settle_unacknowledged,
        "rejected": settle_dead_lettered,
        "invalid": partial(settle_dead_lettered, model=int),
        "by close": settle_by_close,
    },
)
def test_an_inbox_on_the_disk_knows_messages_however_they_were_settled(
    backend: Backend, tmp_path: Path, settle: Callable[[Messaging, Backend, Messaging, str], None]
) -> None:
    channel, publisher = backend.channel(), backend.connect()
    m = backend.connect(inbox_path=tmp_path)
    settle(m, backend, publisher, channel)
    m.close()
    again = backend.connect(inbox_path=tmp_path)
    with again.subscribe(channel, **deduplicated(backend)) as stream:
        with pytest.raises(ArgumentError, match="inbox_path"):  # it has one subscription
            again.subscribe(channel, **deduplicated(backend)).__enter__()
        publish_as(publisher, backend, channel, "a")
        nothing_more(publisher, channel, stream, **backend.reliable)
        eventually(lambda: stream.counters.duplicates == 1, "the duplicate to be counted")


@deduplicates
def test_the_subscription_that_replaces_a_failed_one_uses_its_inbox(backend: Backend, tmp_path: Path) -> None:
    m, channel = backend.connect(inbox_path=tmp_path), backend.channel()
    handled: Recorder[bytes] = Recorder()
    errors: Recorder[Exception] = Recorder()

    def handle(message: Message) -> None:
        handled.append(message.payload)
        if handled == [b"a", b"b"]:
            raise ValueError("once")

    stream = m.subscribe(channel, **deduplicated(backend))
    stream.pipe(ops.map(handle), ops.retry(2)).subscribe(on_error=errors.append)
    stream.ready.result(PATIENCE)
    publish_as(m, backend, channel, "a", "b")
    handled.wait_for(2)

    def is_replaced() -> bool:
        found = m.runtime.get_runtime_dto().subscriptions
        return [each.channel.connected and each.counters.received < 2 for each in found] == [True]

    eventually(is_replaced, "the subscription that replaces the failed one")
    publish_as(m, backend, channel, "a", "c")
    handled.wait_until(lambda seen: b"c" in seen, "the message after the failure")
    assert handled.count(b"a") == 1
    assert errors == []


def test_without_message_ids_it_is_refused(backend: Backend, m: Messaging, channel: str) -> None:
    if Features.EXTENSION_MESSAGE_ID not in m.features:
        with pytest.raises(UnsupportedFeatureError, match="deduplicate"):
            m.subscribe(channel, deduplicate=True)
    else:
        with m.subscribe(channel, deduplicate=False) as stream:
            stream.ready.result(PATIENCE)

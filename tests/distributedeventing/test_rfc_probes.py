"""What RFC 214 requires of every way to publish, in its own words: 5.1.1, 5.1.4 and 7.1."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from messaging.distributedeventing import DistributableEvent, DistributedEventAdmin, PushEvent
from messaging.errors import ArgumentError, NullEventError, PartialNotificationError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.dispatch.eventnetwork.plain import event
from tests.distributedeventing.conftest import Admins, Gate, Nodes, Pair, announce, connect, consume, flush, record

Publish = Callable[[DistributedEventAdmin, Any], object]

#: every way in which data is published
WAYS: dict[str, Publish] = {
    "publish_event": lambda admin, data: admin.publish_event("a", data),
    "publish_event, as in 7.1": lambda admin, data: admin.publish_event("a", "id", data),
    "publish": lambda admin, data: admin.publish(DistributableEvent("a", data=data)),
    "publish_event_with_notification": lambda admin, data: admin.publish_event_with_notification("a", data),
    "publish_with_notification": lambda admin, data: admin.publish_with_notification(
        DistributableEvent("a", data=data)
    ),
    "session.publish_event": lambda admin, data: admin.create_session("a").publish_event(data),
    "session.publish": lambda admin, data: admin.create_session("a").publish(DistributableEvent("a", data=data)),
    "session.publish_event_with_notification": lambda admin, data: admin.create_session(
        "a"
    ).publish_event_with_notification(data),
    "session.publish_with_notification": lambda admin, data: admin.create_session("a").publish_with_notification(
        DistributableEvent("a", data=data)
    ),
    "session.publish_with_notification of a payload": lambda admin, data: admin.create_session(
        "a"
    ).publish_with_notification(data),
}
#: payloads that end a session, and the error for them
NO_DATA: dict[str, tuple[Any, type[Exception]]] = {
    "close": (PushEvent.close(), ArgumentError),
    "error": (PushEvent.error(ValueError("x")), ArgumentError),
    "close in a data event": (PushEvent.data(PushEvent.close()), ArgumentError),
    "no data": (None, NullEventError),
    "a data event without data": (PushEvent.data(None), NullEventError),
}


@table("way", WAYS)
@table("payload, error", NO_DATA)
def test_a_close_or_error_event_is_no_data(admins: Admins, way: Publish, payload: Any, error: type[Exception]) -> None:
    """5.1.1: close and error events must not be published as the data of simple broadcast."""
    admin = admins()
    consumer, aware = record(admin, "a"), record(admin, "a", lifecycle="SESSION")
    with pytest.raises(error):
        way(admin, payload)
    flush(admin)
    assert consumer.kinds == []
    assert aware.kinds == []
    admin.close(0)


@table("way", WAYS)
def test_a_data_event_is_published_as_its_data(admins: Admins, way: Publish) -> None:
    admin = admins()
    consumer = record(admin, "a")
    way(admin, PushEvent.data(7))
    flush(admin)
    assert consumer.values == [7]
    admin.close(0)


def test_ids_are_compared_within_one_sender(nodes: Nodes, request: pytest.FixtureRequest) -> None:
    """Two programs that number their events alike lose none; a copy of one sender is recognised."""
    admin = nodes("memory")
    assert admin.node is not None
    consumer = record(admin, "a")
    admin.announced().result(PATIENCE)
    senders = [{"sender": str(uuid4())}, {"sender": str(uuid4())}, {"origin": str(uuid4())}]
    with connect("memory", request) as m:
        for number, fields in enumerate([*senders, *senders]):
            payload = event(number, id="1", **fields)
            m.publish(admin.node.names.of("a"), payload).result(PATIENCE)
        last = event("last")
        m.publish(admin.node.names.of("a"), last).result(PATIENCE)
        eventually(lambda: "last" in consumer.values)
    assert consumer.values == [0, 1, 2, "last"]


@table("reply", [".a.b", ".a/b/c", ".Ünïcode", "._GUID=1", "." + "x" * 199])
def test_a_private_reply_topic_of_any_form_is_accepted(
    nodes: Nodes, request: pytest.FixtureRequest, reply: str
) -> None:
    """7.1: aside from the first character, the format of a private topic name is unspecified."""
    admin = nodes("memory")
    assert admin.node is not None
    consumer = record(admin, "a", is_whole=True)
    admin.announced().result(PATIENCE)
    with connect("memory", request) as m:
        payload = event(1, reply=reply)
        m.publish(admin.node.names.of("a"), payload).result(PATIENCE)
        eventually(lambda: reply in [each.reply_to for each in consumer.values])


def test_a_reply_to_a_private_topic_of_any_form_reaches_its_member(
    nodes: Nodes, request: pytest.FixtureRequest, transport: str
) -> None:
    """7.1: on every transport; the member is a plain program."""
    admin = nodes(transport)
    assert admin.node is not None
    names = admin.node.names
    answered = record(admin, "a", is_whole=True)
    admin.announced().result(PATIENCE)
    replies = [".a.b", ".a/b/c", ".Ünïcode", "._GUID=1", ". x//y", ".a*b", ".$SYS/x"]
    with connect(transport, request) as m:
        found: Recorder[Any] = Recorder()
        stream = m.subscribe(f"{names.prefix}-private/#")
        stream.subscribe(lambda message: found.append((message.context.channel, json.loads(message.payload)["data"])))
        stream.ready.result(PATIENCE)
        for each in replies:
            m.publish(names.of("a"), event(each, reply=each)).result(PATIENCE)
        eventually(lambda: len(answered.values) == len(replies))
        for asked in answered.values:
            admin.publish_event(asked.reply_to, asked.data)
        eventually(lambda: len(found) == len(replies))
    assert sorted(found) == sorted((f"{names.prefix}-private/{each[1:]}", each) for each in replies)


def test_a_private_topic_of_any_form_is_consumed_by_its_name(pair: Pair) -> None:
    topics = [".a.b", ".a/b/c", ".Ünïcode", ". x//y", ".a*b"]
    consumers = [record(pair.other, each) for each in topics]
    everything = record(pair.other, "**")
    pair.announce()
    for each in topics:
        pair.one.publish_event(each, each)
    for each, consumer in zip(topics, consumers, strict=True):
        eventually(lambda each=each, consumer=consumer: consumer.values == [each])  # type: ignore[misc]
    assert everything.values == []


def test_private_topics_are_never_alike_in_one_run_and_in_two_processes(admin: DistributedEventAdmin) -> None:
    """7.1: a private topic name must not be reused, even after a restart."""
    script = "from messaging.distributedeventing import DistributedEventAdmin as A; print(A().create_private_topic())"
    others = [subprocess.check_output([sys.executable, "-c", script], text=True).strip() for _ in range(2)]
    found = [*others, *(admin.create_private_topic() for _ in range(1_000))]
    assert len({*found}) == len(found)
    assert all(each.startswith(".") for each in found)
    wildcard, exact = record(admin, "**"), record(admin, found[0])
    admin.publish_event(found[0], 1)
    flush(admin)
    assert (wildcard.values, exact.values) == ([], [1])


def test_a_notification_comes_after_the_last_consumer_and_without_any_at_once(nodes: Nodes) -> None:
    """5.1.4: the promise resolves when all consumers were notified, remote ones included."""
    one, other = nodes("memory"), nodes("memory")
    gates = [Gate(), Gate()]
    consume(one, gates[0], "a")
    consume(other, gates[1], "a")
    announce(one, other)
    one.publish_event_with_notification("unwanted", 1).result(PATIENCE)
    promise = one.publish_event_with_notification("a", 1)
    for gate in gates:
        gate.events.wait_for(1)
    for gate in gates:
        assert not promise.done()
        gate.opened.set()
    promise.result(PATIENCE)


@table(
    "end",
    {
        "close": lambda session: session.close_with_notification(),
        "error": lambda session: session.error_with_notification(ValueError("x")),
    },
)
def test_a_second_end_with_notification_waits_for_the_consumers_of_the_first_one(admins: Admins, end: Any) -> None:
    """5.1.4: its promise resolves when all consumers were notified of the end."""
    admin, gate = admins(), Gate()
    consume(admin, gate, "a", lifecycle="SESSION")
    session = admin.create_session("a")
    session.publish_event(1)
    gate.events.wait_for(1)
    promises = [end(session), session.close_with_notification(), session.end_of_stream_with_notification()]
    hasty = session.close_with_notification(timeout=0.05)
    with pytest.raises(PartialNotificationError):
        hasty.result(PATIENCE)
    assert not any(each.done() for each in promises)
    gate.opened.set()
    for each in promises:
        each.result(PATIENCE)
    session.close_with_notification().result(PATIENCE)
    admin.close(0)

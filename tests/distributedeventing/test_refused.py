"""Remote events that an admin does not deliver: their senders wait for no consumer of it (5.1.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from messaging import Messaging
from messaging.dispatch import DISTRIBUTED_EVENTS, TopicPermission, TopicPolicy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.dispatch.eventnetwork.plain import answers_to, event
from tests.distributedeventing.conftest import Gate, Nodes, announce, connect, consume, record

SENDER = str(uuid4())


def asking(event_id: str, **fields: Any) -> bytes:
    return event(**{"data": 1, "sender": SENDER, "id": event_id, "notify": True, **fields})


def notified(m: Messaging, network: str, member: str) -> Callable[[], list[str]]:
    """Return what tells the ids of the events that were notified, as a member is told."""
    found = answers_to(m, member, network)
    return lambda: [each["event"] for each in [*found]]


def test_an_event_that_a_policy_refuses_is_answered(nodes: Nodes) -> None:
    may = TopicPolicy(
        {"meter": [TopicPermission("meters/*", "publish", grammar=DISTRIBUTED_EVENTS)]}, grammar=DISTRIBUTED_EVENTS
    )
    one, other = nodes("memory"), nodes("memory", inbound=may)
    consumer = record(other, "**")
    announce(one, other)
    one.publish_event_with_notification("secrets/a", 1, principal="meter").result(PATIENCE)
    one.publish_event_with_notification("meters/a", 2, principal="stranger").result(PATIENCE)
    one.publish_event_with_notification("meters/a", 3, principal="meter").result(PATIENCE)
    assert consumer.values == [3]


@table(
    "fields",
    {
        "no reply topic": {"reply": "no topic"},
        "a reply topic with wildcards": {"reply": "a/*"},
        "data that is not portable": {"data": {"$datetime": "yesterday"}},
        "a time that does not exist": {"data": {"$date": "2025-02-30"}},
    },
)
def test_an_event_that_cannot_be_delivered_is_answered(
    nodes: Nodes, request: pytest.FixtureRequest, fields: dict[str, Any]
) -> None:
    other = nodes("memory")
    assert other.node is not None
    consumer = record(other, "a")
    other.announced().result(PATIENCE)
    with connect("memory", request) as m:
        found = notified(m, other.node.names.prefix, SENDER)
        event_id = uuid4().hex
        m.publish(other.node.names.of("a"), asking(event_id, **fields)).result(PATIENCE)
        eventually(lambda: event_id in found())
    assert consumer.values == []


def test_a_copy_is_answered_when_the_first_one_was_delivered(nodes: Nodes, request: pytest.FixtureRequest) -> None:
    """An event that comes by two ways has two senders that wait."""
    other, second = nodes("memory"), str(uuid4())
    assert other.node is not None
    gate = Gate()
    consume(other, gate, "a")
    other.announced().result(PATIENCE)
    with connect("memory", request) as m:
        firsts, seconds = (notified(m, other.node.names.prefix, each) for each in (SENDER, second))
        origin = str(uuid4())
        m.publish(other.node.names.of("a"), asking("x", origin=origin)).result(PATIENCE)
        m.publish(other.node.names.of("a"), asking("x", origin=origin, sender=second)).result(PATIENCE)
        gate.events.wait_for(1)
        m.publish(other.node.names.of("b"), asking("y")).result(PATIENCE)
        assert not firsts()
        assert not seconds()
        gate.opened.set()
        eventually(lambda: firsts() == ["x"] and seconds() == ["x"])
    assert gate.values == [1]

"""Permissions to publish to a topic and to subscribe to it (RFC 97 4.1.4, 5.4, 6.7)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messaging.errors import ArgumentError, PermissionDeniedError
from messaging.eventadmin import Event, TopicPermission, TopicPolicy
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from tests.eventadmin.conftest import Hub, Hubs, Recorder
from tests.threads import in_background, in_threads

PUBLISH, SUBSCRIBE, BOTH = "publish", "subscribe", "publish,subscribe"


def may(actions: str, *topics: str) -> list[TopicPermission]:
    return [TopicPermission(topic, actions) for topic in topics]


# --- publishing


def test_publishing_requires_the_permission_for_the_topic(hubs: Hubs) -> None:
    """RFC 97 5.4.2, 6.4.1, 6.4.2: a publisher without it gets an error, and no handler gets the event."""
    policy = TopicPolicy({"meter": may(PUBLISH, "meters/*"), "listener": may(SUBSCRIBE, "*")})
    hub = hubs(permissions=policy)
    recorder = hub.record(principal="listener")

    def publish(topic: str, principal: str | None) -> None:
        event = Event(topic)
        hub.admin.post_event(event, principal=principal)
        hub.flush()
        hub.admin.send_event(event, principal=principal)
        asyncio.run(hub.admin.asend_event(event, principal=principal))

    publish("meters/1", "meter")
    assert recorder.topics == ["meters/1"] * 3
    for topic, principal in (("meters", "meter"), ("meters/1", None), ("meters/1", "listener"), ("meters/1", "nobody")):
        for call in (hub.admin.post_event, hub.admin.send_event):
            with pytest.raises(PermissionDeniedError, match=f"may not publish '{topic}'"):
                call(Event(topic), principal=principal)
        with pytest.raises(PermissionDeniedError):
            asyncio.run(hub.admin.asend_event(Event(topic), principal=principal))
    hub.flush()
    assert recorder.topics == ["meters/1"] * 3
    assert not hub.logged()


def test_without_a_policy_all_principals_may_do_everything(hub: Hub) -> None:
    recorder = hub.record(principal="nobody")
    hub.admin.send_event(Event("a"), principal="any")
    assert recorder.topics == ["a"]


def test_a_principal_is_a_name(hubs: Hubs) -> None:
    hub = hubs(permissions=TopicPolicy({None: may(BOTH, "*")}))
    wrong: Any
    for wrong in (5, b"x", []):
        with pytest.raises(ArgumentError):
            hub.admin.post_event(Event("a"), principal=wrong)


# --- receiving


def test_handlers_only_get_topics_they_have_the_permission_for(hubs: Hubs) -> None:
    """RFC 97 4.1.4 [23], 5.4.2, 6.6: topics without the permission are as if they had not asked for them."""
    policy = TopicPolicy({None: may(BOTH, "*"), "some": may(SUBSCRIBE, "a/*"), "writer": may(PUBLISH, "*")})
    hub = hubs(permissions=policy)
    everything, some, none = hub.record(), hub.record(principal="some"), hub.record(principal="writer")
    for topic in ("a", "a/b", "b"):
        hub.admin.send_event(Event(topic))
        hub.admin.post_event(Event(topic))
    hub.flush()
    assert sorted(everything.topics) == ["a", "a", "a/b", "a/b", "b", "b"]
    assert some.topics == ["a/b", "a/b"]
    assert none.topics == []


def test_permissions_may_be_granted_and_revoked_at_any_time(hubs: Hubs) -> None:
    """RFC 97 5.4: the present permissions count."""
    policy = TopicPolicy({None: may(PUBLISH, "*")})
    hub = hubs(permissions=policy)
    recorder = hub.record(principal="reader")

    def publish(number: int) -> None:
        hub.send_number(number)
        hub.admin.post_event(Event("a", {"n": number}))
        hub.flush()

    publish(1)
    policy.grant("reader", *may(SUBSCRIBE, "a"))
    publish(2)
    policy.revoke("reader")
    publish(3)
    policy.grant("reader", *may(SUBSCRIBE, "b"))
    publish(4)
    policy.grant("reader", *may(SUBSCRIBE, "*"))
    publish(5)
    policy.revoke(None)
    with pytest.raises(PermissionDeniedError):
        publish(6)
    assert recorder.numbers == [2, 2, 5, 5]


@table("delivery", ["async.ordered", "async.unordered"])
def test_pending_events_are_not_delivered_after_the_permission_was_revoked(hubs: Hubs, delivery: str) -> None:
    """RFC 97 4.1.4 [23]."""
    policy = TopicPolicy({None: may(BOTH, "*"), "reader": may(SUBSCRIBE, "*")})
    hub = hubs(ServiceRegistry(), permissions=policy)
    other = hub.record(principal=None)
    gate = hub.gate(1, 2, principal="reader", delivery=delivery)
    policy.revoke("reader")
    gate.opened.set()
    hub.flush()
    assert gate.numbers == [1]
    assert other.numbers == [1, 2]


def test_the_principal_of_a_handler_may_be_updated(hubs: Hubs) -> None:
    policy = TopicPolicy({None: may(PUBLISH, "*"), "reader": may(SUBSCRIBE, "*")})
    hub = hubs(permissions=policy)
    recorder = Recorder()
    registration = hub.handle(recorder)
    for number, principal in enumerate(["reader", "nobody", "reader"]):
        hub.admin.send_event(Event("a", {"n": -1}))
        registration.update({"event.topics": "*", "event.principal": principal})
        hub.send_number(number)
        registration.update({"event.topics": "*"})
    assert recorder.numbers == [0, 2]


def test_handlers_may_change_the_policy(hubs: Hubs) -> None:
    """Scenario 41: from inside, and while others publish."""
    policy = TopicPolicy({None: may(BOTH, "*")})
    hub = hubs(permissions=policy)

    def handler(event: Event) -> None:
        policy.grant("late", *may(SUBSCRIBE, "b"))
        in_background(lambda: policy.grant("late", *may(SUBSCRIBE, "c")))()

    hub.handle(handler, "a")
    late = hub.record(principal="late")
    hub.admin.send_event(Event("b"))
    hub.admin.send_event(Event("a"))
    for topic in "abc":
        hub.admin.send_event(Event(topic))
    assert late.topics == ["b", "c"]


def test_permissions_change_while_events_are_published(hubs: Hubs) -> None:
    """A principal that always has the permission gets all events, one that never has it gets none."""
    policy = TopicPolicy({None: may(PUBLISH, "*"), "always": may(SUBSCRIBE, "*"), "never": may(SUBSCRIBE, "b")})
    hub = hubs(permissions=policy)
    always, never = hub.record(principal="always"), hub.record(principal="never")

    def run(thread: int) -> None:
        for number in range(150):
            if thread == 0:
                policy.grant("sometimes", *may(SUBSCRIBE, "a"))
                policy.revoke("sometimes")
            else:
                hub.admin.post_event(Event("a", {"n": number}))

    in_threads(3, run)
    hub.flush()
    assert len(always.events) == 300
    assert never.events == []


class Broken(TopicPolicy):
    """A policy of the application's own."""

    def permits(self, principal: Any, permission: TopicPermission) -> bool:
        raise RuntimeError("boom")


def test_a_policy_that_raises_permits_nothing(hubs: Hubs) -> None:
    hub = hubs(permissions=Broken())
    recorder = hub.record()
    with pytest.raises(RuntimeError, match="boom"):
        hub.admin.post_event(Event("a"))
    assert recorder.events == []

"""What a member waits for: confirmed subscriptions, the answers of members that it does not know yet, lost members."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

import messaging
from messaging import Promise
from messaging.dispatch.eventdata import WireEvent, encode
from messaging.dispatch.eventnetwork.announcements import TopicInterest
from messaging.dispatch.eventnetwork.own_announcements import OwnInterests
from messaging.distributedeventing import DistributedEventAdmin, EventNetwork
from messaging.errors import PartialNotificationError
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, require
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import TypedEventBus
from tests.faults.scenario import through


class Foreign:
    """A member without this library: it announces itself by plain messages, and hears all announcements."""

    def __init__(self, m: messaging.Messaging, *, heartbeat: float = 60.0, linger: float = 60.0) -> None:
        self.id = str(uuid4())
        self._m = m
        self._times = {"heartbeat": heartbeat, "linger": linger}
        self.heard: deque[dict[str, Any]] = deque()
        m.on("topics-members/+", self._hear, model=dict).ready.result(PATIENCE)

    def _hear(self, found: dict[str, Any]) -> None:
        if found["member"] != self.id:
            self.heard.append(found)

    def say(self, kind: str, to: str | None = None, **fields: Any) -> None:
        """Publish an announcement."""
        announcement = {"announcement": 1, "kind": kind, "member": self.id, "version": 0, "name": f"foreign {self.id}"}
        announcement |= self._times | fields | ({} if to is None else {"to": to})
        self._m.publish(f"topics-members/{to or 'all'}", json.dumps(announcement).encode()).result(PATIENCE)

    def wants(self, topics: str, to: str | None = None) -> None:
        """Announce an interest."""
        self.say("update", to, interests=[{"topics": topics}])

    def heard_of(self, kind: str) -> list[dict[str, Any]]:
        """Return the announcements of a kind."""
        return [each for each in [*self.heard] if each["kind"] == kind]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def m(stack: ExitStack) -> messaging.Messaging:
    return stack.enter_context(messaging.connect(f"memory://waiting-{uuid4().hex}"))


def admin_of(stack: ExitStack, m: messaging.Messaging, **network: Any) -> DistributedEventAdmin:
    admin = stack.enter_context(DistributedEventAdmin(ServiceRegistry(), m, network=EventNetwork(**network)))
    admin.ready.result(PATIENCE)
    return admin


def settled(admin: DistributedEventAdmin) -> bool:
    assert admin.node is not None
    return admin.node.get_dto().is_settled


def knows(admin: DistributedEventAdmin, foreign: Foreign, topics: str) -> Callable[[], bool]:
    return lambda: any(each.id == foreign.id and topics in each.interests for each in admin.members())


def test_a_pattern_that_is_added_again_is_announced_when_the_broker_confirms_it_again() -> None:
    calls: deque[Callable[[], object]] = deque()
    added: list[Promise[None]] = []
    announced: list[frozenset[TopicInterest]] = []
    wanted = frozenset({TopicInterest("a/b")})

    class Control:
        """Posts calls, to be run by the test."""

        @staticmethod
        def post(call: Callable[..., object], *arguments: object) -> None:
            calls.append(lambda: call(*arguments))

    class Joint:
        """Confirms nothing by itself."""

        @staticmethod
        def add(_: str) -> Promise[None]:
            added.append(Promise("adding"))
            return added[-1]

        @staticmethod
        def remove(_: str) -> None:
            pass

    def run() -> None:
        while calls:
            calls.popleft()()

    interests: list[frozenset[TopicInterest]] = [wanted]
    own = OwnInterests(
        "test",
        Control(),
        Joint(),
        lambda: (interests[0], frozenset()),
        str,
        lambda found, _: announced.append(frozenset(found)),  # type: ignore[arg-type]
    )
    own.request()
    run()
    interests[0] = frozenset()
    own.request()
    run()
    interests[0] = wanted
    again = own.request()
    run()
    added[0].resolve(None)  # the first request, which the broker has undone by now
    eventually(lambda: calls, "the confirmation")
    run()
    assert announced[-1] == frozenset()
    added[1].resolve(None)
    eventually(lambda: calls, "the second confirmation")
    run()
    assert announced[-1] == wanted
    again.result(PATIENCE)


def test_a_ping_follows_the_announcements_that_a_connection_begins_with(stack: ExitStack) -> None:
    require("mosquitto")
    broker = stack.enter_context(Mosquitto())
    proxy = stack.enter_context(Proxy(broker.host, broker.port))
    hearing = stack.enter_context(messaging.connect(broker.url))
    m = stack.enter_context(messaging.connect(through(proxy, broker.url), reconnect_min=0.02, reconnect_max=0.1))
    foreign = Foreign(hearing)
    admin = admin_of(stack, m, heartbeat=5.0, last_will=False)
    admin.on("a/b", handler=lambda _: None)
    foreign.say("heartbeat")
    eventually(lambda: admin.members(), "the member to be known")
    proxy.refuse()
    assert admin.node is not None
    node = admin.node
    eventually(lambda: not node.get_dto().is_connected, "the connection to be lost")
    foreign.heard.clear()
    admin.on("a/b", handler=lambda _: None, filter="(c=d)")  # no further subscription at the broker
    asking = admin.announced(PATIENCE)
    proxy.accept()
    eventually(lambda: foreign.heard_of("ping"), "the ping")
    kinds = [each["kind"] for each in [*foreign.heard]]
    assert kinds.index("update") < kinds.index("ping")
    foreign.say("pong", node.member, token=foreign.heard_of("ping")[0]["token"])
    asking.result(PATIENCE)


def test_a_loss_that_is_not_told_yet_leaves_a_later_question_to_the_next_connection(stack: ExitStack) -> None:
    require("mosquitto")
    broker = stack.enter_context(Mosquitto())
    proxy = stack.enter_context(Proxy(broker.host, broker.port))
    hearing = stack.enter_context(messaging.connect(broker.url))
    m = stack.enter_context(messaging.connect(through(proxy, broker.url), reconnect_min=0.02, reconnect_max=0.1))
    foreign = Foreign(hearing)
    admin = admin_of(stack, m, heartbeat=5.0, last_will=False)
    foreign.say("heartbeat")
    eventually(lambda: admin.members(), "the member to be known")
    assert admin.node is not None
    told = threading.Event()
    stack.callback(told.set)
    admin.node._control.post(told.wait, PATIENCE)
    proxy.refuse()
    eventually(lambda: not m.connection_state.value.is_up, "the connection to be lost")
    asking = admin.announced(PATIENCE)
    told.set()
    proxy.accept()
    eventually(lambda: foreign.heard_of("ping"), "the ping")
    foreign.say("pong", admin.node.member, token=foreign.heard_of("ping")[0]["token"])
    asking.result(PATIENCE)


def test_a_bus_confirms_the_end_of_a_session_and_an_event_that_came_before(
    stack: ExitStack, m: messaging.Messaging
) -> None:
    admin = admin_of(stack, m)
    bus = stack.enter_context(TypedEventBus(ServiceRegistry()))
    bus.on("a/b", handler=lambda _, __: None, type=dict)
    connection = stack.enter_context(bus.connect(m, "*"))
    connection.announced().result(PATIENCE)
    session = admin.create_session("a/b")
    session.publish_event_with_notification({"n": 1}, timeout=5.0).result(PATIENCE)
    session.close_with_notification(timeout=5.0).result(PATIENCE)
    foreign = Foreign(m)
    for notify in (False, True):  # the first one came by another way
        event = WireEvent("a/b", {"n": 2}, id="once", sender=foreign.id)
        event.notify = notify
        m.publish("topics/a/b", encode(event)).result(PATIENCE)
    eventually(lambda: foreign.heard_of("notified"), "the confirmation")
    assert foreign.heard_of("notified")[0]["event"] == "once"


def test_a_lost_member_that_is_forgotten_did_not_confirm(stack: ExitStack, m: messaging.Messaging) -> None:
    admin = admin_of(stack, m, heartbeat=0.2)
    brief, lasting = Foreign(m, heartbeat=0.1, linger=0.2), Foreign(m)
    for each in (brief, lasting):
        each.wants("a/b")
    eventually(lambda: knows(admin, brief, "a/b")() and knows(admin, lasting, "a/b")(), "the members to be known")
    promise = admin.publish_event_with_notification("a/b", None, 1, timeout=20.0)
    eventually(lambda: not any(each.id == brief.id for each in admin.members()), "the silent member to be forgotten")
    assert not promise.done()
    event = f"{admin.node.member}-1"  # type: ignore[union-attr]
    lasting.say("notified", admin.node.member, event=event)  # type: ignore[union-attr]
    error = promise.exception(PATIENCE)
    assert isinstance(error, PartialNotificationError)
    assert [brief.id in each for each in error.missing] == [True]

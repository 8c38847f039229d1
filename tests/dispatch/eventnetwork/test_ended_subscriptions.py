"""A member whose subscriptions the broker ends while the connection goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final
from uuid import UUID, uuid4, uuid5

import pytest

import messaging
from messaging.dispatch import DISTRIBUTED_EVENTS
from messaging.dispatch.eventnetwork import EventNetwork, EventNode
from messaging.errors import SubscriptionRefusedError
from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE, eventually, subscribed
from tests.dispatch.eventnetwork.conftest import Join, Participant, Service
from tests.dispatch.eventnetwork.plain import announcement, update
from tests.doubles.fake import FakeBroker, on_loop, settle_loop
from tests.doubles.fixtures import *  # noqa: F403
from tests.doubles.fixtures import Connect
from tests.doubles.memory import broker_of, drop_and_reconnect

pytestmark = pytest.mark.usefixtures("virtual_clock")
PROFILE: Final[Any] = {"title": "test", "name": "test", "grammar": DISTRIBUTED_EVENTS}
#: namespace of the inboxes of members with a queue
_INBOXES: Final = UUID("5d0c7c0e-3c0b-4f0f-9a43-0f6f4f6b4c1e")


def test_a_member_subscribes_again_to_what_the_broker_ended(broker: FakeBroker, connect: Connect) -> None:
    """As RabbitMQ does when it closes a channel: the connection goes on, so no reconnect subscribes again."""
    service = Service()
    service.topics = {"a"}
    node = EventNode(service, connect(broker), EventNetwork(), **PROFILE)
    try:
        node.refresh().result(PATIENCE)
        node.ready.result(PATIENCE)

        def channels() -> list[str]:
            return sorted(handle.spec.channel for handle in broker.live)

        before = channels()
        assert len(before) == 3
        broker.end_joint(SubscriptionRefusedError("the broker closed the channel"))
        eventually(lambda: any("no announcements" in each for each in node.problems()))
        eventually(lambda: channels() == before)
        eventually(lambda: not any("no announcements" in each for each in node.problems()))
    finally:
        node.close()


def test_a_member_that_the_broker_refused_at_first_joins_later(broker: FakeBroker, connect: Connect) -> None:
    """As RabbitMQ does when it closes the channel on which the member subscribes."""
    instance = connect(broker)
    refusal = SubscriptionRefusedError("the broker closed the channel")
    broker.errors["subscribe"].append(refusal)
    node = EventNode(Service(), instance, EventNetwork(), **PROFILE)
    try:
        assert node.ready.exception(PATIENCE) is refusal
        eventually(lambda: len(broker.live) == 2)
        eventually(lambda: not any("not connected" in each or "no announcements" in each for each in node.problems()))
    finally:
        node.close()


@pytest.fixture
def heard(memory: str) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """``heard(kind)``: the announcements of a kind so far, in their order."""
    with messaging.connect(memory, services=ServiceRegistry()) as m:
        recorded = subscribed(m, "topics-members/+")

        def of_kind(kind: str) -> list[dict[str, Any]]:
            found = [json.loads(each) for each in recorded.payloads]
            return [each for each in found if each["kind"] == kind]

        yield of_kind


def end_queue(member: Participant, name: str = "mine") -> None:
    """Have the broker delete the queue of a member with all that is in it: its connection goes on."""
    broker = broker_of(member.instance)
    on_loop(lambda: broker.delete(name, if_empty=False, if_unused=False))


def is_deaf(member: Participant) -> bool:
    return any("no announcements" in each for each in member.node.problems())


def test_a_member_that_hears_no_announcements_sends_what_a_new_member_may_want(join: Join, memory: str) -> None:
    """It may have missed the announcement of a member that joined meanwhile, as after the loss of its connection."""
    one = join(memory, settings={"queue": "mine", "heartbeat": 60.0})
    eventually(lambda: one.node.get_dto().is_settled)
    end_queue(one)
    eventually(lambda: is_deaf(one))
    assert not one.node.get_dto().is_settled
    two = join(memory, "a", settings={"heartbeat": 60.0})
    assert one.send("a", 1) is not None
    eventually(lambda: two.service.values == [1])
    eventually(lambda: one.knows(two, "a") and one.node.get_dto().is_settled)
    assert one.send("b", 2) is None


def test_announced_waits_until_a_member_hears_announcements_again(join: Join, memory: str) -> None:
    one = join(memory, "a", settings={"queue": "mine", "heartbeat": 60.0})
    eventually(lambda: one.node.get_dto().is_settled)
    end_queue(one)
    eventually(lambda: is_deaf(one))
    two = join(memory, settings={"heartbeat": 60.0})
    assert one.node.announced(PATIENCE).exception(PATIENCE) is None
    assert two.knows(one, "a")


def test_answers_from_before_an_interest_was_withdrawn_do_not_announce_it(
    join: Join, memory: str, heard: Callable[[str], list[dict[str, Any]]]
) -> None:
    """The queue was made anew, and the answers to the pings before that arrive late."""
    one = join(memory, "a", settings={"queue": "mine", "heartbeat": 60.0})
    eventually(lambda: one.node.get_dto().is_settled)
    with messaging.connect(memory, services=ServiceRegistry()) as m:
        other = str(uuid4())
        inbox = one.node.names.member(str(uuid5(_INBOXES, "mine")))
        m.publish(inbox, update(other, answers=True, heartbeat=60.0)).result(PATIENCE)
        eventually(lambda: one.live() == {other})
        announced = one.node.announced(PATIENCE)
        eventually(lambda: len(heard("ping")) == 1)
        end_queue(one)
        eventually(lambda: is_deaf(one))
        eventually(lambda: len(heard("ping")) == 2)
        first, second = (each["token"] for each in heard("ping"))
        m.publish(inbox, announcement("pong", other, token=first, to=one.id)).result(PATIENCE)
        one.node.announced(0.1).exception(PATIENCE)
        assert not announced.done()
        m.publish(inbox, announcement("pong", other, token=second, to=one.id)).result(PATIENCE)
        assert announced.exception(PATIENCE) is None


def test_a_member_is_connected_again_when_all_announcements_arrive(broker: FakeBroker, connect: Connect) -> None:
    """The answers to its query would be lost as long as the subscription to one of the channels is missing."""
    node = EventNode(Service(), connect(broker), EventNetwork(heartbeat=1.0), **PROFILE)
    try:
        node.ready.result(PATIENCE)
        queries = sum(b'"query"' in each for each in broker.payloads)
        broker.end_joint(SubscriptionRefusedError("the broker closed the channel"))
        eventually(lambda: any("no announcements" in each for each in node.problems()))
        eventually(lambda: sum(b'"query"' in each for each in broker.payloads) > queries)
        settle_loop()
        node.refresh().result(PATIENCE)
        assert sum(b'"query"' in each for each in broker.payloads) == queries + 1
    finally:
        node.close()


def test_what_ended_before_the_connection_was_lost_is_subscribed_to_with_the_next_one(join: Join, memory: str) -> None:
    one = join(memory, "a", settings={"queue": "mine", "heartbeat": 60.0})
    eventually(lambda: one.node.get_dto().is_settled)
    for _ in range(6):  # the pauses between attempts double
        end_queue(one)
        eventually(lambda: is_deaf(one))
        drop_and_reconnect(one.instance)
    two = join(memory, settings={"heartbeat": 60.0})
    eventually(lambda: two.knows(one, "a") and one.live() == {two.id} and one.node.get_dto().is_settled)
    assert not one.node.problems()

"""Notifications whose consumers go away: a change of interest ends the waits that it makes pointless."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import messaging
from messaging.dispatch.eventnetwork import DeliveryNotification, TopicInterest
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.dispatch.eventnetwork.conftest import Join, Participant
from tests.dispatch.eventnetwork.plain import update

#: events that are pending when the interest changes
EVENTS = 20
#: (wanted before, wanted after); topics or interests. The events are ``a/x`` with the data ``{"n": 1}``
CHANGES: dict[str, tuple[set[Any], set[Any]]] = {
    "nothing is wanted": ({"a/x"}, set()),
    "another topic is wanted": ({"a/x"}, {"a/y"}),
    "a narrower filter is wanted": ({"a/**"}, {"a/y", "b/**"}),
    "another filter of the data": ({TopicInterest("a/x", "(n=1)")}, {TopicInterest("a/x", "(n=2)")}),
    "one of two interests, which does not match": (
        {"a/x", TopicInterest("a/*", "(n=2)")},
        {TopicInterest("a/*", "(n=2)")},
    ),
}


def silent(join: Join, url: str, wanted: set[Any]) -> Participant:
    """A member that wants events, and never answers that it was notified."""
    found = join(url)
    found.service.act = lambda _: None
    found.want(*wanted)
    return found


def pending(sender: Participant, receiver: Participant) -> list[DeliveryNotification]:
    """Send events that the receiver takes and does not answer."""
    eventually(lambda: sender.node.sender.has_consumer("a/x") and sender.node.get_dto().is_settled)
    found = [DeliveryNotification(f"event {number}", PATIENCE) for number in range(EVENTS)]
    for each in found:
        sender.send("a/x", {"n": 1}, each)
    receiver.service.arrived.wait_for(EVENTS)
    assert not any(each.promise.done() for each in found)
    return found


@table("before, after", CHANGES)
def test_a_withdrawn_interest_ends_the_waits_for_its_member(
    join: Join, memory: str, before: set[Any], after: set[Any]
) -> None:
    network = f"{memory}-{uuid4()}"  # the members of earlier rows are still in theirs
    one, two = join(network), silent(join, network, before)
    waiting = pending(one, two)
    two.want(*after)
    assert [each.promise.exception(PATIENCE) for each in waiting] == [None] * EVENTS


def test_an_interest_that_still_holds_keeps_the_waits(join: Join, memory: str) -> None:
    one, two = join(memory), silent(join, memory, {"a/x", "b"})
    waiting = pending(one, two)
    two.want("a/x", "c")
    one.node.announced(PATIENCE).result(PATIENCE)
    two.node.announced(PATIENCE).result(PATIENCE)
    assert not any(each.promise.done() for each in waiting)
    two.want()
    assert [each.promise.exception(PATIENCE) for each in waiting] == [None] * EVENTS


@table("kind", ["update", "remove"])
def test_a_plain_program_ends_the_waits_by_withdrawing_its_interest(join: Join, memory: str, kind: str) -> None:
    network = f"{memory}-{kind}"
    one, member = join(network), str(uuid4())
    with messaging.connect(network) as plain:
        plain.publish("topics-members/all", update(member, "a/x", version=1)).result(PATIENCE)
        eventually(lambda: one.node.sender.has_consumer("a/x") and one.node.get_dto().is_settled)
        waiting = [DeliveryNotification(str(number), PATIENCE) for number in range(EVENTS)]
        for each in waiting:
            one.send("a/x", 1, each)
        gone = {"announcement": 1, "kind": kind, "member": member, "version": 2}
        if kind == "remove":
            gone["interests"] = [{"topics": "a/x"}]
        plain.publish("topics-members/all", json.dumps(gone).encode()).result(PATIENCE)
        assert [each.promise.exception(PATIENCE) for each in waiting] == [None] * EVENTS


def test_a_withdrawal_while_an_event_is_published_ends_its_wait(join: Join, memory: str) -> None:
    """The publisher has looked who wants the event, and has not noted its notification yet."""
    one, two = join(memory), silent(join, memory, {"a/x"})
    eventually(lambda: one.node.sender.has_consumer("a/x") and one.node.get_dto().is_settled)

    class Racing(DeliveryNotification):
        def expect(self, members: Any) -> None:
            super().expect(members)
            two.want()
            eventually(lambda: not one.node.sender.has_consumer("a/x"))

    found = Racing("x", PATIENCE)
    one.send("a/x", 1, found)
    assert found.promise.exception(PATIENCE) is None

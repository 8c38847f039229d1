"""Announcements of which a part is wrong or of a later version: what is right is taken, the rest is reported once."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

import messaging
from messaging.dispatch.eventnetwork import TopicInterest
from messaging.dispatch.eventnetwork import membership as module
from messaging.dispatch.eventnetwork.announcements import Announcement, load_announcement
from messaging.dispatch.eventnetwork.membership import Membership
from messaging.errors import DecodeError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.dispatch.eventnetwork.conftest import Join, Participant, Silent
from tests.dispatch.eventnetwork.plain import announcement, answers_to, update

#: wrong fields of an update that wants ``good``, and a word of the report
PARTLY_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a topic filter that does not parse": ({"interests": [{"topics": "a//b"}, {"topics": "good"}]}, "a//b"),
    "an LDAP filter that does not parse": (
        {"interests": [{"topics": "good"}, {"topics": "x", "filter": "(a=b"}]},
        "interest",
    ),
    "a grammar of a later version": (
        {"interests": [{"topics": "a:b", "grammar": "regular"}, {"topics": "good"}]},
        "regular",
    ),
    "a grammar that is no text": ({"interests": [{"topics": "a", "grammar": [1]}, {"topics": "good"}]}, "grammar"),
    "an interest that is no object": ({"interests": [7, "x", None, {"topics": "good"}]}, "topics"),
    "an interest without topics": ({"interests": [{"filter": "(a=b)"}, {"topics": "good"}]}, "text"),
    "an offer that is no text": ({"offers": [7, "offered"]}, "offers"),
    "a quality of service that is no text": ({"qos": [{}, "IN_ORDER"]}, "qos"),
    "too many qualities of service": ({"qos": ["x"] * 40}, "qos"),
    "a name that is no text": ({"name": ["a"]}, "name"),
    "a framework that is no UUID": ({"framework": "me"}, "framework"),
    "a heartbeat that is no number": ({"heartbeat": "5 s"}, "heartbeat"),
    "a linger that is out of range": ({"linger": -1}, "linger"),
}


def interests_of(participant: Participant, member: str) -> tuple[str, ...] | None:
    return next((each.interests for each in participant.node.get_dto().members if each.id == member), None)


@table("fields, word", PARTLY_WRONG)
def test_what_is_right_is_taken_and_the_rest_is_reported_once(
    join: Join, memory: str, fields: dict[str, Any], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    network, member = f"{memory}-{uuid4()}", str(uuid4())
    one = join(network)
    with messaging.connect(network) as plain:
        for version in (1, 2, 3):
            payload = update(member, "good", version=version, **fields)
            plain.publish("topics-members/all", payload).result(PATIENCE)
            beat = announcement("heartbeat", member, version=version)
            plain.publish("topics-members/all", beat).result(PATIENCE)
        plain.publish("topics-members/all", update(member, "good", "end", version=4)).result(PATIENCE)
        eventually(lambda: interests_of(one, member) == ("end", "good"))
    found = [each.getMessage() for each in caplog.records if member in each.getMessage()]
    assert len([each for each in found if word in each]) == 1
    assert one.node.get_dto().refused == 0


def test_a_change_of_which_a_part_is_wrong_is_no_missed_change(join: Join, memory: str) -> None:
    one, member = join(memory), str(uuid4())
    with messaging.connect(memory) as plain:
        heard = answers_to(plain, member)
        plain.publish("topics-members/all", update(member, "a", version=1)).result(PATIENCE)
        wrong: dict[str, list[Any]] = {
            "add": [{"topics": "a//b"}, {"topics": "b"}],
            "remove": [{"topics": "c", "grammar": "later"}, {"topics": "a"}],
        }
        for version, (kind, interests) in enumerate(wrong.items(), 2):
            change = announcement(kind, member, version=version, interests=interests)
            plain.publish("topics-members/all", change).result(PATIENCE)
        eventually(lambda: interests_of(one, member) == ("b",))
        plain.publish("topics-members/all", announcement("ping", member, version=3, token="t")).result(PATIENCE)
        eventually(lambda: any(each["kind"] == "pong" for each in heard))
    assert not [each for each in heard if each["kind"] == "query"]


def test_a_member_that_announces_too_much_is_not_queried_with_every_heartbeat(join: Join, memory: str) -> None:
    one, member = join(memory), str(uuid4())
    with messaging.connect(memory) as plain:
        heard = answers_to(plain, member)
        many = [f"a{number}" for number in range(9_000)]
        plain.publish("topics-members/all", update(member, *many, version=1)).result(PATIENCE)
        more = [{"topics": f"b{number}"} for number in range(9_000)]
        change = announcement("add", member, version=2, interests=more)
        plain.publish("topics-members/all", change).result(PATIENCE)
        eventually(lambda: one.node.get_dto().refused == 1)
        plain.publish("topics-members/all", announcement("ping", member, version=2, token="t")).result(PATIENCE)
        eventually(lambda: any(each["kind"] == "pong" for each in heard))
    assert not [each for each in heard if each["kind"] == "query"]


def test_a_member_that_was_refused_is_unknown_and_is_queried_again_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken as soon as there is room, and a change that follows is not taken for all that it wants."""
    monkeypatch.setattr(module, "MAX_TOTAL", 3)
    sent: list[Announcement] = []
    own = Announcement(kind="update", member=str(uuid4()), heartbeat=6.0, linger=6.0)
    membership = Membership(own, TopicInterest("**"), Silent(), sent.append)
    membership.connected(0.0)
    first, second = str(uuid4()), str(uuid4())

    def announce(kind: str, member: str, version: int, now: float, *topics: str) -> None:
        interests = tuple(map(TopicInterest, topics))
        membership.receive(
            Announcement(kind=kind, member=member, version=version, heartbeat=6.0, linger=6.0, interests=interests), now
        )

    def queries() -> int:
        return len([each for each in sent if each.kind == "query" and each.to == second])

    announce("update", first, 1, 0.0, "a", "b")
    with pytest.raises(DecodeError, match="at most"):
        announce("update", second, 1, 0.0, "c", "d")
    assert not membership.members[second].is_known
    for second_ in range(1, int(module.REFUSED_AGAIN)):
        announce("heartbeat", second, 1, float(second_))
        announce("heartbeat", first, 1, float(second_))
    assert queries() == 0
    now = module.REFUSED_AGAIN
    announce("heartbeat", second, 1, now)
    announce("heartbeat", second, 1, now + 1)
    assert queries() == 1
    with pytest.raises(DecodeError, match="at most"):
        announce("update", second, 1, now + 1, "c", "d")
    announce("add", second, 2, now + 10, "e")  # not all that it wants
    assert queries() == 2
    assert membership.members[second].interests == frozenset()
    announce("remove", first, 2, now + 11, "a")
    announce("update", second, 2, now + 11, "c", "d")
    assert membership.members[second].is_known
    assert membership.members[second].interests == {TopicInterest("c"), TopicInterest("d")}
    announce("heartbeat", second, 2, now + 12)
    assert queries() == 2


@table("field", ["interests", "offers", "qos"])
def test_an_announcement_whose_entries_are_no_list_is_refused(field: str) -> None:
    for wrong in ({}, "x", 7, None):
        with pytest.raises(DecodeError, match=f"'{field}' must be a list"):
            load_announcement(update(str(uuid4()), **{field: wrong}))

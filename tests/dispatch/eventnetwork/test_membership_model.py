"""Members that join, leave, crash, stall and reconnect, against a model; their network and their time are simulated.

The network keeps the order of each sender within a channel: that of all members, and that of one. Announcements on
different channels overtake each other.
"""

from __future__ import annotations

from collections import deque
from typing import Final
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from messaging.dispatch import DISTRIBUTED_EVENTS
from messaging.dispatch.eventnetwork.announcements import (
    Announcement,
    TopicInterest,
    dump_announcement,
    load_announcement,
)
from messaging.dispatch.eventnetwork.membership import MemberChanges, Membership
from messaging.dispatch.eventnetwork.other_members import Interests, OtherMember
from messaging.errors import DecodeError
from tests.dispatch.helpers import logged

EVERYTHING: Final = TopicInterest("**")
TOPICS: Final = st.frozensets(st.sampled_from([TopicInterest(each) for each in ("a", "b/*", "c/**", "d/e", "f")]))
BEAT: Final = 6.0
LINGER: Final = 20.0
STEP: Final = 0.5


class Node(MemberChanges):
    """One member with its listener."""

    def __init__(self, network: Network, number: int, now: float) -> None:
        self.id = str(UUID(int=number))
        self.network = network
        self.interests = Interests()
        self.wanted: frozenset[TopicInterest] = frozenset()
        own = Announcement(kind="update", member=self.id, heartbeat=BEAT, linger=LINGER)
        self.membership = Membership(own, EVERYTHING, self, self.send)
        self.inbox: dict[tuple[str, bool], deque[bytes]] = {}
        self.is_connected = True
        self.is_suspended = False
        self.has_settled = False
        self.versions: dict[str, int] = {}
        self.calls: list[tuple[str, str]] = []
        self.membership.connected(now)

    def send(self, announcement: Announcement) -> None:
        self.network.publish(self, announcement)

    def joined(self, member: OtherMember) -> None:
        self.calls.append(("joined", member.id))

    def changed(self, member: OtherMember, added: frozenset[TopicInterest], removed: frozenset[TopicInterest]) -> None:
        assert not added & removed
        self.interests.change(member.id, added, removed)

    def lost(self, member: OtherMember) -> None:
        assert member.is_lost
        self.calls.append(("lost", member.id))

    def silent_again(self, member: OtherMember) -> None:
        assert member.is_lost
        self.calls.append(("silent_again", member.id))

    def left(self, member: OtherMember) -> None:
        assert member.id not in self.membership.members
        self.versions.pop(member.id, None)
        self.calls.append(("left", member.id))

    def settled(self) -> None:
        self.has_settled = True


class Network:
    """The broker: a queue for each receiver, sender and kind of channel."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}

    def publish(self, sender: Node, announcement: Announcement) -> None:
        if not sender.is_connected:
            return
        payload = dump_announcement(announcement)
        is_direct = announcement.to is not None
        for each in self.nodes.values():
            if each.is_connected and announcement.to in (None, each.id):
                each.inbox.setdefault((sender.id, is_direct), deque()).append(payload)


class NetworkOfMembers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.now = 100.0
        self.number = 0
        #: members that are gone without a word, with the time of their end
        self.crashed: dict[str, float] = {}

    @property
    def nodes(self) -> list[Node]:
        return [*self.network.nodes.values()]

    def choose(self, data: st.DataObject) -> Node:
        return data.draw(st.sampled_from(self.nodes))

    def deliver(self, node: Node, key: tuple[str, bool]) -> None:
        payload = node.inbox[key].popleft()
        if not node.inbox[key]:
            del node.inbox[key]
        node.membership.receive(load_announcement(payload), self.now)

    @precondition(lambda self: len(self.network.nodes) < 4)
    @rule(wanted=TOPICS)
    def join(self, wanted: frozenset[TopicInterest]) -> None:
        self.number += 1
        node = Node(self.network, self.number, self.now)
        self.network.nodes[node.id] = node
        node.wanted = wanted
        node.membership.connected(self.now)
        node.membership.own.set(wanted, ())

    @precondition(lambda self: self.network.nodes)
    @rule(data=st.data(), wanted=TOPICS)
    def change(self, data: st.DataObject, wanted: frozenset[TopicInterest]) -> None:
        node = self.choose(data)
        node.wanted = wanted
        node.membership.own.set(wanted, ())

    @precondition(lambda self: self.network.nodes)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        node = self.choose(data)
        if not node.is_connected:
            return
        del self.network.nodes[node.id]
        node.membership.own.send("leave")

    @precondition(lambda self: self.network.nodes)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        node = self.choose(data)
        del self.network.nodes[node.id]
        self.crashed[node.id] = self.now

    @precondition(lambda self: self.network.nodes)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        node = self.choose(data)
        node.is_connected = False
        node.inbox.clear()
        node.membership.disconnected()

    @precondition(lambda self: self.network.nodes)
    @rule(data=st.data())
    def reconnect(self, data: st.DataObject) -> None:
        node = self.choose(data)
        if not node.is_connected:
            node.is_connected = True
            node.membership.connected(self.now)

    @precondition(lambda self: self.network.nodes)
    @rule(data=st.data())
    def suspend_or_resume(self, data: st.DataObject) -> None:
        node = self.choose(data)
        node.is_suspended = not node.is_suspended

    @precondition(lambda self: any(node.inbox for node in self.network.nodes.values()))
    @rule(data=st.data(), count=st.integers(1, 5))
    def deliver_some(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            found = [(node, key) for node in self.nodes if not node.is_suspended for key in node.inbox]
            if found:
                self.deliver(*data.draw(st.sampled_from(found)))

    @rule(steps=st.integers(1, 40))
    def pass_time(self, steps: int) -> None:
        """Let time pass; nothing is delivered meanwhile: the network is slow."""
        for _ in range(steps):
            self.now += STEP
            for node in self.nodes:
                if not node.is_suspended:
                    node.membership.tick(self.now)

    def run_quietly(self, duration: float) -> None:
        """Let time pass while everybody is connected and everything is delivered."""
        end = self.now + duration
        while self.now < end:
            self.now += STEP
            for node in self.nodes:
                node.membership.tick(self.now)
            while found := [(node, key) for node in self.nodes for key in node.inbox]:
                self.deliver(*found[0])

    def make_quiet(self) -> None:
        for node in self.nodes:
            node.is_suspended = False
            if not node.is_connected:
                node.is_connected = True
                node.membership.connected(self.now)
        self.run_quietly(2 * BEAT + 2 * STEP)

    @rule()
    def after_two_quiet_heartbeats_every_member_knows_the_interests_of_the_others(self) -> None:
        self.make_quiet()
        for node in self.nodes:
            assert node.membership.is_settled
            assert node.has_settled
            alive = {id_: each for id_, each in node.membership.members.items() if not each.is_lost}
            assert {id_: each.interests for id_, each in alive.items()} == {
                id_: each.wanted for id_, each in self.network.nodes.items() if each is not node
            }
            assert all(each.is_known for each in alive.values())
            for topic in ("a", "b/x", "c/x/y", "d/e", "f", "g"):
                wanted = {id_ for id_, each in alive.items() if any(_covers(i, topic) for i in each.interests)}
                assert {id_ for id_ in node.interests.wanted(topic).members if id_ in alive} == wanted

    @rule()
    def interests_of_lost_members_vanish_after_their_linger(self) -> None:
        self.make_quiet()
        self.run_quietly(LINGER + 2 * STEP)
        for node in self.nodes:
            assert {*node.membership.members} == {*self.network.nodes} - {node.id}

    @rule()
    def nothing_is_left_when_all_others_leave(self) -> None:
        self.make_quiet()
        if not self.nodes:
            return
        last = self.nodes[0]
        for node in self.nodes[1:]:
            del self.network.nodes[node.id]
            node.membership.own.send("leave")
        self.run_quietly(LINGER + 3 * BEAT)
        assert last.membership.members == {}
        assert [last.interests.wanted(topic).members for topic in ("a", "b/x")] == [frozenset()] * 2
        assert last.interests.size == 0

    @invariant()
    def versions_never_go_back(self) -> None:
        for node in self.nodes:
            for id_, member in node.membership.members.items():
                if member.is_known:
                    assert member.version >= node.versions.get(id_, 0)
                    node.versions[id_] = member.version

    @invariant()
    def a_lost_member_was_told_lost_and_a_live_one_joined(self) -> None:
        for node in self.nodes:
            last = {id_: what for what, id_ in node.calls}
            assert {id_ for id_, what in last.items() if what != "left"} == {*node.membership.members}
            for id_, member in node.membership.members.items():
                assert last[id_] == ("lost" if member.is_lost else "joined")


def _covers(interest: TopicInterest, topic: str) -> bool:
    return DISTRIBUTED_EVENTS.parse(interest.topics).matches(topic)


NetworkOfMembers.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_network_of_members = NetworkOfMembers.TestCase


# --- single promises


class Pair:
    """One member, and what it sends."""

    def __init__(self, heartbeat: float = BEAT) -> None:
        self.sent: list[Announcement] = []
        self.listener = Node(Network(), 1, 0.0)
        own = Announcement(kind="update", member=self.listener.id, heartbeat=heartbeat, linger=LINGER)
        self.membership = Membership(own, EVERYTHING, self.listener, self.sent.append)
        #: whether it receives its own announcements
        self.is_deaf = False
        self._received = 0
        self.membership.connected(0.0)
        self.echo(0.0)

    def echo(self, now: float) -> None:
        """Deliver its announcements for all members to itself, as brokers do."""
        while not self.is_deaf and self._received < len(self.sent):
            announcement = self.sent[self._received]
            self._received += 1
            if announcement.to is None:
                self.membership.receive(announcement, now)

    def hear(self, number: int, kind: str, now: float, **fields: object) -> None:
        self.membership.receive(Announcement(kind=kind, member=str(UUID(int=number)), **fields), now)  # type: ignore[arg-type]

    def tick(self, *times: float) -> None:
        for now in times:
            self.membership.tick(now)
            self.echo(now)

    def of_kind(self, kind: str) -> list[Announcement]:
        return [each for each in self.sent if each.kind == kind]


def test_a_member_with_short_heartbeats_is_not_lost_while_this_process_stood_still() -> None:
    pair = Pair(heartbeat=5.0)
    pair.hear(2, "update", 0.0, heartbeat=0.5, linger=LINGER)
    pair.tick(0.1)
    pair.tick(2.1)  # this process stood still for 2 s: what arrived meanwhile is not read yet
    assert not pair.membership.members[str(UUID(int=2))].is_lost
    pair.tick(*(2.1 + n * 0.08 for n in range(1, 20)))
    assert pair.membership.members[str(UUID(int=2))].is_lost


def test_a_member_that_receives_nothing_takes_no_other_for_lost() -> None:
    """Its broker is behind: the announcements of the others are on their way, as its own ones are."""
    pair = Pair(heartbeat=1.0)
    pair.hear(2, "update", 0.0, heartbeat=1.0, linger=LINGER)
    member = pair.membership.members[str(UUID(int=2))]
    pair.is_deaf = True
    pair.tick(*(n * 0.1 for n in range(1, 40)))
    assert not member.is_lost
    pair.hear(2, "heartbeat", 4.0, heartbeat=1.0)  # what was on its way comes in order
    pair.is_deaf = False
    pair.tick(*(4.0 + n * 0.1 for n in range(20)))
    assert not member.is_lost
    pair.tick(6.0)
    assert member.is_lost


def test_late_events_do_not_bring_a_lost_member_back_and_their_end_is_noticed_once() -> None:
    pair = Pair(heartbeat=1.0)
    pair.hear(2, "update", 0.0, heartbeat=1.0, linger=LINGER)
    pair.hear(2, "leave", 0.1, is_lost=True)
    id_ = str(UUID(int=2))
    member, calls = pair.membership.members[id_], pair.listener.calls
    calls.clear()
    pair.tick(*(n * 0.1 for n in range(2, 50)))
    assert calls == []
    pair.membership.heard_of(id_, 5.0)
    pair.tick(*(5.0 + n * 0.1 for n in range(15)))
    pair.membership.heard_of(id_, 6.5)
    pair.tick(*(6.5 + n * 0.1 for n in range(19)))
    assert calls == []
    pair.tick(*(8.4 + n * 0.1 for n in range(30)))
    assert calls == [("silent_again", id_)]
    assert member.is_lost
    pair.membership.heard_of(id_, 12.0)
    pair.hear(2, "heartbeat", 12.1, heartbeat=1.0, linger=LINGER)
    pair.tick(*(12.2 + n * 0.1 for n in range(30)))
    assert calls == [("silent_again", id_), ("joined", id_), ("lost", id_)]
    pair.membership.heard_of(id_, 15.3)
    pair.tick(40.0)
    assert calls[-1] == ("left", id_)


def test_members_are_not_settled_before_the_query_has_come_back() -> None:
    pair = Pair(heartbeat=1.0)
    pair.membership.disconnected()
    pair.is_deaf = True
    pair.membership.connected(10.0)
    pair.tick(*(10.0 + n * 0.1 for n in range(30)))
    assert not pair.membership.is_settled
    pair.is_deaf = False
    pair.tick(13.0, 13.9)
    assert not pair.membership.is_settled
    pair.tick(14.0)
    assert pair.membership.is_settled


def test_silence_is_checked_at_once_also_by_a_member_with_long_heartbeats() -> None:
    pair = Pair(heartbeat=600.0)
    pair.hear(2, "update", 0.0, heartbeat=1.0, linger=LINGER)
    pair.tick(*(n * 0.1 for n in range(1, 21)))
    assert pair.membership.members[str(UUID(int=2))].is_lost


def test_members_settle_within_a_second_also_with_long_heartbeats() -> None:
    pair = Pair(heartbeat=3_600.0)
    pair.tick(pair.membership.interval)
    assert pair.membership.is_settled
    assert pair.membership.interval > 100


def test_a_member_with_tiny_heartbeats_keeps_no_crashed_member_alive() -> None:
    pair = Pair(heartbeat=5.0)
    pair.hear(3, "update", 0.0, heartbeat=1.0, linger=LINGER)
    now = 0.0
    while now < 3.0:  # each turn of this busy process takes longer than the tiny heartbeat
        now += 0.2
        pair.hear(2, "heartbeat", now, heartbeat=0.05)
        pair.tick(now)
    assert pair.membership.members[str(UUID(int=3))].is_lost


def test_many_queries_are_answered_by_one_update_for_all() -> None:
    pair = Pair()
    pair.sent.clear()
    for number in range(2, 502):
        pair.hear(number, "query", 0.01, heartbeat=5.0)
    assert len(pair.of_kind("update")) == 16
    assert pair.membership.is_answer_due
    pair.tick(0.1)
    assert [each.to for each in pair.of_kind("update")][16:] == [None]
    assert not pair.membership.is_answer_due


def test_what_a_member_sent_before_it_left_does_not_bring_it_back() -> None:
    pair = Pair()
    pair.hear(2, "update", 0.0, interests=(TopicInterest("a"),))
    pair.hear(2, "leave", 0.1)
    pair.hear(2, "pong", 0.2, token="t")
    pair.hear(2, "update", 0.2, interests=(TopicInterest("a"),))
    assert pair.membership.members == {}
    pair.hear(2, "update", 2.0, interests=(TopicInterest("a"),))  # a forged end is healed
    assert len(pair.membership.members) == 1


def test_too_many_interests_are_refused_and_the_member_lives() -> None:
    pair = Pair()
    pair.hear(2, "update", 0.0, heartbeat=1.0, interests=tuple(TopicInterest(f"a{n}") for n in range(9_000)))
    with pytest.raises(DecodeError, match="18000 interests and 0 offers: at most 10000"):
        pair.hear(2, "add", 0.1, version=1, interests=tuple(TopicInterest(f"b{n}") for n in range(9_000)))
    member = pair.membership.members[str(UUID(int=2))]
    assert (len(member.interests), member.heard, member.is_lost) == (9_000, 0.1, False)


def test_members_beyond_the_maximum_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    for number in range(2, 100_000):
        pair.hear(number, "heartbeat", 0.0, heartbeat=5.0)
    assert len(pair.membership.members) == 1_000
    assert len(pair.of_kind("query")) <= 1_001
    assert len(logged(caplog, "1000 members are known")) == 1


def test_interests_that_others_could_not_read_become_wider_ones() -> None:
    pair = Pair()
    pair.sent.clear()
    pair.membership.own.set([TopicInterest("a" * 1_001)], ["b" * 1_001, "c"])
    pair.membership.own.set([TopicInterest("a", "(x=" + "y" * 1_000 + ")", True)], [])
    for each in pair.sent:
        load_announcement(dump_announcement(each))
    assert pair.of_kind("add")[0].interests == (EVERYTHING,)
    assert pair.of_kind("add")[0].offers == ("c",)
    assert pair.of_kind("add")[1].interests == (TopicInterest("a", None, True),)


def test_more_interests_than_an_announcement_holds_become_an_interest_in_everything() -> None:
    for many in (
        [TopicInterest(f"a{n}") for n in range(10_001)],
        [TopicInterest("a", f"(x={n:900})") for n in range(5_000)],
    ):
        pair = Pair()
        pair.membership.own.set(many, ())
        assert pair.sent[-1].interests == (EVERYTHING,)


def test_the_largest_announcement_is_read() -> None:
    pair = Pair()
    pair.membership.own.set([TopicInterest("a", f"(x={n}" + "\x01" * 900 + ")") for n in range(94)], ())
    assert len(pair.sent[-1].interests) in (1, 94)
    load_announcement(dump_announcement(pair.sent[-1]))

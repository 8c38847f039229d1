"""What a member wants: its subscriptions, and then its announcements, in this order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest

from messaging.dispatch.eventnetwork.announcements import TopicInterest
from messaging.dispatch.eventnetwork.own_announcements import OwnInterests
from messaging.errors import ClosedError, InvalidChannelError, SubscriptionRefusedError
from messaging.execution import Promise
from messaging.testing.waiting import PATIENCE
from tests.dispatch.helpers import logged
from tests.doubles.fake import on_loop, settle_loop

REFUSED: Final = SubscriptionRefusedError("not authorised")


class Calls:
    """Runs posted calls when it is told to."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], object]] = deque()

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        self.calls.append(partial(call, *arguments))

    def run(self) -> None:
        settle_loop()
        while self.calls:
            self.calls.popleft()()
        settle_loop()


class Joint:
    """A joint subscription whose broker answers when it is told to."""

    def __init__(self) -> None:
        self.added: list[tuple[str, Promise[None]]] = []
        self.log: list[tuple[str, str]] = []

    def add(self, channel: str) -> Promise[None]:
        if "invalid" in channel:
            raise InvalidChannelError("255 bytes at most")
        promise: Promise[None] = Promise(channel)
        self.added.append((channel, promise))
        self.log.append(("add", channel))
        return promise

    def remove(self, channel: str) -> Promise[None]:
        self.log.append(("remove", channel))
        return Promise(channel)


class Member:
    def __init__(self) -> None:
        self.calls, self.joint = Calls(), Joint()
        self.topics: Any = set()
        self.announced: list[set[str]] = []
        self.own = OwnInterests(
            "the admin 'x'", self.calls, self.joint, self.wanted, "topics/{}".format,  # type: ignore[arg-type]
            self.announce,
        )  # fmt: skip

    def wanted(self) -> tuple[frozenset[TopicInterest], frozenset[str]]:
        if isinstance(self.topics, Exception):
            raise self.topics
        return frozenset(map(TopicInterest, self.topics)), frozenset()

    def announce(self, interests: frozenset[TopicInterest], offers: frozenset[str]) -> None:
        found = {each.topics for each in interests}
        if not self.announced or found != self.announced[-1]:
            self.announced.append(found)
            self.joint.log.append(("announce", ",".join(sorted(found))))

    def want(self, *topics: str) -> Promise[None]:
        self.topics = set(topics)
        promise = self.own.request()
        self.calls.run()
        return promise

    def confirm(self, count: int = 1) -> None:
        for _ in range(count):
            on_loop(self.joint.added.pop(0)[1].resolve, None)
        self.calls.run()


@pytest.fixture
def member() -> Member:
    return Member()


def test_an_interest_is_announced_after_the_broker_confirmed_its_subscription(member: Member) -> None:
    promise = member.want("a")
    assert member.announced == [set()]
    assert not promise.done()
    member.confirm()
    assert member.announced[-1] == {"a"}
    assert promise.result(PATIENCE) is None


def test_an_interest_is_withdrawn_before_its_subscription_ends(member: Member) -> None:
    member.want("a")
    member.confirm()
    member.want()
    assert member.joint.log[-2:] == [("announce", ""), ("remove", "topics/a")]


def test_topics_that_change_leave_no_gap(member: Member) -> None:
    """The events that are wanted before and after arrive all the time."""
    member.want("a/b")
    member.confirm()
    promise = member.want("a/+")
    assert member.joint.log[-1] == ("add", "topics/a/+")
    assert member.announced[-1] == {"a/b"}
    assert not promise.done()
    member.confirm()
    assert member.joint.log[-2:] == [("announce", "a/+"), ("remove", "topics/a/b")]
    assert promise.result(PATIENCE) is None


def test_an_interest_that_others_take_the_place_of_ends_with_the_last_of_them(member: Member) -> None:
    member.want("a/#")
    member.confirm()
    member.want("a/b", "a/c", "x")
    assert ("remove", "topics/a/#") not in member.joint.log
    while member.joint.added:
        assert "a/#" in member.announced[-1] or len(member.joint.added) == 1  # `x` is not waited for
        member.confirm()
    assert member.announced[-1] == {"a/b", "a/c", "x"}
    assert member.joint.log.count(("remove", "topics/a/#")) == 1


def test_an_interest_without_an_heir_ends_at_once(member: Member) -> None:
    member.want("a")
    member.confirm()
    member.want("b/+")
    assert ("remove", "topics/a") in member.joint.log
    assert member.announced[-1] == set()


def test_many_interests_that_change_at_once_are_not_compared_and_end_when_the_last_has_begun(
    member: Member,
) -> None:
    """Comparing each of them with each other one would occupy the control thread."""
    member.want(*(f"a{n}" for n in range(100)))
    member.confirm(100)
    before = set(member.topics)
    member.want(*(f"b{n}" for n in range(100)))
    assert member.announced[-1] == before
    member.confirm(100)
    assert member.announced[-1] == member.topics
    assert len([what for what, _ in member.joint.log if what == "remove"]) == 100


def test_an_interest_ends_although_what_takes_its_place_is_refused(member: Member) -> None:
    member.want("a/b")
    member.confirm()
    member.want("a/+")
    on_loop(member.joint.added.pop(0)[1].reject, REFUSED)
    member.calls.run()
    assert member.announced[-1] == set()
    assert member.joint.log[-1] == ("remove", "topics/a/b")


def test_an_interest_that_comes_back_before_it_has_ended_is_not_subscribed_to_twice(member: Member) -> None:
    member.want("a/b")
    member.confirm()
    member.want("a/+")
    promise = member.want("a/b")
    assert promise.result(PATIENCE) is None
    assert [each for each in member.joint.log if each[1] == "topics/a/b"] == [("add", "topics/a/b")]
    assert member.joint.log[-1] == ("remove", "topics/a/+")
    assert member.announced[-1] == {"a/b"}


def test_a_thousand_changes_become_few_announcements(member: Member) -> None:
    promises = [member.own.request() for _ in range(1_000)]
    member.topics = {f"t{n}" for n in range(1_000)}
    member.calls.run()
    for _ in range(1000 // 50):
        member.confirm(50)  # as the broker confirms them
    assert all(each.done() for each in promises)
    assert len(member.announced[-1]) == 1_000
    assert len(member.announced) <= 21


def test_a_subscription_that_was_ended_and_begun_again_counts_from_its_second_confirmation(
    member: Member,
) -> None:
    member.want("a")
    member.want()
    member.want("a")
    member.confirm()
    assert member.announced == [set()]
    member.confirm()
    assert member.announced[-1] == {"a"}


def test_a_request_does_not_wait_for_what_is_no_longer_wanted(member: Member) -> None:
    first = member.want("a", "b")
    member.want("b")
    member.joint.added.sort(key=lambda each: each[0])
    del member.joint.added[0]  # the answer for `a` never comes
    member.confirm()
    assert first.result(PATIENCE) is None


def test_a_refused_subscription_is_logged_and_fails_its_request_and_no_later_one(
    member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    first = member.want("a")
    on_loop(member.joint.added.pop(0)[1].reject, REFUSED)
    member.calls.run()
    assert first.exception(PATIENCE) is REFUSED
    assert logged(caplog, "the admin 'x'", "'topics/a' do not arrive", "not authorised")
    second = member.want("a", "b")
    member.confirm()
    assert second.result(PATIENCE) is None
    assert member.announced[-1] == {"b"}


def test_a_topic_that_the_transport_cannot_carry_keeps_no_other_from_it(
    member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    first = member.want("invalid", "a", "b")
    assert isinstance(first.exception(PATIENCE), InvalidChannelError)
    member.confirm(2)
    assert member.announced[-1] == {"a", "b"}
    assert logged(caplog, "topics/invalid", "255 bytes")


def test_an_interest_whose_subscription_the_broker_ends_is_withdrawn_and_tried_again_after_a_reconnect(
    member: Member,
) -> None:
    member.want("a", "b")
    member.confirm(2)
    member.own.failed("topics/a", REFUSED)
    member.calls.run()
    assert member.announced[-1] == {"b"}
    member.own.retry()
    member.confirm()
    assert member.announced[-1] == {"a", "b"}


def test_a_service_that_fails_fails_the_request_and_not_the_next_one(member: Member) -> None:
    member.topics = RuntimeError("boom")
    promise = member.own.request()
    with pytest.raises(RuntimeError):
        member.calls.run()
    settle_loop()
    assert "RuntimeError" in str(promise.exception(PATIENCE))
    second = member.want("a")
    member.confirm()
    assert second.result(PATIENCE) is None


def test_closing_settles_every_request(member: Member) -> None:
    waiting = member.want("a")
    posted = member.own.request()
    error = ClosedError("closed")
    member.own.close(error)
    assert [each.exception(PATIENCE) for each in (waiting, posted, member.own.request())] == [error] * 3

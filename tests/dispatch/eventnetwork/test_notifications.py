"""Promises that resolve when every consumer was notified."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from messaging.dispatch import DISTRIBUTED_EVENTS
from messaging.dispatch.eventdata import WireEvent
from messaging.dispatch.eventnetwork import EventNetwork
from messaging.dispatch.eventnetwork import notifications as module
from messaging.dispatch.eventnetwork.announcements import Announcement, TopicInterest
from messaging.dispatch.eventnetwork.channels import ChannelNames
from messaging.dispatch.eventnetwork.membership import Membership
from messaging.dispatch.eventnetwork.notifications import DISPATCH, MEMBERS, DeliveryNotification, Notifications
from messaging.dispatch.eventnetwork.other_members import Interests, OtherMember
from messaging.dispatch.eventnetwork.own_member import OwnMember
from messaging.dispatch.eventnetwork.sending import EventSender
from messaging.errors import ClosedError, PartialNotificationError, TooManyRequestsError
from messaging.execution import Promise
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from tests.dispatch.eventnetwork.conftest import Silent
from tests.doubles.fake import settle_loop


def member(number: int) -> OtherMember:
    found = OtherMember(str(UUID(int=number)), 0.0)
    found.name = f"m{number}"
    return found


ONE, TWO, THREE = map(member, (1, 2, 3))


def outcome(notification: DeliveryNotification) -> Any:
    settle_loop()
    return notification.promise.exception(0) if notification.promise.done() else "pending"


def test_it_resolves_when_every_member_and_consumer_was_notified() -> None:
    found = DeliveryNotification("x", 10)
    found.expect((ONE, TWO))
    over = found.expect_part("consumer")
    found.release(DISPATCH)
    found.confirmed(ONE.id)
    found.confirmed(ONE.id)
    over()
    over()
    assert outcome(found) == "pending"
    found.confirmed(TWO.id)
    assert outcome(found) is None


def test_without_consumers_it_resolves_at_once() -> None:
    found = DeliveryNotification("x", 10)
    assert outcome(found) == "pending"
    found.release(DISPATCH)
    assert outcome(found) is None


def test_a_lost_member_is_named_after_the_others_were_notified_unless_it_confirms_or_leaves() -> None:
    for rescue in (False, True):
        found = DeliveryNotification("x", 10)
        found.expect((ONE, TWO))
        found.release(DISPATCH)
        found.lost(ONE.id)
        assert outcome(found) == "pending"
        if rescue:
            found.confirmed(ONE.id)
        found.confirmed(TWO.id)
        error = outcome(found)
        assert error is None if rescue else isinstance(error, PartialNotificationError) and "m1" in str(error)


def test_it_waits_for_members_that_join_while_the_members_are_not_settled() -> None:
    found = DeliveryNotification("x", 10)
    found.hold(MEMBERS)
    found.release(DISPATCH)
    assert found.waits_for(MEMBERS)
    found.expect((THREE,))
    found.release(MEMBERS)
    assert outcome(found) == "pending"
    found.confirmed(THREE.id)
    assert outcome(found) is None


def test_the_deadline_names_the_members_and_consumers_that_are_missing() -> None:
    pending = Notifications()
    found = DeliveryNotification("publishing", 0.05)
    found.expect((ONE, TWO))
    found.expect_part("consumer c")
    pending.add("k", found)
    error = found.promise.exception(10)
    assert isinstance(error, PartialNotificationError)
    assert all(each in str(error) for each in ("0.05 s", "m1", "m2", "consumer c"))
    eventually(lambda: not pending.all())


def test_settled_notifications_are_forgotten_and_pending_ones_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    pending = Notifications()
    made = [DeliveryNotification(str(n), 10) for n in range(4)]
    for number, each in enumerate(made[:3]):
        pending.add(str(number), each)
    with pytest.raises(TooManyRequestsError):
        pending.add("3", made[3])
    made[0].fail(ClosedError("closed"))
    assert isinstance(made[0].promise.exception(5), ClosedError)
    eventually(lambda: len(pending.all()) == 2)
    pending.add("3", made[3])
    for each in made:
        each.release(DISPATCH)
    eventually(lambda: not pending.all())


def test_a_second_notification_with_the_key_of_an_earlier_one_stays_when_that_settles() -> None:
    pending = Notifications()
    first, second = DeliveryNotification("1", 10), DeliveryNotification("2", 10)
    second.expect((ONE,))
    second.release(DISPATCH)
    pending.add("k", first)
    pending.add("k", second)
    first.release(DISPATCH)
    assert outcome(first) is None
    pending.confirmed("k", ONE.id)
    assert outcome(second) is None


@table("change", ["settled", "left", "lost"])
def test_a_change_between_the_look_and_the_note_of_a_publisher_is_not_missed(change: str) -> None:
    """The control thread tells the pending notifications what changes, while a publisher is about to add another."""
    interests = Interests()
    changes = Silent()
    own = Announcement(kind="update", member=str(UUID(int=9)), heartbeat=5.0)
    membership = Membership(own, TopicInterest("**"), changes, lambda _: None)
    membership.is_settled = change != "settled"
    other = member(1)
    membership.members[other.id] = other
    interests.change(other.id, [TopicInterest("a")], [])
    notification = DeliveryNotification("x", 10)

    class Racing(Notifications):
        def add(self, key: str, notification: DeliveryNotification) -> None:
            if change == "settled":
                membership.is_settled = True
            elif change == "left":
                del membership.members[other.id]
            else:
                other.is_lost = True
            super().add(key, notification)

    class Instance:
        class publisher:  # noqa: N801
            @staticmethod
            def publish(_: object) -> Promise[None]:
                return Promise("x")

    class NoContexts:
        def of_event(self, *_: object, **__: object) -> None:
            return None

    names, settings = ChannelNames("topics", DISTRIBUTED_EVENTS), EventNetwork()
    sending = OwnMember("x", own.member, None, None, Instance(), settings, names, NoContexts(), None)  # type: ignore[arg-type]
    changes.interests, changes.notifications = interests, Racing()
    sender = EventSender(sending, membership, ())
    sender.send(WireEvent.of("a", 1), lambda: 1, qos="1", notification=notification)
    notification.release(DISPATCH)
    if change == "settled":
        assert outcome(notification) == "pending"
        notification.confirmed(other.id)
    assert outcome(notification) is None

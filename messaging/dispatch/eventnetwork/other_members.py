"""The other members of a network, and what follows from their changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from messaging.dispatch.eventnetwork.membership import Membership, MembershipListener, OtherMember
from messaging.dispatch.eventnetwork.notifications import MEMBERS, DeliveryNotification, Notifications
from messaging.errors.text import SafeLog

if TYPE_CHECKING:
    from messaging.dispatch.eventnetwork.announcements import TopicInterest
    from messaging.dispatch.eventnetwork.interests import Interests
    from messaging.dispatch.eventnetwork.own_member import NodeService

logger = SafeLog(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class OtherMembers:
    """The other members, what they want, and which notifications wait for them. Immutable."""

    membership: Membership
    interests: Interests
    notifications: Notifications


class MemberChanges(MembershipListener):
    """Passes the changes of the membership on to the parts of a node. On the control thread.

    It contains the exceptions of the service and of an event's data: they must not end heartbeats.
    """

    def __init__(
        self,
        interests: Interests,
        notifications: Notifications,
        service: NodeService,
        settled: Callable[[], object],
        in_order: Callable[[Callable[[], object]], object],
    ) -> None:
        self._settled = settled
        self._in_order = in_order
        self._interests = interests
        self._notifications = notifications
        self._service = service

    def joined(self, member: OtherMember) -> None:
        """See ``MembershipListener``."""
        for each in self._notifications.all():
            if each.waits_for(MEMBERS) and self._is_for(each, member):
                each.expect((member,))
                each.joined(member)

    @staticmethod
    def _is_for(notification: DeliveryNotification, member: OtherMember) -> bool:
        try:
            return notification.is_for(member)
        except Exception:
            logger.exception(
                "event network: %s: cannot read the data of the event: member %s is not waited for",
                notification.what, member,
            )  # fmt: skip
            return False

    def changed(self, member: OtherMember, added: frozenset[TopicInterest], removed: frozenset[TopicInterest]) -> None:
        """See ``MembershipListener``."""
        self._interests.change(member.id, added, removed)
        if removed:
            for each in self._notifications.all():
                if each.is_missing(member) and not self._is_for(each, member):
                    each.confirmed(member.id)  # it has no consumer left, and may never answer
        self.joined(member)
        self._interest_changed()

    def lost(self, member: OtherMember) -> None:
        """See ``MembershipListener``."""
        for each in self._notifications.all():
            each.lost(member.id)
        self.silent_again(member)

    def silent_again(self, member: OtherMember) -> None:
        """See ``MembershipListener``."""
        self._in_order(partial(self._service.member_lost, member.id))

    def left(self, member: OtherMember) -> None:
        """See ``MembershipListener``."""
        if not member.is_lost:  # a lost one did not confirm: notifications still name it
            for each in self._notifications.all():
                each.confirmed(member.id)
        self.silent_again(member)

    def settled(self) -> None:
        """See ``MembershipListener``."""
        for each in self._notifications.all():
            each.release(MEMBERS)
        self._settled()
        self._interest_changed()

    def _interest_changed(self) -> None:
        try:
            self._service.interest_changed()
        except Exception:
            logger.exception("event network: the event service failed on a change of interests; it is left out")

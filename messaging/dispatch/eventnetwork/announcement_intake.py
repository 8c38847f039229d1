"""The announcements that arrive: read on the control thread, in the order of their arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING

from messaging.dispatch.eventnetwork.announcements import load_announcement
from messaging.dispatch.eventnetwork.event_intake import RefusalLog, Unacknowledged
from messaging.errors import MessagingError
from messaging.errors.text import SafeLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from messaging.dispatch.eventnetwork.other_members import OtherMembers
    from messaging.dispatch.eventnetwork.own_member import OwnMember
    from messaging.model import Incoming

logger = SafeLog(__name__)


class AnnouncementIntake:
    """Takes in the announcements of the other members, and the own ones that come back.

    Args:
        own: the member that receives.
        others: the members that announce.
        settle: acknowledges messages; from any thread.
    """

    def __init__(self, own: OwnMember, others: OtherMembers, settle: Callable[[Sequence[Incoming]], object]) -> None:
        self._own = own
        self._others = others
        self._settle = settle
        #: counts the messages that are refused
        self.refusals = RefusalLog(own.title)
        #: bounds the announcements that wait for :meth:`take`
        self.unacknowledged = Unacknowledged()
        self._is_closed = False

    @property
    def refused(self) -> int:
        """Number of messages that were refused, or dropped because too many wait."""
        return self.refusals.refused + self.unacknowledged.dropped

    def take(self, batch: Sequence[Incoming], now: float) -> None:
        """Read announcements that arrived at ``now``, monotonic seconds. On the control thread."""
        try:
            for each in batch:
                self.unacknowledged.took(each)
                try:
                    self._read(each, now)
                except Exception:  # the others must be read all the same
                    logger.exception("%s: cannot take in an announcement; it is dropped", self._own.title)
        finally:
            self._settle(batch)

    def _read(self, incoming: Incoming, now: float) -> None:
        if self._is_closed:
            return
        own, notifications = self._own, self._others.notifications
        try:
            if own.seals is None:
                announcement = load_announcement(incoming.payload)
            else:
                announcement = own.seals.announcement(incoming.payload, incoming.channel or "")
            if announcement.to not in (None, own.id):
                return
            self._others.membership.receive(announcement, now)
            if announcement.member == own.id:
                return
            if announcement.kind == "notified" and announcement.event is not None:
                notifications.confirmed(announcement.event, announcement.member)
            elif announcement.kind == "pong" and announcement.token is not None:
                notifications.confirmed(announcement.token, announcement.member)
            elif announcement.kind == "replay":
                own.service.replay_asked(announcement)
        except MessagingError as error:
            self.refusals.log("an announcement", error, incoming)

    def close(self) -> None:
        """Read no further announcements. From any thread."""
        self._is_closed = True

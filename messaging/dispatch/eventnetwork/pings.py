"""Pings: a promise that every live member has read the announcements of this one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from messaging.dispatch.eventnetwork.announcements import Announcement
from messaging.dispatch.eventnetwork.notifications import DISPATCH, MEMBERS, DeliveryNotification
from messaging.errors import ClosedError

if TYPE_CHECKING:
    from messaging.dispatch.eventnetwork.membership import OtherMember
    from messaging.dispatch.eventnetwork.other_members import OtherMembers
    from messaging.dispatch.eventnetwork.own_member import OwnMember
    from messaging.execution import Promise


class Pings:
    """Asks the other members whether they have read the announcements of this one. Thread safe.

    Args:
        own: the member that asks.
        others: the members that answer; their notifications are told when one answers, is lost or leaves.
        announce: announces.
        refresh: announces the interests of now.
        is_connected: returns whether pings reach the others, and their answers this member.
    """

    def __init__(
        self,
        own: OwnMember,
        others: OtherMembers,
        announce: Callable[[Announcement], object],
        refresh: Callable[[], Promise[None]],
        is_connected: Callable[[], bool],
    ) -> None:
        self._own = own
        self._others = others
        self._announce = announce
        self._refresh = refresh
        self._is_connected = is_connected
        # --- used by the control thread
        #: pings that wait until this member is connected and hears announcements, by token; and pings that were sent
        self._unasked: dict[str, DeliveryNotification] = {}
        self._asked: dict[str, DeliveryNotification] = {}

    def ask(self, timeout: float) -> Promise[None]:
        """Return the promise that every live member has read the announcements so far; see ``EventNode.announced``."""
        token = str(uuid4())
        asking = DeliveryNotification(f"announcing the interests of {self._own.title}", timeout)
        asking.is_for = lambda member: member.answers
        asking.waits_for_connection = True
        self._others.notifications.add(token, asking)
        self._refresh_first(token, asking)
        return asking.promise

    def _refresh_first(self, token: str, asking: DeliveryNotification) -> None:
        """Announce the interests of now, and then send a ping."""
        announced = self._refresh()

        def go_on() -> None:
            error = announced.exception()
            if isinstance(error, ClosedError):
                asking.fail(error)
            else:
                self._own.control.post(self._ping, token, asking)

        announced.listen(go_on)

    def ask_again(self) -> None:
        """Send the pings that waited. On the control thread."""
        unasked, self._unasked = self._unasked, {}
        for token, asking in unasked.items():
            self._refresh_first(token, asking)

    def deafened(self) -> None:
        """Have all pings sent again by the next :meth:`ask_again`. On the control thread.

        The interests are withdrawn, so members that answered do not know them any more. Answers to the former pings
        that are still on their way do not count.
        """
        asked = [*self._asked.items()]
        self._asked.clear()
        for token, asking in asked:
            renewed = str(uuid4())
            asking.restart()
            self._others.notifications.renew(token, renewed)
            self._unasked[renewed] = asking

    def _ping(self, token: str, asking: DeliveryNotification) -> None:
        if asking.promise.done():
            return
        membership = self._others.membership
        if not self._is_connected() or membership.is_deaf:  # no answer would arrive
            self._unasked[token] = asking
            return
        self._asked[token] = asking
        asking.promise.listen(partial(self._own.control.post, self._asked.pop, token, None))
        asking.joined = partial(self._ping_one, token)
        if not membership.is_settled:
            asking.hold(MEMBERS)
        asking.expect(each for each in membership.members.values() if each.answers and not each.is_lost)
        self._announce(Announcement(kind="ping", member=self._own.id, token=token))
        asking.release(DISPATCH)

    def _ping_one(self, token: str, member: OtherMember) -> None:
        """Ping a member that joined after the ping to all."""
        self._announce(Announcement(kind="ping", member=self._own.id, to=member.id, token=token))

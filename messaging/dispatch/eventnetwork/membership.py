"""The members of an event network as one of them sees them: who lives, what each wants and offers.

A state machine without threads, clocks and input or output: its owner calls it on one thread at a time, passes the time
in monotonic seconds, and sends the announcements that it makes. See
:mod:`messaging.dispatch.eventnetwork.announcements` for their meaning.

**Lost members.** A member that is silent for twice its heartbeat is *lost*: nothing waits for it any more. Its
interests remain in force for its ``linger``, because its broker may keep its events: a process that was suspended, or
whose connection comes back, misses none. Then it is forgotten. A member that leaves is forgotten at once. While this
member is not connected, was suspended itself, or receives nothing, the silence of the others proves nothing: a broker
that is behind, or a session with events of an earlier process before the announcements. Own announcements that come
back show how far it received.

**Settling.** After each connection the other members are queried. Until the query has come back, and the answers had
time to arrive, the members are not settled: a member that is not known yet may want any event. They are not settled,
either, while the broker has ended a subscription to announcements, until it is made again and they are queried anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from messaging.dispatch.eventnetwork.announcements import MAX_ENTRIES, Announcement, TopicInterest
from messaging.dispatch.eventnetwork.notifications import MEMBERS, DeliveryNotification, Notifications
from messaging.dispatch.eventnetwork.other_members import Interests, OtherMember
from messaging.dispatch.eventnetwork.own_announcements import OwnAnnouncements
from messaging.dispatch.eventnetwork.own_member import NodeService
from messaging.errors import DecodeError
from messaging.errors.text import SafeLog

logger = SafeLog(__name__)

#: members that are known at a time, and interests and offers of all of them together; others are ignored and logged
MAX_MEMBERS: Final = 1_000
MAX_TOTAL: Final = 200_000
#: heartbeats that are sent within the time that is announced, so that one lost or late message proves nothing
_BEATS: Final = 3
#: silence after which a member is lost, in heartbeats
_SILENT: Final = 2.0
#: silence after which this member checks that it receives anything at all, in heartbeats
_SUSPICIOUS: Final = 1.5
#: longest time for the answers to a query, seconds
_SETTLE: Final = 1.0
#: queries that are answered one by one within a third of a heartbeat; further ones get one update for all members
_ANSWERS: Final = 16
#: time after which a member whose interests were refused is queried again, seconds
REFUSED_AGAIN: Final = 60.0
#: time until that update, seconds: shorter than the time for answers
ANSWER_DELAY: Final = 0.1


class MemberChanges:
    """Passes the changes of the membership on to the parts of a node. On the thread of the membership.

    It contains the exceptions of the service and of an event's data: they must not end heartbeats.

    Args:
        service: the event service of the node.
        settled: called when the members had time to answer.
        in_order: calls a function after the events that arrived so far were taken in.
    """

    def __init__(
        self,
        service: NodeService,
        settled: Callable[[], object],
        in_order: Callable[[Callable[[], object]], object],
    ) -> None:
        self._settled = settled
        self._in_order = in_order
        #: what the other members want
        self.interests = Interests()
        #: wait for other members
        self.notifications = Notifications()
        self._service = service

    def joined(self, member: OtherMember) -> None:
        """Note that ``member`` is there, for the first time or again."""
        for each in self.notifications.all():
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
        """Note that the interests of ``member`` in force changed: also when it joins or is forgotten."""
        self.interests.change(member.id, added, removed)
        if removed:
            for each in self.notifications.all():
                if each.is_missing(member) and not self._is_for(each, member):
                    each.confirmed(member.id)  # it has no consumer left, and may never answer
        self.joined(member)
        self._interest_changed()

    def lost(self, member: OtherMember) -> None:
        """Note that ``member`` is lost: its process may have crashed."""
        for each in self.notifications.all():
            each.lost(member.id)
        self.silent_again(member)

    def silent_again(self, member: OtherMember) -> None:
        """Note that ``member`` is lost, and that no more of the events arrive that its broker kept."""
        self._in_order(partial(self._service.member_lost, member.id))

    def left(self, member: OtherMember) -> None:
        """Note that ``member`` left in good order, or is forgotten after it was lost."""
        if not member.is_lost:  # a lost one did not confirm: notifications still name it
            for each in self.notifications.all():
                each.confirmed(member.id)
        self.silent_again(member)

    def settled(self) -> None:
        """Note that the members had time to answer."""
        for each in self.notifications.all():
            each.release(MEMBERS)
        self._settled()
        self._interest_changed()

    def _interest_changed(self) -> None:
        try:
            self._service.on_interest()
        except Exception:
            logger.exception("event network: the event service failed on a change of interests; it is left out")


class Membership:
    """The other members, and the announcements of this one.

    Args:
        own: an announcement with the fields that all announcements of this member share: ``member``, ``framework``,
            ``name``, ``heartbeat``, ``linger``, ``qos``.
        everything: the interest in all events, announced in place of interests that are too many or too large.
        changes: is told of changes.
        send: sends an announcement of this member; never blocks and never raises.
    """

    def __init__(
        self,
        own: Announcement,
        everything: TopicInterest,
        changes: MemberChanges,
        send: Callable[[Announcement], object],
    ) -> None:
        self.members: dict[str, OtherMember] = {}
        self.is_settled = False
        #: whether the broker ended a subscription to announcements, which is not made again yet
        self.is_deaf = False
        #: the announcements of this member
        self.own = OwnAnnouncements(own, everything, send)
        self.changes = changes
        self._total = 0
        self._settles_at = math.inf
        self._beats_at = 0.0
        #: when the latest own announcement that came back was sent: others that were sent before have arrived, too
        self._received_until = 0.0
        self._ticked: float | None = None
        #: queries that were answered since the last heartbeat, and whether an update for all members answers the rest
        self._answers = 0
        self.is_answer_due = False
        #: members that left just now, each with the time until which late announcements of it are ignored
        self._gone: dict[str, float] = {}
        #: whether a member was ignored since the last one was admitted
        self._is_full = False

    # --- the connection

    def connected(self, now: float) -> None:
        """Announce this member, and query the others: for the first time, or after the connection was lost."""
        self.is_deaf = False
        self.is_settled = False
        self._settles_at = math.inf  # until the query comes back
        self._listen_anew(now)
        self.own.connected()
        self._query_all(now)

    def _query_all(self, now: float) -> None:
        """Announce this member, and query the others."""
        self.own.update()
        self.own.probe("query", now)
        self._beats_at = now + self.own.heartbeat / _BEATS

    def disconnected(self) -> None:
        """Note that the connection is lost: until the next one, silence proves nothing."""
        self.own.is_connected = False
        self.is_settled = False

    def deafened(self) -> None:
        """Note that the broker ended a subscription to announcements: until :meth:`connected` some are missed."""
        self.is_deaf = True
        self.is_settled = False
        self._settles_at = math.inf

    def _listen_anew(self, now: float) -> None:
        """Count the silence of all members from now on: their announcements may be on the way."""
        self._ticked = now
        for member in self.members.values():
            if member.is_watched:
                member.heard = now

    # --- time

    @property
    def interval(self) -> float:
        """Return the longest time between two calls of :meth:`tick`, seconds."""
        shortest = min((each.heartbeat for each in self.members.values() if each.is_watched and each.heartbeat),
                       default=self.own.heartbeat)  # fmt: skip
        interval = min(shortest, self.own.heartbeat) / (2 * _BEATS)
        return interval if self.is_settled else min(interval, _SETTLE)

    def tick(self, now: float) -> None:
        """Send a heartbeat if it is due, and expire members and interests."""
        if not self.own.is_connected:
            return
        before = self._ticked
        self._ticked = now
        gap = 0.0 if before is None else now - before
        # This thread or process was suspended: announcements of that time are still to be read.
        for member in self.members.values():
            if member.is_watched and gap > min(member.heartbeat, self.own.heartbeat):
                member.heard = now
        if gap > self.own.heartbeat:
            self._query_all(now)  # the others may have lost this member
        if now >= self._beats_at:  # first: the rest calls the listener
            self._answers = 0
            self._beats_at = now + self.own.heartbeat / _BEATS
            self.own.probe("heartbeat", now)
        if self.is_answer_due:
            self.is_answer_due = False
            self.own.update()
        self._gone = {id_: until for id_, until in self._gone.items() if now < until}
        for member in [*self.members.values()]:
            if member.is_lost and now - member.lost_at >= member.linger:
                self._forget(member)
            elif member.is_watched:
                self._suspect(member, now)
        if not self.is_settled and now >= self._settles_at:
            self.is_settled = True
            self.changes.settled()

    def _suspect(self, member: OtherMember, now: float) -> None:
        """Lose a silent member, if its silence is not that of this member's own subscription."""
        silent = now - member.heard
        if not member.heartbeat or silent < _SUSPICIOUS * member.heartbeat:
            return
        since = member.heard + _SUSPICIOUS * member.heartbeat
        if self.own.probed_at < since:
            self.own.probe("heartbeat", now)
        elif silent >= _SILENT * member.heartbeat and self._received_until >= since:
            self._lose(member, now)

    def _lose(self, member: OtherMember, now: float) -> None:
        if member.is_lost:
            member.is_heard_late = False
            self.changes.silent_again(member)
            return
        member.is_lost, member.is_heard_late, member.lost_at = True, False, now
        logger.info("event network: member %s is lost: no announcement for %g s", member, now - member.heard)
        self.changes.lost(member)

    def _forget(self, member: OtherMember) -> None:
        del self.members[member.id]
        self._set(member, frozenset(), frozenset())
        self.changes.left(member)

    # --- what the others send

    def heard_of(self, id_: str, now: float) -> None:
        """Note that an event of a member arrived that has not announced itself, or is lost.

        Its process may have ended before this member began: a broker, or an outbox, kept the event. Without further
        events and announcements it is lost as any silent member is. Such an event does not bring a lost member back.
        """
        member = self.members.get(id_)
        if member is None:
            self._admit(Announcement(kind="heartbeat", member=id_), now)
        elif member.is_lost:
            member.heard, member.is_heard_late = now, True
        elif not member.is_known:
            member.heard = now

    def receive(self, announcement: Announcement, now: float) -> None:
        """Take in an announcement of another member.

        Raises:
            DecodeError: there are too many interests; they are not taken in.
        """
        if announcement.member == self.own.member:
            self._came_back(announcement, now)
            return
        if announcement.to is not None and announcement.to != self.own.member:
            return
        if announcement.kind == "leave":
            self._leave(announcement, now)
            return
        announcement = _readable(announcement)
        member = self.members.get(announcement.member)
        if member is None:
            if announcement.kind in ("remove", "notified"):
                return  # it says nothing of what the sender wants
            if now < self._gone.get(announcement.member, now):
                return  # overtaken by the end of the member
            member = self._admit(announcement, now)
            if member is None:
                self.own.pong(announcement)
                return
        member.heard = now
        if not member.answers and (announcement.answers or announcement.kind in ("ping", "pong")):
            member.answers = True
            self.changes.joined(member)  # again: an `announced` that is pending waits for it from now on
        member.report(announcement.problems)
        if announcement.inbox is not None:
            member.inbox = announcement.inbox
        if announcement.heartbeat:
            member.heartbeat, member.linger = announcement.heartbeat, announcement.linger
        if member.is_lost:
            member.is_lost = False
            self.changes.joined(member)
        if announcement.kind == "update":
            self._update(member, announcement, now)
        elif announcement.kind in ("add", "remove"):
            self._apply(member, announcement, now)
        elif announcement.version > member.version or not member.is_known:
            self._query(member, announcement, now)
        if announcement.kind == "query":
            self._answer(announcement.member)
        self.own.pong(announcement)

    def _came_back(self, announcement: Announcement, now: float) -> None:
        """Note that this member received everything that was sent before this own announcement."""
        sent = self.own.came_back(announcement.token)
        if sent is None:
            return
        self._received_until = max(self._received_until, sent)
        if self._settles_at == math.inf and not self.is_deaf:
            self._settles_at = now + min(_SETTLE, self.own.heartbeat)

    def _answer(self, to: str) -> None:
        """Answer a query. After a restart of the broker every member queries: then one update answers many of them."""
        if self._answers < _ANSWERS:
            self._answers += 1
            self.own.update(to)
        else:
            self.is_answer_due = True

    def _admit(self, announcement: Announcement, now: float) -> OtherMember | None:
        if len(self.members) >= MAX_MEMBERS:
            if not self._is_full:
                self._is_full = True
                logger.error(
                    "event network: %d members are known, which is the maximum: further ones are ignored", MAX_MEMBERS
                )
            return None
        self._is_full = False
        member = self.members[announcement.member] = OtherMember(announcement.member, now)
        member.heartbeat = announcement.heartbeat or self.own.heartbeat
        member.describe(announcement)
        self.changes.joined(member)
        return member

    def _update(self, member: OtherMember, announcement: Announcement, now: float) -> None:
        if member.is_known and announcement.version < member.version:
            return  # overtaken by a later change
        member.describe(announcement)
        self._take(member, announcement, frozenset(announcement.interests), frozenset(announcement.offers), now)

    def _apply(self, member: OtherMember, announcement: Announcement, now: float) -> None:
        if announcement.version <= member.version and member.is_known:
            return
        if announcement.version != member.version + 1 or not member.is_known:
            self._query(member, announcement, now)
            return
        interests, offers = frozenset(announcement.interests), frozenset(announcement.offers)
        if announcement.kind == "add":
            self._take(member, announcement, member.interests | interests, member.offers | offers, now)
        else:
            self._take(member, announcement, member.interests - interests, member.offers - offers, now)

    def _take(
        self,
        member: OtherMember,
        announcement: Announcement,
        interests: frozenset[TopicInterest],
        offers: frozenset[str],
        now: float,
    ) -> None:
        more = len(interests) + len(offers) - len(member.interests) - len(member.offers)
        member.version = announcement.version
        member.is_refused = (
            len(interests) > MAX_ENTRIES or len(offers) > MAX_ENTRIES or self._total + max(more, 0) > MAX_TOTAL
        )
        member.is_known = not member.is_refused
        member.queried = now if member.is_refused else None
        if member.is_refused:
            raise DecodeError(
                f"member {member} announces {len(interests)} interests and {len(offers)} offers: at most {MAX_ENTRIES} "
                f"each, and {MAX_TOTAL} of all members, are kept"
            )
        self._set(member, interests, offers)

    def _set(self, member: OtherMember, interests: frozenset[TopicInterest], offers: frozenset[str]) -> None:
        before = member.interests
        self._total += len(interests) + len(offers) - len(before) - len(member.offers)
        member.interests, member.offers = interests, offers
        if interests != before:
            self.changes.changed(member, interests - before, before - interests)

    def _query(self, member: OtherMember, announcement: Announcement, now: float) -> None:
        """Ask for an update: at most once in a heartbeat of this member, and rarely for one that was refused."""
        pause = self.own.heartbeat / _BEATS
        if member.is_refused and announcement.version == member.version:
            pause = max(pause, REFUSED_AGAIN)  # there is room as soon as others want less
        if member.queried is None or now - member.queried >= pause:
            member.queried = now
            self.own.send("query", to=member.id)

    def _leave(self, announcement: Announcement, now: float) -> None:
        member = self.members.get(announcement.member)
        if not announcement.is_lost and len(self._gone) < MAX_MEMBERS:
            self._gone[announcement.member] = now + min(_SETTLE, self.own.heartbeat)
        if member is None:
            return
        if not announcement.is_lost:
            member.is_lost = False  # it lived, and leaves in good order
            self._forget(member)
        elif not member.is_lost:
            member.heard = now
            self._lose(member, now)


def _readable(announcement: Announcement) -> Announcement:
    """Return an announcement without the interests that do not parse; they are problems of it."""
    problems = [*announcement.problems]
    interests = []
    for each in announcement.interests:
        try:
            Interests.check(each)
            interests.append(each)
        except DecodeError as error:
            problems.append(str(error))
    if len(interests) == len(announcement.interests):
        return announcement
    return replace(announcement, interests=tuple(interests), problems=tuple(problems))

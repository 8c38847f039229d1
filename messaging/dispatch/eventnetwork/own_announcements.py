"""What one member announces: its interests, in step with its subscriptions, published in order; and its last will.

The broker's subscriptions for an interest come first, and then its announcement. Another member that reads an
announcement sends events at once, so the subscription must exist before. The reverse order holds for interests that
end. An interest that ends while one of overlapping topics begins stays until the broker has confirmed that: a consumer
whose topics change misses no event that it wants before and after.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from messaging.dispatch.eventnetwork.announcements import (
    MAX_BYTES,
    MAX_ENTRIES,
    Announcement,
    TopicInterest,
    dump_announcement,
    is_announceable,
)
from messaging.dispatch.eventnetwork.own_member import Control, OwnMember
from messaging.errors import ClosedError, MessagingError, UnsupportedFeatureError
from messaging.errors.text import SafeLog
from messaging.execution import Flag, Promise, Serial, clock, engine, workers
from messaging.model import Features, Message, overlap
from messaging.receiving import JointSubscription

logger = SafeLog(__name__)


#: announcements that wait to be published; further ones are dropped, and the next heartbeat shows that they were
MAX_WAITING: Final = 10_000
_LOG_INTERVAL: Final = 1.0
#: own announcements that may be on their way
_MAX_PROBES: Final = 64
#: bytes of an announcement that are left to the fields beside interests and offers
_OTHER_FIELDS: Final = 8_192


class OwnAnnouncements:
    """The announcements of this member, and what it announced so far. Used by the thread of its :class:`Membership`.

    Args:
        own: an announcement with the fields that all announcements of this member share.
        everything: the interest in all events, announced in place of interests that are too many or too large.
        send: sends an announcement; never blocks for long and never raises.
    """

    def __init__(self, own: Announcement, everything: TopicInterest, send: Callable[[Announcement], object]) -> None:
        self.member = own.member
        self.heartbeat = own.heartbeat
        self.is_connected = False
        self._own = own
        self._everything = everything
        self._send = send
        self._interests: frozenset[TopicInterest] = frozenset()
        self._offers: frozenset[str] = frozenset()
        #: number of changes
        self._version = 0
        #: own announcements that are awaited, by token, with the time when they were sent
        self._probes: dict[str, float] = {}
        self._tokens = itertools.count(1)
        #: when the latest one was sent
        self.probed_at = 0.0

    def set(self, wanted: Iterable[TopicInterest], offered: Iterable[str]) -> None:
        """Set what this member wants and offers; announce the changes if it is connected."""
        interests, offers = self._bounded(frozenset(wanted), frozenset(offered))
        added, removed = interests - self._interests, self._interests - interests
        new, old = offers - self._offers, self._offers - offers
        self._interests, self._offers = interests, offers
        if added or new:
            self._change("add", added, new)
        if removed or old:
            self._change("remove", removed, old)

    def _bounded(
        self, interests: frozenset[TopicInterest], offers: frozenset[str]
    ) -> tuple[frozenset[TopicInterest], frozenset[str]]:
        """Return the interests and offers to announce, as far as the other members read them."""
        if not all(is_announceable(each.topics) for each in interests):
            interests = frozenset((self._everything,))
        interests = frozenset(
            each if each.filter is None or is_announceable(each.filter) else replace(each, filter=None)
            for each in interests
        )
        offers = frozenset(filter(is_announceable, offers))
        if len(interests) > MAX_ENTRIES or _size(interests) > (MAX_BYTES - _OTHER_FIELDS) // 2:
            interests = frozenset((self._everything,))
        if len(offers) > MAX_ENTRIES or sum(6 * len(each) + 3 for each in offers) > (MAX_BYTES - _OTHER_FIELDS) // 2:
            offers = frozenset()  # offers are for lists only
        return interests, offers

    def _change(self, kind: str, interests: frozenset[TopicInterest], offers: frozenset[str]) -> None:
        self._version += 1
        if self.is_connected:
            self.send(kind, interests=_in_order(interests), offers=tuple(sorted(offers)))

    def update(self, to: str | None = None) -> None:
        """Announce all interests and offers, to one member or to all."""
        self.send("update", interests=_in_order(self._interests), offers=tuple(sorted(self._offers)), to=to)

    def probe(self, kind: str, now: float) -> None:
        """Send an announcement to all members, which comes back to this one, too."""
        token = str(next(self._tokens))
        self._probes[token] = self.probed_at = now
        if len(self._probes) > _MAX_PROBES:
            del self._probes[next(iter(self._probes))]
        self.send(kind, token=token)

    def came_back(self, token: str | None) -> float | None:
        """Return when the own announcement with this token was sent; ``None`` if it is not awaited."""
        return None if token is None else self._probes.pop(token, None)

    def connected(self) -> None:
        """Await no earlier own announcement, as the connection is new, and send all changes from now on."""
        self.is_connected = True
        self._probes.clear()

    def pong(self, announcement: Announcement) -> None:
        """Answer an announcement of another member if it is a ping."""
        if announcement.kind == "ping" and announcement.token is not None:
            self.send("pong", to=announcement.member, token=announcement.token)

    def send(self, kind: str, **fields: Any) -> None:
        """Send an announcement."""
        self._send(replace(self._own, kind=kind, version=self._version, **fields))


class Announcer:
    """Publishes announcements in their order, on a worker thread that may wait for room in the outbox. Thread safe.

    They bypass a durable outbox: a later run must not send them again.

    Args:
        own: the member.
        inbox_of: returns the inbox of a member.
    """

    def __init__(self, own: OwnMember, inbox_of: Callable[[str], str]) -> None:
        self._own = own
        self._inbox_of = inbox_of
        self._to_all = own.contexts.of_announcement(own.names.all_members)
        self._waiting: deque[Announcement] = deque()
        self._serial = Serial(self._drain, lambda: self._waiting)
        self._is_ended = False
        #: set when everything was published that was announced before the end
        self.left = Flag()
        #: when the next failure is logged, monotonic seconds; and number of announcements that were not sent
        self._next_log = 0.0
        self.failed = 0

    def announce(self, announcement: Announcement) -> None:
        """Queue an announcement to the member that it is for, or to all. Never waits and never raises."""
        if self._is_ended:
            return
        if announcement.kind == "heartbeat" and len(self._waiting) >= MAX_WAITING // 2:
            return  # the announcements that wait show that this member lives
        if len(self._waiting) >= MAX_WAITING:
            self._note_failure(f"{MAX_WAITING} announcements wait already")
            return
        self._waiting.append(announcement)
        self._serial.wake()

    def confirm(self, event_id: str, sender: str) -> None:
        """Tell the sender of an event that every consumer here was notified. From any thread."""
        self.announce(Announcement(kind="notified", member=self._own.id, to=sender, event=event_id))

    def end(self) -> None:
        """Announce the end of the member, and nothing after it."""
        self.announce(Announcement(kind="leave", member=self._own.id))
        self._is_ended = True

    def abandon(self) -> None:
        """Drop the announcements that wait, in a forked child, and announce nothing after them."""
        self._waiting.clear()
        self.left.set()
        self._is_ended = True

    def _drain(self) -> None:
        while self._waiting:
            announcement = self._waiting.popleft()
            try:
                self._publish(announcement)
            except ClosedError:
                pass
            except MessagingError as error:
                self._note_failure(str(error))
            except Exception:
                logger.exception("%s: cannot send an announcement; it is dropped", self._own.title)
            if announcement.kind == "leave":
                self.left.set()

    def _publish(self, announcement: Announcement) -> None:
        to = announcement.to
        own = self._own
        context = self._to_all if to is None else own.contexts.of_announcement(own.names.member(self._inbox_of(to)))
        payload = dump_announcement(announcement)
        if own.seals is not None:
            payload = own.seals.seal(payload, context.channel or "")
        publisher = own.instance.publisher
        promise = publisher.publish_checked(payload, publisher.compile(context), None)
        promise.was_retrieved = True
        promise.listen(partial(self._published, promise))

    def _published(self, promise: Promise[None]) -> None:
        """Note the outcome. On the loop."""
        error = promise.exception()
        if error is not None and not isinstance(error, ClosedError):
            workers().submit(partial(self._note_failure, str(error)))

    def _note_failure(self, why: str) -> None:
        self.failed += 1
        now = clock.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL
            logger.warning(
                "%s: an announcement was not sent: %s; the next heartbeat shows that one is missing (%d so far)",
                self._own.title, why, self.failed,
            )  # fmt: skip

    def set_last_will(self) -> None:
        """Have the broker announce the loss of this member, where the instance can. From any thread."""
        own = self._own
        if Features.EXTENSION_LAST_WILL not in own.instance.features:
            return
        channel = own.names.all_members
        context = own.contexts.of_announcement(channel, is_last_will=True)
        try:
            payload = dump_announcement(Announcement(kind="leave", member=own.id, is_lost=True))
            if own.seals is not None:
                payload = own.seals.seal(payload, channel, is_will=True)
            promise = own.instance.publisher.publish(Message(payload, context))
        except UnsupportedFeatureError as error:
            logger.info("%s: no last will: %s; its heartbeat shows its loss", own.title, error)
            return
        promise.add_done_callback(self._last_will_set)

    def _last_will_set(self, promise: Promise[None]) -> None:
        error = promise.exception()
        if error is not None and not isinstance(error, ClosedError):
            logger.warning("%s: no last will: %s; its heartbeat shows its loss", self._own.title, error)


def _in_order(interests: Iterable[TopicInterest]) -> tuple[TopicInterest, ...]:
    """Return interests in an order that is the same in each run."""
    return tuple(sorted(interests, key=lambda each: (each.topics, each.filter or "", each.grammar, each.is_hidden)))


def _size(interests: Iterable[TopicInterest]) -> int:
    """Return at least the bytes of ``interests`` in an announcement."""
    return sum(64 + 6 * (len(each.topics) + len(each.filter or "")) for each in interests)


#: pairs of patterns that are compared; of more, all that end stay until none is being added
_COMPARED: Final = 5_000


class OwnInterests:
    """Keeps subscriptions and announcements in step with what an event service wants.

    Args:
        title: of the member, for the log.
        control: runs everything but :meth:`request`.
        joint: the subscription of the member.
        wanted: returns what the service wants and offers.
        pattern_of: returns the channel pattern of a topic filter.
        announce: announces interests and offers.
    """

    def __init__(
        self,
        title: str,
        control: Control,
        joint: JointSubscription,
        wanted: Callable[[], tuple[Iterable[TopicInterest], Iterable[str]]],
        pattern_of: Callable[[str], str],
        announce: Callable[[Iterable[TopicInterest], Iterable[str]], object],
    ) -> None:
        self._title = title
        self._control = control
        self._joint = joint
        self._wanted = wanted
        self._pattern_of = pattern_of
        self._announce = announce
        self._lock = threading.Lock()  # guards the following two
        self._requests: list[Promise[None]] = []
        self._is_posted = False
        # --- used by the control thread
        #: the interests with the patterns of their channels
        self._interests: dict[TopicInterest, str] = {}
        #: interests that stay until others take their place
        self._ending: dict[TopicInterest, str] = {}
        self._offers: Iterable[str] = ()
        #: patterns of both
        self._patterns: frozenset[str] = frozenset()
        #: patterns that the broker has confirmed, that it refused, and that it was asked for, with the last promise
        self._confirmed: set[str] = set()
        self._refused: dict[str, None] = {}
        self._adding: dict[str, Promise[None]] = {}
        #: requests with the patterns that they wait for
        self._waiting: list[tuple[set[str], Promise[None]]] = []
        self._is_publishing = False
        self._error: MessagingError | None = None

    def request(self) -> Promise[None]:
        """Announce what the service wants now; many calls become one announcement. From any thread.

        Returns:
            A promise that resolves when the broker has confirmed the subscriptions, and the announcement is on its way.
        """
        promise: Promise[None] = Promise(f"announcing the interests of {self._title}")
        promise.was_retrieved = True
        with self._lock:
            error = self._error
            if error is None:
                self._requests.append(promise)
                is_posted, self._is_posted = self._is_posted, True
        if error is not None:
            promise.reject(error)  # on this thread: it is not known elsewhere yet
        elif not is_posted:
            self._control.post(self.sync)
        return promise

    def sync(self) -> None:
        """Subscribe to the interests of now, and announce the subscribed ones."""
        with self._lock:
            requests, self._requests = self._requests, []
            self._is_posted = False
        try:
            wanted, self._offers = self._wanted()
            interests = {each: self._pattern_of(each.topics) for each in wanted}
        except BaseException as error:
            failure = MessagingError(f"{self._title}: its interests are unknown: {type(error).__name__}")
            for each in requests:
                engine().call(each.reject, failure)
            raise
        patterns = frozenset(interests.values())
        ending = {**self._interests, **self._ending}
        self._ending = {each: pattern for each, pattern in ending.items() if pattern not in patterns}
        self._interests = interests
        new = [each for each in dict.fromkeys(interests.values()) if each not in self._patterns]
        self._patterns |= patterns
        # a pattern that was refused before is no reason for later requests to wait
        self._waiting += [(set(patterns - self._confirmed - self._refused.keys()), each) for each in requests]
        for pattern in new:
            self._add(pattern)
        self._publish()

    def _replaced(self) -> frozenset[str]:
        """Return the patterns that end, are still confirmed, and have one that takes their place and is not yet."""
        ending = self._confirmed.intersection(self._ending.values())
        if len(ending) * len(self._adding) > _COMPARED:
            return frozenset(ending)
        return frozenset(each for each in ending if any(overlap(each, new) for new in self._adding))

    def _remove(self, patterns: frozenset[str]) -> None:
        """End subscriptions."""
        self._patterns -= patterns
        self._confirmed -= patterns
        for waiting, _ in self._waiting:
            waiting -= patterns
        for each in sorted(patterns):
            self._refused.pop(each, None)
            self._adding.pop(each, None)
            self._joint.remove(each)

    @property
    def are_refused(self) -> bool:
        """Return whether the broker refused or ended a subscription, which was not asked for again."""
        return bool(self._refused)

    def retry(self) -> None:
        """Subscribe to the refused patterns again: after a reconnect, and from time to time."""
        refused, self._refused = self._refused, {}
        for each in refused:
            self._add(each)

    def failed(self, pattern: str, error: MessagingError) -> None:
        """Note that the broker ended a subscription: its interests are announced no more."""
        if pattern in self._patterns:
            self._confirmed.discard(pattern)
            self._adding.pop(pattern, None)
            self._refuse(pattern, error)
            self._publish_soon()

    def _add(self, pattern: str) -> None:
        try:
            added = self._joint.add(pattern)
        except MessagingError as error:  # one that the transport cannot carry must not keep the others from it
            self._refuse(pattern, error)
        else:
            self._adding[pattern] = added
            added.listen(partial(self._control.post, self._added, pattern, added))

    def _added(self, pattern: str, added: Promise[None]) -> None:
        if self._adding.get(pattern) is not added:
            return  # removed meanwhile, and maybe added again: the later promise counts
        del self._adding[pattern]
        error = added.exception()
        if error is not None:
            self._refuse(pattern, error)
        else:
            self._confirmed.add(pattern)
            for waiting, _ in self._waiting:
                waiting.discard(pattern)
        self._publish_soon()

    def _refuse(self, pattern: str, error: MessagingError) -> None:
        if not isinstance(error, ClosedError):
            logger.error("%s: the events of %.200r do not arrive: %s; tried again later", self._title, pattern, error)
        self._refused[pattern] = None
        for waiting, promise in self._waiting:
            if pattern in waiting:
                waiting.discard(pattern)
                engine().call(promise.reject, error)

    def _publish_soon(self) -> None:
        """Publish after the calls that are posted already: the broker confirms many patterns at once."""
        if not self._is_publishing:
            self._is_publishing = True
            self._control.post(self._publish)

    def _publish(self) -> None:
        self._is_publishing = False
        confirmed = self._confirmed
        wanted = frozenset(self._interests.values())
        unwanted = self._patterns - wanted
        for pattern in unwanted:  # of interests that end: nothing waits for them
            self._adding.pop(pattern, None)
        staying = self._replaced()
        self._ending = {each: pattern for each, pattern in self._ending.items() if pattern in staying}
        self._announce(
            [*(each for each, pattern in self._interests.items() if pattern in confirmed), *self._ending],
            self._offers,
        )
        self._remove(unwanted - staying)
        for waiting, promise in self._waiting:
            if not waiting:
                engine().call(promise.resolve, None)
        self._waiting = [each for each in self._waiting if each[0]]

    def close(self, error: MessagingError) -> None:
        """Fail all requests."""
        with self._lock:
            self._error = error
            requests, self._requests = self._requests, []
        for each in (*requests, *(promise for _, promise in self._waiting)):
            engine().call(each.reject, error)
        self._waiting = []

    def abandon(self, error: MessagingError) -> None:
        """Refuse all requests in a forked child, where the holder of the lock may not exist."""
        self._lock = threading.Lock()
        self._error = error
        self._requests = []
        self._waiting = []

"""Publishes the announcements of one member, and its last will."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from messaging.dispatch.eventnetwork.announcements import Announcement, dump_announcement
from messaging.errors import ClosedError, MessagingError, UnsupportedFeatureError
from messaging.errors.text import SafeLog
from messaging.execution import Flag, Serial, clock, workers
from messaging.model import Features, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from messaging.dispatch.eventnetwork.own_member import OwnMember
    from messaging.execution import Promise

logger = SafeLog(__name__)


#: announcements that wait to be published; further ones are dropped, and the next heartbeat shows that they were
MAX_WAITING: Final = 10_000
_LOG_INTERVAL: Final = 1.0


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

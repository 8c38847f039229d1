"""The messages that arrive: decoded, checked, and handed over in the order of their arrival.

Events go to the event service, announcements to the membership, on the control thread.

**Threads.** :meth:`NetworkEventIntake.put` runs on the engine loop and only queues. The rest of the intake of events
runs on a worker thread, on one at a time. The event service may wait there for room in the queues of its consumers:
then the broker's credit is used up, and it sends no more. Events are acknowledged after the event service has taken
them.

**Answers.** Every event whose sender waits is answered, also an event that is refused, or that came before: its sender
waits for no consumer here. Without an answer are only events that do not tell their sender, events in CBOR that are too
large, and events whose signature does not prove their sender.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from messaging.dispatch.eventdata import decode, sender_that_waits
from messaging.dispatch.eventnetwork.announcements import load_announcement
from messaging.dispatch.eventnetwork.hops import ArrivedEvent
from messaging.dispatch.eventnetwork.membership import Membership
from messaging.dispatch.eventnetwork.own_member import OwnMember
from messaging.dispatch.eventnetwork.signing import Opened
from messaging.errors import DecodeError, EventQueueOverflowError, MessagingError, SignatureError
from messaging.errors.text import SafeLog
from messaging.execution import Serial, clock
from messaging.model import Incoming

logger = SafeLog(__name__)

#: events that are acknowledged together
_BATCH: Final = 64
#: messages without acknowledgement (QoS 0) that may wait, and their bytes; further ones are dropped
MAX_UNACKNOWLEDGED: Final = 10_000
MAX_UNACKNOWLEDGED_BYTES: Final = 64 << 20
#: interval of the log for refused events and announcements, seconds
_LOG_INTERVAL: Final = 1.0
#: the field of a sender in JSON, and bytes in which it is searched
_SENDER: Final = re.compile(rb'"(?:sender|member)"\s*:\s*"([0-9a-fA-F-]{36})"')
_SEARCHED: Final = 4_096


class _Once:
    """Calls a function at most once."""

    __slots__ = ("_calls",)

    def __init__(self, call: Callable[[], object]) -> None:
        self._calls = [call]

    def __call__(self) -> None:
        with contextlib.suppress(IndexError):
            self._calls.pop()()


def _origin(incoming: Incoming | None) -> str:
    """Return the channel of a refused message, and the sender that it names, as far as that is text."""
    if incoming is None:
        return ""
    found = _SENDER.search(incoming.payload, 0, _SEARCHED)
    return f" on {incoming.channel!r:.200}{'' if found is None else f' from {found[1].decode()}'}"


class RefusalLog:
    """Logs refused messages of other members: the first one, and then at most one a second with the number of others.

    Args:
        title: of the member that refuses.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._next = 0.0
        self._silent = 0
        #: number of refused messages, and of signed messages that arrived before
        self.refused = 0
        self.replayed = 0

    def log(self, what: str, error: Exception, incoming: Incoming | None = None) -> None:
        """Log that a message was refused. On one thread at a time.

        A signed message that arrived before is at most a line at level ``DEBUG``: brokers deliver copies, too.

        Args:
            what: the kind of message.
            error: why it was refused.
            incoming: the message; the log names its channel and its sender.
        """
        if isinstance(error, SignatureError) and error.problem == "replayed":
            self.replayed += 1
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s: %s%s is refused: %s", self._title, what, _origin(incoming), error)
            return
        self.refused += 1
        now = clock.monotonic()
        if now < self._next:
            self._silent += 1
            return
        self._next = now + _LOG_INTERVAL
        logger.error(
            "%s: %s%s is refused: %s: %s%s", self._title, what, _origin(incoming), type(error).__name__, error,
            f" ({self._silent} more since the last line)" if self._silent else "",
        )  # fmt: skip
        self._silent = 0


class Unacknowledged:
    """Bounds the messages without acknowledgement that wait for a worker thread: the broker does not wait for it.

    Messages with acknowledgement are bounded by the broker's credit. One thread admits, one other thread takes.
    """

    def __init__(self) -> None:
        self._admitted = self._admitted_bytes = 0
        self._taken = self._taken_bytes = 0
        #: number of messages that were dropped
        self.dropped = 0

    def admit(self, batch: Sequence[Incoming]) -> Sequence[Incoming]:
        """Return the messages for which there is room. On the loop."""
        if all(each.token is not None for each in batch):
            return batch
        return [each for each in batch if each.token is not None or self._has_room(each)]

    def _has_room(self, incoming: Incoming) -> bool:
        size = self._admitted_bytes - self._taken_bytes
        if self._admitted - self._taken >= MAX_UNACKNOWLEDGED or size > MAX_UNACKNOWLEDGED_BYTES:
            self.dropped += 1
            return False
        self._admitted += 1
        self._admitted_bytes += len(incoming.payload)
        return True

    def took(self, incoming: Incoming) -> None:
        """Note that an admitted message waits no more. On the worker thread."""
        if incoming.token is None:
            self._taken += 1
            self._taken_bytes += len(incoming.payload)


class MessageIntake:
    """Takes in messages on a worker thread, one at a time, and acknowledges them in batches.

    Args:
        title: of the member, for the log.
        what: the kind of message, for the log.
        take: takes in one message. A ``MessagingError`` refuses it.
        settle: acknowledges messages; from any thread.
    """

    def __init__(
        self,
        title: str,
        what: str,
        take: Callable[[Incoming], object],
        settle: Callable[[Sequence[Incoming]], object],
    ) -> None:
        self._title = title
        self._what = what
        self._take = take
        self._settle = settle
        #: counts the messages that are refused
        self.refusals = RefusalLog(title)
        self._waiting: deque[Incoming | Callable[[], object]] = deque()
        self._serial = Serial(self._drain, lambda: self._waiting)

    def put(self, batch: Sequence[Incoming]) -> None:
        """Queue messages. On the loop."""
        self._waiting.extend(batch)
        self._serial.wake()

    def put_call(self, call: Callable[[], object]) -> None:
        """Have ``call`` run after the messages that arrived so far. From any thread."""
        self._waiting.append(call)
        self._serial.wake()

    def _drain(self) -> None:
        taken: list[Incoming] = []
        waiting = self._waiting
        try:
            while waiting:
                incoming = waiting.popleft()
                if callable(incoming):
                    try:
                        incoming()
                    except Exception:
                        logger.exception(
                            "%s: cannot pass a change of the members on to the event service; it is left out",
                            self._title,
                        )
                    continue
                taken.append(incoming)
                try:
                    self._take(incoming)
                except MessagingError as error:
                    self.refusals.log(self._what, error, incoming)
                except Exception as error:
                    logger.exception(
                        "%s: cannot take in %s: %s; it is dropped",
                        self._title, self._named(incoming), type(error).__name__,
                    )  # fmt: skip
                if len(taken) >= _BATCH:
                    self._settle(taken)
                    taken = []
        finally:
            if taken:
                self._settle(taken)

    def _named(self, incoming: Incoming) -> str:  # noqa: ARG002  # a subclass names its channel
        return self._what


class NetworkEventIntake(MessageIntake):
    """Takes in the events of the other members.

    Args:
        own: the member that receives; its event service takes the events.
        settle: acknowledges messages; from any thread.
        confirm: called with the id of an event and its sender, when every consumer here was notified.
    """

    def __init__(
        self,
        own: OwnMember,
        *,
        settle: Callable[[Sequence[Incoming]], object],
        confirm: Callable[[str, str], object],
    ) -> None:
        def end_batch(taken: Sequence[Incoming]) -> None:
            """Have the event service deliver a batch, and acknowledge it."""
            try:
                own.service.batch_received()
            finally:
                settle(taken)

        super().__init__(own.title, "an event", self._take_in, end_batch)
        self._own = own
        self._confirm = confirm
        self._unacknowledged = Unacknowledged()
        self._dropped = 0
        #: number of events that were taken
        self.received = 0

    @property
    def waiting(self) -> int:
        """Number of messages that arrived and are not taken yet."""
        return len(self._waiting)

    def put(self, batch: Sequence[Incoming]) -> None:
        """Queue messages. On the loop."""
        super().put(self._unacknowledged.admit(batch))

    def _named(self, incoming: Incoming) -> str:
        return f"{self._what} on {incoming.channel!r:.200}"

    def _log_dropped(self) -> None:
        dropped = self._unacknowledged.dropped
        if dropped != self._dropped:
            self._dropped = dropped
            self.refusals.log(
                "an event without acknowledgement", EventQueueOverflowError(f"too many wait; {dropped} dropped so far")
            )

    def _take_in(self, incoming: Incoming) -> None:
        """Hand an event to the event service. Unless that has it, its sender is answered here, and nowhere else."""
        self._unacknowledged.took(incoming)
        self._log_dropped()
        arrived = _EventInHand(incoming)
        try:
            self._pass_on(arrived)
        finally:
            if not arrived.is_taken:
                self._answer(arrived)

    def _pass_on(self, arrived: _EventInHand) -> None:
        own, channel = self._own, arrived.channel
        seals, max_bytes = own.seals, own.settings.max_event_bytes
        if len(arrived.payload) > max_bytes:
            raise DecodeError(f"{len(arrived.payload)} bytes: at most {max_bytes} are read")
        arrived.is_readable = True
        opened = None
        if seals is not None:
            opened = arrived.opened = seals.open_event(arrived.payload, channel)  # nothing is proven before
            arrived.payload = opened.payload
        topic = own.names.topic(channel)
        if topic is None:
            return  # of another grammar: a wider pattern has it
        if seals is None or opened is None:
            event = decode(arrived.payload, topic)
        else:
            event = seals.opened_event(opened, channel, topic)
        sender = event.sender
        if sender == own.id:
            arrived.is_taken = True  # its own event, which comes back
            return
        event_id = event.id
        if event_id is None and sender is not None and event.sequence is not None:
            event_id = f"{sender}-{event.sequence}"
        arrived.is_read = True
        if event.notify and sender is not None and event_id is not None:
            arrived.notified = _Once(partial(self._confirm, event_id, sender))
        if own.id not in event.path:  # otherwise its consumers have it already
            self.received += 1
            own.service.receive(ArrivedEvent(event, event_id, own.node, arrived.notified))
            arrived.is_taken = True

    def _answer(self, arrived: _EventInHand) -> None:
        """Answer the sender of an event that is not taken: no consumer here receives it."""
        if arrived.is_read:
            if arrived.notified is not None:
                arrived.notified()
            return
        seals, opened = self._own.seals, arrived.opened
        if seals is not None and opened is None:
            return  # a forged event must not confirm another one
        waits = sender_that_waits(arrived.payload, is_whole=arrived.is_readable)
        if waits is None or waits[0] == self._own.id:
            return
        sender, event_id = waits
        if seals is not None and opened is not None:
            try:
                seals.bind(opened, sender, arrived.channel)
            except SignatureError:
                return
        self._confirm(event_id, sender)


class _EventInHand:
    """A message on its way to the event service, as far as it was read."""

    __slots__ = ("channel", "is_read", "is_readable", "is_taken", "notified", "opened", "payload")

    def __init__(self, incoming: Incoming) -> None:
        self.channel = incoming.channel or ""
        #: the event, without its signature once that is opened
        self.payload = incoming.payload
        self.opened: Opened | None = None
        #: whether it is small enough, and whether it was decoded
        self.is_readable = self.is_read = False
        #: whether nothing is left to do for its sender here
        self.is_taken = False
        #: answers its sender, if that waits; of an event that was decoded
        self.notified: _Once | None = None


class AnnouncementIntake:
    """Takes in the announcements of the other members, and the own ones that come back.

    Args:
        own: the member that receives.
        membership: the members that announce.
        settle: acknowledges messages; from any thread.
    """

    def __init__(self, own: OwnMember, membership: Membership, settle: Callable[[Sequence[Incoming]], object]) -> None:
        self._own = own
        self._membership = membership
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
        own, notifications = self._own, self._membership.changes.notifications
        try:
            if own.seals is None:
                announcement = load_announcement(incoming.payload)
            else:
                announcement = own.seals.announcement(incoming.payload, incoming.channel or "")
            if announcement.to not in (None, own.id):
                return
            self._membership.receive(announcement, now)
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

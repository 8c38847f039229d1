"""Unsettled messages without a stream, kept unanswered for the streams to come.

**Ended streams.** Where the broker keeps the session, the messages that an ended stream has not settled stay
unanswered: the next stream of the same filter gets them, or the session's next connection. If they fill the window
while other streams wait for messages, they are acknowledged and dropped after :data:`LEFT_TIMEOUT`, and a warning says
so.

**Resumed sessions.** A resumed session may hold messages for subscriptions of an earlier process, and for streams whose
attempt to subscribe a lost connection has ended. They are kept for the streams that subscribe within a while, then
acknowledged and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from messaging.execution import clock
from messaging_adapters.mqtt.packets import Publish
from messaging_adapters.mqtt.streams import CopyToken, Receipt, Stream

if TYPE_CHECKING:
    from messaging_adapters.mqtt.answers import Answers
    from messaging_adapters.mqtt.router import Router

logger = logging.getLogger(__name__)

#: seconds that the messages of a resumed session are kept for the streams that subscribe to them
CLAIM_TIMEOUT: Final = 30.0
#: seconds that messages of ended streams may fill the whole window
LEFT_TIMEOUT: Final = 30.0


class Leftovers:
    """The kept messages of one instance.

    Args:
        name: of the instance, for the log.
    """

    def __init__(self, name: str, router: Router, answers: Answers) -> None:
        self._name = name
        self._router = router
        self._answers = answers
        #: copies of ended streams
        self._left: dict[CopyToken, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: ended streams that the broker has not unsubscribed yet: the messages that still arrive are kept
        self.departing: dict[Stream, None] = {}
        #: by packet id: messages that no stream has claimed; ``None`` when none are kept for later streams
        self._unclaimed: dict[int, Receipt] | None = None
        self._claim_timer: asyncio.TimerHandle | None = None
        #: whether the session may have subscriptions of an earlier process, of which no log line told
        self._is_unreported = False

    def await_claims(self, *, of_earlier: bool) -> None:
        """Keep messages without a stream for :data:`CLAIM_TIMEOUT`: a session was resumed.

        Args:
            of_earlier: the session may have subscriptions of an earlier process.
        """
        if self._unclaimed is None:  # else those of the connection before: the broker sends them again as duplicates
            self._unclaimed = {}
        self._is_unreported = self._is_unreported or of_earlier
        if self._claim_timer is not None:
            self._claim_timer.cancel()
        self._claim_timer = clock.call_later(asyncio.get_running_loop(), CLAIM_TIMEOUT, self._drop_unclaimed)

    def forget(self) -> None:
        """Forget all messages: their session is lost."""
        self._left.clear()
        self._unclaimed = None
        self._is_unreported = False

    def close(self) -> None:
        """Stop watching the window, and keep messages without a stream to the end."""
        for timer in (self._timer, self._claim_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._claim_timer = None

    # --- keeping

    def leave(self, stream: Stream) -> None:
        """Keep the unsettled messages of an ended stream for the next consumer of the session."""
        for token in [*stream.unsettled]:
            del stream.unsettled[token]
            self._left[token] = None
        self._watch()

    def keep(self, receipt: Receipt) -> bool:
        """Keep a message that has no stream. Return whether a later stream may claim it."""
        router, publish = self._router, receipt.publish
        withdrawn = router.withdrawn.values()
        ended = [*self.departing, *router.orphans.values(), *router.departed, *withdrawn]
        streams = router.kept(publish, _claimants(dict.fromkeys(ended), publish))
        if all(each in withdrawn for each in streams):
            if self._unclaimed is None:
                return False
            self._unclaimed.pop(receipt.id, None)  # the broker gave the id to another message
            self._unclaimed[receipt.id] = receipt
            return True
        receipt.copies = 0
        self.keep_for(receipt, streams)
        return True

    def beside(self, publish: Publish) -> Sequence[Stream]:
        """Return the ended streams that an acknowledged message with receivers has to be kept for as well.

        MQTT 3.1.1 does not say for which of the filters that overlap a message is.
        """
        router = self._router
        if publish.retain or not (router.has_kept or router.orphans or self.departing):
            return ()
        found = router.kept_beside(publish)
        if not publish.properties.subscriptions:
            found += _claimants([*self.departing, *router.orphans.values()], publish)
        return found

    def keep_for(self, receipt: Receipt, streams: Sequence[Stream]) -> None:
        """Keep a copy of a message for the next stream of the filter of each of ``streams``."""
        receipt.copies += len(streams)
        self._left |= {CopyToken(receipt, stream): None for stream in streams}
        self._watch()

    # --- claiming

    def claim_left(self, stream: Stream) -> list[Receipt]:
        """Hand over the messages that ended streams of the same filter left."""
        tokens = [each for each in self._left if each.stream.route.filter == stream.route.filter]
        for token in tokens:
            del self._left[token]
        return [token.receipt for token in tokens]

    def claim_unclaimed(self, matches: Callable[[str], bool], *, passes_flags: bool) -> list[Receipt]:
        """Hand over the messages for subscriptions of an earlier process whose channels match.

        Args:
            matches: returns whether a channel matches.
            passes_flags: of the stream's route: a message with the retained flag may be a new one. Otherwise such a
                message is a retained one, which the new subscription gets anyway: it is acknowledged.
        """
        if not self._unclaimed:
            return []
        claimed = []
        for receipt in [each for each in self._unclaimed.values() if matches(each.publish.topic)]:
            del self._unclaimed[receipt.id]
            if passes_flags or not receipt.publish.retain:
                claimed.append(receipt)
            else:
                self._answers.settled(receipt)
        return claimed

    # --- dropping

    def _drop_unclaimed(self) -> None:
        """Acknowledge and drop the messages that no stream has claimed."""
        unclaimed, self._unclaimed = self._unclaimed, None
        for stream in self._router.withdrawn.values():
            self.drop(stream)
        self._router.withdrawn.clear()
        if unclaimed:
            logger.warning(
                "mqtt '%s': %d messages of the resumed session match no subscription and are dropped, the first on %r",
                self._name, len(unclaimed), next(iter(unclaimed.values())).publish.topic,
            )  # fmt: skip
            for receipt in unclaimed.values():
                self._answers.settled(receipt)

    def drop(self, stream: Stream) -> None:
        """Acknowledge and drop the messages of an ended stream, whose subscription ends."""
        self._acknowledge([token for token in self._left if token.stream is stream])

    def _acknowledge(self, tokens: Sequence[CopyToken]) -> None:
        for token in tokens:
            del self._left[token]
            token.stream.route.detached = None  # what the broker still sends is dropped, too
            token.stream.unsettled[token] = None
            self._answers.settle(token)

    def note_dropped(self, topic: str) -> None:
        """Log that a message without a stream is dropped: a warning for the first one of an earlier subscription.

        Messages of QoS 0 are not kept for later streams: while these may come, it is no warning.
        """
        if not self._is_unreported or self._unclaimed is not None:
            logger.debug("mqtt '%s': message on %r matches no subscription and is dropped", self._name, topic)
            return
        self._is_unreported = False
        logger.warning(
            "mqtt '%s': message on %r matches no subscription and is dropped: an earlier process of this session has "
            "subscribed to its channel; subscribe and unsubscribe, or begin a new session; further messages are "
            "dropped without a warning",
            self._name, topic,
        )  # fmt: skip

    def _watch(self) -> None:
        """Check later whether messages of ended streams fill the window, so that nothing else can arrive."""
        self._left = {each: None for each in self._left if self._answers.is_owed(each.receipt)}
        if self._timer is None and len(self._left) >= self._answers.window:
            self._timer = clock.call_later(asyncio.get_running_loop(), LEFT_TIMEOUT, self._drop_left)

    def _drop_left(self) -> None:
        self._timer = None
        kept = sum(not token.stream.route.streams and token.stream.route.is_kept for token in self._left)
        if len(self._left) < self._answers.window or not self._router.settles:
            self._watch()
            return
        logger.warning(
            "mqtt '%s': unacknowledged messages of closed streams fill the window of %d messages: %d are acknowledged "
            "and lost, %d of kept subscriptions stay; subscribe to their channels again, or close the instance",
            self._name, self._answers.window, len(self._left) - kept, kept,
        )  # fmt: skip
        self._acknowledge(
            [token for token in self._left if token.stream.route.streams or not token.stream.route.is_kept]
        )


def _claimants(ended: Iterable[Stream], publish: Publish) -> list[Stream]:
    """Return the ended streams whose next ones have to get a message.

    With ``retainAsPublished`` (also of an earlier subscription) the retained flag tells nothing: the message may be a
    new one.
    """
    return [
        each
        for each in ended
        if each.settles and each.route.matches(publish.topic) and (each.route.passes_flags or not publish.retain)
    ]

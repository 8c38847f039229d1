"""Rejected messages: redelivered, or sent to the dead-letter channel (RFC 5.8, DESIGN).

Everything here runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from messaging.errors import ArgumentError, ClosedError, MessagingError, UnroutableError, UnsupportedFeatureError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, clock
from messaging.model import Capabilities, Features, Incoming, Message, MessageContext, carried_headers
from messaging.receiving.buffer import MessageBuffer, ReceivingSubscription
from messaging.receiving.deduplication import Deduplicator

logger = SafeLog(__name__)

#: publishes a dead letter
Publish: TypeAlias = Callable[[Message], Promise[None]]

#: user headers that say where a dead letter comes from, on instances that announce ``headers``
REASON_HEADER: Final = "x-dead-letter-reason"
CHANNEL_HEADER: Final = "x-dead-letter-channel"
DELIVERIES_HEADER: Final = "x-dead-letter-deliveries"

#: why a message is a dead letter
REJECTED: Final = "rejected"
MAX_DELIVERIES: Final = "maxDeliveries"
INVALID: Final = "invalid"
#: unsettled when its stream ended
CLOSED: Final = "closed"

#: messages whose deliveries are counted here at the same time; the ones not seen for longest are forgotten first
_COUNTED: Final = 65_536
#: rejected deliveries after which the next one is delayed; first delay, doubled each time, and the longest, seconds
_AT_ONCE: Final = 4
_FIRST_DELAY: Final = 0.001
_LONGEST_DELAY: Final = 1.0
#: pause before a dead letter that could not be published is tried again: doubled each time, seconds
_FIRST_RETRY: Final = 1.0
_LONGEST_RETRY: Final = 60.0
#: dead letters published at a time when a stream ends
_AT_A_TIME: Final = 256
#: messages without acknowledgement whose dead letters are tried again at the same time; more are dropped
_UNACKNOWLEDGED: Final = 1024


class Redelivery:
    """Handles the rejected messages of one subscription.

    Without ``maxDeliveries`` and dead-letter channel a rejected message is redelivered. With ``maxDeliveries`` it is
    redelivered until it was delivered that often. Otherwise, or then, it goes to the dead-letter channel: it is
    published first and acknowledged afterwards, so that it is always in one of both places; failed publishing is
    retried. A dead letter is mandatory where the protocol can say so: if nothing receives the dead-letter channel, the
    message is redelivered, after a delay that grows. Without dead-letter channel the message is discarded, which is
    logged.

    The broker redelivers where its protocol can; elsewhere the message is put into the buffer again, and the broker
    still holds it for this client.

    Args:
        owner, buffer: the subscription and its buffer.
        publish: publishes a dead letter.
        deduplicator: is told the verdicts, with ``deduplicate``.

    Attributes:
        rejections: number of rejections so far of messages that the broker redelivers and does not count: by message
            id or, without one, by content. Competing consumers count for themselves.
    """

    def __init__(
        self,
        owner: ReceivingSubscription,
        buffer: MessageBuffer,
        publish: Publish,
        deduplicator: Deduplicator | None,
    ) -> None:
        self._owner = owner
        self._loop = owner.connection.engine.loop
        self._adapter = owner.adapter
        self._counters = owner.counters
        self._options = owner.spec.options
        self._publish = publish
        self._buffer = buffer
        self._deduplicator = deduplicator
        self.rejections: OrderedDict[object, int] = OrderedDict()
        #: dead letters being published
        self._attempts: dict[Promise[None], None] = {}
        #: dead letters that failed: their next attempts, and whether the broker has the message; by its identity
        self._retries: dict[int, tuple[asyncio.TimerHandle, Callable[[], object], bool]] = {}
        #: dead letters that are tried again, of messages that only this process has
        self._unacknowledged = 0
        #: whether it was logged that nothing receives the dead-letter channel
        self._is_reported = False
        #: rejected while the subscription was leaving, and their delivery attempts
        self._left: list[tuple[Incoming, int]] = []
        self._is_handed_on = False
        #: whether the broker delivers the unsettled messages to another consumer, known when they are handed on
        self._is_requeued = False
        #: rejected messages whose next delivery waits, by identity
        self._delayed: dict[int, tuple[asyncio.TimerHandle, Incoming, int, Callable[[], object]]] = {}

    def reject(self, incoming: Incoming, requeued: Callable[[], object], *, is_leaving: bool = False) -> bool:
        """Redeliver or dead-letter a rejected message; return whether it is dead-lettered.

        Args:
            incoming: the message.
            requeued: called once that has begun.
            is_leaving: this subscription is about to end, and redelivers nothing.
        """
        self._counters.rejected += 1
        limit = self._options.max_deliveries
        deliveries = self._deliveries(incoming)
        is_dead = False
        if limit is None and self._options.dead_letter_channel is not None:
            is_dead = True
            self.dead_letter(incoming, REJECTED, deliveries)
        elif limit is not None and deliveries >= limit:
            is_dead = True
            self.dead_letter(incoming, MAX_DELIVERIES, deliveries)
        elif is_leaving:
            self._leave(incoming, deliveries)
        elif deliveries > _AT_ONCE:
            # a message that is always rejected must not keep broker and process busy with nothing else
            delay = min(_FIRST_DELAY * 2.0 ** min(deliveries - _AT_ONCE, 16), _LONGEST_DELAY)
            self._delay(delay, incoming, deliveries, requeued)
            return False
        else:
            self._requeue(incoming, deliveries, requeued)
            return False
        requeued()
        return is_dead

    def _delay(self, delay: float, incoming: Incoming, deliveries: int, requeued: Callable[[], object]) -> None:
        timer = clock.call_later(self._loop, delay, self._requeue, incoming, deliveries, requeued)
        self._delayed[id(incoming)] = timer, incoming, deliveries, requeued

    def _requeue(self, incoming: Incoming, deliveries: int, requeued: Callable[[], object]) -> None:
        self._delayed.pop(id(incoming), None)
        if self._owner.ended:
            self._leave(incoming, deliveries)
        elif self._adapter.capabilities.can_reject:
            self._adapter.reject([incoming.token])
        else:
            self._counters.redelivered += 1
            self._buffer.put_back(again(incoming, deliveries + 1))
        requeued()

    def _leave(self, incoming: Incoming, deliveries: int) -> None:
        """Leave a rejected message to another consumer; dead-letter it if there will be none."""
        if not self._adapter.capabilities.can_reject and not self._is_handed_on:
            self._left.append((incoming, deliveries))  # another subscription may be about to replace this one
            return
        is_requeued = self.is_requeued()
        if not is_requeued and self._adapter.redelivers(self._owner.spec):
            # rejected right before its connection was lost: the broker delivers it again, without this subscription
            is_requeued = self._adapter.is_stale(incoming.token)
        if not is_requeued and self._options.dead_letter_channel is not None:
            self.dead_letter(incoming, REJECTED, deliveries)
            return
        if is_requeued:
            if self._adapter.capabilities.can_reject and not self._adapter.is_stale(incoming.token):
                self._adapter.reject([incoming.token])
            self._owner.connection.subscriptions.hand_on(self._owner, {_key(incoming): deliveries})
        else:
            # it stays unsettled: rejected, it would come to this subscription again, and be counted twice
            self._counters.dropped += 1
            logger.warning(
                "%s: a message of %r is lost: it was rejected by a stream that ended, and no other consumer receives "
                "it; set deadLetterChannel to keep such messages, or consume with m.on()",
                self._adapter.name, incoming.channel,
            )  # fmt: skip

    def hand_on(self, buffered: Iterable[Incoming]) -> None:
        """Hand pending redeliveries and delivery counts to other subscriptions, when this one ends."""
        if not self._adapter.capabilities.can_reject:
            for incoming in buffered:
                if incoming.delivery_count is not None:  # put back after it was rejected
                    self.rejections[_key(incoming)] = incoming.delivery_count - 1
        self._is_requeued = self.is_requeued()
        delayed, self._delayed = self._delayed, {}
        for timer, incoming, deliveries, requeued in delayed.values():
            timer.cancel()
            self._leave(incoming, deliveries)
            requeued()
        self._is_handed_on = True
        for incoming, count in self._left:
            self._leave(incoming, count)
        self._left.clear()
        for timer, retry, _ in [*self._retries.values()]:
            timer.cancel()
            retry()  # the last attempt: the end of the subscription waits for it
        if self.rejections:
            self._owner.connection.subscriptions.hand_on(self._owner, self.rejections)

    async def abandon(self, messages: Sequence[Incoming], timeout: float) -> int:
        """Dead-letter messages that no consumer will receive; return how many are lost instead."""
        if self._options.dead_letter_channel is None:
            return len(messages)
        deadline = clock.time_of(self._loop) + timeout
        for start in range(0, len(messages), _AT_A_TIME):
            left = deadline - clock.time_of(self._loop)
            if left <= 0:
                return len(messages) - start
            for incoming in messages[start : start + _AT_A_TIME]:
                was_rejected = not self._adapter.capabilities.can_reject and incoming.delivery_count is not None
                deliveries = (incoming.delivery_count or 1) - was_rejected
                self.dead_letter(incoming, REJECTED if was_rejected else CLOSED, deliveries)
            await self.finish(left)
        return 0

    def is_requeued(self) -> bool:
        """Return whether messages that are unsettled when the subscription ends are delivered to another one."""
        if self._owner.handle is None:
            return False
        if self._owner.bequeather(self._adapter) is not None:
            return True
        return self._adapter.redelivers(self._owner.spec, self._owner.handle)

    async def finish(self, timeout: float) -> None:
        """Wait until pending dead letters are published: unsubscribing before would requeue their messages as well."""
        with contextlib.suppress(TimeoutError):
            async with clock.timeout(timeout):
                for published in [*self._attempts]:
                    await published

    def dead_letter(self, incoming: Incoming, reason: str, deliveries: int | None = None) -> None:
        """Publish a message to the dead-letter channel, then acknowledge it.

        Args:
            incoming: the message.
            reason: for the header.
            deliveries: how often it was delivered; counted here unless given.
        """
        if deliveries is None:
            deliveries = self._deliveries(incoming)
        self.forget(incoming)
        channel = self._options.dead_letter_channel
        if channel is None:
            logger.warning(
                "message on %r is discarded (%s, %d deliveries); set deadLetterChannel to keep such messages",
                incoming.channel, reason, deliveries,
            )  # fmt: skip
            self._acknowledge(incoming)
            return
        contexts = dead_letter_contexts(incoming, channel, reason, deliveries, self._adapter.capabilities)
        pause = _FIRST_RETRY

        def publish() -> None:
            attempt: Promise[None] = Promise(f"the dead letter of a message of {incoming.channel!r}")
            self._attempts[attempt] = None
            # another program may have set values that cannot be published from here: then it travels with less
            for context in contexts:
                try:
                    promise = self._publish(Message(incoming.payload, context))
                except (ArgumentError, UnsupportedFeatureError) as error:
                    problem: MessagingError = error
                except MessagingError as error:
                    problem = error
                    break
                else:
                    promise.listen(lambda promise=promise: finished(attempt, outcome(promise)))  # type: ignore[misc]
                    return
            finished(attempt, problem)

        def outcome(promise: Promise[None]) -> MessagingError | None:
            error = promise.exception()
            if error is not None and getattr(promise, "is_stored", False):
                # the durable outbox sends it later, or keeps it as a dead letter of its own and has logged that
                logger.warning("dead letter of %r is kept by the outbox: %s", incoming.channel, error)
                return None
            return error

        def finished(attempt: Promise[None], error: MessagingError | None) -> None:
            if error is None:
                self._counters.dead_lettered += 1
                self._is_reported = False
                self._acknowledge(incoming)
            elif isinstance(error, UnroutableError):
                self._note_unrouted(channel, error)
            else:
                logger.error("dead letter of %r did not reach %r: %s", incoming.channel, channel, error)
            self._attempts.pop(attempt, None)
            attempt.resolve(None)
            if error is None:
                return
            is_held = self._is_held(incoming)
            if self._owner.ended or self._is_handed_on or isinstance(error, ClosedError):
                self._end_dead_letter(incoming)
            elif is_held and isinstance(error, UnroutableError):
                self._hand_back(incoming, deliveries)
            elif is_held or self._unacknowledged < _UNACKNOWLEDGED:
                self._unacknowledged += not is_held
                self._retries[id(incoming)] = clock.call_later(self._loop, pause, retry), retry, is_held
            else:
                self._drop(incoming)

        def retry() -> None:
            nonlocal pause
            pause = min(pause * 2, _LONGEST_RETRY)
            _, _, is_held = self._retries.pop(id(incoming))
            self._unacknowledged -= not is_held
            publish()

        publish()

    def _is_held(self, incoming: Incoming) -> bool:
        """Return whether the broker has a message until it is acknowledged, or delivers it again after a loss."""
        if incoming.token is None or self._options.auto_acknowledge:
            return False
        return self._buffer.is_redelivered or not self._adapter.is_stale(incoming.token)

    def _acknowledge(self, incoming: Incoming) -> None:
        """Acknowledge a message that was dead-lettered or discarded."""
        if self._deduplicator is not None:
            self._deduplicator.acknowledge([incoming], by_consumer=False)
        elif incoming.token is not None and not self._options.auto_acknowledge:
            self._adapter.acknowledge([incoming.token])

    def _end_dead_letter(self, incoming: Incoming) -> None:
        """Leave a message whose dead letter failed to the broker, at the end of its stream; or count it as lost."""
        is_requeued = self._is_requeued if self._is_handed_on else self.is_requeued()
        if not (self._is_held(incoming) and (is_requeued or self._adapter.redelivers(self._owner.spec))):
            self._drop(incoming)

    def _note_unrouted(self, channel: str, error: MessagingError) -> None:
        self._counters.unrouted += 1
        if not self._is_reported:
            self._is_reported = True
            logger.error(
                "%s: nothing receives the dead-letter channel %r of %r: %s; its messages are redelivered until "
                "something does: bind a queue to it or subscribe to it with a session, or correct deadLetterChannel",
                self._adapter.name, channel, self._owner.spec.channel, error,
            )  # fmt: skip

    def _hand_back(self, incoming: Incoming, deliveries: int) -> None:
        """Redeliver a message whose dead letter has no route, after a delay that grows with its deliveries."""
        if self._deduplicator is not None:
            self._deduplicator.finish(incoming, acknowledged=False)
        if self._adapter.is_stale(incoming.token):
            return  # the broker redelivers it by itself, or it is gone
        if self._adapter.capabilities.can_reject and incoming.delivery_count is None:
            self.rejections[_key(incoming)] = deliveries
        beyond = max(0, deliveries - (self._options.max_deliveries or 1))
        delay = min(_FIRST_RETRY * 2.0 ** min(beyond, 16), _LONGEST_RETRY)
        self._delay(delay, incoming, deliveries, self._owner.proceed)

    def _drop(self, incoming: Incoming) -> None:
        """Count a message that is lost: its dead letter failed, and no consumer receives it."""
        self._counters.dropped += 1
        logger.error("%s: a message of %r is lost: its dead letter failed", self._adapter.name, incoming.channel)

    def forget(self, incoming: Incoming) -> None:
        """Count the deliveries of the next message like this one from the beginning."""
        self.rejections.pop(_key(incoming), None)

    def _deliveries(self, incoming: Incoming) -> int:
        """Return how often the message was delivered: the broker's count, or the count kept here."""
        if incoming.delivery_count is not None:
            return incoming.delivery_count
        key = _key(incoming)
        if not self._adapter.capabilities.can_reject:
            return self.rejections.pop(key, 0) + 1  # later deliveries are made here, and counted
        count = self.rejections.pop(key, 0) + 1
        self.rejections[key] = count
        if len(self.rejections) > _COUNTED:
            self.rejections.popitem(last=False)
        return count


def _key(incoming: Incoming) -> object:
    # applications that give ids of their own need not know of each other
    return incoming.channel, incoming.extensions.get("messageId") or hash(incoming.payload)


def again(incoming: Incoming, deliveries: int) -> Incoming:
    """Return another delivery of the same message: with a state of its own, and the same token."""
    return Incoming(
        incoming.payload,
        incoming.channel or "",
        incoming.channel_extension,
        incoming.content_type,
        incoming.content_encoding,
        incoming.correlation_id,
        incoming.reply_to_channel,
        MappingProxyType({**incoming.extensions, "redelivered": True}),
        incoming.token,
        deliveries,
    )


def dead_letter_contexts(
    incoming: Incoming, channel: str, reason: str, deliveries: int, capabilities: Capabilities
) -> list[MessageContext]:
    """Return the contexts for the attempts to publish a dead letter, the one with the most values first.

    The first has all values and headers of the message that the instance can carry, the second the headers of a dead
    letter and the content type, the last nothing.
    """
    ours = {REASON_HEADER: reason, CHANNEL_HEADER: incoming.channel or "", DELIVERIES_HEADER: str(deliveries)}
    theirs = carried_headers(incoming.extensions.get(Features.EXTENSION_HEADERS, {}), capabilities)
    source: MessageContext = incoming if Features.MESSAGE_PROPERTIES in capabilities.features else MessageContext()
    least = MessageContext(channel, extensions=_dead_letter_extensions({}, capabilities))
    less = least.replace(
        content_type=source.content_type,
        content_encoding=source.content_encoding,
        extensions=_dead_letter_extensions(ours, capabilities),
    )
    full = less.replace(
        correlation_id=source.correlation_id,
        reply_to_channel=source.reply_to_channel,
        extensions=_dead_letter_extensions({**theirs, **ours}, capabilities),
    )
    return [full, less, least]


def _dead_letter_extensions(headers: dict[str, Any], capabilities: Capabilities) -> MappingProxyType[str, object]:
    extensions: dict[str, object] = {}
    if Features.EXTENSION_GUARANTEED_DELIVERY in capabilities.features:
        extensions[Features.EXTENSION_GUARANTEED_DELIVERY] = True
    if Features.EXTENSION_MANDATORY in capabilities.features:
        extensions[Features.EXTENSION_MANDATORY] = True
    if headers and Features.EXTENSION_HEADERS in capabilities.features:
        extensions[Features.EXTENSION_HEADERS] = MappingProxyType(headers)
    return MappingProxyType(extensions)

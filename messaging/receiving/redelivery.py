"""What becomes of rejected messages: delivered again, or buried in the dead-letter channel (RFC 5.8, DESIGN).

Everything here runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from messaging.errors import ArgumentError, ClosedError, MessagingError, UnsupportedFeatureError
from messaging.execution import Promise
from messaging.model import Features, Incoming, Message, MessageContext, carried_headers
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.execution import Engine
    from messaging.model import SubscribeOptions
    from messaging.receiving.counters import StreamCounters

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
#: deliveries in vain after which another one waits: for a moment first, then twice as long each time, seconds
_AT_ONCE: Final = 4
_FIRST_DELAY: Final = 0.001
_LONGEST_DELAY: Final = 1.0
#: pause before a dead letter that could not be published is tried again: doubled each time, seconds
_FIRST_RETRY: Final = 1.0
_LONGEST_RETRY: Final = 60.0
#: dead letters published at a time when a stream ends
_AT_A_TIME: Final = 256


class Redelivery:
    """Decides what a rejection leads to, for one subscription.

    Without ``maxDeliveries`` and dead-letter channel: another delivery. With ``maxDeliveries``: another delivery until
    there were that many. Otherwise, or then: the dead-letter channel. First published, then acknowledged, so that a
    message is never in neither place; tried again if publishing fails. Without dead-letter channel it is discarded
    and said so.

    Another delivery is the broker's where its protocol can; else ``put_back`` puts the message into the buffer again,
    while the broker still holds it for us.
    """

    def __init__(
        self,
        engine: Engine,
        adapter: Adapter,
        publish: Publish,
        options: SubscribeOptions,
        counters: StreamCounters,
        put_back: Callable[[Incoming], object],
        has_ended: Callable[[], bool],
        is_requeued: Callable[[], bool],
        hand_on: Callable[[Mapping[object, int]], object],
    ) -> None:
        self._engine = engine
        self._adapter = adapter
        self._publish = publish
        self._options = options
        self._counters = counters
        self._put_back = put_back
        self._has_ended = has_ended
        self._is_requeued = is_requeued
        self._hand_on = hand_on
        #: rejections so far of messages that the broker delivers again and does not count: by message id or, without
        #: one, by content. With competing consumers each counts its own.
        self.rejections: OrderedDict[object, int] = OrderedDict()
        #: dead letters being published for the first time
        self._burials: set[Promise[None]] = set()
        #: rejected while the subscription was leaving, and their delivery attempts
        self._left: list[tuple[Incoming, int]] = []
        self._is_handed_on = False
        #: rejected messages whose next delivery waits, by identity
        self._delayed: dict[int, tuple[asyncio.TimerHandle, Incoming, int, Callable[[], object]]] = {}

    def reject(self, incoming: Incoming, given_back: Callable[[], object], *, is_leaving: bool = False) -> None:
        """Have a rejected message delivered again, or bury it.

        Args:
            incoming: the message.
            given_back: called once that is on its way.
            is_leaving: this subscription is about to end, and delivers nothing again.
        """
        self._counters.rejected += 1
        limit = self._options.max_deliveries
        deliveries = self._deliveries(incoming)
        if limit is None and self._options.dead_letter_channel is not None:
            self.bury(incoming, REJECTED)
        elif limit is not None and deliveries >= limit:
            self.bury(incoming, MAX_DELIVERIES, deliveries)
        elif is_leaving:
            self._leave(incoming, deliveries)
        elif deliveries > _AT_ONCE:
            # a message that is always rejected must not keep broker and process busy with nothing else
            delay = min(_FIRST_DELAY * 2.0 ** min(deliveries - _AT_ONCE, 16), _LONGEST_DELAY)
            timer = self._engine.loop.call_later(delay, self._give_back, incoming, deliveries, given_back)
            self._delayed[id(incoming)] = timer, incoming, deliveries, given_back
            return
        else:
            self._give_back(incoming, deliveries, given_back)
            return
        given_back()

    def _give_back(self, incoming: Incoming, deliveries: int, given_back: Callable[[], object]) -> None:
        self._delayed.pop(id(incoming), None)
        if not self._has_ended():
            if self._adapter.capabilities.can_reject:
                self._adapter.reject([incoming.token])
            else:
                self._counters.redelivered += 1
                self._put_back(again(incoming, deliveries + 1))
        given_back()

    def _leave(self, incoming: Incoming, deliveries: int) -> None:
        """Leave a rejected message to another consumer; dead-letter it if there will be none."""
        if not self._adapter.capabilities.can_reject and not self._is_handed_on:
            self._left.append((incoming, deliveries))  # another subscription may be about to replace this one
            return
        is_requeued = self._is_requeued()
        if not is_requeued and self._options.dead_letter_channel is not None:
            self.bury(incoming, REJECTED, deliveries)
            return
        if is_requeued:
            if self._adapter.capabilities.can_reject and not self._adapter.is_stale(incoming.token):
                self._adapter.reject([incoming.token])
            self._hand_on({_key(incoming): deliveries})
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
        delayed, self._delayed = self._delayed, {}
        for timer, incoming, deliveries, given_back in delayed.values():
            timer.cancel()
            self._leave(incoming, deliveries)
            given_back()
        self._is_handed_on = True
        for incoming, count in self._left:
            self._leave(incoming, count)
        self._left.clear()
        if self.rejections:
            self._hand_on(self.rejections)

    async def abandon(self, messages: Sequence[Incoming], timeout: float) -> int:
        """Dead-letter messages that no consumer will receive; return how many are lost instead."""
        if self._options.dead_letter_channel is None:
            return len(messages)
        deadline = self._engine.loop.time() + timeout
        for start in range(0, len(messages), _AT_A_TIME):
            left = deadline - self._engine.loop.time()
            if left <= 0:
                return len(messages) - start
            for incoming in messages[start : start + _AT_A_TIME]:
                was_rejected = not self._adapter.capabilities.can_reject and incoming.delivery_count is not None
                deliveries = (incoming.delivery_count or 1) - was_rejected
                self.bury(incoming, REJECTED if was_rejected else CLOSED, deliveries)
            await self.finish(left)
        return 0

    async def finish(self, timeout: float) -> None:
        """Wait for the dead letters on their way: unsubscribing before would give their messages back as well."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for burial in [*self._burials]:
                    await burial

    def bury(self, incoming: Incoming, reason: str, deliveries: int = 1) -> None:
        """Publish to the dead-letter channel, then acknowledge."""
        self.forget(incoming)
        channel = self._options.dead_letter_channel

        def done() -> None:
            if incoming.token is not None and not self._options.auto_acknowledge:
                self._adapter.acknowledge([incoming.token])

        if channel is None:
            logger.warning(
                "message on %r is discarded (%s, %d deliveries); set deadLetterChannel to keep such messages",
                incoming.channel, reason, deliveries,
            )  # fmt: skip
            done()
            return
        contexts = dead_letter_contexts(incoming, channel, reason, deliveries, self._adapter)
        pause = _FIRST_RETRY
        burial: Promise[None] = Promise(f"burying a message of {incoming.channel!r}")
        self._burials.add(burial)

        def over() -> None:
            self._burials.discard(burial)
            burial.resolve(None)

        def publish() -> None:
            # what others wrote may be more than can be published from here: then it travels with less
            for context in contexts:
                try:
                    promise = self._publish(Message(incoming.payload, context))
                except (ArgumentError, UnsupportedFeatureError) as error:
                    problem: MessagingError = error
                except MessagingError as error:
                    problem = error
                    break
                else:
                    promise.listen(lambda promise=promise: published(promise))  # type: ignore[misc]
                    return
            failed(problem)

        def published(promise: Promise[None]) -> None:
            error = promise.exception()
            if error is None:
                self._counters.dead_lettered += 1
                done()
                over()
            else:
                failed(error)

        def failed(error: MessagingError) -> None:
            nonlocal pause
            logger.error("dead letter of %r did not reach %r: %s", incoming.channel, channel, error)
            over()
            # not acknowledged, so not lost: the broker still has it when this stream has ended
            if not self._has_ended() and not isinstance(error, ClosedError):
                self._engine.loop.call_later(pause, publish)
                pause = min(pause * 2, _LONGEST_RETRY)

        publish()

    def forget(self, incoming: Incoming) -> None:
        """The message is done with: the next one like it counts from the beginning."""
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
    """Another delivery of the same message: with a state of its own, and the same token."""
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
    incoming: Incoming, channel: str, reason: str, deliveries: int, adapter: Adapter
) -> list[MessageContext]:
    """The contexts a dead letter may travel with: that of the message as far as the instance can carry it, then less.

    First with all values and headers of the message, then with our headers and the content type, then with nothing.
    """
    ours = {REASON_HEADER: reason, CHANNEL_HEADER: incoming.channel or "", DELIVERIES_HEADER: str(deliveries)}
    theirs = carried_headers(incoming.extensions.get(Features.EXTENSION_HEADERS, {}), adapter.capabilities)
    carried = Features.MESSAGE_PROPERTIES in adapter.capabilities.features
    full = MessageContext(
        channel,
        content_type=incoming.content_type if carried else None,
        content_encoding=incoming.content_encoding if carried else None,
        correlation_id=incoming.correlation_id if carried else None,
        reply_to_channel=incoming.reply_to_channel if carried else None,
        extensions=_dead_letter_extensions({**theirs, **ours}, adapter),
    )
    less = MessageContext(
        channel,
        content_type=incoming.content_type if carried else None,
        content_encoding=incoming.content_encoding if carried else None,
        extensions=_dead_letter_extensions(ours, adapter),
    )
    return [full, less, MessageContext(channel, extensions=_dead_letter_extensions({}, adapter))]


def _dead_letter_extensions(headers: dict[str, Any], adapter: Adapter) -> MappingProxyType[str, object]:
    extensions: dict[str, object] = {}
    if Features.EXTENSION_GUARANTEED_DELIVERY in adapter.capabilities.features:
        extensions[Features.EXTENSION_GUARANTEED_DELIVERY] = True
    if headers and Features.EXTENSION_HEADERS in adapter.capabilities.features:
        extensions[Features.EXTENSION_HEADERS] = MappingProxyType(headers)
    return MappingProxyType(extensions)

"""One subscription at the broker, its bounded buffer, and its one consumer.

::

    adapter --deliver()--> buffer --fetch()--> consumer --settle()--> settlement --flush()--> adapter
    (loop)                 (deque)             (worker, iterating     (deques)      (loop)
                                                thread or event loop)

**Parts.** :class:`MessageBuffer` holds what arrived and applies the overflow policy, :class:`HandOut` hands it to the
consumer, :class:`Credit` bounds what the consumer holds, :class:`Settlement` collects the verdicts,
:class:`Redelivery` handles rejected messages and :class:`ReadThrottle` suspends reading. With ``deduplicate``
:class:`Deduplicator` recognises messages that were settled before.

**Threads.** ``deliver``, ``fail``, ``complete``, ``flush``, ``proceed`` run on the engine's loop. The consumer
takes from the other end of the buffer on a thread of its own choosing; a deque's ends need no lock. A message may be
settled on any thread. Everything a user wrote (direct acknowledgement callbacks, model validators) runs in the
consumer.

**Bounds.** Messages that the protocol holds back until they are settled are bounded by its credit. All others are
bounded by ``bufferSize`` and the overflow policy, and dropped messages are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from messaging.connection import Connection
from messaging.errors import ClosedError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Promise
from messaging.model import DirectAcknowledgement, Incoming, Message, SubscriptionSpec, context_of, maker
from messaging.receiving.buffer import MessageBuffer, OnInvalid, ReadThrottle, ReceivingSubscription
from messaging.receiving.deduplication import Deduplicator, SettledIdStores
from messaging.receiving.handout import HandOut
from messaging.receiving.redelivery import Publish, Redelivery
from messaging.receiving.settlement import Credit, DirectAcknowledger, Settlement, withdraw
from messaging.services import ServiceRegistry

logger = SafeLog(__name__)


@dataclass(frozen=True, slots=True)
class Consumption:
    """How the messages of a subscription are consumed."""

    model: Any = None
    on_invalid: OnInvalid = "raise"
    direct: DirectAcknowledgement | None = None
    is_kept: bool = False
    #: whether an application consumes it: the runtime DTO shows it
    is_stream: bool = True


class SubscriptionConsumer(Protocol):
    """Takes messages from a subscription."""

    def wake(self) -> None:
        """Take messages: there may be some, or the subscription has ended. On the loop; must not block."""
        ...

    def stop(self) -> Promise[None] | None:
        """Take no more; the promise resolves when the message in progress is done. From any thread."""
        ...


class Subscription(ReceivingSubscription):
    """A subscription with its buffer, for one consumer at a time.

    Attributes:
        consumer: ``None`` until it has come: the buffer fills, and the protocol's credit with it.
        manual: no default acknowledgement: what the direct callbacks leave undecided, the consumer decides.
        dismissed: its consumer takes no more messages; the runtime DTO shows the subscription no longer.
        error: what ended the subscription.
        buffer, hand_out, credit, settlement, throttle, counters: its parts; see the module.
    """

    def __init__(
        self,
        connection: Connection,
        services: ServiceRegistry,
        publish: Publish,
        spec: SubscriptionSpec,
        consumption: Consumption,
        stores: SettledIdStores | None = None,
        replaced: Subscription | None = None,
    ) -> None:
        super().__init__(connection, spec)
        self.is_kept = consumption.is_kept
        self.is_stream = consumption.is_stream
        self.manual = consumption.direct is not None
        self.consumer: SubscriptionConsumer | None = None
        self.dismissed = False
        self.error: MessagingError | None = None
        #: to be released: taken by a consumer that stopped, or arrived since
        self._untaken: list[Incoming] = []
        model, make = consumption.model, maker(connection.adapter.settings.default_content_type)
        direct = None
        if consumption.direct is not None:
            direct = DirectAcknowledger(consumption.direct, services, spec.channel, make, model)
        self.throttle = ReadThrottle(self)
        self.buffer = MessageBuffer(self)
        self.credit = Credit(is_tracked=self.manual)
        self.deduplicator = deduplicator = _deduplicator_of(self, stores, replaced)
        self._redelivery = Redelivery(self, self.buffer, publish, deduplicator)
        self.settlement = Settlement(self, self.buffer, self._redelivery, self.credit, direct, deduplicator)
        self.hand_out = HandOut(
            self, self.buffer, self.settlement, self.throttle, direct, make, model, consumption.on_invalid
        )

    @property
    def buffered(self) -> int:
        """Number of messages that arrived and were not taken yet."""
        return len(self.buffer) + len(self.hand_out)

    # --- from the adapter, on the loop

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Buffer messages; see ``adapter.Sink``."""
        settlement = self.settlement
        if self.ended or self.leaving:
            if not settlement.is_released:  # unsubscribing: to be released with the buffered messages
                self._untaken += [incoming for incoming in batch if incoming.token is not None]
            return
        self.counters.received += len(batch)
        buffer, throttle = self.buffer, self.throttle
        if not buffer.messages:
            throttle.catches_up = True
        buffer.add(batch)
        if not settlement.is_gathering:
            settlement.gather()
        # after the messages: one that is set meanwhile, on another thread, has looked for them before
        if (consumer := self.consumer) is not None:
            if len(buffer.messages) >= throttle.high:
                throttle.suspend()
            consumer.wake()

    def fail(self, error: MessagingError) -> None:
        """End with ``error``; see ``adapter.Sink``."""
        self.end(error)

    def end(self, error: MessagingError | None) -> None:
        """Flush the verdicts, end, and unsubscribe at the broker."""
        if not self.ended and not self.connection.states.is_closed:
            self.flush()
        self.connection.subscriptions.discard(self)
        self.leaving = self.leaving or error is not None
        self._end(error)
        if self.handle is not None:
            self.connection.endings.end(self)

    # --- from the connection, on the loop unless stated otherwise

    def stop(self) -> Promise[None] | None:
        """Have the consumer take no more; see ``SubscriptionConsumer.stop``. From any thread."""
        return self.consumer.stop() if self.consumer is not None else None

    def complete(self) -> None:
        """End without error."""
        self._end(None)
        self._mark_released()

    def _end(self, error: MessagingError | None) -> None:
        if self.ended:
            return
        self.error = error
        self.ended = True
        self.throttle.release()
        self.settlement.stop_gathering()
        if self.handle is None:  # there is nothing to unsubscribe, and a refused stream need not be closed
            self._mark_released()
        self._untaken += self.buffer.clear()
        self.ready.reject(
            error or ClosedError(f"the stream of {self.spec.channel!r} was closed, or forgotten, before it was ready")
        )
        self.ready.exception()  # the consumer of the stream is told; the promise need not be
        if self.consumer is not None:
            self.consumer.wake()

    def _mark_released(self) -> None:
        """Take no further verdicts, and return the deduplicator."""
        self.settlement.is_released = True
        if self.deduplicator is not None:
            self.deduplicator.discard()

    def on_connection_lost(self) -> None:
        """Mark the buffered messages as stale; see ``MessageBuffer.on_connection_lost``."""
        self.buffer.on_connection_lost()

    def reconnected(self, resumed: bool) -> None:
        """Prepare for a new connection: bound the messages of the lost one, and return their credit."""
        self.buffer.reconnected(resumed)
        self.credit.return_stale(self.buffer.is_stale)
        self.proceed()

    def flush(self) -> None:
        """Pass the verdicts collected so far to the adapter."""
        self.settlement.flush()

    def proceed(self) -> None:
        """Wake the consumer: it may have waited for a verdict."""
        if self.buffer.messages and self.consumer is not None:
            self.consumer.wake()

    def take_over(self, counts: Mapping[object, int]) -> None:
        """Continue the delivery counts of messages that another consumer rejected."""
        self._redelivery.rejections.update(counts)

    # --- the end of the consumer

    def untake(self, message: Message) -> None:
        """Release a message that was taken and not begun when its consumer stopped. From any thread."""
        incoming: Incoming = context_of(message)
        if withdraw(incoming):
            self._untaken.append(incoming)
        elif incoming.token is None or self.spec.options.auto_acknowledge:

            def drop() -> None:
                self.counters.dropped += 1

            self.connection.engine.call(drop)

    async def release(self, timeout: float) -> None:
        """Release the unsettled messages of a consumer that has stopped. On the loop; see ``Subscribed.release``."""
        self._untaken += [*self.buffer.clear(), *self.hand_out.clear()]
        if self.deduplicator is not None:
            self._untaken += [each for each in self.deduplicator.release() if each.token is not None]
        await self._release(timeout)
        if self.deduplicator is not None:
            await self.deduplicator.close(timeout)

    async def _release(self, timeout: float) -> None:
        redelivery = self._redelivery
        redelivery.hand_on(self._untaken)
        requeued = redelivery.is_requeued()
        unsettled, self._untaken = self._untaken, []
        unsettled += self.settlement.close(is_lost=not requeued)
        if not self.is_lasting:  # replies: no other consumer wants them
            self.adapter.acknowledge([each.token for each in unsettled])
            return
        redelivered = self.buffer.is_redelivered
        lost = [each for each in unsettled if not (redelivered if self.buffer.is_stale(each) else requeued)]
        left = await redelivery.abandon(lost, timeout)
        if left:
            self.counters.dropped += left
            logger.info(
                "%s: %d unsettled messages of %r are lost with their stream; set deadLetterChannel to keep them",
                self.adapter.name, left, self.spec.channel,
            )  # fmt: skip
        await redelivery.finish(timeout)


def _deduplicator_of(
    subscription: Subscription, stores: SettledIdStores | None, replaced: Subscription | None
) -> Deduplicator | None:
    """Return what recognises settled messages, with ``deduplicate``; an heir goes on with the ids that are known."""
    if stores is None:
        return None
    is_heir = replaced is not None and replaced.source == subscription.source
    known = replaced.deduplicator if replaced is not None and is_heir else None
    settled = stores.open(subscription.spec, None if known is None else known.settled)
    return None if settled is None else Deduplicator(subscription, subscription.buffer, stores, settled)

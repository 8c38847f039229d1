"""One subscription at the broker: its channel, its deliveries, its acknowledgements.

Each subscription has a channel of its own, so that an error of one does not end others, and its own credit there
(``prefetch``). The deliveries of one turn of the loop are handed over as one batch. Acknowledgements of one turn leave
in one write, their contiguous part in a single frame.

**Joint subscriptions** have one queue and one consumer: RabbitMQ keeps the order of one publisher's channel. The queue
is bound and unbound while it is consumed. A message that several bindings match reaches the queue once. A queue without
a name is exclusive, and deleted with its consumer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

import aiormq
from aiormq import spec as methods

from messaging.environment.signals import on_failure
from messaging.errors import ConnectionLostError, SubscriptionRefusedError
from messaging.execution import shielded
from messaging.model import Incoming
from messaging.receiving import redelivery
from messaging_adapters.amqp import frames, topology
from messaging_adapters.amqp.addressing import ArrivalChannels
from messaging_adapters.amqp.connection import CLOSE_GRACE, AmqpWire, describe, refusal
from messaging_adapters.amqp.delays import Delays, RawMessage
from messaging_adapters.amqp.deliveries import DeliveryLane, QueueSubscription
from messaging_adapters.amqp.extensions import STREAM_OFFSET

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel


logger = logging.getLogger(__name__)


class QueueConsumer(DeliveryLane):
    """A subscription; the handle of the adapter, and with a delivery tag the token of a delivery.

    Args:
        exchange: the exchange of channels without extension.
        tag: the consumer's name at the broker.
        spawn: runs requests to the broker in the background.
        delays: where rejected messages wait, if they do.

    Attributes:
        queue_name: of the queue, once it is known.
    """

    def __init__(
        self,
        wire: AmqpWire,
        subscription: QueueSubscription,
        *,
        exchange: str,
        tag: str,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        delays: Delays | None = None,
    ) -> None:
        spec, sink, source, position = subscription
        #: whether unsettled messages are kept: this side redelivers them or has them delayed
        self._keeps = position is not None or source.delay is not None
        super().__init__(keeps_raw=self._keeps)
        self._wire = wire
        self._sink = sink
        self._spec = spec
        self._source = source
        self._position = position
        queue = spec.options.queue
        self._what = f"subscription to {spec.channel!r}" + (f" (queue {queue!r})" if queue is not None else "")
        self._delays = delays
        self._tag = tag
        self._spawn = spawn
        self._channels = ArrivalChannels(spec, source, exchange)
        #: the route of messages that the default exchange delivers to this queue
        self._own_route = b"\x00" + frames.short_string(source.queue.name or "")
        self._settles = spec.options.qos != "0"
        self._open = False
        #: whether ``open`` has returned, so that the end is reported to the sink
        self._established = False
        #: whether the caller of ``open`` was cancelled
        self._abandoned = False
        self._error: SubscriptionRefusedError | None = None
        self._channel: AbstractChannel | None = None
        self._private_queue: str | None = None
        self.queue_name = source.queue.name or ""
        self._number = 0
        self._batch: list[Incoming] = []
        #: unsettled messages by delivery tag
        self._kept: dict[int, tuple[RawMessage, Incoming]] = {}
        #: messages of a stream beyond the credit, which streams count in chunks, and the number handed over
        self._ahead: deque[Incoming] = deque()
        self._handed = 0
        #: the delivery count of messages that carry none, if deliveries are counted
        self._first: int | None = 1 if self._keeps else None
        #: every delivery tag up to here is settled; above it, the tags in the set
        self._floor = 0
        self._above: set[int] = set()
        self._acks: list[int] = []
        self._requeues: list[int] = []
        self._flushing = False
        #: one binding at a time: a refusal closes the channel; and how many wait for it
        self._binding = asyncio.Lock()
        self._bindings = 0
        self._binding_channel: AbstractChannel | None = None

    @property
    def is_open(self) -> bool:
        """Return whether a delivery can still be settled. May be read by any thread."""
        return self._open and self._wire.alive

    # --- life cycle

    async def open(self) -> None:
        """Subscribe.

        Raises:
            SubscriptionRefusedError: the broker refused the subscription.
            ConnectionLostError: the connection was lost.
        """
        # Not cancelled with the caller: a request that was sent takes effect, and its effect must be undone.
        subscribing = topology.subscribed(
            self._subscribe, f"{self._wire.label}: {self._what}", lambda: not self._abandoned
        )
        opening = asyncio.get_running_loop().create_task(subscribing)
        try:
            with on_failure(self._abandon, opening):
                await shielded(opening)
        except aiormq.AMQPChannelError as error:
            raise refusal(
                SubscriptionRefusedError, self._what, error, topology.way_out(self._source.queue, error)
            ) from error
        self._private_queue = None  # it has a consumer, and is deleted with it
        if self._error is not None:  # the broker cancelled the consumer right after its confirmation
            raise self._error
        self._established = True

    def _abandon(self, opening: asyncio.Task[None]) -> None:
        self._abandoned = True
        self._spawn(self._clean_up(opening))

    async def _subscribe(self) -> None:
        wire, source = self._wire, self._source
        self._error = None  # of an earlier attempt
        await topology.ensure_exchange(wire, source.exchange)
        if source.queue.name is None:
            self._channel = channel = await wire.channel()
            queue = await topology.declare_queue(wire, channel, source.queue)
            self._private_queue = self.queue_name = queue.name
        else:
            self._channel, queue = channel, _ = await topology.ensure_queue(wire, source.queue)
        for key in source.bindings:
            await topology.bind(wire, queue, source.exchange, key, source.binding_arguments)
        await wire.command(channel.set_qos(self._spec.options.prefetch), methods.Basic.Qos)
        self._number = cast("int", channel.number)
        wire.lanes[self._number] = self
        self._open = not self._abandoned
        arguments = dict(source.consumer_arguments)
        if self._position is not None:
            arguments["x-stream-offset"] = self._position.attach()
        await topology.consume(wire, queue, self._tag, no_ack=not self._settles, arguments=arguments)

    async def close(self) -> None:
        """Unsubscribe: unsettled messages are requeued. Idempotent.

        Raises:
            ConnectionLostError: the connection was lost, and the subscription with it.
        """
        if not self.is_open:
            return
        self._flush()
        if self._delays is not None and self._kept:
            # messages that the broker has twice for now should not be redelivered
            await self._delays.wait(CLOSE_GRACE)
            self._flush()
        self._open = False
        self._forget()
        await self._wire.close_channel(self._channel)

    async def _clean_up(self, opening: asyncio.Task[None] | None = None) -> None:
        """Close the channel, and undo the effects of ``opening`` after it failed or was abandoned."""
        if opening is not None:
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                self._private_queue = None
        self._open = False
        try:
            await self._wire.close_channel(self._channel)
            if self._private_queue is not None:
                await topology.delete_queue(self._wire, self._private_queue)
        except (ConnectionLostError, aiormq.AMQPChannelError) as error:
            logger.debug("%s: %s: not cleaned up: %s", self._wire.label, self._what, error)

    def closed(self, code: int, text: str) -> None:
        """Handle the close of the channel by the broker; see ``protocol.FrameLane``."""
        self._end(SubscriptionRefusedError(f"{self._what}: {code} {text}", code=code, detail=text))

    def _end(self, error: SubscriptionRefusedError) -> None:
        if self._open:
            self._open = False
            self._forget()
            self._error = error
            if self._established:
                self._sink.fail(error)

    def _forget(self) -> None:
        self._batch.clear()
        self._kept.clear()
        self._ahead.clear()

    # --- deliveries

    def take_method(self, method: bytes) -> bool:
        """Take the broker's ``basic.cancel``; see ``protocol.FrameLane``."""
        if method != frames.BASIC_CANCEL:
            return False
        self._spawn(self._cancelled())
        return True

    async def _cancelled(self) -> None:
        """Subscribe again, over a new connection, if the queue exists; otherwise end."""
        queue = self._source.queue
        try:
            is_known = self._established and queue.name is not None and queue.declare != "none"
            if is_known and await topology.exists(self._wire, queue):
                if self._open:
                    self._wire.abort(f"the broker cancelled the consumer of queue {queue.name!r}, which exists")
                return
        except ConnectionLostError:
            return
        self._end(SubscriptionRefusedError(f"{self._what}: cancelled by the broker; the queue was probably deleted"))
        await self._clean_up()

    def delivered(self, tag: int, route: bytes, payload: bytes) -> None:
        """Hand over a delivery, or settle one that is outside of the subscription or expired."""
        if not (self._open and self._wire.alive):
            return  # it is requeued when the channel closes
        known = self.known
        if self._position is not None and (offset := known.extensions.get(STREAM_OFFSET)) is not None:
            self._position.arrived(tag, offset)
        arrival = self._channels[route]
        if known.origin is not None and route == self._own_route:
            # trusted only on the route of delays: on others any publisher could claim another channel
            arrival = self._channels.translate(*known.origin)
        if arrival is None:
            if self._settles:
                self.settle(tag, requeue=False)
            return
        token = (self, tag) if self._settles else None
        incoming = self.message(payload, arrival, token, known.delivery_count or self._first)
        if incoming is None:  # expired
            if token is not None:
                self.settle(tag, requeue=False)
            return
        if self._keeps:
            self._kept[tag] = RawMessage(self.raw, route, payload), incoming
            if self._position is not None:
                self._ahead.append(incoming)
                self._advance()
                return
        self._hand_over(incoming)

    def _advance(self) -> None:
        """Hand over messages of a stream as far as there is credit."""
        while self._ahead and self._handed < self._spec.options.prefetch:
            self._handed += 1
            self._hand_over(self._ahead.popleft())

    def _hand_over(self, incoming: Incoming) -> None:
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._batch.append(incoming)

    def _deliver(self) -> None:
        batch, self._batch = self._batch, []
        if batch and self.is_open:
            self._sink.deliver(batch)

    # --- settling

    def reject(self, tag: int) -> None:
        """Have a message redelivered: by the broker, at once or later, or from here if the broker cannot."""
        if not self._keeps:
            self.settle(tag, requeue=True)
            return
        if not self.is_open or tag not in self._kept:
            return
        kept, incoming = self._kept[tag]
        if self._delays is not None and self._source.delay is not None:
            self._delays.put(
                self._source.queue.name or "",
                self._source.delay,
                kept,
                lambda is_delayed: self.settle(tag, requeue=not is_delayed),
            )
        else:
            # a stream takes nothing back
            again = redelivery.again(incoming, (incoming.delivery_count or 1) + 1)
            self._kept[tag] = kept, again
            self._hand_over(again)

    def settle(self, tag: int, *, requeue: bool) -> None:
        """Acknowledge or requeue a message. Late and repeated calls have no effect."""
        if not self.is_open or tag <= self._floor or tag in self._above:
            return
        self._above.add(tag)
        if self._kept and self._kept.pop(tag, None) is not None and self._position is not None:
            self._handed -= 1
            self._advance()
        (self._requeues if requeue else self._acks).append(tag)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        acks, self._acks = self._acks, []
        requeues, self._requeues = self._requeues, []
        if not self._open:
            return
        floor, above = self._floor, self._above
        while floor + 1 in above:
            floor += 1
            above.remove(floor)
        self._floor = floor
        if self._position is not None:
            self._position.settled(floor)
        # requeues come first: an acknowledgement of everything up to a tag must not include them
        parts = [frames.requeue(self._number, tag) for tag in requeues]
        contiguous = [tag for tag in acks if tag <= floor]
        if contiguous:
            parts.append(frames.ack(self._number, max(contiguous), multiple=len(contiguous) > 1))
        parts += [frames.ack(self._number, tag, multiple=False) for tag in acks if tag > floor]
        self._wire.write(b"".join(parts))

    # --- further channels of a joint subscription

    async def join(self, channel: str, key: str) -> None:
        """Bind the queue to a further channel.

        Args:
            channel: the channel pattern, for errors.
            key: its binding key.

        Raises:
            SubscriptionRefusedError: the broker refused the binding, or the queue is gone.
            ConnectionLostError: the connection was lost.
        """
        try:
            await self._bind(topology.bind, key)
        except aiormq.AMQPChannelError as error:
            raise refusal(SubscriptionRefusedError, f"subscription to {channel!r}", error) from error

    async def part(self, key: str) -> None:
        """Unbind the queue; nothing happens if it is not bound, or gone.

        Raises:
            ConnectionLostError: the connection was lost.
        """
        try:
            await self._bind(topology.unbind, key)
        except aiormq.AMQPChannelError as error:
            logger.warning(
                "%s: queue %r is not unbound from %r: %s; messages that still arrive are dropped",
                self._wire.label, self.queue_name, key, describe(error),
            )  # fmt: skip

    async def _bind(self, change: Callable[..., Coroutine[Any, Any, None]], key: str) -> None:
        """Bind or unbind, on a channel that is open for as long as there are requests: a refusal closes it."""
        self._bindings += 1
        try:
            async with self._binding:
                channel, self._binding_channel = self._binding_channel, None  # kept unless it fails
                if channel is None:
                    channel = await self._wire.channel()
                queue = await channel.get_queue(self.queue_name, ensure=False)
                await change(self._wire, queue, self._source.exchange, key)
                if self._bindings > 1:
                    self._binding_channel = channel
                else:
                    await self._wire.close_channel(channel)
        finally:
            self._bindings -= 1

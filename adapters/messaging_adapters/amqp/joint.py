"""Several channels with one queue and one consumer: RabbitMQ keeps the order of one publisher's channel.

The queue is bound and unbound while it is consumed. A refused binding closes the AMQP channel that asked for it, so
bindings have one of their own, for as long as there are requests. A message that several bindings match reaches the
queue once. A queue without a name is exclusive, and deleted with its consumer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import aiormq

from messaging.errors import SubscriptionRefusedError
from messaging_adapters.amqp import topology
from messaging_adapters.amqp.connection import describe, refusal

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel

    from messaging_adapters.amqp.connection import Wire
    from messaging_adapters.amqp.consumer import QueueConsumer
    from messaging_adapters.amqp.declarations import ExchangeSpec

logger = logging.getLogger(__name__)


class JointQueue:
    """A queue with several bindings: the handle of a joint subscription.

    Args:
        wire: the connection of the consumer, which alone may use an exclusive queue.
        consumer: the consumer of the queue, which has the first binding.
        exchange: the exchange of all bindings.
    """

    def __init__(self, wire: Wire, consumer: QueueConsumer, exchange: ExchangeSpec) -> None:
        self._wire = wire
        self._consumer = consumer
        self._exchange = exchange
        self._channel: AbstractChannel | None = None
        #: one request at a time: a refusal closes the channel
        self._lock = asyncio.Lock()
        self._requests = 0

    async def join(self, channel: str, key: str) -> None:
        """Bind the queue.

        Args:
            channel: the channel pattern, for errors.
            key: its binding key.

        Raises:
            SubscriptionRefusedError: the broker refused the binding, or the queue is gone.
            ConnectionLostError: the connection was lost.
        """
        try:
            await self._request(key, is_joining=True)
        except aiormq.AMQPChannelError as error:
            raise refusal(SubscriptionRefusedError, f"subscription to {channel!r}", error) from error

    async def part(self, key: str) -> None:
        """Unbind the queue; nothing happens if it is not bound, or gone.

        Raises:
            ConnectionLostError: the connection was lost.
        """
        try:
            await self._request(key, is_joining=False)
        except aiormq.AMQPChannelError as error:
            logger.warning(
                "amqp: queue %r is not unbound from %r: %s; messages that still arrive are dropped",
                self._consumer.queue_name, key, describe(error),
            )  # fmt: skip

    async def _request(self, key: str, *, is_joining: bool) -> None:
        self._requests += 1
        try:
            async with self._lock:
                await self._bind(key, is_joining=is_joining)
                if self._requests == 1 and self._channel is not None:
                    channel, self._channel = self._channel, None
                    await self._wire.close_channel(channel)
        finally:
            self._requests -= 1

    async def _bind(self, key: str, *, is_joining: bool) -> None:
        channel, self._channel = self._channel, None  # kept unless it fails
        if channel is None:
            channel = await self._wire.channel()
        queue = await channel.get_queue(self._consumer.queue_name, ensure=False)
        if is_joining:
            await topology.bind(self._wire, queue, self._exchange, key)
        else:
            await topology.unbind(self._wire, queue, self._exchange, key)
        self._channel = channel

    async def close(self) -> None:
        """Unsubscribe; see ``QueueConsumer.close``. Idempotent."""
        await self._consumer.close()

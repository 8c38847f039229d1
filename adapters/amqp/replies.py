"""Direct reply-to: replies without a queue, a feature of RabbitMQ.

A channel that consumes from ``amq.rabbitmq.reply-to`` and publishes requests with that name as ``reply-to`` receives
the replies: the broker replaces the name by an address of the channel. The replies arrive on the publisher's channel,
between its confirms, and without acknowledgement.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from adapters.amqp import names
from adapters.amqp.deliveries import DeliveryLane
from messaging.model import Incoming

if TYPE_CHECKING:
    from messaging.adapter import Sink
    from messaging.errors import MessagingError


class DirectReplies(DeliveryLane):
    """The replies on one channel; the handle of their subscription."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        #: the receiver of the replies; ``None`` once it has unsubscribed
        self.sink: Sink | None = sink
        self._batch: list[Incoming] = []

    def delivered(self, tag: int, route: bytes, payload: bytes) -> None:
        """Add a reply to the batch, which is delivered at the end of the loop's turn."""
        del tag, route
        known = self.known
        if not self._batch:
            asyncio.get_running_loop().call_soon(self.flush)
        self._batch.append(
            Incoming(
                payload,
                names.DIRECT_CHANNEL,
                None,
                known.content_type,
                known.content_encoding,
                known.correlation_id,
                known.reply_to_channel,
                known.extensions,
            )
        )

    def flush(self) -> None:
        """Deliver the replies that have arrived."""
        batch, self._batch = self._batch, []
        if batch and self.sink is not None:
            self.sink.deliver(batch)

    async def close(self) -> None:
        """Unsubscribe. The channel is the publisher's and stays open."""
        self.sink = None

    def fail(self, error: MessagingError) -> None:
        """Report that the channel was closed, and with it its address."""
        self.flush()
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.fail(error)

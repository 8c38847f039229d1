"""Direct reply-to: replies without a queue, RabbitMQ's short way.

Whoever consumes from ``amq.rabbitmq.reply-to`` on a channel, and publishes requests with that name as ``reply-to`` on
the same channel, gets the replies there: the broker puts an address of that channel in its place. So they arrive on the
publisher's channel, between its confirms, without acknowledgement.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from adapters.amqp import frames, names, properties
from adapters.amqp.body import Body
from messaging.model import Incoming

if TYPE_CHECKING:
    from messaging.adapter import Sink
    from messaging.errors import MessagingError


class DirectReplies:
    """The replies on one channel; the handle of their subscription."""

    def __init__(self, sink: Sink) -> None:
        #: where they go; ``None`` if nobody wants them any more
        self.sink: Sink | None = sink
        self._is_arriving = False
        self._properties = properties.Properties()
        self._missing = 0
        #: where the payload comes in several frames
        self._body: Body | None = None
        self._batch: list[Incoming] = []

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take the frames of replies; see ``connection.Lane``."""
        if kind == frames.METHOD:
            if data[at : at + 4] != frames.BASIC_DELIVER:
                return False
            self._is_arriving, self._missing = True, 0
            return True
        if not self._is_arriving:
            return False
        if kind == frames.HEADER:
            self._missing, self._body = frames.read_body_size(data, at), None
            self._properties = properties.read(data, at + 12, end, False)
            if self._missing:
                return True
            payload = b""
        elif self._missing:
            payload = data[at:end]
            if end - at != self._missing or self._body is not None:
                self._body = self._body or Body(self._missing)
                whole = self._body.add(payload)
                if whole is None:
                    return True
                payload, self._body = whole, None
            self._missing = 0
        else:
            return False
        self._is_arriving = False
        self._arrived(payload)
        return True

    def _arrived(self, payload: bytes) -> None:
        known = self._properties
        if not self._batch:
            asyncio.get_running_loop().call_soon(self.hand_over)
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

    def hand_over(self) -> None:
        """Pass on what has arrived."""
        batch, self._batch = self._batch, []
        if batch and self.sink is not None:
            self.sink.deliver(batch)

    async def close(self) -> None:
        """Nobody wants them any more; the channel is the publisher's, and stays."""
        self.sink = None

    def fail(self, error: MessagingError) -> None:
        """The channel is gone, and its address with it."""
        self.hand_over()
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.fail(error)

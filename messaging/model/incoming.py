"""Incoming: a received message on its way from the adapter to the application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from messaging.model.acknowledge import AcknowledgeMessageContext
from messaging.model.context import NO_EXTENSIONS


class Incoming(AcknowledgeMessageContext):
    """A received message as the adapter hands it to the core, and the context of the application's message.

    One object serves as both, because one is made for every received message. The adapter makes a new one for each
    delivery.

    Args:
        payload: the bytes in their content encoding.
        channel: the actual channel, never the pattern (MSG260).
        channel_extension, content_type, content_encoding, correlation_id, reply_to_channel: as set by the sender.
        extensions: read-only, may be shared: further values that the protocol reported, under the names of
            :class:`~messaging.Features` (``qos``, ``retain``, ``headers``, ``priority``, ``timeToLive``) and
            ``messageId`` (str), ``timestamp`` (float, seconds since the epoch), ``redelivered`` (bool); keys that do
            not apply are absent.
        token: any object by which :meth:`Adapter.acknowledge` settles this delivery; ``None`` if the protocol has no
            acknowledgement for it (QoS 0): its state is then UNSUPPORTED, and the adapter keeps nothing of it.
        delivery_count: number of deliveries of this message by the broker, including this one; ``None`` if the broker
            does not count, and the core counts by itself.
    """

    __slots__ = ("delivery_count", "payload", "token")

    def __init__(
        self,
        payload: bytes,
        channel: str,
        channel_extension: str | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        correlation_id: str | None = None,
        reply_to_channel: str | None = None,
        extensions: Mapping[str, Any] = NO_EXTENSIONS,
        token: Any = None,
        delivery_count: int | None = None,
    ) -> None:
        self.payload = payload
        self._channel = channel
        self._channel_extension = channel_extension
        self._content_type = content_type
        self._content_encoding = content_encoding
        self._correlation_id = correlation_id
        self._reply_to_channel = reply_to_channel
        self._extensions = extensions
        self.direct_acknowledgement = None
        self.plan = None
        self.token = token
        self.delivery_count = delivery_count

    def keep(self, extensions: Mapping[str, Any]) -> None:
        """Replace the extensions, before the application sees the message."""
        self._extensions = extensions

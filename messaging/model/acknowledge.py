"""Acknowledgement (RFC 5.8): the states, received messages and their context, and the acknowledge handler.

A message changes once from ``RECEIVED`` to ``ACKNOWLEDGED`` or ``REJECTED``; a call that loses the race returns
``False``. The subscription sends the verdict to the broker (:mod:`messaging.receiving.settlement`).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.environment.forks import hold_over_fork
from messaging.errors.text import tolerant
from messaging.model.context import NO_EXTENSIONS, MessageContext, rebuilt_context

#: One lock guards the state of all messages. It is held for a comparison and an assignment only: a lock for each
#: message would cost more than it saves.
state_lock: Final = threading.Lock()
hold_over_fork(state_lock)


class AcknowledgeType(enum.Enum):
    """State of a received message (RFC 5.8.5)."""

    #: received, and neither acknowledged nor rejected yet
    RECEIVED = "RECEIVED"
    ACKNOWLEDGED = "ACKNOWLEDGED"
    REJECTED = "REJECTED"
    #: the protocol has no acknowledgement for this message (MQTT QoS 0)
    UNSUPPORTED = "UNSUPPORTED"
    #: a verdict was given and can no longer reach the broker, which delivers the message again if its protocol can
    UNKNOWN = "UNKNOWN"


class Settler(Protocol):
    """Accepts verdicts on the messages of a subscription. Thread safe."""

    def settle(self, incoming: Any, acknowledged: bool) -> bool:
        """Settle a message and pass the verdict on; return whether this call settled it.

        ``False`` if it was settled before, or if the verdict can no longer reach the broker: the state is then UNKNOWN.
        """
        ...

    def settle_invalid(self, incoming: Any) -> bool:
        """Settle a message that its consumer cannot read: dead-letter it if there is a channel, or else reject it.

        A message that takes no verdict is dead-lettered as well, or counted as rejected; the result is then ``False``.
        """
        ...


class AcknowledgeMessageContext(MessageContext):
    """The context of a received message, with its acknowledgement (RFC 5.8.5). Thread safe."""

    __slots__ = ("settler", "state")

    is_received = True

    state: AcknowledgeType
    #: accepts the verdict; ``None`` when the message is settled
    settler: Settler | None

    def __reduce__(self) -> tuple[Any, ...]:
        state = AcknowledgeType.UNSUPPORTED if self.state is AcknowledgeType.RECEIVED else self.state
        _, (_, values) = super().__reduce__()
        return _rebuilt_received_context, (values, state)

    if TYPE_CHECKING:

        @property
        def channel(self) -> str:
            """Return the channel on which the message arrived, never the pattern (MSG260)."""

    @property
    def acknowledge_state(self) -> AcknowledgeType:
        """Return the current state. Another thread may change it."""
        return self.state

    @property
    def acknowledge_handler(self) -> AcknowledgeHandler:
        """Return a handler that acknowledges or rejects the message. All handlers of a message share its state."""
        return AcknowledgeHandler(self)

    def settle_invalid(self) -> bool:
        """Dead-letter a message that its consumer cannot read, or else reject it; as :meth:`settle`."""
        settler = self.settler
        return self.settle(False) if settler is None else settler.settle_invalid(self)

    def settle(self, acknowledged: bool) -> bool:
        """Acknowledge or reject; return whether this call settled the message."""
        settler = self.settler if self.state is AcknowledgeType.RECEIVED else None
        if settler is not None:
            return settler.settle(self, acknowledged)
        with state_lock:
            if self.state is not AcknowledgeType.RECEIVED:
                return False
            self.state = AcknowledgeType.ACKNOWLEDGED if acknowledged else AcknowledgeType.REJECTED
        return True


def _rebuilt_received_context(values: dict[str, Any], state: AcknowledgeType) -> AcknowledgeMessageContext:
    """Return the copy of a received context. An adapter's own class is left behind: it may hold its connection."""
    context = rebuilt_context(AcknowledgeMessageContext, values)
    context.state, context.settler = state, None
    return context


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


class AcknowledgeHandler:
    """Acknowledges or rejects one message (RFC 5.8.8). Thread safe; made by the context."""

    __slots__ = ("_context",)

    def __init__(self, context: AcknowledgeMessageContext) -> None:
        self._context = context

    def acknowledge(self) -> bool:
        """Acknowledge the message.

        Returns:
            ``True`` if this call settled it. ``False`` if the message was acknowledged or rejected before, if its
            protocol has no acknowledgement, or if its connection was lost: the broker then delivers it again where
            the protocol can.
        """
        return self._context.settle(True)

    def reject(self) -> bool:
        """Reject the message, which is then delivered again or dead-lettered.

        Returns:
            As :meth:`acknowledge`.
        """
        return self._context.settle(False)

    @tolerant
    def __repr__(self) -> str:
        return f"<AcknowledgeHandler {self._context.state.value}>"

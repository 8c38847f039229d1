"""Acknowledgement (RFC 5.8): states, the context of received messages, its handler, and direct acknowledgement.

``RECEIVED`` goes to ``ACKNOWLEDGED`` or ``REJECTED``, once; the loser of a race gets ``False``. What follows on the
wire is the subscription's business (:mod:`messaging.receiving.subscription`).
"""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.forking import hold_over_fork
from messaging.model.context import MessageContext, rebuilt_context
from messaging.text import tolerant

#: One lock for the state of all messages: it is held for a comparison and an assignment, and a lock for each
#: message would cost more than it could save.
state_lock: Final = threading.Lock()
hold_over_fork(state_lock)


class AcknowledgeType(enum.Enum):
    """State of a received message (RFC 5.8.5)."""

    #: received, neither acknowledged nor rejected
    RECEIVED = "RECEIVED"
    ACKNOWLEDGED = "ACKNOWLEDGED"
    REJECTED = "REJECTED"
    #: the protocol has no acknowledgement for this message (MQTT QoS 0)
    UNSUPPORTED = "UNSUPPORTED"
    #: a verdict was given, but can no longer reach the broker: the message will be delivered again if it can be
    UNKNOWN = "UNKNOWN"


class Settler(Protocol):
    """Takes verdicts on the messages of a subscription. From any thread."""

    def settle(self, incoming: Any, acknowledged: bool) -> bool:
        """Decide on a message and pass the verdict on, unless it was settled; whether this call did it.

        ``False`` also if the verdict can no longer reach the broker: the state is then UNKNOWN.
        """
        ...


class AcknowledgeMessageContext(MessageContext):
    """The context of a received message (RFC 5.8.5): knows whether it was acknowledged, and can do it. Thread safe."""

    __slots__ = ("_settler", "_state")

    _is_received = True

    _state: AcknowledgeType
    #: passes on the verdict; ``None`` once it has
    _settler: Settler | None

    def __reduce__(self) -> tuple[Any, ...]:
        # of the class of all received contexts: an adapter's own may hold its connection
        return rebuilt_context, (AcknowledgeMessageContext, self._state_to_copy())

    def _state_to_copy(self) -> dict[str, Any]:
        state = self._state
        copied = AcknowledgeType.UNSUPPORTED if state is AcknowledgeType.RECEIVED else state
        return {**super()._state_to_copy(), "acknowledge_state": copied}

    if TYPE_CHECKING:

        @property
        def channel(self) -> str:
            """Where the message arrived: the actual channel, never the pattern (MSG260)."""

    @property
    def acknowledge_state(self) -> AcknowledgeType:
        """The state now; another thread may change it."""
        return self._state

    @property
    def acknowledge_handler(self) -> AcknowledgeHandler:
        """Acknowledges or rejects the message; however often it is fetched, there is one state."""
        return AcknowledgeHandler(self)

    def _settle(self, acknowledged: bool) -> bool:
        settler = self._settler if self._state is AcknowledgeType.RECEIVED else None
        if settler is not None:
            return settler.settle(self, acknowledged)
        with state_lock:
            if self._state is not AcknowledgeType.RECEIVED:
                return False
            self._state = AcknowledgeType.ACKNOWLEDGED if acknowledged else AcknowledgeType.REJECTED
        return True


class AcknowledgeHandler:
    """Acknowledges or rejects one message (RFC 5.8.8). Thread safe; not made by users."""

    __slots__ = ("_context",)

    def __init__(self, context: AcknowledgeMessageContext) -> None:
        self._context = context

    def acknowledge(self) -> bool:
        """Acknowledge the message.

        Returns:
            ``True`` if this call did it. ``False`` if the message was acknowledged or rejected already, if its
            protocol has no acknowledgement, or if the connection it came from is gone: the broker then delivers
            it again, as far as it can.
        """
        return self._context._settle(True)

    def reject(self) -> bool:
        """Reject the message: it is delivered again, or goes to the dead-letter channel.

        Returns:
            As :meth:`acknowledge`.
        """
        return self._context._settle(False)

    @tolerant
    def __repr__(self) -> str:
        return f"<AcknowledgeHandler {self._context._state.value}>"

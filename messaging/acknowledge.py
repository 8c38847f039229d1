"""Acknowledgement (RFC 5.8): states, the handler, and the configuration of direct acknowledgement.

``RECEIVED`` goes to ``ACKNOWLEDGED`` or ``REJECTED``, once; the loser of a race gets ``False``. What follows on the
wire is the subscription's business (:mod:`messaging.delivery`).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from messaging.adapter import Incoming
    from messaging.message import Message
    from messaging.delivery import Subscription

#: One lock for the state of all messages: it is held for a comparison and an assignment, and a lock for each
#: message would cost more than it could save.
_state_lock: Final = threading.Lock()


class AcknowledgeType(enum.Enum):
    """State of a received message (RFC 5.8.5)."""

    #: received, neither acknowledged nor rejected
    RECEIVED = "RECEIVED"
    ACKNOWLEDGED = "ACKNOWLEDGED"
    REJECTED = "REJECTED"
    #: the protocol has no acknowledgement for this message (MQTT QoS 0)
    UNSUPPORTED = "UNSUPPORTED"
    #: whoever held the message can no longer reach the broker with a verdict: it will be delivered again
    UNKNOWN = "UNKNOWN"


class AcknowledgeHandler:
    """Acknowledges or rejects one message (RFC 5.8.8). Thread safe; made by the subscription, not by users."""

    __slots__ = ("_incoming", "_message", "_state", "_subscription")

    def __init__(self, subscription: Subscription | None, incoming: Incoming | None, state: AcknowledgeType) -> None:
        self._subscription = subscription
        self._incoming = incoming
        self._state = state
        #: set if a post-acknowledge callback wants it
        self._message: Message | None = None

    @property
    def state(self) -> AcknowledgeType:
        """The state now."""
        return self._state

    def acknowledge(self) -> bool:
        """Acknowledge the message.

        Returns:
            ``True`` if this call did it. ``False`` if the message was acknowledged or rejected already, if its
            protocol has no acknowledgement, or if the connection it came from is gone: the broker then delivers
            it again, as far as it can.
        """
        return self._settle(True)

    def reject(self) -> bool:
        """Reject the message: it is delivered again, or goes to the dead-letter channel.

        Returns:
            As :meth:`acknowledge`.
        """
        return self._settle(False)

    def _settle(self, acknowledged: bool) -> bool:
        with _state_lock:
            if self._state is not AcknowledgeType.RECEIVED:
                return False
            self._state = AcknowledgeType.ACKNOWLEDGED if acknowledged else AcknowledgeType.REJECTED
        subscription, incoming, message = self._subscription, self._incoming, self._message
        # incoming -> context -> handler -> incoming would be a cycle: broken here, not by the garbage collector
        self._subscription = self._incoming = self._message = None
        assert subscription is not None and incoming is not None  # noqa: PT018, S101  # RECEIVED is made with both
        if not subscription.settle(incoming, acknowledged):
            self._state = AcknowledgeType.UNKNOWN
            return False
        if message is not None:
            subscription.post_acknowledge(message)
        return True

    def __repr__(self) -> str:
        return f"<AcknowledgeHandler {self._state.value}>"


class AcknowledgeFilter(Protocol):
    """Service interface of an acknowledge filter (RFC 5.8.7): register a callable under it to have it found by target."""

    def __call__(self, message: Message, /) -> bool:
        """``True`` to acknowledge, ``False`` to reject."""
        ...


class AcknowledgeConsumer(Protocol):
    """Service interface of an acknowledge handler or post-acknowledge consumer (RFC 5.8.7)."""

    def __call__(self, message: Message, /) -> object:
        """Look at the message, and as a handler settle it through its context."""
        ...


class DirectAcknowledgement:
    """What an ``AcknowledgeMessageContextBuilder`` was told (RFC 5.8.4). Immutable.

    Each of the three is a callable, an LDAP target (str) of a service, or ``None``.
    """

    __slots__ = ("filter", "handle", "post")

    def __init__(
        self,
        filter: str | Callable[[Message], bool] | None = None,  # noqa: A002  # the RFC's word
        handle: str | Callable[..., object] | None = None,
        post: str | Callable[[Message], object] | None = None,
    ) -> None:
        self.filter = filter
        self.handle = handle
        self.post = post

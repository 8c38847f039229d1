"""Reading from the broker: paused for one subscription, or at all while consumers are behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from messaging.adapter import FlowControl

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.connection.subscribed import Subscribed


class Reading:
    """Passes pauses to the adapter, if it has flow control. On the engine loop.

    Nothing is read from the broker while at least one subscription asks for that.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._control = adapter if isinstance(adapter, FlowControl) else None
        self._behind: set[Subscribed] = set()

    def pause(self, handle: Any) -> None:
        """Ask the broker for no more messages of one subscription."""
        if self._control is not None:
            self._control.pause(handle)

    def unpause(self, handle: Any) -> None:
        """Undo :meth:`pause`."""
        if self._control is not None:
            self._control.resume(handle)

    def suspend(self, subscription: Subscribed) -> None:
        """Read nothing from the broker until the consumer of ``subscription`` has caught up."""
        if not self._behind and self._control is not None:
            self._control.pause(None)
        self._behind.add(subscription)

    def resume(self, subscription: Subscribed) -> None:
        """Read again, unless another consumer is behind. Idempotent."""
        if subscription in self._behind:
            self._behind.remove(subscription)
            if not self._behind and self._control is not None:
                self._control.resume(None)

"""Reading from the broker, suspended while consumers are behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.connection.subscribed import Subscribed


class Reading:
    """Suspends the adapter's reading while at least one subscription asks for it. On the engine loop."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._behind: set[Subscribed] = set()

    def suspend(self, subscription: Subscribed) -> None:
        """Read nothing from the broker until the consumer of ``subscription`` has caught up."""
        if not self._behind:
            self._adapter.suspend_reading()
        self._behind.add(subscription)

    def resume(self, subscription: Subscribed) -> None:
        """Read again, unless another consumer is behind. Idempotent."""
        if subscription in self._behind:
            self._behind.remove(subscription)
            if not self._behind:
                self._adapter.resume_reading()

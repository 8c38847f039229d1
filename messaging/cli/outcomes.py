"""Bookkeeping of published messages whose outcome is not known yet."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from messaging.errors import MessagingError
    from messaging.execution import Promise


class Outcomes:
    """Counts the outcomes of promises. For one thread at a time.

    Attributes:
        succeeded: promises that resolved.
        failed: promises that were rejected, and failures that were added.
        error: the first failure.
    """

    def __init__(self) -> None:
        self._pending: deque[Promise[None]] = deque()
        self.succeeded = self.failed = 0
        self.error: MessagingError | None = None

    def add(self, promise: Promise[None], limit: int) -> None:
        """Add a promise, then wait until at most ``limit`` are pending."""
        self._pending.append(promise)
        self.settle(limit)

    def fail(self, error: MessagingError) -> None:
        """Count a message that could not be published."""
        self.failed += 1
        self.error = self.error or error

    def settle(self, limit: int = 0) -> None:
        """Wait until at most ``limit`` promises are pending. Each promise has its own deadline."""
        pending = self._pending
        while pending and (len(pending) > limit or pending[0].done()):
            error = pending[0].exception()
            pending.popleft()  # after the wait, which a signal can interrupt
            if error is None:
                self.succeeded += 1
            else:
                self.fail(error)

"""Passing of verdicts from consumers to the adapter."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.connection.state import ConnectionStates
    from messaging.connection.subscribed import Subscribed
    from messaging.execution import Engine

logger = SafeLog(__name__)


class Verdicts:
    """Flushes the verdicts of subscriptions on the engine loop, with one wake-up for all subscriptions.

    Args:
        engine: runs :meth:`flush`.
        adapter: named in the log.
        states: of the connection; once it is closed, verdicts are dropped.
    """

    def __init__(self, engine: Engine, adapter: Adapter, states: ConnectionStates) -> None:
        self._engine = engine
        self._adapter = adapter
        self._states = states
        #: subscriptions with verdicts that are not flushed yet
        self._pending: deque[Subscribed] = deque()
        self._signalled = False

    def request_flush(self, subscription: Subscribed) -> None:
        """Call ``subscription.flush`` on the loop soon. Thread safe."""
        self._pending.append(subscription)
        if not self._signalled:
            try:
                self._signalled = True
                self._engine.call(self.flush)
            except BaseException:  # an interrupt: the next request signals again
                self._signalled = False
                raise

    def flush(self) -> None:
        """Flush the subscriptions that requested it. On the engine loop."""
        # cleared before the queue is read: a thread that appends after this line signals again
        self._signalled = False
        pending = self._pending
        if self._states.is_closed:
            pending.clear()  # the adapter is closed too
        for _ in range(len(pending)):
            try:
                pending.popleft().flush()
            except Exception:  # the other subscriptions must be flushed nevertheless
                logger.exception("%s: failed to settle messages", self._adapter.name)

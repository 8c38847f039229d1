"""Callbacks for the end of a transaction.

**Threads.** Callbacks run on a worker thread, in the order in which they were added, without a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from messaging.execution import workers
from messaging.functions import plain_function
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.remoteevent.transactions.participant import TransactionState

logger = SafeLog(__name__)


class EndCallbacks:
    """The callbacks of one transaction. Thread safe.

    Args:
        transaction_id: for the log.
    """

    __slots__ = ("_callbacks", "_id", "_lock", "_state")

    def __init__(self, transaction_id: str) -> None:
        self._id = transaction_id
        self._lock = threading.Lock()  # guards the following
        self._callbacks: list[Callable[[TransactionState], object]] = []
        self._state: TransactionState | None = None

    def add(self, callback: Callable[[TransactionState], object]) -> None:
        """Call ``callback`` with the outcome when it is known, at once if it is. Raises ``ArgumentError``."""
        callback = plain_function(callback, "a callback")
        with self._lock:
            state = self._state
            if state is None:
                self._callbacks.append(callback)
                return
        workers().submit(lambda: self._call([callback], state))

    def run(self, state: TransactionState) -> None:
        """Call the callbacks with the outcome. Later calls do nothing."""
        with self._lock:
            if self._state is not None:
                return
            self._state = state
            callbacks, self._callbacks = self._callbacks, []
        if callbacks:
            workers().submit(lambda: self._call(callbacks, state))

    def _call(self, callbacks: list[Callable[[TransactionState], object]], state: TransactionState) -> None:
        for each in callbacks:
            try:
                each(state)
            except Exception:
                logger.exception("a callback of transaction %s failed", self._id)

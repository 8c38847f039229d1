"""Serial work: a function that runs on worker threads, on one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from messaging.execution.threads import workers


class Serial:
    """Runs a function on a worker thread while there is work, never on two threads at once. Thread safe.

    A thread is occupied only while there is work. Two objects never wait for each other.

    Args:
        drain: does all pending work. It must not raise.
        has_work: returns whether work is pending; called after ``drain``, so that work added meanwhile is not missed.
    """

    __slots__ = ("_busy", "_drain", "_has_work")

    def __init__(self, drain: Callable[[], object], has_work: Callable[[], object]) -> None:
        self._drain = drain
        self._has_work = has_work
        #: the right to run: :meth:`wake` acquires it, and the worker releases it when no work is left
        self._busy = threading.Lock()

    def wake(self) -> bool:
        """Start a worker unless one is running; return whether one was started. To be called after work was added.

        Raises:
            RuntimeError: no thread can be started. The next call tries again.
        """
        if not self._busy.acquire(blocking=False):
            return False
        try:
            workers().submit(self._run)
        except RuntimeError:  # the job is not queued: an interrupt, which is no RuntimeError, may leave it queued
            self._busy.release()
            raise
        return True

    def _run(self) -> None:
        while True:
            try:
                self._drain()
            finally:
                self._busy.release()
            if not self._has_work() or not self._busy.acquire(blocking=False):
                return

"""The control work of a member: one call after the other, on a worker thread, and timers.

The state of the membership is used by these calls only, and so needs no lock. Handlers of events run elsewhere: a slow
one delays no heartbeat.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from messaging.errors.text import SafeLog
from messaging.execution import Serial, clock, engine

logger = SafeLog(__name__)


class Control:
    """Runs calls in their order, on one worker thread at a time. Thread safe.

    Args:
        title: of the member, for the log.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._calls: deque[Callable[[], object]] = deque()
        self._serial = Serial(self._drain, lambda: self._calls)
        self._is_closed = False
        #: identifier of the thread that runs the calls
        self._thread: int | None = None
        #: on the loop
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Have ``call(*arguments)`` run after the earlier calls; its exceptions are logged. From any thread."""
        if not self._is_closed:
            self._calls.append(partial(call, *arguments) if arguments else call)
            self._serial.wake()

    def post_later(self, delay: float, call: Callable[[], object]) -> None:
        """Post ``call`` after ``delay`` seconds; it replaces the call that was to be posted later. From any thread."""
        engine().call(self._schedule, delay, call)

    def _schedule(self, delay: float, call: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if self._is_closed else clock.call_later(engine().loop, delay, self.post, call)

    def close(self) -> None:
        """Run no more calls but the posted ones."""
        self._is_closed = True
        engine().call(self._cancel)

    def abandon(self) -> None:
        """Run no more calls in a forked child: the threads and the timer are the parent's."""
        self._is_closed = True
        self._calls.clear()
        self._timer = None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def is_current_thread(self) -> bool:
        """Return whether the calling thread runs the calls."""
        return self._thread == threading.get_ident()

    def _drain(self) -> None:
        self._thread = threading.get_ident()
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:
                logger.exception("%s: cannot process an announcement or a change of interests", self._title)
        self._thread = None

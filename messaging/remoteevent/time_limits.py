"""Time limits of calls to code of the application, which may never return.

**Threads.** :meth:`TimeLimits.begin` and :meth:`TimeLimits.end` may be called on any thread; calls expire on the loop
of the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from messaging.environment.forks import LiveObjects
from messaging.errors import ArgumentError
from messaging.errors.text import brief
from messaging.execution import Deadlines, clock, engine, seconds

#: time limit of one notification, seconds
TIME_LIMIT: Final = 30.0


def check_wait(timeout: object) -> float:
    """Return the seconds that a call waits at most. Raises ``ArgumentError`` unless it is a number from 0."""
    limit = seconds(timeout)
    if isinstance(timeout, bool) or limit < 0:
        raise ArgumentError(f"timeout must be a number of seconds from 0, not {brief(timeout)}")
    return limit


class LimitedCall:
    """One call, or several calls one after the other, each with the time limit.

    Args:
        expire: called once if a call takes too long; it must be quick.
    """

    __slots__ = ("deadline", "expire", "is_expired")

    def __init__(self, expire: Callable[[], object]) -> None:
        self.expire = expire
        #: monotonic time
        self.deadline = 0.0
        self.is_expired = False


class TimeLimits:
    """Watches the calls to one object. Thread safe.

    Args:
        limit: seconds that each call may take.

    Raises:
        ArgumentError: ``limit`` is no number above 0.
    """

    def __init__(self, limit: float = TIME_LIMIT) -> None:
        self.limit = seconds(limit, "time_limit")
        if isinstance(limit, bool) or self.limit <= 0:
            raise ArgumentError(f"time_limit must be a number of seconds above 0, not {brief(limit)}")
        self.after_fork()
        _time_limits.add(self)

    def after_fork(self) -> None:
        """See ``Forkable``: the calls are made by threads of the parent; the child has an engine of its own."""
        self._lock = threading.Lock()  # guards the following
        self._calls: set[LimitedCall] = set()
        self._stuck: set[LimitedCall] = set()
        self._deadlines: Deadlines | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a call that exceeded its limit has not returned yet."""
        return bool(self._stuck)

    def begin(self, call: LimitedCall) -> None:
        """Watch a call that is about to be made."""
        call.deadline = clock.monotonic() + self.limit
        with self._lock:
            self._calls.add(call)
            if self._deadlines is None:
                self._deadlines = Deadlines(engine(), self.limit, self._scan)
            deadlines = self._deadlines
        deadlines.watch(self.limit)

    def go_on(self, call: LimitedCall) -> None:
        """Begin the time limit anew: one call returned, and the next one follows."""
        call.deadline = clock.monotonic() + self.limit

    def end(self, call: LimitedCall) -> None:
        """Watch a call no more: it has returned."""
        with self._lock:
            self._calls.discard(call)
            self._stuck.discard(call)

    def _scan(self, now: float) -> float | None:
        with self._lock:
            expired = [each for each in self._calls if each.deadline <= now]
            for each in expired:
                each.is_expired = True
                self._calls.discard(each)
                self._stuck.add(each)
            left = min((each.deadline - now for each in self._calls), default=None)
        for each in expired:
            each.expire()
        return left


_time_limits: Final = LiveObjects[TimeLimits]()

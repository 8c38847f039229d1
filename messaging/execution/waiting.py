"""How a thread waits, so that a signal ends the wait and breaks nothing.

Python runs signal handlers on the main thread, between two of its instructions. An exception that a handler raises
comes out at that place. ``threading.Condition`` and its users (``Event``, ``Queue``, ``Future``, ``Thread.start``) are
written in Python and have such places with their lock taken, or already given back: the exception then leaves the lock
taken for ever, or comes out as ``RuntimeError: release unlocked lock``. A raw lock has no such place. Threads of this
project therefore wait on raw locks only.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable
from typing import Final

from messaging.errors import ArgumentError, WouldBlockError

#: longest time without a look, seconds
_STEP: Final = 0.5


def seconds(timeout: object, name: str = "timeout") -> float:
    """Return a number of seconds as a float; one beyond the range of floats is infinite.

    Raises:
        ArgumentError: ``timeout`` is no number, or NaN. ``name`` is its name in the text.
    """
    if isinstance(timeout, (int, float)):
        try:
            value = float(timeout)
        except OverflowError:
            value = math.inf if timeout > 0 else -math.inf
        if value == value:
            return value
    kind = "NaN" if isinstance(timeout, float) else type(timeout).__name__
    raise ArgumentError(f"{name} must be a number of seconds, not {kind}")


class Flag:
    """Tells waiting threads that something has happened: ``threading.Event`` on a raw lock. Thread safe."""

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        #: taken while the flag is not set: acquiring it again is the wait
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag and wake the threads that wait."""
        self._is_set = True
        try:
            self._lock.release()
        except RuntimeError:  # it was set already
            return

    def clear(self) -> None:
        """Unset the flag. Not while another thread waits."""
        self._is_set = False
        self._lock.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, for at most ``timeout`` seconds; return whether it is. On any thread.

        The wait looks up every 0.5 s. Python handles signals on the main thread, but the system may hand one to any
        other thread, such as one that is starting a process just then. That does not end a wait of the main thread,
        and an interrupt would not be noticed before the wait is over.

        Raises:
            BaseException: what a signal handler raises, such as ``KeyboardInterrupt``; on the main thread.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._lock.acquire(timeout=min(left, _STEP)):
                self.set()  # for other threads that wait
        return True


class Waiters:
    """Threads that wait until a condition holds: ``threading.Condition`` without a lock. Thread safe.

    The condition must be readable without a lock. A thread that makes it true calls :meth:`wake` afterwards.
    """

    __slots__ = ("flags",)

    def __init__(self) -> None:
        #: of the threads that wait: whether there are any is a hot path's question, so it is asked of the deque
        self.flags: deque[Flag] = deque()

    def __bool__(self) -> bool:
        """Return whether a thread waits."""
        return bool(self.flags)

    def wait_for(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``holds()`` is true, for at most ``timeout`` seconds, as :meth:`Flag.wait`; return whether."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        flag = Flag()
        try:
            while True:
                self.flags.append(flag)
                # after entering the flag: the thread that makes it true looks the other way round
                if holds():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                flag.wait(min(left, _STEP))  # looks again: an interrupt may have kept wake() from its end
                self._remove(flag)
                flag.clear()
        finally:
            self._remove(flag)

    def _remove(self, flag: Flag) -> None:
        with contextlib.suppress(ValueError):  # wake() was faster
            self.flags.remove(flag)

    def wake(self) -> None:
        """Have all waiting threads look again."""
        flags = self.flags
        while flags:
            try:
                flag = flags.popleft()
            except IndexError:  # another thread was faster
                return
            flag.set()


def runs_loop() -> bool:
    """Return whether the calling thread runs an event loop."""
    # get_running_loop() raises where there is none, and an exception costs as much as a publish
    return _get_running_loop() is not None


def refuse_in_loop(what: str, instead: str) -> None:
    """Refuse to wait on a thread that runs an event loop.

    Args:
        what: what would be waited for.
        instead: the form that does not block.

    Raises:
        WouldBlockError: the thread runs an event loop.
    """
    if runs_loop():
        raise WouldBlockError(f"waiting for {what} would block the event loop of this thread; {instead}")


def warn_in_loop(what: str, instead: str) -> None:
    """Warn that a ``with`` block begins before it is ready. To be called by ``__enter__``."""
    message = f"`with` in a running event loop begins before {what}; {instead}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)

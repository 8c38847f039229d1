"""Waiting of threads that a signal can interrupt without damage.

Python runs signal handlers on the main thread, between two of its instructions, and the exception of a handler
is raised there. ``threading.Condition`` and its users (``Event``, ``Queue``, ``Future``, ``Thread.start``) are written
in Python and have such places with their lock acquired, or already released: the exception then leaves the lock
acquired for ever, or becomes ``RuntimeError: release unlocked lock``. A raw lock has no such place. Threads of this
project therefore wait on raw locks only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import warnings
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable
from typing import Final

from messaging.errors import ArgumentError, WouldBlockError
from messaging.execution.clock import clock

#: longest wait without a check of the condition, seconds. Only interrupts make the checks necessary
STEP = 0.5


def seconds(timeout: object, name: str = "timeout") -> float:
    """Return a number of seconds as a float; a number beyond the range of floats becomes infinite.

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
    """An event that threads can wait for: ``threading.Event`` on a raw lock. Thread safe."""

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        #: acquired while the flag is not set: threads wait by acquiring it again
        self._lock = clock.lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag and wake the waiting threads."""
        self._is_set = True
        try:
            self._lock.release()
        except RuntimeError:  # set already
            return

    def clear(self) -> None:
        """Unset the flag. Must not be called while another thread waits."""
        self._is_set = False
        self._lock.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, for at most ``timeout`` seconds; return whether it is set. On any thread.

        The wait is renewed every 0.5 s. Python handles signals on the main thread, but the system may deliver one to
        any other thread, such as one that is starting a process. That does not end a wait of the main thread, which
        would notice the interrupt only after the wait.

        Raises:
            BaseException: the exception of a signal handler, such as ``KeyboardInterrupt``; on the main thread.
        """
        deadline = math.inf if timeout is None else clock.monotonic() + timeout
        while not self._is_set:
            left = deadline - clock.monotonic()
            if left <= 0:
                return False
            if self._lock.acquire(timeout=min(left, STEP)):
                self.set()  # for other waiting threads
                return True
        return True


class Waiters:
    """Threads that wait until a condition holds: ``threading.Condition`` without a lock. Thread safe.

    The condition must be readable without a lock. A thread that makes it true must call :meth:`wake` afterwards.
    """

    __slots__ = ("flags",)

    def __init__(self) -> None:
        #: of the waiting threads; public, because a hot path checks whether it is empty
        self.flags: deque[Flag] = deque()

    def __bool__(self) -> bool:
        """Return whether a thread is waiting."""
        return bool(self.flags)

    def wait_for(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``holds()`` is true, for at most ``timeout`` seconds, as :meth:`Flag.wait`; return whether."""
        deadline = math.inf if timeout is None else clock.monotonic() + timeout
        flag = Flag()
        try:
            while True:
                self.flags.append(flag)
                # checked after the flag is entered: wake() follows the change of the condition
                if holds():
                    return True
                left = deadline - clock.monotonic()
                if left <= 0:
                    return False
                flag.wait(min(left, STEP))  # in steps: an interrupt may have ended wake() early
                self._remove(flag)
                flag.clear()
        finally:
            self._remove(flag)

    def _remove(self, flag: Flag) -> None:
        with contextlib.suppress(ValueError):  # wake() has removed it
            self.flags.remove(flag)

    def wake(self) -> None:
        """Make all waiting threads check their condition."""
        flags = self.flags
        while flags:
            try:
                flag = flags.popleft()
            except IndexError:  # another thread took the last one
                return
            flag.set()


#: returns the event loop that runs on the calling thread, or ``None``. asyncio's public function raises without a loop,
#: and an exception costs as much as a publish
running_loop: Final[Callable[[], asyncio.AbstractEventLoop | None]] = _get_running_loop


def may_block() -> bool:
    """Return whether the calling thread may block: it runs no event loop."""
    return _get_running_loop() is None


def refuse_in_loop(what: str, instead: str) -> None:
    """Refuse to wait on a thread that runs an event loop.

    Args:
        what: name of the awaited event.
        instead: the form that does not block.

    Raises:
        WouldBlockError: the thread runs an event loop.
    """
    if not may_block():
        raise WouldBlockError(f"waiting for {what} would block the event loop of this thread; {instead}")


def warn_in_loop(what: str, instead: str) -> None:
    """Warn that a ``with`` block begins before ``what``. To be called by ``__enter__``."""
    message = f"`with` in a running event loop begins before {what}; {instead}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)

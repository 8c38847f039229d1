"""How a thread waits, so that a signal ends it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import warnings
from typing import Final

from messaging.errors import WouldBlockError

#: longest time without a look, seconds
_STEP: Final = 0.5


def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait until ``event`` is set, for at most ``timeout`` seconds; whether it is. On any thread.

    It looks up now and then. Python handles signals on the main thread, but the system may hand one to any other
    thread, such as one that is starting a process just then. That does not end a wait of the main thread, and an
    interrupt would not be noticed before the wait is over.

    Raises:
        BaseException: what the handler of a signal raises, such as ``KeyboardInterrupt``; on the main thread.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        if event.wait(min(left, _STEP)):
            return True
        if left <= _STEP:
            return False


def runs_loop() -> bool:
    """Return whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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

"""How a thread waits, so that a signal ends it."""

from __future__ import annotations

import math
import threading
import time
from typing import Final

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

"""Coroutine functions as callbacks of applications, and the event loop that runs them.

A callback runs on the loop that was running when it was registered. Callbacks registered without a running loop share
one.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from typing import Any

from messaging.execution.threads import start_thread


def is_coroutine(function: Any) -> bool:
    """Return whether ``function``, or the ``__call__`` of an object, needs an event loop."""
    return any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (function, getattr(function, "__call__", None))  # noqa: B004  # asks for the method, not whether there is one
    )


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs on the calling thread, or ``None``."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()  # guards _loop


def handlers_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of callbacks registered without a running loop. Starts its daemon thread on first use."""
    global _loop
    with _loop_lock:
        if _loop is None:
            loop = asyncio.new_event_loop()

            def run() -> None:
                asyncio.set_event_loop(loop)
                loop.run_forever()

            start_thread(run, "messaging-handlers")
            _loop = loop
        return _loop


def _after_fork() -> None:
    global _loop, _loop_lock
    _loop = None
    _loop_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

"""Coroutine functions among the callbacks of users: what is one, and which event loop runs it.

It is the loop that ran where the callback was registered or, if none did, one that all of those share.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from typing import Any

from messaging.execution.threads import start_thread


def is_coroutine(function: Any) -> bool:
    """Whether calling ``function``, or an object like one, takes an event loop."""
    return any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (function, getattr(function, "__call__", None))  # noqa: B004  # not whether it is callable
    )


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs on the calling thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()  # guards _loop


def handlers_loop() -> asyncio.AbstractEventLoop:
    """The loop of coroutines that were registered where no loop ran; in a daemon thread, started on first use."""
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

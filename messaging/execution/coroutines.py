"""Coroutine functions as callbacks of applications, and the event loop that runs them.

A callback runs on the loop that was running when it was registered. Callbacks registered without a running loop share
one.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from messaging.execution.threads import start_thread
from messaging.forking import per_process


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


@per_process
def handlers_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of callbacks registered without a running loop. Starts its daemon thread on first use."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()

    start_thread(run, "messaging-handlers")
    return loop

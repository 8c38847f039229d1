"""Calling handlers: their names for people, and awaiting their results on an event loop of another thread."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import time
from typing import Any, Final

from messaging.errors import ClosedError, DeadlineError

#: interval at which a waiting thread checks that the event loop is still open, seconds
_CHECK_INTERVAL: Final = 0.5


def name_of(function: Any) -> str:
    """Return the name of a function for people: a method with its object's class, a callable object by its class."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.ismethod(function):
        owner = function.__self__
        class_ = owner if isinstance(owner, type) else type(owner)
        return f"{class_.__qualname__}.{getattr(function, '__name__', '?')}"
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__qualname__


def run_elsewhere(awaitable: Any, loop: asyncio.AbstractEventLoop, timeout: float = 0) -> Any:
    """Await ``awaitable`` on another thread's event loop, and wait for its result.

    Args:
        awaitable: awaited on ``loop``.
        loop: the event loop.
        timeout: maximum wait, seconds; 0: unlimited. The awaitable is cancelled when it has passed.

    Raises:
        DeadlineError: ``timeout`` passed.
        ClosedError: the loop is closed.
        Exception: raised by the awaitable.
    """
    deadline = time.monotonic() + timeout if timeout else math.inf
    waiting = _awaited(awaitable)
    try:
        future = asyncio.run_coroutine_threadsafe(waiting, loop)
    except RuntimeError:
        _abandon(waiting, awaitable)
        raise ClosedError("the event loop it ran on is closed") from None
    while True:
        try:
            return future.result(max(0.0, min(_CHECK_INTERVAL, deadline - time.monotonic())))
        except TimeoutError:
            if future.done():
                raise  # raised by the awaitable itself
            if loop.is_closed():
                _abandon(waiting, awaitable)
                raise ClosedError("the event loop it ran on is closed") from None
            if time.monotonic() >= deadline:
                future.cancel()
                raise DeadlineError(f"it took more than {timeout:g} s") from None


async def _awaited(awaitable: Any) -> Any:
    try:
        return await awaitable
    except (KeyboardInterrupt, SystemExit) as error:
        if threading.current_thread() is threading.main_thread():
            raise
        # it would end the event loop, which other handlers share
        raise RuntimeError(f"a handler raised {type(error).__name__}") from error


def _abandon(*awaitables: Any) -> None:
    """Close the coroutines that have not started, so that asyncio does not warn that they were never awaited."""
    for each in awaitables:
        if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
            each.close()

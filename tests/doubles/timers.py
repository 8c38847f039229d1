"""Long timers that elapse when a test says so: nothing hangs on how long a busy machine takes for what comes before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from messaging.execution.clock import Clock

#: what counts as long, seconds
_LONG = 20.0


class LongTimers:
    """The timers of 20 s and more that were set on event loops."""

    def __init__(self) -> None:
        self._set: list[tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle, Callable[[], object]]] = []

    def call_later(
        self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        """Set a timer, in the place of ``Clock.call_later``."""
        handle = loop.call_later(delay, callback, *args)
        if delay >= _LONG:
            self._set.append((loop, handle, lambda: callback(*args)))
        return handle

    def elapse(self) -> None:
        """Let those elapse that are not cancelled, in the next turns of their loops. On any thread."""
        elapsed, self._set = self._set, []
        for loop, handle, call in elapsed:
            loop.call_soon_threadsafe(self._run, handle, call)

    @staticmethod
    def _run(handle: asyncio.TimerHandle, call: Callable[[], object]) -> None:
        if not handle.cancelled():
            handle.cancel()
            call()


@pytest.fixture
def long_timers(monkeypatch: pytest.MonkeyPatch) -> LongTimers:
    """Timers of 20 s and more elapse when the test says so."""
    timers = LongTimers()
    monkeypatch.setattr(Clock, "call_later", staticmethod(timers.call_later))
    return timers

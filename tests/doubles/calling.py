"""A call in a thread of its own, and a look at where threads are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

from messaging.execution import Flag
from messaging.testing import clock as virtual
from messaging.testing.waiting import PATIENCE, eventually, in_thread

T = TypeVar("T")


def until_waiting(ident: int | None) -> None:
    """Wait until the thread ``ident`` waits as the threads of this project do: in :meth:`Flag.wait`."""

    def is_waiting() -> bool:
        frame: FrameType | None = sys._current_frames()[ident or 0]
        while frame is not None and frame.f_code.co_filename in (threading.__file__, virtual.__file__):
            frame = frame.f_back  # a virtual clock waits in Python
        return frame is not None and frame.f_code is Flag.wait.__code__

    eventually(is_waiting, "a thread that waits")


def until_left(ident: int, module: ModuleType) -> None:
    """Wait until the thread ``ident`` runs no code of ``module``."""

    def has_left() -> bool:
        frame = sys._current_frames().get(ident)
        while frame is not None and frame.f_code.co_filename != module.__file__:
            frame = frame.f_back
        return frame is None

    eventually(has_left, f"a thread that has left {module.__name__}")


class Calling(Generic[T]):
    """Calls a function in a thread of its own."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._idents: list[int] = []

        def call() -> T:
            self._idents.append(threading.get_ident())
            return function(*args)

        self._outcome = in_thread(call)

    def until_waiting(self) -> None:
        """Wait until the call waits."""
        eventually(lambda: self._idents, "a thread")
        until_waiting(self._idents[0])

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self._outcome.done()

    def result(self, timeout: float = PATIENCE) -> T:
        """Return the result, or raise the error of the call."""
        return self._outcome.result(timeout)

    def exception(self, timeout: float = PATIENCE) -> BaseException | None:
        """Return the error of the call."""
        return self._outcome.exception(timeout)

"""A call in a thread of its own, and a look at where threads are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

from messaging.execution import Flag
from messaging.testing import clock as virtual
from tests.doubles.fake import PATIENCE, until

T = TypeVar("T")


def until_waiting(ident: int | None) -> None:
    """Wait until the thread ``ident`` waits as the threads of this project do: in :meth:`Flag.wait`."""

    def is_waiting() -> bool:
        frame: FrameType | None = sys._current_frames()[ident or 0]
        while frame is not None and frame.f_code.co_filename in (threading.__file__, virtual.__file__):
            frame = frame.f_back  # a virtual clock waits in Python
        return frame is not None and frame.f_code is Flag.wait.__code__

    until(is_waiting, "a thread that waits")


def until_left(ident: int, module: ModuleType) -> None:
    """Wait until the thread ``ident`` runs no code of ``module``."""

    def has_left() -> bool:
        frame = sys._current_frames().get(ident)
        while frame is not None and frame.f_code.co_filename != module.__file__:
            frame = frame.f_back
        return frame is None

    until(has_left, f"a thread that has left {module.__name__}")


class Calling(Generic[T]):
    """Calls a function in a thread of its own."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._outcome: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        try:
            self._outcome.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001  # handed to the test
            self._outcome.set_exception(error)

    def until_waiting(self) -> None:
        """Wait until the call waits."""
        until_waiting(self._thread.ident)

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self._outcome.done()

    def result(self, timeout: float = PATIENCE) -> T:
        """Return the result, or raise the error of the call."""
        return self._outcome.result(timeout)

    def exception(self, timeout: float = PATIENCE) -> BaseException | None:
        """Return the error of the call."""
        return self._outcome.exception(timeout)

"""Signals: an exception of a signal handler, such as ``KeyboardInterrupt``, may be raised between any two instructions.

It is raised on the main thread. A step that must not be left half-done has a way back, which :class:`on_failure` takes
whatever is raised. Functions that wait are in :mod:`messaging.execution`.

Imports nothing of this project.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class on_failure:  # noqa: N801  # reads as a statement: with on_failure(file.close)
    """Call a function if the block of a ``with`` statement raises; the exception goes on, an interrupt too.

    ::

        file = open(path)
        with on_failure(file.close):
            header = read_header(file)

    The function is called with the ``arguments``, on the thread of the block. An exception of its own takes the place
    of the first one, which is its context.

    Args:
        undo: the way back: closes, releases or forgets the result of the steps before.
        arguments: of ``undo``.
    """

    __slots__ = ("_arguments", "_undo")

    def __init__(self, undo: Callable[..., object], *arguments: object) -> None:
        self._undo = undo
        self._arguments = arguments

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._undo(*self._arguments)


def is_interrupt(error: BaseException) -> bool:
    """Return whether ``error`` ends the program: it is not the failure of the code that happened to run."""
    return isinstance(error, (KeyboardInterrupt, SystemExit)) and threading.current_thread() is threading.main_thread()

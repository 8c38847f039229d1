"""Signals: an exception of a signal handler, such as ``KeyboardInterrupt``, may be raised between any two instructions.

It is raised on the main thread, and nothing is lost, settled wrongly or hidden by it. Three things keep that promise:

- A call is handed to another thread or loop, once for all that ask for it: :class:`WakeUp`.
- A step that must not be left half-done has a way back, which :class:`on_failure` takes whatever is raised.
- What a call has in hand stays where the next call finds it; :func:`taking` puts it there.

Code of the application may raise anything, also ``SystemExit``: :func:`attempt` calls it where the exception must not
reach the thread. Functions that wait are in :mod:`messaging.execution`.

Imports nothing of this project.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from types import TracebackType
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def attempt(function: Callable[..., object], *arguments: object) -> BaseException | None:
    """Call a function; return what it raised, or ``None`` if it returned."""
    try:
        function(*arguments)
    except BaseException as error:  # noqa: BLE001  # for the caller
        return error
    return None


def taking(queue: deque[T]) -> Iterator[T]:
    """Return an iterator that takes items off the left end of a queue. It raises ``IndexError`` while that is empty.

    ``for self.item in taking(queue): break`` takes an item and stores it in one step. Python looks for signals after a
    call, but not where a ``for`` statement assigns: an item that ``popleft()`` returned could be lost.
    """
    return map(type(queue).popleft, repeat(queue))


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

    def call(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``step(...)``, in the place of a block, for a result that must reach the caller.

        At the end of a block a signal handler may raise once more; between the end of ``step`` and the end of this
        method none does.
        """
        try:
            return step(*args, **kwargs)
        except BaseException:
            self._undo(*self._arguments)
            raise


class WakeUp:
    """Has a function called on another thread or loop, once for all requests before that. Thread safe.

    Args:
        hand_over: hands the function over, such as ``partial(engine.call, self._flush)``. First of all the function
            sets :attr:`is_pending` to false: a request from then on hands it over again.

    Attributes:
        is_pending: the function is handed over, and has not begun. Check it before a :meth:`request`.
    """

    __slots__ = ("_hand_over", "is_pending")

    def __init__(self, hand_over: Callable[[], object]) -> None:
        self._hand_over = hand_over
        self.is_pending = False

    def request(self) -> None:
        """Hand the function over. If an interrupt ends this call, so does the next request: it may be called twice."""
        try:
            self.is_pending = True
            self._hand_over()
        except BaseException:
            self.is_pending = False
            raise


def is_interrupt(error: BaseException) -> bool:
    """Return whether ``error`` ends the program: it is not the failure of the code that happened to run."""
    return isinstance(error, (KeyboardInterrupt, SystemExit)) and threading.current_thread() is threading.main_thread()

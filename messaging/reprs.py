"""What error reporters show beside an error's text: objects whose constructor failed, and variables of frames."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

S = TypeVar("S")
E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Return ``error`` without its traceback, and those of the errors behind it without theirs.

    For errors of a library that was given a password: its frames hold it in their variables.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            pending += [each.__cause__, each.__context__]
    return error


def tolerant(method: Callable[[S], str]) -> Callable[[S], str]:
    """Have a ``__repr__`` answer also for an object that lacks attributes because its constructor raised.

    Debuggers and error reporters show such an object: it is the ``self`` of a frame in the traceback.
    """

    @functools.wraps(method)
    def __repr__(self: Any) -> str:  # noqa: N807  # it becomes one
        try:
            return method(self)
        except AttributeError:
            return f"<{type(self).__name__}, whose constructor failed>"

    return __repr__
